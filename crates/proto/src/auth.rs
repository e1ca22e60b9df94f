//! Bearer tokens: what a server asks for and what a client brings. Health and reflection are served without
//! [`RequireToken`], so that probes and tools work without a token.

use std::fmt;
use std::sync::Arc;

use subtle::ConstantTimeEq;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Code, Request, Status};

use crate::error::status;

const HEADER: &str = "authorization";
const SCHEME: &str = "bearer";

/// Lets only requests pass that bring `authorization: Bearer <token>`, or all when there is no token.
#[derive(Clone)]
pub struct RequireToken(Option<Arc<str>>);

impl RequireToken {
    /// With the token; `None` lets everything pass.
    #[must_use]
    pub fn new(token: Option<&str>) -> Self {
        Self(token.map(Arc::from))
    }

    /// Whether this is what a request may bring as its `authorization`.
    ///
    /// # Errors
    /// UNAUTHENTICATED, which says what is missing or wrong and never what would be right.
    pub fn check(&self, authorization: Option<&[u8]>) -> Result<(), Status> {
        let Some(expected) = &self.0 else {
            return Ok(());
        };
        let given = authorization.ok_or_else(|| {
            unauthenticated(
                "TOKEN_MISSING",
                "this server asks for a token: send the metadata `authorization: Bearer <token>`",
            )
        })?;
        let token = bearer(given).ok_or_else(|| {
            unauthenticated(
                "TOKEN_MALFORMED",
                "the metadata `authorization` is not `Bearer <token>`",
            )
        })?;
        // The time it takes to compare tells nothing of how much of a guess is right.
        if bool::from(token.ct_eq(expected.as_bytes())) {
            Ok(())
        } else {
            Err(unauthenticated(
                "TOKEN_WRONG",
                "the token is not the one that this server asks for",
            ))
        }
    }
}

impl fmt::Debug for RequireToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "RequireToken(<redacted>)"
        } else {
            "RequireToken(none)"
        })
    }
}

impl Interceptor for RequireToken {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let given = request.metadata().get(HEADER).map(MetadataValue::as_bytes);
        self.check(given)?;
        Ok(request)
    }
}

fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = authorization.split_at_checked(SCHEME.len())?;
    let token = rest.strip_prefix(b" ")?;
    scheme.eq_ignore_ascii_case(SCHEME.as_bytes()).then_some(token)
}

fn unauthenticated(reason: &str, message: &str) -> Status {
    status(Code::Unauthenticated, message, reason, [])
}

/// Adds the token, if there is one, to every request of a client.
#[derive(Clone, Debug, Default)]
pub struct SendToken(Option<MetadataValue<Ascii>>);

/// A token that cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the token has characters that cannot be sent: it must be one line of ASCII")]
pub struct UnusableToken;

impl SendToken {
    /// With the token; `None` sends requests as they are.
    ///
    /// # Errors
    /// When it has characters that no request can carry.
    pub fn new(token: Option<&str>) -> Result<Self, UnusableToken> {
        let value = |token: &str| {
            let mut value: MetadataValue<Ascii> =
                format!("Bearer {token}").parse().map_err(|_| UnusableToken)?;
            // Not shown by `Debug`, not kept in a table of compressed headers.
            value.set_sensitive(true);
            Ok(value)
        };
        token.map(value).transpose().map(Self)
    }
}

impl Interceptor for SendToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert(HEADER, value.clone());
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::reason;

    fn sent(token: Option<&str>, required: Option<&str>) -> Result<(), Status> {
        let request = SendToken::new(token).unwrap().call(Request::new(())).unwrap();
        RequireToken::new(required).call(request).map(drop)
    }

    #[test]
    fn what_a_client_sends_a_server_takes() {
        assert!(sent(Some("s3cret"), Some("s3cret")).is_ok());
        assert!(sent(Some("s3cret"), None).is_ok());
        assert!(sent(None, None).is_ok());
    }

    #[test]
    fn without_the_right_token_nothing_passes() {
        for (token, expected) in [
            (None, "TOKEN_MISSING"),
            (Some("s3cre"), "TOKEN_WRONG"),
            (Some("s3crets"), "TOKEN_WRONG"),
            (Some("S3cret"), "TOKEN_WRONG"),
            (Some(""), "TOKEN_WRONG"),
        ] {
            let refused = sent(token, Some("s3cret")).unwrap_err();
            assert_eq!(refused.code(), Code::Unauthenticated);
            assert_eq!(reason(&refused).as_deref(), Some(expected), "{token:?}");
            assert!(!refused.message().contains("s3cret"));
        }
        let require = RequireToken::new(Some("s3cret"));
        for malformed in [
            &b""[..],
            b"Bearer",
            b"Basic s3cret",
            b"s3cret",
            b"Bearers3cret",
            b"\xff\xff\xff\xff\xff\xff ",
        ] {
            let refused = require.check(Some(malformed)).unwrap_err();
            assert_eq!(
                reason(&refused).as_deref(),
                Some("TOKEN_MALFORMED"),
                "{malformed:?}"
            );
        }
        assert!(require.check(Some(b"bearer s3cret")).is_ok());
    }

    #[test]
    fn tokens_are_not_shown_and_must_fit_into_a_line() {
        let shown = format!(
            "{:?} {:?}",
            RequireToken::new(Some("s3cret")),
            SendToken::new(Some("s3cret"))
        );
        assert!(!shown.contains("s3cret"), "{shown}");
        assert_eq!(SendToken::new(Some("a\nb")).unwrap_err(), UnusableToken);
    }
}
