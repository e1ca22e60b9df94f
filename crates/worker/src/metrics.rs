//! Metrics of workers.

use std::collections::BTreeMap;
use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use redeliver_core::ErrorClass;
use redeliver_core::pipeline::DelayQueue;
use redeliver_core::route::Disposition;
use redeliver_service::metrics::seconds;

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

/// Metric families of all workers of a process.
#[derive(Clone)]
pub struct WorkerFamilies {
    succeeded: Family<PipelineLabel, Counter>,
    retried: Family<PipelineClass, Counter>,
    dead: Family<PipelineClass, Counter>,
    long_waits: Family<PipelineLabel, Counter>,
    handling: Family<PipelineLabel, Histogram, fn() -> Histogram>,
    breaker_open: Family<PipelineLabel, Gauge>,
    breaker_openings: Family<PipelineLabel, Counter>,
    forgotten: Family<PipelineLabel, Counter>,
    in_flight: Family<PipelineLane, Gauge>,
    missing_topics: Family<LaneTopic, Gauge>,
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
            breaker_open: Family::default(),
            breaker_openings: Family::default(),
            forgotten: Family::default(),
            in_flight: Family::default(),
            missing_topics: Family::default(),
        };
        registry.register(
            "worker_succeeded",
            "Records processed successfully",
            families.succeeded.clone(),
        );
        registry.register(
            "worker_retried",
            "Failed attempts whose record waits for a retry, by failure class",
            families.retried.clone(),
        );
        registry.register(
            "worker_dead",
            "Dead letters, by failure class",
            families.dead.clone(),
        );
        registry.register(
            "worker_long_waits",
            "Failed attempts whose record waits in the scheduler",
            families.long_waits.clone(),
        );
        registry.register(
            "worker_handling_seconds",
            "Duration of an attempt",
            families.handling.clone(),
        );
        registry.register(
            "worker_breaker_open",
            "1 while the circuit breaker is open because the endpoint fails, else 0",
            families.breaker_open.clone(),
        );
        registry.register(
            "worker_breaker_openings",
            "How often the circuit breaker has opened",
            families.breaker_openings.clone(),
        );
        registry.register(
            "worker_forgotten",
            "Attempts that do not count because the endpoint failed for others too",
            families.forgotten.clone(),
        );
        registry.register(
            "worker_in_flight",
            "Records read and not yet committed, per lane",
            families.in_flight.clone(),
        );
        registry.register(
            "worker_missing_topic_records",
            "Finished records that wait for a missing topic, per lane",
            families.missing_topics.clone(),
        );
        families
    }

    pub(crate) fn in_flight(&self, pipeline: &str, lane: &str) -> Gauge {
        self.in_flight
            .get_or_create(&PipelineLane::new(pipeline, lane))
            .clone()
    }

    /// The gauges of one lane, one for each topic that it writes.
    pub(crate) fn missing_topics(
        &self,
        pipeline: &str,
        lane: &str,
        topics: &[Arc<str>],
    ) -> MissingTopicGauges {
        let gauges = topics.iter().map(|topic| {
            let label = LaneTopic {
                lane: PipelineLane::new(pipeline, lane),
                topic: topic.to_string(),
            };
            (topic.clone(), self.missing_topics.get_or_create(&label).clone())
        });
        MissingTopicGauges(gauges.collect())
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
            breaker_open: self.breaker_open.get_or_create(&label).clone(),
            breaker_openings: self.breaker_openings.get_or_create(&label).clone(),
            forgotten: self.forgotten.get_or_create(&label).clone(),
        }
    }
}

/// Number of records of a lane that wait for each topic that it writes.
pub(crate) struct MissingTopicGauges(Vec<(Arc<str>, Gauge)>);

impl MissingTopicGauges {
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
    pub(crate) handling: Histogram,
    pub(crate) breaker_open: Gauge,
    pub(crate) breaker_openings: Counter,
    pub(crate) forgotten: Counter,
}

impl WorkerMetrics {
    pub(crate) fn count(&self, disposition: Disposition) {
        match disposition {
            Disposition::Succeeded => self.succeeded.inc(),
            Disposition::Waiting { class, queue, .. } => {
                if queue == DelayQueue::Scheduler {
                    self.long_waits.inc();
                }
                self.retried[class as usize].inc()
            }
            Disposition::Dead(class) => self.dead[class as usize].inc(),
        };
    }
}
