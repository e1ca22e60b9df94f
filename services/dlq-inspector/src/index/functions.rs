//! SQL functions that conditions use.

use rusqlite::Connection;
use rusqlite::functions::{Context, FunctionFlags};
use rusqlite::types::ValueRef;

use super::message;
use crate::header_list;

/// Adds the functions to a connection.
pub(super) fn add(connection: &Connection) -> rusqlite::Result<()> {
    let flags =
        FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC | FunctionFlags::SQLITE_DIRECTONLY;
    connection.create_scalar_function("listed_is", 3, flags, |context| {
        let expected = context.get_raw(2).as_blob()?;
        any_listed(context, |value| value == Some(expected))
    })?;
    connection.create_scalar_function("listed_has", 3, flags, |context| {
        let needle = context.get_raw(2).as_blob()?;
        any_listed(context, |value| {
            value.is_some_and(|value| contains(value, needle))
        })
    })?;
    connection.create_scalar_function("listed_exists", 2, flags, |context| any_listed(context, |_| true))?;
    connection.create_scalar_function("message_has", 3, flags, |context| {
        let parts = context.get_raw(1).as_str_or_null()?;
        let message = message::join(context.get_raw(0).as_str()?, parts);
        Ok(message.contains(context.get_raw(2).as_str()?))
    })
}

/// Whether a list of names and values has an entry with a name whose value passes a test.
fn any_listed(context: &Context<'_>, test: impl Fn(Option<&[u8]>) -> bool) -> rusqlite::Result<bool> {
    let list = match context.get_raw(0) {
        ValueRef::Null => return Ok(false),
        list => list.as_blob()?,
    };
    let name = context.get_raw(1).as_str()?;
    Ok(header_list::iter(list).any(|(listed, value)| listed == name && test(value)))
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    needle.is_empty() || haystack.windows(needle.len()).any(|window| window == needle)
}
