//! The jars of Apache Kafka, which Maven downloads once into the user's cache directory.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::hash::stable_hash;
use crate::kept::kept;

/// Compiled in, so that the code determines the version of the broker.
const POM: &str = include_str!("../../../deploy/local/pom.xml");

/// The directory with the jars, which the first call on a machine fills (54 MB). Its name contains a hash of the pom, so a new
/// version has a new directory.
pub(crate) fn resolved() -> Result<PathBuf> {
    kept(
        &format!("kafka-{:016x}", stable_hash(POM.as_bytes())),
        "Kafka's jars",
        fetch,
    )
}

fn fetch(jars: &Path) -> Result<()> {
    let pom = jars.join("pom.xml");
    std::fs::write(&pom, POM).with_context(|| format!("writing {}", pom.display()))?;
    let output = Command::new("mvn")
        .args([
            "--batch-mode",
            "--quiet",
            "dependency:copy-dependencies",
            "-DincludeScope=runtime",
        ])
        .arg(format!("-DoutputDirectory={}", jars.display()))
        .arg("--file")
        .arg(&pom)
        .output()
        .context("starting Maven (`mvn`), which fetches Apache Kafka; is it installed?")?;
    ensure!(
        output.status.success(),
        "fetching Apache Kafka's jars with Maven: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
