//! Why topics could not be read, and which errors end by themselves.

use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use crate::recovery::error_code;

/// Why topics could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A topic is missing.
    #[error("topic `{0}` does not exist")]
    Missing(String),
    /// Kafka does not let this client see a topic, so that it is unknown whether it exists.
    #[error("Kafka does not let this client see the topic `{0}` (Describe)")]
    Denied(String),
    /// A partition has no leader, or its leader does not answer.
    #[error("{topic}/{partition} has no leader, or its leader does not answer")]
    NoLeader {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
    },
    /// A topic was deleted and created again while it was read.
    #[error("topic `{0}` was deleted and created again")]
    Recreated(String),
    /// The broker or the client returned an error.
    #[error("{step}")]
    Kafka {
        /// The operation that failed.
        step: &'static str,
        /// The cause.
        source: KafkaError,
    },
    /// The metadata of a committed offset is not text.
    #[error("the metadata of the committed offset of {topic}/{partition} is not UTF-8")]
    Metadata {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
    },
    /// The timeout passed before the end of a partition was reached.
    #[error("timed out before reaching {topic}/{partition}/{end}")]
    Late {
        /// The topic.
        topic: String,
        /// The partition.
        partition: i32,
        /// The end offset to reach.
        end: i64,
    },
}

impl ReadError {
    /// Whether Kafka does not let this client see or read the topic.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        match self {
            Self::Denied(_) => true,
            Self::Kafka { source, .. } => {
                error_code(source) == Some(RDKafkaErrorCode::TopicAuthorizationFailed)
            }
            Self::Missing(_)
            | Self::NoLeader { .. }
            | Self::Recreated(_)
            | Self::Metadata { .. }
            | Self::Late { .. } => false,
        }
    }
}

pub(crate) fn kafka(step: &'static str) -> impl Fn(KafkaError) -> ReadError {
    move |source| ReadError::Kafka { step, source }
}

/// As [`kafka`], for requests of administration.
pub(crate) fn admin(step: &'static str) -> impl Fn(RDKafkaErrorCode) -> ReadError {
    move |code| kafka(step)(KafkaError::AdminOp(code))
}

/// Whether the broker does not know the topic or partition. One that has just started may not know it yet.
pub(crate) fn is_unknown(error: &KafkaError) -> bool {
    matches!(
        error_code(error),
        Some(
            RDKafkaErrorCode::UnknownPartition
                | RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::UnknownTopicOrPartition
        )
    )
}

/// Whether the client recovers by itself.
pub(super) fn is_transient(error: &KafkaError) -> bool {
    matches!(
        error_code(error),
        Some(
            RDKafkaErrorCode::AllBrokersDown
                | RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::OperationTimedOut
                | RDKafkaErrorCode::RequestTimedOut
                | RDKafkaErrorCode::NotLeaderForPartition
                | RDKafkaErrorCode::LeaderNotAvailable
                | RDKafkaErrorCode::ReplicaNotAvailable
                | RDKafkaErrorCode::KafkaStorageError
                // The client and a broker do not know of the same change of the leader yet.
                | RDKafkaErrorCode::FencedLeaderEpoch
                | RDKafkaErrorCode::UnknownLeaderEpoch
                // A new leader does not know the end yet.
                | RDKafkaErrorCode::OffsetNotAvailable
                | RDKafkaErrorCode::DestroyBroker
                | RDKafkaErrorCode::Resolve
        )
    )
}
