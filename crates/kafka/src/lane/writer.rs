//! Writes transactions on a separate thread, so that the lane admits records meanwhile.
//!
//! A transaction waits for several round trips to the broker. Copying and parsing the next records in that time costs no
//! throughput. The lane serves no events until the transaction has ended, so it keeps its partitions. Only at the end of the
//! grace period does it leave the group without waiting. The broker then refuses the offsets of a transaction that has not
//! sent them, and holds back those of one that has, until its outcome is certain.

use std::cell::Cell;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::ConsumerGroupMetadata;
use redeliver_core::Output;
use tokio_util::sync::CancellationToken;

use super::ROUND;
use crate::processor::{FollowUp, Waker};
use crate::transaction::{Alternating, TransactionError};

struct Write {
    outputs: Vec<Output>,
    follow_up: Option<FollowUp>,
    offsets: TopicPartitionList,
    member: Option<Arc<ConsumerGroupMetadata>>,
}

/// The thread has panicked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Disconnected;

/// A transaction that has ended.
pub(super) struct Written {
    /// The outputs that were passed in.
    pub(super) outputs: Vec<Output>,
    pub(super) result: Result<(), TransactionError>,
    /// See [`Transactions::take_changelog_ends`](crate::transaction::Transactions::take_changelog_ends).
    pub(super) changelog_ends: Vec<(i32, i64)>,
}

/// The thread, with channels to it.
pub(super) struct Writer {
    transactions: Arc<Mutex<Alternating>>,
    /// `None` only while this is dropped.
    writes: Option<SyncSender<Write>>,
    written: Receiver<Written>,
    thread: Option<JoinHandle<()>>,
    is_writing: Cell<bool>,
}

impl Writer {
    /// Starts the thread.
    pub(super) fn start(transactions: Alternating, waker: Waker) -> io::Result<Self> {
        let transactions = Arc::new(Mutex::new(transactions));
        let (writes, received) = sync_channel::<Write>(1);
        let (sender, written) = sync_channel(1);
        let shared = transactions.clone();
        let thread = thread::Builder::new().name("writer".to_owned()).spawn(move || {
            for write in received {
                let Write {
                    outputs,
                    follow_up,
                    offsets,
                    member,
                } = write;
                let mut transactions = lock(&shared);
                let result = transactions.write(&outputs, follow_up.as_ref(), &offsets, member.as_ref());
                let changelog_ends = transactions.take_changelog_ends();
                drop(transactions);
                let written = Written {
                    outputs,
                    result,
                    changelog_ends,
                };
                if sender.send(written).is_err() {
                    return;
                }
                waker.wake();
            }
        })?;
        Ok(Self {
            transactions,
            writes: Some(writes),
            written,
            thread: Some(thread),
            is_writing: Cell::new(false),
        })
    }

    /// The producers. Must not be called while a transaction is being written, as it would wait for its end.
    pub(super) fn transactions(&self) -> MutexGuard<'_, Alternating> {
        lock(&self.transactions)
    }

    /// Begins a transaction. The previous one must have ended.
    ///
    /// # Errors
    /// If the thread has panicked.
    pub(super) fn begin(
        &self,
        outputs: Vec<Output>,
        follow_up: Option<FollowUp>,
        offsets: TopicPartitionList,
        member: Option<Arc<ConsumerGroupMetadata>>,
    ) -> Result<(), Disconnected> {
        let write = Write {
            outputs,
            follow_up,
            offsets,
            member,
        };
        let writes = self.writes.as_ref().ok_or(Disconnected)?;
        writes.send(write).map_err(|_| Disconnected)?;
        self.is_writing.set(true);
        Ok(())
    }

    /// Waits for the end of the transaction that is being written, and forgets its result. Returns false if the lane was told
    /// to stop before it has ended.
    ///
    /// # Errors
    /// If the thread has panicked.
    pub(super) fn finish(&self, stop: &CancellationToken) -> Result<bool, Disconnected> {
        while self.is_writing.get() {
            match self.written.recv_timeout(ROUND) {
                Ok(_) => self.is_writing.set(false),
                Err(RecvTimeoutError::Timeout) if stop.is_cancelled() => return Ok(false),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Disconnected),
            }
        }
        Ok(true)
    }

    /// The transaction that has ended, if it has.
    ///
    /// # Errors
    /// If the thread has panicked.
    pub(super) fn take(&self) -> Result<Option<Written>, Disconnected> {
        match self.written.try_recv() {
            Ok(written) => {
                self.is_writing.set(false);
                Ok(Some(written))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(Disconnected),
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Closing the channel ends the thread.
        self.writes = None;
        // A lane stops within a transaction only at the end of its grace period, or if its session has failed, so nothing
        // waits for the transaction.
        if let Some(thread) = self.thread.take().filter(|_| !self.is_writing.get()) {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::KafkaSettings;
    use crate::topic_watch::TopicWatch;

    #[test]
    fn stopping_lane_abandons_hanging_transaction() {
        let settings = KafkaSettings::new("127.0.0.1:1", "test");
        let watch = TopicWatch::start(&settings).unwrap();
        let (sender, written) = sync_channel(1);
        // A transaction that has begun, as after `begin`.
        let writer = Writer {
            transactions: Arc::new(Mutex::new(Alternating::new(&settings, "test", None, &watch))),
            writes: None,
            written,
            thread: None,
            is_writing: Cell::new(true),
        };
        let stop = CancellationToken::new();
        stop.cancel();
        assert!(!writer.finish(&stop).unwrap());
        // The thread notices its end even if the lane stops.
        let ended = Written {
            outputs: Vec::new(),
            result: Ok(()),
            changelog_ends: Vec::new(),
        };
        sender.try_send(ended).ok().unwrap();
        assert!(writer.finish(&stop).unwrap());
        assert!(writer.finish(&stop).unwrap());
    }
}
