//! Chooses the topic of a result.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::Failure;
use redeliver_core::json::{self, Decimal, Scalar};

/// The error code of a result whose topic cannot be chosen.
const NOT_JSON: &str = "output.not-json";

/// Topics by a value. `None`: the result is dropped.
type Topics = BTreeMap<String, Option<Arc<str>>>;

/// How to choose the topic of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OutputChoice {
    /// The pipeline's output.
    #[default]
    Default,
    /// By a value of the record or of the response.
    By {
        /// What has the value.
        subject: Subject,
        /// Topics by the value. A boolean is compared by its name, a number as a number: `1.5` is also `1.50`. `None`: the result is dropped.
        topics: Topics,
        /// The topic if there is no such value, or the document is not JSON. `None`: the result is dropped, unless the document is not JSON.
        otherwise: Option<Arc<str>>,
    },
}

/// What chooses a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A field of the record's value, as a JSON pointer (RFC 6901) such as `/meta/queue`.
    Payload(String),
    /// A field of the body of the response, as a JSON pointer.
    Response(String),
    /// The status of the response.
    Status,
}

/// Where a result goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// To the output of the pipeline.
    Output,
    /// To this topic.
    Topic(Arc<str>),
    /// There is no result.
    Nowhere,
}

impl OutputChoice {
    /// Whether the body of the response must be read.
    #[must_use]
    pub fn needs_body(&self) -> bool {
        matches!(
            self,
            Self::By {
                subject: Subject::Response(_),
                ..
            }
        )
    }

    /// Where the result of a record with this value goes.
    ///
    /// # Errors
    /// A permanent failure if the result would be dropped only because the document that chooses the topic is not JSON. A record without a value
    /// and an empty response have no fields.
    pub fn destination(
        &self,
        value: Option<&[u8]>,
        status: u16,
        body: &[u8],
    ) -> Result<Destination, Failure> {
        let Self::By {
            subject,
            topics,
            otherwise,
        } = self
        else {
            return Ok(Destination::Output);
        };
        let chosen = match subject {
            Subject::Payload(pointer) => value.map(|value| topic_at(value, pointer, topics)),
            Subject::Response(_) if body.is_empty() => None,
            Subject::Response(pointer) => Some(topic_at(body, pointer, topics)),
            Subject::Status => Some(Ok(topics.get(&status.to_string()))),
        };
        let topic = match (chosen.unwrap_or(Ok(None)), otherwise) {
            (Ok(topic), otherwise) => topic.unwrap_or(otherwise),
            (Err(_), Some(_)) => otherwise,
            (Err(error), None) => {
                let what = match subject {
                    Subject::Response(_) => "response",
                    Subject::Payload(_) | Subject::Status => "value",
                };
                let message = format!("the {what} is not JSON, so it names no output: {error}");
                return Err(Failure::permanent(NOT_JSON, message));
            }
        };
        Ok(topic.clone().map_or(Destination::Nowhere, Destination::Topic))
    }
}

/// The topic for the field of a document. `None` if none is listed for it.
fn topic_at<'t>(
    document: &[u8],
    pointer: &str,
    topics: &'t Topics,
) -> serde_json::Result<Option<&'t Option<Arc<str>>>> {
    let named = |text: &[u8]| topics.get(std::str::from_utf8(text).ok()?);
    Ok(match json::scalar_at(document, pointer)? {
        Some(Scalar::Number(number)) => {
            let text = number.text();
            let is_same = |name: &str| Decimal::of(name).is_some_and(|name| name.text() == text);
            let same = || {
                topics
                    .iter()
                    .find(|(name, _)| is_same(name))
                    .map(|(_, topic)| topic)
            };
            named(text.as_bytes()).or_else(same)
        }
        Some(scalar) => named(&scalar.into_text()),
        None => None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn choice(subject: Subject, otherwise: Option<&str>) -> OutputChoice {
        let topics = [
            ("retry", Some("retry-queue")),
            ("7", Some("seven")),
            ("1.50", Some("half")),
            ("1e400", Some("huge")),
            ("true", Some("yes")),
            ("202", Some("accepted")),
            ("none", None),
        ];
        OutputChoice::By {
            subject,
            topics: topics
                .into_iter()
                .map(|(text, topic)| (text.to_owned(), topic.map(Into::into)))
                .collect(),
            otherwise: otherwise.map(Into::into),
        }
    }

    fn by_queue(otherwise: Option<&str>) -> OutputChoice {
        choice(Subject::Payload("/meta/queue".to_owned()), otherwise)
    }

    #[test]
    fn field_determines_the_topic() {
        for (value, topic) in [
            (r#"{"meta":{"queue":"retry"}}"#, Some("retry-queue")),
            (r#"{"meta":{"queue":7}}"#, Some("seven")),
            (r#"{"meta":{"queue":7.0}}"#, Some("seven")),
            (r#"{"meta":{"queue":"7.0"}}"#, Some("enriched-queue")),
            (r#"{"meta":{"queue":1.5}}"#, Some("half")),
            (r#"{"meta":{"queue":10e399}}"#, Some("huge")),
            (r#"{"meta":{"queue":1e401}}"#, Some("enriched-queue")),
            (r#"{"meta":{"queue":"\ud800"}}"#, Some("enriched-queue")),
            (r#"{"meta":{"queue":null}}"#, Some("enriched-queue")),
            (r#"{"meta":{"queue":true}}"#, Some("yes")),
            (r#"{"meta":{"queue":"none"}}"#, None),
            (r#"{"meta":{"queue":"other"}}"#, Some("enriched-queue")),
            (r#"{"meta":{"queue":["retry"]}}"#, Some("enriched-queue")),
            (r#"{"meta":{}}"#, Some("enriched-queue")),
            ("not json", Some("enriched-queue")),
        ] {
            let expected = topic.map_or(Destination::Nowhere, |topic| Destination::Topic(topic.into()));
            let by_payload = by_queue(Some("enriched-queue"));
            assert_eq!(
                by_payload
                    .destination(Some(value.as_bytes()), 200, b"{}")
                    .unwrap(),
                expected,
                "{value}"
            );
            let by_response = choice(
                Subject::Response("/meta/queue".to_owned()),
                Some("enriched-queue"),
            );
            assert_eq!(
                by_response.destination(None, 200, value.as_bytes()).unwrap(),
                expected,
                "{value}"
            );
        }
        let default = OutputChoice::Default.destination(None, 200, b"");
        assert_eq!(default, Ok(Destination::Output));
    }

    #[test]
    fn only_readable_values_are_dropped() {
        let by_response = choice(Subject::Response("/meta/queue".to_owned()), None);
        for (value, body) in [
            (None, &b""[..]),
            (Some(&b"{}"[..]), b"{}"),
            (
                Some(br#"{"meta":{"queue":"other"}}"#),
                br#"{"meta":{"queue":1e400000}}"#,
            ),
        ] {
            assert_eq!(
                by_queue(None).destination(value, 200, b"x"),
                Ok(Destination::Nowhere)
            );
            assert_eq!(
                by_response.destination(Some(b"x"), 200, body),
                Ok(Destination::Nowhere)
            );
        }
        for other in [
            &b"hunter2"[..],
            b"{",
            b"{\"meta\":{\"queue\":\"other\"}",
            b"\"\xff\"",
            b" ",
        ] {
            for failure in [
                by_queue(None).destination(Some(other), 200, b"{}").unwrap_err(),
                by_response.destination(Some(b"{}"), 200, other).unwrap_err(),
            ] {
                assert_eq!(&*failure.code, NOT_JSON);
                assert!(!failure.message.contains("hunter2"), "{failure}");
            }
        }
        assert!(by_queue(None).destination(Some(b""), 200, b"").is_err());
    }

    #[test]
    fn status_determines_the_topic() {
        let by_status = choice(Subject::Status, Some("done"));
        for (status, topic) in [(202, "accepted"), (200, "done")] {
            assert_eq!(
                by_status.destination(None, status, b""),
                Ok(Destination::Topic(topic.into()))
            );
        }
    }

    proptest! {
        #[test]
        fn default_topic_accepts_every_value(value in proptest::collection::vec(any::<u8>(), 0..60)) {
            prop_assert!(matches!(by_queue(Some("rest")).destination(Some(&value), 200, b""), Ok(Destination::Topic(_))));
        }
    }
}
