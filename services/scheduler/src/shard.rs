//! A shard: decides what happens to commands and due jobs. It does no IO. The caller passes the time and the responses
//! of the index; the shard returns [`IndexRequest`]s and the records to write.
//!
//! A *turn* is what the shard adds to one transaction of its lane, by one or more calls of [`Shard::finish`]. It ends with [`Shard::committed`].
//!
//! A shard is the only writer of its partition, so its own decisions are newer than the index. It looks for a job in the
//! [`Overlay`] first, then in the [`Window`], then in the index.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Record, Timestamp, mutant};
use redeliver_kafka::TopicId;
use redeliver_service::due::Waiting;

use crate::controls::AppStates;
use crate::index::{Change, Cursor, Effect, MemoryPressure};
use crate::index_messages::{Found, IndexRequest, IndexResponse, Query};
use crate::job::{Flow, Job, JobId, Kind};
use crate::overlay::Overlay;
use crate::quota::Quotas;
use crate::settings::Settings;
use crate::window::{BACKLOG, Backlog, Window};

use self::commands::PendingCommand;
use self::dispatch::DueAction;
use self::held_waits::HeldWaits;
use self::look_ahead::LookAhead;
pub(crate) use self::look_ahead::{Obstacle, Target};
use self::outbox::Outbox;
use self::recurring::DueOrder;
pub(crate) use self::refusal::RefusedJob;
use self::released_waits::ReleasedWaits;
pub(crate) use self::turn::{Room, Tally, Writes};

mod acted_waits;
mod commands;
mod conflict;
mod dispatch;
mod held_waits;
mod loading;
mod look_ahead;
mod outbox;
mod recurring;
mod refusal;
mod released_waits;
mod states;
mod turn;

/// An item of the queue of decisions. The order of the queue is the order of the index's responses.
enum ReadyItem {
    /// A command, with the result of its lookup.
    Command(Box<PendingCommand>, Found),
    /// A long wait that an operator has released, as it is in the index.
    ReleasedWait(Arc<Job>),
    /// The index contains this turn. Commands after this item were looked up later and do not need the overlay entries of
    /// the turn any more. Commands before it still do.
    IndexApplied(u64),
}

impl ReadyItem {
    fn command(&self) -> Option<&PendingCommand> {
        match self {
            Self::Command(command, _) => Some(command),
            Self::ReleasedWait(_) | Self::IndexApplied(_) => None,
        }
    }
}

/// The maximum number and size of commands in memory.
const MAX_COMMANDS: usize = 10_000;
const MAX_COMMAND_BYTES: usize = 64 << 20;
/// The maximum number of lookups per request, and how many of them may be for jobs, whose records can be large.
const MAX_LOOKUPS: usize = 2_000;
const MAX_JOB_LOOKUPS: usize = 200;
/// The maximum size of the results of lookups that wait for their decision, and of those of one request.
const MAX_FOUND_BYTES: usize = 16 << 20;
/// The overlay size from which on a shard accepts no commands.
const MAX_OVERLAY: usize = 100_000;
const MAX_OVERLAY_BYTES: usize = 64 << 20;
/// At this multiple of the maximum overlay size, scans stop as well: dispatching adds to the overlay while no change
/// reaches the index.
const SCAN_OVERLAY_FACTOR: usize = 3;
/// How many jobs a turn forgets at most while others are due within [`DUE_SOON`], unless more end in the turn. A burst ends at one time, and so it is
/// forgotten at one time: larger turns would make the jobs of that time late.
const MAX_FORGOTTEN_BESIDE_DUE_JOBS: usize = 50;
const DUE_SOON: Duration = Duration::from_secs(1);
/// How long a transaction of the maximum size can take.
const LONG_TURN: Duration = Duration::from_millis(100);
/// The time between two searches for jobs to forget.
const FORGET_INTERVAL: Duration = Duration::from_secs(1);

impl Settings {
    /// The maximum number of jobs per lookup: as many as have room for their records, however large those are.
    fn max_job_lookups(&self) -> usize {
        (MAX_FOUND_BYTES / self.rules.max_data.max(1)).clamp(1, MAX_JOB_LOOKUPS)
    }
}

/// The state of a shard.
pub(crate) struct Shard {
    settings: Arc<Settings>,
    number: i32,
    is_live: bool,
    /// Which applications are paused or limited.
    apps: Arc<AppStates>,
    quotas: Quotas,
    window: Window,
    look_ahead: LookAhead,
    overlay: Overlay,
    /// Commands that need a lookup in the index, commands whose lookup is in progress, and items that can be decided. A
    /// command that needs a lookup passes through all three queues.
    needs_lookup: VecDeque<PendingCommand>,
    looking_up: VecDeque<PendingCommand>,
    ready: VecDeque<ReadyItem>,
    /// Long waits to reject, by the dead-letter topic of their pipeline, which cannot be written. They name no job, so nothing waits for them.
    rejected_waits: BTreeMap<Arc<str>, Vec<PendingCommand>>,
    held_waits: HeldWaits,
    /// The size of the commands in all five.
    command_bytes: usize,
    /// The size of the results of lookups in `ready`.
    found_bytes: usize,
    /// Whether more commands or jobs are ready than the current turn can take.
    is_crowded: bool,
    /// The number of the current turn, from 1 on, and its changes.
    turn: u64,
    changes: Vec<Change>,
    /// Committed changes that the index does not contain yet.
    outbox: Outbox,
    memory_pressure: MemoryPressure,
    /// The end of the state topic after the last commit.
    end: i64,
    forgettable: VecDeque<JobId>,
    is_scanning_forgettable: bool,
    next_forget: Timestamp,
    /// Every command before this offset was accepted, or will never come.
    read_to: i64,
    released_waits: ReleasedWaits,
}

impl Shard {
    pub(crate) fn new(settings: Arc<Settings>, number: i32) -> Self {
        let apps = settings.app_states.current();
        let outbox = Outbox::new(settings.index_batch_bytes);
        let mut released_waits = ReleasedWaits::of_shard(number);
        released_waits.set_wanted(&apps.released_waits);
        Self {
            released_waits,
            window: Window::new(
                settings.window_jobs,
                settings.window_bytes,
                settings.rates(&apps, number),
            ),
            apps,
            quotas: settings.quotas(),
            settings,
            number,
            is_live: false,
            look_ahead: LookAhead::default(),
            overlay: Overlay::default(),
            needs_lookup: VecDeque::new(),
            looking_up: VecDeque::new(),
            ready: VecDeque::new(),
            rejected_waits: BTreeMap::new(),
            held_waits: HeldWaits::default(),
            command_bytes: 0,
            found_bytes: 0,
            is_crowded: false,
            turn: 1,
            changes: Vec::new(),
            outbox,
            memory_pressure: MemoryPressure::Low,
            end: 0,
            forgettable: VecDeque::new(),
            is_scanning_forgettable: false,
            next_forget: Timestamp::from_millis(0),
            read_to: 0,
        }
    }

    /// The number of its partition.
    pub(crate) fn number(&self) -> i32 {
        self.number
    }

    /// Whether the index has been brought up to date, so that the shard may act.
    pub(crate) fn is_live(&self) -> bool {
        self.is_live && self.quotas.is_counted()
    }

    /// The number of jobs in the window.
    pub(crate) fn window_len(&self) -> usize {
        self.window.len()
    }

    /// The number of due jobs in the window of each application that its rate limits.
    pub(crate) fn rate_limited(&mut self, now: Timestamp) -> BTreeMap<Arc<str>, usize> {
        self.window.rate_limited(now)
    }

    /// The number of changes that the index does not contain yet.
    pub(crate) fn index_lag(&self) -> usize {
        self.overlay.len()
    }

    /// The approximate number of due jobs that wait for a missing topic or because their application is paused.
    pub(crate) fn blocked(&self) -> BTreeMap<Obstacle, usize> {
        self.look_ahead.blocked()
    }

    /// Whether the index has refused changes and has not proven since that it has free memory.
    pub(crate) fn is_index_full(&self) -> bool {
        self.outbox.is_index_full()
    }

    fn memory_pressure(&self) -> MemoryPressure {
        if self.outbox.is_index_full() {
            MemoryPressure::Full
        } else {
            self.memory_pressure
        }
    }

    fn is_full(&self) -> bool {
        self.memory_pressure() == MemoryPressure::Full
    }

    /// Sets the memory pressure of the index.
    pub(crate) fn set_memory_pressure(&mut self, pressure: MemoryPressure) {
        self.memory_pressure = pressure;
    }

    /// Sets which applications are paused or limited.
    pub(crate) fn set_app_states(&mut self, apps: Arc<AppStates>) {
        if !Arc::ptr_eq(&self.apps, &apps) {
            self.window.set_rates(self.settings.rates(&apps, self.number));
            self.apps = apps;
            self.released_waits.set_wanted(&self.apps.released_waits);
            self.release_unindexed_waits();
        }
    }

    /// Sets the id of the ingest topic.
    pub(crate) fn set_topic(&mut self, topic: Option<TopicId>) {
        self.released_waits.set_topic(topic);
        self.release_unindexed_waits();
    }

    /// How many more commands the shard accepts.
    pub(crate) fn capacity(&self) -> usize {
        if !self.is_live() || self.is_index_behind(1) || self.command_bytes >= MAX_COMMAND_BYTES {
            return 0;
        }
        let undecided = self.needs_lookup.len() + self.looking_up.len() + self.ready.len();
        let rejected = self.rejected_waits.values().map(Vec::len);
        MAX_COMMANDS.saturating_sub(undecided + rejected.sum::<usize>() + self.held_waits.len())
    }

    /// Whether this many times the maximum of changes wait for the index.
    fn is_index_behind(&self, factor: usize) -> bool {
        let bytes = self.overlay.bytes().max(self.outbox.bytes());
        self.overlay.len() >= factor * MAX_OVERLAY || bytes >= factor * MAX_OVERLAY_BYTES
    }

    /// The size of commands, results of lookups, released long waits, and changes that the index does not contain yet: as jobs in the overlay, and
    /// encoded in the outbox.
    pub(crate) fn memory(&self) -> usize {
        let undecided = self.command_bytes + self.found_bytes + self.released_waits.bytes();
        undecided + self.overlay.bytes() + self.outbox.bytes()
    }

    /// When the shard next has something to do; in the past if it has already.
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        if !self.is_live() {
            return None;
        }
        if !self.ready.is_empty() || !self.forgettable.is_empty() {
            return Some(Timestamp::from_millis(0));
        }
        let next = self.window.next_due().into_iter();
        next.chain(self.held_waits.next_due()).min()
    }

    /// What is due or undecided, and who becomes due before a transaction of the maximum size has ended; nothing until the shard dispatches jobs.
    pub(crate) fn backlog(&self, now: Timestamp) -> Backlog {
        if !self.is_live() {
            return Backlog::default();
        }
        let window = self.window.backlog(now, now.after(LONG_TURN));
        Backlog {
            is_long: window.is_long || self.ready.len() > BACKLOG,
            ..window
        }
    }

    /// The jobs that wait for their due time; none until the shard dispatches jobs.
    pub(crate) fn waiting(&self, now: Timestamp) -> Waiting {
        if self.is_live() {
            self.window.waiting(now)
        } else {
            Waiting::default()
        }
    }

    /// The shard reads the ingest topic from this offset on: it begins there, or no record that it will ever read is before it.
    pub(crate) fn start_at(&mut self, offset: i64) {
        self.read_to = self.read_to.max(offset);
    }

    /// Accepts a record of the ingest topic.
    pub(crate) fn accept(&mut self, record: Record, now: Timestamp) {
        let incoming = crate::request::read(&record, &self.settings.rules, now);
        let needs_lookup = self.query_for(&incoming).is_some() && self.owner_shard(&incoming) == self.number;
        self.start_at(record.position.offset + 1);
        let command = PendingCommand { record, incoming };
        self.command_bytes += command.size();
        if needs_lookup {
            self.needs_lookup.push_back(command);
        } else {
            self.ready
                .push_back(ReadyItem::Command(Box::new(command), Found::default()));
        }
    }

    /// The requests to send to the indexer now. At most one request of each kind is in progress.
    pub(crate) fn index_requests(&mut self, now: Timestamp) -> Vec<IndexRequest> {
        let mut requests = Vec::new();
        if !self.is_live {
            return requests;
        }
        requests.extend(self.quotas.take_uncounted().map(IndexRequest::Count));
        if !self.is_live() {
            return requests;
        }
        requests.extend(self.outbox.next(now));
        if self.looking_up.is_empty() && !self.needs_lookup.is_empty() && self.found_bytes < MAX_FOUND_BYTES {
            let mut jobs = 0;
            while self.looking_up.len() < MAX_LOOKUPS
                && jobs < self.settings.max_job_lookups()
                && let Some(command) = self.needs_lookup.pop_front()
            {
                jobs += usize::from(self.query_for(&command.incoming).is_some_and(Query::wants_job));
                self.looking_up.push_back(command);
            }
            let incoming = self.looking_up.iter().map(|command| &command.incoming);
            let queries = incoming.filter_map(|incoming| self.query_for(incoming));
            requests.push(IndexRequest::LookUp(queries.collect()));
        }
        requests.extend(self.request_scan(now));
        requests.extend(self.request_released_waits());
        // The clock may have been set back.
        let may_forget = now >= self.next_forget || self.next_forget > now.after(FORGET_INTERVAL);
        if !self.is_scanning_forgettable && self.forgettable.is_empty() && may_forget {
            self.is_scanning_forgettable = true;
            requests.push(IndexRequest::Forgettable);
        }
        requests
    }

    /// Handles a response of the indexer.
    pub(crate) fn handle_response(&mut self, response: IndexResponse, now: Timestamp) {
        match response {
            IndexResponse::Ready { end } => {
                // A turn may have been committed after the indexer read the end.
                self.end = self.end.max(end);
                self.is_live = true;
            }
            IndexResponse::Halted => self.is_live = false,
            IndexResponse::Applied { turn, forced } => {
                self.outbox.applied(forced);
                self.ready.push_back(ReadyItem::IndexApplied(turn));
            }
            IndexResponse::Full { turn, batch } => self.outbox.refused(turn, batch, now),
            IndexResponse::LookedUp(found) => {
                self.found_bytes += found.iter().map(Found::size).sum::<usize>();
                let commands = self.looking_up.drain(..).map(Box::new).zip(found);
                self.ready
                    .extend(commands.map(|(command, found)| ReadyItem::Command(command, found)));
            }
            IndexResponse::Scanned(scan) => self.load(scan, now),
            IndexResponse::ScannedWaits(scan) => {
                let released = self.released_waits.scanned(scan);
                self.queue_released_waits(released);
            }
            IndexResponse::FinishedRelease(finished) => self.released_waits.looked_up(finished),
            IndexResponse::ReleaseFinished => self.released_waits.finished(),
            IndexResponse::Counted(waiting) => self.quotas.counted(waiting),
            IndexResponse::Forgettable(ids) => {
                self.is_scanning_forgettable = false;
                if ids.is_empty() {
                    self.next_forget = now.after(FORGET_INTERVAL);
                }
                let is_unchanged = |id: &JobId| self.overlay.job(*id).is_none();
                self.forgettable = ids.into_iter().filter(is_unchanged).collect();
            }
        }
    }

    /// Decides commands and dispatches due jobs, until what is to be written fills the room. What several calls return before the next
    /// [`Shard::committed`] is one turn.
    pub(crate) fn finish(&mut self, now: Timestamp, room: Room) -> Writes {
        let mut writes = Writes::default();
        if !self.is_live() && !mutant!("shard-acts-before-its-index-is-ready") {
            return writes;
        }
        if mutant!("shard-counts-a-turn-twice") {
            self.turn += 1;
        }
        let is_due = self.window.next_due().is_some_and(|due| due <= now);
        let half = if is_due { room.quarters(2) } else { room };
        self.retry_rejections();
        self.decide_held_waits(now);
        self.is_crowded = self.window.has_backlog() || self.ready.len() > half.records / 2;
        // Commands and due jobs get half of a turn each, so that neither delays the other for long. The priority of a new
        // job is unknown until its command is decided. So while more is ready than fits into a turn and the window has room,
        // commands get three quarters: a job of high priority is found sooner behind many others in the ingest topic.
        let for_commands = if is_due && self.is_crowded && self.window.has_free_room() {
            room.quarters(3)
        } else {
            half
        };
        while writes.fits_into(for_commands) && writes.completed.len() < room.records {
            match self.ready.pop_front() {
                Some(ReadyItem::Command(command, found)) => {
                    let kept = self.keep_if_rejected(command);
                    let Some(command) = kept.and_then(|command| self.hold_back(command, now)) else {
                        continue;
                    };
                    if self.run_before_update(&command.incoming, &found, for_commands, now, &mut writes) {
                        self.ready.push_front(ReadyItem::Command(command, found));
                        break;
                    }
                    self.command_bytes -= command.size();
                    self.found_bytes -= found.size();
                    writes.completed.push(command.record.position.offset);
                    if mutant!("shard-forgets-completions") {
                        writes.completed.pop();
                    }
                    self.decide(*command, &found, now, &mut writes);
                }
                Some(ReadyItem::ReleasedWait(job)) => {
                    self.released_waits.decided(&job);
                    self.release_wait(&job, now, &mut writes);
                }
                Some(ReadyItem::IndexApplied(turn)) => self.overlay.remove_applied(turn),
                None => break,
            }
        }
        let mut order = DueOrder::new(room);
        while writes.fits_into(room) {
            let until = mutant!("shard-dispatches-early", now, now.after(Duration::from_millis(1)));
            let Some(job) = order.next(&mut self.window, until) else {
                break;
            };
            if job.kind == Kind::Schedule {
                if self.is_index_behind(SCAN_OVERLAY_FACTOR) {
                    // Its next states would pile up. It is read again once the index has caught up.
                    self.look_ahead.rewind(&Flow::of(&job), Cursor::of(&job));
                    continue;
                }
                let before = writes.outputs.len();
                self.run_schedule(&job, room, now, &mut writes);
                order.has_written(writes.outputs.len() - before);
                continue;
            }
            let dispatched = writes.tally.dispatched.len();
            let target = self.settings.target(&job);
            let presence = self.settings.topics.presence(&target.0);
            let action = self.settings.due_action(presence, &self.apps, &job, now);
            match (action, self.settings.lacking(&job)) {
                (DueAction::Block, _) if mutant!("shard-forgets-blocked-jobs") => {}
                (DueAction::Block, _) => self.block(&job, target, now),
                (_, Some(dead_letters)) => self.block(&job, dead_letters, now),
                (DueAction::Dispatch, None) => self.dispatch(&job, target.0, now, &mut writes),
                (DueAction::DeadLetter, None) => self.dead_letter(&job, target, now, &mut writes),
            }
            if writes.tally.dispatched.len() == dispatched {
                self.window.return_token(&job);
            }
        }
        let is_due_soon = self
            .window
            .next_due()
            .is_some_and(|due| due <= now.after(DUE_SOON));
        let forgotten = if is_due_soon {
            // More than jobs end, so that ended jobs do not pile up under a steady load.
            let count =
                |is: fn(&Effect) -> bool| self.changes.iter().filter(|change| is(&change.effect)).count();
            let ended = count(|effect| matches!(effect, Effect::Ended { .. }));
            let forgotten = count(|effect| matches!(effect, Effect::Forgotten));
            (2 * ended)
                .max(MAX_FORGOTTEN_BESIDE_DUE_JOBS)
                .saturating_sub(forgotten)
        } else {
            room.records
        };
        for _ in 0..forgotten {
            if !writes.fits_into(room) {
                break;
            }
            let Some(id) = self.forgettable.pop_front() else {
                break;
            };
            self.forget(id, &mut writes);
        }
        writes
    }

    /// Where the state topic ends at least once the current turn has been committed, unless it loses records.
    pub(crate) fn least_end(&self) -> i64 {
        self.end
            .saturating_add(i64::try_from(self.changes.len()).unwrap_or(i64::MAX))
    }

    /// The turn has been committed, and the state topic now ends at `end`, which is [`Shard::least_end`] or later.
    pub(crate) fn committed(&mut self, end: i64) {
        // The index learns of changes only after their commit, so it never contains what an abort undid. If the process
        // crashes here, the next owner reads the changes from the state topic before it acts.
        let from = std::mem::replace(&mut self.end, end);
        let changes = std::mem::take(&mut self.changes);
        self.outbox.push(self.turn, from, end, changes);
        self.turn += 1;
    }
}

#[cfg(test)]
pub(crate) mod tests;
