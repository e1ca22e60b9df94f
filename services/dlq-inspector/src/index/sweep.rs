//! Deletes texts that no row refers to any more. Without this, error codes that contain a number or an id would accumulate forever.
//!
//! Finding them reads every row, so it takes many steps, each in a short transaction: first, the texts that dead letters and groups refer to are
//! marked; then, those without a mark are deleted. A text that is used between two steps is marked, too, see [`TextIds`].
//!
//! [`TextIds`]: super::texts::TextIds

use rusqlite::Connection;

use super::texts::{Marks, TextIds, TextTable};

/// The number of dead letters that one step reads.
const ROWS: i64 = 20_000;
/// The number of texts that one step tests.
const TEXTS: i64 = 5_000;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sweep {
    /// Mark the texts of the dead letters after this row.
    Mark { after: i64 },
    /// Mark the texts of the groups after this one. Those of masked headers are only there.
    MarkGroups { after: i64 },
    /// Delete the texts of this table after this id that have no mark.
    Delete { table: TextTable, after: i64 },
}

impl Sweep {
    pub(super) const BEGIN: Self = Self::Mark { after: -1 };

    /// Takes a step, and returns the next one; `None` after the last one. If the transaction fails, the step is repeated.
    pub(super) fn step(
        self,
        transaction: &Connection,
        texts: &mut TextIds,
    ) -> rusqlite::Result<Option<Self>> {
        match self {
            Self::Mark { after } => {
                let last = mark(transaction, texts.marks(), after)?;
                let groups = Self::MarkGroups { after: i64::MIN };
                Ok(Some(last.map_or(groups, |after| Self::Mark { after })))
            }
            Self::MarkGroups { after } => {
                let last = mark_groups(transaction, texts.marks(), after)?;
                let first_table = Self::Delete {
                    table: TextTable::Texts,
                    after: 0,
                };
                Ok(Some(last.map_or(first_table, |after| Self::MarkGroups { after })))
            }
            Self::Delete { table, after } => {
                let last = delete(transaction, texts, table, after)?;
                Ok(match (last, table) {
                    (Some(after), _) => Some(Self::Delete { table, after }),
                    (None, TextTable::Texts) => Some(Self::Delete {
                        table: TextTable::Templates,
                        after: 0,
                    }),
                    (None, TextTable::Templates) => None,
                })
            }
        }
    }
}

/// Marks the texts of some rows. Returns the last one; `None` if there were no more. Those that are added now mark their texts
/// themselves.
fn mark(connection: &Connection, marks: &mut Marks, after: i64) -> rusqlite::Result<Option<i64>> {
    let mut statement = connection.prepare_cached(
        "SELECT row, topic_id, pipeline_id, error_class_id, error_code_id, origin_topic_id, template_id \
         FROM letters NOT INDEXED WHERE row > ? ORDER BY row LIMIT ?",
    )?;
    let mut rows = statement.query((after, ROWS))?;
    let (mut last, mut count) = (None, 0);
    while let Some(row) = rows.next()? {
        for column in [
            "topic_id",
            "pipeline_id",
            "error_class_id",
            "error_code_id",
            "origin_topic_id",
        ] {
            marks.add(TextTable::Texts, row.get(column)?);
        }
        marks.add(TextTable::Templates, row.get("template_id")?);
        last = Some(row.get("row")?);
        count += 1;
    }
    Ok(last.filter(|_| count == ROWS))
}

/// Marks the texts of some groups. Returns the last one; `None` if there were no more.
fn mark_groups(connection: &Connection, marks: &mut Marks, after: i64) -> rusqlite::Result<Option<i64>> {
    let mut statement = connection.prepare_cached(
        "SELECT id, pipeline_id, error_class_id, error_code_id FROM groups WHERE id > ? ORDER BY id LIMIT ?",
    )?;
    let mut rows = statement.query((after, ROWS))?;
    let (mut last, mut count) = (None, 0);
    while let Some(row) = rows.next()? {
        for column in ["pipeline_id", "error_class_id", "error_code_id"] {
            marks.add(TextTable::Texts, row.get(column)?);
        }
        last = Some(row.get("id")?);
        count += 1;
    }
    Ok(last.filter(|_| count == ROWS))
}

/// Deletes those of some texts that are not in use. Returns the last one that was tested; `None` if there were no more.
fn delete(
    connection: &Connection,
    texts: &mut TextIds,
    table: TextTable,
    after: i64,
) -> rusqlite::Result<Option<i64>> {
    let mut count = 0;
    let ids: Vec<i64> = connection
        .prepare_cached(table.select_ids())?
        .query_map((after, TEXTS), |row| row.get("id"))?
        .collect::<rusqlite::Result<_>>()?;
    for id in &ids {
        count += 1;
        if !texts.marks().contains(table, *id) {
            connection.prepare_cached(table.delete_unused())?.execute([id])?;
        }
    }
    texts.clear_cache();
    Ok(ids.last().copied().filter(|_| count == TEXTS))
}
