//! A Kafka with an authorizer, whose topics a test makes read-only and writable again.

use anyhow::{Result, ensure};

use crate::local_kafka::kafka_tool;
use crate::{LocalKafka, run};

/// The settings of a Kafka that permits everything, apart from what [`deny_writes`] denies.
pub const AUTHORIZER: [(&str, &str); 2] = [
    (
        "authorizer.class.name",
        "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    ),
    ("allow.everyone.if.no.acl.found", "true"),
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
/// If the tool fails.
pub fn deny_writes(brokers: &str, topic: &str) -> Result<()> {
    // A topic with any permission has no others but those that are granted.
    change(
        brokers,
        topic,
        &["--add", "--allow-principal", "User:*", "--operation", "All"],
    )?;
    change(
        brokers,
        topic,
        &["--add", "--deny-principal", "User:*", "--operation", "Write"],
    )
}

/// Permits to write to a topic again.
///
/// # Errors
/// If the tool fails.
pub fn permit_writes(brokers: &str, topic: &str) -> Result<()> {
    change(
        brokers,
        topic,
        &[
            "--remove",
            "--force",
            "--deny-principal",
            "User:*",
            "--operation",
            "Write",
        ],
    )
}

fn change(brokers: &str, topic: &str, arguments: &[&str]) -> Result<()> {
    let mut command = kafka_tool("org.apache.kafka.tools.AclCommand")?;
    command
        .args(["--bootstrap-server", brokers, "--topic", topic])
        .args(arguments);
    let output = run(command);
    ensure!(output.code == Some(0), "{output:?}");
    Ok(())
}
