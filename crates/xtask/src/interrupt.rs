//! Graceful shutdown on Ctrl-C, SIGTERM and SIGHUP: stops the running command and the services that were started.
//! Otherwise an interrupted test run would leave a broker running.

use std::process::{Child, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// The conventional exit status after SIGINT: 128 plus the signal's number.
pub(crate) const INTERRUPTED: u8 = 130;
/// How long a command may take to exit after SIGINT before it is killed.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub(crate) struct Interrupt {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    raised: AtomicBool,
    /// The process groups of the running commands.
    running: Mutex<Vec<Pid>>,
    ended: Condvar,
}

impl Interrupt {
    /// Installs the signal handler. May be called once per process.
    pub(crate) fn install() -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let handler = Arc::clone(&shared);
        ctrlc::set_handler(move || handler.raise()).context("installing the signal handler")?;
        Ok(Self { shared })
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.shared.raised.load(Ordering::SeqCst)
    }

    /// Fails after an interrupt. Called between the steps of a task.
    pub(crate) fn check(&self) -> Result<()> {
        anyhow::ensure!(!self.is_raised(), "interrupted");
        Ok(())
    }

    /// `code`, or [`INTERRUPTED`] after an interrupt.
    pub(crate) fn exit_code(&self, code: ExitCode) -> ExitCode {
        if self.is_raised() {
            ExitCode::from(INTERRUPTED)
        } else {
            code
        }
    }

    /// Forwards interrupts to the child while `work` runs. The child must lead its own process group, and `work` must wait
    /// for it.
    pub(crate) fn forward_to<T>(&self, child: &mut Child, work: impl FnOnce(&mut Child) -> T) -> T {
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        self.shared.running().extend(group);
        // The signal may have arrived before the child was registered.
        if self.is_raised() {
            self.shared.forward(Signal::INT);
        }
        let result = work(child);
        self.shared.running().retain(|running| Some(*running) != group);
        self.shared.ended.notify_all();
        result
    }
}

impl Shared {
    /// Runs on the thread of the signal handler.
    fn raise(&self) {
        self.raised.store(true, Ordering::SeqCst);
        eprintln!("\ninterrupted; shutting down");
        self.forward(Signal::INT);
        let wait = self
            .ended
            .wait_timeout_while(self.running(), GRACE, |running| !running.is_empty());
        drop(wait);
        self.forward(Signal::KILL);
    }

    fn forward(&self, signal: Signal) {
        for group in self.running().iter() {
            // An error means that the group has already exited.
            kill_process_group(*group, signal).ok();
        }
    }

    fn running(&self) -> MutexGuard<'_, Vec<Pid>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
