import java.io.ByteArrayOutputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodySubscriber;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.time.Duration;
import java.time.Instant;
import java.time.format.DateTimeFormatter;
import java.time.format.DateTimeFormatterBuilder;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.Collection;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Flow;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Predicate;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.InvalidRecordException;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.RecordTooLargeException;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * A worker for a pipeline of Redeliver. It uses the protocol only: see "Foreign workers" in docs/protocol.md.
 *
 * <pre>java -cp 'kafka/libs/*' ForeignWorker.java BROKERS PIPELINE OUTPUT URL INSTANCE TIER...</pre>
 *
 * {@link #handle} is the work itself: replace it by your own. The rest turns its results and failures into the records
 * of the protocol, and writes them in one transaction with the offsets of the records that it has processed.
 *
 * <p>If a transaction fails, except because a topic refuses a record, the program ends. Let a supervisor start it again:
 * it then continues after the last complete transaction.
 */
public class ForeignWorker {
    /** Records per transaction. */
    static final int MAX_BATCH = 200;
    static final int CONCURRENCY = 16;
    /** Of a call, in seconds. */
    static final long TIMEOUT = 10;
    /** In bytes. */
    static final int MAX_RESPONSE = 1_000_000;
    /** In seconds. */
    static final long MAX_RETRY_AFTER = 3_600;
    /** The times that {@code original-timestamp} can name: from the year 1 to 9999-12-31T23:59:59.999Z. */
    static final long EARLIEST = -62_135_596_800_000L;
    static final long LATEST = 253_402_300_799_999L;
    /** By how much the clock of the retry tier can be ahead. */
    static final long CLOCK_SKEW_MS = 300_000;
    static final DateTimeFormatter MILLISECONDS = new DateTimeFormatterBuilder().appendInstant(3).toFormatter();

    static final Set<String> RESERVED = Set.of(
            "process-after", "retry-count", "return-topic", "pipeline", "payload-omitted", "payload-omitted-hash",
            "original-topic", "original-partition", "original-offset", "original-timestamp",
            "error-class", "error-code", "error-message", "error-response", "error-timestamp");
    /**
     * Headers of redrives. They are not reserved, but stay when a payload is left out: the last one of each name, unless
     * it is longer than this.
     */
    static final List<String> REDRIVES =
            List.of("redrive-id", "redrive-count", "redrive-time", "redrive-of", "redrive-edited");
    static final int LONGEST_OF_REDRIVES = 300;

    final String brokers;
    final String pipeline;
    final String output;
    final URI url;
    final String instance;
    final String due;
    final String dead;
    /** The delay before each retry in milliseconds, by the name of its tier. Ascending, as in the configuration. */
    final Map<String, Long> tiers = new LinkedHashMap<>();
    final HttpClient http = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();

    ForeignWorker(String[] arguments) {
        brokers = arguments[0];
        pipeline = arguments[1];
        output = arguments[2];
        url = URI.create(arguments[3]);
        instance = arguments[4];
        due = pipeline + "-retry-due";
        dead = pipeline + "-dlq";
        Map<String, Long> units = Map.of("ms", 1L, "s", 1_000L, "m", 60_000L, "h", 3_600_000L, "d", 86_400_000L);
        for (String tier : List.of(arguments).subList(5, arguments.length)) {
            String unit = tier.replaceFirst("[0-9]+", "");
            tiers.put(tier, Long.parseLong(tier.replace(unit, "")) * units.get(unit));
        }
    }

    /** A failed attempt. The class is transient, throttled, permanent or malformed. */
    static class Failure extends Exception {
        static final long serialVersionUID = 1;
        final String errorClass;
        final String code;
        /** In seconds, if the other side has asked for a delay; otherwise 0. */
        final long retryAfter;

        Failure(String errorClass, String code, String message, long retryAfter) {
            super(message);
            this.errorClass = errorClass;
            this.code = code;
            this.retryAfter = retryAfter;
        }

        static Failure malformed(String header, String problem) {
            return new Failure("malformed", "header." + header, "header `" + header + "` " + problem, 0);
        }
    }

    /** Returns the value of the result. It can run more than once for a record, always with the same key. */
    byte[] handle(byte[] value, String idempotencyKey) throws Failure, InterruptedException {
        HttpRequest request = HttpRequest.newBuilder(url)
                .header("Idempotency-Key", idempotencyKey)
                .header("Content-Type", "application/octet-stream")
                .POST(BodyPublishers.ofByteArray(value == null ? new byte[0] : value))
                .build();
        HttpResponse<byte[]> response;
        // The timeout of a request would end with the headers of the response; this one includes the body.
        CompletableFuture<HttpResponse<byte[]>> call = http.sendAsync(request, head -> new LimitedBody());
        try {
            response = call.get(TIMEOUT, TimeUnit.SECONDS);
        } catch (TimeoutException error) {
            call.cancel(true);
            String message = "POST " + url + ": no complete response within " + TIMEOUT + "s";
            throw new Failure("transient", "http.timeout", message, 0);
        } catch (ExecutionException error) {
            throw new Failure("transient", "http.connect", "POST " + url + ": " + error.getCause(), 0);
        }
        int status = response.statusCode();
        if (status >= 200 && status < 300) {
            if (response.body().length > MAX_RESPONSE) {
                String message = "POST " + url + ": the response exceeds " + MAX_RESPONSE + " bytes";
                throw new Failure("permanent", "http.response-too-large", message, 0);
            }
            return response.body();
        }
        String asked = response.headers().firstValue("Retry-After").orElse("");
        long retryAfter = asked.matches("[0-9]{1,9}") ? Math.min(Long.parseLong(asked), MAX_RETRY_AFTER) : 0;
        boolean isTransient = status == 408 || status == 425 || (status >= 500 && status != 501 && status != 505);
        String errorClass = isTransient ? "transient" : "permanent";
        if (status == 429 || (status == 503 && retryAfter > 0)) {
            errorClass = "throttled";
        }
        String message = "POST " + url + " answered " + status;
        throw new Failure(errorClass, "http." + status, message, errorClass.equals("throttled") ? retryAfter : 0);
    }

    /** Reads a body up to the limit, and one more byte if it is longer. */
    static class LimitedBody implements BodySubscriber<byte[]> {
        final ByteArrayOutputStream read = new ByteArrayOutputStream();
        final CompletableFuture<byte[]> body = new CompletableFuture<>();
        Flow.Subscription subscription;

        @Override
        public CompletionStage<byte[]> getBody() {
            return body;
        }

        @Override
        public void onSubscribe(Flow.Subscription subscription) {
            this.subscription = subscription;
            subscription.request(Long.MAX_VALUE);
        }

        @Override
        public void onNext(List<ByteBuffer> parts) {
            for (ByteBuffer part : parts) {
                byte[] bytes = new byte[Math.min(part.remaining(), MAX_RESPONSE + 1 - read.size())];
                part.get(bytes);
                read.writeBytes(bytes);
            }
            if (read.size() > MAX_RESPONSE) {
                subscription.cancel();
                onComplete();
            }
        }

        @Override
        public void onError(Throwable error) {
            body.completeExceptionally(error);
        }

        @Override
        public void onComplete() {
            body.complete(read.toByteArray());
        }
    }

    /** A record, where it has entered the pipeline, and how many attempts have failed before this one. */
    class Attempt implements Callable<ProducerRecord<byte[], byte[]>> {
        final ConsumerRecord<byte[], byte[]> record;
        Map<String, String> origin = new LinkedHashMap<>();
        int failed = 0;

        Attempt(ConsumerRecord<byte[], byte[]> record) {
            this.record = record;
            origin.put("original-topic", record.topic());
            origin.put("original-partition", Integer.toString(record.partition()));
            origin.put("original-offset", Long.toString(record.offset()));
            // Producers can write any time. One that has no text is omitted; -1 is none.
            long timestamp = record.timestamp();
            boolean hasTimestamp = record.timestampType() != TimestampType.NO_TIMESTAMP_TYPE && timestamp != -1;
            if (hasTimestamp && timestamp >= EARLIEST && timestamp <= LATEST) {
                origin.put("original-timestamp", text(timestamp));
            }
        }

        /** Reads the headers of a retry. They are checked, because other programs can write to the due topic too. */
        void readRetry() throws Failure {
            Map<String, byte[]> reserved = new HashMap<>();
            for (Header header : record.headers()) {
                if (RESERVED.contains(header.key()) && reserved.containsKey(header.key())) {
                    throw Failure.malformed(header.key(), "occurs more than once");
                }
                if (RESERVED.contains(header.key())) {
                    reserved.put(header.key(), header.value());
                }
            }
            Map<String, String> named = new LinkedHashMap<>();
            named.put("original-topic", checked(reserved, "original-topic", topic -> topic.matches("[\\w.-]{1,249}")));
            named.put("original-partition", checked(reserved, "original-partition", text -> number(text) < 1L << 31));
            named.put("original-offset", checked(reserved, "original-offset", text -> number(text) >= 0));
            if (reserved.containsKey("original-timestamp")) {
                named.put("original-timestamp", checked(reserved, "original-timestamp", text -> millis(text) <= LATEST));
            }
            origin = named;
            failed = (int) number(checked(reserved, "retry-count", text -> number(text) <= 100_000));
            if (reserved.containsKey("process-after")) {
                // No tier releases a record early, so no tier has released one that is not due.
                checked(reserved, "process-after", text -> millis(text) <= System.currentTimeMillis() + CLOCK_SKEW_MS);
            }
        }

        /** Processes the record, and returns what to write for it. */
        @Override
        public ProducerRecord<byte[], byte[]> call() throws InterruptedException {
            try {
                for (Header header : record.headers()) {
                    if (header.key().contains("\uFFFD")) { // by which Java replaces what is not UTF-8
                        throw new Failure("malformed", "header.name", "the name of a header is not UTF-8", 0);
                    }
                }
                if (record.topic().equals(due)) {
                    readRetry();
                }
                String key = String.join("-",
                        origin.get("original-topic"), origin.get("original-partition"), origin.get("original-offset"));
                return output(output, handle(record.value(), key), failed, Map.of());
            } catch (Failure failure) {
                return route(failure);
            } catch (RuntimeException error) { // a defect of `handle` must not stop the partition
                String message = "the handler failed: " + error.getClass().getSimpleName();
                return route(new Failure("transient", "handler.error", message, 0));
            }
        }

        ProducerRecord<byte[], byte[]> route(Failure failure) {
            boolean isTransient = failure.errorClass.equals("transient");
            boolean isThrottled = failure.errorClass.equals("throttled");
            int failedNow = failed + (isTransient || failure.errorClass.equals("permanent") ? 1 : 0);
            boolean isExhausted = isTransient && failedNow > tiers.size();
            String message = (isExhausted ? "gave up after " + failedNow + " attempts: " : "") + failure.getMessage();
            long now = System.currentTimeMillis();
            Map<String, String> headers = new LinkedHashMap<>();
            headers.put("error-class", isExhausted ? "exhausted" : failure.errorClass);
            headers.put("error-code", failure.code);
            headers.put("error-message", bounded(message));
            headers.put("error-timestamp", text(now));
            if (isExhausted || !(isTransient || isThrottled)) {
                return output(dead, record.value(), failedNow, headers);
            }
            List<Long> delays = List.copyOf(tiers.values());
            long wait = isTransient ? delays.get(failedNow - 1) : delays.get(0);
            if (failure.retryAfter > 0) {
                wait = failure.retryAfter * 1000;
            }
            // The longest tier that is not longer than the wait, or else the shortest one.
            String fitting = tiers.keySet().iterator().next();
            for (Map.Entry<String, Long> tier : tiers.entrySet()) {
                fitting = tier.getValue() <= wait ? tier.getKey() : fitting;
            }
            headers.put("process-after", text(now + wait));
            headers.put("return-topic", due);
            return output(pipeline + "-retry-" + fitting, record.value(), failedNow, headers);
        }

        /** User headers come first, as they are. Then come ours. */
        ProducerRecord<byte[], byte[]> output(String topic, byte[] value, int failed, Map<String, String> more) {
            Map<String, String> ours = new LinkedHashMap<>();
            ours.put("pipeline", pipeline);
            ours.putAll(origin);
            ours.put("retry-count", Integer.toString(failed));
            ours.putAll(more);
            List<Header> headers = new ArrayList<>();
            for (Header header : record.headers()) {
                if (!RESERVED.contains(header.key())) {
                    headers.add(header);
                }
            }
            ours.forEach((name, text) -> headers.add(new RecordHeader(name, text.getBytes(StandardCharsets.UTF_8))));
            return new ProducerRecord<>(topic, null, record.key(), value, headers);
        }

        /** What to write instead of an output that its topic refuses. */
        ProducerRecord<byte[], byte[]> replacement(ProducerRecord<byte[], byte[]> refused, Exception reason) {
            String topic = "topic `" + refused.topic() + "` refuses ";
            if (!refused.topic().equals(dead)) {
                return route(reason instanceof RecordTooLargeException
                        ? new Failure("permanent", "output.too-large",
                                topic + "the record: its max.message.bytes is lower", 0)
                        : new Failure("permanent", "output.refused", topic + "the record as invalid", 0));
            }
            List<Header> headers = new ArrayList<>();
            List<Header> kept = new ArrayList<>();
            boolean isBare = refused.key() == null;
            for (Header header : refused.headers()) {
                if (!header.key().equals("payload-omitted")) {
                    headers.add(header);
                    if (RESERVED.contains(header.key())) {
                        kept.add(header);
                    } else {
                        isBare &= REDRIVES.contains(header.key());
                    }
                }
            }
            List<Header> omitted = new ArrayList<>();
            String what = refused.value() != null ? "value" : "key, value, headers";
            omitted.add(new RecordHeader("payload-omitted", what.getBytes(StandardCharsets.UTF_8)));
            if (refused.headers().lastHeader("payload-omitted-hash") == null) {
                omitted.add(new RecordHeader("payload-omitted-hash", payloadHash(refused)));
            }
            if (refused.value() != null) {
                headers.addAll(omitted);
                return new ProducerRecord<>(dead, null, refused.key(), null, headers);
            }
            if (isBare) {
                // The record must not be lost. Only a change of the topic helps.
                throw new IllegalStateException(topic + "every dead letter, even without key, value and headers");
            }
            for (String name : REDRIVES) {
                Header last = refused.headers().lastHeader(name);
                if (last != null && last.value() != null && last.value().length <= LONGEST_OF_REDRIVES) {
                    kept.add(last);
                }
            }
            kept.addAll(omitted);
            return new ProducerRecord<>(dead, null, (byte[]) null, null, kept);
        }
    }

    /** By which a redrive recognises the record whose payload was left out. */
    static byte[] payloadHash(ProducerRecord<byte[], byte[]> letter) {
        MessageDigest digest;
        try {
            digest = MessageDigest.getInstance("SHA-256");
        } catch (NoSuchAlgorithmException e) {
            throw new IllegalStateException(e);
        }
        for (byte[] part : Arrays.asList(letter.key(), letter.value())) {
            digest.update(ByteBuffer.allocate(8).putLong(part == null ? -1 : part.length).array());
            if (part != null) {
                digest.update(part);
            }
        }
        String hex = HexFormat.of().formatHex(digest.digest(), 0, 16);
        return hex.getBytes(StandardCharsets.UTF_8);
    }

    static String text(long millis) {
        return MILLISECONDS.format(Instant.ofEpochMilli(millis));
    }

    static long millis(String text) {
        if (!text.matches("[0-9]{4}-.*T.*[.][0-9]{3}Z")) {
            throw new IllegalArgumentException(text);
        }
        return Instant.parse(text).toEpochMilli();
    }

    static long number(String text) {
        if (!text.matches("[0-9]{1,19}")) {
            throw new IllegalArgumentException(text);
        }
        return Long.parseLong(text);
    }

    /** The text of a header, if it is valid. */
    static String checked(Map<String, byte[]> headers, String name, Predicate<String> isValid) throws Failure {
        byte[] value = headers.get(name);
        try {
            String text = StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(value)).toString();
            if (isValid.test(text)) {
                return text;
            }
        } catch (CharacterCodingException | RuntimeException invalid) {
            throw Failure.malformed(name, "is missing or cannot be read");
        }
        throw Failure.malformed(name, "is out of range");
    }

    /** At most 1024 bytes, without control characters. */
    static String bounded(String message) {
        String text = message.replaceAll("\\p{Cntrl}", " ");
        while (text.getBytes(StandardCharsets.UTF_8).length > 1024) {
            text = text.substring(0, text.length() - 1);
        }
        return text;
    }

    /** Whether records after a committed offset are complete: workers of Redeliver complete records out of order. */
    static boolean hasCompletedRecords(String metadata) {
        if (!metadata.startsWith("r1:")) {
            return metadata.startsWith("b1:") && !metadata.equals("b1:AA");
        }
        // Alternating runs of incomplete and completed records, as LEB128 numbers.
        boolean isCompleted = false;
        long run = 0;
        for (byte part : Base64.getUrlDecoder().decode(metadata.substring(3))) {
            run |= part & 0x7f; // whether it is 0 is all that matters
            if (part >= 0) {
                if (isCompleted && run > 0) {
                    return true;
                }
                isCompleted = !isCompleted;
                run = 0;
            }
        }
        return false;
    }

    Map<String, Object> consumerSettings() {
        return Map.of(
                "bootstrap.servers", brokers,
                "group.id", "redeliver-" + pipeline, // the audit reads the offsets of this group
                "group.instance.id", instance, // after a restart, the process keeps its partitions
                "session.timeout.ms", 10_000,
                "isolation.level", "read_committed",
                "enable.auto.commit", false, // offsets are committed by transactions only
                "auto.offset.reset", "earliest",
                "max.poll.records", MAX_BATCH,
                "partition.assignment.strategy", "org.apache.kafka.clients.consumer.RangeAssignor");
    }

    Map<String, Object> producerSettings() {
        return Map.of(
                "bootstrap.servers", brokers,
                "transactional.id", instance, // a new process with this id ends the transaction of a previous one
                "transaction.timeout.ms", 15_000,
                "max.request.size", 100_000_000, // topics limit the size of records
                "buffer.memory", 200_000_000L);
    }

    void run() throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(CONCURRENCY);
        var deserializer = new ByteArrayDeserializer();
        var serializer = new ByteArraySerializer();
        try (var consumer = new KafkaConsumer<byte[], byte[]>(consumerSettings(), deserializer, deserializer);
                var producer = new KafkaProducer<byte[], byte[]>(producerSettings(), serializer, serializer)) {
            producer.initTransactions();
            consumer.subscribe(List.of(pipeline, due), new ConsumerRebalanceListener() {
                @Override
                public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                    consumer.committed(Set.copyOf(partitions)).forEach((partition, committed) -> {
                        if (committed != null && hasCompletedRecords(committed.metadata())) {
                            throw new IllegalStateException(partition
                                    + ": a worker of Redeliver has processed records after the committed offset");
                        }
                    });
                    System.out.println("assigned " + partitions.size() + " partitions");
                }

                @Override
                public void onPartitionsRevoked(Collection<TopicPartition> partitions) {}
            });
            while (true) {
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofSeconds(1));
                // The generation in which these records were read. If the group has given the partitions to another
                // member since, Kafka rejects offsets of this generation, and with them the transaction.
                ConsumerGroupMetadata group = consumer.groupMetadata();
                if (records.isEmpty()) {
                    continue;
                }
                List<Attempt> attempts = new ArrayList<>();
                Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
                for (ConsumerRecord<byte[], byte[]> record : records) {
                    attempts.add(new Attempt(record));
                    offsets.put(
                            new TopicPartition(record.topic(), record.partition()),
                            new OffsetAndMetadata(record.offset() + 1));
                }
                List<ProducerRecord<byte[], byte[]>> outputs = new ArrayList<>();
                for (Future<ProducerRecord<byte[], byte[]>> output : pool.invokeAll(attempts)) {
                    outputs.add(output.get());
                }
                // No transaction is open while records are processed.
                Map<Integer, Exception> refused = write(producer, outputs, offsets, group, false);
                while (!refused.isEmpty()) {
                    // A broker refuses batches as a whole: find out which records it refuses.
                    refused = write(producer, outputs, offsets, group, true);
                    refused.forEach((index, reason) ->
                            outputs.set(index, attempts.get(index).replacement(outputs.get(index), reason)));
                }
            }
        }
    }

    /** Writes outputs and offsets in one transaction. Returns why topics refuse outputs, by index, if they do. */
    static Map<Integer, Exception> write(
            KafkaProducer<byte[], byte[]> producer,
            List<ProducerRecord<byte[], byte[]>> outputs,
            Map<TopicPartition, OffsetAndMetadata> offsets,
            ConsumerGroupMetadata group,
            boolean oneByOne) {
        Map<Integer, Exception> refused = new ConcurrentHashMap<>();
        KafkaException problem = null;
        producer.beginTransaction();
        try {
            for (int i = 0; i < outputs.size(); i++) {
                int index = i;
                producer.send(outputs.get(index), (metadata, error) -> {
                    if (error instanceof RecordTooLargeException || error instanceof InvalidRecordException) {
                        refused.put(index, error);
                    }
                });
                if (oneByOne) {
                    producer.flush();
                }
                if (!refused.isEmpty()) {
                    break; // the following ones would fail with the same error
                }
            }
        } catch (KafkaException error) { // a transaction takes no more records after one that is refused
            problem = error;
        }
        producer.flush();
        if (!refused.isEmpty()) {
            producer.abortTransaction();
            return refused;
        }
        if (problem != null) {
            throw problem;
        }
        producer.sendOffsetsToTransaction(offsets, group);
        producer.commitTransaction();
        return refused;
    }

    public static void main(String[] arguments) throws Exception {
        // Not the end of `main` alone: other threads must not keep a failed worker running.
        try {
            new ForeignWorker(arguments).run();
        } catch (Exception error) {
            error.printStackTrace();
            System.exit(1);
        }
    }
}
