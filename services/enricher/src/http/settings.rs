//! Settings of the HTTP handler.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use redeliver_core::classification::Classification;
use redeliver_runtime::config::{Secret, endpoint_url, header_name, header_value, request_method};
use reqwest::header::{HeaderMap, HeaderValue, USER_AGENT};
use reqwest::{Method, Url};

use crate::output_choice::OutputChoice;

/// An endpoint and how to call it. `Debug` redacts header values and the query.
#[derive(Clone)]
pub struct HttpSettings {
    /// The URL of the endpoint, `http://` or `https://`.
    pub url: String,
    /// The request method in upper case, such as `POST`.
    pub method: String,
    /// Maximum time from the start of a call to the end of its response.
    pub timeout: Duration,
    /// Maximum time to establish a connection, including TLS.
    pub connect_timeout: Duration,
    /// Maximum number of retries within an attempt.
    pub quick_retries: u32,
    /// Upper bound of the delay before the first quick retry; doubles with each further one.
    pub quick_retry_delay: Duration,
    /// How the body of a successful response is used.
    pub response: ResponseUse,
    /// Maximum size in bytes of a response that becomes the value; a larger one is a permanent failure.
    pub max_response_bytes: usize,
    /// Upper bound of the delay that `Retry-After` requests.
    pub max_retry_after: Duration,
    /// Names and values of additional request headers.
    pub headers: Vec<(String, String)>,
    /// Names of additional request headers, with the files that contain their values. Read once at start.
    pub header_files: Vec<(String, PathBuf)>,
    /// The meaning of response statuses.
    pub classification: Classification,
    /// Certificates for TLS.
    pub tls: TlsFiles,
    /// The topic of a result.
    pub output: OutputChoice,
}

/// How the body of a successful response is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseUse {
    /// It becomes the value of the result.
    #[default]
    Replace,
    /// It is discarded, and the result has the value of the record.
    Keep,
}

/// Files with certificates, in PEM.
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
    /// The field of the configuration, such as `http.header_files.authorization`.
    pub field: String,
    /// What is wrong, and what would be valid.
    pub problem: String,
}

impl HttpSettings {
    /// `POST` to this endpoint, with the defaults of the configuration: a timeout of 5 s, 2 s to connect, 2 quick
    /// retries after up to 100 ms, a response of at most 1 MB that becomes the value, and at most one hour for
    /// `Retry-After`.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            method: "POST".to_owned(),
            timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            quick_retries: 2,
            quick_retry_delay: Duration::from_millis(100),
            response: ResponseUse::default(),
            max_response_bytes: 1_000_000,
            max_retry_after: Duration::from_secs(3_600),
            headers: Vec::new(),
            header_files: Vec::new(),
            classification: Classification::default(),
            tls: TlsFiles::default(),
            output: OutputChoice::default(),
        }
    }

    pub(super) fn parsed_url(&self) -> Result<Url, HttpSetupError> {
        endpoint_url(&self.url).map_err(|problem| HttpSetupError::new("url", problem))
    }

    pub(super) fn parsed_method(&self) -> Result<Method, HttpSetupError> {
        request_method(&self.method).map_err(|problem| HttpSetupError::new("method", problem))
    }

    /// The headers of every request, including those in files.
    pub(super) fn read_headers(&self) -> Result<HeaderMap, HttpSetupError> {
        let mut headers = HeaderMap::new();
        headers.insert(
            USER_AGENT,
            HeaderValue::from_static(concat!("redeliver-enricher/", env!("CARGO_PKG_VERSION"))),
        );
        let mut named = Vec::new();
        for (name, value) in &self.headers {
            named.push((format!("headers.{name}"), name, value.clone()));
        }
        for (name, path) in &self.header_files {
            let field = format!("header_files.{name}");
            let secret = Secret::from_file(path).map_err(|problem| HttpSetupError::new(&field, problem))?;
            named.push((field, name, secret.expose().to_owned()));
        }
        for (field, name, value) in named {
            let wrong = |problem: &str| HttpSetupError::new(&field, problem);
            let name = header_name(name).map_err(wrong)?;
            let mut value = header_value(&value).map_err(wrong)?;
            // Any of them may be an API key.
            value.set_sensitive(true);
            if name == USER_AGENT {
                headers.insert(name, value);
            } else {
                headers.append(name, value);
            }
        }
        Ok(headers)
    }
}

impl HttpSetupError {
    pub(super) fn new(field: &str, problem: impl Into<String>) -> Self {
        Self {
            field: format!("http.{field}"),
            problem: problem.into(),
        }
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
            .field("url", &url)
            .field("method", &self.method)
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("quick_retries", &self.quick_retries)
            .field("quick_retry_delay", &self.quick_retry_delay)
            .field("response", &self.response)
            .field("max_response_bytes", &self.max_response_bytes)
            .field("max_retry_after", &self.max_retry_after)
            .field("headers", &names)
            .field("header_files", &self.header_files)
            .field("classification", &self.classification)
            .field("tls", &self.tls)
            .field("output", &self.output)
            .finish()
    }
}
