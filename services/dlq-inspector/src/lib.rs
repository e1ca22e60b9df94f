//! The inspector of dead letters: all dead-letter topics of a cluster as one list that can be filtered, read,
//! counted and watched over gRPC.
//!
//! Dead letters stay in their topics, what was done with them stands in a ledger topic, and the index of both
//! is a file that is built again whenever it is lost.
//!
//! | module | idea |
//! |---|---|
//! | [`dialect`] | what headers say of a failure, in all the dialects that write dead letters |
//! | [`filter`] | AIP-160 filters: text, expression, condition of SQL |
//! | [`index`] | the database: schema, the one that writes, those that read |
//! | `ingest` | from the topics into the index |
//! | [`ledger`] | what was done with dead letters |
//! | `api` | the gRPC service |
//! | [`server`] | the gRPC server: health, reflection, tokens, the end |

pub mod dialect;
pub mod filter;
pub mod header_list;
pub mod id;
pub mod index;
pub mod ledger;
pub mod letter;
pub mod pattern;
pub mod server;

mod api;
mod ingest;
mod metrics;
mod shared;
mod values;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use anyhow::Context as _;
use redeliver_kafka::Waker;
use redeliver_kafka::survey::Surveyor;
use redeliver_kafka::topology::TopologySpec;
use redeliver_proto::auth::RequireToken;
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::{ConfigError, Secret};
use redeliver_runtime::listen::Listener;
use redeliver_worker::host::{Host, check_kafka};
use redeliver_worker::topics::{topic_settings, warn_about};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::Api;
use crate::index::{Index, Pool};
use crate::ingest::reader::Reader;
use crate::ingest::survey::{SurveyTask, ask_retention};
use crate::ingest::writer::WriterThread;
use crate::metrics::Metrics;
use crate::pattern::Patterns;
use crate::shared::Shared;
use crate::values::Values;

/// How many batches wait for the one that writes.
const WORK: usize = 4;
/// How often what is only measured is measured.
const MEASURE_EVERY: Duration = Duration::from_secs(10);

/// What of a configuration the service cannot follow.
///
/// # Errors
/// When Kafka's client does not take a property.
pub fn check(config: &Config) -> Result<(), ConfigError> {
    check_kafka(config)
}

/// Runs the service until it is told to stop, with a configuration that passed [`check`].
///
/// # Errors
/// When the ledger topic is unsound, the index or the address cannot be used, or a part cannot go on.
pub async fn run(start: Start) -> anyhow::Result<()> {
    let mut host = Host::new("dlq-inspector", start);
    // Without it dead letters can be looked at all the same; only what was done with them is not known.
    let ledger = TopologySpec::for_ledger(ledger::TOPIC, &topic_settings(&host.config));
    if host.config.kafka.topics.create {
        host.ensure_topics(&ledger).await?;
    } else {
        let (kafka, stop) = (host.kafka.clone(), host.tasks.shutdown().clone());
        host.tasks.spawn("ledger-topic", async move {
            warn_about(&kafka, &ledger, &stop).await;
            Ok::<(), Infallible>(())
        });
    }
    mount(&mut host)?;
    Ok(host.run().await?)
}

/// Adds the inspector to a host. Gives the address of its API. Must be called inside of a runtime.
///
/// # Errors
/// When the index or the address cannot be used.
pub fn mount(host: &mut Host) -> anyhow::Result<SocketAddr> {
    let config = host.config.dlq_inspector.clone();
    let api = config.api();
    let token = api.token("dlq_inspector")?;
    let listener = Listener::bind("dlq_inspector.listen", api.listen)?;
    let address = listener
        .local_addr()
        .context("asking for the address of the API")?;

    let metrics = Metrics::register(&mut host.registry());
    let part = host.health.part("dlq-index");
    let stop = host.tasks.shutdown().clone();
    let Index {
        writer,
        pool,
        generation,
        is_new,
    } = Index::open(&config.data_dir)?;
    let (positions, last_row) = pool.read_here(index::known)?;
    tracing::info!(
        api = %address,
        index = if is_new { "new" } else { "found" },
        dead_letters = last_row,
        data_dir = %config.data_dir.display(),
        "inspecting dead letters"
    );

    let shared = Arc::new(Shared::new(last_row));
    let values = Values::new(host.kafka.clone());
    let waker = Waker::new();
    let (survey_sender, surveys) = sync_channel(1);
    let (work_sender, work) = sync_channel(WORK);
    let writer = WriterThread {
        writer,
        work,
        shared: shared.clone(),
        part: part.clone(),
        metrics: metrics.clone(),
    };
    let reader = Reader {
        settings: host.kafka.clone(),
        surveys,
        writer: work_sender,
        waker: waker.clone(),
        shared: shared.clone(),
        part: part.clone(),
        metrics: metrics.clone(),
        stop: stop.clone(),
    };
    let surveyor = Surveyor::new(&host.kafka)?;
    let survey = SurveyTask {
        patterns: Patterns::new(&config.topics),
        surveyor: surveyor.clone(),
        pool: pool.clone(),
        values: values.clone(),
        shared: shared.clone(),
        part,
        reader: survey_sender,
        waker,
        stop: stop.clone(),
    };
    let positions = positions
        .into_iter()
        .map(|known| (Arc::from(known.topic), known.partition, known.next));
    let positions = positions.collect();
    let retention = ask_retention(surveyor, shared.clone(), stop.clone());
    let measured = measure(
        pool.clone(),
        metrics.clone(),
        shared.clone(),
        config.data_dir,
        stop.clone(),
    );
    let service = Api::new(
        pool,
        generation,
        values,
        shared,
        host.clock.clone(),
        metrics,
        stop,
        TaskTracker::new(),
    );
    let token = RequireToken::new(token.as_ref().map(Secret::expose));
    let patience = host.config.shutdown.grace.duration() / 2;

    host.tasks.spawn_thread("dlq-writer", move || writer.run())?;
    host.tasks
        .spawn_thread("dlq-reader", move || reader.run(positions))?;
    host.tasks.spawn("dlq-survey", survey.run());
    host.tasks.spawn("dlq-retention", retention);
    host.tasks.spawn("dlq-measures", measured);
    host.tasks
        .spawn("dlq-api", server::serve(listener, service, token, patience));
    Ok(address)
}

/// Tells what would cost too much to be told with every change.
async fn measure(
    pool: Pool,
    metrics: Metrics,
    shared: Arc<Shared>,
    directory: PathBuf,
    stop: CancellationToken,
) -> Result<(), index::ReadError> {
    loop {
        let open = pool.read(index::open_by_topic).await?;
        let seen: Vec<String> = shared.topics().keys().cloned().collect();
        for topic in seen {
            let count = open
                .iter()
                .find(|(name, _)| *name == topic)
                .map_or(0, |(_, count)| *count);
            metrics.set_open(&topic, count);
        }
        metrics.set_size(index::size(&directory));
        tokio::select! {
            () = tokio::time::sleep(MEASURE_EVERY) => {}
            () = stop.cancelled() => return Ok(()),
        }
    }
}
