//! `redeliver topics`: create what is missing, name what is wrong.

use std::process::ExitCode;
use std::time::Duration;

use crate::say;
use clap::{Args, Subcommand};
use redeliver_dlq_inspector::ledger;
use redeliver_kafka::topology::{self, Finding, Severity, TopologySpec};
use redeliver_runtime::cli::{CommonArgs, EXIT_FAILURE, report};
use redeliver_worker::host::{check_kafka, kafka_settings};
use redeliver_worker::topics;

/// Flags of `redeliver topics`.
#[derive(Args)]
pub(crate) struct TopicsArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Create the topics that are missing; existing ones are never changed. Judges as `check` does
    Apply(CommonArgs),
    /// Name what is missing or would lose records (exit code 1), and what is doubtful (a warning, exit code 0)
    Check(CommonArgs),
}

const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn main(args: &TopicsArgs) -> ExitCode {
    let (Verb::Apply(common) | Verb::Check(common)) = &args.verb;
    let config = match common.load() {
        Ok(config) => config,
        Err(error) => return report(&error),
    };
    if let Some(code) = common.answer(&config, check_kafka) {
        return code;
    }
    let spec = topics::of_all(&config);
    if spec.topics.is_empty() {
        say("no pipelines and no applications are configured, so there is only the ledger of dead letters");
    }
    let settings = topics::topic_settings(&config);
    let spec = spec.join(TopologySpec::for_ledger(ledger::TOPIC, &settings));
    let client = kafka_settings(&config).client();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error),
    };
    let result = match &args.verb {
        Verb::Apply(_) => runtime
            .block_on(topology::apply(&client, &spec, TIMEOUT))
            .map(|applied| {
                for topic in &applied {
                    let what = if topic.created { "created" } else { "exists" };
                    say(format_args!("{what:<8} {}", topic.topic));
                }
                applied.into_iter().flat_map(|topic| topic.findings).collect()
            }),
        Verb::Check(_) => runtime.block_on(topology::check(&client, &spec, TIMEOUT)),
    };
    match result {
        Ok(findings) => judge(&findings, spec.topics.len()),
        Err(error) => report(&error),
    }
}

fn judge(findings: &[Finding], topics: usize) -> ExitCode {
    for finding in findings {
        say(finding);
    }
    if findings.iter().any(|finding| finding.severity == Severity::Error) {
        return ExitCode::from(EXIT_FAILURE);
    }
    // Services start with a warning all the same.
    match findings.len() {
        0 => say(format_args!("{topics} topics are as they must be")),
        1 => say(format_args!("{topics} topics, 1 warning")),
        warnings => say(format_args!("{topics} topics, {warnings} warnings")),
    }
    ExitCode::SUCCESS
}
