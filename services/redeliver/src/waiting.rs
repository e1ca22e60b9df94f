//! `redeliver waiting`: the failed records that wait for their next attempt, from the inspector.

mod act;
mod long;

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use redeliver_client::convert::{time, to_duration};
use redeliver_client::messages::{
    GetWaitingStatsRequest, ListWaitingRequest, LongWaitAction, ScanProgress, WaitingAction, WaitingCounts,
    WaitingCoverage, WaitingFilter, WaitingOrder, WaitingPlace, WaitingRecord,
};
use redeliver_client::{ClientError, Connection, Timestamp, WaitingClient};
use redeliver_core::HumanDuration;
use serde_json::json;

use crate::connection::{CliError, connect_to_change};
use crate::dlq::{InspectorArgs, with_inspector};
use crate::obstacles::{Obstacle, of_inspector};
use crate::output::{
    Column, Format, Json, OutputArgs, Text as _, due, in_one_line, object, print_items, print_json, rounded,
};
use crate::pages::read_pages;
use crate::progress::Progress;

/// How many obstacles are said below a list.
const SHOWN_OBSTACLES: usize = 10;

#[derive(Args)]
pub(crate) struct WaitingArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// List waiting records by due time, attempts or age, and what holds them up
    #[command(
        after_help = "Examples:\n  redeliver waiting ls --pipeline orders --more-attempts-than 3\n  redeliver waiting ls --sort attempts --limit 5000 -o jsonl"
    )]
    Ls(ListArgs),
    /// Count waiting records by pipeline and place
    Stats(StatsArgs),
    /// Show a record that waits in a tier or the scheduler, with its headers and its payload
    Show(act::ShowArgs),
    /// Retry records of tiers or the scheduler now
    #[command(
        after_help = "Examples:\n  redeliver waiting retry orders-retry-1m/3/17 --reason INC-17\n  redeliver waiting retry --matching --pipeline orders --error-code http.503 --yes\n  redeliver waiting retry 01M7Z0Q7XE000G000000000000\n\nExit status: 3 if a record was not retried"
    )]
    Retry(act::ActArgs),
    /// Move records of tiers or the scheduler to the dead letters
    #[command(
        after_help = "Examples:\n  redeliver waiting dead orders-retry-1m/3/17 --reason 'cancelled by customer'\n\nExit status: 3 if a record was not moved"
    )]
    Dead(act::ActArgs),
    /// Change value, key or headers of a record of a tier; it is due at the same time
    #[command(
        after_help = "Examples:\n  redeliver waiting edit orders-retry-1m/3/17 --header tenant=acme --reason INC-17\n\nExit status: 3 if the record was not edited"
    )]
    Edit(act::EditArgs),
    /// Show what has become of a request to retry, move or edit records
    Actions(act::ActionsArgs),
}

#[derive(Args)]
struct FilterArgs {
    /// Only records of this pipeline (default: all that the caller may see)
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pipeline: String,
    /// Only records in this place: due, scheduler, or a tier such as 30s
    #[arg(long, value_name = "PLACE", default_value = "", hide_default_value = true)]
    place: String,
    /// Only records whose last failure has this code, such as http.503
    #[arg(long, value_name = "CODE", default_value = "", hide_default_value = true)]
    error_code: String,
    /// Only records whose last failure has this class: transient or throttled
    #[arg(long, value_name = "CLASS", default_value = "", hide_default_value = true)]
    error_class: String,
    /// Only records that entered the pipeline before this time ago, such as 2h
    #[arg(long, value_name = "DURATION")]
    older_than: Option<HumanDuration>,
    /// Only records with more failed attempts than this
    #[arg(long, value_name = "N")]
    more_attempts_than: Option<u32>,
    /// Only records with this origin: topic, topic/partition or topic/partition/offset
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    origin: Option<Origin>,
}

#[derive(Args)]
struct ListArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// List these first: due, attempts (the most) or age (the oldest)
    #[arg(
        long,
        value_name = "ORDER",
        default_value = "due",
        hide_possible_values = true
    )]
    sort: Sort,
    /// Maximum number of records, up to 20000; every 1000 need another scan
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    limit: u32,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    inspector: InspectorArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Sort {
    Due,
    Attempts,
    Age,
}

impl Sort {
    fn order(self) -> WaitingOrder {
        match self {
            Self::Due => WaitingOrder::Unspecified,
            Self::Attempts => WaitingOrder::Attempts,
            Self::Age => WaitingOrder::Age,
        }
    }

    /// Which records come first.
    fn first(self) -> &'static str {
        match self {
            Self::Due => "that are due first",
            Self::Attempts => "with the most attempts",
            Self::Age => "that are the oldest",
        }
    }
}

#[derive(Args)]
struct StatsArgs {
    #[command(flatten)]
    filter: FilterArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    inspector: InspectorArgs,
}

/// Where a record entered its pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Origin {
    topic: String,
    partition: Option<i32>,
    offset: Option<i64>,
}

fn origin(text: &str) -> Result<Origin, String> {
    const VALID: &str = "write topic, topic/partition or topic/partition/offset";
    let mut parts = text.split('/');
    let topic = parts.next().filter(|topic| !topic.is_empty()).ok_or(VALID)?;
    let partition = parts.next().map(str::parse).transpose().map_err(|_| VALID)?;
    let offset = parts.next().map(str::parse).transpose().map_err(|_| VALID)?;
    if parts.next().is_some()
        || partition.is_some_and(|number| number < 0)
        || offset.is_some_and(|number| number < 0)
    {
        return Err(VALID.to_owned());
    }
    Ok(Origin {
        topic: topic.to_owned(),
        partition,
        offset,
    })
}

impl FilterArgs {
    fn filter(&self) -> Option<WaitingFilter> {
        let origin = self.origin.as_ref();
        Some(WaitingFilter {
            pipeline: self.pipeline.clone(),
            place: self.place.clone(),
            error_code: self.error_code.clone(),
            error_class: self.error_class.clone(),
            older_than: self.older_than.map(to_duration),
            more_attempts_than: self.more_attempts_than,
            origin_topic: origin.map(|origin| origin.topic.clone()).unwrap_or_default(),
            origin_partition: origin.and_then(|origin| origin.partition),
            origin_offset: origin.and_then(|origin| origin.offset),
        })
    }
}

pub(crate) fn main(args: &WaitingArgs) -> ExitCode {
    match &args.verb {
        Verb::Retry(args) if args.is_about_scheduler() => return long::act(args, LongWaitAction::Retry),
        Verb::Dead(args) if args.is_about_scheduler() => return long::act(args, LongWaitAction::Dead),
        _ => {}
    }
    let inspector = match &args.verb {
        Verb::Ls(args) => &args.inspector,
        Verb::Stats(args) => &args.inspector,
        Verb::Show(args) => &args.inspector,
        Verb::Retry(args) | Verb::Dead(args) => args.inspector(),
        Verb::Edit(args) => args.inspector(),
        Verb::Actions(args) => &args.inspector,
    };
    let reason = match &args.verb {
        Verb::Show(args) => args.reason.as_deref(),
        _ => None,
    };
    with_inspector(inspector, reason, async |endpoint, service| {
        let connection = match &args.verb {
            Verb::Retry(_) | Verb::Dead(_) | Verb::Edit(_) => connect_to_change(endpoint, service).await?,
            _ => endpoint.connect().await.map_err(|error| service.failure(error))?,
        };
        let client = WaitingClient::new(&connection);
        match &args.verb {
            Verb::Ls(args) => list(&connection, args).await,
            Verb::Stats(args) => stats(&client, args).await,
            Verb::Show(args) => act::show(&client, args).await,
            Verb::Retry(args) => act::act(&client, args, WaitingAction::Retry).await,
            Verb::Dead(args) => act::act(&client, args, WaitingAction::Dead).await,
            Verb::Edit(args) => act::edit(&client, args).await,
            Verb::Actions(args) => act::actions(&client, args).await,
        }
    })
}

/// Shows the progress of a scan until it ends.
pub(crate) async fn with_progress<T>(run: impl AsyncFnOnce(&mut dyn FnMut(ScanProgress)) -> T) -> T {
    let mut shown = Progress::new("offsets");
    let mut show = |progress: ScanProgress| {
        shown.set_total(progress.total);
        shown.draw(progress.read);
    };
    let result = run(&mut show).await;
    shown.clear();
    result
}

async fn list(connection: &Connection, args: &ListArgs) -> Result<ExitCode, CliError> {
    let client = WaitingClient::new(connection);
    let format = args.output.format;
    let (mut matching, mut coverage) = (0, None);
    let value = |record: &WaitingRecord| object(record).into();
    let pages = read_pages(args.limit, format, value, async |limit, page_token| {
        let request = ListWaitingRequest {
            filter: args.filter.filter(),
            limit,
            order: args.sort.order().into(),
            page_token,
        };
        let page = with_progress(async |progress| client.list(request, progress).await).await?;
        matching = page.matching;
        coverage = page.coverage;
        Ok((page.records, page.next_page_token))
    });
    let obstacles = async {
        let FilterArgs { pipeline, place, .. } = &args.filter;
        Ok(of_inspector(connection, pipeline, place).await)
    };
    let (pages, obstacles) = tokio::try_join!(pages, obstacles)?;
    let coverage = coverage.ok_or(ClientError::InvalidResponse("coverage"))?;
    match format {
        Format::Json => print_json(json!({
            "records": pages.items.iter().map(value).collect::<Vec<Json>>(),
            "matching": matching,
            "coverage": object(&coverage),
            "obstacles": obstacles.iter().map(Obstacle::json).collect::<Vec<Json>>(),
        })),
        format => {
            print_items(format, &RECORDS, &pages.items, value);
            if pages.count > 0 {
                say_obstacles(&obstacles);
            }
        }
    }
    if pages.has_more {
        let (count, first) = (pages.count, args.sort.first());
        eprintln!("{matching} records match; these are the {count} {first}");
    }
    warn(coverage);
    Ok(ExitCode::SUCCESS)
}

/// On stderr: stdout has the records.
fn say_obstacles(obstacles: &[Obstacle]) {
    for obstacle in obstacles.iter().take(SHOWN_OBSTACLES) {
        eprintln!("held up: {}", in_one_line(&obstacle.to_string()));
    }
    if obstacles.len() > SHOWN_OBSTACLES {
        let others = obstacles.len() - SHOWN_OBSTACLES;
        eprintln!("held up: {others} others, see `redeliver status`");
    }
}

async fn stats(client: &WaitingClient, args: &StatsArgs) -> Result<ExitCode, CliError> {
    let request = GetWaitingStatsRequest {
        filter: args.filter.filter(),
        ..GetWaitingStatsRequest::default()
    };
    let mut stats = with_progress(async |progress| client.stats(request, progress).await).await?;
    let coverage = stats.coverage.ok_or(ClientError::InvalidResponse("coverage"))?;
    let total = stats.total.ok_or(ClientError::InvalidResponse("total"))?;
    match args.output.format {
        Format::Json => print_json(json!({
            "total": object(&total),
            "places": stats.places.iter().map(place_json).collect::<Vec<_>>(),
            "coverage": object(&coverage),
        })),
        format => {
            stats
                .places
                .extend((format == Format::Table).then(|| WaitingPlace {
                    pipeline: "(all)".to_owned(),
                    place: String::new(),
                    counts: Some(total),
                }));
            print_items(format, &PLACES, &stats.places, place_json);
        }
    }
    warn(coverage);
    Ok(ExitCode::SUCCESS)
}

fn warn(coverage: WaitingCoverage) {
    if coverage.scheduler_truncated {
        eprintln!("incomplete: the scheduler holds more long waits than a scan remembers; narrow the filter");
    }
}

fn age(since: Option<prost_types::Timestamp>, now: Timestamp) -> Option<String> {
    Some(rounded(now.since(time(since)?)))
}

const RECORDS: [Column<WaitingRecord>; 12] = [
    ("pipeline", |record, _| record.pipeline.text()),
    ("place", |record, _| record.place.text()),
    ("position", |record, _| record.position.text()),
    ("job", |record, _| record.job_id.text()),
    ("key", |record, _| match record.key_withheld {
        true => "<withheld>".text(),
        false => record.key.short(40),
    }),
    ("due", |record, now| due(time(record.due_at), now)),
    ("attempts", |record, _| record.attempts.text()),
    ("class", |record, _| match record.malformed {
        true => "malformed".text(),
        false => record.error_class.short(20),
    }),
    ("code", |record, _| record.error_code.short(40)),
    ("origin", |record, _| record.origin.text()),
    ("age", |record, now| age(record.origin_timestamp, now)),
    ("message", |record, _| record.error_message.short(60)),
];

/// What is counted in a place, or nothing.
fn counts(place: &WaitingPlace) -> WaitingCounts {
    place.counts.clone().unwrap_or_default()
}

const PLACES: [Column<WaitingPlace>; 9] = [
    ("pipeline", |place, _| place.pipeline.text()),
    ("place", |place, _| place.place.text()),
    ("records", |place, _| counts(place).records.text()),
    ("overdue", |place, _| counts(place).overdue.text()),
    ("next due", |place, now| due(time(counts(place).next_due), now)),
    ("oldest", |place, now| age(counts(place).oldest, now)),
    ("avg attempts", |place, _| {
        Some(format!("{:.1}", counts(place).average_attempts))
    }),
    ("max attempts", |place, _| counts(place).max_attempts.text()),
    ("codes", |place, _| {
        let counts = counts(place);
        let frequent = || counts.codes.iter().take(3);
        let mut codes: Vec<String> = frequent()
            .map(|code| {
                let name = code.error_code.short(30).unwrap_or_else(|| "(none)".to_owned());
                format!("{name} {}", code.records)
            })
            .collect();
        let shown = frequent().fold(0_u64, |sum, code| sum.saturating_add(code.records));
        if counts.records > shown {
            codes.push(format!("others {}", counts.records - shown));
        }
        codes.join(", ").text()
    }),
];

fn place_json(place: &WaitingPlace) -> Json {
    let mut value = object(&counts(place));
    value.insert("pipeline".to_owned(), json!(place.pipeline));
    value.insert("place".to_owned(), json!(place.place));
    value.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origin_is_parsed_by_parts() {
        let is = |topic: &str, partition, offset| {
            Ok(Origin {
                topic: topic.to_owned(),
                partition,
                offset,
            })
        };
        assert_eq!(origin("a"), is("a", None, None));
        assert_eq!(origin("a/1"), is("a", Some(1), None));
        assert_eq!(origin("a/1/2"), is("a", Some(1), Some(2)));
        for wrong in ["", "/1", "a/x", "a/-1", "a/1/-2", "a/1/2/3", "a/"] {
            assert!(origin(wrong).is_err(), "{wrong}");
        }
    }
}
