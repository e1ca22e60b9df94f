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

    /// Deletes texts that no row refers to.
    fn delete_unused(self) -> &'static str {
        match self {
            Self::Texts => {
                "DELETE FROM texts WHERE text != '' AND id NOT IN (\
                 SELECT topic_id FROM letters UNION SELECT pipeline_id FROM letters \
                 UNION SELECT error_class_id FROM letters UNION SELECT error_code_id FROM letters \
                 UNION SELECT origin_topic_id FROM letters \
                 UNION SELECT topic_id FROM positions UNION SELECT topic_id FROM topic_ids \
                 UNION SELECT topic_id FROM ledger \
                 UNION SELECT topic_id FROM counters UNION SELECT error_class_id FROM counters)"
            }
            Self::Templates => {
                "DELETE FROM templates WHERE text != '' AND id NOT IN (SELECT template_id FROM letters)"
            }
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

/// A cache of the ids of texts, for the writer.
#[derive(Debug, Default)]
pub(super) struct TextIds(HashMap<TextTable, HashMap<String, i64>>);

impl TextIds {
    /// The id of a text, which is inserted if it is new.
    pub(super) fn id(
        &mut self,
        connection: &Connection,
        table: TextTable,
        text: &str,
    ) -> rusqlite::Result<i64> {
        let cache = self.0.entry(table).or_default();
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

    /// Removes texts that only deleted rows referred to. Without this, error codes that contain a number or an id would
    /// accumulate forever.
    pub(super) fn remove_unused(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        self.0.clear();
        for table in [TextTable::Texts, TextTable::Templates] {
            connection.execute(table.delete_unused(), ())?;
        }
        Ok(())
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
