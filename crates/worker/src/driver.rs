//! The driver: one async task per lane that runs handlers, a bounded number at a time, and decides with
//! [`route`] what becomes of each record.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use redeliver_core::failure::{MESSAGE_LIMIT, bounded_text};
use redeliver_core::pipeline::DelayQueue;
use redeliver_core::route::{Disposition, Routing, route};
use redeliver_core::{Clock, Failure, Outcome, Pipeline};
use redeliver_proto::long_wait;
use redeliver_runtime::telemetry::Tracer;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, ServiceExt};

use crate::engine::{Done, Exchange, Job};
use crate::handler::{Attempt, Handler};
use crate::metrics::WorkerMetrics;
use crate::spans::AttemptSpan;

/// Everything a driver needs.
pub(crate) struct Driver<H> {
    pub(crate) handler: H,
    pub(crate) exchange: Arc<Exchange>,
    pub(crate) concurrency: usize,
    pub(crate) surroundings: Arc<Surroundings>,
}

/// What every attempt at a record of a pipeline needs.
pub(crate) struct Surroundings {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) tracer: Tracer,
}

impl<H: Handler> Driver<H> {
    /// Runs until the lane has ended.
    pub(crate) async fn run(self, lane_ended: CancellationToken) {
        let mut running = FuturesUnordered::new();
        let mut retries = VecDeque::new();
        let mut firsts = VecDeque::new();
        let mut done = Vec::new();
        loop {
            for job in self.exchange.take_jobs() {
                if job.is_retry {
                    retries.push_back(job);
                } else {
                    firsts.push_back(job);
                }
            }
            if self.exchange.is_stopping() {
                done.extend(retries.drain(..).chain(firsts.drain(..)).map(given_back));
                self.exchange.give(&mut done);
            }
            while running.len() < self.concurrency {
                // What has waited for its time goes before what has just come.
                let Some(job) = retries.pop_front().or_else(|| firsts.pop_front()) else {
                    break;
                };
                running.push(self.surroundings.clone().attempt(self.handler.clone(), job));
            }
            tokio::select! {
                biased;
                () = lane_ended.cancelled() => return,
                Some(first) = running.next(), if !running.is_empty() => {
                    done.push(first);
                    // All that is ready goes to the lane together.
                    while let Some(Some(next)) = running.next().now_or_never() {
                        done.push(next);
                        if done.len() >= 1024 {
                            break;
                        }
                    }
                    self.exchange.give(&mut done);
                }
                () = self.exchange.arrived.notified() => {}
            }
        }
    }
}

impl Surroundings {
    async fn attempt<H: Handler>(self: Arc<Self>, handler: H, job: Job) -> Done {
        let Job {
            assignment,
            offset,
            record,
            arrival,
            wanted,
            size,
            ..
        } = job;
        let record = Arc::new(record);
        let (outcome, trace) = if wanted.load(Ordering::SeqCst) {
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
                Ok(Err(error)) => Outcome::Failed(failed(&error.into())),
                Err(panic) => Outcome::Failed(panicked(&*panic)),
            };
            self.metrics.handling.observe(began.elapsed().as_secs_f64());
            span.end(&outcome);
            (outcome, trace)
        } else {
            // The partition has moved: the lane drops whatever we say, so the call is spared.
            (Outcome::Success(Vec::new()), None)
        };
        let record = Arc::try_unwrap(record).unwrap_or_else(|shared| (*shared).clone());
        let now = self.clock.now();
        let routing = route(
            &self.pipeline,
            &record,
            &arrival,
            outcome,
            trace.as_ref(),
            now,
            fastrand::f64(),
        );
        Done {
            assignment,
            offset,
            routing: Some(as_written(&self.pipeline, routing)),
            handled: Some((record, arrival)),
            size,
        }
    }
}

/// What waits with the scheduler goes there inside of a command.
fn as_written(pipeline: &Pipeline, mut routing: Routing) -> Routing {
    if let Disposition::Waiting {
        carrier: DelayQueue::Scheduler,
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

#[expect(clippy::needless_pass_by_value, reason = "the record ends here")]
fn given_back(job: Job) -> Done {
    Done {
        assignment: job.assignment,
        offset: job.offset,
        routing: None,
        handled: None,
        size: job.size,
    }
}

fn failed(error: &BoxError) -> Failure {
    Failure::transient("handler.error", bounded_text(&error.to_string(), MESSAGE_LIMIT))
}

fn panicked(panic: &(dyn Any + Send)) -> Failure {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned());
    Failure::transient("handler.panic", bounded_text(&text, MESSAGE_LIMIT))
}
