//! Everything that one scheduler works with: topics, a place in Redis, processes, and jobs for it.

use std::time::Duration;

use redeliver_core::{Headers, Output, Timestamp};
use redeliver_kafka::murmur2::shard_of;

use super::{DATA, PARTITIONS};
use crate::kafka::Broker;
use crate::process::{Running, wait_until};
use crate::redis::Redis;

/// How long anything may take before the measurement is given up.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);

/// The applications.
pub(super) const BULK: &str = "bulk";
pub(super) const TRICKLE: &str = "trickle";

#[derive(Clone)]
pub(super) struct SchedulerEnv {
    pub(super) broker: Broker,
    name: String,
    redis: String,
}

/// A job's place, time and key.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) number: usize,
    pub(super) due: Timestamp,
    /// Partition of the ingest topic.
    pub(super) partition: i32,
}

impl SchedulerEnv {
    /// An environment of its own, with an empty Redis.
    pub(super) async fn build(broker: &Broker, redis: &mut Redis, name: &str) -> anyhow::Result<Self> {
        redis.empty()?;
        let env = Self {
            broker: broker.clone(),
            name: broker.name(name),
            redis: redis.url.clone(),
        };
        // The others are made by the service, as it needs them.
        env.broker
            .create(&[&env.of_app(BULK), &env.of_app(TRICKLE)], PARTITIONS)
            .await?;
        Ok(env)
    }

    fn topic(&self, what: &str) -> String {
        format!("{}-{what}", self.name)
    }

    pub(super) fn of_app(&self, app: &str) -> String {
        self.topic(app)
    }

    /// The sorted set of the jobs of a shard that wait.
    pub(super) fn due_set(&self, shard: i32) -> String {
        format!("{}:{{{shard}}}:due", self.name)
    }

    /// A scheduler process that shares the work with others of the environment.
    pub(super) fn start(&self, instance: &str, is_static: bool) -> anyhow::Result<Running> {
        let topic = |what| self.topic(what);
        let config = format!(
            "instance: {}
kafka: {{ brokers: '{}', static_membership: {is_static}, topics: {{ create: true, partitions: {PARTITIONS} }} }}
redis: {{ url: '{}', prefix: '{}' }}
scheduler:
  listen: 127.0.0.1:0
  group: {}
  topics: {{ ingest: {}, state: {}, dlq: {}, answers: {} }}
  apps: {{ {BULK}: {{ topic: {} }}, {TRICKLE}: {{ topic: {} }} }}
",
            self.topic(instance),
            self.broker.address,
            self.redis,
            self.name,
            self.topic("group"),
            topic("ingest"),
            topic("state"),
            topic("dlq"),
            topic("answers"),
            topic(BULK),
            topic(TRICKLE),
        );
        Running::start("scheduler", &self.topic(instance), &config, &[])
    }

    /// The same, once all shards are its own and dispatch.
    pub(super) fn start_and_wait(&self, instance: &str) -> anyhow::Result<Running> {
        let process = self.start(instance, false)?;
        process.wait_until_ready()?;
        wait_until("all shards are live", PATIENCE, || {
            Ok(process.metric("redeliver_scheduler_live_shards")? >= f64::from(PARTITIONS))
        })?;
        Ok(process)
    }

    /// A request for a job, as JSON.
    pub(super) fn request(&self, app: &str, wanted: Wanted) -> Output {
        self.request_with_key(app, wanted, None)
    }

    /// The same with an idempotency key, in the partition of that key.
    pub(super) fn request_with_key(&self, app: &str, wanted: Wanted, key: Option<String>) -> Output {
        let Wanted { number, due, .. } = wanted;
        let data = data(number, due);
        let field = key
            .as_ref()
            .map_or_else(String::new, |key| format!(r#","idempotencyKey":"{key}""#));
        let value = format!(r#"{{"appName":"{app}","scheduledTime":"{due}"{field},"jobData":{data}}}"#);
        let partition = match key {
            Some(key) => shard_of(app, &key, PARTITIONS),
            None => wanted.partition,
        };
        Output {
            topic: self.topic("ingest").into(),
            partition: Some(partition),
            key: None,
            value: Some(value.into()),
            headers: Headers::new(),
        }
    }

    /// Writes `count` requests as fast as it goes, in turn to all partitions.
    pub(super) fn schedule(&self, count: usize, due: impl Fn(usize) -> Timestamp) -> anyhow::Result<()> {
        self.broker.fill(count, |number| {
            let wanted = Wanted {
                number,
                due: due(number),
                partition: partition(number),
            };
            self.request(BULK, wanted)
        })
    }

    pub(super) async fn tear_down(self) -> anyhow::Result<()> {
        let topics = ["ingest", "state", "dlq", "answers", BULK, TRICKLE].map(|what| self.topic(what));
        self.broker.delete(&topics.each_ref().map(String::as_str)).await
    }
}

/// The partition of a job, in turn.
pub(super) fn partition(number: usize) -> i32 {
    i32::try_from(number % PARTITIONS as usize).unwrap_or(0)
}

/// A job's data, which tells its number and due time to whoever receives it.
pub(super) fn data(number: usize, due: Timestamp) -> String {
    let mut data = format!(r#"{{"n":{number},"due":{},"pad":""#, due.as_millis());
    while data.len() < DATA - 2 {
        data.push('x');
    }
    data + "\"}"
}

/// Commands that were accepted.
pub(super) fn accepted(process: &Running) -> anyhow::Result<f64> {
    process.metric("redeliver_scheduler_commands_total{outcome=\"accepted\"")
}

/// Waits until so many jobs are accepted.
pub(super) fn wait_accepted(process: &Running, count: usize) -> anyhow::Result<()> {
    wait_until("all jobs are accepted", PATIENCE, || {
        Ok(accepted(process)? >= count as f64)
    })
}

/// Waits until the index shows everything.
pub(super) fn wait_indexed(process: &Running) -> anyhow::Result<()> {
    wait_until("the index shows everything", PATIENCE, || {
        Ok(process.metric("redeliver_scheduler_index_behind")? == 0.0)
    })
}
