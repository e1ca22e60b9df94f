//! Decodes values that were written with a schema of a registry, as JSON.
//!
//! Serializers for Confluent's schema registry put a zero byte and the id of the schema (4 bytes, big-endian) before each value. What follows is in
//! the format of the schema:
//!
//! | format | module | contents |
//! |---|---|---|
//! | Avro | `avro` | binary encoding. The schema and the data are read here, the data directly to JSON, because a few bytes of either can fill the memory |
//! | Protobuf | `protobuf` | the path of the message type in its file, and the message. `protox` compiles what the schema has left of it after it was reduced, `prost-reflect` reads the message |
//! | JSON Schema | - | a JSON document, whatever the schema says |
//!
//! Writers of dead-letter topics and of the registry choose schemas and values. So the length and the depth
//! of values, schemas and results are bounded: a stack that overflows ends the process. No IO.

mod avro;
mod json;
mod protobuf;

use bytes::Bytes;
use serde::de::IgnoredAny;

use avro::Avro;
use json::JsonText;
use protobuf::Protobuf;

/// Larger values are not decoded, in bytes.
pub(crate) const MAX_VALUE: usize = 1 << 20;
/// Larger results are not shown, in bytes.
pub(crate) const MAX_JSON: usize = 1 << 20;
/// Values that are nested deeper are not decoded.
const MAX_DEPTH: usize = 64;

/// The first byte of a value with a schema.
const MAGIC: u8 = 0;

/// A value with the id of its schema.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Framed {
    pub(crate) schema_id: u32,
    pub(crate) payload: Bytes,
}

/// The language of a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SchemaFormat {
    Avro,
    Protobuf,
    Json,
}

/// A schema as the registry returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SchemaSource {
    pub(crate) format: SchemaFormat,
    pub(crate) text: String,
    /// The names and texts of all schemas that it refers to, directly or not.
    pub(crate) references: Vec<(String, String)>,
}

/// A schema that is ready to use.
#[derive(Debug)]
pub(crate) struct Schema(Parsed);

#[derive(Debug)]
enum Parsed {
    Avro(Avro),
    Protobuf(Protobuf),
    Json,
}

/// A decoded value.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DecodedJson {
    /// The name of the record or message; empty if it has none.
    pub(crate) name: String,
    pub(crate) text: String,
}

/// Why a value was not decoded. Says nothing about its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error("the value does not match its schema")]
    Mismatch,
    #[error("the value has more than {MAX_VALUE} bytes")]
    LargeValue,
    #[error("the decoded value has more than {MAX_JSON} bytes")]
    LargeResult,
    #[error("the value is nested more than {MAX_DEPTH} levels deep")]
    Depth,
}

impl Framed {
    /// `None` if the value does not begin as one with a schema does.
    pub(crate) fn read(value: &Bytes) -> Option<Self> {
        let (id, _) = value.strip_prefix(&[MAGIC])?.split_first_chunk()?;
        Some(Self {
            schema_id: u32::from_be_bytes(*id),
            payload: value.slice(1 + id.len()..),
        })
    }
}

impl SchemaSource {
    /// Its size in bytes.
    pub(crate) fn size(&self) -> usize {
        let references = self.references.iter();
        let references = references.map(|(name, text)| name.len() + text.len());
        self.text.len() + references.sum::<usize>()
    }
}

impl Schema {
    /// Takes milliseconds for a large schema.
    ///
    /// # Errors
    /// Why the schema cannot be used.
    pub(crate) fn parse(source: &SchemaSource) -> Result<Self, String> {
        Ok(Self(match source.format {
            SchemaFormat::Avro => Parsed::Avro(Avro::parse(source)?),
            SchemaFormat::Protobuf => Parsed::Protobuf(Protobuf::parse(source)?),
            SchemaFormat::Json => Parsed::Json,
        }))
    }

    pub(crate) fn format(&self) -> SchemaFormat {
        match &self.0 {
            Parsed::Avro(_) => SchemaFormat::Avro,
            Parsed::Protobuf(_) => SchemaFormat::Protobuf,
            Parsed::Json => SchemaFormat::Json,
        }
    }

    /// Its approximate size in memory, in bytes.
    pub(crate) fn size(&self) -> usize {
        size_of::<Self>()
            + match &self.0 {
                Parsed::Avro(schema) => schema.size(),
                Parsed::Protobuf(schema) => schema.size(),
                Parsed::Json => 0,
            }
    }

    /// Takes milliseconds for a large value.
    pub(crate) fn decode(&self, payload: &[u8]) -> Result<DecodedJson, DecodeError> {
        if payload.len() > MAX_VALUE {
            return Err(DecodeError::LargeValue);
        }
        match &self.0 {
            Parsed::Avro(schema) => schema.decode(payload),
            Parsed::Protobuf(schema) => schema.decode(payload),
            Parsed::Json => document(payload),
        }
    }
}

fn document(payload: &[u8]) -> Result<DecodedJson, DecodeError> {
    let text = std::str::from_utf8(payload).map_err(|_| DecodeError::Mismatch)?;
    serde_json::from_str::<IgnoredAny>(text).map_err(|_| DecodeError::Mismatch)?;
    Ok(DecodedJson {
        name: String::new(),
        text: text.to_owned(),
    })
}

/// A variable-length number in which the lowest bit is the sign.
fn zigzag(rest: &mut &[u8]) -> Option<i64> {
    let mut bits = 0_u64;
    for shift in 0..10 {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        bits |= u64::from(byte & 0x7f) << (7 * shift);
        if byte & 0x80 == 0 {
            return Some((bits >> 1).cast_signed() ^ -(bits & 1).cast_signed());
        }
    }
    None
}

#[cfg(test)]
mod tests;
