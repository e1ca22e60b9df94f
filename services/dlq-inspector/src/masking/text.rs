//! Masks parts of texts.

use std::borrow::Cow;
use std::ops::Range;

use redeliver_runtime::config::Expression;

use super::MASK;

/// How much of the end of a text that was cut is masked, in bytes: an expression does not find a part that is cut itself.
const CUT_END: usize = 128;

/// A text in which everything that one of the expressions finds is masked. `is_cut`: whether the text may be the beginning of a longer one.
pub(super) fn mask<'t>(text: &'t str, expressions: &[&Expression], is_cut: bool) -> Cow<'t, str> {
    let mut found: Vec<Range<usize>> = Vec::new();
    for expression in expressions {
        let matches = expression.regex().find_iter(text);
        found.extend(
            matches
                .map(|found| found.range())
                .filter(|range| !range.is_empty()),
        );
    }
    if is_cut && !expressions.is_empty() {
        let mut start = text.len().saturating_sub(CUT_END);
        while !text.is_char_boundary(start) {
            start -= 1;
        }
        found.push(start..text.len());
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

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(text: &str, expressions: &[&str], is_cut: bool) -> String {
        let expressions: Vec<Expression> = expressions.iter().map(|text| text.parse().unwrap()).collect();
        mask(text, &expressions.iter().collect::<Vec<_>>(), is_cut).into_owned()
    }

    #[test]
    fn all_that_an_expression_finds_is_masked() {
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
    fn the_end_of_a_text_that_was_cut_is_masked() {
        let text = format!("{}41111111", "ß".repeat(200));
        let masked = masked(&text, &["[0-9]{16}"], true);
        assert_eq!(masked, format!("{}<masked>", "ß".repeat(140)));
        assert_eq!(super::mask(&text, &[], true), text);
    }
}
