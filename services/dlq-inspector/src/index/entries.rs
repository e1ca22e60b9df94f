//! The entries of the ledger, as the index stores them.

use redeliver_core::Timestamp;
use rusqlite::{CachedStatement, Connection, OptionalExtension as _, params};

use crate::ledger::{self, LedgerEntry, State, Version};
use crate::letter::ContentHash;

pub(super) const CREATE: &str = "
CREATE TABLE ledger (
    topic_id INTEGER NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL,
    -- 0: the newest record of the ledger has no value.
    state INTEGER NOT NULL, time INTEGER, who TEXT NOT NULL, reason TEXT NOT NULL, content BLOB,
    -- Where and when the newest record of the ledger was written.
    in_partition INTEGER NOT NULL, at_offset INTEGER NOT NULL, written INTEGER,
    PRIMARY KEY (topic_id, partition, offset)
) WITHOUT ROWID;
";

/// A position, with the id of its topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) topic_id: i64,
    pub(super) partition: i32,
    pub(super) offset: i64,
}

/// The statements for many entries.
pub(super) struct Entries<'c> {
    find: CachedStatement<'c>,
    version: CachedStatement<'c>,
    put: CachedStatement<'c>,
}

impl<'c> Entries<'c> {
    pub(super) fn new(connection: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            find: connection.prepare_cached(
                "SELECT state, time, who, reason, content, written FROM ledger \
                 WHERE topic_id = ? AND partition = ? AND offset = ? AND state != 0",
            )?,
            version: connection.prepare_cached(
                "SELECT state, in_partition, at_offset, written FROM ledger \
                 WHERE topic_id = ? AND partition = ? AND offset = ?",
            )?,
            put: connection.prepare_cached(
                "INSERT OR REPLACE INTO ledger (topic_id, partition, offset, state, time, who, reason, content, in_partition, at_offset, written) \
                 VALUES (:topic_id, :partition, :offset, :state, :time, :who, :reason, :content, :in_partition, :at_offset, :written)",
            )?,
        })
    }

    /// The entry that applies to a dead letter.
    pub(super) fn find(
        &mut self,
        place: Place,
        content: &ContentHash,
        dead_at: i64,
    ) -> rusqlite::Result<Option<LedgerEntry>> {
        let key = (place.topic_id, place.partition, place.offset);
        let read = |row: &rusqlite::Row<'_>| {
            let entry = LedgerEntry {
                state: State::from_number(row.get("state")?).unwrap_or_default(),
                time: row.get::<_, Option<i64>>("time")?.map(Timestamp::from_millis),
                by: row.get("who")?,
                reason: row.get("reason")?,
                content: row.get("content")?,
            };
            let written = row.get::<_, Option<i64>>("written")?.map(Timestamp::from_millis);
            Ok(applies(&entry, written, content, dead_at).then_some(entry))
        };
        Ok(self.find.query_row(key, read).optional()?.flatten())
    }

    /// The version of the entry at a position.
    fn version(&mut self, place: Place) -> rusqlite::Result<Option<Version>> {
        let key = (place.topic_id, place.partition, place.offset);
        let read = |row: &rusqlite::Row<'_>| {
            let state = State::from_number(row.get("state")?).unwrap_or_default();
            Ok(Version {
                partition: row.get("in_partition")?,
                offset: row.get("at_offset")?,
                time: row.get::<_, Option<i64>>("written")?.map(Timestamp::from_millis),
                closes: state != State::Open,
            })
        };
        self.version.query_row(key, read).optional()
    }

    /// Replaces the entry at a position, unless the known one is newer. Returns whether it did.
    pub(super) fn put(
        &mut self,
        place: Place,
        entry: Option<&LedgerEntry>,
        new: Version,
    ) -> rusqlite::Result<bool> {
        if self.version(place)?.is_some_and(|known| !new.is_after(&known)) {
            return Ok(false);
        }
        let none = LedgerEntry::default();
        let (state, entry) = entry.map_or((0, &none), |entry| (entry.state as i64, entry));
        self.put.execute(params![
            place.topic_id,
            place.partition,
            place.offset,
            state,
            entry.time.map(Timestamp::as_millis),
            entry.by,
            entry.reason,
            entry.content,
            new.partition,
            new.offset,
            new.time.map(Timestamp::as_millis),
        ])?;
        Ok(true)
    }
}

/// Removes the entry at a position.
pub(super) fn remove(connection: &Connection, place: Place) -> rusqlite::Result<()> {
    connection
        .prepare_cached("DELETE FROM ledger WHERE topic_id = ? AND partition = ? AND offset = ?")?
        .execute((place.topic_id, place.partition, place.offset))?;
    Ok(())
}

fn applies(entry: &LedgerEntry, written: Option<Timestamp>, content: &ContentHash, dead_at: i64) -> bool {
    let letter = (content, Some(Timestamp::from_millis(dead_at)));
    ledger::applies((entry.content.as_ref(), written), letter)
}
