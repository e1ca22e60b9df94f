//! The driver: an async task that runs handlers concurrently and routes each record by its outcome.
//!
//! The lanes of a source and its due topic share one driver, so that its limit of concurrent attempts and the order of
//! attempts apply to both.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::future::join_all;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use redeliver_core::error_chain::error_chain;
use redeliver_core::failure::{MESSAGE_LIMIT, bounded_text};
use redeliver_core::pipeline::DelayQueue;
use redeliver_core::route::{Disposition, RouteContext, Routing};
use redeliver_core::{Clock, Failure, Outcome, Pipeline, Timestamp};
use redeliver_proto::long_wait;
use redeliver_runtime::telemetry::Tracer;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, ServiceExt};

use crate::attempt_queue::AttemptQueue;
use crate::engine::{FinishedRecord, LaneChannel, QueuedRecord};
use crate::handler::{Attempt, Handler};
use crate::metrics::WorkerMetrics;
use crate::spans::AttemptSpan;

/// Maximum number of finished records that are sent to the lanes at once.
const MAX_SENT: usize = 1024;
/// How often the clock is read again after it has stepped.
const CLOCK_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) struct Driver<H> {
    pub(crate) handler: H,
    pub(crate) lanes: Vec<Arc<LaneChannel>>,
    /// Notified by the lanes, see [`LaneChannel::new`].
    pub(crate) changed: Arc<Notify>,
    /// Maximum number of concurrent attempts for all lanes together.
    pub(crate) concurrency: usize,
    pub(crate) context: Arc<AttemptContext>,
}

/// What all attempts of a pipeline share.
pub(crate) struct AttemptContext {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) tracer: Tracer,
}

/// Something of one of the driver's lanes.
struct OfLane<T> {
    /// The index of the lane in [`Driver::lanes`].
    lane: usize,
    record: T,
}

impl<H: Handler> Driver<H> {
    /// Runs attempts until all lanes have ended.
    pub(crate) async fn run(self, lanes_ended: Vec<CancellationToken>) {
        let mut lanes_ended = pin!(join_all(lanes_ended.iter().map(CancellationToken::cancelled)));
        let mut running = FuturesUnordered::new();
        let mut queue = AttemptQueue::default();
        // By lane.
        let mut finished: Vec<Vec<FinishedRecord>> = self.lanes.iter().map(|_| Vec::new()).collect();
        loop {
            for (lane, channel) in self.lanes.iter().enumerate() {
                for record in channel.take_queued() {
                    let is_retry = record.is_retry;
                    queue.push(OfLane { lane, record }, is_retry);
                }
                if channel.is_stopping() {
                    // Attempts in progress finish. Records without an attempt go back, so that the lane does not wait for
                    // them; they are read again after the restart.
                    let unprocessed = queue.remove(|queued| queued.lane == lane).into_iter();
                    let unprocessed = unprocessed.map(|queued| queued.record.into_unprocessed());
                    channel.send_finished(&mut unprocessed.collect());
                }
            }
            while running.len() < self.concurrency {
                let Some(OfLane { lane, record }) = queue.pop() else {
                    break;
                };
                let attempt =
                    self.context
                        .clone()
                        .attempt(self.handler.clone(), record, self.lanes[lane].clone());
                running.push(attempt.map(move |record| OfLane { lane, record }));
            }
            tokio::select! {
                biased;
                // Attempts that are still running have exceeded the lanes' grace period, or a lane has failed. They are
                // dropped. Their offsets are not committed, so their records are read again.
                _ = &mut lanes_ended => return,
                Some(first) = running.next(), if !running.is_empty() => {
                    finished[first.lane].push(first.record);
                    // Everything that is ready goes to the lanes at once: one wake-up, and one transaction if it fits.
                    for _ in 1..MAX_SENT {
                        let Some(Some(next)) = running.next().now_or_never() else { break };
                        finished[next.lane].push(next.record);
                    }
                    for (channel, finished) in self.lanes.iter().zip(&mut finished) {
                        channel.send_finished(finished);
                    }
                }
                () = self.changed.notified() => {}
            }
        }
    }
}

impl AttemptContext {
    async fn attempt<H: Handler>(
        self: Arc<Self>,
        handler: H,
        queued: QueuedRecord,
        channel: Arc<LaneChannel>,
    ) -> FinishedRecord {
        let QueuedRecord {
            assignment,
            offset,
            record,
            arrival,
            is_assigned,
            size,
            ..
        } = queued;
        let record = Arc::new(record);
        let (outcome, trace) = if is_assigned.load(Ordering::SeqCst) {
            let span = AttemptSpan::start(&self.tracer, &self.pipeline, &record, &arrival);
            let trace = span.trace();
            let attempt = Attempt {
                record: record.clone(),
                origin: arrival.origin.clone(),
                failed_attempts: arrival.failed_attempts,
                trace: trace.clone(),
            };
            let began = Instant::now();
            let call = AssertUnwindSafe(handler.oneshot(attempt)).catch_unwind();
            let outcome = match call.await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(error)) => Outcome::Failed(error_failure(&error.into())),
                Err(panic) => Outcome::Failed(panic_failure(&*panic)),
            };
            self.metrics.handling.observe(began.elapsed().as_secs_f64());
            span.end(&outcome);
            (outcome, trace)
        } else {
            // The partition was revoked while the record was queued. The lane drops any result, so the handler is not
            // called. The record still has to be returned, because it counts as in flight.
            (Outcome::Success(Vec::new()), None)
        };
        // The handler may have kept a reference to the record.
        let record = Arc::try_unwrap(record).unwrap_or_else(|shared| (*shared).clone());
        let now = match outcome {
            Outcome::Success(_) => Some(self.clock.now()),
            // A due time that counts from a wrong time could make the retry early, or late without limit.
            Outcome::Failed(_) => self.confirmed_time(&channel).await,
        };
        let Some(now) = now else {
            return FinishedRecord {
                assignment,
                offset,
                routing: None,
                original: None,
                size,
            };
        };
        let context = RouteContext {
            pipeline: &self.pipeline,
            arrival: &arrival,
            trace: trace.as_ref(),
            now,
            random: fastrand::f64(),
        };
        let routing = context.route(&record, outcome);
        FinishedRecord {
            assignment,
            offset,
            routing: Some(wrap_long_wait(&self.pipeline, routing)),
            original: Some((record, arrival)),
            size,
        }
    }
}

impl AttemptContext {
    /// The current time, as soon as it is certain. `None` if the lane stops before: it must not use up its grace period.
    async fn confirmed_time(&self, channel: &LaneChannel) -> Option<Timestamp> {
        loop {
            if let Some(now) = self.clock.confirmed() {
                return Some(now);
            }
            if channel.is_stopping() {
                return None;
            }
            tokio::time::sleep(CLOCK_INTERVAL).await;
        }
    }
}

/// Wraps a record that waits in the scheduler in a command. `core` cannot, because it does not know the wire format.
fn wrap_long_wait(pipeline: &Pipeline, mut routing: Routing) -> Routing {
    if let Disposition::Waiting {
        queue: DelayQueue::Scheduler,
        due,
        ..
    } = routing.disposition
    {
        let records = routing.outputs.into_iter();
        routing.outputs = records
            .map(|record| long_wait::wrap(&pipeline.name, due, record))
            .collect();
    }
    routing
}

fn error_failure(error: &BoxError) -> Failure {
    let message = error_chain(error.as_ref());
    Failure::transient("handler.error", bounded_text(&message, MESSAGE_LIMIT))
}

fn panic_failure(panic: &(dyn Any + Send)) -> Failure {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned());
    Failure::transient("handler.panic", bounded_text(&text, MESSAGE_LIMIT))
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::tasks::TaskError;

    use super::*;

    #[test]
    fn the_message_of_a_failed_attempt_contains_the_causes_of_the_error() {
        let error = TaskError::Failed {
            name: "the upload".to_owned(),
            source: "no space left".into(),
        };
        let failure = error_failure(&error.into());
        assert_eq!(failure.message, "the upload failed: no space left");
    }
}
