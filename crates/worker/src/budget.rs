//! The records in flight of lanes that share one limit.
//!
//! Each topic of a pipeline has its own lane, and the limits `in_flight` and `in_flight_bytes` apply to both lanes
//! together. A lane may use what the other does not need: only the use of a lane shows what it needs, so a lane leaves
//! the other one room to grow beyond its current use, until both have their fair part. No lane waits for the other: a
//! lane that uses less than its reserve always accepts records.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Records in flight, or their limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InFlight {
    pub(crate) records: usize,
    /// Bytes of records and of their results. The limit may be exceeded by one record of each lane, by results, whose size is
    /// known only after the attempt, and by the records of an aborted transaction: while it was being written, others took
    /// their place.
    pub(crate) bytes: usize,
}

#[derive(Debug, Default)]
struct Used {
    records: AtomicUsize,
    bytes: AtomicUsize,
}

#[derive(Debug)]
struct Budget {
    limit: InFlight,
    /// By lane. Only the lane itself writes its entry.
    used: Vec<Used>,
}

/// The records in flight of one lane, and what the lanes of its budget use together.
#[derive(Debug)]
pub(crate) struct BudgetShare {
    budget: Arc<Budget>,
    lane: usize,
    own: InFlight,
}

impl BudgetShare {
    /// One share for each of the lanes that have this limit together.
    pub(crate) fn split(limit: InFlight, lanes: usize) -> Vec<Self> {
        let used = (0..lanes).map(|_| Used::default()).collect();
        let budget = Arc::new(Budget { limit, used });
        let share = |lane| Self {
            budget: budget.clone(),
            lane,
            own: InFlight::default(),
        };
        (0..lanes).map(share).collect()
    }

    /// What this lane has in flight.
    pub(crate) fn own(&self) -> InFlight {
        self.own
    }

    /// The limit of all lanes together.
    pub(crate) fn limit(&self) -> InFlight {
        self.budget.limit
    }

    /// How many more records this lane may accept now. The lanes read each other's use without a lock, so they may
    /// exceed the limit by a record for a moment.
    pub(crate) fn capacity(&self) -> usize {
        let limit = self.budget.limit;
        let lanes = self.budget.used.len();
        let bytes = self.others(|used| &used.bytes);
        if room(limit.bytes, lanes, self.own.bytes, bytes) == 0 {
            return 0;
        }
        let records = self.others(|used| &used.records);
        room(limit.records, lanes, self.own.records, records)
    }

    fn others(&self, count: impl Fn(&Used) -> &AtomicUsize) -> impl Iterator<Item = usize> {
        let (before, rest) = self.budget.used.split_at(self.lane);
        let others = before.iter().chain(rest.iter().skip(1));
        others.map(move |used| count(used).load(Ordering::Relaxed))
    }

    pub(crate) fn add(&mut self, added: InFlight) {
        self.own.records += added.records;
        self.own.bytes += added.bytes;
        self.publish();
    }

    pub(crate) fn remove(&mut self, removed: InFlight) {
        self.own.records -= removed.records;
        self.own.bytes -= removed.bytes;
        self.publish();
    }

    fn publish(&self) {
        let used = &self.budget.used[self.lane];
        used.records.store(self.own.records, Ordering::Relaxed);
        used.bytes.store(self.own.bytes, Ordering::Relaxed);
    }
}

/// How much more one of several lanes may use of a limit, from its own use and that of each other lane.
fn room(limit: usize, lanes: usize, own: usize, others: impl Iterator<Item = usize>) -> usize {
    let fair = limit / lanes;
    let reserve = (fair / RESERVES_PER_PART).max(1);
    let keep = |other: usize| other.max(fair.min(other + reserve));
    let kept: usize = others.map(keep).sum();
    // The reserve may exceed the limit, if others hold results that are larger than expected or if the limit is less than
    // a record per lane.
    limit.saturating_sub(own + kept).max(reserve.saturating_sub(own))
}

/// A quarter of a lane's fair part is its reserve. A smaller reserve would leave more to a lane whose topic is the only
/// busy one, and a lane that becomes busy would reach its fair part later.
const RESERVES_PER_PART: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(records: usize, bytes: usize) -> [BudgetShare; 2] {
        BudgetShare::split(InFlight { records, bytes }, 2)
            .try_into()
            .unwrap()
    }

    const ONE: InFlight = InFlight { records: 1, bytes: 1 };

    /// Accepts as many records as the share has capacity for, at most `count`, and returns their number.
    fn accept(share: &mut BudgetShare, count: usize) -> usize {
        let accepted = (0..count).take_while(|_| {
            let has_room = share.capacity() > 0;
            if has_room {
                share.add(ONE);
            }
            has_room
        });
        accepted.count()
    }

    #[test]
    fn single_lane_has_the_whole_limit() {
        let mut shares = BudgetShare::split(
            InFlight {
                records: 8,
                bytes: 100,
            },
            1,
        );
        assert_eq!(accept(&mut shares[0], 100), 8);
        shares[0].add(InFlight {
            records: 0,
            bytes: 92,
        });
        shares[0].remove(ONE);
        assert_eq!(shares[0].capacity(), 1);
        shares[0].add(ONE);
        assert_eq!(shares[0].capacity(), 0);
    }

    #[test]
    fn busy_lane_leaves_idle_reserve() {
        let [mut source, mut due] = shares(800, usize::MAX);
        assert_eq!(accept(&mut source, 10_000), 700);
        assert_eq!(accept(&mut due, 10_000), 100);
        let [mut source, mut due] = shares(800, usize::MAX);
        assert_eq!(accept(&mut due, 10_000), 700);
        assert_eq!(accept(&mut source, 10_000), 100);
    }

    #[test]
    fn busy_lanes_reach_equal_parts() {
        for first in [0, 1] {
            let mut shares = shares(800, usize::MAX);
            assert_eq!(accept(&mut shares[first], 10_000), 700);
            // Records complete one at a time, at random, and each lane accepts as many as it may.
            let mut random = fastrand::Rng::with_seed(7);
            for _ in 0..5_000 {
                let completes = usize::from(random.bool());
                if shares[completes].own().records > 0 {
                    shares[completes].remove(ONE);
                }
                for share in &mut shares {
                    accept(share, 10_000);
                }
            }
            let parts = shares.each_ref().map(|share| share.own().records);
            assert_eq!(parts, [400, 400]);
        }
    }

    #[test]
    fn slow_lane_leaves_its_part() {
        let [mut source, mut due] = shares(800, usize::MAX);
        assert_eq!(accept(&mut due, 50), 50);
        assert_eq!(accept(&mut source, 10_000), 650);
        // It can grow at once.
        assert_eq!(accept(&mut due, 10_000), 100);
    }

    #[test]
    fn limit_holds_and_lanes_progress() {
        for lanes in 1..=3 {
            for limit in lanes..40 {
                let limits = InFlight {
                    records: limit,
                    bytes: usize::MAX,
                };
                let mut shares = BudgetShare::split(limits, lanes);
                let mut random = fastrand::Rng::with_seed(limit as u64);
                for _ in 0..2_000 {
                    let lane = random.usize(..lanes);
                    if random.bool() {
                        let count = random.usize(..=limit);
                        accept(&mut shares[lane], count);
                    } else if shares[lane].own().records > 0 {
                        shares[lane].remove(ONE);
                    }
                    let total: usize = shares.iter().map(|share| share.own().records).sum();
                    assert!(total <= limit, "{total} of {limit}: {shares:?}");
                    let mut idle = shares.iter().filter(|share| share.own().records == 0);
                    assert!(idle.all(|share| share.capacity() > 0), "{shares:?}");
                }
            }
        }
    }

    #[test]
    fn each_lane_has_one_record() {
        let [mut source, mut due] = shares(1, usize::MAX);
        assert_eq!(accept(&mut source, 10), 1);
        assert_eq!(accept(&mut due, 10), 1);
    }

    #[test]
    fn large_results_stop_no_other_lane() {
        let [mut source, due] = shares(800, 8_000);
        source.add(InFlight {
            records: 1,
            bytes: 20_000,
        });
        assert_eq!(source.capacity(), 0);
        assert!(due.capacity() > 0);
    }
}
