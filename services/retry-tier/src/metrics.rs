//! Metrics of retry tiers.

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use redeliver_core::Clock;
use redeliver_runtime::families;
use redeliver_service::due::{DueFamilies, DueSignal};
use redeliver_service::metrics::{LaneLabels, ServesLabels, seconds};

families! {
    #[derive(Clone)]
    struct Families {
        released: Family<ServesLabels, Counter> = "tier_released", "Records released when due";
        released_early: Family<ServesLabels, Counter> = "tier_released_early",
            "Records released early by an operator";
        acted: Family<ServesLabels, Counter> = "tier_acted",
            "Single records that an operator has retried, made dead letters or edited";
        paused: Family<ServesLabels, Gauge> = "tier_paused", "1 while the tier is paused, else 0";
        rejected: Family<ServesLabels, Counter> = "tier_rejected",
            "Records that became dead letters: malformed, or too large for their return topic";
        moved: Family<ServesLabels, Counter> = "tier_moved",
            "Records moved to the tier that fits their remaining wait";
        held: Family<LaneLabels, Gauge> = "tier_held", "Waiting records in memory (the look-ahead)";
        lateness: Family<ServesLabels, Histogram, fn() -> Histogram> = "tier_lateness_seconds",
            "Time from a record's due time to the commit that released it",
            Family::new_with_constructor(seconds);
    }
}

/// Metric families of all tiers of a process.
#[derive(Clone)]
pub(crate) struct TierFamilies {
    families: Families,
    due: DueFamilies<ServesLabels>,
}

impl TierFamilies {
    pub(crate) fn register(registry: &mut Registry, clock: Arc<dyn Clock>) -> Self {
        Self {
            families: Families::register(registry),
            due: DueFamilies::register(registry, "tier", clock),
        }
    }

    /// The metrics of one topic of a lane. The gauge has the label `lane`, because each lane sets its own; counters are
    /// shared.
    pub(crate) fn of(&self, lane: &str, label: ServesLabels) -> TierMetrics {
        let families = &self.families;
        TierMetrics {
            released: families.released.get_or_create(&label).clone(),
            released_early: families.released_early.get_or_create(&label).clone(),
            acted: families.acted.get_or_create(&label).clone(),
            paused: families.paused.get_or_create(&label).clone(),
            rejected: families.rejected.get_or_create(&label).clone(),
            moved: families.moved.get_or_create(&label).clone(),
            held: families
                .held
                .get_or_create(&LaneLabels {
                    lane: lane.to_owned(),
                    serves: label.clone(),
                })
                .clone(),
            lateness: families.lateness.get_or_create(&label).clone(),
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
