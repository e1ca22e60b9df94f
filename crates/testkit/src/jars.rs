//! Jars that Maven downloads once into the user's cache directory: those of Apache Kafka, and those that a test names.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::hash::stable_hash;
use crate::kept::kept;

/// Compiled in, so that the code determines the version of the broker.
const POM: &str = include_str!("../../../deploy/local/pom.xml");

/// The directory with the jars of the version of the pom, which the first call on a machine fills (54 MB).
pub(crate) fn resolved() -> Result<PathBuf> {
    resolve("kafka", "Kafka's jars", POM, &[])
}

/// As [`resolved`], of another version.
pub(crate) fn of_version(version: &str) -> Result<PathBuf> {
    resolve(
        "kafka",
        "Kafka's jars",
        POM,
        &[format!("-Dkafka.version={version}")],
    )
}

/// The directory with the jars that a `pom.xml` lists and what they need, which the first call on a machine fills.
pub(crate) fn listed_in(pom: &Path) -> Result<PathBuf> {
    let text = std::fs::read_to_string(pom).with_context(|| format!("reading {}", pom.display()))?;
    resolve("jars", "jars", &text, &[])
}

/// The name of the directory contains a hash of the pom and of the options, so another version has another directory.
fn resolve(name: &str, what: &str, pom: &str, options: &[String]) -> Result<PathBuf> {
    let hash = stable_hash(format!("{pom}{}", options.concat()).as_bytes());
    kept(&format!("{name}-{hash:016x}"), what, |jars| {
        fetch(jars, pom, options)
    })
}

fn fetch(jars: &Path, pom: &str, options: &[String]) -> Result<()> {
    let file = jars.join("pom.xml");
    std::fs::write(&file, pom).with_context(|| format!("writing {}", file.display()))?;
    let output = Command::new("mvn")
        .args([
            "--batch-mode",
            "--quiet",
            "dependency:copy-dependencies",
            "-DincludeScope=runtime",
        ])
        .args(options)
        .arg(format!("-DoutputDirectory={}", jars.display()))
        .arg("--file")
        .arg(&file)
        .output()
        .context("starting Maven (`mvn`), which fetches jars; is it installed?")?;
    ensure!(
        output.status.success(),
        "fetching jars with Maven: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
