//! Acts on single long waits, as an operator wants: one is due now, or becomes a dead letter of its pipeline.
//!
//! The command, its effect and its outcome are one transaction, as with all commands: whoever is killed, the next owner of the shard decides it once.

use std::sync::Arc;

use redeliver_core::headers::Origin;
use redeliver_core::{Output, Record, Timestamp, route};
use redeliver_proto::v1;

use super::conflict::NamedJob;
use super::dispatch::TOPIC_MISSING;
use super::released_waits::due_since;
use super::{Shard, Writes, commands};
use crate::codec;
use crate::index_messages::Found;
use crate::job::{Job, JobState, Kind};
use crate::request::{JobRef, WaitAction, WaitChange};

impl Shard {
    /// Decides a command about a long wait, which this record contains.
    pub(super) fn act_on_wait(
        &mut self,
        change: &WaitChange,
        record: &Record,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let outcome = |outcome: v1::Outcome, job: Option<&Job>| codec::outcome(outcome, job, String::new());
        let job = match self.named_job(&JobRef::Id(change.job), found, now) {
            NamedJob::Known(job) if job.kind == Kind::LongWait => job,
            _ => {
                writes.tally.refused += 1;
                return outcome(v1::Outcome::Unknown, None);
            }
        };
        let ended = match job.state {
            JobState::Scheduled => None,
            JobState::Dispatched => Some(v1::Outcome::AlreadyDispatched),
            JobState::Cancelled => Some(v1::Outcome::AlreadyCancelled),
            JobState::Expired => Some(v1::Outcome::Expired),
        };
        if let Some(ended) = ended {
            writes.tally.refused += 1;
            return outcome(ended, Some(&job));
        }
        match change.action {
            WaitAction::Retry => {
                let Some(due) = due_since(&job, record.timestamp.unwrap_or(now), now) else {
                    // It leaves as soon as its topic is available.
                    return outcome(v1::Outcome::Rescheduled, Some(&job));
                };
                writes.tally.released_early += 1;
                let revision = job.revision + 1;
                let job = Arc::new(Job { revision, ..due });
                self.save(job.clone(), now, writes);
                outcome(v1::Outcome::Rescheduled, Some(&job))
            }
            WaitAction::Dead => self.give_up_wait(&job, change, now, writes),
        }
    }

    /// Replaces a long wait by a dead letter of its pipeline that says who has given up on it.
    fn give_up_wait(
        &mut self,
        job: &Arc<Job>,
        change: &WaitChange,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        // Its name was checked when it was accepted.
        let pipeline = self.settings.rules.pipeline(&job.app);
        let pipeline = pipeline.filter(|pipeline| !self.settings.lacks(&pipeline.dead_letter_topic()));
        let Some(pipeline) = pipeline else {
            writes.tally.refused += 1;
            let reason = format!(
                "the dead-letter topic of the pipeline {} cannot be written; the record waits as before",
                job.app
            );
            return commands::rejected(TOPIC_MISSING, reason);
        };
        let failure = route::given_up(&job.payload.headers, &change.by, &change.reason);
        let mut letter = Output {
            topic: self.settings.destination(job),
            partition: None,
            key: job.payload.key.clone(),
            value: job.payload.value.clone(),
            headers: job.payload.headers.clone(),
        };
        // Only counts if the headers of the record name none.
        let origin = Origin {
            topic: self.settings.ingest.clone(),
            partition: job.id.shard(),
            offset: i64::try_from(job.id.offset()).unwrap_or(i64::MAX),
            timestamp: Some(job.id.requested_at()),
        };
        route::replace_refused(&pipeline, &mut letter, origin, &failure, now);
        writes.tally.given_up += 1;
        writes.push(letter);
        let job = self.end_job(job, JobState::Expired, now, writes);
        codec::outcome(v1::Outcome::Dead, Some(&job), String::new())
    }
}
