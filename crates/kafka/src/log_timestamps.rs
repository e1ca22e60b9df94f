//! The timestamps that written records have in the log.
//!
//! A producer that got no answer writes its batch again. A broker that has the batch already answers with the largest timestamp of the batch,
//! as brokers do for topics with `message.timestamp.type=LogAppendTime`, whatever the type of the topic is (`UnifiedLog.append` of Apache
//! Kafka). The client library then reports this timestamp for each record of the batch. So a report of this kind is only believed for a topic
//! whose log is known to have such timestamps, which the first one of them finds out by reading the record.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::Timestamp as KafkaTimestamp;
use redeliver_core::{Position, Timestamp, TimestampType};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::client::KafkaSettings;
use crate::lookup::{Lookup, StoredRecord};
use crate::reader::ReadError;

/// How long a record waits for its timestamp. Its producer waits as long.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A record whose timestamp is read, and who waits for it.
type Wanted = (
    Position,
    oneshot::Sender<Result<Option<StoredRecord>, Unreadable>>,
);

/// Why a record cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unreadable {
    /// The client may not.
    Denied,
    /// Kafka does not answer now, or the process is shutting down.
    Failed,
}

/// The timestamps that written records have in the log.
pub(crate) struct LogTimestamps {
    settings: KafkaSettings,
    /// Topics whose reported timestamps are believed: a record with a timestamp of the broker was read, or this client may not read any.
    believed: Mutex<HashSet<Arc<str>>>,
    /// A repeated batch can have thousands of records: the holder of the lookup reads all that are wanted.
    wanted: Mutex<Vec<Wanted>>,
    /// One lookup at a time. The client is kept for the next ones.
    lookup: Arc<tokio::sync::Mutex<Option<Lookup>>>,
}

impl LogTimestamps {
    pub(crate) fn new(settings: &KafkaSettings) -> Self {
        Self {
            settings: settings.clone(),
            believed: Mutex::default(),
            wanted: Mutex::default(),
            lookup: Arc::default(),
        }
    }

    /// The timestamp of the record at `position`, of which the client has reported a timestamp. `None` if the record has none, or if it cannot
    /// be read. A client that may not read the topic has no better knowledge than the report.
    pub(crate) async fn of(&self, position: &Position, reported: KafkaTimestamp) -> Option<Timestamp> {
        let reported = match reported {
            KafkaTimestamp::NotAvailable => return None,
            KafkaTimestamp::CreateTime(millis) => {
                self.believed().remove(&position.topic);
                return Some(Timestamp::from_millis(millis));
            }
            KafkaTimestamp::LogAppendTime(millis) => Timestamp::from_millis(millis),
        };
        if self.believed().contains(&position.topic) {
            return Some(reported);
        }
        let read = timeout(TIMEOUT, self.read(position)).await;
        match read.unwrap_or(Err(Unreadable::Failed)) {
            Ok(stored) => {
                let stored = stored?;
                if stored.timestamp_type == Some(TimestampType::LogAppendTime) {
                    self.believed().insert(position.topic.clone());
                }
                stored.record.timestamp
            }
            Err(Unreadable::Denied) => {
                self.believed().insert(position.topic.clone());
                Some(reported)
            }
            Err(Unreadable::Failed) => None,
        }
    }

    async fn read(&self, position: &Position) -> Result<Option<StoredRecord>, Unreadable> {
        let (sender, found) = oneshot::channel();
        self.wanted().push((position.clone(), sender));
        let mut lookup = self.lookup.clone().lock_owned().await;
        let wanted = std::mem::take(&mut *self.wanted());
        if !wanted.is_empty() {
            let settings = self.settings.clone();
            // It goes on if this caller gives up, for the others.
            let reading = tokio::task::spawn_blocking(move || answer(&settings, &mut lookup, wanted));
            // The answer is on its way, or the runtime is shutting down.
            drop(reading.await);
        }
        found.await.unwrap_or(Err(Unreadable::Failed))
    }

    fn wanted(&self) -> MutexGuard<'_, Vec<Wanted>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn believed(&self) -> MutexGuard<'_, HashSet<Arc<str>>> {
        self.believed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads records, and tells who waits for them.
fn answer(settings: &KafkaSettings, lookup: &mut Option<Lookup>, wanted: Vec<Wanted>) {
    let (positions, senders): (Vec<_>, Vec<_>) = wanted
        .into_iter()
        .filter(|(_, sender)| !sender.is_closed())
        .unzip();
    let mut read = || -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let mut client = match lookup.take() {
            Some(client) => client,
            None => Lookup::uncommitted(settings)?,
        };
        let found = client.get(&positions, TIMEOUT)?;
        *lookup = Some(client);
        Ok(found)
    };
    let found: Vec<_> = match read() {
        Ok(found) => found.into_iter().map(Ok).collect(),
        Err(error) => {
            let count = senders.len();
            tracing::debug!(count, %error, "cannot read the timestamps of written records");
            let unreadable = if error.is_denied() {
                Unreadable::Denied
            } else {
                Unreadable::Failed
            };
            senders.iter().map(|_| Err(unreadable)).collect()
        }
    };
    for (sender, found) in senders.into_iter().zip(found) {
        // The caller may be gone.
        let _ = sender.send(found);
    }
}
