//! Waits longer than every tier go through the scheduler. The records come back once, unchanged, and not early.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::PROCESS_AFTER;
use redeliver_core::{Clock, Record, SchedulerTopics, SystemClock, Timestamp};
use redeliver_proto::long_wait;
use redeliver_testkit::{Fate, Reply, Request, Trouble, eventually};

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, Sent, origin, records, text};

/// Requests a wait of this many seconds on the first call, then succeeds.
fn later(seconds: &'static str) -> impl Fn(&Request) -> Reply + Send + Sync {
    move |request| {
        if request.earlier_calls_of_body == 0 {
            let headers = vec![("retry-after".to_owned(), seconds.to_owned())];
            Reply::Status(503, headers, "later".into())
        } else {
            Reply::ok(request.body.clone())
        }
    }
}

/// A pipeline with tiers shorter than a second, and a scheduler.
fn setup(name: &str) -> PipeBuilder {
    PipeBuilder::new(name).tiers(&[300, 600]).through_scheduler()
}

fn jobs(pipe: &Pipe) -> &SchedulerTopics {
    let (_, topics) = pipe.jobs.as_ref().unwrap();
    topics
}

/// The records of the pipeline in the ingest topic.
fn commanded(pipe: &Pipe) -> Vec<Record> {
    let commands = pipe.read(&[jobs(pipe).ingest.clone()]);
    let held = commands
        .iter()
        .map(|command| long_wait::unwrap(pipe.name(), command));
    held.map(Option::unwrap).collect()
}

/// The records of the pipeline that wait in the state topic.
fn held(pipe: &Pipe) -> BTreeMap<Vec<u8>, Record> {
    let mut held = BTreeMap::new();
    for job in pipe.read(&[jobs(pipe).state.clone()]) {
        let id = job.key.as_deref().unwrap_or_default().to_vec();
        match long_wait::unwrap_state(pipe.name(), &job) {
            Some(record) => drop(held.insert(id, record)),
            None => drop(held.remove(&id)),
        }
    }
    held
}

fn by_origin(records: Vec<Record>) -> BTreeMap<String, Record> {
    let count = records.len();
    let by_origin: BTreeMap<_, _> = records
        .into_iter()
        .map(|record| (origin(&record).id(), record))
        .collect();
    assert_eq!(by_origin.len(), count, "each record once");
    by_origin
}

/// Each record must come back once, unchanged, and not before it was due.
#[track_caller]
fn came_back_as_they_were(pipe: &Pipe, sent: &[Sent]) {
    let given = by_origin(commanded(pipe));
    let returned = pipe.read(&[pipe.pipeline.return_topic()]).into_iter();
    let is_back = |record: &Record| text(record, PROCESS_AFTER).unwrap().is_some();
    let returned = by_origin(returned.filter(is_back).collect());
    assert_eq!((given.len(), returned.len()), (sent.len(), sent.len()));
    for (origin, back) in &returned {
        let given = &given[origin];
        assert_eq!((&back.key, &back.value), (&given.key, &given.value), "{origin}");
        assert_eq!(back.headers, given.headers, "{origin}");
        let due: Timestamp = text(back, PROCESS_AFTER).unwrap().unwrap().parse().unwrap();
        assert!(back.timestamp >= Some(due), "{origin} is early: {back:?}");
    }
    let tiers = pipe.pipeline.policy.tiers().iter();
    let tiers: Vec<Arc<str>> = tiers.map(|tier| pipe.pipeline.tier_topic(*tier)).collect();
    assert!(pipe.read(&tiers).is_empty(), "nothing went through a tier");
}

#[test]
fn long_wait_returns_to_source() {
    let behaviour = |request: &Request| match request.earlier_calls_of_body {
        0 => Reply::status(503),
        _ => Reply::ok(request.body.clone()),
    };
    let setup = setup("long-wait-anchor").pipeline("return_to", "source");
    let pipe = setup
        .pipeline("anchor", "{ pointer: /at }")
        .behave(behaviour)
        .create();
    let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let _scheduler = pipe.scheduler("a");
    let at = SystemClock.now().after(Duration::from_secs(5));
    let draft = |n: usize| Draft::new(format!("k{n}"), format!("{{\"n\":{n},\"at\":\"{at}\"}}"));
    let sent = pipe.produce((0..100).map(draft).collect());
    let ends = pipe.settle(&sent, DEADLINE);
    let failed_once = Fate::Recovers {
        failures: 1,
        trouble: Trouble::Unavailable,
    };
    ends.meets_with(&sent, |_| failed_once);
    came_back_as_they_were(&pipe, &sent);
}

#[test]
fn killed_scheduler_returns_each_record_once() {
    let pipe = setup("long-wait-kill").behave(later("4")).create();
    let (mut enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let mut scheduler = pipe.scheduler("a");
    // Longer than the job of an application may be.
    let mut sent = pipe.produce(vec![Draft::new("long", vec![b'x'; 950_000])]);
    for round in 0..3 {
        let drafts = records(100).into_iter().map(|draft| Draft {
            value: Some(
                [&draft.value.unwrap()[..], format!("round {round}").as_bytes()]
                    .concat()
                    .into(),
            ),
            ..draft
        });
        sent.extend(pipe.produce(drafts.collect()));
        let enough = sent.len() * 9 / 10;
        eventually("most have been given away", DEADLINE, || {
            match commanded(&pipe).len() {
                count if count >= enough => Ok(()),
                count => Err(count),
            }
        });
        scheduler.kill_9();
        scheduler = pipe.scheduler("a");
    }
    let ends = pipe.settle(&sent, DEADLINE);
    // A requested wait uses no attempt.
    ends.meets_with(&sent, |_| Fate::Succeeds);
    assert!(ends.report.min_margin_ms >= Some(0), "{}", ends.report);
    came_back_as_they_were(&pipe, &sent);
    assert!(held(&pipe).is_empty());
    let long_waits = enricher.metric("redeliver_worker_long_waits_total");
    assert_eq!(long_waits, sent.len() as u64);
}
