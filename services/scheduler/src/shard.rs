//! A shard: decides what happens to commands and due jobs. It does no IO. The caller passes the time and the responses
//! of the index; the shard returns [`IndexRequest`]s and the records to write.
//!
//! A *turn* is one call of [`Shard::finish`]: what the shard adds to one transaction of its lane.
//!
//! A shard is the only writer of its partition, so its own decisions are newer than the index. It looks for a job in the
//! [`Overlay`] first, then in the [`Window`], then in the index.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::headers::{self, Origin};
use redeliver_core::route::{self, Arrival, DeadLetter};
use redeliver_core::{Failure, Headers, Output, Record, Timestamp, mutant};
use redeliver_kafka::TopicId;
use redeliver_proto::{Message as _, v1};
use redeliver_service::due::Waiting;

use crate::admission::{self, INDEX_FULL};
use crate::codec::{self, KeyValue};
use crate::controls::AppStates;
use crate::index::{Change, Cursor, Effect, MemoryPressure, Scan};
use crate::index_messages::{Found, IndexRequest, IndexResponse, Query, ScannedJob};
use crate::job::{Flow, Job, JobId, JobState, Kind};
use crate::overlay::Overlay;
use crate::quota::{QUOTA_EXCEEDED, Quotas};
use crate::refused::{self, Replacement};
use crate::request::{
    Command, ConflictPolicy, Incoming, JobRef, NAME, RejectedWait, Request, first_origin, key_hash, shard_of,
};
use crate::schedules;
use crate::settings::Settings;
use crate::topics::Presence;
use crate::window::{BACKLOG, Backlog, Inserted, Window};

use self::conflict::{NamedJob, Resolution};
use self::look_ahead::{LookAhead, Release};
pub(crate) use self::look_ahead::{Obstacle, Target, WindowRoom};
use self::outbox::Outbox;
use self::pins::Pins;
pub(crate) use self::pins::{NamedBy, Taken, UrgentCopy};
use self::recurring::DueOrder;
pub(crate) use self::refusal::RefusedJob;
use self::released_waits::ReleasedWaits;

mod conflict;
mod look_ahead;
mod outbox;
mod pins;
mod recurring;
mod refusal;
mod released_waits;

/// The records that a shard writes in one turn.
#[derive(Debug, Default)]
pub(crate) struct Writes {
    pub(crate) outputs: Vec<Output>,
    /// Offsets of the commands that the turn decides.
    pub(crate) completed: Vec<i64>,
    pub(crate) tally: Tally,
    /// The approximate size of the outputs.
    bytes: usize,
}

impl Writes {
    fn push(&mut self, output: Output) {
        // Rejected and forwarded commands keep their keys and headers, which can be larger than their values.
        self.bytes += output.size();
        self.outputs.push(output);
    }

    /// Whether another output fits.
    fn fits_into(&self, room: Room) -> bool {
        self.outputs.len() < room.records && self.bytes < room.bytes
    }

    /// The approximate size of the outputs.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// How much a turn may write. One command or one job may exceed it, so that each makes progress however large it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) records: usize,
    pub(crate) bytes: usize,
}

impl Room {
    /// This many quarters of the room, rounded up: at least one record of a room that is not empty.
    fn quarters(self, count: usize) -> Self {
        let part = |whole: usize| whole / 4 * count + (whole % 4 * count).div_ceil(4);
        Self {
            records: part(self.records),
            bytes: part(self.bytes),
        }
    }

    pub(crate) fn is_empty(self) -> bool {
        self.records == 0 || self.bytes == 0
    }
}

/// Counts of one turn, for metrics.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) accepted: u64,
    pub(crate) duplicates: u64,
    pub(crate) conflicts: u64,
    pub(crate) rejected: u64,
    pub(crate) no_room: u64,
    pub(crate) over_quota: u64,
    pub(crate) forwarded: u64,
    pub(crate) cancelled: u64,
    pub(crate) rescheduled: u64,
    /// Long waits that an operator has released before they were due.
    pub(crate) released_early: u64,
    pub(crate) replaced: u64,
    pub(crate) refused: u64,
    pub(crate) expired: u64,
    pub(crate) forgotten: u64,
    /// Jobs whose topic was missing for too long, or refused them.
    pub(crate) dead: u64,
    /// Schedules that were created, changed or deleted.
    pub(crate) schedules_changed: u64,
    /// Occurrences of schedules for which a job was created, that were skipped, and whose job could not be created yet.
    pub(crate) occurrences: u64,
    pub(crate) skipped_occurrences: u64,
    pub(crate) postponed_occurrences: u64,
    pub(crate) dispatched: Vec<Dispatched>,
}

/// A dispatched job.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dispatched {
    due: Timestamp,
    /// Since when it could be dispatched: since its due time or, if its application was held back or it was pinned, later.
    pub(crate) ready: Timestamp,
}

impl Tally {
    /// The number of jobs that have ended. Of the replaced ones, some have.
    fn ended(&self) -> usize {
        let others = self.cancelled + self.replaced + self.expired + self.dead;
        self.dispatched.len() + usize::try_from(others).unwrap_or(usize::MAX)
    }

    /// Counts a dispatched job with this due time as dead. False if there is none.
    pub(crate) fn refuse_dispatch(&mut self, due: Timestamp) -> bool {
        let Some(index) = self.dispatched.iter().position(|job| job.due == due) else {
            return false;
        };
        self.dispatched.swap_remove(index);
        self.dead += 1;
        true
    }
}

/// A command that is not decided yet.
struct PendingCommand {
    record: Record,
    incoming: Incoming,
    /// Whether it names a job or a key of this shard. Such commands are decided in the order of their offsets.
    is_in_order: bool,
}

impl PendingCommand {
    /// The approximate size in memory.
    fn size(&self) -> usize {
        let record = &self.record;
        500 + record.value.as_ref().map_or(0, Bytes::len)
            + record.key.as_ref().map_or(0, Bytes::len)
            + record.headers.byte_len()
    }
}

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

/// The maximum number and size of commands in memory.
const MAX_COMMANDS: usize = 10_000;
const MAX_COMMAND_BYTES: usize = 64 << 20;
/// The maximum size of the records that a shard writes in one turn.
const MAX_TURN_BYTES: usize = 8 << 20;
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
/// How long a topic must be missing before a job that was due long ago becomes a dead letter.
const CONFIRMED_MISSING: Duration = Duration::from_secs(30);
/// The code of a dead letter for a job whose topic does not exist.
pub(crate) const TOPIC_MISSING: &str = "topic.missing";
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

    /// Whether a topic has been missing for so long that it is not expected to exist a moment later.
    fn is_confirmed_missing(&self, lasting: Duration) -> bool {
        lasting >= CONFIRMED_MISSING.min(self.missing_topic_timeout)
    }

    /// The topic to which a job is dispatched. For the long wait of a pipeline, it is the return topic that the record names,
    /// as long as the pipeline still uses that topic, and otherwise the pipeline's current return topic.
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

    /// What to do with a due job, depending on whether its topic exists and its application is paused.
    fn due_action(&self, presence: Presence, apps: &AppStates, job: &Job, now: Timestamp) -> DueAction {
        let has_expired = job.expires.is_some_and(|expires| expires < now);
        if apps.pauses(job) && !has_expired {
            return DueAction::Park;
        }
        match presence {
            Presence::Exists => DueAction::Dispatch,
            // The dispatch of an expired job writes nothing to the topic.
            _ if has_expired => DueAction::Dispatch,
            Presence::Missing { lasting }
                if self.is_confirmed_missing(lasting) && job.due.after(self.missing_topic_timeout) <= now =>
            {
                DueAction::DeadLetter
            }
            Presence::Missing { .. } | Presence::Unknown => DueAction::Park,
        }
    }

    /// The topic and the application of a job.
    fn target(&self, job: &Job) -> Target {
        (self.destination(job), job.app.clone())
    }
}

/// What to do with a due job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DueAction {
    Dispatch,
    /// Keep it until its topic exists and its application is not paused.
    Park,
    /// Write a dead letter: the topic has been missing for too long.
    DeadLetter,
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
    /// The size of the commands in all three queues.
    command_bytes: usize,
    /// The size of the results of lookups in `ready`.
    found_bytes: usize,
    /// Whether more commands or jobs are ready than the current turn can take.
    is_crowded: bool,
    /// The number of the current turn, and its changes.
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
    pins: Pins,
    released_waits: ReleasedWaits,
}

impl Shard {
    pub(crate) fn new(settings: Arc<Settings>, number: i32) -> Self {
        let apps = settings.app_states.current();
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
            command_bytes: 0,
            found_bytes: 0,
            is_crowded: false,
            turn: 0,
            changes: Vec::new(),
            outbox: Outbox::default(),
            memory_pressure: MemoryPressure::Low,
            end: 0,
            forgettable: VecDeque::new(),
            is_scanning_forgettable: false,
            next_forget: Timestamp::from_millis(0),
            pins: Pins::default(),
        }
    }

    /// Whether the index has been brought up to date, so that the shard may act.
    pub(crate) fn is_live(&self) -> bool {
        self.is_live && self.quotas.is_counted()
    }

    /// The number of jobs in the window.
    pub(crate) fn window_len(&self) -> usize {
        self.window.len()
    }

    /// The number of due jobs in the window of each application that is held back by its rate.
    pub(crate) fn held_back(&mut self, now: Timestamp) -> BTreeMap<Arc<str>, usize> {
        self.window.held_back(now)
    }

    /// The number of changes that the index does not contain yet.
    pub(crate) fn index_lag(&self) -> usize {
        self.overlay.len()
    }

    /// The approximate number of due jobs that wait for a missing topic or because their application is paused.
    pub(crate) fn parked(&self) -> BTreeMap<Obstacle, usize> {
        self.look_ahead.parked()
    }

    /// Whether the index has refused changes and has not proven since that it has free memory.
    pub(crate) fn is_index_full(&self) -> bool {
        self.outbox.is_index_full()
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

    /// Releases long waits that the index may not contain yet. The others are read from it.
    fn release_unindexed_waits(&mut self) {
        let unindexed = self.overlay.scheduled();
        let released = unindexed.filter(|job| self.released_waits.contains(job));
        let released: Vec<_> = released.cloned().collect();
        self.queue_released_waits(released);
    }

    fn queue_released_waits(&mut self, jobs: Vec<Arc<Job>>) {
        self.released_waits.undecided += jobs.len();
        self.ready.extend(jobs.into_iter().map(ReadyItem::ReleasedWait));
    }

    /// How many more commands the shard accepts.
    pub(crate) fn capacity(&self) -> usize {
        if !self.is_live() || self.is_index_behind(1) || self.command_bytes >= MAX_COMMAND_BYTES {
            return 0;
        }
        MAX_COMMANDS.saturating_sub(self.needs_lookup.len() + self.looking_up.len() + self.ready.len())
    }

    /// Whether this many times the maximum of changes wait for the index.
    fn is_index_behind(&self, factor: usize) -> bool {
        let bytes = self.overlay.bytes().max(self.outbox.bytes());
        self.overlay.len() >= factor * MAX_OVERLAY || bytes >= factor * MAX_OVERLAY_BYTES
    }

    /// The size of commands, results of lookups, and changes that the index does not contain yet: as jobs in the overlay, and encoded in
    /// the outbox.
    pub(crate) fn memory(&self) -> usize {
        self.command_bytes + self.found_bytes + self.overlay.bytes() + self.outbox.bytes()
    }

    /// When the shard next has something to do; in the past if it has already.
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        if !self.is_live() {
            return None;
        }
        if !self.ready.is_empty() || !self.forgettable.is_empty() {
            return Some(Timestamp::from_millis(0));
        }
        self.window.next_due().filter(|_| self.may_dispatch())
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

    /// Accepts a record of the ingest topic.
    pub(crate) fn accept(&mut self, record: Record, now: Timestamp) {
        let incoming = crate::request::read(&record, &self.settings.rules, now);
        let needs_lookup = self.query_for(&incoming).is_some() && self.owner_shard(&incoming) == self.number;
        self.pins.accepted(record.position.offset, needs_lookup);
        let command = PendingCommand {
            record,
            incoming,
            is_in_order: needs_lookup,
        };
        self.command_bytes += command.size();
        if needs_lookup {
            self.needs_lookup.push_back(command);
        } else {
            self.ready
                .push_back(ReadyItem::Command(Box::new(command), Found::default()));
        }
    }

    /// The shard that owns the job or the idempotency key of a command.
    fn owner_shard(&self, incoming: &Incoming) -> i32 {
        let of_key = |app: &str, key: &str| shard_of(app, key, self.settings.partitions);
        match &incoming.command {
            Ok(Command::Schedule(request)) => match &request.idempotency_key {
                Some(key) => of_key(&request.app, key),
                None => self.number,
            },
            Ok(Command::Cancel(job) | Command::Reschedule { job, .. }) => match job {
                JobRef::Id(id) if id.shard() < self.settings.partitions => id.shard(),
                JobRef::Id(_) => self.number,
                JobRef::Key { app, key } => of_key(app, key),
            },
            Ok(Command::ChangeSchedule(change)) => {
                schedules::shard(change.id.as_str(), self.settings.partitions)
            }
            Err(_) => self.number,
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
        if !self.is_index_behind(1) {
            requests.extend(self.released_waits.request().map(IndexRequest::ScanWaits));
        }
        // The clock may have been set back.
        let may_forget = now >= self.next_forget || self.next_forget > now.after(FORGET_INTERVAL);
        if !self.is_scanning_forgettable && self.forgettable.is_empty() && may_forget {
            self.is_scanning_forgettable = true;
            requests.push(IndexRequest::Forgettable);
        }
        requests
    }

    /// What the shard must look up to decide a command.
    fn query_for(&self, incoming: &Incoming) -> Option<Query> {
        match incoming.command.as_ref().ok()? {
            Command::Schedule(request) => {
                let hash = key_hash(&request.app, request.idempotency_key.as_deref()?);
                Some(match request.on_conflict {
                    ConflictPolicy::Reject => Query::Key(hash),
                    ConflictPolicy::Replace => Query::JobOfKey(hash),
                })
            }
            Command::Cancel(job) | Command::Reschedule { job, .. } => Some(match job {
                JobRef::Id(id) => Query::Job(*id),
                JobRef::Key { app, key } => Query::JobOfKey(key_hash(app, key)),
            }),
            Command::ChangeSchedule(change) => {
                Some(Query::Job(schedules::entry_id(change.id.as_str(), self.number)))
            }
        }
    }

    fn request_scan(&mut self, now: Timestamp) -> Option<IndexRequest> {
        if self.is_index_behind(SCAN_OVERLAY_FACTOR) {
            return None;
        }
        let (settings, apps) = (&self.settings, &self.apps);
        let presence = |obstacle: &Obstacle| match obstacle {
            Obstacle::MissingTopic((topic, _)) => settings.topics.presence(topic),
            Obstacle::Paused(app) if apps.is_paused(app) => Presence::Unknown,
            Obstacle::Paused(_) => Presence::Exists,
        };
        let release = |obstacle: &Obstacle| match presence(obstacle) {
            Presence::Exists => Release::All,
            Presence::Missing { lasting } if settings.is_confirmed_missing(lasting) => {
                let timeout = i64::try_from(settings.missing_topic_timeout.as_millis()).unwrap_or(i64::MAX);
                Release::Until(Timestamp::from_millis(now.as_millis().saturating_sub(timeout)))
            }
            Presence::Missing { .. } | Presence::Unknown => Release::Nothing,
        };
        let request = self
            .look_ahead
            .request(now, settings.window, &self.window, release);
        request.map(IndexRequest::Scan)
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

    /// Moves the jobs that a scan has found to the window, as far as there is room. The overlay takes precedence over the index.
    fn load(&mut self, scan: Scan<ScannedJob>, now: Timestamp) {
        let Some(until) = self.look_ahead.scanned_until() else {
            return;
        };
        let in_overlay = self.overlay.scheduled().filter(|job| job.due <= until);
        let in_overlay: Vec<(Flow, Arc<Job>)> = in_overlay.map(|job| (Flow::of(job), job.clone())).collect();
        let flows = in_overlay.iter().map(|(flow, _)| flow).collect();
        let Some(parts) = self.look_ahead.begin_load(&scan, &flows, now) else {
            return;
        };
        let mut found: HashMap<Flow, BTreeMap<Cursor, Arc<Job>>> = HashMap::new();
        for (flow, job) in in_overlay {
            let cursor = Cursor::of(&job);
            let part = self.look_ahead.part_of(&parts, &flow);
            let is_in_part = part.is_some_and(|part| part.contains(cursor));
            if is_in_part && self.window.get(job.id).is_none() {
                found.entry(flow).or_default().insert(cursor, job);
            }
        }
        for scanned in scan.flows {
            let Some(part) = parts.flows.get(&scanned.flow) else {
                continue;
            };
            for ScannedJob { cursor, job } in scanned.rows {
                let id = cursor.id;
                if !part.contains(cursor) || self.overlay.job(id).is_some() || self.window.get(id).is_some() {
                    continue;
                }
                let jobs = found.entry(scanned.flow.clone()).or_default();
                jobs.insert(cursor, job);
            }
        }
        for (flow, part) in &parts.flows {
            self.load_flow(flow, found.remove(flow).unwrap_or_default());
            self.look_ahead.loaded(flow, part.to);
        }
        for (flow, jobs) in found {
            self.load_flow(&flow, jobs);
        }
    }

    /// Moves jobs of one flow to the window, up to the first one for which there is no room.
    fn load_flow(&mut self, flow: &Flow, jobs: BTreeMap<Cursor, Arc<Job>>) {
        for (cursor, job) in jobs {
            if !self.keep_in_window(job) {
                return self.look_ahead.lacks_room(flow, cursor, &self.window);
            }
        }
    }

    /// Adds a job to the window if there is room. Jobs that made room are read again.
    fn keep_in_window(&mut self, job: Arc<Job>) -> bool {
        let Inserted { fits, evicted } = self.window.insert(job);
        for job in evicted {
            self.look_ahead.rewind(&Flow::of(&job), Cursor::of(&job));
        }
        fits
    }

    /// Decides commands and dispatches due jobs, until what is to be written fills the room.
    pub(crate) fn finish(&mut self, now: Timestamp, room: Room) -> Writes {
        let room = Room {
            bytes: room.bytes.min(MAX_TURN_BYTES),
            ..room
        };
        let mut writes = Writes::default();
        if !self.is_live() && !mutant!("shard-acts-before-its-index-is-ready") {
            return writes;
        }
        self.turn += 1;
        let is_due = self.window.next_due().is_some_and(|due| due <= now);
        let half = if is_due { room.quarters(2) } else { room };
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
                    self.command_bytes -= command.size();
                    self.found_bytes -= found.size();
                    let (offset, is_in_order) = (command.record.position.offset, command.is_in_order);
                    writes.completed.push(offset);
                    if mutant!("shard-forgets-completions") {
                        writes.completed.pop();
                    }
                    self.decide(*command, &found, now, &mut writes);
                    self.note_decided(offset, is_in_order);
                }
                Some(ReadyItem::ReleasedWait(job)) => {
                    self.released_waits.undecided -= 1;
                    self.release_wait(&job, now, &mut writes);
                }
                Some(ReadyItem::IndexApplied(turn)) => self.overlay.remove_applied(turn),
                None => break,
            }
        }
        self.end_pins(now);
        let mut order = DueOrder::new(room);
        while writes.fits_into(room) && self.may_dispatch() {
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
            if self.keep_if_pinned(&job) {
                self.window.return_token(&job);
                continue;
            }
            let dispatched = writes.tally.dispatched.len();
            let target = self.settings.target(&job);
            let presence = self.settings.topics.presence(&target.0);
            match self.settings.due_action(presence, &self.apps, &job, now) {
                DueAction::Dispatch => self.dispatch(&job, target.0, now, &mut writes),
                DueAction::Park if mutant!("shard-forgets-parked-jobs") => {}
                DueAction::Park => self.park(&job, target, now),
                DueAction::DeadLetter => self.dead_letter(&job, target, now, &mut writes),
            }
            if writes.tally.dispatched.len() == dispatched {
                self.window.return_token(&job);
            }
        }
        let is_due_soon = self
            .window
            .next_due()
            .is_some_and(|due| due <= now.after(DUE_SOON));
        let forgotten = if is_due_soon && !mutant!("shard-forgets-beside-due-jobs") {
            // More than jobs end, so that ended jobs do not pile up under a steady load.
            (2 * writes.tally.ended()).max(MAX_FORGOTTEN_BESIDE_DUE_JOBS)
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

    /// The turn has been committed, and the state topic now ends at `end`.
    pub(crate) fn committed(&mut self, end: i64) {
        // The index learns of changes only after their commit, so it never contains what an abort undid. If the process
        // crashes here, the next owner reads the changes from the state topic before it acts.
        let from = std::mem::replace(&mut self.end, end);
        let changes = std::mem::take(&mut self.changes);
        self.outbox.push(self.turn, from, end, changes);
    }

    fn decide(&mut self, pending: PendingCommand, found: &Found, now: Timestamp, writes: &mut Writes) {
        let owner = self.owner_shard(&pending.incoming);
        if owner != self.number {
            writes.tally.forwarded += 1;
            let mut headers = headers::user_headers(&pending.record.headers, None);
            // The lineage contains the timestamp of the first record, from which a `delay` counts.
            if !mutant!("shard-forwards-without-the-first-time") {
                headers::write_lineage(&mut headers, NAME, &first_origin(&pending.record), 0);
            }
            writes.push(Output {
                topic: self.settings.ingest.clone(),
                partition: Some(owner),
                key: pending.record.key,
                value: pending.record.value,
                headers,
            });
            return;
        }
        let Incoming {
            command,
            answer_to,
            rejected_wait,
        } = pending.incoming;
        let outcome = match command {
            Ok(Command::Schedule(request)) => self.schedule(*request, &pending.record, found, now, writes),
            Ok(Command::Cancel(job)) => self.cancel(&job, found, now, writes),
            Ok(Command::Reschedule { job, due }) => self.reschedule(&job, due, found, now, writes),
            Ok(Command::ChangeSchedule(change)) => {
                self.change_schedule(*change, &pending.record, found, now, writes)
            }
            Err(failure) => {
                writes.tally.rejected += 1;
                match rejected_wait {
                    Some(wait) => reject_wait(*wait, &pending.record, &failure, now, writes),
                    None => self.reject(&pending.record, &failure, now, writes),
                }
                rejected_outcome(&failure)
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
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let hash = request
            .idempotency_key
            .as_deref()
            .map(|key| key_hash(&request.app, key));
        let mut superseded = None;
        if let Some(existing) = hash.and_then(|hash| self.key_in_use(&hash, found, now)) {
            let job = self.job_of_key(&existing, found);
            match conflict::resolve(&request, &existing, job.as_ref()) {
                Resolution::Duplicate | Resolution::Conflict => {
                    return self.answer_repeated_key(existing, job, &request, record, now, writes);
                }
                Resolution::Replace(job) => return self.replace(&job, &request, record, now, writes),
                Resolution::Supersede(job) => superseded = Some(job),
                Resolution::Schedule => {}
            }
        }
        if let Err(failure) = self.check_admission(&request, now) {
            return self.reject_command(record, &failure, now, writes);
        }
        // A job that takes the place of another one adds none.
        if superseded.is_none()
            && let Err(failure) = self.check_quota(&request)
        {
            return self.reject_command(record, &failure, now, writes);
        }
        let result = if let Some(superseded) = superseded {
            writes.tally.replaced += 1;
            // Before the new job: the last record with a key counts when the index is rebuilt.
            self.end_job(&superseded, JobState::Cancelled, now, writes);
            v1::Outcome::Replaced
        } else {
            writes.tally.accepted += 1;
            v1::Outcome::Scheduled
        };
        let id = self.requested_id(record, now);
        let job = self.accept_job(id, request, None, Some(record), now, writes);
        v1::CommandOutcome {
            outcome: result.into(),
            job: Some(job),
            ..v1::CommandOutcome::default()
        }
    }

    /// The id of the job that the request in this record creates.
    fn requested_id(&self, record: &Record, now: Timestamp) -> JobId {
        let position = &record.position;
        JobId::new(
            record.timestamp.unwrap_or(now),
            position.partition,
            position.offset,
        )
    }

    /// Adds a new job, and dispatches it at once if it is due and nothing is before it. `record` is its request, and `occurrence`
    /// that of the schedule that creates it.
    fn accept_job(
        &mut self,
        id: JobId,
        request: Request,
        occurrence: Option<Arc<str>>,
        record: Option<&Record>,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::Job {
        let mut job = Job {
            id,
            app: request.app,
            kind: request.kind,
            state: JobState::Scheduled,
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
            occurrence,
        };
        if let Some(record) = record {
            self.settings.spans.accepted(&mut job, record);
        }
        // Its command was in the topic when an operator has released what waits.
        if let Some(released) = self.released_waits.released(&job, now) {
            writes.tally.released_early += 1;
            job = released;
        }
        self.use_key(&job);
        self.quotas.add(&job);
        let proto_job = codec::to_proto(&job, false);
        let job = Arc::new(job);
        // While more jobs are due than can leave, or earlier ones of its flow are still to be read, a due job queues with the others.
        let topic = self.settings.destination(&job);
        let presence = self.settings.topics.presence(&topic);
        let action = self.settings.due_action(presence, &self.apps, &job, now);
        let may_dispatch = self.may_dispatch() && self.pins.pin_of(&job).is_none();
        let is_due = job.due <= now && action == DueAction::Dispatch && may_dispatch;
        let flow = Flow::of(&job);
        let is_next = self.look_ahead.is_next(&flow, Cursor::of(&job)) && !self.look_ahead.is_parked(&flow);
        if is_due && is_next && !self.is_crowded && !self.window.is_limited(&job) {
            self.dispatch(&job, topic, now, writes);
        } else {
            self.save(job, now, writes);
        }
        proto_job
    }

    /// Checks that the index has memory for a job. Records of pipelines are always accepted: no client would send
    /// them again.
    fn check_admission(&self, request: &Request, now: Timestamp) -> Result<(), Failure> {
        match request.kind {
            // A due job of such an application stays in the index for an unknown time.
            Kind::App if self.apps.is_paused(&request.app) || self.window.holds_back(&request.app) => {
                self.check_free_memory(schedules::NEVER, now)
            }
            Kind::App | Kind::Schedule => self.check_free_memory(request.due, now),
            Kind::LongWait => Ok(()),
        }
    }

    /// Checks that another job of the application may wait. Records of pipelines are always accepted.
    fn check_quota(&self, request: &Request) -> Result<(), Failure> {
        match request.kind {
            Kind::App => self.quotas.check(&request.app),
            Kind::Schedule | Kind::LongWait => Ok(()),
        }
    }

    /// Rejects a command, and counts it by the reason.
    fn reject_command(
        &self,
        record: &Record,
        failure: &Failure,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let tally = &mut writes.tally;
        *match &*failure.code {
            INDEX_FULL => &mut tally.no_room,
            QUOTA_EXCEEDED => &mut tally.over_quota,
            _ => &mut tally.rejected,
        } += 1;
        self.reject(record, failure, now, writes);
        rejected_outcome(failure)
    }

    fn check_free_memory(&self, due: Timestamp, now: Timestamp) -> Result<(), Failure> {
        let pressure = if self.outbox.is_index_full() {
            MemoryPressure::Full
        } else {
            self.memory_pressure
        };
        admission::check(pressure, due, now, self.settings.window)
    }

    /// Answers a request whose idempotency key is in use: a duplicate or a conflict.
    fn answer_repeated_key(
        &mut self,
        existing: KeyValue,
        job: Option<Arc<Job>>,
        request: &Request,
        record: &Record,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let proto_job = match job {
            Some(job) => codec::to_proto(&job, false),
            None => v1::Job {
                id: existing.id.to_string(),
                app: request.app.to_string(),
                ..v1::Job::default()
            },
        };
        let (result, reason) = if existing.request_hash == request.request_hash {
            writes.tally.duplicates += 1;
            (v1::Outcome::Duplicate, String::new())
        } else {
            writes.tally.conflicts += 1;
            let message = format!(
                "idempotencyKey is in use by job {}, whose request has different content",
                existing.id
            );
            let failure = Failure::permanent("request.conflict", message);
            self.reject(record, &failure, now, writes);
            (v1::Outcome::Conflict, failure.message)
        };
        v1::CommandOutcome {
            outcome: result.into(),
            job: Some(proto_job),
            reason,
            ..v1::CommandOutcome::default()
        }
    }

    fn cancel(
        &mut self,
        job: &JobRef,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let job = match self.scheduled_job(job, found, now, writes) {
            Ok(job) => job,
            Err(outcome) => return *outcome,
        };
        writes.tally.cancelled += 1;
        let job = mutant!(
            "shard-ignores-cancellations",
            self.end_job(&job, JobState::Cancelled, now, writes),
            job
        );
        outcome(v1::Outcome::Cancelled, Some(&job), String::new())
    }

    fn reschedule(
        &mut self,
        job: &JobRef,
        due: Timestamp,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> v1::CommandOutcome {
        let job = match self.scheduled_job(job, found, now, writes) {
            Ok(job) => job,
            Err(outcome) => return *outcome,
        };
        writes.tally.rescheduled += 1;
        let job = Arc::new(Job {
            due,
            revision: job.revision + 1,
            expires: job.expires.map(|expires| due.after(expires.since(job.due))),
            ..(*job).clone()
        });
        self.save(job.clone(), now, writes);
        outcome(v1::Outcome::Rescheduled, Some(&job), String::new())
    }

    /// Makes a long wait due that an operator has released. `found` is its state in the index.
    fn release_wait(&mut self, found: &Arc<Job>, now: Timestamp, writes: &mut Writes) {
        let newest = self.newest_job(found.id, Some(found));
        let Some(job) = newest.and_then(|job| self.released_waits.released(&job, now)) else {
            return;
        };
        writes.tally.released_early += 1;
        let revision = job.revision + 1;
        self.save(Arc::new(Job { revision, ..job }), now, writes);
    }

    /// A job or a schedule in its newest state. `found` is its state in the index.
    fn newest_job(&self, id: JobId, found: Option<&Arc<Job>>) -> Option<Arc<Job>> {
        if let Some(job) = mutant!("shard-trusts-the-index-too-early", self.overlay.job(id), None) {
            return job.cloned();
        }
        self.window.get(id).or(found).cloned()
    }

    /// The job of a command, if it is scheduled; otherwise the outcome to answer with.
    fn scheduled_job(
        &mut self,
        job: &JobRef,
        found: &Found,
        now: Timestamp,
        writes: &mut Writes,
    ) -> Result<Arc<Job>, Box<v1::CommandOutcome>> {
        let (result, job) = match self.named_job(job, found, now) {
            // Clients cannot cancel or reschedule the record of a pipeline: the pipeline would lose it.
            NamedJob::Known(job) if job.kind != Kind::App => (v1::Outcome::Unknown, None),
            NamedJob::Known(job) => match job.state {
                JobState::Scheduled => return Ok(job),
                JobState::Dispatched => (v1::Outcome::AlreadyDispatched, Some(job)),
                JobState::Cancelled => (v1::Outcome::AlreadyCancelled, Some(job)),
                JobState::Expired => (v1::Outcome::Expired, Some(job)),
            },
            NamedJob::Ended(job) => {
                writes.tally.refused += 1;
                return Err(Box::new(v1::CommandOutcome {
                    outcome: v1::Outcome::Ended.into(),
                    job: Some(*job),
                    ..v1::CommandOutcome::default()
                }));
            }
            NamedJob::Unknown => (v1::Outcome::Unknown, None),
        };
        writes.tally.refused += 1;
        Err(Box::new(outcome(result, job.as_deref(), String::new())))
    }

    fn dispatch(&mut self, job: &Arc<Job>, topic: Arc<str>, now: Timestamp, writes: &mut Writes) {
        debug_assert!(job.due <= now || mutant!("shard-dispatches-early"), "never early");
        if job.expires.is_some_and(|expires| expires < now) && !mutant!("shard-dispatches-expired-jobs") {
            writes.tally.expired += 1;
            self.end_job(job, JobState::Expired, now, writes);
            return;
        }
        writes.tally.dispatched.push(Dispatched {
            due: job.due,
            ready: self.window.ready_at(job).max(self.unpinned_since(job)),
        });
        let mut headers = self.dispatch_headers(job, now);
        if job.kind == Kind::LongWait && headers.last(headers::RETURN_TOPIC) != Some(topic.as_bytes()) {
            headers::set_return_topic(&mut headers, &topic);
        }
        writes.push(Output {
            topic,
            partition: None,
            key: job.payload.key.clone(),
            value: job.payload.value.clone(),
            headers,
        });
        self.end_job(job, JobState::Dispatched, now, writes);
    }

    /// Replaces a job whose topic was missing for too long by a dead letter.
    fn dead_letter(&mut self, job: &Arc<Job>, target: Target, now: Timestamp, writes: &mut Writes) {
        let topic = &target.0;
        let message = format!("topic `{topic}` does not exist; the job was due at {}", job.due);
        let mut output = Output {
            topic: topic.clone(),
            partition: None,
            key: job.payload.key.clone(),
            value: job.payload.value.clone(),
            headers: self.dispatch_headers(job, now),
        };
        let failure = Failure::permanent(TOPIC_MISSING, message);
        if refused::replace(&self.settings, &mut output, &failure, now) == Replacement::Nothing {
            tracing::error!(job = %job.id, topic = &**topic, "cannot write a dead letter for the job; it is kept");
            return self.park(job, target, now);
        }
        writes.tally.dead += 1;
        writes.push(output);
        self.end_job(job, JobState::Expired, now, writes);
    }

    /// Keeps a due job out of the window, and all jobs of its flow with it, until its topic exists and its application is not paused.
    fn park(&mut self, job: &Job, target: Target, now: Timestamp) {
        let flow = Flow::of(job);
        let obstacle = if self.apps.pauses(job) {
            Obstacle::Paused(job.app.clone())
        } else {
            Obstacle::MissingTopic(target)
        };
        self.window.remove_flow(&flow);
        self.look_ahead.park(&flow, obstacle, Cursor::of(job), now);
    }

    fn dispatch_headers(&self, job: &Job, now: Timestamp) -> Headers {
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
        if let Some(occurrence) = &job.occurrence {
            list.push_text(headers::JOB_OCCURRENCE, occurrence);
        }
        list
    }

    /// Writes the state of a scheduled job, and keeps the job in the window if it is due soon.
    fn save(&mut self, job: Arc<Job>, now: Timestamp, writes: &mut Writes) {
        self.write_state(&job, writes);
        let (flow, cursor) = (Flow::of(&job), Cursor::of(&job));
        let is_due_soon =
            job.due <= now.after(self.settings.window) || self.look_ahead.has_passed(&flow, cursor);
        // While earlier jobs of the flow are still to be read, this one is read after them.
        let is_next = self.look_ahead.is_next(&flow, cursor) && !self.look_ahead.is_parked(&flow);
        let id = job.id;
        if !(is_due_soon && is_next && self.keep_in_window(job)) {
            self.window.remove(id);
            self.look_ahead.rewind(&flow, cursor);
        }
    }

    fn end_job(&mut self, job: &Job, state: JobState, now: Timestamp, writes: &mut Writes) -> Arc<Job> {
        self.quotas.remove(job);
        let job = Arc::new(job.ended(state, now));
        self.write_state(&job, writes);
        self.window.remove(job.id);
        job
    }

    /// Writes the state of a job to the state topic and to the overlay.
    fn write_state(&mut self, job: &Arc<Job>, writes: &mut Writes) {
        let record = codec::encode(job);
        writes.push(Output {
            topic: self.settings.state.clone(),
            partition: Some(self.number),
            key: Some(codec::state_key(job).into()),
            value: Some(record.clone()),
            headers: Headers::new(),
        });
        if job.state == JobState::Dispatched && mutant!("shard-dispatches-without-a-state-record") {
            writes.outputs.pop();
        }
        if !mutant!("shard-rewinds-for-changed-jobs") {
            self.pins.forget(job.id);
        }
        self.changes
            .push(codec::change(job, record, self.settings.retention));
        self.overlay.set(self.turn, job.id, Some(job.clone()));
    }

    fn forget(&mut self, id: JobId, writes: &mut Writes) {
        if self.overlay.job(id).is_some() {
            // The index listed the job before its last change.
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
        self.changes.push(Change::of_job(id, Effect::Forgotten));
        self.overlay.set(self.turn, id, None);
    }

    fn reject(&self, record: &Record, failure: &Failure, now: Timestamp, writes: &mut Writes) {
        let output = DeadLetter {
            topic: self.settings.dead_letters.clone(),
            pipeline: NAME,
            arrival: Some(Arrival::new(record)),
            failure,
            trace: None,
            now,
        };
        writes.push(output.with_content_of(record));
    }
}

/// Rejects a long wait. The record becomes a dead letter of its pipeline, with the lineage that it has.
fn reject_wait(wait: RejectedWait, command: &Record, failure: &Failure, now: Timestamp, writes: &mut Writes) {
    let mut output = Output {
        topic: wait.pipeline.return_topic(),
        partition: None,
        key: wait.payload.key,
        value: wait.payload.value,
        headers: wait.payload.headers,
    };
    route::replace_refused(&wait.pipeline, &mut output, Origin::of(command), failure, now);
    writes.push(output);
}

fn outcome(outcome: v1::Outcome, job: Option<&Job>, reason: String) -> v1::CommandOutcome {
    v1::CommandOutcome {
        outcome: outcome.into(),
        job: job.map(|job| codec::to_proto(job, false)),
        reason,
        ..v1::CommandOutcome::default()
    }
}

fn rejected_outcome(failure: &Failure) -> v1::CommandOutcome {
    v1::CommandOutcome {
        code: failure.code.clone(),
        ..outcome(v1::Outcome::Rejected, None, failure.message.clone())
    }
}

#[cfg(test)]
pub(crate) mod tests;
