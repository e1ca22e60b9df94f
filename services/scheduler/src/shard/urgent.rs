//! Copies of cancellations that overtake their originals in the ingest topic.
//!
//! A cancellation is always written to the ingest topic. A copy in the urgent topic names the offset of that original, and takes
//! effect before it. The original takes effect as well, in its order, so nothing depends on a copy: one that is lost costs time only.
//! What a copy decides is certain, because a cancellation cannot be undone.
//!
//! A copy goes through the lookups like other commands, only before those that still wait for theirs. So the order of the index's
//! responses, on which the overlay depends, stays the same.
//!
//! Until the original has its turn, the copy *stands*: it also cancels jobs whose requests come after the copy, and before the
//! original. Those are the jobs that the copy has overtaken. A request that comes after the original is not affected.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use redeliver_core::{Record, Timestamp, mutant};

use super::conflict::NamedJob;
use super::{PendingCommand, Shard, Writes, outcome};
use crate::index_messages::Found;
use crate::job::{Job, JobId, JobState, KeyHash, Kind};
use crate::request::{Command, JobRef, key_hash};
use redeliver_proto::v1;

/// The maximum number of copies of a shard that wait for their lookup or its result.
const MAX_PENDING: usize = 500;
/// The maximum number of copies of a shard that stand.
const MAX_STANDING: usize = 10_000;

/// What a cancellation names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Target {
    Job(JobId),
    Key(KeyHash),
}

impl Target {
    fn of(job: &JobRef) -> Self {
        match job {
            JobRef::Id(id) => Self::Job(*id),
            JobRef::Key { app, key } => Self::Key(key_hash(app, key)),
        }
    }
}

/// A copy whose original has not had its turn.
#[derive(Debug)]
struct Standing {
    /// The offset of the original.
    offset: i64,
    /// Who waits for the outcome; `None` once it is answered.
    answer_to: Option<Arc<str>>,
    /// After this, the key of the job is not in use any more.
    until: Timestamp,
}

/// The copies of a shard.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// The offset after the last command that the shard has accepted. Unknown before the first one: the originals of all copies
    /// could have had their turn.
    next_offset: Option<i64>,
    pending: usize,
    standing: HashMap<Target, Standing>,
    /// The same by the offsets of the originals.
    order: BTreeSet<(i64, Target)>,
    /// The originals whose copies were answered.
    answered: BTreeSet<i64>,
}

impl Copies {
    /// Takes note of a command of the ingest topic.
    pub(super) fn accepted(&mut self, offset: i64) {
        self.next_offset = self.next_offset.max(Some(offset + 1));
    }

    /// Takes note that the lookup of a copy has its result.
    pub(super) fn looked_up(&mut self) {
        self.pending -= 1;
    }

    fn stand(&mut self, target: Target, standing: Standing) {
        if self.standing.len() >= MAX_STANDING && !self.standing.contains_key(&target) {
            return;
        }
        if let Some(known) = self.standing.get(&target) {
            if known.offset >= standing.offset {
                // The one that stands affects the same requests, and more.
                return;
            }
            self.order.remove(&(known.offset, target));
        }
        self.order.insert((standing.offset, target));
        self.standing.insert(target, standing);
    }

    /// The original at this offset has its turn: its copy, and those of earlier ones, do not stand any more. Returns whether
    /// the copy was answered.
    pub(super) fn pass(&mut self, offset: i64) -> bool {
        while let Some((original, target)) = self.order.first().copied().filter(|(first, _)| *first <= offset)
        {
            self.order.remove(&(original, target));
            self.standing.remove(&target);
        }
        let later = self.answered.split_off(&(offset + 1));
        std::mem::replace(&mut self.answered, later).contains(&offset)
    }

    /// Whether a copy cancels a new job whose request is at this offset. Adds those to `waiting` who wait for that.
    fn hit(&mut self, job: &Job, offset: i64, now: Timestamp, waiting: &mut Vec<Arc<str>>) -> bool {
        if self.standing.is_empty() || job.kind != Kind::App {
            return false;
        }
        let key = job.idempotency_key.as_deref();
        let key = key.map(|key| Target::Key(key_hash(&job.app, key)));
        let mut is_hit = false;
        for target in [Some(Target::Job(job.id)), key].into_iter().flatten() {
            let standing = self.standing.get_mut(&target).filter(|standing| {
                let is_earlier = mutant!(
                    "shard-cancels-requests-after-the-cancellation",
                    offset < standing.offset,
                    true
                );
                is_earlier && now < standing.until
            });
            if let Some(standing) = standing {
                is_hit = true;
                if let Some(answer_to) = standing.answer_to.take() {
                    self.answered.insert(standing.offset);
                    waiting.push(answer_to);
                }
            }
        }
        is_hit
    }
}

impl Shard {
    /// How many copies the shard accepts. None before it knows which originals have had their turn.
    pub(crate) fn urgent_capacity(&self) -> usize {
        match self.copies.next_offset {
            Some(_) if self.capacity() > 0 => MAX_PENDING.saturating_sub(self.copies.pending),
            _ => 0,
        }
    }

    /// Accepts a copy. `record` has the position and the timestamp of the original. Returns whether the copy overtakes it.
    pub(crate) fn accept_urgent(&mut self, record: Record, now: Timestamp) -> bool {
        let incoming = crate::request::read(&record, &self.settings.rules, now);
        // The shard reads the original after everything that it has accepted. One that it has accepted is decided in its order.
        let is_ahead = self
            .copies
            .next_offset
            .is_some_and(|next| record.position.offset >= next);
        let is_ahead = mutant!("shard-accepts-copies-of-earlier-commands", is_ahead, true);
        let is_cancellation = matches!(incoming.command, Ok(Command::Cancel(_)));
        if !is_ahead || !is_cancellation || self.owner_shard(&incoming) != self.number {
            return false;
        }
        let command = PendingCommand {
            record,
            incoming,
            is_copy: true,
        };
        self.command_bytes += command.size();
        self.copies.pending += 1;
        self.needs_lookup.push_front(command);
        true
    }

    /// Lets a copy take effect.
    pub(super) fn decide_copy(
        &mut self,
        copy: PendingCommand,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) {
        let offset = copy.record.position.offset;
        let Ok(Command::Cancel(job)) = copy.incoming.command else {
            return;
        };
        if self.copies.answered.contains(&offset) || self.copies.answered.len() >= MAX_STANDING {
            return;
        }
        let decided = match self.named_job(&job, found, now) {
            // A job of a later request is not the one that the original names.
            NamedJob::Known(known) if known.kind == Kind::App && is_requested_before(&known, offset) => {
                let is_waiting = known.state == JobState::Scheduled;
                match &job {
                    _ if is_waiting => Some(self.cancel(&job, found, now, writes)),
                    // A job does not change any more once it has ended.
                    JobRef::Id(_) => Some(outcome(ended_outcome(known.state), Some(&known), String::new())),
                    // The next request with its key may come before the original.
                    JobRef::Key { .. } => None,
                }
            }
            NamedJob::Known(_) | NamedJob::Ended(_) | NamedJob::Unknown => None,
        };
        let is_answered = decided.is_some();
        if let (Some(outcome), Some(answer_to)) = (&decided, &copy.incoming.answer_to) {
            self.copies.answered.insert(offset);
            self.answer(answer_to, outcome, writes);
        }
        writes.tally.urgent_decided += u64::from(is_answered);
        writes.tally.urgent_ahead_of_job += u64::from(!is_answered);
        let standing = Standing {
            offset,
            answer_to: copy.incoming.answer_to.filter(|_| !is_answered),
            until: now.after(self.settings.retention.keys),
        };
        self.copies.stand(Target::of(&job), standing);
    }

    /// Cancels a job that is being created, if the copy of a later cancellation has overtaken its request.
    pub(super) fn cancel_overtaken(
        &mut self,
        job: &Arc<Job>,
        record: &Record,
        now: Timestamp,
        writes: &mut Writes,
    ) -> bool {
        if mutant!("shard-forgets-copies-that-overtake-their-job") {
            return false;
        }
        let mut waiting = Vec::new();
        if !self.copies.hit(job, record.position.offset, now, &mut waiting) {
            return false;
        }
        writes.tally.cancelled += 1;
        let job = self.end_job(job, JobState::Cancelled, now, writes);
        let outcome = outcome(v1::Outcome::Cancelled, Some(&job), String::new());
        for answer_to in waiting {
            self.answer(&answer_to, &outcome, writes);
        }
        true
    }
}

/// Whether the request of a job comes before this offset of the ingest topic.
fn is_requested_before(job: &Job, offset: i64) -> bool {
    let request = i64::try_from(job.id.offset()).unwrap_or(i64::MAX);
    !job.id.has_request() || request < offset
}

fn ended_outcome(state: JobState) -> v1::Outcome {
    match state {
        JobState::Scheduled => v1::Outcome::Unspecified,
        JobState::Dispatched => v1::Outcome::AlreadyDispatched,
        JobState::Cancelled => v1::Outcome::AlreadyCancelled,
        JobState::Expired => v1::Outcome::Expired,
    }
}
