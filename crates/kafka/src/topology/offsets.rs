//! Compares how long topics keep records with how long the brokers keep the committed offsets of groups without members.
//!
//! Since Kafka 2.1 (KIP-211), committed offsets do not expire while a group has members that subscribe to the topic. They
//! expire once the group has had no members for `offsets.retention.minutes`. A group that comes back after that reads its
//! topics from the beginning. Nothing is repeated if the records of that time have been deleted too, so the check compares
//! retentions. Records may stay a little longer than their retention, since Kafka deletes whole segments.

use std::collections::BTreeMap;

use redeliver_core::HumanDuration;

use super::{ActualTopic, Finding, Role, Severity, TopicSpec, TopologySpec};

/// The setting of the brokers.
pub(super) const OFFSETS_RETENTION: &str = "offsets.retention.minutes";

const MINUTE: u64 = 60_000;

/// How long a topic keeps records. The order is by duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kept {
    For(HumanDuration),
    Forever,
}

impl TopicSpec {
    /// Whether a consumer group reads the topic.
    fn is_read_by_group(&self) -> bool {
        matches!(self.role, Role::Input | Role::Tier)
    }
}

impl TopologySpec {
    /// Whether a consumer group reads one of the topics.
    pub(super) fn has_groups(&self) -> bool {
        self.topics.iter().any(TopicSpec::is_read_by_group)
    }
}

/// One finding about all topics that keep records for longer than the brokers keep offsets, at the topic that keeps them
/// longest. `minutes`: the setting of the brokers.
pub(super) fn examine_offsets(
    spec: &TopologySpec,
    actual: &BTreeMap<String, ActualTopic>,
    minutes: u64,
) -> Option<Finding> {
    let offsets = HumanDuration::from_millis(minutes.saturating_mul(MINUTE));
    let read = spec.topics.iter().filter(|topic| topic.is_read_by_group());
    let longer: Vec<(&TopicSpec, Kept)> = read
        .filter_map(|topic| Some((topic, kept(actual.get(&*topic.name)?)?)))
        .filter(|(_, kept)| *kept > Kept::For(offsets))
        .collect();
    let longest = longer.iter().map(|(_, kept)| *kept).max()?;
    let (topic, _) = longer.iter().find(|(_, kept)| *kept == longest)?;
    let others = match longer.len() - 1 {
        0 => String::new(),
        1 => " and 1 other topic".to_owned(),
        others => format!(" and {others} other topics"),
    };
    let (keeps, remedy) = match longest {
        Kept::Forever => (
            "forever".to_owned(),
            format!("set {OFFSETS_RETENTION} of the brokers to more than the longest possible outage"),
        ),
        Kept::For(retention) => (
            format!("for {retention}"),
            format!(
                "set {OFFSETS_RETENTION} of the brokers to {} ({retention}) or more",
                retention.as_millis().div_ceil(MINUTE)
            ),
        ),
    };
    Some(topic.finding(
        Severity::Warning,
        format!(
            "keeps records {keeps}, but the brokers delete the committed offsets of a consumer group that has had no \
             members for {offsets} ({OFFSETS_RETENTION}={minutes}): after a longer outage, its group would read this \
             topic{others} from the beginning and process the records again"
        ),
        remedy,
    ))
}

/// How long a topic keeps records; `None` if its configuration is unknown.
fn kept(topic: &ActualTopic) -> Option<Kept> {
    if !topic.is_cleaned_by("delete")? {
        return Some(Kept::Forever);
    }
    // Negative values, usually -1, mean unlimited.
    Some(match u64::try_from(topic.number("retention.ms")?) {
        Ok(millis) => Kept::For(HumanDuration::from_millis(millis)),
        Err(_) => Kept::Forever,
    })
}

#[cfg(test)]
mod tests {
    use redeliver_core::Pipeline;

    use super::*;
    use crate::topology::TopicSettings;
    use crate::topology::tests::jobs;

    const WEEK: u64 = 7 * 86_400;

    fn spec() -> TopologySpec {
        let settings = TopicSettings {
            partitions: 1,
            replication: 1,
            retention: HumanDuration::from_secs(WEEK),
            dead_letter_retention: HumanDuration::from_secs(WEEK),
        };
        let pipeline = Pipeline {
            output: Some("out".into()),
            ..Pipeline::new("docs")
        };
        TopologySpec::for_pipelines(&[pipeline], &settings).join(jobs(&[], &settings))
    }

    #[track_caller]
    fn check(minutes: u64, topics: &[(&str, &str, &str)], expected: Option<&str>) {
        let actual = topics.iter().map(|(name, policy, retention)| {
            let config = [("cleanup.policy", policy), ("retention.ms", retention)];
            let config = config.map(|(name, value)| (name.to_owned(), (*value).to_owned()));
            let topic = ActualTopic {
                partitions: 1,
                config: config.into(),
            };
            ((*name).to_owned(), topic)
        });
        let found = examine_offsets(&spec(), &actual.collect(), minutes);
        assert_eq!(
            found.map(|finding| finding.to_string()).as_deref(),
            expected,
            "{topics:?}"
        );
    }

    #[test]
    fn long_kept_records_are_reported() {
        let week = "604800000";
        for (minutes, topics, expected) in [
            (
                10_080,
                &[("docs", "delete", week), ("docs-retry-5s", "delete", week)][..],
                None,
            ),
            (10_080, &[], None),
            (10_080, &[("docs", "delete", "unknown")], None),
            // No group reads these.
            (
                10_080,
                &[
                    ("docs-dlq", "delete", "-1"),
                    ("out", "compact", "-1"),
                    ("jobs-state", "compact", "-1"),
                ],
                None,
            ),
            (
                1_440,
                &[
                    ("docs", "delete", "86400000"),
                    ("docs-retry-5s", "delete", week),
                    ("docs-retry-30s", "delete", "1209600001"),
                    ("docs-retry-due", "delete", week),
                ],
                Some(
                    "warning: topic `docs-retry-30s` keeps records for 1209600001ms, but the brokers delete the \
                     committed offsets of a consumer group that has had no members for 1d \
                     (offsets.retention.minutes=1440): after a longer outage, its group would read this topic and 2 \
                     other topics from the beginning and process the records again; set offsets.retention.minutes of \
                     the brokers to 20161 (1209600001ms) or more",
                ),
            ),
        ] {
            check(minutes, topics, expected);
        }
        for (policy, retention) in [("delete", "-1"), ("compact", week)] {
            check(
                10_080,
                &[
                    ("docs-retry-5s", "delete", "864000000"),
                    ("jobs-ingest", policy, retention),
                ],
                Some(
                    "warning: topic `jobs-ingest` keeps records forever, but the brokers delete the \
                     committed offsets of a consumer group that has had no members for 7d \
                     (offsets.retention.minutes=10080): after a longer outage, its group would read this topic and 1 \
                     other topic from the beginning and process the records again; set offsets.retention.minutes of \
                     the brokers to more than the longest possible outage",
                ),
            );
        }
    }
}
