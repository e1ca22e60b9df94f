//! Reads the records of dead letters.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::iter::{once, repeat_n};
use std::time::{Duration, Instant};

use redeliver_core::{Position, Record};
use redeliver_kafka::lookup::{Found, Lookup, StoredRecord};
use redeliver_kafka::reader::{ReadError, TopicClient};
use redeliver_kafka::{KafkaSettings, TopicId};

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

/// The clients that read them. All calls block.
#[derive(Default)]
pub(super) struct LetterReader {
    lookup: Option<Lookup>,
    /// Reads payloads that were left out. Another client, so that the first one goes on fetching dead letters.
    origins: Option<Lookup>,
    /// Asks for the ids of their topics.
    topics: Option<TopicClient>,
}

impl LetterReader {
    /// Drops the clients, and the records in their queues.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
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

    /// Those that share groups have not copied, and their size. Reads the first one, and then a batch of each partition.
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
        let Some(rest) = wanted.get_mut(1..) else {
            return Ok((restored, size));
        };
        rest.sort_by(|(_, one), (_, other)| one.cmp(other));
        let topics: BTreeSet<&str> = wanted.iter().map(|(_, origin)| &*origin.topic).collect();
        let topics: Vec<&str> = topics.into_iter().collect();
        let (first, rest) = wanted.split_at(1);
        // What is known of the positions that follow another one of which nothing is known.
        let unknown = Found::Unknown;
        let partition = |(_, origin): &(&Record, Position)| (origin.topic.clone(), origin.partition);
        for batch in once(first).chain(rest.chunk_by(|one, next| partition(one) == partition(next))) {
            if size >= STEP_BYTES || started.elapsed() >= ORIGINALS_TIME {
                break;
            }
            let positions: Vec<Position> = batch.iter().map(|(_, origin)| origin.clone()).collect();
            let lookup = match &mut self.origins {
                Some(lookup) => lookup,
                None => self.origins.insert(Lookup::new(kafka)?),
            };
            let all = match lookup.find_within(&positions, STEP_BYTES - size, ORIGINAL_TIMEOUT) {
                Ok(all) => all,
                Err(error) if error.is_denied() => {
                    let denied = batch.iter().map(|(letter, _)| letter.position.clone());
                    restored.extend(denied.map(|position| (position, Err(Outcome::PayloadOmitted))));
                    continue;
                }
                Err(error) if restored.is_empty() => return Err(error),
                // The next step begins with it.
                Err(error) => {
                    tracing::debug!(error = %error_chain(&error), "cannot read payloads at an origin; going on without them");
                    break;
                }
            };
            let is_unknown = matches!(all.last(), Some(Found::Unknown));
            let rest = repeat_n(&unknown, if is_unknown { batch.len() } else { 0 });
            for ((letter, _), found) in batch.iter().zip(all.iter().chain(rest)) {
                let whole = omitted::uncopied(letter, found);
                size += whole.as_ref().map_or(0, Record::size);
                restored.insert(letter.position.clone(), whole);
            }
        }
        let client = match &self.topics {
            Some(client) => client,
            None => self.topics.insert(TopicClient::new(kafka)?),
        };
        // After the records were read: then they are of that topic.
        let current = client.ids(&topics)?;
        for (letter, origin) in &wanted {
            let (id, current) = (ids.get(&*origin.topic), current.get(&*origin.topic));
            if let (Some(id), Some(whole)) = (id, restored.get_mut(&letter.position)) {
                *whole = omitted::of_same_topic(whole.clone(), *id, current.copied());
            }
        }
        let left = wanted.iter().map(|(letter, _)| &letter.position);
        let left: HashSet<&Position> = left
            .filter(|position| !restored.contains_key(*position))
            .collect();
        let is_left = |stored: &StoredRecord| left.contains(&stored.record.position);
        let end = found
            .iter()
            .position(|stored| stored.as_ref().is_some_and(is_left));
        found.truncate(end.unwrap_or(found.len()));
        Ok((restored, size))
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
