//! `redeliver jobs ls --api`: reads the pages of the scheduler's list.

use std::process::ExitCode;

use redeliver_client::{JobClient, JobState, ListJobs};
use redeliver_runtime::Config;

use super::{ListArgs, Row, print_rows};
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
    let mut request = ListJobs {
        app: args.app.clone(),
        due_from: args.from,
        due_until: args.until,
        ..ListJobs::default()
    };
    let format = args.output.format;
    let (mut rows, mut count) = (Vec::new(), 0);
    let has_more = loop {
        let missing = args.limit.saturating_sub(count);
        request.page_size = u16::try_from(missing.min(PAGE)).unwrap_or(u16::MAX);
        let page = client.list(&request).await?;
        count = count.saturating_add(u32::try_from(page.jobs.len()).unwrap_or(u32::MAX));
        rows.extend(page.jobs.into_iter().map(Row::of_job));
        // A line needs no other lines, so a list of any length needs little memory.
        if format == Format::Jsonl {
            print_rows(format, &rows);
            rows.clear();
        }
        match page.next_page_token {
            None => break false,
            Some(_) if count >= args.limit => break true,
            Some(token) => request.page_token = token,
        }
    };
    if format != Format::Jsonl {
        print_rows(format, &rows);
    }
    if has_more {
        eprintln!("showing the first {count} jobs; use --limit to show more");
    }
    Ok(ExitCode::SUCCESS)
}
