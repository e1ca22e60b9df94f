//! The enricher: the worker with an HTTP endpoint, in any language, as its handler.
//!
//! Each record of a pipeline's source is sent to the endpoint. A successful answer becomes a record of the
//! output; what fails for the moment waits in a tier and comes back; what is hopeless goes to the
//! dead-letter topic with its reason.

pub mod http;
pub mod output_choice;
pub mod quick_retry;

use std::io;
use std::sync::Arc;

use redeliver_core::Pipeline;
use redeliver_runtime::Config;
use redeliver_runtime::cli::Start;
use redeliver_runtime::config::{
    ConfigError, HttpConfig, OutputConfig, PipelineConfig, Problem, ResponseMode,
};
use redeliver_worker::WorkerSpec;
use redeliver_worker::host::{Host, check_kafka, kafka_settings, lane_grace};
use redeliver_worker::topics;

use crate::http::{HttpHandler, HttpSettings, ResponseUse, TlsFiles};
use crate::output_choice::OutputChoice;

/// What of a configuration the service cannot follow. Reads the files that it names; asks neither Kafka nor an
/// endpoint.
///
/// # Errors
/// When an endpoint is not usable as configured, or there is none.
pub fn check(config: &Config) -> Result<(), ConfigError> {
    check_kafka(config)?;
    if endpoints(config)?.is_empty() {
        return Err(ConfigError::Invalid(vec![Problem {
            field: "pipelines".to_owned(),
            problem: "none of them has `http`, so there is nothing to do".to_owned(),
            place: None,
        }]));
    }
    Ok(())
}

/// Runs the service until it is told to stop, with a configuration that passed [`check`].
///
/// # Errors
/// When a file of an endpoint cannot be read any more, the topics are unsound, or a lane cannot go on.
pub async fn run(start: Start) -> anyhow::Result<()> {
    let mut host = Host::new("enricher", start);
    let endpoints = endpoints(&host.config)?;
    let pipelines: Vec<Pipeline> = endpoints
        .iter()
        .map(|endpoint| (*endpoint.spec.pipeline).clone())
        .collect();
    let topics = topics::of_pipelines(&host.config, &pipelines);
    host.ensure_topics(&topics).await?;
    spawn(&mut host, endpoints)?;
    Ok(host.run().await?)
}

/// Adds the workers of all served pipelines to a host.
///
/// # Errors
/// When an endpoint is not usable as configured, or the system gives no thread.
pub fn mount(host: &mut Host) -> anyhow::Result<()> {
    let endpoints = endpoints(&host.config)?;
    Ok(spawn(host, endpoints)?)
}

/// A pipeline with its endpoint, ready to be worked on.
struct Endpoint {
    spec: WorkerSpec,
    handler: HttpHandler,
}

/// All served pipelines. Reads the files that their settings name; asks neither Kafka nor an endpoint.
fn endpoints(config: &Config) -> Result<Vec<Endpoint>, ConfigError> {
    let mut endpoints = Vec::new();
    for (name, pipeline) in config.enricher_pipelines() {
        let Some(http) = &pipeline.http else { continue };
        let section = if pipeline.is_retired() {
            "retired"
        } else {
            "pipelines"
        };
        let handler = HttpHandler::new(settings(http, pipeline)).map_err(|error| {
            ConfigError::Invalid(vec![Problem {
                field: format!("{section}.{name}.{}", error.field),
                problem: error.problem,
                place: None,
            }])
        })?;
        let spec = WorkerSpec {
            pipeline: Arc::new(pipeline.pipeline(name, &config.scheduler)),
            kafka: kafka_settings(config),
            lanes: config.kafka.lanes as usize,
            batch: config.kafka.batch as usize,
            concurrency: http.concurrency as usize,
            in_flight: pipeline.in_flight as usize,
            in_flight_bytes: usize::try_from(pipeline.in_flight_bytes).unwrap_or(usize::MAX),
            grace: lane_grace(config),
        };
        endpoints.push(Endpoint { spec, handler });
    }
    Ok(endpoints)
}

fn spawn(host: &mut Host, endpoints: Vec<Endpoint>) -> io::Result<()> {
    for Endpoint { mut spec, handler } in endpoints {
        spec.kafka = host.kafka.clone();
        redeliver_worker::spawn(host, &spec, &handler)?;
    }
    Ok(())
}

fn settings(http: &HttpConfig, pipeline: &PipelineConfig) -> HttpSettings {
    HttpSettings {
        method: http.method.clone(),
        timeout: http.timeout.duration(),
        connect_timeout: http.connect_timeout.duration(),
        quick_retries: http.quick_retries,
        quick_retry_delay: http.quick_retry_delay.duration(),
        response: match http.response {
            ResponseMode::Replace => ResponseUse::Replace,
            ResponseMode::Keep => ResponseUse::Keep,
        },
        max_response_bytes: usize::try_from(http.max_response_bytes).unwrap_or(usize::MAX),
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
            Some(OutputConfig::Chosen(chosen)) => OutputChoice::ByField {
                pointer: chosen.pointer.clone(),
                topics: chosen
                    .topics
                    .iter()
                    .map(|(value, topic)| (value.clone(), topic.as_str().into()))
                    .collect(),
                otherwise: Some(chosen.default.as_str().into()),
            },
            Some(OutputConfig::Topic(_) | OutputConfig::AnyOf(_)) | None => OutputChoice::Default,
        },
        ..HttpSettings::new(http.url.expose())
    }
}
