//! Spans of attempts. A span's parent is the trace context in the record's headers, and the outputs carry the span's
//! own context. So one trace contains the producer and all attempts.
//!
//! Names follow version 1.44.0 of the semantic conventions of OpenTelemetry for Kafka
//! (<https://opentelemetry.io/docs/specs/semconv/messaging/kafka/>). The key of the record is left out, because it may be
//! personal data.

use redeliver_core::headers::TraceContext;
use redeliver_core::route::Arrival;
use redeliver_core::{Outcome, Record};
use redeliver_runtime::telemetry::{RecordSpan, SpanKind, Tracer};
use redeliver_runtime::trace_context::span_context;

/// The operation of an attempt: a record is passed to a handler.
const PROCESS: &str = "process";

/// `None` when tracing is disabled.
pub(crate) struct AttemptSpan(Option<RecordSpan>);

impl AttemptSpan {
    /// `group` is the consumer group that has read the record.
    pub(crate) fn start(tracer: &Tracer, group: &str, record: &Record, arrival: &Arrival) -> Self {
        if !tracer.is_on() {
            return Self(None);
        }
        let parent = span_context(&record.headers);
        let name = format!("{PROCESS} {}", record.position.topic);
        let mut span = tracer.start(name, SpanKind::Consumer, parent.as_ref(), None);
        span.set("messaging.system", "kafka");
        span.set("messaging.operation.type", PROCESS);
        span.set("messaging.operation.name", PROCESS);
        span.set("messaging.consumer.group.name", group.to_owned());
        span.set("messaging.destination.name", record.position.topic.to_string());
        span.set(
            "messaging.destination.partition.id",
            record.position.partition.to_string(),
        );
        span.set("messaging.kafka.offset", record.position.offset);
        if record.value.is_none() {
            span.set("messaging.kafka.message.tombstone", true);
        }
        span.set("redeliver.attempt", i64::from(arrival.failed_attempts) + 1);
        span.set("redeliver.origin", arrival.origin.id());
        Self(Some(span))
    }

    /// The trace context for the handler and for the outputs.
    pub(crate) fn trace(&self) -> Option<TraceContext> {
        self.0.as_ref().and_then(RecordSpan::trace)
    }

    pub(crate) fn end(mut self, outcome: &Outcome) {
        if let (Some(span), Outcome::Failed(failure)) = (&mut self.0, outcome) {
            span.set("error.type", failure.code.clone());
            span.set("redeliver.error_class", failure.class.as_str());
            span.fail(failure.code.clone());
        }
    }
}
