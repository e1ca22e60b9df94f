//! The docs are correct: their links resolve, and running processes export the metrics of their table.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use redeliver_testkit::certificates::Authority;
use redeliver_testkit::{ServiceProcess, eventually};

use crate::services::{APP, Services, path};
use crate::support::{DEADLINE, Draft};

const WATCH: &str = include_str!("../../../../docs/watch.md");

/// In the description of a metric of which the tests in `tokens` take care.
const ONLY_WITH_LOGIN: &str = "only with `kafka.login`";

/// The metrics of the section with their labels, for a Kafka without a login.
fn documented() -> BTreeMap<String, BTreeSet<String>> {
    let from = WATCH.split_once("\n## Metrics\n").unwrap().1;
    let section = from.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
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
    rows.filter(|line| !line.contains(ONLY_WITH_LOGIN))
        .flat_map(row)
        .collect()
}

/// The label names of each series, by metric. The series of a histogram are listed under its name.
fn scraped(service: &mut ServiceProcess, series: &mut BTreeMap<String, BTreeSet<BTreeSet<String>>>) {
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

/// All services, after a job and records with every outcome.
pub(crate) fn all_services_at_work(name: &str) -> (Services, [ServiceProcess; 4]) {
    let services = Services::new(name);
    let pipe = &services.pipe;
    // Some metrics exist only with TLS, others with tokens.
    let (authority, directory) = (Authority::new().unwrap(), pipe.env.directory());
    let (certificate, key) = authority.sign().unwrap().write(directory, "tls").unwrap();
    let ca = authority.write(directory, "ca.crt").unwrap();
    let certificate = format!("dlq_inspector.tls.cert_file={}", path(&certificate));
    let key = format!("dlq_inspector.tls.key_file={}", path(&key));
    std::fs::write(directory.join("token"), "s3cret").unwrap();
    let token = format!("dlq_inspector.token_file={}", path(&directory.join("token")));
    let tls = ["--set", &certificate, "--set", &key, "--set", &token];
    let running = [
        pipe.scheduler("a"),
        pipe.enricher("a"),
        pipe.retry_tier("a"),
        pipe.start("dlq-inspector", "a", &tls),
    ];
    services.cli(&["jobs", "schedule", "--app", APP, "--in", "0s", "--data", "job"]);
    let (_, topics) = pipe.jobs.as_ref().unwrap();
    pipe.produce_to(&topics.ingest, vec![Draft::new("invalid", "no request")]);
    let drafts = ["fine", "busy", "later"].map(|body| Draft::new(body.to_owned(), body.to_owned()));
    pipe.produce(drafts.to_vec());
    services.produce_dead_letters(&["hopeless"]);
    services.cli(&[&["dlq", "stats", "--ca-file", path(&ca)], &tls[..]].concat());
    (services, running)
}

#[test]
fn the_docs_list_exactly_the_exported_metrics() {
    let (_services, mut running) = all_services_at_work("docs-metrics");
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
    // And no others.
    let unwritten: Vec<_> = series
        .keys()
        .filter(|name| !documented.contains_key(*name))
        .collect();
    assert_eq!(unwritten, [""; 0]);
}

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// All Markdown files that are part of the repository.
fn pages(directory: &Path, pages: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with('.') || ["target", "node_modules"].contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            self::pages(&path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
}

/// The text of a page outside of its code blocks.
fn prose(page: &Path) -> String {
    let text = std::fs::read_to_string(page).unwrap();
    text.split("```").step_by(2).collect()
}

/// The anchor that GitHub gives a heading: lower case, hyphens for spaces, no punctuation.
fn anchor(heading: &str) -> String {
    let kept = heading
        .chars()
        .filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

fn has_anchor(page: &Path, expected: &str) -> bool {
    let prose = prose(page);
    let headings = prose.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| anchor(line.trim_start_matches('#').trim()))
        .any(|anchor| anchor == expected)
}

#[test]
fn relative_links_resolve() {
    let mut pages = Vec::new();
    self::pages(&repository(), &mut pages);
    let mut count = 0;
    let mut broken = Vec::new();
    for page in &pages {
        for link in prose(page).split("](").skip(1) {
            let target = link.split(')').next().unwrap();
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            count += 1;
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = match path {
                "" => page.clone(),
                path => page.parent().unwrap().join(path),
            };
            let is_good = file.exists() && (anchor.is_empty() || has_anchor(&file, anchor));
            if !is_good {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(count > 50, "only {count} links in {pages:?}");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_readme_is_short() {
    let length = std::fs::metadata(repository().join("README.md")).unwrap().len();
    assert!(length <= 8 * 1024, "README.md has {length} bytes");
}
