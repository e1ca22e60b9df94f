"""Writes the records that a pipeline of Redeliver processes.

The producer is idempotent, chooses partitions as Java clients do, and checks values against a JSON Schema before it sends them:

    with RecordProducer("localhost:9092", schema=json.load(open("order.schema.json"))) as producer:
        producer.send("orders", {"item": "book", "quantity": 2}, key="ada")
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Mapping, Optional, Type, Union

import jsonschema
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

log = logging.getLogger(__name__)

DEFAULTS = {
    "enable.idempotence": True,
    "partitioner": "murmur2_random",
    # Retries after 1, 2 and then each 4 seconds, until message.timeout.ms (5 minutes).
    "retry.backoff.ms": 1000,
    "retry.backoff.max.ms": 4000,
}


class InvalidRecord(ValueError):
    """The value violates the schema. The message names the field and the rule, but contains no part of the value."""


class NotDelivered(Exception):
    """Kafka has not confirmed all records. They may have been written."""


@dataclass(frozen=True)
class Totals:
    """What a producer has done."""

    #: Records that Kafka has confirmed.
    records: int = 0
    #: The bytes of their keys and values.
    bytes: int = 0
    #: Records that violate the schema, and were not sent.
    invalid: int = 0
    #: Records that Kafka did not confirm.
    failed: int = 0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class RecordProducer:
    """Leave its `with` block, or call `close`, to write what is still in memory. For one thread at a time."""

    def __init__(
        self,
        brokers: str,
        *,
        schema: Optional[dict[str, Any]] = None,
        config: Optional[Mapping[str, Any]] = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """`config`: further settings of librdkafka, such as those of TLS. Only one producer can use the same registry of metrics."""
        self._validator = None
        if schema is not None:
            validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            validator.check_schema(schema)
            self._validator = validator(schema, format_checker=validator.FORMAT_CHECKER)
        self._producer = Producer({**DEFAULTS, **(config or {}), "bootstrap.servers": brokers})
        self._totals = dict.fromkeys(Totals.__dataclass_fields__, 0)
        self._first_failure: Optional[KafkaError] = None
        helps = {
            "records": "Records that Kafka has confirmed",
            "bytes": "Bytes of their keys and values",
            "invalid": "Records that violate the schema, and were not sent",
            "failed": "Records that Kafka did not confirm",
        }
        self._counters = {
            name: Counter(f"producer_{name}", help, registry=registry) for name, help in helps.items()
        }
        self._seconds = Histogram(
            "producer_send_seconds", "Duration from a record to its confirmation", registry=registry
        )

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Union[str, bytes, None] = None,
        headers: Optional[Mapping[str, Union[str, bytes, None]]] = None,
    ) -> None:
        """Sends a value in the background: bytes and text as they are, anything else as JSON. Waits while the client's queue is full.

        Raises InvalidRecord if the value violates the schema, and NotDelivered if the client refuses the record, for example because of its size.
        """
        text = value if isinstance(value, (str, bytes)) else json.dumps(value, allow_nan=False)
        self._check(text)
        size = sum(len(part.encode() if isinstance(part, str) else part) for part in (key or b"", text))
        sent = time.monotonic()

        def confirm(error: Optional[KafkaError], _message: Message) -> None:
            if error is None:
                self._count(records=1, bytes=size)
                self._seconds.observe(time.monotonic() - sent)
            else:
                self._count(failed=1)
                self._first_failure = self._first_failure or error

        fields = dict(headers or {})
        while True:
            try:
                self._producer.produce(topic, key=key, value=text, headers=fields, on_delivery=confirm)
                break
            except BufferError:
                self._producer.poll(1)
            except KafkaException as error:
                # For example, it is larger than message.max.bytes.
                self._count(failed=1)
                raise NotDelivered(str(error)) from error
        self._producer.poll(0)

    def flush(self, timeout: float = 60) -> None:
        """Waits until Kafka has confirmed all records. Raises NotDelivered if it refuses one, or does not confirm all in time (seconds)."""
        waiting = self._producer.flush(timeout)
        if waiting:
            raise NotDelivered(f"{waiting} records are not confirmed after {timeout} s")
        first, self._first_failure = self._first_failure, None
        if first is not None:
            raise NotDelivered(f"{self.totals().failed} records not written since the start: {first}")

    def close(self, timeout: float = 60) -> Totals:
        """Flushes, and logs the totals. Raises as `flush`."""
        try:
            self.flush(timeout)
        finally:
            log.info("totals since the start: %s", self.totals())
        return self.totals()

    def totals(self) -> Totals:
        return Totals(**self._totals)

    def __enter__(self) -> RecordProducer:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        try:
            self.close()
        except NotDelivered as failure:
            # What ended the block tells more.
            if error is None:
                raise
            log.error("%s", failure)

    def _check(self, text: Union[str, bytes]) -> None:
        if self._validator is None:
            return
        try:
            document = json.loads(text, parse_constant=_refuse)
        except ValueError as error:
            self._count(invalid=1)
            raise InvalidRecord("the value is not JSON") from error
        violation = jsonschema.exceptions.best_match(self._validator.iter_errors(document))
        if violation is not None:
            self._count(invalid=1)
            field = "".join(f"/{part}" for part in violation.absolute_path) or "the value"
            missing = f": {violation.message}" if violation.validator == "required" else ""
            raise InvalidRecord(f"{field} violates {violation.validator}{missing}")

    def _count(self, **counts: int) -> None:
        for name, count in counts.items():
            self._totals[name] += count
            self._counters[name].inc(count)
