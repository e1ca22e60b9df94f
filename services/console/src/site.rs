//! The console as a browser addresses it.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{StatusCode, header};

/// The addresses of this console.
#[derive(Clone, Debug)]
pub(crate) struct Sites {
    /// The names and addresses under which browsers reach it, besides those of this machine.
    hosts: Arc<[String]>,
    has_tls: bool,
}

/// The address that a request names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Site {
    /// Scheme, host and port, as in the header `Origin`.
    pub(crate) origin: String,
    /// Whether the browser uses HTTPS.
    pub(crate) is_secure: bool,
}

impl Sites {
    pub(crate) fn new(hosts: &[String], has_tls: bool) -> Self {
        Self {
            hosts: hosts.into(),
            has_tls,
        }
    }

    /// The address that a request names, if it is one of this console. A page of another site can make its own name point to this machine (DNS
    /// rebinding), but its requests name that site then.
    pub(crate) fn of(&self, request: &Request) -> Option<Site> {
        let of_header = request.headers().get(header::HOST);
        let of_header = of_header.and_then(|host| Authority::try_from(host.as_bytes()).ok());
        // HTTP/2 has the host in the address of the request.
        let authority = request.uri().authority().cloned().or(of_header)?;
        let host = authority.host();
        let address = host.trim_start_matches('[').trim_end_matches(']');
        let is_here = host.eq_ignore_ascii_case("localhost")
            || address
                .parse::<IpAddr>()
                .is_ok_and(|address| address.is_loopback());
        let is_known = |known: &String| known.eq_ignore_ascii_case(host) || known == address;
        if !is_here && !self.hosts.iter().any(is_known) {
            return None;
        }
        // Others reach it through a proxy that has the certificate, unless it has one itself.
        let is_secure = self.has_tls || !is_here;
        let scheme = if is_secure { "https" } else { "http" };
        let port = authority
            .port()
            .map_or_else(String::new, |port| format!(":{port}"));
        Some(Site {
            origin: format!("{scheme}://{}{port}", host.to_ascii_lowercase()),
            is_secure,
        })
    }
}

impl<S: Sync> FromRequestParts<S> for Site {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        // `security::protect` has put it there, or has refused the request.
        let site = parts.extensions.get::<Self>().cloned();
        site.ok_or(StatusCode::MISDIRECTED_REQUEST)
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn origins_are_those_of_browsers() {
        let origin = |has_tls, host: &str| {
            let sites = Sites::new(&["console.example".to_owned(), "10.0.0.7".to_owned()], has_tls);
            let request = Request::builder().header(header::HOST, host);
            let site = sites.of(&request.body(Body::empty()).unwrap());
            site.map(|site| site.origin)
        };
        for (has_tls, host, expected) in [
            (false, "127.0.0.1:8484", Some("http://127.0.0.1:8484")),
            (false, "LocalHost", Some("http://localhost")),
            (true, "localhost:8484", Some("https://localhost:8484")),
            (false, "[::1]:8484", Some("http://[::1]:8484")),
            (false, "Console.example", Some("https://console.example")),
            (true, "console.example:8443", Some("https://console.example:8443")),
            (true, "10.0.0.7:8443", Some("https://10.0.0.7:8443")),
            (true, "10.0.0.8", None),
            (true, "console.example.evil.example", None),
            (true, "a@console.example@evil", None),
        ] {
            assert_eq!(origin(has_tls, host).as_deref(), expected, "{host}");
        }
    }
}
