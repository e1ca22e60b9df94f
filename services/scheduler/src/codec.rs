//! The format of jobs in the state topic and the index, and in answers and the API.

pub(crate) mod error;

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::Timestamp;
use redeliver_proto::convert::{
    from_headers, from_priority, from_state, to_headers, to_priority, to_state, to_timestamp,
};
use redeliver_proto::{Message as _, v1};

use crate::index::{Change, Effect, KeyEntry};
use crate::job::{FORMAT, Flow, Job, JobId, JobState, Kind, Payload, RequestHash};
use crate::request::{key_hash, request_id_hash};
use crate::{schedule_key, schedules};
pub use error::CodecError;

/// The key of the state record of a job or a schedule.
#[must_use]
pub fn state_key(job: &Job) -> String {
    match (job.kind, &job.occurrence) {
        (Kind::Schedule, Some(id)) => schedule_key::state_key(id),
        _ => job.id.to_string(),
    }
}

/// Encodes a job or a schedule as the value of a state record.
#[must_use]
pub fn encode(job: &Job) -> Bytes {
    if job.kind == Kind::Schedule {
        return job.payload.value.clone().unwrap_or_default();
    }
    let waits = job.state == JobState::Scheduled;
    let record = v1::JobRecord {
        app: job.app.to_string(),
        state: to_state(job.state).into(),
        priority: to_priority(job.priority).into(),
        due_ms: job.due.as_millis(),
        accepted_ms: job.accepted.as_millis(),
        revision: job.revision,
        idempotency_key: job.idempotency_key.as_deref().unwrap_or_default().to_owned(),
        request_hash: Bytes::copy_from_slice(&job.request_hash),
        request_id: job.request_id.as_deref().unwrap_or_default().to_owned(),
        data: job.payload.value.clone().filter(|_| waits),
        key: job.payload.key.clone().filter(|_| waits),
        headers: if waits {
            to_headers(&job.payload.headers)
        } else {
            Vec::new()
        },
        topic: job.topic.to_string(),
        ended_ms: job.ended.map(Timestamp::as_millis),
        expires_ms: job.expires.map(Timestamp::as_millis),
        long_wait: job.kind == Kind::LongWait,
        occurrence: job.occurrence.as_deref().unwrap_or_default().to_owned(),
        released_ms: job.released.map(Timestamp::as_millis),
        format: FORMAT,
    };
    record.encode_to_vec().into()
}

/// Decodes the value of a state record. The payload's key and value are slices of `bytes`.
///
/// # Errors
/// When the bytes are not a job, or a newer scheduler wrote them.
pub fn decode(id: JobId, bytes: &Bytes) -> Result<Job, CodecError> {
    if id.is_schedule() {
        return schedules::entry(id, bytes);
    }
    let record = v1::JobRecord::decode(bytes.clone())
        .map_err(|error| CodecError::Malformed(format!("not a job record: {error}")))?;
    if record.format > FORMAT {
        let found = format!(
            "its format is {}, but this version supports only formats up to {FORMAT}",
            record.format
        );
        return Err(CodecError::Newer(found));
    }
    let newer = |field, value| CodecError::Newer(format!("its {field} is {value}"));
    let state = v1::JobState::try_from(record.state).map_err(|_| newer("state", record.state))?;
    let state = from_state(state).ok_or(CodecError::Field("state"))?;
    let priority = v1::Priority::try_from(record.priority).map_err(|_| newer("priority", record.priority))?;
    let priority = from_priority(priority);
    let request_hash: RequestHash = record
        .request_hash
        .as_ref()
        .try_into()
        .map_err(|_| CodecError::Field("request_hash"))?;
    Ok(Job {
        id,
        app: record.app.into(),
        kind: if record.long_wait {
            Kind::LongWait
        } else {
            Kind::App
        },
        state,
        priority,
        due: Timestamp::from_millis(record.due_ms),
        accepted: Timestamp::from_millis(record.accepted_ms),
        revision: record.revision,
        idempotency_key: text(record.idempotency_key),
        request_hash,
        request_id: text(record.request_id),
        topic: record.topic.into(),
        payload: Payload {
            value: record.data,
            key: record.key,
            headers: from_headers(&record.headers),
        },
        ended: record.ended_ms.map(Timestamp::from_millis),
        expires: record.expires_ms.map(Timestamp::from_millis),
        occurrence: text(record.occurrence),
        released: record.released_ms.map(Timestamp::from_millis),
    })
}

fn text(text: String) -> Option<Arc<str>> {
    (!text.is_empty()).then(|| text.into())
}

/// How long idempotency keys and ended jobs are kept.
#[derive(Clone, Copy, Debug)]
pub struct RetentionPolicy {
    /// How long an idempotency key is in use, from the acceptance of the newest request with it.
    pub keys: std::time::Duration,
    /// How long an ended job is kept.
    pub ended: std::time::Duration,
}

impl RetentionPolicy {
    /// When a job that ended at `ended` is forgotten. A job is kept at least as long as its idempotency key, because a rebuilt
    /// index reads the key from the job's record.
    #[must_use]
    pub fn forget(self, job: &Job, ended: Timestamp) -> Timestamp {
        let known = ended.after(self.ended);
        match &job.idempotency_key {
            Some(_) => known.max(job.accepted.after(self.keys)),
            None => known,
        }
    }
}

/// The change of the index for a job's state.
#[must_use]
pub fn change(job: &Job, record: Bytes, retention: RetentionPolicy) -> Change {
    let key = job.idempotency_key.as_deref().map(|key| KeyEntry {
        hash: key_hash(&job.app, key),
        value: KeyValue::of(job).encode(),
        expires: job.accepted.after(retention.keys),
    });
    let effect = match job.ended {
        Some(ended) => Effect::Ended {
            flow: Flow::of(job),
            ended,
            forget: retention.forget(job, ended),
            record,
            key,
        },
        None => Effect::Waits {
            flow: Flow::of(job),
            due: job.due,
            record,
            key,
        },
    };
    Change {
        id: job.id,
        schedule: job.occurrence.clone().filter(|_| job.kind == Kind::Schedule),
        effect,
    }
}

/// The value of an idempotency key in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValue {
    /// The job that uses the key.
    pub id: JobId,
    /// The hash of the job's request.
    pub request_hash: RequestHash,
    /// When the job was accepted.
    pub accepted: Timestamp,
    /// The hash of the request's id, see [`request_id_hash`].
    pub request_id: [u8; 8],
}

impl KeyValue {
    /// The value for the idempotency key of a job.
    #[must_use]
    pub fn of(job: &Job) -> Self {
        Self {
            id: job.id,
            request_hash: job.request_hash,
            accepted: job.accepted,
            request_id: request_id_hash(job.request_id.as_deref()),
        }
    }

    /// Encodes the value in 48 bytes.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut bytes = Vec::with_capacity(48);
        bytes.extend_from_slice(&self.id.to_bytes());
        bytes.extend_from_slice(&self.request_hash);
        bytes.extend_from_slice(&self.accepted.as_millis().to_be_bytes());
        bytes.extend_from_slice(&self.request_id);
        bytes.into()
    }

    /// Decodes 48 bytes.
    ///
    /// # Errors
    /// When it is another number of bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        let decoded = || {
            let (id, rest) = bytes.split_first_chunk::<16>()?;
            let (hash, rest) = rest.split_first_chunk::<16>()?;
            let (millis, rest) = rest.split_first_chunk::<8>()?;
            Some(Self {
                id: JobId::from_bytes(*id),
                request_hash: *hash,
                accepted: Timestamp::from_millis(i64::from_be_bytes(*millis)),
                request_id: rest.try_into().ok()?,
            })
        };
        decoded().ok_or_else(|| {
            CodecError::Malformed(format!("the value of a key has {} bytes, not 48", bytes.len()))
        })
    }
}

/// A job in the format of answers and the API. A job whose client gave no request id has the job's id instead: it is unique, and
/// the same whenever the request is read again.
#[must_use]
pub fn to_proto(job: &Job, with_payload: bool) -> v1::Job {
    let payload = Some(&job.payload).filter(|_| with_payload);
    v1::Job {
        id: job.id.to_string(),
        app: job.app.to_string(),
        state: to_state(job.state).into(),
        priority: to_priority(job.priority).into(),
        scheduled_time: Some(to_timestamp(job.due)),
        accepted_at: Some(to_timestamp(job.accepted)),
        revision: job.revision,
        idempotency_key: job.idempotency_key.as_deref().unwrap_or_default().to_owned(),
        request_id: job
            .request_id
            .as_deref()
            .map_or_else(|| job.id.to_string(), ToOwned::to_owned),
        data: payload
            .and_then(|payload| payload.value.clone())
            .unwrap_or_default(),
        key: payload.and_then(|payload| payload.key.clone()),
        headers: payload.map_or_else(Vec::new, |payload| to_headers(&payload.headers)),
        topic: job.topic.to_string(),
        ended_at: job.ended.map(to_timestamp),
        expires_at: job.expires.map(to_timestamp),
        occurrence: job.occurrence.as_deref().unwrap_or_default().to_owned(),
        long_wait: job.kind == Kind::LongWait,
    }
}

/// The outcome of a command.
pub(crate) fn outcome(outcome: v1::Outcome, job: Option<&Job>, reason: String) -> v1::CommandOutcome {
    v1::CommandOutcome {
        outcome: outcome.into(),
        job: job.map(|job| to_proto(job, false)),
        reason,
        ..v1::CommandOutcome::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::job::Priority;

    fn job() -> Job {
        Job {
            id: JobId::new(Timestamp::from_millis(1_763_722_800_123), 3, 4),
            app: "sms".into(),
            kind: Kind::App,
            state: JobState::Scheduled,
            priority: Priority::Low,
            due: Timestamp::from_millis(1_763_722_900_123),
            accepted: Timestamp::from_millis(1_763_722_800_124),
            revision: 2,
            idempotency_key: Some("sms-1".into()),
            request_hash: [7; 16],
            request_id: None,
            topic: "sms-jobs".into(),
            payload: Payload {
                value: Some(Bytes::from_static(b"\xff\x00")),
                key: Some(Bytes::new()),
                headers: [("a", None), ("a", Some(&b""[..]))].into_iter().collect(),
            },
            ended: None,
            expires: Some(Timestamp::from_millis(1_763_722_999_000)),
            occurrence: Some("nightly@2026-11-24T02:30:00.000Z".into()),
            released: Some(Timestamp::from_millis(1_763_722_900_200)),
        }
    }

    #[test]
    fn a_job_survives_encoding() {
        let job = job();
        assert_eq!(decode(job.id, &encode(&job)), Ok(job.clone()));
        let null = Job {
            payload: Payload::default(),
            idempotency_key: None,
            ..job.clone()
        };
        assert_eq!(decode(null.id, &encode(&null)), Ok(null));
        let ended = job.ended(JobState::Dispatched, Timestamp::from_millis(1_763_722_900_200));
        assert_eq!(decode(ended.id, &encode(&ended)), Ok(ended));
    }

    #[test]
    fn request_id_defaults_to_job_id() {
        let mut job = job();
        assert_eq!(to_proto(&job, false).request_id, job.id.to_string());
        job.request_id = Some("r-1".into());
        assert_eq!(to_proto(&job, false).request_id, "r-1");
    }

    #[test]
    fn ended_job_outlives_its_key() {
        let hour = std::time::Duration::from_secs(3600);
        let retention = RetentionPolicy {
            keys: 24 * hour,
            ended: hour,
        };
        let job = job();
        let soon = job.accepted.after(hour);
        assert_eq!(retention.forget(&job, soon), job.accepted.after(24 * hour));
        let late = job.accepted.after(48 * hour);
        assert_eq!(retention.forget(&job, late), late.after(hour));
    }

    #[test]
    fn a_key_survives_encoding() {
        let value = KeyValue::of(&job());
        let bytes = value.encode();
        assert_eq!(KeyValue::decode(&bytes), Ok(value));
        let longer = [&bytes[..], &[0]].concat();
        for other in [&bytes[1..], &longer, &[]] {
            assert!(matches!(KeyValue::decode(other), Err(CodecError::Malformed(_))));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(job().id, &bytes.into());
        }
    }
}
