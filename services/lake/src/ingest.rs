//! The thread that reads topics and commits rows.
//!
//! It reads outside of any consumer group: the tables know up to where they contain each partition. All tables share the memory for rows. While the
//! store cannot be written, nothing is read.

mod feeds;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use delta_kernel::arrow::array::RecordBatch;
use redeliver_core::Clock;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_dlq_inspector::masking::Masking;
use redeliver_kafka::follow::{Event, Follower, Start, is_out_of_range};
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::survey::{SurveyedTopic, Surveyor};
use redeliver_kafka::{KafkaSettings, TopicId, Waker};
use redeliver_runtime::health::Part;
use tokio_util::sync::CancellationToken;

use self::feeds::{Absence, Feeds, Lost, Topic};
pub(crate) use self::feeds::{application_id, text_of};
use crate::appender::{Appended, Appender, Move};
use crate::batch::Batch;
use crate::config::LakeConfig;
use crate::delta::{DayRows, DeltaTable, Store, TableError};
use crate::metrics::{Metrics, Outcome};
use crate::rows::{Gap, Rows, gap};
use crate::schema::{GAPS, Schema, TABLES};
use crate::sources::Sources;

/// Maximum wait for a record, after which the loop looks for work and for shutdown.
const POLL_TIMEOUT: Duration = Duration::from_millis(200);
/// Time between two looks at the topics of the cluster.
const SURVEY_INTERVAL: Duration = Duration::from_secs(5);
/// How many surveys in a row must lack a topic that was read, or not be permitted to see it: the metadata of a broker that has just started can be incomplete.
const SURVEYS_WITHOUT: u32 = 12;
/// After this many surveys in a row in which nothing was read of a partition although it has records, the consumer is replaced: after a restart of a broker, a
/// fetch may hang forever.
const STALLED_SURVEYS: u32 = 6;
/// Positions that move without rows, past markers of transactions, are committed after this many flush intervals. Otherwise, markers that Kafka has deleted
/// would look like missing records.
const INTERVALS_WITHOUT_ROWS: u32 = 10;
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// The thread, before it runs.
pub(crate) struct Ingest {
    pub(crate) store: Store,
    pub(crate) settings: KafkaSettings,
    pub(crate) surveyor: Surveyor,
    pub(crate) sources: Sources,
    pub(crate) lake: LakeConfig,
    pub(crate) masking: Masking,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) part: Part,
    pub(crate) metrics: Metrics,
    pub(crate) stop: CancellationToken,
}

/// A table, and rows that are not in it yet.
struct Buffer {
    appender: Appender<DeltaTable>,
    batch: Batch,
    /// When the oldest of the rows was added, or, without rows, when a position has moved.
    since: Option<Instant>,
    /// The rows that are being appended.
    appending: usize,
    /// Whether the positions must be read again, because rows were dropped.
    is_stale: bool,
}

/// Why a round ended early.
enum Interrupted {
    /// What has failed is tried again.
    Table(TableError),
    Kafka(ReadError),
}

impl From<TableError> for Interrupted {
    fn from(error: TableError) -> Self {
        Self::Table(error)
    }
}

impl From<ReadError> for Interrupted {
    fn from(error: ReadError) -> Self {
        Self::Kafka(error)
    }
}

impl Ingest {
    /// Reads and commits until `stop` is cancelled.
    ///
    /// # Errors
    /// If a table is unsuitable, or the Kafka client cannot be created.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
        let buffers = loop {
            match open(&self.store) {
                Ok(buffers) => break buffers,
                Err(error @ (TableError::Unsuitable { .. } | TableError::Store { source: None, .. })) => {
                    return Err(error.into());
                }
                Err(error) => {
                    let error = error_chain(&error);
                    self.part.not_ready(format!("opening tables: {error}"));
                    tracing::warn!(error, "cannot open tables; retrying");
                }
            }
            if is_stopped_within(&self.stop, backoff.next_delay()) {
                return Ok(());
            }
        };
        let mut running = Running {
            follower: Follower::strict(&self.settings, Waker::new())?,
            rows: Rows::new(self.masking.clone(), &self.lake),
            ingest: self,
            buffers,
            feeds: Feeds::default(),
            no_id: TopicId::from_bits(fastrand::u128(..)),
            next_survey: Instant::now(),
            surveyed_rounds: 0,
            unreadable: None,
            log_throttle: LogThrottle::default(),
        };
        backoff.reset();
        while !running.ingest.stop.is_cancelled() {
            match running.round() {
                Ok(()) => backoff.reset(),
                Err(interrupted) => {
                    running.interrupted(&interrupted);
                    if is_stopped_within(&running.ingest.stop, backoff.next_delay()) {
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Waits for so long, or until the process stops. Returns whether it stops.
pub(crate) fn is_stopped_within(stop: &CancellationToken, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while !stop.is_cancelled() && Instant::now() < deadline {
        std::thread::sleep(POLL_TIMEOUT.min(time));
    }
    stop.is_cancelled()
}

fn open(store: &Store) -> Result<Vec<Buffer>, TableError> {
    store.probe()?;
    let opened = TABLES.into_iter().map(|schema| -> Result<_, TableError> {
        let (table, snapshot) = store.open(schema)?;
        Ok(Buffer {
            appender: Appender::new(table, snapshot),
            batch: Batch::new(schema),
            since: None,
            appending: 0,
            is_stale: false,
        })
    });
    opened.collect()
}

/// How an attempt to flush a table ended.
enum Flushed {
    Done,
    /// Kafka does not tell the id of this topic, so that its rows could be of another one.
    Waits(Arc<str>),
}

fn limit(lake: &LakeConfig) -> usize {
    usize::try_from(lake.buffer_bytes).unwrap_or(usize::MAX)
}

/// The size of the rows in memory, in bytes.
fn buffered(buffers: &[Buffer]) -> usize {
    buffers.iter().map(|buffer| buffer.batch.bytes()).sum()
}

/// The table to flush next, if one is due, without those that wait for something, and those whose last rows were not appended.
fn due<W>(buffers: &[Buffer], lake: &LakeConfig, waiting: &BTreeMap<usize, W>) -> Option<usize> {
    let interval = lake.flush_interval.duration();
    let is_due = |buffer: &Buffer| {
        let wait = match buffer.batch.rows() {
            0 => interval * INTERVALS_WITHOUT_ROWS,
            _ => interval,
        };
        buffer.since.is_some_and(|since| since.elapsed() >= wait)
    };
    let free = || {
        buffers
            .iter()
            .enumerate()
            .filter(|(table, _)| !waiting.contains_key(table))
            .filter(|(_, buffer)| !buffer.is_stale && !buffer.appender.is_pending())
    };
    if let Some((due, _)) = free().find(|(_, buffer)| is_due(buffer)) {
        return Some(due);
    }
    let (largest, buffer) = free().max_by_key(|(_, buffer)| buffer.batch.bytes())?;
    (buffer.batch.bytes() > 0 && buffered(buffers) >= limit(lake)).then_some(largest)
}

fn take(batch: &mut Batch, schema: &Schema) -> Result<RecordBatch, TableError> {
    batch.take().map_err(|error| TableError::Unsuitable {
        table: schema.table,
        problem: format!("cannot take rows: {error}"),
    })
}

struct Running {
    ingest: Ingest,
    follower: Follower,
    rows: Rows,
    /// By the number of the table.
    buffers: Vec<Buffer>,
    feeds: Feeds,
    /// Stands for the id of topics that have none: those of the embedded broker, which are new whenever it starts.
    no_id: TopicId,
    next_survey: Instant,
    /// How many rounds the follower had made at the last survey.
    surveyed_rounds: u64,
    /// A topic that the last survey could not read, and why.
    unreadable: Option<String>,
    log_throttle: LogThrottle,
}

impl Running {
    fn round(&mut self) -> Result<(), Interrupted> {
        // What could not be appended goes first, so that at most one batch of each table is in memory besides the next one. A table that fails does not hold up
        // others.
        let mut failed = None;
        for table in 0..self.buffers.len() {
            // A store that does not answer takes long for each of them.
            if self.ingest.stop.is_cancelled() {
                return Ok(());
            }
            if let Err(error) = self.resume(table) {
                failed.get_or_insert(error);
            }
        }
        if failed.is_none() {
            if Instant::now() >= self.next_survey {
                let next = Instant::now();
                self.next_survey = next;
                failed = self.survey().err();
                // Unless the survey wants another one at once. A slow one must leave time for reading.
                if self.next_survey == next {
                    self.next_survey = Instant::now() + SURVEY_INTERVAL;
                }
            }
            if let Err(error) = self.gather() {
                failed.get_or_insert(error);
            }
        }
        let mut waiting = BTreeMap::new();
        while !self.ingest.stop.is_cancelled()
            && let Some(table) = due(&self.buffers, &self.ingest.lake, &waiting)
        {
            match self.flush(table) {
                Ok(Flushed::Done) => {}
                Ok(Flushed::Waits(topic)) => drop(waiting.insert(table, topic)),
                Err(error) => {
                    failed.get_or_insert(error);
                    break;
                }
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let waiting = waiting
            .into_values()
            .next()
            .map(|topic| format!("Kafka does not tell the id of topic {topic}"));
        match waiting
            .or_else(|| self.unreadable.clone())
            .or_else(|| self.feeds.refusal())
        {
            Some(problem) => self.report(&problem),
            None => {
                self.log_throttle.reset();
                self.ingest.part.ready();
            }
        }
        Ok(())
    }

    /// Appends what is left of a table, or reads its positions again.
    fn resume(&mut self, table: usize) -> Result<(), Interrupted> {
        if self.buffers[table].appender.is_pending() {
            let appended = self.buffers[table].appender.resume();
            self.appended(table, appended)?;
        }
        if self.buffers[table].is_stale {
            self.reload(table)?;
        }
        Ok(())
    }

    fn interrupted(&mut self, interrupted: &Interrupted) {
        self.report(&match interrupted {
            Interrupted::Table(error) => error_chain(error),
            Interrupted::Kafka(error) => error_chain(error),
        });
    }

    fn report(&mut self, problem: &str) {
        self.ingest.part.not_ready(problem);
        if self.log_throttle.should_log() {
            tracing::warn!(problem, "cannot append all rows; retrying");
        }
    }

    /// Finds topics, and topics that were created again.
    fn survey(&mut self) -> Result<(), Interrupted> {
        let sources = &self.ingest.sources;
        // A list of all topics leaves out those that must not be seen, as if they did not exist.
        let found = self
            .ingest
            .surveyor
            .topics_and(|name| sources.of(name, "").is_some(), &self.feeds.names())?;
        self.unreadable = None;
        let needs_ids = !self.ingest.settings.is_embedded;
        for topic in &found {
            if let Some(refusal) = &topic.refusal {
                self.unreadable = Some(format!("topic {}: {refusal}", topic.name));
                continue;
            }
            // Its positions have its id in their names. Without it, it would be read again from the beginning.
            if topic.id.is_none() && needs_ids {
                if self.feeds.topic(&topic.name).is_none() {
                    self.unreadable = Some(format!("Kafka does not tell the id of topic {}", topic.name));
                }
                continue;
            }
            if self
                .feeds
                .topic(&topic.name)
                .is_some_and(|known| known.is_other(topic.id))
            {
                self.forget(&topic.name.clone(), "recreated")?;
            }
            self.follow(topic)?;
            self.ingest.metrics.set_lag(&topic.name, self.feeds.lag(topic));
        }
        for (topic, absence) in self.feeds.absent(&found, SURVEYS_WITHOUT) {
            match absence {
                Absence::Missing => self.forget(&topic, "deleted")?,
                Absence::Refused => self.suspend(&topic)?,
            }
        }
        let rounds = self.follower.rounds();
        let had_turn = rounds > std::mem::replace(&mut self.surveyed_rounds, rounds);
        if self.feeds.is_stalled(&found, had_turn, STALLED_SURVEYS) {
            tracing::info!("consumer stalled; recreating it");
            self.follower.renew()?;
        }
        Ok(())
    }

    /// Follows the partitions of a topic that are not followed yet.
    fn follow(&mut self, found: &SurveyedTopic) -> Result<(), Interrupted> {
        if self.feeds.topic(&found.name).is_none() {
            let id = found.id.unwrap_or(self.no_id);
            let id = text_of(id);
            let Some(source) = self.ingest.sources.of(&found.name, &id) else {
                return Ok(());
            };
            self.feeds.add_topic(&found.name, Topic::new(found.id, source));
        }
        let mut starts = Vec::new();
        for (partition, extent) in (0..).zip(&found.partitions) {
            let buffers = &self.buffers;
            let mut start = self.feeds.start(&found.name, partition, *extent, |table, id| {
                buffers[table].appender.position(id)
            })?;
            // Read from the beginning for a table without a position, it would never be out of range for another one.
            if matches!(start, Some(Start { from: None, .. }))
                && self.feeds.has_position(&found.name, partition)
            {
                // The next survey starts it.
                let Some(extent) = *extent else { continue };
                let lost = self.feeds.before(&found.name, partition, extent.low);
                self.append_gaps(&lost, "expired")?;
                let from = Some(extent.low);
                start = self.feeds.skip_to(&found.name, partition, extent);
                start = start.map(|start| Start { from, ..start });
            }
            starts.extend(start);
        }
        self.follow_from(&starts)
    }

    /// If this fails, the partitions are not followed, and are started again by the next survey.
    fn follow_from(&mut self, starts: &[Start]) -> Result<(), Interrupted> {
        if !starts.is_empty() {
            self.follower.add(starts)?;
            self.feeds.followed(starts);
        }
        Ok(())
    }

    /// Reads records into the buffers.
    fn gather(&mut self) -> Result<(), Interrupted> {
        let Self {
            ingest,
            follower,
            rows,
            buffers,
            feeds,
            ..
        } = self;
        let limit = limit(&ingest.lake);
        let mut refused = Vec::new();
        let mut bytes = buffered(buffers);
        // Of tables that wait for something.
        if bytes >= limit {
            std::thread::sleep(POLL_TIMEOUT);
            return Ok(());
        }
        follower.poll(POLL_TIMEOUT, |event| {
            match event {
                Event::Record(record) => feeds.read(&record, |table, origin| {
                    let buffer = &mut buffers[table];
                    bytes -= buffer.batch.bytes();
                    rows.add(&mut buffer.batch, TABLES[table], &record, origin);
                    bytes += buffer.batch.bytes();
                    buffer.since.get_or_insert_with(Instant::now);
                }),
                Event::End {
                    topic,
                    partition,
                    offset,
                } => feeds.ended(&topic, partition, offset, |table| {
                    buffers[table].since.get_or_insert_with(Instant::now);
                }),
                Event::Refused {
                    topic,
                    partition,
                    error,
                } => refused.push((topic, partition, error)),
            }
            if bytes >= limit || !refused.is_empty() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        ingest.metrics.set_buffered(bytes);
        for (topic, partition, error) in refused {
            if is_out_of_range(error) {
                self.out_of_range(&topic, partition)?;
            } else {
                self.feeds.refused(&topic, partition, error.to_string());
            }
        }
        Ok(())
    }

    /// Appends the rows of a buffer.
    fn flush(&mut self, table: usize) -> Result<Flushed, Interrupted> {
        let (moves, topics) = self.feeds.moves(table);
        // A record that was read after its topic was created again has the position of another one.
        let names: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
        let ids = self.follower.topic_ids(&names)?;
        for topic in &topics {
            let Some(known) = self.feeds.topic(topic).filter(|known| known.has_id()) else {
                continue;
            };
            match ids.get(&**topic) {
                Some(Ok(id)) if known.is_other(Some(*id)) => {
                    self.forget(topic, "recreated")?;
                    return Ok(Flushed::Done);
                }
                Some(Ok(_)) => {}
                // Perhaps the broker does not know all topics yet; surveys decide.
                Some(Err(_)) | None => return Ok(Flushed::Waits(topic.clone())),
            }
        }
        let buffer = &mut self.buffers[table];
        buffer.since = None;
        buffer.appending = buffer.batch.rows();
        let rows = match buffer.appending {
            0 => None,
            _ => {
                // If it fails, the rows are lost, and are read again.
                buffer.is_stale = true;
                let rows = take(&mut buffer.batch, TABLES[table])?;
                buffer.is_stale = false;
                Some(DayRows {
                    rows,
                    appended_at: self.ingest.clock.now(),
                })
            }
        };
        if moves.is_empty() {
            return Ok(Flushed::Done);
        }
        let appended = buffer.appender.append(rows, moves);
        self.appended(table, appended)?;
        self.ingest.metrics.set_buffered(buffered(&self.buffers));
        Ok(Flushed::Done)
    }

    /// What follows from an append.
    fn appended(&mut self, table: usize, appended: Result<Appended, TableError>) -> Result<(), Interrupted> {
        let name = TABLES[table].table;
        let (metrics, buffer) = (&self.ingest.metrics, &mut self.buffers[table]);
        match appended {
            Ok(Appended::Done { conflicts }) => {
                metrics.ended(name, Outcome::Conflict, conflicts);
                metrics.committed(name, buffer.appending, self.ingest.clock.now());
                let appender = &mut buffer.appender;
                if let Some(snapshot) = appender.table().checkpoint(appender.snapshot()) {
                    appender.replace_snapshot(snapshot);
                }
                self.feeds.committed(table);
                Ok(())
            }
            Ok(Appended::Overtaken) => {
                metrics.ended(name, Outcome::Overtaken, 1);
                tracing::warn!(
                    table = name,
                    "another process has written to the table; reading again from its positions"
                );
                self.reload(table)
            }
            Ok(Appended::Abandoned) => {
                metrics.ended(name, Outcome::Failed, 1);
                tracing::warn!(
                    table = name,
                    "rows could not be committed for too long; reading them again"
                );
                self.reload(table)
            }
            Err(error) => {
                metrics.ended(name, Outcome::Failed, 1);
                Err(error.into())
            }
        }
    }

    /// Drops the rows of a table that are in memory, and reads on from its positions.
    fn reload(&mut self, table: usize) -> Result<(), Interrupted> {
        let buffer = &mut self.buffers[table];
        buffer.is_stale = true;
        buffer.batch.clear();
        buffer.since = None;
        buffer.appender.drop_pending();
        let starts = self.feeds.reload(table, |id| buffer.appender.position(id))?;
        self.follow_from(&starts)?;
        self.buffers[table].is_stale = false;
        Ok(())
    }

    /// Stops reading a topic that was deleted. What was read since the last commit may be of the next topic with this name.
    fn forget(&mut self, topic: &Arc<str>, cause: &'static str) -> Result<(), Interrupted> {
        tracing::warn!(topic = &**topic, cause, "topic was deleted or created again");
        let lost = self.feeds.uncommitted(topic);
        self.append_gaps(&lost, cause)?;
        let tables = self.feeds.forget(topic);
        self.ingest.metrics.forget(topic);
        self.next_survey = Instant::now();
        self.drop_rows(topic, tables)
    }

    /// Stops reading a topic that must not be seen any more. What was read of it and may be of another topic by now does not hold up other rows.
    fn suspend(&mut self, topic: &Arc<str>) -> Result<(), Interrupted> {
        let tables = self.feeds.suspend(topic);
        self.drop_rows(topic, tables)
    }

    /// Drops the rows of a topic that is not read any more, and of others in the same tables, which are read again.
    fn drop_rows(&mut self, topic: &str, tables: Vec<usize>) -> Result<(), Interrupted> {
        // All of them, also if something fails now: rows of the topic must not be committed any more.
        for &table in &tables {
            self.buffers[table].is_stale = true;
        }
        self.follower.remove(topic)?;
        for table in tables {
            self.reload(table)?;
        }
        Ok(())
    }

    /// Kafka has no record at the next offset of a partition.
    fn out_of_range(&mut self, topic: &Arc<str>, partition: i32) -> Result<(), Interrupted> {
        // Unless it is followed from another offset now, the next survey starts it again.
        self.feeds.stop(topic, partition);
        let found = self.ingest.surveyor.topics(|name| *name == **topic)?;
        let needs_id = !self.ingest.settings.is_embedded;
        let found = found.first();
        // Without its id, it could have been created again.
        let Some(found) = found.filter(|found| found.id.is_some() || !needs_id) else {
            return Ok(());
        };
        if self
            .feeds
            .topic(topic)
            .is_some_and(|known| known.is_other(found.id))
        {
            return self.forget(topic, "recreated");
        }
        let extent = usize::try_from(partition)
            .ok()
            .and_then(|index| *found.partitions.get(index)?);
        let Some(extent) = extent else { return Ok(()) };
        let expired = self.feeds.before(topic, partition, extent.low);
        if expired.is_empty() {
            // It has lost records that the tables contain. Reading goes on from the offset after them.
            let lost = self.feeds.truncated(topic, partition, extent.end);
            self.append_gaps(&lost, "truncated")?;
        } else {
            self.append_gaps(&expired, "expired")?;
        }
        let start = self.feeds.skip_to(topic, partition, extent);
        self.follow_from(start.as_slice())
    }

    /// Adds rows about missing records, before positions pass them.
    fn append_gaps(&mut self, lost: &[Lost], cause: &'static str) -> Result<(), Interrupted> {
        let table = TABLES.len() - 1;
        debug_assert_eq!(TABLES[table].table, GAPS.table);
        for lost in lost {
            let name = TABLES[lost.table].table;
            let id = format!("{name}/{}", lost.id);
            let noticed_at = self.ingest.clock.now();
            let appender = &mut self.buffers[table].appender;
            loop {
                // An earlier attempt, or another process, may have added a part of it.
                let known = appender.position(&id)?;
                let from = lost.from.max(known.unwrap_or(lost.from));
                if from >= lost.until {
                    break;
                }
                tracing::error!(
                    table = name,
                    topic = &*lost.topic,
                    partition = lost.partition,
                    from,
                    until = lost.until,
                    cause,
                    "the table will lack records"
                );
                let mut batch = Batch::new(&GAPS);
                gap(
                    &mut batch,
                    &Gap {
                        table: name,
                        topic: &lost.topic,
                        topic_id: &lost.topic_id,
                        partition: lost.partition,
                        from,
                        until: lost.until,
                        cause,
                        noticed_at,
                    },
                );
                let rows = take(&mut batch, &GAPS)?;
                let moved = Move {
                    id: id.clone(),
                    from: known,
                    to: lost.until,
                };
                let rows = DayRows {
                    rows,
                    appended_at: noticed_at,
                };
                match appender.append(Some(rows), vec![moved]) {
                    Ok(Appended::Done { .. }) => self.ingest.metrics.missing(&lost.topic, lost.until - from),
                    Ok(Appended::Overtaken | Appended::Abandoned) => {}
                    Err(error) => {
                        // The caller starts again from what the table contains then.
                        appender.drop_pending();
                        return Err(error.into());
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
