//! Settings of Kafka clients. Users can pass any librdkafka property through. Properties on which exactly-once delivery and
//! Java's partitioning depend are set last, so that they cannot be overridden.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rdkafka::config::{FromClientConfig, FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, ConsumerContext};
use rdkafka::error::KafkaError;
use rdkafka::{ClientConfig, ClientContext};
use redeliver_core::mutant;
use redeliver_kafka_ffi::{KafkaClient, RdClient};

use crate::credentials::Credentials;
use crate::login::Login;

/// Settings of all Kafka clients of a process.
#[derive(Clone, Debug)]
pub struct KafkaSettings {
    /// `bootstrap.servers`.
    pub brokers: String,
    /// librdkafka properties that are passed through: SASL, TLS, tuning.
    pub properties: BTreeMap<String, String>,
    /// The stable name of this process. It is part of transactional ids, which have to survive a restart.
    pub instance: String,
    /// The prefix of all ids by which this process is known to Kafka. Installations that share a cluster need different
    /// ones. The names of topics do not have it.
    pub id_prefix: String,
    /// Whether lanes are static members of their group, so that a restart within the session timeout moves no partitions.
    pub static_membership: bool,
    /// Whether the broker is the [embedded](crate::embedded) one. Then a lane reads all partitions of its topics without joining
    /// a group, since each group has one member and joining takes seconds, and commits offsets also outside of
    /// transactions. What is read from a time on is read from the beginning on.
    pub is_embedded: bool,
    /// After this time without a heartbeat, the partitions of a member move to others.
    pub session_timeout: Duration,
    /// After this time, the broker aborts the transaction of a process that has crashed.
    pub transaction_timeout: Duration,
    /// How far a lane's consumer reads ahead. [`KafkaSettings::properties`] override it.
    pub prefetch: Prefetch,
    /// Logs clients in with tokens (SASL/OAUTHBEARER). `None`: [`KafkaSettings::properties`] say how, if at all.
    pub login: Option<Login>,
    /// Properties that come from files, which may change. `None`: [`KafkaSettings::properties`] contains them.
    pub credentials: Option<Credentials>,
}

/// The configuration of a client. All clients are created by it, so that all of them are logged in, and use the current
/// credentials.
#[derive(Clone, Debug)]
pub struct ClientSettings {
    config: ClientConfig,
    login: Option<Login>,
    credentials: Option<Credentials>,
}

impl ClientSettings {
    /// The properties, without those that come from files. A client that is created from them directly is not logged in.
    #[must_use]
    pub fn properties(&self) -> &ClientConfig {
        &self.config
    }

    /// The value of a property.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.config.get(name)
    }

    /// Sets a property.
    pub fn set(&mut self, name: impl Into<String>, value: impl Into<String>) -> &mut Self {
        self.config.set(name, value);
        self
    }

    /// Removes a property.
    pub(crate) fn remove(&mut self, name: &str) {
        self.config.remove(name);
    }

    /// Creates a client without connecting to the broker.
    ///
    /// # Errors
    /// If the client rejects its configuration.
    pub fn create<T: FromClientConfig + RdClient>(&self) -> Result<KafkaClient<T>, KafkaError> {
        Ok(self.logged_in(self.current().create()?))
    }

    /// As [`ClientSettings::create`], with a context.
    ///
    /// # Errors
    /// As there.
    pub fn create_with_context<C, T>(&self, context: C) -> Result<KafkaClient<T>, KafkaError>
    where
        C: ClientContext,
        T: FromClientConfigAndContext<C> + RdClient,
    {
        Ok(self.logged_in(self.current().create_with_context(context)?))
    }

    /// Creates a consumer that can be shared. `prepare` is called before that.
    pub(crate) fn create_shared<C: ConsumerContext>(
        &self,
        context: C,
        prepare: impl FnOnce(&mut BaseConsumer<C>),
    ) -> Result<KafkaClient<Arc<BaseConsumer<C>>>, KafkaError> {
        let mut consumer = self.current().create_with_context(context)?;
        prepare(&mut consumer);
        Ok(self.logged_in(Arc::new(consumer)))
    }

    /// The properties with the current credentials.
    pub(crate) fn current(&self) -> Cow<'_, ClientConfig> {
        let Some(credentials) = &self.credentials else {
            return Cow::Borrowed(&self.config);
        };
        let mut config = self.config.clone();
        for (name, value) in credentials.properties().iter() {
            config.set(name, value);
        }
        Cow::Owned(config)
    }

    fn logged_in<T: RdClient>(&self, client: T) -> KafkaClient<T> {
        let client = KafkaClient::new(client);
        if let Some(login) = &self.login {
            login.register(client.port());
        }
        client
    }
}

/// Without a login and without credentials from files.
impl From<ClientConfig> for ClientSettings {
    fn from(config: ClientConfig) -> Self {
        Self {
            config,
            login: None,
            credentials: None,
        }
    }
}

/// With this number of records of a partition, a reader stops fetching, apart from one response (`queued.min.messages`). The client counts only
/// values against `queued.max.messages.kbytes`, neither keys nor headers, so that this limits what records with many headers take.
pub(crate) const QUEUED_RECORDS: u32 = 100;

/// How much of a partition the client fetches in advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// Stop fetching at this number of records (`queued.min.messages`): the limit of records with many headers, which do not count as size.
    pub records: u32,
    /// Stop fetching once values have this size in KiB (`queued.max.messages.kbytes`).
    pub kibibytes: u32,
    /// The maximum size of one response in KiB (`fetch.message.max.bytes`). A larger record is still returned, alone.
    pub fetch_kibibytes: u32,
    /// How long the broker waits for records of idle partitions, in milliseconds (`fetch.wait.max.ms`). A client sends a broker
    /// one fetch at a time. So a partition beside idle ones may have to do for this time with the records of its queue.
    pub wait_millis: u32,
}

impl Prefetch {
    /// For records that are processed as they arrive.
    pub const STREAM: Self = Self {
        records: 5000,
        kibibytes: 1024,
        fetch_kibibytes: 1024,
        wait_millis: 100,
    };
    /// For records that wait in their partition. Fetched records stay in memory until they are due, and freed buffers of
    /// large responses may stay in the allocator.
    pub const WAITING: Self = Self {
        records: 300,
        kibibytes: 128,
        fetch_kibibytes: 64,
        wait_millis: 50,
    };
}

/// A property that librdkafka rejects. The error does not contain the value, which may be a secret under a misspelt name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("property `{property}`: {problem}")]
pub struct UnusableProperty {
    /// The name of the property.
    pub property: String,
    /// Why it was rejected.
    pub problem: String,
}

/// What a program says that needs TLS, SCRAM or OAUTHBEARER and was built without OpenSSL.
pub const WITHOUT_TLS: &str =
    "this program was built without the feature kafka-tls; build it with --features kafka-tls";

/// Whether it selects a mechanism that librdkafka implements with OpenSSL. Without OpenSSL, only creating the client fails.
fn needs_tls(property: &str, value: &str) -> bool {
    let is_mechanism = ["sasl.mechanism", "sasl.mechanisms"].contains(&property);
    is_mechanism && (value.starts_with("SCRAM-") || value == "OAUTHBEARER")
}

impl KafkaSettings {
    /// Default settings for these brokers and this instance name.
    #[must_use]
    pub fn new(brokers: impl Into<String>, instance: impl Into<String>) -> Self {
        // Before the first call of librdkafka, which would let OpenSSL register an exit handler. That frees what threads of clients still use.
        #[cfg(feature = "kafka-tls")]
        openssl::init();
        Self {
            brokers: brokers.into(),
            properties: BTreeMap::new(),
            instance: instance.into(),
            id_prefix: String::new(),
            static_membership: false,
            is_embedded: false,
            session_timeout: Duration::from_secs(10),
            transaction_timeout: Duration::from_secs(10),
            prefetch: Prefetch::STREAM,
            login: None,
            credentials: None,
        }
    }

    /// An id with the prefix of this installation.
    #[must_use]
    pub fn id(&self, name: &str) -> String {
        format!("{}{name}", self.id_prefix)
    }

    /// Checks each passed-through property separately, without creating a client.
    ///
    /// # Errors
    /// The first property whose name is unknown or whose value cannot be parsed.
    pub fn check_properties(&self) -> Result<(), UnusableProperty> {
        for (name, value) in &self.properties {
            let mut config = ClientConfig::new();
            config.set(name, value);
            // The client library's error contains the value, so it is not passed on.
            let problem = match config.create_native_config() {
                Err(KafkaError::ClientConfig(_, problem, ..)) if problem.starts_with("No such") => {
                    "librdkafka has no such property"
                }
                Err(KafkaError::ClientConfig(_, problem, ..))
                    if problem.contains("OpenSSL not available") =>
                {
                    WITHOUT_TLS
                }
                Err(KafkaError::ClientConfig(..)) => "librdkafka cannot parse this value",
                _ if needs_tls(name, value) && !cfg!(feature = "kafka-tls") => WITHOUT_TLS,
                _ => continue,
            };
            return Err(UnusableProperty {
                property: name.clone(),
                problem: problem.to_owned(),
            });
        }
        Ok(())
    }

    /// The configuration of a client for metadata and administration, and the base of all others.
    #[must_use]
    pub fn client(&self) -> ClientSettings {
        let mut config = ClientConfig::new();
        // Reconnect quickly after a restart of the broker. The default delay grows up to ten seconds.
        config
            .set("reconnect.backoff.ms", "50")
            .set("reconnect.backoff.max.ms", "1000");
        config.set("log.connection.close", "false");
        for (name, value) in &self.properties {
            config.set(name, value);
        }
        config.set("bootstrap.servers", &self.brokers);
        config.set("client.id", self.id(&format!("redeliver-{}", self.instance)));
        if self.login.is_some() {
            config.set("sasl.mechanism", "OAUTHBEARER");
            if !self.properties.contains_key("security.protocol") {
                config.set("security.protocol", "SASL_SSL");
            }
        }
        config.set_log_level(RDKafkaLogLevel::Warning);
        ClientSettings {
            config,
            login: self.login.clone(),
            credentials: self.credentials.clone(),
        }
    }

    /// The configuration of a consumer that reads outside of any group.
    #[must_use]
    pub fn reader(&self, isolation: &str) -> ClientSettings {
        let mut config = self.client();
        for (name, value) in [
            ("fetch.wait.max.ms", 10),
            ("fetch.queue.backoff.ms", 1),
            ("queued.min.messages", QUEUED_RECORDS),
        ] {
            if !self.properties.contains_key(name) {
                config.set(name, value.to_string());
            }
        }
        config
            .set("group.id", self.id("redeliver-reader"))
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("isolation.level", isolation)
            // An offset that is out of range must be an error, never a silent reset.
            .set("auto.offset.reset", "error")
            .set("enable.partition.eof", "true")
            .set("allow.auto.create.topics", "false");
        config
    }

    /// The configuration of a lane's consumer. `group` is the id of the group, with the prefix. `member` makes the name of a
    /// static member unique within the instance.
    #[must_use]
    pub fn consumer(&self, group: &str, member: &str) -> ClientSettings {
        let mut config = self.client();
        let session = self.session_timeout.as_millis();
        let prefetch = self.prefetch;
        let tuning = [
            // Refill a full queue at once. The default of one second makes records late, and in a measurement reduced the
            // throughput to an eighth.
            ("fetch.queue.backoff.ms", 1),
            ("fetch.wait.max.ms", prefetch.wait_millis),
            // The lag is computed from statistics.
            ("statistics.interval.ms", 2000),
            ("queued.min.messages", prefetch.records),
            ("queued.max.messages.kbytes", prefetch.kibibytes),
            ("fetch.message.max.bytes", prefetch.fetch_kibibytes << 10),
        ];
        for (name, value) in tuning {
            if !self.properties.contains_key(name) {
                config.set(name, value.to_string());
            }
        }
        config
            .set("group.id", group)
            .set("session.timeout.ms", session.to_string())
            .set("heartbeat.interval.ms", (session / 5).max(100).to_string())
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            // Also makes the broker withhold committed offsets while a transaction that changes them is open.
            .set(
                "isolation.level",
                mutant!("lane-reads-uncommitted", "read_committed", "read_uncommitted"),
            )
            // The lane decides what to do about an offset that is out of range. A reset would silently skip or repeat records.
            .set("auto.offset.reset", "error")
            .set("partition.assignment.strategy", "cooperative-sticky")
            .set("enable.partition.eof", "true")
            .set("check.crcs", "true");
        if let Some(instance) = self.group_instance_id(member) {
            config.set("group.instance.id", instance);
        }
        // The lane parses these log lines to detect topics that were created again.
        let debug = config.get("debug").map(|debug| format!("{debug},metadata"));
        config.set("debug", debug.unwrap_or_else(|| "metadata".to_owned()));
        config.config.set_log_level(RDKafkaLogLevel::Debug);
        config
    }

    /// The `group.instance.id` of a lane's consumer; `None` for a dynamic member. Only with a configured `instance`: two static members
    /// of one name fence each other, and one that does not come back keeps its partitions until the session timeout.
    #[must_use]
    pub fn group_instance_id(&self, member: &str) -> Option<String> {
        self.static_membership
            .then(|| self.id(&format!("{}-{member}", self.instance)))
    }

    /// The configuration of a lane's producer. The prefix is added to the transactional id.
    #[must_use]
    pub fn transactional_producer(&self, transactional_id: &str) -> ClientSettings {
        let mut config = self.producer();
        let timeout = self.transaction_timeout.as_millis();
        config
            .set("transactional.id", self.id(transactional_id))
            .set("transaction.timeout.ms", timeout.to_string())
            .set("message.timeout.ms", timeout.to_string());
        config
    }

    /// The configuration of an idempotent producer without transactions.
    #[must_use]
    pub fn producer(&self) -> ClientSettings {
        let mut config = self.client();
        let tuning = [
            ("linger.ms", "1"),
            ("batch.num.messages", "10000"),
            // The topic limits the size of records. The client's default limit may be lower.
            ("message.max.bytes", "100000000"),
        ];
        for (name, value) in tuning {
            if !self.properties.contains_key(name) {
                config.set(name, value);
            }
        }
        config
            // A broker would create a topic that was deleted, such as the audit topic, with its own settings.
            .set("allow.auto.create.topics", "false")
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("partitioner", "murmur2_random");
        config
    }
}

/// Forwards librdkafka's log lines. Warnings are limited to one per kind and [`LOG_INTERVAL`], since librdkafka repeats them
/// many times per second during an outage.
#[derive(Debug, Default)]
pub(crate) struct ClientLog {
    last: Mutex<BTreeMap<String, Instant>>,
}

const LOG_INTERVAL: Duration = Duration::from_secs(10);

impl ClientLog {
    pub(crate) fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        // CONFWARN: consumers and producers share one list of properties, so each gets properties meant for the other. GETPID: the
        // client tries again, as on a new cluster; what lasts is an error of the call that waits for the producer.
        if matches!(facility, "CONFWARN" | "GETPID") {
            tracing::debug!(facility, message, "Kafka client");
            return;
        }
        match level {
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error
            | RDKafkaLogLevel::Warning => {
                if self.should_log(facility) {
                    tracing::warn!(facility, message, "Kafka client");
                }
            }
            RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info | RDKafkaLogLevel::Debug => {
                tracing::debug!(facility, message, "Kafka client");
            }
        }
    }

    pub(crate) fn should_log(&self, kind: &str) -> bool {
        let mut last = self
            .last
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = Instant::now();
        if last
            .get(kind)
            .is_some_and(|then| now.duration_since(*then) < LOG_INTERVAL)
        {
            return false;
        }
        last.insert(kind.to_owned(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_has_the_prefix() {
        let ids = |prefix: &str| {
            let settings = KafkaSettings {
                id_prefix: prefix.to_owned(),
                static_membership: true,
                ..KafkaSettings::new("localhost:9092", "pod-0")
            };
            let consumer = settings.consumer(&settings.id("redeliver-docs"), "worker-docs-0");
            let producer = settings.transactional_producer("redeliver-pod-0-worker-docs-0");
            let reader = settings.reader("read_committed");
            [
                (&consumer, "client.id"),
                (&consumer, "group.id"),
                (&consumer, "group.instance.id"),
                (&producer, "transactional.id"),
                (&reader, "group.id"),
            ]
            .map(|(config, name)| config.get(name).unwrap().to_owned())
        };
        let before = [
            "redeliver-pod-0",
            "redeliver-docs",
            "pod-0-worker-docs-0",
            "redeliver-pod-0-worker-docs-0",
            "redeliver-reader",
        ];
        assert_eq!(ids(""), before);
        assert_eq!(ids("staging-"), before.map(|id| format!("staging-{id}")));
    }

    #[test]
    fn rejected_property_hides_its_value() {
        let check = |name: &str, value: &str| {
            let mut settings = KafkaSettings::new("localhost:9092", "test");
            settings.properties.insert("linger.ms".into(), "5".into());
            settings.properties.insert(name.into(), value.into());
            settings.check_properties().map_err(|error| error.to_string())
        };
        assert_eq!(check("sasl.password", "hunter2"), Ok(()));
        let unknown = "property `sasl.pasword`: librdkafka has no such property";
        assert_eq!(check("sasl.pasword", "hunter2"), Err(unknown.into()));
        let unreadable = "property `socket.timeout.ms`: librdkafka cannot parse this value";
        assert_eq!(check("socket.timeout.ms", "hunter2"), Err(unreadable.into()));
    }
}
