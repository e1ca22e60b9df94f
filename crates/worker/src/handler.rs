//! The interface of handlers: a [`tower::Service`] from an [`Attempt`] to an [`Outcome`].

use std::sync::Arc;

use redeliver_core::failure::{MESSAGE_LIMIT, bounded_text};
use redeliver_core::headers::{Origin, RecordedFailure, TraceContext};
use redeliver_core::{Failure, Outcome, Record, json};
use serde::de::DeserializeOwned;
use tower::{BoxError, Service};

/// The error code of a value that is not text.
const VALUE_TEXT: &str = "value.text";
/// The error code of a value that is not the expected JSON document.
const VALUE_JSON: &str = "value.json";

/// One run of the handler for a record.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// The record as it was read. A retry has the same key and value as the original record; its position is in the due
    /// topic, and Redeliver's headers are added.
    pub record: Arc<Record>,
    /// Where the record entered the pipeline. [`Origin::id`] is the same for every attempt, so it can serve as an
    /// idempotency key.
    pub origin: Origin,
    /// Number of failed attempts before this one.
    pub failed_attempts: u32,
    /// Whether the record blocks its followers (`key_blocking`), and this attempt repeats one that failed and did not count.
    pub is_repeated: bool,
    /// Whether the record becomes a dead letter if this attempt fails transiently and counts, because no retries are left. A
    /// record can also become one earlier, because of `max_age`.
    pub is_last: bool,
    /// The trace context of this attempt, to pass on to other services. `None` when tracing is disabled.
    pub trace: Option<TraceContext>,
}

impl Attempt {
    /// The value as text.
    ///
    /// # Errors
    /// A permanent failure with the code `value.text` if there is no value, or it is not UTF-8.
    pub fn text(&self) -> Result<&str, Failure> {
        let value = self.value(VALUE_TEXT)?;
        let text = std::str::from_utf8(value);
        text.map_err(|error| Failure::permanent(VALUE_TEXT, format!("the value is not UTF-8: {error}")))
    }

    /// The value, parsed as JSON.
    ///
    /// # Errors
    /// A permanent failure with the code `value.json` if there is no value, it is not JSON, it is not a `T`, or one of its fields has a name that
    /// `serde_json` uses itself, so that a `T` with a `serde_json::Value` would be another document. The message contains no part of the value,
    /// except for names of fields and variants.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        let value = self.value(VALUE_JSON)?;
        if json::has_private_name(value) {
            let problem = "a field of the value has a name that is private to serde_json";
            return Err(Failure::permanent(VALUE_JSON, problem));
        }
        serde_json::from_slice(value).map_err(|error| Failure::permanent(VALUE_JSON, json_problem(&error)))
    }

    fn value(&self, code: &str) -> Result<&[u8], Failure> {
        let value = self.record.value.as_deref();
        value.ok_or_else(|| Failure::permanent(code, "the record has no value"))
    }

    /// Why the previous attempt failed. `None` for a new record.
    #[must_use]
    pub fn previous_failure(&self) -> Option<RecordedFailure> {
        // Reserved headers of a new record belong to another pipeline.
        if Origin::of(&self.record) == self.origin {
            return None;
        }
        RecordedFailure::read(&self.record.headers)
    }
}

/// What is wrong with a JSON document. Serde's messages quote values that have a wrong type; this does not.
fn json_problem(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let problem = match message.rsplit_once(", expected ") {
        Some((_, expected)) => format!("expected {expected}"),
        None => message,
    };
    let subject = match error.is_data() {
        true => "the value does not match its type",
        false => "the value is not JSON",
    };
    bounded_text(&format!("{subject}: {problem}"), MESSAGE_LIMIT)
}

/// A handler: a cloneable [`tower::Service`]. `tower` layers can add timeouts and limits.
///
/// An error that is a [`Failure`], or was caused by one, is that failure. Any other error is a transient failure with the code `handler.error`, and a panic is one with the code `handler.panic`.
/// Neither affects other records. Each attempt runs in its own task. A handler must not block its thread: use
/// `tokio::task::spawn_blocking` for blocking work.
pub trait Handler:
    Service<Attempt, Response = Outcome, Error: Into<BoxError> + 'static, Future: Send> + Clone + Send + 'static
{
}

impl<S> Handler for S where
    S: Service<Attempt, Response = Outcome, Error: Into<BoxError> + 'static, Future: Send>
        + Clone
        + Send
        + 'static
{
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use redeliver_core::ErrorClass;
    use serde::Deserialize;

    use super::*;
    use crate::test_kit::{End, TestKit, TestRecord};

    #[derive(Debug, Deserialize)]
    struct Order {
        #[expect(dead_code, reason = "only its type matters")]
        quantity: u32,
    }

    fn kit() -> TestKit {
        TestKit::from_yaml("pipelines: { p: { retry: { tiers: [1s, 2s] } } }", "p").unwrap()
    }

    #[tokio::test]
    async fn mismatched_value_fails_without_quote() {
        let json = async |attempt: Attempt| attempt.json::<Order>().map(drop);
        for (value, expected) in [
            (
                r#"{"quantity": "4711"}"#,
                "the value does not match its type: expected u32 at line 1 column 19",
            ),
            (
                "{}",
                "the value does not match its type: missing field `quantity` at line 1 column 2",
            ),
            (
                "{",
                "the value is not JSON: EOF while parsing an object at line 1 column 1",
            ),
            (
                r#"{"quantity":1,"more":{"$serde_json::private::RawValue":"{}"}}"#,
                "a field of the value has a name that is private to serde_json",
            ),
        ] {
            let End::Dead(letter) = kit().run(json, TestRecord::value(value)).await.end else {
                panic!("{value}")
            };
            let expected = RecordedFailure {
                class: ErrorClass::Permanent,
                code: VALUE_JSON.to_owned(),
                message: expected.to_owned(),
            };
            assert_eq!(letter.failure, expected);
        }
        let text = async |attempt: Attempt| attempt.text().map(ToOwned::to_owned);
        for record in [TestRecord::value(&b"\xff"[..]), TestRecord::default()] {
            let run = kit().run(text, record).await;
            assert!(matches!(run.end, End::Dead(letter) if letter.failure.code == VALUE_TEXT));
        }
    }

    #[tokio::test]
    async fn attempt_knows_its_predecessor() {
        let seen: Arc<Mutex<Vec<_>>> = Arc::default();
        let handler = {
            let seen = seen.clone();
            move |attempt: Attempt| {
                let code = attempt.previous_failure().map(|failure| failure.code);
                seen.lock().unwrap().push((code, attempt.is_last));
                let failure = Failure::transient(format!("try-{}", attempt.failed_attempts), "");
                async move { Err::<(), _>(failure) }
            }
        };
        // Of another pipeline.
        let record = TestRecord::value("x")
            .header("error-code", b"older")
            .header("error-class", b"transient");
        let run = kit().run(handler, record).await;
        let code = |code: &str| Some(code.to_owned());
        let expected = [(None, false), (code("try-0"), false), (code("try-1"), true)];
        assert_eq!(*seen.lock().unwrap(), expected);
        assert!(matches!(run.end, End::Dead(letter) if letter.failure.class == ErrorClass::Exhausted));
    }
}
