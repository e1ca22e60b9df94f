//! The service: what it needs of the configuration, and how its parts are put together.

use std::sync::Arc;

use anyhow::Context as _;
use jiff::tz::TimeZone;
use redeliver_kafka::{IfRecreated, LaneSpec, Waker, reader};
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::{ConfigError, Problem};
use redeliver_runtime::listen::Listener;
use redeliver_worker::host::{Host, check_kafka, lane_grace};
use redeliver_worker::topics;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::api;
use crate::codec::RetentionPolicy;
use crate::index::Index;
use crate::index::redis::RedisIndex;
use crate::indexer::Answers;
use crate::metrics::SchedulerFamilies;
use crate::processor::{Held, Scheduler, run_indexers};
use crate::readiness::ShardReadiness;
use crate::request::Rules;
use crate::shard::Settings;
use crate::spans::Spans;
use crate::topics::{Topics, WatchedTopics};

/// What of a configuration the service cannot follow.
///
/// # Errors
/// When the time zone is not known, Kafka's client does not take a property, or Redis cannot be reached like this.
pub fn check(config: &Config) -> Result<(), ConfigError> {
    check_kafka(config)?;
    RedisIndex::check(&config.redis).map_err(|error| ConfigError::Invalid(vec![error.into()]))?;
    rules(config).map(drop)
}

/// Runs the service until it is told to stop, with a configuration that passed [`check`].
///
/// # Errors
/// When the topics are unsound, Redis may forget what it is given, or a lane cannot go on.
pub async fn run(start: Start) -> anyhow::Result<()> {
    let mut host = Host::new("scheduler", start);
    let listener = Listener::bind("scheduler.listen", host.config.scheduler.listen)?;
    let spec = topics::of_scheduler(&host.config);
    host.ensure_topics(&spec).await?;
    if !host.tasks.shutdown().is_cancelled() {
        let config = host.config.clone();
        let index = RedisIndex::connect(&config.redis, &mut host.tasks).await?;
        mount(&mut host, index.clone()).await?;
        api::mount(&mut host, index, listener).await?;
    }
    Ok(host.run().await?)
}

/// What may be scheduled, from the configuration.
///
/// # Errors
/// When the time zone is not known.
pub fn rules(config: &Config) -> Result<Rules, ConfigError> {
    let scheduler = &config.scheduler;
    let time_zone = TimeZone::get(&scheduler.default_time_zone).map_err(|error| {
        ConfigError::Invalid(vec![Problem {
            field: "scheduler.default_time_zone".to_owned(),
            problem: error.to_string(),
            place: None,
        }])
    })?;
    let apps = scheduler.apps.iter();
    Ok(Rules {
        apps: apps
            .map(|(name, app)| (name.clone(), app.topic.as_str().into()))
            .collect(),
        // Of these, and no others, the topics are looked at before anything is read.
        pipelines: topics::pipelines(config)
            .into_iter()
            .filter(|pipeline| pipeline.long_waits.is_some())
            .map(|pipeline| (pipeline.name.to_string(), Arc::new(pipeline)))
            .collect(),
        time_zone,
        max_ahead: scheduler.max_ahead,
        max_data: usize::try_from(scheduler.max_data).unwrap_or(usize::MAX),
    })
}

/// Adds the lanes of the scheduler to a host.
///
/// # Errors
/// When the ingest topic cannot be looked at, or the system gives no thread.
pub async fn mount<I: Index>(host: &mut Host, index: I) -> anyhow::Result<()> {
    let config = host.config.clone();
    let scheduler = &config.scheduler;
    let names = &scheduler.topics;
    let ingest: Arc<str> = names.ingest.as_str().into();
    let (kafka, topic) = (host.kafka.clone(), ingest.clone());
    let partitions = tokio::task::spawn_blocking(move || reader::partitions(&kafka, &topic))
        .await
        .context("looking at the ingest topic")??;
    let topics = WatchedTopics::new(host.topic_watch()?, host.kafka.takes_all_partitions);
    let topics: Arc<dyn Topics> = Arc::new(topics);
    let rules = rules(&config)?;
    for topic in rules.topics() {
        // From now on it is watched.
        topics.presence(&topic);
    }
    let settings = Arc::new(Settings {
        rules,
        ingest: ingest.clone(),
        state: names.state.as_str().into(),
        dead_letters: names.dlq.as_str().into(),
        answers: names.answers.as_str().into(),
        partitions,
        memory: RetentionPolicy {
            keys: scheduler.idempotency_window.duration(),
            ended: scheduler.keep_ended.duration(),
        },
        window: scheduler.window.duration(),
        window_jobs: scheduler.window_jobs as usize,
        window_bytes: usize::try_from(scheduler.window_bytes).unwrap_or(usize::MAX),
        topics,
        missing_topic_timeout: config.kafka.topics.missing_timeout.duration(),
        spans: Spans::new(host.tracer.clone()),
    });
    let families = SchedulerFamilies::register(&mut host.registry());
    for lane in 0..config.kafka.lanes {
        let name = format!("scheduler-{lane}");
        let waker = Waker::new();
        let answers = Arc::new(Answers::new(waker.clone()));
        let (indexers, starting) = mpsc::channel(KEEPERS);
        let metrics = families.of(&name);
        for (app, topic) in &settings.rules.apps {
            metrics.not_missed(app, topic);
        }
        let processor = Scheduler {
            settings: settings.clone(),
            index: index.clone(),
            kafka: host.kafka.clone(),
            clock: host.clock.clone(),
            metrics,
            indexers,
            answers,
            readiness: Arc::new(ShardReadiness::new(host.health.part(format!("{name}-shards")))),
            held: Held::default(),
        };
        let lane_ended = CancellationToken::new();
        let keeping = run_indexers(starting, lane_ended.clone());
        host.tasks.spawn(format!("{name}-indexers"), keeping);
        let spec = LaneSpec {
            name,
            group: scheduler.group.clone(),
            topics: vec![ingest.clone()],
            batch: config.kafka.batch as usize,
            grace: lane_grace(&config),
            changelog: Some(settings.state.clone()),
            // Its offsets are part of the ids of jobs.
            if_recreated: IfRecreated::Halt,
        };
        let ended = Some(lane_ended.drop_guard());
        host.spawn_lane(host.kafka.clone(), spec, waker, processor, ended)?;
    }
    Ok(())
}

/// Keepers on their way to the task that runs them.
const KEEPERS: usize = 64;
