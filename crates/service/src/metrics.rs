//! Metrics and readiness of lanes, and labels that services share.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use redeliver_core::HumanDuration;
use redeliver_kafka::LaneObserver;
use redeliver_kafka::recovery::RecoveryAction;
use redeliver_runtime::families;
use redeliver_runtime::health::Part;

/// Upper bounds of a histogram of durations, in seconds.
pub const SECONDS: [f64; 16] = [
    0.0005, 0.001, 0.002, 0.005, 0.008, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0,
];

/// What the topics of a lane belong to.
#[derive(Clone, Debug, Default)]
pub struct Serves {
    /// The tier whose records the lane releases.
    pub tier: Option<HumanDuration>,
    /// The pipeline of each topic. Empty for the scheduler.
    pub pipelines: HashMap<Arc<str>, Arc<str>>,
}

/// The labels of what a lane serves. A label that does not apply is empty.
#[derive(Clone, Debug, Default, Hash, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
pub struct ServesLabels {
    /// The pipeline; empty for the scheduler, and for a lane with the topics of several pipelines.
    pub pipeline: String,
    /// The tier, such as 30s; empty for lanes that serve no tier.
    pub tier: String,
    /// The consumer group, with the prefix of the installation.
    pub group: String,
}

impl Serves {
    /// The labels of the lane. `group` is its consumer group.
    #[must_use]
    pub fn labels(&self, group: &str) -> ServesLabels {
        let mut pipelines = self.pipelines.values();
        let first = pipelines.next();
        let pipeline = first.filter(|first| pipelines.all(|other| other == *first));
        self.labels_with(pipeline, group)
    }

    /// The labels of one topic of the lane.
    #[must_use]
    pub fn labels_of(&self, topic: &str, group: &str) -> ServesLabels {
        self.labels_with(self.pipelines.get(topic), group)
    }

    fn labels_with(&self, pipeline: Option<&Arc<str>>, group: &str) -> ServesLabels {
        ServesLabels {
            pipeline: pipeline.map(ToString::to_string).unwrap_or_default(),
            tier: self.tier.map(|tier| tier.to_string()).unwrap_or_default(),
            group: group.to_owned(),
        }
    }
}

/// The labels of metrics that each lane of a process sets for itself.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct LaneLabels {
    /// The name of the lane.
    pub lane: String,
    /// What the lane serves.
    #[prometheus(flatten)]
    pub serves: ServesLabels,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct SetbackLabels {
    #[prometheus(flatten)]
    lane: LaneLabels,
    remedy: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PartitionLabels {
    topic: String,
    partition: i32,
    #[prometheus(flatten)]
    serves: ServesLabels,
}

/// The label of metrics of a pipeline.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PipelineLabel {
    /// The name of the pipeline.
    pub pipeline: String,
}

impl PipelineLabel {
    /// The label with this value.
    #[must_use]
    pub fn new(pipeline: &str) -> Self {
        Self {
            pipeline: pipeline.to_owned(),
        }
    }
}

/// The label of metrics of a topic.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TopicLabel {
    /// The name of the topic.
    pub topic: String,
}

impl TopicLabel {
    /// The label with this value.
    #[must_use]
    pub fn new(topic: &str) -> Self {
        Self {
            topic: topic.to_owned(),
        }
    }
}

/// The label of metrics by outcome.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct OutcomeLabel {
    /// One of the outcomes in the help of the metric.
    pub outcome: &'static str,
}

/// A histogram of durations in seconds.
#[must_use]
pub fn seconds() -> Histogram {
    Histogram::new(SECONDS)
}

families! {
    /// Metric families of all lanes of a process.
    #[derive(Clone)]
    pub struct LaneFamilies {
        transactions: Family<LaneLabels, Counter> = "lane_transactions", "Committed transactions";
        outputs: Family<LaneLabels, Counter> = "lane_outputs", "Records written in committed transactions";
        completed: Family<LaneLabels, Counter> = "lane_completed", "Records whose offsets were committed";
        duration: Family<LaneLabels, Histogram, fn() -> Histogram> = "lane_transaction_seconds",
            "Time from beginning a transaction to its commit", Family::new_with_constructor(seconds);
        setbacks: Family<SetbackLabels, Counter> = "lane_setbacks",
            "Failed transactions, by recovery action: abort, rebuild, fenced, retry, misconfigured";
        partitions: Family<LaneLabels, Gauge> = "lane_partitions", "Currently assigned partitions";
        blocked: Family<LaneLabels, Counter> = "lane_window_full",
            "Times a partition was not read further because its completed set was full";
        lag: Family<PartitionLabels, Gauge> = "lane_lag",
            "Incomplete records of an assigned partition; an upper bound, which includes transaction markers";
        recreated: Family<LaneLabels, Counter> = "lane_recreated_partitions",
            "Assigned partitions whose topic was created again";
        dropped: Family<LaneLabels, Counter> = "lane_dropped_records",
            "Records in flight dropped because their topic was created again";
        deleted_unread: Family<LaneLabels, Counter> = "lane_deleted_unread_records",
            "Offsets deleted before they were read, for example by retention";
    }
}

impl LaneFamilies {
    /// The observer of one lane. It sets the lane's metrics and its part of the process's readiness.
    #[must_use]
    pub fn observer(&self, lane: &str, group: &str, serves: &Serves, part: Part) -> Arc<dyn LaneObserver> {
        let label = LaneLabels {
            lane: lane.to_owned(),
            serves: serves.labels(group),
        };
        // These exist from the start: an alert on the rate would miss the first increment of a counter that did not
        // exist before.
        for remedy in [
            RecoveryAction::Abort,
            RecoveryAction::Rebuild,
            RecoveryAction::Fenced,
        ] {
            let _ = self.setbacks.get_or_create(&SetbackLabels {
                lane: label.clone(),
                remedy: remedy_label(remedy),
            });
        }
        Arc::new(LaneMetrics {
            lane: label.clone(),
            group: group.to_owned(),
            serves: serves.clone(),
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
    lane: LaneLabels,
    group: String,
    serves: Serves,
    transactions: Counter,
    outputs: Counter,
    completed: Counter,
    duration: Histogram,
    setbacks: Family<SetbackLabels, Counter>,
    partitions: Gauge,
    blocked: Counter,
    lag: Family<PartitionLabels, Gauge>,
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
            .get_or_create(&SetbackLabels {
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
        let label = PartitionLabels {
            topic: topic.to_owned(),
            partition,
            serves: self.serves.labels_of(topic, &self.group),
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
