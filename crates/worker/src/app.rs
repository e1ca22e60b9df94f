//! A process that runs handlers: a worker in ten lines.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::{Args as _, FromArgMatches as _};
use redeliver_core::{Outcome, Pipeline};
use redeliver_runtime::cli::{ServiceArgs, Start, UntilIdleArgs};
use redeliver_runtime::config::ConfigError;
use redeliver_runtime::metrics;
use redeliver_runtime::{Config, ProgramConfig};
use redeliver_service::{Host, main_of, topics};
use tower::util::BoxCloneService;
use tower::{BoxError, ServiceExt as _, service_fn};

use crate::attempt::error_failure;
use crate::dead_letter::{DeadLetter, OnDead};
use crate::handler::{Attempt, Handler};
use crate::served::Sections;
use crate::worker::{WorkerSpec, spawn};

/// The command line of a worker.
#[derive(clap::Args)]
struct WorkerArgs {
    #[command(flatten)]
    service: ServiceArgs,
    #[command(flatten)]
    one_shot: UntilIdleArgs,
}

type AnyHandler = BoxCloneService<Attempt, Outcome, BoxError>;

/// A process that runs handlers for the pipelines of its configuration.
///
/// It serves the pipelines without `http`, or those that `worker.pipelines` lists. Their settings come from the
/// configuration, see `docs/configuration.md`.
#[must_use = "call `main` or `run`"]
pub struct Worker {
    name: &'static str,
    /// For pipelines without a handler of their own.
    handler: Option<AnyHandler>,
    handlers: BTreeMap<String, AnyHandler>,
    on_dead: Option<OnDead>,
}

impl Worker {
    /// A worker without handlers. `name` identifies the program in logs, metrics and traces.
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            handler: None,
            handlers: BTreeMap::new(),
            on_dead: None,
        }
    }

    /// Runs this function for the records of all pipelines that have no handler of their own. What it returns is converted
    /// to an [`Outcome`]; text and bytes are the new value of the record. See [`Handler`] for errors.
    pub fn handle<F, Fut, R, E>(self, handler: F) -> Self
    where
        F: Fn(Attempt) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = Result<R, E>> + Send + 'static,
        R: Into<Outcome> + 'static,
        E: Into<BoxError> + 'static,
    {
        self.handle_with(service_fn(handler).map_response(Into::into))
    }

    /// Runs this function for the records of one pipeline, see [`Worker::handle`].
    pub fn handle_pipeline<F, Fut, R, E>(self, pipeline: &str, handler: F) -> Self
    where
        F: Fn(Attempt) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = Result<R, E>> + Send + 'static,
        R: Into<Outcome> + 'static,
        E: Into<BoxError> + 'static,
    {
        self.handle_pipeline_with(pipeline, service_fn(handler).map_response(Into::into))
    }

    /// As [`Worker::handle`], with a [`tower::Service`], to which layers can add limits.
    pub fn handle_with(mut self, handler: impl Handler) -> Self {
        self.handler = Some(boxed(handler));
        self
    }

    /// As [`Worker::handle_pipeline`], with a [`tower::Service`], to which layers can add limits.
    pub fn handle_pipeline_with(mut self, pipeline: &str, handler: impl Handler) -> Self {
        self.handlers.insert(pipeline.to_owned(), boxed(handler));
        self
    }

    /// Calls this function for each dead letter, see [`OnDead::new`].
    pub fn on_dead(mut self, function: impl Fn(DeadLetter) + Send + Sync + 'static) -> Self {
        self.on_dead = Some(OnDead::new(function));
        self
    }

    /// Runs the program: reads its command line and the configuration, and processes records until a signal ends it, or until nothing is left to
    /// do with `--until-idle`. The other flags
    /// and exit codes are those of every service of Redeliver.
    #[must_use]
    pub fn main(self) -> ExitCode {
        let command = clap::Command::new(self.name).version(metrics::version());
        let matches = WorkerArgs::augment_args(command).get_matches();
        let args = match WorkerArgs::from_arg_matches(&matches) {
            Ok(args) => args,
            Err(error) => error.exit(),
        };
        let check = |config: &ProgramConfig<Sections>| self.specs(config, &config.own).map(drop);
        main_of(self.name, &args.service, args.one_shot, check, |start, own| {
            self.run(start, own)
        })
    }

    /// Processes records until `start.shutdown` is cancelled.
    ///
    /// # Errors
    /// If the configuration has no handler for a pipeline, or no pipeline for a handler, topics are missing or
    /// misconfigured, or a lane fails.
    pub async fn run(&self, start: Start, own: Sections) -> anyhow::Result<()> {
        let mut host = Host::new(self.name, start);
        let specs = self.specs(&host.config, &own)?;
        let pipelines: Vec<Pipeline> = specs.iter().map(|(spec, _)| (*spec.pipeline).clone()).collect();
        let topics = topics::of_pipelines(&host.config, &pipelines);
        host.ensure_topics_of(&pipelines, &topics).await?;
        for (spec, handler) in specs {
            if host.is_refused(&spec.pipeline.name) {
                continue;
            }
            spawn(&mut host, &spec, handler.clone()).await?;
        }
        Ok(host.run().await?)
    }

    /// The pipelines that this worker serves, with their handlers.
    fn specs(&self, config: &Config, own: &Sections) -> Result<Vec<(WorkerSpec, &AnyHandler)>, ConfigError> {
        let served = own.worker.of(config, false);
        if served.is_empty() {
            let problem = "none is served: add one without `http`, or list some in worker.pipelines";
            return Err(ConfigError::of_field("pipelines", problem));
        }
        let is_served = |name: &str| served.iter().any(|(served, _)| *served == name);
        if let Some(name) = self.handlers.keys().find(|name| !is_served(name)) {
            let problem = format!(
                "`{}` has a handler for it, but does not serve it: add it",
                self.name
            );
            return Err(ConfigError::of_field(format!("pipelines.{name}"), problem));
        }
        let with_handler = served.into_iter().map(|(name, pipeline)| {
            let Some(handler) = self.handlers.get(name).or(self.handler.as_ref()) else {
                let problem = format!(
                    "`{}` has no handler for it: list the pipelines to serve in worker.pipelines",
                    self.name
                );
                return Err(ConfigError::of_field(format!("pipelines.{name}"), problem));
            };
            let spec = WorkerSpec {
                on_dead: self.on_dead.clone(),
                ..WorkerSpec::from_config(config, name, pipeline)?
            };
            Ok((spec, handler))
        });
        with_handler.collect()
    }
}

fn boxed(handler: impl Handler) -> AnyHandler {
    BoxCloneService::new(handler.map_err(|error| error_failure(error).into()))
}
