//! The handler that calls an HTTP endpoint for each record.
//!
//! The request body is the record's value, byte for byte. The response body becomes the new value, with the content type
//! of the response, or is discarded. The
//! pipeline's classification table decides what a status means. A call never follows a redirect, exceeds its timeout,
//! keeps more of a response than `max_response_bytes`, or puts a payload or a secret into a message.
//!
//! | code | class | scope | cause |
//! |---|---|---|---|
//! | `http.<status>` | by the table | by the table | the status of the response |
//! | `http.timeout` | transient | endpoint | no complete response in time; no quick retry |
//! | `http.connect` | transient | endpoint | no connection: refused, unknown host, or a failed TLS handshake |
//! | `http.closed` | transient | endpoint | the connection was closed before the response was complete |
//! | `http.invalid-response` | transient | endpoint | the response is not HTTP; the network path is at fault, not the record |
//! | `http.response-too-large` | permanent | record | the response exceeds `max_response_bytes` |
//! | `http.invalid-request` | permanent | not called | the request cannot be built |
//! | `output.unknown` | permanent | not called | no topic for the result |
//!
//! The client uses HTTP/1.1 and a connection pool. Proxies come from the environment (`HTTPS_PROXY`, `NO_PROXY`),
//! except for an endpoint on this machine.

mod call_error;
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
use redeliver_core::failure::FailureScope;
use redeliver_core::outcome::Produced;
use redeliver_core::{Clock, ErrorClass, Failure, Headers, HumanDuration, Outcome};
use redeliver_worker::Attempt;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Method, Request, Response, StatusCode, Url, redirect};
use tokio::time::{Instant, timeout, timeout_at};
use tower::Service;

use self::call_error::CallError;
pub use self::settings::{HttpSettings, HttpSetupError, ResponseUse, TlsFiles};
use crate::output_choice::OutputChoice;
use crate::quick_retry::QuickRetry;

/// Calls an endpoint for each record. Clones share a connection pool.
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
    clock: Arc<dyn Clock>,
}

struct CallResult {
    /// Empty if it is discarded.
    body: Bytes,
    content_type: Option<HeaderValue>,
}

struct CallFailure {
    failure: Failure,
    /// Whether a quick retry is useful: the call failed fast, and the cause may be gone in a moment.
    may_retry_quickly: bool,
}

/// Limits for reading the body of an error response; see [`drain`].
const DRAIN_BYTES: usize = 64 * 1024;
const DRAIN_TIMEOUT: Duration = Duration::from_millis(100);

impl HttpHandler {
    /// Reads the files that the settings name and creates the client. Does not connect. Dates of `Retry-After` are compared
    /// with `clock`.
    ///
    /// # Errors
    /// When a setting is invalid or a file cannot be read. The error names the field.
    pub fn new(settings: HttpSettings, clock: Arc<dyn Clock>) -> Result<Self, HttpSetupError> {
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
                format!("cannot create the HTTP client: {}", call_error::cause(&error)),
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
            clock,
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
        // Before the call, so that a record without an output topic has no effects at the endpoint.
        let not_called = |failure: Failure| failure.with_scope(FailureScope::NotCalled);
        let topic = self.output.topic_for(attempt.record.value.as_deref());
        let topic = topic.map_err(not_called)?;
        let headers = request::headers_for(attempt, &self.headers).map_err(not_called)?;
        let call = || self.call(&headers, attempt.record.value.as_ref());
        let result = match self
            .quick_retry
            .run(call, |failed: &CallFailure| failed.may_retry_quickly)
            .await
        {
            Ok(result) => result,
            Err(failed) => return Err(failed.failure),
        };
        Ok(match self.response {
            ResponseUse::Replace => Produced {
                topic,
                value: Some(Some(result.body)),
                headers: content_type_of(result.content_type.as_ref()),
                ..Produced::unchanged()
            },
            ResponseUse::Keep => Produced {
                topic,
                ..Produced::unchanged()
            },
        })
    }

    /// Sends one request and reads its response.
    async fn call(&self, headers: &HeaderMap, value: Option<&Bytes>) -> Result<CallResult, CallFailure> {
        let mut request = Request::new(self.method.clone(), self.url.clone());
        *request.headers_mut() = headers.clone();
        let body = value.cloned().unwrap_or_default();
        if body.is_empty() && matches!(self.method, Method::POST | Method::PUT | Method::PATCH) {
            // hyper omits `content-length: 0`, and some servers reject a POST without it (RFC 9110, section 8.6).
            request
                .headers_mut()
                .insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        }
        *request.body_mut() = Some(body.into());
        let deadline = Instant::now() + self.timeout;
        let response = match timeout_at(deadline, self.client.execute(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(self.call_error(&error)),
            Err(_) => return Err(self.timed_out()),
        };
        let status = response.status();
        // The earliest time that may be the current one gives the longest delay, so a step of the clock makes no retry early.
        let retry_after =
            retry_after::read(response.headers(), self.clock.possible().0, self.max_retry_after);
        match self
            .classification
            .of_status(status.as_u16(), retry_after.is_some())
        {
            Ok(()) => {
                let content_type = response.headers().get(CONTENT_TYPE).cloned();
                let body = timeout_at(deadline, self.read_body(response)).await;
                let body = body.unwrap_or_else(|_| Err(self.timed_out()))?;
                Ok(CallResult { body, content_type })
            }
            Err((class, scope)) => {
                drain(response).await;
                Err(self.error_status(status, class, scope, retry_after))
            }
        }
    }

    /// Reads the body of a successful response. If it is discarded, a body that is too large is no failure, and the
    /// rest of it is not read.
    async fn read_body(&self, mut response: Response) -> Result<Bytes, CallFailure> {
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
                Err(error) => return Err(self.call_error(&error)),
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

    fn error_status(
        &self,
        status: StatusCode,
        class: ErrorClass,
        scope: FailureScope,
        retry_after: Option<Duration>,
    ) -> CallFailure {
        let code = format!("http.{}", status.as_u16());
        let reason = status
            .canonical_reason()
            .map(|reason| format!(" {reason}"))
            .unwrap_or_default();
        let note = if status.is_redirection() {
            "; redirects are not followed"
        } else {
            ""
        };
        let message = format!("{self} answered {}{reason}{note}", status.as_u16());
        let failure = match (class, retry_after) {
            (ErrorClass::Throttled, Some(after)) if after > Duration::ZERO => {
                Failure::throttled(after, code, message)
            }
            // `Retry-After: 0` or a past date requests no delay. The pipeline's first delay applies instead: throttling
            // does not count as a failed attempt, so retrying at once could loop forever.
            _ => Failure::new(class, code, message),
        };
        CallFailure {
            // More calls would not help an endpoint that is overloaded or refuses the credentials.
            may_retry_quickly: failure.class == ErrorClass::Transient
                && !matches!(status.as_u16(), 401 | 403 | 407 | 503),
            failure: failure.with_scope(scope),
        }
    }

    fn call_error(&self, error: &reqwest::Error) -> CallFailure {
        let cause = call_error::cause(error);
        let (code, message, may_retry_quickly) = match CallError::of(error) {
            CallError::Connect => ("http.connect", format!("{self}: cannot connect: {cause}"), true),
            CallError::ConnectTimeout => {
                let within = HumanDuration::from(self.connect_timeout);
                (
                    "http.connect",
                    format!("{self}: cannot connect within {within}"),
                    false,
                )
            }
            CallError::Timeout => (
                "http.timeout",
                format!("{self}: the connection timed out: {cause}"),
                false,
            ),
            CallError::Closed => {
                let message =
                    format!("{self}: the connection was closed before the response was complete: {cause}");
                ("http.closed", message, true)
            }
            CallError::InvalidResponse => (
                "http.invalid-response",
                format!("{self}: the response is not HTTP: {cause}"),
                true,
            ),
            CallError::InvalidRequest => {
                let message = format!("{self}: cannot build the request: {cause}");
                let failure = Failure::permanent("http.invalid-request", message);
                return CallFailure {
                    failure: failure.with_scope(FailureScope::NotCalled),
                    may_retry_quickly: false,
                };
            }
        };
        CallFailure {
            failure: Failure::transient(code, message).with_scope(FailureScope::Endpoint),
            may_retry_quickly,
        }
    }

    fn timed_out(&self) -> CallFailure {
        let message = format!(
            "{self}: no complete response within {}",
            HumanDuration::from(self.timeout)
        );
        CallFailure {
            failure: Failure::transient("http.timeout", message).with_scope(FailureScope::Endpoint),
            // The call has already taken long. In a tier, the record does not occupy a slot of `concurrency`.
            may_retry_quickly: false,
        }
    }

    fn too_large(&self) -> CallFailure {
        let message = format!(
            "{self}: the response exceeds max_response_bytes ({})",
            self.max_response_bytes
        );
        CallFailure {
            failure: Failure::permanent("http.response-too-large", message),
            may_retry_quickly: false,
        }
    }
}

/// The headers of a result whose value is a response with this content type.
fn content_type_of(content_type: Option<&HeaderValue>) -> Headers {
    let mut headers = Headers::new();
    if let Some(content_type) = content_type {
        headers.push(CONTENT_TYPE.as_str(), Some(content_type.as_bytes()));
    }
    headers
}

/// Reads a short body to its end and discards it. A connection with an unread body cannot be reused, and new
/// connections would add to the load of an endpoint that already fails.
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
    // A failure does not matter: the status alone decides what happens to the record.
    drop(timeout(DRAIN_TIMEOUT, read).await);
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
