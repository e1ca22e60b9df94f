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
        let families = &self.families;
        let by_outcome =
            |family: &Family<_, Counter>, outcome| family.get_or_create(&OutcomeLabel { outcome }).clone();
        let command = |outcome| by_outcome(&families.commands, outcome);
        let occurrence = |outcome| by_outcome(&families.occurrences, outcome);
        let ended = |outcome| by_outcome(&families.ended, outcome);
        let label = LaneLabel {
            lane: lane.to_owned(),
        };
        SchedulerMetrics {
            received: families.received.clone(),
            too_old_timestamps: families.too_old_timestamps.clone(),
            accepted: command("accepted"),
            duplicates: command("duplicate"),
            conflicts: command("conflict"),
            rejected: command("rejected"),
            no_room: command("no_room"),
            over_quota: command("over_quota"),
            forwarded: command("forwarded"),
            cancelled: command("cancelled"),
            rescheduled: command("rescheduled"),
            replaced: command("replaced"),
            schedules_changed: command("schedule_changed"),
            occurrences: occurrence("created"),
            skipped_occurrences: occurrence("skipped"),
            postponed_occurrences: occurrence("postponed"),
            refused: command("refused"),
            dispatched: ended("dispatched"),
            expired: ended("expired"),
            dead_letters: families.dead_letters.clone(),
            released_early: families.released_early.clone(),
            forgotten: families.forgotten.clone(),
            known_keys: families.known_keys.clone(),
            lateness: families.lateness.clone(),
            window_jobs: families.window_jobs.get_or_create(&label).clone(),
            index_lag: families.index_lag.get_or_create(&label).clone(),
            live: families.live.get_or_create(&label).clone(),
            index_memory: families.index_memory.clone(),
            dead: ended("dead"),
            given_up: ended("given_up"),
            lane: lane.to_owned(),
            blocked_jobs: families.blocked_jobs.clone(),
            unavailable_seconds: families.unavailable_seconds.clone(),
            rate_limited: families.rate_limited.clone(),
            paused: families.paused.clone(),
            due: self.due.signal(GroupLabel {
                group: group.to_owned(),
            }),
        }
    }
}

/// The metrics of one lane.
pub(crate) struct SchedulerMetrics {
    pub(crate) received: Counter,
    too_old_timestamps: Counter,
    accepted: Counter,
    duplicates: Counter,
    conflicts: Counter,
    rejected: Counter,
    no_room: Counter,
    over_quota: Counter,
    forwarded: Counter,
    cancelled: Counter,
    rescheduled: Counter,
    replaced: Counter,
    schedules_changed: Counter,
    occurrences: Counter,
    skipped_occurrences: Counter,
    postponed_occurrences: Counter,
    refused: Counter,
    dispatched: Counter,
    expired: Counter,
    dead_letters: Family<CodeLabel, Counter>,
    released_early: Counter,
    forgotten: Counter,
    pub(crate) known_keys: Gauge,
    lateness: Histogram,
    window_jobs: Gauge,
    index_lag: Gauge,
    live: Gauge,
    index_memory: Gauge<f64, AtomicU64>,
    dead: Counter,
    given_up: Counter,
    lane: String,
    blocked_jobs: Family<BlockedLabel, Gauge>,
    unavailable_seconds: Family<BlockedLabel, Gauge<f64, AtomicU64>>,
    rate_limited: Family<AppLabel, Gauge>,
    paused: Family<AppLabel, Gauge>,
    pub(crate) due: DueSignal,
}

impl SchedulerMetrics {
    pub(crate) fn count(&self, tally: Tally, now: Timestamp) {
        self.too_old_timestamps.inc_by(tally.too_old_timestamps);
        self.accepted.inc_by(tally.accepted);
        self.duplicates.inc_by(tally.duplicates);
        self.conflicts.inc_by(tally.conflicts);
        self.rejected.inc_by(tally.rejected);
        self.no_room.inc_by(tally.no_room);
        self.over_quota.inc_by(tally.over_quota);
        self.forwarded.inc_by(tally.forwarded);
        self.cancelled.inc_by(tally.cancelled);
        self.rescheduled.inc_by(tally.rescheduled);
        self.replaced.inc_by(tally.replaced);
        self.schedules_changed.inc_by(tally.schedules_changed);
        self.occurrences.inc_by(tally.occurrences);
        self.skipped_occurrences.inc_by(tally.skipped_occurrences);
        self.postponed_occurrences.inc_by(tally.postponed_occurrences);
        self.refused.inc_by(tally.refused);
        self.expired.inc_by(tally.expired);
        self.dead.inc_by(tally.dead);
        self.given_up.inc_by(tally.given_up);
        self.released_early.inc_by(tally.released_early);
        self.forgotten.inc_by(tally.forgotten);
        self.dispatched.inc_by(tally.dispatched.len() as u64);
        for job in tally.dispatched {
            self.lateness.observe(now.since(job.ready).as_secs_f64());
        }
    }

    /// Counts dead letters with this error code.
    pub(crate) fn dead_letters(&self, code: String, count: u64) {
        self.dead_letters.get_or_create(&CodeLabel { code }).inc_by(count);
    }

    pub(crate) fn index_memory(&self, share: Option<f64>) {
        self.index_memory.set(share.unwrap_or_default());
    }

    fn blocked_label(&self, app: &str, topic: &str) -> BlockedLabel {
        BlockedLabel {
            lane: self.lane.clone(),
            app: app.to_owned(),
            topic: topic.to_owned(),
        }
    }

    /// Sets how many jobs wait for a topic, and for how long it has been missing.
    pub(crate) fn set_blocked(&self, app: &str, topic: &str, jobs: usize, lasting: Duration) {
        let label = self.blocked_label(app, topic);
        let jobs = i64::try_from(jobs).unwrap_or(i64::MAX);
        self.blocked_jobs.get_or_create(&label).set(jobs);
        self.unavailable_seconds
            .get_or_create(&label)
            .set(lasting.as_secs_f64());
    }

    /// Sets the number of jobs that wait for a topic to zero.
    pub(crate) fn clear_blocked(&self, app: &str, topic: &str) {
        self.set_blocked(app, topic, 0, Duration::ZERO);
    }

    /// Sets how many jobs of an application are rate-limited.
    pub(crate) fn set_rate_limited(&self, app: &str, jobs: usize) {
        self.set_jobs(&self.rate_limited, app, jobs);
    }

    /// Sets how many jobs wait because their application is paused.
    pub(crate) fn set_paused(&self, app: &str, jobs: usize) {
        self.set_jobs(&self.paused, app, jobs);
    }

    fn set_jobs(&self, gauges: &Family<AppLabel, Gauge>, app: &str, jobs: usize) {
        let label = AppLabel {
            lane: self.lane.clone(),
            app: app.to_owned(),
        };
        let jobs = i64::try_from(jobs).unwrap_or(i64::MAX);
        gauges.get_or_create(&label).set(jobs);
    }

    pub(crate) fn gauges(&self, window_jobs: usize, index_lag: usize, live: usize) {
        let number = |count| i64::try_from(count).unwrap_or(i64::MAX);
        self.window_jobs.set(number(window_jobs));
        self.index_lag.set(number(index_lag));
        self.live.set(number(live));
    }
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
