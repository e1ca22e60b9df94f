//! What is wrong with topics as they are.

use std::collections::BTreeMap;

use redeliver_core::Span;
use redeliver_core::pipeline::TopicRole;

use super::needed::{HEADER_ROOM, largest_source};
use super::{ActualTopic, Cleanup, Finding, Role, Severity, TopicSpec, TopologySpec};

/// The topics there are, by name.
type Actual = BTreeMap<String, ActualTopic>;

/// With less a tombstone may be gone before a slow reader has seen it; it is also Kafka's default.
const SHORTEST_TOMBSTONE_RETENTION: Span = Span::from_secs(86_400);

/// What is wrong with the topics, by topic in the order of the specification.
#[must_use]
pub fn examine_all(spec: &TopologySpec, actual: &Actual) -> Vec<Finding> {
    let topics = spec.topics.iter();
    topics.flat_map(|topic| examine(topic, actual)).collect()
}

/// What is wrong with a topic, among all that there are. What the broker did not tell is not judged.
#[must_use]
pub fn examine(spec: &TopicSpec, all: &Actual) -> Vec<Finding> {
    let Some(actual) = all.get(&*spec.name) else {
        return vec![spec.finding(
            Severity::Error,
            "does not exist".to_owned(),
            "create it, or run `redeliver topics apply`".to_owned(),
        )];
    };
    let of_clean_up = match spec.cleanup {
        None => return examine_largest(spec, actual).into_iter().collect(),
        Some(Cleanup::Delete) => vec![
            examine_compaction(spec, actual),
            examine_retention(spec, actual),
            examine_retention_bytes(spec, actual),
        ],
        Some(Cleanup::Compact { tombstones }) => vec![
            examine_log_of_states(spec, actual),
            examine_tombstones(spec, actual, tombstones),
        ],
    };
    let mut findings: Vec<_> = of_clean_up
        .into_iter()
        .chain([
            examine_partitions(spec, actual, all),
            examine_size(spec, actual, all),
            examine_largest(spec, actual),
        ])
        .flatten()
        .collect();
    findings.sort_by_key(|finding| finding.severity);
    findings
}

fn examine_compaction(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    actual.is_cleaned_by("compact")?.then(|| {
        spec.finding(
            Severity::Error,
            format!(
                "is compacted: compaction would drop {} that share a key",
                spec.records()
            ),
            "set its cleanup.policy to delete".to_owned(),
        )
    })
}

fn examine_log_of_states(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let problem = if actual.is_cleaned_by("delete")? {
        let when = if spec.role == Role::Ledger {
            ""
        } else {
            " before they are due"
        };
        format!("deletes old records: {} would be lost{when}", spec.records())
    } else if !actual.is_cleaned_by("compact")? {
        "is not compacted: it would grow for ever".to_owned()
    } else {
        return None;
    };
    let remedy = "set its cleanup.policy to compact".to_owned();
    Some(spec.finding(Severity::Error, problem, remedy))
}

fn examine_tombstones(spec: &TopicSpec, actual: &ActualTopic, wanted: Span) -> Option<Finding> {
    let kept = Span::from_millis(u64::try_from(actual.number("delete.retention.ms")?).ok()?);
    (kept < SHORTEST_TOMBSTONE_RETENTION).then(|| {
        // The scheduler takes an index for sound that is not older than half of the shortest time.
        let (severity, problem) = if spec.role == Role::Ledger {
            (
                Severity::Warning,
                format!(
                    "forgets after {kept} that something was forgotten: an index that was behind for half as long \
                     has to be built again from the beginning"
                ),
            )
        } else {
            (
                Severity::Error,
                format!(
                    "forgets after {kept} that a job was forgotten: an index that was behind for longer would \
                     bring it back, and {SHORTEST_TOMBSTONE_RETENTION} is the least"
                ),
            )
        };
        spec.finding(
            severity,
            problem,
            format!(
                "set its delete.retention.ms to {} ({wanted}) or more",
                wanted.as_millis()
            ),
        )
    })
}

fn examine_partitions(spec: &TopicSpec, actual: &ActualTopic, all: &Actual) -> Option<Finding> {
    let model = spec.partitions_as.as_ref()?;
    let (found, needed) = (actual.partitions, all.get(&**model)?.partitions);
    let remedy = match found.cmp(&needed) {
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Less => format!("give it {needed} partitions"),
        std::cmp::Ordering::Greater => format!("give `{model}` {found} partitions"),
    };
    Some(spec.finding(
        Severity::Error,
        format!(
            "has {found} partitions and `{model}` has {needed}: what arrives in a partition of the one is kept in \
             the same partition of the other"
        ),
        remedy,
    ))
}

fn examine_retention(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let retention = actual.number("retention.ms")?;
    // Negative, usually -1, is unlimited.
    let retention = Span::from_millis(u64::try_from(retention).ok()?);
    let required = spec.required_retention?;
    let wanted = spec.retention?;
    let remedy = |least: Span| format!("set its retention.ms to {} ({wanted}) or more", least.as_millis());
    if matches!(spec.role, Role::Pipeline(TopicRole::Tier(_))) {
        return (retention < required).then(|| {
            let longest = Span::from_millis(required.as_millis() / 2);
            spec.finding(
                Severity::Error,
                format!(
                    "keeps records for {retention} while they may wait for up to {longest}: they would be \
                     deleted before they are due, or after a short outage; needed is {required}"
                ),
                remedy(wanted),
            )
        });
    }
    (retention < wanted).then(|| {
        let severity = if retention < required {
            Severity::Error
        } else {
            Severity::Warning
        };
        spec.finding(
            severity,
            format!(
                "deletes {} after {retention}, and {wanted} is configured",
                spec.records()
            ),
            remedy(wanted),
        )
    })
}

fn examine_size(spec: &TopicSpec, actual: &ActualTopic, all: &Actual) -> Option<Finding> {
    let limit = actual.max_message_bytes()?;
    let (source, needed) = largest_source(spec, all)?;
    let (severity, problem) = if limit < needed {
        (Severity::Error, "larger ones could not move on")
    } else if limit < needed + HEADER_ROOM {
        let problem = "the largest could not move on, because headers are added";
        (Severity::Warning, problem)
    } else {
        return None;
    };
    Some(spec.finding(
        severity,
        format!("takes records of {limit} bytes while `{source}` takes {needed}: {problem}"),
        wider(needed),
    ))
}

/// A user's topic may be as narrow as the user likes: what it does not take becomes a dead letter. For the state of a
/// job there is no other place.
fn examine_largest(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let limit = actual.max_message_bytes()?;
    let largest = i64::try_from(spec.largest?).ok()?;
    let (severity, problem) = if spec.is_managed() {
        (Severity::Error, "those that do not fit could not move on")
    } else {
        (Severity::Warning, "those that do not fit become dead letters")
    };
    (limit < largest.saturating_add(HEADER_ROOM)).then(|| {
        spec.finding(
            severity,
            format!(
                "takes records of {limit} bytes, and {} may have {largest} and headers: {problem}",
                spec.records()
            ),
            wider(largest),
        )
    })
}

fn wider(needed: i64) -> String {
    let roomy = needed.saturating_add(HEADER_ROOM);
    format!("set its max.message.bytes to {roomy} or more")
}

fn examine_retention_bytes(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let limit = actual.number("retention.bytes").filter(|limit| *limit >= 0)?;
    Some(spec.finding(
        Severity::Warning,
        format!(
            "has retention.bytes={limit}: a burst would delete {} before their time is over",
            spec.records()
        ),
        "set its retention.bytes to -1 and bound it by time".to_owned(),
    ))
}
