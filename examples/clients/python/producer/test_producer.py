"""Writes to the topic and brokers in the environment. The test that runs this reads what was written."""

import os
import unittest

from prometheus_client import CollectorRegistry, generate_latest
from redeliver_producer import InvalidRecord, NotDelivered, RecordProducer, Totals

BROKERS, TOPIC = os.environ["BROKERS"], os.environ["TOPIC"]
SCHEMA = {"required": ["item"], "properties": {"quantity": {"maximum": 10}, "at": {"format": "date"}}}


class ProducerTest(unittest.TestCase):
    def setUp(self):
        self.registry = CollectorRegistry()

    def test_only_valid_records_are_written(self):
        with self.assertLogs("redeliver_producer", "INFO") as logged:
            with RecordProducer(BROKERS, schema=SCHEMA, registry=self.registry) as producer:
                for key in ("ada", "grace"):
                    producer.send(TOPIC, {"item": "book"}, key=key, headers={"tenant": "a"})
                for value, problem in (
                    ({"item": "book", "quantity": 11}, "/quantity violates maximum"),
                    ({"item": "book", "at": "soon"}, "/at violates format"),
                    ({}, "the value violates required: 'item' is a required property"),
                    ("book", "the value is not JSON"),
                    ('{"item": NaN}', "the value is not JSON"),
                ):
                    with self.assertRaises(InvalidRecord) as refused:
                        producer.send(TOPIC, value, key="ada")
                    self.assertEqual(str(refused.exception), problem)
        self.assertEqual(producer.totals(), Totals(records=2, bytes=40, invalid=5, failed=0))
        self.assertIn("records=2, bytes=40, invalid=5, failed=0", logged.output[0])
        page = generate_latest(self.registry).decode().splitlines()
        for line in (
            "producer_records_total 2.0",
            "producer_bytes_total 40.0",
            "producer_invalid_total 5.0",
            "producer_failed_total 0.0",
            "producer_send_seconds_count 2.0",
        ):
            self.assertIn(line, page)

    def test_undelivered_records_are_reported(self):
        config = {"message.timeout.ms": 1000}
        producer = RecordProducer("127.0.0.1:1", config=config, registry=self.registry)
        producer.send(TOPIC, "x")
        with self.assertRaises(NotDelivered):
            producer.send(TOPIC, b"x" * 2_000_000)
        with self.assertRaises(NotDelivered) as refused:
            producer.close()
        self.assertIn("2 records not written since the start: ", str(refused.exception))
        self.assertEqual(producer.totals(), Totals(failed=2))

    def test_full_queue_delays_sender(self):
        config = {"queue.buffering.max.messages": 10}
        with RecordProducer(BROKERS, config=config, registry=self.registry) as producer:
            for number in range(200):
                producer.send(TOPIC, {"item": number}, key="many")
        self.assertEqual(producer.totals().records, 200)


if __name__ == "__main__":
    unittest.main()
