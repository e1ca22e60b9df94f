//! The keys of the state records of schedules.

use redeliver_recurrence::ScheduleId;

/// What the keys of state records of schedules begin with.
const KEY_PREFIX: &str = "schedule:";

/// The key of the state record of a schedule.
#[must_use]
pub(crate) fn state_key(id: &str) -> String {
    format!("{KEY_PREFIX}{id}")
}

/// The id of the schedule whose state record has this key.
#[must_use]
pub(crate) fn id_of_key(key: &str) -> Option<ScheduleId> {
    key.strip_prefix(KEY_PREFIX)?.parse().ok()
}
