//! The progress of a long command, in one line on stderr, if it is a terminal.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use tokio::time::Instant;

/// The time between two lines.
const INTERVAL: Duration = Duration::from_millis(100);
/// The width of the bar.
const BAR: u64 = 30;

pub(crate) struct Progress {
    /// What is counted, such as `dead letters`.
    unit: &'static str,
    is_shown: bool,
    /// How many there are, if that is known.
    total: Option<u64>,
    started: Instant,
    drawn: Option<Instant>,
}

impl Progress {
    pub(crate) fn new(unit: &'static str) -> Self {
        Self {
            unit,
            is_shown: std::io::stderr().is_terminal(),
            total: None,
            started: Instant::now(),
            drawn: None,
        }
    }

    /// Whether it is visible.
    pub(crate) fn is_shown(&self) -> bool {
        self.is_shown
    }

    pub(crate) fn set_total(&mut self, total: u64) {
        self.total = Some(total);
    }

    pub(crate) fn draw(&mut self, done: u64) {
        let is_due = self.drawn.is_none_or(|drawn| drawn.elapsed() >= INTERVAL);
        if !self.is_shown || !is_due {
            return;
        }
        self.drawn = Some(Instant::now());
        let mut stderr = std::io::stderr().lock();
        // A command does not fail because its progress cannot be shown.
        let _ = write!(
            stderr,
            "\r\u{1b}[K{}",
            line(self.unit, done, self.total, self.started.elapsed())
        );
        let _ = stderr.flush();
    }

    /// Removes the line, so that another one can be printed.
    pub(crate) fn clear(&mut self) {
        if self.drawn.take().is_some() {
            eprint!("\r\u{1b}[K");
        }
    }
}

fn line(unit: &str, done: u64, total: Option<u64>, elapsed: Duration) -> String {
    let rate = u128::from(done) * 1_000 / elapsed.as_millis().max(1);
    // More can arrive than there were at the start.
    let Some(total) = total.filter(|total| *total > 0).map(|total| total.max(done)) else {
        return format!("{done} {unit}, {rate}/s");
    };
    let share = |of: u64| u64::try_from(u128::from(done) * u128::from(of) / u128::from(total)).unwrap_or(of);
    let bar: String = (0..BAR)
        .map(|cell| if cell < share(BAR) { '#' } else { '.' })
        .collect();
    format!("[{bar}] {:>3} %  {done} of {total} {unit}, {rate}/s", share(100))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_total_makes_a_bar() {
        let line = |done, total| line("dead letters", done, total, Duration::from_secs(2));
        assert_eq!(line(10, None), "10 dead letters, 5/s");
        assert_eq!(line(0, Some(0)), "0 dead letters, 0/s");
        assert_eq!(
            line(10, Some(20)),
            "[###############...............]  50 %  10 of 20 dead letters, 5/s"
        );
        assert_eq!(
            line(30, Some(20)),
            format!("[{}] 100 %  30 of 30 dead letters, 15/s", "#".repeat(30))
        );
    }
}
