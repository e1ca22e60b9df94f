//! `redeliver waiting retry` and `dead` for records that wait with the scheduler, which acts on them itself.

use std::process::ExitCode;

use futures::{StreamExt as _, stream};
use redeliver_client::messages::{
    ListWaitingRequest, LongWaitAction, Outcome, WaitingActionState, WaitingRecord,
};
use redeliver_client::{Answer, ClientError, JobClient, JobId, WaitingClient};
use redeliver_core::error_chain::error_chain;
use serde_json::json;

use super::act::{ActArgs, Id};
use super::{warn, with_progress};
use crate::connection::{CliError, conclude};
use crate::dlq::{EXIT_INCOMPLETE, with_scheduler};
use crate::output::{Column, Format, Json, Text as _, print_items, print_json};
use crate::pages::read_pages;

/// How many calls are in progress.
const CALLS: usize = 32;

/// What became of a record.
struct Acted {
    job: JobId,
    state: WaitingActionState,
    problem: String,
}

impl Acted {
    fn of(job: JobId, answer: Result<Answer, ClientError>) -> Self {
        use WaitingActionState::{Dead, Gone, Retried, Unspecified};
        let (state, problem) = match answer.map(|answer| answer.outcome) {
            Ok(Outcome::Rescheduled) => (Retried, String::new()),
            Ok(Outcome::Dead) => (Dead, String::new()),
            Ok(Outcome::AlreadyDispatched) => (Gone, "it has left the scheduler before".to_owned()),
            Ok(Outcome::Expired) => (Gone, "it was a dead letter before".to_owned()),
            Ok(_) => (
                Gone,
                "the scheduler does not know it: it ended, or you may not act on it, or its command is not decided yet"
                    .to_owned(),
            ),
            Err(error) => (Unspecified, error_chain(&error)),
        };
        Self { job, state, problem }
    }

    fn json(&self) -> Json {
        json!({ "job_id": self.job.to_string(), "state": self.state.name(), "problem": self.problem })
    }
}

const ACTED: [Column<Acted>; 3] = [
    ("job", |acted, _| acted.job.to_string().text()),
    ("state", |acted, _| acted.state.name()),
    ("problem", |acted, _| acted.problem.short(80)),
];

pub(super) fn act(args: &ActArgs, action: LongWaitAction) -> ExitCode {
    let run = &args.run;
    if !run.request_id.is_empty() {
        let problem = "--request-id is only for records of tiers: the scheduler acts on a record once anyway";
        return conclude(async { Err(CliError::Usage(problem.to_owned())) });
    }
    with_scheduler(
        &run.inspector,
        args.scheduler.as_deref(),
        &run.reason,
        async |inspector, jobs| {
            let jobs_to_act_on = if args.matching {
                let client = WaitingClient::new(&inspector.connect().await?);
                match matching(&client, args).await? {
                    Some(found) => found,
                    None => return Ok(ExitCode::SUCCESS),
                }
            } else {
                named(&args.ids)?
            };
            let acted = act_on(&jobs, jobs_to_act_on, action).await?;
            match run.output.format {
                Format::Json => {
                    print_json(json!({ "acted": acted.iter().map(Acted::json).collect::<Vec<_>>() }));
                }
                format => print_items(format, &ACTED, &acted, Acted::json),
            }
            let is_done = |acted: &Acted| {
                matches!(
                    acted.state,
                    WaitingActionState::Retried | WaitingActionState::Dead
                )
            };
            Ok(match acted.iter().all(is_done) {
                true => ExitCode::SUCCESS,
                false => ExitCode::from(EXIT_INCOMPLETE),
            })
        },
    )
}

fn named(ids: &[Id]) -> Result<Vec<JobId>, CliError> {
    let jobs = ids.iter().map(|id| match id {
        Id::Job(job) => Ok(*job),
        Id::Position(_) => Err(CliError::Usage(
            "tiers and the scheduler act on their own records: name positions or job ids, not both"
                .to_owned(),
        )),
    });
    jobs.collect()
}

/// The long waits that match now. `None`: they were only counted.
async fn matching(client: &WaitingClient, args: &ActArgs) -> Result<Option<Vec<JobId>>, CliError> {
    let limit = if args.yes { args.limit } else { 1 };
    let (mut matching, mut coverage) = (0, None);
    let value = |record: &WaitingRecord| json!(record.job_id);
    let pages = read_pages(limit, Format::Table, value, async |limit, page_token| {
        let request = ListWaitingRequest {
            filter: args.filter.filter(),
            limit,
            page_token,
            ..ListWaitingRequest::default()
        };
        let page = with_progress(async |progress| client.list(request, progress).await).await?;
        (matching, coverage) = (page.matching, page.coverage);
        Ok((page.records, page.next_page_token))
    });
    let found = pages.await?.items;
    warn(coverage.unwrap_or_default());
    if !args.yes {
        eprintln!(
            "{} of {matching} records that match; repeat the command with --yes to act on them",
            matching.min(args.limit.into())
        );
        return Ok(None);
    }
    let jobs = found.iter().map(|record| {
        let invalid = |_| ClientError::InvalidResponse("job_id");
        record.job_id.parse().map_err(invalid)
    });
    Ok(Some(jobs.collect::<Result<_, ClientError>>()?))
}

async fn act_on(
    client: &JobClient,
    jobs: Vec<JobId>,
    action: LongWaitAction,
) -> Result<Vec<Acted>, CliError> {
    if let [job] = jobs[..] {
        let answer = client.act_on_long_wait(job, action).await?;
        return Ok(vec![Acted::of(job, Ok(answer))]);
    }
    let acted = jobs
        .into_iter()
        .map(async |job| Acted::of(job, client.act_on_long_wait(job, action).await));
    Ok(stream::iter(acted).buffered(CALLS).collect().await)
}
