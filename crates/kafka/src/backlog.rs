//! The number of records that a consumer group has not completed, determined from outside of the group.
//!
//! The difference between the committed offset and the end of a partition is too high, because transaction markers have
//! offsets too: a topic whose records are all complete would never show zero. So if the committed offset is near the end,
//! the remaining records are read and counted. Otherwise the partition is certainly not empty, and the difference is used as
//! an upper bound. [`heads`] also reads the first incomplete records of such partitions.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::Record;

use crate::client::KafkaSettings;
use crate::reader::{CALL, ReadError, client, is_unknown};
use crate::scan::{Part, Scan};
pub use crate::unfinished::GroupPositions;
use crate::unfinished::{Groups, Unfinished};

/// How often the records are counted if topics are deleted meanwhile.
const MAX_COUNTS: u32 = 3;
/// How long [`Mode::Reachable`] waits for leaders.
const LEADERS: Duration = Duration::from_secs(4);
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
    /// The first of these records of each partition, as far as it was read.
    pub first: Vec<T>,
    /// Partitions that have no leader, or whose leaders do not answer; the backlog may be without them. Empty except with [`Mode::Reachable`].
    pub unreachable: Vec<i32>,
}

/// What a count reads, and what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No first records. Waits for open transactions in the topics.
    Backlogs,
    /// The first incomplete records of each partition, too. Does not wait for open transactions in the topics.
    Heads,
    /// As [`Mode::Heads`], of what can be read at the moment. Does not wait for open transactions of the groups either. A backlog whose records
    /// are not read in time is an upper bound.
    Reachable,
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
    let heads = heads(settings, topics, Mode::Backlogs, NEAR, timeout, |_| ())?.into_iter();
    Ok(heads.map(|(topic, head)| (topic, head.backlog)).collect())
}

/// As [`backlogs`], with what `read` returns for the first incomplete records of each partition: those among the first
/// `offsets` offsets.
///
/// # Errors
/// As [`backlogs`]; with [`Mode::Reachable`], only if the broker does not answer.
pub fn heads<T>(
    settings: &KafkaSettings,
    topics: &[(String, Arc<str>)],
    mode: Mode,
    offsets: i64,
    timeout: Duration,
    read: impl Fn(Record) -> T,
) -> Result<BTreeMap<Arc<str>, Head<T>>, ReadError> {
    let count = || count(settings, topics, mode, offsets, timeout, &read);
    let mut counted = count();
    // A topic may be deleted after its bounds were read. The next count leaves it out.
    for _ in 1..MAX_COUNTS {
        match &counted {
            Err(ReadError::Kafka { source, .. }) if is_unknown(source) => counted = count(),
            _ => break,
        }
    }
    counted
}

/// Reads partitions with up to `near` offsets after the committed one, and except for [`Mode::Backlogs`] the first `near` offsets of
/// the others.
fn count<T>(
    settings: &KafkaSettings,
    topics: &[(String, Arc<str>)],
    mode: Mode,
    near: i64,
    timeout: Duration,
    read: impl Fn(Record) -> T,
) -> Result<BTreeMap<Arc<str>, Head<T>>, ReadError> {
    let consumer = client(settings, "read_committed")?;
    let mut counted: BTreeMap<Arc<str>, Head<T>> = BTreeMap::new();
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
        counted.entry(topic).or_default().lacks(partition);
    }
    let mut parts = Vec::new();
    for ((topic, partition), Unfinished { committed, end }) in remaining.unfinished {
        let backlog = &mut counted.entry(topic.clone()).or_default().backlog;
        let distance = end - committed.offset;
        let is_all = distance <= near;
        if !is_all {
            backlog.add_bound(distance);
        }
        if distance > 0 && (is_all || mode != Mode::Backlogs) {
            let part = Part {
                next: committed.offset,
                end: end.min(committed.offset.saturating_add(near)),
                committed,
                is_all,
            };
            parts.push(((topic, partition), part));
        }
    }
    if parts.is_empty() {
        return Ok(counted);
    }
    let mut scan = Scan::of(settings, parts)?;
    // A topic is not empty while an open transaction may add records.
    let waits_for_transactions = mode == Mode::Backlogs;
    let read = scan.read(waits_for_transactions, timeout, |found, _| {
        if let Some((record, is_all)) = found
            && let Some(head) = counted.get_mut(&record.position.topic)
        {
            head.backlog.records += u64::from(is_all);
            head.first.push(read(record));
        }
        ControlFlow::Continue(())
    });
    match read {
        Err(ReadError::Late { topic, partition, .. }) if mode == Mode::Reachable => {
            for (topic, part) in scan.parts() {
                if let (true, 1.., Some(head)) = (part.is_all, part.end - part.next, counted.get_mut(topic)) {
                    head.backlog.add_bound(part.end - part.next);
                }
            }
            if let Some(head) = counted.get_mut(topic.as_str()) {
                head.lacks(partition);
            }
        }
        read => read?,
    }
    Ok(counted)
}

impl Backlog {
    fn add_bound(&mut self, offsets: i64) {
        self.records += u64::try_from(offsets).unwrap_or(0);
        self.is_exact = false;
    }
}

impl<T> Head<T> {
    /// A partition is not in it.
    fn lacks(&mut self, partition: i32) {
        self.unreachable.push(partition);
        self.backlog.is_exact = false;
    }
}

impl<T> Default for Head<T> {
    fn default() -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upper_bound_is_displayed_as_such() {
        let text = |records, is_exact| Backlog { records, is_exact }.to_string();
        assert_eq!(text(1, true), "1 record");
        assert_eq!(text(200, true), "200 records");
        assert_eq!(text(7_000, false), "up to 7000 records");
    }
}
