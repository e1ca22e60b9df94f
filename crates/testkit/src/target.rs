//! Where Cargo puts what it builds, found from the running executable.
//!
//! This does not depend on the environment, the configuration or the current directory. Cargo puts tests into
//! `<target>/<profile>/deps` and programs into `<target>/<profile>`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// The directory of one build profile, `<target>/debug` for the usual one: our binaries are in it.
///
/// # Errors
/// If the running executable cannot be found, or is not where Cargo puts one.
pub fn profile_directory() -> Result<PathBuf> {
    let executable = std::env::current_exe().context("finding the running executable")?;
    profile_directory_of(&executable)
        .with_context(|| format!("finding the build directory of {}", executable.display()))
}

/// The target directory, which all build profiles share.
///
/// # Errors
/// As [`profile_directory`].
pub fn target_directory() -> Result<PathBuf> {
    let profile = profile_directory()?;
    let target = profile
        .parent()
        .with_context(|| format!("finding the parent of {}", profile.display()))?;
    Ok(target.to_owned())
}

fn profile_directory_of(executable: &Path) -> Option<PathBuf> {
    let directory = executable.parent()?;
    // Examples and benchmarks sit one level deeper, like tests.
    let nested = ["deps", "examples"].iter().any(|name| directory.ends_with(name));
    Some(if nested {
        directory.parent()?.to_owned()
    } else {
        directory.to_owned()
    })
}
