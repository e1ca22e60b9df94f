//! Tests of handlers without Kafka.
//!
//! [`TestKit`] runs a handler for one record as a worker would: it checks the schema, repeats failed attempts after the delays
//! of the pipeline, and ends with results or a dead letter. Waits take no time. There is no circuit breaker.
//!
//! ```
//! use redeliver_worker::test_kit::{End, TestKit, TestRecord};
//! use redeliver_worker::{Attempt, Failure};
//!
//! async fn greet(attempt: Attempt) -> Result<String, Failure> {
//!     match attempt.text()? {
//!         "shy" if attempt.failed_attempts == 0 => Err(Failure::transient("greeter.shy", "not yet")),
//!         name => Ok(format!("hello {name}")),
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
//! let kit = TestKit::from_yaml("pipelines: { names: { output: greeted-names } }", "names").unwrap();
//! let run = kit.run(greet, TestRecord::value("shy")).await;
//! assert_eq!(run.attempts, 2);
//! assert_eq!(run.waits, [std::time::Duration::from_secs(5)]);
//! assert!(matches!(run.end, End::Succeeded(results) if results[0].value.as_deref() == Some(b"hello shy")));
//! # });
//! ```

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::registry::Registry;
use redeliver_core::record::Position;
use redeliver_core::route::{self, Arrival, Disposition, RouteContext};
use redeliver_core::{Clock as _, Headers, Outcome, Output, Pipeline, Record, SystemClock, Timestamp};
use redeliver_runtime::Config;
use redeliver_runtime::config::ConfigError;
use tower::{BoxError, ServiceExt as _, service_fn};

use crate::attempt::AttemptRunner;
use crate::dead_letter::DeadLetter;
use crate::handler::{Attempt, Handler};
use crate::metrics::WorkerFamilies;
use crate::worker::WorkerSpec;

/// Throttled attempts do not count, so a record could be tried without end.
const MAX_ATTEMPTS: usize = 10_000;

/// Runs handlers as the worker of a pipeline does.
pub struct TestKit {
    runner: AttemptRunner,
}

/// A record of the source topic.
#[derive(Clone, Debug, Default)]
pub struct TestRecord {
    /// The key.
    pub key: Option<Bytes>,
    /// The value.
    pub value: Option<Bytes>,
    /// The headers.
    pub headers: Headers,
}

impl TestRecord {
    /// A record without key and headers.
    pub fn value(value: impl Into<Bytes>) -> Self {
        Self {
            value: Some(value.into()),
            ..Self::default()
        }
    }

    /// The same record with this key.
    #[must_use]
    pub fn key(self, key: impl Into<Bytes>) -> Self {
        Self {
            key: Some(key.into()),
            ..self
        }
    }

    /// The same record with one more header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &[u8]) -> Self {
        self.headers.push(name, Some(value));
        self
    }
}

/// What happened to a record.
#[derive(Clone, Debug)]
pub struct TestRun {
    /// How often the schema was checked and, unless it refused the value, the handler was called.
    pub attempts: usize,
    /// The delays before the second and all further attempts.
    pub waits: Vec<Duration>,
    /// The outputs.
    pub end: End,
}

/// The outputs of a record.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there are only a few, in tests")]
pub enum End {
    /// Its results.
    Succeeded(Vec<Output>),
    /// Its dead letter.
    Dead(DeadLetter),
}

impl TestKit {
    /// For a pipeline of a configuration, in YAML. Files and environment variables are not read, except for the file of a
    /// schema.
    ///
    /// # Errors
    /// If the configuration is invalid, or has no such pipeline.
    pub fn from_yaml(yaml: &str, pipeline: &str) -> Result<Self, ConfigError> {
        let config = Config::from_yaml(yaml)?;
        let Some(settings) = config.any_pipeline(pipeline) else {
            let problem = "is missing: add the pipeline that the test needs";
            return Err(ConfigError::of_field(format!("pipelines.{pipeline}"), problem));
        };
        Ok(Self::new(&WorkerSpec::from_config(&config, pipeline, settings)?))
    }

    /// With the pipeline, the schema and the time-out of this worker.
    #[must_use]
    pub fn new(spec: &WorkerSpec) -> Self {
        let pipeline = spec.pipeline.clone();
        let metrics = WorkerFamilies::register(&mut Registry::default()).of(&pipeline.name);
        Self {
            runner: AttemptRunner {
                group: pipeline.worker_group(""),
                pipeline,
                metrics: Arc::new(metrics),
                timeout: spec.timeout,
                schema: spec.schema.clone(),
            },
        }
    }

    /// Runs a function until the record has ended, see [`Worker::handle`](crate::Worker::handle). Must be called in a tokio
    /// runtime with timers, such as that of `#[tokio::test]`.
    ///
    /// # Panics
    /// If the record has not ended after 10,000 attempts.
    pub async fn run<F, Fut, R, E>(&self, handler: F, record: TestRecord) -> TestRun
    where
        F: Fn(Attempt) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = Result<R, E>> + Send + 'static,
        R: Into<Outcome> + 'static,
        E: Into<BoxError> + 'static,
    {
        self.run_with(service_fn(handler).map_response(Into::into), record)
            .await
    }

    /// As [`TestKit::run`], with a [`tower::Service`].
    ///
    /// # Panics
    /// If the record has not ended after 10,000 attempts.
    pub async fn run_with(&self, handler: impl Handler, record: TestRecord) -> TestRun {
        let mut now = SystemClock.now();
        let mut record = self.read(record, now);
        let mut waits = Vec::new();
        for attempts in 1..=MAX_ATTEMPTS {
            let (outputs, disposition) = self.attempt(handler.clone(), record, now).await;
            let due = match disposition {
                Disposition::Waiting { due, .. } => due,
                Disposition::Succeeded => {
                    let end = End::Succeeded(outputs);
                    return TestRun { attempts, waits, end };
                }
                Disposition::Dead(_) => {
                    let letter = outputs.into_iter().next();
                    let letter = letter.and_then(|letter| DeadLetter::new(self.pipeline(), letter));
                    let Some(letter) = letter else {
                        unreachable!("a dead letter has a failure")
                    };
                    let end = End::Dead(letter);
                    return TestRun { attempts, waits, end };
                }
            };
            waits.push(due.since(now));
            now = now.max(due);
            let Some(waiting) = outputs.into_iter().next() else {
                unreachable!("a record that waits is written")
            };
            record = self.returned(waiting, attempts);
        }
        panic!("the record has not ended after {MAX_ATTEMPTS} attempts; the handler throttles it each time");
    }

    fn pipeline(&self) -> &Pipeline {
        &self.runner.pipeline
    }

    fn read(&self, record: TestRecord, now: Timestamp) -> Record {
        Record {
            position: Position {
                topic: self.pipeline().source.clone(),
                partition: 0,
                offset: 0,
            },
            timestamp: Some(now),
            key: record.key,
            value: record.value,
            headers: record.headers,
            unreadable_headers: 0,
        }
    }

    /// A record as the retry tier returns it.
    fn returned(&self, waiting: Output, attempts: usize) -> Record {
        Record {
            position: Position {
                topic: self.pipeline().return_topic(),
                partition: 0,
                offset: i64::try_from(attempts).unwrap_or(i64::MAX),
            },
            timestamp: None,
            key: waiting.key,
            value: waiting.value,
            headers: waiting.headers,
            unreadable_headers: 0,
        }
    }

    async fn attempt(
        &self,
        handler: impl Handler,
        record: Record,
        now: Timestamp,
    ) -> (Vec<Output>, Disposition) {
        let arrival = match Arrival::read_at(self.pipeline(), &record, now) {
            Ok(arrival) => arrival,
            Err(failure) => {
                let letter = route::reject(self.pipeline(), &record, &failure, now);
                return (vec![letter], Disposition::Dead(failure.class));
            }
        };
        let record = Arc::new(record);
        let (outcome, trace) = self.runner.run(handler, record.clone(), &arrival, false).await;
        let context = RouteContext {
            pipeline: self.pipeline(),
            arrival: &arrival,
            trace: trace.as_ref(),
            now,
            random: 0.5,
            partitions: &|_| None,
        };
        let routing = context.route(&record, outcome);
        (routing.outputs, routing.disposition)
    }
}
