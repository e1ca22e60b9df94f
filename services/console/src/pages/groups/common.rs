//! What dead letters have in common: names, each with the value that most of them have. No IO.
//!
//! What is withheld from the caller or masked is neither compared nor shown, apart from its name.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use redeliver_client::messages::DeadLetter;
use redeliver_core::json::fields;
use redeliver_core::kept::is_editable;
use serde_json::value::RawValue;

use crate::html::position;
use crate::page::literal;

/// The most names of one dead letter, and of all.
const NAMES: usize = 200;
const ALL_NAMES: usize = 400;
/// The most rows and names on a page.
const SHOWN: usize = 40;
/// The longest name and value that are compared, in bytes.
const TEXT: usize = 100;
/// The largest JSON document that is compared, in bytes, and the deepest object in it.
const DOCUMENT: usize = 64 << 10;
const DEPTH: usize = 8;
/// What stands for a masked part.
const MASKED: &str = "<masked>";

/// The kind of a name, and the name.
type Name = (&'static str, String);

/// Dead letters that are compared.
#[derive(Debug, Default)]
pub(crate) struct Common {
    pub(crate) letters: usize,
    /// How many of them have no key, headers and value for the caller.
    pub(crate) withheld: usize,
    /// Whether there are more names than are compared.
    pub(crate) has_more_names: bool,
    names: BTreeMap<Name, Seen>,
}

/// How many dead letters have a name, and each value.
#[derive(Debug, Default)]
struct Seen {
    letters: usize,
    values: HashMap<String, usize>,
}

/// A value that at least half of the dead letters have.
pub(crate) struct Row<'c> {
    pub(crate) name: &'c Name,
    pub(crate) value: &'c str,
    pub(crate) letters: usize,
}

impl Row<'_> {
    /// The filter for dead letters with this value, if filters can tell: only some fields are indexed.
    pub(crate) fn filter(&self) -> Option<String> {
        let (kind, name) = self.name;
        let value = literal(self.value);
        match *kind {
            "header" => Some(format!("headers.{} = {value}", literal(name))),
            "key" => Some(format!("key = {value}")),
            "retries" => Some(format!("retry_count = {}", self.value)),
            _ => None,
        }
    }
}

impl Common {
    pub(crate) fn add(&mut self, letter: &DeadLetter) {
        self.letters += 1;
        self.withheld += usize::from(letter.payload_withheld != 0);
        let parts = parts(letter);
        self.has_more_names |= parts.len() >= NAMES;
        let mut last = None;
        for (name, value) in parts {
            if self.names.len() >= ALL_NAMES && !self.names.contains_key(&name) {
                self.has_more_names = true;
                continue;
            }
            let seen = self.names.entry(name.clone()).or_default();
            // A header can have several values.
            seen.letters += usize::from(last.as_ref() != Some(&name));
            if let Some(value) = value {
                *seen.values.entry(value).or_default() += 1;
            }
            last = Some(name);
        }
    }

    /// Values that at least half of the dead letters have, the most frequent first.
    pub(crate) fn rows(&self) -> Vec<Row<'_>> {
        let rows = self.names.iter().filter_map(|(name, seen)| {
            let (value, letters) = self.value(seen)?;
            Some(Row { name, value, letters })
        });
        let mut rows: Vec<Row> = rows.collect();
        rows.sort_by_key(|row| Reverse(row.letters));
        rows.truncate(SHOWN);
        rows
    }

    /// Names of headers and fields that all of them have, with values that differ, are masked, or are too long.
    pub(crate) fn names(&self) -> Vec<String> {
        let in_all = self.names.iter().filter(|((kind, _), seen)| {
            ["header", "field"].contains(kind) && seen.letters == self.letters && self.value(seen).is_none()
        });
        in_all
            .map(|((kind, name), _)| format!("{kind} {name}"))
            .take(SHOWN)
            .collect()
    }

    fn value<'s>(&self, seen: &'s Seen) -> Option<(&'s str, usize)> {
        let values = seen
            .values
            .iter()
            .map(|(value, letters)| (value.as_str(), *letters));
        let (value, letters) = values.max_by_key(|(value, letters)| (*letters, Reverse(*value)))?;
        (letters > 1 && letters * 2 >= self.letters).then_some((value, letters))
    }
}

/// The named parts of a dead letter, each once, with values that can be compared.
fn parts(letter: &DeadLetter) -> BTreeSet<(Name, Option<String>)> {
    let mut parts = BTreeSet::new();
    let mut known = |kind, value: String| _ = parts.insert(((kind, String::new()), Some(value)));
    for (kind, of) in [
        ("from partition", &letter.origin),
        ("in partition", &letter.position),
    ] {
        let whole = of.as_ref().map(position).filter(|whole| whole.contains('/'));
        if let Some((partition, _)) = whole.as_deref().and_then(|whole| whole.rsplit_once('/')) {
            known(kind, partition.to_owned());
        }
    }
    known("retries", letter.retry_count.to_string());
    if let Some(key) = letter
        .key
        .as_deref()
        .filter(|_| !letter.key_truncated)
        .and_then(text)
    {
        if let Some(end) = key.find([':', '/', '-', '_', '.', '#', '|']) {
            known("key begins with", key[..=end].to_owned());
        }
        known("key", key);
    }
    for header in letter.headers.iter().take(NAMES) {
        if header.name.len() <= TEXT && is_editable(&header.name) {
            let value = header.value.as_deref().and_then(text);
            parts.insert((("header", header.name.clone()), value));
        }
    }
    let value = letter.value.as_deref();
    let value = value.filter(|value| !letter.value_truncated && value.len() <= DOCUMENT);
    if let Some(document) = value.and_then(|value| serde_json::from_slice::<&RawValue>(value).ok()) {
        let mut found = Vec::new();
        add_fields(document, "", DEPTH, &mut found);
        parts.extend(found);
    }
    parts
}

/// Adds the fields of a JSON object and of objects in it, with their paths (RFC 6901).
fn add_fields(object: &RawValue, path: &str, depth: usize, found: &mut Vec<(Name, Option<String>)>) {
    if !object.get().starts_with('{') || depth == 0 {
        return;
    }
    for (name, value) in fields(object).unwrap_or_default() {
        let Ok(name) = serde_json::from_str::<String>(name.get()) else {
            continue;
        };
        let path = format!("{path}/{}", name.replace('~', "~0").replace('/', "~1"));
        if found.len() >= NAMES || path.len() > TEXT {
            continue;
        }
        if value.get().starts_with(['{', '[']) {
            add_fields(value, &path, depth - 1, found);
            continue;
        }
        // As JSON: a number is another value than a text with its digits.
        found.push((("field", path), text(value.get().as_bytes())));
    }
}

/// A value as text. `None` if it is none, too long, or masked.
fn text(value: &[u8]) -> Option<String> {
    let text = str::from_utf8(value).ok()?;
    (text.len() <= TEXT && !text.contains(MASKED)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_client::messages::{Header, Position};

    use super::*;

    fn letter(key: &str, headers: &[(&str, &str)], value: &str) -> DeadLetter {
        let header = |(name, value): &(&str, &str)| Header {
            name: (*name).to_owned(),
            value: Some(Bytes::copy_from_slice(value.as_bytes())),
        };
        let position = |topic: &str| Position {
            topic: topic.to_owned(),
            partition: 3,
            offset: 17,
        };
        DeadLetter {
            position: Some(position("orders-dlq")),
            origin: Some(position("orders")),
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value: Some(Bytes::copy_from_slice(value.as_bytes())),
            headers: headers.iter().map(header).collect(),
            ..DeadLetter::default()
        }
    }

    fn common(letters: &[DeadLetter]) -> Common {
        let mut common = Common::default();
        letters.iter().for_each(|letter| common.add(letter));
        common
    }

    fn shown(common: &Common) -> Vec<String> {
        let rows = common.rows().into_iter();
        let rows = rows.map(|row| format!("{} {}={} {}", row.name.0, row.name.1, row.value, row.letters));
        rows.collect()
    }

    #[test]
    fn values_of_half_are_shown() {
        let common = common(&[
            letter(
                "acme:1",
                &[("tenant", "acme"), ("tenant", "x")],
                r#"{"country":"DE","id":1,"a":{"b/c":true}}"#,
            ),
            letter(
                "acme:2",
                &[("tenant", "acme"), ("host", "h1")],
                r#"{"country":"DE","id":2,"a":{"b/c":true}}"#,
            ),
            letter(
                "b",
                &[("tenant", "other"), ("error-code", "x")],
                r#"{"country":null,"id":3,"a":{"b/c":true}}"#,
            ),
            letter("c", &[("tenant", "third")], "no JSON"),
        ]);
        let expected = [
            "from partition =orders/3 4",
            "in partition =orders-dlq/3 4",
            "retries =0 4",
            "field /a/b~1c=true 3",
            "field /country=\"DE\" 2",
            "header tenant=acme 2",
            "key begins with =acme: 2",
        ];
        assert_eq!(shown(&common), expected);
        assert!(common.names().is_empty(), "{:?}", common.names());
        let rows = common.rows();
        let filters = rows.iter().filter_map(Row::filter);
        let expected = ["retry_count = 0", "headers.\"tenant\" = \"acme\""];
        assert_eq!(filters.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn hidden_parts_show_names_only() {
        let masked = letter(
            "k",
            &[("card", "<masked>")],
            r#"{"mail":"<masked>","note":"to <masked>"}"#,
        );
        let withheld = DeadLetter {
            payload_withheld: 1,
            ..DeadLetter::default()
        };
        let of_masked = common(&[masked.clone(), masked]);
        assert_eq!(of_masked.names(), ["field /mail", "field /note", "header card"]);
        assert!(
            shown(&of_masked).iter().all(|row| !row.contains("masked")),
            "{of_masked:?}"
        );
        let of_withheld = common(&[withheld.clone(), withheld]);
        assert_eq!(
            (shown(&of_withheld), of_withheld.withheld),
            (vec!["retries =0 2".to_owned()], 2)
        );
    }

    #[test]
    fn hostile_letters_are_bounded() {
        let deep = format!("{}1{}", "{\"a\":".repeat(9_000), "}".repeat(9_000));
        let wide: Vec<String> = (0..5_000).map(|index| format!("\"f{index}\":{index}")).collect();
        let many: Vec<(String, String)> = (0..5_000)
            .map(|index| (format!("h{index}"), "x".repeat(500)))
            .collect();
        let many: Vec<(&str, &str)> = many
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        let long = format!("{{\"{}\":\"\\u0000\\u202e<b>\"}}", "n".repeat(5_000));
        let mut letters = vec![
            letter(&"k".repeat(1 << 20), &many, &deep),
            letter("\0", &[("", "")], &format!("{{{}}}", wide.join(","))),
            letter("k", &[("n\u{202e}", "<script>")], &long),
        ];
        letters.extend_from_within(..);
        let common = common(&letters);
        assert_eq!((common.names.len(), common.has_more_names), (ALL_NAMES, true));
        let rows = common.rows();
        assert!(
            rows.len() <= SHOWN
                && rows
                    .iter()
                    .all(|row| row.name.1.len() <= TEXT && row.value.len() <= TEXT)
        );
        assert!(common.names().is_empty());
    }
}
