//! Times of retries: different waits in one tier, and growing waits.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::headers::{ERROR_TIMESTAMP, PROCESS_AFTER, RETRY_COUNT};
use redeliver_core::{HumanDuration, Record, Timestamp};
use redeliver_testkit::{Fate, Reply, Request, Trouble};

use crate::support::{DEADLINE, Draft, PipeBuilder, text};

/// Records whose bodies start with this word.
pub(crate) fn drafts(word: &str, count: usize) -> Vec<Draft> {
    let draft = |n| Draft::new(format!("{word}-{n}"), format!("{word} {n}"));
    (0..count).map(draft).collect()
}

pub(crate) fn begins_with(body: &[u8], word: &str) -> bool {
    body.starts_with(word.as_bytes())
}

/// A header that the record must have, parsed.
#[track_caller]
pub(crate) fn header<T: std::str::FromStr>(record: &Record, name: &str) -> T {
    let value = text(record, name).unwrap();
    let parsed = value.as_deref().and_then(|value| value.parse().ok());
    parsed.unwrap_or_else(|| panic!("{name} is {value:?} in {record:?}"))
}

#[test]
fn longer_waits_delay_no_shorter_one() {
    const LONG: usize = 48;
    const SHORT: usize = 12;
    let busy = |seconds: u32| {
        let retry_after = ("retry-after".to_owned(), seconds.to_string());
        Reply::Status(503, vec![retry_after], "busy".into())
    };
    let reply = move |request: &Request| match request.earlier_calls_of_key {
        // Longer than the test.
        0 if begins_with(&request.body, "long") => busy(3_000),
        0 if begins_with(&request.body, "short") => busy(4),
        _ => Reply::ok(request.body.clone()),
    };
    // The tier has room for 16 records of the partition, and there are three times as many long waits.
    let pipe = PipeBuilder::new("retries-mixed")
        .partitions(1)
        .tiers(&[1_000])
        .pipeline("http.max_retry_after", "1h")
        .set("retry_tier.look_ahead", "16")
        .behave(reply)
        .create();
    let _enricher = pipe.enricher("a");
    pipe.produce(drafts("long", LONG));
    pipe.until_waiting(LONG);
    pipe.produce(drafts("short", SHORT));
    pipe.until_waiting(LONG + SHORT);
    let waiting = pipe.read(&[pipe.first_tier()]);
    let is_long = |record: &Record| begins_with(record.value.as_deref().unwrap(), "long");
    assert!(waiting[..LONG].iter().all(is_long), "{waiting:?}");

    let mut relay = pipe.retry_tier("a");
    let mut watch = pipe.watch();
    watch.until_ended(SHORT, DEADLINE);
    assert!(!watch.records.iter().any(is_long), "{:?}", watch.records);
    let report = pipe.audit();
    assert!(report.is_clean() && report.dead == 0, "{report}");
    assert_eq!(
        (report.output, report.waiting.in_tiers),
        (SHORT as u64, LONG as u64),
        "{report}"
    );
    assert!(report.min_margin_ms >= Some(0), "{report}");
    assert!(relay.metric("redeliver_tier_moved_total") > 0);
    assert_eq!(relay.metric("redeliver_tier_rejected_total"), 0);
}

#[test]
fn waits_grow_by_factor_to_cap() {
    let failures = |body: &[u8]| match body {
        body if begins_with(body, "thrice") => 3,
        body if begins_with(body, "always") => u32::MAX,
        _ => 0,
    };
    let reply = move |request: &Request| {
        if request.earlier_calls_of_key < failures(&request.body) {
            Reply::status(503)
        } else {
            Reply::ok(request.body.clone())
        }
    };
    // Delays that no other test uses.
    let base = 211 + u64::from(std::process::id() % 100);
    let cap = 5 * base;
    let pipe = PipeBuilder::new("retries-grow")
        .pipeline(
            "retry",
            &format!("{{ base: {base}ms, factor: 3, cap: {cap}ms, max_retries: 4 }}"),
        )
        .behave(reply)
        .create();
    let tiers = [base, 3 * base, cap].map(HumanDuration::from_millis);
    assert_eq!(pipe.pipeline.policy.tiers(), tiers);
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let sent = pipe.produce([drafts("fine", 10), drafts("thrice", 10), drafts("always", 10)].concat());
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |sent| match failures(sent.body()) {
        0 => Fate::Succeeds,
        failures => Fate::Recovers {
            failures,
            trouble: Trouble::Unavailable,
        },
    });
    // Each retry waited for the right time in its tier: 10 records three times, and 10 four times.
    let mut waits: BTreeMap<(u32, Arc<str>), usize> = BTreeMap::new();
    for tier in tiers {
        for record in pipe.read(&[pipe.pipeline.tier_topic(tier)]) {
            let failed_at: Timestamp = header(&record, ERROR_TIMESTAMP);
            let due: Timestamp = header(&record, PROCESS_AFTER);
            assert_eq!(due, failed_at.after(tier.duration()), "{record:?}");
            let attempt = header(&record, RETRY_COUNT);
            *waits.entry((attempt, record.position.topic)).or_default() += 1;
        }
    }
    let expected = [(1, 0, 20), (2, 1, 20), (3, 2, 20), (4, 2, 10)];
    let expected = expected.map(|(attempt, tier, count)| {
        let topic = pipe.pipeline.tier_topic(tiers[tier]);
        ((attempt, topic), count)
    });
    assert_eq!(waits, expected.into());
}
