//! Times of retries: different waits in one tier, growing waits, quick retries, and records that are too old for another
//! attempt.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::headers::{ERROR_CLASS, ERROR_TIMESTAMP, ORIGINAL_TIMESTAMP, PROCESS_AFTER, RETRY_COUNT};
use redeliver_core::{HumanDuration, Record, Timestamp};
use redeliver_testkit::{Fate, Reply, Request, Trouble};

use crate::support::{DEADLINE, Draft, Ends, PipeBuilder, Sent, text};

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

#[track_caller]
fn ends_of<'e>(ends: &'e Ends, sent: &[Sent]) -> Vec<&'e Record> {
    sent.iter().map(|sent| ends.of(sent)).collect()
}

#[test]
fn a_short_wait_is_not_delayed_by_longer_waits_before_it() {
    const LONG: usize = 48;
    const SHORT: usize = 12;
    let busy = |seconds: u32| {
        let retry_after = ("retry-after".to_owned(), seconds.to_string());
        Reply::Status(503, vec![retry_after], "busy".into())
    };
    let reply = move |request: &Request| match request.earlier_calls_of_key {
        0 if begins_with(&request.body, "long") => busy(25),
        0 if begins_with(&request.body, "short") => busy(6),
        _ => Reply::ok(request.body.clone()),
    };
    // The tier has room for 16 records of the partition, and there are three times as many long waits.
    let pipe = PipeBuilder::new("retries-mixed")
        .partitions(1)
        .tiers(&[2_000])
        .set("retry_tier.look_ahead", "16")
        .behave(reply)
        .create();
    let _enricher = pipe.enricher("a");
    let tier = pipe.first_tier();
    let long = pipe.produce(drafts("long", LONG));
    pipe.until_waiting(LONG);
    let short = pipe.produce(drafts("short", SHORT));
    pipe.until_waiting(LONG + SHORT);
    let waiting = pipe.read(std::slice::from_ref(&tier));
    let (first, last) = waiting.split_at(LONG);
    let all_are = |records: &[Record], word| {
        let values = records
            .iter()
            .map(|record| record.value.as_deref().unwrap_or_default());
        values.into_iter().all(|value| begins_with(value, word))
    };
    assert!(all_are(first, "long") && all_are(last, "short"), "{waiting:?}");

    let mut relay = pipe.retry_tier("a");
    let sent = [&long[..], &short].concat();
    let ends = pipe.settle(&sent, DEADLINE);
    // A wait that the endpoint requests does not count as a failed attempt.
    ends.meets_with(&sent, |_| Fate::Succeeds);
    let (long, short) = (ends_of(&ends, &long), ends_of(&ends, &short));
    let last_short = short.iter().filter_map(|end| end.timestamp).max().unwrap();
    let first_long = long.iter().filter_map(|end| end.timestamp).min().unwrap();
    let longest = first
        .iter()
        .map(|record| header::<Timestamp>(record, PROCESS_AFTER));
    let shortest = last
        .iter()
        .map(|record| header::<Timestamp>(record, PROCESS_AFTER));
    println!(
        "short ones were due until {} and ended until {last_short}; long ones were due from {} on and ended from \
         {first_long} on; {} moves",
        shortest.max().unwrap(),
        longest.min().unwrap(),
        relay.metric("redeliver_tier_moved_total"),
    );
    assert!(last_short < first_long, "{}", ends.report);
    assert!(relay.metric("redeliver_tier_moved_total") > 0);
    assert_eq!(relay.metric("redeliver_tier_rejected_total"), 0);
    let (calls, each_twice) = (pipe.endpoint.calls(), 2 * sent.len() as u64);
    assert_eq!(calls, each_twice);
}

#[test]
fn a_record_that_would_be_too_old_for_its_next_attempt_is_a_dead_letter_of_class_expired() {
    let reply = |request: &Request| match request.earlier_calls_of_key {
        0 if begins_with(&request.body, "recovers") => Reply::status(503),
        _ if begins_with(&request.body, "never") => Reply::status(503),
        _ => Reply::ok(request.body.clone()),
    };
    let max_age = HumanDuration::from_secs(6);
    let pipe = PipeBuilder::new("retries-age")
        .tiers(&[500, 1_000, 20_000])
        .pipeline("max_age", &max_age.to_string())
        .behave(reply)
        .create();
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let (never, recovers) = (
        pipe.produce(drafts("never", 20)),
        pipe.produce(drafts("recovers", 20)),
    );
    let ends = pipe.settle(&[&never[..], &recovers].concat(), DEADLINE);
    assert_eq!(
        ends.report.dead_by_class,
        [("expired".to_owned(), 20)].into(),
        "{}",
        ends.report
    );
    for end in ends_of(&ends, &recovers) {
        assert_eq!(header::<u32>(end, RETRY_COUNT), 1);
    }
    let tiers = pipe.pipeline.policy.tiers();
    for (sent, end) in never.iter().zip(ends_of(&ends, &never)) {
        assert_eq!(text(end, ERROR_CLASS).unwrap().as_deref(), Some("expired"));
        let attempts: u32 = header(end, RETRY_COUNT);
        assert_eq!(pipe.endpoint.calls_of_key(&sent.idempotency_key()), attempts);
        // The next wait would have ended too late.
        let failed_at: Timestamp = header(end, ERROR_TIMESTAMP);
        let came: Timestamp = header(end, ORIGINAL_TIMESTAMP);
        let wait = tiers[attempts as usize - 1];
        let next = failed_at.after(wait.duration());
        assert!(
            next > came.after(max_age.duration()),
            "{wait} after {failed_at}: {end:?}"
        );
    }
    // Each record was retried while there was time, which suffices for at least one retry.
    let waited = pipe.read(&[pipe.pipeline.tier_topic(tiers[0])]);
    assert_eq!(waited.len(), 40, "{}", ends.report);
    assert!(pipe.read(&[pipe.pipeline.tier_topic(tiers[2])]).is_empty());
}

#[test]
fn waits_grow_by_the_factor_up_to_the_cap() {
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

#[test]
fn quick_retries_come_before_a_wait() {
    let reply = |request: &Request| {
        let failures = if begins_with(&request.body, "twice") {
            2
        } else if begins_with(&request.body, "five") {
            5
        } else {
            u32::MAX
        };
        if request.earlier_calls_of_key < failures {
            Reply::status(502)
        } else {
            Reply::ok(request.body.clone())
        }
    };
    let pipe = PipeBuilder::new("retries-quick")
        .tiers(&[300])
        .pipeline("http.quick_retries", "2")
        // It also limits how long quick retries may start.
        .pipeline("http.timeout", "60s")
        .behave(reply)
        .create();
    let _running = (pipe.enricher("a"), pipe.retry_tier("a"));
    let kinds = ["twice", "five", "always"].map(|word| pipe.produce(drafts(word, 10)));
    let ends = pipe.settle(&kinds.concat(), DEADLINE);
    // An attempt has up to three calls.
    ends.meets_with(&kinds.concat(), |sent| match sent.body() {
        body if begins_with(body, "twice") => Fate::Succeeds,
        body => Fate::Recovers {
            failures: if begins_with(body, "five") { 1 } else { u32::MAX },
            trouble: Trouble::Unavailable,
        },
    });
    for (sent, calls) in kinds.iter().zip([3, 6, 6]) {
        for sent in sent {
            assert_eq!(pipe.endpoint.calls_of_key(&sent.idempotency_key()), calls);
        }
    }
    let tier = pipe.first_tier();
    assert_eq!(pipe.read(&[tier]).len(), 20);
}
