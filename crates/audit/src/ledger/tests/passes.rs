//! Audits in several passes, of which each gets only what is new: the same verdict as an audit of everything, at each moment.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use proptest::prelude::*;
use redeliver_core::headers::ORIGINAL_OFFSET;

use super::properties::{Defect, add_defect, defect, lives, order};
use super::world::{Location, Seen, World, defects};
use super::*;

/// A copy that is written at a moment, and completed at a later one.
#[derive(Clone, Debug)]
struct Copy {
    seen: Seen,
    written: usize,
    /// Never, if it still waits.
    completed: Option<usize>,
}

/// The copies of a world in the order in which they were written. Those of one record follow each other, and the records come into the source in order.
fn history(world: &World, order: &[usize]) -> Vec<Copy> {
    let mut chains: Vec<Vec<Seen>> = Vec::new();
    for seen in &world.seen {
        match chains.last_mut() {
            Some(chain) if !is_new(world, seen) => chain.push(seen.clone()),
            _ => chains.push(vec![seen.clone()]),
        }
    }
    // Which chain continues at each moment. The first one that continues is the first chain.
    let tokens = chains.iter().enumerate();
    let tokens = tokens.flat_map(|(chain, copies)| copies.iter().map(move |_| chain));
    let mut shuffled: Vec<(usize, usize)> = order.iter().copied().zip(tokens).collect();
    shuffled.sort_unstable();
    let mut names: BTreeMap<usize, usize> = BTreeMap::new();
    let mut left: Vec<std::vec::IntoIter<Seen>> = chains.into_iter().map(Vec::into_iter).collect();
    let mut history: Vec<Copy> = Vec::new();
    let mut last: BTreeMap<usize, usize> = BTreeMap::new();
    let next = shuffled.into_iter().map(|(_, token)| {
        let count = names.len();
        *names.entry(token).or_insert(count)
    });
    // A chain can be longer or shorter than that of the token.
    let next: Vec<usize> = next.collect();
    let rest = (0..left.len()).flat_map(|chain| std::iter::repeat_n(chain, 10));
    for chain in next.into_iter().chain(rest) {
        if let Some(seen) = left[chain].next() {
            let now = history.len();
            // The last copy of a chain is completed when the next one is written.
            if let Some(before) = last.insert(chain, now) {
                history[before].completed = Some(now);
            }
            history.push(Copy {
                seen,
                written: now,
                completed: None,
            });
        }
    }
    renumber(&mut history);
    history
}

/// Gives the records of the source offsets in the order in which they were written.
fn renumber(history: &mut [Copy]) {
    let mut written: BTreeMap<i32, Vec<i64>> = BTreeMap::new();
    for copy in history.iter().filter(|copy| copy.seen.role == Role::Source) {
        let position = &copy.seen.record.position;
        written
            .entry(position.partition)
            .or_default()
            .push(position.offset);
    }
    let mut new: BTreeMap<(i32, i64), i64> = BTreeMap::new();
    for (partition, offsets) in written {
        let mut sorted = offsets.clone();
        sorted.sort_unstable();
        let places = offsets.into_iter().map(|offset| (partition, offset));
        new.extend(places.zip(sorted));
    }
    for Copy { seen, .. } in history {
        let record = &mut seen.record;
        let origin = Arrival::salvaged(record).origin;
        let of_origin = new.get(&(origin.partition, origin.offset)).map(i64::to_string);
        let headers = record.headers.iter().map(|(name, value)| match &of_origin {
            Some(offset) if name == ORIGINAL_OFFSET => (name, Some(offset.as_bytes())),
            _ => (name, value),
        });
        record.headers = headers.collect();
        if seen.role == Role::Source {
            record.position.offset = new[&(record.position.partition, record.position.offset)];
        }
    }
}

fn is_new(world: &World, seen: &Seen) -> bool {
    seen.role == Role::Source
        && Arrival::read(&world.pipeline, &seen.record)
            .is_ok_and(|arrival| is_at(&arrival.origin, &seen.record.position))
}

/// What an audit of everything reports at a moment.
fn full(world: &World, history: &[Copy], now: usize) -> Report {
    let mut ledger = world.ledger();
    for copy in history.iter().filter(|copy| copy.written < now) {
        add(&mut ledger, &copy.seen, is_unread(copy, now));
    }
    ledger.report()
}

fn is_unread(copy: &Copy, now: usize) -> bool {
    copy.completed.is_none_or(|completed| completed >= now)
}

fn add(ledger: &mut Ledger, seen: &Seen, unread: bool) {
    match seen.role {
        Role::Source => ledger.source(&seen.record, unread),
        Role::Tier => ledger.tier(&seen.record, unread),
        Role::Scheduler => drop(ledger.scheduled(&seen.record, unread)),
        Role::Due => ledger.due(&seen.record, unread),
        Role::Output => ledger.output(&seen.record),
        Role::Dead => ledger.dead(&seen.record),
    }
}

/// An audit in passes.
struct Passes {
    ledger: Ledger,
    read: HashSet<usize>,
    /// Up to where each partition of the source was read.
    read_to: BTreeMap<i32, i64>,
}

impl Passes {
    /// A pass as [`crate::pass`] makes it, of what is written before `now`. At first, it reads a part of it.
    fn pass(&mut self, history: &[Copy], now: usize, first_part: &BTreeSet<usize>) -> Report {
        let unread_at: HashSet<Position> = history[..now]
            .iter()
            .filter(|copy| is_unread(copy, now))
            .map(|copy| copy.seen.record.position.clone())
            .collect();
        self.ledger.begin_pass(|position| unread_at.contains(position));
        // Of the source, up to the last record that is completed.
        let mut taken: BTreeMap<i32, (i64, i64)> = BTreeMap::new();
        for copy in history[..now]
            .iter()
            .filter(|copy| copy.seen.role == Role::Source)
        {
            let Position {
                partition, offset, ..
            } = copy.seen.record.position;
            let (to, end) = taken.entry(partition).or_default();
            *end = (*end).max(offset + 1);
            if !is_unread(copy, now) {
                *to = (*to).max(offset + 1);
            }
        }
        let is_taken = |seen: &Seen| {
            let Position {
                partition, offset, ..
            } = seen.record.position;
            seen.role != Role::Source || taken.get(&partition).is_some_and(|(to, _)| offset < *to)
        };
        for is_first in [true, false] {
            let mut left: BTreeMap<i32, i64> = BTreeMap::new();
            for (index, copy) in history[..now].iter().enumerate() {
                let is_in_part = !is_first || first_part.contains(&index);
                if self.read.contains(&index) || !is_taken(&copy.seen) {
                    continue;
                }
                let Position {
                    partition, offset, ..
                } = copy.seen.record.position;
                // A partition of the source is read in order.
                let is_blocked = copy.seen.role == Role::Source && left.contains_key(&partition);
                if is_in_part && !is_blocked {
                    self.read.insert(index);
                    add(&mut self.ledger, &copy.seen, is_unread(copy, now));
                } else if copy.seen.role == Role::Source {
                    left.entry(partition).or_insert(offset);
                }
            }
            for (partition, (to, end)) in &taken {
                let to = left.get(partition).copied().unwrap_or(*to);
                let read_to = self.read_to.entry(*partition).or_default();
                *read_to = to.max(*read_to);
                self.ledger.source_is_read(*partition, 0, *read_to, *end);
            }
            self.ledger.settle(false);
        }
        self.ledger.positions_known();
        let rest = history[..now].iter().filter(|copy| !is_taken(&copy.seen));
        rest.for_each(|copy| self.ledger.read_ahead(&copy.seen.record));
        self.ledger.settle(true);
        self.ledger.report()
    }
}

/// What two reports must have in common.
fn compare_reports(world: &World, passes: &Report, full: &Report) -> Result<(), TestCaseError> {
    let (mut found, mut expected) = (defects(passes), defects(full));
    if world.pipeline.long_waits.is_some() {
        // A throttled attempt is no retry, so a record can be settled before its last copy is read, which is not compared then.
        prop_assert!(passes.altered.count <= full.altered.count);
        for defects in [&mut found, &mut expected] {
            defects.retain(|(kind, _)| *kind != "altered");
        }
    }
    prop_assert_eq!(found, expected, "{}\n{}", passes, full);
    let counts = |report: &Report| {
        let waiting = report.waiting;
        (
            (report.output, report.dead, report.uncounted, report.redriven),
            (report.source, waiting.in_source, waiting.in_tiers),
            (waiting.in_scheduler, waiting.in_due),
            (report.dead_by_class.clone(), report.retries.clone()),
            (report.foreign.count, report.source_gone, report.newer),
        )
    };
    prop_assert_eq!(counts(passes), counts(full), "{}\n{}", passes, full);
    prop_assert_eq!(passes.min_margin_ms, full.min_margin_ms);
    Ok(())
}

fn check_passes(
    world: &World,
    history: &[Copy],
    cuts: &[usize],
    parts: &BTreeSet<usize>,
) -> Result<Passes, TestCaseError> {
    let mut passes = Passes {
        ledger: world.ledger(),
        read: HashSet::new(),
        read_to: BTreeMap::new(),
    };
    let mut moments: Vec<usize> = cuts.iter().map(|cut| cut % (history.len() + 1)).collect();
    moments.extend([history.len(), history.len()]);
    moments.sort_unstable();
    for now in moments {
        let report = passes.pass(history, now, parts);
        compare_reports(world, &report, &full(world, history, now))?;
    }
    Ok(passes)
}

/// Changes of a history that [`add_defect`] makes in a world.
fn plant(world: &mut World, defect: Defect) -> Option<&'static str> {
    match defect {
        // These are about what is unread, which follows from the moment here.
        Defect::LostWaiting | Defect::EndedAndWaiting => None,
        defect => add_defect(world, defect),
    }
}

proptest! {
    #[test]
    fn passes_find_what_full_audits_find(
        (lives, to_source, through_scheduler) in lives(),
        order in order(),
        cuts in proptest::collection::vec(any::<usize>(), 0..6),
        parts in proptest::collection::btree_set(0_usize..160, 0..160),
        defect in proptest::option::of(defect()),
    ) {
        let mut world = super::properties::build(lives, to_source, through_scheduler);
        let lost = match defect {
            Some(Defect::LostEnd) => world.seen.iter().position(|seen| matches!(seen.role, Role::Output | Role::Dead)),
            Some(defect) => {
                plant(&mut world, defect);
                None
            }
            None => None,
        };
        let mut history = history(&world, &order);
        if let Some(lost) = lost {
            // What it was written for stays complete.
            let position = world.seen[lost].record.position.clone();
            let is_lost = |copy: &Copy| copy.seen.record.position == position;
            let lost_at = history.iter().position(is_lost).unwrap();
            history.retain(|copy| !is_lost(copy));
            // The copy before it is complete at the same moment, which is one earlier for all that follow.
            for (index, copy) in history.iter_mut().enumerate() {
                let removed = usize::from(copy.written > index);
                copy.written -= removed;
                let moment = |completed: usize| completed - usize::from(completed >= lost_at);
                copy.completed = copy.completed.map(moment);
            }
        }
        check_passes(&world, &history, &cuts, &parts)?;
    }
}

/// A world with one record in the output, which was settled, and a copy of its end.
fn settled(role: Role) -> (World, Passes, Seen) {
    let world = World::with_one(ReturnTo::Due, 1, Location::Output);
    let history = history(&world, &[0, 1, 2, 3]);
    let copy = world.second_copy(role);
    let passes = check_passes(&world, &history, &[4], &BTreeSet::new()).unwrap();
    assert_eq!(passes.ledger.size(), 0);
    (world, passes, copy)
}

#[test]
fn second_end_of_settled_is_doubled() {
    for role in [Role::Output, Role::Dead] {
        let (_, mut passes, copy) = settled(Role::Output);
        passes.ledger.begin_pass(|_| false);
        match role {
            Role::Dead => passes.ledger.dead(&copy.record),
            _ => passes.ledger.output(&copy.record),
        }
        passes.ledger.settle(true);
        let report = passes.ledger.report();
        assert_eq!(defects(&report), [("doubled", 1)]);
        assert_eq!(
            report.doubled.sample[0].at,
            Some(copy.record.position.to_string())
        );
        assert_eq!((report.source, report.output, report.dead), (1, 1, 0));
    }
}

#[test]
fn waiting_copy_of_settled_is_doubled() {
    for unread in [true, false] {
        let (_, mut passes, copy) = settled(Role::Tier);
        passes.ledger.begin_pass(|_| false);
        passes.ledger.tier(&copy.record, unread);
        passes.ledger.settle(true);
        let report = passes.ledger.report();
        assert_eq!(report.doubled.count, u64::from(unread), "{report}");
        assert_eq!((report.source, report.output), (1, 1));
        assert_eq!(passes.ledger.size(), 2 * usize::from(unread));
    }
}

#[test]
fn ended_record_is_not_taken() {
    let world = World::with_one(ReturnTo::Due, 0, Location::Output);
    let end = &world.seen[1].record;
    for (source_end, expected) in [(100, "doubled"), (0, "unknown")] {
        let mut ledger = world.ledger();
        ledger.output(end);
        ledger.source_is_read(0, 0, 0, source_end);
        assert_eq!(defects(&ledger.report()), [(expected, 1)]);
    }
    // It was completed after the committed offsets were read.
    let mut ledger = world.ledger();
    ledger.begin_pass(|_| true);
    ledger.source_is_read(0, 0, 0, 100);
    ledger.positions_known();
    ledger.output(end);
    let report = ledger.report();
    assert!(report.is_clean() && report.newer == 1, "{report}");
}

#[test]
fn origins_before_beginning_are_forgotten() {
    let world = World::with_one(ReturnTo::Due, 1, Location::Output);
    let [_, tier, due, end] = &world.seen[..] else {
        panic!("{:?}", world.seen)
    };
    let mut ledger = world.ledger();
    ledger.begin_pass(|_| false);
    ledger.source_is_read(0, 50, 50, 100);
    // At once, so that an output that is kept longer than the source needs no memory.
    ledger.output(&end.record);
    ledger.settle(false);
    assert_eq!((ledger.size(), ledger.report().source_gone), (0, 1));
    ledger.tier(&tier.record, false);
    ledger.due(&due.record, false);
    ledger.positions_known();
    ledger.settle(true);
    let report = ledger.report();
    assert_eq!((ledger.size(), report.source), (0, 0));
    assert!(report.is_clean(), "{report}");
}

#[test]
fn success_without_result_is_settled() {
    let mut world = World::with_one(ReturnTo::Due, 0, Location::Output);
    world.pipeline.output = None;
    world.seen.pop();
    let dead = World::with_one(ReturnTo::Due, 0, Location::Dead).seen.remove(1);
    let mut ledger = world.ledger();
    ledger.begin_pass(|_| false);
    ledger.source(&world.seen[0].record, false);
    ledger.source_is_read(0, 0, 100, 100);
    ledger.positions_known();
    ledger.settle(true);
    assert_eq!((ledger.report().uncounted, ledger.size()), (1, 0));
    ledger.dead(&dead.record);
    let report = ledger.report();
    assert_eq!(
        (report.uncounted, report.dead, report.source),
        (0, 1, 1),
        "{report}"
    );
}

#[test]
fn old_origins_are_not_checked() {
    let world = World::with_one(ReturnTo::Due, 0, Location::Dead);
    let mut ledger = world.ledger();
    ledger.source_is_read(0, 50, 60, 100);
    ledger.dead(&world.seen[1].record);
    for _ in 0..2 {
        let report = ledger.report();
        assert!(report.is_clean() && report.source_gone == 1, "{report}");
        ledger.settle(true);
        assert_eq!(ledger.size(), 0);
    }
}
