//! One exactly-once write: results and consumed offsets in one transaction.
//!
//! [`Transactions`] owns a transactional producer and knows one rule: after anything but a clean commit,
//! nobody guesses what became of the transaction. It is aborted, or the producer is replaced by one with
//! the same transactional id, whose initialisation makes the broker finish or abort the old transaction.
//! The caller then reads the committed offsets, which tell the truth.
//!
//! A topic that is deleted while a transaction writes into it would keep the transaction until it times out. So whoever
//! waits for deliveries looks at the [`TopicWatch`] and aborts as soon as it is certain that the topic is gone.

mod alternating;
mod offset_sender;
mod pace;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::ConsumerGroupMetadata;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, Message as _};
use rdkafka::producer::{BaseRecord, Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::{ClientConfig, ClientContext, TopicPartitionList};
use redeliver_core::{Failure, Output};

use crate::client::ClientLog;
use crate::convert::native_headers;
use crate::fault;
use crate::processor::Refused;
use crate::remedy::{RecoveryAction, Refusal, is_aftermath, is_unknown_topic, refusal, remedy};
use crate::topic_watch::{TopicState, TopicWatch};
pub(crate) use alternating::Alternating;
use offset_sender::OffsetSender;
use pace::{Group, Pace};

/// How long one blocking call of the client may take before we look at our deadline again.
const CALL: Duration = Duration::from_secs(2);
/// How many transactions after a delivery that failed may fail because of it.
const AFTERMATH: u32 = 3;
/// How long a call that is to be made again is put off.
const PAUSE: Duration = Duration::from_millis(5);
/// How often whoever waits for deliveries looks whether their topics still exist.
const LOOK: Duration = Duration::from_millis(100);
/// How long the cluster is asked whether a topic exists that the client does not know.
const CONFIRM: Duration = Duration::from_secs(3);
/// How often a transaction is written again because the client did not know a topic that exists.
const REFRESHES: u32 = 3;

/// A transactional producer that is replaced when it has to be.
pub struct Transactions {
    config: ClientConfig,
    id: String,
    timeout: Duration,
    connection: Option<Connection>,
    initialised: bool,
    changelog: Option<Arc<str>>,
    watch: Option<TopicWatch>,
    pace: Pace,
    /// Outputs that were given to the producer in the transaction at hand.
    sent: usize,
    /// 0, or how many transactions have failed since and with the last delivery that failed by itself.
    aftermath: u32,
}

struct Connection {
    producer: ThreadedProducer<Deliveries>,
    offsets: OffsetSender,
}

/// A transaction that did not commit, or of which it is not known. The committed offsets tell.
#[derive(Debug, thiserror::Error)]
#[error("transaction of `{id}` failed while {step}{}", place(topic.as_deref()))]
pub struct TransactionError {
    /// What to do before the next transaction; [`Transactions::recover`] does it.
    pub remedy: RecoveryAction,
    /// The outputs that their topic does not take, if that is why. The transaction is aborted then, and without them
    /// the others can be written at once.
    pub refused: Vec<Refused>,
    id: String,
    step: &'static str,
    topic: Option<Arc<str>>,
    // Boxed to keep results small: it is the rare case.
    source: Box<KafkaError>,
}

fn place(topic: Option<&str>) -> String {
    topic.map_or_else(String::new, |topic| format!(" to topic `{topic}`"))
}

/// An attempt that failed.
struct Failed {
    step: &'static str,
    error: Box<KafkaError>,
    /// The output that it is about, and what of its topic was under way with it.
    output: Option<(usize, Group)>,
}

impl Failed {
    fn new(step: &'static str, error: KafkaError) -> Self {
        Self {
            step,
            error: Box::new(error),
            output: None,
        }
    }
}

impl TransactionError {
    /// What the client said.
    #[must_use]
    pub fn into_source(self) -> KafkaError {
        *self.source
    }
}

impl Transactions {
    /// Prepares a producer for this transactional id; [`Transactions::recover`] connects it.
    #[must_use]
    pub fn new(config: ClientConfig, id: impl Into<String>, timeout: Duration) -> Self {
        Self {
            config,
            id: id.into(),
            timeout,
            connection: None,
            initialised: false,
            changelog: None,
            watch: None,
            pace: Pace::default(),
            sent: 0,
            aftermath: 0,
        }
    }

    /// From the next producer on it is noted how far each transaction has written this topic.
    pub(crate) fn follow(&mut self, changelog: Option<Arc<str>>) {
        self.changelog = changelog;
    }

    /// Lets transactions fail early when one of their topics does not exist any more.
    pub(crate) fn heed(&mut self, watch: TopicWatch) {
        self.watch = Some(watch);
    }

    /// How far the last transaction has written the followed topic, by partition: the offset behind its last
    /// record.
    pub(crate) fn changelog_ends(&self) -> Vec<(i32, i64)> {
        let connection = self.connection.as_ref();
        connection.map_or_else(Vec::new, |connection| {
            std::mem::take(&mut *lock(&connection.producer.client().context().changelog_ends))
        })
    }

    /// Whether a transaction can begin.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.initialised
    }

    /// Makes the producer if there is none.
    fn connect(&mut self) -> Result<(), TransactionError> {
        if self.connection.is_none() {
            let made = Connection::make(&self.config, self.changelog.clone());
            self.connection = Some(made.map_err(|error| self.setback("making the producer", error))?);
        }
        Ok(())
    }

    /// Makes the producer if there is none and initialises it, for about `wait`. Any transaction that an
    /// earlier producer of this id left open is finished or aborted by the broker before this succeeds.
    ///
    /// # Errors
    /// When it did not succeed yet; call again. [`RecoveryAction::Misconfigured`] will not get better.
    pub fn recover(&mut self, wait: Duration) -> Result<(), TransactionError> {
        if self.initialised {
            return Ok(());
        }
        self.connect()?;
        let connection = self.connection.as_ref();
        let connection =
            connection.ok_or_else(|| self.setback("making the producer", KafkaError::Canceled))?;
        match connection.producer.init_transactions(wait) {
            Ok(()) => {
                self.initialised = true;
                Ok(())
            }
            Err(error) => {
                let setback = self.setback("initialising", error);
                if setback.remedy != RecoveryAction::Retry {
                    self.discard();
                }
                Err(setback)
            }
        }
    }

    /// Writes `outputs` and `offsets` in one transaction. On success both are committed.
    ///
    /// The metadata of the group is asked for only just before it is used, so that it is fresh.
    ///
    /// # Errors
    /// A [`TransactionError`]: everything that was in the transaction has to be read again from the committed
    /// offsets, or written again without what was [`TransactionError::refused`]. After [`RecoveryAction::Abort`] the producer is ready
    /// at once, else [`Transactions::recover`] it.
    pub fn write(
        &mut self,
        outputs: &[Output],
        offsets: &TopicPartitionList,
        group: impl Fn() -> Option<ConsumerGroupMetadata>,
    ) -> Result<(), TransactionError> {
        let mut refreshes = 0;
        let result = loop {
            let deadline = Instant::now() + self.timeout;
            let Err(failed) = self.attempt(outputs, offsets, &group, deadline) else {
                self.aftermath = 0;
                break Ok(());
            };
            let refusal = refusal(&failed.error);
            let is_unknown_topic = is_unknown_topic(&failed.error);
            let is_aftermath = (1..=AFTERMATH).contains(&self.aftermath) && is_aftermath(&failed.error);
            let mut setback = self.setback(failed.step, *failed.error);
            setback.topic = failed.output.map(|(index, _)| outputs[index].topic.clone());
            if setback.remedy != RecoveryAction::Abort {
                self.discard();
                break Err(setback);
            }
            if let Err(error) = self.abort() {
                if remedy(&error) == RecoveryAction::Fenced {
                    setback.remedy = RecoveryAction::Fenced;
                } else {
                    tracing::debug!(id = self.id, %error, "aborting failed; the producer is replaced");
                    setback.remedy = RecoveryAction::Rebuild;
                }
                self.discard();
                break Err(setback);
            }
            if is_aftermath {
                self.aftermath += 1;
                continue;
            }
            if failed.output.is_some() {
                self.aftermath = 1;
            }
            if is_unknown_topic && refreshes < REFRESHES && self.refresh(setback.topic.as_deref()) {
                refreshes += 1;
                continue;
            }
            if let (Some((index, of_topic)), Some(refusal)) = (failed.output, refusal) {
                if self.pace.slow_down(&outputs[index].topic, of_topic, refusal) {
                    continue;
                }
                setback.refused = self.refused(outputs, index, refusal);
            }
            break Err(setback);
        };
        self.pace.end();
        result
    }

    /// Makes the client look at a topic again that it does not know, when the topic exists. False when it does not, or
    /// when nobody can say.
    fn refresh(&self, topic: Option<&str>) -> bool {
        let (Some(watch), Some(topic), Some(connection)) = (&self.watch, topic, &self.connection) else {
            return false;
        };
        if !matches!(watch.confirm(topic, CONFIRM), TopicState::Exists { .. }) {
            return false;
        }
        let client = connection.producer.client();
        client.fetch_metadata(Some(topic), CALL).is_ok()
    }

    fn attempt(
        &mut self,
        outputs: &[Output],
        offsets: &TopicPartitionList,
        group: impl Fn() -> Option<ConsumerGroupMetadata>,
        deadline: Instant,
    ) -> Result<(), Failed> {
        let Self {
            connection,
            pace,
            sent,
            watch,
            ..
        } = self;
        let Connection {
            producer,
            offsets: offset_sender,
        } = connection
            .as_mut()
            .ok_or(Failed::new("beginning", KafkaError::Canceled))?;
        let deliveries = producer.client().context();
        let number = deliveries.begin();
        *sent = 0;
        producer
            .begin_transaction()
            .map_err(|error| Failed::new("beginning", error))?;
        fault::point("begin");
        pace.delivered();
        // The first one that is under way.
        let mut first = 0;
        let delivered = |first: usize, sent: usize| match deliveries.wait_for(sent, deadline, |round| {
            gone(watch.as_ref()?, &outputs[..sent], round)
        }) {
            Ok(()) => Ok(()),
            Err((index, error)) => Err(Failed {
                step: "delivering",
                error: Box::new(error),
                output: index.map(|index| (index, Group::of(&outputs[index].topic, &outputs[first..sent]))),
            }),
        };
        for (index, output) in outputs.iter().enumerate() {
            if pace.must_wait(output) {
                delivered(first, index)?;
                pace.delivered();
                first = index;
            }
            if let Err(error) = send(producer, output, (number, index), deadline) {
                // The client takes nothing more once a delivery has failed, which says more.
                if refusal(&error).is_none() {
                    delivered(first, index)?;
                }
                return Err(Failed {
                    step: "producing",
                    error: Box::new(error),
                    output: Some((index, Group::of(&output.topic, std::slice::from_ref(output)))),
                });
            }
            pace.sent(output);
            *sent = index + 1;
        }
        delivered(first, outputs.len())?;
        fault::point("produce");
        // Everything is delivered by now; the client only has to notice. One millisecond at a time, since
        // a flush with work left polls in slices of up to its timeout.
        until(deadline, || producer.flush(Duration::from_millis(1)))
            .map_err(|error| Failed::new("flushing", error))?;
        let group = group().ok_or(Failed::new("asking for the group", KafkaError::Canceled))?;
        offset_sender
            .send(offsets.clone(), group, deadline)
            .map_err(|error| Failed::new("adding offsets", error))?;
        fault::point("offsets");
        until(deadline, || producer.commit_transaction(CALL))
            .map_err(|error| Failed::new("committing", error))?;
        fault::point("commit");
        Ok(())
    }

    /// The output that was refused when it was alone, and those that would be after it.
    fn refused(&self, outputs: &[Output], index: usize, refusal: Refusal) -> Vec<Refused> {
        let (topic, size) = (&outputs[index].topic, outputs[index].size());
        // What is compressed may take less.
        let compresses = ["compression.type", "compression.codec"]
            .into_iter()
            .any(|name| self.config.get(name).is_some_and(|codec| codec != "none"));
        let failure = |output: &Output| match refusal {
            Refusal::Size => Failure::permanent(
                "output.too-large",
                format!(
                    "topic `{topic}` does not take a record of {} bytes: its max.message.bytes is lower",
                    output.size()
                ),
            ),
            Refusal::Content => Failure::permanent(
                "output.refused",
                format!(
                    "topic `{topic}` does not take the record as it is, such as one without a key when compacted"
                ),
            ),
        };
        let is_refused = |(place, output): &(usize, &Output)| {
            let is_as_large = refusal == Refusal::Size && !compresses && output.size() >= size;
            *place == index || (output.topic == *topic && is_as_large)
        };
        let refused = outputs.iter().enumerate().filter(is_refused);
        refused
            .map(|(index, output)| Refused {
                index,
                failure: failure(output),
            })
            .collect()
    }

    fn abort(&self) -> Result<(), KafkaError> {
        let Connection { producer, .. } = self.connection.as_ref().ok_or(KafkaError::Canceled)?;
        // Aborting while the very first request is under way can make the producer unusable (librdkafka
        // issue 4849), so one answer is waited for.
        if self.sent > 0 {
            producer
                .client()
                .context()
                .wait_for_any(Instant::now() + Duration::from_secs(1));
        }
        until(Instant::now() + self.timeout, || producer.abort_transaction(CALL))
    }

    /// Drops the producer; [`Transactions::recover`] makes a new one.
    pub(crate) fn discard(&mut self) {
        self.initialised = false;
        self.connection = None;
    }

    fn setback(&self, step: &'static str, source: KafkaError) -> TransactionError {
        TransactionError {
            remedy: remedy(&source),
            refused: Vec::new(),
            id: self.id.clone(),
            step,
            topic: None,
            source: Box::new(source),
        }
    }
}

impl Connection {
    fn make(config: &ClientConfig, changelog: Option<Arc<str>>) -> Result<Self, KafkaError> {
        let producer: ThreadedProducer<Deliveries> =
            config.create_with_context(Deliveries::new(changelog))?;
        let offsets = OffsetSender::start(producer.clone())
            .map_err(|error| KafkaError::ClientCreation(format!("starting a thread: {error}")))?;
        Ok(Self { producer, offsets })
    }
}

/// Makes a call until it succeeds, its error calls for something else than making it again, or the
/// deadline passes.
fn until(deadline: Instant, mut call: impl FnMut() -> Result<(), KafkaError>) -> Result<(), KafkaError> {
    loop {
        match call() {
            Err(error) if remedy(&error) == RecoveryAction::Retry && Instant::now() < deadline => {
                if !matches!(error, KafkaError::Flush(_)) {
                    thread::park_timeout(PAUSE);
                }
            }
            result => return result,
        }
    }
}

/// The first of these outputs whose topic does not exist any more. `round` counts the looks at one wait.
fn gone(watch: &TopicWatch, outputs: &[Output], round: u32) -> Option<usize> {
    // Deliveries that take so long may wait for a topic of which the watch has not heard yet.
    if round == 2 {
        watch.hurry_about(outputs.iter().map(|output| &output.topic));
    }
    if !watch.any_missing() {
        return None;
    }
    outputs
        .iter()
        .position(|output| watch.state(&output.topic).is_missing())
}

fn send(
    producer: &ThreadedProducer<Deliveries>,
    output: &Output,
    (transaction, index): (u32, usize),
    deadline: Instant,
) -> Result<(), KafkaError> {
    let opaque = ((transaction as usize) << 32) | index;
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
                if remedy(&error) != RecoveryAction::Retry || Instant::now() >= deadline {
                    return Err(error);
                }
                record = back;
                thread::park_timeout(Duration::from_millis(1));
            }
        }
    }
}

/// Counts delivery reports, which arrive on the producer's own thread, and wakes the lane's. Every record
/// carries the number of its transaction, in the upper half, since reports of an aborted one may arrive during the
/// next, and its place in the turn.
struct Deliveries {
    transaction: AtomicU32,
    waiting: std::sync::Mutex<Option<Thread>>,
    reported: AtomicUsize,
    awaited: AtomicUsize,
    failed: AtomicBool,
    /// Of those that are the cause, if there is one.
    first_failure: std::sync::Mutex<Option<(usize, KafkaError)>>,
    changelog: Option<Arc<str>>,
    changelog_ends: std::sync::Mutex<Vec<(i32, i64)>>,
    log: ClientLog,
}

const _: () = assert!(usize::BITS == 64, "a place and a number share one word");

impl Deliveries {
    fn new(changelog: Option<Arc<str>>) -> Self {
        Self {
            changelog,
            changelog_ends: std::sync::Mutex::default(),
            transaction: AtomicU32::new(0),
            waiting: std::sync::Mutex::new(None),
            reported: AtomicUsize::new(0),
            awaited: AtomicUsize::new(usize::MAX),
            failed: AtomicBool::new(false),
            first_failure: std::sync::Mutex::new(None),
            log: ClientLog::default(),
        }
    }

    fn begin(&self) -> u32 {
        let number = self.transaction.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        self.reported.store(0, Ordering::SeqCst);
        self.awaited.store(usize::MAX, Ordering::SeqCst);
        self.failed.store(false, Ordering::SeqCst);
        *lock(&self.first_failure) = None;
        lock(&self.changelog_ends).clear();
        number
    }

    /// Waits until that many deliveries have been reported. `gone` is asked every [`LOOK`] for an output whose topic does
    /// not exist any more, with the number of the question.
    ///
    /// # Errors
    /// When one has failed or its topic is gone, which is named, or the deadline passes.
    fn wait_for(
        &self,
        count: usize,
        deadline: Instant,
        gone: impl Fn(u32) -> Option<usize>,
    ) -> Result<(), (Option<usize>, KafkaError)> {
        *lock(&self.waiting) = Some(thread::current());
        self.awaited.store(count, Ordering::SeqCst);
        let mut is_over = false;
        let mut is_gone = None;
        let mut round = 0;
        let mut next_look = Instant::now() + LOOK;
        while self.reported.load(Ordering::SeqCst) < count && !self.failed.load(Ordering::SeqCst) {
            let now = Instant::now();
            if now >= deadline {
                is_over = true;
                break;
            }
            if now >= next_look {
                round += 1;
                next_look = now + LOOK;
                is_gone = gone(round);
                if is_gone.is_some() {
                    break;
                }
            }
            thread::park_timeout(deadline.min(next_look) - now);
        }
        self.awaited.store(usize::MAX, Ordering::SeqCst);
        match lock(&self.first_failure).clone() {
            Some((index, error)) => Err((Some(index), error)),
            None if is_gone.is_some() => {
                let error = KafkaError::MessageProduction(RDKafkaErrorCode::UnknownTopicOrPartition);
                Err((is_gone, error))
            }
            None if is_over => {
                let error = KafkaError::Flush(RDKafkaErrorCode::OperationTimedOut);
                Err((None, error))
            }
            None => Ok(()),
        }
    }

    /// Waits until any delivery has been reported, or the deadline passes.
    fn wait_for_any(&self, deadline: Instant) {
        // What it was does not matter to whoever aborts.
        let _ = self.wait_for(1, deadline, |_| None);
    }
}

impl ClientContext for Deliveries {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.log.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if self.log.is_time("error") {
            tracing::warn!(%error, reason, "kafka producer");
        }
    }
}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, opaque: usize) {
        let (transaction, index) = (opaque >> 32, opaque & u32::MAX as usize);
        if transaction != self.transaction.load(Ordering::SeqCst) as usize {
            return;
        }
        match result {
            Ok(message) if self.changelog.as_deref() == Some(message.topic()) => {
                let (partition, end) = (message.partition(), message.offset() + 1);
                let mut ends = lock(&self.changelog_ends);
                match ends.iter_mut().find(|(known, _)| *known == partition) {
                    Some((_, known)) => *known = end.max(*known),
                    None => ends.push((partition, end)),
                }
            }
            Ok(_) => {}
            Err((error, _)) => {
                let mut first = lock(&self.first_failure);
                // What caused it may be reported after what came of it.
                if first.as_ref().is_none_or(|(_, first)| is_aftermath(first)) {
                    *first = Some((index, error.clone()));
                }
                if !is_aftermath(error) {
                    self.failed.store(true, Ordering::SeqCst);
                }
            }
        }
        let reported = self.reported.fetch_add(1, Ordering::SeqCst) + 1;
        if (reported >= self.awaited.load(Ordering::SeqCst) || self.failed.load(Ordering::SeqCst))
            && let Some(thread) = &*lock(&self.waiting)
        {
            thread.unpark();
        }
    }
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
