//! Masks parts of texts.

use std::borrow::Cow;
use std::ops::Range;

use redeliver_core::failure::printable;

use crate::config::Expression;

/// Stands for what is masked.
pub const MASK: &str = "<masked>";

/// In lower case, of ASCII letters.
pub(crate) fn lower_case(name: &str) -> Cow<'_, str> {
    if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(name.to_ascii_lowercase())
    } else {
        Cow::Borrowed(name)
    }
}

/// A text in which everything that one of the expressions finds is masked. `is_cut`: whether the text may be the beginning of a longer one.
pub(super) fn mask<'t>(text: &'t str, expressions: &[&Expression], is_cut: bool) -> Cow<'t, str> {
    let mut found = find(text, expressions, is_cut);
    if let Some(printed) = Printed::of(text) {
        let in_printed = find(&printed.text, expressions, is_cut);
        found.extend(in_printed.into_iter().map(|range| printed.original(&range)));
    }
    if found.is_empty() {
        return Cow::Borrowed(text);
    }
    // All expressions see the original text, so that none hides what another one needs.
    found.sort_unstable_by_key(|range| range.start);
    let mut masked = String::with_capacity(text.len());
    let mut end = 0;
    for range in found {
        if range.start > end || end == 0 {
            masked.push_str(&text[end..range.start]);
            masked.push_str(MASK);
        }
        end = end.max(range.end);
    }
    masked.push_str(&text[end..]);
    Cow::Owned(masked)
}

fn find(text: &str, expressions: &[&Expression], is_cut: bool) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for expression in expressions {
        let matches = expression.regex().find_iter(text);
        found.extend(
            matches
                .map(|found| found.range())
                .filter(|range| !range.is_empty()),
        );
        // An expression does not match a text that was cut.
        let cut = is_cut.then(|| expression.begins_at(text)).flatten();
        found.extend(cut.map(|start| start..text.len()));
    }
    found
}

/// A text as fields of answers show it, in which spaces stand for control characters. An expression must not miss there what it does not find in
/// the original.
struct Printed {
    text: String,
    /// Where each byte of it comes from, and the end.
    origins: Vec<usize>,
}

impl Printed {
    /// `None` if it is the same text.
    fn of(original: &str) -> Option<Self> {
        if !original.contains(char::is_control) {
            return None;
        }
        let mut text = String::with_capacity(original.len());
        let mut origins = Vec::with_capacity(original.len() + 1);
        for (at, c) in original.char_indices() {
            text.push(printable(c));
            origins.resize(text.len(), at);
        }
        origins.push(original.len());
        Some(Self { text, origins })
    }

    fn original(&self, range: &Range<usize>) -> Range<usize> {
        self.origins[range.start]..self.origins[range.end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(text: &str, expressions: &[&str], is_cut: bool) -> String {
        let expressions: Vec<Expression> = expressions.iter().map(|text| text.parse().unwrap()).collect();
        mask(text, &expressions.iter().collect::<Vec<_>>(), is_cut).into_owned()
    }

    #[test]
    fn every_match_is_masked() {
        let digits = "[0-9]{4,}";
        assert_eq!(
            masked("card 4111111111111111 of 12345", &[digits], false),
            "card <masked> of <masked>"
        );
        assert_eq!(masked("card 411", &[digits], false), "card 411");
        assert_eq!(masked("", &[digits], false), "");
        // Overlapping finds are one; adjacent ones are, too.
        assert_eq!(masked("x12345y", &["[a-z]1234", "345[a-z]"], false), "<masked>");
        assert_eq!(masked("1234abcd", &[digits, "[a-z]{4}"], false), "<masked>");
        assert_eq!(masked("größe ß", &["ß"], false), "grö<masked>e <masked>");
        // An expression that can match the empty text somewhere masks nothing there.
        assert_eq!(masked("a b", &[r"\b"], false), "a b");
    }

    #[test]
    fn text_with_control_characters_is_masked() {
        let spaced = "[0-9]{4} [0-9]{4}";
        assert_eq!(masked("a\n4111\n1111\nb", &[spaced], false), "a\n<masked>\nb");
        assert_eq!(
            masked("ß\u{85}4111\u{85}1111\u{85}b", &[spaced], false),
            "ß\u{85}<masked>\u{85}b"
        );
        // And what only the original has.
        assert_eq!(
            masked("4111\n2 4111 1111", &["[0-9]{4}\n", spaced], false),
            "<masked>2 <masked>"
        );
        assert_eq!(masked("\t4111\n11", &[spaced], true), "\t<masked>");
    }

    #[test]
    fn cut_match_is_masked() {
        let text = format!("{}41111111", "ß".repeat(200));
        assert_eq!(
            masked(&text, &["[0-9]{16}"], true),
            format!("{}<masked>", "ß".repeat(200))
        );
        assert_eq!(super::mask(&text, &[], true), text);
        // Of any length.
        let token = format!("token eyJ{}", "a".repeat(900));
        assert_eq!(masked(&token, &["eyJ[a-z]+[.][a-z]+"], true), "token <masked>");
        assert_eq!(masked(&token, &["eyJ[a-z]+[.][a-z]+"], false), token);
    }
}
