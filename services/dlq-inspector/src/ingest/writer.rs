//! The thread that writes the index.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use redeliver_runtime::health::Part;

use crate::index::{Change, IndexError, Writer};
use crate::metrics::Metrics;
use crate::shared::Shared;

/// What the reader hands over, in order.
#[derive(Debug)]
pub(crate) enum Work {
    /// Changes of the index, all or none of them.
    Changes {
        /// Growing by one.
        number: u64,
        /// In their order.
        changes: Vec<Change>,
    },
    /// All that was there at the start has been handed over.
    CaughtUp,
}

/// How many batches are written in one transaction at most.
const TRANSACTION: usize = 8;

/// What the thread works with.
pub(crate) struct WriterThread {
    pub(crate) writer: Writer,
    pub(crate) work: Receiver<Work>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) part: Part,
    pub(crate) metrics: Metrics,
}

impl WriterThread {
    /// Writes until the reader has ended and all is written.
    pub(crate) fn run(mut self) -> Result<(), IndexError> {
        let mut next = self.work.recv().ok();
        while let Some(work) = next.take() {
            match work {
                Work::CaughtUp => {
                    tracing::info!("the index has caught up");
                    self.shared.caught_up.send_replace(true);
                    self.part.ready();
                }
                Work::Changes {
                    mut number,
                    mut changes,
                } => {
                    // What has piled up meanwhile is written along.
                    for _ in 1..TRANSACTION {
                        match self.work.try_recv() {
                            Ok(Work::Changes {
                                number: later,
                                changes: more,
                            }) => {
                                number = later;
                                changes.extend(more);
                            }
                            Ok(Work::CaughtUp) => {
                                next = Some(Work::CaughtUp);
                                break;
                            }
                            Err(_) => break,
                        }
                    }
                    self.write(number, &changes)?;
                }
            }
            if next.is_none() {
                next = self.work.recv().ok();
            }
        }
        Ok(())
    }

    fn write(&mut self, number: u64, changes: &[Change]) -> Result<(), IndexError> {
        let last_row = match self.writer.apply(changes) {
            Ok(last_row) => last_row,
            Err(error) => {
                if error.is_damage() {
                    tracing::error!("the index is damaged and is built again at the next start");
                    self.writer.invalidate();
                }
                return Err(error);
            }
        };
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
        self.shared.set_applied(number);
        self.shared.last_row.send_if_modified(|last| {
            let grew = *last != last_row;
            *last = last_row;
            grew
        });
        Ok(())
    }
}
