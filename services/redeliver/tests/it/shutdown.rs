//! Shutdown: calls in progress are finished, and none is repeated.

use std::time::Duration;

use redeliver_testkit::{Fate, Reply, http, until_seen};

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
    pipe.endpoint.until_in_flight(40);
    let admin = enricher.admin();
    enricher.process().terminate();
    let process = r#""process":"shutting down""#;
    let ready = || http::get(admin, "/readyz").ok();
    until_seen(
        "it ends",
        ready,
        |ready| matches!(ready, Some((503, body)) if body.contains(process)),
    );
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
    pipe.endpoint.until_in_flight(1);
    enricher.shut_down();
    let _enricher = pipe.enricher("a");
    pipe.settle(&sent, DEADLINE).meets_with(&sent, |_| Fate::Succeeds);
    assert_eq!(pipe.endpoint.calls_of_key(&sent[0].idempotency_key()), 2);
}
