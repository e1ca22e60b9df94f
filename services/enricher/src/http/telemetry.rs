//! What calls leave in metrics.

use std::sync::Arc;

use redeliver_service::Host;
use tokio::time::Instant;

use super::metrics::{CallMetrics, HttpFamilies};
use super::{CallFailure, CallResult};

/// Observes the calls of a pipeline's endpoint. Cheap to clone.
#[derive(Clone)]
pub(super) struct CallTelemetry(Arc<CallMetrics>);

impl CallTelemetry {
    /// Counts calls in the metrics of this process.
    pub(super) fn of(host: &mut Host, pipeline: &str) -> Self {
        Self::with(&host.metric_families(HttpFamilies::register), pipeline)
    }

    pub(super) fn with(families: &HttpFamilies, pipeline: &str) -> Self {
        Self(Arc::new(families.of(pipeline)))
    }

    /// Observes a call that comes after this many quick retries of the same request.
    pub(super) async fn observe(
        &self,
        quick_retries: u32,
        call: impl Future<Output = Result<CallResult, CallFailure>>,
    ) -> Result<CallResult, CallFailure> {
        if quick_retries > 0 {
            self.0.quick_retries.inc();
        }
        let began = Instant::now();
        let result = call.await;
        self.0.called(&status_of(&result), began.elapsed());
        result
    }
}

impl Default for CallTelemetry {
    /// Nobody sees what it observes.
    fn default() -> Self {
        Self::with(&HttpFamilies::default(), "")
    }
}

/// The status of the response, or the code of the error without its prefix.
fn status_of(result: &Result<CallResult, CallFailure>) -> String {
    match result {
        Ok(result) => result.status.to_string(),
        Err(failed) => {
            let code = &failed.failure.code;
            code.strip_prefix("http.").unwrap_or(code).to_owned()
        }
    }
}

#[cfg(test)]
mod tests;
