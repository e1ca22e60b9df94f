//! Spans of jobs: their acceptance is a child of whatever the request's headers name, their wait a child of
//! the acceptance, and the dispatched record names the wait. So one trace goes from the request on.

use redeliver_core::headers::{TraceContext, user_headers};
use redeliver_core::{Record, Timestamp};
use redeliver_runtime::telemetry::{SpanKind, Tracer};
use redeliver_runtime::trace_context::span_context;

use crate::job::{Job, Kind};

/// Makes spans of jobs; nothing when tracing is off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spans(Tracer);

impl Spans {
    pub(crate) fn new(tracer: Tracer) -> Self {
        Self(tracer)
    }

    /// A job is accepted: what it carries from now on names this span.
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

    /// A job is dispatched: what its record is to name.
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
