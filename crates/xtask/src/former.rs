//! The binaries of a former version, for tests of rolling upgrades.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use redeliver_testkit::target::target_directory;

use crate::interrupt::Interrupt;
use crate::test::{cargo, stream};

/// Names the directory of the binaries to the tests.
pub(crate) const VARIABLE: &str = "REDELIVER_FORMER_BIN_DIR";

/// The revision: before applications could be paused while running, and before quotas and limits of ended jobs.
const REVISION: &str = "d94ba64eddbfb385a423ae268d0e8d8b0a577997";

/// Builds the binaries, which takes as long as a first build, and returns their directory.
///
/// # Errors
/// If the history of the repository does not contain the revision, or it cannot be built.
pub(crate) fn binaries(interrupt: &Interrupt) -> Result<PathBuf> {
    interrupt.check()?;
    let directory = target_directory()?.join("former");
    let sources = directory.join(REVISION);
    fs::create_dir_all(&sources).with_context(|| format!("creating {}", sources.display()))?;
    let archive = directory.join("sources.tar");
    let mut git = Command::new("git");
    git.args(["archive", "--output"]).arg(&archive).arg(REVISION);
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(&archive).arg("-C").arg(&sources);
    for mut command in [git, tar] {
        let status = command.status().with_context(|| format!("running {command:?}"))?;
        ensure!(
            status.success(),
            "{command:?}: {status}; tests of upgrades need the repository with its history"
        );
    }
    let mut build = cargo();
    build.current_dir(&sources);
    build.args([
        "build",
        "--locked",
        "--package",
        "redeliver-scheduler",
        "--target-dir",
    ]);
    build.arg(&directory);
    let (status, _) = stream(build, interrupt)?;
    ensure!(
        status.success(),
        "building the former version {REVISION}: {status}"
    );
    Ok(directory.join("debug"))
}
