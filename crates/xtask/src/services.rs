//! `cargo xtask services up|down|status`: the Kafka and the Redis that tests use.
//!
//! An address in the environment is used as it is. Else docker compose runs the servers if an engine
//! answers. Else they run as processes of this machine, with their data under the target directory.
//! What was started is noted in a file there, so that `up` is idempotent and `down` finds it.

use std::fs::File;
use std::net::{TcpStream, ToSocketAddrs as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Subcommand;
use redeliver_testkit::addresses::given;
use redeliver_testkit::services_file::{Server, ServicesFile};
use redeliver_testkit::{Addresses, LocalKafka, LocalRedis, local_kafka, local_redis};

use crate::interrupt::Interrupt;
use crate::{compose, packages};

/// What to do with the services.
#[derive(Clone, Copy, Subcommand)]
pub(crate) enum Verb {
    /// Start what is not running yet, and print the addresses
    Up,
    /// Stop what `up` started, and remove its data
    Down,
    /// Show what is running and whether it answers; exit code 1 if something is not
    Status,
}

/// One of the two services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    Kafka,
    Redis,
}

/// What `up` did.
pub(crate) struct Up {
    pub(crate) addresses: Addresses,
    /// The services that were not running before.
    pub(crate) started: Vec<Service>,
}

pub(crate) fn run(verb: &Verb) -> Result<ExitCode> {
    match verb {
        Verb::Up => {
            let interrupt = Interrupt::install()?;
            let up = up()?;
            if interrupt.is_raised() {
                down(&up.started)?;
            } else {
                println!("{}={}", Service::Kafka.variable(), up.addresses.brokers);
                println!("{}={}", Service::Redis.variable(), up.addresses.redis_url);
            }
            Ok(interrupt.exit_code(ExitCode::SUCCESS))
        }
        Verb::Down => {
            down(&Service::ALL)?;
            println!("down");
            Ok(ExitCode::SUCCESS)
        }
        Verb::Status => status(),
    }
}

/// Brings up both services, or neither: what was started goes down again when the other one fails.
pub(crate) fn up() -> Result<Up> {
    let lock = lock()?;
    let mut started = Vec::new();
    let kafka = Service::Kafka.up(&mut started);
    let both = kafka.and_then(|brokers| Ok((brokers, Service::Redis.up(&mut started)?)));
    drop(lock);
    match both {
        Ok((brokers, redis_url)) => Ok(Up {
            addresses: Addresses { brokers, redis_url },
            started,
        }),
        Err(error) => {
            down(&started).context("cleaning up after a failed start")?;
            Err(error)
        }
    }
}

/// Stops these services, as far as they are ours and running.
pub(crate) fn down(services: &[Service]) -> Result<()> {
    let _lock = lock()?;
    services.iter().try_for_each(|service| service.down())
}

fn status() -> Result<ExitCode> {
    let file = ServicesFile::load()?;
    let mut code = ExitCode::SUCCESS;
    for service in Service::ALL {
        let (address, runner) = match (given(service.variable()), service.entry(&file)) {
            (Some(address), _) => (address, "given by the environment".to_owned()),
            (None, Some(server)) => (server.address().to_owned(), runner(server)),
            (None, None) => {
                println!("{service:?}: down");
                code = ExitCode::FAILURE;
                continue;
            }
        };
        match service.answers(&address) {
            Ok(()) => println!("{service:?}: up at {address} ({runner})"),
            Err(error) => {
                println!("{service:?}: does not answer at {address} ({runner}): {error:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

fn runner(server: &Server) -> String {
    match server {
        Server::Native(daemon) => {
            format!(
                "process {}, {}",
                daemon.process.number(),
                daemon.directory.display()
            )
        }
        Server::Compose { .. } => "docker compose".to_owned(),
    }
}

impl Service {
    pub(crate) const ALL: [Self; 2] = [Self::Kafka, Self::Redis];

    /// The environment variable with its address.
    pub(crate) fn variable(self) -> &'static str {
        match self {
            Self::Kafka => "KAFKA_BROKERS",
            Self::Redis => "REDIS_URL",
        }
    }

    /// Its name in file names and in `docker-compose.yml`.
    fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::Redis => "redis",
        }
    }

    fn entry(self, file: &ServicesFile) -> Option<&Server> {
        match self {
            Self::Kafka => file.kafka.as_ref(),
            Self::Redis => file.redis.as_ref(),
        }
    }

    /// Notes what runs it now.
    fn record(self, server: Option<Server>) -> Result<()> {
        let mut file = ServicesFile::load()?;
        match self {
            Self::Kafka => file.kafka = server,
            Self::Redis => file.redis = server,
        }
        file.save()
    }

    /// Makes sure that it runs, and returns its address.
    fn up(self, started: &mut Vec<Self>) -> Result<String> {
        if let Some(address) = given(self.variable()) {
            self.answers(&address)
                .with_context(|| format!("{} is set, but", self.variable()))?;
            return Ok(address);
        }
        if let Some(server) = self.entry(&ServicesFile::load()?) {
            if self.answers(server.address()).is_ok() {
                return Ok(server.address().to_owned());
            }
            eprintln!("{self:?} does not answer any more; starting another");
            self.down()?;
        }
        let server = self.start()?;
        let address = server.address().to_owned();
        self.record(Some(server))?;
        started.push(self);
        Ok(address)
    }

    fn start(self) -> Result<Server> {
        let workspace = workspace();
        if compose::is_available(workspace) {
            let address = match self {
                Self::Kafka => compose::up(workspace, self.name(), 9092)?,
                Self::Redis => format!("redis://{}", compose::up(workspace, self.name(), 6379)?),
            };
            return Ok(Server::Compose { address });
        }
        packages::ensure_installed(packages::SERVERS)?;
        let directory = ServicesFile::directory()?.join(self.name());
        // A former start may have been killed before it could note itself.
        if directory.exists() {
            std::fs::remove_dir_all(&directory)
                .with_context(|| format!("removing {}", directory.display()))?;
        }
        Ok(Server::Native(match self {
            Self::Kafka => LocalKafka::start_daemon(&directory)?,
            Self::Redis => LocalRedis::start_daemon(&directory)?,
        }))
    }

    fn down(self) -> Result<()> {
        match self.entry(&ServicesFile::load()?) {
            None => return Ok(()),
            Some(Server::Native(daemon)) => daemon.remove(),
            Some(Server::Compose { .. }) => compose::down(workspace(), self.name()),
        }
        .with_context(|| format!("stopping {self:?}"))?;
        self.record(None)
    }

    /// Whether it serves clients. Of an address that is not of our own making, which may want TLS or a
    /// password, only the port is tried.
    fn answers(self, address: &str) -> Result<()> {
        if given(self.variable()).is_some() {
            return connects(address);
        }
        match self {
            Self::Kafka => local_kafka::answers(address),
            Self::Redis => local_redis::answers(address),
        }
    }
}

/// Connects to one of several `host:port` with commas between them, or to the host of a URL.
fn connects(addresses: &str) -> Result<()> {
    let mut failure = anyhow::anyhow!("it has no address in it: {addresses:?}");
    for address in addresses.split(',') {
        let host = host_and_port(address);
        let found = host
            .to_socket_addrs()
            .with_context(|| format!("looking up {host}"));
        let connected = found.and_then(|found| {
            let all: Vec<_> = found.collect();
            let connect = |address| TcpStream::connect_timeout(address, Duration::from_secs(3)).is_ok();
            anyhow::ensure!(all.iter().any(connect), "nobody listens at {host}");
            Ok(())
        });
        match connected {
            Ok(()) => return Ok(()),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// `host:port` out of a URL such as `rediss://user:password@host:port/0`, or out of itself.
fn host_and_port(address: &str) -> String {
    let rest = address.trim();
    let rest = rest.split_once("://").map_or(rest, |(_, rest)| rest);
    let rest = rest.split(['/', '?']).next().unwrap_or(rest);
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let has_port = host
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if has_port {
        host.to_owned()
    } else {
        format!("{host}:6379")
    }
}

/// One `up` or `down` at a time on a target directory.
fn lock() -> Result<File> {
    let directory = ServicesFile::directory()?;
    std::fs::create_dir_all(&directory).with_context(|| format!("making {}", directory.display()))?;
    let path = directory.join("services.lock");
    let file = File::create(&path).with_context(|| format!("making {}", path.display()))?;
    file.lock()
        .with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

/// The workspace's root.
fn workspace() -> &'static Path {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    crates.and_then(Path::parent).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_found_in_every_form_of_address() {
        for (address, host) in [
            ("127.0.0.1:9092", "127.0.0.1:9092"),
            ("redis://127.0.0.1:7000/2", "127.0.0.1:7000"),
            ("rediss://user:p@ss@cache.example?x=1", "cache.example:6379"),
            (" [::1]:9092 ", "[::1]:9092"),
        ] {
            assert_eq!(host_and_port(address), host);
        }
    }
}
