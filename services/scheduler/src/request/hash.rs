//! What makes two requests the same, and where a key belongs.

use redeliver_core::Span;
use sha2::{Digest as _, Sha256};

use super::When;
use crate::job::{KeyHash, Kind, Payload, Priority, RequestHash};

/// Identifies an idempotency key of an application: SHA-256 over both, its first 16 bytes.
#[must_use]
pub fn key_hash(app: &str, key: &str) -> KeyHash {
    let mut hash = Parts::new("key");
    hash.part(app.as_bytes());
    hash.part(key.as_bytes());
    hash.first_half()
}

/// Everything that makes two requests the same: how they are written is no part of it, nor are the name and
/// the trace of the single request. A delay counts as such, because its end differs each time.
pub(super) struct Identity<'a> {
    pub(super) app: &'a str,
    pub(super) kind: Kind,
    pub(super) when: When,
    pub(super) priority: Priority,
    pub(super) payload: &'a Payload,
    pub(super) expire_after: Option<Span>,
}

impl Identity<'_> {
    pub(super) fn hash(&self) -> RequestHash {
        let mut hash = Parts::new(match self.kind {
            Kind::App => "job",
            Kind::LongWait => "long wait",
        });
        hash.part(self.app.as_bytes());
        match self.when {
            When::At(time) => {
                hash.part(b"at");
                hash.part(&time.as_millis().to_be_bytes());
            }
            When::After(delay) => {
                hash.part(b"after");
                hash.part(&delay.as_millis().to_be_bytes());
            }
        }
        hash.part(self.priority.as_str().as_bytes());
        let Payload { value, key, headers } = self.payload;
        hash.optional(value.as_deref());
        hash.optional(key.as_deref());
        hash.part(&headers.len().to_be_bytes());
        for (name, value) in headers.iter() {
            hash.part(name.as_bytes());
            hash.optional(value);
        }
        let expire_after = self.expire_after.map(|wait| wait.as_millis().to_be_bytes());
        hash.optional(expire_after.as_ref().map(<[u8; 8]>::as_slice));
        hash.first_half()
    }
}

/// SHA-256 over parts with their lengths, so that no two lists of parts are the same text.
struct Parts(Sha256);

impl Parts {
    fn new(purpose: &str) -> Self {
        let mut parts = Self(Sha256::new());
        parts.part(purpose.as_bytes());
        parts
    }

    fn part(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_be_bytes());
        self.0.update(bytes);
    }

    fn optional(&mut self, bytes: Option<&[u8]>) {
        match bytes {
            Some(bytes) => {
                self.0.update([1]);
                self.part(bytes);
            }
            None => self.0.update([0]),
        }
    }

    fn first_half(self) -> [u8; 16] {
        let whole: [u8; 32] = self.0.finalize().into();
        let mut half = [0; 16];
        half.copy_from_slice(&whole[..16]);
        half
    }
}
