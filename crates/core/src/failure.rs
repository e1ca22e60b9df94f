//! Why an attempt failed: failure class, error code and message.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The maximum size in bytes of the header `error-message`.
pub const MESSAGE_LIMIT: usize = 1024;
/// The maximum size in bytes of the header `error-response`.
pub const RESPONSE_LIMIT: usize = 512;
/// The end of an [`Excerpt`] that is not all of the response.
pub const CUT: char = '…';

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
    /// What the endpoint answered. Only dead letters contain it.
    pub response: Option<Excerpt>,
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
            response: None,
        }
    }

    /// The same failure with this scope.
    #[must_use]
    pub fn with_scope(self, scope: FailureScope) -> Self {
        Self { scope, ..self }
    }

    /// The same failure with what the endpoint answered.
    #[must_use]
    pub fn with_response(self, response: Option<Excerpt>) -> Self {
        Self { response, ..self }
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

/// The beginning of an endpoint's response to a call that failed. It can repeat parts of the record, so that it is nowhere but in dead letters:
/// `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Excerpt(Box<str>);

impl Excerpt {
    /// At most [`RESPONSE_LIMIT`] bytes of a response that begins with `beginning`, without control characters, and with [`CUT`] at the end if
    /// it goes on: there is more in `beginning`, or that is not the whole response. `None` if it is empty or not UTF-8.
    #[must_use]
    pub fn of(beginning: &[u8], is_whole: bool) -> Option<Self> {
        let is_cut = !is_whole || beginning.len() > RESPONSE_LIMIT;
        let shown = match is_cut {
            true => &beginning[..beginning.len().min(RESPONSE_LIMIT - CUT.len_utf8())],
            false => beginning,
        };
        let text = match std::str::from_utf8(shown) {
            Ok(text) => text,
            // The end may be within a character.
            Err(error) if is_cut && error.error_len().is_none() => {
                std::str::from_utf8(&shown[..error.valid_up_to()]).ok()?
            }
            Err(_) => return None,
        };
        if text.trim().is_empty() {
            return None;
        }
        let mut text = bounded_text(text.trim_end(), RESPONSE_LIMIT);
        if is_cut {
            text.push(CUT);
        }
        Some(Self(text.into()))
    }

    /// The value of the header `error-response`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Excerpt({} bytes)", self.0.len())
    }
}

/// Truncates a text to at most `limit` bytes at a character boundary, and replaces control characters with spaces.
#[must_use]
pub fn bounded_text(text: &str, limit: usize) -> String {
    // Most texts stay as they are.
    if text.len() <= limit && text.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        return text.to_owned();
    }
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

    #[test]
    fn excerpt_is_bounded_text() {
        let of = |beginning: &[u8], is_whole| {
            let excerpt = Excerpt::of(beginning, is_whole);
            excerpt.map(|excerpt| excerpt.as_str().to_owned())
        };
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(of(b"{\"a\":1}\r\n", true), text("{\"a\":1}"));
        assert_eq!(of(b"a\tb\x1b[31m\xc2\x9bc\0", true), text("a b [31m c "));
        for nothing in [&b""[..], b" \n", b"\xff\xfe", b"ok \x80", b"cut \xc3"] {
            assert_eq!(of(nothing, true), None, "{nothing:?}");
        }
        // The last character of the beginning is cut.
        assert_eq!(of("größe".as_bytes(), false), text("größe…"));
        assert_eq!(of(&"größ".as_bytes()[..5], false), text("grö…"));
        assert_eq!(of(b"gr\xff", false), None);
        let most = "x".repeat(RESPONSE_LIMIT);
        assert_eq!(of(most.as_bytes(), true), text(&most));
        let longer = of(format!("{most}x").as_bytes(), true).unwrap();
        assert!(
            longer.len() == RESPONSE_LIMIT && longer.ends_with("x…"),
            "{longer}"
        );
        let wide = of("ä".repeat(RESPONSE_LIMIT).as_bytes(), true).unwrap();
        assert!(wide.len() == RESPONSE_LIMIT - 1 && wide.ends_with("ä…"), "{wide}");
        let debug = format!("{:?}", Excerpt::of(b"secret", true));
        assert_eq!(debug, "Some(Excerpt(6 bytes))");
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
