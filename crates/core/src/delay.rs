//! Delays that are chosen at random, and how the random choice fits a tier.
//!
//! A partition of a tier is read in order, with a limited look-ahead, so its records must be nearly in the order of their
//! due times. Delays that differ widely within a partition would fill the look-ahead with records that are due late, and
//! delay the others behind them. So the partitions of a tier share the range of delays: each has its own part of it, of
//! which it uses at most [`WINDOW`]. The choice of the partition is the random choice of the delay. A larger
//! look-ahead would take memory for whole records: 5,000/s in a tier of 1 min need 150,000 of them.

use std::time::Duration;

use crate::human_duration::HumanDuration;

/// The maximum difference between random delays in one partition of a tier. A record cannot be late by more than that because
/// of another record's random delay, and is not late at all while the look-ahead holds half of the records that arrive in
/// this time.
pub const WINDOW: Duration = Duration::from_secs(1);

/// A range of delays, from which one is chosen at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DelayRange {
    /// The delay without randomness, which decides in which tier a record waits.
    pub nominal: HumanDuration,
    /// The minimum.
    pub min: HumanDuration,
    /// The maximum.
    pub max: HumanDuration,
}

impl DelayRange {
    /// Exactly this delay.
    #[must_use]
    pub fn exactly(delay: HumanDuration) -> Self {
        Self {
            nominal: delay,
            min: delay,
            max: delay,
        }
    }

    /// The same range, cut off at a maximum.
    #[must_use]
    pub fn at_most(self, limit: HumanDuration) -> Self {
        Self {
            nominal: self.nominal.min(limit),
            min: self.min.min(limit),
            max: self.max.min(limit),
        }
    }

    /// Whether there is more than one delay to choose from.
    #[must_use]
    pub fn is_random(self) -> bool {
        self.min < self.max
    }

    /// Any delay of the range. `random` is a number from 0 to 1.
    #[must_use]
    pub fn anywhere(self, random: f64) -> HumanDuration {
        let added = self.width().mul_f64(random.clamp(0.0, 1.0));
        HumanDuration::from(self.min.duration() + added).min(self.max)
    }

    /// A delay for a record in a tier whose topic has this many partitions, at least 1, and the partition in which the record
    /// has to wait. `random` is a number from 0 to 1.
    ///
    /// The range is divided into as many parts as there are partitions, and a delay is less than [`WINDOW`] below the upper
    /// end of its part.
    #[must_use]
    pub fn in_tier(self, partitions: u32, random: f64) -> (HumanDuration, i32) {
        let partitions = partitions.clamp(1, i32::MAX.unsigned_abs());
        let scaled = random.clamp(0.0, 1.0) * f64::from(partitions);
        let last = partitions - 1;
        // A conversion of a float rounds towards 0.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "from 0 to the number of partitions, and limited to the last one"
        )]
        let partition = (scaled as u32).min(last);
        let within = scaled - f64::from(partition);
        let part = self.width() / partitions;
        let window = part.min(WINDOW);
        // The last part ends exactly with the range, whatever the division rounds off.
        let end = self.max.duration() - part * (last - partition);
        let delay = HumanDuration::from(end.saturating_sub(window.mul_f64(within)));
        let partition = i32::try_from(partition).expect("limited above");
        (delay.clamp(self.min, self.max), partition)
    }

    fn width(self) -> Duration {
        self.max.duration().saturating_sub(self.min.duration())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn range(min: u64, max: u64) -> DelayRange {
        DelayRange {
            nominal: HumanDuration::from_millis(max),
            min: HumanDuration::from_millis(min),
            max: HumanDuration::from_millis(max),
        }
    }

    #[test]
    fn partitions_divide_the_range() {
        let range = range(0, 60_000);
        let chosen = |random| {
            let (delay, partition) = range.in_tier(4, random);
            (delay.as_millis(), partition)
        };
        assert_eq!(chosen(0.0), (15_000, 0));
        assert_eq!(chosen(0.125), (14_500, 0));
        assert_eq!(chosen(0.25), (30_000, 1));
        assert_eq!(chosen(0.625), (44_500, 2));
        assert_eq!(chosen(0.75), (60_000, 3));
        assert_eq!(chosen(1.0), (59_000, 3));
    }

    #[test]
    fn short_parts_cover_the_range() {
        let range = range(500, 1_000);
        let mut millis: Vec<u64> = (0_u32..5_000)
            .map(|step| range.in_tier(5, f64::from(step) / 5_000.0).0.as_millis())
            .collect();
        millis.sort_unstable();
        millis.dedup();
        assert_eq!(millis, (501..=1_000).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn delays_differ_within_the_window(
            min in 0_u64..1_000_000, width in 0_u64..10_000_000, partitions in 0_u32..200,
            randoms in proptest::collection::vec(0.0_f64..=1.0, 1..200),
        ) {
            let range = range(min, min + width);
            let mut bounds: BTreeMap<i32, (HumanDuration, HumanDuration)> = BTreeMap::new();
            for random in randoms {
                let (delay, partition) = range.in_tier(partitions, random);
                prop_assert!((range.min..=range.max).contains(&delay), "{delay}");
                prop_assert!((0..i32::try_from(partitions.max(1)).unwrap()).contains(&partition), "{partition}");
                let (low, high) = bounds.entry(partition).or_insert((delay, delay));
                (*low, *high) = ((*low).min(delay), (*high).max(delay));
            }
            for (low, high) in bounds.values() {
                prop_assert!(high.duration() - low.duration() <= WINDOW, "{low} to {high}");
            }
            // A later partition has longer delays.
            let ends: Vec<_> = bounds.values().collect();
            prop_assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].1));
        }

        #[test]
        fn any_delay_is_within_the_range(min in 0_u64..1_000_000, width in 0_u64..1_000_000, random in -1.0_f64..=2.0) {
            let range = range(min, min + width);
            prop_assert!((range.min..=range.max).contains(&range.anywhere(random)));
        }
    }
}
