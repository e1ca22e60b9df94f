//! `redeliver dlq redrive`, `discard`, `restore` and `redrives`: jobs that change dead letters.

use std::io::{BufRead as _, IsTerminal as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use redeliver_client::convert::{time as time_of, to_duration, to_timestamp};
use redeliver_client::messages::{
    ChangeRedriveRequest, GetRedriveRequest, HeaderValue, ListRedriveItemsRequest, ListRedrivesRequest,
    PlanRedriveRequest, Redrive, RedriveCount, RedriveItem, RedriveKind, RedriveOutcome, RedriveSample,
    RedriveState, SetRedriveRateRequest,
};
use redeliver_client::{ClientError, RedriveClient, Timestamp};
use redeliver_core::error_chain::error_chain;
use redeliver_core::{Clock as _, HumanDuration, SystemClock};

use super::RangeArgs;
use super::completeness::EXIT_INCOMPLETE;
use super::outage::Outage;
use super::show::WITHHELD;
use crate::connection::CliError;
use crate::output::{
    Column, Format, Json, OutputArgs, Text as _, fields, in_one_line, line, object, print_item, print_items,
    table,
};
use crate::pages::read_pages;
use crate::progress::Progress;
use crate::times::future;

/// The time between two requests for a job.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long to wait for an inspector that went away. The job goes on without it, or with another one.
const MAX_OUTAGE: Duration = Duration::from_secs(600);

#[derive(Args)]
#[group(id = "selection", required = true, multiple = false)]
struct SelectionArgs {
    /// Dead letters that match, such as 'pipeline = "greetings" AND error_code = "http.503"'
    #[arg(long, value_name = "FILTER", group = "selection", value_parser = not_blank)]
    filter: Option<String>,
    /// All dead letters
    #[arg(long, group = "selection")]
    all: bool,
    /// Dead letters with these ids, at most 10000; can be repeated
    #[arg(long = "id", value_name = "ID", group = "selection", num_args = 1..)]
    ids: Vec<String>,
    /// Dead letters of a group of `redeliver dlq groups`
    #[arg(long, value_name = "GROUP", group = "selection")]
    group: Option<String>,
    /// Dead letters that another job has not done
    #[arg(long, value_name = "ID", group = "selection")]
    retry_of: Option<String>,
}

#[derive(Args)]
struct JobArgs {
    #[command(flatten)]
    selection: SelectionArgs,
    #[command(flatten)]
    range: RangeArgs,
    #[command(flatten)]
    rate: RateLimit,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Args)]
pub(super) struct RateLimit {
    /// Dead letters per second (default: as fast as possible)
    #[arg(
        long = "rate",
        value_name = "N",
        default_value_t = 0,
        hide_default_value = true
    )]
    pub(super) per_second: u32,
}

/// How a job is planned and started.
#[derive(Args)]
pub(super) struct RunArgs {
    /// Reason for the audit log, at most 1000 bytes
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(super) reason: String,
    /// Idempotency key: a repeated command with the same text continues with the same job. Times must not be relative
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(super) request_id: String,
    /// Only plan; `redeliver dlq redrives start` starts the job
    #[arg(long, conflicts_with_all = ["yes", "no_wait"])]
    plan: bool,
    /// Do not ask for confirmation; required if stdin is not a terminal
    #[arg(long)]
    yes: bool,
    /// Do not wait for the end of the job
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// Where records are written, and which.
#[derive(Args)]
pub(super) struct TargetArgs {
    /// Topic of the pipeline or of dlq_inspector.redrive.destinations (default: the return topic, or the original topic)
    #[arg(long, value_name = "TOPIC", default_value = "", hide_default_value = true)]
    pub(super) destination: String,
    /// Include records that came back dlq_inspector.redrive.max_count times
    #[arg(long)]
    pub(super) force: bool,
    /// Time to wait for returned records after each batch (default: the sum of the pipeline's retry delays, plus 30s)
    #[arg(long, value_name = "DURATION")]
    observe: Option<HumanDuration>,
}

impl TargetArgs {
    pub(super) fn observe(&self) -> Option<prost_types::Duration> {
        self.observe.map(to_duration)
    }
}

#[derive(Args)]
pub(super) struct RedriveArgs {
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    target: TargetArgs,
    /// Redrive all at once, instead of 10, then 100, then the rest
    #[arg(long)]
    all_at_once: bool,
    /// Pause if a larger share of the redriven records comes back; 1: never (default: 0.2)
    #[arg(long, value_name = "SHARE")]
    max_returned: Option<f64>,
    /// Start time, such as 2h (from now) or 2026-11-30T02:00:00Z (default: now); does not wait for the end of the job
    #[arg(long, value_name = "TIME", value_parser = future, conflicts_with = "plan")]
    start_at: Option<Timestamp>,
}

#[derive(Args)]
pub(super) struct DiscardArgs {
    #[command(flatten)]
    job: JobArgs,
}

#[derive(Args)]
pub(super) struct RedrivesArgs {
    #[command(subcommand)]
    verb: RedrivesVerb,
}

#[derive(Subcommand)]
enum RedrivesVerb {
    /// List redrives, discards and restores, newest first
    Ls(OutputArgs),
    /// Show a job
    Show(JobIdArgs),
    /// List the outcome of each dead letter of a job
    Items(ItemsArgs),
    /// Start a planned job, or change its start time
    Start(StartArgs),
    /// Pause a job, within about a second
    Pause(ChangeArgs),
    /// Resume a job, even if it was auto-paused
    Resume(ChangeArgs),
    /// Cancel a job; this undoes nothing
    Cancel(ChangeArgs),
    /// Change the rate of a job
    Rate(RateArgs),
    /// Wait for the end of a job
    #[command(after_help = "Exit status: 3 if some dead letters were not done or came back")]
    Wait(JobIdArgs),
}

#[derive(Args)]
struct JobIdArgs {
    /// Job id
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
struct ChangeArgs {
    #[command(flatten)]
    job: JobIdArgs,
    /// Fail unless this is the current revision
    #[arg(long, value_name = "N")]
    expected_revision: Option<u64>,
}

#[derive(Args)]
struct StartArgs {
    /// Start time, such as 2h (from now) or 2026-11-30T02:00:00Z (default: now)
    #[arg(long, value_name = "TIME", value_parser = future)]
    at: Option<Timestamp>,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
struct RateArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// Dead letters per second; 0: as fast as possible
    #[arg(value_name = "N")]
    rate: u32,
}

#[derive(Args)]
struct ItemsArgs {
    /// Only dead letters that were not done
    #[arg(long)]
    not_done: bool,
    #[command(flatten)]
    job: JobIdArgs,
}

impl RedrivesArgs {
    pub(super) fn changes(&self) -> bool {
        match &self.verb {
            RedrivesVerb::Ls(_) | RedrivesVerb::Show(_) | RedrivesVerb::Items(_) | RedrivesVerb::Wait(_) => {
                false
            }
            RedrivesVerb::Start(_)
            | RedrivesVerb::Pause(_)
            | RedrivesVerb::Resume(_)
            | RedrivesVerb::Cancel(_)
            | RedrivesVerb::Rate(_) => true,
        }
    }
}

impl ChangeArgs {
    fn change(&self) -> ChangeRedriveRequest {
        ChangeRedriveRequest {
            id: self.job.id.clone(),
            expected_revision: self.expected_revision,
            start_at: None,
        }
    }
}

pub(super) async fn redrive(client: &RedriveClient, args: &RedriveArgs) -> Result<ExitCode, CliError> {
    check_start(args.start_at, SystemClock.now())?;
    let plan = PlanRedriveRequest {
        destination: args.target.destination.clone(),
        all_at_once: args.all_at_once,
        max_returned_share: args.max_returned,
        observe: args.target.observe(),
        force: args.target.force,
        ..planned(&args.job, RedriveKind::Redrive)?
    };
    let kind = RedriveKind::Redrive;
    let executed = execute(client, &args.job.run, kind, args.start_at, async || {
        client.plan(plan).await
    });
    Ok(executed.await?.exit_code())
}

/// A filter, which must not be that of a variable that is not set: it would select everything in a range of time.
fn not_blank(filter: &str) -> Result<String, &'static str> {
    match filter.trim().is_empty() {
        true => Err("is empty; use --all for all dead letters"),
        false => Ok(filter.to_owned()),
    }
}

/// Refuses a start in the past before anything is planned.
fn check_start(start_at: Option<Timestamp>, now: Timestamp) -> Result<(), CliError> {
    if start_at.is_none_or(|at| at > now) {
        return Ok(());
    }
    let text = "--start-at: must be a time in the future; leave it out to start now";
    Err(CliError::Usage(text.to_owned()))
}

pub(super) async fn discard(
    client: &RedriveClient,
    args: &DiscardArgs,
    kind: RedriveKind,
) -> Result<ExitCode, CliError> {
    let plan = planned(&args.job, kind)?;
    let executed = execute(client, &args.job.run, kind, None, async || {
        client.plan(plan).await
    });
    Ok(executed.await?.exit_code())
}

fn planned(args: &JobArgs, kind: RedriveKind) -> Result<PlanRedriveRequest, CliError> {
    let SelectionArgs {
        filter,
        all,
        ids,
        group,
        retry_of,
    } = &args.selection;
    let filter = args.range.add_to(filter.as_deref().unwrap_or_default())?;
    let is_range = args.selection.filter.is_none() && !filter.is_empty();
    if is_range && !all {
        let text = "--since, --until and --expires-within need --filter or --all";
        return Err(CliError::Usage(text.to_owned()));
    }
    Ok(PlanRedriveRequest {
        kind: kind.into(),
        filter,
        // Of all dead letters, only those in the range.
        all: *all && !is_range,
        ids: ids.clone(),
        group: group.clone().unwrap_or_default(),
        retry_of: retry_of.clone().unwrap_or_default(),
        reason: args.run.reason.clone(),
        request_id: args.run.request_id.clone(),
        rate_per_second: args.rate.per_second,
        ..PlanRedriveRequest::default()
    })
}

/// How the execution of a job ended for the command that has planned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Executed {
    /// The command has not waited for the end of the job.
    Accepted,
    /// The job has ended.
    Ended { has_done_all: bool },
    /// The job was stopped: it was not confirmed, it was auto-paused, or a caller paused or cancelled it.
    Stopped,
}

impl Executed {
    /// How a job ended that is over for now.
    fn of(job: &Redrive) -> Self {
        match job.state() {
            RedriveState::Paused | RedriveState::Cancelled => Self::Stopped,
            _ => Self::Ended {
                has_done_all: has_done_all(job),
            },
        }
    }

    /// 0 if all dead letters that matched were done, or if the command has not waited for them; otherwise 3.
    pub(super) fn exit_code(self) -> ExitCode {
        match self {
            Self::Accepted | Self::Ended { has_done_all: true } => ExitCode::SUCCESS,
            Self::Ended { has_done_all: false } | Self::Stopped => ExitCode::from(EXIT_INCOMPLETE),
        }
    }
}

/// Plans a job, shows the plan, asks, starts it, and waits for its end.
pub(super) async fn execute(
    client: &RedriveClient,
    args: &RunArgs,
    kind: RedriveKind,
    start_at: Option<Timestamp>,
    plan: impl AsyncFnOnce() -> Result<Redrive, ClientError>,
) -> Result<Executed, CliError> {
    args.check()?;
    let job = plan().await?;
    check_kind(&job, kind)?;
    if args.plan {
        let samples = preview(client, &job).await;
        let text = || as_text(&job) + &samples_text(&samples);
        print_item(args.output.format, text, || with_preview(&job, &samples));
        return Ok(Executed::Accepted);
    }
    eprint!("{}", as_text(&job));
    // A repeated request can return a job that runs. Declining must not cancel that one.
    let is_asked = !args.yes && job.state() == RedriveState::Planned;
    if is_asked {
        let samples = preview(client, &job).await;
        eprint!("{}", samples_text(&samples));
    }
    if is_asked && !is_confirmed(&job)? {
        client.cancel(as_shown(&job)).await?;
        eprintln!("nothing was done");
        return Ok(Executed::Stopped);
    }
    let started = start(client, job, start_at).await?;
    if args.no_wait || start_at.is_some() {
        print_item(args.output.format, || as_text(&started), || as_json(&started));
        return Ok(Executed::Accepted);
    }
    let ended = wait(client, &started.id, args.output.format).await?;
    Ok(Executed::of(&ended))
}

/// What would be written for some dead letters of a job. Without it, the plan is shown as well.
async fn preview(client: &RedriveClient, job: &Redrive) -> Vec<RedriveSample> {
    if job.kind() != RedriveKind::Redrive {
        return Vec::new();
    }
    let request = GetRedriveRequest { id: job.id.clone() };
    match client.preview(request).await {
        Ok(preview) => preview.samples,
        Err(error) => {
            eprintln!("what would be written is not known: {}", error_chain(&error));
            Vec::new()
        }
    }
}

/// Refuses a job of another kind: an inspector that does not compare requests returns one that had the same `--request-id`.
fn check_kind(job: &Redrive, wanted: RedriveKind) -> Result<(), CliError> {
    if job.state() == RedriveState::Unspecified {
        return Err(unknown_state(job));
    }
    if job.kind() == wanted {
        return Ok(());
    }
    Err(CliError::failed(format_args!(
        "the inspector has returned `{}`, a job of the kind {}, instead of {}; nothing was started",
        job.id,
        name(job.kind()),
        name(wanted)
    )))
}

/// Starts a job. A repeated request goes on with the job as it is, even if it was started for another time
/// meanwhile.
async fn start(
    client: &RedriveClient,
    mut job: Redrive,
    start_at: Option<Timestamp>,
) -> Result<Redrive, ClientError> {
    while !matches!(job.state(), RedriveState::Running | RedriveState::Paused) {
        let change = ChangeRedriveRequest {
            start_at: start_at.map(to_timestamp),
            ..as_shown(&job)
        };
        match client.start(change).await {
            Err(error) if has_reason(&error, "REDRIVE_REVISED") => job = get(client, &job.id).await?,
            // The time has passed since the plan was requested, or the clocks differ.
            Err(error) if has_reason(&error, "START_INVALID") => {
                client.cancel(as_shown(&job)).await?;
                return Err(error);
            }
            started => return started,
        }
    }
    Ok(job)
}

/// Whether the inspector has refused a call for this reason.
pub(super) fn has_reason(error: &ClientError, expected: &str) -> bool {
    matches!(error, ClientError::Refused { reason: Some(reason), .. } if reason == expected)
}

impl RunArgs {
    /// Refuses to start an unconfirmed job.
    ///
    /// # Errors
    /// If stdin is not a terminal, and neither `--yes` nor `--plan` is given.
    pub(super) fn check(&self) -> Result<(), CliError> {
        if self.yes || self.plan || std::io::stdin().is_terminal() {
            return Ok(());
        }
        let text = "--yes: is required if stdin is not a terminal; --plan shows what would be done";
        Err(CliError::Usage(text.to_owned()))
    }
}

/// A change of the job that the caller has seen, and not of what others have made of it since.
fn as_shown(job: &Redrive) -> ChangeRedriveRequest {
    ChangeRedriveRequest {
        id: job.id.clone(),
        expected_revision: Some(job.revision),
        start_at: None,
    }
}

async fn get(client: &RedriveClient, id: &str) -> Result<Redrive, ClientError> {
    client.get(GetRedriveRequest { id: id.to_owned() }).await
}

fn name(kind: RedriveKind) -> String {
    kind.name().unwrap_or_default()
}

/// A newer inspector may have states of which this version does not know whether the job goes on.
fn unknown_state(job: &Redrive) -> CliError {
    CliError::failed(format_args!(
        "the inspector has returned `{}` in a state that this version does not know; upgrade redeliver",
        job.id
    ))
}

/// Whether nothing happens any more.
fn has_ended(job: &Redrive) -> bool {
    use RedriveState::{Paused, Planned, Running};
    !matches!(job.state(), Planned | Running | Paused)
}

fn is_confirmed(job: &Redrive) -> Result<bool, CliError> {
    eprint!("{} {} dead letters? [y/N] ", name(job.kind()), job.total);
    let mut answer = String::new();
    let read = std::io::stdin().lock().read_line(&mut answer);
    read.map_err(|error| CliError::Io("reading the answer", error))?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

/// Shows the progress of a job until it ends or pauses.
async fn wait(client: &RedriveClient, id: &str, format: Format) -> Result<Redrive, CliError> {
    let (mut progress, mut outage) = (Progress::new("dead letters"), Outage::new(Some(MAX_OUTAGE)));
    let (mut problem, mut waits_until) = (String::new(), None);
    let job = loop {
        let job = match get(client, id).await {
            Ok(job) => job,
            Err(error) => {
                progress.clear();
                outage.wait(error).await?;
                continue;
            }
        };
        outage.ends();
        if job.state() == RedriveState::Unspecified {
            return Err(unknown_state(&job));
        }
        progress.set_total(job.total.into());
        if job.problem != problem {
            problem.clone_from(&job.problem);
            if !problem.is_empty() {
                progress.clear();
                eprintln!("the redrive waits: {}", in_one_line(&problem));
            }
        }
        let until = time_of(job.waits_until);
        if until != waits_until {
            waits_until = until;
            if let Some(until) = waits_until.filter(|_| job.done > 0) {
                progress.clear();
                eprintln!(
                    "waiting until {until} for what comes back of {} records",
                    job.done
                );
            }
        }
        progress.draw(job.total.saturating_sub(job.pending).into());
        if has_ended(&job) || job.state() == RedriveState::Paused {
            break job;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    progress.clear();
    print_item(format, || as_text(&job), || as_json(&job));
    if !job.auto_pause_reason.is_empty() {
        eprintln!(
            "paused: {}; `redeliver dlq redrives resume {id}` continues",
            in_one_line(&job.auto_pause_reason)
        );
    }
    Ok(job)
}

/// Whether all dead letters that matched were done, also those for which there was no room in the plan.
fn has_done_all(job: &Redrive) -> bool {
    job.state() == RedriveState::Succeeded && job.refused.is_empty() && !job.has_more
}

pub(super) async fn run(client: &RedriveClient, args: &RedrivesArgs) -> Result<ExitCode, CliError> {
    let (job, args) = match &args.verb {
        RedrivesVerb::Ls(output) => return list(client, *output).await,
        RedrivesVerb::Items(args) => return items(client, args).await,
        RedrivesVerb::Wait(args) => {
            let ended = wait(client, &args.id, args.output.format).await?;
            return Ok(Executed::of(&ended).exit_code());
        }
        RedrivesVerb::Show(args) => (get(client, &args.id).await, args),
        RedrivesVerb::Start(args) => {
            let change = ChangeRedriveRequest {
                start_at: args.at.map(to_timestamp),
                ..args.change.change()
            };
            (client.start(change).await, &args.change.job)
        }
        RedrivesVerb::Pause(args) => (client.pause(args.change()).await, &args.job),
        RedrivesVerb::Resume(args) => (client.resume(args.change()).await, &args.job),
        RedrivesVerb::Cancel(args) => (client.cancel(args.change()).await, &args.job),
        RedrivesVerb::Rate(args) => {
            let change = SetRedriveRateRequest {
                id: args.change.job.id.clone(),
                expected_revision: args.change.expected_revision,
                rate_per_second: args.rate,
            };
            (client.set_rate(change).await, &args.change.job)
        }
    };
    let job = job?;
    print_item(args.output.format, || as_text(&job), || as_json(&job));
    Ok(ExitCode::SUCCESS)
}

async fn list(client: &RedriveClient, OutputArgs { format }: OutputArgs) -> Result<ExitCode, CliError> {
    let pages = read_pages(u32::MAX, format, as_json, async |page_size, page_token| {
        let request = ListRedrivesRequest {
            page_size,
            page_token,
        };
        let page = client.list(request).await?;
        Ok((page.redrives, page.next_page_token))
    });
    print_items(format, &COLUMNS, &pages.await?.items, as_json);
    Ok(ExitCode::SUCCESS)
}

const COLUMNS: [Column<Redrive>; 11] = [
    ("id", |job, _| job.id.text()),
    ("kind", |job, _| job.kind().name()),
    ("state", |job, _| state(job).text()),
    ("total", |job, _| job.total.text()),
    ("done", |job, _| job.done.text()),
    ("failed", |job, _| job.failed.text()),
    ("skipped", |job, _| job.skipped.text()),
    ("returned", |job, _| job.returned.text()),
    ("by", |job, _| job.created_by.short(100)),
    ("created", |job, _| job.created_at.text()),
    ("reason", |job, _| job.reason.short(60)),
];

async fn items(client: &RedriveClient, args: &ItemsArgs) -> Result<ExitCode, CliError> {
    let format = args.job.output.format;
    let is_shown = |item: &RedriveItem| {
        !args.not_done || !matches!(item.outcome(), RedriveOutcome::Done | RedriveOutcome::Unspecified)
    };
    let pages = read_pages(u32::MAX, format, item_json, async |page_size, page_token| {
        let id = args.job.id.clone();
        let request = ListRedriveItemsRequest {
            id,
            page_size,
            page_token,
        };
        let mut page = client.items(request).await?;
        page.items.retain(is_shown);
        Ok((page.items, page.next_page_token))
    });
    print_items(format, &ITEMS, &pages.await?.items, item_json);
    Ok(ExitCode::SUCCESS)
}

const ITEMS: [Column<RedriveItem>; 3] = [
    ("id", |item, _| item.id.text()),
    ("outcome", |item, _| item.outcome().name()),
    ("written", |item, _| item.written.text()),
];

fn item_json(item: &RedriveItem) -> Json {
    object(item).into()
}

fn state(job: &Redrive) -> String {
    let state = job.state().name().unwrap_or_default();
    if job.auto_pause_reason.is_empty() {
        state
    } else {
        format!("{state} (auto)")
    }
}

fn as_text(job: &Redrive) -> String {
    let counts = |counts: &[RedriveCount]| {
        let counts = counts.iter().map(|of| format!("{} {}", of.topic, of.count));
        counts.collect::<Vec<_>>().join(", ")
    };
    let refused = job.refused.iter().map(|refused| {
        let reason = refused.reason().name().unwrap_or_default();
        format!("{reason} {}, such as {}", refused.count, refused.sample)
    });
    let mut text = fields(&[
        ("id", &job.id),
        ("kind", &job.kind().name()),
        ("state", &state(job)),
        ("auto-paused", &job.auto_pause_reason),
        ("problem", &job.problem),
        ("edits", &job.edited.join(", ")),
        ("filter", &job.filter),
        ("retry of", &job.retry_of),
        ("reason", &job.reason),
        ("created by", &job.created_by),
        ("created", &job.created_at),
        ("total", &job.total),
        ("done", &job.done),
        ("failed", &job.failed),
        ("skipped", &job.skipped),
        ("pending", &job.pending),
        ("returned", &job.returned),
        ("from", &counts(&job.sources)),
        ("to", &counts(&job.destinations)),
        ("not planned", &refused.collect::<Vec<_>>().join("; ")),
        ("such as", &job.samples.join(", ")),
        (
            "rate",
            &(job.rate_per_second > 0).then(|| format!("{}/s", job.rate_per_second)),
        ),
        ("waits until", &job.waits_until),
    ]);
    for warning in &job.warnings {
        text += &format!("warning: {}\n", in_one_line(warning));
    }
    text
}

/// The longest value of a header in a plan, in bytes.
const SHOWN_VALUE: usize = 60;

fn samples_text(samples: &[RedriveSample]) -> String {
    let mut text = String::new();
    for sample in samples {
        let id = in_one_line(&sample.id);
        text += &match sample.outcome() {
            RedriveOutcome::Done => {
                format!(
                    "\n{id} would be written to {}\n",
                    in_one_line(&sample.destination)
                )
            }
            skipped => format!(
                "\n{id} would be skipped: {}\n",
                skipped.name().unwrap_or_default()
            ),
        };
        if sample.payload_withheld != 0 {
            text += &format!("headers {WITHHELD}\n");
        }
        if !sample.headers.is_empty() {
            let rows = sample.headers.iter().map(|header| {
                vec![
                    header.name.clone(),
                    header.kind().name().unwrap_or_default(),
                    values(&header.before),
                    values(&header.after),
                ]
            });
            text += &table(&["header", "change", "before", "after"], rows);
            text += "\n";
        }
        if sample.headers_truncated {
            text += "(more headers are not shown)\n";
        }
    }
    text
}

fn values(values: &[HeaderValue]) -> String {
    let value = |value: &HeaderValue| match &value.bytes {
        None => "(null)".to_owned(),
        Some(bytes) => line(bytes, SHOWN_VALUE),
    };
    values.iter().map(value).collect::<Vec<_>>().join(", ")
}

fn with_preview(job: &Redrive, samples: &[RedriveSample]) -> Json {
    let mut json = as_json(job);
    json["preview"] = samples.iter().map(|sample| Json::from(object(sample))).collect();
    json
}

/// The requested change, as in the command line.
const ASKED: [&str; 6] = [
    "all_at_once",
    "destination",
    "force",
    "max_returned_share",
    "observe",
    "start_at",
];

fn as_json(job: &Redrive) -> Json {
    let mut object = object(job);
    object.retain(|name, _| !ASKED.contains(&&**name));
    object.into()
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::RedriveRefusal;

    use super::*;

    #[test]
    fn start_in_past_is_refused() {
        let now = Timestamp::from_millis(5);
        let refused = |millis| check_start(Some(Timestamp::from_millis(millis)), now).is_err();
        assert_eq!([4, 5, 6].map(refused), [true, true, false]);
        assert!(check_start(None, now).is_ok());
    }

    #[test]
    fn another_kind_of_job_is_refused() {
        let mut job = Redrive {
            kind: RedriveKind::Redrive.into(),
            state: RedriveState::Planned.into(),
            ..Redrive::default()
        };
        assert!(check_kind(&job, RedriveKind::Redrive).is_ok());
        assert!(check_kind(&job, RedriveKind::Discard).is_err());
        // That of a newer inspector.
        job.state = 99;
        assert!(check_kind(&job, RedriveKind::Redrive).is_err());
    }

    #[test]
    fn a_full_plan_is_not_done() {
        let done = |change: &dyn Fn(&mut Redrive)| {
            let mut job = Redrive {
                kind: RedriveKind::Redrive.into(),
                state: RedriveState::Succeeded.into(),
                ..Redrive::default()
            };
            change(&mut job);
            has_done_all(&job)
        };
        assert!(done(&|_| {}));
        assert!(!done(&|job| job.has_more = true));
        assert!(!done(&|job| job.refused.push(RedriveRefusal::default())));
        assert!(!done(&|job| job.state = RedriveState::PartiallySucceeded.into()));
    }
}
