//! Random histories: the index in memory, the one in Redis and a naive model must return the same results.

use std::collections::BTreeSet;

use bytes::Bytes;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseError, TestRunner};
use redeliver_core::Timestamp;
use redeliver_core::job::JobId;
use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_scheduler::index::{
    Applied, Batch, Change, Cursor, Effect, FlowPosition, FlowScan, Index, IndexError, KeyEntry, ListRequest,
    Lookup, MIN_KEPT, Owner, Page, Row, Scan, ScanRequest, ShardStats,
};
use redeliver_scheduler::job::{Flow, Priority};

use super::cases::{SHARD, at, id};
use super::own_redis::OwnRedis;

const JOBS: i64 = 12;
const KEYS: u8 = 4;
const FLOWS: usize = 6;

#[derive(Clone, Debug)]
enum Step {
    Claim(Owner),
    Clear(Owner),
    Apply {
        owner: Owner,
        /// The start of the batch, relative to the checkpoint.
        shift: i64,
        length: i64,
        changes: Vec<Change>,
    },
    LookUp(Vec<Lookup>),
    Scan(ScanRequest),
    List {
        app: Option<String>,
        after: Option<Cursor>,
        from: Option<Timestamp>,
        until: Timestamp,
        limit: usize,
        bytes: usize,
    },
    Forgettable(usize),
    Stats(Option<String>, u32),
    /// The clock advances by this many milliseconds.
    Wait(i64),
}

/// The visible result of a step.
#[derive(Clone, Debug, PartialEq)]
enum Seen {
    Claimed(Option<Applied>),
    Done,
    Fenced,
    Gap(Option<i64>),
    Found(Option<Applied>, Vec<Option<Bytes>>),
    Scan(Scan),
    List(Page),
    Forgettable(Option<Applied>, Vec<JobId>),
    Stats(ShardStats),
}

impl Seen {
    /// The same, if these are fewer rows of the same page than expected, but at least one. Pages can be shorter than their
    /// limits.
    fn shortened(expected: Self, seen: &Self) -> Self {
        let shorten = |rows: &mut Vec<Row>, is_complete: &mut bool, seen: usize| {
            if (1..rows.len()).contains(&seen) {
                rows.truncate(seen);
                *is_complete = false;
            }
        };
        match (expected, seen) {
            (Self::List(mut expected), Self::List(seen)) => {
                shorten(&mut expected.rows, &mut expected.is_complete, seen.rows.len());
                Self::List(expected)
            }
            (expected, _) => expected,
        }
    }
}

fn job() -> impl Strategy<Value = JobId> {
    // Some share a bucket.
    (0..JOBS).prop_map(|job| id(job * 400))
}

/// Flows whose texts sort differently than their parts, one without an application, and one that has no jobs.
fn flow_number(number: usize) -> Flow {
    let (topic, app, priority) = [
        ("t", "a", Priority::Normal),
        ("t-2", "a", Priority::Normal),
        ("t", "b:c", Priority::High),
        ("t", "b:c", Priority::Low),
        ("", "", Priority::High),
        ("t", "none", Priority::Low),
    ][number];
    Flow {
        app: app.into(),
        topic: topic.into(),
        priority,
    }
}

fn flow_of(id: JobId) -> Flow {
    flow_number(usize::try_from(id.offset()).unwrap() / 400 % (FLOWS - 1))
}

fn app() -> impl Strategy<Value = Option<String>> {
    prop::option::of(prop::sample::select(vec!["a", "b:c", "none"]).prop_map(String::from))
}

fn cursor() -> impl Strategy<Value = Option<Cursor>> {
    prop::option::of((instant(), job()).prop_map(|(due, id)| Cursor { due, id }))
}

fn position() -> impl Strategy<Value = FlowPosition> {
    let after = (cursor(), instant(), 0..5_usize);
    prop_oneof![
        3 => after.prop_map(|(cursor, until, jobs)| FlowPosition::After { cursor, until, jobs }),
        1 => Just(FlowPosition::CountOnly),
    ]
}

fn scan() -> impl Strategy<Value = Step> {
    let limits = (0..4_usize, 0..12_usize, 0..150_usize, 0..9_usize);
    let positions = prop::collection::vec(prop::option::of(position()), FLOWS);
    (instant(), instant(), cursor(), limits, positions).prop_map(|(until, now, after, limits, positions)| {
        let positions = (0..FLOWS).map(flow_number).zip(positions);
        let (jobs_per_flow, jobs, bytes, rotation) = limits;
        Step::Scan(ScanRequest {
            until,
            now,
            after,
            jobs_per_flow,
            positions: positions
                .filter_map(|(flow, position)| Some((flow, position?)))
                .collect(),
            jobs,
            bytes,
            rotation,
        })
    })
}

fn list() -> impl Strategy<Value = Step> {
    let range = (cursor(), prop::option::of(instant()), instant());
    (app(), range, 0..8_usize, 0..100_usize).prop_map(|(app, (after, from, until), limit, bytes)| {
        Step::List {
            app,
            after,
            from,
            until,
            limit,
            bytes,
        }
    })
}

/// Few instants, so that many jobs have the same due time.
fn instant() -> impl Strategy<Value = Timestamp> {
    prop_oneof![
        (0..6_i64).prop_map(at),
        (0..300_i64).prop_map(|second| at(second * 1000))
    ]
}

fn bytes() -> impl Strategy<Value = Bytes> {
    prop::collection::vec(any::<u8>(), 0..30).prop_map(Bytes::from)
}

fn owner() -> impl Strategy<Value = Owner> {
    prop_oneof![3 => Just(Owner(1)), 1 => Just(Owner(u64::MAX))]
}

fn key() -> impl Strategy<Value = Option<KeyEntry>> {
    let entry = (0..KEYS, bytes(), instant()).prop_map(|(hash, value, expires)| KeyEntry {
        hash: [hash; 16],
        value,
        expires,
    });
    prop::option::of(entry)
}

/// The offset of the request of the job that uses a key.
fn offset_of(key: &KeyEntry) -> u64 {
    JobId::from_bytes(*key.value.first_chunk().unwrap()).offset()
}

fn change() -> impl Strategy<Value = Change> {
    let parts = (job(), instant(), bytes(), key());
    (0..8, parts).prop_map(|(kind, (id, time, record, key))| {
        let flow = flow_of(id);
        let key = key.map(|key| KeyEntry {
            value: [&id.to_bytes(), &*key.value].concat().into(),
            ..key
        });
        let effect = match kind {
            0..4 => Effect::Waits {
                flow,
                due: time,
                record,
                key,
            },
            4..7 => Effect::Ended {
                flow,
                ended: time,
                forget: time,
                record,
                key,
            },
            _ => Effect::Forgotten,
        };
        Change::of_job(id, effect)
    })
}

fn lookup() -> impl Strategy<Value = Lookup> {
    prop_oneof![
        job().prop_map(Lookup::Job),
        (0..KEYS).prop_map(|hash| Lookup::Key([hash; 16]))
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let changes = prop::collection::vec(change(), 0..12);
    let apply =
        (owner(), -3..2_i64, 0..6_i64, changes).prop_map(|(owner, shift, length, changes)| Step::Apply {
            owner,
            shift: shift.min(0) + i64::from(shift > 0),
            length,
            changes,
        });
    prop_oneof![
        1 => owner().prop_map(Step::Claim),
        1 => owner().prop_map(Step::Clear),
        8 => apply,
        3 => prop::collection::vec(lookup(), 0..20).prop_map(Step::LookUp),
        4 => scan(),
        2 => list(),
        2 => (0..6_usize).prop_map(Step::Forgettable),
        1 => (app(), 0..7_u32).prop_map(|(app, minutes)| Step::Stats(app, minutes)),
        1 => (0..60_000_i64).prop_map(Step::Wait),
    ]
}

/// A naive model of a shard.
#[derive(Default)]
struct Model {
    owner: Option<Owner>,
    cleared: bool,
    mark: Option<Applied>,
    /// Whether the job waits, its time, and its record.
    jobs: Vec<(JobId, bool, Timestamp, Bytes)>,
    keys: Vec<KeyEntry>,
}

impl Model {
    fn take(&mut self, step: &Step, from: i64, now: Timestamp) -> Seen {
        match step {
            Step::Claim(owner) => {
                (self.owner, self.cleared) = (Some(*owner), false);
                Seen::Claimed(self.mark)
            }
            Step::Clear(owner) | Step::Apply { owner, .. }
                if self.owner.is_some_and(|other| other != *owner) =>
            {
                Seen::Fenced
            }
            Step::Clear(owner) => {
                *self = Self::default();
                (self.owner, self.cleared) = (Some(*owner), true);
                Seen::Done
            }
            Step::Apply { length, changes, .. } => self.apply(from, from + length, changes, now),
            Step::LookUp(lookups) => {
                let found = lookups.iter().map(|lookup| self.look_up(lookup, now));
                Seen::Found(self.mark, found.collect())
            }
            Step::Scan(request) => self.scan(request),
            Step::List {
                app,
                after,
                from,
                until,
                limit,
                bytes,
            } => {
                let first = from.map(|due| {
                    Cursor {
                        due,
                        id: JobId::from_bytes([0; 16]),
                    }
                    .before()
                });
                Seen::List(self.page(app.as_deref(), (*after).max(first), *until, *limit, *bytes))
            }
            Step::Forgettable(limit) => {
                let over = self
                    .ordered(false)
                    .into_iter()
                    .filter(|row| row.cursor.due <= now);
                Seen::Forgettable(self.mark, over.take(*limit).map(|row| row.cursor.id).collect())
            }
            Step::Stats(app, minutes) => self.stats(app.as_deref(), now, *minutes),
            Step::Wait(_) => Seen::Done,
        }
    }

    fn apply(&mut self, from: i64, to: i64, changes: &[Change], now: Timestamp) -> Seen {
        let found = self.mark.map(|mark| mark.offset);
        if found.is_some_and(|found| found >= to) {
            // An empty range at the checkpoint renews its time.
            if let Some(mark) = self
                .mark
                .as_mut()
                .filter(|mark| mark.offset == from && from == to)
            {
                mark.at = now;
            }
            return Seen::Done;
        }
        if found.map_or(!self.cleared, |found| found < from) {
            return Seen::Gap(found);
        }
        for Change { id, effect, .. } in changes {
            self.jobs.retain(|job| job.0 != *id);
            let key = match effect.clone() {
                Effect::Waits { due, record, key, .. } => {
                    self.jobs.push((*id, true, due, record));
                    key
                }
                Effect::Ended {
                    forget, record, key, ..
                } => {
                    self.jobs.push((*id, false, forget, record));
                    key
                }
                Effect::Forgotten => None,
            };
            if let Some(key) = key
                && key.expires > now
            {
                let known = self.keys.iter().find(|other| other.hash == key.hash);
                let is_taken =
                    known.is_some_and(|known| known.expires > now && offset_of(known) > id.offset());
                if !is_taken {
                    self.keys.retain(|other| other.hash != key.hash);
                    self.keys.push(key);
                }
            }
        }
        self.mark = Some(Applied { offset: to, at: now });
        self.cleared = false;
        Seen::Done
    }

    fn look_up(&self, lookup: &Lookup, now: Timestamp) -> Option<Bytes> {
        match lookup {
            Lookup::Job(id) => {
                let job = self.jobs.iter().find(|job| job.0 == *id);
                job.map(|job| job.3.clone())
            }
            Lookup::Key(hash) => {
                let key = self
                    .keys
                    .iter()
                    .find(|key| key.hash == *hash && key.expires > now);
                key.map(|key| key.value.clone())
            }
        }
    }

    fn ordered(&self, wait: bool) -> Vec<Row> {
        let jobs = self.jobs.iter().filter(|job| job.1 == wait);
        let rows = jobs.map(|(id, _, time, record)| Row {
            cursor: Cursor { due: *time, id: *id },
            record: record.clone(),
        });
        let mut rows: Vec<Row> = rows.collect();
        rows.sort_by_key(|row| row.cursor);
        rows
    }

    fn page(
        &self,
        app: Option<&str>,
        after: Option<Cursor>,
        until: Timestamp,
        limit: usize,
        bytes: usize,
    ) -> Page {
        let mut all = self.of_app(app);
        all.retain(|row| row.cursor.due <= until && after.is_none_or(|after| row.cursor > after));
        let mut room = (limit, bytes);
        let mut rows = all.clone();
        let is_complete = fill(&mut rows, &mut room, true);
        Page {
            applied: self.mark,
            rows,
            is_complete,
        }
    }

    fn of_app(&self, app: Option<&str>) -> Vec<Row> {
        let mut rows = self.ordered(true);
        rows.retain(|row| {
            let flow = flow_of(row.cursor.id);
            app.map_or(!flow.app.is_empty(), |app| *flow.app == *app)
        });
        rows
    }

    fn scan(&self, request: &ScanRequest) -> Seen {
        let waiting = self.ordered(true);
        let of = |flow: &Flow| {
            let rows = waiting.iter().filter(|row| flow_of(row.cursor.id) == *flow);
            rows.cloned().collect::<Vec<_>>()
        };
        let mut flows: Vec<(Timestamp, String, Flow)> = Vec::new();
        for flow in (0..FLOWS).map(flow_number) {
            if let Some(first) = of(&flow).first()
                && first.cursor.due <= request.until
            {
                let priority = match flow.priority {
                    Priority::High => 0,
                    Priority::Normal => 1,
                    Priority::Low => 2,
                };
                let text = format!("{priority}:{}:{}", flow.topic, flow.app);
                flows.push((first.cursor.due, text, flow));
            }
        }
        flows.sort();
        let (mut room, mut is_first) = ((request.jobs, request.bytes), true);
        let begin = request.rotation.checked_rem(flows.len()).unwrap_or(0);
        let flows = (0..flows.len()).map(|n| {
            let (first, _, flow) = &flows[(begin + n) % flows.len()];
            let due = of(flow)
                .iter()
                .filter(|row| row.cursor.due <= request.now)
                .count() as u64;
            let position = request.positions.iter().find(|(other, _)| other == flow);
            let (mut rows, mut is_complete) = (of(flow), false);
            match position.map(|(_, position)| *position) {
                Some(FlowPosition::CountOnly) => rows.clear(),
                position => {
                    let (cursor, until, jobs) = match position {
                        Some(FlowPosition::After { cursor, until, jobs }) => (cursor, until, jobs),
                        _ => (request.after, request.until, request.jobs_per_flow),
                    };
                    rows.retain(|row| {
                        row.cursor.due <= until.min(request.until)
                            && cursor.is_none_or(|cursor| row.cursor > cursor)
                    });
                    let all = rows.len();
                    rows.truncate(jobs);
                    is_complete = fill(&mut rows, &mut room, is_first) && rows.len() == all;
                    is_first = is_first && rows.is_empty();
                }
            }
            FlowScan {
                flow: flow.clone(),
                first: *first,
                due,
                rows,
                is_complete,
            }
        });
        Seen::Scan(Scan {
            flows: flows.collect(),
            applied: self.mark,
        })
    }

    fn stats(&self, app: Option<&str>, now: Timestamp, minutes: u32) -> Seen {
        let waiting = self.of_app(app);
        let count = |from: i64, to: i64| {
            let within = waiting.iter().filter(|row| {
                let ahead = row.cursor.due.as_millis() - now.as_millis();
                from < ahead && ahead <= to
            });
            within.count() as u64
        };
        let minutes = 0..i64::from(minutes);
        Seen::Stats(ShardStats {
            applied: self.mark,
            scheduled: waiting.len() as u64,
            due: count(i64::MIN, 0),
            next_due: waiting.first().map(|row| row.cursor.due),
            per_minute: minutes
                .map(|minute| count(minute * 60_000, (minute + 1) * 60_000))
                .collect(),
        })
    }
}

/// Truncates the rows to this room of rows and bytes, which they then occupy. The first row always has enough bytes. Returns
/// whether these are all rows.
fn fill(rows: &mut Vec<Row>, room: &mut (usize, usize), mut is_first: bool) -> bool {
    let mut count = 0;
    while count < rows.len() && room.0 > 0 && (is_first || room.1 > 0) {
        room.0 -= 1;
        room.1 = room.1.saturating_sub(rows[count].record.len());
        is_first = false;
        count += 1;
    }
    let is_complete = count == rows.len();
    rows.truncate(count);
    is_complete
}

async fn take<I: Index>(index: &I, step: &Step, from: i64, now: Timestamp) -> Seen {
    let seen = match step {
        Step::Claim(owner) => {
            let claimed = index.claim(SHARD, *owner).await;
            claimed.map(|claimed| Seen::Claimed(claimed.map(|claimed| claimed.applied)))
        }
        Step::Clear(owner) => index.clear(SHARD, *owner).await.map(|()| Seen::Done),
        Step::Apply {
            owner,
            length,
            changes,
            ..
        } => {
            let batch = Batch {
                from,
                to: from + length,
                changes: changes.clone(),
                last_record: None,
                force: false,
            };
            index.apply(SHARD, *owner, &batch, now).await.map(|()| Seen::Done)
        }
        Step::LookUp(lookups) => {
            let found = index.look_up(SHARD, lookups, now).await;
            found.map(|(mark, found)| Seen::Found(mark, found))
        }
        Step::Scan(request) => index.scan(SHARD, request).await.map(Seen::Scan),
        Step::List {
            app,
            after,
            from,
            until,
            limit,
            bytes,
        } => {
            let request = ListRequest {
                app: app.as_deref(),
                after: *after,
                from: *from,
                until: *until,
                limit: *limit,
                bytes: *bytes,
            };
            index.list(SHARD, &request).await.map(Seen::List)
        }
        Step::Forgettable(limit) => {
            let over = index.forgettable(SHARD, now, *limit).await;
            over.map(|(mark, ids)| Seen::Forgettable(mark, ids))
        }
        Step::Stats(app, minutes) => index
            .stats(SHARD, app.as_deref(), now, *minutes)
            .await
            .map(Seen::Stats),
        Step::Wait(_) => Ok(Seen::Done),
    };
    match seen {
        Ok(seen) => seen,
        Err(IndexError::Fenced) => Seen::Fenced,
        Err(IndexError::Gap { found, expected }) => {
            assert_eq!(expected, from);
            Seen::Gap(found)
        }
        Err(error @ (IndexError::Unavailable(_) | IndexError::Full(_) | IndexError::Damaged(_))) => {
            panic!("{error}")
        }
    }
}

/// The results of all queries.
fn questions() -> Vec<Step> {
    let jobs = (0..JOBS).map(|job| Lookup::Job(id(job * 400)));
    let keys = (0..KEYS).map(|hash| Lookup::Key([hash; 16]));
    vec![
        Step::LookUp(jobs.chain(keys).collect()),
        Step::Scan(ScanRequest {
            until: at(1 << 40),
            now: at(5),
            after: None,
            jobs_per_flow: 100,
            positions: Vec::new(),
            jobs: 100,
            bytes: 1 << 20,
            rotation: 0,
        }),
        Step::Forgettable(100),
        Step::Stats(None, 10),
    ]
}

#[test]
fn indexes_agree_with_a_model() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let redis = runtime.block_on(OwnRedis::connect());
    // Each history starts with a claim and a clear, so that most of its steps have an effect.
    let beginning = [Step::Claim(Owner(1)), Step::Clear(Owner(1))];
    let history = prop::collection::vec(step(), 1..60);
    let mut runner = TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(96)
    });
    let outcome = runner.run(&history, |steps| {
        runtime.block_on(async {
            redis.remove().await;
            let (memory, mut model) = (MemoryIndex::new(), Model::default());
            let mut now = at(0);
            for step in beginning.iter().cloned().chain(steps).flat_map(|step| {
                let then = match step {
                    Step::Apply { .. } | Step::Clear(_) => questions(),
                    _ => Vec::new(),
                };
                std::iter::once(step).chain(then)
            }) {
                if let Step::Wait(millis) = step {
                    now = Timestamp::from_millis(now.as_millis() + millis);
                }
                let from = match step {
                    Step::Apply { shift, .. } => model.mark.map_or(5, |mark| mark.offset) + shift,
                    _ => 0,
                };
                let in_memory = take(&memory, &step, from, now).await;
                let expected = Seen::shortened(model.take(&step, from, now), &in_memory);
                prop_assert_eq!(&in_memory, &expected, "memory, {:?}", step);
                let in_redis = take(&redis.index, &step, from, now).await;
                prop_assert_eq!(&in_redis, &expected, "redis, {:?}", step);
                if let (Step::Apply { .. }, Some(owner), Some(mark)) = (&step, model.owner, model.mark) {
                    // A claim compares the sizes of all flows.
                    let claimed = take(&redis.index, &Step::Claim(owner), from, now).await;
                    prop_assert_eq!(claimed, Seen::Claimed(Some(mark)), "after {:?}", step);
                }
            }
            Ok(())
        })
    });
    runtime.block_on(redis.remove());
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

/// What happens to a job next, after which time it is forgotten, whether the batch before is applied again with it, and how long after the
/// event before it happens, in ms.
type Event = (i64, bool, i64, bool, i64);

/// Which ended jobs have a record, told in the simplest way.
#[derive(Default)]
struct Kept {
    /// All ends, in their order.
    ends: Vec<(JobId, Timestamp)>,
    /// How many of them do not count any more.
    passed: usize,
    jobs: BTreeSet<JobId>,
}

impl Kept {
    fn apply(&mut self, changes: &[Change], now: Timestamp) {
        for (index, Change { id, effect, .. }) in changes.iter().enumerate() {
            self.jobs.remove(id);
            let is_last = changes[index + 1..].iter().all(|later| later.id != *id);
            if let (Effect::Ended { ended, .. }, true) = (effect, is_last) {
                self.jobs.insert(*id);
                self.ends.push((*id, *ended));
            }
        }
        while let Some((id, _)) = self.ends.get(self.passed)
            && !self.jobs.contains(id)
        {
            self.passed += 1;
        }
        while self.ends.len() - self.passed > MAX_ENDED
            && let (id, ended) = self.ends[self.passed]
            && now.since(ended) >= MIN_KEPT
        {
            self.jobs.remove(&id);
            self.passed += 1;
        }
    }
}

/// Jobs that wait, end and are forgotten, in an index that keeps the records of `MAX_ENDED` ended ones. Returns the error if a waiting job
/// or the end of a job is lost, or if others than the right ended jobs have records.
async fn live<I: Index>(index: &I, events: &[Event]) -> Result<(), TestCaseError> {
    let owner = Owner(1);
    index.claim(SHARD, owner).await.unwrap();
    index.clear(SHARD, owner).await.unwrap();
    let (mut waiting, mut ended, mut gone) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut last: Option<Change> = None;
    let (mut expected, mut now) = (Kept::default(), at(0));
    let apply = async |from, to, changes, now| {
        let batch = Batch {
            from,
            to,
            changes,
            ..Batch::default()
        };
        index.apply(SHARD, owner, &batch, now).await.unwrap();
    };
    // The end of the state topic.
    let mut end = 1;
    for (job, is_forgotten, forget, is_repeated, pause) in events {
        now = Timestamp::from_millis(now.as_millis() + pause);
        let id = id(job * 400);
        let effect = match (waiting.contains(&id), ended.contains(&id)) {
            (true, _) => {
                waiting.remove(&id);
                ended.insert(id);
                Effect::Ended {
                    flow: flow_of(id),
                    ended: now,
                    forget: at(*forget),
                    record: Bytes::from_static(b"ended"),
                    key: None,
                }
            }
            (_, true) if *is_forgotten => {
                ended.remove(&id);
                gone.insert(id);
                Effect::Forgotten
            }
            (_, true) => continue,
            // Each job has an id of its own.
            _ if gone.contains(&id) => continue,
            _ => {
                waiting.insert(id);
                Effect::Waits {
                    flow: flow_of(id),
                    due: at(*forget),
                    record: Bytes::from_static(b"waits"),
                    key: None,
                }
            }
        };
        let change = Change::of_job(id, effect);
        let before = last.replace(change.clone()).filter(|_| *is_repeated);
        let from = if before.is_some() { end - 1 } else { end };
        let changes: Vec<Change> = before.into_iter().chain([change]).collect();
        expected.apply(&changes, now);
        apply(from, end + 1, changes, now).await;
        end += 1;

        let jobs: Vec<JobId> = (0..EVENT_JOBS).map(|job| super::cases::id(job * 400)).collect();
        let lookups: Vec<Lookup> = jobs.iter().copied().map(Lookup::Job).collect();
        let (applied, found) = index.look_up(SHARD, &lookups, at(0)).await.unwrap();
        prop_assert!(applied.is_some());
        let with_record = |text: &[u8]| {
            let found = jobs
                .iter()
                .zip(&found)
                .filter(|(_, found)| found.as_deref() == Some(text));
            found.map(|(id, _)| *id).collect::<BTreeSet<_>>()
        };
        prop_assert_eq!(&with_record(b"waits"), &waiting);
        prop_assert!(
            expected.jobs.is_subset(&ended),
            "{:?} of {:?}",
            expected.jobs,
            ended
        );
        prop_assert_eq!(&with_record(b"ended"), &expected.jobs);
        prop_assert!(index.claim(SHARD, owner).await.unwrap().is_some());
    }
    // All that ended is forgotten in the end.
    // Some of them may be returned again after they were forgotten.
    for _ in 0..50 {
        let (applied, over) = index.forgettable(SHARD, at(1 << 40), 2).await.unwrap();
        prop_assert!(applied.is_some());
        prop_assert!(over.iter().all(|id| !waiting.contains(id)), "{:?}", over);
        let forgotten = over.into_iter().map(|id| {
            ended.remove(&id);
            Change::of_job(id, Effect::Forgotten)
        });
        let changes = forgotten.collect();
        apply(end, end + 1, changes, now).await;
        end += 1;
    }
    prop_assert_eq!(ended, BTreeSet::new());
    Ok(())
}

const EVENT_JOBS: i64 = 20;
const MAX_ENDED: usize = 3;

#[test]
fn eviction_loses_no_job() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let redis = runtime.block_on(OwnRedis::connect());
    let pause = prop_oneof![0..100_i64, 0..70_000_i64];
    let event = (
        0..EVENT_JOBS,
        any::<bool>(),
        0..2_000_000_i64,
        any::<bool>(),
        pause,
    );
    let events = prop::collection::vec(event, 1..80);
    let mut runner = TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(48)
    });
    let outcome = runner.run(&events, |events| {
        runtime.block_on(async {
            live(&MemoryIndex::new().with_max_ended(MAX_ENDED), &events).await?;
            live(&redis.index.clone().with_max_ended(MAX_ENDED), &events).await?;
            let names = redis.names(SHARD).await;
            let has_ended = |name: &&String| {
                ["ended", "recent", "evicted"]
                    .iter()
                    .any(|kind| name.starts_with(kind))
            };
            let left = names.iter().find(has_ended);
            prop_assert!(left.is_none_or(|name| name == "recent"), "{:?}", names);
            Ok(())
        })
    });
    runtime.block_on(redis.remove());
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
