//! Kafka and Redis in containers: the services `kafka` and `redis` of `docker-compose.yml`, which publish the container
//! ports 9092 and 6379.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// Whether Docker is running, supports Compose, and the Compose file exists.
pub(crate) fn is_available(workspace: &Path) -> bool {
    let succeeds = |arguments: &[&str]| {
        let mut docker = Command::new("docker");
        docker
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        docker.status().is_ok_and(|status| status.success())
    };
    workspace.join("docker-compose.yml").is_file() && succeeds(&["info"]) && succeeds(&["compose", "version"])
}

/// Starts a service, waits until it is healthy, and returns its `host:port` for this machine.
pub(crate) fn up(workspace: &Path, service: &str, container_port: u16) -> Result<String> {
    compose(workspace, &["up", "--detach", "--wait", service])?;
    let published = compose(workspace, &["port", service, &container_port.to_string()])?;
    let (_, port) = published.trim().rsplit_once(':').with_context(|| {
        format!("docker compose publishes no port {container_port} of {service}: {published:?}")
    })?;
    Ok(format!("127.0.0.1:{port}"))
}

/// Stops a service and removes its container and its data.
pub(crate) fn down(workspace: &Path, service: &str) -> Result<()> {
    compose(workspace, &["rm", "--stop", "--force", "--volumes", service]).map(drop)
}

fn compose(workspace: &Path, arguments: &[&str]) -> Result<String> {
    let what = || format!("running docker compose {}", arguments.join(" "));
    let output = Command::new("docker")
        .arg("compose")
        .args(arguments)
        .current_dir(workspace)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(what)?;
    ensure!(output.status.success(), "{}: {}", what(), output.status);
    String::from_utf8(output.stdout).with_context(what)
}
