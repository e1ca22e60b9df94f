import com.fasterxml.jackson.databind.ObjectMapper;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Places and pays orders. An order and the job that reminds of its payment are written in one Kafka transaction, and so are
 * a payment and the cancellation of that job.
 *
 * <pre>
 * java -cp 'kafka/libs/*' Orders.java BROKERS INGEST APP ORDERS NAME place ORDER SECONDS [commit|abort|wait]
 * java -cp 'kafka/libs/*' Orders.java BROKERS INGEST APP ORDERS NAME pay ORDER JOB [commit|abort|wait]
 * </pre>
 *
 * INGEST is the ingest topic of the scheduler, APP its application for reminders, and ORDERS a topic for orders and
 * payments. NAME is the transactional id: each process that runs at the same time needs its own, and keeps it when it is
 * started again. {@code abort} ends the transaction with nothing written, and {@code wait} leaves it open until the process
 * is killed.
 */
public class Orders {
    static final ObjectMapper JSON = new ObjectMapper();

    final KafkaProducer<byte[], byte[]> producer;
    final String ingest;
    final String app;
    final String orders;

    Orders(KafkaProducer<byte[], byte[]> producer, String ingest, String app, String orders) {
        this.producer = producer;
        this.ingest = ingest;
        this.app = app;
        this.orders = orders;
    }

    /** Writes an order and schedules its reminder. Returns the id of the job. */
    String place(String order, String seconds) throws Exception {
        String reminder = jobId(command(order, Map.of(
                "appName", app,
                "idempotencyKey", order,
                "delay", seconds + "s",
                "key", order,
                "jobData", Map.of("order", order))));
        event(order, Map.of("event", "placed", "order", order, "reminder", reminder));
        return reminder;
    }

    /** Writes a payment and cancels the reminder, whose id is in the record of the order. */
    String pay(String order, String reminder) throws Exception {
        command(order, Map.of("cancel", reminder));
        event(order, Map.of("event", "paid", "order", order));
        return reminder;
    }

    /** Writes a command. The key is the same for all commands of an order, so they are in one partition. */
    RecordMetadata command(String order, Map<String, Object> request) throws Exception {
        return write(ingest, app + "\0" + order, request);
    }

    RecordMetadata event(String order, Map<String, Object> content) throws Exception {
        return write(orders, order, content);
    }

    /** Writes a record as a part of the open transaction, and waits until Kafka has confirmed it. */
    RecordMetadata write(String topic, String key, Map<String, Object> value) throws Exception {
        byte[] bytes = key.getBytes(StandardCharsets.UTF_8);
        return producer.send(new ProducerRecord<>(topic, bytes, JSON.writeValueAsBytes(value))).get();
    }

    /** The id of a job is a ULID of the timestamp, the partition and the offset of its request. */
    static String jobId(RecordMetadata record) {
        if (!record.hasOffset()) { // a retry found that it was written before
            throw new IllegalStateException("the offset of the request is unknown");
        }
        BigInteger number = BigInteger.valueOf(record.timestamp()).shiftLeft(16)
                .or(BigInteger.valueOf(record.partition())).shiftLeft(64)
                .or(BigInteger.valueOf(record.offset()));
        StringBuilder id = new StringBuilder();
        for (int shift = 125; shift >= 0; shift -= 5) {
            id.append("0123456789ABCDEFGHJKMNPQRSTVWXYZ".charAt(number.shiftRight(shift).intValue() & 31));
        }
        return id.toString();
    }

    static Map<String, Object> settings(String brokers, String name) {
        return Map.of(
                "bootstrap.servers", brokers,
                "transactional.id", name,
                // While a transaction is open, later commands in the same partition wait. If the producer dies, its
                // transaction is aborted after this time.
                "transaction.timeout.ms", 5_000);
    }

    void run(String verb, String order, String argument, String end) throws Exception {
        producer.initTransactions(); // ends a transaction that a previous process with this name has left open
        producer.beginTransaction();
        String job;
        try {
            job = verb.equals("place") ? place(order, argument) : pay(order, argument);
        } catch (Exception error) {
            producer.abortTransaction();
            throw error;
        }
        if (end.equals("wait")) {
            System.out.println("open " + order + " " + job);
            Thread.sleep(Long.MAX_VALUE);
        } else if (end.equals("abort")) {
            producer.abortTransaction();
            System.out.println("aborted " + order + " " + job);
        } else {
            producer.commitTransaction();
            System.out.println("committed " + order + " " + job);
        }
    }

    public static void main(String[] arguments) throws Exception {
        var settings = settings(arguments[0], arguments[4]);
        var serializer = new ByteArraySerializer();
        try (var producer = new KafkaProducer<>(settings, serializer, serializer)) {
            String end = arguments.length > 8 ? arguments[8] : "commit";
            new Orders(producer, arguments[1], arguments[2], arguments[3])
                    .run(arguments[5], arguments[6], arguments[7], end);
        }
    }
}
