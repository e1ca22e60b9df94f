//! Idempotency keys that are in use: which job uses a key, and what happens to another request with the key.

use std::sync::Arc;

use redeliver_core::{Record, Timestamp, mutant};
use redeliver_proto::v1;

use super::{Shard, Writes};
use crate::codec::{self, KeyValue};
use crate::index_messages::Found;
use crate::job::{Flow, Job, JobState, KeyHash};
use crate::request::{ConflictPolicy, JobRef, Request, key_hash, request_id_hash};
use crate::spans;

/// What happens to a request whose idempotency key is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Resolution {
    /// Nothing: it repeats the request of the job.
    Duplicate,
    /// It is rejected.
    Conflict,
    /// The waiting job gets its content and keeps its id.
    Replace(Arc<Job>),
    /// The waiting job is cancelled, and the request gets a new job.
    Supersede(Arc<Job>),
    /// The job has ended, and the request gets a new one.
    Schedule,
}

/// The job that a command names.
pub(super) enum NamedJob {
    /// Its newest state.
    Known(Arc<Job>),
    /// The key is in use, and the index does not contain the job any more. So it has ended: the index contains each job that waits. Of it,
    /// only the id and the application are known.
    Ended(Box<v1::Job>),
    /// There is none, or it has ended, and the index does not contain it any more.
    Unknown,
}

/// Decides about a request. `existing` is the use of its key, and `job` the job that uses it; `None` if the index does not contain it
/// any more, so it has ended.
pub(super) fn resolve(request: &Request, existing: &KeyValue, job: Option<&Arc<Job>>) -> Resolution {
    let is_same = existing.request_hash == request.request_hash;
    match (request.on_conflict, job) {
        (ConflictPolicy::Reject, _) if is_same => Resolution::Duplicate,
        (ConflictPolicy::Reject, _) => Resolution::Conflict,
        (ConflictPolicy::Replace, _) if is_same && is_repetition(request, existing) => Resolution::Duplicate,
        (ConflictPolicy::Replace, Some(job)) if job.state == JobState::Scheduled => {
            // The flow of a job never changes.
            let flow = Flow {
                app: request.app.clone(),
                topic: request.topic.clone(),
                priority: request.priority,
            };
            if Flow::of(job) == flow {
                Resolution::Replace(job.clone())
            } else {
                Resolution::Supersede(job.clone())
            }
        }
        (ConflictPolicy::Replace, _) => Resolution::Schedule,
    }
}

/// Whether a request with the content of the newest request with its key is that request, sent again. An event that occurs again causes the same
/// content, too. Of two delays without request ids, nothing tells whether they are one request or two.
fn is_repetition(request: &Request, existing: &KeyValue) -> bool {
    request_id_hash(request.request_id.as_deref()) == existing.request_id
        && (request.request_id.is_some() || !request.is_delayed)
        && !mutant!("shard-takes-repetitions-for-events")
}

impl Shard {
    /// The use of an idempotency key, if it is in use.
    pub(super) fn key_in_use(&self, hash: &KeyHash, found: &Found, now: Timestamp) -> Option<KeyValue> {
        let used = self.overlay.key(hash).or(found.key)?;
        (used.accepted.after(self.settings.retention.keys) > now).then_some(used)
    }

    /// The job that uses an idempotency key.
    pub(super) fn job_of_key(&self, key: &KeyValue, found: &Found) -> Option<Arc<Job>> {
        // The overlay can know a newer use of the key than the index. It contains the job of that use, too.
        let is_found = found.key.is_some_and(|found| found.id == key.id);
        self.newest_job(key.id, found.job.as_ref().filter(|_| is_found))
    }

    /// The job of a command.
    pub(super) fn named_job(&self, job: &JobRef, found: &Found, now: Timestamp) -> NamedJob {
        match job {
            JobRef::Id(id) => match self.newest_job(*id, found.job.as_ref()) {
                Some(job) => NamedJob::Known(job),
                None => NamedJob::Unknown,
            },
            JobRef::Key { app, key } => {
                let Some(key) = self.key_in_use(&key_hash(app, key), found, now) else {
                    return NamedJob::Unknown;
                };
                match self.job_of_key(&key, found) {
                    Some(job) => NamedJob::Known(job),
                    None => NamedJob::Ended(Box::new(v1::Job {
                        id: key.id.to_string(),
                        app: app.to_string(),
                        ..v1::Job::default()
                    })),
                }
            }
        }
    }

    /// Gives a waiting job the content of another request.
    pub(super) fn replace(
        &mut self,
        job: &Job,
        request: &Request,
        record: &Record,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        // The clock may have been set back. A previous job with the key must not use it for longer than this one.
        let accepted = job.accepted.max(now);
        let mut new = Job {
            revision: job.revision + 1,
            ..request.clone().into_job(job.id, accepted)
        };
        // The index has memory for a job that is not larger than the one that it contains.
        let checked = if new.size() > job.size() {
            self.check_admission(request, now)
        } else {
            self.check_later(job.due, new.due, now)
        };
        if let Err(failure) = checked {
            return self.reject_command(record, &failure, now, writes);
        }
        writes.tally.replaced += 1;
        spans::accepted(&mut new, record);
        self.use_key(&new);
        let new = Arc::new(new);
        self.save(new.clone(), now, writes);
        codec::outcome(v1::Outcome::Replaced, Some(&new), String::new())
    }

    /// Takes note that the newest request with a job's idempotency key is that of the job.
    pub(super) fn use_key(&mut self, job: &Job) {
        let hash = job.idempotency_key.as_deref().map(|key| key_hash(&job.app, key));
        if let Some(hash) = mutant!("shard-forgets-idempotency-keys", hash, None) {
            self.overlay.set_key(self.turn, hash, KeyValue::of(job));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Kind, Payload, Priority};

    const REQUEST: [u8; 16] = [1; 16];
    const OTHER: [u8; 16] = [2; 16];

    fn job(state: JobState, request_id: Option<&str>) -> Arc<Job> {
        Arc::new(Job {
            state,
            due: Timestamp::from_millis(9),
            idempotency_key: Some("key".into()),
            request_hash: REQUEST,
            request_id: request_id.map(Into::into),
            ..Job::for_tests(0)
        })
    }

    fn request(hash: [u8; 16], is_delayed: bool, request_id: Option<&str>) -> Request {
        Request {
            app: "app".into(),
            kind: Kind::App,
            topic: "jobs".into(),
            due: Timestamp::from_millis(9),
            is_delayed,
            priority: Priority::Normal,
            idempotency_key: Some("key".into()),
            on_conflict: ConflictPolicy::Replace,
            request_hash: hash,
            request_id: request_id.map(Into::into),
            payload: Payload::default(),
            expires: None,
        }
    }

    #[test]
    fn first_request_counts_unless_replaced() {
        for state in [JobState::Scheduled, JobState::Dispatched] {
            let job = job(state, None);
            for (hash, expected) in [(REQUEST, Resolution::Duplicate), (OTHER, Resolution::Conflict)] {
                let request = Request {
                    on_conflict: ConflictPolicy::Reject,
                    ..request(hash, true, Some("id"))
                };
                assert_eq!(resolve(&request, &KeyValue::of(&job), Some(&job)), expected);
                assert_eq!(resolve(&request, &KeyValue::of(&job), None), expected);
            }
        }
    }

    #[test]
    fn repeated_newest_request_has_no_effect() {
        let (waits, dispatched) = (JobState::Scheduled, JobState::Dispatched);
        // Content, whether it is a delay, the request ids of the job and of the request, and whether it is a repetition.
        for (hash, is_delayed, before, now, is_repetition) in [
            (REQUEST, false, None, None, true),
            (REQUEST, false, Some("a"), Some("a"), true),
            (REQUEST, true, Some("a"), Some("a"), true),
            (REQUEST, true, None, None, false),
            (REQUEST, true, Some("a"), Some("b"), false),
            (REQUEST, true, None, Some("b"), false),
            (REQUEST, true, Some("a"), None, false),
            (REQUEST, false, Some("a"), Some("b"), false),
            (OTHER, false, None, None, false),
            (OTHER, true, Some("a"), Some("a"), false),
        ] {
            for state in [waits, dispatched, JobState::Cancelled, JobState::Expired] {
                let job = job(state, before);
                let request = request(hash, is_delayed, now);
                let expected = match state {
                    _ if is_repetition => Resolution::Duplicate,
                    JobState::Scheduled => Resolution::Replace(job.clone()),
                    _ => Resolution::Schedule,
                };
                let resolved = resolve(&request, &KeyValue::of(&job), Some(&job));
                assert_eq!(
                    resolved, expected,
                    "{state:?} {hash:?} {is_delayed} {before:?} {now:?}"
                );
            }
            // The job has ended, and the index does not contain it any more.
            let job = job(JobState::Dispatched, before);
            let request = request(hash, is_delayed, now);
            let expected = if is_repetition {
                Resolution::Duplicate
            } else {
                Resolution::Schedule
            };
            let resolved = resolve(&request, &KeyValue::of(&job), None);
            assert_eq!(resolved, expected, "{hash:?} {is_delayed} {before:?} {now:?}");
        }
    }

    #[test]
    fn a_job_never_changes_its_flow() {
        let job = job(JobState::Scheduled, None);
        for request in [
            Request {
                priority: Priority::High,
                ..request(OTHER, true, None)
            },
            Request {
                topic: "new-jobs".into(),
                ..request(OTHER, true, None)
            },
        ] {
            let resolved = resolve(&request, &KeyValue::of(&job), Some(&job));
            assert_eq!(resolved, Resolution::Supersede(job.clone()));
        }
    }
}
