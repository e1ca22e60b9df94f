//! A shard against a model of Kafka and of the index, with turns that are lost, answers that come late, and
//! restarts at any moment.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Mutex;

use proptest::prelude::*;
use redeliver_core::{Position, Span};

use super::*;
use crate::index::Row;
use crate::job::{Payload, Priority};
use crate::refused;
use crate::room::INDEX_FULL;
use crate::shard::outbox::BATCH_BYTES;

const TIMEOUT: Duration = Duration::from_secs(2);
const START: i64 = 1_763_722_800_000;
const APP: &str = "jobs";
const RETURN: &str = "docs-retry-due";
/// Of the application `gone`, whose topic comes and goes.
const GONE: &str = "gone-jobs";

/// What is known of [`GONE`]; all other topics exist.
#[derive(Clone)]
struct Known(Arc<Mutex<Presence>>);

impl Default for Known {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Presence::Exists)))
    }
}

impl Known {
    fn get(&self) -> Presence {
        *self.0.lock().unwrap()
    }

    fn set(&self, presence: Presence) {
        *self.0.lock().unwrap() = presence;
    }
}

impl Topics for Known {
    fn presence(&self, topic: &Arc<str>) -> Presence {
        match &**topic {
            GONE => self.get(),
            _ => Presence::Exists,
        }
    }
}

fn settings() -> Settings {
    let hour = Duration::from_secs(3600);
    Settings {
        rules: Rules {
            apps: [("app", APP), ("other", APP), ("gone", GONE)]
                .map(|(app, topic)| (app.to_owned(), Arc::from(topic)))
                .into(),
            pipelines: [("docs".to_owned(), Arc::new(redeliver_core::Pipeline::new("docs")))].into(),
            time_zone: jiff::tz::TimeZone::UTC,
            max_ahead: Span::from_secs(86_400 * 365),
            max_data: 1 << 20,
        },
        ingest: "ingest".into(),
        state: "state".into(),
        dead_letters: "dlq".into(),
        answers: "answers".into(),
        partitions: 1,
        memory: RetentionPolicy {
            keys: 24 * hour,
            ended: 24 * hour,
        },
        window: Duration::from_millis(200),
        window_jobs: 8,
        window_bytes: 1 << 20,
        topics: Arc::new(Known::default()),
        missing_topic_timeout: TIMEOUT,
        spans: Spans::default(),
    }
}

#[test]
fn an_empty_window_of_any_size_looks_ahead() {
    for (window_jobs, window_bytes) in [
        (8, 1 << 20),
        (100, 1 << 20),
        (50_000, 64 << 20),
        (10_000_000, 1 << 36),
    ] {
        let settings = Settings {
            window_jobs,
            window_bytes,
            ..settings()
        };
        let mut shard = Shard::new(Arc::new(settings), 0);
        let now = Timestamp::from_millis(START);
        shard.answer(IndexResponse::Ready { end: 0 }, now);
        let looks = shard
            .asks(now)
            .iter()
            .any(|ask| matches!(ask, IndexRequest::DueScan { .. }));
        assert!(looks, "{window_jobs} jobs, {window_bytes} bytes");
    }
}

/// What a user does, and what happens to us.
#[derive(Clone, Debug)]
enum Step {
    Schedule {
        ahead: u16,
        key: Option<u8>,
    },
    Cancel(usize),
    Reschedule(usize, u16),
    Pass(u16),
    TransactionBatch {
        limit: usize,
        is_lost: bool,
    },
    Index(u8),
    /// The state topic is not understood for a while.
    HoldUp,
    /// The memory of the index is full, or not any more.
    Full(bool),
    /// The topic of an application is deleted, or created again.
    Topic(Presence),
    ScheduleGone {
        ahead: u16,
    },
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_u16..600, proptest::option::of(0_u8..4)).prop_map(|(ahead, key)| Step::Schedule { ahead, key }),
        1 => (0_usize..30).prop_map(Step::Cancel),
        1 => (0_usize..30, 0_u16..600).prop_map(|(job, ahead)| Step::Reschedule(job, ahead)),
        4 => (0_u16..120).prop_map(Step::Pass),
        6 => (1_usize..20, prop::bool::weighted(0.15)).prop_map(|(limit, is_lost)| Step::TransactionBatch { limit, is_lost }),
        6 => (1_u8..5).prop_map(Step::Index),
        1 => Just(Step::HoldUp),
        1 => any::<bool>().prop_map(Step::Full),
        2 => prop::sample::select(vec![
            Presence::Exists,
            Presence::Unknown,
            Presence::Missing { lasting: Duration::ZERO },
            Presence::Missing { lasting: Duration::from_secs(60) },
        ]).prop_map(Step::Topic),
        3 => (0_u16..600).prop_map(|ahead| Step::ScheduleGone { ahead }),
        1 => Just(Step::Restart),
    ]
}

/// The topics as they are committed, the index, and the shard under test.
struct World {
    now: Timestamp,
    topics: Known,
    /// Requests of jobs that are dead, and when they were given up.
    dead: Vec<(u64, Timestamp)>,
    settings: Arc<Settings>,
    shard: Shard,
    ingest: Vec<Record>,
    done: HashSet<i64>,
    /// Records of the ingest topic that this shard was given.
    given: usize,
    state: BTreeMap<JobId, Job>,
    /// Jobs that are forgotten, as they were.
    forgotten: BTreeMap<JobId, Job>,
    end: i64,
    /// Where turns have ended.
    ends: HashSet<i64>,
    dispatched: Vec<(JobId, Timestamp)>,
    /// Long waits that are over.
    returned: Vec<(Option<Bytes>, Timestamp)>,
    /// Long waits that could not be had.
    dead_waits: Vec<Output>,
    answers: HashMap<String, v1::CommandOutcome>,
    index: BTreeMap<JobId, (Job, Bytes)>,
    applied: i64,
    asks: VecDeque<IndexRequest>,
    is_held_up: bool,
    is_full: bool,
    ids: Vec<JobId>,
}

/// An index that shows all of the state topic.
fn picture(state: &BTreeMap<JobId, Job>) -> BTreeMap<JobId, (Job, Bytes)> {
    let jobs = state.iter();
    jobs.map(|(id, job)| (*id, (job.clone(), codec::encode(job))))
        .collect()
}

impl World {
    fn new() -> Self {
        Self::with(settings())
    }

    fn with(settings: Settings) -> Self {
        let topics = Known::default();
        let settings = Arc::new(Settings {
            topics: Arc::new(topics.clone()),
            ..settings
        });
        let mut world = Self {
            topics,
            dead: Vec::new(),
            now: Timestamp::from_millis(START),
            shard: Shard::new(settings.clone(), 0),
            settings,
            ingest: Vec::new(),
            done: HashSet::new(),
            given: 0,
            state: BTreeMap::new(),
            forgotten: BTreeMap::new(),
            end: 0,
            ends: HashSet::new(),
            dispatched: Vec::new(),
            returned: Vec::new(),
            dead_waits: Vec::new(),
            answers: HashMap::new(),
            index: BTreeMap::new(),
            applied: 0,
            asks: VecDeque::new(),
            is_held_up: false,
            is_full: false,
            ids: Vec::new(),
        };
        world.restart();
        world
    }

    fn send(&mut self, command: v1::job_command::Command) {
        let offset = i64::try_from(self.ingest.len()).unwrap();
        let command = v1::JobCommand {
            command: Some(command),
            answer_to: offset.to_string(),
        };
        self.ids.push(JobId::new(self.now, 0, offset));
        self.ingest.push(Record {
            position: Position {
                topic: "ingest".into(),
                partition: 0,
                offset,
            },
            timestamp: Some(self.now),
            key: None,
            value: Some(command.encode_to_vec().into()),
            headers: [("content-type", Some(redeliver_proto::CONTENT_TYPE.as_bytes()))]
                .into_iter()
                .collect(),
            unreadable_headers: 0,
        });
        self.give();
    }

    fn give(&mut self) {
        while self.given < self.ingest.len() && self.shard.capacity() > 0 {
            let record = self.ingest[self.given].clone();
            self.given += 1;
            if !self.done.contains(&record.position.offset) {
                self.shard.accept(record, self.now);
            }
        }
        self.asks.extend(self.shard.asks(self.now));
    }

    /// A new owner: the index shows all of the state topic before it acts.
    fn restart(&mut self) {
        self.shard = Shard::new(self.settings.clone(), 0);
        self.asks.clear();
        self.index = picture(&self.state);
        self.applied = self.end;
        self.given = 0;
        self.is_held_up = false;
        self.shard
            .answer(IndexResponse::Ready { end: self.end }, self.now);
        self.give();
    }

    fn turn(&mut self, limit: usize, is_lost: bool) {
        let writes = self.shard.finish(self.now, limit);
        let is_idle = writes.outputs.is_empty() && writes.completed.is_empty();
        assert!(
            is_idle || !self.is_held_up,
            "a shard that is held up writes nothing"
        );
        if is_lost {
            return self.restart();
        }
        let mut wrote = false;
        for output in writes.outputs {
            match &*output.topic {
                APP | GONE => {
                    assert!(
                        &*output.topic != GONE || self.topics.get() == Presence::Exists,
                        "the topic does not exist"
                    );
                    let id = output.headers.last(headers::JOB_ID).unwrap();
                    let id: JobId = std::str::from_utf8(id).unwrap().parse().unwrap();
                    self.dispatched.push((id, self.now));
                }
                RETURN => self.returned.push((output.value, self.now)),
                "state" => {
                    wrote = true;
                    self.end += 1;
                    let id: JobId = std::str::from_utf8(output.key.as_deref().unwrap())
                        .unwrap()
                        .parse()
                        .unwrap();
                    match output.value {
                        Some(value) => drop(self.state.insert(id, codec::decode(id, &value).unwrap())),
                        None => {
                            let job = self.state.remove(&id).expect("only what is known is forgotten");
                            let memory = self.settings.memory;
                            let ended = job.ended.expect("only what has ended is forgotten");
                            assert!(memory.forget(&job, ended) <= self.now, "too soon: {job:?}");
                            self.forgotten.insert(id, job);
                        }
                    }
                }
                "answers" => {
                    let to = String::from_utf8(output.key.unwrap().to_vec()).unwrap();
                    let outcome = v1::CommandOutcome::decode(output.value.unwrap()).unwrap();
                    assert!(self.answers.insert(to, outcome).is_none(), "answered twice");
                }
                "dlq" => {
                    let code = output.headers.last(headers::ERROR_CODE).unwrap();
                    if code == TOPIC_MISSING.as_bytes() {
                        let offset = output.headers.last(headers::ORIGINAL_OFFSET).unwrap();
                        let offset = std::str::from_utf8(offset).unwrap().parse().unwrap();
                        assert!(matches!(self.topics.get(), Presence::Missing { .. }));
                        self.dead.push((offset, self.now));
                    }
                }
                "docs-dlq" => self.dead_waits.push(output),
                other => panic!("nothing is written to {other}"),
            }
        }
        for offset in writes.completed {
            assert!(self.done.insert(offset), "done twice");
        }
        if wrote {
            self.ends.insert(self.end);
            self.shard.committed(self.end);
        }
        self.give();
    }

    fn index(&mut self) {
        if self.is_held_up {
            // The index was brought up to date meanwhile.
            self.is_held_up = false;
            self.applied = self.applied.max(self.end);
            self.index = picture(&self.state);
            self.shard
                .answer(IndexResponse::Ready { end: self.end }, self.now);
            return self.give();
        }
        let Some(ask) = self.asks.pop_front() else { return };
        let answer = match ask {
            IndexRequest::Apply { turn, batch } => {
                assert!(batch.from <= self.applied, "no change is left out");
                let by_force = batch.force;
                if batch.to <= self.applied || (self.is_full && !by_force) {
                    let answer = if batch.to <= self.applied {
                        IndexResponse::Applied { turn, by_force }
                    } else {
                        IndexResponse::Full { turn, batch }
                    };
                    self.shard.answer(answer, self.now);
                    return self.asks.extend(self.shard.asks(self.now));
                }
                assert!(
                    batch.from <= batch.to && batch.to <= self.end,
                    "no more than there is"
                );
                let seal = batch.seal.map(|seal| seal.offset + 1);
                let is_whole = self.ends.contains(&batch.to);
                assert_eq!(
                    seal,
                    is_whole.then_some(batch.to),
                    "the last record of a turn is known"
                );
                let bytes: usize = batch.changes.iter().map(Change::size).sum();
                assert!(bytes <= BATCH_BYTES || batch.changes.len() == 1, "{bytes} bytes");
                for change in batch.changes {
                    match change.effect {
                        Effect::Waits { record, .. } | Effect::Ended { record, .. } => {
                            let job = codec::decode(change.id, &record).unwrap();
                            self.index.insert(change.id, (job, record));
                        }
                        Effect::Forgotten => drop(self.index.remove(&change.id)),
                    }
                }
                self.applied = batch.to;
                IndexResponse::Applied { turn, by_force }
            }
            IndexRequest::LookUp(keys) => {
                let find = |lookup: Lookup| match lookup {
                    Lookup::Job(id) => self.index.get(&id).map(|(_, record)| record.clone()),
                    Lookup::Key(hash) => self
                        .index
                        .values()
                        .filter(|(job, _)| {
                            let key = job.idempotency_key.as_deref();
                            key.is_some_and(|key| key_hash(&job.app, key) == hash)
                        })
                        .max_by_key(|(job, _)| job.accepted)
                        .map(|(job, _)| KeyValue::of(job).encode()),
                };
                IndexResponse::Found(keys.into_iter().map(find).collect())
            }
            IndexRequest::Sweep {
                after, until, limit, ..
            } => IndexResponse::Swept(self.ahead(Some(after), until, limit)),
            IndexRequest::DueScan {
                after, until, limit, ..
            } => IndexResponse::DueScan(self.ahead(after, until, limit)),
            IndexRequest::Forgettable => {
                let jobs = self.index.values();
                let over = jobs.filter(|(job, _)| {
                    let forget = job.ended.map(|ended| self.settings.memory.forget(job, ended));
                    forget.is_some_and(|forget| forget <= self.now)
                });
                IndexResponse::Forgettable(over.map(|(job, _)| job.id).take(3).collect())
            }
        };
        self.shard.answer(answer, self.now);
        self.asks.extend(self.shard.asks(self.now));
    }

    fn ahead(&self, after: Option<Cursor>, until: Timestamp, limit: usize) -> DueScan {
        let mut rows: Vec<Row> = self
            .index
            .values()
            .filter(|(job, _)| job.state == State::Scheduled && job.due <= until)
            .map(|(job, record)| Row {
                cursor: Cursor::of(job),
                record: record.clone(),
            })
            .filter(|row| Some(row.cursor) > after)
            .collect();
        rows.sort_by_key(|row| row.cursor);
        let is_complete = rows.len() <= limit;
        rows.truncate(limit);
        DueScan {
            applied: None,
            rows,
            is_complete,
        }
    }

    fn schedule(&mut self, app: &str, ahead: u16, key: Option<u8>) -> JobId {
        let due = self.now.after(Duration::from_millis(ahead.into()));
        let spec = v1::JobSpec {
            app: app.to_owned(),
            when: Some(v1::job_spec::When::ScheduledTime(
                redeliver_proto::convert::to_timestamp(due),
            )),
            idempotency_key: key.map_or_else(String::new, |key| key.to_string()),
            data: Bytes::from_static(b"1"),
            ..v1::JobSpec::default()
        };
        self.send(v1::job_command::Command::Schedule(spec));
        self.ids[self.ids.len() - 1]
    }

    /// Lets time pass in small steps, with a turn and answers of the index in each.
    fn pass(&mut self, millis: u16) {
        for _ in 0..millis / 10 {
            self.take(&Step::Pass(10));
            self.turn(50, false);
            self.take(&Step::Index(3));
        }
    }

    fn overlay_is_shown(&self) -> bool {
        self.shard.overlay.len() == 0
    }

    fn was_dispatched(&self, id: JobId) -> bool {
        self.dispatched.iter().any(|(other, _)| *other == id)
    }

    fn take(&mut self, step: &Step) {
        self.take_unchecked(step);
        assert!(
            self.shard.held() <= 3 * self.settings.window_jobs,
            "too many are held"
        );
    }

    fn take_unchecked(&mut self, step: &Step) {
        match *step {
            Step::Schedule { ahead, key } => drop(self.schedule("app", ahead, key)),
            Step::Cancel(job) => {
                if let Some(id) = self.ids.get(job) {
                    let id = id.to_string();
                    self.send(v1::job_command::Command::Cancel(v1::CancelJob { id }));
                }
            }
            Step::Reschedule(job, ahead) => {
                if let Some(id) = self.ids.get(job) {
                    let due = self.now.after(Duration::from_millis(ahead.into()));
                    let when =
                        v1::reschedule_job::When::ScheduledTime(redeliver_proto::convert::to_timestamp(due));
                    let command = v1::RescheduleJob {
                        id: id.to_string(),
                        when: Some(when),
                    };
                    self.send(v1::job_command::Command::Reschedule(command));
                }
            }
            Step::Pass(millis) => self.now = self.now.after(Duration::from_millis(millis.into())),
            Step::TransactionBatch { limit, is_lost } => self.turn(limit, is_lost),
            Step::Index(count) => (0..count).for_each(|_| self.index()),
            Step::Full(is_full) => self.is_full = is_full,
            Step::Topic(presence) => self.topics.set(presence),
            Step::ScheduleGone { ahead } => drop(self.schedule("gone", ahead, None)),
            Step::HoldUp => {
                self.is_held_up = true;
                self.shard.answer(IndexResponse::HeldUp, self.now);
            }
            Step::Restart => self.restart(),
        }
    }

    /// Until nothing is left to do.
    fn settle(&mut self) {
        self.is_full = false;
        self.topics.set(Presence::Exists);
        for _ in 0..400 {
            self.take(&Step::Pass(20));
            self.turn(50, false);
            self.index();
            self.index();
        }
    }

    fn known(&self, id: JobId) -> Option<&Job> {
        self.state.get(&id).or_else(|| self.forgotten.get(&id))
    }

    /// What must be true in the end, whatever happened.
    fn check(&self) {
        assert_eq!(self.done.len(), self.ingest.len(), "every command is done");
        let dead: HashMap<u64, Timestamp> = self.dead.iter().copied().collect();
        assert_eq!(dead.len(), self.dead.len(), "dead once");
        let mut times: HashMap<JobId, Vec<Timestamp>> = HashMap::new();
        for (id, at) in &self.dispatched {
            times.entry(*id).or_default().push(*at);
        }
        let mut keys: HashMap<String, Timestamp> = HashMap::new();
        for (offset, record) in self.ingest.iter().enumerate() {
            let command = v1::JobCommand::decode(record.value.clone().unwrap()).unwrap();
            let outcome = &self.answers[&offset.to_string()];
            let id = self.ids[offset];
            let at = times.remove(&id).unwrap_or_default();
            let Some(v1::job_command::Command::Schedule(spec)) = command.command else {
                assert!(at.is_empty(), "only requests make jobs");
                continue;
            };
            match outcome.outcome() {
                v1::Outcome::Scheduled => {
                    let job = self.known(id).expect("a job that was accepted is known");
                    match job.state {
                        State::Dispatched => {
                            assert_eq!(at.len(), 1, "once: {job:?}");
                            assert!(at[0] >= job.due, "never early: {job:?} at {at:?}");
                        }
                        State::Cancelled => assert!(at.is_empty(), "cancelled and dispatched: {job:?}"),
                        State::Expired => {
                            assert!(at.is_empty(), "dead and dispatched: {job:?}");
                            let given_up = dead[&id.offset()];
                            assert!(given_up >= job.due.after(TIMEOUT), "given up too soon: {job:?}");
                        }
                        State::Scheduled => panic!("left behind: {job:?}"),
                    }
                    if !spec.idempotency_key.is_empty() {
                        let other = keys.insert(spec.idempotency_key, job.accepted);
                        let is_free =
                            |other: Timestamp| other.after(self.settings.memory.keys) <= job.accepted;
                        assert!(other.is_none_or(is_free), "a key is taken once: {job:?}");
                    }
                }
                v1::Outcome::Duplicate | v1::Outcome::Conflict => {
                    assert!(at.is_empty());
                    let first = &outcome.job.as_ref().unwrap().id;
                    assert!(self.known(first.parse().unwrap()).is_some());
                }
                v1::Outcome::Rejected => {
                    assert_eq!(outcome.code, INDEX_FULL);
                    assert!(at.is_empty() && self.known(id).is_none());
                }
                other => panic!("a request is not answered {other:?}"),
            }
        }
        assert!(times.is_empty(), "dispatched and never requested: {times:?}");
        for (offset, record) in self.ingest.iter().enumerate() {
            let command = v1::JobCommand::decode(record.value.clone().unwrap()).unwrap();
            let Some(v1::job_command::Command::Cancel(cancel)) = command.command else {
                continue;
            };
            let state = self.known(cancel.id.parse().unwrap()).map(|job| job.state);
            let expected = match self.answers[&offset.to_string()].outcome() {
                v1::Outcome::Cancelled | v1::Outcome::AlreadyCancelled => Some(State::Cancelled),
                v1::Outcome::AlreadyDispatched => Some(State::Dispatched),
                v1::Outcome::Unknown => None,
                v1::Outcome::Expired => Some(State::Expired),
                other => panic!("a cancellation is not answered {other:?}"),
            };
            // A job may be requested after it was cancelled in vain.
            if expected.is_some() {
                assert_eq!(state, expected, "the answer was certain");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn each_job_leaves_once_and_never_early_whatever_is_lost(steps in proptest::collection::vec(step(), 0..120)) {
        let mut world = World::new();
        for step in steps {
            world.take(&step);
        }
        world.settle();
        world.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn each_job_leaves_once_and_is_forgotten_whatever_is_lost(steps in proptest::collection::vec(step(), 0..120)) {
        let memory = RetentionPolicy { keys: Duration::from_millis(300), ended: Duration::from_millis(200) };
        let mut world = World::with(Settings { memory, ..settings() });
        for step in steps {
            world.take(&step);
        }
        world.settle();
        world.check();
        prop_assert!(world.state.is_empty() && world.index.is_empty(), "{:?}", world.state);
    }
}

/// How many of the jobs have been dispatched, in the order in which they were asked for.
fn dispatched_of(world: &World, jobs: &[JobId]) -> usize {
    jobs.iter().filter(|id| world.was_dispatched(**id)).count()
}

#[test]
fn newcomers_beyond_the_limits_of_the_window_wait_in_the_index_and_leave_in_time() {
    let mut world = World::new();
    let limit = world.settings.window_jobs;
    // All that is due within the window is in memory from here on.
    world.take(&Step::Index(5));
    assert!(world.shard.loaded.is_some());
    let jobs: Vec<JobId> = (0..10 * limit)
        .map(|_| world.schedule("app", 120, None))
        .collect();
    world.turn(1000, false);
    assert_eq!(world.shard.held(), limit);
    world.pass(110);
    assert_eq!(dispatched_of(&world, &jobs), 0);
    assert_eq!(world.shard.held(), 2 * limit);
    // Each step has room for both of the ways into the window.
    world.pass(200);
    assert_eq!(dispatched_of(&world, &jobs), jobs.len());
    world.check();
}

#[test]
fn a_newcomer_goes_before_what_is_due_later_in_a_window_that_is_full() {
    let mut world = World::new();
    let limit = world.settings.window_jobs;
    let schedule = |world: &mut World, ahead: u16| -> Vec<JobId> {
        let jobs = 0..2 * limit;
        jobs.map(|_| world.schedule("app", ahead, None)).collect()
    };
    let looked_up = schedule(&mut world, 400);
    world.pass(230);
    assert_eq!(world.shard.held(), limit);
    let commanded = schedule(&mut world, 150);
    world.pass(10);
    assert_eq!(world.shard.held(), 2 * limit);
    let newcomers: Vec<JobId> = (0..limit).map(|_| world.schedule("app", 30, None)).collect();
    world.pass(40);
    assert_eq!(dispatched_of(&world, &newcomers), limit);
    let early = dispatched_of(&world, &commanded) + dispatched_of(&world, &looked_up);
    assert_eq!(early, 0);
    // All the others that were in the window, or had to leave it, leave in time as well.
    world.pass(160);
    assert_eq!(dispatched_of(&world, &commanded), commanded.len());
    assert_eq!(dispatched_of(&world, &looked_up), looked_up.len());
    world.check();
}

#[test]
fn a_look_ahead_that_was_under_way_makes_no_newcomer_late() {
    let mut world = World::new();
    let limit = world.settings.window_jobs;
    world.take(&Step::Index(5));
    // A question is under way when the window fills up, and its answer knows nothing of the newcomers.
    world.take(&Step::Pass(60));
    world.turn(50, false);
    let is_ahead = |ask: &IndexRequest| matches!(ask, IndexRequest::DueScan { .. });
    assert!(world.asks.iter().any(is_ahead), "{:?}", world.asks);
    let jobs: Vec<JobId> = (0..5 * limit).map(|_| world.schedule("app", 100, None)).collect();
    world.turn(1000, false);
    world.pass(200);
    assert_eq!(dispatched_of(&world, &jobs), jobs.len());
    world.check();
}

#[test]
fn while_the_index_is_full_due_jobs_leave_and_only_far_jobs_are_refused() {
    let mut world = World::new();
    let before: Vec<JobId> = (0..100).map(|n| world.schedule("app", 2_000 + n, None)).collect();
    let far: Vec<JobId> = (0..20).map(|_| world.schedule("other", 60_000, None)).collect();
    world.pass(500);
    assert!(world.overlay_is_shown());
    world.take(&Step::Full(true));
    // It is noticed when the first jobs are refused by the index.
    let last = world.schedule("other", 60_000, None);
    world.pass(20);
    let refused = world.schedule("other", 60_000, None);
    let near = world.schedule("other", 150, None);
    world.pass(300);
    assert!(world.was_dispatched(near));
    let outcome = |world: &World, id: JobId| world.answers[&id.offset().to_string()].outcome();
    assert_eq!(outcome(&world, last), v1::Outcome::Scheduled);
    assert_eq!(outcome(&world, refused), v1::Outcome::Rejected);
    world.send(v1::job_command::Command::Cancel(v1::CancelJob {
        id: far[0].to_string(),
    }));
    world.pass(2_000);
    assert_eq!(dispatched_of(&world, &before), before.len());
    assert!(world.overlay_is_shown(), "what ends jobs reaches the index");
    assert!(world.applied == world.end && world.index.contains_key(&last));
    world.take(&Step::Full(false));
    world.pass(1_100);
    let again = world.schedule("other", 50_000, None);
    world.pass(100);
    assert_eq!(outcome(&world, again), v1::Outcome::Scheduled);
}

#[test]
fn jobs_of_a_missing_topic_wait_and_keep_no_other_waiting() {
    let mut world = World::new();
    let missing = |seconds| Presence::Missing {
        lasting: Duration::from_secs(seconds),
    };
    world.topics.set(missing(1));
    let limit = world.settings.window_jobs;
    let gone: Vec<JobId> = (0..20 * limit)
        .map(|n| world.schedule("gone", u16::try_from(n % 500).unwrap(), None))
        .collect();
    let others: Vec<JobId> = (0..100).map(|n| world.schedule("app", 400 + n, None)).collect();
    let last = world.schedule("gone", 700, None);
    let cancelled = world.schedule("gone", 100, None);
    world.pass(900);
    assert_eq!(dispatched_of(&world, &others), others.len());
    assert_eq!(dispatched_of(&world, &gone), 0);
    assert_eq!(world.shard.held(), 0, "what is parked takes no room");
    // A new owner finds them again.
    world.restart();
    world.pass(100);
    let parked = |world: &World| world.shard.parked().values().sum::<usize>();
    assert_eq!(parked(&world), gone.len() + 2);
    // They are cancelled and rescheduled like any other.
    world.send(v1::job_command::Command::Cancel(v1::CancelJob {
        id: cancelled.to_string(),
    }));
    world.pass(50);
    assert_eq!(parked(&world), gone.len() + 1);
    world.topics.set(Presence::Exists);
    let newcomer = world.schedule("app", 100, None);
    world.pass(150);
    assert!(
        world.was_dispatched(newcomer),
        "a backlog that comes back delays no other"
    );
    world.pass(1_500);
    assert_eq!(dispatched_of(&world, &gone), gone.len());
    assert!(world.was_dispatched(last) && !world.was_dispatched(cancelled));
    assert_eq!(parked(&world), 0);
    world.check();
}

#[test]
fn jobs_that_waited_for_a_missing_topic_for_too_long_are_dead() {
    let mut world = World::new();
    let lasting = TIMEOUT;
    world.topics.set(Presence::Missing { lasting });
    let jobs: Vec<JobId> = (0..50)
        .map(|n| world.schedule("gone", 100 + 40 * n, None))
        .collect();
    world.pass(2_000);
    assert_eq!(world.dead.len(), 0);
    world.pass(1_100);
    assert!((1..50).contains(&world.dead.len()), "{}", world.dead.len());
    // One gets another time, and the topic comes back before that is over.
    world.take(&Step::Reschedule(49, 3_000));
    world.pass(3_000);
    assert_eq!(world.dead.len(), 49);
    world.topics.set(Presence::Exists);
    world.settle();
    assert_eq!(dispatched_of(&world, &jobs), 1);
    world.check();
}

fn with_priority(world: &mut World, app: &str, priority: v1::Priority) -> JobId {
    let spec = v1::JobSpec {
        app: app.to_owned(),
        when: Some(v1::job_spec::When::ScheduledTime(
            redeliver_proto::convert::to_timestamp(world.now),
        )),
        priority: priority.into(),
        data: Bytes::from_static(b"1"),
        ..v1::JobSpec::default()
    };
    world.send(v1::job_command::Command::Schedule(spec));
    world.ids[world.ids.len() - 1]
}

#[test]
fn of_a_backlog_that_is_due_when_it_arrives_high_priority_leaves_first_and_low_is_not_starved() {
    let mut world = World::with(Settings {
        window_jobs: 1000,
        ..settings()
    });
    let of = |world: &mut World, priority| -> Vec<JobId> {
        (0..60).map(|_| with_priority(world, "app", priority)).collect()
    };
    let low = of(&mut world, v1::Priority::Low);
    let normal = of(&mut world, v1::Priority::Normal);
    let high = of(&mut world, v1::Priority::High);
    // Each turn takes more commands than it dispatches jobs.
    while dispatched_of(&world, &high) < high.len() {
        world.turn(20, false);
        world.take(&Step::Index(3));
    }
    let overtaken = dispatched_of(&world, &normal) + dispatched_of(&world, &low);
    assert!(
        overtaken <= 60,
        "{overtaken} of 120 left before the last of high priority"
    );
    while dispatched_of(&world, &normal) < normal.len() {
        world.turn(20, false);
        world.take(&Step::Index(3));
    }
    assert!(dispatched_of(&world, &low) < low.len());
    // More of high priority keep coming for longer than low ones may be overtaken.
    for _ in 0..300 {
        for _ in 0..5 {
            with_priority(&mut world, "app", v1::Priority::High);
        }
        world.take(&Step::Pass(50));
        world.turn(20, false);
        world.take(&Step::Index(3));
    }
    assert_eq!(dispatched_of(&world, &low), low.len());
    world.settle();
    world.check();
}

#[test]
fn a_backlog_of_one_application_delays_no_other() {
    let mut world = World::with(Settings {
        window_jobs: 1000,
        ..settings()
    });
    let burst: Vec<JobId> = (0..100)
        .map(|_| with_priority(&mut world, "app", v1::Priority::Normal))
        .collect();
    for _ in 0..4 {
        world.turn(20, false);
    }
    let other = with_priority(&mut world, "other", v1::Priority::Low);
    // Until it is decided, and then it is its turn.
    while !world.was_dispatched(other) {
        world.turn(20, false);
    }
    assert!(
        dispatched_of(&world, &burst) < 80,
        "{}",
        dispatched_of(&world, &burst)
    );
}

#[test]
fn large_commands_are_bounded_by_their_bytes() {
    let data = Bytes::from(vec![b'x'; 900_000]);
    let mut world = World::with(Settings {
        window_bytes: 64 << 20,
        window_jobs: 1000,
        ..settings()
    });
    for _ in 0..200 {
        let spec = v1::JobSpec {
            app: "app".to_owned(),
            when: Some(v1::job_spec::When::Delay(redeliver_proto::convert::to_duration(
                Span::from_millis(100),
            ))),
            data: data.clone(),
            ..v1::JobSpec::default()
        };
        world.send(v1::job_command::Command::Schedule(spec));
    }
    assert!(world.shard.command_bytes < COMMAND_BYTES + 2 * data.len());
    assert!(world.given < 80, "{} were accepted", world.given);
    for _ in 0..400 {
        world.take(&Step::Pass(20));
        let before = world.end;
        world.turn(5000, false);
        assert!(world.end - before <= 12, "a turn is bounded, too");
        world.take(&Step::Index(3));
    }
    world.check();
    assert_eq!((world.shard.command_bytes, world.dispatched.len()), (0, 200));
}

#[test]
fn the_delay_of_a_request_that_was_passed_on_begins_where_it_was_written_first() {
    let mut first = World::with(Settings {
        partitions: 2,
        ..settings()
    });
    // Of these keys some belong to the other shard.
    for key in 0..8_u8 {
        let spec = v1::JobSpec {
            app: "app".to_owned(),
            when: Some(v1::job_spec::When::Delay(redeliver_proto::convert::to_duration(
                Span::from_secs(60),
            ))),
            idempotency_key: key.to_string(),
            data: Bytes::from_static(b"1"),
            ..v1::JobSpec::default()
        };
        first.send(v1::job_command::Command::Schedule(spec));
    }
    let written = first.now;
    first.take(&Step::Pass(30_000));
    let writes = first.shard.finish(first.now, 100);
    let passed_on: Vec<Output> = writes
        .outputs
        .into_iter()
        .filter(|output| &*output.topic == "ingest")
        .collect();
    assert!(!passed_on.is_empty());
    let mut shard = Shard::new(first.settings.clone(), 1);
    let now = first.now.after(Duration::from_secs(5));
    shard.answer(IndexResponse::Ready { end: 0 }, now);
    for (offset, output) in (0..).zip(passed_on) {
        assert_eq!(output.partition, Some(1));
        let record = Record {
            position: Position {
                topic: output.topic,
                partition: 1,
                offset,
            },
            timestamp: Some(now),
            key: output.key,
            value: output.value,
            headers: output.headers,
            unreadable_headers: 0,
        };
        shard.accept(record, now);
    }
    let asked = shard.asks(now);
    let keys = asked.iter().find_map(|ask| match ask {
        IndexRequest::LookUp(keys) => Some(keys.len()),
        _ => None,
    });
    shard.answer(IndexResponse::Found(vec![None; keys.unwrap()]), now);
    let due: HashSet<i64> = shard
        .finish(now, 100)
        .outputs
        .into_iter()
        .filter(|output| &*output.topic == "state")
        .map(|output| v1::JobRecord::decode(output.value.unwrap()).unwrap().due_ms)
        .collect();
    assert_eq!(
        due,
        HashSet::from([written.after(Duration::from_secs(60)).as_millis()])
    );
}

#[test]
fn a_burst_that_fills_the_window_keeps_no_newcomer_out() {
    let mut world = World::new();
    for _ in 0..100 {
        world.schedule("app", 1000, None);
    }
    world.pass(900);
    let newcomer = world.schedule("other", 110, None);
    world.pass(100);
    assert!(!world.was_dispatched(newcomer));
    // A turn has room for five jobs, and hundred are due before it.
    world.take(&Step::Pass(10));
    world.turn(10, false);
    assert!(world.was_dispatched(newcomer));
}

#[test]
fn newcomers_that_fill_the_window_keep_nothing_out_that_was_scheduled_before_them() {
    let mut world = World::new();
    let first = world.schedule("app", 2000, None);
    for _ in 0..200 {
        world.schedule("app", 190, None);
        world.pass(10);
    }
    world.pass(10);
    assert!(world.was_dispatched(first));
}

#[test]
fn a_duplicate_is_the_first_job_and_a_conflict_is_dead() {
    let mut world = World::new();
    let request = |data: &'static [u8]| v1::JobSpec {
        app: "app".to_owned(),
        when: Some(v1::job_spec::When::Delay(redeliver_proto::convert::to_duration(
            Span::from_secs(60),
        ))),
        idempotency_key: "k".to_owned(),
        data: Bytes::from_static(data),
        ..v1::JobSpec::default()
    };
    for data in [b"1", b"1", b"2"] {
        world.send(v1::job_command::Command::Schedule(request(data)));
    }
    for _ in 0..10 {
        world.index();
        world.turn(50, false);
    }
    let outcomes = ["0", "1", "2"].map(|offset| world.answers[offset].outcome());
    assert_eq!(
        outcomes,
        [
            v1::Outcome::Scheduled,
            v1::Outcome::Duplicate,
            v1::Outcome::Conflict
        ]
    );
    assert!(
        world.answers["1"]
            .job
            .as_ref()
            .is_some_and(|job| job.id == world.ids[0].to_string())
    );
    // Also when the index has to tell.
    world.restart();
    world.send(v1::job_command::Command::Schedule(request(b"1")));
    for _ in 0..10 {
        world.index();
        world.turn(50, false);
    }
    assert_eq!(world.answers["3"].outcome(), v1::Outcome::Duplicate);
}

#[test]
fn an_expired_job_is_not_dispatched() {
    let mut world = World::new();
    let spec = v1::JobSpec {
        app: "app".to_owned(),
        when: Some(v1::job_spec::When::Delay(redeliver_proto::convert::to_duration(
            Span::from_secs(1),
        ))),
        expire_after: Some(redeliver_proto::convert::to_duration(Span::from_secs(5))),
        data: Bytes::from_static(b"1"),
        ..v1::JobSpec::default()
    };
    world.send(v1::job_command::Command::Schedule(spec));
    world.turn(50, false);
    world.take(&Step::Pass(6_500));
    world.settle();
    assert_eq!(world.dispatched, []);
    assert_eq!(
        world.state.values().map(|job| job.state).collect::<Vec<_>>(),
        [State::Expired]
    );
}

#[test]
fn a_long_wait_that_cannot_be_had_is_a_dead_letter_of_its_pipeline() {
    let mut world = World::new();
    let mut lineage = Headers::new();
    lineage.push("tenant", Some(b"a"));
    let origin = Origin {
        topic: "docs".into(),
        partition: 3,
        offset: 7,
        timestamp: None,
    };
    headers::write_lineage(&mut lineage, "docs", &origin, 2);
    let far = world.now.after(Duration::from_secs(86_400 * 366));
    world.send(v1::job_command::Command::LongWait(v1::LongWait {
        pipeline: "docs".to_owned(),
        due: Some(redeliver_proto::convert::to_timestamp(far)),
        key: Some(Bytes::from_static(b"key")),
        value: Some(Bytes::from_static(b"document")),
        headers: redeliver_proto::convert::to_headers(&lineage),
    }));
    world.turn(50, false);
    assert_eq!(world.answers["0"].outcome(), v1::Outcome::Rejected);
    let [dead] = &world.dead_waits[..] else {
        panic!("{:?}", world.dead_waits)
    };
    assert_eq!(
        (dead.key.as_deref(), dead.value.as_deref()),
        (Some(&b"key"[..]), Some(&b"document"[..]))
    );
    let before = dead.headers.filtered(|name| !name.starts_with("error-"));
    assert_eq!(before, lineage);
    let code = dead.headers.last(headers::ERROR_CODE).unwrap();
    assert_eq!(code, b"request.due");
}

#[test]
fn a_long_wait_can_be_neither_cancelled_nor_rescheduled() {
    let mut world = World::new();
    let due = world.now.after(Duration::from_secs(2));
    world.send(v1::job_command::Command::LongWait(v1::LongWait {
        pipeline: "docs".to_owned(),
        due: Some(redeliver_proto::convert::to_timestamp(due)),
        value: Some(Bytes::from_static(b"document")),
        ..v1::LongWait::default()
    }));
    world.turn(50, false);
    world.take(&Step::Cancel(0));
    world.take(&Step::Reschedule(0, 1));
    world.settle();
    let outcomes = ["1", "2"].map(|offset| world.answers[offset].outcome());
    assert_eq!(outcomes, [v1::Outcome::Unknown; 2]);
    let [(value, at)] = &world.returned[..] else {
        panic!("{:?}", world.returned)
    };
    assert_eq!(value.as_deref(), Some(&b"document"[..]));
    assert!(*at >= due, "{at} is before {due}");
}

#[test]
fn a_long_wait_ends_in_the_topic_of_its_pipeline_that_it_names() {
    let mut world = World::new();
    // Whether the topic exists in which it would have ended when it began does not matter.
    let missing = Presence::Missing {
        lasting: Duration::from_secs(3_600),
    };
    world.topics.set(missing);
    let payload = |named: &str| Payload {
        headers: [(headers::RETURN_TOPIC, Some(named.as_bytes()))]
            .into_iter()
            .collect(),
        ..Payload::default()
    };
    for (named, expected) in [
        ("docs-retry-due", "docs-retry-due"),
        ("docs", "docs"),
        (GONE, "docs-retry-due"),
        ("payments", "docs-retry-due"),
    ] {
        let job = Job {
            kind: Kind::LongWait,
            app: "docs".into(),
            // As it was configured when the wait began.
            topic: GONE.into(),
            payload: payload(named),
            id: JobId::new(Timestamp::from_millis(START), 0, 0),
            state: State::Scheduled,
            priority: Priority::Normal,
            due: Timestamp::from_millis(START),
            accepted: Timestamp::from_millis(START),
            revision: 1,
            idempotency_key: None,
            request_hash: [0; 16],
            request_id: None,
            ended: None,
            expires: None,
        };
        world.shard.window.insert(Arc::new(job), Source::LookedUp);
        let writes = world.shard.finish(world.now, 10);
        let output = writes.outputs.first().unwrap_or_else(|| panic!("{named}"));
        assert_eq!(&*output.topic, expected, "{named}");
        assert_eq!(
            output.headers.last(headers::RETURN_TOPIC),
            Some(expected.as_bytes())
        );
    }
}

#[test]
fn what_a_topic_does_not_take_becomes_a_dead_letter_of_whose_it_is() {
    let settings = settings();
    let now = Timestamp::from_millis(START);
    let failure = Failure::permanent("output.too-large", "no");
    let output = |topic: &str, headers: Headers| Output {
        topic: topic.into(),
        partition: None,
        key: Some("k".into()),
        value: Some("v".into()),
        headers,
    };
    let text = |letter: &Output, name: &str| {
        let value = letter.headers.single(name).unwrap().flatten();
        value.map(|value| std::str::from_utf8(value).unwrap().to_owned())
    };

    // A job's topic: the id says where its request stands.
    let mut headers = Headers::new();
    headers.push_text("tenant", "a");
    headers.push_text(headers::JOB_ID, &JobId::new(now, 3, 44).to_string());
    let mut letter = output(APP, headers);
    assert!(refused::replace(&settings, &mut letter, &failure, now));
    assert_eq!(
        (&*letter.topic, letter.value.as_deref()),
        ("dlq", Some(&b"v"[..]))
    );
    assert_eq!(text(&letter, headers::ORIGINAL_TOPIC).as_deref(), Some("ingest"));
    assert_eq!(text(&letter, headers::ORIGINAL_PARTITION).as_deref(), Some("3"));
    assert_eq!(text(&letter, headers::ORIGINAL_OFFSET).as_deref(), Some("44"));
    assert_eq!(text(&letter, headers::PIPELINE).as_deref(), Some("scheduler"));
    assert_eq!(
        text(&letter, headers::ERROR_CODE).as_deref(),
        Some("output.too-large")
    );
    assert_eq!(text(&letter, "tenant").as_deref(), Some("a"));
    // And the letter itself.
    assert!(refused::replace(&settings, &mut letter, &failure, now));
    assert_eq!((&*letter.topic, &letter.value), ("dlq", &None));

    // A record of a pipeline that has waited.
    let origin = Origin {
        topic: "docs".into(),
        partition: 1,
        offset: 7,
        timestamp: None,
    };
    let mut lineage = Headers::new();
    headers::write_lineage(&mut lineage, "docs", &origin, 2);
    let mut letter = output(RETURN, lineage);
    assert!(refused::replace(&settings, &mut letter, &failure, now));
    assert_eq!(
        (&*letter.topic, letter.value.as_deref()),
        ("docs-dlq", Some(&b"v"[..]))
    );
    assert_eq!(text(&letter, headers::ORIGINAL_OFFSET).as_deref(), Some("7"));
    assert_eq!(text(&letter, headers::RETRY_COUNT).as_deref(), Some("2"));
    assert!(refused::replace(&settings, &mut letter, &failure, now));
    assert_eq!((&*letter.topic, &letter.value), ("docs-dlq", &None));

    // A state cannot be anywhere else.
    assert!(!refused::replace(
        &settings,
        &mut output("state", Headers::new()),
        &failure,
        now
    ));
}
