//! A Kafka with an authorizer, whose topics a test makes read-only or invisible, and back.

use anyhow::Result;

use crate::LocalKafka;
use crate::kafka_request::{Acl, create_acl, delete_acl};

const EVERYTHING: Acl = Acl {
    operation: 2,
    permission: 3,
};
const NO_WRITES: Acl = Acl {
    operation: 4,
    permission: 2,
};
const NO_DESCRIPTION: Acl = Acl {
    operation: 8,
    permission: 2,
};

/// The settings of a Kafka that permits everything, apart from what functions such as [`deny_writes`] deny.
pub const AUTHORIZER: [(&str, &str); 2] = [
    (
        "authorizer.class.name",
        "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    ),
    ("allow.everyone.if.no.acl.found", "true"),
];

/// The settings of a Kafka with a login that permits to users only what is granted to them, and everything to clients of the listener without a login.
pub const ONLY_GRANTED: [(&str, &str); 2] = [
    (
        "authorizer.class.name",
        "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    ),
    ("super.users", "User:ANONYMOUS"),
];

/// Starts a Kafka with [`AUTHORIZER`].
///
/// # Errors
/// As [`LocalKafka::start`].
pub fn start() -> Result<LocalKafka> {
    LocalKafka::start_with(&AUTHORIZER)
}

/// Denies everybody to write to a topic. All else stays permitted.
///
/// # Errors
/// If the broker refuses.
pub fn deny_writes(brokers: &str, topic: &str) -> Result<()> {
    // A topic with any permission has no others but those that are granted.
    create_acl(brokers, topic, &EVERYTHING)?;
    create_acl(brokers, topic, &NO_WRITES)
}

/// Permits to write to a topic again.
///
/// # Errors
/// If the broker refuses.
pub fn permit_writes(brokers: &str, topic: &str) -> Result<()> {
    delete_acl(brokers, topic, &NO_WRITES)
}

/// Denies everybody to see that a topic exists. Who knows it can go on reading it.
///
/// # Errors
/// If the broker refuses.
pub fn hide(brokers: &str, topic: &str) -> Result<()> {
    create_acl(brokers, topic, &EVERYTHING)?;
    create_acl(brokers, topic, &NO_DESCRIPTION)
}

/// Permits to see a topic again.
///
/// # Errors
/// If the broker refuses.
pub fn show(brokers: &str, topic: &str) -> Result<()> {
    delete_acl(brokers, topic, &NO_DESCRIPTION)
}
