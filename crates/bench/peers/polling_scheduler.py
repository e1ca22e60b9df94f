"""A polling scheduler, the common design: jobs wait in a sorted set of Redis, and a worker polls it every second.

    schedule   ZADD of each job, its due time in milliseconds as its score
    work       every second: ZRANGEBYSCORE of due jobs, send them to Kafka, wait for the acknowledgements, ZREM

Jobs are removed after Kafka has acknowledged them, so that a crashed worker loses no job, but sends some of them twice.
`--at-once 1` removes each job with its own call, which is how such loops are usually written; `--at-once N` removes up to
N jobs per call.
"""

import argparse
import json
import time

import confluent_kafka
import kafka
import redis

POLL_SECONDS = 1.0
CHUNK = 1000


def value(number, due, size):
    head = f'{{"n":{number},"due":{due},"pad":"'
    return head + "x" * (size - len(head) - 2) + '"}'


class Confluent:
    def __init__(self, brokers):
        self.producer = confluent_kafka.Producer(
            {"bootstrap.servers": brokers, "acks": "all", "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
        )
        self.failed = []

    def report(self, error, _message):
        if error is not None:
            self.failed.append(error)

    def send(self, topic, body):
        self.producer.produce(topic, body, on_delivery=self.report)
        self.producer.poll(0)

    def flush(self):
        self.producer.flush()
        if self.failed:
            raise SystemExit(f"not delivered: {self.failed[0]}")


class KafkaPython:
    def __init__(self, brokers):
        self.producer = kafka.KafkaProducer(bootstrap_servers=brokers, acks="all", linger_ms=5)
        self.sent = []

    def send(self, topic, body):
        self.sent.append(self.producer.send(topic, body))

    def flush(self):
        self.producer.flush()
        for sent in self.sent:
            sent.get(timeout=0)
        self.sent.clear()


def schedule(arguments, store):
    began = time.monotonic()
    for start in range(0, arguments.count, arguments.at_once):
        jobs = {}
        for number in range(start, min(start + arguments.at_once, arguments.count)):
            due = arguments.first_due + int(number * arguments.step)
            jobs[value(number, due, arguments.size)] = due
        store.zadd(arguments.key, jobs)
    print(json.dumps({"scheduled": arguments.count, "seconds": time.monotonic() - began}), flush=True)


def work(arguments, store):
    client = {"confluent-kafka": Confluent, "kafka-python": KafkaPython}[arguments.client](arguments.brokers)
    left = arguments.count
    next_poll = time.monotonic()
    while left > 0:
        while True:
            due = store.zrangebyscore(arguments.key, "-inf", int(time.time() * 1000), start=0, num=CHUNK)
            if not due:
                break
            for body in due:
                client.send(arguments.topic, body)
            client.flush()
            for start in range(0, len(due), arguments.at_once):
                store.zrem(arguments.key, *due[start : start + arguments.at_once])
            left -= len(due)
        next_poll = max(next_poll + POLL_SECONDS, time.monotonic())
        if left > 0:
            time.sleep(next_poll - time.monotonic())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=["versions", "schedule", "work"])
    parser.add_argument("--brokers")
    parser.add_argument("--redis")
    parser.add_argument("--key")
    parser.add_argument("--topic")
    parser.add_argument("--count", type=int)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--first-due", type=int, help="milliseconds since 1970")
    parser.add_argument("--step", type=float, default=0, help="milliseconds from one due time to the next")
    parser.add_argument("--size", type=int, default=200, help="bytes of a job")
    parser.add_argument("--client", choices=["confluent-kafka", "kafka-python"], default="confluent-kafka")
    arguments = parser.parse_args()
    if arguments.verb == "versions":
        print(
            f"confluent-kafka {confluent_kafka.__version__} (librdkafka {confluent_kafka.libversion()[0]}), "
            f"kafka-python {kafka.__version__}, redis-py {redis.__version__}"
        )
        return
    store = redis.Redis.from_url(arguments.redis)
    {"schedule": schedule, "work": work}[arguments.verb](arguments, store)


main()
