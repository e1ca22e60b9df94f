//! Headers that frameworks other than Redeliver add to a record because it failed.

/// A framework that describes failures in headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framework {
    /// Spring for Apache Kafka.
    Spring,
    /// Kafka Connect.
    Connect,
    /// Kafka Streams.
    Streams,
    /// `SmallRye` Reactive Messaging, which Quarkus uses.
    SmallRye,
    /// Kafka share groups.
    ShareGroup,
}

/// The beginnings of the names of headers that frameworks add to a record because it failed.
pub const FAILURE_PREFIXES: [(Framework, &str); 7] = [
    (Framework::Spring, "kafka_dlt-"),
    (Framework::Spring, "retry_topic-"),
    (Framework::Spring, "springDeserializerException"),
    (Framework::Connect, "__connect.errors."),
    (Framework::Streams, "__streams.errors."),
    (Framework::ShareGroup, "__dlq.errors."),
    // If it cannot deserialize the record.
    (Framework::SmallRye, "deserialization-failure-"),
];

/// The names of other such headers. Reserved headers are not among them: some of them stay when a record is redriven.
pub const FAILURE_HEADERS: [(Framework, &str); 8] = [
    (Framework::Spring, "kafka_deliveryAttempt"),
    (Framework::SmallRye, "dead-letter-exception-class-name"),
    (Framework::SmallRye, "dead-letter-cause-class-name"),
    (Framework::SmallRye, "dead-letter-reason"),
    (Framework::SmallRye, "dead-letter-cause"),
    (Framework::SmallRye, "dead-letter-topic"),
    (Framework::SmallRye, "dead-letter-partition"),
    (Framework::SmallRye, "dead-letter-offset"),
];

/// The framework that adds a header of this name to a record because it failed.
#[must_use]
pub fn framework_of(header: &str) -> Option<Framework> {
    let named = FAILURE_HEADERS.iter().find(|(_, name)| header == *name);
    let found = named.or_else(|| {
        FAILURE_PREFIXES
            .iter()
            .find(|(_, prefix)| header.starts_with(prefix))
    });
    found.map(|(framework, _)| *framework)
}
