//! Texts that many rows share are stored once, and rows contain their ids.

use std::collections::HashMap;

use rusqlite::{Connection, OptionalExtension as _};

/// A table with ids and texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum TextTable {
    Texts,
    Templates,
}

impl TextTable {
    fn select_id(self) -> &'static str {
        match self {
            Self::Texts => "SELECT id FROM texts WHERE text = ?",
            Self::Templates => "SELECT id FROM templates WHERE text = ?",
        }
    }

    fn insert(self) -> &'static str {
        match self {
            Self::Texts => "INSERT INTO texts (text) VALUES (?)",
            Self::Templates => "INSERT INTO templates (text) VALUES (?)",
        }
    }

    fn select_text(self) -> &'static str {
        match self {
            Self::Texts => "SELECT text FROM texts WHERE id = ?",
            Self::Templates => "SELECT text FROM templates WHERE id = ?",
        }
    }

    /// Selects ids after one, in order.
    pub(super) fn select_ids(self) -> &'static str {
        match self {
            Self::Texts => "SELECT id FROM texts WHERE id > ? ORDER BY id LIMIT ?",
            Self::Templates => "SELECT id FROM templates WHERE id > ? ORDER BY id LIMIT ?",
        }
    }

    /// Deletes a text that no dead letter refers to, unless something else does.
    pub(super) fn delete_unused(self) -> &'static str {
        match self {
            Self::Texts => {
                "DELETE FROM texts WHERE id = ?1 AND text != '' \
                 AND NOT EXISTS (SELECT 1 FROM positions WHERE topic_id = ?1) \
                 AND NOT EXISTS (SELECT 1 FROM topic_ids WHERE topic_id = ?1) \
                 AND NOT EXISTS (SELECT 1 FROM ledger WHERE topic_id = ?1)"
            }
            Self::Templates => "DELETE FROM templates WHERE id = ?1 AND text != ''",
        }
    }

    /// The id of a text; `None` if it is not stored.
    pub(super) fn find(self, connection: &Connection, text: &str) -> rusqlite::Result<Option<i64>> {
        connection
            .prepare_cached(self.select_id())?
            .query_row([text], |row| row.get("id"))
            .optional()
    }
}

/// The cache is cleared when it exceeds this size.
const CACHED_IDS: usize = 20_000;

/// The texts that are in use.
#[derive(Debug, Default)]
pub(super) struct Marks(HashMap<(TextTable, i64), u64>);

impl Marks {
    pub(super) fn add(&mut self, table: TextTable, id: i64) {
        *self.0.entry((table, id >> 6)).or_default() |= 1 << (id & 63);
    }

    pub(super) fn contains(&self, table: TextTable, id: i64) -> bool {
        let word = self.0.get(&(table, id >> 6)).copied().unwrap_or(0);
        word & 1 << (id & 63) != 0
    }
}

/// The ids of texts, for the writer.
#[derive(Debug, Default)]
pub(super) struct TextIds {
    cached: HashMap<TextTable, HashMap<String, i64>>,
    /// The texts in use, while unused ones are searched.
    marks: Option<Marks>,
}

impl TextIds {
    /// The id of a text, which is inserted if it is new.
    pub(super) fn id(
        &mut self,
        connection: &Connection,
        table: TextTable,
        text: &str,
    ) -> rusqlite::Result<i64> {
        let id = self.find_or_insert(connection, table, text)?;
        if let Some(marks) = &mut self.marks {
            marks.add(table, id);
        }
        Ok(id)
    }

    fn find_or_insert(
        &mut self,
        connection: &Connection,
        table: TextTable,
        text: &str,
    ) -> rusqlite::Result<i64> {
        let cache = self.cached.entry(table).or_default();
        if let Some(id) = cache.get(text) {
            return Ok(*id);
        }
        let id = match table.find(connection, text)? {
            Some(id) => id,
            None => {
                connection.prepare_cached(table.insert())?.execute([text])?;
                connection.last_insert_rowid()
            }
        };
        if cache.len() >= CACHED_IDS {
            cache.clear();
        }
        cache.insert(text.to_owned(), id);
        Ok(id)
    }

    /// Forgets ids that may not be stored any more.
    pub(super) fn clear_cache(&mut self) {
        self.cached.clear();
    }

    /// The texts in use that were found since the last call of [`TextIds::clear_marks`].
    pub(super) fn marks(&mut self) -> &mut Marks {
        self.marks.get_or_insert_default()
    }

    pub(super) fn clear_marks(&mut self) {
        self.marks = None;
    }
}

/// A cache of texts by id, for one query.
pub(super) struct Texts<'c> {
    connection: &'c Connection,
    known: HashMap<(TextTable, i64), String>,
}

impl<'c> Texts<'c> {
    pub(super) fn new(connection: &'c Connection) -> Self {
        Self {
            connection,
            known: HashMap::new(),
        }
    }

    /// The text with an id.
    pub(super) fn text(&mut self, table: TextTable, id: i64) -> rusqlite::Result<String> {
        if let Some(text) = self.known.get(&(table, id)) {
            return Ok(text.clone());
        }
        let text: String = self
            .connection
            .prepare_cached(table.select_text())?
            .query_row([id], |row| row.get("text"))?;
        self.known.insert((table, id), text.clone());
        Ok(text)
    }
}
