//! Log lines for failed attempts and dead letters, without flooding the log in an outage.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use redeliver_core::route::Disposition;
use redeliver_core::wait::LogThrottle;
use redeliver_core::{Failure, headers::Origin};

/// Maximum number of error codes that are told apart. Handlers choose codes freely.
const MAX_CODES: usize = 100;
/// Stands for all other codes.
const OTHER_CODES: &str = "other";

/// Logs the first failure of each error code at once, and then at most one line per [`LogThrottle::INTERVAL`] with their
/// number. It logs no messages, which may contain parts of a payload.
pub(crate) struct FailureLog {
    pipeline: Arc<str>,
    kinds: Mutex<HashMap<(bool, String), Kind>>,
}

#[derive(Default)]
struct Kind {
    throttle: LogThrottle,
    /// Since the last line.
    records: u64,
}

impl FailureLog {
    pub(crate) fn new(pipeline: Arc<str>) -> Self {
        Self {
            pipeline,
            kinds: Mutex::default(),
        }
    }

    /// Takes note of a failed attempt or a rejected record.
    pub(crate) fn failed(&self, origin: &Origin, failure: &Failure, disposition: Disposition) {
        let is_dead = matches!(disposition, Disposition::Dead(_));
        let Some((code, records)) = self.count(is_dead, &failure.code) else {
            return;
        };
        let pipeline = &*self.pipeline;
        let class = match disposition {
            Disposition::Dead(class) | Disposition::Waiting { class, .. } => class,
            Disposition::Succeeded => failure.class,
        };
        let (class, latest) = (class.as_str(), origin.id());
        if is_dead {
            tracing::warn!(
                pipeline,
                code,
                class,
                records,
                latest,
                "records failed for good and became dead letters"
            );
        } else {
            tracing::info!(
                pipeline,
                code,
                class,
                records,
                latest,
                "records failed and wait for a retry"
            );
        }
    }

    /// The code and the number of records if it is time for a line.
    fn count(&self, is_dead: bool, code: &str) -> Option<(String, u64)> {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let mut key = (is_dead, code.to_owned());
        if kinds.len() >= MAX_CODES && !kinds.contains_key(&key) {
            key.1 = OTHER_CODES.to_owned();
        }
        let kind = kinds.entry(key.clone()).or_default();
        kind.records += 1;
        let records = kind.records;
        kind.throttle.should_log().then(|| {
            kind.records = 0;
            (key.1, records)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_of_each_code_is_logged_and_codes_without_limit_are_not_told_apart() {
        let log = FailureLog::new("docs".into());
        let one = |code: &str| Some((code.to_owned(), 1));
        assert_eq!(log.count(false, "http.503"), one("http.503"));
        assert_eq!(log.count(false, "http.503"), None);
        assert_eq!(log.count(true, "http.503"), one("http.503"));
        (0..MAX_CODES).for_each(|code| drop(log.count(false, &code.to_string())));
        assert_eq!(log.count(false, "one more"), None, "counted with the others");
        assert!(log.kinds.lock().unwrap().len() <= MAX_CODES + 1);
    }
}
