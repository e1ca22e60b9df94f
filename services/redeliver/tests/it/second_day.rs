//! The second day: a configuration is changed while there is work, and every record still ends exactly once and
//! never early. docs/operations.md shows what these tests prove as a table.
//!
//! A [`Row`] is a change. [`check`] makes it in each [`State`] of the pipeline and in each [`Order`] of restarts:
//! it produces records of which each fails once, brings the pipeline into the state, changes the configuration,
//! produces more, and asks the oracle. To add a row, write a [`Row`] and name it in `rows!`.
//! Each row takes about a minute, so all but two are left to `cargo xtask test --long`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use redeliver_core::headers::ERROR_CODE;
use redeliver_core::{Pipeline, Position, Span};
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{Reply, eventually};

use crate::raw;
use crate::support::{Draft, Pipe, START, Sent, Service, Setup, Variant, end_topics, origin, text};

/// Within this time all records end, sessions of consumers that are gone included.
const DEADLINE: Duration = Duration::from_secs(60);
/// How many records there are before the change.
const BEFORE: usize = 120;
/// How many are produced at each step after it.
const STEP: usize = 20;
/// The tier before the change: long enough for all records to wait when it is changed.
const TIER: u64 = 6_000;

/// A change of the configuration.
struct Row {
    name: &'static str,
    /// Settings of the pipeline before the change; those of [`Setup`] where it says nothing.
    before: &'static [(&'static str, &'static str)],
    change: fn(&Pipe) -> Variant,
    /// Whether the workers do not read the former source any more: what they had not begun stays there.
    leaves_source: bool,
    /// The processes of each service, before and after.
    processes: Processes,
}

/// The instances of each service.
#[derive(Clone, Copy)]
enum Processes {
    /// One, or two when they are restarted one after the other.
    Same,
    /// These become those.
    Change(&'static [&'static str], &'static [&'static str]),
}

impl Processes {
    fn before(self, order: Order) -> &'static [&'static str] {
        match (self, order) {
            (Self::Change(before, _), _) => before,
            (Self::Same, Order::AtOnce) => &["a"],
            (Self::Same, Order::Rolling) => &["a", "b"],
        }
    }

    fn after(self, order: Order) -> &'static [&'static str] {
        match self {
            Self::Change(_, after) => after,
            Self::Same => self.before(order),
        }
    }
}

/// What the pipeline is doing when its configuration is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It runs, and there was nothing to do yet.
    Empty,
    /// All records have failed once and wait in a tier.
    Waiting,
    /// Records are with the endpoint, in the source and in a tier.
    InFlight,
}

/// How processes are restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// All end, then all start.
    AtOnce,
    /// One after the other, so that both configurations run side by side.
    Rolling,
}

fn setting(pipe: &Pipe, key: &str, value: &str) -> (String, String) {
    (format!("pipelines.{}.{key}", pipe.name), value.to_owned())
}

/// The configuration with these settings of the pipeline.
fn with(pipe: &Pipe, settings: &[(&str, &str)]) -> Variant {
    let settings: Vec<_> = settings
        .iter()
        .map(|(key, value)| setting(pipe, key, value))
        .collect();
    pipe.variant(str::to_owned, &settings)
}

/// A delay that is this much shorter than the pipeline's tier, and shared with no other test either.
fn shorter_tier(pipe: &Pipe, by: u64) -> Span {
    Span::from_millis(pipe.pipeline.policy.tiers()[0].as_millis() - by)
}

const TIERS: Row = Row {
    name: "day2-tiers",
    before: &[],
    change: |pipe| {
        let tiers = format!("{{ tiers: [{}] }}", shorter_tier(pipe, 3_500));
        with(pipe, &[("retry", &tiers)])
    },
    leaves_source: false,
    processes: Processes::Same,
};

const DUE_TO_SOURCE: Row = Row {
    name: "day2-to-source",
    before: &[],
    change: |pipe| with(pipe, &[("return_to", "source")]),
    leaves_source: false,
    processes: Processes::Same,
};

const SOURCE_TO_DUE: Row = Row {
    name: "day2-to-due",
    before: &[("return_to", "source")],
    change: |pipe| with(pipe, &[("return_to", "due")]),
    leaves_source: false,
    processes: Processes::Same,
};

const MAX_WAIT: Row = Row {
    name: "day2-max-wait",
    before: &[("max_wait", "1h")],
    change: |pipe| {
        let tiers = format!("{{ tiers: [{}] }}", shorter_tier(pipe, 5_000));
        with(pipe, &[("retry", &tiers), ("max_wait", "2s")])
    },
    leaves_source: false,
    processes: Processes::Same,
};

const SOURCE: Row = Row {
    name: "day2-source",
    before: &[],
    change: |pipe| with(pipe, &[("source", &format!("{}-moved", pipe.name))]),
    leaves_source: true,
    processes: Processes::Same,
};

const REMOVED: Row = Row {
    name: "day2-removed",
    before: &[],
    change: |pipe| pipe.variant(retired, &[]),
    leaves_source: true,
    processes: Processes::Same,
};

/// A pipeline that shares the tier is added, so the subscriptions of the tier's lanes change.
const ADDED: Row = Row {
    name: "day2-added",
    before: &[],
    change: |pipe| {
        let name = format!("{}-added", pipe.name);
        let tier = pipe.pipeline.policy.tiers()[0];
        let added = format!(
            "pipelines:\n  {name}:\n    output: {name}-out\n    retry: {{ tiers: [{tier}] }}\n    http: {{ url: {}/added }}\n",
            pipe.endpoint.url()
        );
        pipe.variant(|file| file.replace("pipelines:\n", &added), &[])
    },
    leaves_source: false,
    processes: Processes::Same,
};

/// Results go to another topic; the former one keeps what it has.
const OUTPUT: Row = Row {
    name: "day2-output",
    before: &[],
    change: |pipe| with(pipe, &[("output", &format!("{}-out-2", pipe.name))]),
    leaves_source: false,
    processes: Processes::Same,
};

const LANES: Row = Row {
    name: "day2-lanes",
    before: &[],
    change: |pipe| pipe.variant(str::to_owned, &[("kafka.lanes".to_owned(), "3".to_owned())]),
    leaves_source: false,
    processes: Processes::Same,
};

const FEWER_LANES: Row = Row {
    name: "day2-fewer-lanes",
    before: &[("kafka.lanes", "3")],
    change: |pipe| pipe.variant(str::to_owned, &[("kafka.lanes".to_owned(), "1".to_owned())]),
    leaves_source: false,
    processes: Processes::Same,
};

const INSTANCE: Row = Row {
    name: "day2-instance",
    before: &[],
    change: |pipe| pipe.variant(str::to_owned, &[]),
    leaves_source: false,
    processes: Processes::Change(&["a", "b"], &["c", "d"]),
};

const MORE_PROCESSES: Row = Row {
    name: "day2-more",
    before: &[],
    change: |pipe| pipe.variant(str::to_owned, &[]),
    leaves_source: false,
    processes: Processes::Change(&["a"], &["a", "b", "c"]),
};

const FEWER_PROCESSES: Row = Row {
    name: "day2-fewer",
    before: &[],
    change: |pipe| pipe.variant(str::to_owned, &[]),
    leaves_source: false,
    processes: Processes::Change(&["a", "b", "c"], &["a"]),
};

/// The file with its pipeline under `retired`.
fn retired(file: &str) -> String {
    file.replace("pipelines:\n", "retired:\n")
}

/// One test for each row, which checks every cell. The states of a row are checked side by side, since a cell mostly
/// waits.
macro_rules! rows {
    ($($(#[$attribute:meta])* $name:ident: $row:expr),* $(,)?) => {$(
        #[test]
        $(#[$attribute])*
        fn $name() {
            check_row(&$row);
        }
    )*};
}

rows! {
    tiers: TIERS,
    #[ignore = "long"]
    return_to_source: DUE_TO_SOURCE,
    #[ignore = "long"]
    return_to_due: SOURCE_TO_DUE,
    #[ignore = "long"]
    max_wait: MAX_WAIT,
    #[ignore = "long"]
    source: SOURCE,
    #[ignore = "long"]
    removed: REMOVED,
    added: ADDED,
    #[ignore = "long"]
    output: OUTPUT,
    #[ignore = "long"]
    lanes: LANES,
    #[ignore = "long"]
    fewer_lanes: FEWER_LANES,
    #[ignore = "long"]
    instance: INSTANCE,
    #[ignore = "long"]
    more_processes: MORE_PROCESSES,
    #[ignore = "long"]
    fewer_processes: FEWER_PROCESSES,
}

fn check_row(row: &'static Row) {
    for order in [Order::AtOnce, Order::Rolling] {
        let check_state = |state| {
            let cell = format!("{}/{state:?}/{order:?}", row.name);
            let thread = thread::Builder::new().name(cell);
            thread.spawn(move || check(row, state, order)).unwrap()
        };
        let cells = [State::Empty, State::Waiting, State::InFlight].map(check_state);
        // All end before one of them fails the test, and each says for itself what is wrong.
        let failed: Vec<String> = cells
            .into_iter()
            .filter_map(|cell| {
                let name = cell.thread().name().unwrap_or_default().to_owned();
                cell.join().is_err().then_some(name)
            })
            .collect();
        assert!(failed.is_empty(), "failed: {failed:?}, see above");
    }
}

/// The records of a test, in the order in which they were produced.
struct Produced<'p> {
    pipe: &'p Pipe,
    sent: Vec<Sent>,
}

impl Produced<'_> {
    fn add(&mut self, topic: &Arc<str>, count: usize) {
        let from = self.sent.len();
        let drafts = (from..from + count).map(|n| Draft::new(format!("key-{n}"), format!("record {n}")));
        let sent = self.pipe.produce_to(topic, drafts.collect());
        self.sent.extend(sent);
    }
}

/// Makes a change in a state and an order, and checks what becomes of all records.
#[track_caller]
fn check(row: &Row, state: State, order: Order) {
    let mut setup = Setup::new(row.name)
        .tiers(&[TIER])
        .set("kafka.session_timeout", "6s");
    for (key, value) in row.before {
        setup = match key.strip_prefix("kafka.") {
            Some(_) => setup.set(key, value),
            None => setup.pipeline(key, value),
        };
    }
    let is_slow = Arc::new(AtomicBool::new(state == State::InFlight));
    let slow = is_slow.clone();
    let pipe = setup
        .behave(move |request| {
            let reply = match request.earlier_calls_of_key {
                0 => Reply::status(503),
                _ => Reply::ok(request.body.clone()),
            };
            if slow.load(Ordering::Relaxed) {
                Reply::Delay(Duration::from_millis(800), Box::new(reply))
            } else {
                reply
            }
        })
        .create();
    let after = (row.change)(&pipe);
    let start = |service: &'static str| -> Vec<(&'static str, Service)> {
        let one = |instance: &&str| (service, pipe.start(service, instance, &[]));
        row.processes.before(order).iter().map(one).collect()
    };
    let (enrichers, tiers) = (start("enricher"), start("retry-tier"));

    let mut produced = Produced {
        pipe: &pipe,
        sent: Vec::new(),
    };
    reach(&mut produced, state);

    let applied = pipe.redeliver_with(&after, &["topics", "apply"]);
    assert_eq!(applied.code, Some(0), "{applied:?}");
    let source = after.pipeline.source.clone();
    let places = restarts(enrichers, tiers, row.processes.after(order));
    let mut running = Vec::new();
    match order {
        Order::AtOnce => {
            let mut starting = Vec::new();
            let mut ending = Vec::new();
            for (service, former, instance) in places {
                starting.extend(instance.map(|instance| (service, instance)));
                ending.extend(former);
            }
            for service in &mut ending {
                service.process.terminate();
            }
            for service in &mut ending {
                assert_eq!(service.process.wait(START).code(), Some(0));
            }
            for (service, instance) in starting {
                running.push(pipe.start_with(&after, service, instance, &[]));
            }
            produced.add(&source, STEP);
        }
        Order::Rolling => {
            for (service, former, instance) in places {
                if let Some(mut former) = former {
                    assert_eq!(former.end(), Some(0));
                }
                produced.add(&source, STEP);
                running.extend(instance.map(|instance| pipe.start_with(&after, service, instance, &[])));
                produced.add(&source, STEP);
            }
        }
    }
    settle(row, &after.pipeline, &produced);
    end(&mut running);
}

/// A place for a process: its service, the one that ends there, and the instance that starts.
type Place = (&'static str, Option<Service>, Option<&'static str>);

/// The places in the order of a rolling restart: one process of the one kind, all of the other, the rest, so that every
/// pair of configurations meets.
fn restarts(
    enrichers: Vec<(&'static str, Service)>,
    tiers: Vec<(&'static str, Service)>,
    after: &'static [&'static str],
) -> Vec<Place> {
    let places = |service: &'static str, before: Vec<(&'static str, Service)>| -> Vec<Place> {
        let count = before.len().max(after.len());
        let mut before = before.into_iter().map(|(_, process)| process);
        (0..count)
            .map(|index| (service, before.next(), after.get(index).copied()))
            .collect()
    };
    let mut places_of_enrichers = places("enricher", enrichers);
    let last = places_of_enrichers.split_off(1);
    let first = places_of_enrichers.into_iter();
    first.chain(places("retry-tier", tiers)).chain(last).collect()
}

#[track_caller]
fn end(services: &mut [Service]) {
    for service in services {
        assert_eq!(service.end(), Some(0), "{}", service.process.output());
    }
}

/// Produces what is there before the change.
#[track_caller]
fn reach(produced: &mut Produced<'_>, state: State) {
    let pipe = produced.pipe;
    match state {
        State::Empty => {}
        State::Waiting => {
            produced.add(&pipe.pipeline.source, BEFORE);
            until_waiting(
                pipe,
                &pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]),
                BEFORE,
            );
        }
        State::InFlight => {
            produced.add(&pipe.pipeline.source, BEFORE);
            eventually("calls are under way", DEADLINE, || match pipe.endpoint.calls() {
                calls if calls >= 40 => Ok(()),
                calls => Err(calls),
            });
        }
    }
}

/// Waits until so many records have been written to a tier.
#[track_caller]
fn until_waiting(pipe: &Pipe, tier: &Arc<str>, count: usize) {
    eventually("all records wait", DEADLINE, || {
        match pipe.read(std::slice::from_ref(tier)).len() {
            waiting if waiting >= count => Ok(()),
            waiting => Err(waiting),
        }
    });
}

/// Waits until nothing is under way, and checks that each record ended exactly once and none early.
#[track_caller]
fn settle(row: &Row, after: &Pipeline, produced: &Produced<'_>) {
    let pipe = produced.pipe;
    // Results may be in the former output and in the new one.
    let mut both = pipe.pipeline.clone();
    both.other_outputs.extend(
        after
            .output
            .clone()
            .filter(|output| pipe.pipeline.output.as_ref() != Some(output)),
    );
    let mut sources: HashMap<&Arc<str>, u64> = HashMap::new();
    for sent in &produced.sent {
        *sources.entry(&sent.position.topic).or_default() += 1;
    }
    let mut left = 0;
    for (source, count) in sources {
        let pipeline = Pipeline {
            source: source.clone(),
            ..both.clone()
        };
        let stays =
            |in_source: u64| row.leaves_source && (*source != after.source || after.retired) && in_source > 0;
        let report = eventually("nothing is under way", DEADLINE, || {
            let report = pipe.audit_of(&pipeline);
            let waiting = &report.waiting;
            let under_way = waiting.total() - waiting.in_source;
            let is_settled = under_way == 0 && (waiting.in_source == 0 || stays(waiting.in_source));
            if is_settled && report.source == count {
                Ok(report)
            } else {
                Err(report)
            }
        });
        assert!(report.is_clean(), "{report}");
        assert_eq!(report.dead, 0, "{report}");
        assert_eq!(report.output + report.waiting.in_source, count, "{report}");
        left += report.waiting.in_source;
    }
    let ended = ends_once(pipe, &both, &produced.sent);
    assert_eq!(ended as u64 + left, produced.sent.len() as u64);
    println!("{ended} records ended exactly once, {left} were not begun");
}

/// How many records have ended, each once, in an output of the pipeline.
#[track_caller]
fn ends_once(pipe: &Pipe, pipeline: &Pipeline, sent: &[Sent]) -> usize {
    let mut ends: HashMap<Position, usize> = HashMap::new();
    for end in pipe.read(&end_topics(pipeline)) {
        assert_eq!(text(&end, ERROR_CODE), Ok(None), "{end:?}");
        let origin = origin(&end);
        let place = Position {
            topic: origin.topic,
            partition: origin.partition,
            offset: origin.offset,
        };
        *ends.entry(place).or_default() += 1;
    }
    for (place, count) in &ends {
        assert_eq!(*count, 1, "{place} ended {count} times");
        assert!(
            sent.iter().any(|sent| sent.position == *place),
            "{place} was never sent"
        );
    }
    ends.len()
}

/// Two configurations of a pipeline whose tier is changed, records that wait in the former tier, and nothing running.
struct Changed {
    pipe: Pipe,
    after: Variant,
    former: Arc<str>,
    sent: Vec<Sent>,
}

impl Changed {
    /// The first calls fail; `records` of them have.
    fn new(name: &str, tier: u64, records: usize) -> Self {
        let pipe = fails_once(Setup::new(name).tiers(&[tier]));
        let after = (TIERS_TO_ONE_SECOND.change)(&pipe);
        let applied = pipe.redeliver_with(&after, &["topics", "apply"]);
        assert_eq!(applied.code, Some(0), "{applied:?}");
        let former = pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
        let sent = let_wait(&pipe, records);
        Self {
            pipe,
            after,
            former,
            sent,
        }
    }
}

/// Produces records, of which the first calls fail, and lets an enricher run until all of them wait.
fn let_wait(pipe: &Pipe, records: usize) -> Vec<Sent> {
    let mut enricher = pipe.enricher("a");
    let mut produced = Produced {
        pipe,
        sent: Vec::new(),
    };
    produced.add(&pipe.pipeline.source, records);
    let tier = pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
    until_waiting(pipe, &tier, records);
    assert_eq!(enricher.end(), Some(0));
    produced.sent
}

/// What `topics check` says of the topics that are named after the pipeline, and how it ends.
fn checked(pipe: &Pipe, variant: &Variant) -> (Option<i32>, Vec<String>) {
    let printed = pipe.redeliver_with(variant, &["topics", "check"]);
    let own = |line: &&str| line.contains(&format!("topic `{}", pipe.name));
    let lines = printed.stdout.lines().filter(own);
    (printed.code, lines.map(str::to_owned).collect())
}

const TIERS_TO_ONE_SECOND: Row = Row {
    name: "day2-one-second",
    before: &[],
    change: |pipe| {
        let extra = pipe.pipeline.policy.tiers()[0].as_millis() % 1_000;
        let tiers = format!("{{ tiers: [{}ms] }}", 1_000 + extra);
        with(pipe, &[("retry", &tiers)])
    },
    leaves_source: false,
    processes: Processes::Same,
};

fn fails_once(setup: Setup) -> Pipe {
    setup
        .set("kafka.session_timeout", "6s")
        .behave(|request| match request.earlier_calls_of_key {
            0 => Reply::status(503),
            _ => Reply::ok(request.body.clone()),
        })
        .create()
}

#[test]
fn two_hundred_records_of_a_removed_tier_come_back_when_they_are_due() {
    let changed = Changed::new("day2-removed-tier", 9_000, 200);
    let Changed {
        pipe, after, sent, ..
    } = &changed;
    let _enricher = pipe.start_with(after, "enricher", "b", &[]);
    let mut relay = pipe.start_with(after, "retry-tier", "b", &[]);
    let produced = Produced {
        pipe,
        sent: sent.clone(),
    };
    settle(&TIERS_TO_ONE_SECOND, &after.pipeline, &produced);
    let line = "serving a tier that its pipeline does not have any more";
    relay.process.wait_for_output(line, DEADLINE);
    let line = relay.process.wait_for_output("leftover tier is empty", DEADLINE);
    assert_eq!(line.matches("leftover tier is empty").count(), 1, "{line}");
}

#[test]
fn a_tier_that_is_left_over_is_served_from_when_it_appears_until_it_is_deleted() {
    let changed = Changed::new("day2-appears", 2_000, 10);
    let Changed {
        pipe, after, former, ..
    } = &changed;
    let _enricher = pipe.start_with(after, "enricher", "b", &[]);
    let mut relay = pipe.start_with(after, "retry-tier", "b", &[]);
    // An old worker makes the topic of a tier that nobody knew of, and writes to it.
    let tier = Span::from_millis(former_millis(&changed) + 500);
    let late = pipe.pipeline.tier_topic(tier);
    raw::create_topic(&pipe.kafka.brokers, &late, &[]);
    let waiting = pipe.read(std::slice::from_ref(former));
    let again: Vec<Draft> = waiting[..1]
        .iter()
        .map(|record| Draft {
            key: record.key.clone(),
            value: Some("late".into()),
            headers: record.headers.clone(),
        })
        .collect();
    pipe.produce_to(&late, again);
    eventually("what was written later is released", DEADLINE, || {
        match pipe.endpoint.calls_of_body(b"late") {
            0 => Err("not yet"),
            _ => Ok(()),
        }
    });
    let part = format!("leftover-{late}");
    assert!(relay.get("/readyz").1.contains(&part));
    delete_topic(&pipe.kafka.brokers, &late);
    eventually(
        "its lane has ended and the process is ready",
        DEADLINE,
        || match relay.get("/readyz") {
            (200, body) if !body.contains(&part) => Ok(()),
            (_, body) => Err(body),
        },
    );
}

fn former_millis(changed: &Changed) -> u64 {
    changed.pipe.pipeline.policy.tiers()[0].as_millis()
}

#[test]
fn a_process_for_single_tiers_leaves_leftovers_to_one_that_serves_them() {
    let changed = Changed::new("day2-single", 3_000, 20);
    let Changed {
        pipe,
        after,
        former,
        sent,
    } = &changed;
    let tier = after.pipeline.policy.tiers()[0].to_string();
    let former_tier = pipe.pipeline.policy.tiers()[0].to_string();
    let _enricher = pipe.start_with(after, "enricher", "b", &[]);
    let mut single = pipe.start_with(after, "retry-tier", "single", &["--tier", &tier]);
    // It says so.
    let said = single
        .process
        .wait_for_output("not served by this process", DEADLINE);
    assert!(said.contains("20 records wait in it"), "{said}");
    let (code, said) = checked(pipe, after);
    let warning = format!(
        "warning: topic `{former}` is left over from when pipeline `{}` had the tier {former_tier}, and 20 records \
         wait in it; run a retry-tier with retry_tier.leftovers: true until it is empty",
        pipe.name
    );
    assert_eq!((code, said), (Some(0), vec![warning]));
    assert!(!single.get("/readyz").1.contains("leftover-"));
    // A process for this tier alone, which no pipeline has, and which is told to.
    let arguments = ["--tier", &former_tier, "--set", "retry_tier.leftovers=true"];
    let _other = pipe.start_with(after, "retry-tier", "other", &arguments);
    let produced = Produced {
        pipe,
        sent: sent.clone(),
    };
    settle(&TIERS_TO_ONE_SECOND, &after.pipeline, &produced);
    let warning = format!(
        "warning: topic `{former}` is left over from when pipeline `{}` had the tier {former_tier}, and nothing waits \
         in it; delete it once no process runs with the former configuration",
        pipe.name
    );
    let (code, said) = checked(pipe, after);
    assert_eq!((code, said), (Some(0), vec![warning]));
}

#[test]
fn topics_check_names_pipelines_that_hold_records_and_are_not_configured_any_more() {
    let pipe = fails_once(Setup::new("day2-forgotten").tiers(&[2_000]));
    let sent = let_wait(&pipe, 20);
    let former = pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
    // The pipeline is gone from the configuration, and another one is there.
    let other = Setup::new("day2-other").create();
    let forgotten = other.redeliver(&["topics", "check"]);
    let warning = format!(
        "warning: topic `{former}` is named after pipeline `{0}`, which is not configured, and 20 records wait in it; \
         list `{0}` under `retired` until it is empty",
        pipe.name
    );
    let own = |line: &&str| line.contains(&format!("topic `{}", pipe.name));
    let said: Vec<&str> = forgotten.stdout.lines().filter(own).collect();
    assert_eq!((forgotten.code, said), (Some(0), vec![warning.as_str()]));

    // Listed as retired it is finished, and then it may be removed.
    let retired = pipe.variant(retired, &[]);
    assert_eq!(checked(&pipe, &retired), (Some(0), vec![]));
    let _running = (
        pipe.start_with(&retired, "enricher", "b", &[]),
        pipe.start_with(&retired, "retry-tier", "b", &[]),
    );
    let produced = Produced { pipe: &pipe, sent };
    settle(&REMOVED, &retired.pipeline, &produced);
    let done = format!(
        "warning: topic `{}` and the tiers of the retired pipeline `{}` hold nothing any more; remove the pipeline from \
         `retired` and delete these topics",
        pipe.pipeline.due_topic(),
        pipe.name
    );
    eventually("it is done", DEADLINE, || match checked(&pipe, &retired) {
        (Some(0), said) if said == [done.clone()] => Ok(()),
        said => Err(format!("{said:?}")),
    });
    let audited = pipe.redeliver_with(&retired, &["audit"]);
    assert_eq!(audited.code, Some(0), "{audited:?}");
}

#[test]
fn a_time_lock_that_is_longer_than_max_wait_is_now_is_kept() {
    let busy = || Reply::Status(503, vec![("retry-after".into(), "900".into())], "busy".into());
    let pipe = Setup::new("day2-long-lock")
        .partitions(1)
        .tiers(&[1_000])
        .pipeline("http.max_retry_after", "1h")
        .behave(
            move |request| match (request.earlier_calls_of_key, request.body.starts_with(b"long")) {
                (0, true) => busy(),
                (0, false) => Reply::status(503),
                _ => Reply::ok(request.body.clone()),
            },
        )
        .create();
    let tier = pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
    let mut enricher = pipe.enricher("a");
    pipe.produce(vec![Draft::new("k", "long")]);
    until_waiting(&pipe, &tier, 1);
    pipe.produce(vec![Draft::new("k", "short")]);
    until_waiting(&pipe, &tier, 2);
    assert_eq!(enricher.end(), Some(0));
    let after = with(&pipe, &[("max_wait", "2s")]);
    let _enricher = pipe.start_with(&after, "enricher", "a", &[]);
    let _relay = pipe.start_with(&after, "retry-tier", "a", &[]);
    // What stands behind it in the same partition is released, so it has been looked at.
    let report = eventually("the short one has ended", DEADLINE, || {
        let report = pipe.audit_of(&after.pipeline);
        if report.output == 1 {
            Ok(report)
        } else {
            Err(report)
        }
    });
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.dead, report.waiting.in_tiers), (0, 1), "{report}");
}

#[test]
fn a_pipeline_that_is_renamed_finishes_under_its_former_name_and_begins_under_the_new_one() {
    let pipe = fails_once(Setup::new("day2-former").tiers(&[3_000]));
    let name = pipe.name.clone();
    let mut running = [pipe.enricher("a"), pipe.retry_tier("a")];
    let sent = pipe.produce((0..40).map(|n| Draft::new("k", format!("record {n}"))).collect());
    until_waiting(
        &pipe,
        &pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]),
        40,
    );
    for service in &mut running {
        assert_eq!(service.end(), Some(0));
    }
    // The former name is retired, the new one reads the same source and has an output of its own.
    let renamed = format!("{name}-new");
    let again = |file: &str| {
        let former = file.split_once("pipelines:\n").unwrap().1;
        let new = former
            .replace(
                &format!("  {name}:\n"),
                &format!("  {renamed}:\n    source: {name}\n"),
            )
            .replace(&format!("{name}-out"), &format!("{renamed}-out"));
        format!("{}pipelines:\n{new}", retired(file))
    };
    let after = pipe.variant(again, &[]);
    let applied = pipe.redeliver_with(&after, &["topics", "apply"]);
    assert_eq!(applied.code, Some(0), "{applied:?}");
    let _running = (
        pipe.start_with(&after, "enricher", "b", &[]),
        pipe.start_with(&after, "retry-tier", "b", &[]),
    );
    let produced = Produced { pipe: &pipe, sent };
    settle(&REMOVED, &after.pipeline, &produced);
    // To the new pipeline all that the source keeps is new.
    let new = Pipeline {
        name: renamed.as_str().into(),
        source: pipe.pipeline.source.clone(),
        output: Some(format!("{renamed}-out").into()),
        policy: pipe.pipeline.policy.clone(),
        ..Pipeline::new(&renamed)
    };
    let report = eventually("the new pipeline has handled the source", DEADLINE, || {
        let report = pipe.audit_of(&new);
        if report.output == 40 {
            Ok(report)
        } else {
            Err(report)
        }
    });
    assert!(report.is_clean() && report.dead == 0, "{report}");
}
