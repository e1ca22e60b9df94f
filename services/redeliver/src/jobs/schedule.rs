//! `redeliver jobs schedule`.

use std::io::Read as _;
use std::process::ExitCode;

use clap::{ArgGroup, Args};
use redeliver_client::{ClientError, JobRequest, Priority, Timestamp};
use redeliver_core::HumanDuration;
use redeliver_runtime::Config;
use serde_json::json;

use super::{SchedulerArgs, batch, due};
use crate::connection::CliError;
use crate::output::{OutputArgs, print_item};

#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true).args(["at", "after", "file"]))]
pub(super) struct ScheduleArgs {
    /// Application, one of scheduler.apps
    #[arg(long, value_name = "NAME", required_unless_present = "file")]
    app: Option<String>,
    /// Due time, such as 2026-11-22T08:00:00Z
    #[arg(long, value_name = "TIME", value_parser = super::time)]
    at: Option<Timestamp>,
    /// Delay from now, such as 90s
    #[arg(long = "in", value_name = "DURATION")]
    after: Option<HumanDuration>,
    /// File with one job per line, in JSON as for REST; - for standard input. Prints a result per line. Exits with status 1 if a
    /// job failed
    #[arg(long, value_name = "FILE", conflicts_with_all = ["app", "data", "data_file", "key", "headers", "priority",
        "idempotency_key", "replace", "expire_after", "request_id"])]
    pub(super) file: Option<String>,
    /// Value of the record, as text (default: empty)
    #[arg(long, value_name = "TEXT", conflicts_with = "data_file")]
    data: Option<String>,
    /// File with the value of the record; - for standard input
    #[arg(long, value_name = "FILE")]
    data_file: Option<String>,
    /// Key of the record (default: null)
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Header of the record; may be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = header)]
    headers: Vec<(String, String)>,
    /// Priority among due jobs: high, normal or low
    #[arg(long, value_name = "PRIORITY", default_value = "normal", value_parser = priority)]
    priority: Priority,
    /// Idempotency key: requests of an application with the same key within a day create one job
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Take the place of a waiting job with the same idempotency key
    #[arg(long, requires = "idempotency_key")]
    replace: bool,
    /// Expire the job this long after its due time (default: never)
    #[arg(long, value_name = "DURATION")]
    expire_after: Option<HumanDuration>,
    /// Request id, stored with the job
    #[arg(long, value_name = "NAME")]
    request_id: Option<String>,
    #[command(flatten)]
    pub(super) output: OutputArgs,
    #[command(flatten)]
    pub(super) scheduler: SchedulerArgs,
}

fn header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("must be NAME=VALUE, such as tenant=x".to_owned()),
    }
}

fn priority(text: &str) -> Result<Priority, String> {
    text.parse().map_err(|error| format!("`{text}` {error}"))
}

pub(super) async fn run(config: &Config, args: &ScheduleArgs) -> Result<ExitCode, CliError> {
    if let Some(file) = &args.file {
        return batch::run(config, args, file).await;
    }
    let request = args.request()?;
    request.check().map_err(ClientError::from)?;
    let scheduled = args.scheduler.connect(config).await?.schedule(&request).await?;
    let id = scheduled.id;
    print_item(
        args.output.format,
        || id.to_string(),
        || {
            json!({
                "id": id.to_string(),
                "duplicate": scheduled.is_duplicate,
                "replaced": scheduled.is_replacement,
                "job": scheduled.job.as_ref().map(super::as_json),
            })
        },
    );
    if scheduled.is_duplicate {
        eprintln!("duplicate: returning the existing job with this idempotency key");
    }
    Ok(ExitCode::SUCCESS)
}

impl ScheduleArgs {
    fn request(&self) -> Result<JobRequest, CliError> {
        let when = due(self.at, self.after)?;
        let app = self.app.as_deref().unwrap_or_default();
        let mut request = JobRequest::new(app, when)
            .priority(self.priority)
            .data(self.data()?);
        if let Some(key) = &self.key {
            request = request.key(key.clone());
        }
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        if let Some(key) = &self.idempotency_key {
            request = request.idempotency_key(key);
        }
        if self.replace {
            request = request.replace();
        }
        if let Some(time) = self.expire_after {
            request = request.expire_after(time.duration());
        }
        if let Some(id) = &self.request_id {
            request = request.request_id(id);
        }
        Ok(request)
    }

    fn data(&self) -> Result<Vec<u8>, CliError> {
        let unreadable =
            |name: &str, error| CliError::Usage(format!("--data-file: cannot read {name}: {error}"));
        match (&self.data, self.data_file.as_deref()) {
            (Some(text), _) => Ok(text.clone().into_bytes()),
            (None, Some("-")) => {
                let mut data = Vec::new();
                let read = std::io::stdin().read_to_end(&mut data);
                read.map(|_| data)
                    .map_err(|error| unreadable("standard input", error))
            }
            (None, Some(path)) => std::fs::read(path).map_err(|error| unreadable(path, error)),
            (None, None) => Ok(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_needs_a_name_and_may_have_any_value() {
        assert_eq!(header("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert_eq!(header("a="), Ok(("a".to_owned(), String::new())));
        assert!(header("a").is_err() && header("=b").is_err());
    }
}
