//! `redeliver topics migrate-offsets`: copies the committed offsets of all groups of the configuration to the groups with
//! another prefix, so that processes with that prefix continue where the others stopped. Before that, it copies what was asked for and done with single waiting
//! records: what a tier has acted on ahead of its offsets is only there.
//!
//! The metadata of the offsets is copied as it is. It contains the completed set and the identity of the topic. Nothing is
//! written unless all groups have no members and no target has other offsets. Nothing is deleted.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use redeliver_core::Output;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::groups::{self, GroupOffsets};
use redeliver_kafka::producer::{ProduceError, Producer};
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::topology::{self, TopologyError};
use redeliver_runtime::cli::{CommonArgs, report};
use redeliver_runtime::config::{WAITING_ACTIONS_TOPIC, check_id_prefix};
use redeliver_service::groups::{ConfiguredGroup, of_config};
use redeliver_service::host::check_kafka;
use redeliver_service::login::kafka_of_command;

use crate::config::Config;
use crate::connection::say_cluster;
use crate::say;

#[derive(Args)]
pub(crate) struct MigrateArgs {
    /// Prefix of the groups to copy offsets from; "" for none
    #[arg(long, value_name = "PREFIX", value_parser = prefix)]
    from_prefix: String,
    /// Prefix of the groups to copy offsets to (default: kafka.id_prefix)
    #[arg(long, value_name = "PREFIX", value_parser = prefix)]
    to_prefix: Option<String>,
    #[command(flatten)]
    common: CommonArgs,
}

fn prefix(text: &str) -> Result<String, String> {
    check_id_prefix(text).map(|()| text.to_owned())
}

const TIMEOUT: Duration = Duration::from_secs(30);
/// How many records are written at a time.
const IN_FLIGHT: usize = 1_000;

/// Why no offsets were copied, or not all.
#[derive(Debug, thiserror::Error)]
enum MigrateError {
    #[error("both prefixes are `{0}`; set kafka.id_prefix or --to-prefix to the new one")]
    SamePrefix(String),
    #[error("cannot list topics")]
    Topics(#[from] TopologyError),
    #[error("{0}")]
    Read(String, #[source] ReadError),
    #[error(
        "there are actions on waiting records, but no topic `{0}` for them; run `redeliver topics apply` first; nothing was copied"
    )]
    NoActionsTopic(String),
    #[error("cannot copy the actions on waiting records")]
    Actions(#[from] ProduceError),
    #[error("a broker did not list its consumer groups, so nothing was copied: {0}")]
    Incomplete(String),
    #[error(
        "the consumer group `{0}` has members; stop all processes with this prefix and wait for \
         kafka.session_timeout; nothing was copied"
    )]
    Members(String),
    #[error(
        "the consumer group `{group}` has committed other offsets than `{from}`: {difference}; nothing was copied"
    )]
    OtherOffsets {
        group: String,
        from: String,
        difference: String,
    },
    #[error(
        "the consumer group `{0}` has changed during the copy; do not start processes with the new prefix before its \
         offsets are right"
    )]
    Changed(String),
}

/// The offsets of a group before the copy.
struct Planned {
    from: String,
    to: String,
    group: ConfiguredGroup,
    offsets: GroupOffsets,
    /// Those that the target does not have yet.
    missing: GroupOffsets,
}

pub(super) fn main(args: &MigrateArgs) -> ExitCode {
    let config: Config = match args.common.configure(|config| check_kafka(config)) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return report(&error),
    };
    let kafka = match kafka_of_command(&config) {
        Ok(kafka) => kafka,
        Err(error) => return report(&error),
    };
    let existing = match runtime.block_on(topology::names(&kafka.client(), TIMEOUT)) {
        Ok(existing) => existing,
        Err(error) => return report(&MigrateError::from(error)),
    };
    let to_prefix = args.to_prefix.as_ref().unwrap_or(&config.kafka.id_prefix);
    let configured = of_config(&config, &existing);
    say_cluster(&kafka);
    let actions = [&args.from_prefix, to_prefix].map(|prefix| format!("{prefix}{WAITING_ACTIONS_TOPIC}"));
    let copy_actions = || {
        if !existing.contains(&actions[0]) {
            return Ok(());
        }
        if !existing.contains(&actions[1]) {
            return Err(MigrateError::NoActionsTopic(actions[1].clone()));
        }
        runtime.block_on(copy_actions(&kafka, &actions))
    };
    match migrate(&kafka, configured, &args.from_prefix, to_prefix, copy_actions) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

fn migrate(
    kafka: &KafkaSettings,
    configured: Vec<ConfiguredGroup>,
    from_prefix: &str,
    to_prefix: &str,
    copy_actions: impl FnOnce() -> Result<(), MigrateError>,
) -> Result<(), MigrateError> {
    if from_prefix == to_prefix {
        return Err(MigrateError::SamePrefix(to_prefix.to_owned()));
    }
    let names = |group: ConfiguredGroup| {
        let from = format!("{from_prefix}{}", group.name);
        (from, format!("{to_prefix}{}", group.name), group)
    };
    let configured: Vec<_> = configured.into_iter().map(names).collect();
    // All groups are checked before the first one is written.
    check_empty(kafka, configured.iter().flat_map(|(from, to, _)| [from, to]))?;
    let mut planned = Vec::new();
    for (from, to, group) in configured {
        let offsets = read(kafka, &from, &group)?;
        let present = read(kafka, &to, &group)?;
        let missing = missing(&offsets, &present).map_err(|difference| MigrateError::OtherOffsets {
            group: to.clone(),
            from: from.clone(),
            difference,
        })?;
        planned.push(Planned {
            from,
            to,
            group,
            offsets,
            missing,
        });
    }
    // Offsets that are there say that the actions were copied.
    if planned.iter().any(|copy| !copy.missing.is_empty()) {
        copy_actions()?;
    }
    for copy in &planned {
        copy.write(kafka)?;
    }
    // A process that started meanwhile may have moved on since its offsets were read.
    for copy in &planned {
        for group in [&copy.from, &copy.to] {
            if read(kafka, group, &copy.group)? != copy.offsets {
                return Err(MigrateError::Changed(group.clone()));
            }
        }
    }
    check_empty(kafka, planned.iter().map(|copy| &copy.from)).map_err(|error| match error {
        MigrateError::Members(group) => MigrateError::Changed(group),
        error => error,
    })
}

impl Planned {
    fn write(&self, kafka: &KafkaSettings) -> Result<(), MigrateError> {
        let Self {
            from,
            to,
            offsets,
            missing,
            ..
        } = self;
        if offsets.is_empty() {
            say(format_args!("empty    {from}: no committed offsets"));
        } else if missing.is_empty() {
            say(format_args!("exists   {from} -> {to}: {}", count(offsets)));
        } else {
            groups::commit(kafka, to, missing)
                .map_err(|error| MigrateError::Read(format!("cannot copy the offsets to `{to}`"), error))?;
            say(format_args!("copied   {from} -> {to}: {}", count(missing)));
        }
        Ok(())
    }
}

/// Copies all values of one topic of actions to another one. Blocks while it reads them.
async fn copy_actions(kafka: &KafkaSettings, [from, to]: &[String; 2]) -> Result<(), MigrateError> {
    let mut records = Vec::new();
    let to: Arc<str> = to.as_str().into();
    let read = TopicReader::new(kafka, &[from.as_str().into()]).and_then(|mut reader| {
        reader.read_to_end(TIMEOUT, |record| {
            records.push(Output {
                topic: to.clone(),
                partition: Some(0),
                key: record.key,
                value: record.value,
                headers: record.headers,
            });
        })
    });
    read.map_err(|error| MigrateError::Read(format!("cannot read the topic `{from}`"), error))?;
    if records.is_empty() {
        return Ok(());
    }
    let producer = Producer::new(kafka)?;
    // In their order: the last value of a key counts.
    let sent = stream::iter(&records).map(|record| producer.send(record));
    sent.buffered(IN_FLIGHT).try_for_each(async |_| Ok(())).await?;
    say(format_args!("copied   {from} -> {to}: {} records", records.len()));
    Ok(())
}

fn count(offsets: &GroupOffsets) -> String {
    match offsets.len() {
        1 => "1 offset".to_owned(),
        offsets => format!("{offsets} offsets"),
    }
}

fn read(kafka: &KafkaSettings, name: &str, group: &ConfiguredGroup) -> Result<GroupOffsets, MigrateError> {
    groups::offsets(kafka, name, &group.topics)
        .map_err(|error| MigrateError::Read(format!("cannot read the offsets of `{name}`"), error))
}

/// A group that no broker lists has no members.
fn check_empty<'g>(
    kafka: &KafkaSettings,
    groups: impl Iterator<Item = &'g String>,
) -> Result<(), MigrateError> {
    let list = groups::list(kafka, TIMEOUT)
        .map_err(|error| MigrateError::Read("cannot list consumer groups".to_owned(), error))?;
    if let Some(code) = list.error {
        return Err(MigrateError::Incomplete(code.to_string()));
    }
    let is_empty: BTreeMap<&str, bool> = list
        .groups
        .iter()
        .map(|group| (group.name.as_str(), group.is_empty))
        .collect();
    for group in groups {
        if is_empty.get(group.as_str()) == Some(&false) {
            return Err(MigrateError::Members(group.clone()));
        }
    }
    Ok(())
}

/// The offsets that the target does not have yet.
///
/// # Errors
/// A partition for which the target has another offset, or other metadata.
fn missing(offsets: &GroupOffsets, present: &GroupOffsets) -> Result<GroupOffsets, String> {
    for ((topic, partition), found) in present {
        let Some(expected) = offsets.get(&(topic.clone(), *partition)) else {
            return Err(format!("{topic}/{partition} is at {}, not unread", found.offset));
        };
        if found.offset != expected.offset {
            return Err(format!(
                "{topic}/{partition} is at {}, not {}",
                found.offset, expected.offset
            ));
        }
        if found != expected {
            return Err(format!("the metadata of {topic}/{partition} differs"));
        }
    }
    let mut missing = offsets.clone();
    missing.retain(|partition, _| !present.contains_key(partition));
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::groups::CommittedOffset;

    use super::*;

    fn offsets(list: &[(i32, i64, &str)]) -> GroupOffsets {
        let list = list.iter().map(|(partition, offset, metadata)| {
            let committed = CommittedOffset::new(*offset, *metadata);
            (("docs".to_owned(), *partition), committed)
        });
        list.collect()
    }

    #[test]
    fn only_missing_offsets_are_copied() {
        let from = offsets(&[(0, 7, "r1:AQE"), (1, 9, "")]);
        assert_eq!(missing(&from, &offsets(&[])), Ok(from.clone()));
        assert_eq!(
            missing(&from, &offsets(&[(0, 7, "r1:AQE")])),
            Ok(offsets(&[(1, 9, "")]))
        );
        assert_eq!(missing(&from, &from), Ok(offsets(&[])));
        for (present, difference) in [
            ((1, 10, ""), "docs/1 is at 10, not 9"),
            ((0, 7, ""), "the metadata of docs/0 differs"),
            ((2, 0, ""), "docs/2 is at 0, not unread"),
        ] {
            assert_eq!(missing(&from, &offsets(&[present])), Err(difference.to_owned()));
        }
    }
}
