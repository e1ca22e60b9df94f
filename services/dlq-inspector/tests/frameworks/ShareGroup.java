import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** A member of a share group that rejects every record. */
public final class ShareGroup {
    private ShareGroup() {}

    /** Arguments: brokers, source topic, dead-letter topic, share group, whether dead letters have the key and the value of the record. */
    public static void main(String[] arguments) throws ExecutionException, InterruptedException {
        String group = arguments[3];
        try (var admin = Admin.create(Map.<String, Object>of("bootstrap.servers", arguments[0]))) {
            set(admin, ConfigResource.Type.TOPIC, arguments[2], Map.of("errors.deadletterqueue.group.enable", "true"));
            set(admin, ConfigResource.Type.GROUP, group, Map.of(
                    "share.auto.offset.reset", "earliest",
                    "errors.deadletterqueue.topic.name", arguments[2],
                    "errors.deadletterqueue.copy.record.enable", arguments[4]));
        }
        Map<String, Object> settings = Map.of(
                ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0],
                ConsumerConfig.GROUP_ID_CONFIG, group,
                ConsumerConfig.SHARE_ACKNOWLEDGEMENT_MODE_CONFIG, "explicit");
        try (var consumer =
                new KafkaShareConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(List.of(arguments[1]));
            while (true) {
                for (var record : consumer.poll(Duration.ofSeconds(1))) {
                    consumer.acknowledge(record, AcknowledgeType.REJECT);
                }
            }
        }
    }

    private static void set(Admin admin, ConfigResource.Type type, String name, Map<String, String> settings)
            throws ExecutionException, InterruptedException {
        Collection<AlterConfigOp> changes = settings.entrySet().stream()
                .map(setting -> new ConfigEntry(setting.getKey(), setting.getValue()))
                .map(entry -> new AlterConfigOp(entry, AlterConfigOp.OpType.SET))
                .toList();
        admin.incrementalAlterConfigs(Map.of(new ConfigResource(type, name), changes)).all().get();
    }
}
