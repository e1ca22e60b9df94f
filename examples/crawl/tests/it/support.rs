//! A site, a crawl of its own topics, and the processes that work on it.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redeliver_core::{Output, Record};
use redeliver_example_crawl::job::CrawlResult;
use redeliver_example_crawl::ledger::Ledger;
use redeliver_example_crawl::site::{Log, Plan, Site, SiteMap};
use redeliver_example_crawl::worker::Crawl;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_runtime::Config;
use redeliver_runtime::config::Sources;
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{Process, addresses, binary, eventually, unique};
use tokio_util::sync::CancellationToken;

/// How long a process may take to be ready, on a machine that is busy with other tests.
const START: Duration = Duration::from_secs(60);

/// A site that is being served, and a crawl that belongs to one test.
pub(crate) struct Setup {
    pub(crate) map: SiteMap,
    pub(crate) log: Arc<Log>,
    pub(crate) crawl: Crawl,
    pub(crate) kafka: KafkaSettings,
    name: String,
    file: PathBuf,
    runtime: tokio::runtime::Runtime,
    stop: CancellationToken,
    _scratch: Scratch,
}

impl Setup {
    /// Serves the site and makes the topics.
    pub(crate) fn new(name: &str, plan: Plan) -> Self {
        let name = unique(name);
        let addresses = addresses();
        // The groups of tiers are shared by all who use the same tiers, so these are used by nobody else.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let own = 1 + u64::from(std::process::id()) % 50 + 50 * NEXT.fetch_add(1, Ordering::Relaxed);
        let text = format!(
            "kafka: {{ brokers: '{}', topics: {{ partitions: 4 }} }}
redis: {{ url: '{}', prefix: '{name}' }}
admin: {{ listen: '127.0.0.1:0' }}
scheduler:
  listen: '127.0.0.1:0'
  group: '{name}-scheduler'
  topics: {{ ingest: '{name}-ingest', state: '{name}-state', dlq: '{name}-ingest-dlq', answers: '{name}-answers' }}
  apps: {{ crawl: {{ topic: '{name}' }} }}
pipelines:
  {name}:
    output: '{name}-results'
    return_to: source
    retry: {{ tiers: [{}ms, {}ms] }}
",
            addresses.brokers,
            addresses.redis_url,
            300 + own,
            600 + own,
        );
        let scratch = Scratch::new("crawl").unwrap();
        let file = scratch.path().join("crawl.yaml");
        std::fs::write(&file, &text).unwrap();
        let sources = Sources {
            file: Some(file.clone()),
            environment: BTreeMap::new(),
            overrides: Vec::new(),
        };
        let config = Config::load(&sources).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let site = runtime.block_on(Site::bind(plan, None)).unwrap();
        let (map, log, stop) = (site.map().clone(), site.log(), CancellationToken::new());
        runtime.handle().spawn(site.serve(stop.clone()));
        let setup = Self {
            map,
            log,
            crawl: Crawl::of(&config).unwrap(),
            kafka: KafkaSettings::new(addresses.brokers, format!("{name}-test")),
            name,
            file,
            runtime,
            stop,
            _scratch: scratch,
        };
        let mut apply = setup.command("redeliver", &["topics", "apply"]);
        let applied = apply.output().unwrap();
        assert!(applied.status.success(), "{applied:?}");
        setup
    }

    fn command(&self, program: &str, arguments: &[&str]) -> std::process::Command {
        let mut command = binary(program);
        command
            .env_clear()
            .args(arguments)
            .arg("--config")
            .arg(&self.file);
        command
    }

    /// Starts a service and waits until it is ready.
    pub(crate) fn start(&self, program: &str, instance: &str) -> Service {
        let mut command = self.command(program, &[]);
        command
            .arg("--set")
            .arg(format!("instance={}-{instance}", self.name));
        if program == "redeliver-example-crawl" {
            command.args(["worker", "--timeout", "1s"]);
        }
        let mut service = Service(Process::spawn(command).unwrap());
        service.until_ready();
        service
    }

    /// Starts a worker.
    pub(crate) fn worker(&self, instance: &str) -> Service {
        self.start("redeliver-example-crawl", instance)
    }

    /// Writes records.
    pub(crate) fn send(&self, records: &[Output]) {
        let producer = Producer::new(&self.kafka).unwrap();
        for record in records {
            self.runtime.block_on(producer.send(record)).unwrap();
        }
    }

    /// What the topics hold now.
    pub(crate) fn ledger(&self) -> Ledger {
        let roles = self.crawl.pipeline.topics();
        let topics: Vec<Arc<str>> = roles.iter().map(|(topic, _)| topic.clone()).collect();
        let mut ledger = Ledger::default();
        let mut reader = TopicReader::new(&self.kafka, &topics).unwrap();
        let read = reader.read_to_end(START, |record| {
            let role = roles.iter().find(|(topic, _)| *topic == record.position.topic);
            ledger.observe(&self.crawl.pipeline, role.unwrap().1, &record);
        });
        read.unwrap();
        ledger
    }

    /// Waits until these pages have ended.
    #[track_caller]
    pub(crate) fn until_ended<'a>(&self, pages: impl IntoIterator<Item = &'a String>, deadline: Duration) {
        let pages: Vec<&String> = pages.into_iter().collect();
        eventually("all pages have ended", deadline, || {
            let ledger = self.ledger();
            let open: Vec<&str> = pages
                .iter()
                .filter(|page| !ledger.seen(page).has_ended())
                .map(|page| page.as_str())
                .collect();
            if open.is_empty() {
                Ok(())
            } else {
                Err(format!("{} pages have not: {}", open.len(), open.join(", ")))
            }
        });
    }

    /// All results.
    pub(crate) fn results(&self) -> Vec<CrawlResult> {
        let topic = self.crawl.pipeline.output.as_deref().unwrap();
        let records = self.read(topic).into_iter();
        records
            .map(|record| serde_json::from_slice(&record.value.unwrap()).unwrap())
            .collect()
    }

    /// How many records a topic holds.
    pub(crate) fn count(&self, topic: &str) -> usize {
        self.read(topic).len()
    }

    fn read(&self, topic: &str) -> Vec<Record> {
        let mut records = Vec::new();
        TopicReader::new(&self.kafka, &[topic.into()])
            .unwrap()
            .read_to_end(START, |record| records.push(record))
            .unwrap();
        records
    }

    /// The topics as the crawl in Python takes them.
    pub(crate) fn topics_of_python(&self) -> String {
        let name = &self.name;
        format!("{name} {name}-results {name}-dlq {name}-ingest")
    }

    /// The scheduler's dead letters.
    pub(crate) fn refused_requests(&self) -> usize {
        self.count(&format!("{}-ingest-dlq", self.name))
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// A process of ours; killed when it is dropped.
pub(crate) struct Service(pub(crate) Process);

impl Service {
    fn admin(&mut self) -> SocketAddr {
        let output = self.0.wait_for_output(" admin=127.0.0.1:", START);
        let address = output.split(" admin=").nth(1).unwrap_or_default();
        let address = address.split_whitespace().next().unwrap_or_default();
        address
            .parse()
            .unwrap_or_else(|_| panic!("no address: `{address}`"))
    }

    fn until_ready(&mut self) {
        let admin = self.admin();
        eventually("the service is ready", START, || match get(admin, "/readyz") {
            Ok((200, _)) => Ok(()),
            Ok((status, body)) => Err(format!("{status} {body}")),
            Err(error) => Err(error.to_string()),
        });
    }

    /// How many partitions its lanes have.
    pub(crate) fn partitions(&mut self) -> usize {
        let (_, metrics) = get(self.admin(), "/metrics").unwrap();
        let gauges = metrics
            .lines()
            .filter(|line| line.starts_with("redeliver_lane_partitions{"));
        gauges
            .map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap())
            .sum()
    }
}

/// One GET over HTTP/1.1: status and body.
fn get(address: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
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
