//! Jobs, independent of the format of their requests and of where they are stored.

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
pub use redeliver_core::job::{InvalidJobId, JobId, JobState, Priority};
use redeliver_core::{Headers, Timestamp};

/// The kind of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A job of an application. Its record has headers that describe the job.
    App,
    /// A failed record of a pipeline that waits longer than the longest tier. It is dispatched unchanged.
    LongWait,
    /// Not a job, but a recurring schedule that is due when its next occurrence is. The value of its payload is its state record.
    Schedule,
}

/// The newest format of job records that this version supports, and the format that it writes.
pub const FORMAT: u32 = 0;

/// Identifies an idempotency key of an application: the first 16 bytes of SHA-256 over both.
pub type KeyHash = [u8; 16];
/// A hash of the content of a request: the first 16 bytes of SHA-256. Requests with equal hashes are duplicates.
pub type RequestHash = [u8; 16];

/// A job in its current state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The id.
    pub id: JobId,
    /// The application, or the pipeline of a long wait.
    pub app: Arc<str>,
    /// Whether it is a job of an application or a long wait.
    pub kind: Kind,
    /// The state.
    pub state: JobState,
    /// Which of several due jobs is dispatched first.
    pub priority: Priority,
    /// The due time; the job is never dispatched before it.
    pub due: Timestamp,
    /// When it was accepted, or the newest request that took its place. Its idempotency key is in use from then on.
    pub accepted: Timestamp,
    /// 1 for a new job; each rescheduling and each request that takes its place adds 1.
    pub revision: u32,
    /// The idempotency key of the request.
    pub idempotency_key: Option<Arc<str>>,
    /// The hash of the request's content.
    pub request_hash: RequestHash,
    /// The client's identifier of the request.
    pub request_id: Option<Arc<str>>,
    /// The topic to which it is dispatched. A long wait can end in another topic of its pipeline.
    pub topic: Arc<str>,
    /// The content of the dispatched record; empty once the job has ended.
    pub payload: Payload,
    /// When it was dispatched or cancelled, or expired.
    pub ended: Option<Timestamp>,
    /// The time after which it is not dispatched any more.
    pub expires: Option<Timestamp>,
    /// The id of the occurrence for which a schedule has created the job. The id of the schedule for [`Kind::Schedule`].
    pub occurrence: Option<Arc<str>>,
    /// When a long wait that an operator has released was made due. It is due since the release, which can be long before.
    pub released: Option<Timestamp>,
}

/// The jobs that are dispatched in the order of their due times: those of one application for one topic with one priority.
/// A burst in one flow does not delay another flow. The flow of a job never changes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Flow {
    /// The application, or the pipeline of long waits. Empty for schedules.
    pub app: Arc<str>,
    /// The topic of the jobs. Empty for long waits, which end in the current return topic of their pipeline, and for schedules.
    pub topic: Arc<str>,
    /// The priority.
    pub priority: Priority,
}

impl Flow {
    /// The flow of a job.
    #[must_use]
    pub fn of(job: &Job) -> Self {
        let topic = match job.kind {
            Kind::App => job.topic.clone(),
            Kind::LongWait => Arc::default(),
            Kind::Schedule => return Self::schedules().clone(),
        };
        Self {
            app: job.app.clone(),
            topic,
            priority: job.priority,
        }
    }

    /// The flow of all recurring schedules, which are not jobs. No application has an empty name.
    #[must_use]
    pub fn schedules() -> &'static Self {
        static SCHEDULES: LazyLock<Flow> = LazyLock::new(|| Flow {
            app: Arc::default(),
            topic: Arc::default(),
            priority: Priority::High,
        });
        &SCHEDULES
    }
}

/// The content of the record that is dispatched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Payload {
    /// The value.
    pub value: Option<Bytes>,
    /// The key.
    pub key: Option<Bytes>,
    /// The headers, including the trace context.
    pub headers: Headers,
}

impl Job {
    /// Since when the job could have been dispatched: from then on, it waits for a missing topic.
    #[must_use]
    pub fn ready_since(&self) -> Timestamp {
        self.released.map_or(self.due, |released| released.max(self.due))
    }

    /// The job after a newer one has taken its idempotency key. If the clock was set back since its request, its use of the key would outlast the
    /// newer one. A rebuilt index would give it the key again.
    #[must_use]
    pub fn with_key_taken(&self, now: Timestamp) -> Self {
        Self {
            accepted: self.accepted.min(now),
            ..self.clone()
        }
    }

    /// The job in a final state, without its payload.
    #[must_use]
    pub fn ended(&self, state: JobState, now: Timestamp) -> Self {
        Self {
            state,
            ended: Some(now),
            payload: Payload::default(),
            ..self.clone()
        }
    }

    /// The approximate size in memory, in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        let payload = &self.payload;
        300 + payload.value.as_ref().map_or(0, Bytes::len)
            + payload.key.as_ref().map_or(0, Bytes::len)
            + payload.headers.byte_len()
    }
}

#[cfg(test)]
impl Job {
    /// A job of the application `app` that waits since 1970 and was due at once.
    pub(crate) fn for_tests(offset: i64) -> Self {
        let start = Timestamp::from_millis(0);
        Self {
            id: JobId::new(start, 0, offset),
            app: "app".into(),
            kind: Kind::App,
            state: JobState::Scheduled,
            priority: Priority::Normal,
            due: start,
            accepted: start,
            revision: 1,
            idempotency_key: None,
            request_hash: [0; 16],
            request_id: None,
            topic: "jobs".into(),
            payload: Payload::default(),
            ended: None,
            expires: None,
            occurrence: None,
            released: None,
        }
    }
}
