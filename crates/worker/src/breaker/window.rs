//! How many of the last calls have failed.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::FailureRate;

/// The window moves in steps of this part of its length.
const STEPS: u32 = 10;

/// Counts the calls of a time that ends now.
#[derive(Debug)]
pub(super) struct CallWindow {
    length: Duration,
    /// Oldest first.
    steps: VecDeque<Step>,
}

#[derive(Debug)]
struct Step {
    since: Instant,
    calls: usize,
    failures: usize,
}

impl CallWindow {
    pub(super) fn new(length: Duration) -> Self {
        Self {
            length,
            steps: VecDeque::new(),
        }
    }

    /// Counts a call that ends now.
    pub(super) fn add(&mut self, is_failure: bool, now: Instant) {
        self.steps.retain(|step| now - step.since < self.length);
        let is_current = |step: &&mut Step| now - step.since < self.length / STEPS;
        let failures = usize::from(is_failure);
        match self.steps.back_mut().filter(is_current) {
            Some(step) => {
                step.calls += 1;
                step.failures += failures;
            }
            None => self.steps.push_back(Step {
                since: now,
                calls: 1,
                failures,
            }),
        }
    }

    /// Whether more than the share of the calls failed, if this many others do not. `None` if there are too few of them.
    pub(super) fn exceeds(&self, rate: FailureRate, others: usize, now: Instant) -> Option<bool> {
        let steps = self.steps.iter().filter(|step| now - step.since < self.length);
        let (calls, failed) = steps.fold((0, 0), |(calls, failures), step| {
            (calls + step.calls, failures + step.failures)
        });
        let all = others + calls;
        #[expect(clippy::cast_precision_loss, reason = "numbers of calls in seconds")]
        let is_exceeded = failed as f64 > rate.share * all as f64;
        (all >= rate.calls).then_some(is_exceeded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_before_the_window_expire() {
        let rate = |share, calls| FailureRate {
            share,
            calls,
            window: Duration::from_secs(10),
        };
        let mut window = CallWindow::new(Duration::from_secs(10));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        (0..6).for_each(|second| window.add(true, at(second)));
        assert_eq!(window.exceeds(rate(0.9, 6), 0, at(5)), Some(true));
        assert_eq!(window.exceeds(rate(0.9, 7), 0, at(5)), None);
        (6..12).for_each(|second| window.add(false, at(second)));
        // Those of seconds 2 to 11, of which 4 failed.
        assert_eq!(window.exceeds(rate(0.39, 10), 0, at(11)), Some(true));
        assert_eq!(window.exceeds(rate(0.4, 10), 0, at(11)), Some(false));
        assert_eq!(window.exceeds(rate(0.4, 11), 0, at(11)), None);
        assert_eq!(window.exceeds(rate(0.39, 10), 1, at(11)), Some(false));
        // Also if no other call ends.
        assert_eq!(window.exceeds(rate(0.4, 1), 0, at(15)), Some(false));
        assert_eq!(window.exceeds(rate(0.0, 1), 0, at(30)), None);
        for call in 0..10_000 {
            window.add(call % 2 == 0, at(12) + Duration::from_millis(call));
        }
        assert!(window.steps.len() <= 1 + STEPS as usize);
    }
}
