//! Tests of a shard with a model of Kafka and the index, with aborted turns, late responses, and restarts at any time.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Mutex;

use bytes::Bytes;
use proptest::prelude::*;
use redeliver_core::headers::Origin;
use redeliver_core::{Failure, Headers, HumanDuration, Output, Position, headers};
use redeliver_kafka::{AssignmentId, Refused, TransactionBatch, Unwritable};
use redeliver_proto::convert::{from_timestamp, to_duration, to_headers, to_timestamp};
use redeliver_proto::{Message as _, v1};
use v1::job_command::Command as ProtoCommand;

use super::dispatch::TOPIC_MISSING;
use super::*;
use crate::admission::RejectedForNow;
use crate::codec::{self, KeyValue, RetentionPolicy};
use crate::controls::LiveAppStates;
use crate::index::{Batch, Effect, FinishedRelease, FlowPosition, FlowScan, Row, Scan, ScanRequest};
use crate::job::{JobState, Payload};
use crate::lookups;
use crate::rate::Buckets;
use crate::refused::{self, Replacement};
use crate::request::{Rules, key_hash};
use crate::topics::{Presence, TopicState, Topics};
use crate::turns::Turns;
use crate::{schedule_key, schedules};

mod acted_waits;
mod applications;
mod full_index;
mod full_window;
mod keys;
mod limits;
mod lost_records;
mod pipelines;
mod recurring;
mod released_waits;
mod waiting;

const TIMEOUT: Duration = Duration::from_secs(2);
const START: i64 = 1_763_722_800_000;
const APP: &str = "jobs";
const INDEX_FULL: &str = RejectedForNow::IndexFull.code();
const QUOTA_EXCEEDED: &str = RejectedForNow::QuotaExceeded.code();
/// The code of a dead letter of a job that its topic has refused.
const TOO_LARGE: &str = "output.too-large";
const RETURN_TOPIC: &str = "docs-retry-due";
/// Of a pipeline that is not configured.
const OTHER_RETURN_TOPIC: &str = "mail-retry-due";
/// The topic of the application `gone`, which is deleted and created again.
const GONE: &str = "gone-jobs";
/// The assignment of the partition of a shard under test.
const ASSIGNMENT: AssignmentId = AssignmentId::for_tests(0, 1);
/// The id of the ingest topic.
fn ingest_id() -> TopicId {
    TopicId::from_bits(7)
}

/// The presence of some topics; all others exist.
#[derive(Clone, Default)]
struct FakeTopics(Arc<Mutex<HashMap<String, Presence>>>);

impl FakeTopics {
    fn of(&self, topic: &str) -> Presence {
        let known = self.0.lock().unwrap().get(topic).copied();
        known.unwrap_or(Presence::Exists)
    }

    fn set_of(&self, topic: &str, presence: Presence) {
        self.0.lock().unwrap().insert(topic.to_owned(), presence);
    }

    /// The presence of [`GONE`].
    fn get(&self) -> Presence {
        self.of(GONE)
    }

    fn set(&self, presence: Presence) {
        self.set_of(GONE, presence);
    }
}

impl Topics for FakeTopics {
    fn presence(&self, topic: &Arc<str>) -> Presence {
        self.of(topic)
    }

    fn state(&self, _topic: &str) -> TopicState {
        TopicState::Unknown
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
            max_request_age: HumanDuration::from_secs(86_400 * 7),
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
        index_batch_bytes: 4 << 20,
        topics: Arc::new(FakeTopics::default()),
        missing_topic_timeout: TIMEOUT,
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
    /// The wall clock steps by so many seconds, and is trusted again.
    JumpClock(i64),
    Turn {
        limit: usize,
        is_lost: bool,
    },
    /// A turn whose dispatched jobs are refused by their topic, all but so many of them.
    RefusedTurn {
        limit: usize,
        accepted: usize,
    },
    ServeIndex(u8),
    /// The state topic contains an unsupported record for a while.
    Halt,
    /// From here on, a scan reads at most so many jobs, as if the next ones were large.
    LimitScans(usize),
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

/// So that the index gets a turn as a whole, or in parts of one or a few changes.
fn index_batch_bytes() -> impl Strategy<Value = usize> {
    prop_oneof![Just(4 << 20), 1_usize..1_000]
}

/// In seconds.
const TWO_HOURS: i64 = 7_200;

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => replacement().prop_map(Step::Replace),
        1 => (0_u8..4).prop_map(Step::CancelKey),
        1 => (0_u8..4, 0_u16..600).prop_map(|(key, ahead)| Step::RescheduleKey(key, ahead)),
        4 => (0_u16..600, proptest::option::of(0_u8..4)).prop_map(|(ahead, key)| Step::Schedule { ahead, key }),
        1 => (0_usize..30).prop_map(Step::Cancel),
        1 => (0_usize..30, 0_u16..600).prop_map(|(job, ahead)| Step::Reschedule(job, ahead)),
        4 => (0_u16..120).prop_map(Step::AdvanceClock),
        1 => (-TWO_HOURS..=TWO_HOURS).prop_map(Step::JumpClock),
        6 => (1_usize..20, prop::bool::weighted(0.15)).prop_map(|(limit, is_lost)| Step::Turn { limit, is_lost }),
        1 => (1_usize..20, 0_usize..3).prop_map(|(limit, accepted)| Step::RefusedTurn { limit, accepted }),
        6 => (1_u8..5).prop_map(Step::ServeIndex),
        1 => Just(Step::Halt),
        1 => prop_oneof![1_usize..4, Just(usize::MAX)].prop_map(Step::LimitScans),
        1 => any::<bool>().prop_map(Step::SetIndexFull),
        2 => prop::sample::select(vec![
            Presence::Exists,
            Presence::Unknown,
            Presence::Missing { lasting: Duration::ZERO },
            Presence::Missing { lasting: Duration::from_secs(60) },
            Presence::Unwritable { reason: Unwritable::Denied, lasting: Duration::from_secs(600) },
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
    /// The latest time before the clock has stepped.
    latest: Timestamp,
    has_stepped: bool,
    topics: FakeTopics,
    /// Offsets of the requests of jobs that became dead letters, with the time, because their topic was missing, and because it refused them.
    dead_letters: Vec<(u64, Timestamp)>,
    refused: Vec<(u64, Timestamp)>,
    settings: Arc<Settings>,
    /// Which applications are paused or limited.
    apps: Arc<AppStates>,
    shard: Shard,
    turns: Turns,
    ingest: Vec<Record>,
    completed: HashSet<i64>,
    /// The number of records of the ingest topic that this shard has read.
    fed: usize,
    /// How many more records it reads.
    may_feed: usize,
    state: BTreeMap<JobId, Job>,
    /// Forgotten jobs in their last state.
    forgotten: BTreeMap<JobId, Job>,
    end: i64,
    /// Whether the state topic ends with the marker of a transaction, at `end`.
    has_marker: bool,
    /// The records of the state topic, each with the offset after it.
    log: Vec<(i64, JobId, Option<Job>)>,
    /// The latest end that the state topic had before it lost records.
    lost_end: i64,
    /// What the broker reports instead of the end at the next commit.
    reported_end: Option<i64>,
    /// How often a shard was replaced because of the end of the state topic.
    refused_ends: usize,
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
    /// The answers that name a job although newer ones had its key, see [`World::outlasts_newer_uses`].
    older_uses: HashSet<String>,
    index: BTreeMap<JobId, (Job, Bytes)>,
    applied: i64,
    requests: VecDeque<IndexRequest>,
    is_halted: bool,
    is_full: bool,
    /// How many jobs a scan reads at most.
    max_scanned: usize,
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
            refused: Vec::new(),
            now: Timestamp::from_millis(START),
            latest: Timestamp::from_millis(START),
            has_stepped: false,
            shard: Shard::new(settings.clone(), 0),
            turns: Turns::default(),
            apps: settings.app_states.current(),
            settings,
            ingest: Vec::new(),
            completed: HashSet::new(),
            fed: 0,
            may_feed: usize::MAX,
            state: BTreeMap::new(),
            forgotten: BTreeMap::new(),
            end: 0,
            has_marker: false,
            log: Vec::new(),
            lost_end: 0,
            reported_end: None,
            refused_ends: 0,
            turn_ends: HashSet::new(),
            dispatched: Vec::new(),
            occurrences: Vec::new(),
            values: HashMap::new(),
            returned_waits: Vec::new(),
            dead_long_waits: Vec::new(),
            answers: HashMap::new(),
            older_uses: HashSet::new(),
            index: BTreeMap::new(),
            applied: 0,
            requests: VecDeque::new(),
            is_halted: false,
            is_full: false,
            max_scanned: usize::MAX,
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
            if !self.completed.contains(&offset) {
                self.shard.accept(record, self.now);
            }
        }
        self.requests.extend(self.shard.index_requests(self.now));
    }

    /// A new owner takes over: it acts only once the index is up to date.
    fn restart(&mut self) {
        self.shard = Shard::new(self.settings.clone(), 0);
        self.shard.set_app_states(self.apps.clone());
        self.shard.set_topic(Some(ingest_id()));
        let undecided = (0..).find(|offset| !self.completed.contains(offset));
        self.shard.start_at(undecided.unwrap());
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
        let batch = self.collect(limit);
        if is_lost {
            return self.restart();
        }
        self.commit(batch);
    }

    /// Collects what the shard writes in one transaction, as a lane does.
    fn collect(&mut self, limit: usize) -> TransactionBatch {
        let mut batch = TransactionBatch::default();
        self.turns.clear();
        self.turns
            .collect(&mut [(ASSIGNMENT, &mut self.shard)], self.now, limit, &mut batch);
        batch
    }

    /// The topics of jobs refuse the records of a turn, all but some.
    fn refused_turn(&mut self, limit: usize, accepted: usize) {
        let mut batch = self.collect(limit);
        let outputs = batch.outputs.iter().enumerate();
        let jobs = outputs.filter(|(_, output)| [APP, GONE].contains(&&*output.topic));
        let refused: Vec<Refused> = jobs
            .map(|(index, _)| Refused {
                index,
                failure: Failure::permanent(TOO_LARGE, "no"),
            })
            .skip(accepted)
            .collect();
        let shards = &mut [(ASSIGNMENT, &mut self.shard)];
        let are_replaced = self
            .turns
            .refused(shards, &self.settings, &refused, &mut batch, self.now);
        assert!(are_replaced, "jobs can be replaced");
        self.commit(batch);
    }

    fn commit(&mut self, batch: TransactionBatch) {
        let is_idle = batch.outputs.is_empty() && batch.completed.is_empty();
        assert!(is_idle || !self.is_halted, "a halted shard wrote something");
        let mut wrote = false;
        for output in batch.outputs {
            match &*output.topic {
                APP | GONE => {
                    assert!(
                        &*output.topic != GONE || self.topics.get() == Presence::Exists,
                        "written to an unavailable topic"
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
                RETURN_TOPIC | OTHER_RETURN_TOPIC => self.returned_waits.push((output.value, self.now)),
                "state" => {
                    // The marker of the previous transaction precedes the first record.
                    self.end += 1 + i64::from(!wrote && self.has_marker);
                    wrote = true;
                    let key = std::str::from_utf8(output.key.as_deref().unwrap()).unwrap();
                    let id = match schedule_key::id_of_key(key) {
                        Some(schedule) => schedules::entry_id(schedule.as_str(), 0),
                        None => key.parse().unwrap(),
                    };
                    let job = output.value.map(|value| codec::decode(id, &value).unwrap());
                    self.log.push((self.end, id, job.clone()));
                    match job {
                        Some(job) => drop(self.state.insert(id, job)),
                        None if id.is_schedule() => drop(self.state.remove(&id).expect("a known schedule")),
                        None => {
                            let job = self.state.remove(&id).expect("a known job");
                            let retention = self.settings.retention;
                            let ended = job.ended.expect("an ended job");
                            let is_left_out = self.shard.is_full() && job.idempotency_key.is_none();
                            assert!(
                                is_left_out || retention.forget(&job, ended) <= self.now.max(self.latest),
                                "forgotten too soon: {job:?}"
                            );
                            self.forgotten.insert(id, job);
                        }
                    }
                }
                "answers" => {
                    let to = String::from_utf8(output.key.unwrap().to_vec()).unwrap();
                    let outcome = v1::CommandOutcome::decode(output.value.unwrap()).unwrap();
                    if outcome
                        .job
                        .as_ref()
                        .is_some_and(|job| self.outlasts_newer_uses(job))
                    {
                        self.older_uses.insert(to.clone());
                    }
                    assert!(self.answers.insert(to, outcome).is_none(), "answered twice");
                }
                "dlq" => {
                    let code = output.headers.last(headers::ERROR_CODE).unwrap();
                    let is_missing = code == TOPIC_MISSING.as_bytes();
                    // The jobs of schedules have no request.
                    if let Some(offset) = output.headers.last(headers::ORIGINAL_OFFSET)
                        && (is_missing || code == TOO_LARGE.as_bytes())
                    {
                        let offset = std::str::from_utf8(offset).unwrap().parse().unwrap();
                        if is_missing {
                            assert!(matches!(self.topics.get(), Presence::Missing { .. }));
                            self.dead_letters.push((offset, self.now));
                        } else {
                            self.refused.push((offset, self.now));
                        }
                    }
                }
                topic @ ("docs-dlq" | "mail-dlq") => {
                    assert_eq!(self.topics.of(topic), Presence::Exists);
                    self.dead_long_waits.push(output);
                }
                other => panic!("unexpected output topic {other}"),
            }
        }
        for (_, offset) in batch.completed {
            assert!(self.completed.insert(offset), "completed twice");
        }
        let mut written = Ok(());
        if wrote {
            self.turn_ends.insert(self.end);
            self.has_marker = true;
            let end = std::mem::take(&mut self.reported_end).unwrap_or(self.end);
            let shards = [(ASSIGNMENT, &mut self.shard)];
            written = self.turns.changelog_written(&shards, 0, end);
        }
        self.turns.committed(&mut [(ASSIGNMENT, &mut self.shard)]);
        if written.is_err() {
            // The lane begins a new session.
            self.refused_ends += 1;
            return self.restart();
        }
        self.feed();
    }

    /// Whether newer jobs have used the key of this job, and all of them are forgotten, so that its own use of the key counts again.
    fn outlasts_newer_uses(&self, job: &v1::Job) -> bool {
        let id: JobId = job.id.parse().unwrap();
        let Some(key) = self.state.get(&id).and_then(|job| job.idempotency_key.as_ref()) else {
            return false;
        };
        let is_newer =
            |other: &Job| other.idempotency_key.as_ref() == Some(key) && other.id.offset() > id.offset();
        self.has_stepped && self.forgotten.values().any(is_newer) && !self.state.values().any(is_newer)
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
                let is_renewal = batch == Batch::renewal(batch.to);
                let is_done = batch.to <= self.applied && !(self.is_full && is_renewal);
                if is_done || (self.is_full && !forced) {
                    let answer = match is_done {
                        true => IndexResponse::Applied { turn, forced },
                        false => IndexResponse::Full { turn, batch },
                    };
                    self.shard.handle_response(answer, self.now);
                    return self.requests.extend(self.shard.index_requests(self.now));
                }
                assert!(
                    batch.from <= batch.to && batch.to <= self.end.max(self.lost_end),
                    "a batch beyond the end of the state topic"
                );
                let last_record = batch.last_record.map(|last_record| last_record.offset + 1);
                // A batch can also contain a turn and the first part of the next one.
                let is_right = match self.turn_ends.contains(&batch.to) {
                    true => last_record == Some(batch.to),
                    false => last_record.is_none_or(|end| self.turn_ends.contains(&end)),
                };
                assert!(
                    is_right || self.lost_end > 0,
                    "not the digest of the last record of a turn: {last_record:?}"
                );
                let bytes: usize = batch.changes.iter().map(Change::size).sum();
                assert!(
                    bytes <= self.settings.index_batch_bytes || batch.changes.len() == 1,
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
                    // By the order of their requests: the clock may have stepped.
                    let request = |id| self.ids.iter().position(|requested| *requested == id);
                    let newest = users.max_by_key(|(job, _)| request(job.id));
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
        let (mut room, mut bytes) = (request.jobs.min(self.max_scanned), 0);
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
            idempotency_key: Some(replacement.key.to_string()),
            request_id: replacement.request_id.map(|id| id.to_string()),
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
            idempotency_key: key.map(|key| key.to_string()),
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
        self.check_look_ahead();
    }

    /// Asserts that the look-ahead skips no job: each waiting one is in the window, or still to be read.
    fn check_look_ahead(&self) {
        if self.lost_end > 0 {
            // What the state topic has lost is in the window only after the next commit.
            return;
        }
        let waiting = self.state.values().filter(|job| job.state == JobState::Scheduled);
        for job in waiting {
            let is_to_be_read = !self.shard.look_ahead.has_passed(&Flow::of(job), Cursor::of(job));
            let in_window = self.shard.window.get(job.id);
            assert!(
                is_to_be_read || in_window.is_some_and(|kept| kept.due == job.due),
                "skipped: {job:?}"
            );
        }
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
            Step::JumpClock(seconds) => {
                (self.latest, self.has_stepped) = (self.latest.max(self.now), true);
                self.now = Timestamp::from_millis(self.now.as_millis() + seconds * 1_000);
            }
            Step::Turn { limit, is_lost } => self.turn(limit, is_lost),
            Step::RefusedTurn { limit, accepted } => self.refused_turn(limit, accepted),
            Step::ServeIndex(count) => (0..count).for_each(|_| self.serve_index()),
            Step::LimitScans(jobs) => self.max_scanned = jobs,
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
        self.max_scanned = usize::MAX;
        self.topics.set(Presence::Exists);
        self.set_apps(AppStates::default());
        // Whatever was due at any time is due.
        self.now = self.now.max(self.latest);
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

    /// Asserts the invariants after [`World::settle`].
    fn check(&self) {
        assert_eq!(self.completed.len(), self.ingest.len(), "undecided commands");
        let dead: HashMap<u64, Timestamp> = self.dead_letters.iter().copied().collect();
        let refused: HashMap<u64, Timestamp> = self.refused.iter().copied().collect();
        assert!(
            dead.len() == self.dead_letters.len() && refused.len() == self.refused.len(),
            "two dead letters for one job"
        );
        let mut times: HashMap<JobId, Vec<Timestamp>> = HashMap::new();
        for (id, at) in &self.dispatched {
            times.entry(*id).or_default().push(*at);
        }
        for (offset, record) in self.ingest.iter().enumerate() {
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
                            let (dead, refused) = (dead.get(&id.offset()), refused.get(&id.offset()));
                            assert!(dead.is_some() != refused.is_some(), "{job:?}");
                            let is_missed = dead.is_none_or(|at| *at >= job.due.after(TIMEOUT));
                            assert!(is_missed, "dead letter too soon: {job:?}");
                            assert!(refused.is_none_or(|at| *at >= job.due), "early: {job:?}");
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
        for (offset, record) in self.ingest.iter().enumerate() {
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
                // Or, of the same turn, refused by its topic after this was answered.
                v1::Outcome::AlreadyDispatched if state == Some(JobState::Expired) => {
                    assert!(job.is_some_and(|job| refused.contains_key(&job.id.offset())));
                    None
                }
                v1::Outcome::AlreadyDispatched => Some(JobState::Dispatched),
                v1::Outcome::Unknown => None,
                // The clock was set back after the job was forgotten, so its key is in use again.
                v1::Outcome::Ended => {
                    assert!(self.has_stepped && state != Some(JobState::Scheduled));
                    None
                }
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
        for (offset, record) in self.ingest.iter().enumerate() {
            let command = v1::JobCommand::decode(record.value.clone().unwrap()).unwrap();
            let outcome = &self.answers[&offset.to_string()];
            let job = outcome.job.as_ref();
            let mut spec = match command.command {
                Some(ProtoCommand::Schedule(spec)) if spec.idempotency_key.is_some() => spec,
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
            let id: JobId = job.id.parse().unwrap();
            // A job gives its key up to the next one, but a step of the clock backwards can open the windows of still older uses again, or of all uses. Once the newer
            // jobs are forgotten, nothing in the state topic tells of them. Then the key is in use until the window ends by the new time, as if it had been used once.
            let is_older = self.older_uses.contains(&offset.to_string());
            let older = newest.get(&id).filter(|_| is_older);
            let before = older.or_else(|| uses.get(spec.idempotency_key()));
            let used = KeyUse {
                id,
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
                    // A step of the clock may have ended a short window in between.
                    let keys = self.settings.retention.keys;
                    let is_certain = !self.has_stepped || keys.as_secs() > TWO_HOURS.unsigned_abs();
                    if is_certain && before.accepted.after(keys) > used.accepted {
                        assert!(replaces && !before.is_repeated_by(&used), "two jobs: {outcome:?}");
                        let ended = self.job(before.id).unwrap().ended.unwrap();
                        // Times of different clocks cannot be compared.
                        assert!(
                            ended <= used.accepted || self.has_stepped,
                            "two jobs at a time: {outcome:?}"
                        );
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
            uses.insert(used.spec.idempotency_key().to_owned(), used);
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
            request_id: None,
            on_conflict: 0,
            ..spec.clone()
        };
        content(&self.spec) == content(&other.spec)
    }

    fn is_repeated_by(&self, other: &Self) -> bool {
        let is_named = other.spec.request_id.is_some();
        let is_absolute = matches!(other.spec.when, Some(v1::job_spec::When::ScheduledTime(_)));
        self.has_content_of(other)
            && self.spec.request_id == other.spec.request_id
            && (is_named || is_absolute)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn jobs_are_dispatched_once_never_early(
        steps in proptest::collection::vec(step(), 0..120),
        rate in proptest::option::of(30.0..200.0),
        index_batch_bytes in index_batch_bytes(),
        window_jobs in 1_usize..=8,
    ) {
        let app_states = LiveAppStates::fixed(limited(rate));
        let mut world = World::with(Settings { app_states, index_batch_bytes, window_jobs, ..settings() });
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
    fn jobs_are_forgotten_after_retention(
        steps in proptest::collection::vec(step(), 0..120),
        index_batch_bytes in index_batch_bytes(),
    ) {
        let retention = RetentionPolicy { keys: Duration::from_millis(300), ended: Duration::from_millis(200) };
        let mut world = World::with(Settings { retention, index_batch_bytes, ..settings() });
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

fn count_dispatched(world: &World, jobs: &[JobId]) -> usize {
    jobs.iter().filter(|id| world.was_dispatched(**id)).count()
}

const DEBOUNCED: Debounced = Debounced {
    key: 1,
    ahead: 400,
    is_delayed: true,
    is_high: false,
    data: 1,
    request_id: None,
};
