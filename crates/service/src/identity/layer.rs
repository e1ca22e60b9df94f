//! A middleware of axum that authenticates requests.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use redeliver_runtime::http_server::Protection;

use super::access::Permissions;
use super::{Access, Authenticator, Refusal};
use crate::request_span::traced;

/// How [`authenticate`] checks requests.
#[derive(Clone, Debug)]
pub struct Authentication {
    /// Knows the callers.
    pub authenticator: Authenticator,
    /// What each call requires, if there is such a table. Calls that are not in it are refused, and callers that may not do what it says
    /// with any application or topic. The operation itself requires the scope for the names that it is about.
    pub required: Option<Permissions>,
    /// Makes the response to a refused request.
    pub refuse: fn(&Refusal) -> Response,
}

/// Adds the [`Identity`](super::Identity) of the caller and its [`Access`] to the extensions of each request, which protects its
/// connection from being replaced from then on ([`Protection`]). Counts and logs refused requests; the others have spans. For
/// [`from_fn_with_state`](axum::middleware::from_fn_with_state).
pub async fn authenticate(
    State(authentication): State<Authentication>,
    mut request: Request,
    next: Next,
) -> Response {
    let Authentication {
        authenticator,
        required,
        refuse,
    } = authentication;
    let access = Access::of(&request, authenticator, required);
    match access.check().await {
        Ok(identity) => {
            if let Some(protection) = request.extensions().get::<Protection>() {
                protection.protect();
            }
            request.extensions_mut().insert(identity);
            request.extensions_mut().insert(access);
            traced(request, |request| next.run(request)).await
        }
        Err(refusal) => refuse(&refusal),
    }
}
