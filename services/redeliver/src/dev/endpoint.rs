//! The endpoint of the demonstration: an HTTP server on loopback that fails the same requests in every run.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use redeliver_core::json::{self, Scalar};
use redeliver_runtime::listen::Listener;
use tokio_util::sync::CancellationToken;

/// How the endpoint treats a document, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behaviour {
    Fine,
    /// 500 to so many requests, then 200.
    Fails(u32),
    /// 500 to every request.
    Broken,
    /// 422, unless the record is redriven: as if the cause was removed by then.
    Rejected,
}

fn behaviour(number: u64) -> Behaviour {
    match number % 12 {
        3 | 7 => Behaviour::Fails(1),
        5 => Behaviour::Fails(2),
        9 => Behaviour::Rejected,
        11 => Behaviour::Broken,
        _ => Behaviour::Fine,
    }
}

/// Serves until the token is cancelled.
pub(super) async fn serve(listener: Listener, shutdown: CancellationToken) -> std::io::Result<()> {
    let calls: Arc<Mutex<Calls>> = Arc::default();
    let app = Router::new().route("/enrich", post(enrich)).with_state(calls);
    axum::serve(listener, app)
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
}

async fn enrich(
    State(calls): State<Arc<Mutex<Calls>>>,
    headers: HeaderMap,
    body: Bytes,
) -> (StatusCode, String) {
    let number = match json::scalar_at(&body, "/number") {
        Ok(number) => number,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("not JSON: {error}")),
    };
    let number = match number {
        Some(Scalar::Number(number)) => number.text().parse().unwrap_or(0),
        _ => 0,
    };
    let key = headers
        .get("idempotency-key")
        .and_then(|key| key.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    let fails = match behaviour(number) {
        Behaviour::Fails(times) => lock(&calls).is_among_first(times, key),
        Behaviour::Broken => true,
        Behaviour::Rejected if !is_redriven(&key) => {
            return (StatusCode::UNPROCESSABLE_ENTITY, "rejected".to_owned());
        }
        Behaviour::Rejected | Behaviour::Fine => false,
    };
    if fails {
        (StatusCode::INTERNAL_SERVER_ERROR, "busy".to_owned())
    } else {
        let answer = serde_json::json!({ "number": number, "enriched": true });
        (StatusCode::OK, answer.to_string())
    }
}

/// Whether an idempotency key is `topic-partition-offset-rN`.
fn is_redriven(key: &str) -> bool {
    let end = key.rsplit('-').next().and_then(|end| end.strip_prefix('r'));
    end.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Requests by idempotency key, for documents that succeed later. Other documents are not counted, so that the map stays
/// small.
#[derive(Debug, Default)]
struct Calls(HashMap<String, u32>);

impl Calls {
    /// Whether this is one of the first requests. Removes the key once it is not.
    fn is_among_first(&mut self, times: u32, key: String) -> bool {
        match self.0.entry(key) {
            Entry::Occupied(entry) if *entry.get() >= times => {
                entry.remove();
                false
            }
            entry => {
                *entry.or_insert(0) += 1;
                true
            }
        }
    }
}

fn lock(calls: &Mutex<Calls>) -> MutexGuard<'_, Calls> {
    calls.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    #[test]
    fn document_fails_for_first_requests() {
        let mut calls = Calls::default();
        let mut call = |times, key: &str| calls.is_among_first(times, key.to_owned());
        assert_eq!([1, 2, 3].map(|_| call(2, "a")), [true, true, false]);
        assert_eq!([1, 2].map(|_| call(1, "b")), [true, false]);
        assert!(calls.0.is_empty(), "{calls:?}");
    }

    #[tokio::test]
    async fn rejected_documents_are_not_counted() {
        let calls = Arc::new(Mutex::new(Calls::default()));
        let call = async |number: u64, key: &'static str| {
            let body = serde_json::json!({ "number": number }).to_string();
            let headers = [(HeaderName::from_static("idempotency-key"), key.parse().unwrap())];
            enrich(State(calls.clone()), headers.into_iter().collect(), body.into())
                .await
                .0
        };
        for (number, key, expected) in [
            (11, "docs-0-1", StatusCode::INTERNAL_SERVER_ERROR),
            (9, "docs-0-1", StatusCode::UNPROCESSABLE_ENTITY),
            (9, "docs-0-1-r1", StatusCode::OK),
            (1, "docs-0-1", StatusCode::OK),
        ] {
            assert_eq!(call(number, key).await, expected, "{number} {key}");
        }
        assert!(lock(&calls).0.is_empty());
    }
}
