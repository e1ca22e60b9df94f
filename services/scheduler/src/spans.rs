//! Trace spans of jobs. The span of the acceptance is a child of the request's trace context, the span of the wait is a child
//! of the acceptance, and the dispatched record carries the context of the wait. So one trace follows the job.

use redeliver_core::headers::{TraceContext, user_headers};
use redeliver_core::{Record, Timestamp};
use redeliver_runtime::telemetry::{SpanKind, Tracer};
use redeliver_runtime::trace_context::span_context;

use crate::job::{Job, Kind};

/// Records spans of jobs, unless tracing is off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spans(Tracer);

impl Spans {
    pub(crate) fn new(tracer: Tracer) -> Self {
        Self(tracer)
    }

    /// Records the acceptance of a job, and sets the job's trace context to that span.
    pub(crate) fn accepted(&self, job: &mut Job, record: &Record) {
        if !self.0.is_on() || job.kind == Kind::LongWait {
            return;
        }
        let parent = span_context(&job.payload.headers);
        let name = format!("{} accept", job.app);
        let mut span = self.0.start(name, SpanKind::Consumer, parent.as_ref(), None);
        span.set("messaging.system", "kafka");
        span.set("messaging.destination.name", record.position.topic.to_string());
        span.set("redeliver.job", job.id.to_string());
        span.set("redeliver.due", job.due.to_string());
        if let Some(trace) = span.trace() {
            job.payload.headers = user_headers(&job.payload.headers, Some(&trace));
        }
    }

    /// Records the wait of a dispatched job, and returns the trace context for its record.
    pub(crate) fn dispatched(&self, job: &Job, now: Timestamp) -> Option<TraceContext> {
        if !self.0.is_on() {
            return None;
        }
        let parent = span_context(&job.payload.headers);
        let name = format!("{} wait", job.app);
        let mut span = self.0.start(
            name,
            SpanKind::Producer,
            parent.as_ref(),
            Some(job.accepted.min(now)),
        );
        span.set("messaging.system", "kafka");
        span.set("messaging.destination.name", job.topic.to_string());
        span.set("redeliver.job", job.id.to_string());
        span.set("redeliver.due", job.due.to_string());
        let trace = span.trace();
        span.end_at(now);
        trace
    }
}
