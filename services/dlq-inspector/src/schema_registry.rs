//! A client for a schema registry with Confluent's API.
//!
//! Schemas never change, so each is fetched once and kept, within limits. A failure is remembered for some seconds: while the registry does not
//! answer, answers about dead letters do not wait for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redeliver_core::wait::LogThrottle;
use redeliver_runtime::config::{ConfigError, SchemaRegistryConfig, Secret, redact_url};
use redeliver_service::http;
use reqwest::{Client, RequestBuilder, StatusCode};
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use url::Url;

use crate::decoding::{Schema, SchemaFormat, SchemaSource};
use crate::metrics::Metrics;

/// Maximum time of a request, and of all requests for a schema.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of concurrent fetches.
const FETCHES: usize = 4;
/// Maximum size of a schema with all that it refers to, in bytes.
const MAX_SCHEMA: usize = 512 << 10;
/// Maximum number of schemas that it refers to.
const MAX_REFERENCES: usize = 64;
/// Maximum number of schemas that are kept, and their size in bytes.
const MAX_KEPT: usize = 500;
const MAX_KEPT_BYTES: usize = 16 << 20;
/// How long a schema that does not exist, or cannot be used, is not fetched again.
const MISSING: Duration = Duration::from_secs(30);
/// How long nothing is fetched after the registry did not answer.
const OUTAGE: Duration = Duration::from_secs(5);
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
    kept: Mutex<Kept>,
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
    #[error("the schema registry does not answer, or refuses to")]
    Unavailable,
}

/// Why a request has failed.
enum Failure {
    NotFound,
    /// What is wrong with the answer.
    Invalid(String),
    /// Why there is none.
    NoAnswer(String),
}

/// What is kept in memory.
#[derive(Default)]
struct Kept {
    schemas: HashMap<u32, Entry>,
    bytes: usize,
    /// Increases with each use.
    uses: u64,
    /// Until when nothing is fetched.
    outage: Option<Instant>,
}

struct Entry {
    found: Found,
    bytes: usize,
    /// Until when a failure is remembered.
    until: Option<Instant>,
    last_use: u64,
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

#[derive(Deserialize)]
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
    pub(crate) fn new(config: &SchemaRegistryConfig, metrics: Metrics) -> Result<Self, ConfigError> {
        let of = |key: &str, problem: String| {
            ConfigError::of_field(format!("dlq_inspector.schema_registry.{key}"), problem)
        };
        let url = redeliver_runtime::config::endpoint_url(config.url.expose());
        let url = url.map_err(|problem| of("url", problem))?;
        let client = http::client(&url, config.ca_file.as_deref(), REQUEST_TIMEOUT);
        Ok(Self(Arc::new(Inner {
            client: client.map_err(|problem| of("ca_file", problem))?,
            config: config.clone(),
            url,
            permits: Semaphore::new(FETCHES),
            kept: Mutex::default(),
            log: Mutex::default(),
            metrics,
        })))
    }

    /// The schema with this id.
    pub(crate) async fn schema(&self, id: u32) -> Found {
        if let Some(found) = self.kept().get(id, Instant::now()) {
            return found;
        }
        // What takes long is waited for by a few, and the others use its result.
        let fetching = async {
            let _permit = self.0.permits.acquire().await.ok();
            if let Some(found) = self.kept().get(id, Instant::now()) {
                return found;
            }
            let fetched = tokio::time::timeout(TIMEOUT, self.source(id)).await;
            let no_answer = || Failure::NoAnswer(format!("no answer within {} s", TIMEOUT.as_secs()));
            let (found, bytes) = match fetched.unwrap_or_else(|_| Err(no_answer())) {
                Ok(source) => (parse(id, &source).await, source.size()),
                Err(failure) => (Err(self.error(id, failure)), 0),
            };
            self.0.metrics.add_schema_fetch(match &found {
                Ok(_) => "ok",
                Err(SchemaError::Missing(_)) => "missing",
                Err(SchemaError::Unusable(..)) => "unusable",
                Err(SchemaError::Unavailable) => "unavailable",
            });
            self.kept().add(id, found.clone(), bytes, Instant::now());
            found
        };
        let waited = tokio::time::timeout(2 * TIMEOUT, fetching).await;
        waited.unwrap_or(Err(SchemaError::Unavailable))
    }

    /// The schema with this id, and all that it refers to.
    async fn source(&self, id: u32) -> Result<SchemaSource, Failure> {
        let answer = self.get(&["schemas", "ids", &id.to_string()]).await?;
        let mut source = SchemaSource {
            format: format(answer.format.as_deref())?,
            text: answer.schema,
            references: Vec::new(),
        };
        let mut wanted = answer.references.unwrap_or_default();
        while let Some(reference) = wanted.pop() {
            if source.references.iter().any(|(name, _)| *name == reference.name) {
                continue;
            }
            if source.references.len() >= MAX_REFERENCES {
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
            source.references.push((reference.name, answer.schema));
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
        let request = authorized(request, &self.0.config).map_err(Failure::NoAnswer)?;
        let response = request.send().await;
        let response = response.map_err(|error| Failure::NoAnswer(http::problem(error)))?;
        let status = response.status();
        let body = http::body(response, MAX_SCHEMA)
            .await
            .map_err(Failure::NoAnswer)?;
        match status {
            StatusCode::OK if body.len() > MAX_SCHEMA => Err(too_large()),
            StatusCode::OK => serde_json::from_slice(&body)
                .map_err(|_| Failure::Invalid("the registry's answer is not one for a schema".to_owned())),
            StatusCode::NOT_FOUND => Err(Failure::NotFound),
            status => Err(Failure::NoAnswer(format!("it answered {status}"))),
        }
    }

    fn error(&self, id: u32, failure: Failure) -> SchemaError {
        match failure {
            Failure::NotFound => SchemaError::Missing(id),
            Failure::Invalid(problem) => SchemaError::Unusable(id, problem),
            Failure::NoAnswer(problem) => {
                if self.log().should_log() {
                    tracing::warn!(
                        url = redact_url(self.0.url.as_str()),
                        problem,
                        "cannot fetch a schema; values are shown as they are"
                    );
                }
                SchemaError::Unavailable
            }
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> MutexGuard<'_, LogThrottle> {
        self.0.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Parses a schema on a thread for blocking work.
async fn parse(id: u32, source: &SchemaSource) -> Found {
    let source = source.clone();
    let parsed = tokio::task::spawn_blocking(move || Schema::parse(&source)).await;
    // A parser that panics on a schema is no reason to fail: the panic is in the log.
    let parsed = parsed.unwrap_or_else(|_| Err("its parser has failed".to_owned()));
    parsed.map(Arc::new).map_err(|problem| {
        SchemaError::Unusable(id, redeliver_core::failure::bounded_text(&problem, MAX_PROBLEM))
    })
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

impl Kept {
    /// What is known of a schema; `None`: it has to be fetched.
    fn get(&mut self, id: u32, now: Instant) -> Option<Found> {
        self.uses += 1;
        if let Some(entry) = self.schemas.get_mut(&id)
            && entry.until.is_none_or(|until| now < until)
        {
            entry.last_use = self.uses;
            return Some(entry.found.clone());
        }
        let is_outage = self.outage.is_some_and(|until| now < until);
        is_outage.then_some(Err(SchemaError::Unavailable))
    }

    fn add(&mut self, id: u32, found: Found, bytes: usize, now: Instant) {
        if found
            .as_ref()
            .is_err_and(|error| *error == SchemaError::Unavailable)
        {
            self.outage = Some(now + OUTAGE);
            return;
        }
        self.outage = None;
        self.uses += 1;
        let entry = Entry {
            until: found.is_err().then_some(now + MISSING),
            found,
            bytes,
            last_use: self.uses,
        };
        self.bytes += bytes;
        if let Some(former) = self.schemas.insert(id, entry) {
            self.bytes -= former.bytes;
        }
        while self.schemas.len() > MAX_KEPT || self.bytes > MAX_KEPT_BYTES {
            let oldest = self.schemas.iter().min_by_key(|(_, entry)| entry.last_use);
            let Some(oldest) = oldest.map(|(id, _)| *id) else {
                return;
            };
            if let Some(removed) = self.schemas.remove(&oldest) {
                self.bytes -= removed.bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> Found {
        let source = SchemaSource {
            format: SchemaFormat::Json,
            text: String::new(),
            references: Vec::new(),
        };
        Ok(Arc::new(Schema::parse(&source).unwrap()))
    }

    #[test]
    fn schemas_are_kept_within_limits_and_those_used_last_longest() {
        let mut kept = Kept::default();
        let now = Instant::now();
        for id in 0..u32::try_from(MAX_KEPT).unwrap() {
            kept.add(id, schema(), 1, now);
        }
        assert!(kept.get(0, now).is_some());
        kept.add(1_000, schema(), 1, now);
        assert_eq!((kept.schemas.len(), kept.bytes), (MAX_KEPT, MAX_KEPT));
        assert!(kept.get(0, now).is_some() && kept.get(1, now).is_none());
        kept.add(1_001, schema(), MAX_KEPT_BYTES - 1, now);
        assert!(kept.bytes <= MAX_KEPT_BYTES && kept.get(1_001, now).is_some());
        // The same again.
        kept.add(1_001, schema(), 5, now);
        let sizes = kept.schemas.values().map(|entry| entry.bytes);
        assert_eq!(sizes.sum::<usize>(), kept.bytes);
    }

    #[test]
    fn a_failure_is_remembered_for_some_time() {
        let mut kept = Kept::default();
        let now = Instant::now();
        kept.add(1, Err(SchemaError::Missing(1)), 0, now);
        assert_eq!(kept.get(1, now).unwrap().unwrap_err(), SchemaError::Missing(1));
        assert!(kept.get(1, now + MISSING).is_none() && kept.get(2, now).is_none());
        // An outage concerns all that are not kept.
        kept.add(3, schema(), 1, now);
        kept.add(2, Err(SchemaError::Unavailable), 0, now);
        assert_eq!(kept.get(4, now).unwrap().unwrap_err(), SchemaError::Unavailable);
        assert!(kept.get(3, now).unwrap().is_ok());
        assert!(kept.get(4, now + OUTAGE).is_none());
    }
}
