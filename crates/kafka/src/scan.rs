//! Scans: reads everything once that groups have not completed, or that topics contain since a time, with progress.
//!
//! A scan is about one moment. The positions of all groups are requested first, then the ends of the topics, in the order of the
//! arguments. One transaction completes a record and writes its next copy. So a record that waits at that moment is in the scan: its
//! copy is either not complete, or the next one was written before the ends were requested. A record that moves on in between can be in the
//! scan twice.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::BaseConsumer;
use redeliver_core::{Record, Timestamp};

use crate::client::KafkaSettings;
use crate::extents::{Extent, extents};
use crate::reader::{
    At, CALL, ReadError, TopicPartition, TopicReader, Until, client, offsets, partition_count,
};
use crate::shared_prefetch::SharedPrefetch;
use crate::tracker::Committed;
use crate::unfinished::{Groups, Unfinished};

/// A part of each of several partitions, which has been chosen and not been read yet.
pub struct Scan {
    reader: TopicReader,
    parts: HashMap<Arc<str>, HashMap<i32, Part>>,
    total: u64,
}

/// How much of a scan has been read, in offsets. Transaction markers have offsets too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// How many were read.
    pub read: u64,
    /// How many there are.
    pub total: u64,
}

/// The most offsets that a scan of the newest ones reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of each topic.
    pub of_topic: u64,
    /// Of all topics together.
    pub in_all: u64,
}

/// The part of a partition to read.
pub(crate) struct Part {
    pub(crate) committed: Committed,
    /// The offset after the last one that was read.
    pub(crate) next: i64,
    pub(crate) end: i64,
    /// The part ends at the end of the partition. Otherwise the first record after it is read, too: there may be none before.
    pub(crate) is_all: bool,
}

impl Scan {
    /// Chooses what to read: what each of these groups has not completed of its topic, and `whole` topics, from the first record with
    /// this timestamp or a later one; `None` means from the beginning. Each topic may occur once. Leaves out topics that do not
    /// exist. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn new(
        settings: &KafkaSettings,
        whole: &[(Arc<str>, Option<Timestamp>)],
        unfinished: &[(String, Arc<str>)],
    ) -> Result<Self, ReadError> {
        Self::of_partitions(settings, whole, unfinished, None)
    }

    /// As [`Scan::new`], only of the partitions with this number; `None` means of all.
    ///
    /// # Errors
    /// As [`Scan::new`].
    pub fn of_partitions(
        settings: &KafkaSettings,
        whole: &[(Arc<str>, Option<Timestamp>)],
        unfinished: &[(String, Arc<str>)],
        number: Option<i32>,
    ) -> Result<Self, ReadError> {
        let consumer = client(settings, "read_committed")?;
        let groups = Groups::read(settings, &consumer, unfinished, "read_committed")?;
        let mut chosen = Vec::new();
        for (topic, since) in whole {
            // The embedded broker finds no offset by its time.
            let since = since.filter(|_| !settings.is_embedded);
            chosen.extend(whole_topic(&consumer, topic, since, &|_, _| None)?);
        }
        let remaining = groups.remaining(&consumer, CALL)?;
        remaining.check_leaders()?;
        chosen.extend(remaining.unfinished);
        chosen.retain(|((_, partition), _)| number.is_none_or(|number| *partition == number));
        Self::to_ends(settings, chosen)
    }

    /// Chooses `whole` topics as [`Scan::new`], and what these `topics` contain from a time on, or for a topic and a partition from an offset on, if that is
    /// earlier; of these only the newest offsets. Also returns the topics of which that leaves out some, with how many are chosen. Each topic may occur once.
    /// Leaves out topics that do not exist. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn newest(
        settings: &KafkaSettings,
        whole: &[(Arc<str>, Option<Timestamp>)],
        topics: &[(Arc<str>, Option<Timestamp>)],
        from: &dyn Fn(&str, i32) -> Option<i64>,
        limits: Limits,
    ) -> Result<(Self, BTreeMap<Arc<str>, u64>), ReadError> {
        let consumer = client(settings, "read_committed")?;
        let parts = |(topic, since): &(Arc<str>, Option<Timestamp>),
                     from: &dyn Fn(&str, i32) -> Option<i64>| {
            // The embedded broker finds no offset by its time.
            let since = since.filter(|_| !settings.is_embedded);
            whole_topic(&consumer, topic, since, from)
        };
        let mut chosen = Vec::new();
        for topic in whole {
            chosen.extend(parts(topic, &|_, _| None)?);
        }
        let of_topics: Vec<_> = topics
            .iter()
            .map(|topic| parts(topic, from))
            .collect::<Result<_, _>>()?;
        let sizes = |parts: &[(TopicPartition, Unfinished)]| -> Vec<u64> {
            let parts = parts.iter();
            parts
                .map(|(_, part)| part.end.abs_diff(part.committed.offset))
                .collect()
        };
        let totals = of_topics
            .iter()
            .map(|parts| sizes(parts).iter().sum::<u64>().min(limits.of_topic));
        let share = limit_of_each(totals.collect(), limits.in_all);
        let of_topic = share.unwrap_or(limits.of_topic);
        let mut cut = BTreeMap::new();
        for ((topic, _), mut parts) in topics.iter().zip(of_topics) {
            if let Some(limit) = limit_of_each(sizes(&parts), of_topic) {
                cut.insert(topic.clone(), of_topic);
                for (_, part) in &mut parts {
                    let newest = part.end.saturating_sub_unsigned(limit);
                    part.committed.offset = part.committed.offset.max(newest);
                }
            }
            chosen.extend(parts);
        }
        Ok((Self::to_ends(settings, chosen)?, cut))
    }

    /// A scan up to the ends of these partitions.
    fn to_ends(
        settings: &KafkaSettings,
        chosen: Vec<(TopicPartition, Unfinished)>,
    ) -> Result<Self, ReadError> {
        let parts = chosen.into_iter().map(|(key, Unfinished { committed, end })| {
            let part = Part {
                next: committed.offset,
                committed,
                end,
                is_all: true,
            };
            (key, part)
        });
        Self::of(settings, parts.filter(|(_, part)| part.next < part.end).collect())
    }

    /// A scan of parts that are not empty.
    pub(crate) fn of(
        settings: &KafkaSettings,
        chosen: Vec<(TopicPartition, Part)>,
    ) -> Result<Self, ReadError> {
        let settings = SharedPrefetch::of(chosen.len()).limit(settings);
        let from = chosen.iter().map(|(key, part)| (key.clone(), Some(part.next)));
        let reader = TopicReader::from_offsets(&settings, from)?;
        let mut parts: HashMap<Arc<str>, HashMap<i32, Part>> = HashMap::new();
        let mut total = 0;
        for ((topic, partition), part) in chosen {
            total += part.end.abs_diff(part.next);
            parts.entry(topic).or_default().insert(partition, part);
        }
        Ok(Self { reader, parts, total })
    }

    /// How many offsets there are to read.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The parts, with their topics.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (&Arc<str>, &Part)> {
        let topics = self.parts.iter();
        topics.flat_map(|(topic, parts)| parts.values().map(move |part| (topic, part)))
    }

    /// Reads them, partitions in no particular order and each in its order, until the visitor breaks. Visits `None` while no record
    /// arrives. Blocks.
    ///
    /// # Errors
    /// If the broker returns an error or the ends are not reached within `timeout`.
    pub fn run(
        mut self,
        timeout: Duration,
        mut visit: impl FnMut(Option<Record>, Progress) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        self.read(false, timeout, |found, progress| {
            visit(found.map(|(record, _)| record), progress)
        })
    }

    /// As [`Scan::run`], also visiting whether the part of a record ends at the end of its partition. If it waits for transactions that are open now, these ends
    /// are the ones after that.
    pub(crate) fn read(
        &mut self,
        waits_for_transactions: bool,
        timeout: Duration,
        mut visit: impl FnMut(Option<(Record, bool)>, Progress) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        let deadline = Instant::now() + timeout;
        let (ends, until): (_, fn(i64) -> Until) = if waits_for_transactions {
            let parts = self.parts.values_mut().flat_map(HashMap::values_mut);
            parts.for_each(|part| part.end = i64::MAX);
            (self.reader.settled_ends(deadline)?, Until::End)
        } else {
            let ends = self.parts.iter().flat_map(|(topic, parts)| {
                let parts = parts.iter();
                parts.map(|(partition, part)| ((topic.clone(), *partition), part.end))
            });
            (ends.collect(), Until::Offset)
        };
        let mut progress = Progress {
            read: 0,
            total: self.total,
        };
        let parts = &mut self.parts;
        self.reader.read_until(&ends, until, deadline, |record| {
            let Some(record) = record else {
                return visit(None, progress);
            };
            let position = &record.position;
            let of_topic = parts.get_mut(&position.topic);
            let part = of_topic.and_then(|parts| parts.get_mut(&position.partition));
            // The reader may return one record after the end, and some again after it was interrupted.
            let is_wanted = |part: &&mut Part| {
                position.offset >= part.next && (position.offset < part.end || !part.is_all)
            };
            let Some(part) = part.filter(is_wanted) else {
                return ControlFlow::Continue(());
            };
            progress.read += (position.offset + 1).abs_diff(part.next);
            part.next = position.offset + 1;
            if part.committed.completed.contains(position.offset) {
                return ControlFlow::Continue(());
            }
            let is_all = part.is_all;
            visit(Some((record, is_all)), progress)
        })
    }
}

/// How many offsets may be read of each partition, or topic, so that they are at most `most` together; `None` if that is all of them. Small ones leave more for
/// others.
fn limit_of_each(mut sizes: Vec<u64>, most: u64) -> Option<u64> {
    sizes.sort_unstable();
    let mut left = most;
    for (size, partitions) in sizes.iter().zip((1..=sizes.len() as u64).rev()) {
        let share = left / partitions;
        if *size > share {
            return Some(share);
        }
        left -= size;
    }
    None
}

/// A topic from a time on, or from an offset on, if that is earlier.
fn whole_topic(
    consumer: &BaseConsumer,
    topic: &Arc<str>,
    since: Option<Timestamp>,
    or_from: &dyn Fn(&str, i32) -> Option<i64>,
) -> Result<Vec<(TopicPartition, Unfinished)>, ReadError> {
    let count = match partition_count(consumer, topic) {
        Err(ReadError::Missing(_)) => return Ok(Vec::new()),
        count => count?,
    };
    let partitions: Vec<TopicPartition> = (0..count).map(|partition| (topic.clone(), partition)).collect();
    let from = since.map(|since| offsets(consumer, &partitions, At::Time(since), Instant::now() + CALL));
    let from = from.transpose()?;
    let mut chosen = Vec::new();
    for (key, extent) in extents(consumer, partitions.into_iter(), CALL)? {
        let Some(Extent { low, end }) = extent else {
            return Err(ReadError::NoLeader {
                topic: topic.to_string(),
                partition: key.1,
            });
        };
        let begin = match &from {
            None => low,
            // Without a record of that time, all are older.
            Some(from) => from.get(&key).map_or(end, |begin| low.max(*begin)),
        };
        // Retention may have removed it.
        let earlier = or_from(topic, key.1).map(|from| from.max(low));
        let committed = Committed::at(earlier.map_or(begin, |from| from.min(begin)));
        chosen.push((key, Unfinished { committed, end }));
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_partitions_leave_more() {
        for (sizes, most, expected) in [
            (vec![], 10, None),
            (vec![4, 6], 10, None),
            (vec![6, 5], 10, Some(5)),
            (vec![100, 1, 100], 11, Some(5)),
            (vec![0, 20], 10, Some(10)),
        ] {
            assert_eq!(limit_of_each(sizes.clone(), most), expected, "{sizes:?}");
        }
    }
}
