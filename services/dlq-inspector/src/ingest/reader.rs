//! The thread that follows the topics.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use bytes::Bytes;
use redeliver_kafka::follow::{Event, Follower};
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::{KafkaSettings, Waker};
use redeliver_runtime::health::Part;
use tokio_util::sync::CancellationToken;

use super::topics::{Arrival, Plan, Topics};
use super::{Survey, Work};
use crate::index::Change;
use crate::ledger::{self, Update};
use crate::letter::Letter;
use crate::metrics::Metrics;
use crate::shared::Shared;

/// How many records are read before they are handed over.
const BATCH: usize = 2_000;
/// And how many bytes of keys and headers, which are anybody's.
const BATCH_BYTES: usize = 4 << 20;
/// How long nothing may come before surveys and the end are looked for.
const PAUSE: Duration = Duration::from_millis(200);
/// How often the same trouble is told.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// What the thread works with.
pub(crate) struct Reader {
    pub(crate) settings: KafkaSettings,
    pub(crate) surveys: Receiver<Survey>,
    pub(crate) writer: SyncSender<Work>,
    pub(crate) waker: Waker,
    pub(crate) shared: Arc<Shared>,
    pub(crate) part: Part,
    pub(crate) metrics: Metrics,
    pub(crate) stop: CancellationToken,
}

/// The writer has ended, so there is nothing to read for. It says itself why.
struct WriterGone;

impl Reader {
    /// Follows the topics, from the positions of the index on, until it is told to stop.
    pub(crate) fn run(self, positions: Vec<(Arc<str>, i32, i64)>) -> Result<(), ReadError> {
        let follower = Follower::new(&self.settings, self.waker.clone())?;
        let mut reading = Reading {
            reader: self,
            follower,
            topics: Topics::new(positions),
            number: 0,
            was_caught_up: false,
            said: None,
        };
        while !reading.reader.stop.is_cancelled() {
            match reading.round()? {
                Ok(()) => {}
                Err(WriterGone) => break,
            }
        }
        Ok(())
    }
}

struct Reading {
    reader: Reader,
    follower: Follower,
    topics: Topics,
    /// Of the last work for the writer.
    number: u64,
    was_caught_up: bool,
    said: Option<Instant>,
}

/// What came in one round.
#[derive(Default)]
struct Batch {
    letters: Vec<Letter>,
    bytes: usize,
    ledger: Vec<Update>,
    positions: BTreeMap<(Arc<str>, i32), i64>,
    made_again: BTreeSet<Arc<str>>,
    refused: Vec<(Arc<str>, String)>,
}

impl Reading {
    fn round(&mut self) -> Result<Result<(), WriterGone>, ReadError> {
        while let Ok(survey) = self.reader.surveys.try_recv() {
            let plan = self.topics.survey(&survey, self.number + 1);
            if let Err(gone) = self.carry_out(plan)? {
                return Ok(Err(gone));
            }
            self.note_lag(&survey);
        }
        let mut batch = Batch::default();
        let topics = &mut self.topics;
        self.follower.poll(PAUSE, |event| {
            batch.add(topics, event);
            batch.is_full()
        })?;
        self.tell_refused(&batch.refused);
        let made_again = std::mem::take(&mut batch.made_again);
        if let Err(gone) = self.hand_over(batch.into_changes()) {
            return Ok(Err(gone));
        }
        for topic in made_again {
            let plan = self.topics.made_again(&topic, self.number + 1);
            if let Err(gone) = self.carry_out(plan)? {
                return Ok(Err(gone));
            }
        }
        Ok(self.tell_when_caught_up())
    }

    fn carry_out(&mut self, plan: Plan) -> Result<Result<(), WriterGone>, ReadError> {
        for topic in &plan.remove {
            self.follower.remove(topic)?;
            self.reader.metrics.forget(topic);
        }
        self.follower.add(&plan.follow)?;
        if plan.renew {
            tracing::info!("nothing comes though there is something; going on with a new consumer");
            self.follower.renew()?;
        }
        Ok(self.hand_over(plan.changes))
    }

    /// Blocks while the writer has enough to do.
    fn hand_over(&mut self, changes: Vec<Change>) -> Result<(), WriterGone> {
        if changes.is_empty() {
            return Ok(());
        }
        self.number += 1;
        self.send(Work::Changes {
            number: self.number,
            changes,
        })
    }

    fn send(&self, work: Work) -> Result<(), WriterGone> {
        self.reader.writer.send(work).map_err(|_| WriterGone)
    }

    fn tell_when_caught_up(&mut self) -> Result<(), WriterGone> {
        if self.was_caught_up || !self.topics.caught_up() {
            return Ok(());
        }
        self.was_caught_up = true;
        self.send(Work::CaughtUp)
    }

    fn note_lag(&self, survey: &Survey) {
        let mut total = 0;
        let mut seen = self.reader.shared.topics();
        for found in &survey.topics {
            let lag = self.topics.lag(found);
            total += lag;
            if let Some(topic) = seen.get_mut(&*found.name) {
                topic.lag = lag;
                self.reader.metrics.set_lag(&found.name, lag);
            }
        }
        drop(seen);
        if !self.was_caught_up {
            self.reader
                .part
                .not_ready(format!("reading dead letters, {total} are left"));
        }
    }

    fn tell_refused(&mut self, refused: &[(Arc<str>, String)]) {
        let Some((topic, error)) = refused.first() else {
            return;
        };
        if self.said.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
            self.said = Some(Instant::now());
            tracing::warn!(topic = &**topic, error, "a dead-letter topic cannot be read");
        }
    }
}

impl Batch {
    fn is_full(&self) -> ControlFlow<()> {
        if self.letters.len() + self.ledger.len() >= BATCH || self.bytes >= BATCH_BYTES {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    fn add(&mut self, topics: &mut Topics, event: Event) {
        match event {
            Event::Record(record) => {
                let position = &record.position;
                if self.made_again.contains(&position.topic) {
                    return;
                }
                match topics.arrived(&position.topic, position.partition, position.offset) {
                    Arrival::Backwards => {
                        self.made_again.insert(position.topic.clone());
                        return;
                    }
                    Arrival::Stale => return,
                    Arrival::Next => {}
                }
                let key = (position.topic.clone(), position.partition);
                self.positions.insert(key, position.offset + 1);
                if &*position.topic == ledger::TOPIC {
                    match Update::read(&record) {
                        Ok(update) => self.ledger.push(update),
                        Err(problem) => {
                            tracing::warn!(record = %record.position, %problem, "a record of the ledger says nothing");
                        }
                    }
                } else {
                    let letter = Letter::read(&record);
                    self.bytes += letter.headers.len() + letter.key.as_ref().map_or(0, Bytes::len);
                    self.letters.push(letter);
                }
            }
            Event::End { topic, partition } => topics.ended(&topic, partition),
            Event::Refused {
                topic,
                partition,
                error,
            } => {
                topics.refused(&topic, partition);
                self.refused.push((topic, error.to_string()));
            }
        }
    }

    fn into_changes(self) -> Vec<Change> {
        let mut changes = Vec::new();
        if !self.letters.is_empty() {
            changes.push(Change::Letters(self.letters));
        }
        if !self.ledger.is_empty() {
            changes.push(Change::Ledger(self.ledger));
        }
        let positions = self.positions.into_iter();
        changes.extend(positions.map(|((topic, partition), next)| Change::Position {
            topic,
            partition,
            next,
        }));
        changes
    }
}
