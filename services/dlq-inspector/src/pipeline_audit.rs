//! Audits all pipelines again and again: whether each record is exactly once in the output, dead or waiting.
//!
//! One thread reads, with a limited rate. Each pass reads what is new. What it needs of earlier passes is in memory ([`redeliver_audit`]), so after a start it
//! begins with what comes in from then on.

pub(crate) mod status;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::park_timeout;
use std::time::{Duration, Instant};

use redeliver_audit::{Auditor, Fault, Pace, PipelineAudit};
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, SchedulerTopics, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_proto::v1;
use redeliver_runtime::Config;
use tokio::task::{JoinError, spawn_blocking};
use tokio_util::sync::CancellationToken;

use self::status::Status;
use crate::config::PipelineAuditConfig;
use crate::metrics::Metrics;

/// How long a part of a pass may make no progress.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How often a pause looks for the end of the process.
const LOOK: Duration = Duration::from_millis(200);

/// What was found in each pipeline. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct AuditStatuses(Arc<Mutex<BTreeMap<String, Status>>>);

impl AuditStatuses {
    /// What is known of each pipeline that is audited.
    pub(crate) fn messages(&self, now: Timestamp) -> BTreeMap<String, v1::PipelineAudit> {
        let statuses = self.lock();
        let messages = statuses.iter();
        messages
            .map(|(pipeline, status)| (pipeline.clone(), status.message(now)))
            .collect()
    }

    fn update<T>(&self, pipeline: &str, change: impl FnOnce(&mut Status) -> T) -> T {
        let mut statuses = self.lock();
        change(statuses.entry(pipeline.to_owned()).or_default())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Status>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that audits.
pub(crate) struct Audits {
    pub(crate) config: PipelineAuditConfig,
    pub(crate) kafka: KafkaSettings,
    pub(crate) scheduler: (String, SchedulerTopics),
    pub(crate) audits: Vec<PipelineAudit>,
    pub(crate) statuses: AuditStatuses,
    pub(crate) metrics: Metrics,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) stop: CancellationToken,
}

/// The audits of the pipelines of a configuration, which have read nothing: those whose workers write one result for each success, so not those with handlers
/// of their own. Workers take nothing new from the source of a retired pipeline.
pub(crate) fn audits(config: &Config) -> Vec<PipelineAudit> {
    let audit = |(name, pipeline): (&str, &redeliver_runtime::config::PipelineConfig)| {
        let changes = pipeline.http.as_ref()?.response.changes();
        let pipeline = pipeline.pipeline(name, &config.scheduler);
        (!pipeline.retired).then(|| PipelineAudit::from_now(pipeline, changes))
    };
    config.all_pipelines().filter_map(audit).collect()
}

impl Audits {
    /// Audits until `stop` is cancelled. A request to Kafka that takes long does not delay the end of the process.
    pub(crate) async fn run_until(self, stop: CancellationToken) -> Result<(), JoinError> {
        tokio::select! {
            ended = spawn_blocking(move || self.run()) => ended,
            () = stop.cancelled() => Ok(()),
        }
    }

    fn run(mut self) {
        let interval = self.config.interval.duration();
        for audit in &self.audits {
            self.statuses
                .update(audit.name(), |status| *status = Status::new(interval));
        }
        let mut log_throttle = LogThrottle::default();
        let mut auditor = None;
        while !self.stop.is_cancelled() {
            if auditor.is_none() {
                match Auditor::new(&self.kafka, Some(self.scheduler.clone()), true) {
                    Ok(created) => auditor = Some(created),
                    Err(error) if log_throttle.should_log() => {
                        tracing::warn!(error = %error_chain(&error), "cannot audit pipelines; retrying");
                    }
                    Err(_) => {}
                }
            }
            if let Some(auditor) = &mut auditor {
                self.pass(auditor, &mut log_throttle);
            }
            let until = Instant::now() + interval;
            while Instant::now() < until && !self.stop.is_cancelled() {
                park_timeout(LOOK);
            }
        }
    }

    fn pass(&mut self, auditor: &mut Auditor, log_throttle: &mut LogThrottle) {
        let (statuses, metrics, now) = (&self.statuses, &self.metrics, self.clock.now());
        let stop = || self.stop.is_cancelled();
        let mut pace = Pace::new(TIMEOUT, &stop);
        pace.bytes_per_second = Some(self.config.bytes_per_second);
        pace.max_kept = usize::try_from(self.config.max_kept).unwrap_or(usize::MAX);
        pace.in_parts = true;
        auditor.pass(&mut self.audits, now, &mut pace, |audit, result| {
            let name = audit.name().to_owned();
            let since = audit.since();
            if let Err(fault) = &result {
                if log_throttle.should_log() {
                    let error = error_chain(fault);
                    tracing::warn!(pipeline = name, error, "cannot audit a pipeline; retrying");
                }
                if let Fault::Cut(_) | Fault::Changed | Fault::Full(_) = fault {
                    audit.restart();
                }
            }
            let message = statuses.update(&name, |status| {
                status.add(now, since, result);
                status.message(now)
            });
            metrics.set_pipeline_audit(&name, &message);
        });
    }
}
