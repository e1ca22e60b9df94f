//! Random histories: the index in memory, the one in Redis and a naive model must return the same results.

use bytes::Bytes;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use redeliver_core::Timestamp;
use redeliver_core::job::JobId;
use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_scheduler::index::{
    Applied, Batch, Change, Cursor, DueScan, Effect, Index, IndexError, KeyEntry, Lookup, Owner, Row,
    ShardStats,
};

use super::cases::{SHARD, at, id};
use super::own_redis::OwnRedis;

const JOBS: i64 = 12;
const KEYS: u8 = 4;

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
    DueScan {
        after: Option<Cursor>,
        until: Timestamp,
        limit: usize,
        bytes: usize,
    },
    Forgettable(usize),
    Stats(u32),
    /// The clock advances by this many milliseconds.
    Wait(i64),
}

/// The visible result of a step.
#[derive(Debug, PartialEq)]
enum Seen {
    Claimed(Option<Applied>),
    Done,
    Fenced,
    Gap(Option<i64>),
    Found(Option<Applied>, Vec<Option<Bytes>>),
    DueScan(DueScan),
    Forgettable(Option<Applied>, Vec<JobId>),
    Stats(ShardStats),
}

fn job() -> impl Strategy<Value = JobId> {
    // Some share a bucket.
    (0..JOBS).prop_map(|job| id(job * 400))
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

fn change() -> impl Strategy<Value = Change> {
    let waits = (instant(), bytes(), key()).prop_map(|(due, record, key)| Effect::Waits { due, record, key });
    let ended =
        (instant(), bytes(), key()).prop_map(|(forget, record, key)| Effect::Ended { forget, record, key });
    let effect = prop_oneof![4 => waits, 3 => ended, 1 => Just(Effect::Forgotten)];
    (job(), effect).prop_map(|(id, effect)| Change { id, effect })
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
    let after = (instant(), job()).prop_map(|(due, id)| Cursor { due, id });
    let ahead = (prop::option::of(after), instant(), 0..8_usize, 0..100_usize).prop_map(
        |(after, until, limit, bytes)| Step::DueScan {
            after,
            until,
            limit,
            bytes,
        },
    );
    prop_oneof![
        1 => owner().prop_map(Step::Claim),
        1 => owner().prop_map(Step::Clear),
        8 => apply,
        3 => prop::collection::vec(lookup(), 0..20).prop_map(Step::LookUp),
        4 => ahead,
        2 => (0..6_usize).prop_map(Step::Forgettable),
        1 => (0..7_u32).prop_map(Step::Stats),
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
            Step::DueScan {
                after,
                until,
                limit,
                bytes,
            } => self.ahead(*after, *until, *limit, *bytes),
            Step::Forgettable(limit) => {
                let over = self
                    .ordered(false)
                    .into_iter()
                    .filter(|row| row.cursor.due <= now);
                Seen::Forgettable(self.mark, over.take(*limit).map(|row| row.cursor.id).collect())
            }
            Step::Stats(minutes) => self.stats(now, *minutes),
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
        for Change { id, effect } in changes {
            self.jobs.retain(|job| job.0 != *id);
            let key = match effect.clone() {
                Effect::Waits { due, record, key } => {
                    self.jobs.push((*id, true, due, record));
                    key
                }
                Effect::Ended { forget, record, key } => {
                    self.jobs.push((*id, false, forget, record));
                    key
                }
                Effect::Forgotten => None,
            };
            if let Some(key) = key
                && key.expires > now
            {
                self.keys.retain(|other| other.hash != key.hash);
                self.keys.push(key);
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

    fn ahead(&self, after: Option<Cursor>, until: Timestamp, limit: usize, bytes: usize) -> Seen {
        let mut all = self.ordered(true);
        all.retain(|row| row.cursor.due <= until && after.is_none_or(|after| row.cursor > after));
        let (mut rows, mut size) = (Vec::new(), 0);
        for row in &all {
            if rows.len() == limit || (size >= bytes && !rows.is_empty()) {
                break;
            }
            size += row.record.len();
            rows.push(row.clone());
        }
        Seen::DueScan(DueScan {
            applied: self.mark,
            is_complete: rows.len() == all.len(),
            rows,
        })
    }

    fn stats(&self, now: Timestamp, minutes: u32) -> Seen {
        let waiting = self.ordered(true);
        let count = |from: i64, to: i64| {
            let within = waiting.iter().filter(|row| {
                let ahead = row.cursor.due.as_millis() - now.as_millis();
                from < ahead && ahead <= to
            });
            within.count() as u64
        };
        let minutes = 0..i64::from(minutes);
        Seen::Stats(ShardStats {
            scheduled: waiting.len() as u64,
            due: count(i64::MIN, 0),
            next_due: waiting.first().map(|row| row.cursor.due),
            per_minute: minutes
                .map(|minute| count(minute * 60_000, (minute + 1) * 60_000))
                .collect(),
        })
    }
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
        Step::DueScan {
            after,
            until,
            limit,
            bytes,
        } => {
            let ahead = index.due_scan(SHARD, *after, *until, *limit, *bytes).await;
            ahead.map(Seen::DueScan)
        }
        Step::Forgettable(limit) => {
            let over = index.forgettable(SHARD, now, *limit).await;
            over.map(|(mark, ids)| Seen::Forgettable(mark, ids))
        }
        Step::Stats(minutes) => index.stats(SHARD, now, *minutes).await.map(Seen::Stats),
        Step::Wait(_) => Ok(Seen::Done),
    };
    match seen {
        Ok(seen) => seen,
        Err(IndexError::Fenced) => Seen::Fenced,
        Err(IndexError::Gap { found, expected }) => {
            assert_eq!(expected, from);
            Seen::Gap(found)
        }
        Err(error @ (IndexError::Unavailable(_) | IndexError::Full(_))) => panic!("{error}"),
    }
}

/// The results of all queries.
fn questions() -> Vec<Step> {
    let jobs = (0..JOBS).map(|job| Lookup::Job(id(job * 400)));
    let keys = (0..KEYS).map(|hash| Lookup::Key([hash; 16]));
    vec![
        Step::LookUp(jobs.chain(keys).collect()),
        Step::DueScan {
            after: None,
            until: at(1 << 40),
            limit: 100,
            bytes: 1 << 20,
        },
        Step::Forgettable(100),
        Step::Stats(10),
    ]
}

#[test]
fn both_indexes_agree_with_a_naive_model() {
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
                let expected = model.take(&step, from, now);
                let in_memory = take(&memory, &step, from, now).await;
                prop_assert_eq!(&in_memory, &expected, "memory, {:?}", step);
                let in_redis = take(&redis.index, &step, from, now).await;
                prop_assert_eq!(&in_redis, &expected, "redis, {:?}", step);
            }
            Ok(())
        })
    });
    runtime.block_on(redis.remove());
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
