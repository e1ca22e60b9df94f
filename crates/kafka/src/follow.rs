//! Follows partitions from given offsets, outside of any consumer group, as a read_committed consumer, and reports when
//! the current end of a partition is reached.
//!
//! Partitions can be added and removed at any time. An error of one partition does not stop the others.
//!
//! The client prefetches records into each queue. Their size is limited by the number of partitions, so that all queues together
//! have about the same size, however many there are.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use redeliver_core::Record;
use redeliver_core::error_chain::error_chain;
use redeliver_kafka_ffi::TopicId;

use crate::client::KafkaSettings;
use crate::credentials::Renewal;
use crate::processor::Waker;
pub use crate::reader::Event;
use crate::reader::{
    self, At, CALL, Judge, Partition, ReadError, Reader, TopicClient, Until, kafka, offsets, partition_count,
};
use crate::recovery::error_code;
use crate::shared_prefetch::SharedPrefetch;

/// A partition to follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: i32,
    /// The offset of the first record to read; `None`: the beginning, as of an offset that is out of range.
    pub from: Option<i64>,
}

/// Where topics are followed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From their beginnings.
    Beginning,
    /// From their current ends: all records that are written after the call, and possibly a few that were written during it.
    End,
}

/// Reads partitions from given offsets. All calls to read must come from one thread.
pub struct Follower {
    settings: KafkaSettings,
    reader: Reader,
    /// For the ids of topics. A broker answers the requests of a connection in their order, and the consumer's fetches wait for records. `None` until the first
    /// request.
    topics: Option<TopicClient>,
    /// The prefetch of the current client; `None` if the configuration sets it.
    prefetch: Option<SharedPrefetch>,
    waker: Waker,
    renewal: Renewal,
    /// The number of partitions that had their turn in this round.
    turns: usize,
    rounds: u64,
}

impl Follower {
    /// Creates a follower without partitions. `waker` ends a wait in [`Follower::poll`] early.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn new(settings: &KafkaSettings, waker: Waker) -> Result<Self, ReadError> {
        // For offsets that retention has deleted. If the topic was created again, the caller notices it by the offsets.
        Self::with(settings, waker, "earliest", judge)
    }

    /// As [`Follower::new`], but skips nothing: a partition without the given offset is refused, see [`is_out_of_range`], until it is followed from another one.
    ///
    /// # Errors
    /// If the client cannot be created from its configuration.
    pub fn strict(settings: &KafkaSettings, waker: Waker) -> Result<Self, ReadError> {
        Self::with(settings, waker, "error", judge)
    }

    fn with(settings: &KafkaSettings, waker: Waker, reset: &str, judge: Judge) -> Result<Self, ReadError> {
        let renewal = Renewal::new(settings, "follower");
        let mut config = settings.reader("read_committed");
        config.set("auto.offset.reset", reset);
        // The broker answers at once when there are records; without any, longer waits save requests. But while a request for idle partitions waits, full queues of
        // others are not filled again: with 100 ms, a table of the lake was read at a third of the rate. The embedded broker always waits.
        if !settings.properties.contains_key("fetch.wait.max.ms") && !settings.is_embedded {
            config.set("fetch.wait.max.ms", "20");
        }
        let prefetch = (!SharedPrefetch::is_configured(settings)).then(|| SharedPrefetch::of(1));
        if let Some(prefetch) = prefetch {
            prefetch.configure(&mut config);
        }
        Ok(Self {
            settings: settings.clone(),
            reader: Reader::new(config, judge, waker.clone())?,
            topics: None,
            prefetch,
            waker,
            renewal,
            turns: 0,
            rounds: 0,
        })
    }

    /// Creates a follower of all partitions of these topics, which fails at an offset that is out of range. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer or a topic is missing.
    pub fn of_topics(settings: &KafkaSettings, topics: &[Arc<str>], from: Origin) -> Result<Self, ReadError> {
        let mut follower = Self::with(settings, Waker::new(), "error", reader::judge)?;
        let consumer = follower.reader.consumer();
        let mut partitions = Vec::new();
        for topic in topics {
            partitions
                .extend((0..partition_count(consumer, topic)?).map(|partition| (topic.clone(), partition)));
        }
        // The ends are requested here: the client would look them up after this call has returned, and miss records.
        let ends = match from {
            Origin::Beginning => BTreeMap::new(),
            Origin::End => offsets(consumer, &partitions, At::End, Instant::now() + CALL)?,
        };
        let starts = partitions.into_iter().map(|key| Start {
            from: ends.get(&key).copied(),
            topic: key.0,
            partition: key.1,
        });
        follower.add(&starts.collect::<Vec<_>>())?;
        Ok(follower)
    }

    /// How many times each partition had its turn to return records, since the start.
    #[must_use]
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// The current ids of topics, see [`TopicClient::ids`]. Blocks.
    ///
    /// # Errors
    /// If the broker does not answer.
    pub fn topic_ids(
        &mut self,
        topics: &[&str],
    ) -> Result<BTreeMap<String, Result<TopicId, ReadError>>, ReadError> {
        // Also for a caller that repeats the request until it succeeds.
        if self.renewal.is_due() {
            self.renew_credentials()?;
        }
        let client = match self.topics.take() {
            Some(client) => client,
            None => TopicClient::new(&self.settings)?,
        };
        self.topics.insert(client).ids(topics)
    }

    /// Follows more partitions. A partition that is already followed continues from the given offset.
    ///
    /// # Errors
    /// If the client fails.
    pub fn add(&mut self, starts: &[Start]) -> Result<(), ReadError> {
        let is_again = |known: &Partition| {
            let mut starts = starts.iter();
            starts.any(|start| known.is(&start.topic, start.partition))
        };
        self.reader.remove(is_again)?;
        for start in starts {
            let mut partition = Partition::new(&start.topic, start.partition, start.from);
            partition.until = Some(Until::Never);
            self.reader.partitions.push(partition);
        }
        let prefetch = SharedPrefetch::of(self.reader.partitions.len());
        // The client stays if there are fewer partitions: each queue could have more memory, but needs none.
        if self.prefetch.is_some_and(|current| prefetch < current) {
            self.prefetch = Some(prefetch);
            prefetch.configure(&mut self.reader.config);
            return self.renew();
        }
        self.reader.open()
    }

    /// Stops following a topic.
    ///
    /// # Errors
    /// If the client fails.
    pub fn remove(&mut self, topic: &str) -> Result<(), ReadError> {
        self.reader.remove(|followed| *followed.topic == *topic)
    }

    /// Replaces the client and continues from the same offsets: after a restart of the broker, a fetch may hang forever.
    ///
    /// # Errors
    /// If the client fails.
    pub fn renew(&mut self) -> Result<(), ReadError> {
        let consumer = self.reader.connect()?;
        self.topics = None;
        self.reader.continue_with(consumer)
    }

    /// Replaces the client because credentials have changed. If there can be no new one, the previous one stays in use.
    fn renew_credentials(&mut self) -> Result<(), ReadError> {
        self.renewal.begin();
        match self.reader.connect() {
            Ok(consumer) => {
                self.topics = None;
                self.reader.continue_with(consumer)?;
                self.renewal.end();
            }
            Err(error) => {
                self.renewal.failed();
                tracing::warn!(
                    error = %error_chain(&error),
                    "cannot replace the consumer of a follower; retrying"
                );
            }
        }
        Ok(())
    }

    /// Visits events until the visitor breaks. If there are none, waits for up to `wait`. Events that were not visited
    /// follow with the next call.
    ///
    /// # Errors
    /// On a fatal error of the client.
    pub fn poll(
        &mut self,
        wait: Duration,
        visit: impl FnMut(Event) -> ControlFlow<()>,
    ) -> Result<(), ReadError> {
        self.waker.attach_current_thread();
        if self.renewal.is_due() {
            self.renew_credentials()?;
        }
        let polled = self.reader.poll(visit)?;
        self.turns += polled.turns;
        if self.turns >= self.reader.partitions.len() {
            self.turns = 0;
            self.rounds += 1;
        }
        if polled.is_idle {
            std::thread::park_timeout(wait);
        }
        Ok(())
    }

    /// The next record; `None` if none arrives within `wait`, or a little earlier.
    ///
    /// # Errors
    /// On a fatal error of the client, or if a partition cannot be read.
    pub fn next(&mut self, wait: Duration) -> Result<Option<Record>, ReadError> {
        let mut next = Ok(None);
        self.poll(wait, |event| {
            next = match event {
                Event::Record(record) => Ok(Some(record)),
                Event::End { .. } => return ControlFlow::Continue(()),
                Event::Refused { error, .. } => Err(kafka("polling")(KafkaError::MessageConsumption(error))),
            };
            ControlFlow::Break(())
        })?;
        next
    }
}

/// Whether a partition is refused because it does not have the offset from which it was to be followed.
#[must_use]
pub fn is_out_of_range(error: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    matches!(error, Code::OffsetOutOfRange | Code::AutoOffsetReset)
}

/// Whether an error concerns only its partition. Returns fatal errors. The client recovers from all others by itself.
fn judge(error: KafkaError) -> Result<Option<RDKafkaErrorCode>, ReadError> {
    use RDKafkaErrorCode as Code;
    match error_code(&error) {
        Some(Code::Fatal | Code::FencedInstanceId) => Err(kafka("polling")(error)),
        Some(
            code @ (Code::UnknownTopic
            | Code::UnknownPartition
            | Code::UnknownTopicOrPartition
            | Code::TopicAuthorizationFailed
            | Code::OffsetOutOfRange
            | Code::AutoOffsetReset
            | Code::InvalidTopic
            | Code::KafkaStorageError
            | Code::BadMessage),
        ) => Ok(Some(code)),
        _ => {
            tracing::debug!(%error, "consumer error");
            Ok(None)
        }
    }
}
