use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::time::ManualClock;

const START: Timestamp = Timestamp::from_millis(1_763_722_800_000);
const LIMITS: ClockLimits = ClockLimits {
    max_step: Duration::from_secs(2),
    confirm: Duration::from_secs(10),
};

/// Both clocks, in milliseconds since the start.
struct World {
    guard: ClockGuard,
    monotonic: i64,
    /// The error of the wall clock.
    error: i64,
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            guard: ClockGuard::new(LIMITS),
            monotonic: 0,
            error: 0,
        };
        world.observe();
        world
    }

    fn wall(&self) -> Timestamp {
        Timestamp::from_millis(START.as_millis() + self.monotonic + self.error)
    }

    fn observe(&mut self) -> ClockState {
        let state = self.guard.observe(ClockReading {
            wall: self.wall(),
            monotonic: Duration::from_millis(u64::try_from(self.monotonic).unwrap()),
        });
        // A time from before the reading is never reported as steady.
        if let ClockState::Steady { now } = state {
            assert_eq!(now, self.wall());
        }
        state
    }

    fn after(&mut self, millis: i64) -> ClockState {
        self.monotonic += millis;
        self.observe()
    }

    fn is_held_after(&mut self, millis: i64) -> bool {
        matches!(self.after(millis), ClockState::Held { .. })
    }
}

#[test]
fn step_is_held_until_confirmed() {
    for (error, step) in [
        (3_600_000, "3600.0 s forward"),
        (-3_600_000, "3600.0 s backward"),
        (-2_011, "2.0 s backward"),
    ] {
        let mut world = World::new();
        world.after(500);
        world.error = error;
        let continued = Timestamp::from_millis(START.as_millis() + 600);
        match world.after(100) {
            ClockState::Held {
                since,
                step: found,
                now,
            } => {
                assert_eq!(
                    (since, found.to_string().as_str()),
                    (Duration::from_millis(600), step)
                );
                assert_eq!(now, continued);
            }
            steady @ ClockState::Steady { .. } => panic!("{error}: {steady:?}"),
        }
        assert!(world.is_held_after(9_999), "{error}");
        assert!(!world.is_held_after(1), "{error}");
        // The new offset is the reference from now on.
        world.error = 0;
        assert!(world.is_held_after(100), "{error}");
    }
}

#[test]
fn bounded_change_is_no_step() {
    for error in [2_000, -2_000] {
        let mut world = World::new();
        world.error = error;
        assert!(!world.is_held_after(100), "{error}");
    }
}

#[test]
fn undone_step_ends_the_hold() {
    let mut world = World::new();
    world.error = -3_600_000;
    assert!(world.is_held_after(100));
    world.error = -10;
    assert!(!world.is_held_after(100));
}

#[test]
fn another_step_starts_the_hold_again() {
    let mut world = World::new();
    for error in [60_000, 120_000, -60_000] {
        world.error = error;
        assert!(world.is_held_after(9_000), "{error}");
    }
    assert!(world.is_held_after(9_999));
    assert!(!world.is_held_after(1));
}

#[test]
fn many_small_steps_add_up() {
    let mut world = World::new();
    let held = (0..100).position(|_| {
        world.error += 1_000;
        world.is_held_after(1_000)
    });
    assert_eq!(held, Some(2), "the offset may change by 100 ms in a second");
}

#[test]
fn step_after_long_pause_is_found() {
    let mut world = World::new();
    world.error = 4_001;
    assert!(world.is_held_after(3_600_000));
}

/// A wall clock that is right, except for errors that are corrected.
fn corrected_errors() -> impl Strategy<Value = Vec<(i64, Vec<i64>)>> {
    // The error, and the times between the readings while it lasts: less than `confirm` in total.
    let error = prop_oneof![Just(0_i64), -3_000..3_000_i64, -100_000_000..100_000_000_i64];
    prop::collection::vec((error, prop::collection::vec(1..1_000_i64, 1..10)), 1..60)
}

/// A wall clock that is set at random, for any time.
fn random_steps() -> impl Strategy<Value = Vec<(i64, Vec<i64>)>> {
    // Each step exceeds the bound, but several can add up to less.
    let step = prop_oneof![3_000..10_000_i64, 3_000..100_000_000_i64];
    let signed = (step, any::<bool>()).prop_map(|(step, forward)| if forward { step } else { -step });
    prop::collection::vec((signed, prop::collection::vec(1..4_000_i64, 1..30)), 1..20)
}

/// Removes what is due.
fn release(waiting: &mut Vec<i64>, now: Timestamp) -> Vec<i64> {
    let now = now.as_millis() - START.as_millis();
    waiting.extract_if(.., |due| *due <= now).collect()
}

proptest! {
    #[test]
    fn corrected_time_releases_nothing_early(
        errors in corrected_errors(), mut waiting in prop::collection::vec(0..600_000_i64, 0..100),
    ) {
        let mut world = World::new();
        // The bound, and a tenth of the time between two readings.
        let tolerance = 2_100;
        for (error, gaps) in errors {
            for error in [error, 0] {
                world.error = error;
                for gap in &gaps {
                    if let ClockState::Steady { now } = world.after(*gap) {
                        for due in release(&mut waiting, now) {
                            prop_assert!(due <= world.monotonic + tolerance, "due {due} at {}", world.monotonic);
                        }
                    }
                }
            }
        }
        world.error = 0;
        prop_assert!(!world.is_held_after(600_000), "the right time is confirmed already");
        release(&mut waiting, world.wall());
        prop_assert_eq!(waiting, Vec::<i64>::new());
    }

    #[test]
    fn random_steps_release_by_confirmed_times(
        steps in random_steps(), waiting in prop::collection::vec(0..600_000_i64, 0..100),
    ) {
        // The readings, by segment between two steps.
        let mut world = World::new();
        let mut segments: Vec<(i64, Vec<(i64, ClockState)>)> = vec![(0, vec![(0, ClockState::Steady { now: START })])];
        for (step, gaps) in steps {
            world.error += step;
            let readings = gaps.into_iter().map(|gap| {
                let state = world.after(gap);
                (world.monotonic, state)
            });
            let readings = readings.collect();
            segments.push((world.error, readings));
        }
        // With hindsight: everything was released by an error that had lasted, or by one within the bound of such an error
        // (plus a tenth of the time between two readings).
        let mut left = waiting;
        let mut confirmed = vec![0];
        for (error, readings) in &segments {
            let lasted = readings.last().unwrap().0 - readings[0].0 >= 10_000;
            for (monotonic, state) in readings {
                let ClockState::Steady { now } = state else { continue };
                let lasted_so_far = monotonic - readings[0].0 >= 10_000;
                if !lasted_so_far {
                    let near = confirmed.iter().any(|confirmed| (error - confirmed).abs() <= 2_000 + 400);
                    prop_assert!(near, "released by {error}, confirmed {confirmed:?}");
                }
                for due in release(&mut left, *now) {
                    prop_assert!(due <= monotonic + error, "due {due} at {monotonic} + {error}");
                }
            }
            let is_steady = |reading: &(i64, ClockState)| matches!(reading.1, ClockState::Steady { .. });
            let (is_first_steady, is_last_steady) = (is_steady(&readings[0]), is_steady(readings.last().unwrap()));
            prop_assert!(is_last_steady || !lasted, "{error} lasted");
            if is_first_steady {
                confirmed.push(*error);
            } else if lasted {
                confirmed = vec![*error];
            }
        }
        world.error = 1_000_000_000;
        world.after(1);
        prop_assert!(!world.is_held_after(10_000));
        release(&mut left, world.wall());
        prop_assert_eq!(left, Vec::<i64>::new());
    }

    #[test]
    fn a_slewed_clock_is_never_held(
        rates in prop::collection::vec((-100..=100_i64, 1..20_000_i64), 1..300),
    ) {
        let mut world = World::new();
        for (per_mille, gap) in rates {
            world.error += gap * per_mille / 1_000;
            prop_assert!(!world.is_held_after(gap), "{per_mille} per mille for {gap} ms");
        }
    }
}

#[test]
fn guarded_clock_continues_the_time() {
    let changes: Arc<Mutex<Vec<ClockChange>>> = Arc::default();
    let manual = Arc::new(ManualClock::new(START));
    let clock = GuardedClock::new(
        manual.clone(),
        LIMITS,
        Box::new({
            let changes = changes.clone();
            move |change| changes.lock().unwrap().push(change)
        }),
    );
    let at = |millis| START.after(Duration::from_millis(millis));
    let second = Duration::from_secs(1);
    manual.advance(second);
    assert_eq!((clock.now(), clock.confirmed()), (at(1_000), Some(at(1_000))));
    manual.set(at(3_601_000));
    assert_eq!((clock.now(), clock.confirmed()), (at(1_000), None));
    manual.advance(second);
    assert_eq!((clock.now(), clock.confirmed()), (at(2_000), None));
    assert_eq!(clock.possible(), (at(2_000), at(3_602_000)));
    assert_eq!(clock.until(at(5_000)), 3 * second);
    let step = ClockStep {
        direction: StepDirection::Forward,
        by: HumanDuration::from_secs(3_600),
    };
    let continued = at(1_000);
    let mut expected = vec![ClockChange::Stepped { step, continued }];
    assert_eq!(*changes.lock().unwrap(), expected);
    manual.advance(9 * second);
    assert_eq!(clock.confirmed(), Some(at(3_611_000)));
    expected.push(ClockChange::Steady { now: at(3_611_000) });
    assert_eq!(*changes.lock().unwrap(), expected);
    assert_eq!(clock.now(), at(3_611_000));
    assert_eq!(*changes.lock().unwrap(), expected);
}
