//! The binaries of former versions, for tests of rolling upgrades. `cargo xtask test --long` builds them.

use std::path::{Path, PathBuf};
#[cfg(feature = "services")]
use std::process::Command;

/// Names the directory that has one directory with binaries for each former version.
pub const FORMER_BIN_DIR: &str = "REDELIVER_FORMER_BIN_DIR";

/// The directory with the binaries of a former version. `crates/xtask/src/former.rs` lists the versions.
///
/// # Panics
/// If they were not built.
#[track_caller]
pub fn former_binaries(version: &str) -> PathBuf {
    let directory = std::env::var_os(FORMER_BIN_DIR);
    let directory =
        directory.unwrap_or_else(|| panic!("{FORMER_BIN_DIR} is not set: use `cargo xtask test --long`"));
    let binaries = Path::new(&directory).join(version);
    assert!(
        binaries.is_dir(),
        "{} is missing: use `cargo xtask test --long`",
        binaries.display()
    );
    binaries
}

/// The command with the program of the same name in another directory.
///
/// # Panics
/// If the command has no program.
#[must_use]
#[track_caller]
#[cfg(feature = "services")]
pub(crate) fn in_directory(command: &Command, directory: &Path) -> Command {
    let program = Path::new(command.get_program());
    let mut other = Command::new(directory.join(program.file_name().expect("a program")));
    other.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => other.env(name, value),
            None => other.env_remove(name),
        };
    }
    other
}
