//! What went wrong with a record: a class that decides what happens next, a stable code, a message.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The longest error message that is written into a header, in bytes.
pub const MESSAGE_LIMIT: usize = 1024;

/// The class of a failure, as in the header `error-class`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorClass {
    /// May pass by itself: it is tried again after a delay.
    Transient,
    /// The other side asked to come later; does not count as an attempt.
    Throttled,
    /// Will fail every time: dead at once.
    Permanent,
    /// Transient until the retries were used up: dead.
    Exhausted,
    /// Older than the pipeline's `max_age`: dead.
    Expired,
    /// The record or its headers cannot be understood: dead, never run.
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

    /// The word that stands in the header and in metrics.
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

/// One failure of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What happens next.
    pub class: ErrorClass,
    /// Stable and short, for grouping: `http.503`, `http.timeout`, `header.process-after`.
    pub code: String,
    /// For people. No payload, no stack trace; cut at [`MESSAGE_LIMIT`] bytes when written.
    pub message: String,
    /// The other side's own wish when to come again, such as HTTP's `Retry-After`.
    pub retry_after: Option<Duration>,
}

impl Failure {
    /// A failure without a wish when to come again.
    pub fn new(class: ErrorClass, code: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            class,
            code: code.into(),
            message: message.into(),
            retry_after: None,
        }
    }

    /// A failure that may pass by itself.
    pub fn transient(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Transient, code, message)
    }

    /// A failure that would repeat.
    pub fn permanent(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Permanent, code, message)
    }

    /// A record that cannot be understood.
    pub fn malformed(code: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Malformed, code, message)
    }

    /// The other side asks to come again after a while.
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

/// A text cut to at most `limit` bytes at a character's edge, control characters replaced by spaces.
#[must_use]
pub fn bounded_text(text: &str, limit: usize) -> String {
    let mut bounded = String::with_capacity(text.len().min(limit));
    for c in text.chars().map(|c| if c.is_control() { ' ' } else { c }) {
        if bounded.len() + c.len_utf8() > limit {
            break;
        }
        bounded.push(c);
    }
    bounded
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn classes_are_read_back() {
        for class in ErrorClass::ALL {
            assert_eq!(class.as_str().parse(), Ok(class));
        }
        assert!("Transient".parse::<ErrorClass>().is_err());
    }

    proptest! {
        #[test]
        fn messages_stay_within_their_bound(text in ".{0,200}", limit in 0_usize..100) {
            let bounded = bounded_text(&text, limit);
            prop_assert!(bounded.len() <= limit);
            prop_assert!(!bounded.chars().any(char::is_control));
        }
    }
}
