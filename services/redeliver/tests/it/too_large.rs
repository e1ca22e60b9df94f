//! A record that is too large for its topic becomes a dead letter, and all other records continue.

use std::collections::BTreeSet;
use std::sync::Arc;

use redeliver_core::Record;
use redeliver_core::headers::{
    ERROR_CLASS, ERROR_CODE, ERROR_MESSAGE, JOB_ID, ORIGINAL_TOPIC, PAYLOAD_OMITTED,
};
use redeliver_testkit::{Reply, Request, brokers, ensure, eventually};

use crate::raw;
use crate::support::{DEADLINE, Draft, Ends, Pipe, PipeBuilder, Sent, text, users_headers};

/// The largest batch that a narrow topic accepts, in bytes.
const NARROW: &str = "2000";

/// Records whose number is divisible by this are as large as this says.
fn drafts(count: usize, every: usize, size: usize) -> Vec<Draft> {
    let draft = |n: usize| {
        let mut value = format!("record {n} ").into_bytes();
        if n.is_multiple_of(every) {
            value.resize(size, b'x');
        }
        Draft::new(format!("key-{}", n % 17), value).header("tenant", b"a")
    };
    (0..count).map(draft).collect()
}

#[track_caller]
fn has(record: &Record, name: &str, expected: Option<&str>) {
    assert_eq!(
        text(record, name).unwrap().as_deref(),
        expected,
        "{name} of {record:?}"
    );
}

/// Checks a complete dead letter.
#[track_caller]
fn died_whole(pipe: &Pipe, ends: &Ends, sent: &Sent, code: &str) {
    let letter = ends.of(sent);
    assert_eq!(letter.position.topic, pipe.pipeline.dead_letter_topic());
    assert_eq!((&letter.key, &letter.value), (&sent.draft.key, &sent.draft.value));
    assert_eq!(users_headers(&letter.headers), sent.draft.headers);
    has(letter, ERROR_CLASS, Some("permanent"));
    has(letter, ERROR_CODE, Some(code));
    has(letter, PAYLOAD_OMITTED, None);
}

#[test]
fn too_large_results_become_dead_letters() {
    // Small records fail once, so that they return between the large ones.
    let setup = PipeBuilder::new("narrow")
        .partitions(1)
        .tiers(&[300])
        .behave(|request: &Request| {
            let is_first = request.earlier_calls_of_body == 0;
            if is_first && request.body.len() < 1_000 && request.body.len().is_multiple_of(2) {
                Reply::status(503)
            } else {
                Reply::ok(request.body.clone())
            }
        });
    let output = format!("{}-out", setup.name());
    raw::create_topic(&brokers(), &output, &[("max.message.bytes", NARROW)]);
    let pipe = setup.create();
    let (mut enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let sent = pipe.produce(drafts(300, 10, 5_000));
    let ends = pipe.settle(&sent, DEADLINE);
    assert_eq!(ends.report.dead, 30, "{}", ends.report);
    for sent in sent.iter().filter(|sent| sent.body().len() == 5_000) {
        died_whole(&pipe, &ends, sent, "output.too-large");
        let message = text(ends.of(sent), ERROR_MESSAGE).unwrap().unwrap();
        assert!(message.contains(&format!("`{output}`")), "{message}");
        assert_eq!(pipe.endpoint.calls_of_body(sent.body()), 1, "called again");
    }
    assert_eq!(enricher.get("/readyz").0, 200);
}

#[test]
fn too_large_job_becomes_dead_letter() {
    let setup = PipeBuilder::new("narrow-jobs").partitions(1).through_scheduler();
    let narrow: Arc<str> = format!("{}-sms", setup.name()).into();
    raw::create_topic(&brokers(), &narrow, &[("max.message.bytes", NARROW)]);
    let pipe = setup.set("scheduler.apps.sms.topic", &narrow).create();
    let mut scheduler = pipe.scheduler("a");
    let (_, topics) = pipe.jobs.clone().unwrap();
    let data = |n: usize| {
        let size = if n.is_multiple_of(10) { 5_000 } else { 10 };
        format!("\"job {n} {}\"", "x".repeat(size))
    };
    let request = |n: usize| {
        let delay = if n.is_multiple_of(4) { 0 } else { 500 };
        let request = format!(r#"{{"appName":"sms","delay":"{delay}ms","jobData":{}}}"#, data(n));
        Draft::new(format!("key-{n}"), request)
    };
    pipe.produce_to(&topics.ingest, (0..200).map(request).collect());
    let ended = eventually("all jobs have ended", DEADLINE, || {
        let ended = pipe.read(&[narrow.clone(), topics.dlq.clone()]);
        ensure(ended.len() >= 200, ended.len()).map(|()| ended)
    });
    let (letters, dispatched): (Vec<_>, Vec<_>) = ended
        .iter()
        .partition(|record| record.position.topic == topics.dlq);
    assert_eq!((letters.len(), dispatched.len()), (20, 180));
    let values: BTreeSet<&[u8]> = ended
        .iter()
        .map(|record| record.value.as_deref().unwrap())
        .collect();
    let expected: Vec<String> = (0..200).map(data).collect();
    assert_eq!(values, expected.iter().map(String::as_bytes).collect());
    for letter in letters {
        assert!(letter.value.as_ref().unwrap().len() > 5_000);
        has(letter, ERROR_CODE, Some("output.too-large"));
        has(letter, ORIGINAL_TOPIC, Some(&topics.ingest));
        assert!(text(letter, JOB_ID).unwrap().is_some());
    }
    assert_eq!(scheduler.get("/readyz").0, 200);
}
