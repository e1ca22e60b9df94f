//! Requests as they are parsed, independent of their format.

use std::sync::Arc;

use redeliver_core::{HumanDuration, Timestamp};

use super::schedule::ParsedChange;
use crate::job::{JobId, Payload, Priority};

/// A parsed request, before it is checked against the rules.
#[derive(Clone, Debug, PartialEq)]
pub enum ParsedRequest {
    /// A job of an application.
    Schedule(Box<Draft>),
    /// A cancellation.
    Cancel(JobRef),
    /// A new due time.
    Reschedule {
        /// The job.
        job: JobRef,
        /// The new due time.
        when: When,
    },
    /// A record of a pipeline that waits longer than its longest tier.
    LongWait(Box<LongWait>),
    /// A change of a recurring schedule.
    ChangeSchedule(Box<ParsedChange>),
}

/// The description of a new job of an application.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draft {
    /// The application.
    pub app: String,
    /// When it is due.
    pub when: When,
    /// Which of several due jobs is dispatched first.
    pub priority: Priority,
    /// The idempotency key.
    pub idempotency_key: Option<String>,
    /// The client's identifier of the request.
    pub request_id: Option<String>,
    /// The content of the dispatched record. Without a key, it gets the key of the ingest record.
    pub payload: Payload,
    /// How long after its due time the job may still be dispatched.
    pub expire_after: Option<HumanDuration>,
    /// What happens if the idempotency key is in use.
    pub on_conflict: ConflictPolicy,
}

/// What happens to a request whose idempotency key is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConflictPolicy {
    /// The first request counts: the same request is a duplicate, and another one a conflict.
    #[default]
    Reject,
    /// The newest request counts: it takes the place of a job that waits.
    Replace,
}

/// How a command names its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobRef {
    /// By its id.
    Id(JobId),
    /// By its application and idempotency key: the newest job with this key, as long as the key is in use.
    Key {
        /// The application.
        app: Arc<str>,
        /// The idempotency key.
        key: Arc<str>,
    },
}

/// The request for a long wait: a failed record of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LongWait {
    /// The pipeline.
    pub pipeline: String,
    /// When it is due.
    pub due: Timestamp,
    /// The record, with all of its headers.
    pub payload: Payload,
}

/// A due time: an instant, or a delay from the request on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// An instant.
    At(Timestamp),
    /// A delay from the request on.
    After(HumanDuration),
}
