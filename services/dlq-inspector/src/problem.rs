//! The problem that an endpoint's response names, for groups.
//!
//! Responses differ in what they say about the record, but APIs name the kind of a problem apart from that: `type` of RFC 9457, and codes. Sentences name none,
//! because they can repeat the record.

use std::fmt;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Longer names are none, in bytes.
const MAX_NAME: usize = 100;
/// The fields that can name the problem, the most certain first, wherever they are in the response.
const NAMES: [&str; 6] = ["type", "code", "error_code", "errorCode", "error", "title"];

/// What a field says.
#[derive(Clone, Copy)]
enum Meaning {
    /// A string names the problem, with this rank. An object or an array contains fields that do.
    Problem(usize),
    /// Only what it contains can name the problem.
    Container,
}

fn meaning(field: &str) -> Option<Meaning> {
    match field {
        "errors" | "detail" => Some(Meaning::Container),
        field => NAMES.iter().position(|name| *name == field).map(Meaning::Problem),
    }
}

/// The name of the problem in the beginning of a response. What is cut makes no difference.
pub(crate) fn named(response: &str) -> Option<&str> {
    // Most failures have none, and an error of the reader takes memory.
    if response.is_empty() {
        return None;
    }
    let mut found = None;
    let search = Search {
        meaning: Meaning::Container,
        found: &mut found,
    };
    // The reader also fails if the response is cut.
    drop(search.deserialize(&mut serde_json::Deserializer::from_str(response)));
    found.map(|(_, name)| name)
}

/// Whether a text is a name, and no sentence: a sentence can repeat the record.
fn is_name(text: &str) -> bool {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/#".contains(&byte);
    (1..=MAX_NAME).contains(&text.len()) && text != "about:blank" && text.bytes().all(is_of_name)
}

/// Looks for a name in a value.
struct Search<'f, 'r> {
    meaning: Meaning,
    found: &'f mut Option<(usize, &'r str)>,
}

impl<'r> DeserializeSeed<'r> for Search<'_, 'r> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'r>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'r> Visitor<'r> for Search<'_, 'r> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    /// A string without escapes. Masking rules have searched the text as it is.
    fn visit_borrowed_str<E>(self, text: &'r str) -> Result<(), E> {
        // A URI is not a link here, but a name.
        let name = text.split_once("://").map_or(text, |(_, rest)| rest);
        if let Meaning::Problem(rank) = self.meaning
            && self.found.is_none_or(|(found, _)| rank < found)
            && is_name(name)
        {
            *self.found = Some((rank, name));
        }
        Ok(())
    }

    fn visit_map<M: MapAccess<'r>>(self, mut map: M) -> Result<(), M::Error> {
        while let Some(field) = map.next_key::<String>()? {
            match meaning(&field) {
                Some(meaning) => map.next_value_seed(Search {
                    meaning,
                    found: self.found,
                })?,
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }

    fn visit_seq<S: SeqAccess<'r>>(self, mut list: S) -> Result<(), S::Error> {
        loop {
            let search = Search {
                meaning: Meaning::Container,
                found: self.found,
            };
            if list.next_element_seed(search)?.is_none() {
                break;
            }
        }
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_name_their_problem() {
        let long = format!(r#"{{"error":"{}"}}"#, "x".repeat(MAX_NAME + 1));
        for (response, expected) in [
            (r#"{"error":"tenant-suspended"}"#, Some("tenant-suspended")),
            (r#"{"error":"no customer Bob Miller"}"#, None),
            (r#"{"error":"no customer Bob Miller","code":"E1"}"#, Some("E1")),
            (
                r#"{"title":"NotFound","code":"E1","type":"about:blank"}"#,
                Some("E1"),
            ),
            (
                r#"{"type":"https://example.com/probs/credit"}"#,
                Some("example.com/probs/credit"),
            ),
            (
                r#"{"error":{"code":404,"message":"no 7","errors":[{"code":"gone"}]}}"#,
                Some("gone"),
            ),
            (
                r#"{"detail":[{"type":"missing","loc":["body","a"],"input":{"type":"x"}}]}"#,
                Some("missing"),
            ),
            // It is cut.
            (
                r#"{"a":[1.5,true,null],"code":"E1","message":"no or…"#,
                Some("E1"),
            ),
            (r#"{"code":"E1…"#, None),
            (&long, None),
            (
                r#"{"detail":"Bob is unknown","message":"no","codes":["x"]}"#,
                None,
            ),
            (r#"{"record":{"type":"order"}}"#, None),
            (r#"{"error":"b\u006fb"}"#, None),
            (r#"["busy",{"title":"Busy"}]"#, Some("Busy")),
            (r#""busy""#, None),
            ("busy", None),
            ("<masked>", None),
            ("", None),
        ] {
            assert_eq!(named(response), expected, "{response}");
        }
        // A deep document ends the search, not the process.
        assert_eq!(named(&r#"{"error":"#.repeat(10_000)), None);
    }
}
