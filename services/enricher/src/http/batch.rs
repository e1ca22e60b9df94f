//! The bodies of calls for several records, in JSON.
//!
//! ```json
//! {"records": [{"id": "orders-0-1", "value": {"total": 3}}, {"id": "orders-0-2", "value": {"total": 4}}]}
//! {"results": [{"id": "orders-0-1", "value": {"ok": true}}, {"id": "orders-0-2", "status": 503, "retry_after": 30}]}
//! ```

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use redeliver_runtime::config::BatchValues;
use redeliver_worker::Attempt;
use reqwest::header::HeaderValue;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use super::request;

#[derive(Serialize)]
struct Request<'a> {
    records: Vec<RequestRecord<'a>>,
}

#[derive(Serialize)]
struct RequestRecord<'a> {
    id: String,
    value: Option<Value<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tracestate: Option<String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Value<'a> {
    Json(&'a RawValue),
    Base64(String),
}

#[derive(Deserialize)]
struct Response<'a> {
    #[serde(borrow)]
    results: Vec<ResponseResult<'a>>,
}

#[derive(Deserialize)]
struct ResponseResult<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
    #[serde(default = "ok")]
    status: u16,
    /// In seconds.
    retry_after: Option<f64>,
    /// Even if it is `null`.
    #[serde(borrow, default, deserialize_with = "present")]
    value: Option<&'a RawValue>,
    content_type: Option<String>,
}

const fn ok() -> u16 {
    200
}

fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// The result of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RecordResult {
    pub(super) status: u16,
    /// At most the requested maximum.
    pub(super) retry_after: Option<Duration>,
    /// Empty if the response has no value for the record.
    pub(super) value: Bytes,
    pub(super) content_type: Option<HeaderValue>,
}

/// Whether a value can be a part of a call.
///
/// # Errors
/// Why it cannot.
pub(super) fn check(value: Option<&[u8]>, values: BatchValues) -> Result<(), &'static str> {
    match (value, values) {
        (Some(value), BatchValues::Json) if serde_json::from_slice::<&RawValue>(value).is_err() => {
            Err("the value is not JSON, and `batch.values` is `json`")
        }
        _ => Ok(()),
    }
}

/// The body of a call. The values have been checked.
pub(super) fn body(attempts: &[Attempt], values: BatchValues) -> Result<Bytes, serde_json::Error> {
    let text = |value: Option<HeaderValue>| Some(value?.to_str().ok()?.to_owned());
    let mut records = Vec::with_capacity(attempts.len());
    let mut ids = HashSet::with_capacity(attempts.len());
    for attempt in attempts {
        let id = request::id(attempt);
        // A partition that moves between lanes is read again while the previous attempts are still in progress.
        if !ids.insert(id.clone()) {
            continue;
        }
        let value = match (attempt.record.value.as_deref(), values) {
            (None, _) => None,
            (Some(value), BatchValues::Json) => Some(Value::Json(serde_json::from_slice(value)?)),
            (Some(value), BatchValues::Base64) => Some(Value::Base64(STANDARD.encode(value))),
        };
        let (traceparent, tracestate) = request::trace(attempt);
        records.push(RequestRecord {
            id,
            value,
            content_type: text(request::content_type(&attempt.record.headers)),
            traceparent: text(traceparent),
            tracestate: text(tracestate),
        });
    }
    serde_json::to_vec(&Request { records }).map(Bytes::from)
}

/// The result of each record, in the order of `ids`. `None` if the response has none for it.
///
/// # Errors
/// What is wrong with the response. Contains no payload.
pub(super) fn results(
    body: &Bytes,
    ids: impl Iterator<Item = String>,
    values: BatchValues,
    max_retry_after: Duration,
) -> Result<Vec<Option<RecordResult>>, String> {
    // The message of an error may quote the response.
    let response: Response<'_> = serde_json::from_slice(body).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        format!("is not {{\"results\": [{{\"id\": ...}}]}}: line {line}, column {column}")
    })?;
    let mut by_id = HashMap::with_capacity(response.results.len());
    for result in response.results {
        let parsed = parse(&result, body, values, max_retry_after)?;
        if by_id.insert(result.id, parsed).is_some() {
            return Err("has two results with the same id".to_owned());
        }
    }
    let mut known = HashSet::with_capacity(by_id.len());
    let of_records: Vec<_> = ids
        .map(|id| {
            let result = by_id.get(id.as_str()).cloned();
            known.insert(id);
            result
        })
        .collect();
    match by_id.keys().all(|id| known.contains(&**id)) {
        true => Ok(of_records),
        false => Err("has a result whose id is not that of a record of the request".to_owned()),
    }
}

/// A part of the response. A small one must not keep the whole response in memory.
fn part(body: &Bytes, part: &[u8]) -> Bytes {
    match part.len() > body.len() / 2 {
        true => body.slice_ref(part),
        false => Bytes::copy_from_slice(part),
    }
}

fn parse(
    result: &ResponseResult<'_>,
    body: &Bytes,
    values: BatchValues,
    max_retry_after: Duration,
) -> Result<RecordResult, String> {
    if !(100..=599).contains(&result.status) {
        return Err(format!(
            "has a result with the status {}; valid are 100 to 599",
            result.status
        ));
    }
    let value = match (result.value, values) {
        (None, _) => Bytes::new(),
        (Some(json), BatchValues::Json) => part(body, json.get().as_bytes()),
        (Some(json), BatchValues::Base64) if json.get() == "null" => Bytes::new(),
        (Some(json), BatchValues::Base64) => {
            let text: Option<Cow<'_, str>> = serde_json::from_str(json.get()).unwrap_or_default();
            let bytes = text.and_then(|text| STANDARD.decode(&*text).ok());
            bytes
                .ok_or("has a value that is not base64, and `batch.values` is `base64`")?
                .into()
        }
    };
    let content_type = match (&result.content_type, values) {
        (Some(text), _) => Some(HeaderValue::from_str(text).map_err(|_| "has an invalid content_type")?),
        (None, BatchValues::Json) => Some(HeaderValue::from_static("application/json")),
        (None, BatchValues::Base64) => None,
    };
    let retry_after = match result.retry_after {
        Some(seconds) if seconds < 0.0 => return Err("has a negative retry_after".to_owned()),
        // Rounded up, as in a header. A number that is too large for a duration is more than any maximum.
        Some(seconds) => Some(Duration::try_from_secs_f64(seconds.ceil()).unwrap_or(Duration::MAX)),
        None => None,
    };
    Ok(RecordResult {
        status: result.status,
        retry_after: retry_after.map(|wait| wait.min(max_retry_after)),
        value,
        content_type,
    })
}
