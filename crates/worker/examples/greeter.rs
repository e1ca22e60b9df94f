//! A worker of one's own: greets the name in each record of the configured pipelines.
//!
//! `names.yaml` with `pipelines: { names: { output: greeted-names } }` is enough to try it, on a Kafka:
//! `REDELIVER_CONFIG=names.yaml cargo run --package redeliver-worker --example greeter`.

use std::convert::Infallible;
use std::process::ExitCode;
use std::sync::Arc;

use redeliver_core::{Failure, Outcome, Pipeline};
use redeliver_runtime::cli::{CommonArgs, Start, main_with};
use redeliver_worker::host::{check_kafka, lane_grace};
use redeliver_worker::{Attempt, Host, WorkerSpec, spawn, topics};
use tower::service_fn;

/// What becomes of one record. It may be called more than once for the same one, with the same
/// `attempt.origin.id()`; its outcome is written once.
fn greet(attempt: &Attempt) -> Outcome {
    let value = attempt.record.value.as_deref().unwrap_or_default();
    match std::str::from_utf8(value) {
        Ok("nobody") if attempt.failed_attempts == 0 => {
            Outcome::Failed(Failure::transient("greeter.absent", "nobody is there yet"))
        }
        Ok(name) if !name.is_empty() => Outcome::value(format!("hello {name}")),
        _ => Outcome::Failed(Failure::permanent("greeter.no-name", "the value is no name")),
    }
}

async fn run(start: Start) -> anyhow::Result<()> {
    let mut host = Host::new("greeter", start);
    let config = host.config.clone();
    let served = config.worker_pipelines();
    let pipelines: Vec<Pipeline> = served
        .iter()
        .map(|(name, pipeline)| pipeline.pipeline(name, &config.scheduler))
        .collect();
    host.ensure_topics(&topics::of_pipelines(&config, &pipelines))
        .await?;
    // A tower::Service: layers of tower add timeouts and limits to it.
    let handler = service_fn(|attempt: Attempt| async move { Ok::<_, Infallible>(greet(&attempt)) });
    for ((_, settings), pipeline) in served.iter().zip(pipelines) {
        let spec = WorkerSpec {
            pipeline: Arc::new(pipeline),
            kafka: host.kafka.clone(),
            lanes: config.kafka.lanes as usize,
            batch: config.kafka.batch as usize,
            concurrency: 16,
            in_flight: settings.in_flight as usize,
            in_flight_bytes: usize::try_from(settings.in_flight_bytes)?,
            grace: lane_grace(&config),
        };
        spawn(&mut host, &spec, &handler)?;
    }
    Ok(host.run().await?)
}

fn main() -> ExitCode {
    main_with("greeter", &CommonArgs::default(), Vec::new(), check_kafka, run)
}
