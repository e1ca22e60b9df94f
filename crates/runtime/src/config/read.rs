//! From a tree of texts to typed settings, by serde, with errors that name the field.
//!
//! serde stops at the first error. To report all of them, the field at fault is taken out of the tree and
//! the rest is read again, until nothing is left to complain of.

use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::problem::{Problem, hint};
use super::tree::{Node, Path, Value};
use super::yaml;

/// Reads a whole tree.
///
/// # Errors
/// Every field that is unknown, missing or of the wrong type.
pub(super) fn read<T: DeserializeOwned>(mut tree: Node) -> Result<T, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut removed: Vec<Path> = Vec::new();
    loop {
        match T::deserialize(Reader {
            node: &tree,
            path: Path::default(),
        }) {
            Ok(value) if problems.is_empty() => return Ok(value),
            Ok(_) => return Err(problems),
            Err(fault) => {
                let path = fault.path.unwrap_or_default();
                let field = fault
                    .missing
                    .map_or_else(|| path.clone(), |field| path.key(field));
                if !follows(&field, fault.missing, &removed, &problems) {
                    problems.push(Problem::new(&field, fault.text, tree.origin_of(&field)));
                }
                // A field inside the text of a flag or variable goes with the whole text.
                let path = tree.nearest(&path);
                if path.0.is_empty() {
                    return Err(problems);
                }
                tree.remove(&path);
                removed.push(path);
            }
        }
    }
}

/// Whether a problem is only the consequence of another one: what belongs to a field that was taken out is
/// not missing, nor is a field that was misspelled.
fn follows(field: &Path, missing: Option<&str>, removed: &[Path], problems: &[Problem]) -> bool {
    let misspelled = |missing: &str| {
        let (parent, meant) = (field.parent().to_string(), format!("did you mean `{missing}`?"));
        problems
            .iter()
            .any(|told| told.field.starts_with(&parent) && told.problem.contains(&meant))
    };
    removed.iter().any(|gone| field.is_within(gone)) || missing.is_some_and(misspelled)
}

/// What is wrong with the value at a path; the path is filled in on the way up.
#[derive(Debug)]
struct Fault {
    text: String,
    path: Option<Path>,
    missing: Option<&'static str>,
}

impl Fault {
    fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            path: None,
            missing: None,
        }
    }

    fn at(mut self, path: &Path) -> Self {
        self.path.get_or_insert_with(|| path.clone());
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Fault {}

impl de::Error for Fault {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(message.to_string())
    }

    fn invalid_type(found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(format!("is {found}; expected {expected}"))
    }

    fn invalid_value(found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(format!("is {found}; expected {expected}"))
    }

    fn unknown_variant(found: &str, expected: &'static [&'static str]) -> Self {
        Self::new(format!("`{found}` is not one of {}", expected.join(", ")))
    }

    fn unknown_field(found: &str, expected: &'static [&'static str]) -> Self {
        Self::new(format!("unknown key{}", hint(found, expected.iter().copied())))
    }

    fn missing_field(field: &'static str) -> Self {
        Self {
            missing: Some(field),
            ..Self::new("is missing")
        }
    }
}

/// A node that is being read.
struct Reader<'t> {
    node: &'t Node,
    path: Path,
}

impl Reader<'_> {
    fn fault(&self, text: impl Into<String>) -> Fault {
        Fault::new(text).at(&self.path)
    }

    fn expected(&self, expected: &str) -> Fault {
        self.fault(match &self.node.value {
            Value::Null => format!("has no value; expected {expected}"),
            Value::Scalar(text) | Value::Raw(text) => format!("`{}` is not {expected}", shown(text)),
            Value::List(_) => format!("is a list; expected {expected}"),
            Value::Map(_) => format!("has keys of its own; expected {expected}"),
        })
    }

    fn text(&self, expected: &str) -> Result<&str, Fault> {
        match &self.node.value {
            Value::Scalar(text) | Value::Raw(text) => Ok(text),
            _ => Err(self.expected(expected)),
        }
    }

    /// The text of a flag or variable that stands for a mapping or a list, read as YAML.
    fn unfolded(&self, bracket: char) -> Result<Option<Node>, Fault> {
        match &self.node.value {
            Value::Raw(text) if text.trim_start().starts_with(bracket) => {
                yaml::parse_inline(text, &self.node.origin)
                    .map(Some)
                    .map_err(|problem| self.fault(problem))
            }
            _ => Ok(None),
        }
    }

    fn list<'de, V: Visitor<'de>>(&self, items: &[Node], visitor: V) -> Result<V::Value, Fault> {
        visitor
            .visit_seq(Items {
                items,
                next: 0,
                path: &self.path,
            })
            .map_err(|fault| fault.at(&self.path))
    }

    fn map<'de, V: Visitor<'de>>(&self, entries: &[(String, Node)], visitor: V) -> Result<V::Value, Fault> {
        visitor
            .visit_map(Entries {
                entries,
                next: 0,
                path: &self.path,
            })
            .map_err(|fault| fault.at(&self.path))
    }
}

fn shown(text: &str) -> String {
    redeliver_core::failure::bounded_text(text, 60)
}

macro_rules! whole_numbers {
    ($($method:ident $visit:ident $kind:ty,)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
            let text = self.text("a whole number")?;
            let number: i128 = text.trim().parse().map_err(|_| self.expected("a whole number"))?;
            let number = <$kind>::try_from(number).map_err(|_| {
                self.fault(format!("{number} is out of range; it is between {} and {}", <$kind>::MIN, <$kind>::MAX))
            })?;
            visitor.$visit(number)
        }
    )*};
}

impl<'de> de::Deserializer<'de> for Reader<'_> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        // A password may begin with a brace, too: only what is a mapping with values is one.
        if let Ok(Some(node)) = self.unfolded('{')
            && let Value::Map(entries) = &node.value
            && entries.iter().all(|(_, node)| !matches!(node.value, Value::Null))
        {
            let reader = Reader {
                node: &node,
                path: self.path,
            };
            return reader.deserialize_any(visitor);
        }
        let result = match &self.node.value {
            Value::Null => visitor.visit_unit(),
            Value::Scalar(text) | Value::Raw(text) => visitor.visit_str(text),
            Value::List(items) => self.list(items, visitor),
            Value::Map(entries) => self.map(entries, visitor),
        };
        result.map_err(|fault| fault.at(&self.path))
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.text("true or false")?.trim() {
            "true" => visitor.visit_bool(true),
            "false" => visitor.visit_bool(false),
            _ => Err(self.expected("true or false")),
        }
    }

    whole_numbers! {
        deserialize_i8 visit_i8 i8,
        deserialize_i16 visit_i16 i16,
        deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64,
        deserialize_u8 visit_u8 u8,
        deserialize_u16 visit_u16 u16,
        deserialize_u32 visit_u32 u32,
        deserialize_u64 visit_u64 u64,
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let number: Option<f64> = self.text("a number")?.trim().parse().ok();
        match number.filter(|number| number.is_finite()) {
            Some(number) => visitor.visit_f64(number),
            None => Err(self.expected("a number")),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let text = self.text("a text")?;
        visitor
            .visit_str(text)
            .map_err(|fault: Fault| fault.at(&self.path))
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match &self.node.value {
            Value::Null => visitor.visit_none(),
            Value::Raw(text) if matches!(text.trim(), "" | "~" | "null") => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        if let Some(node) = self.unfolded('[')? {
            return Reader {
                node: &node,
                path: self.path,
            }
            .deserialize_seq(visitor);
        }
        match &self.node.value {
            Value::List(items) => self.list(items, visitor),
            Value::Raw(text) => {
                let items: Vec<Node> = text
                    .split(',')
                    .map(|item| Node::new(Value::Raw(item.trim().to_owned()), self.node.origin.clone()))
                    .collect();
                self.list(&items, visitor)
            }
            _ => Err(self.expected("a list, written [a, b]")),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        if let Some(node) = self.unfolded('{')? {
            return Reader {
                node: &node,
                path: self.path,
            }
            .deserialize_map(visitor);
        }
        match &self.node.value {
            Value::Map(entries) => self.map(entries, visitor),
            // A section whose lines are all commented out.
            Value::Null => self.map(&[], visitor),
            // The text is not repeated: where a mapping belongs it may be one of secrets.
            Value::Scalar(_) | Value::Raw(_) => {
                Err(self.fault("is a text; expected a mapping of keys to values"))
            }
            Value::List(_) => Err(self.expected("a mapping of keys to values")),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        if let Some(node) = self.unfolded('{')? {
            let reader = Reader {
                node: &node,
                path: self.path,
            };
            return reader.deserialize_struct("", fields, visitor);
        }
        if let Value::Map(entries) = &self.node.value
            && let Some((key, _)) = entries.iter().find(|(key, _)| !fields.contains(&key.as_str()))
        {
            let text = format!("unknown key{}", hint(key, fields.iter().copied()));
            return Err(Fault::new(text).at(&self.path.key(key)));
        }
        self.deserialize_map(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        if let Some(node) = self.unfolded('{')? {
            return Reader {
                node: &node,
                path: self.path,
            }
            .deserialize_enum("", variants, visitor);
        }
        let choices = || format!("one of {}", variants.join(", "));
        match &self.node.value {
            Value::Scalar(text) | Value::Raw(text) if variants.contains(&text.as_str()) => visitor
                .visit_enum(text.as_str().into_deserializer())
                .map_err(|fault: Fault| fault.at(&self.path)),
            Value::Map(entries) => match &entries[..] {
                [(key, node)] if variants.contains(&key.as_str()) => {
                    let path = self.path.key(key);
                    visitor
                        .visit_enum(Variant {
                            key,
                            node,
                            path: &path,
                        })
                        .map_err(|fault| fault.at(&path))
                }
                [(key, _)] => {
                    let text = format!("unknown key{}", hint(key, variants.iter().copied()));
                    Err(Fault::new(text).at(&self.path.key(key)))
                }
                _ => Err(self.expected(&choices())),
            },
            _ => Err(self.expected(&choices())),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Fault> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        char bytes byte_buf unit unit_struct tuple tuple_struct identifier ignored_any
    }
}

struct Items<'t> {
    items: &'t [Node],
    next: usize,
    path: &'t Path,
}

impl<'de> de::SeqAccess<'de> for Items<'_> {
    type Error = Fault;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Fault> {
        let Some(node) = self.items.get(self.next) else {
            return Ok(None);
        };
        let path = self.path.index(self.next);
        self.next += 1;
        let reader = Reader {
            node,
            path: path.clone(),
        };
        seed.deserialize(reader)
            .map(Some)
            .map_err(|fault| fault.at(&path))
    }
}

struct Entries<'t> {
    entries: &'t [(String, Node)],
    next: usize,
    path: &'t Path,
}

impl<'de> de::MapAccess<'de> for Entries<'_> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let Some((key, _)) = self.entries.get(self.next) else {
            return Ok(None);
        };
        let reader: StrDeserializer<'_, Fault> = key.as_str().into_deserializer();
        seed.deserialize(reader)
            .map(Some)
            .map_err(|fault| fault.at(&self.path.key(key)))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        let (key, node) = &self.entries[self.next];
        self.next += 1;
        let path = self.path.key(key);
        seed.deserialize(Reader {
            node,
            path: path.clone(),
        })
        .map_err(|fault| fault.at(&path))
    }
}

/// A choice written as one key with a value, such as `{ pointer: /meta/created_at }`.
struct Variant<'t> {
    key: &'t str,
    node: &'t Node,
    path: &'t Path,
}

impl<'de, 't> de::EnumAccess<'de> for Variant<'t> {
    type Error = Fault;
    type Variant = Reader<'t>;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Reader<'t>), Fault> {
        let key: StrDeserializer<'_, Fault> = self.key.into_deserializer();
        let reader = Reader {
            node: self.node,
            path: self.path.clone(),
        };
        Ok((seed.deserialize(key)?, reader))
    }
}

impl<'de> de::VariantAccess<'de> for Reader<'_> {
    type Error = Fault;

    fn unit_variant(self) -> Result<(), Fault> {
        Err(self.fault("takes no value; write the word alone"))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Fault> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Fault> {
        de::Deserializer::deserialize_seq(self, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        de::Deserializer::deserialize_struct(self, "", fields, visitor)
    }
}
