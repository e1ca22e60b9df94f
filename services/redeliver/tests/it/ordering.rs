//! Order by key and partition, records that block their followers, and limits for noisy tenants.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_core::Record;
use redeliver_testkit::{
    Fate, Reply, Request, Trouble, chaos_with_permit, sleep_up_to, until_seen, until_shared,
};

use crate::batches::each_record;
use crate::chaos::load::under_load;
use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, Sent, origin, records};

/// Enough records of a key to overlap if they could.
const OF_A_KEY: usize = 25;

/// A record of this key; the endpoint sees only the body.
fn draft(key: &str, number: usize) -> Draft {
    Draft::new(key.to_owned(), format!("{key} {number}"))
}

/// Answers after 0 to 7 ms and remembers each call that begins before the previous one of its key has ended.
#[derive(Clone, Default)]
struct Overlaps {
    ends: Arc<Mutex<HashMap<String, Instant>>>,
    found: Arc<Mutex<Vec<String>>>,
}

impl Overlaps {
    fn reply(&self, request: &Request) -> Reply {
        if !request.body.starts_with(b"key-") {
            return Reply::ok(request.body.clone());
        }
        let body = String::from_utf8_lossy(&request.body).into_owned();
        let key = body.split(' ').next().unwrap_or_default().to_owned();
        let delay = Duration::from_millis(body.bytes().map(u64::from).sum::<u64>() % 8);
        let (now, mut ends) = (
            Instant::now(),
            self.ends.lock().unwrap_or_else(PoisonError::into_inner),
        );
        if ends.insert(key, now + delay).is_some_and(|end| now < end) {
            let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.push(body);
        }
        Reply::Delay(delay, Box::new(Reply::ok(request.body.clone())))
    }

    #[track_caller]
    fn are_none(&self) {
        let found = self.found.lock().unwrap();
        assert!(
            found.is_empty(),
            "called before the one before had ended: {found:?}"
        );
    }
}

/// The results of each key must be in the order of its records.
#[track_caller]
fn are_in_key_order(results: &[Record]) {
    let mut last: HashMap<_, i64> = HashMap::new();
    for result in results {
        let Some(key) = &result.key else { continue };
        let origin = origin(result);
        let before = last.insert((key.clone(), origin.partition), origin.offset);
        assert!(
            before < Some(origin.offset),
            "after offset {before:?}: {result:?}"
        );
    }
}

fn of_keys(keys: usize) -> Vec<Draft> {
    let each = |number| (0..keys).map(move |key| draft(&format!("key-{key}"), number));
    (0..OF_A_KEY).flat_map(each).collect()
}

#[track_caller]
fn settle(pipe: &Pipe, sent: &[Sent]) {
    let ends = pipe.settle(sent, DEADLINE);
    ends.meets_with(sent, |_| Fate::Succeeds);
    are_in_key_order(&pipe.read(&pipe.end_topics()));
}

/// Also with records of other and of no keys between them.
#[test]
fn records_of_a_key_never_overlap() {
    let overlaps = Overlaps::default();
    let pipe = PipeBuilder::new("key-order")
        .pipeline("ordering", "key")
        .behave({
            let overlaps = overlaps.clone();
            move |request| overlaps.reply(request)
        })
        .create();
    let mixed = of_keys(20).into_iter().zip(records(500));
    let sent = pipe.produce(mixed.flat_map(|(keyed, other)| [keyed, other]).collect());
    let _services = (pipe.enricher("a"), pipe.retry_tier("a"));
    settle(&pipe, &sent);
    overlaps.are_none();
    assert!(pipe.endpoint.max_concurrency() > 1);
}

#[test]
fn failing_record_blocks_only_its_followers() {
    const OF_EACH: usize = 20;
    let is_broken = Arc::new(AtomicBool::new(true));
    let pipe = PipeBuilder::new("blocking")
        .pipeline("ordering", "key")
        .pipeline("key_blocking", "10m")
        .behave({
            let is_broken = is_broken.clone();
            move |request| match request.body == "flaky 0" && is_broken.load(Relaxed) {
                true => Reply::status(500),
                false => Reply::ok(request.body.clone()),
            }
        })
        .create();
    let both = |n| [draft("flaky", n), draft("fine", n)];
    let sent = pipe.produce((0..OF_EACH).flat_map(both).collect());
    let _services = (pipe.enricher("a"), pipe.retry_tier("a"));
    pipe.watch().until_ended(OF_EACH, DEADLINE);
    let repeats = || pipe.endpoint.calls_of_body(b"flaky 0");
    until_seen("the calls of the record", repeats, |&n| n >= 3);
    for follower in 1..OF_EACH {
        let body = format!("flaky {follower}");
        assert_eq!(pipe.endpoint.calls_of_body(body.as_bytes()), 0, "{body}");
    }
    is_broken.store(false, Relaxed);
    // No attempt counts, and the order holds although one record failed.
    settle(&pipe, &sent);
}

#[test]
fn blocking_ends_after_key_blocking() {
    let is_bad = |body: &[u8]| body == b"bad 0";
    let calls_before_follower = Arc::new(AtomicUsize::new(0));
    let pipe = PipeBuilder::new("blocking-ends")
        .tiers(&[300])
        .pipeline("ordering", "key")
        .pipeline("key_blocking", "1s")
        .behave({
            let (calls, before) = (AtomicUsize::new(0), calls_before_follower.clone());
            move |request| {
                if is_bad(&request.body) {
                    calls.fetch_add(1, Relaxed);
                    return Reply::status(500);
                }
                if request.body == "bad 1" {
                    before.store(calls.load(Relaxed), Relaxed);
                }
                Reply::ok(request.body.clone())
            }
        })
        .create();
    let sent = pipe.produce((0..20).map(|n| draft("bad", n)).collect());
    let _services = (pipe.enricher("a"), pipe.retry_tier("a"));
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |sent| match is_bad(sent.body()) {
        true => Fate::Recovers {
            failures: u32::MAX,
            trouble: Trouble::Unavailable,
        },
        false => Fate::Succeeds,
    });
    assert_eq!(ends.report.dead, 1, "{}", ends.report);
    // After 0, 100 and 200 ms at least.
    let calls = calls_before_follower.load(Relaxed);
    assert!(calls >= 3, "{calls} calls before that of the follower");
}

#[test]
fn noisy_tenant_keeps_to_its_share() {
    const NOISY: &[u8] = b"noisy";
    let pipe = PipeBuilder::new("tenants")
        .pipeline("limit_by", "{ header: tenant, concurrency: 2 }")
        .pipeline("http.concurrency", "8")
        .pipeline("http.timeout", "10m")
        .behave(|request| match request.body.starts_with(NOISY) {
            true => Reply::Hang,
            false => Reply::ok(request.body.clone()),
        })
        .create();
    let of_tenant = |tenant: &str, number: usize| draft(tenant, number).header("tenant", tenant.as_bytes());
    let _services = (pipe.enricher("a"), pipe.retry_tier("a"));
    pipe.produce((0..50).map(|n| of_tenant("noisy", n)).collect());
    pipe.endpoint.until_in_flight(2);
    pipe.produce((0..50).map(|n| of_tenant("quiet", n)).collect());
    pipe.watch().until_ended(50, DEADLINE);
    assert_eq!(pipe.endpoint.in_flight(), 2);
}

/// Kills, freezes and rebalances do not change the order of results.
#[test]
#[ignore = "long"]
fn key_order_survives_kills_and_freezes() {
    order_survives_chaos("key-order", |pipe| pipe.behave(late_echo));
}

#[test]
#[ignore = "long"]
fn batched_key_order_survives_chaos() {
    order_survives_chaos("batch-key-order", |pipe| {
        pipe.pipeline("http.batch", "{ records: 50, values: base64 }")
            .behave(each_record(late_echo))
    });
}

fn late_echo(request: &Request) -> Reply {
    let millis = request.body.iter().map(|byte| u64::from(*byte)).sum::<u64>() % 20;
    Reply::Delay(
        Duration::from_millis(millis),
        Box::new(Reply::ok(request.body.clone())),
    )
}

fn order_survives_chaos(name: &str, configure: impl FnOnce(PipeBuilder) -> PipeBuilder) {
    const ROUNDS: usize = 4;
    let (_permit, mut random) = chaos_with_permit(name);
    let pipe = PipeBuilder::new(&format!("chaos-{name}"))
        .partitions(4)
        .pipeline("ordering", "key")
        .pipeline("http.timeout", "60s")
        .set("kafka.session_timeout", "6s");
    let pipe = configure(pipe).create();
    let mut pair = ["a", "b"].map(|instance| pipe.enricher(instance));
    let _tier = pipe.retry_tier("a");
    // The source and the due topic.
    let owned = 8;
    let sent = under_load(&pipe, 200, |load| {
        for round in 0..ROUNDS {
            until_shared(&mut pair, owned);
            sleep_up_to(&mut random, Duration::from_millis(1_000));
            let (one, other) = (round % 2, (round + 1) % 2);
            pair[one].kill_9();
            load.until_ended(100);
            pair[one].start_again();
            until_shared(&mut pair, owned);
            pair[other].freeze();
            pair[one].until_owning(owned);
            load.until_ended(100);
            pair[other].thaw();
        }
        until_shared(&mut pair, owned);
    });
    settle(&pipe, &sent);
    for member in &pair {
        println!("{member}");
        assert!(member.kills() > 0 && member.freezes() > 0, "{member}");
    }
}
