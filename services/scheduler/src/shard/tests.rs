//! A shard against a model of Kafka and of the index, with turns that are lost, answers that come late, and
//! restarts at any moment.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use proptest::prelude::*;
use redeliver_core::{Position, Span};

use super::*;
use crate::index::Row;

const START: i64 = 1_763_722_800_000;
const APP: &str = "jobs";
const RETURN: &str = "docs-retry-due";

fn settings() -> Arc<Settings> {
    let hour = Duration::from_secs(3600);
    Arc::new(Settings {
        rules: Rules {
            apps: ["app", "other"]
                .map(|app| (app.to_owned(), Arc::from(APP)))
                .into(),
            pipelines: [("docs".to_owned(), Arc::from(RETURN))].into(),
            time_zone: jiff::tz::TimeZone::UTC,
            max_ahead: Span::from_secs(86_400 * 365),
            max_data: 1 << 20,
        },
        ingest: "ingest".into(),
        state: "state".into(),
        dead_letters: "dlq".into(),
        answers: "answers".into(),
        partitions: 1,
        memory: Memory {
            keys: 24 * hour,
            ended: 24 * hour,
        },
        window: Duration::from_millis(200),
        window_jobs: 8,
        window_bytes: 1 << 20,
        spans: Spans::default(),
    })
}

#[test]
fn an_empty_window_of_any_size_looks_ahead() {
    for (window_jobs, window_bytes) in [
        (8, 1 << 20),
        (100, 1 << 20),
        (50_000, 64 << 20),
        (10_000_000, 1 << 36),
    ] {
        let settings = Arc::into_inner(settings()).map(|settings| Settings {
            window_jobs,
            window_bytes,
            ..settings
        });
        let mut shard = Shard::new(Arc::new(settings.unwrap()), 0);
        let now = Timestamp::from_millis(START);
        shard.answer(Answer::Ready { end: 0 }, now);
        let looks = shard.asks(now).iter().any(|ask| matches!(ask, Ask::Ahead { .. }));
        assert!(looks, "{window_jobs} jobs, {window_bytes} bytes");
    }
}

/// What a user does, and what happens to us.
#[derive(Clone, Debug)]
enum Step {
    Schedule { ahead: u16, key: Option<u8> },
    Cancel(usize),
    Reschedule(usize, u16),
    Pass(u16),
    Turn { limit: usize, is_lost: bool },
    Index(u8),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_u16..600, proptest::option::of(0_u8..4)).prop_map(|(ahead, key)| Step::Schedule { ahead, key }),
        1 => (0_usize..30).prop_map(Step::Cancel),
        1 => (0_usize..30, 0_u16..600).prop_map(|(job, ahead)| Step::Reschedule(job, ahead)),
        4 => (0_u16..120).prop_map(Step::Pass),
        6 => (1_usize..20, prop::bool::weighted(0.15)).prop_map(|(limit, is_lost)| Step::Turn { limit, is_lost }),
        6 => (1_u8..5).prop_map(Step::Index),
        1 => Just(Step::Restart),
    ]
}

/// The topics as they are committed, the index, and the shard under test.
struct World {
    now: Timestamp,
    shard: Shard,
    ingest: Vec<Record>,
    done: HashSet<i64>,
    /// Records of the ingest topic that this shard was given.
    given: usize,
    state: BTreeMap<JobId, Job>,
    end: i64,
    dispatched: Vec<(JobId, Timestamp)>,
    /// Long waits that are over.
    returned: Vec<(Option<Bytes>, Timestamp)>,
    answers: HashMap<String, v1::CommandOutcome>,
    index: BTreeMap<JobId, (Job, Bytes)>,
    applied: i64,
    asks: VecDeque<Ask>,
    ids: Vec<JobId>,
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            now: Timestamp::from_millis(START),
            shard: Shard::new(settings(), 0),
            ingest: Vec::new(),
            done: HashSet::new(),
            given: 0,
            state: BTreeMap::new(),
            end: 0,
            dispatched: Vec::new(),
            returned: Vec::new(),
            answers: HashMap::new(),
            index: BTreeMap::new(),
            applied: 0,
            asks: VecDeque::new(),
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
        self.shard = Shard::new(settings(), 0);
        self.asks.clear();
        self.index = self
            .state
            .iter()
            .map(|(id, job)| (*id, (job.clone(), codec::encode(job))))
            .collect();
        self.applied = self.end;
        self.given = 0;
        self.shard.answer(Answer::Ready { end: self.end }, self.now);
        self.give();
    }

    fn turn(&mut self, limit: usize, is_lost: bool) {
        let writes = self.shard.finish(self.now, limit);
        if is_lost {
            return self.restart();
        }
        let mut wrote = false;
        for output in writes.outputs {
            match &*output.topic {
                APP => {
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
                        None => drop(self.state.remove(&id)),
                    }
                }
                "answers" => {
                    let to = String::from_utf8(output.key.unwrap().to_vec()).unwrap();
                    let outcome = v1::CommandOutcome::decode(output.value.unwrap()).unwrap();
                    assert!(self.answers.insert(to, outcome).is_none(), "answered twice");
                }
                "dlq" => {}
                other => panic!("nothing is written to {other}"),
            }
        }
        for offset in writes.completed {
            assert!(self.done.insert(offset), "done twice");
        }
        if wrote {
            self.shard.committed(self.end);
        }
        self.give();
    }

    fn index(&mut self) {
        let Some(ask) = self.asks.pop_front() else { return };
        let answer = match ask {
            Ask::Apply { turn, batch } => {
                assert_eq!(batch.from, self.applied, "no change is left out");
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
                Answer::Applied(turn)
            }
            Ask::LookUp(keys) => {
                let find = |lookup: Lookup| match lookup {
                    Lookup::Job(id) => self.index.get(&id).map(|(_, record)| record.clone()),
                    Lookup::Key(hash) => self
                        .index
                        .values()
                        .find(|(job, _)| {
                            let key = job.idempotency_key.as_deref();
                            key.is_some_and(|key| key_hash(&job.app, key) == hash)
                        })
                        .map(|(job, _)| KeyValue::of(job).encode()),
                };
                Answer::Found(keys.into_iter().map(find).collect())
            }
            Ask::Ahead {
                after, until, limit, ..
            } => {
                let mut rows: Vec<Row> = self
                    .index
                    .values()
                    .filter(|(job, _)| job.state == State::Scheduled && job.due <= until)
                    .map(|(job, record)| Row {
                        cursor: cursor(job),
                        record: record.clone(),
                    })
                    .filter(|row| Some(row.cursor) > after)
                    .collect();
                rows.sort_by_key(|row| row.cursor);
                let is_complete = rows.len() <= limit;
                rows.truncate(limit);
                Answer::Ahead(Ahead {
                    applied: None,
                    rows,
                    is_complete,
                })
            }
            Ask::Forgettable => Answer::Forgettable(Vec::new()),
        };
        self.shard.answer(answer, self.now);
        self.asks.extend(self.shard.asks(self.now));
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

    fn was_dispatched(&self, id: JobId) -> bool {
        self.dispatched.iter().any(|(other, _)| *other == id)
    }

    fn take(&mut self, step: &Step) {
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
            Step::Turn { limit, is_lost } => self.turn(limit, is_lost),
            Step::Index(count) => (0..count).for_each(|_| self.index()),
            Step::Restart => self.restart(),
        }
    }

    /// Until nothing is left to do.
    fn settle(&mut self) {
        for _ in 0..400 {
            self.take(&Step::Pass(20));
            self.turn(50, false);
            self.index();
            self.index();
        }
    }

    /// What must be true in the end, whatever happened.
    fn check(&self) {
        assert_eq!(self.done.len(), self.ingest.len(), "every command is done");
        let mut times: HashMap<JobId, Vec<Timestamp>> = HashMap::new();
        for (id, at) in &self.dispatched {
            times.entry(*id).or_default().push(*at);
        }
        let mut keys: HashMap<String, JobId> = HashMap::new();
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
                    let job = &self.state[&id];
                    match job.state {
                        State::Dispatched => {
                            assert_eq!(at.len(), 1, "once: {job:?}");
                            assert!(at[0] >= job.due, "never early: {job:?} at {at:?}");
                        }
                        State::Cancelled => assert!(at.is_empty(), "cancelled and dispatched: {job:?}"),
                        State::Scheduled | State::Expired => panic!("left behind: {job:?}"),
                    }
                    if !spec.idempotency_key.is_empty() {
                        let other = keys.insert(spec.idempotency_key, id);
                        assert_eq!(other, None, "a key is taken once");
                    }
                }
                v1::Outcome::Duplicate | v1::Outcome::Conflict => {
                    assert!(at.is_empty());
                    let first = &outcome.job.as_ref().unwrap().id;
                    assert!(self.state.contains_key(&first.parse().unwrap()));
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
            let state = self.state.get(&cancel.id.parse().unwrap()).map(|job| job.state);
            let expected = match self.answers[&offset.to_string()].outcome() {
                v1::Outcome::Cancelled | v1::Outcome::AlreadyCancelled => Some(State::Cancelled),
                v1::Outcome::AlreadyDispatched => Some(State::Dispatched),
                v1::Outcome::Unknown => None,
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
