//! A slow record does not block its partition, and after a crash no completed record is repeated.

use std::time::Duration;

use redeliver_testkit::{Fate, Reply, Request, until_seen};

use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, Sent};

const SLOW: &[u8] = b"slow";

/// The first call for the slow record is never answered. All other calls are answered at once.
fn one_hangs(request: &Request) -> Reply {
    if *request.body == *SLOW && request.earlier_calls_of_body == 0 {
        Reply::Hang
    } else {
        Reply::ok(request.body.clone())
    }
}

fn others(range: std::ops::Range<u32>) -> Vec<Draft> {
    range
        .map(|n| Draft::new(format!("k{}", n % 10), format!("record {n}")))
        .collect()
}

/// Sends the slow record and many after it, and waits until all others have ended.
#[track_caller]
fn all_but_one_end(pipe: &Pipe, count: u32) -> Vec<Sent> {
    let mut sent = pipe.produce(others(0..10));
    sent.extend(pipe.produce(vec![Draft::new("k1", SLOW)]));
    until_seen("the slow call", || pipe.endpoint.calls_of_body(SLOW), |&n| n == 1);
    // Later records keep arriving.
    let mut watch = pipe.watch();
    let batches = 4;
    for batch in 1..=batches {
        sent.extend(pipe.produce(others(batch * 10_000..batch * 10_000 + count / batches)));
        watch.until_ended(sent.len() - 1, DEADLINE);
    }
    assert!(
        watch
            .records
            .iter()
            .all(|record| record.value.as_deref() != Some(SLOW))
    );
    sent
}

#[test]
fn hanging_record_delays_and_repeats_none() {
    let setup = PipeBuilder::new("hang-crash")
        .partitions(1)
        .tiers(&[200])
        .behave(one_hangs);
    let pipe = setup.pipeline("http.timeout", "5m").create();
    let mut enricher = pipe.enricher("a");
    let sent = all_but_one_end(&pipe, 1_000);
    enricher.kill_9();
    let _enricher = pipe.enricher("a");
    // The second call is answered. The first one ended with the process and does not count.
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| Fate::Succeeds);
    for sent in &sent {
        let calls = pipe.endpoint.calls_of_key(&sent.idempotency_key());
        assert_eq!(
            calls,
            if sent.body() == SLOW { 2 } else { 1 },
            "{}",
            sent.position
        );
    }
}

#[test]
fn crash_repeats_only_records_in_flight() {
    const IN_FLIGHT: usize = 256;
    let setup = PipeBuilder::new("hang-busy").partitions(1).tiers(&[200]);
    let setup = setup.behave(|request| match &*request.body {
        SLOW => one_hangs(request),
        _ => Reply::Delay(
            Duration::from_millis(10),
            Box::new(Reply::ok(request.body.clone())),
        ),
    });
    let setup = setup
        .pipeline("http.timeout", "5m")
        .pipeline("in_flight", &IN_FLIGHT.to_string());
    let pipe = setup.create();
    let mut enricher = pipe.enricher("a");
    let mut drafts = others(0..1_500);
    drafts[5] = Draft::new("k5", SLOW);
    let sent = pipe.produce(drafts);
    let mut watch = pipe.watch();
    watch.until_ended(500, DEADLINE);
    enricher.kill_9();
    let _enricher = pipe.enricher("a");
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| Fate::Succeeds);
    let calls = pipe.endpoint.calls_by_key();
    let repeated = calls.values().filter(|calls| **calls > 1).count();
    println!(
        "{repeated} of {} records were called twice after the crash",
        sent.len()
    );
    assert_eq!(calls.len(), sent.len());
    assert!(
        calls.values().all(|calls| *calls <= 2) && repeated <= IN_FLIGHT,
        "{repeated}"
    );
}
