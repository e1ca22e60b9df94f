//! The web console: pages about what fails, what waits and what is due, rendered by the server.
//!
//! It has no access to Kafka and no rights of its own. Each page calls the inspector and the scheduler over gRPC with the token of its
//! viewer, so scopes, masking and the audit of disclosures are those of the APIs. It keeps no state.
//!
//! | module | contents |
//! |---|---|
//! | [`backend`] | clients of the inspector and the scheduler |
//! | `command` | the command that does the same as a page |
//! | `cookies` | reads and sets cookies |
//! | `site` | the addresses of the console |
//! | `security` | headers of every response, and which requests are refused |
//! | `html` | times, numbers, bytes and small charts as HTML |
//! | `form` | forms: their fields, what protects them, and how one acts once |
//! | `page` | what pages share: frame, problems, addresses |
//! | `parameters` | parameters of addresses |
//! | `pages` | one module per page |
//! | `assets` | style sheet and scripts |

mod assets;
pub mod backend;
mod command;
mod cookies;
mod form;
mod html;
mod page;
mod pages;
mod parameters;
mod security;
mod site;

use std::io;

use axum::{Extension, Router};
use redeliver_runtime::http_server::{self, HttpLimits};
use redeliver_runtime::listen::Listener;
use tokio_util::sync::CancellationToken;

pub use backend::Backend;
use site::Sites;

/// All pages. `hosts` are the names under which browsers reach them, besides addresses and `localhost`.
pub fn routes(backend: Backend, hosts: &[String]) -> Router {
    pages::routes()
        .layer(Extension(backend))
        .merge(assets::routes())
        .fallback(pages::not_found)
        .layer(axum::middleware::from_fn_with_state(
            Sites::new(hosts, false),
            security::protect,
        ))
}

/// Serves all pages on this machine until `stop` is cancelled.
///
/// # Errors
/// None at present: errors of a connection end this connection only.
pub async fn serve(listener: Listener, backend: Backend, stop: CancellationToken) -> io::Result<()> {
    http_server::serve(
        listener,
        routes(backend, &[]),
        HttpLimits::default(),
        stop.cancelled_owned(),
    )
    .await
}
