//! `redeliver schedules`: recurring schedules.

mod definition;
mod preview;
mod show;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use redeliver_client::messages::{
    CreateScheduleRequest, ListSchedulesRequest, PauseScheduleRequest, ResumeScheduleRequest, Schedule,
    ScheduleSpec, ScheduleState, UpdateScheduleRequest,
};
use redeliver_client::{ClientError, Code, ScheduleClient};
use redeliver_proto::error::reasons;
use serde_json::json;

use self::definition::{ChangesArgs, DefinitionArgs, read_definition};
use self::show::{COLUMNS, as_json, as_text, definition_json};
use crate::config::Config;
use crate::connection::{CliError, conclude, connect_to_change, scheduler};
use crate::jobs::{ReasonArgs, SchedulerArgs};
use crate::output::{Format, OutputArgs, print_item, print_items};
use crate::pages::read_pages;

#[derive(Args)]
pub(crate) struct SchedulesArgs {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    scheduler: SchedulerArgs,
}

#[derive(Subcommand)]
enum Verb {
    /// Create a schedule
    #[command(
        after_help = "Examples:\n  redeliver schedules create nightly --app sms --cron '30 2 * * *' --zone Europe/Berlin\n  redeliver schedules create ping --app sms --every 5m --data ping\n\nExit status: 1 if another schedule has the id"
    )]
    Create(Box<CreateArgs>),
    /// Change parts of a schedule
    #[command(
        after_help = "Examples:\n  redeliver schedules set nightly --zone Europe/London\n  redeliver schedules set nightly --header tenant=a --remove-header debug"
    )]
    Set(Box<SetArgs>),
    /// Replace the definition of a schedule
    #[command(
        after_help = "Examples:\n  redeliver schedules get nightly -o json > nightly.json\n  redeliver schedules update --file nightly.json"
    )]
    Update(Box<UpdateArgs>),
    /// List schedules by their next occurrence
    Ls(ListArgs),
    /// Show one schedule
    Get(IdArgs),
    /// Pause a schedule
    Pause(ChangeArgs),
    /// Resume a paused schedule
    Resume(ResumeArgs),
    /// Create an additional job now
    Trigger(ChangeArgs),
    /// Show the next occurrences of a definition or a schedule
    #[command(
        after_help = "Examples:\n  redeliver schedules preview --cron '30 2 * * *' --zone Europe/Berlin --count 3\n  redeliver schedules preview --id nightly"
    )]
    Preview(Box<preview::PreviewArgs>),
    /// Delete a schedule, but not the jobs that it has created
    Delete(ChangeArgs),
}

#[derive(Args)]
struct IdArgs {
    /// Schedule id
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
struct ChangeArgs {
    #[command(flatten)]
    reason: ReasonArgs,
    #[command(flatten)]
    schedule: IdArgs,
}

#[derive(Args)]
struct CreateArgs {
    /// Schedule id: 1 to 128 of the characters a-z, A-Z, 0-9, `.`, `_` and `-` (default: `id` of --file)
    #[arg(value_name = "ID", required_unless_present = "file")]
    id: Option<String>,
    #[command(flatten)]
    definition: DefinitionArgs,
    #[command(flatten)]
    reason: ReasonArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
struct SetArgs {
    #[command(flatten)]
    changes: ChangesArgs,
    #[command(flatten)]
    reason: ReasonArgs,
    #[command(flatten)]
    schedule: IdArgs,
}

#[derive(Args)]
struct UpdateArgs {
    /// Schedule id (default: `id` of --file)
    #[arg(value_name = "ID")]
    id: Option<String>,
    /// File with the definition, in the JSON of REST and of `get -o json`; - for standard input
    #[arg(long, value_name = "FILE")]
    file: String,
    /// Fail unless this is the current revision (default: `revision` of --file)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    expected_revision: Option<u32>,
    #[command(flatten)]
    reason: ReasonArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
struct ListArgs {
    /// List only schedules of this application
    #[arg(long, value_name = "NAME")]
    app: Option<String>,
    /// Maximum number of schedules
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
struct ResumeArgs {
    /// Apply the misfire policy to the occurrences of the pause, instead of skipping them
    #[arg(long)]
    catch_up: bool,
    #[command(flatten)]
    change: ChangeArgs,
}

pub(crate) fn main(args: &SchedulesArgs) -> ExitCode {
    let config: Config = match args.scheduler.common.configure(|_| Ok(())) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let scheduler = Scheduler {
        config: &config,
        args: &args.scheduler,
    };
    conclude(async {
        match &args.verb {
            Verb::Create(args) => create(scheduler, args).await,
            Verb::Set(args) => set(scheduler, args).await,
            Verb::Update(args) => update(scheduler, args).await,
            Verb::Ls(args) => list(scheduler, args).await,
            Verb::Get(args) => get(scheduler, args).await,
            Verb::Pause(args) => pause(scheduler, args).await,
            Verb::Resume(args) => resume(scheduler, args).await,
            Verb::Trigger(args) => trigger(scheduler, args).await,
            Verb::Preview(args) => preview::run(scheduler, args).await,
            Verb::Delete(args) => delete(scheduler, args).await,
        }
    })
}

/// The scheduler, and the configuration.
#[derive(Clone, Copy)]
struct Scheduler<'a> {
    config: &'a Config,
    args: &'a SchedulerArgs,
}

impl Scheduler<'_> {
    async fn connect(self) -> Result<ScheduleClient, CliError> {
        let service = scheduler(self.config);
        let connected = ScheduleClient::connect(&self.args.endpoint(&service)?).await;
        connected.map_err(|error| service.failure(error))
    }

    async fn connect_to_change(self, reason: &ReasonArgs) -> Result<ScheduleClient, CliError> {
        let service = scheduler(self.config);
        let endpoint = reason.add_to(self.args.endpoint(&service)?);
        let connection = connect_to_change(&endpoint, &service).await?;
        Ok(ScheduleClient::new(&connection))
    }
}

/// The id of a schedule, as an argument or in its file.
fn named<'a>(argument: Option<&'a str>, of_file: Option<&'a str>) -> Result<&'a str, CliError> {
    match (argument, of_file) {
        (Some(id), Some(of_file)) if id != of_file => Err(CliError::Usage(format!(
            "the id is `{id}`, but `id` in --file is `{of_file}`"
        ))),
        (Some(id), _) | (None, Some(id)) => Ok(id),
        (None, None) => Err(CliError::Usage(
            "the id is missing; write it as an argument, or as `id` in --file".to_owned(),
        )),
    }
}

fn not_found(id: &str) -> CliError {
    CliError::failed(format_args!("schedule {id} not found"))
}

/// Says which schedule is unknown in the same words for all commands.
fn failure(id: &str, error: ClientError) -> CliError {
    let is_unknown = matches!(&error, ClientError::Refused { code: Code::NotFound, reason, .. }
        if reason.as_deref() == Some(reasons::SCHEDULE_UNKNOWN));
    if is_unknown { not_found(id) } else { error.into() }
}

fn print_schedule(format: Format, schedule: &Schedule) {
    print_item(format, || as_text(schedule), || as_json(schedule));
}

async fn create(scheduler: Scheduler<'_>, args: &CreateArgs) -> Result<ExitCode, CliError> {
    let definition = args.definition.read(scheduler.config)?;
    definition.check_state(ScheduleState::Active)?;
    let id = named(args.id.as_deref(), definition.id.as_deref())?;
    let client = scheduler.connect_to_change(&args.reason).await?;
    let request = CreateScheduleRequest {
        id: id.to_owned(),
        spec: Some(definition.spec),
    };
    let schedule = client.create(request).await?;
    print_schedule(args.output.format, &schedule);
    Ok(ExitCode::SUCCESS)
}

async fn set(scheduler: Scheduler<'_>, args: &SetArgs) -> Result<ExitCode, CliError> {
    let IdArgs { id, output } = &args.schedule;
    let client = scheduler.connect_to_change(&args.reason).await?;
    let known = client.get(id).await?.ok_or_else(|| not_found(id))?;
    let mut spec = known.spec.unwrap_or_default();
    args.changes
        .apply(&mut spec, &definition::default_zone(scheduler.config)?)?;
    // A concurrent change would be lost otherwise.
    let schedule = change(&client, id, spec, Some(known.revision)).await?;
    print_schedule(output.format, &schedule);
    Ok(ExitCode::SUCCESS)
}

async fn change(
    client: &ScheduleClient,
    id: &str,
    spec: ScheduleSpec,
    expected_revision: Option<u32>,
) -> Result<Schedule, CliError> {
    let request = UpdateScheduleRequest {
        id: id.to_owned(),
        spec: Some(spec),
        expected_revision,
    };
    let changed = client.update(request).await;
    changed.map_err(|error| failure(id, error))
}

async fn update(scheduler: Scheduler<'_>, args: &UpdateArgs) -> Result<ExitCode, CliError> {
    let definition = read_definition(scheduler.config, &args.file)?;
    let id = named(args.id.as_deref(), definition.id.as_deref())?;
    let client = scheduler.connect_to_change(&args.reason).await?;
    let mut expected = args.expected_revision.or(definition.revision);
    if definition.state.is_some()
        && let Some(known) = client.get(id).await?
    {
        definition.check_state(known.state())?;
        // A pause or a resumption meanwhile would increase it.
        expected = expected.or(Some(known.revision));
    }
    let schedule = change(&client, id, definition.spec, expected).await?;
    print_schedule(args.output.format, &schedule);
    Ok(ExitCode::SUCCESS)
}

async fn list(scheduler: Scheduler<'_>, args: &ListArgs) -> Result<ExitCode, CliError> {
    let client = scheduler.connect().await?;
    let (format, mut unreadable) = (args.output.format, Vec::new());
    let pages = read_pages(args.limit, format, as_json, async |page_size, page_token| {
        let request = ListSchedulesRequest {
            app: args.app.clone().unwrap_or_default(),
            page_size: page_size.unsigned_abs(),
            page_token,
        };
        let page = client.list(request).await?;
        unreadable.extend(page.unreadable);
        Ok((page.schedules, page.next_page_token))
    });
    let pages = pages.await?;
    print_items(format, &COLUMNS, &pages.items, as_json);
    for schedule in unreadable {
        let id = match &*schedule.id {
            "" => "with an unknown id",
            id => id,
        };
        eprintln!(
            "the scheduler cannot read the schedule {id} of shard {}: {}",
            schedule.shard, schedule.problem
        );
    }
    if pages.has_more {
        eprintln!(
            "showing the first {} schedules; use --limit to show more",
            pages.count
        );
    }
    Ok(ExitCode::SUCCESS)
}

async fn get(scheduler: Scheduler<'_>, args: &IdArgs) -> Result<ExitCode, CliError> {
    let client = scheduler.connect().await?;
    let schedule = client.get(&args.id).await?.ok_or_else(|| not_found(&args.id))?;
    print_item(
        args.output.format,
        || as_text(&schedule),
        || definition_json(&schedule),
    );
    Ok(ExitCode::SUCCESS)
}

async fn pause(scheduler: Scheduler<'_>, args: &ChangeArgs) -> Result<ExitCode, CliError> {
    let client = scheduler.connect_to_change(&args.reason).await?;
    let request = PauseScheduleRequest {
        id: args.schedule.id.clone(),
    };
    let paused = client.pause(request).await;
    let schedule = paused.map_err(|error| failure(&args.schedule.id, error))?;
    print_schedule(args.schedule.output.format, &schedule);
    Ok(ExitCode::SUCCESS)
}

async fn resume(scheduler: Scheduler<'_>, args: &ResumeArgs) -> Result<ExitCode, CliError> {
    let IdArgs { id, output } = &args.change.schedule;
    let client = scheduler.connect_to_change(&args.change.reason).await?;
    let request = ResumeScheduleRequest {
        id: id.clone(),
        catch_up: args.catch_up,
    };
    let resumed = client.resume(request).await;
    let resumed = resumed.map_err(|error| failure(id, error))?;
    let schedule = resumed.schedule.ok_or(ClientError::InvalidResponse("schedule"))?;
    print_item(
        output.format,
        || format!("{}\n{}", as_text(&schedule), skipped(resumed.skipped)),
        || json!({ "schedule": as_json(&schedule), "skipped": resumed.skipped }),
    );
    Ok(ExitCode::SUCCESS)
}

fn skipped(count: u64) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("skipped {count} occurrence{plural} of the pause")
}

async fn trigger(scheduler: Scheduler<'_>, args: &ChangeArgs) -> Result<ExitCode, CliError> {
    let client = scheduler.connect_to_change(&args.reason).await?;
    let triggered = client.trigger(&args.schedule.id).await;
    let job = triggered.map_err(|error| failure(&args.schedule.id, error))?;
    print_item(
        args.schedule.output.format,
        || job.to_string(),
        || json!({ "jobId": job.to_string() }),
    );
    Ok(ExitCode::SUCCESS)
}

async fn delete(scheduler: Scheduler<'_>, args: &ChangeArgs) -> Result<ExitCode, CliError> {
    let client = scheduler.connect_to_change(&args.reason).await?;
    if !client.delete(&args.schedule.id).await? {
        return Err(not_found(&args.schedule.id));
    }
    print_item(
        args.schedule.output.format,
        || format!("schedule {} deleted", args.schedule.id),
        || json!({ "id": args.schedule.id, "deleted": true }),
    );
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_skipped_occurrence_is_not_several() {
        assert_eq!(skipped(0), "skipped 0 occurrences of the pause");
        assert_eq!(skipped(1), "skipped 1 occurrence of the pause");
    }
}
