//! The lake, an optional program that runs beside this process.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

pub(super) struct Lake {
    program: PathBuf,
    tables: PathBuf,
}

impl Lake {
    /// The program, which appends to tables in this directory.
    ///
    /// # Errors
    /// If it was not built.
    pub(super) fn new(tables: &Path) -> anyhow::Result<Self> {
        let own = std::env::current_exe().context("looking for redeliver-lake")?;
        let program = own.with_file_name("redeliver-lake");
        let is_release = own.parent().is_some_and(|folder| folder.ends_with("release"));
        anyhow::ensure!(
            program.exists(),
            "{} does not exist; build it with: cargo build {}--package redeliver-lake",
            program.display(),
            if is_release { "--release " } else { "" }
        );
        let tables = std::path::absolute(tables).context("--lake")?;
        Ok(Self { program, tables })
    }

    pub(super) fn tables(&self) -> &Path {
        &self.tables
    }

    /// Runs it until `stop` is cancelled.
    pub(super) async fn run(self, config: PathBuf, stop: CancellationToken) -> anyhow::Result<()> {
        let location = format!("lake.location={}", self.tables.display());
        let mut process = Command::new(&self.program)
            .args(["--embedded", "--config"])
            .arg(config)
            .args(["--set", &location])
            .args(["--set", "lake.flush_interval=2s", "--set", "instance=dev-lake"])
            .args(["--set", "lake.headers=[\"tenant\"]"])
            .args(["--set", "admin.listen=127.0.0.1:0"])
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {}", self.program.display()))?;
        tokio::select! {
            status = process.wait() => {
                // Ctrl-C ends it, too.
                let status = status?;
                anyhow::ensure!(stop.is_cancelled() || status.success(), "redeliver-lake ended with {status}");
                Ok(())
            }
            () = stop.cancelled() => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_program_names_its_build() {
        // It is not among the programs of tests.
        let error = Lake::new(Path::new("tables")).err().unwrap().to_string();
        let expected = "/redeliver-lake does not exist; build it with: cargo build --package redeliver-lake";
        assert!(error.ends_with(expected), "{error}");
    }
}
