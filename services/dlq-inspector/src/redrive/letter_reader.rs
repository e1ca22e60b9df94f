//! Reads the records of dead letters.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use redeliver_core::{Position, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::lookup::{Lookup, StoredRecord};
use redeliver_kafka::reader::ReadError;

use super::job::Item;
use super::omitted;
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
}

impl LetterReader {
    /// Drops the clients, and the records in their queues.
    pub(super) fn forget(&mut self) {
        (self.lookup, self.origins) = (None, None);
    }

    /// Nobody asks for anything.
    pub(super) fn rest(&mut self) {
        if let Some(lookup) = &mut self.lookup
            && lookup.rest().is_err()
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
        let positions = items.iter().map(|item| Position {
            topic: item.id.topic.as_str().into(),
            partition: item.id.partition,
            offset: item.id.offset,
        });
        lookup.get_first(&positions.collect::<Vec<_>>(), STEP_BYTES, READ_TIMEOUT)
    }

    /// The dead letters whose payload was left out, with it, by their positions. Cuts off dead letters, so that a step has not too much of it.
    pub(super) fn originals(
        &mut self,
        kafka: &KafkaSettings,
        destinations: &Destinations,
        found: &mut Vec<Option<StoredRecord>>,
    ) -> Result<HashMap<Position, Record>, ReadError> {
        let (mut restored, mut size, started) = (HashMap::new(), 0, Instant::now());
        for index in 0..found.len() {
            let Some(letter) = found[index].as_ref().map(|stored| &stored.record) else {
                continue;
            };
            let Some(position) = destinations.original(&letter.position.topic, &letter.headers) else {
                continue;
            };
            if size >= STEP_BYTES || started.elapsed() >= ORIGINALS_TIME {
                found.truncate(index);
                break;
            }
            let Some(original) = self.original(kafka, position)? else {
                continue;
            };
            if let Some(whole) = omitted::restored(letter, &original) {
                size += omitted::size(&whole);
                restored.insert(letter.position.clone(), whole);
            }
        }
        Ok(restored)
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
