//! Whether an index lacks records of the state topic. A job that is not in the index may be in one of them, for example
//! while the index is being rebuilt.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::{ReadError, TopicReader};

/// The maximum time to look for records that the index lacks.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The end of each partition of the state topic. Clones share the client.
#[derive(Clone)]
pub(crate) struct StateEnd(Arc<Shared>);

struct Shared {
    kafka: KafkaSettings,
    topic: Arc<str>,
    reader: TopicReader,
    /// By partition, a range of offsets without visible records: transaction markers and aborted records.
    empty: Mutex<HashMap<i32, (i64, i64)>>,
}

impl StateEnd {
    /// Blocks.
    pub(crate) fn new(kafka: &KafkaSettings, topic: Arc<str>) -> Result<Self, ReadError> {
        Ok(Self(Arc::new(Shared {
            reader: TopicReader::new(kafka, std::slice::from_ref(&topic))?,
            kafka: kafka.clone(),
            topic,
            empty: Mutex::default(),
        })))
    }

    /// The current end of a partition, including open transactions.
    pub(crate) async fn of(&self, partition: i32) -> Result<i64, ReadError> {
        let shared = self.0.clone();
        blocking(move || shared.reader.high_watermark(&shared.topic, partition)).await
    }

    /// Whether no record is known to be between the two offsets. Does not ask the broker.
    pub(crate) fn is_known_empty(&self, partition: i32, from: i64, to: i64) -> bool {
        let empty = self.0.empty.lock().unwrap_or_else(PoisonError::into_inner);
        let known = empty.get(&partition);
        from >= to || known.is_some_and(|(first, end)| *first <= from && to <= *end)
    }

    /// Whether no record is between the two offsets.
    pub(crate) async fn is_empty(&self, partition: i32, from: i64, to: i64) -> Result<bool, ReadError> {
        if self.is_known_empty(partition, from, to) {
            return Ok(true);
        }
        let shared = self.0.clone();
        blocking(move || {
            let Shared {
                kafka, topic, empty, ..
            } = &*shared;
            let mut reader = TopicReader::of_partition(kafka, topic, partition, Some(from))?;
            let mut is_empty = true;
            reader.read_while(TIMEOUT, |record| {
                is_empty &= record.position.offset >= to;
                ControlFlow::Break(())
            })?;
            if is_empty {
                let mut empty = empty.lock().unwrap_or_else(PoisonError::into_inner);
                empty.insert(partition, (from, to));
            }
            Ok(is_empty)
        })
        .await
    }
}

/// Runs blocking work on a thread of its own.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ReadError> + Send + 'static,
) -> Result<T, ReadError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
