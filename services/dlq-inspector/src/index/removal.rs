//! Removes dead letters in slices, each in a short transaction, so that neither the write-ahead log nor the wait of other
//! changes depends on how much there is to remove. A slice consists of several removals if they are small.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rusqlite::{Connection, Transaction};

use super::change::Change;
use super::counters;
use super::entries::{self, Place};
use super::sql::sql_limit;
use super::states::States;
use super::texts::TextTable;
use crate::ledger::{self, State};

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
    /// The number of rows that were changed.
    pub(super) changed: usize,
    /// Whether nothing is left to remove.
    pub(super) is_last: bool,
}

impl Removal {
    /// Removes a slice of at most `rows` rows. What depends on the dead letters goes with the last one: as long as positions are left
    /// after a crash, the survey compares the remaining dead letters with Kafka, and the removal begins again.
    pub(super) fn slice(&self, transaction: &Transaction<'_>, rows: usize) -> rusqlite::Result<Slice> {
        match self {
            Self::Letters { topic, below } => {
                let Some(topic_id) = TextTable::Texts.find(transaction, topic)? else {
                    return Ok(Slice {
                        deleted: 0,
                        changed: 0,
                        is_last: true,
                    });
                };
                letters(transaction, topic_id, *below, rows)
            }
            Self::Ledger => all_entries(transaction, rows),
        }
    }
}

fn letters(
    transaction: &Transaction<'_>,
    topic_id: i64,
    below: Option<(i32, i64)>,
    limit: usize,
) -> rusqlite::Result<Slice> {
    let rows = match below {
        None => rows(
            transaction,
            "SELECT row FROM letters INDEXED BY letters_by_position WHERE topic_id = ? LIMIT ?",
            (topic_id, sql_limit(limit)),
        )?,
        Some((partition, low)) => rows(
            transaction,
            "SELECT row FROM letters INDEXED BY letters_by_position \
             WHERE topic_id = ? AND partition = ? AND offset < ? LIMIT ?",
            (topic_id, partition, low, sql_limit(limit)),
        )?,
    };
    let mut counters = counters::Changes::default();
    let mut states = States::new(transaction)?;
    for row in &rows {
        let letter = states.of_row(*row)?;
        counters.add(letter.counted, letter.group_id, letter.dead_at, -1);
        for sql in [
            "DELETE FROM letters WHERE row = ?",
            "DELETE FROM bodies WHERE row = ?",
            "DELETE FROM terms WHERE rowid = ?",
        ] {
            transaction.prepare_cached(sql)?.execute([row])?;
        }
    }
    counters.store(transaction)?;
    let mut changed = rows.len();
    match below {
        // Ledger entries stay: they follow the ledger topic, and those of the old topic do not apply to the new one.
        None if changed < limit => forget_reading(transaction, topic_id)?,
        None => {}
        Some((partition, low)) => {
            changed += delete_entries(
                transaction,
                "SELECT topic_id, partition, offset FROM ledger \
                 WHERE topic_id = ? AND partition = ? AND offset < ? LIMIT ?",
                (topic_id, partition, low, sql_limit(limit - changed)),
            )?;
        }
    }
    Ok(Slice {
        deleted: i64::try_from(rows.len()).unwrap_or(i64::MAX),
        changed,
        is_last: changed < limit,
    })
}

fn all_entries(transaction: &Transaction<'_>, limit: usize) -> rusqlite::Result<Slice> {
    let open = State::Open as i64;
    // Only the other states have higher numbers. A dead letter that is indexed meanwhile may still get a state from an entry. Each
    // slice begins with the dead letters, so that this is one of the next ones.
    let rows = rows(
        transaction,
        "SELECT row FROM letters INDEXED BY letters_by_state WHERE state > ? LIMIT ?",
        (open, sql_limit(limit)),
    )?;
    let mut counters = counters::Changes::default();
    let mut states = States::new(transaction)?;
    for row in &rows {
        let letter = states.of_row(*row)?;
        states.set(&letter, open, &mut counters)?;
    }
    counters.store(transaction)?;
    let entries = delete_entries(
        transaction,
        "SELECT topic_id, partition, offset FROM ledger LIMIT ?",
        [sql_limit(limit - rows.len())],
    )?;
    let changed = rows.len() + entries;
    let is_last = changed < limit;
    if is_last && let Some(topic_id) = TextTable::Texts.find(transaction, ledger::TOPIC)? {
        // The position would be beyond the end of the new ledger, which would look created again each time.
        forget_reading(transaction, topic_id)?;
    }
    Ok(Slice {
        deleted: 0,
        changed,
        is_last,
    })
}

/// Deletes the ledger entries that a query selects, and returns their number.
fn delete_entries(
    connection: &Connection,
    sql: &str,
    params: impl rusqlite::Params,
) -> rusqlite::Result<usize> {
    let places: Vec<Place> = connection
        .prepare_cached(sql)?
        .query_map(params, |row| {
            Ok(Place {
                topic_id: row.get("topic_id")?,
                partition: row.get("partition")?,
                offset: row.get("offset")?,
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    for place in &places {
        entries::remove(connection, *place)?;
    }
    Ok(places.len())
}

fn forget_reading(connection: &Connection, topic_id: i64) -> rusqlite::Result<()> {
    for sql in [
        "DELETE FROM positions WHERE topic_id = ?",
        "DELETE FROM topic_ids WHERE topic_id = ?",
        "DELETE FROM source_positions WHERE topic_id = ?",
    ] {
        connection.prepare_cached(sql)?.execute([topic_id])?;
    }
    Ok(())
}

fn rows(connection: &Connection, sql: &str, params: impl rusqlite::Params) -> rusqlite::Result<Vec<i64>> {
    connection
        .prepare_cached(sql)?
        .query_map(params, |row| row.get("row"))?
        .collect()
}

/// What is to be removed.
#[derive(Clone, Debug, Default)]
pub(super) struct Removals {
    topics: BTreeSet<Arc<str>>,
    has_ledger: bool,
    /// The partitions to trim, and below which offset.
    trims: BTreeMap<(Arc<str>, i32), i64>,
}

impl Removals {
    /// Whether a change must wait: what it adds would be removed, too.
    pub(super) fn block(&self, change: &Change) -> bool {
        let is_removed =
            |topic: &Arc<str>| self.topics.contains(topic) || (self.has_ledger && &**topic == ledger::TOPIC);
        match change {
            Change::Letters(letters) => letters.iter().any(|letter| is_removed(&letter.position.topic)),
            Change::Ledger(_) => self.has_ledger,
            Change::Position { topic, .. } | Change::Identify { topic, .. } | Change::Trim { topic, .. } => {
                is_removed(topic)
            }
            Change::Source { .. } | Change::Forget { .. } | Change::ForgetLedger => false,
        }
    }

    /// Adds what a change removes.
    pub(super) fn add(&mut self, change: &Change) {
        match change {
            Change::Trim {
                topic,
                partition,
                low,
            } => {
                let below = self.trims.entry((topic.clone(), *partition)).or_insert(*low);
                *below = (*low).max(*below);
            }
            Change::Forget { topic } => {
                // A topic that was created again has other offsets.
                self.trims.retain(|(name, _), _| name != topic);
                self.topics.insert(topic.clone());
            }
            Change::ForgetLedger => self.has_ledger = true,
            Change::Letters(_)
            | Change::Ledger(_)
            | Change::Position { .. }
            | Change::Identify { .. }
            | Change::Source { .. } => {}
        }
    }

    /// All removals. Those that changes may wait for come first.
    pub(super) fn iter(&self) -> impl Iterator<Item = Removal> {
        let ledger = self.has_ledger.then_some(Removal::Ledger);
        let topics = self.topics.iter().map(|topic| Removal::Letters {
            topic: topic.clone(),
            below: None,
        });
        let trims = self
            .trims
            .iter()
            .map(|((topic, partition), low)| Removal::Letters {
                topic: topic.clone(),
                below: Some((*partition, *low)),
            });
        ledger.into_iter().chain(topics).chain(trims)
    }

    /// The topics and partitions that still contain what is to be removed; without a partition, all of the topic.
    pub(super) fn places(&self) -> impl Iterator<Item = (Arc<str>, Option<i32>)> {
        self.iter().map(|removal| match removal {
            Removal::Ledger => (ledger::TOPIC.into(), None),
            Removal::Letters { topic, below } => (topic, below.map(|(partition, _)| partition)),
        })
    }

    pub(super) fn done(&mut self, removal: &Removal) {
        match removal {
            Removal::Ledger => self.has_ledger = false,
            Removal::Letters { topic, below: None } => {
                self.topics.remove(topic);
            }
            Removal::Letters {
                topic,
                below: Some((partition, _)),
            } => {
                self.trims.remove(&(topic.clone(), *partition));
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.is_forgetting() && self.trims.is_empty()
    }

    /// Whether a topic or the ledger is to be removed.
    pub(super) fn is_forgetting(&self) -> bool {
        self.has_ledger || !self.topics.is_empty()
    }
}
