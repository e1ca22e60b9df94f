//! The connection that writes.

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use redeliver_core::Timestamp;
use redeliver_kafka::TopicId;
use rusqlite::{Connection, OptionalExtension as _, Transaction, named_params, params};

use super::schema::entry_applies;
use super::{IndexError, Pool, database, schema};
use crate::ledger::{self, State, Update};
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
    /// Stores the id of a topic, by which another topic of the same name is recognised later.
    Identify {
        /// The topic.
        topic: Arc<str>,
        /// Its id.
        id: TopicId,
    },
    /// Removes the dead letters below an offset, which Kafka's retention has deleted.
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
    /// A cache of text ids.
    text_ids: HashMap<String, i64>,
    next_row: i64,
    /// Rows deleted since unused texts were last removed.
    deleted_rows: i64,
    _lock: File,
}

/// The cache of text ids is cleared when it exceeds this size.
const CACHED_TEXT_IDS: usize = 20_000;
/// Unused texts are removed after this many rows were deleted, or a tenth of all rows if that is more: finding them
/// reads every row.
const DELETED_ROWS: i64 = 1_000;

impl Writer {
    pub(super) fn new(connection: Connection, path: PathBuf, lock: File) -> Result<Self, IndexError> {
        connection.set_prepared_statement_cache_capacity(64);
        let next_row = schema::meta(&connection, "next_row").map_err(database("reading the index"))?;
        Ok(Self {
            connection,
            path,
            text_ids: HashMap::new(),
            next_row: next_row.unwrap_or(1),
            deleted_rows: 0,
            _lock: lock,
        })
    }

    /// Applies the changes in one transaction, and returns the number of the last row.
    ///
    /// # Errors
    /// If the database fails. Then the index is unchanged.
    pub fn apply(&mut self, changes: &[Change]) -> Result<i64, IndexError> {
        if self.text_ids.len() > CACHED_TEXT_IDS {
            self.text_ids.clear();
        }
        let before = self.next_row;
        let result = self.try_apply(changes);
        if result.is_err() {
            self.next_row = before;
            // The cache may contain ids of texts whose insertion was rolled back.
            self.text_ids.clear();
        }
        self.deleted_rows = result.map_err(database("writing the index"))?;
        Ok(self.next_row - 1)
    }

    /// Lets writes fail as on a full disk while the file has at least this many pages.
    #[cfg(test)]
    pub(super) fn limit_size_to_pages(&self, pages: u32) {
        self.connection
            .pragma_update(None, "max_page_count", pages)
            .unwrap();
    }

    /// Replaces the damaged files by an empty index.
    ///
    /// # Errors
    /// If the files cannot be deleted or created. Then only another call of this method is possible.
    pub fn rebuild(&mut self, pool: &Pool) -> Result<(), IndexError> {
        let closed = Connection::open_in_memory().map_err(database("closing the index"))?;
        drop(std::mem::replace(&mut self.connection, closed));
        self.text_ids.clear();
        self.deleted_rows = 0;
        pool.replace(|| {
            super::remove(&self.path).map_err(|source| IndexError::Directory {
                path: self.path.clone(),
                source,
            })?;
            let connection = schema::create(&self.path)?;
            connection.set_prepared_statement_cache_capacity(64);
            self.next_row = 1;
            let generation = schema::generation(&connection)?;
            self.connection = connection;
            Ok(generation)
        })
    }

    /// Returns the new value of `deleted_rows`, which must not change if the transaction fails.
    fn try_apply(&mut self, changes: &[Change]) -> rusqlite::Result<i64> {
        let transaction = self.connection.transaction()?;
        let mut batch = Batch {
            transaction: &transaction,
            text_ids: &mut self.text_ids,
            deleted_rows: self.deleted_rows,
        };
        for change in changes {
            match change {
                Change::Letters(letters) => {
                    for letter in letters {
                        // A duplicate leaves a gap in the row numbers, which only have to increase.
                        batch.insert_letter(letter, self.next_row)?;
                        self.next_row += 1;
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
                Change::Identify { topic, id } => batch.identify(topic, *id)?,
                Change::Trim {
                    topic,
                    partition,
                    low,
                } => batch.trim(topic, *partition, *low)?,
                Change::Forget { topic } => batch.forget(topic)?,
                Change::ForgetLedger => batch.forget_ledger()?,
            }
        }
        if batch.deleted_rows >= DELETED_ROWS.max(batch.estimate_rows()? / 10) {
            batch.remove_unused_texts()?;
        }
        let deleted_rows = batch.deleted_rows;
        transaction
            .prepare_cached("UPDATE meta SET value = ? WHERE name = 'next_row'")?
            .execute([self.next_row])?;
        transaction.commit()?;
        Ok(deleted_rows)
    }
}

struct Batch<'a> {
    transaction: &'a Transaction<'a>,
    text_ids: &'a mut HashMap<String, i64>,
    deleted_rows: i64,
}

impl Batch<'_> {
    fn execute(&self, sql: &str, params: impl rusqlite::Params) -> rusqlite::Result<usize> {
        self.transaction.prepare_cached(sql)?.execute(params)
    }

    /// The id of a text, which is inserted if it is new.
    fn text_id(&mut self, text: &str) -> rusqlite::Result<i64> {
        if let Some(id) = self.text_ids.get(text) {
            return Ok(*id);
        }
        let found = self
            .transaction
            .prepare_cached("SELECT id FROM texts WHERE text = ?")?
            .query_row([text], |row| row.get("id"))
            .optional()?;
        let id = match found {
            Some(id) => id,
            None => {
                self.execute("INSERT INTO texts (text) VALUES (?)", [text])?;
                self.transaction.last_insert_rowid()
            }
        };
        self.text_ids.insert(text.to_owned(), id);
        Ok(id)
    }

    fn insert_letter(&mut self, letter: &Letter, row: i64) -> rusqlite::Result<()> {
        let facts = &letter.facts;
        let topic = self.text_id(&letter.position.topic)?;
        let (partition, offset) = (letter.position.partition, letter.position.offset);
        let origin = facts.origin.as_ref();
        let millis = |time: Option<Timestamp>| time.map(Timestamp::as_millis);
        let params = named_params! {
            ":row": row,
            ":topic": topic,
            ":partition": partition,
            ":offset": offset,
            ":dead_at": letter.dead_at.as_millis(),
            ":state": self.ledger_state(topic, letter)? as i64,
            ":dialect": facts.dialect as i64,
            ":pipeline": self.text_id(&facts.pipeline)?,
            ":error_class": self.text_id(&facts.error_class)?,
            ":error_code": self.text_id(&facts.error_code)?,
            ":error_message": facts.error_message,
            ":failed_at": millis(facts.failed_at),
            ":retry_count": facts.retry_count,
            ":origin_topic": self.text_id(origin.map_or("", |origin| &origin.topic))?,
            ":origin_partition": origin.and_then(|origin| origin.partition),
            ":origin_offset": origin.and_then(|origin| origin.offset),
            ":origin_timestamp": millis(facts.origin_timestamp),
            ":job_id": facts.job_id.as_deref().unwrap_or_default(),
            ":trace_id": facts.trace_id.as_deref().unwrap_or_default(),
            ":value_size": letter.value_size.map(|size| i64::try_from(size).unwrap_or(i64::MAX)),
            ":content": letter.content,
        };
        let inserted = self.execute(
            "INSERT INTO letters (row, topic, partition, offset, dead_at, state, dialect, pipeline, error_class, \
             error_code, error_message, failed_at, retry_count, origin_topic, origin_partition, origin_offset, \
             origin_timestamp, job_id, trace_id, value_size, content) \
             VALUES (:row, :topic, :partition, :offset, :dead_at, :state, :dialect, :pipeline, :error_class, \
             :error_code, :error_message, :failed_at, :retry_count, :origin_topic, :origin_partition, :origin_offset, \
             :origin_timestamp, :job_id, :trace_id, :value_size, :content) \
             ON CONFLICT (topic, partition, offset) DO NOTHING",
            params,
        )?;
        // A record that is read twice is indexed once, under its first row number.
        if inserted > 0 {
            self.execute(
                "INSERT INTO bodies (row, key, headers) VALUES (?, ?, ?)",
                params![row, letter.key.as_deref(), letter.headers],
            )?;
        }
        Ok(())
    }

    /// The state of a new dead letter: its ledger entry may have been indexed before it.
    fn ledger_state(&self, topic: i64, letter: &Letter) -> rusqlite::Result<State> {
        let position = &letter.position;
        let number: Option<i64> = self
            .transaction
            .prepare_cached(concat!(
                "SELECT state FROM ledger WHERE topic = ?1 AND partition = ?2 AND offset = ?3 AND ",
                entry_applies!(entry: "content", "time", letter: "?4", "?5")
            ))?
            .query_row(
                params![
                    topic,
                    position.partition,
                    position.offset,
                    letter.content,
                    letter.dead_at.as_millis()
                ],
                |row| row.get("state"),
            )
            .optional()?;
        Ok(number.and_then(State::from_number).unwrap_or_default())
    }

    fn update_ledger(&mut self, update: &Update) -> rusqlite::Result<()> {
        let topic = self.text_id(&update.id.topic)?;
        let (partition, offset) = (update.id.partition, update.id.offset);
        // An update replaces the previous entry of its key, even if it applies to another record.
        self.execute(
            "UPDATE letters SET state = ? WHERE topic = ? AND partition = ? AND offset = ?",
            params![State::Open as i64, topic, partition, offset],
        )?;
        let Some(entry) = &update.entry else {
            self.execute(
                "DELETE FROM ledger WHERE topic = ? AND partition = ? AND offset = ?",
                params![topic, partition, offset],
            )?;
            return Ok(());
        };
        let time = entry.time.map(Timestamp::as_millis);
        self.execute(
            "INSERT OR REPLACE INTO ledger (topic, partition, offset, state, time, who, note, content) \
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                topic,
                partition,
                offset,
                entry.state as i64,
                time,
                entry.by,
                entry.note,
                entry.content
            ],
        )?;
        self.execute(
            concat!(
                "UPDATE letters SET state = ?4 WHERE topic = ?1 AND partition = ?2 AND offset = ?3 AND ",
                entry_applies!(entry: "?5", "?6", letter: "content", "dead_at")
            ),
            params![topic, partition, offset, entry.state as i64, entry.content, time],
        )?;
        Ok(())
    }

    fn set_position(&mut self, topic: &str, partition: i32, next: i64) -> rusqlite::Result<()> {
        let topic = self.text_id(topic)?;
        self.execute(
            "INSERT OR REPLACE INTO positions (topic, partition, next) VALUES (?, ?, ?)",
            params![topic, partition, next],
        )?;
        Ok(())
    }

    fn identify(&mut self, topic: &str, id: TopicId) -> rusqlite::Result<()> {
        let topic = self.text_id(topic)?;
        self.execute(
            "INSERT OR REPLACE INTO topic_ids (topic, id) VALUES (?, ?)",
            params![topic, id.bits().to_be_bytes()],
        )?;
        Ok(())
    }

    fn trim(&mut self, topic: &str, partition: i32, low: i64) -> rusqlite::Result<()> {
        let topic = self.text_id(topic)?;
        let below_low = params![topic, partition, low];
        self.execute(
            "DELETE FROM bodies WHERE row IN \
             (SELECT row FROM letters WHERE topic = ? AND partition = ? AND offset < ?)",
            below_low,
        )?;
        let deleted = self.execute(
            "DELETE FROM letters WHERE topic = ? AND partition = ? AND offset < ?",
            below_low,
        )?;
        self.count_deleted(deleted);
        self.execute(
            "DELETE FROM ledger WHERE topic = ? AND partition = ? AND offset < ?",
            below_low,
        )?;
        Ok(())
    }

    fn forget(&mut self, topic: &str) -> rusqlite::Result<()> {
        let topic = self.text_id(topic)?;
        self.execute(
            "DELETE FROM bodies WHERE row IN (SELECT row FROM letters WHERE topic = ?)",
            [topic],
        )?;
        let deleted = self.execute("DELETE FROM letters WHERE topic = ?", [topic])?;
        self.count_deleted(deleted);
        // Ledger entries stay: they follow the ledger topic, and `entry_applies` ignores those of the old topic.
        self.forget_reading(topic)
    }

    fn count_deleted(&mut self, rows: usize) {
        self.deleted_rows = self
            .deleted_rows
            .saturating_add(i64::try_from(rows).unwrap_or(i64::MAX));
    }

    /// An upper bound of the number of dead letters, which needs no scan.
    fn estimate_rows(&self) -> rusqlite::Result<i64> {
        self.transaction
            .prepare_cached("SELECT coalesce(max(row) - min(row), 0) AS estimate FROM letters")?
            .query_row((), |row| row.get("estimate"))
    }

    /// Removes texts that only deleted rows referred to. Without this, error codes that contain a number or an id would
    /// accumulate forever.
    fn remove_unused_texts(&mut self) -> rusqlite::Result<()> {
        self.execute(
            "DELETE FROM texts WHERE text != '' AND id NOT IN (\
             SELECT topic FROM letters UNION SELECT pipeline FROM letters UNION SELECT error_class FROM letters \
             UNION SELECT error_code FROM letters UNION SELECT origin_topic FROM letters \
             UNION SELECT topic FROM positions UNION SELECT topic FROM topic_ids UNION SELECT topic FROM ledger)",
            (),
        )?;
        self.text_ids.clear();
        self.deleted_rows = 0;
        Ok(())
    }

    fn forget_ledger(&mut self) -> rusqlite::Result<()> {
        let open = State::Open as i64;
        self.execute("UPDATE letters SET state = ?1 WHERE state != ?1", [open])?;
        self.execute("DELETE FROM ledger", ())?;
        // The position would be beyond the end of the new ledger, which would look created again each time.
        let topic = self.text_id(ledger::TOPIC)?;
        self.forget_reading(topic)
    }

    fn forget_reading(&self, topic: i64) -> rusqlite::Result<()> {
        self.execute("DELETE FROM positions WHERE topic = ?", [topic])?;
        self.execute("DELETE FROM topic_ids WHERE topic = ?", [topic])?;
        Ok(())
    }
}
