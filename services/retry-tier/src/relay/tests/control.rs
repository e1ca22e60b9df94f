//! Pauses, rates and releases.

use super::*;

fn paused() -> TierControl {
    TierControl {
        run: Some(Run::Paused),
        ..TierControl::default()
    }
}

#[test]
fn paused_tier_releases_nothing() {
    for name in ["tier/docs/5s", "tier/5s"] {
        let mut bench = Bench::new(2);
        bench.want(name, paused());
        for seconds in [5, 40, 60] {
            if bench.relay.capacity(bench.assignment) > 0 {
                bench.accept(waiting_until(in_seconds(seconds)));
            }
        }
        for seconds in [1, 6, 50] {
            // Nothing moves either, and the lane does not spin.
            assert!(bench.finish(in_seconds(seconds)).is_empty(), "after {seconds} s");
            assert_eq!(bench.relay.next_due(), None);
            assert_eq!(bench.metrics().due.get(), Some(due::Waiting::default()));
        }
        assert_eq!(bench.metrics().paused.get(), 1);
        bench.want(name, TierControl::default());
        assert_eq!(bench.finish(in_seconds(50)).len(), 2);
        assert_eq!(bench.metrics().paused.get(), 0);
    }
}

#[test]
fn release_covers_waiting_records() {
    let mut bench = Bench::new(10);
    bench.reads(7);
    bench.accept(waiting_until(in_seconds(5)));
    bench.finish(in_seconds(1));
    bench.release_at(7, &[2], None);
    // One that waited, but was not read yet, and one that came later.
    for _ in 0..2 {
        bench.accept(waiting_until(in_seconds(5)));
    }
    let released = bench.finish(in_seconds(1));
    assert_eq!(released.len(), 2);
    for (topic, headers) in released {
        assert_eq!(topic, "docs-retry-due");
        // Its reader accepts it, and the rest is unchanged.
        let due = due_of(&headers);
        assert_eq!(due, in_seconds(1));
        let others = |headers: &Headers| headers.filtered(|name| name != headers::PROCESS_AFTER);
        assert_eq!(others(&headers), others(&waiting_until(due)));
    }
    let metrics = bench.metrics();
    assert_eq!((metrics.released_early.get(), metrics.released.get()), (2, 0));
    assert!(bench.finish(in_seconds(4)).is_empty());
    assert_eq!(bench.finish(in_seconds(5)).len(), 1);
    assert_eq!(bench.metrics().released.get(), 1);
}

#[test]
fn foreign_release_releases_nothing() {
    for (topic, id, ends) in [
        // The topic was created again, or its id is not known.
        (7, Some(8), &[9][..]),
        (7, None, &[9]),
        // The partition was added later, or was empty.
        (7, Some(7), &[]),
        (7, Some(7), &[0, 9]),
    ] {
        let mut bench = Bench::new(10);
        bench
            .relay
            .reads_topic(bench.assignment, id.map(TopicId::from_bits));
        bench.release_at(topic, ends, None);
        bench.accept(waiting_until(in_seconds(5)));
        assert!(bench.finish(in_seconds(1)).is_empty(), "{id:?} {ends:?}");
        assert_eq!(bench.finish(in_seconds(5)).len(), 1);
    }
}

#[test]
fn rate_limits_releases() {
    let mut bench = Bench::new(100);
    let rate = Some(RateLimit::PerSecond(20.0));
    bench.want(
        "tier/docs/5s",
        TierControl {
            rate,
            ..TierControl::default()
        },
    );
    for _ in 0..30 {
        bench.accept(waiting_until(in_seconds(5)));
    }
    // Half of the rate: the topic has two partitions.
    assert_eq!(bench.finish(in_seconds(5)).len(), 10);
    let next = bench.relay.next_due().unwrap();
    assert!(next > in_seconds(5) && next < in_seconds(6), "{next}");
    assert_eq!(bench.finish(in_seconds(6)).len(), 10);
    bench.want("tier/docs/5s", TierControl::default());
    assert_eq!(bench.finish(in_seconds(6)).len(), 10);
}

#[test]
fn released_records_wait_for_rate() {
    let mut bench = Bench::new(3);
    bench.reads(7);
    let tier = TierControl {
        // One per second: the topic has two partitions.
        rate: Some(RateLimit::PerSecond(2.0)),
        release: Some(Arc::new(Release {
            topic: TopicId::from_bits(7),
            ends: vec![10],
            at: None,
        })),
        ..TierControl::default()
    };
    bench.want("tier/docs/5s", tier);
    for _ in 0..3 {
        bench.accept(waiting_until(in_seconds(50)));
    }
    for second in 1..4 {
        assert_eq!(bench.finish(in_seconds(second)).len(), 1);
        bench.accept(waiting_until(in_seconds(50)));
        assert!(bench.finish(in_seconds(second)).is_empty());
    }
}

#[test]
fn taken_back_records_use_no_rate() {
    let mut bench = Bench::new(10);
    let tier = TierControl {
        rate: Some(RateLimit::PerSecond(0.002)),
        ..TierControl::default()
    };
    bench.want("tier/docs/5s", tier);
    bench.accept(waiting_until(in_seconds(5)));
    bench.clock.advance(Duration::from_secs(5));
    let mut batch = TransactionBatch::default();
    bench.relay.finish(bench.clock.now(), usize::MAX, &mut batch);
    assert_eq!(batch.outputs.len(), 1);
    assert!(bench.relay.take_back(&mut batch));
    assert_eq!(bench.finish(in_seconds(6)).len(), 1);
}

#[test]
fn set_back_clock_delays_no_release() {
    // The clock of the server that was asked is fast, or right.
    for (at, stamped) in [(in_seconds(60), in_seconds(1)), (NOW, NOW)] {
        let mut bench = Bench::new(10);
        bench.reads(7);
        bench.release_at(7, &[2], Some(at));
        bench.accept(waiting_until(in_seconds(100)));
        bench.clock.advance(Duration::from_secs(2));
        let first = bench.relay.next_due();
        let mut batch = TransactionBatch::default();
        bench.relay.finish(bench.clock.now(), 0, &mut batch);
        // Read after the release, and before the clock is set back by less than a step.
        bench.accept(waiting_until(in_seconds(100)));
        bench.clock.set(in_seconds(1));
        assert!(bench.relay.next_due() < first, "the lane looks at them at once");
        let released = bench.finish_at_once();
        assert_eq!(released.len(), 2);
        for (_, headers) in released {
            assert_eq!(due_of(&headers), stamped);
        }
    }
}

#[test]
fn pause_holds_unwritten_records() {
    let mut bench = Bench::new(10);
    for _ in 0..3 {
        bench.accept(waiting_until(in_seconds(5)));
    }
    bench.accept(Headers::new());
    bench.clock.advance(Duration::from_secs(5));
    let mut batch = TransactionBatch::default();
    bench.relay.finish(in_seconds(5), usize::MAX, &mut batch);
    let written = batch.outputs.clone();
    assert_eq!(written.len(), 4);
    bench.want("tier/docs/5s", paused());
    assert!(bench.relay.take_back(&mut batch));
    // Dead letters are written also while the tier is paused.
    let letters = bench.finish(in_seconds(6));
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].0, "docs-dlq");
    bench.want("tier/docs/5s", TierControl::default());
    let released = bench.finish(in_seconds(6));
    let expected: Vec<_> = written
        .iter()
        .filter(|output| &*output.topic == "docs-retry-due")
        .map(|output| (output.topic.to_string(), output.headers.clone()))
        .collect();
    assert_eq!(released, expected);
    assert_eq!(bench.metrics().released.get(), 3);
}

#[test]
fn ended_relay_reports_no_pause() {
    let mut bench = Bench::new(10);
    bench.want("tier/docs/5s", paused());
    bench.finish(NOW);
    let gauge = bench.metrics().paused.clone();
    assert_eq!(gauge.get(), 1);
    drop(bench);
    assert_eq!(gauge.get(), 0);
}
