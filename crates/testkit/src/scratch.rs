//! Directories for logs and data that go away by themselves: when their owner is dropped, or, if the
//! owner was killed before it could, when the next test process makes one.
//!
//! They are under the target directory, so on real disk: a broker's data on a memory file system would
//! measure nothing and could fill the machine.

use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};

use crate::daemon::ProcessId;
use crate::target::target_directory;

/// The file of a scratch directory that names a process living in it.
const TENANT: &str = "process.json";

/// A directory of its own, removed on drop. A test that panics leaves it to be looked at; the next test
/// process sweeps it away.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Makes `<target>/testkit/<pid>-<kind>-<n>`.
    ///
    /// # Errors
    /// When the directory cannot be made.
    pub fn new(kind: &str) -> Result<Self> {
        static SWEEP: Once = Once::new();
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let parent = target_directory()?.join("testkit");
        SWEEP.call_once(|| sweep(&parent));
        let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{}-{kind}-{counter}", std::process::id()));
        // A former process with the same number may have left one behind.
        drop(std::fs::remove_dir_all(&path));
        std::fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes that this process lives here, so that a later sweep ends it if nobody else did.
    pub(crate) fn houses(&self, process: ProcessId) -> Result<()> {
        let path = self.path.join(TENANT);
        let text = serde_json::to_vec(&process).context("writing a process id as JSON")?;
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("kept for a look: {}", self.path.display());
        } else {
            drop(std::fs::remove_dir_all(&self.path));
        }
    }
}

/// Removes the directories of owners that are gone, and ends the processes that these left behind, which
/// would otherwise hold memory until the machine restarts. Failures are ignored: another process may be
/// sweeping the same.
fn sweep(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name
            .to_str()
            .and_then(|name| name.split('-').next()?.parse::<u32>().ok());
        let Some(owner) = owner else { continue };
        if owner == std::process::id() || ProcessId::of(owner).is_some() {
            continue;
        }
        let tenant = std::fs::read(entry.path().join(TENANT)).ok();
        if let Some(process) = tenant.and_then(|text| serde_json::from_slice::<ProcessId>(&text).ok()) {
            drop(process.kill_9());
        }
        drop(std::fs::remove_dir_all(entry.path()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_goes_with_its_owner() {
        let scratch = Scratch::new("example").unwrap();
        let path = scratch.path().to_owned();
        std::fs::write(path.join("file"), "text").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }

    #[test]
    fn what_a_dead_owner_left_is_swept_and_the_rest_is_not() {
        let parent = Scratch::new("sweep").unwrap();
        // Linux never gives a process this number: it is above the limit of 2^22.
        let dead = parent.path().join("4294967295-kafka-0");
        let alive = parent.path().join(format!("{}-kafka-0", std::process::id()));
        for directory in [&dead, &alive] {
            std::fs::create_dir(directory).unwrap();
        }
        let mut orphan = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let id = ProcessId::of(orphan.id()).unwrap();
        std::fs::write(dead.join(TENANT), serde_json::to_vec(&id).unwrap()).unwrap();
        sweep(parent.path());
        assert!(!dead.exists() && alive.exists());
        assert!(!orphan.wait().unwrap().success());
    }
}
