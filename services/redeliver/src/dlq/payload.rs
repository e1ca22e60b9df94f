//! `redeliver dlq show --payload`: the value of a dead letter.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use clap::ValueEnum;
use redeliver_client::DeadLetterClient;
use redeliver_core::terminal::push_in_json_string;
use serde::de::IgnoredAny;

use super::completeness::EXIT_INCOMPLETE;
use crate::connection::CliError;
use crate::output::{in_one_line, multiline};

/// JSON is indented up to this depth, so that the output is not much larger than the document.
const MAX_INDENT: usize = 64;
/// Bytes per line in hexadecimal.
const HEX_LINE: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum PayloadFormat {
    /// Byte for byte
    Raw,
    /// Indented JSON; an error if it is not a JSON document
    Json,
    /// Text with escaped control characters
    Text,
    /// Hexadecimal digits, 32 bytes per line
    Hex,
}

/// Writes the value to stdout.
pub(super) async fn write(
    client: &DeadLetterClient,
    id: &str,
    format: PayloadFormat,
) -> Result<ExitCode, CliError> {
    let mut payload = client.payload(id).await?;
    let mut whole = Vec::new();
    while let Some(piece) = payload.next().await? {
        if format == PayloadFormat::Raw {
            print(&piece)?;
        } else {
            whole.extend_from_slice(&piece);
        }
    }
    match format {
        PayloadFormat::Raw => {}
        PayloadFormat::Json => {
            let json = indented(&whole).ok_or_else(|| {
                CliError::failed(format_args!(
                    "the payload of `{id}` is not a JSON document; use --payload text or --payload hex"
                ))
            })?;
            print(json.as_bytes())?;
        }
        PayloadFormat::Text => print(text(&whole).as_bytes())?,
        PayloadFormat::Hex => print(hexadecimal(&whole).as_bytes())?,
    }
    let flushed = std::io::stdout().flush();
    flushed.map_err(|error| CliError::Io("writing the payload", error))?;
    if payload.masked_paths().is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    // A script must not take it for the record.
    eprintln!(
        "the payload is masked at {}, so it is not what the record contains; the scope dead-letters:unmasked shows it",
        in_one_line(&payload.masked_paths().join(", "))
    );
    Ok(ExitCode::from(EXIT_INCOMPLETE))
}

fn print(bytes: &[u8]) -> Result<(), CliError> {
    let written = std::io::stdout().write_all(bytes);
    written.map_err(|error| CliError::Io("writing the payload", error))
}

/// An indented JSON document; `None` if the bytes are none. Only the space between tokens changes: numbers, the order of fields and repeated names
/// stay. Characters that could control a terminal are escaped as in JSON.
pub(super) fn indented(document: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(document).ok()?;
    serde_json::from_str::<IgnoredAny>(text).ok()?;
    let mut json = String::with_capacity(text.len() * 2);
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

/// Text whose control characters, and bytes that are not UTF-8, are escaped.
fn text(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(&multiline(chunk.valid()));
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// Lines of hexadecimal digits, which `xxd -r -p` reads.
fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2 + bytes.len() / HEX_LINE + 1);
    for line in bytes.chunks(HEX_LINE) {
        for byte in line {
            let _ = write!(text, "{byte:02x}");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_indented_without_other_changes() {
        let document =
            b"{ \"b\":[ ],\"a\" : 1.00000000000000000001,\"a\":{\"x y\":\"\\\"{,:\\\\\"}\n,\"c\":[1 , {}]}";
        let expected = "{\n  \"b\": [],\n  \"a\": 1.00000000000000000001,\n  \"a\": {\n    \"x y\": \"\\\"{,:\\\\\"\n  },\n  \"c\": [\n    1,\n    {}\n  ]\n}\n";
        assert_eq!(indented(document).unwrap(), expected);
        assert_eq!(
            indented(" \"\u{9b}\u{202e}ä\"".as_bytes()).unwrap(),
            "\"\\u009b\\u202eä\"\n"
        );
        for other in [&b""[..], b"{", b"{} {}", b"\xff", b"text"] {
            assert_eq!(indented(other), None, "{other:?}");
        }
    }

    #[test]
    fn deep_json_stays_small() {
        let depth = 100_000;
        let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(
            indented(deep.as_bytes()).is_none_or(|json| json.len() <= 2 * depth * (2 * MAX_INDENT + 2) + 1)
        );
    }

    #[test]
    fn text_and_hex_contain_all_bytes() {
        assert_eq!(text(b"a\n\x1b[31m\xff\xc3"), "a\n\\u{1b}[31m\\xff\\xc3\n");
        assert_eq!((text(b""), hexadecimal(b"")), (String::new(), String::new()));
        assert_eq!(hexadecimal(&[0xab; 33]), format!("{}\nab\n", "ab".repeat(32)));
    }
}
