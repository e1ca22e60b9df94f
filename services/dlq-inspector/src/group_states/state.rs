//! Which state follows from a decision and the dead letters of a group.
//!
//! REGRESSED is not stored. It follows from the times of the decision and of the last dead letter, so that all inspectors agree, and also
//! one with a rebuilt index. The time of a dead letter is the timestamp of its record: a dead letter that is copied with its timestamp,
//! or indexed again, is as old as before.

use redeliver_core::Timestamp;

/// The state of a group. The protocol has these numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GroupState {
    /// Nobody has decided anything, it was opened again, or the time for which it was muted is over.
    #[default]
    Open = 1,
    /// The reason is gone.
    Resolved = 2,
    /// It is known and wanted.
    Muted = 3,
    /// It was resolved, and a dead letter was written since.
    Regressed = 4,
}

impl GroupState {
    /// All states.
    pub const ALL: [Self; 4] = [Self::Open, Self::Resolved, Self::Muted, Self::Regressed];

    /// The name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Resolved => "resolved",
            Self::Muted => "muted",
            Self::Regressed => "regressed",
        }
    }
}

/// What somebody has decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decided {
    /// It is open again.
    Open,
    /// The reason is gone.
    Resolved,
    /// It is in no alert about groups until this time; `None`: until somebody changes it.
    Muted(Option<Timestamp>),
}

/// What somebody has decided, and when, who and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What.
    pub decided: Decided,
    /// When.
    pub time: Timestamp,
    /// Of a resolution: the time up to which dead letters are resolved, if it is another one.
    pub resolved_until: Option<Timestamp>,
    /// The name of the caller.
    pub by: String,
    /// Why, in the words of the caller.
    pub why: String,
}

impl Decision {
    /// The time up to which dead letters are resolved.
    pub(crate) fn resolved_until(&self) -> Timestamp {
        self.resolved_until.unwrap_or(self.time)
    }

    /// The state of a group with this decision. `last` is the time of its last dead letter, whatever was done with it; `None` if there is
    /// none.
    #[must_use]
    pub fn state(&self, last: Option<Timestamp>, now: Timestamp) -> GroupState {
        match self.decided {
            Decided::Open => GroupState::Open,
            Decided::Resolved if last > Some(self.resolved_until()) => GroupState::Regressed,
            Decided::Resolved => GroupState::Resolved,
            Decided::Muted(until) if until.is_none_or(|until| now < until) => GroupState::Muted,
            Decided::Muted(_) => GroupState::Open,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn decision(decided: Decided, time: i64) -> Decision {
        Decision {
            decided,
            time: at(time),
            resolved_until: None,
            by: String::new(),
            why: String::new(),
        }
    }

    #[test]
    fn later_letter_makes_group_regressed() {
        let resolved = decision(Decided::Resolved, 100);
        for (last, expected) in [
            (None, GroupState::Resolved),
            (Some(at(-5)), GroupState::Resolved),
            (Some(at(100)), GroupState::Resolved),
            (Some(at(101)), GroupState::Regressed),
        ] {
            assert_eq!(resolved.state(last, at(0)), expected, "{last:?}");
        }
    }

    #[test]
    fn group_is_muted_until_its_end() {
        let (later, now) = (Some(at(1_000)), at(150));
        let muted = |until| decision(Decided::Muted(until), 100).state(later, now);
        assert_eq!(muted(None), GroupState::Muted);
        assert_eq!(muted(Some(at(151))), GroupState::Muted);
        assert_eq!(muted(Some(at(150))), GroupState::Open);
        assert_eq!(decision(Decided::Open, 100).state(later, now), GroupState::Open);
    }

    fn any_decided() -> impl Strategy<Value = Decided> {
        prop_oneof![
            Just(Decided::Open),
            Just(Decided::Resolved),
            prop::option::of(-50_i64..50).prop_map(|until| Decided::Muted(until.map(at))),
        ]
    }

    proptest! {
        /// In whichever order dead letters are indexed, and whichever of them were removed, the state is the one that
        /// those which are left say.
        #[test]
        fn state_ignores_order_of_indexing(
            decided in any_decided(),
            time in -50_i64..50,
            letters in prop::collection::vec(-50_i64..50, 0..10),
            now in -50_i64..50,
        ) {
            let decision = decision(decided, time);
            let last = letters.iter().copied().max().map(at);
            let mut indexed: Option<Timestamp> = None;
            for letter in &letters {
                indexed = indexed.max(Some(at(*letter)));
            }
            let state = decision.state(indexed, at(now));
            prop_assert_eq!(state, decision.state(last, at(now)));
            let has_later_one = letters.iter().any(|letter| *letter > time);
            prop_assert_eq!(state == GroupState::Regressed, decided == Decided::Resolved && has_later_one);
            let is_muted = matches!(decided, Decided::Muted(until) if until.is_none_or(|until| at(now) < until));
            prop_assert_eq!(state == GroupState::Muted, is_muted);
        }
    }
}
