//! Classifies calls that failed without a response.

use std::error::Error;
use std::io;

use redeliver_core::failure::bounded_text;

/// Why there is no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallError {
    /// Connection refused, unknown host, or a failed TLS handshake.
    Connect,
    ConnectTimeout,
    /// The operating system gave up an established connection.
    Timeout,
    /// The connection was closed before the response was complete.
    Closed,
    /// The response is not HTTP.
    InvalidResponse,
    /// The request cannot be built.
    InvalidRequest,
}

impl CallError {
    pub(super) fn of(error: &reqwest::Error) -> Self {
        if error.is_builder() {
            return Self::InvalidRequest;
        }
        // With TLS 1.3, a server rejects a client certificate after the handshake, in place of a response.
        let is_tls = chain(error).any(<dyn Error>::is::<rustls::Error>);
        match (error.is_connect() || is_tls, error.is_timeout()) {
            (true, true) => Self::ConnectTimeout,
            (true, false) => Self::Connect,
            (false, true) => Self::Timeout,
            (false, false) if chain(error).any(is_not_http) => Self::InvalidResponse,
            (false, false) => Self::Closed,
        }
    }
}

fn is_not_http(error: &(dyn Error + 'static)) -> bool {
    if let Some(error) = error.downcast_ref::<hyper::Error>() {
        return error.is_parse();
    }
    // An invalid chunk size.
    error.downcast_ref::<io::Error>().is_some_and(|error| {
        matches!(
            error.kind(),
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData
        )
    })
}

/// The innermost cause. The errors around it repeat the URL with its query, which may contain secrets.
pub(super) fn cause(error: &reqwest::Error) -> String {
    let innermost = chain(error).last().map(ToString::to_string);
    bounded_text(&innermost.unwrap_or_else(|| "unknown cause".to_owned()), 200)
}

/// The causes of an error, outermost first, without the error itself.
fn chain(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(error.source(), |error| cause_of(*error))
}

/// Also returns the error inside an [`io::Error`], which [`Error::source`] skips.
fn cause_of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => error.source(),
    }
}
