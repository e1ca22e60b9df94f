//! Audits on a real Kafka: every kind of planted defect is found, and a correct pipeline is clean at every moment.

mod plant;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use redeliver_audit::{AuditOptions, Auditor, Fault, Findings, Pace, PipelineAudit, Report, audit};
use redeliver_core::pipeline::ReturnTo;
use redeliver_core::{HandlerChanges, Output, SchedulerTopics, Timestamp};
use redeliver_testkit::{DEADLINE, ensure, eventually};

use crate::plant::{Plant, Stage, Word, change_headers};

fn report_of(plant: &Plant) -> Box<Report> {
    let options = AuditOptions {
        timeout: Duration::from_secs(30),
        ..AuditOptions::default()
    };
    Box::new(audit(&plant.settings, &plant.pipeline, &options).unwrap())
}

/// An audit in passes, each of which reads only what is new.
struct Passes {
    auditor: Auditor,
    audits: [PipelineAudit; 1],
}

impl Passes {
    /// Begins before there are records.
    fn new(plant: &Plant) -> Self {
        let audit = PipelineAudit::from_now(plant.pipeline.clone(), HandlerChanges::Nothing);
        let mut passes = Self {
            auditor: Auditor::new(&plant.settings, None, true).unwrap(),
            audits: [audit],
        };
        assert_eq!(passes.pass().source, 0);
        passes
    }

    fn pass(&mut self) -> Box<Report> {
        Box::new(self.try_pass().unwrap())
    }

    fn try_pass(&mut self) -> Result<Report, Fault> {
        let mut report = Err(Fault::Stopped);
        let stop = || false;
        let mut pace = Pace::new(Duration::from_secs(30), &stop);
        let now = Timestamp::from_millis(0);
        self.auditor
            .pass(&mut self.audits, now, &mut pace, |_, result| report = result);
        report
    }
}

/// The number of findings of each kind, and the sums.
fn verdict(report: &Report) -> ([(&'static str, u64); 5], [u64; 4]) {
    let defects = report.defects().map(|(name, findings)| (name, findings.count));
    (
        defects,
        [report.output, report.dead, report.uncounted, report.foreign.count],
    )
}

/// Plants the defect that the word of a record names.
fn plant_defect(stage: Stage, word: &str, outputs: &mut Vec<Output>) {
    match (stage, word) {
        (Stage::Worker, "lost") | (Stage::Relay, "lost-in-tier") => outputs.clear(),
        (Stage::Worker, "doubled") => outputs.push(outputs[0].clone()),
        (Stage::Worker, "output-changed") => outputs[0].value = None,
        (Stage::Worker, "dead-changed") => outputs[0].key = Some("other".into()),
        (Stage::Relay, "key-emptied") => outputs[0].key = Some("".into()),
        (Stage::Relay, "header-null") => change_headers(&mut outputs[0], |list| list[1].1 = None),
        _ => {}
    }
}

#[test]
fn all_planted_defects_are_found() {
    let mut plant = Plant::new("audit-defects", ReturnTo::Due);
    let mut words: Vec<Word> = vec![];
    for fine in ["fine", "dead", "retried", "stay", "tier", "due"] {
        words.extend([fine; 5]);
    }
    let defects = [
        ("lost", "lost"),
        ("lost-in-tier", "lost"),
        ("doubled", "doubled"),
        ("both", "doubled"),
        ("early", "early"),
        ("output-changed", "altered"),
        ("dead-changed", "altered"),
        ("key-emptied", "altered"),
        ("header-null", "altered"),
    ];
    words.extend(defects.iter().map(|(word, _)| *word));
    let mut passes = Passes::new(&plant);
    let origins = plant.produce(&words);
    plant.forge_in_tier();
    plant.start(Stage::Worker, plant_defect);
    plant.start(Stage::Relay, plant_defect);
    let ended = 15 + 7;
    eventually(
        "all records have ended that are not lost or waiting",
        DEADLINE,
        || {
            passes.pass();
            let report = report_of(&plant);
            let settled = report.output + report.dead == ended
                && report.waiting.total() == 15
                && report.lost.count == 2
                && report.foreign.count == 2;
            ensure(settled, report)
        },
    );
    plant.stop();
    let report = report_of(&plant);
    passes.pass();
    let passed = passes.pass();
    assert_eq!(verdict(&passed), verdict(&report), "{passed}\n{report}");
    // What was there before proves nothing.
    let mut later = Passes::new(&plant);
    assert!(later.pass().is_clean());

    let mut expected: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (word, defect) in defects {
        expected.entry(defect).or_default().insert(word);
    }
    let words_of = |findings: &Findings| -> BTreeSet<&str> {
        findings
            .sample
            .iter()
            .map(|finding| origins[&finding.origin])
            .collect()
    };
    let found: BTreeMap<&str, BTreeSet<&str>> = report
        .defects()
        .into_iter()
        .filter(|(_, findings)| !findings.is_empty())
        .map(|(name, findings)| (name, words_of(findings)))
        .collect();
    assert_eq!(found, expected, "{report}");
    assert_eq!(report.source, words.len() as u64);
    assert_eq!(
        (
            report.waiting.in_source,
            report.waiting.in_tiers,
            report.waiting.in_due
        ),
        (5, 5, 5)
    );
    assert_eq!(report.dead_by_class["permanent"], 6);
    assert!(report.min_margin_ms.unwrap() < 0, "{report}");
}

/// Audits a running pipeline repeatedly, across a restart of its stages, until all records have ended.
fn assert_clean_at_every_moment(name: &str, return_to: ReturnTo) {
    const ROUNDS: u64 = 150;
    let mut plant = Plant::new(name, return_to);
    let no_defect = |_: Stage, _: &str, _: &mut Vec<Output>| {};
    let mut passes = Passes::new(&plant);
    let mut was_audited_in_progress = false;
    let mut parts = 0;
    // At least one restart. On a slow machine, more parts until an audit has seen records in progress.
    while parts < 2 || !was_audited_in_progress {
        assert!(parts < 20, "no audit has seen records in progress");
        plant.start(Stage::Worker, no_defect);
        plant.start(Stage::Relay, no_defect);
        let producing = plant.produce_in_background(ROUNDS, &["fine", "retried", "dead", "fine", "retried"]);
        if parts == 0 {
            // These records stay incomplete, so that commits contain the offsets after them in their completed sets.
            plant.produce(&["stay", "due", "tier"]);
        }
        parts += 1;
        let expected = parts * ROUNDS * 5;
        eventually("all records have ended", DEADLINE, || {
            let report = report_of(&plant);
            for report in [&report, &passes.pass()] {
                assert!(report.is_clean(), "{report}");
                assert_eq!(
                    report.source,
                    report.output + report.dead + report.waiting.total(),
                    "{report}"
                );
            }
            was_audited_in_progress |= report.waiting.total() > 3 && report.output > 0;
            ensure(report.output + report.dead == expected, report)
        });
        producing.join().unwrap();
        plant.stop();
    }
    let report = report_of(&plant);
    let passed = passes.pass();
    assert_eq!(verdict(&passed), verdict(&report), "{passed}\n{report}");
    // Dead ones, and the three that wait.
    assert_eq!(passes.audits[0].kept() as u64, parts * ROUNDS + 2 * 3);
    assert_eq!(
        (report.output, report.dead),
        (4 * parts * ROUNDS, parts * ROUNDS),
        "{report}"
    );
    assert_eq!(report.waiting.total(), 3, "{report}");
    assert_eq!(
        report.retries,
        [(0, 2 * parts * ROUNDS), (1, 3 * parts * ROUNDS)].into()
    );
    assert!(report.min_margin_ms.unwrap() >= 0, "{report}");
    assert!(report.foreign.is_empty(), "{report}");
}

#[test]
fn running_pipeline_stays_clean() {
    assert_clean_at_every_moment("audit-clean", ReturnTo::Due);
}

#[test]
fn pipeline_returning_to_source_stays_clean() {
    assert_clean_at_every_moment("audit-requeue", ReturnTo::Source);
}

#[test]
fn changes_begin_an_audit_again() {
    let mut plant = Plant::new("audit-changes", ReturnTo::Due);
    let mut passes = Passes::new(&plant);
    plant.produce(&["fine", "dead", "fine"]);
    plant.start(Stage::Worker, |_, _, _| {});
    eventually("all records have ended", DEADLINE, || {
        let report = passes.pass();
        let has_ended = report.output + report.dead == 3;
        ensure(has_ended, report)
    });
    plant.stop();
    for change in [Plant::reset_offsets, Plant::recreate_output] {
        change(&plant);
        eventually("the change is noticed", DEADLINE, || match passes.try_pass() {
            Err(Fault::Changed) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        passes.audits[0].restart();
        let report = passes.pass();
        assert!(report.is_clean() && report.source == 0, "{report}");
    }
}

/// The scheduler's topics do not exist.
#[test]
fn failing_audit_does_not_affect_others() {
    let mut waiting = Plant::new("audit-waiting", ReturnTo::Due);
    let missing: Arc<str> = format!("{}-missing", waiting.pipeline.name).into();
    waiting.pipeline.long_waits = Some(missing.clone());
    let mut plain = Plant::new("audit-plain", ReturnTo::Due);
    let topics = SchedulerTopics {
        ingest: missing.clone(),
        state: missing.clone(),
        dlq: missing.clone(),
        answers: missing,
        apps: Vec::new(),
    };
    let scheduler = Some(("scheduler".to_owned(), topics));
    let mut auditor = Auditor::new(&plain.settings, scheduler, true).unwrap();
    let pipelines = [&waiting, &plain].map(|plant| plant.pipeline.clone());
    let names = pipelines.clone().map(|pipeline| pipeline.name.to_string());
    let mut audits = pipelines.map(|pipeline| PipelineAudit::from_now(pipeline, HandlerChanges::Nothing));
    let mut pass = || {
        let mut results = BTreeMap::new();
        let stop = || false;
        let mut pace = Pace::new(Duration::from_secs(30), &stop);
        auditor.pass(
            &mut audits,
            Timestamp::from_millis(0),
            &mut pace,
            |audit, result| {
                results.insert(audit.name().to_owned(), result);
            },
        );
        let [failed, found] = names.each_ref().map(|name| results.remove(name).unwrap());
        assert!(matches!(failed, Err(Fault::Read { .. })), "{failed:?}");
        found.unwrap()
    };
    assert!(pass().is_clean());
    plain.produce(&["fine", "dead"]);
    plain.start(Stage::Worker, |_, _, _| {});
    eventually("all records have ended", DEADLINE, || {
        let report = pass();
        let has_ended = (report.output, report.dead) == (1, 1);
        ensure(has_ended, report.to_string())
    });
    plain.stop();
}
