//! `redeliver waiting show`, `retry`, `dead`, `edit` and `actions`: single records that wait. See `long` for actions on those of the scheduler.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use redeliver_client::messages::{
    ActOnWaitingRecordsRequest, Position, WaitingActed, WaitingAction, WaitingActionState, WaitingActions,
};
use redeliver_client::{JobId, WaitingClient};
use redeliver_core::HumanDuration;
use redeliver_dlq_inspector::id::parse_id;
use serde_json::json;

use super::FilterArgs;
use crate::connection::{CONNECTION, CliError};
use crate::dlq::{ContentArgs, EXIT_INCOMPLETE, InspectorArgs, as_json, as_text, seen};
use crate::output::{
    Column, Format, Json, OutputArgs, Text as _, object, print_item, print_items, print_json,
};

const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// How a command names a record.
#[derive(Clone, Debug)]
pub(super) enum Id {
    /// By its position in the topic of a tier.
    Position(Position),
    /// By its job in the scheduler.
    Job(JobId),
}

fn id(text: &str) -> Result<Id, String> {
    match text.parse() {
        Ok(job) => Ok(Id::Job(job)),
        Err(_) => position(text).map(Id::Position),
    }
}

fn position(text: &str) -> Result<Position, String> {
    let position = parse_id(text).map_err(|error| error.to_string())?;
    Ok((&position).into())
}

/// A record to edit.
fn editable(text: &str) -> Result<Position, String> {
    match id(text)? {
        Id::Position(position) => Ok(position),
        Id::Job(_) => Err(
            "the scheduler does not edit; move the record to the dead letters (waiting dead), and edit it there (dlq edit)"
                .to_owned(),
        ),
    }
}

#[derive(Args)]
pub(super) struct ShowArgs {
    /// Position in the topic of a tier, topic/partition/offset, or job id of a record in the scheduler
    #[arg(value_name = "ID", value_parser = id)]
    id: Id,
    /// Why the payload is read, for the audit log
    #[arg(long, value_name = "TEXT")]
    pub(super) reason: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    pub(super) inspector: InspectorArgs,
}

#[derive(Args)]
pub(super) struct ActArgs {
    /// Positions in topics of tiers, topic/partition/offset, or job ids of records in the scheduler
    #[arg(value_name = "ID", value_parser = id)]
    pub(super) ids: Vec<Id>,
    #[command(flatten)]
    pub(super) filter: FilterArgs,
    /// Instead of IDs: act on the records in tiers (or --place scheduler) that match the other options now; needs --yes, or only counts them
    #[arg(long, conflicts_with = "ids", required_unless_present = "ids")]
    pub(super) matching: bool,
    /// With --matching: at most this many, those that are due first
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) limit: u32,
    /// With --matching: do it
    #[arg(long)]
    pub(super) yes: bool,
    /// URL of the scheduler, for its records; overrides REDELIVER_SCHEDULER (default: scheduler.listen)
    #[arg(long, value_name = "URL", env = "REDELIVER_SCHEDULER", hide_env = true, help_heading = CONNECTION)]
    pub(super) scheduler: Option<String>,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

#[derive(Args)]
pub(super) struct EditArgs {
    /// Position in the topic of a tier: topic/partition/offset
    #[arg(value_name = "ID", value_parser = editable)]
    id: Position,
    #[command(flatten)]
    contents: ContentArgs,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Args)]
pub(super) struct RunArgs {
    /// Reason for the audit log and the dead letter, at most 1000 bytes
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(super) reason: String,
    /// Idempotency key for tiers: 1 to 100 letters, digits, - and _; a repeated command with the same text acts once
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(super) request_id: String,
    /// How long to wait for tiers; the scheduler answers at once
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    wait: HumanDuration,
    #[command(flatten)]
    pub(super) output: OutputArgs,
    #[command(flatten)]
    pub(super) inspector: InspectorArgs,
}

impl ActArgs {
    /// Whether it is about records of the scheduler.
    pub(super) fn is_about_scheduler(&self) -> bool {
        let is_job = |id: &Id| matches!(id, Id::Job(_));
        self.ids.iter().any(is_job) || (self.matching && self.filter.place == "scheduler")
    }

    pub(super) fn inspector(&self) -> &InspectorArgs {
        &self.run.inspector
    }
}

impl EditArgs {
    pub(super) fn inspector(&self) -> &InspectorArgs {
        &self.run.inspector
    }
}

#[derive(Args)]
pub(super) struct ActionsArgs {
    /// The id of a request, which the commands that act print
    #[arg(value_name = "REQUEST")]
    id: String,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    pub(super) inspector: InspectorArgs,
}

pub(super) async fn show(client: &WaitingClient, args: &ShowArgs) -> Result<ExitCode, CliError> {
    let found = match &args.id {
        Id::Position(position) => client.record(position.clone()).await?,
        Id::Job(job) => client.long_wait(*job).await?,
    };
    let (record, contents) = (
        found.record.unwrap_or_default(),
        found.contents.unwrap_or_default(),
    );
    let as_value = || json!({ "record": object(&record), "contents": as_json(&contents) });
    print_item(args.output.format, || as_text(&contents), as_value);
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn act(
    client: &WaitingClient,
    args: &ActArgs,
    action: WaitingAction,
) -> Result<ExitCode, CliError> {
    let positions = args.ids.iter().filter_map(|id| match id {
        Id::Position(position) => Some(position.clone()),
        // See `is_about_scheduler`.
        Id::Job(_) => None,
    });
    let request = ActOnWaitingRecordsRequest {
        positions: positions.collect(),
        filter: args.filter.filter().filter(|_| args.matching),
        max_records: args.limit,
        action: action.into(),
        ..ActOnWaitingRecordsRequest::default()
    };
    if args.matching && !args.yes {
        let request = args.run.request(request, true);
        let counted = client.act(request).await?;
        eprintln!(
            "{} of {} records that match; repeat the command with --yes to act on them",
            counted.records, counted.matching
        );
        return Ok(ExitCode::SUCCESS);
    }
    args.run.run(client, request).await
}

pub(super) async fn edit(client: &WaitingClient, args: &EditArgs) -> Result<ExitCode, CliError> {
    let edit = args.contents.edit()?;
    let run = &args.run;
    let found = match client.record_to_edit(args.id.clone(), &run.request_id).await? {
        Ok(found) => found,
        Err(edited) => return run.wait(client, edited).await,
    };
    let request = ActOnWaitingRecordsRequest {
        positions: vec![args.id.clone()],
        action: WaitingAction::Edit.into(),
        edit: Some(edit),
        content_hash: seen(&found.contents.unwrap_or_default())?,
        ..ActOnWaitingRecordsRequest::default()
    };
    run.run(client, request).await
}

pub(super) async fn actions(client: &WaitingClient, args: &ActionsArgs) -> Result<ExitCode, CliError> {
    let actions = client.actions(&args.id).await?;
    print(args.output.format, &actions);
    Ok(exit_code(&actions))
}

impl RunArgs {
    fn request(&self, request: ActOnWaitingRecordsRequest, dry_run: bool) -> ActOnWaitingRecordsRequest {
        let request_id = match self.request_id.as_str() {
            "" => format!("{:032x}", fastrand::u128(..)),
            id => id.to_owned(),
        };
        ActOnWaitingRecordsRequest {
            reason: self.reason.clone(),
            request_id,
            dry_run,
            ..request
        }
    }

    async fn run(
        &self,
        client: &WaitingClient,
        request: ActOnWaitingRecordsRequest,
    ) -> Result<ExitCode, CliError> {
        let request = self.request(request, false);
        let actions = client.act(request).await?;
        self.wait(client, actions).await
    }

    /// Waits for the tiers, and prints what they have done.
    async fn wait(&self, client: &WaitingClient, mut actions: WaitingActions) -> Result<ExitCode, CliError> {
        let began = tokio::time::Instant::now();
        while actions.pending > 0 && began.elapsed() < self.wait.duration() {
            tokio::time::sleep(POLL_INTERVAL).await;
            actions = client.actions(&actions.request_id).await?;
        }
        print(self.output.format, &actions);
        if actions.pending > 0 {
            let WaitingActions {
                pending, request_id, ..
            } = &actions;
            eprintln!(
                "{pending} records are pending; look at them with `redeliver waiting actions {request_id}`"
            );
        }
        Ok(exit_code(&actions))
    }
}

fn print(format: Format, actions: &WaitingActions) {
    match format {
        Format::Json => print_json(Json::from(object(actions))),
        format => print_items(format, &ACTED, &actions.acted, |acted| object(acted).into()),
    }
}

/// Whether each record has the outcome that was asked for.
fn exit_code(actions: &WaitingActions) -> ExitCode {
    use WaitingActionState::{Dead, Edited, Retried};
    let is_done = |acted: &WaitingActed| matches!(acted.state(), Retried | Dead | Edited);
    match actions.acted.iter().all(is_done) {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_INCOMPLETE),
    }
}

const ACTED: [Column<WaitingActed>; 4] = [
    ("position", |acted, _| acted.position.text()),
    ("state", |acted, _| acted.state().name()),
    ("written", |acted, _| acted.written.text()),
    ("problem", |acted, _| acted.problem.short(80)),
];
