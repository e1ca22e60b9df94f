//! An environment for tests of the scheduler: topics, a group and Redis keys that no other test uses on real Kafka and
//! Redis, the real binary as one or several processes, and the oracle.
//!
//! ```text
//! let env = SchedulerEnv::new(SchedulerEnv::builder("kinds"));
//! let mut scheduler = env.start("a");
//! let sent = env.send(vec![Request::json(JobSpec::new("mail", "1"))]);
//! let report = env.settle(sent);
//! ```

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use futures::future::{join_all, try_join_all};
use redeliver_core::{Clock as _, JobId, Output, Record, SystemClock, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::{Producer, Written};
use redeliver_kafka::reader::TopicReader;
use redeliver_proto::{Message as _, v1};
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::listen::Listener;
use redeliver_scheduler::job::{Job, JobState, Kind, Payload, Priority};
use redeliver_service::{Host, topics};
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{
    EnvBuilder, ServiceProcess, TestEnv, ensure, eventually, eventually_async, free_port, until_seen,
};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use crate::oracle::{Deletion, Intent, JobSpec, Report, Seen, Sent, Topics, check};
use crate::requests::{Request, in_millis, now};

pub(crate) use redeliver_testkit::DEADLINE;

/// The applications of every environment.
pub(crate) const APPS: [&str; 3] = ["crawl", "mail", "sms"];

/// What a change results in, once Kafka takes it. On a busy machine it may not: then nothing was written.
pub(crate) async fn changed<T>(mut change: impl AsyncFnMut() -> Result<Response<T>, Status>) -> T {
    eventually_async("Kafka takes the change", DEADLINE, async || {
        match change().await {
            Err(status) if status.code() == Code::Unavailable => Err(status),
            result => Ok(result.unwrap().into_inner()),
        }
    })
    .await
}

pub(crate) struct SchedulerEnv {
    pub(crate) test: TestEnv,
    pub(crate) topics: Topics,
    pub(crate) kafka: KafkaSettings,
    producer: Producer,
    runtime: tokio::runtime::Runtime,
}

impl SchedulerEnv {
    /// On the shared Kafka and Redis, with the topics `{name}-{app}` for the applications.
    pub(crate) fn builder(name: &str) -> EnvBuilder {
        let topics = APPS.map(|app| format!("{{name}}-{app}"));
        let apps: Vec<(&str, &str)> = APPS.into_iter().zip(topics.iter().map(String::as_str)).collect();
        EnvBuilder::new(name).creates_topics().scheduler(&apps)
    }

    pub(crate) fn new(builder: EnvBuilder) -> Self {
        let test = builder.build();
        let name = test.name();
        let topic = |of: &str| Arc::from(format!("{name}-{of}"));
        let kafka = KafkaSettings::new(test.brokers().to_owned(), format!("{name}-test"));
        Self {
            topics: Topics {
                ingest: topic("jobs-ingest"),
                state: topic("jobs-state"),
                dlq: topic("jobs-dlq"),
                answers: topic("jobs-answers"),
                apps: APPS.map(|app| (app.to_owned(), topic(app))).into(),
                partitions: i32::try_from(test.partitions()).unwrap(),
                max_ended: None,
                window_when_full: None,
            },
            producer: Producer::new(&kafka).unwrap(),
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap(),
            kafka,
            test,
        }
    }

    /// Takes note that the ingest topic and the state topic have grown. The producer is replaced, because it may not know the new
    /// partitions yet.
    pub(crate) fn grown_to(&mut self, partitions: i32) {
        self.topics.partitions = partitions;
        self.producer = Producer::new(&self.kafka).unwrap();
    }

    /// A scheduler that has just been started.
    pub(crate) fn spawn(&self, instance: &str) -> ServiceProcess {
        self.test.spawn("scheduler", instance, &[])
    }

    /// A scheduler that is ready.
    pub(crate) fn start(&self, instance: &str) -> ServiceProcess {
        self.test.start("scheduler", instance, &[])
    }

    /// Two schedulers that are ready, and the addresses of their APIs, which they keep when they start again.
    pub(crate) fn start_two(&self) -> ([ServiceProcess; 2], [String; 2]) {
        let addresses = [free_port(), free_port()].map(|port| format!("127.0.0.1:{port}"));
        let start = |instance: &str, address: &str| {
            let listen = format!("scheduler.listen={address}");
            self.test.start("scheduler", instance, &["--set", &listen])
        };
        let schedulers = [start("a", &addresses[0]), start("b", &addresses[1])];
        (schedulers, addresses)
    }

    /// A connection to the API of a scheduler.
    pub(crate) fn channel(&self, scheduler: &mut ServiceProcess) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{}", api_address(scheduler))).unwrap();
        self.block_on(endpoint.connect()).unwrap()
    }

    /// Runs a future in the background.
    pub(crate) fn spawn_task<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.runtime.spawn(future)
    }

    /// Writes records to any topic.
    pub(crate) fn write(&self, outputs: &[Output]) {
        let sending = try_join_all(outputs.iter().map(|output| self.producer.send(output)));
        self.block_on(sending).unwrap();
    }

    /// Runs a future to its end.
    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Writes requests to the ingest topic.
    pub(crate) fn send(&self, requests: Vec<Request>) -> Vec<Sent> {
        let outputs: Vec<Output> = requests.iter().map(|request| self.output(request)).collect();
        let sending = try_join_all(outputs.iter().map(|output| self.producer.send(output)));
        let written = self.block_on(sending).unwrap();
        let sent = requests.into_iter().zip(outputs).zip(written);
        sent.map(|((request, output), written)| into_sent(request, output, written))
            .collect()
    }

    /// Writes each request to the ingest topic at its time.
    pub(crate) fn send_at(&self, requests: Vec<(Timestamp, Request)>) -> Vec<Sent> {
        let sending = requests.into_iter().map(async |(moment, request)| {
            tokio::time::sleep(SystemClock.until(moment)).await;
            let output = self.output(&request);
            let written = self.producer.send(&output).await.unwrap();
            into_sent(request, output, written)
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

    /// Watches all topics except the one of an application, which does not exist.
    pub(crate) fn watch_without(&self, app: &str) -> Watch<'_> {
        Watch::new(self, Some(app))
    }

    /// Watches all topics, one of which the test will delete.
    pub(crate) fn watch_deleting(&self, app: &str) -> Watch<'_> {
        let mut watch = self.watch_without(app);
        watch.follow(app);
        watch
    }

    /// Deletes the topic of an application.
    pub(crate) fn delete_topic(&self, app: &str) {
        delete_topic(&self.kafka.brokers, &self.topics.apps[app]);
    }

    /// Creates the topics that do not exist.
    pub(crate) fn create_topics(&self) {
        self.block_on(async {
            let start = Start::new(
                Arc::new(Config::from_yaml(&self.test.yaml()).unwrap()),
                CancellationToken::new(),
                Listener::bind("admin.listen", ([127, 0, 0, 1], 0).into()).unwrap(),
            );
            let mut host = Host::new("scheduler", start);
            let spec = topics::of_scheduler(&host.config);
            host.ensure_topics(&spec).await.unwrap();
        });
    }

    /// Waits until all requests have a final outcome; see [`Watch::settle`].
    #[track_caller]
    pub(crate) fn settle(&self, mut sent: Vec<Sent>) -> Report {
        self.watch().settle(&mut sent)
    }
}

fn into_sent(request: Request, output: Output, written: Written) -> Sent {
    Sent {
        position: written.position,
        at: written.timestamp.expect("the broker keeps the producer's time"),
        key: output.key,
        value: output.value,
        headers: output.headers,
        intent: request.intent,
        answer_to: request.answer_to,
    }
}

/// Follows the topics of an environment.
pub(crate) struct Watch<'a> {
    env: &'a SchedulerEnv,
    state: TopicReader,
    others: TopicReader,
    /// The topic of an application that the test deletes and creates.
    changing: Option<TopicReader>,
    pub(crate) seen: Seen,
    /// How many jobs have ended, according to the state topic.
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
            changing: None,
            env,
            seen: Seen::default(),
            ended: 0,
        }
    }

    pub(crate) fn env(&self) -> &'a SchedulerEnv {
        self.env
    }

    /// Waits until the state topic contains this many jobs.
    #[track_caller]
    pub(crate) fn until_known(&mut self, count: usize) {
        eventually("jobs are known", DEADLINE, || {
            self.look_at_state();
            let known: BTreeSet<_> = self.seen.state.iter().map(|record| record.key.clone()).collect();
            ensure(known.len() >= count, format!("{} of {count}", known.len()))
        });
    }

    /// Reads new records of the state topic, and returns how many jobs have ended.
    pub(crate) fn look_at_state(&mut self) -> usize {
        let (seen, ended) = (&mut self.seen, &mut self.ended);
        let visit = |record: Record| {
            let state = record.value.clone().map(v1::JobRecord::decode);
            *ended += usize::from(matches!(state, Some(Ok(job)) if job.ended_ms.is_some()));
            seen.state.push(record);
        };
        self.state.read_to_end(DEADLINE, visit).unwrap();
        self.ended
    }

    /// Reads new records of all topics. The state topic comes first, so that the other topics contain all that it implies.
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
        self.others.read_to_end(DEADLINE, visit).unwrap();
        if let Some(changing) = &mut self.changing {
            let visit = |record| seen.apps.push(record);
            changing.read_to_end(DEADLINE, visit).unwrap();
        }
    }

    /// Reads the topic of an application to its end, and deletes it.
    pub(crate) fn delete_topic(&mut self, app: &str) {
        // The transactions of these states are complete, so that their records are read now.
        self.look_at_state();
        let known = self.seen.state.len();
        let mut changing = self.changing.take().expect("its topic exists");
        let visit = |record| self.seen.apps.push(record);
        changing.read_to_end(DEADLINE, visit).unwrap();
        drop(changing);
        self.env.delete_topic(app);
        self.seen.deletions.push(Deletion {
            app: app.to_owned(),
            states: known..usize::MAX,
        });
    }

    /// Call this when schedulers have noticed the last deletion. From then on, they write nothing to the topic until it exists again.
    pub(crate) fn deletion_is_noticed(&mut self) {
        self.look_at_state();
        let deletion = self.seen.deletions.last_mut().expect("a topic was deleted");
        deletion.states.end = self.seen.state.len();
    }

    /// Creates the topic of an application again.
    pub(crate) fn create_topic(&mut self, app: &str) {
        self.env.create_topics();
        self.follow(app);
    }

    /// Reads also the topic of this application.
    fn follow(&mut self, app: &str) {
        let topic = self.env.topics.apps[app].clone();
        let reader = eventually("the topic exists", DEADLINE, || {
            TopicReader::new(&self.env.kafka, std::slice::from_ref(&topic))
        });
        self.changing = Some(reader);
    }

    /// Waits until this many jobs have ended.
    #[track_caller]
    pub(crate) fn until_jobs_ended(&mut self, count: usize) {
        until_seen("jobs end", || self.look_at_state(), |ended| *ended >= count);
    }

    /// Waits until all requests have a final outcome. Then sends one more job to each shard and waits until they are
    /// dispatched: a shard that has just recovered would first dispatch a job that it wrongly considers as waiting. The
    /// report must be clean. The last jobs are added to `sent`.
    #[track_caller]
    pub(crate) fn settle(&mut self, sent: &mut Vec<Sent>) -> Report {
        let env = self.env;
        self.until_ended(sent);
        let last = (0..env.topics.partitions)
            .map(|shard| Request::protobuf(JobSpec::new(APPS[0], "the last one")).partition(shard));
        sent.extend(env.send(last.collect()));
        self.until_ended(sent);
        self.look();
        let report = check(sent, &env.topics, &self.seen);
        println!("{}: {report}", env.test.name());
        assert!(report.is_clean(), "{report}");
        report
    }

    /// Waits until all requests have a final outcome.
    #[track_caller]
    fn until_ended(&mut self, sent: &[Sent]) {
        let began = Instant::now();
        let fewest = fewest_jobs(sent);
        eventually("all requests have a final outcome", DEADLINE, || {
            // A check is expensive, so it runs once it may succeed, or shortly before the deadline to be printed.
            let mut ended = self.look_at_state();
            if self.env.topics.window_when_full.is_some() {
                // Rejected jobs are not in the state topic.
                self.look();
                ended += self.seen.dlq.len();
            }
            if ended < fewest && began.elapsed() < DEADLINE.mul_f64(0.95) {
                return Err(format!("{ended} of {fewest} jobs have ended"));
            }
            self.look();
            let report = check(sent, &self.env.topics, &self.seen);
            ensure(report.waiting.is_empty(), report.to_string())
        });
    }
}

/// The minimum number of jobs.
fn fewest_jobs(sent: &[Sent]) -> usize {
    let mut keys = BTreeSet::new();
    let mut others = 0;
    for sent in sent {
        if let Intent::Job(spec) = &sent.intent {
            match &spec.idempotency_key {
                Some(key) => drop(keys.insert((&spec.app, key))),
                None => others += 1,
            }
        }
    }
    keys.len() + others
}

/// The address of the API of a scheduler, once it serves.
pub(crate) fn api_address(scheduler: &mut ServiceProcess) -> String {
    scheduler.word_after("serving the job API (gRPC and REST) address=")
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

/// The id of a job whose request was sent to the right partition and is not a duplicate.
pub(crate) fn id(sent: &Sent) -> JobId {
    JobId::new(sent.at, sent.position.partition, sent.position.offset)
}

/// The answers, by the name of the request.
pub(crate) fn answers(seen: &Seen) -> HashMap<String, v1::Outcome> {
    let answers = seen.answers.iter().map(|record| {
        let name = String::from_utf8(record.key.clone().unwrap().into()).unwrap();
        let answer = v1::CommandOutcome::decode(record.value.clone().unwrap()).unwrap();
        (name, answer.outcome())
    });
    answers.collect()
}

/// A job that is due in an hour.
pub(crate) fn far(offset: i64, env: &SchedulerEnv) -> Job {
    waiting(JobId::new(now(), 0, offset), &env.topics.apps["crawl"])
}

/// A job without a payload that is due in an hour.
pub(crate) fn waiting(id: JobId, topic: &str) -> Job {
    Job {
        id,
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
        topic: topic.into(),
        payload: Payload::default(),
        ended: None,
        expires: None,
        occurrence: None,
        released: None,
    }
}
