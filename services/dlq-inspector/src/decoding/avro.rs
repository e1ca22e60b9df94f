//! Avro's binary encoding, as JSON.
//!
//! Unions are shown as their value, without the name of its type. Decimals are strings of digits, other logical types are shown as what they are
//! made of, and bytes are Base64. Each item adds at least two bytes to the result, so that the limit of the result also limits the time.

use std::fmt::Write as _;

use apache_avro::Schema;
use apache_avro::schema::{InnerDecimalSchema, NamesRef, NamespaceRef, ResolvedSchema, UuidSchema};

use super::{DecodeError, DecodedJson, JsonText, SchemaSource, zigzag};

/// Values that are nested deeper are not decoded.
const MAX_DEPTH: usize = 64;
/// The size of a decimal of 128 bits. Larger ones are shown as bytes.
const DECIMAL_BYTES: usize = 16;

/// A schema, and those that it refers to.
#[derive(Debug)]
pub(super) struct Avro {
    schema: Schema,
    references: Vec<Schema>,
}

impl Avro {
    pub(super) fn parse(source: &SchemaSource) -> Result<Self, String> {
        let references = source.references.iter().map(|(_, text)| text);
        let parsed = Schema::parse_str_with_list(&source.text, references);
        let (schema, references) = parsed.map_err(|error| error.to_string())?;
        let avro = Self { schema, references };
        avro.resolved().map_err(|error| error.to_string())?;
        Ok(avro)
    }

    /// With its named types.
    fn resolved(&self) -> Result<ResolvedSchema<'_>, apache_avro::Error> {
        ResolvedSchema::new_with_schemata(self.references.iter().chain([&self.schema]).collect())
    }

    pub(super) fn decode(&self, payload: &[u8]) -> Result<DecodedJson, DecodeError> {
        let resolved = self.resolved().map_err(|_| DecodeError::Mismatch)?;
        let mut reader = Reader {
            rest: payload,
            names: resolved.get_names(),
            json: JsonText::default(),
        };
        reader.value(&self.schema, None, 0)?;
        if !reader.rest.is_empty() {
            return Err(DecodeError::Mismatch);
        }
        Ok(DecodedJson {
            name: self
                .schema
                .name()
                .map_or_else(String::new, |name| name.fullname(None)),
            text: reader.json.into_text()?,
        })
    }
}

struct Reader<'s, 'b> {
    rest: &'b [u8],
    names: &'s NamesRef<'s>,
    json: JsonText,
}

type Read<T = ()> = Result<T, DecodeError>;

impl<'b> Reader<'_, 'b> {
    /// Reads a value of this type, which is in this namespace.
    fn value(&mut self, schema: &Schema, namespace: NamespaceRef<'_>, depth: usize) -> Read {
        if depth > MAX_DEPTH {
            return Err(DecodeError::Mismatch);
        }
        match schema {
            Schema::Null => self.json.push("null"),
            Schema::Boolean => {
                let text = match self.take(1)? {
                    [0] => "false",
                    [1] => "true",
                    _ => return Err(DecodeError::Mismatch),
                };
                self.json.push(text)
            }
            Schema::Int | Schema::Date | Schema::TimeMillis => {
                let number = i32::try_from(self.long()?).map_err(|_| DecodeError::Mismatch)?;
                self.json.push(&number.to_string())
            }
            Schema::Long
            | Schema::TimeMicros
            | Schema::TimestampMillis
            | Schema::TimestampMicros
            | Schema::TimestampNanos
            | Schema::LocalTimestampMillis
            | Schema::LocalTimestampMicros
            | Schema::LocalTimestampNanos => {
                let number = self.long()?;
                self.json.push(&number.to_string())
            }
            Schema::Float => {
                let number = f32::from_le_bytes(self.array()?);
                self.number(number.is_finite(), &format!("{number:?}"))
            }
            Schema::Double => {
                let number = f64::from_le_bytes(self.array()?);
                self.number(number.is_finite(), &format!("{number:?}"))
            }
            Schema::Bytes | Schema::BigDecimal | Schema::Uuid(UuidSchema::Bytes) => {
                let bytes = self.bytes()?;
                self.json.push_bytes(bytes)
            }
            Schema::String | Schema::Uuid(UuidSchema::String) => self.string(),
            Schema::Fixed(fixed) | Schema::Duration(fixed) => {
                let bytes = self.take(fixed.size)?;
                self.json.push_bytes(bytes)
            }
            Schema::Uuid(UuidSchema::Fixed(fixed)) => {
                let bytes = self.take(fixed.size)?;
                self.json.push_string(&uuid(bytes))
            }
            Schema::Decimal(decimal) => {
                let bytes = match &decimal.inner {
                    InnerDecimalSchema::Bytes => self.bytes()?,
                    InnerDecimalSchema::Fixed(fixed) => self.take(fixed.size)?,
                };
                match digits(bytes, decimal.scale) {
                    Some(digits) => self.json.push_string(&digits),
                    None => self.json.push_bytes(bytes),
                }
            }
            Schema::Enum(symbols) => {
                let symbol = self.index()?;
                let symbol = symbols.symbols.get(symbol).ok_or(DecodeError::Mismatch)?;
                self.json.push_string(symbol)
            }
            Schema::Union(union) => {
                let variant = self.index()?;
                let variant = union.variants().get(variant).ok_or(DecodeError::Mismatch)?;
                self.value(variant, namespace, depth + 1)
            }
            Schema::Array(array) => self.items(["[", "]"], |reader| {
                reader.value(&array.items, namespace, depth + 1)
            }),
            Schema::Map(map) => self.items(["{", "}"], |reader| {
                reader.string()?;
                reader.json.push(":")?;
                reader.value(&map.types, namespace, depth + 1)
            }),
            Schema::Record(record) => {
                let name = record.name.fully_qualified_name(namespace);
                self.json.push("{")?;
                for (index, field) in record.fields.iter().enumerate() {
                    if index > 0 {
                        self.json.push(",")?;
                    }
                    self.json.push_string(&field.name)?;
                    self.json.push(":")?;
                    self.value(&field.schema, name.namespace(), depth + 1)?;
                }
                self.json.push("}")
            }
            Schema::Ref { name } => {
                let name = name.fully_qualified_name(namespace);
                let schema = *self.names.get(&*name).ok_or(DecodeError::Mismatch)?;
                self.value(schema, name.namespace(), depth + 1)
            }
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
