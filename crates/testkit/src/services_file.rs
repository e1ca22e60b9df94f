//! The state file of `cargo xtask services up`: which servers it started and left running. `status` and
//! `down` read it, and so do tests that are run by plain `cargo test`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::daemon::Daemon;
use crate::target::target_directory;

/// The servers that are up; a server given by the environment is not ours and never in here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServicesFile {
    /// The broker; its address is `host:port`.
    pub kafka: Option<Server>,
    /// Redis; its address is a URL.
    pub redis: Option<Server>,
    /// Kubernetes, by `cargo xtask kube up`; its address is the path of the kubeconfig.
    #[serde(default)]
    pub kube: Option<Daemon>,
}

/// One server and who runs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Server {
    /// A process of this machine.
    Native(Daemon),
    /// A container, run by docker compose.
    Compose {
        /// What clients are given.
        address: String,
    },
}

impl Server {
    /// What clients are given.
    pub fn address(&self) -> &str {
        match self {
            Self::Native(daemon) => &daemon.address,
            Self::Compose { address } => address,
        }
    }
}

impl ServicesFile {
    /// The directory the file is in, beside the data of the servers: `<target>/xtask`.
    ///
    /// # Errors
    /// If the target directory cannot be found.
    pub fn directory() -> Result<PathBuf> {
        Ok(target_directory()?.join("xtask"))
    }

    /// Reads the file; nothing is up when there is none.
    ///
    /// # Errors
    /// If it cannot be read or is not what this version writes.
    pub fn load() -> Result<Self> {
        Self::load_from(&Self::directory()?)
    }

    fn load_from(directory: &Path) -> Result<Self> {
        let path = directory.join("services.json");
        match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).with_context(|| format!("reading {}", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
        }
    }

    /// Writes the file, at once and as a whole: a test never reads half of it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn save(&self) -> Result<()> {
        self.save_to(&Self::directory()?)
    }

    fn save_to(&self, directory: &Path) -> Result<()> {
        let path = directory.join("services.json");
        let partial = directory.join("services.json.partial");
        let text = serde_json::to_vec_pretty(self).context("writing the state of the services as JSON")?;
        std::fs::create_dir_all(directory)
            .and_then(|()| std::fs::write(&partial, text))
            .and_then(|()| std::fs::rename(&partial, &path))
            .with_context(|| format!("writing {}", path.display()))
    }
}
