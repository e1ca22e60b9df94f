"""Writes orders to a topic: valid ones, and some that the worker rejects. The key is the user.

    python produce.py localhost:9092 orders 20
"""

import json
import random
import sys
import uuid
from datetime import datetime, timezone

from confluent_kafka import Producer

# Each makes an order one that becomes a dead letter.
REJECTED = [
    {"order_id": "17"},
    {"quantity": 0},
    {"quantity": 10_001},
    {"priority": "asap"},
    {"timestamp": "yesterday"},
    {"price": "19.90"},
    {"price": 0.01},
    {"item": "cup"},
]


def an_order(**changes):
    order = {
        "order_id": str(uuid.uuid4()),
        "user": random.choice(["ada", "grace", "linus"]),
        "item": "book",
        "quantity": random.randint(1, 10_000),
        "price": 19.9,
        "timestamp": datetime.now(timezone.utc).isoformat(),
        "priority": random.choice(["low", "normal", "high", "urgent"]),
    }
    return order | changes


def main(brokers, topic, count):
    without_offset = datetime.now(timezone.utc).replace(tzinfo=None).isoformat()
    variants = [{}, {"price": None}, {"timestamp": without_offset}, {"item": "pen", "price": 2.5}]
    orders = [an_order(**variants[number % len(variants)]) for number in range(int(count))]
    orders += [an_order(**changes) for changes in REJECTED]
    random.shuffle(orders)
    producer = Producer({
        "bootstrap.servers": brokers,
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
    })
    failed = []

    def report(error, _message):
        if error:
            failed.append(error)

    for order in orders:
        producer.produce(topic, key=order["user"], value=json.dumps(order), on_delivery=report)
        producer.poll(0)
    producer.flush()
    if failed:
        sys.exit(f"{len(failed)} orders not written: {failed[0]}")
    print(f"wrote {count} valid orders and {len(REJECTED)} others")


if __name__ == "__main__":
    main(*sys.argv[1:])
