//! How much of a topic is under way at once.
//!
//! A topic's `max.message.bytes` limits batches, and a batch that is refused is refused with all its records: which of
//! them is too large, or whether only all of them together are, the broker does not say. So the transaction is
//! written again with fewer of the topic's records under way at once, half as many bytes each time, until the refused
//! record was alone. The limit that was found is kept: it stays above half of what the topic takes, since only what
//! is more than the topic takes is ever halved.

use std::collections::HashMap;
use std::sync::Arc;

use redeliver_core::Output;

use crate::remedy::Refusal;

/// The client library's batches are no larger, unless a single record is (its default of `batch.size`).
const LARGEST_BATCH: usize = 1_000_000;

/// The records of one topic that were under way together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Group {
    /// How many.
    pub(super) records: usize,
    /// Their size together.
    pub(super) bytes: usize,
}

impl Group {
    /// Those of `outputs` that go to this topic.
    pub(super) fn of(topic: &str, outputs: &[Output]) -> Self {
        let same = outputs.iter().filter(|output| *output.topic == *topic);
        same.fold(Self::default(), |group, output| Self {
            records: group.records + 1,
            bytes: group.bytes + output.size(),
        })
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The most bytes of a topic that may be under way, of topics that have refused a batch.
    limits: HashMap<Arc<str>, usize>,
    /// Topics whose records go one by one until the end of the turn.
    one_by_one: Vec<Arc<str>>,
    under_way: HashMap<Arc<str>, usize>,
}

impl Pace {
    /// Whether all that is under way has to be delivered before this is sent.
    pub(super) fn must_wait(&self, output: &Output) -> bool {
        let Some(limit) = self.limit(&output.topic) else {
            return false;
        };
        let under_way = self.under_way.get(&output.topic);
        under_way.is_some_and(|bytes| bytes + output.size() > limit)
    }

    pub(super) fn sent(&mut self, output: &Output) {
        if self.limit(&output.topic).is_some() {
            *self.under_way.entry(output.topic.clone()).or_default() += output.size();
        }
    }

    /// Nothing is under way any more.
    pub(super) fn delivered(&mut self) {
        self.under_way.clear();
    }

    /// A record of this group was refused. Says whether it is worth trying again with fewer at once.
    pub(super) fn slow_down(&mut self, topic: &Arc<str>, group: Group, refusal: Refusal) -> bool {
        if group.records < 2 {
            return false;
        }
        match refusal {
            Refusal::Size => {
                let limit = group.bytes.min(LARGEST_BATCH) / 2;
                self.limits.insert(topic.clone(), limit);
            }
            Refusal::Content => self.one_by_one.push(topic.clone()),
        }
        true
    }

    /// The turn is over.
    pub(super) fn end(&mut self) {
        self.under_way.clear();
        self.one_by_one.clear();
    }

    fn limit(&self, topic: &Arc<str>) -> Option<usize> {
        if self.one_by_one.contains(topic) {
            return Some(0);
        }
        if self.limits.is_empty() {
            return None;
        }
        self.limits.get(topic).copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use redeliver_core::Headers;

    use super::*;

    fn output(size: usize) -> Output {
        Output {
            topic: "to".into(),
            partition: None,
            key: None,
            value: Some(vec![0; size].into()),
            headers: Headers::new(),
        }
    }

    /// Sends all to a topic that takes batches up to `limit`, everything under way in one batch. Gives the first
    /// refused one with its group, or nothing.
    fn send(pace: &mut Pace, outputs: &[Output], limit: usize) -> Option<Group> {
        pace.delivered();
        let mut batches = vec![(0, 0)];
        for (index, output) in outputs.iter().enumerate() {
            if pace.must_wait(output) {
                pace.delivered();
                batches.push((index, index));
            }
            pace.sent(output);
            batches.last_mut().unwrap().1 = index + 1;
        }
        let batches = batches.into_iter();
        let mut groups = batches.map(|(start, end)| Group::of("to", &outputs[start..end]));
        groups.find(|group| group.bytes > limit)
    }

    proptest! {
        #[test]
        fn a_refused_record_is_found_soon_and_what_fits_is_not_refused(
            sizes in proptest::collection::vec(0_usize..3_000, 1..200), limit in 1_000_usize..4_000,
        ) {
            let outputs: Vec<Output> = sizes.iter().map(|size| output(*size)).collect();
            let topic: Arc<str> = "to".into();
            let mut pace = Pace::default();
            let mut attempts = 0;
            let end = loop {
                let Some(refused) = send(&mut pace, &outputs, limit) else { break None };
                if !pace.slow_down(&topic, refused, Refusal::Size) {
                    break Some(refused);
                }
                attempts += 1;
                prop_assert!(attempts <= 20);
            };
            let too_large = outputs.iter().any(|output| output.size() > limit);
            prop_assert_eq!(end.is_some(), too_large);
            prop_assert!(pace.limits.values().all(|kept| *kept >= limit / 2));
        }
    }

    #[test]
    fn what_is_refused_for_its_content_goes_one_by_one_until_the_end_of_the_turn() {
        let topic: Arc<str> = "to".into();
        let mut pace = Pace::default();
        let two = Group {
            records: 2,
            bytes: 20,
        };
        assert!(pace.slow_down(&topic, two, Refusal::Content));
        pace.sent(&output(1));
        assert!(pace.must_wait(&output(1)));
        assert!(!pace.slow_down(
            &topic,
            Group {
                records: 1,
                bytes: 10
            },
            Refusal::Content
        ));
        pace.end();
        pace.sent(&output(1));
        assert!(!pace.must_wait(&output(1)));
    }
}
