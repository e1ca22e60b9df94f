//! The retry tier: waiting records are released to their return topic when they are due, exactly once and
//! never early.
//!
//! A tier is a set of topics, `<pipeline>-retry-<tier>`, one for each pipeline that has it. One process
//! serves one or more tiers, each with lanes and a consumer group of its own, so that each can be scaled
//! alone. Tiers that a pipeline does not have any more are served until their topics are deleted.

mod leftovers;
mod metrics;
mod relay;
mod window;

use std::sync::Arc;

use redeliver_core::{Pipeline, Span, pipeline};
use redeliver_kafka::topology::TopologySpec;
use redeliver_kafka::{IfRecreated, KafkaSettings, LaneSpec, Prefetch, Waker};
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::{ConfigError, Problem};
use redeliver_worker::host::{Host, check_kafka, lane_grace};
use redeliver_worker::topics::{self, topic_settings};

use crate::leftovers::Watch;
use crate::metrics::TierFamilies;
pub use crate::relay::LookAhead;
use crate::relay::{Relay, Served};

/// What of a configuration the service cannot follow.
///
/// # Errors
/// When there is nothing to do, or Kafka's client does not take a property.
pub fn check(config: &Config) -> Result<(), ConfigError> {
    check_kafka(config)?;
    if topics::pipelines(config).is_empty() {
        return Err(ConfigError::Invalid(vec![Problem {
            field: "pipelines".to_owned(),
            problem: "there is none, so there is nothing to do".to_owned(),
            place: None,
        }]));
    }
    Ok(())
}

/// Runs the service until it is told to stop, with a configuration that passed [`check`].
///
/// # Errors
/// When the topics are unsound or a lane cannot go on.
pub async fn run(start: Start) -> anyhow::Result<()> {
    use_small_pages();
    let mut host = Host::new("retry-tier", start);
    let pipelines = served(&host.config);
    let pipelines: Vec<Pipeline> = pipelines.iter().map(|pipeline| (**pipeline).clone()).collect();
    let needed = TopologySpec::for_pipelines(&pipelines, &topic_settings(&host.config));
    host.ensure_topics(&needed).await?;
    mount(&mut host)?;
    Ok(host.run().await?)
}

/// This process holds little and waits for long. With pages of 2 MiB (transparent huge pages), of each of which a
/// little is in use, it would take twice the memory.
fn use_small_pages() {
    #[cfg(target_os = "linux")]
    if let Err(error) = nix::sys::prctl::set_thp_disable(true) {
        tracing::debug!(%error, "huge pages are in use");
    }
}

/// Adds the lanes of all served tiers to a host.
///
/// # Errors
/// When the system gives no thread.
pub fn mount(host: &mut Host) -> anyhow::Result<()> {
    let config = host.config.clone();
    let families = TierFamilies::register(&mut host.registry());
    let pipelines = served(&config);
    let kafka = KafkaSettings {
        prefetch: Prefetch::WAITING,
        ..host.kafka.clone()
    };
    let look_ahead = LookAhead {
        records: config.retry_tier.look_ahead as usize,
        bytes: usize::try_from(config.retry_tier.look_ahead_bytes).unwrap_or(usize::MAX),
    };
    let watch = host.topic_watch()?;
    for tier in config.served_tiers() {
        let with_tier = having(&pipelines, tier, host);
        if with_tier.is_empty() {
            continue;
        }
        for lane in 0..config.kafka.lanes {
            let name = format!("retry-{tier}-{lane}");
            let metrics = families.of(tier, &name);
            let (tracer, is_missing) = (host.tracer.clone(), relay::is_missing(&watch));
            let relay = Relay::new(tier, &with_tier, look_ahead, metrics, tracer, is_missing);
            let waker = Waker::new();
            watch.watch(relay.written_topics(), &waker);
            let spec = LaneSpec {
                name,
                group: pipeline::retry_tier_group(tier),
                topics: relay.topics(),
                batch: config.kafka.batch as usize,
                grace: lane_grace(&config),
                changelog: None,
                if_recreated: IfRecreated::ReadFromBeginning,
            };
            host.spawn_lane(kafka.clone(), spec, waker, relay, None)?;
        }
    }
    let watch = Watch::new(host, kafka, look_ahead, families)?;
    host.tasks.spawn("leftovers", watch.run());
    Ok(())
}

/// The pipelines that have at least one of the served tiers, or may have had one.
fn served(config: &Config) -> Vec<Arc<Pipeline>> {
    let tiers = config.served_tiers();
    let has_one = |pipeline: &Pipeline| pipeline.policy.tiers().iter().any(|tier| tiers.contains(tier));
    let leftovers = config.retry_tier.serves_leftovers();
    let pipelines = topics::pipelines(config).into_iter();
    pipelines
        .filter(|pipeline| leftovers || has_one(pipeline))
        .map(Arc::new)
        .collect()
}

fn having(pipelines: &[Arc<Pipeline>], tier: Span, host: &Host) -> Vec<Served> {
    pipelines
        .iter()
        .filter(|pipeline| pipeline.policy.tiers().contains(&tier))
        .map(|pipeline| Served::new(pipeline.clone(), host.has_topic(&pipeline.due_topic())))
        .collect()
}
