"""Schedules a job by writing plain JSON to the ingest topic, without a library of Redeliver."""

import json
import sys

from kafka import KafkaProducer

brokers, topic, app = sys.argv[1:4]
request = {"appName": app, "delay": "2s", "idempotencyKey": "python-1", "jobData": {"number": 32}}
producer = KafkaProducer(bootstrap_servers=brokers, acks="all")
written = producer.send(topic, json.dumps(request).encode()).get(timeout=30)
producer.close()
print(f"written to {written.topic}/{written.partition}/{written.offset}")
