//! Records of the state topic that no scheduler has written.

use redeliver_core::{Headers, JobId, Output, Timestamp};
use redeliver_scheduler::codec;
use redeliver_scheduler::job::{Job, JobState, Kind, Payload, Priority};

use super::server::Server;

/// A job that waits, without a payload. It was accepted at the time of its id.
pub(super) fn waiting_job(server: &Server, id: JobId, app: &str, due: Timestamp) -> Job {
    Job {
        id,
        app: app.into(),
        kind: Kind::App,
        state: JobState::Scheduled,
        priority: Priority::Normal,
        due,
        accepted: id.requested_at(),
        revision: 1,
        idempotency_key: None,
        request_hash: [0; 16],
        request_id: None,
        topic: server.topic("sms").into(),
        payload: Payload::default(),
        ended: None,
        expires: None,
        occurrence: None,
        released: None,
    }
}

/// The record of a job, in the partition of its shard.
pub(super) fn state_record(server: &Server, job: &Job) -> Output {
    Output {
        topic: server.topic("jobs-state").into(),
        partition: Some(job.id.shard()),
        key: Some(job.id.to_string().into()),
        value: Some(codec::encode(job)),
        headers: Headers::new(),
    }
}
