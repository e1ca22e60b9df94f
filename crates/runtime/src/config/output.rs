//! To which topic a result goes: always the same one, one chosen by a field of the payload, or one that a worker chooses.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::problem::Findings;

/// `pipelines.<name>.output`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum OutputConfig {
    /// Always this topic.
    Topic(String),
    /// One of these topics, which the handler of a worker chooses; the first one when it chooses none.
    AnyOf(Vec<String>),
    /// The topic that a field of the payload names.
    Chosen(ChosenOutput),
}

/// A topic chosen by the value of a field of the JSON payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChosenOutput {
    /// The field, as a JSON pointer (RFC 6901).
    pub pointer: String,
    /// Values of the field with their topics. A number or a boolean is compared by its text.
    pub topics: BTreeMap<String, String>,
    /// The topic for payloads without the field, with another value, or that are not JSON.
    pub default: String,
}

impl OutputConfig {
    /// The topic for payloads of which nothing else is known.
    #[must_use]
    pub fn default_topic(&self) -> &str {
        match self {
            Self::Topic(topic) => topic,
            Self::AnyOf(topics) => topics.first().map_or("", String::as_str),
            Self::Chosen(chosen) => &chosen.default,
        }
    }

    /// Every topic that results may go to, each once.
    #[must_use]
    pub fn topics(&self) -> Vec<&str> {
        let mut topics = vec![self.default_topic()];
        match self {
            Self::Topic(_) => {}
            Self::AnyOf(listed) => topics.extend(listed.iter().map(String::as_str)),
            Self::Chosen(chosen) => topics.extend(chosen.topics.values().map(String::as_str)),
        }
        topics.sort_unstable();
        topics.dedup();
        topics
    }

    pub(super) fn check(&self, key: &str, findings: &mut Findings<'_>) {
        match self {
            Self::Topic(topic) => findings.topic(key, topic),
            Self::AnyOf(topics) if topics.is_empty() => {
                findings.wrong(key, "is empty; name at least one topic");
            }
            Self::AnyOf(topics) => topics.iter().for_each(|topic| findings.topic(key, topic)),
            Self::Chosen(chosen) => findings.inside(key, |at| {
                if !is_pointer(&chosen.pointer) {
                    at.wrong("pointer", pointer_problem(&chosen.pointer));
                }
                at.topic("default", &chosen.default);
                if chosen.topics.is_empty() {
                    at.wrong("topics", "is empty; name at least one value with its topic");
                }
                for (value, topic) in &chosen.topics {
                    at.inside("topics", |at| at.topic(value, topic));
                }
            }),
        }
    }
}

/// Whether a text is a JSON pointer (RFC 6901) below the document itself.
pub(super) fn is_pointer(text: &str) -> bool {
    let escapes_are_right = || text.split('~').skip(1).all(|after| after.starts_with(['0', '1']));
    text.starts_with('/') && escapes_are_right()
}

pub(super) fn pointer_problem(text: &str) -> String {
    format!("`{text}` is not a JSON pointer: write the way to the field, such as /meta/queue")
}

impl<'de> Deserialize<'de> for OutputConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OutputVisitor)
    }
}

struct OutputVisitor;

impl<'de> Visitor<'de> for OutputVisitor {
    type Value = OutputConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a topic, a list of topics, or { pointer, topics, default }")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<OutputConfig, E> {
        Ok(OutputConfig::Topic(text.to_owned()))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, list: S) -> Result<OutputConfig, S::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(list)).map(OutputConfig::AnyOf)
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<OutputConfig, M::Error> {
        ChosenOutput::deserialize(MapAccessDeserializer::new(map)).map(OutputConfig::Chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_begins_with_a_slash() {
        assert!(
            ["/", "/a", "/a~1b/0", "/a~0"]
                .iter()
                .all(|right| is_pointer(right))
        );
        assert!(
            ["", "a", "meta.queue", "/a~2", "/a~"]
                .iter()
                .all(|wrong| !is_pointer(wrong))
        );
    }
}
