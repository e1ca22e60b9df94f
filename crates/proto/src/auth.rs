//! Bearer tokens. Health and reflection services do not use [`RequireToken`], so that probes and tools work without a
//! token.

use std::fmt;
use std::sync::Arc;

use subtle::ConstantTimeEq;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Code, Request, Status};

use crate::error::status;

const HEADER: &str = "authorization";
const SCHEME: &str = "bearer";

/// Rejects requests without `authorization: Bearer <token>`. Without a configured token, accepts all requests.
#[derive(Clone)]
pub struct RequireToken(Option<Arc<str>>);

impl RequireToken {
    /// Requires this token; `None` accepts all requests.
    #[must_use]
    pub fn new(token: Option<&str>) -> Self {
        Self(token.map(Arc::from))
    }

    /// Checks the `authorization` of a request.
    ///
    /// # Errors
    /// UNAUTHENTICATED if it is missing or wrong. The error never contains the token.
    pub fn check(&self, authorization: Option<&[u8]>) -> Result<(), Status> {
        let Some(expected) = &self.0 else {
            return Ok(());
        };
        let given = authorization.ok_or_else(|| {
            unauthenticated(
                "TOKEN_MISSING",
                "a token is required: send the metadata `authorization: Bearer <token>`",
            )
        })?;
        let token = bearer(given).ok_or_else(|| {
            unauthenticated(
                "TOKEN_MALFORMED",
                "the metadata `authorization` is not `Bearer <token>`",
            )
        })?;
        // Compares in constant time, so that the duration reveals nothing about the token.
        if bool::from(token.ct_eq(expected.as_bytes())) {
            Ok(())
        } else {
            Err(unauthenticated("TOKEN_WRONG", "the token is wrong"))
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

/// Adds the token, if there is one, to each request of a client.
#[derive(Clone, Debug, Default)]
pub struct SendToken(Option<MetadataValue<Ascii>>);

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
    fn a_request_with_the_right_token_is_accepted() {
        assert!(sent(Some("s3cret"), Some("s3cret")).is_ok());
        assert!(sent(Some("s3cret"), None).is_ok());
        assert!(sent(None, None).is_ok());
    }

    #[test]
    fn a_request_without_the_right_token_is_rejected() {
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
    fn a_token_is_not_in_debug_output_and_must_be_one_line() {
        let shown = format!(
            "{:?} {:?}",
            RequireToken::new(Some("s3cret")),
            SendToken::new(Some("s3cret"))
        );
        assert!(!shown.contains("s3cret"), "{shown}");
        assert_eq!(SendToken::new(Some("a\nb")).unwrap_err(), UnusableToken);
    }
}
