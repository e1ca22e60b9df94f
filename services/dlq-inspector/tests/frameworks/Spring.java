import java.util.Arrays;
import java.util.Map;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.SerializationException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaProducerFactory;
import org.springframework.kafka.core.KafkaTemplate;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.kafka.listener.DeadLetterPublishingRecoverer;
import org.springframework.kafka.listener.DefaultErrorHandler;
import org.springframework.kafka.listener.KafkaMessageListenerContainer;
import org.springframework.kafka.listener.MessageListener;
import org.springframework.kafka.support.serializer.ErrorHandlingDeserializer;
import org.springframework.util.backoff.FixedBackOff;

/** Spring for Apache Kafka with a listener that fails for every record, three times. Values that begin with `!` cannot be deserialized. */
public final class Spring {
    private Spring() {}

    /** Arguments: brokers, source topic, dead-letter topic, consumer group. */
    public static void main(String[] arguments) {
        String deadLetters = arguments[2];
        Map<String, Object> consumer = Map.of(
                ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0],
                ConsumerConfig.AUTO_OFFSET_RESET_CONFIG, "earliest");
        Map<String, Object> producer = Map.of(ProducerConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        var consumers = new DefaultKafkaConsumerFactory<>(
                consumer, new ByteArrayDeserializer(), new ErrorHandlingDeserializer<>(new Orders()));
        var producers = new DefaultKafkaProducerFactory<>(producer, new ByteArraySerializer(), new ByteArraySerializer());
        var recoverer = new DeadLetterPublishingRecoverer(
                new KafkaTemplate<>(producers),
                (record, exception) -> new TopicPartition(deadLetters, record.partition()));
        // Spring removes it by default.
        recoverer.setRetainExceptionHeader(true);
        var properties = new ContainerProperties(arguments[1]);
        properties.setGroupId(arguments[3]);
        properties.setDeliveryAttemptHeader(true);
        MessageListener<byte[], byte[]> listener = record -> {
            throw new IllegalStateException("no customer " + Arrays.toString(record.key()));
        };
        properties.setMessageListener(listener);
        var container = new KafkaMessageListenerContainer<>(consumers, properties);
        container.setCommonErrorHandler(new DefaultErrorHandler(recoverer, new FixedBackOff(0, 2)));
        container.start();
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
