//! `redeliver waiting`: the failed records that wait for their next attempt, from the inspector.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use redeliver_client::{
    ScanProgress, Timestamp, WaitingClient, WaitingCounts, WaitingCoverage, WaitingFilter, WaitingList,
    WaitingPlace, WaitingRecord, WaitingStats,
};
use redeliver_core::{Clock as _, HumanDuration, SystemClock};
use serde_json::json;

use crate::connection::CliError;
use crate::dlq::{InspectorArgs, rounded, with_inspector};
use crate::output::{Format, Json, OutputArgs, print_items, print_json, shortened};
use crate::progress::Progress;

#[derive(Args)]
pub(crate) struct WaitingArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// List waiting records, those that are due first
    Ls(ListArgs),
    /// Count waiting records by pipeline and place, with their attempts, due times and error codes
    Stats(StatsArgs),
}

#[derive(Args)]
struct FilterArgs {
    /// Only records of this pipeline (default: of all that the caller may see)
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pipeline: String,
    /// Only records that wait here: due, scheduler or a tier such as 30s
    #[arg(long, value_name = "PLACE", default_value = "", hide_default_value = true)]
    place: String,
    /// Only records whose last failure has this code, such as http.503
    #[arg(long, value_name = "CODE", default_value = "", hide_default_value = true)]
    error_code: String,
    /// Only records whose last failure has this class: transient or throttled
    #[arg(long, value_name = "CLASS", default_value = "", hide_default_value = true)]
    error_class: String,
    /// Only records that entered the pipeline longer ago than this, such as 2h
    #[arg(long, value_name = "DURATION")]
    older_than: Option<HumanDuration>,
    /// Only records with more failed attempts than this
    #[arg(long, value_name = "N")]
    more_attempts_than: Option<u32>,
    /// Only records that entered the pipeline here: topic, topic/partition or topic/partition/offset
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    origin: Option<Origin>,
}

#[derive(Args)]
struct ListArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// Maximum number of records, at most 1000
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
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
    fn filter(&self) -> WaitingFilter {
        let origin = self.origin.as_ref();
        WaitingFilter {
            pipeline: self.pipeline.clone(),
            place: self.place.clone(),
            error_code: self.error_code.clone(),
            error_class: self.error_class.clone(),
            older_than: self.older_than.map(HumanDuration::duration),
            more_attempts_than: self.more_attempts_than,
            origin_topic: origin.map(|origin| origin.topic.clone()).unwrap_or_default(),
            origin_partition: origin.and_then(|origin| origin.partition),
            origin_offset: origin.and_then(|origin| origin.offset),
        }
    }
}

pub(crate) fn main(args: &WaitingArgs) -> ExitCode {
    let inspector = match &args.verb {
        Verb::Ls(args) => &args.inspector,
        Verb::Stats(args) => &args.inspector,
    };
    with_inspector(inspector, None, async |endpoint, service| {
        let client = WaitingClient::connect(endpoint).await;
        let client = client.map_err(|error| service.failure(error))?;
        match &args.verb {
            Verb::Ls(args) => list(&client, args).await,
            Verb::Stats(args) => stats(&client, args).await,
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

async fn list(client: &WaitingClient, args: &ListArgs) -> Result<ExitCode, CliError> {
    let filter = args.filter.filter();
    let list = with_progress(async |progress| client.list(&filter, args.limit, progress).await).await?;
    let WaitingList {
        records,
        matching,
        coverage,
    } = list;
    let now = SystemClock.now();
    let columns = [
        "pipeline", "place", "position", "due", "attempts", "class", "code", "origin", "age", "message",
    ];
    match args.output.format {
        Format::Json => print_json(json!({
            "records": records.iter().map(record_json).collect::<Vec<_>>(),
            "matching": matching,
            "coverage": coverage_json(&coverage),
        })),
        format => print_items(
            format,
            &columns,
            &records,
            |record| record_row(record, now),
            record_json,
        ),
    }
    if matching > records.len() as u64 {
        eprintln!(
            "{matching} records match; these are the {} that are due first",
            records.len()
        );
    }
    warn(&coverage);
    Ok(ExitCode::SUCCESS)
}

async fn stats(client: &WaitingClient, args: &StatsArgs) -> Result<ExitCode, CliError> {
    let filter = args.filter.filter();
    let stats = with_progress(async |progress| client.stats(&filter, progress).await).await?;
    let WaitingStats {
        total,
        mut places,
        coverage,
    } = stats;
    let now = SystemClock.now();
    let columns = [
        "pipeline",
        "place",
        "records",
        "overdue",
        "next due",
        "oldest",
        "avg attempts",
        "max attempts",
        "codes",
    ];
    match args.output.format {
        Format::Json => print_json(json!({
            "total": counts_json(&total),
            "places": places.iter().map(place_json).collect::<Vec<_>>(),
            "coverage": coverage_json(&coverage),
        })),
        Format::Jsonl => print_items(Format::Jsonl, &columns, &places, |_| Vec::new(), place_json),
        Format::Table => {
            places.push(WaitingPlace {
                pipeline: "(all)".to_owned(),
                place: String::new(),
                counts: total,
            });
            print_items(
                Format::Table,
                &columns,
                &places,
                |place| place_row(place, now),
                place_json,
            );
        }
    }
    warn(&coverage);
    Ok(ExitCode::SUCCESS)
}

fn warn(coverage: &WaitingCoverage) {
    if coverage.is_scheduler_truncated {
        eprintln!("incomplete: the scheduler holds more long waits than a scan remembers; narrow the filter");
    }
}

/// When something is due, from now.
fn due(due: Option<Timestamp>, now: Timestamp) -> String {
    match due {
        None => String::new(),
        Some(due) if due > now => format!("in {}", rounded(due.since(now))),
        Some(due) => format!("{} late", rounded(now.since(due))),
    }
}

fn age(since: Option<Timestamp>, now: Timestamp) -> String {
    since.map(|since| rounded(now.since(since))).unwrap_or_default()
}

fn record_row(record: &WaitingRecord, now: Timestamp) -> Vec<String> {
    let text = |text: &Option<String>, limit| shortened(text.as_deref().unwrap_or_default(), limit);
    vec![
        record.pipeline.clone(),
        record.place.clone(),
        record.position.to_string(),
        due(record.due_at, now),
        record.attempts.to_string(),
        if record.is_malformed {
            "malformed".to_owned()
        } else {
            text(&record.error_class, 20)
        },
        text(&record.error_code, 40),
        record
            .origin
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
        age(record.origin_timestamp, now),
        text(&record.error_message, 60),
    ]
}

fn record_json(record: &WaitingRecord) -> Json {
    let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
    json!({
        "pipeline": record.pipeline,
        "place": record.place,
        "position": record.position.to_string(),
        "due_at": time(record.due_at),
        "attempts": record.attempts,
        "error_class": record.error_class,
        "error_code": record.error_code,
        "error_message": record.error_message,
        "failed_at": time(record.failed_at),
        "origin": record.origin.as_ref().map(ToString::to_string),
        "origin_timestamp": time(record.origin_timestamp),
        "malformed": record.is_malformed,
    })
}

fn place_row(place: &WaitingPlace, now: Timestamp) -> Vec<String> {
    let counts = &place.counts;
    let codes = counts.codes.iter().take(3).map(|(code, records)| {
        let code = if code.is_empty() { "(none)" } else { code };
        format!("{} {records}", shortened(code, 30))
    });
    let mut codes: Vec<String> = codes.collect();
    let shown: u64 = counts.codes.iter().take(3).map(|(_, records)| records).sum();
    if counts.records > shown {
        codes.push(format!("others {}", counts.records - shown));
    }
    vec![
        place.pipeline.clone(),
        place.place.clone(),
        counts.records.to_string(),
        counts.overdue.to_string(),
        due(counts.next_due, now),
        age(counts.oldest, now),
        format!("{:.1}", counts.average_attempts),
        counts.max_attempts.to_string(),
        codes.join(", "),
    ]
}

fn place_json(place: &WaitingPlace) -> Json {
    let mut value = counts_json(&place.counts);
    value["pipeline"] = place.pipeline.clone().into();
    value["place"] = place.place.clone().into();
    value
}

fn counts_json(counts: &WaitingCounts) -> Json {
    let codes = counts.codes.iter();
    let codes = codes.map(|(code, records)| json!({ "error_code": code, "records": records }));
    json!({
        "records": counts.records,
        "overdue": counts.overdue,
        "malformed": counts.malformed,
        "average_attempts": counts.average_attempts,
        "max_attempts": counts.max_attempts,
        "next_due": counts.next_due.map(|time| time.to_string()),
        "oldest": counts.oldest.map(|time| time.to_string()),
        "codes": codes.collect::<Vec<_>>(),
        "other_codes": counts.other_codes,
    })
}

fn coverage_json(coverage: &WaitingCoverage) -> Json {
    json!({
        "as_of": coverage.as_of.map(|time| time.to_string()),
        "scheduler_truncated": coverage.is_scheduler_truncated,
    })
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
