import com.fasterxml.jackson.databind.ObjectMapper;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.SparkSession;

/** Creates the tables and views of SQL for the tables in LAKE: {@code Spark LAKE SQL QUERY...}. Prints the answers, as JSON. */
public final class Spark {
    private Spark() {}

    public static void main(String[] arguments) throws Exception {
        SparkSession spark = SparkSession.builder()
                .master("local[1]")
                .config("spark.ui.enabled", false)
                .config("spark.log.level", "WARN")
                .config("spark.driver.bindAddress", "127.0.0.1")
                .config("spark.driver.host", "127.0.0.1")
                .config("spark.sql.shuffle.partitions", 1)
                .config("spark.sql.session.timeZone", "UTC")
                .config("spark.sql.datetime.java8API.enabled", true)
                .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
                .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
                .getOrCreate();
        String text = "";
        for (String file : List.of("spark.sql", "views.sql")) {
            text += Files.readString(Path.of(arguments[1], file));
        }
        String statements = text.replaceAll("(?m)^--.*$", "").replace("LAKE", arguments[0]);
        for (String statement : statements.split(";")) {
            if (!statement.isBlank()) {
                spark.sql(statement);
            }
        }
        List<List<List<String>>> answers = new ArrayList<>();
        for (String query : Arrays.asList(arguments).subList(2, arguments.length)) {
            List<List<String>> rows = new ArrayList<>();
            for (Row row : spark.sql(query).collectAsList()) {
                List<String> cells = new ArrayList<>();
                for (int cell = 0; cell < row.size(); cell++) {
                    cells.add(row.isNullAt(cell) ? "NULL" : row.get(cell).toString());
                }
                rows.add(cells);
            }
            answers.add(rows);
        }
        System.out.println(new ObjectMapper().writeValueAsString(answers));
        spark.stop();
    }
}
