//! The connection to Redis: made again for ever, and used only while nothing can be evicted.
//!
//! Redis may be configured to throw keys away when its memory is full. A shard that loses one of its keys would
//! go on with a part of its jobs, so after every new connection, and now and then, the policy is looked at, and with
//! any but `noeviction` nothing is asked and nothing is written. The same look tells how much of the memory is used.

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
use redeliver_runtime::config::{Problem, RedisConfig, redact_url};
use redeliver_runtime::error_chain::error_chain;
use redeliver_runtime::tasks::Tasks;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, MissedTickBehavior};

use crate::index::{IndexError, Room, Usage};

/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(3);
/// How long a new process waits for Redis before it goes on without.
const FIRST_ANSWER: Duration = Duration::from_secs(5);
/// How long a connection attempt may take, TLS included.
const CONNECT: Duration = Duration::from_secs(5);
/// Between two looks at the connection, the policy and the memory.
const BEAT: Duration = Duration::from_secs(1);
/// A connection on which nothing was answered for this long is given up for a new one.
const DEAF: Duration = Duration::from_secs(10);
/// The shortest and the longest pause between two attempts to connect, in ms.
const PAUSE_MS: (u32, u32) = (50, 2_000);

/// Redis cannot be used as an index.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The URL is not one of a Redis.
    #[error("redis.url ({url}) cannot be used: {problem}")]
    Url {
        /// The URL without its password.
        url: String,
        /// What is wrong with it.
        problem: String,
    },
    /// TLS cannot be set up.
    #[error("setting up TLS for Redis")]
    Tls(#[from] rustls::Error),
    /// The authorities that are to be trusted cannot be read.
    #[error("redis.ca_file ({path}): {problem}")]
    Authorities {
        /// The file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Redis does not let us in.
    #[error("Redis refuses the connection: {0}")]
    Refused(String),
    /// Redis may throw keys away.
    #[error(transparent)]
    Evicts(#[from] Evicts),
}

/// A Redis that may throw keys away when its memory is full.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Redis at {server} may throw jobs away when its memory is full (maxmemory-policy is `{policy}`); set it with \
     `CONFIG SET maxmemory-policy noeviction` and in the configuration of Redis"
)]
pub struct Evicts {
    /// Which server.
    pub server: String,
    /// Its policy.
    pub policy: String,
}

/// What is known of Redis.
#[derive(Clone, Debug)]
enum Standing {
    /// There has not been a connection yet; why not.
    Unknown(Arc<str>),
    /// It does not let us in.
    Refused(Arc<str>),
    Evicts(Evicts),
    Sound,
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

/// A connection; clones share it. Commands are sent in the order in which they are given, without waiting for
/// the answers of others.
#[derive(Clone, Debug)]
pub(super) struct Connection {
    client: WithOptions<Client>,
    standing: watch::Receiver<Standing>,
    usage: watch::Receiver<Usage>,
}

impl Connection {
    /// Connects, and stays connected as long as the tasks run. When Redis does not answer soon, it goes on
    /// without.
    pub(super) async fn open(config: &RedisConfig, tasks: &mut Tasks) -> Result<Self, ConnectError> {
        let client = client(config)?;
        let (sender, mut standing) = watch::channel(Standing::Unknown("no connection yet".into()));
        let (usage_sender, usage) = watch::channel(Usage::default());
        let connection = Self {
            client: client.with_options(&Options {
                timeout: Some(ANSWER),
                // Neither waits for a connection, nor is sent again on the next one: its caller decides.
                fail_fast: true,
                ..Options::default()
            }),
            standing: standing.clone(),
            usage,
        };
        let attendant = Attendant::new(client, sender, usage_sender, config.high_water);
        tasks.spawn_attendant("redis", attendant.run());
        let known = standing.wait_for(|standing| !matches!(standing, Standing::Unknown(_)));
        let known = tokio::time::timeout(FIRST_ANSWER, known).await;
        match known.map(|known| known.map(|known| known.clone())) {
            Ok(Ok(Standing::Refused(reason))) => Err(ConnectError::Refused(reason.to_string())),
            Ok(Ok(Standing::Evicts(evicts))) => Err(evicts.into()),
            _ => {
                if let Standing::Unknown(reason) = &*connection.standing.borrow() {
                    tracing::warn!(
                        url = %config.url, reason = &**reason,
                        "Redis does not answer; connecting goes on in the background"
                    );
                }
                Ok(connection)
            }
        }
    }

    /// Whether Redis answers and can be used.
    pub(super) async fn ping(&self) -> Result<(), IndexError> {
        self.check_standing()?;
        self.client.ping::<Value>(None).await.map_err(unavailable)?;
        Ok(())
    }

    /// How much of the memory is used: of the fullest server.
    pub(super) fn usage(&self) -> Usage {
        *self.usage.borrow()
    }

    /// Runs a script, which gives an array.
    pub(super) async fn run(
        &self,
        script: &Script,
        keys: Vec<Value>,
        arguments: Vec<Value>,
    ) -> Result<Vec<Value>, IndexError> {
        self.check_standing()?;
        let slot = redis_keyslot(keys.first().and_then(Value::as_bytes).unwrap_or_default());
        let count = i64::try_from(keys.len()).unwrap_or(i64::MAX);
        let mut words = vec![Value::from(script.sha.as_str()), count.into()];
        words.extend(keys);
        words.extend(arguments);
        let answer = match self.call("EVALSHA", slot, words.clone()).await {
            // A Redis that was started anew, or whose scripts were flushed; this keeps the script, too.
            Err(error) if error.details().starts_with("NOSCRIPT") => {
                words[0] = script.text.into();
                self.call("EVAL", slot, words).await
            }
            answer => answer,
        };
        match answer.map_err(refused)? {
            Value::Array(values) => Ok(values),
            other => Err(IndexError::Unavailable(format!(
                "a script gave no array, but {:?}",
                other.kind()
            ))),
        }
    }

    /// The client's own functions for scripts know nothing of the options.
    async fn call(&self, command: &'static str, slot: u16, words: Vec<Value>) -> Result<Value, Error> {
        let command = CustomCommand::new_static(command, slot, false);
        self.client.custom(command, words).await
    }

    fn check_standing(&self) -> Result<(), IndexError> {
        match &*self.standing.borrow() {
            Standing::Sound => Ok(()),
            Standing::Unknown(reason) | Standing::Refused(reason) => {
                Err(IndexError::Unavailable(reason.to_string()))
            }
            Standing::Evicts(evicts) => Err(IndexError::Unavailable(evicts.to_string())),
        }
    }
}

/// What a script was refused for.
fn refused(error: Error) -> IndexError {
    if error.details().starts_with("OOM") {
        return IndexError::Full(describe(&error));
    }
    unavailable(error)
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "it is handed to map_err, which gives it away"
)]
fn unavailable(error: Error) -> IndexError {
    IndexError::Unavailable(describe(&error))
}

impl From<ConnectError> for Problem {
    fn from(error: ConnectError) -> Self {
        let (field, problem) = match error {
            ConnectError::Url { url, problem } => ("redis.url", format!("{url} cannot be used: {problem}")),
            ConnectError::Authorities { path, problem } => ("redis.ca_file", format!("{path}: {problem}")),
            error => ("redis", error_chain(&error)),
        };
        Self {
            field: field.to_owned(),
            problem,
            place: None,
        }
    }
}

/// What of the settings cannot be followed. Asks nobody.
pub(super) fn check(config: &RedisConfig) -> Result<(), ConnectError> {
    client(config).map(drop)
}

/// Errors of the server say their kind themselves.
fn describe(error: &Error) -> String {
    // The client library keeps no more of a failed handshake than this text.
    if let Some((_, reason)) = error.details().split_once("InvalidCertificate(") {
        return format!(
            "the certificate that Redis shows is not trusted ({}); redis.ca_file names authorities beside the machine's \
             own",
            reason.trim_end_matches([')', '}', ' '])
        );
    }
    match error.kind() {
        ErrorKind::Unknown => error.details().to_owned(),
        _ => error.to_string(),
    }
}

fn client(config: &RedisConfig) -> Result<Client, ConnectError> {
    let wrong = |problem: String| ConnectError::Url {
        url: redact_url(config.url.expose()),
        problem,
    };
    let url = config.url.expose();
    let (scheme, rest) = url
        .split_once("://")
        .ok_or_else(|| wrong("it has no scheme".to_owned()))?;
    // The client library takes the certificates of the machine only if it understands each of them, and a provider
    // of cryptography only if the process has one. So TLS is set up here.
    let plain_scheme = scheme.replacen("rediss", "redis", 1);
    let mut settings =
        Config::from_url(&format!("{plain_scheme}://{rest}")).map_err(|error| wrong(describe(&error)))?;
    if plain_scheme != scheme {
        settings.tls = Some(TlsConfig {
            connector: tls(config.ca_file.as_deref())?.into(),
            // A node of a cluster is known by its address; its certificate names the host that was asked for.
            hostnames: TlsHostMapping::DefaultHost,
        });
    }
    settings.fail_fast = false;
    let (shortest, longest) = PAUSE_MS;
    let mut policy = ReconnectPolicy::new_exponential(0, shortest, longest, 2);
    policy.set_jitter(shortest);
    Builder::from_config(settings)
        .with_connection_config(|connection| {
            connection.connection_timeout = CONNECT;
            connection.internal_command_timeout = ANSWER;
            connection.tcp.nodelay = Some(true);
        })
        .set_policy(policy)
        .build()
        .map_err(|error| wrong(describe(&error)))
}

/// The provider of cryptography is named here and not installed for the process.
fn tls(ca_file: Option<&Path>) -> Result<rustls::ClientConfig, ConnectError> {
    let mut roots = rustls::RootCertStore::empty();
    // Certificates of the machine that cannot be read are left out, as every other program does.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(path) = ca_file {
        for authority in authorities(path)? {
            roots.add(authority)?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

/// The certificates of a file, all of them sound.
fn authorities(path: &Path) -> Result<Vec<CertificateDer<'static>>, ConnectError> {
    let wrong = |problem: String| ConnectError::Authorities {
        path: path.display().to_string(),
        problem,
    };
    let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    match read {
        Ok(found) if found.is_empty() => Err(wrong("it holds no certificate in PEM".to_owned())),
        Ok(found) => Ok(found),
        Err(error) => Err(wrong(format!("it cannot be read: {error}"))),
    }
}

/// Keeps the connection, until nobody uses it any more.
struct Attendant {
    client: Client,
    standing: watch::Sender<Standing>,
    usage: watch::Sender<Usage>,
    /// The share of the memory from which on room is scarce.
    high_water: f64,
    /// The last trouble that was logged.
    logged: Option<String>,
    /// Whether it was said that the policy cannot be seen.
    said_unseen: bool,
}

/// Ends the client's own task with the attendant.
struct Driver(ConnectHandle);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Attendant {
    fn new(
        client: Client,
        standing: watch::Sender<Standing>,
        usage: watch::Sender<Usage>,
        high_water: f64,
    ) -> Self {
        Self {
            client,
            standing,
            usage,
            high_water,
            logged: None,
            said_unseen: false,
        }
    }

    async fn run(mut self) -> Result<(), std::convert::Infallible> {
        let (mut connected, mut errors) = (self.client.reconnect_rx(), self.client.error_rx());
        let mut driver = Driver(self.client.connect());
        let mut beat = tokio::time::interval(BEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard = Instant::now();
        loop {
            tokio::select! {
                () = self.standing.closed() => return Ok(()),
                server = connected.recv() => {
                    // With a gap in the events it is a new connection, too.
                    if !matches!(server, Err(broadcast::error::RecvError::Closed)) {
                        self.look().await;
                        heard = Instant::now();
                    }
                }
                error = errors.recv() => {
                    if let Ok((error, server)) = error {
                        self.note(&error, server.as_ref());
                    }
                }
                _ = beat.tick() => {
                    if self.is_deaf(&mut heard).await {
                        tracing::warn!("Redis has not answered for {} s; connecting anew", DEAF.as_secs());
                        driver = Driver(self.client.connect());
                        heard = Instant::now();
                    }
                }
                ended = &mut driver.0 => {
                    let reason = match ended {
                        Ok(Ok(())) => "it was closed".to_owned(),
                        Ok(Err(error)) => describe(&error),
                        Err(error) => error.to_string(),
                    };
                    tracing::warn!(reason, "the connection to Redis has ended; connecting anew");
                    tokio::time::sleep(BEAT).await;
                    driver = Driver(self.client.connect());
                }
            }
        }
    }

    /// Whether a connection that seems to be there has been silent for too long. A client that waits for a frozen
    /// server to take a command does not notice by itself.
    async fn is_deaf(&mut self, heard: &mut Instant) -> bool {
        if !self.client.is_connected() {
            *heard = Instant::now();
            return false;
        }
        self.look().await;
        let options = Options {
            timeout: Some(ANSWER),
            fail_fast: true,
            ..Options::default()
        };
        match self.client.with_options(&options).ping::<Value>(None).await {
            Err(error) if *error.kind() == ErrorKind::Timeout => heard.elapsed() > DEAF,
            _ => {
                *heard = Instant::now();
                false
            }
        }
    }

    fn note(&mut self, error: &Error, server: Option<&Server>) {
        let trouble = describe(error);
        if self.logged.as_ref() != Some(&trouble) {
            let server = server.map(ToString::to_string);
            tracing::warn!(server, trouble, "Redis cannot be used; connecting goes on");
        }
        let is_refused = *error.kind() == ErrorKind::Auth;
        self.standing.send_if_modified(|standing| match standing {
            Standing::Unknown(_) | Standing::Refused(_) => {
                let reason = trouble.as_str().into();
                *standing = if is_refused {
                    Standing::Refused(reason)
                } else {
                    Standing::Unknown(reason)
                };
                true
            }
            Standing::Evicts(_) | Standing::Sound => false,
        });
        self.logged = Some(trouble);
    }

    /// Looks at the policy of each server, and opens or closes the way for commands; and at its memory.
    async fn look(&mut self) {
        let mut evicts = None;
        let mut fullest: Option<f64> = None;
        for server in self.client.active_connections() {
            let memory = self.memory_of(&server).await;
            if let Ok(Memory { used: Some(used), .. }) = &memory {
                fullest = Some(fullest.map_or(*used, |other| other.max(*used)));
            }
            match memory.map(|memory| memory.policy) {
                Ok(Policy::Keeps) => {}
                Ok(Policy::Evicts(policy)) => {
                    evicts = Some(Evicts {
                        server: server.to_string(),
                        policy,
                    });
                }
                Ok(Policy::Unseen) if self.said_unseen => {}
                Ok(Policy::Unseen) => {
                    self.said_unseen = true;
                    tracing::warn!(
                        %server,
                        "cannot see the maxmemory-policy of Redis; make sure that it is noeviction"
                    );
                }
                // The connection is gone again; the next one is looked at as this one.
                Err(error) => return self.note(&error, Some(&server)),
            }
        }
        self.usage.send_replace(usage(fullest, self.high_water));
        match evicts {
            Some(evicts) => {
                let text = evicts.to_string();
                if self.logged.as_ref() != Some(&text) {
                    tracing::error!("{text}");
                }
                self.logged = Some(text);
                self.standing.send_replace(Standing::Evicts(evicts));
            }
            None => {
                if self.logged.take().is_some() {
                    tracing::info!("Redis can be used again");
                }
                self.standing.send_replace(Standing::Sound);
            }
        }
    }

    async fn memory_of(&self, server: &Server) -> Result<Memory, Error> {
        let options = Options {
            timeout: Some(ANSWER),
            cluster_node: self.client.is_clustered().then(|| server.clone()),
            ..Options::default()
        };
        let client = self.client.with_options(&options);
        match client.info::<String>(Some(InfoKind::Memory)).await {
            Ok(text) => Ok(Memory::read(&text)),
            // The server has answered, so it is the command that it refuses.
            Err(error) if matches!(error.kind(), ErrorKind::Unknown | ErrorKind::InvalidCommand) => {
                Ok(Memory {
                    policy: Policy::Unseen,
                    used: None,
                })
            }
            Err(error) => Err(error),
        }
    }
}

/// What a server does when its memory is full.
#[derive(Debug, PartialEq, Eq)]
enum Policy {
    Keeps,
    Evicts(String),
    Unseen,
}

/// What `INFO memory` says of a server; more servers answer it than `CONFIG GET`.
#[derive(Debug, PartialEq)]
struct Memory {
    policy: Policy,
    /// Of what it may use; `None` where there is no limit.
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
            (Some("0"), _) | (_, Some("noeviction")) => Policy::Keeps,
            (Some(_), Some(policy)) => Policy::Evicts(policy.to_owned()),
            _ => Policy::Unseen,
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
    let room = match share {
        Some(share) if share >= 1.0 => Room::None,
        Some(share) if share >= high_water => Room::Scarce,
        _ => Room::Enough,
    };
    Usage { room, share }
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
    fn every_kind_of_url_is_taken() {
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
    fn a_wrong_url_is_named_without_its_password() {
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
    fn authorities_that_cannot_be_read_are_named() {
        let directory = redeliver_testkit::scratch::Scratch::new("authorities").unwrap();
        let empty = directory.path().join("empty.pem");
        std::fs::write(&empty, "nothing\n").unwrap();
        for (path, problem) in [
            (empty, "it holds no certificate in PEM"),
            (directory.path().join("missing.pem"), "it cannot be read: "),
        ] {
            let expected = format!("redis.ca_file ({}): {problem}", path.display());
            let config = RedisConfig {
                ca_file: Some(path),
                ..config("rediss://localhost:6379")
            };
            let error = client(&config).unwrap_err().to_string();
            assert!(error.starts_with(&expected), "{error}");
        }
    }

    #[test]
    fn only_a_server_that_may_evict_is_refused() {
        let read = |memory, policy| {
            let info =
                format!("# Memory\r\nused_memory:50\r\nmaxmemory:{memory}\r\nmaxmemory_policy:{policy}\r\n");
            let Memory { policy, used } = Memory::read(&info);
            (policy, used)
        };
        assert_eq!(read("0", "allkeys-lru"), (Policy::Keeps, None));
        assert_eq!(read("100", "noeviction"), (Policy::Keeps, Some(0.5)));
        let evicts = Policy::Evicts("allkeys-lru".to_owned());
        assert_eq!(read("100", "allkeys-lru"), (evicts, Some(0.5)));
        assert_eq!(Memory::read("# Memory\r\n").policy, Policy::Unseen);
    }

    #[test]
    fn room_is_scarce_from_the_high_water_mark_on() {
        let room = |share| usage(share, 0.9).room;
        assert_eq!(room(None), Room::Enough);
        assert_eq!(room(Some(0.89)), Room::Enough);
        assert_eq!(room(Some(0.9)), Room::Scarce);
        assert_eq!(room(Some(1.0)), Room::None);
    }
}
