//! Settings of Kafka clients. Users may pass any librdkafka property through; the ones that
//! exactly-once delivery, ordering of retries and Java's partitioning depend on are set last.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;

/// How to reach Kafka and who we are to it.
#[derive(Clone, Debug)]
pub struct KafkaSettings {
    /// `bootstrap.servers`.
    pub brokers: String,
    /// librdkafka properties that are passed through: SASL, TLS, tuning.
    pub properties: BTreeMap<String, String>,
    /// The stable name of this process; makes transactional ids that survive a restart.
    pub instance: String,
    /// Whether lanes join their group under a stable member name, so that a restart within the session
    /// timeout moves no partitions.
    pub static_membership: bool,
    /// Whether a lane takes all partitions of its topics without asking a group. Only for the embedded broker,
    /// where each group has one member and joining one takes seconds.
    pub takes_all_partitions: bool,
    /// After how long without a heartbeat a member's partitions move.
    pub session_timeout: Duration,
    /// After how long the broker aborts a transaction whose process is gone.
    pub transaction_timeout: Duration,
    /// How far a lane's consumer reads ahead. [`KafkaSettings::properties`] come before it.
    pub prefetch: Prefetch,
}

/// How much of a partition the client fetches before its lane asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// Records that are enough (`queued.min.messages`).
    pub records: u32,
    /// Kibibytes that are enough (`queued.max.messages.kbytes`).
    pub kibibytes: u32,
    /// Kibibytes of one answer of the broker (`fetch.message.max.bytes`); a larger record still comes, alone.
    pub fetch_kibibytes: u32,
}

impl Prefetch {
    /// For records that are worked on as they come.
    pub const STREAM: Self = Self {
        records: 5000,
        kibibytes: 1024,
        fetch_kibibytes: 1024,
    };
    /// For records that wait where they are: what was fetched stays in memory until then, and so do freed
    /// buffers of the broker's answers, for which the allocator may not find another use.
    pub const WAITING: Self = Self {
        records: 300,
        kibibytes: 128,
        fetch_kibibytes: 64,
    };
}

/// A property that librdkafka does not take. The value is not shown: it may be a secret under a misspelt name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("property `{property}`: {problem}")]
pub struct UnusableProperty {
    /// Its name.
    pub property: String,
    /// What is wrong with it.
    pub problem: String,
}

impl KafkaSettings {
    /// Settings for a broker with defaults for the rest.
    #[must_use]
    pub fn new(brokers: impl Into<String>, instance: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            properties: BTreeMap::new(),
            instance: instance.into(),
            static_membership: false,
            takes_all_partitions: false,
            session_timeout: Duration::from_secs(10),
            transaction_timeout: Duration::from_secs(10),
            prefetch: Prefetch::STREAM,
        }
    }

    /// Looks at each passed-through property alone, before any client is made of them.
    ///
    /// # Errors
    /// The first one whose name is unknown or whose value cannot be read.
    pub fn check_properties(&self) -> Result<(), UnusableProperty> {
        for (name, value) in &self.properties {
            let mut config = ClientConfig::new();
            config.set(name, value);
            // An error of the client library shows the value.
            if let Err(KafkaError::ClientConfig(_, problem, ..)) = config.create_native_config() {
                let unknown = problem.starts_with("No such");
                return Err(UnusableProperty {
                    property: name.clone(),
                    problem: if unknown {
                        "librdkafka has no such property".to_owned()
                    } else {
                        "librdkafka cannot read this value".to_owned()
                    },
                });
            }
        }
        Ok(())
    }

    /// A client that neither joins a group nor produces: metadata, administration.
    #[must_use]
    pub fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        // Reconnect quickly after a restart of the broker; the default backs off up to ten seconds.
        config
            .set("reconnect.backoff.ms", "50")
            .set("reconnect.backoff.max.ms", "1000");
        config.set("log.connection.close", "false");
        for (name, value) in &self.properties {
            config.set(name, value);
        }
        config.set("bootstrap.servers", &self.brokers);
        config.set("client.id", format!("redeliver-{}", self.instance));
        config.set_log_level(RDKafkaLogLevel::Warning);
        config
    }

    /// The consumer of a lane. `member` makes a static member's name unique within the instance.
    #[must_use]
    pub fn consumer(&self, group: &str, member: &str) -> ClientConfig {
        let mut config = self.client();
        let session = self.session_timeout.as_millis();
        // A queue that was full must be refilled at once: the default of one second costs lateness and an
        // eighth of the throughput.
        let prefetch = self.prefetch;
        let tuning = [
            ("fetch.queue.backoff.ms", 1),
            ("fetch.wait.max.ms", 10),
            // What the lag is told from.
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
            .set("isolation.level", "read_committed")
            // The lane says where to start, and an offset that the log does not have is for it to judge.
            .set("auto.offset.reset", "error")
            .set("partition.assignment.strategy", "cooperative-sticky")
            .set("enable.partition.eof", "false")
            .set("check.crcs", "true");
        if let Some(instance) = self.group_instance_id(member) {
            config.set("group.instance.id", instance);
        }
        // The lane learns from these lines that a topic is another one than before.
        let debug = config.get("debug").map(|debug| format!("{debug},metadata"));
        config.set("debug", debug.unwrap_or_else(|| "metadata".to_owned()));
        config.set_log_level(RDKafkaLogLevel::Debug);
        config
    }

    /// The `group.instance.id` of a lane's consumer; `None` for a dynamic member.
    #[must_use]
    pub fn group_instance_id(&self, member: &str) -> Option<String> {
        self.static_membership
            .then(|| format!("{}-{member}", self.instance))
    }

    /// The producer of a lane.
    #[must_use]
    pub fn transactional_producer(&self, transactional_id: &str) -> ClientConfig {
        let mut config = self.producer();
        let timeout = self.transaction_timeout.as_millis();
        config
            .set("transactional.id", transactional_id)
            .set("transaction.timeout.ms", timeout.to_string())
            .set("message.timeout.ms", timeout.to_string());
        config
    }

    /// A producer without transactions.
    #[must_use]
    pub fn producer(&self) -> ClientConfig {
        let mut config = self.client();
        // How large a record may be is for its topic to say: the client's own limit is lower than the broker's.
        let tuning = [
            ("linger.ms", "1"),
            ("batch.num.messages", "10000"),
            ("message.max.bytes", "100000000"),
        ];
        for (name, value) in tuning {
            if !self.properties.contains_key(name) {
                config.set(name, value);
            }
        }
        config
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("partitioner", "murmur2_random");
        config
    }
}

/// Passes librdkafka's own log lines on, of its warnings at most one per kind and ten seconds: an outage makes it repeat
/// them many times a second.
#[derive(Debug, Default)]
pub(crate) struct ClientLog {
    last: Mutex<BTreeMap<String, Instant>>,
}

const LOG_INTERVAL: Duration = Duration::from_secs(10);

impl ClientLog {
    pub(crate) fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        // A property meant for the other kind of client is no problem: one list of properties serves both.
        if facility == "CONFWARN" {
            tracing::debug!(facility, message, "kafka client");
            return;
        }
        match level {
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error
            | RDKafkaLogLevel::Warning => {
                if self.is_time(facility) {
                    tracing::warn!(facility, message, "kafka client");
                }
            }
            RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info | RDKafkaLogLevel::Debug => {
                tracing::debug!(facility, message, "kafka client");
            }
        }
    }

    pub(crate) fn is_time(&self, kind: &str) -> bool {
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
    fn a_property_that_cannot_be_used_is_named_and_its_value_is_not() {
        let check = |name: &str, value: &str| {
            let mut settings = KafkaSettings::new("localhost:9092", "test");
            settings.properties.insert("linger.ms".into(), "5".into());
            settings.properties.insert(name.into(), value.into());
            settings.check_properties().map_err(|error| error.to_string())
        };
        assert_eq!(check("sasl.password", "hunter2"), Ok(()));
        let unknown = "property `sasl.pasword`: librdkafka has no such property";
        assert_eq!(check("sasl.pasword", "hunter2"), Err(unknown.into()));
        let unreadable = "property `socket.timeout.ms`: librdkafka cannot read this value";
        assert_eq!(check("socket.timeout.ms", "hunter2"), Err(unreadable.into()));
    }
}
