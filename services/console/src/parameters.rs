//! Parameters of addresses, with a page that says what would be right if they are invalid.

use axum::extract::{self, FromRequestParts, MatchedPath};
use axum::http::request::Parts;
use axum::response::Response;
use redeliver_core::{HumanDuration, Timestamp};
use serde::de::DeserializeOwned;

use crate::page::{Failed, Part, Problem};

/// The parameters after `?`.
pub(crate) struct Query<T>(pub(crate) T);

/// The parts of the path.
pub(crate) struct Path<T>(pub(crate) T);

/// The time that is a duration such as `7d` before `now`; `None` if the text is empty.
pub(crate) fn since(text: &str, now: Timestamp) -> Part<Option<Timestamp>> {
    let text = text.trim();
    if text.is_empty() {
        return Ok(None);
    }
    let since: HumanDuration = text
        .parse()
        .map_err(|_| Problem::invalid("`since` must be a duration such as 12h or 7d."))?;
    let since = i64::try_from(since.as_millis()).unwrap_or(i64::MAX);
    let from = now.as_millis().saturating_sub(since).max(0);
    Ok(Some(Timestamp::from_millis(from)))
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        match extract::Query::from_request_parts(parts, state).await {
            Ok(extract::Query(parameters)) => Ok(Self(parameters)),
            Err(rejection) => Err(Failed::respond("", Problem::invalid(rejection.body_text()))),
        }
    }
}

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Path<T> {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        match extract::Path::from_request_parts(parts, state).await {
            Ok(extract::Path(segments)) => Ok(Self(segments)),
            Err(rejection) => {
                let path = parts.extensions.get::<MatchedPath>();
                let path = path.map_or("", MatchedPath::as_str);
                let detail = format!("{}. The address of such a page is {path}.", rejection.body_text());
                Err(Failed::respond("", Problem::invalid(detail)))
            }
        }
    }
}
