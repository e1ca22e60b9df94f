//! Decodes the values that could not be decoded when they were read: reads them from Kafka again once there is a schema, and sends their fields to the
//! writer.
//!
//! The registry's client remembers an outage, so that asking it every second costs nothing. Schemas that the registry does not have are asked for
//! seldom, and a few at a time: other formats than that of the registry have values that begin with a zero byte, too.
//!
//! A partition that cannot be read is left out until the next round, so that it does not hold up the others.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use redeliver_core::Position;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_kafka::lookup::{Found, StoredRecord};
use redeliver_kafka::reader::ReadError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::contents::{Contents, Read};
use super::decoder::Decoder;
use super::{Message, Work};
use crate::index::{self, Change, Pool, UndecodedLetter};
use crate::letter::{Letter, Undecoded, content_hash};
use crate::lookup_pool::LookupPool;
use crate::shared::SharedState;

/// Time between two rounds.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two rounds if a partition could not be read: each round waits for it.
const UNREADABLE_INTERVAL: Duration = Duration::from_secs(30);
/// Time between two rounds for schemas that the registry does not have.
const NO_SCHEMA_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of schemas in a round.
const SCHEMAS: usize = 100;
/// Maximum number of values that are read from Kafka at once, and their maximum size in bytes, unless a single one is larger.
const PAGE: u32 = 256;
const PAGE_BYTES: u64 = 8 << 20;
/// Maximum time for a schema, and for the values of a page.
const WAIT: Duration = Duration::from_secs(30);

/// The task.
pub(crate) struct PendingTask {
    pub(crate) pool: Pool,
    pub(crate) contents: Arc<Contents>,
    pub(crate) lookups: LookupPool,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) writer: SyncSender<Work>,
    pub(crate) stop: CancellationToken,
}

/// Why a round ended early.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("reading the index")]
    Index(#[from] index::ReadError),
    #[error("reading values from {topic}/{partition}")]
    Kafka {
        topic: Arc<str>,
        partition: i32,
        source: ReadError,
    },
    #[error("the broker does not know the records of {topic}/{partition}")]
    Unknown { topic: Arc<str>, partition: i32 },
}

/// A topic and a partition.
type Place = (Arc<str>, i32);

/// The partitions that could not be read in this round.
#[derive(Default)]
struct Unreadable {
    places: BTreeSet<Place>,
    /// Why the first one could not.
    problem: Option<Problem>,
}

/// Reads values by position.
trait FindRecords {
    /// See [`LookupPool::find`].
    fn find(&self, positions: Vec<Position>) -> impl Future<Output = Result<Vec<Found>, ReadError>> + Send;
}

impl FindRecords for LookupPool {
    async fn find(&self, positions: Vec<Position>) -> Result<Vec<Found>, ReadError> {
        LookupPool::find(self, positions).await
    }
}

/// Undecoded dead letters whose values are to be read, by partition and in the order of their offsets.
struct Unread(BTreeMap<Place, Vec<UndecodedLetter>>);

/// The schemas of a kind of undecoded values, a few in each round.
struct Schemas {
    is_pending: bool,
    /// The last one of the round before.
    last: Option<u32>,
}

impl PendingTask {
    /// Decodes until shutdown. What fails is repeated with the next round.
    pub(crate) async fn run(self) -> Result<(), Infallible> {
        if let Some(decoder) = self.contents.decoder() {
            tokio::select! {
                never = self.decode(decoder) => match never {},
                () = self.stop.cancelled() => {}
            }
        } else {
            self.stop.cancelled().await;
        }
        Ok(())
    }

    async fn decode(&self, decoder: &Decoder) -> Infallible {
        let [mut pending, mut without_schema] = [true, false].map(|is_pending| Schemas {
            is_pending,
            last: None,
        });
        let mut next_without_schema = Instant::now();
        let mut log_throttle = LogThrottle::default();
        loop {
            let mut unreadable = Unreadable::default();
            let mut result = self.round(decoder, &mut pending, &mut unreadable).await;
            if result.is_ok() && Instant::now() >= next_without_schema {
                result = self.round(decoder, &mut without_schema, &mut unreadable).await;
                next_without_schema = Instant::now() + NO_SCHEMA_INTERVAL;
            }
            match result.err().or(unreadable.problem) {
                None => log_throttle.reset(),
                Some(problem) => {
                    if log_throttle.should_log() {
                        let error = error_chain(&problem);
                        tracing::warn!(error, "cannot decode values for filters; trying again later");
                    }
                }
            }
            tokio::time::sleep(if unreadable.places.is_empty() {
                INTERVAL
            } else {
                UNREADABLE_INTERVAL
            })
            .await;
        }
    }

    async fn round(
        &self,
        decoder: &Decoder,
        schemas: &mut Schemas,
        unreadable: &mut Unreadable,
    ) -> Result<(), Problem> {
        for _ in 0..SCHEMAS {
            let (is_pending, last) = (schemas.is_pending, schemas.last);
            let next = self
                .pool
                .internal(move |connection| index::next_schema(connection, is_pending, last))
                .await?;
            schemas.last = next;
            let Some(id) = next else {
                break;
            };
            let known = if is_pending {
                Undecoded::Pending(id)
            } else {
                Undecoded::NoSchema(id)
            };
            let found = decoder.schema(id, Instant::now() + WAIT).await;
            if is_news(known, found.err()) {
                self.decode_schema(known, unreadable).await?;
            }
        }
        Ok(())
    }

    /// Decodes all values of this schema that can be read.
    async fn decode_schema(&self, known: Undecoded, unreadable: &mut Unreadable) -> Result<(), Problem> {
        let (id, is_pending) = match known {
            Undecoded::Pending(id) => (id, true),
            Undecoded::NoSchema(id) => (id, false),
        };
        let mut after = i64::MIN;
        loop {
            let build = self.shared.build();
            let mut page = self
                .pool
                .internal(move |connection| index::of_schema(connection, is_pending, id, after, PAGE))
                .await?;
            page.truncate(fitting(&page));
            let Some(last) = page.last() else {
                return Ok(());
            };
            after = last.sequence;
            let mut unread = Unread::new(page);
            while let Some(found) = unread.next(&self.lookups, unreadable).await {
                let work = Work {
                    build,
                    message: Message::Decoded(read(&self.contents, known, found).await),
                };
                let writer = self.writer.clone();
                // It blocks while the writer's queue is full. If the writer or the process ends, the values are decoded after the next start.
                let sending = tokio::task::spawn_blocking(move || writer.send(work));
                if !matches!(sending.await, Ok(Ok(()))) {
                    return Ok(());
                }
            }
        }
    }
}

impl Unread {
    fn new(page: Vec<UndecodedLetter>) -> Self {
        let mut by_partition = BTreeMap::<Place, Vec<UndecodedLetter>>::new();
        for letter in page {
            let Position { topic, partition, .. } = &letter.position;
            let place = (topic.clone(), *partition);
            by_partition.entry(place).or_default().push(letter);
        }
        for letters in by_partition.values_mut() {
            letters.sort_unstable_by_key(|letter| letter.position.offset);
        }
        Self(by_partition)
    }

    /// Reads some values of one partition: each with its record, `None` if Kafka has deleted it. Leaves out what is unreadable, and returns `None` at the end.
    async fn next(
        &mut self,
        lookups: &impl FindRecords,
        unreadable: &mut Unreadable,
    ) -> Option<Vec<(UndecodedLetter, Option<StoredRecord>)>> {
        while let Some((place, mut letters)) = self.0.pop_first() {
            if unreadable.places.contains(&place) {
                continue;
            }
            let positions = letters.iter().map(|letter| letter.position.clone()).collect();
            let (topic, partition) = place.clone();
            let (found, mut problem) = match lookups.find(positions).await {
                Ok(found) => (found, None),
                Err(source) => {
                    let problem = Problem::Kafka {
                        topic: topic.clone(),
                        partition,
                        source,
                    };
                    (Vec::new(), Some(problem))
                }
            };
            let count = found.len();
            let known: Vec<Option<StoredRecord>> = found.into_iter().map_while(known).collect();
            if known.len() < count {
                problem = Some(Problem::Unknown { topic, partition });
            }
            let rest = letters.split_off(known.len());
            // A lookup that was cancelled returns nothing.
            if known.is_empty() || problem.is_some() {
                unreadable.places.insert(place);
                unreadable.problem = unreadable.problem.take().or(problem);
            } else if !rest.is_empty() {
                self.0.insert(place, rest);
            }
            if !known.is_empty() {
                return Some(letters.into_iter().zip(known).collect());
            }
        }
        None
    }
}

/// What is known now of these dead letters.
async fn read(
    contents: &Contents,
    known: Undecoded,
    found: Vec<(UndecodedLetter, Option<StoredRecord>)>,
) -> Change {
    let (mut letters, mut framed, mut gone) = (Vec::<Letter>::new(), Vec::new(), Vec::new());
    for (letter, stored) in found {
        match stored {
            Some(stored) if content_hash(&stored.record) == letter.content => {
                let read = contents.read(&stored.record);
                let Read {
                    letter,
                    framed: value,
                } = read;
                framed.extend(value.map(|value| (letters.len(), value)));
                letters.push(letter);
            }
            // The topic was created again: the index forgets this dead letter.
            Some(_) => {}
            None => gone.push(letter.sequence),
        }
    }
    contents.decode(&mut letters, framed, WAIT).await;
    // The registry may be away again by now.
    letters.retain(|letter| letter.undecoded.is_none_or(|now| is_news(known, Some(now))));
    Change::Decoded { letters, gone }
}

/// The record at a position, or that there is none; `None` if that is not known.
fn known(found: Found) -> Option<Option<StoredRecord>> {
    match found {
        Found::Record(stored) => Some(Some(stored)),
        Found::Deleted => Some(None),
        Found::Unknown => None,
    }
}

/// How many of these dead letters are read at once.
fn fitting(page: &[UndecodedLetter]) -> usize {
    let mut bytes = 0_u64;
    let fits = page.iter().take_while(|letter| {
        bytes = bytes.saturating_add(letter.value_size);
        bytes <= PAGE_BYTES
    });
    fits.count().max(1)
}

/// Whether more is known of a schema than before. Whatever happens to one that the registry did not have, it makes no answer incomplete again.
fn is_news(known: Undecoded, now: Option<Undecoded>) -> bool {
    match (known, now) {
        (_, None) | (Undecoded::Pending(_), Some(Undecoded::NoSchema(_))) => true,
        (_, Some(_)) => false,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_core::{Headers, Record};

    use super::super::contents::tests::{NOBODY, contents};
    use super::*;

    fn letter(partition: i32, offset: i64, value_size: u64) -> UndecodedLetter {
        UndecodedLetter {
            sequence: i64::from(partition) * 100 + offset,
            position: Position {
                topic: "t-dlq".into(),
                partition,
                offset,
            },
            content: crate::letter::ContentHash::default(),
            value_size,
        }
    }

    fn stored(position: Position, value: Option<Bytes>) -> StoredRecord {
        StoredRecord {
            record: Record {
                position,
                timestamp: None,
                key: None,
                value,
                headers: Headers::default(),
                unreadable_headers: 0,
            },
            timestamp_type: None,
        }
    }

    /// Partition 1 cannot be read, the end of partition 2 is unknown, and a lookup finds two values at most.
    struct Broker;

    impl FindRecords for Broker {
        async fn find(&self, positions: Vec<Position>) -> Result<Vec<Found>, ReadError> {
            assert!(
                positions.is_sorted()
                    && positions
                        .iter()
                        .all(|position| position.partition == positions[0].partition)
            );
            if positions[0].partition == 1 {
                return Err(ReadError::Denied("t-dlq".to_owned()));
            }
            let found = positions
                .into_iter()
                .take(2)
                .map(|position| match position.offset {
                    0 => Found::Deleted,
                    9 if position.partition == 2 => Found::Unknown,
                    _ => Found::Record(stored(position, None)),
                });
            Ok(found.collect())
        }
    }

    #[tokio::test]
    async fn a_partition_that_cannot_be_read_does_not_hold_up_others() {
        let mut unreadable = Unreadable::default();
        let mut read = async |places: &[(i32, i64)]| {
            let letters = places
                .iter()
                .map(|(partition, offset)| letter(*partition, *offset, 1));
            let mut unread = Unread::new(letters.collect());
            let mut read = Vec::new();
            while let Some(found) = unread.next(&Broker, &mut unreadable).await {
                let of_step: Vec<_> = found
                    .into_iter()
                    .map(|(letter, stored)| {
                        let place = (letter.position.partition, letter.position.offset);
                        let stored = stored.map(|stored| stored.record.position);
                        assert!(stored.as_ref().is_none_or(|stored| *stored == letter.position));
                        (place.0, place.1, stored.is_some())
                    })
                    .collect();
                read.push(of_step);
            }
            read
        };
        let found = read(&[(2, 9), (1, 0), (0, 3), (0, 0), (3, 1), (0, 2), (2, 4)]).await;
        // What Kafka has deleted is known, and what a broker does not know is not.
        let expected = [
            vec![(0, 0, false), (0, 2, true)],
            vec![(0, 3, true)],
            vec![(2, 4, true)],
            vec![(3, 1, true)],
        ];
        assert_eq!(found, expected);
        // They are not asked again in this round.
        assert_eq!(read(&[(1, 1), (2, 5), (3, 2)]).await, [[(3, 2, true)]]);
        let problem = error_chain(&unreadable.problem.unwrap()).to_string();
        assert!(problem.starts_with("reading values from t-dlq/1"), "{problem}");
    }

    #[tokio::test]
    async fn a_cancelled_lookup_says_nothing_of_a_dead_letter() {
        struct Cancelled;
        impl FindRecords for Cancelled {
            async fn find(&self, _: Vec<Position>) -> Result<Vec<Found>, ReadError> {
                Ok(Vec::new())
            }
        }
        let mut unread = Unread::new(vec![letter(0, 0, 1)]);
        let found = unread.next(&Cancelled, &mut Unreadable::default()).await;
        assert!(found.is_none());
    }

    #[test]
    fn values_are_read_a_few_at_a_time_and_large_ones_alone() {
        for (sizes, expected) in [
            (&[1, 2, 3][..], 3),
            (&[PAGE_BYTES, 1], 1),
            (&[PAGE_BYTES - 1, 1, 1], 2),
            (&[u64::MAX, 1], 1),
            (&[1, u64::MAX], 1),
        ] {
            let page: Vec<_> = sizes.iter().map(|size| letter(0, 1, *size)).collect();
            assert_eq!(fitting(&page), expected, "{sizes:?}");
        }
    }

    #[tokio::test]
    async fn only_news_of_a_dead_letter_is_written() {
        let contents = contents(&["/a"], NOBODY);
        let record = stored(
            letter(0, 7, 1).position,
            Some(Bytes::from_static(b"\0\0\0\0\x07\x02a")),
        );
        let known = UndecodedLetter {
            content: content_hash(&record.record),
            ..letter(0, 7, 1)
        };
        // The registry had the schema a moment ago, and does not answer now. That makes no answer incomplete which was complete.
        for undecoded in [Undecoded::NoSchema(7), Undecoded::Pending(7)] {
            let found = vec![
                (known.clone(), Some(record.clone())),
                // Another record, and one that Kafka has deleted.
                (letter(0, 8, 1), Some(record.clone())),
                (letter(0, 9, 1), None),
            ];
            let Change::Decoded { letters, gone } = read(&contents, undecoded, found).await else {
                panic!("another change");
            };
            assert!(letters.is_empty(), "{letters:?}");
            assert_eq!(gone, [9]);
        }
    }

    #[test]
    fn values_are_read_again_if_more_is_known_of_their_schema() {
        let [pending, none] = [Undecoded::Pending(7), Undecoded::NoSchema(7)];
        for (known, now, expected) in [
            (pending, None, true),
            (pending, Some(none), true),
            (pending, Some(pending), false),
            (none, None, true),
            (none, Some(none), false),
            (none, Some(pending), false),
        ] {
            assert_eq!(is_news(known, now), expected, "{known:?} {now:?}");
        }
    }
}
