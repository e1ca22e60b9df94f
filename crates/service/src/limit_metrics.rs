//! Counts what the limits of an API have refused.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use redeliver_runtime::http_server::HttpLimits;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LimitLabel {
    limit: &'static str,
}

/// A counter for each limit. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct LimitMetrics(Family<LimitLabel, Counter>);

impl LimitMetrics {
    /// Registers the counters, of which those of [`Self::http`] and of `more` exist from the beginning.
    pub fn register(registry: &mut Registry, name: &str, help: &str, more: &[&'static str]) -> Self {
        let metrics = Self::default();
        drop(metrics.http());
        for limit in more {
            drop(metrics.of(limit));
        }
        registry.register(name, help, metrics.0.clone());
        metrics
    }

    /// The counter of a limit.
    #[must_use]
    pub fn of(&self, limit: &'static str) -> Counter {
        self.0.get_or_create(&LimitLabel { limit }).clone()
    }

    /// The limits of a server, which count what they refuse.
    #[must_use]
    pub fn http(&self) -> HttpLimits {
        HttpLimits {
            too_many: self.of("connections"),
            slow_bodies: self.of("body_timeout"),
            not_read: self.of("write_timeout"),
            ..HttpLimits::default()
        }
    }
}
