//! `redeliver jobs ls --api`: reads the pages of the scheduler's list.

use std::process::ExitCode;

use redeliver_client::JobClient;
use redeliver_client::convert::to_timestamp;
use redeliver_client::messages::ListJobsRequest;
use redeliver_core::job::JobState;
use redeliver_runtime::Config;

use super::{ListArgs, print_jobs};
use crate::connection::{CliError, scheduler};
use crate::output::Format;

/// The scheduler's limit.
const PAGE: u32 = 1_000;

pub(super) async fn run(config: &Config, args: &ListArgs) -> Result<ExitCode, CliError> {
    if let Some(state) = args.state.filter(|state| *state != JobState::Scheduled) {
        let problem =
            format!("--state {state} cannot be used with --api: the scheduler lists only waiting jobs");
        return Err(CliError::Usage(problem));
    }
    let service = scheduler(config);
    let of_environment = || std::env::var("REDELIVER_SCHEDULER").ok();
    let server = args.server.clone().or_else(of_environment);
    let endpoint = args
        .credentials
        .endpoint(server.as_deref(), &service, args.timeout.duration())?;
    let connected = JobClient::connect(&endpoint).await;
    let client = connected.map_err(|error| service.failure(error))?;
    let mut request = ListJobsRequest {
        app: args.app.clone().unwrap_or_default(),
        due_from: args.from.map(to_timestamp),
        due_until: args.until.map(to_timestamp),
        ..ListJobsRequest::default()
    };
    let format = args.output.format;
    let (mut jobs, mut count) = (Vec::new(), 0);
    let has_more = loop {
        let missing = args.limit.saturating_sub(count);
        request.page_size = i32::try_from(missing.min(PAGE)).unwrap_or(i32::MAX);
        let page = client.list(request.clone()).await?;
        count = count.saturating_add(u32::try_from(page.jobs.len()).unwrap_or(u32::MAX));
        jobs.extend(page.jobs);
        // A line needs no other lines, so a list of any length needs little memory.
        if format == Format::Jsonl {
            print_jobs(format, &jobs);
            jobs.clear();
        }
        request.page_token = page.next_page_token;
        if request.page_token.is_empty() {
            break false;
        }
        if count >= args.limit {
            break true;
        }
    };
    if format != Format::Jsonl {
        print_jobs(format, &jobs);
    }
    if has_more {
        eprintln!("showing the first {count} jobs; use --limit to show more");
    }
    Ok(ExitCode::SUCCESS)
}
