//! Answers to commands: whoever wrote a command into the ingest topic waits here for its outcome, which comes
//! back through the answers topic once it is committed.
//!
//! Every process reads all of the answers topic from the moment it starts, and keeps what is its own: the key
//! of an answer is the process's token and the number of the question.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redeliver_core::Record;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::{ReadError, TopicTail};
use redeliver_proto::{Message as _, v1};
use redeliver_runtime::error_chain::error_chain;
use redeliver_runtime::health::Part;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// The most callers that wait at the same time.
const MAX_WAITING: usize = 20_000;
/// How soon the thread sees that it is to end.
const POLL: Duration = Duration::from_millis(100);
/// How long it waits before it asks a broker again that did not answer.
const PAUSE: Duration = Duration::from_millis(500);

/// Those who wait. A cheap handle.
#[derive(Clone)]
pub(crate) struct Waiting(Arc<Shared>);

struct Shared {
    token: u64,
    callers: Mutex<Callers>,
}

#[derive(Default)]
struct Callers {
    next: u64,
    senders: HashMap<u64, oneshot::Sender<v1::CommandOutcome>>,
}

/// Too many wait already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{MAX_WAITING} callers wait for outcomes already")]
pub(crate) struct TooMany;

/// A place among those who wait; given up when it is dropped.
pub(crate) struct Place {
    waiting: Waiting,
    number: u64,
    receiver: oneshot::Receiver<v1::CommandOutcome>,
}

impl Waiting {
    /// Nobody waits yet.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Shared {
            token: fastrand::u64(..),
            callers: Mutex::default(),
        }))
    }

    /// Takes a place, before the command is written that [`Place::name`] goes with.
    pub(crate) fn take_place(&self) -> Result<Place, TooMany> {
        let mut callers = self.callers();
        if callers.senders.len() >= MAX_WAITING {
            return Err(TooMany);
        }
        let (sender, receiver) = oneshot::channel();
        let number = callers.next;
        callers.next += 1;
        callers.senders.insert(number, sender);
        Ok(Place {
            waiting: self.clone(),
            number,
            receiver,
        })
    }

    /// Passes an answer on, if somebody here waits for it.
    fn give(&self, record: &Record) {
        let Some(sender) = record.key.as_deref().and_then(|name| self.claim(name)) else {
            return;
        };
        let Some(outcome) = record.value.clone().map(v1::CommandOutcome::decode) else {
            return;
        };
        match outcome {
            // Whoever waited may have gone in this moment.
            Ok(outcome) => drop(sender.send(outcome)),
            Err(error) => {
                tracing::error!(position = %record.position, %error, "the answers topic holds something that is no answer");
            }
        }
    }

    fn claim(&self, name: &[u8]) -> Option<oneshot::Sender<v1::CommandOutcome>> {
        let (token, number) = std::str::from_utf8(name).ok()?.split_once('-')?;
        if u64::from_str_radix(token, 16) != Ok(self.0.token) {
            return None;
        }
        let number = u64::from_str_radix(number, 16).ok()?;
        self.callers().senders.remove(&number)
    }

    fn callers(&self) -> MutexGuard<'_, Callers> {
        self.0.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the answers topic until `shutdown`, on a thread of its own. `part` is ready from the moment on
    /// from which no answer is missed; until then nothing may be asked.
    pub(crate) fn follow(
        &self,
        kafka: &KafkaSettings,
        topic: &Arc<str>,
        part: &Part,
        started: oneshot::Sender<()>,
        shutdown: &CancellationToken,
    ) {
        let mut started = Some(started);
        while !shutdown.is_cancelled() {
            let mut tail = match TopicTail::from_end(kafka, std::slice::from_ref(topic)) {
                Ok(tail) => tail,
                Err(error) => {
                    tell(part, &error);
                    std::thread::park_timeout(PAUSE);
                    continue;
                }
            };
            part.ready();
            if let Some(started) = started.take() {
                // Nobody listens when the process is already ending.
                let _ = started.send(());
            }
            if let Err(error) = self.pass_on(&mut tail, shutdown) {
                // What is answered until there is a new tail is missed; its callers are told that they do not
                // know it.
                tell(part, &error);
                std::thread::park_timeout(PAUSE);
            }
        }
    }

    fn pass_on(&self, tail: &mut TopicTail, shutdown: &CancellationToken) -> Result<(), ReadError> {
        while !shutdown.is_cancelled() {
            if let Some(record) = tail.next(POLL)? {
                self.give(&record);
            }
        }
        Ok(())
    }
}

fn tell(part: &Part, error: &ReadError) {
    let reason = error_chain(error);
    tracing::warn!(reason, "the answers topic cannot be followed; trying again");
    part.not_ready(reason);
}

impl Place {
    /// What the command says of who waits.
    pub(crate) fn name(&self) -> String {
        format!("{:016x}-{:x}", self.waiting.0.token, self.number)
    }

    /// The outcome. Never ends when none comes.
    pub(crate) async fn outcome(&mut self) -> v1::CommandOutcome {
        match (&mut self.receiver).await {
            Ok(outcome) => outcome,
            // An answer that could not be read.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.waiting.callers().senders.remove(&self.number);
    }
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiting")
            .field("callers", &self.callers().senders.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use redeliver_core::{Headers, Position};

    use super::*;

    fn answer(name: &str, reason: &str) -> Record {
        let outcome = v1::CommandOutcome {
            reason: reason.to_owned(),
            ..v1::CommandOutcome::default()
        };
        Record {
            position: Position {
                topic: "answers".into(),
                partition: 0,
                offset: 0,
            },
            timestamp: None,
            key: Some(Bytes::copy_from_slice(name.as_bytes())),
            value: Some(outcome.encode_to_vec().into()),
            headers: Headers::new(),
            unreadable_headers: 0,
        }
    }

    #[tokio::test]
    async fn each_caller_gets_the_answer_to_its_own_question() {
        let (waiting, other_process) = (Waiting::new(), Waiting::new());
        let mut first = waiting.take_place().unwrap();
        let mut second = waiting.take_place().unwrap();
        let foreign = other_process.take_place().unwrap();
        waiting.give(&answer(&foreign.name(), "foreign"));
        waiting.give(&answer(&second.name(), "second"));
        waiting.give(&answer(&first.name(), "first"));
        assert_eq!(first.outcome().await.reason, "first");
        assert_eq!(second.outcome().await.reason, "second");
    }

    #[test]
    fn a_place_that_is_given_up_is_free_again() {
        let waiting = Waiting::new();
        let places: Vec<Place> = (0..MAX_WAITING).map(|_| waiting.take_place().unwrap()).collect();
        assert_eq!(waiting.take_place().err(), Some(TooMany));
        let name = places[0].name();
        drop(places);
        assert!(waiting.callers().senders.is_empty());
        // An answer that comes too late is nobody's.
        waiting.give(&answer(&name, "late"));
        assert!(waiting.take_place().is_ok());
    }

    #[test]
    fn what_is_no_answer_of_ours_is_passed_over() {
        let waiting = Waiting::new();
        let place = waiting.take_place().unwrap();
        let token = place.name().split_once('-').unwrap().0.to_owned();
        for name in [
            "",
            "-",
            "x-0",
            "0",
            &token,
            &format!("{token}-"),
            &format!("{token}-zz"),
        ] {
            waiting.give(&answer(name, "no"));
        }
        let mut empty = answer("", "");
        empty.key = None;
        waiting.give(&empty);
        assert_eq!(waiting.callers().senders.len(), 1);
    }
}
