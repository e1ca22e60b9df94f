//! `bench isolation`: how late the records of others are while one topic cannot be written, with a scheduler, a retry tier and a
//! worker; on a cluster of two brokers with an authorizer, of which the second one stops.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::ensure;
use clap::ValueEnum;
use rdkafka::admin::{NewTopic, TopicReplication};
use redeliver_core::{Clock, Headers, HumanDuration, Output, Pipeline, SystemClock, Timestamp};
use redeliver_testkit::{FakeEndpoint, LocalKafka, Reply, acls};

use crate::figures::{Distribution, Figures};
use crate::kafka::Broker;
use crate::process::Running;
use crate::redis::Redis;
use crate::relay::waiting;
use crate::scheduler::PARTITIONS;
use crate::scheduler::arrivals::Arrivals;
use crate::scheduler::env::data;

/// The topic that cannot be written, and the topic of the others.
const SIDES: [&str; 2] = ["victim", "other"];
/// Records per second for each of them.
const RATE: f64 = 100.0;
/// The time before a cause, and that from its end to the end of the load.
const AROUND: Duration = Duration::from_secs(4);
/// When the topic is certainly not written any more.
const EFFECTIVE: Duration = Duration::from_secs(5);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How long each cause lasts, in seconds
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Measure only these, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Subject::ALL)]
    only: Vec<Subject>,
    /// URL of the Redis to use; all its data is deleted
    #[arg(long, env = "REDIS_URL")]
    redis: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Subject {
    Scheduler,
    Tier,
    Worker,
}

impl Subject {
    const ALL: [Self; 3] = [Self::Scheduler, Self::Tier, Self::Worker];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    None,
    /// A broker stops, and every topic keeps its leaders.
    Broker,
    Deleted,
    Refused,
    Leaderless,
    FewInSync,
}

impl Cause {
    const ALL: [Self; 6] = [
        Self::None,
        Self::Broker,
        Self::Deleted,
        Self::Refused,
        Self::Leaderless,
        Self::FewInSync,
    ];

    fn description(self) -> &'static str {
        match self {
            Self::None => "nothing fails",
            Self::Broker => "a broker stops, no topic is affected",
            Self::Deleted => "deleted",
            Self::Refused => "writes refused by ACL",
            Self::Leaderless => "without leader: its only replica is on a broker that stops",
            Self::FewInSync => "too few in-sync replicas: one of two is on a broker that stops",
        }
    }

    fn stops_broker(self) -> bool {
        matches!(self, Self::Broker | Self::Leaderless | Self::FewInSync)
    }

    /// The topic that it affects. The first replica leads.
    fn topic<'a>(self, name: &'a str) -> NewTopic<'a> {
        const OWN: [&[i32]; PARTITIONS as usize] = [&[1, 2]; PARTITIONS as usize];
        const SECOND: [&[i32]; PARTITIONS as usize] = [&[2]; PARTITIONS as usize];
        let replicas = if self == Self::Leaderless { &SECOND } else { &OWN };
        let new = NewTopic::new(name, PARTITIONS, TopicReplication::Variable(replicas));
        match self {
            Self::FewInSync => new.set("min.insync.replicas", "2"),
            _ => new,
        }
    }
}

pub(crate) async fn run(options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let mut redis = Redis::connect(&options.redis)?;
    let [first, mut second] = acls::start_pair()?;
    let broker = Broker::new(format!("{},{}", first.brokers(), second.brokers()));
    let endpoint = FakeEndpoint::start(|request| Reply::ok(request.body.clone()));
    for subject in &options.only {
        for cause in Cause::ALL {
            redis.empty()?;
            let case = Case {
                broker: &broker,
                name: broker.name(&format!("{subject:?}-{cause:?}").to_lowercase()),
                subject: *subject,
                cause,
            };
            let config = case.config(&redis.url, &endpoint.url());
            let lasts = Duration::from_secs(options.seconds);
            let lateness = case.measure(&config, &mut second, lasts).await?;
            figures.add(
                format!(
                    "{subject:?}, lateness of {RATE}/s of others (goal p99 1 s): {}",
                    cause.description()
                ),
                lateness,
            );
        }
    }
    Ok(())
}

struct Case<'a> {
    broker: &'a Broker,
    name: String,
    subject: Subject,
    cause: Cause,
}

impl Case<'_> {
    fn name(&self, side: &str) -> String {
        format!("{}-{side}", self.name)
    }

    /// The topic to which the records of a side go.
    fn output(&self, side: &str) -> String {
        match self.subject {
            Subject::Tier => Pipeline::new(&self.name(side)).due_topic().to_string(),
            Subject::Scheduler | Subject::Worker => self.name(side),
        }
    }

    fn config(&self, redis: &str, endpoint: &str) -> String {
        let [victim, other] = SIDES.map(|side| self.name(side));
        let (name, [bad, good]) = (&self.name, SIDES);
        let own = match self.subject {
            Subject::Scheduler => format!(
                "redis: {{ url: '{redis}', prefix: '{name}' }}
scheduler:
  listen: 127.0.0.1:0
  topics: {{ ingest: {name}-ingest, state: {name}-state, dlq: {name}-dlq, answers: {name}-answers }}
  apps: {{ {bad}: {{ topic: {victim} }}, {good}: {{ topic: {other} }} }}
"
            ),
            Subject::Tier => format!(
                "pipelines: {{ {victim}: {{ retry: {{ tiers: [1s] }} }}, {other}: {{ retry: {{ tiers: [1s] }} }} }}\n"
            ),
            Subject::Worker => format!(
                "pipelines:
  {name}:
    output: {{ pointer: /app, topics: {{ {bad}: {victim}, {good}: {other} }}, default: {other} }}
    http: {{ url: '{endpoint}' }}
"
            ),
        };
        format!(
            "instance: {name}
kafka: {{ brokers: '{}', topics: {{ create: true, partitions: {PARTITIONS}, replication: 2 }} }}
{own}",
            self.broker.address
        )
    }

    /// What is written for a record that is due now.
    fn record(&self, side: &str, number: usize) -> Output {
        let delay = match self.subject {
            Subject::Scheduler | Subject::Tier => Duration::from_secs(1),
            Subject::Worker => Duration::ZERO,
        };
        let due = SystemClock.now().after(delay);
        let data = data(number, due);
        let of = |topic: String, value: String| Output {
            topic: topic.into(),
            partition: Some(i32::try_from(number % PARTITIONS as usize).unwrap_or(0)),
            key: None,
            value: Some(value.into()),
            headers: Headers::new(),
        };
        match self.subject {
            Subject::Scheduler => of(
                self.name("ingest"),
                format!(r#"{{"appName":"{side}","scheduledTime":"{due}","jobData":{data}}}"#),
            ),
            Subject::Tier => Output {
                value: Some(data.into()),
                ..waiting(
                    &Pipeline::new(&self.name(side)),
                    HumanDuration::from_secs(1),
                    number,
                    due,
                )
            },
            Subject::Worker => of(self.name.clone(), format!(r#"{{"app":"{side}",{}"#, &data[1..])),
        }
    }

    async fn measure(
        &self,
        config: &str,
        second: &mut LocalKafka,
        lasts: Duration,
    ) -> anyhow::Result<Distribution> {
        let [victim, other] = SIDES.map(|side| self.output(side));
        let topics = [self.cause.topic(&victim), Cause::None.topic(&other)];
        self.broker.create_new(&topics).await?;
        let program = match self.subject {
            Subject::Scheduler => "scheduler",
            Subject::Tier => "retry-tier",
            Subject::Worker => "enricher",
        };
        let process = Running::start(program, &self.name, config, &[])?;
        process.wait_until_ready()?;
        let others = Arrivals::at(self.broker, &other)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (from, to, sent) = std::thread::scope(|scope| {
            let [load, of_others] = SIDES.map(|side| {
                let stop = stop.clone();
                scope.spawn(move || {
                    let record = |number| self.record(side, number);
                    self.broker.trickle(RATE, &stop, record)
                })
            });
            let times = self.let_it_happen(&victim, second, lasts);
            stop.store(true, Ordering::SeqCst);
            let joined = |sender: std::thread::ScopedJoinHandle<'_, anyhow::Result<usize>>| {
                let sent = sender.join();
                sent.map_err(|_| anyhow::anyhow!("the producer panicked"))?
            };
            joined(load)?;
            let sent = joined(of_others)?;
            let (from, to) = times?;
            anyhow::Ok((from, to, sent))
        })?;
        let arrivals = others.all(sent)?;
        process.stop()?;
        let meanwhile = arrivals
            .iter()
            .filter(|arrival| (from..to).contains(&arrival.due));
        Ok(Distribution::of(
            meanwhile.map(|arrival| arrival.lateness).collect(),
        ))
    }

    /// Begins and ends the cause, and returns when it did.
    fn let_it_happen(
        &self,
        victim: &str,
        second: &mut LocalKafka,
        lasts: Duration,
    ) -> anyhow::Result<(Timestamp, Timestamp)> {
        let runtime = tokio::runtime::Handle::current();
        let block_on = |future| tokio::task::block_in_place(|| runtime.block_on(future));
        std::thread::sleep(AROUND);
        let from = SystemClock.now();
        match self.cause {
            Cause::None => {}
            Cause::Deleted => block_on(self.broker.delete(&[victim]))?,
            Cause::Refused => acls::deny_writes(&self.broker.address, victim)?,
            Cause::Broker | Cause::Leaderless | Cause::FewInSync => second.stop()?,
        }
        let to = from.after(lasts);
        std::thread::sleep(EFFECTIVE);
        // The other two causes leave nothing to write to.
        let watch = self.broker.watch(victim, PARTITIONS)?;
        let written = || match self.cause {
            Cause::Refused | Cause::FewInSync => watch.end(),
            _ => Ok(0),
        };
        let before = written()?;
        std::thread::sleep(SystemClock.until(to));
        ensure!(written()? == before, "{victim} was written");
        match self.cause {
            Cause::Refused => acls::permit_writes(&self.broker.address, victim)?,
            cause if cause.stops_broker() => second.start_again()?,
            _ => {}
        }
        std::thread::sleep(AROUND);
        Ok((from, to))
    }
}
