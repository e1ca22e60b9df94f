//! The rate of requests of each caller.
//!
//! A caller has a burst of as many requests as it may send per second. Each request takes one, also an invalid one, before its body
//! is read, and time gives them back (the generic cell rate algorithm, GCRA). A batch takes as many as it has jobs. If these are
//! more than a burst, it needs the whole burst, and the caller owes the others: it has to wait for them before its next request. So
//! every batch can be sent, and no caller exceeds its rate for long. The crate `governor` refuses what is more than a burst for ever.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::Body;
use axum::http::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use prometheus_client::metrics::counter::Counter;
use redeliver_service::grpc::is_grpc;
use redeliver_service::identity::Identity;
use redeliver_service::limit_metrics::LimitMetrics;

use super::error::RequestError;
use super::problem::Problem;

/// The time in which a caller gets a burst back.
const SECOND: Duration = Duration::from_secs(1);
/// The maximum size of the body of a refused request that is read, in bytes.
const SMALL_BODY: usize = 64 << 10;
/// The number of callers from which on those with a whole burst are forgotten.
const MANY_CALLERS: usize = 10_000;

/// Limits the rate of requests of each caller. Clones share their state.
#[derive(Clone)]
pub(crate) struct CallerRates(Option<Arc<Rates>>);

struct Rates {
    per_second: u32,
    callers: Mutex<Callers>,
    refused: Counter,
}

/// The requests of the callers.
#[derive(Default)]
struct Callers {
    /// When each caller has its whole burst again, if it sends no more requests.
    whole_at: HashMap<String, Instant>,
    /// The number of callers from which on some are forgotten.
    many: usize,
}

impl CallerRates {
    /// `None`: no limit.
    pub(crate) fn new(per_second: Option<u32>, metrics: &LimitMetrics) -> Self {
        Self(per_second.map(|per_second| {
            Arc::new(Rates {
                per_second,
                callers: Mutex::default(),
                refused: metrics.of("rate"),
            })
        }))
    }

    /// Counts the jobs of a batch of `caller`, of which one was counted as the request.
    ///
    /// # Errors
    /// How long the caller has to wait before it sends the batch again.
    pub(crate) fn take_batch(&self, caller: &Identity, jobs: usize) -> Result<(), Duration> {
        let jobs = u64::try_from(jobs).unwrap_or(u64::MAX);
        self.take(caller, jobs.saturating_sub(1), 1)
    }

    fn take(&self, caller: &Identity, requests: u64, before: u64) -> Result<(), Duration> {
        let Some(rates) = &self.0 else { return Ok(()) };
        let mut callers = rates.callers.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = callers.take(
            caller.name().as_str(),
            requests,
            before,
            rates.per_second,
            Instant::now(),
        );
        taken.inspect_err(|_| {
            rates.refused.inc();
        })
    }
}

/// The time in which a caller gets this many requests.
fn time_of(requests: u64, per_second: u32) -> Duration {
    let nanos = u128::from(requests) * 1_000_000_000 / u128::from(per_second.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Callers {
    /// Takes note of a number of requests, or of none of them. They are part of a request of which `before` were taken just now.
    fn take(
        &mut self,
        caller: &str,
        requests: u64,
        before: u64,
        per_second: u32,
        now: Instant,
    ) -> Result<(), Duration> {
        let whole_at = self.whole_at.get(caller).map_or(now, |at| (*at).max(now));
        let needed = requests.min(u64::from(per_second).saturating_sub(before));
        let wait = (whole_at + time_of(needed, per_second)).saturating_duration_since(now + SECOND);
        if !wait.is_zero() {
            // All of the request is sent again.
            return Err(wait + time_of(before, per_second));
        }
        let whole_at = whole_at + time_of(requests, per_second);
        match self.whole_at.get_mut(caller) {
            Some(at) => *at = whole_at,
            None => drop(self.whole_at.insert(caller.to_owned(), whole_at)),
        }
        if self.whole_at.len() > self.many.max(MANY_CALLERS) {
            self.whole_at.retain(|_, at| *at > now);
            // If most of them stay, looking again soon would cost much and gain little.
            self.many = 2 * self.whole_at.len();
        }
        Ok(())
    }
}

/// Counts a request of the caller that a layer outside of this one has authenticated.
pub(crate) async fn limit_rate(
    rates: CallerRates,
    Extension(caller): Extension<Identity>,
    request: Request<Body>,
    next: Next,
) -> Response {
    let Err(wait) = rates.take(&caller, 1, 0) else {
        return next.run(request).await;
    };
    let is_grpc = is_grpc(request.headers());
    let error = RequestError::RateLimited(wait);
    // Otherwise, a refusal would close a connection of HTTP/1.1.
    drop(axum::body::to_bytes(request.into_body(), SMALL_BODY).await);
    if is_grpc {
        return error.into_status().into_http();
    }
    Problem::from(error).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends requests with these numbers of jobs, at these times in milliseconds, with 10 requests per second. Returns how long
    /// the caller of each one has to wait, in milliseconds.
    fn waits(requests: &[(u64, u64)]) -> Vec<u64> {
        let (mut callers, start) = (Callers::default(), Instant::now());
        let mut take = |at: u64, jobs: u64| {
            let now = start + Duration::from_millis(at);
            callers.take("a", 1, 0, 10, now)?;
            callers.take("a", jobs - 1, 1, 10, now)
        };
        let wait = |(at, jobs): &(u64, u64)| match take(*at, *jobs) {
            Ok(()) => 0,
            Err(wait) => u64::try_from(wait.as_millis()).unwrap(),
        };
        requests.iter().map(wait).collect()
    }

    #[test]
    fn rate_holds_after_a_burst() {
        let burst = [(0, 1); 10];
        assert_eq!(waits(&burst), [0; 10]);
        assert_eq!(
            waits(&[&burst[..], &[(0, 1), (99, 1), (100, 1), (100, 1)]].concat())[10..],
            [100, 1, 0, 100]
        );
        assert_eq!(waits(&[(0, 10), (0, 1), (100, 1)]), [0, 100, 0]);
        // After a pause there is a burst again, and no more.
        assert_eq!(waits(&[(0, 10), (60_000, 10), (60_000, 1)]), [0, 0, 100]);
    }

    #[test]
    fn all_jobs_of_large_batches_count() {
        assert_eq!(
            waits(&[(0, 1_000), (0, 1), (99_000, 1), (99_100, 1)]),
            [0, 99_100, 100, 0]
        );
        // It needs the whole burst. The attempt counts as a request, and the next one at the time that it was told is accepted.
        assert_eq!(waits(&[(0, 1), (0, 1_000), (200, 1_000)]), [0, 200, 0]);
        assert_eq!(waits(&[(0, 1), (0, 1_000), (199, 1_000)])[2], 101);
        assert_eq!(waits(&[(0, 6), (0, 5), (200, 5)]), [0, 200, 0]);
    }

    #[test]
    fn lowest_rate_permits_batches() {
        let (mut callers, now) = (Callers::default(), Instant::now());
        assert_eq!(callers.take("a", 1, 0, 1, now), Ok(()));
        assert_eq!(callers.take("a", 999, 1, 1, now), Ok(()));
        assert_eq!(callers.take("a", 1, 0, 1, now), Err(Duration::from_secs(1_000)));
        assert_eq!(callers.take("b", 1, 0, 1, now), Ok(()));
    }

    #[test]
    fn inactive_callers_are_forgotten() {
        let (mut callers, start) = (Callers::default(), Instant::now());
        for number in 0..=MANY_CALLERS {
            callers.take(&number.to_string(), 1, 0, 10, start).unwrap();
        }
        assert_eq!(callers.whole_at.len(), MANY_CALLERS + 1);
        // Those that are active at the same time are not looked at again before there are twice as many.
        let later = start + SECOND;
        for number in 0..MANY_CALLERS + 2 {
            callers.take(&format!("later {number}"), 1, 0, 10, later).unwrap();
        }
        assert_eq!(callers.whole_at.len(), MANY_CALLERS + 2);
    }
}
