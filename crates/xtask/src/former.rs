//! The binaries of former versions, for tests of rolling upgrades. `redeliver_testkit::former_binaries` finds them by the name of the version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use redeliver_testkit::target::target_directory;

use crate::interrupt::Interrupt;
use crate::test::{cargo, stream};

/// A former version.
struct Former {
    /// The name by which tests ask for it.
    name: &'static str,
    revision: &'static str,
    /// The packages that tests need of it, which are named after their binaries.
    packages: &'static [&'static str],
}

const FORMERS: [Former; 2] = [
    // Before applications could be paused while running, and before quotas and limits of ended jobs. The inspector only reads.
    Former {
        name: "before-control",
        revision: "d94ba64eddbfb385a423ae268d0e8d8b0a577997",
        packages: &["redeliver-scheduler", "redeliver-dlq-inspector"],
    },
    // Before redrives knew edits, automatic ones, and where they have written records.
    Former {
        name: "before-edits",
        revision: "c6fa4aa85734b7fd56c3b920d8ddb1b079518a95",
        packages: &["redeliver-dlq-inspector"],
    },
];

/// Builds the binaries, which takes as long as a first build, and returns the directory that has one directory for each version.
///
/// # Errors
/// If the history of the repository does not contain a revision, or it cannot be built.
pub(crate) fn binaries(interrupt: &Interrupt) -> Result<PathBuf> {
    let directory = target_directory()?.join("former");
    let binaries = directory.join("versions");
    for former in &FORMERS {
        interrupt.check()?;
        build(former, &directory, &binaries.join(former.name), interrupt)?;
    }
    Ok(binaries)
}

/// Builds a version in `directory`, where all versions share their dependencies, and copies its binaries to `destination`.
fn build(former: &Former, directory: &Path, destination: &Path, interrupt: &Interrupt) -> Result<()> {
    let Former {
        name,
        revision,
        packages,
    } = former;
    let sources = directory.join(revision);
    for created in [&sources, destination] {
        fs::create_dir_all(created).with_context(|| format!("creating {}", created.display()))?;
    }
    let archive = directory.join("sources.tar");
    let mut git = Command::new("git");
    git.args(["archive", "--output"]).arg(&archive).arg(revision);
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
    build.args(["build", "--locked", "--target-dir"]).arg(directory);
    for package in *packages {
        build.args(["--package", package]);
    }
    let (status, _) = stream(build, interrupt)?;
    ensure!(status.success(), "building the former version {name}: {status}");
    // The next version has binaries of the same names.
    for package in *packages {
        let binary = package.trim_start_matches("redeliver-");
        let built = directory.join("debug").join(binary);
        fs::copy(&built, destination.join(binary)).with_context(|| format!("copying {}", built.display()))?;
    }
    Ok(())
}
