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
use rdkafka::error::RDKafkaErrorCode;
use redeliver_core::{Position, Timestamp, TimestampType};

use crate::client::KafkaSettings;
use crate::lookup::{Lookup, StoredRecord};
use crate::reader::ReadError;

/// How long reading a record may take.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

/// The timestamps that written records have in the log.
pub(crate) struct LogTimestamps {
    settings: KafkaSettings,
    /// Topics whose reported timestamps are believed: a record with a timestamp of the broker was read, or this client may not read any.
    believed: Mutex<HashSet<Arc<str>>>,
    /// One lookup at a time. The client is kept for the next ones, since a repeated batch can have thousands of records.
    lookup: Arc<tokio::sync::Mutex<Option<Lookup>>>,
}

impl LogTimestamps {
    pub(crate) fn new(settings: &KafkaSettings) -> Self {
        Self {
            settings: settings.clone(),
            believed: Mutex::default(),
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
        match self.read(position).await {
            Ok(stored) => {
                let stored = stored?;
                if stored.timestamp_type == Some(TimestampType::LogAppendTime) {
                    self.believed().insert(position.topic.clone());
                }
                stored.record.timestamp
            }
            Err(error) if may_not_read(&error) => {
                self.believed().insert(position.topic.clone());
                Some(reported)
            }
            Err(error) => {
                tracing::debug!(%position, %error, "cannot read the timestamp of a written record");
                None
            }
        }
    }

    async fn read(&self, position: &Position) -> Result<Option<StoredRecord>, ReadError> {
        let mut lookup = self.lookup.clone().lock_owned().await;
        let settings = self.settings.clone();
        let wanted = position.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let client = match lookup.take() {
                Some(client) => client,
                None => Lookup::uncommitted(&settings)?,
            };
            let found = client.get(&[wanted], LOOKUP_TIMEOUT)?;
            *lookup = Some(client);
            Ok(found.into_iter().flatten().next())
        });
        // It ends without a result only if the runtime is shutting down.
        reading.await.unwrap_or(Ok(None))
    }

    fn believed(&self) -> MutexGuard<'_, HashSet<Arc<str>>> {
        self.believed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn may_not_read(error: &ReadError) -> bool {
    match error {
        ReadError::Denied(_) => true,
        ReadError::Kafka { source, .. } => {
            source.rdkafka_error_code() == Some(RDKafkaErrorCode::TopicAuthorizationFailed)
        }
        _ => false,
    }
}
