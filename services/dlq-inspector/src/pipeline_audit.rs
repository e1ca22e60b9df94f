//! Audits all pipelines again and again: whether each record is exactly once in the output, dead or waiting.
//!
//! One thread reads, with a limited rate. Each pass reads what is new. What it needs of earlier passes is in memory ([`redeliver_audit`]), so after a start
//! everything is read again that Kafka still has.

pub(crate) mod status;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::park_timeout;
use std::time::{Duration, Instant};

use redeliver_audit::{Auditor, Fault, Pace, PipelineAudit};
use redeliver_core::error_chain::error_chain;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Clock, HandlerChanges, SchedulerTopics, Timestamp};
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
/// When a pipeline with too many records is read again.
const TOO_MANY: Duration = Duration::from_secs(3_600);
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

/// The audits of all pipelines of a configuration, which have read nothing.
pub(crate) fn audits(config: &Config) -> Vec<PipelineAudit> {
    let audit = |(name, pipeline): (&str, &redeliver_runtime::config::PipelineConfig)| {
        let http = pipeline.http.as_ref();
        let changes = http.map_or(HandlerChanges::Anything, |http| http.response.changes());
        PipelineAudit::of_taken(pipeline.pipeline(name, &config.scheduler), changes)
    };
    config.all_pipelines().map(audit).collect()
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
        // Pipelines with too many records, and when they are read again.
        let mut resting: Vec<(Instant, PipelineAudit)> = Vec::new();
        while !self.stop.is_cancelled() {
            let woken = resting.extract_if(.., |(until, _)| *until <= Instant::now());
            self.audits.extend(woken.map(|(_, audit)| audit));
            if auditor.is_none() {
                match Auditor::new(&self.kafka, Some(self.scheduler.clone())) {
                    Ok(created) => auditor = Some(created),
                    Err(error) if log_throttle.should_log() => {
                        tracing::warn!(error = %error_chain(&error), "cannot audit pipelines; retrying");
                    }
                    Err(_) => {}
                }
            }
            let mut is_unfinished = false;
            if let Some(auditor) = &mut auditor {
                let full;
                (full, is_unfinished) = self.pass(auditor, &mut log_throttle);
                let full = self
                    .audits
                    .extract_if(.., |audit| full.iter().any(|name| name == audit.name()));
                resting.extend(full.map(|audit| (Instant::now() + TOO_MANY, audit)));
            }
            if is_unfinished {
                continue;
            }
            let until = Instant::now() + interval;
            while Instant::now() < until && !self.stop.is_cancelled() {
                park_timeout(LOOK);
            }
        }
    }

    /// Returns the names of pipelines with too many records, and whether there is more to read of others.
    fn pass(&mut self, auditor: &mut Auditor, log_throttle: &mut LogThrottle) -> (Vec<String>, bool) {
        let (statuses, metrics, now) = (&self.statuses, &self.metrics, self.clock.now());
        let stop = || self.stop.is_cancelled();
        let progress = |pipeline: &str, read, total| {
            statuses.update(pipeline, |status| status.progress(read, total));
        };
        let mut pace = Pace::new(TIMEOUT, &stop);
        pace.bytes_per_second = Some(self.config.bytes_per_second);
        pace.max_kept = usize::try_from(self.config.max_kept).unwrap_or(usize::MAX);
        pace.in_parts = true;
        pace.progress = &progress;
        let (mut full, mut is_unfinished) = (Vec::new(), false);
        auditor.pass(&mut self.audits, now, &mut pace, |audit, result| {
            let name = audit.name().to_owned();
            match &result {
                Ok(_) => {}
                Err(Fault::Unfinished | Fault::Stopped) => is_unfinished = true,
                Err(fault) => {
                    if log_throttle.should_log() {
                        let error = error_chain(fault);
                        tracing::warn!(pipeline = name, error, "cannot audit a pipeline; retrying");
                    }
                    if let Fault::Full(_) = fault {
                        full.push(name.clone());
                    }
                    if !matches!(fault, Fault::Read { .. }) {
                        audit.restart();
                    }
                }
            }
            let since = audit.since();
            let message = statuses.update(&name, |status| {
                status.add(now, since, result);
                status.message(now)
            });
            metrics.set_pipeline_audit(&name, &message);
        });
        (full, is_unfinished)
    }
}
