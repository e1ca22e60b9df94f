//! Splits an error message into a template, which many messages share, and the parts in which they differ: numbers and
//! hexadecimal ids. Templates are stored once, so that a search in messages reads few texts.
//!
//! A part is a whole word of hexadecimal digits with at least one decimal digit, or a run of decimal digits in another word.

/// Stands for a part in a template.
const PLACEHOLDER: char = '\u{fffc}';

/// The template of a message and its parts, separated by spaces; `None` if the message is its own template.
pub(super) fn split(message: &str) -> (String, Option<String>) {
    if message.contains(PLACEHOLDER) {
        return (message.to_owned(), None);
    }
    let mut template = String::with_capacity(message.len());
    let mut parts: Vec<&str> = Vec::new();
    for word in words(message) {
        if is_hex_id(word) {
            template.push(PLACEHOLDER);
            parts.push(word);
            continue;
        }
        let mut rest = word;
        while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
            let (before, from) = rest.split_at(start);
            let end = from.find(|c: char| !c.is_ascii_digit()).unwrap_or(from.len());
            let (digits, after) = from.split_at(end);
            template.push_str(before);
            template.push(PLACEHOLDER);
            parts.push(digits);
            rest = after;
        }
        template.push_str(rest);
    }
    let parts = (!parts.is_empty()).then(|| parts.join(" "));
    (template, parts)
}

/// The message from which [`split`] made a template and parts.
pub(super) fn join(template: &str, parts: Option<&str>) -> String {
    let Some(parts) = parts else {
        return template.to_owned();
    };
    let mut parts = parts.split(' ');
    let mut message = String::with_capacity(template.len() + 16);
    for (number, literal) in template.split(PLACEHOLDER).enumerate() {
        if number > 0 {
            message.push_str(parts.next().unwrap_or_default());
        }
        message.push_str(literal);
    }
    message
}

/// What a template says about whether its messages contain a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contains {
    /// Every message of the template does.
    All,
    /// That depends on the parts.
    Some,
    /// No message of the template does.
    None,
}

/// Whether the messages of a template contain a text.
pub(super) fn contains(template: &str, needle: &str) -> Contains {
    let mut literals = template.split(PLACEHOLDER);
    if literals.any(|literal| literal.contains(needle)) {
        Contains::All
    } else if template.contains(PLACEHOLDER)
        && may_contain_part(needle)
        && literal_letters(needle).all(|letters| template.contains(letters))
    {
        Contains::Some
    } else {
        Contains::None
    }
}

/// Whether an occurrence of a text can include characters of a part. Only decimal digits, and words of hexadecimal digits
/// that can be the beginning, the end or the middle of a longer one, can be in a part.
fn may_contain_part(needle: &str) -> bool {
    needle.bytes().any(|byte| byte.is_ascii_digit())
        || needle.contains(PLACEHOLDER)
        || words(needle).any(|word| word.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The runs of letters of a text that no part contains: those with a letter that is not a hexadecimal digit.
fn literal_letters(text: &str) -> impl Iterator<Item = &str> {
    let runs = text.split(|c: char| !c.is_ascii_alphabetic());
    runs.filter(|run| !run.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// A text that the parts of a message contain if the message contains the needle and its template does not; empty if there is none.
pub(crate) fn certain_part(needle: &str) -> &str {
    // A word of letters is in one literal or, as hexadecimal digits, in one part.
    if needle.bytes().all(|byte| byte.is_ascii_alphabetic()) {
        return needle;
    }
    let runs = needle.split(|c: char| !c.is_ascii_digit());
    runs.max_by_key(|run| run.len()).unwrap_or_default()
}

/// Words of ASCII letters and digits, and what is between them, in order.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let is_word = first.is_ascii_alphanumeric();
        let end = rest.find(|c: char| c.is_ascii_alphanumeric() != is_word);
        let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after;
        Some(part)
    })
}

fn is_hex_id(word: &str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_hexdigit()) && word.bytes().any(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_and_ids_share_a_template() {
        let check = |message: &str, template: &str, parts: Option<&str>| {
            let expected = (template.replace('#', "\u{fffc}"), parts.map(str::to_owned));
            assert_eq!(split(message), expected, "{message}");
        };
        check("refused", "refused", None);
        check("", "", None);
        check(
            "timeout after 3012 ms on host17b2",
            "timeout after # ms on host#b#",
            Some("3012 17 2"),
        );
        check("job 3f2A-9c is dead", "job #-# is dead", Some("3f2A 9c"));
        check("größe 1", "größe #", Some("1"));
        check("\u{fffc} 1", "\u{fffc} 1", None);
    }

    #[test]
    fn search_reads_only_matching_parts() {
        let (template, _) = split("connect to 10.0.0.7 failed: job 3f2a is busy");
        let check = |needle: &str, expected| assert_eq!(contains(&template, needle), expected, "{needle}");
        check("failed: job", Contains::All);
        check("", Contains::All);
        check("refused", Contains::None);
        check("10.0", Contains::Some);
        check("to 1", Contains::Some);
        check("3f", Contains::Some);
        check("f", Contains::All);
        check("fa", Contains::All);
        check("fe", Contains::Some);
        check("b 3", Contains::Some);
        check("on bad", Contains::Some);
        check("job bad", Contains::Some);
        check("bad gateway", Contains::None);
        check("job3", Contains::Some);
        check("jobs 3", Contains::None);
        assert_eq!(contains("refused", "1"), Contains::None);
    }

    proptest! {
        #[test]
        fn message_is_joined_from_parts(message in "[ -~äß\u{fffc}]{0,60}") {
            let (template, parts) = split(&message);
            prop_assert_eq!(join(&template, parts.as_deref()), message);
        }

        #[test]
        fn template_decides_as_its_messages(message in "[0-9a-gx .\u{fffc}]{0,20}", needle in "[0-9a-gx .]{0,3}") {
            let (template, _) = split(&message);
            match contains(&template, &needle) {
                Contains::All => prop_assert!(message.contains(&needle)),
                Contains::None => prop_assert!(!message.contains(&needle)),
                Contains::Some => {}
            }
        }
    }
}
