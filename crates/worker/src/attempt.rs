//! One run of a handler: what happens before, around and after it.

use std::any::Any;
use std::error::Error;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use redeliver_core::error_chain::error_chain;
use redeliver_core::failure::{FailureScope, MESSAGE_LIMIT, bounded_text};
use redeliver_core::headers::TraceContext;
use redeliver_core::route::Arrival;
use redeliver_core::{Failure, HumanDuration, Outcome, Pipeline, Record};
use redeliver_schema::Schema;
use tokio::time::Instant;
use tower::{BoxError, ServiceExt};
use tracing::Instrument as _;

use crate::handler::{Attempt, Handler};
use crate::metrics::WorkerMetrics;
use crate::spans::AttemptSpan;

/// Runs attempts of a pipeline.
pub(crate) struct AttemptRunner {
    pub(crate) pipeline: Arc<Pipeline>,
    /// The consumer group of the pipeline's workers, for spans.
    pub(crate) group: String,
    pub(crate) metrics: Arc<WorkerMetrics>,
    /// Maximum duration of an attempt.
    pub(crate) timeout: Option<Duration>,
    pub(crate) schema: Option<Schema>,
}

impl AttemptRunner {
    /// The outcome, and the trace context of the attempt. Errors, panics and time-outs of the handler are failures.
    pub(crate) async fn run<H: Handler>(
        &self,
        handler: H,
        record: Arc<Record>,
        arrival: &Arrival,
        is_repeated: bool,
    ) -> (Outcome, Option<TraceContext>) {
        let span = AttemptSpan::start(&self.group, &record, arrival);
        let trace = span.trace();
        let began = Instant::now();
        let attempt = Attempt {
            origin: arrival.origin.clone(),
            failed_attempts: arrival.failed_attempts,
            is_repeated,
            is_last: arrival.failed_attempts >= self.pipeline.policy.max_retries(),
            trace: trace.clone(),
            record,
        };
        let outcome = self.handle(handler, attempt).instrument(span.0.clone()).await;
        self.metrics.attempted(&outcome, began.elapsed());
        span.end(&outcome);
        (outcome, trace)
    }

    fn check(&self, record: &Record) -> Result<(), Failure> {
        let schema = self.schema.as_ref();
        schema.map_or(Ok(()), |schema| schema.check(record.value.as_deref()))
    }

    async fn handle<H: Handler>(&self, handler: H, attempt: Attempt) -> Outcome {
        let checked_call = async {
            match self.check(&attempt.record) {
                Ok(()) => within(self.timeout, handler.oneshot(attempt)).await.map(Ok),
                Err(failure) => Ok(Err(failure)),
            }
        };
        // Outside of the time-out, because the destructor of a cancelled future can panic, too.
        let call = AssertUnwindSafe(checked_call).catch_unwind();
        match call.await {
            Ok(Ok(Ok(Ok(outcome)))) => outcome,
            Ok(Ok(Ok(Err(error)))) => Outcome::Failed(error_failure(error)),
            Ok(Ok(Err(invalid))) => Outcome::Failed(invalid),
            Ok(Err(TimedOut(timeout))) => Outcome::Failed(timeout_failure(timeout)),
            Err(panic) => Outcome::Failed(panic_failure(&*panic)),
        }
    }
}

struct TimedOut(Duration);

/// Drops the future after the time-out, if there is one.
async fn within<F: Future>(timeout: Option<Duration>, future: F) -> Result<F::Output, TimedOut> {
    match timeout {
        Some(timeout) => tokio::time::timeout(timeout, future)
            .await
            .map_err(|_| TimedOut(timeout)),
        None => Ok(future.await),
    }
}

// None of these three shows whether the record or a system that the handler calls is the cause.

/// The failure that an error is or that caused it, otherwise one with the messages of all causes.
pub(crate) fn error_failure<E: Into<BoxError> + 'static>(error: E) -> Failure {
    // As a `BoxError`, an `anyhow::Error` no longer tells what it contains.
    let opaque = (&error as &dyn Any).downcast_ref::<anyhow::Error>();
    if let Some(failure) = opaque.and_then(|error| error.chain().find_map(failure_in)) {
        return failure;
    }
    let error: BoxError = error.into();
    let mut cause: Option<&(dyn Error + 'static)> = Some(&*error);
    while let Some(error) = cause {
        if let Some(failure) = failure_in(error) {
            return failure;
        }
        cause = error.source();
    }
    let message = error_chain(error.as_ref());
    Failure::transient("handler.error", bounded_text(&message, MESSAGE_LIMIT))
        .with_scope(FailureScope::Unknown)
}

fn failure_in(error: &(dyn Error + 'static)) -> Option<Failure> {
    // The source of an `io::Error` is not the error that it contains, but the source of that one.
    let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let failure = error.downcast_ref::<Failure>();
    failure.or_else(|| inner?.downcast_ref()).cloned()
}

fn panic_failure(panic: &(dyn Any + Send)) -> Failure {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned());
    Failure::transient("handler.panic", bounded_text(&text, MESSAGE_LIMIT)).with_scope(FailureScope::Unknown)
}

fn timeout_failure(timeout: Duration) -> Failure {
    let message = format!("the attempt took longer than {}", HumanDuration::from(timeout));
    Failure::transient("handler.timeout", message).with_scope(FailureScope::Unknown)
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::tasks::TaskError;

    use super::*;

    #[test]
    fn message_contains_the_causes() {
        let error = TaskError::Failed {
            name: "the upload".to_owned(),
            source: "no space left".into(),
        };
        let failure = error_failure(error);
        assert_eq!(failure.message, "the upload failed: no space left");
    }

    #[test]
    fn wrapped_failure_is_kept() {
        let failure = Failure::permanent("order.unknown", "no such item");
        assert_eq!(error_failure(failure.clone()), failure);
        assert_eq!(error_failure(BoxError::from(failure.clone())), failure);
        assert_eq!(error_failure(anyhow::Error::new(failure.clone())), failure);
        assert_eq!(
            error_failure(anyhow::Error::new(failure.clone()).context("while ordering")),
            failure
        );
        assert_eq!(error_failure(io::Error::other(failure.clone())), failure);
        let wrapped = io::Error::other(TaskError::Failed {
            name: "the order".to_owned(),
            source: failure.clone().into(),
        });
        assert_eq!(error_failure(wrapped), failure);
    }
}
