//! Metrics of retry tiers.

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use redeliver_core::Clock;
use redeliver_service::due::{DueFamilies, DueSignal};
use redeliver_service::metrics::{LaneLabels, ServesLabels, seconds};

/// Metric families of all tiers of a process.
#[derive(Clone)]
pub(crate) struct TierFamilies {
    released: Family<ServesLabels, Counter>,
    released_early: Family<ServesLabels, Counter>,
    acted: Family<ServesLabels, Counter>,
    paused: Family<ServesLabels, Gauge>,
    rejected: Family<ServesLabels, Counter>,
    moved: Family<ServesLabels, Counter>,
    held: Family<LaneLabels, Gauge>,
    lateness: Family<ServesLabels, Histogram, fn() -> Histogram>,
    due: DueFamilies<ServesLabels>,
}

impl TierFamilies {
    pub(crate) fn register(registry: &mut Registry, clock: Arc<dyn Clock>) -> Self {
        let families = Self {
            released: Family::default(),
            released_early: Family::default(),
            acted: Family::default(),
            paused: Family::default(),
            rejected: Family::default(),
            moved: Family::default(),
            held: Family::default(),
            lateness: Family::new_with_constructor(seconds),
            due: DueFamilies::register(registry, "tier", clock),
        };
        registry.register(
            "tier_released",
            "Records released when due",
            families.released.clone(),
        );
        registry.register(
            "tier_released_early",
            "Records released early by an operator",
            families.released_early.clone(),
        );
        registry.register(
            "tier_acted",
            "Single records that an operator has retried, made dead letters or edited",
            families.acted.clone(),
        );
        registry.register(
            "tier_paused",
            "1 while the tier is paused, else 0",
            families.paused.clone(),
        );
        registry.register(
            "tier_rejected",
            "Records that became dead letters: malformed, or too large for their return topic",
            families.rejected.clone(),
        );
        registry.register(
            "tier_moved",
            "Records moved to the tier that fits their remaining wait",
            families.moved.clone(),
        );
        registry.register(
            "tier_held",
            "Waiting records in memory (the look-ahead)",
            families.held.clone(),
        );
        registry.register(
            "tier_lateness_seconds",
            "Time from a record's due time to the commit that released it",
            families.lateness.clone(),
        );
        families
    }

    /// The metrics of one topic of a lane. The gauge has the label `lane`, because each lane sets its own; counters are
    /// shared.
    pub(crate) fn of(&self, lane: &str, label: ServesLabels) -> TierMetrics {
        TierMetrics {
            released: self.released.get_or_create(&label).clone(),
            released_early: self.released_early.get_or_create(&label).clone(),
            acted: self.acted.get_or_create(&label).clone(),
            paused: self.paused.get_or_create(&label).clone(),
            rejected: self.rejected.get_or_create(&label).clone(),
            moved: self.moved.get_or_create(&label).clone(),
            held: self
                .held
                .get_or_create(&LaneLabels {
                    lane: lane.to_owned(),
                    serves: label.clone(),
                })
                .clone(),
            lateness: self.lateness.get_or_create(&label).clone(),
            due: self.due.signal(label),
        }
    }
}

/// The metrics of one topic of a tier's lane.
#[derive(Debug)]
pub(crate) struct TierMetrics {
    pub(crate) released: Counter,
    pub(crate) released_early: Counter,
    pub(crate) acted: Counter,
    pub(crate) paused: Gauge,
    pub(crate) rejected: Counter,
    pub(crate) moved: Counter,
    pub(crate) held: Gauge,
    pub(crate) lateness: Histogram,
    pub(crate) due: DueSignal,
}

impl TierMetrics {
    /// Reports how many records of the topic are in memory.
    pub(crate) fn report_held(&self, held: usize) {
        self.held.set(i64::try_from(held).unwrap_or(i64::MAX));
    }
}
