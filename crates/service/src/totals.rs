//! What a process has done since its start: one line of the log when it ends. The numbers are those of its metrics.

use std::sync::PoisonError;
use std::time::Duration;

use prometheus_client::encoding::text;
use redeliver_core::error_chain::error_chain;
use redeliver_runtime::metrics::SharedRegistry;

/// Logs the totals. A number of a metric that this process does not have is left out.
pub(crate) fn log(service: &str, uptime: Duration, registry: &SharedRegistry) {
    let mut page = String::new();
    let encoded = {
        let registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
        text::encode(&mut page, &registry)
    };
    if let Err(error) = encoded {
        tracing::warn!(
            error = error_chain(&error),
            "cannot read the totals of this process"
        );
        return;
    }
    let of = |metric: &str| total(&page, metric, "");
    let commands = |outcome: &str| total(&page, "scheduler_commands_total", outcome);
    let ended = |outcome: &str| total(&page, "scheduler_jobs_ended_total", outcome);
    tracing::info!(
        service,
        uptime_seconds = uptime.as_secs(),
        // Lanes.
        completed = of("lane_completed_total"),
        written = of("lane_outputs_total"),
        transactions = of("lane_transactions_total"),
        failed_transactions = of("lane_setbacks_total"),
        // Workers.
        succeeded = of("worker_succeeded_total"),
        retried = of("worker_retried_total"),
        dead = sum([of("worker_dead_total"), ended("dead"), ended("given_up")]),
        long_waits = of("worker_long_waits_total"),
        forgotten = of("worker_forgotten_total"),
        breaker_openings = of("worker_breaker_openings_total"),
        // Retry tiers.
        released = of("tier_released_total"),
        moved = of("tier_moved_total"),
        // Retry tiers and the scheduler: these became dead letters at once.
        rejected = sum([
            of("tier_rejected_total"),
            commands("conflict"),
            commands("rejected"),
            commands("no_room"),
            commands("over_quota"),
        ]),
        // The scheduler.
        received = of("scheduler_received_total"),
        accepted = commands("accepted"),
        duplicate = commands("duplicate"),
        cancelled = commands("cancelled"),
        rescheduled = commands("rescheduled"),
        replaced = commands("replaced"),
        dispatched = ended("dispatched"),
        expired = ended("expired"),
        // The inspector.
        indexed = of("dlq_indexed_total"),
        calls = of("dlq_call_seconds_count"),
        "totals since the start"
    );
}

/// The sum of the series of a metric on a page in the text format; with an outcome, of those with this label `outcome`.
/// `None` if there are none.
fn total(page: &str, metric: &str, outcome: &str) -> Option<u64> {
    let label = format!("outcome=\"{outcome}\"");
    let values = page.lines().filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let series = series.strip_prefix("redeliver_")?.strip_prefix(metric)?;
        // Otherwise the name of a metric was only a part of another one.
        let is_whole = series.is_empty() || series.starts_with('{');
        let is_wanted = is_whole && (outcome.is_empty() || series.contains(&label));
        is_wanted.then(|| value.parse::<u64>().ok())?
    });
    sum(values.map(Some))
}

/// The sum of the numbers that exist, or `None` if none does.
fn sum(values: impl IntoIterator<Item = Option<u64>>) -> Option<u64> {
    values.into_iter().flatten().reduce(|sum, value| sum + value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed() {
        let page = "# HELP redeliver_dead_total 7\nredeliver_dead_total{class=\"a b\"} 3\n\
                    redeliver_dead_total{class=\"c\"} 4\nredeliver_dead_total_more 50\nredeliver_idle_total 0\n\
                    redeliver_jobs{outcome=\"ended\"} 1\nredeliver_jobs{outcome=\"cancelled\"} 2\n";
        assert_eq!(total(page, "dead_total", ""), Some(7));
        assert_eq!(total(page, "idle_total", ""), Some(0));
        assert_eq!(total(page, "other_total", ""), None);
        assert_eq!(total(page, "jobs", "cancelled"), Some(2));
        assert_eq!(total(page, "jobs", "unknown"), None);
    }
}
