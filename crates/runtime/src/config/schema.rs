//! `schema`: the JSON Schema of a pipeline's records.

#![expect(
    clippy::disallowed_types,
    reason = "a schema of the configuration, which the validator takes as a Value"
)]

use std::fmt;
use std::path::PathBuf;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::deserialize::TYPED;

/// `pipelines.<name>.schema`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum SchemaConfig {
    /// A file that contains it, as JSON.
    File(PathBuf),
    /// The schema itself.
    Inline(Map<String, Value>),
}

impl<'de> Deserialize<'de> for SchemaConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct(TYPED, SchemaVisitor)
    }
}

struct SchemaVisitor;

impl<'de> Visitor<'de> for SchemaVisitor {
    type Value = SchemaConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the path of a file, or a JSON Schema: an object")
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<SchemaConfig, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(path) => Ok(SchemaConfig::File(path.into())),
            Value::Object(schema) => Ok(SchemaConfig::Inline(schema)),
            _ => Err(D::Error::custom(
                "must be the path of a file, or a JSON Schema: an object",
            )),
        }
    }
}
