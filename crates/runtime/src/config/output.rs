//! `output`: the topic of a result, which can be fixed, or chosen by a field of the payload or by a worker.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::error::Findings;

/// `pipelines.<name>.output`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum OutputConfig {
    /// A fixed topic.
    Topic(String),
    /// Topics from which the handler of a worker chooses. The first one is the default.
    AnyOf(Vec<String>),
    /// A field of the payload chooses the topic.
    Chosen(ChosenOutput),
}

/// A topic chosen by the value of a field of the JSON payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChosenOutput {
    /// The field, as a JSON pointer (RFC 6901).
    pub pointer: String,
    /// The topic for each value of the field. Numbers and booleans are compared as text.
    pub topics: BTreeMap<String, String>,
    /// The topic for payloads that are not JSON, lack the field, or have another value.
    pub default: String,
}

impl OutputConfig {
    /// The topic of a result for which neither payload nor handler choose one.
    #[must_use]
    pub fn default_topic(&self) -> &str {
        match self {
            Self::Topic(topic) => topic,
            Self::AnyOf(topics) => topics.first().map_or("", String::as_str),
            Self::Chosen(chosen) => &chosen.default,
        }
    }

    /// All topics that results may go to, sorted and without duplicates.
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
                findings.report(key, "is empty; list at least one topic");
            }
            Self::AnyOf(topics) => topics.iter().for_each(|topic| findings.topic(key, topic)),
            Self::Chosen(chosen) => findings.inside(key, |at| {
                if !is_pointer(&chosen.pointer) {
                    at.report("pointer", pointer_problem(&chosen.pointer));
                }
                at.topic("default", &chosen.default);
                if chosen.topics.is_empty() {
                    at.report("topics", "is empty; list at least one value with its topic");
                }
                for (value, topic) in &chosen.topics {
                    at.inside("topics", |at| at.topic(value, topic));
                }
            }),
        }
    }
}

/// Whether a text is a JSON pointer (RFC 6901), except for the empty one, which is the whole document.
pub(super) fn is_pointer(text: &str) -> bool {
    let escapes_are_valid = || text.split('~').skip(1).all(|after| after.starts_with(['0', '1']));
    text.starts_with('/') && escapes_are_valid()
}

pub(super) fn pointer_problem(text: &str) -> String {
    format!("`{text}` is not a JSON pointer: write the path of a field, such as /meta/queue")
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
        // The text of a flag or variable may denote a list: names of topics contain no comma and no bracket.
        let listed = text
            .trim()
            .strip_prefix('[')
            .and_then(|text| text.strip_suffix(']'));
        if listed.is_none() && !text.contains(',') {
            return Ok(OutputConfig::Topic(text.to_owned()));
        }
        let topics = listed
            .unwrap_or(text)
            .split(',')
            .map(|topic| topic.trim().to_owned());
        Ok(OutputConfig::AnyOf(topics.collect()))
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
    fn a_pointer_starts_with_a_slash_and_has_valid_escapes() {
        assert!(
            ["/", "/a", "/a~1b/0", "/a~0"]
                .iter()
                .all(|valid| is_pointer(valid))
        );
        assert!(
            ["", "a", "meta.queue", "/a~2", "/a~"]
                .iter()
                .all(|invalid| !is_pointer(invalid))
        );
    }
}
