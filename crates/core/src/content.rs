//! A hash of what a record contains. It distinguishes a record from another one at the same offset, after the topic was deleted and created again.

use sha2::{Digest as _, Sha256};

use crate::record::Headers;
use crate::time::Timestamp;

/// The length of a [`ContentHash`] in bytes.
pub const HASH_BYTES: usize = 16;

/// The first bytes of the SHA-256 of a record's timestamp, key, value and headers.
pub type ContentHash = [u8; HASH_BYTES];

/// The hash of a record with this timestamp, key, value and headers.
#[must_use]
pub fn content_hash(
    timestamp: Option<Timestamp>,
    key: Option<&[u8]>,
    value: Option<&[u8]>,
    headers: &Headers,
) -> ContentHash {
    let mut hash = Sha256::new();
    hash.update(timestamp.map_or(i64::MIN, Timestamp::as_millis).to_be_bytes());
    let mut add = |bytes: Option<&[u8]>| {
        // The length before each part ensures that different records are hashed as different bytes.
        hash.update(bytes.map_or(u64::MAX, |bytes| bytes.len() as u64).to_be_bytes());
        hash.update(bytes.unwrap_or_default());
    };
    add(key);
    add(value);
    for (name, value) in headers.iter() {
        add(Some(name.as_bytes()));
        add(value);
    }
    let mut content = ContentHash::default();
    content.copy_from_slice(&hash.finalize()[..HASH_BYTES]);
    content
}
