//! The enricher: a worker whose handler is an HTTP endpoint, which may be written in any language.
//!
//! It sends each record to the endpoint of its pipeline. The response becomes the result. After a transient failure the
//! record waits in a tier and is tried again; after a permanent one it becomes a dead letter.

mod config;
pub mod http;
mod merge;
pub mod output_choice;
pub mod quick_retry;

use std::io;
use std::sync::Arc;

use redeliver_core::{Clock, Pipeline, SystemClock};
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::{
    ChosenBy, ChosenOutput, ConfigError, HttpConfig, OutputConfig, PipelineConfig, ResponseMode,
};
use redeliver_runtime::{Config, ProgramConfig};
use redeliver_service::{Host, topics};
use redeliver_worker::{ServedPipelines, WorkerSpec};

pub use crate::config::Sections;
use crate::http::{HttpHandler, HttpSettings, ResponseUse, TlsFiles};
use crate::output_choice::{OutputChoice, Subject};

/// Checks what only this service needs of a configuration, including the files that it names. Does not connect to Kafka
/// or to an endpoint.
///
/// # Errors
/// When the settings of an endpoint are invalid, or no endpoint is configured.
pub fn check(config: &ProgramConfig<Sections>) -> Result<(), ConfigError> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    if http_workers(config, &config.own.enricher, &clock)?.is_empty() {
        let problem = "none has `http`; configure an endpoint for at least one";
        return Err(ConfigError::of_field("pipelines", problem));
    }
    Ok(())
}

/// Runs the service until it is shut down, with a configuration that passed [`check`].
///
/// # Errors
/// When a file of an endpoint cannot be read, topics are missing or misconfigured, or a lane fails.
pub async fn run(start: Start, own: Sections) -> anyhow::Result<()> {
    let mut host = Host::new("enricher", start);
    let mut workers = http_workers(&host.config, &own.enricher, &host.clock)?;
    let pipelines: Vec<Pipeline> = workers
        .iter()
        .map(|worker| (*worker.spec.pipeline).clone())
        .collect();
    let topics = topics::of_pipelines(&host.config, &pipelines);
    host.ensure_topics_of(&pipelines, &topics).await?;
    workers.retain(|worker| !host.is_refused(&worker.spec.pipeline.name));
    spawn(&mut host, &workers).await?;
    Ok(host.run().await?)
}

/// Adds the workers of all served pipelines to a host, once it has read which of them are paused.
///
/// # Errors
/// When the settings of an endpoint are invalid, or the operating system cannot create a thread.
pub async fn mount(host: &mut Host, served: &ServedPipelines) -> anyhow::Result<()> {
    let workers = http_workers(&host.config, served, &host.clock)?;
    Ok(spawn(host, &workers).await?)
}

struct HttpWorker {
    spec: WorkerSpec,
    handler: HttpHandler,
}

/// The workers of all served pipelines. Reads the files that their settings name.
fn http_workers(
    config: &Config,
    served: &ServedPipelines,
    clock: &Arc<dyn Clock>,
) -> Result<Vec<HttpWorker>, ConfigError> {
    let mut workers = Vec::new();
    for (name, pipeline) in served.of(config, true) {
        let Some(http) = &pipeline.http else { continue };
        let section = if pipeline.is_retired() {
            "retired"
        } else {
            "pipelines"
        };
        let settings = settings(format!("{section}.{name}.http"), http, pipeline);
        let handler = HttpHandler::new(settings, clock.clone())
            .map_err(|error| ConfigError::of_field(error.field, error.problem))?;
        let spec = WorkerSpec::from_config(config, name, pipeline)?;
        workers.push(HttpWorker { spec, handler });
    }
    Ok(workers)
}

async fn spawn(host: &mut Host, workers: &[HttpWorker]) -> io::Result<()> {
    for HttpWorker { spec, handler } in workers {
        handler.follow_files(host);
        handler.observe(host, &spec.pipeline.name);
        redeliver_worker::spawn(host, spec, handler.clone()).await?;
    }
    Ok(())
}

fn settings(section: String, http: &HttpConfig, pipeline: &PipelineConfig) -> HttpSettings {
    HttpSettings {
        section,
        method: http.method.clone(),
        timeout: http.timeout.duration(),
        connect_timeout: http.connect_timeout.duration(),
        connections: http.connections.clone(),
        concurrency: http.concurrency as usize,
        batch: http.batch,
        quick_retries: http.quick_retries,
        response: match &http.response {
            ResponseMode::Replace => ResponseUse::Replace,
            ResponseMode::Keep => ResponseUse::Keep,
            ResponseMode::Merge(pointer) => ResponseUse::Merge(pointer.clone()),
        },
        max_response_bytes: usize::try_from(http.max_response_bytes).unwrap_or(usize::MAX),
        error_response: http.error_response,
        max_retry_after: http.max_retry_after.duration(),
        headers: http
            .headers
            .iter()
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
        header_files: http
            .header_files
            .iter()
            .map(|(name, path)| (name.clone(), path.clone()))
            .collect(),
        classification: http.classification(),
        tls: TlsFiles {
            ca_file: http.tls.ca_file.clone(),
            cert_file: http.tls.cert_file.clone(),
            key_file: http.tls.key_file.clone(),
        },
        output: match &pipeline.output {
            Some(OutputConfig::Chosen(chosen)) => OutputChoice::By {
                subject: subject(chosen),
                topics: chosen
                    .topics
                    .iter()
                    .map(|(value, topic)| (value.clone(), topic.as_deref().map(Into::into)))
                    .collect(),
                otherwise: chosen.default.as_deref().map(Into::into),
            },
            Some(OutputConfig::Topic(_) | OutputConfig::AnyOf(_)) | None => OutputChoice::Default,
        },
        ..HttpSettings::new(http.url.expose())
    }
}

fn subject(chosen: &ChosenOutput) -> Subject {
    // Loading has rejected a missing pointer.
    let pointer = chosen.pointer.clone().unwrap_or_default();
    match chosen.by {
        ChosenBy::Payload => Subject::Payload(pointer),
        ChosenBy::Response => Subject::Response(pointer),
        ChosenBy::Status => Subject::Status,
    }
}
