//! Messages in the JSON mapping of Protobuf.
//!
//! `prost-reflect` has a serializer, too. It resolves each `google.protobuf.Any` recursively, and a message can contain more of them than fit on a
//! stack. It also fails for those whose type is not in the schema, and searches all fields of a type for each message.

use bytes::Bytes;
use prost_reflect::{DynamicMessage, Kind, MapKey, ReflectMessage as _, SerializeOptions, Value};

use super::super::{DecodeError, JsonText, MAX_DEPTH};

/// The message that contains another one with the name of its type.
const ANY: &str = "google.protobuf.Any";
/// Messages with a JSON mapping of their own. None of them contains a message of another kind.
const WELL_KNOWN: [&str; 16] = [
    "google.protobuf.BoolValue",
    "google.protobuf.BytesValue",
    "google.protobuf.DoubleValue",
    "google.protobuf.Duration",
    "google.protobuf.Empty",
    "google.protobuf.FieldMask",
    "google.protobuf.FloatValue",
    "google.protobuf.Int32Value",
    "google.protobuf.Int64Value",
    "google.protobuf.ListValue",
    "google.protobuf.StringValue",
    "google.protobuf.Struct",
    "google.protobuf.Timestamp",
    "google.protobuf.UInt32Value",
    "google.protobuf.UInt64Value",
    "google.protobuf.Value",
];
/// An enum whose only value is null.
const NULL: &str = "google.protobuf.NullValue";

type Written = Result<(), DecodeError>;

/// Writes a message.
pub(super) fn write(message: &DynamicMessage) -> Result<String, DecodeError> {
    let mut writer = Writer {
        json: JsonText::default(),
    };
    writer.message(message, 0)?;
    writer.json.into_text()
}

struct Writer {
    json: JsonText,
}

impl Writer {
    fn message(&mut self, message: &DynamicMessage, depth: usize) -> Written {
        if depth > MAX_DEPTH {
            return Err(DecodeError::Depth);
        }
        let descriptor = message.descriptor();
        let name = descriptor.full_name();
        if name == ANY
            && let Some((type_url, content)) = any(message)
        {
            return self.any(message, &type_url, content, depth);
        }
        if is_well_known(name) {
            return self.well_known(message);
        }
        self.json.push("{")?;
        self.fields(message, true, depth)?;
        self.json.push("}")
    }

    fn well_known(&mut self, message: &DynamicMessage) -> Written {
        let mut serializer = serde_json::Serializer::new(&mut self.json);
        let written = message.serialize_with_options(&mut serializer, &SerializeOptions::new());
        written.map_err(|_| self.json.error())
    }

    /// Writes the message that another one contains. If the schema does not have its type, or it does not
    /// match it, only the name of the type is written: what is masked cannot be found in bytes.
    fn any(&mut self, any: &DynamicMessage, type_url: &str, content: Bytes, depth: usize) -> Written {
        if type_url.is_empty() {
            return self.json.push("{}");
        }
        self.json.push("{\"@type\":")?;
        self.json.push_string(type_url)?;
        let name = type_url.rsplit_once('/').map_or(type_url, |(_, name)| name);
        let descriptor = any.descriptor().parent_pool().get_message_by_name(name);
        let content = descriptor.and_then(|descriptor| DynamicMessage::decode(descriptor, content).ok());
        if let Some(content) = content {
            if name == ANY || is_well_known(name) {
                self.json.push(",\"value\":")?;
                self.message(&content, depth + 1)?;
            } else {
                self.fields(&content, false, depth + 1)?;
            }
        }
        self.json.push("}")
    }

    fn fields(&mut self, message: &DynamicMessage, mut is_first: bool, depth: usize) -> Written {
        if depth > MAX_DEPTH {
            return Err(DecodeError::Depth);
        }
        for (field, value) in message.fields() {
            self.member(&mut is_first, field.json_name())?;
            self.value(value, &field.kind(), depth + 1)?;
        }
        for (extension, value) in message.extensions() {
            self.member(&mut is_first, extension.json_name())?;
            self.value(value, &extension.kind(), depth + 1)?;
        }
        Ok(())
    }

    /// Writes what is before the value of a member.
    fn member(&mut self, is_first: &mut bool, name: &str) -> Written {
        self.separate(is_first)?;
        self.json.push_string(name)?;
        self.json.push(":")
    }

    fn separate(&mut self, is_first: &mut bool) -> Written {
        if std::mem::take(is_first) {
            Ok(())
        } else {
            self.json.push(",")
        }
    }

    fn value(&mut self, value: &Value, kind: &Kind, depth: usize) -> Written {
        match value {
            Value::Bool(value) => self.json.push(if *value { "true" } else { "false" }),
            Value::I32(number) => self.json.push(&number.to_string()),
            Value::U32(number) => self.json.push(&number.to_string()),
            // As in JavaScript, JSON numbers have 53 bits for many readers.
            Value::I64(number) => self.json.push_string(&number.to_string()),
            Value::U64(number) => self.json.push_string(&number.to_string()),
            Value::F32(number) if number.is_finite() => self.json.push_serialized(number),
            Value::F32(number) => self.not_finite(f64::from(*number)),
            Value::F64(number) if number.is_finite() => self.json.push_serialized(number),
            Value::F64(number) => self.not_finite(*number),
            Value::String(text) => self.json.push_string(text),
            Value::Bytes(bytes) => self.json.push_bytes(bytes),
            Value::EnumNumber(number) => self.enum_value(*number, kind),
            Value::Message(message) => self.message(message, depth),
            Value::List(items) => {
                self.json.push("[")?;
                let mut is_first = true;
                for item in items {
                    self.separate(&mut is_first)?;
                    self.value(item, kind, depth)?;
                }
                self.json.push("]")
            }
            Value::Map(entries) => {
                let Kind::Message(entry) = kind else {
                    return Err(DecodeError::Mismatch);
                };
                let kind = entry.map_entry_value_field().kind();
                let mut entries: Vec<_> = entries.iter().map(|(key, value)| (text_of(key), value)).collect();
                // In the same order each time.
                entries.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
                self.json.push("{")?;
                let mut is_first = true;
                for (key, value) in entries {
                    self.member(&mut is_first, &key)?;
                    self.value(value, &kind, depth)?;
                }
                self.json.push("}")
            }
        }
    }

    fn not_finite(&mut self, number: f64) -> Written {
        self.json.push_string(if number.is_nan() {
            "NaN"
        } else if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        })
    }

    fn enum_value(&mut self, number: i32, kind: &Kind) -> Written {
        let Kind::Enum(ty) = kind else {
            return Err(DecodeError::Mismatch);
        };
        if ty.full_name() == NULL {
            return self.json.push("null");
        }
        match ty.get_value(number) {
            Some(value) => self.json.push_string(value.name()),
            None => self.json.push(&number.to_string()),
        }
    }
}

fn is_well_known(name: &str) -> bool {
    WELL_KNOWN.contains(&name)
}

/// The type and the content of a message in another one; `None` if it has other fields than the well-known type.
fn any(message: &DynamicMessage) -> Option<(String, Bytes)> {
    let type_url = message.get_field_by_number(1)?.as_str()?.to_owned();
    let content = message.get_field_by_number(2)?.as_bytes()?.clone();
    Some((type_url, content))
}

fn text_of(key: &MapKey) -> String {
    match key {
        MapKey::Bool(key) => key.to_string(),
        MapKey::I32(key) => key.to_string(),
        MapKey::I64(key) => key.to_string(),
        MapKey::U32(key) => key.to_string(),
        MapKey::U64(key) => key.to_string(),
        MapKey::String(key) => key.clone(),
    }
}
