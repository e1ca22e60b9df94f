//! Chooses the topic of a result.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::json;
use serde_json::Value;

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
        /// Topics by the value. A boolean is compared by its JSON text, a number by its shortest one, such as `1.5` for `1.50`. `None`: the result is dropped.
        topics: BTreeMap<String, Option<Arc<str>>>,
        /// The topic if there is no such value, or the document is not JSON. `None`: the result is dropped.
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
    #[must_use]
    pub fn destination(&self, value: Option<&[u8]>, status: u16, body: &[u8]) -> Destination {
        let Self::By {
            subject,
            topics,
            otherwise,
        } = self
        else {
            return Destination::Output;
        };
        let chosen = match subject {
            Subject::Payload(pointer) => text_at(value.unwrap_or_default(), pointer),
            Subject::Response(pointer) => text_at(body, pointer),
            Subject::Status => Some(status.to_string()),
        };
        let topic = chosen.and_then(|chosen| topics.get(&chosen)).unwrap_or(otherwise);
        topic.clone().map_or(Destination::Nowhere, Destination::Topic)
    }
}

fn text_at(document: &[u8], pointer: &str) -> Option<String> {
    let document = json::parse(document).ok()?;
    match document.pointer(pointer)? {
        Value::String(text) => Some(text.clone()),
        scalar @ (Value::Number(_) | Value::Bool(_)) => Some(scalar.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn choice(subject: Subject, otherwise: Option<&str>) -> OutputChoice {
        let topics = [
            ("retry", Some("retry-queue")),
            ("7", Some("seven")),
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
    fn a_field_of_the_value_determines_the_topic() {
        for (value, topic) in [
            (r#"{"meta":{"queue":"retry"}}"#, Some("retry-queue")),
            (r#"{"meta":{"queue":7}}"#, Some("seven")),
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
                by_payload.destination(Some(value.as_bytes()), 200, b"{}"),
                expected,
                "{value}"
            );
            let by_response = choice(
                Subject::Response("/meta/queue".to_owned()),
                Some("enriched-queue"),
            );
            assert_eq!(
                by_response.destination(None, 200, value.as_bytes()),
                expected,
                "{value}"
            );
        }
        assert_eq!(by_queue(None).destination(None, 200, b""), Destination::Nowhere);
        assert_eq!(
            OutputChoice::Default.destination(None, 200, b""),
            Destination::Output
        );
    }

    #[test]
    fn the_status_determines_the_topic() {
        let by_status = choice(Subject::Status, Some("done"));
        for (status, topic) in [(202, "accepted"), (200, "done")] {
            assert_eq!(
                by_status.destination(None, status, b""),
                Destination::Topic(topic.into())
            );
        }
    }

    proptest! {
        #[test]
        fn with_a_default_topic_every_value_has_a_topic(value in proptest::collection::vec(any::<u8>(), 0..60)) {
            prop_assert!(matches!(by_queue(Some("rest")).destination(Some(&value), 200, b""), Destination::Topic(_)));
        }
    }
}
