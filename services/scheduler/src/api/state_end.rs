//! Whether an index lacks records of the state topic. A job that is not in the index may be in one of them, for example
//! while the index is being rebuilt.
//!
//! Any number of requests can ask at the same time. At most one request for the end of each partition is in progress, and at most one
//! partition is read, with a client of its own that stays. A question goes on when its caller does not wait any longer, so callers
//! that give up cause no further ones.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::{ReadError, TopicClient, TopicReader};
use tokio::sync::Mutex as AsyncMutex;

/// The maximum time to look for records that the index lacks, and to wait for the right to do so.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How long it is not looked again after records were found, or the partition could not be read.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// An error of a request to Kafka whose answer several callers get.
pub(crate) type SharedError = Arc<ReadError>;

/// The end of each partition of the state topic. Clones share the clients.
#[derive(Clone)]
pub(crate) struct StateEnd(Arc<Shared>);

struct Shared {
    kafka: KafkaSettings,
    topic: Arc<str>,
    topics: TopicClient,
    /// The last request for the end, by partition.
    requests: Mutex<HashMap<i32, Arc<AsyncMutex<Option<EndRequest>>>>>,
    /// The last look for records, by partition.
    looks: Mutex<HashMap<i32, Look>>,
    /// Reads one partition at a time. `None` until the first time, and after an error.
    records: Arc<AsyncMutex<Option<TopicReader>>>,
}

struct EndRequest {
    began: Instant,
    end: Result<i64, SharedError>,
}

/// What is known of the records of a partition from an offset on.
#[derive(Clone, Copy, Debug)]
struct Look {
    from: i64,
    /// No visible record is before this offset: only transaction markers and aborted records.
    empty_to: i64,
    ended: Instant,
}

impl Look {
    /// Whether no record is between the two offsets. `None` if that is unknown.
    fn is_empty(&self, from: i64, to: i64, now: Instant) -> Option<bool> {
        if self.from <= from && to <= self.empty_to {
            return Some(true);
        }
        // Records that were found from here on still exist.
        (self.from == from && now.saturating_duration_since(self.ended) < LOOK_AGAIN).then_some(false)
    }
}

impl StateEnd {
    /// Blocks.
    pub(crate) fn new(kafka: &KafkaSettings, topic: Arc<str>) -> Result<Self, ReadError> {
        Ok(Self(Arc::new(Shared {
            topics: TopicClient::new(kafka)?,
            kafka: kafka.clone(),
            topic,
            requests: Mutex::default(),
            looks: Mutex::default(),
            records: Arc::default(),
        })))
    }

    /// The end of a partition at a time after this call, including open transactions.
    pub(crate) async fn of(&self, partition: i32) -> Result<i64, SharedError> {
        let asked = Instant::now();
        let mut request = self.0.request(partition).lock_owned().await;
        if let Some(request) = request.as_ref().filter(|request| request.began >= asked) {
            return request.end.clone();
        }
        let shared = self.0.clone();
        blocking(move || {
            let began = Instant::now();
            let watermarks = shared.topics.watermarks(&shared.topic, partition);
            let end = watermarks.map(|(_, end)| end).map_err(Arc::new);
            *request = Some(EndRequest {
                began,
                end: end.clone(),
            });
            end
        })
        .await
    }

    /// Whether no record is known to be between the two offsets. Does not ask the broker.
    pub(crate) fn is_known_empty(&self, partition: i32, from: i64, to: i64) -> bool {
        self.0.known(partition, from, to) == Some(true)
    }

    /// Whether no record is between the two offsets. `false` if it cannot be told soon.
    pub(crate) async fn is_empty(&self, partition: i32, from: i64, to: i64) -> Result<bool, SharedError> {
        if let Some(known) = self.0.known(partition, from, to) {
            return Ok(known);
        }
        let Ok(mut reader) = tokio::time::timeout(TIMEOUT, self.0.records.clone().lock_owned()).await else {
            return Ok(false);
        };
        // Another caller may have looked meanwhile.
        if let Some(known) = self.0.known(partition, from, to) {
            return Ok(known);
        }
        let shared = self.0.clone();
        blocking(move || shared.look(&mut reader, partition, from, to).map_err(Arc::new)).await
    }
}

impl Shared {
    fn request(&self, partition: i32) -> Arc<AsyncMutex<Option<EndRequest>>> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.entry(partition).or_default().clone()
    }

    fn known(&self, partition: i32, from: i64, to: i64) -> Option<bool> {
        if from >= to {
            return Some(true);
        }
        let looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        looks.get(&partition)?.is_empty(from, to, Instant::now())
    }

    /// Reads a partition up to its first record after an offset.
    fn look(
        &self,
        reader: &mut Option<TopicReader>,
        partition: i32,
        from: i64,
        to: i64,
    ) -> Result<bool, ReadError> {
        let first = self.first_record(reader, partition, from);
        let empty_to = match &first {
            Ok(first) => first.unwrap_or(to),
            Err(_) => {
                *reader = None;
                from
            }
        };
        let look = Look {
            from,
            empty_to,
            ended: Instant::now(),
        };
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        looks.insert(partition, look);
        first.map(|_| to <= empty_to)
    }

    /// The offset of the first record from an offset on; `None` if there is none.
    fn first_record(
        &self,
        reader: &mut Option<TopicReader>,
        partition: i32,
        from: i64,
    ) -> Result<Option<i64>, ReadError> {
        let reader = match reader {
            Some(reader) => {
                reader.seek(&self.topic, partition, from);
                reader
            }
            None => reader.insert(TopicReader::of_partition(
                &self.kafka,
                &self.topic,
                partition,
                Some(from),
            )?),
        };
        let mut first = None;
        reader.read_while(TIMEOUT, |record| {
            first = Some(record.position.offset);
            ControlFlow::Break(())
        })?;
        Ok(first)
    }
}

/// Runs blocking work on a thread of its own.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_ranges_stay_empty() {
        let ended = Instant::now();
        let look = Look {
            from: 10,
            empty_to: 15,
            ended,
        };
        let later = ended + LOOK_AGAIN;
        for (from, to, at_once, known_later) in [
            (10, 15, Some(true), Some(true)),
            (12, 14, Some(true), Some(true)),
            (10, 16, Some(false), None),
            (9, 15, None, None),
            (12, 16, None, None),
        ] {
            assert_eq!(look.is_empty(from, to, ended), at_once, "{from} {to}");
            assert_eq!(look.is_empty(from, to, later), known_later, "{from} {to}");
        }
    }
}
