//! `redeliver status`.

use redeliver_testkit::{Reply, Request, ensure, eventually};
use serde_json::{Value, json};

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder};

const RECORDS: usize = 30;
/// Nothing listens on these ports.
const NO_SERVICES: [&str; 4] = [
    "--inspector",
    "http://127.0.0.1:9",
    "--scheduler",
    "http://127.0.0.1:9",
];

fn status(pipe: &Pipe, flags: &[&str]) -> Value {
    let printed = pipe.redeliver(&[&["status", "-o", "json"], flags].concat());
    assert_eq!(printed.code, Some(0), "{printed:?}");
    serde_json::from_str(&printed.stdout).unwrap_or_else(|error| panic!("{error}: {printed:?}"))
}

/// The line of a topic.
#[track_caller]
fn queue(status: &Value, topic: &str) -> Value {
    let queues = status["queues"].as_array().unwrap();
    let queue = queues.iter().find(|queue| queue["topic"] == topic);
    queue.unwrap_or_else(|| panic!("{topic} in {status}")).clone()
}

#[test]
fn status_shows_waiting_and_late_records() {
    let fails_once = |request: &Request| match request.earlier_calls_of_key {
        0 => Reply::Status(503, Vec::new(), "busy".into()),
        _ => Reply::ok(request.body.clone()),
    };
    let pipe = PipeBuilder::new("status")
        .tiers(&[3_000])
        .behave(fails_once)
        .create();
    let _enricher = pipe.enricher("a");
    let drafts = (0..RECORDS).map(|n| Draft::new(format!("key-{n}"), format!("record {n}")));
    let sent = pipe.produce(drafts.collect());
    pipe.until_waiting(RECORDS);
    let tier = pipe.first_tier();

    // A lane of the source and one of the due topic.
    let shown = status(&pipe, &NO_SERVICES);
    let source = queue(&shown, &pipe.pipeline.source);
    assert_eq!(
        (&source["records"], &source["consumers"]),
        (&json!(0), &json!(2)),
        "{shown}"
    );
    let waiting = queue(&shown, &tier);
    for (name, value) in [
        ("records", json!(RECORDS)),
        ("records_is_exact", json!(true)),
        ("consumers", json!(0)),
        ("pipeline", json!(&*pipe.pipeline.name)),
    ] {
        assert_eq!(waiting[name], value, "{name} in {shown}");
    }
    let error = shown["dead_letters"]["error"].as_str().unwrap();
    assert!(error.contains("cannot connect to the inspector"), "{error}");

    // Nothing releases them.
    eventually("all records are due", DEADLINE, || {
        let waiting = queue(&status(&pipe, &NO_SERVICES), &tier);
        ensure(waiting["due"] == json!(RECORDS), waiting.to_string())
    });
    let printed = pipe.redeliver(&[&["status"][..], &NO_SERVICES].concat());
    let line = printed.stdout.lines().find(|line| line.contains(&*tier)).unwrap();
    assert!(line.contains(" late ") && line.ends_with("none"), "{line}");
    assert!(
        printed
            .stdout
            .contains("dead letters: cannot connect to the inspector"),
        "{printed:?}"
    );

    let _relay = pipe.retry_tier("a");
    pipe.settle(&sent, DEADLINE);
    let released = queue(&status(&pipe, &NO_SERVICES), &tier);
    assert_eq!(
        (&released["records"], &released["next_due"]),
        (&json!(0), &Value::Null)
    );
    assert_eq!(released["consumers"], json!(1));
}
