//! Figures: a JSON line for each one as it is measured, and a Markdown table at the end.

use std::fmt;
use std::time::Duration;

use redeliver_core::{Clock, SystemClock, Timestamp};

/// Collects the rows of the table.
#[derive(Default)]
pub(crate) struct Figures(Vec<(String, String)>);

impl Figures {
    /// Adds a figure. The value includes its unit.
    pub(crate) fn add(&mut self, name: impl fmt::Display, value: impl fmt::Display) {
        let (name, value) = (name.to_string(), value.to_string());
        println!("{}", serde_json::json!({ "figure": name, "value": value }));
        self.0.push((name, value));
    }

    pub(crate) fn table(&self) -> String {
        let rows = self
            .0
            .iter()
            .map(|(name, value)| format!("| {name} | {value} |\n"));
        format!("\n| figure | value |\n|---|---|\n{}", rows.collect::<String>())
    }
}

/// Records per second.
pub(crate) fn rate(count: usize, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64()
}

pub(crate) fn per_second(rate: f64) -> String {
    format!("{rate:.0}/s")
}

pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Minimum, percentiles and maximum in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Distribution {
    values: [f64; 5],
    count: usize,
}

impl Distribution {
    /// The distribution of values in milliseconds.
    pub(crate) fn of(mut millis: Vec<f64>) -> Self {
        if millis.is_empty() {
            return Self::default();
        }
        millis.sort_by(f64::total_cmp);
        let at = |quantile: f64| millis[((millis.len() - 1) as f64 * quantile) as usize];
        Self {
            values: [0.0, 0.5, 0.99, 0.999, 1.0].map(at),
            count: millis.len(),
        }
    }

    /// The median of each figure.
    pub(crate) fn median(rounds: &[Self]) -> Self {
        if rounds.is_empty() {
            return Self::default();
        }
        let of = |index: usize| median(&rounds.iter().map(|round| round.values[index]).collect::<Vec<_>>());
        Self {
            values: std::array::from_fn(of),
            count: rounds.iter().map(|round| round.count).sum(),
        }
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.count == 0 {
            return f.write_str("nothing measured");
        }
        let [min, p50, p99, p999, max] = self.values;
        write!(
            f,
            "min {min:.1}, p50 {p50:.1}, p99 {p99:.1}, p99.9 {p999:.1}, max {max:.1} ms ({} records)",
            self.count
        )
    }
}

/// Processor time of this process so far: user and system, all threads.
pub(crate) fn cpu_time() -> Duration {
    cpu_time_of("self")
}

/// Processor time of a process so far.
pub(crate) fn cpu_time_of(process: &str) -> Duration {
    // A clock tick of /proc is 10 ms on all common Linux systems (`getconf CLK_TCK` is 100).
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    // The fields after the name: state, ppid, pgrp, session, tty, tpgid, flags, minflt, cminflt, majflt, cmajflt, utime, stime.
    let ticks_of = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
    let ticks = ticks_of(11).unwrap_or(0) + ticks_of(12).unwrap_or(0);
    Duration::from_millis(ticks * 10)
}

/// Milliseconds since `due`, with their fraction; negative if `due` is in the future.
pub(crate) fn millis_since(due: Timestamp) -> f64 {
    let remaining = SystemClock.until(due);
    if !remaining.is_zero() {
        return -remaining.as_secs_f64() * 1000.0;
    }
    // Only the time until a future instant has fractions of a millisecond, so this measures from one.
    let later = due.after(Duration::from_secs(3600));
    3_600_000.0 - SystemClock.until(later).as_secs_f64() * 1000.0
}
