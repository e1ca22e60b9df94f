//! Hashes of requests and of idempotency keys.

use redeliver_core::HumanDuration;
use sha2::{Digest as _, Sha256};

use super::when::When;
use crate::job::{KeyHash, Kind, Payload, Priority, RequestHash};

/// Hashes an application and an idempotency key: the first 16 bytes of SHA-256.
#[must_use]
pub fn key_hash(app: &str, key: &str) -> KeyHash {
    let mut hash = Parts::new("key");
    hash.part(app.as_bytes());
    hash.part(key.as_bytes());
    hash.first_half()
}

/// Hashes a request id: the first 8 bytes of SHA-256; zeros without one.
#[must_use]
pub fn request_id_hash(request_id: Option<&str>) -> [u8; 8] {
    let Some(request_id) = request_id else {
        return [0; 8];
    };
    let mut hash = Parts::new("request id");
    hash.part(request_id.as_bytes());
    let half = hash.first_half();
    let mut first = [0; 8];
    first.copy_from_slice(&half[..8]);
    first
}

/// The content that two requests must share to be duplicates. It excludes the format, the request id and the trace context.
/// A delay is compared as a delay, because the due time of a repeated request differs.
pub(super) struct Identity<'a> {
    pub(super) app: &'a str,
    pub(super) kind: Kind,
    pub(super) when: When,
    pub(super) priority: Priority,
    pub(super) payload: &'a Payload,
    pub(super) expire_after: Option<HumanDuration>,
}

impl Identity<'_> {
    pub(super) fn hash(&self) -> RequestHash {
        let mut hash = Parts::new(if self.kind == Kind::LongWait {
            "long wait"
        } else {
            "job"
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

/// SHA-256 over parts, each with its length, so that different lists of parts have different input.
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
