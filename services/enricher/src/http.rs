//! The handler that calls an HTTP endpoint for each record.
//!
//! The request body is the record's value, byte for byte. The response body becomes the new value, with the content type
//! of the response, or is discarded. The
//! pipeline's classification table decides what a status means. A call never follows a redirect, exceeds its timeout,
//! keeps more of a response than `max_response_bytes`, or puts a payload or a secret into a message. What a response that fails says is
//! in an [`Excerpt`] of its own.
//!
//! | code | class | scope | cause |
//! |---|---|---|---|
//! | `http.<status>` | by the table | by the table | the status of the response |
//! | `http.timeout` | transient | endpoint | no complete response in time; no quick retry |
//! | `http.connect` | transient | endpoint | no connection: refused, unknown host, or a failed TLS handshake |
//! | `http.closed` | transient | endpoint | the connection was closed before the response was complete |
//! | `http.invalid-response` | transient | endpoint | the response is not HTTP; the network path is at fault, not the record |
//! | `http.content-encoding` | transient | endpoint | the response is compressed in a way that cannot be decoded, or is damaged |
//! | `http.missing-result` | transient | unknown | the response to a call for several records has no result for the record |
//! | `http.response-too-large` | permanent | record | the response exceeds `max_response_bytes` |
//! | `http.invalid-request` | permanent | not called | the request cannot be built |
//! | `http.merge` | permanent | record | the response cannot be inserted into the value |
//!
//! The scope of a failure is that of the whole call if it was for several records.

mod batch;
mod call_error;
mod client;
mod content_encoding;
mod credentials;
mod excerpt;
mod headers;
mod metrics;
mod request;
mod retry_after;
mod settings;
mod telemetry;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use redeliver_core::classification::Classification;
use redeliver_core::failure::{Excerpt, FailureScope};
use redeliver_core::outcome::Produced;
use redeliver_core::{Clock, ErrorClass, Failure, Headers, HumanDuration, Outcome};
use redeliver_runtime::config::BatchValues;
use redeliver_service::Host;
use redeliver_worker::{Attempt, BatchLimits, Batcher};
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Method, Request, Response, StatusCode, Url, Version};
use tokio::time::{Instant, timeout_at};
use tower::Service;

use self::batch::RecordResult;
use self::call_error::CallError;
use self::content_encoding::Undecodable;
use self::credentials::{Credentials, InUse};
use self::excerpt::Beginning;
pub use self::settings::{HttpSettings, HttpSetupError, ResponseUse, TlsFiles};
use self::telemetry::{CallTelemetry, ObservedCalls};
use crate::merge;
use crate::output_choice::{Destination, OutputChoice};
use crate::quick_retry::{QuickRetry, retry_budget};

/// Calls an endpoint for each record. Clones share a connection pool.
#[derive(Clone)]
pub struct HttpHandler {
    endpoint: Arc<Endpoint>,
    batches: Option<Arc<Batches>>,
}

/// Calls for several records.
struct Batches {
    values: BatchValues,
    batcher: Batcher<Attempt, Result<CallResult, Failure>>,
}

struct Endpoint {
    section: String,
    credentials: Arc<Credentials>,
    method: Method,
    url: Url,
    shown_url: String,
    timeout: Duration,
    connect_timeout: Duration,
    quick_retry: QuickRetry,
    response: ResponseUse,
    /// Whether the body of a successful response matters.
    needs_body: bool,
    max_response_bytes: usize,
    error_response: bool,
    max_retry_after: Duration,
    classification: Classification,
    output: OutputChoice,
    clock: Arc<dyn Clock>,
    /// How many calls for several records there have been.
    shared_calls: AtomicU64,
    /// Set by [`HttpHandler::observe`].
    telemetry: OnceLock<CallTelemetry>,
}

#[derive(Clone)]
struct CallResult {
    status: u16,
    /// Empty if it is discarded.
    body: Bytes,
    content_type: Option<HeaderValue>,
}

struct CallFailure {
    failure: Failure,
    repetition: Repetition,
}

/// Whether another call in the same attempt is useful.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repetition {
    Useless,
    /// The call failed fast, and the cause may be gone in a moment.
    Soon,
    /// The credentials were refused.
    WithOtherCredentials,
}

/// The error code of a response that cannot be inserted into the value of its record.
const MERGE: &str = "http.merge";
const INVALID_REQUEST: &str = "http.invalid-request";
/// The error code of a response that cannot be decoded.
const CONTENT_ENCODING: &str = "http.content-encoding";
const INVALID_RESPONSE: &str = "http.invalid-response";
/// The error code of a record without a result in the response to a call for several records.
const MISSING_RESULT: &str = "http.missing-result";

/// The status of a success without a body.
const NO_CONTENT: u16 = 204;

/// Limits for reading the body of an error response; see [`Beginning::drain`].
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
        let credentials = Credentials::load(&settings, &url)?;
        let endpoint = Endpoint {
            section: settings.section,
            credentials: Arc::new(credentials),
            method,
            shown_url: settings::shown_url(&url),
            url,
            timeout: settings.timeout,
            connect_timeout: settings.connect_timeout,
            quick_retry: QuickRetry {
                retries: settings.quick_retries,
                delay: settings.quick_retry_delay,
                within: settings.timeout,
                budget: retry_budget(settings.quick_retry_budget),
            },
            needs_body: settings.batch.is_some()
                || settings.response != ResponseUse::Keep
                || settings.output.needs_body(),
            response: settings.response,
            max_response_bytes: settings.max_response_bytes,
            error_response: settings.error_response,
            max_retry_after: settings.max_retry_after,
            classification: settings.classification,
            output: settings.output,
            clock,
            shared_calls: AtomicU64::new(0),
            telemetry: OnceLock::new(),
        };
        let endpoint = Arc::new(endpoint);
        let batches = settings.batch.map(|batch| {
            let limits = BatchLimits {
                records: batch.records as usize,
                bytes: usize::try_from(batch.bytes).unwrap_or(usize::MAX),
                wait: batch.wait.duration(),
                calls: settings.concurrency,
            };
            let endpoint = endpoint.clone();
            let call = move |attempts| endpoint.clone().call_for_all(attempts, batch.values);
            Arc::new(Batches {
                values: batch.values,
                batcher: Batcher::new(limits, call),
            })
        });
        Ok(Self { endpoint, batches })
    }

    /// Adds the calls to the metrics and traces of the host, as those of this pipeline. Only the first call has an effect.
    pub fn observe(&self, host: &mut Host, pipeline: &str) {
        let Endpoint { method, url, .. } = &*self.endpoint;
        self.endpoint
            .telemetry
            .get_or_init(|| CallTelemetry::of(host, pipeline, method, url));
    }

    /// Adds a task to the host that follows the files of the settings, if there are any: changed headers and certificates
    /// are used within seconds. Without it, the files are read again only after a status 401, 403 or 407.
    pub fn follow_files(&self, host: &mut Host) {
        let Endpoint {
            section, credentials, ..
        } = &*self.endpoint;
        if credentials.has_files() {
            credentials.observe(|field| host.stale_credentials(format!("{section}.{field}")));
            host.tasks
                .spawn_background(format!("{section}-files"), credentials.clone().follow());
        }
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
        let Self { endpoint, batches } = self.clone();
        Box::pin(async move {
            let result = match &batches {
                Some(batches) => batches.call(&attempt).await,
                None => endpoint.call_for(&attempt).await,
            };
            Ok(
                match result.and_then(|result| endpoint.produced(&attempt, &result)) {
                    Ok(produced) => Outcome::Success(produced.into_iter().collect()),
                    Err(failure) => Outcome::Failed(failure),
                },
            )
        })
    }
}

impl Batches {
    /// Calls the endpoint for a record, and for others at the same time.
    async fn call(&self, attempt: &Attempt) -> Result<CallResult, Failure> {
        if let Err(problem) = batch::check(attempt.record.value.as_deref(), self.values) {
            return Err(Failure::permanent(INVALID_REQUEST, problem).with_scope(FailureScope::NotCalled));
        }
        self.batcher.process_attempt(attempt.clone()).await
    }
}

impl Endpoint {
    /// Calls the endpoint for one record.
    async fn call_for(&self, attempt: &Attempt) -> Result<CallResult, Failure> {
        let headers = |configured: &HeaderMap| request::headers_for(attempt, configured);
        let body = attempt.record.value.clone();
        self.calls(headers, body, &self.observed([attempt])).await
    }

    /// Calls the endpoint for several records. Returns their results in their order.
    fn call_for_all(
        self: Arc<Self>,
        mut attempts: Vec<Attempt>,
        values: BatchValues,
    ) -> BoxFuture<'static, Vec<Result<CallResult, Failure>>> {
        let called = async move {
            let failure = match self.call_for_batch(&attempts, values).await {
                Ok(results) => return results,
                Err(failure) => failure,
            };
            let is_of_a_record =
                failure.class == ErrorClass::Permanent && failure.scope == FailureScope::Record;
            if attempts.len() == 1 {
                return vec![Err(failure)];
            }
            if !is_of_a_record {
                // It may be about another record.
                return vec![Err(failure.with_response(None)); attempts.len()];
            }
            // One of the records is the cause. Halves find out which one with the fewest calls.
            let second = attempts.split_off(attempts.len() / 2);
            let mut results = Vec::with_capacity(attempts.len() + second.len());
            for half in [attempts, second] {
                results.extend(self.clone().call_for_all(half, values).await);
            }
            results
        };
        called.boxed()
    }

    async fn call_for_batch(
        &self,
        attempts: &[Attempt],
        values: BatchValues,
    ) -> Result<Vec<Result<CallResult, Failure>>, Failure> {
        let call = self.shared_calls.fetch_add(1, Ordering::Relaxed);
        let of_this_call = |failure: Failure| Failure {
            shared_call: Some(call),
            ..failure
        };
        let body = batch::body(attempts, values).map_err(|error| {
            let message = format!("{self}: cannot build the request: {error}");
            Failure::permanent(INVALID_REQUEST, message).with_scope(FailureScope::NotCalled)
        })?;
        let headers = |configured: &HeaderMap| Ok(request::headers_for_batch(configured));
        let observer = self.observed(attempts);
        let response = self.calls(headers, Some(body), &observer).await;
        let response = response.map_err(of_this_call)?;
        let ids = attempts.iter().map(request::id);
        let results = batch::results(&response.body, ids, values, self.max_retry_after);
        let results = results.map_err(|problem| {
            let message = format!("{self}: the response {problem}");
            let failure =
                Failure::transient(INVALID_RESPONSE, message).with_response(self.excerpt(&response));
            of_this_call(failure.with_scope(FailureScope::Endpoint))
        })?;
        let results = results.into_iter().map(|result| match result {
            Some(result) => self.result_of_record(result).map_err(of_this_call),
            None => {
                let message = format!("{self}: the response has no result for the record");
                Err(Failure::transient(MISSING_RESULT, message).with_scope(FailureScope::Unknown))
            }
        });
        Ok(results.collect())
    }

    fn result_of_record(&self, result: RecordResult) -> Result<CallResult, Failure> {
        let RecordResult {
            status,
            retry_after,
            value,
            content_type,
        } = result;
        let result = CallResult {
            status,
            body: value,
            content_type,
        };
        match self.classification.of_status(status, retry_after.is_some()) {
            Ok(()) if result.body.len() > self.max_response_bytes => Err(self.too_large().failure),
            Ok(()) => Ok(result),
            Err((class, scope)) => {
                let failure = self.error_status(status, class, scope, retry_after).failure;
                Err(failure.with_response(self.excerpt(&result)))
            }
        }
    }

    /// The result of a record, unless it is dropped.
    fn produced(&self, attempt: &Attempt, result: &CallResult) -> Result<Option<Produced>, Failure> {
        self.result_of(attempt, result)
            .map_err(|failure| failure.with_response(self.excerpt(result)))
    }

    /// What a dead letter says of a response.
    fn excerpt(&self, result: &CallResult) -> Option<Excerpt> {
        let excerpt = || excerpt::excerpt(result.content_type.as_ref(), &result.body, true);
        self.error_response.then(excerpt).flatten()
    }

    fn result_of(&self, attempt: &Attempt, result: &CallResult) -> Result<Option<Produced>, Failure> {
        let value = attempt.record.value.as_deref();
        let topic = match self.output.destination(value, result.status, &result.body)? {
            Destination::Output => None,
            Destination::Topic(topic) => Some(topic),
            Destination::Nowhere => return Ok(None),
        };
        let produced = match &self.response {
            ResponseUse::Replace => Produced {
                value: Some(Some(result.body.clone())),
                headers: content_type_of(result.content_type.as_ref()),
                ..Produced::unchanged()
            },
            ResponseUse::Keep => Produced::unchanged(),
            // The endpoint says that there is nothing to insert.
            ResponseUse::Merge(_) if result.status == NO_CONTENT => Produced::unchanged(),
            ResponseUse::Merge(pointer) => {
                let merged = merge::insert(value.unwrap_or_default(), pointer, &result.body);
                let merged = merged.map_err(|problem| Failure::permanent(MERGE, problem))?;
                Produced::value(Some(merged.into()))
            }
        };
        Ok(Some(Produced { topic, ..produced }))
    }

    /// A call, its quick retries, and if the credentials are refused and the files contain others, the same with those.
    /// `headers` completes the configured headers.
    async fn calls(
        &self,
        headers: impl Fn(&HeaderMap) -> Result<HeaderMap, Failure>,
        body: Option<Bytes>,
        observer: &ObservedCalls<'_>,
    ) -> Result<CallResult, Failure> {
        let in_use = self.credentials.in_use();
        let mut result = self.calls_with(&in_use, &headers, &body, observer).await;
        if let Err(failed) = &result
            && failed.repetition == Repetition::WithOtherCredentials
            && let Some(other) = self.credentials.other_than(&in_use).await
        {
            result = self.calls_with(&other, &headers, &body, observer).await;
        }
        result.map_err(|failed| failed.failure)
    }

    /// A call and its quick retries.
    async fn calls_with(
        &self,
        with: &InUse,
        headers: impl Fn(&HeaderMap) -> Result<HeaderMap, Failure>,
        body: &Option<Bytes>,
        observer: &ObservedCalls<'_>,
    ) -> Result<CallResult, CallFailure> {
        let headers = headers(&with.headers).map_err(|failure| CallFailure {
            failure: failure.with_scope(FailureScope::NotCalled),
            repetition: Repetition::Useless,
        })?;
        let send = |headers| self.call(with.clients.client(), headers, body.as_ref());
        let call = |retries| observer.observe(retries, headers.clone(), send);
        let is_useful = |failed: &CallFailure| failed.repetition == Repetition::Soon;
        self.quick_retry.run(call, is_useful).await
    }

    /// Observes the calls for these attempts.
    fn observed<'a>(&self, attempts: impl IntoIterator<Item = &'a Attempt>) -> ObservedCalls<'_> {
        let off = || CallTelemetry::off(&self.method, &self.url);
        let traces = attempts.into_iter().filter_map(|attempt| attempt.trace.as_ref());
        self.telemetry.get_or_init(off).calls(traces)
    }

    /// Sends one request and reads its response.
    async fn call(
        &self,
        client: Client,
        headers: HeaderMap,
        body: Option<&Bytes>,
    ) -> Result<CallResult, CallFailure> {
        let mut request = Request::new(self.method.clone(), self.url.clone());
        *request.headers_mut() = headers;
        let body = body.cloned().unwrap_or_default();
        if body.is_empty() && matches!(self.method, Method::POST | Method::PUT | Method::PATCH) {
            // hyper omits `content-length: 0`, and some servers reject a POST without it (RFC 9110, section 8.6).
            request
                .headers_mut()
                .insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        }
        *request.body_mut() = Some(body.into());
        let deadline = Instant::now() + self.timeout;
        let mut response = match timeout_at(deadline, client.execute(request)).await {
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
                let headers = response.headers().clone();
                let body = timeout_at(deadline, self.read_body(response)).await;
                let body = body.unwrap_or_else(|_| Err(self.timed_out()))?;
                // A body that is discarded is empty.
                let body = content_encoding::decode(&headers, body, self.max_response_bytes);
                let body = body.map_err(|problem| self.undecodable(problem))?;
                let content_type = headers.get(CONTENT_TYPE).cloned();
                Ok(CallResult {
                    status: status.as_u16(),
                    body,
                    content_type,
                })
            }
            Err((class, scope)) => {
                let beginning = Beginning::drain(&mut response).await;
                let mut failed = self.error_status(status.as_u16(), class, scope, retry_after);
                if self.error_response {
                    failed.failure.response = beginning.excerpt(response.headers());
                }
                Err(failed)
            }
        }
    }

    /// Reads the body of a successful response. If it is discarded, a body that is too large is no failure, and the
    /// rest of it is not read.
    async fn read_body(&self, response: Response) -> Result<Bytes, CallFailure> {
        let is_kept = self.needs_body;
        let limit = self.max_response_bytes;
        let is_http2 = response.version() == Version::HTTP_2;
        let announced = response
            .content_length()
            .map(|length| usize::try_from(length).unwrap_or(usize::MAX));
        if is_kept && announced.is_some_and(|announced| announced > limit) {
            return Err(self.too_large());
        }
        let mut rest = reqwest::Body::from(response);
        let (mut body, mut length) = (Vec::new(), 0_usize);
        while let Some(frame) = rest.frame().await {
            let frame = frame.map_err(|error| self.call_error(&error))?;
            let Ok(chunk) = frame.into_data() else { continue };
            length = length.saturating_add(chunk.len());
            match (is_kept, length > limit) {
                (true, true) => return Err(self.too_large()),
                // The whole body, which needs no copy.
                (true, false) if announced == Some(chunk.len()) => return Ok(chunk),
                (true, false) => body.extend_from_slice(&chunk),
                (false, true) => return Ok(Bytes::new()),
                (false, false) => {}
            }
        }
        // A server or a proxy can end a stream of HTTP/2 in the middle of a body as if it were complete (RST_STREAM with
        // NO_ERROR).
        let is_cut_off = is_http2 && !rest.is_end_stream();
        if is_cut_off || announced.is_some_and(|announced| announced != length) {
            return Err(self.closed("the response ends too early"));
        }
        Ok(body.into())
    }

    fn error_status(
        &self,
        status: u16,
        class: ErrorClass,
        scope: FailureScope,
        retry_after: Option<Duration>,
    ) -> CallFailure {
        let code = format!("http.{status}");
        let known = StatusCode::from_u16(status).ok();
        let reason = known
            .and_then(|known| known.canonical_reason())
            .map(|reason| format!(" {reason}"))
            .unwrap_or_default();
        let note = if (300..400).contains(&status) {
            "; redirects are not followed"
        } else {
            ""
        };
        let message = format!("{self} answered {status}{reason}{note}");
        let failure = match (class, retry_after) {
            (ErrorClass::Throttled, Some(after)) if after > Duration::ZERO => {
                Failure::throttled(after, code, message)
            }
            // `Retry-After: 0` or a past date requests no delay. The pipeline's first delay applies instead: throttling
            // does not count as a failed attempt, so retrying at once could loop forever.
            _ => Failure::new(class, code, message),
        };
        let repetition = match status {
            401 | 403 | 407 => Repetition::WithOtherCredentials,
            // More calls would not help an endpoint that is overloaded.
            503 => Repetition::Useless,
            _ if failure.class == ErrorClass::Transient => Repetition::Soon,
            _ => Repetition::Useless,
        };
        CallFailure {
            failure: failure.with_scope(scope),
            repetition,
        }
    }

    fn call_error(&self, error: &reqwest::Error) -> CallFailure {
        let cause = call_error::cause(error);
        let (code, message, repetition) = match CallError::of(error) {
            CallError::Connect => (
                "http.connect",
                format!("{self}: cannot connect: {cause}"),
                Repetition::Soon,
            ),
            CallError::ConnectTimeout => {
                let within = HumanDuration::from(self.connect_timeout);
                (
                    "http.connect",
                    format!("{self}: cannot connect within {within}"),
                    Repetition::Useless,
                )
            }
            CallError::Timeout => (
                "http.timeout",
                format!("{self}: the connection timed out: {cause}"),
                Repetition::Useless,
            ),
            CallError::Closed => return self.closed(&cause),
            CallError::InvalidResponse => (
                INVALID_RESPONSE,
                format!("{self}: the response is not HTTP: {cause}"),
                Repetition::Soon,
            ),
            CallError::InvalidRequest => {
                let message = format!("{self}: cannot build the request: {cause}");
                let failure = Failure::permanent(INVALID_REQUEST, message);
                return CallFailure {
                    failure: failure.with_scope(FailureScope::NotCalled),
                    repetition: Repetition::Useless,
                };
            }
        };
        CallFailure {
            failure: Failure::transient(code, message).with_scope(FailureScope::Endpoint),
            repetition,
        }
    }

    fn closed(&self, cause: &str) -> CallFailure {
        let message = format!("{self}: the connection was closed before the response was complete: {cause}");
        CallFailure {
            failure: Failure::transient("http.closed", message).with_scope(FailureScope::Endpoint),
            repetition: Repetition::Soon,
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
            repetition: Repetition::Useless,
        }
    }

    fn undecodable(&self, problem: Undecodable) -> CallFailure {
        let problem = match problem {
            Undecodable::TooLarge => return self.too_large(),
            Undecodable::Invalid(problem) => problem,
        };
        let message = format!("{self}: the response {problem}");
        CallFailure {
            failure: Failure::transient(CONTENT_ENCODING, message).with_scope(FailureScope::Endpoint),
            repetition: Repetition::Soon,
        }
    }

    fn too_large(&self) -> CallFailure {
        let message = format!(
            "{self}: the response exceeds max_response_bytes ({})",
            self.max_response_bytes
        );
        CallFailure {
            failure: Failure::permanent("http.response-too-large", message),
            repetition: Repetition::Useless,
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
