//! From a tree of strings to typed settings, with errors that name the field.
//!
//! serde stops at the first error. To report all of them, [`from_tree`] removes the field at fault and deserializes the
//! rest again, until no error is left.

use std::borrow::Cow;
use std::fmt;

use serde::de::value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{self, DeserializeOwned, IntoDeserializer, Unexpected, Visitor};
use serde::forward_to_deserialize_any;
use serde_path_to_error::Segment;

use super::error::{InvalidField, suggestion};
use super::tree::{Node, Path, Value};
use super::yaml;

/// Deserializes a whole tree.
///
/// # Errors
/// Every field that is unknown, missing or of the wrong type.
pub(super) fn from_tree<T: DeserializeOwned>(mut tree: Node) -> Result<T, Vec<InvalidField>> {
    let mut problems = Vec::new();
    let mut removed: Vec<Path> = Vec::new();
    loop {
        let error = match serde_path_to_error::deserialize(NodeDeserializer(&tree)) {
            Ok(value) if problems.is_empty() => return Ok(value),
            Ok(_) => return Err(problems),
            Err(error) => error,
        };
        let path = path_of(error.path());
        let FieldError { message, missing } = error.into_inner();
        let field = missing.map_or_else(|| path.clone(), |key| path.key(key));
        if !is_consequence(&field, missing, &removed, &problems) {
            problems.push(InvalidField::new(&field, message, tree.origin_of(&field)));
        }
        // A field inside the text of a flag or variable has no node of its own: the whole text is removed.
        let path = tree.nearest(&path);
        if path.0.is_empty() {
            return Err(problems);
        }
        tree.remove(&path);
        removed.push(path);
    }
}

/// The name of a newtype struct whose scalars have the types that they have in YAML.
pub(super) const TYPED: &str = "$typed";

fn path_of(path: &serde_path_to_error::Path) -> Path {
    path.iter().fold(Path::default(), |path, segment| match segment {
        Segment::Map { key } | Segment::Enum { variant: key } => path.key(key),
        Segment::Seq { index } => path.index(*index),
        Segment::Unknown => path,
    })
}

/// Whether a problem only follows from an earlier one: a field was removed because of it, or its key is misspelled.
fn is_consequence(field: &Path, missing: Option<&str>, removed: &[Path], problems: &[InvalidField]) -> bool {
    let is_misspelled = |key: &str| {
        let (parent, suggested) = (field.parent().to_string(), format!("did you mean `{key}`?"));
        problems
            .iter()
            .any(|earlier| earlier.field.starts_with(&parent) && earlier.problem.contains(&suggested))
    };
    // A mapping that is invalid without the removed key was complete before.
    let lacks = |removed: &Path| field.is_within(removed) || removed.parent() == *field;
    removed.iter().any(lacks) || missing.is_some_and(is_misspelled)
}

/// An error of a field, whose path `serde_path_to_error` tracks.
#[derive(Debug)]
struct FieldError {
    message: String,
    /// The missing key, if that is the error. The path is that of the mapping then.
    missing: Option<&'static str>,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for FieldError {}

impl de::Error for FieldError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self {
            message: message.to_string(),
            missing: None,
        }
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        // serde would show the value, which may be a secret.
        let found = match found {
            Unexpected::Unit | Unexpected::Option => {
                return Self::custom(format!("has no value; expected {expected}"));
            }
            Unexpected::UnitVariant => return Self::custom("has no value; write it as the key of a mapping"),
            Unexpected::Seq => "a list",
            Unexpected::Map => "a mapping",
            _ => "a string",
        };
        Self::custom(format!("is {found}; expected {expected}"))
    }

    fn unknown_variant(found: &str, expected: &'static [&'static str]) -> Self {
        Self::custom(format!(
            "`{}` is not one of {}",
            shortened(found),
            expected.join(", ")
        ))
    }

    fn unknown_field(found: &str, expected: &'static [&'static str]) -> Self {
        let suggestion = suggestion(found, expected.iter().copied());
        Self::custom(format!("unknown key{suggestion}"))
    }

    fn missing_field(field: &'static str) -> Self {
        Self {
            message: "is missing".to_owned(),
            missing: Some(field),
        }
    }
}

#[derive(Clone, Copy)]
struct NodeDeserializer<'t>(&'t Node);

impl<'t> IntoDeserializer<'_, FieldError> for NodeDeserializer<'t> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'t> NodeDeserializer<'t> {
    fn mismatch(self, expected: &str) -> FieldError {
        de::Error::custom(match &self.0.value {
            Value::Null | Value::Empty => format!("has no value; expected {expected}"),
            Value::Scalar(text) | Value::Plain(text) | Value::Raw(text) => {
                format!("`{}` is not {expected}", shortened(text))
            }
            Value::List(_) => format!("is a list; expected {expected}"),
            Value::Map(_) => format!("is a mapping; expected {expected}"),
        })
    }

    fn text(self, expected: &str) -> Result<&'t str, FieldError> {
        match &self.0.value {
            Value::Scalar(text) | Value::Plain(text) | Value::Raw(text) => Ok(text),
            _ => Err(self.mismatch(expected)),
        }
    }

    fn whole_number(self, max: u64) -> Result<u64, FieldError> {
        const EXPECTED: &str = "a whole number";
        // Wider than any field, so that a number out of range is reported as such.
        let number: i128 = self
            .text(EXPECTED)?
            .trim()
            .parse()
            .map_err(|_| self.mismatch(EXPECTED))?;
        let in_range = u64::try_from(number).ok().filter(|number| *number <= max);
        in_range.ok_or_else(|| {
            de::Error::custom(format!("{number} is out of range: must be between 0 and {max}"))
        })
    }

    /// This node, or the mapping or list that the text of a flag or variable denotes if it starts with `bracket`.
    fn expanded(self, bracket: char) -> Result<Cow<'t, Node>, FieldError> {
        match &self.0.value {
            Value::Raw(text) if text.trim_start().starts_with(bracket) => {
                yaml::parse_inline(text, &self.0.origin)
                    .map(Cow::Owned)
                    .map_err(de::Error::custom)
            }
            _ => Ok(Cow::Borrowed(self.0)),
        }
    }
}

fn shortened(text: &str) -> String {
    redeliver_core::failure::bounded_text(text, 60)
}

fn list(items: &[Node]) -> SeqDeserializer<impl Iterator<Item = NodeDeserializer<'_>>, FieldError> {
    SeqDeserializer::new(items.iter().map(NodeDeserializer))
}

fn map<'de, 't>(
    entries: &'t [(String, Node)],
) -> MapDeserializer<'de, impl Iterator<Item = (&'t str, NodeDeserializer<'t>)>, FieldError> {
    let entries = entries.iter();
    MapDeserializer::new(entries.map(|(key, node)| (key.as_str(), NodeDeserializer(node))))
}

impl<'de> de::Deserializer<'de> for NodeDeserializer<'_> {
    type Error = FieldError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        // A password may start with a brace too, so only a mapping in which every key has a value counts as one.
        if let Ok(node) = self.expanded('{')
            && let Value::Map(entries) = &node.value
            && entries
                .iter()
                .all(|(_, node)| !matches!(node.value, Value::Empty))
        {
            return visitor.visit_map(map(entries));
        }
        match &self.0.value {
            Value::Null | Value::Empty => visitor.visit_unit(),
            Value::Scalar(text) | Value::Plain(text) | Value::Raw(text) => visitor.visit_str(text),
            Value::List(items) => visitor.visit_seq(list(items)),
            Value::Map(entries) => visitor.visit_map(map(entries)),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        match self.text("true or false")?.trim() {
            "true" => visitor.visit_bool(true),
            "false" => visitor.visit_bool(false),
            _ => Err(self.mismatch("true or false")),
        }
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        visitor.visit_u64(self.whole_number(u32::MAX.into())?)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        visitor.visit_u64(self.whole_number(u64::MAX)?)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        let number: Option<f64> = self.text("a number")?.trim().parse().ok();
        match number.filter(|number| number.is_finite()) {
            Some(number) => visitor.visit_f64(number),
            None => Err(self.mismatch("a number")),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        visitor.visit_str(self.text("a string")?)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        match &self.0.value {
            Value::Null | Value::Empty => visitor.visit_none(),
            Value::Raw(text) if matches!(text.trim(), "" | "~" | "null") => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        let node = self.expanded('[')?;
        match &node.value {
            Value::List(items) => visitor.visit_seq(list(items)),
            Value::Raw(text) => {
                let item = |item: &str| Node::new(Value::Raw(item.trim().to_owned()), node.origin.clone());
                let items: Vec<Node> = text.split(',').map(item).collect();
                visitor.visit_seq(list(&items))
            }
            _ => Err(self.mismatch("a list such as [a, b]")),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        const EXPECTED: &str = "a mapping of keys to values";
        let node = self.expanded('{')?;
        match &node.value {
            Value::Map(entries) => visitor.visit_map(map(entries)),
            // A section whose lines are all commented out.
            Value::Null | Value::Empty => visitor.visit_map(map(&[])),
            // The text is not shown: it may be a mapping of secrets with a syntax error.
            Value::Scalar(_) | Value::Plain(_) | Value::Raw(_) => {
                Err(de::Error::custom(format!("is a string; expected {EXPECTED}")))
            }
            Value::List(_) => Err(self.mismatch(EXPECTED)),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        self.deserialize_map(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        let node = self.expanded('{')?;
        match &node.value {
            Value::Scalar(text) | Value::Plain(text) | Value::Raw(text) => {
                visitor.visit_enum(text.as_str().into_deserializer())
            }
            // A variant with a value, such as `{ pointer: /meta/created_at }`.
            Value::Map(entries) if entries.len() == 1 => {
                visitor.visit_enum(MapAccessDeserializer::new(map(entries)))
            }
            _ => Err(self.mismatch(&format!("one of {}", variants.join(", ")))),
        }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, _: V) -> Result<V::Value, FieldError> {
        Err(de::Error::custom("takes no value; write only the name"))
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        match name {
            TYPED => visitor.visit_newtype_struct(TypedDeserializer(self.0)),
            _ => visitor.visit_newtype_struct(self),
        }
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 u8 u16 f32 char bytes byte_buf unit_struct tuple tuple_struct identifier ignored_any
    }
}

/// Reads plain scalars as the JSON schema of YAML 1.2 (section 10.2) does: numbers and booleans are not text.
struct TypedDeserializer<'t>(&'t Node);

impl<'t> IntoDeserializer<'_, FieldError> for TypedDeserializer<'t> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> de::Deserializer<'de> for TypedDeserializer<'_> {
    type Error = FieldError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        let node = NodeDeserializer(self.0).expanded('{')?;
        match &node.value {
            Value::Null | Value::Empty => visitor.visit_unit(),
            Value::Scalar(text) | Value::Raw(text) => visitor.visit_str(text),
            Value::Plain(text) => match text.as_str() {
                "true" => visitor.visit_bool(true),
                "false" => visitor.visit_bool(false),
                number if number.starts_with(|first: char| first == '-' || first.is_ascii_digit()) => {
                    // The syntax of JSON, so `1.10.0` and `2020-12` are text.
                    match serde_json::from_str::<serde_json::Number>(number) {
                        Ok(number) => number.deserialize_any(visitor).map_err(de::Error::custom),
                        Err(_) => visitor.visit_str(text),
                    }
                }
                _ => visitor.visit_str(text),
            },
            Value::List(items) => {
                visitor.visit_seq(SeqDeserializer::new(items.iter().map(TypedDeserializer)))
            }
            Value::Map(entries) => {
                let entries = entries
                    .iter()
                    .map(|(key, node)| (key.as_str(), TypedDeserializer(node)));
                visitor.visit_map(MapDeserializer::new(entries))
            }
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct
        seq tuple tuple_struct map struct enum identifier ignored_any
    }
}
