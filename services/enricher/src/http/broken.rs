//! Calls that did not come to an answer: what went wrong, as a code and a few words.

use std::error::Error;
use std::io;

use redeliver_core::failure::bounded_text;

/// Where a call broke off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// No connection came up: refused, no such host, no agreement on TLS.
    Connect,
    /// No connection came up in time.
    SlowConnect,
    /// The operating system gave the connection up.
    Timeout,
    /// The connection ended before the answer did.
    Closed,
    /// What came is not HTTP.
    InvalidResponse,
    /// The request could not be written down.
    InvalidRequest,
}

impl Broken {
    pub(super) fn of(error: &reqwest::Error) -> Self {
        if error.is_builder() {
            return Self::InvalidRequest;
        }
        // With TLS 1.3 a server refuses our certificate only after the handshake, in place of an answer.
        let no_tls = chain(error).any(<dyn Error>::is::<rustls::Error>);
        match (error.is_connect() || no_tls, error.is_timeout()) {
            (true, true) => Self::SlowConnect,
            (true, false) => Self::Connect,
            (false, true) => Self::Timeout,
            (false, false) if chain(error).any(is_no_http) => Self::InvalidResponse,
            (false, false) => Self::Closed,
        }
    }
}

fn is_no_http(error: &(dyn Error + 'static)) -> bool {
    if let Some(error) = error.downcast_ref::<hyper::Error>() {
        return error.is_parse();
    }
    // A chunk whose size cannot be read.
    error.downcast_ref::<io::Error>().is_some_and(|error| {
        matches!(
            error.kind(),
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData
        )
    })
}

/// The innermost cause in a few words. The layers around it repeat the URL with its query.
pub(super) fn cause(error: &reqwest::Error) -> String {
    let innermost = chain(error).last().map(ToString::to_string);
    bounded_text(&innermost.unwrap_or_else(|| "no cause is known".to_owned()), 200)
}

/// The causes of an error, from the outside in, without the error itself.
fn chain(error: &reqwest::Error) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(error.source(), |error| cause_of(*error))
}

/// What is inside of an [`io::Error`] is visited too; [`Error::source`] alone would skip it.
fn cause_of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => error.source(),
    }
}
