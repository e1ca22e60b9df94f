//! A model test of [`LaneState`](super::state::LaneState).
//!
//! Random histories drive the state of a lane against a model of a broker that knows transactions, generations of a group,
//! and a peer that processes what the lane does not own. Rebalances, evictions, failed transactions, unknown outcomes, lost
//! sessions, slow and late results and failed lookups come in any order. After each history everything that was held up
//! continues, and each record must have been written exactly once. A failing history is reduced to a minimal one.

mod processor;
mod world;

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use world::World;

/// Number of partitions of the model topic.
pub(super) const PARTITIONS: i32 = 3;

/// What happens to the lane between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// The lane takes this many steps.
    Steps(u8),
    /// Records are written to a partition, each after a gap of this many offsets.
    Produce { partition: i32, records: u8, gap: u8 },
    /// The group assigns exactly these partitions to the lane, as a bit set. The lane learns of it at its next poll.
    Rebalance(u8),
    /// The group has moved all partitions to the peer while the lane was frozen.
    Evict,
    /// The group removes the lane while it rejoins, the peer processes this many records of each partition, and the lane gets
    /// back what it had. The client reports no revocation.
    Replace(u8),
    /// How the next transactions end.
    Outcomes(Outcome, u8),
    /// This many attempts of the handler finish, the latest first or the earliest first.
    Finish { records: u8, latest_first: bool },
    /// Lookups are answered like this from now on.
    Lookups(Answer),
    /// The next initialisation of the producers fails.
    FailInit,
    /// The next seek fails.
    FailStart,
    /// The peer processes records of its partitions.
    PeerWork(u8),
    /// The session ends, and the lane begins another one.
    Break,
    /// The handler returns the result of an earlier assignment.
    LateResult,
    /// The processor writes something on behalf of a partition without completing a record.
    Owner(i32),
    /// Time passes.
    Wait(u16),
    /// The lane is told to stop, and does so. If the broker is frozen, a transaction that is being written does not end before
    /// the grace period. Another process continues.
    Stop { is_frozen: bool },
}

impl Op {
    /// Whether records may be processed again although their transactions were only aborted.
    pub(super) fn may_repeat_calls(self) -> bool {
        matches!(
            self,
            Self::Rebalance(_)
                | Self::Evict
                | Self::Replace(_)
                | Self::Break
                | Self::Stop { .. }
                | Self::LateResult
                | Self::Owner(_)
        )
    }
}

/// The end of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Committed,
    Aborted,
    TimedOut,
    /// The broker refuses the first output.
    Refused,
    /// The topic of an output is missing or cannot be written.
    Unavailable,
    /// The lane may not write to the topic of the first output.
    Denied,
    /// Another process initialised a producer with the same id.
    Fenced,
    /// The commit succeeded, but the answer was lost.
    UnknownCommitted,
    /// The commit request was lost.
    UnknownAborted,
    /// The transaction stays open until the producers are initialised. The flag tells whether it is committed then.
    UnknownOpen(bool),
}

/// The answer to a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// At the next poll.
    AtOnce,
    /// Not until this changes.
    Never,
    /// The broker does not answer.
    Unanswered,
    /// The position of this partition is unstable.
    Unstable(i32),
}

/// A small generator of random numbers (SplitMix64), so that a history depends on nothing but its seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: u8) -> u8 {
        u8::try_from(self.next() % u64::from(end)).unwrap()
    }
}

fn random_op(random: &mut Random) -> Op {
    let partition = |random: &mut Random| i32::from(random.below(3));
    match random.below(32) {
        0..=9 => Op::Steps(1 + random.below(12)),
        10..=12 => Op::Produce {
            partition: partition(random),
            records: 1 + random.below(6),
            gap: random.below(3),
        },
        13..=17 => Op::Finish {
            records: 1 + random.below(8),
            latest_first: random.below(2) == 0,
        },
        18..=19 => Op::Rebalance(random.below(8)),
        20 => Op::Evict,
        21..=24 => {
            let outcome = match random.below(11) {
                0 => Outcome::Committed,
                1 => Outcome::Aborted,
                2 => Outcome::TimedOut,
                3 => Outcome::Refused,
                4 => Outcome::Unavailable,
                5 => Outcome::Fenced,
                6 => Outcome::UnknownCommitted,
                7 => Outcome::UnknownAborted,
                8 => Outcome::Denied,
                _ => Outcome::UnknownOpen(random.below(2) == 0),
            };
            Op::Outcomes(outcome, 1 + random.below(4))
        }
        25 => Op::Lookups(match random.below(6) {
            0 => Answer::Never,
            1 => Answer::Unanswered,
            2 => Answer::Unstable(partition(random)),
            _ => Answer::AtOnce,
        }),
        26 => match random.below(2) {
            0 => Op::FailInit,
            _ => Op::FailStart,
        },
        27 => Op::PeerWork(1 + random.below(6)),
        28 => Op::LateResult,
        29 => Op::Owner(partition(random)),
        30 => Op::Wait(u16::from(random.below(250)) * 20),
        _ => match random.below(4) {
            0 => Op::Break,
            1 => Op::Replace(random.below(4)),
            2 => Op::Stop {
                is_frozen: random.below(2) == 0,
            },
            _ => Op::Steps(40),
        },
    }
}

/// Runs a history and then lets everything finish. Returns the number of steps.
fn run(seed: u64, ops: &[Op]) -> Result<u64, String> {
    let run = || {
        let mut world = World::new(Random::new(seed));
        for op in ops {
            world.apply(*op)?;
        }
        world.settle()?;
        Ok(world.steps)
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(text
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("panic")
            .to_owned())
    })
}

/// Removes operations as long as the history still fails.
fn minimal(seed: u64, mut ops: Vec<Op>) -> Vec<Op> {
    let mut length = ops.len().div_ceil(2);
    while length > 0 {
        let mut start = 0;
        while start < ops.len() {
            let mut fewer = ops.clone();
            fewer.drain(start..(start + length).min(ops.len()));
            if run(seed, &fewer).is_err() {
                ops = fewer;
            } else {
                start += length;
            }
        }
        length /= 2;
    }
    ops
}

fn check(seed: u64, ops: Vec<Op>) -> u64 {
    match run(seed, &ops) {
        Ok(steps) => steps,
        Err(_) => {
            let ops = minimal(seed, ops);
            let problem = run(seed, &ops).expect_err("the reduced history fails");
            let mut history = String::new();
            for op in &ops {
                writeln!(history, "    Op::{op:?},").unwrap();
            }
            panic!("{problem}\nseed {seed}, minimal history:\n{history}");
        }
    }
}

#[test]
fn random_histories_write_exactly_once() {
    let mut steps = 0;
    let mut seed = 0;
    while steps < 1_000_000 {
        let mut random = Random::new(seed);
        let length = 5 + usize::from(random.below(200));
        let mut ops: Vec<Op> = (0..length).map(|_| random_op(&mut random)).collect();
        // In every fourth history nothing justifies to call the handler again.
        if seed % 4 == 0 {
            ops.retain(|op| !op.may_repeat_calls());
        }
        steps += check(seed, ops);
        seed += 1;
    }
}

/// A world in which the lane reads all partitions, with the results of aborted transactions taken back or not.
fn world(takes_back: bool) -> World {
    world_of(takes_back, false)
}

/// As [`world`], with batches that are outdated once a record was accepted or not.
fn world_of(takes_back: bool, outdates: bool) -> World {
    let is_wanted = |seed: &u64| {
        let mut random = Random::new(*seed);
        [takes_back, outdates] == [0; 2].map(|_| random.below(2) == 0)
    };
    let seed = (0..).find(is_wanted);
    let mut world = World::new(Random::new(seed.unwrap()));
    world.apply(Op::Steps(20)).unwrap();
    world
}

fn produce_and_finish(world: &mut World, records: u8) {
    let produce = |partition| Op::Produce {
        partition,
        records,
        gap: 0,
    };
    let finish = Op::Finish {
        records: 255,
        latest_first: false,
    };
    for op in [produce(0), produce(1), Op::Steps(200), finish] {
        world.apply(op).unwrap();
    }
}

#[test]
fn session_outwaits_transactions_of_dead_peers() {
    let mut world = world(true);
    world.apply(Op::Lookups(Answer::Unanswered)).unwrap();
    world.apply(Op::Rebalance(0)).unwrap();
    world.apply(Op::Steps(3)).unwrap();
    world.apply(Op::Rebalance(1)).unwrap();
    let began = world.elapsed();
    while world.ended_sessions == 0 {
        world.apply(Op::Steps(1)).unwrap();
    }
    // The default transaction timeout is 10 seconds.
    let waited = (world.elapsed() - began).as_secs();
    assert!((22..24).contains(&waited), "{waited}");
}

#[test]
fn revoked_lookup_keeps_the_session() {
    let mut world = world(true);
    for op in [
        Op::Rebalance(1),
        Op::Steps(3),
        Op::Lookups(Answer::Unanswered),
        Op::Rebalance(3),
        Op::Steps(5),
        Op::Rebalance(1),
        Op::Steps(5),
    ] {
        world.apply(op).unwrap();
    }
    for _ in 0..60 {
        world.apply(Op::Wait(1_000)).unwrap();
        world.apply(Op::Steps(10)).unwrap();
    }
    assert_eq!(world.ended_sessions, 0);
}

#[test]
fn repeatedly_fenced_lane_ends() {
    for (fencings, ended) in [(4, 0), (5, 1)] {
        let mut world = world(true);
        world.apply(Op::Outcomes(Outcome::Fenced, fencings)).unwrap();
        produce_and_finish(&mut world, 5);
        world.apply(Op::Steps(200)).unwrap();
        assert_eq!(world.ended_sessions, ended);
    }
}

#[test]
fn timed_out_batch_is_split() {
    for outcome in [Outcome::TimedOut, Outcome::Unavailable] {
        let mut world = world(true);
        world.apply(Op::Outcomes(outcome, 2)).unwrap();
        produce_and_finish(&mut world, 20);
        world.apply(Op::Steps(250)).unwrap();
        world.settle().unwrap();
        assert_eq!(world.sizes[..3], [40, 20, 16], "{outcome:?}");
    }
}

#[test]
fn failed_batch_is_taken_back() {
    for (outcome, count, first, sizes) in [
        // The first retry has the same batch.
        (Outcome::Aborted, 1, 10, &[10, 10, 10][..]),
        (Outcome::Aborted, 2, 10, &[10, 10, 20]),
        // The processor replaces an output of this one, and not of the other one.
        (Outcome::Denied, 1, 10, &[10, 10, 10]),
        (Outcome::Denied, 1, 9, &[9, 20]),
    ] {
        let finish = |records| Op::Finish {
            records,
            latest_first: false,
        };
        let mut world = world(true);
        world.apply(Op::Outcomes(outcome, count)).unwrap();
        let produce = Op::Produce {
            partition: 0,
            records: 20,
            gap: 0,
        };
        for op in [produce, Op::Steps(200), finish(first)] {
            world.apply(op).unwrap();
        }
        while world.sizes.len() < usize::from(count) {
            world.apply(Op::Steps(1)).unwrap();
        }
        world.apply(finish(20 - first)).unwrap();
        world.apply(Op::Steps(250)).unwrap();
        world.settle().unwrap();
        assert_eq!(world.sizes, sizes, "{outcome:?}");
    }
}

#[test]
fn outdated_batch_is_not_repeated() {
    for (outdates, sizes) in [(true, [10, 20]), (false, [10, 10])] {
        let produce = |records| Op::Produce {
            partition: 0,
            records,
            gap: 0,
        };
        let finish = Op::Finish {
            records: 10,
            latest_first: false,
        };
        let mut world = world_of(true, outdates);
        world.apply(Op::Outcomes(Outcome::Aborted, 1)).unwrap();
        for op in [produce(20), Op::Steps(200), finish] {
            world.apply(op).unwrap();
        }
        while !world.is_writing() {
            world.apply(Op::Steps(1)).unwrap();
        }
        for op in [produce(5), finish, Op::Steps(250)] {
            world.apply(op).unwrap();
        }
        world.settle().unwrap();
        assert_eq!(world.sizes[..2], sizes);
    }
}

#[test]
fn repeated_timeouts_give_up_the_batch() {
    let mut world = world(false);
    world.apply(Op::Outcomes(Outcome::TimedOut, 3)).unwrap();
    produce_and_finish(&mut world, 20);
    world.apply(Op::Steps(250)).unwrap();
    world.settle().unwrap();
    assert_eq!(world.sizes[..3], [40, 40, 40]);
    assert!(world.sizes[3] <= 16, "{:?}", world.sizes);
}

#[test]
fn hanging_transaction_ends_with_grace_period() {
    let mut world = world(true);
    produce_and_finish(&mut world, 5);
    while !world.is_writing() {
        world.apply(Op::Steps(1)).unwrap();
    }
    let began = world.elapsed();
    world.apply(Op::Stop { is_frozen: true }).unwrap();
    let waited = (world.elapsed() - began).as_secs_f64();
    assert!((10.0..10.5).contains(&waited), "{waited}");
    world.settle().unwrap();
}
