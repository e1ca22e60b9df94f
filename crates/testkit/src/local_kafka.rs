//! A Kafka broker that belongs to one test: Apache Kafka in KRaft mode with one node on 127.0.0.1, and without the delays
//! that only make sense in production. A second broker can join, so that one of two can be stopped or killed. Of a cluster of
//! three, any one can.
//!
//! A test that stops or kills a broker needs at least two. When the only broker stops or starts, all partitions have no leader for a
//! while. Then the transaction coordinator of Kafka 4.3.1 treats the partitions as deleted and writes no markers to them
//! ("Couldn't find leader endpoint for partitions"): a transaction that it was completing stays open in some of them forever,
//! and is not atomic any more.
//!
//! Most tests share the broker of `cargo xtask services up`. A test that stops, kills or freezes the broker starts its own.
//! Data and ports survive a restart, so clients reconnect. Both are released when the value is dropped. Needs Java 17 or
//! newer, and Maven on the first run on a machine.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use crate::certificates::Signed;
use crate::daemon::Daemon;
use crate::hash::stable_hash;
use crate::kept::kept;
use crate::languages::run;
use crate::process::Process;
use crate::scratch::Scratch;
use crate::unique::random;
use crate::{certificates, free_port, jars, kafka_probe};

/// A broker normally takes 4 s, but may have to start while the machine is compiling.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// A shutdown that takes longer hangs.
const STOP_DEADLINE: Duration = Duration::from_secs(60);

/// One broker with its data; see the module.
#[derive(Debug)]
pub struct LocalKafka {
    port: u16,
    controller: u16,
    cluster: String,
    installation: Installation,
    // Before `scratch`, so that the broker is dead when its directory is removed.
    process: Option<Process>,
    scratch: Option<Scratch>,
}

/// What does not change over restarts.
#[derive(Debug)]
struct Installation {
    directory: PathBuf,
    /// The program.
    jars: PathBuf,
    /// Whether the broker leaves the process group of its parent, so that Ctrl-C does not reach it.
    own_group: bool,
    secured: Option<Secured>,
    machine: Machine,
}

/// How Java runs the broker.
#[derive(Debug)]
enum Machine {
    /// For tests, whose brokers start often and live for seconds: without the optimising compiler, with one thread for the
    /// garbage collection, and with classes from this archive. A start takes 1.7 s of CPU instead of 4.4.
    Short { directory: PathBuf },
    /// Writes this archive when the broker ends.
    Recording { classes: PathBuf },
    /// As in production, for benchmarks.
    Production,
}

impl Machine {
    fn options(&self) -> Vec<String> {
        let classes = match self {
            Self::Short { directory } => {
                format!("-XX:SharedArchiveFile={}", directory.join(CLASSES).display())
            }
            Self::Recording { classes } => format!("-XX:ArchiveClassesAtExit={}", classes.display()),
            Self::Production => return GARBAGE_COLLECTION.map(str::to_owned).to_vec(),
        };
        // Java starts without an archive that it cannot use, and would warn about it in each log.
        let fast = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xlog:cds=off"];
        fast.map(str::to_owned).into_iter().chain([classes]).collect()
    }
}

/// A second listener, which requires a login.
#[derive(Debug)]
struct Secured {
    port: u16,
    login: Login,
}

#[derive(Debug)]
enum Login {
    /// Over TLS.
    Password {
        /// The certificate and its key, as PEM.
        keystore: PathBuf,
        user: String,
        password: String,
    },
    /// By a client certificate.
    Certificate {
        /// The certificate of the broker and its key, as PEM.
        keystore: PathBuf,
        /// The CAs of clients.
        truststore: PathBuf,
    },
    /// Without TLS.
    Token {
        /// The public keys of the issuer, as a JSON Web Key Set.
        keys: PathBuf,
        audience: String,
    },
}

impl Login {
    fn write_certificates(&self, signed: &Signed, clients: &str) -> Result<()> {
        let Self::Certificate { keystore, truststore } = self else {
            bail!("its clients log in without certificates");
        };
        let both = format!("{}{}", signed.key, signed.certificate);
        certificates::write(keystore.clone(), &both)?;
        certificates::write(truststore.clone(), clients)?;
        Ok(())
    }
}

/// The defaults of Kafka's own start script (`KAFKA_JVM_PERFORMANCE_OPTS` in `kafka-run-class.sh`). Without them, a collection
/// stops the broker for 40 ms on average.
const GARBAGE_COLLECTION: [&str; 4] = [
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
];

impl LocalKafka {
    /// Starts a new, empty broker.
    ///
    /// # Errors
    /// If it cannot be fetched or started; the error contains the end of its log.
    pub fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// As [`LocalKafka::start`], with broker settings added or replaced, such as `("log.retention.ms", "1000")`.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_with(settings: &[(&str, &str)]) -> Result<Self> {
        let scratch = Scratch::new("kafka")?;
        let installation = Installation::new(scratch.path())?;
        Self::create(installation, Some(scratch), settings)
    }

    /// As [`LocalKafka::start`], of another version than the other tests use.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_version(version: &str) -> Result<Self> {
        let scratch = Scratch::new("kafka")?;
        let jars = jars::of_version(version)?;
        let installation = Installation {
            machine: short(&jars)?,
            jars,
            ..Installation::new(scratch.path())?
        };
        Self::create(installation, Some(scratch), &[])
    }

    /// As [`LocalKafka::start`], with the options of Java that Kafka's own start script uses, for benchmarks.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_for_benchmarks() -> Result<Self> {
        let scratch = Scratch::new("kafka")?;
        let installation = Installation {
            machine: Machine::Production,
            ..Installation::new(scratch.path())?
        };
        Self::create(installation, Some(scratch), &[])
    }

    /// Starts a new, empty cluster of two brokers with two replicas of everything. The first one is also the controller and must
    /// keep running. The second one may be restarted, and soon leads its half of the partitions again.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_pair() -> Result<[Self; 2]> {
        Self::start_pair_with(&[])
    }

    /// As [`LocalKafka::start_pair`], with settings added or replaced on both brokers.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_pair_with(added: &[(&str, &str)]) -> Result<[Self; 2]> {
        let mut settings = replicated("2", "1");
        settings.extend_from_slice(added);
        let first = Self::start_with(&settings)?;
        let node = Node {
            id: 2,
            role: Role::Broker,
            port: free_port(),
            controller: first.controller,
        };
        let mut second = Self::format(node, &first.cluster, &settings)?;
        second.start_again()?;
        Ok([first, second])
    }

    /// Starts a new, empty cluster of three brokers with three replicas of everything, two of which must be in sync. Each
    /// broker is also one of three controllers, so any one of them may be stopped or killed, and leads its share of the
    /// partitions again soon after its restart.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_three() -> Result<[Self; 3]> {
        let ids = [1, 2, 3];
        let controllers = ids.map(|_| free_port());
        let voters: Vec<String> = ids
            .iter()
            .zip(controllers)
            .map(|(id, controller)| format!("{id}@127.0.0.1:{controller}"))
            .collect();
        let voters = voters.join(",");
        let mut settings = replicated("3", "2");
        settings.push(("controller.quorum.voters", &voters));
        let cluster = cluster_id();
        let create = &|index: usize| {
            let node = Node {
                id: ids[index],
                role: Role::BrokerAndController,
                port: free_port(),
                controller: controllers[index],
            };
            Self::format(node, &cluster, &settings)
        };
        let [first, second, third] = thread::scope(|scope| {
            let creating = [0, 1, 2].map(|index| scope.spawn(move || create(index)));
            creating.map(|thread| thread.join().expect("formatting a node does not panic"))
        });
        let mut brokers = [first?, second?, third?];
        // None of them is ready before a majority of the controllers runs.
        for broker in &mut brokers {
            broker.process = Some(broker.spawn()?);
        }
        for broker in &mut brokers {
            broker.until_ready()?;
        }
        Ok(brokers)
    }

    /// One node of a cluster of several, not started yet.
    fn format(node: Node, cluster: &str, settings: &[(&str, &str)]) -> Result<Self> {
        let scratch = Scratch::new("kafka")?;
        let installation = Installation::new(scratch.path())?;
        installation.format(node, cluster, settings)?;
        Ok(Self {
            port: node.port,
            controller: node.controller,
            cluster: cluster.to_owned(),
            installation,
            process: None,
            scratch: Some(scratch),
        })
    }

    /// As [`LocalKafka::start`], with a second listener for `SASL_SSL` with this certificate; see
    /// [`LocalKafka::secured_brokers`]. The mechanisms are `SCRAM-SHA-512` and `PLAIN`, for one user.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_secured(signed: &Signed, user: &str, password: &str) -> Result<Self> {
        Self::start_secured_with(signed, user, password, &[])
    }

    /// As [`LocalKafka::start_secured`], with broker settings added or replaced.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_secured_with(
        signed: &Signed,
        user: &str,
        password: &str,
        settings: &[(&str, &str)],
    ) -> Result<Self> {
        let scratch = Scratch::new("kafka")?;
        let both = format!("{}{}", signed.key, signed.certificate);
        let login = Login::Password {
            keystore: certificates::write(scratch.path().join("keystore.pem"), &both)?,
            user: user.to_owned(),
            password: password.to_owned(),
        };
        Self::start_with_login(scratch, login, settings)
    }

    /// As [`LocalKafka::start`], with a second listener for `SASL_PLAINTEXT` and the mechanism `OAUTHBEARER`; see
    /// [`LocalKafka::secured_brokers`]. Tokens must be for this audience and signed by a key of this JSON Web Key Set. A
    /// connection ends when its token expires, unless the client logs in again.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_with_tokens(keys: &Path, audience: &str) -> Result<Self> {
        let login = Login::Token {
            keys: keys.to_owned(),
            audience: audience.to_owned(),
        };
        Self::start_with_login(Scratch::new("kafka")?, login, &[])
    }

    /// As [`LocalKafka::start`], with a second listener for `SSL` with this certificate, whose clients need a certificate that
    /// one of these CAs has signed (PEM); see [`LocalKafka::secured_brokers`].
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_with_client_certificates(signed: &Signed, clients: &str) -> Result<Self> {
        let scratch = Scratch::new("kafka")?;
        let login = Login::Certificate {
            keystore: scratch.path().join("keystore.pem"),
            truststore: scratch.path().join("truststore.pem"),
        };
        login.write_certificates(signed, clients)?;
        Self::start_with_login(scratch, login, &[])
    }

    /// Replaces its certificate and the CAs of its clients. It uses them after a restart.
    ///
    /// # Errors
    /// If they cannot be written, or it was not started with [`LocalKafka::start_with_client_certificates`].
    pub fn set_certificates(&self, signed: &Signed, clients: &str) -> Result<()> {
        let secured = self.installation.secured.as_ref();
        let secured = secured.context("it was started without client certificates")?;
        secured.login.write_certificates(signed, clients)
    }

    fn start_with_login(scratch: Scratch, login: Login, settings: &[(&str, &str)]) -> Result<Self> {
        let installation = Installation {
            secured: Some(Secured {
                port: free_port(),
                login,
            }),
            ..Installation::new(scratch.path())?
        };
        Self::create(installation, Some(scratch), settings)
    }

    /// Starts a broker that keeps running after this program, with its data in `directory`.
    ///
    /// # Errors
    /// As [`LocalKafka::start`].
    pub fn start_daemon(directory: &Path) -> Result<Daemon> {
        std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
        let installation = Installation {
            own_group: true,
            ..Installation::new(directory)?
        };
        let mut kafka = Self::create(installation, None, &[])?;
        let address = kafka.brokers();
        let process = kafka
            .process
            .take()
            .context("the broker that just started")?
            .leave_running();
        Ok(Daemon {
            process,
            address,
            directory: directory.to_owned(),
        })
    }

    fn create(
        installation: Installation,
        scratch: Option<Scratch>,
        settings: &[(&str, &str)],
    ) -> Result<Self> {
        let (port, controller, cluster) = (free_port(), free_port(), cluster_id());
        let node = Node {
            id: 1,
            role: Role::BrokerAndController,
            port,
            controller,
        };
        installation.format(node, &cluster, settings)?;
        let mut kafka = Self {
            port,
            controller,
            cluster,
            installation,
            process: None,
            scratch,
        };
        kafka.start_again()?;
        Ok(kafka)
    }

    /// The value for `bootstrap.servers`, which does not change over restarts.
    pub fn brokers(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The value for `bootstrap.servers` of clients that log in, which does not change over restarts.
    ///
    /// # Panics
    /// If it was started without such a listener.
    #[track_caller]
    pub fn secured_brokers(&self) -> String {
        let secured = self.installation.secured.as_ref();
        format!("127.0.0.1:{}", secured.expect("it was started without").port)
    }

    /// The process of the broker, to freeze it or read its log.
    ///
    /// # Panics
    /// If the broker is stopped.
    #[track_caller]
    pub fn process(&self) -> &Process {
        self.process.as_ref().expect("the broker is stopped")
    }

    /// Shuts it down gracefully. Data and port are kept.
    ///
    /// # Errors
    /// If it is not running, or has not ended after a minute.
    pub fn stop(&mut self) -> Result<()> {
        let mut process = self
            .process
            .take()
            .context("stopping Kafka: it is stopped already")?;
        process.terminate();
        process.wait_until(STOP_DEADLINE)?;
        Ok(())
    }

    /// Kills it. Data and port are kept.
    ///
    /// # Panics
    /// If it is not running.
    #[track_caller]
    pub fn kill_9(&mut self) {
        self.process
            .take()
            .expect("the broker is stopped already")
            .kill_9();
    }

    /// Starts it again with the same data and port, and waits until it serves clients.
    ///
    /// # Errors
    /// If it is running, or does not come up; the error contains the end of its log.
    pub fn start_again(&mut self) -> Result<()> {
        ensure!(self.process.is_none(), "starting Kafka: it is running already");
        self.process = Some(self.spawn()?);
        self.until_ready().inspect_err(|_| self.process = None)
    }

    fn spawn(&self) -> Result<Process> {
        let process = self.installation.spawn()?;
        if let Some(scratch) = &self.scratch {
            scratch.set_user(process.id())?;
        }
        Ok(process)
    }

    fn until_ready(&mut self) -> Result<()> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let process = self
            .process
            .as_mut()
            .context("waiting for Kafka: it is stopped")?;
        process.wait_until_ready("Kafka", START_DEADLINE, || kafka_probe::answers(address))
    }

    /// [`LocalKafka::stop`], then [`LocalKafka::start_again`].
    ///
    /// # Errors
    /// If one of them fails.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start_again()
    }
}

/// A command that runs one of Kafka's own tools, such as `org.apache.kafka.tools.TopicCommand`.
///
/// # Errors
/// If Kafka's jars cannot be fetched.
pub fn kafka_tool(class: &str) -> Result<Command> {
    let jars = jars::resolved()?;
    Ok(tool_of(&jars, &short(&jars)?, class))
}

fn tool_of(jars: &Path, machine: &Machine, class: &str) -> Command {
    let mut command = java(jars);
    if matches!(machine, Machine::Short { .. }) {
        command.args(machine.options());
    }
    command.arg(class);
    command
}

/// Whether the broker at `address` (`127.0.0.1:port`) serves clients.
///
/// # Errors
/// If it does not, with the reason.
pub fn answers(address: &str) -> Result<()> {
    kafka_probe::answers(
        address
            .parse()
            .with_context(|| format!("reading the address {address}"))?,
    )
    .with_context(|| format!("asking Kafka at {address}"))
}

fn java(jars: &Path) -> Command {
    let mut command = Command::new("java");
    // Without a configuration file, log4j prints to stdout at this level.
    command.args(["-Djava.awt.headless=true", "-Dlog4j2.level=INFO"]);
    command.arg("-cp").arg(jars.join("*"));
    command
}

/// A hash of what Java says about itself.
fn java_version() -> Result<u64> {
    static VERSION: OnceLock<u64> = OnceLock::new();
    if let Some(version) = VERSION.get() {
        return Ok(*version);
    }
    let version = Command::new("java").arg("-version").output();
    let version = version.context("starting Java (`java`), which runs Kafka; is it installed?")?;
    Ok(*VERSION.get_or_init(|| stable_hash(&version.stderr)))
}

/// With an archive of the classes in these jars, which the first call on a machine writes with a broker that starts and stops.
fn short(jars: &Path) -> Result<Machine> {
    let version = java_version()?;
    let jars_name = jars.file_name().unwrap_or_default().to_string_lossy();
    // Another version of Java cannot read the archive.
    let name = format!("{jars_name}-node-{version:016x}");
    let directory = kept(&name, "an archive of Kafka's classes", |directory| {
        let scratch = Scratch::new("kafka")?;
        let recording = |place: PathBuf| Installation {
            directory: place,
            jars: jars.to_owned(),
            own_group: false,
            secured: None,
            machine: Machine::Recording {
                classes: directory.join(CLASSES),
            },
        };
        // Before its first start, a node's data directory depends only on the version.
        let formatted = directory.join(FORMATTED);
        std::fs::create_dir(&formatted).with_context(|| format!("creating {}", formatted.display()))?;
        let node = Node {
            id: 1,
            role: Role::BrokerAndController,
            port: 1,
            controller: 2,
        };
        recording(formatted).format(node, &cluster_id(), &[])?;
        // Replaces the archive of the tool that formats.
        LocalKafka::create(recording(scratch.path().to_owned()), Some(scratch), &[])?.stop()
    })?;
    Ok(Machine::Short { directory })
}

/// The archive in the directory of [`Machine::Short`].
const CLASSES: &str = "classes.jsa";
/// A formatted node, there.
const FORMATTED: &str = "formatted";

impl Installation {
    /// In this directory, of the version that the tests use.
    fn new(directory: &Path) -> Result<Self> {
        let jars = jars::resolved()?;
        Ok(Self {
            directory: directory.to_owned(),
            machine: short(&jars)?,
            jars,
            own_group: false,
            secured: None,
        })
    }

    /// Writes the configuration and formats the data directory, which Kafka requires before the first start.
    fn format(&self, node: Node, cluster: &str, settings: &[(&str, &str)]) -> Result<()> {
        let mut text = properties(&self.directory, node, settings);
        if let Some(secured) = &self.secured {
            text += &secured.properties(node);
        }
        let file = self.properties_file();
        std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
        let user = self.secured.as_ref().and_then(|secured| match &secured.login {
            Login::Password { user, password, .. } => Some((user, password)),
            _ => None,
        });
        // A copy of what the tool writes saves a second of processor time per node.
        if let (Machine::Short { directory }, None) = (&self.machine, user) {
            return self.copy_format(node, cluster, &directory.join(FORMATTED));
        }
        let mut tool = tool_of(&self.jars, &self.machine, "kafka.tools.StorageTool");
        // With a fixed id, clients could not distinguish the clusters of different tests.
        tool.args(["format", "--cluster-id", cluster, "--config"])
            .arg(&file);
        if let Some((user, password)) = user {
            tool.arg("--add-scram")
                .arg(format!("SCRAM-SHA-512=[name={user},password={password}]"));
        }
        let output = tool
            .output()
            .context("starting Java (`java`), which runs Kafka; is it installed?")?;
        ensure!(
            output.status.success(),
            "preparing Kafka's data directory: {}\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    fn copy_format(&self, node: Node, cluster: &str, formatted: &Path) -> Result<()> {
        run(Command::new("cp")
            .arg("-r")
            .arg(formatted.join("data"))
            .arg(self.data()))?;
        let (id, directory) = (node.id, cluster_id());
        let identity = format!("version=1\ncluster.id={cluster}\nnode.id={id}\ndirectory.id={directory}\n");
        let file = self.data().join("meta.properties");
        std::fs::write(&file, identity).with_context(|| format!("writing {}", file.display()))
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    fn spawn(&self) -> Result<Process> {
        let mut command = java(&self.jars);
        command.args(["-Xms256m", "-Xmx1g", "-XX:+ExitOnOutOfMemoryError"]);
        command.args(self.machine.options());
        if let Some(Secured {
            login: Login::Token { keys, .. },
            ..
        }) = &self.secured
        {
            // The broker reads keys only from addresses that are allowed on its command line.
            let allowed = "org.apache.kafka.sasl.oauthbearer.allowed.urls";
            command.arg(format!("-D{allowed}=file://{}", keys.display()));
        }
        command.arg("kafka.Kafka");
        command.arg(self.properties_file());
        if self.own_group {
            command.process_group(0);
        }
        Process::spawn_logging_to(command, self.directory.join("kafka.log"))
    }

    fn properties_file(&self) -> PathBuf {
        self.directory.join("server.properties")
    }
}

impl Secured {
    /// The settings of the second listener. They override earlier ones, because the last value of a setting counts.
    fn properties(&self, node: Node) -> String {
        let Node {
            port: plain,
            controller,
            ..
        } = node;
        let port = self.port;
        let protocol = match &self.login {
            Login::Password { .. } => "SASL_SSL",
            Login::Certificate { .. } => "SSL",
            Login::Token { .. } => "SASL_PLAINTEXT",
        };
        let listeners = format!(
            "listeners=PLAINTEXT://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller},SECURED://127.0.0.1:{port}\n\
             advertised.listeners=PLAINTEXT://127.0.0.1:{plain},SECURED://127.0.0.1:{port}\n\
             listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:{protocol}\n"
        );
        let jaas = "org.apache.kafka.common.security";
        let login = match &self.login {
            Login::Password {
                keystore,
                user,
                password,
            } => format!(
                "listener.name.secured.ssl.keystore.type=PEM\n\
                 listener.name.secured.ssl.keystore.location={}\n\
                 listener.name.secured.sasl.enabled.mechanisms=SCRAM-SHA-512,PLAIN\n\
                 listener.name.secured.scram-sha-512.sasl.jaas.config={jaas}.scram.ScramLoginModule required;\n\
                 listener.name.secured.plain.sasl.jaas.config={jaas}.plain.PlainLoginModule required \
                 user_{user}=\"{password}\";\n",
                keystore.display()
            ),
            Login::Certificate { keystore, truststore } => format!(
                "listener.name.secured.ssl.keystore.type=PEM\n\
                 listener.name.secured.ssl.keystore.location={}\n\
                 listener.name.secured.ssl.truststore.type=PEM\n\
                 listener.name.secured.ssl.truststore.location={}\n\
                 listener.name.secured.ssl.client.auth=required\n",
                keystore.display(),
                truststore.display()
            ),
            Login::Token { keys, audience } => {
                let oauth = format!("{jaas}.oauthbearer");
                format!(
                    "listener.name.secured.sasl.enabled.mechanisms=OAUTHBEARER\n\
                     listener.name.secured.oauthbearer.sasl.jaas.config={oauth}.OAuthBearerLoginModule required;\n\
                     listener.name.secured.oauthbearer.sasl.server.callback.handler.class=\
                     {oauth}.OAuthBearerValidatorCallbackHandler\n\
                     sasl.oauthbearer.jwks.endpoint.url=file://{}\n\
                     sasl.oauthbearer.expected.audience={audience}\n\
                     connections.max.reauth.ms=3600000\n",
                    keys.display()
                )
            }
        };
        listeners + &login
    }
}

/// A random cluster id: 16 bytes in 22 characters of URL-safe base64. It has only letters and digits, because a leading
/// hyphen would be read as an option, and the last character contains only two bits.
fn cluster_id() -> String {
    const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    let letter = |_| char::from(LETTERS[usize::try_from(random() % 62).unwrap_or(0)]);
    (0..21).map(letter).chain(['A']).collect()
}

#[derive(Clone, Copy, Debug)]
struct Node {
    id: u32,
    role: Role,
    port: u16,
    /// The port of its own controller, or of the only one.
    controller: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// A broker and the only controller, or one of several, which the settings name.
    BrokerAndController,
    Broker,
}

/// So many replicas of everything, of which so many must be in sync, and leadership returns to a broker that was restarted.
fn replicated(replicas: &'static str, in_sync: &'static str) -> Vec<(&'static str, &'static str)> {
    vec![
        ("default.replication.factor", replicas),
        ("min.insync.replicas", in_sync),
        ("offsets.topic.replication.factor", replicas),
        ("transaction.state.log.replication.factor", replicas),
        ("transaction.state.log.min.isr", in_sync),
        ("share.coordinator.state.topic.replication.factor", replicas),
        ("share.coordinator.state.topic.min.isr", in_sync),
        ("leader.imbalance.check.interval.seconds", "1"),
        ("leader.imbalance.per.broker.percentage", "0"),
    ]
}

/// The configuration of the broker. Settings of the caller override ours.
fn properties(directory: &Path, node: Node, settings: &[(&str, &str)]) -> String {
    let broker = format!("PLAINTEXT://127.0.0.1:{}", node.port);
    let controller = format!("127.0.0.1:{}", node.controller);
    let (roles, listeners) = match node.role {
        Role::BrokerAndController => ("broker,controller", format!("{broker},CONTROLLER://{controller}")),
        Role::Broker => ("broker", broker.clone()),
    };
    let id = node.id.to_string();
    // The settings of a cluster with several controllers replace it.
    let voters = format!("1@{controller}");
    let data = directory.join("data").display().to_string();
    let ours: &[(&str, &str)] = &[
        ("process.roles", roles),
        ("node.id", &id),
        ("controller.listener.names", "CONTROLLER"),
        ("controller.quorum.voters", &voters),
        ("listeners", &listeners),
        ("advertised.listeners", &broker),
        ("inter.broker.listener.name", "PLAINTEXT"),
        (
            "listener.security.protocol.map",
            "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        ),
        ("log.dirs", &data),
        // A topic that a test did not create must cause an error, and not be created with other settings.
        ("auto.create.topics.enable", "false"),
        // A single node has one replica of everything.
        ("default.replication.factor", "1"),
        ("min.insync.replicas", "1"),
        ("offsets.topic.replication.factor", "1"),
        ("transaction.state.log.replication.factor", "1"),
        ("transaction.state.log.min.isr", "1"),
        ("share.coordinator.state.topic.replication.factor", "1"),
        ("share.coordinator.state.topic.min.isr", "1"),
        // The default of 50 partitions would mean 50 directories to create and open at every start.
        ("offsets.topic.num.partitions", "4"),
        ("transaction.state.log.num.partitions", "4"),
        ("share.coordinator.state.topic.num.partitions", "4"),
        // Delays that save work in a large cluster, but only make tests slow.
        ("group.initial.rebalance.delay.ms", "0"),
        (
            "transaction.abort.timed.out.transaction.cleanup.interval.ms",
            "1000",
        ),
        // After a kill, the controller rejects the new broker until the session of the dead one has timed out, which takes
        // 9 s by default. The broker retries with every heartbeat.
        ("broker.session.timeout.ms", "4000"),
        ("broker.heartbeat.interval.ms", "500"),
        // Allows short session timeouts for tests of frozen members.
        ("group.min.session.timeout.ms", "1000"),
    ];
    let kept = ours
        .iter()
        .filter(|(name, _)| !settings.iter().any(|(other, _)| other == name));
    kept.chain(settings)
        .fold(String::new(), |mut text, (name, value)| {
            writeln!(text, "{name}={value}").expect("writing to a string cannot fail");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_caller_win() {
        let node = Node {
            id: 1,
            role: Role::BrokerAndController,
            port: 1,
            controller: 2,
        };
        let text = properties(
            Path::new("/d"),
            node,
            &[("min.insync.replicas", "2"), ("log.retention.ms", "9")],
        );
        assert!(text.contains("min.insync.replicas=2\n") && text.contains("log.retention.ms=9\n"));
        assert!(!text.contains("min.insync.replicas=1\n"));
        assert!(text.contains("listeners=PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2\n"));
        assert!(text.contains("log.dirs=/d/data\n"));
        assert!(text.contains("controller.quorum.voters=1@127.0.0.1:2\n"));
    }
}
