//! Inserts the response into the record's JSON document, and leaves the rest of it as it is.
//!
//! Numbers keep their digits and fields their order, because the other fields are copied as text.

use redeliver_core::json::{self, Scalar};
use serde_json::value::RawValue;

/// Inserts `inserted`, a JSON document, at a JSON pointer (RFC 6901). A field that exists is replaced. Objects on the path that
/// do not exist are created. The result is not longer than both documents and the pointer together, but for escapes and
/// punctuation.
///
/// # Errors
/// What is wrong: one of the documents is not JSON, or something on the path is not an object. The message contains no part of
/// the documents.
pub(crate) fn insert(document: &[u8], pointer: &str, inserted: &[u8]) -> Result<Vec<u8>, String> {
    if inserted.trim_ascii().is_empty() {
        return Err("the response is empty; with nothing to insert, its status must be 204".to_owned());
    }
    let path: Vec<String> = pointer.split('/').skip(1).map(unescape).collect();
    let inserted: &RawValue =
        serde_json::from_slice(inserted).map_err(|error| format!("the response is not JSON: {error}"))?;
    let document: &RawValue =
        serde_json::from_slice(document).map_err(|error| format!("the value is not JSON: {error}"))?;
    let mut merged = String::with_capacity(document.get().len() + inserted.get().len() + pointer.len() + 8);
    write(&mut merged, document, &path, inserted)?;
    Ok(merged.into_bytes())
}

fn unescape(part: &str) -> String {
    part.replace("~1", "/").replace("~0", "~")
}

/// Writes `document` with the inserted one at `path`. Not recursive, because a stack that overflows ends the process.
fn write(text: &mut String, document: &RawValue, path: &[String], inserted: &RawValue) -> Result<(), String> {
    let mut object = Some(document);
    // What follows the field in each object on the path.
    let mut rests = Vec::with_capacity(path.len());
    for field in path {
        let fields = match object {
            Some(object) => json::fields(object)
                .map_err(|_| format!("the value has no object that could contain `{field}`"))?,
            None => Vec::new(),
        };
        let is_field = |name: &RawValue| is_named(name, field);
        // Of fields with the same name, the last one counts for most readers. Only that one is kept, so that the response is
        // written once.
        let last = fields.iter().rposition(|(name, _)| is_field(name));
        let (before, from_last) = fields.split_at(last.unwrap_or(fields.len()));
        text.push('{');
        for (name, value) in before.iter().filter(|(name, _)| !is_field(name)) {
            begin_field(text, name.get());
            text.push_str(value.get());
        }
        begin_field(text, &quoted(field));
        let mut rest = String::new();
        for (name, value) in from_last.iter().skip(1) {
            begin_field(&mut rest, name.get());
            rest.push_str(value.get());
        }
        rest.push('}');
        rests.push(rest);
        object = from_last.first().map(|(_, value)| *value);
    }
    text.push_str(inserted.get());
    for rest in rests.iter().rev() {
        text.push_str(rest);
    }
    Ok(())
}

/// Whether the JSON text of a name is that of this field.
fn is_named(name: &RawValue, field: &str) -> bool {
    matches!(Scalar::of(name), Some(Scalar::String(name)) if *name == *field.as_bytes())
}

fn quoted(name: &str) -> String {
    // A text can always be written.
    serde_json::to_string(name).unwrap_or_default()
}

fn begin_field(text: &mut String, name: &str) {
    if !text.ends_with('{') {
        text.push(',');
    }
    text.push_str(name);
    text.push(':');
}

#[cfg(test)]
#[expect(clippy::disallowed_types, reason = "documents of these tests")]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn rest_of_document_is_unchanged() {
        for (document, pointer, expected) in [
            (r#"{"b":1.00,"a":1e400}"#, "/r", r#"{"b":1.00,"a":1e400,"r":[1]}"#),
            ("{}", "/r", r#"{"r":[1]}"#),
            (
                r#"{"r":{"old":1},"z":"\u00e9"}"#,
                "/r",
                r#"{"r":[1],"z":"\u00e9"}"#,
            ),
            (r#"{"meta":{"x":1}}"#, "/meta/r", r#"{"meta":{"x":1,"r":[1]}}"#),
            (
                r#"{"x":1}"#,
                "/meta/deep/r",
                r#"{"x":1,"meta":{"deep":{"r":[1]}}}"#,
            ),
            ("{}", "/a~1b~0c", r#"{"a/b~c":[1]}"#),
            (
                r#"{"\ud800":"\udc00","\u00e9":{"\u0061":1,"\u0062":2}}"#,
                "/é/a",
                r#"{"\ud800":"\udc00","é":{"a":[1],"\u0062":2}}"#,
            ),
            (r#"{"r":1,"a":3,"r":2}"#, "/r", r#"{"a":3,"r":[1]}"#),
            (r#"{"m":1,"m":{"a":1}}"#, "/m/r", r#"{"m":{"a":1,"r":[1]}}"#),
        ] {
            let merged = insert(document.as_bytes(), pointer, b" [1] ").unwrap();
            assert_eq!(String::from_utf8(merged).unwrap(), expected, "{document}");
        }
    }

    /// Within the stack of a thread of a test, which is that of a thread of the runtime.
    #[test]
    fn deep_path_needs_no_stack() {
        let depth = 100_000;
        let merged = insert(b"{}", &"/a".repeat(depth), b"1").unwrap();
        assert_eq!(merged.len(), depth * r#"{"a":}"#.len() + 1);
    }

    #[test]
    fn duplicate_fields_are_replaced_once() {
        let document = format!("{{{}\"r\":0}}", "\"r\":0,".repeat(10_000));
        let response = format!("\"{}\"", "x".repeat(10_000));
        let merged = insert(document.as_bytes(), "/r", response.as_bytes()).unwrap();
        assert_eq!(merged.len(), response.len() + "{\"r\":}".len());
    }

    #[test]
    fn merge_failure_hides_the_content() {
        for (document, inserted, expected) in [
            (
                "hunter2",
                "1",
                "the value is not JSON: expected value at line 1 column 1",
            ),
            ("[1]", "1", "the value has no object that could contain `meta`"),
            (
                r#"{"meta":"hunter2"}"#,
                "1",
                "the value has no object that could contain `r`",
            ),
            (
                "{}",
                "<html>",
                "the response is not JSON: expected value at line 1 column 1",
            ),
        ] {
            let problem = insert(document.as_bytes(), "/meta/r", inserted.as_bytes()).unwrap_err();
            assert_eq!(problem, expected);
        }
    }

    proptest! {
        #[test]
        fn response_is_at_the_pointer(
            fields in proptest::collection::btree_map("[a-z~/\"]{0,3}", any::<i64>(), 0..6),
            path in proptest::collection::vec("[a-z~/\"]{1,3}", 1..4),
        ) {
            let escaped: String =
                path.iter().map(|part| format!("/{}", part.replace('~', "~0").replace('/', "~1"))).collect();
            prop_assume!(!fields.contains_key(&path[0]));
            let mut expected = json!(fields);
            let document = expected.to_string();
            let merged = insert(document.as_bytes(), &escaped, br#"{"ok":true}"#).unwrap();
            let mut inserted = json!({ "ok": true });
            for part in path.iter().rev() {
                inserted = json!({ part: inserted });
            }
            let Value::Object(inserted) = inserted else { unreachable!() };
            expected.as_object_mut().unwrap().extend(inserted);
            prop_assert_eq!(serde_json::from_slice::<Value>(&merged).unwrap(), expected);
        }
    }
}
