//! The retry tier: releases waiting records to their return topic when they are due, exactly once and never early.
//!
//! A tier consists of the topics `<pipeline>-retry-<tier>`, one for each pipeline that has it. A process serves one or
//! more tiers. Each tier has its own lanes and its own consumer group, so that tiers scale independently. Leftover
//! tiers are served until their topics are deleted.

mod config;
mod controls;
mod lanes;
mod leftovers;
mod lookups;
mod metrics;
mod relay;
mod waiting;

use std::sync::Arc;

use redeliver_core::{HumanDuration, Pipeline};
use redeliver_kafka::topology::TopologySpec;
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::ConfigError;
use redeliver_runtime::{Config, ProgramConfig};
use redeliver_service::host::Host;
use redeliver_service::idle::Work;
use redeliver_service::topics::{self, topic_settings};

pub use crate::config::{RetryTierConfig, Sections};
use crate::lanes::TierLanes;
use crate::leftovers::LeftoverWatch;
pub use crate::relay::LookAhead;
use crate::relay::ServedPipeline;

/// Checks what only this service needs of a configuration.
///
/// # Errors
/// When no pipeline is configured.
pub fn check(config: &ProgramConfig<Sections>) -> Result<(), ConfigError> {
    if topics::pipelines(config).is_empty() {
        let problem = "is empty; configure at least one pipeline";
        return Err(ConfigError::of_field("pipelines", problem));
    }
    Ok(())
}

/// Runs the service until it is shut down, with a configuration that passed [`check`].
///
/// # Errors
/// When topics are missing or misconfigured, or a lane fails.
pub async fn run(start: Start, own: Sections) -> anyhow::Result<()> {
    let mut host = Host::new("retry-tier", start);
    let pipelines = served_pipelines(&host.config, &own.retry_tier);
    let pipelines: Vec<Pipeline> = pipelines.iter().map(|pipeline| (**pipeline).clone()).collect();
    let needed = TopologySpec::for_pipelines(&pipelines, &topic_settings(&host.config));
    let needed = needed
        .join(topics::of_control(&host.config))
        .join(topics::of_waiting_actions(&host.config));
    host.ensure_topics_of(&pipelines, &needed).await?;
    mount(&mut host, &own.retry_tier).await?;
    Ok(host.run().await?)
}

/// Adds the lanes of all served tiers to a host, once it has read which of them are paused, and what operators want done with single records. Does nothing if the process shuts down
/// before that.
///
/// # Errors
/// When the operating system cannot create a thread.
pub async fn mount(host: &mut Host, settings: &RetryTierConfig) -> anyhow::Result<()> {
    let Some(control) = host.control().await? else {
        return Ok(());
    };
    let Some(actions) = host.waiting_actions().await? else {
        return Ok(());
    };
    let config = host.config.clone();
    host.require_steady_clock();
    let mut pipelines = served_pipelines(&config, settings);
    pipelines.retain(|pipeline| !host.is_refused(&pipeline.name));
    let tiers = settings.served_tiers(&config);
    for pipeline in &pipelines {
        let settings = settings.clone();
        let serves = move |tier, is_leftover: bool| {
            settings.serves(tier) && (!is_leftover || settings.serves_leftovers())
        };
        let (serves, control) = (Box::new(serves), control.clone());
        host.works_on(pipeline.clone(), Work::Tiers { serves, control });
    }
    host.report_paused("tiers", "paused tiers", {
        let (pipelines, tiers) = (pipelines.clone(), tiers.clone());
        move |snapshot| {
            let served = pipelines.iter().flat_map(|pipeline| {
                let served = tiers
                    .iter()
                    .filter(move |tier| pipeline.policy.tiers().contains(tier));
                served.map(move |tier| (pipeline.name.clone(), *tier))
            });
            let paused = served.filter(|(pipeline, tier)| snapshot.tier(pipeline, *tier).is_paused);
            paused
                .map(|(pipeline, tier)| format!("{pipeline}/{tier}"))
                .collect()
        }
    });
    let lanes = TierLanes::new(host, settings, control, actions)?;
    for tier in tiers {
        let pipelines = with_tier(&pipelines, tier, host);
        if pipelines.is_empty() {
            continue;
        }
        for lane in 0..config.kafka.lanes {
            host.spawn_lane(lanes.lane(format!("retry-{tier}-{lane}"), tier, &pipelines))?;
        }
    }
    let leftovers = LeftoverWatch::new(host, settings.clone(), lanes)?;
    host.tasks.spawn("leftovers", leftovers.run());
    Ok(())
}

/// The pipelines that have at least one of the served tiers, or may have a leftover one.
#[must_use]
pub fn served_pipelines(config: &Config, settings: &RetryTierConfig) -> Vec<Arc<Pipeline>> {
    let tiers = settings.served_tiers(config);
    let has_served_tier =
        |pipeline: &Pipeline| pipeline.policy.tiers().iter().any(|tier| tiers.contains(tier));
    let leftovers = settings.serves_leftovers();
    let pipelines = topics::pipelines(config).into_iter();
    pipelines
        .filter(|pipeline| leftovers || has_served_tier(pipeline))
        .map(Arc::new)
        .collect()
}

fn with_tier(pipelines: &[Arc<Pipeline>], tier: HumanDuration, host: &Host) -> Vec<ServedPipeline> {
    pipelines
        .iter()
        .filter(|pipeline| pipeline.policy.tiers().contains(&tier))
        .map(|pipeline| ServedPipeline::new(pipeline.clone(), host.has_topic(&pipeline.due_topic())))
        .collect()
}
