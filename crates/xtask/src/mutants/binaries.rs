//! Builds the test binaries with all planted defects.

#![expect(clippy::disallowed_types, reason = "messages of cargo")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use redeliver_testkit::target::target_directory;
use serde_json::Value;

use super::runner::Runner;
use super::table::{Binary, LAKE, Target};
use crate::test::{ONLY_LAKE, OTHERS};

const BUILD_DIRECTORY: &str = "CARGO_BUILD_BUILD_DIR";

/// The executables of test binaries.
pub(super) struct Binaries(BTreeMap<Binary, PathBuf>);

impl Binaries {
    /// Builds these test binaries.
    pub(super) fn build(runner: &Runner<'_>, needed: impl Iterator<Item = Binary>) -> Result<Self> {
        let (lake, others): (BTreeSet<Binary>, _) = needed.partition(|binary| binary.package == LAKE);
        let mut found = BTreeMap::new();
        for (packages, needed) in [(&OTHERS[..], others), (&ONLY_LAKE, lake)] {
            if !needed.is_empty() {
                found.append(&mut Self::build_of(runner, packages, &needed)?);
            }
        }
        Ok(Self(found))
    }

    fn build_of(
        runner: &Runner<'_>,
        packages: &[&str],
        needed: &BTreeSet<Binary>,
    ) -> Result<BTreeMap<Binary, PathBuf>> {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // All packages: for some of them, Cargo would select other features and compile the dependencies again.
        command.args(["test", "--no-run", "--quiet"]).args(packages);
        command.args(["--message-format", "json-render-diagnostics"]);
        for target in needed.iter().map(|binary| binary.target).collect::<BTreeSet<_>>() {
            match target {
                Target::Lib => command.arg("--lib"),
                Target::It => command.args(["--test", "it"]),
            };
        }
        // Programs with planted defects must not replace the usual ones. Only they have a directory of their own, since Cargo
        // 1.91; everything else is shared with the usual build.
        let target = target_directory()?;
        command.env("CARGO_TARGET_DIR", target.join("mutants"));
        if std::env::var_os(BUILD_DIRECTORY).is_none() {
            command.env(BUILD_DIRECTORY, target);
        }
        let wrapper = Path::new(env!("CARGO_MANIFEST_DIR")).join("rustc-with-mutants");
        command.env("RUSTC_WORKSPACE_WRAPPER", wrapper);
        let built = runner.capture(command)?;
        ensure!(
            built.status.success(),
            "building the tests with planted defects: {}",
            built.status
        );
        let mut found = BTreeMap::new();
        for line in built.output.lines() {
            let message: Value = serde_json::from_str(line).context("parsing the messages of cargo")?;
            if let Some((binary, executable)) = needed
                .iter()
                .find_map(|binary| Some((*binary, executable_of(*binary, &message)?)))
            {
                found.insert(binary, executable);
            }
        }
        Ok(found)
    }

    pub(super) fn executable(&self, binary: Binary) -> Result<&Path> {
        let executable = self.0.get(&binary);
        let executable = executable.with_context(|| format!("{binary} was not built"))?;
        Ok(executable)
    }
}

/// The executable that a message of cargo reports, if it is this binary.
fn executable_of(binary: Binary, message: &Value) -> Option<PathBuf> {
    let executable = message["executable"].as_str()?;
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let is_package = manifest.parent()?.ends_with(binary.package);
    let is_target = match binary.target {
        Target::Lib => message["target"]["kind"]
            .as_array()?
            .iter()
            .any(|kind| kind == "lib"),
        Target::It => message["target"]["name"] == "it",
    };
    (is_package && is_target && message["profile"]["test"] == true).then(|| executable.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_found_in_messages() {
        let message = |kind: &str, name: &str, is_test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact",
                "manifest_path": "/redeliver/crates/kafka/Cargo.toml",
                "target": { "kind": [kind], "name": name },
                "profile": { "test": is_test },
                "executable": is_test.then_some("/target/debug/deps/redeliver_kafka-1"),
            })
        };
        let binary = |package, target| Binary { package, target };
        let lib = message("lib", "redeliver_kafka", true);
        assert!(executable_of(binary("crates/kafka", Target::Lib), &lib).is_some());
        assert!(executable_of(binary("crates/kafka", Target::It), &lib).is_none());
        assert!(executable_of(binary("crates/worker", Target::Lib), &lib).is_none());
        let it = message("test", "it", true);
        assert!(executable_of(binary("crates/kafka", Target::It), &it).is_some());
        let library = message("lib", "redeliver_kafka", false);
        assert!(executable_of(binary("crates/kafka", Target::Lib), &library).is_none());
    }
}
