//! Ctrl-C, SIGTERM and SIGHUP end a task in order: what it runs is stopped, what it started is taken
//! down, and then it exits. Without this an interrupted test run would leave a broker behind.

use std::process::{Child, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// What an interrupted program says by convention: 128 plus the number of SIGINT.
pub(crate) const INTERRUPTED: u8 = 130;
/// How long a command may take to end after SIGINT before it is killed.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether the user wants us to end, and what has to end with us.
#[derive(Clone)]
pub(crate) struct Interrupt {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    raised: AtomicBool,
    /// The process group of the command that runs now.
    running: Mutex<Option<Pid>>,
    ended: Condvar,
}

impl Interrupt {
    /// Takes the signals over; once per program.
    pub(crate) fn install() -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let handler = Arc::clone(&shared);
        ctrlc::set_handler(move || handler.raise()).context("taking over Ctrl-C")?;
        Ok(Self { shared })
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.shared.raised.load(Ordering::SeqCst)
    }

    /// Fails when the user wants us to end: asked between the steps of a task.
    pub(crate) fn check(&self) -> Result<()> {
        anyhow::ensure!(!self.is_raised(), "interrupted");
        Ok(())
    }

    /// The exit code of a task that ended with `code`, if it was not cut short.
    pub(crate) fn exit_code(&self, code: ExitCode) -> ExitCode {
        if self.is_raised() {
            ExitCode::from(INTERRUPTED)
        } else {
            code
        }
    }

    /// Passes interrupts on to this child, which must lead a process group of its own, while `work` runs;
    /// `work` must wait for the child.
    pub(crate) fn passed_to<T>(&self, child: &mut Child, work: impl FnOnce(&mut Child) -> T) -> T {
        *self.shared.running() = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        // The signal may have come before the child was known.
        if self.is_raised() {
            self.shared.pass_on(Signal::INT);
        }
        let result = work(child);
        *self.shared.running() = None;
        self.shared.ended.notify_all();
        result
    }
}

impl Shared {
    /// Runs on a thread of the handler's own.
    fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        eprintln!("\ninterrupted: ending in order");
        self.pass_on(Signal::INT);
        let wait = self
            .ended
            .wait_timeout_while(self.running(), PATIENCE, |running| running.is_some());
        drop(wait);
        self.pass_on(Signal::KILL);
    }

    fn pass_on(&self, signal: Signal) {
        if let Some(group) = *self.running() {
            // An error means that the group has ended by itself in the meantime.
            kill_process_group(group, signal).ok();
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<Pid>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
