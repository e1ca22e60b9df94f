//! The index in memory, for one process. It is not durable.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use redeliver_core::Timestamp;

use super::{
    Applied, Batch, Change, Checkpoint, Cursor, DueScan, Effect, Index, IndexError, KeyEntry,
    LastRecordDigest, Lookup, Owner, Row, ShardStats,
};
use crate::job::{FORMAT, JobId, KeyHash};

/// An index in memory; clones share it.
#[derive(Clone, Debug, Default)]
pub struct MemoryIndex {
    shards: Arc<Mutex<BTreeMap<i32, Shard>>>,
}

impl MemoryIndex {
    /// An empty index.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn shards(&self) -> MutexGuard<'_, BTreeMap<i32, Shard>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read<T>(&self, shard: i32, read: impl FnOnce(&Shard) -> T) -> T {
        match self.shards().get(&shard) {
            Some(shard) => read(shard),
            None => read(&Shard::default()),
        }
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
    due: BTreeMap<Cursor, Bytes>,
    ended: BTreeMap<(Timestamp, JobId), Bytes>,
    keys: HashMap<KeyHash, (Timestamp, Bytes)>,
    key_expiries: BTreeSet<(Timestamp, KeyHash)>,
}

/// Which map contains a job's record, and under which key.
#[derive(Clone, Copy, Debug)]
enum RecordKey {
    Due(Cursor),
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

    fn apply(&mut self, owner: Owner, batch: &Batch, now: Timestamp) -> Result<(), IndexError> {
        if self.owner.is_some_and(|other| other != owner) {
            return Err(IndexError::Fenced);
        }
        match &mut self.applied {
            Some(applied) if applied.offset >= batch.to => {
                if batch.is_renewal_at(applied.offset) {
                    applied.at = now;
                }
                return Ok(());
            }
            Some(applied) if applied.offset >= batch.from => {}
            None if self.cleared => {}
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
        self.forget_expired_keys(now);
        self.applied = Some(Applied {
            offset: batch.to,
            at: now,
        });
        self.last_record = batch.last_record.or(self.last_record);
        self.cleared = false;
        Ok(())
    }

    fn change(&mut self, change: &Change, now: Timestamp) {
        let id = change.id;
        match self.jobs.remove(&id) {
            Some(RecordKey::Due(cursor)) => self.due.remove(&cursor),
            Some(RecordKey::Ended(place)) => self.ended.remove(&place),
            None => None,
        };
        let key = match &change.effect {
            Effect::Waits { due, record, key } => {
                let cursor = Cursor { due: *due, id };
                self.due.insert(cursor, record.clone());
                self.jobs.insert(id, RecordKey::Due(cursor));
                key
            }
            Effect::Ended { forget, record, key } => {
                let place = (*forget, id);
                self.ended.insert(place, record.clone());
                self.jobs.insert(id, RecordKey::Ended(place));
                key
            }
            Effect::Forgotten => return,
        };
        if let Some(key) = key {
            self.remember(key, now);
        }
    }

    fn remember(&mut self, key: &KeyEntry, now: Timestamp) {
        if key.expires <= now {
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
                RecordKey::Due(cursor) => self.due.get(cursor).cloned(),
                RecordKey::Ended(place) => self.ended.get(place).cloned(),
            },
            Lookup::Key(hash) => {
                let (expires, value) = self.keys.get(hash)?;
                (*expires > now).then(|| value.clone())
            }
        }
    }

    fn due_scan(&self, after: Option<Cursor>, until: Timestamp, limit: usize, bytes: usize) -> DueScan {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut due = self.due.range((start, Bound::Unbounded));
        let mut due = std::iter::from_fn(|| due.next().filter(|(cursor, _)| cursor.due <= until)).peekable();
        let (mut rows, mut size) = (Vec::new(), 0);
        while rows.len() < limit
            && (rows.is_empty() || size < bytes)
            && let Some((cursor, record)) = due.next()
        {
            size += record.len();
            rows.push(Row {
                cursor: *cursor,
                record: record.clone(),
            });
        }
        DueScan {
            applied: self.applied,
            rows,
            is_complete: due.peek().is_none(),
        }
    }

    fn stats(&self, now: Timestamp, minutes: u32) -> ShardStats {
        let minute = |minutes: u32| now.after(std::time::Duration::from_secs(60) * minutes);
        let mut per_minute = vec![0; usize::try_from(minutes).unwrap_or(usize::MAX)];
        let mut of = 0;
        for cursor in self.due.keys().skip_while(|cursor| cursor.due <= now) {
            while of < minutes && cursor.due > minute(of + 1) {
                of += 1;
            }
            let Some(count) = per_minute.get_mut(usize::try_from(of).unwrap_or(usize::MAX)) else {
                break;
            };
            *count += 1;
        }
        let due = self.due.keys().take_while(|cursor| cursor.due <= now).count();
        ShardStats {
            scheduled: self.due.len() as u64,
            due: due as u64,
            next_due: self.due.keys().next().map(|cursor| cursor.due),
            per_minute,
        }
    }
}

impl Index for MemoryIndex {
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
        self.shards().entry(shard).or_default().apply(owner, batch, now)
    }

    async fn look_up(
        &self,
        shard: i32,
        keys: &[Lookup],
        now: Timestamp,
    ) -> Result<(Option<Applied>, Vec<Option<Bytes>>), IndexError> {
        Ok(self.read(shard, |shard| {
            let found = keys.iter().map(|lookup| shard.look_up(lookup, now)).collect();
            (shard.applied, found)
        }))
    }

    async fn due_scan(
        &self,
        shard: i32,
        after: Option<Cursor>,
        until: Timestamp,
        limit: usize,
        bytes: usize,
    ) -> Result<DueScan, IndexError> {
        Ok(self.read(shard, |shard| shard.due_scan(after, until, limit, bytes)))
    }

    async fn forgettable(
        &self,
        shard: i32,
        now: Timestamp,
        limit: usize,
    ) -> Result<(Option<Applied>, Vec<JobId>), IndexError> {
        Ok(self.read(shard, |shard| {
            let over = shard.ended.keys().take_while(|(forget, _)| *forget <= now);
            (shard.applied, over.take(limit).map(|(_, id)| *id).collect())
        }))
    }

    async fn known_keys(&self, shard: i32, now: Timestamp) -> Result<u64, IndexError> {
        Ok(self.read(shard, |shard| {
            let in_use = shard.keys.values().filter(|(expires, _)| *expires > now);
            in_use.count() as u64
        }))
    }

    async fn stats(&self, shard: i32, now: Timestamp, minutes: u32) -> Result<ShardStats, IndexError> {
        Ok(self.read(shard, |shard| shard.stats(now, minutes)))
    }
}
