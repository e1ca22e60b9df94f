import java.util.Arrays;
import java.util.Properties;
import org.apache.kafka.common.errors.SerializationException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.LogAndContinueExceptionHandler;
import org.apache.kafka.streams.errors.LogAndContinueProcessingExceptionHandler;
import org.apache.kafka.streams.kstream.Consumed;

/** Kafka Streams with a topology that fails for every record. Values that begin with `!` cannot be deserialized. */
public final class Streams {
    private Streams() {}

    /** Arguments: brokers, source topic, dead-letter topic, application, an empty directory. */
    public static void main(String[] arguments) {
        var properties = new Properties();
        properties.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        properties.put(StreamsConfig.APPLICATION_ID_CONFIG, arguments[3]);
        properties.put(StreamsConfig.STATE_DIR_CONFIG, arguments[4]);
        properties.put(StreamsConfig.ERRORS_DEAD_LETTER_QUEUE_TOPIC_NAME_CONFIG, arguments[2]);
        properties.put(
                StreamsConfig.DESERIALIZATION_EXCEPTION_HANDLER_CLASS_CONFIG, LogAndContinueExceptionHandler.class);
        properties.put(
                StreamsConfig.PROCESSING_EXCEPTION_HANDLER_CLASS_CONFIG,
                LogAndContinueProcessingExceptionHandler.class);
        var builder = new StreamsBuilder();
        var orders = Serdes.serdeFrom(new ByteArraySerializer(), new Orders());
        builder.stream(arguments[1], Consumed.with(Serdes.ByteArray(), orders)).foreach((key, order) -> {
            throw new IllegalStateException("no customer " + Arrays.toString(key));
        });
        new KafkaStreams(builder.build(), properties).start();
    }

    private static final class Orders extends ByteArrayDeserializer {
        @Override
        public byte[] deserialize(String topic, byte[] value) {
            if (value != null && value.length > 0 && value[0] == '!') {
                throw new SerializationException("no order");
            }
            return value;
        }
    }
}
