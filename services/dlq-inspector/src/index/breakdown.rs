//! Counts of dead letters by the values of fields.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use redeliver_core::failure::bounded_text;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, params_from_iter};

use super::query;
use super::texts::{TextTable, Texts};
use crate::dialect::readable_number;
use crate::filter::{Expr, Restriction, TextField, TextTest};
use crate::header_list;
use crate::ledger::State;
use crate::masking::MASK;

/// How many combinations of values are told apart. Writers of dead letters can invent any number of values of headers.
const MAX_COUNTS: usize = 10_000;
/// Values of headers are truncated to this many bytes. Those that begin alike count as one.
const MAX_VALUE: usize = 256;
/// 1970-01-01T00:00 as a local time.
const EPOCH: DateTime = DateTime::constant(1970, 1, 1, 0, 0, 0, 0);
const DAY: i64 = 86_400;
const HOUR: i64 = 3_600;

/// What dead letters are counted by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CountField {
    Topic,
    Pipeline,
    ErrorClass,
    ErrorCode,
    State,
    /// The day of `dead_at`.
    Day,
    /// The hour of `dead_at`.
    Hour,
    /// The last header with this name.
    Header(String),
}

/// All fields, for error messages.
pub(crate) const COUNT_FIELDS: &str =
    "topic, pipeline, error_class, error_code, state, day, hour or headers.NAME";

impl CountField {
    /// The field with this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "topic" => Self::Topic,
            "pipeline" => Self::Pipeline,
            "error_class" => Self::ErrorClass,
            "error_code" => Self::ErrorCode,
            "state" => Self::State,
            "day" => Self::Day,
            "hour" => Self::Hour,
            _ => Self::Header(
                name.strip_prefix("headers.")
                    .filter(|name| !name.is_empty())?
                    .to_owned(),
            ),
        })
    }

    /// The restriction of filters that needs the same permissions; `None` if each caller sees the field.
    pub(crate) fn restriction(&self) -> Option<Restriction> {
        let text = |field| Some(Restriction::Text(field, TextTest::Present));
        match self {
            Self::Topic | Self::State | Self::Day | Self::Hour => None,
            Self::Pipeline => text(TextField::Pipeline),
            Self::ErrorClass => text(TextField::ErrorClass),
            Self::ErrorCode => text(TextField::ErrorCode),
            Self::Header(name) => Some(Restriction::Header(name.clone(), TextTest::Present)),
        }
    }

    /// What contains it, of the row and of its group: groups are made of what is not masked.
    fn columns(&self) -> [&'static str; 2] {
        match self {
            Self::Topic => ["l.topic_id", "NULL"],
            Self::Pipeline => [
                "l.pipeline_id",
                "(SELECT pipeline_id FROM groups WHERE id = l.group_id)",
            ],
            Self::ErrorClass => [
                "l.error_class_id",
                "(SELECT error_class_id FROM groups WHERE id = l.group_id)",
            ],
            Self::ErrorCode => [
                "l.error_code_id",
                "(SELECT error_code_id FROM groups WHERE id = l.group_id)",
            ],
            Self::State => ["l.state", "NULL"],
            Self::Day | Self::Hour => ["l.dead_at", "NULL"],
            Self::Header(_) => ["b.headers", "NULL"],
        }
    }

    fn value(&self, column: ValueRef<'_>, zone: &TimeZone) -> rusqlite::Result<Value> {
        Ok(match self {
            Self::Topic | Self::Pipeline | Self::ErrorClass | Self::ErrorCode => {
                Value::Text(column.as_i64_or_null()?.unwrap_or_default())
            }
            Self::State => Value::State(column.as_i64()?),
            Self::Day => Value::Day(local_time(column.as_i64()?, zone).0.div_euclid(DAY)),
            Self::Hour => {
                let (local, offset) = local_time(column.as_i64()?, zone);
                Value::Hour(local.div_euclid(HOUR), offset)
            }
            Self::Header(wanted) => {
                let list = column.as_blob_or_null()?.unwrap_or_default();
                let named = header_list::iter(list).filter(|(name, _)| name == wanted);
                let value = named.last().and_then(|(_, value)| value).unwrap_or_default();
                let number = readable_number(wanted, value);
                let text = || String::from_utf8_lossy(value);
                Value::Header(bounded_text(&number.map_or_else(text, Into::into), MAX_VALUE))
            }
        })
    }
}

/// Seconds since 1970 on the clock of a zone, and its offset from UTC.
fn local_time(millis: i64, zone: &TimeZone) -> (i64, i32) {
    let offset = jiff::Timestamp::from_millisecond(millis).map_or(0, |at| zone.to_offset(at).seconds());
    (millis.div_euclid(1_000) + i64::from(offset), offset)
}

/// What the caller sees of a field in a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    Value,
    /// What its groups show to all callers.
    OfGroup,
    /// This text instead.
    Text(&'static str),
}

/// A value of a field, as rows contain it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Value {
    Text(i64),
    State(i64),
    Day(i64),
    Hour(i64, i32),
    Header(String),
    Hidden(&'static str),
}

impl Value {
    fn text(&self, texts: &mut Texts<'_>) -> rusqlite::Result<String> {
        Ok(match self {
            // There is no text with this id.
            Self::Text(0) => String::new(),
            Self::Text(id) => texts.text(TextTable::Texts, *id)?,
            Self::State(number) => {
                State::from_number(*number).map_or_else(String::new, |state| state.name().to_owned())
            }
            Self::Day(day) => local(day * DAY).map_or_else(String::new, |local| local.date().to_string()),
            Self::Hour(hour, offset) => local(hour * HOUR).map_or_else(String::new, |local| {
                let minutes = offset.abs() / 60;
                let sign = if *offset < 0 { '-' } else { '+' };
                let offset = match offset {
                    0 => "Z".to_owned(),
                    _ => format!("{sign}{:02}:{:02}", minutes / 60, minutes % 60),
                };
                format!("{}T{:02}:00{offset}", local.date(), local.hour())
            }),
            Self::Header(text) => text.clone(),
            Self::Hidden(text) => (*text).to_owned(),
        })
    }
}

fn local(seconds: i64) -> Option<DateTime> {
    EPOCH.checked_add(jiff::SignedDuration::from_secs(seconds)).ok()
}

/// How dead letters are counted.
pub(crate) struct Breakdown<'q> {
    pub(crate) filter: &'q Expr,
    pub(crate) by: &'q [CountField],
    /// Of days and hours.
    pub(crate) zone: &'q TimeZone,
    /// The maximum number of counts.
    pub(crate) limit: usize,
}

/// The largest counts, and the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// The values of the fields, and how many dead letters have them.
    pub(crate) counts: Vec<(Vec<String>, u64)>,
    pub(crate) total: u64,
    pub(crate) other: u64,
    /// How many of them have disclosed a header to the caller, and whether headers of others were masked.
    pub(crate) disclosed: u64,
    pub(crate) is_masked: bool,
    /// Whether the rest may contain larger ones, because there are too many.
    pub(crate) is_partial: bool,
}

/// Counts the dead letters that match. `shown`: what the caller sees of each field in a topic.
pub(crate) fn count_by(
    connection: &Connection,
    query: &Breakdown<'_>,
    shown: impl Fn(&str) -> Vec<Shown>,
) -> rusqlite::Result<Counts> {
    let by = query.by;
    let mut plan = query::plan(connection, query.filter)?;
    plan.condition.reads_bodies |= by.iter().any(|field| matches!(field, CountField::Header(_)));
    let (from, params) = plan.from();
    let columns: Vec<String> = by.iter().map(|field| field.columns().join(", ")).collect();
    let sql = format!("SELECT l.topic_id, {} {from}", columns.join(", "));
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query(params_from_iter(params))?;
    let mut texts = Texts::new(connection);
    let mut topics: HashMap<i64, Vec<Shown>> = HashMap::new();
    let (mut disclosed, mut is_masked) = (0, false);
    let mut counts: HashMap<Vec<Value>, u64> = HashMap::new();
    let (mut total, mut is_partial, mut key) = (0, false, Vec::new());
    while let Some(row) = rows.next()? {
        let topic: i64 = row.get(0)?;
        if let Entry::Vacant(unknown) = topics.entry(topic) {
            unknown.insert(shown(&texts.text(TextTable::Texts, topic)?));
        }
        key.clear();
        for (index, (field, shown)) in by.iter().zip(&topics[&topic]).enumerate() {
            let column = 1 + 2 * index;
            key.push(match *shown {
                Shown::Value => field.value(row.get_ref(column)?, query.zone)?,
                Shown::OfGroup => field.value(row.get_ref(column + 1)?, query.zone)?,
                Shown::Text(text) => Value::Hidden(text),
            });
        }
        let is_header = |field: &CountField| matches!(field, CountField::Header(_));
        let mut headers = by
            .iter()
            .zip(&topics[&topic])
            .filter(|(field, _)| is_header(field));
        disclosed += u64::from(headers.clone().any(|(_, shown)| *shown == Shown::Value));
        is_masked |= headers.any(|(_, shown)| *shown == Shown::Text(MASK));
        total += 1;
        if let Some(count) = counts.get_mut(key.as_slice()) {
            *count += 1;
        } else if counts.len() < MAX_COUNTS {
            counts.insert(key.clone(), 1);
        } else {
            is_partial = true;
        }
    }
    let named = counts.into_iter().map(|(values, count)| {
        let values = values.iter().map(|value| value.text(&mut texts));
        Ok((values.collect::<rusqlite::Result<_>>()?, count))
    });
    let mut counts: Vec<(Vec<String>, u64)> = named.collect::<rusqlite::Result<_>>()?;
    counts.sort_unstable_by(|(one, few), (other, many)| (Reverse(few), one).cmp(&(Reverse(many), other)));
    counts.truncate(query.limit);
    Ok(Counts {
        other: total - counts.iter().map(|(_, count)| count).sum::<u64>(),
        counts,
        total,
        disclosed,
        is_masked,
        is_partial,
    })
}
