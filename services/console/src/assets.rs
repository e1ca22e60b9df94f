//! The style sheet and the scripts. Their addresses contain a version, so that browsers keep them until it changes.

use std::hash::{DefaultHasher, Hasher as _};
use std::sync::LazyLock;

use axum::Router;
use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;

/// Names, content types and contents.
const ASSETS: [(&str, &str, &str); 4] = [
    (
        "console.css",
        "text/css; charset=utf-8",
        include_str!("../static/console.css"),
    ),
    (
        "console.js",
        "text/javascript; charset=utf-8",
        include_str!("../static/console.js"),
    ),
    (
        "idiomorph.js",
        "text/javascript; charset=utf-8",
        include_str!("../static/idiomorph-0.8.0.min.js"),
    ),
    ("icon.svg", "image/svg+xml", include_str!("../static/icon.svg")),
];

/// A hash of all contents, in hexadecimal digits.
pub(crate) static VERSION: LazyLock<String> = LazyLock::new(|| {
    let mut hasher = DefaultHasher::new();
    for (_, _, content) in ASSETS {
        hasher.write(content.as_bytes());
    }
    format!("{:016x}", hasher.finish())
});

pub(crate) fn routes() -> Router {
    Router::new().route("/static/{version}/{name}", get(asset))
}

async fn asset(Path((version, name)): Path<(String, String)>) -> Response {
    let Some((_, content_type, content)) = ASSETS.iter().find(|(known, _, _)| *known == name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    // During a rolling update, another replica may have rendered the page.
    let caching = if version == *VERSION {
        "public, max-age=31536000, immutable"
    } else {
        "no-store"
    };
    let headers = [
        (header::CONTENT_TYPE, *content_type),
        (header::CACHE_CONTROL, caching),
    ];
    (headers, *content).into_response()
}
