//! Reads waiting records beyond the look-ahead, by offset, for all lanes of the process, on a thread of its own.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redeliver_core::Position;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_kafka::lookup::{Found, Lookup};
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::{AssignmentId, KafkaSettings, Waker};
use tokio_util::sync::CancellationToken;

/// The maximum size of the records of an answer, in bytes. One record may exceed it.
const BYTES: usize = 2 << 20;
/// How many questions wait. A lane whose question has no room asks again later.
const QUEUED: usize = 64;
/// How long a question waits for its partition. All lanes of the process wait for it.
const TIMEOUT: Duration = Duration::from_secs(2);
/// A client that is not used for this long is dropped, so that it does not outlive its credentials.
const IDLE: Duration = Duration::from_secs(5);

/// What was found, by lane.
pub(crate) type Inbox = Arc<Mutex<Vec<Answer>>>;

/// What was found in a partition.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) assignment: AssignmentId,
    /// By offset, perhaps fewer than were asked for.
    pub(crate) found: Vec<(i64, Found)>,
}

/// Asks for records of a partition, in the order of their offsets.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) assignment: AssignmentId,
    pub(crate) positions: Vec<Position>,
    pub(crate) inbox: Inbox,
}

/// A question, and the lane that waits for the answer.
type Queued = (Question, Waker);

/// Answers questions until the process shuts down.
pub(crate) struct Lookups {
    kafka: KafkaSettings,
    questions: Receiver<Queued>,
    stop: CancellationToken,
}

impl Lookups {
    pub(crate) fn new(kafka: KafkaSettings, stop: CancellationToken) -> (Self, SyncSender<Queued>) {
        let (sender, questions) = sync_channel(QUEUED);
        let lookups = Self {
            kafka,
            questions,
            stop,
        };
        (lookups, sender)
    }

    pub(crate) fn run(self) {
        let (mut client, mut was_late, mut log) = (None, false, LogThrottle::default());
        while !self.stop.is_cancelled() {
            let (question, waker) = match self.questions.recv_timeout(IDLE) {
                Ok(queued) => queued,
                Err(RecvTimeoutError::Timeout) => {
                    client = None;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let found = self.find(&mut client, &question.positions);
            // A new client may need longer than the timeout. One that is late twice may hang.
            was_late = matches!(found, Err(ReadError::Late { .. })) && !was_late;
            let found = found.unwrap_or_else(|error| {
                if !was_late {
                    client = None;
                }
                if log.should_log() {
                    tracing::warn!(error = %error_chain(&error), "cannot look up waiting records; retrying");
                }
                // The lane asks again.
                Vec::new()
            });
            let offsets = question.positions.iter().map(|position| position.offset);
            let answer = Answer {
                assignment: question.assignment,
                found: offsets.zip(found).collect(),
            };
            question
                .inbox
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(answer);
            waker.wake();
        }
    }

    fn find(&self, client: &mut Option<Lookup>, positions: &[Position]) -> Result<Vec<Found>, ReadError> {
        let client = match client {
            Some(client) => client,
            None => client.insert(Lookup::new(&self.kafka)?),
        };
        client.find_within(positions, BYTES, TIMEOUT)
    }
}
