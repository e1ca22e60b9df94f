import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.connect.cli.ConnectStandalone;
import org.apache.kafka.connect.connector.Task;
import org.apache.kafka.connect.json.JsonConverter;
import org.apache.kafka.connect.sink.SinkConnector;
import org.apache.kafka.connect.sink.SinkRecord;
import org.apache.kafka.connect.sink.SinkTask;

/** Kafka Connect with a connector that expects keys in JSON, and reports those that are not to a dead-letter topic. */
public final class Connect {
    private Connect() {}

    /** Arguments: brokers, source topic, dead-letter topic, name of the connector, an empty directory. */
    public static void main(String[] arguments) throws IOException {
        var directory = Path.of(arguments[4]);
        var worker = write(
                directory.resolve("worker.properties"),
                "bootstrap.servers=" + arguments[0],
                "key.converter=" + JsonConverter.class.getName(),
                "value.converter=org.apache.kafka.connect.converters.ByteArrayConverter",
                "offset.storage.file.filename=" + directory.resolve("offsets"),
                "plugin.path=" + directory,
                // Instead of reading all classes.
                "plugin.discovery=service_load",
                "listeners=http://127.0.0.1:0");
        var connector = write(
                directory.resolve("connector.properties"),
                "name=" + arguments[3],
                "connector.class=" + Sink.class.getName(),
                "topics=" + arguments[1],
                "errors.tolerance=all",
                "errors.deadletterqueue.topic.name=" + arguments[2],
                "errors.deadletterqueue.topic.replication.factor=1",
                "errors.deadletterqueue.context.headers.enable=true");
        ConnectStandalone.main(new String[] {worker, connector});
    }

    private static String write(Path file, String... lines) throws IOException {
        return Files.write(file, List.of(lines)).toString();
    }

    /** Its task accepts every record. */
    public static final class Sink extends SinkConnector {
        @Override
        public void start(Map<String, String> properties) {}

        @Override
        public Class<? extends Task> taskClass() {
            return SinkAll.class;
        }

        @Override
        public List<Map<String, String>> taskConfigs(int maximum) {
            return List.of(Map.of());
        }

        @Override
        public void stop() {}

        @Override
        public ConfigDef config() {
            return new ConfigDef();
        }

        @Override
        public String version() {
            return "1";
        }
    }

    /** Accepts every record. */
    public static final class SinkAll extends SinkTask {
        @Override
        public void start(Map<String, String> properties) {}

        @Override
        public void put(Collection<SinkRecord> records) {}

        @Override
        public void stop() {}

        @Override
        public String version() {
            return "1";
        }
    }
}
