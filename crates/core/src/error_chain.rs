//! Errors with their causes, for logs and the terminal. `Display` of an error in this workspace does not include its
//! source.

use std::error::Error;

/// Iterates over an error and its sources, starting with the error itself.
pub fn causes<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'e (dyn Error + 'static)| {
        Error::source(*error)
    })
}

/// An error and its sources in one line, separated by `: `.
#[must_use]
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    causes(error)
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}
