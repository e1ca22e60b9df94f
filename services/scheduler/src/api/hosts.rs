//! The hosts that requests may name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use prometheus_client::metrics::counter::Counter;
use redeliver_proto::error;
use tonic::Code;

use super::limits::is_grpc;
use super::problem::Problem;

/// A host. Addresses have many spellings, so they are compared as addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// In lower case.
    Name(String),
    /// An IPv4 address is one also if it is written as an IPv6 address.
    Address(IpAddr),
}

impl Host {
    /// A host of the configuration, without port and brackets.
    pub(crate) fn new(host: &str) -> Self {
        match host.parse::<IpAddr>() {
            Ok(address) => Self::Address(address.to_canonical()),
            Err(_) => Self::Name(host.to_ascii_lowercase()),
        }
    }

    /// The host of a request, which names it with or without a port. `None` if it is malformed.
    fn of_authority(authority: &str) -> Option<Self> {
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (address, port) = rest.split_once(']')?;
                let address: Ipv6Addr = address.parse().ok()?;
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
        (port.is_empty() || port.strip_prefix(':').is_some_and(is_port)).then_some(host)
    }
}

/// Refuses requests that name another host than these.
pub(crate) async fn check_host(
    accepted: Arc<[Host]>,
    refused: Counter,
    request: Request<Body>,
    next: Next,
) -> Response {
    let named = request.uri().authority().map(axum::http::uri::Authority::as_str);
    let header = request.headers().get(header::HOST);
    let named = named.or_else(|| header.and_then(|value| value.to_str().ok()));
    let host = named.and_then(Host::of_authority);
    if host.is_some_and(|host| accepted.contains(&host)) {
        return next.run(request).await;
    }
    refused.inc();
    let problem = "this server does not accept requests for this host; see scheduler.allowed_hosts";
    if is_grpc(request.headers()) {
        return error::status(Code::PermissionDenied, problem, "HOST", []).into_http();
    }
    Problem::new(StatusCode::MISDIRECTED_REQUEST, "host", problem).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_a_request_has_neither_port_nor_brackets() {
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
            assert_eq!(
                Host::of_authority(authority),
                Some(Host::new(host)),
                "{authority}"
            );
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
            assert_eq!(Host::of_authority(malformed), None, "{malformed}");
        }
        for (authority, other) in [("[::2]", "::1"), ("127.0.0.2", "127.0.0.1"), ("", "localhost")] {
            assert_ne!(
                Host::of_authority(authority),
                Some(Host::new(other)),
                "{authority}"
            );
        }
    }
}
