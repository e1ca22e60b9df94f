//! What became of the items of a chunk, and where their records were written. No IO.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::{Headers, Output, Position};
use redeliver_kafka::Delivered;
use redeliver_proto::{Message as _, v1};

use super::job::{CHUNK, Outcome, number};

/// The outcomes of the first items of a chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    topics: Vec<String>,
    items: Vec<Known>,
}

/// What is known of an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Known {
    outcome: u8,
    /// The number of the topic to which its record was written, from 1; 0: none.
    topic: u32,
    partition: i32,
    offset: i64,
}

impl Outcomes {
    /// Outcomes as they are stored; none if they cannot be read.
    #[must_use]
    pub fn read(value: Bytes) -> Self {
        let record = v1::RedriveOutcomes::decode(value).unwrap_or_default();
        let item = |(index, outcome): (usize, &u8)| {
            let topic = record.written_topics.get(index).copied().unwrap_or_default();
            Known {
                outcome: *outcome,
                topic,
                partition: record.written_partitions.get(index).copied().unwrap_or_default(),
                offset: record.written_offsets.get(index).copied().unwrap_or_default(),
            }
        };
        Self {
            items: record.outcomes.iter().enumerate().map(item).collect(),
            topics: record.topics,
        }
    }

    /// As they are stored.
    #[must_use]
    pub fn to_value(&self) -> Bytes {
        let written = if self.topics.is_empty() {
            &[][..]
        } else {
            &self.items
        };
        let record = v1::RedriveOutcomes {
            outcomes: self.numbers().into(),
            topics: self.topics.clone(),
            written_topics: written.iter().map(|item| item.topic).collect(),
            written_partitions: written.iter().map(|item| item.partition).collect(),
            written_offsets: written.iter().map(|item| item.offset).collect(),
        };
        record.encode_to_vec().into()
    }

    /// The numbers of the outcomes.
    #[must_use]
    pub fn numbers(&self) -> Vec<u8> {
        self.items.iter().map(|item| item.outcome).collect()
    }

    /// Where the record of an item was written; `None` if nothing was, or if that is unknown.
    #[must_use]
    pub fn written(&self, index: usize) -> Option<Position> {
        let item = self.items.get(index)?;
        let topic = usize::try_from(item.topic).ok()?.checked_sub(1)?;
        Some(Position {
            topic: self.topics.get(topic)?.as_str().into(),
            partition: item.partition,
            offset: item.offset,
        })
    }

    /// Where the records of its items were written, as far as it is known.
    pub fn positions(&self) -> impl Iterator<Item = Position> {
        (0..self.items.len()).filter_map(|index| self.written(index))
    }

    fn push(&mut self, outcome: Outcome, written: Option<(&str, i32, i64)>) {
        let mut item = Known {
            outcome: number(outcome),
            ..Known::default()
        };
        if let Some((topic, partition, offset)) = written {
            item = Known {
                topic: self.topic(topic),
                partition,
                offset,
                ..item
            };
        }
        self.items.push(item);
    }

    /// The number of a topic.
    fn topic(&mut self, topic: &str) -> u32 {
        let known = self.topics.iter().position(|known| known == topic);
        let index = known.unwrap_or_else(|| {
            self.topics.push(topic.to_owned());
            self.topics.len() - 1
        });
        u32::try_from(index + 1).unwrap_or_default()
    }
}

/// What a step reports of its items, once it is known where their records were written.
#[derive(Clone, Debug)]
pub struct Report {
    /// The id of the job.
    pub id: String,
    /// The topic of jobs.
    pub topic: Arc<str>,
    /// The number of the first item.
    pub from: u32,
    /// The outcomes of its chunk before.
    pub before: Outcomes,
    /// What became of each item, and the destination of its record, if there is one.
    pub items: Vec<(Outcome, Option<Arc<str>>)>,
}

impl Report {
    /// The outcomes of the chunks of the step, by their numbers. `delivered`: where its records were written, in the order of its items.
    #[must_use]
    pub fn chunks(&self, delivered: &[Delivered]) -> Vec<(u32, Bytes)> {
        let mut outcomes = self.before.clone();
        // Those of another chunk are complete.
        outcomes.items.truncate((self.from % CHUNK) as usize);
        let mut delivered = delivered.iter();
        let mut chunks = Vec::new();
        for (number, (outcome, destination)) in (self.from..).zip(&self.items) {
            if number != self.from && number.is_multiple_of(CHUNK) {
                let complete = std::mem::take(&mut outcomes);
                chunks.push((number / CHUNK - 1, complete.to_value()));
            }
            let written = destination.as_ref().and_then(|topic| {
                let (partition, offset) = (*delivered.next()?)?;
                Some((&**topic, partition, offset))
            });
            outcomes.push(*outcome, written);
        }
        if let Some(last) = u32::try_from(self.items.len())
            .ok()
            .and_then(|count| count.checked_sub(1))
        {
            chunks.push(((self.from + last) / CHUNK, outcomes.to_value()));
        }
        chunks
    }

    /// The records with these outcomes.
    #[must_use]
    pub fn outputs(&self, chunks: &[(u32, Bytes)]) -> Vec<Output> {
        let output = |(chunk, value): &(u32, Bytes)| Output {
            topic: self.topic.clone(),
            partition: Some(0),
            key: Some(outcomes_key(&self.id, *chunk).into()),
            value: Some(value.clone()),
            headers: Headers::new(),
        };
        chunks.iter().map(output).collect()
    }
}

/// The key of the outcomes of a chunk.
#[must_use]
pub fn outcomes_key(id: &str, chunk: u32) -> String {
    format!("outcomes/{id}/{chunk}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(from: u32, before: Outcomes, items: &[(Outcome, Option<&str>)]) -> Report {
        Report {
            id: "1f".to_owned(),
            topic: "redrives".into(),
            from,
            before,
            items: items
                .iter()
                .map(|(outcome, topic)| (*outcome, topic.map(Arc::from)))
                .collect(),
        }
    }

    #[test]
    fn items_have_outcomes_and_positions() {
        let skipped = Outcome::Gone;
        let items = [
            (Outcome::Done, Some("a")),
            (skipped, None),
            (Outcome::Done, Some("b")),
            (Outcome::Done, Some("a")),
            (Outcome::Done, Some("a")),
        ];
        let delivered = [Some((1, 10)), Some((0, 20)), None, Some((2, 30))];
        let written = |outcomes: &Outcomes, count| -> Vec<Option<String>> {
            let positions = (0..count).map(|index| outcomes.written(index));
            positions
                .map(|position| position.map(|position| position.to_string()))
                .collect()
        };
        let chunks = report(0, Outcomes::default(), &items).chunks(&delivered);
        assert_eq!(chunks.len(), 1);
        let outcomes = Outcomes::read(chunks[0].1.clone());
        assert_eq!((chunks[0].0, outcomes.numbers()), (0, vec![1, 16, 1, 1, 1]));
        let expected =
            ["a/1/10", "", "b/0/20", "", "a/2/30"].map(|text| (!text.is_empty()).then(|| text.to_owned()));
        assert_eq!(written(&outcomes, 5), expected);
        // The next step of the chunk keeps them. What a previous attempt has written after them is replaced.
        let chunks = report(4, outcomes, &[(Outcome::Failed, None)]).chunks(&[]);
        let outcomes = Outcomes::read(chunks[0].1.clone());
        assert_eq!(outcomes.numbers(), [1, 16, 1, 1, 2]);
        assert_eq!(written(&outcomes, 5)[..4], expected[..4]);
        assert_eq!(written(&outcomes, 6)[4..], [None, None]);
    }

    #[test]
    fn step_may_span_chunks() {
        let before = Outcomes::read(
            v1::RedriveOutcomes {
                outcomes: vec![1; 500].into(),
                ..v1::RedriveOutcomes::default()
            }
            .encode_to_vec()
            .into(),
        );
        let lengths = |from, count: usize| -> Vec<(u32, usize)> {
            let items = vec![(Outcome::Done, Some("a")); count];
            let delivered: Vec<Delivered> = (0..).take(count).map(|offset| Some((0, offset))).collect();
            let chunks = report(from, before.clone(), &items).chunks(&delivered);
            chunks
                .into_iter()
                .map(|(chunk, value)| (chunk, Outcomes::read(value).numbers().len()))
                .collect()
        };
        assert_eq!(lengths(499, 1), [(0, 500)]);
        assert_eq!(lengths(498, 3), [(0, 500), (1, 1)]);
        assert_eq!(lengths(500, 1), [(1, 1)]);
        assert_eq!(lengths(0, 1_000), [(0, 500), (1, 500)]);
        assert_eq!(lengths(7, 0), []);
    }

    #[test]
    fn outcomes_without_positions_are_short() {
        let items = vec![(Outcome::Done, None); 500];
        let chunks = report(0, Outcomes::default(), &items).chunks(&[]);
        assert!(chunks[0].1.len() < 510);
        assert_eq!(Outcomes::read(Bytes::from_static(b"\xff")), Outcomes::default());
    }
}
