//! The service: checks the configuration and assembles the parts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use redeliver_kafka::reader::TopicClient;
use redeliver_kafka::{IfFenced, IfRecreated, LaneSpec, Waker, reader};
use redeliver_runtime::ProgramConfig;
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::{ConfigError, SchedulerConfig};
use redeliver_service::control::settings::AppSettings;
use redeliver_service::host::{Host, NewLane, lane_spec};
use redeliver_service::metrics::Serves;
use redeliver_service::topics;
use tokio::sync::mpsc;

use crate::api;
use crate::codec::RetentionPolicy;
use crate::config::{Sections, rules};
use crate::controls::LiveAppStates;
use crate::index::redis::{RedisIndex, in_use};
use crate::index::{Index, Installation};
use crate::indexer::IndexResponses;
use crate::limits::{MemoryShare, ProcessLimits};
use crate::metrics::SchedulerFamilies;
use crate::processor::{LaneShards, Scheduler, run_indexers};
use crate::rate::Buckets;
use crate::readiness::ShardReadiness;
use crate::settings::Settings;
use crate::topic_changes::TopicChanges;
use crate::topics::{Topics, WatchedTopics};

/// Checks a configuration without connecting to anything.
///
/// # Errors
/// When the time zone is unknown or the settings of Redis are invalid.
pub fn check(config: &ProgramConfig<Sections>) -> Result<(), ConfigError> {
    RedisIndex::check(&config.own.redis).map_err(|error| ConfigError::Invalid(vec![error.into()]))?;
    api::check(&config.scheduler)?;
    rules(config).map(drop)
}

/// Runs the service until shutdown, with a configuration that passed [`check`].
///
/// # Errors
/// When the topics are not as required, Redis may evict keys, or a lane fails.
pub async fn run(start: Start, own: Sections) -> anyhow::Result<()> {
    let mut host = Host::new("scheduler", start);
    let listener = api::listen(&host)?;
    let spec = topics::of_scheduler(&host.config);
    host.ensure_topics(&spec).await?;
    if !host.tasks.shutdown().is_cancelled() {
        let config = host.config.clone();
        let (installation, partitions) = installation(&host).await?;
        let prefix = own.redis.prefix(&config.kafka, &installation.cluster);
        let index = RedisIndex::connect(&own.redis, &prefix, installation, &mut host.tasks)
            .await?
            .with_max_ended(config.scheduler.max_ended as usize);
        refuse_shared_prefix(&index, partitions).await?;
        index.register(&mut host.registry());
        mount(&mut host, index.clone()).await?;
        api::mount(&mut host, index, listener).await?;
    }
    Ok(host.run().await?)
}

/// What identifies the index in Redis, and the number of its shards.
async fn installation(host: &Host) -> anyhow::Result<(Installation, i32)> {
    let topic: Arc<str> = host.config.scheduler.topics.state.as_str().into();
    let kafka = host.kafka.clone();
    let read = move || {
        let topics = TopicClient::new(&kafka)?;
        let cluster = topics
            .cluster_id()
            .context("no broker tells the id of the cluster")?;
        let topic_id = ask_twice(ID_DELAY, || topics.id(&topic))?;
        let partitions = topics.partitions(&topic)?;
        let installation = Installation {
            cluster,
            topic,
            topic_id,
        };
        anyhow::Ok((installation, partitions))
    };
    tokio::task::spawn_blocking(read)
        .await
        .context("reading the identity of the state topic")?
}

/// Asks again once if there is no answer: a broker may not know a topic yet that another one has created.
fn ask_twice<T, E>(delay: Duration, mut ask: impl FnMut() -> Result<Option<T>, E>) -> Result<Option<T>, E> {
    if let Some(answer) = ask()? {
        return Ok(Some(answer));
    }
    std::thread::sleep(delay);
    ask()
}

/// Refuses to start beside another installation that uses the same keys. While Redis is unavailable, that is found out later: no shard is claimed.
async fn refuse_shared_prefix(index: &RedisIndex, shards: i32) -> anyhow::Result<()> {
    for shard in 0..shards {
        match index.used_by_another(shard).await {
            Ok(None) => {}
            Ok(Some(other)) => anyhow::bail!(in_use(&other)),
            Err(error) => {
                tracing::debug!(%error, "cannot find out whether another installation uses the index");
                return Ok(());
            }
        }
    }
    Ok(())
}

/// How many jobs of applications with a quota may wait.
pub(crate) fn max_waiting(config: &SchedulerConfig) -> BTreeMap<Arc<str>, u64> {
    let apps = config.apps.iter();
    apps.filter_map(|(name, app)| Some((name.as_str().into(), app.max_waiting?)))
        .collect()
}

/// Adds the lanes of the scheduler to a host, once it has read which applications are paused. Does nothing if the process shuts down
/// before that.
///
/// # Errors
/// When the partitions of the ingest topic cannot be read, or a thread cannot be started.
pub async fn mount<I: Index>(host: &mut Host, index: I) -> anyhow::Result<()> {
    let Some(control) = host.control().await? else {
        return Ok(());
    };
    let config = host.config.clone();
    host.require_steady_clock();
    let scheduler = &config.scheduler;
    let names = &scheduler.topics;
    let ingest: Arc<str> = names.ingest.as_str().into();
    let group = host.kafka.id(&scheduler.group);
    let (kafka, topic) = (host.kafka.clone(), ingest.clone());
    let partitions = tokio::task::spawn_blocking(move || reader::partitions(&kafka, &topic))
        .await
        .context("reading the partitions of the ingest topic")??;
    let topics = WatchedTopics::new(host.topic_watch()?);
    let topics: Arc<dyn Topics> = Arc::new(topics);
    let rules = rules(&config)?;
    for topic in rules.topics() {
        // The first query adds the topic to the watch, so that its state is known before the first job is due.
        topics.presence(&topic);
    }
    let window_bytes = usize::try_from(scheduler.window_bytes).unwrap_or(usize::MAX);
    let settings = Arc::new(Settings {
        rules,
        ingest: ingest.clone(),
        state: names.state.as_str().into(),
        dead_letters: names.dlq.as_str().into(),
        answers: names.answers.as_str().into(),
        partitions,
        retention: RetentionPolicy {
            keys: scheduler.idempotency_window.duration(),
            ended: scheduler.keep_ended.duration(),
        },
        window: scheduler.window.duration(),
        window_jobs: window_bytes / MIN_WINDOW_JOB,
        window_bytes,
        index_batch_bytes: INDEX_BATCH_BYTES,
        topics,
        missing_topic_timeout: config.kafka.topics.missing_timeout.duration(),
        max_waiting: max_waiting(scheduler),
        app_states: LiveAppStates::new(AppSettings::of(&config), Some(control)),
        buckets: Buckets::default(),
    });
    let families = SchedulerFamilies::register(&mut host.registry(), host.clock.clone());
    let limits = Arc::new(ProcessLimits::new());
    for lane in 0..config.kafka.lanes {
        let name = format!("scheduler-{lane}");
        let waker = Waker::new();
        let responses = Arc::new(IndexResponses::new(waker.clone()));
        let (indexers, starting_indexers) = mpsc::channel(INDEXER_QUEUE);
        let metrics = families.of(&name, &group);
        for (app, topic) in &settings.rules.apps {
            metrics.clear_blocked(app, topic);
            metrics.set_rate_limited(app, 0);
            metrics.set_paused(app, 0);
        }
        let processor = Scheduler {
            settings: settings.clone(),
            index: index.clone(),
            kafka: host.kafka.clone(),
            clock: host.clock.clone(),
            metrics,
            indexers,
            responses,
            readiness: Arc::new(ShardReadiness::new(host.health.part(format!("{name}-shards")))),
            topic_changes: TopicChanges::new(
                ingest.clone(),
                settings.state.clone(),
                partitions,
                index.state_topic_id(),
            ),
            limits: limits.clone(),
            memory: MemoryShare::new(limits.clone()),
            lane: LaneShards::default(),
        };
        let indexers_name = format!("{name}-indexers");
        let spec = LaneSpec {
            changelog: Some(settings.state.clone()),
            // Offsets of the ingest topic are part of job ids. In a topic that was created again, they would repeat.
            if_recreated: IfRecreated::Halt,
            if_fenced: IfFenced::End,
            ..lane_spec(&config, name, group.clone(), vec![ingest.clone()])
        };
        let lane_ended = host.spawn_lane(NewLane {
            kafka: host.kafka.clone(),
            spec,
            serves: Serves::default(),
            waker,
            processor,
        })?;
        host.tasks
            .spawn(indexers_name, run_indexers(starting_indexers, lane_ended));
    }
    Ok(())
}

/// What a job in the window counts at least, in bytes.
const MIN_WINDOW_JOB: usize = 1342;
/// The maximum size of the changes that are applied to the index at once, in bytes. One script applies them,
/// and blocks Redis meanwhile.
const INDEX_BATCH_BYTES: usize = 4 << 20;
/// The maximum number of indexers that wait to be started.
const INDEXER_QUEUE: usize = 64;
/// The delay before a broker is asked again for the id of a topic.
const ID_DELAY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_may_not_know_yet() {
        let asked = |answers: [Option<i32>; 2]| {
            let mut answers = answers.into_iter();
            let found: Result<_, ()> = ask_twice(Duration::ZERO, || Ok(answers.next().unwrap()));
            (found.unwrap(), answers.len())
        };
        assert_eq!(asked([None, Some(1)]), (Some(1), 0));
        assert_eq!(asked([Some(1), None]), (Some(1), 1));
        assert_eq!(asked([None, None]), (None, 0));
    }
}
