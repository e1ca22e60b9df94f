//! `redeliver dlq count`: how many dead letters have the same values of some fields, counted by the inspector.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use jiff::tz::TimeZone;
use redeliver_client::DeadLetterClient;
use redeliver_client::messages::{Completeness, DeadLetterCounts, GetDeadLetterStatsRequest};
use serde_json::{Map, json};

use super::completeness::CompleteArgs;
use super::{FilterArgs, ReasonArgs};
use crate::connection::CliError;
use crate::output::{Json, in_one_line, object, print_json, table};

/// Stands for all values that are not listed.
const OTHER: &str = "(other)";

#[derive(Args)]
pub(super) struct CountArgs {
    /// Up to 5 fields, separated by commas: topic, pipeline, error_class, error_code, state, day, hour or headers.NAME
    #[arg(long, value_name = "FIELD", value_delimiter = ',', required = true)]
    by: Vec<String>,
    #[command(flatten)]
    filter: FilterArgs,
    /// Maximum number of counts, the largest first; the others are added up
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
    limit: u32,
    #[command(flatten)]
    pub(super) reason: ReasonArgs,
    #[command(flatten)]
    complete: CompleteArgs,
    /// Output format: table, json, jsonl or csv
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        default_value = "table",
        hide_possible_values = true
    )]
    format: CountFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CountFormat {
    Table,
    Json,
    Jsonl,
    Csv,
}

pub(super) async fn run(client: &DeadLetterClient, args: &CountArgs) -> Result<ExitCode, CliError> {
    let by = &args.by;
    let zone = by.iter().any(|field| field == "day" || field == "hour").then(|| {
        let zone = TimeZone::system();
        let name = zone.iana_name().filter(|_| !zone.is_unknown());
        let zone = name.unwrap_or("UTC").to_owned();
        // It depends on the machine.
        eprintln!("days and hours are those of {zone}");
        zone
    });
    let request = GetDeadLetterStatsRequest {
        filter: args.filter.text()?,
        by: by.clone(),
        zone: zone.clone().unwrap_or_default(),
        limit: args.limit,
        ..GetDeadLetterStatsRequest::default()
    };
    let answer = client.count(request).await?;
    let counts = answer.counts.ok_or_else(|| {
        CliError::failed(
            "--by: the inspector cannot count by fields; it is older than this command, upgrade it",
        )
    })?;
    let completeness = answer.completeness.unwrap_or_default();
    let documents = || {
        counts.counts.iter().map(move |count| {
            let mut document: Map<String, Json> = by
                .iter()
                .cloned()
                .zip(count.values.iter().map(|value| json!(value)))
                .collect();
            document.insert("count".to_owned(), json!(count.count));
            Json::from(document)
        })
    };
    let rest = json!({
        "total": counts.total,
        "other": counts.other,
        "partial": counts.partial,
        "zone": zone,
        "completeness": object(&completeness),
    });
    match args.format {
        CountFormat::Table => {
            let columns = by.iter().map(String::as_str).chain(["count"]);
            crate::say(table(&columns.collect::<Vec<_>>(), rows(by, &counts)));
        }
        CountFormat::Csv => {
            crate::say(csv_line(&[by.clone(), vec!["count".to_owned()]].concat()));
            rows(by, &counts).for_each(|row| crate::say(csv_line(&row)));
        }
        CountFormat::Jsonl => {
            documents().for_each(print_json);
            print_json(rest);
        }
        CountFormat::Json => {
            let mut rest = rest;
            rest["counts"] = documents().collect();
            print_json(rest);
        }
    }
    if counts.partial {
        eprintln!(
            "there are more than 10000 different values, of which some of the largest counts may be missing; narrow the filter"
        );
    }
    Ok(args.complete.conclude(&Completeness {
        complete: completeness.complete && !counts.partial,
        ..completeness
    }))
}

/// The counts, and then the sum of all others.
fn rows(by: &[String], counts: &DeadLetterCounts) -> impl Iterator<Item = Vec<String>> {
    let other = (counts.other > 0).then(|| {
        let mut row = vec![String::new(); by.len()];
        OTHER.clone_into(&mut row[0]);
        (row, counts.other)
    });
    let counts = counts
        .counts
        .iter()
        .map(|count| (count.values.clone(), count.count));
    counts.chain(other).map(|(mut row, count)| {
        row.push(count.to_string());
        row
    })
}

/// A line as in RFC 4180. Control characters are escaped, as in tables.
fn csv_line(values: &[String]) -> String {
    let values = values.iter().map(|value| {
        let value = in_one_line(value);
        match value.contains(['"', ',']) {
            true => format!("\"{}\"", value.replace('"', "\"\"")),
            false => value,
        }
    });
    values.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::DeadLetterCount;

    use super::*;

    #[test]
    fn other_counts_are_the_last_row() {
        let count = |values: [&str; 2], count| DeadLetterCount {
            values: values.map(str::to_owned).to_vec(),
            count,
        };
        let mut counts = DeadLetterCounts {
            counts: vec![count(["a\nb", "say \"x\", y"], 7), count(["", "z"], 2)],
            total: 12,
            other: 3,
            partial: false,
        };
        let by = ["headers.tenant", "error_code"].map(str::to_owned);
        let lines =
            |counts: &DeadLetterCounts| rows(&by, counts).map(|row| csv_line(&row)).collect::<Vec<_>>();
        assert_eq!(lines(&counts), [r#"a\nb,"say ""x"", y",7"#, ",z,2", "(other),,3"]);
        counts.other = 0;
        assert_eq!(lines(&counts).len(), 2);
    }
}
