//! Servers that outlive the program that started them, and process ids that are never reused.
//!
//! Reads `/proc`, so it needs Linux.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};

use crate::eventually::poll_until;

/// A process, named by its number and the moment it started, in the kernel's clock ticks since boot:
/// numbers are reused, and a state file may be older than the process that now has the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    number: u32,
    started: u64,
}

impl ProcessId {
    /// The process that has this number now; `None` when there is none, or it is dead and only waits to
    /// be noticed by its parent.
    pub fn of(number: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let started = start_of_living(&stat)?;
        Some(Self { number, started })
    }

    /// A process that had ended before its start time could be read: it is not running, ever.
    pub(crate) fn ended(number: u32) -> Self {
        Self {
            number,
            started: u64::MAX,
        }
    }

    /// The number by which the system knows it.
    pub fn number(self) -> u32 {
        self.number
    }

    /// Whether it is still running; a stopped process counts as running.
    pub fn is_running(self) -> bool {
        Self::of(self.number) == Some(self)
    }

    /// Sends a signal to it. A process that is gone is an error: a test that kills nothing proves nothing.
    ///
    /// # Errors
    /// If the process is gone or the signal is refused.
    pub(crate) fn signal(self, signal: Signal) -> Result<()> {
        if !self.is_running() {
            bail!("sending {signal:?} to process {}: it is not running", self.number);
        }
        let pid = i32::try_from(self.number).ok().and_then(Pid::from_raw);
        let pid = pid.with_context(|| format!("{} is not a process number", self.number))?;
        kill_process(pid, signal).with_context(|| format!("sending {signal:?} to process {}", self.number))
    }

    /// Kills it without warning (SIGKILL) and waits until it is gone. One that is gone already is fine.
    ///
    /// # Errors
    /// If the signal is refused, or the process is still there after ten seconds.
    pub fn kill_9(self) -> Result<()> {
        if let Err(error) = self.signal(Signal::KILL)
            && self.is_running()
        {
            return Err(error);
        }
        let gone = || if self.is_running() { Err(()) } else { Ok(()) };
        poll_until(Duration::from_secs(10), gone)
            .map_err(|()| anyhow::anyhow!("process {} is still there 10 s after SIGKILL", self.number))
    }
}

/// A server left running on purpose: what one needs to find it and to remove it without a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Daemon {
    /// The server's process.
    pub process: ProcessId,
    /// What clients are given: `host:port` for Kafka, a URL for Redis.
    pub address: String,
    /// Contains only its data and its log.
    pub directory: PathBuf,
}

impl Daemon {
    /// Kills the server and removes its directory.
    ///
    /// # Errors
    /// If it cannot be killed or the directory cannot be removed.
    pub fn remove(&self) -> Result<()> {
        self.process.kill_9()?;
        if self.directory.exists() {
            std::fs::remove_dir_all(&self.directory)
                .with_context(|| format!("removing {}", self.directory.display()))?;
        }
        Ok(())
    }
}

/// The start time in a line of `/proc/PID/stat`, unless the process is a zombie or dead (proc(5)).
fn start_of_living(stat: &str) -> Option<u64> {
    // The second field is the program's name in parentheses and may itself hold spaces and parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X" | "x") {
        return None;
    }
    // The start time is field 22; the state just taken was field 3.
    fields.nth(22 - 4)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_follows_any_program_name() {
        let tail = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 987654 20";
        assert_eq!(start_of_living(&format!("42 (a) b (c) S {tail}")), Some(987_654));
        assert_eq!(start_of_living(&format!("42 (java) Z {tail}")), None);
        assert_eq!(start_of_living("42"), None);
    }

    #[test]
    fn earlier_process_of_number_is_gone() {
        let this = ProcessId::of(std::process::id()).unwrap();
        assert!(this.is_running());
        let previous = ProcessId {
            started: this.started - 1,
            ..this
        };
        assert!(!previous.is_running());
        assert!(
            previous
                .signal(Signal::TERM)
                .unwrap_err()
                .to_string()
                .contains("not running")
        );
    }
}
