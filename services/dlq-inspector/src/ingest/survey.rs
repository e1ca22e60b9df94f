//! Finds the dead-letter topics, and those that were deleted and created again since the index read them.
//!
//! A recreated topic has the same name, another id, and its offsets begin at 0 again. Brokers that do not support topic ids
//! reveal it by an end before the read position, by a low watermark that went back to 0, or by different records: the content of
//! the first and the last indexed record of each partition is compared with Kafka, for all partitions at the start and for a few
//! partitions in each later survey.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, Position, Timestamp};
use redeliver_kafka::Waker;
use redeliver_kafka::lookup::Found;
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::survey::{SurveyedTopic, Surveyor};
use redeliver_runtime::health::Part;
use tokio_util::sync::CancellationToken;

use crate::index::{self, Pool, RecordDigest};
use crate::ledger;
use crate::letter::{ContentHash, content_hash};
use crate::lookup_pool::LookupPool;
use crate::pattern::Patterns;
use crate::shared::{SharedState, TopicStatus};

/// Time between two surveys, unless they take long.
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum time between two surveys.
const MAX_INTERVAL: Duration = Duration::from_secs(10);
/// The time between two surveys is at least this many times as long as a survey, so that large clusters are not asked all the time.
const PAUSE: u32 = 5;
/// Time between two requests of the topics' retention.
const RETENTION_INTERVAL: Duration = Duration::from_secs(30);
/// The number of partitions whose records each survey compares. The first survey compares all partitions.
const COMPARED_PARTITIONS: usize = 8;

/// The result of one survey.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Survey {
    /// The dead-letter topics and the ledger.
    pub(crate) topics: Vec<SurveyedTopic>,
    /// Topics that were deleted and created again since the index read them.
    pub(crate) recreated: Vec<Arc<str>>,
    /// The last batch of changes that the index had applied when the survey began.
    pub(crate) as_of: u64,
    /// When the survey began.
    pub(crate) began_at: Timestamp,
}

/// The task that surveys topics.
pub(crate) struct SurveyTask {
    pub(crate) patterns: Patterns,
    pub(crate) surveyor: Surveyor,
    pub(crate) pool: Pool,
    pub(crate) lookups: LookupPool,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) part: Part,
    /// How long a dead letter must be gone before its ledger entry is removed; `None`: it stays.
    pub(crate) remove_after: Option<Duration>,
    pub(crate) reader: SyncSender<Survey>,
    pub(crate) waker: Waker,
    pub(crate) stop: CancellationToken,
}

/// What later surveys need to know of earlier ones.
#[derive(Default)]
struct SurveyHistory {
    /// The number of successful surveys.
    count: u64,
    low_watermarks: BTreeMap<(Arc<str>, i32), i64>,
    /// The index of the next partition to compare.
    next_compared: usize,
}

/// Why a survey failed.
#[derive(Debug, thiserror::Error)]
enum SurveyError {
    #[error("reading topics from Kafka")]
    Kafka(#[from] ReadError),
    #[error("reading the index")]
    Index(#[from] index::ReadError),
}

impl SurveyTask {
    /// Surveys topics until `stop` is cancelled. A failure is logged, and the next survey follows: if the index is damaged, the
    /// writer rebuilds it.
    pub(crate) async fn run(self) -> Result<(), std::convert::Infallible> {
        let mut history = SurveyHistory::default();
        let mut log_throttle = LogThrottle::default();
        loop {
            let began = Instant::now();
            let result = tokio::select! {
                result = self.survey(&mut history) => result,
                () = self.stop.cancelled() => return Ok(()),
            };
            match result {
                Ok(survey) => {
                    log_throttle.reset();
                    history.count += 1;
                    match self.reader.try_send(survey) {
                        // If the reader has not taken the previous survey yet, this one is dropped: the next follows soon.
                        Ok(()) | Err(TrySendError::Full(_)) => self.waker.wake(),
                        Err(TrySendError::Disconnected(_)) => return Ok(()),
                    }
                }
                Err(error) => {
                    if history.count == 0 && matches!(error, SurveyError::Kafka(_)) {
                        self.part.not_ready("Kafka unavailable");
                    }
                    if log_throttle.should_log() {
                        tracing::warn!(error = %error_chain(&error), "cannot survey topics; retrying");
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause(began.elapsed())) => {}
                () = self.stop.cancelled() => return Ok(()),
            }
        }
    }

    async fn survey(&self, history: &mut SurveyHistory) -> Result<Survey, SurveyError> {
        // The index is read before Kafka. In the other order, a record that is indexed in between would be beyond the end
        // that Kafka returned, and its topic would look recreated.
        let (as_of, began_at) = (self.shared.applied(), self.clock.now());
        let positions = self.pool.internal(index::read_positions).await?;
        let positions: BTreeMap<(Arc<str>, i32), i64> = positions
            .into_iter()
            .map(|position| ((position.topic, position.partition), position.next))
            .collect();
        let indexed = positions.keys().map(|(topic, _)| topic.clone());
        let topics = self.topics(indexed.collect()).await?;
        if let Some(hold) = self.remove_after {
            self.shared.gone().observe(&topics, hold, Instant::now());
        }
        let mut recreated: Vec<Arc<str>> = Vec::new();
        for topic in &topics {
            if has_older_offsets(topic, &positions, &history.low_watermarks) {
                recreated.push(topic.name.clone());
            }
            for (partition, extent) in (0..).zip(&topic.partitions) {
                if let Some(extent) = extent {
                    history
                        .low_watermarks
                        .insert((topic.name.clone(), partition), extent.low);
                }
            }
        }
        let names: BTreeSet<&Arc<str>> = topics.iter().map(|topic| &topic.name).collect();
        history.low_watermarks.retain(|(name, _), _| names.contains(name));
        self.compare(&topics, history, &mut recreated).await?;
        self.publish_topics(&topics);
        Ok(Survey {
            topics,
            recreated,
            as_of,
            began_at,
        })
    }

    /// The topics that Kafka lists, and those of which it refuses to say whether they exist: the ledger, the topics that the
    /// configuration names, and `indexed` topics. Otherwise, a topic that may not be read would look deleted.
    async fn topics(&self, indexed: BTreeSet<Arc<str>>) -> Result<Vec<SurveyedTopic>, ReadError> {
        let (surveyor, patterns) = (self.surveyor.clone(), self.patterns.clone());
        let named = named(indexed, &patterns);
        let is_selected = move |name: &str| name == ledger::TOPIC || patterns.matches(name);
        let result = tokio::task::spawn_blocking(move || surveyor.topics_and(is_selected, &named)).await;
        result.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Cancelled, because the runtime is shutting down.
            Err(_) => Ok(Vec::new()),
        })
    }

    /// Compares indexed records with the records at the same positions in Kafka, for topics without an id.
    async fn compare(
        &self,
        topics: &[SurveyedTopic],
        history: &mut SurveyHistory,
        recreated: &mut Vec<Arc<str>>,
    ) -> Result<(), SurveyError> {
        let partitions: Vec<(&Arc<str>, i32, i64)> = topics
            .iter()
            .filter(|topic| topic.id.is_none() && &*topic.name != ledger::TOPIC)
            .filter(|topic| !recreated.contains(&topic.name))
            .flat_map(|topic| {
                let extents = (0..).zip(&topic.partitions);
                extents.filter_map(move |(partition, extent)| Some((&topic.name, partition, (*extent)?.low)))
            })
            .collect();
        if partitions.is_empty() {
            return Ok(());
        }
        let count = if history.count == 0 {
            partitions.len()
        } else {
            COMPARED_PARTITIONS.min(partitions.len())
        };
        let selected = (0..count).map(|step| partitions[(history.next_compared + step) % partitions.len()]);
        let mut by_topic: BTreeMap<Arc<str>, Vec<(i32, i64)>> = BTreeMap::new();
        for (topic, partition, low) in selected {
            by_topic.entry(topic.clone()).or_default().push((partition, low));
        }
        history.next_compared = (history.next_compared + count) % partitions.len();
        for (topic, lows) in by_topic {
            let name = topic.clone();
            let indexed = self
                .pool
                .internal(move |connection| index::first_and_last(connection, &name, &lows))
                .await?;
            let current = match self.current(&topic, &indexed).await {
                Ok(current) => current,
                // A topic that cannot be read must not fail the survey of the other topics.
                Err(error) => {
                    tracing::debug!(topic = &*topic, %error, "cannot compare indexed records");
                    continue;
                }
            };
            if has_other_records(&indexed, &current) {
                recreated.push(topic);
            }
        }
        Ok(())
    }

    /// What Kafka has at the positions of these digests of one topic, which are in the order of partitions and offsets.
    async fn current(&self, topic: &Arc<str>, indexed: &[RecordDigest]) -> Result<Vec<Current>, ReadError> {
        let mut current = Vec::new();
        for digests in indexed.chunk_by(|one, next| one.partition == next.partition) {
            let positions = digests.iter().map(|digest| Position {
                topic: topic.clone(),
                partition: digest.partition,
                offset: digest.offset,
            });
            let found = self.lookups.find(positions.collect()).await?;
            let found = found.iter().map(|found| match found {
                Found::Record(stored) => Current::Record(content_hash(&stored.record)),
                Found::Deleted | Found::Compacted => Current::Deleted,
                Found::Unknown => Current::Unknown,
            });
            // Of the positions that follow, nothing is known either.
            current.extend(
                found
                    .chain(std::iter::repeat(Current::Unknown))
                    .take(digests.len()),
            );
        }
        Ok(current)
    }

    /// Updates the list of dead-letter topics in the shared state.
    fn publish_topics(&self, topics: &[SurveyedTopic]) {
        let names: BTreeSet<&str> = topics.iter().map(|topic| &*topic.name).collect();
        let mut published = self.shared.topics();
        published.retain(|name, _| names.contains(name.as_str()));
        for topic in topics.iter().filter(|topic| &*topic.name != ledger::TOPIC) {
            published.entry(topic.name.to_string()).or_default();
        }
    }
}

/// The topics of which it must be known whether they exist. An indexed topic that the configuration does not name any more is none
/// of them: it leaves the index, although Kafka may refuse to say anything about it.
fn named(mut indexed: BTreeSet<Arc<str>>, patterns: &Patterns) -> BTreeSet<Arc<str>> {
    indexed.retain(|topic| patterns.matches(topic));
    indexed.extend(patterns.names().map(Arc::from));
    indexed.insert(ledger::TOPIC.into());
    indexed
}

/// Keeps the topics' retention up to date until `stop` is cancelled. This is not part of the survey, because a broker
/// that does not support the request may let it time out.
pub(crate) async fn refresh_retention(
    surveyor: Surveyor,
    shared: Arc<SharedState>,
    stop: CancellationToken,
) -> Result<(), ReadError> {
    let mut last_request: Option<Instant> = None;
    loop {
        let names: Vec<(Arc<str>, bool)> = {
            let topics = shared.topics();
            let is_known = |status: &TopicStatus| status.retention.is_some();
            topics
                .iter()
                .map(|(name, status)| (name.as_str().into(), is_known(status)))
                .collect()
        };
        let is_due = last_request.is_none_or(|last| last.elapsed() >= RETENTION_INTERVAL);
        // A new topic is requested at once, unless the broker has not answered for any topic so far.
        let has_new = names.iter().any(|(_, known)| !known) && names.iter().any(|(_, known)| *known);
        if !names.is_empty() && (is_due || has_new) {
            last_request = Some(Instant::now());
            let names: Vec<Arc<str>> = names.into_iter().map(|(name, _)| name).collect();
            let result = tokio::select! {
                result = surveyor.retention(&names) => result,
                () = stop.cancelled() => return Ok(()),
            };
            match result {
                Ok(retention) => {
                    for (name, topic) in shared.topics().iter_mut() {
                        topic.retention = retention.get(name).copied().or(topic.retention);
                    }
                }
                Err(error) => tracing::debug!(%error, "cannot read the retention of topics"),
            }
        }
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
}

/// The time until the next survey, after one that took this long.
fn pause(took: Duration) -> Duration {
    (took * PAUSE).clamp(INTERVAL, MAX_INTERVAL)
}

/// Whether the offsets of a topic went backwards, which they do only if it was deleted and created again.
fn has_older_offsets(
    topic: &SurveyedTopic,
    positions: &BTreeMap<(Arc<str>, i32), i64>,
    low_watermarks: &BTreeMap<(Arc<str>, i32), i64>,
) -> bool {
    if topic.refusal.is_some() {
        return false;
    }
    // Kafka cannot remove partitions of a topic.
    let indexed = positions.range((topic.name.clone(), 0)..=(topic.name.clone(), i32::MAX));
    let lost_partitions = indexed
        .map(|((_, partition), _)| usize::try_from(*partition).unwrap_or(0))
        .any(|partition| partition >= topic.partitions.len());
    let extents = (0..).zip(&topic.partitions);
    lost_partitions
        || extents
            .filter_map(|(partition, extent)| Some((partition, (*extent)?)))
            .any(|(partition, extent)| {
                let key = (topic.name.clone(), partition);
                let ends_earlier = positions.get(&key).is_some_and(|next| *next > extent.end);
                let begins_earlier = extent.low == 0 && low_watermarks.get(&key).is_some_and(|low| *low > 0);
                ends_earlier || begins_earlier
            })
}

/// What Kafka has at an indexed position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Current {
    Record(ContentHash),
    Deleted,
    /// The metadata of the broker may be old.
    Unknown,
}

/// Whether a topic has other records at the indexed positions. A single record may have been deleted by retention since the low watermark was
/// read; if all are deleted, the topic is not the one that was indexed.
fn has_other_records(indexed: &[RecordDigest], current: &[Current]) -> bool {
    let differs = |(indexed, current): (&RecordDigest, &Current)| matches!(current, Current::Record(content) if *content != indexed.content);
    let are_deleted = !current.is_empty() && current.iter().all(|current| *current == Current::Deleted);
    are_deleted || indexed.iter().zip(current).any(differs)
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::survey::Extent;

    use super::*;

    #[test]
    fn unselected_topics_are_not_surveyed() {
        let patterns = Patterns::new(&["*-dlq".to_owned(), "dead".to_owned()]);
        let indexed = ["a-dlq", "removed", ledger::TOPIC].map(Arc::from);
        let named = named(indexed.into_iter().collect(), &patterns);
        let expected = ["a-dlq", "dead", ledger::TOPIC].map(Arc::from);
        assert_eq!(named, expected.into_iter().collect());
    }

    #[test]
    fn offsets_reveal_recreated_topic() {
        let check = |next: i64, low_before: i64, now: Option<Extent>, expected: bool| {
            let key = (Arc::from("t"), 0);
            let topic = SurveyedTopic {
                name: "t".into(),
                id: None,
                partitions: vec![now],
                refusal: None,
            };
            let positions = BTreeMap::from([(key.clone(), next)]);
            let low_watermarks = BTreeMap::from([(key, low_before)]);
            assert_eq!(
                has_older_offsets(&topic, &positions, &low_watermarks),
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
        let mut fewer_partitions = SurveyedTopic {
            name: "t".into(),
            id: None,
            partitions: vec![extent(0, 100)],
            refusal: None,
        };
        let positions = BTreeMap::from([((Arc::from("t"), 1), 3)]);
        assert!(has_older_offsets(&fewer_partitions, &positions, &BTreeMap::new()));
        // Nothing is known about the partitions of a topic that Kafka does not describe.
        fewer_partitions.partitions.clear();
        fewer_partitions.refusal = Some("denied".to_owned());
        assert!(!has_older_offsets(
            &fewer_partitions,
            &positions,
            &BTreeMap::new()
        ));
    }

    #[test]
    fn slow_surveys_are_less_frequent() {
        for (took, expected) in [(0, 2_000), (100, 2_000), (1_000, 5_000), (30_000, 10_000)] {
            let expected = Duration::from_millis(expected);
            assert_eq!(pause(Duration::from_millis(took)), expected, "{took}");
        }
    }

    #[test]
    fn records_reveal_recreated_topic() {
        let digest = |offset, content| RecordDigest {
            partition: 0,
            offset,
            content: [content; 16],
        };
        let indexed = [digest(0, 1), digest(9, 2)];
        let record = |content| Current::Record([content; 16]);
        for (current, expected) in [
            ([record(1), record(2)], false),
            ([Current::Deleted, record(2)], false),
            ([record(1), record(3)], true),
            ([Current::Deleted, record(3)], true),
            ([Current::Deleted, Current::Deleted], true),
            // The broker may know only the topic that was deleted, or the partitions from before they were added.
            ([Current::Unknown, record(3)], true),
            ([Current::Deleted, Current::Unknown], false),
            ([Current::Unknown, Current::Unknown], false),
        ] {
            assert_eq!(has_other_records(&indexed, &current), expected, "{current:?}");
        }
        assert!(!has_other_records(&[], &[]));
    }
}
