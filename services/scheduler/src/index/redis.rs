//! The index in Redis.
//!
//! The keys of shard `p` have the prefix `PREFIX:{p}:`. They share the hash tag `{p}`, and so a node of a cluster.
//!
//! | key | content |
//! |---|---|
//! | `meta` | hash: the checkpoint (`offset`, `at`, the digest of the last record in `seal`, `counts`), `owner`, `cleared` or `clearing` with the token of a clear, and `format`, the record format that a scheduler must support to use the index, unless it is 0 |
//! | `due` | sorted set: the ids of scheduled jobs by due time |
//! | `ended` | sorted set: the ids of ended jobs by the time at which they are forgotten |
//! | `job:<n>` | hash: id to record, for the jobs whose requests have the offsets `n * 1024` to `n * 1024 + 1023` |
//! | `buckets` | set of all `n` of `job:<n>` |
//! | `idem:<hash>` | expiry (8 bytes) and value of an idempotency key |
//! | `idemlog:<n>` | string: the hashes of the keys that expire in time slice `n` |
//! | `idemlogs` | set of all `n` of `idemlog:<n>` |
//!
//! With `buckets` and the logs, a shard can be cleared without a scan of all keys. A log takes 16 bytes per idempotency key;
//! a set would take more than the key itself.
//!
//! Each method is one Lua script, so it reads a snapshot and changes all or nothing. The exception is [`Index::clear`], which
//! runs many small scripts. The first one removes the checkpoint, and without it the rest of the shard is not visible.
//!
//! A command whose reply was lost can be executed much later, after the client has reconnected. That is harmless: a batch is
//! applied only if it continues the checkpoint, and to a cleared shard only with the token of the latest clear.
//!
//! Single keys can get lost, by eviction or by hand. `counts` stores the number of members of `due`, `ended` and `buckets`
//! after each change. A script that finds other numbers, or no record of a scheduled job, removes the checkpoint, and the
//! shard is rebuilt.
//!
//! The scripts derive the names of buckets and idempotency keys. All of them have the shard's hash tag.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf as _, Bytes};
use fred::prelude::Value;
use prometheus_client::registry::Registry;
use redeliver_core::Timestamp;
use redeliver_runtime::config::RedisConfig;
use redeliver_runtime::tasks::Tasks;

pub use self::connection::{ConnectError, Evicts};
use self::connection::{Connection, Script};
use super::{
    Applied, Batch, Checkpoint, Cursor, DueScan, Effect, Index, IndexError, KeyEntry, LastRecordDigest,
    Lookup, Owner, Row, ShardStats, Usage,
};
use crate::job::{JobId, KeyHash};

mod connection;

/// The number of offsets per bucket is 2 to the power of this.
const BUCKET_BITS: u32 = 10;
/// The length of the time slice of one log is 2 to the power of this in ms, about four minutes.
const LOG_BITS: u32 = 18;
/// How long Redis keeps a log and its keys after the end of the time slice. A lookup compares the stored expiry with the
/// clock of the caller, which may be behind the clock of Redis.
const EXPIRY_MARGIN_MS: i64 = 60_000;
/// Scores of sorted sets are exact up to 53 bits.
const LAST_MILLIS: i64 = 1 << 53;
/// Before version 7, Redis accepts at most 1,048,576 arguments per command.
const MAX_ARGUMENTS: usize = 1_000_000;

/// An index in Redis; clones share its connection.
#[derive(Clone, Debug)]
pub struct RedisIndex {
    connection: Connection,
    prefix: Arc<str>,
    scripts: Arc<Scripts>,
    /// By shard, the token of a clear after which nothing has been applied yet.
    cleared: Arc<Mutex<HashMap<i32, (Owner, u64)>>>,
}

#[derive(Debug)]
struct Scripts {
    claim: Script,
    clear: Script,
    apply: Script,
    look_up: Script,
    due_scan: Script,
    forgettable: Script,
    known_keys: Script,
    stats: Script,
}

impl Scripts {
    fn new() -> Self {
        /// A script with the functions that check the checkpoint.
        macro_rules! with_checkpoint {
            ($file:literal) => {
                Script::new(concat!(include_str!("redis/mark.lua"), include_str!($file)))
            };
        }
        Self {
            claim: with_checkpoint!("redis/claim.lua"),
            clear: Script::new(include_str!("redis/clear.lua")),
            apply: with_checkpoint!("redis/apply.lua"),
            look_up: with_checkpoint!("redis/look_up.lua"),
            due_scan: with_checkpoint!("redis/ahead.lua"),
            forgettable: with_checkpoint!("redis/forgettable.lua"),
            known_keys: Script::new(include_str!("redis/known_keys.lua")),
            stats: Script::new(include_str!("redis/stats.lua")),
        }
    }
}

impl RedisIndex {
    /// Checks the settings, including the file of CA certificates, without connecting.
    ///
    /// # Errors
    /// When the settings are invalid.
    pub fn check(config: &RedisConfig) -> Result<(), ConnectError> {
        connection::check(config)
    }

    /// Connects to Redis, and reconnects whenever the connection is lost, while the tasks run. An unavailable Redis is not an
    /// error: until it is available, all methods fail with [`IndexError::Unavailable`].
    ///
    /// # Errors
    /// When the settings are invalid, Redis refuses the connection, or it may evict keys.
    pub async fn connect(config: &RedisConfig, tasks: &mut Tasks) -> Result<Self, ConnectError> {
        Ok(Self {
            connection: Connection::open(config, tasks).await?,
            prefix: config.prefix.as_str().into(),
            scripts: Arc::new(Scripts::new()),
            cleared: Arc::default(),
        })
    }

    /// Registers the metric of the connection.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "scheduler_redis_up",
            "1 while Redis replies, otherwise 0",
            self.connection.up(),
        );
    }

    /// Checks that Redis replies and can be used.
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

/// The prefix of a shard's keys.
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
/// The keys whose members are counted, after the key with the stored counts.
const COUNTED: [&str; 4] = ["meta", "due", "ended", "buckets"];

impl Index for RedisIndex {
    async fn claim(&self, shard: i32, owner: Owner) -> Result<Option<Checkpoint>, IndexError> {
        let keys = self.shard(shard);
        let arguments = vec![text(owner.0), keys.prefix()];
        let reply = self
            .connection
            .run(&self.scripts.claim, keys.keys(&COUNTED), arguments);
        let mut reply = Reply::from(reply.await?);
        let Some(applied) = reply.applied()? else {
            return Ok(None);
        };
        let last_record = reply.optional_bytes()?.and_then(read_digest);
        let format = match reply.optional_number()? {
            Some(format) => u32::try_from(format).map_err(|_| unexpected("a format out of range"))?,
            None => 0,
        };
        Ok(Some(Checkpoint {
            applied,
            last_record,
            format,
        }))
    }

    async fn clear(&self, shard: i32, owner: Owner) -> Result<(), IndexError> {
        self.forget_token(shard, owner);
        let token = fastrand::u64(..);
        let keys = self.shard(shard);
        let (mut step, mut log, mut position) = ("first", Value::from(""), Value::from("0"));
        loop {
            let arguments = vec![
                text(owner.0),
                text(token),
                keys.prefix(),
                step.into(),
                log,
                position,
            ];
            let reply = self
                .connection
                .run(&self.scripts.clear, keys.keys(&ALL), arguments);
            let mut reply = Reply::from(reply.await?);
            match reply.word()?.as_str() {
                "DONE" => break,
                "MORE" => (step, log, position) = ("next", reply.value()?, reply.value()?),
                "FENCED" => return Err(IndexError::Fenced),
                "SUPERSEDED" => {
                    let reason = "another clear of the shard has started";
                    return Err(IndexError::Unavailable(reason.to_owned()));
                }
                other => return Err(unexpected(other)),
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
            batch.last_record.map_or_else(|| "".into(), digest_value),
            i64::from(batch.force).into(),
        ];
        BatchArguments::of(batch, now).write(&mut arguments);
        if arguments.len() > MAX_ARGUMENTS {
            let reason = format!(
                "a batch of {} changes has too many arguments",
                batch.changes.len()
            );
            return Err(IndexError::Unavailable(reason));
        }
        let reply = self
            .connection
            .run(&self.scripts.apply, keys.keys(&ALL), arguments);
        let mut reply = Reply::from(reply.await?);
        match reply.word()?.as_str() {
            "OK" => {
                if token.is_some() {
                    self.forget_token(shard, owner);
                }
                Ok(())
            }
            "FENCED" => Err(IndexError::Fenced),
            "GAP" => Err(IndexError::Gap {
                found: reply.optional_number()?,
                expected: batch.from,
            }),
            other => Err(unexpected(other)),
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
        let reply = self
            .connection
            .run(&self.scripts.look_up, shard.keys(&COUNTED), arguments);
        let mut reply = Reply::from(reply.await?);
        let Some(applied) = reply.applied()? else {
            return Ok((None, vec![None; keys.len()]));
        };
        let mut found = vec![None; keys.len()];
        // The script returns the jobs first, then the keys.
        for (lookup, found) in keys.iter().zip(&mut found) {
            if let Lookup::Job(_) = lookup {
                *found = reply.optional_bytes()?;
            }
        }
        for (lookup, found) in keys.iter().zip(&mut found) {
            if let Lookup::Key(_) = lookup {
                *found = reply.optional_bytes()?.and_then(|stored| key_value(stored, now));
            }
        }
        Ok((Some(applied), found))
    }

    async fn due_scan(
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
        let reply = self
            .connection
            .run(&self.scripts.due_scan, keys.keys(&COUNTED), arguments);
        let mut reply = Reply::from(reply.await?);
        let Some(applied) = reply.applied()? else {
            return Ok(DueScan {
                applied: None,
                rows: Vec::new(),
                is_complete: true,
            });
        };
        let is_complete = reply.number()? == 1;
        let mut rows = Vec::new();
        while !reply.is_empty() {
            let id = reply.id()?;
            let due = Timestamp::from_millis(reply.number()?);
            rows.push(Row {
                cursor: Cursor { due, id },
                record: reply.bytes()?,
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
        let reply = self.connection.run(&self.scripts.forgettable, keys, arguments);
        let mut reply = Reply::from(reply.await?);
        let applied = reply.applied()?;
        let mut ids = Vec::new();
        while !reply.is_empty() {
            ids.push(reply.id()?);
        }
        Ok((applied, ids))
    }

    async fn known_keys(&self, shard: i32, _now: Timestamp) -> Result<u64, IndexError> {
        let shard = self.shard(shard);
        let arguments = vec![shard.prefix()];
        let reply = self
            .connection
            .run(&self.scripts.known_keys, shard.keys(&["idemlogs"]), arguments);
        let count = Reply::from(reply.await?).number()?;
        u64::try_from(count).map_err(|_| unexpected("a negative number of keys"))
    }

    async fn stats(&self, shard: i32, now: Timestamp, minutes: u32) -> Result<ShardStats, IndexError> {
        let keys = self.shard(shard).keys(&["meta", "due"]);
        let arguments = vec![score(now), minutes.into()];
        let reply = self.connection.run(&self.scripts.stats, keys, arguments);
        let mut reply = Reply::from(reply.await?);
        if reply.is_empty() {
            return Ok(ShardStats {
                per_minute: vec![0; usize::try_from(minutes).unwrap_or(usize::MAX)],
                ..ShardStats::default()
            });
        }
        let mut stats = ShardStats {
            scheduled: reply.count()?,
            due: reply.count()?,
            next_due: reply.optional_number()?.map(Timestamp::from_millis),
            per_minute: Vec::new(),
        };
        while !reply.is_empty() {
            stats.per_minute.push(reply.count()?);
        }
        Ok(stats)
    }
}

/// The arguments of a batch, in the order of the script.
#[derive(Default)]
struct BatchArguments {
    buckets: BTreeMap<u64, Bucket>,
    key_logs: BTreeMap<i64, KeyLog>,
}

#[derive(Default)]
struct Bucket {
    /// Due time, id and record of each job.
    waiting: Vec<Value>,
    /// Time to forget it, id and record of each job.
    ended: Vec<Value>,
    forgotten: Vec<Value>,
}

struct KeyLog {
    life: i64,
    /// Hash and value of each key.
    keys: Vec<Value>,
}

impl BatchArguments {
    /// Only the last change of each job and of each key is sent.
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

/// A number as text, because numbers of Lua are exact only up to 53 bits.
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

/// The offset (8 bytes), then the hash.
fn digest_value(last_record: LastRecordDigest) -> Value {
    Bytes::from([&last_record.offset.to_be_bytes()[..], &last_record.hash].concat()).into()
}

fn read_digest(mut stored: Bytes) -> Option<LastRecordDigest> {
    let offset = stored.try_get_i64().ok()?;
    let hash = stored.as_ref().try_into().ok()?;
    Some(LastRecordDigest { offset, hash })
}

/// The bucket of a job. The highest bit is never set in an offset; without it, the bucket is an exact number of Lua.
fn bucket(id: JobId) -> u64 {
    (id.offset() & (u64::MAX >> 1)) >> BUCKET_BITS
}

/// The value of an idempotency key, unless it has expired.
fn key_value(mut stored: Bytes, now: Timestamp) -> Option<Bytes> {
    let expires = stored.try_get_i64().ok()?;
    (Timestamp::from_millis(expires) > now).then_some(stored)
}

/// The reply of a script, read value by value.
struct Reply(std::vec::IntoIter<Value>);

impl From<Vec<Value>> for Reply {
    fn from(values: Vec<Value>) -> Self {
        Self(values.into_iter())
    }
}

impl Reply {
    fn is_empty(&self) -> bool {
        self.0.as_slice().is_empty()
    }

    fn value(&mut self) -> Result<Value, IndexError> {
        self.0.next().ok_or_else(|| unexpected("too few values"))
    }

    fn word(&mut self) -> Result<String, IndexError> {
        let value = self.value()?;
        value.into_string().ok_or_else(|| unexpected("not a string"))
    }

    fn number(&mut self) -> Result<i64, IndexError> {
        let value = self.value()?;
        value.as_i64().ok_or_else(|| unexpected("not a number"))
    }

    fn count(&mut self) -> Result<u64, IndexError> {
        u64::try_from(self.number()?).map_err(|_| unexpected("a negative number"))
    }

    fn optional_number(&mut self) -> Result<Option<i64>, IndexError> {
        if self.0.as_slice().first().is_some_and(Value::is_null) {
            self.value()?;
            return Ok(None);
        }
        self.number().map(Some)
    }

    fn bytes(&mut self) -> Result<Bytes, IndexError> {
        self.optional_bytes()?.ok_or_else(|| unexpected("not bytes"))
    }

    fn optional_bytes(&mut self) -> Result<Option<Bytes>, IndexError> {
        match self.value()? {
            Value::Null => Ok(None),
            value => match value.into_bytes() {
                Some(bytes) => Ok(Some(bytes)),
                None => Err(unexpected("not bytes")),
            },
        }
    }

    fn id(&mut self) -> Result<JobId, IndexError> {
        let bytes: Result<[u8; 16], _> = self.bytes()?.as_ref().try_into();
        bytes
            .map(JobId::from_bytes)
            .map_err(|_| unexpected("not a job id"))
    }

    /// The offset of the checkpoint and its time, with which the reply of each query begins.
    fn applied(&mut self) -> Result<Option<Applied>, IndexError> {
        let (offset, at) = (self.optional_number()?, self.optional_number()?);
        Ok(offset.zip(at).map(|(offset, at)| Applied {
            offset,
            at: Timestamp::from_millis(at),
        }))
    }
}

fn unexpected(found: &str) -> IndexError {
    IndexError::Unavailable(format!("unexpected reply of a script: {found}"))
}
