//! A Redis that belongs to one test, on 127.0.0.1 and without persistence. A restart empties it, which our services must
//! survive.
//!
//! Most tests share the Redis of `cargo xtask services up` with unique key prefixes. A test that flushes, kills or freezes
//! Redis starts its own. Needs `redis-server` in the PATH.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::certificates::{Signed, write};
use crate::daemon::Daemon;
use crate::free_port;
use crate::process::Process;
use crate::scratch::Scratch;

/// Redis normally takes milliseconds, but may have to start while the machine is compiling.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// A shutdown that takes longer hangs.
const STOP_DEADLINE: Duration = Duration::from_secs(30);

/// One Redis; see the module.
#[derive(Debug)]
pub struct LocalRedis {
    port: u16,
    directory: PathBuf,
    own_group: bool,
    tls_port: Option<u16>,
    /// Further options.
    flags: Vec<String>,
    // Before `scratch`, so that the server is dead when its directory is removed.
    process: Option<Process>,
    scratch: Option<Scratch>,
}

impl LocalRedis {
    /// Starts a new, empty Redis.
    ///
    /// # Errors
    /// If it cannot be started; the error contains the end of its log.
    pub fn start() -> Result<Self> {
        let scratch = Scratch::new("redis")?;
        let directory = scratch.path().to_owned();
        Self::create(directory, false, Some(scratch))
    }

    /// Starts a Redis that keeps running after this program, with its log in `directory`.
    ///
    /// # Errors
    /// As [`LocalRedis::start`].
    pub fn start_daemon(directory: &Path) -> Result<Daemon> {
        std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
        let mut redis = Self::create(directory.to_owned(), true, None)?;
        let address = redis.url();
        let process = redis
            .process
            .take()
            .context("the Redis that just started")?
            .leave_running();
        Ok(Daemon {
            process,
            address,
            directory: directory.to_owned(),
        })
    }

    /// As [`LocalRedis::start`], with a second port for TLS with this certificate; see [`LocalRedis::tls_port`].
    ///
    /// # Errors
    /// As [`LocalRedis::start`].
    pub fn start_with_tls(signed: &Signed) -> Result<Self> {
        let scratch = Scratch::new("redis")?;
        let directory = scratch.path().to_owned();
        let files = [
            (
                "--tls-cert-file",
                write(directory.join("redis.crt"), &signed.certificate)?,
            ),
            ("--tls-key-file", write(directory.join("redis.key"), &signed.key)?),
        ];
        let port = free_port();
        let mut flags = vec!["--tls-port".to_owned(), port.to_string()];
        // Clients have no certificates.
        flags.extend(["--tls-auth-clients".to_owned(), "no".to_owned()]);
        for (flag, file) in files {
            flags.extend([flag.to_owned(), file.display().to_string()]);
        }
        let mut redis = Self {
            tls_port: Some(port),
            flags,
            ..Self::stopped(directory, false, Some(scratch))
        };
        redis.start_again()?;
        Ok(redis)
    }

    /// As [`LocalRedis::start`], with further options.
    pub(crate) fn start_with(flags: Vec<String>) -> Result<Self> {
        let scratch = Scratch::new("redis")?;
        let directory = scratch.path().to_owned();
        let mut redis = Self {
            flags,
            ..Self::stopped(directory, false, Some(scratch))
        };
        redis.start_again()?;
        Ok(redis)
    }

    /// The port on 127.0.0.1.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Sends a command whose reply is a status or a text, and returns it.
    ///
    /// # Errors
    /// If it does not reply, or with an error.
    pub(crate) fn ask(&self, command: &str) -> Result<String> {
        let reply = self.ask_for_bytes(command)?;
        String::from_utf8(reply).context("reading the reply to a command")
    }

    /// As [`LocalRedis::ask`], if the reply may have other texts than UTF-8.
    ///
    /// # Errors
    /// As [`LocalRedis::ask`].
    pub(crate) fn ask_for_bytes(&self, command: &str) -> Result<Vec<u8>> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let mut stream = connect(address)?;
        // With QUIT, the server closes the connection after its replies.
        let request = format!("{command}\r\nQUIT\r\n");
        stream
            .write_all(request.as_bytes())
            .context("sending a command")?;
        let mut reply = Vec::new();
        stream
            .read_to_end(&mut reply)
            .context("reading the reply to a command")?;
        ensure!(
            !reply.starts_with(b"-"),
            "the reply to `{command}` is {}",
            String::from_utf8_lossy(&reply)
        );
        Ok(reply)
    }

    fn create(directory: PathBuf, own_group: bool, scratch: Option<Scratch>) -> Result<Self> {
        let mut redis = Self::stopped(directory, own_group, scratch);
        redis.start_again()?;
        Ok(redis)
    }

    fn stopped(directory: PathBuf, own_group: bool, scratch: Option<Scratch>) -> Self {
        Self {
            port: free_port(),
            directory,
            own_group,
            tls_port: None,
            flags: Vec::new(),
            process: None,
            scratch,
        }
    }

    /// The port for TLS on 127.0.0.1, which does not change over restarts.
    ///
    /// # Panics
    /// If it was started without TLS.
    #[track_caller]
    pub fn tls_port(&self) -> u16 {
        self.tls_port.expect("it was started without TLS")
    }

    /// `redis://127.0.0.1:port`, which does not change over restarts.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The process of the server, to freeze it or read its log.
    ///
    /// # Panics
    /// If Redis is stopped.
    #[track_caller]
    pub fn process(&self) -> &Process {
        self.process.as_ref().expect("Redis is stopped")
    }

    /// Shuts it down gracefully. The port is kept, the data is not.
    ///
    /// # Errors
    /// If it is not running, or has not ended after half a minute.
    pub fn stop(&mut self) -> Result<()> {
        let mut process = self
            .process
            .take()
            .context("stopping Redis: it is stopped already")?;
        process.terminate();
        process.wait_until(STOP_DEADLINE)?;
        Ok(())
    }

    /// Kills it. The port is kept, the data is not.
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn kill_9(&mut self) {
        self.process.take().expect("Redis is stopped already").kill_9();
    }

    /// Starts it again, empty, on the same port, and waits until it serves clients.
    ///
    /// # Errors
    /// If it is running, or does not come up; the error contains the end of its log.
    pub fn start_again(&mut self) -> Result<()> {
        ensure!(self.process.is_none(), "starting Redis: it is running already");
        let mut command = Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--port", &self.port.to_string()]);
        command
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(&self.directory);
        command.args(&self.flags);
        if self.own_group {
            command.process_group(0);
        }
        let mut process = Process::spawn_logging_to(command, self.directory.join("redis.log"))
            .context("running `redis-server`; is it installed?")?;
        if let Some(scratch) = &self.scratch {
            scratch.set_user(process.id())?;
        }
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        process.wait_until_ready("Redis", START_DEADLINE, || ping(address))?;
        self.process = Some(process);
        Ok(())
    }

    /// [`LocalRedis::stop`], then [`LocalRedis::start_again`].
    ///
    /// # Errors
    /// If one of them fails.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start_again()
    }
}

/// Whether the Redis at `url` (`redis://127.0.0.1:port`) serves clients.
///
/// # Errors
/// If it does not, with the reason.
pub fn answers(url: &str) -> Result<()> {
    let address = url
        .strip_prefix("redis://")
        .and_then(|address| address.parse().ok());
    ping(address.with_context(|| format!("reading the address {url}"))?)
        .with_context(|| format!("asking Redis at {url}"))
}

fn connect(address: SocketAddr) -> Result<TcpStream> {
    let timeout = Duration::from_secs(2);
    let stream = TcpStream::connect_timeout(&address, timeout).context("connecting")?;
    stream
        .set_read_timeout(Some(timeout))
        .context("setting a read timeout")?;
    Ok(stream)
}

fn ping(address: SocketAddr) -> Result<()> {
    let mut stream = connect(address)?;
    stream.write_all(b"PING\r\n").context("sending PING")?;
    let mut answer = [0; 7];
    stream
        .read_exact(&mut answer)
        .context("reading the answer to PING")?;
    ensure!(
        &answer == b"+PONG\r\n",
        "the answer to PING is {:?}",
        String::from_utf8_lossy(&answer)
    );
    Ok(())
}
