//! The broker freezes while a worker has many slow calls in hand. A transaction that fails meanwhile must not repeat them.

use std::thread;
use std::time::Duration;

use redeliver_testkit::{ChaosPermit, LocalKafka, Reply, Request};

use super::{OWNED, PARTITIONS};
use crate::support::{DEADLINE, PLAN, PipeBuilder, records};

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

#[test]
#[ignore = "long"]
fn frozen_broker_repeats_no_call() {
    let _permit = ChaosPermit::acquire();
    // The controller freezes with the broker, and must not fence it afterwards.
    let kafka = LocalKafka::start_with(&[("broker.session.timeout.ms", "600000")]).unwrap();
    let pipe = PipeBuilder::new("chaos-in-hand")
        .brokers(&kafka.brokers())
        .partitions(PARTITIONS)
        .tiers(&[1_000, 2_000])
        .set("kafka.static_membership", "true")
        // Longer than the broker is frozen.
        .set("kafka.session_timeout", "2m")
        .pipeline("http.timeout", "60s")
        .pipeline("http.concurrency", &IN_HAND.to_string())
        .pipeline("in_flight", &IN_FLIGHT.to_string())
        .behave(slow)
        .create();
    let (mut enricher, tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let sent = pipe.produce(records(RECORDS));
    // Calls end and begin all the time, so the worker has something to write at almost any moment.
    pipe.watch().until_ended(100, DEADLINE);
    pipe.endpoint.until_in_flight(IN_HAND);
    kafka.process().stop();
    // The time is the fault itself, not a wait for a condition.
    thread::sleep(FROZEN);
    assert_eq!(enricher.owned(), OWNED);
    kafka.process().cont();
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets(&PLAN, &sent);
    // The group took nothing away, so even a transaction of unknown outcome is resolved without a second call.
    ends.were_called(&PLAN, &sent, &pipe.endpoint);
    assert!(
        enricher.metric("redeliver_lane_setbacks_total") > 0,
        "no transaction failed while the broker was frozen"
    );
    for process in [&enricher, &tier] {
        assert!(process.has_never_ended(), "{process} did not wait");
    }
}
