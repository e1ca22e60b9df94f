//! Metrics of calls.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use redeliver_runtime::families;
use redeliver_service::metrics::{PipelineLabel, seconds};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallLabels {
    pipeline: String,
    status: String,
}

families! {
    /// Metric families of the endpoints of all pipelines of a process.
    #[derive(Clone)]
    pub(super) struct HttpFamilies {
        calls: Family<CallLabels, Counter> = "http_calls",
            "Calls, by status (above 599: other) or error, such as timeout and connect";
        seconds: Family<PipelineLabel, Histogram, fn() -> Histogram> = "http_call_seconds",
            "Duration of a call, to the end of its response", Family::new_with_constructor(seconds);
        quick_retries: Family<PipelineLabel, Counter> = "http_quick_retries",
            "Repeated calls within an attempt; also counted as calls";
    }
}

impl HttpFamilies {
    pub(super) fn of(&self, pipeline: &str) -> CallMetrics {
        let label = PipelineLabel::new(pipeline);
        CallMetrics {
            pipeline: pipeline.to_owned(),
            calls: self.calls.clone(),
            seconds: self.seconds.get_or_create(&label).clone(),
            quick_retries: self.quick_retries.get_or_create(&label).clone(),
        }
    }
}

/// The metrics of one pipeline.
pub(super) struct CallMetrics {
    pipeline: String,
    calls: Family<CallLabels, Counter>,
    seconds: Histogram,
    pub(super) quick_retries: Counter,
}

impl CallMetrics {
    /// Counts a call. `status` is that of the response, or the error.
    pub(super) fn called(&self, status: &str, took: Duration) {
        let labels = CallLabels {
            pipeline: self.pipeline.clone(),
            status: bounded(status).to_owned(),
        };
        self.calls.get_or_create(&labels).inc();
        self.seconds.observe(took.as_secs_f64());
    }
}

/// The label of a status. The endpoint chooses the number, and HTTP permits numbers without a meaning up to 999
/// (RFC 9110, section 15): each of them would be a series.
fn bounded(status: &str) -> &str {
    match status.parse() {
        Ok(0_u16..=599) | Err(_) => status,
        Ok(600..) => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_statuses_share_a_series() {
        let labels = ["200", "599", "600", "999", "timeout"].map(bounded);
        assert_eq!(labels, ["200", "599", "other", "other", "timeout"]);
    }
}
