//! Metrics of retry tiers.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use redeliver_core::HumanDuration;
use redeliver_service::metrics::{LaneLabel, seconds};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TierLabel {
    tier: String,
}

/// Metric families of all tiers of a process.
#[derive(Clone)]
pub(crate) struct TierFamilies {
    released: Family<TierLabel, Counter>,
    rejected: Family<TierLabel, Counter>,
    moved: Family<TierLabel, Counter>,
    held: Family<LaneLabel, Gauge>,
    lateness: Family<TierLabel, Histogram, fn() -> Histogram>,
}

impl TierFamilies {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let families = Self {
            released: Family::default(),
            rejected: Family::default(),
            moved: Family::default(),
            held: Family::default(),
            lateness: Family::new_with_constructor(seconds),
        };
        registry.register(
            "tier_released",
            "Records released when due",
            families.released.clone(),
        );
        registry.register(
            "tier_rejected",
            "Records that became dead letters: malformed, or too large for their return topic",
            families.rejected.clone(),
        );
        registry.register(
            "tier_moved",
            "Records moved to the end of the tier that fits the remaining wait",
            families.moved.clone(),
        );
        registry.register(
            "tier_held",
            "Waiting records in memory, the look-ahead",
            families.held.clone(),
        );
        registry.register(
            "tier_lateness_seconds",
            "Time from a record's due time to the commit that released it",
            families.lateness.clone(),
        );
        families
    }

    /// The metrics of one lane. The gauge has the label `lane`, because each lane sets its own; counters are shared.
    pub(crate) fn of(&self, tier: HumanDuration, lane: &str) -> TierMetrics {
        let label = TierLabel {
            tier: tier.to_string(),
        };
        TierMetrics {
            released: self.released.get_or_create(&label).clone(),
            rejected: self.rejected.get_or_create(&label).clone(),
            moved: self.moved.get_or_create(&label).clone(),
            held: self
                .held
                .get_or_create(&LaneLabel {
                    lane: lane.to_owned(),
                })
                .clone(),
            lateness: self.lateness.get_or_create(&label).clone(),
        }
    }
}

/// The metrics of one lane of a tier.
pub(crate) struct TierMetrics {
    pub(crate) released: Counter,
    pub(crate) rejected: Counter,
    pub(crate) moved: Counter,
    pub(crate) held: Gauge,
    pub(crate) lateness: Histogram,
}
