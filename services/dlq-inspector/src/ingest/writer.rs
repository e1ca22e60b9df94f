//! The thread that writes the index.
//!
//! It owns the index, and is the one that reacts to its failures. While the disk is full or another process holds a lock, it
//! tries again: the reader waits, and the API serves what the index contains. If a reader or the writer finds damage, it
//! replaces the index by an empty one, and the reader starts over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use redeliver_core::Clock;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_runtime::health::Part;
use tokio_util::sync::CancellationToken;

use crate::completeness::Completeness;
use crate::index::{Change, IndexError, Pool, Writer};
use crate::metrics::Metrics;
use crate::shared::SharedState;

/// A message from the reader. The order of messages is significant.
#[derive(Debug)]
pub(crate) struct Work {
    /// The build of the index that it was decided for. It is ignored if the index was rebuilt since.
    pub(crate) build: u64,
    pub(crate) message: Message,
}

#[derive(Debug)]
pub(crate) enum Message {
    /// Changes of the index, which are applied in one transaction.
    Changes {
        /// The number of the batch; numbers increase by 1.
        batch: u64,
        changes: Vec<Change>,
    },
    /// What the index contains once all changes before are applied.
    Completeness(Completeness),
}

/// Maximum number of batches in one transaction.
const BATCHES_PER_TRANSACTION: usize = 8;
/// Time after which an idle writer looks for damage that a reader has found.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The waits between two attempts to write.
const MIN_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Time after which a waiting writer checks whether the process is shutting down.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// The thread that writes.
pub(crate) struct WriterThread {
    pub(crate) writer: Writer,
    pub(crate) pool: Pool,
    pub(crate) work: Receiver<Work>,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) part: Part,
    pub(crate) metrics: Metrics,
    pub(crate) stop: CancellationToken,
    pub(crate) progress: Progress,
}

/// What the thread has done so far.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// The number of the last batch that was written.
    last_batch: u64,
    /// Whether former indexes were deleted, because this one is complete.
    has_removed_outdated: bool,
}

/// How an operation on the index ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome<T> {
    Done(T),
    /// The index was damaged and is empty now.
    Rebuilt,
    /// The process is shutting down. Changes that were not written are read again after the start.
    Stopped,
}

impl WriterThread {
    /// Writes until the reader has stopped and everything that it sent is written.
    pub(crate) fn run(mut self) -> Result<(), IndexError> {
        let mut next = None;
        loop {
            if self.pool.is_damaged() && self.rebuild()? == Outcome::Stopped {
                return Ok(());
            }
            let received = match next.take() {
                Some(work) => Ok(work),
                None => match self.remove_slice()? {
                    Outcome::Done(has_more) => self.receive(has_more),
                    Outcome::Rebuilt => continue,
                    Outcome::Stopped => return Ok(()),
                },
            };
            let work = match received {
                Ok(work) => work,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            if work.build != self.shared.build() {
                continue;
            }
            match work.message {
                Message::Completeness(completeness) => self.publish(completeness),
                Message::Changes {
                    mut batch,
                    mut changes,
                } => {
                    // Queued batches share a transaction, so that a backlog needs fewer commits.
                    for _ in 1..BATCHES_PER_TRANSACTION {
                        match self.work.try_recv() {
                            Ok(Work {
                                message:
                                    Message::Changes {
                                        batch: later,
                                        changes: more,
                                    },
                                ..
                            }) => {
                                batch = later;
                                changes.extend(more);
                            }
                            Ok(work) => {
                                next = Some(work);
                                break;
                            }
                            Err(_) => break,
                        }
                    }
                    if self.write(batch, &changes)? == Outcome::Stopped {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Waits for work, unless there is something to remove meanwhile. One slice is removed before each work, so that a reader that
    /// is always ahead does not put it off.
    fn receive(&self, has_more_to_remove: bool) -> Result<Work, RecvTimeoutError> {
        if !has_more_to_remove {
            return self.work.recv_timeout(CHECK_INTERVAL);
        }
        self.work.try_recv().map_err(|error| match error {
            TryRecvError::Empty => RecvTimeoutError::Timeout,
            TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
        })
    }

    /// Removes a slice of what is to be removed. Returns whether there is more.
    fn remove_slice(&mut self) -> Result<Outcome<bool>, IndexError> {
        let outcome = self.attempt(|thread| thread.writer.remove_slice())?;
        self.publish_applied();
        Ok(outcome)
    }

    /// As long as a topic is being removed, surveys see its former positions. What they conclude must count as older than the removal.
    fn publish_applied(&self) {
        if !self.writer.is_forgetting() {
            self.shared.set_applied(self.progress.last_batch);
        }
    }

    fn publish(&mut self, completeness: Completeness) {
        if !*self.shared.caught_up.borrow() && completeness.as_of.is_some() {
            tracing::info!("index caught up");
        }
        self.metrics
            .set_completeness(&completeness, self.shared.topics().keys());
        match completeness.missing.keys().next() {
            _ if completeness.as_of.is_none() => {}
            None => self.part.ready(),
            Some((topic, _)) => self.part.ready_but(format!(
                "{} partitions are missing in answers, such as one of {topic}",
                completeness.missing.len()
            )),
        }
        let is_complete = completeness.as_of.is_some() && completeness.missing.is_empty();
        if is_complete && !self.progress.has_removed_outdated {
            self.progress.has_removed_outdated = true;
            self.writer.remove_outdated();
        }
        self.shared.set_completeness(completeness);
    }

    /// Repeats an operation while it fails for now. If it finds damage, the index is rebuilt.
    fn attempt<T>(
        &mut self,
        mut operation: impl FnMut(&mut Self) -> Result<T, IndexError>,
    ) -> Result<Outcome<T>, IndexError> {
        let mut retries = Retries::default();
        loop {
            match operation(self) {
                Ok(done) => {
                    retries.end(self);
                    return Ok(Outcome::Done(done));
                }
                Err(error) if error.is_damage() => {
                    return Ok(match self.rebuild()? {
                        Outcome::Stopped => Outcome::Stopped,
                        Outcome::Done(()) | Outcome::Rebuilt => Outcome::Rebuilt,
                    });
                }
                Err(error) if error.is_temporary() => {
                    if !retries.wait(self, &error) {
                        return Ok(Outcome::Stopped);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn write(&mut self, batch: u64, changes: &[Change]) -> Result<Outcome<()>, IndexError> {
        let mut rest = changes;
        while !rest.is_empty() {
            match self.attempt(|thread| thread.writer.write(rest, thread.clock.now()))? {
                Outcome::Done(count) => rest = &rest[count..],
                Outcome::Rebuilt => return Ok(Outcome::Rebuilt),
                Outcome::Stopped => return Ok(Outcome::Stopped),
            }
            if rest.is_empty() {
                break;
            }
            // The rest waits for a removal.
            if self.stop.is_cancelled() {
                return Ok(Outcome::Stopped);
            }
            if self.pool.is_damaged() {
                return self.rebuild();
            }
            match self.remove_slice()? {
                Outcome::Done(_) => {}
                Outcome::Rebuilt => return Ok(Outcome::Rebuilt),
                Outcome::Stopped => return Ok(Outcome::Stopped),
            }
        }
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
        self.progress.last_batch = batch;
        self.publish_applied();
        let last_row = self.writer.last_sequence();
        self.shared.last_row.send_if_modified(|last| {
            let grew = *last != last_row;
            *last = last_row;
            grew
        });
        Ok(Outcome::Done(()))
    }

    /// Replaces the damaged index by an empty one. The reader notices that, and starts over.
    fn rebuild(&mut self) -> Result<Outcome<()>, IndexError> {
        tracing::error!("the index is damaged; rebuilding it from Kafka");
        self.metrics.add_rebuild();
        self.part.not_ready("the index was damaged; rebuilding it");
        self.shared.begin_build();
        let mut retries = Retries::default();
        loop {
            match self.writer.rebuild(&self.pool) {
                Ok(()) => break,
                Err(error) if error.is_temporary() => {
                    if !retries.wait(self, &error) {
                        return Ok(Outcome::Stopped);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        self.shared.last_row.send_replace(self.writer.last_sequence());
        Ok(Outcome::Rebuilt)
    }
}

/// Repeated attempts to write.
struct Retries {
    backoff: Backoff,
    log_throttle: LogThrottle,
    has_failed: bool,
}

impl Default for Retries {
    fn default() -> Self {
        Self {
            backoff: Backoff::new(MIN_WAIT, MAX_WAIT),
            log_throttle: LogThrottle::default(),
            has_failed: false,
        }
    }
}

impl Retries {
    /// Waits before the next attempt. The result is false if the process is shutting down.
    fn wait(&mut self, thread: &WriterThread, error: &IndexError) -> bool {
        self.has_failed = true;
        thread.metrics.add_write_error();
        if error.is_disk_full() {
            // Two indexes may not fit. The former one would only save time in a roll-back.
            thread.writer.remove_outdated();
        }
        let error = error_chain(error);
        let problem = format!("cannot write the index, retrying: {error}");
        if *thread.shared.caught_up.borrow() {
            thread.part.ready_but(problem);
        } else {
            thread.part.not_ready(problem);
        }
        if self.log_throttle.should_log() {
            tracing::error!(error, "cannot write the index; retrying");
        }
        let until = Instant::now() + self.backoff.next_delay();
        while !thread.stop.is_cancelled() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(STOP_INTERVAL));
        }
        false
    }

    fn end(&self, thread: &WriterThread) {
        if self.has_failed {
            tracing::info!("the index can be written again");
            if *thread.shared.caught_up.borrow() {
                // The next completeness says more.
                thread.part.ready();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use prometheus_client::registry::Registry;
    use redeliver_core::Timestamp;
    use redeliver_runtime::health::Health;
    use redeliver_testkit::eventually;

    use super::*;
    use crate::index::{self, FILE, Index};

    const DEADLINE: Duration = Duration::from_secs(60);

    fn position(next: i64) -> Message {
        Message::Changes {
            batch: 1,
            changes: vec![Change::Position {
                topic: "a-dlq".into(),
                partition: 0,
                next,
            }],
        }
    }

    fn caught_up() -> Message {
        Message::Completeness(Completeness {
            as_of: Some(Timestamp::from_millis(1)),
            ..Completeness::default()
        })
    }

    struct Running {
        work: std::sync::mpsc::SyncSender<Work>,
        pool: Pool,
        shared: Arc<SharedState>,
        health: Health,
        thread: std::thread::JoinHandle<Result<(), IndexError>>,
        stop: CancellationToken,
    }

    fn start(directory: &std::path::Path) -> Running {
        let Index { writer, pool, .. } = Index::open(directory, &[]).unwrap();
        let (sender, work) = sync_channel(4);
        let (shared, health) = (Arc::new(SharedState::new(0)), Health::new());
        let stop = CancellationToken::new();
        let thread = WriterThread {
            writer,
            pool: pool.clone(),
            work,
            shared: shared.clone(),
            clock: Arc::new(redeliver_core::SystemClock),
            part: health.part("dlq-index"),
            metrics: Metrics::register(&mut Registry::default()),
            stop: stop.clone(),
            progress: Progress::default(),
        };
        Running {
            work: sender,
            pool,
            shared,
            health,
            thread: std::thread::spawn(move || thread.run()),
            stop,
        }
    }

    impl Running {
        fn send(&self, message: Message) {
            let build = self.shared.build();
            self.work.send(Work { build, message }).unwrap();
        }

        fn until(&self, state: &str) {
            eventually(state, DEADLINE, || {
                let part = self.health.report().parts["dlq-index"].clone();
                if part.contains(state) { Ok(()) } else { Err(part) }
            });
        }

        fn position(&self) -> Option<i64> {
            let (positions, _) = self.pool.read_blocking(index::read_positions).unwrap();
            positions.first().map(|position| position.next)
        }

        fn end(self) {
            drop(self.work);
            self.thread.join().unwrap().unwrap();
        }
    }

    #[test]
    fn a_write_that_fails_for_now_is_repeated_until_it_succeeds() {
        let directory = tempfile::tempdir().unwrap();
        let running = start(directory.path());
        running.send(caught_up());
        running.until("ready");
        let other = rusqlite::Connection::open(directory.path().join(FILE)).unwrap();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        running.send(position(7));
        running.until("ready, but cannot write the index");
        assert_eq!(running.position(), None);
        other.execute_batch("COMMIT").unwrap();
        eventually("the change is written", DEADLINE, || {
            running.position().filter(|next| *next == 7).ok_or("not yet")
        });
        assert_eq!(running.health.report().parts["dlq-index"], "ready");
        running.end();
    }

    #[test]
    fn a_writer_that_waits_ends_with_the_process() {
        let directory = tempfile::tempdir().unwrap();
        let running = start(directory.path());
        let other = rusqlite::Connection::open(directory.path().join(FILE)).unwrap();
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        running.send(position(7));
        running.until("waiting: cannot write the index");
        running.stop.cancel();
        running.thread.join().unwrap().unwrap();
    }

    #[test]
    fn damage_that_a_query_finds_replaces_the_index() {
        let directory = tempfile::tempdir().unwrap();
        let running = start(directory.path());
        running.send(position(7));
        running.send(caught_up());
        running.until("ready");
        let old = Work {
            build: running.shared.build(),
            message: position(8),
        };
        let damage = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
        let failed = running
            .pool
            .read_blocking(|_| Err::<(), _>(rusqlite::Error::SqliteFailure(damage, None)));
        assert!(failed.is_err());
        running.until("the index was damaged");
        eventually("an empty index", DEADLINE, || match running.position() {
            None => Ok(()),
            Some(position) => Err(position),
        });
        assert!(!*running.shared.caught_up.borrow());
        // What was decided for the damaged index is void.
        running.work.send(old).unwrap();
        running.send(position(9));
        running.send(caught_up());
        running.until("ready");
        assert_eq!(running.position(), Some(9));
        running.end();
    }
}
