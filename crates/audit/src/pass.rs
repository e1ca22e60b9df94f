//! One pipeline, pass after pass: each reads what is new since the one before.
//!
//! A pass has the steps of [`crate::run`]. Its first one also reads what the other topics contained before the committed offsets were read, in parts, so
//! that the ledger can settle most records of a long topic early. The source is read up to the last record that its group has completed: a later one
//! waits there, and has no other copy, unless it is a retry that has returned to the source. Where there can be some, the rest is read ahead, once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_core::pipeline::{ReturnTo, TopicRole};
use redeliver_core::{HandlerChanges, JobId, Pipeline, Record, SchedulerTopics, Timestamp};
use redeliver_kafka::backlog::GroupPositions;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::survey::{Extent, Surveyor};
use redeliver_kafka::{KafkaSettings, TopicId};
use redeliver_proto::long_wait;

use crate::ledger::{Ledger, Scheduled};
use crate::report::Report;

/// The number of offsets in a part.
const PART: u64 = 200_000;
/// The number of parts of a pipeline after which it is the turn of others.
const PARTS: u64 = 3;

type Partition = (Arc<str>, i32);
type Offsets = BTreeMap<Partition, i64>;

/// Why a pass has failed.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Topics or committed offsets could not be read. The next pass continues.
    #[error("cannot {step}")]
    Read {
        /// The step.
        step: &'static str,
        /// The cause, which can be that of several pipelines.
        source: Arc<ReadError>,
    },
    /// Records were deleted before they were read. The next pass begins again.
    #[error("retention has removed records of {0} before they were read")]
    Cut(Arc<str>),
    /// An output or a source that may be compacted proves nothing.
    #[error(
        "topic `{0}` may be compacted, so records can be missing from it: its `cleanup.policy` must be `delete` and visible to the inspector"
    )]
    Compacted(Arc<str>),
    /// A topic was created again, or committed offsets were reset. The next pass begins again.
    #[error("a topic was created again, or committed offsets were reset")]
    Changed,
    /// More records than permitted had to be kept. The next pass begins again.
    #[error("more than {0} records wait, are dead or have a defect")]
    Full(usize),
    /// There was too much to read for one pass. The next one continues.
    #[error("there is more to read")]
    Unfinished,
    /// It gave up because it was told to.
    #[error("the process is ending")]
    Stopped,
}

pub(crate) fn failed<E: Into<Arc<ReadError>>>(step: &'static str) -> impl FnOnce(E) -> Fault {
    move |source| Fault::Read {
        step,
        source: source.into(),
    }
}

/// How to read.
pub struct Pace<'p> {
    /// The timeout of each step; in parts, the longest time without progress.
    pub timeout: Duration,
    /// Whether a step may take longer, as long as it makes progress, and a pass may end before everything was read.
    pub in_parts: bool,
    /// The maximum number of bytes of records per second; `None`: no limit.
    pub bytes_per_second: Option<u64>,
    /// The maximum number of records and copies that are kept, of all pipelines.
    pub max_kept: usize,
    /// Whether to give up.
    pub stop: &'p dyn Fn() -> bool,
    /// Gets the name of a pipeline, how many offsets of it were read in this pass, and how many there are.
    pub progress: &'p dyn Fn(&str, u64, u64),
    /// How many records the other pipelines keep, and the one that keeps most.
    pub(crate) kept_by_others: usize,
    pub(crate) kept_by_largest: usize,
    second: Instant,
    read: u64,
}

impl<'p> Pace<'p> {
    /// No limits.
    #[must_use]
    pub fn new(timeout: Duration, stop: &'p dyn Fn() -> bool) -> Self {
        Self {
            timeout,
            in_parts: false,
            bytes_per_second: None,
            max_kept: usize::MAX,
            stop,
            progress: &|_, _, _| {},
            kept_by_others: 0,
            kept_by_largest: 0,
            second: Instant::now(),
            read: 0,
        }
    }

    /// Whether a step ends with its timeout, although it makes progress.
    pub(crate) fn ends_late(&self) -> impl Fn() -> bool + use<'p> {
        let (in_parts, stop) = (self.in_parts, self.stop);
        move || !in_parts || stop()
    }

    /// Counts a record, and pauses if there were too many bytes in the last second.
    pub(crate) fn read(&mut self, record: &Record) {
        let Some(bytes_per_second) = self.bytes_per_second else {
            return;
        };
        self.read += record.size() as u64;
        let second = Duration::from_secs(1);
        while self.read >= bytes_per_second && !(self.stop)() {
            let elapsed = self.second.elapsed();
            if elapsed >= second {
                // A record can be larger than the limit.
                self.read = self.read.saturating_sub(bytes_per_second);
                self.second = Instant::now();
            } else {
                std::thread::park_timeout(second - elapsed);
            }
        }
    }
}

/// The clients of an auditor.
pub(crate) struct Clients {
    pub(crate) settings: KafkaSettings,
    pub(crate) surveyor: Surveyor,
    pub(crate) reader: TopicReader,
    /// The consumer group and the topics of the scheduler.
    pub(crate) scheduler: Option<(String, SchedulerTopics)>,
}

/// The audit of a pipeline.
pub struct PipelineAudit {
    pub(crate) pipeline: Pipeline,
    changes: HandlerChanges,
    ledger: Ledger,
    /// The topics of the pipeline.
    roles: HashMap<Arc<str>, TopicRole>,
    ids: BTreeMap<String, TopicId>,
    /// Where the partitions began and ended before the committed offsets were read.
    extents: BTreeMap<Partition, Extent>,
    /// The next offset to read of each partition, and where reading has begun.
    next: Offsets,
    begins: Offsets,
    positions: GroupPositions,
    /// The jobs of the scheduler that have not ended.
    jobs: HashMap<JobId, Scheduled>,
    /// Whether it needs all records of the scheduler: it has begun, or has missed some.
    pub(crate) lacks_scheduler: bool,
    /// Whether the source is read ahead.
    reads_ahead: bool,
    /// Whether records are only checked if the output and the dead letters certainly contain their ends.
    covers_recent: bool,
    /// Since when records are checked; `None`: all that the source has.
    since: Option<Timestamp>,
    /// Partitions of the source that do not begin with the first record, until a record was read.
    begun: BTreeSet<i32>,
}

impl PipelineAudit {
    /// An audit of all records of the source, which has read nothing. `changes`: what the handler of the pipeline may change in a result.
    #[must_use]
    pub fn new(pipeline: Pipeline, changes: HandlerChanges) -> Self {
        Self {
            ledger: Ledger::new(&pipeline, changes),
            reads_ahead: !pipeline.retired,
            pipeline,
            changes,
            roles: HashMap::new(),
            ids: BTreeMap::new(),
            extents: BTreeMap::new(),
            next: Offsets::new(),
            begins: Offsets::new(),
            positions: GroupPositions::default(),
            jobs: HashMap::new(),
            lacks_scheduler: true,
            covers_recent: false,
            since: None,
            begun: BTreeSet::new(),
        }
    }

    /// As [`PipelineAudit::new`], of the records that the workers have taken from the source. If retention has removed results or dead letters, only of
    /// those that come in from now on.
    #[must_use]
    pub fn of_taken(pipeline: Pipeline, changes: HandlerChanges) -> Self {
        Self {
            covers_recent: true,
            reads_ahead: pipeline.return_to == ReturnTo::Source && !pipeline.retired,
            ..Self::new(pipeline, changes)
        }
    }

    /// The name of the pipeline.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.pipeline.name
    }

    /// Since when records are checked; `None`: all that were ever written.
    #[must_use]
    pub fn since(&self) -> Option<Timestamp> {
        self.since
    }

    /// Forgets everything.
    pub fn restart(&mut self) {
        let new = match self.covers_recent {
            true => Self::of_taken,
            false => Self::new,
        };
        *self = new(self.pipeline.clone(), self.changes);
    }

    pub(crate) fn waits_long(&self) -> bool {
        self.pipeline.long_waits.is_some()
    }

    /// Begins a pass: reads the ends of topics, and then the committed offsets.
    pub(crate) fn begin(
        &mut self,
        clients: &mut Clients,
        roles: HashMap<Arc<str>, TopicRole>,
        now: Timestamp,
    ) -> Result<(), Fault> {
        self.roles = roles;
        let topics: Vec<Arc<str>> = self.roles.keys().cloned().collect();
        let names: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
        // Without ids, a topic that was created again has fewer records, at least at first.
        let ids = match clients.settings.is_embedded {
            true => BTreeMap::new(),
            false => {
                let ids = clients.reader.topics().ids(&names);
                ids.map_err(failed("request the ids of the topics"))?
            }
        };
        let is_other =
            |(topic, id): (&String, &TopicId)| self.ids.get(topic).is_some_and(|known| known != id);
        if ids.iter().any(is_other) {
            return Err(Fault::Changed);
        }
        self.ids.extend(ids);
        let extents = clients.reader.extents(&topics);
        self.extents = extents.map_err(failed("read the ends of the topics"))?;
        self.check_next()?;
        self.begin_partitions(clients, now)?;

        let of_pipeline = self.roles.iter().filter_map(|(topic, role)| {
            let group = self.pipeline.reading_group(*role, &clients.settings.id_prefix)?;
            Some((group, topic.clone()))
        });
        let of_scheduler = clients.scheduler.as_ref().filter(|_| self.waits_long());
        let of_scheduler = of_scheduler.map(|(group, topics)| (group.clone(), topics.ingest.clone()));
        let groups: Vec<(String, Arc<str>)> = of_pipeline.chain(of_scheduler).collect();
        let positions =
            GroupPositions::read(&clients.settings, &groups).map_err(failed("read the committed offsets"))?;
        if positions.is_behind(&self.positions) {
            return Err(Fault::Changed);
        }
        self.ledger.begin_pass(|position| positions.is_unread(position));
        self.positions = positions;
        Ok(())
    }

    /// Compares where partitions begin and end with what was read of them.
    fn check_next(&mut self) -> Result<(), Fault> {
        for (partition, extent) in &self.extents {
            let Some(next) = self.next.get_mut(partition) else {
                continue;
            };
            if extent.end < *next {
                return Err(Fault::Changed);
            }
            let removed = extent.low - *next;
            match self.roles.get(&partition.0) {
                // Without a marker of a transaction at the end of what was completed.
                Some(TopicRole::Source) if removed > 1 => return Err(Fault::Cut(partition.0.clone())),
                Some(TopicRole::Output | TopicRole::DeadLetter) if removed > 0 => {
                    return Err(Fault::Cut(partition.0.clone()));
                }
                // What was deleted was either processed, or is lost.
                _ => *next = (*next).max(extent.low),
            }
        }
        Ok(())
    }

    /// Decides where to begin with partitions that are new.
    fn begin_partitions(&mut self, clients: &mut Clients, now: Timestamp) -> Result<(), Fault> {
        let new = self.extents.iter();
        let new = new.filter(|(partition, _)| !self.next.contains_key(*partition));
        let new: Vec<(Partition, Extent)> = new
            .map(|(partition, extent)| (partition.clone(), *extent))
            .collect();
        let is_from_now = self.covers_recent && !new.is_empty() && self.lacks_ends(clients, &new)?;
        if is_from_now {
            self.since = Some(now);
        }
        for (partition, extent) in new {
            let is_source = self.roles.get(&partition.0) == Some(&TopicRole::Source);
            let begin = match is_source && is_from_now {
                true => extent.end,
                false => extent.low,
            };
            if is_source && extent.low > 0 && !is_from_now {
                self.begun.insert(partition.1);
            }
            self.begins.insert(partition.clone(), begin);
            self.next.insert(partition, begin);
        }
        Ok(())
    }

    /// Whether results or dead letters were removed from these partitions.
    fn lacks_ends(&self, clients: &Clients, new: &[(Partition, Extent)]) -> Result<bool, Fault> {
        let role = |topic: &Arc<str>| self.roles.get(topic);
        let is_end =
            |topic: &Arc<str>| matches!(role(topic), Some(TopicRole::Output | TopicRole::DeadLetter));
        let topics = new.iter().map(|((topic, _), _)| topic);
        let topics = topics.filter(|topic| is_end(topic) || role(topic) == Some(&TopicRole::Source));
        let topics: BTreeSet<Arc<str>> = topics.cloned().collect();
        if !clients.settings.is_embedded {
            let compacted = clients.surveyor.may_compact(topics.into_iter().collect());
            if let Some(topic) = compacted.map_err(failed("read the settings of the topics"))? {
                return Err(Fault::Compacted(topic));
            }
        }
        let mut ends = new.iter().filter(|((topic, _), _)| is_end(topic));
        Ok(ends.any(|(_, extent)| extent.low > 0))
    }

    /// Adds a command or a job of the scheduler.
    pub(crate) fn command(&mut self, record: &Record) {
        let unread = self.positions.is_unread(&record.position);
        self.ledger.scheduled(record, unread);
    }

    /// Takes note of a job that has not ended; `None`: of one that has ended, or is of another pipeline.
    pub(crate) fn job(&mut self, id: JobId, record: Option<&Record>) {
        match record.and_then(|record| self.ledger.scheduled(record, false)) {
            Some(scheduled) => drop(self.jobs.insert(id, scheduled)),
            None => drop(self.jobs.remove(&id)),
        }
    }

    pub(crate) fn forget_jobs(&mut self) {
        self.jobs.clear();
    }

    /// Reads what is new, after the scheduler was read.
    pub(crate) fn read(&mut self, reader: &mut TopicReader, pace: &mut Pace<'_>) -> Result<Report, Fault> {
        for scheduled in self.jobs.values() {
            self.ledger.still_scheduled(*scheduled);
        }
        self.read_parts(reader, pace)?;
        self.ledger.positions_known();
        self.read_to_end(reader, pace, "read the tiers and the due topic", |role| {
            matches!(role, TopicRole::Tier(_) | TopicRole::Due)
        })?;
        loop {
            self.read_source(reader, pace)?;
            self.read_to_end(reader, pace, "read the output and the dead letters", |role| {
                matches!(role, TopicRole::Output | TopicRole::DeadLetter)
            })?;
            self.ledger.settle(true);
            self.check_size(pace)?;
            let report = self.ledger.report();
            // A record that has returned to the source can wait in the part that was not read, if `return_to` was changed.
            if report.lost.is_empty() || self.reads_ahead || self.pipeline.retired {
                return Ok(report);
            }
            self.reads_ahead = true;
        }
    }

    /// How many records and waiting copies are kept in memory.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.ledger.size() + self.jobs.len()
    }

    fn check_size(&self, pace: &Pace<'_>) -> Result<(), Fault> {
        if self.kept() + pace.kept_by_others <= pace.max_kept {
            Ok(())
        } else if self.kept() < pace.kept_by_largest {
            // It is the turn of the largest one, which is given up.
            Err(Fault::Unfinished)
        } else {
            Err(Fault::Full(pace.max_kept))
        }
    }

    /// Reads what was written before the committed offsets were read.
    fn read_parts(&mut self, reader: &mut TopicReader, pace: &mut Pace<'_>) -> Result<(), Fault> {
        let begin = self.next.clone();
        let mut ends: Offsets = self
            .extents
            .iter()
            .map(|(partition, extent)| (partition.clone(), extent.end))
            .collect();
        for (partition, taken) in self.taken() {
            if let Some(end) = ends.get_mut(&partition) {
                *end = taken.min(*end);
            }
        }
        let offsets = |partition: &Partition| -> u64 {
            let rest = ends[partition] - begin.get(partition).copied().unwrap_or(0);
            u64::try_from(rest).unwrap_or(0)
        };
        let total: u64 = ends.keys().map(offsets).sum();
        let parts = total / PART + 1;
        for part in 1..=parts {
            let until = ends.keys().map(|partition| {
                let left = u128::from(offsets(partition)) * u128::from(parts - part) / u128::from(parts);
                let left = i64::try_from(left).unwrap_or(i64::MAX);
                (partition.clone(), ends[partition] - left)
            });
            self.read_up_to(reader, pace, until.collect(), "read the topics")?;
            self.ledger.settle(false);
            self.check_size(pace)?;
            (pace.progress)(&self.pipeline.name, total / parts * part, total);
            if (pace.stop)() {
                return Err(Fault::Stopped);
            }
            if pace.in_parts && part < parts && part == PARTS {
                return Err(Fault::Unfinished);
            }
        }
        Ok(())
    }

    /// Reads what the group of the source has completed, and the rest ahead.
    fn read_source(&mut self, reader: &mut TopicReader, pace: &mut Pace<'_>) -> Result<(), Fault> {
        let step = "read the source";
        let mut ends: Offsets = self.taken().collect();
        let is_newer = |(partition, taken): (&Partition, &i64)| {
            self.extents
                .get(partition)
                .is_some_and(|extent| extent.end < *taken)
        };
        if ends.iter().any(is_newer) {
            let source = [self.pipeline.source.clone()];
            let extents = reader.extents(&source).map_err(failed(step))?;
            ends.retain(|partition, taken| {
                let extent = extents.get(partition);
                *taken = extent.map_or(*taken, |extent| extent.end.min(*taken));
                extent.is_some()
            });
        }
        self.read_up_to(reader, pace, ends, step)?;
        if !self.reads_ahead {
            return Ok(());
        }
        let ledger = &mut self.ledger;
        let source = self
            .next
            .iter()
            .filter(|((topic, _), _)| *topic == self.pipeline.source);
        reader.seek_all(source.map(|(partition, next)| {
            let from = ledger.ahead_to(partition.1).max(*next);
            (partition.clone(), from)
        }));
        let next = &self.next;
        let (timeout, stop) = (pace.timeout, pace.ends_late());
        let read = reader.read_to_end_in_parts(timeout, stop, |record| {
            pace.read(&record);
            let partition = (record.position.topic.clone(), record.position.partition);
            if next
                .get(&partition)
                .is_none_or(|next| record.position.offset >= *next)
            {
                ledger.read_ahead(&record);
            }
        });
        read.map_err(failed(step))
    }

    /// The partitions of the source with the offsets to read next.
    fn of_source(&self) -> impl Iterator<Item = (Partition, i64)> {
        let source = self.pipeline.source.clone();
        let of_source = self.next.iter();
        let of_source = of_source.filter(move |((topic, _), _)| *topic == source);
        of_source.map(|(partition, next)| (partition.clone(), *next))
    }

    /// Up to where the group has completed records of the source.
    fn taken(&self) -> impl Iterator<Item = (Partition, i64)> {
        self.of_source().map(|((topic, number), next)| {
            let taken = self.positions.completed_to(&topic, number);
            ((topic, number), taken.unwrap_or(next).max(next))
        })
    }

    fn source_is_read(&mut self, partition: &Partition, to: i64) {
        let begin = self.begins.get(partition).copied().unwrap_or(0);
        let end = self.extents.get(partition).map_or(to, |extent| extent.end);
        let (begin, end) = match self.pipeline.retired {
            false => (begin, end),
            // No one takes what is left. Without a committed offset, it is unknown what was taken.
            true if self.positions.completed_to(&partition.0, partition.1).is_none() => (end, end),
            true => (begin, to),
        };
        self.ledger.source_is_read(partition.1, begin, to, end);
    }

    /// Reads partitions up to these offsets, which are not after their ends.
    fn read_up_to(
        &mut self,
        reader: &mut TopicReader,
        pace: &mut Pace<'_>,
        until: Offsets,
        step: &'static str,
    ) -> Result<(), Fault> {
        self.seek(reader, |partition| until.contains_key(partition));
        let (timeout, stop) = (pace.timeout, pace.ends_late());
        let read = reader.read_up_to(&until, timeout, stop, |record| {
            let partition = (record.position.topic.clone(), record.position.partition);
            // A record after the end is read again.
            if until
                .get(&partition)
                .is_some_and(|end| record.position.offset < *end)
            {
                pace.read(&record);
                self.visit(partition, &record);
            }
        });
        read.map_err(failed(step))?;
        for (partition, end) in until {
            if partition.0 == self.pipeline.source {
                self.source_is_read(&partition, end);
            }
            let next = self.next.entry(partition).or_insert(end);
            *next = end.max(*next);
        }
        Ok(())
    }

    /// Reads topics to their ends.
    fn read_to_end(
        &mut self,
        reader: &mut TopicReader,
        pace: &mut Pace<'_>,
        step: &'static str,
        is_read: impl Fn(&TopicRole) -> bool,
    ) -> Result<(), Fault> {
        let roles = self.roles.clone();
        let is_read = |topic: &Arc<str>| roles.get(topic).is_some_and(&is_read);
        self.seek(reader, |(topic, _)| is_read(topic));
        let (timeout, stop) = (pace.timeout, pace.ends_late());
        let read = reader.read_to_end_in_parts(timeout, stop, |record| {
            pace.read(&record);
            let partition = (record.position.topic.clone(), record.position.partition);
            self.visit(partition, &record);
        });
        read.map_err(failed(step))?;
        for ((topic, partition), next) in &mut self.next {
            if is_read(topic)
                && let Some(position) = reader.position(topic, *partition)
            {
                *next = position.max(*next);
            }
        }
        Ok(())
    }

    fn seek(&self, reader: &mut TopicReader, is_read: impl Fn(&Partition) -> bool) {
        let parts = self.next.iter().filter(|(partition, _)| is_read(partition));
        reader.seek_all(parts.map(|(partition, next)| (partition.clone(), *next)));
    }

    fn visit(&mut self, partition: Partition, record: &Record) {
        let (number, offset) = (partition.1, record.position.offset);
        let Some(role) = self.roles.get(&partition.0).copied() else {
            return;
        };
        // The reader can return a record again.
        let next = self.next.entry(partition).or_insert(0);
        if offset < *next {
            return;
        }
        *next = offset + 1;
        match role {
            TopicRole::Output => self.ledger.output(record),
            TopicRole::DeadLetter => self.ledger.dead(record),
            TopicRole::Tier(_) => self
                .ledger
                .tier(record, self.positions.is_unread(&record.position)),
            TopicRole::Due => self
                .ledger
                .due(record, self.positions.is_unread(&record.position)),
            TopicRole::Source => {
                if self.begun.remove(&number) {
                    self.since = self.since.max(record.timestamp);
                }
                let unread = self.positions.is_unread(&record.position);
                // A retired pipeline never processes the unread records of its source.
                if !(self.pipeline.retired && unread) {
                    self.ledger.source(record, unread);
                }
            }
        }
    }
}

/// The command of a long wait, or the job, with the name of its pipeline.
pub(crate) fn long_wait(record: &Record, topics: &SchedulerTopics) -> LongWait {
    if record.position.topic == topics.ingest {
        return LongWait::Command(long_wait::unwrap_any(record));
    }
    let key = record
        .key
        .as_deref()
        .and_then(|key| std::str::from_utf8(key).ok());
    match key.and_then(|key| key.parse().ok()) {
        Some(id) => LongWait::Job(id, long_wait::unwrap_any_state(record)),
        None => LongWait::Command(None),
    }
}

/// What a record of the scheduler says about pipelines.
pub(crate) enum LongWait {
    /// A record in a command.
    Command(Option<(String, Record)>),
    /// A record in a job; `None` if the job has ended, or has no record.
    Job(JobId, Option<(String, Record)>),
}

#[cfg(test)]
mod tests {
    use redeliver_core::headers::{
        ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TOPIC, PIPELINE, RETRY_COUNT,
    };
    use redeliver_core::{Headers, Position};

    use super::*;

    #[test]
    fn largest_audit_is_given_up() {
        let mut audit = PipelineAudit::new(Pipeline::new("docs"), HandlerChanges::Nothing);
        for offset in ["1", "2", "3"] {
            let headers = [
                (PIPELINE, "docs"),
                (RETRY_COUNT, "0"),
                (ORIGINAL_TOPIC, "docs"),
                (ORIGINAL_PARTITION, "0"),
                (ORIGINAL_OFFSET, offset),
            ];
            let headers = headers.map(|(name, value)| (name, Some(value.as_bytes())));
            audit.ledger.dead(&Record {
                position: Position {
                    topic: "docs-dlq".into(),
                    partition: 0,
                    offset: 0,
                },
                timestamp: None,
                key: None,
                value: None,
                headers: headers.into_iter().collect::<Headers>(),
                unreadable_headers: 0,
            });
        }
        let stop = || false;
        let mut pace = Pace::new(Duration::ZERO, &stop);
        pace.max_kept = 10;
        let check = |pace: &Pace<'_>| format!("{:?}", audit.check_size(pace));
        for (others, largest, expected) in [
            (7, 7, "Ok(())"),
            (8, 4, "Err(Unfinished)"),
            (8, 3, "Err(Full(10))"),
        ] {
            (pace.kept_by_others, pace.kept_by_largest) = (others, largest);
            assert_eq!(check(&pace), expected);
        }
    }
}
