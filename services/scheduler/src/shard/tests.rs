//! Tests of a shard with a model of Kafka and the index, with aborted turns, late responses, and restarts at any time.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Mutex;

use bytes::Bytes;
use proptest::prelude::*;
use redeliver_core::headers::Origin;
use redeliver_core::{Failure, Headers, HumanDuration, Output, Position, headers};
use redeliver_proto::convert::{from_timestamp, to_duration, to_headers, to_timestamp};
use redeliver_proto::{Message as _, v1};
use v1::job_command::Command as ProtoCommand;

use super::dispatch::TOPIC_MISSING;
use super::*;
use crate::admission::INDEX_FULL;
use crate::codec::{self, KeyValue, RetentionPolicy};
use crate::controls::LiveAppStates;
use crate::index::{Effect, FinishedRelease, FlowPosition, FlowScan, Row, Scan, ScanRequest};
use crate::job::{JobState, Payload, Priority};
use crate::lookups;
use crate::quota::QUOTA_EXCEEDED;
use crate::rate::Buckets;
use crate::refused::{self, Replacement};
use crate::request::{NAME, Rules, key_hash};
use crate::schedules;
use crate::shard::outbox::MAX_BATCH_BYTES;
use crate::spans::Spans;
use crate::topics::{Presence, Topics};

mod recurring;
mod released_waits;
mod urgent;

const TIMEOUT: Duration = Duration::from_secs(2);
const START: i64 = 1_763_722_800_000;
const APP: &str = "jobs";
const RETURN_TOPIC: &str = "docs-retry-due";
/// The topic of the application `gone`, which is deleted and created again.
const GONE: &str = "gone-jobs";
/// The id of the ingest topic.
fn ingest_id() -> TopicId {
    TopicId::from_bits(7)
}

/// The presence of [`GONE`]; all other topics exist.
#[derive(Clone)]
struct FakeTopics(Arc<Mutex<Presence>>);

impl Default for FakeTopics {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Presence::Exists)))
    }
}

impl FakeTopics {
    fn get(&self) -> Presence {
        *self.0.lock().unwrap()
    }

    fn set(&self, presence: Presence) {
        *self.0.lock().unwrap() = presence;
    }
}

impl Topics for FakeTopics {
    fn presence(&self, topic: &Arc<str>) -> Presence {
        match &**topic {
            GONE => self.get(),
            _ => Presence::Exists,
        }
    }

    fn partitions(&self, _topic: &str) -> Option<i32> {
        None
    }
}

pub(crate) fn settings() -> Settings {
    let hour = Duration::from_secs(3600);
    Settings {
        rules: Rules {
            apps: [("app", APP), ("other", APP), ("gone", GONE)]
                .map(|(app, topic)| (app.to_owned(), Arc::from(topic)))
                .into(),
            pipelines: [("docs".to_owned(), Arc::new(redeliver_core::Pipeline::new("docs")))].into(),
            time_zone: jiff::tz::TimeZone::UTC,
            max_ahead: HumanDuration::from_secs(86_400 * 365),
            max_data: 1 << 20,
        },
        ingest: "ingest".into(),
        state: "state".into(),
        dead_letters: "dlq".into(),
        answers: "answers".into(),
        partitions: 1,
        retention: RetentionPolicy {
            keys: 24 * hour,
            ended: 24 * hour,
        },
        window: Duration::from_millis(200),
        window_jobs: 8,
        window_bytes: 1 << 20,
        topics: Arc::new(FakeTopics::default()),
        missing_topic_timeout: TIMEOUT,
        spans: Spans::default(),
        max_waiting: BTreeMap::new(),
        app_states: LiveAppStates::fixed(AppStates::default()),
        buckets: Buckets::default(),
    }
}

/// Room for this many records of any size.
fn records(records: usize) -> Room {
    Room {
        records,
        bytes: usize::MAX,
    }
}

#[test]
fn an_empty_window_of_any_size_requests_a_scan() {
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
        shard.handle_response(IndexResponse::Ready { end: 0 }, now);
        let has_scan = shard
            .index_requests(now)
            .iter()
            .any(|request| matches!(request, IndexRequest::Scan(_)));
        assert!(has_scan, "{window_jobs} jobs, {window_bytes} bytes");
    }
}

#[test]
fn ended_jobs_are_looked_for_again_soon_after_the_clock_was_set_back() {
    let mut shard = Shard::new(Arc::new(settings()), 0);
    let looks = |shard: &mut Shard, now| {
        let requests = shard.index_requests(now);
        requests
            .iter()
            .any(|request| matches!(request, IndexRequest::Forgettable))
    };
    let now = Timestamp::from_millis(START);
    shard.handle_response(IndexResponse::Ready { end: 0 }, now);
    assert!(looks(&mut shard, now));
    shard.handle_response(IndexResponse::Forgettable(Vec::new()), now);
    assert!(!looks(&mut shard, now));
    assert!(looks(&mut shard, Timestamp::from_millis(START - 3_600_000)));
}

#[test]
fn few_jobs_are_forgotten_in_a_turn_while_others_are_due_soon() {
    let mut shard = Shard::new(Arc::new(settings()), 0);
    let now = Timestamp::from_millis(START);
    shard.handle_response(IndexResponse::Ready { end: 0 }, now);
    let ended = (0..1_000).map(|offset| JobId::new(now, 0, offset)).collect();
    shard.handle_response(IndexResponse::Forgettable(ended), now);
    let forgotten = |shard: &mut Shard| shard.finish(now, records(5_000)).tally.forgotten;
    let job = |ahead| {
        let due = now.after(Duration::from_millis(ahead));
        Arc::new(Job {
            kind: Kind::App,
            app: "app".into(),
            topic: APP.into(),
            payload: Payload::default(),
            id: JobId::new(now, 0, 5_000),
            state: JobState::Scheduled,
            priority: Priority::Normal,
            due,
            accepted: now,
            revision: 1,
            idempotency_key: None,
            request_hash: [0; 16],
            request_id: None,
            ended: None,
            expires: None,
            occurrence: None,
            released: None,
        })
    };
    shard.window.insert(job(1_000));
    assert_eq!(forgotten(&mut shard), 50);
    shard.window.insert(job(1_001));
    assert_eq!(forgotten(&mut shard), 950);
}

fn at(due: Timestamp) -> v1::job_spec::When {
    v1::job_spec::When::ScheduledTime(to_timestamp(due))
}

fn after(delay: HumanDuration) -> v1::job_spec::When {
    v1::job_spec::When::Delay(to_duration(delay))
}

fn spec(app: &str, when: v1::job_spec::When) -> v1::JobSpec {
    v1::JobSpec {
        app: app.to_owned(),
        when: Some(when),
        data: Bytes::from_static(b"1"),
        ..v1::JobSpec::default()
    }
}

/// An action of a client, or an event.
#[derive(Clone, Debug)]
enum Step {
    Schedule {
        ahead: u16,
        key: Option<u8>,
    },
    /// A request that replaces others with its key.
    Replace(Debounced),
    Cancel(usize),
    Reschedule(usize, u16),
    CancelKey(u8),
    RescheduleKey(u8, u16),
    AdvanceClock(u16),
    Turn {
        limit: usize,
        is_lost: bool,
    },
    ServeIndex(u8),
    /// The state topic contains an unsupported record for a while.
    Halt,

    SetIndexFull(bool),
    /// The topic of the application `gone` is deleted, or created again.
    SetPresence(Presence),
    /// An operator pauses, resumes or limits the application `app`.
    SetApp {
        is_paused: bool,
        rate: Option<f64>,
    },
    ScheduleForGone {
        ahead: u16,
    },
    Restart,
}

#[derive(Clone, Debug)]
struct Debounced {
    key: u8,
    ahead: u16,
    is_delayed: bool,
    is_high: bool,
    /// The content of the job.
    data: u8,
    request_id: Option<u8>,
}

fn replacement() -> impl Strategy<Value = Debounced> {
    let request_id = proptest::option::of(0_u8..2);
    (
        0_u8..4,
        0_u16..600,
        any::<bool>(),
        any::<bool>(),
        0_u8..2,
        request_id,
    )
        .prop_map(|(key, ahead, is_delayed, is_high, data, request_id)| Debounced {
            key,
            // So that the content of some of them is the same.
            ahead: ahead / 200 * 200,
            is_delayed,
            is_high,
            data,
            request_id,
        })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => replacement().prop_map(Step::Replace),
        1 => (0_u8..4).prop_map(Step::CancelKey),
        1 => (0_u8..4, 0_u16..600).prop_map(|(key, ahead)| Step::RescheduleKey(key, ahead)),
        4 => (0_u16..600, proptest::option::of(0_u8..4)).prop_map(|(ahead, key)| Step::Schedule { ahead, key }),
        1 => (0_usize..30).prop_map(Step::Cancel),
        1 => (0_usize..30, 0_u16..600).prop_map(|(job, ahead)| Step::Reschedule(job, ahead)),
        4 => (0_u16..120).prop_map(Step::AdvanceClock),
        6 => (1_usize..20, prop::bool::weighted(0.15)).prop_map(|(limit, is_lost)| Step::Turn { limit, is_lost }),
        6 => (1_u8..5).prop_map(Step::ServeIndex),
        1 => Just(Step::Halt),
        1 => any::<bool>().prop_map(Step::SetIndexFull),
        2 => prop::sample::select(vec![
            Presence::Exists,
            Presence::Unknown,
            Presence::Missing { lasting: Duration::ZERO },
            Presence::Missing { lasting: Duration::from_secs(60) },
        ]).prop_map(Step::SetPresence),
        3 => (0_u16..600).prop_map(|ahead| Step::ScheduleForGone { ahead }),
        2 => (any::<bool>(), proptest::option::of(20.0..200.0))
            .prop_map(|(is_paused, rate)| Step::SetApp { is_paused, rate }),
        1 => Just(Step::Restart),
    ]
}

/// The committed topics, the index, and the shard under test.
struct World {
    now: Timestamp,
    topics: FakeTopics,
    /// Offsets of the requests of jobs that became dead letters, with the time.
    dead_letters: Vec<(u64, Timestamp)>,
    settings: Arc<Settings>,
    /// Which applications are paused or limited.
    apps: Arc<AppStates>,
    shard: Shard,
    ingest: Vec<Record>,
    completed: HashSet<i64>,
    /// The number of records of the ingest topic that this shard has read.
    fed: usize,
    /// How many were read at any time: their transactions are committed.
    read_to: usize,
    /// How many more records it reads.
    may_feed: usize,
    /// Offsets of commands whose transactions were aborted.
    aborted: HashSet<i64>,
    /// The urgent topic, if there is one.
    urgent: Option<urgent::UrgentTopic>,
    state: BTreeMap<JobId, Job>,
    /// Forgotten jobs in their last state.
    forgotten: BTreeMap<JobId, Job>,
    end: i64,
    /// Offsets of the state topic at which turns ended.
    turn_ends: HashSet<i64>,
    dispatched: Vec<(JobId, Timestamp)>,
    /// The occurrences of dispatched jobs.
    occurrences: Vec<(String, Timestamp)>,
    /// The values of dispatched jobs.
    values: HashMap<JobId, Option<Bytes>>,
    /// Records of long waits that were dispatched.
    returned_waits: Vec<(Option<Bytes>, Timestamp)>,
    /// Records of long waits that were rejected.
    dead_long_waits: Vec<Output>,
    answers: HashMap<String, v1::CommandOutcome>,
    index: BTreeMap<JobId, (Job, Bytes)>,
    applied: i64,
    requests: VecDeque<IndexRequest>,
    is_halted: bool,
    is_full: bool,
    /// Whether the index has no records of ended jobs.
    has_evicted_ended: bool,
    /// Which releases of long waits the index remembers as finished.
    finished_releases: HashMap<Arc<str>, FinishedRelease>,
    /// How often long waits were read.
    wait_scans: usize,
    ids: Vec<JobId>,
}

/// An index that contains the whole state topic.
fn snapshot(state: &BTreeMap<JobId, Job>) -> BTreeMap<JobId, (Job, Bytes)> {
    let jobs = state.iter();
    jobs.map(|(id, job)| (*id, (job.clone(), codec::encode(job))))
        .collect()
}

impl World {
    fn new() -> Self {
        Self::with(settings())
    }

    fn with(settings: Settings) -> Self {
        let topics = FakeTopics::default();
        let settings = Arc::new(Settings {
            topics: Arc::new(topics.clone()),
            ..settings
        });
        let mut world = Self {
            topics,
            dead_letters: Vec::new(),
            now: Timestamp::from_millis(START),
            shard: Shard::new(settings.clone(), 0),
            apps: settings.app_states.current(),
            settings,
            ingest: Vec::new(),
            completed: HashSet::new(),
            fed: 0,
            read_to: 0,
            may_feed: usize::MAX,
            aborted: HashSet::new(),
            urgent: None,
            state: BTreeMap::new(),
            forgotten: BTreeMap::new(),
            end: 0,
            turn_ends: HashSet::new(),
            dispatched: Vec::new(),
            occurrences: Vec::new(),
            values: HashMap::new(),
            returned_waits: Vec::new(),
            dead_long_waits: Vec::new(),
            answers: HashMap::new(),
            index: BTreeMap::new(),
            applied: 0,
            requests: VecDeque::new(),
            is_halted: false,
            is_full: false,
            has_evicted_ended: false,
            finished_releases: HashMap::new(),
            wait_scans: 0,
            ids: Vec::new(),
        };
        world.restart();
        world
    }

    fn send(&mut self, command: ProtoCommand) {
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
        self.feed();
    }

    fn feed(&mut self) {
        while self.fed < self.ingest.len() && self.shard.capacity() > 0 && self.may_feed > 0 {
            self.may_feed -= usize::from(self.may_feed < usize::MAX);
            let record = self.ingest[self.fed].clone();
            let offset = record.position.offset;
            self.fed += 1;
            self.read_to = self.read_to.max(self.fed);
            if !self.completed.contains(&offset) && !self.aborted.contains(&offset) {
                self.shard.accept(record, self.now);
            }
        }
        if self.fed == self.ingest.len() && self.shard.capacity() > 0 {
            self.shard.reached_end(i64::try_from(self.fed).unwrap());
        }
        self.requests.extend(self.shard.index_requests(self.now));
    }

    /// A new owner takes over: it acts only once the index is up to date.
    fn restart(&mut self) {
        self.shard = Shard::new(self.settings.clone(), 0);
        self.shard.set_app_states(self.apps.clone());
        self.shard.set_topic(Some(ingest_id()));
        self.restart_urgent();
        self.requests.clear();
        self.index = snapshot(&self.state);
        self.applied = self.end;
        self.fed = 0;
        self.is_halted = false;
        self.shard
            .handle_response(IndexResponse::Ready { end: self.end }, self.now);
        self.feed();
    }

    /// Pauses or limits applications, as an operator does.
    fn set_apps(&mut self, apps: AppStates) {
        self.apps = Arc::new(apps);
        self.shard.set_app_states(self.apps.clone());
    }

    fn turn(&mut self, limit: usize, is_lost: bool) {
        let writes = self.shard.finish(self.now, records(limit));
        if is_lost {
            return self.restart();
        }
        self.commit(writes);
    }

    fn commit(&mut self, writes: Writes) {
        let is_idle = writes.outputs.is_empty() && writes.completed.is_empty();
        assert!(is_idle || !self.is_halted, "a halted shard wrote something");
        let mut wrote = false;
        let dispatched = self.dispatched.len();
        for output in writes.outputs {
            match &*output.topic {
                APP | GONE => {
                    assert!(
                        &*output.topic != GONE || self.topics.get() == Presence::Exists,
                        "written to a missing topic"
                    );
                    let id = output.headers.last(headers::JOB_ID).unwrap();
                    let id: JobId = std::str::from_utf8(id).unwrap().parse().unwrap();
                    let app = output.headers.last(headers::JOB_APP).unwrap();
                    let app = std::str::from_utf8(app).unwrap();
                    assert!(!self.apps.is_paused(app), "dispatched during a pause");
                    self.dispatched.push((id, self.now));
                    if let Some(occurrence) = output.headers.last(headers::JOB_OCCURRENCE) {
                        let occurrence = String::from_utf8(occurrence.to_vec()).unwrap();
                        self.occurrences.push((occurrence, self.now));
                    }
                    self.values.insert(id, output.value);
                }
                RETURN_TOPIC => self.returned_waits.push((output.value, self.now)),
                "state" => {
                    wrote = true;
                    self.end += 1;
                    let key = std::str::from_utf8(output.key.as_deref().unwrap()).unwrap();
                    let id = match schedules::id_of_key(key) {
                        Some(schedule) => schedules::entry_id(schedule.as_str(), 0),
                        None => key.parse().unwrap(),
                    };
                    match output.value {
                        Some(value) => drop(self.state.insert(id, codec::decode(id, &value).unwrap())),
                        None if id.is_schedule() => drop(self.state.remove(&id).expect("a known schedule")),
                        None => {
                            let job = self.state.remove(&id).expect("a known job");
                            let retention = self.settings.retention;
                            let ended = job.ended.expect("an ended job");
                            assert!(
                                retention.forget(&job, ended) <= self.now,
                                "forgotten too soon: {job:?}"
                            );
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
                        self.dead_letters.push((offset, self.now));
                    }
                }
                "docs-dlq" => self.dead_long_waits.push(output),
                other => panic!("unexpected output topic {other}"),
            }
        }
        for offset in writes.completed {
            assert!(self.completed.insert(offset), "completed twice");
        }
        self.check_pins(dispatched);
        if wrote {
            self.turn_ends.insert(self.end);
            self.shard.committed(self.end);
        }
        self.feed();
    }

    fn serve_index(&mut self) {
        if self.is_halted {
            // The indexer has brought the index up to date.
            self.is_halted = false;
            self.applied = self.applied.max(self.end);
            self.index = snapshot(&self.state);
            self.shard
                .handle_response(IndexResponse::Ready { end: self.end }, self.now);
            return self.feed();
        }
        let Some(request) = self.requests.pop_front() else {
            return;
        };
        let answer = match request {
            IndexRequest::Apply { turn, batch } => {
                assert!(batch.from <= self.applied, "a change is missing");
                let forced = batch.force;
                if batch.to <= self.applied || (self.is_full && !forced) {
                    let answer = if batch.to <= self.applied {
                        IndexResponse::Applied { turn, forced }
                    } else {
                        IndexResponse::Full { turn, batch }
                    };
                    self.shard.handle_response(answer, self.now);
                    return self.requests.extend(self.shard.index_requests(self.now));
                }
                assert!(
                    batch.from <= batch.to && batch.to <= self.end,
                    "a batch beyond the end of the state topic"
                );
                let last_record = batch.last_record.map(|last_record| last_record.offset + 1);
                let is_whole = self.turn_ends.contains(&batch.to);
                assert_eq!(
                    last_record,
                    is_whole.then_some(batch.to),
                    "the digest of the last record of a turn"
                );
                let bytes: usize = batch.changes.iter().map(Change::size).sum();
                assert!(
                    bytes <= MAX_BATCH_BYTES || batch.changes.len() == 1,
                    "{bytes} bytes"
                );
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
                IndexResponse::Applied { turn, forced }
            }
            IndexRequest::LookUp(queries) => {
                let record = |id| {
                    let (job, record) = self.index.get(&id)?;
                    let is_evicted = self.has_evicted_ended && job.state != JobState::Scheduled;
                    (!is_evicted).then(|| Arc::new(codec::decode(id, record).unwrap()))
                };
                let key = |hash| {
                    let users = self.index.values().filter(|(job, _)| {
                        let key = job.idempotency_key.as_deref();
                        key.is_some_and(|key| key_hash(&job.app, key) == hash)
                    });
                    let newest = users.max_by_key(|(job, _)| job.accepted);
                    newest.map(|(job, _)| KeyValue::of(job))
                };
                let find = |query: Query| match query {
                    Query::Job(id) => Found {
                        key: None,
                        job: record(id),
                    },
                    Query::Key(hash) => Found {
                        key: key(hash),
                        job: None,
                    },
                    Query::JobOfKey(hash) => Found {
                        key: key(hash),
                        job: key(hash).and_then(|key| record(key.id)),
                    },
                };
                IndexResponse::LookedUp(queries.into_iter().map(find).collect())
            }
            IndexRequest::Scan(request) => {
                IndexResponse::Scanned(lookups::read_scan(self.scan(&request)).unwrap())
            }
            IndexRequest::FinishedRelease(pipeline) => {
                IndexResponse::FinishedRelease(self.finished_releases.get(&pipeline).copied())
            }
            IndexRequest::FinishRelease(pipeline, finished) => {
                self.finished_releases.insert(pipeline, finished);
                IndexResponse::ReleaseFinished
            }
            IndexRequest::ScanWaits(request) => {
                self.wait_scans += 1;
                IndexResponse::ScannedWaits(lookups::read_scan(self.scan(&request)).unwrap())
            }
            IndexRequest::Forgettable => {
                let jobs = self.index.values();
                let over = jobs.filter(|(job, _)| {
                    let forget = job.ended.map(|ended| self.settings.retention.forget(job, ended));
                    forget.is_some_and(|forget| forget <= self.now)
                });
                IndexResponse::Forgettable(over.map(|(job, _)| job.id).take(3).collect())
            }
            IndexRequest::Count(apps) => {
                let waiting = |app: &Arc<str>| {
                    let jobs = self.index.values().map(|(job, _)| job);
                    let jobs = jobs.filter(|job| job.kind == Kind::App && job.app == *app);
                    jobs.filter(|job| job.state == JobState::Scheduled).count() as u64
                };
                IndexResponse::Counted(apps.into_iter().map(|app| (app.clone(), waiting(&app))).collect())
            }
        };
        self.shard.handle_response(answer, self.now);
        self.requests.extend(self.shard.index_requests(self.now));
    }

    fn scan(&self, request: &ScanRequest) -> Scan {
        let mut flows: BTreeMap<Flow, BTreeMap<Cursor, Bytes>> = BTreeMap::new();
        for (job, record) in self.index.values() {
            if job.state == JobState::Scheduled {
                let jobs = flows.entry(Flow::of(job)).or_default();
                jobs.insert(Cursor::of(job), record.clone());
            }
        }
        flows.retain(|_, jobs| jobs.keys().next().is_some_and(|first| first.due <= request.until));
        let positions: HashMap<&Flow, FlowPosition> = request
            .positions
            .iter()
            .map(|(flow, position)| (flow, *position))
            .collect();
        let (mut room, mut bytes) = (request.jobs, 0);
        let first = request.rotation % flows.len().max(1);
        let mut order: Vec<_> = flows.iter().collect();
        order.rotate_left(first);
        let scanned = order.into_iter().map(|(flow, jobs)| {
            let position = positions.get(flow).copied().unwrap_or(FlowPosition::After {
                cursor: request.after,
                until: request.until,
                jobs: request.jobs_per_flow,
            });
            let (rows, is_complete) = match position {
                FlowPosition::CountOnly => (Vec::new(), false),
                FlowPosition::After {
                    cursor,
                    until,
                    jobs: limit,
                } => {
                    let rows = jobs
                        .iter()
                        .filter(|(at, _)| Some(**at) > cursor && at.due <= until);
                    let rows: Vec<Row> = rows
                        .map(|(cursor, record)| Row {
                            cursor: *cursor,
                            record: record.clone(),
                        })
                        .collect();
                    let all = rows.len();
                    let rows: Vec<Row> = rows
                        .into_iter()
                        .take(limit.min(room))
                        .take_while(|row| {
                            let fits = bytes < request.bytes;
                            bytes += row.record.len();
                            fits
                        })
                        .collect();
                    let is_complete = rows.len() == all;
                    room -= rows.len();
                    (rows, is_complete)
                }
            };
            FlowScan {
                flow: flow.clone(),
                first: jobs.keys().next().map_or(request.until, |first| first.due),
                due: jobs.keys().filter(|cursor| cursor.due <= request.now).count() as u64,
                rows,
                is_complete,
            }
        });
        Scan {
            applied: None,
            flows: scanned.collect(),
        }
    }

    fn send_job(&mut self, spec: v1::JobSpec) -> JobId {
        self.send(ProtoCommand::Schedule(spec));
        self.ids[self.ids.len() - 1]
    }

    fn cancel(&mut self, id: JobId) {
        let id = id.to_string();
        self.send(ProtoCommand::Cancel(v1::CancelJob {
            id,
            ..v1::CancelJob::default()
        }));
    }

    fn reschedule(&mut self, job: v1::RescheduleJob, ahead: u16) {
        let due = self.now.after(Duration::from_millis(ahead.into()));
        let when = Some(v1::reschedule_job::When::ScheduledTime(to_timestamp(due)));
        self.send(ProtoCommand::Reschedule(v1::RescheduleJob { when, ..job }));
    }

    fn replace(&mut self, replacement: &Debounced) -> JobId {
        let wait = HumanDuration::from_millis(replacement.ahead.into());
        let from = self.now.as_millis() / 200 * 200;
        let when = if replacement.is_delayed {
            after(wait)
        } else {
            at(Timestamp::from_millis(from).after(wait.duration()))
        };
        let priority = if replacement.is_high {
            v1::Priority::High
        } else {
            v1::Priority::Normal
        };
        let spec = v1::JobSpec {
            idempotency_key: replacement.key.to_string(),
            request_id: replacement
                .request_id
                .map_or_else(String::new, |id| id.to_string()),
            data: vec![replacement.data].into(),
            priority: priority.into(),
            on_conflict: v1::ConflictPolicy::Replace.into(),
            ..spec("app", when)
        };
        self.send_job(spec)
    }

    fn schedule(&mut self, app: &str, ahead: u16, key: Option<u8>) -> JobId {
        let due = self.now.after(Duration::from_millis(ahead.into()));
        let spec = v1::JobSpec {
            idempotency_key: key.map_or_else(String::new, |key| key.to_string()),
            ..spec(app, at(due))
        };
        self.send_job(spec)
    }

    /// Advances the clock in steps of 10 ms, with a turn and index responses in each step.
    fn advance(&mut self, millis: u16) {
        for _ in 0..millis / 10 {
            self.run(&Step::AdvanceClock(10));
            self.turn(50, false);
            self.run(&Step::ServeIndex(3));
        }
    }

    fn is_overlay_empty(&self) -> bool {
        self.shard.overlay.len() == 0
    }

    fn was_dispatched(&self, id: JobId) -> bool {
        self.dispatched.iter().any(|(other, _)| *other == id)
    }

    fn run(&mut self, step: &Step) {
        self.run_unchecked(step);
        assert!(
            self.shard.window_len() <= self.settings.window_jobs,
            "the window is too large"
        );
    }

    fn run_unchecked(&mut self, step: &Step) {
        match *step {
            Step::Schedule { ahead, key } => drop(self.schedule("app", ahead, key)),
            Step::Cancel(job) => {
                if let Some(id) = self.ids.get(job) {
                    self.cancel(*id);
                }
            }
            Step::Reschedule(job, ahead) => {
                if let Some(id) = self.ids.get(job) {
                    let id = id.to_string();
                    let job = v1::RescheduleJob {
                        id,
                        ..v1::RescheduleJob::default()
                    };
                    self.reschedule(job, ahead);
                }
            }
            Step::Replace(ref replacement) => drop(self.replace(replacement)),
            Step::CancelKey(key) => self.send(ProtoCommand::Cancel(v1::CancelJob {
                app: "app".to_owned(),
                idempotency_key: key.to_string(),
                ..v1::CancelJob::default()
            })),
            Step::RescheduleKey(key, ahead) => {
                let job = v1::RescheduleJob {
                    app: "app".to_owned(),
                    idempotency_key: key.to_string(),
                    ..v1::RescheduleJob::default()
                };
                self.reschedule(job, ahead);
            }
            Step::AdvanceClock(millis) => self.now = self.now.after(Duration::from_millis(millis.into())),
            Step::Turn { limit, is_lost } => self.turn(limit, is_lost),
            Step::ServeIndex(count) => (0..count).for_each(|_| self.serve_index()),
            Step::SetIndexFull(is_full) => self.is_full = is_full,
            Step::SetPresence(presence) => self.topics.set(presence),
            Step::SetApp { is_paused, rate } => self.set_apps(AppStates {
                paused: is_paused.then(|| "app".to_owned()).into_iter().collect(),
                ..limited(rate)
            }),
            Step::ScheduleForGone { ahead } => drop(self.schedule("gone", ahead, None)),
            Step::Halt => {
                self.is_halted = true;
                self.shard.handle_response(IndexResponse::Halted, self.now);
            }
            Step::Restart => self.restart(),
        }
    }

    /// Runs until nothing is left to do.
    fn settle(&mut self) {
        self.is_full = false;
        self.topics.set(Presence::Exists);
        self.set_apps(AppStates::default());
        for _ in 0..400 {
            self.run(&Step::AdvanceClock(20));
            self.turn(50, false);
            self.serve_index();
            self.serve_index();
        }
    }

    fn job(&self, id: JobId) -> Option<&Job> {
        self.state.get(&id).or_else(|| self.forgotten.get(&id))
    }

    /// The commands whose transactions were not aborted, with their offsets.
    fn commands(&self) -> impl Iterator<Item = (usize, &Record)> {
        let commands = self.ingest.iter().enumerate();
        commands.filter(|(_, record)| !self.aborted.contains(&record.position.offset))
    }

    /// Asserts the invariants after [`World::settle`].
    fn check(&self) {
        assert_eq!(
            self.completed.len(),
            self.commands().count(),
            "undecided commands"
        );
        let dead: HashMap<u64, Timestamp> = self.dead_letters.iter().copied().collect();
        assert_eq!(
            dead.len(),
            self.dead_letters.len(),
            "two dead letters for one job"
        );
        let mut times: HashMap<JobId, Vec<Timestamp>> = HashMap::new();
        for (id, at) in &self.dispatched {
            times.entry(*id).or_default().push(*at);
        }
        for (offset, record) in self.commands() {
            let command = v1::JobCommand::decode(record.value.clone().unwrap()).unwrap();
            let outcome = &self.answers[&offset.to_string()];
            let id = self.ids[offset];
            let at = times.remove(&id).unwrap_or_default();
            let Some(ProtoCommand::Schedule(_)) = command.command else {
                assert!(at.is_empty(), "dispatched without a request to schedule");
                continue;
            };
            let is_own_job = outcome.job.as_ref().is_some_and(|job| job.id == id.to_string());
            match outcome.outcome() {
                v1::Outcome::Scheduled | v1::Outcome::Replaced if is_own_job => {
                    let job = self.job(id).expect("the accepted job");
                    match job.state {
                        JobState::Dispatched => {
                            assert_eq!(at.len(), 1, "not dispatched exactly once: {job:?}");
                            assert!(at[0] >= job.due, "dispatched early: {job:?} at {at:?}");
                        }
                        JobState::Cancelled => assert!(at.is_empty(), "cancelled and dispatched: {job:?}"),
                        JobState::Expired => {
                            assert!(at.is_empty(), "expired and dispatched: {job:?}");
                            let dead_at = dead[&id.offset()];
                            assert!(dead_at >= job.due.after(TIMEOUT), "dead letter too soon: {job:?}");
                        }
                        JobState::Scheduled => panic!("never dispatched: {job:?}"),
                    }
                }
                v1::Outcome::Duplicate | v1::Outcome::Conflict | v1::Outcome::Replaced => {
                    assert!(at.is_empty());
                    let first = &outcome.job.as_ref().unwrap().id;
                    assert!(self.job(first.parse().unwrap()).is_some());
                }
                v1::Outcome::Rejected => {
                    assert_eq!(outcome.code, INDEX_FULL);
                    assert!(at.is_empty() && self.job(id).is_none());
                }
                other => panic!("unexpected outcome of a request: {other:?}"),
            }
        }
        assert!(times.is_empty(), "dispatched without a request: {times:?}");
        for (offset, record) in self.commands() {
            let command = v1::JobCommand::decode(record.value.clone().unwrap()).unwrap();
            let Some(ProtoCommand::Cancel(cancel)) = command.command else {
                continue;
            };
            let answer = &self.answers[&offset.to_string()];
            let by_key = answer.job.as_ref().map(|job| job.id.clone());
            let id = Some(cancel.id).filter(|id| !id.is_empty()).or(by_key);
            let job = id.and_then(|id| self.job(id.parse().unwrap()));
            let state = job.map(|job| job.state);
            let expected = match answer.outcome() {
                v1::Outcome::Cancelled | v1::Outcome::AlreadyCancelled => Some(JobState::Cancelled),
                v1::Outcome::AlreadyDispatched => Some(JobState::Dispatched),
                v1::Outcome::Unknown => None,
                v1::Outcome::Expired => Some(JobState::Expired),
                other => panic!("unexpected outcome of a cancellation: {other:?}"),
            };
            // An unknown job may have been requested after its cancellation.
            if expected.is_some() {
                assert_eq!(state, expected, "the outcome was not final");
            }
        }
        self.check_keys();
    }

    /// Follows the commands of each idempotency key in their order, and compares their outcomes with what their clients meant.
    fn check_keys(&self) {
        let mut uses: HashMap<String, KeyUse> = HashMap::new();
        let mut newest: HashMap<JobId, KeyUse> = HashMap::new();
        for (offset, record) in self.commands() {
            let command = v1::JobCommand::decode(record.value.clone().unwrap()).unwrap();
            let outcome = &self.answers[&offset.to_string()];
            let job = outcome.job.as_ref();
            let mut spec = match command.command {
                Some(ProtoCommand::Schedule(spec)) if !spec.idempotency_key.is_empty() => spec,
                Some(ProtoCommand::Reschedule(command)) => {
                    if outcome.outcome() == v1::Outcome::Rescheduled {
                        let job = job.unwrap();
                        let by_key = uses.get_mut(&command.idempotency_key);
                        assert!(
                            command.id == job.id || by_key.is_some_and(|used| used.id.to_string() == job.id),
                            "another job was rescheduled: {outcome:?}"
                        );
                        for used in uses.values_mut().chain(newest.values_mut()) {
                            if used.id.to_string() == job.id {
                                assert_eq!(job.revision, used.revision + 1);
                                (used.revision, used.due) = (job.revision, due_of(job));
                            }
                        }
                    }
                    continue;
                }
                _ => continue,
            };
            if outcome.outcome() == v1::Outcome::Rejected {
                continue;
            }
            if spec.priority() == v1::Priority::Unspecified {
                spec.priority = v1::Priority::Normal.into();
            }
            let (job, replaces) = (job.unwrap(), spec.on_conflict() == v1::ConflictPolicy::Replace);
            let before = uses.get(&spec.idempotency_key);
            let used = KeyUse {
                id: job.id.parse().unwrap(),
                revision: job.revision,
                due: due_of(job),
                accepted: from_timestamp(job.accepted_at.as_ref().unwrap_or(&to_timestamp(self.now)))
                    .unwrap(),
                spec,
            };
            match (outcome.outcome(), before) {
                (v1::Outcome::Scheduled, None) => assert_eq!(used.id, self.ids[offset]),
                (v1::Outcome::Scheduled, Some(before)) => {
                    assert_eq!(used.id, self.ids[offset]);
                    if before.accepted.after(self.settings.retention.keys) > used.accepted {
                        assert!(replaces && !before.is_repeated_by(&used), "two jobs: {outcome:?}");
                        let ended = self.job(before.id).unwrap().ended.unwrap();
                        assert!(ended <= used.accepted, "two jobs at a time: {outcome:?}");
                    }
                }
                (v1::Outcome::Replaced, Some(before)) => {
                    assert!(replaces && !before.is_repeated_by(&used), "{outcome:?}");
                    if before.id == used.id {
                        assert_eq!(before.spec.priority(), used.spec.priority());
                        assert_eq!(before.revision + 1, used.revision);
                    } else {
                        assert_ne!(before.spec.priority(), used.spec.priority());
                        assert_eq!((used.id, used.revision), (self.ids[offset], 1));
                        let superseded = self.job(before.id).unwrap();
                        assert_eq!(superseded.state, JobState::Cancelled);
                        assert_eq!(superseded.ended, Some(used.accepted));
                    }
                }
                (v1::Outcome::Duplicate, Some(before)) => {
                    assert_eq!(before.id, used.id);
                    if replaces {
                        assert!(before.is_repeated_by(&used), "{outcome:?}");
                    } else {
                        assert!(before.has_content_of(&used), "{outcome:?}");
                    }
                    continue;
                }
                (v1::Outcome::Conflict, Some(before)) => {
                    assert_eq!(before.id, used.id);
                    assert!(!replaces && !before.has_content_of(&used), "{outcome:?}");
                    continue;
                }
                (other, _) => panic!("unexpected outcome of a request with a key: {other:?}"),
            }
            newest.insert(used.id, used.clone());
            uses.insert(used.spec.idempotency_key.clone(), used);
        }
        for (id, used) in newest {
            let job = self.job(id).unwrap();
            assert_eq!((job.due, job.revision), (used.due, used.revision), "{job:?}");
            if let Some(value) = self.values.get(&id) {
                assert_eq!(
                    value.as_ref(),
                    Some(&used.spec.data),
                    "not the newest data: {job:?}"
                );
            }
        }
    }
}

/// The newest request with an idempotency key, with the job that it led to.
#[derive(Clone)]
struct KeyUse {
    id: JobId,
    spec: v1::JobSpec,
    revision: u32,
    due: Timestamp,
    accepted: Timestamp,
}

fn due_of(job: &v1::Job) -> Timestamp {
    let due = job.scheduled_time.as_ref();
    due.map_or(Timestamp::from_millis(0), |due| from_timestamp(due).unwrap())
}

impl KeyUse {
    fn has_content_of(&self, other: &Self) -> bool {
        let content = |spec: &v1::JobSpec| v1::JobSpec {
            request_id: String::new(),
            on_conflict: 0,
            ..spec.clone()
        };
        content(&self.spec) == content(&other.spec)
    }

    fn is_repeated_by(&self, other: &Self) -> bool {
        let is_named = !other.spec.request_id.is_empty();
        let is_absolute = matches!(other.spec.when, Some(v1::job_spec::When::ScheduledTime(_)));
        self.has_content_of(other)
            && self.spec.request_id == other.spec.request_id
            && (is_named || is_absolute)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn each_job_is_dispatched_once_and_never_early(
        steps in proptest::collection::vec(step(), 0..120),
        rate in proptest::option::of(30.0..200.0),
    ) {
        let mut world = World::with(Settings { app_states: LiveAppStates::fixed(limited(rate)), ..settings() });
        for step in steps {
            world.run(&step);
        }
        world.settle();
        world.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn each_job_is_dispatched_once_and_forgotten_after_its_retention(steps in proptest::collection::vec(step(), 0..120)) {
        let retention = RetentionPolicy { keys: Duration::from_millis(300), ended: Duration::from_millis(200) };
        let mut world = World::with(Settings { retention, ..settings() });
        for step in steps {
            world.run(&step);
        }
        world.settle();
        world.check();
        prop_assert!(world.state.is_empty() && world.index.is_empty(), "{:?}", world.state);
    }
}

/// With a rate for the application `app`.
fn limited(rate: Option<f64>) -> AppStates {
    AppStates {
        rates: rate.map(|rate| ("app".to_owned(), rate)).into_iter().collect(),
        ..AppStates::default()
    }
}

/// With this application paused.
fn paused(app: &str) -> AppStates {
    AppStates {
        paused: [app.to_owned()].into(),
        ..AppStates::default()
    }
}

#[test]
fn an_application_that_has_used_up_its_rate_delays_no_other() {
    let mut world = World::with(Settings {
        app_states: LiveAppStates::fixed(limited(Some(20.0))),
        ..settings()
    });
    let at_once: Vec<JobId> = (0..30).map(|_| world.schedule("app", 0, None)).collect();
    let later: Vec<JobId> = (0..30).map(|_| world.schedule("app", 300, None)).collect();
    let others: Vec<JobId> = (0..30).map(|n| world.schedule("other", 10 * n, None)).collect();
    world.advance(400);
    assert_eq!(count_dispatched(&world, &others), 30);
    // 20 at once, and 8 in 400 ms.
    let dispatched = count_dispatched(&world, &at_once) + count_dispatched(&world, &later);
    assert!((26..=28).contains(&dispatched), "{dispatched}");
    let held_back = world.shard.held_back(world.now);
    assert!(
        held_back.contains_key("app") && held_back.len() == 1,
        "{held_back:?}"
    );
    world.advance(1_000);
    let dispatched = count_dispatched(&world, &at_once) + count_dispatched(&world, &later);
    assert!((45..=48).contains(&dispatched), "{dispatched}");
    world.settle();
    assert_eq!(world.dispatched.len(), 90);
    world.check();
}

#[test]
fn jobs_that_expire_take_nothing_from_the_rate() {
    let mut world = World::with(Settings {
        app_states: LiveAppStates::fixed(limited(Some(1.0))),
        ..settings()
    });
    for expire_after in [Some(0), Some(0), Some(0), None] {
        let expire_after = expire_after.map(|seconds| to_duration(HumanDuration::from_secs(seconds)));
        world.send_job(v1::JobSpec {
            expire_after,
            ..spec("app", at(Timestamp::from_millis(START - 10)))
        });
    }
    world.advance(50);
    let expired = world
        .state
        .values()
        .filter(|job| job.state == JobState::Expired)
        .count();
    assert_eq!((expired, world.dispatched.len()), (3, 1));
}

fn count_dispatched(world: &World, jobs: &[JobId]) -> usize {
    jobs.iter().filter(|id| world.was_dispatched(**id)).count()
}

#[test]
fn jobs_that_do_not_fit_into_the_window_are_dispatched_in_time() {
    let mut world = World::new();
    let limit = world.settings.window_jobs;
    // From here on, all jobs that are due within the window are in memory.
    world.run(&Step::ServeIndex(5));
    let jobs: Vec<JobId> = (0..10 * limit)
        .map(|_| world.schedule("app", 120, None))
        .collect();
    world.turn(1000, false);
    assert_eq!(world.shard.window_len(), limit);
    world.advance(110);
    assert_eq!(count_dispatched(&world, &jobs), 0);
    assert_eq!(world.shard.window_len(), limit);
    world.advance(200);
    assert_eq!(count_dispatched(&world, &jobs), jobs.len());
    world.check();
}

#[test]
fn a_new_job_evicts_later_jobs_from_a_full_window() {
    let mut world = World::new();
    let limit = world.settings.window_jobs;
    let schedule = |world: &mut World, ahead: u16| -> Vec<JobId> {
        let jobs = 0..2 * limit;
        jobs.map(|_| world.schedule("app", ahead, None)).collect()
    };
    let looked_up = schedule(&mut world, 400);
    world.advance(230);
    assert_eq!(world.shard.window_len(), limit);
    let commanded = schedule(&mut world, 150);
    world.advance(10);
    assert_eq!(world.shard.window_len(), limit);
    let new_jobs: Vec<JobId> = (0..limit).map(|_| world.schedule("app", 30, None)).collect();
    world.advance(40);
    assert_eq!(count_dispatched(&world, &new_jobs), limit);
    let early = count_dispatched(&world, &commanded) + count_dispatched(&world, &looked_up);
    assert_eq!(early, 0);
    // All other jobs are dispatched in time too, including those that were evicted from the window.
    world.advance(160);
    assert_eq!(count_dispatched(&world, &commanded), commanded.len());
    assert_eq!(count_dispatched(&world, &looked_up), looked_up.len());
    world.check();
}

#[test]
fn a_scan_in_progress_delays_no_new_job() {
    let mut world = World::new();
    let limit = world.settings.window_jobs;
    world.run(&Step::ServeIndex(5));
    // A scan is in progress when the window fills up, and its result does not contain the new jobs.
    world.run(&Step::AdvanceClock(60));
    world.turn(50, false);
    let is_scan = |request: &IndexRequest| matches!(request, IndexRequest::Scan(_));
    assert!(world.requests.iter().any(is_scan), "{:?}", world.requests);
    let jobs: Vec<JobId> = (0..5 * limit).map(|_| world.schedule("app", 100, None)).collect();
    world.turn(1000, false);
    world.advance(200);
    assert_eq!(count_dispatched(&world, &jobs), jobs.len());
    world.check();
}

#[test]
fn a_full_index_delays_no_due_job_and_rejects_only_jobs_that_are_not_due_soon() {
    let mut world = World::new();
    let before: Vec<JobId> = (0..100).map(|n| world.schedule("app", 2_000 + n, None)).collect();
    let distant: Vec<JobId> = (0..20).map(|_| world.schedule("other", 60_000, None)).collect();
    world.advance(500);
    assert!(world.is_overlay_empty());
    world.run(&Step::SetIndexFull(true));
    // The shard learns that the index is full when the index refuses the first batch.
    let last = world.schedule("other", 60_000, None);
    world.advance(20);
    let refused = world.schedule("other", 60_000, None);
    let due_soon = world.schedule("other", 150, None);
    world.advance(300);
    assert!(world.was_dispatched(due_soon));
    let outcome = |world: &World, id: JobId| world.answers[&id.offset().to_string()].outcome();
    assert_eq!(outcome(&world, last), v1::Outcome::Scheduled);
    assert_eq!(outcome(&world, refused), v1::Outcome::Rejected);
    world.cancel(distant[0]);
    world.advance(2_000);
    assert_eq!(count_dispatched(&world, &before), before.len());
    assert!(
        world.is_overlay_empty(),
        "changes that end jobs must reach the index"
    );
    assert!(world.applied == world.end && world.index.contains_key(&last));
    world.run(&Step::SetIndexFull(false));
    world.advance(1_100);
    let again = world.schedule("other", 50_000, None);
    world.advance(100);
    assert_eq!(outcome(&world, again), v1::Outcome::Scheduled);
}

#[test]
fn a_full_index_takes_no_jobs_of_paused_applications_whenever_they_are_due() {
    let mut world = World::with(Settings {
        app_states: LiveAppStates::fixed(paused("app")),
        ..settings()
    });
    world.shard.set_memory_pressure(MemoryPressure::Full);
    world.schedule("app", 0, None);
    let other = world.schedule("other", 0, None);
    world.advance(100);
    assert_eq!(world.answers["0"].code, INDEX_FULL);
    assert!(world.was_dispatched(other));
}

#[test]
fn a_quota_counts_the_jobs_that_wait() {
    let max_waiting = [("app".into(), 3)].into();
    let mut world = World::with(Settings {
        max_waiting,
        ..settings()
    });
    let code = |world: &mut World, app: &str, delay| {
        let id = world.schedule(app, delay, None);
        world.advance(100);
        (id, world.answers[&id.offset().to_string()].code.clone())
    };
    let accepted = |world: &mut World, delay| {
        let (id, code) = code(world, "app", delay);
        assert_eq!(code, "");
        id
    };
    let assert_full = |world: &mut World, why: &str| {
        for delay in [0, 60_000] {
            assert_eq!(code(world, "app", delay).1, QUOTA_EXCEEDED, "{why}");
        }
    };
    accepted(&mut world, 0);
    let keyed = v1::JobSpec {
        idempotency_key: "key".to_owned(),
        ..spec("app", at(world.now.after(Duration::from_secs(60))))
    };
    world.send_job(keyed.clone());
    let first = accepted(&mut world, 60_000);
    let due = accepted(&mut world, 3_000);
    assert_full(&mut world, "after three");
    assert_eq!(
        code(&mut world, "other", 60_000).1,
        "",
        "an application without a quota"
    );
    let repeated = world.send_job(keyed);
    world.advance(100);
    let repeated = &world.answers[&repeated.offset().to_string()];
    assert_eq!(repeated.outcome(), v1::Outcome::Duplicate);

    world.run(&Step::Restart);
    world.advance(50);
    assert_full(&mut world, "after a restart");
    world.cancel(first);
    world.advance(50);
    accepted(&mut world, 60_000);
    assert_full(&mut world, "after a cancellation");
    world.advance(3_000);
    assert!(world.was_dispatched(due));
    accepted(&mut world, 60_000);
    assert_full(&mut world, "after a dispatch");
}

#[test]
fn jobs_of_a_missing_topic_wait_and_delay_no_other_jobs() {
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
    world.advance(900);
    assert_eq!(count_dispatched(&world, &others), others.len());
    assert_eq!(count_dispatched(&world, &gone), 0);
    assert_eq!(world.shard.window_len(), 0, "parked jobs take room in the window");
    // A new owner finds the parked jobs again.
    world.restart();
    world.advance(100);
    let parked = |world: &World| world.shard.parked().values().sum::<usize>();
    assert_eq!(parked(&world), gone.len() + 2);
    // Parked jobs can be cancelled.
    world.cancel(cancelled);
    world.advance(50);
    assert_eq!(parked(&world), gone.len() + 1);
    world.topics.set(Presence::Exists);
    let new_job = world.schedule("app", 100, None);
    world.advance(150);
    assert!(
        world.was_dispatched(new_job),
        "the backlog of another topic delayed it"
    );
    world.advance(1_500);
    assert_eq!(count_dispatched(&world, &gone), gone.len());
    assert!(world.was_dispatched(last) && !world.was_dispatched(cancelled));
    assert_eq!(parked(&world), 0);
    world.check();
}

#[test]
fn jobs_of_a_paused_application_wait_until_it_is_resumed() {
    let app_states = LiveAppStates::fixed(paused("gone"));
    let mut world = World::with(Settings {
        app_states,
        ..settings()
    });
    // It makes no difference whether the topic exists.
    let lasting = 2 * TIMEOUT;
    world.topics.set(Presence::Missing { lasting });
    let limit = world.settings.window_jobs;
    let ahead = |n| u16::try_from(n % 300).unwrap();
    let jobs: Vec<JobId> = (0..5 * limit)
        .map(|n| world.schedule("gone", ahead(n), None))
        .collect();
    let others: Vec<JobId> = (0..50).map(|n| world.schedule("app", 200 + n, None)).collect();
    world.advance(2_500);
    world.topics.set(Presence::Exists);
    world.advance(2_500);
    assert_eq!(count_dispatched(&world, &others), others.len());
    assert_eq!(
        (count_dispatched(&world, &jobs), world.dead_letters.len()),
        (0, 0)
    );
    let parked = world.shard.parked();
    assert_eq!(parked, [(Obstacle::Paused("gone".into()), jobs.len())].into());
    assert_eq!(world.shard.window_len(), 0);
    // Its jobs can be cancelled.
    world.cancel(jobs[0]);
    world.advance(50);
    // A process with another configuration takes over.
    world.settings = Arc::new(Settings {
        topics: Arc::new(world.topics.clone()),
        ..settings()
    });
    world.apps = world.settings.app_states.current();
    world.restart();
    world.settle();
    assert_eq!(count_dispatched(&world, &jobs), jobs.len() - 1);
    world.check();
}

#[test]
fn an_application_can_be_paused_and_resumed_at_any_time() {
    let mut world = World::new();
    let jobs: Vec<JobId> = (0..60).map(|n| world.schedule("app", 10 * n, None)).collect();
    let others: Vec<JobId> = (0..60).map(|n| world.schedule("other", 10 * n, None)).collect();
    world.advance(200);
    let before = count_dispatched(&world, &jobs);
    assert!((1..60).contains(&before), "{before}");
    world.set_apps(paused("app"));
    world.advance(2_000);
    // A new owner obeys it too.
    world.restart();
    world.advance(500);
    assert_eq!(count_dispatched(&world, &jobs), before);
    assert_eq!(count_dispatched(&world, &others), others.len());
    let parked = world.shard.parked();
    assert_eq!(
        parked,
        [(Obstacle::Paused("app".into()), jobs.len() - before)].into()
    );
    // Due on arrival.
    let late = world.schedule("app", 0, None);
    world.advance(50);
    assert!(!world.was_dispatched(late));
    world.set_apps(AppStates::default());
    world.settle();
    assert_eq!(count_dispatched(&world, &jobs), jobs.len());
    assert!(world.was_dispatched(late));
    world.check();
}

#[test]
fn a_rate_that_is_set_while_jobs_wait_holds_them_back_over_aborted_turns() {
    let mut world = World::new();
    let jobs: Vec<JobId> = (0..60).map(|_| world.schedule("app", 100, None)).collect();
    world.set_apps(limited(Some(10.0)));
    for _ in 0..10 {
        world.advance(100);
        // The lane replaces its shards after an abort. That must not fill the buckets again.
        world.turn(50, true);
    }
    let dispatched = count_dispatched(&world, &jobs);
    assert!((10..=20).contains(&dispatched), "{dispatched}");
    world.settle();
    world.check();
}

#[test]
fn a_flow_without_jobs_is_not_parked_any_more() {
    let mut world = World::new();
    let lasting = Duration::from_secs(1);
    world.topics.set(Presence::Missing { lasting });
    let job = world.schedule("gone", 100, None);
    world.advance(300);
    assert_eq!(world.shard.parked().values().sum::<usize>(), 1);
    world.cancel(job);
    world.advance(300);
    assert!(world.shard.parked().is_empty(), "{:?}", world.shard.parked());
}

#[test]
fn jobs_that_waited_too_long_for_a_missing_topic_become_dead_letters() {
    let mut world = World::new();
    let lasting = TIMEOUT;
    world.topics.set(Presence::Missing { lasting });
    let jobs: Vec<JobId> = (0..50)
        .map(|n| world.schedule("gone", 100 + 40 * n, None))
        .collect();
    world.advance(2_000);
    assert_eq!(world.dead_letters.len(), 0);
    world.advance(1_100);
    assert!(
        (1..50).contains(&world.dead_letters.len()),
        "{}",
        world.dead_letters.len()
    );
    // One job is rescheduled, and the topic exists again before its timeout.
    world.run(&Step::Reschedule(49, 3_000));
    world.advance(3_000);
    assert_eq!(world.dead_letters.len(), 49);
    world.topics.set(Presence::Exists);
    world.settle();
    assert_eq!(count_dispatched(&world, &jobs), 1);
    world.check();
}

fn schedule_with_priority(world: &mut World, app: &str, priority: v1::Priority) -> JobId {
    let spec = v1::JobSpec {
        priority: priority.into(),
        ..spec(app, at(world.now))
    };
    world.send_job(spec)
}

#[test]
fn in_a_backlog_high_priority_is_dispatched_first_and_low_priority_is_not_starved() {
    let mut world = World::with(Settings {
        window_jobs: 1000,
        ..settings()
    });
    let of = |world: &mut World, priority| -> Vec<JobId> {
        (0..60)
            .map(|_| schedule_with_priority(world, "app", priority))
            .collect()
    };
    let low = of(&mut world, v1::Priority::Low);
    let normal = of(&mut world, v1::Priority::Normal);
    let high = of(&mut world, v1::Priority::High);
    // Each turn decides more commands than it dispatches jobs.
    while count_dispatched(&world, &high) < high.len() {
        world.turn(20, false);
        world.run(&Step::ServeIndex(3));
    }
    let overtaken = count_dispatched(&world, &normal) + count_dispatched(&world, &low);
    assert!(
        overtaken <= 60,
        "{overtaken} of 120 were dispatched before the last of high priority"
    );
    while count_dispatched(&world, &normal) < normal.len() {
        world.turn(20, false);
        world.run(&Step::ServeIndex(3));
    }
    assert!(count_dispatched(&world, &low) < low.len());
    // More jobs of high priority arrive for longer than they may overtake jobs of low priority.
    for _ in 0..300 {
        for _ in 0..5 {
            schedule_with_priority(&mut world, "app", v1::Priority::High);
        }
        world.run(&Step::AdvanceClock(50));
        world.turn(20, false);
        world.run(&Step::ServeIndex(3));
    }
    assert_eq!(count_dispatched(&world, &low), low.len());
    world.settle();
    world.check();
}

#[test]
fn a_backlog_of_one_application_does_not_delay_another() {
    let mut world = World::with(Settings {
        window_jobs: 1000,
        ..settings()
    });
    let burst: Vec<JobId> = (0..100)
        .map(|_| schedule_with_priority(&mut world, "app", v1::Priority::Normal))
        .collect();
    for _ in 0..4 {
        world.turn(20, false);
    }
    let other = schedule_with_priority(&mut world, "other", v1::Priority::Low);
    // It is dispatched as soon as its command is decided.
    while !world.was_dispatched(other) {
        world.turn(20, false);
    }
    assert!(
        count_dispatched(&world, &burst) < 80,
        "{}",
        count_dispatched(&world, &burst)
    );
}

#[test]
fn commands_in_memory_and_turns_are_limited_in_size() {
    let data = Bytes::from(vec![b'x'; 900_000]);
    let mut world = World::with(Settings {
        window_bytes: 64 << 20,
        window_jobs: 1000,
        ..settings()
    });
    for _ in 0..200 {
        let spec = v1::JobSpec {
            data: data.clone(),
            ..spec("app", after(HumanDuration::from_millis(100)))
        };
        world.send_job(spec);
    }
    assert!(world.shard.command_bytes < MAX_COMMAND_BYTES + 2 * data.len());
    assert!(world.fed < 80, "{} were accepted", world.fed);
    for _ in 0..400 {
        world.run(&Step::AdvanceClock(20));
        let before = world.end;
        world.turn(5000, false);
        assert!(world.end - before <= 12, "a turn is too large");
        world.run(&Step::ServeIndex(3));
    }
    world.check();
    assert_eq!((world.shard.command_bytes, world.dispatched.len()), (0, 200));
}

#[test]
fn large_commands_leave_half_of_a_turn_to_due_jobs() {
    let mut world = World::with(Settings {
        window_jobs: 1000,
        window_bytes: 64 << 20,
        ..settings()
    });
    let due = world.send_job(spec("app", after(HumanDuration::from_millis(100))));
    world.turn(5000, false);
    world.run(&Step::AdvanceClock(119));
    for _ in 0..40 {
        world.send_job(v1::JobSpec {
            data: vec![b'x'; 900_000].into(),
            ..spec("app", after(HumanDuration::from_millis(100)))
        });
    }
    world.turn(5000, false);
    assert!(world.was_dispatched(due), "commands filled the turn");
}

#[test]
fn the_delay_of_a_forwarded_request_counts_from_its_first_record() {
    let mut first = World::with(Settings {
        partitions: 2,
        ..settings()
    });
    // Some of these keys belong to the other shard.
    for key in 0..8_u8 {
        let spec = v1::JobSpec {
            idempotency_key: key.to_string(),
            ..spec("app", after(HumanDuration::from_secs(60)))
        };
        first.send_job(spec);
    }
    let written = first.now;
    first.run(&Step::AdvanceClock(30_000));
    let writes = first.shard.finish(first.now, records(100));
    let forwarded: Vec<Output> = writes
        .outputs
        .into_iter()
        .filter(|output| &*output.topic == "ingest")
        .collect();
    assert!(!forwarded.is_empty());
    let mut shard = Shard::new(first.settings.clone(), 1);
    let now = first.now.after(Duration::from_secs(5));
    shard.handle_response(IndexResponse::Ready { end: 0 }, now);
    for (offset, output) in (0..).zip(forwarded) {
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
    let requests = shard.index_requests(now);
    let keys = requests.iter().find_map(|request| match request {
        IndexRequest::LookUp(keys) => Some(keys.len()),
        _ => None,
    });
    let nothing = vec![Found::default(); keys.unwrap()];
    shard.handle_response(IndexResponse::LookedUp(nothing), now);
    let due: HashSet<i64> = shard
        .finish(now, records(100))
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
fn a_burst_that_fills_the_window_does_not_keep_out_new_jobs() {
    let mut world = World::new();
    for _ in 0..100 {
        world.schedule("app", 1000, None);
    }
    world.advance(900);
    let new_job = world.schedule("other", 110, None);
    world.advance(100);
    assert!(!world.was_dispatched(new_job));
    // A turn has room for five jobs, and a hundred are due earlier.
    world.run(&Step::AdvanceClock(10));
    world.turn(10, false);
    assert!(world.was_dispatched(new_job));
}

#[test]
fn a_burst_that_exceeds_the_window_hides_no_jobs_that_were_scheduled_for_other_flows() {
    let mut world = World::new();
    let burst: Vec<JobId> = (0..1_000).map(|_| world.schedule("app", 10_000, None)).collect();
    let due = at(world.now.after(Duration::from_millis(10_300)));
    let others = ["other", "app"].map(|app| {
        world.send_job(v1::JobSpec {
            priority: v1::Priority::High.into(),
            ..spec(app, due)
        })
    });
    // All of them are in the index only.
    world.turn(2_000, false);
    world.restart();
    world.run(&Step::AdvanceClock(9_900));
    for _ in 0..42 {
        world.run(&Step::AdvanceClock(10));
        world.turn(12, false);
        world.run(&Step::ServeIndex(3));
    }
    assert_eq!(count_dispatched(&world, &others), others.len());
    let dispatched = count_dispatched(&world, &burst);
    assert!((1..500).contains(&dispatched), "{dispatched} of the burst");
    world.settle();
    world.check();
}

#[test]
fn large_jobs_of_a_burst_hide_no_jobs_of_other_flows() {
    let mut world = World::with(Settings {
        window_jobs: 50_000,
        window_bytes: 64 << 20,
        ..settings()
    });
    // A scan reads some of them only.
    for _ in 0..100 {
        let spec = v1::JobSpec {
            data: vec![b'x'; 200_000].into(),
            ..spec("app", after(HumanDuration::from_secs(10)))
        };
        world.send_job(spec);
        world.turn(100, false);
        world.run(&Step::ServeIndex(3));
    }
    let other = world.schedule("other", 10_050, None);
    world.turn(100, false);
    world.restart();
    world.run(&Step::AdvanceClock(9_950));
    for _ in 0..12 {
        world.run(&Step::AdvanceClock(10));
        world.turn(2, false);
        world.run(&Step::ServeIndex(1));
    }
    assert!(world.was_dispatched(other));
    world.settle();
    world.check();
}

#[test]
fn jobs_that_are_larger_than_a_share_of_the_window_are_dispatched_and_cause_no_endless_scans() {
    let mut world = World::with(Settings {
        window_jobs: 100,
        window_bytes: 1 << 20,
        ..settings()
    });
    let large = |app| v1::JobSpec {
        data: vec![b'x'; 400_000].into(),
        ..spec(app, after(HumanDuration::from_secs(10)))
    };
    let jobs: Vec<JobId> = ["app", "other", "gone"]
        .into_iter()
        .cycle()
        .take(12)
        .map(|app| {
            let id = world.send_job(large(app));
            world.turn(100, false);
            world.run(&Step::ServeIndex(3));
            id
        })
        .collect();
    world.restart();
    world.run(&Step::AdvanceClock(9_850));
    let mut scans = 0;
    for _ in 0..30 {
        // The clock stands still, and nothing is due yet.
        scans += usize::from(
            world
                .requests
                .iter()
                .any(|request| matches!(request, IndexRequest::Scan(_))),
        );
        world.run(&Step::ServeIndex(3));
        world.turn(100, false);
    }
    assert!((1..10).contains(&scans), "{scans} scans without progress");
    world.advance(400);
    assert_eq!(count_dispatched(&world, &jobs), jobs.len());
    world.check();
}

#[test]
fn new_jobs_that_fill_the_window_do_not_keep_out_earlier_jobs() {
    let mut world = World::new();
    let first = world.schedule("app", 2000, None);
    for _ in 0..200 {
        world.schedule("app", 190, None);
        world.advance(10);
    }
    world.advance(10);
    assert!(world.was_dispatched(first));
}

#[test]
fn a_duplicate_returns_the_first_job_and_a_conflict_is_rejected() {
    let mut world = World::new();
    let request = |data: &'static [u8]| v1::JobSpec {
        idempotency_key: "k".to_owned(),
        data: Bytes::from_static(data),
        ..spec("app", after(HumanDuration::from_secs(60)))
    };
    for data in [b"1", b"1", b"2"] {
        world.send_job(request(data));
    }
    for _ in 0..10 {
        world.serve_index();
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
    // The same if only the index knows the key.
    world.restart();
    world.send_job(request(b"1"));
    for _ in 0..10 {
        world.serve_index();
        world.turn(50, false);
    }
    assert_eq!(world.answers["3"].outcome(), v1::Outcome::Duplicate);
}

const DEBOUNCED: Debounced = Debounced {
    key: 1,
    ahead: 400,
    is_delayed: true,
    is_high: false,
    data: 1,
    request_id: None,
};

fn outcome_of(world: &World, id: JobId) -> (v1::Outcome, v1::Job) {
    let answer = &world.answers[&id.offset().to_string()];
    (answer.outcome(), answer.job.clone().unwrap_or_default())
}

#[test]
fn a_job_moves_with_each_event_and_is_dispatched_once_with_the_newest_data() {
    let mut world = World::new();
    let first = world.replace(&DEBOUNCED);
    world.advance(300);
    // Once in a turn of its own, once together with another one, and once if only the index knows the job.
    let requests = [2, 3, 1, 1, 4].map(|data| Debounced { data, ..DEBOUNCED });
    let mut events = Vec::new();
    for (number, request) in requests.iter().enumerate() {
        events.push(world.replace(request));
        match number {
            1 => {}
            3 => {
                world.advance(300);
                world.restart();
            }
            _ => world.advance(300),
        }
    }
    assert_eq!(world.dispatched, []);
    for (id, revision) in events.iter().zip(2..) {
        let (outcome, job) = outcome_of(&world, *id);
        assert_eq!(
            (outcome, job.id, job.revision),
            (v1::Outcome::Replaced, first.to_string(), revision)
        );
    }
    world.settle();
    let [(id, at)] = &world.dispatched[..] else {
        panic!("{:?}", world.dispatched)
    };
    assert_eq!((*id, world.values[id].as_deref()), (first, Some(&[4][..])));
    assert!(*at >= events[4].requested_at().after(Duration::from_millis(400)));
    world.check();
}

#[test]
fn an_event_after_the_dispatch_gets_a_job_of_its_own_but_a_repetition_does_not() {
    let mut world = World::new();
    let named = |request_id| Debounced {
        request_id: Some(request_id),
        ..DEBOUNCED
    };
    let dated = Debounced {
        key: 2,
        is_delayed: false,
        ..DEBOUNCED
    };
    let jobs = [
        world.replace(&named(1)),
        world.replace(&dated),
        world.schedule("app", 400, Some(3)),
    ];
    let dated_spec = v1::JobCommand::decode(world.ingest[1].value.clone().unwrap()).unwrap();
    world.advance(600);
    assert_eq!(count_dispatched(&world, &jobs), 3);
    for (is_in_index_only, is_evicted) in [(false, false), (true, false), (true, true)] {
        if is_in_index_only {
            world.restart();
        }
        world.has_evicted_ended = is_evicted;
        let repeated = world.replace(&named(1));
        world.send(dated_spec.command.clone().unwrap());
        let dated_again = world.ids[world.ids.len() - 1];
        world.advance(50);
        for (id, job) in [(repeated, jobs[0]), (dated_again, jobs[1])] {
            let (outcome, found) = outcome_of(&world, id);
            assert_eq!((outcome, found.id), (v1::Outcome::Duplicate, job.to_string()));
        }
    }
    world.restart();
    let next = world.replace(&named(2));
    world.advance(50);
    assert_eq!(outcome_of(&world, next).0, v1::Outcome::Scheduled);
    world.settle();
    assert_eq!(count_dispatched(&world, &[next]), 1);
    world.check();
}

#[test]
fn a_request_with_another_priority_supersedes_the_job() {
    let mut world = World::new();
    let first = world.replace(&DEBOUNCED);
    world.advance(50);
    world.restart();
    let urgent = world.replace(&Debounced {
        is_high: true,
        ..DEBOUNCED
    });
    world.advance(50);
    let (outcome, job) = outcome_of(&world, urgent);
    assert_eq!((outcome, job.id), (v1::Outcome::Replaced, urgent.to_string()));
    world.settle();
    assert_eq!(
        world.dispatched.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
        [urgent]
    );
    assert_eq!(world.state[&first].state, JobState::Cancelled);
    world.check();
}

#[test]
fn a_replacement_is_rejected_only_if_it_needs_memory_that_the_index_does_not_have() {
    let mut world = World::new();
    let request = |data: usize| v1::JobSpec {
        idempotency_key: "k".to_owned(),
        on_conflict: v1::ConflictPolicy::Replace.into(),
        data: vec![b'x'; data].into(),
        ..spec("app", after(HumanDuration::from_secs(60)))
    };
    world.send_job(request(10));
    world.advance(50);
    world.shard.set_memory_pressure(MemoryPressure::Full);
    let [same, larger] = [10, 11].map(|data| world.send_job(request(data)));
    world.advance(50);
    assert_eq!(outcome_of(&world, same).0, v1::Outcome::Replaced);
    assert_eq!(outcome_of(&world, larger).0, v1::Outcome::Rejected);
    assert_eq!(world.answers["2"].code, INDEX_FULL);
}

#[test]
fn a_job_is_cancelled_and_rescheduled_by_its_key() {
    let mut world = World::new();
    let job = world.schedule("app", 60_000, Some(1));
    world.run(&Step::RescheduleKey(1, 30_000));
    world.run(&Step::RescheduleKey(2, 30_000));
    world.advance(50);
    world.restart();
    for key in [1, 1, 2] {
        world.run(&Step::CancelKey(key));
    }
    world.advance(50);
    let outcomes: Vec<v1::Outcome> = (1..6)
        .map(|offset: i64| world.answers[&offset.to_string()].outcome())
        .collect();
    assert_eq!(
        outcomes,
        [
            v1::Outcome::Rescheduled,
            v1::Outcome::Unknown,
            v1::Outcome::Cancelled,
            v1::Outcome::AlreadyCancelled,
            v1::Outcome::Unknown
        ]
    );
    assert_eq!(world.state[&job].state, JobState::Cancelled);
    // The key names a job only as long as it is in use.
    world.schedule("app", 60_000, Some(3));
    world.advance(50);
    let window = world.settings.retention.keys;
    world.now = world.now.after(window);
    world.run(&Step::CancelKey(3));
    world.advance(50);
    assert_eq!(world.answers["7"].outcome(), v1::Outcome::Unknown);
}

#[test]
fn a_command_by_key_never_says_that_an_evicted_job_is_unknown() {
    let mut world = World::new();
    let ended = world.schedule("app", 10, Some(1));
    let waits = world.schedule("app", 60_000, Some(2));
    world.advance(600);
    world.restart();
    world.has_evicted_ended = true;
    for step in [
        Step::CancelKey(1),
        Step::RescheduleKey(1, 30_000),
        Step::CancelKey(2),
        Step::CancelKey(3),
    ] {
        world.run(&step);
    }
    world.advance(50);
    let answers = ["2", "3", "4", "5"].map(|offset| &world.answers[offset]);
    assert_eq!(
        answers.map(v1::CommandOutcome::outcome),
        [
            v1::Outcome::Ended,
            v1::Outcome::Ended,
            v1::Outcome::Cancelled,
            v1::Outcome::Unknown
        ]
    );
    let shown = answers.map(|answer| answer.job.as_ref().map(|job| (job.id.clone(), job.app.clone())));
    let shown_of = |id: JobId| Some((id.to_string(), "app".to_owned()));
    assert_eq!(shown, [shown_of(ended), shown_of(ended), shown_of(waits), None]);
}

#[test]
fn an_expired_job_is_not_dispatched() {
    let mut world = World::new();
    let spec = v1::JobSpec {
        expire_after: Some(to_duration(HumanDuration::from_secs(5))),
        ..spec("app", after(HumanDuration::from_secs(1)))
    };
    world.send_job(spec);
    world.turn(50, false);
    world.run(&Step::AdvanceClock(6_500));
    world.settle();
    assert_eq!(world.dispatched, []);
    assert_eq!(
        world.state.values().map(|job| job.state).collect::<Vec<_>>(),
        [JobState::Expired]
    );
}

#[test]
fn a_rejected_long_wait_becomes_a_dead_letter_of_its_pipeline() {
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
    world.send(ProtoCommand::LongWait(v1::LongWait {
        pipeline: "docs".to_owned(),
        due: Some(to_timestamp(far)),
        key: Some(Bytes::from_static(b"key")),
        value: Some(Bytes::from_static(b"document")),
        headers: to_headers(&lineage),
    }));
    world.turn(50, false);
    assert_eq!(world.answers["0"].outcome(), v1::Outcome::Rejected);
    let [dead] = &world.dead_long_waits[..] else {
        panic!("{:?}", world.dead_long_waits)
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
fn a_long_wait_cannot_be_cancelled_or_rescheduled() {
    let mut world = World::new();
    let due = world.now.after(Duration::from_secs(2));
    world.send(ProtoCommand::LongWait(v1::LongWait {
        pipeline: "docs".to_owned(),
        due: Some(to_timestamp(due)),
        value: Some(Bytes::from_static(b"document")),
        ..v1::LongWait::default()
    }));
    world.turn(50, false);
    world.run(&Step::Cancel(0));
    world.run(&Step::Reschedule(0, 1));
    world.settle();
    let outcomes = ["1", "2"].map(|offset| world.answers[offset].outcome());
    assert_eq!(outcomes, [v1::Outcome::Unknown; 2]);
    let [(value, at)] = &world.returned_waits[..] else {
        panic!("{:?}", world.returned_waits)
    };
    assert_eq!(value.as_deref(), Some(&b"document"[..]));
    assert!(*at >= due, "{at} is before {due}");
}

#[test]
fn a_long_wait_ends_in_the_named_topic_if_it_belongs_to_its_pipeline() {
    let mut world = World::new();
    // The topic that was configured when the wait began does not matter, even if it is missing.
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
            // The return topic when the wait began.
            topic: GONE.into(),
            payload: payload(named),
            id: JobId::new(Timestamp::from_millis(START), 0, 0),
            state: JobState::Scheduled,
            priority: Priority::Normal,
            due: Timestamp::from_millis(START),
            accepted: Timestamp::from_millis(START),
            revision: 1,
            idempotency_key: None,
            request_hash: [0; 16],
            request_id: None,
            ended: None,
            expires: None,
            occurrence: None,
            released: None,
        };
        world.shard.window.insert(Arc::new(job));
        let writes = world.shard.finish(world.now, records(10));
        let output = writes.outputs.first().unwrap_or_else(|| panic!("{named}"));
        assert_eq!(&*output.topic, expected, "{named}");
        assert_eq!(
            output.headers.last(headers::RETURN_TOPIC),
            Some(expected.as_bytes())
        );
    }
}

#[test]
fn a_refused_record_becomes_a_dead_letter_of_its_owner() {
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

    // The topic of a job: its id contains the position of the request.
    let mut headers = Headers::new();
    headers.push_text("tenant", "a");
    let id = JobId::new(now, 3, 44);
    headers.push_text(headers::JOB_ID, &id.to_string());
    let mut letter = output(APP, headers);
    let replace = |output: &mut Output| refused::replace(&settings, output, &failure, now);
    assert_eq!(replace(&mut letter), Replacement::OfJob(id));
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
    // A refused dead letter is stripped of its value.
    assert_eq!(replace(&mut letter), Replacement::DeadLetter);
    assert_eq!((&*letter.topic, &letter.value), ("dlq", &None));

    // The return topic of a long wait.
    let origin = Origin {
        topic: "docs".into(),
        partition: 1,
        offset: 7,
        timestamp: None,
    };
    let mut lineage = Headers::new();
    headers::write_lineage(&mut lineage, "docs", &origin, 2);
    // A header of a user.
    lineage.push_text(headers::JOB_ID, &id.to_string());
    let mut letter = output(RETURN_TOPIC, lineage);
    assert_eq!(replace(&mut letter), Replacement::DeadLetter);
    assert_eq!(
        (&*letter.topic, letter.value.as_deref()),
        ("docs-dlq", Some(&b"v"[..]))
    );
    assert_eq!(text(&letter, headers::ORIGINAL_OFFSET).as_deref(), Some("7"));
    assert_eq!(text(&letter, headers::RETRY_COUNT).as_deref(), Some("2"));
    assert_eq!(replace(&mut letter), Replacement::DeadLetter);
    assert_eq!((&*letter.topic, &letter.value), ("docs-dlq", &None));

    // A state record cannot be replaced.
    let mut state = output("state", Headers::new());
    assert_eq!(replace(&mut state), Replacement::Nothing);
}

#[test]
fn results_of_lookups_are_limited_in_size() {
    const LARGE: usize = 1 << 20;
    let now = Timestamp::from_millis(START);
    let mut shard = Shard::new(Arc::new(settings()), 0);
    shard.handle_response(IndexResponse::Ready { end: 0 }, now);
    for offset in 0..100 {
        let request = format!(r#"{{"cancel":"{}"}}"#, JobId::new(now, 0, offset));
        let record = Record {
            position: Position {
                topic: "ingest".into(),
                partition: 0,
                offset,
            },
            timestamp: Some(now),
            key: None,
            value: Some(request.into()),
            headers: Headers::new(),
            unreadable_headers: 0,
        };
        shard.accept(record, now);
    }
    let lookups = |shard: &mut Shard| {
        let requests = shard.index_requests(now);
        requests.iter().find_map(|request| match request {
            IndexRequest::LookUp(keys) => Some(keys.len()),
            _ => None,
        })
    };
    let large = v1::JobRecord {
        state: v1::JobState::Dispatched.into(),
        request_hash: vec![0; 16].into(),
        data: Some(vec![0; LARGE].into()),
        ..v1::JobRecord::default()
    };
    let large = codec::decode(JobId::new(now, 0, 0), &large.encode_to_vec().into()).unwrap();
    let large = Arc::new(large);
    let mut decided = 0;
    while decided < 100 {
        let before = shard.memory();
        let count = lookups(&mut shard).unwrap();
        assert!(count * LARGE <= 16 * LARGE, "{count} jobs in one lookup");
        let large = Found {
            key: None,
            job: Some(large.clone()),
        };
        let size = large.size();
        assert!(size >= LARGE);
        shard.handle_response(IndexResponse::LookedUp(vec![large; count]), now);
        assert_eq!(shard.memory(), before + count * size);
        // The next lookup waits until these commands are decided.
        assert_eq!(lookups(&mut shard), None);
        let room = Room {
            records: 1_000,
            bytes: 1 << 20,
        };
        decided += shard.finish(now, room).completed.len();
    }
    assert_eq!(shard.memory(), 0);
}
