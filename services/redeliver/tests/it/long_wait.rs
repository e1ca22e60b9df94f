//! Waits longer than every tier go through the scheduler. The records come back once, unchanged, and not early.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::headers::{ERROR_MESSAGE, PROCESS_AFTER};
use redeliver_core::{Clock, Record, SchedulerTopics, SystemClock, Timestamp};
use redeliver_proto::long_wait;
use redeliver_testkit::{Fate, Reply, Request, ServiceProcess, Trouble, ensure, eventually, until_seen};

use crate::services::Services;
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
        until_seen("given away", || commanded(&pipe).len(), |&n| n >= enough);
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

/// The scheduler is killed as soon as a command to act on this record is written; the next one decides it, if the killed one did not. A repetition changes
/// nothing.
#[track_caller]
fn act_while_killed(services: &Services, scheduler: &mut ServiceProcess, verb: &str, job: &str) {
    let act = || {
        let arguments = ["waiting", verb, job, "--reason", "INC-17", "-o", "json"];
        services.pipe.redeliver(&arguments)
    };
    let ingest = [jobs(&services.pipe).ingest.clone()];
    let before = services.pipe.read(&ingest).len();
    std::thread::scope(|scope| {
        // Its connection ends, so what it is told does not matter.
        let asked = scope.spawn(act);
        eventually("the command is written", DEADLINE, || {
            let is_written = services.pipe.read(&ingest).len() > before;
            ensure(is_written, "it is not")
        });
        scheduler.kill_9();
        asked.join().unwrap();
    });
    *scheduler = services.pipe.scheduler("a");
    eventually("the action is repeated", DEADLINE, || {
        let again = act();
        // If the killed scheduler has not decided, the command comes before this one: then the record is due, or has left.
        matches!(again.code, Some(0 | 3))
            .then_some(())
            .ok_or(format!("{again:?}"))
    });
}

#[test]
fn operator_acts_on_each_wait_once() {
    let services = Services::new("long-wait-acts");
    let mut scheduler = services.pipe.scheduler("a");
    let _inspector = services.inspect();
    let enricher = services.pipe.enricher("a");
    let bodies: Vec<String> = (0..7).map(|number| format!("later-{number}")).collect();
    let drafts = bodies
        .iter()
        .map(|body| Draft::new(format!("key-{body}"), body.clone()));
    let sent = services.pipe.produce(drafts.collect());
    let listed = |more: &[&str]| services.json(&[&["waiting", "ls", "--place", "scheduler"], more].concat());
    until_seen("held", || held(&services.pipe).len(), |&count| count == 7);
    // What comes back stays where it is.
    drop(enricher);
    let job = |number: usize| {
        let found = listed(&["--origin", &sent[number].position.to_string()]);
        assert_eq!(found["matching"], 1, "{found}");
        found["records"][0]["job_id"].as_str().unwrap().to_owned()
    };
    let ids: Vec<String> = (0..7).map(job).collect();

    let shown = services.json(&["waiting", "show", &ids[0]]);
    assert_eq!(shown["record"]["job_id"], ids[0].as_str(), "{shown}");
    let refused = services.fails(2, &["waiting", "edit", &ids[0], "--header", "a=b"]);
    assert!(refused.stderr.contains("does not edit"), "{refused:?}");
    let refused = services.fails(2, &["waiting", "retry", &ids[0], "--request-id", "a"]);
    assert!(
        refused.stderr.contains("only for records of tiers"),
        "{refused:?}"
    );
    let not_there = services.fails(1, &["waiting", "show", "01M7Z0Q7XE000G000000000000"]);
    assert!(not_there.stderr.contains("no record waits"), "{not_there:?}");

    let retried = services.json(&["waiting", "retry", &ids[0]]);
    assert_eq!(retried["acted"][0]["state"], "retried", "{retried}");
    act_while_killed(&services, &mut scheduler, "retry", &ids[1]);
    let dead = services.json(&["waiting", "dead", &ids[2], "--reason", "INC-17"]);
    assert_eq!(dead["acted"][0]["state"], "dead", "{dead}");
    act_while_killed(&services, &mut scheduler, "dead", &ids[3]);
    let late = services.fails(3, &["waiting", "retry", &ids[2], &ids[3], "-o", "json"]);
    assert_eq!(late.stdout.matches("gone").count(), 2, "{late:?}");

    // The filter finds the others, and counts them first.
    let filter = ["waiting", "dead", "--matching", "--place", "scheduler"];
    let counted = services.pipe.redeliver(&filter);
    assert!(
        counted.stderr.contains("3 of 3 records that match"),
        "{counted:?}"
    );
    let one = services.json(&[&filter[..], &["--limit", "1", "--yes"]].concat());
    assert_eq!(one["acted"].as_array().unwrap().len(), 1, "{one}");
    let rest = services.json(&[&filter[..], &["--yes"]].concat());
    assert_eq!(rest["acted"].as_array().unwrap().len(), 2, "{rest}");

    let values = |topic: Arc<str>| -> Vec<String> {
        let records = services.pipe.read(&[topic]).into_iter();
        let mut values: Vec<String> = records
            .map(|record| String::from_utf8(record.value.unwrap().to_vec()).unwrap())
            .collect();
        values.sort();
        values
    };
    let pipeline = &services.pipe.pipeline;
    let returned = eventually("both have come back", DEADLINE, || {
        let returned = values(pipeline.return_topic());
        match returned.len() {
            0..2 => Err(format!("{returned:?}")),
            _ => Ok(returned),
        }
    });
    assert_eq!(returned, bodies[..2]);
    assert_eq!(values(pipeline.dead_letter_topic()), bodies[2..]);
    assert!(held(&services.pipe).is_empty());
    let letters = services.pipe.read(&[pipeline.dead_letter_topic()]);
    let message = |record: &Record| text(record, ERROR_MESSAGE).unwrap().unwrap();
    let by_operator = letters
        .iter()
        .filter(|letter| message(letter).contains("has given up its retries (INC-17)"));
    assert_eq!(by_operator.count(), 2);
    let late = services.pipe.read(&[pipeline.return_topic()]);
    for record in &late {
        let due: Timestamp = text(record, PROCESS_AFTER).unwrap().unwrap().parse().unwrap();
        assert!(record.timestamp >= Some(due), "its reader refuses it: {record:?}");
    }
}
