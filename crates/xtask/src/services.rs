//! `cargo xtask services up|down|status`: the Kafka and the Redis that the tests use.
//!
//! A server whose address is in the environment is used as it is. Otherwise Docker Compose runs the servers,
//! or, without Docker, they run as local processes with their data in the target directory. A file there
//! records the started processes, so that `up` is idempotent and `down` finds it.

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

#[derive(Clone, Copy, Subcommand)]
pub(crate) enum Verb {
    /// Start the services that are not running and print their addresses
    Up,
    /// Stop the services that `up` started and remove their data
    Down,
    /// Show the state of the services; exits with status 1 if one is not available
    Status,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    Kafka,
    Redis,
}

pub(crate) struct Up {
    pub(crate) addresses: Addresses,
    /// Services that were not running before.
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
            println!("services stopped");
            Ok(ExitCode::SUCCESS)
        }
        Verb::Status => status(),
    }
}

/// Starts both services or none: if one fails, the other is stopped again.
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
            down(&started).context("stopping services after a failed start")?;
            Err(error)
        }
    }
}

/// Stops the services that were started by `up`.
pub(crate) fn down(services: &[Service]) -> Result<()> {
    let _lock = lock()?;
    services.iter().try_for_each(|service| service.down())
}

fn status() -> Result<ExitCode> {
    let file = ServicesFile::load()?;
    let mut code = ExitCode::SUCCESS;
    for service in Service::ALL {
        let (address, runner) = match (given(service.variable()), service.entry(&file)) {
            (Some(address), _) => (address, format!("from {}", service.variable())),
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
                println!("{service:?}: unavailable at {address} ({runner}): {error:#}");
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

    /// The environment variable with the address.
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

    fn record(self, server: Option<Server>) -> Result<()> {
        let mut file = ServicesFile::load()?;
        match self {
            Self::Kafka => file.kafka = server,
            Self::Redis => file.redis = server,
        }
        file.save()
    }

    /// Starts the service if it is not running, and returns its address.
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
            eprintln!("{self:?} is unavailable; restarting it");
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
        // A previous start may have been killed before it was recorded.
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

    /// Checks that the service is available. For an address from the environment, which may require TLS or a password, only
    /// the port is checked.
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

/// Connects to one of several comma-separated `host:port`, or to the host of a URL.
fn connects(addresses: &str) -> Result<()> {
    let mut failure = anyhow::anyhow!("{addresses:?} contains no address");
    for address in addresses.split(',') {
        let host = host_and_port(address);
        let found = host
            .to_socket_addrs()
            .with_context(|| format!("looking up {host}"));
        let connected = found.and_then(|found| {
            let all: Vec<_> = found.collect();
            let connect = |address| TcpStream::connect_timeout(address, Duration::from_secs(3)).is_ok();
            anyhow::ensure!(all.iter().any(connect), "cannot connect to {host}");
            Ok(())
        });
        match connected {
            Ok(()) => return Ok(()),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// The `host:port` of a URL such as `rediss://user:password@host:port/0`, or of a plain `host:port`.
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

/// Prevents concurrent `up` and `down` in a target directory.
pub(crate) fn lock() -> Result<File> {
    let directory = ServicesFile::directory()?;
    std::fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    let path = directory.join("services.lock");
    let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    file.lock()
        .with_context(|| format!("locking {}", path.display()))?;
    Ok(file)
}

fn workspace() -> &'static Path {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    crates.and_then(Path::parent).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_all_forms_are_parsed() {
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
