//! Delivers the outcomes of commands to the requests that wait for them. The shard writes an outcome to the answers topic
//! in the transaction that decides the command.
//!
//! Every process follows the whole answers topic from its end, and picks out its own answers: the key of an answer is the
//! token of the process and the number of the request.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redeliver_core::Record;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::follow::{Follower, Origin};
use redeliver_kafka::reader::ReadError;
use redeliver_proto::{Message as _, v1};
use redeliver_runtime::error_chain::error_chain;
use redeliver_runtime::health::Part;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

/// The maximum number of requests that wait at the same time.
const MAX_WAITING: usize = 20_000;
/// How often the thread checks whether it must stop.
const POLL: Duration = Duration::from_millis(100);
/// The time between two attempts to follow the topic.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// The requests of this process that wait for outcomes. Clones share them.
#[derive(Clone)]
pub(crate) struct PendingOutcomes(Arc<Shared>);

struct Shared {
    token: u64,
    callers: Mutex<Callers>,
    /// Notified when no request is registered any more.
    idle: Notify,
}

#[derive(Default)]
struct Callers {
    /// Whether an outcome that is written now will arrive.
    is_following: bool,
    /// Whether the process is shutting down.
    is_closed: bool,
    next: u64,
    /// `None` once the outcome has been delivered.
    senders: HashMap<u64, Option<oneshot::Sender<v1::CommandOutcome>>>,
}

/// Why a request cannot wait for an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CannotWait {
    /// The maximum number of requests wait already.
    #[error("{MAX_WAITING} requests are waiting for outcomes, which is the maximum")]
    TooMany,
    /// The answers topic cannot be read now, so the outcome could be missed.
    #[error("the scheduler cannot read outcomes from the answers topic at the moment")]
    NotFollowing,
    /// The process is shutting down.
    #[error("this scheduler is shutting down")]
    ShuttingDown,
}

/// A registered request. Dropping it ends the registration.
pub(crate) struct PendingOutcome {
    outcomes: PendingOutcomes,
    number: u64,
    receiver: oneshot::Receiver<v1::CommandOutcome>,
}

impl PendingOutcomes {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Shared {
            token: fastrand::u64(..),
            callers: Mutex::default(),
            idle: Notify::new(),
        }))
    }

    /// Registers a request that waits for its outcome. The command must be written afterwards, with
    /// [`PendingOutcome::answer_to`].
    pub(crate) fn register(&self) -> Result<PendingOutcome, CannotWait> {
        self.add(true)
    }

    /// Registers a request that waits only until its command is written.
    pub(crate) fn register_write(&self) -> Result<PendingOutcome, CannotWait> {
        self.add(false)
    }

    fn add(&self, needs_outcome: bool) -> Result<PendingOutcome, CannotWait> {
        let mut callers = self.callers();
        if callers.is_closed {
            return Err(CannotWait::ShuttingDown);
        }
        if needs_outcome && !callers.is_following {
            return Err(CannotWait::NotFollowing);
        }
        if callers.senders.len() >= MAX_WAITING {
            return Err(CannotWait::TooMany);
        }
        let (sender, receiver) = oneshot::channel();
        let number = callers.next;
        callers.next += 1;
        callers.senders.insert(number, Some(sender));
        Ok(PendingOutcome {
            outcomes: self.clone(),
            number,
            receiver,
        })
    }

    /// Refuses requests from now on, and waits until those that are registered have ended.
    pub(crate) async fn close(&self) {
        self.callers().is_closed = true;
        loop {
            let idle = self.0.idle.notified();
            if self.callers().senders.is_empty() {
                return;
            }
            idle.await;
        }
    }

    /// Delivers an answer to the request that waits for it, if it is one of this process.
    fn deliver(&self, record: &Record) {
        let Some(sender) = record.key.as_deref().and_then(|name| self.take_sender(name)) else {
            return;
        };
        let Some(outcome) = record.value.clone().map(v1::CommandOutcome::decode) else {
            return;
        };
        match outcome {
            // Fails if the request has just stopped waiting.
            Ok(outcome) => drop(sender.send(outcome)),
            Err(error) => {
                tracing::error!(position = %record.position, %error, "invalid record in the answers topic");
            }
        }
    }

    fn take_sender(&self, name: &[u8]) -> Option<oneshot::Sender<v1::CommandOutcome>> {
        let (token, number) = std::str::from_utf8(name).ok()?.split_once('-')?;
        if u64::from_str_radix(token, 16) != Ok(self.0.token) {
            return None;
        }
        let number = u64::from_str_radix(number, 16).ok()?;
        self.callers().senders.get_mut(&number)?.take()
    }

    fn callers(&self) -> MutexGuard<'_, Callers> {
        self.0.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the answers topic until `stop`, on the caller's thread. `part` is ready, and `started` fires, once the
    /// position in the topic is known. A command that is written earlier could miss its outcome.
    pub(crate) fn follow(
        &self,
        kafka: &KafkaSettings,
        topic: &Arc<str>,
        part: &Part,
        started: oneshot::Sender<()>,
        stop: &CancellationToken,
    ) {
        let mut started = Some(started);
        while !stop.is_cancelled() {
            let following = Follower::of_topics(kafka, std::slice::from_ref(topic), Origin::End);
            let mut follower = match following {
                Ok(follower) => follower,
                Err(error) => {
                    report_error(part, &error);
                    std::thread::park_timeout(RETRY_DELAY);
                    continue;
                }
            };
            self.callers().is_following = true;
            part.ready();
            if let Some(started) = started.take() {
                // The receiver is gone if the process is shutting down.
                let _ = started.send(());
            }
            let delivered = self.deliver_all(&mut follower, stop);
            self.callers().is_following = false;
            if let Err(error) = delivered {
                // Answers that arrive before the topic is followed again are lost. Their requests time out as pending.
                report_error(part, &error);
                std::thread::park_timeout(RETRY_DELAY);
            }
        }
    }

    fn deliver_all(&self, follower: &mut Follower, stop: &CancellationToken) -> Result<(), ReadError> {
        while !stop.is_cancelled() {
            if let Some(record) = follower.next(POLL)? {
                self.deliver(&record);
            }
        }
        Ok(())
    }
}

fn report_error(part: &Part, error: &ReadError) {
    let reason = error_chain(error);
    tracing::warn!(reason, "cannot follow the answers topic; retrying");
    part.not_ready(reason);
}

impl PendingOutcome {
    /// The value for the field `answer_to` of the command.
    pub(crate) fn answer_to(&self) -> String {
        format!("{:016x}-{:x}", self.outcomes.0.token, self.number)
    }

    /// Waits for the outcome, forever if there is none.
    pub(crate) async fn outcome(&mut self) -> v1::CommandOutcome {
        match (&mut self.receiver).await {
            Ok(outcome) => outcome,
            // The answer was invalid.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for PendingOutcome {
    fn drop(&mut self) {
        let mut callers = self.outcomes.callers();
        callers.senders.remove(&self.number);
        if callers.senders.is_empty() {
            self.outcomes.0.idle.notify_waiters();
        }
    }
}

impl fmt::Debug for PendingOutcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingOutcomes")
            .field("callers", &self.callers().senders.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use redeliver_testkit::record;

    use super::*;

    fn answer(name: &str, reason: &str) -> Record {
        let outcome = v1::CommandOutcome {
            reason: reason.to_owned(),
            ..v1::CommandOutcome::default()
        };
        record(name, Some(outcome.encode_to_vec().into()))
    }

    fn following() -> PendingOutcomes {
        let outcomes = PendingOutcomes::new();
        outcomes.callers().is_following = true;
        outcomes
    }

    #[test]
    fn requests_wait_only_while_following() {
        let outcomes = PendingOutcomes::new();
        assert_eq!(outcomes.register().err(), Some(CannotWait::NotFollowing));
        assert!(outcomes.register_write().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn closing_waits_for_registered_requests() {
        let outcomes = following();
        let (waits, writes) = (outcomes.register().unwrap(), outcomes.register_write().unwrap());
        let close = async {
            outcomes.close().await;
            assert!(outcomes.callers().senders.is_empty());
        };
        let requests = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert_eq!(outcomes.register().err(), Some(CannotWait::ShuttingDown));
            assert_eq!(outcomes.register_write().err(), Some(CannotWait::ShuttingDown));
            outcomes.deliver(&answer(&waits.answer_to(), "last"));
            drop(writes);
            tokio::time::sleep(Duration::from_secs(1)).await;
            // The request has its outcome, and has not ended yet.
            assert_eq!(outcomes.callers().senders.len(), 1);
            drop(waits);
        };
        tokio::join!(close, requests);
    }

    #[tokio::test]
    async fn each_request_gets_its_own_outcome() {
        let (outcomes, other_process) = (following(), following());
        let mut first = outcomes.register().unwrap();
        let mut second = outcomes.register().unwrap();
        let foreign = other_process.register().unwrap();
        outcomes.deliver(&answer(&foreign.answer_to(), "foreign"));
        outcomes.deliver(&answer(&second.answer_to(), "second"));
        outcomes.deliver(&answer(&first.answer_to(), "first"));
        assert_eq!(first.outcome().await.reason, "first");
        assert_eq!(second.outcome().await.reason, "second");
    }

    #[test]
    fn dropped_registration_makes_room() {
        let outcomes = following();
        let registered: Vec<PendingOutcome> =
            (0..MAX_WAITING).map(|_| outcomes.register().unwrap()).collect();
        assert_eq!(outcomes.register().err(), Some(CannotWait::TooMany));
        let name = registered[0].answer_to();
        drop(registered);
        assert!(outcomes.callers().senders.is_empty());
        // A late answer is ignored.
        outcomes.deliver(&answer(&name, "late"));
        assert!(outcomes.register().is_ok());
    }

    #[test]
    fn foreign_and_invalid_answers_are_ignored() {
        let outcomes = following();
        let pending = outcomes.register().unwrap();
        let token = pending.answer_to().split_once('-').unwrap().0.to_owned();
        for name in [
            "",
            "-",
            "x-0",
            "0",
            &token,
            &format!("{token}-"),
            &format!("{token}-zz"),
        ] {
            outcomes.deliver(&answer(name, "no"));
        }
        let mut empty = answer("", "");
        empty.key = None;
        outcomes.deliver(&empty);
        assert_eq!(outcomes.callers().senders.len(), 1);
    }
}
