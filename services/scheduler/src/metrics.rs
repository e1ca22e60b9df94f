//! Metrics of the scheduler: names, units and help in one place.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use redeliver_core::{Clock, Timestamp};
use redeliver_runtime::families;
use redeliver_service::due::{DueFamilies, DueSignal};
use redeliver_service::metrics::{OutcomeLabel, SECONDS};

use crate::shard::Tally;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CodeLabel {
    code: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct BlockedLabel {
    lane: String,
    app: String,
    topic: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct AppLabel {
    lane: String,
    app: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LaneLabel {
    lane: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord, EncodeLabelSet)]
struct GroupLabel {
    group: String,
}

families! {
    #[derive(Clone)]
    struct Families {
        received: Counter = "scheduler_received", "Records read from the ingest topic";
        too_old_timestamps: Counter = "scheduler_too_old_timestamps",
            "Commands with a timestamp older than kafka.topics.retention; their delays count from now";
        commands: Family<OutcomeLabel, Counter> = "scheduler_commands",
            "Commands by outcome: accepted, duplicate, replaced, cancelled, rescheduled, schedule_changed, refused (the job has ended or is unknown, or nothing changes), forwarded to another shard; as dead letters: conflict, rejected, no_room (the index is full), over_quota (max_waiting)";
        occurrences: Family<OutcomeLabel, Counter> = "scheduler_occurrences",
            "Occurrences of recurring schedules: created (a job), skipped (missed, or during a pause), postponed (tried again within a minute)";
        ended: Family<OutcomeLabel, Counter> = "scheduler_jobs_ended",
            "Jobs by outcome: dispatched, expired, dead (their topic is missing or has refused them), or given_up (by an operator)";
        dead_letters: Family<CodeLabel, Counter> = "scheduler_dead_letters",
            "Dead letters by error code, of jobs and of pipelines";
        known_keys: Gauge = "scheduler_idempotency_keys", "Idempotency keys in use (approximate)";
        released_early: Counter = "scheduler_released_early",
            "Long waits of pipelines released early by an operator";
        forgotten: Counter = "scheduler_jobs_forgotten",
            "Ended jobs deleted after scheduler.keep_ended (approximate)";
        lateness: Histogram = "scheduler_lateness_seconds",
            "Time from a job's due time, or from when the rate allowed it, to the commit that dispatched it",
            Histogram::new(SECONDS);
        window_jobs: Family<LaneLabel, Gauge> = "scheduler_window_jobs",
            "Jobs in memory because they are due soon";
        index_lag: Family<LaneLabel, Gauge> = "scheduler_index_behind",
            "Committed changes that are not in the index yet";
        live: Family<LaneLabel, Gauge> = "scheduler_live_shards",
            "Shards that dispatch jobs, because their index is up to date";
        index_memory: Gauge<f64, AtomicU64> = "scheduler_index_memory_share",
            "Share of maxmemory that Redis uses, 0 to 1; 0 without a limit";
        blocked_jobs: Family<BlockedLabel, Gauge> = "scheduler_unavailable_topic_jobs",
            "Due jobs that wait for a missing or unwritable topic (approximate)";
        unavailable_seconds: Family<BlockedLabel, Gauge<f64, AtomicU64>> = "scheduler_unavailable_topic_seconds",
            "Time since which the topic is missing or unwritable";
        rate_limited: Family<AppLabel, Gauge> = "scheduler_rate_limited_jobs",
            "Due jobs that wait for the rate of their application; a lower bound";
        paused: Family<AppLabel, Gauge> = "scheduler_paused_jobs",
            "Due jobs of paused applications (approximate)";
    }
}

/// The metric families, which all lanes of a process share.
pub(crate) struct SchedulerFamilies {
    families: Families,
    due: DueFamilies<GroupLabel>,
}

impl SchedulerFamilies {
    pub(crate) fn register(registry: &mut Registry, clock: Arc<dyn Clock>) -> Self {
        Self {
            families: Families::register(registry),
            due: DueFamilies::register(registry, "scheduler", clock),
        }
    }

    pub(crate) fn of(&self, lane: &str, group: &str) -> SchedulerMetrics {
        let metrics = SchedulerMetrics {
            families: self.families.clone(),
            lane: lane.to_owned(),
            due: self.due.signal(GroupLabel {
                group: group.to_owned(),
            }),
        };
        // All series exist from the start: an alert on the rate of a counter would miss the increment that creates it.
        metrics.count(Tally::default(), Timestamp::from_millis(0));
        metrics.gauges(0, 0, 0);
        metrics
    }
}

/// The metrics of one lane.
pub(crate) struct SchedulerMetrics {
    families: Families,
    lane: String,
    pub(crate) due: DueSignal,
}

impl SchedulerMetrics {
    /// Counts a record of the ingest topic.
    pub(crate) fn received(&self) {
        self.families.received.inc();
    }

    /// The number of keys of one of the shards.
    pub(crate) fn known_keys(&self) -> GaugeShare {
        GaugeShare::new(self.families.known_keys.clone())
    }

    pub(crate) fn count(&self, tally: Tally, now: Timestamp) {
        let families = &self.families;
        let add = |family: &Family<OutcomeLabel, Counter>, outcomes: &[(&'static str, u64)]| {
            for &(outcome, count) in outcomes {
                family.get_or_create(&OutcomeLabel { outcome }).inc_by(count);
            }
        };
        let commands = [
            ("accepted", tally.accepted),
            ("duplicate", tally.duplicates),
            ("conflict", tally.conflicts),
            ("rejected", tally.rejected),
            ("no_room", tally.no_room),
            ("over_quota", tally.over_quota),
            ("forwarded", tally.forwarded),
            ("cancelled", tally.cancelled),
            ("rescheduled", tally.rescheduled),
            ("replaced", tally.replaced),
            ("schedule_changed", tally.schedules_changed),
            ("refused", tally.refused),
        ];
        add(&families.commands, &commands);
        let occurrences = [
            ("created", tally.occurrences),
            ("skipped", tally.skipped_occurrences),
            ("postponed", tally.postponed_occurrences),
        ];
        add(&families.occurrences, &occurrences);
        let ended = [
            ("dispatched", tally.dispatched.len() as u64),
            ("expired", tally.expired),
            ("dead", tally.dead),
            ("given_up", tally.given_up),
        ];
        add(&families.ended, &ended);
        families.too_old_timestamps.inc_by(tally.too_old_timestamps);
        families.released_early.inc_by(tally.released_early);
        families.forgotten.inc_by(tally.forgotten);
        for job in tally.dispatched {
            families.lateness.observe(now.since(job.ready).as_secs_f64());
        }
    }

    /// Counts dead letters with this error code.
    pub(crate) fn dead_letters(&self, code: String, count: u64) {
        let counter = self.families.dead_letters.get_or_create(&CodeLabel { code });
        counter.inc_by(count);
    }

    pub(crate) fn index_memory(&self, share: Option<f64>) {
        self.families.index_memory.set(share.unwrap_or_default());
    }

    /// Sets how many jobs wait for a topic, and for how long it has been missing.
    pub(crate) fn set_blocked(&self, app: &str, topic: &str, jobs: usize, lasting: Duration) {
        let label = BlockedLabel {
            lane: self.lane.clone(),
            app: app.to_owned(),
            topic: topic.to_owned(),
        };
        let families = &self.families;
        families.blocked_jobs.get_or_create(&label).set(number(jobs));
        let seconds = families.unavailable_seconds.get_or_create(&label);
        seconds.set(lasting.as_secs_f64());
    }

    /// Sets the number of jobs that wait for a topic to zero.
    pub(crate) fn clear_blocked(&self, app: &str, topic: &str) {
        self.set_blocked(app, topic, 0, Duration::ZERO);
    }

    /// Sets how many jobs of an application are rate-limited.
    pub(crate) fn set_rate_limited(&self, app: &str, jobs: usize) {
        self.set_jobs(&self.families.rate_limited, app, jobs);
    }

    /// Sets how many jobs wait because their application is paused.
    pub(crate) fn set_paused(&self, app: &str, jobs: usize) {
        self.set_jobs(&self.families.paused, app, jobs);
    }

    fn set_jobs(&self, gauges: &Family<AppLabel, Gauge>, app: &str, jobs: usize) {
        let label = AppLabel {
            lane: self.lane.clone(),
            app: app.to_owned(),
        };
        gauges.get_or_create(&label).set(number(jobs));
    }

    pub(crate) fn gauges(&self, window_jobs: usize, index_lag: usize, live: usize) {
        let label = LaneLabel {
            lane: self.lane.clone(),
        };
        let set = |family: &Family<_, Gauge>, count| family.get_or_create(&label).set(number(count));
        set(&self.families.window_jobs, window_jobs);
        set(&self.families.index_lag, index_lag);
        set(&self.families.live, live);
    }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// One of several parts whose sum a gauge shows. It counts until it is dropped.
#[derive(Debug)]
pub(crate) struct GaugeShare {
    gauge: Gauge,
    value: i64,
}

impl GaugeShare {
    pub(crate) fn new(gauge: Gauge) -> Self {
        Self { gauge, value: 0 }
    }

    pub(crate) fn set(&mut self, value: u64) {
        let value = i64::try_from(value).unwrap_or(i64::MAX);
        self.gauge
            .inc_by(value - std::mem::replace(&mut self.value, value));
    }
}

impl Drop for GaugeShare {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gauge_sums_its_parts() {
        let gauge = Gauge::default();
        let (mut one, mut other) = (GaugeShare::new(gauge.clone()), GaugeShare::new(gauge.clone()));
        one.set(5);
        other.set(7);
        one.set(3);
        assert_eq!(gauge.get(), 10);
        drop(other);
        assert_eq!(gauge.get(), 3);
    }
}
