//! Text of others on a terminal: records, headers and names may contain control characters, which a terminal
//! executes instead of showing them.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Whether a terminal executes this character instead of showing it, or whether it changes the direction or
/// the lines of the text around it.
#[must_use]
pub fn is_harmful(c: char) -> bool {
    let changes_direction =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || changes_direction || matches!(c, '\u{2028}' | '\u{2029}')
}

/// A text in one line, with escapes such as `\u{1b}` and `\n` for harmful characters.
#[must_use]
pub fn in_one_line(text: &str) -> String {
    escaped(text, |_| false)
}

/// As [`in_one_line`], with line breaks and tabs.
#[must_use]
pub fn multiline(text: &str) -> String {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

fn escaped(text: &str, keep: impl Fn(char) -> bool) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if keep(c) => safe.push(c),
            '\n' | '\r' | '\t' => safe.extend(c.escape_default()),
            c if is_harmful(c) => safe.extend(c.escape_unicode()),
            c => safe.push(c),
        }
    }
    safe
}

/// A JSON document in one line, with escapes such as `\u009b` for harmful characters. Readers get the same values.
#[must_use]
pub fn json_line(document: &str) -> Cow<'_, str> {
    if !document.contains(is_harmful) {
        return Cow::Borrowed(document);
    }
    let mut line = String::with_capacity(document.len());
    for c in document.chars() {
        match c {
            // They are only between tokens, where all white space is the same.
            '\n' | '\r' | '\t' => line.push(' '),
            c => push_in_json_string(&mut line, c),
        }
    }
    Cow::Owned(line)
}

/// Appends a character of a JSON string, escaped if it is harmful.
pub fn push_in_json_string(json: &mut String, c: char) {
    if is_harmful(c) {
        // All harmful characters have four digits.
        let _ = write!(json, "\\u{:04x}", u32::from(c));
    } else {
        json.push(c);
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_types, reason = "documents of this test's own")]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    use super::*;

    const HARMFUL: &str = "\u{0}\u{1b}]0;x\u{7}\u{7f}\u{80}\u{9b}31m\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\u{2066}\u{2069}\r";

    fn text() -> impl Strategy<Value = String> {
        let character = prop_oneof![
            any::<char>(),
            proptest::sample::select(HARMFUL.chars().chain("\"\\/\n\t".chars()).collect::<Vec<_>>()),
        ];
        proptest::collection::vec(character, 0..8).prop_map(String::from_iter)
    }

    fn document() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![text().prop_map(Value::from), any::<i64>().prop_map(Value::from)];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::vec((text(), inner), 0..4)
                    .prop_map(|fields| Map::from_iter(fields).into()),
            ]
        })
    }

    proptest! {
        #[test]
        fn escaped_json_stays_equal(document in document()) {
            for written in [document.to_string(), format!("{document:#}")] {
                let line = json_line(&written);
                prop_assert!(!line.contains(is_harmful), "{line:?}");
                prop_assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), document.clone());
            }
        }

        #[test]
        fn escaped_text_has_no_harmful_characters(text in text()) {
            prop_assert!(!in_one_line(&text).contains(is_harmful));
            let lines = multiline(&text);
            prop_assert!(!lines.contains(|c| is_harmful(c) && !matches!(c, '\n' | '\t')));
        }
    }

    #[test]
    fn harmful_characters_are_written_as_escapes() {
        assert!(HARMFUL.chars().any(is_harmful));
        assert_eq!(
            json_line(&json!({ "a": "ä\u{9b}\u{202e}" }).to_string()),
            r#"{"a":"ä\u009b\u202e"}"#
        );
        assert_eq!(
            in_one_line("ä\u{9b}\u{202e}\u{2028}\n"),
            "ä\\u{9b}\\u{202e}\\u{2028}\\n"
        );
        assert!(matches!(json_line(r#"{"a":"ä"}"#), Cow::Borrowed(_)));
    }
}
