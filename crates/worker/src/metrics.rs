//! Metrics of workers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use redeliver_core::pipeline::DelayQueue;
use redeliver_core::route::Disposition;
use redeliver_core::{ErrorClass, Outcome};
use redeliver_runtime::families;
use redeliver_service::metrics::{PipelineLabel, seconds};

/// Upper bounds of a histogram of attempts. A record that was rejected without an attempt is in the first bucket.
const ATTEMPTS: [f64; 15] = [
    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 1000.0,
];
/// The label `outcome` of attempts and records that succeeded.
const SUCCEEDED: &str = "succeeded";
/// The label `outcome` of records that became dead letters.
const DEAD: &str = "dead";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PipelineClass {
    pipeline: String,
    class: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PipelineOutcome {
    pipeline: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PipelineReason {
    pipeline: String,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PipelineLane {
    pipeline: String,
    lane: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LaneTopic {
    #[prometheus(flatten)]
    lane: PipelineLane,
    topic: String,
}

impl PipelineLane {
    fn new(pipeline: &str, lane: &str) -> Self {
        Self {
            pipeline: pipeline.to_owned(),
            lane: lane.to_owned(),
        }
    }
}

families! {
    /// Metric families of all workers of a process.
    #[derive(Clone)]
    pub struct WorkerFamilies {
        succeeded: Family<PipelineLabel, Counter> = "worker_succeeded", "Records processed successfully";
        retried: Family<PipelineClass, Counter> = "worker_retried",
            "Failed attempts whose records wait for a retry, by failure class";
        dead: Family<PipelineClass, Counter> = "worker_dead", "Dead letters, by failure class";
        long_waits: Family<PipelineLabel, Counter> = "worker_long_waits",
            "Failed attempts whose records wait in the scheduler";
        unusable_anchors: Family<PipelineLabel, Counter> = "worker_unusable_anchors",
            "First retries that count from the failure, because the record's anchor is missing or invalid";
        attempts: Family<PipelineOutcome, Histogram, fn() -> Histogram> = "worker_attempts",
            "Attempts per record until it succeeded or became a dead letter, without forgotten ones",
            Family::new_with_constructor(|| Histogram::new(ATTEMPTS));
        handling: Family<PipelineOutcome, Histogram, fn() -> Histogram> = "worker_handling_seconds",
            "Duration of an attempt, by outcome: succeeded, or the failure class",
            Family::new_with_constructor(seconds);
        breaker_open: Family<PipelineLabel, Gauge> = "worker_breaker_open",
            "1 while the circuit breaker is open or half open because the endpoint fails, else 0";
        breaker_openings: Family<PipelineLabel, Counter> = "worker_breaker_openings",
            "Openings of the circuit breaker";
        paused: Family<PipelineLabel, Gauge> = "worker_paused", "1 while the pipeline is paused, else 0";
        forgotten: Family<PipelineLabel, Counter> = "worker_forgotten",
            "Attempts that do not count because of an outage of the endpoint";
        waiting: Family<PipelineReason, Gauge> = "worker_waiting_records",
            "Records in flight that wait, by reason: attempt (concurrency, a rate, the breaker), order (ordering), limit (limit_by), blocking (key_blocking), held (until it is known whether a failure counts), forgotten (another attempt)";
        in_flight: Family<PipelineLane, Gauge> = "worker_in_flight", "Records read and not yet committed";
        unavailable_topics: Family<LaneTopic, Gauge> = "worker_unavailable_topic_records",
            "Finished records that wait for a missing or unwritable topic";
    }
}

impl WorkerFamilies {
    pub(crate) fn in_flight(&self, pipeline: &str, lane: &str) -> Gauge {
        self.in_flight
            .get_or_create(&PipelineLane::new(pipeline, lane))
            .clone()
    }

    /// The gauges of one lane, one for each topic that it writes.
    pub(crate) fn unavailable_topics(
        &self,
        pipeline: &str,
        lane: &str,
        topics: &[Arc<str>],
    ) -> UnavailableTopicGauges {
        let gauges = topics.iter().map(|topic| {
            let label = LaneTopic {
                lane: PipelineLane::new(pipeline, lane),
                topic: topic.to_string(),
            };
            (
                topic.clone(),
                self.unavailable_topics.get_or_create(&label).clone(),
            )
        });
        UnavailableTopicGauges(gauges.collect())
    }

    pub(crate) fn of(&self, pipeline: &str) -> WorkerMetrics {
        let label = PipelineLabel::new(pipeline);
        let by_class = |family: &Family<PipelineClass, Counter>| {
            ErrorClass::ALL.map(|class| {
                let label = PipelineClass {
                    pipeline: pipeline.to_owned(),
                    class: class.as_str(),
                };
                family.get_or_create(&label).clone()
            })
        };
        let outcome = |outcome| PipelineOutcome {
            pipeline: pipeline.to_owned(),
            outcome,
        };
        let attempts = |of| self.attempts.get_or_create(&outcome(of)).clone();
        let handling = |of| self.handling.get_or_create(&outcome(of)).clone();
        let waiting = WaitingCounts::default().by_reason().map(|(reason, _)| {
            let label = PipelineReason {
                pipeline: pipeline.to_owned(),
                reason,
            };
            self.waiting.get_or_create(&label).clone()
        });
        WorkerMetrics {
            succeeded: self.succeeded.get_or_create(&label).clone(),
            retried: by_class(&self.retried),
            dead: by_class(&self.dead),
            long_waits: self.long_waits.get_or_create(&label).clone(),
            unusable_anchors: self.unusable_anchors.get_or_create(&label).clone(),
            attempts_of_succeeded: attempts(SUCCEEDED),
            attempts_of_dead: attempts(DEAD),
            handling_of_succeeded: handling(SUCCEEDED),
            handling_of_failed: ErrorClass::ALL.map(|class| handling(of_attempt(class).as_str())),
            breaker_open: self.breaker_open.get_or_create(&label).clone(),
            breaker_openings: self.breaker_openings.get_or_create(&label).clone(),
            paused: self.paused.get_or_create(&label).clone(),
            forgotten: self.forgotten.get_or_create(&label).clone(),
            waiting,
        }
    }
}

/// The class of a failed attempt. Only the worker knows that a record has no retries left or is too old, so such a failure
/// of a handler is a permanent one, as in [`redeliver_core::route`].
fn of_attempt(class: ErrorClass) -> ErrorClass {
    match class {
        ErrorClass::Exhausted | ErrorClass::Expired => ErrorClass::Permanent,
        ErrorClass::Transient | ErrorClass::Throttled | ErrorClass::Permanent | ErrorClass::Malformed => {
            class
        }
    }
}

/// How many records of a driver wait, by what they wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WaitingCounts {
    /// Their turn: a slot of `concurrency`, `rate_limit`, or a probe while the breaker is open.
    pub(crate) attempt: usize,
    /// A record before them in their order.
    pub(crate) order: usize,
    /// Room in their limited group.
    pub(crate) limit: usize,
    /// The results of other calls, which decide whether their failed attempt counts.
    pub(crate) held: usize,
    /// Another attempt, after one that does not count.
    pub(crate) forgotten: usize,
    /// Their next attempt, while their followers wait for them.
    pub(crate) blocking: usize,
}

impl WaitingCounts {
    fn by_reason(self) -> [(&'static str, usize); 6] {
        [
            ("attempt", self.attempt),
            ("order", self.order),
            ("limit", self.limit),
            ("held", self.held),
            ("forgotten", self.forgotten),
            ("blocking", self.blocking),
        ]
    }
}

/// One driver's part of the gauges of waiting records, which all drivers of a pipeline share. Dropping it removes the part.
pub(crate) struct WaitingRecords {
    gauges: [Gauge; 6],
    reported: WaitingCounts,
}

impl WaitingRecords {
    pub(crate) fn report(&mut self, counts: WaitingCounts) {
        let as_number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let reported = self.reported.by_reason().into_iter();
        for ((gauge, (_, new)), (_, old)) in self.gauges.iter().zip(counts.by_reason()).zip(reported) {
            if new != old {
                gauge.inc_by(as_number(new) - as_number(old));
            }
        }
        self.reported = counts;
    }
}

impl Drop for WaitingRecords {
    fn drop(&mut self) {
        self.report(WaitingCounts::default());
    }
}

/// Number of records of a lane that wait for each topic that it writes.
pub(crate) struct UnavailableTopicGauges(Vec<(Arc<str>, Gauge)>);

impl UnavailableTopicGauges {
    /// Sets all gauges. Those of topics that are not in `counts` become 0.
    pub(crate) fn set(&self, counts: &BTreeMap<&Arc<str>, usize>) {
        for (topic, gauge) in &self.0 {
            let records = counts.get(topic).copied().unwrap_or_default();
            gauge.set(i64::try_from(records).unwrap_or(i64::MAX));
        }
    }
}

/// The metrics of one pipeline.
pub(crate) struct WorkerMetrics {
    succeeded: Counter,
    retried: [Counter; ErrorClass::ALL.len()],
    dead: [Counter; ErrorClass::ALL.len()],
    long_waits: Counter,
    unusable_anchors: Counter,
    attempts_of_succeeded: Histogram,
    attempts_of_dead: Histogram,
    handling_of_succeeded: Histogram,
    handling_of_failed: [Histogram; ErrorClass::ALL.len()],
    pub(crate) breaker_open: Gauge,
    pub(crate) breaker_openings: Counter,
    pub(crate) paused: Gauge,
    pub(crate) forgotten: Counter,
    waiting: [Gauge; 6],
}

impl WorkerMetrics {
    /// Counts an attempt that took this long.
    pub(crate) fn attempted(&self, outcome: &Outcome, took: Duration) {
        let histogram = match outcome {
            Outcome::Success(_) => &self.handling_of_succeeded,
            Outcome::Failed(failure) => &self.handling_of_failed[failure.class as usize],
        };
        histogram.observe(took.as_secs_f64());
    }

    /// Counts the outputs of a record. `attempts` is the number of its attempts that count, this one
    /// included.
    pub(crate) fn written(&self, disposition: Disposition, attempts: u32) {
        match disposition {
            Disposition::Succeeded => {
                self.succeeded.inc();
                self.attempts_of_succeeded.observe(f64::from(attempts));
            }
            Disposition::Waiting {
                class,
                queue,
                unusable_anchor,
                ..
            } => {
                if queue == DelayQueue::Scheduler {
                    self.long_waits.inc();
                }
                if unusable_anchor.is_some() {
                    self.unusable_anchors.inc();
                }
                self.retried[class as usize].inc();
            }
            Disposition::Dead(class) => {
                self.dead[class as usize].inc();
                self.attempts_of_dead.observe(f64::from(attempts));
            }
        }
    }

    /// The waiting records of another driver.
    pub(crate) fn waiting(&self) -> WaitingRecords {
        WaitingRecords {
            gauges: self.waiting.clone(),
            reported: WaitingCounts::default(),
        }
    }
}

#[cfg(test)]
mod tests;
