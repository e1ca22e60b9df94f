//! `redeliver dlq`: dead letters, from the inspector.

mod audit;
mod completeness;
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

use std::process::ExitCode;

use clap::{Args, Subcommand};
use redeliver_client::{
    AuditClient, Completeness, DeadLetter, DeadLetterClient, Endpoint, ListDeadLetters, RedriveClient,
    RedriveKind, Removal, TopicStats,
};
use redeliver_core::{Clock as _, HumanDuration, SystemClock};
use redeliver_runtime::cli::{CommonArgs, report};
use serde_json::json;

use crate::connection::{CliError, ConnectionArgs, Service, conclude, inspector};
use crate::output::{
    Format, Json, OutputArgs, print_item, print_items, print_json, print_json_line, shortened,
};
use completeness::CompleteArgs;
pub(crate) use completeness::{completeness_json, problem};
use show::{as_json, as_text, redriven_json};

#[derive(Args)]
pub(crate) struct DlqArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// List dead letters, newest first
    Ls(ListArgs),
    /// Show a dead letter: failure, origin, headers and payload
    Show(ShowArgs),
    /// Print dead letters as they arrive, one line each
    Watch(WatchArgs),
    /// Write dead letters to a file or to stdout, byte for byte; exits with status 3 if parts are missing
    Export(export::ExportArgs),
    /// Count dead letters by topic and class
    Stats(StatsArgs),
    /// List groups of dead letters that fail for the same reason
    Groups(groups::GroupsArgs),
    /// Show or change a group: resolve, mute, reopen, note
    Group(groups::GroupArgs),
    /// Write the records of dead letters to their pipelines again; exits with status 3 if not all were done
    Redrive(redrives::RedriveArgs),
    /// Redrive one dead letter with another value, other headers or another key; exits with status 3 if it was not done
    Edit(edit::EditArgs),
    /// Redrive the dead letters of an exported file that are still the same; exits with status 3 if not all were done
    Import(import::ImportArgs),
    /// List or change redrives, discards and restores
    Redrives(redrives::RedrivesArgs),
    /// Discard dead letters, so that no redrive takes them; exits with status 3 if not all were done
    Discard(redrives::DiscardArgs),
    /// Open discarded dead letters again; exits with status 3 if not all were done
    Restore(redrives::DiscardArgs),
    /// Show who has changed or seen what, oldest first
    Audit(audit::AuditArgs),
}

#[derive(Args)]
pub(crate) struct InspectorArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// URL of the inspector, such as http://inspector:50051; overrides REDELIVER_DLQ (default: dlq_inspector.listen)
    #[arg(long, value_name = "URL", env = "REDELIVER_DLQ", hide_env = true)]
    server: Option<String>,
    #[command(flatten)]
    connection: ConnectionArgs,
}

#[derive(Args)]
struct FilterArgs {
    /// Filter, such as 'error_class = "permanent" AND headers.tenant = "x" AND retry_count > 3' (default: all). json./POINTER matches plain JSON values only, not decoded ones
    #[arg(long, value_name = "FILTER", default_value = "", hide_default_value = true)]
    filter: String,
}

#[derive(Args)]
struct ReasonArgs {
    /// Why you read payloads, for the audit log
    #[arg(long, value_name = "REASON")]
    why: Option<String>,
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
    #[command(flatten)]
    inspector: InspectorArgs,
}

#[derive(Args)]
struct ShowArgs {
    /// Position in the dead-letter topic: topic/partition/offset
    #[arg(value_name = "ID")]
    id: String,
    /// Write only the payload to stdout: raw (byte for byte), json (indented), text (control characters are escaped) or hex; exits with
    /// status 3 if parts of it are masked
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
    #[command(flatten)]
    inspector: InspectorArgs,
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
    #[command(flatten)]
    inspector: InspectorArgs,
}

#[derive(Args)]
struct StatsArgs {
    #[command(flatten)]
    filter: FilterArgs,
    #[command(flatten)]
    complete: CompleteArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    inspector: InspectorArgs,
}

impl Verb {
    /// Why payloads are read.
    fn reason(&self) -> Option<&str> {
        let reason = match self {
            Self::Show(args) => &args.reason,
            Self::Watch(args) => &args.reason,
            Self::Export(args) => &args.reason,
            // The editor shows the payload.
            Self::Edit(args) => return Some(&*args.run.why).filter(|why| !why.is_empty()),
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
        reason.why.as_deref()
    }
}

pub(crate) fn main(args: &DlqArgs) -> ExitCode {
    let inspector = match &args.verb {
        Verb::Ls(args) => &args.inspector,
        Verb::Show(args) => &args.inspector,
        Verb::Watch(args) => &args.inspector,
        Verb::Export(args) => &args.inspector,
        Verb::Stats(args) => &args.inspector,
        Verb::Groups(args) => &args.inspector,
        Verb::Group(args) => args.inspector(),
        Verb::Redrive(args) => args.inspector(),
        Verb::Edit(args) => &args.run.inspector,
        Verb::Import(args) => &args.run.inspector,
        Verb::Redrives(args) => args.inspector(),
        Verb::Discard(args) | Verb::Restore(args) => args.inspector(),
        Verb::Audit(args) => &args.inspector,
    };
    with_inspector(inspector, args.verb.reason(), async |endpoint, service| {
        let dead_letters = async || {
            let client = DeadLetterClient::connect(endpoint).await;
            client.map_err(|error| service.failure(error))
        };
        let redrives = async || {
            let client = RedriveClient::connect(endpoint).await;
            client.map_err(|error| service.failure(error))
        };
        match &args.verb {
            Verb::Ls(args) => list(&dead_letters().await?, args).await,
            Verb::Show(args) => show(&dead_letters().await?, args).await,
            Verb::Watch(args) => watch::run(&dead_letters().await?, args).await,
            Verb::Export(args) => {
                let target = args.target()?;
                export::run(&dead_letters().await?, args, target).await
            }
            Verb::Stats(args) => stats(&dead_letters().await?, args).await,
            Verb::Groups(args) => groups::list(&dead_letters().await?, args).await,
            Verb::Group(args) => groups::run(&dead_letters().await?, args).await,
            Verb::Redrive(args) => redrives::redrive(&redrives().await?, args).await,
            Verb::Edit(args) => edit::run(&dead_letters().await?, &redrives().await?, args).await,
            Verb::Import(args) => import::run(&redrives().await?, args).await,
            Verb::Redrives(args) => redrives::run(&redrives().await?, args).await,
            Verb::Discard(args) => redrives::discard(&redrives().await?, args, RedriveKind::Discard).await,
            Verb::Restore(args) => redrives::discard(&redrives().await?, args, RedriveKind::Restore).await,
            Verb::Audit(args) => {
                let client = AuditClient::connect(endpoint).await;
                audit::run(&client.map_err(|error| service.failure(error))?, args).await
            }
        }
    })
}

/// Runs a command that asks the inspector. `why`: why payloads are read.
pub(crate) fn with_inspector(
    args: &InspectorArgs,
    why: Option<&str>,
    run: impl AsyncFnOnce(&Endpoint, &Service) -> Result<ExitCode, CliError>,
) -> ExitCode {
    let config = match args.common.load() {
        Ok(config) => config,
        Err(error) => return report(&error),
    };
    if let Some(code) = args.common.handle_config_flags(&config, |_| Ok(())) {
        return code;
    }
    conclude(async {
        let service = inspector(&config);
        let mut endpoint = args.connection.endpoint(args.server.as_deref(), &service)?;
        if let Some(why) = why {
            endpoint = endpoint.reason(why);
        }
        run(&endpoint, &service).await
    })
}

/// The inspector's limit.
const PAGE: u32 = 1000;

/// What the pages of a list contain.
struct Listed<T> {
    /// Empty for JSON lines, which were printed.
    found: Vec<T>,
    completeness: Completeness,
    /// Whether there is more than was asked for.
    has_more: bool,
}

/// Reads pages until there are this many items. `read` gets the size and the token of a page, and returns its items, the token of the
/// next page and its completeness. JSON lines are printed as they arrive.
async fn list_pages<T>(
    limit: u32,
    format: Format,
    value: impl Fn(&T) -> Json,
    read: impl AsyncFn(u16, String) -> Result<(Vec<T>, Option<String>, Completeness), CliError>,
) -> Result<Listed<T>, CliError> {
    let mut found: Vec<T> = Vec::new();
    let mut completeness: Option<Completeness> = None;
    let (mut token, mut count) = (String::new(), 0);
    let has_more = loop {
        let missing = limit.saturating_sub(count);
        let size = u16::try_from(missing.min(PAGE)).unwrap_or(u16::MAX);
        let (items, next, of_page) = read(size, token).await?;
        count = count.saturating_add(u32::try_from(items.len()).unwrap_or(u32::MAX));
        let is_closed = format == Format::Jsonl && !items.iter().all(|item| print_json_line(value(item)));
        if format != Format::Jsonl {
            found.extend(items);
        }
        // The list is as complete as its first incomplete page.
        if completeness.as_ref().is_none_or(|before| before.is_complete) {
            completeness = Some(of_page);
        }
        match next {
            None => break false,
            // Nobody reads the others.
            Some(_) if is_closed => break false,
            Some(_) if count >= limit => break true,
            Some(next) => token = next,
        }
    };
    Ok(Listed {
        found,
        completeness: completeness.unwrap_or_default(),
        has_more,
    })
}

async fn list(client: &DeadLetterClient, args: &ListArgs) -> Result<ExitCode, CliError> {
    let request = ListDeadLetters {
        filter: args.filter.filter.clone(),
        oldest_first: args.oldest_first,
        ..ListDeadLetters::default()
    };
    let format = args.output.format;
    let listed = list_pages(args.limit, format, as_json, async |page_size, page_token| {
        let request = ListDeadLetters {
            page_size,
            page_token,
            ..request.clone()
        };
        let page = client.list(&request).await?;
        Ok((page.dead_letters, page.next_page_token, page.completeness))
    });
    let Listed {
        found,
        completeness,
        has_more,
    } = listed.await?;
    let columns = [
        "id", "dead at", "age", "state", "class", "code", "retries", "pipeline", "message",
    ];
    let now = SystemClock.now();
    let row = |letter: &DeadLetter| {
        let mut row = row(letter);
        let age = letter.dead_at.map(|at| rounded(now.since(at)));
        row.insert(2, age.unwrap_or_default());
        row
    };
    let all = || json!(found.iter().map(as_json).collect::<Vec<_>>());
    print_with_completeness(format, &completeness, "dead_letters", all, || {
        print_items(format, &columns, &found, row, as_json);
    });
    if has_more {
        eprintln!(
            "more dead letters match; use --limit {} to show more",
            u64::from(args.limit) * 10
        );
    }
    Ok(args.complete.conclude(&completeness))
}

/// Prints items with the completeness of the answer: in the JSON document, or as the last line of JSON lines.
fn print_with_completeness(
    format: Format,
    completeness: &Completeness,
    name: &str,
    all: impl FnOnce() -> Json,
    print: impl FnOnce(),
) {
    match format {
        Format::Table => print(),
        Format::Json => print_json(json!({ name: all(), "completeness": completeness_json(completeness) })),
        Format::Jsonl => {
            print();
            print_json(json!({ "completeness": completeness_json(completeness) }));
        }
    }
}

fn row(letter: &DeadLetter) -> Vec<String> {
    let text = |text: &Option<String>, limit| shortened(text.as_deref().unwrap_or_default(), limit);
    vec![
        letter.id.clone(),
        letter.dead_at.map(|at| at.to_string()).unwrap_or_default(),
        letter.state.as_str().to_owned(),
        text(&letter.error_class, 20),
        text(&letter.error_code, 40),
        letter.retry_count.to_string(),
        text(&letter.pipeline, 40),
        text(&letter.error_message, 60),
    ]
}

async fn show(client: &DeadLetterClient, args: &ShowArgs) -> Result<ExitCode, CliError> {
    if let Some(format) = args.payload {
        return payload::write(client, &args.id, format).await;
    }
    let Some(found) = client.get(&args.id).await? else {
        return Err(not_found(&args.id));
    };
    let (letter, completeness) = (&found.dead_letter, &found.completeness);
    let with_completeness = || {
        let mut value = as_json(letter);
        if let Some(redriven) = &found.redriven_as {
            value["redriven_as"] = redriven_json(redriven);
        }
        value["completeness"] = completeness_json(completeness);
        decoded::with_decoded(value, found.decoded.as_ref())
    };
    let as_text = || {
        let decoded = found.decoded.as_ref();
        let decoded = decoded.map(|decoded| decoded::as_text(decoded, letter.masked.has("decoded")));
        as_text(letter, found.redriven_as.as_ref()) + &decoded.unwrap_or_default()
    };
    print_item(args.output.format, as_text, with_completeness);
    Ok(args.complete.conclude(completeness))
}

fn not_found(id: &str) -> CliError {
    CliError::failed(format_args!(
        "dead letter `{id}` not found: it never existed, or the retention of its topic has deleted it"
    ))
}

async fn stats(client: &DeadLetterClient, args: &StatsArgs) -> Result<ExitCode, CliError> {
    let stats = client.stats(&args.filter.filter).await?;
    let columns = [
        "topic",
        "open",
        "total",
        "last minute",
        "last hour",
        "last day",
        "oldest",
        "removed in",
        "open by class",
    ];
    let all = || json!(stats.topics.iter().map(stats_json).collect::<Vec<_>>());
    print_with_completeness(args.output.format, &stats.completeness, "topics", all, || {
        print_items(args.output.format, &columns, &stats.topics, stats_row, stats_json);
    });
    Ok(args.complete.conclude(&stats.completeness))
}

/// The number of open dead letters.
pub(crate) fn open(stats: &TopicStats) -> String {
    stats
        .open
        .map_or_else(|| "unknown".to_owned(), |open| open.to_string())
}

/// When retention removes the oldest open dead letter. Empty if there is none.
pub(crate) fn removed_in(stats: &TopicStats) -> String {
    if stats.oldest.is_none() {
        return String::new();
    }
    let left = stats.until_removal.map(rounded).unwrap_or_default();
    match stats.removal {
        Removal::Unknown => "unknown".to_owned(),
        Removal::Never => "never".to_owned(),
        Removal::ByAge => left,
        Removal::BySize => "by size".to_owned(),
        Removal::ByAgeOrSize => format!("≤ {left}"),
    }
}

fn stats_row(stats: &TopicStats) -> Vec<String> {
    let classes = stats
        .open_by_class
        .iter()
        .map(|(class, count)| format!("{class} {count}"))
        .chain(stats.are_classes_masked.then(|| "(masked)".to_owned()));
    vec![
        stats.topic.clone(),
        open(stats),
        stats.total.to_string(),
        stats.last_minute.to_string(),
        stats.last_hour.to_string(),
        stats.last_day.to_string(),
        stats.oldest.map(|at| at.to_string()).unwrap_or_default(),
        removed_in(stats),
        classes.collect::<Vec<_>>().join(", "),
    ]
}

/// A duration in its largest unit, rounded down.
pub(crate) fn rounded(duration: std::time::Duration) -> String {
    let seconds = duration.as_secs();
    let unit = [86_400, 3_600, 60]
        .into_iter()
        .find(|unit| seconds >= 2 * unit)
        .unwrap_or(1);
    HumanDuration::from_secs(seconds / unit * unit).to_string()
}

pub(crate) fn stats_json(stats: &TopicStats) -> Json {
    json!({
        "topic": stats.topic,
        "open": stats.open,
        "total": stats.total,
        "last_minute": stats.last_minute,
        "last_hour": stats.last_hour,
        "last_day": stats.last_day,
        "oldest": stats.oldest.map(|at| at.to_string()),
        "newest": stats.newest.map(|at| at.to_string()),
        "removal": stats.removal.as_str(),
        "until_removal_seconds": stats.until_removal.map(|duration| duration.as_secs()),
        "open_by_class": stats.open_by_class,
        "classes_masked": stats.are_classes_masked,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn unknown_removal_and_no_removal_differ() {
        let stats = |removal, until_removal: Option<u64>| TopicStats {
            topic: "a-dlq".to_owned(),
            open: Some(1),
            total: 1,
            last_minute: 0,
            last_hour: 0,
            last_day: 0,
            oldest: Some(redeliver_client::Timestamp::from_millis(0)),
            newest: None,
            removal,
            until_removal: until_removal.map(Duration::from_secs),
            open_by_class: std::collections::BTreeMap::new(),
            are_classes_masked: false,
        };
        for (removal, until, expected) in [
            (Removal::Unknown, None, "unknown"),
            (Removal::Never, None, "never"),
            (Removal::ByAge, Some(7_300), "2h"),
            (Removal::BySize, None, "by size"),
            (Removal::ByAgeOrSize, Some(7_300), "≤ 2h"),
        ] {
            assert_eq!(removed_in(&stats(removal, until)), expected);
        }
        let none_open = TopicStats {
            oldest: None,
            open: None,
            ..stats(Removal::Unknown, None)
        };
        assert_eq!(
            (removed_in(&none_open).as_str(), open(&none_open)),
            ("", "unknown".to_owned())
        );
    }

    #[test]
    fn duration_is_rounded_down() {
        for (seconds, expected) in [
            (0, "0s"),
            (119, "119s"),
            (121, "2m"),
            (7_300, "2h"),
            (2_600_000, "30d"),
        ] {
            assert_eq!(rounded(Duration::from_secs(seconds)), expected);
        }
    }
}
