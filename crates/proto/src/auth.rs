//! Bearer tokens of clients. `redeliver_service::identity` checks them.

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

const HEADER: &str = "authorization";

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

    #[test]
    fn a_token_is_sent_and_not_in_debug_output_and_must_be_one_line() {
        let mut send = SendToken::new(Some("s3cret")).unwrap();
        let sent = send.call(Request::new(())).unwrap();
        assert_eq!(sent.metadata().get(HEADER).unwrap(), "Bearer s3cret");
        let shown = format!("{send:?} {:?}", sent.metadata());
        assert!(!shown.contains("s3cret"), "{shown}");
        let unchanged = SendToken::new(None).unwrap().call(Request::new(())).unwrap();
        assert!(unchanged.metadata().is_empty());
        assert_eq!(SendToken::new(Some("a\nb")).unwrap_err(), UnusableToken);
    }
}
