//! The fields of JSON values that are indexed, as `dlq_inspector.json_fields` names them.

use redeliver_core::Headers;
use serde_json::Value;

use crate::header_list;

/// Longer texts are not indexed.
const MAX_LENGTH: usize = 1024;

/// JSON pointers (RFC 6901).
#[derive(Clone, Debug, Default)]
pub struct JsonFields(Vec<String>);

impl JsonFields {
    /// Creates the list from `dlq_inspector.json_fields`.
    #[must_use]
    pub fn new(pointers: &[String]) -> Self {
        Self(pointers.to_vec())
    }

    /// The pointers.
    #[must_use]
    pub fn pointers(&self) -> &[String] {
        &self.0
    }

    /// The fields that a value has, encoded as in [`header_list`]: strings as they are, numbers and booleans as in JSON. Objects,
    /// arrays, null and texts over 1 KiB are left out. `None` if there are no fields.
    #[must_use]
    pub fn read(&self, value: Option<&[u8]>) -> Option<Vec<u8>> {
        if self.0.is_empty() {
            return None;
        }
        let value: Value = serde_json::from_slice(value?).ok()?;
        let mut fields = Headers::new();
        for pointer in &self.0 {
            let text = match value.pointer(pointer) {
                Some(Value::String(text)) => text.clone(),
                Some(number @ (Value::Number(_) | Value::Bool(_))) => number.to_string(),
                Some(Value::Null | Value::Array(_) | Value::Object(_)) | None => continue,
            };
            if text.len() <= MAX_LENGTH {
                fields.push_text(pointer, &text);
            }
        }
        let fields = header_list::encode(&fields);
        (!fields.is_empty()).then_some(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_numbers_and_booleans_at_the_pointers_are_read() {
        let pointers =
            ["/order/id", "/items/0/price", "/paid", "/none", "/a~1b", "/order"].map(str::to_owned);
        let fields = JsonFields::new(&pointers);
        let value =
            br#"{"order": {"id": "o-7"}, "items": [{"price": 1.50}], "paid": true, "none": null, "a/b": 3}"#;
        let read = header_list::decode(&fields.read(Some(value)).unwrap());
        let expected: Headers = [
            ("/order/id", "o-7"),
            ("/items/0/price", "1.5"),
            ("/paid", "true"),
            ("/a~1b", "3"),
        ]
        .into_iter()
        .map(|(name, value)| (name, Some(value.as_bytes())))
        .collect();
        assert_eq!(read, expected);
        for other in [
            None,
            Some(&b"no json"[..]),
            Some(b"{}"),
            Some(b"[1]"),
            Some(b"\xff"),
        ] {
            assert_eq!(fields.read(other), None);
        }
        assert_eq!(JsonFields::default().read(Some(value)), None);
        let long = format!(r#"{{"paid": "{}"}}"#, "x".repeat(MAX_LENGTH + 1));
        assert_eq!(fields.read(Some(long.as_bytes())), None);
    }
}
