//! What a process offers to the lanes that run in it: time, tasks, readiness, metrics, traces, the admin
//! port.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::registry::Registry;
use redeliver_core::{Clock, SystemClock};
use redeliver_kafka::topology::TopologySpec;
use redeliver_kafka::{KafkaSettings, Lane, LaneContext, LaneSpec, Processor, TopicWatch, Waker};
use redeliver_runtime::Config;
use redeliver_runtime::admin::{self, Admin};
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::{ConfigError, Problem};
use redeliver_runtime::health::{Health, Part};
use redeliver_runtime::listen::Listener;
use redeliver_runtime::metrics;
use redeliver_runtime::tasks::{Spawner, TaskError, Tasks};
use redeliver_runtime::telemetry::Tracer;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::metrics::{LaneFamilies, WorkerFamilies};
use crate::topics::{self, TopicsError};

/// A process that runs lanes.
pub struct Host {
    /// The configuration.
    pub config: Arc<Config>,
    /// How Kafka is reached.
    pub kafka: KafkaSettings,
    /// Where the time comes from.
    pub clock: Arc<dyn Clock>,
    /// Supervised tasks and threads.
    pub tasks: Tasks,
    /// Readiness by part.
    pub health: Health,
    /// Metrics of lanes.
    pub lanes: LaneFamilies,
    /// Metrics of workers.
    pub workers: WorkerFamilies,
    /// Spans; off without an OTLP endpoint.
    pub tracer: Tracer,
    registry: Arc<Mutex<Registry>>,
    /// The admin port, until it is served.
    admin: Option<Listener>,
    /// The names of all topics, as far as they were looked at.
    existing: BTreeSet<String>,
    /// Not ready until all other parts have registered, see [`Host::run`].
    topics: Option<Part>,
    /// Started when it is first asked for.
    watch: Option<TopicWatch>,
}

/// Starts lanes while the process runs. A cheap handle.
#[derive(Clone)]
pub struct LaneStarter {
    clock: Arc<dyn Clock>,
    health: Health,
    lanes: LaneFamilies,
    spawner: Spawner,
    watch: TopicWatch,
}

impl LaneStarter {
    /// Which topics exist.
    #[must_use]
    pub fn topic_watch(&self) -> &TopicWatch {
        &self.watch
    }

    /// Starts a lane on a thread of its own, until `stop`, which must be cancelled with the process. While it runs it
    /// is a part of the process's readiness.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub async fn start<P: Processor + Send + 'static>(
        &self,
        kafka: KafkaSettings,
        spec: LaneSpec,
        waker: Waker,
        stop: CancellationToken,
        processor: P,
    ) -> io::Result<()> {
        let name = spec.name.clone();
        let (lane, part) = self.lane(kafka, spec, waker, stop, processor);
        let run = move || {
            let result = lane.run();
            part.leave();
            result
        };
        self.spawner.spawn_thread(name, run).await
    }

    fn lane<P: Processor>(
        &self,
        kafka: KafkaSettings,
        spec: LaneSpec,
        waker: Waker,
        stop: CancellationToken,
        processor: P,
    ) -> (Lane<P>, Part) {
        let part = self.health.part(spec.name.as_str());
        let observer = self.lanes.observer(&spec.name, part.clone());
        let context = LaneContext {
            clock: self.clock.clone(),
            waker,
            ..LaneContext::new(kafka, observer, self.watch.clone(), stop)
        };
        (Lane::new(context, spec, processor), part)
    }
}

impl Host {
    /// A host for a service that is starting.
    #[must_use]
    pub fn new(service: &str, start: Start) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let mut registry = metrics::registry(service, &start.config.instance, &*clock);
        Self {
            lanes: LaneFamilies::register(&mut registry),
            workers: WorkerFamilies::register(&mut registry),
            tasks: Tasks::new(start.shutdown),
            health: Health::new(),
            kafka: kafka_settings(&start.config),
            config: start.config,
            tracer: start.tracer,
            admin: Some(start.admin),
            topics: None,
            watch: None,
            existing: BTreeSet::new(),
            clock,
            registry: Arc::new(Mutex::new(registry)),
        }
    }

    /// Metrics; a service registers its own here.
    pub fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that these topics are sound, see [`topics::ensure`] and [`topics::of_pipelines`]. The admin
    /// port is served from here on, so that a process which waits for Kafka is alive and says what it waits
    /// for.
    ///
    /// # Errors
    /// [`TopicsError::Unsound`] with everything that is wrong.
    pub async fn ensure_topics(&mut self, spec: &TopologySpec) -> Result<(), TopicsError> {
        let part = self.health.part("topics");
        self.topics = Some(part.clone());
        self.serve_admin();
        self.existing = topics::ensure(&self.config, &self.kafka, spec, self.tasks.shutdown(), &part).await?;
        Ok(())
    }

    /// Whether a topic existed when [`Host::ensure_topics`] looked.
    #[must_use]
    pub fn has_topic(&self, name: &str) -> bool {
        self.existing.contains(name)
    }

    /// Which topics exist; one watch for the whole process.
    ///
    /// # Errors
    /// When its client cannot be made, or the system gives no thread.
    pub fn topic_watch(&mut self) -> io::Result<TopicWatch> {
        if let Some(watch) = &self.watch {
            return Ok(watch.clone());
        }
        let watch = TopicWatch::start(&self.kafka)?;
        Ok(self.watch.insert(watch).clone())
    }

    fn serve_admin(&mut self) {
        let Some(listener) = self.admin.take() else { return };
        let admin = Admin {
            health: self.health.clone(),
            registry: self.registry.clone(),
            config: self.config.clone(),
            shutdown: self.tasks.shutdown().clone(),
        };
        self.tasks.spawn_attendant("admin", admin::serve(listener, admin));
    }

    /// Starts a lane on a thread of its own. `ended` is dropped when the lane has ended.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn spawn_lane<P: Processor + Send + 'static>(
        &mut self,
        kafka: KafkaSettings,
        spec: LaneSpec,
        waker: Waker,
        processor: P,
        ended: Option<DropGuard>,
    ) -> io::Result<()> {
        let name = spec.name.clone();
        let stop = self.tasks.shutdown().clone();
        let (lane, _) = self.starter()?.lane(kafka, spec, waker, stop, processor);
        self.tasks.spawn_thread(name, move || {
            let _ended = ended;
            lane.run()
        })
    }

    /// A handle that starts lanes while the process runs.
    ///
    /// # Errors
    /// As [`Host::topic_watch`].
    pub fn starter(&mut self) -> io::Result<LaneStarter> {
        let watch = self.topic_watch()?;
        Ok(LaneStarter {
            watch,
            clock: self.clock.clone(),
            health: self.health.clone(),
            lanes: self.lanes.clone(),
            spawner: self.tasks.spawner(),
        })
    }

    /// Serves the admin port, if it is not yet, and runs until all has ended in order, or something failed.
    ///
    /// # Errors
    /// The first failure of a task, or the names of those that did not end within the grace period.
    pub async fn run(mut self) -> Result<(), TaskError> {
        self.serve_admin();
        if let Some(topics) = &self.topics {
            topics.ready();
        }
        self.tasks
            .run_until_shutdown(self.config.shutdown.grace.duration())
            .await
    }
}

/// Looks at the properties that are passed through to the client library.
///
/// # Errors
/// When it does not take one of them, which names the field and shows no value.
pub fn check_kafka(config: &Config) -> Result<(), ConfigError> {
    kafka_settings(config).check_properties().map_err(|unusable| {
        ConfigError::Invalid(vec![Problem {
            field: format!("kafka.properties.{}", unusable.property),
            problem: unusable.problem,
            place: None,
        }])
    })
}

/// How Kafka is reached, from the configuration.
#[must_use]
pub fn kafka_settings(config: &Config) -> KafkaSettings {
    KafkaSettings {
        properties: config
            .kafka
            .properties
            .iter()
            .map(|(k, v)| (k.to_owned(), v.to_owned()))
            .collect(),
        static_membership: config.static_membership(),
        session_timeout: config.kafka.session_timeout.duration(),
        transaction_timeout: config.kafka.transaction_timeout.duration(),
        ..KafkaSettings::new(&config.kafka.brokers, &config.instance)
    }
}

/// How long a lane may finish what it has in hand: the process's grace less what closing takes.
#[must_use]
pub fn lane_grace(config: &Config) -> std::time::Duration {
    config.shutdown.grace.duration().mul_f64(0.8)
}
