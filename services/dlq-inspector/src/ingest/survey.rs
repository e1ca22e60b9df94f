//! Which dead-letter topics there are, and whether they are still those that the index was made from.
//!
//! A topic that was deleted and made again has the same name and offsets that begin again. It shows in an end
//! that lies before what was read, in a beginning that went back to 0, or in records that are not those that
//! were read: the first and the last known record of each partition are compared, of all partitions at the
//! start and of a few in every survey after it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use redeliver_core::Position;
use redeliver_kafka::Waker;
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::survey::{SurveyedTopic, Surveyor};
use redeliver_runtime::health::Part;
use tokio_util::sync::CancellationToken;

use crate::index::{self, Pool, Sample};
use crate::ledger;
use crate::letter::content_hash;
use crate::pattern::Patterns;
use crate::shared::{SeenTopic, Shared};
use crate::values::Values;

/// How often the topics are looked over.
const EVERY: Duration = Duration::from_secs(2);
/// How often it is asked how long topics keep their records.
const RETENTION_EVERY: Duration = Duration::from_secs(30);
/// Of how many partitions records are compared in each survey but the first.
const COMPARED: usize = 8;
/// How often it is said that Kafka does not answer.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Survey {
    /// The dead-letter topics and the ledger.
    pub(crate) topics: Vec<SurveyedTopic>,
    /// Those that are not the ones that the index was made from.
    pub(crate) changed: Vec<Arc<str>>,
    /// The work of the writer that was done when the index was looked at.
    pub(crate) as_of: u64,
}

/// Looks topics over.
pub(crate) struct SurveyTask {
    pub(crate) patterns: Patterns,
    pub(crate) surveyor: Surveyor,
    pub(crate) pool: Pool,
    pub(crate) values: Values,
    pub(crate) shared: Arc<Shared>,
    pub(crate) part: Part,
    pub(crate) reader: SyncSender<Survey>,
    pub(crate) waker: Waker,
    pub(crate) stop: CancellationToken,
}

/// What is remembered from one survey to the next.
#[derive(Default)]
struct Memory {
    /// How many there have been.
    count: u64,
    lows: BTreeMap<(Arc<str>, i32), i64>,
    /// The partition with which comparing goes on.
    turn: usize,
}

/// Why there is no survey.
#[derive(Debug, thiserror::Error)]
enum SurveyError {
    #[error("kafka")]
    Kafka(#[from] ReadError),
    #[error("the index")]
    Index(#[from] index::ReadError),
}

impl SurveyTask {
    /// Looks topics over until it is told to stop.
    pub(crate) async fn run(self) -> Result<(), index::ReadError> {
        let mut memory = Memory::default();
        let mut said: Option<std::time::Instant> = None;
        loop {
            let result = tokio::select! {
                result = self.survey(&mut memory) => result,
                () = self.stop.cancelled() => return Ok(()),
            };
            match result {
                Ok(survey) => {
                    said = None;
                    memory.count += 1;
                    match self.reader.try_send(survey) {
                        // One that was not taken yet is as good as this one.
                        Ok(()) | Err(TrySendError::Full(_)) => self.waker.wake(),
                        Err(TrySendError::Disconnected(_)) => return Ok(()),
                    }
                }
                Err(SurveyError::Kafka(error)) => {
                    if memory.count == 0 {
                        self.part.not_ready("kafka does not answer");
                    }
                    if said.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
                        said = Some(std::time::Instant::now());
                        let cause = std::error::Error::source(&error).map(ToString::to_string);
                        tracing::warn!(%error, cause, "the topics cannot be looked over; trying again");
                    }
                }
                Err(SurveyError::Index(error)) => return Err(error),
            }
            tokio::select! {
                () = tokio::time::sleep(EVERY) => {}
                () = self.stop.cancelled() => return Ok(()),
            }
        }
    }

    async fn survey(&self, memory: &mut Memory) -> Result<Survey, SurveyError> {
        // First what the index knows, then what Kafka has: the other way round a record that comes in between
        // would look like one that is gone.
        let as_of = self.shared.applied();
        let (known, _) = self.pool.read(index::known).await?;
        let known: BTreeMap<(Arc<str>, i32), i64> = known
            .into_iter()
            .map(|known| ((Arc::from(known.topic), known.partition), known.next))
            .collect();
        let topics = self.topics().await?;
        let mut changed: Vec<Arc<str>> = Vec::new();
        for topic in &topics {
            if has_begun_again(topic, &known, &memory.lows) {
                changed.push(topic.name.clone());
            }
            for (partition, extent) in (0..).zip(&topic.partitions) {
                if let Some(extent) = extent {
                    memory.lows.insert((topic.name.clone(), partition), extent.low);
                }
            }
        }
        memory
            .lows
            .retain(|(name, _), _| topics.iter().any(|topic| topic.name == *name));
        self.compare(&topics, memory, &mut changed).await?;
        self.note_topics(&topics);
        Ok(Survey {
            topics,
            changed,
            as_of,
        })
    }

    async fn topics(&self) -> Result<Vec<SurveyedTopic>, ReadError> {
        let (surveyor, patterns) = (self.surveyor.clone(), self.patterns.clone());
        let wanted = move |name: &str| name == ledger::TOPIC || patterns.matches(name);
        let asked = tokio::task::spawn_blocking(move || surveyor.topics(wanted)).await;
        asked.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only while the runtime ends.
            Err(_) => Ok(Vec::new()),
        })
    }

    /// Compares known records with those that stand there now.
    async fn compare(
        &self,
        topics: &[SurveyedTopic],
        memory: &mut Memory,
        changed: &mut Vec<Arc<str>>,
    ) -> Result<(), SurveyError> {
        let partitions: Vec<(&Arc<str>, i32, i64)> = topics
            .iter()
            .filter(|topic| &*topic.name != ledger::TOPIC && !changed.contains(&topic.name))
            .flat_map(|topic| {
                let extents = (0..).zip(&topic.partitions);
                extents.filter_map(move |(partition, extent)| Some((&topic.name, partition, (*extent)?.low)))
            })
            .collect();
        if partitions.is_empty() {
            return Ok(());
        }
        let count = if memory.count == 0 {
            partitions.len()
        } else {
            COMPARED.min(partitions.len())
        };
        let chosen = (0..count).map(|step| partitions[(memory.turn + step) % partitions.len()]);
        let mut by_topic: BTreeMap<Arc<str>, Vec<(i32, i64)>> = BTreeMap::new();
        for (topic, partition, low) in chosen {
            by_topic.entry(topic.clone()).or_default().push((partition, low));
        }
        memory.turn = (memory.turn + count) % partitions.len();
        for (topic, lows) in by_topic {
            let name = topic.clone();
            let samples = self
                .pool
                .read(move |connection| index::samples(connection, &name, &lows))
                .await?;
            let wanted = samples.iter().map(|sample| Position {
                topic: topic.clone(),
                partition: sample.partition,
                offset: sample.offset,
            });
            let found = match self.values.get(wanted.collect()).await {
                Ok(found) => found,
                // One topic that cannot be read does not keep the others from being found.
                Err(error) => {
                    tracing::debug!(topic = &*topic, %error, "known records are not compared");
                    continue;
                }
            };
            let found: Vec<_> = found
                .iter()
                .map(|record| record.as_ref().map(content_hash))
                .collect();
            if was_recreated(&samples, &found) {
                changed.push(topic);
            }
        }
        Ok(())
    }

    /// Tells the others which dead-letter topics there are.
    fn note_topics(&self, topics: &[SurveyedTopic]) {
        let mut seen = self.shared.topics();
        seen.retain(|name, _| topics.iter().any(|found| *found.name == **name));
        for topic in topics.iter().filter(|topic| &*topic.name != ledger::TOPIC) {
            seen.entry(topic.name.to_string()).or_default();
        }
    }
}

/// Asks how long topics keep their records, on its own: brokers may be slow to say that they do not tell.
pub(crate) async fn ask_retention(
    surveyor: Surveyor,
    shared: Arc<Shared>,
    stop: CancellationToken,
) -> Result<(), ReadError> {
    let mut asked: Option<std::time::Instant> = None;
    loop {
        let names: Vec<(Arc<str>, bool)> = {
            let seen = shared.topics();
            let known = |topic: &SeenTopic| topic.retention.is_some();
            seen.iter()
                .map(|(name, topic)| (name.as_str().into(), known(topic)))
                .collect()
        };
        let is_time = asked.is_none_or(|asked| asked.elapsed() >= RETENTION_EVERY);
        // A new topic is asked for at once, unless it is known that there is no answer.
        let has_new = names.iter().any(|(_, known)| !known) && names.iter().any(|(_, known)| *known);
        if !names.is_empty() && (is_time || has_new) {
            asked = Some(std::time::Instant::now());
            let names: Vec<Arc<str>> = names.into_iter().map(|(name, _)| name).collect();
            let answer = tokio::select! {
                answer = surveyor.retention(&names) => answer,
                () = stop.cancelled() => return Ok(()),
            };
            match answer {
                Ok(retention) => {
                    for (name, topic) in shared.topics().iter_mut() {
                        topic.retention = retention.get(name).copied().or(topic.retention);
                    }
                }
                // An embedded broker cannot be asked; others may not let us.
                Err(error) => tracing::debug!(%error, "it is not known how long topics keep their records"),
            }
        }
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
}

/// Whether what a topic holds cannot come after what is known of it.
fn has_begun_again(
    topic: &SurveyedTopic,
    known: &BTreeMap<(Arc<str>, i32), i64>,
    lows: &BTreeMap<(Arc<str>, i32), i64>,
) -> bool {
    let known_partitions = known.keys().filter(|(name, _)| *name == topic.name);
    let shrunk = known_partitions
        .map(|(_, partition)| usize::try_from(*partition).unwrap_or(0))
        .any(|partition| partition >= topic.partitions.len());
    let extents = (0..).zip(&topic.partitions);
    shrunk
        || extents
            .filter_map(|(partition, extent)| Some((partition, (*extent)?)))
            .any(|(partition, extent)| {
                let key = (topic.name.clone(), partition);
                let ends_before = known.get(&key).is_some_and(|next| *next > extent.end);
                let begins_again = extent.low == 0 && lows.get(&key).is_some_and(|low| *low > 0);
                ends_before || begins_again
            })
}

/// Whether the records that stand at known offsets are others. A single one that is missing was removed
/// meanwhile; when all are missing something else stands there.
fn was_recreated<T: PartialEq<[u8; crate::letter::HASH_BYTES]>>(
    samples: &[Sample],
    found: &[Option<T>],
) -> bool {
    let differs = samples
        .iter()
        .zip(found)
        .any(|(sample, found)| found.as_ref().is_some_and(|found| *found != sample.content));
    differs || !samples.is_empty() && found.iter().all(Option::is_none)
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::survey::Extent;

    use super::*;

    #[test]
    fn a_topic_that_begins_again_is_noticed_by_its_offsets() {
        let check = |next: i64, low_before: i64, now: Option<Extent>, expected: bool| {
            let key = (Arc::from("t"), 0);
            let topic = SurveyedTopic {
                name: "t".into(),
                partitions: vec![now],
            };
            let known = BTreeMap::from([(key.clone(), next)]);
            let lows = BTreeMap::from([(key, low_before)]);
            assert_eq!(
                has_begun_again(&topic, &known, &lows),
                expected,
                "{next} {low_before} {now:?}"
            );
        };
        let extent = |low, end| Some(Extent { low, end });
        check(10, 0, extent(0, 10), false);
        check(10, 0, extent(0, 11), false);
        check(10, 0, extent(0, 9), true);
        check(10, 5, extent(7, 20), false);
        check(10, 5, extent(0, 20), true);
        check(10, 5, extent(20, 20), false);
        check(10, 5, None, false);
        let shrunk = SurveyedTopic {
            name: "t".into(),
            partitions: vec![extent(0, 100)],
        };
        let known = BTreeMap::from([((Arc::from("t"), 1), 3)]);
        assert!(has_begun_again(&shrunk, &known, &BTreeMap::new()));
    }

    #[test]
    fn other_records_are_noticed_and_one_that_was_removed_is_not() {
        let sample = |offset, content| Sample {
            partition: 0,
            offset,
            content: [content; 16],
        };
        let samples = [sample(0, 1), sample(9, 2)];
        let check = |found: [Option<u8>; 2], expected: bool| {
            let found: Vec<_> = found
                .iter()
                .map(|content| content.map(|content| [content; 16]))
                .collect();
            assert_eq!(was_recreated(&samples, &found), expected, "{found:?}");
        };
        check([Some(1), Some(2)], false);
        check([None, Some(2)], false);
        check([Some(1), Some(3)], true);
        check([None, Some(3)], true);
        check([None, None], true);
        assert!(!was_recreated::<[u8; 16]>(&[], &[]));
    }
}
