//! The handler that calls an HTTP endpoint for each record, in any language.
//!
//! The value is sent byte for byte; the answer becomes the new value or is dropped; a status is
//! classified by the pipeline's table. What a call must never do: follow a redirect, take longer than its
//! timeout, hold more than the allowed bytes of an answer, or show a payload or a secret in a message.
//!
//! | code | class | meaning |
//! |---|---|---|
//! | `http.<status>` | by the table | the endpoint answered |
//! | `http.timeout` | transient | no complete answer in time; not repeated quickly |
//! | `http.connect` | transient | no connection: refused, no such host, no agreement on TLS |
//! | `http.closed` | transient | the connection ended before the answer did |
//! | `http.invalid-response` | transient | what came is not HTTP: the way to the endpoint is broken, not the record |
//! | `http.response-too-large` | permanent | the answer is longer than allowed |
//! | `http.invalid-request` | permanent | the request cannot be written down |
//! | `output.unknown` | permanent | no topic for the result; the endpoint is not called |
//!
//! HTTP/1.1 over pooled connections. Proxies come from the environment (`HTTPS_PROXY`, `NO_PROXY`), but
//! never for an endpoint on this machine.

mod broken;
mod request;
mod retry_after;
mod settings;
#[cfg(test)]
mod tests;
mod tls;

use std::convert::Infallible;
use std::fmt;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::classification::Classification;
use redeliver_core::outcome::Produced;
use redeliver_core::{Clock as _, ErrorClass, Failure, Outcome, Span, SystemClock};
use redeliver_worker::Attempt;
use reqwest::header::{CONTENT_LENGTH, HeaderMap, HeaderValue};
use reqwest::{Client, Method, Request, Response, StatusCode, Url, redirect};
use tokio::time::{Instant, timeout, timeout_at};
use tower::Service;

use self::broken::Broken;
pub use self::settings::{HttpSettings, HttpSetupError, ResponseUse, TlsFiles};
use crate::output_choice::OutputChoice;
use crate::quick_retry::QuickRetry;

/// Calls an endpoint for each record. Clones share one pool of connections.
#[derive(Clone)]
pub struct HttpHandler {
    endpoint: Arc<Endpoint>,
}

struct Endpoint {
    client: Client,
    method: Method,
    url: Url,
    shown_url: String,
    headers: HeaderMap,
    timeout: Duration,
    connect_timeout: Duration,
    quick_retry: QuickRetry,
    response: ResponseUse,
    max_response_bytes: usize,
    max_retry_after: Duration,
    classification: Classification,
    output: OutputChoice,
}

/// A call without success.
struct CallFailure {
    failure: Failure,
    /// Whether it may be over in a moment and took none.
    is_quick: bool,
}

/// How much of a refusal's body is read, and for how long, so that its connection can be used again.
const DRAIN_BYTES: usize = 64 * 1024;
const DRAIN_TIME: Duration = Duration::from_millis(100);

impl HttpHandler {
    /// Reads the files that the settings name and sets the client up. Nothing is called yet.
    ///
    /// # Errors
    /// When a setting cannot be followed or a file not be read; the error names the field.
    pub fn new(settings: HttpSettings) -> Result<Self, HttpSetupError> {
        let url = settings.parsed_url()?;
        let method = settings.parsed_method()?;
        let headers = settings.read_headers()?;
        let tls = tls::client_config(&settings.tls, url.scheme() == "https")?;
        let mut client = Client::builder()
            .tls_backend_preconfigured(tls)
            .http1_only()
            .redirect(redirect::Policy::none())
            .connect_timeout(settings.connect_timeout);
        if is_this_machine(&url) {
            client = client.no_proxy();
        }
        let client = client.build().map_err(|error| {
            HttpSetupError::new(
                "url",
                format!("cannot set up a client: {}", broken::cause(&error)),
            )
        })?;
        let endpoint = Endpoint {
            client,
            method,
            shown_url: settings::shown_url(&url),
            url,
            headers,
            timeout: settings.timeout,
            connect_timeout: settings.connect_timeout,
            quick_retry: QuickRetry {
                retries: settings.quick_retries,
                delay: settings.quick_retry_delay,
                budget: settings.timeout,
            },
            response: settings.response,
            max_response_bytes: settings.max_response_bytes,
            max_retry_after: settings.max_retry_after,
            classification: settings.classification,
            output: settings.output,
        };
        Ok(Self {
            endpoint: Arc::new(endpoint),
        })
    }
}

impl Service<Attempt> for HttpHandler {
    type Response = Outcome;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Outcome, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, attempt: Attempt) -> Self::Future {
        let endpoint = self.endpoint.clone();
        Box::pin(async move {
            Ok(match endpoint.handle(&attempt).await {
                Ok(produced) => Outcome::Success(vec![produced]),
                Err(failure) => Outcome::Failed(failure),
            })
        })
    }
}

impl Endpoint {
    async fn handle(&self, attempt: &Attempt) -> Result<Produced, Failure> {
        // Before the call: a result that has no place to go must not cause effects at the endpoint.
        let topic = self.output.topic_for(attempt.record.value.as_deref())?;
        let headers = request::headers_for(attempt, &self.headers)?;
        let call = || self.call(&headers, attempt.record.value.as_ref());
        let body = match self
            .quick_retry
            .run(call, |failed: &CallFailure| failed.is_quick)
            .await
        {
            Ok(body) => body,
            Err(failed) => return Err(failed.failure),
        };
        Ok(Produced {
            topic,
            value: match self.response {
                ResponseUse::Replace => Some(Some(body)),
                ResponseUse::Keep => None,
            },
            ..Produced::unchanged()
        })
    }

    /// One request and its whole answer.
    async fn call(&self, headers: &HeaderMap, value: Option<&Bytes>) -> Result<Bytes, CallFailure> {
        let mut request = Request::new(self.method.clone(), self.url.clone());
        *request.headers_mut() = headers.clone();
        let body = value.cloned().unwrap_or_default();
        if body.is_empty() && matches!(self.method, Method::POST | Method::PUT | Method::PATCH) {
            // hyper leaves it out, and some servers refuse a POST without (RFC 9110, section 8.6).
            request
                .headers_mut()
                .insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        }
        *request.body_mut() = Some(body.into());
        let deadline = Instant::now() + self.timeout;
        let response = match timeout_at(deadline, self.client.execute(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(self.broken(&error)),
            Err(_) => return Err(self.too_slow()),
        };
        let status = response.status();
        let retry_after = retry_after::read(response.headers(), SystemClock.now(), self.max_retry_after);
        match self
            .classification
            .of_status(status.as_u16(), retry_after.is_some())
        {
            Ok(()) => timeout_at(deadline, self.body_of(response))
                .await
                .unwrap_or_else(|_| Err(self.too_slow())),
            Err(class) => {
                drain(response).await;
                Err(self.refused(status, class, retry_after))
            }
        }
    }

    /// The whole body. Where it is dropped anyway, its length does not matter: what is longer than
    /// allowed is left unread.
    async fn body_of(&self, mut response: Response) -> Result<Bytes, CallFailure> {
        let (limit, is_kept) = (self.max_response_bytes, self.response == ResponseUse::Replace);
        let announced = response
            .content_length()
            .map_or(0, |length| usize::try_from(length).unwrap_or(usize::MAX));
        if is_kept && announced > limit {
            return Err(self.too_large());
        }
        let (mut body, mut length) = (Vec::new(), 0_usize);
        loop {
            let chunk = match response.chunk().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => return Ok(body.into()),
                Err(error) => return Err(self.broken(&error)),
            };
            length = length.saturating_add(chunk.len());
            match (is_kept, length > limit) {
                (true, true) => return Err(self.too_large()),
                (true, false) if chunk.len() == announced => return Ok(chunk),
                (true, false) => body.extend_from_slice(&chunk),
                (false, true) => return Ok(Bytes::new()),
                (false, false) => {}
            }
        }
    }

    fn refused(&self, status: StatusCode, class: ErrorClass, retry_after: Option<Duration>) -> CallFailure {
        let code = format!("http.{}", status.as_u16());
        let reason = status
            .canonical_reason()
            .map(|reason| format!(" {reason}"))
            .unwrap_or_default();
        let note = if status.is_redirection() {
            ", and redirects are not followed"
        } else {
            ""
        };
        let message = format!("{self} answered {}{reason}{note}", status.as_u16());
        let failure = match (class, retry_after) {
            (ErrorClass::Throttled, Some(after)) if after > Duration::ZERO => {
                Failure::throttled(after, code, message)
            }
            // A date that has passed and a wait of 0 say that we were too fast but not how much. Without a
            // wish the pipeline's own first wait applies; at once would be a loop that burns no attempts.
            _ => Failure::new(class, code, message),
        };
        CallFailure {
            is_quick: failure.class == ErrorClass::Transient,
            failure,
        }
    }

    fn broken(&self, error: &reqwest::Error) -> CallFailure {
        let cause = broken::cause(error);
        let (code, message, is_quick) = match Broken::of(error) {
            Broken::Connect => ("http.connect", format!("{self}: cannot connect: {cause}"), true),
            Broken::SlowConnect => {
                let within = Span::from(self.connect_timeout);
                (
                    "http.connect",
                    format!("{self}: no connection came up within {within}"),
                    false,
                )
            }
            Broken::Timeout => (
                "http.timeout",
                format!("{self}: the connection timed out: {cause}"),
                false,
            ),
            Broken::Closed => {
                let message = format!("{self}: the connection ended before the answer was complete: {cause}");
                ("http.closed", message, true)
            }
            Broken::InvalidResponse => (
                "http.invalid-response",
                format!("{self}: the answer is not HTTP: {cause}"),
                true,
            ),
            Broken::InvalidRequest => {
                let message = format!("{self}: cannot make the request: {cause}");
                return CallFailure {
                    failure: Failure::permanent("http.invalid-request", message),
                    is_quick: false,
                };
            }
        };
        CallFailure {
            failure: Failure::transient(code, message),
            is_quick,
        }
    }

    fn too_slow(&self) -> CallFailure {
        let message = format!("{self}: no complete answer within {}", Span::from(self.timeout));
        CallFailure {
            failure: Failure::transient("http.timeout", message),
            // It already took long; the record goes to a tier and makes room.
            is_quick: false,
        }
    }

    fn too_large(&self) -> CallFailure {
        let message = format!(
            "{self}: the answer is longer than the allowed {} bytes",
            self.max_response_bytes
        );
        CallFailure {
            failure: Failure::permanent("http.response-too-large", message),
            is_quick: false,
        }
    }
}

/// Reads a short body to its end without looking at it. A connection with an unread answer cannot be used
/// again, and to open new ones is the last thing that an endpoint in trouble needs.
async fn drain(mut response: Response) {
    let read = async {
        let mut length = 0;
        while let Ok(Some(chunk)) = response.chunk().await {
            length += chunk.len();
            if length > DRAIN_BYTES {
                break;
            }
        }
    };
    // Whether it worked does not matter: the status has already said what becomes of the record.
    drop(timeout(DRAIN_TIME, read).await);
}

fn is_this_machine(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.shown_url)
    }
}

impl fmt::Debug for HttpHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HttpHandler({})", self.endpoint)
    }
}
