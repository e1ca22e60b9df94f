//! An idempotent producer without transactions, for the job API, tools, demonstrations and tests. Lanes write in transactions.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use redeliver_core::{Output, Position, Timestamp};
use redeliver_kafka_ffi::KafkaClient;

use crate::client::KafkaSettings;
use crate::convert::native_headers;
use crate::credentials::Replaceable;
use crate::log_timestamps::LogTimestamps;
use crate::recovery::error_code;

/// An idempotent producer with Java's partitioning.
#[derive(Clone)]
pub struct Producer {
    client: Arc<Replaceable<KafkaClient<FutureProducer>>>,
    timestamps: Arc<LogTimestamps>,
}

/// How long a replaced client may take to deliver records whose callers no longer wait for them.
const CLOSING: Duration = Duration::from_secs(10);

/// A record that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The position of the record.
    pub position: Position,
    /// The record's timestamp in the log: that of the producer, or of the broker if the topic is configured so. `None` if the record has none, or
    /// if the client had to write it again, and it cannot be read now.
    pub timestamp: Option<Timestamp>,
}

/// Why a record was not written.
#[derive(Debug, thiserror::Error)]
pub enum ProduceError {
    /// The client cannot be created from its configuration.
    #[error("creating the producer")]
    Configuration(#[source] KafkaError),
    /// The broker refused the record or did not acknowledge it in time.
    #[error("writing to topic `{topic}`")]
    Delivery {
        /// The topic.
        topic: String,
        /// The cause.
        source: KafkaError,
    },
}

impl ProduceError {
    /// Whether the record was certainly not written. Otherwise, it may have been written, or may still be.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Configuration(_) => true,
            Self::Delivery { source, .. } => matches!(
                error_code(source),
                Some(
                    RDKafkaErrorCode::QueueFull
                        | RDKafkaErrorCode::UnknownTopic
                        | RDKafkaErrorCode::UnknownPartition
                        | RDKafkaErrorCode::TopicAuthorizationFailed
                        | RDKafkaErrorCode::ClusterAuthorizationFailed
                        | RDKafkaErrorCode::MessageSizeTooLarge
                        | RDKafkaErrorCode::InvalidRecord
                        | RDKafkaErrorCode::PolicyViolation
                )
            ),
        }
    }
}

impl Producer {
    /// Creates a producer without connecting to the broker.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings) -> Result<Self, ProduceError> {
        let config = settings.producer();
        // A producer drops what it has not delivered when it is dropped itself.
        let deliver = |client: &KafkaClient<FutureProducer>| {
            if let Err(error) = client.flush(CLOSING) {
                tracing::debug!(%error, "a replaced producer has not delivered all records");
            }
        };
        let client = Replaceable::with_closing(settings, "producer", move || config.create(), deliver)
            .map_err(ProduceError::Configuration)?;
        Ok(Self {
            client,
            timestamps: Arc::new(LogTimestamps::new(settings)),
        })
    }

    /// Writes one record and waits for the broker's acknowledgement.
    ///
    /// # Errors
    /// If the broker refuses the record or does not acknowledge it within the client's `message.timeout.ms`.
    pub async fn send(&self, output: &Output) -> Result<Written, ProduceError> {
        let mut record = FutureRecord::<[u8], [u8]>::to(&output.topic);
        record.partition = output.partition;
        record.key = output.key.as_deref();
        record.payload = output.value.as_deref();
        if !output.headers.is_empty() {
            record.headers = Some(native_headers(&output.headers));
        }
        // Replaced clients are dropped only after this.
        let client = self.client.get();
        let delivered = client.send(record, Duration::from_secs(30)).await;
        let delivery = delivered.map_err(|(source, _)| ProduceError::Delivery {
            topic: output.topic.to_string(),
            source,
        })?;
        let position = Position {
            topic: output.topic.clone(),
            partition: delivery.partition,
            offset: delivery.offset,
        };
        let timestamp = self.timestamps.of(&position, delivery.timestamp).await;
        Ok(Written { position, timestamp })
    }

    /// Waits until all records sent so far are acknowledged, except those that a replaced client still delivers.
    ///
    /// # Errors
    /// If that takes longer than `timeout`.
    pub fn flush(&self, timeout: Duration) -> Result<(), ProduceError> {
        self.client
            .get()
            .flush(timeout)
            .map_err(|source| ProduceError::Delivery {
                topic: "(all)".into(),
                source,
            })
    }
}
