//! What is known about one partition: how far it is read, and why it is not complete. No IO.
//!
//! ```text
//!            bounds known        everything before its end was read
//! Leaderless ------------> Reading ----------------------> Current
//!     ^                       |  ^                            |
//!     |  no bounds            |  | a record or an end         | refused
//!     +--- from any state ----+  +------- Refused <-----------+
//! ```

use std::sync::Arc;

use redeliver_kafka::survey::Extent;

use crate::completeness::Reason;

/// The consumer is recreated after a partition with unread records made no progress for this many surveys.
pub(super) const SURVEYS_UNTIL_STALLED: u32 = 4;
/// A refused partition is followed again after this many surveys. Otherwise, a partition that can be read
/// again would stay refused until its next record: the consumer reports each end only once.
pub(super) const SURVEYS_UNTIL_RETRIED: u32 = 5;

/// One partition of a topic that a survey has found.
#[derive(Debug)]
pub(super) struct Partition {
    /// The next offset to read; `None` if nothing was read yet.
    next: Option<i64>,
    /// The last end of the partition that the consumer has reported: everything before it is read. Transaction markers and
    /// aborted records, which the consumer does not return, can make it higher than `next`. `None` if the consumer has not
    /// reported an end since the partition is followed.
    reached: Option<i64>,
    /// Whether the consumer has returned a record or an end since the partition is followed. It reports no end while records arrive all the time.
    has_answered: bool,
    low_watermark: i64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Its bounds are unknown, because its leader did not answer the last survey.
    Leaderless {
        /// Whether an earlier survey has found its bounds.
        is_followed: bool,
    },
    /// Something before its end was not read since it is followed.
    Reading(Progress),
    /// Everything before its end was read. New records are read as they arrive.
    Current(Progress),
    /// Kafka refuses to let it be read.
    Refused {
        error: Arc<str>,
        /// The number of surveys since.
        surveys: u32,
    },
}

#[derive(Debug)]
struct Progress {
    /// The end to reach.
    target: i64,
    /// How far the partition was read at the last survey.
    read: i64,
    /// The number of surveys without progress.
    idle_surveys: u32,
}

impl Progress {
    fn new(target: i64) -> Self {
        Self {
            target,
            read: -1,
            idle_surveys: 0,
        }
    }
}

/// What a survey found out about a partition, and about its reader.
#[derive(Clone, Copy, Debug)]
pub(super) struct Observation {
    /// `None` if the leader did not answer.
    pub(super) extent: Option<Extent>,
    /// Whether the end becomes the target of a partition that has reached its previous one.
    pub(super) sets_target: bool,
    /// Whether the partition had its turn to return records since the last survey.
    pub(super) had_turn: bool,
}

/// What the reader has to do for a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Step {
    /// Follow it from this offset, or from the beginning.
    pub(super) follow: Option<Option<i64>>,
    /// Records below this offset do not exist any more.
    pub(super) trim: Option<i64>,
    /// It has unread records and makes no progress.
    pub(super) is_stalled: bool,
}

impl Partition {
    /// A partition that is not followed yet, with its position in the index.
    pub(super) fn new(next: Option<i64>) -> Self {
        Self {
            next,
            reached: None,
            has_answered: false,
            low_watermark: 0,
            state: State::Leaderless { is_followed: false },
        }
    }

    /// A partition that is followed from its beginning, because its topic was created again.
    pub(super) fn started_over() -> Self {
        Self {
            state: State::Reading(Progress::new(i64::MAX)),
            ..Self::new(None)
        }
    }

    pub(super) fn observe(&mut self, observation: Observation) -> Step {
        let mut step = Step::default();
        let Some(extent) = observation.extent else {
            match &self.state {
                State::Reading(_) | State::Current(_) => self.state = State::Leaderless { is_followed: true },
                State::Leaderless { .. } | State::Refused { .. } => {}
            }
            return step;
        };
        if extent.low > self.low_watermark {
            self.low_watermark = extent.low;
            step.trim = Some(extent.low);
        }
        let (read, is_confirmed) = (self.read_up_to(), self.has_answered);
        match &mut self.state {
            State::Leaderless { is_followed } => {
                if !*is_followed {
                    step.follow = Some(self.next);
                }
                self.state = State::Reading(Progress::new(extent.end));
            }
            State::Reading(progress) => {
                // With an earlier target, the partition could become current without what came before a later survey.
                progress.target = extent.end;
                step.is_stalled = progress.is_stalled(read, extent.end, is_confirmed, observation.had_turn);
            }
            State::Current(progress) => {
                if observation.sets_target {
                    progress.target = extent.end;
                }
                // The topic may have been created again, with fewer records.
                progress.target = progress.target.min(extent.end);
                step.is_stalled = progress.is_stalled(read, extent.end, is_confirmed, observation.had_turn);
            }
            State::Refused { surveys, .. } => {
                *surveys += 1;
                if *surveys >= SURVEYS_UNTIL_RETRIED {
                    *surveys = 0;
                    step.follow = Some(self.next);
                }
            }
        }
        self.settle();
        step
    }

    /// Whether an offset is not before the position. If so, the position advances past it.
    pub(super) fn arrived(&mut self, offset: i64) -> bool {
        if self.next.is_some_and(|next| offset < next) {
            return false;
        }
        self.next = Some(offset + 1);
        self.has_answered = true;
        self.set_readable();
        self.settle();
        true
    }

    /// Everything before an offset is read, which is the end of the partition as far as its broker knows.
    pub(super) fn reached_end(&mut self, offset: i64) {
        self.reached = self.reached.max(Some(offset));
        self.has_answered = true;
        self.set_readable();
        self.settle();
    }

    pub(super) fn refused(&mut self, error: &str) {
        let surveys = match &self.state {
            State::Refused { surveys, .. } => *surveys,
            State::Leaderless { .. } | State::Reading(_) | State::Current(_) => 0,
        };
        // An answer from before says nothing about what can be read now.
        self.reached = None;
        self.has_answered = false;
        self.state = State::Refused {
            error: error.into(),
            surveys,
        };
    }

    /// Whether a record was read.
    pub(super) fn has_read(&self) -> bool {
        self.next.is_some()
    }

    /// Whether the consumer follows it.
    pub(super) fn is_followed(&self) -> bool {
        !matches!(self.state, State::Leaderless { is_followed: false })
    }

    /// Notes that the consumer got an answer.
    fn set_readable(&mut self) {
        if matches!(self.state, State::Refused { .. }) {
            // The next survey sets the target.
            self.state = State::Reading(Progress::new(i64::MAX));
        }
    }

    fn settle(&mut self) {
        let read = self.read_up_to();
        if let State::Reading(progress) = &self.state
            && self.has_answered
            && read >= progress.target
        {
            self.state = State::Current(Progress::new(progress.target));
        }
    }

    /// The offset up to which everything is read.
    pub(super) fn read_up_to(&self) -> i64 {
        let next = self.next.unwrap_or(self.low_watermark).max(0);
        self.reached.map_or(next, |reached| next.max(reached))
    }

    pub(super) fn low_watermark(&self) -> i64 {
        self.low_watermark
    }

    /// Why the index does not contain the partition; `None` if it does, up to the target.
    pub(super) fn missing(&self) -> Option<Reason> {
        match &self.state {
            State::Leaderless { .. } => Some(Reason::NoLeader),
            State::Reading(_) => Some(Reason::NotRead),
            State::Current(_) => None,
            State::Refused { error, .. } => Some(Reason::Refused(error.clone())),
        }
    }

    /// Whether something before its end is not read yet.
    pub(super) fn is_reading(&self) -> bool {
        matches!(self.state, State::Reading(_))
    }

    /// Whether the partition is read up to the target, or is missing.
    pub(super) fn is_at_target(&self) -> bool {
        match &self.state {
            State::Current(progress) => self.read_up_to() >= progress.target,
            State::Leaderless { .. } | State::Reading(_) | State::Refused { .. } => true,
        }
    }

    pub(super) fn lag(&self, end: i64) -> u64 {
        u64::try_from(end - self.read_up_to()).unwrap_or(0)
    }
}

impl Progress {
    /// Compares how far the partition is read with the last survey. After a stall, counting begins again.
    ///
    /// `is_confirmed`: whether the consumer has returned a record or an end. Until then, a partition at its end waits for it, too.
    fn is_stalled(&mut self, read: i64, end: i64, is_confirmed: bool, had_turn: bool) -> bool {
        if self.read != read || (read >= end && is_confirmed) {
            self.idle_surveys = 0;
        } else if had_turn {
            self.idle_surveys += 1;
        }
        self.read = read;
        let is_stalled = self.idle_surveys >= SURVEYS_UNTIL_STALLED;
        if is_stalled {
            self.idle_surveys = 0;
        }
        is_stalled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What happens to a partition.
    #[derive(Clone, Copy, Debug)]
    enum Event {
        Survey(i64),
        NoLeader,
        Record(i64),
        End(i64),
        Refused,
    }

    use Event::{End, NoLeader, Record, Refused, Survey};

    fn observation(end: i64) -> Observation {
        Observation {
            extent: Some(Extent { low: 0, end }),
            sets_target: true,
            had_turn: true,
        }
    }

    fn apply(partition: &mut Partition, event: Event) -> Step {
        match event {
            Survey(end) => return partition.observe(observation(end)),
            NoLeader => {
                return partition.observe(Observation {
                    extent: None,
                    ..observation(0)
                });
            }
            Record(offset) => assert!(partition.arrived(offset)),
            End(offset) => partition.reached_end(offset),
            Refused => partition.refused("denied"),
        }
        Step::default()
    }

    fn after(next: Option<i64>, events: &[Event]) -> Partition {
        let mut partition = Partition::new(next);
        for event in events {
            apply(&mut partition, *event);
        }
        partition
    }

    #[test]
    fn unread_or_refused_partition_is_missing() {
        let denied = || Some(Reason::Refused("denied".into()));
        for (next, events, missing) in [
            (None, &[][..], Some(Reason::NoLeader)),
            (None, &[NoLeader], Some(Reason::NoLeader)),
            (None, &[Survey(3)], Some(Reason::NotRead)),
            (None, &[Survey(3), Record(0), Record(1)], Some(Reason::NotRead)),
            // While records arrive all the time, no end is reported. A marker may be before the end that a survey found.
            (None, &[Survey(3), Record(0), Record(2)], None),
            (
                Some(5),
                &[Survey(8), Record(6), Survey(10)],
                Some(Reason::NotRead),
            ),
            (Some(5), &[Survey(8), Record(6), Survey(10), Record(10)], None),
            (None, &[Survey(3), Record(2), End(3)], None),
            // A broker that has just become the leader does not know the last records yet.
            (None, &[Survey(3), Record(1), End(2)], Some(Reason::NotRead)),
            (None, &[Survey(3), Record(1), End(2), Record(2), End(3)], None),
            // Only aborted records and markers, or nothing at all.
            (None, &[Survey(3), End(3)], None),
            (None, &[Survey(0), End(0)], None),
            // Nothing is new, but the consumer has to confirm that it can read.
            (Some(3), &[Survey(3)], Some(Reason::NotRead)),
            (Some(3), &[Survey(3), End(3)], None),
            // The end that a survey found earlier than the consumer.
            (None, &[Survey(9), End(3), Survey(3)], None),
            // New records of a partition that was read to its end.
            (None, &[Survey(3), End(3), Survey(5)], None),
            (None, &[Survey(3), End(3), NoLeader], Some(Reason::NoLeader)),
            (None, &[Survey(3), End(3), NoLeader, Survey(3)], None),
            (
                None,
                &[Survey(3), End(3), NoLeader, Survey(4)],
                Some(Reason::NotRead),
            ),
            (None, &[Survey(3), Refused], denied()),
            (None, &[Survey(3), End(3), Refused], denied()),
            // A survey only needs the right to describe a topic.
            (None, &[Survey(3), Refused, Survey(3)], denied()),
            (None, &[Survey(3), Refused, NoLeader], denied()),
            (None, &[Survey(3), Refused, Record(0)], Some(Reason::NotRead)),
            (None, &[Survey(3), Refused, Record(2), End(3), Survey(3)], None),
            (None, &[Survey(3), End(3), Refused, End(3), Survey(3)], None),
        ] {
            assert_eq!(after(next, events).missing(), missing, "{next:?} {events:?}");
        }
    }

    #[test]
    fn refused_partition_is_followed_again() {
        let mut partition = Partition::new(Some(7));
        assert_eq!(apply(&mut partition, NoLeader).follow, None);
        assert_eq!(apply(&mut partition, Survey(9)).follow, Some(Some(7)));
        assert_eq!(apply(&mut partition, Survey(9)).follow, None);
        apply(&mut partition, NoLeader);
        assert_eq!(apply(&mut partition, Survey(9)).follow, None);
        apply(&mut partition, Record(7));
        apply(&mut partition, Refused);
        let followed: Vec<_> = (0..2 * SURVEYS_UNTIL_RETRIED)
            .filter_map(|number| Some((number, apply(&mut partition, Survey(9)).follow?)))
            .collect();
        assert_eq!(followed, [(4, Some(8)), (9, Some(8))]);
    }

    #[test]
    fn unread_records_without_progress_stall() {
        let stalls = |events: &[Event], repeated: &[Event]| {
            let mut partition = after(None, events);
            let mut steps = (0..8).flat_map(|_| repeated).enumerate();
            steps.any(|(_, event)| apply(&mut partition, *event).is_stalled)
        };
        // A fetch hangs.
        assert!(stalls(&[Survey(10), Record(8)], &[Survey(10)]));
        assert!(stalls(&[Survey(10), End(10)], &[Survey(12)]));
        // The consumer never reports the end, so that the partition would be missing forever.
        assert!(stalls(&[Survey(0)], &[Survey(0)]));
        assert!(!stalls(&[Survey(10), Record(9)], &[Survey(10)]));
        assert!(!stalls(&[Survey(0), End(0)], &[Survey(0)]));
        // Everything is read: the last offsets are transaction markers.
        assert!(!stalls(&[Survey(10), Record(8), End(10)], &[Survey(10)]));
        // Kafka refuses: a new consumer would not help, and would disturb all others.
        assert!(!stalls(&[Survey(10), Refused], &[Survey(10)]));
        assert!(!stalls(&[Survey(10)], &[NoLeader]));
    }

    #[test]
    fn markers_of_aborted_transactions_are_progress() {
        // Each survey finds another aborted transaction, which the consumer has not read yet.
        let mut partition = after(None, &[Survey(10), Record(8), End(10)]);
        for end in (12..60).step_by(2) {
            assert!(!apply(&mut partition, Survey(end)).is_stalled, "{end}");
            apply(&mut partition, End(end));
        }
    }

    #[test]
    fn waiting_for_turn_is_no_stall() {
        let mut partition = after(None, &[Survey(10)]);
        let waiting = Observation {
            had_turn: false,
            ..observation(10)
        };
        assert!((0..100).all(|_| !partition.observe(waiting).is_stalled));
    }

    #[test]
    fn target_is_kept_until_replaceable() {
        let mut partition = after(None, &[Survey(10), End(10)]);
        assert!(partition.is_at_target());
        apply(&mut partition, Survey(12));
        assert!(!partition.is_at_target());
        // A later survey of a busy topic does not move the target away.
        let later = Observation {
            sets_target: false,
            ..observation(20)
        };
        partition.observe(later);
        apply(&mut partition, Record(11));
        assert!(partition.is_at_target());
        assert_eq!(partition.lag(20), 8);
    }
}
