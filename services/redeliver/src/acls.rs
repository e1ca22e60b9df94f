//! `redeliver acls`: prints the permissions that the configuration needs in Kafka.

mod iam;
mod permissions;

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use redeliver_runtime::cli::{CommonArgs, EXIT_USAGE};
use redeliver_runtime::config::is_instance_char;

use crate::config::Config;
use crate::render::{object_name, quoted, shell_word};
use crate::say;
use iam::{ClusterArn, Policy};
pub(crate) use permissions::all_topics;
use permissions::{Name, Permissions, Program, Resource};

#[derive(Args)]
pub(crate) struct AclsArgs {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Print commands or objects that grant a Kafka user the necessary permissions
    #[command(
        after_help = "Examples:\n  redeliver acls render --format script --user redeliver-tier --programs retry-tier\n  redeliver acls render --format iam-policy --cluster-arn arn:aws:kafka:REGION:ACCOUNT:cluster/NAME/UUID"
    )]
    Render(RenderArgs),
}

#[derive(Args)]
struct RenderArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// script (kafka-acls.sh commands), strimzi (a KafkaUser, as YAML) or iam-policy (for Amazon MSK, as JSON)
    #[arg(long, value_enum, hide_possible_values = true)]
    format: Format,
    /// Name of the Kafka user, without `User:`
    #[arg(long, value_name = "NAME", default_value = "redeliver", value_parser = user_name)]
    user: String,
    /// Only for these programs: scheduler, retry-tier, enricher, worker, dlq-inspector, lake, redeliver (default: all)
    #[arg(
        long,
        value_enum,
        value_name = "PROGRAM",
        value_delimiter = ',',
        hide_possible_values = true
    )]
    programs: Vec<Program>,
    /// Permit only transactional ids of instances with these prefixes, such as names of pods (default: all)
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', value_parser = instance_prefix)]
    instances: Vec<String>,
    /// Name of Strimzi's Kafka object; for --format strimzi
    #[arg(
        long,
        value_name = "NAME",
        required_if_eq("format", "strimzi"),
        value_parser = object_name
    )]
    cluster: Option<String>,
    /// ARN of the cluster; for --format iam-policy
    #[arg(
        long,
        value_name = "ARN",
        required_if_eq("format", "iam-policy"),
        value_parser = ClusterArn::parse
    )]
    cluster_arn: Option<ClusterArn>,
    /// Login of the user, for --format strimzi: scram-sha-512, tls or none
    #[arg(
        long,
        value_enum,
        default_value = "scram-sha-512",
        hide_possible_values = true,
        hide_default_value = true
    )]
    authentication: Authentication,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Strimzi,
    Script,
    IamPolicy,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Authentication {
    #[value(name = "scram-sha-512")]
    ScramSha512,
    Tls,
    None,
}

/// A user name that can be quoted for a shell and for YAML.
fn user_name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| !c.is_control() && !matches!(c, '\'' | '"' | '\\');
    if text.is_empty() || text.starts_with("User:") || !text.chars().all(is_plain) {
        return Err("write the name without `User:`, quotes, backslashes and control characters".to_owned());
    }
    Ok(text.to_owned())
}

/// The beginning of an instance's name.
fn instance_prefix(text: &str) -> Result<String, String> {
    if text.is_empty() || !text.chars().all(is_instance_char) {
        return Err(
            "use one or more of the characters a-z, A-Z, 0-9, `.`, `_` and `-`, without a wildcard"
                .to_owned(),
        );
    }
    Ok(text.to_owned())
}

pub(crate) fn main(args: &AclsArgs) -> ExitCode {
    let Verb::Render(args) = &args.verb;
    let config: Config = match args.common.configure(|_| Ok(())) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let programs = if args.programs.is_empty() {
        Program::value_variants()
    } else {
        &args.programs
    };
    let permissions = Permissions::of(programs, &config, &args.instances);
    let user = args.user.as_str();
    match args.format {
        Format::Script => say(Script { permissions, user }),
        Format::IamPolicy => {
            // JSON has no comments.
            eprint!("{}", Patterns(&permissions));
            let Some(cluster) = &args.cluster_arn else {
                eprintln!("error: --cluster-arn: is missing");
                return ExitCode::from(EXIT_USAGE);
            };
            say(Policy {
                permissions: &permissions,
                cluster,
            });
        }
        Format::Strimzi => {
            if let Err(problem) = object_name(user) {
                eprintln!("error: --user: {problem}, for --format strimzi");
                return ExitCode::from(EXIT_USAGE);
            }
            say(Strimzi {
                permissions,
                user,
                cluster: args.cluster.as_deref().unwrap_or_default(),
                authentication: args.authentication,
            });
        }
    }
    ExitCode::SUCCESS
}

/// A comment about patterns for which the administrator must grant permissions.
struct Patterns<'a>(&'a Permissions);

impl fmt::Display for Patterns<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let patterns = &self.0.patterns;
        if patterns.is_empty() {
            return Ok(());
        }
        let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
        writeln!(
            f,
            "# Kafka has no rules for the patterns of dlq_inspector.topics: {}\n\
             # Dead-letter topics of the configuration are included. If others match, add Read and DescribeConfigs on them.",
            patterns.join(" ")
        )
    }
}

struct Strimzi<'a> {
    permissions: Permissions,
    user: &'a str,
    cluster: &'a str,
    authentication: Authentication,
}

impl fmt::Display for Strimzi<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}apiVersion: kafka.strimzi.io/v1beta2\n\
             kind: KafkaUser\n\
             metadata:\n  \
               name: {}\n  \
               labels:\n    \
                 strimzi.io/cluster: {}\n\
             spec:\n",
            Patterns(&self.permissions),
            quoted(self.user),
            quoted(self.cluster)
        )?;
        match self.authentication {
            Authentication::ScramSha512 => f.write_str("  authentication:\n    type: scram-sha-512\n")?,
            Authentication::Tls => f.write_str("  authentication:\n    type: tls\n")?,
            Authentication::None => {}
        }
        f.write_str("  authorization:\n    type: simple\n    acls:")?;
        for (resource, operations) in self.permissions.iter() {
            let (kind, name) = match resource {
                Resource::Cluster => ("cluster", None),
                Resource::Topic(name) => ("topic", Some(name)),
                Resource::Group(name) => ("group", Some(name)),
                Resource::TransactionalId(name) => ("transactionalId", Some(name)),
            };
            write!(f, "\n      - resource:\n          type: {kind}")?;
            if let Some(name) = name {
                let (name, pattern) = match name {
                    Name::Literal(name) => (name, "literal"),
                    Name::Prefix(name) => (name, "prefix"),
                };
                write!(
                    f,
                    "\n          name: {}\n          patternType: {pattern}",
                    quoted(name)
                )?;
            }
            let operations: Vec<String> = operations.iter().map(|it| format!("{it:?}")).collect();
            write!(f, "\n        operations: [{}]", operations.join(", "))?;
        }
        Ok(())
    }
}

struct Script<'a> {
    permissions: Permissions,
    user: &'a str,
}

impl fmt::Display for Script<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "#!/bin/sh\n\
             # Grants permissions, and revokes none. Usage:\n\
             #   BOOTSTRAP_SERVER=kafka:9092 [COMMAND_CONFIG=client.properties] sh FILE\n",
        )?;
        write!(f, "{}", Patterns(&self.permissions))?;
        write!(
            f,
            "set -eu\n\
             allow() {{\n    \
                 kafka-acls.sh --bootstrap-server \"$BOOTSTRAP_SERVER\" ${{COMMAND_CONFIG:+--command-config \"$COMMAND_CONFIG\"}} \\\n        \
                     --add --allow-principal 'User:{}' \"$@\"\n\
             }}",
            self.user
        )?;
        // Each call starts a Java program, so one call grants the same operations on all resources of a kind.
        let mut calls: BTreeMap<String, String> = BTreeMap::new();
        for (resource, operations) in self.permissions.iter() {
            let (flag, name) = match resource {
                Resource::Cluster => ("--cluster", None),
                Resource::Topic(name) => ("--topic", Some(name)),
                Resource::Group(name) => ("--group", Some(name)),
                Resource::TransactionalId(name) => ("--transactional-id", Some(name)),
            };
            let (pattern, name) = match name {
                None => ("", None),
                Some(Name::Literal(name)) => ("", Some(name)),
                Some(Name::Prefix(name)) => (" --resource-pattern-type prefixed", Some(name)),
            };
            let mut call = operations.iter().fold(String::new(), |mut call, operation| {
                // Writing to a string cannot fail.
                let _ = write!(call, " --operation {operation:?}");
                call
            });
            call += pattern;
            let resources = calls.entry(format!("{flag}{call}")).or_insert_with(|| call);
            write!(resources, " {flag}")?;
            if let Some(name) = name {
                write!(resources, " {}", shell_word(name))?;
            }
        }
        for call in calls.values() {
            write!(f, "\nallow{call}")?;
        }
        Ok(())
    }
}
