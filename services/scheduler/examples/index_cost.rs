//! Measures the cost of the index in Redis: CPU time of its main thread per job, and memory per scheduled and per ended job.
//!
//! `cargo run --package redeliver-scheduler --example index_cost` starts a Redis of its own. All figures are reported by
//! Redis, so they do not depend on the build profile of this program.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use fred::prelude::{Client, ClientLike as _, Config, Value};
use fred::types::{ClusterHash, CustomCommand, InfoKind};
use redeliver_core::Timestamp;
use redeliver_runtime::config::Url;
use redeliver_runtime::tasks::Tasks;
use redeliver_scheduler::codec::{self, RetentionPolicy};
use redeliver_scheduler::index::redis::{RedisConfig, RedisIndex};
use redeliver_scheduler::index::{
    Batch, Change, Cursor, Effect, FlowPosition, Index, Installation, ListRequest, Lookup, Owner, ScanRequest,
};
use redeliver_scheduler::job::{Flow, Job, JobId, JobState, Kind, Payload, Priority};
use redeliver_testkit::LocalRedis;

const JOBS: u32 = 100_000;
const OWNER: Owner = Owner(1);
const RETENTION: RetentionPolicy = RetentionPolicy {
    keys: Duration::from_secs(86_400),
    ended: Duration::from_secs(86_400),
};
const NOW: Timestamp = Timestamp::from_millis(1_763_722_800_000);

/// A job of one of `flows` flows.
fn job(shard: i32, number: u32, flows: u32, has_key: bool) -> Job {
    // Due times are independent of the order of requests.
    let ahead = fastrand::Rng::with_seed(number.into()).u64(..86_400_000);
    let app = format!("app-{:03}", number % flows);
    Job {
        id: JobId::new(NOW, shard, i64::from(number)),
        app: app.as_str().into(),
        kind: Kind::App,
        state: JobState::Scheduled,
        priority: Priority::Normal,
        due: NOW.after(Duration::from_millis(ahead)),
        accepted: NOW,
        revision: 1,
        idempotency_key: has_key.then(|| format!("order-{number:08}").into()),
        request_hash: [7; 16],
        request_id: None,
        topic: format!("{app}-jobs").into(),
        payload: Payload {
            value: Some(Bytes::from(vec![b'x'; 200])),
            ..Payload::default()
        },
        ended: None,
        expires: None,
        occurrence: None,
        released: None,
    }
}

fn change(job: &Job) -> Change {
    codec::change(job, codec::encode(job), RETENTION)
}

struct Bench {
    index: RedisIndex,
    raw: Client,
    before: f64,
}

impl Bench {
    async fn info(&self, kind: InfoKind) -> String {
        self.raw.info(Some(kind)).await.expect("INFO")
    }

    async fn used_memory(&self) -> f64 {
        field(&self.info(InfoKind::Memory).await, "used_memory:")
    }

    /// The CPU time of the main thread of Redis in seconds.
    async fn cpu(&self) -> f64 {
        let cpu = self.info(InfoKind::Cpu).await;
        field(&cpu, "used_cpu_user_main_thread:") + field(&cpu, "used_cpu_sys_main_thread:")
    }

    async fn begin(&mut self) {
        self.before = self.cpu().await;
    }

    async fn end(&self, name: &str, jobs: u32) {
        let spent = (self.cpu().await - self.before) * 1e6;
        println!("{name:<44} {:>7.2} us/job", spent / f64::from(jobs));
    }

    async fn apply(&self, shard: i32, from: i64, size: usize, changes: Vec<Change>) -> i64 {
        let mut at = from;
        for chunk in changes.chunks(size) {
            let to = at + i64::try_from(chunk.len()).expect("few changes");
            let batch = Batch {
                from: at,
                to,
                changes: chunk.to_vec(),
                last_record: None,
                force: false,
            };
            self.index.apply(shard, OWNER, &batch, NOW).await.expect("apply");
            at = to;
        }
        at
    }

    /// Schedules, scans, looks up, ends and forgets jobs, and measures their memory.
    async fn lifecycle(&mut self, shard: i32, flows: u32, has_key: bool, size: usize) {
        let keys = if has_key { "with" } else { "without" };
        println!("\n{JOBS} jobs of 200 bytes in {flows} flows {keys} idempotency keys, {size} in a batch");
        self.index.claim(shard, OWNER).await.expect("claim");
        self.index.clear(shard, OWNER).await.expect("clear");
        let jobs: Vec<Job> = (0..JOBS)
            .map(|number| job(shard, number, flows, has_key))
            .collect();
        println!(
            "{:<44} {:>7} bytes/job",
            "record, scheduled",
            codec::encode(&jobs[0]).len()
        );
        let memory = self.used_memory().await;
        self.begin().await;
        let offset = self
            .apply(shard, 0, size, jobs.iter().map(change).collect())
            .await;
        self.end("apply, scheduled", JOBS).await;
        let bytes = (self.used_memory().await - memory) / f64::from(JOBS);
        println!("{:<44} {bytes:>7.0} bytes/job", "used_memory, scheduled");

        self.begin().await;
        let (mut after, mut rows) = (None, 0);
        let until = NOW.after(Duration::from_secs(100_000));
        loop {
            let request = ListRequest {
                app: None,
                after,
                from: None,
                until,
                limit: 1_000,
                bytes: 1 << 20,
            };
            let page = self.index.list(shard, &request).await.expect("list");
            rows += page.rows.len();
            after = page.rows.last().map(|row| row.cursor);
            if page.is_complete {
                break;
            }
        }
        assert_eq!(rows, jobs.len());
        self.end("list, pages of up to 1000", JOBS).await;

        self.begin().await;
        let mut positions: HashMap<Flow, Cursor> = HashMap::new();
        let (mut scans, mut rows) = (0, 0);
        while rows < jobs.len() {
            let after = positions.iter().map(|(flow, cursor)| {
                let position = FlowPosition::After {
                    cursor: Some(*cursor),
                    until,
                    jobs: 1_000,
                };
                (flow.clone(), position)
            });
            let request = ScanRequest {
                until,
                now: NOW,
                after: None,
                jobs_per_flow: 1_000,
                positions: after.collect(),
                jobs: 1_000,
                bytes: 1 << 20,
                rotation: scans,
            };
            let scan = self.index.scan(shard, &request).await.expect("scan");
            scans += 1;
            for found in scan.flows {
                rows += found.rows.len();
                if let Some(last) = found.rows.last() {
                    positions.insert(found.flow, last.cursor);
                }
            }
        }
        self.end("scan, 1000 jobs each", JOBS).await;

        let lookups: Vec<Lookup> = jobs
            .iter()
            .map(|job| match change(job).effect {
                Effect::Waits { key: Some(key), .. } => Lookup::Key(key.hash),
                _ => Lookup::Job(job.id),
            })
            .collect();
        self.begin().await;
        for chunk in lookups.chunks(size) {
            self.index.look_up(shard, chunk, NOW).await.expect("look_up");
        }
        self.end("look_up", JOBS).await;

        let mut by_due = jobs;
        by_due.sort_by_key(|job| job.due);
        let ended: Vec<Change> = by_due
            .iter()
            .map(|job| change(&job.ended(JobState::Dispatched, job.due)))
            .collect();
        self.begin().await;
        let offset = self.apply(shard, offset, size, ended).await;
        self.end("apply, dispatched", JOBS).await;
        let bytes = (self.used_memory().await - memory) / f64::from(JOBS);
        println!("{:<44} {bytes:>7.0} bytes/job", "used_memory, dispatched");

        let forgotten = by_due.iter().map(|job| Change::of_job(job.id, Effect::Forgotten));
        self.begin().await;
        self.apply(shard, offset, size, forgotten.collect()).await;
        self.end("apply, forgotten", JOBS).await;
    }

    /// Ends jobs whose records are evicted at once, and forgets them.
    async fn evicted(&mut self, shard: i32, has_key: bool) {
        let keys = if has_key { "with" } else { "without" };
        println!(
            "\n{JOBS} jobs of 200 bytes {keys} idempotency keys that end, with records of 100 ended jobs at most"
        );
        let all = self.index.clone();
        self.index = all.clone().with_max_ended(100);
        self.index.claim(shard, OWNER).await.expect("claim");
        self.index.clear(shard, OWNER).await.expect("clear");
        let memory = self.used_memory().await;
        let mut jobs: Vec<Job> = (0..JOBS).map(|number| job(shard, number, 1, has_key)).collect();
        jobs.sort_by_key(|job| job.due);
        let ended = jobs
            .iter()
            .map(|job| change(&job.ended(JobState::Dispatched, job.due)));
        self.begin().await;
        let offset = self.apply(shard, 0, 500, ended.collect()).await;
        self.end("apply, dispatched", JOBS).await;
        let bytes = (self.used_memory().await - memory) / f64::from(JOBS);
        println!("{:<44} {bytes:>7.0} bytes/job", "used_memory, dispatched");
        let forgotten = jobs.iter().map(|job| Change::of_job(job.id, Effect::Forgotten));
        self.begin().await;
        self.apply(shard, offset, 500, forgotten.collect()).await;
        self.end("apply, forgotten", JOBS).await;
        self.index = all;
    }

    async fn clear(&mut self, shard: i32) {
        let changes = (0..JOBS)
            .map(|number| change(&job(shard, number, 1, true)))
            .collect();
        self.index.clear(shard, OWNER).await.expect("clear");
        self.apply(shard, 0, 5_000, changes).await;
        self.slowlog("RESET").await;
        self.begin().await;
        let started = std::time::Instant::now();
        self.index.clear(shard, OWNER).await.expect("clear");
        println!();
        self.end("clear, jobs with keys", JOBS).await;
        println!(
            "{:<44} {:>7.0} ms",
            "clear, total time including round trips",
            started.elapsed().as_secs_f64() * 1e3
        );
        let slow = self.slowlog("GET").await.into_array();
        let slowest = slow
            .into_iter()
            .filter_map(|entry| entry.into_array()[2].as_u64())
            .max();
        let slowest = slowest.map_or("under 10 ms".to_owned(), |time| format!("{time} us"));
        println!("{:<44} {slowest:>15}", "clear, slowest step");
    }

    async fn slowlog(&self, subcommand: &str) -> Value {
        let command = CustomCommand::new_static("SLOWLOG", ClusterHash::Random, false);
        self.raw.custom(command, vec![subcommand]).await.expect("SLOWLOG")
    }
}

fn field(text: &str, name: &str) -> f64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|value| value.trim().parse().ok()).expect(name)
}

#[tokio::main]
async fn main() {
    let redis = LocalRedis::start().expect("a Redis");
    let config = RedisConfig {
        url: Url::new(redis.url()),
        ..RedisConfig::default()
    };
    let raw = Client::new(Config::from_url(&redis.url()).expect("a URL"), None, None, None);
    raw.init().await.expect("a connection");
    let mut tasks = Tasks::new(Default::default());
    let installation = Installation {
        cluster: "cluster".to_owned(),
        topic: "state".into(),
        topic_id: None,
    };
    let index = RedisIndex::connect(&config, "redeliver", installation, &mut tasks)
        .await
        .expect("an index");
    let mut bench = Bench {
        index,
        raw,
        before: 0.0,
    };
    bench.lifecycle(0, 1, false, 500).await;
    bench.lifecycle(1, 1, true, 500).await;
    bench.lifecycle(2, 1, false, 20).await;
    bench.lifecycle(3, 100, false, 500).await;
    bench.clear(4).await;
    bench.evicted(5, false).await;
    bench.evicted(6, true).await;
}
