//! A shard's index is built anew from the state topic: a write that fails meanwhile only delays it, and what another
//! topic has left in the index is not taken for its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use redeliver_core::{Headers, JobId, Output, Timestamp};
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::listen::Listener;
use redeliver_runtime::telemetry::Tracer;
use redeliver_scheduler::codec;
use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_scheduler::index::{
    Applied, Batch, Claimed, Cursor, DueScan, Index, IndexError, Lookup, Owner, ShardStats,
};
use redeliver_scheduler::job::{Job, Kind, Payload, Priority, State};
use redeliver_testkit::eventually;
use redeliver_worker::{Host, topics};
use tokio_util::sync::CancellationToken;

use crate::env::{PATIENCE, SchedulerEnv, Setup};
use crate::oracle::Wanted;
use crate::requests::{Request, in_millis, now};

/// The index in memory, of which one write fails.
#[derive(Clone)]
struct Flaky {
    index: MemoryIndex,
    writes: Arc<AtomicU32>,
    /// Which write fails, and how.
    fails: (u32, fn() -> IndexError),
}

impl Index for Flaky {
    async fn claim(&self, shard: i32, owner: Owner) -> Result<Option<Claimed>, IndexError> {
        self.index.claim(shard, owner).await
    }

    async fn clear(&self, shard: i32, owner: Owner) -> Result<(), IndexError> {
        self.index.clear(shard, owner).await
    }

    async fn apply(&self, shard: i32, owner: Owner, batch: &Batch, now: Timestamp) -> Result<(), IndexError> {
        let (which, error) = self.fails;
        if self.writes.fetch_add(1, Ordering::SeqCst) + 1 == which {
            return Err(error());
        }
        self.index.apply(shard, owner, batch, now).await
    }

    async fn look_up(
        &self,
        shard: i32,
        keys: &[Lookup],
        now: Timestamp,
    ) -> Result<(Option<Applied>, Vec<Option<Bytes>>), IndexError> {
        self.index.look_up(shard, keys, now).await
    }

    async fn ahead(
        &self,
        shard: i32,
        after: Option<Cursor>,
        until: Timestamp,
        limit: usize,
        bytes: usize,
    ) -> Result<DueScan, IndexError> {
        self.index.ahead(shard, after, until, limit, bytes).await
    }

    async fn forgettable(
        &self,
        shard: i32,
        now: Timestamp,
        limit: usize,
    ) -> Result<(Option<Applied>, Vec<JobId>), IndexError> {
        self.index.forgettable(shard, now, limit).await
    }

    async fn stats(&self, shard: i32, now: Timestamp, minutes: u32) -> Result<ShardStats, IndexError> {
        self.index.stats(shard, now, minutes).await
    }
}

/// A job that waits for an hour.
pub(crate) fn far(offset: i64, env: &SchedulerEnv) -> Job {
    Job {
        id: JobId::new(now(), 0, offset),
        app: "crawl".into(),
        kind: Kind::App,
        state: State::Scheduled,
        priority: Priority::Normal,
        due: in_millis(3_600_000),
        accepted: now(),
        revision: 1,
        idempotency_key: None,
        request_hash: [0; 16],
        request_id: None,
        topic: env.topics.apps["crawl"].clone(),
        payload: Payload::default(),
        ended: None,
        expires: None,
    }
}

/// A scheduler of this process takes over a state topic of many jobs, and one of its writes to the index fails.
#[track_caller]
fn takes_over_although(name: &str, fails: (u32, fn() -> IndexError)) {
    const JOBS: i64 = 20_000;
    let env = Setup::new(name).partitions(1).create();
    let index = Flaky {
        index: MemoryIndex::new(),
        writes: Arc::default(),
        fails,
    };
    let stop = CancellationToken::new();
    let config = format!("instance: {name}\n{}", env.configuration());
    let mut host = env.block_on(async {
        let start = Start {
            config: Arc::new(Config::from_yaml(&config).unwrap()),
            shutdown: stop.clone(),
            tracer: Tracer::off(),
            admin: Listener::bind("admin.listen", ([127, 0, 0, 1], 0).into()).unwrap(),
        };
        let mut host = Host::new("scheduler", start);
        let spec = topics::of_scheduler(&host.config);
        host.ensure_topics(&spec).await.unwrap();
        host
    });
    let jobs = (0..JOBS).map(|offset| {
        let job = far(offset, &env);
        Output {
            topic: env.topics.state.clone(),
            partition: Some(0),
            key: Some(job.id.to_string().into()),
            value: Some(codec::encode(&job)),
            headers: Headers::new(),
        }
    });
    env.write(&jobs.collect::<Vec<_>>());
    env.block_on(redeliver_scheduler::mount(&mut host, index.clone()))
        .unwrap();
    let running = env.spawn_task(host.run());

    let asked = env.ask(vec![Request::protobuf(Wanted::new("mail", "now"))]);
    let mut watch = env.watch();
    watch.until_so_many_ended(asked.len());
    let waiting = env.block_on(index.stats(0, now(), 0)).unwrap().scheduled;
    assert_eq!(waiting, u64::try_from(JOBS).unwrap());
    assert!(
        index.writes.load(Ordering::SeqCst) > fails.0,
        "the write did not fail"
    );
    stop.cancel();
    env.block_on(running).unwrap().unwrap();
}

#[test]
fn a_write_that_fails_while_the_index_is_built_anew_only_delays_it() {
    takes_over_although(
        "rebuild-unavailable",
        (2, || IndexError::Unavailable("once".to_owned())),
    );
}

#[test]
fn an_index_that_is_emptied_while_it_is_built_anew_is_begun_again() {
    let gap = || IndexError::Gap {
        found: None,
        expected: 2_000,
    };
    takes_over_although("rebuild-gap", (2, gap));
}

#[test]
fn jobs_of_another_state_topic_in_the_index_are_not_taken_for_ours() {
    let request = |text: String, due| Request::protobuf(Wanted::new("mail", text).at(due));
    let theirs = Setup::new("theirs").partitions(1).create();
    let mut other = theirs.start("a");
    let due = in_millis(12_000);
    let asked_theirs = theirs.ask((0..20).map(|n| request(format!("theirs {n}"), due)).collect());
    theirs.watch().until_so_many_are_known(20);
    other.end_in_order();

    // More stands in our topic than in theirs, so that nothing but its content tells them apart.
    let mut ours = Setup::new("ours").partitions(1).create();
    let due = in_millis(12_000);
    let asked = {
        let mut scheduler = ours.start("a");
        let asked = ours.ask((0..60).map(|n| request(format!("ours {n}"), due)).collect());
        ours.watch().until_so_many_are_known(60);
        // What it wrote itself it knows again.
        scheduler.kill_9();
        scheduler.start_again();
        scheduler.until_ready();
        let said = scheduler.output();
        assert!(!said.contains("is of another topic"), "{said}");
        scheduler.end_in_order();
        asked
    };
    // As if the brokers were exchanged: what is in Redis for our shard is theirs now.
    ours.set("redis.prefix", &theirs.name);
    {
        let scheduler = ours.start("a");
        assert!(
            scheduler.output().contains("is of another topic"),
            "{}",
            scheduler.output()
        );
        ours.settle(asked);
        let mut seen = theirs.watch();
        seen.look();
        assert!(seen.seen.apps.is_empty(), "{:?}", seen.seen.apps);
    }
    // And back again: theirs are late, but whole.
    other.start_again();
    other.until_ready();
    theirs.settle(asked_theirs);
    eventually("it is said", PATIENCE, || {
        let output = other.output();
        if output.contains("is of another topic") {
            Ok(())
        } else {
            Err(output)
        }
    });
}
