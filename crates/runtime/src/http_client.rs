//! Clients for HTTP requests of the services themselves, such as for the keys of an issuer.

use std::path::Path;
use std::time::Duration;

use redeliver_core::error_chain::error_chain;
use reqwest::{Client, Response, redirect};
use url::Url;

use crate::config::is_loopback;
use crate::tls::{client_builder, trusted_roots};

/// A client for requests to the host of this URL, with this maximum time of a request.
///
/// # Errors
/// What is wrong with the CA certificates or the client.
pub fn client(url: &Url, ca_file: Option<&Path>, timeout: Duration) -> Result<Client, String> {
    let mut tls = client_builder()
        .map_err(|error| format!("cannot set up TLS: {error}"))?
        .with_root_certificates(trusted_roots(ca_file)?)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let mut client = Client::builder()
        .tls_backend_preconfigured(tls)
        .http1_only()
        // A redirect could lead to another host or to plain text.
        .redirect(redirect::Policy::none())
        .timeout(timeout);
    if is_loopback(url) {
        client = client.no_proxy();
    }
    client
        .build()
        .map_err(|error| format!("cannot create the HTTP client: {error}"))
}

/// The body of a response, up to a little more than this number of bytes.
///
/// # Errors
/// Why it could not be received.
pub async fn body(mut response: Response, limit: usize) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(problem)? {
        body.extend_from_slice(&chunk);
        if body.len() > limit {
            break;
        }
    }
    Ok(body)
}

/// Why a request failed, without its URL.
#[must_use]
pub fn problem(error: reqwest::Error) -> String {
    error_chain(&error.without_url())
}
