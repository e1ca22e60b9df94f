//! The connection to Redis. It reconnects without limit, and serves commands only while Redis cannot evict keys.
//!
//! Redis can be configured to evict keys when its memory is full. A shard that loses one of its keys would continue with a
//! part of its jobs. So the policy is checked after every connect and once per second, and with any other than `noeviction`
//! all commands fail. The same check reads the memory usage.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fred::clients::WithOptions;
use fred::prelude::{
    Builder, Client, ClientLike as _, Config, Error, ErrorKind, EventInterface as _, Options,
    ReconnectPolicy, Server, Value,
};
use fred::types::config::{TlsConfig, TlsHostMapping};
use fred::types::{ConnectHandle, CustomCommand, InfoKind};
use fred::util::{redis_keyslot, sha1_hash};
use prometheus_client::metrics::gauge::Gauge;
use redeliver_runtime::config::{InvalidField, redact_url};
use redeliver_runtime::error_chain::error_chain;
use redeliver_runtime::tasks::Tasks;
use redeliver_runtime::tls::{client_builder, trusted_roots};
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::config::RedisConfig;
use crate::index::{IndexError, MemoryPressure, Usage};

/// The timeout of a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a new process waits for Redis before it continues without it.
const INITIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout of a connection attempt, including TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time between two checks of the connection, the policy and the memory.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// A connection without replies for this long is replaced by a new one.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(10);
/// The minimum and the maximum delay between two connection attempts, in ms.
const RECONNECT_DELAY_MS: (u32, u32) = (50, 2_000);

/// Redis cannot be used as an index.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The URL is invalid.
    #[error("redis.url ({url}) cannot be used: {problem}")]
    Url {
        /// The URL without its password.
        url: String,
        /// Why it is invalid.
        problem: String,
    },
    /// TLS cannot be set up.
    #[error("setting up TLS for Redis")]
    Tls(#[from] rustls::Error),
    /// The CA certificates cannot be read.
    #[error("redis.ca_file: {0}")]
    CaCertificates(String),
    /// Redis refuses the credentials or the connection.
    #[error("Redis refuses the connection: {0}")]
    Refused(String),
    /// Redis may evict keys.
    #[error(transparent)]
    Evicts(#[from] Evicts),
}

/// A Redis server that may evict keys when its memory is full.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Redis at {server} may evict jobs when its memory is full (maxmemory-policy is `{policy}`); run \
     `CONFIG SET maxmemory-policy noeviction`, and set the policy in the configuration of Redis"
)]
pub struct Evicts {
    /// The address of the server.
    pub server: String,
    /// Its `maxmemory-policy`.
    pub policy: String,
}

/// Whether Redis can be used.
#[derive(Clone, Debug)]
enum Availability {
    /// Not connected yet, with the reason.
    Disconnected(Arc<str>),
    /// Redis refuses the credentials.
    Refused(Arc<str>),
    Evicts(Evicts),
    Usable,
}

/// A Lua script.
#[derive(Debug)]
pub(super) struct Script {
    text: &'static str,
    sha: String,
}

impl Script {
    pub(super) fn new(text: &'static str) -> Self {
        Self {
            text,
            sha: sha1_hash(text),
        }
    }
}

/// A connection; clones share it. Commands are sent in the order of the calls, without waiting for earlier replies.
#[derive(Clone, Debug)]
pub(super) struct Connection {
    client: WithOptions<Client>,
    availability: watch::Receiver<Availability>,
    usage: watch::Receiver<Usage>,
    up: Gauge,
}

impl Connection {
    /// Connects, and stays connected while the tasks run. If Redis does not reply soon, it continues to connect in the
    /// background.
    pub(super) async fn open(config: &RedisConfig, tasks: &mut Tasks) -> Result<Self, ConnectError> {
        let client = client(config)?;
        let (sender, mut availability) =
            watch::channel(Availability::Disconnected("no connection yet".into()));
        let (usage_sender, usage) = watch::channel(Usage::default());
        let up = Gauge::default();
        let connection = Self {
            client: client.with_options(&Options {
                timeout: Some(COMMAND_TIMEOUT),
                // A command neither waits for a connection nor is sent again on the next one: its caller decides.
                fail_fast: true,
                ..Options::default()
            }),
            availability: availability.clone(),
            usage,
            up: up.clone(),
        };
        let task = ConnectionTask::new(client, sender, usage_sender, config.high_water, up);
        tasks.spawn_background("redis", task.run());
        let connected =
            availability.wait_for(|availability| !matches!(availability, Availability::Disconnected(_)));
        let connected = tokio::time::timeout(INITIAL_TIMEOUT, connected).await;
        match connected.map(|availability| availability.map(|availability| availability.clone())) {
            Ok(Ok(Availability::Refused(reason))) => Err(ConnectError::Refused(reason.to_string())),
            Ok(Ok(Availability::Evicts(evicts))) => Err(evicts.into()),
            _ => {
                if let Availability::Disconnected(reason) = &*connection.availability.borrow() {
                    tracing::warn!(
                        url = %config.url, reason = &**reason,
                        "Redis unavailable; connecting in the background"
                    );
                }
                Ok(connection)
            }
        }
    }

    /// Checks that Redis replies and can be used.
    pub(super) async fn ping(&self) -> Result<(), IndexError> {
        self.check_availability()?;
        self.client.ping::<Value>(None).await.map_err(unavailable)?;
        Ok(())
    }

    /// 1 while Redis replies, otherwise 0.
    pub(super) fn up(&self) -> Gauge {
        self.up.clone()
    }

    /// The memory usage of the fullest server.
    pub(super) fn usage(&self) -> Usage {
        *self.usage.borrow()
    }

    /// Runs a script that returns an array.
    pub(super) async fn run(
        &self,
        script: &Script,
        keys: Vec<Value>,
        arguments: Vec<Value>,
    ) -> Result<Vec<Value>, IndexError> {
        self.check_availability()?;
        let slot = redis_keyslot(keys.first().and_then(Value::as_bytes).unwrap_or_default());
        let count = i64::try_from(keys.len()).unwrap_or(i64::MAX);
        let mut words = vec![Value::from(script.sha.as_str()), count.into()];
        words.extend(keys);
        words.extend(arguments);
        let answer = match self.call("EVALSHA", slot, words.clone()).await {
            // Redis has restarted, or its scripts were flushed. EVAL caches the script again.
            Err(error) if error.details().starts_with("NOSCRIPT") => {
                words[0] = script.text.into();
                self.call("EVAL", slot, words).await
            }
            answer => answer,
        };
        match answer.map_err(refused)? {
            Value::Array(values) => Ok(values),
            other => Err(IndexError::Unavailable(format!(
                "unexpected reply of a script: expected an array, found {:?}",
                other.kind()
            ))),
        }
    }

    /// A custom command, because the client's functions for scripts ignore the options.
    async fn call(&self, command: &'static str, slot: u16, words: Vec<Value>) -> Result<Value, Error> {
        let command = CustomCommand::new_static(command, slot, false);
        self.client.custom(command, words).await
    }

    fn check_availability(&self) -> Result<(), IndexError> {
        match &*self.availability.borrow() {
            Availability::Usable => Ok(()),
            Availability::Disconnected(reason) | Availability::Refused(reason) => {
                Err(IndexError::Unavailable(reason.to_string()))
            }
            Availability::Evicts(evicts) => Err(IndexError::Unavailable(evicts.to_string())),
        }
    }
}

fn refused(error: Error) -> IndexError {
    if error.details().starts_with("OOM") {
        return IndexError::Full(describe(&error));
    }
    unavailable(error)
}

#[expect(clippy::needless_pass_by_value, reason = "map_err passes it by value")]
fn unavailable(error: Error) -> IndexError {
    IndexError::Unavailable(describe(&error))
}

impl From<ConnectError> for InvalidField {
    fn from(error: ConnectError) -> Self {
        let (field, problem) = match error {
            ConnectError::Url { url, problem } => ("redis.url", format!("{url} cannot be used: {problem}")),
            ConnectError::CaCertificates(problem) => ("redis.ca_file", problem),
            error => ("redis", error_chain(&error)),
        };
        Self {
            field: field.to_owned(),
            problem,
            place: None,
        }
    }
}

/// Checks the settings without connecting.
pub(super) fn check(config: &RedisConfig) -> Result<(), ConnectError> {
    client(config).map(drop)
}

/// The text of an error. Errors of the server contain their kind.
fn describe(error: &Error) -> String {
    // The client library keeps no more of a failed handshake than this text.
    if let Some((_, reason)) = error.details().split_once("InvalidCertificate(") {
        return format!(
            "the certificate of Redis is not trusted ({}); set redis.ca_file to a PEM file with its CA certificate",
            reason.trim_end_matches([')', '}', ' '])
        );
    }
    match error.kind() {
        ErrorKind::Unknown => error.details().to_owned(),
        _ => error.to_string(),
    }
}

fn client(config: &RedisConfig) -> Result<Client, ConnectError> {
    let invalid = |problem: String| ConnectError::Url {
        url: redact_url(config.url.expose()),
        problem,
    };
    let url = config.url.expose();
    let (scheme, rest) = url
        .split_once("://")
        .ok_or_else(|| invalid("it has no scheme".to_owned()))?;
    // The client library fails if it cannot parse every certificate of the system, and needs a process-wide crypto provider.
    // So TLS is set up here.
    let plain_scheme = scheme.replacen("rediss", "redis", 1);
    let mut settings =
        Config::from_url(&format!("{plain_scheme}://{rest}")).map_err(|error| invalid(describe(&error)))?;
    if plain_scheme != scheme {
        settings.tls = Some(TlsConfig {
            connector: tls(config.ca_file.as_deref())?.into(),
            // A cluster announces its nodes by address, but their certificates contain the host name of the URL.
            hostnames: TlsHostMapping::DefaultHost,
        });
    }
    settings.fail_fast = false;
    let (shortest, longest) = RECONNECT_DELAY_MS;
    let mut policy = ReconnectPolicy::new_exponential(0, shortest, longest, 2);
    policy.set_jitter(shortest);
    Builder::from_config(settings)
        .with_connection_config(|connection| {
            connection.connection_timeout = CONNECT_TIMEOUT;
            connection.internal_command_timeout = COMMAND_TIMEOUT;
            connection.tcp.nodelay = Some(true);
        })
        .set_policy(policy)
        .build()
        .map_err(|error| invalid(describe(&error)))
}

fn tls(ca_file: Option<&Path>) -> Result<rustls::ClientConfig, ConnectError> {
    let roots = trusted_roots(ca_file).map_err(ConnectError::CaCertificates)?;
    Ok(client_builder()?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

/// Maintains the connection while it is in use.
struct ConnectionTask {
    client: Client,
    availability: watch::Sender<Availability>,
    usage: watch::Sender<Usage>,
    /// The share of the memory from which on the memory pressure is high.
    high_water: f64,
    /// See [`Connection::up`].
    up: Gauge,
    /// The last problem that was logged.
    logged: Option<String>,
    logged_unknown_policy: bool,
}

/// The task of the client, which is aborted on drop.
struct ClientTask(ConnectHandle);

impl Drop for ClientTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ConnectionTask {
    fn new(
        client: Client,
        availability: watch::Sender<Availability>,
        usage: watch::Sender<Usage>,
        high_water: f64,
        up: Gauge,
    ) -> Self {
        Self {
            client,
            availability,
            usage,
            high_water,
            up,
            logged: None,
            logged_unknown_policy: false,
        }
    }

    async fn run(mut self) -> Result<(), std::convert::Infallible> {
        let (mut connected, mut errors) = (self.client.reconnect_rx(), self.client.error_rx());
        let mut client_task = ClientTask(self.client.connect());
        let mut check = tokio::time::interval(CHECK_INTERVAL);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_reply = Instant::now();
        loop {
            tokio::select! {
                () = self.availability.closed() => return Ok(()),
                server = connected.recv() => {
                    // After a lag, events are lost, so there may be a new connection as well.
                    if !matches!(server, Err(broadcast::error::RecvError::Closed)) {
                        self.inspect().await;
                        last_reply = Instant::now();
                    }
                }
                error = errors.recv() => {
                    if let Ok((error, server)) = error {
                        self.record_error(&error, server.as_ref());
                    }
                }
                _ = check.tick() => {
                    if self.is_silent(&mut last_reply).await {
                        tracing::warn!("no reply from Redis for {} s; reconnecting", SILENCE_TIMEOUT.as_secs());
                        client_task = ClientTask(self.client.connect());
                        last_reply = Instant::now();
                    }
                }
                ended = &mut client_task.0 => {
                    let reason = match ended {
                        Ok(Ok(())) => "closed".to_owned(),
                        Ok(Err(error)) => describe(&error),
                        // Only the runtime cancels it, when the process ends.
                        Err(error) if error.is_cancelled() => return Ok(()),
                        Err(error) => error.to_string(),
                    };
                    tracing::warn!(reason, "connection to Redis ended; reconnecting");
                    tokio::time::sleep(CHECK_INTERVAL).await;
                    client_task = ClientTask(self.client.connect());
                }
            }
        }
    }

    /// Whether an open connection has been without replies for too long. The client does not detect by itself that a frozen
    /// server accepts no data.
    async fn is_silent(&mut self, last_reply: &mut Instant) -> bool {
        if !self.client.is_connected() {
            self.up.set(0);
            *last_reply = Instant::now();
            return false;
        }
        self.inspect().await;
        let options = Options {
            timeout: Some(COMMAND_TIMEOUT),
            fail_fast: true,
            ..Options::default()
        };
        match self.client.with_options(&options).ping::<Value>(None).await {
            Err(error) if *error.kind() == ErrorKind::Timeout => {
                self.up.set(0);
                last_reply.elapsed() > SILENCE_TIMEOUT
            }
            _ => {
                *last_reply = Instant::now();
                false
            }
        }
    }

    fn record_error(&mut self, error: &Error, server: Option<&Server>) {
        self.up.set(0);
        let problem = describe(error);
        if self.logged.as_ref() != Some(&problem) {
            let server = server.map(ToString::to_string);
            tracing::warn!(server, problem, "Redis unavailable; reconnecting");
        }
        let is_refused = *error.kind() == ErrorKind::Auth;
        self.availability
            .send_if_modified(|availability| match availability {
                Availability::Disconnected(_) | Availability::Refused(_) => {
                    let reason = problem.as_str().into();
                    *availability = if is_refused {
                        Availability::Refused(reason)
                    } else {
                        Availability::Disconnected(reason)
                    };
                    true
                }
                Availability::Evicts(_) | Availability::Usable => false,
            });
        self.logged = Some(problem);
    }

    /// Reads the policy and the memory usage of each server, and allows or blocks commands.
    async fn inspect(&mut self) {
        let mut evicts = None;
        let mut fullest: Option<f64> = None;
        for server in self.client.active_connections() {
            let memory = self.memory_of(&server).await;
            if let Ok(Memory { used: Some(used), .. }) = &memory {
                fullest = Some(fullest.map_or(*used, |other| other.max(*used)));
            }
            match memory.map(|memory| memory.policy) {
                Ok(Policy::NoEviction) => {}
                Ok(Policy::Evicts(policy)) => {
                    evicts = Some(Evicts {
                        server: server.to_string(),
                        policy,
                    });
                }
                Ok(Policy::Unknown) if self.logged_unknown_policy => {}
                Ok(Policy::Unknown) => {
                    self.logged_unknown_policy = true;
                    tracing::warn!(
                        %server,
                        "cannot read maxmemory-policy of Redis; make sure that it is noeviction"
                    );
                }
                // The connection is lost. The next one is checked again.
                Err(error) => return self.record_error(&error, Some(&server)),
            }
        }
        self.up.set(1);
        self.usage.send_replace(usage(fullest, self.high_water));
        match evicts {
            Some(evicts) => {
                let text = evicts.to_string();
                if self.logged.as_ref() != Some(&text) {
                    tracing::error!("{text}");
                }
                self.logged = Some(text);
                self.availability.send_replace(Availability::Evicts(evicts));
            }
            None => {
                if self.logged.take().is_some() {
                    tracing::info!("Redis available again");
                }
                self.availability.send_replace(Availability::Usable);
            }
        }
    }

    async fn memory_of(&self, server: &Server) -> Result<Memory, Error> {
        let options = Options {
            timeout: Some(COMMAND_TIMEOUT),
            cluster_node: self.client.is_clustered().then(|| server.clone()),
            ..Options::default()
        };
        let client = self.client.with_options(&options);
        match client.info::<String>(Some(InfoKind::Memory)).await {
            Ok(text) => Ok(Memory::read(&text)),
            // The server replied, so it refuses this command, as some managed services do.
            Err(error) if matches!(error.kind(), ErrorKind::Unknown | ErrorKind::InvalidCommand) => {
                Ok(Memory {
                    policy: Policy::Unknown,
                    used: None,
                })
            }
            Err(error) => Err(error),
        }
    }
}

/// The eviction policy of a server.
#[derive(Debug, PartialEq, Eq)]
enum Policy {
    NoEviction,
    Evicts(String),
    Unknown,
}

/// The result of `INFO memory`, which more servers support than `CONFIG GET`.
#[derive(Debug, PartialEq)]
struct Memory {
    policy: Policy,
    /// The share of `maxmemory` in use; `None` without a limit.
    used: Option<f64>,
}

impl Memory {
    fn read(info: &str) -> Self {
        let field = |name: &str| {
            info.lines().find_map(|line| {
                let (found, value) = line.split_once(':')?;
                (found == name).then(|| value.trim())
            })
        };
        let policy = match (field("maxmemory"), field("maxmemory_policy")) {
            (Some("0"), _) | (_, Some("noeviction")) => Policy::NoEviction,
            (Some(_), Some(policy)) => Policy::Evicts(policy.to_owned()),
            _ => Policy::Unknown,
        };
        let number = |name| field(name).and_then(|value| value.parse::<f64>().ok());
        let limit = number("maxmemory").filter(|limit| *limit > 0.0);
        Self {
            policy,
            used: number("used_memory").zip(limit).map(|(used, limit)| used / limit),
        }
    }
}

fn usage(share: Option<f64>, high_water: f64) -> Usage {
    let pressure = match share {
        Some(share) if share >= 1.0 => MemoryPressure::Full,
        Some(share) if share >= high_water => MemoryPressure::High,
        _ => MemoryPressure::Low,
    };
    Usage { pressure, share }
}

#[cfg(test)]
mod tests {
    use redeliver_runtime::config::Url;

    use super::*;

    fn config(url: &str) -> RedisConfig {
        RedisConfig {
            url: Url::new(url),
            ..RedisConfig::default()
        }
    }

    #[test]
    fn every_kind_of_url_is_accepted() {
        for (url, has_tls) in [
            ("redis://localhost:6379", false),
            ("rediss://user:pw%40x@redis.example:6380/2", true),
            ("redis-cluster://a:1?node=b:2", false),
            ("rediss-cluster://:pw@a:1", true),
            (
                "redis-sentinel://a:26379?sentinelServiceName=main&node=b:26379",
                false,
            ),
            ("rediss-sentinel://a:26379?sentinelServiceName=main", true),
        ] {
            let client = client(&config(url)).unwrap();
            assert_eq!(client.client_config().uses_tls(), has_tls, "{url}");
        }
        let client = client(&config("rediss://user:pw%40x@redis.example:6380/2")).unwrap();
        let settings = client.client_config();
        assert_eq!(settings.password.as_deref(), Some("pw@x"));
        assert_eq!(
            (settings.username.as_deref(), settings.database),
            (Some("user"), Some(2))
        );
        assert_eq!(settings.server.hosts(), [Server::new("redis.example", 6380)]);
    }

    #[test]
    fn invalid_url_hides_its_password() {
        for url in [
            "redis://:hunter2@",
            "redis://:hunter2@localhost:port",
            "redis-sentinel://:hunter2@localhost:1",
        ] {
            let error = client(&config(url)).unwrap_err().to_string();
            assert!(
                error.contains(":redacted@") && !error.contains("hunter2"),
                "{error}"
            );
        }
    }

    #[test]
    fn unreadable_ca_certificates_are_reported() {
        let directory = redeliver_testkit::scratch::Scratch::new("ca-certificates").unwrap();
        let empty = directory.path().join("empty.pem");
        std::fs::write(&empty, "nothing\n").unwrap();
        let missing = directory.path().join("missing.pem");
        for (expected, path) in [
            (
                format!("redis.ca_file: {} contains no PEM certificate", empty.display()),
                empty,
            ),
            (
                format!("redis.ca_file: cannot read {}: ", missing.display()),
                missing,
            ),
        ] {
            let config = RedisConfig {
                ca_file: Some(path),
                ..config("rediss://localhost:6379")
            };
            let error = client(&config).unwrap_err().to_string();
            assert!(error.starts_with(&expected), "{error}");
        }
    }

    #[test]
    fn only_evicting_server_is_refused() {
        let read = |memory, policy| {
            let info =
                format!("# Memory\r\nused_memory:50\r\nmaxmemory:{memory}\r\nmaxmemory_policy:{policy}\r\n");
            let Memory { policy, used } = Memory::read(&info);
            (policy, used)
        };
        assert_eq!(read("0", "allkeys-lru"), (Policy::NoEviction, None));
        assert_eq!(read("100", "noeviction"), (Policy::NoEviction, Some(0.5)));
        let evicts = Policy::Evicts("allkeys-lru".to_owned());
        assert_eq!(read("100", "allkeys-lru"), (evicts, Some(0.5)));
        assert_eq!(Memory::read("# Memory\r\n").policy, Policy::Unknown);
    }

    #[test]
    fn pressure_is_high_from_the_mark() {
        let pressure = |share| usage(share, 0.9).pressure;
        assert_eq!(pressure(None), MemoryPressure::Low);
        assert_eq!(pressure(Some(0.89)), MemoryPressure::Low);
        assert_eq!(pressure(Some(0.9)), MemoryPressure::High);
        assert_eq!(pressure(Some(1.0)), MemoryPressure::Full);
    }
}
