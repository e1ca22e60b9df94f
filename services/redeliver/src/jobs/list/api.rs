//! `redeliver jobs ls --api`: reads the pages of the scheduler's list.

use std::process::ExitCode;

use redeliver_client::JobClient;
use redeliver_client::convert::to_timestamp;
use redeliver_client::messages::ListJobsRequest;
use redeliver_core::job::JobState;

use super::{ListArgs, as_json, print_jobs};
use crate::config::Config;
use crate::connection::{CliError, scheduler};
use crate::pages::read_pages;

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
    let format = args.output.format;
    let pages = read_pages(args.limit, format, as_json, async |page_size, page_token| {
        let request = ListJobsRequest {
            app: args.app.clone().unwrap_or_default(),
            due_from: args.from.map(to_timestamp),
            due_until: args.until.map(to_timestamp),
            page_size,
            page_token,
            ..ListJobsRequest::default()
        };
        let page = client.list(request).await?;
        Ok((page.jobs, page.next_page_token))
    });
    let pages = pages.await?;
    print_jobs(format, &pages.items);
    if pages.has_more {
        eprintln!("showing the first {} jobs; use --limit to show more", pages.count);
    }
    Ok(ExitCode::SUCCESS)
}
