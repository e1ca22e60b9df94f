//! The topics that have the payloads of dead letters of share groups: which ids they had when dead letters were indexed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use redeliver_core::Position;
use redeliver_kafka::TopicId;
use rusqlite::{Connection, OptionalExtension as _};

pub(super) const CREATE: &str = "
-- Without an id, it did not exist.
CREATE TABLE sources (topic TEXT PRIMARY KEY, id BLOB) WITHOUT ROWID;

-- The dead letters below these offsets were indexed before the source had its id.
CREATE TABLE source_positions (
    source TEXT NOT NULL, topic_id INTEGER NOT NULL, partition INTEGER NOT NULL, next INTEGER NOT NULL,
    PRIMARY KEY (source, topic_id, partition)
) WITHOUT ROWID;
";

/// What the index knows of a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IndexedSource {
    /// Its id when the last dead letter was indexed that can have its payload there; `None` if it has never existed.
    id: Option<TopicId>,
    /// The first dead letter of each partition that was indexed since it has this id. Without an entry, all of the partition were, or it is not known to have had
    /// another one.
    since: HashMap<(Arc<str>, i32), i64>,
}

impl IndexedSource {
    /// Whether the topic with this id may be the one that had the payload of a dead letter.
    pub(crate) fn may_have_had(&self, current: TopicId, letter: &Position) -> bool {
        let partition = (letter.topic.clone(), letter.partition);
        let since = self.since.get(&partition);
        self.id == Some(current) && since.is_none_or(|since| letter.offset >= *since)
    }
}

/// Takes note of the id of a topic, or that it does not exist, before the dead letters are indexed that were read before the id was requested. What is known of a
/// topic that does not exist any more stays.
pub(super) fn set(connection: &Connection, topic: &str, id: Option<TopicId>) -> rusqlite::Result<()> {
    let known: Option<Option<[u8; 16]>> = connection
        .prepare_cached("SELECT id FROM sources WHERE topic = ?")?
        .query_row([topic], |row| row.get("id"))
        .optional()?;
    let id = id.map(|id| id.bits().to_be_bytes());
    if known.is_some_and(|known| id.is_none() || known == id) {
        return Ok(());
    }
    connection
        .prepare_cached("INSERT OR REPLACE INTO sources (topic, id) VALUES (?, ?)")?
        .execute((topic, id))?;
    // Before a topic is listed, nothing is known of it.
    if known.is_some() {
        connection
            .prepare_cached("DELETE FROM source_positions WHERE source = ?")?
            .execute([topic])?;
        connection
            .prepare_cached(
                "INSERT INTO source_positions (source, topic_id, partition, next) SELECT ?, topic_id, partition, next FROM positions",
            )?
            .execute([topic])?;
    }
    Ok(())
}

/// All topics.
pub(crate) fn read_sources(connection: &Connection) -> rusqlite::Result<BTreeMap<String, IndexedSource>> {
    let mut sources: BTreeMap<String, IndexedSource> = connection
        .prepare_cached("SELECT topic, id FROM sources")?
        .query_map((), |row| {
            let id: Option<[u8; 16]> = row.get("id")?;
            let source = IndexedSource {
                id: id.map(|id| TopicId::from_bits(u128::from_be_bytes(id))),
                since: HashMap::new(),
            };
            Ok((row.get("topic")?, source))
        })?
        .collect::<rusqlite::Result<_>>()?;
    let mut positions = connection.prepare_cached(
        "SELECT p.source AS source, t.text AS topic, p.partition AS partition, p.next AS next \
         FROM source_positions p JOIN texts t ON t.id = p.topic_id",
    )?;
    let mut rows = positions.query(())?;
    while let Some(row) = rows.next()? {
        if let Some(source) = sources.get_mut(&row.get::<_, String>("source")?) {
            let topic: String = row.get("topic")?;
            source
                .since
                .insert((topic.into(), row.get("partition")?), row.get("next")?);
        }
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use redeliver_testkit::record_at;

    use super::*;

    /// An index that has read the dead letters below this offset.
    fn index(next: i64) -> Connection {
        let connection = Connection::open_in_memory().unwrap();
        let others = "CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT); INSERT INTO texts VALUES (7, 'dlq.orders');
            CREATE TABLE positions (topic_id INTEGER, partition INTEGER, next INTEGER);";
        connection.execute_batch(others).unwrap();
        connection.execute_batch(CREATE).unwrap();
        connection
            .execute("INSERT INTO positions VALUES (7, 0, ?)", [next])
            .unwrap();
        connection
    }

    fn may_have_had(connection: &Connection, current: u128, offset: i64) -> bool {
        let letter = record_at("dlq.orders", 0, offset).position;
        let sources = read_sources(connection).unwrap();
        sources["orders"].may_have_had(TopicId::from_bits(current), &letter)
    }

    #[test]
    fn other_id_concerns_earlier_letters() {
        let connection = index(50);
        let set = |id| set(&connection, "orders", Some(TopicId::from_bits(id))).unwrap();
        set(1);
        // Also of dead letters from before the topic was listed: nothing is known of them.
        assert!(may_have_had(&connection, 1, 9) && may_have_had(&connection, 1, 60));
        assert!(!may_have_had(&connection, 2, 60));
        connection.execute("UPDATE positions SET next = 80", ()).unwrap();
        set(1);
        assert!(may_have_had(&connection, 1, 60));
        set(2);
        assert!(!may_have_had(&connection, 2, 79) && may_have_had(&connection, 2, 80));
        assert!(!may_have_had(&connection, 1, 60));
        connection.execute("UPDATE positions SET next = 90", ()).unwrap();
        set(2);
        assert!(may_have_had(&connection, 2, 80));
    }

    #[test]
    fn absent_source_had_no_payloads() {
        let connection = index(50);
        let set = |id: Option<u128>| set(&connection, "orders", id.map(TopicId::from_bits)).unwrap();
        set(None);
        assert!(!may_have_had(&connection, 1, 60));
        set(Some(1));
        assert!(!may_have_had(&connection, 1, 49) && may_have_had(&connection, 1, 50));
        // It is not known whether it will be the same topic.
        set(None);
        set(Some(1));
        assert!(may_have_had(&connection, 1, 50));
    }
}
