//! `GetDeadLetterStats`: counts by topic.

use std::collections::BTreeMap;
use std::time::Duration;

use redeliver_core::{HumanDuration, Timestamp};
use redeliver_proto::convert::{to_duration, to_timestamp};
use redeliver_proto::v1;
use tonic::Status;

use super::{Api, query_failed};
use crate::index::{self, TopicCounts};
use crate::shared::TopicStatus;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);

impl Api {
    pub(super) async fn stats(&self, filter: String) -> Result<v1::DeadLetterStats, Status> {
        let parsed = self.parse_filter(&filter)?;
        let now = self.clock.now();
        let since = [MINUTE, HOUR, DAY].map(|duration| before(now, duration));
        let mut counts = self
            .pool
            .query(move |connection| index::count_by_topic(connection, &parsed, since))
            .await
            .map_err(|error| query_failed(&error))?;
        let statuses: BTreeMap<String, TopicStatus> = self.shared.topics().clone();
        if filter.trim().is_empty() {
            // Without a filter, empty topics are listed as well.
            for topic in statuses.keys() {
                counts.entry(topic.clone()).or_default();
            }
        }
        let topics = counts.into_iter().map(|(topic, counts)| {
            let status = statuses.get(&topic).copied().unwrap_or_default();
            stats(topic, counts, status, now)
        });
        Ok(v1::DeadLetterStats {
            topics: topics.collect(),
            lag: self.shared.lag(),
        })
    }
}

fn stats(topic: String, counts: TopicCounts, status: TopicStatus, now: Timestamp) -> v1::TopicStats {
    let [last_minute, last_hour, last_day] = counts.since;
    let removed = counts.oldest.and_then(|oldest| status.removes_at(oldest));
    let until_removal = removed.map(|removed| to_duration(HumanDuration::from(removed.since(now))));
    v1::TopicStats {
        topic,
        open: counts.open,
        total: counts.total,
        last_minute,
        last_hour,
        last_day,
        oldest: counts.oldest.map(to_timestamp),
        newest: counts.newest.map(to_timestamp),
        until_removal,
        open_by_class: counts.open_by_class.into_iter().collect(),
    }
}

fn before(now: Timestamp, duration: Duration) -> Timestamp {
    let millis = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
    Timestamp::from_millis(now.as_millis().saturating_sub(millis))
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::survey::Retention;

    use super::*;

    #[test]
    fn until_removal_counts_from_the_oldest_open_dead_letter() {
        let now = Timestamp::from_millis(1_000_000);
        let day = Retention::For(HumanDuration::from_secs(86_400));
        let until = |oldest: Option<i64>, retention| {
            let counts = TopicCounts {
                oldest: oldest.map(Timestamp::from_millis),
                ..TopicCounts::default()
            };
            let status = TopicStatus { retention, lag: 0 };
            let stats = stats("t".into(), counts, status, now);
            stats.until_removal.map(|duration| duration.seconds)
        };
        assert_eq!(until(Some(900_000), Some(day)), Some(86_300));
        assert_eq!(until(Some(-90_000_000), Some(day)), Some(0));
        assert_eq!(until(None, Some(day)), None);
        assert_eq!(until(Some(0), Some(Retention::Unlimited)), None);
        assert_eq!(until(Some(0), None), None);
    }
}
