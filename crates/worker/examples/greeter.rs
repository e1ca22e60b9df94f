//! A worker that greets the name in each record.

use std::convert::Infallible;
use std::process::ExitCode;

use redeliver_core::{Failure, Outcome, Pipeline};
use redeliver_runtime::cli::{CommonArgs, Start};
use redeliver_service::{Host, main_with, topics};
use redeliver_worker::{Attempt, WorkerSpec, spawn};
use tower::service_fn;

/// Attempts per pipeline that run at the same time.
const CONCURRENCY: usize = 16;

/// The handler. It may run more than once for a record, always with the same `attempt.origin.id()`. The outcome is written
/// once.
async fn greet(attempt: Attempt) -> Result<Outcome, Infallible> {
    let value = attempt.record.value.as_deref().unwrap_or_default();
    Ok(match std::str::from_utf8(value) {
        // The record waits in a tier and is tried again.
        Ok("shy") if attempt.failed_attempts == 0 => {
            Outcome::Failed(Failure::transient("greeter.shy", "not on the first attempt"))
        }
        Ok(name) if !name.is_empty() => Outcome::value(format!("hello {name}")),
        // The record becomes a dead letter.
        _ => Outcome::Failed(Failure::permanent("greeter.no-name", "the value is not a name")),
    })
}

async fn run(start: Start) -> anyhow::Result<()> {
    let mut host = Host::new("greeter", start);
    let config = host.config.clone();
    let workers: Vec<WorkerSpec> = config
        .worker_pipelines()
        .into_iter()
        .map(|(name, pipeline)| WorkerSpec::from_config(&config, name, pipeline, CONCURRENCY))
        .collect();
    let pipelines: Vec<Pipeline> = workers.iter().map(|worker| (*worker.pipeline).clone()).collect();
    host.ensure_topics(&topics::of_pipelines(&config, &pipelines))
        .await?;
    // A tower::Service: tower layers can add timeouts and limits.
    let handler = service_fn(greet);
    for worker in &workers {
        spawn(&mut host, worker, &handler)?;
    }
    Ok(host.run().await?)
}

fn main() -> ExitCode {
    main_with("greeter", &CommonArgs::default(), Vec::new(), |_| Ok(()), run)
}
