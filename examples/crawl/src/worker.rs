//! The worker: the handler between its topics.

use std::io;
use std::sync::Arc;

use redeliver_core::pipeline::ReturnTo;
use redeliver_core::{Headers, Output};
use redeliver_kafka::producer::{ProduceError, Producer};
use redeliver_runtime::config::{Config, ConfigError};
use redeliver_service::Host;
use redeliver_worker::{Sections, WorkerSpec, spawn};
use reqwest::{Client, Url};

use crate::crawler::{Crawler, origin};
use crate::sites::Sites;

/// The crawl as configured: a pipeline, and the scheduler's application that feeds it.
#[derive(Clone, Debug)]
pub(crate) struct Crawl {
    pub(crate) spec: WorkerSpec,
    app: Arc<str>,
    ingest: Arc<str>,
}

impl Crawl {
    /// Finds the one pipeline without `http`, and the application whose topic is its source.
    pub(crate) fn from_config(config: &Config, own: &Sections) -> Result<Self, ConfigError> {
        let [(name, settings)] = own.worker.of(config, false)[..] else {
            let problem = "must have one pipeline without `http`; if there are more, set worker.pipelines";
            return Err(ConfigError::of_field("pipelines", problem));
        };
        let mut spec = WorkerSpec::from_config(config, name, settings)?;
        let pipeline = Arc::make_mut(&mut spec.pipeline);
        // With a separate topic for retries, a site's first attempts and its retries could be on two workers.
        if pipeline.return_to != ReturnTo::Source {
            let problem = "must be `source`, so that one worker has all jobs of a site";
            return Err(ConfigError::of_field(
                format!("pipelines.{name}.return_to"),
                problem,
            ));
        }
        let mut apps = config.scheduler.apps.iter();
        let Some((app, _)) = apps.find(|(_, app)| *app.topic == *pipeline.source) else {
            let problem = format!("must have an application with the topic {}", pipeline.source);
            return Err(ConfigError::of_field("scheduler.apps", problem));
        };
        // Jobs for links are written in the transaction of the page's result.
        let ingest: Arc<str> = config.scheduler.topics.ingest.as_str().into();
        if !pipeline.has_output(&ingest) {
            pipeline.other_outputs.push(ingest.clone());
        }
        let app = app.as_str().into();
        Ok(Self { spec, app, ingest })
    }

    /// Adds the worker to a process.
    pub(crate) async fn mount(&self, host: &mut Host, within: Vec<String>, client: Client) -> io::Result<()> {
        let crawler = Crawler {
            crawl: self.clone(),
            client,
            within,
            sites: Sites::default(),
        };
        spawn(host, &self.spec, crawler.handler()).await
    }

    /// Schedules pages. Those that were scheduled within `scheduler.idempotency_window` are not scheduled again.
    pub(crate) async fn schedule(&self, host: &Host, pages: &[Url]) -> Result<(), ProduceError> {
        let producer = Producer::new(&host.kafka)?;
        for page in pages {
            let request = self.request(page);
            let sent = producer.send(&request);
            // A broker that does not respond must not delay the shutdown.
            let sent = host.tasks.shutdown().run_until_cancelled(sent);
            sent.await.transpose()?;
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
            // All jobs of a site are in one partition and thus with one worker, which can limit its requests.
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
