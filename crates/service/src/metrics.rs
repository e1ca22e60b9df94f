//! Metrics and readiness of lanes.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use redeliver_kafka::LaneObserver;
use redeliver_kafka::recovery::RecoveryAction;
use redeliver_runtime::health::Part;

/// Upper bounds of a histogram of durations, in seconds.
pub const SECONDS: [f64; 16] = [
    0.0005, 0.001, 0.002, 0.005, 0.008, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0,
];

/// The label of metrics that each lane of a process sets for itself.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct LaneLabel {
    /// The name of the lane.
    pub lane: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct SetbackLabel {
    lane: String,
    remedy: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PartitionLabel {
    topic: String,
    partition: i32,
}

/// A histogram of durations in seconds.
#[must_use]
pub fn seconds() -> Histogram {
    Histogram::new(SECONDS)
}

/// Metric families of all lanes of a process.
#[derive(Clone)]
pub struct LaneFamilies {
    transactions: Family<LaneLabel, Counter>,
    outputs: Family<LaneLabel, Counter>,
    completed: Family<LaneLabel, Counter>,
    duration: Family<LaneLabel, Histogram, fn() -> Histogram>,
    setbacks: Family<SetbackLabel, Counter>,
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
            "Failed transactions, by recovery action",
            families.setbacks.clone(),
        );
        registry.register(
            "lane_partitions",
            "Currently assigned partitions",
            families.partitions.clone(),
        );
        registry.register(
            "lane_window_full",
            "Times a partition was not read further because the completed set after its first incomplete record was full",
            families.blocked.clone(),
        );
        registry.register(
            "lane_lag",
            "Upper bound of the incomplete records of an assigned partition, including transaction markers among unread \
             records; 0 means that everything is complete",
            families.lag.clone(),
        );
        registry.register(
            "lane_recreated_partitions",
            "Partitions whose topic was deleted and created again while they were assigned",
            families.recreated.clone(),
        );
        registry.register(
            "lane_dropped_records",
            "Records in flight that were dropped because their topic was deleted and created again",
            families.dropped.clone(),
        );
        registry.register(
            "lane_deleted_unread_records",
            "Offsets that were deleted, by retention for example, before they were read",
            families.deleted_unread.clone(),
        );
        families
    }

    /// The observer of one lane. It sets the lane's metrics and its part of the process's readiness.
    #[must_use]
    pub fn observer(&self, lane: &str, part: Part) -> Arc<dyn LaneObserver> {
        let label = LaneLabel {
            lane: lane.to_owned(),
        };
        // These exist from the start: an alert on the rate would miss the first increment of a counter that did not
        // exist before.
        for remedy in [
            RecoveryAction::Abort,
            RecoveryAction::Rebuild,
            RecoveryAction::Fenced,
        ] {
            let _ = self.setbacks.get_or_create(&SetbackLabel {
                lane: lane.to_owned(),
                remedy: remedy_label(remedy),
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

fn remedy_label(action: RecoveryAction) -> &'static str {
    match action {
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
    setbacks: Family<SetbackLabel, Counter>,
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

    fn transaction_failed(&self, action: RecoveryAction) {
        let remedy = remedy_label(action);
        self.setbacks
            .get_or_create(&SetbackLabel {
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

    fn recreated(&self, _topic: &str, _partition: i32, in_flight: usize) {
        self.recreated.inc();
        self.dropped.inc_by(in_flight as u64);
    }

    fn deleted_unread(&self, _topic: &str, _partition: i32, records: u64) {
        self.deleted_unread.inc_by(records);
    }
}
