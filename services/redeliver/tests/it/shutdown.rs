//! Shutdown: calls in progress are finished, and none is repeated.

use std::time::{Duration, Instant};

use redeliver_testkit::{Fate, Reply, eventually, http};

use crate::support::{DEADLINE, PipeBuilder, distinct, records};

#[test]
fn calls_in_progress_are_finished_and_not_repeated_after_a_restart() {
    let setup = PipeBuilder::new("shutdown").tiers(&[200]).behave(|request| {
        Reply::Delay(
            Duration::from_millis(1_500),
            Box::new(Reply::ok(request.body.clone())),
        )
    });
    let pipe = setup
        .pipeline("http.concurrency", "40")
        .pipeline("http.timeout", "10s")
        .create();
    let mut enricher = pipe.enricher("a");
    let sent = pipe.produce(records(100));
    eventually("forty calls are in progress", DEADLINE, || {
        match pipe.endpoint.in_flight() {
            40 => Ok(()),
            count => Err(format!("{count} calls")),
        }
    });
    let admin = enricher.admin();
    let began = Instant::now();
    enricher.process().terminate();
    eventually("it is not ready any more", DEADLINE, || {
        match http::get(admin, "/readyz") {
            Ok((503, body)) if body.contains("\"process\":\"shutting down\"") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    assert_eq!(enricher.wait(DEADLINE).code(), Some(0));
    println!(
        "ended {:?} after SIGTERM with 40 calls of 1.5 s under way",
        began.elapsed()
    );
    let before = pipe.endpoint.calls();
    assert!(before < 100, "no call begins once the end has begun");
    assert_eq!(pipe.audit().output, before, "every call that was made counts");

    let _enricher = pipe.enricher("a");
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| Fate::Succeeds);
    let calls = pipe.endpoint.calls_by_key();
    assert_eq!(distinct(calls.keys()), 100);
    assert!(calls.values().all(|calls| *calls == 1), "{calls:?}");
}

#[test]
fn a_call_that_exceeds_the_grace_period_is_repeated_later() {
    let setup = PipeBuilder::new("shutdown-grace").behave(|request| {
        if request.earlier_calls_of_body == 0 {
            Reply::Hang
        } else {
            Reply::ok(request.body.clone())
        }
    });
    let setup = setup.pipeline("http.timeout", "5m").set("shutdown.grace", "5s");
    let pipe = setup.create();
    let mut enricher = pipe.enricher("a");
    let sent = pipe.produce(records(1));
    eventually("the call is in progress", DEADLINE, || {
        match pipe.endpoint.in_flight() {
            1 => Ok(()),
            count => Err(format!("{count} calls")),
        }
    });
    let began = Instant::now();
    enricher.shut_down();
    println!("ended {:?} after SIGTERM, with a grace of 5 s", began.elapsed());
    let _enricher = pipe.enricher("a");
    pipe.settle(&sent, DEADLINE).meets_with(&sent, |_| Fate::Succeeds);
    assert_eq!(pipe.endpoint.calls_of_key(&sent[0].idempotency_key()), 2);
}

#[test]
fn a_second_signal_ends_the_process_at_once() {
    let pipe = PipeBuilder::new("shutdown-twice").behave(|_| Reply::Hang);
    let pipe = pipe.pipeline("http.timeout", "5m").create();
    let mut enricher = pipe.enricher("a");
    pipe.produce(records(1));
    eventually("the call is in progress", DEADLINE, || {
        match pipe.endpoint.in_flight() {
            1 => Ok(()),
            count => Err(format!("{count} calls")),
        }
    });
    enricher.process().terminate();
    enricher.wait_for_output("shutting down; a second signal exits immediately", DEADLINE);
    enricher.process().terminate();
    // A process whose grace period ends has another status.
    assert_eq!(enricher.wait(DEADLINE).code(), Some(143));
}

#[test]
fn a_retry_tier_with_waiting_records_shuts_down_at_once() {
    let pipe = PipeBuilder::new("shutdown-tier")
        .tiers(&[600_000])
        .behave(|_| Reply::status(503))
        .create();
    let (_enricher, mut tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    pipe.produce(records(50));
    eventually("all are waiting", DEADLINE, || match pipe.audit() {
        report if report.waiting.in_tiers == 50 => Ok(()),
        report => Err(report),
    });
    // It does not wait until they are due.
    tier.shut_down();
}
