//! What operators want done with single waiting records, see `docs/adr/0057-actions-on-single-waiting-records.md`.
//!
//! A record of the look-ahead is completed as a released one. One beyond it is looked up, and its offset remembered until the lane gets there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use redeliver_core::content::{ContentHash, content_hash};
use redeliver_core::{Failure, Output, Position, Record, Timestamp, headers, mutant, route};
use redeliver_kafka::lookup::Found;
use redeliver_kafka::{AssignmentId, Delivered, FollowUp, TopicId, TransactionBatch};
use redeliver_service::audit::{self, AuditEntry, AuditLog, MAX_IDS};
use redeliver_service::waiting_actions::{
    Action, Actions, Done, Request, TierPartition, WaitingActionState as State, WaitingActions,
};

use super::{Completion, InTransaction, Partition, Relay, TierTopic, forward, has_passed, read_time_lock};
use crate::lookups::{Inbox, Question};
use crate::waiting::Waiting;

/// A request that cannot be carried out now is looked at again after this time: that reads the whole look-ahead.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How many records are looked up at a time.
const LOOKUP: usize = 500;
/// Actions have this part of a transaction, so that they do not delay what is due.
const SHARE: usize = 4;
/// Retries whose return topic is unavailable, or whose rate allows none, are left out for this time at most. It is longer than [`LOOK_INTERVAL`], so
/// that other actions have their turn.
const RETRY_PAUSE: Duration = Duration::from_secs(3);
/// How long requests about another topic of the same name are known before they are void: by then, a lane that reads the previous topic has noticed
/// it. It is longer than the interval of the topic watch.
pub(super) const VOID_AFTER: Duration = Duration::from_secs(10);

/// The current id of a topic, if it is known.
pub(crate) type IdOf = Box<dyn Fn(&str) -> Option<TopicId> + Send>;

/// What acting on records needs of the process.
pub(crate) struct ActionContext {
    pub(crate) actions: Actions,
    /// Their topic.
    pub(crate) topic: Arc<str>,
    pub(crate) audit: AuditLog,
    /// The id of a topic now, as far as it is known. Does not block.
    pub(crate) id_of: IdOf,
    /// Does not block. Returns whether there will be an answer.
    pub(crate) ask: Box<dyn Fn(Question) -> bool + Send>,
}

/// The state of all partitions of a relay.
pub(super) struct Acting {
    pub(super) context: ActionContext,
    /// What the partitions know.
    seen: Option<Arc<WaitingActions>>,
    pub(super) inbox: Inbox,
    /// The outcomes in the transaction that is being written.
    pub(super) marks: Vec<Mark>,
    /// Other topics of the same names with requests, and since when they are known.
    others: BTreeMap<TierPartition, Timestamp>,
    /// Records of previous topics whose requests this lane has found to be void.
    void: BTreeSet<(TierPartition, i64)>,
}

impl Acting {
    pub(super) fn new(context: ActionContext) -> Self {
        Self {
            context,
            seen: None,
            inbox: Inbox::default(),
            marks: Vec::new(),
            others: BTreeMap::new(),
            void: BTreeSet::new(),
        }
    }
}

/// What fits into the transaction.
struct Room {
    records: usize,
    bytes: usize,
}

impl Room {
    fn is_empty(&self) -> bool {
        self.records == 0 || self.bytes == 0
    }
}

/// The outcome of a record.
#[derive(Clone)]
pub(super) struct Mark {
    assignment: AssignmentId,
    of: TierPartition,
    offset: i64,
    request: Arc<Request>,
    state: State,
    problem: String,
    /// The output that replaces the record, and its topic.
    written: Option<(usize, Arc<str>)>,
    /// The hash of the record, if it is replaced.
    content: Option<ContentHash>,
}

/// A record that an output of the transaction replaces.
pub(super) struct Acted {
    waiting: Waiting,
    /// Whether it is beyond the look-ahead.
    is_ahead: bool,
    /// Its number in [`Acting::marks`].
    mark: usize,
}

/// A record to act on.
struct Ready {
    waiting: Waiting,
    /// Whether it is beyond the look-ahead.
    is_ahead: bool,
    content: ContentHash,
}

/// Records with requests that are not here any more. An outcome that a previous owner has written just before says more than that, so the topic of
/// actions is read again before they are gone.
struct Missing {
    offsets: BTreeSet<i64>,
    since: Instant,
    /// Whether it was read since.
    is_confirmed: bool,
}

/// What a partition knows.
pub(super) struct Acts {
    /// Since when previous owners can no longer act on records.
    since: Instant,
    /// Whether it is known what they did. Until then, no record is accepted.
    pub(super) are_known: bool,
    /// The offset after the last record that was read.
    read_to: i64,
    /// From here on, certainly no record is completed.
    ahead_from: i64,
    /// Records that were acted on before they are read, also in the transaction that is being written, with their hashes if those are known.
    ahead: BTreeMap<i64, Option<ContentHash>>,
    /// Those of them that were read since, and those that the transaction completes.
    skipped: Vec<i64>,
    skipping: Vec<i64>,
    /// What is to be done.
    pending: BTreeMap<i64, Arc<Request>>,
    /// Outcomes of this lane that it may not have read back yet.
    own: BTreeSet<i64>,
    missing: Option<Missing>,
    /// From when on retries are possible again.
    retries_from: Option<Timestamp>,
    found: BTreeMap<i64, Found>,
    is_asking: bool,
    last_look: Option<Timestamp>,
}

impl Acts {
    pub(super) fn new() -> Self {
        Self {
            since: Instant::now(),
            are_known: false,
            read_to: 0,
            ahead_from: 0,
            ahead: BTreeMap::new(),
            skipped: Vec::new(),
            skipping: Vec::new(),
            pending: BTreeMap::new(),
            own: BTreeSet::new(),
            missing: None,
            retries_from: None,
            found: BTreeMap::new(),
            is_asking: false,
            last_look: None,
        }
    }

    /// All records before this offset were read, or are completed.
    pub(super) fn has_read_to(&mut self, offset: i64) {
        self.read_to = self.read_to.max(offset);
    }

    /// Some records before this offset may be completed.
    pub(super) fn may_be_completed_to(&mut self, offset: i64) {
        self.ahead_from = offset;
    }

    /// Takes note of a record that was read. Returns whether it was acted on before.
    pub(super) fn skips(&mut self, record: &Record) -> bool {
        let Position {
            topic,
            partition,
            offset,
        } = &record.position;
        self.has_read_to(offset + 1);
        let Some(known) = self.ahead.get(offset) else {
            return false;
        };
        if known.is_some_and(|known| known != hash(record)) {
            tracing::error!(
                topic = &**topic,
                partition,
                offset,
                "another record was acted on at this offset, so Kafka has lost records; this one waits"
            );
            self.ahead.remove(offset);
            return false;
        }
        if mutant!("relay-repeats-what-was-acted-on") {
            return false;
        }
        self.skipped.push(*offset);
        true
    }

    fn follow(&mut self, state: &WaitingActions, of: &TierPartition) {
        // Without an id, the records may be those of another topic.
        let known = state.of_partition(of).filter(|_| of.topic_id.is_some());
        if !self.are_known {
            let done = known.iter().flat_map(|known| known.done.range(self.read_to..));
            self.ahead = done
                .filter(|(_, done)| done.moved)
                .map(|(offset, done)| (*offset, ContentHash::try_from(&*done.content_hash).ok()))
                .collect();
            self.are_known = true;
        }
        self.pending = known.map(|known| known.pending.clone()).unwrap_or_default();
        self.own.retain(|offset| self.pending.contains_key(offset));
        self.pending.retain(|offset, _| !self.own.contains(offset));
        self.found.retain(|offset, _| self.pending.contains_key(offset));
        self.last_look = None;
    }

    /// Looks whether the topic was read again. The state is to be read after this.
    fn confirm_missing(&mut self, actions: &Actions) {
        let missing = self.missing.as_mut().filter(|missing| !missing.is_confirmed);
        if let Some(missing) = missing.filter(|missing| actions.are_known_since(missing.since)) {
            missing.is_confirmed = true;
            self.last_look = None;
        }
    }

    /// Those of these records, which are not here, that are certainly gone: `limit` at most.
    fn take_gone(&mut self, mut absent: BTreeSet<i64>, limit: usize) -> Vec<i64> {
        let confirmed = self.missing.take_if(|missing| missing.is_confirmed);
        let confirmed = confirmed.map(|missing| missing.offsets).unwrap_or_default();
        let gone: Vec<i64> = confirmed.intersection(&absent).take(limit).copied().collect();
        for offset in &gone {
            absent.remove(offset);
        }
        if self.missing.is_none() && !absent.is_empty() {
            self.missing = Some(Missing {
                offsets: absent,
                since: Instant::now(),
                is_confirmed: false,
            });
        }
        gone
    }

    /// Whether retries need not wait for their rate or topic. The clock may have been set back.
    fn may_retry(&self, now: Timestamp) -> bool {
        self.retries_from
            .is_none_or(|from| from <= now || from > now.after(RETRY_PAUSE))
    }

    fn has_work(&mut self, now: Timestamp) -> bool {
        !self.pending.is_empty()
            && (has_passed(&mut self.last_look, LOOK_INTERVAL, now) || !self.found.is_empty())
    }

    /// The first records beyond the look-ahead, if they have to be looked up.
    fn unread(&self, of: &TierPartition, is_wanted: impl Fn(&Request) -> bool) -> Vec<Position> {
        if self.is_asking || !self.found.is_empty() {
            return Vec::new();
        }
        let ahead = self.pending.range(self.read_to.max(self.ahead_from)..);
        let wanted = ahead.filter(|(_, request)| is_wanted(request)).take(LOOKUP);
        let positions = wanted.map(|(offset, _)| Position {
            topic: of.topic.clone(),
            partition: of.partition,
            offset: *offset,
        });
        positions.collect()
    }

    /// Forgets an outcome that was not written. Returns whether the record was read meanwhile.
    fn take_back(&mut self, offset: i64) -> bool {
        self.own.remove(&offset);
        self.ahead.remove(&offset);
        let read = self.skipped.iter().position(|skipped| *skipped == offset);
        read.map(|index| self.skipped.swap_remove(index)).is_some()
    }
}

impl Partition {
    fn of_tier(&self) -> TierPartition {
        TierPartition {
            topic: self.topic.name.clone(),
            partition: self.number,
            topic_id: self.topic_id,
        }
    }
}

impl Acting {
    /// Decides that a record has this outcome.
    fn mark(
        &mut self,
        (assignment, of): (AssignmentId, &TierPartition),
        acts: &mut Acts,
        offset: i64,
        state: State,
        problem: &str,
    ) {
        let Some(request) = acts.pending.remove(&offset) else {
            return;
        };
        acts.own.insert(offset);
        self.marks.push(Mark {
            assignment,
            of: of.clone(),
            offset,
            request,
            state,
            problem: problem.to_owned(),
            written: None,
            content: None,
        });
    }

    /// Decides that a record is gone, if there is room.
    fn mark_gone(
        &mut self,
        owner: (AssignmentId, &TierPartition),
        acts: &mut Acts,
        offset: i64,
        problem: &str,
        room: &mut Room,
    ) {
        if room.records > 0 {
            room.records -= 1;
            self.mark(owner, acts, offset, State::Gone, problem);
        }
    }

    /// Requests about previous topics of the same name are void. If this lane is the one that reads a previous topic, they are not.
    fn mark_void(&mut self, assignment: AssignmentId, own: &TierPartition, now: Timestamp, room: &mut Room) {
        let Some(state) = self.seen.clone() else { return };
        for (of, actions) in state.previous(own) {
            if actions.pending.is_empty() {
                continue;
            }
            let since = self.others.entry(of.clone()).or_insert(now);
            // The clock may have been set back.
            *since = now.min(*since);
            if now.since(*since) < VOID_AFTER || (self.context.id_of)(&own.topic) != own.topic_id {
                continue;
            }
            for (offset, request) in &actions.pending {
                if room.records > 0 && self.void.insert((of.clone(), *offset)) {
                    room.records -= 1;
                    self.marks.push(Mark {
                        assignment,
                        of: of.clone(),
                        offset: *offset,
                        request: request.clone(),
                        state: State::Void,
                        problem: "the topic was created again".to_owned(),
                        written: None,
                        content: None,
                    });
                }
            }
        }
    }
}

impl Relay {
    /// Takes note of what is to be done, and of what was looked up.
    pub(super) fn follow_actions(&mut self) {
        let Self {
            acting, partitions, ..
        } = self;
        let actions = &acting.context.actions;
        for partition in partitions.values_mut() {
            partition.acts.confirm_missing(actions);
        }
        let state = actions.state();
        let has_changed = acting.seen.as_ref().is_none_or(|seen| !Arc::ptr_eq(seen, &state));
        for partition in partitions.values_mut() {
            let of = partition.of_tier();
            if partition.acts.are_known {
                if has_changed {
                    partition.acts.follow(&state, &of);
                }
            } else if actions.are_known_since(partition.acts.since) {
                partition.acts.follow(&actions.state(), &of);
            }
        }
        acting.seen = Some(state);
        let answers = std::mem::take(&mut *acting.inbox.lock().unwrap_or_else(PoisonError::into_inner));
        for answer in answers {
            if let Some(partition) = partitions.get_mut(&answer.assignment) {
                partition.acts.is_asking = false;
                partition.acts.found.extend(answer.found);
            }
        }
    }

    /// Acts on records. Other records have most of the transaction. Returns the size of what it writes.
    pub(super) fn act(&mut self, now: Timestamp, limit: usize, batch: &mut TransactionBatch) -> usize {
        if self.acting.seen.as_ref().is_none_or(|seen| seen.is_empty()) {
            return 0;
        }
        let context = &self.acting.context;
        let topics = [&context.topic, context.audit.topic()];
        if topics
            .into_iter()
            .any(|topic| (self.presence)(topic).is_unavailable())
        {
            return 0;
        }
        let mut room = Room {
            records: limit.div_ceil(SHARE),
            bytes: TransactionBatch::BYTES / SHARE,
        };
        let before = room.bytes;
        let order = self.order.clone();
        for step in 0..order.len() {
            if room.is_empty() {
                break;
            }
            // As in `finish`: each call starts with another partition.
            let assignment = order[(self.next + step) % order.len()];
            let Some(mut partition) = self.partitions.remove(&assignment) else {
                continue;
            };
            if partition.acts.are_known {
                self.acting
                    .mark_void(assignment, &partition.of_tier(), now, &mut room);
                if partition.acts.has_work(now) {
                    self.act_on(assignment, &mut partition, now, &mut room, batch);
                }
            }
            self.partitions.insert(assignment, partition);
        }
        batch
            .owners
            .extend(self.acting.marks.iter().map(|mark| mark.assignment));
        batch.owners.sort_unstable();
        batch.owners.dedup();
        self.set_follow_up(batch, now);
        before - room.bytes
    }

    fn act_on(
        &mut self,
        assignment: AssignmentId,
        partition: &mut Partition,
        now: Timestamp,
        room: &mut Room,
        batch: &mut TransactionBatch,
    ) {
        let Self {
            acting,
            presence,
            partitions_of,
            controls,
            in_transaction,
            ..
        } = self;
        let (presence, partitions_of) = (&*presence, &*partitions_of);
        let of = partition.of_tier();
        let Partition {
            topic, waiting, acts, ..
        } = partition;
        let owner = (assignment, &of);
        let is_paused = controls.state(topic.number).is_paused;
        let is_open = |topic: &str| !presence(topic).is_unavailable();
        let may_bury = is_open(&topic.served.pipeline.dead_letter_topic());
        let may_edit = is_open(&topic.name);
        let may = |request: &Request, may_retry: bool| match request.action() {
            Action::Retry => may_retry && !is_paused,
            Action::Dead => may_bury,
            Action::Edit => may_edit,
        };
        let (is_answered, marks) = (!acts.found.is_empty(), acting.marks.len());
        let near = acts.pending.range(..acts.read_to);
        let near: BTreeSet<i64> = near.map(|(offset, _)| *offset).collect();
        let mut is_near = !near.is_empty();
        if is_near {
            let held = waiting.offsets().filter(|offset| near.contains(offset)).collect();
            let absent = near.difference(&held).copied().collect();
            for offset in acts.take_gone(absent, room.records) {
                acting.mark_gone(owner, acts, offset, "", room);
            }
            is_near = !room.is_empty();
        }
        let mut ahead = Vec::new();
        for (offset, found) in std::mem::take(&mut acts.found) {
            if offset < acts.read_to || !acts.pending.contains_key(&offset) {
                continue;
            }
            match found {
                Found::Record(stored) => {
                    let mut record = stored.record;
                    let content = hash(&record);
                    match read_time_lock(&topic.served, &mut record, now) {
                        Ok((due, return_topic)) => ahead.push(Ready {
                            waiting: Waiting {
                                due,
                                return_topic,
                                record,
                                released: None,
                            },
                            is_ahead: true,
                            content,
                        }),
                        Err(failure) => acting.mark_gone(owner, acts, offset, &failure.message, room),
                    }
                }
                Found::Deleted | Found::Compacted => acting.mark_gone(owner, acts, offset, "", room),
                // The broker has not got there yet, or the lane is about to notice that the topic is another one.
                Found::Unknown => {}
            }
        }
        let mut ahead = Some(ahead);
        loop {
            let may_retry = acts.may_retry(now);
            let ready = if is_near {
                let is_taken = |waiting: &Waiting| {
                    let request = acts.pending.get(&waiting.record.position.offset);
                    request.is_some_and(|request| may(request, may_retry && is_open(&waiting.return_topic)))
                };
                let taken = waiting.take(room.records, room.bytes, is_taken).into_iter();
                let ready = taken.map(|waiting| Ready {
                    content: hash(&waiting.record),
                    waiting,
                    is_ahead: false,
                });
                ready.collect()
            } else if let Some(ahead) = ahead.take() {
                ahead
            } else {
                break;
            };
            for Ready {
                waiting: record,
                is_ahead,
                content,
            } in ready
            {
                let offset = record.record.position.offset;
                let request = acts.pending.get(&offset).filter(|_| !room.is_empty()).cloned();
                let request = request.filter(|request| {
                    let may = may(request, acts.may_retry(now));
                    if !may || request.action() != Action::Retry {
                        return may;
                    }
                    let partitions = || partitions_of(&topic.name);
                    let taken = if is_open(&record.return_topic) {
                        controls.take(topic.number, of.partition, partitions, now)
                    } else {
                        Err(now.after(RETRY_PAUSE))
                    };
                    acts.retries_from = taken.err().map(|from| from.min(now.after(RETRY_PAUSE)));
                    acts.retries_from.is_none()
                });
                let Some(request) = request else {
                    if !is_ahead {
                        waiting.push(record);
                    }
                    continue;
                };
                let (state, output) = written(topic, &request, &record, now);
                room.records -= 1;
                room.bytes = room.bytes.saturating_sub(output.size());
                acting.mark(owner, acts, offset, state, "");
                if let Some(mark) = acting.marks.last_mut() {
                    mark.written = Some((batch.outputs.len(), output.topic.clone()));
                    mark.content = Some(content);
                }
                if is_ahead {
                    acts.ahead.insert(offset, Some(content));
                } else {
                    batch.completed.push((assignment, offset));
                }
                in_transaction.push(InTransaction {
                    topic: topic.clone(),
                    assignment,
                    offset,
                    completion: Completion::Acted,
                    waited: None,
                    acted: Some(Acted {
                        waiting: record,
                        is_ahead,
                        mark: acting.marks.len() - 1,
                    }),
                });
                batch.outputs.push(output);
            }
            // If retries have to wait from now on, other actions have their turn.
            is_near = is_near && may_retry && !acts.may_retry(now);
        }
        if room.is_empty() {
            // The rest follows with the next transaction.
            acts.last_look = None;
        }
        // What could not be done now is looked up again later.
        if is_answered && acting.marks.len() == marks {
            return;
        }
        let may_retry = acts.may_retry(now);
        let positions = acts.unread(&of, |request| may(request, may_retry));
        if !positions.is_empty() {
            acts.is_asking = (acting.context.ask)(Question {
                assignment,
                positions,
                inbox: acting.inbox.clone(),
            });
        }
    }

    /// Completes the records that were acted on before they were read. They have no output, so they come after all others.
    pub(super) fn complete_skipped(&mut self, batch: &mut TransactionBatch) {
        for (assignment, partition) in &mut self.partitions {
            let acts = &mut partition.acts;
            acts.skipping.append(&mut acts.skipped);
            batch
                .completed
                .extend(acts.skipping.iter().map(|offset| (*assignment, *offset)));
        }
    }

    /// The outcomes are written with the positions of the outputs, in the same transaction.
    pub(super) fn set_follow_up(&self, batch: &mut TransactionBatch, now: Timestamp) {
        let Acting { context, marks, .. } = &self.acting;
        if marks.is_empty() {
            return;
        }
        let (marks, topic, audit) = (marks.clone(), context.topic.clone(), context.audit.clone());
        batch.follow_up = Some(FollowUp::new(move |delivered| {
            outcomes(&marks, delivered, &topic, &audit, now)
        }));
    }

    /// The topic refuses the output of this record, which waits again, at the end of its tier. Returns false if it is none that an operator wanted, or
    /// the tier refuses it, too.
    pub(super) fn refuse_acted(&mut self, index: usize, output: &mut Output, failure: &Failure) -> bool {
        let written = &mut self.in_transaction[index];
        let Some(acted) = &written.acted else { return false };
        let mark = &mut self.acting.marks[acted.mark];
        if mark.state == State::Refused {
            let dead_letters = written.topic.served.pipeline.dead_letter_topic();
            (mark.state, mark.written) = (State::Dead, Some((index, dead_letters)));
            return false;
        }
        (mark.state, mark.problem) = (State::Refused, failure.message.clone());
        mark.written = Some((index, written.topic.name.clone()));
        *output = forward(acted.waiting.record.clone(), written.topic.name.clone());
        true
    }

    /// The record of an aborted transaction waits again.
    pub(super) fn take_back_acted(&mut self, assignment: AssignmentId, offset: i64, acted: Acted) {
        let Some(partition) = self.partitions.get_mut(&assignment) else {
            return;
        };
        if self.acting.marks[acted.mark].request.action() == Action::Retry {
            self.controls.give_back(partition.topic.number, partition.number);
        }
        let was_read = partition.acts.take_back(offset);
        if !acted.is_ahead || was_read {
            partition.waiting.push(acted.waiting);
        }
    }

    /// Forgets the outcomes of an aborted transaction.
    pub(super) fn take_back_marks(&mut self) {
        for mark in self.acting.marks.drain(..) {
            if let Some(partition) = self.partitions.get_mut(&mark.assignment) {
                partition.acts.own.remove(&mark.offset);
            }
            self.acting.void.remove(&(mark.of, mark.offset));
        }
        for partition in self.partitions.values_mut() {
            partition.acts.skipped.append(&mut partition.acts.skipping);
        }
        // The requests are pending again.
        self.acting.seen = None;
    }

    /// The transaction is given up, and all partitions are read again.
    pub(super) fn forget_marks(&mut self) {
        self.acting.marks.clear();
        self.acting.void.clear();
    }

    /// The outcomes are written.
    pub(super) fn acted(&mut self) {
        self.acting.marks.clear();
        for partition in self.partitions.values_mut() {
            for offset in partition.acts.skipping.drain(..) {
                partition.acts.ahead.remove(&offset);
            }
        }
    }
}

/// The hash of what makes a record the one that was acted on.
pub(super) fn hash(record: &Record) -> ContentHash {
    content_hash(
        record.timestamp,
        record.key.as_deref(),
        record.value.as_deref(),
        &record.headers,
    )
}

/// The outcome of an action that was carried out.
fn acted(action: Action) -> State {
    match action {
        Action::Retry => State::Retried,
        Action::Dead => State::Dead,
        Action::Edit => State::Edited,
    }
}

/// What a request makes of a record.
fn written(topic: &TierTopic, request: &Request, waiting: &Waiting, now: Timestamp) -> (State, Output) {
    let mut record = waiting.record.clone();
    match (request.action(), request.edit()) {
        (Action::Edit, Some(edit)) => (State::Edited, forward(edit.apply(&record), topic.name.clone())),
        (Action::Dead, _) => {
            let failure = route::given_up(&record.headers, request.by(), request.reason());
            (
                State::Dead,
                route::reject(&topic.served.pipeline, &record, &failure, now),
            )
        }
        (Action::Retry | Action::Edit, _) => {
            if waiting.due > now {
                // Its reader refuses a time in the future, such as one of a server whose clock is fast.
                headers::set_process_after(&mut record.headers, request.at().min(now));
            }
            (State::Retried, forward(record, waiting.return_topic.clone()))
        }
    }
}

/// The records of outcomes, and the entries of the audit log about them.
fn outcomes(
    marks: &[Mark],
    delivered: &[Delivered],
    topic: &Arc<str>,
    audit: &AuditLog,
    now: Timestamp,
) -> Vec<Output> {
    let mut outputs = Vec::with_capacity(marks.len() + 1);
    let mut by_request: BTreeMap<&str, Vec<&Mark>> = BTreeMap::new();
    for mark in marks {
        let written = mark.written.as_ref().and_then(|(index, topic)| {
            let (partition, offset) = delivered.get(*index).copied().flatten()?;
            Some(Position {
                topic: topic.clone(),
                partition,
                offset,
            })
        });
        let done = Done {
            request: mark.request.id().to_owned(),
            state: mark.state,
            written,
            problem: mark.problem.clone(),
            is_moved: mark.written.is_some(),
            content: mark.content,
        };
        outputs.push(done.output(topic, &mark.of, mark.offset, now));
        if done.state == acted(mark.request.action()) {
            by_request.entry(mark.request.id()).or_default().push(mark);
        }
    }
    for marks in by_request.values().flat_map(|marks| marks.chunks(MAX_IDS)) {
        let request = &marks[0].request;
        let action = match request.action() {
            Action::Retry => audit::Action::RetryWaiting,
            Action::Dead => audit::Action::BuryWaiting,
            Action::Edit => audit::Action::EditWaiting,
        };
        let ids = marks
            .iter()
            .map(|mark| format!("{}/{}/{}", mark.of.topic, mark.of.partition, mark.offset));
        let entry = AuditEntry {
            target: request.id().to_owned(),
            reason: request.reason().to_owned(),
            count: marks.len() as u64,
            ids: ids.collect(),
            ..AuditEntry::new(request.by(), action)
        };
        outputs.push(audit.record(entry, now));
    }
    outputs
}
