//! The values of metrics: which series count how many records, attempts and calls.

use std::collections::BTreeMap;

use redeliver_core::HumanDuration;
use redeliver_core::pipeline::retry_tier_group;
use redeliver_testkit::{Reply, Request};

use crate::retries::{begins_with, drafts};
use crate::support::{DEADLINE, Draft, PipeBuilder};

/// The metrics of workers and endpoints that are compared.
const OF_ENRICHER: [&str; 14] = [
    "worker_succeeded_total",
    "worker_retried_total",
    "worker_dead_total",
    "worker_long_waits_total",
    "worker_forgotten_total",
    "worker_breaker_openings_total",
    "worker_attempts_sum",
    "worker_attempts_count",
    "worker_handling_seconds_count",
    "worker_waiting_records",
    "worker_in_flight",
    "http_calls_total",
    "http_call_seconds_count",
    "http_quick_retries_total",
];
/// The metrics of tiers that are compared.
const OF_TIER: [&str; 5] = [
    "tier_released_total",
    "tier_rejected_total",
    "tier_moved_total",
    "tier_lateness_seconds_count",
    "tier_held",
];

#[test]
fn outcomes_are_counted() {
    let throttled = |seconds: Option<u32>| {
        let retry_after = seconds.map(|seconds| ("retry-after".to_owned(), seconds.to_string()));
        Reply::Status(429, Vec::from_iter(retry_after), "busy".into())
    };
    let reply = move |request: &Request| {
        let word = |word| begins_with(&request.body, word);
        match request.earlier_calls_of_body {
            0 if word("recovers") => Reply::status(503),
            0 if word("restarts") => Reply::Close,
            0 if word("hangs") => Reply::Hang,
            0 if word("busy") => throttled(None),
            _ if word("late") => throttled(Some(3_600)),
            _ if word("broken") => Reply::status(500),
            _ if word("hopeless") => Reply::status(422),
            _ => Reply::ok("fine"),
        }
    };
    let pipe = PipeBuilder::new("metrics")
        .tiers(&[300, 600])
        .pipeline("max_age", "30m")
        .pipeline("http.timeout", "4s")
        .pipeline("http.quick_retries", "1")
        .behave(reply)
        .create();
    let (mut enricher, mut tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
    let kinds = [
        ("fine", 5),
        ("recovers", 3),
        ("restarts", 4),
        ("hangs", 1),
        ("busy", 2),
        ("late", 2),
        ("broken", 2),
        ("hopeless", 3),
    ];
    let sent: Vec<Draft> = kinds
        .iter()
        .flat_map(|(word, count)| drafts(word, *count))
        .collect();
    let sent = pipe.produce(sent).len();
    // Without the headers of a retry, they are malformed.
    let forged = pipe
        .produce_to(&pipe.pipeline.due_topic(), drafts("forged", 2))
        .len();
    let forged = forged + pipe.produce_to(&pipe.first_tier(), drafts("forged", 1)).len();
    pipe.watch().until_ended(sent + forged, DEADLINE);

    let name = pipe.name();
    let of = |metric: &str, label: &str, value: &str, count: u32| {
        let series = format!("{metric}{{pipeline={name:?},{label}={value:?}}}");
        (series, f64::from(count))
    };
    let total = |metric: &str, count: u32| (format!("{metric}{{pipeline={name:?}}}"), f64::from(count));
    enricher.until_series(
        &OF_ENRICHER,
        &BTreeMap::from([
            total("worker_succeeded_total", 15),
            // Each broken one waits twice.
            of("worker_retried_total", "class", "transient", 3 + 1 + 2 * 2),
            of("worker_retried_total", "class", "throttled", 2),
            of("worker_dead_total", "class", "permanent", 3),
            of("worker_dead_total", "class", "exhausted", 2),
            of("worker_dead_total", "class", "expired", 2),
            of("worker_dead_total", "class", "malformed", 2),
            of("worker_attempts_count", "outcome", "succeeded", 15),
            // Being throttled does not count as an attempt.
            of(
                "worker_attempts_sum",
                "outcome",
                "succeeded",
                5 + 3 * 2 + 4 + 2 + 2,
            ),
            of("worker_attempts_count", "outcome", "dead", 3 + 2 + 2 + 2),
            of("worker_attempts_sum", "outcome", "dead", 3 + 2 * 3),
            of("worker_handling_seconds_count", "outcome", "succeeded", 15),
            of(
                "worker_handling_seconds_count",
                "outcome",
                "transient",
                3 + 1 + 2 * 3,
            ),
            of("worker_handling_seconds_count", "outcome", "throttled", 2 + 2),
            of("worker_handling_seconds_count", "outcome", "permanent", 3),
            of("http_calls_total", "status", "200", 15),
            of("http_calls_total", "status", "422", 3),
            of("http_calls_total", "status", "429", 4),
            // Each attempt of a broken one consists of two calls.
            of("http_calls_total", "status", "500", 2 * 3 * 2),
            of("http_calls_total", "status", "503", 3),
            of("http_calls_total", "status", "closed", 4),
            of("http_calls_total", "status", "timeout", 1),
            total("http_call_seconds_count", 42),
            total("http_quick_retries_total", 2 * 3 + 4),
        ]),
    );
    assert_eq!(pipe.endpoint.calls(), 42);

    let of = |metric: &str, tier: HumanDuration, count: u32| {
        let group = retry_tier_group(&pipe.kafka.id_prefix, tier);
        let labels = format!("pipeline={name:?},tier=\"{tier}\",group={group:?}");
        (format!("{metric}{{{labels}}}"), f64::from(count))
    };
    let [first, second] = pipe.pipeline.policy.tiers()[..] else {
        panic!("two tiers")
    };
    tier.until_series(
        &OF_TIER,
        &BTreeMap::from([
            of("tier_released_total", first, 3 + 1 + 2 + 2),
            of("tier_lateness_seconds_count", first, 8),
            of("tier_rejected_total", first, 1),
            of("tier_released_total", second, 2),
            of("tier_lateness_seconds_count", second, 2),
        ]),
    );

    // With huge pages, an idle service takes several times the memory.
    for process in [&mut enricher, &mut tier] {
        let path = format!("/proc/{}/status", process.process().id().number());
        let status = std::fs::read_to_string(&path).unwrap();
        let enabled = status.lines().find_map(|line| line.strip_prefix("THP_enabled:"));
        assert_eq!(enabled.map(str::trim), Some("0"), "{status}");
    }
}
