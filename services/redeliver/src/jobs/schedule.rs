//! `redeliver jobs schedule`.

use std::process::ExitCode;

use clap::{ArgGroup, Args};
use redeliver_client::{ClientError, JobRequest, Timestamp};
use redeliver_core::HumanDuration;
use serde_json::json;

use super::{SchedulerArgs, batch, due};
use crate::config::Config;
use crate::connection::CliError;
use crate::output::{OutputArgs, print_item};
use crate::record::RecordArgs;

#[derive(Args)]
#[command(group = ArgGroup::new("what").required(true).args(["at", "after", "file"]))]
pub(super) struct ScheduleArgs {
    /// Application, one of scheduler.apps
    #[arg(long, value_name = "NAME", required_unless_present = "file")]
    app: Option<String>,
    /// Due time, such as 2026-11-22T08:00:00Z or tomorrow
    #[arg(long, value_name = "TIME", value_parser = crate::times::future)]
    at: Option<Timestamp>,
    /// Delay from now, such as 90s
    #[arg(long = "in", value_name = "DURATION")]
    after: Option<HumanDuration>,
    /// File with one job per line, in the JSON of REST; - for standard input. Prints a result per line
    #[arg(long, value_name = "FILE", conflicts_with_all = ["app", "data", "data_file", "key", "headers", "priority",
        "idempotency_key", "replace", "expire_after", "request_id"])]
    pub(super) file: Option<String>,
    #[command(flatten)]
    record: RecordArgs,
    /// Idempotency key: repeated requests of the application with this key create one job
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// Replace a waiting job with the same idempotency key
    #[arg(long, requires = "idempotency_key")]
    replace: bool,
    /// Request id, stored with the job
    #[arg(long, value_name = "NAME")]
    request_id: Option<String>,
    #[command(flatten)]
    pub(super) output: OutputArgs,
    #[command(flatten)]
    pub(super) scheduler: SchedulerArgs,
}

pub(super) async fn run(config: &Config, args: &ScheduleArgs) -> Result<ExitCode, CliError> {
    if let Some(file) = &args.file {
        return batch::run(config, &args.scheduler, args.output.format, file).await;
    }
    let request = args.request()?;
    request.check().map_err(ClientError::from)?;
    let client = args
        .scheduler
        .connect_to_change(config, &super::ReasonArgs::default())
        .await?;
    let scheduled = client.schedule(&request).await?;
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
        let record = &self.record;
        let mut request = JobRequest::new(app, when)
            .priority(record.priority.unwrap_or_default())
            .data(record.data()?.unwrap_or_default());
        if let Some(key) = &record.key {
            request = request.key(key.clone());
        }
        for (name, value) in &record.headers {
            request = request.header(name, value);
        }
        if let Some(key) = &self.idempotency_key {
            request = request.idempotency_key(key);
        }
        if self.replace {
            request = request.replace();
        }
        if let Some(time) = record.expire_after {
            request = request.expire_after(time.duration());
        }
        if let Some(id) = &self.request_id {
            request = request.request_id(id);
        }
        Ok(request)
    }
}
