//! Pausing, limiting and releasing pipelines and tiers at run time, over the inspector. Applications: the tests of the scheduler.

mod growth;
mod scheduler_waits;

use std::sync::Arc;

use redeliver_core::headers::PROCESS_AFTER;
use redeliver_core::{Clock, SystemClock, Timestamp};
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{
    CommandOutput, Reply, Request, ServiceProcess, ensure, eventually, unique_delays, until_seen,
};
use serde_json::{Value, json};

use crate::retries::{drafts, header};
use crate::support::{DEADLINE, Pipe, PipeBuilder, Sent, words};

/// Fails once for each record.
fn recovers(request: &Request) -> Reply {
    match request.earlier_calls_of_key {
        0 => Reply::status(503),
        _ => Reply::ok(request.body.clone()),
    }
}

/// A pipeline with an inspector, and a control topic that no other test uses.
fn setup(name: &str, tier: u64) -> Pipe {
    PipeBuilder::new(name)
        .tiers(&[tier])
        .with_inspector()
        .set("control.topic", "{name}-control")
        .set("audit.topic", "{name}-audit")
        .behave(recovers)
        .create()
}

/// The commands, with the address of an inspector.
pub(crate) struct Cli<'p> {
    pipe: &'p Pipe,
    server: String,
}

impl<'p> Cli<'p> {
    pub(crate) fn new(pipe: &'p Pipe, inspector: &mut ServiceProcess) -> Self {
        let cli = Self {
            pipe,
            server: format!("http://{}", inspector.word_after(" api=")),
        };
        eventually("the inspector has read the controls", DEADLINE, || {
            let printed = cli.run(&["controls"]);
            ensure(printed.code == Some(0), printed.stderr)
        });
        cli
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        self.pipe.redeliver(&self.with_server(arguments))
    }

    fn with_server<'a>(&'a self, arguments: &[&'a str]) -> Vec<&'a str> {
        let server = ["--server", &self.server, "-o", "json"];
        [arguments, &server[..]].concat()
    }

    /// Changes something, and returns what applies then.
    #[track_caller]
    pub(crate) fn change(&self, arguments: &[&str]) -> Value {
        let arguments = [arguments, &["--reason", "test"]].concat();
        let printed = self.pipe.until_taken(&self.with_server(&arguments));
        assert_eq!(printed.code, Some(0), "{printed:?}");
        let mut json: Value = serde_json::from_str(&printed.stdout).unwrap();
        json["effective"].take()
    }
}

pub(crate) fn tier_of(pipe: &Pipe) -> String {
    format!("tier/{}/{}", pipe.name(), pipe.pipeline.policy.tiers()[0])
}

fn pipeline_of(pipe: &Pipe) -> String {
    format!("pipeline/{}", pipe.name())
}

fn released(pipe: &Pipe) -> usize {
    pipe.read(&[pipe.pipeline.due_topic()]).len()
}

/// Waits until everything that waits in the tier is due.
#[track_caller]
fn until_all_are_due(pipe: &Pipe) {
    let waiting = pipe.read(&[pipe.first_tier()]);
    let last: Timestamp = waiting
        .iter()
        .map(|record| header(record, PROCESS_AFTER))
        .max()
        .unwrap();
    eventually("everything is due", DEADLINE, || {
        let now = SystemClock.now();
        ensure(now > last, format!("{now}, due at {last}"))
    });
}

#[test]
fn pauses_survive_restarts_of_everything() {
    let pipe = setup("control-pause", 2_000);
    let mut enricher = pipe.enricher("a");
    let mut relay = pipe.retry_tier("a");
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let (tier, pipeline) = (tier_of(&pipe), pipeline_of(&pipe));
    let notes = [
        format!("paused tiers: {}", tier.trim_start_matches("tier/")),
        format!("paused pipelines: {}", pipe.name()),
    ];
    let cli = Cli::new(&pipe, &mut inspector);
    assert_eq!(
        cli.change(&["pause", &tier]),
        json!({"state": "paused", "rate": null})
    );
    relay.until_ready_but(&notes[0]);
    let mut sent = pipe.produce(drafts("first", 50));
    pipe.until_waiting(50);
    cli.change(&["pause", &pipeline]);
    enricher.until_ready_but(&notes[1]);
    let calls = pipe.endpoint.calls();
    sent.extend(pipe.produce(drafts("second", 20)));

    for process in [&mut enricher, &mut relay, &mut inspector] {
        process.kill_9();
        process.start_again();
    }
    relay.until_ready_but(&notes[0]);
    enricher.until_ready_but(&notes[1]);
    inspector.until_ready();
    assert_eq!(relay.metric("redeliver_tier_paused"), 1);
    assert_eq!(enricher.metric("redeliver_worker_paused"), 1);
    until_all_are_due(&pipe);
    assert_eq!((released(&pipe), pipe.endpoint.calls()), (0, calls));

    // The tiers of a paused pipeline go on.
    let cli = Cli::new(&pipe, &mut inspector);
    cli.change(&["resume", &tier]);
    until_seen("released", || released(&pipe), |&other| other == 50);
    assert_eq!(pipe.endpoint.calls(), calls);
    cli.change(&["resume", &pipeline]);
    let report = pipe.settle(&sent, DEADLINE).report;
    assert!(report.min_margin_ms >= Some(0), "{report}");
    // No attempt was lost to a pause.
    assert_eq!(report.retries, [(1, 70)].into(), "{report}");
    let audited = cli.run(&["dlq", "audit", "--action", "control.*"]);
    let resumed = audited.stdout.matches("\"control.resume\"").count();
    assert_eq!(resumed, 2, "{audited:?}");
}

/// Releases what waits in a tier whose delay no test waits for. The relay is killed in the middle.
#[track_caller]
fn check_release(count: usize, per_second: &str) {
    let pipe = setup("control-release", 3_600_000);
    let _enricher = pipe.enricher("a");
    let mut relay = pipe.retry_tier("a");
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let cli = Cli::new(&pipe, &mut inspector);
    let tier = tier_of(&pipe);
    // So that a release takes long enough to be interrupted.
    cli.change(&["rate", &tier, per_second]);
    let sent = pipe.produce(drafts("waits", count));
    pipe.until_waiting(count);
    let released_at = cli.change(&["release", &tier])["released_at"].clone();
    assert!(released_at.is_string(), "{released_at}");
    let late = pipe.produce(drafts("late", 20));
    for _ in 0..3 {
        let before = released(&pipe);
        until_seen("released", || released(&pipe), |&n| n > before || n >= count);
        relay.kill_9();
        relay.start_again();
    }
    // Exactly once, and not what came later.
    let mut watch = pipe.watch();
    watch.until_ended(count, DEADLINE);
    pipe.until_waiting(count + late.len());
    let report = pipe.audit();
    assert!(report.is_clean(), "{report}");
    assert_eq!(
        (report.output, report.waiting.total()),
        (count as u64, late.len() as u64),
        "{report}"
    );
    assert_eq!(released(&pipe), count);

    cli.change(&["release", &tier]);
    let all: Vec<Sent> = sent.into_iter().chain(late).collect();
    let report = pipe.settle(&all, DEADLINE).report;
    assert_eq!((report.output, report.dead), (all.len() as u64, 0), "{report}");
}

#[test]
fn release_survives_kills_exactly_once() {
    check_release(1_000, "250");
}

#[test]
#[ignore = "long"]
fn large_release_survives_kills_exactly_once() {
    check_release(100_000, "10000");
}

/// How many records of an enricher wait for their first or next attempt.
fn waiting_for_an_attempt(enricher: &mut ServiceProcess, pipe: &Pipe) -> u64 {
    let labels = format!("pipeline=\"{}\",reason=\"attempt\"", pipe.name());
    enricher.metric(&format!("redeliver_worker_waiting_records{{{labels}}}"))
}

#[test]
fn pipeline_rate_survives_restarts() {
    const RECORDS: usize = 40;
    let pipe = setup("control-rate", 1_000);
    let mut enricher = pipe.enricher("a");
    let _relay = pipe.retry_tier("a");
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let cli = Cli::new(&pipe, &mut inspector);
    let pipeline = pipeline_of(&pipe);
    // So that it applies before there are records: changes are read in their order.
    cli.change(&["pause", &pipeline]);
    enricher.until_ready_but("paused pipelines: ");
    let sent = pipe.produce(drafts("limited", RECORDS));
    assert_eq!(
        cli.change(&["rate", &pipeline, "0.001"]),
        json!({"state": "paused", "rate": 0.001})
    );
    cli.change(&["resume", &pipeline]);
    // A process has one attempt at first, and the next one after a quarter of an hour. The record whose attempt has failed comes back.
    for starts in 1..=2 {
        eventually("all records wait for an attempt", DEADLINE, || {
            let (calls, waiting) = (
                pipe.endpoint.calls(),
                waiting_for_an_attempt(&mut enricher, &pipe),
            );
            // The second one may be the retry of the first one.
            let ended = pipe.read(&pipe.end_topics()).len() as u64;
            let is_reached = (calls, waiting + ended) == (starts, RECORDS as u64);
            let holds = is_reached;
            ensure(holds, format!("{calls} calls, {waiting} waiting, {ended} ended"))
        });
        enricher.kill_and_restart();
    }
    assert_eq!(
        cli.change(&["rate", &pipeline, "configured"]),
        json!({"state": "running", "rate": null})
    );
    let report = pipe.settle(&sent, DEADLINE).report;
    assert_eq!((report.output, report.dead), (RECORDS as u64, 0), "{report}");
    assert_eq!(report.retries, [(1, RECORDS as u64)].into(), "{report}");
}

#[test]
fn whole_tier_is_limited_and_released() {
    const RECORDS: usize = 40;
    let delay = unique_delays(&[3_600_000])[0];
    let builder = PipeBuilder::new("control-whole");
    let other = format!("{}-b", builder.name());
    let of_other = |key: &str| format!("pipelines.{other}.{key}");
    let pipe = builder
        .shared_tiers(&[delay])
        .with_inspector()
        .set("control.topic", "{name}-control")
        .set("audit.topic", "{name}-audit")
        .set(&of_other("output"), "{name}-b-out")
        .set(&of_other("retry.tiers"), &format!("[{delay}ms]"))
        .set(&of_other("breaker.failures"), "0")
        // Nothing answers there.
        .set(&of_other("http.url"), "http://127.0.0.1:9/")
        .behave(recovers)
        .create();
    let _enricher = pipe.enricher("a");
    let _relay = pipe.retry_tier("a");
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let cli = Cli::new(&pipe, &mut inspector);
    let whole = format!("tier/{}", pipe.pipeline.policy.tiers()[0]);
    let other_pipeline = redeliver_core::Pipeline::new(&other);
    let other_tier = other_pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
    let topics = [pipe.pipeline.due_topic(), other_pipeline.due_topic()];
    let until = |what: &str, topics: &[Arc<str>], expected: &dyn Fn(usize) -> bool| {
        for topic in topics {
            let count = || pipe.read(std::slice::from_ref(topic)).len();
            until_seen(what, count, |&count| expected(count));
        }
    };
    pipe.produce(drafts("own", RECORDS));
    pipe.produce_to(&other.as_str().into(), drafts("other", RECORDS));
    let tiers = [pipe.first_tier(), other_tier.clone()];
    until("the records wait", &tiers, &|count| count == RECORDS);

    // Each partition may release one record at first.
    cli.change(&["rate", &whole, "0.001"]);
    let release = || cli.run(&["release", &whole, "--reason", "test"]);
    let released = release();
    assert_eq!(released.code, Some(0), "{released:?}");
    let results: Value = serde_json::from_str(&released.stdout).unwrap();
    let names: Vec<&str> = results
        .as_array()
        .unwrap()
        .iter()
        .filter(|result| result["released"]["effective"]["released_at"].is_string())
        .filter_map(|result| result["name"].as_str())
        .collect();
    let other_name = format!("tier/{other}/{}", pipe.pipeline.policy.tiers()[0]);
    assert_eq!(names, [tier_of(&pipe), other_name.clone()]);
    until("a record of each partition is released", &topics, &|count| {
        count == pipe.env.partitions() as usize
    });
    cli.change(&["rate", &whole, "unlimited"]);
    until("everything is released", &topics, &|count| count == RECORDS);
    let report = pipe.audit();
    assert!(report.is_clean(), "{report}");

    delete_topic(pipe.env.brokers(), &other_tier);
    let partly = release();
    assert_eq!(partly.code, Some(1), "{partly:?}");
    assert!(partly.stderr.contains("1 of 2 tiers failed"), "{partly:?}");
    let results: Value = serde_json::from_str(&partly.stdout).unwrap();
    assert!(results[0]["released"].is_object(), "{results}");
    assert_eq!(
        (&results[1]["name"], &results[1]["failure"]["reason"]),
        (&json!(other_name), &json!("KAFKA_UNAVAILABLE")),
        "{results}"
    );
}

#[test]
fn missing_control_topic_keeps_controls() {
    let pipe = setup("control-gone", 1_000);
    let mut enricher = pipe.enricher("a");
    let mut relay = pipe.retry_tier("a");
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let cli = Cli::new(&pipe, &mut inspector);
    let tier = tier_of(&pipe);
    cli.change(&["pause", &tier]);
    relay.until_ready_but("paused tiers: ");
    let sent = pipe.produce(drafts("waits", 30));
    pipe.until_waiting(30);
    let topic: Arc<str> = format!("{}-control", pipe.name()).into();
    delete_topic(pipe.env.brokers(), &topic);
    let last = "the control topic cannot be read, so what it contained last applies";
    relay.until_ready_but(last);
    enricher.until_ready_but(last);
    until_all_are_due(&pipe);
    assert_eq!(released(&pipe), 0);
    let unavailable = cli.run(&["resume", &tier]);
    assert_eq!(unavailable.code, Some(1), "{unavailable:?}");

    let check = pipe.redeliver(&["topics", "check"]);
    assert!(
        check.code == Some(1) && check.stdout.contains(&*topic),
        "{check:?}"
    );
    for process in [&mut enricher, &mut relay] {
        process.kill_9();
        process.start_again();
        let output = process.wait_for_output("redeliver topics apply", DEADLINE);
        assert!(output.contains(&*topic), "{output}");
        process.wait(DEADLINE);
    }
    assert_eq!(released(&pipe), 0);
    let applied = pipe.redeliver(&["topics", "apply"]);
    assert_eq!(applied.code, Some(0), "{applied:?}");
    for process in [&mut enricher, &mut relay] {
        process.start_again();
        process.until_ready();
    }
    pipe.settle(&sent, DEADLINE);
}

#[test]
fn impossible_controls_are_refused() {
    let pipe = setup("control-names", 1_000);
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let cli = Cli::new(&pipe, &mut inspector);
    let (tier, pipeline) = (tier_of(&pipe), pipeline_of(&pipe));
    let whole = format!("tier/{}", pipe.pipeline.policy.tiers()[0]);
    let other_tier = format!("tier/{}/7d", pipe.name());
    for (arguments, says) in [
        (format!("pause {other_tier}"), "not found"),
        ("pause tier/7d".to_owned(), "tier/7d not found"),
        (format!("release {pipeline}"), "has nothing to release"),
        (
            format!("release {whole} --expected-revision 1"),
            "is not possible with a tier of all pipelines",
        ),
    ] {
        let refused = cli.run(&words(&format!("{arguments} --reason test")));
        assert!(
            refused.code != Some(0) && refused.stderr.contains(says),
            "{arguments}: {refused:?}"
        );
    }
    cli.change(&["rate", &tier, "0.5"]);
    cli.change(&["pause", &pipeline]);
    let listed = cli.run(&["controls"]);
    let listed: Value = serde_json::from_str(&listed.stdout).unwrap();
    let names: Vec<&str> = listed
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|control| control["name"].as_str())
        .collect();
    assert_eq!(names, [&*pipeline, &*tier]);
    // The lower of two rates applies.
    cli.change(&["rate", &whole, "0.25"]);
    let rate = |name: &str| {
        let shown = cli.run(&["controls", name]);
        let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
        shown["effective"]["rate"].clone()
    };
    assert_eq!((rate(&tier), rate(&whole)), (json!(0.25), json!(0.25)));
    cli.change(&["rate", &whole, "unlimited"]);
    assert_eq!((rate(&tier), rate(&whole)), (json!(0.5), Value::Null));
    let stale = cli.run(&["resume", &pipeline, "--expected-revision", "0"]);
    assert!(stale.stderr.contains("has revision 1"), "{stale:?}");
}
