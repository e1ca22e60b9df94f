//! `http`: the endpoint of a pipeline and how it is called.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use redeliver_core::classification::{Classification, Verdict};
use redeliver_core::{HandlerChanges, HumanDuration, serde_as_text};
use serde::{Deserialize, Serialize};

use super::batch::BatchConfig;
use super::connections::{ConnectionsConfig, HttpVersion};
use super::error::Findings;
use super::http_request::{endpoint_url, header_name, header_value, request_method};
use super::output::{is_pointer, pointer_problem};
use super::secret::{RequestHeaders, Url};

/// `pipelines.<name>.http`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    /// An `http://` or `https://` URL.
    pub url: Url,
    /// The HTTP method, in upper case.
    #[serde(default = "defaults::method")]
    pub method: String,
    /// Maximum time from sending a request to the end of its response.
    #[serde(default = "defaults::timeout")]
    pub timeout: HumanDuration,
    /// Maximum time to establish a connection.
    #[serde(default = "defaults::connect_timeout")]
    pub connect_timeout: HumanDuration,
    /// Connections to the endpoint.
    #[serde(default)]
    pub connections: ConnectionsConfig,
    /// Maximum number of concurrent requests.
    #[serde(default = "defaults::concurrency")]
    pub concurrency: u32,
    /// Retries within an attempt, before the record goes to a tier.
    #[serde(default = "defaults::quick_retries")]
    pub quick_retries: u32,
    /// Calls for several records. `None`: each call is for one record.
    #[serde(default)]
    pub batch: Option<BatchConfig>,
    /// How the body of a response is used.
    #[serde(default)]
    pub response: ResponseMode,
    /// Maximum size of a response in bytes. A longer response is a failure.
    #[serde(default = "defaults::max_response_bytes")]
    pub max_response_bytes: u64,
    /// Whether dead letters contain the beginning of the response to a failed call.
    #[serde(default = "defaults::error_response")]
    pub error_response: bool,
    /// Upper limit of `Retry-After`. Longer values are reduced to it.
    #[serde(default = "defaults::max_retry_after")]
    pub max_retry_after: HumanDuration,
    /// Headers that are added to every request.
    #[serde(default)]
    pub headers: RequestHeaders,
    /// Headers whose values are read from files.
    #[serde(default)]
    pub header_files: BTreeMap<String, PathBuf>,
    /// Statuses whose meaning differs from the default.
    #[serde(default)]
    pub classification: BTreeMap<Status, Meaning>,
    /// Certificates of the connection.
    #[serde(default)]
    pub tls: TlsConfig,
}

/// How the body of a successful response is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResponseMode {
    /// The body replaces the record's value.
    #[default]
    Replace,
    /// The body is discarded and the record keeps its value.
    Keep,
    /// The body, which is JSON, is inserted into the record's value, a JSON object, at this JSON pointer.
    Merge(String),
}

impl ResponseMode {
    /// What a response changes in the result.
    #[must_use]
    pub fn changes(&self) -> HandlerChanges {
        match self {
            Self::Keep => HandlerChanges::Nothing,
            Self::Replace | Self::Merge(_) => HandlerChanges::Value,
        }
    }
}

/// `tls`: PEM files for a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsConfig {
    /// Additional CA certificates.
    pub ca_file: Option<PathBuf>,
    /// The client certificate.
    pub cert_file: Option<PathBuf>,
    /// The private key of the client certificate.
    pub key_file: Option<PathBuf>,
}

/// An HTTP status, 100 to 599.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Status(pub u16);

/// The meaning of an HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Meaning {
    /// The call succeeded.
    Success,
    /// The call failed because of the record or the endpoint, and is retried.
    Transient,
    /// The endpoint asks for a delay: the call is retried, and does not count as a failed attempt.
    Throttled,
    /// The endpoint may fail for every record: the circuit breaker decides whether the attempt counts.
    Endpoint,
    /// The call failed and is not retried.
    Permanent,
}

impl HttpConfig {
    /// An endpoint with default settings.
    #[must_use]
    pub fn new(url: &str) -> Self {
        Self {
            url: Url::new(url),
            method: defaults::method(),
            timeout: defaults::timeout(),
            connect_timeout: defaults::connect_timeout(),
            connections: ConnectionsConfig::default(),
            concurrency: defaults::concurrency(),
            quick_retries: defaults::quick_retries(),
            batch: None,
            response: ResponseMode::default(),
            max_response_bytes: defaults::max_response_bytes(),
            error_response: defaults::error_response(),
            max_retry_after: defaults::max_retry_after(),
            headers: RequestHeaders::default(),
            header_files: BTreeMap::new(),
            classification: BTreeMap::new(),
            tls: TlsConfig::default(),
        }
    }

    /// Maximum number of records whose calls are in progress.
    #[must_use]
    pub fn records_in_calls(&self) -> u32 {
        let records = self.batch.map_or(1, |batch| batch.records);
        self.concurrency.saturating_mul(records)
    }

    /// How responses are classified.
    #[must_use]
    pub fn classification(&self) -> Classification {
        let verdict = |meaning| match meaning {
            Meaning::Success => Verdict::Success,
            Meaning::Transient => Verdict::Transient,
            Meaning::Throttled => Verdict::Throttled,
            Meaning::Endpoint => Verdict::Endpoint,
            Meaning::Permanent => Verdict::Permanent,
        };
        let overrides = self
            .classification
            .iter()
            .map(|(status, meaning)| (status.0, verdict(*meaning)));
        Classification::with_overrides(overrides.collect())
    }

    pub(super) fn check(&self, findings: &mut Findings<'_>) {
        if let Err(problem) = endpoint_url(self.url.expose()) {
            findings.report("url", problem);
        }
        if let Err(problem) = request_method(&self.method) {
            findings.report("method", problem);
        }
        let hour = HumanDuration::from_secs(3_600);
        findings.range("timeout", self.timeout, HumanDuration::from_millis(1)..=hour);
        findings.range(
            "connect_timeout",
            self.connect_timeout,
            HumanDuration::from_millis(1)..=hour,
        );
        findings.inside("connections", |at| self.connections.check(at));
        if let Some(batch) = &self.batch {
            findings.inside("batch", |at| batch.check(at));
            if ["GET", "HEAD", "DELETE", "OPTIONS", "TRACE"].contains(&&*self.method) {
                findings.report(
                    "batch",
                    format!(
                        "needs a method with a body, such as POST; method is {}",
                        self.method
                    ),
                );
            }
        }
        if let ResponseMode::Merge(pointer) = &self.response
            && !is_pointer(pointer)
        {
            findings.inside("response", |at| at.report("merge", pointer_problem(pointer)));
        }
        findings.range("concurrency", self.concurrency, 1..=10_000);
        findings.range("quick_retries", self.quick_retries, 0..=5);
        findings.range("max_response_bytes", self.max_response_bytes, 1..=1 << 30);
        findings.range(
            "max_retry_after",
            self.max_retry_after,
            HumanDuration::from_secs(1)..=redeliver_core::backoff::MAX_WAIT,
        );
        for (name, value) in self.headers.iter() {
            if let Err(problem) = header_name(name).and_then(|_| header_value(value)) {
                findings.inside("headers", |at| at.report(name, problem));
            }
        }
        let names = self.headers.iter().map(|(name, _)| name);
        let mut names = names.chain(self.header_files.keys().map(String::as_str));
        if self.connections.version != HttpVersion::Http1
            && names.any(|name| name.eq_ignore_ascii_case("host"))
        {
            findings.inside("connections", |at| {
                at.report(
                    "version",
                    "must be http1, because the header `host` is configured",
                );
            });
        }
        for name in self.header_files.keys() {
            if let Err(problem) = header_name(name) {
                findings.inside("header_files", |at| at.report(name, problem));
            }
            if self
                .headers
                .iter()
                .any(|(other, _)| other.eq_ignore_ascii_case(name))
            {
                findings.inside("header_files", |at| {
                    at.report(name, "is also set under headers; set it once");
                });
            }
        }
        findings.inside("tls", |at| match (&self.tls.cert_file, &self.tls.key_file) {
            (Some(_), None) => at.report("cert_file", "requires key_file"),
            (None, Some(_)) => at.report("key_file", "requires cert_file"),
            _ => {}
        });
    }
}

impl FromStr for Status {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let status = text.parse().ok().filter(|status| (100..=599).contains(status));
        status
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not an HTTP status: write a number from 100 to 599"))
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

serde_as_text!(Status);

mod defaults {
    use redeliver_core::HumanDuration;

    pub(super) fn method() -> String {
        "POST".to_owned()
    }

    pub(super) fn timeout() -> HumanDuration {
        HumanDuration::from_secs(5)
    }

    pub(super) fn connect_timeout() -> HumanDuration {
        HumanDuration::from_secs(2)
    }

    pub(super) fn concurrency() -> u32 {
        16
    }

    pub(super) fn quick_retries() -> u32 {
        2
    }

    pub(super) fn max_response_bytes() -> u64 {
        1_000_000
    }

    pub(super) fn error_response() -> bool {
        true
    }

    pub(super) fn max_retry_after() -> HumanDuration {
        HumanDuration::from_secs(3_600)
    }
}
