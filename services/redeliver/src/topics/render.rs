//! `redeliver topics render`: prints the topics for clusters on which Redeliver may not create them.

use std::fmt::{self, Write as _};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use redeliver_dlq_inspector::ledger;
use redeliver_kafka::topology::{PlannedTopic, TopologySpec, plan};
use redeliver_runtime::cli::{CommonArgs, report};
use redeliver_service::topics;
use sha2::{Digest as _, Sha256};

use crate::say;

#[derive(Args)]
pub(crate) struct RenderArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// strimzi: objects of Strimzi's topic operator, as YAML; script: `kafka-topics.sh` commands
    #[arg(long, value_enum, hide_possible_values = true)]
    format: Format,
    /// Name of Strimzi's Kafka object; for --format strimzi
    #[arg(
        long,
        value_name = "NAME",
        required_if_eq("format", "strimzi"),
        value_parser = object_name
    )]
    cluster: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Strimzi,
    Script,
}

pub(super) fn main(args: &RenderArgs) -> ExitCode {
    let config = match args.common.load() {
        Ok(config) => config,
        Err(error) => return report(&error),
    };
    if let Some(code) = args.common.handle_config_flags(&config, |_| Ok(())) {
        return code;
    }
    let settings = topics::topic_settings(&config);
    let spec = topics::of_all(&config).join(TopologySpec::for_ledger(ledger::TOPIC, &settings));
    let planned = plan(&spec);
    match (args.format, &args.cluster) {
        (Format::Script, _) => say(Script(&planned)),
        (Format::Strimzi, cluster) => say(Strimzi {
            topics: &planned,
            cluster: cluster.as_deref().unwrap_or_default(),
        }),
    }
    ExitCode::SUCCESS
}

/// The name of a Kubernetes object.
fn object_name(text: &str) -> Result<String, String> {
    if text.len() <= 63 && object_name_of(text) == text {
        Ok(text.to_owned())
    } else {
        Err("write the name of a Kubernetes object: up to 63 of a-z 0-9 -".to_owned())
    }
}

/// A name for the object of a topic. Names of objects allow fewer characters than names of topics; a hash keeps them unique.
fn object_name_of(topic: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let replaced: String = topic
        .to_ascii_lowercase()
        .chars()
        .map(|c| if is_allowed(c) { c } else { '-' })
        .collect();
    // Each part between dots begins and ends with a letter or a digit.
    let parts: Vec<&str> = replaced
        .split('.')
        .map(|part| part.trim_matches('-'))
        .filter(|part| !part.is_empty())
        .collect();
    let name = parts.join(".");
    if name == topic {
        return name;
    }
    let hash = Sha256::digest(topic);
    let separator = if name.is_empty() { "topic-" } else { "-" };
    format!(
        "{name}{separator}{:02x}{:02x}{:02x}{:02x}",
        hash[0], hash[1], hash[2], hash[3]
    )
}

struct Strimzi<'a> {
    topics: &'a [PlannedTopic],
    cluster: &'a str,
}

impl fmt::Display for Strimzi<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = "# Settings that depend on other topics assume that those have Kafka's defaults. Check the result with\n\
                        # `redeliver topics check`.\n"
            .to_owned();
        let (managed, of_users): (Vec<_>, Vec<_>) = self.topics.iter().partition(|topic| topic.is_managed);
        // Strimzi would change topics that exist.
        if !of_users.is_empty() {
            let names: Vec<&str> = of_users.iter().map(|topic| &*topic.name).collect();
            writeln!(
                text,
                "# Not included, because they belong to users: {}",
                names.join(" ")
            )?;
        }
        for topic in managed {
            write!(
                text,
                "---\n\
                 apiVersion: kafka.strimzi.io/v1beta2\n\
                 kind: KafkaTopic\n\
                 metadata:\n  \
                   name: {}\n  \
                   labels:\n    \
                     strimzi.io/cluster: {}\n\
                 spec:\n  \
                   topicName: {}\n  \
                   partitions: {}\n",
                quoted(&object_name_of(&topic.name)),
                quoted(self.cluster),
                quoted(&topic.name),
                topic.partitions
            )?;
            if topic.replication > 0 {
                writeln!(text, "  replicas: {}", topic.replication)?;
            }
            if !topic.config.is_empty() {
                text += "  config:\n";
                for (name, value) in &topic.config {
                    writeln!(text, "    {name}: {}", quoted(value))?;
                }
            }
        }
        f.write_str(text.trim_end())
    }
}

/// A YAML string. A plain `1` or `on` would not be one. None of the values contains a quote or a backslash.
fn quoted(text: &str) -> String {
    format!("\"{text}\"")
}

struct Script<'a>(&'a [PlannedTopic]);

impl fmt::Display for Script<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "#!/bin/sh\n\
             # Creates missing topics; existing ones are not changed. Settings that depend on other topics assume that those have\n\
             # Kafka's defaults or were created by this script. Check the result with `redeliver topics check`. Usage:\n\
             #   BOOTSTRAP_SERVER=kafka:9092 [COMMAND_CONFIG=client.properties] sh FILE\n\
             set -eu\n\
             create() {\n    \
                 kafka-topics.sh --bootstrap-server \"$BOOTSTRAP_SERVER\" ${COMMAND_CONFIG:+--command-config \"$COMMAND_CONFIG\"} \\\n        \
                     --create --if-not-exists \"$@\"\n\
             }",
        )?;
        for topic in self.0 {
            write!(
                f,
                "\ncreate --topic {} --partitions {}",
                topic.name, topic.partitions
            )?;
            if topic.replication > 0 {
                write!(f, " --replication-factor {}", topic.replication)?;
            }
            for (name, value) in &topic.config {
                write!(f, " --config {name}={value}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_topics_that_are_no_names_of_objects_get_a_hash() {
        for name in ["crawl-jobs-retry-5s", "a.b-c.1"] {
            assert_eq!(object_name_of(name), name);
        }
        assert_eq!(object_name_of("Crawl_Jobs"), "crawl-jobs-e52dd44b");
        for topic in [
            "Crawl_Jobs",
            "crawl_jobs",
            "crawl-Jobs",
            "_",
            "...",
            "-a.-b-",
            "redeliver_",
        ] {
            let name = object_name_of(topic);
            let is_valid = name
                .split('.')
                .all(|part| !part.is_empty() && !part.starts_with('-') && !part.ends_with('-'));
            assert!(is_valid && !name.contains('_'), "{topic}: {name}");
            assert_ne!(name, topic);
        }
        assert_ne!(object_name_of("Crawl_Jobs"), object_name_of("crawl_jobs"));
    }
}
