//! Metrics of workers and of lanes: names, units and help in one place.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use redeliver_core::ErrorClass;
use redeliver_core::pipeline::DelayQueue;
use redeliver_core::route::Disposition;
use redeliver_kafka::LaneObserver;
use redeliver_kafka::remedy::RecoveryAction;
use redeliver_runtime::health::Part;

/// Upper bounds in seconds, from half a millisecond to a minute.
pub const SECONDS: [f64; 16] = [
    0.0005, 0.001, 0.002, 0.005, 0.008, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0,
];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PipelineClass {
    pipeline: String,
    class: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PipelineLabel {
    pipeline: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LaneLabel {
    lane: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LaneTopic {
    lane: String,
    topic: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LaneRemedy {
    lane: String,
    remedy: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PartitionLabel {
    topic: String,
    partition: i32,
}

/// The families that all workers of a process share.
#[derive(Clone)]
pub struct WorkerFamilies {
    succeeded: Family<PipelineLabel, Counter>,
    retried: Family<PipelineClass, Counter>,
    dead: Family<PipelineClass, Counter>,
    long_waits: Family<PipelineLabel, Counter>,
    handling: Family<PipelineLabel, Histogram, fn() -> Histogram>,
    in_flight: Family<LaneLabel, Gauge>,
    missing_topics: Family<LaneTopic, Gauge>,
}

fn seconds() -> Histogram {
    Histogram::new(SECONDS)
}

impl WorkerFamilies {
    /// Registers the metrics of workers.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let families = Self {
            succeeded: Family::default(),
            retried: Family::default(),
            dead: Family::default(),
            long_waits: Family::default(),
            handling: Family::new_with_constructor(seconds),
            in_flight: Family::default(),
            missing_topics: Family::default(),
        };
        registry.register(
            "worker_succeeded",
            "Records handled successfully",
            families.succeeded.clone(),
        );
        registry.register(
            "worker_retried",
            "Failed attempts that wait for another, by error class",
            families.retried.clone(),
        );
        registry.register(
            "worker_dead",
            "Records sent to the dead-letter topic, by error class",
            families.dead.clone(),
        );
        registry.register(
            "worker_long_waits",
            "Failed attempts that wait for another with the scheduler",
            families.long_waits.clone(),
        );
        registry.register(
            "worker_handling_seconds",
            "Time a handler took for one attempt",
            families.handling.clone(),
        );
        registry.register(
            "worker_in_flight",
            "Records read and not yet committed, per lane",
            families.in_flight.clone(),
        );
        registry.register(
            "worker_missing_topic_records",
            "Finished records that wait for a topic that does not exist, per lane",
            families.missing_topics.clone(),
        );
        families
    }

    /// The gauge of one lane: each lane sets its own.
    pub(crate) fn in_flight(&self, lane: &str) -> Gauge {
        self.in_flight
            .get_or_create(&LaneLabel {
                lane: lane.to_owned(),
            })
            .clone()
    }

    /// The gauges of one lane for the topics that it writes, all 0.
    pub(crate) fn missing_topics(&self, lane: &str, topics: &[Arc<str>]) -> MissingTopics {
        let gauges = topics.iter().map(|topic| {
            let label = LaneTopic {
                lane: lane.to_owned(),
                topic: topic.to_string(),
            };
            (topic.clone(), self.missing_topics.get_or_create(&label).clone())
        });
        MissingTopics(gauges.collect())
    }

    pub(crate) fn of(&self, pipeline: &str) -> WorkerMetrics {
        let label = PipelineLabel {
            pipeline: pipeline.to_owned(),
        };
        let by_class = |family: &Family<PipelineClass, Counter>| {
            ErrorClass::ALL.map(|class| {
                let label = PipelineClass {
                    pipeline: pipeline.to_owned(),
                    class: class.as_str(),
                };
                family.get_or_create(&label).clone()
            })
        };
        WorkerMetrics {
            succeeded: self.succeeded.get_or_create(&label).clone(),
            retried: by_class(&self.retried),
            dead: by_class(&self.dead),
            long_waits: self.long_waits.get_or_create(&label).clone(),
            handling: self.handling.get_or_create(&label).clone(),
        }
    }
}

/// How many records of a lane wait for each topic that it writes.
pub(crate) struct MissingTopics(Vec<(Arc<str>, Gauge)>);

impl MissingTopics {
    /// Sets all gauges; topics that are not named have none.
    pub(crate) fn show<'t>(&self, counts: impl Iterator<Item = (&'t Arc<str>, usize)>) {
        let counts: Vec<_> = counts.collect();
        for (topic, gauge) in &self.0 {
            let count = counts.iter().find(|(counted, _)| *counted == topic);
            let records = count.map_or(0, |(_, records)| *records);
            gauge.set(i64::try_from(records).unwrap_or(i64::MAX));
        }
    }
}

/// The metrics of one pipeline's worker.
pub(crate) struct WorkerMetrics {
    succeeded: Counter,
    retried: [Counter; ErrorClass::ALL.len()],
    dead: [Counter; ErrorClass::ALL.len()],
    long_waits: Counter,
    pub(crate) handling: Histogram,
}

impl WorkerMetrics {
    pub(crate) fn count(&self, disposition: Disposition) {
        match disposition {
            Disposition::Succeeded => self.succeeded.inc(),
            Disposition::Waiting { class, carrier, .. } => {
                if carrier == DelayQueue::Scheduler {
                    self.long_waits.inc();
                }
                self.retried[class as usize].inc()
            }
            Disposition::Dead(class) => self.dead[class as usize].inc(),
        };
    }
}

/// The families that all lanes of a process share.
#[derive(Clone)]
pub struct LaneFamilies {
    transactions: Family<LaneLabel, Counter>,
    outputs: Family<LaneLabel, Counter>,
    completed: Family<LaneLabel, Counter>,
    duration: Family<LaneLabel, Histogram, fn() -> Histogram>,
    setbacks: Family<LaneRemedy, Counter>,
    partitions: Family<LaneLabel, Gauge>,
    blocked: Family<LaneLabel, Counter>,
    lag: Family<PartitionLabel, Gauge>,
    recreated: Family<LaneLabel, Counter>,
    dropped: Family<LaneLabel, Counter>,
    deleted_unread: Family<LaneLabel, Counter>,
}

impl LaneFamilies {
    /// Registers the metrics of lanes.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let families = Self {
            transactions: Family::default(),
            outputs: Family::default(),
            completed: Family::default(),
            duration: Family::new_with_constructor(seconds),
            setbacks: Family::default(),
            partitions: Family::default(),
            blocked: Family::default(),
            lag: Family::default(),
            recreated: Family::default(),
            dropped: Family::default(),
            deleted_unread: Family::default(),
        };
        registry.register(
            "lane_transactions",
            "Committed transactions",
            families.transactions.clone(),
        );
        registry.register(
            "lane_outputs",
            "Records written in committed transactions",
            families.outputs.clone(),
        );
        registry.register(
            "lane_completed",
            "Records whose offsets were committed",
            families.completed.clone(),
        );
        registry.register(
            "lane_transaction_seconds",
            "Time from beginning a transaction to its commit",
            families.duration.clone(),
        );
        registry.register(
            "lane_setbacks",
            "Failed transactions, by what mended them",
            families.setbacks.clone(),
        );
        registry.register(
            "lane_partitions",
            "Partitions assigned now",
            families.partitions.clone(),
        );
        registry.register(
            "lane_window_full",
            "Times a partition took no more records because its lowest one is not done",
            families.blocked.clone(),
        );
        registry.register(
            "lane_lag",
            "Upper bound of the records of an assigned partition that are not done; transaction markers among unread ones \
             count, and 0 means that all is done",
            families.lag.clone(),
        );
        registry.register(
            "lane_recreated_partitions",
            "Partitions whose topic was deleted and created again while they were assigned",
            families.recreated.clone(),
        );
        registry.register(
            "lane_dropped_records",
            "Records in hand that were dropped because their topic was deleted and created again",
            families.dropped.clone(),
        );
        registry.register(
            "lane_deleted_unread_records",
            "Offsets that were deleted, by retention for example, before they were read",
            families.deleted_unread.clone(),
        );
        families
    }

    /// The observer of one lane, which also keeps a part of the process's readiness.
    #[must_use]
    pub fn observer(&self, lane: &str, part: Part) -> Arc<dyn LaneObserver> {
        let label = LaneLabel {
            lane: lane.to_owned(),
        };
        // A series that only appears with the first setback would be missed by an alert on its rate.
        for remedy in [
            RecoveryAction::Abort,
            RecoveryAction::Rebuild,
            RecoveryAction::Fenced,
        ] {
            let _ = self.setbacks.get_or_create(&LaneRemedy {
                lane: lane.to_owned(),
                remedy: word(remedy),
            });
        }
        Arc::new(LaneMetrics {
            lane: lane.to_owned(),
            transactions: self.transactions.get_or_create(&label).clone(),
            outputs: self.outputs.get_or_create(&label).clone(),
            completed: self.completed.get_or_create(&label).clone(),
            duration: self.duration.get_or_create(&label).clone(),
            setbacks: self.setbacks.clone(),
            partitions: self.partitions.get_or_create(&label).clone(),
            blocked: self.blocked.get_or_create(&label).clone(),
            lag: self.lag.clone(),
            recreated: self.recreated.get_or_create(&label).clone(),
            dropped: self.dropped.get_or_create(&label).clone(),
            deleted_unread: self.deleted_unread.get_or_create(&label).clone(),
            part,
        })
    }
}

fn word(remedy: RecoveryAction) -> &'static str {
    match remedy {
        RecoveryAction::Retry => "retry",
        RecoveryAction::Abort => "abort",
        RecoveryAction::Rebuild => "rebuild",
        RecoveryAction::Fenced => "fenced",
        RecoveryAction::Misconfigured => "misconfigured",
    }
}

struct LaneMetrics {
    lane: String,
    transactions: Counter,
    outputs: Counter,
    completed: Counter,
    duration: Histogram,
    setbacks: Family<LaneRemedy, Counter>,
    partitions: Gauge,
    blocked: Counter,
    lag: Family<PartitionLabel, Gauge>,
    recreated: Counter,
    dropped: Counter,
    deleted_unread: Counter,
    part: Part,
}

impl LaneObserver for LaneMetrics {
    fn ready(&self) {
        self.part.ready();
    }

    fn waiting(&self, reason: &str) {
        self.part.not_ready(reason);
    }

    fn committed(&self, outputs: usize, completed: usize, took: Duration) {
        self.transactions.inc();
        self.outputs.inc_by(outputs as u64);
        self.completed.inc_by(completed as u64);
        self.duration.observe(took.as_secs_f64());
    }

    fn setback(&self, remedy: RecoveryAction) {
        let remedy = word(remedy);
        self.setbacks
            .get_or_create(&LaneRemedy {
                lane: self.lane.clone(),
                remedy,
            })
            .inc();
    }

    fn assigned(&self, partitions: usize) {
        self.partitions.set(i64::try_from(partitions).unwrap_or(i64::MAX));
    }

    fn blocked(&self, _topic: &str, _partition: i32, _offset: i64) {
        self.blocked.inc();
    }

    fn lag(&self, topic: &str, partition: i32, records: Option<u64>) {
        let label = PartitionLabel {
            topic: topic.to_owned(),
            partition,
        };
        if let Some(records) = records {
            let records = i64::try_from(records).unwrap_or(i64::MAX);
            self.lag.get_or_create(&label).set(records);
        } else {
            self.lag.remove(&label);
        }
    }

    fn recreated(&self, _topic: &str, _partition: i32, in_hand: usize) {
        self.recreated.inc();
        self.dropped.inc_by(in_hand as u64);
    }

    fn deleted_unread(&self, _topic: &str, _partition: i32, records: u64) {
        self.deleted_unread.inc_by(records);
    }
}
