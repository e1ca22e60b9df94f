//! How to recover from an error of a transactional client.

use rdkafka::error::{KafkaError, RDKafkaErrorCode};

/// What to do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RecoveryAction {
    /// Repeat the same call.
    Retry,
    /// Abort the transaction. Its content can be written again.
    Abort,
    /// The producer is unusable, or a request to the broker is unanswered and may still take effect. Replace the producer with
    /// a new one with the same transactional id, whose initialisation resolves the transaction and fences late requests.
    Rebuild,
    /// Another process uses this transactional id or member name. Recover as with [`RecoveryAction::Rebuild`]; if it
    /// happens repeatedly, two processes have the same `instance`.
    Fenced,
    /// A permanent error: the client cannot be created from this configuration.
    Misconfigured,
}

/// Classifies an error of a transactional call, a send, a flush, or the creation of a client.
#[must_use]
pub fn recovery_action(error: &KafkaError) -> RecoveryAction {
    match error {
        KafkaError::ClientConfig(..) | KafkaError::ClientCreation(_) | KafkaError::Nul(_) => {
            RecoveryAction::Misconfigured
        }
        KafkaError::Transaction(error) => {
            // The member of the group is outdated: a rebalance is in progress, or another process has the member's name. The
            // consumer reports the latter as a fatal error.
            if error.code() == RDKafkaErrorCode::FencedInstanceId && error.txn_requires_abort() {
                RecoveryAction::Abort
            } else if is_fenced(error.code()) {
                RecoveryAction::Fenced
            } else if error.is_fatal() {
                RecoveryAction::Rebuild
            } else if error.txn_requires_abort() && is_unanswered(error.code()) {
                // A late request with the same epoch could join the next transaction of the same producer.
                RecoveryAction::Rebuild
            } else if error.txn_requires_abort() {
                RecoveryAction::Abort
            } else if error.is_retriable() {
                RecoveryAction::Retry
            } else {
                // Unclassified errors leave the outcome of the transaction unknown.
                RecoveryAction::Rebuild
            }
        }
        // `commit_transaction` flushes first. If the flush times out, it has not sent a commit request yet.
        KafkaError::Flush(_) => RecoveryAction::Retry,
        KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull) => RecoveryAction::Retry,
        KafkaError::MessageProduction(code) if is_fenced(*code) => RecoveryAction::Fenced,
        KafkaError::MessageProduction(RDKafkaErrorCode::Fatal | RDKafkaErrorCode::State) => {
            RecoveryAction::Rebuild
        }
        // The broker may still write the record.
        KafkaError::MessageProduction(code) if is_unanswered(*code) => RecoveryAction::Rebuild,
        // The broker has not begun the transaction, and may still do so.
        KafkaError::MessageProduction(RDKafkaErrorCode::ConcurrentTransactions) => RecoveryAction::Rebuild,
        // A record was not delivered, so the transaction must not be committed.
        KafkaError::MessageProduction(_) => RecoveryAction::Abort,
        KafkaError::MessageConsumptionFatal(code) if is_fenced(*code) => RecoveryAction::Fenced,
        _ => RecoveryAction::Rebuild,
    }
}

/// The code of an error, if it has one.
#[must_use]
#[expect(
    clippy::disallowed_methods,
    reason = "the only place that adds the codes of admin operations"
)]
pub fn error_code(error: &KafkaError) -> Option<RDKafkaErrorCode> {
    match error {
        KafkaError::AdminOp(code) => Some(*code),
        _ => error.rdkafka_error_code(),
    }
}

/// Whether the broker does not know the kind of a request, so that no client gets an answer. A broker that refuses or does not answer may know it.
pub(crate) fn is_unsupported(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::UnsupportedFeature | RDKafkaErrorCode::UnsupportedVersion
    )
}

/// Why a topic refuses a record permanently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The record is too large.
    Size,
    /// The record is invalid for the topic, for example without a key in a compacted topic.
    Content,
}

/// The reason if an error of a send or a delivery was caused by the record itself, or by another one of its batch.
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

/// Whether the client does not know the topic or partition. Its metadata may be outdated.
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

/// Whether the broker denies a request, or the name of a topic is invalid. Only an operator can change that.
pub(crate) fn is_denied(error: &KafkaError) -> bool {
    error_code(error).is_some_and(|code| {
        matches!(
            code,
            RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::GroupAuthorizationFailed
                | RDKafkaErrorCode::ClusterAuthorizationFailed
                | RDKafkaErrorCode::TransactionalIdAuthorizationFailed
                | RDKafkaErrorCode::InvalidTopic
        )
    })
}

/// Whether a delivery failed only because another one did. The client purges what it has not sent. The next transaction may
/// fail like this too, since the broker lacks the sequence numbers of the records that it refused.
pub(crate) fn is_secondary(error: &KafkaError) -> bool {
    matches!(
        error,
        KafkaError::MessageProduction(
            RDKafkaErrorCode::PurgeQueue
                | RDKafkaErrorCode::PurgeInflight
                | RDKafkaErrorCode::OutOfOrderSequenceNumber
        )
    )
}

/// Whether a request remained unanswered for too long.
pub(crate) fn is_timeout(error: &KafkaError) -> bool {
    match error {
        KafkaError::Flush(_) => true,
        _ => error_code(error).is_some_and(is_unanswered),
    }
}

/// Whether the broker has not answered, so that the request may still take effect.
fn is_unanswered(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::OperationTimedOut
            | RDKafkaErrorCode::TimedOutQueue
            | RDKafkaErrorCode::MessageTimedOut
            | RDKafkaErrorCode::RequestTimedOut
            | RDKafkaErrorCode::BrokerTransportFailure
            | RDKafkaErrorCode::NetworkException
            | RDKafkaErrorCode::AllBrokersDown
    )
}

/// Whether the broker refused offsets because the member of the group or its generation is no longer current.
pub(crate) fn is_outdated_member(error: &KafkaError) -> bool {
    error_code(error).is_some_and(|code| {
        matches!(
            code,
            RDKafkaErrorCode::IllegalGeneration
                | RDKafkaErrorCode::UnknownMemberId
                | RDKafkaErrorCode::FencedInstanceId
        )
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_not_unsupported() {
        for (code, expected) in [
            (RDKafkaErrorCode::UnsupportedFeature, true),
            (RDKafkaErrorCode::UnsupportedVersion, true),
            (RDKafkaErrorCode::TopicAuthorizationFailed, false),
            (RDKafkaErrorCode::ClusterAuthorizationFailed, false),
            (RDKafkaErrorCode::OperationTimedOut, false),
            (RDKafkaErrorCode::InvalidRequest, false),
        ] {
            assert_eq!(is_unsupported(code), expected, "{code:?}");
        }
    }

    #[test]
    fn admin_error_codes_are_known() {
        let denied = RDKafkaErrorCode::TopicAuthorizationFailed;
        for error in [KafkaError::AdminOp(denied), KafkaError::MetadataFetch(denied)] {
            assert!(is_denied(&error), "{error}");
        }
        assert!(is_timeout(&KafkaError::AdminOp(
            RDKafkaErrorCode::OperationTimedOut
        )));
        assert_eq!(error_code(&KafkaError::Canceled), None);
    }
}
