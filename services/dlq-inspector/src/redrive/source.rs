//! Reads what the executor decides with, on a thread of its own, because a lane must not block: the jobs, the ledger to its end, and the records of
//! dead letters. Decides the steps.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use redeliver_core::error_chain::error_chain;
use redeliver_core::redrive::REDRIVE_ID;
use redeliver_core::{Clock, Position, Timestamp};
use redeliver_kafka::lookup::{Lookup, StoredRecord};
use redeliver_kafka::reader::{ReadError, TopicReader, partitions};
use redeliver_kafka::{KafkaSettings, Waker};
use redeliver_service::followed::Contents as _;
use tokio_util::sync::CancellationToken;

use super::job::{CHUNK, Item, Job, Kind, Progress};
use super::jobs::{Entry, Jobs};
use super::pace::brake;
use super::record::{Candidate, Destinations};
use super::step::{Context, Step, Tried};
use crate::filter::{Expr, Restriction, TextTest};
use crate::index::{self, Pool};
use crate::ledger::{self, State, Update};
use crate::letter::ContentHash;
use crate::shared::SharedState;

/// How long reading the topics from their beginning may take.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How long reading what is new may take.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
/// How often a thread looks whether the process shuts down.
const POLL: Duration = Duration::from_millis(200);
/// How long it is believed that a topic exists, or does not, and that the ledger has so many partitions.
const BELIEVED: Duration = Duration::from_secs(30);
/// The interval between two counts of what has come back.
const COUNTED: Duration = Duration::from_secs(2);
/// The maximum size of the values of a step, unless a single one is larger, in bytes.
const STEP_BYTES: usize = 8 << 20;
/// The number of records that are read before their size is known.
const FIRST_RECORDS: usize = 32;

/// What the executor asks for.
#[derive(Debug)]
pub(crate) enum Request {
    /// Everything, from the beginning: the lane owns the partition now.
    Load,
    /// What becomes of the next items of a job, up to this number.
    Try {
        job: Box<Job>,
        entry: Arc<Entry>,
        to: u32,
    },
    /// How many records of a job have come back.
    Observe { job: Box<Job>, entry: Arc<Entry> },
}

/// What it gets.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The jobs, and the offset after the last record of them.
    Loaded(Jobs, i64),
    /// A step to write.
    Step(Box<Step>),
    /// Nothing, because of this problem.
    Failed(String),
}

/// A problem of a request.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("reading Kafka")]
    Kafka(#[from] ReadError),
    #[error("reading the index")]
    Index(#[from] index::ReadError),
    #[error("the plan of the job is incomplete")]
    Plan,
    #[error("the ledger was not read")]
    NotLoaded,
    #[error("the index is catching up, so nobody knows what has come back")]
    CatchingUp,
}

/// The thread.
pub(crate) struct Source {
    pub(crate) kafka: KafkaSettings,
    /// The topic of the jobs.
    pub(crate) topic: Arc<str>,
    pub(crate) pool: Pool,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) destinations: Arc<Destinations>,
    pub(crate) clock: Arc<dyn Clock>,
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
    lookup: Option<Lookup>,
    topics: HashMap<Arc<str>, (bool, Instant)>,
    counted: Option<(String, u32, Instant)>,
}

/// The ledger, read to its end.
struct Ledger {
    reader: TopicReader,
    states: LedgerStates,
    /// When the number of its partitions was looked up.
    looked: Instant,
    partitions: i32,
}

/// The states of all dead letters with an entry.
#[derive(Debug, Default)]
pub(crate) struct LedgerStates {
    topics: HashMap<String, u32>,
    entries: HashMap<(u32, i32, i64), (State, Option<ContentHash>)>,
}

impl LedgerStates {
    pub(crate) fn apply(&mut self, update: Update) {
        let count = u32::try_from(self.topics.len()).unwrap_or(u32::MAX);
        let topic = *self.topics.entry(update.id.topic).or_insert(count);
        let key = (topic, update.id.partition, update.id.offset);
        match update.entry {
            Some(entry) => drop(self.entries.insert(key, (entry.state, entry.content))),
            None => drop(self.entries.remove(&key)),
        }
    }

    /// The state of a dead letter. An entry of another record at its position does not count.
    pub(crate) fn state(&self, item: &Item) -> State {
        let topic = self.topics.get(&item.id.topic);
        let found = topic.and_then(|topic| self.entries.get(&(*topic, item.id.partition, item.id.offset)));
        match found {
            Some((state, content)) if content.is_none_or(|content| content == item.content) => *state,
            _ => State::Open,
        }
    }
}

impl Source {
    /// Answers until the process shuts down.
    pub(crate) fn run(self) -> Result<(), Infallible> {
        let mut known = Known::default();
        while !self.stop.is_cancelled() {
            let (number, request) = match self.requests.recv_timeout(POLL) {
                Ok(request) => request,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let answer = self.answer(&mut known, request).unwrap_or_else(|problem| {
                // The client may be in an unknown state.
                known.lookup = None;
                Answer::Failed(error_chain(&problem))
            });
            // Fails only if the lane has ended.
            if self.answers.send((number, answer)).is_err() {
                break;
            }
            self.waker.wake();
        }
        Ok(())
    }

    fn answer(&self, known: &mut Known, request: Request) -> Result<Answer, Problem> {
        match request {
            Request::Load => {
                known.ledger = None;
                let mut jobs = Jobs::default();
                let topic = &self.topic;
                let mut reader = TopicReader::of_partition(&self.kafka, topic, 0, None)?;
                reader.read_to_end(LOAD_TIMEOUT, |record| jobs.apply(&record))?;
                let end = reader.position(topic, 0).unwrap_or(0);
                known.ledger = Some(self.load_ledger()?);
                Ok(Answer::Loaded(jobs, end))
            }
            Request::Try { job, entry, to } => self.step(known, *job, &entry, to).map(boxed),
            Request::Observe { .. } if !*self.shared.caught_up.borrow() => Err(Problem::CatchingUp),
            Request::Observe { job, entry } => {
                known.counted = None;
                let next = entry.progress().next;
                self.step(known, *job, &entry, next).map(boxed)
            }
        }
    }

    fn load_ledger(&self) -> Result<Ledger, ReadError> {
        let mut states = LedgerStates::default();
        let topic: Arc<str> = ledger::TOPIC.into();
        let count = partitions(&self.kafka, &topic)?;
        let mut reader = TopicReader::new(&self.kafka, &[topic])?;
        read_ledger(&mut reader, &mut states, LOAD_TIMEOUT)?;
        Ok(Ledger {
            reader,
            states,
            looked: Instant::now(),
            partitions: count,
        })
    }

    /// Decides what becomes of the next items of a job, or of fewer if they are large.
    fn step(&self, known: &mut Known, job: Job, entry: &Entry, to: u32) -> Result<Step, Problem> {
        let before = entry.progress();
        let now = self.clock.now();
        let returned = self.returned(known, &job, &before, now)?;
        let counted = Progress {
            returned: returned.unwrap_or(before.returned),
            ..before.clone()
        };
        let brake = brake(&job, &counted);
        let chunk = before.next / CHUNK;
        let mut step = Step {
            outcomes: entry.outcomes(chunk),
            tried: Vec::new(),
            brake,
            returned,
            now,
            before,
            job,
        };
        if step.brake.is_some() || to <= step.before.next {
            return Ok(step);
        }
        let items = entry.items(chunk).ok_or(Problem::Plan)?;
        let (from, to) = ((step.before.next % CHUNK) as usize, (to - chunk * CHUNK) as usize);
        let items = items.get(from..to).ok_or(Problem::Plan)?;
        step.tried = self.try_items(known, &step.job, items, now)?;
        Ok(step)
    }

    fn try_items(
        &self,
        known: &mut Known,
        job: &Job,
        items: &[Item],
        now: Timestamp,
    ) -> Result<Vec<Tried>, Problem> {
        let found = match job.kind {
            Kind::Redrive => self.lookup(known, items)?,
            Kind::Discard | Kind::Restore => items.iter().map(|_| None).collect(),
        };
        for record in found.iter().flatten() {
            let target = self
                .destinations
                .target(Candidate::of(&record.record), &job.wish());
            if let Ok(target) = target {
                self.look_up_topic(known, &target.topic)?;
            }
        }
        // After everything that takes time, so that the decision is as late as it can be.
        let ledger = known.ledger.as_mut().ok_or(Problem::NotLoaded)?;
        if ledger.looked.elapsed() > BELIEVED {
            ledger.looked = Instant::now();
            if partitions(&self.kafka, ledger::TOPIC)? != ledger.partitions {
                *ledger = self.load_ledger()?;
            }
        }
        read_ledger(&mut ledger.reader, &mut ledger.states, READ_TIMEOUT)?;
        let (topics, states) = (&known.topics, &ledger.states);
        let context = Context {
            job,
            destinations: &self.destinations,
            exists: &|topic| topics.get(topic).is_some_and(|(exists, _)| *exists),
            now,
        };
        let tried = items.iter().zip(&found).map(|(item, found)| {
            let record = found.as_ref().map(|found| &found.record);
            context.try_item(item.clone(), states.state(item), record)
        });
        Ok(tried.collect())
    }

    /// The records of the first items, or of all.
    fn lookup(&self, known: &mut Known, items: &[Item]) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let lookup = match &mut known.lookup {
            Some(lookup) => lookup,
            None => known.lookup.insert(Lookup::new(&self.kafka)?),
        };
        let mut found: Vec<Option<StoredRecord>> = Vec::with_capacity(items.len());
        let (mut bytes, mut count) = (0, FIRST_RECORDS);
        while found.len() < items.len() && bytes < STEP_BYTES {
            let rest = &items[found.len()..];
            let positions = rest.iter().take(count).map(|item| Position {
                topic: item.id.topic.as_str().into(),
                partition: item.id.partition,
                offset: item.id.offset,
            });
            let read = lookup.get(&positions.collect::<Vec<_>>(), READ_TIMEOUT)?;
            bytes += read
                .iter()
                .flatten()
                .map(|found| found.record.size())
                .sum::<usize>();
            found.extend(read);
            // As many as fit if the others have the same size.
            count = ((STEP_BYTES.saturating_sub(bytes)) / (bytes / found.len()).max(1)).max(1);
        }
        Ok(found)
    }

    fn look_up_topic(&self, known: &mut Known, topic: &Arc<str>) -> Result<(), ReadError> {
        let is_known = known
            .topics
            .get(topic)
            .is_some_and(|(_, at)| at.elapsed() < BELIEVED);
        if is_known {
            return Ok(());
        }
        let exists = match partitions(&self.kafka, topic) {
            Ok(_) => true,
            Err(ReadError::Missing(_)) => false,
            Err(error) => return Err(error),
        };
        known.topics.insert(topic.clone(), (exists, Instant::now()));
        Ok(())
    }

    /// How many records of a job have come back; `None` if that is not known or of no interest now.
    fn returned(
        &self,
        known: &mut Known,
        job: &Job,
        before: &Progress,
        now: Timestamp,
    ) -> Result<Option<u32>, index::ReadError> {
        if job.kind != Kind::Redrive || before.done == 0 || !*self.shared.caught_up.borrow() {
            return Ok(None);
        }
        let id = &job.spec().id;
        if let Some((of, count, at)) = &known.counted
            && of == id
            && at.elapsed() < COUNTED
        {
            return Ok(Some(*count));
        }
        let count = self
            .pool
            .read_blocking(|connection| count_returned(connection, id, now))?;
        known.counted = Some((id.clone(), count, Instant::now()));
        Ok(Some(count))
    }
}

fn boxed(step: Step) -> Answer {
    Answer::Step(Box::new(step))
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

/// How many dead letters a job has redriven that came back.
pub(crate) fn count_returned(
    connection: &rusqlite::Connection,
    id: &str,
    now: Timestamp,
) -> rusqlite::Result<u32> {
    let filter = Expr::Is(Restriction::Header(
        REDRIVE_ID.to_owned(),
        TextTest::Equal(id.to_owned()),
    ));
    let counts = index::count_by_topic(connection, &filter, [now; 3])?;
    let count: u64 = counts.values().map(|counts| counts.total).sum();
    Ok(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::item;
    use super::*;
    use crate::ledger::Entry as LedgerEntry;

    #[test]
    fn the_newest_entry_of_the_same_record_counts() {
        let mut states = LedgerStates::default();
        let planned = item("a-dlq", 1);
        let mut apply = |offset, state: Option<State>, content| {
            states.apply(Update {
                id: item("a-dlq", offset).id,
                entry: state.map(|state| LedgerEntry {
                    state,
                    content,
                    ..LedgerEntry::default()
                }),
            });
            states.state(&planned)
        };
        assert_eq!(apply(2, Some(State::Redriven), None), State::Open);
        assert_eq!(apply(1, Some(State::Discarded), None), State::Discarded);
        assert_eq!(apply(1, Some(State::Redriven), Some([9; 16])), State::Open);
        assert_eq!(
            apply(1, Some(State::Redriven), Some(planned.content)),
            State::Redriven
        );
        assert_eq!(apply(1, None, None), State::Open);
    }
}
