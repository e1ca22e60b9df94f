//! `redeliver audit`.

use std::process::ExitCode;
use std::time::Duration;

use crate::config::Config;
use crate::output::print_json;
use crate::say;
use clap::Args;
use redeliver_audit::{AuditOptions, audit};
use redeliver_core::{HandlerChanges, HumanDuration, Pipeline};
use redeliver_runtime::cli::{CommonArgs, EXIT_FAILURE, EXIT_USAGE, report};
use redeliver_service::host::check_kafka;
use redeliver_service::login::kafka_of_command;

#[derive(Args)]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Audit only this pipeline; can be repeated (default: all)
    #[arg(long, value_name = "NAME")]
    pipeline: Vec<String>,
    /// Output format: text or json
    #[arg(short, long, value_name = "FORMAT", default_value = "text", value_parser = ["text", "json"])]
    output: String,
    /// Timeout of reading the topics
    #[arg(long, value_name = "DURATION", default_value = "10m")]
    timeout: HumanDuration,
}

pub(crate) fn main(args: &AuditArgs) -> ExitCode {
    let config: Config = match args.common.configure(|config| check_kafka(config)) {
        Ok(config) => config,
        Err(code) => return code,
    };
    if let Some(unknown) = args
        .pipeline
        .iter()
        .find(|name| config.any_pipeline(name).is_none())
    {
        let known: Vec<&str> = config.all_pipelines().map(|(name, _)| name).collect();
        eprintln!(
            "error: --pipeline: unknown pipeline `{unknown}`; expected one of {}",
            known.join(", ")
        );
        return ExitCode::from(EXIT_USAGE);
    }
    let settings = match kafka_of_command(&config) {
        Ok(settings) => settings,
        Err(error) => return report(&error),
    };
    let mut clean = true;
    for (pipeline, changes) in selected(&config, &args.pipeline) {
        let scheduler = &config.scheduler;
        let options = AuditOptions {
            changes,
            scheduler: (pipeline.long_waits.is_some())
                .then(|| (settings.id(&scheduler.group), scheduler.topics())),
            timeout: Duration::from(args.timeout),
        };
        let result = match audit(&settings, &pipeline, &options) {
            Ok(result) => result,
            Err(error) => return report(&error),
        };
        clean &= result.is_clean();
        if args.output == "json" {
            match serde_json::to_string(&result) {
                Ok(document) => print_json(document),
                Err(error) => return report(&error),
            }
        } else {
            say(&result);
        }
    }
    if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_FAILURE)
    }
}

/// The pipelines to audit, and what their handlers may change.
fn selected(config: &Config, names: &[String]) -> Vec<(Pipeline, HandlerChanges)> {
    let selected = config
        .all_pipelines()
        .filter(|(name, _)| names.is_empty() || names.iter().any(|selected| selected == name));
    let with_changes = selected.map(|(name, pipeline)| {
        let http = pipeline.http.as_ref();
        let changes = http.map_or(HandlerChanges::Anything, |http| http.response.changes());
        (pipeline.pipeline(name, &config.scheduler), changes)
    });
    with_changes.collect()
}
