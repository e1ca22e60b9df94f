//! `redeliver dlq`: dead letters, from the inspector.

mod audit;
mod completeness;
mod count;
mod decoded;
mod edit;
mod export;
mod groups;
mod import;
mod outage;
mod payload;
mod redrives;
mod show;
mod watch;

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use redeliver_client::convert::{from_duration, time};
use redeliver_client::messages::{
    Completeness, DeadLetter, ListDeadLettersRequest, RedriveKind, Removal, TopicStats,
};
use redeliver_client::{
    AuditClient, ClientError, DeadLetterClient, Endpoint, JobClient, RedriveClient, Timestamp,
};
use redeliver_core::{Clock as _, HumanDuration, SystemClock};
use redeliver_runtime::cli::CommonArgs;
use serde_json::json;

use crate::config::Config;
use crate::connection::{
    CONNECTION, CliError, ConnectionArgs, Service, conclude, connect_to_change, inspector, scheduler,
};
use crate::output::{Column, Format, Json, OutputArgs, Text as _, object, print_answer, print_item, rounded};
use crate::pages::{Pages, read_pages};
use crate::times::{check_range, past};
use completeness::CompleteArgs;
pub(crate) use completeness::{EXIT_INCOMPLETE, problem};
pub(crate) use edit::{ContentArgs, seen};
pub(crate) use show::{as_json, as_text};

#[derive(Args)]
pub(crate) struct DlqArgs {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    inspector: InspectorArgs,
}

#[derive(Subcommand)]
enum Verb {
    /// List dead letters, newest first
    #[command(
        after_help = "Examples:\n  redeliver dlq ls --filter 'state = OPEN AND pipeline = \"orders\"'\n  redeliver dlq ls --since yesterday --limit 1000 -o jsonl\n  redeliver dlq ls --filter 'state = OPEN' --expires-within 1d --oldest-first"
    )]
    Ls(ListArgs),
    /// Show a dead letter: failure, origin, headers and payload
    #[command(
        after_help = "Examples:\n  redeliver dlq show orders-dlq/7/0\n  redeliver dlq show orders-dlq/7/0 --payload json"
    )]
    Show(ShowArgs),
    /// Print dead letters as they arrive, one line each
    Watch(WatchArgs),
    /// Export dead letters to a file, byte for byte
    #[command(
        after_help = "Examples:\n  redeliver dlq export --filter 'state = OPEN AND pipeline = \"orders\"' --file orders.jsonl\n\nExit status: 3 if parts are missing"
    )]
    Export(export::ExportArgs),
    /// Count dead letters by topic and class
    Stats(StatsArgs),
    /// Count dead letters by fields, such as codes, headers or days
    #[command(
        after_help = "Examples:\n  redeliver dlq count --by headers.tenant,error_code --since yesterday -o csv\n  redeliver dlq count --by day,pipeline --filter 'state = OPEN'"
    )]
    Count(count::CountArgs),
    /// List groups of dead letters with the same reason
    #[command(
        after_help = "Examples:\n  redeliver dlq groups --filter 'state = OPEN'\n  redeliver dlq groups --sort first-seen"
    )]
    Groups(groups::GroupsArgs),
    /// Show or change a group: resolve, mute, reopen, note
    Group(groups::GroupArgs),
    /// Redrive dead letters: write their records to their pipelines again
    #[command(
        after_help = "Examples:\n  redeliver dlq redrive --group f43138895ada823c --plan\n  redeliver dlq redrive --group f43138895ada823c --rate 50 --reason INC-17\n  redeliver dlq redrive --filter 'pipeline = \"orders\" AND state = OPEN' --reason INC-17\n\nExit status: 3 if some dead letters were not done or came back, or the job was not confirmed, paused or cancelled"
    )]
    Redrive(redrives::RedriveArgs),
    /// Redrive one dead letter with another value, key or headers
    #[command(
        after_help = "Examples:\n  redeliver dlq edit orders-dlq/7/0\n  redeliver dlq edit orders-dlq/7/0 --value-file fixed.json --reason 'typo in the amount'\n\nExit status: 3 if the dead letter was not redriven"
    )]
    Edit(edit::EditArgs),
    /// Redrive the unchanged dead letters of an exported file
    #[command(
        after_help = "Examples:\n  redeliver dlq import orders.jsonl --reason INC-17\n\nExit status: 3 if some dead letters were not done or came back, or the job was not confirmed, paused or cancelled"
    )]
    Import(import::ImportArgs),
    /// List and change redrives, discards and restores
    Redrives(redrives::RedrivesArgs),
    /// Discard dead letters, so that they are not redriven
    #[command(
        after_help = "Examples:\n  redeliver dlq discard --group f43138895ada823c --reason 'test data'\n\nExit status: 3 if some dead letters were not done or came back, or the job was not confirmed, paused or cancelled"
    )]
    Discard(redrives::DiscardArgs),
    /// Open discarded dead letters again
    #[command(
        after_help = "Examples:\n  redeliver dlq restore --id orders-dlq/7/0\n\nExit status: 3 if some dead letters were not done or came back, or the job was not confirmed, paused or cancelled"
    )]
    Restore(redrives::DiscardArgs),
    /// List audit log entries: changes and disclosures, oldest first
    #[command(after_help = "Examples:\n  redeliver dlq audit --action 'control.*' --from 2h")]
    Audit(audit::AuditArgs),
}

/// How to reach the inspector. The flags can stand behind the verbs of a command.
#[derive(Args)]
pub(crate) struct InspectorArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// URL of the inspector, such as http://inspector:50051; overrides REDELIVER_DLQ (default: dlq_inspector.listen)
    #[arg(long, value_name = "URL", env = "REDELIVER_DLQ", hide_env = true, global = true, help_heading = CONNECTION)]
    server: Option<String>,
    #[command(flatten)]
    connection: ConnectionArgs,
}

#[derive(Args)]
struct FilterArgs {
    /// Filter, such as 'error_class = "permanent" AND headers.tenant = "x" AND retry_count > 3' (default: all)
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    filter: String,
    #[command(flatten)]
    range: RangeArgs,
}

impl FilterArgs {
    fn text(&self) -> Result<String, CliError> {
        self.range.add_to(&self.filter)
    }
}

/// Restrictions by time, besides a filter.
#[derive(Args)]
struct RangeArgs {
    /// Only dead letters of this time or later, such as 2h (ago), yesterday or 2026-01-31T08:00:00Z
    #[arg(long, value_name = "TIME", value_parser = past)]
    since: Option<Timestamp>,
    /// Only dead letters before this time
    #[arg(long, value_name = "TIME", value_parser = past)]
    until: Option<Timestamp>,
    /// Only dead letters that Kafka may remove within this time because of their age, such as 1d
    #[arg(long, value_name = "DURATION")]
    expires_within: Option<HumanDuration>,
}

impl RangeArgs {
    /// Adds the restrictions to a filter, before it: a filter that ends too early stays invalid. AND binds less tightly than everything that this can have.
    fn add_to(&self, filter: &str) -> Result<String, CliError> {
        check_range(("--since", self.since), self.until)?;
        let expires = self
            .expires_within
            .map(|within| SystemClock.now().after(within.duration()));
        let range = [
            ("dead_at >=", self.since),
            ("dead_at <", self.until),
            ("expires_at <", expires),
        ];
        let range = range
            .into_iter()
            .filter_map(|(test, time)| Some(format!("{test} \"{}\"", time?)));
        let filter = Some(filter.trim().to_owned()).filter(|filter| !filter.is_empty());
        Ok(range.chain(filter).collect::<Vec<_>>().join(" AND "))
    }
}

#[derive(Args)]
struct ReasonArgs {
    /// Reason for the audit log, for reading payloads or headers
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
}

#[derive(Args)]
struct ListArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// Maximum number of dead letters
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// List the oldest first
    #[arg(long)]
    oldest_first: bool,
    #[command(flatten)]
    complete: CompleteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
struct ShowArgs {
    /// Position in the dead-letter topic: topic/partition/offset
    #[arg(value_name = "ID")]
    id: String,
    /// Print only the payload: raw (byte for byte), json (indented), text (control characters are escaped) or hex; exit with status 3 if
    /// parts are masked
    #[arg(
        long,
        value_name = "FORMAT",
        num_args = 0..=1,
        default_missing_value = "raw",
        hide_possible_values = true,
        conflicts_with = "format"
    )]
    payload: Option<payload::PayloadFormat>,
    #[command(flatten)]
    reason: ReasonArgs,
    #[command(flatten)]
    complete: CompleteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
struct WatchArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// Skip existing dead letters
    #[arg(long)]
    new: bool,
    /// Include headers and payload in JSON output
    #[arg(long)]
    full: bool,
    #[command(flatten)]
    reason: ReasonArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
struct StatsArgs {
    #[command(flatten)]
    filter: FilterArgs,
    #[command(flatten)]
    complete: CompleteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl Verb {
    /// Whether it may change something.
    fn changes(&self) -> bool {
        match self {
            Self::Redrive(_) | Self::Edit(_) | Self::Import(_) | Self::Discard(_) | Self::Restore(_) => true,
            Self::Redrives(args) => args.changes(),
            Self::Group(args) => args.changes(),
            Self::Ls(_)
            | Self::Show(_)
            | Self::Watch(_)
            | Self::Export(_)
            | Self::Stats(_)
            | Self::Count(_)
            | Self::Groups(_)
            | Self::Audit(_) => false,
        }
    }

    /// Why payloads are read.
    fn reason(&self) -> Option<&str> {
        let reason = match self {
            Self::Show(args) => &args.reason,
            Self::Watch(args) => &args.reason,
            Self::Export(args) => &args.reason,
            Self::Count(args) => &args.reason,
            // The editor shows the payload.
            Self::Edit(args) => return Some(&*args.run.reason).filter(|reason| !reason.is_empty()),
            Self::Ls(_)
            | Self::Stats(_)
            | Self::Groups(_)
            | Self::Group(_)
            | Self::Redrive(_)
            | Self::Import(_)
            | Self::Redrives(_)
            | Self::Discard(_)
            | Self::Restore(_)
            | Self::Audit(_) => return None,
        };
        reason.reason.as_deref()
    }
}

pub(crate) fn main(args: &DlqArgs) -> ExitCode {
    with_inspector(&args.inspector, args.verb.reason(), async |endpoint, service| {
        let connect = async || {
            if args.verb.changes() {
                return connect_to_change(endpoint, service).await;
            }
            let connection = endpoint.connect().await;
            connection.map_err(|error| service.failure(error))
        };
        let dead_letters = async || Ok::<_, CliError>(DeadLetterClient::new(&connect().await?));
        let redrives = async || Ok::<_, CliError>(RedriveClient::new(&connect().await?));
        let timeout = args.inspector.connection.timeout();
        let done: Result<ExitCode, CliError> = async {
            match &args.verb {
                Verb::Ls(args) => list(&dead_letters().await?, args).await,
                Verb::Show(args) => show(&dead_letters().await?, args).await,
                Verb::Watch(args) => watch::run(&dead_letters().await?, args).await,
                Verb::Export(args) => {
                    let target = args.target()?;
                    export::run(&dead_letters().await?, args, target, timeout).await
                }
                Verb::Stats(args) => stats(&dead_letters().await?, args).await,
                Verb::Count(args) => count::run(&dead_letters().await?, args).await,
                Verb::Groups(args) => groups::list(&dead_letters().await?, args).await,
                Verb::Group(args) => groups::run(&dead_letters().await?, args).await,
                Verb::Redrive(args) => redrives::redrive(&redrives().await?, args).await,
                Verb::Edit(args) => {
                    let connection = connect().await?;
                    let letters = DeadLetterClient::new(&connection);
                    edit::run(&letters, &RedriveClient::new(&connection), args).await
                }
                Verb::Import(args) => import::run(&redrives().await?, args).await,
                Verb::Redrives(args) => redrives::run(&redrives().await?, args).await,
                Verb::Discard(args) => {
                    redrives::discard(&redrives().await?, args, RedriveKind::Discard).await
                }
                Verb::Restore(args) => {
                    redrives::discard(&redrives().await?, args, RedriveKind::Restore).await
                }
                Verb::Audit(args) => audit::run(&AuditClient::new(&connect().await?), args).await,
            }
        }
        .await;
        done.map_err(expiry_unknown)
    })
}

/// Names the flag, if the inspector does not know what it needs.
fn expiry_unknown(error: CliError) -> CliError {
    match &error {
        CliError::Client(ClientError::Refused { message, .. })
            if message.contains("unknown field `expires_at`") =>
        {
            CliError::failed(format_args!(
                "{message}\n--expires-within: the inspector is older than this command; upgrade it"
            ))
        }
        _ => error,
    }
}

/// Runs a command that asks the inspector. `reason`: why payloads are read.
pub(crate) fn with_inspector(
    args: &InspectorArgs,
    reason: Option<&str>,
    run: impl AsyncFnOnce(&Endpoint, &Service) -> Result<ExitCode, CliError>,
) -> ExitCode {
    let config: Config = match args.common.configure(|_| Ok(())) {
        Ok(config) => config,
        Err(code) => return code,
    };
    conclude(async {
        let service = inspector(&config);
        let mut endpoint = args.connection.endpoint(args.server.as_deref(), &service)?;
        if let Some(reason) = reason {
            endpoint = endpoint.reason(reason);
        }
        run(&endpoint, &service).await
    })
}

/// Runs a command that changes something in the scheduler at this address, for this reason, and can ask the inspector.
pub(crate) fn with_scheduler(
    args: &InspectorArgs,
    server: Option<&str>,
    reason: &str,
    run: impl AsyncFnOnce(&Endpoint, JobClient) -> Result<ExitCode, CliError>,
) -> ExitCode {
    let config: Config = match args.common.configure(|_| Ok(())) {
        Ok(config) => config,
        Err(code) => return code,
    };
    conclude(async {
        let asked = args
            .connection
            .endpoint(args.server.as_deref(), &inspector(&config))?;
        let service = scheduler(&config).with_flag("--scheduler");
        let mut endpoint = args.connection.endpoint(server, &service)?;
        if !reason.is_empty() {
            endpoint = endpoint.reason(reason);
        }
        let jobs = JobClient::new(&connect_to_change(&endpoint, &service).await?);
        run(&asked, jobs).await
    })
}

/// Reads pages as [`read_pages`] does, with the completeness of the answer. `read` also returns that of a page.
async fn read_answer<T>(
    limit: u32,
    format: Format,
    value: impl Fn(&T) -> Json,
    read: impl AsyncFn(i32, String) -> Result<(Vec<T>, String, Option<Completeness>), CliError>,
) -> Result<(Pages<T>, Completeness), CliError> {
    let mut completeness: Option<Completeness> = None;
    let pages = read_pages(limit, format, value, async |page_size, page_token| {
        let (items, next, of_page) = read(page_size, page_token).await?;
        // The list is as complete as its first incomplete page.
        if completeness.as_ref().is_none_or(|before| before.complete) {
            completeness = Some(of_page.unwrap_or_default());
        }
        Ok((items, next))
    });
    let pages = pages.await?;
    Ok((pages, completeness.unwrap_or_default()))
}

const COLUMNS: [Column<DeadLetter>; 9] = [
    ("id", |letter, _| letter.id.text()),
    ("dead at", |letter, _| letter.timestamp().text()),
    (AGE, |letter, now| Some(rounded(now.since(letter.timestamp()?)))),
    ("state", |letter, _| letter.state().name()),
    ("class", |letter, _| letter.error_class.short(20)),
    ("code", |letter, _| letter.error_code.short(40)),
    ("retries", |letter, _| letter.retry_count.text()),
    ("pipeline", |letter, _| letter.pipeline.short(40)),
    ("message", |letter, _| letter.error_message.short(60)),
];
const AGE: &str = "age";

async fn list(client: &DeadLetterClient, args: &ListArgs) -> Result<ExitCode, CliError> {
    let order_by = if args.oldest_first {
        "dead_at"
    } else {
        "dead_at desc"
    };
    let (format, filter) = (args.output.format, args.filter.text()?);
    let listed = read_answer(args.limit, format, as_json, async |page_size, page_token| {
        let request = ListDeadLettersRequest {
            filter: filter.clone(),
            order_by: order_by.to_owned(),
            page_size,
            page_token,
            ..ListDeadLettersRequest::default()
        };
        let page = client.list(request).await?;
        Ok((page.dead_letters, page.next_page_token, page.completeness))
    });
    let (pages, completeness) = listed.await?;
    print_answer(
        format,
        &COLUMNS,
        ("dead_letters", &pages.items),
        as_json,
        &completeness,
    );
    if pages.has_more {
        eprintln!(
            "more dead letters match; use --limit {} to show more",
            u64::from(args.limit) * 10
        );
    }
    Ok(args.complete.conclude(&completeness))
}

async fn show(client: &DeadLetterClient, args: &ShowArgs) -> Result<ExitCode, CliError> {
    if let Some(format) = args.payload {
        return payload::write(client, &args.id, format).await;
    }
    let Some(mut letter) = client.get(&args.id).await? else {
        return Err(not_found(&args.id));
    };
    let completeness = letter.completeness.take().unwrap_or_default();
    let with_completeness = || {
        let mut value = as_json(&letter);
        value["completeness"] = object(&completeness).into();
        decoded::with_decoded(value, letter.decoded.as_ref())
    };
    let as_text = || {
        let decoded = letter.decoded.as_ref();
        let decoded = decoded.map(|decoded| decoded::as_text(decoded, letter.is_masked("decoded")));
        as_text(&letter) + &decoded.unwrap_or_default()
    };
    print_item(args.output.format, as_text, with_completeness);
    Ok(args.complete.conclude(&completeness))
}

fn not_found(id: &str) -> CliError {
    CliError::failed(format_args!(
        "dead letter `{id}` not found: it never existed, or the retention of its topic has deleted it"
    ))
}

const STATS: [Column<TopicStats>; 9] = [
    ("topic", |stats, _| stats.topic.text()),
    ("open", |stats, _| Some(open(stats.open))),
    ("total", |stats, _| stats.total.text()),
    ("last minute", |stats, _| stats.last_minute.text()),
    ("last hour", |stats, _| stats.last_hour.text()),
    ("last day", |stats, _| stats.last_day.text()),
    ("oldest", |stats, _| stats.oldest.text()),
    ("removed in", removed_in),
    ("open by class", |stats, _| {
        let classes: BTreeMap<_, _> = stats.open_by_class.iter().collect();
        let classes = classes.iter().map(|(class, count)| format!("{class} {count}"));
        let masked = stats.classes_masked.then(|| "(masked)".to_owned());
        Some(classes.chain(masked).collect::<Vec<_>>().join(", "))
    }),
];

async fn stats(client: &DeadLetterClient, args: &StatsArgs) -> Result<ExitCode, CliError> {
    let stats = client.stats(&args.filter.text()?).await?;
    let completeness = stats.completeness.unwrap_or_default();
    print_answer(
        args.output.format,
        &STATS,
        ("topics", &stats.topics),
        stats_json,
        &completeness,
    );
    Ok(args.complete.conclude(&completeness))
}

/// The number of open dead letters.
pub(crate) fn open(open: Option<u64>) -> String {
    open.text().unwrap_or_else(|| "unknown".to_owned())
}

/// When retention removes the oldest open dead letter; `None` if there is none.
pub(crate) fn removed_in(stats: &TopicStats, _now: Timestamp) -> Option<String> {
    time(stats.oldest)?;
    let left = stats.until_removal.as_ref().and_then(from_duration);
    let left = left.map(|left| rounded(left.duration())).unwrap_or_default();
    Some(match stats.removal() {
        Removal::Unspecified => "unknown".to_owned(),
        Removal::Never => "never".to_owned(),
        Removal::ByAge => left,
        Removal::BySize => "by size".to_owned(),
        Removal::ByAgeOrSize => format!("≤ {left}"),
    })
}

pub(crate) fn stats_json(stats: &TopicStats) -> Json {
    let mut object = object(stats);
    object.remove("until_removal");
    let left = stats.until_removal.as_ref().and_then(from_duration);
    let seconds = left.map(|left| left.duration().as_secs());
    object.insert("until_removal_seconds".to_owned(), json!(seconds));
    object.into()
}

#[cfg(test)]
mod tests {
    use redeliver_client::convert::to_duration;

    use super::*;

    #[test]
    fn ranges_are_added_to_filters() {
        let range = |since: Option<&str>, until: Option<&str>| RangeArgs {
            since: since.map(|time| time.parse().unwrap()),
            until: until.map(|time| time.parse().unwrap()),
            expires_within: None,
        };
        let [early, late] = ["2026-01-01T00:00:00.000Z", "2026-01-02T00:00:00.000Z"];
        for (filter, since, until, expected) in [
            ("", None, None, String::new()),
            (" a = b OR c = d ", None, None, "a = b OR c = d".to_owned()),
            ("", Some(early), None, format!("dead_at >= \"{early}\"")),
            (
                "a = b OR c = d",
                Some(early),
                Some(late),
                format!("dead_at >= \"{early}\" AND dead_at < \"{late}\" AND a = b OR c = d"),
            ),
            // Of a variable that is not set.
            (
                "topic !=",
                Some(early),
                None,
                format!("dead_at >= \"{early}\" AND topic !="),
            ),
        ] {
            assert_eq!(range(since, until).add_to(filter).unwrap(), expected);
        }
        let error = range(Some(late), Some(early)).add_to("").unwrap_err();
        assert_eq!(error.to_string(), "--until is not later than --since");
    }

    #[test]
    fn unknown_removal_and_no_removal_differ() {
        let now = Timestamp::from_millis(0);
        let stats = |removal: Removal, until_removal: Option<u64>| TopicStats {
            oldest: Some(prost_types::Timestamp::default()),
            removal: removal.into(),
            until_removal: until_removal.map(|seconds| to_duration(HumanDuration::from_secs(seconds))),
            ..TopicStats::default()
        };
        for (removal, until, expected) in [
            (Removal::Unspecified, None, "unknown"),
            (Removal::Never, None, "never"),
            (Removal::ByAge, Some(7_300), "2h"),
            (Removal::BySize, None, "by size"),
            (Removal::ByAgeOrSize, Some(7_300), "≤ 2h"),
        ] {
            assert_eq!(removed_in(&stats(removal, until), now).as_deref(), Some(expected));
        }
        assert_eq!(removed_in(&TopicStats::default(), now), None);
        assert_eq!(open(None), "unknown");
    }
}
