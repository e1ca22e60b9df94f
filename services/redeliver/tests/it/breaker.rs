//! The circuit breaker: an outage of the endpoint burns no attempts, and a record that fails on its own does.

use std::net::SocketAddr;

use redeliver_core::Record;
use redeliver_testkit::{
    ChaosPermit, Fate, Reply, Request, ServiceProcess, Trouble, ensure, eventually, http, until_seen,
};

use crate::chaos::load::under_load;
use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, Sent, records};

/// Enough for several probes.
const PROBES: u64 = 2;

#[track_caller]
fn until_breaker_is_open(enricher: &mut ServiceProcess, expected: u64) {
    enricher.until_metric("redeliver_worker_breaker_open", |open| open == expected);
}

/// Waits until this many more attempts have failed.
#[track_caller]
fn until_probed(enricher: &mut ServiceProcess, probes: u64) {
    const FORGOTTEN: &str = "redeliver_worker_forgotten_total";
    let goal = enricher.metric(FORGOTTEN) + probes;
    enricher.until_metric(FORGOTTEN, |forgotten| forgotten >= goal);
}

/// How an endpoint fails.
#[derive(Clone, Copy, Debug)]
enum Outage {
    Status(u16),
    /// Connections are closed without a response.
    Closes,
    /// Connections are refused.
    Down,
}

const OUTAGES: [Outage; 4] = [
    Outage::Status(503),
    Outage::Closes,
    Outage::Down,
    Outage::Status(401),
];

fn begin(pipe: &Pipe, outage: Outage) {
    match outage {
        Outage::Status(status) => pipe.endpoint.behave(move |_| Reply::status(status)),
        Outage::Closes => pipe.endpoint.behave(|_| Reply::Close),
        Outage::Down => pipe.endpoint.down(true),
    }
}

fn end(pipe: &Pipe) {
    pipe.endpoint.behave(echo);
    pipe.endpoint.down(false);
}

fn echo(request: &Request) -> Reply {
    Reply::ok(request.body.clone())
}

/// The circuit breaker in the readiness report, once it has this state.
#[track_caller]
fn breaker_once(enricher: &mut ServiceProcess, pipe: &Pipe, state: &str) -> serde_json::Value {
    eventually(state, DEADLINE, || {
        let (status, body) = enricher.get("/readyz");
        assert_eq!(status, 200, "{body}");
        let report: serde_json::Value = serde_json::from_str(&body).unwrap();
        let breaker = &report["breakers"][pipe.name()];
        ensure(breaker["state"] == state, body).map(|()| breaker.clone())
    })
}

#[test]
fn outage_uses_up_no_attempts() {
    let pipe = PipeBuilder::new("outage")
        .breaker("{ open_max: 1s }")
        .behave(echo)
        .create();
    let (mut enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let mut sent: Vec<Sent> = Vec::new();
    let outages = [Outage::Status(503), Outage::Down];
    for (number, outage) in outages.into_iter().enumerate() {
        let batch = || {
            let bodies = records(200).into_iter();
            bodies.map(|draft| Draft {
                key: Some(format!("{number}").into()),
                ..draft
            })
        };
        sent.extend(pipe.produce(batch().collect()));
        pipe.watch().until_ended(sent.len(), DEADLINE);
        begin(&pipe, outage);
        sent.extend(pipe.produce(batch().collect()));
        until_breaker_is_open(&mut enricher, 1);
        enricher.until_ready_but("ready, but the circuit breaker is open: POST ");
        let opened = breaker_once(&mut enricher, &pipe, "open");
        let code = opened["error_code"].as_str().unwrap();
        assert!(
            code.starts_with("http.") && opened["since"].is_string(),
            "{opened}"
        );
        until_probed(&mut enricher, PROBES);
        sent.extend(pipe.produce(batch().collect()));
        end(&pipe);
        until_breaker_is_open(&mut enricher, 0);
        let closed = breaker_once(&mut enricher, &pipe, "closed");
        assert!(closed.get("error_code").is_none(), "{closed}");
        assert!(
            closed["since"].as_str() > opened["since"].as_str(),
            "{opened} {closed}"
        );
    }
    settle(&pipe, &sent);
    assert!(enricher.metric("redeliver_worker_breaker_openings_total") >= outages.len() as u64);
}

/// From the worker over the status topic and the overview of the inspector to the pages of the console.
#[test]
fn console_shows_open_breaker() {
    let pipe = PipeBuilder::new("breaker-status")
        .with_inspector()
        .breaker("{ failures: 5, rate: null, open_max: 1s }")
        .behave(echo)
        .create();
    let mut enricher = pipe.enricher("a");
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    let url = format!("console.inspector.url=http://{}", inspector.word_after(" api="));
    // No other service is asked: nothing listens on port 1.
    let scheduler = "console.scheduler.url=http://127.0.0.1:1";
    let settings = [
        "--set",
        "console.listen=127.0.0.1:0",
        "--set",
        &url,
        "--set",
        scheduler,
    ];
    let mut console = pipe.start("console", "a", &settings);
    let address: SocketAddr = console.word_after(" address=").parse().unwrap();
    let name = pipe.name();
    let problem = format!("The endpoint of {name} fails");
    let until = |breaker: &str, is_problem: bool| {
        let state = format!("{breaker}</span>");
        eventually(breaker, DEADLINE, || {
            let (_, pipeline) = http::get(address, &format!("/pipelines/{name}")).unwrap();
            let (_, now) = http::get(address, &format!("/?prefix={name}")).unwrap();
            let shown = pipeline.split("<span>Breaker ").nth(1).unwrap_or_default();
            let shown = shown.split("</li>").next().unwrap_or_default();
            let is_shown = [&pipeline, &now].map(|page| page.contains(&problem) && page.contains("http.503"));
            let holds = shown.contains(&state) && is_shown == [is_problem; 2];
            ensure(holds, format!("{shown}, {is_shown:?}"))
        });
    };
    until("closed", false);
    begin(&pipe, Outage::Status(503));
    let sent = pipe.produce(records(20));
    until(">open", true);
    end(&pipe);
    until("closed", false);
    settle(&pipe, &sent);
    enricher.shut_down();
    // Removed, so that nobody has to wait until it expires.
    let key = format!("breaker/{name}/");
    let statuses = pipe.read(&["redeliver.status".into()]);
    let is_own = |record: &&Record| {
        record
            .key
            .as_deref()
            .is_some_and(|own| own.starts_with(key.as_bytes()))
    };
    assert_eq!(statuses.iter().rfind(is_own).unwrap().value, None);
    until("unknown", false);
}

/// No record may be lost, doubled or dead, and none may have used up an attempt.
#[track_caller]
fn settle(pipe: &Pipe, sent: &[Sent]) {
    let ends = pipe.settle(sent, DEADLINE);
    ends.meets_with(sent, |_| Fate::Succeeds);
    println!("{}", ends.report);
}

#[test]
#[ignore = "long"]
fn hundred_flaps_lose_and_double_nothing() {
    let _permit = ChaosPermit::acquire();
    let pipe = PipeBuilder::new("flaps")
        .breaker("{ failures: 5, rate: null, open_max: 1s }")
        .behave(echo)
        .create();
    let (mut enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let sent = under_load(&pipe, 50, |load| {
        for flap in 0..100 {
            begin(&pipe, OUTAGES[flap % OUTAGES.len()]);
            until_breaker_is_open(&mut enricher, 1);
            end(&pipe);
            until_breaker_is_open(&mut enricher, 0);
        }
        load.until_ended(100);
    });
    settle(&pipe, &sent);
    assert!(enricher.metric("redeliver_worker_breaker_openings_total") >= 100);
}

#[test]
fn poison_records_use_up_their_attempts() {
    let is_bad = |body: &[u8]| body.starts_with(b"bad");
    let pipe = PipeBuilder::new("poison")
        .tiers(&[500])
        .breaker("{ failures: 5, rate: null, open_max: 1s, poison_after: 2s }")
        .behave(move |request| match is_bad(&request.body) {
            true => Reply::status(503),
            false => echo(request),
        })
        .create();
    let (mut enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let draft = |word: &str, n: usize| Draft::new(format!("{word}-{n}"), format!("{word} {n}"));
    let bad = pipe.produce((0..3).map(|n| draft("bad", n)).collect());
    let good = pipe.produce((0..300).map(|n| draft("good", n)).collect());
    let all = [&bad[..], &good].concat();
    let ends = pipe.settle(&all, DEADLINE);
    ends.meets_with(&all, |sent| match is_bad(sent.body()) {
        true => Fate::Recovers {
            failures: u32::MAX,
            trouble: Trouble::Unavailable,
        },
        false => Fate::Succeeds,
    });
    assert_eq!(ends.report.dead, 3, "{}", ends.report);
    assert!(enricher.metric("redeliver_worker_forgotten_total") > 0);
}

#[test]
fn revoked_records_leave_an_open_breaker() {
    let pipe = PipeBuilder::new("revoked-open")
        .partitions(4)
        .breaker("{ failures: 5, rate: null, open_max: 1m }")
        .behave(|_| Reply::status(503))
        .create();
    let mut first = pipe.enricher("a");
    let sent = pipe.produce(records(400));
    let in_flight = |enricher: &mut ServiceProcess| enricher.metric("redeliver_worker_in_flight");
    until_seen("in memory", || in_flight(&mut first), |&other| other == 400);
    let mut second = pipe.enricher("b");
    let both = || (in_flight(&mut first), in_flight(&mut second));
    until_seen("each record is in memory once", both, |(first, second)| {
        *second > 0 && first + second == 400
    });
    // Otherwise, a record that has just failed could get its own failure, because others succeed.
    until_breaker_is_open(&mut second, 1);
    end(&pipe);
    // No retry tier runs: none of the records needs one.
    settle(&pipe, &sent);
}
