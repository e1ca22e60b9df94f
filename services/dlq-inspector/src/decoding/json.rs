//! A JSON text of a limited size.

use std::io;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

use super::{DecodeError, MAX_JSON};

/// A text that does not grow beyond [`MAX_JSON`].
#[derive(Debug, Default)]
pub(super) struct JsonText {
    bytes: Vec<u8>,
    is_full: bool,
}

impl JsonText {
    /// Adds a part of the syntax, or a number.
    pub(super) fn push(&mut self, text: &str) -> Result<(), DecodeError> {
        self.is_full |= self.bytes.len() + text.len() > MAX_JSON;
        if self.is_full {
            return Err(DecodeError::LargeResult);
        }
        self.bytes.extend_from_slice(text.as_bytes());
        Ok(())
    }

    pub(super) fn push_string(&mut self, text: &str) -> Result<(), DecodeError> {
        self.push_serialized(text)
    }

    /// Adds bytes as Base64, as in the JSON mapping of Protobuf.
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) -> Result<(), DecodeError> {
        self.push_string(&STANDARD.encode(bytes))
    }

    pub(super) fn push_serialized(&mut self, value: impl Serialize) -> Result<(), DecodeError> {
        let written = serde_json::to_writer(&mut *self, &value);
        written.map_err(|_| self.error())
    }

    /// Why a write has failed.
    pub(super) fn error(&self) -> DecodeError {
        if self.is_full {
            DecodeError::LargeResult
        } else {
            DecodeError::Mismatch
        }
    }

    pub(super) fn into_text(self) -> Result<String, DecodeError> {
        String::from_utf8(self.bytes).map_err(|_| DecodeError::Mismatch)
    }
}

impl io::Write for JsonText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.is_full |= self.bytes.len() + bytes.len() > MAX_JSON;
        if self.is_full {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
