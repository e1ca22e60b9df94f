//! What a consumer group has yet to finish of topics, counted from outside of the group.
//!
//! The difference between the committed offset and the end of a partition says too much: the markers of transactions
//! have offsets, too, so a topic of which everything is done never shows zero. So what is near its end is read and
//! counted; what is far from it is not empty for certain, and is told by the difference.

use std::collections::BTreeMap;
use std::fmt;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer as _};

use crate::client::KafkaSettings;
use crate::reader::{ReadError, TopicReader, client, group_positions, is_unknown, kafka};
use crate::tracker::Committed;

/// How long one answer of the broker may take.
const CALL: Duration = Duration::from_secs(10);
/// How many groups are asked at once.
const AT_ONCE: usize = 16;
/// Partitions that are nearer to their end are read.
const NEAR: i64 = 1_000;

/// How many records a group has yet to finish.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Records; with those that are not counted exactly, an upper bound.
    pub records: u64,
    /// Whether they were counted exactly.
    pub is_exact: bool,
}

impl Backlog {
    /// Whether nothing is left.
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

/// What these groups have yet to finish of their topics: pairs of a group and a topic, each topic once. Joins no group.
/// What is deleted meanwhile is left out. Blocks while the broker is asked.
///
/// # Errors
/// When the broker does not answer, or what is near an end is not read within `timeout`.
pub fn backlogs(
    settings: &KafkaSettings,
    topics: &[(String, Arc<str>)],
    timeout: Duration,
) -> Result<BTreeMap<Arc<str>, Backlog>, ReadError> {
    let mut by_group: BTreeMap<&str, Vec<Arc<str>>> = BTreeMap::new();
    for (group, topic) in topics {
        by_group.entry(group).or_default().push(topic.clone());
    }
    let consumer: BaseConsumer = client(settings, "read_committed")
        .create()
        .map_err(kafka("making a client"))?;
    let mut counted: BTreeMap<Arc<str>, Backlog> = BTreeMap::new();
    let mut near: BTreeMap<(String, i32), Committed> = BTreeMap::new();
    for positions in positions_of(settings, &by_group)? {
        for ((topic, partition), committed) in positions {
            // A read_committed client is told the last stable offset instead of the high watermark.
            let (low, end) = match consumer.fetch_watermarks(&topic, partition, CALL) {
                Ok(watermarks) => watermarks,
                Err(error) if is_unknown(&error) => continue,
                Err(error) => return Err(kafka("asking for the end of a partition")(error)),
            };
            let none = Backlog {
                records: 0,
                is_exact: true,
            };
            let backlog = counted.entry(topic.as_str().into()).or_insert(none);
            let committed = match committed {
                Some(committed) if committed.offset >= low => committed,
                _ => Committed::at(low),
            };
            let behind = end - committed.offset;
            if (1..=NEAR).contains(&behind) {
                near.insert((topic, partition), committed);
            } else {
                let records = u64::try_from(behind).unwrap_or(0);
                backlog.records += records;
                backlog.is_exact &= records == 0;
            }
        }
    }
    if near.is_empty() {
        return Ok(counted);
    }
    let from = near
        .iter()
        .map(|(partition, committed)| (partition.clone(), committed.offset));
    let mut reader = TopicReader::from_offsets(settings, from)?;
    reader.read_to_end(timeout, |record| {
        let position = &record.position;
        let partition = (position.topic.to_string(), position.partition);
        let is_done = near
            .get(&partition)
            .is_some_and(|committed| committed.completed.contains(position.offset));
        if let Some(backlog) = counted.get_mut(&position.topic).filter(|_| !is_done) {
            backlog.records += 1;
        }
    })?;
    Ok(counted)
}

type Positions = BTreeMap<(String, i32), Option<Committed>>;

/// Where groups stand. Each is asked with a client of its own, which waits for most of the time, so several are at once.
fn positions_of(
    settings: &KafkaSettings,
    topics_by_group: &BTreeMap<&str, Vec<Arc<str>>>,
) -> Result<Vec<Positions>, ReadError> {
    let questions = Mutex::new(topics_by_group.iter());
    let next = || questions.lock().unwrap_or_else(PoisonError::into_inner).next();
    let ask = || -> Result<Vec<Positions>, ReadError> {
        let mut answers = Vec::new();
        while let Some((group, topics)) = next() {
            let mut topics = topics.clone();
            answers.push(loop {
                match group_positions(settings, group, &topics) {
                    Err(ReadError::Missing(gone)) => topics.retain(|topic| **topic != *gone),
                    positions => break positions?,
                }
            });
        }
        Ok(answers)
    };
    thread::scope(|scope| {
        let at_once = topics_by_group.len().min(AT_ONCE);
        let asking: Vec<_> = (0..at_once).map(|_| scope.spawn(ask)).collect();
        let mut all = Vec::new();
        for asking in asking {
            match asking.join() {
                Ok(answers) => all.extend(answers?),
                Err(panic) => resume_unwind(panic),
            }
        }
        Ok(all)
    })
}

#[cfg(test)]
mod tests {
    use super::Backlog;

    #[test]
    fn a_bound_is_told_from_a_count() {
        let text = |records, is_exact| Backlog { records, is_exact }.to_string();
        assert_eq!(text(1, true), "1 record");
        assert_eq!(text(200, true), "200 records");
        assert_eq!(text(7_000, false), "up to 7000 records");
    }
}
