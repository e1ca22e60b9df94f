//! What the tests of the real binaries share: a [`Pipe`] is one pipeline on the real broker, with its configuration
//! file, its topics and an endpoint; [`Sent`] is a record that was produced; [`Ends`] are the results of all records.
//!
//! ```text
//! let pipe = PipeBuilder::new("crawl").plan(PLAN).create();
//! let (_enricher, _tier) = (pipe.enricher("a"), pipe.retry_tier("a"));
//! let sent = pipe.produce(records(100));
//! pipe.settle(&sent, DEADLINE).meets(&PLAN, &sent);
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::try_join_all;
use redeliver_audit::{AuditOptions, Report, audit};
use redeliver_core::headers::{self, Origin, ReservedHeaders};
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{
    HandlerChanges, Headers, Output, Pipeline, Position, Record, SchedulerTopics, Timestamp,
};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_runtime::config::{LongWaitsConfig, Sources};
use redeliver_runtime::{Config, ProgramConfig};
use redeliver_testkit::{
    CommandOutput, EnvBuilder, FakeEndpoint, Fate, Plan, Reply, Request, ServiceProcess, TestEnv, ensure,
    eventually, unique_delays, until_seen,
};

pub(crate) use redeliver_testkit::DEADLINE;

/// Three of ten records fail once or twice, and two of a hundred permanently.
pub(crate) const PLAN: Plan = Plan {
    transient_percent: 30,
    permanent_percent: 2,
    hang_per_mille: 0,
    close_per_mille: 0,
    latency: Duration::ZERO,
};

type Behaviour = Box<dyn Fn(&Request) -> Reply + Send + Sync>;

/// Describes a [`Pipe`].
pub(crate) struct PipeBuilder {
    env: EnvBuilder,
    tiers: Vec<u64>,
    output: String,
    breaker: String,
    behaviour: Option<Behaviour>,
}

/// A pipeline that belongs to one test: its configuration, its topics and its endpoint.
pub(crate) struct Pipe {
    pub(crate) env: TestEnv,
    /// The pipeline as the services see it.
    pub(crate) pipeline: Pipeline,
    /// How the test itself reaches Kafka.
    pub(crate) kafka: KafkaSettings,
    /// What the enricher calls.
    pub(crate) endpoint: FakeEndpoint,
    changes: HandlerChanges,
    /// Group and topics of the scheduler, if long waits go through it.
    pub(crate) jobs: Option<(String, SchedulerTopics)>,
    producer: Producer,
    runtime: tokio::runtime::Runtime,
}

/// The names of all services.
pub(crate) const SERVICES: [&str; 4] = ["enricher", "retry-tier", "scheduler", "dlq-inspector"];

impl PipeBuilder {
    /// A pipeline with a unique name that starts with `name`: two partitions, tiers of about 1, 2 and 4 seconds, an
    /// endpoint that echoes, no quick retries, and no circuit breaker, so that each failed call is a failed attempt.
    pub(crate) fn new(name: &str) -> Self {
        Self {
            env: EnvBuilder::new(name),
            tiers: unique_delays(&[1_000, 2_000, 4_000]),
            output: "{name}-out".to_owned(),
            breaker: "{ failures: 0 }".to_owned(),
            behaviour: None,
        }
    }

    /// The pipeline's name.
    pub(crate) fn name(&self) -> &str {
        self.env.name()
    }

    /// Uses another Kafka.
    pub(crate) fn brokers(mut self, brokers: &str) -> Self {
        self.env = self.env.brokers(brokers);
        self
    }

    /// The number of partitions of each topic.
    pub(crate) fn partitions(mut self, count: u32) -> Self {
        self.env = self.env.partitions(count);
        self
    }

    /// The tiers in milliseconds. A few milliseconds are added, because all pipelines with the same tiers share the
    /// consumer groups of these tiers, also those of other tests.
    pub(crate) fn tiers(mut self, millis: &[u64]) -> Self {
        self.tiers = unique_delays(millis);
        self
    }

    /// The exact tiers in milliseconds, for a test that shares them with another pipeline.
    pub(crate) fn shared_tiers(mut self, millis: &[u64]) -> Self {
        self.tiers = millis.to_vec();
        self
    }

    /// Waits longer than every tier go through a scheduler that belongs to the test.
    pub(crate) fn through_scheduler(mut self) -> Self {
        self.env = self.env.scheduler(&[]);
        self.pipeline("long_waits", "scheduler")
    }

    /// An inspector of the pipeline's dead letters.
    pub(crate) fn with_inspector(self) -> Self {
        self.set("dlq_inspector.listen", "127.0.0.1:0")
            .set("dlq_inspector.topics", "[{name}-dlq]")
            .set("dlq_inspector.data_dir", "{dir}/index")
            .set("dlq_inspector.redrive.topic", "{name}-redrives")
    }

    /// A setting of the pipeline, such as `http.timeout` or `return_to`.
    pub(crate) fn pipeline(self, key: &str, value: &str) -> Self {
        let key = format!("pipelines.{}.{key}", self.name());
        self.set(&key, value)
    }

    /// Any setting, by its dotted key.
    pub(crate) fn set(mut self, key: &str, value: &str) -> Self {
        self.env = self.env.set(key, value);
        self
    }

    /// The YAML of the pipeline's output; `{name}` is replaced by the pipeline's name.
    pub(crate) fn output(mut self, yaml: &str) -> Self {
        yaml.clone_into(&mut self.output);
        self
    }

    /// The YAML of the circuit breaker.
    pub(crate) fn breaker(mut self, yaml: &str) -> Self {
        yaml.clone_into(&mut self.breaker);
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

    /// The endpoint answers each request with its body. Returns the times of the requests, too.
    pub(crate) fn echo_with_times(self) -> (Self, Arc<Mutex<Vec<Instant>>>) {
        let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
        let requested = times.clone();
        let builder = self.behave(move |request| {
            requested.lock().unwrap().push(Instant::now());
            Reply::ok(request.body.clone())
        });
        (builder, times)
    }

    /// Starts the endpoint, and creates the topics with `redeliver topics apply`.
    pub(crate) fn create(self) -> Pipe {
        let pipe = self.without_topics();
        let applied = pipe.redeliver(&["topics", "apply"]);
        assert_eq!(applied.code, Some(0), "{applied:?}");
        pipe
    }

    /// As [`PipeBuilder::create`], but creates no topics.
    pub(crate) fn without_topics(self) -> Pipe {
        let behaviour = self.behaviour;
        let endpoint = FakeEndpoint::start(move |request| match &behaviour {
            Some(behaviour) => behaviour(request),
            None => Reply::ok(request.body.clone()),
        });
        let tiers: Vec<String> = self.tiers.iter().map(|tier| format!("{tier}ms")).collect();
        let yaml = format!(
            "pipelines:\n  {{name}}:\n    output: {}\n    retry: {{ tiers: [{}] }}\n    breaker: {}\n    http:\n      url: {}/records\n      \
             timeout: 30s\n      concurrency: 64\n      quick_retries: 0\n",
            self.output,
            tiers.join(", "),
            self.breaker,
            endpoint.url()
        );
        let env = self.env.yaml(&yaml).build();
        let config = load(&env);
        let kafka = KafkaSettings {
            id_prefix: config.kafka.id_prefix.clone(),
            ..KafkaSettings::new(env.brokers().to_owned(), format!("{}-test", env.name()))
        };
        let pipeline = &config.pipelines[env.name()];
        let scheduler = &config.scheduler;
        Pipe {
            jobs: (pipeline.long_waits == LongWaitsConfig::Scheduler)
                .then(|| (config.kafka.id(&scheduler.group), scheduler.topics())),
            changes: (pipeline.http.as_ref()).map_or(HandlerChanges::Value, |http| http.response.changes()),
            pipeline: pipeline.pipeline(env.name(), scheduler),
            producer: Producer::new(&kafka).unwrap(),
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap(),
            env,
            kafka,
            endpoint,
        }
    }
}

/// The configuration as the services read it.
#[track_caller]
pub(crate) fn load(env: &TestEnv) -> Config {
    let sources = Sources {
        file: Some(env.file().to_owned()),
        environment: BTreeMap::new(),
        overrides: env.settings().clone().into_iter().collect(),
    };
    let loaded = <ProgramConfig>::load(&sources);
    loaded
        .unwrap_or_else(|error| panic!("{error}\n{}", env.yaml()))
        .shared
}

/// The words of a command line.
pub(crate) fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// The output of `topics check` without warnings about topics of other tests on the same broker.
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
            0 => format!("all {topics} topics OK\n"),
            1 => format!("{topics} topics, 1 warning\n"),
            more => format!("{topics} topics, {more} warnings\n"),
        },
        _ => format!("{line}\n"),
    });
    own.collect()
}

/// A changed configuration of a [`Pipe`].
pub(crate) struct Variant {
    pub(crate) env: TestEnv,
    /// The pipeline as services with this configuration see it.
    pub(crate) pipeline: Pipeline,
}

impl Variant {
    /// Creates the topics that only this configuration has.
    #[track_caller]
    pub(crate) fn apply_topics(&self) {
        let applied = self.env.run("redeliver", &["topics", "apply"]);
        assert_eq!(applied.code, Some(0), "{applied:?}");
    }

    /// Starts an enricher and a retry tier, and waits until they are ready.
    #[track_caller]
    pub(crate) fn start(&self, instance: &str) -> [ServiceProcess; 2] {
        ["enricher", "retry-tier"].map(|service| self.env.start(service, instance, &[]))
    }
}

impl Pipe {
    /// The name of the pipeline and of its source topic.
    pub(crate) fn name(&self) -> &str {
        self.env.name()
    }

    /// A command of one of our binaries with this pipeline's configuration.
    pub(crate) fn command(&self, name: &str, arguments: &[&str]) -> Command {
        self.env.command(name, arguments)
    }

    /// The configuration with an edited file, and with more settings.
    pub(crate) fn variant(&self, edit: impl Fn(&str) -> String, settings: &[(String, String)]) -> Variant {
        let mut env = self.env.with_yaml(&edit(&self.env.yaml()));
        for (key, value) in settings {
            env.set(key, value);
        }
        let config = load(&env);
        let pipeline = config.any_pipeline(self.name()).unwrap();
        Variant {
            pipeline: pipeline.pipeline(self.name(), &config.scheduler),
            env,
        }
    }

    /// Runs the CLI to its end.
    pub(crate) fn redeliver(&self, arguments: &[&str]) -> CommandOutput {
        self.env.run("redeliver", arguments)
    }

    /// As [`Pipe::redeliver`]; again while Kafka, on a busy machine, does not take what it changes: then nothing was written.
    #[track_caller]
    pub(crate) fn until_taken(&self, arguments: &[&str]) -> CommandOutput {
        eventually("Kafka takes the change", DEADLINE, || {
            let printed = self.redeliver(arguments);
            let is_taken = !printed.stderr.contains("(UNAVAILABLE)");
            ensure(is_taken, printed.stderr.clone()).map(|()| printed)
        })
    }

    /// Starts an enricher whose instance name ends with this, and waits until it is ready.
    pub(crate) fn enricher(&self, instance: &str) -> ServiceProcess {
        self.start("enricher", instance, &[])
    }

    /// Starts a process for all retry tiers, and waits until it is ready.
    pub(crate) fn retry_tier(&self, instance: &str) -> ServiceProcess {
        self.start("retry-tier", instance, &[])
    }

    /// Starts a scheduler, and waits until it is ready.
    pub(crate) fn scheduler(&self, instance: &str) -> ServiceProcess {
        self.start("scheduler", instance, &[])
    }

    /// Starts a service with more arguments, and waits until it is ready.
    pub(crate) fn start(&self, service: &str, instance: &str, arguments: &[&str]) -> ServiceProcess {
        self.env.start(service, instance, arguments)
    }

    /// Starts a service.
    pub(crate) fn spawn(&self, service: &str, instance: &str, arguments: &[&str]) -> ServiceProcess {
        self.env.spawn(service, instance, arguments)
    }

    /// Writes records to the source.
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

    /// All records that topics hold now, as a read_committed consumer sees them.
    pub(crate) fn read(&self, topics: &[Arc<str>]) -> Vec<Record> {
        let mut records = Vec::new();
        TopicReader::new(&self.kafka, topics)
            .unwrap()
            .read_to_end(DEADLINE, |record| records.push(record))
            .unwrap();
        records
    }

    /// The topic of the first tier.
    pub(crate) fn first_tier(&self) -> Arc<str> {
        self.pipeline.tier_topic(self.pipeline.policy.tiers()[0])
    }

    /// Waits until the first tier has received this many records.
    #[track_caller]
    pub(crate) fn until_waiting(&self, count: usize) {
        let waiting = || self.read(&[self.first_tier()]).len();
        until_seen("the records wait", waiting, |&waiting| waiting >= count);
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

    /// Waits until as many records as were sent have ended and nothing is waiting. The audit must be clean at any time:
    /// each record ends once, not early, with its key, its headers and, except for an output with another value, its value.
    #[track_caller]
    pub(crate) fn settle(&self, sent: &[Sent], deadline: Duration) -> Ends {
        let mut watch = self.watch();
        let began = Instant::now();
        let report = eventually("all records have ended and nothing is waiting", deadline, || {
            let ended = watch.look().len();
            // An audit is expensive, so it runs once it may succeed, or shortly before the deadline to be printed.
            if ended < sent.len() && began.elapsed() < deadline.mul_f64(0.95) {
                return Err(format!("{ended} of {} records have ended", sent.len()));
            }
            let report = self.audit();
            assert!(report.is_clean(), "{report}");
            let ended = report.output + report.dead;
            let holds = report.waiting.total() == 0 && ended == sent.len() as u64;
            ensure(holds, report.to_string()).map(|()| report)
        });
        watch.look();
        Ends {
            origins: self.origins(),
            records: watch.records,
            pipeline: self.pipeline.clone(),
            changes: self.changes,
            report,
        }
    }

    /// Runs the audit.
    pub(crate) fn audit(&self) -> Box<Report> {
        self.audit_of(&self.pipeline)
    }

    /// Runs the audit of a pipeline with other settings.
    pub(crate) fn audit_of(&self, pipeline: &Pipeline) -> Box<Report> {
        let options = AuditOptions {
            changes: self.changes,
            scheduler: self.jobs.clone(),
            timeout: DEADLINE,
        };
        Box::new(audit(&self.kafka, pipeline, &options).unwrap())
    }

    /// The records of the source.
    fn origins(&self) -> HashMap<Position, Record> {
        let records = self.read(std::slice::from_ref(&self.pipeline.source));
        records
            .into_iter()
            .map(|record| (record.position.clone(), record))
            .collect()
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

impl From<Record> for Sent {
    /// Another producer's record.
    fn from(record: Record) -> Self {
        Self {
            draft: Draft {
                key: record.key,
                value: record.value,
                headers: record.headers,
            },
            position: record.position,
        }
    }
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

/// Records of all sorts: arbitrary, empty and missing keys and values; repeated, empty and null headers, and headers that
/// resemble reserved ones. Values differ, so that each record has its own fate.
pub(crate) fn records(count: usize) -> Vec<Draft> {
    (0..count).map(record).collect()
}

/// One of [`records`].
pub(crate) fn record(n: usize) -> Draft {
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
}

/// Follows the output and the dead letters.
pub(crate) struct Watch {
    reader: TopicReader,
    dead_letters: Arc<str>,
    /// The records so far.
    pub(crate) records: Vec<Record>,
}

impl Watch {
    /// Reads new records.
    pub(crate) fn look(&mut self) -> &[Record] {
        let records = &mut self.records;
        self.reader
            .read_to_end(DEADLINE, |record| records.push(record))
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
            let holds = ended.len() >= count;
            ensure(holds, format!("{} of {count}, {dead} of them dead", ended.len()))
        });
    }
}

/// The ends of the records of a pipeline.
pub(crate) struct Ends {
    /// The audit's report, which is clean.
    pub(crate) report: Box<Report>,
    /// All records of the outputs and the dead letters.
    pub(crate) records: Vec<Record>,
    origins: HashMap<Position, Record>,
    pipeline: Pipeline,
    changes: HandlerChanges,
}

impl Ends {
    /// The only end of a record.
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

    /// Checks for each record that it ended where its fate says, after as many failures, with an echo as its value
    /// where the response becomes the value, and with the headers of the protocol. The audit has checked the rest.
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

    /// As [`Ends::meets`], with the fate of each record.
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
            ensure(found == expected, format!("{what} is {found}, not {expected}"))
        };
        // The audit has compared the end with the record in the source.
        let (source, draft) = (
            self.origins.get(&sent.position).ok_or("not in the source")?,
            &sent.draft,
        );
        equal(
            "the record in the source",
            &(&source.key, &source.value, &source.headers),
            &(&draft.key, &draft.value, &draft.headers),
        )?;
        let (failures, class, code) = match fate {
            Fate::Succeeds => (0, None, None),
            Fate::Recovers { failures, .. } if failures <= retries => (failures, None, None),
            Fate::Recovers { .. } => (retries + 1, Some("exhausted"), None),
            Fate::Refused => (1, Some("permanent"), Some("http.422")),
        };
        let is_dead = end.position.topic == self.pipeline.dead_letter_topic();
        equal("whether it is dead", &is_dead, &class.is_some())?;
        if !is_dead && self.changes == HandlerChanges::Value {
            equal(
                "value",
                &end.value,
                &Some(draft.value.clone().unwrap_or_default()),
            )?;
        }
        let came = source.timestamp.unwrap_or(Timestamp::from_millis(-1));
        let owned = |text: &str| Some(text.to_owned());
        for (name, expected) in [
            (headers::ORIGINAL_TIMESTAMP, Some(came.to_string())),
            (headers::RETRY_COUNT, Some(failures.to_string())),
            (headers::PROCESS_AFTER, None),
            (headers::RETURN_TOPIC, None),
            (headers::ERROR_CLASS, class.and_then(owned)),
        ] {
            equal(name, &text(end, name)?, &expected)?;
        }
        if !is_dead {
            for name in [
                headers::ERROR_CODE,
                headers::ERROR_MESSAGE,
                headers::ERROR_TIMESTAMP,
            ] {
                equal(name, &text(end, name)?, &None::<String>)?;
            }
            return Ok(());
        }
        if let Some(code) = code {
            equal(
                headers::ERROR_CODE,
                &text(end, headers::ERROR_CODE)?,
                &owned(code),
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

/// The origin in the headers of a record that has ended.
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

/// The text of a header that occurs at most once.
pub(crate) fn text(record: &Record, name: &str) -> Result<Option<String>, String> {
    match record.headers.single(name) {
        Ok(None) => Ok(None),
        Ok(Some(value)) => {
            let value = value.ok_or_else(|| format!("{name} is null"))?;
            let value = std::str::from_utf8(value).map_err(|_| format!("{name} is not text"))?;
            Ok(Some(value.to_owned()))
        }
        Err(_) => Err(format!("{name} occurs more than once")),
    }
}

/// The headers that are neither reserved nor trace context.
pub(crate) fn users_headers(list: &Headers) -> Headers {
    list.filtered(|name| {
        !headers::is_reserved(name) && name != headers::TRACEPARENT && name != headers::TRACESTATE
    })
}

/// The number of distinct values.
pub(crate) fn distinct<T: std::hash::Hash + Eq>(values: impl IntoIterator<Item = T>) -> usize {
    values.into_iter().collect::<HashSet<_>>().len()
}
