//! `redeliver dev`: all services in this process, on a broker in memory, with a demonstration.

mod endpoint;
mod narrator;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use redeliver_core::{Headers, Output, Pipeline};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::embedded::EmbeddedBroker;
use redeliver_kafka::producer::Producer;
use redeliver_runtime::Config;
use redeliver_runtime::cli::{Start, report};
use redeliver_runtime::telemetry::{self, Identity};
use redeliver_runtime::{admin, shutdown};
use redeliver_worker::host::Host;
use tokio::net::TcpListener;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use self::narrator::{Narrator, Totals};

/// Flags of `redeliver dev`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DevArgs {
    /// Records produced per second, 0.1 to 1000
    #[arg(long, default_value_t = 2.0, value_parser = rate)]
    rate: f64,
    /// Where /livez, /readyz, /metrics and /config are served; another port is taken when this one is in use
    #[arg(long, default_value = "127.0.0.1:9464")]
    admin: SocketAddr,
    /// Log level: error, warn, info, debug or directives
    #[arg(long, default_value = "error")]
    log: String,
}

impl Default for DevArgs {
    fn default() -> Self {
        Self {
            rate: 2.0,
            admin: SocketAddr::from(([127, 0, 0, 1], 9464)),
            log: "error".to_owned(),
        }
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "write a number, such as 2".to_owned())?;
    if (0.1..=1000.0).contains(&rate) {
        Ok(rate)
    } else {
        Err("is out of range; 0.1 to 1000".to_owned())
    }
}

/// The demonstration's pipeline.
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
    let endpoint = TcpListener::bind("127.0.0.1:0")
        .await
        .context("listening for the demo endpoint")?;
    let outline = Pipeline {
        output: Some("docs-enriched".into()),
        ..Pipeline::new(PIPELINE)
    };
    let topics: Vec<_> = outline
        .topics()
        .into_iter()
        .map(|(topic, _)| (topic.to_string(), PARTITIONS))
        .collect();
    let broker = EmbeddedBroker::start(&topics)?;
    let config = Config::from_yaml(&demo_config(broker.brokers(), endpoint.local_addr()?, &args))?;
    let identity = Identity {
        service: "redeliver-dev",
        instance: &config.instance,
    };
    let telemetry = telemetry::init(&config.telemetry, identity)?;
    let listener = match admin::bind(&config.admin).await {
        Err(admin::AdminError::InUse(_)) => {
            let any = Config::from_yaml("admin: { listen: 127.0.0.1:0 }")?;
            admin::bind(&any.admin).await?
        }
        bound => bound?,
    };
    let admin_address = listener.local_addr()?;

    let stop = CancellationToken::new();
    shutdown::on_signals(stop.clone())?;
    let start = Start {
        config: Arc::new(config),
        shutdown: stop.clone(),
        tracer: telemetry.tracer(),
        admin: listener,
    };
    let mut host = Host::new("redeliver-dev", start);
    host.kafka.takes_all_partitions = true;
    let kafka = host.kafka.clone();
    redeliver_enricher::mount(&mut host)?;
    redeliver_retry_tier::mount(&mut host)?;

    let totals = Arc::new(Mutex::new(Totals::default()));
    let pipeline = Arc::new(host.config.pipelines[PIPELINE].pipeline(PIPELINE, &host.config.scheduler));
    let narrator = Narrator::new(&kafka, pipeline, totals.clone(), began)?;
    // The narrator goes on until everything else has ended, so that it sees the last records.
    let ended = CancellationToken::new();
    let narration = std::thread::Builder::new().name("narrator".into()).spawn({
        let ended = ended.clone();
        move || narrator.run(&ended)
    })?;
    host.tasks
        .spawn("demo-endpoint", endpoint::serve(endpoint, stop.clone()));
    greet(broker.brokers(), admin_address);
    host.tasks
        .spawn("demo-producer", produce(kafka, args.rate, stop.clone()));
    host.tasks.spawn("summary", summarise(totals.clone(), stop));
    let result = host.run().await;
    ended.cancel();
    narration
        .join()
        .map_err(|_| anyhow::anyhow!("the narrator panicked"))??;
    println!(
        "\nended after {:.0} s: {}",
        began.elapsed().as_secs_f64(),
        line(&totals)
    );
    telemetry.shutdown().await;
    Ok(result?)
}

fn demo_config(brokers: &str, endpoint: SocketAddr, args: &DevArgs) -> String {
    let DevArgs { admin, log, .. } = args;
    format!(
        "instance: dev
kafka: {{ brokers: '{brokers}', static_membership: false }}
pipelines:
  {PIPELINE}:
    output: docs-enriched
    retry: {{ tiers: [5s, 30s, 1m] }}
    http: {{ url: 'http://{endpoint}/enrich', timeout: 2s, quick_retries: 0 }}
admin: {{ listen: '{admin}' }}
telemetry: {{ level: '{log}' }}
shutdown: {{ grace: 10s }}
"
    )
}

fn greet(brokers: &str, admin: SocketAddr) {
    println!(
        "Redeliver is running all its services in this process, with a demonstration.
The broker ({brokers}) is in memory: nothing is kept, and it proves no guarantees. Use a real Kafka for work.

  docs -> enricher -> docs-enriched
             | fails for the moment -> docs-retry-5s|30s|1m -> docs-retry-due -> enricher again
             | fails for good       -> docs-dlq

Look at   http://{admin}/metrics   /readyz   /config
End with  Ctrl-C
"
    );
}

/// A trickle of records.
async fn produce(kafka: KafkaSettings, rate: f64, stop: CancellationToken) -> anyhow::Result<()> {
    let producer = Producer::new(&kafka)?;
    let mut ticks = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 1_u64.. {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => break,
        }
        let output = Output {
            topic: PIPELINE.into(),
            partition: None,
            key: Some(format!("doc-{number}").into()),
            value: Some(serde_json::json!({ "number": number }).to_string().into()),
            headers: Headers::new(),
        };
        producer.send(&output).await?;
    }
    Ok(())
}

async fn summarise(totals: Arc<Mutex<Totals>>, stop: CancellationToken) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval_at(tokio::time::Instant::now() + SUMMARY_EVERY, SUMMARY_EVERY);
    loop {
        tokio::select! {
            _ = ticks.tick() => println!("--------  {}", line(&totals)),
            () = stop.cancelled() => return Ok(()),
        }
    }
}

fn line(totals: &Mutex<Totals>) -> String {
    totals.lock().unwrap_or_else(PoisonError::into_inner).line()
}
