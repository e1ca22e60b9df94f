//! The worker: the handler between the jobs and their results.

use std::sync::Arc;

use redeliver_core::Pipeline;
use redeliver_core::pipeline::ReturnTo;
use redeliver_runtime::Config;
use redeliver_runtime::config::{ConfigError, Problem};
use redeliver_worker::host::{Host, lane_grace};
use redeliver_worker::{WorkerSpec, spawn};

use crate::crawler::{Crawler, Settings};
use crate::job::Scheduling;

/// The pipeline that crawls, and how its jobs are scheduled.
#[derive(Clone, Debug)]
pub struct Crawl {
    /// The pipeline.
    pub pipeline: Arc<Pipeline>,
    /// How new jobs come into it.
    pub scheduling: Scheduling,
    in_flight: usize,
    in_flight_bytes: usize,
}

/// Attempts at the same time. Most of them wait: for an answer, or for their turn.
const CONCURRENCY: usize = 128;
/// Found pages are spread over so many milliseconds.
const SPREAD: u32 = 1_000;

impl Crawl {
    /// Finds the crawl in the configuration: the one pipeline that is a worker's, and the application whose jobs
    /// go into it.
    ///
    /// # Errors
    /// When there is not exactly one of each, or the pipeline's retries do not come back to its source.
    pub fn of(config: &Config) -> Result<Self, ConfigError> {
        let wrong = |field: &str, problem: &str| {
            ConfigError::Invalid(vec![Problem {
                field: field.to_owned(),
                problem: problem.to_owned(),
                place: None,
            }])
        };
        let [(name, settings)] = config.worker_pipelines()[..] else {
            let problem =
                "the crawl is one pipeline without `http`; name it in worker.pipelines if there are more";
            return Err(wrong("pipelines", problem));
        };
        let mut pipeline = settings.pipeline(name, &config.scheduler);
        // The links of a page are scheduled in the transaction of its result.
        let ingest: Arc<str> = config.scheduler.topics.ingest.as_str().into();
        if !pipeline.has_output(&ingest) {
            pipeline.other_outputs.push(ingest.clone());
        }
        if pipeline.return_to != ReturnTo::Source {
            let problem = "must be `source`, so that one worker has all jobs of a host and can be polite";
            return Err(wrong(&format!("pipelines.{name}.return_to"), problem));
        }
        let mut apps = config.scheduler.apps.iter();
        let app = apps.find(|(_, app)| *app.topic == *pipeline.source);
        let Some((app, _)) = app else {
            let problem = format!(
                "none has the topic {}, so no page that is found could be scheduled",
                pipeline.source
            );
            return Err(wrong("scheduler.apps", &problem));
        };
        Ok(Self {
            scheduling: Scheduling {
                app: app.as_str().into(),
                ingest,
                spread: SPREAD,
            },
            in_flight: settings.in_flight as usize,
            in_flight_bytes: usize::try_from(settings.in_flight_bytes).unwrap_or(usize::MAX),
            pipeline: Arc::new(pipeline),
        })
    }

    /// Adds the worker to a host.
    ///
    /// # Errors
    /// When the HTTP client cannot be set up, or the system gives no thread.
    pub fn mount(&self, host: &mut Host, settings: Settings) -> anyhow::Result<()> {
        let crawler = Crawler::new(settings, host.clock.clone())?;
        let spec = WorkerSpec {
            pipeline: self.pipeline.clone(),
            kafka: host.kafka.clone(),
            lanes: host.config.kafka.lanes as usize,
            batch: host.config.kafka.batch as usize,
            concurrency: CONCURRENCY,
            in_flight: self.in_flight,
            in_flight_bytes: self.in_flight_bytes,
            grace: lane_grace(&host.config),
        };
        spawn(host, &spec, &crawler.handler())?;
        Ok(())
    }
}
