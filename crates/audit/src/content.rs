//! Hashes of the parts of a record that must not change. [`redeliver_core::kept`] defines which ones those are.

use std::hash::{DefaultHasher, Hasher as _};

use redeliver_core::kept::{describes_value, is_kept};
use redeliver_core::redrive::REDRIVE_EDITED;
use redeliver_core::{Record, redrive};

/// Hashes of a record. They are only compared within one process, so the fixed keys of [`DefaultHasher`] suffice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    /// The hash of the value and of the header that describes it, with its place among the user headers: who may replace the one may
    /// replace the other.
    pub(crate) value: u64,
    /// The hash of the key and the other user headers in order.
    pub(crate) rest: u64,
}

/// Which parts of a record an edit may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edited {
    pub(crate) value: bool,
    pub(crate) rest: bool,
}

impl Content {
    pub(crate) fn of(record: &Record) -> Self {
        let mut value = DefaultHasher::new();
        write(&mut value, record.value.as_deref());
        let mut rest = DefaultHasher::new();
        write(&mut rest, record.key.as_deref());
        let kept = record.headers.iter().filter(|(name, _)| is_kept(name));
        for (place, (name, content)) in kept.enumerate() {
            let part = if describes_value(name) {
                value.write_usize(place);
                &mut value
            } else {
                &mut rest
            };
            write(part, Some(name.as_bytes()));
            write(part, content);
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
    redrive::count(&record.headers)
}

/// What the redrive with which this life began has edited.
pub(crate) fn edited(record: &Record) -> Edited {
    let parts = record.headers.last(REDRIVE_EDITED);
    let parts = parts
        .and_then(|parts| std::str::from_utf8(parts).ok())
        .unwrap_or("");
    let has = |part| parts.split(", ").any(|edited| edited == part);
    Edited {
        value: has("value") || has("headers"),
        rest: has("key") || has("headers"),
    }
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
