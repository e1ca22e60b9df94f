//! `redeliver waiting retry`, `dead` and `edit`: single records of a tier, whatever happens to its processes.

use std::collections::BTreeMap;

use redeliver_core::Record;
use redeliver_core::headers::ORIGINAL_OFFSET;
use redeliver_testkit::{Reply, ServiceProcess, eventually};
use serde_json::Value;

use crate::id_prefix::{migrate, with_prefix};
use crate::recreated::delete;
use crate::retries::drafts;
use crate::support::{DEADLINE, Pipe, PipeBuilder};

/// A pipeline whose records fail once and wait for an hour, with an inspector.
struct World {
    pipe: Pipe,
    server: String,
    inspector: ServiceProcess,
    /// Their offsets in the tier, which has the markers of transactions, too.
    offsets: Vec<i64>,
}

impl World {
    /// All records wait. A tier holds 16 of them in memory.
    fn waiting(name: &str, records: usize) -> Self {
        let pipe = PipeBuilder::new(name)
            .partitions(1)
            .tiers(&[3_600_000])
            .with_inspector()
            .set("waiting_actions.enabled", "true")
            .set("kafka.session_timeout", "6s")
            .set("dlq_inspector.redrive.edit", "true")
            .set("retry_tier.look_ahead", "16")
            .behave(|request| match request.earlier_calls_of_key {
                0 => Reply::status(503),
                _ => Reply::ok(request.body.clone()),
            })
            .create();
        let mut inspector = pipe.start("dlq-inspector", "a", &[]);
        let server = format!("http://{}", inspector.word_after(" api="));
        let enricher = pipe.enricher("a");
        pipe.produce(drafts("single", records));
        pipe.until_waiting(records);
        drop(enricher);
        let written = pipe.read(&[pipe.first_tier()]);
        let offsets = written.iter().map(|record| record.position.offset).collect();
        Self {
            pipe,
            server,
            inspector,
            offsets,
        }
    }

    /// Runs `redeliver waiting`, which must end with this status.
    #[track_caller]
    fn run(&self, status: i32, arguments: &[&str]) -> Value {
        let more = ["--server", &self.server, "-o", "json"];
        // Other tests kill tiers, whose transactions hide what follows in the topic for a while.
        let printed = eventually("the actions are known", DEADLINE, || {
            let printed = self.pipe.redeliver(&[&["waiting"], arguments, &more].concat());
            let is_known = !printed.stderr.contains("(UNAVAILABLE)");
            is_known.then(|| printed.clone()).ok_or(printed.stderr)
        });
        assert_eq!(printed.code, Some(status), "{arguments:?} {printed:?}");
        serde_json::from_str(&printed.stdout).unwrap_or_else(|error| panic!("{error}: {printed:?}"))
    }

    /// Runs a command that is refused.
    #[track_caller]
    fn run_fails(&self, arguments: &[&str]) {
        let printed = self
            .pipe
            .redeliver(&[&["waiting"], arguments, &["--server", &self.server]].concat());
        assert_eq!(printed.code, Some(1), "{printed:?}");
    }

    fn id(&self, number: usize) -> String {
        format!("{}/0/{}", self.pipe.first_tier(), self.offsets[number])
    }

    /// Other tests use the same topic.
    fn request(&self, name: &str) -> String {
        format!("{}-{name}", self.pipe.name())
    }

    /// The states of the records of a request, once none is pending.
    fn states(&self, request: &str) -> Vec<String> {
        eventually("the tier has acted", DEADLINE, || {
            let more = ["--server", &self.server, "-o", "json"];
            let printed = self
                .pipe
                .redeliver(&[&["waiting", "actions", request], &more[..]].concat());
            let actions: Value = serde_json::from_str(&printed.stdout).unwrap_or_default();
            if actions["pending"] != 0 {
                return Err(format!("{printed:?}"));
            }
            Ok(states(&actions))
        })
    }

    /// How many records each origin has in the due topic and among the dead letters.
    fn written(&self) -> [BTreeMap<usize, usize>; 2] {
        [
            self.pipe.pipeline.return_topic(),
            self.pipe.pipeline.dead_letter_topic(),
        ]
        .map(|topic| {
            let mut counts = BTreeMap::new();
            for record in self.pipe.read(&[topic]) {
                *counts.entry(origin(&record)).or_default() += 1;
            }
            counts
        })
    }

    /// Releases all that waits, and checks that each record was written once, those dead letters among them.
    #[track_caller]
    fn settle(&self, records: usize, dead: &[usize]) {
        let tier = self.pipe.pipeline.policy.tiers()[0];
        let name = format!("tier/{}/{tier}", self.pipe.name());
        let released = self
            .pipe
            .redeliver(&["release", &name, "--reason", "test", "--server", &self.server]);
        assert_eq!(released.code, Some(0), "{released:?}");
        let all = eventually("all records have left the tier", DEADLINE, || {
            let written = self.written();
            let count: usize = written.iter().map(BTreeMap::len).sum();
            if count >= records {
                Ok(written)
            } else {
                Err(format!("{count}"))
            }
        });
        let expected = |is_dead: bool| -> BTreeMap<usize, usize> {
            let origins = (0..records).filter(|origin| dead.contains(origin) == is_dead);
            origins.map(|origin| (origin, 1)).collect()
        };
        assert_eq!(all, [expected(false), expected(true)]);
    }
}

fn origin(record: &Record) -> usize {
    let offset = record.headers.last(ORIGINAL_OFFSET).unwrap();
    std::str::from_utf8(offset).unwrap().parse().unwrap()
}

fn states(actions: &Value) -> Vec<String> {
    let acted = actions["acted"].as_array().unwrap().iter();
    acted
        .map(|acted| acted["state"].as_str().unwrap().to_owned())
        .collect()
}

/// The offset of a record at the source, given its number in the tier: the worker may have written them in any order.
fn origins(world: &World) -> Vec<usize> {
    world
        .pipe
        .read(&[world.pipe.first_tier()])
        .iter()
        .map(origin)
        .collect()
}

#[test]
fn single_records_are_acted_on_once() {
    const RECORDS: usize = 100;
    let world = World::waiting("single", RECORDS);
    let origins = origins(&world);
    let tier = world.pipe.retry_tier("a");
    // In the look-ahead, and beyond it.
    let [near, far] = [world.id(1), world.id(90)];
    let shown = world.run(0, &["show", &far]);
    assert_eq!(shown["record"]["attempts"], 1);
    assert_eq!(shown["contents"]["id"], far.as_str());
    let request = world.request("r");
    let retry = [
        "retry",
        &near,
        &far,
        "--reason",
        "INC-17",
        "--request-id",
        &request,
    ];
    for _ in 0..2 {
        assert_eq!(states(&world.run(0, &retry)), ["retried", "retried"]);
    }
    let [near, far] = [world.id(2), world.id(91)];
    assert_eq!(states(&world.run(0, &["dead", &near, &far])), ["dead", "dead"]);
    // The second request is too late.
    assert_eq!(states(&world.run(3, &["retry", &far])), ["gone"]);
    let (edited, request) = (world.id(92), world.request("e"));
    let edit = ["edit", &edited, "--value", "edited", "--request-id", &request];
    for _ in 0..2 {
        assert_eq!(states(&world.run(0, &edit)), ["edited"]);
    }
    let listed = world.run(0, &["ls", "--limit", "1000"]);
    // No worker runs: those that were retried wait in the due topic.
    assert_eq!(listed["matching"], (RECORDS - 2) as u64);
    // By a filter: those that are due first.
    let matching = [
        "retry",
        "--matching",
        "--error-code",
        "http.503",
        "--limit",
        "5",
        "--yes",
    ];
    assert_eq!(states(&world.run(0, &matching)), ["retried"; 5]);
    drop(tier);
    let _tier = world.pipe.retry_tier("b");
    world.settle(RECORDS, &[origins[2], origins[91]]);
    let due = world.pipe.read(&[world.pipe.pipeline.return_topic()]);
    let edited: Vec<_> = due
        .iter()
        .filter(|record| record.value.as_deref() == Some(b"edited"))
        .collect();
    assert_eq!(edited.len(), 1);
    assert_eq!(origin(edited[0]), origins[92]);
}

#[test]
fn killed_tiers_act_once() {
    const RECORDS: usize = 120;
    let world = World::waiting("single-kill", RECORDS);
    let origins = origins(&world);
    let mut tier = world.pipe.retry_tier("a");
    let mut dead = Vec::new();
    // Before the first commit of the process, and after it.
    for (number, fault) in ["offsets:1", "commit:1", "offsets:2", "send:3"]
        .into_iter()
        .enumerate()
    {
        tier.kill_9();
        let request = world.request(&number.to_string());
        let numbers: Vec<usize> = (number..RECORDS).step_by(10).collect();
        let ids: Vec<String> = numbers.iter().map(|number| world.id(*number)).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let options = ["--request-id", &request, "--wait", "0s"];
        world.run(3, &[&["dead"], &ids[..], &options].concat());
        dead.extend(numbers.iter().map(|number| origins[*number]));
        tier.start_again_with(&[("REDELIVER_FAULT", fault)]);
        tier.until_crashed();
        tier.start_again();
        assert_eq!(world.states(&request), vec!["dead"; ids.len()]);
    }
    // Another process takes over what this one has acted on.
    let _other = world.pipe.retry_tier("b");
    tier.kill_9();
    world.settle(RECORDS, &dead);
}

#[test]
fn requests_of_recreated_topic_are_void() {
    const RECORDS: usize = 30;
    let world = World::waiting("single-recreated", RECORDS);
    let id = world.id(20);
    let request = world.request("old");
    world.run(3, &["retry", &id, "--request-id", &request, "--wait", "0s"]);
    delete(&world.pipe, &world.pipe.first_tier());
    assert_eq!(world.pipe.redeliver(&["topics", "apply"]).code, Some(0));
    let _tier = world.pipe.retry_tier("a");
    assert_eq!(world.states(&request), ["void"]);
    world.run_fails(&["retry", &id]);
    assert!(world.written().iter().all(BTreeMap::is_empty));
}

#[test]
fn changed_prefix_keeps_outcomes() {
    const RECORDS: usize = 60;
    let mut world = World::waiting("single-prefix", RECORDS);
    let origins = origins(&world);
    let mut tier = world.pipe.retry_tier("a");
    // In the look-ahead, and beyond it.
    let ids = [world.id(3), world.id(50)];
    let dead = world.run(0, &["dead", &ids[0], &ids[1]]);
    assert_eq!(states(&dead), ["dead", "dead"]);
    tier.shut_down();
    world.inspector.shut_down();

    let changed = with_prefix(&world.pipe, &format!("{}-", world.pipe.name()));
    let copied = |expected: &str| {
        // Static members stay in the group until the session timeout.
        eventually("the offsets are looked at", DEADLINE, || {
            let printed = migrate(&changed);
            if printed.stderr.contains("has members") {
                return Err(printed.stderr);
            }
            let text = format!("{}{}", printed.stdout, printed.stderr);
            assert!(text.contains(expected), "{printed:?}");
            Ok(printed.code)
        })
    };
    // Nothing is copied without a place for the outcomes.
    assert_eq!(copied("run `redeliver topics apply` first"), Some(1));
    changed.apply_topics();
    assert_eq!(copied("copied   redeliver.waiting.actions -> "), Some(0));

    let _processes = ["dlq-inspector", "retry-tier"].map(|service| {
        let mut process = changed.env.start(service, "b", &[]);
        if service == "dlq-inspector" {
            world.server = format!("http://{}", process.word_after(" api="));
        }
        process
    });
    assert_eq!(states(&world.run(3, &["retry", &ids[1]])), ["gone"]);
    world.settle(RECORDS, &[origins[3], origins[50]]);
}
