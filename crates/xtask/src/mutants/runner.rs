//! Runs commands with a time limit, and captures their output.

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use anyhow::{Context as _, Result};
use redeliver_testkit::Addresses;
use rustix::process::{Pid, Signal, kill_process_group};

use super::VARIABLE;
use super::table::{Mutant, Test};
use crate::interrupt::Interrupt;
use crate::services::Service;

pub(super) struct Runner<'a> {
    pub(super) interrupt: &'a Interrupt,
    pub(super) addresses: Option<&'a Addresses>,
}

/// A command that has ended.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) status: ExitStatus,
    /// Whether it was killed at its time limit.
    pub(super) timed_out: bool,
    pub(super) output: String,
}

impl Finished {
    /// The exit status; `None` if a signal ended the command.
    pub(super) fn code(&self) -> Option<i32> {
        self.status.code()
    }
}

impl Runner<'_> {
    /// Runs one test, with a planted defect if there is one.
    pub(super) fn test(
        &self,
        executable: &Path,
        test: &Test,
        mutant: Option<&Mutant>,
        limit: Duration,
    ) -> Result<Finished> {
        let mut command = Command::new(executable);
        // Uncaptured, so that a test that passes also shows whether it reached the defect.
        command.args([test.name, "--exact", "--include-ignored", "--nocapture"]);
        command.current_dir(test.binary.directory());
        // The same random choices each time. A failure is not shrunk, and not recorded in the sources.
        if std::env::var_os("PROPTEST_RNG_SEED").is_none() {
            command.env("PROPTEST_RNG_SEED", "0");
        }
        command
            .env("PROPTEST_MAX_SHRINK_ITERS", "0")
            .env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "1");
        command.env_remove(VARIABLE);
        if let Some(mutant) = mutant {
            command.env(VARIABLE, mutant.name);
        }
        if let Some(addresses) = self.addresses {
            command.env(Service::Kafka.variable(), &addresses.brokers);
            command.env(Service::Redis.variable(), &addresses.redis_url);
        }
        let (reader, writer) = std::io::pipe().context("creating a pipe")?;
        command.stdout(writer.try_clone().context("duplicating a pipe")?);
        command.stderr(writer);
        self.run(command, reader, limit)
    }

    /// Runs a command whose standard output is captured, without a time limit.
    pub(super) fn capture(&self, mut command: Command) -> Result<Finished> {
        let (reader, writer) = std::io::pipe().context("creating a pipe")?;
        command.stdout(writer);
        self.run(command, reader, Duration::MAX)
    }

    fn run(&self, mut command: Command, reader: std::io::PipeReader, limit: Duration) -> Result<Finished> {
        let context = format!("running {command:?}");
        // In its own process group, so that an interrupt or the time limit also ends the processes that it has started.
        command.process_group(0).stdin(Stdio::null());
        let mut child = command.spawn().with_context(|| context.clone())?;
        // The command holds the other end of the pipe.
        drop(command);
        self.interrupt
            .forward_to(&mut child, |child| wait(child, reader, limit))
            .with_context(|| context)
    }
}

/// Reads the output until the command has ended, and kills it at the time limit.
fn wait(child: &mut Child, mut reader: std::io::PipeReader, limit: Duration) -> Result<Finished> {
    let (sender, receiver) = sync_channel(1);
    let reading = std::thread::spawn(move || {
        let mut output = Vec::new();
        let read = reader.read_to_end(&mut output);
        // An error means that the receiver no longer waits.
        sender.send(()).ok();
        read.map(|_| String::from_utf8_lossy(&output).into_owned())
    });
    let timed_out = receiver.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
    if timed_out && let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // An error means that the group has already exited.
        kill_process_group(group, Signal::KILL).ok();
    }
    let status = child.wait().context("waiting for its exit")?;
    let output = match reading.join() {
        Ok(read) => read.context("reading its output")?,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    Ok(Finished {
        status,
        timed_out,
        output,
    })
}
