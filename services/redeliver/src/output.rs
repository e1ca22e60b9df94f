//! Output of commands: tables, JSON, and raw bytes.
//!
//! Records may contain any bytes. Control characters are escaped, also in JSON.

#[cfg(test)]
mod extremes;
mod messages;

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::time::Duration;

use bytes::Bytes;
use clap::ValueEnum;
use comfy_table::{Table, presets};
use prost_types::{Duration as ProtoDuration, Timestamp as ProtoTimestamp};
use redeliver_client::convert::{from_duration, from_headers, from_timestamp};
use redeliver_client::messages::{Completeness, Header, Position};
pub(crate) use redeliver_core::terminal::{in_one_line, json_line, multiline};
use redeliver_core::{Clock as _, HumanDuration, SystemClock, Timestamp};
use redeliver_dlq_inspector::dialect::readable_number;
use serde_json::json;

pub(crate) use messages::object;

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

/// What a cell of a table or a field shows; `None`: nothing.
pub(crate) trait Text {
    fn text(&self) -> Option<String>;

    /// At most `limit` characters.
    fn short(&self, limit: usize) -> Option<String> {
        self.text().map(|text| shortened(&text, limit))
    }
}

impl Text for str {
    fn text(&self) -> Option<String> {
        (!self.is_empty()).then(|| self.to_owned())
    }
}

impl Text for String {
    fn text(&self) -> Option<String> {
        self.as_str().text()
    }
}

impl Text for ProtoTimestamp {
    fn text(&self) -> Option<String> {
        from_timestamp(self)?.text()
    }
}

impl Text for ProtoDuration {
    fn text(&self) -> Option<String> {
        Some(from_duration(self)?.to_string())
    }
}

/// A key of a record. An empty one is not the same as none.
impl Text for Bytes {
    fn text(&self) -> Option<String> {
        Some(line(self, 1024))
    }
}

impl<T: Text> Text for Option<T> {
    fn text(&self) -> Option<String> {
        self.as_ref()?.text()
    }
}

macro_rules! text {
    ($($shown:ty),*) => {
        $(impl Text for $shown {
            fn text(&self) -> Option<String> {
                Some(self.to_string())
            }
        })*
    };
}

text!(f64, u32, u64, Position, Timestamp, fmt::Arguments<'_>);

/// A column of a table: its name, and what it shows of an item at a time.
pub(crate) type Column<T> = (&'static str, fn(&T, Timestamp) -> Option<String>);

/// Prints items as a table with these columns, as one JSON array, or as one JSON document per line.
pub(crate) fn print_items<T>(format: Format, columns: &[Column<T>], items: &[T], value: impl Fn(&T) -> Json) {
    match format {
        Format::Table => print(table_of(columns, items)),
        Format::Json => print_json(json!(items.iter().map(value).collect::<Vec<_>>())),
        Format::Jsonl => items.iter().for_each(|item| print_json(value(item))),
    }
}

/// As [`print_items`], with the completeness of the answer: in the JSON document, where the items have this name, or as the last line of JSON lines.
pub(crate) fn print_answer<T>(
    format: Format,
    columns: &[Column<T>],
    (name, items): (&str, &[T]),
    value: impl Fn(&T) -> Json,
    completeness: &Completeness,
) {
    match format {
        Format::Table => print_items(format, columns, items, value),
        Format::Json => {
            let items: Vec<Json> = items.iter().map(value).collect();
            print_json(json!({ name: items, "completeness": object(completeness) }));
        }
        Format::Jsonl => {
            print_items(format, columns, items, value);
            print_json(json!({ "completeness": object(completeness) }));
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

/// Prints a JSON document in one line, with control characters escaped.
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

/// The items as a table.
pub(crate) fn table_of<T>(columns: &[Column<T>], items: &[T]) -> String {
    let (now, names) = (SystemClock.now(), columns.iter().map(|(name, _)| *name));
    let row = |item| {
        columns
            .iter()
            .map(|(_, cell)| cell(item, now).unwrap_or_default())
            .collect()
    };
    table(&names.collect::<Vec<_>>(), items.iter().map(row))
}

/// A table without borders, so that tools such as `awk` can read it too.
pub(crate) fn table(columns: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(columns.iter().map(|name| name.to_uppercase()));
    for row in rows {
        table.add_row(row.iter().map(|cell| shown(cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    without_trailing_spaces(&table.to_string())
}

/// A cell of a table.
pub(crate) fn shown(cell: &str) -> String {
    if cell.is_empty() {
        "-".to_owned()
    } else {
        in_one_line(cell)
    }
}

/// Names with their values, one per line; those without a value are omitted.
pub(crate) fn fields(fields: &[(&str, &dyn Text)]) -> String {
    let present = fields
        .iter()
        .filter_map(|(name, value)| Some((name, value.text()?)));
    let present: Vec<_> = present.collect();
    let width = present.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in present {
        let _ = writeln!(text, "{name:<width$}  {}", in_one_line(&value));
    }
    text
}

fn without_trailing_spaces(text: &str) -> String {
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// A duration in its largest unit, rounded down.
pub(crate) fn rounded(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let unit = [86_400, 3_600, 60]
        .into_iter()
        .find(|unit| seconds >= 2 * unit)
        .unwrap_or(1);
    HumanDuration::from_secs(seconds / unit * unit).to_string()
}

/// When something is due, from now.
pub(crate) fn due(due: Option<Timestamp>, now: Timestamp) -> Option<String> {
    Some(match due? {
        due if due > now => format!("in {}", rounded(due.since(now))),
        due => format!("{} late", rounded(now.since(due))),
    })
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
pub(crate) fn header_lines(headers: &[Header]) -> String {
    let mut text = String::new();
    for (name, value) in from_headers(headers).iter() {
        let value = value.map_or_else(
            || "(null)".to_owned(),
            |value| readable_number(name, value).unwrap_or_else(|| line(value, 1024)),
        );
        let _ = writeln!(text, "  {}: {value}", in_one_line(name));
    }
    text
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
            ("a", &1_u32),
            ("b", &String::new()),
            ("long", &Some("2\u{1b}".to_owned())),
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
    fn durations_are_rounded_down() {
        for (seconds, expected) in [
            (0, "0s"),
            (119, "119s"),
            (121, "2m"),
            (7_300, "2h"),
            (2_600_000, "30d"),
        ] {
            assert_eq!(rounded(Duration::from_secs(seconds)), expected);
        }
    }
}
