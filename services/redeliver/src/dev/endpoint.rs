//! The demo's endpoint: a real HTTP server on loopback that fails some calls, the same ones every time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use tokio::net::TcpListener;
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
pub(super) async fn serve(listener: TcpListener, shutdown: CancellationToken) -> std::io::Result<()> {
    let calls: Arc<Mutex<HashMap<String, u32>>> = Arc::default();
    let app = Router::new().route("/enrich", post(enrich)).with_state(calls);
    axum::serve(listener, app)
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
}

async fn enrich(
    State(calls): State<Arc<Mutex<HashMap<String, u32>>>>,
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
    let call = {
        let mut calls = calls.lock().unwrap_or_else(PoisonError::into_inner);
        let call = calls.entry(key.clone()).or_insert(0);
        *call += 1;
        *call
    };
    let answer = match fate(number) {
        Fate::Busy(times) if call <= times => (StatusCode::SERVICE_UNAVAILABLE, "busy".to_owned()),
        Fate::Hopeless => (StatusCode::SERVICE_UNAVAILABLE, "busy".to_owned()),
        Fate::Refused => (StatusCode::UNPROCESSABLE_ENTITY, "refused".to_owned()),
        Fate::Fine | Fate::Busy(_) => (
            StatusCode::OK,
            serde_json::json!({ "number": number, "enriched": true }).to_string(),
        ),
    };
    if answer.0 == StatusCode::OK || answer.0 == StatusCode::UNPROCESSABLE_ENTITY {
        // Nobody asks again.
        calls.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
    }
    answer
}
