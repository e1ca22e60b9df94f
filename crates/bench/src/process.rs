//! Services of ours as processes, as they run for users.

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
        // It may have ended by itself; either way it is gone afterwards.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// Starts a program that stands beside this one. Its configuration and log are kept in the directory for
    /// temporary files, under this name.
    pub(crate) fn start(
        program: &str,
        name: &str,
        config: &str,
        environment: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let directory = std::env::temp_dir().join("redeliver-bench");
        std::fs::create_dir_all(&directory).context("making a directory for logs")?;
        // Free until somebody else takes it, which nobody does here.
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
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", program.display()))?;
        Ok(Self { child, admin })
    }

    /// Waits until all of its parts are ready.
    pub(crate) fn wait_until_ready(&self) -> anyhow::Result<()> {
        wait_until("the process is ready", Duration::from_secs(60), || {
            Ok(self.get("/readyz").is_ok_and(|answer| answer.contains(" 200 ")))
        })
    }

    fn get(&self, path: &str) -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(self.admin)?;
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    /// The sum of a metric over its labels; a line begins with `name` and the labels that are given with it.
    pub(crate) fn metric(&self, name: &str) -> anyhow::Result<f64> {
        let page = self.get("/metrics")?;
        let lines = page.lines().filter(|line| line.starts_with(name));
        let values = lines.map(|line| line.rsplit(' ').next().unwrap_or_default().parse::<f64>());
        values
            .sum::<Result<f64, _>>()
            .with_context(|| format!("reading metric {name}"))
    }

    pub(crate) fn rss_mib(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .context("VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kib / 1024.0)
    }

    /// Processor time so far, all threads.
    pub(crate) fn cpu_time(&self) -> Duration {
        cpu_time_of(&self.child.id().to_string())
    }

    /// Kills it without warning.
    pub(crate) fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().context("killing the process")?;
        self.child.wait().context("waiting for the end of the process")?;
        Ok(())
    }

    /// Asks it to end, and waits until it has, so that nothing of it disturbs what comes next.
    pub(crate) fn stop(mut self) -> anyhow::Result<()> {
        let id = i32::try_from(self.child.id())
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(id.context("its number")?, rustix::process::Signal::TERM)
            .context("asking the process to end")?;
        let ended = self.child.wait().context("waiting for the end of the process")?;
        ensure!(ended.success(), "the process has ended with {ended}");
        Ok(())
    }
}

/// Looks every few milliseconds whether something is so.
pub(crate) fn wait_until(
    what: &str,
    patience: Duration,
    mut is_so: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let began = Instant::now();
    while !is_so()? {
        ensure!(began.elapsed() < patience, "waited in vain until {what}");
        std::thread::park_timeout(Duration::from_millis(10));
    }
    Ok(())
}
