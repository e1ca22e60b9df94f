//! Log lines for failed attempts and dead letters, without flooding the log in an outage.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use redeliver_core::anchor::UnusableAnchor;
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
    anchors: Mutex<Kind>,
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
            anchors: Mutex::default(),
        }
    }

    /// Takes note of a failed attempt or a rejected record.
    pub(crate) fn failed(&self, origin: &Origin, failure: &Failure, disposition: Disposition) {
        if let Disposition::Waiting {
            unusable_anchor: Some(problem),
            ..
        } = disposition
        {
            self.without_anchor(origin, problem);
        }
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

    fn without_anchor(&self, origin: &Origin, problem: UnusableAnchor) {
        let mut anchors = self.anchors.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(records) = anchors.count() else { return };
        tracing::warn!(
            pipeline = &*self.pipeline,
            records,
            latest = origin.id(),
            %problem,
            "records have no usable anchor, so their first retry counts from the failure"
        );
    }

    /// The code and the number of records if it is time for a line.
    fn count(&self, is_dead: bool, code: &str) -> Option<(String, u64)> {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let mut key = (is_dead, code.to_owned());
        if kinds.len() >= MAX_CODES && !kinds.contains_key(&key) {
            key.1 = OTHER_CODES.to_owned();
        }
        let records = kinds.entry(key.clone()).or_default().count()?;
        Some((key.1, records))
    }
}

impl Kind {
    /// Counts a record. Returns the number of records if it is time for a line.
    fn count(&mut self) -> Option<u64> {
        self.records += 1;
        self.throttle
            .should_log()
            .then(|| std::mem::take(&mut self.records))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_failure_of_code_is_logged() {
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
