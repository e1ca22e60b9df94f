//! One shard: what becomes of commands and of jobs whose time has come. Pure: it is told the time, asks the
//! index by [`IndexRequest`] and is told [`IndexResponse`]s, and says what is to be written.
//!
//! It decides as the only writer of its partition, so what it decided last is the truth: first the
//! [`Overlay`], then the [`Window`], then the index.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::headers::{self, Origin};
use redeliver_core::{Failure, Headers, Output, Record, Timestamp, route};
use redeliver_proto::{Message as _, v1};

use crate::codec::{self, KeyValue, RetentionPolicy};
use crate::index::{Batch, Change, Cursor, DueScan, Effect, Lookup, Room, Row};
use crate::job::{Job, JobId, Kind, State};
use crate::overlay::Overlay;
use crate::request::{
    Command, Incoming, NAME, RefusedWait, Request, Rules, first_origin, key_hash, shard_of,
};
use crate::spans::Spans;
use crate::topics::{Presence, Topics};
use crate::window::{Source, Window};
use crate::{refused, room};

use self::outbox::Outbox;
pub(crate) use self::parked::Missed;
use self::parked::{Due, Parked};

mod outbox;
mod parked;

/// What all shards of a process have in common.
pub(crate) struct Settings {
    pub(crate) rules: Rules,
    pub(crate) ingest: Arc<str>,
    pub(crate) state: Arc<str>,
    pub(crate) dead_letters: Arc<str>,
    pub(crate) answers: Arc<str>,
    /// Partitions of ingest and state topic.
    pub(crate) partitions: i32,
    pub(crate) memory: RetentionPolicy,
    /// How far ahead jobs are held in memory.
    pub(crate) window: Duration,
    /// How many of them at most, of those that were looked up and of those that were scheduled so late each.
    pub(crate) window_jobs: usize,
    /// How many bytes of them, counted in the same way.
    pub(crate) window_bytes: usize,
    /// Which topics exist.
    pub(crate) topics: Arc<dyn Topics>,
    /// How long after its time a job waits for a topic that does not.
    pub(crate) missing_topic_timeout: Duration,
    pub(crate) spans: Spans,
}

/// A question to the index, or changes for it.
#[derive(Debug)]
pub(crate) enum IndexRequest {
    /// What was committed up to a turn.
    Apply {
        /// The turn.
        turn: u64,
        /// The changes.
        batch: Batch,
    },
    /// What is known of jobs and keys.
    LookUp(Vec<Lookup>),
    /// What is due next.
    DueScan {
        /// Behind this.
        after: Option<Cursor>,
        /// Up to then.
        until: Timestamp,
        /// So many at most.
        limit: usize,
        /// So many bytes, about.
        bytes: usize,
    },
    /// What is parked: the same question as [`IndexRequest::DueScan`].
    Sweep {
        /// Behind this.
        after: Cursor,
        /// Up to then.
        until: Timestamp,
        /// So many at most.
        limit: usize,
        /// So many bytes, about.
        bytes: usize,
    },
    /// What is to be forgotten.
    Forgettable,
}

/// What the indexer of the shard's index says.
#[derive(Debug)]
pub(crate) enum IndexResponse {
    /// The index shows all of the state topic, which ends here.
    Ready {
        /// The end.
        end: i64,
    },
    /// The state topic holds what is not understood: nothing may be done until the index is ready again.
    HeldUp,
    /// The index shows what was committed up to this turn.
    Applied {
        /// The turn.
        turn: u64,
        /// Whether it had to.
        by_force: bool,
    },
    /// The index is full, and has taken nothing of this.
    Full {
        /// As it was asked.
        turn: u64,
        /// As it was asked.
        batch: Batch,
    },
    /// In the order of the questions.
    Found(Vec<Option<Bytes>>),
    /// What is due next.
    DueScan(DueScan),
    /// What is parked, and other jobs between.
    Swept(DueScan),
    /// What is to be forgotten.
    Forgettable(Vec<JobId>),
}

/// What a turn of a shard writes.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    pub(crate) outputs: Vec<Output>,
    /// Offsets of commands that are done.
    pub(crate) completed: Vec<i64>,
    pub(crate) tally: Tally,
    /// Of the outputs, about.
    bytes: usize,
}

impl Writes {
    fn push(&mut self, output: Output) {
        self.bytes += output.value.as_ref().map_or(0, Bytes::len);
        self.outputs.push(output);
    }

    /// Whether there is room for more, with this many outputs at most.
    fn has_room(&self, limit: usize) -> bool {
        self.outputs.len() < limit && self.bytes < TURN_BYTES
    }
}

/// What happened in a turn, for metrics.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) accepted: u64,
    pub(crate) duplicates: u64,
    pub(crate) conflicts: u64,
    pub(crate) rejected: u64,
    pub(crate) no_room: u64,
    pub(crate) forwarded: u64,
    pub(crate) cancelled: u64,
    pub(crate) rescheduled: u64,
    pub(crate) refused: u64,
    pub(crate) expired: u64,
    pub(crate) forgotten: u64,
    /// Jobs whose topic was missing for too long.
    pub(crate) dead: u64,
    /// Due times of jobs that were dispatched.
    pub(crate) dispatched: Vec<Timestamp>,
}

/// A command on its way to a decision.
struct Entry {
    record: Record,
    incoming: Incoming,
}

impl Entry {
    /// About how many bytes it takes in memory.
    fn size(&self) -> usize {
        let record = &self.record;
        500 + record.value.as_ref().map_or(0, Bytes::len)
            + record.key.as_ref().map_or(0, Bytes::len)
            + record.headers.byte_len()
    }
}

/// What is to be done next, in the order in which the index answered.
enum Next {
    /// A command, with what the index knew of it then.
    Decide(Box<Entry>, Option<Bytes>),
    /// The index shows this turn: what is behind here in the queue was asked of it later, and what is before
    /// here still needs the overlay.
    Confirm(u64),
}

/// The most commands in hand, and their bytes.
const COMMANDS: usize = 10_000;
const COMMAND_BYTES: usize = 64 << 20;
/// The most bytes that a shard writes in one turn.
const TURN_BYTES: usize = 8 << 20;
/// The most questions of one look-up, and how many of them may be for jobs, which may be large.
const QUESTIONS: usize = 2_000;
const QUESTIONS_OF_JOBS: usize = 200;
/// The most jobs of one look ahead, and their bytes.
const CHUNK: usize = 5_000;
const CHUNK_BYTES: usize = 4 << 20;
/// The most changes that the index does not show yet, beyond which no command is taken.
const OVERLAY: usize = 100_000;
const OVERLAY_BYTES: usize = 64 << 20;
/// With so many times more it is not looked ahead any more either: jobs leave while changes do not reach the index.
const OVERLAY_LIMIT: usize = 3;
/// The most jobs that are brought back at once when their topic exists again.
const RETURNED: usize = 2_000;
/// A topic has to be missing for so long before jobs are given up that were due long ago.
const CERTAIN: Duration = Duration::from_secs(30);
/// The code of a dead letter whose topic does not exist.
pub(crate) const TOPIC_MISSING: &str = "topic.missing";
/// How often it is looked for jobs that are to be forgotten.
const FORGET_EVERY: Duration = Duration::from_secs(1);

impl Settings {
    /// The most jobs in the window that had waited for their topics.
    fn returned(&self) -> usize {
        RETURNED.min(self.window_jobs)
    }

    /// Whether a topic that has been missing for this long will not be there the next moment.
    fn is_certain(&self, lasting: Duration) -> bool {
        lasting >= CERTAIN.min(self.missing_topic_timeout)
    }

    /// Where a job goes. The wait of a pipeline's record ends in the topic that the record names, whatever was configured
    /// when it began, and in the pipeline's return topic of today where that topic is not one of the pipeline's any more.
    fn destination(&self, job: &Job) -> Arc<str> {
        match (job.kind, self.rules.pipelines.get(&*job.app)) {
            (Kind::LongWait, Some(pipeline)) => {
                let named = job.payload.headers.last(headers::RETURN_TOPIC);
                let named = named.and_then(|name| std::str::from_utf8(name).ok());
                let due_topic = self.topics.presence(&pipeline.due_topic());
                let returns = pipeline.returns(!matches!(due_topic, Presence::Missing { .. }));
                returns.topic(named.unwrap_or(&job.topic)).clone()
            }
            _ => job.topic.clone(),
        }
    }

    /// What becomes of a job whose time has come, by what is known of its destination.
    fn prospect(&self, presence: Presence, job: &Job, now: Timestamp) -> Prospect {
        let has_expired = job.expires.is_some_and(|expires| expires < now);
        match presence {
            Presence::Exists => Prospect::Leaves,
            // Nothing is written for it.
            _ if has_expired => Prospect::Leaves,
            Presence::Missing { lasting }
                if self.is_certain(lasting) && job.due.after(self.missing_topic_timeout) <= now =>
            {
                Prospect::Dies
            }
            Presence::Missing { .. } | Presence::Unknown => Prospect::Waits,
        }
    }

    /// What a job waits for when its topic does not exist.
    fn missed(&self, job: &Job) -> Missed {
        (self.destination(job), job.app.clone())
    }
}

/// What becomes of a job whose time has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prospect {
    Leaves,
    /// For its topic.
    Waits,
    /// Its topic has not come.
    Dies,
}

/// A look ahead that is under way.
struct LookAhead {
    after: Option<Cursor>,
    until: Timestamp,
}

/// A shard.
pub(crate) struct Shard {
    settings: Arc<Settings>,
    number: i32,
    is_live: bool,
    window: Window,
    parked: Parked,
    /// All jobs up to here are in the window, or parked.
    loaded: Option<Cursor>,
    looking_ahead: Option<LookAhead>,
    overlay: Overlay,
    /// Commands that need a look into the index, those for which it is under way, and those that can be decided.
    unseen: VecDeque<Entry>,
    looking: VecDeque<Entry>,
    decidable: VecDeque<Next>,
    /// Of all of these.
    command_bytes: usize,
    /// Whether more has come than fits into the turn under way.
    is_crowded: bool,
    /// The turn under way, and what it changes.
    turn: u64,
    changes: Vec<Change>,
    /// Committed, and not in the index yet.
    outbox: Outbox,
    /// Whether the index has room for more jobs.
    room: Room,
    /// The end of the state topic, behind what was committed last.
    end: i64,
    forgettable: VecDeque<JobId>,
    looking_for_forgettable: bool,
    next_forget: Timestamp,
}

impl Shard {
    pub(crate) fn new(settings: Arc<Settings>, number: i32) -> Self {
        Self {
            settings,
            number,
            is_live: false,
            window: Window::default(),
            parked: Parked::default(),
            loaded: None,
            looking_ahead: None,
            overlay: Overlay::default(),
            unseen: VecDeque::new(),
            looking: VecDeque::new(),
            decidable: VecDeque::new(),
            command_bytes: 0,
            is_crowded: false,
            turn: 0,
            changes: Vec::new(),
            outbox: Outbox::default(),
            room: Room::Enough,
            end: 0,
            forgettable: VecDeque::new(),
            looking_for_forgettable: false,
            next_forget: Timestamp::from_millis(0),
        }
    }

    /// Whether the index was brought up to date, so that the shard may act.
    pub(crate) fn is_live(&self) -> bool {
        self.is_live
    }

    /// How many jobs it holds in memory.
    pub(crate) fn held(&self) -> usize {
        self.window.len()
    }

    /// How many changes the index does not show yet.
    pub(crate) fn behind(&self) -> usize {
        self.overlay.len()
    }

    /// How many jobs wait for a topic that does not exist, about.
    pub(crate) fn parked(&self) -> BTreeMap<Missed, usize> {
        self.parked.counts()
    }

    /// Whether the index has refused changes, and is not known to have room again.
    pub(crate) fn is_refused(&self) -> bool {
        self.outbox.is_refused()
    }

    /// Takes note of how much room the index has.
    pub(crate) fn set_room(&mut self, room: Room) {
        self.room = room;
    }

    /// How many more commands are welcome.
    pub(crate) fn capacity(&self) -> usize {
        let full = self.overlay.len() >= OVERLAY || self.overlay.bytes() >= OVERLAY_BYTES;
        if !self.is_live || full || self.command_bytes >= COMMAND_BYTES {
            return 0;
        }
        COMMANDS.saturating_sub(self.unseen.len() + self.looking.len() + self.decidable.len())
    }

    /// When something will be due.
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        if !self.is_live {
            return None;
        }
        if !self.decidable.is_empty() || !self.forgettable.is_empty() {
            return Some(Timestamp::from_millis(0));
        }
        self.window.next_due()
    }

    /// Takes a record of the ingest topic.
    pub(crate) fn accept(&mut self, record: Record, now: Timestamp) {
        let incoming = crate::request::read(&record, &self.settings.rules, now);
        let needs_look = match &incoming.command {
            Ok(Command::Schedule(request)) => request.idempotency_key.is_some(),
            Ok(Command::Cancel(_) | Command::Reschedule { .. }) => true,
            Err(_) => false,
        } && self.home(&incoming) == self.number;
        let entry = Entry { record, incoming };
        self.command_bytes += entry.size();
        if needs_look {
            self.unseen.push_back(entry);
        } else {
            self.decidable.push_back(Next::Decide(Box::new(entry), None));
        }
    }

    /// The shard that a command belongs to.
    fn home(&self, incoming: &Incoming) -> i32 {
        match &incoming.command {
            Ok(Command::Schedule(request)) => match &request.idempotency_key {
                Some(key) => shard_of(&request.app, key, self.settings.partitions),
                None => self.number,
            },
            Ok(Command::Cancel(id) | Command::Reschedule { id, .. })
                if id.shard() < self.settings.partitions =>
            {
                id.shard()
            }
            _ => self.number,
        }
    }

    /// What is to be asked of the index now. At most one question of each kind is under way.
    pub(crate) fn asks(&mut self, now: Timestamp) -> Vec<IndexRequest> {
        let mut asks = Vec::new();
        if !self.is_live {
            return asks;
        }
        asks.extend(self.outbox.next(now));
        if self.looking.is_empty() && !self.unseen.is_empty() {
            let mut jobs = 0;
            while self.looking.len() < QUESTIONS
                && jobs < QUESTIONS_OF_JOBS
                && let Some(entry) = self.unseen.pop_front()
            {
                jobs += usize::from(matches!(question(&entry), Some(Lookup::Job(_))));
                self.looking.push_back(entry);
            }
            asks.push(IndexRequest::LookUp(
                self.looking.iter().filter_map(question).collect(),
            ));
        }
        asks.extend(self.ask_ahead(now));
        asks.extend(self.ask_sweep(now));
        if !self.looking_for_forgettable && self.forgettable.is_empty() && now >= self.next_forget {
            self.looking_for_forgettable = true;
            asks.push(IndexRequest::Forgettable);
        }
        asks
    }

    fn ask_ahead(&mut self, now: Timestamp) -> Option<IndexRequest> {
        let is_far = now.after(self.settings.window * 3 / 4);
        if self.overlay.len() >= OVERLAY_LIMIT * OVERLAY
            || self.overlay.bytes() >= OVERLAY_LIMIT * OVERLAY_BYTES
        {
            return None;
        }
        if self.looking_ahead.is_some() || self.loaded.is_some_and(|loaded| loaded.due > is_far) {
            return None;
        }
        if !self.has_room(Source::LookedUp) {
            // What comes next may be before some of what there is.
            self.window.remove_looked_up_behind(self.loaded);
        }
        let load = self.window.load(Source::LookedUp);
        let limit = self.settings.window_jobs.saturating_sub(load.jobs).min(CHUNK);
        let bytes = self
            .settings
            .window_bytes
            .saturating_sub(load.bytes)
            .min(CHUNK_BYTES);
        // A window that is nearly full waits for room, so that questions are worth their while.
        if limit < CHUNK.min(self.settings.window_jobs / 4)
            || bytes < CHUNK_BYTES.min(self.settings.window_bytes / 8)
        {
            return None;
        }
        let (after, until) = (self.loaded, now.after(self.settings.window));
        self.looking_ahead = Some(LookAhead { after, until });
        Some(IndexRequest::DueScan {
            after,
            until,
            limit,
            bytes,
        })
    }

    fn ask_sweep(&mut self, now: Timestamp) -> Option<IndexRequest> {
        let settings = &self.settings;
        self.parked
            .look(now, self.loaded, |topic| match settings.topics.presence(topic) {
                Presence::Exists => Due::All,
                Presence::Missing { lasting } if settings.is_certain(lasting) => {
                    let timeout =
                        i64::try_from(settings.missing_topic_timeout.as_millis()).unwrap_or(i64::MAX);
                    Due::Until(Timestamp::from_millis(now.as_millis().saturating_sub(timeout)))
                }
                Presence::Missing { .. } | Presence::Unknown => Due::Nothing,
            });
        let load = self.window.load(Source::Returned);
        let limit = self.settings.returned().saturating_sub(load.jobs);
        let bytes = CHUNK_BYTES
            .min(self.settings.window_bytes)
            .saturating_sub(load.bytes);
        if limit == 0 || bytes == 0 {
            return None;
        }
        let (after, until) = self.parked.ask()?;
        Some(IndexRequest::Sweep {
            after,
            until,
            limit,
            bytes,
        })
    }

    /// Takes note of an answer.
    pub(crate) fn answer(&mut self, answer: IndexResponse, now: Timestamp) {
        match answer {
            IndexResponse::Ready { end } => {
                // A turn may have been committed since it was read.
                self.end = self.end.max(end);
                self.is_live = true;
            }
            IndexResponse::HeldUp => self.is_live = false,
            IndexResponse::Applied { turn, by_force } => {
                self.outbox.applied(by_force);
                self.decidable.push_back(Next::Confirm(turn));
            }
            IndexResponse::Full { turn, batch } => self.outbox.refused(turn, batch, now),
            IndexResponse::Found(found) => {
                let looked = self.looking.drain(..).map(Box::new).zip(found);
                self.decidable
                    .extend(looked.map(|(entry, found)| Next::Decide(entry, found)));
            }
            IndexResponse::DueScan(ahead) => self.load(ahead, now),
            IndexResponse::Swept(ahead) => self.sweep(ahead, now),
            IndexResponse::Forgettable(ids) => {
                self.looking_for_forgettable = false;
                if ids.is_empty() {
                    self.next_forget = now.after(FORGET_EVERY);
                }
                let known = |id: &JobId| self.overlay.job(*id).is_none();
                self.forgettable = ids.into_iter().filter(known).collect();
            }
        }
    }

    fn load(&mut self, ahead: DueScan, now: Timestamp) {
        let Some(LookAhead { after, until }) = self.looking_ahead.take() else {
            return;
        };
        if self.loaded != after {
            // Meanwhile there was no room for a job before that place. It is looked for again from there.
            return;
        }
        let last = ahead.rows.last().map(|row| row.cursor);
        let complete = Cursor {
            due: until,
            id: JobId::from_bytes([0xff; 16]),
        };
        let loaded = if ahead.is_complete { Some(complete) } else { last };
        if loaded <= after {
            return;
        }
        let found = self.found(ahead.rows, |cursor| {
            Some(cursor) > after && Some(cursor) <= loaded
        });
        self.loaded = loaded;
        for (cursor, job) in found {
            let missed = self.settings.missed(&job);
            let presence = self.settings.topics.presence(&missed.0);
            if matches!(presence, Presence::Missing { .. })
                && self.settings.prospect(presence, &job, now) == Prospect::Waits
            {
                self.parked.note(missed, cursor);
                continue;
            }
            if !self.has_room(Source::LookedUp) {
                self.loaded = Some(cursor.before());
                break;
            }
            self.window.insert(job, Source::LookedUp);
        }
    }

    /// The jobs in a stretch that wait and are not in the window, by what the index says and what is newer.
    fn found(&self, rows: Vec<Row>, is_within: impl Fn(Cursor) -> bool) -> BTreeMap<Cursor, Arc<Job>> {
        let waiting = self.overlay.waiting();
        let mut found: BTreeMap<Cursor, Arc<Job>> = waiting
            .map(|job| (Cursor::of(job), job.clone()))
            .filter(|(cursor, _)| is_within(*cursor) && self.window.get(cursor.id).is_none())
            .collect();
        for row in rows {
            let id = row.cursor.id;
            if self.overlay.job(id).is_some() || self.window.get(id).is_some() || !is_within(row.cursor) {
                continue;
            }
            match codec::decode(id, &row.record) {
                Ok(job) => drop(found.insert(row.cursor, Arc::new(job))),
                Err(error) => tracing::error!(job = %id, %error, "the index holds something that is no job"),
            }
        }
        found
    }

    /// Brings back what was parked and need not wait any longer, as far as there is room.
    fn sweep(&mut self, ahead: DueScan, now: Timestamp) {
        let last = ahead
            .rows
            .last()
            .map(|row| row.cursor)
            .filter(|_| !ahead.is_complete);
        let Some((after, end)) = self.parked.portion(last) else {
            return;
        };
        for (cursor, job) in self.found(ahead.rows, |cursor| cursor > after && cursor <= end) {
            let missed = self.settings.missed(&job);
            let presence = self.settings.topics.presence(&missed.0);
            let waits = self.settings.prospect(presence, &job, now) == Prospect::Waits;
            if !waits && self.window.load(Source::Returned).jobs >= self.settings.returned() {
                return self.parked.swept(cursor.before());
            }
            self.parked.forget(&missed, cursor);
            if waits {
                self.parked.note(missed, cursor);
            } else {
                self.window.insert(job, Source::Returned);
            }
        }
        self.parked.swept(end);
    }

    fn has_room(&self, way: Source) -> bool {
        let load = self.window.load(way);
        load.jobs < self.settings.window_jobs && load.bytes < self.settings.window_bytes
    }

    /// Whether there is room for a job, after those that are later and came the same way have left for it. They are looked
    /// up again.
    fn find_room(&mut self, way: Source, place: Cursor) -> bool {
        while !self.has_room(way) {
            let Some(latest) = self.window.latest(way).filter(|latest| *latest > place) else {
                return false;
            };
            self.window.remove(latest.id);
            self.is_not_loaded(latest);
        }
        true
    }

    /// A job that waits is not in the window.
    fn is_not_loaded(&mut self, place: Cursor) {
        if Some(place) <= self.loaded {
            self.loaded = Some(place.before());
        }
    }

    /// Decides commands and dispatches due jobs, until about `limit` records are to be written.
    pub(crate) fn finish(&mut self, now: Timestamp, limit: usize) -> Writes {
        let mut writes = Writes::default();
        if !self.is_live {
            return writes;
        }
        self.turn += 1;
        let is_due = self.window.next_due().is_some_and(|due| due <= now);
        let half = if is_due { limit / 2 } else { limit };
        self.is_crowded = self.window.is_behind() || self.decidable.len() > half / 2;
        // Half of a turn is for either, so that neither keeps the other waiting for long. What has arrived and is of high
        // priority is only seen when it is decided, so that goes faster than jobs leave while there is room for more.
        let for_commands = if is_due && self.is_crowded && self.has_room(Source::Commanded) {
            limit - limit / 4
        } else {
            half
        };
        while writes.has_room(for_commands) && writes.completed.len() < limit {
            match self.decidable.pop_front() {
                Some(Next::Decide(entry, found)) => {
                    self.command_bytes -= entry.size();
                    writes.completed.push(entry.record.position.offset);
                    self.decide(*entry, found.as_ref(), now, &mut writes);
                }
                Some(Next::Confirm(turn)) => self.overlay.confirm(turn),
                None => break,
            }
        }
        while writes.has_room(limit) {
            let Some(job) = self.window.pop_due(now) else {
                break;
            };
            let missed = self.settings.missed(&job);
            let presence = self.settings.topics.presence(&missed.0);
            match self.settings.prospect(presence, &job, now) {
                Prospect::Leaves => self.dispatch(&job, missed.0, now, &mut writes),
                Prospect::Waits => self.parked.note(missed, Cursor::of(&job)),
                Prospect::Dies => self.give_up(&job, missed, now, &mut writes),
            }
        }
        while writes.has_room(limit) {
            let Some(id) = self.forgettable.pop_front() else {
                break;
            };
            self.forget(id, &mut writes);
        }
        writes
    }

    /// The turn is committed, and the state topic ends at `end` now.
    pub(crate) fn committed(&mut self, end: i64) {
        let from = std::mem::replace(&mut self.end, end);
        let changes = std::mem::take(&mut self.changes);
        self.outbox.push(self.turn, from, end, changes);
    }

    fn decide(&mut self, entry: Entry, found: Option<&Bytes>, now: Timestamp, writes: &mut Writes) {
        let home = self.home(&entry.incoming);
        if home != self.number {
            writes.tally.forwarded += 1;
            let mut headers = headers::user_headers(&entry.record.headers, None);
            // With its first place goes its first time, from which a `delay` counts.
            headers::write_lineage(&mut headers, NAME, &first_origin(&entry.record), 0);
            writes.push(Output {
                topic: self.settings.ingest.clone(),
                partition: Some(home),
                key: entry.record.key,
                value: entry.record.value,
                headers,
            });
            return;
        }
        let Incoming {
            command,
            answer_to,
            refused_wait,
        } = entry.incoming;
        let outcome = match command {
            Ok(Command::Schedule(request)) => self.schedule(*request, &entry.record, found, now, writes),
            Ok(Command::Cancel(id)) => self.cancel(id, found, now, writes),
            Ok(Command::Reschedule { id, due }) => self.reschedule(id, due, found, now, writes),
            Err(failure) => {
                writes.tally.rejected += 1;
                match refused_wait {
                    Some(wait) => reject_wait(*wait, &entry.record, &failure, now, writes),
                    None => self.reject(&entry.record, &failure, now, writes),
                }
                rejected(&failure)
            }
        };
        if let Some(answer_to) = answer_to {
            writes.push(Output {
                topic: self.settings.answers.clone(),
                partition: None,
                key: Some(Bytes::copy_from_slice(answer_to.as_bytes())),
                value: Some(outcome.encode_to_vec().into()),
                headers: Headers::new(),
            });
        }
    }

    fn schedule(
        &mut self,
        request: Request,
        record: &Record,
        found: Option<&Bytes>,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let position = &record.position;
        let id = JobId::new(
            record.timestamp.unwrap_or(now),
            position.partition,
            position.offset,
        );
        let hash = request
            .idempotency_key
            .as_deref()
            .map(|key| key_hash(&request.app, key));
        let taken = hash.and_then(|hash| {
            let newest = self.overlay.key(&hash);
            let taken = newest.or_else(|| KeyValue::decode(found?));
            taken.filter(|taken| taken.accepted.after(self.settings.memory.keys) > now)
        });
        if let Some(taken) = taken {
            return self.already(taken, &request, record, now, writes);
        }
        if let Err(failure) = self.check_room(&request, now) {
            writes.tally.no_room += 1;
            self.reject(record, &failure, now, writes);
            return rejected(&failure);
        }
        let mut job = Job {
            id,
            app: request.app,
            kind: request.kind,
            state: State::Scheduled,
            priority: request.priority,
            due: request.due,
            accepted: now,
            revision: 1,
            idempotency_key: request.idempotency_key,
            request_hash: request.request_hash,
            request_id: request.request_id,
            topic: request.topic,
            payload: request.payload,
            ended: None,
            expires: request.expires,
        };
        writes.tally.accepted += 1;
        self.settings.spans.accepted(&mut job, record);
        if let Some(hash) = hash {
            self.overlay.take_key(self.turn, hash, KeyValue::of(&job));
        }
        let shown = codec::to_proto(&job, false);
        let job = Arc::new(job);
        // While more is due than leaves at once, a job takes its place among the others, by its priority.
        let topic = self.settings.destination(&job);
        let presence = self.settings.topics.presence(&topic);
        let is_due = job.due <= now && self.settings.prospect(presence, &job, now) == Prospect::Leaves;
        let must_queue = is_due && self.is_crowded && self.find_room(Source::Commanded, Cursor::of(&job));
        if is_due && !must_queue {
            self.dispatch(&job, topic, now, writes);
        } else {
            self.save(job, now, writes);
        }
        v1::CommandOutcome {
            outcome: v1::Outcome::Scheduled.into(),
            job: Some(shown),
            ..v1::CommandOutcome::default()
        }
    }

    /// A record of a pipeline is accepted all the same: nobody would send it again.
    fn check_room(&self, request: &Request, now: Timestamp) -> Result<(), Failure> {
        let room = if self.outbox.is_refused() {
            Room::None
        } else {
            self.room
        };
        match request.kind {
            Kind::App => room::check(room, request.due, now, self.settings.window),
            Kind::LongWait => Ok(()),
        }
    }

    /// The idempotency key of a request is taken.
    fn already(
        &mut self,
        taken: KeyValue,
        request: &Request,
        record: &Record,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let job = match self.overlay.job(taken.id) {
            Some(job) => job,
            None => self.window.get(taken.id),
        };
        let shown = match job {
            Some(job) => codec::to_proto(job, false),
            None => v1::Job {
                id: taken.id.to_string(),
                app: request.app.to_string(),
                ..v1::Job::default()
            },
        };
        let (verdict, reason) = if taken.request_hash == request.request_hash {
            writes.tally.duplicates += 1;
            (v1::Outcome::Duplicate, String::new())
        } else {
            writes.tally.conflicts += 1;
            let message = format!(
                "idempotencyKey is taken by job {}, whose request had another content",
                taken.id
            );
            let failure = Failure::permanent("request.conflict", message);
            self.reject(record, &failure, now, writes);
            (v1::Outcome::Conflict, failure.message)
        };
        v1::CommandOutcome {
            outcome: verdict.into(),
            job: Some(shown),
            reason,
            ..v1::CommandOutcome::default()
        }
    }

    fn cancel(
        &mut self,
        id: JobId,
        found: Option<&Bytes>,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let job = match self.waiting(id, found, writes) {
            Ok(job) => job,
            Err(outcome) => return *outcome,
        };
        writes.tally.cancelled += 1;
        self.is_parked_no_longer(&job);
        let job = self.end(&job, State::Cancelled, now, writes);
        outcome(v1::Outcome::Cancelled, Some(&job), String::new())
    }

    fn reschedule(
        &mut self,
        id: JobId,
        due: Timestamp,
        found: Option<&Bytes>,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let job = match self.waiting(id, found, writes) {
            Ok(job) => job,
            Err(outcome) => return *outcome,
        };
        writes.tally.rescheduled += 1;
        self.is_parked_no_longer(&job);
        let job = Arc::new(Job {
            due,
            revision: job.revision + 1,
            expires: job.expires.map(|expires| due.after(expires.since(job.due))),
            ..(*job).clone()
        });
        self.save(job.clone(), now, writes);
        outcome(v1::Outcome::Rescheduled, Some(&job), String::new())
    }

    fn is_parked_no_longer(&mut self, job: &Job) {
        if Some(Cursor::of(job)) <= self.loaded && self.window.get(job.id).is_none() {
            self.parked.forget(&self.settings.missed(job), Cursor::of(job));
        }
    }

    /// The job, if it waits; else what is to be answered.
    fn waiting(
        &mut self,
        id: JobId,
        found: Option<&Bytes>,
        writes: &mut Writes,
    ) -> Result<Arc<Job>, Box<v1::CommandOutcome>> {
        let job = match self.overlay.job(id) {
            Some(job) => job.cloned(),
            None => self.window.get(id).cloned().or_else(|| {
                let decoded = codec::decode(id, found?);
                decoded
                    .map_err(
                        |error| tracing::error!(job = %id, %error, "the index holds something that is no job"),
                    )
                    .ok()
                    .map(Arc::new)
            }),
        };
        // A record of a pipeline is nobody's job: without it the pipeline would have lost it.
        let job = job.filter(|job| job.kind == Kind::App);
        let verdict = match job.as_ref().map(|job| job.state) {
            Some(State::Scheduled) => return job.ok_or_else(Box::default),
            Some(State::Dispatched) => v1::Outcome::AlreadyDispatched,
            Some(State::Cancelled) => v1::Outcome::AlreadyCancelled,
            Some(State::Expired) => v1::Outcome::Expired,
            None => v1::Outcome::Unknown,
        };
        writes.tally.refused += 1;
        Err(Box::new(outcome(verdict, job.as_deref(), String::new())))
    }

    fn dispatch(&mut self, job: &Arc<Job>, topic: Arc<str>, now: Timestamp, writes: &mut Writes) {
        debug_assert!(job.due <= now, "never early");
        if job.expires.is_some_and(|expires| expires < now) {
            writes.tally.expired += 1;
            self.end(job, State::Expired, now, writes);
            return;
        }
        writes.tally.dispatched.push(job.due);
        let mut headers = self.headers_of(job, now);
        if job.kind == Kind::LongWait && headers.last(headers::RETURN_TOPIC) != Some(topic.as_bytes()) {
            headers::readdress(&mut headers, &topic);
        }
        writes.push(Output {
            topic,
            partition: None,
            key: job.payload.key.clone(),
            value: job.payload.value.clone(),
            headers,
        });
        self.end(job, State::Dispatched, now, writes);
    }

    /// A job has waited for its topic for too long.
    fn give_up(&mut self, job: &Arc<Job>, missed: Missed, now: Timestamp, writes: &mut Writes) {
        let topic = &missed.0;
        let message = format!(
            "the topic `{topic}` does not exist, and the job has been due since {}",
            job.due
        );
        let mut letter = Output {
            topic: topic.clone(),
            partition: None,
            key: job.payload.key.clone(),
            value: job.payload.value.clone(),
            headers: self.headers_of(job, now),
        };
        let failure = Failure::permanent(TOPIC_MISSING, message);
        if !refused::replace(&self.settings, &mut letter, &failure, now) {
            tracing::error!(job = %job.id, topic = &**topic, "a job cannot be given up");
            return self.parked.note(missed, Cursor::of(job));
        }
        writes.tally.dead += 1;
        writes.push(letter);
        self.end(job, State::Expired, now, writes);
    }

    fn headers_of(&self, job: &Job, now: Timestamp) -> Headers {
        let trace = self.settings.spans.dispatched(job, now);
        if job.kind == Kind::LongWait {
            return job.payload.headers.clone();
        }
        let mut list = headers::user_headers(&job.payload.headers, trace.as_ref());
        list.push_text(headers::JOB_ID, &job.id.to_string());
        list.push_text(headers::JOB_APP, &job.app);
        list.push_text(headers::SCHEDULED_TIME, &job.due.to_string());
        list.push_text(headers::DISPATCHED_AT, &now.to_string());
        list.push_text(headers::JOB_PRIORITY, job.priority.as_str());
        if let Some(key) = &job.idempotency_key {
            list.push_text(headers::IDEMPOTENCY_KEY, key);
        }
        list
    }

    /// A job waits, or waits for another time.
    fn save(&mut self, job: Arc<Job>, now: Timestamp, writes: &mut Writes) {
        self.record(&job, writes);
        let place = Cursor::of(&job);
        let is_near = job.due <= now.after(self.settings.window) || Some(place) <= self.loaded;
        if is_near && self.find_room(Source::Commanded, place) {
            self.window.insert(job, Source::Commanded);
        } else {
            self.window.remove(job.id);
            self.is_not_loaded(place);
        }
    }

    fn end(&mut self, job: &Job, state: State, now: Timestamp, writes: &mut Writes) -> Arc<Job> {
        let job = Arc::new(job.ended(state, now));
        self.record(&job, writes);
        self.window.remove(job.id);
        job
    }

    /// Writes a job's newest state into the state topic.
    fn record(&mut self, job: &Arc<Job>, writes: &mut Writes) {
        let record = codec::encode(job);
        writes.push(Output {
            topic: self.settings.state.clone(),
            partition: Some(self.number),
            key: Some(job.id.to_string().into()),
            value: Some(record.clone()),
            headers: Headers::new(),
        });
        self.changes
            .push(codec::change(job, record, self.settings.memory));
        self.overlay.set(self.turn, job.id, Some(job.clone()));
    }

    fn forget(&mut self, id: JobId, writes: &mut Writes) {
        if self.overlay.job(id).is_some() {
            return;
        }
        writes.tally.forgotten += 1;
        writes.push(Output {
            topic: self.settings.state.clone(),
            partition: Some(self.number),
            key: Some(id.to_string().into()),
            value: None,
            headers: Headers::new(),
        });
        self.changes.push(Change {
            id,
            effect: Effect::Forgotten,
        });
        self.overlay.set(self.turn, id, None);
    }

    fn reject(&self, record: &Record, failure: &Failure, now: Timestamp, writes: &mut Writes) {
        let mut list = headers::user_headers(&record.headers, None);
        headers::write_lineage(&mut list, NAME, &Origin::of(record), 0);
        headers::write_failure(&mut list, failure, now);
        writes.push(Output {
            topic: self.settings.dead_letters.clone(),
            partition: None,
            key: record.key.clone(),
            value: record.value.clone(),
            headers: list,
        });
    }
}

/// The record of a long wait goes where its pipeline keeps its dead letters, with the lineage that it has.
fn reject_wait(wait: RefusedWait, command: &Record, failure: &Failure, now: Timestamp, writes: &mut Writes) {
    let record = Record {
        key: wait.payload.key,
        value: wait.payload.value,
        headers: wait.payload.headers,
        ..command.clone()
    };
    for output in route::reject(&wait.pipeline, &record, failure, now).outputs {
        writes.push(output);
    }
}

fn question(entry: &Entry) -> Option<Lookup> {
    match entry.incoming.command.as_ref().ok()? {
        Command::Schedule(request) => {
            let key = request.idempotency_key.as_deref()?;
            Some(Lookup::Key(key_hash(&request.app, key)))
        }
        Command::Cancel(id) | Command::Reschedule { id, .. } => Some(Lookup::Job(*id)),
    }
}

fn outcome(outcome: v1::Outcome, job: Option<&Job>, reason: String) -> v1::CommandOutcome {
    v1::CommandOutcome {
        outcome: outcome.into(),
        job: job.map(|job| codec::to_proto(job, false)),
        reason,
        ..v1::CommandOutcome::default()
    }
}

fn rejected(failure: &Failure) -> v1::CommandOutcome {
    v1::CommandOutcome {
        code: failure.code.clone(),
        ..outcome(v1::Outcome::Rejected, None, failure.message.clone())
    }
}

#[cfg(test)]
mod tests;
