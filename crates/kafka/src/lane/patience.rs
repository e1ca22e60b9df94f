//! How long a lane waits before it tries again, and how often it says so.

use std::thread;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::ROUND;

/// How long the next attempt to connect, or to write what could not be written, is put off, at most.
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// How long after repeated setbacks a lane that had nothing to write since is taken for a good one.
const SETTLED: Duration = Duration::from_secs(30);

/// Setbacks since the last commit.
pub(super) struct Setbacks {
    pub(super) count: u32,
    last: Option<Instant>,
    backoff: Backoff,
    /// Nothing is tried until then.
    until: Option<Instant>,
    said: LogThrottle,
}

impl Setbacks {
    pub(super) fn new() -> Self {
        Self {
            count: 0,
            last: None,
            backoff: Backoff::new(),
            until: None,
            said: LogThrottle::default(),
        }
    }

    /// Counts one; what comes after another is put off, each for longer. True when it is time to say so.
    pub(super) fn add(&mut self) -> bool {
        let now = Instant::now();
        self.count += 1;
        self.last = Some(now);
        if self.count > 1 {
            self.until = Some(now + self.backoff.next());
        }
        self.said.is_time()
    }

    /// A transaction was committed.
    pub(super) fn end(&mut self) {
        if self.count > 0 {
            self.count = 0;
            self.last = None;
            self.backoff = Backoff::new();
        }
    }

    pub(super) fn is_paused(&mut self) -> bool {
        let is_paused = self.until.is_some_and(|until| Instant::now() < until);
        if !is_paused {
            self.until = None;
        }
        is_paused
    }

    /// Whether there was more than one in a row, of late.
    pub(super) fn repeat(&self) -> bool {
        self.count > 1 && self.last.is_some_and(|last| last.elapsed() < SETTLED)
    }
}

/// Growing pauses that end early when the lane is told to stop.
pub(super) struct Backoff(Duration);

impl Backoff {
    pub(super) fn new() -> Self {
        Self(ROUND)
    }

    pub(super) fn next(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (2 * pause).min(MAX_BACKOFF);
        pause
    }

    pub(super) fn wait(&mut self, stop: &CancellationToken) {
        let until = Instant::now() + self.next();
        while Instant::now() < until && !stop.is_cancelled() {
            thread::park_timeout(ROUND.min(until.saturating_duration_since(Instant::now())));
        }
    }
}

/// One log line per while.
#[derive(Default)]
pub(super) struct LogThrottle(Option<Instant>);

impl LogThrottle {
    pub(super) fn is_time(&mut self) -> bool {
        let now = Instant::now();
        let is_time = self
            .0
            .is_none_or(|last| now.duration_since(last) >= Duration::from_secs(30));
        if is_time {
            self.0 = Some(now);
        }
        is_time
    }
}
