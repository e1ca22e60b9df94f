//! The states of dead letters, which change with the ledger.

use rusqlite::{CachedStatement, Connection, OptionalExtension as _, Row};

use super::counters::{self, Counted};
use super::entries::Place;
use crate::letter::ContentHash;

/// What a change of the state of a dead letter depends on.
#[derive(Clone, Debug)]
pub(super) struct StateRow {
    row: i64,
    /// What the dead letter is counted as.
    pub(super) counted: Counted,
    pub(super) group_id: i64,
    pub(super) dead_at: i64,
    pub(super) content: ContentHash,
}

impl StateRow {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            row: row.get(0)?,
            counted: Counted {
                topic_id: row.get(1)?,
                error_class_id: row.get(2)?,
                state: row.get(3)?,
            },
            group_id: row.get(4)?,
            dead_at: row.get(5)?,
            content: row.get(6)?,
        })
    }
}

/// The statements for many dead letters.
pub(super) struct States<'c> {
    at: CachedStatement<'c>,
    of_row: CachedStatement<'c>,
    set: CachedStatement<'c>,
}

impl<'c> States<'c> {
    pub(super) fn new(connection: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            at: connection.prepare_cached(
                "SELECT row, topic_id, error_class_id, state, group_id, dead_at, content FROM letters \
                 WHERE topic_id = ? AND partition = ? AND offset = ?",
            )?,
            of_row: connection.prepare_cached(
                "SELECT row, topic_id, error_class_id, state, group_id, dead_at, content FROM letters WHERE row = ?",
            )?,
            set: connection.prepare_cached("UPDATE letters SET state = ? WHERE row = ?")?,
        })
    }

    /// The dead letter at a position.
    pub(super) fn at(&mut self, place: Place) -> rusqlite::Result<Option<StateRow>> {
        let key = (place.topic_id, place.partition, place.offset);
        self.at.query_row(key, StateRow::read).optional()
    }

    /// The dead letter with this number.
    pub(super) fn of_row(&mut self, row: i64) -> rusqlite::Result<StateRow> {
        self.of_row.query_row([row], StateRow::read)
    }

    /// Sets the state of a dead letter.
    pub(super) fn set(
        &mut self,
        letter: &StateRow,
        state: i64,
        counters: &mut counters::Changes,
    ) -> rusqlite::Result<()> {
        if letter.counted.state == state {
            return Ok(());
        }
        self.set.execute((state, letter.row))?;
        counters.add(letter.counted, letter.group_id, letter.dead_at, -1);
        let counted = Counted {
            state,
            ..letter.counted
        };
        counters.add(counted, letter.group_id, letter.dead_at, 1);
        Ok(())
    }
}
