//! `cargo xtask kube up|down`: a Kubernetes API server with fake nodes, for trying the Helm chart without a cluster.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Subcommand;
use redeliver_testkit::daemon::Daemon;
use redeliver_testkit::services_file::ServicesFile;
use redeliver_testkit::{LocalKube, kube_tools};

use crate::{packages, services};

#[derive(Clone, Copy, Subcommand)]
pub(crate) enum Verb {
    /// Start the control plane with two fake nodes, and print the variables with which kubectl and helm use it
    Up,
    /// Stop it and remove its data
    Down,
}

pub(crate) fn run(verb: Verb) -> Result<ExitCode> {
    let _lock = services::lock()?;
    let mut file = ServicesFile::load()?;
    match verb {
        Verb::Up => {
            let running = file.kube.take().filter(|daemon| daemon.process.is_running());
            let daemon = match running {
                Some(daemon) => daemon,
                None => start()?,
            };
            println!("KUBECONFIG={}", daemon.address);
            let programs = [kube_tools::kube()?, kube_tools::helm()?];
            let folders = programs.iter().filter_map(|program| program.parent());
            let folders: Vec<_> = folders.map(|folder| folder.display().to_string()).collect();
            println!("PATH={}:$PATH", folders.join(":"));
            file.kube = Some(daemon);
        }
        Verb::Down => {
            if let Some(daemon) = file.kube.take() {
                daemon.remove().context("stopping Kubernetes")?;
            }
            println!("Kubernetes stopped");
        }
    }
    file.save()?;
    Ok(ExitCode::SUCCESS)
}

fn start() -> Result<Daemon> {
    packages::ensure_installed(packages::DEPLOYMENT)?;
    eprintln!("starting Kubernetes; the first start on a machine builds it, which takes several minutes");
    let directory = ServicesFile::directory()?.join("kube");
    // A previous start may have been killed before it was recorded.
    if directory.exists() {
        std::fs::remove_dir_all(&directory).with_context(|| format!("removing {}", directory.display()))?;
    }
    LocalKube::start_daemon(&directory)
}
