//! The loop of every service: consume, process, write results and offsets in one transaction.
//!
//! A lane is one OS thread that owns one consumer and two transactional producers, used alternately. Each partition has
//! its own queue, so that a partition that must wait does not block the others, and its own
//! [`OffsetTracker`](crate::tracker::OffsetTracker), so that records can complete in any order.
//!
//! `state` decides what to do next, without IO; `driver` does it and reports the result. A model test drives the same
//! state against a model of a broker.
//!
//! | module | content |
//! |---|---|
//! | `state` | the steps of a round, and what follows from failed transactions |
//! | `assignments` | the owned partitions, their positions, and what to commit |
//! | `driver` | carries out the steps; the only user of the clients |
//! | `membership`, `joining` | joining the group, and checking what it assigns |
//! | `topics` | topics that are deleted, created again, or grow |
//! | `positions` | lookups of committed positions in the background |
//! | `writer` | writes transactions in the background |
//! | `events` | what the consumer reports besides records |
//! | `backoff` | delays after failures |

mod assignments;
mod backoff;
mod driver;
mod events;
mod joining;
mod membership;
#[cfg(test)]
mod model;
mod positions;
mod state;
mod topics;
mod writer;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::error::KafkaError;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, SystemClock};
use tokio_util::sync::CancellationToken;

use crate::client::KafkaSettings;
use crate::credentials::Renewal;
use crate::processor::{Processor, Waker};
use crate::recovery::RecoveryAction;
use crate::topic_watch::TopicWatch;
use crate::transaction::{Alternating, ClientError};
use backoff::sleep_unless_stopped;
use driver::Driver;
use state::{FENCE_WINDOW, LaneState};
use writer::Writer;

/// What a lane reads, and the limits of one transaction.
#[derive(Clone, Debug)]
pub struct LaneSpec {
    /// Unique within the instance, such as `enricher-0`; part of the transactional id.
    pub name: String,
    /// The consumer group.
    pub group: String,
    /// The topics to subscribe to.
    pub topics: Vec<Arc<str>>,
    /// The approximate maximum number of records in one transaction.
    pub batch: usize,
    /// How long a stopping lane may take to finish the records in flight.
    pub grace: Duration,
    /// An output topic whose written end offsets are reported to [`Processor::changelog_written`].
    pub changelog: Option<Arc<str>>,
    /// What to do when one of the topics is deleted and created again.
    pub if_recreated: IfRecreated,
    /// What to do when other processes fence the lane repeatedly.
    pub if_fenced: IfFenced,
}

/// What a lane does when other processes fence it repeatedly, because they have the same instance name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IfFenced {
    /// Ends with [`LaneError::InstanceInUse`].
    #[default]
    End,
    /// Says so in the log, and tries again after a minute. For a process that has other work.
    TryAgain,
}

/// What a lane does when a topic that it reads is deleted and created again under the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IfRecreated {
    /// Reads the new topic from its beginning and drops the records of the old one that are in flight.
    #[default]
    ReadFromBeginning,
    /// Stops reading until the process is restarted, because other data refers to the topic's offsets.
    Halt,
}

/// Receives the state and the counts of a lane. All methods are called on the lane's thread.
pub trait LaneObserver: Send + Sync {
    /// The lane is ready.
    fn ready(&self) {}
    /// The lane is not ready, for this reason.
    fn waiting(&self, _reason: &str) {}
    /// A transaction with this many outputs and completed records was committed; it took this long.
    fn committed(&self, _outputs: usize, _completed: usize, _took: Duration) {}
    /// A transaction failed, and this is how the lane recovers.
    fn transaction_failed(&self, _action: RecoveryAction) {}
    /// The number of partitions that the lane owns now.
    fn assigned(&self, _partitions: usize) {}
    /// The partition admits no more records until the record at this offset completes; nearly all after it are complete.
    fn blocked(&self, _topic: &str, _partition: i32, _offset: i64) {}
    /// The number of incomplete records of an owned partition, unread ones included; `None` when the lane no longer
    /// owns the partition.
    fn lag(&self, _topic: &str, _partition: i32, _records: Option<u64>) {}
    /// The topic of a partition was deleted and created again; this many records of the old one were in flight and are
    /// dropped.
    fn recreated(&self, _topic: &str, _partition: i32, _in_flight: usize) {}
    /// This many offsets of a partition were deleted before they were read, for example by retention.
    fn deleted_unread(&self, _topic: &str, _partition: i32, _records: u64) {}
}

/// Ignores all of it.
impl LaneObserver for () {}

/// Why a lane cannot continue. Everything transient is retried instead.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// The Kafka client cannot be created from the configuration.
    #[error("kafka: cannot create the client of lane `{lane}`")]
    Misconfigured {
        /// The name of the lane.
        lane: String,
        /// The error of the client.
        source: ClientError,
    },
    /// The operating system cannot create a thread.
    #[error("cannot start a thread of lane `{lane}`")]
    Thread {
        /// The name of the lane.
        lane: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A thread of the lane has ended, after a panic that was reported.
    #[error("a thread of lane `{lane}` has ended: {thread}")]
    ThreadEnded {
        /// The name of the lane.
        lane: String,
        /// What the thread did.
        thread: &'static str,
    },
    /// Other processes repeatedly fenced the lane.
    #[error(
        "instance: another process runs lane `{lane}` under the same name `{instance}`; give each process its own `instance`"
    )]
    InstanceInUse {
        /// The name of the lane.
        lane: String,
        /// The configured instance.
        instance: String,
    },
}

/// The longest wait of a lane between two rounds of its loop.
const ROUND: Duration = Duration::from_millis(100);
/// Timeout of one call to the broker. Events, such as rebalances, are not served meanwhile.
const CALL: Duration = Duration::from_secs(1);

/// A lane, ready to run.
pub struct Lane<P> {
    client: LaneClient,
    state: LaneState<P>,
}

/// What the sessions of a lane share besides its state.
struct LaneClient {
    settings: KafkaSettings,
    spec: LaneSpec,
    waker: Waker,
    stop: CancellationToken,
    watch: TopicWatch,
    /// When to replace the clients because of changed credentials.
    renewal: Renewal,
    /// The group did not assign what the lane subscribed to, so the next session leaves the group before it joins.
    must_leave: bool,
    /// Consecutive sessions that ended because the group's assignment was not valid.
    rejoins: u32,
}

/// The dependencies of a lane, except its processor.
#[derive(Clone)]
pub struct LaneContext {
    /// Settings of the Kafka clients.
    pub settings: KafkaSettings,
    /// The clock that due times refer to.
    pub clock: Arc<dyn Clock>,
    /// Receives the state and the counts of the lane.
    pub observer: Arc<dyn LaneObserver>,
    /// Wakes the lane.
    pub waker: Waker,
    /// Shuts the lane down gracefully.
    pub stop: CancellationToken,
    /// Tells which topics exist.
    pub watch: TopicWatch,
}

impl LaneContext {
    /// A context with the system clock and a new waker.
    #[must_use]
    pub fn new(
        settings: KafkaSettings,
        observer: Arc<dyn LaneObserver>,
        watch: TopicWatch,
        stop: CancellationToken,
    ) -> Self {
        Self {
            settings,
            clock: Arc::new(SystemClock),
            observer,
            waker: Waker::new(),
            stop,
            watch,
        }
    }
}

impl<P: Processor> Lane<P> {
    /// Creates a lane. [`Lane::run`] runs it on the calling thread.
    pub fn new(context: LaneContext, spec: LaneSpec, processor: P) -> Self {
        let LaneContext {
            settings,
            clock,
            observer,
            waker,
            stop,
            watch,
        } = context;
        let state = LaneState::new(&spec, &settings, clock, observer, processor);
        let client = LaneClient {
            renewal: Renewal::new(&settings, &*spec.name),
            settings,
            spec,
            waker,
            stop,
            watch,
            must_leave: false,
            rejoins: 0,
        };
        Self { client, state }
    }

    /// Runs until the token is cancelled. Blocks the calling thread, which must not serve async tasks.
    ///
    /// # Errors
    /// Permanent errors only, see [`LaneError`]. An unreachable broker is retried.
    pub fn run(mut self) -> Result<(), LaneError> {
        let LaneClient { settings, spec, .. } = &self.client;
        self.client.waker.attach_current_thread();
        self.client
            .watch
            .watch(spec.topics.iter().cloned(), &self.client.waker);
        let id = format!("redeliver-{}-{}", settings.instance, spec.name);
        let transactions = Alternating::new(settings, &id, spec.changelog.as_ref(), &self.client.watch);
        let writer =
            Writer::start(transactions, self.client.waker.clone()).map_err(|error| LaneError::Thread {
                lane: spec.name.clone(),
                source: error,
            })?;
        let mut backoff = backoff::new();
        while !self.client.stop.is_cancelled() {
            let Err(ended) = self.session(&writer) else {
                break;
            };
            if self.state.has_committed {
                backoff.reset();
            }
            // Its result does not matter: the next session begins at the committed positions.
            let finished = writer.finish(&self.client.stop);
            let has_finished = finished.map_err(|_| LaneError::ThreadEnded {
                lane: self.client.spec.name.clone(),
                thread: TRANSACTIONS,
            })?;
            if !has_finished {
                // The next process resolves the transaction.
                return match ended {
                    Ended::Fatal(error) => self.client.fatal(error),
                    Ended::Broken(_) | Ended::Restart(_) | Ended::Halted(_) => Ok(()),
                };
            }
            // The old producer may have left a transaction open. Initialising a new one with the same transactional id
            // resolves it.
            writer.transactions().discard();
            let lane = &self.client.spec.name;
            match ended {
                Ended::Broken(error) => {
                    tracing::warn!(lane, error, "lane failed; restarting");
                    self.state.waiting("reconnecting");
                }
                Ended::Restart(reason) => {
                    tracing::info!(lane, reason, "restarting lane");
                    self.state.waiting(&reason);
                }
                Ended::Halted(reason) => self.halt(&reason),
                Ended::Fatal(error) => {
                    self.client.fatal(error)?;
                    self.back_off();
                }
            }
            sleep_unless_stopped(backoff.next_delay(), &self.client.stop);
        }
        Ok(())
    }

    /// Runs until the lane is told to stop, or has to begin again with new clients.
    fn session(&mut self, writer: &Writer) -> Result<(), Ended> {
        self.client.renewal.begin();
        // Before joining the group: while a transaction of the previous process is open, the coordinator does not answer
        // with the offsets that it may still commit.
        if !self.init_producers(writer)? {
            return Ok(());
        }
        let Self { client, state } = self;
        state.begin_session();
        let stop = client.stop.clone();
        let result = Driver::open(client, writer, state).and_then(|mut driver| {
            loop {
                // A lane that replaces its clients first finishes what it has begun, as one that stops.
                let is_stopping = stop.is_cancelled() || driver.lane.renewal.is_due();
                let step = state.next(Instant::now(), is_stopping)?;
                if !driver.execute(step, state)? {
                    return Ok(());
                }
            }
        });
        state.end_session();
        if stop.is_cancelled() {
            return result;
        }
        result.and(Err(replaced()))
    }

    /// Initialises the producers, which resolves transactions that an earlier process with these transactional ids left
    /// open. Returns false if the lane was told to stop meanwhile.
    fn init_producers(&mut self, writer: &Writer) -> Result<bool, Ended> {
        let mut backoff = backoff::new();
        let mut log_throttle = LogThrottle::default();
        loop {
            let recovered = writer.transactions().recover(CALL);
            let Err(error) = recovered else {
                return Ok(true);
            };
            let LaneClient {
                spec, settings, stop, ..
            } = &self.client;
            match error.action {
                RecoveryAction::Misconfigured => return Err(self.client.misconfigured(error.into_source())),
                RecoveryAction::Fenced => self.state.fenced(Instant::now())?,
                RecoveryAction::Retry | RecoveryAction::Abort | RecoveryAction::Rebuild => {}
            }
            self.state
                .waiting(&format!("Kafka not ready: {}", error_chain(&error)));
            if log_throttle.should_log() {
                tracing::warn!(
                    lane = spec.name, brokers = settings.brokers, error = %error_chain(&error),
                    "Kafka not ready; retrying"
                );
            }
            sleep_unless_stopped(backoff.next_delay(), stop);
            if stop.is_cancelled() {
                return Ok(false);
            }
            // The previous credentials may be the reason.
            if self.client.renewal.is_due() {
                return Err(replaced());
            }
        }
    }

    /// Lets the other process have the partitions for a while, until this one is no longer counted as fenced.
    fn back_off(&mut self) {
        let instance = &self.client.settings.instance;
        let reason = format!("another process has the same instance name `{instance}`");
        self.state.waiting(&reason);
        sleep_unless_stopped(FENCE_WINDOW, &self.client.stop);
    }

    /// Reads nothing and repeats the reason in the log until shutdown.
    fn halt(&mut self, reason: &str) {
        self.state.waiting(reason);
        // It has no clients.
        self.client.renewal = Renewal::default();
        let mut log_throttle = LogThrottle::default();
        while !self.client.stop.is_cancelled() {
            if log_throttle.should_log() {
                tracing::error!(lane = self.client.spec.name, reason, "lane halted");
            }
            thread::park_timeout(ROUND);
        }
    }
}

/// The lane ended its session to replace its clients.
fn replaced() -> Ended {
    Ended::Restart("replacing its clients, because credentials have changed".to_owned())
}

/// What the thread of the [`Writer`] does.
const TRANSACTIONS: &str = "transactions";

impl LaneClient {
    /// Whether the lane has to end because of this error.
    fn fatal(&self, error: LaneError) -> Result<(), LaneError> {
        match error {
            LaneError::InstanceInUse { .. } if self.spec.if_fenced == IfFenced::TryAgain => {
                let error = error_chain(&error);
                tracing::error!(error, "instance name is in use; retrying in 60 s");
                Ok(())
            }
            error => Err(error),
        }
    }

    fn thread_ended(&self, thread: &'static str) -> Ended {
        Ended::Fatal(LaneError::ThreadEnded {
            lane: self.spec.name.clone(),
            thread,
        })
    }

    fn misconfigured(&self, source: ClientError) -> Ended {
        Ended::Fatal(LaneError::Misconfigured {
            lane: self.spec.name.clone(),
            source,
        })
    }
}

/// Why a session ended.
#[derive(Debug)]
enum Ended {
    /// A client failed; a new session may succeed.
    Broken(String),
    /// The lane needs a new session, for a reason that is not an error.
    Restart(String),
    /// An operator has to act before the lane may continue.
    Halted(String),
    /// Retrying cannot help.
    Fatal(LaneError),
}

impl From<KafkaError> for Ended {
    fn from(error: KafkaError) -> Self {
        Self::Broken(error_chain(&error))
    }
}
