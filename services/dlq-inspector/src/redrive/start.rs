//! Starts the execution of jobs, and counts them for the metrics.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use redeliver_kafka::{IfFenced, LaneSpec, TopicState, Waker};
use redeliver_proto::v1;
use redeliver_runtime::Config;
use redeliver_runtime::config::{
    AUDIT_TOPIC, CONTROL_TOPIC, KafkaConfig, STATUS_TOPIC, SchedulerConfig, WAITING_ACTIONS_TOPIC,
};
use redeliver_service::Host;
use redeliver_service::audit::AuditLog;
use redeliver_service::host::{NewLane, lane_spec};
use redeliver_service::metrics::Serves;
use redeliver_service::topics;
use redeliver_store::Replica;
use tokio_util::sync::CancellationToken;

use super::decider::Decider;
use super::executor::Executor;
use super::job::{self, Job, Progress};
use super::jobs::Jobs;
use super::own_id;
use super::record::Destinations;
use super::returns::Returns;
use crate::config::{DlqInspectorConfig, RedriveConfig};
use crate::metrics::Metrics;

/// The name of the lane, which is a part of its transactional ids.
const LANE: &str = "dlq-redrive";
/// The capacity of the queues between the lane and the decider. There is one request at a time, and those of previous assignments.
const REQUESTS: usize = 8;
/// The interval of the check whether the topic exists.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Time between two updates of the gauges.
const INTERVAL: Duration = Duration::from_secs(5);

/// The destinations that the configuration allows.
pub(crate) fn destinations(config: &Config, inspector: &DlqInspectorConfig) -> Destinations {
    let settings = &inspector.redrive;
    let pipelines = topics::pipelines(config);
    let scheduler = config.scheduler.topics();
    // Commands of the scheduler are in partitions that follow from their keys, and internal topics belong to their services.
    let own = [
        scheduler.ingest.to_string(),
        scheduler.state.to_string(),
        settings.topic(&config.kafka),
        config.audit_topic(),
        config.control_topic(),
        config.waiting_actions_topic(),
    ];
    // Those of other installations have a prefix, unless they are configured otherwise.
    let redrives = RedriveConfig::default().topic(&KafkaConfig::default());
    let scheduler = SchedulerConfig::default().topics();
    let names = [
        crate::ledger::TOPIC,
        crate::group_states::TOPIC,
        AUDIT_TOPIC,
        CONTROL_TOPIC,
        STATUS_TOPIC,
        WAITING_ACTIONS_TOPIC,
        &*redrives,
        &*scheduler.ingest,
        &*scheduler.state,
    ];
    let excluded = own.into_iter().chain(names.map(|name| format!("*{name}")));
    Destinations::new(
        &pipelines,
        &settings.destinations,
        excluded.collect(),
        settings.max_count,
    )
    .without_dead_letters(&inspector.topics)
    .with_sources(inspector.share_group_sources.clone())
}

/// Executes jobs whenever the group assigns the partition to this process, once the topic exists: an installation without it serves as before.
///
/// # Errors
/// When a thread or the watch of the topics cannot be started.
pub(crate) fn execute(
    host: &mut Host,
    config: &RedriveConfig,
    jobs: Replica<Jobs>,
    returns: Returns,
    metrics: Metrics,
) -> io::Result<()> {
    let stop = host.tasks.shutdown().clone();
    let waker = Waker::new();
    let topic: Arc<str> = config.topic(&host.config.kafka).into();
    let (request_sender, requests) = sync_channel(REQUESTS);
    let (answer_sender, answers) = sync_channel(REQUESTS);
    let remove_after = config.remove_entries_after();
    let decider = Decider::new(host, config, jobs, returns);
    let (decider_waker, decider_stop) = (waker.clone(), stop.clone());
    let audit = AuditLog::new(&host.config, "dlq-inspector");
    let lane = NewLane {
        kafka: host.kafka.clone(),
        spec: LaneSpec {
            // The inspector goes on answering.
            if_fenced: IfFenced::TryAgain,
            ..lane_spec(&host.config, LANE.to_owned(), own_id(&topic), vec![topic.clone()])
        },
        serves: Serves::default(),
        waker,
        processor: Executor::new(
            topic.clone(),
            audit,
            metrics,
            host.clock.clone(),
            remove_after,
            request_sender,
            answers,
        ),
    };
    host.tasks.spawn_thread("dlq-redrive-decider", move || {
        decider.run(&requests, &answer_sender, &decider_waker, &decider_stop);
        Ok::<_, Infallible>(())
    })?;
    // An inspector answers also while no group, or another member of it, executes jobs.
    let starter = host.starter()?.aside();
    host.tasks.spawn("dlq-redrive-start", async move {
        while !matches!(starter.topic_watch().state(&topic), TopicState::Exists { .. }) {
            tokio::select! {
                () = tokio::time::sleep(POLL_INTERVAL) => {}
                () = stop.cancelled() => return Ok(()),
            }
        }
        starter.start(lane, stop).await
    });
    Ok(())
}

/// Counts the jobs that have not ended, by state, until shutdown.
pub(crate) async fn count(
    jobs: Replica<Jobs>,
    metrics: Metrics,
    stop: CancellationToken,
) -> Result<(), Infallible> {
    loop {
        if let Some(jobs) = jobs.state() {
            let states: Vec<&str> = jobs
                .iter()
                .map(|(_, entry, job)| shown(&job, &entry.progress()))
                .collect();
            for state in STATES {
                let count = states.iter().filter(|found| **found == state).count();
                metrics.set_redrives(state, i64::try_from(count).unwrap_or(i64::MAX));
            }
        }
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
}

/// The states in metrics.
const STATES: [&str; 4] = ["planned", "running", "paused", "auto_paused"];

/// The state of a job in metrics; empty if it has ended.
fn shown(job: &Job, progress: &Progress) -> &'static str {
    match job::state(job, progress) {
        v1::RedriveState::Planned => "planned",
        v1::RedriveState::Running => "running",
        v1::RedriveState::Paused if job::is_auto_paused(job, progress) => "auto_paused",
        v1::RedriveState::Paused => "paused",
        _ => "",
    }
}
