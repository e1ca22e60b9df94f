//! One request: what a host answers, and which failure it is when it does not answer well.
//!
//! | code | class | meaning |
//! |---|---|---|
//! | `http.<status>` | transient, throttled or permanent, as in the enricher | the host answered |
//! | `http.timeout` | transient | no complete answer in time |
//! | `http.connect` | transient | no connection |
//! | `http.broken` | transient | the connection ended before the answer did |
//! | `http.too-large` | permanent | the page is longer than allowed |

use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context as _;
use redeliver_core::classification::Classification;
use redeliver_core::{Clock as _, Failure, Span, SystemClock, Timestamp};
use reqwest::header::{CONTENT_TYPE, HeaderMap, LOCATION, RETRY_AFTER};
use reqwest::{Client, Response, Url, redirect};

use crate::robots::PRODUCT;

/// The limits of one request.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// From sending to the end of the answer.
    pub timeout: Duration,
    /// The longest page, in bytes; at least 500 KiB of a `/robots.txt` must be read (RFC 9309, section 2.5).
    pub max_bytes: usize,
    /// A longer `Retry-After` is cut to this.
    pub max_retry_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(5),
            max_bytes: 1 << 20,
            max_retry_after: Duration::from_secs(3_600),
        }
    }
}

/// Makes requests. They are not repeated here and no redirect is followed: each is one turn at a host.
#[derive(Clone, Debug)]
pub struct Fetcher {
    client: Client,
    limits: Limits,
    classification: Classification,
}

/// A good answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// 2xx or 3xx.
    pub status: u16,
    /// The body as text, when it is HTML or plain text. What is not UTF-8 in it is replaced.
    pub text: Option<String>,
    /// Where a redirect leads to.
    pub location: Option<Url>,
}

impl Fetcher {
    /// A client that trusts the certificates that the machine trusts.
    ///
    /// # Errors
    /// When TLS cannot be set up.
    pub fn new(limits: Limits) -> anyhow::Result<Self> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let provider = rustls::crypto::ring::default_provider();
        let tls = rustls::ClientConfig::builder_with_provider(provider.into())
            .with_safe_default_protocol_versions()
            .context("setting up TLS")?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let client = Client::builder()
            .tls_backend_preconfigured(tls)
            .http1_only()
            .user_agent(concat!("redeliver-crawl/", env!("CARGO_PKG_VERSION")))
            .redirect(redirect::Policy::none())
            .no_proxy()
            .timeout(limits.timeout)
            .build()
            .context("setting up the HTTP client")?;
        Ok(Self {
            client,
            limits,
            classification: Classification::default(),
        })
    }

    /// Asks for a page once.
    ///
    /// # Errors
    /// With what it means for the page, see the module.
    pub async fn get(&self, page: &Url) -> Result<Answer, Failure> {
        let response = self.client.get(page.clone()).send().await;
        let response = response.map_err(|error| self.broken(page, &error))?;
        let status = response.status();
        if status.is_redirection() {
            let location = response.headers().get(LOCATION);
            let location = location.and_then(|location| page.join(location.to_str().ok()?).ok());
            return Ok(Answer {
                status: status.as_u16(),
                text: None,
                location,
            });
        }
        let wait = retry_after(response.headers(), SystemClock.now());
        if let Err(class) = self.classification.of_status(status.as_u16(), wait.is_some()) {
            let code = format!("http.{}", status.as_u16());
            let message = format!("{page} answered {status}");
            return Err(
                match wait.filter(|_| class == redeliver_core::ErrorClass::Throttled) {
                    Some(wait) if !wait.is_zero() => {
                        Failure::throttled(wait.min(self.limits.max_retry_after), code, message)
                    }
                    _ => Failure::new(class, code, message),
                },
            );
        }
        Ok(Answer {
            status: status.as_u16(),
            text: self.text_of(page, response).await?,
            location: None,
        })
    }

    /// The body, if it is text that may hold links or rules.
    async fn text_of(&self, page: &Url, mut response: Response) -> Result<Option<String>, Failure> {
        let content_type = response.headers().get(CONTENT_TYPE);
        let content_type = content_type
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        let is_text = ["text/html", "application/xhtml+xml", "text/plain"]
            .iter()
            .any(|known| essence.eq_ignore_ascii_case(known));
        if !is_text {
            return Ok(None);
        }
        let mut body = Vec::new();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| self.broken(page, &error))?
        {
            if body.len() + chunk.len() > self.limits.max_bytes {
                let message = format!("{page} is longer than {} bytes", self.limits.max_bytes);
                return Err(Failure::permanent("http.too-large", message));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(Some(String::from_utf8_lossy(&body).into_owned()))
    }

    fn broken(&self, page: &Url, error: &reqwest::Error) -> Failure {
        if error.is_timeout() {
            let timeout = Span::from(self.limits.timeout);
            Failure::transient("http.timeout", format!("{page} did not answer within {timeout}"))
        } else if error.is_connect() {
            Failure::transient("http.connect", format!("no connection to {page}"))
        } else {
            Failure::transient("http.broken", format!("the connection to {page} broke"))
        }
    }
}

/// How long the host asks to wait: seconds or a date (RFC 9110, section 10.2.3).
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(text)
        .ok()?
        .duration_since(UNIX_EPOCH)
        .ok()?;
    Some(date.saturating_sub(now.since(Timestamp::from_millis(0))))
}

/// The `User-agent` that sites see begins with the name they write into `/robots.txt`.
const _: () = assert!(PRODUCT.len() < "redeliver-crawl/".len());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_to_wait_is_seconds_or_a_date() {
        let wait = |value: &str| {
            let headers = [(RETRY_AFTER, value.parse().unwrap())].into_iter().collect();
            retry_after(&headers, Timestamp::from_millis(784_111_777_000)).map(|wait| wait.as_secs())
        };
        assert_eq!(wait("120"), Some(120));
        assert_eq!(wait("Sun, 06 Nov 1994 08:50:37 GMT"), Some(60));
        assert_eq!(wait("Sun, 06 Nov 1994 08:48:37 GMT"), Some(0));
        assert_eq!(wait("soon"), None);
    }
}
