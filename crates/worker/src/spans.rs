//! Spans of attempts: each is a child of whatever the record's headers name, and is named by the headers
//! of whatever becomes of the record. So one trace goes from the first produce through every attempt.

use redeliver_core::headers::TraceContext;
use redeliver_core::route::Arrival;
use redeliver_core::{Outcome, Pipeline, Record};
use redeliver_runtime::telemetry::{RecordSpan, SpanKind, Tracer};
use redeliver_runtime::trace_context::span_context;

/// The span of one attempt; nothing when tracing is off.
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

    /// What the handler passes on.
    pub(crate) fn trace(&self) -> Option<TraceContext> {
        self.0.as_ref().and_then(RecordSpan::trace)
    }

    /// Ends the span.
    pub(crate) fn end(mut self, outcome: &Outcome) {
        if let (Some(span), Outcome::Failed(failure)) = (&mut self.0, outcome) {
            span.set("redeliver.error_class", failure.class.as_str());
            span.set("redeliver.error_code", failure.code.clone());
            span.fail(failure.code.clone());
        }
    }
}
