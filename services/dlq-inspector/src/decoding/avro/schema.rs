//! Avro schemas, as a list of types that refer to each other by index.
//!
//! A parser of our own, because schemas are what others have registered: the time and the memory are linear in their length, and nothing recurses
//! deeper than `serde_json` lets a document be. Those of `apache-avro` are not: it follows a chain of references recursively, copies named types
//! where they are used, and builds the default values of fields, whose number can double with each line.

#![expect(
    clippy::disallowed_types,
    reason = "from json::parse: a schema is evaluated as a whole"
)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde_json::{Map, Value};

/// The maximum length of a full name in bytes. Each use of a name has a copy of its namespace, so that memory would be quadratic in the length of a
/// namespace.
const MAX_NAME: usize = 512;

/// The place of a type in its schema.
pub(super) type TypeId = usize;

/// A schema with all that it refers to.
#[derive(Debug)]
pub(super) struct AvroSchema {
    types: Vec<Type>,
    root: TypeId,
    /// The name of the root; empty if it has none.
    name: String,
}

#[derive(Debug)]
pub(super) enum Type {
    /// A name that is not defined yet.
    Undefined(String),
    Null,
    Boolean,
    Int,
    Long,
    Float,
    Double,
    Bytes,
    String,
    Fixed(usize),
    /// In 16 bytes.
    Uuid,
    Decimal {
        /// `None`: as many bytes as the value says.
        bytes: Option<usize>,
        scale: usize,
    },
    Enum(Vec<String>),
    Union(Vec<TypeId>),
    Array(TypeId),
    Map(TypeId),
    Record(Vec<Field>),
}

#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) ty: TypeId,
}

impl AvroSchema {
    /// `references`: the texts of all schemas that this one refers to, in any order.
    pub(super) fn parse(text: &str, references: &[&str]) -> Result<Self, String> {
        let mut parser = Parser::default();
        for (index, reference) in references.iter().enumerate() {
            // Two subjects can have the same schema.
            if !references[..index].contains(reference) {
                parser.document(reference)?;
            }
        }
        let root = parser.document(text)?;
        parser.finish(root)
    }

    pub(super) fn root(&self) -> TypeId {
        self.root
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn get(&self, id: TypeId) -> Option<&Type> {
        self.types.get(id)
    }

    /// Its approximate size in memory, in bytes.
    pub(super) fn size(&self) -> usize {
        let of_texts = |texts: usize, count: usize| texts + count * size_of::<String>();
        let owned = self.types.iter().map(|ty| match ty {
            Type::Enum(symbols) => of_texts(symbols.iter().map(String::len).sum(), symbols.len()),
            Type::Union(variants) => size_of_val(&**variants),
            Type::Record(fields) => {
                let names = fields.iter().map(|field| field.name.len()).sum::<usize>();
                names + size_of_val(&**fields)
            }
            _ => 0,
        });
        size_of_val(&*self.types) + owned.sum::<usize>()
    }
}

#[derive(Default)]
struct Parser {
    types: Vec<Type>,
    /// The types with names, by their full names.
    names: HashMap<String, TypeId>,
}

type Parsed<T = TypeId> = Result<T, String>;

impl Parser {
    fn document(&mut self, text: &str) -> Parsed {
        // Nested at most 128 levels deep.
        let json = redeliver_core::json::parse(text.as_bytes()).map_err(|error| error.to_string())?;
        self.ty(&json, "")
    }

    fn finish(self, root: TypeId) -> Result<AvroSchema, String> {
        let undefined = self.types.iter().find_map(|ty| match ty {
            Type::Undefined(name) => Some(name),
            _ => None,
        });
        if let Some(name) = undefined {
            return Err(format!("it does not define the type `{name}`"));
        }
        let name = self.names.into_iter().find(|(_, id)| *id == root);
        Ok(AvroSchema {
            types: self.types,
            root,
            name: name.map_or_else(String::new, |(name, _)| name),
        })
    }

    fn add(&mut self, ty: Type) -> TypeId {
        self.types.push(ty);
        self.types.len() - 1
    }

    /// A type that is used in this namespace.
    fn ty(&mut self, json: &Value, namespace: &str) -> Parsed {
        match json {
            Value::String(name) => self.used(name, namespace),
            Value::Array(variants) => {
                let variants = variants.iter().map(|variant| self.ty(variant, namespace));
                let variants = variants.collect::<Result<_, _>>()?;
                Ok(self.add(Type::Union(variants)))
            }
            Value::Object(object) => self.object(object, namespace),
            _ => Err("one of its types is neither a name, nor an object, nor an array".to_owned()),
        }
    }

    /// A primitive type, or the one with this name.
    fn used(&mut self, name: &str, namespace: &str) -> Parsed {
        let ty = match name {
            "null" => Type::Null,
            "boolean" => Type::Boolean,
            "int" => Type::Int,
            "long" => Type::Long,
            "float" => Type::Float,
            "double" => Type::Double,
            "bytes" => Type::Bytes,
            "string" => Type::String,
            _ => return Ok(self.named(full_name(name, namespace)?)),
        };
        Ok(self.add(ty))
    }

    /// The type with this full name, which may be defined later.
    fn named(&mut self, name: String) -> TypeId {
        match self.names.entry(name) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                self.types.push(Type::Undefined(entry.key().clone()));
                *entry.insert(self.types.len() - 1)
            }
        }
    }

    fn object(&mut self, object: &Map<String, Value>, namespace: &str) -> Parsed {
        let ty = object.get("type").ok_or("one of its types has no `type`")?;
        match ty.as_str() {
            Some("record" | "error") => self.record(object, namespace),
            Some("enum") => {
                let symbols = strings(object, "symbols")?;
                self.define(object, namespace, Type::Enum(symbols))
            }
            Some("fixed") => {
                let size = number(object, "size").ok_or("a fixed type has no valid `size`")?;
                self.define(
                    object,
                    namespace,
                    logical(object, &Type::Fixed(size)).unwrap_or(Type::Fixed(size)),
                )
            }
            Some("array") => {
                let items = object.get("items").ok_or("an array has no `items`")?;
                let items = self.ty(items, namespace)?;
                Ok(self.add(Type::Array(items)))
            }
            Some("map") => {
                let values = object.get("values").ok_or("a map has no `values`")?;
                let values = self.ty(values, namespace)?;
                Ok(self.add(Type::Map(values)))
            }
            _ => {
                let base = self.ty(ty, namespace)?;
                let logical = self.types.get(base).and_then(|base| logical(object, base));
                Ok(match logical {
                    Some(logical) => self.add(logical),
                    None => base,
                })
            }
        }
    }

    fn record(&mut self, object: &Map<String, Value>, namespace: &str) -> Parsed {
        let name = name_of(object, namespace)?;
        let own_namespace = name
            .rsplit_once('.')
            .map_or("", |(namespace, _)| namespace)
            .to_owned();
        let fields = object.get("fields").and_then(Value::as_array);
        let fields = fields.ok_or_else(|| format!("the record `{name}` has no `fields`"))?;
        let mut parsed = Vec::with_capacity(fields.len());
        for field in fields {
            let field_name = field.get("name").and_then(Value::as_str);
            let (Some(field_name), Some(ty)) = (field_name, field.get("type")) else {
                return Err(format!(
                    "a field of the record `{name}` has no `name` or no `type`"
                ));
            };
            parsed.push(Field {
                name: field_name.to_owned(),
                ty: self.ty(ty, &own_namespace)?,
            });
        }
        self.define(object, namespace, Type::Record(parsed))
    }

    fn define(&mut self, object: &Map<String, Value>, namespace: &str, ty: Type) -> Parsed {
        let name = name_of(object, namespace)?;
        let problem = format!("it defines the type `{name}` twice");
        let id = self.named(name);
        match self.types.get_mut(id) {
            Some(undefined @ Type::Undefined(_)) => {
                *undefined = ty;
                Ok(id)
            }
            _ => Err(problem),
        }
    }
}

/// The full name of a type that is defined in this namespace.
fn name_of(object: &Map<String, Value>, namespace: &str) -> Parsed<String> {
    let text = |key: &str| object.get(key).and_then(Value::as_str);
    let name = text("name").ok_or("a record, enum or fixed type has no `name`")?;
    full_name(name, text("namespace").unwrap_or(namespace))
}

fn full_name(name: &str, namespace: &str) -> Parsed<String> {
    let namespace = if name.contains('.') { "" } else { namespace };
    if namespace.len() + name.len() >= MAX_NAME {
        return Err(format!("it has a name of more than {MAX_NAME} bytes"));
    }
    Ok(if namespace.is_empty() {
        // A point at the beginning means no namespace.
        name.trim_start_matches('.').to_owned()
    } else {
        format!("{namespace}.{name}")
    })
}

/// The logical type of an object with this type, as far as it is shown in another way. Those that are not valid are ignored, as the specification says.
fn logical(object: &Map<String, Value>, base: &Type) -> Option<Type> {
    let bytes = match base {
        Type::Bytes => None,
        Type::Fixed(size) => Some(*size),
        _ => return None,
    };
    match object.get("logicalType")?.as_str()? {
        "uuid" if bytes == Some(16) => Some(Type::Uuid),
        "decimal" => {
            let precision = number(object, "precision")?;
            let scale = match object.get("scale") {
                None => 0,
                Some(_) => number(object, "scale")?,
            };
            (precision > 0 && scale <= precision).then_some(Type::Decimal { bytes, scale })
        }
        _ => None,
    }
}

fn number(object: &Map<String, Value>, key: &str) -> Option<usize> {
    usize::try_from(object.get(key)?.as_u64()?).ok()
}

fn strings(object: &Map<String, Value>, key: &str) -> Parsed<Vec<String>> {
    let strings = object.get(key).and_then(Value::as_array);
    let strings = strings.map(|list| list.iter().map(|item| item.as_str().map(str::to_owned)));
    let strings = strings.and_then(Iterator::collect);
    strings.ok_or_else(|| format!("an enum has no valid `{key}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        AvroSchema::parse(text, &[]).unwrap_err()
    }

    #[test]
    fn names_are_those_of_their_namespaces() {
        let text = r#"{"type":"record","name":"R","namespace":"a.b","fields":[
            {"name":"x","type":{"type":"enum","name":"E","symbols":["S"]}},
            {"name":"y","type":{"type":"record","name":"c.Q","fields":[{"name":"z","type":".T"}, {"name":"q","type":["null","Q"]}]}},
            {"name":"e","type":"a.b.E"}]}"#;
        let reference = r#"{"type":"fixed","name":"T","namespace":"","size":2}"#;
        let schema = AvroSchema::parse(text, &[reference, reference]).unwrap();
        assert_eq!(schema.name(), "a.b.R");
        assert_eq!(problem(text), "it does not define the type `T`");
        let twice = reference.replace("2}", "3}");
        let twice = AvroSchema::parse(text, &[reference, &twice]).unwrap_err();
        assert_eq!(twice, "it defines the type `T` twice");
    }

    #[test]
    fn what_is_not_valid_is_refused() {
        for (text, expected) in [
            (
                "1",
                "one of its types is neither a name, nor an object, nor an array",
            ),
            ("{}", "one of its types has no `type`"),
            (r#"{"type":"array"}"#, "an array has no `items`"),
            (r#"{"type":"map"}"#, "a map has no `values`"),
            (
                r#"{"type":"fixed","name":"F","size":-1}"#,
                "a fixed type has no valid `size`",
            ),
            (
                r#"{"type":"enum","name":"E","symbols":[1]}"#,
                "an enum has no valid `symbols`",
            ),
            (
                r#"{"type":"enum","symbols":[]}"#,
                "a record, enum or fixed type has no `name`",
            ),
            (
                r#"{"type":"record","name":"R"}"#,
                "the record `R` has no `fields`",
            ),
            (
                &format!(
                    r#"{{"type":"record","name":"R","namespace":"{}","fields":[{{"name":"a","type":"B"}}]}}"#,
                    "n".repeat(511)
                ),
                "it has a name of more than 512 bytes",
            ),
            (
                r#"{"type":"record","name":"R","fields":[{"name":"a"}]}"#,
                "a field of the record `R` has no `name` or no `type`",
            ),
        ] {
            assert_eq!(problem(text), expected, "{text}");
        }
    }

    #[test]
    fn size_counts_content_of_schema() {
        let size = |text: &str| AvroSchema::parse(text, &[]).unwrap().size();
        let symbol = "S".repeat(1_000);
        let large = format!(r#"{{"type":"enum","name":"E","symbols":["{symbol}"]}}"#);
        assert!(size(&large) >= 1_000 && size("\"int\"") < 100);
        let field =
            format!(r#"{{"type":"record","name":"R","fields":[{{"name":"{symbol}","type":"int"}}]}}"#);
        assert!(size(&field) >= 1_000);
    }
}
