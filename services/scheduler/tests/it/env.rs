//! A scheduler's world that belongs to one test: topics, group and Redis keys of its own on real Kafka and Redis,
//! the real binary as one process or several, and the oracle.
//!
//! ```text
//! let env = Setup::new("kinds").create();
//! let mut scheduler = env.start("a");
//! let asked = env.ask(vec![Request::json(Wanted::new("mail", "1"))]);
//! let verdict = env.settle(asked);
//! ```

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::{join_all, try_join_all};
use redeliver_core::{Clock as _, JobId, Output, Record, SystemClock, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::{Producer, Written};
use redeliver_kafka::reader::TopicReader;
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{Process, ServiceProcess, binary, eventually, redis_url, unique};

use crate::oracle::{Asked, Seen, Topics, Verdict, Wanted, Wish, judge};
use crate::requests::Request;

/// How long anything may take, on a machine that is busy with other tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// The applications of every environment.
pub(crate) const APPS: [&str; 3] = ["crawl", "mail", "sms"];

/// An environment in the making.
pub(crate) struct Setup {
    name: String,
    brokers: String,
    redis: String,
    partitions: u32,
    settings: Vec<(String, String)>,
}

pub(crate) struct SchedulerEnv {
    pub(crate) name: String,
    pub(crate) topics: Topics,
    pub(crate) kafka: KafkaSettings,
    file: PathBuf,
    settings: Vec<(String, String)>,
    producer: Producer,
    runtime: tokio::runtime::Runtime,
    _scratch: Scratch,
}

impl Setup {
    /// An environment with a unique name that begins with this one, on the Kafka and Redis that all tests share.
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: unique(name),
            brokers: String::new(),
            redis: String::new(),
            partitions: 4,
            settings: Vec::new(),
        }
    }

    /// On brokers of the test's own.
    pub(crate) fn brokers(self, brokers: impl Into<String>) -> Self {
        let brokers = brokers.into();
        Self { brokers, ..self }
    }

    /// On a Redis of the test's own.
    pub(crate) fn redis(self, redis: impl Into<String>) -> Self {
        let redis = redis.into();
        Self { redis, ..self }
    }

    /// How many partitions each topic has.
    pub(crate) fn partitions(self, partitions: u32) -> Self {
        Self { partitions, ..self }
    }

    /// Any setting, by its dotted key.
    pub(crate) fn set(mut self, key: &str, value: &str) -> Self {
        self.settings.push((key.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn create(self) -> SchedulerEnv {
        let Self {
            name,
            mut brokers,
            mut redis,
            partitions,
            settings,
        } = self;
        if brokers.is_empty() {
            brokers = redeliver_testkit::brokers();
        }
        if redis.is_empty() {
            redis = redis_url();
        }
        let scratch = Scratch::new("env").unwrap();
        let apps: Vec<String> = APPS.map(|app| format!("{app}: {{ topic: {name}-{app} }}")).into();
        let text = format!(
            "kafka: {{ brokers: '{brokers}', topics: {{ create: true, partitions: {partitions} }} }}\n\
             redis: {{ url: '{redis}', prefix: {name} }}\nadmin: {{ listen: 127.0.0.1:0 }}\n\
             scheduler:\n  listen: 127.0.0.1:0\n  group: {name}\n  apps: {{ {} }}\n  \
             topics: {{ ingest: {name}-ingest, state: {name}-state, dlq: {name}-dlq, answers: {name}-answers }}\n",
            apps.join(", ")
        );
        let file = scratch.path().join("redeliver.yaml");
        std::fs::write(&file, text).unwrap();
        let topic = |of: &str| Arc::from(format!("{name}-{of}"));
        let kafka = KafkaSettings::new(brokers, format!("{name}-test"));
        SchedulerEnv {
            topics: Topics {
                ingest: topic("ingest"),
                state: topic("state"),
                dlq: topic("dlq"),
                answers: topic("answers"),
                apps: APPS.map(|app| (app.to_owned(), topic(app))).into(),
                partitions: i32::try_from(partitions).unwrap(),
            },
            producer: Producer::new(&kafka).unwrap(),
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap(),
            kafka,
            name,
            file,
            settings,
            _scratch: scratch,
        }
    }
}

impl SchedulerEnv {
    /// A scheduler that has just been started.
    pub(crate) fn spawn(&self, instance: &str) -> ServiceProcess<'_> {
        let instance = instance.to_owned();
        let name = format!("scheduler {instance}");
        ServiceProcess::spawn(name, move |environment| {
            let mut command = binary("scheduler");
            command.env_clear().envs(environment.iter().copied());
            command.arg("--config").arg(&self.file);
            command
                .arg("--set")
                .arg(format!("instance={}-{instance}", self.name));
            for (key, value) in &self.settings {
                command.arg("--set").arg(format!("{key}={value}"));
            }
            Process::spawn(command).unwrap()
        })
    }

    /// A scheduler that is ready.
    pub(crate) fn start(&self, instance: &str) -> ServiceProcess<'_> {
        let mut member = self.spawn(instance);
        member.until_ready();
        member
    }

    /// Changes a setting for schedulers that are started from now on, by its dotted key.
    pub(crate) fn set(&mut self, key: &str, value: &str) {
        self.settings.push((key.to_owned(), value.to_owned()));
    }

    /// The configuration that schedulers are started with, but for single settings.
    pub(crate) fn configuration(&self) -> String {
        std::fs::read_to_string(&self.file).unwrap()
    }

    /// Runs something beside the test.
    pub(crate) fn spawn_task<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.runtime.spawn(future)
    }

    /// Writes records to any topic, all at once.
    pub(crate) fn write(&self, outputs: &[Output]) {
        let sending = try_join_all(outputs.iter().map(|output| self.producer.send(output)));
        self.block_on(sending).unwrap();
    }

    /// Runs something asynchronous to its end.
    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Writes requests to the ingest topic, all at once.
    pub(crate) fn ask(&self, requests: Vec<Request>) -> Vec<Asked> {
        let outputs: Vec<Output> = requests.iter().map(|request| self.output(request)).collect();
        let sending = try_join_all(outputs.iter().map(|output| self.producer.send(output)));
        let written = self.block_on(sending).unwrap();
        let asked = requests.into_iter().zip(outputs).zip(written);
        asked
            .map(|((request, output), written)| as_asked(request, output, written))
            .collect()
    }

    /// Writes each request at its time.
    pub(crate) fn ask_at(&self, requests: Vec<(Timestamp, Request)>) -> Vec<Asked> {
        let sending = requests.into_iter().map(async |(moment, request)| {
            tokio::time::sleep(SystemClock.until(moment)).await;
            let output = self.output(&request);
            let written = self.producer.send(&output).await.unwrap();
            as_asked(request, output, written)
        });
        self.block_on(join_all(sending))
    }

    fn output(&self, request: &Request) -> Output {
        Output {
            topic: self.topics.ingest.clone(),
            partition: request.home(self.topics.partitions),
            key: request.key.clone(),
            value: request.value(),
            headers: request.headers.clone(),
        }
    }

    /// Watches all topics from their beginning.
    pub(crate) fn watch(&self) -> Watch<'_> {
        Watch::new(self, None)
    }

    /// Watches all topics but that of an application, which does not exist.
    pub(crate) fn watch_without(&self, app: &str) -> Watch<'_> {
        Watch::new(self, Some(app))
    }

    /// Waits until everything has come to its end; see [`Watch::settle`].
    #[track_caller]
    pub(crate) fn settle(&self, mut asked: Vec<Asked>) -> Verdict {
        self.watch().settle(&mut asked)
    }
}

fn as_asked(request: Request, output: Output, written: Written) -> Asked {
    Asked {
        place: written.position,
        at: written.timestamp.expect("the broker keeps the producer's time"),
        key: output.key,
        value: output.value,
        headers: output.headers,
        wish: request.wish,
        answer_to: request.answer_to,
    }
}

/// All that has come to the topics so far.
pub(crate) struct Watch<'a> {
    env: &'a SchedulerEnv,
    state: TopicReader,
    others: TopicReader,
    pub(crate) seen: Seen,
    /// Jobs that have ended, by the state topic.
    ended: usize,
}

impl<'a> Watch<'a> {
    fn new(env: &'a SchedulerEnv, without: Option<&str>) -> Self {
        let topics = &env.topics;
        let mut others = vec![topics.ingest.clone(), topics.dlq.clone(), topics.answers.clone()];
        let apps = topics
            .apps
            .iter()
            .filter(|(app, _)| Some(app.as_str()) != without);
        others.extend(apps.map(|(_, topic)| topic.clone()));
        Self {
            state: TopicReader::new(&env.kafka, std::slice::from_ref(&topics.state)).unwrap(),
            others: TopicReader::new(&env.kafka, &others).unwrap(),
            env,
            seen: Seen::default(),
            ended: 0,
        }
    }

    /// Whose topics are watched.
    pub(crate) fn env(&self) -> &'a SchedulerEnv {
        self.env
    }

    /// Waits until so many jobs are known.
    #[track_caller]
    pub(crate) fn until_so_many_are_known(&mut self, count: usize) {
        eventually("jobs are known", PATIENCE, || {
            self.look_at_state();
            let known: BTreeSet<_> = self.seen.state.iter().map(|record| record.key.clone()).collect();
            if known.len() >= count {
                Ok(())
            } else {
                Err(format!("{} of {count}", known.len()))
            }
        });
    }

    /// Reads what has come to the state topic, and says how many jobs have ended.
    pub(crate) fn look_at_state(&mut self) -> usize {
        let (seen, ended) = (&mut self.seen, &mut self.ended);
        let visit = |record: Record| {
            let state = record.value.clone().map(v1::JobRecord::decode);
            *ended += usize::from(matches!(state, Some(Ok(job)) if job.ended_ms.is_some()));
            seen.state.push(record);
        };
        self.state.read_to_end(PATIENCE, visit).unwrap();
        self.ended
    }

    /// Reads what has come to all topics; the state topic first, so that whatever it says has happened is seen.
    pub(crate) fn look(&mut self) {
        self.look_at_state();
        let (seen, topics) = (&mut self.seen, &self.env.topics);
        let visit = |record: Record| {
            let topic = &record.position.topic;
            let list = if *topic == topics.ingest {
                &mut seen.ingest
            } else if *topic == topics.dlq {
                &mut seen.dlq
            } else if *topic == topics.answers {
                &mut seen.answers
            } else {
                &mut seen.apps
            };
            list.push(record);
        };
        self.others.read_to_end(PATIENCE, visit).unwrap();
    }

    /// Waits until so many jobs have ended.
    #[track_caller]
    pub(crate) fn until_so_many_ended(&mut self, count: usize) {
        eventually("jobs end", PATIENCE, || match self.look_at_state() {
            ended if ended >= count => Ok(()),
            ended => Err(format!("{ended} of {count}")),
        });
    }

    /// Waits until everything has come to its end, and then until each shard, which may have been brought up to
    /// date just then, has dispatched one more job: what it had wrongly taken for waiting would have left before.
    /// The verdict on all of it must be clean. The last jobs are added to what was asked.
    #[track_caller]
    pub(crate) fn settle(&mut self, asked: &mut Vec<Asked>) -> Verdict {
        let env = self.env;
        self.until_ended(asked);
        let last = (0..env.topics.partitions)
            .map(|shard| Request::protobuf(Wanted::new(APPS[0], "the last one")).partition(shard));
        asked.extend(env.ask(last.collect()));
        self.until_ended(asked);
        self.look();
        let verdict = judge(asked, &env.topics, &self.seen);
        println!("{}: {verdict}", env.name);
        assert!(verdict.is_clean(), "{verdict}");
        verdict
    }

    /// Waits until all that was asked has come to its end.
    #[track_caller]
    fn until_ended(&mut self, asked: &[Asked]) {
        let began = Instant::now();
        let fewest = fewest_jobs(asked);
        eventually("everything that was asked has ended", PATIENCE, || {
            // A verdict is dear, so it is only asked for when it may be the last, or is the last word.
            let ended = self.look_at_state();
            if ended < fewest && began.elapsed() < PATIENCE.mul_f64(0.95) {
                return Err(format!("{ended} of {fewest} jobs have ended"));
            }
            self.look();
            let verdict = judge(asked, &self.env.topics, &self.seen);
            if verdict.waiting.is_empty() {
                Ok(())
            } else {
                Err(verdict.to_string())
            }
        });
    }
}

/// How many jobs there are at least.
fn fewest_jobs(asked: &[Asked]) -> usize {
    let mut keys = BTreeSet::new();
    let mut others = 0;
    for asked in asked {
        if let Wish::Job(wanted) = &asked.wish {
            match &wanted.idempotency_key {
                Some(key) => drop(keys.insert((&wanted.app, key))),
                None => others += 1,
            }
        }
    }
    keys.len() + others
}

/// A header of a record, parsed.
#[track_caller]
pub(crate) fn header<T: std::str::FromStr>(record: &Record, name: &str) -> T {
    let value = record
        .headers
        .last(name)
        .and_then(|value| std::str::from_utf8(value).ok());
    let value = value.and_then(|value| value.parse().ok());
    value.unwrap_or_else(|| panic!("{name} of {record:?}"))
}

/// The id of a job that was asked for where it belongs, if it is accepted as a new one.
pub(crate) fn id(asked: &Asked) -> JobId {
    JobId::new(asked.at, asked.place.partition, asked.place.offset)
}

/// The answers, by the names of those who asked.
pub(crate) fn answers(seen: &Seen) -> HashMap<String, v1::Outcome> {
    let answers = seen.answers.iter().map(|record| {
        let name = String::from_utf8(record.key.clone().unwrap().into()).unwrap();
        let answer = v1::CommandOutcome::decode(record.value.clone().unwrap()).unwrap();
        (name, answer.outcome())
    });
    answers.collect()
}
