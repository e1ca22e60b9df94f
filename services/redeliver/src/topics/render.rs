//! `redeliver topics render`: prints the topics for clusters on which Redeliver may not create them.

use std::fmt::{self, Write as _};
use std::process::ExitCode;

use clap::Args;
use redeliver_kafka::topology::{PlannedTopic, plan};
use redeliver_runtime::cli::CommonArgs;

use crate::acls::all_topics;
use crate::config::Config;
use crate::render::{Format, object_name, object_name_of, quoted};
use crate::say;

#[derive(Args)]
pub(crate) struct RenderArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// script (kafka-topics.sh commands) or strimzi (objects of Strimzi's topic operator, as YAML)
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

pub(super) fn main(args: &RenderArgs) -> ExitCode {
    let config: Config = match args.common.configure(|_| Ok(())) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let planned = plan(&all_topics(&config));
    match (args.format, &args.cluster) {
        (Format::Script, _) => say(Script(&planned)),
        (Format::Strimzi, cluster) => say(Strimzi {
            topics: &planned,
            cluster: cluster.as_deref().unwrap_or_default(),
        }),
    }
    ExitCode::SUCCESS
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
