//! Which dead letters fail for the same reason: the fingerprint of a failure, which puts dead letters into groups.
//!
//! The fingerprint is a hash of the pipeline (or the dead-letter topic, if the headers name no pipeline), the error class, the error
//! code and the template: that of the message and, if the response of an endpoint names a problem (see `problem.rs`), of its name. In a template, placeholders stand for what differs between messages of the same
//! cause:
//!
//! | placeholder | stands for |
//! |---|---|
//! | `<url>` | `scheme://…` up to a space, a quotation mark, a bracket, a comma or a semicolon |
//! | `<quoted>` | text in quotation marks, and the value of `(column)=(value)`, as Postgres writes it |
//! | `<time>` | dates, times, and both, as in ISO 8601 |
//! | `<host>` | IP addresses and names of three or more labels, with their ports |
//! | `<id>` | UUIDs, and words that change between letters and digits three times or more |
//! | `<hex>` | words of hexadecimal digits, decimal ones and others |
//! | `<number>` | other digits, also within a word |
//!
//! The same version yields the same fingerprints on every machine. A template contains no digits, and the template of a template is the
//! template itself. No IO; the time is bounded, because only the first 1,000 characters of a message are considered.

use std::fmt;
use std::str::FromStr;

use redeliver_core::placeholders::{HEX, HOST, ID, NUMBER, QUOTED, TIME, URL};
use sha2::{Digest as _, Sha256};

use crate::dialect::Facts;
use crate::problem;

/// The version of the rules. Ids of different versions differ, and states of groups are lost. Increase it with every change of the rules that concerns
/// the ids of existing dead letters.
pub const VERSION: u8 = 1;

/// Only this many characters of a message are considered.
const MAX_MESSAGE: usize = 1_000;
/// Maximum number of characters of a template.
const MAX_TEMPLATE: usize = 300;

/// Identifies a group: the first 8 bytes of a SHA-256. The index stores these numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(i64);

/// The text is not the id of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not the id of a group, which has 16 hexadecimal digits in lower case")]
pub struct InvalidGroupId;

impl GroupId {
    /// The group of a dead letter of this topic, whose headers say this.
    #[must_use]
    pub fn of(topic: &str, facts: &Facts) -> Self {
        let (kind, source) = if facts.pipeline.is_empty() {
            ("topic", topic)
        } else {
            ("pipeline", &*facts.pipeline)
        };
        let template = template_of(facts);
        let mut hash = Sha256::new_with_prefix([VERSION]);
        for part in [kind, source, &facts.error_class, &facts.error_code, &template] {
            // The length before each part ensures that different failures are hashed as different bytes.
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part.as_bytes());
        }
        let mut first = [0; 8];
        first.copy_from_slice(&hash.finalize()[..8]);
        Self(i64::from_be_bytes(first))
    }

    /// The group with this number.
    #[must_use]
    pub const fn from_number(number: i64) -> Self {
        Self(number)
    }

    /// The number that the index stores.
    #[must_use]
    pub const fn number(self) -> i64 {
        self.0
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0.cast_unsigned())
    }
}

impl FromStr for GroupId {
    type Err = InvalidGroupId;

    fn from_str(text: &str) -> Result<Self, InvalidGroupId> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() != 16 || !text.bytes().all(is_digit) {
            return Err(InvalidGroupId);
        }
        let number = u64::from_str_radix(text, 16).map_err(|_| InvalidGroupId)?;
        Ok(Self(number.cast_signed()))
    }
}

/// The template of the failures of a group.
#[must_use]
pub fn template_of(facts: &Facts) -> String {
    let of_message = template(&facts.error_message);
    match problem::named(&facts.error_response) {
        Some(name) => format!("{of_message}: {}", template(name)),
        None => of_message,
    }
}

/// The template of a message.
#[must_use]
pub fn template(message: &str) -> String {
    let end = message
        .char_indices()
        .nth(MAX_MESSAGE)
        .map_or(message.len(), |(end, _)| end);
    let mut template = Template {
        rest: &message[..end],
        is_cut: end < message.len(),
        unclosed: Vec::new(),
        text: String::with_capacity(end.min(MAX_TEMPLATE)),
        length: 0,
    };
    while template.length < MAX_TEMPLATE && template.step() {}
    template.text.truncate(template.text.trim_end().len());
    template.text
}

/// A template that is being built.
struct Template<'m> {
    rest: &'m str,
    /// Whether the message continues after `rest`.
    is_cut: bool,
    /// Quotation marks that `rest` does not contain, so that they are not looked for again.
    unclosed: Vec<char>,
    text: String,
    /// The number of characters of `text`.
    length: usize,
}

impl Template<'_> {
    /// Consumes the next part of the message. `false` if there is none.
    fn step(&mut self) -> bool {
        let Some(next) = self.rest.chars().next() else {
            return false;
        };
        if next.is_whitespace() || next.is_control() {
            self.space(next);
        } else if let Some(close) = closing_quote(next)
            && !(next == '\'' && self.text.ends_with(char::is_alphanumeric))
            && let Some(end) = self.quoted_end(next, close)
        {
            self.replace(end, QUOTED);
        } else if next == '('
            && self.text.ends_with(")=")
            && let Some(end) = self.rest.find(')')
        {
            self.replace(end + 1, "(");
            self.push(QUOTED);
            self.push(")");
        } else if next.is_ascii_alphanumeric() && !self.text.ends_with(|c: char| c.is_ascii_alphanumeric()) {
            self.word();
        } else if let Some(end) = ipv6(self.rest) {
            self.replace(end, HOST);
        } else {
            self.keep(next.len_utf8());
        }
        true
    }

    fn space(&mut self, next: char) {
        self.rest = &self.rest[next.len_utf8()..];
        if !self.text.is_empty() && !self.text.ends_with(' ') {
            self.push(" ");
        }
    }

    /// The end of a part in quotation marks, the first of which comes next.
    fn quoted_end(&mut self, open: char, close: char) -> Option<usize> {
        if self.unclosed.contains(&close) {
            return None;
        }
        let inner = &self.rest[open.len_utf8()..];
        if let Some(end) = inner.find(close) {
            return Some(open.len_utf8() + end + close.len_utf8());
        }
        if self.is_cut {
            return Some(self.rest.len());
        }
        self.unclosed.push(close);
        None
    }

    /// A part that begins with a letter or a digit, at the beginning of a word or after digits.
    fn word(&mut self) {
        for (end, placeholder) in [
            (url(self.rest), URL),
            (time(self.rest), TIME),
            (uuid(self.rest), ID),
            (host(self.rest), HOST),
            (ipv6(self.rest), HOST),
            (number(self.rest), NUMBER),
        ] {
            if let Some(end) = end {
                return self.replace(end, placeholder);
            }
        }
        let word = run(self.rest, |byte| byte.is_ascii_alphanumeric());
        if is_hex(word) {
            return self.replace(word.len(), HEX);
        }
        let changes = word
            .as_bytes()
            .windows(2)
            .filter(|pair| pair[0].is_ascii_digit() != pair[1].is_ascii_digit());
        if changes.count() >= 3 {
            return self.replace(word.len(), ID);
        }
        let letters = run(self.rest, |byte| byte.is_ascii_alphabetic());
        if letters.is_empty() {
            let digits = run(self.rest, |byte| byte.is_ascii_digit());
            self.replace(digits.len(), NUMBER);
        } else {
            self.keep(letters.len());
            let digits = run(self.rest, |byte| byte.is_ascii_digit());
            if !digits.is_empty() {
                self.replace(digits.len(), NUMBER);
            }
        }
    }

    fn replace(&mut self, length: usize, placeholder: &str) {
        self.rest = &self.rest[length..];
        self.push(placeholder);
    }

    fn keep(&mut self, length: usize) {
        let (kept, rest) = self.rest.split_at(length);
        self.rest = rest;
        self.push(kept);
    }

    fn push(&mut self, text: &str) {
        for next in text.chars() {
            if self.length == MAX_TEMPLATE {
                return;
            }
            self.text.push(next);
            self.length += 1;
        }
    }
}

fn closing_quote(open: char) -> Option<char> {
    match open {
        '"' | '\'' | '`' => Some(open),
        '\u{201c}' => Some('\u{201d}'),
        '\u{2018}' => Some('\u{2019}'),
        '\u{ab}' => Some('\u{bb}'),
        _ => None,
    }
}

/// The beginning of a text whose bytes pass a test.
fn run(text: &str, test: impl Fn(u8) -> bool) -> &str {
    let end = text.bytes().position(|byte| !test(byte)).unwrap_or(text.len());
    // The tests only accept ASCII.
    text.get(..end).unwrap_or_default()
}

fn has_digit(text: &str) -> bool {
    text.bytes().any(|byte| byte.is_ascii_digit())
}

fn is_hex(word: &str) -> bool {
    let digits = word
        .strip_prefix("0x")
        .or_else(|| word.strip_prefix("0X"))
        .unwrap_or(word);
    has_digit(word)
        && word.bytes().any(|byte| byte.is_ascii_alphabetic())
        && !digits.is_empty()
        && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a text does not continue with a letter or a digit.
fn is_boundary(rest: &str) -> bool {
    !rest.starts_with(|c: char| c.is_ascii_alphanumeric())
}

fn url(text: &str) -> Option<usize> {
    if !text.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return None;
    }
    let scheme = run(text, |byte| {
        byte.is_ascii_alphanumeric() || b"+.-".contains(&byte)
    });
    let rest = text[scheme.len()..].strip_prefix("://")?;
    let is_end = |c: char| {
        c.is_whitespace() || closing_quote(c).is_some() || "\u{201d}\u{2019}\u{bb}<>()[]{},;".contains(c)
    };
    let end = rest.find(is_end).unwrap_or(rest.len());
    // A sentence may end after it.
    let end = rest[..end].trim_end_matches(['.', ':', '!', '?']).len();
    Some(scheme.len() + 3 + end)
}

/// A pattern in which `#` is a digit.
fn matches(text: &str, pattern: &str) -> bool {
    let pairs = text.bytes().zip(pattern.bytes());
    text.len() >= pattern.len() && { pairs }.all(|(byte, expected)| match expected {
        b'#' => byte.is_ascii_digit(),
        _ => byte == expected,
    })
}

fn time(text: &str) -> Option<usize> {
    const DATES: [&str; 2] = ["####-##-##", "####/##/##"];
    let mut end = 0;
    if let Some(date) = DATES.iter().find(|date| matches(text, date)) {
        end = date.len();
        let after = &text[end..];
        if !after.starts_with(['T', 't', ' ']) || !matches(&after[1..], "##:##") {
            return is_boundary(after).then_some(end);
        }
        end += 1;
    }
    if !matches(&text[end..], "##:##") || (end == 0 && !matches(text, "##:##:##")) {
        return None;
    }
    end += 5;
    if matches(&text[end..], ":##") {
        end += 3;
    }
    if text[end..].starts_with(['.', ',']) {
        let fraction = run(&text[end + 1..], |byte| byte.is_ascii_digit());
        if !fraction.is_empty() {
            end += 1 + fraction.len();
        }
    }
    let zone = &text[end..];
    if zone.starts_with(['Z', 'z']) && is_boundary(&zone[1..]) {
        end += 1;
    } else if zone.starts_with(['+', '-']) {
        end += ["##:##", "####", "##"]
            .iter()
            .find(|offset| matches(&zone[1..], offset))
            .map_or(0, |offset| 1 + offset.len());
    }
    is_boundary(&text[end..]).then_some(end)
}

fn uuid(text: &str) -> Option<usize> {
    let mut end = 0;
    for (index, length) in [8, 4, 4, 4, 12].into_iter().enumerate() {
        if index > 0 {
            end += usize::from(text[end..].starts_with('-'));
        }
        let part = run(&text[end..], |byte| byte.is_ascii_alphanumeric());
        if part.len() != length || !part.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        end += length;
    }
    // Its four hyphens count.
    (end == 36 && has_digit(&text[..end])).then_some(end)
}

/// Four numbers, with a port.
fn ipv4(text: &str) -> Option<usize> {
    let mut end = 0;
    for index in 0..4 {
        if index > 0 {
            end += text[end..].strip_prefix('.').map(|_| 1)?;
        }
        let digits = run(&text[end..], |byte| byte.is_ascii_digit());
        if !(1..=3).contains(&digits.len()) {
            return None;
        }
        end += digits.len();
    }
    let rest = &text[end..];
    // A longer version number, or a longer word.
    if !is_boundary(rest) || (rest.starts_with('.') && !is_boundary(&rest[1..])) {
        return None;
    }
    Some(end + port(rest))
}

/// The length of a colon and a port.
fn port(text: &str) -> usize {
    let digits = text
        .strip_prefix(':')
        .map_or("", |text| run(text, |byte| byte.is_ascii_digit()));
    if digits.is_empty() || !is_boundary(&text[1 + digits.len()..]) {
        0
    } else {
        1 + digits.len()
    }
}

fn host(text: &str) -> Option<usize> {
    if let Some(end) = ipv4(text) {
        return Some(end);
    }
    let name = run(text, |byte| {
        byte.is_ascii_alphanumeric() || b".-_".contains(&byte)
    });
    let rest = &text[name.len()..];
    // Java writes `name/address:port`.
    if let Some(address) = rest.strip_prefix('/')
        && let Some(end) = ipv4(address)
    {
        return Some(name.len() + 1 + end);
    }
    // Class names have upper-case letters.
    let is_name = name.split('.').count() >= 3
        && name.split('.').all(|label| !label.is_empty())
        && !name.bytes().any(|byte| byte.is_ascii_uppercase());
    match port(rest) {
        0 => None,
        port => is_name.then_some(name.len() + port),
    }
}

/// An IPv6 address with at least one decimal digit, also in brackets with a port.
fn ipv6(text: &str) -> Option<usize> {
    if let Some(inner) = text.strip_prefix('[') {
        let end = ipv6(inner).filter(|end| inner[*end..].starts_with(']'))?;
        let end = end + 2;
        return Some(end + port(&text[end..]));
    }
    if !text.starts_with(|c: char| c.is_ascii_hexdigit() || c == ':') {
        return None;
    }
    let address = run(text, |byte| byte.is_ascii_hexdigit() || byte == b':');
    let groups = address.split(':').count();
    let is_address = has_digit(address)
        && address.split(':').all(|group| group.len() <= 4)
        && (groups == 8 || (groups <= 8 && address.contains("::")));
    (is_address && is_boundary(&text[address.len()..])).then_some(address.len())
}

/// A decimal number, also with points and commas within.
fn number(text: &str) -> Option<usize> {
    let mut end = run(text, |byte| byte.is_ascii_digit()).len();
    if end == 0 {
        return None;
    }
    while text[end..].starts_with(['.', ',']) {
        let more = run(&text[end + 1..], |byte| byte.is_ascii_digit()).len();
        if more == 0 {
            break;
        }
        end += 1 + more;
    }
    is_boundary(&text[end..]).then_some(end)
}

#[cfg(test)]
mod tests;
