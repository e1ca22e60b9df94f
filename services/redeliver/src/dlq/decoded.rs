//! The decoded value of a dead letter, as text and as JSON.

use redeliver_client::messages::DecodedValue;
use redeliver_core::json::indented;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use super::show::MASKED;
use crate::output::{Text as _, block, line};

/// Limit of the decoded value in text output, in bytes.
const SHOWN: usize = 16 * 1024;
/// Limit of names and reasons in text output, in bytes.
const SHOWN_NAME: usize = 300;

pub(super) fn as_text(decoded: &DecodedValue, is_masked: bool) -> String {
    let schema = format!("schema {}", decoded.schema_id);
    let parts = [decoded.format().name(), decoded.name.text(), Some(schema)];
    let parts: Vec<String> = parts
        .into_iter()
        .flatten()
        .map(|part| line(part.as_bytes(), SHOWN_NAME))
        .collect();
    let contents = match (&*decoded.json, &*decoded.problem) {
        ("", "") if is_masked => MASKED.to_owned(),
        ("", "") => "(not decoded)".to_owned(),
        ("", problem) => format!("(not decoded: {})", line(problem.as_bytes(), SHOWN_NAME)),
        (json, _) => {
            let json = indented(json.as_bytes(), usize::MAX).unwrap_or_else(|| json.to_owned());
            block(json.trim_end().as_bytes(), SHOWN)
        }
    };
    format!("\n\ndecoded ({})\n{contents}", parts.join(", "))
}

/// A dead letter in JSON, with its decoded value.
pub(super) fn with_decoded(letter: impl Serialize, decoded: Option<&DecodedValue>) -> String {
    #[derive(Serialize)]
    struct Shown<'a, L> {
        #[serde(flatten)]
        letter: L,
        #[serde(skip_serializing_if = "Option::is_none")]
        decoded: Option<DecodedJson<'a>>,
    }

    let decoded = decoded.map(as_json);
    // Both can always be written.
    serde_json::to_string(&Shown { letter, decoded }).unwrap_or_default()
}

/// The document is as the inspector has sent it.
#[derive(Serialize)]
struct DecodedJson<'a> {
    schema_id: u32,
    format: Option<String>,
    name: Option<&'a str>,
    value: Option<Box<RawValue>>,
    problem: Option<&'a str>,
}

fn as_json(decoded: &DecodedValue) -> DecodedJson<'_> {
    // One line: a string contains no line breaks.
    let raw = |json: &str| match RawValue::from_string(json.replace(['\n', '\r'], " ")) {
        Ok(value) => Some(value),
        Err(_) => to_raw_value(json).ok(),
    };
    let some = |text| Some(text).filter(|text: &&str| !text.is_empty());
    DecodedJson {
        schema_id: decoded.schema_id,
        format: decoded.format().name(),
        name: some(&decoded.name),
        value: some(&decoded.json).and_then(raw),
        problem: some(&decoded.problem),
    }
}

#[cfg(test)]
mod tests {
    use redeliver_testkit::fuzz::{FEW, check_each};
    use redeliver_testkit::valid_json;

    use redeliver_client::messages::SchemaFormat;

    use super::*;

    #[test]
    fn a_decoded_value_shows_its_schema() {
        let decoded = DecodedValue {
            schema_id: 7,
            format: SchemaFormat::Avro.into(),
            name: "shop.Order".to_owned(),
            json: r#"{"id":"\u001b[31m","n":1}"#.to_owned(),
            problem: String::new(),
        };
        assert_eq!(
            as_text(&decoded, false),
            "\n\ndecoded (avro, shop.Order, schema 7)\n{\n  \"id\": \"\\u001b[31m\",\n  \"n\": 1\n}"
        );
        let json = |decoded| serde_json::to_string(&as_json(decoded)).unwrap();
        assert_eq!(
            json(&decoded),
            r#"{"schema_id":7,"format":"avro","name":"shop.Order","value":{"id":"\u001b[31m","n":1},"problem":null}"#
        );
        let large = DecodedValue {
            json: "{\"n\":1e400,\n\"$serde_json::private::RawValue\":\"1\"}".to_owned(),
            ..decoded.clone()
        };
        assert!(json(&large).contains(r#""value":{"n":1e400, "$serde_json::private::RawValue":"1"},"#));
        let masked = DecodedValue {
            json: String::new(),
            ..decoded.clone()
        };
        assert!(as_text(&masked, true).ends_with("(masked: needs the scope dead-letters:unmasked)"));
        let unknown = DecodedValue {
            schema_id: 9,
            problem: "no\nschema".to_owned(),
            ..DecodedValue::default()
        };
        assert_eq!(
            as_text(&unknown, false),
            "\n\ndecoded (schema 9)\n(not decoded: no\\nschema)"
        );
        assert!(json(&unknown).ends_with(r#""problem":"no\nschema"}"#));
    }

    #[test]
    fn valid_json_stays_as_is() {
        let document = |random: &mut fastrand::Rng| valid_json::object(random, &[("id", "1")]).into_bytes();
        check_each("decoded", FEW, document, |input| {
            let json = str::from_utf8(input).unwrap();
            let tokens = |text: &str| text.replace(|c: char| c.is_ascii_whitespace(), "");
            let decoded = DecodedValue {
                json: json.to_owned(),
                ..DecodedValue::default()
            };
            let shown = serde_json::to_string(&as_json(&decoded)).unwrap();
            let expected =
                format!(r#"{{"schema_id":0,"format":null,"name":null,"value":{json},"problem":null}}"#);
            assert_eq!(tokens(&shown), tokens(&expected));
            assert!(!shown.contains('\n'));
            // It escapes characters that control a terminal.
            let expected = json.replace('\u{7f}', "\\u007f");
            assert_eq!(tokens(&indented(input, usize::MAX).unwrap()), tokens(&expected));
        });
    }
}
