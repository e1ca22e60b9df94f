//! Shutdown: calls in progress are finished, and none is repeated.

use std::time::Duration;

use redeliver_testkit::{Fate, Reply, eventually, http};

use crate::support::{DEADLINE, PipeBuilder, distinct, records};

#[test]
fn calls_in_progress_are_finished_once() {
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
    enricher.process().terminate();
    eventually("it is not ready any more", DEADLINE, || {
        match http::get(admin, "/readyz") {
            Ok((503, body)) if body.contains("\"process\":\"shutting down\"") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    });
    assert_eq!(enricher.wait(DEADLINE).code(), Some(0));
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
fn call_beyond_grace_period_is_repeated() {
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
    enricher.shut_down();
    let _enricher = pipe.enricher("a");
    pipe.settle(&sent, DEADLINE).meets_with(&sent, |_| Fate::Succeeds);
    assert_eq!(pipe.endpoint.calls_of_key(&sent[0].idempotency_key()), 2);
}
