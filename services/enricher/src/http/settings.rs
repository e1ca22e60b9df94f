//! Settings of the HTTP handler.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use redeliver_core::classification::Classification;
use redeliver_runtime::config::{BatchConfig, ConnectionsConfig, InvalidField, endpoint_url, request_method};
use redeliver_runtime::watched_files::ConfiguredFile;
use reqwest::{Method, Url};

use crate::output_choice::OutputChoice;

/// An endpoint and how to call it. `Debug` redacts header values and the query.
#[derive(Clone)]
pub struct HttpSettings {
    /// The section of the configuration that contains these settings, such as `pipelines.greetings.http`, for messages.
    pub section: String,
    /// The URL of the endpoint, `http://` or `https://`.
    pub url: String,
    /// The request method in upper case, such as `POST`.
    pub method: String,
    /// Maximum time from the start of a call to the end of its response.
    pub timeout: Duration,
    /// Maximum time to establish a connection, including TLS.
    pub connect_timeout: Duration,
    /// The connections.
    pub connections: ConnectionsConfig,
    /// Maximum number of concurrent calls for several records, see `batch`. Without `batch`, the caller limits them.
    pub concurrency: usize,
    /// Calls for several records. `None`: each call is for one record.
    pub batch: Option<BatchConfig>,
    /// Maximum number of retries within an attempt.
    pub quick_retries: u32,
    /// Upper bound of the delay before the first quick retry; doubles with each further one.
    pub quick_retry_delay: Duration,
    /// How many quick retries there may be in the long run, as a share of the calls, from 0 to 5.
    pub quick_retry_budget: f64,
    /// How the body of a successful response is used.
    pub response: ResponseUse,
    /// Maximum size in bytes of a response that becomes the value; a larger one is a permanent failure.
    pub max_response_bytes: usize,
    /// Whether failures contain the beginning of the response.
    pub error_response: bool,
    /// Upper bound of the delay that `Retry-After` requests.
    pub max_retry_after: Duration,
    /// Names and values of additional request headers.
    pub headers: Vec<(String, String)>,
    /// Names of additional request headers, with the files that contain their values. See [`HttpHandler::follow_files`](super::HttpHandler::follow_files).
    pub header_files: Vec<(String, PathBuf)>,
    /// The meaning of response statuses.
    pub classification: Classification,
    /// Certificates for TLS.
    pub tls: TlsFiles,
    /// The topic of a result.
    pub output: OutputChoice,
}

/// How the body of a successful response is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ResponseUse {
    /// It becomes the value of the result.
    #[default]
    Replace,
    /// It is discarded, and the result has the value of the record.
    Keep,
    /// It is JSON, and is inserted into the value of the record at this JSON pointer.
    Merge(String),
}

/// Files with certificates, in PEM. See [`HttpHandler::follow_files`](super::HttpHandler::follow_files).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Additional CA certificates.
    pub ca_file: Option<PathBuf>,
    /// The client certificate, followed by intermediate certificates.
    pub cert_file: Option<PathBuf>,
    /// The private key of the client certificate.
    pub key_file: Option<PathBuf>,
}

/// An invalid setting. The message contains no secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct HttpSetupError {
    /// The field of the configuration, such as `pipelines.greetings.http.header_files.authorization`.
    pub field: String,
    /// What is wrong, and what would be valid.
    pub problem: String,
}

impl HttpSettings {
    /// `POST` to this endpoint, with the defaults of the configuration: a timeout of 5 s, 2 s to connect, 2 quick
    /// retries after up to 100 ms and for a fifth of the calls, a response of at most 1 MB that becomes the value, and at most one hour for
    /// `Retry-After`.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            section: "http".to_owned(),
            url: url.into(),
            method: "POST".to_owned(),
            timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            connections: ConnectionsConfig::default(),
            concurrency: 16,
            batch: None,
            quick_retries: 2,
            quick_retry_delay: Duration::from_millis(100),
            quick_retry_budget: 0.2,
            response: ResponseUse::default(),
            max_response_bytes: 1_000_000,
            error_response: true,
            max_retry_after: Duration::from_secs(3_600),
            headers: Vec::new(),
            header_files: Vec::new(),
            classification: Classification::default(),
            tls: TlsFiles::default(),
            output: OutputChoice::default(),
        }
    }

    pub(super) fn parsed_url(&self) -> Result<Url, HttpSetupError> {
        endpoint_url(&self.url).map_err(|problem| self.wrong("url", problem))
    }

    pub(super) fn parsed_method(&self) -> Result<Method, HttpSetupError> {
        request_method(&self.method).map_err(|problem| self.wrong("method", problem))
    }

    /// An error of the field `field` of the section.
    pub(super) fn wrong(&self, field: &str, problem: impl Into<String>) -> HttpSetupError {
        HttpSetupError {
            field: format!("{}.{field}", self.section),
            problem: problem.into(),
        }
    }

    /// The file that the field `field` of the section names.
    pub(super) fn file(&self, field: &str, path: &Path) -> ConfiguredFile {
        ConfiguredFile {
            field: format!("{}.{field}", self.section),
            path: path.to_owned(),
        }
    }
}

impl From<InvalidField> for HttpSetupError {
    fn from(InvalidField { field, problem, .. }: InvalidField) -> Self {
        Self { field, problem }
    }
}

/// A URL for messages: without credentials, query and fragment.
pub(super) fn shown_url(url: &Url) -> String {
    format!("{}{}", url.origin().ascii_serialization(), url.path())
}

impl fmt::Debug for HttpSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.headers.iter().map(|(name, _)| name).collect();
        let url = Url::parse(&self.url).map_or_else(|_| "(not a URL)".to_owned(), |url| shown_url(&url));
        f.debug_struct("HttpSettings")
            .field("section", &self.section)
            .field("url", &url)
            .field("method", &self.method)
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("connections", &self.connections)
            .field("concurrency", &self.concurrency)
            .field("batch", &self.batch)
            .field("quick_retries", &self.quick_retries)
            .field("quick_retry_delay", &self.quick_retry_delay)
            .field("quick_retry_budget", &self.quick_retry_budget)
            .field("response", &self.response)
            .field("max_response_bytes", &self.max_response_bytes)
            .field("error_response", &self.error_response)
            .field("max_retry_after", &self.max_retry_after)
            .field("headers", &names)
            .field("header_files", &self.header_files)
            .field("classification", &self.classification)
            .field("tls", &self.tls)
            .field("output", &self.output)
            .finish()
    }
}
