//! Metrics of the inspector: names, units and help in one place.

use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tonic::Code;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TopicLabel {
    topic: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallLabels {
    method: &'static str,
    code: &'static str,
}

/// From a look into an index to a page with values from Kafka.
const CALL_SECONDS: [f64; 13] = [
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0,
];

/// The metrics of an inspector. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Metrics {
    indexed: Family<TopicLabel, Counter>,
    lag: Family<TopicLabel, Gauge>,
    open: Family<TopicLabel, Gauge>,
    size: Gauge,
    watchers: Gauge,
    calls: Family<CallLabels, Histogram, fn() -> Histogram>,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            indexed: Family::default(),
            lag: Family::default(),
            open: Family::default(),
            size: Gauge::default(),
            watchers: Gauge::default(),
            calls: Family::new_with_constructor(|| Histogram::new(CALL_SECONDS)),
        };
        registry.register(
            "dlq_indexed",
            "Dead letters that were read into the index",
            metrics.indexed.clone(),
        );
        registry.register(
            "dlq_index_lag",
            "Records that are in a dead-letter topic and not in the index yet",
            metrics.lag.clone(),
        );
        registry.register(
            "dlq_open",
            "Dead letters that wait for somebody",
            metrics.open.clone(),
        );
        registry.register_with_unit(
            "dlq_index_size",
            "Size of the index on disk",
            Unit::Bytes,
            metrics.size.clone(),
        );
        registry.register(
            "dlq_watchers",
            "Clients that watch dead letters now",
            metrics.watchers.clone(),
        );
        registry.register_with_unit(
            "dlq_call",
            "Time from a call of the API to its answer, or to the beginning of its stream",
            Unit::Seconds,
            metrics.calls.clone(),
        );
        metrics
    }

    pub(crate) fn add_indexed(&self, topic: &str, count: u64) {
        self.indexed.get_or_create(&label(topic)).inc_by(count);
    }

    pub(crate) fn set_lag(&self, topic: &str, lag: u64) {
        self.lag.get_or_create(&label(topic)).set(saturating(lag));
    }

    pub(crate) fn set_open(&self, topic: &str, count: i64) {
        self.open.get_or_create(&label(topic)).set(count);
    }

    /// A topic is gone, or begins again with nothing.
    pub(crate) fn forget(&self, topic: &str) {
        let label = label(topic);
        self.lag.remove(&label);
        self.open.remove(&label);
    }

    pub(crate) fn set_size(&self, bytes: u64) {
        self.size.set(saturating(bytes));
    }

    pub(crate) fn watching(&self) -> Watching {
        self.watchers.inc();
        Watching(self.watchers.clone())
    }

    pub(crate) fn called(&self, method: &'static str, began: Instant, code: Code) {
        let labels = CallLabels {
            method,
            code: redeliver_proto::error::code_name(code),
        };
        let took: Duration = began.elapsed();
        self.calls.get_or_create(&labels).observe(took.as_secs_f64());
    }
}

/// Counts a watcher as long as it lives.
pub(crate) struct Watching(Gauge);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.dec();
    }
}

fn label(topic: &str) -> TopicLabel {
    TopicLabel {
        topic: topic.to_owned(),
    }
}

fn saturating(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
