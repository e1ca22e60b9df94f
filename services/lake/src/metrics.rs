//! The metrics of the lake.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use redeliver_core::Timestamp;
use redeliver_runtime::families;
use redeliver_service::metrics::TopicLabel;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TableLabel {
    table: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CommitLabels {
    table: &'static str,
    outcome: &'static str,
}

families! {
    /// The metrics. Cheap to clone.
    #[derive(Clone)]
    pub(crate) struct Metrics {
        rows: Family<TableLabel, Counter> = "lake_rows", "Rows appended to tables";
        commits: Family<CommitLabels, Counter> = "lake_commits",
            "Attempts to append rows: committed, conflict (tried again), overtaken by another process, failed";
        last_commit: Family<TableLabel, Gauge> = "lake_last_commit_timestamp" in Seconds,
            "When rows, or only offsets, were last committed to a table";
        lag: Family<TopicLabel, Gauge> = "lake_lag_records",
            "Records of topics that are in no table yet, including transaction markers";
        missing: Family<TopicLabel, Counter> = "lake_missing_records",
            "Records that Kafka had deleted or lost before they were in a table";
        buffered: Gauge = "lake_buffered" in Bytes, "Rows in memory that are in no table yet";
        files: Family<TableLabel, Gauge> = "lake_files", "Files of a table, as of the last maintenance";
        maintenance_failures: Family<TableLabel, Counter> = "lake_maintenance_failures",
            "Tables whose files could not be merged or deleted";
    }
}

/// How a commit ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    Committed,
    /// Somebody else had committed before; it was tried again.
    Conflict,
    /// Another process had written the same partitions.
    Overtaken,
    /// The table could not be read or written, or the outcome is unknown.
    Failed,
}

impl Outcome {
    const fn name(self) -> &'static str {
        match self {
            Self::Committed => "committed",
            Self::Conflict => "conflict",
            Self::Overtaken => "overtaken",
            Self::Failed => "failed",
        }
    }
}

impl Metrics {
    pub(crate) fn committed(&self, table: &'static str, rows: usize, now: Timestamp) {
        self.rows.get_or_create(&TableLabel { table }).inc_by(rows as u64);
        let seconds = now.as_millis().div_euclid(1_000);
        self.last_commit.get_or_create(&TableLabel { table }).set(seconds);
        self.ended(table, Outcome::Committed, 1);
    }

    pub(crate) fn ended(&self, table: &'static str, outcome: Outcome, times: u32) {
        let outcome = outcome.name();
        let counter = self.commits.get_or_create(&CommitLabels { table, outcome });
        counter.inc_by(times.into());
    }

    pub(crate) fn set_lag(&self, topic: &str, records: i64) {
        let label = TopicLabel::new(topic);
        self.lag.get_or_create(&label).set(records);
        // From 0 on, so that the first increase is seen.
        drop(self.missing.get_or_create(&label));
    }

    pub(crate) fn missing(&self, topic: &str, records: i64) {
        let records = u64::try_from(records).unwrap_or(0);
        self.missing
            .get_or_create(&TopicLabel::new(topic))
            .inc_by(records);
    }

    pub(crate) fn forget(&self, topic: &str) {
        self.lag.remove(&TopicLabel::new(topic));
    }

    pub(crate) fn maintained(&self, table: &'static str, files: usize) {
        let files = i64::try_from(files).unwrap_or(i64::MAX);
        self.files.get_or_create(&TableLabel { table }).set(files);
    }

    pub(crate) fn maintenance_failed(&self, table: &'static str) {
        self.maintenance_failures
            .get_or_create(&TableLabel { table })
            .inc();
    }

    pub(crate) fn set_buffered(&self, bytes: usize) {
        self.buffered.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use prometheus_client::registry::Registry;

    use super::*;

    /// The page has the metrics, as docs/watch.md has those of the other services.
    #[test]
    fn page_lists_exactly_exported_metrics() {
        let mut registry = Registry::with_prefix("redeliver");
        let metrics = Metrics::register(&mut registry);
        metrics.committed("attempts", 1, Timestamp::from_millis(0));
        metrics.set_lag("docs-out", 0);
        metrics.maintained("attempts", 1);
        metrics.maintenance_failed("attempts");
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let (mut help, mut rows) = ("", BTreeMap::new());
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                help = rest.split_once(' ').unwrap().1.trim_end_matches('.');
            } else if !line.starts_with('#') {
                let (series, _) = line.rsplit_once(' ').unwrap();
                let (name, labels) = series.split_once('{').unwrap_or((series, ""));
                let labels = labels
                    .split(',')
                    .filter_map(|label| Some(label.split_once('=')?.0));
                let labels = labels.map(|label| format!("{label}, ")).collect::<String>();
                let labels = labels.strip_suffix(", ").unwrap_or_default();
                let labels = if labels.is_empty() {
                    String::new()
                } else {
                    format!("{labels} ")
                };
                rows.insert(name, format!("| `{name}` | {labels}| {help} |"));
            }
        }
        let page = include_str!("../../../docs/lake.md");
        let listed = page.lines().filter(|line| line.starts_with("| `redeliver_lake_"));
        assert_eq!(listed.collect::<Vec<_>>(), rows.into_values().collect::<Vec<_>>());
    }
}
