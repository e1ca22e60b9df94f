//! Avro's binary encoding, as JSON.
//!
//! Unions are shown as their value, without the name of its type. Decimals are strings of digits, other logical types are shown as what they are
//! made of, and bytes are Base64. Each item adds at least two bytes to the result, so that the limit of the result also limits the time.
//!
//! Not by `apache-avro` (0.21): its reader recurses without a limit, so that a list of 10,000 items in a recursive schema overflows the stack, and so does a
//! chain of 3,000 schemas in its parser. It builds values in memory, where a few bytes stand for millions of nulls.

mod schema;

use std::fmt::Write as _;

use schema::{AvroSchema, Type, TypeId};

use super::{DecodeError, DecodedJson, JsonText, MAX_DEPTH, SchemaSource, zigzag};

/// The size of a decimal of 128 bits. Larger ones are shown as bytes.
const DECIMAL_BYTES: usize = 16;

/// A schema, and those that it refers to.
#[derive(Debug)]
pub(super) struct Avro(AvroSchema);

impl Avro {
    pub(super) fn parse(source: &SchemaSource) -> Result<Self, String> {
        let references: Vec<&str> = source.references.iter().map(|(_, text)| &**text).collect();
        AvroSchema::parse(&source.text, &references).map(Self)
    }

    /// See [`Schema::size`](super::Schema::size).
    pub(super) fn size(&self) -> usize {
        self.0.size()
    }

    pub(super) fn decode(&self, payload: &[u8]) -> Result<DecodedJson, DecodeError> {
        let mut reader = Reader {
            rest: payload,
            schema: &self.0,
            json: JsonText::default(),
        };
        reader.value(self.0.root(), 0)?;
        if !reader.rest.is_empty() {
            return Err(DecodeError::Mismatch);
        }
        Ok(DecodedJson {
            name: self.0.name().to_owned(),
            text: reader.json.into_text()?,
        })
    }
}

struct Reader<'s, 'b> {
    rest: &'b [u8],
    schema: &'s AvroSchema,
    json: JsonText,
}

type Read<T = ()> = Result<T, DecodeError>;

impl<'b> Reader<'_, 'b> {
    /// Reads a value of this type.
    fn value(&mut self, id: TypeId, depth: usize) -> Read {
        if depth > MAX_DEPTH {
            return Err(DecodeError::Depth);
        }
        match self.schema.get(id).ok_or(DecodeError::Mismatch)? {
            Type::Null => self.json.push("null"),
            Type::Boolean => {
                let text = match self.take(1)? {
                    [0] => "false",
                    [1] => "true",
                    _ => return Err(DecodeError::Mismatch),
                };
                self.json.push(text)
            }
            Type::Int => {
                let number = i32::try_from(self.long()?).map_err(|_| DecodeError::Mismatch)?;
                self.json.push(&number.to_string())
            }
            Type::Long => {
                let number = self.long()?;
                self.json.push(&number.to_string())
            }
            Type::Float => {
                let number = f32::from_le_bytes(self.array()?);
                self.number(number.is_finite(), &format!("{number:?}"))
            }
            Type::Double => {
                let number = f64::from_le_bytes(self.array()?);
                self.number(number.is_finite(), &format!("{number:?}"))
            }
            Type::Bytes => {
                let bytes = self.bytes()?;
                self.json.push_bytes(bytes)
            }
            Type::String => self.string(),
            Type::Fixed(size) => {
                let bytes = self.take(*size)?;
                self.json.push_bytes(bytes)
            }
            Type::Uuid => {
                let bytes: [u8; 16] = self.array()?;
                self.json.push_string(&uuid(&bytes))
            }
            Type::Decimal { bytes, scale } => {
                let bytes = match bytes {
                    None => self.bytes()?,
                    Some(size) => self.take(*size)?,
                };
                match digits(bytes, *scale) {
                    Some(digits) => self.json.push_string(&digits),
                    None => self.json.push_bytes(bytes),
                }
            }
            Type::Enum(symbols) => {
                let symbol = self.index()?;
                let symbol = symbols.get(symbol).ok_or(DecodeError::Mismatch)?;
                self.json.push_string(symbol)
            }
            Type::Union(variants) => {
                let variant = self.index()?;
                let variant = variants.get(variant).ok_or(DecodeError::Mismatch)?;
                self.value(*variant, depth + 1)
            }
            Type::Array(items) => self.items(["[", "]"], |reader| reader.value(*items, depth + 1)),
            Type::Map(values) => self.items(["{", "}"], |reader| {
                reader.string()?;
                reader.json.push(":")?;
                reader.value(*values, depth + 1)
            }),
            Type::Record(fields) => {
                self.json.push("{")?;
                for (index, field) in fields.iter().enumerate() {
                    if index > 0 {
                        self.json.push(",")?;
                    }
                    self.json.push_string(&field.name)?;
                    self.json.push(":")?;
                    self.value(field.ty, depth + 1)?;
                }
                self.json.push("}")
            }
            // A schema has none.
            Type::Undefined(_) => Err(DecodeError::Mismatch),
        }
    }

    /// Reads blocks of items up to an empty one.
    fn items(&mut self, brackets: [&str; 2], mut item: impl FnMut(&mut Self) -> Read) -> Read {
        self.json.push(brackets[0])?;
        let mut is_first = true;
        loop {
            let count = self.long()?;
            if count == 0 {
                return self.json.push(brackets[1]);
            }
            if count < 0 {
                // The size of the block, for readers that skip it.
                self.long()?;
            }
            for _ in 0..count.unsigned_abs() {
                if !is_first {
                    self.json.push(",")?;
                }
                is_first = false;
                item(self)?;
            }
        }
    }

    fn number(&mut self, is_finite: bool, text: &str) -> Read {
        if is_finite {
            self.json.push(text)
        } else {
            // JSON has no such numbers.
            self.json.push_string(text)
        }
    }

    fn string(&mut self) -> Read {
        let bytes = self.bytes()?;
        let text = std::str::from_utf8(bytes).map_err(|_| DecodeError::Mismatch)?;
        self.json.push_string(text)
    }

    fn bytes(&mut self) -> Read<&'b [u8]> {
        let length = self.index()?;
        self.take(length)
    }

    fn index(&mut self) -> Read<usize> {
        usize::try_from(self.long()?).map_err(|_| DecodeError::Mismatch)
    }

    fn long(&mut self) -> Read<i64> {
        zigzag(&mut self.rest).ok_or(DecodeError::Mismatch)
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        let (bytes, rest) = self.rest.split_first_chunk().ok_or(DecodeError::Mismatch)?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn take(&mut self, count: usize) -> Read<&'b [u8]> {
        let (bytes, rest) = self.rest.split_at_checked(count).ok_or(DecodeError::Mismatch)?;
        self.rest = rest;
        Ok(bytes)
    }
}

/// The digits of a signed big-endian number with this many of them after the point; `None` if it is too large.
fn digits(bytes: &[u8], scale: usize) -> Option<String> {
    if bytes.len() > DECIMAL_BYTES || scale > 100 {
        return None;
    }
    let is_negative = bytes.first().is_some_and(|first| first & 0x80 != 0);
    let mut number = [if is_negative { 0xff } else { 0 }; DECIMAL_BYTES];
    number[DECIMAL_BYTES - bytes.len()..].copy_from_slice(bytes);
    let number = i128::from_be_bytes(number);
    let sign = if number < 0 { "-" } else { "" };
    let mut text = format!("{sign}{:0>width$}", number.unsigned_abs(), width = scale + 1);
    if scale > 0 {
        text.insert(text.len() - scale, '.');
    }
    Some(text)
}

fn uuid(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}
