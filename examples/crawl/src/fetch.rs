//! One HTTP request. It is not repeated here, and redirects are not followed: every request needs its own turn.

use std::time::Duration;

use anyhow::Context as _;
use redeliver_core::classification::Classification;
use redeliver_core::{ErrorClass, Failure};
use reqwest::header::{CONTENT_TYPE, HeaderName, LOCATION, RETRY_AFTER};
use reqwest::{Client, Response, Url, redirect};

use crate::robots::PRODUCT;

/// RFC 9309, section 2.5, requires at least 500 KiB for a `/robots.txt`.
const MAX_BODY: usize = 1 << 20;
const MAX_RETRY_AFTER: u64 = 3_600;

/// A response with a status of 2xx or 3xx.
pub(crate) struct Fetched {
    pub(crate) status: u16,
    /// Empty if the body is not text.
    pub(crate) text: String,
    pub(crate) location: Option<Url>,
}

pub(crate) fn client(timeout: Duration) -> anyhow::Result<Client> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let provider = rustls::crypto::ring::default_provider();
    let tls = rustls::ClientConfig::builder_with_provider(provider.into())
        .with_safe_default_protocol_versions()
        .context("setting up TLS")?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Client::builder()
        .tls_backend_preconfigured(tls)
        .http1_only()
        .user_agent(format!("{PRODUCT}/{}", env!("CARGO_PKG_VERSION")))
        .redirect(redirect::Policy::none())
        .no_proxy()
        .timeout(timeout)
        .build()
        .context("setting up the HTTP client")
}

pub(crate) async fn get(client: &Client, url: &Url) -> Result<Fetched, Failure> {
    let response = client.get(url.clone()).send().await;
    let response = response.map_err(|error| broken(url, &error))?;
    let status = response.status();
    if status.is_redirection() {
        return Ok(Fetched {
            status: status.as_u16(),
            text: String::new(),
            location: header(&response, LOCATION).and_then(|location| url.join(location).ok()),
        });
    }
    let retry_after = header(&response, RETRY_AFTER)
        .and_then(|text| text.trim().parse().ok())
        .map(|seconds: u64| Duration::from_secs(seconds.min(MAX_RETRY_AFTER)));
    let verdict = Classification::default().of_status(status.as_u16(), retry_after.is_some());
    if let Err(class) = verdict {
        let code = format!("http.{}", status.as_u16());
        return Err(Failure {
            retry_after: retry_after.filter(|_| class == ErrorClass::Throttled),
            ..Failure::new(class, code, format!("{url} answered {status}"))
        });
    }
    Ok(Fetched {
        status: status.as_u16(),
        text: text(url, response).await?,
        location: None,
    })
}

/// The body, if its type is one that can contain links or rules.
async fn text(url: &Url, mut response: Response) -> Result<String, Failure> {
    if !header(&response, CONTENT_TYPE).is_some_and(|content_type| content_type.starts_with("text/")) {
        return Ok(String::new());
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| broken(url, &error))? {
        if body.len() + chunk.len() > MAX_BODY {
            let message = format!("{url} is longer than {MAX_BODY} bytes");
            return Err(Failure::permanent("http.too-large", message));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(String::from_utf8_lossy(&body).into_owned())
}

fn header(response: &Response, name: HeaderName) -> Option<&str> {
    response.headers().get(name)?.to_str().ok()
}

fn broken(url: &Url, error: &reqwest::Error) -> Failure {
    let (code, problem) = match error {
        error if error.is_timeout() => ("http.timeout", "did not answer in time"),
        error if error.is_connect() => ("http.connect", "refused the connection"),
        _ => ("http.broken", "closed the connection"),
    };
    Failure::transient(code, format!("{url} {problem}"))
}
