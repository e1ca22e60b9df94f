//! Below which offsets dead letters are gone for good, from the surveys of the topics. No IO.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redeliver_kafka::TopicId;
use redeliver_kafka::survey::SurveyedTopic;

/// After this time without a survey, nothing is known to be gone. Less if the time for which records must be gone is shorter.
const FRESH: Duration = Duration::from_secs(60);

/// The offsets below which Kafka has had no records for a while, of all partitions.
#[derive(Debug, Default)]
pub(crate) struct Gone {
    topics: HashMap<Arc<str>, Topic>,
    /// When the last survey was, and for how long it counts. An entry of the ledger is removed only if it is older than that: a survey since would have seen
    /// that its topic was created again.
    observed: Option<(Instant, Duration)>,
}

#[derive(Debug, Default)]
struct Topic {
    id: Option<TopicId>,
    partitions: BTreeMap<i32, Partition>,
}

/// What surveys have told of a partition, without a gap.
#[derive(Clone, Copy, Debug)]
struct Partition {
    /// Below this offset, records have been gone for as long as is necessary.
    settled: i64,
    /// A low watermark that follows it once it was seen long enough ago.
    next: i64,
    seen_at: Instant,
}

impl Partition {
    fn new(low: i64, now: Instant) -> Self {
        Self {
            settled: 0,
            next: low,
            seen_at: now,
        }
    }

    fn observe(&mut self, low: i64, hold: Duration, now: Instant) {
        if low < self.next {
            // The topic was created again, or the leader does not know better: nothing that was seen counts.
            *self = Self::new(low, now);
        } else if now.duration_since(self.seen_at) >= hold {
            (self.settled, self.next, self.seen_at) = (self.next, low, now);
        }
    }
}

impl Gone {
    /// Takes note of a survey. A low watermark counts once it was seen at least `hold` ago and no survey since has told less, or nothing, about its partition.
    pub(crate) fn observe(&mut self, surveyed: &[SurveyedTopic], hold: Duration, now: Instant) {
        let mut before = std::mem::take(&mut self.topics);
        // Leaders may have changed meanwhile.
        let is_gap = |(at, _): (Instant, Duration)| now.saturating_duration_since(at) > FRESH;
        if self.observed.is_some_and(is_gap) {
            before.clear();
        }
        for topic in surveyed {
            let known = before.remove(&topic.name).unwrap_or_default();
            let is_other = known.id.zip(topic.id).is_some_and(|(known, id)| known != id);
            let id = topic.id.or(known.id);
            let extents = (0..).zip(&topic.partitions);
            let partitions = extents.filter_map(|(number, extent)| {
                let low = (*extent)?.low;
                let known = known.partitions.get(&number).filter(|_| !is_other);
                let mut partition = known.copied().unwrap_or_else(|| Partition::new(low, now));
                partition.observe(low, hold, now);
                Some((number, partition))
            });
            let partitions = partitions.collect();
            self.topics.insert(topic.name.clone(), Topic { id, partitions });
        }
        self.observed = Some((now, FRESH.min(hold / 2)));
    }

    /// Whether the last survey counts.
    fn is_fresh(&self, now: Instant) -> bool {
        let observed = self.observed;
        observed.is_some_and(|(at, fresh)| now.saturating_duration_since(at) <= fresh)
    }

    /// The offset below which all dead letters of a partition are gone for good; 0 if that is unknown.
    pub(crate) fn below(&self, topic: &str, partition: i32, now: Instant) -> i64 {
        if !self.is_fresh(now) {
            return 0;
        }
        let topic = self.topics.get(topic);
        let partition = topic.and_then(|topic| topic.partitions.get(&partition));
        partition.map_or(0, |partition| partition.settled)
    }
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::survey::Extent;

    use super::*;

    const HOLD: Duration = Duration::from_secs(600);

    fn surveyed(id: Option<u128>, lows: &[Option<i64>]) -> Vec<SurveyedTopic> {
        let extents = lows.iter().map(|low| low.map(|low| Extent { low, end: 1_000 }));
        vec![SurveyedTopic {
            name: "a-dlq".into(),
            id: id.map(TopicId::from_bits),
            partitions: extents.collect(),
            refusal: None,
        }]
    }

    /// After surveys at these seconds with these low watermarks, what is gone at the time of the last one.
    fn gone(surveys: &[(u64, Option<i64>)]) -> i64 {
        let surveys = surveys
            .iter()
            .map(|(at, low)| (*at, surveyed(Some(1), &[Some(9), *low])));
        after(surveys)
    }

    fn after(surveys: impl IntoIterator<Item = (u64, Vec<SurveyedTopic>)>) -> i64 {
        let (start, mut gone) = (Instant::now(), Gone::default());
        let mut now = start;
        let mut last: Option<(u64, Vec<SurveyedTopic>)> = None;
        for (at, survey) in surveys {
            // In between, surveys say the same as before.
            if let Some((from, same)) = &last {
                for between in (from + 30..at).step_by(30) {
                    gone.observe(same, HOLD, start + Duration::from_secs(between));
                }
            }
            now = start + Duration::from_secs(at);
            gone.observe(&survey, HOLD, now);
            last = Some((at, survey));
        }
        gone.below("a-dlq", 1, now)
    }

    #[test]
    fn low_watermark_counts_after_hold() {
        assert_eq!(gone(&[(0, Some(5))]), 0);
        assert_eq!(gone(&[(0, Some(5)), (599, Some(7))]), 0);
        assert_eq!(gone(&[(0, Some(5)), (600, Some(7))]), 5);
        assert_eq!(gone(&[(0, Some(5)), (600, Some(7)), (1_199, Some(8))]), 5);
        assert_eq!(gone(&[(0, Some(5)), (600, Some(7)), (1_200, Some(8))]), 7);
        assert_eq!(gone(&[(0, Some(0)), (600, Some(0)), (1_200, Some(0))]), 0);
    }

    #[test]
    fn unknown_or_lower_watermark_begins_again() {
        let settled = [(0, Some(5)), (600, Some(7))];
        let then = |more: &[(u64, Option<i64>)]| gone(&[&settled[..], more].concat());
        assert_eq!(then(&[(601, None)]), 0);
        assert_eq!(then(&[(601, None), (602, Some(7)), (1_201, Some(7))]), 0);
        assert_eq!(then(&[(601, None), (602, Some(7)), (1_202, Some(7))]), 7);
        assert_eq!(then(&[(601, Some(6))]), 0);
        assert_eq!(then(&[(601, Some(6)), (1_201, Some(9))]), 6);
    }

    #[test]
    fn missing_or_recreated_topic_begins_again() {
        let survey = |id, low| surveyed(id, &[None, Some(low)]);
        let begin = || [(0, survey(Some(1), 5)), (600, survey(Some(1), 5))];
        let then = |more: Vec<(u64, Vec<SurveyedTopic>)>| after(begin().into_iter().chain(more));
        assert_eq!(then(vec![]), 5);
        // A broker does not tell ids for a moment.
        assert_eq!(then(vec![(601, survey(None, 5))]), 5);
        assert_eq!(then(vec![(601, survey(Some(2), 5))]), 0);
        assert_eq!(then(vec![(601, survey(None, 5)), (602, survey(Some(2), 5))]), 0);
        assert_eq!(then(vec![(601, vec![]), (602, survey(Some(1), 5))]), 0);
    }

    #[test]
    fn a_time_without_surveys_begins_again() {
        let (start, mut gone) = (Instant::now(), Gone::default());
        let mut observe = |seconds| {
            let now = start + Duration::from_secs(seconds);
            gone.observe(&surveyed(Some(1), &[None, Some(5)]), HOLD, now);
            gone.below("a-dlq", 1, now)
        };
        assert_eq!((0..=570).step_by(30).map(&mut observe).max(), Some(0));
        assert_eq!(observe(631), 0, "there was no survey for 61 seconds");
        let settled = (661..=1_231).step_by(30).map(&mut observe);
        assert_eq!(settled.collect::<Vec<_>>(), [vec![0; 19], vec![5]].concat());
    }

    #[test]
    fn removed_entry_predates_last_survey() {
        let (start, mut gone) = (Instant::now(), Gone::default());
        let hold = Duration::from_secs(10);
        for seconds in [0, 10] {
            let now = start + Duration::from_secs(seconds);
            gone.observe(&surveyed(Some(1), &[None, Some(5)]), hold, now);
        }
        let below = |seconds| gone.below("a-dlq", 1, start + Duration::from_secs(seconds));
        assert_eq!((below(15), below(16)), (5, 0));
    }

    #[test]
    fn nothing_is_gone_without_recent_survey() {
        let (start, mut gone) = (Instant::now(), Gone::default());
        assert_eq!(gone.below("a-dlq", 1, start), 0);
        let at = |seconds| start + Duration::from_secs(seconds);
        for seconds in (0..=600).step_by(60) {
            gone.observe(&surveyed(None, &[None, Some(5)]), HOLD, at(seconds));
        }
        let below = |topic, partition, seconds| gone.below(topic, partition, at(seconds));
        assert_eq!((below("a-dlq", 1, 660), below("a-dlq", 1, 661)), (5, 0));
        assert_eq!(
            (
                below("a-dlq", 0, 600),
                below("a-dlq", 2, 600),
                below("b-dlq", 1, 600)
            ),
            (0, 0, 0)
        );
    }
}
