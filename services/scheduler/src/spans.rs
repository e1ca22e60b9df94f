//! Trace spans of jobs. The span of the acceptance is a child of the request's trace context, the span of the wait is a child
//! of the acceptance, and the dispatched record carries the context of the wait. So one trace follows the job.

use redeliver_core::headers::{TraceContext, user_headers};
use redeliver_core::{Record, TRACE_TARGET, Timestamp};
use redeliver_runtime::telemetry::{self, KeyValue, SpanKind, Wait, record_wait};
use redeliver_runtime::trace_context::span_context;
use tracing::info_span;

use crate::job::{Job, Kind};

/// Records the acceptance of a job, and sets the job's trace context to that span.
pub(crate) fn accepted(job: &mut Job, record: &Record) {
    if job.kind == Kind::LongWait {
        return;
    }
    let span = info_span!(
        target: TRACE_TARGET,
        parent: None,
        "accept",
        otel.name = format!("{} accept", job.app),
        otel.kind = "consumer",
        "messaging.system" = "kafka",
        "messaging.destination.name" = &*record.position.topic,
        "redeliver.job" = %job.id,
        "redeliver.due" = %job.due,
    );
    if span.is_disabled() {
        return;
    }
    telemetry::set_parent(&span, span_context(&job.payload.headers));
    if let Some(trace) = telemetry::trace(&span) {
        job.payload.headers = user_headers(&job.payload.headers, Some(&trace));
    }
}

/// Records the wait of a dispatched job, and returns the trace context for its record.
pub(crate) fn dispatched(job: &Job, now: Timestamp) -> Option<TraceContext> {
    if !telemetry::is_tracing() {
        return None;
    }
    record_wait(Wait {
        name: format!("{} wait", job.app),
        kind: SpanKind::Producer,
        parent: span_context(&job.payload.headers),
        start: Some(job.accepted.min(now)),
        end: now,
        attributes: vec![
            KeyValue::new("messaging.system", "kafka"),
            KeyValue::new("messaging.destination.name", job.topic.to_string()),
            KeyValue::new("redeliver.job", job.id.to_string()),
            KeyValue::new("redeliver.due", job.due.to_string()),
        ],
    })
}
