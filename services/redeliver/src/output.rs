//! Output of commands: tables, JSON, and raw bytes.
//!
//! Records may contain any bytes. Characters that a terminal obeys are escaped, also in JSON.

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};

use clap::ValueEnum;
use comfy_table::{Table, presets};
use redeliver_core::Headers;
pub(crate) use redeliver_core::terminal::{in_one_line, json_line, multiline};
use redeliver_dlq_inspector::dialect::readable_number;
use serde_json::{Map, json};

/// What a command prints as JSON. It is only written: nothing that others have written is read as one.
#[expect(clippy::disallowed_types, reason = "what commands print themselves")]
pub(crate) type Json = serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Aligned columns
    Table,
    /// One JSON document
    Json,
    /// One JSON document per line and item
    Jsonl,
}

#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct OutputArgs {
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        default_value = "table",
        hide_possible_values = true,
        help = "Output format: table, json or jsonl"
    )]
    pub(crate) format: Format,
}

/// Prints items as a table with these columns, as one JSON array, or as one JSON document per line.
pub(crate) fn print_items<T>(
    format: Format,
    columns: &[&str],
    items: &[T],
    row: impl Fn(&T) -> Vec<String>,
    value: impl Fn(&T) -> Json,
) {
    match format {
        Format::Table => print(table(columns, items.iter().map(row))),
        Format::Json => print_json(json!(items.iter().map(value).collect::<Vec<_>>())),
        Format::Jsonl => {
            for item in items {
                print_json(value(item));
            }
        }
    }
}

pub(crate) fn print_item<V: fmt::Display>(
    format: Format,
    text: impl FnOnce() -> String,
    value: impl FnOnce() -> V,
) {
    match format {
        Format::Table => print(text().trim_end()),
        Format::Json | Format::Jsonl => print_json(value()),
    }
}

fn print(text: impl fmt::Display) {
    crate::say(text);
}

/// Prints a JSON document in one line that no terminal obeys.
pub(crate) fn print_json(document: impl fmt::Display) {
    print(json_line(&document.to_string()));
}

/// As [`print_json`]. The result is false if stdout is closed.
pub(crate) fn print_json_line(document: impl fmt::Display) -> bool {
    print_line(json_line(&document.to_string()))
}

/// Prints and flushes a line. The result is false if stdout is closed.
pub(crate) fn print_line(line: impl fmt::Display) -> bool {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).is_ok()
}

/// A table without borders, so that tools such as `awk` can read it too.
pub(crate) fn table(columns: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(columns.iter().map(|name| name.to_uppercase()));
    for row in rows {
        table.add_row(row.iter().map(|cell| {
            if cell.is_empty() {
                "-".to_owned()
            } else {
                in_one_line(cell)
            }
        }));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    without_trailing_spaces(&table.to_string())
}

/// Names with their values, one per line; those without a value are omitted.
pub(crate) fn fields(fields: &[(&str, Option<String>)]) -> String {
    let present = fields
        .iter()
        .filter_map(|(name, value)| Some((name, value.as_ref()?)));
    let width = present.clone().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in present {
        let _ = writeln!(text, "{name:<width$}  {}", in_one_line(value));
    }
    text
}

fn without_trailing_spaces(text: &str) -> String {
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// At most `limit` characters of a text.
pub(crate) fn shortened(text: &str, limit: usize) -> String {
    let mut characters = text.chars();
    let mut short: String = characters.by_ref().take(limit).collect();
    if characters.next().is_some() {
        short.push('…');
    }
    short
}

/// At most `limit` bytes, as text if they are UTF-8, else in hexadecimal. Line breaks are kept.
pub(crate) fn block(bytes: &[u8], limit: usize) -> String {
    let shown = &bytes[..bytes.len().min(limit)];
    let mut text = match readable(shown) {
        Some(text) => multiline(text),
        None => hexadecimal(shown),
    };
    if shown.len() < bytes.len() {
        let _ = write!(text, "\n… {} more bytes", bytes.len() - shown.len());
    }
    text
}

/// As [`block`], in one line.
pub(crate) fn line(bytes: &[u8], limit: usize) -> String {
    let shown = &bytes[..bytes.len().min(limit)];
    let mut text = match readable(shown) {
        Some(text) => in_one_line(text),
        None => hexadecimal(shown),
    };
    if shown.len() < bytes.len() {
        text.push('…');
    }
    text
}

/// Bytes as UTF-8, without a truncated last character.
fn readable(bytes: &[u8]) -> Option<&str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text),
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).ok()
        }
        Err(_) => None,
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<Vec<_>>()
        .join(" ")
}

/// Headers, one per line. Binary numbers of known frameworks are decoded.
pub(crate) fn header_lines(headers: &Headers) -> String {
    let mut text = String::new();
    for (name, value) in headers.iter() {
        let value = value.map_or_else(
            || "(null)".to_owned(),
            |value| readable_number(name, value).unwrap_or_else(|| line(value, 1024)),
        );
        let _ = writeln!(text, "  {}: {value}", in_one_line(name));
    }
    text
}

/// Inserts bytes into a JSON object: as text under `name` if they are UTF-8, else under `name_base64`.
pub(crate) fn insert_bytes(object: &mut Map<String, Json>, name: &str, bytes: Option<&[u8]>) {
    match bytes.map(|bytes| (bytes, std::str::from_utf8(bytes))) {
        None => object.insert(name.to_owned(), Json::Null),
        Some((_, Ok(text))) => object.insert(name.to_owned(), text.into()),
        Some((bytes, Err(_))) => object.insert(format!("{name}_base64"), base64(bytes).into()),
    };
}

/// Headers as a JSON array, because names may repeat. Decoded numbers of known frameworks are added to the exact values.
pub(crate) fn headers_json(headers: &Headers) -> Json {
    let list = headers.iter().map(|(name, value)| {
        let mut object = Map::new();
        object.insert("name".to_owned(), name.into());
        insert_bytes(&mut object, "value", value);
        if let Some(decoded) = value.and_then(|value| readable_number(name, value)) {
            object.insert("decoded".to_owned(), decoded.into());
        }
        Json::Object(object)
    });
    Json::Array(list.collect())
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_columns_are_aligned() {
        let rows = [vec!["a", "12345"], vec!["bcd", ""], vec!["é", "x\ny"]];
        let rows = rows.map(|row| row.iter().map(ToString::to_string).collect());
        let expected = "ID   VALUE\na    12345\nbcd  -\né    x\\ny";
        assert_eq!(table(&["id", "value"], rows), expected);
        assert_eq!(table(&["id"], []), "ID");
    }

    #[test]
    fn fields_without_a_value_are_omitted() {
        let text = fields(&[
            ("a", Some("1".into())),
            ("b", None),
            ("long", Some("2\u{1b}".into())),
        ]);
        assert_eq!(text, "a     1\nlong  2\\u{1b}\n");
    }

    #[test]
    fn control_characters_are_escaped() {
        let hostile = "\u{1b}]0;x\u{7}\u{9b}31m\u{202e}\r\u{0}";
        for shown in [
            in_one_line(hostile),
            block(hostile.as_bytes(), 100),
            line(hostile.as_bytes(), 100),
        ] {
            assert!(
                !shown.contains(|c: char| c.is_control() || c == '\u{202e}'),
                "{shown:?}"
            );
        }
        assert_eq!(block(b"{\n\t\"a\": 1\n}", 100), "{\n\t\"a\": 1\n}");
    }

    #[test]
    fn bytes_are_text_or_hexadecimal() {
        assert_eq!(block(b"\xff\x00a", 2), "ff 00\n… 1 more bytes");
        assert_eq!(block("aé".as_bytes(), 2), "a\n… 1 more bytes");
        assert_eq!(
            (line(b"abc", 2).as_str(), line(b"\xff", 2).as_str()),
            ("ab…", "ff")
        );
        assert_eq!(
            (shortened("äbc", 2).as_str(), shortened("äb", 2).as_str()),
            ("äb…", "äb")
        );
    }

    #[test]
    fn json_distinguishes_null_empty_and_binary() {
        let headers: Headers = [("a", None), ("a", Some(&b""[..])), ("a", Some(&b"\xff"[..]))]
            .into_iter()
            .collect();
        let expected = json!([
            { "name": "a", "value": null },
            { "name": "a", "value": "" },
            { "name": "a", "value_base64": "/w==" },
        ]);
        assert_eq!(headers_json(&headers), expected);
    }
}
