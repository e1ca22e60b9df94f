//! Repeats calls while the inspector is unavailable.

use std::time::Duration;

use redeliver_client::ClientError;
use redeliver_runtime::error_chain::error_chain;
use tokio::time::Instant;

use crate::output::in_one_line;

/// The waits between attempts to reach an inspector that went away; the last one repeats.
const WAITS: [Duration; 4] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
];

/// The failures since the last success.
pub(super) struct Outage {
    /// How long to repeat without a success; `None`: forever.
    patience: Option<Duration>,
    since: Option<Instant>,
    failures: usize,
    reported: String,
}

impl Outage {
    pub(super) fn new(patience: Option<Duration>) -> Self {
        Self {
            patience,
            since: None,
            failures: 0,
            reported: String::new(),
        }
    }

    /// Waits until the next attempt.
    ///
    /// # Errors
    /// The error, if it is not transient, or if the outage takes too long.
    pub(super) async fn wait(&mut self, error: ClientError) -> Result<(), ClientError> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let is_too_long = self.patience.is_some_and(|patience| since.elapsed() >= patience);
        if !error.is_transient() || is_too_long {
            return Err(error);
        }
        // An inspector that comes back may be a different one, for example with TLS.
        let problem = error_chain(&error);
        if self.failures == 0 || problem != self.reported {
            eprintln!("connection lost; reconnecting: {}", in_one_line(&problem));
            self.reported = problem;
        }
        tokio::time::sleep(WAITS[self.failures.min(WAITS.len() - 1)]).await;
        self.failures += 1;
        Ok(())
    }

    /// Ends the outage, if there is one.
    pub(super) fn ends(&mut self) {
        if self.failures > 0 {
            eprintln!("reconnected");
        }
        self.failures = 0;
        self.since = None;
    }
}
