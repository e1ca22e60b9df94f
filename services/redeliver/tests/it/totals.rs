//! Each service says at its end what it has done.

use std::collections::BTreeMap;

use redeliver_testkit::{ServiceProcess, eventually};

use crate::services::{APP, Services};
use crate::support::{DEADLINE, Draft, PipeBuilder};

const LINE: &str = "totals since the start ";

/// The fields of the one line with the totals.
#[track_caller]
pub(crate) fn totals(process: &ServiceProcess) -> BTreeMap<String, String> {
    let output = process.output();
    let lines: Vec<&str> = output
        .lines()
        .filter_map(|line| Some(line.split_once(LINE)?.1))
        .collect();
    let [fields] = lines[..] else {
        panic!("{} lines with totals: {output}", lines.len());
    };
    let fields = fields.split(' ').filter_map(|field| field.split_once('='));
    fields
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[track_caller]
fn assert_totals(process: &ServiceProcess, service: &str, expected: &[(&str, u64)]) {
    let totals = totals(process);
    assert_eq!(totals["service"], format!("{service:?}"));
    assert!(totals["uptime_seconds"].parse::<u64>().is_ok(), "{totals:?}");
    for (name, value) in expected {
        assert_eq!(
            totals.get(*name),
            Some(&value.to_string()),
            "{name} of {service}: {totals:?}"
        );
    }
}

#[test]
fn every_service_logs_what_it_has_done_when_it_ends() {
    let services = Services::new("totals");
    let pipe = &services.pipe;
    let (mut scheduler, mut enricher) = (pipe.scheduler("a"), pipe.enricher("a"));
    let (mut tier, mut inspector) = (pipe.retry_tier("a"), services.inspect());
    pipe.produce(
        ["fine", "hopeless", "busy"]
            .map(|body| Draft::new(body, body))
            .to_vec(),
    );
    let job = format!(r#"{{ "appName": "{APP}", "delay": "0s", "jobData": "a job" }}"#);
    let unknown = r#"{ "appName": "nobody", "delay": "0s", "jobData": "a job" }"#.to_owned();
    let (_, jobs) = pipe.jobs.as_ref().unwrap();
    pipe.produce_to(
        &jobs.ingest,
        [job, unknown].map(|body| Draft::new("", body)).to_vec(),
    );
    pipe.watch().until_ended(4, DEADLINE);
    eventually("the dead letters are indexed", DEADLINE, || {
        match inspector.metric("redeliver_dlq_indexed_total") {
            // Two of the pipeline, and the rejected request for a job.
            3 => Ok(()),
            indexed => Err(indexed),
        }
    });
    for process in [&mut scheduler, &mut enricher, &mut tier, &mut inspector] {
        process.shut_down();
    }
    let worker = [
        ("completed", 5),
        ("succeeded", 2),
        ("retried", 1),
        ("dead", 2),
        ("forgotten", 0),
    ];
    assert_totals(&enricher, "enricher", &worker);
    assert_totals(
        &tier,
        "retry-tier",
        &[("completed", 1), ("written", 1), ("released", 1), ("moved", 0)],
    );
    let jobs = [
        ("received", 2),
        ("accepted", 1),
        ("rejected", 1),
        ("dispatched", 1),
        ("cancelled", 0),
    ];
    assert_totals(&scheduler, "scheduler", &jobs);
    assert_totals(&inspector, "dlq-inspector", &[("indexed", 3)]);
    let of_enricher = totals(&enricher);
    assert!(!of_enricher.contains_key("dispatched"), "{of_enricher:?}");
}

#[test]
fn a_service_that_fails_logs_its_totals_too() {
    let pipe = PipeBuilder::new("totals-error").without_topics();
    let mut enricher = pipe.spawn("enricher", "a", &[]);
    assert_eq!(enricher.wait(DEADLINE).code(), Some(1));
    assert_eq!(totals(&enricher)["service"], "\"enricher\"");
    assert!(
        enricher.output().contains("topics are missing"),
        "{}",
        enricher.output()
    );
}
