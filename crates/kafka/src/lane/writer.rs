//! Writes transactions on a separate thread, so that the lane admits records meanwhile.
//!
//! A transaction waits for several round trips to the broker. Copying and parsing the next records in that time costs no
//! throughput. The lane serves no events until the transaction has ended, so it keeps its partitions. Only at the end of the
//! grace period does it leave the group without waiting. The broker then refuses the offsets of a transaction that has not
//! sent them, and holds back those of one that has, until its outcome is certain.

use std::cell::Cell;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::ConsumerGroupMetadata;
use redeliver_core::Output;

use crate::processor::Waker;
use crate::transaction::{Alternating, TransactionError};

struct Write {
    outputs: Vec<Output>,
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
                    offsets,
                    member,
                } = write;
                let mut transactions = lock(&shared);
                let result = transactions.write(&outputs, &offsets, member.as_ref());
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
        offsets: TopicPartitionList,
        member: Option<Arc<ConsumerGroupMetadata>>,
    ) -> Result<(), Disconnected> {
        let write = Write {
            outputs,
            offsets,
            member,
        };
        let writes = self.writes.as_ref().ok_or(Disconnected)?;
        writes.send(write).map_err(|_| Disconnected)?;
        self.is_writing.set(true);
        Ok(())
    }

    /// Waits for the end of the transaction that is being written, and forgets its result.
    ///
    /// # Errors
    /// If the thread has panicked.
    pub(super) fn finish(&self) -> Result<(), Disconnected> {
        if self.is_writing.get() {
            self.written.recv().map_err(|_| Disconnected)?;
            self.is_writing.set(false);
        }
        Ok(())
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
        // A lane stops within a transaction only at the end of its grace period, so nothing waits for the transaction.
        if let Some(thread) = self.thread.take().filter(|_| !self.is_writing.get()) {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
