//! `redeliver audit`: the oracle for users.

use std::process::ExitCode;
use std::time::Duration;

use crate::say;
use clap::Args;
use redeliver_audit::{AuditOptions, OutputCheck, audit};
use redeliver_core::Pipeline;
use redeliver_core::span::Span;
use redeliver_runtime::Config;
use redeliver_runtime::cli::{CommonArgs, EXIT_FAILURE, EXIT_USAGE, report};
use redeliver_runtime::config::ResponseMode;
use redeliver_worker::host::{check_kafka, kafka_settings};

/// Flags of `redeliver audit`.
#[derive(Args)]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Audit only this pipeline; may be repeated. Default: all
    #[arg(long, value_name = "NAME")]
    pipeline: Vec<String>,
    /// text or json
    #[arg(short, long, value_name = "FORMAT", default_value = "text", value_parser = ["text", "json"])]
    output: String,
    /// Give up when the ends of the topics are not reached within this time
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    timeout: Span,
}

pub(crate) fn main(args: &AuditArgs) -> ExitCode {
    let config = match args.common.load() {
        Ok(config) => config,
        Err(error) => return report(&error),
    };
    if let Some(code) = args.common.answer(&config, check_kafka) {
        return code;
    }
    if let Some(unknown) = args
        .pipeline
        .iter()
        .find(|name| config.any_pipeline(name).is_none())
    {
        let known: Vec<&str> = config.all_pipelines().map(|(name, _)| name).collect();
        eprintln!(
            "error: --pipeline: there is no pipeline `{unknown}`; there are: {}",
            known.join(", ")
        );
        return ExitCode::from(EXIT_USAGE);
    }
    let settings = kafka_settings(&config);
    let mut clean = true;
    for (pipeline, check) in chosen(&config, &args.pipeline) {
        let scheduler = &config.scheduler;
        let options = AuditOptions {
            output: check,
            scheduler: (pipeline.long_waits.is_some()).then(|| (scheduler.group.clone(), scheduler.topics())),
            timeout: Duration::from(args.timeout),
        };
        let found = match audit(&settings, &pipeline, &options) {
            Ok(found) => found,
            Err(error) => return report(&error),
        };
        clean &= found.is_clean();
        if args.output == "json" {
            match serde_json::to_string(&found) {
                Ok(line) => say(line),
                Err(error) => return report(&error),
            }
        } else {
            say(&found);
        }
    }
    if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_FAILURE)
    }
}

/// The pipelines to audit, and what may differ between a record and its result.
fn chosen(config: &Config, names: &[String]) -> Vec<(Pipeline, OutputCheck)> {
    let chosen = config
        .all_pipelines()
        .filter(|(name, _)| names.is_empty() || names.iter().any(|chosen| chosen == name));
    let with_check = chosen.map(|(name, pipeline)| {
        let check = match pipeline.http.as_ref().map(|http| http.response) {
            Some(ResponseMode::Keep) => OutputCheck::Unchanged,
            Some(ResponseMode::Replace) => OutputCheck::ValueReplaced,
            None => OutputCheck::Free,
        };
        (pipeline.pipeline(name, &config.scheduler), check)
    });
    with_check.collect()
}
