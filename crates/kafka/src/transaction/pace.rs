//! Limits how much of a topic is in flight at once.
//!
//! A topic's `max.message.bytes` limits the client's batches, and the broker refuses a batch as a whole. It does not say
//! which record is too large, or whether only the sum is. So the transaction is written again with fewer of the topic's
//! records in flight, half as many bytes each time, until a record is refused on its own. The limit is kept for later
//! transactions. It never falls below half of what the topic accepts, since only a size that was refused is halved.

use std::collections::HashMap;
use std::sync::Arc;

use redeliver_core::Output;

use crate::recovery::Refusal;

/// The default of `batch.size`. The client's batches are larger only if a single record is.
const LARGEST_BATCH: usize = 1_000_000;

/// The records of one topic that were in flight together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct InFlight {
    pub(super) records: usize,
    pub(super) bytes: usize,
}

impl InFlight {
    /// Those of `outputs` that go to this topic.
    pub(super) fn of(topic: &str, outputs: &[Output]) -> Self {
        let same = outputs.iter().filter(|output| *output.topic == *topic);
        same.fold(Self::default(), |sum, output| Self {
            records: sum.records + 1,
            bytes: sum.bytes + output.size(),
        })
    }
}

/// The limits of topics that have refused a batch.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The maximum number of bytes of a topic in flight.
    limits: HashMap<Arc<str>, usize>,
    /// Topics whose records are sent one by one until the end of the transaction.
    one_by_one: Vec<Arc<str>>,
    /// Bytes in flight of the topics above.
    in_flight: HashMap<Arc<str>, usize>,
}

impl Pace {
    /// Whether all records in flight have to be delivered before this one is sent.
    pub(super) fn must_wait(&self, output: &Output) -> bool {
        let Some(limit) = self.limit(&output.topic) else {
            return false;
        };
        // Without records of the topic in flight, even a record above the limit is sent: on its own.
        let in_flight = self.in_flight.get(&output.topic);
        in_flight.is_some_and(|bytes| bytes + output.size() > limit)
    }

    pub(super) fn sent(&mut self, output: &Output) {
        if self.limit(&output.topic).is_some() {
            *self.in_flight.entry(output.topic.clone()).or_default() += output.size();
        }
    }

    /// Everything in flight was delivered.
    pub(super) fn delivered(&mut self) {
        self.in_flight.clear();
    }

    /// Lowers the limit after one of these records was refused. Returns false if there was only one.
    pub(super) fn slow_down(&mut self, topic: &Arc<str>, in_flight: InFlight, refusal: Refusal) -> bool {
        if in_flight.records < 2 {
            return false;
        }
        match refusal {
            Refusal::Size => {
                let limit = in_flight.bytes.min(LARGEST_BATCH) / 2;
                self.limits.insert(topic.clone(), limit);
            }
            // Size says nothing about where an invalid record is, so halving would not converge.
            Refusal::Content => self.one_by_one.push(topic.clone()),
        }
        true
    }

    /// Ends a transaction. Limits of sizes are kept: later records meet the same topic.
    pub(super) fn end(&mut self) {
        self.in_flight.clear();
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

    /// Sends all outputs to a topic that accepts batches up to `limit`, with everything in flight in one batch. Returns the
    /// first refused batch.
    fn send(pace: &mut Pace, outputs: &[Output], limit: usize) -> Option<InFlight> {
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
        let mut batches = batches.map(|(start, end)| InFlight::of("to", &outputs[start..end]));
        batches.find(|batch| batch.bytes > limit)
    }

    proptest! {
        #[test]
        fn only_too_large_records_are_refused(
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
    fn invalid_record_slows_one_transaction() {
        let topic: Arc<str> = "to".into();
        let mut pace = Pace::default();
        let two = InFlight {
            records: 2,
            bytes: 20,
        };
        assert!(pace.slow_down(&topic, two, Refusal::Content));
        pace.sent(&output(1));
        assert!(pace.must_wait(&output(1)));
        assert!(!pace.slow_down(
            &topic,
            InFlight {
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
