import jakarta.enterprise.context.ApplicationScoped;
import java.io.IOException;
import java.util.Map;
import java.util.concurrent.CompletionStage;
import org.apache.kafka.common.errors.SerializationException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.eclipse.microprofile.reactive.messaging.Incoming;
import org.eclipse.microprofile.reactive.messaging.Message;
import org.jboss.weld.environment.se.Weld;

/**
 * SmallRye Reactive Messaging, which Quarkus uses, with a method that fails for every record. Values that begin with `!` cannot be
 * deserialized.
 */
public final class SmallRye {
    private SmallRye() {}

    /** Arguments: brokers, source topic, dead-letter topic, consumer group. */
    public static void main(String[] arguments) {
        // Of the producer of dead letters, whose serializer is otherwise named like the deserializer.
        System.setProperty(
                "mp.messaging.incoming.orders.dead-letter-queue.value.serializer",
                "org.apache.kafka.common.serialization.ByteArraySerializer");
        var channel = Map.of(
                "connector", "smallrye-kafka",
                "bootstrap.servers", arguments[0],
                "topic", arguments[1],
                "failure-strategy", "dead-letter-queue",
                "dead-letter-queue.topic", arguments[2],
                "group.id", arguments[3],
                "auto.offset.reset", "earliest",
                "key.deserializer", ByteArrayDeserializer.class.getName(),
                "value.deserializer", Orders.class.getName(),
                "fail-on-deserialization-failure", "false");
        channel.forEach((name, value) -> System.setProperty("mp.messaging.incoming.orders." + name, value));
        new Weld().addBeanClass(Reader.class).initialize();
    }

    /** Reads orders. */
    @ApplicationScoped
    public static class Reader {
        /** Fails. */
        @Incoming("orders")
        public CompletionStage<Void> read(Message<byte[]> order) {
            return order.nack(new IllegalStateException("no such customer", new IOException("connection refused")));
        }
    }

    /** Refuses some values. */
    public static final class Orders extends ByteArrayDeserializer {
        @Override
        public byte[] deserialize(String topic, byte[] value) {
            if (value != null && value.length > 0 && value[0] == '!') {
                throw new SerializationException("no order");
            }
            return value;
        }
    }
}
