//! A model of a broker, of the other member of the group, and of the lane's clients.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_core::{Failure, Headers, ManualClock, Output, Position, Record, Timestamp};

use super::processor::{ModelProcessor, OWNED};
use super::{Answer, Op, Outcome, PARTITIONS, Random};
use crate::client::KafkaSettings;
use crate::lane::assignments::{Found, FoundPosition, Lookup, StoredCommit};
use crate::lane::state::{LaneState, Step};
use crate::lane::{Ended, IfFenced, IfRecreated, LaneSpec};
use crate::processor::Refused;
use crate::recovery::RecoveryAction;
use crate::tracker::{Admission, Committed, OffsetTracker};
use crate::transaction::{FailureKind, TransactionError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Lane,
    Peer,
}

/// A partition as the broker has it.
struct Partition {
    /// The offsets of its records.
    log: Vec<i64>,
    end: i64,
    stored: StoredCommit,
    owner: Owner,
}

enum GroupEvent {
    Replaced,
    Assigned(Vec<i32>),
    Revoked(Vec<i32>),
}

/// A transaction of the lane.
struct Transaction {
    values: Vec<Vec<u8>>,
    commits: Vec<(i32, StoredCommit)>,
}

pub(super) struct World {
    random: Random,
    start: Instant,
    now: Duration,
    topic: Arc<str>,
    state: LaneState<ModelProcessor>,
    partitions: Vec<Partition>,
    /// The generation of the group, and the one that the lane has learnt by serving events.
    generation: u32,
    known_generation: u32,
    /// Whether the lane is a member of the group.
    is_member: bool,
    events: Vec<GroupEvent>,
    lookups: Vec<(Lookup, Option<Found>)>,
    answer: Answer,
    /// The next offset that the client fetches.
    fetched: BTreeMap<i32, i64>,
    outcomes: Vec<Outcome>,
    /// A transaction that stays open until the producers are initialised, and whether it is committed then.
    open: Option<(Transaction, bool)>,
    fail_init: bool,
    fail_start: bool,
    has_producers: bool,
    /// The outputs of the transaction that is being written, and its result once the broker has decided it.
    outputs: Vec<Output>,
    written_result: Option<Result<(), TransactionError>>,
    is_writing: bool,
    /// Transactions that are being written do not end.
    is_frozen: bool,
    /// How often each value was written by a committed transaction.
    written: BTreeMap<Vec<u8>, u32>,
    /// Something happened that justifies to call the handler again.
    may_call_again: bool,
    pub(super) steps: u64,
    /// The number of sessions that the lane has ended.
    pub(super) ended_sessions: u32,
    /// The number of outputs of each transaction.
    pub(super) sizes: Vec<usize>,
}

fn value(partition: i32, offset: i64) -> Vec<u8> {
    format!("{partition}/{offset}").into_bytes()
}

impl World {
    pub(super) fn new(mut random: Random) -> Self {
        let topic: Arc<str> = "from".into();
        let spec = LaneSpec {
            name: "model".to_owned(),
            group: "model".to_owned(),
            topics: vec![topic.clone()],
            batch: 40,
            grace: Duration::from_secs(10),
            changelog: None,
            if_recreated: IfRecreated::ReadFromBeginning,
            if_fenced: IfFenced::End,
        };
        let processor = ModelProcessor::new(random.below(2) == 0, random.below(2) == 0);
        let mut state = LaneState::new(
            &spec,
            &KafkaSettings::new("", "model"),
            Arc::new(ManualClock::new(Timestamp::from_millis(0))),
            Arc::new(()),
            processor,
        );
        state.begin_session();
        let partitions = (0..PARTITIONS).map(|_| Partition {
            log: Vec::new(),
            end: 0,
            stored: StoredCommit::default(),
            owner: Owner::Peer,
        });
        let mut world = Self {
            random,
            start: Instant::now(),
            now: Duration::ZERO,
            topic,
            state,
            partitions: partitions.collect(),
            generation: 0,
            known_generation: 0,
            is_member: true,
            events: Vec::new(),
            lookups: Vec::new(),
            answer: Answer::AtOnce,
            fetched: BTreeMap::new(),
            outcomes: Vec::new(),
            open: None,
            fail_init: false,
            fail_start: false,
            has_producers: true,
            outputs: Vec::new(),
            written_result: None,
            is_writing: false,
            is_frozen: false,
            written: BTreeMap::new(),
            may_call_again: false,
            steps: 0,
            ended_sessions: 0,
            sizes: Vec::new(),
        };
        world.rebalance(&(0..PARTITIONS).collect());
        world
    }

    /// The time since the beginning.
    pub(super) fn elapsed(&self) -> Duration {
        self.now
    }

    fn now(&self) -> Instant {
        self.start + self.now
    }

    pub(super) fn apply(&mut self, op: Op) -> Result<(), String> {
        let takes_back = self.state.processor().takes_back;
        // A processor that takes nothing back gives up a batch that cannot be written as it is.
        let gives_up = matches!(
            op,
            Op::Outcomes(Outcome::TimedOut | Outcome::Unavailable | Outcome::Denied, _)
        ) && !takes_back;
        self.may_call_again |= op.may_repeat_calls() || gives_up;
        match op {
            Op::Steps(count) => {
                for _ in 0..count {
                    self.step(false)?;
                }
            }
            Op::Produce {
                partition,
                records,
                gap,
            } => {
                let partition = self.partition(partition);
                for _ in 0..records {
                    partition.end += i64::from(gap);
                    partition.log.push(partition.end);
                    partition.end += 1;
                }
            }
            Op::Rebalance(set) => {
                let target = (0..PARTITIONS).filter(|partition| set & (1 << partition) != 0);
                self.rebalance(&target.collect());
            }
            Op::Evict => self.evict(),
            Op::Replace(records) => self.replace(records)?,
            Op::Outcomes(outcome, count) => {
                self.outcomes
                    .extend(std::iter::repeat_n(outcome, usize::from(count)));
            }
            Op::Finish {
                records,
                latest_first,
            } => {
                let processor = self.state.processor();
                processor.finish_attempts(usize::from(records), latest_first);
            }
            Op::Lookups(answer) => self.answer = answer,
            Op::FailInit => self.fail_init = true,
            Op::FailStart => self.fail_start = true,
            Op::PeerWork(records) => self.peer_work(records)?,
            // A session does not end while a transaction is being written.
            Op::Break if self.is_writing => {}
            Op::Break => self.restart_session()?,
            Op::LateResult => self.state.processor().return_late_result(),
            Op::Owner(partition) => self.state.processor().write_as_owner(partition),
            Op::Stop { is_frozen } => self.stop(is_frozen)?,
            Op::Wait(milliseconds) => self.now += Duration::from_millis(milliseconds.into()),
        }
        Ok(())
    }

    pub(super) fn is_writing(&self) -> bool {
        self.is_writing
    }

    /// The lane stops, and another process with the same name begins.
    fn stop(&mut self, is_frozen: bool) -> Result<(), String> {
        self.is_frozen = is_frozen;
        self.until_stopped()?;
        self.is_frozen = false;
        let is_undecided = self.is_writing && self.written_result.take().is_none();
        self.is_writing = false;
        if is_undecided && self.is_current() {
            let is_committed = self.random.below(2) == 0;
            self.open = Some((self.transaction(), is_committed));
        }
        self.restart_session()
    }

    fn until_stopped(&mut self) -> Result<(), String> {
        let mut rounds = 0;
        while self.step(true)? {
            rounds += 1;
            if rounds > 1_000 {
                return Err("the lane does not stop".to_owned());
            }
        }
        Ok(())
    }

    /// Whether the broker accepts offsets of the lane.
    fn is_current(&self) -> bool {
        self.is_member && self.known_generation == self.generation
    }

    fn partition(&mut self, number: i32) -> &mut Partition {
        &mut self.partitions[usize::try_from(number).unwrap()]
    }

    /// The group assigns these partitions to the lane. As in the cooperative protocol, a partition has no other owner before
    /// the lane has served its revocation.
    fn rebalance(&mut self, target: &BTreeSet<i32>) {
        // The group waits until the lane has served the last rebalance.
        if !self.events.is_empty() {
            return;
        }
        self.generation += 1;
        if !self.is_member {
            // The lane was evicted. It joins again and learns that it has lost everything before it gets anything new.
            self.is_member = true;
        }
        let owned =
            |partition: &i32| self.partitions[usize::try_from(*partition).unwrap()].owner == Owner::Lane;
        let revoked: Vec<i32> = (0..PARTITIONS)
            .filter(|p| owned(p) && !target.contains(p))
            .collect();
        let assigned: Vec<i32> = target.iter().copied().filter(|p| !owned(p)).collect();
        for partition in &assigned {
            self.partition(*partition).owner = Owner::Lane;
        }
        self.events.push(GroupEvent::Revoked(revoked));
        self.events.push(GroupEvent::Assigned(assigned));
    }

    /// The lane's session with the group timed out. The peer owns everything at once.
    fn evict(&mut self) {
        self.generation += 1;
        self.is_member = false;
        // What the group had decided before is void, except what the lane has to forget.
        let lost = (0..PARTITIONS).collect();
        for partition in &mut self.partitions {
            partition.owner = Owner::Peer;
        }
        self.events.clear();
        self.events.push(GroupEvent::Revoked(lost));
    }

    fn replace(&mut self, records: u8) -> Result<(), String> {
        if !self.events.is_empty() || !self.is_member {
            return Ok(());
        }
        self.generation += 1;
        let owned: Vec<bool> = self
            .partitions
            .iter()
            .map(|partition| partition.owner == Owner::Lane)
            .collect();
        for partition in &mut self.partitions {
            partition.owner = Owner::Peer;
        }
        self.peer_work(records)?;
        self.generation += 1;
        for (partition, is_owned) in self.partitions.iter_mut().zip(owned) {
            if is_owned {
                partition.owner = Owner::Lane;
            }
        }
        self.events.push(GroupEvent::Replaced);
        Ok(())
    }

    /// One step of the lane.
    fn step(&mut self, is_stopping: bool) -> Result<bool, String> {
        self.steps += 1;
        self.now += Duration::from_millis(1);
        let step = self.state.next(self.now(), is_stopping);
        let result = match step {
            Ok(Step::Stop) => return Ok(false),
            Ok(step) => self.execute(step)?,
            Err(ended) => Err(ended),
        };
        match result {
            Ok(()) => Ok(true),
            // Repeated fencing is fatal in a process; the history then begins another one.
            Err(Ended::Broken(_) | Ended::Fatal(_)) => {
                self.ended_sessions += 1;
                self.restart_session()?;
                Ok(true)
            }
            Err(ended @ (Ended::Restart(_) | Ended::Halted(_))) => Err(format!("unexpected {ended:?}")),
        }
    }

    fn execute(&mut self, step: Step) -> Result<Result<(), Ended>, String> {
        match step {
            Step::Poll => return Ok(self.poll()),
            Step::InitProducers => {
                if !std::mem::take(&mut self.fail_init) {
                    self.init_producers()?;
                    self.state.producers_ready();
                }
            }
            Step::LookUp(lookup) => {
                if !self.has_producers {
                    return Err("a lookup began before the producers were initialised".to_owned());
                }
                // The broker answers at some time between the request and the delivery.
                let early = (self.random.below(2) == 0).then(|| self.find(&lookup));
                self.lookups.push((lookup, early));
            }
            Step::Start(starts) => {
                if std::mem::take(&mut self.fail_start) {
                    let now = self.now();
                    // Only a seek can fail.
                    self.start(starts.into_iter().filter(|start| !start.is_fetched).collect());
                    return Ok(self.state.start_failed(now, "planned"));
                }
                self.start(starts);
            }
            Step::Admit => self.admit(),
            Step::Check | Step::Verify => {}
            Step::Write => {
                let values = self.state.take_outputs();
                self.sizes.push(values.len());
                self.outputs = values;
                if self.random.below(2) == 0 {
                    self.written_result = Some(self.write()?);
                }
                self.is_writing = true;
            }
            Step::Await => {
                // The transaction takes a while, in which the history goes on.
                if self.is_frozen {
                    self.now += Duration::from_millis(100);
                } else if self.random.below(3) == 0 {
                    let result = match self.written_result.take() {
                        Some(result) => result,
                        None => self.write()?,
                    };
                    self.is_writing = false;
                    let outputs = std::mem::take(&mut self.outputs);
                    self.state.put_outputs(outputs);
                    let now = self.now();
                    return Ok(self.state.written(now, result, Vec::new()));
                }
            }
            Step::Park(wait) => self.now += wait,
            Step::Stop => unreachable!("handled by the caller"),
        }
        Ok(Ok(()))
    }

    fn poll(&mut self) -> Result<(), Ended> {
        for event in std::mem::take(&mut self.events) {
            match event {
                GroupEvent::Replaced => self.state.read_again(),
                GroupEvent::Revoked(partitions) => {
                    for partition in &partitions {
                        self.fetched.remove(partition);
                    }
                    let topic = self.topic.to_string();
                    let named: Vec<_> = partitions
                        .iter()
                        .map(|partition| (topic.clone(), *partition))
                        .collect();
                    self.state.revoked(&named);
                    for partition in partitions {
                        self.partition(partition).owner = Owner::Peer;
                    }
                }
                GroupEvent::Assigned(partitions) => {
                    let topic = self.topic.clone();
                    self.state
                        .assigned(partitions.into_iter().map(|partition| (topic.clone(), partition)));
                }
            }
        }
        if self.is_member {
            self.known_generation = self.generation;
        }
        if self.answer == Answer::Never {
            return Ok(());
        }
        for (lookup, early) in std::mem::take(&mut self.lookups) {
            let found = early.unwrap_or_else(|| self.find(&lookup));
            let now = self.now();
            self.state.found(now, found)?;
        }
        Ok(())
    }

    fn find(&self, lookup: &Lookup) -> Found {
        let is_unstable = |partition: i32| {
            let open = self.open.as_ref();
            let is_open = open.is_some_and(|(open, _)| open.commits.iter().any(|(p, _)| *p == partition));
            is_open || self.answer == Answer::Unstable(partition)
        };
        let position = |partition: i32| {
            if is_unstable(partition) || self.answer == Answer::Unanswered {
                return Err("planned".to_owned());
            }
            Ok(FoundPosition {
                topic_id: None,
                stored: self.partitions[usize::try_from(partition).unwrap()]
                    .stored
                    .clone(),
            })
        };
        let partitions = lookup.partitions.iter();
        Found {
            number: lookup.number,
            positions: partitions
                .map(|(topic, partition)| ((topic.clone(), *partition), position(*partition)))
                .collect(),
            is_answered: self.answer != Answer::Unanswered,
        }
    }

    fn start(&mut self, starts: Vec<crate::lane::state::Start>) {
        for start in &starts {
            let offset = start
                .position
                .as_ref()
                .map_or(0, |position| position.offset.max(0));
            self.fetched.insert(start.partition, offset);
        }
        self.state.started(starts);
    }

    fn admit(&mut self) {
        for slot in self.state.assignments.admission_order() {
            let Some(partition) = self
                .state
                .assignments
                .get(slot)
                .map(|assigned| assigned.partition)
            else {
                continue;
            };
            let mut budget = self.random.below(8);
            while budget > 0 && self.state.may_admit(slot) {
                budget -= 1;
                let Some(next) = self.fetched.get_mut(&partition) else {
                    break;
                };
                let log = &self.partitions[usize::try_from(partition).unwrap()].log;
                let Some(offset) = log.iter().copied().find(|offset| offset >= next) else {
                    break;
                };
                *next = offset + 1;
                self.state
                    .observe(slot, offset, Timestamp::from_millis(0), |topic| Record {
                        position: Position {
                            topic: topic.clone(),
                            partition,
                            offset,
                        },
                        key: None,
                        value: Some(value(partition, offset).into()),
                        headers: Headers::new(),
                        timestamp: None,
                        unreadable_headers: 0,
                    });
            }
        }
    }

    fn init_producers(&mut self) -> Result<(), String> {
        self.has_producers = true;
        if let Some((transaction, is_committed)) = self.open.take()
            && is_committed
        {
            self.commit(transaction)?;
        }
        Ok(())
    }

    /// The transaction that is being written.
    fn transaction(&self) -> Transaction {
        let values = self
            .outputs
            .iter()
            .map(|output| output.value.as_ref().unwrap().to_vec())
            .collect();
        let commits = self.state.commits().iter().map(|commit| {
            let stored = StoredCommit {
                offset: Some(commit.position.offset),
                metadata: commit.position.metadata.clone(),
            };
            (commit.partition, stored)
        });
        Transaction {
            values,
            commits: commits.collect(),
        }
    }

    /// The broker ends the transaction of the lane.
    fn write(&mut self) -> Result<Result<(), TransactionError>, String> {
        if !self.has_producers {
            return Err("a transaction began before the producers were initialised".to_owned());
        }
        let transaction = self.transaction();
        if transaction.commits.is_empty() {
            return Err("a transaction without offsets does not fence".to_owned());
        }
        let fail = |action, kind| Err(TransactionError::for_tests(action, kind));
        let outcome = self.outcomes.pop().unwrap_or(Outcome::Committed);
        // The broker refuses offsets of an outdated generation before anything else can happen to the transaction.
        let result = if self.is_current() {
            match outcome {
                Outcome::Committed => {
                    self.commit(transaction)?;
                    Ok(())
                }
                Outcome::TimedOut => fail(RecoveryAction::Rebuild, FailureKind::TimedOut),
                Outcome::Unavailable => fail(RecoveryAction::Abort, FailureKind::Unavailable),
                Outcome::Refused if !transaction.values.is_empty() => {
                    let refused = Refused {
                        index: 0,
                        failure: Failure::permanent("output.too-large", "planned"),
                    };
                    fail(RecoveryAction::Abort, FailureKind::Refused(vec![refused]))
                }
                Outcome::Denied => {
                    let denied = (!transaction.values.is_empty()).then(|| Refused {
                        index: 0,
                        failure: Failure::permanent("output.denied", "planned"),
                    });
                    let is_known = transaction.commits.len() > 1;
                    let action = if is_known {
                        RecoveryAction::Abort
                    } else {
                        RecoveryAction::Rebuild
                    };
                    fail(action, FailureKind::Denied(denied.into_iter().collect()))
                }
                Outcome::Aborted | Outcome::Refused => fail(RecoveryAction::Abort, FailureKind::Aborted),
                Outcome::Fenced => fail(RecoveryAction::Fenced, FailureKind::Aborted),
                Outcome::UnknownCommitted => {
                    self.commit(transaction)?;
                    fail(RecoveryAction::Rebuild, FailureKind::Unknown)
                }
                Outcome::UnknownAborted => fail(RecoveryAction::Rebuild, FailureKind::Unknown),
                Outcome::UnknownOpen(is_committed) => {
                    self.open = Some((transaction, is_committed));
                    fail(RecoveryAction::Rebuild, FailureKind::Unknown)
                }
            }
        } else {
            fail(RecoveryAction::Abort, FailureKind::Aborted)
        };
        if let Err(error) = &result {
            self.has_producers = error.action == RecoveryAction::Abort;
        }
        Ok(result)
    }

    fn commit(&mut self, transaction: Transaction) -> Result<(), String> {
        for value in transaction.values {
            let count = self.written.entry(value.clone()).or_default();
            *count += 1;
            if *count > 1 {
                return Err(format!("{} was written twice", String::from_utf8_lossy(&value)));
            }
        }
        for (partition, stored) in transaction.commits {
            self.partition(partition).stored = stored;
        }
        Ok(())
    }

    /// The peer processes records of its partitions, the later ones first, so that it commits completed sets.
    fn peer_work(&mut self, records: u8) -> Result<(), String> {
        for number in 0..PARTITIONS {
            let is_open = self
                .open
                .as_ref()
                .is_some_and(|(open, _)| open.commits.iter().any(|(p, _)| *p == number));
            let partition = self.partition(number);
            if partition.owner == Owner::Lane || is_open {
                continue;
            }
            let committed = partition.stored.decode().unwrap_or_else(Committed::start);
            let next = committed.offset.max(0);
            let mut tracker = OffsetTracker::new(committed, None);
            let mut read = Vec::new();
            for offset in partition.log.iter().copied().filter(|offset| *offset >= next) {
                if read.len() >= 2 * usize::from(records) || !tracker.may_admit() {
                    break;
                }
                if tracker.observe(offset) == Admission::New {
                    read.push(offset);
                }
            }
            let done: Vec<i64> = read.iter().rev().copied().take(usize::from(records)).collect();
            for offset in &done {
                if !tracker.complete(*offset) {
                    return Err("the peer completed a record twice".to_owned());
                }
            }
            let Some(position) = tracker.commit_position() else {
                continue;
            };
            let stored = StoredCommit {
                offset: Some(position.offset),
                metadata: position.metadata,
            };
            self.commit(Transaction {
                values: done.iter().map(|offset| value(number, *offset)).collect(),
                commits: vec![(number, stored)],
            })?;
        }
        Ok(())
    }

    /// The lane begins a new session: with a new consumer, and producers that are initialised first.
    fn restart_session(&mut self) -> Result<(), String> {
        self.may_call_again = true;
        self.state.end_session();
        self.init_producers()?;
        self.state.begin_session();
        self.fetched.clear();
        self.lookups.clear();
        let owned =
            |partition: &i32| self.partitions[usize::try_from(*partition).unwrap()].owner == Owner::Lane;
        let owned: BTreeSet<i32> = (0..PARTITIONS).filter(owned).collect();
        // A static member gets back what it had. The old consumer's revocations were served when it closed.
        let target: BTreeSet<i32> = {
            let mut target = owned.clone();
            for event in std::mem::take(&mut self.events) {
                match event {
                    GroupEvent::Revoked(partitions) => target.retain(|p| !partitions.contains(p)),
                    GroupEvent::Assigned(partitions) => target.extend(partitions),
                    GroupEvent::Replaced => {}
                }
            }
            target
        };
        for number in 0..PARTITIONS {
            self.partition(number).owner = if target.contains(&number) {
                Owner::Lane
            } else {
                Owner::Peer
            };
        }
        self.generation += 1;
        self.is_member = true;
        self.events
            .push(GroupEvent::Assigned(target.into_iter().collect()));
        Ok(())
    }

    fn written_records(&self) -> usize {
        let is_record = |value: &&Vec<u8>| !value.starts_with(OWNED.as_bytes());
        self.written.keys().filter(is_record).count()
    }

    /// Nothing fails any more. Everything must be written, and the lane must stop.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        self.outcomes.clear();
        self.answer = Answer::AtOnce;
        self.fail_init = false;
        self.fail_start = false;
        while !self.events.is_empty() {
            self.step(false)?;
        }
        self.rebalance(&(0..PARTITIONS).collect());
        let total: usize = self.partitions.iter().map(|partition| partition.log.len()).sum();
        let mut rounds = 0;
        while self.written_records() < total || !self.state.processor().is_idle() {
            self.step(false)?;
            self.state.processor().finish_attempts(20, false);
            rounds += 1;
            if rounds > 20_000 {
                return Err(format!(
                    "{} of {total} records were written",
                    self.written_records()
                ));
            }
        }
        let calls = self.state.processor().calls;
        if !self.may_call_again && calls > total as u64 {
            return Err(format!(
                "the handler was called {calls} times for {total} records"
            ));
        }
        self.until_stopped()
    }
}
