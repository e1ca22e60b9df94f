//! The number of records that a consumer group has not completed, determined from outside of the group.
//!
//! The difference between the committed offset and the end of a partition is too high, because transaction markers have
//! offsets too: a topic whose records are all complete would never show zero. So if the committed offset is near the end,
//! the remaining records are read and counted. Otherwise the partition is certainly not empty, and the difference is used as
//! an upper bound. [`heads`] also reads the first incomplete records of such partitions.
//!
//! A committed offset can be that of a deleted topic of the same name. A lane then reads the new topic from its beginning, so
//! all of its records count.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use redeliver_core::{Position, Record};
use redeliver_kafka_ffi::{KafkaClient, TopicId};

use crate::client::KafkaSettings;
use crate::describe::describe_topics;
use crate::extents::{Extent, extents};
use crate::reader::{ReadError, TopicReader, is_unknown, kafka, positions};
use crate::tracker::{Committed, TopicFingerprint};

/// Timeout of one request.
const CALL: Duration = Duration::from_secs(10);
/// How often the records are counted if topics are deleted meanwhile.
const MAX_COUNTS: u32 = 3;
/// How long [`reachable_heads`] waits for leaders.
const LEADERS: Duration = Duration::from_secs(4);
/// Maximum number of groups whose positions are requested at the same time.
const MAX_PARALLEL: usize = 16;
/// Maximum number of offsets up to the end that are read and counted.
const NEAR: i64 = 1_000;

/// The number of records that a group has not completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// The number of records, or an upper bound.
    pub records: u64,
    /// Whether `records` is exact.
    pub is_exact: bool,
}

impl Backlog {
    /// Whether there are no records.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.records == 0
    }
}

impl fmt::Display for Backlog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.is_exact, self.records) {
            (true, 1) => f.write_str("1 record"),
            (true, records) => write!(f, "{records} records"),
            (false, records) => write!(f, "up to {records} records"),
        }
    }
}

/// A backlog, and its first records.
#[derive(Clone, Debug)]
pub struct Head<T> {
    /// The number of records that the group has not completed.
    pub backlog: Backlog,
    /// What was read of the first of these records of each partition.
    pub first: Vec<T>,
    /// Partitions that have no leader, or whose leaders do not answer; the backlog may be without them. Empty except for [`reachable_heads`].
    pub unreachable: Vec<i32>,
}

/// The backlogs of these pairs of a group and a topic; each topic may occur once. Does not join the groups. Leaves out
/// topics that are deleted meanwhile. Blocks.
///
/// # Errors
/// If the broker or the leader of a partition does not answer, or records near an end are not read within `timeout`.
pub fn backlogs(
    settings: &KafkaSettings,
    topics: &[(String, Arc<str>)],
    timeout: Duration,
) -> Result<BTreeMap<Arc<str>, Backlog>, ReadError> {
    let heads = count_again_if_deleted(|| count(settings, topics, NEAR, Mode::Backlogs, timeout, |_| ()))?;
    let heads = heads.into_iter();
    Ok(heads.map(|(topic, head)| (topic, head.backlog)).collect())
}

/// As [`backlogs`], with what `read` returns for the first incomplete records of each partition: those among the first
/// `offsets` offsets. Does not wait for open transactions in the topics.
///
/// # Errors
/// As [`backlogs`].
pub fn heads<T>(
    settings: &KafkaSettings,
    topics: &[(String, Arc<str>)],
    offsets: i64,
    timeout: Duration,
    read: impl Fn(Record) -> T,
) -> Result<BTreeMap<Arc<str>, Head<T>>, ReadError> {
    count_again_if_deleted(|| count(settings, topics, offsets, Mode::Heads, timeout, &read))
}

/// As [`heads`], of what can be read at the moment. Does not wait for open transactions of the groups either. A backlog whose records are not
/// read within `timeout` is an upper bound.
///
/// # Errors
/// If the broker does not answer.
pub fn reachable_heads<T>(
    settings: &KafkaSettings,
    topics: &[(String, Arc<str>)],
    offsets: i64,
    timeout: Duration,
    read: impl Fn(Record) -> T,
) -> Result<BTreeMap<Arc<str>, Head<T>>, ReadError> {
    count_again_if_deleted(|| count(settings, topics, offsets, Mode::Reachable, timeout, &read))
}

/// The ends of partitions, by topic and partition.
pub type Ends = BTreeMap<(Arc<str>, i32), i64>;

/// The ends of all partitions of these topics. Leaves out topics that do not exist. `None` while a
/// transaction is open in one of them, so that records may be added before its end. Blocks.
///
/// # Errors
/// If the broker does not answer.
pub fn settled_ends(settings: &KafkaSettings, topics: &[Arc<str>]) -> Result<Option<Ends>, ReadError> {
    let client = |isolation| -> Result<KafkaClient<BaseConsumer>, ReadError> {
        let client = settings.reader(isolation).create();
        client.map_err(kafka("creating a client"))
    };
    // The broker returns the last stable offset to the first one, and the high watermark to the second one.
    let (committed, uncommitted) = (client("read_committed")?, client("read_uncommitted")?);
    let metadata = committed
        .fetch_metadata(None, CALL)
        .map_err(kafka("requesting the list of topics"))?;
    let mut ends = BTreeMap::new();
    for topic in topics {
        let found = metadata.topics().iter().find(|found| found.name() == &**topic);
        let partitions = found.map_or(0, |found| found.partitions().len());
        for partition in (0..partitions).filter_map(|partition| i32::try_from(partition).ok()) {
            let end = |client: &BaseConsumer| {
                let bounds = client.fetch_watermarks(topic, partition, CALL);
                bounds
                    .map(|(_, end)| end)
                    .map_err(kafka("requesting the end of a partition"))
            };
            let stable = end(&committed)?;
            if end(&uncommitted)? != stable {
                return Ok(None);
            }
            ends.insert((topic.clone(), partition), stable);
        }
    }
    Ok(Some(ends))
}

/// A topic may be deleted after its bounds were read. The next count leaves it out.
fn count_again_if_deleted<T>(
    count: impl Fn() -> Result<BTreeMap<Arc<str>, Head<T>>, ReadError>,
) -> Result<BTreeMap<Arc<str>, Head<T>>, ReadError> {
    let mut counted = count();
    for _ in 1..MAX_COUNTS {
        match &counted {
            Err(ReadError::Kafka { source, .. }) if is_unknown(source) => counted = count(),
            _ => break,
        }
    }
    counted
}

/// The part of a partition to read.
struct Part {
    committed: Committed,
    /// The offset after the last one that was read.
    next: i64,
    end: i64,
    /// The part ends at the end of the partition, so that its records are counted.
    is_all: bool,
}

/// What a count is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Backlogs,
    Heads,
    Reachable,
}

/// Reads partitions with up to `near` offsets after the committed one, and except for [`Mode::Backlogs`] the first `near` offsets of
/// the others.
fn count<T>(
    settings: &KafkaSettings,
    topics: &[(String, Arc<str>)],
    near: i64,
    mode: Mode,
    timeout: Duration,
    read: impl Fn(Record) -> T,
) -> Result<BTreeMap<Arc<str>, Head<T>>, ReadError> {
    let consumer: KafkaClient<BaseConsumer> = settings
        .reader("read_committed")
        .create()
        .map_err(kafka("creating a client"))?;
    let mut counted: BTreeMap<Arc<str>, Head<T>> = BTreeMap::new();
    let mut parts: BTreeMap<(String, i32), Part> = BTreeMap::new();
    let reads_heads = mode != Mode::Backlogs;
    // With read_uncommitted, the broker returns the last stable positions, and does not wait for the end of a transaction.
    let (isolation, patience) = match mode {
        Mode::Reachable => ("read_uncommitted", LEADERS),
        Mode::Backlogs | Mode::Heads => ("read_committed", CALL),
    };
    let groups = Groups::read(settings, &consumer, topics, isolation)?;
    let remaining = groups.remaining(&consumer, patience)?;
    if mode != Mode::Reachable {
        remaining.check_leaders()?;
    }
    for (topic, partition) in remaining.unreachable {
        let head = counted.entry(topic).or_insert_with(Head::empty);
        head.unreachable.push(partition);
        head.backlog.is_exact = false;
    }
    for Unfinished {
        topic,
        partition,
        committed,
        end,
    } in remaining.unfinished
    {
        let head = counted.entry(topic.as_str().into()).or_insert_with(Head::empty);
        let distance = end - committed.offset;
        let is_all = distance <= near;
        if !is_all {
            head.backlog.records += u64::try_from(distance).unwrap_or(0);
            head.backlog.is_exact = false;
        }
        if distance > 0 && (is_all || reads_heads) {
            let part = Part {
                next: committed.offset,
                end: end.min(committed.offset.saturating_add(near)),
                committed,
                is_all,
            };
            parts.insert((topic, partition), part);
        }
    }
    if parts.is_empty() {
        return Ok(counted);
    }
    let from = parts
        .iter()
        .map(|(partition, part)| (partition.clone(), part.committed.offset));
    let mut reader = TopicReader::from_offsets(settings, from)?;
    let ends = parts
        .iter()
        .map(|(partition, part)| (partition.clone(), part.end))
        .collect();
    let mut visit = |record: Record| {
        let position = &record.position;
        let partition = (position.topic.to_string(), position.partition);
        // The reader may return some records again after it was interrupted, and the first record after the end of a part.
        let is_new = |part: &&mut Part| {
            let counts = !reads_heads || !part.is_all || position.offset < part.end;
            counts && position.offset >= part.next
        };
        let Some(part) = parts.get_mut(&partition).filter(is_new) else {
            return ControlFlow::Continue(());
        };
        part.next = position.offset + 1;
        if part.committed.completed.contains(position.offset) {
            return ControlFlow::Continue(());
        }
        if let Some(head) = counted.get_mut(&position.topic) {
            head.backlog.records += u64::from(part.is_all);
            head.first.push(read(record));
        }
        ControlFlow::Continue(())
    };
    if !reads_heads {
        // Waits for open transactions: a topic is not empty while one of them may add records.
        reader.read_while(timeout, visit)?;
        return Ok(counted);
    }
    let read = reader.read_parts(ends, timeout, |record| {
        record.map_or(ControlFlow::Continue(()), &mut visit)
    });
    if let Err(ReadError::Late { topic, partition, .. }) = &read
        && mode == Mode::Reachable
    {
        for ((topic, _), part) in parts.iter().filter(|(_, part)| part.is_all) {
            if let (1.., Some(head)) = (part.end - part.next, counted.get_mut(topic.as_str())) {
                head.backlog.records += part.end.abs_diff(part.next);
                head.backlog.is_exact = false;
            }
        }
        if let Some(head) = counted.get_mut(topic.as_str()) {
            head.unreachable.push(*partition);
            head.backlog.is_exact = false;
        }
        return Ok(counted);
    }
    read.map(|()| counted)
}

/// The positions of groups, and the ids of their topics.
pub(crate) struct Groups {
    positions: Vec<Positions>,
    ids: BTreeMap<String, TopicId>,
}

/// What a group has not completed in a partition: from the committed offset to the end, except for the completed set.
pub(crate) struct Unfinished {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) committed: Committed,
    /// The last stable offset.
    pub(crate) end: i64,
}

/// What groups have not completed of several topics.
pub(crate) struct Remaining {
    pub(crate) unfinished: Vec<Unfinished>,
    /// Partitions whose leaders do not answer.
    pub(crate) unreachable: Vec<(Arc<str>, i32)>,
}

impl Remaining {
    /// # Errors
    /// If a leader does not answer.
    pub(crate) fn check_leaders(&self) -> Result<(), ReadError> {
        match self.unreachable.first() {
            None => Ok(()),
            Some((topic, partition)) => Err(ReadError::NoLeader {
                topic: topic.to_string(),
                partition: *partition,
            }),
        }
    }
}

impl Groups {
    /// The positions of these pairs of a group and a topic. Leaves out topics that do not exist. With the isolation `read_committed`, waits for open
    /// transactions of the groups.
    pub(crate) fn read(
        settings: &KafkaSettings,
        consumer: &BaseConsumer,
        topics: &[(String, Arc<str>)],
        isolation: &str,
    ) -> Result<Self, ReadError> {
        let positions = positions_of(settings, &by_group(topics), isolation)?;
        // Requested after the positions: a lane can commit for a new topic only after it was created.
        let ids = ids_of(consumer, topics)?;
        Ok(Self { positions, ids })
    }

    /// What the groups have not completed of what the partitions contain now. Leaves out topics that are deleted meanwhile. Waits for leaders for at most
    /// `patience`.
    pub(crate) fn remaining(
        self,
        consumer: &BaseConsumer,
        patience: Duration,
    ) -> Result<Remaining, ReadError> {
        let mut positions: BTreeMap<(Arc<str>, i32), Option<Committed>> = BTreeMap::new();
        for ((topic, partition), committed) in self.positions.into_iter().flatten() {
            positions.insert((topic.into(), partition), committed);
        }
        // For a read_committed client, the ends are the last stable offsets.
        let extents = extents(consumer, positions.keys().cloned(), patience)?;
        let (mut unfinished, mut unreachable) = (Vec::new(), Vec::new());
        for ((topic, partition), extent) in extents {
            let Some(Extent { low, end }) = extent else {
                unreachable.push((topic, partition));
                continue;
            };
            let committed = positions.remove(&(topic.clone(), partition)).flatten();
            unfinished.push(Unfinished {
                committed: first_unread(committed, low..end, self.ids.get(&*topic).copied()),
                topic: topic.to_string(),
                partition,
                end,
            });
        }
        Ok(Remaining {
            unfinished,
            unreachable,
        })
    }
}

/// What groups have completed, at one moment.
#[derive(Clone, Debug, Default)]
pub struct GroupPositions(HashMap<Arc<str>, HashMap<i32, Committed>>);

impl GroupPositions {
    /// The positions of these pairs of a group and a topic; each topic may occur once. Leaves out topics that do not exist.
    /// Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn read(settings: &KafkaSettings, topics: &[(String, Arc<str>)]) -> Result<Self, ReadError> {
        let mut positions: HashMap<Arc<str>, HashMap<i32, Committed>> = HashMap::new();
        for ((topic, partition), committed) in positions_of(settings, &by_group(topics), "read_committed")?
            .into_iter()
            .flatten()
        {
            if let Some(committed) = committed {
                let of_topic = positions.entry(topic.into()).or_default();
                of_topic.insert(partition, committed);
            }
        }
        Ok(Self(positions))
    }

    /// Whether the group has not completed the record at this position. Without a committed offset, it starts at the beginning.
    #[must_use]
    pub fn is_unread(&self, position: &Position) -> bool {
        let partitions = self.0.get(&position.topic);
        let committed = partitions.and_then(|partitions| partitions.get(&position.partition));
        committed.is_none_or(|committed| {
            position.offset >= committed.offset && !committed.completed.contains(position.offset)
        })
    }
}

fn by_group(topics: &[(String, Arc<str>)]) -> BTreeMap<&str, Vec<Arc<str>>> {
    let mut by_group: BTreeMap<&str, Vec<Arc<str>>> = BTreeMap::new();
    for (group, topic) in topics {
        by_group.entry(group).or_default().push(topic.clone());
    }
    by_group
}

/// The current ids of topics. Leaves out topics that do not exist, and all if the broker does not support ids.
fn ids_of(
    consumer: &BaseConsumer,
    topics: &[(String, Arc<str>)],
) -> Result<BTreeMap<String, TopicId>, ReadError> {
    let failed = |code| kafka("requesting the ids of topics")(KafkaError::AdminOp(code));
    let names: Vec<&str> = topics.iter().map(|(_, topic)| &**topic).collect();
    let mut ids = BTreeMap::new();
    for (topic, description) in describe_topics(consumer.client(), &names, CALL).map_err(failed)? {
        if let Some(id) = description.map_err(failed)?.id {
            ids.insert(topic, id);
        }
    }
    Ok(ids)
}

/// Where a lane of the group continues in this log: `lane/topics.rs` decides the same.
fn first_unread(committed: Option<Committed>, log: Range<i64>, id: Option<TopicId>) -> Committed {
    let continues = |committed: &Committed| match (committed.topic, id) {
        // Beyond the end, the log was truncated. The lane continues at its end.
        (Some(topic), Some(id)) => topic == TopicFingerprint::of(id) && committed.offset >= log.start,
        _ => (log.start..=log.end).contains(&committed.offset),
    };
    committed
        .filter(continues)
        .unwrap_or_else(|| Committed::at(log.start))
}

impl<T> Head<T> {
    fn empty() -> Self {
        Self {
            backlog: Backlog {
                records: 0,
                is_exact: true,
            },
            first: Vec::new(),
            unreachable: Vec::new(),
        }
    }
}

type Positions = BTreeMap<(String, i32), Option<Committed>>;

/// The positions of all groups. Each group needs its own client, which waits most of the time, so several run in parallel.
fn positions_of(
    settings: &KafkaSettings,
    topics_by_group: &BTreeMap<&str, Vec<Arc<str>>>,
    isolation: &str,
) -> Result<Vec<Positions>, ReadError> {
    let groups = Mutex::new(topics_by_group.iter());
    let next = || groups.lock().unwrap_or_else(PoisonError::into_inner).next();
    let request = || -> Result<Vec<Positions>, ReadError> {
        let mut results = Vec::new();
        while let Some((group, topics)) = next() {
            let mut topics = topics.clone();
            results.push(loop {
                match positions(settings, group, &topics, isolation) {
                    Err(ReadError::Missing(deleted)) => topics.retain(|topic| **topic != *deleted),
                    found => break found?,
                }
            });
        }
        Ok(results)
    };
    thread::scope(|scope| {
        let parallel = topics_by_group.len().min(MAX_PARALLEL);
        let threads: Vec<_> = (0..parallel).map(|_| scope.spawn(request)).collect();
        let mut all = Vec::new();
        for thread in threads {
            match thread.join() {
                Ok(results) => all.extend(results?),
                Err(panic) => resume_unwind(panic),
            }
        }
        Ok(all)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_counts_only_for_the_topic_to_which_it_belongs() {
        let (id, other) = (TopicId::from_bits(1 << 100), TopicId::from_bits(2 << 100));
        let first = |offset, topic: Option<TopicId>, id| {
            let committed = Committed {
                topic: topic.map(TopicFingerprint::of),
                ..Committed::at(offset)
            };
            first_unread(Some(committed), 10..20, id).offset
        };
        for topic in [Some(id), None] {
            assert_eq!(first(15, topic, Some(id)), 15);
            assert_eq!(first(20, topic, Some(id)), 20);
            assert_eq!(first(5, topic, Some(id)), 10);
        }
        assert_eq!(first(15, Some(other), Some(id)), 10);
        assert_eq!(first(25, None, Some(id)), 10);
        assert_eq!(first(25, Some(id), None), 10);
        // Truncated.
        assert_eq!(first(25, Some(id), Some(id)), 25);
        assert_eq!(first_unread(None, 10..20, Some(id)).offset, 10);
    }

    #[test]
    fn an_upper_bound_is_displayed_as_such() {
        let text = |records, is_exact| Backlog { records, is_exact }.to_string();
        assert_eq!(text(1, true), "1 record");
        assert_eq!(text(200, true), "200 records");
        assert_eq!(text(7_000, false), "up to 7000 records");
    }
}
