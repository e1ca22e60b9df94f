//! Runs services as separate processes.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::figures::cpu_time_of;

/// A running process; killed when dropped.
pub(crate) struct Running {
    child: Child,
    admin: SocketAddr,
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// Starts a program from the directory of this program. Its configuration and log are stored under `name` in the
    /// directory for temporary files.
    pub(crate) fn start(program: &str, name: &str, config: &str) -> anyhow::Result<Self> {
        let directory = std::env::temp_dir().join("redeliver-bench");
        std::fs::create_dir_all(&directory).context("creating the directory for logs")?;
        // The port is free once the listener is dropped. If another process takes it first, the service does not start.
        let admin = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let file = directory.join(format!("{name}.yaml"));
        std::fs::write(&file, format!("{config}admin: {{ listen: '{admin}' }}\n"))?;
        let log = File::options()
            .create(true)
            .append(true)
            .open(directory.join(format!("{name}.log")))?;
        let program = std::env::current_exe()?
            .parent()
            .map(PathBuf::from)
            .context("directory of this program")?
            .join(program);
        let child = Command::new(&program)
            .arg("--config")
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Self { child, admin })
    }

    /// Waits until `/readyz` reports that the process is ready.
    pub(crate) fn wait_until_ready(&self) -> anyhow::Result<()> {
        wait_until("the process is ready", Duration::from_secs(60), || {
            Ok(self.is_ready())
        })
    }

    /// Whether `/readyz` reports that the process is ready.
    pub(crate) fn is_ready(&self) -> bool {
        self.get("/readyz")
            .is_ok_and(|response| response.contains(" 200 "))
    }

    fn get(&self, path: &str) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(self.admin)?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n"
        )?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    }

    /// The sum of all series that start with `name`, which may include the first labels.
    pub(crate) fn metric(&self, name: &str) -> anyhow::Result<f64> {
        let page = self.get("/metrics")?;
        let lines = page.lines().filter(|line| line.starts_with(name));
        let values = lines.map(|line| line.rsplit(' ').next().unwrap_or_default().parse::<f64>());
        values
            .sum::<Result<f64, _>>()
            .with_context(|| format!("reading metric {name}"))
    }

    pub(crate) fn rss_mib(&self) -> anyhow::Result<f64> {
        self.memory_mib("VmRSS:")
    }

    /// The most resident memory so far.
    pub(crate) fn peak_rss_mib(&self) -> anyhow::Result<f64> {
        self.memory_mib("VmHWM:")
    }

    fn memory_mib(&self, kind: &'static str) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(kind))
            .context(kind)?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib / 1024.0)
    }

    /// Processor time so far, all threads.
    pub(crate) fn cpu_time(&self) -> Duration {
        cpu_time_of(&self.child.id().to_string())
    }

    /// Kills the process (SIGKILL).
    pub(crate) fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().context("killing the process")?;
        self.child.wait().context("waiting for the end of the process")?;
        Ok(())
    }

    /// Shuts the process down and waits for its end, so that it does not affect the next measurement.
    pub(crate) fn stop(mut self) -> anyhow::Result<()> {
        let id = i32::try_from(self.child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(id.context("process id")?, rustix::process::Signal::TERM)
            .context("terminating the process")?;
        let ended = self.child.wait().context("waiting for the end of the process")?;
        ensure!(ended.success(), "the process ended with {ended}");
        Ok(())
    }
}

/// Polls a condition every 10 ms until it is true.
pub(crate) fn wait_until(
    description: &str,
    timeout: Duration,
    mut condition: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let started = Instant::now();
    while !condition()? {
        ensure!(
            started.elapsed() < timeout,
            "timed out waiting until {description}"
        );
        std::thread::park_timeout(Duration::from_millis(10));
    }
    Ok(())
}
