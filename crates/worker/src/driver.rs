//! The driver: an async task per lane that runs handlers concurrently and routes each record by its outcome.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use redeliver_core::failure::{MESSAGE_LIMIT, bounded_text};
use redeliver_core::pipeline::DelayQueue;
use redeliver_core::route::{Disposition, RouteContext, Routing};
use redeliver_core::{Clock, Failure, Outcome, Pipeline, Timestamp};
use redeliver_proto::long_wait;
use redeliver_runtime::telemetry::Tracer;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, ServiceExt};

use crate::engine::{FinishedRecord, LaneChannel, QueuedRecord};
use crate::handler::{Attempt, Handler};
use crate::metrics::WorkerMetrics;
use crate::spans::AttemptSpan;

/// Maximum number of finished records that are sent to the lane at once.
const MAX_SENT: usize = 1024;
/// How often the clock is read again after it has stepped.
const CLOCK_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) struct Driver<H> {
    pub(crate) handler: H,
    pub(crate) channel: Arc<LaneChannel>,
    /// Maximum number of concurrent attempts.
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

impl<H: Handler> Driver<H> {
    /// Runs attempts until the lane has ended.
    pub(crate) async fn run(self, lane_ended: CancellationToken) {
        let mut running = FuturesUnordered::new();
        let mut retries = VecDeque::new();
        let mut new = VecDeque::new();
        let mut finished = Vec::new();
        loop {
            for queued in self.channel.take_queued() {
                if queued.is_retry {
                    retries.push_back(queued);
                } else {
                    new.push_back(queued);
                }
            }
            if self.channel.is_stopping() {
                // Attempts in progress finish. Records without an attempt go back, so that the lane does not wait for
                // them; they are read again after the restart.
                let unprocessed = retries.drain(..).chain(new.drain(..));
                finished.extend(unprocessed.map(QueuedRecord::into_unprocessed));
                self.channel.send_finished(&mut finished);
            }
            while running.len() < self.concurrency {
                // Retries first: they have already waited until their due time, and a backlog of new records must not
                // delay them further.
                let Some(queued) = retries.pop_front().or_else(|| new.pop_front()) else {
                    break;
                };
                running.push(self.context.clone().attempt(self.handler.clone(), queued));
            }
            tokio::select! {
                biased;
                // Attempts that are still running have exceeded the lane's grace period, or the lane has failed. They
                // are dropped. Their offsets are not committed, so their records are read again.
                () = lane_ended.cancelled() => return,
                Some(first) = running.next(), if !running.is_empty() => {
                    finished.push(first);
                    // Everything that is ready goes to the lane at once: one wake-up, and one transaction if it fits.
                    while finished.len() < MAX_SENT
                        && let Some(Some(next)) = running.next().now_or_never()
                    {
                        finished.push(next);
                    }
                    self.channel.send_finished(&mut finished);
                }
                () = self.channel.changed.notified() => {}
            }
        }
    }
}

impl AttemptContext {
    async fn attempt<H: Handler>(self: Arc<Self>, handler: H, queued: QueuedRecord) -> FinishedRecord {
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
            Outcome::Success(_) => self.clock.now(),
            // A due time that counts from a wrong time could make the retry early, or late without limit.
            Outcome::Failed(_) => self.confirmed_time().await,
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
    /// The current time, as soon as it is certain.
    async fn confirmed_time(&self) -> Timestamp {
        loop {
            if let Some(now) = self.clock.confirmed() {
                return now;
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
    Failure::transient("handler.error", bounded_text(&error.to_string(), MESSAGE_LIMIT))
}

fn panic_failure(panic: &(dyn Any + Send)) -> Failure {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned());
    Failure::transient("handler.panic", bounded_text(&text, MESSAGE_LIMIT))
}
