"""Places and pays orders. An order and the job that reminds of its payment are written in one Kafka transaction, and so are a
payment and the cancellation of that job.

    orders.py BROKERS INGEST APP ORDERS NAME place ORDER SECONDS [commit|abort|wait]
    orders.py BROKERS INGEST APP ORDERS NAME pay ORDER JOB [commit|abort|wait]

INGEST is the ingest topic of the scheduler, APP its application for reminders, and ORDERS a topic for orders and payments. NAME
is the transactional id: each process that runs at the same time needs its own, and keeps it when it is started again.
`abort` ends the transaction with nothing written, and `wait` leaves it open until the process is killed.
"""

import json
import signal
import sys

from confluent_kafka import KafkaException, Producer

brokers, ingest, app, orders, name, verb, order, argument, *end = sys.argv[1:]
end = end[0] if end else "commit"

producer = Producer({
    "bootstrap.servers": brokers,
    "transactional.id": name,
    # While a transaction is open, later commands in the same partition wait. If the producer dies, its transaction is aborted after this time.
    "transaction.timeout.ms": 5_000,
    # As in Java, so that the key of a command chooses the partition in which the scheduler expects it.
    "partitioner": "murmur2_random",
})


def place(order, seconds):
    """Writes an order and schedules its reminder. Returns the id of the job."""
    reminder = job_id(command(order, {
        "appName": app,
        "idempotencyKey": order,
        "delay": f"{seconds}s",
        "key": order,
        "jobData": {"order": order},
    }))
    event(order, {"event": "placed", "order": order, "reminder": reminder})
    return reminder


def pay(order, reminder):
    """Writes a payment and cancels the reminder, whose id is in the record of the order."""
    command(order, {"cancel": reminder})
    event(order, {"event": "paid", "order": order})
    return reminder


def command(order, request):
    """Writes a command to the ingest topic. The key is the same for all commands of an order, so they are in one partition."""
    return write(ingest, f"{app}\0{order}", request)


def event(order, content):
    return write(orders, order, content)


def write(topic, key, value):
    """Writes a record as a part of the open transaction, and waits until Kafka has confirmed it."""
    confirmed = []
    value = json.dumps(value)
    producer.produce(topic, value.encode(), key.encode(), on_delivery=lambda *report: confirmed.append(report))
    producer.flush()
    [(error, record)] = confirmed
    if error:
        raise KafkaException(error)
    return record


def job_id(record):
    """The id of a job is a ULID of the timestamp, the partition and the offset of its request."""
    if record.offset() is None:
        raise RuntimeError("the offset of the request is unknown")  # a retry found that it was written before
    _, timestamp = record.timestamp()
    number = timestamp << 80 | record.partition() << 64 | record.offset()
    return "".join("0123456789ABCDEFGHJKMNPQRSTVWXYZ"[number >> shift & 31] for shift in range(125, -1, -5))


producer.init_transactions()  # ends a transaction that a previous process with this name has left open
producer.begin_transaction()
try:
    job = {"place": place, "pay": pay}[verb](order, argument)
except BaseException:
    producer.abort_transaction()
    raise
if end == "wait":
    print("open", order, job, flush=True)
    signal.pause()
elif end == "abort":
    producer.abort_transaction()
    print("aborted", order, job)
else:
    producer.commit_transaction()
    print("committed", order, job)
