//! `GetDeadLetterStats`: counts by topic.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use redeliver_core::{HumanDuration, Timestamp};
use redeliver_kafka::survey::Retention;
use redeliver_proto::convert::{time_of_record, to_duration};
use redeliver_proto::page::fitting;
use redeliver_proto::v1;
use tonic::Status;

use super::Api;
use super::token::{NameToken, query_hash};
use crate::access::Viewer;
use crate::dialect::Field;
use crate::filter::NumberField;
use crate::index::{self, TopicCounts};
use crate::masking::Fact;
use crate::shared::TopicStatus;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);
/// How many error classes of a topic are named. Any writer of dead letters can invent some.
const MAX_CLASSES: usize = 100;
/// The name of all others.
const OTHER_CLASSES: &str = "other";

impl Api {
    pub(super) async fn stats(
        &self,
        viewer: &Viewer,
        request: v1::GetDeadLetterStatsRequest,
    ) -> Result<v1::DeadLetterStats, Status> {
        if !request.by.is_empty() {
            return self.count_by(viewer, request).await;
        }
        let parsed = viewer.limit(self.parse_filter(&request.filter)?)?;
        let query = query_hash(&["stats", &request.filter]);
        let after = NameToken::decode(query, &request.page_token)?;
        let completeness = self.completeness();
        let tests_states = parsed.written().tests(NumberField::State);
        Self::check_states(tests_states, &completeness)?;
        let now = self.clock.now();
        let since = [MINUTE, HOUR, DAY].map(|duration| before(now, duration));
        let mut counts = self
            .pool
            .query(move |connection| {
                let filter = parsed.resolve(connection)?;
                index::count_by_topic(connection, &filter, since)
            })
            .await?;
        // The states were read by the query, which may have waited for its turn.
        let completeness = self.completeness_since(&completeness);
        Self::check_states(tests_states, &completeness)?;
        let statuses: BTreeMap<String, TopicStatus> = self.shared.topics().clone();
        if request.filter.trim().is_empty() {
            // Without a filter, empty topics are listed as well.
            for topic in statuses.keys().filter(|topic| viewer.sees(topic)) {
                counts.entry(topic.clone()).or_default();
            }
        }
        let topics = counts.into_iter().map(|(topic, counts)| {
            let status = statuses.get(&topic).copied().unwrap_or_default();
            let hides_classes = viewer.mask(&topic).hides(Fact::Of(Field::ErrorClass));
            let mut stats = stats(topic, counts, status, now);
            if hides_classes {
                stats.classes_masked = !stats.open_by_class.is_empty();
                stats.open_by_class.clear();
            }
            if completeness.are_states_known() {
                stats
            } else {
                without_states(stats)
            }
        });
        let (topics, last) = page(topics, after.as_ref());
        Ok(v1::DeadLetterStats {
            topics,
            next_page_token: last.map_or_else(String::new, |last| last.encode(query)),
            counts: None,
            lag: self.shared.lag(|topic| viewer.sees(topic)),
            completeness: Some(self.completeness_message(&completeness, viewer)),
        })
    }
}

/// The page of these topics, which are in order, after a topic. If there are more, also the last topic of the page.
fn page(
    topics: impl Iterator<Item = v1::TopicStats>,
    after: Option<&NameToken>,
) -> (Vec<v1::TopicStats>, Option<NameToken>) {
    let left = topics.filter(|stats| after.is_none_or(|after| stats.topic > after.0));
    fitting(
        left.map(|stats| (NameToken(stats.topic.clone()), stats)),
        usize::MAX,
    )
}

fn stats(topic: String, counts: TopicCounts, status: TopicStatus, now: Timestamp) -> v1::TopicStats {
    let [last_minute, last_hour, last_day] = counts.since;
    let removed = counts.oldest.and_then(|oldest| status.removes_at(oldest));
    let until_removal = removed.map(|removed| to_duration(HumanDuration::from(removed.since(now))));
    v1::TopicStats {
        topic,
        open: Some(counts.open),
        total: counts.total,
        last_minute,
        last_hour,
        last_day,
        oldest: counts.oldest.and_then(time_of_record),
        newest: counts.newest.and_then(time_of_record),
        until_removal,
        open_by_class: most_frequent(counts.open_by_class),
        removal: removal(status.retention).into(),
        classes_masked: false,
    }
}

/// The most frequent classes, and the sum of the others.
fn most_frequent(by_class: BTreeMap<String, u64>) -> HashMap<String, u64> {
    let mut classes: Vec<(String, u64)> = by_class.into_iter().collect();
    classes.sort_by_key(|(_, count)| Reverse(*count));
    let others = classes.split_off(classes.len().min(MAX_CLASSES));
    let mut named: HashMap<String, u64> = classes.into_iter().collect();
    if !others.is_empty() {
        let sum: u64 = others.iter().map(|(_, count)| count).sum();
        *named.entry(OTHER_CLASSES.to_owned()).or_default() += sum;
    }
    named
}

/// Without what depends on the states of dead letters, which are unknown.
fn without_states(stats: v1::TopicStats) -> v1::TopicStats {
    v1::TopicStats {
        open: None,
        oldest: None,
        newest: None,
        until_removal: None,
        open_by_class: HashMap::new(),
        classes_masked: false,
        ..stats
    }
}

fn removal(retention: Option<Retention>) -> v1::Removal {
    match retention {
        None => v1::Removal::Unspecified,
        Some(Retention { age, by_size }) => match (age.is_some(), by_size) {
            (false, false) => v1::Removal::Never,
            (true, false) => v1::Removal::ByAge,
            (false, true) => v1::Removal::BySize,
            (true, true) => v1::Removal::ByAgeOrSize,
        },
    }
}

fn before(now: Timestamp, duration: Duration) -> Timestamp {
    let millis = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
    Timestamp::from_millis(now.as_millis().saturating_sub(millis))
}

#[cfg(test)]
mod tests {
    use redeliver_proto::Message as _;

    use super::*;

    const DAY: Option<HumanDuration> = Some(HumanDuration::from_secs(86_400));

    fn with(oldest: Option<i64>, retention: Option<Retention>) -> v1::TopicStats {
        let counts = TopicCounts {
            oldest: oldest.map(Timestamp::from_millis),
            open: 3,
            total: 4,
            ..TopicCounts::default()
        };
        let status = TopicStatus { retention, lag: 0 };
        stats("t".into(), counts, status, Timestamp::from_millis(1_000_000))
    }

    #[test]
    fn many_classes_are_counted_in_pages() {
        // The largest ones that there can be.
        let counts = |topic: usize| {
            let classes = (0..1_000).map(|class| (format!("{class:0>256}"), u64::MAX / 2_000));
            let counts = TopicCounts {
                open_by_class: classes.collect(),
                ..TopicCounts::default()
            };
            let status = TopicStatus::default();
            stats(
                format!("{topic:0>249}"),
                counts,
                status,
                Timestamp::from_millis(0),
            )
        };
        let all: Vec<v1::TopicStats> = (0..300).map(counts).collect();
        let (mut listed, mut after) = (Vec::new(), None);
        loop {
            let (topics, last) = page(all.iter().cloned(), after.as_ref());
            let answer = v1::DeadLetterStats {
                topics,
                ..v1::DeadLetterStats::default()
            };
            assert!(answer.encoded_len() < 4 << 20, "{} bytes", answer.encoded_len());
            listed.extend(answer.topics);
            after = last;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(listed, all);
    }

    #[test]
    fn most_frequent_classes_are_named() {
        let classes = |count: u64| (1..=count).map(|number| (number.to_string(), number)).collect();
        assert_eq!(most_frequent(classes(100)).len(), 100);
        let named = most_frequent(classes(1_000));
        assert_eq!((named.len(), named["901"], named.get("900")), (101, 901, None));
        assert_eq!(named["other"], (1..=900).sum::<u64>());
        // A class has that name, too.
        let mut classes: BTreeMap<String, u64> = classes(100);
        classes.insert("other".to_owned(), 7_000);
        assert_eq!(most_frequent(classes)["other"], 7_001);
    }

    #[test]
    fn removal_counts_from_oldest_open_letter() {
        let day = Some(Retention {
            age: DAY,
            by_size: false,
        });
        let until = |oldest: Option<i64>, retention| {
            let stats = with(oldest, retention);
            stats.until_removal.map(|duration| duration.seconds)
        };
        assert_eq!(until(Some(900_000), day), Some(86_300));
        assert_eq!(until(Some(-90_000_000), day), Some(0));
        assert_eq!(until(None, day), None);
    }

    #[test]
    fn unknown_unlimited_and_limited_retention_differ() {
        let known = |age, by_size| Some(Retention { age, by_size });
        for (retention, removal, is_known) in [
            (None, v1::Removal::Unspecified, false),
            (known(None, false), v1::Removal::Never, false),
            (known(DAY, false), v1::Removal::ByAge, true),
            (known(None, true), v1::Removal::BySize, false),
            (known(DAY, true), v1::Removal::ByAgeOrSize, true),
        ] {
            let stats = with(Some(0), retention);
            assert_eq!(
                (stats.removal(), stats.until_removal.is_some()),
                (removal, is_known),
                "{retention:?}"
            );
        }
    }

    #[test]
    fn unknown_states_are_not_open() {
        let day = Some(Retention {
            age: DAY,
            by_size: false,
        });
        let stats = without_states(with(Some(900_000), day));
        assert_eq!((stats.open, stats.total), (None, 4));
        assert_eq!((stats.oldest, stats.until_removal), (None, None));
    }
}
