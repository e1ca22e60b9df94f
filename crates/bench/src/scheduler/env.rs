//! The environment of a scheduler: topics, Redis keys, processes, and job requests.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Headers, Output, Timestamp};
use redeliver_kafka::murmur2::shard_of;

use super::{DATA, PARTITIONS};
use crate::kafka::Broker;
use crate::process::{Running, wait_until};
use crate::redis::Redis;

/// Time limit of all waits, after which the benchmark fails.
pub(super) const TIMEOUT: Duration = Duration::from_secs(300);

/// The application with most jobs.
pub(super) const BULK: &str = "bulk";
/// An application with few jobs.
pub(super) const TRICKLE: &str = "trickle";

#[derive(Clone)]
pub(crate) struct SchedulerEnv {
    pub(super) broker: Broker,
    name: String,
    redis: String,
    /// The number of further applications, whose jobs go to the topic of [`BULK`].
    apps: usize,
    /// The address of the API.
    listen: SocketAddr,
}

/// A job to request.
#[derive(Clone, Copy)]
pub(super) struct JobSpec {
    pub(super) number: usize,
    pub(super) due: Timestamp,
    /// Partition of the ingest topic.
    pub(super) partition: i32,
}

impl SchedulerEnv {
    /// Creates an environment with an empty Redis.
    pub(crate) async fn build(broker: &Broker, redis: &mut Redis, name: &str) -> anyhow::Result<Self> {
        redis.empty()?;
        Self::on(broker, &redis.url, name).await
    }

    /// Creates an environment with this Redis, which is empty.
    pub(super) async fn on(broker: &Broker, redis: &str, name: &str) -> anyhow::Result<Self> {
        let env = Self {
            broker: broker.clone(),
            name: broker.name(name),
            redis: redis.to_owned(),
            apps: 0,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
        };
        // The scheduler creates its own topics.
        env.broker
            .create(&[&env.app_topic(BULK), &env.app_topic(TRICKLE)], PARTITIONS)
            .await?;
        Ok(env)
    }

    /// With this number of further applications.
    pub(super) fn with_apps(self, apps: usize) -> Self {
        Self { apps, ..self }
    }

    /// With the API of its only process at this address.
    pub(crate) fn listening_at(self, listen: SocketAddr) -> Self {
        Self { listen, ..self }
    }

    fn topic(&self, suffix: &str) -> String {
        format!("{}-{suffix}", self.name)
    }

    pub(super) fn ingest_topic(&self) -> Arc<str> {
        self.topic("ingest").into()
    }

    pub(super) fn app_topic(&self, app: &str) -> String {
        self.topic(app)
    }

    /// A key of a shard. All of its keys have the same hash slot.
    pub(super) fn key(&self, shard: i32) -> String {
        format!("{}:v2:{{{shard}}}:meta", self.name)
    }

    /// The key of the sorted set with the waiting jobs of [`BULK`] in a shard.
    pub(super) fn due_set(&self, shard: i32) -> String {
        format!(
            "{}:v2:{{{shard}}}:due:1:{}:{BULK}",
            self.name,
            self.app_topic(BULK)
        )
    }

    /// Starts a scheduler process. All processes of an environment share its shards.
    pub(super) fn start(&self, instance: &str, is_static: bool) -> anyhow::Result<Running> {
        let topic = |suffix| self.topic(suffix);
        let further = (0..self.apps).map(|number| format!(", {}: {{ topic: {} }}", app(number), topic(BULK)));
        let config = format!(
            "instance: {}
kafka: {{ brokers: '{}', static_membership: {is_static}, topics: {{ create: true, partitions: {PARTITIONS} }} }}
redis: {{ url: '{}', prefix: '{}' }}
scheduler:
  listen: '{}'
  group: {}
  topics: {{ ingest: {}, state: {}, dlq: {}, answers: {} }}
  apps: {{ {BULK}: {{ topic: {} }}, {TRICKLE}: {{ topic: {} }}{} }}
",
            self.topic(instance),
            self.broker.address,
            self.redis,
            self.name,
            self.listen,
            self.topic("group"),
            topic("ingest"),
            topic("state"),
            topic("dlq"),
            topic("answers"),
            topic(BULK),
            topic(TRICKLE),
            further.collect::<String>(),
        );
        Running::start("scheduler", &self.topic(instance), &config)
    }

    /// As [`SchedulerEnv::start`], and waits until the process serves all shards.
    pub(crate) fn start_and_wait(&self, instance: &str) -> anyhow::Result<Running> {
        let process = self.start(instance, false)?;
        process.wait_until_ready()?;
        wait_until("all shards are live", TIMEOUT, || {
            Ok(process.metric("redeliver_scheduler_live_shards")? >= f64::from(PARTITIONS))
        })?;
        Ok(process)
    }

    /// A job request in JSON.
    pub(super) fn request(&self, app: &str, job: JobSpec) -> Output {
        self.request_with_key(app, job, None)
    }

    /// A job request with an idempotency key, in the partition of that key.
    pub(super) fn request_with_key(&self, app: &str, job: JobSpec, key: Option<String>) -> Output {
        let JobSpec { number, due, .. } = job;
        let data = data(number, due);
        let field = key
            .as_ref()
            .map_or_else(String::new, |key| format!(r#","idempotencyKey":"{key}""#));
        let value = format!(r#"{{"appName":"{app}","scheduledTime":"{due}"{field},"jobData":{data}}}"#);
        let partition = match key {
            Some(key) => shard_of(app, &key, PARTITIONS),
            None => job.partition,
        };
        Output {
            topic: self.ingest_topic(),
            partition: Some(partition),
            key: None,
            value: Some(value.into()),
            headers: Headers::new(),
        }
    }

    /// Writes `count` requests as fast as possible, to all partitions in turn.
    pub(crate) fn schedule(&self, count: usize, due: impl Fn(usize) -> Timestamp) -> anyhow::Result<()> {
        self.broker.fill(count, |number| {
            let job = JobSpec {
                number,
                due: due(number),
                partition: partition(number),
            };
            self.request(BULK, job)
        })
    }

    pub(crate) async fn tear_down(self) -> anyhow::Result<()> {
        let topics = ["ingest", "state", "dlq", "answers", BULK, TRICKLE].map(|suffix| self.topic(suffix));
        self.broker.delete(&topics.each_ref().map(String::as_str)).await
    }
}

/// The name of a further application.
pub(super) fn app(number: usize) -> String {
    format!("app-{number}")
}

/// The partition of a job: all partitions in turn.
pub(super) fn partition(number: usize) -> i32 {
    i32::try_from(number % PARTITIONS as usize).unwrap_or(0)
}

/// The data of a job, which contains its number and due time for the measurement.
pub(crate) fn data(number: usize, due: Timestamp) -> String {
    let mut data = format!(r#"{{"n":{number},"due":{},"pad":""#, due.as_millis());
    while data.len() < DATA - 2 {
        data.push('x');
    }
    data + "\"}"
}

/// The number of accepted commands.
pub(super) fn accepted(process: &Running) -> anyhow::Result<f64> {
    process.metric("redeliver_scheduler_commands_total{outcome=\"accepted\"")
}

/// The shards of a process that dispatch jobs. The admin listener is not available while the process starts.
pub(super) fn live(process: &Running) -> f64 {
    process.metric("redeliver_scheduler_live_shards").unwrap_or(0.0)
}

/// Waits until `count` jobs are accepted.
pub(crate) fn wait_accepted(process: &Running, count: usize) -> anyhow::Result<()> {
    wait_until("all jobs are accepted", TIMEOUT, || {
        Ok(accepted(process)? >= count as f64)
    })
}

/// Waits until the index has applied every change.
pub(crate) fn wait_indexed(process: &Running) -> anyhow::Result<()> {
    wait_until("the index has applied every change", TIMEOUT, || {
        Ok(process.metric("redeliver_scheduler_index_behind")? == 0.0)
    })
}
