"""A worker for a pipeline of Redeliver. It uses the protocol only: see "Foreign workers" in docs/protocol.md.

    worker.py BROKERS PIPELINE OUTPUT URL INSTANCE TIER...

`handle` is the work itself: replace it by your own. The rest turns its results and failures into the records of the
protocol, and writes them in one transaction with the offsets of the records that it has processed.

If a transaction fails, except because a topic refuses a record, the program ends. Let a supervisor start it again: it
then continues after the last complete transaction.
"""

import base64
import hashlib
import http.client
import re
import socket
import ssl
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from urllib.parse import urlsplit

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Producer, TopicPartition

BROKERS, PIPELINE, OUTPUT, URL, INSTANCE, *TIER_NAMES = sys.argv[1:]
SOURCE, DUE, DEAD = PIPELINE, f"{PIPELINE}-retry-due", f"{PIPELINE}-dlq"

UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
# The delay before each retry in milliseconds, by the name of its tier. Ascending, as in the configuration.
TIERS = {name: int(number) * UNITS[unit] for name in TIER_NAMES for number, unit in re.findall(r"^(\d+)(\D+)$", name)}

MAX_BATCH = 200  # records per transaction
CONCURRENCY = 16
TIMEOUT = 10  # of a call, in seconds
MAX_RESPONSE = 1_000_000  # in bytes
MAX_RETRY_AFTER = 3_600  # in seconds
CLOCK_SKEW_MS = 300_000  # by how much the clock of the retry tier can be ahead

# The times that `original-timestamp` can name: from the year 1 to 9999-12-31T23:59:59.999Z.
EARLIEST, LATEST = -62_135_596_800_000, 253_402_300_799_999
# By which a topic refuses a record: for its size, and as invalid, for example a compacted topic a record without a key.
TOO_LARGE, INVALID = KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD

RESERVED = {
    "process-after", "retry-count", "return-topic", "pipeline", "payload-omitted", "payload-omitted-hash",
    "original-topic", "original-partition", "original-offset", "original-timestamp",
    "error-class", "error-code", "error-message", "error-response", "error-timestamp",
}  # fmt: skip
# Headers of redrives. They are not reserved, but stay when a payload is left out: the last one of each name, unless it is longer than this.
REDRIVES = ["redrive-id", "redrive-count", "redrive-time", "redrive-of", "redrive-edited"]
LONGEST_OF_REDRIVES = 300


class Failure(Exception):
    """A failed attempt. The class is transient, throttled, permanent or malformed."""

    def __init__(self, error_class, code, message, retry_after=None):
        super().__init__(message)
        self.error_class, self.code, self.message = error_class, code, message
        self.retry_after = retry_after  # in seconds, if the other side has asked for a delay


def handle(value, idempotency_key):
    """Returns the value of the result, or raises a Failure. It can run more than once, always with the same key."""
    headers = {"Idempotency-Key": idempotency_key, "Content-Type": "application/octet-stream"}
    deadline = time.monotonic() + TIMEOUT
    try:
        status, asked, body = post(value or b"", headers, deadline)
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() < deadline:
            raise Failure("transient", "http.connect", f"POST {URL}: {error}")
    # The end of the connection can look like the end of the response.
    if time.monotonic() >= deadline:
        raise Failure("transient", "http.timeout", f"POST {URL}: no complete response within {TIMEOUT}s")
    if 200 <= status < 300:
        if len(body) > MAX_RESPONSE:
            raise Failure("permanent", "http.response-too-large", f"POST {URL}: the response exceeds {MAX_RESPONSE} bytes")
        return body
    code, message = f"http.{status}", f"POST {URL} answered {status}"
    retry_after = min(int(asked), MAX_RETRY_AFTER) if re.fullmatch("[0-9]{1,9}", asked) else 0
    if status == 429 or (status == 503 and retry_after > 0):
        raise Failure("throttled", code, message, retry_after or None)
    is_transient = status in (408, 425) or (status >= 500 and status not in (501, 505))
    raise Failure("transient" if is_transient else "permanent", code, message)


def post(body, headers, deadline):
    """Calls the endpoint. Returns the status, Retry-After and the body of the response. Follows no redirect."""
    url = urlsplit(URL)
    is_tls = url.scheme == "https"
    connection = (http.client.HTTPSConnection if is_tls else http.client.HTTPConnection)(url.hostname, url.port)
    connected = socket.create_connection((connection.host, connection.port), TIMEOUT)
    if is_tls:
        context = ssl.create_default_context()
        connected = context.wrap_socket(connected, server_hostname=url.hostname, do_handshake_on_connect=False)
    # The timeout of the socket begins again with each byte, this one does not.
    timer = threading.Timer(deadline - time.monotonic(), disconnect, [connected])
    timer.start()
    try:
        if is_tls:
            connected.do_handshake()
        connection.sock = connected
        connection.request("POST", (url.path or "/") + (f"?{url.query}" if url.query else ""), body, headers)
        response = connection.getresponse()
        read = response.read(MAX_RESPONSE + 1)
        if response.length and len(read) <= MAX_RESPONSE:  # the client does not report it
            raise http.client.IncompleteRead(read, response.length)
        return response.status, response.getheader("Retry-After", ""), read
    finally:
        timer.cancel()
        connected.close()


def disconnect(connected):
    try:
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # also of TLS, without its own shutdown
    except OSError:
        pass  # the other side was faster


class Attempt:
    """A record, where it has entered the pipeline, and how many attempts have failed before this one."""

    def __init__(self, record):
        self.record, self.failed = record, 0
        try:
            self.headers, self.has_headers = record.headers() or [], True
        except (SystemError, UnicodeDecodeError):  # the client cannot read header names that are not UTF-8
            self.headers, self.has_headers = [], False
        self.origin = {
            "original-topic": record.topic(),
            "original-partition": str(record.partition()),
            "original-offset": str(record.offset()),
        }
        kind, timestamp = record.timestamp()
        # Producers can write any time. One that has no text is omitted; -1 is none.
        if kind != TIMESTAMP_NOT_AVAILABLE and timestamp != -1 and EARLIEST <= timestamp <= LATEST:
            self.origin["original-timestamp"] = to_text(timestamp)

    def read_retry(self):
        """Reads the headers of a retry. They are checked, because other programs can write to the due topic too."""
        reserved = {}
        for name, value in self.headers:
            if name in reserved:
                raise malformed(name, "occurs more than once")
            if name in RESERVED:
                reserved[name] = value
        origin = {
            "original-topic": checked(reserved, "original-topic", str, re.compile(r"[\w.-]{1,249}", re.A).fullmatch),
            "original-partition": str(checked(reserved, "original-partition", to_int, lambda n: n < 2**31)),
            "original-offset": str(checked(reserved, "original-offset", to_int, lambda n: n < 2**63)),
        }
        if "original-timestamp" in reserved:
            origin["original-timestamp"] = to_text(checked(reserved, "original-timestamp", to_millis))
        self.origin = origin
        self.failed = checked(reserved, "retry-count", to_int, lambda n: n <= 100_000)
        if "process-after" in reserved:
            # No tier releases a record early, so no tier has released this one.
            checked(reserved, "process-after", to_millis, lambda due: due <= now() + CLOCK_SKEW_MS)

    def run(self):
        """Processes the record, and returns what to write for it."""
        try:
            if not self.has_headers:
                raise Failure("malformed", "header.name", "the name of a header is not UTF-8")
            if self.record.topic() == DUE:
                self.read_retry()
            key = "-".join(self.origin[f"original-{part}"] for part in ("topic", "partition", "offset"))
            return self.output(OUTPUT, handle(self.record.value(), key), self.failed, {})
        except Failure as failure:
            return self.route(failure)
        except Exception as error:  # a defect of `handle` must not stop the partition
            return self.route(Failure("transient", "handler.error", f"the handler failed: {type(error).__name__}"))

    def route(self, failure):
        failed = self.failed + (failure.error_class in ("transient", "permanent"))
        error_class, message, at = failure.error_class, failure.message, now()
        if error_class == "transient" and failed > len(TIERS):
            error_class, message = "exhausted", f"gave up after {failed} attempts: {message}"
        headers = {
            "error-class": error_class,
            "error-code": failure.code,
            "error-message": bounded(message),
            "error-timestamp": to_text(at),
        }
        if error_class not in ("transient", "throttled"):
            return self.output(DEAD, self.record.value(), failed, headers)
        delays = list(TIERS.values())
        wait = delays[failed - 1] if error_class == "transient" else delays[0]
        if failure.retry_after is not None:
            wait = failure.retry_after * 1000
        # The longest tier that is not longer than the wait, or else the shortest one.
        tier = [name for name, delay in TIERS.items() if delay <= max(wait, delays[0])][-1]
        headers |= {"process-after": to_text(at + wait), "return-topic": DUE}
        return self.output(f"{PIPELINE}-retry-{tier}", self.record.value(), failed, headers)

    def output(self, topic, value, failed, more):
        """User headers come first, as they are. Then come ours."""
        ours = {"pipeline": PIPELINE, **self.origin, "retry-count": str(failed), **more}
        headers = [(name, header) for name, header in self.headers if name not in RESERVED]
        headers += [(name, header.encode()) for name, header in ours.items()]
        return {"topic": topic, "key": self.record.key(), "value": value, "headers": headers}

    def replacement(self, refused, reason):
        """What to write instead of an output that its topic refuses."""
        topic = refused["topic"]
        if topic != DEAD and reason == TOO_LARGE:
            message = f"topic `{topic}` refuses the record: its max.message.bytes is lower"
            return self.route(Failure("permanent", "output.too-large", message))
        if topic != DEAD:
            return self.route(Failure("permanent", "output.refused", f"topic `{topic}` refuses the record as invalid"))
        headers = [(name, value) for name, value in refused["headers"] if name != "payload-omitted"]
        names = {name for name, _ in headers}
        digest = [] if "payload-omitted-hash" in names else [("payload-omitted-hash", payload_hash(refused))]
        if refused["value"] is not None:
            return {**refused, "value": None, "headers": headers + [("payload-omitted", b"value")] + digest}
        if refused["key"] is None and names <= RESERVED.union(REDRIVES):
            # The record must not be lost. Only a change of the topic helps.
            sys.exit(f"topic `{DEAD}` refuses every dead letter, even without key, value and headers")
        kept = [(name, value) for name, value in headers if name in RESERVED]
        last = dict(headers)
        of_redrives = [(name, last[name]) for name in REDRIVES if last.get(name) is not None]
        kept += [(name, value) for name, value in of_redrives if len(value) <= LONGEST_OF_REDRIVES]
        return {**refused, "key": None, "headers": kept + [("payload-omitted", b"key, value, headers")] + digest}


def payload_hash(letter):
    """By which a redrive recognises the record whose payload was left out."""
    digest = hashlib.sha256()
    for part in (letter["key"], letter["value"]):
        digest.update((2**64 - 1 if part is None else len(part)).to_bytes(8, "big"))
        digest.update(part or b"")
    return digest.hexdigest()[:32].encode()


def now():
    return time.time_ns() // 1_000_000


def to_text(millis):
    utc = datetime.fromtimestamp(millis // 1000, timezone.utc).replace(microsecond=millis % 1000 * 1000)
    return utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_millis(text):
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{3}Z", text):
        raise ValueError(text)
    return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)


def to_int(text):
    if not re.fullmatch("[0-9]{1,19}", text):
        raise ValueError(text)
    return int(text)


def bounded(message):
    """At most 1024 bytes, without control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", message).encode()[:1024].decode(errors="ignore")


def malformed(name, problem):
    return Failure("malformed", f"header.{name}", f"header `{name}` {problem}")


def checked(headers, name, parse, is_valid=lambda _: True):
    try:
        value = parse(headers[name].decode())
    except (KeyError, AttributeError, ValueError):
        raise malformed(name, "is missing or cannot be read")
    if not is_valid(value):
        raise malformed(name, "is out of range")
    return value


def new_producer():
    producer = Producer({
        "bootstrap.servers": BROKERS,
        "transactional.id": INSTANCE,  # a new producer with this id ends the transaction of a previous one
        "transaction.timeout.ms": 15_000,
        "partitioner": "murmur2_random",  # the partitions that Java's clients choose
        "message.max.bytes": 100_000_000,  # topics limit the size of records
    })  # fmt: skip
    producer.init_transactions()
    return producer


class Worker:
    def __init__(self):
        self.producer = new_producer()
        self.consumer = Consumer({
            "bootstrap.servers": BROKERS,
            "group.id": f"redeliver-{PIPELINE}",  # the audit reads the offsets of this group
            "partition.assignment.strategy": "range",  # keeps workers of Redeliver out of the group
            "group.instance.id": INSTANCE,  # after a restart, the process keeps its partitions
            "session.timeout.ms": 10_000,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,  # offsets are committed by transactions only
            "auto.offset.reset": "earliest",
        })  # fmt: skip
        self.batch, self.group, self.refusal = [], None, None

    def on_assign(self, consumer, partitions):
        # The generation of this assignment. If the group has given the partitions to another member since, Kafka
        # rejects offsets of this generation, and with them the transaction.
        self.group = consumer.consumer_group_metadata()
        for committed in consumer.committed(partitions):
            if has_completed_records(committed.metadata):
                partition = f"{committed.topic}/{committed.partition}"
                self.refusal = f"{partition}: a worker of Redeliver has processed records after the committed offset"
        print(f"assigned {len(partitions)} partitions", flush=True)

    def on_revoke(self, _consumer, _partitions):
        self.batch.clear()  # their new owner reads them again

    def run(self):
        self.consumer.subscribe([SOURCE, DUE], on_assign=self.on_assign, on_revoke=self.on_revoke)
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            while True:
                self.read_batch()
                if not self.batch:
                    continue
                attempts = [Attempt(record) for record in self.batch]
                outputs = list(pool.map(Attempt.run, attempts))
                # No transaction is open while records are processed.
                refused = self.write(outputs, one_by_one=False)
                while refused:
                    # A broker refuses batches as a whole: find out which records it refuses.
                    refused = self.write(outputs, one_by_one=True)
                    for index, reason in refused.items():
                        outputs[index] = attempts[index].replacement(outputs[index], reason)
                self.batch.clear()

    def read_batch(self):
        while len(self.batch) < MAX_BATCH:
            record = self.consumer.poll(0 if self.batch else 1)
            if self.refusal:
                sys.exit(self.refusal)
            if record is None:
                return
            if record.error():
                print(record.error(), file=sys.stderr, flush=True)
            else:
                self.batch.append(record)

    def write(self, outputs, one_by_one):
        """Writes outputs and offsets in one transaction. Returns why topics refuse outputs, by index, if they do."""
        refused = {}

        def delivered(index):
            def on_delivery(error, _record):
                if error and error.code() in (TOO_LARGE, INVALID):
                    refused[index] = error.code()

            return on_delivery

        problem = None
        self.producer.begin_transaction()
        try:
            for index, output in enumerate(outputs):
                try:
                    self.producer.produce(**output, on_delivery=delivered(index))
                except BufferError:  # the queue of the producer is full
                    self.producer.flush()
                    self.producer.produce(**output, on_delivery=delivered(index))
                if one_by_one:
                    self.producer.flush()
        except KafkaException as error:  # a transaction takes no more records after one that is refused
            problem = error
            if error.args[0].code() == TOO_LARGE:  # for `message.max.bytes` of the producer
                refused[index] = TOO_LARGE
        self.producer.flush()
        if refused:
            self.producer.abort_transaction()
            # This one would go on with sequence numbers that the broker has not seen.
            self.producer = new_producer()
            return refused
        if problem:
            raise problem
        next_offsets = {(record.topic(), record.partition()): record.offset() + 1 for record in self.batch}
        positions = [TopicPartition(*partition, offset) for partition, offset in next_offsets.items()]
        self.producer.send_offsets_to_transaction(positions, self.group)
        self.producer.commit_transaction()
        return {}


def has_completed_records(metadata):
    """Whether records after a committed offset are complete: workers of Redeliver complete records out of order."""
    kind, text = (metadata or "")[:3], (metadata or "")[3:]
    if kind != "r1:":
        return kind == "b1:" and text != "AA"
    # Alternating runs of incomplete and completed records, as LEB128 numbers.
    runs, shift = [0], 0
    for byte in base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)):
        runs[-1] |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            runs.append(0)
            shift = 0
    return any(runs[1::2])


if __name__ == "__main__":
    Worker().run()
