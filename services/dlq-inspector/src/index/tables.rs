//! The tables with many columns. Each is defined once, as a struct: the schema, the statement that inserts a row, the list of
//! columns to select, and reading a row all follow from its fields.

use rusqlite::{CachedStatement, Connection, Row, Statement};

use crate::letter::ContentHash;

macro_rules! table {
    ($(#[$doc:meta])* $struct:ident, $table:literal { $($(#[$column_doc:meta])* $column:ident: $type:ty, $sql:literal;)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub(super) struct $struct {
            $($(#[$column_doc])* pub(super) $column: $type,)+
        }

        impl $struct {
            /// The statement that creates the table.
            pub(super) const CREATE: &'static str =
                concat!("CREATE TABLE ", $table, " (", table!(@list $(stringify!($column), " ", $sql);+), ");");
            /// Inserts a row, unless it violates a constraint.
            const INSERT: &'static str = concat!(
                "INSERT INTO ", $table, " (", table!(@list $(stringify!($column));+), ") VALUES (",
                table!(@list $(":", stringify!($column));+), ") ON CONFLICT DO NOTHING"
            );
            const SELECT: &'static str = concat!(
                "SELECT ", table!(@list $(stringify!($column));+), " FROM ", $table, " WHERE row = ?"
            );

            /// The statement of [`Self::insert`].
            pub(super) fn inserter(connection: &Connection) -> rusqlite::Result<CachedStatement<'_>> {
                connection.prepare_cached(Self::INSERT)
            }

            /// Inserts the row. `false` if it violates a constraint.
            pub(super) fn insert(&self, inserter: &mut Statement<'_>) -> rusqlite::Result<bool> {
                self.bind(inserter)?;
                Ok(inserter.raw_execute()? > 0)
            }

            /// The parameters are numbered in the order in which the statement names them, which is that of the fields.
            fn bind(&self, statement: &mut Statement<'_>) -> rusqlite::Result<()> {
                let mut index = 0;
                $(index += 1; statement.raw_bind_parameter(index, &self.$column)?;)+
                Ok(())
            }

            /// The row with this number.
            pub(super) fn load(connection: &Connection, row: i64) -> rusqlite::Result<Self> {
                connection.prepare_cached(Self::SELECT)?.query_row([row], Self::read)
            }

            /// The columns are numbered in the order of the fields. To find many columns by name takes longer than to read them.
            fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
                let mut columns = 0..;
                let mut next = || columns.next().unwrap_or_default();
                Ok(Self { $($column: row.get(next())?,)+ })
            }
        }
    };
    (@list $($first:expr),+) => { concat!($($first),+) };
    (@list $($first:expr),+; $($($rest:expr),+);+) => {
        concat!($($first),+, ", ", table!(@list $($($rest),+);+))
    };
}

table! {
    /// What most filters and lists need of a dead letter. Columns that end in `_id` refer to `texts`.
    LetterRow, "letters" {
        /// See [`super::row_key`].
        row: i64, "INTEGER PRIMARY KEY";
        /// See [`super::message`]. The first column, because a search for a number tests it in each row: SQLite decodes a row up to the column
        /// that it needs.
        message_parts: Option<String>, "TEXT";
        topic_id: i64, "INTEGER NOT NULL";
        partition: i32, "INTEGER NOT NULL";
        offset: i64, "INTEGER NOT NULL";
        /// All times are in milliseconds since 1970.
        dead_at: i64, "INTEGER NOT NULL";
        /// When the dead letter was indexed, by the clock of this process.
        indexed_at: i64, "INTEGER NOT NULL";
        state: i64, "INTEGER NOT NULL";
        dialect: i32, "INTEGER NOT NULL";
        pipeline_id: i64, "INTEGER NOT NULL";
        error_class_id: i64, "INTEGER NOT NULL";
        error_code_id: i64, "INTEGER NOT NULL";
        /// See [`crate::fingerprint`].
        group_id: i64, "INTEGER NOT NULL";
        /// The template of the message, in `templates`.
        template_id: i64, "INTEGER NOT NULL";
        failed_at: Option<i64>, "INTEGER";
        retry_count: u32, "INTEGER NOT NULL";
        origin_topic_id: i64, "INTEGER NOT NULL";
        origin_partition: Option<i32>, "INTEGER";
        origin_offset: Option<i64>, "INTEGER";
        origin_timestamp: Option<i64>, "INTEGER";
        job_id: Option<String>, "TEXT";
        trace_id: Option<[u8; 16]>, "BLOB";
        value_size: Option<i64>, "INTEGER";
        content: ContentHash, "BLOB NOT NULL";
    }
}

table! {
    /// The rest, which few filters need.
    BodyRow, "bodies" {
        row: i64, "INTEGER PRIMARY KEY";
        key: Option<Vec<u8>>, "BLOB";
        /// See [`crate::letter::Letter::record_size`].
        record_size: i64, "INTEGER NOT NULL";
        /// See [`crate::header_list`].
        headers: Vec<u8>, "BLOB NOT NULL";
        /// The configured fields of a JSON value, encoded like headers.
        json_fields: Option<Vec<u8>>, "BLOB";
    }
}
