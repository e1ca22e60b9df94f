//! Calls for several records: each record ends as it would with a call of its own.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use redeliver_testkit::{Fate, Plan, Reply, Request};
use serde_json::{Value, json};

use crate::support::{DEADLINE, PLAN, PipeBuilder, records};

const BATCH: &str = "{ records: 50, values: base64 }";

/// The behaviour of an endpoint that gets batches, with values in base64. `reply` decides about each record.
pub(crate) fn each_record(
    reply: impl Fn(&Request) -> Reply + Send + Sync,
) -> impl Fn(&Request) -> Reply + Send + Sync {
    let earlier_calls: Mutex<HashMap<Vec<u8>, u32>> = Mutex::default();
    move |request| {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        let (mut results, mut slowest) = (Vec::new(), Duration::ZERO);
        for record in body["records"].as_array().unwrap() {
            let value = record["value"]
                .as_str()
                .map(|text| STANDARD.decode(text).unwrap());
            let value = value.unwrap_or_default();
            let earlier_calls_of_body = {
                let mut earlier = earlier_calls.lock().unwrap_or_else(PoisonError::into_inner);
                let calls = earlier.entry(value.clone()).or_default();
                *calls += 1;
                *calls - 1
            };
            let of_record = Request {
                body: value.into(),
                earlier_calls_of_body,
                ..request.clone()
            };
            let mut reply = reply(&of_record);
            while let Reply::Delay(delay, later) = reply {
                slowest = slowest.max(delay);
                reply = *later;
            }
            let Reply::Status(status, _, body) = reply else {
                return reply;
            };
            results.push(json!({ "id": record["id"], "status": status, "value": STANDARD.encode(body) }));
        }
        Reply::Delay(
            slowest,
            Box::new(Reply::ok(json!({ "results": results }).to_string())),
        )
    }
}

#[test]
fn records_of_a_batch_succeed_wait_and_die_one_by_one() {
    let pipe = PipeBuilder::new("batches")
        .pipeline("http.batch", BATCH)
        .behave(each_record(|request| PLAN.reply(request)))
        .create();
    let sent = pipe.produce(records(2_000));
    let _services = (pipe.enricher("a"), pipe.retry_tier("a"));
    pipe.settle(&sent, DEADLINE).meets(&PLAN, &sent);
    let calls = pipe.endpoint.calls();
    let attempts: u64 = sent
        .iter()
        .map(|sent| match PLAN.fate(sent.body()) {
            Fate::Recovers { failures, .. } => u64::from(failures) + 1,
            Fate::Succeeds | Fate::Refused => 1,
        })
        .sum();
    let retries = attempts - sent.len() as u64;
    // Retries are alone.
    assert!(
        calls < retries + sent.len() as u64 / 4,
        "{calls} calls for {attempts} attempts, {retries} of them retries"
    );
}

#[test]
fn a_record_that_makes_whole_calls_fail_is_a_dead_letter_and_all_others_succeed() {
    let is_bad = |body: &[u8]| {
        Plan {
            permanent_percent: 1,
            ..Plan::default()
        }
        .fate(body)
            == Fate::Refused
    };
    let pipe = PipeBuilder::new("bad-batches")
        .pipeline("http.batch", BATCH)
        .behave({
            let echo = each_record(|request| Reply::ok(request.body.clone()));
            move |request| {
                let body: Value = serde_json::from_slice(&request.body).unwrap();
                let mut values = body["records"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .filter_map(|record| STANDARD.decode(record["value"].as_str()?).ok());
                match values.any(|value| is_bad(&value)) {
                    true => Reply::status(422),
                    false => echo(request),
                }
            }
        })
        .create();
    let sent = pipe.produce(records(1_000));
    let _services = (pipe.enricher("a"), pipe.retry_tier("a"));
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |sent| {
        if is_bad(sent.body()) {
            Fate::Refused
        } else {
            Fate::Succeeds
        }
    });
    assert!(ends.report.dead > 0);
}
