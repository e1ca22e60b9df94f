//! Reads what the executor decides with, on a thread of its own, because a lane must not block: the jobs, the ledger to its end, and the records of
//! dead letters. Decides the steps.

use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use redeliver_core::error_chain::error_chain;
use redeliver_core::redrive::REDRIVE_ID;
use redeliver_core::{Clock, Position, Record, Timestamp};
use redeliver_kafka::lookup::{Lookup, StoredRecord};
use redeliver_kafka::reader::{ReadError, TopicClient, TopicReader};
use redeliver_kafka::{KafkaSettings, TopicId, Waker};
use redeliver_proto::v1;
use redeliver_store::{Replica, State as _};
use tokio_util::sync::CancellationToken;

use super::edit::Edit;
use super::job::{CHUNK, Item, Job, Kind, Progress};
use super::jobs::{JobEntry, Jobs};
use super::ledger_states::{LedgerStates, Removed};
use super::omitted;
use super::pace::{self, Take, auto_pause};
use super::record::{Candidate, Destinations};
use super::step::{Context, Prepared, Presence, Step, Tried};
use crate::completeness::MAX_AGE;
use crate::filter::{Expr, Restriction, TextTest};
use crate::index::{self, Pool};
use crate::ledger::{self, Update};
use crate::shared::SharedState;
use crate::waiting::scans::Scans;

/// The time between two requests for the id of the ledger after one has failed.
const IDS_PAUSE: Duration = Duration::from_secs(60);
/// How long reading the topics from their beginning may take.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How long reading what is new may take.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
/// How long reading a record whose payload was left out of its dead letter may take. Other jobs wait meanwhile.
const ORIGINAL_TIMEOUT: Duration = Duration::from_secs(5);
/// After this time, a step has no more of them.
const ORIGINALS_TIME: Duration = Duration::from_secs(2);
/// How often a thread looks whether the process shuts down.
const POLL: Duration = Duration::from_millis(200);
/// How long it is believed that a topic exists, or does not.
const BELIEVED: Duration = Duration::from_secs(30);
/// The interval between two counts of what has come back.
const COUNTED: Duration = Duration::from_secs(2);
/// How long records that were read ahead are used: they contain the time of the redrive.
const AHEAD: Duration = Duration::from_secs(5);
/// The maximum size of the records of a step and one more, in bytes.
const STEP_BYTES: usize = 8 << 20;

/// What the executor asks for.
#[derive(Debug)]
pub(crate) enum Request {
    /// Everything: the lane owns the partition now.
    Load,
    /// What becomes of these items of a job, which are the next ones.
    Try {
        job: Box<Job>,
        entry: Arc<JobEntry>,
        take: Take,
        /// Whether the last step of the job could not be written, so that what is known of its destinations may be outdated.
        again: bool,
        /// Topics to which this process may not write, as the job has shown a moment ago.
        denied: Vec<Arc<str>>,
    },
    /// Read what a step with these items will need. Has no answer.
    ReadAhead {
        job: Box<Job>,
        entry: Arc<JobEntry>,
        items: Range<u32>,
        /// See `Try`.
        denied: Vec<Arc<str>>,
    },
    /// Which entries of the ledger are to be removed, at most this many.
    FindGone { limit: usize },
    /// How many records of a job have come back.
    Observe { job: Box<Job>, entry: Arc<JobEntry> },
}

/// What it gets.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The jobs, and the offset after the last record of them.
    Loaded(Jobs, i64),
    /// A step to write.
    Step(Box<Step>),
    /// The entries of dead letters that are gone.
    Gone(Vec<Removed>),
    /// It will be known in a moment how many records have come back.
    NotKnown,
    /// Nothing, because of this problem.
    Failed(String),
}

/// Why a step cannot be decided.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error("reading Kafka")]
    Kafka(#[from] ReadError),
    #[error("reading the index")]
    Index(#[from] index::ReadError),
    #[error("the plan of the job is incomplete")]
    Plan,
    #[error("the ledger was not read")]
    NotLoaded,
    #[error("the index lacks what may have come back{}", in_topic(.0.as_deref()))]
    Incomplete(Option<Arc<str>>),
    #[error("{0} redriven records still wait for an attempt, so it is unknown whether they come back")]
    Waiting(u64),
}

fn in_topic(topic: Option<&str>) -> String {
    topic.map(|topic| format!(" to `{topic}`")).unwrap_or_default()
}

/// The thread.
pub(crate) struct Source {
    pub(crate) kafka: KafkaSettings,
    /// The topic of the jobs.
    pub(crate) topic: Arc<str>,
    pub(crate) jobs: Replica<Jobs>,
    pub(crate) pool: Pool,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) destinations: Arc<Destinations>,
    pub(crate) scans: Scans,
    pub(crate) clock: Arc<dyn Clock>,
    /// How long a dead letter must be gone before its entry is removed; `None`: it stays.
    pub(crate) remove_after: Option<Duration>,
    /// Each with a number that its answer has, too.
    pub(crate) requests: Receiver<(u64, Request)>,
    pub(crate) answers: SyncSender<(u64, Answer)>,
    pub(crate) waker: Waker,
    pub(crate) stop: CancellationToken,
}

/// What the thread knows.
#[derive(Default)]
struct Known {
    ledger: Option<Ledger>,
    ledger_partitions: LedgerPartitions,
    ledger_ids: LedgerIds,
    lookup: Option<Lookup>,
    /// Reads payloads that were left out. Another client, so that the first one goes on fetching dead letters.
    origins: Option<Lookup>,
    ahead: Option<Ahead>,
    /// Asks whether topics exist.
    asking: Option<TopicClient>,
    topics: HashMap<Arc<str>, (Presence, Instant)>,
    /// See [`Request::Try`].
    denied: Vec<Arc<str>>,
    counted: Option<(String, u32, Instant)>,
    /// When none of the first records of a job was waiting any more, by id; and how many records these are.
    settled: HashMap<String, (u32, Timestamp)>,
}

/// The items of a step that is probably the next one.
struct Ahead {
    id: String,
    from: u32,
    prepared: Vec<Prepared>,
    at: Instant,
}

impl Known {
    /// The first of these items, if they were read ahead.
    fn take_ahead(&mut self, id: &str, items: &Range<u32>) -> Option<Vec<Prepared>> {
        let ahead = self.ahead.take()?;
        let is_same = ahead.id == id && ahead.from == items.start && ahead.at.elapsed() < AHEAD;
        let mut prepared = is_same.then_some(ahead.prepared)?;
        prepared.truncate(items.len());
        Some(prepared)
    }

    /// The known topics may be outdated, and so may records that were read ahead.
    fn use_denied(&mut self, denied: Vec<Arc<str>>, again: bool) {
        if again {
            self.topics.clear();
        }
        if again || self.denied != denied {
            self.ahead = None;
        }
        self.denied = denied;
    }

    /// Drops the records that were read, also those in the queues of clients: Kafka may have deleted them since, and a removed ledger entry does not prevent
    /// that one of them is redriven again.
    fn forget_records(&mut self) {
        (self.ahead, self.lookup, self.origins) = (None, None, None);
    }

    /// No job asks for records.
    fn stop_fetching(&mut self) {
        if self
            .ahead
            .as_ref()
            .is_some_and(|ahead| ahead.at.elapsed() >= AHEAD)
        {
            self.ahead = None;
        }
        if let Some(lookup) = &mut self.lookup
            && lookup.stop_fetching().is_err()
        {
            self.lookup = None;
        }
    }
}

/// How many partitions of the ledger the process knows. None goes away, but a broker with old metadata may know fewer.
#[derive(Debug, Default)]
struct LedgerPartitions {
    count: i32,
    /// The topic that has them; `None` if its id is unknown.
    topic: Option<TopicId>,
}

impl LedgerPartitions {
    /// The number of partitions that this topic has at least. Only one that was created again can have fewer than before.
    fn expected(&self, topic: Option<TopicId>) -> i32 {
        let ids = self.topic.zip(topic);
        if ids.is_some_and(|(known, topic)| known != topic) {
            0
        } else {
            self.count
        }
    }

    /// Takes note of the partitions of the topic that was read.
    fn loaded(&mut self, topic: Option<TopicId>, count: i32) {
        *self = Self {
            count: count.max(self.expected(topic)),
            topic: topic.or(self.topic),
        };
    }

    /// Takes note of the partitions of the same topic.
    fn followed(&mut self, count: i32) {
        self.count = self.count.max(count);
    }
}

/// Asks for the id of the ledger.
#[derive(Debug, Default)]
struct LedgerIds {
    failed_at: Option<Instant>,
}

impl LedgerIds {
    /// The id; `None` if it is unknown. A broker without ids does not prevent reading, and one that does not
    /// answer is not asked again for a minute.
    fn ask(&mut self, topics: &TopicClient, now: Instant) -> Option<TopicId> {
        let is_recent = |at: Instant| now.saturating_duration_since(at) < IDS_PAUSE;
        if self.failed_at.is_some_and(is_recent) {
            return None;
        }
        let asked = topics.id(ledger::TOPIC);
        self.failed_at = asked.is_err().then_some(now);
        asked.unwrap_or_else(|error| {
            tracing::debug!(error = error_chain(&error), "cannot read the id of the ledger");
            None
        })
    }
}

/// The ledger, read to its end.
struct Ledger {
    /// The topic; `None` if its id is unknown.
    id: Option<TopicId>,
    reader: TopicReader,
    states: LedgerStates,
}

impl Source {
    /// Answers until the process shuts down.
    pub(crate) fn run(self) -> Result<(), Infallible> {
        let mut known = Known::default();
        while !self.stop.is_cancelled() {
            let (number, request) = match self.requests.recv_timeout(POLL) {
                Ok(request) => request,
                Err(RecvTimeoutError::Timeout) => {
                    known.stop_fetching();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let is_answered = !matches!(request, Request::ReadAhead { .. });
            let answer = self.answer(&mut known, request).unwrap_or_else(|problem| {
                // The clients may be in an unknown state.
                (known.lookup, known.origins, known.asking) = (None, None, None);
                let reason = error_chain(&problem);
                if !is_answered {
                    tracing::debug!(reason, "cannot read ahead");
                }
                is_answered.then_some(Answer::Failed(reason))
            });
            let Some(answer) = answer else { continue };
            // Fails only if the lane has ended.
            if self.answers.send((number, answer)).is_err() {
                break;
            }
            self.waker.wake();
        }
        Ok(())
    }

    fn answer(&self, known: &mut Known, request: Request) -> Result<Option<Answer>, StepError> {
        match request {
            Request::Load => {
                (known.ledger, known.ahead) = (None, None);
                known.settled.clear();
                let topic = &self.topic;
                let (mut reader, mut jobs) = self.jobs.reader(&self.kafka, topic)?;
                reader.read_to_end(LOAD_TIMEOUT, |record| jobs.apply(&record))?;
                let end = reader.position(topic, 0).unwrap_or(0);
                known.ledger = Some(self.load_ledger(&mut known.ledger_partitions, &mut known.ledger_ids)?);
                Ok(Some(Answer::Loaded(jobs, end)))
            }
            Request::Try {
                job,
                entry,
                take,
                again,
                denied,
            } => {
                known.use_denied(denied, again);
                self.step(known, *job, &entry, take).map(boxed)
            }
            Request::ReadAhead {
                job,
                entry,
                items,
                denied,
            } => {
                known.ahead = None;
                known.use_denied(denied, false);
                let prepared = self.prepare(known, &job, &entry, items.clone(), self.clock.now())?;
                known.ahead = Some(Ahead {
                    id: job.spec().id.clone(),
                    from: items.start,
                    prepared,
                    at: Instant::now(),
                });
                Ok(None)
            }
            Request::FindGone { limit } => {
                let gone = self.gone(known, limit)?;
                if !gone.is_empty() {
                    known.forget_records();
                }
                Ok(Some(Answer::Gone(gone)))
            }
            Request::Observe { job, entry } => self.observe(known, *job, &entry),
        }
    }

    fn load_ledger(&self, known: &mut LedgerPartitions, ids: &mut LedgerIds) -> Result<Ledger, ReadError> {
        let mut states = LedgerStates::default();
        let topic: Arc<str> = ledger::TOPIC.into();
        let mut reader = TopicReader::new(&self.kafka, std::slice::from_ref(&topic))?;
        let id = ids.ask(reader.topics(), Instant::now());
        reader.expect_partitions(&topic, known.expected(id));
        reader.expect_id(ledger::TOPIC, id);
        read_ledger(&mut reader, &mut states, LOAD_TIMEOUT)?;
        known.loaded(id, reader.partitions(ledger::TOPIC));
        Ok(Ledger { id, reader, states })
    }

    /// Reads what the ledger has got since, or all of it if it was created again: what the previous topic had says nothing about what this one has.
    fn read_on<'k>(&self, known: &'k mut Known) -> Result<&'k mut Ledger, StepError> {
        let ledger = known.ledger.as_mut().ok_or(StepError::NotLoaded)?;
        // An id that was unknown can be that of another topic.
        let id = known.ledger_ids.ask(ledger.reader.topics(), Instant::now());
        if id.is_some() && ledger.id != id {
            if ledger.id.is_some() {
                tracing::warn!("ledger was deleted and created again; reading it from the beginning");
            }
            *ledger = self.load_ledger(&mut known.ledger_partitions, &mut known.ledger_ids)?;
            return Ok(ledger);
        }
        // The last step may have written to a new partition.
        ledger.reader.follow_partitions()?;
        let partitions = ledger.reader.partitions(ledger::TOPIC);
        known.ledger_partitions.followed(partitions);
        read_ledger(&mut ledger.reader, &mut ledger.states, READ_TIMEOUT)?;
        Ok(ledger)
    }

    /// The entries to remove.
    fn gone(&self, known: &mut Known, limit: usize) -> Result<Vec<Removed>, StepError> {
        let Some(hold) = self.remove_after else {
            return Ok(Vec::new());
        };
        let ledger = self.read_on(known)?;
        let hold = i64::try_from(hold.as_millis()).unwrap_or(i64::MAX);
        let written_by = Timestamp::from_millis(self.clock.now().as_millis().saturating_sub(hold));
        let below = |topic: &str, partition| self.shared.gone().below(topic, partition, Instant::now());
        Ok(ledger.states.removable(below, written_by, limit))
    }

    /// Decides what becomes of the next items of a job, or of fewer if they are large.
    fn step(&self, known: &mut Known, job: Job, entry: &JobEntry, take: Take) -> Result<Step, StepError> {
        let before = entry.progress();
        let now = self.clock.now();
        let returned = self.returned(known, &job, &before, now)?;
        let Take { items, max_done } = take;
        let mut step = counted(job, entry, before, returned, now);
        if step.auto_pause.is_some() {
            return Ok(step);
        }
        let prepared = match known.take_ahead(&step.job.spec().id, &items) {
            Some(prepared) => prepared,
            None => self.prepare(known, &step.job, entry, items, now)?,
        };
        step.tried = self.tried(known, step.job.kind, prepared)?;
        step.end_after(max_done);
        Ok(step)
    }

    /// Counts what has come back by the end of an observation, once none of the records waits any more, and the index has all of it.
    fn observe(&self, known: &mut Known, job: Job, entry: &JobEntry) -> Result<Option<Answer>, StepError> {
        let before = entry.progress();
        let now = self.clock.now();
        let end = pace::observed_at(&job, &before).unwrap_or(now);
        known.counted = None;
        let settled = if job.has_auto_pause() {
            self.settled_at(known, &job, entry, before.done)
        } else {
            Ok(end)
        };
        let at = settled.as_ref().map_or(end, |settled| end.max(*settled));
        let returned = match self.count(&job, at, now) {
            // The index is always some seconds old.
            Err(StepError::Incomplete(None)) if now.since(at) <= MAX_AGE => {
                return Ok(Some(Answer::NotKnown));
            }
            Err(StepError::Incomplete(_)) if !job.has_auto_pause() => None,
            returned => Some(returned?),
        };
        let gives_up = pace::gives_up_at(&job, &before).is_some_and(|at| at <= now);
        known.settled.remove(&job.spec().id);
        let mut step = counted(job, entry, before, returned, now);
        step.is_observation = true;
        // If enough of them have come back, the others do not matter.
        if let (Err(problem), None) = (settled, &step.auto_pause) {
            if !gives_up {
                return Err(problem);
            }
            step.give_up_waiting(error_chain(&problem));
        }
        Ok(boxed(step))
    }

    /// When none of the records of a job was waiting any more, this many of which were redriven.
    fn settled_at(
        &self,
        known: &mut Known,
        job: &Job,
        entry: &JobEntry,
        done: u32,
    ) -> Result<Timestamp, StepError> {
        let id = &job.spec().id;
        if let Some((of, at)) = known.settled.get(id)
            && *of == done
        {
            return Ok(*at);
        }
        let now = self.clock.now();
        let waiting = self.scans.redriven(job, &entry.written(), READ_TIMEOUT)?;
        if waiting > 0 {
            return Err(StepError::Waiting(waiting));
        }
        known.settled.insert(id.clone(), (done, now));
        Ok(now)
    }

    /// Reads what decides about items, except for the ledger. Returns the first ones, or all.
    fn prepare(
        &self,
        known: &mut Known,
        job: &Job,
        entry: &JobEntry,
        items: Range<u32>,
        now: Timestamp,
    ) -> Result<Vec<Prepared>, StepError> {
        let edit = edit_of(job, entry)?;
        let items = entry.items_in(items).ok_or(StepError::Plan)?;
        let (mut found, mut originals) = (items.iter().map(|_| None).collect(), HashMap::new());
        let needs_time = |item: &Item| {
            let ledger = known.ledger.as_ref();
            ledger.is_some_and(|ledger| ledger.states.needs_time(&item.id))
        };
        if job.kind == Kind::Redrive || items.iter().any(needs_time) {
            found = self.lookup(known, &items)?;
        }
        if job.kind == Kind::Redrive {
            originals = self.originals(known, &mut found)?;
            let options = job.target_options();
            for record in found.iter().flatten() {
                let restored = originals.get(&record.record.position);
                let letter = restored.unwrap_or(&record.record);
                if let Ok(target) = self.destinations.target(Candidate::of(letter), &options) {
                    self.look_up_topic(known, &target.topic)?;
                }
            }
        }
        let (topics, denied) = (&known.topics, &known.denied);
        let context = Context {
            job,
            edit: edit.as_ref(),
            destinations: &self.destinations,
            restored: &|letter| originals.get(&letter.position).cloned(),
            presence: &|topic| {
                if denied.iter().any(|denied| **denied == *topic) {
                    return Presence::Denied;
                }
                topics
                    .get(topic)
                    .map_or(Presence::Missing, |(presence, _)| *presence)
            },
            now,
        };
        let prepared = items.into_iter().zip(&found).map(|(item, found)| {
            let record = found.as_ref().map(|found| &found.record);
            context.prepare(item, record)
        });
        Ok(prepared.collect())
    }

    /// Decides with the ledger, after everything that takes time, so that the decision is as late as it can be.
    fn tried(&self, known: &mut Known, kind: Kind, prepared: Vec<Prepared>) -> Result<Vec<Tried>, StepError> {
        let ledger = self.read_on(known)?;
        let states = &ledger.states;
        let tried = prepared
            .into_iter()
            .map(|prepared| prepared.tried(kind, |item, dead_at| states.state(item, dead_at)));
        Ok(tried.collect())
    }

    /// The records of the first items, or of all.
    fn lookup(&self, known: &mut Known, items: &[Item]) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let lookup = match &mut known.lookup {
            Some(lookup) => lookup,
            None => known.lookup.insert(Lookup::for_runs(&self.kafka)?),
        };
        let positions = items.iter().map(|item| Position {
            topic: item.id.topic.as_str().into(),
            partition: item.id.partition,
            offset: item.id.offset,
        });
        lookup.get_first(&positions.collect::<Vec<_>>(), STEP_BYTES, READ_TIMEOUT)
    }

    /// The dead letters whose payload was left out, with it, by their positions. Cuts off dead letters, so that a step has not too much of it.
    fn originals(
        &self,
        known: &mut Known,
        found: &mut Vec<Option<StoredRecord>>,
    ) -> Result<HashMap<Position, Record>, ReadError> {
        let (mut restored, mut size, started) = (HashMap::new(), 0, Instant::now());
        for index in 0..found.len() {
            let Some(letter) = found[index].as_ref().map(|stored| &stored.record) else {
                continue;
            };
            let Some(position) = self
                .destinations
                .original(&letter.position.topic, &letter.headers)
            else {
                continue;
            };
            if size >= STEP_BYTES || started.elapsed() >= ORIGINALS_TIME {
                found.truncate(index);
                break;
            }
            let Some(original) = self.original(known, position)? else {
                continue;
            };
            if let Some(whole) = omitted::restored(letter, &original) {
                size += omitted::size(&whole);
                restored.insert(letter.position.clone(), whole);
            }
        }
        Ok(restored)
    }

    /// The record at a position; `None` if it is gone, or this process may not read its topic.
    fn original(&self, known: &mut Known, position: Position) -> Result<Option<Record>, ReadError> {
        let lookup = match &mut known.origins {
            Some(lookup) => lookup,
            None => known.origins.insert(Lookup::new(&self.kafka)?),
        };
        match lookup.get(&[position], ORIGINAL_TIMEOUT) {
            Ok(records) => Ok(records.into_iter().next().flatten().map(|stored| stored.record)),
            Err(error) if error.is_denied() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn look_up_topic(&self, known: &mut Known, topic: &Arc<str>) -> Result<(), ReadError> {
        let is_known = known
            .topics
            .get(topic)
            .is_some_and(|(_, at)| at.elapsed() < BELIEVED);
        if is_known {
            return Ok(());
        }
        let asking = match &known.asking {
            Some(asking) => asking,
            None => known.asking.insert(TopicClient::new(&self.kafka)?),
        };
        let presence = match asking.partitions(topic) {
            Ok(_) => Presence::Exists,
            Err(ReadError::Missing(_)) => Presence::Missing,
            Err(ReadError::Denied(_)) => Presence::Denied,
            Err(error) => return Err(error),
        };
        known.topics.insert(topic.clone(), (presence, Instant::now()));
        Ok(())
    }

    /// How many records of a job have come back; `None` if that is of no interest now.
    fn returned(
        &self,
        known: &mut Known,
        job: &Job,
        before: &Progress,
        now: Timestamp,
    ) -> Result<Option<u32>, StepError> {
        if job.kind != Kind::Redrive || before.done == 0 {
            return Ok(None);
        }
        let id = &job.spec().id;
        if let Some((of, count, at)) = &known.counted
            && of == id
            && at.elapsed() < COUNTED
        {
            return Ok(Some(*count));
        }
        let max_age = i64::try_from(MAX_AGE.as_millis()).unwrap_or(i64::MAX);
        let recent = Timestamp::from_millis(now.as_millis().saturating_sub(max_age));
        let count = match self.count(job, recent, now) {
            // There is no auto-pause.
            Err(StepError::Incomplete(_)) if !job.has_auto_pause() => return Ok(None),
            count => count?,
        };
        known.counted = Some((id.clone(), count, Instant::now()));
        Ok(Some(count))
    }

    /// How many records of a job have come back, at least those that had at a time.
    fn count(&self, job: &Job, at: Timestamp, now: Timestamp) -> Result<u32, StepError> {
        let id = &job.spec().id;
        let topics = returning_to(job.spec(), &self.destinations);
        let completeness = self.shared.completeness();
        let count = self
            .pool
            .read_blocking(|connection| count_returned(connection, id, &topics, now))?;
        let completeness = completeness.and(&self.shared.completeness());
        completeness.check(&topics, at).map_err(StepError::Incomplete)?;
        Ok(count)
    }
}

/// A step without items, with what has come back.
fn counted(job: Job, entry: &JobEntry, before: Progress, returned: Option<u32>, now: Timestamp) -> Step {
    let counted = Progress {
        returned: returned.unwrap_or(before.returned),
        ..before.clone()
    };
    Step {
        outcomes: entry.outcomes(before.next / CHUNK),
        tried: Vec::new(),
        auto_pause: auto_pause(&job, &counted),
        problem: String::new(),
        returned,
        is_observation: false,
        now,
        before,
        job,
    }
}

/// The edit of a job that has one. A dead letter that is to be edited is never redriven as it is.
fn edit_of(job: &Job, entry: &JobEntry) -> Result<Option<Edit>, StepError> {
    if !job.is_edit() {
        return Ok(None);
    }
    let edit = entry.edit().map_err(|_| StepError::Plan)?;
    edit.map(Some).ok_or(StepError::Plan)
}

fn boxed(step: Step) -> Option<Answer> {
    Some(Answer::Step(Box::new(step)))
}

fn read_ledger(
    reader: &mut TopicReader,
    states: &mut LedgerStates,
    timeout: Duration,
) -> Result<(), ReadError> {
    reader.read_to_end(timeout, |record| {
        // An invalid entry is ignored, as the index does.
        if let Ok(update) = Update::read(&record) {
            states.apply(update);
        }
    })
}

/// The topics in which the records of a job come back: those from which it takes dead letters, and those of the pipelines to which it writes. In others, a
/// later pipeline has given up on a result.
pub(crate) fn returning_to(job: &v1::Redrive, destinations: &Destinations) -> BTreeSet<String> {
    let topics = |counts: &'_ [v1::RedriveCount]| -> Vec<String> {
        counts.iter().map(|count| count.topic.clone()).collect()
    };
    let written = topics(&job.destinations);
    let written: Vec<&str> = written.iter().map(String::as_str).collect();
    let of_pipelines = destinations.dead_letter_topics(&written).map(ToString::to_string);
    topics(&job.sources).into_iter().chain(of_pipelines).collect()
}

/// How many dead letters a job has redriven that came back to one of these topics.
pub(crate) fn count_returned(
    connection: &rusqlite::Connection,
    id: &str,
    topics: &BTreeSet<String>,
    now: Timestamp,
) -> rusqlite::Result<u32> {
    let filter = Expr::Is(Restriction::Header(
        REDRIVE_ID.to_owned(),
        TextTest::Equal(id.to_owned()),
    ));
    let counts = index::count_by_topic(connection, &filter, [now; 3])?;
    let counts = counts.iter().filter(|(topic, _)| topics.contains(*topic));
    let count: u64 = counts.map(|(_, counts)| counts.total).sum();
    Ok(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ledger_partitions_are_kept() {
        let [first, again] = [1, 2].map(|bits| Some(TopicId::from_bits(bits)));
        let mut known = LedgerPartitions::default();
        known.loaded(first, 2);
        known.followed(3);
        // Loading it fails, several times.
        for _ in 0..2 {
            assert_eq!(known.expected(first), 3);
            assert_eq!(known.expected(None), 3);
        }
        assert_eq!(known.expected(again), 0);
        known.loaded(None, 3);
        assert_eq!((known.expected(first), known.expected(again)), (3, 0));
        known.loaded(again, 1);
        assert_eq!((known.expected(again), known.expected(first)), (1, 0));
    }
}
