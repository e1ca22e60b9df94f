//! What must not change on a record's way, as two numbers.

use std::hash::{DefaultHasher, Hasher as _};

use redeliver_core::Record;
use redeliver_core::headers::{self, TRACEPARENT, TRACESTATE};

/// Which redrive of the dead-letter inspector a record belongs to, counted from 1.
pub(crate) const REDRIVE_COUNT: &str = "redrive-count";
const REDRIVE_ID: &str = "redrive-id";

/// Hashes of what must not change. They are compared within one process and never stored, so the fixed keys
/// of the standard library's hasher will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    /// Of the value alone.
    pub(crate) value: u64,
    /// Of the key and the user's headers in their order.
    pub(crate) rest: u64,
}

impl Content {
    pub(crate) fn of(record: &Record) -> Self {
        let mut value = DefaultHasher::new();
        write(&mut value, record.value.as_deref());
        let mut rest = DefaultHasher::new();
        write(&mut rest, record.key.as_deref());
        for (name, value) in record.headers.iter().filter(|(name, _)| is_users(name)) {
            write(&mut rest, Some(name.as_bytes()));
            write(&mut rest, value);
        }
        Self {
            value: value.finish(),
            rest: rest.finish(),
        }
    }
}

/// Which life of its origin a record belongs to: 0 until it is redriven from the dead letters for the first
/// time. A header that is no number was written by the user and travels unchanged with all copies.
pub(crate) fn life(record: &Record) -> u32 {
    let text = record
        .headers
        .last(REDRIVE_COUNT)
        .and_then(|value| std::str::from_utf8(value).ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Trace context changes from hop to hop by its nature; ours and a redrive's are added on the way.
fn is_users(name: &str) -> bool {
    !headers::is_ours(name) && ![TRACEPARENT, TRACESTATE, REDRIVE_ID, REDRIVE_COUNT].contains(&name)
}

/// With its length, so that bytes cannot move between neighbours unnoticed; null differs from empty.
fn write(hasher: &mut DefaultHasher, bytes: Option<&[u8]>) {
    match bytes {
        None => hasher.write_u8(0),
        Some(bytes) => {
            hasher.write_u8(1);
            hasher.write_usize(bytes.len());
            hasher.write(bytes);
        }
    }
}
