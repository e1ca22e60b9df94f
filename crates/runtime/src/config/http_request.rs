//! The parts of an HTTP request as they may be configured. Whoever makes requests reads them here too, so that
//! nothing which is called valid is refused later.

use axum::http::{HeaderName, HeaderValue, Method, Uri};
use url::Url;

/// Headers that a configuration would only break: the framing of requests, and what differs by record.
const FIXED: [&str; 6] = [
    "connection",
    "content-length",
    "transfer-encoding",
    "idempotency-key",
    "traceparent",
    "tracestate",
];

/// Where requests go, `http://` or `https://`.
///
/// # Errors
/// What is wrong with it, without repeating it: it may hold a secret.
pub fn endpoint_url(text: &str) -> Result<Url, String> {
    let right = "write http:// or https:// and a host, such as http://localhost:8080/path";
    let url: Url = text
        .parse()
        .map_err(|error| format!("is not a URL ({error}): {right}"))?;
    // A missing slash would be forgiven and hide a mistake.
    let is_http = ["http", "https"].contains(&url.scheme()) && text.contains("://");
    if !is_http {
        return Err(format!("is not an HTTP URL: {right}"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("holds a user name or a password; give them in a header `authorization`".to_owned());
    }
    // What is called is of this type.
    match Uri::try_from(url.as_str()) {
        Ok(_) => Ok(url),
        Err(error) => Err(format!("is not a URL that can be called ({error}): {right}")),
    }
}

/// The method of requests.
///
/// # Errors
/// What is wrong with it.
pub fn request_method(text: &str) -> Result<Method, String> {
    // A tunnel is not a call, and methods differ by case.
    Method::from_bytes(text.as_bytes())
        .ok()
        .filter(|method| *method != Method::CONNECT && text.bytes().all(|byte| byte.is_ascii_uppercase()))
        .ok_or_else(|| {
            format!("`{text}` is not the method of a call: write POST, PUT or another in capitals")
        })
}

/// The name of a header of requests.
///
/// # Errors
/// What is wrong with it.
pub fn header_name(text: &str) -> Result<HeaderName, &'static str> {
    let name = HeaderName::from_bytes(text.as_bytes()).map_err(|_| "is not the name of an HTTP header")?;
    if FIXED.contains(&name.as_str()) {
        return Err("is set by redeliver itself and cannot be configured");
    }
    Ok(name)
}

/// The value of a header of requests.
///
/// # Errors
/// What is wrong with it, without repeating it.
pub fn header_value(text: &str) -> Result<HeaderValue, &'static str> {
    HeaderValue::from_str(text)
        .map_err(|_| "has a value that an HTTP header cannot have: write one line of text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_called() {
        for right in [
            "http://h",
            "https://h:8443/a?b=c%20d",
            "http://[::1]:80/",
            "http://h/{id}?q=\"a b\"",
        ] {
            assert!(endpoint_url(right).is_ok(), "{right}");
        }
        for (wrong, problem) in [
            ("", "is not a URL"),
            ("h:80/a", "is not an HTTP URL"),
            ("http://", "is not a URL"),
            ("http://h:99999/", "is not a URL"),
            ("http:/h/", "is not an HTTP URL"),
            ("ftp://h", "is not an HTTP URL"),
            ("http://me@h", "holds a user name"),
            ("http://:pw@h", "holds a user name"),
        ] {
            let error = endpoint_url(wrong).unwrap_err();
            assert!(error.starts_with(problem), "{wrong}: {error}");
        }
    }

    #[test]
    fn methods_and_headers_that_a_call_may_have() {
        for right in ["POST", "PUT", "PROPFIND"] {
            assert!(request_method(right).is_ok(), "{right}");
        }
        for wrong in ["", "post", "CONNECT", "A B"] {
            assert!(request_method(wrong).is_err(), "{wrong}");
        }
        assert!(header_name("X-Key").is_ok() && header_name("a b").is_err());
        for fixed in FIXED {
            assert!(header_name(&fixed.to_uppercase()).is_err(), "{fixed}");
        }
        assert!(header_value("one line").is_ok() && header_value("two\nlines").is_err());
    }
}
