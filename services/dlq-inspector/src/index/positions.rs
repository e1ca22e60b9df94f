//! The read positions and the ids of topics.

use std::sync::Arc;

use redeliver_kafka::TopicId;
use rusqlite::Connection;

/// The next offset to read of a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReadPosition {
    pub(crate) topic: Arc<str>,
    /// The id of the topic, if it is known.
    pub(crate) id: Option<TopicId>,
    pub(crate) partition: i32,
    pub(crate) next: i64,
}

/// The position of each partition.
pub(crate) fn read_positions(connection: &Connection) -> rusqlite::Result<Vec<ReadPosition>> {
    connection
        .prepare_cached(
            "SELECT (SELECT text FROM texts WHERE id = p.topic_id) AS topic, i.id AS id, p.partition AS partition, p.next AS next \
             FROM positions p LEFT JOIN topic_ids i ON i.topic_id = p.topic_id",
        )?
        .query_map((), |row| {
            let topic: String = row.get("topic")?;
            let id: Option<[u8; 16]> = row.get("id")?;
            Ok(ReadPosition {
                topic: topic.into(),
                id: id.map(|id| TopicId::from_bits(u128::from_be_bytes(id))),
                partition: row.get("partition")?,
                next: row.get("next")?,
            })
        })?
        .collect()
}

/// The ids of the topics that were read.
pub(crate) fn read_topic_ids(connection: &Connection) -> rusqlite::Result<Vec<(Arc<str>, TopicId)>> {
    connection
        .prepare_cached(
            "SELECT (SELECT text FROM texts WHERE id = i.topic_id) AS topic, i.id AS id FROM topic_ids i",
        )?
        .query_map((), |row| {
            let topic: String = row.get("topic")?;
            let bits = u128::from_be_bytes(row.get("id")?);
            Ok((topic.into(), TopicId::from_bits(bits)))
        })?
        .collect()
}
