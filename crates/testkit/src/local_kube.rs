//! A Kubernetes control plane that belongs to one test: a real API server with its controllers and the scheduler, and two fake
//! nodes. `deploy/kube/up.sh` runs it. Pods run nothing, so they are ready at once, and Jobs succeed.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::daemon::Daemon;
use crate::process::Process;
use crate::scratch::Scratch;
use crate::{free_port, kube_tools};

/// It normally takes 10 s, but may have to start while the machine is compiling.
const START_DEADLINE: Duration = Duration::from_secs(180);

/// A running control plane; see the module.
#[derive(Debug)]
pub struct LocalKube {
    // Before the directory, so that nothing writes to it any more when it is removed.
    _process: Process,
    directory: Scratch,
}

impl LocalKube {
    /// Starts an empty cluster.
    ///
    /// # Errors
    /// If its programs cannot be built, or it does not become ready; the error contains the end of its output.
    pub fn start() -> Result<Self> {
        let directory = Scratch::new("kube")?;
        let mut process = spawn(directory.path(), false)?;
        directory.set_user(process.id())?;
        until_ready(&mut process, directory.path())?;
        Ok(Self {
            _process: process,
            directory,
        })
    }

    /// Starts a cluster that keeps running after this program, with its data in `directory`. Its address is the path of the
    /// kubeconfig.
    ///
    /// # Errors
    /// As [`LocalKube::start`].
    pub fn start_daemon(directory: &Path) -> Result<Daemon> {
        std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
        let mut process = spawn(directory, true)?;
        until_ready(&mut process, directory)?;
        Ok(Daemon {
            process: process.leave_running(),
            address: kubeconfig(directory).display().to_string(),
            directory: directory.to_owned(),
        })
    }

    /// The file with which clients of this cluster log in as its administrator.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        kubeconfig(self.directory.path())
    }

    /// A kubectl command for this cluster.
    ///
    /// # Errors
    /// If kubectl cannot be built.
    pub fn kubectl(&self) -> Result<Command> {
        let mut command = Command::new(kube_tools::kube()?);
        command
            .arg("kubectl")
            .env("KUBECONFIG", self.kubeconfig())
            .env("KUBECACHEDIR", self.directory.path().join("kubectl"));
        Ok(command)
    }

    /// A helm command for this cluster.
    ///
    /// # Errors
    /// If helm cannot be built.
    pub fn helm(&self) -> Result<Command> {
        let mut command = Command::new(kube_tools::helm()?);
        command.env("KUBECONFIG", self.kubeconfig());
        // Without them, helm would read and write the user's own.
        for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(variable, self.directory.path().join("helm"));
        }
        Ok(command)
    }
}

fn kubeconfig(directory: &Path) -> PathBuf {
    directory.join("kubeconfig")
}

fn spawn(directory: &Path, own_group: bool) -> Result<Process> {
    let programs = [kube_tools::kube()?, kube_tools::kwok()?];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = programs.iter().filter_map(|program| program.parent());
    let folders = folders.map(Path::to_owned).chain(std::env::split_paths(&path));
    let path = std::env::join_paths(folders).context("joining the folders of programs")?;
    let mut command = Command::new("bash");
    command
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kube/up.sh"))
        .arg(directory)
        .args([(); 6].map(|()| free_port().to_string()))
        .env("PATH", path);
    if own_group {
        command.process_group(0);
    }
    Process::spawn_logging_to(command, directory.join("up.log"))
}

fn until_ready(process: &mut Process, directory: &Path) -> Result<()> {
    process.wait_until_ready("Kubernetes", START_DEADLINE, || {
        let ready = directory.join("ready").exists();
        ensure!(
            ready,
            "its nodes are not ready; see the logs in {}",
            directory.display()
        );
        Ok(())
    })
}
