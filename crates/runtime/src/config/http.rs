//! The endpoint that a pipeline calls for each record.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use redeliver_core::Span;
use redeliver_core::classification::{Classification, Verdict};
use serde::{Deserialize, Serialize};

use super::http_request::{endpoint_url, header_name, header_value, request_method};
use super::problem::Findings;
use super::secret::{RequestHeaders, Url};
use super::text;

/// `pipelines.<name>.http`: the endpoint and how it is called.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpConfig {
    /// Where requests go, `http://` or `https://`.
    pub url: Url,
    /// The method.
    #[serde(default = "defaults::method")]
    pub method: String,
    /// The longest time from sending a request to the end of its answer.
    #[serde(default = "defaults::timeout", with = "text")]
    pub timeout: Span,
    /// The longest time for a connection to come up.
    #[serde(default = "defaults::connect_timeout", with = "text")]
    pub connect_timeout: Span,
    /// The most requests at the same time.
    #[serde(default = "defaults::concurrency")]
    pub concurrency: u32,
    /// Retries within the process, before the record goes to a tier.
    #[serde(default = "defaults::quick_retries")]
    pub quick_retries: u32,
    /// The first wait before such a retry; it doubles.
    #[serde(default = "defaults::quick_retry_delay", with = "text")]
    pub quick_retry_delay: Span,
    /// What becomes of the answer.
    #[serde(default)]
    pub response: ResponseMode,
    /// A longer answer is a failure. Bytes.
    #[serde(default = "defaults::max_response_bytes")]
    pub max_response_bytes: u64,
    /// A longer `Retry-After` is cut to this.
    #[serde(default = "defaults::max_retry_after", with = "text")]
    pub max_retry_after: Span,
    /// Headers of every request.
    #[serde(default)]
    pub headers: RequestHeaders,
    /// Headers whose values are secrets in files.
    #[serde(default)]
    pub header_files: BTreeMap<String, PathBuf>,
    /// What single statuses mean, over the default table.
    #[serde(default)]
    pub classification: BTreeMap<Status, Meaning>,
    /// Certificates.
    #[serde(default)]
    pub tls: TlsConfig,
}

/// What becomes of the body of a successful answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResponseMode {
    /// It becomes the record's value.
    #[default]
    Replace,
    /// It is dropped; the record keeps its value.
    Keep,
}

/// `tls`: certificates of a connection; all are files in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsConfig {
    /// Authorities that are trusted in addition to the machine's own.
    pub ca_file: Option<PathBuf>,
    /// Our certificate.
    pub cert_file: Option<PathBuf>,
    /// Its key.
    pub key_file: Option<PathBuf>,
}

/// An HTTP status, 100 to 599.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Status(pub u16);

/// What a status means, as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Meaning {
    /// The call was successful.
    Success,
    /// The call failed for the moment.
    Transient,
    /// The call failed for good.
    Permanent,
}

impl HttpConfig {
    /// An endpoint with all defaults.
    #[must_use]
    pub fn new(url: &str) -> Self {
        Self {
            url: Url::new(url),
            method: defaults::method(),
            timeout: defaults::timeout(),
            connect_timeout: defaults::connect_timeout(),
            concurrency: defaults::concurrency(),
            quick_retries: defaults::quick_retries(),
            quick_retry_delay: defaults::quick_retry_delay(),
            response: ResponseMode::default(),
            max_response_bytes: defaults::max_response_bytes(),
            max_retry_after: defaults::max_retry_after(),
            headers: RequestHeaders::default(),
            header_files: BTreeMap::new(),
            classification: BTreeMap::new(),
            tls: TlsConfig::default(),
        }
    }

    /// Which answer means what.
    #[must_use]
    pub fn classification(&self) -> Classification {
        let verdict = |meaning| match meaning {
            Meaning::Success => Verdict::Success,
            Meaning::Transient => Verdict::Transient,
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
            findings.wrong("url", problem);
        }
        if let Err(problem) = request_method(&self.method) {
            findings.wrong("method", problem);
        }
        let hour = Span::from_secs(3_600);
        findings.range("timeout", self.timeout, Span::from_millis(1)..=hour);
        findings.range(
            "connect_timeout",
            self.connect_timeout,
            Span::from_millis(1)..=hour,
        );
        findings.range("concurrency", self.concurrency, 1..=10_000);
        findings.range("quick_retries", self.quick_retries, 0..=5);
        findings.range(
            "quick_retry_delay",
            self.quick_retry_delay,
            Span::from_millis(1)..=Span::from_secs(60),
        );
        findings.range("max_response_bytes", self.max_response_bytes, 1..=1 << 30);
        findings.range(
            "max_retry_after",
            self.max_retry_after,
            Span::from_secs(1)..=redeliver_core::backoff::MAX_WAIT,
        );
        for (name, value) in self.headers.iter() {
            if let Err(problem) = header_name(name).and_then(|_| header_value(value)) {
                findings.inside("headers", |at| at.wrong(name, problem));
            }
        }
        for name in self.header_files.keys() {
            if let Err(problem) = header_name(name) {
                findings.inside("header_files", |at| at.wrong(name, problem));
            }
            if self
                .headers
                .iter()
                .any(|(other, _)| other.eq_ignore_ascii_case(name))
            {
                findings.inside("header_files", |at| {
                    at.wrong(name, "stands under headers as well; write it once");
                });
            }
        }
        findings.inside("tls", |at| match (&self.tls.cert_file, &self.tls.key_file) {
            (Some(_), None) => at.wrong("cert_file", "needs key_file beside it"),
            (None, Some(_)) => at.wrong("key_file", "needs cert_file beside it"),
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
            .ok_or_else(|| format!("`{text}` is not a status: write a number from 100 to 599"))
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Status {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        text::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Status {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text::deserialize(deserializer)
    }
}

mod defaults {
    use redeliver_core::Span;

    pub(super) fn method() -> String {
        "POST".to_owned()
    }

    pub(super) fn timeout() -> Span {
        Span::from_secs(5)
    }

    pub(super) fn connect_timeout() -> Span {
        Span::from_secs(2)
    }

    pub(super) fn concurrency() -> u32 {
        16
    }

    pub(super) fn quick_retries() -> u32 {
        2
    }

    pub(super) fn quick_retry_delay() -> Span {
        Span::from_millis(100)
    }

    pub(super) fn max_response_bytes() -> u64 {
        1_000_000
    }

    pub(super) fn max_retry_after() -> Span {
        Span::from_secs(3_600)
    }
}
