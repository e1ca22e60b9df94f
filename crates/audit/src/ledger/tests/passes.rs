//! Audits in several passes, of which each gets only what is new: the same verdict as an audit of everything, at each moment.

use std::collections::{BTreeMap, HashSet};

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

/// What an audit of everything that came in from a moment on reports at the end.
fn full(world: &World, history: &[Copy], from: usize) -> Report {
    let begins = ends(history, from);
    let mut ledger = world.ledger();
    for copy in history {
        let origin = origin(world, &copy.seen);
        if begins
            .get(&origin.partition)
            .is_none_or(|begin| origin.offset >= *begin)
        {
            add(&mut ledger, &copy.seen, is_unread(copy, history.len()));
        }
    }
    ledger.report()
}

fn origin(world: &World, seen: &Seen) -> Origin {
    let arrival = Arrival::read(&world.pipeline, &seen.record);
    arrival.unwrap_or_else(|_| Arrival::salvaged(&seen.record)).origin
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

/// An audit in passes, which begins at a moment.
struct Passes {
    ledger: Ledger,
    read: HashSet<usize>,
    /// The begin of each partition of the source, and up to where it was read.
    read_to: BTreeMap<i32, (i64, i64)>,
}

/// The moments at which a pass requests the ends, reads the committed offsets, tiers and due topics, the source, and the ends again.
type Moments = [usize; 5];

impl Passes {
    fn new(world: &World, history: &[Copy], from: usize) -> Self {
        let mut passes = Self {
            ledger: world.ledger(),
            read: (0..from).collect(),
            read_to: BTreeMap::new(),
        };
        for (partition, end) in ends(history, from) {
            passes.read_to.insert(partition, (end, end));
            passes.ledger.source_is_read(partition, end, end, end);
        }
        passes
    }

    /// A pass as [`crate::pass`] makes it.
    fn pass(&mut self, history: &[Copy], moments: Moments) -> Report {
        let [requested, committed, waiting, source, ended] = moments;
        let ends = ends(history, requested);
        for (partition, end) in &ends {
            let (begin, next) = self.read_to.entry(*partition).or_default();
            self.ledger.source_is_read(*partition, *begin, *next, *end);
        }
        let unread_at: HashSet<Position> = history
            .iter()
            .filter(|copy| is_unread(copy, committed))
            .map(|copy| copy.seen.record.position.clone())
            .collect();
        self.ledger.begin_pass(|position| unread_at.contains(position));
        let is_end = |seen: &Seen| matches!(seen.role, Role::Output | Role::Dead);
        self.read(history, committed, requested, is_end);
        self.ledger.positions_known();
        // Commands and jobs first.
        self.read(history, committed, waiting, |seen| seen.role == Role::Scheduler);
        self.read(history, committed, waiting, |seen| {
            matches!(seen.role, Role::Tier | Role::Due)
        });
        let completed = history[..requested].iter();
        let completed =
            completed.filter(|copy| copy.seen.role == Role::Source && !is_unread(copy, committed));
        for Position {
            partition, offset, ..
        } in completed.map(|copy| &copy.seen.record.position)
        {
            let (_, next) = self.read_to.entry(*partition).or_default();
            *next = (offset + 1).max(*next);
        }
        let read_to = self.read_to.clone();
        let is_taken = |seen: &Seen| {
            let Position {
                partition, offset, ..
            } = &seen.record.position;
            seen.role == Role::Source && read_to.get(partition).is_some_and(|(_, next)| offset < next)
        };
        self.read(history, committed, requested, is_taken);
        for (partition, end) in &ends {
            let (begin, next) = self.read_to[partition];
            self.ledger.source_is_read(*partition, begin, next, *end);
        }
        let rest = history[..source].iter().filter(|copy| {
            let position = &copy.seen.record.position;
            copy.seen.role == Role::Source && position.offset >= read_to[&position.partition].1
        });
        rest.for_each(|copy| self.ledger.read_ahead(&copy.seen.record));
        self.read(history, committed, ended, is_end);
        self.ledger.settle();
        self.ledger.report()
    }

    /// Adds what is new and written before a moment.
    fn read(&mut self, history: &[Copy], committed: usize, until: usize, is_read: impl Fn(&Seen) -> bool) {
        for (index, copy) in history[..until].iter().enumerate() {
            if is_read(&copy.seen) && self.read.insert(index) {
                add(&mut self.ledger, &copy.seen, is_unread(copy, committed));
            }
        }
    }
}

/// The ends of the partitions of the source at a moment.
fn ends(history: &[Copy], moment: usize) -> BTreeMap<i32, i64> {
    let in_source = |copy: &&Copy| copy.seen.role == Role::Source;
    let of_source = history.iter().filter(in_source);
    let mut ends: BTreeMap<i32, i64> = of_source
        .map(|copy| (copy.seen.record.position.partition, 0))
        .collect();
    let source = history[..moment].iter().filter(in_source);
    for Position {
        partition, offset, ..
    } in source.map(|copy| &copy.seen.record.position)
    {
        let end = ends.entry(*partition).or_default();
        *end = (offset + 1).max(*end);
    }
    ends
}

/// What two reports must have in common.
fn compare_reports(passes: &Report, full: &Report) -> Result<(), TestCaseError> {
    prop_assert_eq!(defects(passes), defects(full), "{}\n{}", passes, full);
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

/// Passes from a moment on, during which the pipeline goes on, and one at the end.
fn check_passes(
    world: &World,
    history: &[Copy],
    from: usize,
    passes: &[Moments],
    is_correct: bool,
) -> Result<Passes, TestCaseError> {
    let last = history.len();
    let mut moments: Vec<usize> = passes
        .iter()
        .flatten()
        .map(|cut| from + cut % (last + 1 - from))
        .collect();
    moments.sort_unstable();
    let mut passes = Passes::new(world, history, from);
    for moments in moments.as_chunks().0 {
        let report = passes.pass(history, *moments);
        prop_assert!(!is_correct || report.is_clean(), "{}", report);
    }
    passes.pass(history, [last; 5]);
    let report = passes.pass(history, [last; 5]);
    compare_reports(&report, &full(world, history, from))?;
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
        from in any::<usize>(),
        passes in proptest::collection::vec(any::<Moments>(), 0..5),
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
        let from = if from.is_multiple_of(3) { 0 } else { from % (history.len() + 1) };
        check_passes(&world, &history, from, &passes, defect.is_none())?;
    }
}

/// A world with one record in the output, which was settled, and a copy of its end.
fn settled(role: Role) -> (World, Passes, Seen) {
    let world = World::with_one(ReturnTo::Due, 1, Location::Output);
    let history = history(&world, &[0, 1, 2, 3]);
    let copy = world.second_copy(role);
    let passes = check_passes(&world, &history, 0, &[[4; 5]], true).unwrap();
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
        passes.ledger.settle();
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
        passes.ledger.settle();
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
fn earlier_records_are_not_checked() {
    for location in [Location::Output, Location::Dead, Location::WaitsInTier] {
        let world = World::with_one(ReturnTo::Due, 1, location);
        let mut ledger = world.ledger();
        ledger.source_is_read(0, 50, 50, 100);
        ledger.begin_pass(|_| true);
        let later = world.seen.iter().skip(1);
        later.for_each(|seen| add(&mut ledger, seen, true));
        let report = ledger.report();
        assert!(report.is_clean() && report.source == 0, "{report}");
        assert_eq!(ledger.size(), 0);
    }
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
    ledger.settle();
    assert_eq!((ledger.report().uncounted, ledger.size()), (1, 0));
    ledger.dead(&dead.record);
    let report = ledger.report();
    assert_eq!(
        (report.uncounted, report.dead, report.source),
        (0, 1, 1),
        "{report}"
    );
}
