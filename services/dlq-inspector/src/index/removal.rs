//! Removes dead letters in slices, each in a short transaction, so that neither the write-ahead log nor the wait of other
//! changes depends on how much there is to remove.

use std::collections::BTreeMap;
use std::sync::Arc;

use rusqlite::{Connection, Transaction};

use super::counters;
use super::tables::LetterRow;
use super::texts::TextTable;
use super::writer::{counted, set_state};
use crate::ledger::State;

/// The number of rows of a slice.
pub(super) const SLICE_ROWS: usize = 2_000;

/// What to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Removal {
    /// The dead letters of a topic, or those of a partition below an offset.
    Letters {
        topic: Arc<str>,
        below: Option<(i32, i64)>,
    },
    /// All ledger entries.
    Ledger,
}

/// A slice that was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    /// The number of dead letters that were deleted.
    pub(super) deleted: i64,
    /// Whether nothing is left to remove.
    pub(super) is_last: bool,
}

impl Removal {
    /// Everything of a topic.
    pub(super) fn topic(topic: Arc<str>) -> Self {
        Self::Letters { topic, below: None }
    }

    /// Removes a slice. What depends on the dead letters goes with the last one: as long as positions are left after a crash, the
    /// survey compares the remaining dead letters with Kafka, and the removal begins again.
    pub(super) fn slice(&self, transaction: &Transaction<'_>) -> rusqlite::Result<Slice> {
        match self {
            Self::Letters { topic, below } => {
                let Some(topic_id) = TextTable::Texts.find(transaction, topic)? else {
                    return Ok(Slice {
                        deleted: 0,
                        is_last: true,
                    });
                };
                letters(transaction, topic_id, *below)
            }
            Self::Ledger => ledger(transaction),
        }
    }
}

fn letters(
    transaction: &Transaction<'_>,
    topic_id: i64,
    below: Option<(i32, i64)>,
) -> rusqlite::Result<Slice> {
    let limit = i64::try_from(SLICE_ROWS).unwrap_or(i64::MAX);
    let rows = match below {
        None => rows(
            transaction,
            "SELECT row FROM letters INDEXED BY letters_by_position WHERE topic_id = ? LIMIT ?",
            (topic_id, limit),
        )?,
        Some((partition, low)) => rows(
            transaction,
            "SELECT row FROM letters INDEXED BY letters_by_position \
             WHERE topic_id = ? AND partition = ? AND offset < ? LIMIT ?",
            (topic_id, partition, low, limit),
        )?,
    };
    let mut counters = counters::Changes::default();
    for row in &rows {
        let letter = LetterRow::load(transaction, *row)?;
        counters.add(counted(&letter), letter.dead_at, -1);
        for sql in [
            "DELETE FROM letters WHERE row = ?",
            "DELETE FROM bodies WHERE row = ?",
            "DELETE FROM terms WHERE rowid = ?",
        ] {
            transaction.prepare_cached(sql)?.execute([row])?;
        }
    }
    counters.store(transaction)?;
    let is_last = rows.len() < SLICE_ROWS;
    if is_last {
        match below {
            // Ledger entries stay: they follow the ledger topic, and those of the old topic do not apply to the new one.
            None => transaction
                .prepare_cached("DELETE FROM positions WHERE topic_id = ?")?
                .execute([topic_id])?,
            Some((partition, low)) => transaction
                .prepare_cached("DELETE FROM ledger WHERE topic_id = ? AND partition = ? AND offset < ?")?
                .execute((topic_id, partition, low))?,
        };
    }
    Ok(Slice {
        deleted: i64::try_from(rows.len()).unwrap_or(i64::MAX),
        is_last,
    })
}

fn ledger(transaction: &Transaction<'_>) -> rusqlite::Result<Slice> {
    let open = State::Open as i64;
    let limit = i64::try_from(SLICE_ROWS).unwrap_or(i64::MAX);
    // Only the other states have higher numbers.
    let rows = rows(
        transaction,
        "SELECT row FROM letters INDEXED BY letters_by_state WHERE state > ? LIMIT ?",
        (open, limit),
    )?;
    let mut counters = counters::Changes::default();
    for row in &rows {
        let letter = LetterRow::load(transaction, *row)?;
        set_state(transaction, &mut counters, &letter, open)?;
    }
    counters.store(transaction)?;
    let is_last = rows.len() < SLICE_ROWS;
    if is_last {
        transaction.execute("DELETE FROM ledger", ())?;
    }
    Ok(Slice { deleted: 0, is_last })
}

fn rows(connection: &Connection, sql: &str, params: impl rusqlite::Params) -> rusqlite::Result<Vec<i64>> {
    connection
        .prepare_cached(sql)?
        .query_map(params, |row| row.get("row"))?
        .collect()
}

/// The partitions to trim, and below which offset.
#[derive(Debug, Default)]
pub(super) struct Removals(BTreeMap<(Arc<str>, i32), i64>);

impl Removals {
    pub(super) fn trim(&mut self, topic: &Arc<str>, partition: i32, low: i64) {
        let below = self.0.entry((topic.clone(), partition)).or_insert(low);
        *below = low.max(*below);
    }

    /// A topic that was created again has other offsets.
    pub(super) fn forget(&mut self, topic: &Arc<str>) {
        self.0.retain(|(name, _), _| name != topic);
    }

    pub(super) fn next(&self) -> Option<Removal> {
        let ((topic, partition), low) = self.0.first_key_value()?;
        Some(Removal::Letters {
            topic: topic.clone(),
            below: Some((*partition, *low)),
        })
    }

    pub(super) fn done(&mut self, removal: &Removal) {
        if let Removal::Letters {
            topic,
            below: Some((partition, _)),
        } = removal
        {
            self.0.remove(&(topic.clone(), *partition));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
