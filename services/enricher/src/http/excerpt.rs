//! What a dead letter says of the response to a failed call.

use redeliver_core::failure::{Excerpt, RESPONSE_LIMIT};
use reqwest::Response;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use tokio::time::timeout;

use super::{DRAIN_BYTES, DRAIN_TIMEOUT, content_encoding};

/// The beginning of the body of an error response.
#[derive(Default)]
pub(super) struct Beginning {
    bytes: Vec<u8>,
    is_whole: bool,
}

impl Beginning {
    /// Reads a short body to its end, and keeps its beginning. A connection with an unread body cannot be reused, and new
    /// connections would add to the load of an endpoint that already fails.
    pub(super) async fn drain(response: &mut Response) -> Self {
        let mut beginning = Self::default();
        let read = async {
            let mut length = 0;
            loop {
                // A failure does not matter: the status alone decides what happens to the record.
                let Ok(chunk) = response.chunk().await else { break };
                let Some(chunk) = chunk else {
                    beginning.is_whole = beginning.bytes.len() == length;
                    break;
                };
                length += chunk.len();
                let room = RESPONSE_LIMIT - beginning.bytes.len();
                beginning.bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
                if length > DRAIN_BYTES {
                    break;
                }
            }
        };
        drop(timeout(DRAIN_TIMEOUT, read).await);
        beginning
    }

    /// The excerpt of a body with these headers.
    pub(super) fn excerpt(self, headers: &HeaderMap) -> Option<Excerpt> {
        let (body, is_whole) = content_encoding::beginning(headers, self.bytes, self.is_whole)?;
        excerpt(headers.get(CONTENT_TYPE), &body, is_whole)
    }
}

/// The excerpt of a decoded body that begins like this. `None` if its content type says that it is no text.
pub(super) fn excerpt(
    content_type: Option<&HeaderValue>,
    beginning: &[u8],
    is_whole: bool,
) -> Option<Excerpt> {
    let is_text = content_type.is_none_or(|value| {
        let essence = value.to_str().unwrap_or_default();
        let essence = essence.split(';').next().unwrap_or_default();
        let essence = essence.trim().to_ascii_lowercase();
        essence.starts_with("text/") || essence.ends_with("json") || essence.ends_with("xml")
    });
    is_text.then(|| Excerpt::of(beginning, is_whole)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_has_an_excerpt() {
        let of = |content_type: &'static str| {
            let content_type = HeaderValue::from_static(content_type);
            excerpt(Some(&content_type), b"busy", true)
        };
        for text in [
            "text/plain",
            "Text/HTML; charset=utf-8",
            "application/json",
            "application/problem+json ;a=b",
            "application/soap+xml",
        ] {
            assert!(of(text).is_some(), "{text}");
        }
        for other in [
            "",
            "application/octet-stream",
            "image/png",
            "application/grpc; a=text/plain",
        ] {
            assert!(of(other).is_none(), "{other}");
        }
        assert!(excerpt(None, b"busy", true).is_some());
        assert!(excerpt(None, b"\x00\xff", true).is_none());
    }
}
