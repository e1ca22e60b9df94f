//! An endpoint for calls with several records.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use redeliver_testkit::{Reply, Request};
use serde_json::{Value, json};

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
