//! One HTTP request. It is not repeated here, and redirects are not followed: every request needs its own turn.

use std::time::Duration;

use anyhow::Context as _;
use redeliver_core::classification::Classification;
use redeliver_core::{ErrorClass, Failure};
use reqwest::header::{CONTENT_TYPE, HeaderName, LOCATION, RETRY_AFTER};
use reqwest::{Client, Url, redirect};

use crate::robots::{PRODUCT, Robots};

/// Links after this many bytes are not followed.
const MAX_PAGE: usize = 1 << 20;
/// RFC 9309, section 2.5: at least 500 KiB must be parsed.
const MAX_ROBOTS: usize = 500 << 10;
const MAX_RETRY_AFTER: u64 = 3_600;
/// How long nothing is requested from a site whose `/robots.txt` could not be fetched.
const ROBOTS_RETRY: Duration = Duration::from_secs(5);

/// A response with a status of 2xx or 3xx.
pub(crate) struct Page {
    pub(crate) status: u16,
    /// Empty if the body is not HTML.
    pub(crate) html: String,
    pub(crate) location: Option<Url>,
}

pub(crate) fn client() -> anyhow::Result<Client> {
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
        .timeout(Duration::from_secs(5))
        .build()
        .context("setting up the HTTP client")
}

pub(crate) async fn page(client: &Client, url: &Url) -> Result<Page, Failure> {
    let response = get(client, url).await?;
    let status = response.status();
    let location = header(&response, LOCATION).filter(|_| status.is_redirection());
    let location = location.and_then(|location| url.join(location).ok());
    let media_type = header(&response, CONTENT_TYPE).and_then(|value| value.split(';').next());
    let media_type = media_type.unwrap_or_default().trim().to_ascii_lowercase();
    let is_html = ["text/html", "application/xhtml+xml"].contains(&media_type.as_str());
    let mut html = Vec::new();
    if status.is_success() && is_html {
        html = body(url, response, MAX_PAGE).await?;
    }
    Ok(Page {
        status: status.as_u16(),
        html: String::from_utf8_lossy(&html).into_owned(),
        location,
    })
}

/// The rules of a site (RFC 9309, section 2.3.1). As long as they are unknown, nothing may be requested. That is no
/// failure of the page that waits for them, so every failure is throttled and uses up no attempt.
pub(crate) async fn robots(client: &Client, url: &Url) -> Result<Robots, Failure> {
    let failure = match robots_text(client, url).await {
        Ok(text) => return Ok(Robots::parse(&text)),
        Err(failure) => failure,
    };
    // A site without the file allows everything.
    if failure.class == ErrorClass::Permanent && failure.code.starts_with("http.4") {
        return Ok(Robots::default());
    }
    let (wait, code) = (failure.retry_after, failure.code.replacen("http", "robots", 1));
    let wait = wait.unwrap_or(ROBOTS_RETRY);
    Err(Failure::throttled(wait, code, failure.message))
}

async fn robots_text(client: &Client, url: &Url) -> Result<String, Failure> {
    let response = get(client, url).await?;
    if response.status().is_redirection() {
        // Redirects are not supported. As the rules are unknown, nothing is allowed.
        return Ok("User-agent: *\nDisallow: /".to_owned());
    }
    // The type is irrelevant: some servers send none, or a wrong one.
    let text = body(url, response, MAX_ROBOTS).await?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

async fn get(client: &Client, url: &Url) -> Result<reqwest::Response, Failure> {
    let response = client.get(url.clone()).send().await;
    let response = response.map_err(|error| no_response(url, &error))?;
    let status = response.status();
    // Zero requests no delay. As throttling uses up no attempt, the page could be requested forever.
    let retry_after = header(&response, RETRY_AFTER)
        .and_then(|text| text.trim().parse().ok())
        .filter(|seconds| *seconds > 0)
        .map(|seconds: u64| Duration::from_secs(seconds.min(MAX_RETRY_AFTER)));
    let verdict = Classification::default().of_status(status.as_u16(), retry_after.is_some());
    let Some((class, _)) = verdict.err().filter(|_| !status.is_redirection()) else {
        return Ok(response);
    };
    let class = match class {
        ErrorClass::Throttled if retry_after.is_none() => ErrorClass::Transient,
        // A site that refuses one page may serve another.
        ErrorClass::Transient if matches!(status.as_u16(), 401 | 403 | 407) => ErrorClass::Permanent,
        class => class,
    };
    let code = format!("http.{}", status.as_u16());
    Err(Failure {
        retry_after: retry_after.filter(|_| class == ErrorClass::Throttled),
        ..Failure::new(class, code, format!("{url} answered {status}"))
    })
}

/// The first `limit` bytes of the body.
async fn body(url: &Url, mut response: reqwest::Response, limit: usize) -> Result<Vec<u8>, Failure> {
    let mut body = Vec::new();
    while body.len() < limit
        && let Some(chunk) = response.chunk().await.map_err(|error| no_response(url, &error))?
    {
        body.extend_from_slice(&chunk);
    }
    body.truncate(limit);
    Ok(body)
}

fn header(response: &reqwest::Response, name: HeaderName) -> Option<&str> {
    response.headers().get(name)?.to_str().ok()
}

fn no_response(url: &Url, error: &reqwest::Error) -> Failure {
    let (code, problem) = match error {
        error if error.is_connect() => ("http.connect", "cannot be connected to"),
        error if error.is_timeout() => ("http.timeout", "did not answer in time"),
        _ => ("http.closed", "closed the connection"),
    };
    Failure::transient(code, format!("{url} {problem}"))
}
