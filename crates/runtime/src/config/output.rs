//! `output`: the topic of a result, which can be fixed, or chosen by the record, by the response or by a worker.

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
    /// The record or the response of the endpoint chooses the topic.
    Chosen(ChosenOutput),
}

/// A topic chosen by the value of a field of a JSON document, or by the status of the response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChosenOutput {
    /// What chooses.
    #[serde(default)]
    pub by: ChosenBy,
    /// The field, as a JSON pointer (RFC 6901). Not with [`ChosenBy::Status`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pointer: Option<String>,
    /// The topic for each value of the field. Numbers and booleans are compared as text, numbers by the shortest one. `None`: the result is dropped.
    pub topics: BTreeMap<String, Option<String>>,
    /// The topic for documents that are not JSON, lack the field, or have another value. `None`: the result is dropped.
    // A missing key would otherwise mean the same as null, and drop results by mistake.
    #[serde(deserialize_with = "Option::deserialize")]
    pub default: Option<String>,
}

/// What chooses the topic of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChosenBy {
    /// A field of the record's value.
    #[default]
    Payload,
    /// A field of the body of the endpoint's response.
    Response,
    /// The status of the response.
    Status,
}

impl OutputConfig {
    /// The default topic of a result. `None`: such a result is dropped.
    #[must_use]
    pub fn default_topic(&self) -> Option<&str> {
        match self {
            Self::Topic(topic) => Some(topic),
            Self::AnyOf(topics) => topics.first().map(String::as_str),
            Self::Chosen(chosen) => chosen.default.as_deref(),
        }
    }

    /// All topics that results may go to, sorted and without duplicates.
    #[must_use]
    pub fn topics(&self) -> Vec<&str> {
        let mut topics: Vec<&str> = self.default_topic().into_iter().collect();
        match self {
            Self::Topic(_) => {}
            Self::AnyOf(listed) => topics.extend(listed.iter().map(String::as_str)),
            Self::Chosen(chosen) => topics.extend(chosen.topics.values().flatten().map(String::as_str)),
        }
        topics.sort_unstable();
        topics.dedup();
        topics
    }

    /// Whether some results are dropped.
    #[must_use]
    pub fn drops_results(&self) -> bool {
        match self {
            Self::Topic(_) | Self::AnyOf(_) => false,
            Self::Chosen(chosen) => chosen.default.is_none() || chosen.topics.values().any(Option::is_none),
        }
    }

    pub(super) fn check(&self, key: &str, findings: &mut Findings<'_>) {
        match self {
            Self::Topic(topic) => findings.topic(key, topic),
            Self::AnyOf(topics) if topics.is_empty() => {
                findings.report(key, "is empty; list at least one topic");
            }
            Self::AnyOf(topics) => topics.iter().for_each(|topic| findings.topic(key, topic)),
            Self::Chosen(chosen) => findings.inside(key, |at| {
                chosen.check_values(at);
                if let Some(default) = &chosen.default {
                    at.topic("default", default);
                }
                if chosen.topics.is_empty() {
                    at.report("topics", "is empty; list at least one value with its topic");
                } else if self.topics().is_empty() {
                    at.report("topics", "names no topic; to drop all results, omit `output`");
                }
                for (value, topic) in &chosen.topics {
                    if let Some(topic) = topic {
                        at.inside("topics", |at| at.topic(value, topic));
                    }
                }
            }),
        }
    }
}

impl ChosenOutput {
    fn check_values(&self, at: &mut Findings<'_>) {
        match (self.by, &self.pointer) {
            (ChosenBy::Status, None) => {
                for status in self.topics.keys().filter(|status| !is_status(status)) {
                    at.inside("topics", |at| {
                        at.report(status, "is not a status: write a number from 100 to 599");
                    });
                }
            }
            (ChosenBy::Status, Some(_)) => {
                at.report("pointer", "has no effect with `by: status`: omit it");
            }
            (ChosenBy::Payload | ChosenBy::Response, Some(pointer)) => {
                if !is_pointer(pointer) {
                    at.report("pointer", pointer_problem(pointer));
                }
            }
            (ChosenBy::Payload | ChosenBy::Response, None) => {
                at.report(
                    "pointer",
                    "is missing: write the path of a field, such as /meta/queue",
                );
            }
        }
    }
}

fn is_status(text: &str) -> bool {
    text.parse::<u16>()
        .is_ok_and(|status| (100..600).contains(&status) && status.to_string() == text)
}

/// Maximum length of a JSON pointer, which also limits how deep it points.
const POINTER_BYTES: usize = 256;

/// Whether a text is a JSON pointer (RFC 6901) of a supported length, except for the empty one, which is the whole document.
#[must_use]
pub fn is_pointer(text: &str) -> bool {
    let escapes_are_valid = || text.split('~').skip(1).all(|after| after.starts_with(['0', '1']));
    text.starts_with('/') && text.len() <= POINTER_BYTES && escapes_are_valid()
}

/// What is wrong with a text that is no JSON pointer.
#[must_use]
pub fn pointer_problem(text: &str) -> String {
    if text.len() > POINTER_BYTES {
        return format!(
            "is a JSON pointer of {} bytes: the maximum is {POINTER_BYTES}",
            text.len()
        );
    }
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
        f.write_str("a topic, a list of topics, or { by, pointer, topics, default }")
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
    fn pointer_syntax_is_checked() {
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
        let longest = "/a".repeat(POINTER_BYTES / 2);
        let too_long = format!("{longest}b");
        assert!(is_pointer(&longest) && !is_pointer(&too_long));
        assert!(pointer_problem(&too_long).contains("257 bytes"));
    }
}
