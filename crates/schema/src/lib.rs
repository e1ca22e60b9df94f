//! JSON Schema: what the values of records must look like. Producers check them before they write, and workers before an attempt.

#![expect(
    clippy::disallowed_types,
    reason = "the validator takes nothing else; json::parse reads records and files"
)]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use jsonschema::{PatternOptions, ValidationError, Validator};
use redeliver_core::failure::{FailureScope, MESSAGE_LIMIT, bounded_text};
use redeliver_core::{Failure, json};
use serde_json::Value;
use serde_json::value::RawValue;

/// The error code of a record whose value is not valid.
const SCHEMA_INVALID: &str = "schema.invalid";
/// The error code of a record whose value is JSON that the validator cannot hold.
const SCHEMA_UNSUPPORTED: &str = "schema.unsupported";

/// A compiled JSON Schema: of the draft that its `$schema` names, by default 2020-12. Clones share it.
#[derive(Clone, Debug)]
pub struct Schema(Arc<Validator>);

impl Schema {
    /// Compiles a schema. Regular expressions must be ones that match in linear time, so without look-around and
    /// back-references. `$ref` can name only parts of the same schema.
    ///
    /// # Errors
    /// What is wrong with the schema.
    pub fn new(schema: &Value) -> Result<Self, String> {
        let options = jsonschema::options()
            .with_pattern_options(PatternOptions::regex())
            .should_validate_formats(true);
        let validator = options.build(schema);
        let validator = validator.map_err(|error| {
            let at = match error.instance_path().as_str() {
                "" => String::new(),
                at => format!(" at {at}"),
            };
            format!("is not a valid JSON Schema{at}: {error}")
        })?;
        Ok(Self(Arc::new(validator)))
    }

    /// Compiles the schema in a JSON file.
    ///
    /// # Errors
    /// If the file cannot be read, or [`Schema::new`] fails.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let problem = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = fs::read(path).map_err(|error| problem(&error))?;
        let schema = json::parse(&text);
        let schema = schema.map_err(|error| problem(&format!("is not JSON: {error}")))?;
        Self::new(&schema).map_err(|error| problem(&error))
    }

    /// Checks a value.
    ///
    /// # Errors
    /// A permanent failure with the code `schema.invalid` that names the field and the rule, or with the code `schema.unsupported` if the value
    /// has a number beyond a double, half of a surrogate pair, or more than 127 levels. The message contains no part of the value, except for
    /// names of fields.
    pub fn check(&self, value: Option<&[u8]>) -> Result<(), Failure> {
        let Some(value) = value else {
            return Err(invalid("the record has no value"));
        };
        let document = json::parse(value).map_err(|error| unreadable(value, &error))?;
        self.0
            .validate(&document)
            .map_err(|error| invalid(&problem(&error)))
    }
}

/// Why a value is not one for the validator: it is not JSON, or it is and has what [`Value`] cannot hold.
fn unreadable(value: &[u8], error: &serde_json::Error) -> Failure {
    match serde_json::from_slice::<&RawValue>(value) {
        Ok(_) => failure(
            SCHEMA_UNSUPPORTED,
            &format!("the value is JSON that cannot be validated: {error}"),
        ),
        Err(error) => invalid(&format!("the value is not JSON: {error}")),
    }
}

fn problem(error: &ValidationError<'_>) -> String {
    let field = match error.instance_path().as_str() {
        "" => "the value",
        pointer => pointer,
    };
    let message = error.masked_with(field);
    format!("{field} violates {}: {message}", error.schema_path())
}

fn invalid(problem: &str) -> Failure {
    failure(SCHEMA_INVALID, problem)
}

fn failure(code: &'static str, problem: &str) -> Failure {
    Failure::permanent(code, bounded_text(problem, MESSAGE_LIMIT)).with_scope(FailureScope::NotCalled)
}

#[cfg(test)]
mod tests {
    use redeliver_core::ErrorClass;
    use redeliver_testkit::fuzz::{FEW, check_each};
    use redeliver_testkit::valid_json;
    use serde_json::json;

    use super::*;

    fn schema() -> Schema {
        Schema::new(&json!({
            "type": "object",
            "required": ["id", "items"],
            "properties": {
                "id": { "type": "string", "format": "uuid" },
                "code": { "type": "string", "pattern": "^[a-z]+$" },
                "items": { "type": "array", "items": { "type": "integer", "maximum": 10 } },
            },
            "additionalProperties": false,
        }))
        .unwrap()
    }

    #[test]
    fn unsupported_json_has_its_own_code() {
        let schema = Schema::new(&json!({ "type": "object" })).unwrap();
        for value in [
            "1e400",
            &"9".repeat(400),
            r#""\ud800""#,
            r#"{"\udc00":1}"#,
            &format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)),
        ] {
            let failure = schema
                .check(Some(format!(r#"{{"x":{value}}}"#).as_bytes()))
                .unwrap_err();
            assert_eq!(
                (failure.class, &*failure.code),
                (ErrorClass::Permanent, SCHEMA_UNSUPPORTED)
            );
            assert!(
                failure
                    .message
                    .starts_with("the value is JSON that cannot be validated: "),
                "{failure}"
            );
        }
        let failure = schema.check(Some(br#"{"x":1e400,"y":}"#)).unwrap_err();
        assert_eq!(&*failure.code, SCHEMA_INVALID);
        assert_eq!(
            failure.message,
            "the value is not JSON: expected value at line 1 column 16"
        );
    }

    #[test]
    fn invalid_value_names_field_and_rule() {
        let hidden = br#"{"$serde_json::private::RawValue": "{\"id\": 1, \"items\": []}"}"#;
        assert!(schema().check(Some(hidden)).is_err());
        const ID: &str = "936da01f-9abd-4d9d-80c7-02af85c822a8";
        let schema = schema();
        let valid = json!({ "id": ID, "items": [1, 10] }).to_string();
        assert_eq!(schema.check(Some(valid.as_bytes())), Ok(()));
        for (value, expected) in [
            (
                json!({ "id": ID, "items": [1, 4711] }),
                "/items/1 violates /properties/items/items/maximum: /items/1 is greater than the maximum of 10",
            ),
            (
                json!({ "id": "4711", "items": [] }),
                "/id violates /properties/id/format: /id is not a \"uuid\"",
            ),
            (
                json!({ "id": ID, "items": [], "code": "4711" }),
                "/code violates /properties/code/pattern: /code does not match \"^[a-z]+$\"",
            ),
            (
                json!({ "id": ID }),
                "the value violates /required: \"items\" is a required property",
            ),
        ] {
            let failure = schema.check(Some(value.to_string().as_bytes())).unwrap_err();
            assert_eq!(failure.message, expected);
            assert_eq!(
                (failure.class, &*failure.code),
                (ErrorClass::Permanent, SCHEMA_INVALID)
            );
        }
        for (value, expected) in [
            (None, "the record has no value"),
            (
                Some(&b"{"[..]),
                "the value is not JSON: EOF while parsing an object at line 1 column 1",
            ),
        ] {
            assert_eq!(schema.check(value).unwrap_err().message, expected);
        }
    }

    #[test]
    fn unusable_schema_is_refused() {
        for (schema, expected) in [
            (json!({ "type": "text" }), "is not a valid JSON Schema at /type: "),
            (
                json!({ "pattern": "(?=a)b" }),
                "is not a valid JSON Schema at /pattern: ",
            ),
            (
                json!({ "$ref": "https://example.com/order.json" }),
                "is not a valid JSON Schema",
            ),
            (
                json!({ "$ref": "file:///etc/passwd" }),
                "is not a valid JSON Schema",
            ),
        ] {
            let error = Schema::new(&schema).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        let missing = Schema::from_file(Path::new("/no/such.json")).unwrap_err();
        assert_eq!(missing, "/no/such.json: No such file or directory (os error 2)");
    }

    #[test]
    fn valid_json_is_never_refused() {
        let schema = Schema::new(&json!({ "type": "object", "required": ["id"] })).unwrap();
        let document = |random: &mut fastrand::Rng| valid_json::object(random, &[("id", "1")]).into_bytes();
        check_each("schema", FEW, document, |input| {
            if let Err(failure) = schema.check(Some(input)) {
                assert_eq!(&*failure.code, SCHEMA_UNSUPPORTED, "{failure}");
            }
        });
    }
}
