//! Adds offsets to transactions on a separate thread, because the call may never return.
//!
//! `send_offsets_to_transaction` looks for the group's coordinator without a limit: librdkafka 2.12 stores the deadline of
//! that search (`creq_ts_timeout` in `rdkafka_coord.c`) but never checks it. A broker that becomes unavailable between a
//! transaction's records and its offsets would block the lane until it is back, or longer if the search runs out of
//! retries.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::ConsumerGroupMetadata;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{Producer as _, ProducerContext, ThreadedProducer};

use super::{CALL, retry_until};

/// How often a reason to give up is looked for.
const CHECK: Duration = Duration::from_millis(100);

struct Request {
    offsets: TopicPartitionList,
    member: Arc<ConsumerGroupMetadata>,
    deadline: Instant,
}

/// The thread, with channels to it. After a timeout it must not be used again. The thread then runs until the call returns,
/// and keeps its producer alive. That is safe: what the call still writes is fenced by the epoch of a newer producer, or
/// belongs to a transaction that is never committed.
pub(super) struct OffsetSender {
    /// `None` only while it is dropped.
    requests: Option<SyncSender<Request>>,
    results: Receiver<Result<(), KafkaError>>,
    thread: Option<JoinHandle<()>>,
}

impl OffsetSender {
    /// Starts the thread.
    pub(super) fn start<C: ProducerContext + 'static>(producer: ThreadedProducer<C>) -> io::Result<Self> {
        let (requests, received) = sync_channel::<Request>(1);
        let (sent, results) = sync_channel(1);
        let thread = thread::Builder::new().name("offsets".to_owned()).spawn(move || {
            for request in received {
                let Request {
                    offsets,
                    member,
                    deadline,
                } = request;
                let send = || producer.send_offsets_to_transaction(&offsets, &member, CALL);
                if sent.send(retry_until(deadline, send)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self {
            requests: Some(requests),
            results,
            thread: Some(thread),
        })
    }

    /// Begins to add offsets to the open transaction. [`OffsetSender::finish`] must be called before anything else is done
    /// with the transaction.
    ///
    /// # Errors
    /// If the thread has ended, or a call has not returned in time.
    pub(super) fn begin(
        &self,
        offsets: TopicPartitionList,
        member: Arc<ConsumerGroupMetadata>,
        deadline: Instant,
    ) -> Result<(), KafkaError> {
        let request = Request {
            offsets,
            member,
            deadline,
        };
        let requests = self.requests.as_ref().ok_or(KafkaError::Canceled)?;
        requests.send(request).map_err(|_| KafkaError::Canceled)
    }

    /// Waits until the offsets are added. `check` is called repeatedly for a reason to give up.
    ///
    /// # Errors
    /// The error of the client, that of `check`, or `OperationTimedOut` if the call does not return soon after the deadline.
    pub(super) fn finish(
        &mut self,
        deadline: Instant,
        check: impl Fn() -> Option<KafkaError>,
    ) -> Result<(), KafkaError> {
        // The thread stops retrying at the deadline, and its last call may take `CALL`.
        let until = deadline + CALL;
        let error = loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.results.recv_timeout(left.min(CHECK)) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                Err(_) => break KafkaError::ConsumerCommit(RDKafkaErrorCode::OperationTimedOut),
            }
            if let Some(error) = check() {
                break error;
            }
        };
        // This error makes the caller replace the producer.
        self.detach();
        Err(error)
    }

    /// Gives up a call that may never return: `drop` does not wait for it, and further requests are refused. The producer must be replaced.
    pub(super) fn detach(&mut self) {
        self.thread = None;
        self.requests = None;
    }
}

impl Drop for OffsetSender {
    fn drop(&mut self) {
        // Closing the channel ends the thread.
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}
