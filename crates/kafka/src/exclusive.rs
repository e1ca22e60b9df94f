//! Changes a small topic so that each change is decided with everything that was written before it, also by other processes.
//!
//! All writers use one transactional id. A change initialises a producer with it, reads the topic to its end, decides, and writes in one
//! transaction. A caller that knows the beginning of the topic reads only the rest, so that a change of a large topic takes no longer. The initialisation completes or aborts the transaction of the writer before, and fences that writer. So either
//! the change of another writer is committed before this one reads, or that writer is fenced and has to read again: between the read
//! and the commit of a change, nothing can be written. This is a compare-and-set on the topic.
//!
//! What is written to other topics, such as the audit topic, is in the same transaction.
//!
//! A writer that is fenced tries again after a random delay, because two writers that initialise in turn would fence each other
//! for ever.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use redeliver_core::Output;
use redeliver_kafka_ffi::KafkaClient;

use crate::client::KafkaSettings;
use crate::convert::native_headers;
use crate::reader::{self, ReadError};
use crate::recovery::{RecoveryAction, error_code, recovery_action};

/// After this time, the broker aborts the transaction of a writer that has vanished. Readers wait for it.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum delay before the second attempt. It doubles with each one.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(2);

/// Why a change has failed.
#[derive(Debug, thiserror::Error)]
pub enum ExclusiveError {
    /// Kafka did not answer in time, or refuses; nothing was written.
    #[error("{step}")]
    Unavailable {
        /// What failed last.
        step: &'static str,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The time ended before it was known whether the commit took effect.
    #[error("the outcome of the commit is unknown")]
    Unknown(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A writer of a topic with one partition.
#[derive(Clone)]
pub struct ExclusiveWriter {
    settings: KafkaSettings,
    transactional_id: String,
    topic: Arc<str>,
}

/// Why an attempt has failed.
struct Failed {
    step: &'static str,
    source: Box<dyn std::error::Error + Send + Sync>,
    /// Otherwise, another attempt may succeed.
    is_permanent: bool,
}

impl ExclusiveWriter {
    /// A writer. `transactional_id` must be the same for all writers of the topic, also for those with another prefix of ids: it is used as it is.
    #[must_use]
    pub fn new(settings: &KafkaSettings, transactional_id: &str, topic: Arc<str>) -> Self {
        Self {
            settings: KafkaSettings {
                transaction_timeout: TRANSACTION_TIMEOUT,
                ..settings.clone()
            },
            transactional_id: transactional_id.to_owned(),
            topic,
        }
    }

    /// Makes one change. Each attempt reads the topic to its end, within the given time, and decides with what it has read: the result, and what to
    /// write, if anything. If the outcome of a previous attempt is unknown, the topic may contain what this change has written already, so each attempt must read on from what was
    /// known before the first one. Blocks for `timeout` at most, and a little longer for the last attempt.
    ///
    /// # Errors
    /// [`ExclusiveError`] says whether something may have been written.
    pub fn write<S, T>(
        &self,
        timeout: Duration,
        read: impl Fn(Duration) -> Result<S, ReadError>,
        decide: impl Fn(S) -> (T, Vec<Output>),
    ) -> Result<T, ExclusiveError> {
        let deadline = Instant::now() + timeout;
        let (mut delay, mut is_unknown) = (FIRST_DELAY, false);
        loop {
            let attempt = self.attempt(deadline, &read, &decide, &mut is_unknown);
            let Failed {
                step,
                source,
                is_permanent,
            } = match attempt {
                Ok(result) => return Ok(result),
                Err(failed) => failed,
            };
            let pause = delay.mul_f64(fastrand::f64());
            if is_permanent || Instant::now() + pause >= deadline {
                return Err(if is_unknown {
                    ExclusiveError::Unknown(source)
                } else {
                    ExclusiveError::Unavailable { step, source }
                });
            }
            tracing::debug!(topic = &*self.topic, step, error = %source, "a change is decided again");
            std::thread::park_timeout(pause);
            delay = (delay * 2).min(MAX_DELAY);
        }
    }

    fn attempt<S, T>(
        &self,
        deadline: Instant,
        read: impl Fn(Duration) -> Result<S, ReadError>,
        decide: impl Fn(S) -> (T, Vec<Output>),
        is_unknown: &mut bool,
    ) -> Result<T, Failed> {
        let at = |step| move |error| Failed::at(step, error);
        let left = || {
            let left = deadline.saturating_duration_since(Instant::now());
            left.max(Duration::from_millis(1))
        };
        let mut config = self.settings.transactional_producer(&self.transactional_id);
        config.set("transactional.id", self.transactional_id.as_str());
        let producer: KafkaClient<ThreadedProducer<DefaultProducerContext>> =
            config.create().map_err(at("creating the producer"))?;
        let initialising = at("initialising the producer");
        producer.init_transactions(left()).map_err(initialising)?;
        let state = read(left()).map_err(Failed::reading)?;
        // If a previous attempt has committed, the records show it.
        *is_unknown = false;
        let (result, outputs) = decide(state);
        if outputs.is_empty() {
            return Ok(result);
        }
        // The client would wait for a missing topic until the time is up, and the outcome would be unknown.
        let mut others: BTreeSet<&Arc<str>> = outputs.iter().map(|output| &output.topic).collect();
        others.remove(&self.topic);
        for other in others {
            reader::partitions(&self.settings, other).map_err(Failed::reading)?;
        }
        // Otherwise the commit would time out, and its outcome be unknown.
        if Instant::now() >= deadline {
            return Err(Failed {
                step: "reading the topic",
                source: "timed out".into(),
                is_permanent: true,
            });
        }
        producer.begin_transaction().map_err(at("beginning"))?;
        for output in &outputs {
            let mut record = BaseRecord::<[u8], [u8]>::to(&output.topic);
            record.partition = output.partition;
            record.key = output.key.as_deref();
            record.payload = output.value.as_deref();
            if !output.headers.is_empty() {
                record.headers = Some(native_headers(&output.headers));
            }
            producer
                .send(record)
                .map_err(|(error, _)| Failed::at("producing", error))?;
        }
        producer.commit_transaction(left()).map_err(|error| {
            // If the broker refuses the records, the client does not even ask for the commit. After any other error, an earlier request of
            // the client may have taken effect.
            *is_unknown = !is_refused(&error);
            Failed::committing(error)
        })?;
        Ok(result)
    }
}

/// Whether the broker refuses this caller or these records, and would again.
fn is_refused(error: &KafkaError) -> bool {
    matches!(
        error_code(error),
        Some(
            RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::TransactionalIdAuthorizationFailed
                | RDKafkaErrorCode::ClusterAuthorizationFailed
                | RDKafkaErrorCode::MessageSizeTooLarge
                | RDKafkaErrorCode::MessageBatchTooLarge
                | RDKafkaErrorCode::InvalidRecord
        )
    )
}

impl Failed {
    fn at(step: &'static str, error: KafkaError) -> Self {
        Self {
            step,
            is_permanent: recovery_action(&error) == RecoveryAction::Misconfigured || is_refused(&error),
            source: error.into(),
        }
    }

    fn reading(error: ReadError) -> Self {
        Self {
            step: "reading the topic",
            is_permanent: match &error {
                ReadError::Missing(_) | ReadError::Denied(_) => true,
                ReadError::Kafka { source, .. } => is_refused(source),
                _ => false,
            },
            source: error.into(),
        }
    }

    /// Unless the commit is refused, its outcome is found out by reading.
    fn committing(error: KafkaError) -> Self {
        Self {
            step: "committing",
            is_permanent: is_refused(&error),
            source: error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denied_commit_is_permanent() {
        for (code, expected) in [
            (RDKafkaErrorCode::TopicAuthorizationFailed, true),
            (RDKafkaErrorCode::TransactionalIdAuthorizationFailed, true),
            (RDKafkaErrorCode::InvalidRecord, true),
            (RDKafkaErrorCode::OperationTimedOut, false),
            (RDKafkaErrorCode::ProducerFenced, false),
            (RDKafkaErrorCode::NotEnoughReplicas, false),
        ] {
            let failed = Failed::committing(KafkaError::MessageProduction(code));
            assert_eq!(failed.is_permanent, expected, "{code}");
        }
    }
}
