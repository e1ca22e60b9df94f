//! The one connection that writes.

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use redeliver_core::Timestamp;
use rusqlite::{Connection, OptionalExtension as _, Transaction, params};

use super::schema::means;
use super::{IndexError, database, schema};
use crate::ledger::{State, Update};
use crate::letter::Letter;

/// One step of keeping the index as the topics are.
#[derive(Clone, Debug)]
pub enum Change {
    /// Dead letters that were read. One that is there already is left as it is.
    Letters(Vec<Letter>),
    /// What the ledger says, in its order.
    Ledger(Vec<Update>),
    /// How far a partition was read.
    Position {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// The next offset to read.
        next: i64,
    },
    /// Retention has removed what stands before an offset.
    Trim {
        /// The topic.
        topic: Arc<str>,
        /// The partition.
        partition: i32,
        /// The first offset that is still there.
        low: i64,
    },
    /// A topic was deleted, or deleted and made again: nothing of it is known any more.
    Forget {
        /// The topic.
        topic: Arc<str>,
    },
    /// The ledger was deleted: no dead letter has a state any more.
    ForgetLedger,
}

/// The one that writes.
pub struct Writer {
    connection: Connection,
    path: PathBuf,
    /// Numbers of texts that were used lately.
    texts: HashMap<String, i64>,
    next_row: i64,
    /// Rows that went since unused texts were removed.
    removed: i64,
    _lock: File,
}

/// How many numbers of texts are remembered. More are looked up.
const REMEMBERED_TEXTS: usize = 20_000;
/// Unused texts are looked for when so many rows have gone, or a tenth of those that are there: it takes a look at
/// each row.
const REMOVED_ROWS: i64 = 1_000;

impl Writer {
    pub(super) fn new(connection: Connection, path: PathBuf, lock: File) -> Result<Self, IndexError> {
        connection.set_prepared_statement_cache_capacity(64);
        let next_row = schema::meta(&connection, "next_row").map_err(database("reading the index"))?;
        Ok(Self {
            connection,
            path,
            texts: HashMap::new(),
            next_row: next_row.unwrap_or(1),
            removed: 0,
            _lock: lock,
        })
    }

    /// Makes these changes, all or none of them. Gives the number of the last row.
    ///
    /// # Errors
    /// When the database refuses; then nothing has changed.
    pub fn apply(&mut self, changes: &[Change]) -> Result<i64, IndexError> {
        if self.texts.len() > REMEMBERED_TEXTS {
            self.texts.clear();
        }
        let before = self.next_row;
        let result = self.try_apply(changes);
        if result.is_err() {
            self.next_row = before;
            // They may name rows that were taken back.
            self.texts.clear();
        }
        self.removed = result.map_err(database("writing the index"))?;
        Ok(self.next_row - 1)
    }

    /// Throws the file away, so that the next start makes a new one. Nothing can be written any more.
    pub fn invalidate(&mut self) {
        if let Err(error) = super::remove(&self.path) {
            tracing::error!(path = %self.path.display(), %error, "the damaged index cannot be removed; remove it by hand");
        }
    }

    /// Gives how many rows have gone since unused texts were removed.
    fn try_apply(&mut self, changes: &[Change]) -> rusqlite::Result<i64> {
        let transaction = self.connection.transaction()?;
        let mut write = Write {
            transaction: &transaction,
            texts: &mut self.texts,
            removed: self.removed,
        };
        for change in changes {
            match change {
                Change::Letters(letters) => {
                    for letter in letters {
                        write.letter(letter, self.next_row)?;
                        self.next_row += 1;
                    }
                }
                Change::Ledger(updates) => updates.iter().try_for_each(|update| write.ledger(update))?,
                Change::Position {
                    topic,
                    partition,
                    next,
                } => write.position(topic, *partition, *next)?,
                Change::Trim {
                    topic,
                    partition,
                    low,
                } => write.trim(topic, *partition, *low)?,
                Change::Forget { topic } => write.forget(topic)?,
                Change::ForgetLedger => write.forget_ledger()?,
            }
        }
        if write.removed >= REMOVED_ROWS.max(write.rows()? / 10) {
            write.remove_unused_texts()?;
        }
        let removed = write.removed;
        transaction
            .prepare_cached("UPDATE meta SET value = ? WHERE name = 'next_row'")?
            .execute([self.next_row])?;
        transaction.commit()?;
        Ok(removed)
    }
}

struct Write<'a> {
    transaction: &'a Transaction<'a>,
    texts: &'a mut HashMap<String, i64>,
    removed: i64,
}

impl Write<'_> {
    fn run(&self, sql: &str, params: impl rusqlite::Params) -> rusqlite::Result<usize> {
        self.transaction.prepare_cached(sql)?.execute(params)
    }

    fn text(&mut self, text: &str) -> rusqlite::Result<i64> {
        if let Some(id) = self.texts.get(text) {
            return Ok(*id);
        }
        let found = self
            .transaction
            .prepare_cached("SELECT id FROM texts WHERE text = ?")?
            .query_row([text], |row| row.get(0))
            .optional()?;
        let id = match found {
            Some(id) => id,
            None => {
                self.run("INSERT INTO texts (text) VALUES (?)", [text])?;
                self.transaction.last_insert_rowid()
            }
        };
        self.texts.insert(text.to_owned(), id);
        Ok(id)
    }

    fn letter(&mut self, letter: &Letter, row: i64) -> rusqlite::Result<()> {
        let facts = &letter.facts;
        let topic = self.text(&letter.position.topic)?;
        let (partition, offset) = (letter.position.partition, letter.position.offset);
        let origin = facts.origin.as_ref();
        let millis = |time: Option<Timestamp>| time.map(Timestamp::as_millis);
        let params = params![
            row,
            topic,
            partition,
            offset,
            letter.dead_at.as_millis(),
            self.state_of(topic, letter)? as i64,
            facts.dialect as i64,
            self.text(&facts.pipeline)?,
            self.text(&facts.error_class)?,
            self.text(&facts.error_code)?,
            facts.error_message,
            millis(facts.failed_at),
            facts.retry_count,
            self.text(origin.map_or("", |origin| &origin.topic))?,
            origin.and_then(|origin| origin.partition),
            origin.and_then(|origin| origin.offset),
            millis(facts.origin_timestamp),
            facts.job_id.as_deref().unwrap_or_default(),
            facts.trace_id.as_deref().unwrap_or_default(),
            letter
                .value_size
                .map(|size| i64::try_from(size).unwrap_or(i64::MAX)),
            letter.content,
        ];
        let inserted = self.run(
            "INSERT INTO letters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) \
             ON CONFLICT (topic, partition, offset) DO NOTHING",
            params,
        )?;
        if inserted > 0 {
            self.run(
                "INSERT INTO bodies (row, key, headers) VALUES (?, ?, ?)",
                params![row, letter.key.as_deref(), letter.headers],
            )?;
        }
        Ok(())
    }

    /// What the ledger says of a dead letter that has just come.
    fn state_of(&self, topic: i64, letter: &Letter) -> rusqlite::Result<State> {
        let position = &letter.position;
        let number: Option<i64> = self
            .transaction
            .prepare_cached(concat!(
                "SELECT state FROM ledger WHERE topic = ?1 AND partition = ?2 AND offset = ?3 AND ",
                means!(entry: "content", "time", letter: "?4", "?5")
            ))?
            .query_row(
                params![
                    topic,
                    position.partition,
                    position.offset,
                    letter.content,
                    letter.dead_at.as_millis()
                ],
                |row| row.get(0),
            )
            .optional()?;
        Ok(number.and_then(State::from_number).unwrap_or_default())
    }

    fn ledger(&mut self, update: &Update) -> rusqlite::Result<()> {
        let topic = self.text(&update.id.topic)?;
        let (partition, offset) = (update.id.partition, update.id.offset);
        // What an earlier entry said is over, also when the new one means another record.
        self.run(
            "UPDATE letters SET state = ? WHERE topic = ? AND partition = ? AND offset = ?",
            params![State::Open as i64, topic, partition, offset],
        )?;
        let Some(entry) = &update.entry else {
            self.run(
                "DELETE FROM ledger WHERE topic = ? AND partition = ? AND offset = ?",
                params![topic, partition, offset],
            )?;
            return Ok(());
        };
        let time = entry.time.map(Timestamp::as_millis);
        self.run(
            "INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
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
        self.run(
            concat!(
                "UPDATE letters SET state = ?4 WHERE topic = ?1 AND partition = ?2 AND offset = ?3 AND ",
                means!(entry: "?5", "?6", letter: "content", "dead_at")
            ),
            params![topic, partition, offset, entry.state as i64, entry.content, time],
        )?;
        Ok(())
    }

    fn position(&mut self, topic: &str, partition: i32, next: i64) -> rusqlite::Result<()> {
        let topic = self.text(topic)?;
        self.run(
            "INSERT OR REPLACE INTO positions VALUES (?, ?, ?)",
            params![topic, partition, next],
        )?;
        Ok(())
    }

    fn trim(&mut self, topic: &str, partition: i32, low: i64) -> rusqlite::Result<()> {
        let topic = self.text(topic)?;
        let before = params![topic, partition, low];
        self.run(
            "DELETE FROM bodies WHERE row IN \
             (SELECT row FROM letters WHERE topic = ? AND partition = ? AND offset < ?)",
            before,
        )?;
        let letters = self.run(
            "DELETE FROM letters WHERE topic = ? AND partition = ? AND offset < ?",
            before,
        )?;
        self.went(letters);
        self.run(
            "DELETE FROM ledger WHERE topic = ? AND partition = ? AND offset < ?",
            before,
        )?;
        Ok(())
    }

    fn forget(&mut self, topic: &str) -> rusqlite::Result<()> {
        let topic = self.text(topic)?;
        self.run(
            "DELETE FROM bodies WHERE row IN (SELECT row FROM letters WHERE topic = ?)",
            [topic],
        )?;
        let letters = self.run("DELETE FROM letters WHERE topic = ?", [topic])?;
        self.went(letters);
        self.run("DELETE FROM positions WHERE topic = ?", [topic])?;
        Ok(())
    }

    fn went(&mut self, letters: usize) {
        self.removed = self
            .removed
            .saturating_add(i64::try_from(letters).unwrap_or(i64::MAX));
    }

    /// About how many dead letters there are, at most.
    fn rows(&self) -> rusqlite::Result<i64> {
        self.transaction
            .prepare_cached("SELECT coalesce(max(row) - min(row), 0) FROM letters")?
            .query_row((), |row| row.get(0))
    }

    /// Dead letters that went leave their error codes and origins behind, which differ from record to record where
    /// somebody puts a number into them.
    fn remove_unused_texts(&mut self) -> rusqlite::Result<()> {
        self.run(
            "DELETE FROM texts WHERE text != '' AND id NOT IN (\
             SELECT topic FROM letters UNION SELECT pipeline FROM letters UNION SELECT error_class FROM letters \
             UNION SELECT error_code FROM letters UNION SELECT origin_topic FROM letters \
             UNION SELECT topic FROM positions UNION SELECT topic FROM ledger)",
            (),
        )?;
        self.texts.clear();
        self.removed = 0;
        Ok(())
    }

    fn forget_ledger(&mut self) -> rusqlite::Result<()> {
        let open = State::Open as i64;
        self.run("UPDATE letters SET state = ?1 WHERE state != ?1", [open])?;
        self.run("DELETE FROM ledger", ())?;
        Ok(())
    }
}
