//! The index in Redis.
//!
//! Keys of shard `p`, which share the hash tag `{p}` and so a node of a cluster, behind `PREFIX:{p}:`
//!
//! | key | is |
//! |---|---|
//! | `meta` | hash: the mark (`offset`, `at`), its `seal`, `counts`, `owner`, `cleared` or `clearing` with the token of a clear, and `format` unless that is 0: what a scheduler must know to go on from here |
//! | `due` | sorted set of the ids of jobs that wait, by due time |
//! | `ended` | sorted set of the ids of jobs that have ended, by the time to forget them |
//! | `job:<n>` | hash: id to record, for the jobs whose requests have the offsets from `n * 1024` on |
//! | `buckets` | set of all `n` |
//! | `idem:<hash>` | value of an idempotency key, behind 8 bytes of its expiry |
//! | `idemlog:<n>` | hashes of the keys that expire in stretch `n` of the time, one behind the other |
//! | `idemlogs` | set of all `n` |
//!
//! `buckets` and the logs are there so that a shard can be emptied without a search through all of Redis; a log
//! costs 16 bytes per key, where a set would cost more than the key itself.
//!
//! Each method is one Lua script, so its answer is of one moment and its change is whole or not at all. Only
//! [`Index::clear`] is many small ones, of which the first removes the mark; without a mark nothing is seen of
//! the rest. A command whose answer was lost may be executed much later, when the connection was given up for
//! another. What makes that harmless is that a batch is only applied on its place, and on an empty shard only
//! by the process that knows the token of the latest clear.
//!
//! Keys may get lost one by one, by eviction or by hand. `counts` says how many members `due`, `ended` and `buckets` have
//! after each change; whoever finds another number, or no record of a job that waits, takes the mark away, and the shard is
//! built again.
//!
//! The names of buckets and idempotency keys are made in the scripts; all are of the shard's hash tag.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf as _, Bytes};
use fred::prelude::Value;
use redeliver_core::Timestamp;
use redeliver_runtime::config::RedisConfig;
use redeliver_runtime::tasks::Tasks;

pub use self::connection::{ConnectError, Evicts};
use self::connection::{Connection, Script};
use super::{
    Applied, Batch, Claimed, Cursor, DueScan, Effect, Index, IndexError, KeyEntry, LastRecordDigest, Lookup,
    Owner, Row, ShardStats, Usage,
};
use crate::job::{JobId, KeyHash};

mod connection;

/// How many offsets share a hash: 2 to the power of this.
const BUCKET_BITS: u32 = 10;
/// How long the idempotency keys of one log expire: 2 to the power of this, in ms, about four minutes.
const LOG_BITS: u32 = 18;
/// How much longer than its stretch of time Redis keeps a log and its keys. Who looks a key up compares its
/// expiry by a clock of its own.
const EXPIRY_MARGIN_MS: i64 = 60_000;
/// Redis has numbers of 53 bits.
const LAST_MILLIS: i64 = 1 << 53;
/// Redis takes no more arguments for one command.
const MOST_ARGUMENTS: usize = 1_000_000;

/// An index in Redis; clones share its connection.
#[derive(Clone, Debug)]
pub struct RedisIndex {
    connection: Connection,
    prefix: Arc<str>,
    scripts: Arc<Scripts>,
    /// Tokens of clears after which nothing has been applied, by shard.
    cleared: Arc<Mutex<HashMap<i32, (Owner, u64)>>>,
}

#[derive(Debug)]
struct Scripts {
    claim: Script,
    clear: Script,
    apply: Script,
    look_up: Script,
    ahead: Script,
    forgettable: Script,
    stats: Script,
}

impl Scripts {
    fn new() -> Self {
        /// What all of them begin with that look at the mark.
        macro_rules! with_mark {
            ($file:literal) => {
                Script::new(concat!(include_str!("redis/mark.lua"), include_str!($file)))
            };
        }
        Self {
            claim: with_mark!("redis/claim.lua"),
            clear: Script::new(include_str!("redis/clear.lua")),
            apply: with_mark!("redis/apply.lua"),
            look_up: with_mark!("redis/look_up.lua"),
            ahead: with_mark!("redis/ahead.lua"),
            forgettable: with_mark!("redis/forgettable.lua"),
            stats: Script::new(include_str!("redis/stats.lua")),
        }
    }
}

impl RedisIndex {
    /// Reads the settings and the file that they name; asks no Redis.
    ///
    /// # Errors
    /// When they cannot be followed.
    pub fn check(config: &RedisConfig) -> Result<(), ConnectError> {
        connection::check(config)
    }

    /// Connects to Redis; the tasks keep the connection, and make it again whenever it is lost. A Redis that does
    /// not answer is no error: until it does, all methods fail with [`IndexError::Unavailable`].
    ///
    /// # Errors
    /// When the URL is wrong, or Redis answers and refuses us, or it may evict keys.
    pub async fn connect(config: &RedisConfig, tasks: &mut Tasks) -> Result<Self, ConnectError> {
        Ok(Self {
            connection: Connection::open(config, tasks).await?,
            prefix: config.prefix.as_str().into(),
            scripts: Arc::new(Scripts::new()),
            cleared: Arc::default(),
        })
    }

    /// Whether Redis answers and can be used.
    ///
    /// # Errors
    /// [`IndexError::Unavailable`] with the reason.
    pub async fn ping(&self) -> Result<(), IndexError> {
        self.connection.ping().await
    }

    fn shard(&self, shard: i32) -> ShardKeys {
        ShardKeys(format!("{}:{{{shard}}}:", self.prefix))
    }

    fn token(&self, shard: i32, owner: Owner) -> Option<u64> {
        let cleared = self.cleared.lock().unwrap_or_else(PoisonError::into_inner);
        let (cleared_by, token) = cleared.get(&shard)?;
        (*cleared_by == owner).then_some(*token)
    }

    fn set_token(&self, shard: i32, owner: Owner, token: u64) {
        let mut cleared = self.cleared.lock().unwrap_or_else(PoisonError::into_inner);
        cleared.insert(shard, (owner, token));
    }

    fn forget_token(&self, shard: i32, owner: Owner) {
        let mut cleared = self.cleared.lock().unwrap_or_else(PoisonError::into_inner);
        if cleared.get(&shard).is_some_and(|(other, _)| *other == owner) {
            cleared.remove(&shard);
        }
    }
}

/// The names of a shard's keys.
struct ShardKeys(String);

impl ShardKeys {
    fn keys(&self, names: &[&str]) -> Vec<Value> {
        names
            .iter()
            .map(|name| format!("{}{name}", self.0).into())
            .collect()
    }

    fn prefix(&self) -> Value {
        Value::from(self.0.as_str())
    }
}

const ALL: [&str; 5] = ["meta", "due", "ended", "buckets", "idemlogs"];
/// What is counted, with what says how much it was.
const COUNTED: [&str; 4] = ["meta", "due", "ended", "buckets"];

impl Index for RedisIndex {
    async fn claim(&self, shard: i32, owner: Owner) -> Result<Option<Claimed>, IndexError> {
        let keys = self.shard(shard);
        let arguments = vec![text(owner.0), keys.prefix()];
        let answer = self
            .connection
            .run(&self.scripts.claim, keys.keys(&COUNTED), arguments);
        let mut answer = Answer::from(answer.await?);
        let Some(applied) = answer.mark()? else {
            return Ok(None);
        };
        let seal = answer.optional_bytes()?.and_then(read_seal);
        let format = match answer.optional_number()? {
            Some(format) => u32::try_from(format).map_err(|_| misunderstood("a format out of range"))?,
            None => 0,
        };
        Ok(Some(Claimed {
            applied,
            seal,
            format,
        }))
    }

    async fn clear(&self, shard: i32, owner: Owner) -> Result<(), IndexError> {
        self.forget_token(shard, owner);
        let token = fastrand::u64(..);
        let keys = self.shard(shard);
        let (mut step, mut log, mut place) = ("first", Value::from(""), Value::from("0"));
        loop {
            let arguments = vec![text(owner.0), text(token), keys.prefix(), step.into(), log, place];
            let answer = self
                .connection
                .run(&self.scripts.clear, keys.keys(&ALL), arguments);
            let mut answer = Answer::from(answer.await?);
            match answer.word()?.as_str() {
                "DONE" => break,
                "MORE" => (step, log, place) = ("next", answer.value()?, answer.value()?),
                "FENCED" => return Err(IndexError::Fenced),
                "SUPERSEDED" => {
                    let reason = "something else has emptied the shard at the same time";
                    return Err(IndexError::Unavailable(reason.to_owned()));
                }
                other => return Err(misunderstood(other)),
            }
        }
        self.set_token(shard, owner, token);
        Ok(())
    }

    async fn apply(&self, shard: i32, owner: Owner, batch: &Batch, now: Timestamp) -> Result<(), IndexError> {
        let keys = self.shard(shard);
        let token = self.token(shard, owner);
        let mut arguments = vec![
            text(owner.0),
            batch.from.into(),
            batch.to.into(),
            now.as_millis().into(),
            token.map_or_else(|| "".into(), text),
            keys.prefix(),
            batch.seal.map_or_else(|| "".into(), seal_value),
            i64::from(batch.force).into(),
        ];
        Changes::of(batch, now).write(&mut arguments);
        if arguments.len() > MOST_ARGUMENTS {
            let reason = format!("a batch of {} changes is too long", batch.changes.len());
            return Err(IndexError::Unavailable(reason));
        }
        let answer = self
            .connection
            .run(&self.scripts.apply, keys.keys(&ALL), arguments);
        let mut answer = Answer::from(answer.await?);
        match answer.word()?.as_str() {
            "OK" => {
                if token.is_some() {
                    self.forget_token(shard, owner);
                }
                Ok(())
            }
            "FENCED" => Err(IndexError::Fenced),
            "GAP" => Err(IndexError::Gap {
                found: answer.optional_number()?,
                expected: batch.from,
            }),
            other => Err(misunderstood(other)),
        }
    }

    fn usage(&self) -> Usage {
        self.connection.usage()
    }

    async fn look_up(
        &self,
        shard: i32,
        keys: &[Lookup],
        now: Timestamp,
    ) -> Result<(Option<Applied>, Vec<Option<Bytes>>), IndexError> {
        let shard = self.shard(shard);
        let (mut jobs, mut hashes) = (Vec::new(), Vec::new());
        for lookup in keys {
            match lookup {
                Lookup::Job(id) => jobs.extend([text(bucket(*id)), id_value(*id)]),
                Lookup::Key(hash) => hashes.push(Value::from(&hash[..])),
            }
        }
        let mut arguments = vec![shard.prefix(), number(jobs.len() / 2)];
        arguments.append(&mut jobs);
        arguments.append(&mut hashes);
        let answer = self
            .connection
            .run(&self.scripts.look_up, shard.keys(&COUNTED), arguments);
        let mut answer = Answer::from(answer.await?);
        let Some(mark) = answer.mark()? else {
            return Ok((None, vec![None; keys.len()]));
        };
        let mut found = vec![None; keys.len()];
        // Jobs come first, then keys.
        for (lookup, found) in keys.iter().zip(&mut found) {
            if let Lookup::Job(_) = lookup {
                *found = answer.optional_bytes()?;
            }
        }
        for (lookup, found) in keys.iter().zip(&mut found) {
            if let Lookup::Key(_) = lookup {
                *found = answer.optional_bytes()?.and_then(|stored| key_value(stored, now));
            }
        }
        Ok((Some(mark), found))
    }

    async fn ahead(
        &self,
        shard: i32,
        after: Option<Cursor>,
        until: Timestamp,
        limit: usize,
        bytes: usize,
    ) -> Result<DueScan, IndexError> {
        let keys = self.shard(shard);
        let (after_due, after_id) = match after {
            Some(cursor) => (score(cursor.due), id_value(cursor.id)),
            None => ("".into(), "".into()),
        };
        let arguments = vec![
            keys.prefix(),
            score(until),
            number(limit),
            number(bytes),
            after_due,
            after_id,
        ];
        let answer = self
            .connection
            .run(&self.scripts.ahead, keys.keys(&COUNTED), arguments);
        let mut answer = Answer::from(answer.await?);
        let Some(applied) = answer.mark()? else {
            return Ok(DueScan {
                applied: None,
                rows: Vec::new(),
                is_complete: true,
            });
        };
        let is_complete = answer.number()? == 1;
        let mut rows = Vec::new();
        while !answer.is_empty() {
            let id = answer.id()?;
            let due = Timestamp::from_millis(answer.number()?);
            rows.push(Row {
                cursor: Cursor { due, id },
                record: answer.bytes()?,
            });
        }
        Ok(DueScan {
            applied: Some(applied),
            rows,
            is_complete,
        })
    }

    async fn forgettable(
        &self,
        shard: i32,
        now: Timestamp,
        limit: usize,
    ) -> Result<(Option<Applied>, Vec<JobId>), IndexError> {
        let keys = self.shard(shard).keys(&COUNTED);
        let arguments = vec![score(now), number(limit)];
        let answer = self.connection.run(&self.scripts.forgettable, keys, arguments);
        let mut answer = Answer::from(answer.await?);
        let applied = answer.mark()?;
        let mut ids = Vec::new();
        while !answer.is_empty() {
            ids.push(answer.id()?);
        }
        Ok((applied, ids))
    }

    async fn stats(&self, shard: i32, now: Timestamp, minutes: u32) -> Result<ShardStats, IndexError> {
        let keys = self.shard(shard).keys(&["meta", "due"]);
        let arguments = vec![score(now), minutes.into()];
        let answer = self.connection.run(&self.scripts.stats, keys, arguments);
        let mut answer = Answer::from(answer.await?);
        if answer.is_empty() {
            return Ok(ShardStats {
                per_minute: vec![0; usize::try_from(minutes).unwrap_or(usize::MAX)],
                ..ShardStats::default()
            });
        }
        let mut stats = ShardStats {
            scheduled: answer.count()?,
            due: answer.count()?,
            next_due: answer.optional_number()?.map(Timestamp::from_millis),
            per_minute: Vec::new(),
        };
        while !answer.is_empty() {
            stats.per_minute.push(answer.count()?);
        }
        Ok(stats)
    }
}

/// What a batch comes to, in the order in which the script takes it.
#[derive(Default)]
struct Changes {
    buckets: BTreeMap<u64, Bucket>,
    key_logs: BTreeMap<i64, KeyLog>,
}

#[derive(Default)]
struct Bucket {
    /// Due time, id and record of each.
    waiting: Vec<Value>,
    /// Time to forget it, id and record of each.
    ended: Vec<Value>,
    /// Ids.
    forgotten: Vec<Value>,
}

struct KeyLog {
    life: i64,
    /// Hash and value of each.
    keys: Vec<Value>,
}

impl Changes {
    /// The newest of a job and of a key holds.
    fn of(batch: &Batch, now: Timestamp) -> Self {
        let mut changes = Self::default();
        let (mut jobs, mut keys) = (HashSet::<JobId>::new(), HashSet::<KeyHash>::new());
        for change in batch.changes.iter().rev() {
            let key = match &change.effect {
                Effect::Waits { key, .. } | Effect::Ended { key, .. } => key.as_ref(),
                Effect::Forgotten => None,
            };
            if jobs.insert(change.id) {
                changes.add(change.id, &change.effect);
            }
            if let Some(key) = key
                && key.expires > now
                && keys.insert(key.hash)
            {
                changes.add_key(key, now);
            }
        }
        changes
    }

    fn add(&mut self, id: JobId, effect: &Effect) {
        let bucket = self.buckets.entry(bucket(id)).or_default();
        let id = id_value(id);
        match effect {
            Effect::Waits { due, record, .. } => {
                bucket.waiting.extend([score(*due), id, record.clone().into()]);
            }
            Effect::Ended { forget, record, .. } => {
                bucket.ended.extend([score(*forget), id, record.clone().into()]);
            }
            Effect::Forgotten => bucket.forgotten.push(id),
        }
    }

    fn add_key(&mut self, key: &KeyEntry, now: Timestamp) {
        let expires = key.expires.as_millis();
        let log = self.key_logs.entry(expires >> LOG_BITS).or_insert_with(|| {
            let end = (expires >> LOG_BITS)
                .saturating_add(1)
                .saturating_mul(1 << LOG_BITS);
            let life = end
                .saturating_sub(now.as_millis())
                .saturating_add(EXPIRY_MARGIN_MS);
            KeyLog {
                life: life.clamp(1, LAST_MILLIS / 4),
                keys: Vec::new(),
            }
        });
        let value = [&expires.to_be_bytes()[..], &key.value].concat();
        log.keys
            .extend([Value::from(&key.hash[..]), Bytes::from(value).into()]);
    }

    fn write(self, arguments: &mut Vec<Value>) {
        fn list(arguments: &mut Vec<Value>, values: Vec<Value>, width: usize) {
            arguments.push(number(values.len() / width));
            arguments.extend(values);
        }
        arguments.push(number(self.buckets.len()));
        for (name, bucket) in self.buckets {
            arguments.push(text(name));
            list(arguments, bucket.waiting, 3);
            list(arguments, bucket.ended, 3);
            list(arguments, bucket.forgotten, 1);
        }
        arguments.push(number(self.key_logs.len()));
        for (name, log) in self.key_logs {
            arguments.extend([name.into(), log.life.into()]);
            list(arguments, log.keys, 2);
        }
    }
}

/// Redis and Lua have numbers of 53 bits; what is longer is text.
fn text(number: u64) -> Value {
    number.to_string().into()
}

fn number(number: usize) -> Value {
    i64::try_from(number).unwrap_or(i64::MAX).into()
}

fn score(time: Timestamp) -> Value {
    time.as_millis().clamp(-LAST_MILLIS, LAST_MILLIS).into()
}

fn id_value(id: JobId) -> Value {
    Value::from(&id.to_bytes()[..])
}

/// 8 bytes of the offset, then the hash.
fn seal_value(seal: LastRecordDigest) -> Value {
    Bytes::from([&seal.offset.to_be_bytes()[..], &seal.hash].concat()).into()
}

fn read_seal(mut stored: Bytes) -> Option<LastRecordDigest> {
    let offset = stored.try_get_i64().ok()?;
    let hash = stored.as_ref().try_into().ok()?;
    Some(LastRecordDigest { offset, hash })
}

/// Without the highest bit, which no offset has, it is a number that Lua has, too.
fn bucket(id: JobId) -> u64 {
    (id.offset() & (u64::MAX >> 1)) >> BUCKET_BITS
}

/// The value of an idempotency key, unless it has expired.
fn key_value(mut stored: Bytes, now: Timestamp) -> Option<Bytes> {
    let expires = stored.try_get_i64().ok()?;
    (Timestamp::from_millis(expires) > now).then_some(stored)
}

/// What a script gave, taken value by value.
struct Answer(std::vec::IntoIter<Value>);

impl From<Vec<Value>> for Answer {
    fn from(values: Vec<Value>) -> Self {
        Self(values.into_iter())
    }
}

impl Answer {
    fn is_empty(&self) -> bool {
        self.0.as_slice().is_empty()
    }

    fn value(&mut self) -> Result<Value, IndexError> {
        self.0.next().ok_or_else(|| misunderstood("nothing"))
    }

    fn word(&mut self) -> Result<String, IndexError> {
        let value = self.value()?;
        value.into_string().ok_or_else(|| misunderstood("no word"))
    }

    fn number(&mut self) -> Result<i64, IndexError> {
        let value = self.value()?;
        value.as_i64().ok_or_else(|| misunderstood("no number"))
    }

    fn count(&mut self) -> Result<u64, IndexError> {
        u64::try_from(self.number()?).map_err(|_| misunderstood("a negative number"))
    }

    fn optional_number(&mut self) -> Result<Option<i64>, IndexError> {
        if self.0.as_slice().first().is_some_and(Value::is_null) {
            self.value()?;
            return Ok(None);
        }
        self.number().map(Some)
    }

    fn bytes(&mut self) -> Result<Bytes, IndexError> {
        self.optional_bytes()?.ok_or_else(|| misunderstood("no bytes"))
    }

    fn optional_bytes(&mut self) -> Result<Option<Bytes>, IndexError> {
        match self.value()? {
            Value::Null => Ok(None),
            value => match value.into_bytes() {
                Some(bytes) => Ok(Some(bytes)),
                None => Err(misunderstood("no bytes")),
            },
        }
    }

    fn id(&mut self) -> Result<JobId, IndexError> {
        let bytes: Result<[u8; 16], _> = self.bytes()?.as_ref().try_into();
        bytes.map(JobId::from_bytes).map_err(|_| misunderstood("no id"))
    }

    /// Each script that reads gives the mark first.
    fn mark(&mut self) -> Result<Option<Applied>, IndexError> {
        let (offset, at) = (self.optional_number()?, self.optional_number()?);
        Ok(offset.zip(at).map(|(offset, at)| Applied {
            offset,
            at: Timestamp::from_millis(at),
        }))
    }
}

fn misunderstood(found: &str) -> IndexError {
    IndexError::Unavailable(format!("a script gave {found} where something else was expected"))
}
