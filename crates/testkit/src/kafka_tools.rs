//! Runs scripts that call Kafka's own tools.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use crate::local_kafka::kafka_tool;
use crate::{CommandOutput, TestEnv, run};

/// A script of Kafka's distribution, and the class that it runs.
#[derive(Debug)]
pub struct Tool(&'static str, &'static str);

/// Creates and shows topics.
pub const KAFKA_TOPICS: Tool = Tool("kafka-topics.sh", "org.apache.kafka.tools.TopicCommand");
/// Grants permissions.
pub const KAFKA_ACLS: Tool = Tool("kafka-acls.sh", "org.apache.kafka.tools.AclCommand");
/// Changes configurations, also of users.
pub const KAFKA_CONFIGS: Tool = Tool("kafka-configs.sh", "kafka.admin.ConfigCommand");

/// Runs a script that calls this tool, with the broker of the test's environment.
///
/// # Panics
/// If Java is missing, or the script cannot be written or started.
#[track_caller]
pub fn run_script(env: &TestEnv, tool: &Tool, script: &str) -> CommandOutput {
    let Tool(name, class) = tool;
    let java = kafka_tool(class).unwrap();
    let quoted = |part: &std::ffi::OsStr| format!("'{}'", part.to_str().unwrap());
    let parts: Vec<String> = std::iter::once(java.get_program())
        .chain(java.get_args())
        .map(quoted)
        .collect();
    let path = env.directory().join(name);
    std::fs::write(&path, format!("#!/bin/sh\nexec {} \"$@\"\n", parts.join(" "))).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let file = env.directory().join("script.sh");
    std::fs::write(&file, script).unwrap();
    let mut command = Command::new("env");
    let search = std::env::var("PATH").unwrap();
    command
        .arg(format!("PATH={}:{search}", env.directory().display()))
        .arg(format!("BOOTSTRAP_SERVER={}", env.brokers()))
        .args(["sh".as_ref(), file.as_os_str()]);
    run(command)
}
