use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use prometheus_client::registry::Registry;
use proptest::prelude::*;
use redeliver_core::headers::{self, Origin};
use redeliver_core::{ClockLimits, GuardedClock, Headers, ManualClock, Position};
use redeliver_kafka::Unwritable;
use redeliver_runtime::Config;
use redeliver_service::audit::AuditLog;
use redeliver_service::control::Snapshot;
use redeliver_service::control::value::{Desired, RateLimit, Release, Run, TierControl, Value};
use redeliver_service::metrics::ServesLabels;
use redeliver_service::waiting_actions::{Actions, WaitingActions};
use tokio::sync::watch;

use super::*;
use crate::lookups::Question;
use crate::metrics::{TierFamilies, TierMetrics};

mod acts;
mod control;
mod model;

const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);
const TIER: HumanDuration = HumanDuration::from_secs(5);

/// A relay with one partition assigned.
struct Bench {
    topic: Arc<str>,
    wanted: watch::Sender<Option<Arc<Snapshot>>>,
    requests: watch::Sender<Option<Arc<WaitingActions>>>,
    /// The records that the relay has asked for.
    asked: Arc<Mutex<Vec<Question>>>,
    relay: Relay,
    clock: Arc<ManualClock>,
    assignment: AssignmentId,
    offset: i64,
}

const LIMITS: ClockLimits = ClockLimits {
    max_step: Duration::from_secs(2),
    confirm: Duration::from_secs(10),
};

impl Bench {
    /// A relay of the 5 s tier.
    fn new(look_ahead: usize) -> Self {
        Self::of_tier(TIER, look_ahead)
    }

    fn of_tier(tier: HumanDuration, look_ahead: usize) -> Self {
        let look_ahead = LookAhead {
            records: look_ahead,
            bytes: usize::MAX,
        };
        let pipeline = Pipeline {
            max_wait: HumanDuration::from_secs(60),
            ..Pipeline::new("docs")
        };
        let topic = pipeline.tier_topic(tier);
        let served = ServedPipeline::new(Arc::new(pipeline), true);
        let (control, wanted) = Control::fixed(Snapshot::default());
        let clock = Arc::new(ManualClock::new(NOW));
        let (actions, requests) = Actions::fixed(WaitingActions::default());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let guarded = Arc::new(GuardedClock::new(clock.clone(), LIMITS, Box::new(|_| {})));
        let families = TierFamilies::register(&mut Registry::default(), guarded.clone());
        let mut relay = Relay::new(
            tier,
            &[served],
            look_ahead,
            |_| families.of("lane", ServesLabels::default()),
            RelayContext {
                clock: guarded,
                control,
                presence: Box::new(|_| Presence::Exists),
                partitions: Box::new(|_| Some(2)),
                acting: ActionContext {
                    actions: actions.clone(),
                    topic: "redeliver.waiting.actions".into(),
                    audit: AuditLog::new(&Config::default(), "retry-tier"),
                    id_of: Box::new(|_| Some(TopicId::from_bits(7))),
                    ask: Box::new({
                        let asked = asked.clone();
                        move |question| {
                            asked.lock().unwrap().push(question);
                            true
                        }
                    }),
                },
            },
        );
        let assignment = AssignmentId::for_tests(0, 1);
        relay.assigned(assignment, &topic, 0);
        relay.follow_actions();
        Self {
            topic,
            wanted,
            requests,
            asked,
            relay,
            clock,
            assignment,
            offset: 0,
        }
    }

    /// The lane reads this topic in the first partition.
    fn reads(&mut self, topic: u128) {
        let topic = Some(TopicId::from_bits(topic));
        self.relay.reads_topic(self.assignment, topic);
    }

    fn metrics(&self) -> &TierMetrics {
        &self.relay.topics[&self.topic].metrics
    }

    fn accept(&mut self, headers: Headers) {
        self.accept_in(0, headers, "v".into());
    }

    /// Accepts a record of this partition, which is assigned if it was not before.
    fn accept_in(&mut self, partition: u32, headers: Headers, value: bytes::Bytes) {
        let assignment = AssignmentId::for_tests(partition, 1);
        let number = i32::try_from(partition).unwrap();
        if !self.relay.partitions.contains_key(&assignment) {
            self.relay.assigned(assignment, &self.topic, number);
            self.relay.follow_actions();
        }
        let position = Position {
            topic: self.topic.clone(),
            partition: number,
            offset: self.offset,
        };
        let record = Record {
            position,
            timestamp: Some(NOW),
            key: Some("k".into()),
            value: Some(value),
            headers,
            unreadable_headers: 0,
        };
        self.offset += 1;
        self.relay.accept(assignment, record, NOW);
    }

    /// Lets time pass until `now`.
    fn finish(&mut self, now: Timestamp) -> Vec<(String, Headers)> {
        self.clock.advance(now.since(self.clock.now()));
        self.finish_at_once()
    }

    fn finish_at_once(&mut self) -> Vec<(String, Headers)> {
        let now = self.clock.now();
        let mut batch = TransactionBatch::default();
        self.relay.finish(now, usize::MAX, &mut batch);
        assert_eq!(batch.outputs.len(), batch.completed.len());
        self.relay.committed(now);
        batch
            .outputs
            .into_iter()
            .map(|output| (output.topic.to_string(), output.headers))
            .collect()
    }
}

impl Bench {
    fn want(&mut self, name: &str, tier: TierControl) {
        let mut snapshot = Snapshot::default();
        let value = Value {
            revision: 1,
            changed_at: None,
            changed_by: String::new(),
            reason: String::new(),
            change_id: bytes::Bytes::new(),
            desired: Desired::Tier(tier),
        };
        snapshot.table.insert(name.parse().unwrap(), value);
        self.wanted.send_replace(Some(Arc::new(snapshot)));
    }

    fn release_at(&mut self, topic: u128, ends: &[i64], at: Option<Timestamp>) {
        let release = Release {
            topic: TopicId::from_bits(topic),
            ends: ends.to_vec(),
            at,
        };
        let tier = TierControl {
            release: Some(Arc::new(release)),
            ..TierControl::default()
        };
        self.want("tier/docs/5s", tier);
    }
}

fn waiting_until(due: Timestamp) -> Headers {
    let mut list = Headers::new();
    list.push("user", Some(&[0xff, 0x00]));
    let origin = Origin {
        topic: "docs".into(),
        partition: 0,
        offset: 7,
        timestamp: Some(NOW),
    };
    headers::write_lineage(&mut list, "docs", &origin, 1);
    list.push_text(headers::PROCESS_AFTER, &due.to_string());
    list.push_text(headers::RETURN_TOPIC, "docs-retry-due");
    list
}

fn due_of(headers: &Headers) -> Timestamp {
    let due = headers.last(headers::PROCESS_AFTER).unwrap();
    std::str::from_utf8(due).unwrap().parse().unwrap()
}

fn in_seconds(seconds: u64) -> Timestamp {
    NOW.after(std::time::Duration::from_secs(seconds))
}

#[test]
fn record_is_overdue_until_committed() {
    let mut bench = Bench::new(10);
    let reported = |bench: &Bench| bench.metrics().due.get();
    let waiting = |seconds, due| {
        Some(due::Waiting {
            earliest: Some(in_seconds(seconds)),
            due,
        })
    };
    bench.accept(waiting_until(in_seconds(5)));
    bench.accept_in(1, waiting_until(in_seconds(4)), "v".into());
    bench.finish(in_seconds(1));
    assert_eq!(reported(&bench), waiting(4, 0));

    bench.clock.advance(Duration::from_secs(5));
    let mut batch = TransactionBatch::default();
    bench.relay.finish(in_seconds(6), 1, &mut batch);
    assert_eq!(batch.outputs.len(), 1);
    assert_eq!(reported(&bench), waiting(4, 2));
    // Too soon to count again.
    bench.relay.committed(in_seconds(6));
    let left = if batch.completed[0].0 == bench.assignment {
        4
    } else {
        5
    };
    assert_eq!(reported(&bench), waiting(left, 1));

    bench.relay.revoked(AssignmentId::for_tests(0, 1));
    assert!(reported(&bench).is_some());
    bench.relay.revoked(AssignmentId::for_tests(1, 1));
    assert_eq!(reported(&bench), None);
}

#[test]
fn record_is_released_when_due() {
    let mut bench = Bench::new(10);
    bench.accept(waiting_until(in_seconds(5)));
    assert_eq!(bench.relay.next_due(), Some(in_seconds(5)));
    let just_before = Timestamp::from_millis(in_seconds(5).as_millis() - 1);
    assert!(bench.finish(just_before).is_empty());
    let released = bench.finish(in_seconds(5));
    assert_eq!(
        released,
        [("docs-retry-due".to_owned(), waiting_until(in_seconds(5)))]
    );
    assert_eq!(bench.relay.next_due(), None);
}

#[test]
fn long_wait_delays_no_shorter_one() {
    let mut bench = Bench::new(10);
    bench.accept(waiting_until(in_seconds(100)));
    bench.accept(waiting_until(in_seconds(1)));
    assert_eq!(bench.finish(in_seconds(1)).len(), 1);
}

#[test]
fn long_wait_moves_within_its_tier() {
    let mut bench = Bench::new(2);
    for _ in 0..2 {
        bench.accept(waiting_until(in_seconds(20)));
    }
    for seconds in [0, 2, 4] {
        assert!(bench.finish(in_seconds(seconds)).is_empty(), "after {seconds} s");
    }
    let moved: Vec<String> = bench
        .finish(in_seconds(5))
        .into_iter()
        .map(|(topic, _)| topic)
        .collect();
    assert_eq!(moved, ["docs-retry-5s", "docs-retry-5s"]);
}

#[test]
fn full_look_ahead_moves_long_waits() {
    let mut bench = Bench::new(3);
    for seconds in [100, 40, 4] {
        bench.accept(waiting_until(in_seconds(seconds)));
    }
    assert_eq!(bench.relay.capacity(bench.assignment), 0);
    let moved: Vec<String> = bench.finish(NOW).into_iter().map(|(topic, _)| topic).collect();
    assert_eq!(moved, ["docs-retry-1m", "docs-retry-30s"]);
    assert_eq!(bench.relay.capacity(bench.assignment), 2);
}

#[test]
fn fitting_records_do_not_move() {
    let mut bench = Bench::of_tier(HumanDuration::from_secs(60), 2);
    // The second one has jitter.
    for seconds in [60, 40] {
        bench.accept(waiting_until(in_seconds(seconds)));
    }
    for seconds in [0, 1, 20, 39] {
        assert!(bench.finish(in_seconds(seconds)).is_empty(), "after {seconds} s");
    }
    for seconds in [40, 60] {
        let released = bench.finish(in_seconds(seconds));
        let topics: Vec<_> = released.iter().map(|(topic, _)| &**topic).collect();
        assert_eq!(topics, ["docs-retry-due"], "after {seconds} s");
    }
}

#[test]
fn long_waits_move_when_read() {
    let mut bench = Bench::new(3);
    for round in 0..5 {
        for _ in 0..3 {
            bench.accept(waiting_until(in_seconds(40)));
        }
        assert_eq!(bench.finish(NOW).len(), 3, "in round {round}");
    }
    // Records that cannot move are searched again only after the interval.
    for _ in 0..3 {
        bench.accept(waiting_until(in_seconds(4)));
    }
    assert!(bench.finish(NOW).is_empty());
    let searched = |bench: &Bench| bench.relay.partitions[&bench.assignment].last_search;
    assert_eq!(searched(&bench), Some(NOW));
    let later = NOW.after(SEARCH_INTERVAL / 2);
    assert!(bench.finish(later).is_empty());
    assert_eq!(searched(&bench), Some(NOW));
}

#[test]
fn forged_records_become_dead_letters() {
    let forge = |name: &'static str, value: Option<&[u8]>| {
        let mut list = waiting_until(NOW).filtered(|kept| kept != name);
        if let Some(value) = value {
            list.push(name, Some(value));
        }
        list
    };
    let mut duplicate = waiting_until(NOW);
    duplicate.push_text(headers::PROCESS_AFTER, &NOW.to_string());
    let forged = [
        duplicate,
        forge(headers::PROCESS_AFTER, None),
        forge(headers::PROCESS_AFTER, Some(b"\xff\xfe")),
        forge(headers::PROCESS_AFTER, Some(b"0")),
        forge(headers::PROCESS_AFTER, Some(b"9999-01-01T00:00:00Z")),
        forge(headers::RETURN_TOPIC, None),
        forge(headers::RETURN_TOPIC, Some(b"")),
        forge(headers::RETURN_TOPIC, Some(b"../etc")),
    ];
    for headers in forged {
        let mut bench = Bench::new(10);
        bench.accept(headers);
        let out = bench.finish(NOW);
        assert_eq!(out.len(), 1);
        assert_eq!(out[0].0, "docs-dlq");
        assert_eq!(out[0].1.last(headers::ERROR_CLASS), Some(&b"malformed"[..]));
    }
}

#[test]
fn record_returns_to_its_pipeline() {
    for (named, released) in [
        ("docs-retry-due", "docs-retry-due"),
        ("docs", "docs"),
        ("payments", "docs-retry-due"),
        ("docs-dlq", "docs-retry-due"),
        ("__consumer_offsets", "docs-retry-due"),
    ] {
        let mut list = waiting_until(NOW).filtered(|name| name != headers::RETURN_TOPIC);
        list.push_text(headers::RETURN_TOPIC, named);
        let mut bench = Bench::new(10);
        bench.accept(list);
        let out = bench.finish(NOW);
        assert_eq!(out[0].0, released, "{named}");
        // The header names the topic to which the record was released.
        assert_eq!(out[0].1.last(headers::RETURN_TOPIC), Some(released.as_bytes()));
        assert_eq!(out[0].1.last("user"), Some(&[0xff, 0x00][..]));
        assert_eq!(out[0].1.last(headers::RETRY_COUNT), Some(&b"1"[..]));
    }
}

#[test]
fn revoked_records_are_not_reported() {
    let mut bench = Bench::new(10);
    for partition in [0, 0, 1] {
        bench.accept_in(partition, waiting_until(in_seconds(5)), "v".into());
    }
    bench.finish(NOW);
    assert_eq!(bench.metrics().held.get(), 3);
    for (partition, left) in [(0, 1), (1, 0)] {
        bench.relay.revoked(AssignmentId::for_tests(partition, 1));
        assert_eq!(bench.metrics().held.get(), left);
    }
}

#[test]
fn revoked_partition_is_forgotten() {
    let mut bench = Bench::new(10);
    bench.accept(waiting_until(in_seconds(1)));
    bench.accept(Headers::new());
    bench.relay.revoked(bench.assignment);
    assert!(bench.finish(in_seconds(2)).is_empty());
    assert_eq!(bench.relay.next_due(), None);
}

#[test]
fn refused_record_becomes_dead_letter() {
    let mut bench = Bench::new(16);
    for _ in 0..3 {
        bench.accept(waiting_until(NOW));
    }
    let mut batch = TransactionBatch::default();
    bench.relay.finish(NOW, usize::MAX, &mut batch);
    let failure = Failure::permanent("output.too-large", "no");
    let refused = [Refused { index: 1, failure }];
    assert!(bench.relay.refused(&refused, &mut batch, NOW));
    let topics: Vec<_> = batch.outputs.iter().map(|output| &*output.topic).collect();
    assert_eq!(topics, ["docs-retry-due", "docs-dlq", "docs-retry-due"]);
    let letter = &batch.outputs[1];
    assert_eq!(
        (letter.key.as_deref(), letter.value.as_deref()),
        (Some(&b"k"[..]), Some(&b"v"[..]))
    );
    let text = |name| {
        letter
            .headers
            .last(name)
            .map(|value| std::str::from_utf8(value).unwrap())
    };
    assert_eq!(text(headers::ERROR_CODE), Some("output.too-large"));
    assert_eq!(text(headers::ORIGINAL_OFFSET), Some("7"));
    assert_eq!(letter.headers.last("user"), Some(&[0xff, 0x00][..]));

    assert!(bench.relay.refused(&refused, &mut batch, NOW));
    assert_eq!(batch.outputs[1].value, None);
    bench.relay.committed(NOW);
    let metrics = bench.metrics();
    assert_eq!((metrics.released.get(), metrics.rejected.get()), (2, 1));
}

/// Finishes at least this many records of 1 MB each, in several transactions, and checks the size of each.
fn check_transactions(mut bench: Bench, records: usize) {
    let mut written = 0;
    let mut transactions = 0;
    while written < records {
        let mut batch = TransactionBatch::default();
        // Each partition is searched for misplaced records once per second.
        let now = in_seconds(2 * transactions);
        bench.relay.finish(now, usize::MAX, &mut batch);
        bench.relay.committed(now);
        let bytes: usize = batch.outputs.iter().map(Output::size).sum();
        // The last record may exceed the maximum.
        assert!(
            bytes <= TransactionBatch::BYTES + 2_000_000,
            "{bytes} bytes in one transaction"
        );
        assert!(!batch.outputs.is_empty(), "{written} of {records}");
        written += batch.outputs.len();
        transactions += 1;
    }
    assert!(transactions > 1);
}

#[test]
fn partitions_share_the_transaction_size() {
    for (look_ahead, headers, written) in [
        (100, Headers::new(), 80),
        // Misplaced. A look-ahead that has room is not searched again, so some records of the second partition stay.
        (20, waiting_until(in_seconds(50)), 60),
    ] {
        let mut bench = Bench::new(look_ahead);
        for number in 0..80 {
            bench.accept_in(number % 4, headers.clone(), vec![b'x'; 1_000_000].into());
        }
        check_transactions(bench, written);
    }
}

/// A topic that may not be written is treated as a missing one.
fn presence(is_unwritable: bool) -> Presence {
    if !is_unwritable {
        return Presence::Exists;
    }
    Presence::Unwritable {
        reason: Unwritable::Denied,
        lasting: Duration::ZERO,
    }
}

#[test]
fn missing_return_topic_holds_its_records() {
    let mut bench = Bench::new(10);
    let gone = Arc::new(std::sync::Mutex::new("docs-retry-due"));
    bench.relay.presence = Box::new({
        let gone = gone.clone();
        move |topic| presence(*gone.lock().unwrap() == topic)
    });
    bench.accept(waiting_until(NOW));
    assert!(bench.finish(NOW).is_empty());
    // The lane does not wake up for a record that it cannot release.
    assert_eq!(bench.relay.next_due(), None);
    assert_eq!(bench.metrics().held.get(), 1);
    // A dead letter of the same partition is written.
    bench.accept(Headers::new());
    assert_eq!(bench.finish(NOW)[0].0, "docs-dlq");
    *gone.lock().unwrap() = "docs-dlq";
    bench.accept(Headers::new());
    assert_eq!(bench.finish(NOW)[0].0, "docs-retry-due");
    *gone.lock().unwrap() = "";
    assert_eq!(bench.finish(NOW)[0].0, "docs-dlq");
}

#[test]
fn held_dead_letters_fill_their_partition() {
    let mut bench = Bench::new(2);
    let other = AssignmentId::for_tests(1, 2);
    bench.relay.assigned(other, &"docs-retry-5s".into(), 1);
    bench.relay.follow_actions();
    let is_gone = Arc::new(std::sync::atomic::AtomicBool::new(true));
    bench.relay.presence = Box::new({
        let is_gone = is_gone.clone();
        move |topic| presence(topic == "docs-dlq" && is_gone.load(std::sync::atomic::Ordering::SeqCst))
    });
    for _ in 0..2 {
        bench.accept(Headers::new());
    }
    assert!(bench.finish(NOW).is_empty());
    assert_eq!(bench.relay.capacity(bench.assignment), 0);
    assert_eq!(bench.relay.capacity(other), 2);
    is_gone.store(false, std::sync::atomic::Ordering::SeqCst);
    // No more than the limit of the transaction.
    for _ in 0..2 {
        let mut batch = TransactionBatch::default();
        bench.relay.finish(NOW, 1, &mut batch);
        assert_eq!(batch.outputs.len(), 1);
        bench.relay.committed(NOW);
    }
    assert_eq!(bench.relay.capacity(bench.assignment), 2);
}

const HOUR: Duration = Duration::from_secs(3_600);

#[test]
fn unconfirmed_clock_step_releases_nothing() {
    let mut bench = Bench::new(2);
    for seconds in [60, 3_000] {
        bench.accept(waiting_until(in_seconds(seconds)));
    }
    bench.clock.set(NOW.after(2 * HOUR));
    assert!(bench.finish_at_once().is_empty());
    assert_eq!(bench.relay.next_due(), None, "the lane would spin");
    bench.clock.advance(LIMITS.confirm - Duration::from_millis(1));
    assert!(bench.finish_at_once().is_empty());
    bench.clock.advance(Duration::from_millis(1));
    assert_eq!(bench.finish_at_once().len(), 2);
}

#[test]
fn held_clock_delays_no_dead_letters() {
    let mut bench = Bench::new(10);
    bench.accept(waiting_until(NOW));
    bench.clock.set(NOW.after(HOUR));
    bench.accept(Headers::new());
    let out = bench.finish_at_once();
    assert_eq!(out.len(), 1);
    assert_eq!(out[0].0, "docs-dlq");
}
