//! Decides commands.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::headers::{self, Origin};
use redeliver_core::route::{self, Arrival, DeadLetter};
use redeliver_core::{Failure, Headers, Output, Record, Timestamp, mutant};
use redeliver_proto::{Message as _, v1};

use super::conflict::{self, NamedJob, Resolution};
use super::dispatch::DueAction;
use super::{ReadyItem, Shard, Writes};
use crate::admission::{self, RejectedForNow};
use crate::codec::{self, KeyValue};
use crate::index::{Cursor, MemoryPressure};
use crate::index_messages::{Found, Query};
use crate::job::{Flow, Job, JobId, JobState, Kind};
use crate::request::{
    Command, ConflictPolicy, Incoming, JobRef, NAME, RejectedWait, Request, first_origin, key_hash, shard_of,
};
use crate::schedules;
use crate::spans;

/// A command that is not decided yet.
pub(super) struct PendingCommand {
    pub(super) record: Record,
    pub(super) incoming: Incoming,
}

impl PendingCommand {
    /// The approximate size in memory.
    pub(super) fn size(&self) -> usize {
        let record = &self.record;
        500 + record.value.as_ref().map_or(0, Bytes::len)
            + record.key.as_ref().map_or(0, Bytes::len)
            + record.headers.byte_len()
    }
}

impl Shard {
    /// The shard that owns the job or the idempotency key of a command.
    pub(super) fn owner_shard(&self, incoming: &Incoming) -> i32 {
        let of_key = |app: &str, key: &str| shard_of(app, key, self.settings.partitions);
        match &incoming.command {
            Ok(Command::Schedule(request)) => match &request.idempotency_key {
                Some(key) => of_key(&request.app, key),
                None => self.number,
            },
            Ok(Command::Cancel(job) | Command::Reschedule { job, .. }) => match job {
                JobRef::Id(id) if id.shard() < self.settings.partitions => id.shard(),
                JobRef::Id(_) => self.number,
                JobRef::Key { app, key } => of_key(app, key),
            },
            Ok(Command::ActOnWait(change)) if change.job.shard() < self.settings.partitions => {
                change.job.shard()
            }
            Ok(Command::ActOnWait(_)) => self.number,
            Ok(Command::ChangeSchedule(change)) => {
                schedules::shard(change.id.as_str(), self.settings.partitions)
            }
            Err(_) => self.number,
        }
    }

    /// What the shard must look up to decide a command.
    pub(super) fn query_for(&self, incoming: &Incoming) -> Option<Query> {
        match incoming.command.as_ref().ok()? {
            Command::Schedule(request) => {
                let hash = key_hash(&request.app, request.idempotency_key.as_deref()?);
                Some(match request.on_conflict {
                    ConflictPolicy::Reject => Query::Key(hash),
                    ConflictPolicy::Replace => Query::JobOfKey(hash),
                })
            }
            Command::Cancel(job) | Command::Reschedule { job, .. } => Some(match job {
                JobRef::Id(id) => Query::Job(*id),
                JobRef::Key { app, key } => Query::JobOfKey(key_hash(app, key)),
            }),
            Command::ActOnWait(change) => Some(Query::Job(change.job)),
            Command::ChangeSchedule(change) => {
                Some(Query::Job(schedules::entry_id(change.id.as_str(), self.number)))
            }
        }
    }

    /// Keeps a command aside if it is a long wait to reject whose dead letter cannot be written. It stays incomplete.
    pub(super) fn keep_if_rejected(&mut self, command: Box<PendingCommand>) -> Option<Box<PendingCommand>> {
        let wait = command.incoming.rejected_wait.as_deref();
        let topic = wait.map(|wait| wait.pipeline.dead_letter_topic());
        let Some(topic) = topic.filter(|topic| self.settings.lacks(topic)) else {
            return Some(command);
        };
        self.rejected_waits.entry(topic).or_default().push(*command);
        None
    }

    /// Decides again about long waits to reject whose dead letters can be written now.
    pub(super) fn retry_rejections(&mut self) {
        let waits = std::mem::take(&mut self.rejected_waits).into_iter();
        let (kept, possible): (_, BTreeMap<_, _>) = waits.partition(|(topic, _)| self.settings.lacks(topic));
        self.rejected_waits = kept;
        let commands = possible.into_values().flatten().map(Box::new);
        self.ready
            .extend(commands.map(|command| ReadyItem::Command(command, Found::default())));
    }

    pub(super) fn decide(
        &mut self,
        pending: PendingCommand,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) {
        let owner = self.owner_shard(&pending.incoming);
        if owner != self.number {
            writes.tally.forwarded += 1;
            let mut headers = headers::user_headers(&pending.record.headers, None);
            // The lineage contains the timestamp of the first record, from which a `delay` counts.
            headers::write_lineage(&mut headers, NAME, &first_origin(&pending.record), 0);
            writes.push(Output {
                topic: self.settings.ingest.clone(),
                partition: Some(owner),
                key: pending.record.key,
                value: pending.record.value,
                headers,
            });
            return;
        }
        let Incoming {
            command,
            answer_to,
            is_timestamp_too_old,
            rejected_wait,
        } = pending.incoming;
        writes.tally.too_old_timestamps += u64::from(is_timestamp_too_old);
        let outcome = match command {
            Ok(Command::Schedule(request)) => self.schedule(*request, &pending.record, found, now, writes),
            Ok(Command::Cancel(job)) => self.cancel(&job, found, now, writes),
            Ok(Command::Reschedule { job, due }) => {
                self.reschedule(&job, due, &pending.record, found, now, writes)
            }
            Ok(Command::ActOnWait(change)) => self.act_on_wait(&change, &pending.record, found, now, writes),
            Ok(Command::ChangeSchedule(change)) => {
                self.change_schedule(*change, &pending.record, found, now, writes)
            }
            Err(failure) => {
                writes.tally.rejected += 1;
                match rejected_wait {
                    Some(wait) => reject_wait(*wait, &pending.record, &failure, now, writes),
                    None => self.reject(&pending.record, &failure, now, writes),
                }
                rejected_outcome(&failure)
            }
        };
        if let Some(answer_to) = answer_to {
            writes.push(Output {
                topic: self.settings.answers.clone(),
                partition: None,
                key: Some(Bytes::copy_from_slice(answer_to.as_bytes())),
                value: Some(outcome.encode_to_vec().into()),
                headers: Headers::new(),
            });
        }
    }

    fn schedule(
        &mut self,
        request: Request,
        record: &Record,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let hash = request
            .idempotency_key
            .as_deref()
            .map(|key| key_hash(&request.app, key));
        let (mut superseded, mut ended) = (None, None);
        if let Some(existing) = hash.and_then(|hash| self.key_in_use(&hash, found, now)) {
            let job = self.job_of_key(&existing, found);
            match conflict::resolve(&request, &existing, job.as_ref()) {
                Resolution::Duplicate | Resolution::Conflict => {
                    return self.answer_repeated_key(existing, job, &request, record, now, writes);
                }
                Resolution::Replace(job) => return self.replace(&job, &request, record, now, writes),
                Resolution::Supersede(job) => superseded = Some(job),
                Resolution::Schedule => ended = job,
            }
        }
        if let Err(failure) = self.check_admission(&request, now) {
            return self.reject_command(record, &failure, now, writes);
        }
        // A job that takes the place of another one adds none.
        if superseded.is_none()
            && let Err(failure) = self.check_quota(&request)
        {
            return self.reject_command(record, &failure, now, writes);
        }
        let result = if let Some(superseded) = superseded {
            writes.tally.replaced += 1;
            // Before the new job: the last record with a key counts when the index is rebuilt.
            self.end_job(&superseded.with_key_taken(now), JobState::Cancelled, now, writes);
            v1::Outcome::Replaced
        } else {
            if let Some(ended) = ended.filter(|ended| ended.accepted > now) {
                self.write_state(&Arc::new(ended.with_key_taken(now)), writes);
            }
            writes.tally.accepted += 1;
            v1::Outcome::Scheduled
        };
        let id = self.requested_id(record, now);
        let job = self.accept_job(id, request, None, Some(record), now, writes);
        v1::CommandOutcome {
            outcome: result.into(),
            job: Some(job),
            ..v1::CommandOutcome::default()
        }
    }

    /// The id of the job that the request in this record creates.
    pub(super) fn requested_id(&self, record: &Record, now: Timestamp) -> JobId {
        let position = &record.position;
        JobId::new(
            record.timestamp.unwrap_or(now),
            position.partition,
            position.offset,
        )
    }

    /// Adds a new job, and dispatches it at once if it is due and nothing is before it. `record` is its request, and `occurrence`
    /// that of the schedule that creates it.
    pub(super) fn accept_job(
        &mut self,
        id: JobId,
        request: Request,
        occurrence: Option<Arc<str>>,
        record: Option<&Record>,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::Job {
        let mut job = Job {
            occurrence,
            ..request.into_job(id, now)
        };
        if let Some(record) = record {
            spans::accepted(&mut job, record);
        }
        // Its command was in the topic when an operator has released what waits.
        if let Some(released) = self.released_waits.released(&job, now) {
            writes.tally.released_early += 1;
            job = released;
        }
        self.use_key(&job);
        self.quotas.add(&job);
        let proto_job = codec::to_proto(&job, false);
        let job = Arc::new(job);
        // While more jobs are due than can leave, or earlier ones of its flow are still to be read, a due job queues with the others.
        let topic = self.settings.destination(&job);
        let presence = self.settings.topics.presence(&topic);
        let action = self.settings.due_action(presence, &self.apps, &job, now);
        let may_dispatch = self.settings.lacking(&job).is_none();
        let is_due = job.due <= now && action == DueAction::Dispatch && may_dispatch;
        let is_next = self.look_ahead.is_next(&Flow::of(&job), Cursor::of(&job));
        if is_due && is_next && !self.is_crowded && !self.window.is_limited(&job) {
            self.dispatch(&job, topic, now, writes);
        } else {
            self.save(job, now, writes);
        }
        proto_job
    }

    /// Checks that the index has memory for a job. Records of pipelines are always accepted, because no client would send
    /// them again, but not at once: see [`HeldWaits`](super::held_waits::HeldWaits).
    pub(super) fn check_admission(&self, request: &Request, now: Timestamp) -> Result<(), Failure> {
        if request.kind == Kind::LongWait || self.memory_pressure() == MemoryPressure::Low {
            return Ok(());
        }
        let due = if self.stays(request) {
            schedules::NEVER
        } else {
            request.due
        };
        self.check_free_memory(due, now)
    }

    /// Whether something of a job of an application stays in the index for a long or an unknown time although it is due: the job itself or, in a full index, its
    /// idempotency key.
    fn stays(&self, request: &Request) -> bool {
        self.apps.is_paused(&request.app)
            || self.window.holds_back(&request.app)
            || self.settings.topics.presence(&request.topic).is_unavailable()
            || (self.is_full() && request.idempotency_key.is_some())
    }

    /// Checks that another job of the application may wait. Records of pipelines are always accepted.
    pub(super) fn check_quota(&self, request: &Request) -> Result<(), Failure> {
        if request.kind == Kind::LongWait {
            return Ok(());
        }
        self.quotas.check(&request.app)
    }

    /// Rejects a command, and counts it by the reason.
    pub(super) fn reject_command(
        &self,
        record: &Record,
        failure: &Failure,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let tally = &mut writes.tally;
        *match RejectedForNow::of(&failure.code) {
            Some(RejectedForNow::IndexFull) => &mut tally.no_room,
            Some(RejectedForNow::QuotaExceeded) => &mut tally.over_quota,
            None => &mut tally.rejected,
        } += 1;
        self.reject(record, failure, now, writes);
        rejected_outcome(failure)
    }

    pub(super) fn check_free_memory(&self, due: Timestamp, now: Timestamp) -> Result<(), Failure> {
        admission::check(self.memory_pressure(), due, now, self.settings.window)
    }

    /// Answers a request whose idempotency key is in use: a duplicate or a conflict.
    fn answer_repeated_key(
        &mut self,
        existing: KeyValue,
        job: Option<Arc<Job>>,
        request: &Request,
        record: &Record,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let proto_job = match job {
            Some(job) => codec::to_proto(&job, false),
            None => v1::Job {
                id: existing.id.to_string(),
                app: request.app.to_string(),
                ..v1::Job::default()
            },
        };
        let (result, reason) = if existing.request_hash == request.request_hash {
            writes.tally.duplicates += 1;
            (v1::Outcome::Duplicate, String::new())
        } else {
            writes.tally.conflicts += 1;
            let message = format!(
                "idempotencyKey is in use by job {}, whose request has different content",
                existing.id
            );
            let failure = Failure::permanent("request.conflict", message);
            self.reject(record, &failure, now, writes);
            (v1::Outcome::Conflict, failure.message)
        };
        v1::CommandOutcome {
            outcome: result.into(),
            job: Some(proto_job),
            reason,
            ..v1::CommandOutcome::default()
        }
    }

    fn cancel(
        &mut self,
        job: &JobRef,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let job = match self.scheduled_job(job, found, now, writes) {
            Ok(job) => job,
            Err(outcome) => return *outcome,
        };
        writes.tally.cancelled += 1;
        let job = mutant!(
            "shard-ignores-cancellations",
            self.end_job(&job, JobState::Cancelled, now, writes),
            job
        );
        codec::outcome(v1::Outcome::Cancelled, Some(&job), String::new())
    }

    /// Checks that a waiting job may get another due time. A full index takes a job that is due soon only because the job leaves soon.
    pub(super) fn check_later(&self, due: Timestamp, new: Timestamp, now: Timestamp) -> Result<(), Failure> {
        let leaves_soon = self.is_full() && self.check_free_memory(due, now).is_ok();
        if leaves_soon {
            self.check_free_memory(new, now)
        } else {
            Ok(())
        }
    }

    fn reschedule(
        &mut self,
        job: &JobRef,
        due: Timestamp,
        record: &Record,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let job = match self.scheduled_job(job, found, now, writes) {
            Ok(job) => job,
            Err(outcome) => return *outcome,
        };
        if let Err(failure) = self.check_later(job.due, due, now) {
            return self.reject_command(record, &failure, now, writes);
        }
        writes.tally.rescheduled += 1;
        let job = Arc::new(Job {
            due,
            revision: job.revision + 1,
            expires: job.expires.map(|expires| due.after(expires.since(job.due))),
            ..(*job).clone()
        });
        self.save(job.clone(), now, writes);
        codec::outcome(v1::Outcome::Rescheduled, Some(&job), String::new())
    }

    /// The job of a command, if it is scheduled; otherwise the outcome to answer with.
    fn scheduled_job(
        &mut self,
        job: &JobRef,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> Result<Arc<Job>, Box<v1::CommandOutcome>> {
        let (result, job) = match self.named_job(job, found, now) {
            // Clients cannot cancel or reschedule the record of a pipeline: the pipeline would lose it. See `act_on_wait`.
            NamedJob::Known(job) if job.kind != Kind::App => (v1::Outcome::Unknown, None),
            NamedJob::Known(job) => match job.state {
                JobState::Scheduled => return Ok(job),
                JobState::Dispatched => (v1::Outcome::AlreadyDispatched, Some(job)),
                JobState::Cancelled => (v1::Outcome::AlreadyCancelled, Some(job)),
                JobState::Expired => (v1::Outcome::Expired, Some(job)),
            },
            NamedJob::Ended(job) => {
                writes.tally.refused += 1;
                return Err(Box::new(v1::CommandOutcome {
                    outcome: v1::Outcome::Ended.into(),
                    job: Some(*job),
                    ..v1::CommandOutcome::default()
                }));
            }
            NamedJob::Unknown => (v1::Outcome::Unknown, None),
        };
        writes.tally.refused += 1;
        Err(Box::new(codec::outcome(result, job.as_deref(), String::new())))
    }

    fn reject(&self, record: &Record, failure: &Failure, now: Timestamp, writes: &mut Writes) {
        let output = DeadLetter {
            topic: self.settings.dead_letters.clone(),
            pipeline: NAME,
            arrival: Some(Arrival::new(record)),
            failure,
            trace: None,
            now,
        };
        writes.push(output.with_content_of(record));
    }
}

/// Rejects a long wait. The record becomes a dead letter of its pipeline, with the lineage that it has.
fn reject_wait(wait: RejectedWait, command: &Record, failure: &Failure, now: Timestamp, writes: &mut Writes) {
    let mut output = Output {
        topic: wait.pipeline.return_topic(),
        partition: None,
        key: wait.payload.key,
        value: wait.payload.value,
        headers: wait.payload.headers,
    };
    route::replace_refused(&wait.pipeline, &mut output, Origin::of(command), failure, now);
    writes.push(output);
}

fn rejected_outcome(failure: &Failure) -> v1::CommandOutcome {
    rejected(&failure.code, failure.message.clone())
}

pub(super) fn rejected(code: &str, reason: String) -> v1::CommandOutcome {
    v1::CommandOutcome {
        code: code.to_owned(),
        ..codec::outcome(v1::Outcome::Rejected, None, reason)
    }
}
