//! Directories for logs and data that are removed when their owner is dropped, or, if the owner was killed before, when the
//! next test process creates one.
//!
//! They are in the target directory and therefore on disk: in a memory file system, the data of a broker could fill the
//! memory of the machine.

use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};

use crate::daemon::ProcessId;
use crate::target::target_directory;

/// The file of a scratch directory that contains the id of the process that uses it.
const USER: &str = "process.json";

/// A directory that is removed on drop. A test that panics keeps it for inspection until the next test process.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Creates `<target>/testkit/<pid>-<kind>-<n>`.
    ///
    /// # Errors
    /// If the directory cannot be created.
    pub fn new(kind: &str) -> Result<Self> {
        static SWEEP: Once = Once::new();
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let parent = target_directory()?.join("testkit");
        SWEEP.call_once(|| sweep(&parent));
        let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{}-{kind}-{counter}", std::process::id()));
        // An earlier process with the same number may have left one behind.
        drop(std::fs::remove_dir_all(&path));
        std::fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self { path })
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records that this process uses the directory, so that a later sweep can end it.
    pub(crate) fn set_user(&self, process: ProcessId) -> Result<()> {
        let path = self.path.join(USER);
        let text = serde_json::to_vec(&process).context("writing a process id as JSON")?;
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("kept for inspection: {}", self.path.display());
        } else {
            drop(std::fs::remove_dir_all(&self.path));
        }
    }
}

/// Removes the directories of owners that have ended, and kills the processes that these left behind. Failures are ignored,
/// because another process may be sweeping the same directories.
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
        let user = std::fs::read(entry.path().join(USER)).ok();
        if let Some(process) = user.and_then(|text| serde_json::from_slice::<ProcessId>(&text).ok()) {
            drop(process.kill_9());
        }
        drop(std::fs::remove_dir_all(entry.path()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_ended_are_swept() {
        let parent = Scratch::new("sweep").unwrap();
        // Linux never gives a process this number: it is above the limit of 2^22.
        let dead = parent.path().join("4294967295-kafka-0");
        let alive = parent.path().join(format!("{}-kafka-0", std::process::id()));
        for directory in [&dead, &alive] {
            std::fs::create_dir(directory).unwrap();
        }
        let mut orphan = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let id = ProcessId::of(orphan.id()).unwrap();
        std::fs::write(dead.join(USER), serde_json::to_vec(&id).unwrap()).unwrap();
        sweep(parent.path());
        assert!(!dead.exists() && alive.exists());
        assert!(!orphan.wait().unwrap().success());
    }
}
