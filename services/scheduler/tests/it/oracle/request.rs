//! What a test requests, and what it means.

use super::*;

/// A request that a test wrote to the ingest topic.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) position: Position,
    pub(crate) at: Timestamp,
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) intent: Intent,
    pub(crate) answer_to: Option<String>,
}

/// What a request means.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Intent {
    Job(Box<JobSpec>),
    /// The scheduler must reject it with this code and a message that contains `says`.
    Refused {
        code: String,
        says: String,
    },
    Cancel(JobId),
    Reschedule(JobId, When),
}

/// A requested job. Two with the same idempotency key that differ only in `request_id` are one job, unless the second one `replaces` the
/// first.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JobSpec {
    pub(crate) app: String,
    pub(crate) when: When,
    pub(crate) priority: Priority,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) request_id: Option<String>,
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Bytes,
    /// Without the trace headers of the ingest record.
    pub(crate) headers: Headers,
    pub(crate) expire_after: Option<Duration>,
    /// `onConflict` is `replace`.
    pub(crate) replaces: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum When {
    At(Timestamp),
    After(Duration),
}

impl When {
    pub(super) fn due(self, requested: Timestamp) -> Timestamp {
        match self {
            Self::At(time) => time,
            Self::After(delay) => requested.after(delay),
        }
    }
}

impl JobSpec {
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let named = |spec: &Self| Self {
            request_id: None,
            replaces: false,
            ..spec.clone()
        };
        named(self) == named(other)
    }

    /// Whether a request that replaces others is the newest one with its key, sent again.
    pub(super) fn is_repetition_of(&self, newest: &Self) -> bool {
        let is_certain = self.request_id.is_some() || matches!(self.when, When::At(_));
        is_certain && self.request_id == newest.request_id && self.is_same(newest)
    }
}
