//! The connection that writes.

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redeliver_core::Timestamp;
use redeliver_kafka::TopicId;
use rusqlite::{CachedStatement, Connection, OptionalExtension as _, Transaction};

use super::change::Change;
use super::counters::{self, Counted};
use super::entries::{Entries, Place};
use super::positions::{ReadPosition, read_positions, read_topic_ids};
use super::removal::Removals;
use super::sql::SLICE_ROWS;
use super::states::States;
use super::sweep::Sweep;
use super::tables::{BodyRow, LetterRow};
use super::texts::{TextIds, TextTable};
use super::{IndexError, Pool, database, group_counts, message, row_key, schema, sources, terms};
use crate::fingerprint::{self, GroupId};
use crate::ledger::{State, Update};
use crate::letter::Letter;

/// Positions and metadata of the topics.
pub(crate) struct ReadProgress {
    pub(crate) positions: Vec<ReadPosition>,
    pub(crate) topic_ids: Vec<(Arc<str>, TopicId)>,
}

/// The connection that writes.
pub struct Writer {
    connection: Connection,
    path: PathBuf,
    text_ids: TextIds,
    /// Counted up for each dead letter, see [`row_key`]. It begins anywhere, so that it seldom meets rows of an earlier process.
    next_number: i64,
    /// Groups that were added since [`Writer::take_new_groups`].
    new_groups: Vec<GroupId>,
    /// The hour for which all hours that are in no trend any more are forgotten. A clock can go back.
    trend_hour: i64,
    removals: Removals,
    /// Rows deleted since unused texts were last searched.
    deleted_rows: i64,
    /// The search for unused texts, if there is one.
    sweep: Option<Sweep>,
    _lock: File,
}

/// Unused texts are searched after this many rows were deleted, or a tenth of all rows if that is more: finding them
/// reads every row.
const DELETED_ROWS: i64 = 1_000;
/// Number of prepared statements that are kept.
const STATEMENTS: usize = 64;

impl Writer {
    /// Opens the index of a pool, which is in this directory, or creates it. A damaged or unfinished file is replaced by an empty
    /// index. Files of other versions and fields stay until [`Writer::remove_outdated`], unless the disk is full. Returns whether
    /// the index is new.
    ///
    /// # Errors
    /// If the directory or the file cannot be used for now, or another process uses the index. Then the file is kept.
    pub fn open(pool: &Pool, directory: &Path) -> Result<(Self, bool), IndexError> {
        std::fs::create_dir_all(directory).map_err(|source| IndexError::Directory {
            path: directory.to_owned(),
            source,
        })?;
        let lock = super::lock(directory)?;
        let path = pool.path();
        let opened = match super::open_or_create(path) {
            Err(error) if error.is_disk_full() => {
                super::remove_outdated(path);
                super::open_or_create(path)
            }
            opened => opened,
        };
        let (connection, is_new) = opened?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS);
        let writer = Self {
            connection,
            path: path.to_owned(),
            text_ids: TextIds::default(),
            next_number: fastrand::i64(0..i64::from(u32::MAX)),
            new_groups: Vec::new(),
            trend_hour: i64::MIN,
            removals: Removals::default(),
            deleted_rows: 0,
            sweep: None,
            _lock: lock,
        };
        pool.set_open();
        Ok((writer, is_new))
    }

    /// The progress so far.
    pub(crate) fn read_progress(&self) -> Result<ReadProgress, IndexError> {
        let read = || {
            let positions = read_positions(&self.connection)?;
            let topic_ids = read_topic_ids(&self.connection)?;
            Ok(ReadProgress { positions, topic_ids })
        };
        read().map_err(database("reading the index"))
    }

    /// Applies changes from the first one, in one transaction, and returns their number. It ends before the first change that
    /// must wait for a removal: then [`Writer::remove_slice`] is to be called before the rest is written. `now` is when the dead
    /// letters count as indexed.
    ///
    /// # Errors
    /// If the database fails. Then nothing has changed.
    pub fn write(&mut self, changes: &[Change], now: Timestamp) -> Result<usize, IndexError> {
        let mut removals = self.removals.clone();
        let is_waiting = |change: &Change| {
            let is_waiting = removals.block(change);
            if !is_waiting {
                removals.add(change);
            }
            is_waiting
        };
        let count = changes.iter().position(is_waiting).unwrap_or(changes.len());
        if count == 0 {
            return Ok(0);
        }
        let result = self.try_write(&changes[..count], now.as_millis());
        if result.is_err() {
            // The cache may contain ids of texts whose insertion was rolled back.
            self.text_ids.clear_cache();
        }
        result.map_err(database("writing the index"))?;
        self.removals = removals;
        Ok(count)
    }

    /// Whether the index has contained everything once, also in an earlier process.
    ///
    /// # Errors
    /// If the database fails.
    pub fn has_caught_up(&self) -> Result<bool, IndexError> {
        schema::has_caught_up(&self.connection).map_err(database("reading the index"))
    }

    /// Remembers that the index contains everything.
    ///
    /// # Errors
    /// If the database fails. Then nothing has changed.
    pub fn set_caught_up(&mut self) -> Result<(), IndexError> {
        schema::set_caught_up(&self.connection).map_err(database("writing the index"))
    }

    /// The groups that were added since the last call. A group that had no dead letters any more is new again.
    pub fn take_new_groups(&mut self) -> Vec<GroupId> {
        std::mem::take(&mut self.new_groups)
    }

    /// Removes some of what [`Change::Trim`], [`Change::Forget`] and [`Change::ForgetLedger`] have named, or of the texts that only
    /// removed dead letters referred to. Returns whether there is more. A process that ends before everything is removed begins
    /// again with what its first surveys find.
    ///
    /// # Errors
    /// If the database fails. Then nothing has changed.
    pub fn remove_slice(&mut self) -> Result<bool, IndexError> {
        let result = if self.removals.is_empty() {
            self.sweep_step()
        } else {
            self.try_remove_slice()
        };
        result.map_err(database("removing dead letters from the index"))?;
        Ok(!self.removals.is_empty() || self.sweep.is_some())
    }

    /// The topics and partitions of which the index still contains something that is to be removed; without a partition, all of
    /// the topic.
    pub fn removing(&self) -> impl Iterator<Item = (Arc<str>, Option<i32>)> {
        self.removals.places()
    }

    /// Whether changes can wait for a removal: a topic or the ledger is not removed yet.
    #[must_use]
    pub fn is_forgetting(&self) -> bool {
        self.removals.is_forgetting()
    }

    /// Deletes the files of other versions and settings.
    pub fn remove_outdated(&self) {
        super::remove_outdated(&self.path);
    }

    /// Lets writes fail as on a full disk while the file has at least this many pages.
    #[cfg(test)]
    pub(crate) fn limit_size_to_pages(&self, pages: u32) {
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
        self.text_ids = TextIds::default();
        self.removals = Removals::default();
        self.deleted_rows = 0;
        self.sweep = None;
        pool.replace(|| {
            super::remove(&self.path).map_err(|source| IndexError::Directory {
                path: self.path.clone(),
                source,
            })?;
            let connection = schema::create(&self.path)?;
            connection.set_prepared_statement_cache_capacity(STATEMENTS);
            self.connection = connection;
            Ok(())
        })
    }

    fn try_write(&mut self, changes: &[Change], now: i64) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        let mut batch = Batch {
            transaction: &transaction,
            insert_letter: LetterRow::inserter(&transaction)?,
            insert_body: BodyRow::inserter(&transaction)?,
            entries: Entries::new(&transaction)?,
            states: States::new(&transaction)?,
            text_ids: &mut self.text_ids,
            counters: counters::Changes::default(),
            documents: Vec::new(),
            groups: HashSet::new(),
            new_groups: Vec::new(),
            now,
        };
        for change in changes {
            match change {
                Change::Letters(letters) => {
                    for letter in letters {
                        batch.insert_letter(letter, self.next_number)?;
                        self.next_number += 1;
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
                Change::Source { topic, id } => sources::set(&transaction, topic, *id)?,
                // These are removed in slices. Meanwhile, a watch must not take what is missing of the topic for passed.
                Change::Forget { topic } => batch.identify(topic, REMOVED)?,
                Change::Trim { .. } | Change::ForgetLedger => {}
            }
        }
        let new_groups = batch.finish()?;
        let hour = group_counts::hour(now);
        let has_more_hours = hour != self.trend_hour && group_counts::forget_hours(&transaction, hour)?;
        transaction.commit()?;
        if !has_more_hours {
            self.trend_hour = hour;
        }
        self.new_groups.extend(new_groups);
        Ok(())
    }

    fn try_remove_slice(&mut self) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        let (mut rows_left, mut deleted, mut done) = (SLICE_ROWS, 0, Vec::new());
        for removal in self.removals.iter() {
            let slice = removal.slice(&transaction, rows_left)?;
            deleted += slice.deleted;
            if !slice.is_last {
                break;
            }
            done.push(removal);
            // A removal of nothing takes time, too.
            rows_left = rows_left.saturating_sub(slice.changed.max(1));
            if rows_left == 0 {
                break;
            }
        }
        transaction.commit()?;
        self.deleted_rows = self.deleted_rows.saturating_add(deleted);
        for removal in &done {
            self.removals.done(removal);
        }
        self.begin_sweep()
    }

    /// Begins to search unused texts if many rows were deleted.
    fn begin_sweep(&mut self) -> rusqlite::Result<()> {
        if self.sweep.is_some() || !self.removals.is_empty() {
            return Ok(());
        }
        // The counters know the number of dead letters without a scan.
        let rows: i64 = self
            .connection
            .prepare_cached("SELECT coalesce(sum(count), 0) AS rows FROM counters WHERE width = 0")?
            .query_row((), |row| row.get("rows"))?;
        if self.deleted_rows >= DELETED_ROWS.max(rows / 10) {
            self.sweep = Some(Sweep::BEGIN);
            self.deleted_rows = 0;
        }
        Ok(())
    }

    fn sweep_step(&mut self) -> rusqlite::Result<()> {
        let Some(sweep) = self.sweep else {
            return Ok(());
        };
        let transaction = self.connection.transaction()?;
        let next = sweep.step(&transaction, &mut self.text_ids)?;
        transaction.commit()?;
        self.sweep = next;
        if next.is_none() {
            self.text_ids.clear_marks();
        }
        Ok(())
    }
}

/// The id of a topic that is being removed. After a crash, the first survey finds another one, so that the removal begins again.
const REMOVED: TopicId = TopicId::from_bits(u128::MAX);

struct Batch<'a> {
    transaction: &'a Transaction<'a>,
    insert_letter: CachedStatement<'a>,
    insert_body: CachedStatement<'a>,
    entries: Entries<'a>,
    states: States<'a>,
    text_ids: &'a mut TextIds,
    counters: counters::Changes,
    /// The documents of the full-text index, by row.
    documents: Vec<(i64, String)>,
    /// The groups that are known to be stored.
    groups: HashSet<i64>,
    new_groups: Vec<GroupId>,
    now: i64,
}

impl Batch<'_> {
    fn text_id(&mut self, text: &str) -> rusqlite::Result<i64> {
        self.text_ids.id(self.transaction, TextTable::Texts, text)
    }

    fn insert_letter(&mut self, letter: &Letter, number: i64) -> rusqlite::Result<()> {
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
        let entry = self.entries.find(place, &letter.content, dead_at)?;
        let (template, message_parts) = message::split(&facts.error_message);
        let mut row = LetterRow {
            row: 0,
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
            group_id: letter.group.number(),
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
        let mut attempt = 0;
        loop {
            row.row = row_key::candidate(letter.dead_at, number, attempt);
            row.dead_at = row_key::time(row.row, letter.dead_at);
            if row.insert(&mut self.insert_letter)? {
                break;
            }
            // A record that is read twice is indexed once.
            if self.find(place)?.is_some() {
                return Ok(());
            }
            attempt += 1;
            if attempt == row_key::MAX_ATTEMPTS {
                return Err(no_free_row());
            }
        }
        let body = BodyRow {
            row: row.row,
            key: letter.key.as_deref().map(<[u8]>::to_vec),
            record_size: i64::try_from(letter.record_size).unwrap_or(i64::MAX),
            headers: letter.headers.clone(),
            json_fields: letter.json_fields.clone(),
        };
        body.insert(&mut self.insert_body)?;
        self.documents
            .push((row.row, terms::document(letter, row.template_id)));
        let counted = Counted {
            topic_id: row.topic_id,
            error_class_id: row.error_class_id,
            state: row.state,
        };
        self.counters.add(counted, row.group_id, row.dead_at, 1);
        self.insert_group(letter)
    }

    /// Stores the group of a dead letter, unless it is known.
    fn insert_group(&mut self, letter: &Letter) -> rusqlite::Result<()> {
        let id = letter.group.number();
        if !self.groups.insert(id) {
            return Ok(());
        }
        let facts = letter.masked_facts.as_ref().unwrap_or(&letter.facts);
        let definition = group_counts::Definition {
            id,
            pipeline_id: self.text_id(&facts.pipeline)?,
            error_class_id: self.text_id(&facts.error_class)?,
            error_code_id: self.text_id(&facts.error_code)?,
            template: &fingerprint::template_of(facts),
        };
        if definition.insert(self.transaction)? {
            self.new_groups.push(letter.group);
        }
        Ok(())
    }

    /// The row of the dead letter at a position.
    fn find(&self, place: Place) -> rusqlite::Result<Option<i64>> {
        self.transaction
            .prepare_cached("SELECT row FROM letters WHERE topic_id = ? AND partition = ? AND offset = ?")?
            .query_row((place.topic_id, place.partition, place.offset), |row| {
                row.get("row")
            })
            .optional()
    }

    fn update_ledger(&mut self, update: &Update) -> rusqlite::Result<()> {
        let place = Place {
            topic_id: self.text_id(&update.id.topic)?,
            partition: update.id.partition,
            offset: update.id.offset,
        };
        let entry = update.entry.as_ref();
        if !self.entries.put(place, entry, update.version)? {
            return Ok(());
        }
        let Some(letter) = self.states.at(place)? else {
            return Ok(());
        };
        // An entry replaces the previous one of its key, even if it applies to another record.
        let entry = self.entries.find(place, &letter.content, letter.dead_at)?;
        let state = entry.map_or(State::Open, |entry| entry.state) as i64;
        self.states.set(&letter, state, &mut self.counters)
    }

    fn set_position(&mut self, topic: &str, partition: i32, next: i64) -> rusqlite::Result<()> {
        let topic_id = self.text_id(topic)?;
        self.transaction
            .prepare_cached("INSERT OR REPLACE INTO positions (topic_id, partition, next) VALUES (?, ?, ?)")?
            .execute((topic_id, partition, next))?;
        Ok(())
    }

    fn identify(&mut self, topic: &str, id: TopicId) -> rusqlite::Result<()> {
        let topic_id = self.text_id(topic)?;
        self.transaction
            .prepare_cached("INSERT OR REPLACE INTO topic_ids (topic_id, id) VALUES (?, ?)")?
            .execute((topic_id, id.bits().to_be_bytes()))?;
        Ok(())
    }

    /// Returns the new groups.
    fn finish(mut self) -> rusqlite::Result<Vec<GroupId>> {
        // The full-text index collects terms in memory as long as row numbers increase.
        self.documents.sort_unstable_by_key(|(row, _)| *row);
        let mut insert = self
            .transaction
            .prepare_cached("INSERT INTO terms (rowid, document) VALUES (?, ?)")?;
        for (row, document) in &self.documents {
            insert.execute((row, document))?;
        }
        self.counters.store(self.transaction)?;
        Ok(self.new_groups)
    }
}

/// The error of an index in which no row is free, which only damage can cause. The index is rebuilt.
fn no_free_row() -> rusqlite::Error {
    let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
    let text = "no free row for a dead letter".to_owned();
    rusqlite::Error::SqliteFailure(code, Some(text))
}

/// The bytes of a trace id of 32 hexadecimal digits.
fn trace_bytes(text: &str) -> Option<[u8; 16]> {
    u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)
}
