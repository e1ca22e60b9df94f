//! Starts the lanes and drivers of a pipeline.
//!
//! The source and the due topic have separate lanes in one consumer group, because Kafka's assignor balances only the
//! total number of partitions of members with the same subscription. With one member for both topics, it may give all
//! partitions of the source to one process and all partitions of the due topic to another. A lane of the source and a
//! lane of the due topic share a driver and the limits of records in flight.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Failure, HumanDuration, Pipeline};
use redeliver_kafka::{IfFenced, IfRecreated, LaneSpec, TopicState, Waker};
use redeliver_proto::v1::BreakerState;
use redeliver_runtime::Config;
use redeliver_runtime::config::{ConfigError, OrderingConfig, PipelineConfig, SchemaConfig};
use redeliver_runtime::health::Part;
use redeliver_schema::Schema;
use redeliver_service::host::{Host, NewLane, lane_grace};
use redeliver_service::idle::Work;
use redeliver_service::metrics::Serves;
use redeliver_service::status::BreakerNotes;
use tokio::sync::Notify;

use crate::attempt::AttemptRunner;
use crate::breaker::{BreakerObserver, BreakerSettings, FailureRate, Gate};
use crate::budget::{BudgetShare, InFlight};
use crate::controls::{Controlled, PipelineControls};
use crate::dead_letter::OnDead;
use crate::driver::{AttemptContext, Driver};
use crate::engine::{Engine, EngineContext, LaneChannel, OutputTopics};
use crate::failure_log::FailureLog;
use crate::groups::{GroupBy, GroupLimit, Grouping, Ordering};
use crate::handler::Handler;
use crate::metrics::{WorkerFamilies, WorkerMetrics};
use crate::rate_limit::{Limiter, OwnedPartitions, RateLimit};

/// How a pipeline is processed.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// The pipeline.
    pub pipeline: Arc<Pipeline>,
    /// Number of lanes of each topic; each lane is a thread with its own consumer and producers. At least 1.
    pub lanes: usize,
    /// Approximate maximum number of records in one transaction.
    pub batch: usize,
    /// Maximum number of concurrent attempts over all lanes. A lane of the source and the lane of the due topic with the
    /// same number share at least 1.
    pub concurrency: usize,
    /// How many of `concurrency` the attempt of a record counts for whose attempts have failed before. More than 1 for a handler
    /// that processes several records together, but such a record alone.
    pub repeated_slots: usize,
    /// Maximum number of records in flight of a lane of the source and a lane of the due topic together. Each of them
    /// may always have 1.
    pub in_flight: usize,
    /// Approximate maximum number of bytes of these records and their results.
    pub in_flight_bytes: usize,
    /// How long a stopping lane may finish records in flight.
    pub grace: Duration,
    /// Which records wait for each other.
    pub grouping: Grouping,
    /// How many attempts of the process may start in a time, unless an operator wants another rate of the whole pipeline.
    pub rate_limit: Option<RateLimit>,
    /// When the worker stops calling an endpoint that fails.
    pub breaker: BreakerSettings,
    /// Maximum duration of an attempt. A longer one is cancelled at its next `.await` and fails with the code
    /// `handler.timeout`. `None` if the handler limits the duration itself.
    pub timeout: Option<Duration>,
    /// What the values of records must look like. Others become dead letters without an attempt.
    pub schema: Option<Schema>,
    /// Learns of dead letters.
    pub on_dead: Option<OnDead>,
}

impl WorkerSpec {
    /// The settings of a configured pipeline. Reads the file of its schema, if there is one.
    ///
    /// # Errors
    /// If the schema cannot be used.
    pub fn from_config(config: &Config, name: &str, pipeline: &PipelineConfig) -> Result<Self, ConfigError> {
        let schema = pipeline.schema.as_ref().map(schema_of).transpose();
        let schema = schema.map_err(|problem| {
            let section = if pipeline.is_retired() {
                "retired"
            } else {
                "pipelines"
            };
            ConfigError::of_field(format!("{section}.{name}.schema"), problem)
        })?;
        Ok(Self {
            pipeline: Arc::new(pipeline.pipeline(name, &config.scheduler)),
            lanes: config.kafka.lanes as usize,
            batch: config.kafka.batch as usize,
            concurrency: pipeline.concurrency() as usize,
            repeated_slots: records_per_call(pipeline),
            in_flight: pipeline.in_flight as usize,
            in_flight_bytes: usize::try_from(pipeline.in_flight_bytes).unwrap_or(usize::MAX),
            grace: lane_grace(config),
            grouping: grouping_of(pipeline),
            rate_limit: pipeline.rate_limit.map(|limit| RateLimit {
                attempts: limit.attempts,
                per: limit.per.duration(),
                burst: limit.burst,
            }),
            breaker: BreakerSettings {
                failures: pipeline.breaker.failures as usize,
                rate: pipeline.breaker.rate.map(|rate| FailureRate {
                    share: rate.share,
                    window: rate.window.duration(),
                    // The window counts records.
                    calls: rate.calls as usize * records_per_call(pipeline),
                }),
                open_max: pipeline.breaker.open_max.duration(),
                poison_after: pipeline.breaker.poison_after.duration(),
            },
            timeout: pipeline.attempt_timeout.map(HumanDuration::duration),
            schema,
            on_dead: None,
        })
    }
}

fn schema_of(config: &SchemaConfig) -> Result<Schema, String> {
    match config {
        SchemaConfig::Inline(schema) => Schema::new(&schema.clone().into()),
        SchemaConfig::File(path) => Schema::from_file(path),
    }
}

/// Maximum number of records in a call.
fn records_per_call(pipeline: &PipelineConfig) -> usize {
    let batch = pipeline.http.as_ref().and_then(|http| http.batch);
    batch.map_or(1, |batch| batch.records as usize)
}

fn grouping_of(pipeline: &PipelineConfig) -> Grouping {
    Grouping {
        ordering: match pipeline.ordering {
            OrderingConfig::None => Ordering::None,
            OrderingConfig::Key => Ordering::Key,
            OrderingConfig::Partition => Ordering::Partition,
        },
        key_blocking: pipeline.key_blocking.map(HumanDuration::duration),
        limit: pipeline.limit_by.as_ref().map(|limit| GroupLimit {
            by: match (&limit.header, &limit.pointer) {
                (Some(header), _) => GroupBy::Header(header.clone()),
                (None, Some(pointer)) => GroupBy::Pointer(pointer.clone()),
                (None, None) => GroupBy::Key,
            },
            concurrency: limit.concurrency as usize,
        }),
    }
}

/// Starts the lanes of a pipeline as supervised tasks of `host`, once it has read whether the pipeline is paused. They end when the host
/// shuts down. Does nothing if it shuts down before that. The control topic must exist, see [`redeliver_service::topics::of_pipelines`].
///
/// # Errors
/// When the operating system cannot create a thread.
pub async fn spawn<H: Handler>(host: &mut Host, spec: &WorkerSpec, handler: H) -> io::Result<()> {
    let Some(control) = host.control().await? else {
        return Ok(());
    };
    let lanes = spec.lanes.max(1);
    let has_due_topic = host.has_topic(&spec.pipeline.due_topic());
    let families = host.metric_families(WorkerFamilies::register);
    let metrics = Arc::new(families.of(&spec.pipeline.name));
    let watch = host.topic_watch()?;
    let missing_timeout = host.config.kafka.topics.missing_timeout.duration();
    let grouping = Arc::new(spec.grouping.clone());
    let failures = Arc::new(FailureLog::new(spec.pipeline.name.clone()));
    let engine_context = EngineContext {
        pipeline: spec.pipeline.clone(),
        grouping: grouping.clone(),
        metrics: metrics.clone(),
        failures: failures.clone(),
        on_dead: spec.on_dead.clone(),
        partitions: OwnedPartitions::default(),
    };
    let partitions_of = {
        let watch = watch.clone();
        move |topic: &str| match watch.state(topic) {
            TopicState::Exists { partitions, .. } => u32::try_from(partitions).ok(),
            TopicState::Unknown | TopicState::Missing { .. } => None,
        }
    };
    let topics = spec.pipeline.worker_topics(has_due_topic);
    let limiter = Arc::new(Limiter::new(spec.rate_limit, {
        let (topics, owned) = (topics.clone(), engine_context.partitions.clone());
        let watch = watch.clone();
        Box::new(move || {
            let all = topics.iter().map(|topic| match watch.state(topic) {
                TopicState::Exists { partitions, .. } => u32::try_from(partitions).ok(),
                // The partitions of the other topic have the whole rate.
                TopicState::Missing { .. } => Some(0),
                TopicState::Unknown => None,
            });
            owned.part_of(all.sum::<Option<u32>>()?)
        })
    }));
    let context = Arc::new(AttemptContext {
        pipeline: spec.pipeline.clone(),
        clock: host.clock.clone(),
        metrics: metrics.clone(),
        runner: AttemptRunner {
            pipeline: spec.pipeline.clone(),
            group: spec.pipeline.worker_group(&host.kafka.id_prefix),
            metrics: metrics.clone(),
            timeout: spec.timeout,
            schema: spec.schema.clone(),
        },
        limiter: limiter.clone(),
        failures,
        grouping,
        partitions: Box::new(partitions_of),
    });
    let part = host.health.part(format!("endpoint-{}", spec.pipeline.name));
    part.ready();
    let report = Report {
        pipeline: spec.pipeline.name.clone(),
        metrics: metrics.clone(),
        part,
        notes: host
            .status_board()
            .map_err(io::Error::other)?
            .begin(spec.pipeline.name.clone(), {
                let owned = engine_context.partitions.clone();
                move || owned.any()
            }),
    };
    let gate = Gate::new(spec.breaker.clone(), spec.concurrency, Arc::new(report));
    let breaker_open = metrics.breaker_open.clone();
    let is_open = Box::new(move || breaker_open.get() != 0);
    host.works_on(spec.pipeline.clone(), Work::Attempts(is_open));
    let limit = InFlight {
        records: spec.in_flight,
        bytes: spec.in_flight_bytes,
    };
    let controlled = Controlled {
        metrics: metrics.clone(),
        gate: gate.clone(),
        limiter,
    };
    let mut controls = PipelineControls::new(host, control, spec.pipeline.name.clone(), controlled);
    for number in 0..lanes {
        let changed: Arc<Notify> = Arc::default();
        let mut channels = Vec::new();
        let mut lanes_ended = Vec::new();
        for (topic, in_flight) in topics.iter().zip(BudgetShare::split(limit, topics.len())) {
            let name = lane_name(&spec.pipeline, topic, number);
            let waker = Waker::new();
            let channel = Arc::new(LaneChannel::new(waker.clone(), changed.clone()));
            let written = spec.pipeline.written_topics();
            // The lane is woken when one of these topics becomes available or unavailable.
            watch.watch(written.iter().cloned(), &waker);
            let outputs = OutputTopics {
                presence: Box::new({
                    let watch = watch.clone();
                    move |topic| watch.presence(topic)
                }),
                timeout: missing_timeout,
                gauges: families.unavailable_topics(&spec.pipeline.name, &name, &written),
                written,
            };
            let engine = Engine::new(
                engine_context.clone(),
                channel.clone(),
                families.in_flight(&spec.pipeline.name, &name),
                outputs,
                in_flight,
            );
            controls.applies_to(channel.clone());
            channels.push(channel);
            lanes_ended.push(host.spawn_lane(NewLane {
                kafka: host.kafka.clone(),
                spec: LaneSpec {
                    name,
                    group: spec.pipeline.worker_group(&host.kafka.id_prefix),
                    topics: vec![topic.clone()],
                    batch: spec.batch,
                    grace: spec.grace,
                    changelog: None,
                    if_recreated: IfRecreated::ReadFromBeginning,
                    if_fenced: IfFenced::End,
                },
                serves: Serves {
                    tier: None,
                    pipelines: HashMap::from([(topic.clone(), spec.pipeline.name.clone())]),
                },
                waker,
                processor: engine,
            })?);
        }
        let driver = Driver {
            handler: handler.clone(),
            lanes: channels,
            changed,
            concurrency: share(spec.concurrency, lanes, number),
            repeated_slots: spec.repeated_slots,
            context: context.clone(),
            gate: gate.clone(),
        };
        let driver_name = format!("worker-{}-{number}-driver", spec.pipeline.name);
        // The driver outlives its lanes, because a stopping lane waits for attempts in progress.
        host.tasks.spawn(driver_name, async move {
            driver.run(lanes_ended).await;
            Ok::<(), std::convert::Infallible>(())
        });
    }
    host.tasks.spawn(
        format!("worker-{}-controls", spec.pipeline.name),
        controls.follow(host.tasks.shutdown().clone()),
    );
    Ok(())
}

/// Tells operators when the breaker opens and closes.
struct Report {
    pipeline: Arc<str>,
    metrics: Arc<WorkerMetrics>,
    part: Part,
    notes: BreakerNotes,
}

impl BreakerObserver for Report {
    fn opened(&self, failure: &Failure) {
        tracing::warn!(
            pipeline = &*self.pipeline,
            code = failure.code,
            error = failure.message,
            "endpoint fails; circuit breaker opened, records wait"
        );
        self.metrics.breaker_open.set(1);
        self.metrics.breaker_openings.inc();
        self.notes.note(BreakerState::Open, Some(&failure.code));
        self.part
            .ready_but(format!("the circuit breaker is open: {}", failure.message));
    }

    fn answered(&self, after: Duration) {
        let after_seconds = after.as_secs();
        tracing::info!(
            pipeline = &*self.pipeline,
            after_seconds,
            "endpoint answers again; circuit breaker half open"
        );
        self.notes.note(BreakerState::HalfOpen, None);
    }

    fn closed(&self, after: Duration) {
        let after_seconds = after.as_secs();
        tracing::info!(
            pipeline = &*self.pipeline,
            after_seconds,
            "circuit breaker closed"
        );
        self.metrics.breaker_open.set(0);
        self.notes.note(BreakerState::Closed, Some(""));
        self.part.ready();
    }
}

/// The name of a lane, which is part of transactional ids and of the ids of static members.
fn lane_name(pipeline: &Pipeline, topic: &str, number: usize) -> String {
    let suffix = if *topic == *pipeline.due_topic() {
        "-due"
    } else {
        ""
    };
    format!("worker-{}-{number}{suffix}", pipeline.name)
}

/// A driver's share of a total, at least 1.
fn share(total: usize, lanes: usize, lane: usize) -> usize {
    (total / lanes + usize::from(lane < total % lanes)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_have_names_by_topic() {
        let pipeline = Pipeline::new("docs");
        let names = pipeline.worker_topics(true);
        let names: Vec<String> = names.iter().map(|topic| lane_name(&pipeline, topic, 3)).collect();
        assert_eq!(names, ["worker-docs-3", "worker-docs-3-due"]);
    }

    #[test]
    fn shares_add_up() {
        assert_eq!((0..3).map(|lane| share(16, 3, lane)).sum::<usize>(), 16);
        assert_eq!(share(1, 4, 3), 1);
    }
}
