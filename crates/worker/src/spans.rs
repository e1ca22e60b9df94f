//! Spans of attempts. A span's parent is the trace context in the record's headers, and the outputs carry the span's
//! own context. So one trace contains the producer and all attempts.
//!
//! Names follow version 1.44.0 of the semantic conventions of OpenTelemetry for Kafka
//! (<https://opentelemetry.io/docs/specs/semconv/messaging/kafka/>). The key of the record is left out, because it may be
//! personal data.

use redeliver_core::headers::TraceContext;
use redeliver_core::route::Arrival;
use redeliver_core::{Outcome, Record, TRACE_TARGET};
use redeliver_runtime::telemetry::{self, OpenTelemetrySpanExt as _};
use redeliver_runtime::trace_context::span_context;
use tracing::{Span, info_span};

/// The operation of an attempt: a record is passed to a handler.
const PROCESS: &str = "process";

/// Disabled when tracing is.
pub(crate) struct AttemptSpan(pub(crate) Span);

impl AttemptSpan {
    /// `group` is the consumer group that has read the record.
    pub(crate) fn start(group: &str, record: &Record, arrival: &Arrival) -> Self {
        let position = &record.position;
        let span = info_span!(
            target: TRACE_TARGET,
            parent: None,
            PROCESS,
            otel.name = format!("{PROCESS} {}", position.topic),
            otel.kind = "consumer",
            "messaging.system" = "kafka",
            "messaging.operation.type" = PROCESS,
            "messaging.operation.name" = PROCESS,
            "messaging.consumer.group.name" = group,
            "messaging.destination.name" = &*position.topic,
            "messaging.destination.partition.id" = position.partition.to_string(),
            "messaging.kafka.offset" = position.offset,
            "messaging.kafka.message.tombstone" = record.value.is_none().then_some(true),
            "redeliver.attempt" = i64::from(arrival.failed_attempts) + 1,
            "redeliver.origin" = arrival.origin.id(),
        );
        if !span.is_disabled() {
            telemetry::set_parent(&span, span_context(&record.headers));
        }
        Self(span)
    }

    /// The trace context for the handler and for the outputs.
    pub(crate) fn trace(&self) -> Option<TraceContext> {
        telemetry::trace(&self.0)
    }

    pub(crate) fn end(self, outcome: &Outcome) {
        if let Outcome::Failed(failure) = outcome
            && !self.0.is_disabled()
        {
            self.0.set_attribute("error.type", failure.code.clone());
            self.0
                .set_attribute("redeliver.error_class", failure.class.as_str());
            telemetry::fail(&self.0, failure.code.clone());
        }
    }
}
