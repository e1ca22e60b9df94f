//! The broker freezes while a worker has many slow calls in hand. A transaction that fails meanwhile must not repeat them:
//! only records of partitions that the group has taken away are processed again.

use std::thread;
use std::time::Duration;

use redeliver_testkit::{ChaosPermit, Fate, LocalKafka, Reply, Request, ServiceProcess, eventually};

use super::{OWNED, PARTITIONS, settle};
use crate::support::{DEADLINE, PLAN, Pipe, PipeBuilder, Sent, records};

/// The calls in hand when the broker freezes.
const IN_HAND: usize = 300;
/// The limit of records in flight. The lane of the source topic may use seven eighths of it, enough for all calls.
const IN_FLIGHT: usize = 343;
const RECORDS: usize = 900;
/// The longest call.
const LONGEST: Duration = Duration::from_secs(12);
const FROZEN: Duration = Duration::from_secs(30);

/// Answers according to the plan, after up to 12 seconds, which depend on the record.
fn slow(request: &Request) -> Reply {
    let hash = request.body.iter().fold(0_u64, |hash, byte| {
        hash.wrapping_mul(0x0100_0000_01b3).wrapping_add(u64::from(*byte))
    });
    let longest = u64::try_from(LONGEST.as_millis()).unwrap();
    Reply::Delay(
        Duration::from_millis((hash >> 20) % longest),
        Box::new(PLAN.reply(request)),
    )
}

/// A pipeline on a broker of its own.
fn setup(name: &str, session: &str) -> (LocalKafka, Pipe) {
    // The controller freezes with the broker, and must not fence it afterwards.
    let kafka = LocalKafka::start_with(&[("broker.session.timeout.ms", "600000")]).unwrap();
    let pipe = PipeBuilder::new(&format!("chaos-{name}"))
        .brokers(&kafka.brokers())
        .partitions(PARTITIONS)
        .tiers(&[1_000, 2_000])
        .set("kafka.static_membership", "true")
        .set("kafka.session_timeout", session)
        .pipeline("http.timeout", "60s")
        .pipeline("http.concurrency", &IN_HAND.to_string())
        .pipeline("in_flight", &IN_FLIGHT.to_string())
        .behave(slow)
        .create();
    (kafka, pipe)
}

/// Freezes the broker while all calls are in hand. `before_thaw` is called at the end of that time.
fn freeze(kafka: &LocalKafka, pipe: &Pipe, before_thaw: impl FnOnce()) {
    // Calls end and begin all the time, so the worker has something to write at almost any moment.
    pipe.watch().until_ended(100, DEADLINE);
    eventually("all calls are in hand", DEADLINE, || {
        match pipe.endpoint.in_flight() {
            IN_HAND => Ok(()),
            count => Err(count),
        }
    });
    kafka.process().stop();
    // The time is the fault itself, not a wait for a condition.
    thread::sleep(FROZEN);
    before_thaw();
    kafka.process().cont();
}

/// A transaction must have failed, and no process may have ended.
#[track_caller]
fn have_waited(enricher: &mut ServiceProcess, tier: &ServiceProcess) {
    assert!(
        enricher.metric("redeliver_lane_setbacks_total") > 0,
        "no transaction failed while the broker was frozen"
    );
    for process in [&*enricher, tier] {
        println!("{process}");
        assert!(process.has_never_ended(), "{process} did not wait");
    }
}

#[test]
#[ignore = "long"]
fn short_broker_freeze_repeats_no_call() {
    let _permit = ChaosPermit::acquire();
    let (kafka, pipe) = setup("in-hand", "2m");
    let (mut enricher, tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let sent = pipe.produce(records(RECORDS));
    freeze(&kafka, &pipe, || assert_eq!(enricher.owned(), OWNED));
    let ends = pipe.settle(&sent, DEADLINE);
    println!("{}", ends.report);
    ends.meets(&PLAN, &sent);
    // The group took nothing away, so even a transaction of unknown outcome is resolved without a second call.
    ends.were_called(&PLAN, &sent, &pipe.endpoint);
    have_waited(&mut enricher, &tier);
}

#[test]
#[ignore = "long"]
fn long_broker_freeze_repeats_calls_in_hand() {
    let _permit = ChaosPermit::acquire();
    // The default.
    let (kafka, pipe) = setup("in-hand-lost", "10s");
    let (mut enricher, tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let sent = pipe.produce(records(RECORDS));
    // Without a session, another member could own the partitions, so their records are dropped.
    freeze(&kafka, &pipe, || enricher.until_owning(0));
    settle(&pipe, &sent, &PLAN);
    // Nothing more is read while nothing can be committed, and the session is lost once.
    let planned: u64 = sent.iter().map(planned_calls).sum();
    let repeated = pipe.endpoint.calls().saturating_sub(planned);
    println!("{repeated} repeated calls of {planned}");
    assert!(
        repeated <= IN_FLIGHT as u64,
        "{repeated} repeated calls of {planned}"
    );
    let calls = pipe.endpoint.calls_by_key();
    for sent in &sent {
        let (count, planned) = (calls[&sent.idempotency_key()], planned_calls(sent));
        assert!(
            u64::from(count) <= planned + 1,
            "{}: {count} calls",
            sent.position
        );
    }
    have_waited(&mut enricher, &tier);
}

/// How often a record is called if no call is repeated.
fn planned_calls(sent: &Sent) -> u64 {
    match PLAN.fate(sent.body()) {
        Fate::Succeeds | Fate::Refused => 1,
        Fate::Recovers { failures, .. } => 1 + u64::from(failures),
    }
}
