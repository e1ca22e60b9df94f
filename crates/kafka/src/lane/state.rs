//! What a lane does next, as a state machine without IO.
//!
//! [`LaneState::next`] returns a [`Step`]. The driver, or a model in tests, carries it out and reports the result with one of
//! the other methods. One round of steps serves events, repairs what is broken, admits records, lets the processor finish
//! some, and writes them in one transaction.
//!
//! # Failed transactions
//! A transaction that was certainly aborted does not lose the results in its batch. The processor takes them back if it
//! can; otherwise the lane keeps the batch and writes it again. If the outcome is unknown, the lane keeps the batch until
//! the producers are initialised, which resolves the transaction, and then compares the committed positions with those of
//! the batch. Only if a partition of the batch was revoked, or the batch cannot be written as it is, are its records read
//! again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, Output, Record, Timestamp, mutant};

use super::assignments::{Assignments, Commit, Found, FoundPosition, Lookup, Partition, Resolution, resolve};
use super::backoff::FailedTransactions;
use super::{Ended, IfRecreated, LaneError, LaneObserver, LaneSpec, ROUND};
use crate::client::KafkaSettings;
use crate::processor::{FollowUp, Processor, Refused, TransactionBatch};
use crate::recovery::RecoveryAction;
use crate::tracker::{Admission, Committed, OffsetTracker, TopicFingerprint};
use crate::transaction::{FailureKind, TransactionError};

/// How long lookups may remain unanswered before the clients are recreated, in addition to the time that a transaction of a
/// dead peer may stay open. After restarts of the broker, some clients never find their coordinator again. Only a new client
/// does. The broker looks for expired transactions every 10 seconds.
const UNANSWERED: Duration = Duration::from_secs(12);
/// This many fencings within [`FENCE_WINDOW`] mean that two processes use the same instance name.
const FENCE_LIMIT: usize = 5;
pub(super) const FENCE_WINDOW: Duration = Duration::from_secs(60);
/// Minimum batch size after repeated failures.
const MIN_BATCH: usize = 16;
/// A batch that times out this often is too large to be written as it is.
const MAX_TIMEOUTS: u32 = 3;

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Serve everything except records: rebalances, errors, statistics, answers to lookups.
    Poll,
    /// Initialise the producers, which resolves transactions of unknown outcome, then [`LaneState::producers_ready`].
    InitProducers,
    /// Look up positions in the background, then [`LaneState::found`].
    LookUp(Lookup),
    /// Make the client fetch these partitions from these positions, then [`LaneState::started`].
    Start(Vec<Start>),
    /// Compare the topics and the group with what is assigned.
    Check,
    /// Pass fetched records to [`LaneState::observe`].
    Admit,
    /// Make sure that the admitted records belong to the assigned topics, or call [`LaneState::unverified`].
    Verify,
    /// Begin a transaction with [`LaneState::take_outputs`] and [`LaneState::commits`].
    Write,
    /// If the transaction has ended, [`LaneState::put_outputs`] and [`LaneState::written`]; otherwise wait for that, or for
    /// records.
    Await,
    /// Wait, at most this long.
    Park(Duration),
    /// All work is finished, or the grace period is over.
    Stop,
}

/// Where to start a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) slot: usize,
    pub(super) topic: Arc<str>,
    pub(super) partition: i32,
    /// Whether the client fetches the partition already and has to seek.
    pub(super) is_fetched: bool,
    /// `None` if nothing was committed, or not in this topic: start at the beginning.
    pub(super) position: Option<Committed>,
    found: FoundPosition,
}

/// What comes next in the current round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Poll,
    Repair,
    Work,
    PollAgain,
    Verify,
    Finish,
    /// A transaction is being written. Meanwhile the lane admits records, but serves no events, so that it keeps its
    /// partitions.
    Writing,
    Waiting,
}

/// A batch whose transaction has not succeeded yet.
struct Unwritten {
    commits: Vec<Commit>,
    /// The outcome of the last attempt is unknown until the positions have been looked up.
    unknown: Option<Unknown>,
    /// How often the batch timed out.
    timeouts: u32,
}

#[derive(Default)]
struct Unknown {
    /// The number of the lookup in progress.
    lookup: Option<u64>,
    /// The ends of the changelog, in case the transaction turns out to be committed.
    changelog_ends: Vec<(i32, i64)>,
}

/// The state of a lane.
pub(super) struct LaneState<P> {
    name: String,
    group: String,
    max_batch: usize,
    grace: Duration,
    transaction_timeout: Duration,
    if_recreated: IfRecreated,
    instance: String,
    clock: Arc<dyn Clock>,
    observer: Arc<dyn LaneObserver>,
    processor: P,
    pub(super) assignments: Assignments,
    batch: TransactionBatch,
    unwritten: Option<Unwritten>,
    stage: Stage,
    has_producers: bool,
    is_ready: bool,
    /// Records were admitted since the last call of [`Processor::accepted_all`].
    has_admitted: bool,
    admitted: usize,
    starting: Vec<Start>,
    failed_starts: u32,
    /// No lookup begins before this time.
    next_lookup: Option<Instant>,
    /// Since when lookups have remained unanswered.
    unanswered_since: Option<Instant>,
    stopping_since: Option<Instant>,
    began: Option<Instant>,
    /// Whether a transaction was committed in this session.
    pub(super) has_committed: bool,
    /// The current maximum batch size. It is halved after each timeout and stall, because a batch that takes longer to write than the
    /// transaction timeout would fail forever.
    batch_limit: usize,
    failures: FailedTransactions,
    refused_log_throttle: LogThrottle,
    fences: Vec<Instant>,
    /// Partitions whose topic was created again while the lane owned them, until the lane commits a position of the new
    /// topic or loses the partition. Until then, a commit without a topic fingerprint is treated as one of the old topic.
    recreated: BTreeSet<Partition>,
}

impl<P: Processor> LaneState<P> {
    pub(super) fn new(
        spec: &LaneSpec,
        settings: &KafkaSettings,
        clock: Arc<dyn Clock>,
        observer: Arc<dyn LaneObserver>,
        processor: P,
    ) -> Self {
        Self {
            name: spec.name.clone(),
            group: spec.group.clone(),
            max_batch: spec.batch.max(1),
            grace: spec.grace,
            transaction_timeout: settings.transaction_timeout,
            if_recreated: spec.if_recreated,
            instance: settings.instance.clone(),
            clock,
            observer,
            processor,
            assignments: Assignments::default(),
            batch: TransactionBatch::default(),
            unwritten: None,
            stage: Stage::Poll,
            has_producers: false,
            is_ready: false,
            has_admitted: false,
            admitted: 0,
            starting: Vec::new(),
            failed_starts: 0,
            next_lookup: None,
            unanswered_since: None,
            stopping_since: None,
            began: None,
            has_committed: false,
            batch_limit: spec.batch.max(1),
            failures: FailedTransactions::new(),
            refused_log_throttle: LogThrottle::default(),
            fences: Vec::new(),
            recreated: BTreeSet::new(),
        }
    }

    /// Begins a session with a new consumer and initialised producers.
    pub(super) fn begin_session(&mut self) {
        self.stage = Stage::Poll;
        self.has_producers = true;
        self.is_ready = false;
        self.has_admitted = false;
        self.failed_starts = 0;
        self.next_lookup = None;
        self.unanswered_since = None;
        self.stopping_since = None;
        self.has_committed = false;
        self.batch_limit = self.max_batch;
        self.failures = FailedTransactions::new();
        self.processor.starting();
    }

    /// Drops everything in flight. The group assigns the partitions again, to this lane or another one.
    pub(super) fn end_session(&mut self) {
        for slot in self.assignments.slots() {
            self.drop_partition(slot);
        }
        if self.unwritten.take().is_some() {
            self.processor.aborted();
        }
        self.batch.clear();
        self.starting.clear();
        self.report_assigned();
    }

    /// The next step. `now` is the monotonic time.
    ///
    /// # Errors
    /// If the session has to end.
    pub(super) fn next(&mut self, now: Instant, is_stopping: bool) -> Result<Step, Ended> {
        if is_stopping && self.stopping_since.is_none() {
            self.stopping_since = Some(now);
            self.processor.stopping();
        }
        loop {
            let stage = self.stage;
            let (stage, step) = match stage {
                Stage::Poll => (Stage::Repair, Step::Poll),
                Stage::Repair => match self.repair(now, is_stopping)? {
                    Some(step) => return Ok(step),
                    None => (Stage::Work, Step::Check),
                },
                // The transaction was aborted. While it was being written, records have been accepted.
                Stage::Work if self.is_outdated() && self.give_back() => continue,
                Stage::Work if self.unwritten.is_some() => (Stage::Writing, self.write(now)),
                // The next process resolves the transaction when it initialises the producers.
                Stage::Writing if is_stopping && self.is_grace_over(now) => return Ok(Step::Stop),
                Stage::Writing if is_stopping => (Stage::Writing, Step::Await),
                Stage::Writing => (Stage::Waiting, Step::Admit),
                Stage::Waiting => (Stage::Writing, Step::Await),
                Stage::Work if is_stopping => {
                    self.stage = Stage::Verify;
                    continue;
                }
                Stage::Work => {
                    self.admitted = 0;
                    (Stage::PollAgain, Step::Admit)
                }
                // The client reports the new id of a topic before it returns records of the new topic. So once the
                // events after an admission are served, the ids tell whether the records belong to the assigned topic.
                Stage::PollAgain if self.admitted > 0 => (Stage::Verify, Step::Poll),
                // Nothing is processed before that is certain: an offset of another topic must not be committed.
                Stage::PollAgain | Stage::Verify => (Stage::Finish, Step::Verify),
                Stage::Finish => {
                    self.stage = Stage::Poll;
                    match self.finish(now) {
                        Some(step) => return Ok(step),
                        None => continue,
                    }
                }
            };
            self.stage = stage;
            return Ok(step);
        }
    }

    /// What has to be done before any other work.
    fn repair(&mut self, now: Instant, is_stopping: bool) -> Result<Option<Step>, Ended> {
        if is_stopping && self.is_finished_stopping(now) {
            return Ok(Some(Step::Stop));
        }
        if self.assignments.are_all_read() && !self.is_unknown() {
            self.unanswered_since = None;
        }
        let is_unanswered =
            |since: Instant| now.duration_since(since) > UNANSWERED + self.transaction_timeout;
        if self.unanswered_since.is_some_and(is_unanswered) {
            return Err(Ended::Broken(
                "lookups of committed offsets remain unanswered".to_owned(),
            ));
        }
        // A rebalance must not wait for the backoff, so the pause is spent in rounds that serve events.
        let is_backing_off = self.failures.is_backing_off(now);
        if !self.has_producers && !is_backing_off {
            self.stage = Stage::Poll;
            return Ok(Some(Step::InitProducers));
        }
        // A transaction of unknown outcome may still change the positions until the producers are initialised.
        if self.has_producers || mutant!("lane-reads-positions-of-open-transactions") {
            if !self.starting.is_empty() {
                return Ok(Some(Step::Start(std::mem::take(&mut self.starting))));
            }
            if let Some(lookup) = self.next_lookup(now) {
                return Ok(Some(Step::LookUp(lookup)));
            }
        }
        if is_backing_off || self.is_unknown() {
            self.stage = Stage::Poll;
            return Ok(Some(Step::Park(ROUND)));
        }
        Ok(None)
    }

    /// Whether the batch of an aborted transaction should not be written again.
    fn is_outdated(&self) -> bool {
        self.unwritten.is_some() && self.processor.is_outdated(&self.batch)
    }

    fn is_unknown(&self) -> bool {
        self.unwritten
            .as_ref()
            .is_some_and(|unwritten| unwritten.unknown.is_some())
    }

    fn next_lookup(&mut self, now: Instant) -> Option<Lookup> {
        if self.next_lookup.is_some_and(|next| now < next) {
            return None;
        }
        self.next_lookup = None;
        if let Some(unwritten) = &mut self.unwritten
            && let Some(unknown) = unwritten
                .unknown
                .as_mut()
                .filter(|unknown| unknown.lookup.is_none())
        {
            let lookup = self.assignments.lookup_of(&unwritten.commits);
            unknown.lookup = Some(lookup.number);
            return Some(lookup);
        }
        self.assignments.next_lookup()
    }

    fn write(&mut self, now: Instant) -> Step {
        self.began = Some(now);
        Step::Write
    }

    /// Lets the processor finish records. Returns `None` if the next round begins at once.
    fn finish(&mut self, now: Instant) -> Option<Step> {
        if std::mem::take(&mut self.has_admitted) {
            self.processor.accepted_all();
        }
        let wall = self.clock.now();
        self.processor.finish(wall, self.batch_limit, &mut self.batch);
        let is_empty = self.batch.completed.is_empty() && self.batch.owners.is_empty();
        if is_empty && !self.assignments.has_touched() {
            if self.admitted > 0 && self.stopping_since.is_none() {
                return None;
            }
            let due = self.processor.next_due();
            let wait = due.map_or(ROUND, |due| ROUND.min(due.since(wall)));
            return (!wait.is_zero()).then_some(Step::Park(wait));
        }
        // All results are checked before anything is written.
        if let Err(unmatched) = self.assignments.complete(&self.batch) {
            tracing::error!(
                lane = self.name,
                assignment = ?unmatched.id, offset = unmatched.offset,
                "result matches no record in flight; dropping the batch and reading its records again"
            );
            // Outputs do not say which record they belong to, so the whole batch is dropped.
            self.drop_batch();
            self.observer.transaction_failed(RecoveryAction::Abort);
            return None;
        }
        let commits = self.assignments.take_commits();
        if commits.is_empty() && self.batch.outputs.is_empty() {
            self.batch.clear();
            self.assignments.end_batch();
            return None;
        }
        self.unwritten = Some(Unwritten {
            commits,
            unknown: None,
            timeouts: 0,
        });
        self.stage = Stage::Writing;
        Some(self.write(now))
    }

    /// Whether a transaction is being written.
    pub(super) fn is_writing(&self) -> bool {
        matches!(self.stage, Stage::Writing | Stage::Waiting)
    }

    /// The outputs of the transaction to write.
    pub(super) fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.batch.outputs)
    }

    /// What is written about their positions.
    pub(super) fn follow_up(&self) -> Option<FollowUp> {
        self.batch.follow_up.clone()
    }

    /// Returns the outputs of the transaction that was written.
    pub(super) fn put_outputs(&mut self, outputs: Vec<Output>) {
        self.batch.outputs = outputs;
    }

    /// The positions that the transaction commits.
    pub(super) fn commits(&self) -> &[Commit] {
        self.unwritten
            .as_ref()
            .map_or(&[], |unwritten| &unwritten.commits)
    }

    /// The result of the transaction, with the ends of the changelog if everything was delivered.
    ///
    /// # Errors
    /// If another process uses the same instance name, or the changelog has lost records.
    pub(super) fn written(
        &mut self,
        now: Instant,
        result: Result<(), TransactionError>,
        changelog_ends: Vec<(i32, i64)>,
    ) -> Result<(), Ended> {
        self.stage = Stage::Poll;
        let Err(error) = result else {
            return self.committed(now, changelog_ends);
        };
        let is_replaced = match &error.kind {
            FailureKind::Refused(refused) => self.replace_refused(refused, error.action),
            FailureKind::Denied(denied) => self.replace_denied(denied, error.action),
            _ => false,
        };
        if is_replaced {
            return Ok(());
        }
        self.failed(now, &error, changelog_ends)
    }

    fn committed(&mut self, now: Instant, changelog_ends: Vec<(i32, i64)>) -> Result<(), Ended> {
        let Some(Unwritten { commits, .. }) = self.unwritten.take() else {
            return Ok(());
        };
        self.assignments.mark_committed(&commits);
        if !self.recreated.is_empty() {
            for commit in commits {
                self.recreated.remove(&(commit.topic, commit.partition));
            }
        }
        let took = self
            .began
            .map_or(Duration::ZERO, |began| now.duration_since(began));
        self.has_committed = true;
        self.failures.reset();
        if took < self.transaction_timeout / 8 {
            self.batch_limit = (2 * self.batch_limit).min(self.max_batch);
        }
        self.observer
            .committed(self.batch.outputs.len(), self.batch.completed.len(), took);
        self.batch.clear();
        let mut written = Ok(());
        for (partition, end) in changelog_ends {
            written = written.and(self.processor.changelog_written(partition, end));
        }
        self.processor.committed(self.clock.now());
        written.map_err(Ended::Restart)
    }

    /// Lets the processor replace the outputs that their topic refused. The positions stay the same.
    fn replace_refused(&mut self, refused: &[Refused], action: RecoveryAction) -> bool {
        let Some(first) = refused.first() else {
            return false;
        };
        if self.refused_log_throttle.should_log() {
            tracing::warn!(
                lane = self.name,
                records = refused.len(),
                reason = first.failure.message,
                "topic refused records"
            );
        }
        let now = self.clock.now();
        let is_replaced = self.processor.refused(refused, &mut self.batch, now);
        if is_replaced {
            self.observer.transaction_failed(action);
        }
        is_replaced
    }

    /// Lets the processor replace the outputs to topics that this process may not write to. If the broker has denied all partitions, the client cannot abort
    /// a transaction that the broker does not know, and has to be replaced.
    fn replace_denied(&mut self, denied: &[Refused], action: RecoveryAction) -> bool {
        let is_recoverable = matches!(action, RecoveryAction::Abort | RecoveryAction::Rebuild);
        let now = self.clock.now();
        let is_replaced =
            is_recoverable && !denied.is_empty() && self.processor.denied(denied, &mut self.batch, now);
        if is_replaced {
            self.observer.transaction_failed(action);
            self.has_producers &= action == RecoveryAction::Abort;
        }
        is_replaced
    }

    fn failed(
        &mut self,
        now: Instant,
        error: &TransactionError,
        changelog_ends: Vec<(i32, i64)>,
    ) -> Result<(), Ended> {
        let reason = error_chain(error);
        if self.failures.record(now) {
            tracing::warn!(
                lane = self.name,
                error = reason,
                in_a_row = self.failures.count,
                "transaction failed"
            );
        } else {
            tracing::debug!(lane = self.name, error = reason, "transaction failed again");
        }
        if self.failures.are_repeated(now) {
            self.waiting(&reason);
        }
        self.observer.transaction_failed(error.action);
        if error.action != RecoveryAction::Abort {
            self.has_producers = false;
        }
        if matches!(error.kind, FailureKind::TimedOut | FailureKind::Unavailable) {
            self.batch_limit = (self.batch_limit / 2).max(MIN_BATCH.min(self.max_batch));
        }
        let Some(unwritten) = &mut self.unwritten else {
            return Ok(());
        };
        match &error.kind {
            // The first retry comes at once, with the same batch.
            FailureKind::Aborted if self.failures.count == 1 => {}
            // What is kept would be written whenever that becomes possible, whatever the processor thinks of it by then.
            FailureKind::Aborted => {
                self.give_back();
            }
            // Another permission is missing.
            FailureKind::Denied(denied) if denied.is_empty() => {
                self.give_back();
            }
            FailureKind::Unknown => {
                unwritten.unknown = Some(Unknown {
                    lookup: None,
                    changelog_ends,
                });
            }
            FailureKind::TimedOut => {
                unwritten.timeouts += 1;
                let size = self.batch.outputs.len().max(self.batch.completed.len());
                let must_shrink = unwritten.timeouts >= MAX_TIMEOUTS && size > MIN_BATCH;
                if !self.give_back() && must_shrink {
                    self.drop_batch();
                }
            }
            // The processor finishes the records again without those for topics that are unavailable.
            FailureKind::Unavailable | FailureKind::Denied(_) => {
                if !self.give_back() {
                    self.drop_batch();
                }
            }
            // The processor could not replace the outputs, so the batch may be incomplete.
            FailureKind::Refused(_) => self.drop_batch(),
        }
        if error.action == RecoveryAction::Fenced {
            self.fenced(now)?;
        }
        Ok(())
    }

    /// Returns the batch of an aborted transaction to the processor, if that can finish its records again.
    fn give_back(&mut self) -> bool {
        if !self.processor.take_back(&mut self.batch) {
            return false;
        }
        if let Some(unwritten) = self.unwritten.take() {
            if mutant!("lane-keeps-aborted-completions") {
                self.assignments.end_batch();
            }
            self.assignments.roll_back(&unwritten.commits);
        }
        self.batch.clear();
        true
    }

    /// Gives up the batch. All partitions are read again from their committed positions.
    fn drop_batch(&mut self) {
        self.batch.clear();
        self.unwritten = None;
        self.processor.aborted();
        self.rewind();
    }

    /// Records may have been missed, or another member may have processed them: all partitions are read again from their
    /// committed positions.
    pub(super) fn read_again(&mut self) {
        if mutant!("lane-trusts-a-previous-membership") {
            return;
        }
        if self.unwritten.is_some() {
            self.drop_batch();
        } else {
            self.rewind();
        }
    }

    fn rewind(&mut self) {
        self.starting.clear();
        for slot in self.assignments.slots() {
            if let Some(id) = self.assignments.rewind(slot) {
                self.processor.revoked(id);
            }
        }
        tracing::debug!(lane = self.name, "reading again from the committed offsets");
    }

    /// Counts that another process has fenced the lane.
    ///
    /// # Errors
    /// If that happens repeatedly.
    pub(super) fn fenced(&mut self, now: Instant) -> Result<(), Ended> {
        self.fences
            .retain(|then| now.duration_since(*then) < FENCE_WINDOW);
        self.fences.push(now);
        if self.fences.len() < FENCE_LIMIT {
            return Ok(());
        }
        Err(Ended::Fatal(LaneError::InstanceInUse {
            lane: self.name.clone(),
            instance: self.instance.clone(),
        }))
    }

    /// The producers are initialised: neither has an open transaction.
    pub(super) fn producers_ready(&mut self) {
        self.has_producers = true;
    }

    /// Partitions were assigned to the lane.
    pub(super) fn assigned(&mut self, partitions: impl IntoIterator<Item = Partition>) {
        // A transaction with an outdated generation of the group may have failed until now.
        self.failures.end_pause();
        for (topic, partition) in partitions {
            self.assignments.add(topic, partition);
        }
    }

    /// Partitions were revoked. From here on, the next owner may process their records.
    pub(super) fn revoked(&mut self, partitions: &[(String, i32)]) {
        self.failures.end_pause();
        let is_revoked = |topic: &str, partition: i32| {
            partitions
                .iter()
                .any(|(name, number)| **name == *topic && *number == partition)
        };
        let commits = self.commits().iter();
        let is_in_batch = commits
            .into_iter()
            .any(|commit| is_revoked(&commit.topic, commit.partition));
        // After an unknown outcome, the records may have been completed, so the processor must not finish them again.
        let is_unknown = self.is_unknown() && !mutant!("lane-finishes-unknown-results-again");
        let must_drop = is_in_batch && (is_unknown || !self.give_back());
        self.starting
            .retain(|start| !is_revoked(&start.topic, start.partition));
        for (topic, partition) in partitions {
            if let Some(slot) = self.assignments.find(topic, *partition) {
                let removed = self.drop_partition(slot);
                // From here on the next owner may commit positions of the new topic, also without a fingerprint.
                if let Some(partition) = removed {
                    self.recreated.remove(&partition);
                }
            }
        }
        if must_drop && !mutant!("lane-writes-after-a-revocation") {
            self.drop_batch();
        }
        self.report_assigned();
    }

    fn drop_partition(&mut self, slot: usize) -> Option<Partition> {
        let assigned = self.assignments.remove(slot)?;
        if let Some(id) = assigned.id() {
            self.processor.revoked(id);
        }
        self.observer.lag(&assigned.topic, assigned.partition, None);
        Some((assigned.topic, assigned.partition))
    }

    fn report_assigned(&self) {
        self.observer.assigned(self.assignments.iter().count());
    }

    /// The answer to a lookup.
    ///
    /// # Errors
    /// If a topic was deleted and created again, or the changelog has lost records.
    pub(super) fn found(&mut self, now: Instant, found: Found) -> Result<(), Ended> {
        if found.is_answered {
            self.unanswered_since = None;
        } else {
            self.unanswered_since.get_or_insert(now);
        }
        let unknown = self
            .unwritten
            .as_ref()
            .and_then(|unwritten| unwritten.unknown.as_ref());
        if unknown.is_some_and(|unknown| unknown.lookup == Some(found.number)) {
            return self.resolve(now, &found);
        }
        for ((topic, partition), position) in found.positions {
            let Some(slot) = self.assignments.end_lookup(found.number, &topic, partition) else {
                continue;
            };
            match position {
                Ok(position) => {
                    let start = self.start(slot, position)?;
                    self.starting.extend(start);
                }
                Err(reason) => self.look_up_later(now, &reason),
            }
        }
        Ok(())
    }

    fn look_up_later(&mut self, now: Instant, reason: &str) {
        self.next_lookup = Some(now + ROUND);
        self.waiting(reason);
    }

    /// Decides what became of a transaction of unknown outcome.
    fn resolve(&mut self, now: Instant, found: &Found) -> Result<(), Ended> {
        let Some(unwritten) = &mut self.unwritten else {
            return Ok(());
        };
        let failed = found
            .positions
            .iter()
            .find_map(|(_, position)| position.as_ref().err());
        if let Some(reason) = failed {
            if let Some(unknown) = &mut unwritten.unknown {
                unknown.lookup = None;
            }
            self.look_up_later(now, reason);
            return Ok(());
        }
        let stored = |commit: &Commit| {
            let mut positions = found.positions.iter();
            let position = positions
                .find(|((topic, partition), _)| **topic == *commit.topic && *partition == commit.partition);
            position.and_then(|(_, position)| position.as_ref().ok().map(|found| &found.stored))
        };
        let resolution = resolve(&unwritten.commits, stored);
        tracing::debug!(
            lane = self.name,
            ?resolution,
            "transaction of unknown outcome resolved"
        );
        match resolution {
            Resolution::Committed => {
                let unknown = unwritten.unknown.take();
                return self.committed(
                    now,
                    unknown.map(|unknown| unknown.changelog_ends).unwrap_or_default(),
                );
            }
            Resolution::Aborted => unwritten.unknown = None,
            Resolution::Undecided => self.drop_batch(),
        }
        Ok(())
    }

    /// Decides where to start a partition.
    fn start(&mut self, slot: usize, found: FoundPosition) -> Result<Option<Start>, Ended> {
        let Some(assigned) = self.assignments.get(slot) else {
            return Ok(None);
        };
        let (topic, partition, is_fetched) =
            (assigned.topic.clone(), assigned.partition, assigned.is_fetched);
        let has_changed = |known| found.topic_id.is_some_and(|now| now != known);
        if is_fetched && assigned.topic_id.is_some_and(has_changed) {
            return Err(self.recreated(&topic));
        }
        let mut position = found.stored.decode();
        let is_deleted = |committed: &Committed| {
            // A commit without a fingerprint is treated as one of the old topic until this lane has committed a position of
            // the new one, which removes the partition from `recreated`.
            committed.is_of_another(found.topic_id.map(TopicFingerprint::of))
                || committed.topic.is_none() && self.recreated.contains(&(topic.clone(), partition))
        };
        if let Some(committed) = position.take_if(|committed| is_deleted(committed)) {
            if is_fetched {
                return Err(self.recreated(&topic));
            }
            if let ended @ Ended::Halted(_) = self.ended_by_recreation(&topic) {
                return Err(ended);
            }
            tracing::warn!(
                topic = &*topic,
                partition,
                committed = committed.offset,
                "committed offset belongs to a deleted topic; reading the new topic from its beginning"
            );
        }
        Ok(Some(Start {
            slot,
            topic,
            partition,
            is_fetched,
            position,
            found,
        }))
    }

    /// The client fetches these partitions from their positions.
    pub(super) fn started(&mut self, starts: Vec<Start>) {
        self.failed_starts = 0;
        for start in starts {
            let Start {
                slot,
                topic,
                partition,
                is_fetched,
                position,
                found: FoundPosition { topic_id, stored },
            } = start;
            let lacks_fingerprint = position.as_ref().is_some_and(|position| position.topic.is_none());
            let position = position.unwrap_or_else(Committed::start);
            // Without a committed position, the lane reads from the beginning.
            let offset = position.offset.max(0);
            let completed_to = position
                .completed
                .ranges()
                .last()
                .map_or(offset, |range| range.end);
            let Some(id) = self.assignments.start(slot, topic_id, position, stored) else {
                continue;
            };
            self.processor.assigned(id, &topic, partition);
            self.processor.reads_topic(id, topic_id);
            self.processor.starts_at(id, offset);
            self.processor.completed_to(id, completed_to);
            // Add the fingerprint with the next transaction, so that the topic can be recognised from then on.
            if lacks_fingerprint && topic_id.is_some() && !is_fetched {
                self.assignments.commit_soon(slot);
            }
        }
        self.report_assigned();
    }

    /// The client could not start a partition that it fetches, for example because it was assigned a moment ago. Its
    /// position is looked up again.
    ///
    /// # Errors
    /// If that happens too often.
    pub(super) fn start_failed(&mut self, now: Instant, reason: &str) -> Result<(), Ended> {
        const MAX_FAILED_STARTS: u32 = 50;
        self.failed_starts += 1;
        self.look_up_later(now, &format!("cannot seek to the committed offsets: {reason}"));
        if self.failed_starts > MAX_FAILED_STARTS {
            return Err(Ended::Broken(reason.to_owned()));
        }
        Ok(())
    }

    /// Restarts a partition at an offset and drops its records in flight. The offset is committed with the next transaction:
    /// after a restart, the previous position would skip records written in the meantime, or be out of range again.
    pub(super) fn restart_at(&mut self, slot: usize, offset: i64) {
        let Some(assigned) = self.assignments.get(slot) else {
            return;
        };
        let (topic, partition, topic_id) = (assigned.topic.clone(), assigned.partition, assigned.topic_id);
        let stored = self.assignments.stored(slot).cloned().unwrap_or_default();
        if let Some(id) = self.assignments.rewind(slot) {
            self.processor.revoked(id);
        }
        let started = self
            .assignments
            .start(slot, topic_id, Committed::at(offset), stored);
        if let Some(id) = started {
            self.processor.assigned(id, &topic, partition);
            self.processor.reads_topic(id, topic_id);
            self.processor.starts_at(id, offset);
            self.assignments.commit_soon(slot);
        }
    }

    /// Handles a topic that was deleted and created again. The records in flight belong to the old topic, so their offsets
    /// must not be committed.
    pub(super) fn recreated(&mut self, topic: &str) -> Ended {
        for assigned in self
            .assignments
            .iter()
            .filter(|assigned| *assigned.topic == *topic)
        {
            let in_flight = assigned.in_flight();
            tracing::error!(
                topic,
                partition = assigned.partition,
                in_flight,
                position = assigned.tracker().and_then(OffsetTracker::position),
                "topic was deleted and created again; dropping records in flight of the old topic"
            );
            self.observer.recreated(topic, assigned.partition, in_flight);
        }
        self.recreated.extend(self.assignments.partitions_of(topic));
        self.ended_by_recreation(topic)
    }

    /// Handles a topic that did not exist when it was assigned and exists now. Committed offsets may belong to an older
    /// topic of the same name.
    pub(super) fn exists_again(&mut self, topic: &str) -> Ended {
        self.recreated.extend(self.assignments.partitions_of(topic));
        Ended::Restart(format!("topic `{topic}` exists again"))
    }

    pub(super) fn ended_by_recreation(&self, topic: &str) -> Ended {
        match self.if_recreated {
            IfRecreated::ReadFromBeginning => {
                Ended::Restart(format!("topic `{topic}` was deleted and created again"))
            }
            IfRecreated::Halt => Ended::Halted(format!(
                "topic `{topic}` was deleted and created again, but other data refers to the offsets of the old topic; to continue with \
                 the new topic from its beginning, stop all processes of group `{group}`, delete the group's offsets of \
                 the topic (kafka-consumer-groups.sh --delete-offsets --group {group} --topic {topic}), and start them again",
                group = self.group
            )),
        }
    }

    /// Whether the partition may admit one more record.
    pub(super) fn may_admit(&self, slot: usize) -> bool {
        let Some((id, tracker)) = self.assignments.reading(slot) else {
            return false;
        };
        // Checked for each record, since the processor's limit may be in bytes.
        if self.processor.capacity(id) == 0 {
            return false;
        }
        // Beyond this limit, the completed set might not fit into the metadata of the commit, and the records in it would be
        // processed again after a restart.
        if self.assignments.may_admit(slot) {
            return true;
        }
        if let (Some(offset), Some(assigned)) = (tracker.blocked_by(), self.assignments.get(slot)) {
            self.observer.blocked(&assigned.topic, assigned.partition, offset);
        }
        false
    }

    /// Admits a record that was read.
    pub(super) fn observe(
        &mut self,
        slot: usize,
        offset: i64,
        now: Timestamp,
        record: impl FnOnce(&Arc<str>) -> Record,
    ) {
        if let Some((id, topic, Admission::New)) = self.assignments.observe(slot, offset) {
            let record = record(topic);
            self.processor.accept(id, record, now);
            self.has_admitted = true;
            self.admitted += 1;
        }
    }

    /// All records of a partition before this offset were read.
    pub(super) fn reached_end(&mut self, slot: usize, offset: i64) {
        if let Some((id, _)) = self.assignments.reading(slot) {
            self.processor.reached_end(id, offset);
        }
    }

    /// The admitted records may belong to another topic than the assigned one. They are not processed in this round.
    pub(super) fn unverified(&mut self, reason: &str) {
        self.stage = Stage::Poll;
        self.waiting(reason);
    }

    /// The lane is not ready, for this reason.
    pub(super) fn waiting(&mut self, reason: &str) {
        self.is_ready = false;
        self.observer.waiting(reason);
    }

    pub(super) fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Whether nothing in the state of the lane keeps it from being ready.
    pub(super) fn is_healthy(&self, now: Instant) -> bool {
        self.has_producers
            && !self.is_unknown()
            && !self.failures.are_repeated(now)
            && self.assignments.are_all_read()
    }

    pub(super) fn ready(&mut self) {
        self.is_ready = true;
        self.observer.ready();
        tracing::info!(lane = self.name, group = self.group, "lane is ready");
    }

    /// Whether all work is finished or the grace period is over.
    fn is_finished_stopping(&self, now: Instant) -> bool {
        self.stopping_since.is_some() && !self.processor.is_busy() && self.unwritten.is_none()
            || self.is_grace_over(now)
    }

    fn is_grace_over(&self, now: Instant) -> bool {
        let is_over = self
            .stopping_since
            .is_some_and(|since| now.duration_since(since) >= self.grace);
        if is_over {
            if self.is_writing() {
                tracing::warn!(
                    lane = self.name,
                    "grace period over with a transaction being written; the next process resolves it"
                );
            } else {
                tracing::warn!(
                    lane = self.name,
                    "grace period over with records in flight; they will be processed again after a restart"
                );
            }
        }
        is_over
    }

    pub(super) fn observer(&self) -> &dyn LaneObserver {
        &*self.observer
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    #[cfg(test)]
    pub(super) fn processor(&mut self) -> &mut P {
        &mut self.processor
    }
}
