//! The worker: the handler between its topics.

use std::sync::Arc;
use std::time::Duration;

use redeliver_core::pipeline::ReturnTo;
use redeliver_core::{Headers, Output, Pipeline};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_runtime::config::{Config, ConfigError, Problem};
use redeliver_service::Host;
use redeliver_worker::{WorkerSpec, spawn};
use reqwest::Url;

use crate::crawler::{Crawler, origin};
use crate::fetch;
use crate::hosts::Hosts;

/// The crawl as configured: a pipeline, and the scheduler's application that feeds it.
#[derive(Clone, Debug)]
pub(crate) struct Crawl {
    pub(crate) pipeline: Arc<Pipeline>,
    app: Arc<str>,
    ingest: Arc<str>,
}

/// Concurrent attempts. Most of them wait, for a response or for their host.
const CONCURRENCY: usize = 128;

impl Crawl {
    /// Finds the one pipeline without `http`, and the application whose topic is its source.
    pub(crate) fn from_config(config: &Config) -> Result<Self, ConfigError> {
        let invalid = |field: String, problem: String| {
            let place = None;
            ConfigError::Invalid(vec![Problem {
                field,
                problem,
                place,
            }])
        };
        let [(name, settings)] = config.worker_pipelines()[..] else {
            let problem = "must have one pipeline without `http`; if there are more, set worker.pipelines";
            return Err(invalid("pipelines".to_owned(), problem.to_owned()));
        };
        let mut pipeline = settings.pipeline(name, &config.scheduler);
        // With a separate topic for retries, a host's first attempts and its retries could be on two workers.
        if pipeline.return_to != ReturnTo::Source {
            let field = format!("pipelines.{name}.return_to");
            let problem = "must be `source`, so that one worker has all jobs of a host";
            return Err(invalid(field, problem.to_owned()));
        }
        let mut apps = config.scheduler.apps.iter();
        let Some((app, _)) = apps.find(|(_, app)| *app.topic == *pipeline.source) else {
            let problem = format!("must have an application with the topic {}", pipeline.source);
            return Err(invalid("scheduler.apps".to_owned(), problem));
        };
        // Jobs for links are written in the transaction of the page's result.
        let ingest: Arc<str> = config.scheduler.topics.ingest.as_str().into();
        if !pipeline.has_output(&ingest) {
            pipeline.other_outputs.push(ingest.clone());
        }
        Ok(Self {
            app: app.as_str().into(),
            ingest,
            pipeline: Arc::new(pipeline),
        })
    }

    /// Adds the worker to a process.
    pub(crate) fn mount(
        &self,
        host: &mut Host,
        allowed: Vec<String>,
        timeout: Duration,
    ) -> anyhow::Result<()> {
        let crawler = Crawler {
            crawl: self.clone(),
            client: fetch::client(timeout)?,
            allowed,
            hosts: Hosts::default(),
        };
        let settings = &host.config.pipelines[&*self.pipeline.name];
        let spec = WorkerSpec {
            pipeline: self.pipeline.clone(),
            ..WorkerSpec::from_config(&host.config, &self.pipeline.name, settings, CONCURRENCY)
        };
        Ok(spawn(host, &spec, &crawler.handler())?)
    }

    /// Schedules pages. Those that were scheduled within `scheduler.idempotency_window` are not scheduled again.
    pub(crate) async fn schedule(&self, kafka: &KafkaSettings, pages: &[Url]) -> anyhow::Result<()> {
        let producer = Producer::new(kafka)?;
        for page in pages {
            producer.send(&self.request(page)).await?;
        }
        Ok(())
    }

    /// A request to crawl a page. The URL is the idempotency key, so every page becomes one job, however many links
    /// lead to it. Requests with the same idempotency key must be equal: they say nothing about the linking page.
    pub(crate) fn request(&self, page: &Url) -> Output {
        let request = serde_json::json!({
            "appName": &*self.app,
            "delay": "0s",
            "idempotencyKey": page.as_str(),
            // All jobs of a host are in one partition and thus with one worker, which can limit its requests.
            "key": origin(page),
            "jobData": { "url": page.as_str() },
        });
        Output {
            topic: self.ingest.clone(),
            partition: None,
            // Leads to the partition that decides about the idempotency key. Others would forward the request there.
            key: Some(format!("{}\0{page}", self.app).into()),
            value: Some(request.to_string().into()),
            headers: Headers::new(),
        }
    }
}
