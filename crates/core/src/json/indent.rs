//! Indented JSON for people.

use serde::de::IgnoredAny;

use crate::terminal::push_in_json_string;

/// JSON is indented up to this depth, so that the output is not much larger than the document.
const MAX_INDENT: usize = 64;

/// An indented JSON document; `None` if the bytes are none. Only the space between tokens changes: numbers, the order of fields and repeated names
/// stay. Characters that could control a terminal are escaped as in JSON. After `most` bytes, the rest is left out.
#[must_use]
pub fn indented(document: &[u8], most: usize) -> Option<String> {
    let text = std::str::from_utf8(document).ok()?;
    serde_json::from_str::<IgnoredAny>(text).ok()?;
    let mut json = String::with_capacity(text.len().saturating_mul(2).min(most));
    let (mut depth, mut is_string, mut is_escaped) = (0_usize, false, false);
    let mut characters = text
        .chars()
        .filter(|c| !c.is_ascii_whitespace() || *c == ' ')
        .peekable();
    let line = |json: &mut String, depth: usize| {
        json.push('\n');
        json.extend(std::iter::repeat_n("  ", depth.min(MAX_INDENT)));
    };
    while let Some(c) = characters.next() {
        if json.len() >= most {
            return Some(json);
        }
        if is_string {
            // The grammar excludes those below U+0020.
            push_in_json_string(&mut json, c);
            is_string = is_escaped || c != '"';
            is_escaped = !is_escaped && c == '\\';
            continue;
        }
        match c {
            ' ' => {}
            '{' | '[' => {
                json.push(c);
                while characters.next_if_eq(&' ').is_some() {}
                if let Some(end) = characters.next_if(|end| matches!(end, '}' | ']')) {
                    json.push(end);
                } else {
                    depth += 1;
                    line(&mut json, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                line(&mut json, depth);
                json.push(c);
            }
            ',' => {
                json.push(c);
                line(&mut json, depth);
            }
            ':' => json.push_str(": "),
            c => {
                is_string = c == '"';
                json.push(c);
            }
        }
    }
    json.push('\n');
    Some(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_indented_without_other_changes() {
        let document =
            b"{ \"b\":[ ],\"a\" : 1.00000000000000000001,\"a\":{\"x y\":\"\\\"{,:\\\\\"}\n,\"c\":[1 , {}]}";
        let expected = "{\n  \"b\": [],\n  \"a\": 1.00000000000000000001,\n  \"a\": {\n    \"x y\": \"\\\"{,:\\\\\"\n  },\n  \"c\": [\n    1,\n    {}\n  ]\n}\n";
        assert_eq!(indented(document, usize::MAX).unwrap(), expected);
        assert_eq!(
            indented(" \"\u{9b}\u{202e}ä\"".as_bytes(), usize::MAX).unwrap(),
            "\"\\u009b\\u202eä\"\n"
        );
        for other in [&b""[..], b"{", b"{} {}", b"\xff", b"text"] {
            assert_eq!(indented(other, usize::MAX), None, "{other:?}");
        }
    }

    #[test]
    fn long_json_is_cut() {
        let deep = "[".repeat(1_000) + &"]".repeat(1_000);
        let cut = indented(deep.as_bytes(), 500).unwrap();
        assert!((500..700).contains(&cut.len()), "{}", cut.len());
        assert_eq!(indented(b"[1", 1), None);
    }

    #[test]
    fn deep_json_stays_small() {
        let depth = 100_000;
        let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(
            indented(deep.as_bytes(), usize::MAX)
                .is_none_or(|json| json.len() <= 2 * depth * (2 * MAX_INDENT + 2) + 1)
        );
    }
}
