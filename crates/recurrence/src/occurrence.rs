//! Occurrences of schedules, and their ids.

use std::fmt;
use std::str::FromStr;

use jiff::civil::DateTime;
use redeliver_core::{JobId, Timestamp};

use crate::invalid::Invalid;

/// The maximum length of a schedule's id in bytes.
pub const MAX_ID: usize = 128;

/// The id of a schedule, chosen by the client: 1 to 128 of the characters `a-z`, `A-Z`, `0-9`, `.`, `_` and `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScheduleId(String);

impl ScheduleId {
    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id of an occurrence: `scheduleId@nominal`. It is the same however often the occurrence is computed.
    #[must_use]
    pub fn occurrence(&self, nominal: Timestamp) -> String {
        format!("{}@{nominal}", self.0)
    }

    /// The id of an additional occurrence that a command requests: `scheduleId+jobId`. The id of the command's job is the same
    /// when the command is read again, and no nominal time has this form.
    #[must_use]
    pub fn triggered(&self, command: JobId) -> String {
        format!("{}+{command}", self.0)
    }
}

impl fmt::Display for ScheduleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl FromStr for ScheduleId {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if (1..=MAX_ID).contains(&text.len()) && text.bytes().all(is_valid) {
            return Ok(Self(text.to_owned()));
        }
        let problem = format!("must be 1 to {MAX_ID} of the characters a-z, A-Z, 0-9, `.`, `_` and `-`");
        Err(Invalid::new("id", problem))
    }
}

/// Why an occurrence is at its nominal time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The expression or the interval says so.
    Regular,
    /// It is the anchor of the interval.
    Anchor,
    /// The local time is missing, because the clock goes forward. The nominal time is later by the length of the gap.
    ShiftedByGap {
        /// The local time that does not exist.
        missing: DateTime,
    },
    /// The local time occurs twice, because the clock goes back; this is the first one.
    FirstOfOverlap,
    /// The local time occurs twice, because the clock goes back; this is the second one.
    SecondOfOverlap,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Regular => f.write_str("regular"),
            Self::Anchor => f.write_str("anchor of the interval"),
            Self::ShiftedByGap { missing } => write!(f, "shifted by a gap: {missing} does not exist"),
            Self::FirstOfOverlap => f.write_str("first of an overlap"),
            Self::SecondOfOverlap => f.write_str("second of an overlap"),
        }
    }
}

/// One time at which a schedule creates a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occurrence {
    /// The time that the expression or the interval gives. It identifies the occurrence.
    pub nominal: Timestamp,
    /// The time from which the job may be dispatched: the nominal time, or later if the schedule has jitter.
    pub due: Timestamp,
    /// Why it is at its nominal time.
    pub reason: Reason,
}
