//! The inspector's metrics.

use std::collections::BTreeSet;
use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use redeliver_core::Timestamp;
use redeliver_proto::v1;
use tonic::Code;

use crate::completeness::Completeness;
use crate::group_states::GroupState;
use crate::ledger;
use crate::redrive::job::Kind;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TopicLabel {
    topic: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PipelineLabel {
    pipeline: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallLabels {
    method: &'static str,
    code: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RedrivenLabels {
    kind: &'static str,
    outcome: &'static str,
}

/// From a single index lookup to a page with values from Kafka.
const CALL_SECONDS: [f64; 13] = [
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0,
];

/// The inspector's metrics. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Metrics {
    indexed: Family<TopicLabel, Counter>,
    lag: Family<TopicLabel, Gauge>,
    open: Family<TopicLabel, Gauge>,
    removal: Family<TopicLabel, Gauge>,
    groups: Family<StateLabel, Gauge>,
    new_groups: Counter,
    missing: Family<TopicLabel, Gauge>,
    as_of: Gauge,
    rebuilds: Counter,
    write_errors: Counter,
    audit_failures: Counter,
    schema_fetches: Family<OutcomeLabel, Counter>,
    size: Gauge,
    watchers: Gauge,
    redriven: Family<RedrivenLabels, Counter>,
    redrives: Family<StateLabel, Gauge>,
    removed_entries: Counter,
    scans: Gauge,
    scanned: Counter,
    job_outcomes: Gauge,
    overview_surveys: Counter,
    overview_watchers: Gauge,
    audit_as_of: Family<PipelineLabel, Gauge>,
    audit_defects: Family<PipelineLabel, Gauge>,
    webhook_requests: Family<OutcomeLabel, Counter>,
    calls: Family<CallLabels, Histogram, fn() -> Histogram>,
}

impl Metrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            indexed: Family::default(),
            lag: Family::default(),
            open: Family::default(),
            removal: Family::default(),
            groups: Family::default(),
            new_groups: Counter::default(),
            missing: Family::default(),
            as_of: Gauge::default(),
            rebuilds: Counter::default(),
            write_errors: Counter::default(),
            audit_failures: Counter::default(),
            schema_fetches: Family::default(),
            size: Gauge::default(),
            watchers: Gauge::default(),
            redriven: Family::default(),
            redrives: Family::default(),
            removed_entries: Counter::default(),
            scans: Gauge::default(),
            scanned: Counter::default(),
            job_outcomes: Gauge::default(),
            overview_surveys: Counter::default(),
            overview_watchers: Gauge::default(),
            audit_as_of: Family::default(),
            audit_defects: Family::default(),
            webhook_requests: Family::default(),
            calls: Family::new_with_constructor(|| Histogram::new(CALL_SECONDS)),
        };
        registry.register(
            "dlq_indexed",
            "Dead letters added to the index",
            metrics.indexed.clone(),
        );
        registry.register(
            "dlq_index_lag",
            "Dead letters that are not indexed yet",
            metrics.lag.clone(),
        );
        registry.register(
            "dlq_open",
            "Open dead letters: neither redriven nor discarded",
            metrics.open.clone(),
        );
        registry.register(
            "dlq_removal_timestamp_seconds",
            "When Kafka may delete the oldest open dead letter",
            metrics.removal.clone(),
        );
        registry.register(
            "dlq_groups",
            "Groups with open dead letters, by state: open, resolved, muted, regressed",
            metrics.groups.clone(),
        );
        registry.register(
            "dlq_groups_first_seen",
            "New open groups, since the index was complete for the first time",
            metrics.new_groups.clone(),
        );
        registry.register(
            "dlq_missing_partitions",
            "Partitions whose dead letters may be missing in answers",
            metrics.missing.clone(),
        );
        registry.register(
            "dlq_as_of_timestamp_seconds",
            "Up to when the index contains everything that is not missing; 0 until it has caught up",
            metrics.as_of.clone(),
        );
        registry.register(
            "dlq_index_rebuilds",
            "Rebuilds of a damaged index",
            metrics.rebuilds.clone(),
        );
        registry.register(
            "dlq_index_write_errors",
            "Failed attempts to open or write the index; they are repeated",
            metrics.write_errors.clone(),
        );
        for kind in [Kind::Redrive, Kind::Discard, Kind::Restore] {
            for outcome in ["done", "failed", "skipped"] {
                metrics.add_redriven(kind, outcome, 0);
            }
        }
        registry.register(
            "dlq_redrive_items",
            "Dead letters of redrives, discards and restores in this process, by outcome: done, failed, skipped",
            metrics.redriven.clone(),
        );
        registry.register(
            "dlq_redrives",
            "Redrives, discards and restores in progress, by state: planned, running, paused, auto_paused (too many records came back)",
            metrics.redrives.clone(),
        );
        registry.register(
            "dlq_ledger_entries_removed",
            "Entries removed from the ledger because Kafka has deleted their dead letters",
            metrics.removed_entries.clone(),
        );
        registry.register(
            "dlq_audit_failures",
            "Disclosures refused because the audit topic cannot be written",
            metrics.audit_failures.clone(),
        );
        // Without a registry, they are 0.
        for outcome in ["ok", "missing", "unusable", "refused", "unavailable"] {
            drop(metrics.schema_fetches.get_or_create(&OutcomeLabel { outcome }));
        }
        registry.register(
            "dlq_schema_fetches",
            "Fetches of schemas, by outcome: ok, missing, unusable, refused, unavailable",
            metrics.schema_fetches.clone(),
        );
        registry.register_with_unit(
            "dlq_index_size",
            "Size of the index on disk",
            Unit::Bytes,
            metrics.size.clone(),
        );
        registry.register(
            "dlq_watchers",
            "Clients that watch dead letters",
            metrics.watchers.clone(),
        );
        registry.register("dlq_scans", "Scans in progress", metrics.scans.clone());
        registry.register(
            "dlq_scanned_offsets",
            "Offsets read by scans",
            metrics.scanned.clone(),
        );
        registry.register(
            "dlq_job_outcomes",
            "Jobs in pipelines whose newest records are known",
            metrics.job_outcomes.clone(),
        );
        registry.register(
            "dlq_overview_surveys",
            "Surveys for overviews, which all callers share",
            metrics.overview_surveys.clone(),
        );
        registry.register(
            "dlq_overview_watchers",
            "Clients that are watching the overview",
            metrics.overview_watchers.clone(),
        );
        registry.register(
            "dlq_pipeline_audit_as_of_timestamp_seconds",
            "As of when the last complete pass audited the pipeline",
            metrics.audit_as_of.clone(),
        );
        registry.register(
            "dlq_pipeline_audit_defects",
            "Records that the last pass found lost, doubled, early, altered or unknown",
            metrics.audit_defects.clone(),
        );
        for outcome in ["sent", "refused", "failed"] {
            drop(metrics.webhook_requests.get_or_create(&OutcomeLabel { outcome }));
        }
        registry.register(
            "dlq_webhook_requests",
            "Requests to the receiver of problems, by outcome: sent, refused, failed",
            metrics.webhook_requests.clone(),
        );
        registry.register_with_unit(
            "dlq_call",
            "Duration of an API call, to its response or the start of its stream",
            Unit::Seconds,
            metrics.calls.clone(),
        );
        metrics
    }

    pub(crate) fn add_indexed(&self, topic: &str, count: u64) {
        self.indexed.get_or_create(&label(topic)).inc_by(count);
    }

    pub(crate) fn set_lag(&self, topic: &str, lag: u64) {
        self.lag.get_or_create(&label(topic)).set(saturating(lag));
    }

    pub(crate) fn set_open(&self, topic: &str, count: i64) {
        self.open.get_or_create(&label(topic)).set(count);
    }

    /// As [`Metrics::set_open`], unless there were more.
    pub(crate) fn raise_open(&self, topic: &str, count: i64) {
        let open = self.open.get_or_create(&label(topic));
        open.set(open.get().max(count));
    }

    pub(crate) fn set_groups(&self, state: GroupState, count: i64) {
        let state = state.name();
        self.groups.get_or_create(&StateLabel { state }).set(count);
    }

    pub(crate) fn set_redrives(&self, state: &'static str, count: i64) {
        self.redrives.get_or_create(&StateLabel { state }).set(count);
    }

    pub(crate) fn add_redriven(&self, kind: Kind, outcome: &'static str, count: u32) {
        let kind = match kind {
            Kind::Redrive => "redrive",
            Kind::Discard => "discard",
            Kind::Restore => "restore",
        };
        let labels = RedrivenLabels { kind, outcome };
        self.redriven.get_or_create(&labels).inc_by(count.into());
    }

    pub(crate) fn add_removed_entries(&self, count: usize) {
        self.removed_entries.inc_by(count as u64);
    }

    pub(crate) fn add_new_groups(&self, count: u64) {
        self.new_groups.inc_by(count);
    }

    /// Sets when the oldest open dead letter of a topic may be deleted. `None` if there is none, or never.
    pub(crate) fn set_removal(&self, topic: &str, at: Option<Timestamp>) {
        let label = label(topic);
        match at {
            Some(at) => {
                let seconds = at.as_millis().div_euclid(1_000);
                self.removal.get_or_create(&label).set(seconds);
            }
            None => drop(self.removal.remove(&label)),
        }
    }

    /// Sets what the index contains, and contained before. `topics`: the dead-letter topics.
    pub(crate) fn set_completeness<'a>(
        &self,
        completeness: &'a Completeness,
        before: &Completeness,
        topics: impl Iterator<Item = &'a String>,
    ) {
        let missing = completeness.missing_by_topic();
        // A topic that is not missing any more is not in the list.
        let names: BTreeSet<&str> = topics
            .map(String::as_str)
            .chain([ledger::TOPIC])
            .chain(missing.keys().copied())
            .collect();
        for topic in before.missing_by_topic().into_keys() {
            // It was deleted.
            if !names.contains(topic) {
                self.missing.remove(&label(topic));
            }
        }
        for name in names {
            let count = missing.get(name).copied().unwrap_or(0);
            self.missing.get_or_create(&label(name)).set(saturating(count));
        }
        let as_of = completeness.as_of.map_or(0, Timestamp::as_millis);
        self.as_of.set(as_of.div_euclid(1_000));
    }

    pub(crate) fn add_rebuild(&self) {
        self.rebuilds.inc();
    }

    pub(crate) fn add_write_error(&self) {
        self.write_errors.inc();
    }

    /// Counts a fetch of a schema.
    pub(crate) fn add_schema_fetch(&self, outcome: &'static str) {
        self.schema_fetches.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    pub(crate) fn add_audit_failure(&self) {
        self.audit_failures.inc();
    }

    /// Removes the gauges of a topic that was deleted or created again.
    pub(crate) fn forget(&self, topic: &str) {
        let label = label(topic);
        self.lag.remove(&label);
        self.missing.remove(&label);
        self.open.remove(&label);
        self.removal.remove(&label);
    }

    pub(crate) fn set_size(&self, bytes: u64) {
        self.size.set(saturating(bytes));
    }

    pub(crate) fn count_scan(&self) -> ScanGuard {
        self.scans.inc();
        ScanGuard(self.scans.clone())
    }

    pub(crate) fn add_scanned(&self, offsets: u64) {
        self.scanned.inc_by(offsets);
    }

    pub(crate) fn set_job_outcomes(&self, jobs: usize) {
        self.job_outcomes.set(i64::try_from(jobs).unwrap_or(i64::MAX));
    }

    pub(crate) fn add_overview_survey(&self) {
        self.overview_surveys.inc();
    }

    /// Sets what is known about a pipeline.
    pub(crate) fn set_pipeline_audit(&self, pipeline: &str, audit: &v1::PipelineAudit) {
        let label = PipelineLabel {
            pipeline: pipeline.to_owned(),
        };
        if let Some(as_of) = &audit.as_of {
            self.audit_as_of.get_or_create(&label).set(as_of.seconds);
        }
        let defects = audit.defects.iter().map(|defect| defect.count).sum();
        self.audit_defects.get_or_create(&label).set(saturating(defects));
    }

    pub(crate) fn add_webhook_request(&self, outcome: &'static str) {
        self.webhook_requests
            .get_or_create(&OutcomeLabel { outcome })
            .inc();
    }

    pub(crate) fn count_overview_watcher(&self) -> WatcherGuard {
        self.overview_watchers.inc();
        WatcherGuard(self.overview_watchers.clone())
    }

    pub(crate) fn count_watcher(&self) -> WatcherGuard {
        self.watchers.inc();
        WatcherGuard(self.watchers.clone())
    }

    pub(crate) fn observe_call(&self, method: &'static str, started: Instant, code: Code) {
        let labels = CallLabels {
            method,
            code: redeliver_proto::error::code_name(code),
        };
        self.calls
            .get_or_create(&labels)
            .observe(started.elapsed().as_secs_f64());
    }
}

/// Counts a watcher until it is dropped.
pub(crate) struct WatcherGuard(Gauge);

impl Drop for WatcherGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Counts a scan until it is dropped.
pub(crate) struct ScanGuard(Gauge);

impl Drop for ScanGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

fn label(topic: &str) -> TopicLabel {
    TopicLabel {
        topic: topic.to_owned(),
    }
}

fn saturating(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
