//! Hashes of the parts of a record that must not change.

use std::hash::{DefaultHasher, Hasher as _};

use redeliver_core::Record;
use redeliver_core::headers::{self, REDRIVE_COUNT, TRACEPARENT, TRACESTATE};

const REDRIVE_ID: &str = "redrive-id";

/// Hashes of a record. They are only compared within one process, so the fixed keys of [`DefaultHasher`] suffice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    /// The hash of the value.
    pub(crate) value: u64,
    /// The hash of the key and the user headers in order.
    pub(crate) rest: u64,
}

impl Content {
    pub(crate) fn of(record: &Record) -> Self {
        let mut value = DefaultHasher::new();
        write(&mut value, record.value.as_deref());
        let mut rest = DefaultHasher::new();
        write(&mut rest, record.key.as_deref());
        for (name, value) in record.headers.iter().filter(|(name, _)| is_user_header(name)) {
            write(&mut rest, Some(name.as_bytes()));
            write(&mut rest, value);
        }
        Self {
            value: value.finish(),
            rest: rest.finish(),
        }
    }
}

/// The number of the life to which a record belongs: 0 before the first redrive. A header that is not a number is a
/// user header, which all copies contain.
pub(crate) fn life(record: &Record) -> u32 {
    let text = record
        .headers
        .last(REDRIVE_COUNT)
        .and_then(|value| std::str::from_utf8(value).ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Each hop may change the trace context and the reserved headers. A redrive adds headers of its own.
fn is_user_header(name: &str) -> bool {
    !headers::is_reserved(name) && ![TRACEPARENT, TRACESTATE, REDRIVE_ID, REDRIVE_COUNT].contains(&name)
}

/// Includes the length, so that moving a byte from one field to the next changes the hash. Null differs from empty.
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
