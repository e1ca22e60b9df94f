//! The rate of a pipeline while its source gets more partitions.

use std::collections::BTreeMap;
use std::time::Instant;

use redeliver_kafka::producer::Producer;
use redeliver_testkit::kafka_request::create_partitions;

use super::*;
use crate::support::origin;

/// Attempts per second.
const RATE: f64 = 20.0;
/// More than are attempted at this rate until the new partitions have had their share.
const BACKLOG: usize = 2_000;
const BEFORE: i32 = 4;
const AFTER: i32 = 8;

/// Lets processes with these instances work off a backlog while the source grows. `most`: how much of the rate they may use.
#[track_caller]
fn check_growth(name: &str, instances: &[&str], most: f64) {
    let (pipe, calls) = PipeBuilder::new(name)
        .partitions(BEFORE.unsigned_abs())
        .with_inspector()
        .set("control.topic", "{name}-control")
        .set("audit.topic", "{name}-audit")
        // Fewer records wait for an attempt than the new partitions have.
        .pipeline("in_flight", "64")
        .echo_with_times();
    let pipe = pipe.create();
    let mut enrichers: Vec<_> = instances.iter().map(|instance| pipe.enricher(instance)).collect();
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let cli = Cli::new(&pipe, &mut inspector);
    let pipeline = pipeline_of(&pipe);
    cli.change(&["pause", &pipeline]);
    for enricher in &mut enrichers {
        enricher.until_ready_but("paused pipelines: ");
    }
    let mut sent = pipe.produce(drafts("before", BACKLOG));
    cli.change(&["rate", &pipeline, &RATE.to_string()]);
    let began = Instant::now();
    cli.change(&["resume", &pipeline]);
    until_seen("attempts start", || pipe.endpoint.calls(), |&calls| calls >= 40);
    create_partitions(pipe.env.brokers(), &pipe.pipeline.source, AFTER);
    let producer = eventually("a producer knows the new partitions", DEADLINE, || {
        let producer = Producer::new(&pipe.kafka).unwrap();
        let more = pipe.produce_with(&producer, &pipe.pipeline.source, drafts("during", 50));
        let is_known = more.iter().any(|sent| sent.position.partition >= BEFORE);
        sent.extend(more);
        ensure(is_known, "it does not").map(|()| producer)
    });
    sent.extend(pipe.produce_with(&producer, &pipe.pipeline.source, drafts("after", 200)));
    eventually("each partition has had attempts since", DEADLINE, || {
        let mut ended: BTreeMap<i32, usize> = BTreeMap::new();
        for result in pipe.read(&pipe.end_topics()) {
            *ended.entry(origin(&result).partition).or_default() += 1;
        }
        let has_share = |partition| ended.get(&partition).is_some_and(|count| *count >= 5);
        (BEFORE..AFTER)
            .all(has_share)
            .then_some(())
            .ok_or_else(|| format!("{ended:?}"))
    });
    let attempts = calls.lock().unwrap().clone();
    assert!(
        attempts.len() < BACKLOG,
        "the new partitions had to wait for the others"
    );
    // Each bucket holds one second's worth, and one attempt at least.
    let burst = RATE * most + instances.len() as f64;
    for (count, at) in (1_u32..).zip(&attempts) {
        let allowed = RATE * most * (*at - began).as_secs_f64() + burst;
        assert!(
            f64::from(count) <= allowed,
            "{count} attempts, {allowed} are allowed after {:?}",
            *at - began
        );
    }
    cli.change(&["rate", &pipeline, "configured"]);
    let report = pipe.settle(&sent, DEADLINE).report;
    assert_eq!((report.output, report.dead), (sent.len() as u64, 0), "{report}");
}

#[test]
fn pipeline_rate_survives_source_growth() {
    check_growth("control-growth", &["a"], 1.0);
}

/// For two seconds, a process may not know of all partitions of which it has some. Then its part is too large: in both of them together by as much as the
/// topics have grown, the source and the due topic from 8 to 12 partitions.
#[test]
#[ignore = "long"]
fn two_processes_share_rate_during_growth() {
    check_growth("control-growth-two", &["a", "b"], 1.5);
}
