//! The topics that have the payloads of dead letters of share groups: which ids they had when dead letters were indexed.

use std::collections::BTreeMap;

use redeliver_core::Timestamp;
use redeliver_kafka::TopicId;
use rusqlite::Connection;

pub(super) const CREATE: &str =
    "CREATE TABLE sources (topic TEXT PRIMARY KEY, id BLOB NOT NULL, since INTEGER NOT NULL) WITHOUT ROWID;";

/// What the index knows of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IndexedSource {
    /// Its id when the last dead letter was indexed that can have its payload there.
    id: TopicId,
    /// When it was first seen with this id, by the clock of this process; 0 if it was seen with no other one.
    since: Timestamp,
}

impl IndexedSource {
    /// Whether the topic with this id may be the one that had the payload of a dead letter that was indexed at this time.
    pub(crate) fn may_have_had(&self, current: TopicId, indexed_at: Timestamp) -> bool {
        self.id == current && self.since <= indexed_at
    }
}

/// Takes note of the id of a topic, before the dead letters are indexed that were read before the id.
pub(super) fn set(connection: &Connection, topic: &str, id: TopicId, now: i64) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "INSERT INTO sources (topic, id, since) VALUES (?1, ?2, 0) \
             ON CONFLICT (topic) DO UPDATE SET id = excluded.id, since = ?3 WHERE id <> excluded.id",
        )?
        .execute((topic, id.bits().to_be_bytes(), now))?;
    Ok(())
}

/// All topics.
pub(crate) fn read_sources(connection: &Connection) -> rusqlite::Result<BTreeMap<String, IndexedSource>> {
    connection
        .prepare_cached("SELECT topic, id, since FROM sources")?
        .query_map((), |row| {
            let source = IndexedSource {
                id: TopicId::from_bits(u128::from_be_bytes(row.get("id")?)),
                since: Timestamp::from_millis(row.get("since")?),
            };
            Ok((row.get("topic")?, source))
        })?
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_id_concerns_earlier_letters() {
        let connection = Connection::open_in_memory().unwrap();
        connection.execute_batch(CREATE).unwrap();
        let id = TopicId::from_bits;
        let may_have_had = |current, indexed_at| {
            let sources = read_sources(&connection).unwrap();
            sources["orders"].may_have_had(id(current), Timestamp::from_millis(indexed_at))
        };
        set(&connection, "orders", id(1), 50).unwrap();
        // Also of dead letters from before the topic was listed: nothing is known of them.
        assert!(may_have_had(1, 9) && may_have_had(1, 60) && !may_have_had(2, 60));
        set(&connection, "orders", id(1), 70).unwrap();
        assert!(may_have_had(1, 60));
        set(&connection, "orders", id(2), 80).unwrap();
        assert!(!may_have_had(2, 79) && may_have_had(2, 80) && !may_have_had(1, 60));
    }
}
