//! Validation of the configured parts of an HTTP request. The code that sends requests uses the same functions, so that
//! it cannot reject a valid configuration later.

use std::fmt;

use axum::http::{HeaderName, HeaderValue, Method, Uri};
use url::{Host, Url};

use super::secret::redact_url;

/// Headers that cannot be configured: they frame the request or differ for each record.
const RESERVED: [&str; 6] = [
    "connection",
    "content-length",
    "transfer-encoding",
    "idempotency-key",
    "traceparent",
    "tracestate",
];

/// Parses the URL of an endpoint, `http://` or `https://`.
///
/// # Errors
/// What is wrong and what is valid. The URL is not repeated, because it may contain a secret.
pub fn endpoint_url(text: &str) -> Result<Url, String> {
    let valid = "write http:// or https:// and a host, such as http://localhost:8080/path";
    let url = http_url(text, valid)?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err("contains a user name or password; set the header `authorization` instead".to_owned());
    }
    // The HTTP client needs a `Uri`, which is stricter than a URL.
    match Uri::try_from(url.as_str()) {
        Ok(_) => Ok(url),
        Err(error) => Err(format!("is not a URL for a request ({error}): {valid}")),
    }
}

/// `valid` says what is valid, and ends the errors.
fn http_url(text: &str, valid: &str) -> Result<Url, String> {
    let url: Url = text
        .parse()
        .map_err(|error| format!("is not a URL ({error}): {valid}"))?;
    // The parser accepts `http:/host` too, which is a typing error.
    match ["http", "https"].contains(&url.scheme()) && text.contains("://") {
        true => Ok(url),
        false => Err(format!("is not an HTTP URL: {valid}")),
    }
}

/// Which proxy the connections to an endpoint use.
#[derive(Clone, PartialEq, Eq)]
pub enum ProxyChoice {
    /// That of the environment variables `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`; for an endpoint on this machine none.
    Environment,
    /// None.
    Direct,
    /// The one with this URL, which can contain a user name and a password.
    Url(Url),
}

impl fmt::Debug for ProxyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment => f.write_str("Environment"),
            Self::Direct => f.write_str("Direct"),
            Self::Url(url) => write!(f, "Url({})", redact_url(url.as_str())),
        }
    }
}

/// Parses the choice of a proxy: its URL, or `none`.
///
/// # Errors
/// What is wrong and what is valid. The URL is not repeated, because it may contain a password.
pub(super) fn proxy_choice(text: &str) -> Result<ProxyChoice, String> {
    if text == "none" {
        return Ok(ProxyChoice::Direct);
    }
    let valid = "write none, or the URL of an HTTP proxy, such as http://proxy.example:3128";
    let url = http_url(text, valid)?;
    // Only passwords are kept out of logs.
    if !url.username().is_empty() && url.password().is_none() {
        return Err("has a user name without a password: write http://USER:PASSWORD@HOST:PORT".to_owned());
    }
    Ok(ProxyChoice::Url(url))
}

/// Parses the URL of an issuer. What is exchanged with it must be neither read nor changed on its way, so only loopback
/// needs no TLS. `because` completes the error.
///
/// # Errors
/// What is wrong and what is valid.
pub fn issuer_url(text: &str, because: &str) -> Result<Url, String> {
    let url = endpoint_url(text)?;
    if url.scheme() == "https" || is_loopback(&url) {
        Ok(url)
    } else {
        Err(format!("must begin with https://, because {because}"))
    }
}

/// Whether the host of a URL is this machine.
#[must_use]
pub fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost",
        None => false,
    }
}

/// Parses an HTTP method.
///
/// # Errors
/// What is wrong and what is valid.
pub fn request_method(text: &str) -> Result<Method, String> {
    // CONNECT opens a tunnel. Methods are case-sensitive, so `post` is a typing error.
    Method::from_bytes(text.as_bytes())
        .ok()
        .filter(|method| *method != Method::CONNECT && text.bytes().all(|byte| byte.is_ascii_uppercase()))
        .ok_or_else(|| {
            format!("`{text}` is not a supported method: write POST, PUT or another method in upper case")
        })
}

/// Parses the name of a request header.
///
/// # Errors
/// Why it cannot be configured.
pub fn header_name(text: &str) -> Result<HeaderName, &'static str> {
    let name = HeaderName::from_bytes(text.as_bytes()).map_err(|_| "is not a valid HTTP header name")?;
    if RESERVED.contains(&name.as_str()) {
        return Err("is set by Redeliver and cannot be configured");
    }
    Ok(name)
}

/// Parses the value of a request header.
///
/// # Errors
/// What is valid. The value is not repeated, because it may be a secret.
pub fn header_value(text: &str) -> Result<HeaderValue, &'static str> {
    HeaderValue::from_str(text).map_err(|_| "is not a valid HTTP header value: write one line of text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_http_urls_without_credentials() {
        for valid in [
            "http://h",
            "https://h:8443/a?b=c%20d",
            "http://[::1]:80/",
            "http://h/{id}?q=\"a b\"",
        ] {
            assert!(endpoint_url(valid).is_ok(), "{valid}");
        }
        for (invalid, problem) in [
            ("", "is not a URL"),
            ("h:80/a", "is not an HTTP URL"),
            ("http://", "is not a URL"),
            ("http://h:99999/", "is not a URL"),
            ("http:/h/", "is not an HTTP URL"),
            ("ftp://h", "is not an HTTP URL"),
            ("http://me@h", "contains a user name"),
            ("http://:pw@h", "contains a user name"),
        ] {
            let error = endpoint_url(invalid).unwrap_err();
            assert!(error.starts_with(problem), "{invalid}: {error}");
        }
    }

    #[test]
    fn proxy_is_url_or_none() {
        assert_eq!(proxy_choice("none"), Ok(ProxyChoice::Direct));
        let proxy = proxy_choice("http://me:hunter2@proxy:3128").unwrap();
        assert_eq!(format!("{proxy:?}"), "Url(http://me:redacted@proxy:3128/)");
        for invalid in ["", "proxy:3128", "socks5://proxy", "None", "http://token@proxy"] {
            assert!(proxy_choice(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn invalid_requests_are_rejected() {
        for valid in ["POST", "PUT", "PROPFIND"] {
            assert!(request_method(valid).is_ok(), "{valid}");
        }
        for invalid in ["", "post", "CONNECT", "A B"] {
            assert!(request_method(invalid).is_err(), "{invalid}");
        }
        assert!(header_name("X-Key").is_ok() && header_name("a b").is_err());
        for reserved in RESERVED {
            assert!(header_name(&reserved.to_uppercase()).is_err(), "{reserved}");
        }
        assert!(header_value("one line").is_ok() && header_value("two\nlines").is_err());
    }
}
