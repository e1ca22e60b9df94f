//! The process that runs lanes: configuration, clock, tasks, readiness, metrics, traces, and the admin port.

use std::any::{Any, TypeId};
use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use redeliver_core::{Clock, HumanDuration, Pipeline, SystemClock};
use redeliver_kafka::topology::TopologySpec;
use redeliver_kafka::{
    IfFenced, IfRecreated, KafkaSettings, Lane, LaneContext, LaneError, LaneSpec, Processor, TopicWatch,
    Waker,
};
use redeliver_runtime::Config;
use redeliver_runtime::admin::{self, Admin};
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::{ApiConfig, ConfigError};
use redeliver_runtime::health::{Health, Part};
use redeliver_runtime::listen::Listener;
use redeliver_runtime::metrics::{self, SharedRegistry};
use redeliver_runtime::tasks::{Spawner, TaskError, Tasks};
use redeliver_runtime::tls::{ClientCertificates, Protocols, ServerTls, TlsMetrics};
use redeliver_runtime::watched_files::StaleCredentials;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::clock::ClockReports;
use crate::credentials;
use crate::idle::{self, Dispatch, IdleWatch, Work, Worked};
use crate::kafka_settings::kafka_settings;
use crate::login::{self, LoginMetrics};
use crate::metrics::{LaneFamilies, PipelineLabel, Serves};
use crate::topics::{self, TopicsError};

/// The share of `shutdown.grace` that a lane gets; the rest is for closing clients and flushing telemetry.
const LANE_GRACE_SHARE: f64 = 0.8;

/// A process that runs lanes.
///
/// A service creates a host, checks its topics with [`Host::ensure_topics`], adds its lanes and tasks, and awaits
/// [`Host::run`].
pub struct Host {
    /// The configuration.
    pub config: Arc<Config>,
    /// How to connect to Kafka.
    pub kafka: KafkaSettings,
    /// The clock of the process. After a step of the wall clock, it continues the previous time until the new one is confirmed;
    /// see [`redeliver_core::clock_guard`].
    pub clock: Arc<dyn Clock>,
    /// Supervised tasks and threads.
    pub tasks: Tasks,
    /// Readiness by part.
    pub health: Health,
    /// Metrics of lanes.
    pub lanes: LaneFamilies,
    registry: SharedRegistry,
    shared: HashMap<TypeId, Box<dyn Any + Send>>,
    clock_reports: ClockReports,
    tls: TlsMetrics,
    pub(crate) stale_credentials: StaleCredentials,
    effective: Arc<str>,
    /// Taken when the admin port is served.
    admin: Option<Listener>,
    pub(crate) existing_topics: BTreeSet<String>,
    refused_pipelines: BTreeSet<Arc<str>>,
    refused: Family<PipelineLabel, Gauge>,
    /// Becomes ready in [`Host::run`], so that the process is not ready before its other parts are registered.
    topics_part: Option<Part>,
    /// Started on first use.
    topic_watch: Option<TopicWatch>,
    /// In one-shot mode: records that are due within this time are waited for.
    until_idle: Option<Option<HumanDuration>>,
    worked: Vec<Worked>,
    dispatch: Option<Dispatch>,
    /// Cancelled when lanes must stop: on shutdown, once all holds are released.
    lane_stop: CancellationToken,
    /// Cancelled when the hold is released.
    lane_holds: Vec<CancellationToken>,
}

/// A lane that has not been started.
pub struct NewLane<P> {
    /// How to connect to Kafka.
    pub kafka: KafkaSettings,
    /// What the lane reads, and how much at once.
    pub spec: LaneSpec,
    /// What its topics belong to, for the labels of its metrics.
    pub serves: Serves,
    /// Wakes the lane.
    pub waker: Waker,
    /// What the service does with the records.
    pub processor: P,
}

/// Starts lanes while the process runs. Cheap to clone.
#[derive(Clone)]
pub struct LaneStarter {
    clock: Arc<dyn Clock>,
    health: Health,
    lanes: LaneFamilies,
    spawner: Spawner,
    topic_watch: TopicWatch,
}

impl LaneStarter {
    /// The topics that exist.
    #[must_use]
    pub fn topic_watch(&self) -> &TopicWatch {
        &self.topic_watch
    }

    /// For lanes that have nothing to do with whether the process is ready: another process can do their work.
    #[must_use]
    pub fn aside(self) -> Self {
        Self {
            health: Health::new(),
            ..self
        }
    }

    /// Runs a lane on its own thread until `stop` is cancelled. `stop` must be cancelled when the process shuts down.
    ///
    /// # Errors
    /// When the operating system cannot create a thread.
    pub async fn start<P: Processor + Send + 'static>(
        &self,
        lane: NewLane<P>,
        stop: CancellationToken,
    ) -> io::Result<()> {
        let name = lane.spec.name.clone();
        self.spawner.spawn_thread(name, self.runner(lane, stop)).await
    }

    /// The work of a lane's thread. The lane is a part of the process's readiness until it has ended.
    fn runner<P: Processor + Send + 'static>(
        &self,
        lane: NewLane<P>,
        stop: CancellationToken,
    ) -> impl FnOnce() -> Result<(), LaneError> + Send + 'static {
        let NewLane {
            kafka,
            spec,
            serves,
            waker,
            processor,
        } = lane;
        // Registered before the thread starts, so that the process cannot be ready without this lane.
        let part = self.health.part(spec.name.as_str());
        let observer = self
            .lanes
            .observer(&spec.name, &spec.group, &serves, part.clone());
        let context = LaneContext {
            clock: self.clock.clone(),
            waker,
            ..LaneContext::new(kafka, observer, self.topic_watch.clone(), stop)
        };
        let lane = Lane::new(context, spec, processor);
        move || {
            let result = lane.run();
            // After a failure the part keeps its last state until the process has shut down.
            if result.is_ok() {
                part.remove();
            }
            result
        }
    }
}

impl Host {
    /// A host for a service that is starting.
    #[must_use]
    pub fn new(service: &str, start: Start) -> Self {
        let shared_registry = start.registry;
        let mut registry = shared_registry.lock().unwrap_or_else(PoisonError::into_inner);
        metrics::register_process(&mut registry, service, &start.config.instance, &SystemClock);
        let clock_reports = ClockReports::register(&mut registry);
        let tls = TlsMetrics::register(&mut registry);
        start.admin.observe(&tls);
        let mut tasks = Tasks::new(start.shutdown);
        let mut kafka = kafka_settings(&start.config);
        if start.until_idle.is_some() {
            // The process does not come back for its partitions, so others must get them at once.
            kafka.static_membership = false;
        }
        match login::start(&start.config, || LoginMetrics::register(&mut registry)) {
            Ok(login) => kafka.login = login,
            // Ends the process.
            Err(error) => tasks.spawn("kafka-login", async { Err(error) }),
        }
        let refused = Family::default();
        registry.register(
            "pipeline_refused",
            "1 while the pipeline is not served because of its topics, else 0",
            refused.clone(),
        );
        let stale_credentials = StaleCredentials::register(&mut registry);
        // After the login, because a client that tries changed credentials needs it too.
        if let Err(error) = credentials::start(&start.config, &mut kafka, &stale_credentials, &mut registry) {
            tasks.spawn("kafka-credentials", async { Err(error) });
        }
        Self {
            clock: clock_reports.guard(SystemClock, &start.config),
            clock_reports,
            tls,
            stale_credentials,
            lanes: LaneFamilies::register(&mut registry),
            tasks,
            health: Health::new(),
            kafka,
            config: start.config,
            effective: start.effective,
            admin: Some(start.admin),
            topics_part: None,
            topic_watch: None,
            until_idle: start.until_idle,
            worked: Vec::new(),
            dispatch: None,
            lane_stop: CancellationToken::new(),
            lane_holds: Vec::new(),
            existing_topics: BTreeSet::new(),
            refused_pipelines: BTreeSet::new(),
            refused,
            registry: shared_registry.clone(),
            shared: HashMap::new(),
        }
    }

    /// Binds the listener of an API, with TLS if it is configured. `section` is the API's section of the configuration. Warns if
    /// tokens would be sent unencrypted to another machine. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be bound, or a certificate file cannot be used.
    pub fn listen(
        &self,
        section: &'static str,
        api: &ApiConfig,
        protocols: Protocols,
    ) -> anyhow::Result<Listener> {
        let field = format!("{section}.listen");
        if api.exposes_token() {
            let address = api.listen;
            tracing::warn!(field, %address, "clients send their tokens unencrypted; set {section}.tls");
        }
        let mut listener = Listener::bind(field, api.listen)?;
        if let Some(tls) = api_tls(section, api, protocols)? {
            listener = listener.with_tls(tls);
            listener.observe(&self.tls);
        }
        Ok(listener)
    }

    /// Replaces the clock by one that a test can set. Call it before lanes are added.
    pub fn set_clock(&mut self, clock: impl Clock + 'static) {
        self.clock = self.clock_reports.guard(clock, &self.config);
    }

    /// Makes the process not ready while the clock is held. For services that release what is due.
    pub fn require_steady_clock(&self) {
        self.clock_reports.add_part(&self.health);
    }

    /// The process's metrics; a service registers its own here.
    pub fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Metric families that several users in the process share, such as the workers of several pipelines. The first
    /// call registers them; later calls with the same type return the same families.
    pub fn metric_families<T: Clone + Send + 'static>(
        &mut self,
        register: impl FnOnce(&mut Registry) -> T,
    ) -> T {
        if let Some(families) = self.shared() {
            return families;
        }
        let families = register(&mut self.registry());
        self.share(families)
    }

    /// What the users of this process share of this type; `None` before [`Host::share`].
    pub(crate) fn shared<T: Clone + 'static>(&self) -> Option<T> {
        let shared = self.shared.get(&TypeId::of::<T>())?;
        shared.downcast_ref::<T>().cloned()
    }

    pub(crate) fn share<T: Clone + Send + 'static>(&mut self, value: T) -> T {
        self.shared.insert(TypeId::of::<T>(), Box::new(value.clone()));
        value
    }

    /// The gauge that must be 1 while changed credentials in the files of this field of the configuration cannot be used.
    #[must_use]
    pub fn stale_credentials(&self, field: impl Into<String>) -> Gauge {
        self.stale_credentials.of(field)
    }

    /// Waits for the first token, if clients of Kafka log in by tokens. The admin port is served from here on, as in
    /// [`Host::ensure_topics`], which includes this.
    pub async fn log_in(&mut self) {
        if let Some(login) = self.kafka.login.clone() {
            let part = self.topics_part();
            self.serve_admin();
            login::wait(&login, self.tasks.shutdown(), &part).await;
        }
    }

    /// The part that is not ready until [`Host::run`].
    fn topics_part(&mut self) -> Part {
        let health = &self.health;
        self.topics_part
            .get_or_insert_with(|| health.part("topics"))
            .clone()
    }

    /// Checks these topics and, with `kafka.topics.create`, creates missing ones; see [`topics::ensure`]. Then checks that
    /// the groups that read them have not had another `kafka.id_prefix`. While Kafka is unavailable, or there is no token for
    /// it, this waits. The admin port is served from here on, so that a waiting process is alive and
    /// `/readyz` shows the reason.
    ///
    /// # Errors
    /// [`TopicsError::Invalid`] lists every problem of the topics.
    pub async fn ensure_topics(&mut self, spec: &TopologySpec) -> Result<(), TopicsError> {
        self.ensure_topics_of(&[], spec).await
    }

    /// As [`Host::ensure_topics`], but errors of the topics of some of these pipelines refuse only them: [`Host::is_refused`]. The
    /// process is not ready then, and ends with an error once their topics are correct, so that a restart serves them. A process that ends
    /// when nothing is left to do does not start.
    ///
    /// # Errors
    /// [`TopicsError::Invalid`] lists every problem, if other topics have some, or if no pipeline is left.
    pub async fn ensure_topics_of(
        &mut self,
        pipelines: &[Pipeline],
        spec: &TopologySpec,
    ) -> Result<(), TopicsError> {
        let separate = if self.until_idle.is_some() { &[] } else { pipelines };
        let part = self.topics_part();
        self.log_in().await;
        self.serve_admin();
        let shutdown = self.tasks.shutdown();
        let ensured = topics::ensure(&self.config, &self.kafka, spec, separate, shutdown, &part).await?;
        self.existing_topics = ensured.existing;
        for Pipeline { name, .. } in separate {
            let is_refused = ensured.refused.contains_key(name);
            let gauge = self.refused.get_or_create(&PipelineLabel::new(name));
            gauge.set(i64::from(is_refused));
        }
        for (pipeline, errors) in ensured.refused {
            let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
            let errors = errors.join("; ");
            tracing::error!(
                %pipeline, errors,
                "topics are missing or misconfigured; not serving the pipeline, exiting once they are correct"
            );
            let part = self.health.part(format!("topics-{pipeline}"));
            part.not_ready(format!("the pipeline is not served: {errors}"));
            self.refused_pipelines.insert(pipeline);
        }
        if !self.refused_pipelines.is_empty() {
            let (config, kafka, spec) = (self.config.clone(), self.kafka.clone(), spec.clone());
            let (pipelines, refused) = (pipelines.to_vec(), self.refused_pipelines.clone());
            self.tasks.spawn_background("refused-pipelines", async move {
                topics::until_corrected(&config, &kafka, &spec, &pipelines, &refused)
                    .await
                    .map(drop)
            });
        }
        part.not_ready("checking consumer groups");
        tokio::select! {
            checked = topics::check_prefix(&self.config, &self.kafka, spec, &self.existing_topics) => checked,
            () = self.tasks.shutdown().cancelled() => Ok(()),
        }
    }

    /// Whether a pipeline must not be served, see [`Host::ensure_topics_of`].
    #[must_use]
    pub fn is_refused(&self, pipeline: &str) -> bool {
        self.refused_pipelines.contains(pipeline)
    }

    /// Whether a topic existed at the time of [`Host::ensure_topics`].
    #[must_use]
    pub fn has_topic(&self, name: &str) -> bool {
        self.existing_topics.contains(name)
    }

    /// The process's watch of the topics that exist.
    ///
    /// # Errors
    /// When its Kafka client or its thread cannot be created.
    pub fn topic_watch(&mut self) -> io::Result<TopicWatch> {
        if let Some(watch) = &self.topic_watch {
            return Ok(watch.clone());
        }
        let watch = TopicWatch::start(&self.kafka)?;
        Ok(self.topic_watch.insert(watch).clone())
    }

    fn serve_admin(&mut self) {
        let Some(listener) = self.admin.take() else { return };
        let admin = Admin {
            health: self.health.clone(),
            registry: self.registry.clone(),
            config: self.config.clone(),
            effective: self.effective.clone(),
            shutdown: self.tasks.shutdown().clone(),
        };
        self.tasks
            .spawn_background("admin", admin::serve(listener, admin));
    }

    /// Lets the lanes of [`Host::spawn_lane`] run on after the beginning of a shutdown, until the guard is dropped. For a part
    /// of the process that waits for what lanes write. Call it before [`Host::run`].
    #[must_use]
    pub fn hold_lanes(&mut self) -> DropGuard {
        let released = CancellationToken::new();
        self.lane_holds.push(released.clone());
        released.drop_guard()
    }

    /// Runs a lane on its own thread until the process shuts down. The returned token is cancelled when the lane has
    /// ended, after its last transaction.
    ///
    /// # Errors
    /// When the operating system cannot create a thread.
    pub fn spawn_lane<P: Processor + Send + 'static>(
        &mut self,
        lane: NewLane<P>,
    ) -> io::Result<CancellationToken> {
        let name = lane.spec.name.clone();
        let stop = self.lane_stop.clone();
        let run = self.starter()?.runner(lane, stop);
        let ended = CancellationToken::new();
        // A guard cancels the token even if the lane panics.
        let guard = ended.clone().drop_guard();
        self.tasks.spawn_thread(name, move || {
            let _guard = guard;
            run()
        })?;
        Ok(ended)
    }

    /// A handle that starts lanes while the process runs.
    ///
    /// # Errors
    /// See [`Host::topic_watch`].
    pub fn starter(&mut self) -> io::Result<LaneStarter> {
        let topic_watch = self.topic_watch()?;
        Ok(LaneStarter {
            topic_watch,
            clock: self.clock.clone(),
            health: self.health.clone(),
            lanes: self.lanes.clone(),
            spawner: self.tasks.spawner(),
        })
    }

    /// Adds a pipeline that must be idle before the process ends in one-shot mode; see [`Start::until_idle`].
    pub fn works_on(&mut self, pipeline: Arc<Pipeline>, work: Work) {
        self.worked.push(Worked { pipeline, work });
    }

    /// Adds the jobs of which none may be left to dispatch before the process ends in one-shot mode; see [`Start::until_idle`].
    pub fn dispatches(&mut self, jobs: Dispatch) {
        self.dispatch = Some(jobs).filter(|_| self.until_idle.is_some());
    }

    /// Serves the admin port, if [`Host::ensure_topics`] has not done so, and runs until all tasks have ended or one of
    /// them has failed.
    ///
    /// # Errors
    /// The first failure of a task, or the names of tasks that did not end within `shutdown.grace`.
    pub async fn run(mut self) -> Result<(), TaskError> {
        self.serve_admin();
        if let Some(topics) = &self.topics_part {
            topics.ready();
        }
        if let Some(within) = self.until_idle {
            let worked = std::mem::take(&mut self.worked);
            let dispatch = self.dispatch.take();
            let mut queues = idle::queues_of(
                &self.config,
                &self.existing_topics,
                &worked,
                within.is_some(),
                &self.kafka,
            );
            queues.extend(dispatch.as_ref().map(Dispatch::queue));
            let watch = IdleWatch {
                kafka: self.kafka.clone(),
                clock: self.clock.clone(),
                queues,
                worked,
                dispatch,
                within: within.unwrap_or_default(),
                shutdown: self.tasks.shutdown().clone(),
            };
            self.tasks.spawn("until-idle", async move {
                watch.run().await;
                Ok::<(), Infallible>(())
            });
        }
        let (shutdown, stop) = (self.tasks.shutdown().clone(), self.lane_stop.clone());
        let holds = std::mem::take(&mut self.lane_holds);
        // In the background, because the process can end without a shutdown, when all of its tasks have.
        self.tasks.spawn_background("lane-stop", async move {
            shutdown.cancelled().await;
            for released in holds {
                released.cancelled().await;
            }
            stop.cancel();
            std::future::pending::<Result<(), Infallible>>().await
        });
        self.tasks
            .run_until_shutdown(self.config.shutdown.grace.duration())
            .await
    }
}

/// Checks the properties that are passed through to the Kafka client, the files that they name, and that this program can log
/// in as configured.
///
/// # Errors
/// When the client rejects a property, a file cannot be used, or the program was built without the login. The error names the
/// field and contains no value.
pub fn check_kafka(config: &Config) -> Result<(), ConfigError> {
    login::check(config).map_err(|error| ConfigError::of_field("kafka.login", error.to_string()))?;
    credentials::check(config)?;
    kafka_settings(config).check_properties().map_err(|unusable| {
        ConfigError::of_field(
            format!("kafka.properties.{}", unusable.property),
            unusable.problem,
        )
    })
}

/// The TLS of an API; `None` without certificates. Whether clients need one says [`ApiConfig::requires_client_certificate`].
///
/// # Errors
/// When a file cannot be used. The error names the field and the file.
pub fn api_tls(
    section: &'static str,
    api: &ApiConfig,
    protocols: Protocols,
) -> Result<Option<ServerTls>, ConfigError> {
    let clients = if api.requires_client_certificate() {
        ClientCertificates::Required
    } else {
        ClientCertificates::Optional
    };
    ServerTls::load(section, &api.tls, protocols, clients)
}

/// A lane of these topics with the configured batch and grace period. `name` is unique within the instance.
#[must_use]
pub fn lane_spec(config: &Config, name: String, group: String, topics: Vec<Arc<str>>) -> LaneSpec {
    LaneSpec {
        name,
        group,
        topics,
        batch: config.kafka.batch as usize,
        grace: lane_grace(config),
        changelog: None,
        if_recreated: IfRecreated::ReadFromBeginning,
        if_fenced: IfFenced::End,
    }
}

/// How long a stopping lane may finish records in flight, from `shutdown.grace`.
#[must_use]
pub fn lane_grace(config: &Config) -> Duration {
    config.shutdown.grace.duration().mul_f64(LANE_GRACE_SHARE)
}
