//! Spans of attempts. A span's parent is the trace context in the record's headers, and the outputs carry the span's
//! own context. So one trace contains the producer and all attempts.

use redeliver_core::headers::TraceContext;
use redeliver_core::route::Arrival;
use redeliver_core::{Outcome, Pipeline, Record};
use redeliver_runtime::telemetry::{RecordSpan, SpanKind, Tracer};
use redeliver_runtime::trace_context::span_context;

/// `None` when tracing is disabled.
pub(crate) struct AttemptSpan(Option<RecordSpan>);

impl AttemptSpan {
    pub(crate) fn start(tracer: &Tracer, pipeline: &Pipeline, record: &Record, arrival: &Arrival) -> Self {
        if !tracer.is_on() {
            return Self(None);
        }
        let parent = span_context(&record.headers);
        let name = format!("{} attempt", pipeline.name);
        let mut span = tracer.start(name, SpanKind::Consumer, parent.as_ref(), None);
        span.set("messaging.system", "kafka");
        span.set("messaging.destination.name", record.position.topic.to_string());
        span.set(
            "messaging.destination.partition.id",
            record.position.partition.to_string(),
        );
        span.set("messaging.kafka.offset", record.position.offset);
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
            span.set("redeliver.error_class", failure.class.as_str());
            span.set("redeliver.error_code", failure.code.clone());
            span.fail(failure.code.clone());
        }
    }
}
