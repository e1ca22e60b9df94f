//! Cron expressions: parsing, and the local times that match.
//!
//! An expression has five fields (minute, hour, day of the month, month, weekday), or six with the second in front. croner
//! parses the fields and decides which days match. The result is a [`Calendar`] of bit sets, which knows nothing about zones and
//! finds the next or previous matching local time in bounded time.
//!
//! croner is not asked for occurrences. It would treat gaps and overlaps by its own rules, which depend on how an expression is
//! written, and it searches an expression that never matches until the year 5000.

use std::sync::{Arc, LazyLock};

use croner::parser::{CronParser, Seconds, Year};
use quick_cache::sync::Cache;

use crate::invalid::Invalid;

mod calendar;
mod grammar;
#[cfg(test)]
mod tests;

pub(crate) use calendar::Calendar;

/// The maximum length of an expression in bytes.
pub const MAX_EXPRESSION: usize = 256;

/// How many calendars are kept. One takes less than 1 KiB, with its expression.
const MAX_CACHED: usize = 4_096;

/// The calendars of the expressions that were used last. Each occurrence of a schedule needs the calendar of its expression: to parse
/// it takes most of the time of an occurrence, and most schedules have one of few expressions.
static CALENDARS: LazyLock<Cache<Box<str>, Arc<Calendar>>> = LazyLock::new(|| Cache::new(MAX_CACHED));

/// The name of the field in errors.
const FIELD: &str = "cron.expression";

/// The calendar of an expression.
///
/// # Errors
/// If it is not a cron expression, or never matches. The error names the wrong field of the expression.
pub(crate) fn calendar(expression: &str) -> Result<Arc<Calendar>, Invalid> {
    if let Some(calendar) = CALENDARS.get(expression) {
        return Ok(calendar);
    }
    let calendar = Arc::new(parse(expression)?);
    CALENDARS.insert(expression.into(), calendar.clone());
    Ok(calendar)
}

fn parse(expression: &str) -> Result<Calendar, Invalid> {
    grammar::check(expression).map_err(|problem| Invalid::new(FIELD, problem))?;
    let refused = |error: croner::errors::CronError| Invalid::new(FIELD, error.to_string());
    let parser = CronParser::builder()
        .seconds(Seconds::Optional)
        .year(Year::Disallowed)
        .build();
    let cron = parser.parse(expression).map_err(refused)?;
    let calendar = Calendar::new(&cron.pattern).map_err(refused)?;
    if calendar.is_empty() {
        let problem = "never matches: no month of the expression has a day that it selects";
        return Err(Invalid::new(FIELD, problem));
    }
    Ok(calendar)
}
