//! Documents that must be evaluated as a whole.

#![expect(
    clippy::disallowed_types,
    reason = "filled by a reader that gives no name a meaning"
)]

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Parses a document, for those who must evaluate all of it. Prefer [`super::scalar_at`]: [`Value`] holds neither a number beyond a double, nor half
/// of a surrogate pair, nor more than 127 levels, all of which are JSON.
///
/// [`Value`] itself cannot be used. If any crate of the program enables the feature `raw_value` of `serde_json`, an object with the
/// field `$serde_json::private::RawValue` would become the document that the text of this field contains. A record could pass
/// for another one.
///
/// # Errors
/// If the bytes are not a JSON document, or [`Value`] does not hold it.
pub fn parse(document: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice::<Document>(document).map(|document| document.0)
}

/// Whether a field of a valid document has a name that is private to `serde_json`: those who deserialize the document into [`Value`] themselves get
/// another one than it is.
#[must_use]
pub fn has_private_name(document: &[u8]) -> bool {
    const PRIVATE: &str = "$serde_json::private::";
    let Ok(mut rest) = std::str::from_utf8(document) else {
        return false;
    };
    if !rest.contains(PRIVATE) && !rest.contains("\\u") {
        return false;
    }
    while let Some(start) = rest.find('"') {
        let mut is_escaped = false;
        let end = rest[start + 1..].find(|c| {
            let is_end = c == '"' && !is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            is_end
        });
        let Some(end) = end else { return false };
        let (string, after) = rest[start..].split_at(end + 2);
        rest = after;
        let is_name = rest.trim_ascii_start().starts_with(':');
        if is_name && serde_json::from_str::<String>(string).is_ok_and(|name| name.starts_with(PRIVATE)) {
            return true;
        }
    }
    false
}

struct Document(Value);

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DocumentVisitor).map(Self)
    }
}

struct DocumentVisitor;

impl<'de> Visitor<'de> for DocumentVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON document")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Number(number.into()))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Value, E> {
        Ok(Value::Number(number.into()))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Value, E> {
        let number = Number::from_f64(number).ok_or_else(|| E::custom("number out of range"))?;
        Ok(Value::Number(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(Value::String(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Value, E> {
        Ok(Value::String(text))
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> Result<Value, S::Error> {
        let mut items = Vec::new();
        while let Some(Document(item)) = list.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Value, M::Error> {
        let mut fields = Map::new();
        while let Some((name, Document(value))) = map.next_entry()? {
            fields.insert(name, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_private_names_are_found() {
        for (document, expected) in [
            (r#"{"$serde_json::private::RawValue":"1"}"#, true),
            (r#"[{"a":"\"","\u0024serde_json::private::Number" : "1"}]"#, true),
            (r#"{"a\\":{"\u0024serde\u005fjson::private::RawValue":1}}"#, true),
            (
                r#"{"a":"$serde_json::private::RawValue","b":["\u0024serde_json::private::Number"]}"#,
                false,
            ),
            (r#"{"a":"\"$serde_json::private::RawValue\":1"}"#, false),
            (r#"{"\ud800":1}"#, false),
            ("{\"", false),
        ] {
            assert_eq!(has_private_name(document.as_bytes()), expected, "{document}");
        }
    }

    #[test]
    fn documents_are_parsed_as_they_are() {
        for document in [
            "null",
            r#"{"a":[1,-2,1.5,"x",true,null,{}],"b":18446744073709551615}"#,
            r#"{"$serde_json::private::RawValue":"{\"a\":1}"}"#,
            r#"{"$serde_json::private::Number":"1"}"#,
        ] {
            assert_eq!(parse(document.as_bytes()).unwrap().to_string(), document);
        }
        assert_eq!(parse(br#"{"a":1,"a":2}"#).unwrap()["a"], 2);
        for invalid in ["", "{", "1 2", "nul", "1e400", r#""\ud800""#, &"[".repeat(200)] {
            assert!(parse(invalid.as_bytes()).is_err(), "{invalid}");
        }
    }
}
