//! Jobs: what they are, whatever way they came and wherever they are kept.

use std::sync::Arc;

use bytes::Bytes;
pub use redeliver_core::job::{JobId, NotAnId, Priority, State};
use redeliver_core::{Headers, Timestamp};

/// Whose job it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An application's: it leaves with headers that say which job it was.
    App,
    /// A failed record of a pipeline that waits longer than its longest tier: it leaves as it came.
    LongWait,
}

/// Identifies an idempotency key of an application: the first 16 bytes of SHA-256 over both.
pub type KeyHash = [u8; 16];
/// Over everything that makes two requests the same: the first 16 bytes of SHA-256.
pub type RequestHash = [u8; 16];

/// A job as it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name.
    pub id: JobId,
    /// The application, or the pipeline of a long wait.
    pub app: Arc<str>,
    /// Whose it is.
    pub kind: Kind,
    /// Where it stands.
    pub state: State,
    /// Which goes first.
    pub priority: Priority,
    /// Not before.
    pub due: Timestamp,
    /// When it was accepted.
    pub accepted: Timestamp,
    /// Counts reschedulings, from 1.
    pub revision: u32,
    /// What its application calls the request.
    pub idempotency_key: Option<Arc<str>>,
    /// Over everything that makes two requests the same.
    pub request_hash: RequestHash,
    /// A name that the caller gave the request.
    pub request_id: Option<Arc<str>>,
    /// Where it goes, or went.
    pub topic: Arc<str>,
    /// What goes there; nothing is kept of it once the job has ended.
    pub payload: Payload,
    /// When it was dispatched, cancelled or expired.
    pub ended: Option<Timestamp>,
    /// After this it is not dispatched any more.
    pub expires: Option<Timestamp>,
}

/// What a job's topic receives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// The record's value.
    pub value: Option<Bytes>,
    /// The record's key.
    pub key: Option<Bytes>,
    /// The record's headers, a trace context among them.
    pub headers: Headers,
}

impl Job {
    /// The job, ended.
    #[must_use]
    pub fn ended(&self, state: State, now: Timestamp) -> Self {
        Self {
            state,
            ended: Some(now),
            payload: Payload::default(),
            ..self.clone()
        }
    }

    /// About how many bytes it takes in memory.
    #[must_use]
    pub fn size(&self) -> usize {
        let payload = &self.payload;
        300 + payload.value.as_ref().map_or(0, Bytes::len)
            + payload.key.as_ref().map_or(0, Bytes::len)
            + payload.headers.byte_len()
    }
}
