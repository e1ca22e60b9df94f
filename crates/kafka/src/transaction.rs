//! One exactly-once write: results and consumed offsets in one transaction.
//!
//! [`Transactions`] owns a transactional producer and knows one rule: after anything but a clean commit,
//! nobody guesses what became of the transaction. It is aborted, or the producer is replaced by one with
//! the same transactional id, whose initialisation makes the broker finish or abort the old transaction.
//! The caller then reads the committed offsets, which tell the truth.

mod offset_sender;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::ConsumerGroupMetadata;
use rdkafka::error::KafkaError;
use rdkafka::message::{DeliveryResult, Message as _};
use rdkafka::producer::{BaseRecord, Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::{ClientConfig, ClientContext, TopicPartitionList};
use redeliver_core::Output;

use crate::client::ClientLog;
use crate::convert::native_headers;
use crate::fault;
use crate::remedy::{Remedy, remedy};
use offset_sender::OffsetSender;

/// How long one blocking call of the client may take before we look at our deadline again.
const CALL: Duration = Duration::from_secs(2);
/// How long a call that is to be made again is put off.
const PAUSE: Duration = Duration::from_millis(5);

/// A transactional producer that is replaced when it has to be.
pub struct Transactions {
    config: ClientConfig,
    id: String,
    timeout: Duration,
    connection: Option<Connection>,
    initialised: bool,
    changelog: Option<Arc<str>>,
}

struct Connection {
    producer: ThreadedProducer<Deliveries>,
    offsets: OffsetSender,
}

/// A transaction that did not commit, or of which it is not known. The committed offsets tell.
#[derive(Debug, thiserror::Error)]
#[error("transaction of `{id}` failed while {step}")]
pub struct Setback {
    /// What to do before the next transaction; [`Transactions::recover`] does it.
    pub remedy: Remedy,
    id: String,
    step: &'static str,
    // Boxed to keep results small: it is the rare case.
    source: Box<KafkaError>,
}

impl Setback {
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
        }
    }

    /// From the next producer on it is noted how far each transaction has written this topic.
    pub(crate) fn follow(&mut self, changelog: Option<Arc<str>>) {
        self.changelog = changelog;
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

    /// Makes the producer if there is none and initialises it, for about `wait`. Any transaction that an
    /// earlier producer of this id left open is finished or aborted by the broker before this succeeds.
    ///
    /// # Errors
    /// When it did not succeed yet; call again. [`Remedy::Misconfigured`] will not get better.
    pub fn recover(&mut self, wait: Duration) -> Result<(), Setback> {
        if self.initialised {
            return Ok(());
        }
        let connection = match &self.connection {
            Some(connection) => connection,
            None => {
                let made = Connection::make(&self.config, self.changelog.clone());
                let made = made.map_err(|error| self.setback("making the producer", error))?;
                self.connection.insert(made)
            }
        };
        match connection.producer.init_transactions(wait) {
            Ok(()) => {
                self.initialised = true;
                Ok(())
            }
            Err(error) => {
                let setback = self.setback("initialising", error);
                if setback.remedy != Remedy::Retry {
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
    /// A [`Setback`]: everything that was in the transaction has to be read again from the committed
    /// offsets. After [`Remedy::Abort`] the producer is ready at once, else [`Transactions::recover`] it.
    pub fn write<'a>(
        &mut self,
        outputs: impl Iterator<Item = &'a Output>,
        offsets: &TopicPartitionList,
        group: impl FnOnce() -> Option<ConsumerGroupMetadata>,
    ) -> Result<(), Setback> {
        let deadline = Instant::now() + self.timeout;
        let result = self.attempt(outputs, offsets, group, deadline);
        let Err((step, error)) = result else { return Ok(()) };
        let mut setback = self.setback(step, error);
        if setback.remedy == Remedy::Abort {
            match self.abort() {
                Ok(()) => return Err(setback),
                Err(error) if remedy(&error) == Remedy::Fenced => setback.remedy = Remedy::Fenced,
                Err(error) => {
                    tracing::debug!(id = self.id, %error, "aborting failed; the producer is replaced");
                    setback.remedy = Remedy::Rebuild;
                }
            }
        }
        self.discard();
        Err(setback)
    }

    fn attempt<'a>(
        &mut self,
        outputs: impl Iterator<Item = &'a Output>,
        offsets: &TopicPartitionList,
        group: impl FnOnce() -> Option<ConsumerGroupMetadata>,
        deadline: Instant,
    ) -> Result<(), (&'static str, KafkaError)> {
        let Connection {
            producer,
            offsets: offset_sender,
        } = self
            .connection
            .as_mut()
            .ok_or(("beginning", KafkaError::Canceled))?;
        let deliveries = producer.client().context();
        let number = deliveries.begin();
        producer
            .begin_transaction()
            .map_err(|error| ("beginning", error))?;
        fault::point("begin");
        let mut sent = 0;
        for output in outputs {
            send(producer, output, number, deadline).map_err(|error| ("producing", error))?;
            sent += 1;
        }
        deliveries.wait_for(sent, deadline);
        fault::point("produce");
        // Everything is delivered by now; the client only has to notice. One millisecond at a time, since
        // a flush with work left polls in slices of up to its timeout.
        until(deadline, || producer.flush(Duration::from_millis(1))).map_err(|error| ("flushing", error))?;
        if let Some(error) = deliveries.failure() {
            return Err(("delivering", error));
        }
        let group = group().ok_or(("asking for the group", KafkaError::Canceled))?;
        offset_sender
            .send(offsets.clone(), group, deadline)
            .map_err(|error| ("adding offsets", error))?;
        fault::point("offsets");
        until(deadline, || producer.commit_transaction(CALL)).map_err(|error| ("committing", error))?;
        fault::point("commit");
        Ok(())
    }

    fn abort(&self) -> Result<(), KafkaError> {
        let Connection { producer, .. } = self.connection.as_ref().ok_or(KafkaError::Canceled)?;
        // Aborting while the very first request is under way can make the producer unusable (librdkafka
        // issue 4849), so one answer is waited for.
        producer
            .client()
            .context()
            .wait_for(1, Instant::now() + Duration::from_secs(1));
        until(Instant::now() + self.timeout, || producer.abort_transaction(CALL))
    }

    /// Drops the producer; [`Transactions::recover`] makes a new one.
    pub(crate) fn discard(&mut self) {
        self.initialised = false;
        self.connection = None;
    }

    fn setback(&self, step: &'static str, source: KafkaError) -> Setback {
        Setback {
            remedy: remedy(&source),
            id: self.id.clone(),
            step,
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
            Err(error) if remedy(&error) == Remedy::Retry && Instant::now() < deadline => {
                if !matches!(error, KafkaError::Flush(_)) {
                    thread::park_timeout(PAUSE);
                }
            }
            result => return result,
        }
    }
}

fn send(
    producer: &ThreadedProducer<Deliveries>,
    output: &Output,
    transaction: usize,
    deadline: Instant,
) -> Result<(), KafkaError> {
    let mut record = BaseRecord::<[u8], [u8], usize>::with_opaque_to(&output.topic, transaction);
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
                if remedy(&error) != Remedy::Retry || Instant::now() >= deadline {
                    return Err(error);
                }
                record = back;
                thread::park_timeout(Duration::from_millis(1));
            }
        }
    }
}

/// Counts delivery reports, which arrive on the producer's own thread, and wakes the lane's. Every record
/// carries the number of its transaction: reports of an aborted one may arrive during the next.
struct Deliveries {
    transaction: AtomicUsize,
    waiting: std::sync::Mutex<Option<Thread>>,
    reported: AtomicUsize,
    awaited: AtomicUsize,
    failed: AtomicBool,
    first_failure: std::sync::Mutex<Option<KafkaError>>,
    changelog: Option<Arc<str>>,
    changelog_ends: std::sync::Mutex<Vec<(i32, i64)>>,
    log: ClientLog,
}

impl Deliveries {
    fn new(changelog: Option<Arc<str>>) -> Self {
        Self {
            changelog,
            changelog_ends: std::sync::Mutex::default(),
            transaction: AtomicUsize::new(0),
            waiting: std::sync::Mutex::new(None),
            reported: AtomicUsize::new(0),
            awaited: AtomicUsize::new(usize::MAX),
            failed: AtomicBool::new(false),
            first_failure: std::sync::Mutex::new(None),
            log: ClientLog::default(),
        }
    }

    fn begin(&self) -> usize {
        let number = self.transaction.fetch_add(1, Ordering::SeqCst) + 1;
        self.reported.store(0, Ordering::SeqCst);
        self.awaited.store(usize::MAX, Ordering::SeqCst);
        self.failed.store(false, Ordering::SeqCst);
        *lock(&self.first_failure) = None;
        lock(&self.changelog_ends).clear();
        number
    }

    /// Waits until that many deliveries have been reported, one has failed, or the deadline passes.
    fn wait_for(&self, count: usize, deadline: Instant) {
        *lock(&self.waiting) = Some(thread::current());
        self.awaited.store(count, Ordering::SeqCst);
        while self.reported.load(Ordering::SeqCst) < count && !self.failed.load(Ordering::SeqCst) {
            let now = Instant::now();
            if now >= deadline {
                break;
            }
            thread::park_timeout(deadline - now);
        }
        self.awaited.store(usize::MAX, Ordering::SeqCst);
    }

    fn failure(&self) -> Option<KafkaError> {
        lock(&self.first_failure).clone()
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

    fn delivery(&self, result: &DeliveryResult<'_>, transaction: usize) {
        if transaction != self.transaction.load(Ordering::SeqCst) {
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
                lock(&self.first_failure).get_or_insert_with(|| error.clone());
                self.failed.store(true, Ordering::SeqCst);
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
