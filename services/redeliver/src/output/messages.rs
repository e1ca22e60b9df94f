//! Messages of the protocol as JSON.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, ReflectMessage as _, Value,
};
use prost_types::{Duration, Timestamp};
use redeliver_client::messages::{self, Header, Position};
use redeliver_dlq_inspector::dialect::readable_number;
use redeliver_proto::{DESCRIPTORS, Message, names};
use serde_json::{Map, json};

use super::{Json, Text};

static POOL: LazyLock<DescriptorPool> =
    LazyLock::new(|| DescriptorPool::decode(DESCRIPTORS).expect("the schemas are valid"));

/// The fields whose empty text is one.
const TEXTS: [&str; 2] = ["redeliver.v1.Header.name", "redeliver.v1.WaitingCode.error_code"];

/// A message that commands print.
pub(crate) trait Shown: Message {
    /// Its name in the schema.
    const NAME: &'static str;
}

macro_rules! shown {
    ($($message:ident),*) => {
        #[cfg(test)]
        const SHOWN: &[&str] = &[$(stringify!($message)),*];

        $(impl Shown for messages::$message {
            const NAME: &'static str = stringify!($message);
        })*
    };
}

shown!(
    Application,
    AuditEntry,
    Completeness,
    DeadLetter,
    FoundRecord,
    FoundRecords,
    Group,
    Job,
    JobOutcome,
    PipelineTrace,
    Redrive,
    RedriveItem,
    RedriveSample,
    Stats,
    TopicStats,
    WaitingActed,
    WaitingActions,
    WaitingCounts,
    WaitingCoverage,
    WaitingRecord
);

/// The fields of a message, with their names in the schema. Times are as in RFC 3339, positions are `topic/partition/offset`, and values of
/// enumerations have their [names]. Bytes are text if they are UTF-8, else base64 under their name with `_base64`. What is not set is null;
/// messages that are not set are left out.
pub(crate) fn object<M: Shown>(message: &M) -> Map<String, Json> {
    let message = DynamicMessage::decode(descriptor::<M>(), message.encode_to_vec().as_slice());
    fields(&message.expect("what is encoded can be decoded"))
}

pub(super) fn descriptor<M: Shown>() -> MessageDescriptor {
    let descriptor = POOL.get_message_by_name(&format!("redeliver.v1.{}", M::NAME));
    descriptor.expect("the schemas have all messages")
}

fn fields(message: &DynamicMessage) -> Map<String, Json> {
    let descriptor = message.descriptor();
    let fields = descriptor.fields();
    let mut object: Map<String, Json> = fields.filter_map(|field| named(message, &field)).collect();
    if let Some(decoded) = decoded(message) {
        object.insert("decoded".to_owned(), decoded.into());
    }
    object
}

/// A field with its name, unless it is left out.
fn named(message: &DynamicMessage, field: &FieldDescriptor) -> Option<(String, Json)> {
    let is_set = !field.supports_presence() || message.has_field(field);
    let (mut name, value) = (field.name().to_owned(), message.get_field(field));
    let json = match &*value {
        Value::Bytes(bytes) if is_set => match std::str::from_utf8(bytes) {
            Ok(text) => text.into(),
            Err(_) => {
                name.push_str("_base64");
                STANDARD.encode(bytes).into()
            }
        },
        Value::Message(other) if !is_set => scalar(other).map(|_| Json::Null)?,
        Value::String(text) if !TEXTS.contains(&field.full_name()) => json!(text.text()),
        value if is_set => json_of(value, &field.kind()),
        _ => Json::Null,
    };
    Some((name, json))
}

fn json_of(value: &Value, kind: &Kind) -> Json {
    match (value, kind) {
        (Value::Bool(value), _) => json!(value),
        (Value::I32(value), _) => json!(value),
        (Value::I64(value), _) => json!(value),
        (Value::U32(value), _) => json!(value),
        (Value::U64(value), _) => json!(value),
        (Value::F32(value), _) => json!(value),
        (Value::F64(value), _) => json!(value),
        (Value::String(value), _) => json!(value),
        (Value::EnumNumber(number), Kind::Enum(enumeration)) => {
            // Like the code, it takes a value of a newer schema for the default one.
            let value = enumeration.get_value(*number);
            json!(names::of(
                value.unwrap_or_else(|| enumeration.default_value()).name()
            ))
        }
        (Value::Message(message), _) => scalar(message).unwrap_or_else(|| fields(message).into()),
        (Value::List(list), _) => list.iter().map(|value| json_of(value, kind)).collect(),
        (Value::Map(map), Kind::Message(entry)) => {
            let kind = entry.map_entry_value_field().kind();
            let entries = map
                .iter()
                .filter_map(|(key, value)| Some((key.as_str()?, json_of(value, &kind))));
            entries.collect()
        }
        _ => Json::Null,
    }
}

/// A message that is shown as a text.
fn scalar(message: &DynamicMessage) -> Option<Json> {
    fn text<M: Message + Default + Text>(message: &DynamicMessage) -> Json {
        json!(message.transcode_to::<M>().ok().text())
    }
    match message.descriptor().full_name() {
        "google.protobuf.Timestamp" => Some(text::<Timestamp>(message)),
        "google.protobuf.Duration" => Some(text::<Duration>(message)),
        "redeliver.v1.Position" => Some(text::<Position>(message)),
        _ => None,
    }
}

/// The number in a binary header of a known framework.
fn decoded(message: &DynamicMessage) -> Option<String> {
    if message.descriptor().full_name() != "redeliver.v1.Header" {
        return None;
    }
    let header: Header = message.transcode_to().ok()?;
    readable_number(&header.name, header.value.as_deref()?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// A new field is printed, unless a command leaves it out by its name. So it has to be added here.
    #[test]
    fn printed_fields_are_known() {
        let message = |name: &&str| POOL.get_message_by_name(&format!("redeliver.v1.{name}"));
        let mut pending: Vec<MessageDescriptor> = SHOWN.iter().filter_map(message).collect();
        let mut fields = BTreeSet::new();
        while let Some(message) = pending.pop() {
            let is_text = scalar(&DynamicMessage::new(message.clone())).is_some();
            for field in message.fields().filter(|_| !is_text) {
                if fields.insert(format!("{}.{}\n", message.name(), field.name()))
                    && let Kind::Message(message) = field.kind()
                {
                    pending.push(message);
                }
            }
        }
        let fields = String::from_iter(fields);
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/output/fields.txt");
        if std::env::var_os("REDELIVER_UPDATE").is_some() {
            std::fs::write(file, &fields).unwrap();
        }
        let known = std::fs::read_to_string(file).unwrap();
        assert!(
            fields == known,
            "run this test with REDELIVER_UPDATE=1, and review {file}"
        );
    }

    #[test]
    fn null_empty_and_binary_values_differ() {
        let header = |name: &str, value: Option<&'static [u8]>| Header {
            name: name.to_owned(),
            value: value.map(bytes::Bytes::from_static),
        };
        let job = messages::Job {
            headers: vec![
                header("a", None),
                header("", Some(b"")),
                header("a", Some(b"\xff")),
                header("kafka_dlt-original-partition", Some(&[0, 0, 0, 2])),
            ],
            ..messages::Job::default()
        };
        let expected = json!([
            { "name": "a", "value": null },
            { "name": "", "value": "" },
            { "name": "a", "value_base64": "/w==" },
            { "name": "kafka_dlt-original-partition", "value": "\0\0\0\u{2}", "decoded": "2" },
        ]);
        assert_eq!(object(&job)["headers"], expected);
    }
}
