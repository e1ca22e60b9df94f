//! The driver: an async task that runs handlers concurrently, each in a task of its own, and routes each record by its
//! outcome.
//!
//! The lanes of a source and its due topic share one driver, so that its limit of concurrent attempts and the order of
//! attempts apply to both.

use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use redeliver_core::headers::TraceContext;
use redeliver_core::pipeline::DelayQueue;
use redeliver_core::route::{Disposition, RouteContext, Routing};
use redeliver_core::{Clock, ErrorClass, Outcome, Pipeline, Timestamp};
use redeliver_proto::long_wait;
use tokio::sync::Notify;
use tokio::task::JoinError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::attempt::AttemptRunner;
use crate::breaker::{Gate, Offer, Permit, Phase, Verdict, View};
use crate::engine::{Blocks, FinishedRecord, LaneChannel, QueuedRecord};
use crate::failure_log::FailureLog;
use crate::groups::Grouping;
use crate::handler::Handler;
use crate::metrics::WorkerMetrics;
use crate::rate_limit::Limiter;

/// Maximum number of finished records that are sent to the lanes at once.
const MAX_SENT: usize = 1024;
/// Bounds of the delay between attempts of a record that blocks its followers.
const BLOCKING_DELAY: Duration = Duration::from_millis(100);
const BLOCKING_DELAY_MAX: Duration = Duration::from_secs(5);
/// How often the clock is read again after it has stepped.
const CLOCK_INTERVAL: Duration = Duration::from_millis(100);

mod work;

use work::{Held, OfLane, Work};

pub(crate) struct Driver<H> {
    pub(crate) handler: H,
    pub(crate) lanes: Vec<Arc<LaneChannel>>,
    /// Notified by the lanes, see [`LaneChannel::new`].
    pub(crate) changed: Arc<Notify>,
    /// Maximum number of concurrent attempts for all lanes together.
    pub(crate) concurrency: usize,
    /// See [`WorkerSpec::repeated_slots`](crate::WorkerSpec::repeated_slots).
    pub(crate) repeated_slots: usize,
    pub(crate) context: Arc<AttemptContext>,
    pub(crate) gate: Gate,
}

/// What all attempts of a pipeline share.
pub(crate) struct AttemptContext {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) runner: AttemptRunner,
    pub(crate) limiter: Arc<Limiter>,
    pub(crate) failures: Arc<FailureLog>,
    pub(crate) grouping: Arc<Grouping>,
    pub(crate) partitions: PartitionsOf,
}

/// The number of partitions of a topic; `None` if it is not known.
pub(crate) type PartitionsOf = Box<dyn Fn(&str) -> Option<u32> + Send + Sync>;

/// A record after its attempt.
struct Called {
    queued: QueuedRecord,
    outcome: Outcome,
    /// The trace context of the attempt.
    trace: Option<TraceContext>,
}

/// What a task of the driver ends with.
#[expect(clippy::large_enum_variant, reason = "there are as many of both")]
enum Ended {
    Called(OfLane<Called>, Permit),
    Routed(OfLane<FinishedRecord>),
}

impl<H: Handler> Driver<H> {
    /// Runs attempts until all lanes have ended.
    pub(crate) async fn run(self, lanes_ended: Vec<CancellationToken>) {
        let mut lanes_ended = pin!(join_all(lanes_ended.iter().map(CancellationToken::cancelled)));
        let mut view = self.gate.watch();
        let mut work = Work::new(self.lanes.len(), &self.context.grouping, self.repeated_slots);
        let mut waiting = self.context.metrics.waiting();
        loop {
            for (lane, channel) in self.lanes.iter().enumerate() {
                // Looked at before the records, so that it covers those that come later.
                let has_revoked = channel.take_revoked();
                for record in channel.take_queued() {
                    work.arrive(OfLane { lane, record });
                }
                if channel.is_stopping() {
                    // Attempts in progress finish. Records without an attempt that counts go back, so that the lane does
                    // not wait for them; they are read again after the restart.
                    work.give_back(|of, _| of == lane);
                } else if has_revoked {
                    // The lane drops them. They count as in flight until then.
                    work.give_back(|of, queued| of == lane && !queued.is_assigned());
                }
            }
            self.decide(&mut work);
            let wake_at = self.start(&mut work);
            waiting.report(work.waiting());
            for (channel, finished) in self.lanes.iter().zip(&mut work.finished) {
                channel.send_finished(finished);
            }
            tokio::select! {
                biased;
                // Attempts that are still running have exceeded the lanes' grace period, or a lane has failed. They are
                // cancelled. Their offsets are not committed, so their records are read again.
                _ = &mut lanes_ended => return,
                Some(first) = work.running.join_next() => {
                    self.ended(first, &mut work);
                    // Everything that is ready goes to the lanes at once: one wake-up, and one transaction if it fits.
                    for _ in 1..MAX_SENT {
                        let Some(next) = work.running.try_join_next() else { break };
                        self.ended(next, &mut work);
                    }
                }
                () = self.changed.notified() => {}
                // The driver has a sender of its own, so the channel is never closed.
                _ = view.changed() => {}
                () = sleep_until(wake_at) => {}
            }
        }
    }

    /// Decides about held failures, if the results of other attempts allow it.
    fn decide(&self, work: &mut Work) {
        if work.held.is_empty() {
            return;
        }
        let view = self.gate.view();
        for held in std::mem::take(&mut work.held) {
            match view.decide(held.failure) {
                Verdict::Held(_) => work.held.push(held),
                Verdict::Forgotten => self.forget(held.called, work),
                Verdict::Own => self.conclude(held.called, work),
                Verdict::Poison => self.route(held.called, work),
            }
        }
    }

    /// Starts attempts. Returns when to look again, if nothing else happens.
    fn start(&self, work: &mut Work) -> Option<Instant> {
        // All lanes of a pipeline are paused together.
        if self.lanes.iter().any(|lane| lane.is_paused()) {
            return None;
        }
        let wake_at = [self.repeat_held(work), self.unblock(work)];
        while work.slots < self.concurrency && !work.queue.is_empty() {
            // Before the breaker, which would admit no other in the place of an attempt that has to wait.
            if !work.may_start
                && let Err(wait) = self.context.limiter.start()
            {
                let at = Instant::now() + wait;
                return wake_at.into_iter().flatten().chain([at]).min();
            }
            // Kept if the attempt does not start now.
            work.may_start = true;
            let offer = Offer {
                forgotten: work.queue.has_forgotten(),
                others: !work.queue.has_only_forgotten(),
            };
            let permit = match self.gate.start(offer) {
                Ok(permit) => permit,
                Err(wait_until) => return wait_until.into_iter().chain(wake_at.into_iter().flatten()).min(),
            };
            let Some(OfLane { lane, record }) = work.next(permit.order()) else {
                break;
            };
            work.may_start = false;
            let called = self.context.clone().call(self.handler.clone(), record);
            let ended = called.map(move |record| Ended::Called(OfLane { lane, record }, permit));
            work.running.spawn(ended);
        }
        wake_at.into_iter().flatten().min()
    }

    /// Puts the oldest held record first in the queue if the results of other attempts have not decided about it for too
    /// long. Returns when that will be.
    fn repeat_held(&self, work: &mut Work) -> Option<Instant> {
        if work.held.is_empty() || work.slots >= self.concurrency {
            return None;
        }
        let is_alone = work.queue.is_empty() && work.slots == 0;
        let at = self.gate.repeat_at(is_alone);
        let wait_until = at.filter(|at| *at > Instant::now());
        if wait_until.is_none() {
            let called = work.held.remove(0).called;
            work.repeat(called.map(|called| called.queued));
        }
        wait_until
    }

    /// Puts blocking records in the queue whose next attempts are due. Returns the time of the next one.
    fn unblock(&self, work: &mut Work) -> Option<Instant> {
        let now = Instant::now();
        let due: Vec<_> = work.blocking.extract_if(.., |(at, _)| *at <= now).collect();
        if !due.is_empty() {
            let is_closed = self.gate.view().phase == Phase::Closed;
            for (_, queued) in due {
                match is_closed {
                    true => work.repeat(queued),
                    // Records that have not been probed go first.
                    false => work.push(queued),
                }
            }
        }
        work.blocking.iter().map(|(at, _)| *at).min()
    }

    fn ended(&self, ended: Result<Ended, JoinError>, work: &mut Work) {
        match ended {
            Ok(Ended::Routed(OfLane { lane, record })) => work.finished[lane].push(record),
            Ok(Ended::Called(called, permit)) => {
                let Called { queued, outcome, .. } = &called.record;
                work.end_attempt(queued);
                match permit.ended(&queued.arrival.origin, queued.is_retry, outcome) {
                    // The lane drops it. It must not wait here for others.
                    _ if !queued.is_assigned() => work.return_unprocessed(called.map(|called| called.queued)),
                    Verdict::Own => self.conclude(called, work),
                    Verdict::Poison => self.route(called, work),
                    Verdict::Held(failure) => work.held.push(Held { called, failure }),
                    Verdict::Forgotten => self.forget(called, work),
                }
            }
            // Panics of handlers are outcomes. The driver cancels no task, but a runtime that shuts down does.
            Err(error) => {
                if let Ok(panic) = error.try_into_panic() {
                    resume_unwind(panic)
                }
            }
        }
    }

    fn forget(&self, called: OfLane<Called>, work: &mut Work) {
        self.context.metrics.forgotten.inc();
        let mut queued = called.map(|called| called.queued);
        // The attempt was that of an outage. The next one is the first.
        queued.record.blocks = None;
        work.queue.push_forgotten(queued);
    }

    /// Ends an attempt that counts, unless the record blocks its followers.
    fn conclude(&self, mut called: OfLane<Called>, work: &mut Work) {
        let view = self.gate.view();
        match self
            .context
            .blocks_until(&mut called.record, view, Instant::now())
        {
            // Others are probed first: its failures may never say anything about the endpoint.
            Some(_) if view.phase != Phase::Closed && !work.queue.is_empty() => self.forget(called, work),
            Some(at) => work.blocking.push((at, called.map(|called| called.queued))),
            None => self.route(called, work),
        }
    }

    /// Decides where a record goes next.
    fn route(&self, called: OfLane<Called>, work: &mut Work) {
        work.leave_order(&called.record.queued.groups);
        let OfLane { lane, record: called } = called;
        let now = match called.outcome {
            Outcome::Success(_) => Some(self.context.clock.now()),
            // A due time that counts from a wrong time could make the retry early, or late without limit.
            Outcome::Failed(_) => self.context.clock.confirmed(),
        };
        if let Some(now) = now {
            work.finished[lane].push(self.context.routed(called, now));
            return;
        }
        let (context, channel) = (self.context.clone(), self.lanes[lane].clone());
        let routed = async move {
            let record = match context.confirmed_time(&channel).await {
                Some(now) => context.routed(called, now),
                None => called.queued.into_unprocessed(),
            };
            Ended::Routed(OfLane { lane, record })
        };
        work.running.spawn(routed);
    }
}

impl AttemptContext {
    /// Runs the handler.
    async fn call<H: Handler>(self: Arc<Self>, handler: H, queued: QueuedRecord) -> Called {
        let QueuedRecord {
            assignment,
            offset,
            record,
            arrival,
            is_assigned,
            is_retry,
            groups,
            blocks,
            size,
        } = queued;
        let record = Arc::new(record);
        let (outcome, trace) = self
            .runner
            .run(handler, record.clone(), &arrival, blocks.is_some())
            .await;
        Called {
            queued: QueuedRecord {
                assignment,
                offset,
                // The handler may have kept a reference to the record.
                record: Arc::try_unwrap(record).unwrap_or_else(|shared| (*shared).clone()),
                arrival,
                is_assigned,
                is_retry,
                groups,
                blocks,
                size,
            },
            outcome,
            trace,
        }
    }

    /// When the next attempt of a record starts that blocks its followers. `None` if it does not, or no longer.
    fn blocks_until(&self, called: &mut Called, breaker: View, now: Instant) -> Option<Instant> {
        let limit = self.grouping.key_blocking?;
        let Outcome::Failed(failure) = &called.outcome else {
            return None;
        };
        let may_succeed = matches!(failure.class, ErrorClass::Transient | ErrorClass::Throttled);
        if !may_succeed || !called.queued.groups.is_ordered() {
            return None;
        }
        let first = Blocks {
            since: now,
            breaker_changes: breaker.changes,
        };
        let blocks = called
            .queued
            .blocks
            .filter(|blocks| blocks.breaker_changes == breaker.changes);
        let Blocks { since, .. } = *called.queued.blocks.insert(blocks.unwrap_or(first));
        // The delay doubles, because it is as long as the time that has passed.
        let delay = (now - since).clamp(BLOCKING_DELAY, BLOCKING_DELAY_MAX);
        let delay = delay.max(failure.retry_after.unwrap_or_default());
        let blocked = (now - since).checked_add(delay)?;
        if blocked > limit {
            return None;
        }
        now.checked_add(delay)
    }

    /// Decides at `now` where a record goes after its attempt.
    fn routed(&self, called: Called, now: Timestamp) -> FinishedRecord {
        let Called {
            queued,
            outcome,
            trace,
        } = called;
        let context = RouteContext {
            pipeline: &self.pipeline,
            arrival: &queued.arrival,
            trace: trace.as_ref(),
            now,
            random: fastrand::f64(),
            partitions: &self.partitions,
        };
        let failure = match &outcome {
            Outcome::Failed(failure) => Some(failure.clone()),
            Outcome::Success(_) => None,
        };
        let counts = failure.as_ref().is_none_or(|failure| failure.class.counts());
        let routing = context.route(&queued.record, outcome);
        // A handler can name a topic that the pipeline does not declare.
        if let Some(failure) = failure.or_else(|| routing.failure()) {
            let origin = &queued.arrival.origin;
            self.failures.failed(origin, &failure, routing.disposition);
        }
        FinishedRecord {
            assignment: queued.assignment,
            offset: queued.offset,
            routing: Some(wrap_long_wait(&self.pipeline, routing)),
            attempts: queued.arrival.failed_attempts.saturating_add(u32::from(counts)),
            original: Some((queued.record, queued.arrival)),
            ordered: queued.groups.ordered,
            size: queued.size,
        }
    }

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

/// Never ends without a time.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
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

#[cfg(test)]
mod tests;
