//! Chooses the topic of a result.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::Failure;
use serde_json::Value;

/// How to choose the topic of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OutputChoice {
    /// The pipeline's output.
    #[default]
    Default,
    /// By a field of the record's value, which is a JSON document. The value of the record decides, not the response,
    /// so that the topic is known before the call: a record without a topic has no effects at the endpoint.
    ByField {
        /// The field, as a JSON pointer (RFC 6901) such as `/meta/queue`.
        pointer: String,
        /// Topics by the field's value. A number or a boolean is compared by its JSON text.
        topics: BTreeMap<String, Arc<str>>,
        /// The topic if the field is missing or has another value, or if the record's value is not JSON. Without it,
        /// such a record becomes a dead letter.
        otherwise: Option<Arc<str>>,
    },
}

/// The error code of a record without a topic for its result.
pub const UNKNOWN: &str = "output.unknown";

impl OutputChoice {
    /// The topic for the result of a record with this value. `None` means the pipeline's output.
    ///
    /// # Errors
    /// A permanent failure that names the field, when there is no topic for this value.
    pub fn topic_for(&self, value: Option<&[u8]>) -> Result<Option<Arc<str>>, Failure> {
        let Self::ByField {
            pointer,
            topics,
            otherwise,
        } = self
        else {
            return Ok(None);
        };
        match topic_by_field(value.unwrap_or_default(), pointer, topics) {
            Ok(topic) => Ok(Some(topic)),
            Err(problem) => match otherwise {
                Some(topic) => Ok(Some(topic.clone())),
                None => Err(Failure::permanent(
                    UNKNOWN,
                    format!("cannot choose an output by the field `{pointer}`: {problem}"),
                )),
            },
        }
    }
}

fn topic_by_field(
    value: &[u8],
    pointer: &str,
    topics: &BTreeMap<String, Arc<str>>,
) -> Result<Arc<str>, &'static str> {
    let document: Value = serde_json::from_slice(value).map_err(|_| "the value is not JSON")?;
    let topic = match document.pointer(pointer).ok_or("it is missing")? {
        Value::String(text) => topics.get(text),
        scalar @ (Value::Number(_) | Value::Bool(_)) => topics.get(&scalar.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => {
            return Err("it is not a string, a number or a boolean");
        }
    };
    // The message must not contain the field's value, which is payload.
    topic.cloned().ok_or("no topic is configured for its value")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn by_queue(otherwise: Option<&str>) -> OutputChoice {
        let topics = [("retry", "retry-queue"), ("7", "seven"), ("true", "yes")];
        OutputChoice::ByField {
            pointer: "/meta/queue".to_owned(),
            topics: topics
                .into_iter()
                .map(|(text, topic)| (text.to_owned(), topic.into()))
                .collect(),
            otherwise: otherwise.map(Into::into),
        }
    }

    #[test]
    fn a_field_of_the_value_determines_the_topic() {
        for (value, topic) in [
            (r#"{"meta":{"queue":"retry"}}"#, "retry-queue"),
            (r#"{"meta":{"queue":7}}"#, "seven"),
            (r#"{"meta":{"queue":true}}"#, "yes"),
            (r#"{"meta":{"queue":"other"}}"#, "enriched-queue"),
            (r#"{"meta":{"queue":["retry"]}}"#, "enriched-queue"),
            (r#"{"meta":{}}"#, "enriched-queue"),
            ("not json", "enriched-queue"),
        ] {
            let chosen = by_queue(Some("enriched-queue")).topic_for(Some(value.as_bytes()));
            assert_eq!(chosen, Ok(Some(topic.into())), "{value}");
        }
        assert_eq!(
            by_queue(Some("enriched-queue")).topic_for(None),
            Ok(Some("enriched-queue".into()))
        );
        assert_eq!(OutputChoice::Default.topic_for(None), Ok(None));
    }

    #[test]
    fn without_a_default_topic_the_failure_names_the_field_and_contains_no_payload() {
        for (value, problem) in [
            (r#"{"meta":{"queue":"hunter2"}}"#, "no topic is configured"),
            (r#"{"meta":{"queue":null}}"#, "not a string"),
            (r#"{"meta":"hunter2"}"#, "it is missing"),
            ("hunter2", "not JSON"),
        ] {
            let failure = by_queue(None).topic_for(Some(value.as_bytes())).unwrap_err();
            assert_eq!(
                (failure.class, failure.code.as_str()),
                (redeliver_core::ErrorClass::Permanent, UNKNOWN)
            );
            assert!(
                failure.message.contains("`/meta/queue`") && failure.message.contains(problem),
                "{failure}"
            );
            assert!(!failure.message.contains("hunter2"), "{failure}");
        }
    }

    proptest! {
        #[test]
        fn with_a_default_topic_every_value_has_a_topic(value in proptest::collection::vec(any::<u8>(), 0..60)) {
            prop_assert!(matches!(by_queue(Some("rest")).topic_for(Some(&value)), Ok(Some(_))));
        }
    }
}
