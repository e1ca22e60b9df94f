//! `redeliver waiting retry`, `dead` and `edit`: single records of a tier, whatever happens to its processes.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::headers::{ORIGINAL_OFFSET, ORIGINAL_PARTITION};
use redeliver_core::{Position, Record};
use redeliver_proto::Message as _;
use redeliver_proto::v1::AuditEntry;
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{Reply, ServiceProcess, ensure, eventually};
use serde_json::Value;

use crate::id_prefix::{migrate, with_prefix};
use crate::retries::{drafts, header};
use crate::support::{DEADLINE, Pipe, PipeBuilder};

/// A pipeline whose records fail once and wait for an hour, with an inspector.
struct World {
    pipe: Pipe,
    server: String,
    inspector: ServiceProcess,
    /// Their positions in the tier.
    positions: Vec<Position>,
    /// In the same order, which is that in which the worker has written them.
    origins: Vec<usize>,
}

impl World {
    /// All records wait. A tier holds 16 of them in memory.
    fn waiting(name: &str, partitions: u32, records: usize) -> Self {
        let pipe = PipeBuilder::new(name)
            .partitions(partitions)
            .tiers(&[3_600_000])
            .with_inspector()
            // Of its own: a killed tier has others wait.
            .set("kafka.id_prefix", "{name}-")
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
        Self {
            pipe,
            server,
            inspector,
            origins: written.iter().map(origin).collect(),
            positions: written.into_iter().map(|record| record.position).collect(),
        }
    }

    /// Runs `redeliver waiting`, which must end with this status.
    #[track_caller]
    fn run(&self, status: i32, arguments: &[&str]) -> Value {
        let more = ["--server", &self.server, "-o", "json"];
        // The transaction of a killed tier hides what follows in the topic for a while.
        let printed = self.pipe.until_taken(&[&["waiting"], arguments, &more].concat());
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
        self.positions[number].to_string()
    }

    /// Moves every 20th record to the dead letters, from this one on, and returns their origins.
    #[track_caller]
    fn bury(&self, first: usize) -> Vec<usize> {
        let numbers: Vec<usize> = (first..self.positions.len()).step_by(20).collect();
        let ids: Vec<String> = numbers.iter().map(|number| self.id(*number)).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let request = first.to_string();
        let options = ["--request-id", &request, "--wait", "2m"];
        let acted = self.run(0, &[&["dead"], &ids[..], &options].concat());
        assert_eq!(states(&acted), vec!["dead"; ids.len()]);
        numbers.into_iter().map(|number| self.origins[number]).collect()
    }

    /// How many records the audit log has for each action of a request. All entries have this reason.
    #[track_caller]
    fn audited(&self, request: &str, reason: &str) -> BTreeMap<String, u64> {
        let topic = format!("{}-redeliver.audit", self.pipe.name());
        let mut counts = BTreeMap::new();
        for record in self.pipe.read(&[topic.into()]) {
            let entry = AuditEntry::decode(record.value.unwrap()).unwrap();
            if entry.target == request {
                assert_eq!((&*entry.by, &*entry.reason), ("anonymous", reason), "{entry:?}");
                *counts.entry(entry.action).or_default() += entry.count;
            }
        }
        counts
    }

    /// The states of the records of a request, once none is pending.
    fn states(&self, request: &str) -> Vec<String> {
        eventually("the tier has acted", DEADLINE, || {
            let more = ["--server", &self.server, "-o", "json"];
            let asked = [&["waiting", "actions", request], &more[..]].concat();
            let printed = self.pipe.redeliver(&asked);
            let actions: Value = serde_json::from_str(&printed.stdout).unwrap_or_default();
            ensure(actions["pending"] == 0, format!("{printed:?}")).map(|()| states(&actions))
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
    fn settle(&self, dead: &[usize]) {
        let tier = self.pipe.pipeline.policy.tiers()[0];
        let name = format!("tier/{}/{tier}", self.pipe.name());
        let released = self
            .pipe
            .redeliver(&["release", &name, "--reason", "test", "--server", &self.server]);
        assert_eq!(released.code, Some(0), "{released:?}");
        let all = eventually("all records have left the tier", DEADLINE, || {
            let written = self.written();
            let count: usize = written.iter().map(BTreeMap::len).sum();
            ensure(count >= self.origins.len(), format!("{count}")).map(|()| written)
        });
        let expected = |is_dead: bool| -> BTreeMap<usize, usize> {
            let origins = self.origins.iter();
            let origins = origins.filter(|origin| dead.contains(origin) == is_dead);
            origins.map(|origin| (*origin, 1)).collect()
        };
        assert_eq!(all, [expected(false), expected(true)]);
    }
}

/// What no other record of the source has.
fn origin(record: &Record) -> usize {
    let [partition, offset]: [usize; 2] =
        [ORIGINAL_PARTITION, ORIGINAL_OFFSET].map(|name| header(record, name));
    partition * 1_000_000 + offset
}

fn states(actions: &Value) -> Vec<String> {
    let acted = actions["acted"].as_array().unwrap().iter();
    acted
        .map(|acted| acted["state"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn single_records_are_acted_on_once() {
    const RECORDS: usize = 100;
    let world = World::waiting("single", 1, RECORDS);
    let tier = world.pipe.retry_tier("a");
    // In the look-ahead, and beyond it.
    let [near, far] = [world.id(1), world.id(90)];
    let shown = world.run(0, &["show", &far]);
    assert_eq!(shown["record"]["attempts"], 1);
    assert_eq!(shown["contents"]["id"], far.as_str());
    let retry = ["retry", &near, &far, "--reason", "INC-17", "--request-id", "r"];
    for _ in 0..2 {
        assert_eq!(states(&world.run(0, &retry)), ["retried", "retried"]);
    }
    let counted =
        [("waiting.act", 2), ("waiting.retry", 2)].map(|(action, count)| (action.to_owned(), count));
    assert_eq!(world.audited("r", "INC-17"), counted.into());
    let [near, far] = [world.id(2), world.id(91)];
    assert_eq!(states(&world.run(0, &["dead", &near, &far])), ["dead", "dead"]);
    // The second request is too late.
    assert_eq!(states(&world.run(3, &["retry", &far])), ["gone"]);
    let edited = world.id(92);
    let edit = ["edit", &edited, "--value", "edited", "--request-id", "e"];
    for _ in 0..2 {
        assert_eq!(states(&world.run(0, &edit)), ["edited"]);
    }
    let listed = world.run(0, &["ls", "--limit", "1000"]);
    // No worker runs: those that were retried wait in the due topic.
    assert_eq!(listed["matching"], (RECORDS - 2) as u64);
    // By a filter: those that are due first.
    let matching = ["retry", "--matching", "--error-code", "http.503", "--limit", "5"];
    let before = world.written();
    let server = ["--server", world.server.as_str()];
    let counted = world
        .pipe
        .redeliver(&[&["waiting"], &matching[..], &server].concat());
    assert!(
        counted.stderr.contains("5 of 96 records that match"),
        "{counted:?}"
    );
    assert_eq!((counted.code, world.written()), (Some(0), before));
    let acted = world.run(0, &[&matching[..], &["--yes"]].concat());
    assert_eq!(states(&acted), ["retried"; 5]);
    drop(tier);
    let _tier = world.pipe.retry_tier("b");
    world.settle(&[world.origins[2], world.origins[91]]);
    let due = world.pipe.read(&[world.pipe.pipeline.return_topic()]);
    let edited: Vec<_> = due
        .iter()
        .filter(|record| record.value.as_deref() == Some(b"edited"))
        .collect();
    assert_eq!(edited.len(), 1);
    assert_eq!(origin(edited[0]), world.origins[92]);
}

#[test]
fn killed_tiers_act_once() {
    const RECORDS: usize = 120;
    let world = World::waiting("single-kill", 1, RECORDS);
    let mut tier = world.pipe.retry_tier("a");
    let mut dead = Vec::new();
    // Before the first commit of the process, and after it.
    for (number, fault) in ["offsets:1", "commit:1", "offsets:2", "send:3"]
        .into_iter()
        .enumerate()
    {
        tier.kill_9();
        let request = number.to_string();
        let numbers: Vec<usize> = (number..RECORDS).step_by(10).collect();
        let ids: Vec<String> = numbers.iter().map(|number| world.id(*number)).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let options = ["--request-id", &request, "--wait", "0s"];
        world.run(3, &[&["dead"], &ids[..], &options].concat());
        dead.extend(numbers.iter().map(|number| world.origins[*number]));
        tier.start_again_with(&[("REDELIVER_FAULT", fault)]);
        tier.until_crashed();
        tier.start_again();
        assert_eq!(world.states(&request), vec!["dead"; ids.len()]);
    }
    // Another process takes over what this one has acted on.
    let _other = world.pipe.retry_tier("b");
    tier.kill_9();
    world.settle(&dead);
}

#[test]
fn moved_partitions_act_once() {
    let world = World::waiting("single-move", 4, 300);
    let mut first = world.pipe.retry_tier("a");
    first.until_owning(4);
    // A second tier gets half of the partitions, and then all of them, while both act on records.
    let mut second = world.pipe.spawn("retry-tier", "b", &[]);
    let (mut dead, mut rounds) = (Vec::new(), 0..20);
    let mut act_until = |owned, rounds: &mut dyn Iterator<Item = usize>| {
        while second.owned() < owned
            && let Some(round) = rounds.next()
        {
            dead.extend(world.bury(round));
        }
        second.until_owning(owned);
    };
    act_until(2, &mut rounds.by_ref().take(15));
    first.shut_down();
    act_until(4, &mut rounds);
    assert!(!dead.is_empty());
    world.settle(&dead);
}

#[test]
fn requests_of_recreated_topic_are_void() {
    const RECORDS: usize = 30;
    let world = World::waiting("single-recreated", 1, RECORDS);
    let id = world.id(20);
    world.run(3, &["retry", &id, "--request-id", "old", "--wait", "0s"]);
    delete_topic(&world.pipe.kafka.brokers, &world.pipe.first_tier());
    assert_eq!(world.pipe.redeliver(&["topics", "apply"]).code, Some(0));
    let _tier = world.pipe.retry_tier("a");
    assert_eq!(world.states("old"), ["void"]);
    world.run_fails(&["retry", &id]);
    assert!(world.written().iter().all(BTreeMap::is_empty));
}

/// The topic does not exist yet, as after an update.
#[test]
fn missing_topic_loses_nothing() {
    let mut world = World::waiting("single-missing", 1, 20);
    world.inspector.shut_down();
    let topic: Arc<str> = format!("{}-redeliver.waiting.actions", world.pipe.name()).into();
    delete_topic(&world.pipe.kafka.brokers, &topic);
    world.inspector = world.pipe.start("dlq-inspector", "b", &[]);
    world.server = format!("http://{}", world.inspector.word_after(" api="));
    let id = world.id(7);
    let refused = world
        .pipe
        .redeliver(&["waiting", "retry", &id, "--server", &world.server]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains(&*topic), "{refused:?}");
    let mut tier = world.pipe.spawn("retry-tier", "a", &[]);
    let output = tier.wait_for_output("redeliver topics apply", DEADLINE);
    assert!(output.contains(&*topic), "{output}");
    tier.wait(DEADLINE);
    assert_eq!(world.pipe.redeliver(&["topics", "apply"]).code, Some(0));
    tier.start_again();
    tier.until_ready();
    assert_eq!(states(&world.run(0, &["dead", &id])), ["dead"]);
    world.settle(&[world.origins[7]]);
}

#[test]
fn changed_prefix_keeps_outcomes() {
    const RECORDS: usize = 60;
    let mut world = World::waiting("single-prefix", 1, RECORDS);
    let mut tier = world.pipe.retry_tier("a");
    // In the look-ahead, and beyond it.
    let ids = [world.id(3), world.id(50)];
    let dead = world.run(0, &["dead", &ids[0], &ids[1]]);
    assert_eq!(states(&dead), ["dead", "dead"]);
    tier.shut_down();
    world.inspector.shut_down();

    let previous = format!("{}-", world.pipe.name());
    let changed = with_prefix(&world.pipe, &format!("{previous}new-"));
    let copied = |expected: &str| {
        // Static members stay in the group until the session timeout.
        eventually("the offsets are looked at", DEADLINE, || {
            let printed = migrate(&changed, &previous);
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
    assert_eq!(
        copied(&format!("copied   {previous}redeliver.waiting.actions -> ")),
        Some(0)
    );

    let _processes = ["dlq-inspector", "retry-tier"].map(|service| {
        let mut process = changed.env.start(service, "b", &[]);
        if service == "dlq-inspector" {
            world.server = format!("http://{}", process.word_after(" api="));
        }
        process
    });
    assert_eq!(states(&world.run(3, &["retry", &ids[1]])), ["gone"]);
    world.settle(&[world.origins[3], world.origins[50]]);
}
