//! A program under test as a real process: started, frozen, killed, measured.
//!
//! Its output goes to a file, stdout and stderr in the order of writing. The end of the output is printed if the test
//! panics. The process is killed when the value is dropped. It stays in the process group of the test, so an interrupted
//! test run ends it too.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::Signal;

use crate::daemon::ProcessId;
use crate::eventually::poll_until;
use crate::scratch::Scratch;
use crate::target::profile_directory;

/// How much of the output is shown in a failure, in bytes.
const SHOWN: usize = 64 * 1024;

/// A running program; see the module.
#[derive(Debug)]
pub struct Process {
    name: String,
    id: ProcessId,
    child: Child,
    output: PathBuf,
    // Removed after the process is dead: fields are dropped after `Drop::drop` has run.
    scratch: Option<Scratch>,
    leave_running: bool,
}

/// A command that runs one of our binaries, such as `retry-tier`, from `REDELIVER_TEST_BIN_DIR` or else from the directory
/// into which Cargo builds programs.
///
/// # Panics
/// If the binary does not exist; the message names the command that builds it.
#[track_caller]
pub fn binary(name: &str) -> Command {
    let directory = match std::env::var_os("REDELIVER_TEST_BIN_DIR") {
        Some(directory) => PathBuf::from(directory),
        None => profile_directory().unwrap_or_else(|error| panic!("finding our binaries: {error:#}")),
    };
    let path = directory.join(name);
    assert!(
        path.is_file(),
        "{} is missing: run `cargo xtask test`, or `cargo build --workspace --bins --examples` first",
        path.display()
    );
    Command::new(path)
}

/// The output of a command that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// The exit status; none if a signal ended the command.
    pub code: Option<i32>,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
}

/// Runs a command to its end, without the environment of this process: it has only the variables that were set for it.
///
/// # Panics
/// If it cannot be started, or its output is not UTF-8.
#[track_caller]
pub fn run(mut command: Command) -> CommandOutput {
    let set = |(name, value): (&OsStr, Option<&OsStr>)| Some((name.to_owned(), value?.to_owned()));
    let own: Vec<(OsString, OsString)> = command.get_envs().filter_map(set).collect();
    let output = command
        .env_clear()
        .envs(own)
        .output()
        .unwrap_or_else(|error| panic!("running {command:?}: {error}"));
    let text = |bytes| String::from_utf8(bytes).unwrap_or_else(|error| panic!("{command:?}: {error}"));
    CommandOutput {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

impl Process {
    /// Starts the command with no stdin and its output in a file.
    ///
    /// # Errors
    /// If the program cannot be started, or ended before it could be looked at.
    pub fn spawn(command: Command) -> Result<Self> {
        let name = Path::new(command.get_program()).file_name().unwrap_or_default();
        let scratch = Scratch::new(&name.to_string_lossy())?;
        let output = scratch.path().join("output.log");
        let mut process = Self::spawn_logging_to(command, output)?;
        scratch.set_user(process.id)?;
        process.scratch = Some(scratch);
        Ok(process)
    }

    /// As [`Process::spawn`], but appends the output to this file.
    pub(crate) fn spawn_logging_to(mut command: Command, output: PathBuf) -> Result<Self> {
        let program = Path::new(command.get_program()).to_owned();
        let open = || File::options().create(true).append(true).open(&output);
        let (stdout, stderr) = open()
            .and_then(|stdout| Ok((stdout, open()?)))
            .with_context(|| format!("opening {}", output.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        // A child that has ended keeps its number until it is waited for, but its start time cannot be read any more. Every
        // signal to it must fail anyway.
        let id = ProcessId::of(child.id()).unwrap_or_else(|| ProcessId::ended(child.id()));
        let name = program
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        Ok(Self {
            name,
            id,
            child,
            output,
            scratch: None,
            leave_running: false,
        })
    }

    /// Keeps the process running when this value is dropped.
    pub(crate) fn leave_running(mut self) -> ProcessId {
        self.leave_running = true;
        self.id
    }

    /// Its number and start time.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Whether it is still running; a frozen process is.
    pub fn is_running(&self) -> bool {
        self.id.is_running()
    }

    /// Kills it with SIGKILL, and waits for its end.
    ///
    /// # Panics
    /// If it is not running, because a test that kills nothing proves nothing.
    #[track_caller]
    pub fn kill_9(&mut self) {
        self.send(Signal::KILL);
        self.child
            .wait()
            .unwrap_or_else(|error| panic!("waiting for {} to die: {error}", self.name));
    }

    /// Freezes it with SIGSTOP. Its sockets stay open and do not respond, as if its machine were suspended.
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn stop(&self) {
        self.send(Signal::STOP);
    }

    /// Lets it continue with SIGCONT.
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn cont(&self) {
        self.send(Signal::CONT);
    }

    /// Requests a graceful shutdown with SIGTERM.
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn terminate(&self) {
        self.send(Signal::TERM);
    }

    /// Requests a graceful shutdown with SIGINT, as Ctrl-C does.
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn interrupt(&self) {
        self.send(Signal::INT);
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// If it is still running after `deadline`.
    #[track_caller]
    pub fn wait(&mut self, deadline: Duration) -> ExitStatus {
        match self.wait_until(deadline) {
            Ok(status) => status,
            Err(error) => panic!("{error:#}"),
        }
    }

    pub(crate) fn wait_until(&mut self, deadline: Duration) -> Result<ExitStatus> {
        let ended = || match self.child.try_wait() {
            Ok(Some(status)) => Ok(Ok(status)),
            Ok(None) => Err(()),
            Err(error) => Ok(Err(error)),
        };
        match poll_until(deadline, ended) {
            Ok(ended) => ended.with_context(|| format!("waiting for {} to end", self.name)),
            Err(()) => Err(anyhow!(
                "waiting for {} to end: still running after {deadline:?}",
                self.name
            )),
        }
    }

    /// Waits until its output contains `text`, and returns the output so far.
    ///
    /// # Panics
    /// If the output does not contain the text within `deadline`, or the process ended before.
    #[track_caller]
    pub fn wait_for_output(&mut self, text: &str, deadline: Duration) -> String {
        let printed = || {
            let running = self.is_running();
            let output = self.output();
            if output.contains(text) {
                Ok(Some(output))
            } else if running {
                Err(())
            } else {
                Ok(None)
            }
        };
        match poll_until(deadline, printed) {
            Ok(Some(output)) => output,
            Ok(None) => panic!("{} ended without printing {text:?}", self.name),
            Err(()) => panic!("{} did not print {text:?} within {deadline:?}", self.name),
        }
    }

    /// Waits until `probe` succeeds on a server of this process.
    pub(crate) fn wait_until_ready(
        &mut self,
        server: &str,
        deadline: Duration,
        mut probe: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let ready = poll_until(deadline, || {
            let running = self.is_running();
            match probe() {
                Ok(()) => Ok(true),
                // A process that has ended will not become ready.
                Err(_) if !running => Ok(false),
                Err(error) => Err(error),
            }
        });
        match ready {
            Ok(true) => Ok(()),
            Ok(false) => bail!(
                "starting {server}: it ended by itself; its log ends:\n{}",
                self.tail()
            ),
            Err(error) => {
                let tail = self.tail();
                Err(error.context(format!(
                    "starting {server}: not ready after {deadline:?}; its log ends:\n{tail}"
                )))
            }
        }
    }

    /// The output so far.
    pub fn output(&self) -> String {
        let bytes = std::fs::read(&self.output).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The last part of the output.
    pub(crate) fn tail(&self) -> String {
        let output = self.output();
        let start = output.len().saturating_sub(SHOWN);
        let start = (start..output.len())
            .find(|at| output.is_char_boundary(*at))
            .unwrap_or(start);
        output[start..].to_owned()
    }

    /// The resident memory in KiB (`VmRSS`, proc(5)).
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn rss_kib(&self) -> u64 {
        let path = format!("/proc/{}/status", self.id.number());
        let status = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("reading {path}: {error}"));
        resident_kib(&status).unwrap_or_else(|| panic!("{} is not running: {path} has no VmRSS", self.name))
    }

    #[track_caller]
    fn send(&self, signal: Signal) {
        if let Err(error) = self.id.signal(signal) {
            panic!("{}: {error:#}", self.name);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.leave_running {
            return;
        }
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            eprintln!(
                "---- output of {} ({})\n{}\n----",
                self.name,
                self.id.number(),
                self.tail()
            );
        }
    }
}

fn resident_kib(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn shell(script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process::spawn(command).unwrap()
    }

    #[test]
    fn killed_process_is_dead_at_once() {
        let mut process = shell("exec sleep 600");
        assert!(process.is_running());
        assert!(process.rss_kib() > 0);
        process.kill_9();
        assert!(!process.is_running());
    }

    #[test]
    fn frozen_process_does_nothing_until_thawed() {
        let mut process =
            shell("trap 'echo ended gracefully; exit 7' TERM; echo ready; while :; do sleep 0.05; done");
        process.wait_for_output("ready", SOON);
        process.stop();
        process.terminate();
        assert!(process.wait_until(Duration::from_millis(300)).is_err());
        assert!(process.is_running());
        process.cont();
        assert_eq!(process.wait(SOON).code(), Some(7));
        assert!(process.output().contains("ended gracefully"));
    }

    #[test]
    #[should_panic(expected = "it is not running")]
    fn killing_ended_process_fails_test() {
        let mut process = shell("exit 3");
        assert_eq!(process.wait(SOON).code(), Some(3));
        process.kill_9();
    }
}
