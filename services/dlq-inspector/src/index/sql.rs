//! What statements of the index have in common.

use rusqlite::types::Value;

use crate::filter::Param;

/// The number of rows that one transaction removes at most.
pub(super) const SLICE_ROWS: usize = 2_000;

/// The values of parameters.
pub(super) fn values(params: &[Param]) -> impl Iterator<Item = Value> {
    params.iter().cloned().map(|param| match param {
        Param::Integer(number) => Value::Integer(number),
        Param::Text(text) => Value::Text(text),
        Param::Blob(bytes) => Value::Blob(bytes),
        Param::Null => Value::Null,
    })
}

pub(super) fn sql_limit(rows: usize) -> i64 {
    i64::try_from(rows).unwrap_or(i64::MAX)
}

/// The text of a trace id.
pub(super) fn trace_text(bytes: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(bytes))
}
