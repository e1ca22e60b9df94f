//! The fields of JSON values that are indexed, as `dlq_inspector.json_fields` names them.

use redeliver_core::Headers;
use redeliver_core::json::{self, Decimal, Scalar};

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

    /// The fields that a value has, encoded as in [`header_list`]: strings as they are, booleans as in JSON, and numbers by `name_of_number`, each
    /// with the text that all its spellings have in common. Objects, arrays, null and texts over 1 KiB are left out. `None` if there are no fields.
    #[must_use]
    pub fn read(&self, value: Option<&[u8]>) -> Option<Vec<u8>> {
        if self.0.is_empty() {
            return None;
        }
        let values = json::at_each(value?, &self.0).ok()?;
        let mut fields = Headers::new();
        for (pointer, value) in self.0.iter().zip(values) {
            let Some(scalar) = value.and_then(Scalar::of) else {
                continue;
            };
            let number = matches!(scalar, Scalar::Number(_)).then(|| name_of_number(pointer));
            let text = scalar.into_text();
            if text.len() <= MAX_LENGTH {
                fields.push(number.as_deref().unwrap_or(pointer), Some(&text));
            }
        }
        let fields = header_list::encode(&fields);
        (!fields.is_empty()).then_some(fields)
    }
}

/// The name of a field that is a number, which is found by any of its spellings. A string is found only by its own.
pub(crate) fn name_of_number(pointer: &str) -> String {
    format!("#{pointer}")
}

/// The text by which a number is found; `None` if this is not how one is written.
pub(crate) fn text_of_number(text: &str) -> Option<String> {
    Decimal::of(text).map(|number| number.text().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_at_the_pointers_are_read() {
        let pointers =
            ["/order/id", "/items/0/price", "/paid", "/none", "/a~1b", "/order"].map(str::to_owned);
        let fields = JsonFields::new(&pointers);
        let value =
            br#"{"order": {"id": "o-7"}, "items": [{"price": 1.50}], "paid": true, "none": null, "a/b": 3}"#;
        let read = header_list::decode(&fields.read(Some(value)).unwrap());
        let expected: Headers = [
            ("/order/id", "o-7"),
            ("#/items/0/price", "1.5"),
            ("/paid", "true"),
            ("#/a~1b", "3"),
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

    #[test]
    fn numbers_keep_their_digits() {
        let fields = JsonFields::new(&["/id".to_owned()]);
        for (number, expected) in [
            ("18446744073709551617", "18446744073709551617"),
            ("-9223372036854775809", "-9223372036854775809"),
            ("0.10000000000000001", "0.10000000000000001"),
            ("1e2", "100"),
        ] {
            let read = fields.read(Some(format!(r#"{{"id":{number}}}"#).as_bytes()));
            let read = header_list::decode(&read.unwrap());
            let texts: Vec<_> = read.iter().filter_map(|(_, value)| value).collect();
            assert_eq!(texts, [expected.as_bytes()], "{number}");
        }
    }

    #[test]
    fn rest_of_document_is_not_evaluated() {
        let fields = JsonFields::new(&["/id".to_owned()]);
        let deep = format!("{}{}", "[".repeat(1_000), "]".repeat(1_000));
        for other in ["1e400", r#""\ud800""#, r#"{"\udc00":[]}"#, &deep] {
            let value = format!(r#"{{"x":{other},"id":"a","\ud800":{other}}}"#);
            assert!(fields.read(Some(value.as_bytes())).is_some(), "{other}");
        }
        let hidden = br#"{"$serde_json::private::RawValue":"{\"id\":\"forged\"}"}"#;
        assert_eq!(fields.read(Some(hidden)), None);
    }
}
