//! When recurring schedules are due: cron expressions in time zones and fixed intervals, and what to do about occurrences
//! that were missed. There is no IO, apart from the zone data that jiff reads and caches; the current time is an argument.
//!
//! It is a crate of its own, not a part of `core`, so that only what deals with schedules depends on the parser of cron
//! expressions and the zone data; and not a part of the scheduler, so that a preview needs neither Kafka nor Redis.
//!
//! | module | contents |
//! |---|---|
//! | `recurrence` | a definition, checked; its nominal times; previews |
//! | `schedule` | what a schedule does next: dispatch, skip, wait; pause, resumption, changes |
//! | `misfire` | which missed occurrences are dispatched late |
//! | `occurrence` | occurrences, their reasons and ids |
//! | `cron` | cron expressions, and the local times that match |
//! | `local` | a cron expression on the clock of a zone: gaps and overlaps |
//! | `zone` | time zones as segments of constant offset |
//! | `every` | a fixed interval |
//! | `invalid` | why a definition is refused |
//!
//! # Defaults, and what others do
//!
//! | | here | others |
//! |---|---|---|
//! | missing local time | later by the length of the gap | vixie cron runs the job right after the change; Kubernetes skips it; Elastic Watcher as here |
//! | repeated local time | once; twice if the expression selects every hour | vixie cron much the same, by whether a field is `*`; Kubernetes twice |
//! | missed for longer than the grace of 60 s | only the latest | Kubernetes only the latest; Quartz one run at once, after the same 60 s; Temporal all within a window; vixie cron none |
//! | fell due while paused | skipped | Temporal skips; Quartz and Kubernetes treat it as missed, which is [`CatchUp::Misfire`] here |
//! | jitter | less than the time to the next occurrence | Temporal the same |
//!
//! ADR 30 (`docs/adr/0030-recurring-schedules.md`) has the reasons.

mod cron;
mod every;
mod invalid;
mod local;
mod misfire;
mod occurrence;
mod range;
mod recurrence;
mod schedule;
#[cfg(test)]
mod tests;
mod zone;

pub use cron::MAX_EXPRESSION;
pub use every::{MAX_INTERVAL, MIN_INTERVAL};
pub use invalid::Invalid;
pub use local::{Gap, Overlap};
pub use misfire::{MAX_GRACE, MAX_LIMIT, MIN_GRACE, Misfire, MisfirePolicy};
pub use occurrence::{MAX_ID, Occurrence, Reason, ScheduleId};
pub use recurrence::{Definition, MAX_JITTER, MAX_PREVIEW, Preview, Recurrence, Timing};
pub use schedule::{CatchUp, Decision, Progress, Schedule, Skipped};
