//! What the tests that run the real binaries share: a [`Setup`] is one pipeline of its own on the real broker,
//! with its configuration file, its topics and an endpoint; a [`Service`] is one of our processes; [`Sent`] is
//! what was produced; [`Ends`] is what has become of it.
//!
//! ```text
//! let setup = Setup::new("crawl").plan(PLAN).create();
//! let (_enricher, _tier) = (setup.enricher("a"), setup.retry_tier("a"));
//! let sent = setup.produce(records(100));
//! setup.settle(&sent, DEADLINE).meets(&PLAN, &sent);
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use redeliver_audit::{AuditOptions, OutputCheck, Report, audit};
use redeliver_core::headers::{self, Origin, ReservedHeaders};
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Headers, Output, Pipeline, Position, Record, SchedulerTopics, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_runtime::Config;
use redeliver_runtime::config::LongWaitsConfig;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{
    FakeEndpoint, Fate, Plan, Process, Reply, Request, binary, brokers, eventually, redis_url, unique,
};

/// How long a process may take to be ready, on a machine that is busy with other tests.
pub(crate) const START: Duration = Duration::from_secs(60);

type Behaviour = Box<dyn Fn(&Request) -> Reply + Send + Sync>;

/// A pipeline that belongs to one test, in the making.
pub(crate) struct Setup {
    name: String,
    brokers: String,
    source_partitions: u32,
    tiers: Vec<u64>,
    settings: BTreeMap<String, String>,
    output: String,
    behaviour: Option<Behaviour>,
}

/// A pipeline that belongs to one test: configured, its topics made, its endpoint listening.
pub(crate) struct Pipe {
    /// The pipeline's name, and its source topic's.
    pub(crate) name: String,
    /// The configuration file that all processes read; settings of the test come as flags.
    pub(crate) file: PathBuf,
    settings: BTreeMap<String, String>,
    /// The pipeline as the services see it.
    pub(crate) pipeline: Pipeline,
    /// How the test itself reaches Kafka.
    pub(crate) kafka: KafkaSettings,
    /// What the enricher calls.
    pub(crate) endpoint: FakeEndpoint,
    check: OutputCheck,
    /// Group and topics of the scheduler, where long waits go through it.
    pub(crate) jobs: Option<(String, SchedulerTopics)>,
    producer: Producer,
    runtime: tokio::runtime::Runtime,
    _scratch: Scratch,
}

impl Setup {
    /// A pipeline with a unique name that begins with this one: four partitions, tiers of about 1, 2 and 4
    /// seconds, an endpoint that echoes, no quick retries.
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: unique(name),
            brokers: String::new(),
            source_partitions: 4,
            tiers: own_tiers(&[1_000, 2_000, 4_000]),
            settings: BTreeMap::new(),
            output: "{name}-out".to_owned(),
            behaviour: None,
        }
    }

    /// The pipeline's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// On a broker of the test's own.
    pub(crate) fn brokers(mut self, brokers: &str) -> Self {
        self.brokers = brokers.to_owned();
        self
    }

    /// How many partitions each topic has.
    pub(crate) fn partitions(mut self, count: u32) -> Self {
        self.source_partitions = count;
        self
    }

    /// The tiers in milliseconds; each gets some milliseconds on top, so that the consumer groups of tiers,
    /// which all pipelines share, are not shared with tests that run at the same time.
    pub(crate) fn tiers(mut self, millis: &[u64]) -> Self {
        self.tiers = own_tiers(millis);
        self
    }

    /// The tiers in milliseconds as they are, for a test that wants to share them.
    pub(crate) fn shared_tiers(mut self, millis: &[u64]) -> Self {
        self.tiers = millis.to_vec();
        self
    }

    /// Waits longer than every tier go through a scheduler of the test's own.
    pub(crate) fn through_scheduler(mut self) -> Self {
        for topic in ["ingest", "state", "dlq", "answers"] {
            let name = format!("{}-jobs-{topic}", self.name);
            self = self.set(&format!("scheduler.topics.{topic}"), &name);
        }
        let group = format!("{}-scheduler", self.name);
        self.pipeline("long_waits", "scheduler")
            .set("scheduler.group", &group)
            .set("scheduler.listen", "127.0.0.1:0")
            .set("redis.url", &redis_url())
            .set("redis.prefix", &group)
    }

    /// A setting of the pipeline, such as `http.timeout` or `return_to`.
    pub(crate) fn pipeline(self, key: &str, value: &str) -> Self {
        let key = format!("pipelines.{}.{key}", self.name);
        self.set(&key, value)
    }

    /// Any setting, by its dotted key.
    pub(crate) fn set(mut self, key: &str, value: &str) -> Self {
        self.settings.insert(key.to_owned(), value.to_owned());
        self
    }

    /// The pipeline's output as it stands in the configuration; `{name}` is replaced by the pipeline's name.
    pub(crate) fn output(mut self, yaml: &str) -> Self {
        yaml.clone_into(&mut self.output);
        self
    }

    /// The endpoint follows this plan.
    pub(crate) fn plan(self, plan: Plan) -> Self {
        self.behave(move |request| plan.reply(request))
    }

    /// The endpoint behaves like this.
    pub(crate) fn behave(mut self, behaviour: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        self.behaviour = Some(Box::new(behaviour));
        self
    }

    /// Writes the file, makes the topics with `redeliver topics apply`, starts the endpoint.
    pub(crate) fn create(self) -> Pipe {
        let pipe = self.without_topics();
        let applied = pipe.redeliver(&["topics", "apply"]);
        assert_eq!(applied.code, Some(0), "{applied:?}");
        pipe
    }

    /// As [`Setup::create`], but makes no topics.
    pub(crate) fn without_topics(self) -> Pipe {
        let scratch = Scratch::new("pipe").unwrap();
        let behaviour = self.behaviour;
        let endpoint = FakeEndpoint::start(move |request| match &behaviour {
            Some(behaviour) => behaviour(request),
            None => Reply::ok(request.body.clone()),
        });
        let brokers = if self.brokers.is_empty() {
            brokers()
        } else {
            self.brokers
        };
        let name = self.name;
        let tiers: Vec<String> = self.tiers.iter().map(|tier| format!("{tier}ms")).collect();
        let mut text = format!(
            "kafka:\n  brokers: {brokers}\n  topics: {{ partitions: {} }}\nadmin:\n  listen: 127.0.0.1:0\n\
             pipelines:\n  {name}:\n    output: {}\n    retry: {{ tiers: [{}] }}\n",
            self.source_partitions,
            self.output.replace("{name}", &name),
            tiers.join(", "),
        );
        write!(
            text,
            "    http:\n      url: {}/records\n      timeout: 2s\n      concurrency: 64\n      quick_retries: 0\n",
            endpoint.url()
        )
        .unwrap();
        let file = scratch.path().join("redeliver.yaml");
        std::fs::write(&file, &text).unwrap();
        let sources = redeliver_runtime::config::Sources {
            file: Some(file.clone()),
            environment: BTreeMap::new(),
            overrides: self.settings.clone().into_iter().collect(),
        };
        let config = Config::load(&sources).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let kafka = KafkaSettings::new(brokers, format!("{name}-test"));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let keeps = config.pipelines[&name]
            .http
            .as_ref()
            .is_some_and(|http| http.response == redeliver_runtime::config::ResponseMode::Keep);
        let scheduler = &config.scheduler;
        let long_waits = config.pipelines[&name].long_waits;
        Pipe {
            jobs: (long_waits == LongWaitsConfig::Scheduler)
                .then(|| (scheduler.group.clone(), scheduler.topics())),
            pipeline: config.pipelines[&name].pipeline(&name, &config.scheduler),
            producer: Producer::new(&kafka).unwrap(),
            check: if keeps {
                OutputCheck::Unchanged
            } else {
                OutputCheck::ValueReplaced
            },
            name,
            file,
            settings: self.settings,
            kafka,
            endpoint,
            runtime,
            _scratch: scratch,
        }
    }
}

/// Delays that no other test of this run uses, nor probably one that runs at the same time.
fn own_tiers(millis: &[u64]) -> Vec<u64> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let run = u64::from(std::process::id()) % 10;
    let extra = 1 + run + 10 * (NEXT.fetch_add(1, Ordering::Relaxed) % 20);
    millis.iter().map(|millis| millis + extra).collect()
}

/// What a command printed and how it ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Printed {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

fn configured(name: &str, arguments: &[&str], file: &Path, settings: &BTreeMap<String, String>) -> Command {
    let mut command = binary(name);
    command.env_clear().args(arguments).arg("--config").arg(file);
    for (key, value) in settings {
        command.arg("--set").arg(format!("{key}={value}"));
    }
    command
}

/// What `topics check` prints, without what it says of records that wait in topics of other tests on the same broker.
pub(crate) fn without_other_tests(stdout: &str) -> String {
    let (others, own): (Vec<&str>, Vec<&str>) = stdout
        .lines()
        .partition(|line| line.contains("` is named after pipeline `"));
    let warnings = |line: &str| -> Option<(String, usize)> {
        let (topics, count) = line.split_once(" topics, ")?;
        Some((topics.to_owned(), count.split(' ').next()?.parse().ok()?))
    };
    let own = own.into_iter().map(|line| match warnings(line) {
        Some((topics, count)) if !others.is_empty() => match count - others.len() {
            0 => format!("{topics} topics are as they must be\n"),
            1 => format!("{topics} topics, 1 warning\n"),
            more => format!("{topics} topics, {more} warnings\n"),
        },
        _ => format!("{line}\n"),
    });
    own.collect()
}

/// Runs a command to its end, without the environment of this process.
pub(crate) fn run(mut command: Command) -> Printed {
    let output = command.env_clear().output().unwrap();
    Printed {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Another configuration for the processes of a [`Pipe`]: what it is changed to.
pub(crate) struct Variant {
    file: PathBuf,
    settings: BTreeMap<String, String>,
    /// The pipeline as the services see it then.
    pub(crate) pipeline: Pipeline,
}

impl Pipe {
    /// A command of one of our binaries with this pipeline's configuration.
    pub(crate) fn command(&self, name: &str, arguments: &[&str]) -> Command {
        configured(name, arguments, &self.file, &self.settings)
    }

    /// The configuration with another text and with these settings over those of the test.
    pub(crate) fn variant(&self, edit: impl Fn(&str) -> String, settings: &[(String, String)]) -> Variant {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let text = edit(&std::fs::read_to_string(&self.file).unwrap());
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let file = self.file.with_file_name(format!("changed-{number}.yaml"));
        std::fs::write(&file, &text).unwrap();
        let mut all = self.settings.clone();
        all.extend(settings.iter().cloned());
        let sources = redeliver_runtime::config::Sources {
            file: Some(file.clone()),
            environment: BTreeMap::new(),
            overrides: all.clone().into_iter().collect(),
        };
        let config = Config::load(&sources).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let pipeline = config.any_pipeline(&self.name).unwrap();
        Variant {
            file,
            settings: all,
            pipeline: pipeline.pipeline(&self.name, &config.scheduler),
        }
    }

    /// Runs the CLI to its end with another configuration.
    pub(crate) fn redeliver_with(&self, variant: &Variant, arguments: &[&str]) -> Printed {
        run(configured(
            "redeliver",
            arguments,
            &variant.file,
            &variant.settings,
        ))
    }

    /// Starts a service with another configuration, and waits until it is ready.
    pub(crate) fn start_with(
        &self,
        variant: &Variant,
        service: &str,
        instance: &str,
        arguments: &[&str],
    ) -> Service {
        let command = configured(service, arguments, &variant.file, &variant.settings);
        let mut service = self.spawn_as(service, instance, command);
        service.until_ready();
        service
    }

    /// Runs the CLI to its end.
    pub(crate) fn redeliver(&self, arguments: &[&str]) -> Printed {
        run(self.command("redeliver", arguments))
    }

    /// Starts an enricher whose instance name ends with this, and waits until it is ready.
    pub(crate) fn enricher(&self, instance: &str) -> Service {
        self.start("enricher", instance, &[])
    }

    /// Starts a process for all retry tiers, and waits until it is ready.
    pub(crate) fn retry_tier(&self, instance: &str) -> Service {
        self.start("retry-tier", instance, &[])
    }

    /// Starts a scheduler, and waits until it is ready.
    pub(crate) fn scheduler(&self, instance: &str) -> Service {
        self.start("scheduler", instance, &[])
    }

    /// Starts a service with more arguments, and waits until it is ready.
    pub(crate) fn start(&self, service: &str, instance: &str, arguments: &[&str]) -> Service {
        let mut service = self.spawn(service, instance, arguments);
        service.until_ready();
        service
    }

    /// Starts a service and waits for nothing.
    pub(crate) fn spawn(&self, service: &str, instance: &str, arguments: &[&str]) -> Service {
        self.spawn_as(service, instance, self.command(service, arguments))
    }

    fn spawn_as(&self, service: &str, instance: &str, mut command: Command) -> Service {
        command
            .arg("--set")
            .arg(format!("instance={}-{instance}", self.name));
        Service {
            process: Process::spawn(command).unwrap(),
            name: format!("{service} {instance}"),
        }
    }

    /// Writes records to the source, all at once; says where they stand and when they came.
    pub(crate) fn produce(&self, records: Vec<Draft>) -> Vec<Sent> {
        self.produce_to(&self.pipeline.source, records)
    }

    /// As [`Pipe::produce`], to any topic.
    pub(crate) fn produce_to(&self, topic: &Arc<str>, records: Vec<Draft>) -> Vec<Sent> {
        self.produce_with(&self.producer, topic, records)
    }

    /// As [`Pipe::produce_to`], with another producer.
    pub(crate) fn produce_with(
        &self,
        producer: &Producer,
        topic: &Arc<str>,
        records: Vec<Draft>,
    ) -> Vec<Sent> {
        let outputs: Vec<Output> = records
            .iter()
            .map(|draft| Output {
                topic: topic.clone(),
                partition: None,
                key: draft.key.clone(),
                value: draft.value.clone(),
                headers: draft.headers.clone(),
            })
            .collect();
        let sending = try_join_all(outputs.iter().map(|output| producer.send(output)));
        let written = self.runtime.block_on(sending).unwrap();
        records
            .into_iter()
            .zip(written)
            .map(|(draft, written)| Sent {
                draft,
                position: written.position,
            })
            .collect()
    }

    /// All records of topics up to now, as a read_committed consumer sees them.
    pub(crate) fn read(&self, topics: &[Arc<str>]) -> Vec<Record> {
        let mut records = Vec::new();
        TopicReader::new(&self.kafka, topics)
            .unwrap()
            .read_to_end(START, |record| records.push(record))
            .unwrap();
        records
    }

    /// The output topics and the dead-letter topic.
    pub(crate) fn end_topics(&self) -> Vec<Arc<str>> {
        end_topics(&self.pipeline)
    }

    /// Follows the ends of records from the beginning.
    pub(crate) fn watch(&self) -> Watch {
        Watch {
            reader: TopicReader::new(&self.kafka, &self.end_topics()).unwrap(),
            dead_letters: self.pipeline.dead_letter_topic(),
            records: Vec::new(),
        }
    }

    /// Waits until as many records as were sent have ended and nothing is waiting, then asks the oracle, which
    /// must find nothing wrong.
    #[track_caller]
    pub(crate) fn settle(&self, sent: &[Sent], deadline: Duration) -> Ends {
        let mut watch = self.watch();
        watch.until_ended(sent.len(), deadline);
        let report = self.settled_report();
        assert!(report.is_clean(), "{report}");
        assert_eq!(report.output + report.dead, sent.len() as u64, "{report}");
        watch.look();
        Ends {
            origins: self.origins(),
            records: watch.records,
            pipeline: self.pipeline.clone(),
            check: self.check,
            report,
        }
    }

    /// The oracle's report once nothing is waiting.
    #[track_caller]
    pub(crate) fn settled_report(&self) -> Box<Report> {
        eventually("nothing is waiting", START, || {
            let report = self.audit();
            if report.waiting.total() == 0 {
                Ok(report)
            } else {
                Err(report)
            }
        })
    }

    /// Asks the oracle.
    pub(crate) fn audit(&self) -> Box<Report> {
        self.audit_of(&self.pipeline)
    }

    /// Asks the oracle about the pipeline with other settings.
    pub(crate) fn audit_of(&self, pipeline: &Pipeline) -> Box<Report> {
        let options = AuditOptions {
            output: self.check,
            scheduler: self.jobs.clone(),
            timeout: START,
        };
        Box::new(audit(&self.kafka, pipeline, &options).unwrap())
    }

    /// When each record of the source was written there.
    fn origins(&self) -> HashMap<Position, Record> {
        let records = self.read(std::slice::from_ref(&self.pipeline.source));
        records
            .into_iter()
            .map(|record| (record.position.clone(), record))
            .collect()
    }
}

/// A process of ours; killed when it is dropped.
pub(crate) struct Service {
    /// To kill, freeze, thaw, measure.
    pub(crate) process: Process,
    name: String,
}

impl Service {
    /// Where its admin port is, once it has said so.
    #[track_caller]
    pub(crate) fn admin(&mut self) -> SocketAddr {
        let output = self.process.wait_for_output(" admin=127.0.0.1:", START);
        let address = output.split(" admin=").nth(1).unwrap_or_default();
        let address = address.split_whitespace().next().unwrap_or_default();
        address
            .parse()
            .unwrap_or_else(|_| panic!("no address: `{address}`"))
    }

    /// Waits until all its parts are ready.
    #[track_caller]
    pub(crate) fn until_ready(&mut self) {
        let admin = self.admin();
        let what = format!("{} is ready", self.name);
        eventually(&what, START, || match get(admin, "/readyz") {
            Ok((200, _)) => Ok(()),
            Ok((status, body)) => Err(format!("{status} {body}")),
            Err(error) => Err(error.to_string()),
        });
    }

    /// A page of its admin port: status and body.
    #[track_caller]
    pub(crate) fn get(&mut self, path: &str) -> (u16, String) {
        get(self.admin(), path).unwrap()
    }

    /// Asks it to end in order, and says with which code it did.
    #[track_caller]
    pub(crate) fn end(&mut self) -> Option<i32> {
        self.process.terminate();
        self.process.wait(START).code()
    }
}

/// The output topics and the dead-letter topic of a pipeline.
pub(crate) fn end_topics(pipeline: &Pipeline) -> Vec<Arc<str>> {
    let topics = pipeline.topics().into_iter();
    topics
        .filter(|(_, role)| matches!(role, TopicRole::Output | TopicRole::DeadLetter))
        .map(|(topic, _)| topic)
        .collect()
}

/// One GET over HTTP/1.1: status and body.
pub(crate) fn get(address: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
    let patience = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&address, patience)?;
    stream.set_read_timeout(Some(patience))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    status
        .zip(body)
        .ok_or_else(|| std::io::Error::other(format!("no HTTP answer: `{answer}`")))
}

/// A record to be produced.
#[derive(Clone, Debug, Default)]
pub(crate) struct Draft {
    pub(crate) key: Option<Bytes>,
    pub(crate) value: Option<Bytes>,
    pub(crate) headers: Headers,
}

impl Draft {
    /// A record with this key and value and no headers.
    pub(crate) fn new(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self {
            key: Some(key.into()),
            value: Some(value.into()),
            headers: Headers::new(),
        }
    }

    /// With one more header.
    pub(crate) fn header(mut self, name: &str, value: &[u8]) -> Self {
        self.headers.push(name, Some(value));
        self
    }
}

/// A record that was produced.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) draft: Draft,
    pub(crate) position: Position,
}

impl Sent {
    /// What the endpoint is called with.
    pub(crate) fn body(&self) -> &[u8] {
        self.draft.value.as_deref().unwrap_or_default()
    }

    /// The key under which the endpoint is called.
    pub(crate) fn idempotency_key(&self) -> String {
        let Position {
            topic,
            partition,
            offset,
        } = &self.position;
        format!("{topic}-{partition}-{offset}")
    }
}

/// This many records of all sorts: keys and values of any bytes, empty ones and none; headers that stand
/// twice, are empty or null, or look nearly like ours. Values differ, so that each has its own fate.
pub(crate) fn records(count: usize) -> Vec<Draft> {
    let draft = |n: usize| {
        let key = match n % 7 {
            0 => None,
            1 => Some(Bytes::new()),
            2 => Some(Bytes::from(vec![0xff, 0x00, n.to_le_bytes()[0]])),
            _ => Some(Bytes::from(format!("customer-{}", n % 97))),
        };
        let mut value = format!("record {n} ").into_bytes();
        if n.is_multiple_of(3) {
            value.extend([0x00, 0xff, 0xfe, b'\r', b'\n']);
        }
        if n.is_multiple_of(50) {
            value.resize(20_000, b'x');
        }
        let mut list = Headers::new();
        if n.is_multiple_of(2) {
            list.push("tenant", Some(b"a"));
            list.push("tenant", Some(b"b"));
            list.push("tenant", Some(b"a"));
        }
        if n.is_multiple_of(5) {
            list.push("nothing", None);
            list.push("empty", Some(b""));
            list.push("", Some(b"a header without a name"));
        }
        if n.is_multiple_of(11) {
            list.push("Process-After", Some(b"not ours: names are case-sensitive"));
            list.push("binary", Some(&[0x00, 0xff, 0x80]));
        }
        Draft {
            key,
            value: Some(value.into()),
            headers: list,
        }
    };
    (0..count).map(draft).collect()
}

/// Follows the output and the dead letters.
pub(crate) struct Watch {
    reader: TopicReader,
    dead_letters: Arc<str>,
    /// Those that have come so far.
    pub(crate) records: Vec<Record>,
}

impl Watch {
    /// Reads what has come since the last look.
    pub(crate) fn look(&mut self) -> &[Record] {
        let records = &mut self.records;
        self.reader
            .read_to_end(START, |record| records.push(record))
            .unwrap();
        records
    }

    /// Waits until this many records have ended.
    #[track_caller]
    pub(crate) fn until_ended(&mut self, count: usize, deadline: Duration) {
        let dead_letters = self.dead_letters.clone();
        eventually("all records have ended", deadline, || {
            let ended = self.look();
            let dead = ended
                .iter()
                .filter(|record| record.position.topic == dead_letters)
                .count();
            if ended.len() >= count {
                Ok(())
            } else {
                Err(format!("{} of {count}, {dead} of them dead", ended.len()))
            }
        });
    }
}

/// What has become of the records of a pipeline.
pub(crate) struct Ends {
    /// The oracle's report, which is clean.
    pub(crate) report: Box<Report>,
    /// All records of the outputs and the dead letters.
    pub(crate) records: Vec<Record>,
    origins: HashMap<Position, Record>,
    pipeline: Pipeline,
    check: OutputCheck,
}

impl Ends {
    /// The one end of a record.
    #[track_caller]
    pub(crate) fn of(&self, sent: &Sent) -> &Record {
        let is_its = |record: &&Record| place(&origin(record)) == sent.position;
        let mut ends = self.records.iter().filter(is_its);
        let end = ends
            .next()
            .unwrap_or_else(|| panic!("{} has not ended", sent.position));
        assert!(ends.next().is_none(), "{} has ended twice", sent.position);
        end
    }

    /// The dead letters.
    pub(crate) fn dead(&self) -> impl Iterator<Item = &Record> {
        let topic = self.pipeline.dead_letter_topic();
        self.records
            .iter()
            .filter(move |record| record.position.topic == topic)
    }

    /// Checks for each record that it ended where its fate says, after as many failures, exactly as it was
    /// sent (or with an echo as its value, where the answer becomes the value), and with the headers that the
    /// protocol asks for.
    #[track_caller]
    pub(crate) fn meets(&self, plan: &Plan, sent: &[Sent]) {
        self.meets_with(sent, |sent| plan.fate(sent.body()));
    }

    /// Checks that the endpoint was called for each record under its own key only, as often as its fate says.
    #[track_caller]
    pub(crate) fn were_called(&self, plan: &Plan, sent: &[Sent], endpoint: &FakeEndpoint) {
        let retries = self.pipeline.policy.max_retries();
        let calls = |sent: &Sent| match plan.fate(sent.body()) {
            Fate::Succeeds | Fate::Refused => 1,
            Fate::Recovers { failures, .. } => 1 + failures.min(retries),
        };
        let expected: BTreeMap<String, u32> = sent
            .iter()
            .map(|sent| (sent.idempotency_key(), calls(sent)))
            .collect();
        let found: BTreeMap<String, u32> = endpoint.calls_by_key().into_iter().collect();
        let wrong: Vec<String> = expected
            .keys()
            .chain(found.keys())
            .filter(|key| expected.get(*key) != found.get(*key))
            .map(|key| format!("{key}: {:?} calls, not {:?}", found.get(key), expected.get(key)))
            .take(10)
            .collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    /// As [`Ends::meets`], with fates from elsewhere.
    #[track_caller]
    pub(crate) fn meets_with(&self, sent: &[Sent], fate: impl Fn(&Sent) -> Fate) {
        let mut by_origin: HashMap<Position, Vec<&Record>> = HashMap::new();
        for record in &self.records {
            by_origin.entry(place(&origin(record))).or_default().push(record);
        }
        let retries = self.pipeline.policy.max_retries();
        let mut wrong = Vec::new();
        for sent in sent {
            let found = by_origin.remove(&sent.position).unwrap_or_default();
            let [end] = found[..] else {
                wrong.push(format!("{}: {} ends", sent.position, found.len()));
                continue;
            };
            if let Err(problem) = self.check(sent, end, fate(sent), retries) {
                wrong.push(format!("{}: {problem}; its end is {end:?}", sent.position));
            }
        }
        for origin in by_origin.keys() {
            wrong.push(format!("{origin}: never sent"));
        }
        let shown = wrong.iter().take(10).cloned().collect::<Vec<_>>().join("\n");
        assert!(wrong.is_empty(), "{} records are wrong:\n{shown}", wrong.len());
    }

    fn check(&self, sent: &Sent, end: &Record, fate: Fate, retries: u32) -> Result<(), String> {
        let equal = |what: &str, found: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug| {
            let (found, expected) = (format!("{found:?}"), format!("{expected:?}"));
            if found == expected {
                Ok(())
            } else {
                Err(format!("{what} is {found}, not {expected}"))
            }
        };
        let source = self.origins.get(&sent.position).ok_or("not in the source")?;
        equal("key in the source", &source.key, &sent.draft.key)?;
        equal("value in the source", &source.value, &sent.draft.value)?;
        equal("headers in the source", &source.headers, &sent.draft.headers)?;
        equal("key", &end.key, &sent.draft.key)?;
        let is_dead = end.position.topic == self.pipeline.dead_letter_topic();
        let is_echo = !is_dead && self.check == OutputCheck::ValueReplaced;
        let echo = sent.draft.value.clone().unwrap_or_default();
        let value = if is_echo {
            Some(echo)
        } else {
            sent.draft.value.clone()
        };
        equal("value", &end.value, &value)?;
        let users = users_headers(&end.headers);
        equal("user headers", &users, &users_headers(&sent.draft.headers))?;

        let (failures, class, code) = match fate {
            Fate::Succeeds => (0, None, None),
            Fate::Recovers { failures, .. } if failures <= retries => (failures, None, None),
            Fate::Recovers { .. } => (retries + 1, Some("exhausted"), None),
            Fate::Refused => (1, Some("permanent"), Some("http.422")),
        };
        equal("whether it is dead", &is_dead, &class.is_some())?;
        let expected = [
            (headers::PIPELINE, self.pipeline.name.to_string()),
            (headers::ORIGINAL_TOPIC, sent.position.topic.to_string()),
            (headers::ORIGINAL_PARTITION, sent.position.partition.to_string()),
            (headers::ORIGINAL_OFFSET, sent.position.offset.to_string()),
            (
                headers::ORIGINAL_TIMESTAMP,
                source.timestamp.unwrap_or(Timestamp::from_millis(-1)).to_string(),
            ),
            (headers::RETRY_COUNT, failures.to_string()),
        ];
        for (name, value) in expected {
            equal(name, &text(end, name)?, &Some(value))?;
        }
        for name in [headers::PROCESS_AFTER, headers::RETURN_TOPIC] {
            equal(name, &text(end, name)?, &None::<String>)?;
        }
        let Some(class) = class else {
            for name in [
                headers::ERROR_CLASS,
                headers::ERROR_CODE,
                headers::ERROR_MESSAGE,
                headers::ERROR_TIMESTAMP,
            ] {
                equal(name, &text(end, name)?, &None::<String>)?;
            }
            return Ok(());
        };
        equal(
            headers::ERROR_CLASS,
            &text(end, headers::ERROR_CLASS)?,
            &Some(class.to_owned()),
        )?;
        if let Some(code) = code {
            equal(
                headers::ERROR_CODE,
                &text(end, headers::ERROR_CODE)?,
                &Some(code.to_owned()),
            )?;
        }
        let message = text(end, headers::ERROR_MESSAGE)?.unwrap_or_default();
        if message.is_empty() || message.len() > 1024 {
            return Err(format!("error-message has {} bytes", message.len()));
        }
        let failed_at = text(end, headers::ERROR_TIMESTAMP)?.unwrap_or_default();
        let failed_at: Timestamp = failed_at
            .parse()
            .map_err(|_| format!("error-timestamp is `{failed_at}`"))?;
        let (came, died) = (source.timestamp, end.timestamp);
        if Some(failed_at) < came || Some(failed_at) > died {
            return Err(format!("failed at {failed_at}, came {came:?}, died {died:?}"));
        }
        Ok(())
    }
}

/// Where a record that has ended says it comes from.
#[track_caller]
pub(crate) fn origin(record: &Record) -> Origin {
    let ours = ReservedHeaders::read(record).and_then(|ours| ours.origin());
    ours.unwrap_or_else(|failure| panic!("{}: {failure}", record.position))
}

fn place(origin: &Origin) -> Position {
    Position {
        topic: origin.topic.clone(),
        partition: origin.partition,
        offset: origin.offset,
    }
}

/// The text of a header that stands at most once.
pub(crate) fn text(record: &Record, name: &str) -> Result<Option<String>, String> {
    match record.headers.single(name) {
        Ok(None) => Ok(None),
        Ok(Some(value)) => {
            let value = value.ok_or_else(|| format!("{name} is null"))?;
            let value = std::str::from_utf8(value).map_err(|_| format!("{name} is not text"))?;
            Ok(Some(value.to_owned()))
        }
        Err(_) => Err(format!("{name} stands more than once")),
    }
}

/// The headers that are neither ours nor of the trace.
pub(crate) fn users_headers(list: &Headers) -> Headers {
    list.filtered(|name| {
        !headers::is_ours(name) && name != headers::TRACEPARENT && name != headers::TRACESTATE
    })
}

/// The different values of an iterator.
pub(crate) fn distinct<T: std::hash::Hash + Eq>(values: impl IntoIterator<Item = T>) -> usize {
    values.into_iter().collect::<HashSet<_>>().len()
}
