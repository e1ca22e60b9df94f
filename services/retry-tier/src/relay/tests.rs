use prometheus_client::registry::Registry;
use proptest::prelude::*;
use redeliver_core::headers::{self, Origin};
use redeliver_core::{Headers, Position};

use super::*;
use crate::metrics::TierFamilies;

const NOW: Timestamp = Timestamp::from_millis(1_700_000_000_000);
const TIER: HumanDuration = HumanDuration::from_secs(5);

/// A relay of the 5 s tier with one partition assigned.
struct Bench {
    relay: Relay,
    assignment: AssignmentId,
    offset: i64,
}

impl Bench {
    fn new(look_ahead: usize) -> Self {
        let metrics = TierFamilies::register(&mut Registry::default()).of(TIER, "lane");
        let look_ahead = LookAhead {
            records: look_ahead,
            bytes: usize::MAX,
        };
        let pipeline = Pipeline {
            max_wait: HumanDuration::from_secs(60),
            ..Pipeline::new("docs")
        };
        let served = ServedPipeline::new(Arc::new(pipeline), true);
        let is_missing = Box::new(|_: &str| false);
        let mut relay = Relay::new(TIER, &[served], look_ahead, metrics, Tracer::off(), is_missing);
        let assignment = AssignmentId::for_tests(0, 1);
        relay.assigned(assignment, &"docs-retry-5s".into(), 0);
        Self {
            relay,
            assignment,
            offset: 0,
        }
    }

    fn accept(&mut self, headers: Headers) {
        let position = Position {
            topic: "docs-retry-5s".into(),
            partition: 0,
            offset: self.offset,
        };
        let record = Record {
            position,
            timestamp: Some(NOW),
            key: Some("k".into()),
            value: Some("v".into()),
            headers,
            unreadable_headers: 0,
        };
        self.offset += 1;
        self.relay.accept(self.assignment, record, NOW);
    }

    fn finish(&mut self, now: Timestamp) -> Vec<(String, Headers)> {
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

fn in_seconds(seconds: u64) -> Timestamp {
    NOW.after(std::time::Duration::from_secs(seconds))
}

#[test]
fn a_record_is_released_when_it_is_due_and_not_a_millisecond_before() {
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
fn a_long_wait_does_not_delay_a_shorter_one_after_it() {
    let mut bench = Bench::new(10);
    bench.accept(waiting_until(in_seconds(100)));
    bench.accept(waiting_until(in_seconds(1)));
    assert_eq!(bench.finish(in_seconds(1)).len(), 1);
}

#[test]
fn a_record_whose_due_time_is_in_the_past_is_released_at_once() {
    let mut bench = Bench::new(10);
    bench.accept(waiting_until(Timestamp::from_millis(0)));
    assert_eq!(bench.finish(NOW).len(), 1);
}

#[test]
fn a_long_wait_moves_to_the_end_of_its_own_tier_once_per_delay_of_the_tier() {
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
fn a_full_look_ahead_moves_long_waits_to_the_tier_that_fits() {
    let mut bench = Bench::new(3);
    for seconds in [100, 40, 4] {
        bench.accept(waiting_until(in_seconds(seconds)));
    }
    assert_eq!(bench.relay.capacity(bench.assignment), 0);
    let moved: Vec<String> = bench.finish(NOW).into_iter().map(|(topic, _)| topic).collect();
    assert_eq!(moved, ["docs-retry-1m", "docs-retry-30s"]);
    assert_eq!(bench.relay.capacity(bench.assignment), 2);
    assert!(
        bench.finish(NOW).is_empty(),
        "a record that waits less than the delay of its tier stays"
    );
}

#[test]
fn forged_records_become_malformed_dead_letters_and_are_never_released_early() {
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
fn a_record_returns_only_to_a_topic_of_its_pipeline() {
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
fn a_time_lock_from_before_max_wait_was_lowered_is_kept() {
    let mut bench = Bench::new(10);
    let long_after = in_seconds(3_600);
    bench.accept(waiting_until(long_after));
    assert_eq!(bench.relay.next_due(), Some(long_after));
    assert!(bench.finish(in_seconds(3_599)).is_empty());
    assert_eq!(bench.finish(long_after)[0].0, "docs-retry-due");
}

#[test]
fn a_revoked_partition_is_forgotten() {
    let mut bench = Bench::new(10);
    bench.accept(waiting_until(in_seconds(1)));
    bench.accept(Headers::new());
    bench.relay.revoked(bench.assignment);
    assert!(bench.finish(in_seconds(2)).is_empty());
    assert_eq!(bench.relay.next_due(), None);
}

proptest! {
    #[test]
    fn arbitrary_bytes_in_reserved_headers_make_a_malformed_dead_letter(
        due in proptest::collection::vec(any::<u8>(), 0..30), topic in proptest::collection::vec(any::<u8>(), 0..30),
    ) {
        let mut list = waiting_until(NOW).filtered(|name| name != headers::PROCESS_AFTER && name != headers::RETURN_TOPIC);
        list.push(headers::PROCESS_AFTER, Some(&due));
        list.push(headers::RETURN_TOPIC, Some(&topic));
        let mut bench = Bench::new(10);
        bench.accept(list);
        let out = bench.finish(NOW);
        prop_assert_eq!(out.len(), 1);
        prop_assert_eq!(&out[0].0, "docs-dlq");
    }
}

#[test]
fn a_record_that_its_return_topic_refuses_becomes_a_dead_letter() {
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
    assert_eq!(
        (
            bench.relay.metrics.released.get(),
            bench.relay.metrics.rejected.get()
        ),
        (2, 1)
    );
}

#[test]
fn a_record_whose_return_topic_is_missing_stays_and_dead_letters_are_written() {
    let mut bench = Bench::new(10);
    let gone = Arc::new(std::sync::Mutex::new("docs-retry-due"));
    bench.relay.is_missing = Box::new({
        let gone = gone.clone();
        move |topic| *gone.lock().unwrap() == topic
    });
    bench.accept(waiting_until(NOW));
    assert!(bench.finish(NOW).is_empty());
    // The lane does not wake up for a record that it cannot release.
    assert_eq!(bench.relay.next_due(), None);
    assert_eq!(bench.relay.records_in_memory(), 1);
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
fn dead_letters_whose_topic_is_missing_fill_only_their_own_partition() {
    let mut bench = Bench::new(2);
    let other = AssignmentId::for_tests(1, 2);
    bench.relay.assigned(other, &"docs-retry-5s".into(), 1);
    let is_gone = Arc::new(std::sync::atomic::AtomicBool::new(true));
    bench.relay.is_missing = Box::new({
        let is_gone = is_gone.clone();
        move |topic| topic == "docs-dlq" && is_gone.load(std::sync::atomic::Ordering::SeqCst)
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
