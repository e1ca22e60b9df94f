//! One pipeline, pass after pass: each reads what is new since the one before. The steps are those of [`crate::run`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_core::pipeline::{ReturnTo, TopicRole};
use redeliver_core::{HandlerChanges, JobId, Pipeline, Position, Record, SchedulerTopics, Timestamp};
use redeliver_kafka::backlog::GroupPositions;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::survey::{Extent, Surveyor};
use redeliver_kafka::{KafkaSettings, TopicId};

use crate::ledger::{Ledger, Scheduled};
use crate::report::Report;

pub(crate) type Partition = (Arc<str>, i32);
pub(crate) type Offsets = BTreeMap<Partition, i64>;
type Extents = BTreeMap<Partition, Extent>;

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
    /// A source or an output that may be compacted proves nothing.
    #[error(
        "topic `{0}` may be compacted, so records can be missing from it: its `cleanup.policy` must be `delete` and visible to the inspector"
    )]
    Compacted(Arc<str>),
    /// Records were deleted before they were read. Begin again.
    #[error("retention has removed records of {0} before they were read")]
    Cut(Arc<str>),
    /// A topic was created again, or committed offsets were reset. Begin again.
    #[error("a topic was created again, or committed offsets were reset")]
    Changed,
    /// More records than permitted had to be kept. Begin again.
    #[error("more than {0} records wait, are dead or have a defect")]
    Full(usize),
    /// Partitions were added during the pass. The next pass reads them, too.
    #[error("partitions were added")]
    Grown,
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
    /// Whether a step may take longer, as long as it makes progress.
    pub in_parts: bool,
    /// The maximum number of bytes of records per second; `None`: no limit.
    pub bytes_per_second: Option<u64>,
    /// The maximum number of records and copies that are kept, of all pipelines.
    pub max_kept: usize,
    /// Whether to give up.
    pub stop: &'p dyn Fn() -> bool,
    /// How many records the other pipelines keep, and the one of those that were read in this pass that keeps most.
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
            kept_by_others: 0,
            kept_by_largest: 0,
            second: Instant::now(),
            read: 0,
        }
    }

    /// Whether a step ends with its timeout, although it makes progress.
    fn ends_late(&self) -> impl Fn() -> bool + use<'p> {
        let (in_parts, stop) = (self.in_parts, self.stop);
        move || !in_parts || stop()
    }

    /// Counts a record, and pauses if there were too many bytes in the last second.
    fn count(&mut self, record: &Record) {
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

impl Clients {
    /// The ids of topics. Empty with the embedded broker, which has none.
    pub(crate) fn ids(&self, topics: &[Arc<str>]) -> Result<BTreeMap<String, TopicId>, ReadError> {
        let names: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
        match self.settings.is_embedded {
            true => Ok(BTreeMap::new()),
            false => self.reader.topics().known_ids(&names),
        }
    }

    /// Reads partitions from `next` on, up to `ends`, or to their ends now. `next` is the offset of the last record that was visited, plus 1; then the end.
    pub(crate) fn read(
        &mut self,
        next: &mut Offsets,
        is_read: impl Fn(&Partition) -> bool,
        ends: Option<&Offsets>,
        pace: &mut Pace<'_>,
        mut visit: impl FnMut(&Record),
    ) -> Result<(), ReadError> {
        let ends: Option<Offsets> = ends.map(|ends| {
            let ends = ends.iter().filter(|(partition, _)| is_read(partition));
            ends.map(|(partition, end)| (partition.clone(), *end)).collect()
        });
        let parts = next.iter().filter(|(partition, _)| is_read(partition));
        self.reader
            .seek_all(parts.map(|(partition, next)| (partition.clone(), *next)));
        let (timeout, stop) = (pace.timeout, pace.ends_late());
        let of_record = |record: Record| {
            let partition = (record.position.topic.clone(), record.position.partition);
            let offset = record.position.offset;
            // A record after the end is read again.
            let is_after = ends
                .as_ref()
                .is_some_and(|ends| ends.get(&partition).is_none_or(|end| offset >= *end));
            if let Some(next) = next.get_mut(&partition)
                && offset >= *next
                && !is_after
            {
                *next = offset + 1;
                pace.count(&record);
                visit(&record);
            }
        };
        match &ends {
            Some(ends) => self.reader.read_up_to(ends, timeout, stop, of_record)?,
            None => self.reader.read_to_end_in_parts(timeout, stop, of_record)?,
        }
        for (partition, next) in next.iter_mut().filter(|(partition, _)| is_read(partition)) {
            let end = match &ends {
                Some(ends) => ends.get(partition).copied(),
                None => self.reader.position(&partition.0, partition.1),
            };
            *next = end.unwrap_or(*next).max(*next);
        }
        Ok(())
    }
}

/// The audit of a pipeline.
pub struct PipelineAudit {
    pub(crate) pipeline: Pipeline,
    changes: HandlerChanges,
    /// Whether only records are checked that come in after it has begun.
    from_now: bool,
    ledger: Ledger,
    /// The topics of the pipeline.
    roles: HashMap<Arc<str>, TopicRole>,
    ids: BTreeMap<String, TopicId>,
    /// The next offset to read of each partition.
    next: Offsets,
    /// Where the partitions ended before the committed offsets were read.
    ends: Offsets,
    /// Where reading began in this pass.
    begins: Offsets,
    positions: GroupPositions,
    /// The jobs of the scheduler that have not ended.
    jobs: HashMap<JobId, Scheduled>,
    since: Option<Timestamp>,
}

impl PipelineAudit {
    /// An audit of all records of the source. `changes`: what the handler of the pipeline may change in a result.
    #[must_use]
    pub fn of_all(pipeline: Pipeline, changes: HandlerChanges) -> Self {
        Self::new(pipeline, changes, false)
    }

    /// An audit of the records that come in after its first pass has begun, once workers take them. What was there before proves nothing: retention may have
    /// removed results, or topics, offsets and settings may have been changed.
    #[must_use]
    pub fn from_now(pipeline: Pipeline, changes: HandlerChanges) -> Self {
        Self::new(pipeline, changes, true)
    }

    fn new(pipeline: Pipeline, changes: HandlerChanges, from_now: bool) -> Self {
        Self {
            ledger: Ledger::new(&pipeline, changes),
            pipeline,
            changes,
            from_now,
            roles: HashMap::new(),
            ids: BTreeMap::new(),
            next: Offsets::new(),
            ends: Offsets::new(),
            begins: Offsets::new(),
            positions: GroupPositions::default(),
            jobs: HashMap::new(),
            since: None,
        }
    }

    /// The name of the pipeline.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.pipeline.name
    }

    /// When its first pass has begun.
    #[must_use]
    pub fn since(&self) -> Option<Timestamp> {
        self.since
    }

    /// Forgets everything.
    pub fn restart(&mut self) {
        *self = Self::new(self.pipeline.clone(), self.changes, self.from_now);
    }

    pub(crate) fn waits_long(&self) -> bool {
        self.pipeline.long_waits.is_some()
    }

    /// Whether it needs what is new in the topics of the scheduler.
    pub(crate) fn reads_scheduler(&self) -> bool {
        self.waits_long() && self.since.is_some()
    }

    /// Begins a pass: reads the ends of topics, and then the committed offsets.
    pub(crate) fn begin(
        &mut self,
        clients: &Clients,
        roles: HashMap<Arc<str>, TopicRole>,
        now: Timestamp,
    ) -> Result<(), Fault> {
        let topics: Vec<Arc<str>> = roles.keys().cloned().collect();
        // The source last: no copy of a record after its end is before the end of another topic.
        let (source, others): (Vec<_>, Vec<_>) = topics
            .iter()
            .cloned()
            .partition(|topic| roles[topic] == TopicRole::Source);
        let ends = |topics: &[Arc<str>]| {
            let extents = clients.reader.extents(topics);
            extents.map_err(failed("read the ends of the topics"))
        };
        let mut extents = ends(&others)?;
        extents.append(&mut ends(&source)?);

        let groups = self.groups(clients, &roles);
        let positions = GroupPositions::read(&clients.settings, &groups);
        let positions = positions.map_err(failed("read the committed offsets"))?;
        // A group can commit for a new topic only after it was created.
        let ids = clients.ids(&topics);
        let ids = ids.map_err(failed("request the ids of the topics"))?;
        let positions = positions.of_topics(&ids);
        let is_other =
            |(topic, id): (&String, &TopicId)| self.ids.get(topic).is_some_and(|known| known != id);
        if ids.iter().any(is_other) || positions.is_behind(&self.positions) {
            return Err(Fault::Changed);
        }
        if self.from_now && self.since.is_none() {
            self.check_compaction(clients, &roles)?;
        }
        self.roles = roles;
        self.check_next(&extents)?;

        let begins_now = self.from_now && self.since.is_none();
        for (partition, Extent { low, end }) in &extents {
            let begin = if begins_now { *end } else { *low };
            let next = *self.next.entry(partition.clone()).or_insert(begin);
            if self.from_now && *partition.0 == *self.pipeline.source {
                self.ledger.source_is_read(partition.1, next, next, *end);
            }
        }
        let ends = extents.iter();
        self.ends = ends
            .map(|(partition, extent)| (partition.clone(), extent.end))
            .collect();
        self.begins = self.next.clone();
        self.ids.extend(ids);
        let is_kept = |position: &Position| {
            let extent = extents.get(&(position.topic.clone(), position.partition));
            extent.is_none_or(|extent| position.offset >= extent.low)
        };
        // A copy that retention has removed does not wait any more.
        self.ledger
            .begin_pass(|position| positions.is_unread(position) && is_kept(position));
        self.positions = positions;
        self.since.get_or_insert(now);
        Ok(())
    }

    /// The groups that read the topics.
    fn groups(&self, clients: &Clients, roles: &HashMap<Arc<str>, TopicRole>) -> Vec<(String, Arc<str>)> {
        let of_pipeline = roles.iter().filter_map(|(topic, role)| {
            let group = self.pipeline.reading_group(*role, &clients.settings.id_prefix)?;
            Some((group, topic.clone()))
        });
        let of_scheduler = clients.scheduler.as_ref().filter(|_| self.waits_long());
        let of_scheduler = of_scheduler.map(|(group, topics)| (group.clone(), topics.ingest.clone()));
        of_pipeline.chain(of_scheduler).collect()
    }

    fn check_compaction(&self, clients: &Clients, roles: &HashMap<Arc<str>, TopicRole>) -> Result<(), Fault> {
        if clients.settings.is_embedded {
            return Ok(());
        }
        let topics = roles.iter();
        let topics = topics.filter(|(_, role)| matches!(role, TopicRole::Source | TopicRole::Output));
        let compacted = clients
            .surveyor
            .may_compact(topics.map(|(topic, _)| topic.clone()).collect());
        match compacted.map_err(failed("read the settings of the topics"))? {
            Some(topic) => Err(Fault::Compacted(topic)),
            None => Ok(()),
        }
    }

    /// Compares where partitions begin and end with what is to be read next.
    fn check_next(&mut self, extents: &Extents) -> Result<(), Fault> {
        for (partition, extent) in extents {
            let Some(next) = self.next.get_mut(partition) else {
                continue;
            };
            if extent.end < *next {
                return Err(Fault::Changed);
            }
            if is_cut(&self.roles, partition, extent, *next) {
                return Err(Fault::Cut(partition.0.clone()));
            }
            // What was deleted of others was either processed, or is lost.
            *next = (*next).max(extent.low);
        }
        Ok(())
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

    /// Reads what is new, after the scheduler was read.
    pub(crate) fn read(&mut self, clients: &mut Clients, pace: &mut Pace<'_>) -> Result<Report, Fault> {
        let is_end = |role: &TopicRole| matches!(role, TopicRole::Output | TopicRole::DeadLetter);
        for scheduled in self.jobs.values() {
            self.ledger.still_scheduled(*scheduled);
        }
        let (step, ends) = ("read the output and the dead letters", self.ends.clone());
        self.visit(clients, pace, step, is_end, Some(&ends))?;
        self.ledger.positions_known();
        let waits = |role: &TopicRole| matches!(role, TopicRole::Tier(_) | TopicRole::Due);
        self.visit(clients, pace, "read the tiers and the due topic", waits, None)?;
        self.read_source(clients, pace)?;
        self.visit(clients, pace, step, is_end, None)?;
        if self.from_now {
            self.check_extents(clients)?;
            self.ledger.settle();
        }
        let report = self.ledger.report();
        match report.is_clean() {
            true => self.check_size(pace).map(|()| report),
            false => Ok(report),
        }
    }

    /// Reads the source: all of it, or what its group has completed.
    fn read_source(&mut self, clients: &mut Clients, pace: &mut Pace<'_>) -> Result<(), Fault> {
        let step = "read the source";
        let is_source = |role: &TopicRole| *role == TopicRole::Source;
        if !self.from_now {
            return self.visit(clients, pace, step, is_source, None);
        }
        let source = self.pipeline.source.clone();
        // What was completed after the ends were read waits for the next pass.
        let taken = self.ends.iter().filter(|((topic, _), _)| *topic == source);
        let taken: Offsets = taken
            .map(|(partition, end)| {
                let completed = self.positions.completed_to(&partition.0, partition.1);
                let next = self.next[partition];
                (
                    partition.clone(),
                    completed.unwrap_or(next).clamp(next, (*end).max(next)),
                )
            })
            .collect();
        self.visit(clients, pace, step, is_source, Some(&taken))?;
        for ((_, number), to) in &taken {
            let end = self.ends[&(source.clone(), *number)];
            self.ledger.source_is_read(*number, *to, *to, end);
        }
        if self.pipeline.return_to == ReturnTo::Source {
            // A retry that has returned can wait in the rest.
            let mut ahead = taken;
            for ((_, number), to) in &mut ahead {
                *to = self.ledger.ahead_to(*number).max(*to);
            }
            let ledger = &mut self.ledger;
            let read = clients.read(
                &mut ahead,
                |_| true,
                None,
                pace,
                |record| ledger.read_ahead(record),
            );
            read.map_err(failed(step))?;
        }
        Ok(())
    }

    /// Reads topics up to `ends`, or to their ends now.
    fn visit(
        &mut self,
        clients: &mut Clients,
        pace: &mut Pace<'_>,
        step: &'static str,
        is_read: impl Fn(&TopicRole) -> bool,
        ends: Option<&Offsets>,
    ) -> Result<(), Fault> {
        let Self {
            roles,
            ledger,
            positions,
            next,
            pipeline,
            ..
        } = self;
        let is_read = |(topic, _): &Partition| roles.get(topic).is_some_and(&is_read);
        if !self.from_now {
            // Retention goes on.
            let topics: Vec<Arc<str>> = roles
                .keys()
                .filter(|topic| is_read(&((*topic).clone(), 0)))
                .cloned()
                .collect();
            for (partition, extent) in clients.reader.extents(&topics).map_err(failed(step))? {
                let next = next.entry(partition).or_insert(extent.low);
                *next = extent.low.max(*next);
            }
        }
        let (max, mut is_full) = (pace.max_kept, false);
        let read = clients.read(next, is_read, ends, pace, |record| {
            if ledger.len() / 2 >= max {
                is_full = true;
                return;
            }
            let unread = || positions.is_unread(&record.position);
            match roles.get(&record.position.topic) {
                Some(TopicRole::Output) => ledger.output(record),
                Some(TopicRole::DeadLetter) => ledger.dead(record),
                Some(TopicRole::Tier(_)) => ledger.tier(record, unread()),
                Some(TopicRole::Due) => ledger.due(record, unread()),
                // A retired pipeline never processes the unread records of its source.
                Some(TopicRole::Source) if pipeline.retired && unread() => {}
                Some(TopicRole::Source) => ledger.source(record, unread()),
                None => {}
            }
        });
        read.map_err(failed(step))?;
        if is_full { Err(Fault::Full(max)) } else { Ok(()) }
    }

    /// Whether partitions were added, or records deleted, during the pass.
    fn check_extents(&self, clients: &Clients) -> Result<(), Fault> {
        let topics: Vec<Arc<str>> = self.roles.keys().cloned().collect();
        let extents = clients.reader.extents(&topics);
        let extents = extents.map_err(failed("read the ends of the topics"))?;
        if extents
            .keys()
            .any(|partition| !self.begins.contains_key(partition))
        {
            return Err(Fault::Grown);
        }
        let cut = extents.iter().find(|(partition, extent)| {
            let begin = self.begins.get(*partition);
            begin.is_some_and(|begin| is_cut(&self.roles, partition, extent, *begin))
        });
        match cut {
            Some((partition, _)) => Err(Fault::Cut(partition.0.clone())),
            None => Ok(()),
        }
    }

    /// How many records and waiting copies are kept in memory.
    #[must_use]
    pub fn kept(&self) -> usize {
        self.ledger.size() + self.jobs.len()
    }

    /// The largest audit gives up first.
    fn check_size(&self, pace: &Pace<'_>) -> Result<(), Fault> {
        let is_full = self.kept() + pace.kept_by_others > pace.max_kept;
        match is_full && self.kept() >= pace.kept_by_largest {
            true => Err(Fault::Full(pace.max_kept)),
            false => Ok(()),
        }
    }
}

/// Whether records from `next` on were deleted that are needed.
fn is_cut(roles: &HashMap<Arc<str>, TopicRole>, partition: &Partition, extent: &Extent, next: i64) -> bool {
    let removed = extent.low - next;
    match roles.get(&partition.0) {
        // Without a marker of a transaction at the end of what was completed.
        Some(TopicRole::Source) => removed > 1,
        Some(TopicRole::Output | TopicRole::DeadLetter) => removed > 0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::Headers;
    use redeliver_core::headers::{
        ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TOPIC, PIPELINE, RETRY_COUNT,
    };

    use super::*;

    #[test]
    fn largest_audit_gives_up() {
        let mut audit = PipelineAudit::of_all(Pipeline::new("docs"), HandlerChanges::Nothing);
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
        for (others, largest, expected) in [(7, 7, "Ok(())"), (8, 4, "Ok(())"), (8, 3, "Err(Full(10))")] {
            (pace.kept_by_others, pace.kept_by_largest) = (others, largest);
            assert_eq!(format!("{:?}", audit.check_size(&pace)), expected);
        }
    }
}
