//! The thread that writes the index.
//!
//! It owns the index, and is the one that reacts to its failures. While the disk is full or another process holds a lock, it
//! tries again, also to open the index: the reader waits, and the API serves what the index contains. If a reader or the writer
//! finds damage, it replaces the index by an empty one, and the reader starts over.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

use redeliver_core::Clock;
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_runtime::health::Part;
use redeliver_store::Replica;
use tokio_util::sync::CancellationToken;

use super::Indexed;
use crate::completeness::{Completeness, Place, Reason};
use crate::fingerprint::GroupId;
use crate::group_states::GroupStates;
use crate::index::{Change, IndexError, Pool, Writer};
use crate::metrics::Metrics;
use crate::shared::SharedState;

/// A message from the reader. Their order is significant.
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
/// More new groups than this do not wait until the states of groups are known.
const MAX_NEW_GROUPS: usize = 100_000;
/// Time after which a waiting writer checks whether the process is shutting down.
const STOP_INTERVAL: Duration = Duration::from_millis(100);

/// The thread that writes.
pub(crate) struct WriterThread {
    pub(crate) directory: PathBuf,
    pub(crate) pool: Pool,
    pub(crate) work: Receiver<Work>,
    /// Receives what the index contains once it is open.
    pub(crate) opened: SyncSender<Indexed>,
    pub(crate) shared: Arc<SharedState>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) part: Part,
    pub(crate) metrics: Metrics,
    pub(crate) group_states: Replica<GroupStates>,
    pub(crate) stop: CancellationToken,
}

/// The thread, with an open index.
struct OpenIndex {
    thread: WriterThread,
    writer: Writer,
    /// Whether the index has contained everything once, also in an earlier process: a group that it does not have is new.
    has_caught_up: bool,
    /// The new groups that are not counted yet, because it is not known whether they are open.
    new_groups: Vec<GroupId>,
    /// The number of the last batch that was written.
    last_batch: u64,
    /// What the reader has sent last; `None` until then.
    completeness: Option<Completeness>,
    /// The places that were being removed when the completeness was published.
    removing: Vec<Place>,
    /// Whether previous indexes were deleted, because this one is complete.
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
    /// Opens the index, and writes until the reader has stopped and everything that it sent is written.
    pub(crate) fn run(self) -> Result<(), IndexError> {
        let Some((writer, indexed)) = self.open()? else {
            return Ok(());
        };
        if self.opened.send(indexed).is_err() {
            // The reader has stopped.
            return Ok(());
        }
        OpenIndex::new(self, writer)?.run()
    }

    /// Opens the index, and waits while that is not possible for now. `None` if the process is shutting down. The index is kept, and a
    /// process that ended instead would be started again and again.
    fn open(&self) -> Result<Option<(Writer, Indexed)>, IndexError> {
        let mut retries = Retries::new("cannot open the index");
        loop {
            match self.try_open() {
                Ok(opened) => return Ok(Some(opened)),
                Err(error) if error.can_be_opened_later() => {
                    if !retries.wait(self, &error) {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn try_open(&self) -> Result<(Writer, Indexed), IndexError> {
        let (writer, is_new) = Writer::open(&self.pool, &self.directory)?;
        let progress = writer.read_progress()?;
        let positions = progress.positions.into_iter();
        let positions = positions.map(|position| (position.topic, position.partition, position.next));
        let indexed = Indexed {
            positions: positions.collect(),
            ids: progress.topic_ids,
        };
        tracing::info!(
            index = if is_new { "new" } else { "existing" },
            data_dir = %self.directory.display(),
            "index opened"
        );
        Ok((writer, indexed))
    }
}

impl OpenIndex {
    fn new(thread: WriterThread, writer: Writer) -> Result<Self, IndexError> {
        Ok(Self {
            has_caught_up: writer.has_caught_up()?,
            thread,
            writer,
            new_groups: Vec::new(),
            last_batch: 0,
            completeness: None,
            removing: Vec::new(),
            has_removed_outdated: false,
        })
    }

    fn run(mut self) -> Result<(), IndexError> {
        let mut next = None;
        loop {
            if self.thread.pool.is_damaged() && self.rebuild()? == Outcome::Stopped {
                return Ok(());
            }
            // The states of groups may be known now.
            self.count_new_groups();
            // Before the message that is next, so that a small removal does not show in the completeness.
            let has_more = match self.remove_slice()? {
                Outcome::Done(has_more) => has_more,
                Outcome::Rebuilt => continue,
                Outcome::Stopped => return Ok(()),
            };
            let received = match next.take() {
                Some(work) => Ok(work),
                None => self.receive(has_more),
            };
            let work = match received {
                Ok(work) => work,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            if work.build != self.thread.shared.build() {
                continue;
            }
            match work.message {
                Message::Completeness(completeness) => {
                    self.completeness = Some(completeness);
                    self.publish();
                    if self.note_caught_up()? == Outcome::Stopped {
                        return Ok(());
                    }
                }
                Message::Changes {
                    mut batch,
                    mut changes,
                } => {
                    // Queued batches share a transaction, so that a backlog needs fewer commits.
                    for _ in 1..BATCHES_PER_TRANSACTION {
                        match self.thread.work.try_recv() {
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
            return self.thread.work.recv_timeout(CHECK_INTERVAL);
        }
        self.thread.work.try_recv().map_err(|error| match error {
            TryRecvError::Empty => RecvTimeoutError::Timeout,
            TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
        })
    }

    /// Removes a slice of what is to be removed. Returns whether there is more.
    fn remove_slice(&mut self) -> Result<Outcome<bool>, IndexError> {
        if self.writer.is_forgetting() {
            // A topic or a ledger of which only a part is left is like neither the previous nor the new one.
            self.publish_removing();
        }
        let outcome = self.attempt(|index| index.writer.remove_slice())?;
        self.publish_applied();
        self.publish_removing();
        Ok(outcome)
    }

    /// As long as a topic is being removed, surveys see its previous positions. What they conclude must count as older than the removal.
    fn publish_applied(&self) {
        if !self.writer.is_forgetting() {
            self.thread.shared.set_applied(self.last_batch);
        }
    }

    /// Remembers, also for later processes, that the index has contained everything once.
    fn note_caught_up(&mut self) -> Result<Outcome<()>, IndexError> {
        if self.has_caught_up || !*self.thread.shared.caught_up.borrow() {
            return Ok(Outcome::Done(()));
        }
        let outcome = self.attempt(|index| index.writer.set_caught_up())?;
        self.has_caught_up = outcome == Outcome::Done(());
        Ok(outcome)
    }

    /// Publishes the completeness again if other places are being removed than before.
    fn publish_removing(&mut self) {
        if !self.writer.removing().eq(self.removing.iter().cloned()) {
            self.publish();
        }
    }

    /// Publishes what the index contains. What is still to be removed is missing: an answer may contain it, or only a part of it.
    fn publish(&mut self) {
        let Some(mut completeness) = self.completeness.clone() else {
            return;
        };
        self.removing = self.writer.removing().collect();
        for place in &self.removing {
            completeness.missing.insert(place.clone(), Reason::NotRemoved);
        }
        let WriterThread {
            shared,
            part,
            metrics,
            ..
        } = &self.thread;
        if !*shared.caught_up.borrow() && completeness.as_of.is_some() {
            tracing::info!("index caught up");
        }
        metrics.set_completeness(&completeness, &shared.completeness(), shared.topics().keys());
        match completeness.missing.keys().next() {
            _ if completeness.as_of.is_none() => {}
            None => part.ready(),
            Some((topic, _)) => part.ready_but(format!(
                "{} partitions are missing in answers, such as one of {topic}",
                completeness.missing.len()
            )),
        }
        let is_complete = completeness.as_of.is_some() && completeness.missing.is_empty();
        if is_complete && !self.has_removed_outdated {
            self.has_removed_outdated = true;
            self.writer.remove_outdated();
        }
        shared.set_completeness(completeness);
    }

    /// Repeats an operation while it fails for now. If it finds damage, the index is rebuilt.
    fn attempt<T>(
        &mut self,
        mut operation: impl FnMut(&mut Self) -> Result<T, IndexError>,
    ) -> Result<Outcome<T>, IndexError> {
        let mut retries = Retries::new("cannot write the index");
        loop {
            match operation(self) {
                Ok(done) => {
                    retries.end(&self.thread);
                    return Ok(Outcome::Done(done));
                }
                Err(error) if error.is_damage() => {
                    return Ok(match self.rebuild()? {
                        Outcome::Stopped => Outcome::Stopped,
                        Outcome::Done(()) | Outcome::Rebuilt => Outcome::Rebuilt,
                    });
                }
                Err(error) if error.is_temporary() => {
                    if !retries.wait(&self.thread, &error) {
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
            match self.attempt(|index| index.writer.write(rest, index.thread.clock.now()))? {
                Outcome::Done(count) => rest = &rest[count..],
                Outcome::Rebuilt => return Ok(Outcome::Rebuilt),
                Outcome::Stopped => return Ok(Outcome::Stopped),
            }
            if rest.is_empty() {
                break;
            }
            // The rest waits for a removal.
            if self.thread.stop.is_cancelled() {
                return Ok(Outcome::Stopped);
            }
            if self.thread.pool.is_damaged() {
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
        for (topic, count) in &indexed {
            self.thread.metrics.add_indexed(topic, *count);
        }
        let groups = self.writer.take_new_groups();
        if self.has_caught_up {
            self.new_groups.extend(groups);
        }
        self.count_new_groups();
        // Watchers and surveys use these to decide what the index reflects, so they change after the commit.
        self.last_batch = batch;
        self.publish_applied();
        if !indexed.is_empty() {
            let commits = &self.thread.shared.commits;
            commits.send_modify(|commits| commits.add(indexed.keys().copied()));
        }
        Ok(Outcome::Done(()))
    }

    /// Counts the groups that are new, and not only new to an index that is being built, and that have no
    /// decision. They wait until that is known, which may be after the first batch of a process.
    fn count_new_groups(&mut self) {
        if self.new_groups.is_empty() {
            return;
        }
        let (states, now) = (self.thread.group_states.state(), self.thread.clock.now());
        let Some(states) = states.or_else(|| (self.new_groups.len() > MAX_NEW_GROUPS).then(Arc::default))
        else {
            return;
        };
        let groups = std::mem::take(&mut self.new_groups).into_iter();
        let count = groups.filter(|id| states.is_open(*id, now)).count();
        self.thread.metrics.add_new_groups(count as u64);
    }

    /// Replaces the damaged index by an empty one. The reader notices that, and starts over.
    fn rebuild(&mut self) -> Result<Outcome<()>, IndexError> {
        tracing::error!("index damaged; rebuilding it from Kafka");
        self.thread.metrics.add_rebuild();
        self.thread.part.not_ready("the index was damaged; rebuilding it");
        self.thread.shared.begin_build();
        let mut retries = Retries::new("cannot write the index");
        loop {
            match self.writer.rebuild(&self.thread.pool) {
                Ok(()) => break,
                Err(error) if error.is_temporary() => {
                    if !retries.wait(&self.thread, &error) {
                        return Ok(Outcome::Stopped);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        self.has_caught_up = false;
        self.completeness = None;
        self.removing.clear();
        // Watchers end with it.
        let commits = &self.thread.shared.commits;
        commits.send_modify(|commits| commits.add(std::iter::empty()));
        Ok(Outcome::Rebuilt)
    }
}

/// Repeated attempts.
struct Retries {
    problem: &'static str,
    backoff: Backoff,
    log_throttle: LogThrottle,
    has_failed: bool,
}

impl Retries {
    fn new(problem: &'static str) -> Self {
        Self {
            problem,
            backoff: Backoff::new(MIN_WAIT, MAX_WAIT),
            log_throttle: LogThrottle::default(),
            has_failed: false,
        }
    }

    /// Waits before the next attempt. The result is false if the process is shutting down.
    fn wait(&mut self, thread: &WriterThread, error: &IndexError) -> bool {
        self.has_failed = true;
        thread.metrics.add_write_error();
        if error.is_disk_full() {
            // Two indexes may not fit. The previous one would only save time in a roll-back.
            thread.pool.remove_outdated();
        }
        let full = if error.is_disk_full() {
            "the disk is full: "
        } else {
            ""
        };
        let error = format!("{full}{}", error_chain(error));
        let problem = format!("{}, retrying: {error}", self.problem);
        if *thread.shared.caught_up.borrow() {
            thread.part.ready_but(problem);
        } else {
            thread.part.not_ready(problem);
        }
        if self.log_throttle.should_log() {
            tracing::error!(error, "{}; retrying", self.problem);
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
            tracing::info!("index writable again");
            if *thread.shared.caught_up.borrow() {
                // The next completeness says more.
                thread.part.ready();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::sync_channel;

    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;
    use redeliver_core::{Record, Timestamp};
    use redeliver_runtime::health::Health;
    use redeliver_testkit::{eventually, record_at};

    use super::*;
    use crate::group_states::Decided;
    use crate::group_states::contents::tests as states;
    use crate::index::{self, FILE, Index};
    use crate::ledger;
    use crate::letter::Letter;

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
        work: SyncSender<Work>,
        opened: Receiver<Indexed>,
        pool: Pool,
        shared: Arc<SharedState>,
        health: Health,
        thread: std::thread::JoinHandle<Result<(), IndexError>>,
        stop: CancellationToken,
        registry: Registry,
    }

    /// Starts what `run` does with the thread.
    fn start_with(
        directory: &Path,
        run: impl FnOnce(WriterThread) -> Result<(), IndexError> + Send + 'static,
    ) -> Running {
        let (group_states, _) = Replica::fixed(Some(GroupStates::default()));
        start_with_states(directory, group_states, run)
    }

    fn start_with_states(
        directory: &Path,
        group_states: Replica<GroupStates>,
        run: impl FnOnce(WriterThread) -> Result<(), IndexError> + Send + 'static,
    ) -> Running {
        let mut registry = Registry::default();
        let (sender, work) = sync_channel(4);
        let (opened_sender, opened) = sync_channel(1);
        let (shared, health) = (Arc::new(SharedState::new()), Health::new());
        let (pool, stop) = (Pool::new(directory, &[]), CancellationToken::new());
        let thread = WriterThread {
            directory: directory.to_owned(),
            pool: pool.clone(),
            work,
            opened: opened_sender,
            shared: shared.clone(),
            clock: Arc::new(redeliver_core::SystemClock),
            part: health.part("dlq-index"),
            metrics: Metrics::register(&mut registry),
            group_states,
            stop: stop.clone(),
        };
        Running {
            work: sender,
            opened,
            pool,
            shared,
            health,
            thread: std::thread::spawn(move || run(thread)),
            stop,
            registry,
        }
    }

    fn start(directory: &Path) -> Running {
        let running = start_with(directory, WriterThread::run);
        running.opened.recv().unwrap();
        running
    }

    fn letters(topic: &str, count: i64) -> Change {
        let letter = |offset| {
            Letter::read(&Record {
                timestamp: Some(Timestamp::from_millis(1)),
                ..record_at(topic, 0, offset)
            })
        };
        Change::Letters((0..count).map(letter).collect())
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
            let positions = self.pool.read_blocking(index::read_positions).unwrap();
            positions.first().map(|position| position.next)
        }

        fn end(self) {
            drop(self.work);
            self.thread.join().unwrap().unwrap();
        }
    }

    #[test]
    fn failed_write_is_repeated() {
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
    fn waiting_writer_ends_with_process() {
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
    fn damage_found_by_query_replaces_index() {
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
        // Decisions for the damaged index are void.
        running.work.send(old).unwrap();
        running.send(position(9));
        running.send(caught_up());
        running.until("ready");
        assert_eq!(running.position(), Some(9));
        running.end();
    }

    #[test]
    fn locked_index_is_opened_later() {
        let directory = tempfile::tempdir().unwrap();
        let running = start(directory.path());
        running.send(position(7));
        running.end();
        let other = rusqlite::Connection::open(directory.path().join(FILE)).unwrap();
        other
            .execute_batch("PRAGMA locking_mode = exclusive; BEGIN EXCLUSIVE")
            .unwrap();
        let running = start_with(directory.path(), WriterThread::run);
        running.until("waiting: cannot open the index");
        drop(other);
        let indexed = running.opened.recv_timeout(DEADLINE).unwrap();
        assert_eq!(indexed.positions, [("a-dlq".into(), 0, 7)]);
        running.end();
    }

    #[test]
    fn new_groups_wait_for_their_states() {
        let directory = tempfile::tempdir().unwrap();
        let running = start(directory.path());
        running.send(position(7));
        running.send(caught_up());
        running.until("ready");
        running.end();
        // The topic of group states is read later than the first dead letters of this process.
        let (states, sender) = Replica::fixed(None);
        let running = start_with_states(directory.path(), states, WriterThread::run);
        running.opened.recv().unwrap();
        let changes = ["a-dlq", "b-dlq", "c-dlq", "d-dlq"].map(|topic| letters(topic, 1));
        let mut known = GroupStates::default();
        for (change, what) in changes
            .iter()
            .zip([Decided::Muted(None), Decided::Resolved, Decided::Open])
        {
            let Change::Letters(letters) = change else {
                panic!("{change:?}");
            };
            known.table.insert(letters[0].group, states::decided(what, 0, 1));
        }
        running.send(Message::Changes {
            batch: 1,
            changes: changes.to_vec(),
        });
        eventually("the dead letters are indexed", DEADLINE, || {
            let topics = running.pool.read_blocking(index::topics).unwrap();
            (topics.len() == 4).then_some(()).ok_or(topics.len())
        });
        let new_groups = || {
            let mut text = String::new();
            encode(&mut text, &running.registry).unwrap();
            let mut lines = text.lines();
            let count = lines.find_map(|line| line.strip_prefix("dlq_groups_first_seen_total "));
            count.map(str::to_owned)
        };
        assert_eq!(new_groups().as_deref(), Some("0"));
        sender.send_replace(Some(Arc::new(known)));
        eventually("the open ones are counted", DEADLINE, || match new_groups() {
            Some(count) if count == "2" => Ok(()),
            other => Err(format!("{other:?}")),
        });
        running.end();
    }

    #[test]
    fn unusable_directory_ends_the_process() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let running = start_with(&file, WriterThread::run);
        let error = running.thread.join().unwrap().unwrap_err();
        assert!(matches!(error, IndexError::Directory { .. }), "{error:?}");
        let _held = Index::open(directory.path(), &[]).unwrap();
        let running = start_with(directory.path(), WriterThread::run);
        let error = running.thread.join().unwrap().unwrap_err();
        assert!(matches!(error, IndexError::InUse { .. }), "{error:?}");
    }

    #[test]
    fn full_disk_deletes_the_previous_index() {
        let directory = tempfile::tempdir().unwrap();
        let previous = directory.path().join("dlq-index.db");
        std::fs::write(&previous, b"of a previous version").unwrap();
        let running = start_with(directory.path(), |thread| {
            let (writer, _) = thread.try_open()?;
            writer.limit_size_to_pages(1);
            OpenIndex::new(thread, writer)?.run()
        });
        running.send(Message::Changes {
            batch: 1,
            changes: vec![letters("a-dlq", 500)],
        });
        eventually("the previous index is deleted", DEADLINE, || {
            if previous.exists() { Err("not yet") } else { Ok(()) }
        });
        running.until("waiting: cannot write the index, retrying: the disk is full: ");
        running.stop.cancel();
        running.thread.join().unwrap().unwrap();
    }

    #[test]
    fn letters_being_removed_are_missing() {
        let directory = tempfile::tempdir().unwrap();
        let running = start_with(directory.path(), |thread| {
            let (writer, _) = thread.try_open()?;
            let shared = thread.shared.clone();
            let missing = || -> Vec<(String, Option<i32>)> {
                let completeness = shared.completeness();
                let missing = completeness.missing.iter();
                missing
                    .inspect(|(_, reason)| assert_eq!(**reason, Reason::NotRemoved))
                    .map(|((topic, partition), _)| (topic.to_string(), *partition))
                    .collect()
            };
            let mut index = OpenIndex::new(thread, writer).unwrap();
            // More than two slices.
            index.write(1, &[letters("a-dlq", 5_000), letters("b-dlq", 5_000)])?;
            index.completeness = Some(Completeness {
                as_of: Some(Timestamp::from_millis(1)),
                ..Completeness::default()
            });
            index.publish();
            assert_eq!(missing(), []);
            let forget = Change::Forget {
                topic: "a-dlq".into(),
            };
            let trim = Change::Trim {
                topic: "b-dlq".into(),
                partition: 0,
                low: 5_000,
            };
            index.write(2, &[Change::ForgetLedger, forget, trim])?;
            // A completeness that the reader decided before it knew.
            index.publish();
            let of_topic = |topic: &str, partition| (topic.to_owned(), partition);
            let (first, second) = (of_topic("a-dlq", None), of_topic("b-dlq", Some(0)));
            assert_eq!(
                missing(),
                [first.clone(), second.clone(), of_topic(ledger::TOPIC, None)]
            );
            assert!(!shared.completeness().are_states_known());
            let mut seen = vec![missing()];
            while let Outcome::Done(true) = index.remove_slice()? {
                if seen.last() != Some(&missing()) {
                    seen.push(missing());
                }
            }
            assert_eq!(seen[1..], [vec![first, second.clone()], vec![second], vec![]]);
            // The ledger was away in between.
            let completeness = shared.completeness();
            assert!(completeness.are_states_known() && completeness.ledger_losses == 1);
            Ok(())
        });
        running.thread.join().unwrap().unwrap();
    }
}
