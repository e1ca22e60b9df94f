//! Metrics of the scheduler: names, units and help in one place.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use redeliver_core::Timestamp;
use redeliver_worker::metrics::SECONDS;

use crate::shard::Tally;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct MissedLabel {
    lane: String,
    app: String,
    topic: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LaneLabel {
    lane: String,
}

/// The families that all lanes of a process share.
#[derive(Clone)]
pub(crate) struct SchedulerFamilies {
    received: Counter,
    commands: Family<OutcomeLabel, Counter>,
    ended: Family<OutcomeLabel, Counter>,
    forgotten: Counter,
    lateness: Histogram,
    held: Family<LaneLabel, Gauge>,
    behind: Family<LaneLabel, Gauge>,
    live: Family<LaneLabel, Gauge>,
    index_memory: Gauge<f64, AtomicU64>,
    missed_jobs: Family<MissedLabel, Gauge>,
    missed_seconds: Family<MissedLabel, Gauge<f64, AtomicU64>>,
}

impl SchedulerFamilies {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let families = Self {
            received: Counter::default(),
            commands: Family::default(),
            ended: Family::default(),
            forgotten: Counter::default(),
            lateness: Histogram::new(SECONDS),
            held: Family::default(),
            behind: Family::default(),
            live: Family::default(),
            index_memory: Gauge::default(),
            missed_jobs: Family::default(),
            missed_seconds: Family::default(),
        };
        registry.register(
            "scheduler_received",
            "Records read from the ingest topic",
            families.received.clone(),
        );
        registry.register(
            "scheduler_commands",
            "What became of commands: accepted, duplicate, conflict, rejected, no_room (these three are in the dead-letter topic; the last one because the memory of the index is full), cancelled, rescheduled, refused, forwarded",
            families.commands.clone(),
        );
        registry.register(
            "scheduler_jobs_ended",
            "Jobs that were dispatched, had expired when they would have been, or are dead because their topic does not exist",
            families.ended.clone(),
        );
        registry.register(
            "scheduler_jobs_forgotten",
            "Ended jobs whose memory was over",
            families.forgotten.clone(),
        );
        registry.register(
            "scheduler_lateness_seconds",
            "Time from a job's due time to the commit that dispatched it",
            families.lateness.clone(),
        );
        registry.register(
            "scheduler_window_jobs",
            "Jobs held in memory because they are due soon",
            families.held.clone(),
        );
        registry.register(
            "scheduler_index_behind",
            "Committed changes that the index does not show yet",
            families.behind.clone(),
        );
        registry.register(
            "scheduler_live_shards",
            "Shards whose index was brought up to date and that dispatch",
            families.live.clone(),
        );
        registry.register(
            "scheduler_index_memory_share",
            "How much of its maxmemory Redis uses, 0 to 1; 0 without a limit",
            families.index_memory.clone(),
        );
        registry.register(
            "scheduler_missing_topic_jobs",
            "Due jobs that wait because their topic does not exist, about",
            families.missed_jobs.clone(),
        );
        registry.register(
            "scheduler_missing_topic_seconds",
            "For how long that topic has been missing",
            families.missed_seconds.clone(),
        );
        families
    }

    pub(crate) fn of(&self, lane: &str) -> SchedulerMetrics {
        let command = |outcome| self.commands.get_or_create(&OutcomeLabel { outcome }).clone();
        let ended = |outcome| self.ended.get_or_create(&OutcomeLabel { outcome }).clone();
        let label = LaneLabel {
            lane: lane.to_owned(),
        };
        SchedulerMetrics {
            received: self.received.clone(),
            accepted: command("accepted"),
            duplicates: command("duplicate"),
            conflicts: command("conflict"),
            rejected: command("rejected"),
            no_room: command("no_room"),
            forwarded: command("forwarded"),
            cancelled: command("cancelled"),
            rescheduled: command("rescheduled"),
            refused: command("refused"),
            dispatched: ended("dispatched"),
            expired: ended("expired"),
            forgotten: self.forgotten.clone(),
            lateness: self.lateness.clone(),
            held: self.held.get_or_create(&label).clone(),
            behind: self.behind.get_or_create(&label).clone(),
            live: self.live.get_or_create(&label).clone(),
            index_memory: self.index_memory.clone(),
            dead: ended("dead"),
            lane: lane.to_owned(),
            missed_jobs: self.missed_jobs.clone(),
            missed_seconds: self.missed_seconds.clone(),
        }
    }
}

/// The metrics of one lane.
pub(crate) struct SchedulerMetrics {
    pub(crate) received: Counter,
    accepted: Counter,
    duplicates: Counter,
    conflicts: Counter,
    rejected: Counter,
    no_room: Counter,
    forwarded: Counter,
    cancelled: Counter,
    rescheduled: Counter,
    refused: Counter,
    dispatched: Counter,
    expired: Counter,
    forgotten: Counter,
    lateness: Histogram,
    held: Gauge,
    behind: Gauge,
    live: Gauge,
    index_memory: Gauge<f64, AtomicU64>,
    dead: Counter,
    lane: String,
    missed_jobs: Family<MissedLabel, Gauge>,
    missed_seconds: Family<MissedLabel, Gauge<f64, AtomicU64>>,
}

impl SchedulerMetrics {
    pub(crate) fn count(&self, tally: Tally, now: Timestamp) {
        self.accepted.inc_by(tally.accepted);
        self.duplicates.inc_by(tally.duplicates);
        self.conflicts.inc_by(tally.conflicts);
        self.rejected.inc_by(tally.rejected);
        self.no_room.inc_by(tally.no_room);
        self.forwarded.inc_by(tally.forwarded);
        self.cancelled.inc_by(tally.cancelled);
        self.rescheduled.inc_by(tally.rescheduled);
        self.refused.inc_by(tally.refused);
        self.expired.inc_by(tally.expired);
        self.dead.inc_by(tally.dead);
        self.forgotten.inc_by(tally.forgotten);
        self.dispatched.inc_by(tally.dispatched.len() as u64);
        for due in tally.dispatched {
            self.lateness.observe(now.since(due).as_secs_f64());
        }
    }

    pub(crate) fn index_memory(&self, share: Option<f64>) {
        self.index_memory.set(share.unwrap_or_default());
    }

    fn missed_label(&self, app: &str, topic: &str) -> MissedLabel {
        MissedLabel {
            lane: self.lane.clone(),
            app: app.to_owned(),
            topic: topic.to_owned(),
        }
    }

    /// So many jobs wait for a topic that has been missing for so long.
    pub(crate) fn missed(&self, app: &str, topic: &str, jobs: usize, lasting: Duration) {
        let label = self.missed_label(app, topic);
        let jobs = i64::try_from(jobs).unwrap_or(i64::MAX);
        self.missed_jobs.get_or_create(&label).set(jobs);
        self.missed_seconds
            .get_or_create(&label)
            .set(lasting.as_secs_f64());
    }

    /// None does, or none does any more.
    pub(crate) fn not_missed(&self, app: &str, topic: &str) {
        self.missed(app, topic, 0, Duration::ZERO);
    }

    pub(crate) fn gauges(&self, held: usize, behind: usize, live: usize) {
        let number = |count| i64::try_from(count).unwrap_or(i64::MAX);
        self.held.set(number(held));
        self.behind.set(number(behind));
        self.live.set(number(live));
    }
}
