//! A client for a schema registry with Confluent's API.
//!
//! Schemas never change, so each is fetched once for all that wait for it, and kept, within limits. A failure is remembered for some seconds: while
//! the registry does not answer, answers about dead letters do not wait for it.

mod kept;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redeliver_core::wait::LogThrottle;
use redeliver_runtime::config::{ConfigError, SchemaRegistryConfig, Secret, redact_url};
use redeliver_runtime::http_client;
use reqwest::{Client, RequestBuilder, StatusCode};
use serde::Deserialize;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use url::Url;

use crate::decoding::{Schema, SchemaFormat, SchemaSource};
use crate::decoding_pool::{DecodingPool, NoResult};
use crate::metrics::Metrics;

use kept::{Kept, Known};

/// Maximum time of a request, and of all requests for a schema.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a caller waits for a schema.
const WAIT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent fetches.
const FETCHES: usize = 4;
/// Maximum size of a schema with all that it refers to, in bytes.
const MAX_SCHEMA: usize = 512 << 10;
/// Maximum number of schemas that it refers to.
const MAX_REFERENCES: usize = 64;
/// Maximum length of the description of what is wrong with a schema, in bytes.
const MAX_PROBLEM: usize = 300;

/// Fetches and keeps schemas. Cheap to clone.
#[derive(Clone)]
pub(crate) struct SchemaRegistry(Arc<Inner>);

struct Inner {
    config: SchemaRegistryConfig,
    url: Url,
    client: Client,
    permits: Semaphore,
    pool: DecodingPool,
    kept: Mutex<Kept>,
    /// Each ends after the timeouts.
    fetches: TaskTracker,
    log: Mutex<LogThrottle>,
    metrics: Metrics,
}

/// A schema, or why there is none.
type Found = Result<Arc<Schema>, SchemaError>;

/// Why there is no schema.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SchemaError {
    #[error("the schema registry has no schema {0}")]
    Missing(u32),
    #[error("schema {0} cannot be used: {1}")]
    Unusable(u32, String),
    #[error("the inspector cannot use the schema registry: {0}")]
    Refused(String),
    #[error("the schema registry does not answer")]
    Unavailable,
    #[error("schema {0} takes long to fetch and to parse; retry later")]
    Slow(u32),
    #[error("too many schemas are being fetched and parsed; retry later")]
    Busy,
}

/// Why a request has failed.
#[derive(Debug, PartialEq, Eq)]
enum Failure {
    NotFound,
    /// What is wrong with the answer.
    Invalid(String),
    /// What is wrong with the configuration, as callers may know it, and in detail.
    Refused(String, String),
    /// Why there is none.
    NoAnswer(String),
}

/// The answer for a schema.
#[derive(Deserialize)]
struct Answer {
    schema: String,
    /// Avro, if it is not set.
    #[serde(rename = "schemaType")]
    format: Option<String>,
    references: Option<Vec<Reference>>,
}

/// The answer if there is no schema.
#[derive(Deserialize)]
struct Refusal {
    #[serde(rename = "error_code")]
    _code: i64,
}

#[derive(Deserialize, PartialEq, Eq, Hash)]
struct Reference {
    name: String,
    subject: String,
    version: i64,
}

impl SchemaRegistry {
    /// Does not connect yet.
    ///
    /// # Errors
    /// What is wrong with the configuration.
    pub(crate) fn new(
        config: &SchemaRegistryConfig,
        pool: DecodingPool,
        metrics: Metrics,
    ) -> Result<Self, ConfigError> {
        let of = |key: &str, problem: String| {
            ConfigError::of_field(format!("dlq_inspector.schema_registry.{key}"), problem)
        };
        let url = redeliver_runtime::config::endpoint_url(config.url.expose());
        let url = url.map_err(|problem| of("url", problem))?;
        let client = http_client::client(&url, config.ca_file.as_deref(), REQUEST_TIMEOUT);
        Ok(Self(Arc::new(Inner {
            client: client.map_err(|problem| of("ca_file", problem))?,
            config: config.clone(),
            url,
            permits: Semaphore::new(FETCHES),
            pool,
            kept: Mutex::default(),
            fetches: TaskTracker::new(),
            log: Mutex::default(),
            metrics,
        })))
    }

    /// The schema with this id.
    pub(crate) async fn schema(&self, id: u32) -> Found {
        let known = self.kept().get(id, Instant::now());
        let mut waiting = match known {
            Known::Found(found) => return found,
            Known::Pending(waiting) => waiting,
            Known::Unknown(sender, waiting) => {
                let registry = self.clone();
                // It does not end with this caller: others wait for it, too.
                self.0
                    .fetches
                    .spawn(async move { registry.fetch(id, &sender).await });
                waiting
            }
        };
        let found = tokio::time::timeout(WAIT, waiting.wait_for(Option::is_some)).await;
        match found {
            Ok(Ok(found)) => found.clone().unwrap_or(Err(SchemaError::Slow(id))),
            // It takes longer, or the process ends.
            Ok(Err(_)) | Err(_) => Err(SchemaError::Slow(id)),
        }
    }

    /// Fetches and keeps a schema.
    async fn fetch(&self, id: u32, result: &watch::Sender<Option<Found>>) {
        let fetched = async {
            // The semaphore is never closed.
            let _permit = self.0.permits.acquire().await.ok();
            // Others may have found out meanwhile that the registry does not answer.
            if self.kept().is_outage(Instant::now()) {
                return Err(SchemaError::Unavailable);
            }
            let fetched = tokio::time::timeout(TIMEOUT, self.source(id)).await;
            let no_answer = || Failure::NoAnswer(format!("no answer within {} s", TIMEOUT.as_secs()));
            fetched
                .unwrap_or_else(|_| Err(no_answer()))
                .map_err(|failure| self.error(id, failure))
        };
        let found = match fetched.await {
            Ok(source) => self.parse(id, source).await,
            Err(error) => Err(error),
        };
        self.0.metrics.add_schema_fetch(match &found {
            Ok(_) => "ok",
            Err(SchemaError::Missing(_)) => "missing",
            Err(SchemaError::Unusable(..)) => "unusable",
            Err(SchemaError::Refused(_)) => "refused",
            Err(SchemaError::Unavailable | SchemaError::Slow(_) | SchemaError::Busy) => "unavailable",
        });
        self.kept().add(id, found.clone(), Instant::now());
        result.send_replace(Some(found));
    }

    /// Parses a schema.
    async fn parse(&self, id: u32, source: SchemaSource) -> Found {
        let parsed = match self.0.pool.run(move || Schema::parse(&source)).await {
            Ok(parsed) => parsed,
            // A parser that panics on a schema is no reason to fail.
            Err(NoResult::Panicked) => Err("its parser has failed".to_owned()),
            Err(NoResult::Busy | NoResult::ShuttingDown) => return Err(SchemaError::Busy),
        };
        parsed.map(Arc::new).map_err(|problem| {
            SchemaError::Unusable(id, redeliver_core::failure::bounded_text(&problem, MAX_PROBLEM))
        })
    }

    /// The schema with this id, and all that it refers to.
    async fn source(&self, id: u32) -> Result<SchemaSource, Failure> {
        let answer = self.get(&["schemas", "ids", &id.to_string()]).await?;
        let mut source = SchemaSource {
            format: format(answer.format.as_deref())?,
            text: answer.schema,
            references: Vec::new(),
        };
        if source.format == SchemaFormat::Json {
            // Its values are documents, whatever it says.
            return Ok(source);
        }
        let mut wanted = answer.references.unwrap_or_default();
        let mut seen = HashSet::new();
        while let Some(reference) = wanted.pop() {
            if seen.contains(&reference) {
                continue;
            }
            if seen.len() >= MAX_REFERENCES {
                return Err(Failure::Invalid(format!(
                    "it refers to more than {MAX_REFERENCES} schemas"
                )));
            }
            let version = reference.version.to_string();
            let path = ["subjects", &reference.subject, "versions", &version];
            let answer = self.get(&path).await.map_err(|failure| match failure {
                Failure::NotFound => Failure::Invalid(format!(
                    "the registry has no version {version} of the subject `{}`, to which it refers",
                    reference.subject
                )),
                failure => failure,
            })?;
            source.references.push((reference.name.clone(), answer.schema));
            seen.insert(reference);
            wanted.extend(answer.references.unwrap_or_default());
            if source.size() > MAX_SCHEMA {
                return Err(too_large());
            }
        }
        Ok(source)
    }

    async fn get(&self, path: &[&str]) -> Result<Answer, Failure> {
        let mut url = self.0.url.clone();
        match url.path_segments_mut() {
            Ok(mut segments) => segments.pop_if_empty().extend(path),
            // The configuration has checked it.
            Err(()) => return Err(Failure::NoAnswer("the URL has no path".to_owned())),
        };
        let request = self.0.client.get(url);
        let request = authorized(request, &self.0.config)
            .map_err(|problem| Failure::Refused("its credentials cannot be read".to_owned(), problem))?;
        let response = request.send().await;
        let response = response.map_err(|error| Failure::NoAnswer(http_client::problem(error)))?;
        let status = response.status();
        let body = http_client::body(response, MAX_SCHEMA)
            .await
            .map_err(Failure::NoAnswer)?;
        if status != StatusCode::OK {
            return Err(failure(status, &body));
        }
        if body.len() > MAX_SCHEMA {
            return Err(too_large());
        }
        // For example the page of a proxy.
        serde_json::from_slice(&body).map_err(|_| refused("its answer is not one for a schema".to_owned()))
    }

    fn error(&self, id: u32, failure: Failure) -> SchemaError {
        match failure {
            Failure::NotFound => SchemaError::Missing(id),
            Failure::Invalid(problem) => SchemaError::Unusable(id, problem),
            Failure::Refused(problem, detail) => {
                self.warn(
                    &detail,
                    "cannot use the schema registry; check dlq_inspector.schema_registry",
                );
                SchemaError::Refused(problem)
            }
            Failure::NoAnswer(problem) => {
                self.warn(&problem, "cannot fetch a schema; values are not decoded");
                SchemaError::Unavailable
            }
        }
    }

    fn warn(&self, problem: &str, text: &'static str) {
        if self.log().should_log() {
            let url = redact_url(self.0.url.as_str());
            tracing::warn!(url, problem, "{text}");
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> MutexGuard<'_, LogThrottle> {
        self.0.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What an answer means that is not a schema.
fn failure(status: StatusCode, body: &[u8]) -> Failure {
    match status {
        StatusCode::NOT_FOUND if serde_json::from_slice::<Refusal>(body).is_ok() => Failure::NotFound,
        StatusCode::NOT_FOUND => refused("its URL is not one of a schema registry".to_owned()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            refused(format!("it answers {status} to the credentials"))
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            Failure::NoAnswer(format!("it answers {status}"))
        }
        status if status.is_server_error() => Failure::NoAnswer(format!("it answers {status}")),
        // For example a redirect.
        status => refused(format!("it answers {status}")),
    }
}

/// What everybody may know of a wrong configuration.
fn refused(problem: String) -> Failure {
    Failure::Refused(problem.clone(), problem)
}

fn too_large() -> Failure {
    Failure::Invalid(format!("it has more than {MAX_SCHEMA} bytes"))
}

fn format(name: Option<&str>) -> Result<SchemaFormat, Failure> {
    match name {
        None | Some("AVRO") => Ok(SchemaFormat::Avro),
        Some("PROTOBUF") => Ok(SchemaFormat::Protobuf),
        Some("JSON") => Ok(SchemaFormat::Json),
        Some(_) => Err(Failure::Invalid(
            "it is neither an Avro, nor a Protobuf, nor a JSON schema".to_owned(),
        )),
    }
}

/// With the credentials, which are read from their files each time, so that they can be replaced.
fn authorized(request: RequestBuilder, config: &SchemaRegistryConfig) -> Result<RequestBuilder, String> {
    if let (Some(username), Some(file)) = (&config.username, &config.password_file) {
        return Ok(request.basic_auth(username, Some(Secret::from_file(file)?.expose())));
    }
    match &config.token_file {
        Some(file) => Ok(request.bearer_auth(Secret::from_file(file)?.expose())),
        None => Ok(request),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_failures_are_outages() {
        let failure =
            |status: u16, body: &str| failure(StatusCode::from_u16(status).unwrap(), body.as_bytes());
        let not_found = r#"{"error_code":40403,"message":"Schema not found"}"#;
        assert_eq!(failure(404, not_found), Failure::NotFound);
        for (status, body) in [
            (404, "<html>"),
            (404, "{}"),
            (401, not_found),
            (403, ""),
            (400, ""),
            (405, ""),
            (302, ""),
        ] {
            assert!(matches!(failure(status, body), Failure::Refused(..)), "{status}");
        }
        for status in [408, 429, 500, 502, 503, 504] {
            assert!(
                matches!(failure(status, not_found), Failure::NoAnswer(_)),
                "{status}"
            );
        }
    }
}
