use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;
use redeliver_core::headers::{ORIGINAL_OFFSET, PIPELINE, TRACEPARENT, TraceContext};
use redeliver_core::pipeline::DelayQueue;
use redeliver_core::route::{Disposition, reject, route, strip_payload};
use redeliver_core::{Failure, Headers, Outcome, Output};

use super::*;

const START: Timestamp = Timestamp::from_millis(1_700_000_000_000);
/// Longer than any tier.
const LONG: Duration = Duration::from_secs(3600);

type HeaderList = Vec<(String, Option<Vec<u8>>)>;

/// A record somewhere, as an audit sees it.
#[derive(Clone, Debug)]
struct Seen {
    role: Role,
    record: Record,
    unread: bool,
}

/// A pipeline that keeps all promises, made of the same decisions as the services.
#[derive(Debug)]
struct World {
    pipeline: Pipeline,
    next_offset: HashMap<Arc<str>, i64>,
    seen: Vec<Seen>,
}

/// Where a record is when the audit comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Output,
    Dead,
    WaitsInTier,
    WaitsInDue,
    WaitsInSource,
}

impl World {
    fn new(return_to: ReturnTo) -> Self {
        let pipeline = Pipeline {
            output: Some("done".into()),
            return_to,
            ..Pipeline::new("docs")
        };
        Self {
            pipeline,
            next_offset: HashMap::new(),
            seen: Vec::new(),
        }
    }

    fn write(&mut self, role: Role, output: Output, partition: i32, timestamp: Timestamp) -> Record {
        let next = self.next_offset.entry(output.topic.clone()).or_default();
        // Like a marker of a transaction now and then.
        *next += 1 + i64::from(*next % 7 == 3);
        let record = Record {
            position: Position {
                topic: output.topic,
                partition,
                offset: *next,
            },
            timestamp: Some(timestamp),
            key: output.key,
            value: output.value,
            headers: output.headers,
            unreadable_headers: 0,
        };
        self.seen.push(Seen {
            role,
            record: record.clone(),
            unread: false,
        });
        record
    }

    fn source(
        &mut self,
        key: Option<&[u8]>,
        value: Option<&[u8]>,
        headers: Headers,
        partition: i32,
    ) -> Record {
        let bytes = |bytes: Option<&[u8]>| bytes.map(Bytes::copy_from_slice);
        let output = Output {
            topic: self.pipeline.source.clone(),
            partition: None,
            key: bytes(key),
            value: bytes(value),
            headers,
        };
        self.write(Role::Source, output, partition, START)
    }

    fn plain(&mut self) -> Record {
        let headers = [
            ("tenant", Some(&b"a"[..])),
            ("tenant", None),
            ("x", Some(&b""[..])),
        ];
        self.source(Some(b"k"), Some(b"v"), headers.into_iter().collect(), 0)
    }

    /// Lets a record live from where it stands: so many failures, then its fate.
    fn live(&mut self, mut record: Record, failures: u32, fate: Fate, late: u64) {
        let trace = TraceContext {
            traceparent: format!("00-{late}"),
            tracestate: None,
        };
        let mut now = START;
        let stay = |world: &mut Self| world.seen.last_mut().unwrap().unread = true;
        let back = match self.pipeline.return_to {
            ReturnTo::Due => Role::Due,
            ReturnTo::Source => Role::Source,
        };
        for failure in 1..=failures {
            let arrival = Arrival::read(&self.pipeline, &record).unwrap();
            // Through the scheduler first, where there is one.
            let failed = match self.pipeline.long_waits {
                Some(_) if failure == 1 => Failure::throttled(LONG, "http.503", "busy"),
                _ => Failure::transient("http.503", "busy"),
            };
            let outcome = Outcome::Failed(failed);
            let mut routing = route(&self.pipeline, &record, &arrival, outcome, Some(&trace), now, 0.5);
            let carrier = match routing.disposition {
                Disposition::Waiting {
                    carrier: DelayQueue::Scheduler,
                    ..
                } => Role::Scheduler,
                _ => Role::Tier,
            };
            let waiting = self.write(carrier, routing.outputs.remove(0), 1, now);
            if failure == failures && fate == Fate::WaitsInTier {
                return stay(self);
            }
            now = due_time(&waiting).unwrap().after(Duration::from_millis(late));
            let output = Output {
                topic: self.pipeline.return_topic(),
                partition: None,
                key: waiting.key,
                value: waiting.value,
                headers: waiting.headers,
            };
            record = self.write(back, output, 0, now);
            if failure == failures && fate == Fate::WaitsInDue {
                return stay(self);
            }
        }
        let (role, outcome) = match fate {
            Fate::Output => (Role::Output, Outcome::unchanged()),
            Fate::Dead => (Role::Dead, Outcome::Failed(Failure::permanent("http.400", "no"))),
            Fate::WaitsInSource | Fate::WaitsInDue | Fate::WaitsInTier => return stay(self),
        };
        let arrival = Arrival::read(&self.pipeline, &record).unwrap();
        let mut routing = route(&self.pipeline, &record, &arrival, outcome, Some(&trace), now, 0.5);
        self.write(role, routing.outputs.remove(0), 2, now);
    }

    fn report_with(&self, check: OutputCheck) -> Report {
        let mut ledger = Ledger::new(&self.pipeline, check);
        for seen in &self.seen {
            match seen.role {
                Role::Source => ledger.source(&seen.record, seen.unread),
                Role::Tier => ledger.tier(&seen.record, seen.unread),
                Role::Scheduler => drop(ledger.scheduled(&seen.record, seen.unread)),
                Role::Due => ledger.due(&seen.record, seen.unread),
                Role::Output => ledger.output(&seen.record),
                Role::Dead => ledger.dead(&seen.record),
            }
        }
        ledger.report()
    }

    fn report(&self) -> Report {
        self.report_with(OutputCheck::Unchanged)
    }

    fn last_of(&mut self, role: Role) -> &mut Record {
        &mut self
            .seen
            .iter_mut()
            .rfind(|seen| seen.role == role)
            .unwrap()
            .record
    }
}

/// A world with one record of each fate; the one that reaches the output was tried three times.
fn all_fates(return_to: ReturnTo) -> World {
    let mut world = World::new(return_to);
    for (failures, fate) in [
        (2, Fate::Output),
        (0, Fate::Dead),
        (1, Fate::WaitsInTier),
        (3, Fate::WaitsInDue),
        (0, Fate::WaitsInSource),
    ] {
        let record = world.plain();
        world.live(record, failures, fate, 4);
    }
    world
}

/// The defects of a report and how many there are of each.
fn defects(report: &Report) -> Vec<(&'static str, u64)> {
    let defects = report.defects().into_iter();
    defects
        .filter(|(_, found)| !found.is_empty())
        .map(|(name, found)| (name, found.count))
        .collect()
}

#[track_caller]
fn check(world: &World, expected: &[(&str, u64)]) -> Report {
    let report = world.report();
    assert_eq!(defects(&report), expected, "{report}");
    assert_eq!(report.is_clean(), expected.is_empty());
    report
}

fn with_headers(record: &mut Record, change: impl FnOnce(&mut HeaderList)) {
    let mut list: Vec<_> = record
        .headers
        .iter()
        .map(|(name, value)| (name.to_owned(), value.map(<[u8]>::to_vec)))
        .collect();
    change(&mut list);
    record.headers = list
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_deref()))
        .collect();
}

#[test]
fn a_clean_run_is_clean_and_all_is_counted_once() {
    for return_to in [ReturnTo::Due, ReturnTo::Source] {
        let report = check(&all_fates(return_to), &[]);
        assert_eq!((report.source, report.output, report.dead), (5, 1, 1));
        let waiting = &report.waiting;
        assert_eq!((waiting.in_source, waiting.in_tiers, waiting.in_due), (1, 1, 1));
        assert_eq!(report.dead_by_class, [("permanent".to_owned(), 1)].into());
        assert_eq!(report.retries, [(1, 1), (2, 1)].into());
        assert_eq!(report.min_margin_ms, Some(4));
        assert_eq!(report.lateness.unwrap().max_ms, 4);
        assert!(
            report.foreign.is_empty() && report.source_gone == 0 && report.newer == 0,
            "{report}"
        );
    }
}

/// A world whose long waits go through a scheduler.
fn with_scheduler(return_to: ReturnTo) -> World {
    let mut world = World::new(return_to);
    world.pipeline.long_waits = Some("ingest".into());
    world
}

#[test]
fn a_record_with_the_scheduler_waits_and_is_compared_like_any_other() {
    for return_to in [ReturnTo::Due, ReturnTo::Source] {
        let mut world = with_scheduler(return_to);
        for (failures, fate) in [
            (1, Fate::Output),
            (2, Fate::Dead),
            (1, Fate::WaitsInTier),
            (2, Fate::WaitsInTier),
            (1, Fate::WaitsInDue),
        ] {
            let record = world.plain();
            world.live(record, failures, fate, 4);
        }
        let report = check(&world, &[]);
        assert_eq!((report.source, report.output, report.dead), (5, 1, 1));
        let waiting = &report.waiting;
        assert_eq!(
            (waiting.in_scheduler, waiting.in_tiers, waiting.in_due),
            (1, 1, 1)
        );
        assert_eq!(report.min_margin_ms, Some(4));
    }
    let mut world = with_scheduler(ReturnTo::Due);
    let record = world.plain();
    world.live(record, 1, Fate::Output, 0);
    world.last_of(Role::Due).key = None;
    let report = check(&world, &[("altered", 1)]);
    let reason = &report.altered.sample[0].reason;
    assert!(reason.contains("key or headers differ"), "{report}");
}

#[test]
fn a_record_that_the_scheduler_did_not_give_back_is_lost() {
    let mut world = with_scheduler(ReturnTo::Due);
    let record = world.plain();
    world.live(record, 1, Fate::WaitsInTier, 0);
    check(&world, &[]);
    world.seen.last_mut().unwrap().unread = false;
    let report = check(&world, &[("lost", 1)]);
    let reason = &report.lost.sample[0].reason;
    assert!(reason.starts_with("was last seen with the scheduler"), "{report}");
}

#[test]
fn a_job_that_has_not_ended_waits_and_must_not_have_an_end() {
    let mut world = with_scheduler(ReturnTo::Due);
    let record = world.plain();
    world.live(record, 1, Fate::Output, 0);
    let [source, command, back, end] = &world.seen[..] else {
        panic!("{:?}", world.seen)
    };
    let mut ledger = Ledger::new(&world.pipeline, OutputCheck::Unchanged);
    ledger.positions_known();
    let job = ledger.scheduled(&command.record, false).unwrap();
    ledger.source(&source.record, false);
    assert_eq!(defects(&ledger.report()), [("lost", 1)]);
    ledger.still_scheduled(job);
    let report = ledger.report();
    assert!(report.is_clean() && report.waiting.in_scheduler == 1, "{report}");
    // It was dispatched after the state topic was read.
    ledger.due(&back.record, true);
    let report = ledger.report();
    assert!(report.is_clean() && report.waiting.in_due == 1, "{report}");

    // With an end that was there before, it will be dispatched a second time.
    let mut ledger = Ledger::new(&world.pipeline, OutputCheck::Unchanged);
    ledger.output(&end.record);
    ledger.positions_known();
    let job = ledger.scheduled(&command.record, false).unwrap();
    ledger.still_scheduled(job);
    ledger.source(&source.record, false);
    assert_eq!(defects(&ledger.report()), [("doubled", 1)]);
}

#[test]
fn a_record_that_is_nowhere_is_lost_whether_it_was_tried_or_not() {
    for (failures, last) in [
        (0, "was only seen in the source"),
        (2, "was last seen in the due topic"),
    ] {
        let mut world = all_fates(ReturnTo::Due);
        let record = world.plain();
        let origin = record.position.to_string();
        world.live(record, failures, Fate::Output, 0);
        world.seen.pop();
        let report = check(&world, &[("lost", 1)]);
        assert_eq!(report.lost.sample[0].origin, origin);
        assert!(report.lost.sample[0].reason.starts_with(last), "{report}");
        assert!(report.to_string().contains("NOT CLEAN: lost"));
    }
}

#[test]
fn two_ends_are_one_too_many_in_whichever_topics() {
    for (from, to) in [
        (Role::Output, Role::Output),
        (Role::Dead, Role::Dead),
        (Role::Output, Role::Dead),
    ] {
        let mut world = all_fates(ReturnTo::Due);
        let mut second = world.seen.iter().find(|seen| seen.role == from).unwrap().clone();
        second.role = to;
        second.record.position.offset += 100;
        let at = second.record.position.to_string();
        world.seen.push(second);
        let report = check(&world, &[("doubled", 1)]);
        assert_eq!(report.doubled.sample[0].at, Some(at));
    }
}

#[test]
fn a_record_that_ended_and_still_waits_will_end_twice() {
    for role in [Role::Source, Role::Tier, Role::Due] {
        let mut world = World::new(ReturnTo::Due);
        let record = world.plain();
        world.live(record, 1, Fate::Output, 0);
        let seen = world.seen.iter_mut().find(|seen| seen.role == role).unwrap();
        seen.unread = true;
        check(&world, &[("doubled", 1)]);
    }
}

#[test]
fn a_record_that_ended_after_the_positions_were_known_may_look_unread() {
    let mut world = World::new(ReturnTo::Due);
    let record = world.plain();
    world.live(record, 0, Fate::Output, 0);
    let mut ledger = Ledger::new(&world.pipeline, OutputCheck::Unchanged);
    ledger.positions_known();
    ledger.source(&world.seen[0].record, true);
    ledger.output(&world.seen[1].record);
    let report = ledger.report();
    assert!(report.is_clean() && report.output == 1, "{report}");
}

#[test]
fn a_release_before_the_due_time_is_early_even_by_a_millisecond() {
    for return_to in [ReturnTo::Due, ReturnTo::Source] {
        let mut world = World::new(return_to);
        let record = world.plain();
        world.live(record, 1, Fate::WaitsInDue, 0);
        check(&world, &[]);
        let released = &mut world.seen.last_mut().unwrap().record;
        released.timestamp = Some(Timestamp::from_millis(
            released.timestamp.unwrap().as_millis() - 1,
        ));
        let report = check(&world, &[("early", 1)]);
        assert_eq!(report.min_margin_ms, Some(-1));
        assert!(report.early.sample[0].reason.contains("1 ms before"), "{report}");
    }
}

#[test]
fn a_due_time_years_away_is_no_excuse_for_an_early_release() {
    let mut world = World::new(ReturnTo::Due);
    let record = world.plain();
    world.live(record, 1, Fate::WaitsInDue, 0);
    with_headers(world.last_of(Role::Due), |headers| {
        let due = headers
            .iter_mut()
            .find(|(name, _)| name == PROCESS_AFTER)
            .unwrap();
        due.1 = Some(b"2999-01-01T00:00:00.000Z".to_vec());
    });
    check(&world, &[("early", 1)]);
}

/// Changes one copy in one way and expects it to be found, and nothing else.
#[track_caller]
fn altered(role: Role, change: impl Fn(&mut Record), word: &str) {
    let mut world = World::new(ReturnTo::Due);
    let record = world.plain();
    world.live(
        record,
        1,
        if role == Role::Dead {
            Fate::Dead
        } else {
            Fate::Output
        },
        0,
    );
    change(world.last_of(role));
    for _ in 0..2 {
        let report = check(&world, &[("altered", 1)]);
        assert!(report.altered.sample[0].reason.contains(word), "{word}: {report}");
        world.seen.reverse();
    }
}

#[test]
fn a_changed_byte_is_found_in_every_topic() {
    for role in [Role::Source, Role::Tier, Role::Due, Role::Output, Role::Dead] {
        altered(
            role,
            |record| record.value = Some(Bytes::from_static(b"w")),
            "value differs",
        );
        altered(role, |record| record.value = None, "value differs");
        altered(role, |record| record.value = Some(Bytes::new()), "value differs");
        altered(role, |record| record.key = None, "key or headers");
        altered(role, |record| record.key = Some(Bytes::new()), "key or headers");
        let headers = |change: fn(&mut HeaderList)| {
            altered(role, |record| with_headers(record, change), "key or headers");
        };
        headers(|list| list[0].1 = Some(b"b".to_vec()));
        headers(|list| list.swap(0, 1));
        headers(|list| list[1].1 = Some(Vec::new()));
        headers(|list| list[2].1 = None);
        headers(|list| list[2].0 = "y".into());
        headers(|list| drop(list.remove(1)));
        headers(|list| list.push(("new".into(), None)));
        // A byte that moves from one field into its neighbour.
        headers(|list| (list[2].0, list[0].1) = ("xa".into(), Some(Vec::new())));
    }
}

#[test]
fn what_a_handler_may_replace_is_told_by_the_check() {
    let mut world = World::new(ReturnTo::Due);
    let record = world.plain();
    world.live(record, 1, Fate::Output, 0);
    world.last_of(Role::Output).value = None;
    check(&world, &[("altered", 1)]);
    assert!(world.report_with(OutputCheck::ValueReplaced).is_clean());
    world.last_of(Role::Output).key = None;
    assert_eq!(
        defects(&world.report_with(OutputCheck::ValueReplaced)),
        [("altered", 1)]
    );
    assert!(world.report_with(OutputCheck::Free).is_clean());
    world.last_of(Role::Tier).key = None;
    assert_eq!(
        defects(&world.report_with(OutputCheck::Free)),
        [("altered", 1)],
        "tiers may never"
    );
}

#[test]
fn trace_context_may_change() {
    let mut world = World::new(ReturnTo::Due);
    let headers = [(TRACEPARENT, Some(&b"old"[..])), ("tracestate", Some(&b"s"[..]))];
    let record = world.source(None, None, headers.into_iter().collect(), 0);
    world.live(record, 1, Fate::Output, 0);
    check(&world, &[]);
}

#[test]
fn a_forged_record_that_a_tier_rejected_is_foreign() {
    let mut world = all_fates(ReturnTo::Due);
    let tier = world.pipeline.tier_topic(Span::from_secs(5));
    let headers = [(PROCESS_AFTER, Some(&b"now"[..]))].into_iter().collect();
    let forged = Output {
        topic: tier,
        partition: None,
        key: None,
        value: Some(Bytes::from_static(b"?")),
        headers,
    };
    let record = world.write(Role::Tier, forged, 0, START);
    let mut routing = reject(&world.pipeline, &record, &Failure::malformed("x", "y"), START);
    world.write(Role::Dead, routing.outputs.remove(0), 0, START);
    let report = check(&world, &[]);
    assert_eq!((report.foreign.count, report.dead), (2, 1));
    assert!(
        report.foreign.sample[1].origin.starts_with("docs-retry-5s-0@"),
        "{report}"
    );
}

#[test]
fn what_others_write_to_the_output_is_foreign() {
    let mut world = all_fates(ReturnTo::Due);
    let mut other = world
        .seen
        .iter()
        .find(|seen| seen.role == Role::Output)
        .unwrap()
        .clone();
    with_headers(&mut other.record, |headers| {
        headers.iter_mut().find(|(name, _)| name == PIPELINE).unwrap().1 = Some(b"other".to_vec());
    });
    world.seen.push(other.clone());
    other.record.headers = Headers::new();
    world.seen.push(other);
    let report = check(&world, &[]);
    assert_eq!((report.foreign.count, report.output), (2, 1));
}

#[test]
fn an_end_of_a_record_that_never_came_in_is_unknown() {
    let mut world = all_fates(ReturnTo::Due);
    with_headers(world.last_of(Role::Output), |headers| {
        let offset = headers
            .iter_mut()
            .find(|(name, _)| name == ORIGINAL_OFFSET)
            .unwrap();
        offset.1 = Some(b"999999999".to_vec());
    });
    check(&world, &[("lost", 1), ("unknown", 1)]);
}

#[test]
fn origins_that_the_source_no_longer_keeps_are_not_judged() {
    let mut world = all_fates(ReturnTo::Due);
    let record = world.plain();
    world.live(record, 0, Fate::Output, 0);
    world
        .seen
        .retain(|seen| seen.role != Role::Source || seen.record.position.offset > 6);
    let report = check(&world, &[]);
    assert_eq!(
        (report.source, report.output, report.source_gone),
        (1, 1, 4),
        "{report}"
    );
}

#[test]
fn an_end_that_is_newer_than_the_source_as_it_was_read_is_not_judged() {
    let mut world = all_fates(ReturnTo::Due);
    let record = world.plain();
    world.live(record, 0, Fate::Output, 0);
    let newer = world.seen.pop().unwrap();
    world.seen.pop();
    let mut ledger = Ledger::new(&world.pipeline, OutputCheck::Unchanged);
    ledger.positions_known();
    world
        .seen
        .iter()
        .filter(|seen| seen.role == Role::Source)
        .for_each(|seen| ledger.source(&seen.record, true));
    ledger.output(&newer.record);
    let report = ledger.report();
    assert!(report.is_clean() && report.newer == 1, "{report}");
}

#[test]
fn without_an_output_topic_successes_cannot_be_counted() {
    let mut world = all_fates(ReturnTo::Due);
    world.pipeline.output = None;
    world.seen.retain(|seen| seen.role != Role::Output);
    let report = check(&world, &[]);
    assert_eq!((report.uncounted, report.successes_counted), (1, false));
    assert!(
        report.to_string().contains("successes cannot be counted"),
        "{report}"
    );
    let mut second = world
        .seen
        .iter()
        .find(|seen| seen.role == Role::Dead)
        .unwrap()
        .clone();
    second.record.position.offset += 100;
    world.seen.push(second);
    check(&world, &[("doubled", 1)]);
}

/// The dead letter at the end of a world, as the inspector sends it to the due topic again.
fn redrive(world: &mut World, count: u32) -> Record {
    let dead = world.last_of(Role::Dead).clone();
    let mut headers = dead
        .headers
        .filtered(|name| !name.starts_with("error-") && !name.starts_with("redrive-"));
    headers.push_text("redrive-id", "r");
    headers.push_text("redrive-count", &count.to_string());
    let output = Output {
        topic: world.pipeline.due_topic(),
        partition: None,
        key: dead.key,
        value: dead.value,
        headers,
    };
    world.write(Role::Due, output, 0, START)
}

#[test]
fn a_redriven_record_has_a_life_more_and_its_last_one_counts() {
    let mut world = World::new(ReturnTo::Due);
    let record = world.plain();
    world.live(record, 0, Fate::Dead, 0);
    for count in [1, 2] {
        let record = redrive(&mut world, count);
        world.live(record, 2 - count, Fate::Dead, 0);
    }
    let report = check(&world, &[]);
    assert_eq!((report.source, report.dead, report.redriven), (1, 1, 1));
    let record = redrive(&mut world, 3);
    world.live(record, 0, Fate::Output, 0);
    let report = check(&world, &[]);
    assert_eq!(
        (report.source, report.dead, report.output, report.redriven),
        (1, 0, 1, 1)
    );
    let output = world.seen.pop().unwrap();
    check(&world, &[("lost", 1)]);
    world.seen.extend([output.clone(), output]);
    check(&world, &[("doubled", 1)]);
    world.seen.pop();
    for seen in world.seen.iter_mut().rev().take(2) {
        seen.record.value = None;
    }
    let report = check(&world, &[("altered", 1)]);
    assert!(report.altered.sample[0].reason.contains("redrive 3"), "{report}");
}

#[test]
fn a_report_is_json_and_text() {
    let mut world = all_fates(ReturnTo::Due);
    world.seen.retain(|seen| seen.role != Role::Dead);
    let report = world.report();
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["lost"]["count"], 1);
    assert_eq!(json["waiting"]["in_tiers"], 1);
    assert!(json["lost"]["sample"][0]["origin"].is_string());
    assert!(
        report.to_string().contains("  lost                         1"),
        "{report}"
    );
}

fn bytes() -> impl Strategy<Value = Option<Vec<u8>>> {
    proptest::option::of(proptest::collection::vec(any::<u8>(), 0..12))
}

prop_compose! {
    fn life()(
        key in bytes(),
        value in bytes(),
        headers in proptest::collection::vec(("[a-z]{0,5}", bytes()), 0..5),
        failures in 0_u32..=3,
        fate in prop_oneof![
            Just(Fate::Output), Just(Fate::Dead), Just(Fate::WaitsInTier), Just(Fate::WaitsInDue),
            Just(Fate::WaitsInSource)
        ],
        late in 0_u64..100,
        partition in 0_i32..3,
    ) -> (Option<Vec<u8>>, Option<Vec<u8>>, Headers, u32, Fate, u64, i32) {
        let headers = headers.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
        let failures = match fate {
            Fate::WaitsInSource => 0,
            Fate::WaitsInTier | Fate::WaitsInDue => failures.max(1),
            Fate::Output | Fate::Dead => failures,
        };
        (key, value, headers, failures, fate, late, partition)
    }
}

prop_compose! {
    fn world()(
        lives in proptest::collection::vec(life(), 1..20),
        to_source in any::<bool>(),
        through_scheduler in any::<bool>(),
    )(
        order in Just((0..lives.len() * 8).collect::<Vec<_>>()).prop_shuffle(),
        lives in Just(lives),
        to_source in Just(to_source),
        through_scheduler in Just(through_scheduler),
    ) -> World {
        let return_to = if to_source { ReturnTo::Source } else { ReturnTo::Due };
        let mut world = if through_scheduler { with_scheduler(return_to) } else { World::new(return_to) };
        for (key, value, headers, failures, fate, late, partition) in lives {
            let record = world.source(key.as_deref(), value.as_deref(), headers, partition);
            world.live(record, failures, fate, late);
        }
        let mut seen: Vec<_> = world.seen.into_iter().enumerate().collect();
        seen.sort_by_key(|(index, _)| order[*index]);
        world.seen = seen.into_iter().map(|(_, seen)| seen).collect();
        world
    }
}

#[derive(Clone, Copy, Debug)]
enum Corruption {
    LoseEnd,
    LoseWaiting,
    DoubleEnd,
    KeepWaiting,
    ReleaseEarly,
    Value,
    Key,
    HeaderValue,
    HeaderNull,
    HeaderName,
    HeaderOrder,
    HeaderAdded,
    HeaderRemoved,
}

fn corruption() -> impl Strategy<Value = Corruption> {
    use Corruption::{
        DoubleEnd, HeaderAdded, HeaderName, HeaderNull, HeaderOrder, HeaderRemoved, HeaderValue, KeepWaiting,
        Key, LoseEnd, LoseWaiting, ReleaseEarly, Value,
    };
    proptest::sample::select(vec![
        LoseEnd,
        LoseWaiting,
        DoubleEnd,
        KeepWaiting,
        ReleaseEarly,
        Value,
        Key,
        HeaderValue,
        HeaderNull,
        HeaderName,
        HeaderOrder,
        HeaderAdded,
        HeaderRemoved,
    ])
}

/// Another byte string: null becomes empty, empty null, the rest gets longer.
fn other(bytes: Option<&[u8]>) -> Option<Vec<u8>> {
    match bytes {
        None => Some(Vec::new()),
        Some([]) => None,
        Some(bytes) => Some([bytes, b"!"].concat()),
    }
}

/// Does one thing that must not be, to the first record it can be done to; names what must be found.
fn corrupt(world: &mut World, corruption: Corruption) -> Option<&'static str> {
    let is_end = |seen: &Seen| matches!(seen.role, Role::Output | Role::Dead);
    let is_retry = |seen: &Seen| ReservedHeaders::read(&seen.record).unwrap().is_retry_of("docs");
    let ended: Vec<_> = world
        .seen
        .iter()
        .filter(|seen| is_end(seen))
        .map(|seen| Arrival::salvaged(&seen.record).origin)
        .collect();
    let has_user_headers = |seen: &Seen, count: usize| {
        let names = seen.record.headers.iter().map(|(name, _)| name);
        names
            .filter(|name| !redeliver_core::headers::is_ours(name) && *name != TRACEPARENT)
            .count()
            >= count
    };
    let find = |world: &World, wanted: &dyn Fn(&Seen) -> bool| world.seen.iter().position(wanted);
    let change = |world: &mut World, least: usize, change: &dyn Fn(&mut Record)| {
        let index = find(world, &|seen| is_retry(seen) && has_user_headers(seen, least))?;
        change(&mut world.seen[index].record);
        Some("altered")
    };
    match corruption {
        Corruption::LoseEnd => {
            let index = find(world, &is_end)?;
            world.seen.remove(index);
            Some("lost")
        }
        Corruption::LoseWaiting => {
            let index = find(world, &|seen| seen.unread)?;
            world.seen[index].unread = false;
            Some("lost")
        }
        Corruption::DoubleEnd => {
            let index = find(world, &is_end)?;
            world.seen.push(world.seen[index].clone());
            Some("doubled")
        }
        Corruption::KeepWaiting => {
            let index = find(world, &|seen| {
                let source = Arrival::read(&world.pipeline, &seen.record).map(|arrival| arrival.origin);
                let origin = if is_retry(seen) {
                    Arrival::salvaged(&seen.record).origin
                } else {
                    source.unwrap()
                };
                !is_end(seen) && ended.contains(&origin)
            })?;
            world.seen[index].unread = true;
            Some("doubled")
        }
        Corruption::ReleaseEarly => {
            let index = find(world, &|seen| {
                matches!(seen.role, Role::Due | Role::Source) && is_retry(seen)
            })?;
            let record = &mut world.seen[index].record;
            let due = due_time(record).unwrap();
            record.timestamp = Some(Timestamp::from_millis(due.as_millis() - 1));
            Some("early")
        }
        Corruption::Value => change(world, 0, &|record| {
            record.value = other(record.value.as_deref()).map(Into::into);
        }),
        Corruption::Key => change(world, 0, &|record| {
            record.key = other(record.key.as_deref()).map(Into::into);
        }),
        Corruption::HeaderValue => change(world, 1, &|record| {
            with_headers(record, |list| list[0].1 = Some(vec![7; 20]));
        }),
        Corruption::HeaderNull => change(world, 1, &|record| {
            with_headers(record, |list| list[0].1 = other(list[0].1.as_deref()));
        }),
        Corruption::HeaderName => change(world, 1, &|record| {
            with_headers(record, |list| list[0].0.push('x'));
        }),
        Corruption::HeaderAdded => change(world, 0, &|record| record.headers.push("", None)),
        Corruption::HeaderRemoved => change(world, 1, &|record| {
            with_headers(record, |list| drop(list.remove(0)));
        }),
        Corruption::HeaderOrder => {
            let index = find(world, &|seen| {
                let list: Vec<_> = seen.record.headers.iter().collect();
                is_retry(seen) && has_user_headers(seen, 2) && list[0] != list[1]
            })?;
            with_headers(&mut world.seen[index].record, |list| list.swap(0, 1));
            Some("altered")
        }
    }
}

proptest! {
    #[test]
    fn every_correct_history_is_clean_in_whichever_order_it_is_seen(world in world()) {
        let report = world.report();
        prop_assert!(report.is_clean(), "{}", report);
        prop_assert_eq!(report.source, report.output + report.dead + report.waiting.total());
        prop_assert!(report.foreign.is_empty() && report.source_gone == 0 && report.newer == 0);
    }

    #[test]
    fn one_corruption_of_any_kind_is_found_and_nothing_else(mut world in world(), corruption in corruption()) {
        let Some(expected) = corrupt(&mut world, corruption) else { return Ok(()) };
        let report = world.report();
        prop_assert_eq!(defects(&report), [(expected, 1)], "{:?}\n{}", corruption, report);
        let counted = report.output + report.dead + report.waiting.total() + report.lost.count;
        prop_assert_eq!(report.source, counted);
    }

    #[test]
    fn arbitrary_headers_never_panic(
        headers in proptest::collection::vec(
            (
                prop_oneof![
                    ".{0,10}", Just(ORIGINAL_OFFSET.to_owned()), Just("original-topic".to_owned()),
                    Just("original-partition".to_owned()), Just("retry-count".to_owned()),
                    Just(PIPELINE.to_owned()), Just(PROCESS_AFTER.to_owned()), Just("redrive-count".to_owned()),
                ],
                prop_oneof![
                    bytes(), Just(Some(b"docs".to_vec())), Just(Some(b"1".to_vec())),
                    Just(Some(b"9223372036854775807".to_vec())), Just(Some(b"2147483647".to_vec())),
                    Just(Some(b"9999-12-31T23:59:59.999Z".to_vec())),
                ],
            ),
            0..12,
        ),
        to_source in any::<bool>(),
    ) {
        let mut world = World::new(if to_source { ReturnTo::Source } else { ReturnTo::Due });
        let headers: Headers = headers.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
        for role in [Role::Source, Role::Tier, Role::Due, Role::Output, Role::Dead] {
            let output = Output { topic: "docs".into(), partition: None, key: None, value: None, headers: headers.clone() };
            world.write(role, output, 0, START);
        }
        let _ = world.report().to_string();
    }
}

#[test]
fn what_a_dead_letter_was_written_without_is_no_alteration() {
    for times in 0..=2 {
        let mut world = all_fates(ReturnTo::Due);
        let letters = world.seen.iter_mut().filter(|seen| seen.role == Role::Dead);
        let mut lightened = 0;
        for seen in letters {
            let mut letter = Output {
                topic: seen.record.position.topic.clone(),
                partition: None,
                key: seen.record.key.take(),
                value: seen.record.value.take(),
                headers: seen.record.headers.clone(),
            };
            lightened += (0..times).filter(|_| strip_payload(&mut letter)).count();
            seen.record.key = letter.key;
            seen.record.value = letter.value;
            seen.record.headers = letter.headers;
        }
        assert!(times == 0 || lightened > 0);
        check(&world, &[]);
    }
}
