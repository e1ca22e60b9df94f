//! What the HTTP handler is made of, checked.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr as _;
use std::time::Duration;

use redeliver_core::classification::Classification;
use reqwest::header::{
    CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING, USER_AGENT,
};
use reqwest::{Method, Url};

use super::request::{IDEMPOTENCY_KEY, TRACEPARENT, TRACESTATE};
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
            max_response_bytes: 1 << 20,
            max_retry_after: Duration::from_secs(3_600),
            headers: Vec::new(),
            header_files: Vec::new(),
            classification: Classification::default(),
            tls: TlsFiles::default(),
            output: OutputChoice::default(),
        }
    }

    pub(super) fn parsed_url(&self) -> Result<Url, HttpSetupError> {
        // The URL is never repeated: it may hold a secret.
        let wrong = |problem: &str| HttpSetupError::new("url", problem);
        let url = Url::parse(&self.url).map_err(|error| {
            wrong(&format!(
                "is not a URL: {error}; write http:// or https:// and a host"
            ))
        })?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(wrong("is not an HTTP URL; write http:// or https:// and a host"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(wrong(
                "holds a user name or a password; give them in a header `authorization` by http.header_files",
            ));
        }
        Ok(url)
    }

    pub(super) fn parsed_method(&self) -> Result<Method, HttpSetupError> {
        Method::from_str(&self.method)
            .ok()
            // A tunnel is not a call, and methods differ by case.
            .filter(|method| {
                *method != Method::CONNECT && self.method.bytes().all(|byte| byte.is_ascii_uppercase())
            })
            .ok_or_else(|| {
                let problem = "is not a method; write POST, PUT or another in capitals";
                HttpSetupError::new("method", problem)
            })
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
            let read = std::fs::read_to_string(path).map_err(|error| {
                HttpSetupError::new(&field, format!("cannot read {}: {error}", path.display()))
            })?;
            let value = read.trim_end_matches(['\n', '\r']);
            if value.is_empty() {
                return Err(HttpSetupError::new(
                    &field,
                    format!("the file {} is empty", path.display()),
                ));
            }
            named.push((field, name, value.to_owned()));
        }
        for (field, name, value) in named {
            let wrong = |problem: &str| HttpSetupError::new(&field, problem);
            let name = HeaderName::from_str(name).map_err(|_| wrong("is not the name of an HTTP header"))?;
            if FIXED.contains(&name) {
                return Err(wrong("is set by redeliver itself and cannot be configured"));
            }
            let mut value = HeaderValue::from_str(&value)
                .map_err(|_| wrong("is not a value that an HTTP header can have; write one line of text"))?;
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

/// Headers that a configuration would only break: the framing of requests, and what differs by record.
const FIXED: [HeaderName; 6] = [
    CONNECTION,
    CONTENT_LENGTH,
    TRANSFER_ENCODING,
    IDEMPOTENCY_KEY,
    TRACEPARENT,
    TRACESTATE,
];

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
