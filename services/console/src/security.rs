//! What protects every page: headers of the response, and requests that are refused.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

/// No inline script, no inline style, nothing from another host, and no frame around a page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
                      form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "same-origin"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
];

/// The host names under which browsers reach the console, besides addresses and `localhost`.
pub(crate) type Hosts = Arc<[String]>;

/// Refuses requests that no page makes, and adds the headers. Pages show what their viewer may see, so nothing keeps them.
pub(crate) async fn protect(State(hosts): State<Hosts>, request: Request, next: Next) -> Response {
    let mut response = if !is_known_host(&request, &hosts) {
        let advice = "The console does not serve this host name: open it by its address, or as localhost.\n";
        (StatusCode::MISDIRECTED_REQUEST, advice).into_response()
    } else if matches!(*request.method(), Method::GET | Method::HEAD) {
        next.run(request).await
    } else {
        StatusCode::METHOD_NOT_ALLOWED.into_response()
    };
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

/// Whether the request names this console. A page of another site can make its own name point to this machine (DNS rebinding), but its requests
/// name that site then.
fn is_known_host(request: &Request, hosts: &[String]) -> bool {
    let of_header = request.headers().get(header::HOST);
    let of_header = of_header.and_then(|host| Authority::try_from(host.as_bytes()).ok());
    // HTTP/2 has the host in the address of the request.
    let Some(authority) = request.uri().authority().cloned().or(of_header) else {
        return false;
    };
    let host = authority.host();
    let address = host.trim_start_matches('[').trim_end_matches(']');
    address.parse::<IpAddr>().is_ok()
        || host.eq_ignore_ascii_case("localhost")
        || hosts.iter().any(|known| known.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::routing::get;
    use tower::ServiceExt as _;

    use super::*;

    async fn respond(method: Method, uri: &str, host: Option<&str>) -> Response {
        let hosts = Hosts::from(["console.example".to_owned()]);
        let routes = Router::new()
            .route("/", get(async || "page"))
            .layer(axum::middleware::from_fn_with_state(hosts, protect));
        let mut request = Request::builder().method(method).uri(uri);
        if let Some(host) = host {
            request = request.header(header::HOST, host);
        }
        let request = request.body(Body::empty()).unwrap();
        routes.oneshot(request).await.unwrap()
    }

    #[tokio::test]
    async fn foreign_hosts_are_refused() {
        let get = async |uri, host| respond(Method::GET, uri, host).await.status();
        for host in [
            "127.0.0.1:8484",
            "[::1]:8484",
            "LocalHost",
            "console.example:443",
            "10.0.0.7",
        ] {
            assert_eq!(get("/", Some(host)).await, StatusCode::OK, "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example:8484",
            "",
            "a b",
        ] {
            assert_eq!(
                get("/", Some(host)).await,
                StatusCode::MISDIRECTED_REQUEST,
                "{host}"
            );
        }
        assert_eq!(get("/", None).await, StatusCode::MISDIRECTED_REQUEST);
        assert_eq!(
            get("http://evil.example/", None).await,
            StatusCode::MISDIRECTED_REQUEST
        );
    }

    #[tokio::test]
    async fn every_response_has_headers() {
        let cases = [
            (Method::GET, "/", StatusCode::OK),
            (Method::POST, "/", StatusCode::METHOD_NOT_ALLOWED),
            (Method::GET, "/missing", StatusCode::NOT_FOUND),
        ];
        for (method, path, expected) in cases {
            let response = respond(method, path, Some("localhost")).await;
            assert_eq!(response.status(), expected, "{path}");
            for (name, value) in HEADERS {
                assert_eq!(response.headers()[&name], value, "{path} {name}");
            }
            assert_eq!(response.headers()[header::CACHE_CONTROL], "no-store", "{path}");
        }
    }
}
