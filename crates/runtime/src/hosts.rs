//! The hosts that HTTP requests name.
//!
//! A web page can let a browser send requests to any address that the browser reaches, after the name of the page in the DNS resolves to
//! that address (DNS rebinding). The browser then takes the answers for those of the page, so that the page can read them. Such requests
//! name the host of the page, which is a name in the public DNS.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use axum::extract::Request;
use axum::http::{HeaderValue, header};
use redeliver_core::failure::bounded_text;

/// How much of a host is logged, in bytes. No name in the DNS is longer.
const LOGGED: usize = 253;

/// A host. Addresses have many spellings, so they are compared as addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// In lower case.
    Name(String),
    /// An IPv4 address may be written as an IPv6 address.
    Address(IpAddr),
}

impl Host {
    /// A host of the configuration, without port and brackets.
    #[must_use]
    pub fn new(host: &str) -> Self {
        match host.parse::<IpAddr>() {
            Ok(address) => Self::Address(address.to_canonical()),
            Err(_) => Self::Name(host.to_ascii_lowercase()),
        }
    }

    /// The host of this machine or container, as its kernel knows it. `None` on other systems than Linux.
    #[must_use]
    pub fn own() -> Option<Self> {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
        Some(Self::new(name.trim_end()))
    }

    /// The host that a request names, with or without a port. `None` if it names none. The result is an error if it is malformed.
    #[must_use]
    pub fn of_request(request: &Request) -> Option<Result<Self, MalformedHost>> {
        let named = std::str::from_utf8(named(request)?).ok();
        let named = named.filter(|named| named.is_ascii());
        Some(named.ok_or(MalformedHost).and_then(Self::of_authority))
    }

    fn of_authority(authority: &str) -> Result<Self, MalformedHost> {
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (address, port) = rest.split_once(']').ok_or(MalformedHost)?;
                let address: Ipv6Addr = address.parse().map_err(|_| MalformedHost)?;
                (Self::Address(IpAddr::from(address).to_canonical()), port)
            }
            None => {
                let (name, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
                let address = name.parse::<Ipv4Addr>();
                let name = |_| Self::Name(name.to_ascii_lowercase());
                (
                    address.map_or_else(name, |address| Self::Address(address.into())),
                    port,
                )
            }
        };
        let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
        if port.is_empty() || port.strip_prefix(':').is_some_and(is_port) {
            Ok(host)
        } else {
            Err(MalformedHost)
        }
    }

    /// Whether no web page can have this host: it is an address, or a name without a dot, such as `localhost` or the name of a container. The
    /// public DNS has no such names.
    #[must_use]
    pub fn is_private(&self) -> bool {
        match self {
            Self::Address(_) => true,
            Self::Name(name) => !name.contains('.'),
        }
    }
}

fn named(request: &Request) -> Option<&[u8]> {
    let authority = request.uri().authority();
    let authority = authority.map(|authority| authority.as_str().as_bytes());
    authority.or_else(|| request.headers().get(header::HOST).map(HeaderValue::as_bytes))
}

/// The host that a request names, for the log: printable and at most 253 bytes.
#[must_use]
pub fn loggable_host(request: &Request) -> String {
    let named = named(request).unwrap_or_default();
    bounded_text(&named.escape_ascii().to_string(), LOGGED)
}

/// The host of a request is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the host of the request is malformed")]
pub struct MalformedHost;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_has_no_port_or_brackets() {
        for (authority, host) in [
            ("LocalHost:50052", "localhost"),
            ("localhost", "LOCALHOST"),
            ("127.0.0.1:1", "127.0.0.1"),
            ("127.0.0.1:", "127.0.0.1"),
            ("[::1]:50052", "::1"),
            ("[0:0:0:0:0:0:0:1]", "::1"),
            ("[2001:DB8::A]", "2001:db8:0::a"),
            ("[::ffff:127.0.0.1]:1", "127.0.0.1"),
            ("[::ffff:7f00:1]", "127.0.0.1"),
            ("127.0.0.1", "::ffff:127.0.0.1"),
        ] {
            assert_eq!(Host::of_authority(authority), Ok(Host::new(host)), "{authority}");
        }
        for malformed in [
            "[::1",
            "[::1]x",
            "[::1]x:1",
            "[localhost]",
            "localhost:x",
            "localhost:1:1",
            "::1",
            "[]",
        ] {
            assert_eq!(Host::of_authority(malformed), Err(MalformedHost), "{malformed}");
        }
        for (authority, other) in [("[::2]", "::1"), ("127.0.0.2", "127.0.0.1"), ("", "localhost")] {
            assert_ne!(Host::of_authority(authority), Ok(Host::new(other)), "{authority}");
        }
    }

    #[test]
    fn logged_host_is_short_and_printable() {
        let logged = |host: &[u8]| {
            let request = Request::builder().header(header::HOST, host);
            loggable_host(&request.body(axum::body::Body::empty()).unwrap())
        };
        assert_eq!(logged(b"rebound.example:9464"), "rebound.example:9464");
        let hostile = "a\u{202e}\t.example".to_owned() + &"x".repeat(5_000);
        let logged = logged(hostile.as_bytes());
        assert!(logged.starts_with(r"a\xe2\x80\xae\t.example"), "{logged}");
        assert!(
            logged.len() == LOGGED && logged.bytes().all(|byte| byte.is_ascii_graphic()),
            "{logged}"
        );
    }

    #[test]
    fn web_names_are_not_private() {
        for private in ["localhost", "enricher", "10.1.2.3", "::1", "fe80::1"] {
            assert!(Host::new(private).is_private(), "{private}");
        }
        for public in [
            "rebound.example",
            "10.1.2.3.rebound.example",
            "localhost.",
            "127.1",
        ] {
            assert!(!Host::new(public).is_private(), "{public}");
        }
    }
}
