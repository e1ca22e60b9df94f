//! `bench isolation`: how late the records of others are while one topic cannot be written, with a scheduler, a retry tier and a
//! worker; on a cluster of two brokers with an authorizer, of which the second one stops. Only the topics that shall be affected
//! are on it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use anyhow::ensure;
use clap::ValueEnum;
use rdkafka::admin::{NewTopic, TopicReplication};
use redeliver_core::{Clock, Headers, HumanDuration, Output, Pipeline, SystemClock, Timestamp};
use redeliver_testkit::{FakeEndpoint, LocalKafka, Reply, acls};

use crate::figures::{Distribution, Figures};
use crate::kafka::Broker;
use crate::process::Running;
use crate::records::waiting;
use crate::redis::Redis;
use crate::scheduler::PARTITIONS;
use crate::scheduler::arrivals::Arrivals;
use crate::scheduler::env::data;

/// Records per second for the affected topic, and for that of the others.
const RATE: f64 = 100.0;
/// The time before a cause, and that from its end to the end of the load.
const AROUND: Duration = Duration::from_secs(4);
/// When the topic is certainly not written any more.
const EFFECTIVE: Duration = Duration::from_secs(5);
const OTHERS: &str = "others";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// How long each cause lasts, in seconds
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Measure only these, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Subject::ALL)]
    only: Vec<Subject>,
    /// Let only these causes happen, separated by commas, such as `deleted,too-few`
    #[arg(long, value_delimiter = ',', default_values = CAUSES.map(|cause| cause.name))]
    causes: Vec<String>,
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

/// The application, pipeline or output that is affected, and what happens to its topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cause {
    name: &'static str,
    description: &'static str,
    /// The first replica leads.
    replicas: &'static [i32],
    min_in_sync: &'static str,
}

const NONE: Cause = Cause {
    name: "none",
    description: "nothing fails",
    replicas: &[1, 2],
    min_in_sync: "1",
};
/// The second broker stops, and the topic stays available.
const STOPPED: Cause = Cause {
    name: "stopped",
    description: "a broker stops, but the topic can be written",
    ..NONE
};
const DELETED: Cause = Cause {
    name: "deleted",
    description: "the topic is deleted",
    ..NONE
};
const REFUSED: Cause = Cause {
    name: "refused",
    description: "writes are refused by ACL",
    ..NONE
};
const LEADERLESS: Cause = Cause {
    name: "leaderless",
    description: "without leader: the broker of its only replica stops",
    replicas: &[2],
    ..NONE
};
const TOO_FEW: Cause = Cause {
    name: "too-few",
    description: "too few in-sync replicas: the broker of one of two stops",
    min_in_sync: "2",
    ..NONE
};
const CAUSES: [Cause; 6] = [NONE, STOPPED, DELETED, REFUSED, LEADERLESS, TOO_FEW];

pub(crate) async fn run(options: &Options, figures: &mut Figures) -> anyhow::Result<()> {
    let mut redis = Redis::connect(&options.redis)?;
    let single = [
        ("offsets.topic.replication.factor", "1"),
        ("transaction.state.log.replication.factor", "1"),
    ];
    let settings = [&acls::AUTHORIZER[..], &single].concat();
    let [first, mut second] = LocalKafka::start_pair_with(&settings)?;
    let broker = Broker::new(format!("{},{}", first.brokers(), second.brokers()));
    let endpoint = FakeEndpoint::start(|request| Reply::ok(request.body.clone()));
    let is_chosen = |cause: &Cause| options.causes.iter().any(|name| name == cause.name);
    let causes: Vec<Cause> = CAUSES.into_iter().filter(is_chosen).collect();
    for subject in &options.only {
        redis.empty()?;
        let case = Case {
            broker: &broker,
            name: broker.name(&format!("{subject:?}").to_lowercase()),
            subject: *subject,
        };
        for cause in CAUSES {
            case.create(cause.name, cause).await?;
        }
        case.create(OTHERS, NONE).await?;
        // The process creates its topics on the first broker, and Kafka those of the coordinators.
        second.stop()?;
        let process = case.start(&redis.url, &endpoint.url())?;
        second.start_again()?;
        let others = Arrivals::at(&broker, &case.output(OTHERS))?;
        let stop = AtomicBool::new(false);
        let (times, sent) = std::thread::scope(|scope| {
            let sender = scope.spawn(|| case.trickle(OTHERS, &stop));
            let lasts = Duration::from_secs(options.seconds);
            let happen = |cause: &Cause| case.let_it_happen(*cause, &mut second, lasts);
            let times: Vec<_> = causes.iter().map(happen).collect();
            stop.store(true, Ordering::SeqCst);
            (times, sender.join())
        });
        let sent = sent.map_err(|_| anyhow::anyhow!("the producer panicked"))??;
        let arrivals = others.all(sent)?;
        for (cause, times) in causes.iter().zip(times) {
            let times = times?;
            let meanwhile = arrivals.iter().filter(|arrival| times.contains(&arrival.due));
            figures.add(
                format!(
                    "{subject:?}, lateness of {RATE}/s of others (goal p99 1 s): {}",
                    cause.description
                ),
                Distribution::of(meanwhile.map(|arrival| arrival.lateness).collect()),
            );
        }
        process.stop()?;
    }
    Ok(())
}

struct Case<'a> {
    broker: &'a Broker,
    name: String,
    subject: Subject,
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

    async fn create(&self, side: &str, cause: Cause) -> anyhow::Result<()> {
        let (name, replicas) = (self.output(side), [cause.replicas; PARTITIONS as usize]);
        let new = NewTopic::new(&name, PARTITIONS, TopicReplication::Variable(&replicas));
        let new = new.set("min.insync.replicas", cause.min_in_sync);
        self.broker.create_new(&[new]).await
    }

    fn start(&self, redis: &str, endpoint: &str) -> anyhow::Result<Running> {
        let name = &self.name;
        let sides = CAUSES.map(|cause| cause.name).into_iter().chain([OTHERS]);
        let each = |text: &dyn Fn(&str, String) -> String| {
            let texts = sides.map(|side| text(side, self.name(side)));
            texts.collect::<Vec<_>>().join(", ")
        };
        let (program, own) = match self.subject {
            Subject::Scheduler => {
                let apps = each(&|side, topic| format!("{side}: {{ topic: {topic} }}"));
                let topics =
                    ["ingest", "state", "dlq", "answers"].map(|kind| format!("{kind}: {name}-{kind}"));
                let topics = topics.join(", ");
                (
                    "scheduler",
                    format!(
                        "redis: {{ url: '{redis}', prefix: '{name}' }}
scheduler: {{ listen: 127.0.0.1:0, topics: {{ {topics} }}, apps: {{ {apps} }} }}"
                    ),
                )
            }
            Subject::Tier => {
                let pipelines = each(&|_, name| format!("{name}: {{ retry: {{ tiers: [1s] }} }}"));
                ("retry-tier", format!("pipelines: {{ {pipelines} }}"))
            }
            Subject::Worker => {
                let topics = each(&|side, topic| format!("{side}: {topic}"));
                let output = format!("{{ pointer: /app, topics: {{ {topics} }}, default: {name}-{OTHERS} }}");
                (
                    "enricher",
                    format!("pipelines: {{ {name}: {{ output: {output}, http: {{ url: '{endpoint}' }} }} }}"),
                )
            }
        };
        let config = format!(
            "instance: {name}
kafka: {{ brokers: '{}', topics: {{ create: true, partitions: {PARTITIONS} }} }}
{own}
",
            self.broker.address
        );
        let process = Running::start(program, name, &config)?;
        process.wait_until_ready()?;
        Ok(process)
    }

    /// What is written for a record that is due now, or soon.
    fn record(&self, side: &str, number: usize) -> Output {
        let delay = match self.subject {
            Subject::Scheduler | Subject::Tier => Duration::from_secs(1),
            Subject::Worker => Duration::ZERO,
        };
        let due = SystemClock.now().after(delay);
        let data = data(number, due);
        let output = |topic: String, value| Output {
            topic: topic.into(),
            partition: None,
            key: None,
            value: Some(String::into(value)),
            headers: Headers::new(),
        };
        match self.subject {
            Subject::Scheduler => output(
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
            Subject::Worker => output(self.name.clone(), format!(r#"{{"app":"{side}",{}"#, &data[1..])),
        }
    }

    fn trickle(&self, side: &str, stop: &AtomicBool) -> anyhow::Result<usize> {
        self.broker
            .trickle(RATE, stop, |number| self.record(side, number))
    }

    /// Begins and ends a cause, with records for its topic, and returns when it did.
    fn let_it_happen(
        &self,
        cause: Cause,
        second: &mut LocalKafka,
        lasts: Duration,
    ) -> anyhow::Result<Range<Timestamp>> {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| self.trickle(cause.name, &stop));
            sleep(AROUND);
            let times = self.change(cause, second, lasts);
            sleep(AROUND);
            stop.store(true, Ordering::SeqCst);
            sender
                .join()
                .map_err(|_| anyhow::anyhow!("the producer panicked"))??;
            times
        })
    }

    fn change(
        &self,
        cause: Cause,
        second: &mut LocalKafka,
        lasts: Duration,
    ) -> anyhow::Result<Range<Timestamp>> {
        let topic = self.output(cause.name);
        let from = SystemClock.now();
        let to = from.after(lasts);
        match cause {
            NONE => {}
            DELETED => {
                let topics = [&*topic];
                block_on(self.broker.delete(&topics))?;
            }
            REFUSED => acls::deny_writes(&self.broker.address, &topic)?,
            _ => second.stop()?,
        }
        sleep(EFFECTIVE);
        let watch = self.broker.watch(&topic, PARTITIONS)?;
        // Without a leader, there is nothing to write to.
        let is_checked = cause == REFUSED || cause == TOO_FEW;
        let written = || if is_checked { watch.end() } else { Ok(0) };
        let before = written()?;
        sleep(SystemClock.until(to));
        ensure!(written()? == before, "{topic} was written");
        match cause {
            NONE => {}
            // Otherwise, its records would fill `in_flight` of the worker during the next causes.
            DELETED => block_on(self.create(cause.name, cause))?,
            REFUSED => acls::permit_writes(&self.broker.address, &topic)?,
            _ => second.start_again()?,
        }
        Ok(from..to)
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(future))
}
