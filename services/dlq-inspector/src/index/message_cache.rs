//! The templates of messages that contain the texts of one filter. A watch asks for the same texts again and again: it reads each
//! template once. The ids of templates increase and are never reused, so that only higher ones are new.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rusqlite::Connection;

use super::message::{self, Contains};
use crate::filter::MessageMatches;

/// Further templates are not looked at: each row is tested instead. There can be as many as dead letters, if their messages differ in more than numbers.
const MAX_TESTED: usize = 100_000;
/// More templates than this are not kept, but found again by the next query.
const MAX_KEPT: usize = 10_000;

/// What is known about the texts of one filter, in one build of the index.
#[derive(Debug, Default)]
pub(crate) struct MessageCache(Mutex<HashMap<String, Known>>);

#[derive(Debug, Default)]
struct Known {
    /// The last template that was tested.
    last: i64,
    /// The number of those that were tested.
    tested: usize,
    /// Those that match. Some of them may not exist any more.
    matches: MessageMatches,
}

impl MessageCache {
    /// The templates whose messages contain a text. A query that is interrupted continues with the next call.
    pub(super) fn matches(&self, connection: &Connection, text: &str) -> rusqlite::Result<MessageMatches> {
        let mut cache = self.lock();
        let known = cache.entry(text.to_owned()).or_default();
        if known.matches.are_unknown {
            return Ok(known.matches.clone());
        }
        let mut statement =
            connection.prepare_cached("SELECT id, text FROM templates WHERE id > ? ORDER BY id")?;
        let mut rows = statement.query([known.last])?;
        while let Some(row) = rows.next()? {
            known.tested += 1;
            if known.tested > MAX_TESTED {
                known.matches = MessageMatches {
                    are_unknown: true,
                    ..MessageMatches::default()
                };
                return Ok(known.matches.clone());
            }
            let id = row.get("id")?;
            match message::contains(row.get_ref("text")?.as_str()?, text) {
                Contains::All => known.matches.all.push(id),
                Contains::Some => known.matches.some.push(id),
                Contains::None => {}
            }
            known.last = id;
        }
        let matches = known.matches.clone();
        if matches.all.len() + matches.some.len() > MAX_KEPT {
            *known = Known::default();
        }
        Ok(matches)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
