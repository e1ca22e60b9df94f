//! The inspector's metrics.

use std::collections::BTreeSet;
use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use redeliver_core::Timestamp;
use redeliver_proto::v1;
use redeliver_runtime::families;
use redeliver_runtime::metrics::with_series;
use redeliver_service::metrics::{OutcomeLabel, PipelineLabel, TopicLabel};
use tonic::Code;

use crate::completeness::Completeness;
use crate::group_states::GroupState;
use crate::ledger;
use crate::redrive::job::Kind;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
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

impl RedrivenLabels {
    fn new(kind: Kind, outcome: &'static str) -> Self {
        let kind = match kind {
            Kind::Redrive => "redrive",
            Kind::Discard => "discard",
            Kind::Restore => "restore",
        };
        Self { kind, outcome }
    }

    fn all() -> impl Iterator<Item = Self> {
        let kinds = [Kind::Redrive, Kind::Discard, Kind::Restore].into_iter();
        kinds.flat_map(|kind| ["done", "failed", "skipped"].map(|outcome| Self::new(kind, outcome)))
    }
}

/// From a single index lookup to a page with values from Kafka.
const CALL_SECONDS: [f64; 13] = [
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0,
];

families! {
    /// The inspector's metrics. Cheap to clone.
    #[derive(Clone)]
    pub(crate) struct Metrics {
        indexed: Family<TopicLabel, Counter> = "dlq_indexed", "Dead letters added to the index";
        lag: Family<TopicLabel, Gauge> = "dlq_index_lag", "Dead letters that are not indexed yet";
        open: Family<TopicLabel, Gauge> = "dlq_open", "Open dead letters: neither redriven nor discarded";
        removal: Family<TopicLabel, Gauge> = "dlq_removal_timestamp_seconds",
            "When Kafka may delete the oldest open dead letter";
        groups: Family<StateLabel, Gauge> = "dlq_groups",
            "Groups with open dead letters, by state: open, resolved, muted, regressed";
        new_groups: Counter = "dlq_groups_first_seen",
            "New open groups, since the index was complete for the first time";
        missing: Family<TopicLabel, Gauge> = "dlq_missing_partitions",
            "Partitions whose dead letters may be missing in answers";
        as_of: Gauge = "dlq_as_of_timestamp_seconds",
            "Up to when the index contains everything that is not missing; 0 until it has caught up";
        rebuilds: Counter = "dlq_index_rebuilds", "Rebuilds of a damaged index";
        write_errors: Counter = "dlq_index_write_errors",
            "Failed attempts to open or write the index; they are repeated";
        redriven: Family<RedrivenLabels, Counter> = "dlq_redrive_items",
            "Dead letters of redrives, discards and restores in this process, by outcome: done, failed, skipped",
            with_series(RedrivenLabels::all());
        redrives: Family<StateLabel, Gauge> = "dlq_redrives",
            "Redrives, discards and restores in progress, by state: planned, running, paused, auto_paused (too many records came back)";
        removed_entries: Counter = "dlq_ledger_entries_removed",
            "Entries removed from the ledger because Kafka has deleted their dead letters";
        audit_failures: Counter = "dlq_audit_failures",
            "Disclosures refused because the audit topic cannot be written";
        schema_fetches: Family<OutcomeLabel, Counter> = "dlq_schema_fetches",
            "Fetches of schemas, by outcome: ok, missing, unusable, refused, unavailable",
            with_series(["ok", "missing", "unusable", "refused", "unavailable"].map(|outcome| OutcomeLabel { outcome }));
        size: Gauge = "dlq_index_size" in Bytes, "Size of the index on disk";
        watchers: Gauge = "dlq_watchers", "Clients that watch dead letters";
        scans: Gauge = "dlq_scans", "Scans in progress";
        scanned: Counter = "dlq_scanned_offsets", "Offsets read by scans";
        job_outcomes: Gauge = "dlq_job_outcomes", "Jobs in pipelines whose newest records are known";
        overview_surveys: Counter = "dlq_overview_surveys", "Surveys for overviews, which all callers share";
        overview_watchers: Gauge = "dlq_overview_watchers", "Clients that are watching the overview";
        audit_as_of: Family<PipelineLabel, Gauge> = "dlq_pipeline_audit_as_of_timestamp_seconds",
            "As of when the last complete pass audited the pipeline";
        audit_defects: Family<PipelineLabel, Gauge> = "dlq_pipeline_audit_defects",
            "Records that the last pass found lost, doubled, early, altered or unknown";
        webhook_requests: Family<OutcomeLabel, Counter> = "dlq_webhook_requests",
            "Requests to the receiver of problems, by outcome: sent, refused, failed",
            with_series(["sent", "refused", "failed"].map(|outcome| OutcomeLabel { outcome }));
        calls: Family<CallLabels, Histogram, fn() -> Histogram> = "dlq_call" in Seconds,
            "Duration of an API call, to its response or the start of its stream",
            Family::new_with_constructor(|| Histogram::new(CALL_SECONDS));
    }
}

impl Metrics {
    pub(crate) fn add_indexed(&self, topic: &str, count: u64) {
        self.indexed.get_or_create(&TopicLabel::new(topic)).inc_by(count);
    }

    pub(crate) fn set_lag(&self, topic: &str, lag: u64) {
        self.lag
            .get_or_create(&TopicLabel::new(topic))
            .set(saturating(lag));
    }

    pub(crate) fn set_open(&self, topic: &str, count: i64) {
        self.open.get_or_create(&TopicLabel::new(topic)).set(count);
    }

    /// As [`Metrics::set_open`], unless there were more.
    pub(crate) fn raise_open(&self, topic: &str, count: i64) {
        let open = self.open.get_or_create(&TopicLabel::new(topic));
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
        let labels = RedrivenLabels::new(kind, outcome);
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
        let label = TopicLabel::new(topic);
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
                self.missing.remove(&TopicLabel::new(topic));
            }
        }
        for name in names {
            let count = missing.get(name).copied().unwrap_or(0);
            self.missing
                .get_or_create(&TopicLabel::new(name))
                .set(saturating(count));
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
        let label = TopicLabel::new(topic);
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
        let label = PipelineLabel::new(pipeline);
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

fn saturating(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
