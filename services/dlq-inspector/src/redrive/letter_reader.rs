//! Reads the records of dead letters.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use redeliver_core::error_chain::error_chain;
use redeliver_core::{Position, Record};
use redeliver_kafka::lookup::{Found, Lookup, StoredRecord};
use redeliver_kafka::reader::{ReadError, TopicClient};
use redeliver_kafka::{KafkaSettings, TopicId};

use super::doubts::Doubts;
use super::job::{Item, Outcome};
use super::omitted::{self, Restored};
use super::record::Destinations;

/// How long reading the records of a step may take.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
/// How long reading a record whose payload was left out of its dead letter may take. Other jobs wait meanwhile.
const ORIGINAL_TIMEOUT: Duration = Duration::from_secs(5);
/// After this time, a step has no more of them.
const ORIGINALS_TIME: Duration = Duration::from_secs(2);
/// The maximum size of the records of a step and one more, in bytes.
const STEP_BYTES: usize = 8 << 20;

/// How many times as many payloads are read next. Partitions take turns, so more of them can be read that a step does not take, and fewer need more requests.
const GROWTH: usize = 4;

/// The clients that read them. All calls block.
#[derive(Default)]
pub(super) struct LetterReader {
    lookup: Option<Lookup>,
    /// Reads payloads that were left out. Another client, so that the first one goes on fetching dead letters.
    origins: Option<Lookup>,
    /// Asks for the ids of their topics.
    topics: Option<TopicClient>,
    doubts: Doubts,
}

impl LetterReader {
    /// Drops the clients, and the records in their queues.
    pub(super) fn forget(&mut self) {
        *self = Self {
            doubts: std::mem::take(&mut self.doubts),
            ..Self::default()
        };
    }

    /// No job asks for records.
    pub(super) fn stop_fetching(&mut self) {
        if let Some(lookup) = &mut self.lookup
            && lookup.stop_fetching().is_err()
        {
            self.lookup = None;
        }
    }

    /// The records of the first items, or of all.
    pub(super) fn lookup(
        &mut self,
        kafka: &KafkaSettings,
        items: &[Item],
    ) -> Result<Vec<Option<StoredRecord>>, ReadError> {
        let lookup = match &mut self.lookup {
            Some(lookup) => lookup,
            None => self.lookup.insert(Lookup::for_runs(kafka)?),
        };
        let positions = items.iter().map(|item| item.id.clone());
        lookup.get_first(&positions.collect::<Vec<_>>(), STEP_BYTES, READ_TIMEOUT)
    }

    /// The dead letters that have no payload, with what is at their origins, by their positions. Cuts off dead letters, so that a step has not too much of it. `ids` are
    /// those that the topics had when the job was planned.
    pub(super) fn originals(
        &mut self,
        kafka: &KafkaSettings,
        destinations: &Destinations,
        ids: &BTreeMap<&str, TopicId>,
        found: &mut Vec<Option<StoredRecord>>,
    ) -> Result<HashMap<Position, Restored>, ReadError> {
        let started = Instant::now();
        let (mut restored, mut size) = self.uncopied(kafka, destinations, ids, found)?;
        for index in 0..found.len() {
            let Some(letter) = found[index].as_ref().map(|stored| &stored.record) else {
                continue;
            };
            let Some(position) = destinations.original(&letter.position.topic, &letter.headers) else {
                continue;
            };
            // A step without any dead letter would be repeated for ever.
            if index > 0 && (size >= STEP_BYTES || started.elapsed() >= ORIGINALS_TIME) {
                found.truncate(index);
                break;
            }
            let Some(original) = self.original(kafka, position)? else {
                continue;
            };
            if let Some(whole) = omitted::restored(letter, &original) {
                size += whole.size();
                restored.insert(letter.position.clone(), Ok(whole));
            }
        }
        Ok(restored)
    }

    /// Those that share groups have not copied, and their size. Reads them in the order of the dead letters, so that little is read that the step does not take: the
    /// first one, and then always more of them, each time by partition in the order of their offsets.
    fn uncopied(
        &mut self,
        kafka: &KafkaSettings,
        destinations: &Destinations,
        ids: &BTreeMap<&str, TopicId>,
        found: &mut Vec<Option<StoredRecord>>,
    ) -> Result<(HashMap<Position, Restored>, usize), ReadError> {
        let (mut restored, mut size, started) = (HashMap::new(), 0, Instant::now());
        let letters = found.iter().flatten().map(|stored| &stored.record);
        let origin = |letter| Some((letter, destinations.uncopied_of(letter)?));
        let mut wanted: Vec<(&Record, Position)> = letters.filter_map(origin).collect();
        // The configuration has changed since the plan.
        wanted.retain(|(letter, origin)| {
            let is_planned = ids.contains_key(&*origin.topic);
            if !is_planned {
                restored.insert(letter.position.clone(), Err(Outcome::PayloadOmitted));
            }
            is_planned
        });
        if wanted.is_empty() {
            return Ok((restored, size));
        }
        // Why some are left for the next step.
        let mut failed = None;
        let (mut rest, mut count) = (wanted.as_slice(), 1);
        'reading: while !rest.is_empty() {
            let (next, others) = rest.split_at(count.min(rest.len()));
            (rest, count) = (others, count * GROWTH);
            let mut next: Vec<&(&Record, Position)> = next.iter().collect();
            next.sort_by(|one, other| one.1.cmp(&other.1));
            for batch in next
                .chunk_by(|(_, one), (_, next)| (&one.topic, one.partition) == (&next.topic, next.partition))
            {
                if size >= STEP_BYTES || started.elapsed() >= ORIGINALS_TIME {
                    break 'reading;
                }
                match self.uncopied_in(kafka, batch, STEP_BYTES - size) {
                    Ok(read) => {
                        let wholes = read.iter().filter_map(|(_, whole)| whole.as_ref().ok());
                        size += wholes.map(Record::size).sum::<usize>();
                        restored.extend(read);
                    }
                    Err(error) => {
                        failed = Some(error);
                        break 'reading;
                    }
                }
            }
        }
        let topics: BTreeSet<&str> = wanted.iter().map(|(_, origin)| &*origin.topic).collect();
        let client = match &self.topics {
            Some(client) => client,
            None => self.topics.insert(TopicClient::new(kafka)?),
        };
        // After the records were read: then they are of that topic.
        let mut current = client.ids(&topics.iter().copied().collect::<Vec<_>>())?;
        let now = Instant::now();
        for topic in topics {
            let Some(planned) = ids.get(topic).copied() else {
                continue;
            };
            let current = certain_id(&mut self.doubts, topic, planned, current.remove(topic), now);
            for (letter, _) in wanted.iter().filter(|(_, origin)| *origin.topic == *topic) {
                let Some(whole) = restored.remove(&letter.position) else {
                    continue;
                };
                let whole = match &current {
                    Ok(current) => omitted::of_same_topic(whole, planned, *current),
                    Err(error) if error.is_denied() => Err(Outcome::PayloadOmitted),
                    Err(_) => continue,
                };
                restored.insert(letter.position.clone(), whole);
            }
            failed = failed.or(current.err().filter(|error| !error.is_denied()));
        }
        let left = wanted.iter().map(|(letter, _)| &letter.position);
        let left: HashSet<&Position> = left
            .filter(|position| !restored.contains_key(*position))
            .collect();
        let is_left = |stored: &StoredRecord| left.contains(&stored.record.position);
        let end = found
            .iter()
            .position(|stored| stored.as_ref().is_some_and(is_left));
        match failed {
            Some(error) if end == Some(0) => return Err(error),
            // The next step begins with it.
            Some(error) => tracing::debug!(error = %error_chain(&error), "cannot read payloads at an origin"),
            None => {}
        }
        found.truncate(end.unwrap_or(found.len()));
        Ok((restored, size))
    }

    /// The first ones of dead letters whose records are in one partition, in the order of their offsets, until they have this size together, in bytes.
    ///
    /// # Errors
    /// If none can be read yet.
    fn uncopied_in(
        &mut self,
        kafka: &KafkaSettings,
        batch: &[&(&Record, Position)],
        bytes: usize,
    ) -> Result<Vec<(Position, Restored)>, ReadError> {
        let positions: Vec<Position> = batch.iter().map(|(_, origin)| origin.clone()).collect();
        let lookup = match &mut self.origins {
            Some(lookup) => lookup,
            None => self.origins.insert(Lookup::new(kafka)?),
        };
        let mut all = match lookup.find_within(&positions, bytes, ORIGINAL_TIMEOUT) {
            Ok(all) => all,
            Err(error) if error.is_denied() => {
                let denied = |(letter, _): &&(&Record, Position)| {
                    (letter.position.clone(), Err(Outcome::PayloadOmitted))
                };
                return Ok(batch.iter().map(denied).collect());
            }
            Err(error) => return Err(error),
        };
        let is_unknown = matches!(all.last(), Some(Found::Unknown));
        let known = all.len() - usize::from(is_unknown);
        for position in &positions[..known] {
            self.doubts.clear(&position.to_string());
        }
        if let Some(unknown) = positions.get(known).filter(|_| is_unknown) {
            if self.doubts.is_certain(&unknown.to_string(), Instant::now()) {
                // Nor is anything known of the positions that follow.
                all.resize_with(batch.len(), || Found::Unknown);
            } else {
                all.pop();
                if all.is_empty() {
                    return Err(ReadError::Late {
                        topic: unknown.topic.to_string(),
                        partition: unknown.partition,
                        end: unknown.offset,
                    });
                }
            }
        }
        let found = batch.iter().zip(&all);
        Ok(found
            .map(|((letter, _), found)| (letter.position.clone(), omitted::uncopied(letter, found)))
            .collect())
    }

    /// The record at a position; `None` if it is gone, or this process may not read its topic.
    fn original(&mut self, kafka: &KafkaSettings, position: Position) -> Result<Option<Record>, ReadError> {
        let lookup = match &mut self.origins {
            Some(lookup) => lookup,
            None => self.origins.insert(Lookup::new(kafka)?),
        };
        match lookup.get(&[position], ORIGINAL_TIMEOUT) {
            Ok(records) => Ok(records.into_iter().next().flatten().map(|stored| stored.record)),
            Err(error) if error.is_denied() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The id that a topic has now, of which Kafka has said this; `None` if it does not exist.
///
/// # Errors
/// If Kafka does not tell, or may not know the topic with its planned id yet.
fn certain_id(
    doubts: &mut Doubts,
    topic: &str,
    planned: TopicId,
    current: Option<Result<TopicId, ReadError>>,
    now: Instant,
) -> Result<Option<TopicId>, ReadError> {
    let current = current.transpose()?;
    // Another redrive may have been planned with another id.
    let about = format!("{topic} {planned:?}");
    if current == Some(planned) {
        doubts.clear(&about);
    } else if !doubts.is_certain(&about, now) {
        return Err(match current {
            Some(_) => ReadError::Recreated(topic.to_owned()),
            None => ReadError::Missing(topic.to_owned()),
        });
    }
    Ok(current)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_id_is_confirmed_first() {
        let (mut doubts, start) = (Doubts::default(), Instant::now());
        let planned = TopicId::from_bits(1);
        let mut id = |current, seconds| {
            let now = start + Duration::from_secs(seconds);
            certain_id(&mut doubts, "orders", planned, current, now)
        };
        let same = Some(planned);
        assert_eq!(id(same.map(Ok), 0).unwrap(), same);
        assert!(matches!(id(None, 1), Err(ReadError::Missing(_))));
        assert_eq!(id(same.map(Ok), 6).unwrap(), same);
        let other = Some(TopicId::from_bits(2));
        assert!(matches!(id(other.map(Ok), 7), Err(ReadError::Recreated(_))));
        let denied = || Some(Err(ReadError::Denied("orders".to_owned())));
        assert!(id(denied(), 8).unwrap_err().is_denied());
        assert_eq!(id(other.map(Ok), 12).unwrap(), other);
        assert_eq!(id(None, 13).unwrap(), None);
    }
}
