//! Files of dead letters, as `redeliver dlq export` writes them.
//!
//! A file is text in UTF-8 with one JSON object per line. The first line has the version of the format, and the last one the number of dead letters, so
//! that a file that was cut off is noticed. Each line between them is a dead letter, byte for byte. See `docs/dead-letters.md`.
//!
//! ```
//! use redeliver_client::export::{ExportReader, ExportWriter};
//! use redeliver_client::Timestamp;
//! use redeliver_client::messages::Completeness;
//!
//! let mut file = Vec::new();
//! let writer = ExportWriter::new(&mut file, "state = OPEN", Timestamp::from_millis(0))?;
//! writer.finish(&Completeness::default())?;
//! let mut reader = ExportReader::new(&file[..])?;
//! assert_eq!(reader.filter_text(), "state = OPEN");
//! assert!(reader.next().is_none());
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

mod line;
#[cfg(test)]
mod tests;

use std::io::{self, BufRead, Read as _, Write};

use bytes::Bytes;
use redeliver_core::content::{ContentHash, content_hash};
use redeliver_core::terminal::json_line;
use redeliver_core::{Headers, Position, Timestamp, TimestampType};
use redeliver_proto::convert::{from_headers, time};
use redeliver_proto::v1::{self, Completeness, DeadLetter, DeadLetterState};
use serde::{Deserialize, Serialize};

use line::{EndLine, FirstLine, LetterLine, Summary};

use crate::error::ClientError;

/// The version of the format.
const VERSION: u32 = 1;
/// The maximum size of a line in bytes. Brokers accept requests of 100 MiB by default, and JSON writes a byte as six characters at most.
const MAX_LINE: u64 = 1 << 30;
/// The maximum size of the first and the last line in bytes. A filter has 8 KiB at most.
const MAX_OTHER_LINE: usize = 64 << 10;

/// A dead letter in a file. Parts that [`Partial`] names are not what the record contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedDeadLetter {
    /// The position in the dead-letter topic.
    pub position: Position,
    /// The timestamp of the record; `None` if it has none.
    pub timestamp: Option<Timestamp>,
    /// Who has set the timestamp; `None` if that is not known, or if there is none.
    pub timestamp_type: Option<TimestampType>,
    /// Its state at the time of the export.
    pub state: DeadLetterState,
    /// The id of its group.
    pub group: Option<String>,
    /// The key; `None` is a null key.
    pub key: Option<Bytes>,
    /// The headers in order.
    pub headers: Headers,
    /// The value; `None` is a null value.
    pub value: Option<Bytes>,
    /// Which parts are not those of the record.
    pub partial: Partial,
}

/// Which parts of an exported dead letter are not those of the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Partial {
    /// Why `key` is `None`, or the beginning of the key.
    pub key: Option<Gap>,
    /// Why `headers` lacks headers, or contains `<masked>`.
    pub headers: Option<Gap>,
    /// Why `value` is `None`, or contains `"<masked>"`.
    pub value: Option<Gap>,
}

/// Why a part of an exported dead letter is not that of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gap {
    /// The caller lacks the scope `dead-letters:payload`.
    Withheld,
    /// The caller lacks the scope `dead-letters:unmasked`: `<masked>` stands for what is masked, or there is nothing.
    Masked,
    /// Kafka does not have the record any more.
    Gone,
    /// Names of headers are not UTF-8. These headers are left out.
    Unreadable,
    /// The inspector sends the beginning only.
    TooLarge,
}

impl Partial {
    /// Whether any part is not that of the record.
    #[must_use]
    pub fn is_any(&self) -> bool {
        *self != Self::default()
    }
}

impl ExportedDeadLetter {
    /// A dead letter that was listed with `full`. Its value is not complete if it is [truncated](DeadLetter::value_truncated).
    ///
    /// # Errors
    /// [`ClientError::InvalidResponse`] if it has no position: the file could not be read again.
    pub fn listed(letter: DeadLetter) -> Result<Self, ClientError> {
        let gap = |field: &str| match () {
            () if letter.payload_withheld != 0 => Some(Gap::Withheld),
            () if letter.is_masked(field) => Some(Gap::Masked),
            () => None,
        };
        let unreadable = (letter.unreadable_headers > 0).then_some(Gap::Unreadable);
        let too_large = |is_truncated: bool| is_truncated.then_some(Gap::TooLarge);
        let partial = Partial {
            key: gap("key").or(too_large(letter.key_truncated)),
            headers: gap("headers")
                .or(unreadable)
                .or(too_large(letter.headers_truncated)),
            value: gap("value"),
        };
        let position = letter.position.clone();
        Ok(Self {
            timestamp: letter.timestamp(),
            timestamp_type: match letter.timestamp_type() {
                v1::TimestampType::Unspecified | v1::TimestampType::None => None,
                v1::TimestampType::CreateTime => Some(TimestampType::CreateTime),
                v1::TimestampType::LogAppendTime => Some(TimestampType::LogAppendTime),
            },
            state: letter.state(),
            headers: from_headers(&letter.headers),
            position: position.ok_or(ClientError::InvalidResponse("position"))?.into(),
            group: Some(letter.group).filter(|group| !group.is_empty()),
            key: letter.key,
            value: letter.value,
            partial,
        })
    }

    /// A dead letter that Kafka does not have any more.
    ///
    /// # Errors
    /// As [`ExportedDeadLetter::listed`].
    pub fn gone(letter: DeadLetter) -> Result<Self, ClientError> {
        let mut gone = Self::listed(letter)?;
        gone.lose_value();
        gone.headers = Headers::new();
        gone.partial.headers = gone.partial.headers.or(Some(Gap::Gone));
        Ok(gone)
    }

    /// The hash of the record, as the inspector has it; `None` if a part is not that of the record.
    #[must_use]
    pub fn content_hash(&self) -> Option<ContentHash> {
        let hash = || {
            content_hash(
                self.timestamp,
                self.key.as_deref(),
                self.value.as_deref(),
                &self.headers,
            )
        };
        // A time that no answer can contain is not known here.
        let is_timestamp_known = self.timestamp.is_some() || self.timestamp_type.is_none();
        (is_timestamp_known && !self.partial.is_any()).then(hash)
    }

    /// Removes the value, because Kafka does not have it any more.
    pub fn lose_value(&mut self) {
        self.value = None;
        self.partial.value = self.partial.value.or(Some(Gap::Gone));
    }
}

/// Writes a file.
#[derive(Debug)]
pub struct ExportWriter<W> {
    to: W,
    dead_letters: u64,
    partial: u64,
}

impl<W: Write> ExportWriter<W> {
    /// Begins a file with the filter and the time of the export.
    ///
    /// # Errors
    /// If writing fails.
    pub fn new(to: W, filter: &str, exported_at: Timestamp) -> io::Result<Self> {
        let mut writer = Self {
            to,
            dead_letters: 0,
            partial: 0,
        };
        writer.line(&FirstLine {
            version: VERSION,
            filter: filter.into(),
            exported_at: exported_at.to_string().into(),
        })?;
        Ok(writer)
    }

    /// Writes a dead letter.
    ///
    /// # Errors
    /// If writing fails.
    pub fn write(&mut self, letter: &ExportedDeadLetter) -> io::Result<()> {
        self.line(&LetterLine::of(letter))?;
        self.dead_letters += 1;
        self.partial += u64::from(letter.partial.is_any());
        Ok(())
    }

    /// The number of dead letters that were written.
    #[must_use]
    pub fn dead_letters(&self) -> u64 {
        self.dead_letters
    }

    /// The number of these that are [partial](ExportedDeadLetter::partial).
    #[must_use]
    pub fn partial(&self) -> u64 {
        self.partial
    }

    /// Ends the file. `completeness` says whether it contains all dead letters that match.
    ///
    /// # Errors
    /// If writing fails.
    pub fn finish(mut self, completeness: &Completeness) -> io::Result<W> {
        let summary = Summary {
            dead_letters: self.dead_letters,
            partial: self.partial,
            complete: completeness.complete,
            as_of: time(completeness.as_of).map(|time| time.to_string()),
            missing_partitions: completeness.missing_count,
        };
        self.line(&EndLine { end: summary })?;
        self.to.flush()?;
        Ok(self.to)
    }

    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        // A file may be shown on a terminal.
        writeln!(self.to, "{}", json_line(&serde_json::to_string(line)?))
    }
}

/// Why a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Reading failed.
    #[error("reading line {line}")]
    Io {
        /// The number of the line, from 1.
        line: u64,
        /// The error.
        source: io::Error,
    },
    /// The first line is not that of an export.
    #[error(
        "line 1 is not the first line of an export of dead letters: it has no `redeliver_dead_letters` with a version"
    )]
    NoExport,
    /// A later version of Redeliver has written the file.
    #[error("the file has version {0} of the format; this program reads version {VERSION}")]
    Version(u32),
    /// A line is too long.
    #[error("line {0} is longer than {MAX_LINE} bytes")]
    TooLong(u64),
    /// A line is not valid. The text contains nothing of the line.
    #[error("line {line}: {problem}")]
    Invalid {
        /// The number of the line, from 1.
        line: u64,
        /// The field, and what is wrong.
        problem: String,
    },
    /// The file ends before its last line, or in it.
    #[error("the file ends after line {0}, without its last line `end`: it is cut off")]
    CutOff(u64),
    /// The last line counts other dead letters than the file has.
    #[error("the file has {found} dead letters, and its last line counts {expected}")]
    Count {
        /// The number in the last line.
        expected: u64,
        /// The number of dead letters before it.
        found: u64,
    },
    /// Something follows the last line.
    #[error("line {0} is after the last line of the export")]
    AfterEnd(u64),
}

/// Reads a file one dead letter at a time. The iterator ends after the last line was checked, or after the first error.
#[derive(Debug)]
pub struct ExportReader<R> {
    from: R,
    line: u64,
    filter: String,
    found: u64,
    end: Option<bool>,
    is_over: bool,
}

impl<R: BufRead> ExportReader<R> {
    /// Reads the first line.
    ///
    /// # Errors
    /// If it is not that of an export in a version that this program knows.
    pub fn new(from: R) -> Result<Self, ExportError> {
        let mut reader = Self {
            from,
            line: 0,
            filter: String::new(),
            found: 0,
            end: None,
            is_over: false,
        };
        let line = reader.read(MAX_OTHER_LINE as u64);
        let line = line.map_err(|error| match error {
            ExportError::TooLong(_) | ExportError::CutOff(_) => ExportError::NoExport,
            error => error,
        })?;
        let version = line.as_deref().and_then(FirstLine::version_of);
        match (line, version) {
            (Some(line), Some(VERSION)) => {
                let first: FirstLine<'_> =
                    serde_json::from_slice(&line).map_err(|_| ExportError::NoExport)?;
                reader.filter = first.filter.into_owned();
                Ok(reader)
            }
            (_, Some(version)) => Err(ExportError::Version(version)),
            (_, None) => Err(ExportError::NoExport),
        }
    }

    /// The filter of the export. Empty: all dead letters.
    #[must_use]
    pub fn filter_text(&self) -> &str {
        &self.filter
    }

    /// Whether the file has all dead letters that matched when it was written; `None` before the end of the file was read.
    #[must_use]
    pub fn is_complete(&self) -> Option<bool> {
        self.end
    }

    /// The next line without its line break; `None` at the end of the file.
    fn read(&mut self, limit: u64) -> Result<Option<Vec<u8>>, ExportError> {
        let mut line = Vec::new();
        let read = (&mut self.from).take(limit + 1).read_until(b'\n', &mut line);
        let number = self.line + 1;
        read.map_err(|source| ExportError::Io { line: number, source })?;
        if line.is_empty() {
            return Ok(None);
        }
        if line.pop() != Some(b'\n') {
            return Err(if line.len() as u64 >= limit {
                ExportError::TooLong(number)
            } else {
                ExportError::CutOff(self.line)
            });
        }
        self.line = number;
        Ok(Some(line))
    }

    fn read_letter(&mut self) -> Result<Option<ExportedDeadLetter>, ExportError> {
        let line = self.read(MAX_LINE)?.ok_or(ExportError::CutOff(self.line))?;
        if let Some(end) = Some(&line).filter(|line| line.len() <= MAX_OTHER_LINE)
            && let Ok(EndLine { end }) = serde_json::from_slice(end)
        {
            if end.dead_letters != self.found {
                return Err(ExportError::Count {
                    expected: end.dead_letters,
                    found: self.found,
                });
            }
            if self.read(MAX_OTHER_LINE as u64)?.is_some() {
                return Err(ExportError::AfterEnd(self.line));
            }
            self.end = Some(end.complete);
            return Ok(None);
        }
        let letter = LetterLine::read(&line).map_err(|problem| ExportError::Invalid {
            line: self.line,
            problem,
        })?;
        self.found += 1;
        Ok(Some(letter))
    }
}

impl<R: BufRead> Iterator for ExportReader<R> {
    type Item = Result<ExportedDeadLetter, ExportError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let letter = self.read_letter().transpose();
        self.is_over = !matches!(letter, Some(Ok(_)));
        letter
    }
}
