//! The index in memory, for one process. It is not durable.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use redeliver_core::Timestamp;

use super::{
    Applied, Batch, Change, Checkpoint, Cursor, Effect, FORMAT, FinishedRelease, FlowPosition, FlowScan,
    Index, IndexError, KeyEntry, LastRecordDigest, Lookup, Owner, Row, Scan, ScanRequest, ShardStats,
    flow_key, is_earlier_use, is_evictable, is_requested,
};
use crate::job::{Flow, JobId, KeyHash};

/// An index in memory; clones share it.
#[derive(Clone, Debug)]
pub struct MemoryIndex {
    shards: Arc<Mutex<BTreeMap<i32, Shard>>>,
    max_ended: usize,
    /// See [`Index::of_owner`].
    owner: Option<(Owner, i64)>,
}

impl Default for MemoryIndex {
    fn default() -> Self {
        Self {
            shards: Arc::default(),
            max_ended: usize::MAX,
            owner: None,
        }
    }
}

impl MemoryIndex {
    /// An empty index.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Limits the number of ended jobs per shard that have a record, without those that ended within [`MIN_KEPT`](super::MIN_KEPT).
    #[must_use]
    pub fn with_max_ended(self, max_ended: usize) -> Self {
        Self { max_ended, ..self }
    }

    fn shards(&self) -> MutexGuard<'_, BTreeMap<i32, Shard>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read<T>(&self, shard: i32, read: impl FnOnce(&Shard) -> T) -> Result<T, IndexError> {
        let (shards, none) = (self.shards(), Shard::default());
        let shard = shards.get(&shard).unwrap_or(&none);
        if let Some((owner, expected)) = self.owner {
            if shard.owner.is_some_and(|other| other != owner) {
                return Err(IndexError::Fenced);
            }
            let found = shard.applied.map(|applied| applied.offset);
            if found.is_none_or(|found| found < expected) {
                return Err(IndexError::Gap { found, expected });
            }
        }
        Ok(read(shard))
    }
}

/// A shard is empty while `applied` is `None`.
#[derive(Debug, Default)]
struct Shard {
    owner: Option<Owner>,
    /// Whether the owner has cleared the shard and applied nothing since.
    cleared: bool,
    applied: Option<Applied>,
    last_record: Option<LastRecordDigest>,
    jobs: HashMap<JobId, RecordKey>,
    /// The scheduled jobs of each flow that has any.
    due: HashMap<Flow, DueSet>,
    /// Without a record if too many others have ended since.
    ended: BTreeMap<(Timestamp, JobId), Option<Bytes>>,
    /// The ended jobs with a record and their ends, in the order of their ends, and others.
    recent: VecDeque<(JobId, Timestamp)>,
    keys: HashMap<KeyHash, (Timestamp, Bytes)>,
    key_expiries: BTreeSet<(Timestamp, KeyHash)>,
    finished_releases: HashMap<String, FinishedRelease>,
}

type DueSet = BTreeMap<Cursor, Bytes>;

/// Which map contains a job's record, and under which key.
#[derive(Clone, Debug)]
enum RecordKey {
    Due(Flow, Cursor),
    Ended((Timestamp, JobId)),
}

impl Shard {
    /// A shard without an owner has lost its content too, so the caller becomes its owner.
    fn clear(&mut self, owner: Owner) -> Result<(), IndexError> {
        if self.owner.is_some_and(|other| other != owner) {
            return Err(IndexError::Fenced);
        }
        *self = Self {
            owner: Some(owner),
            cleared: true,
            ..Self::default()
        };
        Ok(())
    }

    fn apply(
        &mut self,
        owner: Owner,
        batch: &Batch,
        now: Timestamp,
        max_ended: usize,
    ) -> Result<(), IndexError> {
        if self.owner.is_some_and(|other| other != owner) {
            return Err(IndexError::Fenced);
        }
        match &mut self.applied {
            Some(applied) if applied.offset >= batch.to && batch.from <= batch.to => {
                if batch.is_renewal_at(applied.offset) {
                    applied.at = now;
                }
                return Ok(());
            }
            Some(applied) if applied.offset >= batch.from && batch.from <= batch.to => {}
            None if self.cleared && batch.from <= batch.to => {}
            found => {
                return Err(IndexError::Gap {
                    found: found.as_ref().map(|applied| applied.offset),
                    expected: batch.from,
                });
            }
        }
        for change in &batch.changes {
            self.change(change, now);
        }
        self.recent.extend(batch.ends());
        self.evict(max_ended, now);
        self.forget_expired_keys(now);
        self.applied = Some(Applied {
            offset: batch.to,
            at: now,
        });
        self.last_record = batch.last_record.or(self.last_record);
        self.cleared = false;
        Ok(())
    }

    fn finish_release(
        &mut self,
        owner: Owner,
        pipeline: &str,
        finished: &FinishedRelease,
    ) -> Result<(), IndexError> {
        if self.owner.is_some_and(|other| other != owner) {
            return Err(IndexError::Fenced);
        }
        if self.applied.is_none() {
            return Err(IndexError::Gap {
                found: None,
                expected: 0,
            });
        }
        self.finished_releases.insert(pipeline.to_owned(), *finished);
        Ok(())
    }

    fn change(&mut self, change: &Change, now: Timestamp) {
        let id = change.id;
        match self.jobs.remove(&id) {
            Some(RecordKey::Due(flow, cursor)) => self.remove_due(&flow, &cursor),
            Some(RecordKey::Ended(place)) => drop(self.ended.remove(&place)),
            None => {}
        }
        let key = match &change.effect {
            Effect::Waits {
                flow,
                due,
                record,
                key,
            } => {
                let cursor = Cursor { due: *due, id };
                let set = self.due.entry(flow.clone()).or_default();
                set.insert(cursor, record.clone());
                self.jobs.insert(id, RecordKey::Due(flow.clone(), cursor));
                key
            }
            Effect::Ended {
                forget, record, key, ..
            } => {
                let place = (*forget, id);
                self.ended.insert(place, Some(record.clone()));
                self.jobs.insert(id, RecordKey::Ended(place));
                key
            }
            Effect::Forgotten => return,
        };
        if let Some(key) = key {
            self.remember(key, now);
        }
    }

    /// Removes the records of the jobs that ended first, up to one that has just ended.
    fn evict(&mut self, max_ended: usize, now: Timestamp) {
        while let Some((id, _)) = self.recent.front()
            && !self.is_ended_with_record(id)
        {
            self.recent.pop_front();
        }
        while self.recent.len() > max_ended
            && let Some(&(id, ended)) = self.recent.front()
            && is_evictable(ended, now)
        {
            self.recent.pop_front();
            if let Some(RecordKey::Ended(place)) = self.jobs.get(&id) {
                self.ended.insert(*place, None);
            }
        }
    }

    fn is_ended_with_record(&self, id: &JobId) -> bool {
        match self.jobs.get(id) {
            Some(RecordKey::Ended(place)) => self.ended.get(place).is_some_and(Option::is_some),
            Some(RecordKey::Due(..)) | None => false,
        }
    }

    fn remove_due(&mut self, flow: &Flow, cursor: &Cursor) {
        if let Some(set) = self.due.get_mut(flow) {
            set.remove(cursor);
            if set.is_empty() {
                self.due.remove(flow);
            }
        }
    }

    fn remember(&mut self, key: &KeyEntry, now: Timestamp) {
        let is_taken = self
            .keys
            .get(&key.hash)
            .is_some_and(|(expires, known)| *expires > now && is_earlier_use(&key.value, known));
        if key.expires <= now || is_taken {
            return;
        }
        if let Some((expires, _)) = self.keys.insert(key.hash, (key.expires, key.value.clone())) {
            self.key_expiries.remove(&(expires, key.hash));
        }
        self.key_expiries.insert((key.expires, key.hash));
    }

    fn forget_expired_keys(&mut self, now: Timestamp) {
        while let Some(&(expires, hash)) = self.key_expiries.first()
            && expires <= now
        {
            self.key_expiries.pop_first();
            self.keys.remove(&hash);
        }
    }

    fn look_up(&self, lookup: &Lookup, now: Timestamp) -> Option<Bytes> {
        match lookup {
            Lookup::Job(id) => match self.jobs.get(id)? {
                RecordKey::Due(flow, cursor) => self.due.get(flow)?.get(cursor).cloned(),
                RecordKey::Ended(place) => self.ended.get(place).cloned().flatten(),
            },
            Lookup::Key(hash) => {
                let (expires, value) = self.keys.get(hash)?;
                (*expires > now).then(|| value.clone())
            }
        }
    }

    fn scan(&self, request: &ScanRequest) -> Scan {
        let first = |set: &DueSet| set.first_key_value().map(|(cursor, _)| cursor.due);
        let flows = self.due.iter().filter_map(|(flow, set)| {
            let first = first(set).filter(|first| *first <= request.until)?;
            Some((first, flow_key::encode(flow), flow, set))
        });
        let mut flows: Vec<_> = flows.collect();
        // The order of a sorted set in Redis.
        flows.sort_unstable_by(|one, other| (one.0, &one.1).cmp(&(other.0, &other.1)));
        if !flows.is_empty() {
            let begin = request.rotation % flows.len();
            flows.rotate_left(begin);
        }
        let positions: HashMap<&Flow, FlowPosition> = request
            .positions
            .iter()
            .map(|(flow, position)| (flow, *position))
            .collect();
        let default = FlowPosition::After {
            cursor: request.after,
            until: request.until,
            jobs: request.jobs_per_flow,
        };
        let (mut jobs, mut bytes) = (0, 0);
        let flows = flows.into_iter().map(|(first, _, flow, set)| {
            let (mut rows, mut is_complete) = (Vec::new(), false);
            if let FlowPosition::After {
                cursor,
                until,
                jobs: limit,
            } = *positions.get(flow).unwrap_or(&default)
            {
                let mut due = up_to(set, cursor, until.min(request.until)).peekable();
                while rows.len() < limit
                    && jobs < request.jobs
                    && (jobs == 0 || bytes < request.bytes)
                    && let Some((cursor, record)) = due.next()
                {
                    (jobs, bytes) = (jobs + 1, bytes + record.len());
                    rows.push(Row {
                        cursor: *cursor,
                        record: record.clone(),
                    });
                }
                is_complete = due.peek().is_none();
            }
            FlowScan {
                flow: flow.clone(),
                first,
                due: up_to(set, None, request.now).count() as u64,
                rows,
                is_complete,
            }
        });
        Scan {
            applied: self.applied,
            flows: flows.collect(),
        }
    }

    fn stats(&self, app: Option<&str>, now: Timestamp, minutes: u32) -> ShardStats {
        let mut stats = ShardStats {
            applied: self.applied,
            per_minute: vec![0; usize::try_from(minutes).unwrap_or(usize::MAX)],
            ..ShardStats::default()
        };
        let sets = self.due.iter().filter(|(flow, _)| is_requested(flow, app));
        for cursor in sets.flat_map(|(_, set)| set.keys()) {
            stats.scheduled += 1;
            stats.next_due = Some(stats.next_due.map_or(cursor.due, |next| next.min(cursor.due)));
            let ahead = cursor.due.as_millis().saturating_sub(now.as_millis());
            // The first minute ends with its last millisecond, which is 60,000 ms ahead.
            match usize::try_from(ahead.saturating_sub(1).div_euclid(60_000)) {
                Ok(minute) => {
                    if let Some(count) = stats.per_minute.get_mut(minute) {
                        *count += 1;
                    }
                }
                Err(_) => stats.due += 1,
            }
        }
        stats
    }
}

/// The jobs after the cursor that are due at or before `until`.
fn up_to(set: &DueSet, after: Option<Cursor>, until: Timestamp) -> impl Iterator<Item = (&Cursor, &Bytes)> {
    let start = after.map_or(Bound::Unbounded, Bound::Excluded);
    let behind = set.range((start, Bound::Unbounded));
    behind.take_while(move |(cursor, _)| cursor.due <= until)
}

impl Index for MemoryIndex {
    fn of_owner(&self, owner: Owner, expected: i64) -> Self {
        Self {
            owner: Some((owner, expected)),
            ..self.clone()
        }
    }

    async fn claim(&self, shard: i32, owner: Owner) -> Result<Option<Checkpoint>, IndexError> {
        let mut shards = self.shards();
        let shard = shards.entry(shard).or_default();
        shard.owner = Some(owner);
        shard.cleared = false;
        let last_record = shard.last_record;
        Ok(shard.applied.map(|applied| Checkpoint {
            applied,
            last_record,
            format: FORMAT,
        }))
    }

    async fn clear(&self, shard: i32, owner: Owner) -> Result<(), IndexError> {
        self.shards().entry(shard).or_default().clear(owner)
    }

    async fn apply(&self, shard: i32, owner: Owner, batch: &Batch, now: Timestamp) -> Result<(), IndexError> {
        let mut shards = self.shards();
        let shard = shards.entry(shard).or_default();
        shard.apply(owner, batch, now, self.max_ended)
    }

    async fn look_up(
        &self,
        shard: i32,
        keys: &[Lookup],
        now: Timestamp,
    ) -> Result<(Option<Applied>, Vec<Option<Bytes>>), IndexError> {
        self.read(shard, |shard| {
            let found = keys.iter().map(|lookup| shard.look_up(lookup, now)).collect();
            (shard.applied, found)
        })
    }

    async fn scan(&self, shard: i32, request: &ScanRequest) -> Result<Scan, IndexError> {
        self.read(shard, |shard| shard.scan(request))
    }

    async fn finished_release(
        &self,
        shard: i32,
        pipeline: &str,
    ) -> Result<(Option<Applied>, Option<FinishedRelease>), IndexError> {
        self.read(shard, |shard| {
            let finished = shard.finished_releases.get(pipeline).copied();
            (shard.applied, finished)
        })
    }

    async fn finish_release(
        &self,
        shard: i32,
        owner: Owner,
        pipeline: &str,
        finished: &FinishedRelease,
    ) -> Result<(), IndexError> {
        let mut shards = self.shards();
        let shard = shards.entry(shard).or_default();
        shard.finish_release(owner, pipeline, finished)
    }

    async fn forgettable(
        &self,
        shard: i32,
        now: Timestamp,
        limit: usize,
    ) -> Result<(Option<Applied>, Vec<JobId>), IndexError> {
        self.read(shard, |shard| {
            let over = shard.ended.keys().take_while(|(forget, _)| *forget <= now);
            (shard.applied, over.take(limit).map(|(_, id)| *id).collect())
        })
    }

    async fn known_keys(&self, shard: i32, now: Timestamp) -> Result<u64, IndexError> {
        self.read(shard, |shard| {
            let in_use = shard.keys.values().filter(|(expires, _)| *expires > now);
            in_use.count() as u64
        })
    }

    async fn stats(
        &self,
        shard: i32,
        app: Option<&str>,
        now: Timestamp,
        minutes: u32,
    ) -> Result<ShardStats, IndexError> {
        self.read(shard, |shard| shard.stats(app, now, minutes))
    }
}
