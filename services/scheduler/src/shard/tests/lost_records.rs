//! A state topic that loses its last records, as after an unclean election of a leader, or all of them, as if it was created again. A report
//! without an offset is handled in the same way.

use super::*;

#[derive(Clone, Debug)]
enum Event {
    Step(Step),
    /// The state topic loses so many of its last records.
    Lose(usize),
    /// The next transaction that writes to the state topic does not learn its end.
    HideEnd,
}

fn event() -> impl Strategy<Value = Event> {
    let step = prop_oneof![
        6 => (0_u16..600).prop_map(|ahead| Step::Schedule { ahead, key: None }),
        4 => (0_u16..120).prop_map(Step::AdvanceClock),
        6 => (1_usize..20, prop::bool::weighted(0.15)).prop_map(|(limit, is_lost)| Step::Turn { limit, is_lost }),
        6 => (1_u8..5).prop_map(Step::ServeIndex),
        1 => Just(Step::Restart),
    ];
    prop_oneof![
        20 => step.prop_map(Event::Step),
        1 => (1_usize..40).prop_map(Event::Lose),
        1 => Just(Event::HideEnd),
    ]
}

impl World {
    /// Loses the last records of the state topic, and returns the jobs of which they were. The shard and its index do not notice it.
    fn lose(&mut self, count: usize) -> Vec<JobId> {
        let kept = self.log.len().saturating_sub(count);
        let lost = self.log.split_off(kept);
        if !lost.is_empty() {
            self.lost_end = self.lost_end.max(self.end);
            self.end = self.log.last().map_or(0, |(end, ..)| *end);
            self.has_marker = false;
        }
        self.state.clear();
        for (_, id, job) in &self.log {
            match job {
                Some(job) => drop(self.state.insert(*id, job.clone())),
                None => drop(self.state.remove(id)),
            }
        }
        lost.into_iter().map(|(_, id, _)| id).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn other_jobs_are_dispatched_exactly_once(
        events in proptest::collection::vec(event(), 0..120),
        index_batch_bytes in index_batch_bytes(),
    ) {
        let mut world = World::with(Settings { index_batch_bytes, ..settings() });
        let (mut lost, mut is_intact) = (HashSet::new(), true);
        for event in events {
            match event {
                Event::Step(step) => world.run(&step),
                Event::Lose(count) => lost.extend(world.lose(count)),
                Event::HideEnd => (world.reported_end, is_intact) = (Some(-1), false),
            }
        }
        // A loss is noticed when the shard writes the next time.
        world.run(&Step::Schedule { ahead: 0, key: None });
        world.settle();
        for id in world.ids.iter().filter(|id| !lost.contains(*id)) {
            let times = world.dispatched.iter().filter(|(job, _)| job == id).count();
            prop_assert_eq!(times, 1, "{}", id);
        }
        let indexed: Vec<&JobId> = world.index.keys().collect();
        prop_assert_eq!(indexed, world.state.keys().collect::<Vec<_>>());
        prop_assert!(world.refused_ends == 0 || !is_intact || !lost.is_empty());
    }
}
