//! What has become of jobs in their pipeline: `redeliver jobs get`, and `redeliver trace` of a job.

use std::slice::from_ref;

use redeliver_core::headers::{JOB_ID, Origin, write_lineage};
use redeliver_core::{Position, Record};
use redeliver_kafka::groups::{self, CommittedOffset, GroupOffsets};
use redeliver_testkit::kafka_request::{delete_records, delete_topic};
use redeliver_testkit::{ensure, eventually};
use serde_json::Value;

use crate::control::Cli;
use crate::services::{APP, Services, id};
use crate::support::{DEADLINE, Draft, text, words};

/// Schedules a job that is due at once. All are in one partition.
fn schedule(services: &Services, data: &str) -> String {
    let request = format!("jobs schedule --app {APP} --in 1ms --key k --data \"{data}\"");
    let scheduled = services.pipe.redeliver(&words(&request));
    assert_eq!(scheduled.code, Some(0), "{scheduled:?}");
    scheduled.stdout.trim_end().to_owned()
}

/// The outcome of a job in its pipeline, once it has this state.
#[track_caller]
fn outcome(services: &Services, job: &str, state: &str) -> Value {
    eventually(&format!("{job} is {state}"), DEADLINE, || {
        let got = services.json(&["jobs", "get", job]);
        let outcome = &got["outcomes"][0];
        ensure(outcome["state"] == state, got.to_string()).map(|()| outcome.clone())
    })
}

/// The record of a job in a topic, and its position as text.
fn of_job(records: Vec<Record>, job: &str) -> (Record, String) {
    let mut records = records.into_iter();
    let record = records.find(|record| text(record, JOB_ID).unwrap().as_deref() == Some(job));
    let record = record.unwrap();
    let position = id(&record);
    (record, position)
}

fn reason(outcome: &Value) -> &str {
    outcome["reason"].as_str().unwrap_or_default()
}

#[test]
fn each_state_is_proven() {
    let services = Services::new("outcomes");
    let pipe = &services.pipe;
    let (_scheduler, mut inspector) = (pipe.scheduler("a"), services.inspect());
    let fine = schedule(&services, "fine");
    services.dispatched(1);
    // As if a worker with a group of its own processed it.
    let unknown = outcome(&services, &fine, "unknown");
    let why = "no worker of the pipeline is running";
    assert!(reason(&unknown).contains(why), "{unknown}");

    let mut enricher = pipe.enricher("a");
    let succeeded = outcome(&services, &fine, "succeeded");
    let output = pipe.pipeline.output.clone().unwrap();
    let (_, result) = of_job(pipe.read(&[output]), &fine);
    assert_eq!(succeeded["position"], result.as_str());
    assert_eq!((&succeeded["attempts"], reason(&succeeded)), (&0.into(), ""));
    let shown = services.cli(&["jobs", "get", &fine]);
    let line = format!("{}: succeeded, result {result}\n", pipe.name());
    assert!(shown.contains(&line), "{shown}");
    let trace = services.cli(&["trace", &fine]);
    assert!(trace.contains("succeeded") && trace.contains(&result), "{trace}");

    let hopeless = schedule(&services, "hopeless");
    let dead = outcome(&services, &hopeless, "dead");
    let letters = pipe.read(&[pipe.pipeline.dead_letter_topic()]);
    let (_, letter) = of_job(letters, &hopeless);
    let failure = (&dead["error_class"], &dead["error_code"], &dead["attempts"]);
    assert_eq!(failure, (&"permanent".into(), &"http.404".into(), &1.into()));
    assert_eq!(dead["position"], letter.as_str());

    // No retry tier is running yet.
    let busy = schedule(&services, "busy");
    let waiting = outcome(&services, &busy, "waiting");
    let (copy, position) = of_job(pipe.read(&[pipe.first_tier()]), &busy);
    let due = text(&copy, "process-after").unwrap().unwrap();
    assert_eq!(waiting["position"], position.as_str());
    assert_eq!(
        (&waiting["due_at"], &waiting["attempts"]),
        (&due.into(), &1.into())
    );
    let tier = pipe.pipeline.policy.tiers()[0].to_string();
    assert_eq!(
        (&waiting["place"], &waiting["error_code"]),
        (&tier.into(), &"http.503".into())
    );
    let later = schedule(&services, "later");
    let waiting = outcome(&services, &later, "waiting");
    assert_eq!(
        (&waiting["place"], &waiting["attempts"]),
        (&"scheduler".into(), &0.into())
    );

    let _tier = pipe.retry_tier("a");
    let exhausted = outcome(&services, &busy, "dead");
    let failure = (&exhausted["error_class"], &exhausted["attempts"]);
    assert_eq!(failure, (&"exhausted".into(), &2.into()));
    let discarded = pipe.redeliver(&words(&format!(
        "dlq discard --id {} --yes --reason test",
        exhausted["position"].as_str().unwrap()
    )));
    assert_eq!(discarded.code, Some(0), "{discarded:?}");
    eventually("the dead letter is discarded", DEADLINE, || {
        let outcome = outcome(&services, &busy, "dead");
        ensure(outcome["discarded"] == true, outcome)
    });

    let slow = schedule(&services, "slow");
    let running = outcome(&services, &slow, "running");
    let source = of_job(pipe.read(from_ref(&pipe.pipeline.source)), &slow).1;
    assert_eq!(running["position"], source.as_str());
    enricher.kill_9();
    let dispatched = outcome(&services, &slow, "dispatched");
    assert!(reason(&dispatched).contains("no worker"), "{dispatched}");

    // What the inspector has seen before its start, too.
    inspector.kill_9();
    let got = services.json(&["jobs", "get", &fine]);
    let unreachable = &got["outcomes"][0];
    assert_eq!(
        (&got["state"], &unreachable["state"]),
        (&"dispatched".into(), &"unknown".into())
    );
    assert!(reason(unreachable).contains("cannot ask the inspector"), "{got}");
    inspector.start_again();
    assert_eq!(
        outcome(&services, &fine, "succeeded")["position"],
        result.as_str()
    );
    assert_eq!(outcome(&services, &hopeless, "dead")["position"], letter.as_str());
    assert_eq!(outcome(&services, &later, "waiting")["place"], "scheduler");
}

#[test]
fn lost_results_are_unknown() {
    let services = Services::new("outcomes-lost");
    let pipe = &services.pipe;
    let (_scheduler, _inspector, _enricher) = (pipe.scheduler("a"), services.inspect(), pipe.enricher("a"));
    let output = pipe.pipeline.output.clone().unwrap();
    let jobs = ["first", "second"].map(|data| schedule(&services, data));
    for job in &jobs {
        outcome(&services, job, "succeeded");
    }
    // Retention.
    let (record, position) = of_job(pipe.read(from_ref(&output)), &jobs[0]);
    let Position {
        partition, offset, ..
    } = record.position;
    delete_records(&pipe.kafka.brokers, &output, partition, offset + 1);
    let unknown = outcome(&services, &jobs[0], "unknown");
    let why = format!("{position} is not in Kafka any more");
    assert!(reason(&unknown).contains(&why), "{unknown}");
    assert_eq!(unknown["position"], position.as_str());

    delete_topic(&pipe.kafka.brokers, &output);
    assert_eq!(pipe.redeliver(&["topics", "apply"]).code, Some(0));
    let unknown = outcome(&services, &jobs[1], "unknown");
    assert!(reason(&unknown).contains("created again"), "{unknown}");
    // Its positions are used again.
    let next: Vec<String> = (0..4)
        .map(|n| schedule(&services, &format!("next-{n}")))
        .collect();
    for job in &next {
        let (_, result) = eventually("the job has a result", DEADLINE, || {
            let records = pipe.read(from_ref(&output));
            let has_result = |record: &Record| text(record, JOB_ID).unwrap().as_deref() == Some(job.as_str());
            ensure(records.iter().any(has_result), records.len()).map(|()| of_job(records, job))
        });
        assert_eq!(outcome(&services, job, "succeeded")["position"], result.as_str());
    }
    outcome(&services, &jobs[0], "unknown");
    outcome(&services, &jobs[1], "unknown");
}

#[test]
fn foreign_worker_leaves_only_its_records() {
    let services = Services::new("outcomes-foreign");
    let pipe = &services.pipe;
    let (_scheduler, _inspector) = (pipe.scheduler("a"), services.inspect());
    let jobs = ["kept", "dropped"].map(|data| schedule(&services, data));
    let records = services.dispatched(2);
    let group = pipe.pipeline.worker_group(&pipe.kafka.id_prefix);
    let output = pipe.pipeline.output.clone().unwrap();
    for job in &jobs {
        outcome(&services, job, "unknown");
    }
    // It writes results, one of them without the headers of the job, and commits the offsets of the source.
    let mut offsets = GroupOffsets::new();
    for (job, keeps) in jobs.iter().zip([true, false]) {
        let (record, _) = of_job(records.clone(), job);
        let mut draft = Draft::new("k", "result");
        if keeps {
            draft.headers = record.headers.clone();
        }
        write_lineage(&mut draft.headers, pipe.name(), &Origin::of(&record), 0);
        pipe.produce_to(&output, vec![draft]);
        let Position {
            topic,
            partition,
            offset,
        } = &record.position;
        let committed = offsets
            .entry((topic.to_string(), *partition))
            .or_insert_with(|| CommittedOffset::new(0, ""));
        committed.offset = committed.offset.max(offset + 1);
    }
    groups::commit(&pipe.kafka, &group, &offsets).unwrap();
    let kept = outcome(&services, &jobs[0], "succeeded");
    assert_eq!(kept["place"], Value::Null);
    let dropped = eventually("the group has completed it", DEADLINE, || {
        let unknown = outcome(&services, &jobs[1], "unknown");
        let holds = reason(&unknown).contains("lacks the header job-id");
        ensure(holds, unknown.clone()).map(|()| unknown)
    });
    let (_, source) = of_job(records, &jobs[1]);
    assert_eq!(dropped["position"], source.as_str());
}

#[test]
fn paused_record_is_not_running() {
    let services = Services::new("outcomes-paused");
    let pipe = &services.pipe;
    let (_scheduler, mut inspector, mut enricher) =
        (pipe.scheduler("a"), services.inspect(), pipe.enricher("a"));
    let first = schedule(&services, "fine");
    outcome(&services, &first, "succeeded");
    let cli = Cli::new(pipe, &mut inspector);
    let pipeline = format!("pipeline/{}", pipe.name());
    cli.change(&["pause", &pipeline]);
    enricher.until_ready_but(&format!("paused pipelines: {}", pipe.name()));

    let second = schedule(&services, "fine");
    let dispatched = outcome(&services, &second, "dispatched");
    assert!(
        reason(&dispatched).contains("the pipeline is paused"),
        "{dispatched}"
    );
    cli.change(&["resume", &pipeline]);
    outcome(&services, &second, "succeeded");
}
