//! The docs are correct: their links resolve, and the tables of metrics are what running processes export.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use redeliver_testkit::certificates::Authority;
use redeliver_testkit::languages::run;
use redeliver_testkit::{ServiceProcess, binary, ensure, eventually};

use crate::deployment::deploy;
use crate::services::{APP, Services, path};
use crate::support::{DEADLINE, Draft, SERVICES};
use crate::totals::totals;

const WATCH: &str = include_str!("../../../../docs/watch.md");

/// A metric of some processes.
#[derive(Default)]
struct Metric {
    name: String,
    help: String,
    /// The names of the labels of each series.
    labels: BTreeSet<String>,
}

/// Adds the metrics of a process, by the names of their families.
fn scrape(service: &mut ServiceProcess, metrics: &mut BTreeMap<String, Metric>) {
    let (status, text) = service.get("/metrics");
    assert_eq!(status, 200);
    let mut family = String::new();
    for line in text.lines() {
        if let Some((name, help)) = line
            .strip_prefix("# HELP redeliver_")
            .and_then(|rest| rest.split_once(' '))
        {
            family = name.to_owned();
            help.trim_end_matches('.')
                .clone_into(&mut metrics.entry(family.clone()).or_default().help);
        } else if let Some(series) = line.strip_prefix("redeliver_") {
            let (name, rest) = series.split_at(series.find(['{', ' ']).unwrap());
            let parts = ["_bucket", "_sum", "_count"];
            let name = parts
                .iter()
                .find_map(|part| name.strip_suffix(part))
                .unwrap_or(name);
            let labels = rest
                .strip_prefix('{')
                .map_or("", |rest| &rest[..rest.find('}').unwrap()]);
            let labels = labels
                .split("\",")
                .filter_map(|label| Some(label.split_once('=')?.0));
            let labels: Vec<&str> = labels.filter(|name| *name != "le").collect();
            let metric = metrics.get_mut(&family).unwrap();
            name.clone_into(&mut metric.name);
            metric.labels.insert(labels.join(", "));
        }
    }
}

/// The page with the tables of these metrics. A marker has the prefixes of a table; the last table has all others.
fn with_tables(metrics: &BTreeMap<String, Metric>) -> String {
    const MARKER: &str = "<!-- metrics: ";
    const END: &str = "<!-- end -->";
    let mut rows: BTreeMap<_, _> = metrics
        .values()
        .map(|Metric { name, help, labels }| {
            let labels: Vec<_> = labels.iter().map(|labels| format!("{labels} ")).collect();
            (
                name,
                format!("| `{name}` | {}| {help} |\n", labels.join("or ").trim_start()),
            )
        })
        .collect();
    let mut parts = WATCH.split(MARKER);
    let mut page = parts.next().unwrap().to_owned();
    for part in parts {
        let (prefixes, rest) = part.split_once(" -->\n").unwrap();
        page += &format!("{MARKER}{prefixes} -->\n| name | labels | |\n|---|---|---|\n");
        rows.retain(|name, row| {
            let stays = prefixes != "others" && !prefixes.split(' ').any(|prefix| name.starts_with(prefix));
            if !stays {
                page += row;
            }
            stays
        });
        page += &rest[rest.find(END).unwrap()..];
    }
    page
}

/// The metrics of the lake, whose own test compares its page with what it exports.
fn metrics_of_lake() -> String {
    let page = include_str!("../../../../docs/lake.md");
    let rows = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `redeliver_lake_"));
    let metrics = rows.map(|row| {
        let (name, rest) = row.split_once("` | ").unwrap();
        let labels = rest.split('|').next().unwrap().trim().split(", ");
        let labels = labels
            .filter(|label| !label.is_empty())
            .map(|label| format!("{label}=\"\","));
        let labels = labels.collect::<String>();
        format!("# TYPE redeliver_lake_{name} gauge\nredeliver_lake_{name}{{{labels}}} 1\n")
    });
    metrics.collect()
}

/// The tables of the docs have exactly the metrics of all services after a job and records with every outcome, and so have
/// the alerts and dashboards. At the end, each service logs its totals.
#[test]
fn docs_list_exactly_exported_metrics() {
    let services = Services::new("docs-metrics");
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
    let audit = ["enabled=true", "interval=1s"].map(|value| format!("dlq_inspector.pipeline_audit.{value}"));
    let audit = audit.each_ref().map(|value| ["--set", value]).concat();
    let mut running = [
        pipe.scheduler("a"),
        pipe.enricher("a"),
        pipe.retry_tier("a"),
        pipe.start("dlq-inspector", "a", &[&tls[..], &audit].concat()),
    ];
    services.cli(&["jobs", "schedule", "--app", APP, "--in", "0s", "--data", "job"]);
    let (_, topics) = pipe.jobs.as_ref().unwrap();
    pipe.produce_to(&topics.ingest, vec![Draft::new("invalid", "no request")]);
    let drafts = ["fine", "busy", "later"].map(|body| Draft::new(body.to_owned(), body.to_owned()));
    services.produce_dead_letters(&["hopeless"]);
    pipe.produce(drafts.to_vec());
    services.cli(&[&["dlq", "stats", "--ca-file", path(&ca)], &tls[..]].concat());
    // The job and a record have results, two records are dead.
    pipe.watch().until_ended(4, DEADLINE);

    // Without a series, a metric is not exported at all. Before an update, remove the rows of metrics that are gone.
    let names = |page: &str| -> BTreeSet<String> {
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
        rows.filter_map(|row| Some(row.split_once('`')?.0.to_owned()))
            .collect()
    };
    let page = eventually("all metrics are there", DEADLINE, || {
        let mut metrics = BTreeMap::new();
        for service in &mut running {
            scrape(service, &mut metrics);
        }
        let page = with_tables(&metrics);
        let missing: Vec<_> = names(WATCH).difference(&names(&page)).cloned().collect();
        ensure(missing.is_empty(), format!("{missing:?}")).map(|()| page)
    });
    let observe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/observe");
    let lake = directory.join("metrics-lake");
    std::fs::write(&lake, metrics_of_lake()).unwrap();
    eventually("alerts and dashboards name only these metrics", DEADLINE, || {
        let mut check = Command::new(observe.join("check.py"));
        for (number, service) in running.iter_mut().enumerate() {
            let file = directory.join(format!("metrics-{number}"));
            std::fs::write(&file, service.get("/metrics").1).unwrap();
            check.arg(file);
        }
        check.arg(&lake);
        run(&mut check)
    });
    let indexed = "redeliver_dlq_indexed_total";
    eventually("the dead letters are indexed", DEADLINE, || {
        // Two of the pipeline, and the rejected request for a job.
        match running[3].metric(indexed) {
            3 => Ok(()),
            count => Err(count),
        }
    });
    running.iter_mut().for_each(ServiceProcess::shut_down);
    let of = |service: usize, names: &str| {
        let totals = totals(&running[service]);
        let values = names.split(' ').map(|name| totals[name].clone());
        values.collect::<Vec<_>>().join(" ")
    };
    let of_scheduler = of(0, "service accepted rejected dispatched cancelled");
    assert_eq!(of_scheduler, "\"scheduler\" 2 1 1 0");
    let of_enricher = of(1, "service completed succeeded dead forgotten");
    assert_eq!(of_enricher, "\"enricher\" 6 2 2 0");
    assert_eq!(of(2, "service written released moved"), "\"retry-tier\" 1 1 0");
    assert_eq!(of(3, "service indexed"), "\"dlq-inspector\" 3");

    if std::env::var_os("REDELIVER_UPDATE").is_some() {
        std::fs::write(repository().join("docs/watch.md"), &page).unwrap();
        return;
    }
    let changed = page
        .lines()
        .zip(WATCH.lines())
        .find(|(now, before)| now != before);
    assert!(
        page == WATCH,
        "docs/watch.md is outdated; run this test with REDELIVER_UPDATE=1: {changed:?}"
    );
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

/// Tests of the console write them, so that they look like the console of today.
#[test]
fn pictures_are_small_and_used() {
    let docs = repository().join("docs");
    let mut pages = Vec::new();
    self::pages(&docs, &mut pages);
    let text: String = pages.iter().map(|page| prose(page)).collect();
    for entry in std::fs::read_dir(docs.join("pictures")).unwrap() {
        let entry = entry.unwrap();
        let (name, length) = (entry.file_name(), entry.metadata().unwrap().len());
        let name = name.to_string_lossy();
        assert!(length <= 150_000, "{name} has {length} bytes");
        assert!(
            text.contains(&format!("](pictures/{name})")),
            "no page shows {name}"
        );
    }
}

/// Those of `redeliver` are tested with its flags.
#[test]
fn commands_of_services_are_valid() {
    let mut pages = Vec::new();
    self::pages(&repository(), &mut pages);
    let mut count = 0;
    for page in &pages {
        let text = std::fs::read_to_string(page).unwrap();
        let lines = text.split("```").skip(1).step_by(2).flat_map(str::lines);
        for line in lines {
            let line = line.trim_start().trim_start_matches("$ ");
            let mut words = line.split(" #").next().unwrap().split_whitespace();
            let Some(service) = words.next().filter(|word| SERVICES.contains(word)) else {
                continue;
            };
            let mut command = binary(service);
            command
                .env_clear()
                .env("REDELIVER_CONFIG", deploy().join("compose/redeliver.yaml"))
                .current_dir(repository())
                .args(words.filter(|word| *word != "--check"))
                .arg("--check");
            let printed = redeliver_testkit::run(command);
            assert_eq!(printed.code, Some(0), "{}: {line}: {printed:?}", page.display());
            count += 1;
        }
    }
    assert!(count > 15, "only {count} commands");
}

#[test]
fn readme_is_short() {
    let length = std::fs::metadata(repository().join("README.md")).unwrap().len();
    assert!(length <= 8 * 1024, "README.md has {length} bytes");
}
