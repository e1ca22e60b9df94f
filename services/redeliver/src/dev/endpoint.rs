//! The demo's endpoint: a real HTTP server on loopback that fails some calls, the same ones every time.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use redeliver_runtime::listen::Listener;
use tokio_util::sync::CancellationToken;

/// What the endpoint does with a document, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Answers at once.
    Fine,
    /// Is busy (503) for that many calls, then answers.
    Busy(u32),
    /// Is busy for ever.
    Hopeless,
    /// Refuses the document (422).
    Refused,
}

fn fate(number: u64) -> Fate {
    match number % 12 {
        3 | 7 => Fate::Busy(1),
        5 => Fate::Busy(2),
        9 => Fate::Refused,
        11 => Fate::Hopeless,
        _ => Fate::Fine,
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
    let document: serde_json::Value = match serde_json::from_slice(&body) {
        Ok(document) => document,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("not JSON: {error}")),
    };
    let number = document["number"].as_u64().unwrap_or(0);
    let key = headers
        .get("idempotency-key")
        .and_then(|key| key.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    let is_busy = match fate(number) {
        Fate::Busy(times) => lock(&calls).is_one_of_the_first(times, key),
        Fate::Hopeless => true,
        Fate::Refused => return (StatusCode::UNPROCESSABLE_ENTITY, "refused".to_owned()),
        Fate::Fine => false,
    };
    if is_busy {
        (StatusCode::SERVICE_UNAVAILABLE, "busy".to_owned())
    } else {
        let answer = serde_json::json!({ "number": number, "enriched": true });
        (StatusCode::OK, answer.to_string())
    }
}

/// How often documents were asked for that are busy now and will not be: all others are answered without
/// counting, so nothing is kept of what nobody asks for again.
#[derive(Debug, Default)]
struct Calls(HashMap<String, u32>);

impl Calls {
    /// Counts a call, and forgets the key with the first one that is too many.
    fn is_one_of_the_first(&mut self, times: u32, key: String) -> bool {
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
    use super::*;

    #[test]
    fn a_document_is_busy_as_often_as_it_is_to_be_and_then_forgotten() {
        let mut calls = Calls::default();
        let mut call = |times, key: &str| calls.is_one_of_the_first(times, key.to_owned());
        assert_eq!([1, 2, 3].map(|_| call(2, "a")), [true, true, false]);
        assert_eq!([1, 2].map(|_| call(1, "b")), [true, false]);
        assert!(calls.0.is_empty(), "{calls:?}");
    }

    #[tokio::test]
    async fn nothing_is_kept_of_what_is_hopeless_or_refused() {
        let calls = Arc::new(Mutex::new(Calls::default()));
        let call = async |number: u64| {
            let body = serde_json::json!({ "number": number }).to_string();
            enrich(State(calls.clone()), HeaderMap::new(), body.into())
                .await
                .0
        };
        assert_eq!(
            (call(11).await, call(9).await, call(1).await),
            (
                StatusCode::SERVICE_UNAVAILABLE,
                StatusCode::UNPROCESSABLE_ENTITY,
                StatusCode::OK
            )
        );
        assert!(lock(&calls).0.is_empty());
    }
}
