//! Why an attempt failed: failure class, error code and message.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The maximum size in bytes of the header `error-message`.
pub const MESSAGE_LIMIT: usize = 1024;

/// The failure class, written to the header `error-class`. It decides what happens to the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorClass {
    /// A later attempt may succeed: the record is tried again after a delay.
    Transient,
    /// The other side requested a delay: the record is tried again, and the attempt does not count as failed.
    Throttled,
    /// Every attempt would fail: the record becomes a dead letter at once.
    Permanent,
    /// The failure was transient, but no retries are left: the record becomes a dead letter.
    Exhausted,
    /// The record would be older than the pipeline's `max_age` at its next attempt: it becomes a dead letter.
    Expired,
    /// The record or its headers are invalid: it becomes a dead letter without an attempt.
    Malformed,
}

impl ErrorClass {
    /// All classes.
    pub const ALL: [Self; 6] = [
        Self::Transient,
        Self::Throttled,
        Self::Permanent,
        Self::Exhausted,
        Self::Expired,
        Self::Malformed,
    ];

    /// The name of the class in headers, metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Transient => "transient",
            Self::Throttled => "throttled",
            Self::Permanent => "permanent",
            Self::Exhausted => "exhausted",
            Self::Expired => "expired",
            Self::Malformed => "malformed",
        }
    }

    /// Whether an attempt that fails with this class counts as failed. Being throttled says nothing about the record. A
    /// malformed record is normally rejected without an attempt.
    #[must_use]
    pub const fn counts(self) -> bool {
        !matches!(self, Self::Throttled | Self::Malformed)
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ErrorClass {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|class| class.as_str() == text)
            .ok_or_else(|| format!("`{text}` is not an error class"))
    }
}

/// Whether a failure says something about the endpoint that a handler calls, for the circuit breaker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FailureScope {
    /// The failure is the record's own: the endpoint answered.
    #[default]
    Record,
    /// The endpoint may fail for every record: it is down, overloaded, or refuses the credentials. If it fails for others
    /// too, the attempt does not count.
    Endpoint,
    /// Either of both may be the cause.
    Unknown,
    /// The endpoint was not called.
    NotCalled,
}

/// A failed attempt, or why a record was rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Decides what happens to the record.
    pub class: ErrorClass,
    /// The error code: short and stable, for grouping. Examples: `http.503`, `http.timeout`, `header.process-after`.
    pub code: String,
    /// The message for humans, without payload and stack trace. It is truncated to [`MESSAGE_LIMIT`] bytes when it is
    /// written to a header.
    pub message: String,
    /// The delay that the other side requests, such as HTTP's `Retry-After`.
    pub retry_after: Option<Duration>,
    /// What the failure says about the endpoint of the handler.
    pub scope: FailureScope,
    /// The call that failed, if it was for several records: a number that the handler uses once. The failures of a call count
    /// once for the circuit breaker.
    pub shared_call: Option<u64>,
}

impl Failure {
    /// A failure without a requested delay.
    pub fn new(class: ErrorClass, code: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            class,
            code: code.into(),
            message: message.into(),
            retry_after: None,
            scope: FailureScope::Record,
            shared_call: None,
        }
    }

    /// The same failure with this scope.
    #[must_use]
    pub fn with_scope(self, scope: FailureScope) -> Self {
        Self { scope, ..self }
    }

    /// Whether the other side asked for a delay.
    #[must_use]
    pub fn is_throttled(&self) -> bool {
        self.class == ErrorClass::Throttled
    }

    /// A failure after which a later attempt may succeed.
    pub fn transient(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Transient, code, message)
    }

    /// A failure that every attempt would repeat.
    pub fn permanent(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Permanent, code, message)
    }

    /// An invalid record.
    pub fn malformed(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Malformed, code, message)
    }

    /// A failure after which the other side requests a delay.
    pub fn throttled(after: Duration, code: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            retry_after: Some(after),
            ..Self::new(ErrorClass::Throttled, code, message)
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.class, self.code, self.message)
    }
}

impl std::error::Error for Failure {}

/// Truncates a text to at most `limit` bytes at a character boundary, and replaces control characters with spaces.
#[must_use]
pub fn bounded_text(text: &str, limit: usize) -> String {
    let mut bounded = String::with_capacity(text.len().min(limit));
    for c in text.chars().map(printable) {
        if bounded.len() + c.len_utf8() > limit {
            break;
        }
        bounded.push(c);
    }
    bounded
}

/// A character as [`bounded_text`] shows it.
#[must_use]
pub fn printable(c: char) -> char {
    if c.is_control() { ' ' } else { c }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_class_is_parsed_back() {
        for class in ErrorClass::ALL {
            assert_eq!(class.as_str().parse(), Ok(class));
        }
        assert!("Transient".parse::<ErrorClass>().is_err());
    }

    proptest! {
        #[test]
        fn message_is_truncated(text in ".{0,200}", limit in 0_usize..100) {
            let bounded = bounded_text(&text, limit);
            prop_assert!(bounded.len() <= limit);
            prop_assert!(!bounded.chars().any(char::is_control));
        }
    }
}
