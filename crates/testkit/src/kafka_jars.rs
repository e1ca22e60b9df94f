//! Apache Kafka as its own jars: resolved by Maven once, then kept in the user's cache directory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::hash::stable_hash;

/// Compiled in, so that the version of the broker belongs to the code that starts it.
const POM: &str = include_str!("../../../deploy/local/pom.xml");

/// The directory with the jars, filled on the first call on a machine (a download of 54 MB). Keyed by
/// the pom's content: a new version gets a new directory.
pub(crate) fn resolved() -> Result<PathBuf> {
    let cache = cache_directory()?;
    let jars = cache.join(format!("kafka-{:016x}", stable_hash(POM.as_bytes())));
    if jars.is_dir() {
        return Ok(jars);
    }
    std::fs::create_dir_all(&cache).with_context(|| format!("making {}", cache.display()))?;
    // Several test processes may want the jars at once; one fetches, the others wait for it.
    let lock = jars.with_extension("lock");
    let lock = File::create(&lock).with_context(|| format!("making {}", lock.display()))?;
    lock.lock()
        .context("waiting for another process that fetches Kafka's jars")?;
    if !jars.is_dir() {
        fetch(&jars)?;
    }
    Ok(jars)
}

fn fetch(jars: &Path) -> Result<()> {
    // Fetched beside their place and renamed into it: a directory of the final name is always complete.
    let partial = jars.with_extension("partial");
    drop(std::fs::remove_dir_all(&partial));
    std::fs::create_dir_all(&partial).with_context(|| format!("making {}", partial.display()))?;
    let pom = partial.join("pom.xml");
    std::fs::write(&pom, POM).with_context(|| format!("writing {}", pom.display()))?;
    let output = Command::new("mvn")
        .args([
            "--batch-mode",
            "--quiet",
            "dependency:copy-dependencies",
            "-DincludeScope=runtime",
        ])
        .arg(format!("-DoutputDirectory={}", partial.display()))
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
    std::fs::rename(&partial, jars)
        .with_context(|| format!("renaming {} to {}", partial.display(), jars.display()))
}

/// `$XDG_CACHE_HOME/redeliver`, else `~/.cache/redeliver`.
fn cache_directory() -> Result<PathBuf> {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    Ok(base
        .context("finding a cache directory: neither XDG_CACHE_HOME nor HOME is set")?
        .join("redeliver"))
}
