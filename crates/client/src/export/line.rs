//! The lines of a file as JSON.
//!
//! Bytes are text under their name if they are UTF-8, and otherwise in base64 under their name with `_base64`. A null is not the same as nothing: a part
//! that is left out is named in `partial`.

use std::borrow::Cow;

use base64::Engine as _;
use base64::display::Base64Display;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use redeliver_core::pipeline::is_topic_name;
use redeliver_core::{Headers, Position, Timestamp, TimestampType};
use redeliver_proto::v1::DeadLetterState;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{ExportedDeadLetter, Gap, Partial};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FirstLine<'a> {
    #[serde(rename = "redeliver_dead_letters")]
    pub(super) version: u32,
    pub(super) filter: Cow<'a, str>,
    pub(super) exported_at: Cow<'a, str>,
}

impl FirstLine<'_> {
    /// The version of the first line of a file, also of a later version with other fields.
    pub(super) fn version_of(line: &[u8]) -> Option<u32> {
        #[derive(Deserialize)]
        struct Version {
            redeliver_dead_letters: u32,
        }
        let version = serde_json::from_slice::<Version>(line).ok()?;
        Some(version.redeliver_dead_letters)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EndLine {
    pub(super) end: Summary,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Summary {
    pub(super) dead_letters: u64,
    pub(super) partial: u64,
    pub(super) complete: bool,
    pub(super) as_of: Option<String>,
    pub(super) missing_partitions: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LetterLine<'a> {
    topic: Cow<'a, str>,
    partition: i32,
    offset: i64,
    /// In milliseconds.
    timestamp: Option<i64>,
    timestamp_type: Option<TimestampType>,
    #[serde(with = "State")]
    state: DeadLetterState,
    group: Option<Cow<'a, str>>,
    #[serde(default, skip_serializing_if = "is_exact")]
    partial: PartialLine,
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    key: Given<'a>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key_base64: Option<Base64<'a>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    headers: Option<Vec<HeaderLine<'a>>>,
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    value: Given<'a>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value_base64: Option<Base64<'a>>,
}

/// The names of states.
#[derive(Serialize, Deserialize)]
#[serde(remote = "DeadLetterState", rename_all = "lowercase")]
enum State {
    #[serde(rename = "unknown")]
    Unspecified,
    Open,
    Redriven,
    Discarded,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderLine<'a> {
    name: Cow<'a, str>,
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    value: Given<'a>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value_base64: Option<Base64<'a>>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct PartialLine {
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<Gap>,
    #[serde(skip_serializing_if = "Option::is_none")]
    headers: Option<Gap>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Gap>,
}

fn is_exact(partial: &PartialLine) -> bool {
    partial.key.is_none() && partial.headers.is_none() && partial.value.is_none()
}

/// A text or null; `None` if the field is left out.
type Given<'a> = Option<Option<Cow<'a, str>>>;

fn given<'de, D: Deserializer<'de>>(field: D) -> Result<Given<'static>, D::Error> {
    Option::<String>::deserialize(field).map(|text| Some(text.map(Cow::Owned)))
}

/// Bytes that are written in base64.
struct Base64<'a>(Cow<'a, [u8]>);

impl Serialize for Base64<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&Base64Display::new(&self.0, &STANDARD))
    }
}

impl<'de> Deserialize<'de> for Base64<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        let bytes = STANDARD.decode(&*text);
        bytes
            .map(|bytes| Self(Cow::Owned(bytes)))
            .map_err(|_| D::Error::custom("is not base64"))
    }
}

/// Bytes as the fields of a line.
fn written(bytes: Option<&[u8]>) -> (Given<'_>, Option<Base64<'_>>) {
    match bytes.map(|bytes| (bytes, std::str::from_utf8(bytes))) {
        None => (Some(None), None),
        Some((_, Ok(text))) => (Some(Some(text.into())), None),
        Some((bytes, Err(_))) => (None, Some(Base64(bytes.into()))),
    }
}

/// The bytes of two fields of a line; `None` if both are left out.
fn read(name: &str, text: Given<'_>, base64: Option<Base64<'_>>) -> Result<Option<Option<Bytes>>, String> {
    match (text, base64) {
        (None, None) => Ok(None),
        (Some(text), None) => Ok(Some(text.map(|text| text.into_owned().into()))),
        (None, Some(Base64(bytes))) => Ok(Some(Some(bytes.into_owned().into()))),
        (Some(_), Some(_)) => Err(format!(
            "has both `{name}` and `{name}_base64`; one of them is allowed"
        )),
    }
}

impl<'a> LetterLine<'a> {
    pub(super) fn of(letter: &'a ExportedDeadLetter) -> Self {
        let Partial { key, headers, value } = letter.partial;
        // A part that is null although the record has one is left out.
        let part = |bytes: &'a Option<Bytes>, gap: Option<Gap>| match (bytes, gap) {
            (None, Some(_)) => (None, None),
            (bytes, _) => written(bytes.as_deref()),
        };
        let list = letter.headers.iter().map(|(name, value)| {
            let (value, value_base64) = written(value);
            HeaderLine {
                name: name.into(),
                value,
                value_base64,
            }
        });
        let has_headers = !matches!(headers, Some(Gap::Withheld | Gap::Gone));
        let (key_text, key_base64) = part(&letter.key, key);
        let (value_text, value_base64) = part(&letter.value, value);
        Self {
            topic: (&*letter.position.topic).into(),
            partition: letter.position.partition,
            offset: letter.position.offset,
            timestamp: letter.timestamp.map(Timestamp::as_millis),
            timestamp_type: letter.timestamp_type,
            state: letter.state,
            group: letter.group.as_deref().map(Cow::Borrowed),
            partial: PartialLine { key, headers, value },
            key: key_text,
            key_base64,
            headers: has_headers.then(|| list.collect()),
            value: value_text,
            value_base64,
        }
    }
}

impl LetterLine<'_> {
    /// The dead letter of a line, or what is wrong with it. The text contains nothing of the line but names of fields.
    pub(super) fn read(line: &[u8]) -> Result<ExportedDeadLetter, String> {
        let mut json = serde_json::Deserializer::from_slice(line);
        let read = serde_path_to_error::deserialize::<_, LetterLine<'_>>(&mut json);
        let line = read.map_err(|error| {
            // The text of the error itself could quote a value.
            let column = error.inner().column();
            let path: String = error.path().to_string().escape_debug().take(100).collect();
            match path.as_str() {
                "." => format!(
                    "is not a dead letter: it is not valid JSON, or a field is missing (column {column})"
                ),
                path => format!("field `{path}` is not valid (column {column})"),
            }
        })?;
        json.end()
            .map_err(|_| "has more than one JSON object".to_owned())?;
        line.check()
    }

    fn check(self) -> Result<ExportedDeadLetter, String> {
        let PartialLine { key, headers, value } = self.partial;
        let partial = Partial { key, headers, value };
        if !is_topic_name(&self.topic) {
            return Err("field `topic` is not the name of a topic".to_owned());
        }
        for (name, is_negative) in [("partition", self.partition < 0), ("offset", self.offset < 0)] {
            if is_negative {
                return Err(format!("field `{name}` is negative"));
            }
        }
        let missing =
            |name: &str| format!("has neither `{name}`, also not null, nor a reason in `partial.{name}`");
        let present = |name: &str, bytes: Option<Option<Bytes>>, gap: Option<Gap>| match bytes {
            None if gap.is_none() => Err(missing(name)),
            bytes => Ok(bytes.flatten()),
        };
        let mut list = Headers::new();
        if self.headers.is_none() && headers.is_none() {
            return Err(missing("headers"));
        }
        for header in self.headers.into_iter().flatten() {
            let value = read("value", header.value, header.value_base64);
            let value = value
                .and_then(|value| value.ok_or_else(|| "has neither `value` nor `value_base64`".to_owned()));
            let value = value.map_err(|problem| format!("a header {problem}"))?;
            list.push(&header.name, value.as_deref());
        }
        Ok(ExportedDeadLetter {
            position: Position {
                topic: (&*self.topic).into(),
                partition: self.partition,
                offset: self.offset,
            },
            timestamp: self.timestamp.map(Timestamp::from_millis),
            timestamp_type: self.timestamp_type,
            state: self.state,
            group: self.group.map(Cow::into_owned),
            key: present("key", read("key", self.key, self.key_base64)?, key)?,
            headers: list,
            value: present("value", read("value", self.value, self.value_base64)?, value)?,
            partial,
        })
    }
}
