//! Changes of the configuration while there is work: every record still ends exactly once and never early.
//! docs/upgrade.md lists what these tests prove.
//!
//! A [`Row`] is a change. [`check`] makes it in each [`State`] of the pipeline and in each [`Order`] of restarts. It
//! produces records that fail once each, brings the pipeline into the state, changes the configuration, produces more
//! records, and runs the audit. To add a row, write a [`Row`] and name it in `rows!`.
//!
//! Each row takes about a minute, so rows run only with `cargo xtask test --long`.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use redeliver_core::headers::ERROR_CODE;
use redeliver_core::{HumanDuration, Pipeline, Position};
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{Reply, ServiceProcess, ensure, eventually, until_seen};

use crate::raw;
use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, Sent, Variant, end_topics, origin, text};

/// The number of records before the change.
const BEFORE: usize = 120;
/// The number of records that are produced at each step after the change.
const STEP: usize = 20;
/// The tier before the change, long enough for all records to wait during the change.
const TIER: u64 = 6_000;

/// A change of the configuration.
struct Row {
    name: &'static str,
    /// Settings before the change, in addition to those of [`PipeBuilder`].
    before: &'static [(&'static str, &'static str)],
    change: fn(&Pipe) -> Variant,
    /// Whether workers stop reading the previous source. The records that they have not read stay there.
    leaves_source: bool,
    processes: Processes,
}

/// The instances of each service, before and after the change.
#[derive(Clone, Copy)]
enum Processes {
    /// One, or two for a rolling restart.
    Same,
    /// The first list is replaced by the second.
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

/// The state of the pipeline when its configuration changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is running and has not processed a record yet.
    Empty,
    /// All records have failed once, and wait in a tier.
    Waiting,
    /// Records are being processed, in the source, and in a tier.
    InFlight,
}

/// The order of restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// All processes end, then all start.
    AtOnce,
    /// One process after the other, so that both configurations run at the same time.
    Rolling,
}

fn setting(pipe: &Pipe, key: &str, value: &str) -> (String, String) {
    (format!("pipelines.{}.{key}", pipe.name()), value.to_owned())
}

/// The configuration with these settings of the pipeline.
fn with(pipe: &Pipe, settings: &[(&str, &str)]) -> Variant {
    let settings: Vec<_> = settings
        .iter()
        .map(|(key, value)| setting(pipe, key, value))
        .collect();
    pipe.variant(str::to_owned, &settings)
}

/// A delay that is shorter than the pipeline's tier by `by` milliseconds. No other test uses it.
fn shorter_tier(pipe: &Pipe, by: u64) -> HumanDuration {
    HumanDuration::from_millis(pipe.pipeline.policy.tiers()[0].as_millis() - by)
}

/// What most rows have in common.
const ROW: Row = Row {
    name: "",
    before: &[],
    change: |pipe| pipe.variant(str::to_owned, &[]),
    leaves_source: false,
    processes: Processes::Same,
};

const TIERS: Row = Row {
    name: "day2-tiers",
    change: |pipe| {
        let tiers = format!("{{ tiers: [{}] }}", shorter_tier(pipe, 3_500));
        with(pipe, &[("retry", &tiers)])
    },
    ..ROW
};

const DUE_TO_SOURCE: Row = Row {
    name: "day2-to-source",
    change: |pipe| with(pipe, &[("return_to", "source")]),
    ..ROW
};

const SOURCE_TO_DUE: Row = Row {
    name: "day2-to-due",
    before: &[("return_to", "source")],
    change: |pipe| with(pipe, &[("return_to", "due")]),
    ..ROW
};

const MAX_WAIT: Row = Row {
    name: "day2-max-wait",
    before: &[("max_wait", "1h")],
    change: |pipe| {
        let tiers = format!("{{ tiers: [{}] }}", shorter_tier(pipe, 5_000));
        with(pipe, &[("retry", &tiers), ("max_wait", "2s")])
    },
    ..ROW
};

const SOURCE: Row = Row {
    name: "day2-source",
    change: |pipe| with(pipe, &[("source", &format!("{}-moved", pipe.name()))]),
    leaves_source: true,
    ..ROW
};

const REMOVED: Row = Row {
    name: "day2-removed",
    change: |pipe| pipe.variant(retired, &[]),
    leaves_source: true,
    ..ROW
};

/// A pipeline that shares the tier is added, so the subscriptions of the tier's lanes change.
const ADDED: Row = Row {
    name: "day2-added",
    change: |pipe| {
        let name = format!("{}-added", pipe.name());
        let tier = pipe.pipeline.policy.tiers()[0];
        let added = format!(
            "pipelines:\n  {name}:\n    output: {name}-out\n    retry: {{ tiers: [{tier}] }}\n    http: {{ url: {}/added }}\n",
            pipe.endpoint.url()
        );
        pipe.variant(|file| file.replace("pipelines:\n", &added), &[])
    },
    ..ROW
};

/// New results go to another topic. The previous topic keeps its records.
const OUTPUT: Row = Row {
    name: "day2-output",
    change: |pipe| with(pipe, &[("output", &format!("{}-out-2", pipe.name()))]),
    ..ROW
};

const LANES: Row = Row {
    name: "day2-lanes",
    change: |pipe| pipe.variant(str::to_owned, &[("kafka.lanes".to_owned(), "3".to_owned())]),
    ..ROW
};

const FEWER_LANES: Row = Row {
    name: "day2-fewer-lanes",
    before: &[("kafka.lanes", "3")],
    change: |pipe| pipe.variant(str::to_owned, &[("kafka.lanes".to_owned(), "1".to_owned())]),
    ..ROW
};

const INSTANCE: Row = Row {
    name: "day2-instance",
    processes: Processes::Change(&["a", "b"], &["c", "d"]),
    ..ROW
};

const MORE_PROCESSES: Row = Row {
    name: "day2-more",
    processes: Processes::Change(&["a"], &["a", "b", "c"]),
    ..ROW
};

const FEWER_PROCESSES: Row = Row {
    name: "day2-fewer",
    processes: Processes::Change(&["a", "b", "c"], &["a"]),
    ..ROW
};

/// The file with its pipeline under `retired`.
fn retired(file: &str) -> String {
    file.replace("pipelines:\n", "retired:\n")
}

/// One test per row, which checks every cell. The states of a row are checked at the same time, because a cell mostly waits.
macro_rules! rows {
    ($($name:ident: $row:expr),* $(,)?) => {$(
        #[test]
        #[ignore = "long"]
        fn $name() {
            check_row(&$row);
        }
    )*};
}

rows! {
    tiers: TIERS,
    return_to_source: DUE_TO_SOURCE,
    return_to_due: SOURCE_TO_DUE,
    max_wait: MAX_WAIT,
    source: SOURCE,
    removed: REMOVED,
    added: ADDED,
    output: OUTPUT,
    lanes: LANES,
    fewer_lanes: FEWER_LANES,
    instance: INSTANCE,
    more_processes: MORE_PROCESSES,
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
        // Each cell prints its own failure, so all of them finish before the test fails.
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

/// The records of a test, in the order of production.
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

/// Makes a change in a state and an order, and checks all records.
#[track_caller]
fn check(row: &Row, state: State, order: Order) {
    let mut setup = PipeBuilder::new(row.name)
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
    let start = |service: &'static str| -> Vec<(&'static str, ServiceProcess)> {
        let one = |instance: &&str| (service, pipe.start(service, instance, &[]));
        row.processes.before(order).iter().map(one).collect()
    };
    let (enrichers, tiers) = (start("enricher"), start("retry-tier"));

    let mut produced = Produced {
        pipe: &pipe,
        sent: Vec::new(),
    };
    reach(&mut produced, state);

    after.apply_topics();
    let source = after.pipeline.source.clone();
    let replacements = restarts(enrichers, tiers, row.processes.after(order));
    let mut running = Vec::new();
    match order {
        Order::AtOnce => {
            let mut starting = Vec::new();
            let mut ending = Vec::new();
            for (service, previous, instance) in replacements {
                starting.extend(instance.map(|instance| (service, instance)));
                ending.extend(previous);
            }
            for service in &mut ending {
                service.process().terminate();
            }
            for service in &mut ending {
                assert_eq!(service.wait(DEADLINE).code(), Some(0));
            }
            for (service, instance) in starting {
                running.push(after.env.start(service, instance, &[]));
            }
            produced.add(&source, STEP);
        }
        Order::Rolling => {
            for (service, previous, instance) in replacements {
                if let Some(mut previous) = previous {
                    previous.shut_down();
                }
                produced.add(&source, STEP);
                running.extend(instance.map(|instance| after.env.start(service, instance, &[])));
                produced.add(&source, STEP);
            }
        }
    }
    settle(row, &after.pipeline, &produced);
    running.iter_mut().for_each(ServiceProcess::shut_down);
}

/// A service, the process that ends, and the instance that replaces it.
type Replacement = (&'static str, Option<ServiceProcess>, Option<&'static str>);

/// The order of a rolling restart: one enricher, all retry tiers, the other enrichers. So every combination of old and new
/// configurations runs at some time.
fn restarts(
    enrichers: Vec<(&'static str, ServiceProcess)>,
    tiers: Vec<(&'static str, ServiceProcess)>,
    after: &'static [&'static str],
) -> Vec<Replacement> {
    let replacements =
        |service: &'static str, before: Vec<(&'static str, ServiceProcess)>| -> Vec<Replacement> {
            let count = before.len().max(after.len());
            let mut before = before.into_iter().map(|(_, process)| process);
            (0..count)
                .map(|index| (service, before.next(), after.get(index).copied()))
                .collect()
        };
    let mut enricher_replacements = replacements("enricher", enrichers);
    let last = enricher_replacements.split_off(1);
    let first = enricher_replacements.into_iter();
    first
        .chain(replacements("retry-tier", tiers))
        .chain(last)
        .collect()
}

/// Brings the pipeline into a state.
#[track_caller]
fn reach(produced: &mut Produced<'_>, state: State) {
    let pipe = produced.pipe;
    match state {
        State::Empty => {}
        State::Waiting => {
            produced.add(&pipe.pipeline.source, BEFORE);
            pipe.until_waiting(BEFORE);
        }
        State::InFlight => {
            produced.add(&pipe.pipeline.source, BEFORE);
            pipe.endpoint.until_calls(40);
        }
    }
}

/// Waits until nothing is in progress, and checks that each record ended exactly once and none early.
#[track_caller]
fn settle(row: &Row, after: &Pipeline, produced: &Produced<'_>) {
    let pipe = produced.pipe;
    // Results may be in the previous output and in the new one.
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
        let report = eventually("nothing is in progress", DEADLINE, || {
            let report = pipe.audit_of(&pipeline);
            let waiting = &report.waiting;
            let in_progress = waiting.total() - waiting.in_source;
            let is_settled = in_progress == 0 && (waiting.in_source == 0 || stays(waiting.in_source));
            ensure(is_settled && report.source == count, report.to_string()).map(|()| report)
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

/// The number of records that have ended. Each must have ended once, in an output of the pipeline.
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

/// Two configurations of a pipeline whose tier changes, with records that wait in the previous tier. No process is running.
struct Changed {
    pipe: Pipe,
    after: Variant,
    previous: Arc<str>,
    sent: Vec<Sent>,
}

impl Changed {
    /// Lets the first call for each of `records` records fail.
    fn new(name: &str, tier: u64, records: usize) -> Self {
        let pipe = fails_once(PipeBuilder::new(name).tiers(&[tier]));
        let after = (TIERS_TO_ONE_SECOND.change)(&pipe);
        after.apply_topics();
        let previous = pipe.first_tier();
        let sent = let_wait(&pipe, records);
        Self {
            pipe,
            after,
            previous,
            sent,
        }
    }
}

/// Produces records, and runs an enricher until all of them have failed once and wait.
fn let_wait(pipe: &Pipe, records: usize) -> Vec<Sent> {
    let mut enricher = pipe.enricher("a");
    let mut produced = Produced {
        pipe,
        sent: Vec::new(),
    };
    produced.add(&pipe.pipeline.source, records);
    pipe.until_waiting(records);
    enricher.shut_down();
    produced.sent
}

/// The exit status of `topics check`, and its lines about topics that are named after the pipeline.
fn checked(pipe: &Pipe, variant: &Variant) -> (Option<i32>, Vec<String>) {
    let printed = variant.env.run("redeliver", &["topics", "check"]);
    // Otherwise warnings could be missing because the records of some leftover could not be counted.
    assert!(!printed.stderr.contains("cannot count"), "{}", printed.stderr);
    let own = |line: &&str| line.contains(&format!("topic `{}", pipe.name()));
    let lines = printed.stdout.lines().filter(own);
    (printed.code, lines.map(str::to_owned).collect())
}

const TIERS_TO_ONE_SECOND: Row = Row {
    name: "day2-one-second",
    change: |pipe| {
        let extra = pipe.pipeline.policy.tiers()[0].as_millis() % 1_000;
        let tiers = format!("{{ tiers: [{}ms] }}", 1_000 + extra);
        with(pipe, &[("retry", &tiers)])
    },
    ..ROW
};

fn fails_once(setup: PipeBuilder) -> Pipe {
    setup
        .set("kafka.session_timeout", "6s")
        .behave(|request| match request.earlier_calls_of_key {
            0 => Reply::status(503),
            _ => Reply::ok(request.body.clone()),
        })
        .create()
}

#[test]
fn removed_tier_releases_its_records() {
    let changed = Changed::new("day2-removed-tier", 4_000, 100);
    let Changed {
        pipe, after, sent, ..
    } = &changed;
    let [_enricher, mut relay] = after.start("b");
    let produced = Produced {
        pipe,
        sent: sent.clone(),
    };
    settle(&TIERS_TO_ONE_SECOND, &after.pipeline, &produced);
    let line = "serving a leftover tier";
    relay.wait_for_output(line, DEADLINE);
    let line = relay.wait_for_output("leftover tier is empty", DEADLINE);
    assert_eq!(line.matches("leftover tier is empty").count(), 1, "{line}");
}

#[test]
fn leftover_tier_is_served_until_deleted() {
    let changed = Changed::new("day2-appears", 2_000, 10);
    let Changed {
        pipe,
        after,
        previous,
        ..
    } = &changed;
    let [_enricher, mut relay] = after.start("b");
    // A worker with an old configuration creates the topic of an unknown tier, and writes to it.
    let tier = HumanDuration::from_millis(previous_millis(&changed) + 500);
    let late = pipe.pipeline.tier_topic(tier);
    raw::create_topic(&pipe.kafka.brokers, &late, &[]);
    let waiting = pipe.read(std::slice::from_ref(previous));
    let again: Vec<Draft> = waiting[..1]
        .iter()
        .map(|record| Draft {
            key: record.key.clone(),
            value: Some("late".into()),
            headers: record.headers.clone(),
        })
        .collect();
    pipe.produce_to(&late, again);
    let calls = || pipe.endpoint.calls_of_body(b"late");
    until_seen("the late record", calls, |&calls| calls > 0);
    let part = format!("leftover-{late}");
    assert!(relay.get("/readyz").1.contains(&part));
    delete_topic(&pipe.kafka.brokers, &late);
    relay.until_readyz("its lane has ended", |status, body| {
        status == 200 && !body.contains(&part)
    });
}

fn previous_millis(changed: &Changed) -> u64 {
    changed.pipe.pipeline.policy.tiers()[0].as_millis()
}

#[test]
fn single_tiers_exclude_leftovers() {
    let changed = Changed::new("day2-single", 3_000, 20);
    let Changed {
        pipe,
        after,
        previous,
        sent,
    } = &changed;
    let tier = after.pipeline.policy.tiers()[0].to_string();
    let previous_tier = pipe.pipeline.policy.tiers()[0].to_string();
    let _enricher = after.env.start("enricher", "b", &[]);
    let mut single = after.env.start("retry-tier", "single", &["--tier", &tier]);
    let output = single.wait_for_output("not served by this process", DEADLINE);
    assert!(output.contains("holds 20 records"), "{output}");
    let (code, output) = checked(pipe, after);
    let warning = format!(
        "warning: topic `{previous}` is a leftover tier ({previous_tier}) of pipeline `{}` and holds 20 records; \
         run a retry-tier with retry_tier.leftovers: true until it is empty",
        pipe.name()
    );
    assert_eq!((code, output), (Some(0), vec![warning]));
    assert!(!single.get("/readyz").1.contains("leftover-"));
    // A process for this leftover tier only.
    let arguments = ["--tier", &previous_tier, "--set", "retry_tier.leftovers=true"];
    let _other = after.env.start("retry-tier", "other", &arguments);
    let produced = Produced {
        pipe,
        sent: sent.clone(),
    };
    settle(&TIERS_TO_ONE_SECOND, &after.pipeline, &produced);
    let warning = format!(
        "warning: topic `{previous}` is a leftover tier ({previous_tier}) of pipeline `{}` and is empty; \
         delete it once no process runs with the previous configuration",
        pipe.name()
    );
    let (code, output) = checked(pipe, after);
    assert_eq!((code, output), (Some(0), vec![warning]));
}

#[test]
fn check_lists_removed_pipelines() {
    let pipe = fails_once(PipeBuilder::new("day2-forgotten").tiers(&[2_000]));
    let sent = let_wait(&pipe, 20);
    let previous = pipe.first_tier();
    // The configuration has another pipeline instead.
    let other = PipeBuilder::new("day2-other").create();
    let forgotten = other.redeliver(&["topics", "check"]);
    let warning = format!(
        "warning: topic `{previous}` is named after pipeline `{0}`, which is not configured, and holds 20 records; \
         list `{0}` under `retired` until it is empty",
        pipe.name()
    );
    let own = |line: &&str| line.contains(&format!("topic `{}", pipe.name()));
    let output: Vec<&str> = forgotten.stdout.lines().filter(own).collect();
    assert_eq!((forgotten.code, output), (Some(0), vec![warning.as_str()]));

    // As a retired pipeline it finishes its records, and then it can be removed.
    let retired = pipe.variant(retired, &[]);
    assert_eq!(checked(&pipe, &retired), (Some(0), vec![]));
    let _running = retired.start("b");
    let produced = Produced { pipe: &pipe, sent };
    settle(&REMOVED, &retired.pipeline, &produced);
    let done = format!(
        "warning: topic `{}` and the tiers of the retired pipeline `{}` are empty; remove the pipeline from \
         `retired` and delete these topics",
        pipe.pipeline.due_topic(),
        pipe.name()
    );
    let done = (Some(0), vec![done]);
    until_seen("it is done", || checked(&pipe, &retired), |seen| *seen == done);
    let audited = retired.env.run("redeliver", &["audit"]);
    assert_eq!(audited.code, Some(0), "{audited:?}");
}

#[test]
fn renamed_pipeline_finishes_both_names() {
    let pipe = fails_once(PipeBuilder::new("day2-previous").tiers(&[3_000]));
    let name = pipe.name().to_owned();
    let mut running = [pipe.enricher("a"), pipe.retry_tier("a")];
    let sent = pipe.produce((0..40).map(|n| Draft::new("k", format!("record {n}"))).collect());
    pipe.until_waiting(40);
    for service in &mut running {
        service.shut_down();
    }
    // The previous name is retired. The new pipeline reads the same source and has another output.
    let renamed = format!("{name}-new");
    let again = |file: &str| {
        let previous = file.split_once("pipelines:\n").unwrap().1;
        let new = previous
            .replace(
                &format!("  {name}:\n"),
                &format!("  {renamed}:\n    source: {name}\n"),
            )
            .replace(&format!("{name}-out"), &format!("{renamed}-out"));
        format!("{}pipelines:\n{new}", retired(file))
    };
    let after = pipe.variant(again, &[]);
    after.apply_topics();
    let _running = after.start("b");
    let produced = Produced { pipe: &pipe, sent };
    settle(&REMOVED, &after.pipeline, &produced);
    // All records in the source are new to the new pipeline.
    let new = Pipeline {
        name: renamed.as_str().into(),
        source: pipe.pipeline.source.clone(),
        output: Some(format!("{renamed}-out").into()),
        policy: pipe.pipeline.policy.clone(),
        ..Pipeline::new(&renamed)
    };
    let report = eventually("the new pipeline has handled the source", DEADLINE, || {
        let report = pipe.audit_of(&new);
        ensure(report.output == 40, report.to_string()).map(|()| report)
    });
    assert!(report.is_clean() && report.dead == 0, "{report}");
}
