//! Why valid jobs are rejected for now, and which ones are accepted while the index has little or no free memory.
//!
//! A job that is due within the window needs no index. The memory above the high-water mark is reserved for jobs that are
//! due within a minute. Later jobs are rejected, because only the index could hold them until they are due.

use std::time::Duration;

use redeliver_core::{Failure, Timestamp};

use crate::index::MemoryPressure;

/// When a client should send a rejected request again.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(30);

/// Why a valid job is rejected that may be accepted later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RejectedForNow {
    /// The index has no memory for a job with this due time.
    IndexFull,
    /// Too many jobs of the application wait.
    QuotaExceeded,
}

impl RejectedForNow {
    /// The code of the dead letter and of the outcome.
    pub(crate) const fn code(self) -> &'static str {
        match self {
            Self::IndexFull => "scheduler.index-full",
            Self::QuotaExceeded => "scheduler.quota-exceeded",
        }
    }

    /// Reads the code of a failure or, in another process, of an outcome.
    pub(crate) fn of(code: &str) -> Option<Self> {
        let mut all = [Self::IndexFull, Self::QuotaExceeded].into_iter();
        all.find(|rejected| rejected.code() == code)
    }

    pub(crate) fn failure(self, message: String) -> Failure {
        Failure {
            retry_after: Some(RETRY_AFTER),
            ..Failure::permanent(self.code(), message)
        }
    }
}

/// Jobs that are due within this time are accepted as long as the index has any free memory.
const NEAR_DUE: Duration = Duration::from_secs(60);

/// Checks whether a job with this due time may be accepted.
pub(crate) fn check(
    pressure: MemoryPressure,
    due: Timestamp,
    now: Timestamp,
    window: Duration,
) -> Result<(), Failure> {
    let ahead = match pressure {
        MemoryPressure::Low => return Ok(()),
        MemoryPressure::High => window.max(NEAR_DUE),
        MemoryPressure::Full => window,
    };
    if due <= now.after(ahead) {
        return Ok(());
    }
    let (level, jobs) = match pressure {
        MemoryPressure::Full => ("full", "jobs without idempotency keys"),
        MemoryPressure::Low | MemoryPressure::High => ("nearly full", "jobs"),
    };
    let message = format!(
        "Redis is {level}; until it has more free memory, only {jobs} that are due within {} s and can then be dispatched are accepted",
        ahead.as_secs_f64()
    );
    Err(RejectedForNow::IndexFull.failure(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_memory_admits_sooner_jobs() {
        let now = Timestamp::from_millis(0);
        let is_accepted = |pressure, seconds, window| {
            let due = now.after(Duration::from_secs(seconds));
            check(pressure, due, now, Duration::from_secs(window)).is_ok()
        };
        assert!(is_accepted(MemoryPressure::Low, 1_000_000, 10));
        assert!(is_accepted(MemoryPressure::High, 60, 10) && !is_accepted(MemoryPressure::High, 61, 10));
        assert!(is_accepted(MemoryPressure::High, 600, 600));
        assert!(is_accepted(MemoryPressure::Full, 10, 10) && !is_accepted(MemoryPressure::Full, 11, 10));
    }
}
