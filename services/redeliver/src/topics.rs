//! `redeliver topics`: creates missing topics or prints them, reports misconfigured ones, and copies committed offsets.

mod migrate;
mod render;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use crate::acls::all_topics;
use crate::config::Config;
use crate::connection::say_cluster;
use crate::say;
use clap::{Args, Subcommand};
use migrate::MigrateArgs;
use redeliver_core::Pipeline;
use redeliver_core::error_chain::error_chain;
use redeliver_core::pipeline::{TopicRole, parse_retry_topic, retry_tier_group};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::backlog::backlogs;
use redeliver_kafka::topology::{self, Finding, Severity, TopologySpec};
use redeliver_runtime::cli::{CommonArgs, EXIT_FAILURE, report};
use redeliver_service::host::check_kafka;
use redeliver_service::leftovers::leftovers;
use redeliver_service::login::kafka_of_command;
use redeliver_service::topics;
use render::RenderArgs;

#[derive(Args)]
pub(crate) struct TopicsArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Create missing topics, and report misconfigured ones; never change existing topics
    Apply(CommonArgs),
    /// Report missing and misconfigured topics
    #[command(after_help = "Exit status: 1 if there are errors, 0 if there are only warnings")]
    Check(CommonArgs),
    /// Print commands or objects that create the topics
    #[command(
        after_help = "Examples:\n  redeliver topics render --format script\n  redeliver topics render --format strimzi --cluster my-cluster"
    )]
    Render(RenderArgs),
    /// Copy committed offsets to groups with another kafka.id_prefix, while all processes are stopped
    MigrateOffsets(MigrateArgs),
}

const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn main(args: &TopicsArgs) -> ExitCode {
    let common = match &args.verb {
        Verb::Apply(common) | Verb::Check(common) => common,
        Verb::MigrateOffsets(args) => return migrate::main(args),
        Verb::Render(args) => return render::main(args),
    };
    let config: Config = match common.configure(|config| check_kafka(config)) {
        Ok(config) => config,
        Err(code) => return code,
    };
    if topics::of_all(&config).topics.is_empty() {
        say(
            "no pipelines or applications configured; checking only the ledger, the control and the audit topic",
        );
    }
    let spec = all_topics(&config);
    let kafka = match kafka_of_command(&config) {
        Ok(kafka) => kafka,
        Err(error) => return report(&error),
    };
    let client = kafka.client();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error),
    };
    let result = if matches!(args.verb, Verb::Apply(_)) {
        say_cluster(&kafka);
        runtime
            .block_on(topology::apply(&client, &spec, TIMEOUT))
            .map(|applied| {
                for topic in &applied {
                    let status = if topic.created { "created" } else { "exists" };
                    say(format_args!("{status:<8} {}", topic.topic));
                }
                applied.into_iter().flat_map(|topic| topic.findings).collect()
            })
    } else {
        runtime.block_on(async {
            let mut findings = topology::check(&client, &spec, TIMEOUT).await?;
            let existing = topology::names(&client, TIMEOUT).await?;
            findings.extend(leftover_findings(&config, &kafka, &spec, &existing));
            Ok(findings)
        })
    };
    match result {
        Ok(findings) => print_findings(&findings, spec.topics.len()),
        Err(error) => report(&error),
    }
}

/// Leftover tiers, and retired pipelines whose topics are empty.
fn leftover_findings(
    config: &Config,
    kafka: &KafkaSettings,
    needed: &TopologySpec,
    existing: &BTreeSet<String>,
) -> Vec<Finding> {
    let pipelines = topics::pipelines(config);
    let leftovers = leftovers(&pipelines, needed, existing);
    let retired: Vec<&Pipeline> = pipelines.iter().filter(|pipeline| pipeline.retired).collect();
    let of_retired = retired.iter().flat_map(|pipeline| {
        let topics = pipeline.topics().into_iter();
        topics.filter_map(|(topic, role)| match role {
            TopicRole::Tier(tier) => Some((retry_tier_group(&kafka.id_prefix, tier), topic)),
            TopicRole::Due => Some((pipeline.worker_group(&kafka.id_prefix), topic)),
            TopicRole::Source | TopicRole::Output | TopicRole::DeadLetter => None,
        })
    });
    let groups_and_topics: Vec<(String, Arc<str>)> = leftovers
        .iter()
        .map(|leftover| (leftover.group(&kafka.id_prefix), leftover.topic.clone()))
        .chain(of_retired.filter(|(_, topic)| existing.contains(&**topic)))
        .collect();
    if groups_and_topics.is_empty() {
        return Vec::new();
    }
    let backlogs = match backlogs(kafka, &groups_and_topics, TIMEOUT) {
        Ok(backlogs) => backlogs,
        Err(error) => {
            eprintln!(
                "cannot count the records in leftover tiers and retired pipelines: {}",
                error_chain(&error)
            );
            return Vec::new();
        }
    };
    let of_leftovers = leftovers
        .iter()
        .filter_map(|leftover| leftover.finding(*backlogs.get(&leftover.topic)?));
    let done = retired.into_iter().filter(|pipeline| {
        let own = |topic: &str| parse_retry_topic(topic).is_some_and(|(named, _)| *named == *pipeline.name);
        let mut own = backlogs.iter().filter(|(topic, _)| own(topic));
        own.all(|(_, backlog)| backlog.is_empty())
    });
    of_leftovers.chain(done.map(empty_and_retired)).collect()
}

/// Advice for a retired pipeline whose tiers and due topic are empty.
fn empty_and_retired(pipeline: &Pipeline) -> Finding {
    // The backlogs do not include the records that wait in the scheduler.
    let first = match pipeline.long_waits {
        Some(_) => "check with `redeliver audit` that no record waits in the scheduler, then ",
        None => "",
    };
    Finding {
        topic: pipeline.due_topic(),
        severity: Severity::Warning,
        problem: format!(
            "and the tiers of the retired pipeline `{}` are empty",
            pipeline.name
        ),
        remedy: format!("{first}remove the pipeline from `retired` and delete these topics"),
    }
}

fn print_findings(findings: &[Finding], topics: usize) -> ExitCode {
    for finding in findings {
        say(finding);
    }
    if findings.iter().any(|finding| finding.severity == Severity::Error) {
        return ExitCode::from(EXIT_FAILURE);
    }
    // Services start despite warnings.
    let checked = if topics == 1 {
        "1 topic".to_owned()
    } else {
        format!("{topics} topics")
    };
    match findings.len() {
        0 if topics == 1 => say("1 topic OK"),
        0 => say(format_args!("all {checked} OK")),
        1 => say(format_args!("{checked}, 1 warning")),
        warnings => say(format_args!("{checked}, {warnings} warnings")),
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_are_audited_before_removal() {
        let mut pipeline = Pipeline::new("orders");
        let remove = "remove the pipeline from `retired` and delete these topics";
        assert_eq!(empty_and_retired(&pipeline).remedy, remove);
        pipeline.long_waits = Some("ingest".into());
        let remedy = empty_and_retired(&pipeline).remedy;
        assert!(
            remedy.starts_with("check with `redeliver audit`") && remedy.ends_with(remove),
            "{remedy}"
        );
    }
}
