//! `redeliver dev`: all services in this process on an embedded broker, with demonstration data.

mod endpoint;
mod lake;
mod narrator;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use redeliver_console::Console;
use redeliver_core::{Headers, Output, SchedulerTopics};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::embedded::EmbeddedBroker;
use redeliver_kafka::producer::Producer;
use redeliver_runtime::cli::{Start, report};
use redeliver_runtime::listen::{ListenError, Listener};
use redeliver_runtime::shutdown;
use redeliver_runtime::telemetry::{self, Identity};
use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_service::host::Host;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use self::lake::Lake;
use self::narrator::{Narrator, Totals};
use crate::acls::all_topics;
use crate::config::Config;
use crate::output::print_line;

#[derive(Args, Clone, Debug)]
pub(crate) struct DevArgs {
    /// Records produced per second, 0.1 to 1000
    #[arg(long, default_value_t = 2.0, value_parser = rate)]
    rate: f64,
    /// Address of /livez, /readyz, /metrics and /config; if it is in use, a free port is chosen
    #[arg(long, default_value = "127.0.0.1:9464")]
    admin: SocketAddr,
    /// Address of the console on this machine; if it is in use, a free port is chosen
    #[arg(long, default_value = "127.0.0.1:8484", value_parser = loopback)]
    console: SocketAddr,
    /// Also append to Delta tables in this directory, with the program redeliver-lake beside this one
    #[arg(long, value_name = "DIRECTORY")]
    lake: Option<PathBuf>,
    /// Log level: error, warn, info, debug or directives
    #[arg(long, default_value = "error")]
    log: String,
}

impl Default for DevArgs {
    fn default() -> Self {
        Self {
            rate: 2.0,
            admin: SocketAddr::from(([127, 0, 0, 1], 9464)),
            console: SocketAddr::from(([127, 0, 0, 1], 8484)),
            lake: None,
            log: "error".to_owned(),
        }
    }
}

/// The console has no authentication here.
fn loopback(text: &str) -> Result<SocketAddr, String> {
    match text.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => Ok(address),
        _ => Err("must be a loopback address with a port, such as 127.0.0.1:8484".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text
        .parse()
        .map_err(|_| "must be a number, such as 2".to_owned())?;
    if (0.1..=1000.0).contains(&rate) {
        Ok(rate)
    } else {
        Err("must be between 0.1 and 1000".to_owned())
    }
}

const PIPELINE: &str = "docs";
const PARTITIONS: i32 = 4;
const SUMMARY_EVERY: Duration = Duration::from_secs(10);

pub(crate) fn main(args: DevArgs) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error),
    };
    match runtime.block_on(run(args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&*error),
    }
}

async fn run(args: DevArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let lake = args.lake.as_deref().map(Lake::new).transpose()?;
    let endpoint = Listener::bind("demo endpoint", ([127, 0, 0, 1], 0).into())?;
    let defaults = Config::default();
    let admin = bind_or_free_port("admin.listen", args.admin)?;
    let jobs_api = bind_or_free_port("scheduler.listen", defaults.scheduler.listen)?;
    let inspector = bind_or_free_port("dlq_inspector.listen", defaults.own.dlq_inspector.listen)?;
    let console = bind_or_free_port("console.listen", args.console)?;
    let mut addresses = Addresses {
        brokers: defaults.kafka.brokers.clone(),
        endpoint: endpoint.local_addr()?,
        admin: admin.local_addr()?,
        scheduler: jobs_api.local_addr()?,
        inspector: inspector.local_addr()?,
        console: console.local_addr()?,
    };
    let topics = all_topics(&Config::from_yaml(&addresses.config(&args.log))?).topics;
    let topics = topics
        .into_iter()
        .map(|topic| (topic.name.to_string(), topic.partitions));
    let broker = EmbeddedBroker::start(&topics.collect::<Vec<_>>())?;
    broker.brokers().clone_into(&mut addresses.brokers);
    let yaml = addresses.config(&args.log);
    let mut config = Config::from_yaml(&yaml)?;
    // Temporary, because the broker's topics do not outlive this process either.
    let directory = tempfile::tempdir().context("creating a temporary directory")?;
    config.own.dlq_inspector.data_dir = directory.path().join("index");
    let file = directory.path().join("redeliver.yaml");
    std::fs::write(&file, yaml).with_context(|| format!("writing {}", file.display()))?;
    let identity = Identity {
        service: "redeliver-dev",
        instance: &config.instance,
    };
    let telemetry = telemetry::init(&config.telemetry, identity)?;

    let stop = CancellationToken::new();
    shutdown::on_signals(stop.clone())?;
    let start = Start {
        effective: config.to_json().into(),
        ..Start::new(Arc::new(config.shared), stop.clone(), admin)
    };
    let own = config.own;
    let mut host = Host::new("redeliver-dev", start);
    host.kafka.is_embedded = true;
    let kafka = host.kafka.clone();
    redeliver_enricher::mount(&mut host, &own.enricher).await?;
    redeliver_retry_tier::mount(&mut host, &own.retry_tier).await?;
    let jobs = MemoryIndex::default().with_max_ended(host.config.scheduler.max_ended as usize);
    redeliver_scheduler::mount(&mut host, jobs.clone()).await?;
    redeliver_scheduler::api::mount(&mut host, jobs, jobs_api).await?;
    redeliver_dlq_inspector::mount(&mut host, own.dlq_inspector, inspector)?;
    let pages = Console::new(&own.console)?;
    host.tasks.spawn("console", pages.serve(console, stop.clone()));

    let totals = Arc::new(Mutex::new(Totals::default()));
    let pipeline = host.config.pipelines[PIPELINE].pipeline(PIPELINE, &host.config.scheduler);
    let narrator = Narrator::new(
        &kafka,
        &pipeline,
        &host.config.scheduler.topics(),
        totals.clone(),
        began,
        stop.clone(),
    )?;
    // The narrator stops last, so that it sees the records that are written during the shutdown.
    let ended = CancellationToken::new();
    let narration = std::thread::Builder::new().name("narrator".into()).spawn({
        let ended = ended.clone();
        move || narrator.run(&ended)
    })?;
    host.tasks
        .spawn("demo-endpoint", endpoint::serve(endpoint, stop.clone()));
    addresses.greet(&file);
    if let Some(lake) = lake {
        crate::say(format_args!(
            "Delta tables are in {}; see docs/lake.md.\n",
            lake.tables().display()
        ));
        host.tasks.spawn("lake", lake.run(file, stop.clone()));
    }
    host.tasks
        .spawn("demo-producer", produce(kafka, args.rate, stop.clone()));
    host.tasks.spawn("summary", print_totals(totals.clone(), stop));
    let result = host.run().await;
    ended.cancel();
    narration
        .join()
        .map_err(|_| anyhow::anyhow!("the narrator panicked"))??;
    crate::say(format_args!(
        "\nstopped after {:.0} s: {}",
        began.elapsed().as_secs_f64(),
        line(&totals)
    ));
    telemetry.shutdown().await;
    Ok(result?)
}

/// Where the parts of the demonstration listen.
struct Addresses {
    brokers: String,
    endpoint: SocketAddr,
    admin: SocketAddr,
    scheduler: SocketAddr,
    inspector: SocketAddr,
    console: SocketAddr,
}

impl Addresses {
    /// The configuration of all services, and of commands that are run beside them.
    fn config(&self, log: &str) -> String {
        let Self {
            brokers,
            endpoint,
            admin,
            scheduler,
            inspector,
            console,
        } = self;
        format!(
            "instance: dev
kafka: {{ brokers: '{brokers}', static_membership: false, topics: {{ partitions: {PARTITIONS} }} }}
pipelines:
  {PIPELINE}:
    output: docs-enriched
    retry: {{ tiers: [5s, 30s, 1m] }}
    http: {{ url: 'http://{endpoint}/enrich', timeout: 2s, quick_retries: 0 }}
scheduler:
  listen: '{scheduler}'
  apps: {{ docs: {{ topic: {PIPELINE} }} }}
dlq_inspector: {{ listen: '{inspector}', redrive: {{ edit: true }}, pipeline_audit: {{ enabled: true, interval: 5s }} }}
console:
  listen: '{console}'
  inspector: {{ url: 'http://{inspector}' }}
  scheduler: {{ url: 'http://{scheduler}' }}
admin: {{ listen: '{admin}' }}
telemetry: {{ level: '{log}' }}
shutdown: {{ grace: 10s }}
"
        )
    }

    fn greet(&self, config: &Path) {
        let Self {
            brokers,
            admin,
            scheduler,
            inspector,
            console,
            ..
        } = self;
        crate::say(format_args!(
            "Open http://{console} in a browser: it shows what fails, what waits and what is due.

All services of Redeliver are running in this process, with demonstration data.
The embedded broker ({brokers}) is not durable and does not demonstrate the delivery guarantees.

  jobs -> scheduler -> docs, when due
  docs -> enricher -> docs-enriched
             | transient failure -> docs-retry-5s|30s|1m -> docs-retry-due -> enricher
             | permanent failure -> docs-dlq -> dlq-inspector

Admin      http://{admin}/metrics   /readyz   /config
Scheduler  http://{scheduler}
Inspector  http://{inspector}

In another terminal:

  export REDELIVER_CONFIG={}
  redeliver status
  redeliver jobs schedule --app docs --in 5s --data '{{\"number\": 1}}'
  redeliver dlq ls
  redeliver dlq redrive --filter 'error_code = \"http.422\"' --observe 5s

Press Ctrl-C to stop.
",
            config.display()
        ));
    }
}

/// Binds an address, or a free port if it is in use.
fn bind_or_free_port(field: &'static str, address: SocketAddr) -> Result<Listener, ListenError> {
    match Listener::bind(field, address) {
        Err(ListenError::InUse { .. }) => Listener::bind(field, SocketAddr::new(address.ip(), 0)),
        bound => bound,
    }
}

/// Produces records, jobs, and from time to time a job for an application that does not exist.
async fn produce(kafka: KafkaSettings, rate: f64, stop: CancellationToken) -> anyhow::Result<()> {
    let producer = Producer::new(&kafka)?;
    let ingest = SchedulerTopics::default().ingest;
    let mut ticks = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 1_u64.. {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => break,
        }
        let document = serde_json::json!({ "number": number });
        let (topic, value) = match number % 20 {
            4 | 6 | 8 | 10 => {
                let delay = ["2s", "3s", "5s", "8s"][usize::try_from(number % 4)?];
                let request = serde_json::json!({ "appName": "docs", "delay": delay, "jobData": document });
                (ingest.clone(), request)
            }
            18 => (
                ingest.clone(),
                serde_json::json!({ "appName": "dogs", "delay": "1s", "jobData": document }),
            ),
            _ => (PIPELINE.into(), document),
        };
        let mut headers = Headers::new();
        headers.push_text(
            "tenant",
            ["acme", "globex", "initech"][usize::try_from(number % 3)?],
        );
        let output = Output {
            topic,
            partition: None,
            key: Some(format!("doc-{number}").into()),
            value: Some(value.to_string().into()),
            headers,
        };
        producer.send(&output).await?;
    }
    Ok(())
}

async fn print_totals(totals: Arc<Mutex<Totals>>, stop: CancellationToken) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + SUMMARY_EVERY, SUMMARY_EVERY);
    loop {
        tokio::select! {
            _ = ticks.tick() => tell(format_args!("--------  {}", line(&totals)), &stop),
            () = stop.cancelled() => return Ok(()),
        }
    }
}

/// Prints a line. If stdout is closed, as by `head`, everything stops.
fn tell(line: impl fmt::Display, stop: &CancellationToken) {
    if !print_line(line) {
        stop.cancel();
    }
}

fn line(totals: &Mutex<Totals>) -> String {
    totals.lock().unwrap_or_else(PoisonError::into_inner).line()
}
