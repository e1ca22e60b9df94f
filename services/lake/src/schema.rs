//! The tables and their columns.
//!
//! Columns are only added, never changed or removed, and all are nullable. So readers of any age understand all files.

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    Int,
    Long,
    /// With microseconds, in UTC.
    Time,
    Flag,
}

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
}

/// The columns of a table, without the one by which it is partitioned.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Schema {
    pub(crate) table: &'static str,
    pub(crate) columns: &'static [Column],
}

/// The table is partitioned by the day on which rows were appended.
pub(crate) const DAY: &str = "day";
/// Names of columns whose values did not fit, and are null, each with the reason, such as `due_at: out of range`, separated by `; `.
pub(crate) const UNFIT: &str = "unfit";
/// Columns whose smallest and largest values are in the log of the table, so that engines skip files. Texts from records are not among them: they
/// would stay there after the rows are gone.
pub(crate) const WITH_STATISTICS: &str = "kafka_topic,kafka_partition,kafka_offset,kafka_timestamp";

macro_rules! schema {
    ($name:ident $table:literal: $($column:ident $kind:ident),* $(,)?) => {
        pub(crate) static $name: Schema = Schema {
            table: $table,
            columns: &[
                Column { name: "kafka_topic", kind: Kind::Text },
                Column { name: "kafka_topic_id", kind: Kind::Text },
                Column { name: "kafka_partition", kind: Kind::Int },
                Column { name: "kafka_offset", kind: Kind::Long },
                Column { name: "kafka_timestamp", kind: Kind::Time },
                $(Column { name: stringify!($column), kind: Kind::$kind },)*
                Column { name: UNFIT, kind: Kind::Text },
            ],
        };
    };
}

schema! { ATTEMPTS "attempts":
    pipeline Text, tier Text, origin_topic Text, origin_partition Int, origin_offset Long, origin_timestamp Time, retry_count Long,
    process_after Time, failed_at Time, error_class Text, error_code Text, error_message Text, error_template Text, job_id Text,
    trace_id Text, value_size Long, headers Text, expects_result Flag,
}

schema! { OUTCOMES "outcomes":
    outcome Text, pipeline Text, origin_topic Text, origin_partition Int, origin_offset Long, origin_timestamp Time, retry_count Long,
    error_class Text, error_code Text, job_id Text, trace_id Text, value_size Long, headers Text,
}

schema! { DEAD_LETTERS "dead_letters":
    dialect Text, pipeline Text, origin_topic Text, origin_partition Int, origin_offset Long, origin_timestamp Time, retry_count Long,
    failed_at Time, error_class Text, error_code Text, error_message Text, error_template Text, group_id Text, job_id Text,
    trace_id Text, redrive_count Long, payload_omitted Text, key Text, value Text, value_size Long, headers Text,
}

schema! { DECISIONS "decisions":
    letter_topic Text, letter_partition Int, letter_offset Long, state Text, decided_at Time, decided_by Text, reason Text,
    redrive_id Text, destination Text, edited Text,
}

schema! { JOBS "jobs":
    record_kind Text, job_id Text, forgotten Flag, app Text, topic Text, state Text, priority Text, due_at Time, accepted_at Time, released_at Time,
    ended_at Time, expires_at Time, revision Long, occurrence Text, long_wait Flag, value_size Long,
}

schema! { AUDIT "audit":
    entry_id Text, decided_at Time, caller Text, action Text, target Text, reason Text, details Text, filter_text Text, affected Long,
    ids Text, masked Flag, service Text, instance Text,
}

// Not of a record: what could not be read. The offset is the first one that is missing.
schema! { GAPS "gaps":
    table_name Text, until_offset Long, cause Text, noticed_at Time,
}

/// All tables, in the order in which they are numbered.
pub(crate) static TABLES: [&Schema; 7] = [
    &ATTEMPTS,
    &OUTCOMES,
    &DEAD_LETTERS,
    &DECISIONS,
    &JOBS,
    &AUDIT,
    &GAPS,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_names_are_unique() {
        for schema in TABLES {
            let mut names: Vec<&str> = schema.columns.iter().map(|column| column.name).collect();
            names.push(DAY);
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "{}", schema.table);
        }
    }
}
