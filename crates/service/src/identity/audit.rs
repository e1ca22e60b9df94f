//! Counts refused requests and writes them to the log.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use redeliver_runtime::metrics::with_series;
use redeliver_runtime::watched_files::StaleCredentials;

use super::refusal::{Denied, Reason, Refusal};

/// The maximum number of log lines in [`WINDOW`]: any client can cause refusals.
const MAX_LINES: u64 = 20;
const WINDOW: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

/// Metrics of the authentication of all APIs in a process.
#[derive(Clone, Debug, Default)]
pub struct RefusalMetrics {
    refused: Family<ReasonLabel, Counter>,
    stale: StaleCredentials,
}

impl RefusalMetrics {
    /// Registers the metrics, except `stale`.
    #[must_use]
    pub fn register(registry: &mut Registry, stale: StaleCredentials) -> Self {
        let labels = Reason::ALL.map(|reason| ReasonLabel {
            reason: reason.as_str(),
        });
        let refused = with_series(labels);
        let metrics = Self { refused, stale };
        registry.register(
            "api_requests_refused",
            "Refused requests and ended watches, by reason, such as token_expired and permission_denied",
            metrics.refused.clone(),
        );
        metrics
    }

    fn count(&self, reason: Reason) {
        let reason = reason.as_str();
        self.refused.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(super) fn stale(&self, setting: String) -> Gauge {
        self.stale.of(setting)
    }
}

/// Counts refusals, and writes a bounded number of them to the log.
#[derive(Debug)]
pub(super) struct Audit {
    metrics: RefusalMetrics,
    lines: Mutex<Lines>,
}

impl Audit {
    pub(super) fn new(metrics: RefusalMetrics) -> Self {
        Self {
            metrics,
            lines: Mutex::default(),
        }
    }

    pub(super) fn refused(&self, refusal: &Refusal, operation: &str) {
        self.metrics.count(refusal.reason());
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(suppressed) = lines.next(Instant::now()) else {
            return;
        };
        drop(lines);
        let reason = refusal.reason().as_str();
        match refusal.lacks() {
            Some(denied) => {
                let Denied { identity, scope } = denied;
                tracing::warn!(reason, %identity, %scope, operation, suppressed, "request refused");
            }
            None => {
                tracing::warn!(
                    reason,
                    detail = refusal.message(),
                    operation,
                    suppressed,
                    "request refused"
                );
            }
        }
    }
}

/// Which refusals get a line.
#[derive(Debug, Default)]
struct Lines {
    window: Option<Instant>,
    written: u64,
    suppressed: u64,
}

impl Lines {
    /// The number of refusals without a line before this one; `None` if it gets no line itself.
    fn next(&mut self, now: Instant) -> Option<u64> {
        let is_new = self
            .window
            .is_none_or(|start| now.duration_since(start) >= WINDOW);
        if is_new {
            self.window = Some(now);
            self.written = 0;
        }
        if self.written == MAX_LINES {
            self.suppressed += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_are_bounded() {
        let mut lines = Lines::default();
        let start = Instant::now();
        for _ in 0..MAX_LINES {
            assert_eq!(lines.next(start), Some(0));
        }
        assert_eq!((lines.next(start), lines.next(start)), (None, None));
        assert_eq!(lines.next(start + WINDOW), Some(2));
        assert_eq!(lines.next(start + WINDOW), Some(0));
    }
}
