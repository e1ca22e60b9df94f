//! The demonstration brings everything along: a broker in memory, and all services in this process.

use std::collections::BTreeSet;
use std::sync::Arc;

use redeliver_kafka::embedded::EmbeddedBroker;
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::Config;
use redeliver_runtime::listen::Listener;
use redeliver_runtime::shutdown;
use redeliver_runtime::telemetry::{self, Identity};
use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_worker::host::Host;
use tokio_util::sync::CancellationToken;

use crate::report::Report;
use crate::show;
use crate::worker::Crawl;

/// The configuration of the crawl, which is also that of the demonstration.
const CRAWL: &str = include_str!("../crawl.yaml");
const PARTITIONS: i32 = 4;

/// Runs the demonstration to its end.
///
/// # Errors
/// When a part cannot be started, or fails.
pub async fn run() -> anyhow::Result<Report> {
    let outline = Config::from_yaml(CRAWL)?;
    let topics = topics(&outline)?;
    let broker = EmbeddedBroker::start(&topics)?;
    let config = Config::from_yaml(&format!(
        "{CRAWL}
instance: crawl-demo
kafka: {{ brokers: '{}', static_membership: false }}
admin: {{ listen: '127.0.0.1:0' }}
telemetry: {{ level: error }}
shutdown: {{ grace: 10s }}
",
        broker.brokers()
    ))?;
    let identity = Identity {
        service: "crawl-demo",
        instance: &config.instance,
    };
    let telemetry = telemetry::init(&config.telemetry, identity)?;
    let stop = CancellationToken::new();
    shutdown::on_signals(stop.clone())?;
    let listener = Listener::bind("admin.listen", config.admin.listen)?;
    let start = Start {
        config: Arc::new(config),
        shutdown: stop,
        tracer: telemetry.tracer(),
        admin: listener,
    };
    let mut host = Host::new("crawl-demo", start);
    host.kafka.takes_all_partitions = true;
    let crawl = Crawl::of(&host.config)?;
    redeliver_retry_tier::mount(&mut host)?;
    redeliver_scheduler::mount(&mut host, MemoryIndex::new()).await?;
    println!(
        "Scheduler, retry tier and crawler run in this process, on a broker in memory ({}), and crawl a site that is \
         served here too.\nThe broker keeps nothing and proves no guarantees; with a real Kafka it does: see the \
         docs.\n",
        broker.brokers()
    );
    let report = show::run(host, crawl).await;
    telemetry.shutdown().await;
    report
}

fn topics(config: &Config) -> anyhow::Result<Vec<(String, i32)>> {
    let crawl = Crawl::of(config)?;
    let scheduler = &config.scheduler.topics;
    let own = crawl
        .pipeline
        .topics()
        .into_iter()
        .map(|(topic, _)| topic.to_string());
    let of_scheduler = [
        &scheduler.ingest,
        &scheduler.state,
        &scheduler.dlq,
        &scheduler.answers,
    ];
    // The crawl writes its jobs to a topic of the scheduler, so that is an output too.
    let all: BTreeSet<String> = own.chain(of_scheduler.into_iter().cloned()).collect();
    Ok(all.into_iter().map(|topic| (topic, PARTITIONS)).collect())
}
