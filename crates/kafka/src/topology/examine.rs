//! Compares existing topics with their specification, without IO.

use std::collections::BTreeMap;

use redeliver_core::HumanDuration;

use super::needed::{APPEND_TIME, HEADER_ROOM, SMALL_SEGMENTS, largest_source};
use super::{ActualTopic, Cleanup, Finding, Role, Severity, TopicSpec, TopologySpec};

/// The existing topics by name.
type Actual = BTreeMap<String, ActualTopic>;

/// The minimum retention of tombstones, so that slow readers see them; also Kafka's default.
const MIN_TOMBSTONE_RETENTION: HumanDuration = HumanDuration::from_secs(86_400);

/// The findings for all topics, in the order of the specification.
#[must_use]
pub fn examine_all(spec: &TopologySpec, actual: &Actual) -> Vec<Finding> {
    let topics = spec.topics.iter();
    topics.flat_map(|topic| examine(topic, actual)).collect()
}

/// The findings for one topic; `all` are the existing topics. Configuration that is unknown is not checked.
#[must_use]
pub fn examine(spec: &TopicSpec, all: &Actual) -> Vec<Finding> {
    let Some(actual) = all.get(&*spec.name) else {
        let problem = match spec.role {
            // The ACLs of an installation that is older than this topic do not cover it, and Kafka hides what may not be described.
            Role::Audit | Role::Documents | Role::Progress | Role::Status => {
                "does not exist, or may not be described"
            }
            _ => "does not exist",
        };
        return vec![spec.finding(
            Severity::Error,
            problem.to_owned(),
            "create it, or run `redeliver topics apply`".to_owned(),
        )];
    };
    let of_cleanup = match spec.cleanup {
        None => return examine_largest(spec, actual).into_iter().collect(),
        Some(Cleanup::Delete) => vec![
            examine_compaction(spec, actual),
            examine_retention(spec, actual),
            examine_retention_bytes(spec, actual),
            examine_timestamps(spec, actual),
        ],
        Some(Cleanup::Compact { tombstones }) => vec![
            examine_compacted(spec, actual),
            examine_tombstones(spec, actual, tombstones),
            examine_segments(spec, actual),
        ],
    };
    let mut findings: Vec<_> = of_cleanup
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
                spec.records
            ),
            "set its cleanup.policy to delete".to_owned(),
        )
    })
}

fn examine_compacted(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let problem = if actual.is_cleaned_by("delete")? {
        let when = match spec.role {
            Role::State => " before they are due",
            _ => "",
        };
        format!("deletes old records: {} would be lost{when}", spec.records)
    } else if !actual.is_cleaned_by("compact")? {
        "is not compacted: it would grow forever".to_owned()
    } else {
        return None;
    };
    let remedy = "set its cleanup.policy to compact".to_owned();
    Some(spec.finding(Severity::Error, problem, remedy))
}

fn examine_tombstones(spec: &TopicSpec, actual: &ActualTopic, configured: HumanDuration) -> Option<Finding> {
    if matches!(spec.role, Role::Documents | Role::Progress | Role::Status) {
        // Each process continues where it was at most an hour ago, or reads it from its beginning.
        return None;
    }
    let kept = actual.tombstone_retention()?;
    (kept < MIN_TOMBSTONE_RETENTION).then(|| {
        // An index goes on from a checkpoint that is at most half of this time old, or half of the minimum. If
        // tombstones were deleted earlier, it would miss them.
        let (severity, problem) = if spec.role == Role::Ledger {
            (
                Severity::Warning,
                format!(
                    "deletes tombstones after {kept}: an index that was behind for half as long has to be rebuilt"
                ),
            )
        } else {
            (
                Severity::Error,
                format!(
                    "deletes tombstones after {kept}: an index that was behind for longer could restore deleted jobs, \
                     and at least {MIN_TOMBSTONE_RETENTION} is required"
                ),
            )
        };
        spec.finding(
            severity,
            problem,
            format!(
                "set its delete.retention.ms to {} ({configured}) or more",
                configured.as_millis()
            ),
        )
    })
}

fn examine_segments(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let (name, wanted, found) = SMALL_SEGMENTS.iter().find_map(|(name, wanted)| {
        let found = actual.number(name)?;
        (found > 2 * wanted).then_some((name, wanted, found))
    })?;
    matches!(spec.role, Role::Progress | Role::Status).then(|| {
        spec.finding(
            Severity::Warning,
            format!("has {name}={found}: it is compacted late, so that a process that starts reads much before it goes on"),
            format!("set its {name} to {wanted}"),
        )
    })
}

fn examine_partitions(spec: &TopicSpec, actual: &ActualTopic, all: &Actual) -> Option<Finding> {
    let is_single = matches!(
        spec.role,
        Role::Audit | Role::Documents | Role::Progress | Role::Status
    );
    if is_single && actual.partitions > 1 {
        let other = |setting| format!(", or set {setting} to another topic");
        let other = spec.setting.map(other).unwrap_or_default();
        return Some(spec.finding(
            Severity::Error,
            format!("has {} partitions: only the first one is read", actual.partitions),
            format!("create it again with one partition{other}"),
        ));
    }
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
            "has {found} partitions, but `{model}` has {needed}: each partition needs its counterpart in the other topic"
        ),
        remedy,
    ))
}

fn examine_retention(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let retention = actual.number("retention.ms")?;
    // Negative values, usually -1, mean unlimited.
    let retention = HumanDuration::from_millis(u64::try_from(retention).ok()?);
    let required = spec.required_retention?;
    let configured = spec.retention?;
    let remedy = |least: HumanDuration| {
        format!(
            "set its retention.ms to {} ({configured}) or more",
            least.as_millis()
        )
    };
    if spec.role == Role::Tier {
        return (retention < required).then(|| {
            let longest = HumanDuration::from_millis(required.as_millis() / 2);
            spec.finding(
                Severity::Error,
                format!(
                    "keeps records for {retention}, but they may wait for up to {longest}: they could be \
                     deleted before they are due, or after a short outage; at least {required} is required"
                ),
                remedy(configured),
            )
        });
    }
    (retention < configured).then(|| {
        // Dead letters have ended: shorter retention loses only their history, and no other topic depends on
        // them.
        let severity = if retention < required && spec.role != Role::DeadLetters {
            Severity::Error
        } else {
            Severity::Warning
        };
        spec.finding(
            severity,
            format!(
                "deletes {} after {retention}, but {configured} is configured",
                spec.records
            ),
            remedy(configured),
        )
    })
}

fn examine_size(spec: &TopicSpec, actual: &ActualTopic, all: &Actual) -> Option<Finding> {
    let limit = actual.max_message_bytes()?;
    let (source, needed) = largest_source(spec, all)?;
    let (severity, problem) = if limit < needed {
        (Severity::Error, "larger ones could not be forwarded")
    } else if limit < needed + HEADER_ROOM {
        let problem = "the largest could not be forwarded with additional headers";
        (Severity::Warning, problem)
    } else {
        return None;
    };
    Some(spec.finding(
        severity,
        format!("accepts records of up to {limit} bytes, but `{source}` accepts {needed}: {problem}"),
        raise_limit(needed),
    ))
}

/// A topic of a user may have any limit: records that do not fit become dead letters. The state of a job has no other place,
/// so there a low limit is an error.
fn examine_largest(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let limit = actual.max_message_bytes()?;
    let largest = i64::try_from(spec.largest?).ok()?;
    let (severity, problem) = if spec.is_managed() {
        (Severity::Error, "those that do not fit could not be written")
    } else {
        (Severity::Warning, "those that do not fit become dead letters")
    };
    (limit < largest.saturating_add(HEADER_ROOM)).then(|| {
        spec.finding(
            severity,
            format!(
                "accepts records of up to {limit} bytes, but {} may have {largest} plus headers: {problem}",
                spec.records
            ),
            raise_limit(largest),
        )
    })
}

fn raise_limit(needed: i64) -> String {
    let limit = needed.saturating_add(HEADER_ROOM);
    format!("set its max.message.bytes to {limit} or more")
}

fn examine_retention_bytes(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let limit = actual.number("retention.bytes").filter(|limit| *limit >= 0)?;
    Some(spec.finding(
        Severity::Warning,
        format!(
            "has retention.bytes={limit}: a burst could delete {} too early",
            spec.records
        ),
        "set its retention.bytes to -1 and limit it with retention.ms".to_owned(),
    ))
}

fn examine_timestamps(spec: &TopicSpec, actual: &ActualTopic) -> Option<Finding> {
    let found = actual.config.get("message.timestamp.type")?;
    (spec.role == Role::Audit && found != APPEND_TIME).then(|| {
        spec.finding(
            Severity::Warning,
            format!(
                "has message.timestamp.type={found}: {} by a server whose clock is wrong would be found, and deleted, at the wrong time",
                spec.records
            ),
            format!("set its message.timestamp.type to {APPEND_TIME}"),
        )
    })
}
