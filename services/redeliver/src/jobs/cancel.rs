//! `redeliver jobs cancel`: one job, or all that an application has.

use std::cell::Cell;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use futures::{StreamExt as _, stream};
use redeliver_client::messages::{ListJobsRequest, Outcome};
use redeliver_client::{Answer, ClientError, JobClient, JobId};
use redeliver_core::error_chain::error_chain;
use redeliver_runtime::cli::EXIT_FAILURE;
use serde_json::json;
use tokio::time::Instant;

use super::{ChangeArgs, ChangedJob, print_answer};
use crate::config::Config;
use crate::connection::CliError;
use crate::output::Format;
use crate::pages::read_pages;

/// How many calls are in progress.
const CALLS: usize = 32;
/// For how long a job is cancelled again that the scheduler refuses to cancel for now.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Args)]
pub(super) struct CancelArgs {
    #[command(flatten)]
    pub(super) change: ChangeArgs,
    /// Cancel all jobs of --app that wait now; needs --yes, or only counts them
    #[arg(long, requires = "app", conflicts_with_all = ["id", "idempotency_key"])]
    all: bool,
    /// With --all: do it
    #[arg(long, requires = "all")]
    yes: bool,
}

pub(super) async fn run(config: &Config, args: &CancelArgs) -> Result<ExitCode, CliError> {
    let change = &args.change;
    let connect = change.scheduler.connect_to_change(config, &change.reason);
    // An empty name would select the jobs of all applications.
    let all_of = change
        .job
        .app
        .as_deref()
        .filter(|app| args.all && !app.is_empty());
    let is_whole = match all_of {
        Some(app) => all(&connect.await?, app, args).await?,
        None => {
            let job = change.job.named()?;
            let answer = job.cancel(&connect.await?).await?;
            print_answer(&job, change.output.format, &answer);
            is_cancelled(&answer)
        }
    };
    Ok(ExitCode::from(if is_whole { 0 } else { EXIT_FAILURE }))
}

/// Whether the job is never dispatched. A repeated request succeeds as well: the response to the first one may have been lost.
fn is_cancelled(answer: &Answer) -> bool {
    matches!(
        answer.outcome,
        Outcome::Cancelled | Outcome::AlreadyCancelled | Outcome::Expired
    )
}

/// Cancels the jobs of an application that wait now, the first ones first. Returns whether none of them was dispatched before.
async fn all(client: &JobClient, app: &str, args: &CancelArgs) -> Result<bool, CliError> {
    let jobs = waiting(client, app).await?;
    if !args.yes {
        let count = jobs.len();
        eprintln!("{count} jobs of {app} wait; repeat the command with --yes to cancel them");
        return Ok(true);
    }
    let has_failed = Cell::new(false);
    // After a failure, no call begins, and those in progress are waited for.
    let begun = jobs.iter().take_while(|_| !has_failed.get());
    let calls = begun.map(|id| async move { (*id, cancel(client, *id).await) });
    let mut answers = stream::iter(calls).buffered(CALLS);
    let (mut cancelled, mut failure) = (0, None);
    while let Some((id, answer)) = answers.next().await {
        match answer {
            Ok(answer) => {
                print_answer(&ChangedJob::Id(id), args.change.output.format, &answer);
                cancelled += usize::from(is_cancelled(&answer));
            }
            Err(error) => {
                has_failed.set(true);
                eprintln!("job {id}: {}", error_chain(&error));
                failure.get_or_insert(error);
            }
        }
    }
    eprintln!("{cancelled} of {} jobs cancelled", jobs.len());
    failure.map_or(Ok(cancelled == jobs.len()), |error| Err(error.into()))
}

/// The jobs of an application that wait, by due time. Long waits of a pipeline with its name are not among them.
async fn waiting(client: &JobClient, app: &str) -> Result<Vec<JobId>, CliError> {
    let value = |id: &JobId| json!(id.to_string());
    let pages = read_pages(u32::MAX, Format::Table, value, async |page_size, page_token| {
        let request = ListJobsRequest {
            app: app.to_owned(),
            page_size,
            page_token,
            ..ListJobsRequest::default()
        };
        let page = client.list(request).await?;
        let jobs = page.jobs.iter().filter(|job| !job.long_wait);
        let ids = jobs.map(|job| {
            let id = job.id.parse::<JobId>();
            id.map_err(|_| ClientError::InvalidResponse("id"))
        });
        Ok((ids.collect::<Result<Vec<_>, _>>()?, page.next_page_token))
    });
    Ok(pages.await?.items)
}

async fn cancel(client: &JobClient, id: JobId) -> Result<Answer, ClientError> {
    let until = Instant::now() + PATIENCE;
    loop {
        let answer = client.cancel(id).await;
        let pause = answer.as_ref().err().and_then(ClientError::retry_after);
        match pause {
            Some(pause) if Instant::now() + pause < until => tokio::time::sleep(pause).await,
            _ => return answer,
        }
    }
}
