//! The connection that writes.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use redeliver_core::Timestamp;
use rusqlite::{Connection, OptionalExtension as _, Transaction};

use super::counters::{self, Counted};
use super::entries::{self, Place};
use super::removal::{Removal, Removals};
use super::tables::{BodyRow, LetterRow};
use super::texts::{TextIds, TextTable};
use super::{IndexError, database, message, row_key, schema, terms};
use crate::ledger::{State, Update};
use crate::letter::Letter;

/// A change of the index.
#[derive(Clone, Debug)]
pub enum Change {
    /// Adds dead letters. One whose position is indexed already is ignored.
    Letters(Vec<Letter>),
    /// Applies updates of the ledger, in the order of their records.
    Ledger(Vec<Update>),
    /// Stores the read position of a partition.
    Position {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// The next offset to read.
        next: i64,
    },
    /// Removes the dead letters below an offset, which Kafka's retention has deleted. They are removed bit by bit, see
    /// [`Writer::remove_slice`].
    Trim {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// The low watermark: the first offset that Kafka still has.
        low: i64,
    },
    /// Removes everything of a topic that was deleted, or deleted and created again.
    Forget {
        /// The topic.
        topic: Arc<str>,
    },
    /// Sets all dead letters back to open, because the ledger was deleted.
    ForgetLedger,
}

/// The connection that writes.
pub struct Writer {
    connection: Connection,
    path: PathBuf,
    text_ids: TextIds,
    next_sequence: i64,
    trims: Removals,
    /// Rows deleted since unused texts were last removed.
    deleted_rows: i64,
    _lock: File,
}

/// Unused texts are removed after this many rows were deleted, or a tenth of all rows if that is more: finding them
/// reads every row.
const DELETED_ROWS: i64 = 1_000;

impl Writer {
    pub(super) fn new(connection: Connection, path: PathBuf, lock: File) -> Result<Self, IndexError> {
        connection.set_prepared_statement_cache_capacity(64);
        let next_sequence =
            schema::meta(&connection, "next_sequence").map_err(database("reading the index"))?;
        Ok(Self {
            connection,
            path,
            text_ids: TextIds::default(),
            next_sequence: next_sequence.unwrap_or(1),
            trims: Removals::default(),
            deleted_rows: 0,
            _lock: lock,
        })
    }

    /// Applies the changes, and returns the number of the last dead letter. Changes up to the removal of a topic or of the
    /// ledger share a transaction; the removal itself is a sequence of short ones. `now` is when the dead letters count as
    /// indexed.
    ///
    /// # Errors
    /// If the database fails. Then the index contains the changes up to some transaction.
    pub fn apply(&mut self, changes: &[Change], now: Timestamp) -> Result<i64, IndexError> {
        let before = self.next_sequence;
        let result = self.try_apply(changes, now.as_millis());
        if result.is_err() {
            self.next_sequence = before;
            // The cache may contain ids of texts whose insertion was rolled back.
            self.text_ids = TextIds::default();
        }
        result.map_err(database("writing the index"))?;
        Ok(self.next_sequence - 1)
    }

    /// Removes some of the dead letters that [`Change::Trim`] has named. Returns whether there are more. A process that ends
    /// before all are removed starts again with the low watermarks of the next survey.
    ///
    /// # Errors
    /// If the database fails.
    pub fn remove_slice(&mut self) -> Result<bool, IndexError> {
        let result = self.try_remove_slice();
        result.map_err(database("removing dead letters from the index"))
    }

    /// Deletes the files of other versions and settings, because this one is complete.
    pub fn remove_outdated(&self) {
        for path in super::outdated(&self.path) {
            match std::fs::remove_file(&path) {
                Ok(()) => tracing::info!(path = %path.display(), "deleted a former index"),
                Err(error) => tracing::warn!(path = %path.display(), %error, "cannot delete a former index"),
            }
        }
    }

    /// Deletes the damaged file, so that the next start rebuilds the index. The writer must not be used afterwards.
    pub fn invalidate(&mut self) {
        if let Err(error) = super::remove(&self.path) {
            tracing::error!(path = %self.path.display(), %error, "cannot delete the damaged index; delete it manually");
        }
    }

    fn try_apply(&mut self, changes: &[Change], now: i64) -> rusqlite::Result<()> {
        let is_removal = |change: &Change| matches!(change, Change::Forget { .. } | Change::ForgetLedger);
        let mut rest = changes;
        while !rest.is_empty() {
            let end = rest.iter().position(is_removal).unwrap_or(rest.len());
            let (changes, others) = rest.split_at(end);
            if !changes.is_empty() {
                self.write(changes, now)?;
            }
            rest = match others {
                [Change::Forget { topic }, others @ ..] => {
                    self.trims.forget(topic);
                    self.remove_all(&Removal::topic(topic.clone()))?;
                    others
                }
                [_forget_ledger, others @ ..] => {
                    self.remove_all(&Removal::Ledger)?;
                    others
                }
                [] => others,
            };
        }
        Ok(())
    }

    /// Applies changes other than removals in one transaction.
    fn write(&mut self, changes: &[Change], now: i64) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        let mut batch = Batch {
            transaction: &transaction,
            text_ids: &mut self.text_ids,
            counters: counters::Changes::default(),
            documents: Vec::new(),
            now,
        };
        for change in changes {
            match change {
                Change::Letters(letters) => {
                    for letter in letters {
                        // A duplicate leaves a gap in the numbers, which only have to increase.
                        batch.insert_letter(letter, self.next_sequence)?;
                        self.next_sequence += 1;
                    }
                }
                Change::Ledger(updates) => updates
                    .iter()
                    .try_for_each(|update| batch.update_ledger(update))?,
                Change::Position {
                    topic,
                    partition,
                    next,
                } => batch.set_position(topic, *partition, *next)?,
                Change::Trim {
                    topic,
                    partition,
                    low,
                } => self.trims.trim(topic, *partition, *low),
                Change::Forget { .. } | Change::ForgetLedger => {}
            }
        }
        batch.finish()?;
        transaction
            .prepare_cached("UPDATE meta SET value = ? WHERE name = 'next_sequence'")?
            .execute([self.next_sequence])?;
        transaction.commit()
    }

    fn remove_all(&mut self, removal: &Removal) -> rusqlite::Result<()> {
        while !self.remove(removal)? {}
        self.remove_unused_texts()
    }

    fn try_remove_slice(&mut self) -> rusqlite::Result<bool> {
        let Some(removal) = self.trims.next() else {
            return Ok(false);
        };
        if self.remove(&removal)? {
            self.trims.done(&removal);
            self.remove_unused_texts()?;
        }
        Ok(!self.trims.is_empty())
    }

    /// Removes a slice in a transaction of its own. Returns whether it was the last one.
    fn remove(&mut self, removal: &Removal) -> rusqlite::Result<bool> {
        let transaction = self.connection.transaction()?;
        let slice = removal.slice(&transaction)?;
        transaction.commit()?;
        self.deleted_rows = self.deleted_rows.saturating_add(slice.deleted);
        Ok(slice.is_last)
    }

    fn remove_unused_texts(&mut self) -> rusqlite::Result<()> {
        // An upper bound of the number of dead letters, which needs no scan.
        let rows: i64 = self
            .connection
            .prepare_cached("SELECT coalesce(max(sequence) - min(sequence), 0) AS rows FROM letters")?
            .query_row((), |row| row.get("rows"))?;
        if self.deleted_rows >= DELETED_ROWS.max(rows / 10) {
            self.text_ids.remove_unused(&self.connection)?;
            self.deleted_rows = 0;
        }
        Ok(())
    }
}

struct Batch<'a> {
    transaction: &'a Transaction<'a>,
    text_ids: &'a mut TextIds,
    counters: counters::Changes,
    /// The documents of the full-text index, by row.
    documents: Vec<(i64, String)>,
    now: i64,
}

impl Batch<'_> {
    fn text_id(&mut self, text: &str) -> rusqlite::Result<i64> {
        self.text_ids.id(self.transaction, TextTable::Texts, text)
    }

    fn insert_letter(&mut self, letter: &Letter, sequence: i64) -> rusqlite::Result<()> {
        let facts = &letter.facts;
        let place = Place {
            topic_id: self.text_id(&letter.position.topic)?,
            partition: letter.position.partition,
            offset: letter.position.offset,
        };
        let origin = facts.origin.as_ref();
        let millis = |time: Option<Timestamp>| time.map(Timestamp::as_millis);
        let dead_at = letter.dead_at.as_millis();
        // The ledger entry may have been indexed before its dead letter.
        let entry = entries::find(self.transaction, place)?
            .filter(|entry| entries::applies(entry, &letter.content, dead_at));
        let (template, message_parts) = message::split(&facts.error_message);
        let mut row = LetterRow {
            row: 0,
            sequence,
            topic_id: place.topic_id,
            partition: place.partition,
            offset: place.offset,
            dead_at,
            indexed_at: self.now,
            state: entry.map_or(State::Open, |entry| entry.state) as i64,
            dialect: facts.dialect as i32,
            pipeline_id: self.text_id(&facts.pipeline)?,
            error_class_id: self.text_id(&facts.error_class)?,
            error_code_id: self.text_id(&facts.error_code)?,
            template_id: self
                .text_ids
                .id(self.transaction, TextTable::Templates, &template)?,
            message_parts,
            failed_at: millis(facts.failed_at),
            retry_count: facts.retry_count,
            origin_topic_id: self.text_id(origin.map_or("", |origin| &origin.topic))?,
            origin_partition: origin.and_then(|origin| origin.partition),
            origin_offset: origin.and_then(|origin| origin.offset),
            origin_timestamp: millis(facts.origin_timestamp),
            job_id: facts.job_id.clone(),
            trace_id: facts.trace_id.as_deref().and_then(trace_bytes),
            value_size: letter
                .value_size
                .map(|size| i64::try_from(size).unwrap_or(i64::MAX)),
            content: letter.content,
        };
        for attempt in 0.. {
            row.row = row_key::candidate(letter.dead_at, sequence, attempt);
            if row.insert(self.transaction)? {
                break;
            }
            // A record that is read twice is indexed once, under its first number.
            if self.is_indexed(place)? {
                return Ok(());
            }
        }
        let body = BodyRow {
            row: row.row,
            key: letter.key.as_deref().map(<[u8]>::to_vec),
            headers: letter.headers.clone(),
            json_fields: letter.json_fields.clone(),
        };
        body.insert(self.transaction)?;
        self.documents
            .push((row.row, terms::document(letter, row.template_id)));
        let counted = Counted {
            topic_id: row.topic_id,
            error_class_id: row.error_class_id,
            state: row.state,
        };
        self.counters.add(counted, dead_at, 1);
        Ok(())
    }

    fn is_indexed(&self, place: Place) -> rusqlite::Result<bool> {
        self.transaction
            .prepare_cached("SELECT 1 FROM letters WHERE topic_id = ? AND partition = ? AND offset = ?")?
            .exists((place.topic_id, place.partition, place.offset))
    }

    fn update_ledger(&mut self, update: &Update) -> rusqlite::Result<()> {
        let place = Place {
            topic_id: self.text_id(&update.id.topic)?,
            partition: update.id.partition,
            offset: update.id.offset,
        };
        entries::put(self.transaction, place, update.entry.as_ref())?;
        let row = self
            .transaction
            .prepare_cached("SELECT row FROM letters WHERE topic_id = ? AND partition = ? AND offset = ?")?
            .query_row((place.topic_id, place.partition, place.offset), |row| {
                row.get("row")
            })
            .optional()?;
        let Some(row) = row else {
            return Ok(());
        };
        let letter = LetterRow::load(self.transaction, row)?;
        // An entry replaces the previous one of its key, even if it applies to another record.
        let entry = update.entry.as_ref();
        let entry = entry.filter(|entry| entries::applies(entry, &letter.content, letter.dead_at));
        let state = entry.map_or(State::Open, |entry| entry.state) as i64;
        set_state(self.transaction, &mut self.counters, &letter, state)
    }

    fn set_position(&mut self, topic: &str, partition: i32, next: i64) -> rusqlite::Result<()> {
        let topic_id = self.text_id(topic)?;
        self.transaction
            .prepare_cached("INSERT OR REPLACE INTO positions (topic_id, partition, next) VALUES (?, ?, ?)")?
            .execute((topic_id, partition, next))?;
        Ok(())
    }

    fn finish(mut self) -> rusqlite::Result<()> {
        // The full-text index collects terms in memory as long as row numbers increase.
        self.documents.sort_unstable_by_key(|(row, _)| *row);
        let mut insert = self
            .transaction
            .prepare_cached("INSERT INTO terms (rowid, document) VALUES (?, ?)")?;
        for (row, document) in &self.documents {
            insert.execute((row, document))?;
        }
        self.counters.store(self.transaction)
    }
}

/// Sets the state of a dead letter.
pub(super) fn set_state(
    connection: &Connection,
    counters: &mut counters::Changes,
    letter: &LetterRow,
    state: i64,
) -> rusqlite::Result<()> {
    if letter.state == state {
        return Ok(());
    }
    connection
        .prepare_cached("UPDATE letters SET state = ? WHERE row = ?")?
        .execute((state, letter.row))?;
    let counted = counted(letter);
    counters.add(counted, letter.dead_at, -1);
    counters.add(Counted { state, ..counted }, letter.dead_at, 1);
    Ok(())
}

/// What a dead letter is counted as.
pub(super) fn counted(letter: &LetterRow) -> Counted {
    Counted {
        topic_id: letter.topic_id,
        error_class_id: letter.error_class_id,
        state: letter.state,
    }
}

/// The bytes of a trace id of 32 hexadecimal digits.
fn trace_bytes(text: &str) -> Option<[u8; 16]> {
    u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)
}

/// The text of a trace id.
pub(super) fn trace_text(bytes: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(bytes))
}
