//! The index of a shard is rebuilt from the state topic. A failed write only delays the rebuild.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use redeliver_core::{Headers, JobId, Output, Timestamp};
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::listen::Listener;
use redeliver_scheduler::codec;
use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_scheduler::index::{
    Applied, Batch, Checkpoint, FinishedRelease, Index, IndexError, Lookup, Owner, Scan, ScanRequest,
    ShardStats,
};
use redeliver_scheduler::job::{Job, JobState, Kind, Payload, Priority};
use redeliver_service::{Host, topics};
use tokio_util::sync::CancellationToken;

use crate::env::SchedulerEnv;
use crate::oracle::JobSpec;
use crate::requests::{Request, in_millis, now};

/// An index in memory, of which one write fails.
#[derive(Clone)]
struct Flaky {
    index: MemoryIndex,
    writes: Arc<AtomicU32>,
    /// The number of the write that fails, and its error.
    fails: (u32, fn() -> IndexError),
}

impl Index for Flaky {
    fn of_owner(&self, owner: Owner, expected: i64) -> Self {
        Self {
            index: self.index.of_owner(owner, expected),
            ..self.clone()
        }
    }

    async fn claim(&self, shard: i32, owner: Owner) -> Result<Option<Checkpoint>, IndexError> {
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

    async fn scan(&self, shard: i32, request: &ScanRequest) -> Result<Scan, IndexError> {
        self.index.scan(shard, request).await
    }

    async fn finished_release(
        &self,
        shard: i32,
        pipeline: &str,
    ) -> Result<(Option<Applied>, Option<FinishedRelease>), IndexError> {
        self.index.finished_release(shard, pipeline).await
    }

    async fn finish_release(
        &self,
        shard: i32,
        owner: Owner,
        pipeline: &str,
        finished: &FinishedRelease,
    ) -> Result<(), IndexError> {
        self.index.finish_release(shard, owner, pipeline, finished).await
    }

    async fn forgettable(
        &self,
        shard: i32,
        now: Timestamp,
        limit: usize,
    ) -> Result<(Option<Applied>, Vec<JobId>), IndexError> {
        self.index.forgettable(shard, now, limit).await
    }

    async fn known_keys(&self, shard: i32, now: Timestamp) -> Result<u64, IndexError> {
        self.index.known_keys(shard, now).await
    }

    async fn stats(
        &self,
        shard: i32,
        app: Option<&str>,
        now: Timestamp,
        minutes: u32,
    ) -> Result<ShardStats, IndexError> {
        self.index.stats(shard, app, now, minutes).await
    }
}

/// A job that is due in an hour.
pub(crate) fn far(offset: i64, env: &SchedulerEnv) -> Job {
    Job {
        id: JobId::new(now(), 0, offset),
        app: "crawl".into(),
        kind: Kind::App,
        state: JobState::Scheduled,
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
        occurrence: None,
        released: None,
    }
}

/// A scheduler in this process takes over a state topic with many jobs, and its second write to the index fails.
#[track_caller]
fn rebuilds_despite(name: &str, error: fn() -> IndexError) {
    const JOBS: i64 = 5_000;
    let fails = (2, error);
    let env = SchedulerEnv::new(SchedulerEnv::builder(name).partitions(1));
    let index = Flaky {
        index: MemoryIndex::new(),
        writes: Arc::default(),
        fails,
    };
    let stop = CancellationToken::new();
    let config = format!("instance: {name}\n{}", env.test.yaml());
    let mut host = env.block_on(async {
        let start = Start::new(
            Arc::new(Config::from_yaml(&config).unwrap()),
            stop.clone(),
            Listener::bind("admin.listen", ([127, 0, 0, 1], 0).into()).unwrap(),
        );
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

    let sent = env.send(vec![Request::protobuf(JobSpec::new("mail", "now"))]);
    let mut watch = env.watch();
    watch.until_jobs_ended(sent.len());
    let waiting = env.block_on(index.stats(0, None, now(), 0)).unwrap().scheduled;
    assert_eq!(waiting, u64::try_from(JOBS).unwrap());
    assert!(
        index.writes.load(Ordering::SeqCst) > fails.0,
        "the write did not fail"
    );
    stop.cancel();
    env.block_on(running).unwrap().unwrap();
}

#[test]
fn failed_writes_delay_rebuilds() {
    rebuilds_despite("rebuild-unavailable", || IndexError::Unavailable("once".to_owned()));
    // The index was emptied meanwhile.
    rebuilds_despite("rebuild-gap", || IndexError::Gap {
        found: None,
        expected: 2_000,
    });
}
