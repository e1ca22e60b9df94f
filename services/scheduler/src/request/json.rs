//! Parses requests in JSON. The types of the requests are also their description in the OpenAPI document.
//!
//! The bytes of a job's data are kept unchanged. Times and durations are texts, which are read when a request is converted to its protobuf
//! message: they need a time zone, or a name for their failure.

use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use jiff::tz::TimeZone;
use prost_types::{Duration as ProtoDuration, Timestamp as ProtoTimestamp};
use redeliver_core::failure::bounded_text;
use redeliver_core::time::InvalidTimestamp;
use redeliver_core::{Failure, HumanDuration, Timestamp};
use redeliver_proto::convert::{to_duration, to_timestamp};
use redeliver_proto::v1;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error as _, IntoDeserializer as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::field::{Field, Format, NOT_JSON, hint};

pub(super) mod job;
pub(super) mod schedule;

/// The maximum nesting depth of a job's data. Common JSON parsers reject deeper data.
const MAX_DEPTH: usize = 128;
/// The maximum length of an invalid value in a message, in bytes.
const SHOWN: usize = 60;

/// Defines the words of fields, each with its value in protobuf.
macro_rules! words {
    ($($(#[$doc:meta])* $words:ident, $proto:ident { $($value:ident = $word:literal),+ })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, serde::Deserialize, utoipa::ToSchema)]
        #[serde(rename_all = "lowercase")]
        pub(crate) enum $words { $($value),+ }

        impl $words {
            /// The word for a value in protobuf; `None` if that is unspecified.
            pub(crate) fn of(value: redeliver_proto::v1::$proto) -> Option<&'static str> {
                match value {
                    redeliver_proto::v1::$proto::Unspecified => None,
                    $(redeliver_proto::v1::$proto::$value => Some($word),)+
                }
            }
        }

        impl From<$words> for redeliver_proto::v1::$proto {
            fn from(word: $words) -> Self {
                match word {
                    $($words::$value => Self::$value),+
                }
            }
        }
    )+};
}
use words;

/// Parses an object.
fn parse<'a, T: Deserialize<'a>>(value: &'a [u8]) -> Result<T, Failure> {
    let text = std::str::from_utf8(value)
        .map_err(|error| invalid_json(format_args!("not UTF-8 at byte {}", error.valid_up_to())))?;
    // An array would be read as the values of the fields.
    if !text.trim_ascii_start().starts_with('{') {
        return Err(invalid_json("it does not begin with `{`"));
    }
    serde_json::from_str(text).map_err(|error| {
        // Serde calls some invalid values errors of syntax, such as half of a surrogate pair.
        if let Err(error) = serde_json::from_str::<&RawValue>(text) {
            return invalid_json(error);
        }
        // To know where takes time, so only an invalid object is parsed in this way.
        let mut json = serde_json::Deserializer::from_str(text);
        match serde_path_to_error::deserialize::<_, T>(&mut json) {
            Ok(_) => invalid_json(error),
            Err(error) => invalid_value(&error.path().to_string(), &error.inner().to_string()),
        }
    })
}

fn invalid(field: Field<'_>, problem: &str) -> Failure {
    field.malformed(Format::Json, problem)
}

fn invalid_json(problem: impl fmt::Display) -> Failure {
    Failure::malformed(NOT_JSON, format!("the request is not a JSON object: {problem}"))
}

/// The failure of a value at `path`, from the message of serde, which names an unknown, repeated or missing field itself.
fn invalid_value(path: &str, message: &str) -> Failure {
    let message = message
        .rsplit_once(" at line ")
        .map_or(message, |(message, _)| message);
    if path == "headers" || path.starts_with("headers.") || path.starts_with("headers[") {
        // Values of headers can be secret.
        let kind = match message.starts_with("invalid ") {
            true => message.split(['"', '`']).next().unwrap_or_default(),
            false => message,
        };
        let problem = format!(
            "are invalid at `{}` ({}); write an object of names and strings, or an array of objects with `name` and `value`",
            bounded_text(path, SHOWN),
            bounded_text(kind.trim_end(), 2 * SHOWN)
        );
        return invalid(Field("headers"), &problem);
    }
    if let Some(unknown) = message.strip_prefix("unknown field `")
        && let Some((name, known)) = unknown.rsplit_once("`, expected ")
    {
        let hint = hint(name, known.split('`').skip(1).step_by(2));
        let message = format!("unknown field `{}`{hint}", bounded_text(name, SHOWN));
        return Failure::malformed("request.unknownField", message);
    }
    for (prefix, problem) in [
        ("duplicate field `", "appears more than once"),
        ("missing field `", "is missing"),
    ] {
        if let Some(name) = message
            .strip_prefix(prefix)
            .and_then(|rest| rest.split('`').next())
        {
            let nested = format!("{path}.{name}");
            return invalid(Field(if path == "." { name } else { &nested }), problem);
        }
    }
    let mut kinds = ["invalid type: ", "invalid value: ", "unknown variant "].into_iter();
    let problem = match kinds.find_map(|kind| message.strip_prefix(kind)) {
        Some(problem) => format!("is {}", problem.replacen(", expected ", "; expected ", 1)),
        None => message.to_owned(),
    };
    invalid(Field(path), &bounded_text(&problem, 4 * SHOWN))
}

/// Reads JSON as it is, also `null`.
fn raw<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// Reads a word, or null.
fn word<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    as_word(Option::deserialize(deserializer)?)
}

fn as_word<'de, T: Deserialize<'de>, E: de::Error>(text: Option<String>) -> Result<Option<T>, E> {
    let word = text.map(|text| T::deserialize(bounded_text(&text, SHOWN).into_deserializer()));
    word.transpose()
}

/// A number that is not negative, or null.
fn number<'de, D: Deserializer<'de>, T: TryFrom<u64>>(deserializer: D) -> Result<Option<T>, D::Error> {
    let Some(value) = Option::<&RawValue>::deserialize(deserializer)? else {
        return Ok(None);
    };
    let number = serde_json::from_str::<u64>(value.get()).ok();
    number
        .and_then(|number| number.try_into().ok())
        .map(Some)
        .ok_or_else(|| {
            let shown = bounded_text(value.get(), SHOWN);
            D::Error::custom(format!(
                "is `{shown}`; expected a whole number that is not negative"
            ))
        })
}

/// What a field with a short form has in place of an object.
trait Object {
    /// What the field can be.
    const EXPECTED: &'static str;
}

// A text, or an object. The description is that of the field.
#[derive(ToSchema)]
#[serde(untagged)]
enum TextOr<T> {
    Text(String),
    Object(#[schema(inline)] T),
}

impl<'de, T: Deserialize<'de> + Object> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrObject<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de> + Object> Visitor<'de> for TextOrObject<T> {
            type Value = TextOr<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::EXPECTED)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(TextOr::Object)
            }
        }

        deserializer.deserialize_any(TextOrObject(PhantomData))
    }
}

/// Headers: an object of names and texts, or an array of objects with `name` and `value`, or with `valueBase64` if that is supported.
#[derive(Default)]
struct HeaderFields<const BASE64: bool>(Vec<v1::Header>);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct HeaderItem {
    name: String,
    value: Option<String>,
    value_base64: Option<String>,
}

impl Object for HeaderItem {
    const EXPECTED: &str = "an object with `name` and `value`";
}

impl<'de, const BASE64: bool> Deserialize<'de> for HeaderFields<BASE64> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(HeaderVisitor::<BASE64>)
    }
}

struct HeaderVisitor<const BASE64: bool>;

impl<'de, const BASE64: bool> Visitor<'de> for HeaderVisitor<BASE64> {
    type Value = HeaderFields<BASE64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut headers, mut names) = (Vec::new(), BTreeSet::new());
        while let Some((name, value)) = map.next_entry::<String, Option<String>>()? {
            if !names.insert(name.clone()) {
                let name = bounded_text(&name, SHOWN);
                let problem = format!("`{name}` is repeated, which only an array allows");
                return Err(A::Error::custom(problem));
            }
            let value = value.map(Bytes::from);
            headers.push(v1::Header { name, value });
        }
        Ok(HeaderFields(headers))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut headers = Vec::new();
        while let Some(item) = items.next_element::<TextOr<HeaderItem>>()? {
            let (name, value) = match item {
                TextOr::Object(HeaderItem {
                    name,
                    value,
                    value_base64: None,
                }) => (name, value.map(Bytes::from)),
                TextOr::Object(HeaderItem {
                    name,
                    value: None,
                    value_base64: Some(text),
                }) if BASE64 => {
                    let value = STANDARD.decode(text);
                    let value = value.map_err(|error| A::Error::custom(format!("not Base64: {error}")))?;
                    (name, Some(value.into()))
                }
                _ => return Err(A::Error::custom("an item is invalid")),
            };
            headers.push(v1::Header { name, value });
        }
        Ok(HeaderFields(headers))
    }
}

/// Parses a date and time, rounded up to the millisecond. Without an offset it is interpreted in `zone`.
pub(crate) fn read_instant(field: Field<'_>, text: &str, zone: &TimeZone) -> Result<Timestamp, Failure> {
    Timestamp::parse_in(text, zone).map_err(|error| {
        let shown = bounded_text(text, SHOWN);
        let problem = match error {
            InvalidTimestamp::Form => {
                let right = "a date and time such as 2026-01-31T12:00:00Z or 2026-01-31T12:00:00";
                format!("is `{shown}`; expected {right}")
            }
            error => format!("is `{shown}`, which {error}"),
        };
        invalid(field, &problem)
    })
}

fn read_time(
    field: Field<'_>,
    text: Option<&String>,
    zone: &TimeZone,
) -> Result<Option<ProtoTimestamp>, Failure> {
    let time = text.map(|text| read_instant(field, text, zone).map(to_timestamp));
    time.transpose()
}

fn parse_duration(field: Field<'_>, text: &str) -> Result<HumanDuration, Failure> {
    let duration = text.parse::<HumanDuration>();
    duration.map_err(|error| invalid(field, &error.to_string()))
}

fn read_duration(field: Field<'_>, text: Option<&String>) -> Result<Option<ProtoDuration>, Failure> {
    let duration = text.map(|text| parse_duration(field, text).map(to_duration));
    duration.transpose()
}

fn read_base64(field: Field<'_>, text: Option<&String>) -> Result<Option<Bytes>, Failure> {
    let decoded = text.map(|text| STANDARD.decode(text)).transpose();
    let decoded = decoded.map_err(|error| invalid(field, &format!("is not Base64: {error}")))?;
    Ok(decoded.map(Bytes::from))
}

/// The bytes of a job's data, which are a part of `value`.
fn read_data(data: Option<&RawValue>, value: &Bytes) -> Result<Bytes, Failure> {
    let problem = "is missing; set it to null if the job has no data";
    let data = data.ok_or_else(|| invalid(Field("jobData"), problem))?.get();
    if is_too_deep(data) {
        let problem = format!("is nested more than {MAX_DEPTH} levels deep");
        return Err(invalid(Field("jobData"), &problem));
    }
    Ok(value.slice_ref(data.as_bytes()))
}

/// The data of a job as the JSON text from which it would be read unchanged; `None` if there is none.
pub(crate) fn as_data(bytes: &[u8]) -> Option<Box<RawValue>> {
    let json: Box<RawValue> = serde_json::from_slice(bytes).ok()?;
    // Without white space around it.
    let is_whole = json.get().len() == bytes.len();
    (is_whole && !is_too_deep(json.get())).then_some(json)
}

fn is_too_deep(data: &str) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in data.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return true;
        }
    }
    false
}
