//! Adds offsets to transactions on a thread of its own, so that a call without an end can be left behind.
//!
//! `send_offsets_to_transaction` looks for the group's coordinator and does not give up: librdkafka 2.12 notes
//! the deadline of that search (`creq_ts_timeout` in `rdkafka_coord.c`) and never looks at it. A broker that
//! goes away between a transaction's records and its offsets would hold up a lane until it is back, and beyond
//! that when the search runs out of retries.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::ConsumerGroupMetadata;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{Producer as _, ProducerContext, ThreadedProducer};

use super::{CALL, until};

struct Request {
    offsets: TopicPartitionList,
    group: ConsumerGroupMetadata,
    deadline: Instant,
}

/// The thread and the way to it. After a call that did not end it must not be used again; the thread then lives
/// until the call ends, and keeps its producer alive. Whatever that call still writes meets the epoch of a newer
/// producer, or a transaction that nobody commits.
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
        let (answers, results) = sync_channel(1);
        let thread = thread::Builder::new().name("offsets".to_owned()).spawn(move || {
            for request in received {
                let Request {
                    offsets,
                    group,
                    deadline,
                } = request;
                let send = || producer.send_offsets_to_transaction(&offsets, &group, CALL);
                if answers.send(until(deadline, send)).is_err() {
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

    /// Adds offsets to the open transaction.
    ///
    /// # Errors
    /// What the client says, or `OperationTimedOut` when it says nothing for a while after the deadline.
    pub(super) fn send(
        &mut self,
        offsets: TopicPartitionList,
        group: ConsumerGroupMetadata,
        deadline: Instant,
    ) -> Result<(), KafkaError> {
        let request = Request {
            offsets,
            group,
            deadline,
        };
        let requests = self.requests.as_ref().ok_or(KafkaError::Canceled)?;
        requests.send(request).map_err(|_| KafkaError::Canceled)?;
        let patience = deadline.saturating_duration_since(Instant::now()) + CALL;
        self.results.recv_timeout(patience).unwrap_or_else(|_| {
            self.thread = None;
            Err(KafkaError::ConsumerCommit(RDKafkaErrorCode::OperationTimedOut))
        })
    }
}

impl Drop for OffsetSender {
    fn drop(&mut self) {
        self.requests = None;
        // Not that of a call which did not end.
        if let Some(thread) = self.thread.take() {
            // A panic has shown itself already.
            let _ = thread.join();
        }
    }
}
