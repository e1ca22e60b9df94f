//! An error with its causes, for logs and for the terminal. `Display` of our errors says only its own layer.

use std::error::Error;

/// An error and its causes, outermost first.
pub fn causes<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'e (dyn Error + 'static)| {
        Error::source(*error)
    })
}

/// An error and its causes in one line, for a field of a log line.
#[must_use]
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    causes(error)
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}
