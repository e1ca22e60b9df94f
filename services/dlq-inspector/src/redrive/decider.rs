//! Decides the steps of the executor with what is in Kafka and the index, on a thread of its own, because a lane must not block.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use redeliver_core::error_chain::error_chain;
use redeliver_core::{Clock, Timestamp};
use redeliver_kafka::reader::{ReadError, TopicClient};
use redeliver_kafka::{KafkaSettings, Waker};
use redeliver_service::Host;
use redeliver_store::{Replica, State as _};
use tokio_util::sync::CancellationToken;

use super::edit::Edit;
use super::job::{CHUNK, Item, Job, Kind, Progress};
use super::jobs::{JobEntry, Jobs};
use super::ledger_reader::LedgerReader;
use super::ledger_states::Removed;
use super::letter_reader::LetterReader;
use super::pace::{self, Take, auto_pause};
use super::record::{Candidate, Destinations};
use super::returns::{self, Returns};
use super::step::{Context, Prepared, Presence, Step, Tried};
use crate::completeness::MAX_AGE;
use crate::config::RedriveConfig;
use crate::shared::SharedState;

/// How long reading the jobs may take.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How often a thread looks whether the process shuts down.
const POLL: Duration = Duration::from_millis(200);
/// How long it is believed that a topic exists, or does not.
const BELIEVED: Duration = Duration::from_secs(30);
/// How long what was read ahead is used: it has the time of the redrive in it.
const AHEAD: Duration = Duration::from_secs(5);

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

/// A problem of a request.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error("reading Kafka")]
    Kafka(#[from] ReadError),
    #[error("the plan of the job is incomplete")]
    Plan,
    #[error(transparent)]
    Returns(#[from] returns::StepError),
}

/// The thread.
pub(crate) struct Decider {
    kafka: KafkaSettings,
    /// The topic of the jobs.
    topic: Arc<str>,
    jobs: Replica<Jobs>,
    shared: Arc<SharedState>,
    destinations: Arc<Destinations>,
    clock: Arc<dyn Clock>,
    /// How long a dead letter must be gone before its entry is removed; `None`: it stays.
    remove_after: Option<Duration>,
    ledger: LedgerReader,
    letters: LetterReader,
    returns: Returns,
    ahead: Option<Ahead>,
    /// Asks whether topics exist.
    asking: Option<TopicClient>,
    topics: HashMap<Arc<str>, (Presence, Instant)>,
    /// See [`Request::Try`].
    denied: Vec<Arc<str>>,
}

/// The items of a step that is probably the next one.
struct Ahead {
    id: String,
    from: u32,
    prepared: Vec<Prepared>,
    at: Instant,
}

impl Decider {
    pub(crate) fn new(host: &Host, config: &RedriveConfig, jobs: Replica<Jobs>, returns: Returns) -> Self {
        Self {
            kafka: host.kafka.clone(),
            topic: config.topic(&host.config.kafka).into(),
            jobs,
            shared: returns.shared.clone(),
            destinations: returns.destinations.clone(),
            clock: host.clock.clone(),
            remove_after: config.remove_entries_after(),
            ledger: LedgerReader::default(),
            letters: LetterReader::default(),
            returns,
            ahead: None,
            asking: None,
            topics: HashMap::new(),
            denied: Vec::new(),
        }
    }

    /// Answers until the process shuts down. Each request has a number, which its answer has, too.
    pub(crate) fn run(
        mut self,
        requests: &Receiver<(u64, Request)>,
        answers: &SyncSender<(u64, Answer)>,
        waker: &Waker,
        stop: &CancellationToken,
    ) {
        while !stop.is_cancelled() {
            let (number, request) = match requests.recv_timeout(POLL) {
                Ok(request) => request,
                Err(RecvTimeoutError::Timeout) => {
                    self.stop_fetching();
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let is_answered = !matches!(request, Request::ReadAhead { .. });
            let answer = self.answer(request).unwrap_or_else(|problem| {
                // The clients may be in an unknown state.
                self.letters.forget();
                self.asking = None;
                let reason = error_chain(&problem);
                if !is_answered {
                    tracing::debug!(reason, "cannot read ahead");
                }
                is_answered.then_some(Answer::Failed(reason))
            });
            let Some(answer) = answer else { continue };
            // Fails only if the lane has ended.
            if answers.send((number, answer)).is_err() {
                break;
            }
            waker.wake();
        }
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
        self.letters.stop_fetching();
    }

    fn answer(&mut self, request: Request) -> Result<Option<Answer>, StepError> {
        match request {
            Request::Load => {
                self.ahead = None;
                self.returns.forget();
                let (mut reader, mut jobs) = self.jobs.reader(&self.kafka, &self.topic)?;
                reader.read_to_end(LOAD_TIMEOUT, |record| jobs.apply(&record))?;
                let end = reader.position(&self.topic, 0).unwrap_or(0);
                self.ledger.load(&self.kafka)?;
                Ok(Some(Answer::Loaded(jobs, end)))
            }
            Request::Try {
                job,
                entry,
                take,
                again,
                denied,
            } => {
                self.use_denied(denied, again);
                self.step(*job, &entry, take).map(boxed)
            }
            Request::ReadAhead {
                job,
                entry,
                items,
                denied,
            } => {
                self.ahead = None;
                self.use_denied(denied, false);
                let prepared = self.prepare(&job, &entry, items.clone(), self.clock.now())?;
                self.ahead = Some(Ahead {
                    id: job.spec().id.clone(),
                    from: items.start,
                    prepared,
                    at: Instant::now(),
                });
                Ok(None)
            }
            Request::FindGone { limit } => self.gone(limit).map(|gone| Some(Answer::Gone(gone))),
            Request::Observe { job, entry } => self.observe(*job, &entry),
        }
    }

    /// The first of these items, if they were read ahead.
    fn take_ahead(&mut self, id: &str, items: &Range<u32>) -> Option<Vec<Prepared>> {
        let ahead = self.ahead.take()?;
        let is_same = ahead.id == id && ahead.from == items.start && ahead.at.elapsed() < AHEAD;
        let mut prepared = is_same.then_some(ahead.prepared)?;
        prepared.truncate(items.len());
        Some(prepared)
    }

    /// What is known of topics may be outdated, and so is what was read ahead.
    fn use_denied(&mut self, denied: Vec<Arc<str>>, again: bool) {
        if again {
            self.topics.clear();
        }
        if again || self.denied != denied {
            self.ahead = None;
        }
        self.denied = denied;
    }

    /// The entries of the ledger to remove.
    fn gone(&mut self, limit: usize) -> Result<Vec<Removed>, StepError> {
        let Some(hold) = self.remove_after else {
            return Ok(Vec::new());
        };
        let hold = i64::try_from(hold.as_millis()).unwrap_or(i64::MAX);
        let states = self.ledger.read_on(&self.kafka)?;
        let written_by = Timestamp::from_millis(self.clock.now().as_millis().saturating_sub(hold));
        let below = |topic: &str, partition| self.shared.gone().below(topic, partition, Instant::now());
        let gone = states.removable(below, written_by, limit);
        if !gone.is_empty() {
            // Kafka may have deleted the records that were read, also those in the queues of clients, and a removed entry does not prevent that one of them is
            // redriven again.
            self.ahead = None;
            self.letters.forget();
        }
        Ok(gone)
    }

    /// Decides what becomes of the next items of a job, or of fewer if they are large.
    fn step(&mut self, job: Job, entry: &JobEntry, take: Take) -> Result<Step, StepError> {
        let before = entry.progress();
        let now = self.clock.now();
        let returned = self.returns.returned(&job, &before, now)?;
        let Take { items, max_done } = take;
        let mut step = counted(job, entry, before, returned, now);
        if step.auto_pause.is_some() {
            return Ok(step);
        }
        let prepared = match self.take_ahead(&step.job.spec().id, &items) {
            Some(prepared) => prepared,
            None => self.prepare(&step.job, entry, items, now)?,
        };
        step.tried = self.tried(step.job.kind, prepared)?;
        step.end_after(max_done);
        Ok(step)
    }

    /// Counts what has come back by the end of an observation, once none of the records waits any more, and the index has all of it.
    fn observe(&mut self, job: Job, entry: &JobEntry) -> Result<Option<Answer>, StepError> {
        let before = entry.progress();
        let now = self.clock.now();
        let end = pace::observed_at(&job, &before).unwrap_or(now);
        let settled = if job.has_auto_pause() {
            self.returns.settled_at(&job, entry, before.done, &*self.clock)
        } else {
            Ok(end)
        };
        let at = settled.as_ref().map_or(end, |settled| end.max(*settled));
        let returned = match self.returns.count(&job, at, now) {
            // The index is always some seconds old.
            Err(returns::StepError::Incomplete(None)) if now.since(at) <= MAX_AGE => {
                return Ok(Some(Answer::NotKnown));
            }
            Err(returns::StepError::Incomplete(_)) if !job.has_auto_pause() => None,
            returned => Some(returned?),
        };
        let gives_up = pace::gives_up_at(&job, &before).is_some_and(|at| at <= now);
        self.returns.observed(&job.spec().id);
        let mut step = counted(job, entry, before, returned, now);
        step.is_observation = true;
        // If enough of them have come back, the others do not matter.
        if let (Err(problem), None) = (settled, &step.auto_pause) {
            if !gives_up {
                return Err(problem.into());
            }
            step.give_up_waiting(error_chain(&problem));
        }
        Ok(boxed(step))
    }

    /// Reads what decides about items, except for the ledger. Returns the first ones, or all.
    fn prepare(
        &mut self,
        job: &Job,
        entry: &JobEntry,
        items: Range<u32>,
        now: Timestamp,
    ) -> Result<Vec<Prepared>, StepError> {
        if !self.ledger.is_loaded() {
            self.ledger.load(&self.kafka)?;
        }
        let edit = edit_of(job, entry)?;
        let items = entry.items_in(items).ok_or(StepError::Plan)?;
        let (mut found, mut originals) = (items.iter().map(|_| None).collect(), HashMap::new());
        let needs_time = |item: &Item| self.ledger.states().needs_time(&item.id);
        if job.kind == Kind::Redrive || items.iter().any(needs_time) {
            found = self.letters.lookup(&self.kafka, &items)?;
        }
        if job.kind == Kind::Redrive {
            originals =
                self.letters
                    .originals(&self.kafka, &self.destinations, &job.origin_ids(), &mut found)?;
            let options = job.target_options();
            for record in found.iter().flatten() {
                let letter = &record.record;
                let candidate = match originals.get(&letter.position) {
                    Some(Ok(whole)) => Candidate::restored(letter, whole),
                    Some(Err(_)) => continue,
                    None => Candidate::of(letter),
                };
                if let Ok(target) = self.destinations.target(candidate, &options) {
                    self.look_up_topic(&target.topic)?;
                }
            }
        }
        let (topics, denied) = (&self.topics, &self.denied);
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
    fn tried(&mut self, kind: Kind, prepared: Vec<Prepared>) -> Result<Vec<Tried>, StepError> {
        let states = self.ledger.read_on(&self.kafka)?;
        let tried = prepared
            .into_iter()
            .map(|prepared| prepared.tried(kind, |item, dead_at| states.state(item, dead_at)));
        Ok(tried.collect())
    }

    fn look_up_topic(&mut self, topic: &Arc<str>) -> Result<(), ReadError> {
        let is_known = self
            .topics
            .get(topic)
            .is_some_and(|(_, at)| at.elapsed() < BELIEVED);
        if is_known {
            return Ok(());
        }
        let asking = match &self.asking {
            Some(asking) => asking,
            None => self.asking.insert(TopicClient::new(&self.kafka)?),
        };
        let presence = match asking.partitions(topic) {
            Ok(_) => Presence::Exists,
            Err(ReadError::Missing(_)) => Presence::Missing,
            Err(ReadError::Denied(_)) => Presence::Denied,
            Err(error) => return Err(error),
        };
        self.topics.insert(topic.clone(), (presence, Instant::now()));
        Ok(())
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
