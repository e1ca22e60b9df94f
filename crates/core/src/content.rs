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

/// The hash of a key and a value, as 32 hexadecimal digits.
#[must_use]
pub fn payload_hash(key: Option<&[u8]>, value: Option<&[u8]>) -> String {
    let hash = content_hash(None, key, value, &Headers::new());
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_null_an_empty_and_a_moved_part_have_different_hashes() {
        let hashes = [
            payload_hash(None, None),
            payload_hash(Some(b""), None),
            payload_hash(None, Some(b"")),
            payload_hash(Some(b"ab"), Some(b"c")),
            payload_hash(Some(b"a"), Some(b"bc")),
        ];
        let different: std::collections::BTreeSet<&String> = hashes.iter().collect();
        assert_eq!(different.len(), hashes.len());
        assert!(hashes.iter().all(|hash| hash.len() == 2 * HASH_BYTES));
    }
}
