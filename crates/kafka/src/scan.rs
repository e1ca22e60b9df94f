//! Scans: reads everything once that groups have not completed, or that topics contain since a time, with progress.
//!
//! A scan is about one moment. The positions of all groups are requested first, then the ends of the topics, in the order of the
//! arguments. One transaction completes a record and writes its next copy. So a record that waits at that moment is in the scan: its
//! copy is either not complete, or the next one was written before the ends were requested. A record that moves on in between can be in the
//! scan twice.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use rdkafka::consumer::BaseConsumer;
use redeliver_core::{Record, Timestamp};
use redeliver_kafka_ffi::KafkaClient;

use crate::backlog::{Groups, Unfinished};
use crate::client::KafkaSettings;
use crate::extents::{Extent, extents};
use crate::reader::{ReadError, TopicReader, kafka, offsets_since, partition_count};
use crate::shared_prefetch::SharedPrefetch;
use crate::tracker::Committed;

/// Timeout of one request.
const CALL: Duration = Duration::from_secs(10);

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

struct Part {
    committed: Committed,
    /// The offset after the last one that was read.
    next: i64,
    end: i64,
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
        let consumer: KafkaClient<BaseConsumer> = settings
            .reader("read_committed")
            .create()
            .map_err(kafka("creating a client"))?;
        let groups = Groups::read(settings, &consumer, unfinished, "read_committed")?;
        let mut chosen = Vec::new();
        for (topic, since) in whole {
            chosen.extend(whole_topic(&consumer, topic, *since)?);
        }
        let remaining = groups.remaining(&consumer, CALL)?;
        remaining.check_leaders()?;
        chosen.extend(remaining.unfinished);

        let mut parts: HashMap<Arc<str>, HashMap<i32, Part>> = HashMap::new();
        let (mut from, mut total) = (Vec::new(), 0);
        for Unfinished {
            topic,
            partition,
            committed,
            end,
        } in chosen
        {
            let begin = committed.offset;
            if begin >= end {
                continue;
            }
            total += end.abs_diff(begin);
            let part = Part {
                committed,
                next: begin,
                end,
            };
            let of_topic = parts.entry(topic.as_str().into()).or_default();
            of_topic.insert(partition, part);
            from.push(((topic, partition), begin));
        }
        let settings = SharedPrefetch::of(from.len()).limit(settings);
        Ok(Self {
            reader: TopicReader::from_offsets(&settings, from)?,
            parts,
            total,
        })
    }

    /// How many offsets there are to read.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
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
        let ends: BTreeMap<(String, i32), i64> = self
            .parts
            .iter()
            .flat_map(|(topic, parts)| {
                let parts = parts.iter();
                parts.map(|(partition, part)| ((topic.to_string(), *partition), part.end))
            })
            .collect();
        let mut progress = Progress {
            read: 0,
            total: self.total,
        };
        let parts = &mut self.parts;
        self.reader.read_parts(ends, timeout, |record| {
            let Some(record) = record else {
                return visit(None, progress);
            };
            let position = &record.position;
            let of_topic = parts.get_mut(&position.topic);
            let part = of_topic.and_then(|parts| parts.get_mut(&position.partition));
            // The reader may return one record after the end, and some again after it was interrupted.
            let Some(part) = part.filter(|part| (part.next..part.end).contains(&position.offset)) else {
                return ControlFlow::Continue(());
            };
            progress.read += (position.offset + 1).abs_diff(part.next);
            part.next = position.offset + 1;
            if part.committed.completed.contains(position.offset) {
                return ControlFlow::Continue(());
            }
            visit(Some(record), progress)
        })
    }
}

/// A topic from a time on.
fn whole_topic(
    consumer: &BaseConsumer,
    topic: &Arc<str>,
    since: Option<Timestamp>,
) -> Result<Vec<Unfinished>, ReadError> {
    let count = match partition_count(consumer, topic) {
        Err(ReadError::Missing(_)) => return Ok(Vec::new()),
        count => count?,
    };
    let from = since.map(|since| offsets_since(consumer, topic, 0..count, since));
    let from = from.transpose()?;
    let extents = extents(
        consumer,
        (0..count).map(|partition| (topic.clone(), partition)),
        CALL,
    )?;
    let mut chosen = Vec::new();
    for ((_, partition), extent) in extents {
        let Some(Extent { low, end }) = extent else {
            return Err(ReadError::NoLeader {
                topic: topic.to_string(),
                partition,
            });
        };
        let begin = match &from {
            None => low,
            // Without a record of that time, all are older.
            Some(from) => from.get(&partition).map_or(end, |begin| low.max(*begin)),
        };
        chosen.push(Unfinished {
            topic: topic.to_string(),
            partition,
            committed: Committed::at(begin),
            end,
        });
    }
    Ok(chosen)
}
