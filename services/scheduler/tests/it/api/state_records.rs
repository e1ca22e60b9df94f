//! Records of the state topic that no scheduler has written.

use redeliver_core::{Headers, JobId, Output, Timestamp};
use redeliver_scheduler::codec;
use redeliver_scheduler::job::Job;

use super::server::Server;
use crate::env::waiting;

/// A job that waits, without a payload. It was accepted at the time of its id.
pub(super) fn waiting_job(server: &Server, id: JobId, app: &str, due: Timestamp) -> Job {
    Job {
        app: app.into(),
        due,
        accepted: id.requested_at(),
        ..waiting(id, &server.topic("sms"))
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
