//! Times, numbers, bytes and small charts as HTML. Everything that comes from records is escaped.

use std::borrow::Borrow;
use std::cmp::Reverse;
use std::fmt::{self, Write as _};
use std::time::Duration;

use askama::filters::{Escaper as _, Html, Safe};
use redeliver_client::Timestamp;
use redeliver_client::convert::from_timestamp;
use redeliver_client::messages::Position;
use redeliver_core::json::indented;
use redeliver_core::placeholders;
use redeliver_core::terminal::is_harmful;
use serde::Deserialize;

/// A text with HTML characters escaped, and with controls and bidirectional marks replaced by visible symbols: they could hide or
/// reorder what is around them.
pub(crate) fn text(text: impl AsRef<str>) -> Safe<String> {
    Safe(escaped(text.as_ref()))
}

pub(crate) fn escaped(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    let mut is_marked = false;
    for c in text.chars() {
        let mark = match c {
            '\n' | '\t' => None,
            '\0'..='\u{1f}' => char::from_u32(0x2400 + u32::from(c)).map(String::from),
            '\u{7f}' => Some('\u{2421}'.to_string()),
            '\u{200b}'..='\u{200d}' | '\u{2060}'..='\u{2064}' | '\u{feff}' => Some(code_point(c)),
            c => is_harmful(c).then(|| code_point(c)),
        };
        if mark.is_some() != is_marked {
            html.push_str(if is_marked {
                "</span>"
            } else {
                "<span class=\"ctl\">"
            });
            is_marked = !is_marked;
        }
        match mark {
            Some(mark) => html.push_str(&mark),
            None => {
                let _ = Html.write_escaped_char(&mut html, c);
            }
        }
    }
    if is_marked {
        html.push_str("</span>");
    }
    html
}

/// A template with its varying parts marked.
pub(crate) fn template(template: impl AsRef<str>) -> Safe<String> {
    let mut rest = template.as_ref();
    let mut html = String::new();
    while let Some((at, placeholder)) = placeholders::ALL
        .into_iter()
        .filter_map(|placeholder| Some((rest.find(placeholder)?, placeholder)))
        .min()
    {
        let _ = write!(
            html,
            "{}<span class=\"varies\">{}</span>",
            escaped(&rest[..at]),
            escaped(placeholder)
        );
        rest = &rest[at + placeholder.len()..];
    }
    Safe(html + &escaped(rest))
}

/// A text with a mark at a character, counted from 1, or behind its end.
pub(crate) fn marked(text: &str, character: usize) -> Safe<String> {
    let from = text
        .char_indices()
        .nth(character.saturating_sub(1))
        .map_or(text.len(), |(at, _)| at);
    let (before, rest) = text.split_at(from);
    let end = rest.chars().next().map_or(0, char::len_utf8);
    let (wrong, after) = rest.split_at(end);
    let wrong = if wrong.trim().is_empty() { "␣" } else { wrong };
    Safe(format!(
        "{}<mark>{}</mark>{}",
        escaped(before),
        escaped(wrong),
        escaped(after)
    ))
}

fn code_point(c: char) -> String {
    format!("U+{:04X}", u32::from(c))
}

/// What pages show as a time.
pub(crate) trait Time {
    fn time(&self) -> Option<Timestamp>;
}

impl Time for Timestamp {
    fn time(&self) -> Option<Timestamp> {
        Some(*self)
    }
}

impl Time for prost_types::Timestamp {
    fn time(&self) -> Option<Timestamp> {
        from_timestamp(self)
    }
}

impl<T: Time> Time for Option<T> {
    fn time(&self) -> Option<Timestamp> {
        self.as_ref().and_then(T::time)
    }
}

impl<T: Time> Time for &T {
    fn time(&self) -> Option<Timestamp> {
        T::time(self)
    }
}

/// The time, if there is one.
pub(crate) fn when(time: impl Time) -> Option<Timestamp> {
    time.time()
}

/// A time as the age or the wait that a person thinks in, with the exact time for the script that shows it in the zone of the viewer.
pub(crate) fn time(time: impl Time, now: impl Borrow<Timestamp>) -> Safe<String> {
    let Some((time, exact)) = time.time().and_then(|time| Some((time, time.to_rfc3339()?))) else {
        return Safe("<span class=\"none\">–</span>".to_owned());
    };
    let relative = relative(time, *now.borrow());
    let shown = exact.get(..19).unwrap_or(&exact).replace('T', " ");
    Safe(format!(
        "<time datetime=\"{exact}\" title=\"{shown} UTC\">{relative}</time>"
    ))
}

/// A time to the millisecond, in UTC.
pub(crate) fn exact(time: impl Time) -> Safe<String> {
    match time.time().and_then(Timestamp::to_rfc3339) {
        None => Safe("<span class=\"none\">–</span>".to_owned()),
        Some(exact) => {
            let shown = exact.trim_end_matches('Z').replace('T', " ");
            Safe(format!(
                "<time class=\"exact\" datetime=\"{exact}\">{shown} UTC</time>"
            ))
        }
    }
}

fn relative(time: Timestamp, now: Timestamp) -> String {
    if time > now {
        match time.since(now) {
            wait if wait < Duration::from_secs(1) => "now".to_owned(),
            wait => format!("in {}", duration(wait)),
        }
    } else {
        match now.since(time) {
            age if age < Duration::from_secs(1) => "just now".to_owned(),
            age => format!("{} ago", duration(age)),
        }
    }
}

/// The largest two units of a duration, such as `3 h 20 min`.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let units = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    let Some(first) = units.iter().position(|(length, _)| seconds >= *length) else {
        return format!("{} ms", duration.as_millis());
    };
    let (length, name) = units[first];
    let mut shown = format!("{} {name}", seconds / length);
    // Tens of a unit need no second one.
    if let Some((next, next_name)) = units.get(first + 1)
        && seconds / length < 10
        && let rest @ 1.. = seconds % length / next
    {
        let _ = write!(shown, " {rest} {next_name}");
    }
    shown
}

/// A whole number with thin spaces between thousands.
pub(crate) fn number(number: impl fmt::Display) -> String {
    let digits = number.to_string();
    let mut shown = String::with_capacity(digits.len() * 2);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            shown.push('\u{202f}');
        }
        shown.push(digit);
    }
    shown
}

/// A number of bytes, such as `1.4 KiB`.
pub(crate) fn bytes(bytes: impl Borrow<u64>) -> String {
    let bytes = *bytes.borrow();
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| bytes >> shift > 0) {
        None => format!("{bytes} B"),
        Some((name, shift)) => {
            let tenths = (u128::from(bytes) * 10) >> shift;
            format!("{}.{} {name}", tenths / 10, tenths % 10)
        }
    }
}

/// `topic/partition/offset`, or only the topic if that is all that is known.
pub(crate) fn position(position: &Position) -> String {
    if position.partition < 0 || position.offset < 0 {
        position.topic.clone()
    } else {
        format!("{}/{}/{}", position.topic, position.partition, position.offset)
    }
}

/// A text in an attribute.
struct Escaped<'t>(&'t str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Html.write_escaped_str(f, self.0)
    }
}

/// A bar chart of counts, the oldest first, as an image with a text for who does not see it.
pub(crate) fn bars(counts: &[u64], class: &str, label: impl AsRef<str>) -> Safe<String> {
    bars_up_to(counts.iter().copied().max().unwrap_or(0), counts, class, label)
}

/// The same, with a height of its own for this count, so that charts can be compared.
pub(crate) fn bars_up_to(most: u64, counts: &[u64], class: &str, label: impl AsRef<str>) -> Safe<String> {
    const HEIGHT: u64 = 28;
    const STEP: usize = 5;
    let most = most.max(1);
    let width = counts.len() * STEP;
    let mut svg = format!(
        "<svg class=\"bars {class}\" viewBox=\"0 0 {width} {HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{}\">",
        Escaped(label.as_ref())
    );
    for (index, count) in counts.iter().enumerate() {
        // A count that is not zero is visible.
        let height = if *count == 0 {
            1
        } else {
            (count * (HEIGHT - 2) / most).max(2)
        };
        let empty = if *count == 0 { " class=\"empty\"" } else { "" };
        let _ = write!(
            svg,
            "<rect{empty} x=\"{}\" y=\"{}\" width=\"{}\" height=\"{height}\"/>",
            index * STEP,
            HEIGHT - height,
            STEP - 1
        );
    }
    svg.push_str("</svg>");
    Safe(svg)
}

/// Dead letters by hour. Who does not see the bars hears how many there are, when most of them died, and how many in this hour.
pub(crate) fn trend(counts: &[u64]) -> Safe<String> {
    let sum = number(counts.iter().sum::<u64>());
    let mut label = format!("{sum} dead letters in the last 24 hours");
    let hours = counts.iter().rev().enumerate();
    if let Some((ago, most @ 1..)) = hours
        .map(|(ago, count)| (ago, *count))
        .max_by_key(|(ago, count)| (*count, Reverse(*ago)))
    {
        if ago > 0 {
            let _ = write!(label, "; most of them {ago} hours ago: {}", number(most));
        }
        let current = counts.last().copied().unwrap_or_default();
        let _ = write!(label, "; in this hour: {}", number(current));
    }
    bars(counts, "spark", &label)
}

/// How a viewer wants to see bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Form {
    /// As a person reads them best.
    #[default]
    Best,
    /// As they are, if they are UTF-8.
    Text,
    Hex,
}

/// Bytes of a record in a form, or their beginning.
pub(crate) struct Shown {
    pub(crate) kind: &'static str,
    text: String,
    pub(crate) is_cut: bool,
}

/// The most bytes of a value on a page: as text, and in hexadecimal digits.
const SHOWN: usize = 256 << 10;
const SHOWN_HEX: usize = 4 << 10;

impl Shown {
    pub(crate) fn of(value: &[u8]) -> Self {
        Self::in_form(value, Form::Best)
    }

    pub(crate) fn in_form(value: &[u8], form: Form) -> Self {
        if form == Form::Best
            && let Some(text) = indented(value, SHOWN)
        {
            let is_cut = text.len() >= SHOWN;
            return Self {
                kind: "JSON",
                text,
                is_cut,
            };
        }
        let beginning = &value[..value.len().min(SHOWN)];
        match text_of(beginning).filter(|_| form != Form::Hex) {
            Some(text) => Self {
                kind: "text",
                text: text.to_owned(),
                is_cut: text.len() < value.len(),
            },
            None => Self {
                kind: "hex",
                text: hex(&value[..value.len().min(SHOWN_HEX)]),
                is_cut: value.len() > SHOWN_HEX,
            },
        }
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escaped(&self.text))
    }
}

impl askama::filters::HtmlSafe for Shown {}

/// UTF-8, also if the end cuts a character.
fn text_of(bytes: &[u8]) -> Option<&str> {
    match str::from_utf8(bytes) {
        Ok(text) => Some(text),
        Err(error) if error.error_len().is_none() && bytes.len() == SHOWN => {
            str::from_utf8(&bytes[..error.valid_up_to()]).ok()
        }
        Err(_) => None,
    }
}

/// Rows of 16 bytes with their offset and their ASCII characters.
fn hex(bytes: &[u8]) -> String {
    let mut rows = String::new();
    for (row, bytes) in bytes.chunks(16).enumerate() {
        let _ = write!(rows, "{:06x}  ", row * 16);
        for index in 0..16 {
            match bytes.get(index) {
                Some(byte) => {
                    let _ = write!(rows, "{byte:02x} ");
                }
                None => rows.push_str("   "),
            }
        }
        rows.push(' ');
        rows.extend(bytes.iter().map(|byte| match byte {
            b' '..=b'~' => char::from(*byte),
            _ => '.',
        }));
        rows.push('\n');
    }
    rows
}

/// The most bytes of a key or a header value on a page.
const LINE: usize = 4 << 10;

/// A key or a header value in one line.
pub(crate) fn line(value: Option<&[u8]>) -> Safe<String> {
    match value {
        None => Safe("<span class=\"none\">null</span>".to_owned()),
        Some([]) => Safe("<span class=\"none\">empty</span>".to_owned()),
        Some(bytes) => match str::from_utf8(bytes) {
            Ok(text) => {
                let mut end = text.len().min(LINE);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                let rest = if end < text.len() { "…" } else { "" };
                Safe(escaped(&text[..end]) + rest)
            }
            Err(_) => {
                let digits: String = bytes.iter().take(64).map(|byte| format!("{byte:02x}")).collect();
                let rest = if bytes.len() > 64 { "…" } else { "" };
                Safe(format!("<span class=\"hex\">0x{digits}{rest}</span>"))
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_inert() {
        let shown = escaped("<script>\u{202e}\u{1b}[2J\0\"'&");
        for c in ['<', '\u{202e}', '\u{1b}', '\0', '"', '\''] {
            let spans = shown.replace("<span class=\"ctl\">", "").replace("</span>", "");
            assert!(!spans.contains(c), "{c:?} in {shown}");
        }
        assert!(
            shown.contains("U+202E") && shown.contains('␛') && shown.contains('␀'),
            "{shown}"
        );
    }

    #[test]
    fn varying_parts_are_marked() {
        assert_eq!(
            template("POST <url>: <b> <number>").0,
            "POST <span class=\"varies\">&#60;url&#62;</span>: &#60;b&#62; <span class=\"varies\">&#60;number&#62;</span>"
        );
        assert_eq!(template("no answer").0, "no answer");
    }

    #[test]
    fn wrong_characters_are_marked() {
        for (character, expected) in [
            (1, "<mark>ü</mark>b&#60;"),
            (2, "ü<mark>b</mark>&#60;"),
            (3, "üb<mark>&#60;</mark>"),
            (4, "üb&#60;<mark>␣</mark>"),
            (9, "üb&#60;<mark>␣</mark>"),
        ] {
            assert_eq!(marked("üb<", character).0, expected, "{character}");
        }
    }

    #[test]
    fn durations_have_two_units() {
        let cases = [
            (0, "0 ms"),
            (59_000, "59 s"),
            (61_000, "1 min 1 s"),
            (12 * 60_000 + 5_000, "12 min"),
            (3_600_000, "1 h"),
            (26 * 3_600_000, "1 d 2 h"),
        ];
        for (millis, expected) in cases {
            assert_eq!(duration(Duration::from_millis(millis)), expected);
        }
    }

    #[test]
    fn relative_times_name_direction() {
        let now = Timestamp::from_millis(1_000_000_000);
        let shown = |offset: i64| relative(Timestamp::from_millis(now.as_millis() + offset), now);
        assert_eq!(shown(-200), "just now");
        assert_eq!(shown(-90_000), "1 min 30 s ago");
        assert_eq!(shown(5_000), "in 5 s");
        assert_eq!(shown(200), "now");
    }

    #[test]
    fn numbers_and_sizes_are_short() {
        assert_eq!(number(999_u64), "999");
        assert_eq!(number(1_234_567_u64), "1\u{202f}234\u{202f}567");
        assert_eq!(bytes(1_023), "1023 B");
        assert_eq!(bytes(1_500), "1.4 KiB");
        assert_eq!(bytes(u64::MAX), "17179869183.9 GiB");
    }

    #[test]
    fn trends_are_told_in_words() {
        let shown = trend(&[0, 7, 2, 1]).0;
        let label = "10 dead letters in the last 24 hours; most of them 2 hours ago: 7; in this hour: 1";
        assert!(shown.contains(label), "{shown}");
        assert!(
            trend(&[0; 24])
                .0
                .contains("aria-label=\"0 dead letters in the last 24 hours\"")
        );
    }

    #[test]
    fn values_are_shown_by_content() {
        let shown = |value: &[u8]| {
            let shown = Shown::of(value);
            (shown.kind, shown.is_cut)
        };
        assert_eq!(shown(b"{\"a\":[1]}"), ("JSON", false));
        assert_eq!(shown(b"[1"), ("text", false));
        assert_eq!(shown(&[0xff, 0x00]), ("hex", false));
        let kind = |value: &[u8], form| Shown::in_form(value, form).kind;
        assert_eq!(
            (kind(b"[1]", Form::Text), kind(b"[1]", Form::Hex)),
            ("text", "hex")
        );
        assert_eq!(kind(&[0xff], Form::Text), "hex");
        assert_eq!(Shown::of(b"[1e999999]").to_string(), "[\n  1e999999\n]\n");
        assert_eq!(shown(&[0xff; SHOWN_HEX + 1]), ("hex", true));
        assert_eq!(shown("ü".repeat(SHOWN).as_bytes()), ("text", true));
        let deep = "[".repeat(SHOWN) + &"]".repeat(SHOWN);
        assert_eq!(shown(deep.as_bytes()), ("JSON", true));
        assert!(Shown::of(deep.as_bytes()).to_string().len() < 2 * SHOWN);
        let line = line(Some(&[1; 1 << 20])).0;
        assert!(
            line.len() < 4 * LINE && line.matches("<span").count() == 1,
            "{}",
            line.len()
        );
    }
}
