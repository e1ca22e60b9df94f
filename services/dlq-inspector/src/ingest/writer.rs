//! The thread that writes the index.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use redeliver_core::Clock;
use redeliver_runtime::health::Part;

use crate::index::{Change, IndexError, Writer};
use crate::metrics::Metrics;
use crate::shared::SharedState;

/// A message from the reader. The order of messages is significant.
#[derive(Debug)]
pub(crate) enum Work {
    /// Changes of the index, which are applied in one transaction.
    Changes {
        /// The number of the batch; numbers increase by 1.
        batch: u64,
        changes: Vec<Change>,
    },
    /// The reader has sent everything that existed at the start.
    CaughtUp,
}

/// Maximum number of batches in one transaction.
const BATCHES_PER_TRANSACTION: usize = 8;

/// The thread that writes.
pub(crate) struct WriterThread {
    pub(crate) writer: Writer,
    pub(crate) work: Receiver<Work>,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) part: Part,
    pub(crate) metrics: Metrics,
}

impl WriterThread {
    /// Writes until the reader has stopped and everything that it sent is written.
    pub(crate) fn run(mut self) -> Result<(), IndexError> {
        let mut next = self.receive()?;
        while let Some(work) = next.take() {
            match work {
                Work::CaughtUp => {
                    tracing::info!("index caught up");
                    self.writer.remove_outdated();
                    self.shared.caught_up.send_replace(true);
                    self.part.ready();
                }
                Work::Changes {
                    mut batch,
                    mut changes,
                } => {
                    // Queued batches share a transaction, so that a backlog needs fewer commits.
                    for _ in 1..BATCHES_PER_TRANSACTION {
                        match self.work.try_recv() {
                            Ok(Work::Changes {
                                batch: later,
                                changes: more,
                            }) => {
                                batch = later;
                                changes.extend(more);
                            }
                            Ok(Work::CaughtUp) => {
                                next = Some(Work::CaughtUp);
                                break;
                            }
                            Err(_) => break,
                        }
                    }
                    self.write(batch, &changes)?;
                }
            }
            if next.is_none() {
                next = self.receive()?;
            }
        }
        Ok(())
    }

    /// Waits for work, and meanwhile removes what retention has deleted. At least one slice is removed before each work, so that
    /// a reader that is always ahead does not put it off. `None` if the reader has stopped.
    fn receive(&mut self) -> Result<Option<Work>, IndexError> {
        loop {
            if !self.remove_slice()? {
                return Ok(self.work.recv().ok());
            }
            match self.work.try_recv() {
                Ok(work) => return Ok(Some(work)),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Ok(None),
            }
        }
    }

    fn remove_slice(&mut self) -> Result<bool, IndexError> {
        let result = self.writer.remove_slice();
        result.map_err(|error| self.failed(error))
    }

    fn failed(&mut self, error: IndexError) -> IndexError {
        if error.is_damage() {
            tracing::error!("the index is damaged; it is rebuilt at the next start");
            self.writer.invalidate();
        }
        error
    }

    fn write(&mut self, batch: u64, changes: &[Change]) -> Result<(), IndexError> {
        let result = self.writer.apply(changes, self.clock.now());
        let last_row = result.map_err(|error| self.failed(error))?;
        let mut indexed: BTreeMap<&str, u64> = BTreeMap::new();
        for change in changes {
            if let Change::Letters(letters) = change {
                for letter in letters {
                    *indexed.entry(&letter.position.topic).or_default() += 1;
                }
            }
        }
        for (topic, count) in indexed {
            self.metrics.add_indexed(topic, count);
        }
        // Watchers and surveys use these to decide what the index reflects, so they change after the commit.
        self.shared.set_applied(batch);
        self.shared.last_row.send_if_modified(|last| {
            let grew = *last != last_row;
            *last = last_row;
            grew
        });
        Ok(())
    }
}
