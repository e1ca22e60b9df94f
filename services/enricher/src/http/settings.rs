//! What the HTTP handler is made of, checked.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use redeliver_core::classification::Classification;
use redeliver_runtime::config::{Secret, endpoint_url, header_name, header_value, request_method};
use reqwest::header::{HeaderMap, HeaderValue, USER_AGENT};
use reqwest::{Method, Url};

use crate::output_choice::OutputChoice;

/// An endpoint and how it is called. `Debug` shows no value of a header and no query.
#[derive(Clone)]
pub struct HttpSettings {
    /// Where requests go, `http://` or `https://`.
    pub url: String,
    /// The method in capitals, such as `POST`.
    pub method: String,
    /// The longest time from the beginning of a call to the end of its answer.
    pub timeout: Duration,
    /// The longest time for a connection to come up, TLS included.
    pub connect_timeout: Duration,
    /// Retries within the process, before the record goes to a tier.
    pub quick_retries: u32,
    /// The longest first wait before such a retry; it doubles.
    pub quick_retry_delay: Duration,
    /// What becomes of the body of a successful answer.
    pub response: ResponseUse,
    /// A longer answer is a permanent failure where it would become the value. Bytes.
    pub max_response_bytes: usize,
    /// A longer `Retry-After` is cut to this.
    pub max_retry_after: Duration,
    /// Headers of every request, names with values.
    pub headers: Vec<(String, String)>,
    /// Headers whose values are secrets in files, names with paths. Read once, at start.
    pub header_files: Vec<(String, PathBuf)>,
    /// What a status means.
    pub classification: Classification,
    /// Certificates.
    pub tls: TlsFiles,
    /// To which topic results go.
    pub output: OutputChoice,
}

/// What becomes of the body of a successful answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseUse {
    /// It becomes the record's value.
    #[default]
    Replace,
    /// It is dropped; the record keeps its value.
    Keep,
}

/// Files of certificates, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Authorities that are trusted in addition to the machine's own.
    pub ca_file: Option<PathBuf>,
    /// Our certificate, with those between it and the authority behind it.
    pub cert_file: Option<PathBuf>,
    /// Its key.
    pub key_file: Option<PathBuf>,
}

/// Settings that cannot be followed; the text names the field and shows no secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct HttpSetupError {
    /// The field of the configuration, such as `http.header_files.authorization`.
    pub field: String,
    /// What is wrong and what would be right.
    pub problem: String,
}

impl HttpSettings {
    /// `POST` to an endpoint: 5 s for a call, 2 s for a connection, 2 quick retries after 100 ms, the
    /// response of at most 1 MiB becomes the value, `Retry-After` of at most one hour.
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

    /// The headers of every request; those in files are read now.
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
            // Any of them may be a key of an API; nobody needs to see one.
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

/// A URL for people: without user, password, query and fragment.
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
