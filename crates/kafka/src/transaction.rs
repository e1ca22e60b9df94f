//! Exactly-once writes: outputs and consumed offsets in one transaction.
//!
//! [`Transactions`] owns a transactional producer. Unless a commit succeeds, it aborts the transaction, or replaces the
//! producer with one with the same transactional id, whose initialisation makes the broker complete or abort the old
//! transaction. If a commit was requested, only the committed positions then show the outcome.
//!
//! A transaction that writes to a topic that was deleted, has no leader, or does not accept records would block until it times out.
//! So while it waits for deliveries, it asks the [`TopicWatch`], and looks for topics whose records are not delivered while other
//! records are. It gives up, and the watch reports the topic as unavailable.
//!
//! The broker resolves a transaction by writing to each of its partitions. Until it can, it refuses the transactional id. So after a
//! stall the producer is initialised again, and as long as that does not succeed, the topic counts as unwritable, and
//! `Alternating` uses other ids. A committed transaction may be unresolved, too: the client then repeats the first request of the next one
//! until it times out. So if that takes long while something is known to be unavailable, it is given up, and another id is used.
//!
//! A record that was written just before its partition lost too many replicas gets no answer, and a broker answers requests of a connection in their
//! order. So nothing is delivered then, and nothing shows which topic is the cause. If that takes long while a topic lacks replicas, the transaction
//! is given up in the same way: another producer has new connections, and the broker refuses the record at once.

mod alternating;
mod deliveries;
mod offset_sender;
mod pace;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::ConsumerGroupMetadata;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseRecord, Producer as _, ThreadedProducer};
use redeliver_core::{Failure, Output, TRACE_TARGET, mutant};
use redeliver_kafka_ffi::KafkaClient;
use tracing::field::Empty;
use tracing::info_span;

use crate::client::ClientSettings;
use crate::convert::native_headers;
use crate::fault;
use crate::processor::{FollowUp, Refused};
use crate::recovery::{
    RecoveryAction, Refusal, error_code, is_denied, is_outdated_member, is_secondary, is_timeout,
    is_unknown_topic, recovery_action, refusal,
};
use crate::topic_watch::{Stall, TopicState, TopicWatch};
pub(crate) use alternating::Alternating;
use deliveries::Deliveries;
use offset_sender::OffsetSender;
use pace::{InFlight, Pace};

/// Timeout of one blocking call of the client. The deadline of the transaction is checked between calls.
const CALL: Duration = Duration::from_secs(2);
/// How long the first request of a transaction takes before the producer's last transaction counts as unresolved, at first. Usually, the broker resolves one
/// in less than a second.
const PATIENCE: Duration = Duration::from_secs(2);
/// How many transactions may fail because of an earlier failed delivery.
const MAX_SECONDARY_FAILURES: u32 = 3;
const RETRY_DELAY: Duration = Duration::from_millis(5);
/// Timeout of finding out whether a topic exists that the client does not know.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(3);
/// How often a transaction is repeated because the client did not know an existing topic.
const MAX_REFRESHES: u32 = 3;

/// A transactional producer that is replaced when it becomes unusable.
pub struct Transactions {
    config: ClientSettings,
    id: String,
    timeout: Duration,
    connection: Option<Connection>,
    initialised: bool,
    changelog: Option<Arc<str>>,
    watch: Option<TopicWatch>,
    /// The topics that have stalled the last transaction, until it is resolved.
    stalls: Vec<Stall>,
    /// Whether the broker resolves an earlier transaction, so that this producer cannot be used before.
    is_unresolved: bool,
    /// Whether that is to be expected.
    is_wary: bool,
    /// See [`PATIENCE`]. Doubled when it is over, in case the cluster is only slow.
    patience: Duration,
    pace: Pace,
    /// Outputs passed to the producer in the current transaction.
    sent: usize,
    /// What the follow-up of the current transaction writes.
    follow_ups: Vec<Output>,
    /// 0 if no delivery has failed since the last commit, otherwise 1 plus the number of failures that it caused.
    secondary_failures: u32,
    changelog_ends: Vec<(i32, i64)>,
}

struct Connection {
    producer: KafkaClient<ThreadedProducer<Deliveries>>,
    offsets: OffsetSender,
}

/// The error of the client, or of the operating system.
pub type ClientError = Box<dyn std::error::Error + Send + Sync>;

/// A transaction that has not succeeded.
#[derive(Debug, thiserror::Error)]
#[error("transaction of `{id}` failed while {step}{}", topic_suffix(topic.as_deref()))]
pub struct TransactionError {
    /// What to do before the next transaction; [`Transactions::recover`] does it.
    pub action: RecoveryAction,
    /// What became of the transaction.
    pub kind: FailureKind,
    id: String,
    step: &'static str,
    topic: Option<Arc<str>>,
    source: ClientError,
}

/// What became of a failed transaction. Unless its outcome is unknown, it has no effect once [`Transactions::recover`]
/// succeeds: the same outputs and offsets can be written again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// It was aborted because topics refuse these outputs.
    Refused(Vec<Refused>),
    /// It is aborted because topics of outputs are missing or cannot be written. [`TopicWatch::presence`] reports these topics as
    /// unavailable.
    Unavailable,
    /// It was aborted because this process may not write to the topics of these outputs; without outputs, because it lacks another permission.
    Denied(Vec<Refused>),
    /// It took too long and is aborted.
    TimedOut,
    /// It is aborted, for another reason.
    Aborted,
    /// It was about to be committed. Only the committed positions show the outcome, after [`Transactions::recover`].
    Unknown,
}

fn topic_suffix(topic: Option<&str>) -> String {
    topic.map_or_else(String::new, |topic| format!(" to topic `{topic}`"))
}

/// The error of one attempt to write the batch.
struct AttemptError {
    step: &'static str,
    error: KafkaError,
    /// The index of the output that failed, and the records of its topic that were in flight together with it.
    output: Option<(usize, InFlight)>,
}

impl AttemptError {
    fn new(step: &'static str, error: KafkaError) -> Box<Self> {
        Box::new(Self {
            step,
            error,
            output: None,
        })
    }
}

/// What follows from a failed attempt.
enum Next {
    /// The transaction was aborted, and the cause is removed.
    WriteAgain,
    GiveUp(TransactionError),
}

const COMMITTING: &str = "committing";

impl TransactionError {
    /// Whether the broker is resolving an earlier transaction with the same transactional id.
    fn is_unresolved(&self) -> bool {
        let source = self.source.downcast_ref::<KafkaError>();
        source.and_then(error_code) == Some(RDKafkaErrorCode::ConcurrentTransactions)
    }

    /// The error of the client.
    #[must_use]
    pub fn into_source(self) -> ClientError {
        self.source
    }

    /// The outputs that their topic refused; empty if that is not the cause.
    #[must_use]
    pub fn refused(&self) -> &[Refused] {
        match &self.kind {
            FailureKind::Refused(refused) => refused,
            _ => &[],
        }
    }

    #[cfg(test)]
    pub(crate) fn for_tests(action: RecoveryAction, kind: FailureKind) -> Self {
        Self {
            action,
            kind,
            id: "test".to_owned(),
            step: "testing",
            topic: None,
            source: "planned".into(),
        }
    }
}

impl Transactions {
    /// Creates an instance without a producer for this transactional id. [`Transactions::recover`] creates and initialises
    /// the producer. `timeout` limits one transaction.
    #[must_use]
    pub fn new(config: ClientSettings, id: impl Into<String>, timeout: Duration) -> Self {
        Self {
            config,
            id: id.into(),
            timeout,
            connection: None,
            initialised: false,
            changelog: None,
            watch: None,
            stalls: Vec::new(),
            is_unresolved: false,
            is_wary: false,
            patience: PATIENCE,
            pace: Pace::default(),
            sent: 0,
            follow_ups: Vec::new(),
            secondary_failures: 0,
            changelog_ends: Vec::new(),
        }
    }

    /// Records the end offsets in this topic of each transaction, from the next producer on.
    pub(crate) fn set_changelog(&mut self, changelog: Option<Arc<str>>) {
        self.changelog = changelog;
    }

    /// Lets transactions fail early if one of their topics is unavailable.
    pub(crate) fn set_watch(&mut self, watch: TopicWatch) {
        self.watch = Some(watch);
    }

    /// The partitions of the changelog to which the last transaction wrote, each with the offset after its
    /// last record. Complete once everything was delivered, even if the outcome of the transaction is
    /// unknown.
    pub(crate) fn take_changelog_ends(&mut self) -> Vec<(i32, i64)> {
        std::mem::take(&mut self.changelog_ends)
    }

    /// Whether the last transaction waits for the broker, which may take long. If its outcome was unknown, it is certain.
    pub(crate) fn is_blocked(&self) -> bool {
        self.is_unresolved || !self.stalls.is_empty()
    }

    /// Whether the next transaction is given up soon if the broker has not resolved the last one.
    pub(crate) fn set_wary(&mut self, is_wary: bool) {
        self.is_wary = is_wary;
    }

    /// Whether a transaction can begin.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.initialised
    }

    fn connect(&mut self) -> Result<(), TransactionError> {
        if self.connection.is_none() {
            let producer: KafkaClient<ThreadedProducer<Deliveries>> = self
                .config
                .create_with_context(Deliveries::new(self.changelog.clone()))
                .map_err(|error| self.error("creating the producer", error))?;
            let offsets = OffsetSender::start(producer.clone()).map_err(|error| TransactionError {
                action: RecoveryAction::Retry,
                kind: FailureKind::Aborted,
                id: self.id.clone(),
                step: "starting a thread",
                topic: None,
                source: error.into(),
            })?;
            self.connection = Some(Connection { producer, offsets });
        }
        Ok(())
    }

    /// Creates the producer if there is none and initialises it; takes about `wait` at most. Before this succeeds, the
    /// broker completes or aborts any transaction that an earlier producer with this id left open.
    ///
    /// # Errors
    /// If the producer is not initialised yet; call again. [`RecoveryAction::Misconfigured`] is permanent.
    pub fn recover(&mut self, wait: Duration) -> Result<(), TransactionError> {
        if self.initialised {
            return Ok(());
        }
        self.connect()?;
        let connection = self.connection.as_ref();
        let connection =
            connection.ok_or_else(|| self.error("creating the producer", KafkaError::Canceled))?;
        match connection.producer.init_transactions(wait) {
            Ok(()) => {
                // The transaction that a predecessor left open is resolved.
                fault::point("initialise");
                self.initialised = true;
                self.is_unresolved = false;
                self.stalls.clear();
                Ok(())
            }
            Err(error) => {
                let error = self.error("initialising", error);
                self.is_unresolved |= error.is_unresolved();
                if error.action != RecoveryAction::Retry {
                    self.discard();
                }
                Err(error)
            }
        }
    }

    /// Writes `outputs` and `offsets` in one transaction. On success both are committed.
    ///
    /// `member` is the member and generation of the consumer group under which the offsets were read. If it is outdated, the
    /// broker refuses the offsets.
    ///
    /// # Errors
    /// [`TransactionError::kind`] tells what became of the transaction. After [`RecoveryAction::Abort`] the producer is
    /// ready; otherwise call [`Transactions::recover`] first.
    pub fn write(
        &mut self,
        outputs: &[Output],
        offsets: &TopicPartitionList,
        member: Option<&Arc<ConsumerGroupMetadata>>,
    ) -> Result<(), TransactionError> {
        self.write_and_follow_up(outputs, None, offsets, member)
    }

    /// As [`Transactions::write`], and writes what the follow-up makes of the positions of the outputs. In the error, the index of what it has written
    /// is at or after the number of outputs.
    ///
    /// # Errors
    /// As for [`Transactions::write`].
    pub fn write_and_follow_up(
        &mut self,
        outputs: &[Output],
        follow_up: Option<&FollowUp>,
        offsets: &TopicPartitionList,
        member: Option<&Arc<ConsumerGroupMetadata>>,
    ) -> Result<(), TransactionError> {
        let span = info_span!(
            target: TRACE_TARGET,
            parent: None,
            "transaction",
            otel.kind = "client",
            otel.status_code = Empty,
            "error.type" = Empty,
            "messaging.system" = "kafka",
            "messaging.batch.message_count" = i64::try_from(outputs.len()).unwrap_or(i64::MAX),
            "redeliver.transactional_id" = self.id,
        );
        let _entered = span.enter();
        let mut refreshes = 0;
        let result = loop {
            let began = Instant::now();
            let deadline = began + self.timeout;
            let Err(failed) = self.attempt(outputs, follow_up, offsets, member, deadline) else {
                self.secondary_failures = 0;
                let took = began.elapsed();
                self.patience = self.patience.min(PATIENCE.max(took.saturating_mul(2)));
                if let Some(watch) = &self.watch {
                    let all = outputs.iter().chain(&self.follow_ups);
                    watch.committed(took, |topic| all.clone().any(|output| *output.topic == *topic));
                }
                break Ok(());
            };
            match self.after_failure(*failed, outputs, &mut refreshes) {
                Next::WriteAgain => {}
                Next::GiveUp(error) => {
                    span.record("otel.status_code", "error");
                    span.record("error.type", error.step);
                    break Err(error);
                }
            }
        };
        self.pace.end();
        self.follow_ups.clear();
        result
    }

    /// The output with an index of the current transaction.
    fn output<'o>(&'o self, outputs: &'o [Output], index: usize) -> &'o Output {
        match index.checked_sub(outputs.len()) {
            None => &outputs[index],
            Some(index) => &self.follow_ups[index],
        }
    }

    /// Ends the transaction of a failed attempt and decides whether another one may succeed.
    fn after_failure(&mut self, failed: AttemptError, outputs: &[Output], refreshes: &mut u32) -> Next {
        let AttemptError {
            step,
            error: client_error,
            output,
        } = failed;
        let refusal = refusal(&client_error);
        let is_unknown_topic = is_unknown_topic(&client_error);
        let is_stalled = !self.stalls.is_empty();
        let is_denied = is_denied(&client_error);
        let is_secondary =
            (1..=MAX_SECONDARY_FAILURES).contains(&self.secondary_failures) && is_secondary(&client_error);
        let mut error = self.error(step, client_error);
        error.topic = output.map(|(index, _)| self.output(outputs, index).topic.clone());
        // A commit request may have reached the broker, and aborting would not show that.
        let is_unknown = step == COMMITTING;
        let is_missing = is_unknown_topic && !is_unknown && {
            let missing = self.missing(outputs);
            error.topic = missing.clone().or(error.topic);
            missing.is_some()
        };
        if error.is_unresolved() && !is_unknown {
            self.is_unresolved = true;
            self.patience = self.patience.saturating_mul(2);
        }
        let denied = (is_denied && !is_unknown).then(|| self.denied(outputs, output.as_ref()));
        let ended = if is_unknown {
            error.kind = FailureKind::Unknown;
            Err(match error.action {
                RecoveryAction::Abort | RecoveryAction::Retry => RecoveryAction::Rebuild,
                other => other,
            })
        } else if is_stalled {
            // The initialisation of a new producer shows when the broker could write to these topics.
            Err(match error.action {
                RecoveryAction::Fenced => RecoveryAction::Fenced,
                _ => RecoveryAction::Rebuild,
            })
        } else if is_missing && self.sent > 0 && self.is_nothing_reported() {
            // The coordinator probably does not know the transaction, because it has refused to add the topic. It would refuse to abort it, too, and
            // there is no delivery to wait for before that.
            Err(RecoveryAction::Rebuild)
        } else {
            self.end(error.action)
        };
        if let Some(denied) = denied {
            error.kind = FailureKind::Denied(denied);
        } else if is_missing || is_stalled && !is_unknown {
            error.kind = FailureKind::Unavailable;
        }
        if let Err(action) = ended {
            error.action = action;
            self.discard();
            return Next::GiveUp(error);
        }
        // The transaction is certainly aborted and the batch is still in memory, so it can be written again without reading
        // its records again.
        if is_secondary {
            self.secondary_failures += 1;
            return Next::WriteAgain;
        }
        if output.is_some() {
            self.secondary_failures = 1;
        }
        if is_unknown_topic {
            if !is_missing && *refreshes < MAX_REFRESHES && self.refresh(error.topic.as_deref()) {
                *refreshes += 1;
                return Next::WriteAgain;
            }
            error.kind = FailureKind::Unavailable;
        }
        if let (Some((index, in_flight)), Some(refusal)) = (output, refusal) {
            let topic = self.output(outputs, index).topic.clone();
            if self.pace.slow_down(&topic, in_flight, refusal) {
                return Next::WriteAgain;
            }
            error.kind = FailureKind::Refused(self.refused(outputs, index, refusal));
        }
        Next::GiveUp(error)
    }

    /// Aborts the transaction.
    ///
    /// # Errors
    /// The action to recover, if the producer has to be replaced: it is unusable, or requests may still be on their way to
    /// the broker. A late one could hit the next transaction of this producer. The initialisation of a new producer
    /// resolves this transaction and fences late requests.
    fn end(&self, action: RecoveryAction) -> Result<(), RecoveryAction> {
        match action {
            RecoveryAction::Abort => {}
            // The deadline passed before a retry succeeded.
            RecoveryAction::Retry => return Err(RecoveryAction::Rebuild),
            other => return Err(other),
        }
        self.abort().map_err(|error| {
            if recovery_action(&error) == RecoveryAction::Fenced {
                return RecoveryAction::Fenced;
            }
            tracing::debug!(id = self.id, %error, "abort failed; replacing the producer");
            RecoveryAction::Rebuild
        })
    }

    /// A topic of the transaction that does not exist, or of which that cannot be confirmed. The coordinator refuses all topics of a request
    /// because of one, so the failed output need not be for that one.
    fn missing(&self, outputs: &[Output]) -> Option<Arc<str>> {
        let all = outputs.iter().chain(&self.follow_ups);
        let topics: BTreeSet<&Arc<str>> = all.map(|output| &output.topic).collect();
        let watch = self.watch.as_ref();
        let is_missing = |topic: &&Arc<str>| watch.is_some_and(|watch| watch.state(topic).is_missing());
        let exists = |topic: &str| {
            let state = watch.map(|watch| watch.confirm(topic, CONFIRM_TIMEOUT));
            matches!(state, Some(TopicState::Exists { .. }))
        };
        // What is known needs no round trip.
        let known = topics.iter().copied().find(is_missing);
        known
            .or_else(|| topics.into_iter().find(|topic| !exists(topic)))
            .cloned()
    }

    /// Makes the client refresh its metadata of a topic that it does not know.
    fn refresh(&self, topic: Option<&str>) -> bool {
        let client = self.connection.as_ref().map(|one| one.producer.client());
        client.is_some_and(|client| client.fetch_metadata(topic, CALL).is_ok())
    }

    fn is_nothing_reported(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_none_or(|one| one.producer.client().context().reported() == 0)
    }

    fn attempt(
        &mut self,
        outputs: &[Output],
        follow_up: Option<&FollowUp>,
        offsets: &TopicPartitionList,
        member: Option<&Arc<ConsumerGroupMetadata>>,
        deadline: Instant,
    ) -> Result<(), Box<AttemptError>> {
        let Self {
            connection,
            pace,
            sent,
            follow_ups,
            watch,
            stalls,
            is_wary,
            patience,
            changelog_ends,
            ..
        } = self;
        changelog_ends.clear();
        follow_ups.clear();
        let Connection {
            producer,
            offsets: offset_sender,
        } = connection
            .as_mut()
            .ok_or_else(|| AttemptError::new("beginning", KafkaError::Canceled))?;
        let deliveries = producer.client().context();
        let number = deliveries.begin(if follow_up.is_some() { outputs.len() } else { 0 });
        *sent = 0;
        // A crash here loses results that nothing has seen yet, so the records are processed again.
        fault::point("batch");
        producer
            .begin_transaction()
            .map_err(|error| AttemptError::new("beginning", error))?;
        // A crash at this or a later fault point up to the commit may leave an open transaction. The successor's initialisation
        // aborts it, and the records are processed again.
        fault::point("begin");
        pace.delivered();
        let mut sending = Sending {
            producer,
            pace,
            watch: watch.as_ref(),
            stalls,
            is_wary: *is_wary,
            patience: *patience,
            number,
            deadline,
            sent,
        };
        let planned = Part { outputs, base: 0 };
        let first = sending.send(planned)?;
        // Adding the offsets takes two more round trips. They begin with the first delivery, while other records are in flight.
        // Before that, the client is still adding partitions to the transaction. The broker then answers
        // `CONCURRENT_TRANSACTIONS`, and the client waits before it asks again.
        let all = outputs.len();
        let waits = !mutant!("transaction-commits-undelivered-records");
        if waits && let Err(failed) = sending.wait(planned, first..all, all.min(first + 1)) {
            // The cause may be reported after its consequences.
            let all = is_secondary(&failed.error).then(|| sending.wait(planned, first..all, all));
            return Err(all.and_then(Result::err).unwrap_or(failed));
        }
        // Not before: a transaction without a member, which is aborted, has stored a record then, as tests of readers need it.
        let member = member
            .cloned()
            .ok_or_else(|| AttemptError::new("adding offsets", KafkaError::Canceled))?;
        // The offsets fence zombies: the broker refuses them if the member or its generation is no longer current, so every
        // transaction carries some, also one that completes no record.
        offset_sender
            .begin(offsets.clone(), member, deadline)
            .map_err(|error| AttemptError::new("adding offsets", error))?;
        let all_delivered = if waits {
            sending.wait(planned, first..all, all)
        } else {
            Ok(())
        };
        if all_delivered.is_ok() {
            fault::point("produce");
        }
        if let Err(failed) = &all_delivered
            && recovery_action(&failed.error) != RecoveryAction::Abort
        {
            // The producer is replaced, and the broker may answer the offsets as late as the records.
            offset_sender.detach();
            return all_delivered;
        }
        // The transaction must not be used before this call has returned. After a failed delivery, it returns
        // soon, or the producer is replaced.
        let until = match &all_delivered {
            Ok(()) => deadline,
            Err(_) => Instant::now(),
        };
        let since = Instant::now();
        let offsets_added = offset_sender.finish(until, || {
            let is_first = outputs.is_empty();
            is_first.then(|| sending.unresolved(since.elapsed())).flatten()
        });
        deliveries_and_offsets(all_delivered, offsets_added)?;
        if let Some(follow_up) = follow_up {
            *follow_ups = follow_up.outputs(&deliveries.take_positions());
            let more = Part {
                outputs: follow_ups,
                base: all,
            };
            let first = sending.send(more)?;
            sending.wait(more, first..more.outputs.len(), more.outputs.len())?;
        }
        *changelog_ends = deliveries.take_changelog_ends();
        // Everything is delivered, the client only has to notice. Without this, `commit_transaction` would flush in slices
        // of 100 ms. With a longer timeout, this flush would wait in slices of that length too.
        retry_until(deadline, || producer.flush(Duration::from_millis(1)))
            .map_err(|error| AttemptError::new("flushing", error))?;
        fault::point("offsets");
        retry_until(deadline, || producer.commit_transaction(CALL))
            .map_err(|error| AttemptError::new(COMMITTING, error))?;
        // After a crash here, outputs and offsets are committed, and the successor continues after them.
        fault::point("commit");
        Ok(())
    }

    /// The output that was refused on its own, and the outputs that would certainly be refused too.
    fn refused(&self, outputs: &[Output], index: usize, refusal: Refusal) -> Vec<Refused> {
        let refused = self.output(outputs, index);
        let (topic, size) = (&refused.topic, refused.size());
        // With compression, a record that is larger may still fit.
        let compresses = ["compression.type", "compression.codec"]
            .into_iter()
            .any(|name| self.config.get(name).is_some_and(|codec| codec != "none"));
        let failure = |output: &Output| match refusal {
            Refusal::Size => Failure::permanent(
                "output.too-large",
                format!(
                    "topic `{topic}` refuses a record of {} bytes: its max.message.bytes is lower",
                    output.size()
                ),
            ),
            Refusal::Content => Failure::permanent(
                "output.refused",
                format!(
                    "topic `{topic}` refuses the record as invalid; a compacted topic requires a key, for example"
                ),
            ),
        };
        let is_refused = |(position, output): &(usize, &Output)| {
            let is_as_large = refusal == Refusal::Size && !compresses && output.size() >= size;
            *position == index || (output.topic == *topic && is_as_large)
        };
        let all = outputs.iter().chain(&self.follow_ups).enumerate();
        all.filter(is_refused)
            .map(|(index, output)| Refused {
                index,
                failure: failure(output),
            })
            .collect()
    }

    /// The outputs whose topics this process may not write to: that of the output that failed, and those of which the client has reported it.
    fn denied(&self, outputs: &[Output], failed: Option<&(usize, InFlight)>) -> Vec<Refused> {
        let mut topics = self
            .connection
            .as_ref()
            .map(|connection| connection.producer.client().context().denied())
            .unwrap_or_default();
        topics.extend(failed.map(|(index, _)| self.output(outputs, *index).topic.to_string()));
        if let Some(watch) = &self.watch {
            topics
                .iter()
                .for_each(|topic| watch.denied(&topic.as_str().into()));
        }
        let denied = outputs
            .iter()
            .chain(&self.follow_ups)
            .enumerate()
            .filter(|(_, output)| topics.iter().any(|topic| **topic == *output.topic));
        denied
            .map(|(index, output)| Refused {
                index,
                failure: Failure::permanent(
                    "output.denied",
                    format!(
                        "this process may not write to topic `{}`, or its name is invalid",
                        output.topic
                    ),
                ),
            })
            .collect()
    }

    fn abort(&self) -> Result<(), KafkaError> {
        let Connection { producer, .. } = self.connection.as_ref().ok_or(KafkaError::Canceled)?;
        // Aborting while the first produce request is in flight can cause a fatal error (librdkafka issue 4849), so this
        // waits for one delivery report.
        if self.sent > 0 {
            producer
                .client()
                .context()
                .wait_for_any(Instant::now() + Duration::from_secs(1));
        }
        retry_until(Instant::now() + self.timeout, || producer.abort_transaction(CALL))
    }

    /// Drops the producer; [`Transactions::recover`] creates a new one.
    pub(crate) fn discard(&mut self) {
        self.initialised = false;
        self.connection = None;
    }

    fn error(&self, step: &'static str, source: KafkaError) -> TransactionError {
        TransactionError {
            action: recovery_action(&source),
            kind: if is_timeout(&source) {
                FailureKind::TimedOut
            } else {
                FailureKind::Aborted
            },
            id: self.id.clone(),
            step,
            topic: None,
            source: source.into(),
        }
    }
}

/// Consecutive outputs of a transaction. Those before them are delivered.
#[derive(Clone, Copy)]
struct Part<'o> {
    outputs: &'o [Output],
    /// The index of the first one.
    base: usize,
}

/// Sends the outputs of a transaction, and waits until they are delivered.
struct Sending<'t> {
    producer: &'t ThreadedProducer<Deliveries>,
    pace: &'t mut Pace,
    watch: Option<&'t TopicWatch>,
    /// See [`Transactions`].
    stalls: &'t mut Vec<Stall>,
    is_wary: bool,
    patience: Duration,
    /// The number of the transaction.
    number: u32,
    deadline: Instant,
    /// See [`Transactions`].
    sent: &'t mut usize,
}

impl Sending<'_> {
    /// Sends a part, and returns the index in it of the first output that may not be delivered yet.
    fn send(&mut self, part: Part<'_>) -> Result<usize, Box<AttemptError>> {
        let mut first = 0;
        for (index, output) in part.outputs.iter().enumerate() {
            if self.pace.must_wait(output) {
                self.wait(part, first..index, index)?;
                self.pace.delivered();
                first = index;
            }
            let number = part.base + index;
            if let Err(error) = send(self.producer, output, (self.number, number), self.deadline) {
                // After a failed delivery the client accepts no more records. The error of that delivery is the cause.
                if refusal(&error).is_none() {
                    self.wait(part, first..index, index)?;
                }
                return Err(Box::new(AttemptError {
                    step: "producing",
                    error,
                    output: Some((number, InFlight::of(&output.topic, std::slice::from_ref(output)))),
                }));
            }
            self.pace.sent(output);
            *self.sent = number + 1;
            fault::point("send");
        }
        Ok(first)
    }

    /// An error if the broker probably will not go on with this transaction soon, as it has done nothing for it for so long.
    fn unresolved(&self, waited: Duration) -> Option<KafkaError> {
        let is_likely = || self.is_wary || self.watch.is_some_and(TopicWatch::is_any_impaired);
        let code = RDKafkaErrorCode::ConcurrentTransactions;
        (waited >= self.patience && is_likely()).then_some(KafkaError::MessageProduction(code))
    }

    /// Waits until the first `count` outputs of a part are delivered. `in_flight`: those that were sent, and may not be delivered.
    fn wait(
        &mut self,
        part: Part<'_>,
        in_flight: Range<usize>,
        count: usize,
    ) -> Result<(), Box<AttemptError>> {
        let producer = self.producer;
        let deliveries = producer.client().context();
        let Part { outputs, base } = part;
        let sent = &outputs[..in_flight.end];
        let (mut reported, mut since) = (deliveries.reported(), Instant::now());
        let waited = deliveries.wait_for(base + count, self.deadline, |round| {
            let watch = self.watch?;
            if std::mem::replace(&mut reported, deliveries.reported()) != reported {
                since = Instant::now();
            }
            // Deliveries are slow by now. Their topics may be unavailable without the watch knowing it, or not be watched at all.
            if round % 5 == 2 {
                watch.refresh_including(sent.iter().map(|output| &output.topic));
            }
            let undelivered = deliveries.undelivered(sent, base);
            let is_missing = |output: &Output| {
                undelivered.contains(&output.topic) && watch.presence(&output.topic).is_missing()
            };
            if let Some(index) = sent.iter().position(is_missing) {
                let code = RDKafkaErrorCode::UnknownTopicOrPartition;
                return Some((base + index, KafkaError::MessageProduction(code)));
            }
            // A topic also stalls if only some of its partitions do: which one a record goes to is decided when it is written.
            let is_slow = |topic: &str| reported > 0 && since.elapsed() >= watch.patience(topic);
            // Nothing can be written without the changelog, so nothing is gained by giving up before it is available again.
            let changelog = deliveries
                .changelog()
                .filter(|topic| undelivered.contains(*topic));
            if changelog.is_some_and(|topic| watch.presence(topic).is_unavailable()) {
                return None;
            }
            // The changelog may wait behind another topic, or the other way around.
            let needs_changelog = changelog.is_some();
            let is_stalled = |topic: &&Arc<str>| {
                watch.presence(topic).is_unavailable() || !needs_changelog && is_slow(topic)
            };
            let stalled: Vec<&Arc<str>> = undelivered.iter().filter(is_stalled).collect();
            if stalled.is_empty() {
                let is_nothing_known = needs_changelog || reported == 0;
                let unresolved = is_nothing_known
                    .then(|| self.unresolved(since.elapsed()))
                    .flatten();
                return unresolved.map(|error| (base, error));
            }
            let index = sent.iter().position(|output| stalled.contains(&&output.topic))?;
            self.stalls
                .extend(stalled.into_iter().map(|topic| watch.stalled(topic)));
            let code = RDKafkaErrorCode::MessageTimedOut;
            Some((base + index, KafkaError::MessageProduction(code)))
        });
        waited.map_err(|(index, error)| {
            let denied = is_secondary(&error)
                .then(|| first_of(&deliveries.denied(), sent))
                .flatten();
            let (index, error) = match denied {
                Some(index) => {
                    let code = RDKafkaErrorCode::TopicAuthorizationFailed;
                    (Some(base + index), KafkaError::MessageProduction(code))
                }
                None => (index, error),
            };
            // Those of previous parts are delivered.
            let output = index.and_then(|index| Some((index, outputs.get(index.checked_sub(base)?)?)));
            let output =
                output.map(|(index, output)| (index, InFlight::of(&output.topic, &outputs[in_flight])));
            Box::new(AttemptError {
                step: "delivering",
                error,
                output,
            })
        })
    }
}

/// The result of the deliveries and of adding the offsets, which happen at the same time.
fn deliveries_and_offsets(
    deliveries: Result<(), Box<AttemptError>>,
    offsets: Result<(), KafkaError>,
) -> Result<(), Box<AttemptError>> {
    let Err(error) = offsets else {
        return deliveries;
    };
    match deliveries {
        // If the offsets were not answered, they may still arrive, and only a new producer fences them. If they were refused
        // because the member is outdated, the client purged the records for that reason.
        Err(failed)
            if recovery_action(&error) == RecoveryAction::Abort
                && !(is_secondary(&failed.error) && is_outdated_member(&error)) =>
        {
            Err(failed)
        }
        _ => Err(AttemptError::new("adding offsets", error)),
    }
}

/// Repeats a call until it succeeds, fails with an error that is not retriable, or the deadline passes.
fn retry_until(
    deadline: Instant,
    mut call: impl FnMut() -> Result<(), KafkaError>,
) -> Result<(), KafkaError> {
    loop {
        match call() {
            Err(error) if recovery_action(&error) == RecoveryAction::Retry && Instant::now() < deadline => {
                // A flush has waited already.
                if !matches!(error, KafkaError::Flush(_)) {
                    thread::park_timeout(RETRY_DELAY);
                }
            }
            result => return result,
        }
    }
}

/// The index of the first output to one of these topics.
fn first_of(topics: &[String], outputs: &[Output]) -> Option<usize> {
    outputs
        .iter()
        .position(|output| topics.iter().any(|topic| **topic == *output.topic))
}

fn send(
    producer: &ThreadedProducer<Deliveries>,
    output: &Output,
    (transaction, index): (u32, usize),
    deadline: Instant,
) -> Result<(), KafkaError> {
    let opaque = Deliveries::opaque(transaction, index);
    let mut record = BaseRecord::<[u8], [u8], usize>::with_opaque_to(&output.topic, opaque);
    record.partition = output.partition;
    record.key = output.key.as_deref();
    record.payload = output.value.as_deref();
    if !output.headers.is_empty() {
        record.headers = Some(native_headers(&output.headers));
    }
    loop {
        match producer.send(record) {
            Ok(()) => return Ok(()),
            Err((error, back)) => {
                if recovery_action(&error) != RecoveryAction::Retry || Instant::now() >= deadline {
                    return Err(error);
                }
                record = back;
                thread::park_timeout(Duration::from_millis(1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::consumer::{BaseConsumer, Consumer as _};
    use rdkafka::mocking::{MockCluster, MockCoordinator};
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::topic_partition_list::Offset;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
    use redeliver_core::Headers;
    use redeliver_kafka_ffi::TopicDescription;
    use redeliver_testkit::{DEADLINE, eventually};

    use super::*;
    use crate::client::KafkaSettings;

    #[test]
    fn unanswered_offsets_replace_the_producer() {
        let refused = KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge);
        let purged = KafkaError::MessageProduction(RDKafkaErrorCode::PurgeQueue);
        let unanswered = KafkaError::ConsumerCommit(RDKafkaErrorCode::OperationTimedOut);
        let result = |delivery: Option<&KafkaError>, offsets: Option<&KafkaError>| {
            let delivery = delivery.map_or(Ok(()), |error| {
                Err(AttemptError::new("delivering", error.clone()))
            });
            let result = deliveries_and_offsets(delivery, offsets.map_or(Ok(()), |error| Err(error.clone())));
            result.map_err(|failed| (failed.step, recovery_action(&failed.error)))
        };
        assert_eq!(result(None, None), Ok(()));
        assert_eq!(
            result(Some(&refused), None),
            Err(("delivering", RecoveryAction::Abort))
        );
        for delivery in [None, Some(&refused), Some(&purged)] {
            assert_eq!(
                result(delivery, Some(&unanswered)),
                Err(("adding offsets", RecoveryAction::Rebuild))
            );
        }
        // The request failed because of the delivery.
        assert_eq!(recovery_action(&refused), RecoveryAction::Abort);
        assert_eq!(
            result(Some(&refused), Some(&refused)),
            Err(("delivering", RecoveryAction::Abort))
        );
    }

    const FOUND: TopicDescription = TopicDescription {
        id: None,
        partitions: 1,
        has_leaders: true,
        fewest_in_sync: None,
        may_write: Some(true),
    };

    /// A producer and topics with one partition each, on brokers 1 and 2 of a cluster.
    struct Env {
        cluster: MockCluster<'static, DefaultProducerContext>,
        settings: KafkaSettings,
        transactions: Transactions,
    }

    impl Env {
        fn new() -> Self {
            let cluster = MockCluster::new(2).unwrap();
            for (topic, leader) in [("first", 1), ("second", 2)] {
                cluster.create_topic(topic, 1, 1).unwrap();
                cluster.partition_leader(topic, 0, Some(leader)).unwrap();
            }
            for coordinator in [
                MockCoordinator::Transaction("test".to_owned()),
                MockCoordinator::Group("group".to_owned()),
            ] {
                cluster.coordinator(coordinator, 1).unwrap();
            }
            let settings = KafkaSettings::new(cluster.bootstrap_servers(), "test");
            let config = settings.transactional_producer("test");
            let mut transactions = Transactions::new(config, "test", settings.transaction_timeout);
            transactions.set_watch(TopicWatch::start(&settings).unwrap());
            transactions.recover(DEADLINE).unwrap();
            Self {
                cluster,
                settings,
                transactions,
            }
        }

        /// Sets a watch that knows only what the test tells it, because no broker listens there.
        fn watch_alone(&mut self) -> TopicWatch {
            let watch = TopicWatch::start(&KafkaSettings::new("127.0.0.1:1", "test")).unwrap();
            self.transactions.set_watch(watch.clone());
            watch
        }

        /// Writes a record to each of these topics.
        fn write(&mut self, topics: &[&str]) -> Result<(), TransactionError> {
            let output = |topic: &&str| Output {
                topic: (*topic).into(),
                partition: None,
                key: None,
                value: Some("value".into()),
                headers: Headers::new(),
            };
            let outputs: Vec<Output> = topics.iter().map(output).collect();
            let mut offsets = TopicPartitionList::new();
            offsets
                .add_partition_offset("first", 0, Offset::Offset(1))
                .unwrap();
            let consumer: KafkaClient<BaseConsumer> =
                self.settings.consumer("group", "member").create().unwrap();
            let member = consumer.group_metadata().map(Arc::new);
            self.transactions.write(&outputs, &offsets, member.as_ref())
        }
    }

    #[test]
    fn unresolved_transaction_is_not_waited_for() {
        let mut env = Env::new();
        env.write(&["first", "second"]).unwrap();
        let first_requests: [(_, &[&str]); 2] = [
            (RDKafkaApiKey::AddPartitionsToTxn, &["first"]),
            (RDKafkaApiKey::AddOffsetsToTxn, &[]),
        ];
        for (api, topics) in first_requests {
            let errors = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS; 1000];
            env.cluster.request_errors(api, &errors);
            env.transactions.set_wary(true);
            let error = env.write(topics).unwrap_err();
            assert_eq!(error.action, RecoveryAction::Rebuild, "{error:?}");
            assert_eq!(error.kind, FailureKind::Aborted, "{error:?}");
            assert!(env.transactions.is_blocked());
            assert_eq!(env.transactions.patience, 2 * PATIENCE);
            env.cluster.clear_request_errors(api);
            env.transactions.recover(DEADLINE).unwrap();
            assert!(!env.transactions.is_blocked());
            env.write(topics).unwrap();
        }
    }

    #[test]
    fn hanging_changelog_is_given_up() {
        let mut env = Env::new();
        env.transactions.set_changelog(Some("second".into()));
        env.transactions.discard();
        env.transactions.recover(DEADLINE).unwrap();
        env.write(&["first", "second"]).unwrap();
        env.transactions.set_wary(true);
        env.cluster
            .broker_round_trip_time(2, env.settings.transaction_timeout / 2)
            .unwrap();
        let error = env.write(&["first", "second"]).unwrap_err();
        assert_eq!(error.action, RecoveryAction::Rebuild, "{error:?}");
        assert_eq!(error.kind, FailureKind::Aborted, "{error:?}");
    }

    #[test]
    fn unavailable_topic_precedes_the_changelog() {
        let mut env = Env::new();
        env.transactions.set_changelog(Some("first".into()));
        env.transactions.discard();
        env.transactions.recover(DEADLINE).unwrap();
        env.write(&["first", "second"]).unwrap();
        let watch = env.watch_alone();
        let leaderless = TopicDescription {
            has_leaders: false,
            ..FOUND
        };
        watch.observe(&"second".into(), Some(&leaderless), Instant::now());
        for broker in [1, 2] {
            env.cluster
                .broker_round_trip_time(broker, env.settings.transaction_timeout / 2)
                .unwrap();
        }
        let error = env.write(&["first", "second"]).unwrap_err();
        assert_eq!(error.kind, FailureKind::Unavailable, "{error:?}");
    }

    #[test]
    fn stall_does_not_wait_for_offsets() {
        let mut env = Env::new();
        let coordinator = MockCoordinator::Group("group".to_owned());
        env.cluster.coordinator(coordinator, 2).unwrap();
        env.write(&["first", "second"]).unwrap();
        env.cluster
            .broker_round_trip_time(2, env.settings.transaction_timeout / 2)
            .unwrap();
        let error = env.write(&["first", "second"]).unwrap_err();
        assert_eq!(error.step, "delivering", "{error:?}");
        assert_eq!(error.kind, FailureKind::Unavailable, "{error:?}");
    }

    #[test]
    fn missing_topic_outlasts_failing_abort() {
        let mut env = Env::new();
        let watch = env.watch_alone();
        env.write(&["first", "second"]).unwrap();
        let unknown = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART; 1000];
        env.cluster
            .request_errors(RDKafkaApiKey::AddPartitionsToTxn, &unknown);
        // The broker knows no transaction.
        let invalid = RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_TXN_STATE;
        env.cluster.request_errors(RDKafkaApiKey::EndTxn, &[invalid]);
        // The answer to later requests, so that nothing has to be confirmed.
        watch.observe(&"first".into(), Some(&FOUND), Instant::now() + DEADLINE);
        for _ in 0..2 {
            watch.observe(&"second".into(), None, Instant::now());
        }
        let error = env.write(&["first", "second"]).unwrap_err();
        assert_eq!(error.topic.as_deref(), Some("second"));
        assert_eq!(error.action, RecoveryAction::Rebuild, "{error:?}");
        assert_eq!(error.kind, FailureKind::Unavailable, "{error:?}");
    }

    #[test]
    fn slow_topic_is_written() {
        let mut env = Env::new();
        env.write(&["first", "second"]).unwrap();
        env.cluster
            .broker_round_trip_time(2, Duration::from_millis(1100))
            .unwrap();
        let error = env.write(&["first", "second"]).unwrap_err();
        assert_eq!(error.kind, FailureKind::Unavailable, "{error:?}");
        eventually("the topic is written", DEADLINE, || {
            env.transactions.recover(DEADLINE).unwrap();
            env.write(&["first", "second"])
                .map_err(|error| format!("{error:?}"))
        });
    }
}
