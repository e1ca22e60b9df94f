//! `redeliver dlq show --payload`: the value of a dead letter.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use clap::ValueEnum;
use redeliver_client::DeadLetterClient;
use redeliver_core::json::indented;

use super::completeness::EXIT_INCOMPLETE;
use crate::connection::CliError;
use crate::output::{in_one_line, multiline};

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
            let json = indented(&whole, usize::MAX).ok_or_else(|| {
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
    fn text_and_hex_contain_all_bytes() {
        assert_eq!(text(b"a\n\x1b[31m\xff\xc3"), "a\n\\u{1b}[31m\\xff\\xc3\n");
        assert_eq!((text(b""), hexadecimal(b"")), (String::new(), String::new()));
        assert_eq!(hexadecimal(&[0xab; 33]), format!("{}\nab\n", "ab".repeat(32)));
    }
}
