//! The index in Redis.
//!
//! The keys of shard `p` have the prefix `PREFIX:v2:{p}:`. They share the hash tag `{p}`, and so a node of a cluster.
//!
//! | key | content |
//! |---|---|
//! | `meta` | hash: the checkpoint (`offset`, `at`, the digest of the last record in `seal`, `counts`), `owner`, `installation`, `topic`, `seen`, `cleared` or `clearing` with the token of a clear, `format`, see [`FORMAT`], and `released:<pipeline>` with a [`FinishedRelease`] |
//! | `due:<flow>` | sorted set: the ids of the scheduled jobs of a flow by due time. `<flow>` is priority (0 is high), topic and application, such as `1:sms-jobs:sms` |
//! | `flows` | sorted set: the flows that have scheduled jobs, by the due time of their first job |
//! | `sizes` | hash: flow to the number of its scheduled jobs, for the same flows |
//! | `ended` | sorted set: the ids of ended jobs with a record by the time at which they are forgotten |
//! | `recent` | list: the same ids, each followed by the time of the end, in the order in which the jobs ended; can contain others that are not in `ended` any more |
//! | `evicted:<n>` | list: the ids of ended jobs without a record that are forgotten in time slice `n` |
//! | `evicted` | sorted set of all `n` of `evicted:<n>` |
//! | `job:<n>` | hash: id to record, for the jobs whose requests have the offsets `n * 1024` to `n * 1024 + 1023` |
//! | `buckets` | set of all `n` of `job:<n>` |
//! | `idem:<hash>` | expiry (8 bytes) and value of an idempotency key |
//! | `idemlog:<b>.<n>` | string: the hashes of the keys that expire in time slice `n` of 2 to the power of `b` ms |
//! | `idemlogs` | set of all `<b>.<n>` of `idemlog:<b>.<n>` |
//!
//! With `buckets` and the logs, a shard can be cleared without a scan of all keys. A log takes 16 bytes per idempotency key;
//! a set would take more than the key itself. A key that is used again and again, as by debouncing, is in one log per time slice, so the
//! slices grow with the time for which keys are in use: at most 32 of them cover it.
//!
//! # Ended jobs
//! [`RedisIndex::with_max_ended`] ended jobs per shard have a record, and those that ended within [`MIN_KEPT`](super::MIN_KEPT). When
//! others end, the jobs that ended first are *evicted*: they lose their record and the entry in `ended`, and only their id stays in a log
//! until they are forgotten, 22 bytes instead of several hundred. The log must stay: without the tombstone that forgetting writes, the
//! state topic would keep the job for ever. The time slices of these logs have 2^18 ms, and a job in a log is forgotten after the end of
//! the slice. A log expires a week after that, for the case that Redis loses the key `evicted`, by which a clear finds it. A
//! log that expires before its jobs are forgotten is a lost one: the shard is rebuilt.
//!
//! # Scripts
//! Each method is one Lua script, so it reads a snapshot and changes all or nothing. The exceptions are [`Index::clear`],
//! [`Index::stats`] and [`Index::list`], which run several small scripts, so that none blocks Redis for long. The first script of
//! a clear removes the checkpoint, and without it the rest of the shard is not visible.
//!
//! A change names the flow of its job, except [`Forgotten`](super::Effect::Forgotten). A job that is forgotten has usually ended. If it has not,
//! because an operator has deleted its state record, small scripts search for it in all flows before the batch is applied.
//!
//! A command whose reply was lost can be executed much later, after the client has reconnected. That is harmless: a batch is
//! applied only if it continues the checkpoint, and to a cleared shard only with the token of the latest clear.
//!
//! Single keys can get lost, by eviction or by hand. `counts` stores the number of members of `flows`, `sizes`, `ended`,
//! `buckets`, `recent` and `evicted` after each change, and `sizes` that of each due set. A script that finds other numbers, or no record of a scheduled
//! job, removes the checkpoint, and the shard is rebuilt. A script compares the sizes only of the flows that it uses, and a claim
//! those of all flows. So the time of a script depends on the number of flows that it uses, but not on the number of all flows.
//!
//! The scripts derive the names of due sets, buckets and idempotency keys. All of them have the shard's hash tag.
//!
//! # Installations
//! `installation` names the Kafka cluster and the state topic whose copy the shard is, and `topic` is the id of that topic. Each script checks both, the owner, and
//! the offset that the caller expects (`redis/access.lua`). A claim by another installation is refused while `seen`, the time of Redis at which the owner has last
//! used the shard, is less than [`IN_USE`] ago. Owners use their shards every few seconds. Otherwise, nothing of the content is used, as after the state topic was
//! created again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use fred::prelude::Value;
use prometheus_client::registry::Registry;
use redeliver_core::{Timestamp, mutant};
use redeliver_kafka::TopicId;
use redeliver_runtime::tasks::Tasks;

use self::batch::{BatchArguments, LocatedJobs};
pub use self::config::RedisConfig;
pub use self::connection::{ConnectError, Evicts};
use self::connection::{Connection, Script};
use self::reply::{Reply, unexpected};
use super::{
    Applied, Batch, Checkpoint, Cursor, FORMAT, FinishedRelease, FlowPosition, FlowScan, Index, IndexError,
    Installation, LastRecordDigest, Lookup, Owner, Row, Scan, ScanRequest, ShardStats, Usage, flow_key,
    is_requested, min_kept_millis,
};
use crate::job::{Flow, JobId};

mod batch;
mod config;
mod connection;
mod reply;

/// The number of offsets per bucket is 2 to the power of this.
const BUCKET_BITS: u32 = 10;
/// Scores of sorted sets are exact up to 53 bits.
const LAST_MILLIS: i64 = 1 << 53;
/// Before version 7, Redis accepts at most 1,048,576 arguments per command.
const MAX_ARGUMENTS: usize = 1_000_000;
/// The maximum number of flows that one script counts, and of flows times minutes, so that Redis is not blocked for long.
const MAX_COUNTED: (usize, usize) = (100, 20_000);
/// The maximum number of flows times jobs that one script searches.
const MAX_SEARCHED: usize = 50_000;
/// How long after its last use a shard belongs to its installation.
pub const IN_USE: Duration = Duration::from_secs(30);

/// An index in Redis; clones share its connection.
#[derive(Clone, Debug)]
pub struct RedisIndex {
    connection: Connection,
    prefix: Arc<str>,
    installation: Arc<Installation>,
    scripts: Arc<Scripts>,
    max_ended: usize,
    /// See [`Index::of_owner`].
    owner: Option<(Owner, Option<i64>)>,
    /// By shard, the token of a clear after which nothing has been applied yet.
    cleared: Arc<Mutex<HashMap<i32, (Owner, u64)>>>,
}

#[derive(Debug)]
struct Scripts {
    claim: Script,
    in_use: Script,
    clear: Script,
    apply: Script,
    look_up: Script,
    scan: Script,
    finished_release: Script,
    finish_release: Script,
    forgettable: Script,
    flows: Script,
    locate: Script,
    known_keys: Script,
    stats: Script,
}

impl Scripts {
    fn new() -> Self {
        /// A script for callers of the shard's installation, and for its owner if the caller says so.
        macro_rules! guarded {
            ($file:literal) => {
                Script::new(concat!(
                    include_str!("redis/mark.lua"),
                    include_str!("redis/access.lua"),
                    include_str!($file)
                ))
            };
        }
        /// A script that finds out whose the shard is.
        macro_rules! unguarded {
            ($file:literal) => {
                Script::new(concat!(include_str!("redis/mark.lua"), include_str!($file)))
            };
        }
        Self {
            claim: unguarded!("redis/claim.lua"),
            in_use: unguarded!("redis/in_use.lua"),
            clear: guarded!("redis/clear.lua"),
            apply: guarded!("redis/apply.lua"),
            look_up: guarded!("redis/look_up.lua"),
            scan: guarded!("redis/scan.lua"),
            finished_release: guarded!("redis/finished_release.lua"),
            finish_release: guarded!("redis/finish_release.lua"),
            forgettable: guarded!("redis/forgettable.lua"),
            flows: guarded!("redis/flows.lua"),
            locate: guarded!("redis/locate.lua"),
            known_keys: guarded!("redis/known_keys.lua"),
            stats: guarded!("redis/stats.lua"),
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

    /// Connects to Redis, for an installation whose keys have this prefix, and reconnects whenever the connection is lost, while the tasks run. An unavailable Redis is not an
    /// error: until it is available, all methods fail with [`IndexError::Unavailable`].
    ///
    /// # Errors
    /// When the settings are invalid, Redis refuses the connection, or it may evict keys.
    pub async fn connect(
        config: &RedisConfig,
        prefix: &str,
        installation: Installation,
        tasks: &mut Tasks,
    ) -> Result<Self, ConnectError> {
        Ok(Self {
            connection: Connection::open(config, tasks).await?,
            prefix: prefix.into(),
            installation: Arc::new(installation),
            owner: None,
            scripts: Arc::new(Scripts::new()),
            max_ended: usize::MAX,
            cleared: Arc::default(),
        })
    }

    /// Limits the number of ended jobs per shard that have a record, without those that ended within [`MIN_KEPT`](super::MIN_KEPT).
    #[must_use]
    pub fn with_max_ended(self, max_ended: usize) -> Self {
        Self { max_ended, ..self }
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
        ShardKeys(format!("{}:v2:{{{shard}}}:", self.prefix))
    }

    /// The index for an owner that expects nothing of the checkpoint.
    fn owned_by(&self, owner: Owner) -> Self {
        Self {
            owner: Some((owner, None)),
            ..self.clone()
        }
    }

    /// Another installation that uses this shard, and so the prefix.
    ///
    /// # Errors
    /// [`IndexError::Unavailable`] with the reason.
    pub async fn used_by_another(&self, shard: i32) -> Result<Option<String>, IndexError> {
        let arguments = vec![text(IN_USE.as_secs())];
        let keys = self.shard(shard);
        let mut reply = self
            .run(&self.scripts.in_use, keys.keys(&["meta"]), arguments)
            .await?;
        match reply.optional_bytes()? {
            Some(other) => Ok(Some(String::from_utf8_lossy(&other).into_owned())),
            None => Ok(None),
        }
    }

    /// Runs a script for the owner, if there is one.
    ///
    /// # Errors
    /// [`IndexError::Fenced`] or [`IndexError::Gap`] if the script finds another owner, or a checkpoint that is not as expected.
    async fn run(
        &self,
        script: &Script,
        keys: Vec<Value>,
        mut arguments: Vec<Value>,
    ) -> Result<Reply, IndexError> {
        let Installation {
            cluster,
            topic,
            topic_id,
        } = &*self.installation;
        let id = topic_id.map_or_else(String::new, |id| format!("{:032x}", id.bits()));
        let (owner, expected) = self.owner.unzip();
        let expected = expected.flatten();
        arguments.extend([
            format!("{cluster}/{topic}").into(),
            id.into(),
            owner.map_or_else(|| "".into(), |owner| text(owner.0)),
            expected.map_or_else(|| "".into(), |offset| offset.to_string().into()),
            FORMAT.to_string().into(),
        ]);
        check_arguments(&arguments)?;
        Reply::from(self.connection.run(script, keys, arguments).await?).checked()
    }

    /// Runs the steps of the script that clears a shard.
    async fn run_clear(&self, keys: &ShardKeys, token: Value) -> Result<Cleared, IndexError> {
        let (mut step, mut log, mut position) = ("first", Value::from(""), Value::from("0"));
        loop {
            let arguments = vec![token.clone(), keys.prefix(), step.into(), log, position];
            let mut reply = self.run(&self.scripts.clear, keys.keys(&ALL), arguments).await?;
            match reply.word()?.as_str() {
                "DONE" => return Ok(Cleared::Completely),
                "MORE" => (step, log, position) = ("next", reply.value()?, reply.value()?),
                "SUPERSEDED" => return Ok(Cleared::Superseded),
                other => return Err(unexpected(other)),
            }
        }
    }

    /// Applies a batch, unless it forgets scheduled jobs whose flow is unknown.
    async fn try_apply(
        &self,
        (shard, owner, batch, now): (i32, Owner, &Batch, Timestamp),
        located: &LocatedJobs,
    ) -> Result<Outcome, IndexError> {
        let keys = self.shard(shard);
        let token = self.token(shard, owner);
        let mut arguments = vec![
            batch.last_record.map_or_else(|| "".into(), digest_value),
            batch.from.into(),
            batch.to.into(),
            now.as_millis().into(),
            token.map_or_else(|| "".into(), text),
            keys.prefix(),
            text(min_kept_millis()),
            i64::from(batch.force).into(),
            number(self.max_ended),
        ];
        BatchArguments::of(batch, now, located).write(&mut arguments);
        let mut reply = self.run(&self.scripts.apply, keys.keys(&ALL), arguments).await?;
        match reply.word()?.as_str() {
            "OK" => {
                if token.is_some() {
                    self.forget_token(shard, owner);
                }
                Ok(Outcome::Applied)
            }
            "LOCATE" => reply.ids().map(Outcome::Unlocated),
            other => Err(unexpected(other)),
        }
    }

    /// Searches for jobs in all flows, in small steps.
    async fn locate(&self, keys: &ShardKeys, mut ids: Vec<JobId>) -> Result<LocatedJobs, IndexError> {
        let mut located = LocatedJobs::new();
        let (_, mut flows) = self.flows(keys).await?;
        while !ids.is_empty() && !flows.is_empty() {
            let some = (MAX_SEARCHED / ids.len()).clamp(1, flows.len());
            let some: Vec<Flow> = flows.drain(..some).collect();
            let mut arguments = vec![keys.prefix(), number(ids.len())];
            arguments.extend(ids.iter().map(|id| id_value(*id)));
            arguments.extend(some.iter().map(flow_value));
            let mut reply = self
                .run(&self.scripts.locate, keys.keys(&COUNTED), arguments)
                .await?;
            reply.applied()?;
            while !reply.is_empty() {
                let (id, flow) = (reply.item_of(&ids)?, reply.item_of(&some)?);
                located.insert(*id, Some(flow.clone()));
            }
            ids.retain(|id| !located.contains_key(id));
        }
        located.extend(ids.into_iter().map(|id| (id, None)));
        Ok(located)
    }

    /// The checkpoint and all flows; none without a checkpoint.
    async fn flows(&self, keys: &ShardKeys) -> Result<(Option<Applied>, Vec<Flow>), IndexError> {
        let mut reply = self
            .run(&self.scripts.flows, keys.keys(&COUNTED), Vec::new())
            .await?;
        let applied = reply.applied()?;
        let mut flows = Vec::new();
        while !reply.is_empty() {
            flows.push(reply.flow()?);
        }
        Ok((applied, flows))
    }

    /// Adds the counts of these flows, and returns whether the shard has a checkpoint.
    async fn add_stats(
        &self,
        keys: &ShardKeys,
        flows: &[Value],
        (now, minutes): (Timestamp, u32),
        stats: &mut ShardStats,
    ) -> Result<bool, IndexError> {
        let mut arguments = vec![keys.prefix(), score(now), minutes.into()];
        arguments.extend_from_slice(flows);
        let mut reply = self
            .run(&self.scripts.stats, keys.keys(&COUNTED), arguments)
            .await?;
        let Some(applied) = reply.applied()? else {
            return Ok(false);
        };
        // The oldest one, so that a caller notices an index that is rebuilt meanwhile.
        if stats.applied.is_none_or(|known| applied.offset < known.offset) {
            stats.applied = Some(applied);
        }
        stats.scheduled += reply.count()?;
        stats.due += reply.count()?;
        let next_due = reply.optional_number()?.map(Timestamp::from_millis);
        stats.next_due = [stats.next_due, next_due].into_iter().flatten().min();
        for sum in &mut stats.per_minute {
            *sum += reply.count()?;
        }
        Ok(true)
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

/// The keys whose members are counted, after the key with the stored counts.
const COUNTED: [&str; 7] = ["meta", "flows", "sizes", "ended", "buckets", "recent", "evicted"];
const ALL: [&str; 8] = [
    "meta", "flows", "sizes", "ended", "buckets", "recent", "evicted", "idemlogs",
];
/// What a batch has done.
enum Outcome {
    Applied,
    /// Nothing, because it forgets these scheduled jobs, whose flows are unknown.
    Unlocated(Vec<JobId>),
}

/// How a clear ended.
enum Cleared {
    Completely,
    /// Another clear has started.
    Superseded,
}

impl Index for RedisIndex {
    fn of_owner(&self, owner: Owner, expected: i64) -> Self {
        let owner = Some((owner, Some(expected)));
        Self {
            owner: mutant!("index-queries-without-owner", owner, None),
            ..self.clone()
        }
    }

    fn state_topic_id(&self) -> Option<TopicId> {
        self.installation.topic_id
    }

    async fn claim(&self, shard: i32, owner: Owner) -> Result<Option<Checkpoint>, IndexError> {
        let keys = self.shard(shard);
        let arguments = vec![keys.prefix(), text(IN_USE.as_secs())];
        let mut reply = self
            .owned_by(owner)
            .run(&self.scripts.claim, keys.keys(&COUNTED), arguments)
            .await?;
        if reply.is_word("IN_USE") {
            reply.value()?;
            return Err(IndexError::Unavailable(in_use(&reply.word()?)));
        }
        let Some(applied) = reply.applied()? else {
            if !reply.is_empty() && reply.number()? == 1 {
                tracing::error!(
                    shard,
                    "index is of another state topic (created again, or of another cluster); rebuilding, jobs that only the index has are lost"
                );
            }
            return Ok(None);
        };
        let last_record = reply.optional_bytes()?.and_then(read_digest);
        let format = reply.optional_number()?;
        let format = format.and_then(|format| u32::try_from(format).ok()).unwrap_or(0);
        Ok(Some(Checkpoint {
            applied,
            last_record,
            format,
        }))
    }

    async fn clear(&self, shard: i32, owner: Owner) -> Result<(), IndexError> {
        self.forget_token(shard, owner);
        let token = fastrand::u64(..);
        let index = self.owned_by(owner);
        match index.run_clear(&self.shard(shard), text(token)).await? {
            Cleared::Completely => {}
            Cleared::Superseded => {
                let reason = "another clear of the shard has started";
                return Err(IndexError::Unavailable(reason.to_owned()));
            }
        }
        self.set_token(shard, owner, token);
        Ok(())
    }

    async fn apply(&self, shard: i32, owner: Owner, batch: &Batch, now: Timestamp) -> Result<(), IndexError> {
        let call = (shard, owner, batch, now);
        let index = self.owned_by(owner);
        let forgotten = match index.try_apply(call, &LocatedJobs::new()).await? {
            Outcome::Applied => return Ok(()),
            Outcome::Unlocated(forgotten) => forgotten,
        };
        let located = index.locate(&self.shard(shard), forgotten).await?;
        match index.try_apply(call, &located).await? {
            Outcome::Applied => Ok(()),
            Outcome::Unlocated(_) => {
                let reason = "the index has changed during a search for jobs without an end";
                Err(IndexError::Unavailable(reason.to_owned()))
            }
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
        let mut reply = self
            .run(&self.scripts.look_up, shard.keys(&COUNTED), arguments)
            .await?;
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
                let stored = reply.optional_bytes()?;
                *found = stored.map(|stored| key_value(stored, now)).transpose()?.flatten();
            }
        }
        Ok((Some(applied), found))
    }

    async fn scan(&self, shard: i32, request: &ScanRequest) -> Result<Scan, IndexError> {
        let keys = self.shard(shard);
        let mut arguments = vec![
            keys.prefix(),
            score(request.until),
            score(request.now),
            number(request.jobs),
            number(request.bytes),
            number(request.rotation),
        ];
        arguments.extend(cursor_values(request.after));
        arguments.push(number(request.jobs_per_flow));
        for (flow, position) in &request.positions {
            let (cursor, until, limit) = match *position {
                FlowPosition::After { cursor, until, jobs } => {
                    (cursor, until.min(request.until), number(jobs))
                }
                FlowPosition::CountOnly => (None, request.until, (-1).into()),
            };
            arguments.push(flow_value(flow));
            arguments.extend(cursor_values(cursor));
            arguments.extend([score(until), limit]);
        }
        check_arguments(&arguments)?;
        let mut reply = self
            .run(&self.scripts.scan, keys.keys(&COUNTED), arguments)
            .await?;
        let Some(applied) = reply.applied()? else {
            return Ok(Scan::default());
        };
        let mut flows = Vec::new();
        for _ in 0..reply.count()? {
            let flow = reply.flow()?;
            let first = Timestamp::from_millis(reply.number()?);
            let (due, is_complete) = (reply.count()?, reply.number()? == 1);
            let mut rows = Vec::new();
            for _ in 0..reply.count()? {
                let id = reply.id()?;
                let due = Timestamp::from_millis(reply.number()?);
                rows.push(Row {
                    cursor: Cursor { due, id },
                    record: reply.bytes()?,
                });
            }
            flows.push(FlowScan {
                flow,
                first,
                due,
                rows,
                is_complete,
            });
        }
        Ok(Scan {
            applied: Some(applied),
            flows,
        })
    }

    async fn finished_release(
        &self,
        shard: i32,
        pipeline: &str,
    ) -> Result<(Option<Applied>, Option<FinishedRelease>), IndexError> {
        let keys = self.shard(shard);
        let arguments = vec![released_field(pipeline)];
        let mut reply = self
            .run(&self.scripts.finished_release, keys.keys(&COUNTED), arguments)
            .await?;
        let Some(applied) = reply.applied()? else {
            return Ok((None, None));
        };
        let stored = reply.optional_bytes()?;
        Ok((Some(applied), stored.and_then(read_finished_release)))
    }

    async fn finish_release(
        &self,
        shard: i32,
        owner: Owner,
        pipeline: &str,
        finished: &FinishedRelease,
    ) -> Result<(), IndexError> {
        let keys = self.shard(shard);
        let arguments = vec![released_field(pipeline), finished_release_value(finished)];
        let mut reply = self
            .of_owner(owner, 0)
            .run(&self.scripts.finish_release, keys.keys(&["meta"]), arguments)
            .await?;
        match reply.word()?.as_str() {
            "OK" => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    async fn forgettable(
        &self,
        shard: i32,
        now: Timestamp,
        limit: usize,
    ) -> Result<(Option<Applied>, Vec<JobId>), IndexError> {
        let keys = self.shard(shard);
        let arguments = vec![score(now), number(limit), keys.prefix()];
        let mut reply = self
            .run(&self.scripts.forgettable, keys.keys(&COUNTED), arguments)
            .await?;
        Ok((reply.applied()?, reply.ids()?))
    }

    async fn known_keys(&self, shard: i32, _now: Timestamp) -> Result<u64, IndexError> {
        let shard = self.shard(shard);
        let arguments = vec![shard.prefix()];
        let mut reply = self
            .run(
                &self.scripts.known_keys,
                shard.keys(&["meta", "idemlogs"]),
                arguments,
            )
            .await?;
        let count = reply.number()?;
        u64::try_from(count).map_err(|_| unexpected("a negative number of keys"))
    }

    async fn stats(
        &self,
        shard: i32,
        app: Option<&str>,
        now: Timestamp,
        minutes: u32,
    ) -> Result<ShardStats, IndexError> {
        let keys = self.shard(shard);
        let minutes_len = usize::try_from(minutes).unwrap_or(usize::MAX);
        let empty = ShardStats {
            per_minute: vec![0; minutes_len],
            ..ShardStats::default()
        };
        let (applied, mut flows) = self.flows(&keys).await?;
        flows.retain(|flow| is_requested(flow, app));
        let mut stats = ShardStats {
            applied,
            ..empty.clone()
        };
        let flows: Vec<Value> = flows.iter().map(flow_value).collect();
        let (max_flows, max_counts) = MAX_COUNTED;
        let chunk = (max_counts / minutes_len.max(1)).clamp(1, max_flows);
        for flows in flows.chunks(chunk) {
            if !self.add_stats(&keys, flows, (now, minutes), &mut stats).await? {
                return Ok(empty);
            }
        }
        Ok(stats)
    }
}

/// Why an index with the same prefix cannot be used.
#[must_use]
pub fn in_use(by: &str) -> String {
    format!(
        "redis.prefix: another installation uses the keys with this prefix, or has used them within {} seconds: {by}; set another prefix",
        IN_USE.as_secs()
    )
}

fn check_arguments(arguments: &[Value]) -> Result<(), IndexError> {
    if arguments.len() > MAX_ARGUMENTS {
        let reason = format!(
            "a command with {} arguments; Redis supports up to {MAX_ARGUMENTS}",
            arguments.len()
        );
        return Err(IndexError::Unavailable(reason));
    }
    Ok(())
}

fn flow_value(flow: &Flow) -> Value {
    flow_key::encode(flow).into()
}

/// Due time and id; both empty without a cursor.
fn cursor_values(cursor: Option<Cursor>) -> [Value; 2] {
    match cursor {
        Some(cursor) => [score(cursor.due), id_value(cursor.id)],
        None => ["".into(), "".into()],
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

/// The field of `meta` that remembers how much of the release of a pipeline's long waits is finished.
fn released_field(pipeline: &str) -> Value {
    format!("released:{pipeline}").into()
}

/// The id of the topic (16 bytes), then the offset (8 bytes).
fn finished_release_value(finished: &FinishedRelease) -> Value {
    let (topic, before) = (finished.topic.bits().to_be_bytes(), finished.before.to_be_bytes());
    Bytes::from([&topic[..], &before].concat()).into()
}

/// `None` if it is unreadable: then the jobs are read again.
fn read_finished_release(mut stored: Bytes) -> Option<FinishedRelease> {
    let topic = TopicId::from_bits(stored.try_get_u128().ok()?);
    let before = stored.try_get_i64().ok()?;
    stored.is_empty().then_some(FinishedRelease { topic, before })
}

/// The bucket of a job. The highest bit is never set in an offset; without it, the bucket is an exact number of Lua.
fn bucket(id: JobId) -> u64 {
    (id.offset() & (u64::MAX >> 1)) >> BUCKET_BITS
}

/// The value of an idempotency key, unless it has expired.
fn key_value(mut stored: Bytes, now: Timestamp) -> Result<Option<Bytes>, IndexError> {
    let expires = stored
        .try_get_i64()
        .map_err(|_| IndexError::Damaged("an idempotency key without an expiry".to_owned()))?;
    Ok((Timestamp::from_millis(expires) > now).then_some(stored))
}
