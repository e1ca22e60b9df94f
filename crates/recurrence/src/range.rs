//! The times that a definition may contain.

use redeliver_core::Timestamp;

use crate::invalid::Invalid;

/// The earliest time of a schedule.
pub(crate) const FIRST: Timestamp = Timestamp::from_millis(0);
/// The latest time of a schedule, 9999-12-30T00:00:00Z: the last day on which all zones have a local time.
pub(crate) const LAST: Timestamp = Timestamp::from_millis(253_402_128_000_000);

/// Checks a time of a definition.
pub(crate) fn check_time(field: &'static str, time: Timestamp) -> Result<(), Invalid> {
    if (FIRST..=LAST).contains(&time) {
        return Ok(());
    }
    let problem = format!("{time} is out of range: must be between {FIRST} and {LAST}");
    Err(Invalid::new(field, problem))
}
