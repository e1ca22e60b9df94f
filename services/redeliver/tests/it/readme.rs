//! What the README says of metrics, beside a scrape of processes at work.

use std::collections::{BTreeMap, BTreeSet};

use redeliver_testkit::eventually;

use crate::services::{APP, DEADLINE, Services};
use crate::support::{Draft, Service};

const README: &str = include_str!("../../../../README.md");

/// The metrics of the README's table with their labels.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let table = README.split("**Metrics**").nth(1).unwrap();
    let rows = table.lines().skip_while(|line| !line.starts_with("| `"));
    let rows = rows.take_while(|line| line.starts_with("| `"));
    let row = |line: &'static str| {
        let mut cells = line.trim_matches('|').split('|');
        let (names, labels) = (cells.next().unwrap(), cells.next().unwrap());
        let labels: BTreeSet<String> = labels
            .split(',')
            .map(|label| label.trim().to_owned())
            .filter(|label| !label.is_empty())
            .collect();
        let names = names
            .split(',')
            .map(|name| name.trim().trim_matches('`').to_owned());
        names.map(|name| (name, labels.clone())).collect::<Vec<_>>()
    };
    rows.flat_map(row).collect()
}

/// The series of a scrape by metric, each with the names of its labels; those of a histogram stand under its name.
fn scraped(service: &mut Service, series: &mut BTreeMap<String, BTreeSet<BTreeSet<String>>>) {
    let (status, text) = service.get("/metrics");
    assert_eq!(status, 200);
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let end = line.find(['{', ' ']).unwrap();
        let name = line[..end].strip_prefix("redeliver_").unwrap_or(&line[..end]);
        let name = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|part| name.strip_suffix(part))
            .unwrap_or(name);
        let labels = line[end..]
            .strip_prefix('{')
            .map_or("", |rest| &rest[..rest.find('}').unwrap()]);
        let labels = labels
            .split("\",")
            .filter_map(|label| label.split_once('='))
            .map(|(name, _)| name.to_owned())
            .filter(|name| name != "le");
        series
            .entry(name.to_owned())
            .or_default()
            .insert(labels.collect());
    }
}

#[test]
fn the_metrics_of_the_readme_are_there_with_these_labels() {
    let services = Services::new("readme-metrics");
    let pipe = &services.pipe;
    let mut running = [
        pipe.scheduler("a"),
        pipe.enricher("a"),
        pipe.retry_tier("a"),
        services.inspect(),
    ];
    services.cli(&["jobs", "schedule", "--app", APP, "--in", "0s", "--data", "job"]);
    let drafts = ["fine", "busy", "later"].map(|body| Draft::new(body.to_owned(), body.to_owned()));
    pipe.produce(drafts.to_vec());
    services.let_die(&["hopeless"]);
    services.cli(&["dlq", "stats"]);

    let documented = documented();
    assert!(documented.len() > 30, "{documented:?}");
    let series = eventually("all metrics are there", DEADLINE, || {
        let mut series = BTreeMap::new();
        for service in &mut running {
            scraped(service, &mut series);
        }
        let missing: Vec<_> = documented
            .keys()
            .filter(|name| !series.contains_key(*name))
            .collect();
        if missing.is_empty() {
            Ok(series)
        } else {
            Err(format!("{missing:?}"))
        }
    });
    for (name, labels) in &documented {
        let expected = BTreeSet::from([labels.clone()]);
        assert_eq!(series[name], expected, "{name}");
    }
    // And nothing more.
    let unwritten: Vec<_> = series
        .keys()
        .filter(|name| !documented.contains_key(*name))
        .collect();
    assert_eq!(unwritten, [""; 0]);
}
