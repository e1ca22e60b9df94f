//! Which error of a transactional client calls for which step. The one place that decides it.

use rdkafka::error::{KafkaError, RDKafkaErrorCode};

/// What to do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecoveryAction {
    /// Make the same call again.
    Retry,
    /// Abort the transaction and start again from the committed offsets.
    Abort,
    /// The producer is unusable, or what became of its transaction is unknown: replace it by a new one of
    /// the same transactional id, whose start resolves the old transaction, then start again from the
    /// committed offsets.
    Rebuild,
    /// Another process has taken over this transactional id or member name. As [`RecoveryAction::Rebuild`], but
    /// when it goes on, two processes share one `instance`.
    Fenced,
    /// Nothing that waiting could mend: the client cannot be made from this configuration.
    Misconfigured,
}

/// The remedy for an error of a transactional call, a send, a flush, or the making of a client.
#[must_use]
pub fn remedy(error: &KafkaError) -> RecoveryAction {
    match error {
        KafkaError::ClientConfig(..) | KafkaError::ClientCreation(_) | KafkaError::Nul(_) => {
            RecoveryAction::Misconfigured
        }
        KafkaError::Transaction(error) => {
            if is_fenced(error.code()) {
                RecoveryAction::Fenced
            } else if error.is_fatal() {
                RecoveryAction::Rebuild
            } else if error.txn_requires_abort() {
                RecoveryAction::Abort
            } else if error.is_retriable() {
                RecoveryAction::Retry
            } else {
                RecoveryAction::Rebuild
            }
        }
        // `commit_transaction` flushes first and can return this before it has asked for anything.
        KafkaError::Flush(_) => RecoveryAction::Retry,
        KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull) => RecoveryAction::Retry,
        KafkaError::MessageProduction(code) if is_fenced(*code) => RecoveryAction::Fenced,
        KafkaError::MessageProduction(RDKafkaErrorCode::Fatal | RDKafkaErrorCode::State) => {
            RecoveryAction::Rebuild
        }
        KafkaError::MessageProduction(_) => RecoveryAction::Abort,
        KafkaError::MessageConsumptionFatal(code) if is_fenced(*code) => RecoveryAction::Fenced,
        _ => RecoveryAction::Rebuild,
    }
}

/// Why a topic does not take a record, whenever and with whatever rights it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is too large.
    Size,
    /// It is not as the topic's records must be, such as one without a key in a compacted topic.
    Content,
}

/// Whether an error of a send or of a delivery is about the record itself, or about the batch it was in.
#[must_use]
pub fn refusal(error: &KafkaError) -> Option<Refusal> {
    match error {
        KafkaError::MessageProduction(
            RDKafkaErrorCode::MessageSizeTooLarge
            | RDKafkaErrorCode::MessageBatchTooLarge
            | RDKafkaErrorCode::InvalidMessageSize,
        ) => Some(Refusal::Size),
        KafkaError::MessageProduction(RDKafkaErrorCode::InvalidRecord) => Some(Refusal::Content),
        _ => None,
    }
}

/// Whether the client knows of no such topic, or partition of it. What it knows may be old.
pub(crate) fn is_unknown_topic(error: &KafkaError) -> bool {
    matches!(
        error,
        KafkaError::MessageProduction(
            RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::UnknownPartition
                | RDKafkaErrorCode::UnknownTopicOrPartition
        )
    )
}

/// Whether a delivery failed only because another one did: the client throws away what it has not sent, and the next
/// transaction fails like this once more, since the broker misses the sequence numbers of what it refused.
pub(crate) fn is_aftermath(error: &KafkaError) -> bool {
    matches!(
        error,
        KafkaError::MessageProduction(
            RDKafkaErrorCode::PurgeQueue
                | RDKafkaErrorCode::PurgeInflight
                | RDKafkaErrorCode::OutOfOrderSequenceNumber
        )
    )
}

fn is_fenced(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::Fenced
            | RDKafkaErrorCode::ProducerFenced
            | RDKafkaErrorCode::InvalidProducerEpoch
            | RDKafkaErrorCode::FencedInstanceId
    )
}
