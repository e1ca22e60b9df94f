//! One of our services under one name: killed, frozen, shut down and started again.
//!
//! It counts the faults of the process, since a run that killed nothing proves nothing. The output of every
//! run is shown if the test fails.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::process::{Command, ExitStatus};
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::process::Process;
use crate::{DEADLINE, eventually, http, until_seen};

/// A named process that can be started again after its end. It is killed when it is dropped.
pub struct ServiceProcess {
    name: String,
    /// Only the last one may be running. Before the command, which keeps the topics and the directory of the test: they are removed after
    /// the process has ended.
    runs: Vec<Process>,
    command: Box<dyn Fn() -> Command + Send>,
    kills: u32,
    kills_when_ready: u32,
    crashes: u32,
    shutdowns: u32,
    freezes: u32,
    /// From the end of a run until the next one was ready.
    restart_times: Vec<Duration>,
    ended_at: Option<Instant>,
    created_at: Instant,
}

impl ServiceProcess {
    /// Starts a process.
    ///
    /// # Panics
    /// If the process cannot be started.
    #[track_caller]
    pub fn spawn(name: impl Into<String>, command: impl Fn() -> Command + Send + 'static) -> Self {
        let mut process = Self {
            name: name.into(),
            command: Box::new(command),
            runs: Vec::new(),
            kills: 0,
            kills_when_ready: 0,
            crashes: 0,
            shutdowns: 0,
            freezes: 0,
            restart_times: Vec::new(),
            ended_at: None,
            created_at: Instant::now(),
        };
        process.start_again();
        process
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Kills the process without warning. It must be running.
    #[track_caller]
    pub fn kill_9(&mut self) {
        let was_ready = self.was_ready();
        self.process().kill_9();
        self.kills += 1;
        self.kills_when_ready += u32::from(was_ready);
        self.ended("killed", was_ready);
    }

    /// Shuts the process down gracefully. It must exit with status 0.
    #[track_caller]
    pub fn shut_down(&mut self) {
        let was_ready = self.was_ready();
        self.process().terminate();
        let status = self.wait(DEADLINE);
        assert_eq!(status.code(), Some(0), "{}", self.output());
        self.shutdowns += 1;
        self.ended("shut down", was_ready);
    }

    /// Waits until a signal that the process sends itself has ended it; see [`ServiceProcess::start_again_with`].
    #[track_caller]
    pub fn until_crashed(&mut self) {
        let was_ready = self.was_ready();
        let status = self.wait(DEADLINE);
        assert_eq!(
            status.code(),
            None,
            "{} ended with {status}:\n{}",
            self.name,
            self.output()
        );
        self.crashes += 1;
        self.ended("crashed", was_ready);
    }

    /// Starts the process again under its name.
    #[track_caller]
    pub fn start_again(&mut self) {
        self.start_again_with(&[]);
    }

    /// As [`ServiceProcess::start_again`], with environment variables for this run.
    ///
    /// # Panics
    /// If the process is running.
    #[track_caller]
    pub fn start_again_with(&mut self, environment: &[(&str, &str)]) {
        let mut command = (self.command)();
        command.envs(environment.iter().copied());
        assert!(!self.is_running(), "{} is already running", self.name);
        let process = Process::spawn(command).unwrap_or_else(|error| panic!("{}: {error:#}", self.name));
        self.runs.push(process);
    }

    /// Kills the process, starts it again, and waits until it is ready.
    #[track_caller]
    pub fn kill_and_restart(&mut self) {
        self.kill_9();
        self.start_again();
        self.until_ready();
    }

    /// Shuts the process down, starts it again, and waits until it is ready.
    #[track_caller]
    pub fn restart(&mut self) {
        self.shut_down();
        self.start_again();
        self.until_ready();
    }

    /// Freezes the process.
    #[track_caller]
    pub fn freeze(&mut self) {
        self.process().stop();
        self.freezes += 1;
        self.note("frozen");
    }

    /// Lets a frozen process continue.
    #[track_caller]
    pub fn thaw(&mut self) {
        self.process().cont();
        self.note("thawed");
    }

    /// Waits until the process has ended.
    #[track_caller]
    pub fn wait(&mut self, timeout: Duration) -> ExitStatus {
        self.process().wait(timeout)
    }

    /// Waits until the output of this run contains a text, and returns the output so far.
    #[track_caller]
    pub fn wait_for_output(&mut self, text: &str, timeout: Duration) -> String {
        self.process().wait_for_output(text, timeout)
    }

    /// The word after `prefix` in the output of this run, once the process has printed it.
    #[track_caller]
    pub fn word_after(&mut self, prefix: &str) -> String {
        let output = self.wait_for_output(prefix, DEADLINE);
        let rest = output.split(prefix).nth(1).unwrap_or_default();
        rest.split_whitespace().next().unwrap_or_default().to_owned()
    }

    /// The address of the admin listener, once the process has printed it.
    ///
    /// # Panics
    /// If the output contains something else in its place.
    #[track_caller]
    pub fn admin(&mut self) -> SocketAddr {
        let address = self.word_after(" admin=");
        address
            .parse()
            .unwrap_or_else(|error| panic!("{}: admin={address}: {error}", self.name))
    }

    /// The status and the body of a page of the admin listener.
    ///
    /// # Panics
    /// If there is no response.
    #[track_caller]
    pub fn get(&mut self, path: &str) -> (u16, String) {
        http::get(self.admin(), path).unwrap_or_else(|error| panic!("{}: {path}: {error}", self.name))
    }

    /// Waits until `/readyz` reports that the process is ready.
    #[track_caller]
    pub fn until_ready(&mut self) {
        self.until_readyz("it is ready", |status, _| status == 200);
        if let Some(ended_at) = self.ended_at.take() {
            self.restart_times.push(ended_at.elapsed());
        }
        self.note("ready");
    }

    /// Waits until `/readyz` reports that the process is not ready, with `reason` in the report.
    #[track_caller]
    pub fn until_not_ready(&mut self, reason: &str) {
        let condition = format!("it is not ready because of {reason:?}");
        let report = self.until_readyz(&condition, |status, body| status == 503 && body.contains(reason));
        self.note(&format!("not ready: {report}"));
    }

    /// Waits until `/readyz` reports that the process is ready, with `note` in the report.
    #[track_caller]
    pub fn until_ready_but(&mut self, note: &str) {
        let condition = format!("it is ready, but {note:?}");
        self.until_readyz(&condition, |status, body| status == 200 && body.contains(note));
    }

    /// Waits until `/readyz` returns a status and a report for which this holds, and returns the report.
    #[track_caller]
    pub fn until_readyz(&mut self, condition: &str, holds: impl Fn(u16, &str) -> bool) -> String {
        let condition = format!("{}: {condition}", self.name);
        let address = self.admin();
        eventually(&condition, DEADLINE, || match http::get(address, "/readyz") {
            Ok((status, body)) if holds(status, &body) => Ok(body),
            Ok((status, body)) => Err(format!("{status} {body}")),
            Err(error) => Err(error.to_string()),
        })
    }

    /// Waits until the process owns this many partitions.
    #[track_caller]
    pub fn until_owning(&mut self, count: u64) {
        let condition = format!("{} owns {count} partitions", self.name);
        until_seen(&condition, || self.owned(), |owned| *owned == count);
        self.note(&format!("owns {count} partitions"));
    }

    /// The number of partitions that the process owns.
    #[track_caller]
    pub fn owned(&mut self) -> u64 {
        self.metric("redeliver_lane_partitions")
    }

    /// The value of a series, such as `jobs{state="ended"}`, or the sum of all series of a metric, such as `jobs`.
    ///
    /// # Panics
    /// If the metrics cannot be read.
    #[track_caller]
    pub fn metric(&mut self, series: &str) -> u64 {
        let (status, metrics) = self.get("/metrics");
        assert_eq!(status, 200, "{metrics}");
        metric(&metrics, series)
    }

    /// Waits until a metric, as [`ServiceProcess::metric`] reads it, has the value that is wanted, and returns it.
    ///
    /// # Panics
    /// If it does not within [`DEADLINE`].
    #[track_caller]
    pub fn until_metric(&mut self, series: &str, is_wanted: impl Fn(u64) -> bool) -> u64 {
        until_seen(series, || self.metric(series), |value| is_wanted(*value))
    }

    /// Waits until these metrics have these series that are not 0, and no other ones, all without the prefix `redeliver_`. They are counted after
    /// the commit that a reader of the output sees.
    #[track_caller]
    pub fn until_series<V: FromStr + Default + PartialEq + fmt::Display>(
        &mut self,
        metrics: &[&str],
        expected: &BTreeMap<String, V>,
    ) {
        eventually("the metrics have their values", DEADLINE, || {
            let (status, page) = self.get("/metrics");
            assert_eq!(status, 200, "{page}");
            let found = series(&page, metrics);
            if found == *expected {
                return Ok(());
            }
            let (more, less) = (only(&found, expected), only(expected, &found));
            Err(format!("found\n{more}expected\n{less}"))
        });
    }

    /// Whether the process is running; a frozen process is.
    pub fn is_running(&self) -> bool {
        self.runs.last().is_some_and(Process::is_running)
    }

    /// Whether the first run is still running.
    pub fn has_never_ended(&self) -> bool {
        self.runs.len() == 1 && self.is_running()
    }

    /// The output of this run.
    pub fn output(&self) -> String {
        self.runs.last().map(Process::output).unwrap_or_default()
    }

    /// How often the process was killed.
    pub fn kills(&self) -> u32 {
        self.kills
    }

    /// How often the process was killed after it had been ready.
    pub fn kills_when_ready(&self) -> u32 {
        self.kills_when_ready
    }

    /// How often the process ended itself by a signal.
    pub fn crashes(&self) -> u32 {
        self.crashes
    }

    /// How often the process was shut down.
    pub fn shutdowns(&self) -> u32 {
        self.shutdowns
    }

    /// How often the process was frozen.
    pub fn freezes(&self) -> u32 {
        self.freezes
    }

    /// The median time from the end of a run until the next one was ready.
    pub fn median_restart(&self) -> Duration {
        let mut times = self.restart_times.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }

    /// The process of this run.
    ///
    /// # Panics
    /// Never: the first run starts with this value.
    pub fn process(&mut self) -> &mut Process {
        self.runs.last_mut().expect("a service process has a run")
    }

    fn was_ready(&self) -> bool {
        self.output().contains("lane is ready")
    }

    fn ended(&mut self, how: &str, was_ready: bool) {
        self.ended_at = Some(Instant::now());
        let state = if was_ready { "when ready" } else { "while starting" };
        self.note(&format!("{how} {state}"));
    }

    /// Prints a line of the timeline, which is shown if the test fails.
    fn note(&self, event: &str) {
        println!(
            "{:7.2} {}: {}",
            self.created_at.elapsed().as_secs_f64(),
            self.name,
            event.trim_end()
        );
    }
}

/// The series of these metrics that are not 0.
fn series<V: FromStr + Default + PartialEq>(page: &str, metrics: &[&str]) -> BTreeMap<String, V> {
    let series = page.lines().filter_map(|line| {
        let (series, value) = line.strip_prefix("redeliver_")?.rsplit_once(' ')?;
        let name = series.split('{').next()?;
        let value: V = value.parse().ok()?;
        (metrics.contains(&name) && value != V::default()).then(|| (series.to_owned(), value))
    });
    series.collect()
}

/// The series that the others do not have with the same value, one per line.
fn only<V: PartialEq + fmt::Display>(these: &BTreeMap<String, V>, others: &BTreeMap<String, V>) -> String {
    let differ = these
        .iter()
        .filter(|(series, value)| others.get(*series) != Some(*value));
    differ
        .map(|(series, value)| format!("{series} {value}\n"))
        .collect()
}

fn metric(metrics: &str, series: &str) -> u64 {
    let values = metrics.lines().filter_map(|line| {
        let (found, value) = line.rsplit_once(' ')?;
        let is_wanted = found == series || found.split('{').next() == Some(series);
        is_wanted.then(|| value.parse::<u64>().ok())?
    });
    values.sum()
}

impl fmt::Display for ServiceProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            kills,
            kills_when_ready,
            crashes,
            shutdowns,
            freezes,
            ..
        } = self;
        write!(
            f,
            "{name}: {kills} kills, {kills_when_ready} of them when ready, {crashes} crashes, {shutdowns} shutdowns, \
             {freezes} freezes; ready again after {:?} at the median, {:?} at most",
            self.median_restart(),
            self.restart_times.iter().max().copied().unwrap_or_default(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::metric;

    #[test]
    fn series_of_metric_are_summed() {
        let page = "# TYPE jobs gauge\njobs{state=\"ended\"} 3\njobs{state=\"parked\"} 4\njobs_total 5\n";
        assert_eq!(metric(page, "jobs"), 7);
        assert_eq!(metric(page, "jobs{state=\"ended\"}"), 3);
        assert_eq!((metric(page, "jobs_total"), metric(page, "other")), (5, 0));
    }
}
