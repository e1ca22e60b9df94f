//! The service: what it checks, and what it runs.

use redeliver_dlq_inspector::masking::Masking;
use redeliver_kafka::survey::Surveyor;
use redeliver_runtime::ProgramConfig;
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::ConfigError;
use redeliver_service::Host;
use tokio::runtime::Handle;

use crate::config::Sections;
use crate::delta::{Location, Store};
use crate::ingest::Ingest;
use crate::maintain::Maintenance;
use crate::metrics::Metrics;
use crate::sources::Sources;

/// The location, which is required here and nowhere else.
pub(crate) fn location(own: &Sections) -> Result<Location, ConfigError> {
    let field = "lake.location";
    let Some(location) = &own.lake.location else {
        let problem = "is not set; write an absolute path, or a URL such as s3://bucket/redeliver";
        return Err(ConfigError::of_field(field, problem));
    };
    Location::parse(location).map_err(|problem| ConfigError::of_field(field, problem))
}

/// Checks a configuration without connecting to anything.
///
/// # Errors
/// When there is no location for the tables, or it cannot be one.
pub fn check(config: &ProgramConfig<Sections>) -> Result<(), ConfigError> {
    location(&config.own).map(drop)
}

/// Runs the service until shutdown. `is_embedded`: whether Kafka is the embedded broker of `redeliver dev`.
///
/// # Errors
/// When a table cannot be used, or the Kafka client fails.
pub async fn run(start: Start, own: Sections, is_embedded: bool) -> anyhow::Result<()> {
    let mut host = Host::new("lake", start);
    host.kafka.is_embedded = is_embedded;
    host.log_in().await;
    let metrics = Metrics::register(&mut host.registry());
    let store = Store::new(location(&own)?, Handle::current())?;
    let maintenance = Maintenance {
        store: store.clone(),
        lake: own.lake.clone(),
        clock: host.clock.clone(),
        metrics: metrics.clone(),
        stop: host.tasks.shutdown().clone(),
    };
    let ingest = Ingest {
        store,
        settings: host.kafka.clone(),
        surveyor: Surveyor::new(&host.kafka)?,
        sources: Sources::new(&host.config, &own),
        masking: Masking::new(&own.dlq_inspector.masking),
        lake: own.lake,
        clock: host.clock.clone(),
        part: host.health.part("lake"),
        metrics,
        stop: host.tasks.shutdown().clone(),
    };
    host.tasks.spawn_thread("lake", move || ingest.run())?;
    host.tasks.spawn_thread("lake-maintenance", move || {
        maintenance.run();
        anyhow::Ok(())
    })?;
    Ok(host.run().await?)
}
