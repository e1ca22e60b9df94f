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
    add(&mut hash, key);
    add(&mut hash, value);
    for (name, value) in headers.iter() {
        add(&mut hash, Some(name.as_bytes()));
        add(&mut hash, value);
    }
    first_bytes(hash)
}

/// The hash of a key and a value, as 32 hexadecimal digits. The header `payload-omitted-hash` contains it, see `docs/protocol.md`.
#[must_use]
pub fn payload_hash(key: Option<&[u8]>, value: Option<&[u8]>) -> String {
    let mut hash = Sha256::new();
    add(&mut hash, key);
    add(&mut hash, value);
    let hash = first_bytes(hash);
    format!("{:032x}", u128::from_be_bytes(hash))
}

/// Adds a part. The length before each part ensures that different records are hashed as different bytes.
fn add(hash: &mut Sha256, bytes: Option<&[u8]>) {
    hash.update(bytes.map_or(u64::MAX, |bytes| bytes.len() as u64).to_be_bytes());
    hash.update(bytes.unwrap_or_default());
}

fn first_bytes(hash: Sha256) -> ContentHash {
    let mut content = ContentHash::default();
    content.copy_from_slice(&hash.finalize()[..HASH_BYTES]);
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_contents_have_different_hashes() {
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
