//! Detects steps of the wall clock, so that nothing is released by a time that may be wrong.
//!
//! The wall clock can be set to any time at any moment; the monotonic clock cannot. A [`ClockGuard`] compares both
//! whenever the time is read. Their difference, the *offset*, changes when the wall clock is set, when a virtual machine
//! continues after a suspension (the monotonic clock stops meanwhile), and, on some systems, slowly while the wall clock is
//! slewed. The guard follows slow changes. A change of more than [`ClockLimits::max_step`] is a *step*, and begins a *hold*.
//!
//! ```text
//!            step                           new offset kept for `confirm`
//!  steady ----------> held (another step ---------------------------------> steady, by the new offset
//!    ^                 starts again)
//!    |__________________|  old offset again
//! ```
//!
//! During a hold neither the wall clock nor the previous offset is certain: the step may be a mistake or the correction of
//! one. The caller releases nothing. What only needs some time, such as the timestamp of an error, uses the *continued*
//! time: the previous offset plus the monotonic clock.
//!
//! A step that stays for `confirm` is considered right, because nothing in the process can tell otherwise. So the hold
//! protects from wrong steps that are corrected within `confirm`, and from clocks that two programs set in turn. It does not
//! protect from a clock that is wrong for longer, or that was already wrong at the first reading.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::human_duration::HumanDuration;
use crate::time::{Clock, Timestamp};

/// The offset may change by a tenth of the elapsed time without being a step. chrony slews by at most a twelfth
/// (`maxslewrate`), all other time services more slowly.
const SLEW_DIVISOR: u32 = 10;

/// The limits of a [`ClockGuard`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockLimits {
    /// The greatest change of the offset that is not a step.
    pub max_step: Duration,
    /// How long a new offset must last to be confirmed.
    pub confirm: Duration,
}

/// Both clocks, read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    /// The wall clock.
    pub wall: Timestamp,
    /// The monotonic clock.
    pub monotonic: Duration,
}

/// Whether the wall clock is certain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockState {
    /// It is.
    Steady {
        /// The time of the wall clock.
        now: Timestamp,
    },
    /// It has stepped, and the new time is not confirmed.
    Held {
        /// The monotonic time of the first reading after the step.
        since: Duration,
        /// The step.
        step: ClockStep,
        /// The continued time.
        now: Timestamp,
    },
}

/// A step of the wall clock, compared with the last confirmed offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockStep {
    /// Its direction.
    pub direction: StepDirection,
    /// Its size.
    pub by: HumanDuration,
}

/// The direction of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepDirection {
    /// To a later time.
    Forward,
    /// To an earlier time.
    Backward,
}

impl StepDirection {
    /// `forward` or `backward`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }
}

impl fmt::Display for ClockStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.by.duration().as_secs_f64();
        write!(f, "{seconds:.1} s {}", self.direction.as_str())
    }
}

/// Detects steps of the wall clock from readings of both clocks. It does no IO.
#[derive(Debug)]
pub struct ClockGuard {
    limits: ClockLimits,
    /// `None` before the first reading.
    confirmed: Option<TrackedOffset>,
    hold: Option<Hold>,
}

/// An offset that changes slowly. All offsets are in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct TrackedOffset {
    /// The offset of the last reading.
    measured: i128,
    /// Follows `measured`, but not faster than a clock is slewed. So many small steps add up, and a slewed clock does not.
    followed: i128,
    /// The monotonic time of the last reading.
    at: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Hold {
    since: Duration,
    step: ClockStep,
    candidate: TrackedOffset,
}

impl ClockGuard {
    /// A guard that takes the first reading as correct.
    #[must_use]
    pub const fn new(limits: ClockLimits) -> Self {
        Self {
            limits,
            confirmed: None,
            hold: None,
        }
    }

    /// Compares a reading with the previous ones. Readings must be passed in the order in which they were taken.
    pub fn observe(&mut self, reading: ClockReading) -> ClockState {
        let ClockLimits { max_step, confirm } = self.limits;
        let steady = ClockState::Steady { now: reading.wall };
        let (offset, at) = (reading.offset(), reading.monotonic);
        let Some(confirmed) = &mut self.confirmed else {
            self.confirmed = Some(TrackedOffset::new(offset, at));
            return steady;
        };
        let hold = match &mut self.hold {
            None => {
                if confirmed.track(offset, at, max_step) {
                    return steady;
                }
                Hold::begin(confirmed, offset, at)
            }
            Some(_) if confirmed.is_near(offset, max_step) => {
                confirmed.measured = offset;
                confirmed.at = at;
                self.hold = None;
                return steady;
            }
            Some(hold) => {
                if !hold.candidate.track(offset, at, max_step) {
                    Hold::begin(confirmed, offset, at)
                } else if at.saturating_sub(hold.since) >= confirm {
                    *confirmed = hold.candidate;
                    self.hold = None;
                    return steady;
                } else {
                    *hold
                }
            }
        };
        self.hold = Some(hold);
        ClockState::Held {
            since: hold.since,
            step: hold.step,
            now: confirmed.time_at(at),
        }
    }
}

impl Hold {
    fn begin(confirmed: &TrackedOffset, offset: i128, at: Duration) -> Self {
        Self {
            since: at,
            step: ClockStep::between(confirmed.measured, offset),
            candidate: TrackedOffset::new(offset, at),
        }
    }
}

impl ClockReading {
    /// The difference between the wall clock and the monotonic clock.
    fn offset(&self) -> i128 {
        i128::from(self.wall.as_millis()) * 1_000_000 - nanos(self.monotonic)
    }
}

impl ClockStep {
    fn between(from: i128, to: i128) -> Self {
        let millis = u64::try_from((to - from).unsigned_abs() / 1_000_000).unwrap_or(u64::MAX);
        Self {
            direction: if to > from {
                StepDirection::Forward
            } else {
                StepDirection::Backward
            },
            by: HumanDuration::from_millis(millis),
        }
    }
}

impl TrackedOffset {
    const fn new(offset: i128, at: Duration) -> Self {
        Self {
            measured: offset,
            followed: offset,
            at,
        }
    }

    /// Follows a new measurement. Returns false, and changes nothing, if it is a step.
    fn track(&mut self, offset: i128, at: Duration, max_step: Duration) -> bool {
        // Limited, because after a long time without readings any step would look like a slewed clock.
        let slewed = (at.saturating_sub(self.at) / SLEW_DIVISOR).min(max_step);
        let slewed = nanos(slewed);
        let followed = self.followed + (offset - self.followed).clamp(-slewed, slewed);
        if (offset - followed).abs() > nanos(max_step) {
            return false;
        }
        *self = Self {
            measured: offset,
            followed,
            at,
        };
        true
    }

    fn is_near(&self, offset: i128, max_step: Duration) -> bool {
        (offset - self.followed).abs() <= nanos(max_step)
    }

    /// The wall clock at a monotonic time, if the offset had not changed since the last measurement.
    fn time_at(&self, monotonic: Duration) -> Timestamp {
        let millis = (nanos(monotonic) + self.measured).div_euclid(1_000_000);
        Timestamp::from_millis(i64::try_from(millis).unwrap_or(i64::MAX))
    }
}

fn nanos(duration: Duration) -> i128 {
    i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX)
}

/// What a [`GuardedClock`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockChange {
    /// The clock has stepped, and a hold begins or starts again.
    Stepped {
        /// The step.
        step: ClockStep,
        /// The continued time.
        continued: Timestamp,
    },
    /// The hold has ended, and this is the time.
    Steady {
        /// The time of the wall clock.
        now: Timestamp,
    },
}

/// Receives the changes of a [`GuardedClock`]. It must not read that clock.
pub type ClockObserver = Box<dyn Fn(ClockChange) + Send + Sync>;

/// A [`Clock`] with a [`ClockGuard`], for all threads of a process.
///
/// The guard is shared, because lanes that start later must not take a wrong time as correct. Both clocks are read while it
/// is locked, so the readings of all threads are in order.
pub struct GuardedClock<C> {
    clock: C,
    observer: ClockObserver,
    guarded: Mutex<Guarded>,
}

#[derive(Debug)]
struct Guarded {
    guard: ClockGuard,
    last: Option<ClockState>,
}

impl<C: Clock> GuardedClock<C> {
    /// Takes the first reading, which is the reference.
    pub fn new(clock: C, limits: ClockLimits, observer: ClockObserver) -> Self {
        let guarded = Self {
            clock,
            observer,
            guarded: Mutex::new(Guarded {
                guard: ClockGuard::new(limits),
                last: None,
            }),
        };
        guarded.read();
        guarded
    }

    /// Reads both clocks.
    pub fn read(&self) -> ClockState {
        let mut guarded = self.lock();
        let reading = ClockReading {
            wall: self.clock.now(),
            monotonic: self.clock.monotonic(),
        };
        let state = guarded.guard.observe(reading);
        let last = guarded.last.replace(state);
        match (last, state) {
            (Some(ClockState::Held { .. }), ClockState::Steady { now }) => {
                (self.observer)(ClockChange::Steady { now });
            }
            (Some(ClockState::Held { since: last, .. }), ClockState::Held { since, .. }) if last == since => {
            }
            (_, ClockState::Held { step, now, .. }) => {
                (self.observer)(ClockChange::Stepped { step, continued: now });
            }
            (_, ClockState::Steady { .. }) => {}
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Clock> Clock for GuardedClock<C> {
    fn now(&self) -> Timestamp {
        match self.read() {
            ClockState::Steady { now } | ClockState::Held { now, .. } => now,
        }
    }

    fn monotonic(&self) -> Duration {
        self.clock.monotonic()
    }

    fn confirmed(&self) -> Option<Timestamp> {
        match self.read() {
            ClockState::Steady { now } => Some(now),
            ClockState::Held { .. } => None,
        }
    }

    fn possible(&self) -> (Timestamp, Timestamp) {
        match self.read() {
            ClockState::Steady { now } => (now, now),
            ClockState::Held { now, .. } => {
                let wall = self.clock.now();
                (now.min(wall), now.max(wall))
            }
        }
    }
}

#[cfg(test)]
mod tests;
