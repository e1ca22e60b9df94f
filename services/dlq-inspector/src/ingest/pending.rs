//! Decodes the values that could not be decoded when they were read: reads them from Kafka again once there is a schema, and sends their fields to the
//! writer.
//!
//! The registry's client remembers an outage, so that asking it every second costs nothing. Schemas that the registry does not have are asked for
//! seldom, and a few at a time: other formats than that of the registry have values that begin with a zero byte, too.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_kafka::lookup::StoredRecord;
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
    #[error("reading values from Kafka")]
    Kafka(#[from] ReadError),
}

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
            let mut result = self.round(decoder, &mut pending).await;
            if result.is_ok() && Instant::now() >= next_without_schema {
                result = self.round(decoder, &mut without_schema).await;
                next_without_schema = Instant::now() + NO_SCHEMA_INTERVAL;
            }
            match result {
                Ok(()) => log_throttle.reset(),
                Err(problem) => {
                    if log_throttle.should_log() {
                        let error = error_chain(&problem);
                        tracing::warn!(error, "cannot decode values for filters; trying again later");
                    }
                }
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    async fn round(&self, decoder: &Decoder, schemas: &mut Schemas) -> Result<(), Problem> {
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
                self.decode_schema(id, is_pending).await?;
            }
        }
        Ok(())
    }

    /// Decodes all values of this schema.
    async fn decode_schema(&self, id: u32, is_pending: bool) -> Result<(), Problem> {
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
            let positions = page.iter().map(|letter| letter.position.clone()).collect();
            let records = self.lookups.get(positions).await?;
            let change = self.read(page, records).await;
            let work = Work {
                build,
                message: Message::Decoded(change),
            };
            let writer = self.writer.clone();
            // It blocks while the writer's queue is full. If the writer or the process ends, the values are decoded after the next start.
            let sending = tokio::task::spawn_blocking(move || writer.send(work));
            if !matches!(sending.await, Ok(Ok(()))) {
                return Ok(());
            }
        }
    }

    /// What is known now of these dead letters.
    async fn read(&self, page: Vec<UndecodedLetter>, records: Vec<Option<StoredRecord>>) -> Change {
        let (mut letters, mut framed, mut gone) = (Vec::<Letter>::new(), Vec::new(), Vec::new());
        for (known, stored) in page.into_iter().zip(records) {
            match stored {
                Some(stored) if content_hash(&stored.record) == known.content => {
                    let read = self.contents.read(&stored.record);
                    let Read {
                        letter,
                        framed: value,
                    } = read;
                    framed.extend(value.map(|value| (letters.len(), value)));
                    letters.push(letter);
                }
                // The topic was created again: the index forgets this dead letter.
                Some(_) => {}
                None => gone.push(known.sequence),
            }
        }
        self.contents.decode(&mut letters, framed, WAIT).await;
        Change::Decoded { letters, gone }
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
    use super::*;

    #[test]
    fn values_are_read_a_few_at_a_time_and_large_ones_alone() {
        let letter = |value_size| UndecodedLetter {
            sequence: 1,
            position: redeliver_core::Position {
                topic: "t-dlq".into(),
                partition: 0,
                offset: 0,
            },
            content: crate::letter::ContentHash::default(),
            value_size,
        };
        for (sizes, expected) in [
            (&[1, 2, 3][..], 3),
            (&[PAGE_BYTES, 1], 1),
            (&[PAGE_BYTES - 1, 1, 1], 2),
            (&[u64::MAX, 1], 1),
            (&[1, u64::MAX], 1),
        ] {
            let page: Vec<_> = sizes.iter().copied().map(letter).collect();
            assert_eq!(fitting(&page), expected, "{sizes:?}");
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
