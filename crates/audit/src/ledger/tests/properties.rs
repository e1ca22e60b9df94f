//! Random histories: a correct one is clean, and a single defect is found.

use proptest::prelude::*;
use redeliver_core::headers::{ORIGINAL_OFFSET, PIPELINE};
use redeliver_core::{Headers, Output};

use super::world::{Change, Location, START, Seen, World, defects, with_scheduler};
use super::*;

fn bytes() -> impl Strategy<Value = Option<Vec<u8>>> {
    proptest::option::of(proptest::collection::vec(any::<u8>(), 0..12))
}

type Life = (Option<Vec<u8>>, Option<Vec<u8>>, Headers, u32, Location, u64, i32);

prop_compose! {
    fn life()(
        key in bytes(),
        value in bytes(),
        headers in proptest::collection::vec(("[a-z]{0,5}", bytes()), 0..5),
        failures in 0_u32..=3,
        location in prop_oneof![
            Just(Location::Output), Just(Location::Dead), Just(Location::WaitsInTier), Just(Location::WaitsInDue),
            Just(Location::WaitsInSource)
        ],
        late in 0_u64..100,
        partition in 0_i32..3,
    ) -> Life {
        let headers = headers.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
        let failures = match location {
            Location::WaitsInSource => 0,
            Location::WaitsInTier | Location::WaitsInDue => failures.max(1),
            Location::Output | Location::Dead => failures,
        };
        (key, value, headers, failures, location, late, partition)
    }
}

/// The lives of a world, whether retries return to the source, and whether there is a scheduler.
pub(super) fn lives() -> impl Strategy<Value = (Vec<Life>, bool, bool)> {
    (
        proptest::collection::vec(life(), 1..20),
        any::<bool>(),
        any::<bool>(),
    )
}

/// Enough for all copies of such a world.
pub(super) fn order() -> impl Strategy<Value = Vec<usize>> {
    Just((0..20 * 8).collect::<Vec<_>>()).prop_shuffle()
}

pub(super) fn build(lives: Vec<Life>, to_source: bool, through_scheduler: bool) -> World {
    let return_to = if to_source {
        ReturnTo::Source
    } else {
        ReturnTo::Due
    };
    let mut world = if through_scheduler {
        with_scheduler(return_to)
    } else {
        World::new(return_to)
    };
    for (key, value, headers, failures, location, late, partition) in lives {
        let record = world.source(key.as_deref(), value.as_deref(), headers, partition);
        world.live(record, failures, location, late);
    }
    world
}

prop_compose! {
    fn world()((lives, to_source, through_scheduler) in lives(), order in order()) -> World {
        let mut world = build(lives, to_source, through_scheduler);
        let mut seen: Vec<_> = world.seen.into_iter().enumerate().collect();
        seen.sort_by_key(|(index, _)| order[*index]);
        world.seen = seen.into_iter().map(|(_, seen)| seen).collect();
        world
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Defect {
    LostEnd,
    LostWaiting,
    SecondEnd,
    EndedAndWaiting,
    EarlyRelease,
    /// The index of a [`Change`].
    Altered(usize),
}

pub(super) fn defect() -> impl Strategy<Value = Defect> {
    use Defect::{EarlyRelease, EndedAndWaiting, LostEnd, LostWaiting, SecondEnd};
    let others = vec![LostEnd, LostWaiting, SecondEnd, EndedAndWaiting, EarlyRelease];
    prop_oneof![
        5 => proptest::sample::select(others),
        8 => (0..Change::ALL.len()).prop_map(Defect::Altered),
    ]
}

/// Adds a defect to the first copy to which it applies; returns how the report must classify it.
pub(super) fn add_defect(world: &mut World, defect: Defect) -> Option<&'static str> {
    let is_end = |seen: &Seen| matches!(seen.role, Role::Output | Role::Dead);
    let is_retry = |seen: &Seen| ReservedHeaders::read(&seen.record).unwrap().is_retry_of("docs");
    let find = |world: &World, matches: &dyn Fn(&Seen) -> bool| world.seen.iter().position(matches);
    match defect {
        Defect::LostEnd => {
            let index = find(world, &is_end)?;
            world.seen.remove(index);
            Some("lost")
        }
        Defect::LostWaiting => {
            let index = find(world, &|seen| seen.unread)?;
            world.seen[index].unread = false;
            Some("lost")
        }
        Defect::SecondEnd => {
            let index = find(world, &is_end)?;
            world.seen.push(world.seen[index].clone());
            Some("doubled")
        }
        Defect::EndedAndWaiting => {
            let ended: Vec<_> = world
                .seen
                .iter()
                .filter(|seen| is_end(seen))
                .map(|seen| Arrival::salvaged(&seen.record).origin)
                .collect();
            let index = find(world, &|seen| {
                let origin = if is_retry(seen) {
                    Arrival::salvaged(&seen.record).origin
                } else {
                    Arrival::read(&world.pipeline, &seen.record).unwrap().origin
                };
                !is_end(seen) && ended.contains(&origin)
            })?;
            world.seen[index].unread = true;
            Some("doubled")
        }
        Defect::EarlyRelease => {
            let index = find(world, &|seen| {
                matches!(seen.role, Role::Due | Role::Source) && is_retry(seen)
            })?;
            let record = &mut world.seen[index].record;
            let due = due_time(record).unwrap();
            record.timestamp = Some(Timestamp::from_millis(due.as_millis() - 1));
            Some("early")
        }
        Defect::Altered(index) => {
            let mut retries = world.seen.iter_mut().filter(|seen| is_retry(seen));
            retries.find_map(|seen| {
                let before = seen.record.clone();
                Change::ALL[index].apply(&mut seen.record);
                let Record {
                    key, value, headers, ..
                } = &seen.record;
                let is_changed = (key, value, headers) != (&before.key, &before.value, &before.headers);
                is_changed.then_some("altered")
            })
        }
    }
}

proptest! {
    #[test]
    fn correct_history_is_clean(world in world()) {
        let report = world.report();
        prop_assert!(report.is_clean(), "{}", report);
        prop_assert_eq!(report.source, report.output + report.dead + report.waiting.total());
        prop_assert!(report.foreign.is_empty() && report.source_gone == 0 && report.newer == 0);
    }

    #[test]
    fn single_defect_is_found(mut world in world(), defect in defect()) {
        let Some(expected) = add_defect(&mut world, defect) else { return Ok(()) };
        let report = world.report();
        prop_assert_eq!(defects(&report), [(expected, 1)], "{:?}\n{}", defect, report);
        let counted = report.output + report.dead + report.waiting.total() + report.lost.count;
        prop_assert_eq!(report.source, counted);
    }

    #[test]
    fn arbitrary_headers_never_panic(
        headers in proptest::collection::vec(
            (
                prop_oneof![
                    ".{0,10}", Just(ORIGINAL_OFFSET.to_owned()), Just("original-topic".to_owned()),
                    Just("original-partition".to_owned()), Just("retry-count".to_owned()),
                    Just(PIPELINE.to_owned()), Just(PROCESS_AFTER.to_owned()), Just("redrive-count".to_owned()),
                ],
                prop_oneof![
                    bytes(), Just(Some(b"docs".to_vec())), Just(Some(b"1".to_vec())),
                    Just(Some(b"9223372036854775807".to_vec())), Just(Some(b"2147483647".to_vec())),
                    Just(Some(b"9999-12-31T23:59:59.999Z".to_vec())),
                ],
            ),
            0..12,
        ),
        to_source in any::<bool>(),
    ) {
        let mut world = World::new(if to_source { ReturnTo::Source } else { ReturnTo::Due });
        let headers: Headers = headers.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
        for role in [Role::Source, Role::Tier, Role::Due, Role::Output, Role::Dead] {
            let output = Output { topic: "docs".into(), partition: None, key: None, value: None, headers: headers.clone() };
            world.write(role, output, 0, START);
        }
        let _ = world.report().to_string();
    }
}
