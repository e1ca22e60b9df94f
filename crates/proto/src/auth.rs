//! What clients add to each request: bearer tokens, which `redeliver_service::identity` checks, and the reason of a call.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode, utf8_percent_encode};
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

const HEADER: &str = "authorization";

/// The metadata with the reason of a call, for the audit log, in percent-encoded UTF-8.
pub const REASON: &str = "redeliver-reason";

/// What metadata cannot contain, and `%`.
const ENCODED: &AsciiSet = &CONTROLS.add(b'%');

/// Adds the token and the reason, if there are any, to each request of a client.
#[derive(Clone, Debug, Default)]
pub struct SendToken {
    token: Option<MetadataValue<Ascii>>,
    reason: Option<MetadataValue<Ascii>>,
}

/// The token contains characters that cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the token contains characters that cannot be sent; it must be one line of ASCII")]
pub struct UnusableToken;

impl SendToken {
    /// Sends this token; `None` sends none.
    ///
    /// # Errors
    /// If the token contains characters that cannot be sent.
    pub fn new(token: Option<&str>) -> Result<Self, UnusableToken> {
        let value = |token: &str| {
            let mut value: MetadataValue<Ascii> =
                format!("Bearer {token}").parse().map_err(|_| UnusableToken)?;
            // Keeps the token out of `Debug` output and of the HTTP/2 header compression table.
            value.set_sensitive(true);
            Ok(value)
        };
        Ok(Self {
            token: token.map(value).transpose()?,
            reason: None,
        })
    }

    /// Also sends this reason with each request.
    #[must_use]
    pub fn with_reason(self, reason: &str) -> Self {
        let encoded = utf8_percent_encode(reason, ENCODED).to_string();
        Self {
            // Only ASCII is left.
            reason: encoded.parse().ok(),
            ..self
        }
    }
}

/// The reason in the metadata of a request; empty if there is none, and `None` if it is not UTF-8.
#[must_use]
pub fn reason(metadata: &MetadataMap) -> Option<String> {
    decode_reason(metadata.get(REASON).map_or(&b""[..], MetadataValue::as_bytes))
}

/// A reason as it is sent; `None` if it is not UTF-8.
#[must_use]
pub fn decode_reason(encoded: &[u8]) -> Option<String> {
    let decoded = percent_decode(encoded).decode_utf8();
    decoded.ok().map(String::from)
}

impl Interceptor for SendToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.token {
            request.metadata_mut().insert(HEADER, value.clone());
        }
        if let Some(value) = &self.reason {
            request.metadata_mut().insert(REASON, value.clone());
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_sent_and_hidden() {
        let mut send = SendToken::new(Some("s3cret")).unwrap();
        let sent = send.call(Request::new(())).unwrap();
        assert_eq!(sent.metadata().get(HEADER).unwrap(), "Bearer s3cret");
        let shown = format!("{send:?} {:?}", sent.metadata());
        assert!(!shown.contains("s3cret"), "{shown}");
        let unchanged = SendToken::new(None).unwrap().call(Request::new(())).unwrap();
        assert!(unchanged.metadata().is_empty());
        assert_eq!(SendToken::new(Some("a\nb")).unwrap_err(), UnusableToken);
    }

    #[test]
    fn reason_arrives_unchanged() {
        for text in ["ticket 4711", "Störung: 100 %\nsiehe 4711 ☎", ""] {
            let mut send = SendToken::default().with_reason(text);
            let sent = send.call(Request::new(())).unwrap();
            assert_eq!(reason(sent.metadata()).as_deref(), Some(text));
        }
        let mut metadata = MetadataMap::new();
        assert_eq!(reason(&metadata).as_deref(), Some(""));
        metadata.insert(REASON, "incident%2042".parse().unwrap());
        assert_eq!(reason(&metadata).as_deref(), Some("incident 42"));
        metadata.insert(REASON, "%ff".parse().unwrap());
        assert_eq!(reason(&metadata), None);
    }
}
