//! What protects every page: headers of the response, and requests that are refused.

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::site::{Site, Sites};

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

/// Refuses requests that no page makes, and adds the headers. Pages show what their viewer may see, so nothing keeps them.
pub(crate) async fn protect(State(sites): State<Sites>, request: Request, next: Next) -> Response {
    let mut response = admit(&sites, request, next).await;
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    response
}

async fn admit(sites: &Sites, mut request: Request, next: Next) -> Response {
    let Some(site) = sites.of(&request) else {
        let advice = "The console does not serve this host name: open it as localhost, or add the name to console.hosts.\n";
        return (StatusCode::MISDIRECTED_REQUEST, advice).into_response();
    };
    let is_admitted = match *request.method() {
        Method::GET => is_wanted(&request),
        Method::POST => is_from(&site, &request),
        // A HEAD would cost as much as a GET.
        _ => return (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, "GET, POST")]).into_response(),
    };
    if !is_admitted {
        let advice = "The console answers its own pages only: open it, and go on from there.\n";
        return (StatusCode::FORBIDDEN, advice).into_response();
    }
    request.extensions_mut().insert(site);
    next.run(request).await
}

/// Whether a page of this console sends a form. No page can change the headers by which browsers tell it.
fn is_from(site: &Site, request: &Request) -> bool {
    let value = |name: &str| request.headers().get(name).map(HeaderValue::as_bytes);
    match value("sec-fetch-site") {
        Some(from) => from == b"same-origin",
        // Browsers leave it out on plain HTTP, except on this machine.
        None => value("origin") == Some(site.origin.as_bytes()),
    }
}

/// Whether a person asks for it. Pages read topics and leave entries in the audit log, so neither images of other sites nor pages that a browser
/// reads ahead may ask for them. Browsers send these headers; other clients act for a person.
fn is_wanted(request: &Request) -> bool {
    let value = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    let is_foreign = matches!(value("sec-fetch-site"), Some("cross-site" | "same-site"));
    let is_link = value("sec-fetch-mode") == Some("navigate") && value("sec-fetch-dest") == Some("document");
    let is_ahead = value("sec-purpose").is_some_and(|purpose| purpose.contains("prefetch"));
    !is_ahead && (!is_foreign || is_link)
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::routing::get;
    use tower::ServiceExt as _;

    use super::*;

    async fn respond(method: Method, uri: &str, host: Option<&str>) -> Response {
        let sites = Sites::new(&["console.example".to_owned()], false);
        let routes = Router::new()
            .route("/", get(async || "page"))
            .layer(axum::middleware::from_fn_with_state(sites, protect));
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
        for host in ["127.0.0.1:8484", "[::1]:8484", "LocalHost", "console.example:443"] {
            assert_eq!(get("/", Some(host)).await, StatusCode::OK, "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example:8484",
            "10.0.0.7",
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

    #[test]
    fn unwanted_requests_are_refused() {
        let request = |headers: &[(&str, &str)]| {
            let request = headers.iter().fold(Request::builder(), |request, (name, value)| {
                request.header(*name, *value)
            });
            is_wanted(&request.body(Body::empty()).unwrap())
        };
        let (site, mode, dest) = ("sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest");
        assert!(request(&[]) && request(&[(site, "same-origin"), (mode, "cors")]));
        assert!(request(&[
            (site, "cross-site"),
            (mode, "navigate"),
            (dest, "document")
        ]));
        assert!(!request(&[
            (site, "cross-site"),
            (mode, "no-cors"),
            (dest, "image")
        ]));
        assert!(!request(&[
            (site, "same-site"),
            (mode, "navigate"),
            (dest, "iframe")
        ]));
        assert!(!request(&[("sec-purpose", "prefetch;prerender")]));
    }

    #[test]
    fn only_own_pages_send_forms() {
        let own = "https://console.example:8484";
        let site = Site {
            origin: own.to_owned(),
            is_secure: true,
        };
        let sent = |headers: &[(&str, &str)]| {
            let request = headers.iter().fold(Request::builder(), |request, (name, value)| {
                request.header(*name, *value)
            });
            is_from(&site, &request.body(Body::empty()).unwrap())
        };
        let (from, origin) = ("sec-fetch-site", "origin");
        assert!(sent(&[(from, "same-origin"), (origin, own)]) && sent(&[(origin, own)]));
        for refused in [
            &[][..],
            &[(from, "cross-site"), (origin, "https://evil.example")],
            &[(from, "same-site"), (origin, own)],
            &[(from, "none")],
            &[(origin, "null")],
            &[(origin, "https://console.example")],
            &[(origin, "https://evil.example/?https://console.example:8484")],
        ] {
            assert!(!sent(refused), "{refused:?}");
        }
    }

    #[tokio::test]
    async fn every_response_has_headers() {
        let cases = [
            (Method::GET, "/", StatusCode::OK),
            (Method::HEAD, "/", StatusCode::METHOD_NOT_ALLOWED),
            (Method::POST, "/", StatusCode::FORBIDDEN),
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
