//! Recurring schedules: each occurrence creates one job or is skipped, whatever happens in between.

use redeliver_recurrence::Recurrence;
use v1::change_schedule::{self as change, Change as Action};

use super::*;
use crate::schedules::StoredSchedule;

/// Far less than a clock advances in a run, so that several occurrences can be due at once.
const INTERVAL: i64 = 1;

fn every(app: &str, seconds: i64) -> v1::ScheduleSpec {
    let interval = prost_types::Duration { seconds, nanos: 0 };
    v1::ScheduleSpec {
        timing: Some(v1::schedule_spec::Timing::Every(v1::IntervalTiming {
            interval: Some(interval),
            anchor: None,
        })),
        job: Some(v1::JobTemplate {
            app: app.to_owned(),
            data: Bytes::from_static(b"nightly"),
            ..v1::JobTemplate::default()
        }),
        ..v1::ScheduleSpec::default()
    }
}

/// Large jobs, of which none is skipped.
fn large_every_second() -> v1::ScheduleSpec {
    let header = v1::Header {
        name: "large".to_owned(),
        value: Some(vec![b'x'; 100_000].into()),
    };
    let mut spec = every("app", 1);
    spec.job.as_mut().unwrap().headers = vec![header];
    spec.misfire = Some(v1::Misfire {
        policy: v1::MisfirePolicy::All.into(),
        limit: Some(1_000),
        grace: None,
    });
    spec
}

fn create(spec: v1::ScheduleSpec) -> Action {
    Action::Create(change::Create { spec: Some(spec) })
}

impl World {
    /// Sends a change of a schedule. Returns the key of its answer.
    fn change(&mut self, id: &str, action: Action) -> String {
        self.change_of_app(id, "", action)
    }

    fn change_of_app(&mut self, id: &str, expected_app: &str, action: Action) -> String {
        self.send(ProtoCommand::ChangeSchedule(v1::ChangeSchedule {
            id: id.to_owned(),
            change: Some(action),
            expected_app: expected_app.to_owned(),
        }));
        (self.ingest.len() - 1).to_string()
    }

    /// Sends a change, and returns its outcome.
    fn changed(&mut self, id: &str, action: Action) -> v1::CommandOutcome {
        let answer = self.change(id, action);
        self.advance(50);
        self.answers[&answer].clone()
    }

    fn stored(&self, id: &str) -> Option<StoredSchedule> {
        let entry = self.state.get(&schedules::entry_id(id, 0))?;
        let record = entry.payload.value.as_ref().unwrap();
        Some(schedules::decode(record).unwrap())
    }

    /// The dispatched occurrences of a schedule, with the times of their dispatch.
    fn occurrences(&self, id: &str) -> Vec<(Timestamp, Timestamp)> {
        let of_schedule = self.occurrences.iter().filter_map(|(occurrence, at)| {
            let nominal = occurrence.strip_prefix(id)?.strip_prefix('@')?;
            Some((nominal.parse().unwrap(), *at))
        });
        of_schedule.collect()
    }

    fn step_seconds(&mut self, seconds: u16) {
        for _ in 0..seconds {
            self.run(&Step::AdvanceClock(1_000));
            self.advance(100);
        }
    }

    /// Each occurrence is dispatched at most once, and not before its nominal time.
    fn check_occurrences(&self) {
        let mut seen = HashSet::new();
        for (occurrence, at) in &self.occurrences {
            assert!(seen.insert(occurrence), "dispatched twice: {occurrence}");
            if let Some((_, nominal)) = occurrence.split_once('@') {
                let nominal: Timestamp = nominal.parse().unwrap();
                assert!(nominal <= *at, "{occurrence} was dispatched at {at}");
            }
        }
        let jobs: HashSet<JobId> = self.dispatched.iter().map(|(id, _)| *id).collect();
        assert_eq!(jobs.len(), self.dispatched.len(), "two jobs with one id");
    }
}

/// An action of a client on one of a few schedules, or an event.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a test has few of them at a time")]
enum Event {
    Change(u8, Action),
    Step(Step),
}

fn event() -> impl Strategy<Value = Event> {
    let action = prop_oneof![
        4 => prop::sample::select(vec!["app", "other", "gone"]).prop_map(|app| create(every(app, INTERVAL))),
        2 => Just(Action::Pause(change::Pause {})),
        3 => any::<bool>().prop_map(|catch_up| Action::Resume(change::Resume { catch_up })),
        1 => Just(Action::Trigger(change::Trigger {})),
        1 => Just(Action::Delete(change::Delete {})),
        1 => (1_i64..4).prop_map(|seconds| Action::Update(change::Update {
            spec: Some(every("app", seconds)),
            expected_revision: None,
        })),
    ];
    let step = prop_oneof![
        5 => (0_u16..2_500).prop_map(Step::AdvanceClock),
        6 => (1_usize..20, prop::bool::weighted(0.15)).prop_map(|(limit, is_lost)| Step::Turn { limit, is_lost }),
        6 => (1_u8..5).prop_map(Step::ServeIndex),
        1 => Just(Step::Halt),
        1 => Just(Step::SetPresence(Presence::Missing { lasting: Duration::ZERO })),
        2 => Just(Step::SetPresence(Presence::Exists)),
        1 => Just(Step::Restart),
        1 => (0_u16..600).prop_map(|ahead| Step::Schedule { ahead, key: None }),
    ];
    prop_oneof![
        1 => (0_u8..3, action).prop_map(|(schedule, action)| Event::Change(schedule, action)),
        5 => step.prop_map(Event::Step),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn each_occurrence_is_dispatched_or_skipped(
        events in proptest::collection::vec(event(), 0..150),
        index_batch_bytes in index_batch_bytes(),
    ) {
        let mut world = World::with(Settings { index_batch_bytes, ..settings() });
        let mut updated = HashSet::new();
        for event in events {
            match event {
                Event::Change(schedule, action @ Action::Update(_)) => {
                    updated.insert(format!("s{schedule}"));
                    world.change(&format!("s{schedule}"), action);
                }
                Event::Change(schedule, action) => drop(world.change(&format!("s{schedule}"), action)),
                Event::Step(step) => world.run(&step),
            }
        }
        world.settle();
        // The turns after the last step of the clock have decided about everything that was due before.
        world.advance(200);
        world.check_occurrences();
        prop_assert_eq!(world.completed.len(), world.ingest.len(), "undecided commands");
        for schedule in ["s0", "s1", "s2"] {
            let Some(stored) = world.stored(schedule) else {
                continue;
            };
            let occurrences = world.occurrences(schedule);
            let since = occurrences.iter().filter(|(nominal, _)| *nominal > stored.created).count() as u64;
            prop_assert_eq!(since, stored.progress.count, "dispatched and counted");
            let recurrence: &Recurrence = stored.schedule.recurrence();
            if !updated.contains(schedule) {
                let decided = recurrence.count(stored.created, stored.progress.position);
                prop_assert_eq!(since + stored.skipped, decided, "dispatched, skipped, decided");
            }
            if let Some(next) = stored.next_occurrence() {
                let late = world.now.as_millis() - next.due.as_millis();
                prop_assert!(late < 200, "{schedule} is due since {late} ms");
            }
        }
    }
}

#[test]
fn occurrences_are_jobs() {
    let mut world = World::new();
    let outcome = world.changed("nightly", create(every("app", 60)));
    assert_eq!(outcome.outcome(), v1::Outcome::ScheduleChanged);
    let schedule = outcome.schedule.unwrap();
    assert_eq!(schedule.state(), v1::ScheduleState::Active);
    assert!(
        schedule.spec.unwrap().job.unwrap().data.is_empty(),
        "an answer has no data"
    );
    world.step_seconds(130);
    let nominal: Vec<i64> = world
        .occurrences("nightly")
        .iter()
        .map(|(nominal, _)| nominal.as_millis() - START)
        .collect();
    assert_eq!(nominal, [60_000, 120_000]);
    let jobs = world.state.values().filter(|job| job.kind == Kind::App);
    let jobs: Vec<_> = jobs
        .map(|job| (job.state, job.occurrence.clone().unwrap()))
        .collect();
    assert_eq!(jobs.len(), 2);
    assert!(jobs.iter().all(|(state, _)| *state == JobState::Dispatched));
    assert_eq!(
        &*jobs[0].1,
        format!("nightly@{}", Timestamp::from_millis(START + 60_000))
    );
    // No request has these ids, so none of them can be confused with a job of a client.
    assert!(
        world
            .dispatched
            .iter()
            .all(|(id, _)| !id.has_request() && !id.is_schedule())
    );
}

#[test]
fn schedule_without_occurrence_is_refused() {
    let mut world = World::new();
    let ending = |millis: i64| v1::ScheduleSpec {
        end: Some(to_timestamp(Timestamp::from_millis(START + millis))),
        ..every("app", 60)
    };
    let rejected = world.changed("s", create(ending(-1_000)));
    let expected = (v1::Outcome::Rejected, "request.end");
    assert_eq!((rejected.outcome(), &*rejected.code), expected);
    assert!(
        rejected.reason.contains("`end` is before the first occurrence"),
        "{}",
        rejected.reason
    );
    assert!(world.stored("s").is_none());
    let created = world.changed("s", create(ending(600_000))).outcome();
    assert_eq!(created, v1::Outcome::ScheduleChanged);
    // A change may end a schedule.
    let update = change::Update {
        spec: Some(ending(-1_000)),
        expected_revision: Some(1),
    };
    let ended = world.changed("s", Action::Update(update));
    assert_eq!(ended.schedule.unwrap().state(), v1::ScheduleState::Finished);
    let invalid = change::Update {
        spec: Some(ending(600_000)),
        expected_revision: Some(0),
    };
    let rejected = world.changed("s", Action::Update(invalid));
    assert_eq!(&*rejected.code, "request.expectedRevision");
}

#[test]
fn commands_for_schedules_have_certain_outcomes() {
    let mut world = World::new();
    let outcome = |world: &mut World, action| world.changed("s", action).outcome();
    let pause = || Action::Pause(change::Pause {});
    let resume = || Action::Resume(change::Resume { catch_up: false });
    let trigger = || Action::Trigger(change::Trigger {});
    let delete = || Action::Delete(change::Delete {});
    let update = |seconds, expected_revision| {
        Action::Update(change::Update {
            spec: Some(every("app", seconds)),
            expected_revision,
        })
    };
    for action in [pause(), resume(), trigger(), delete(), update(60, None)] {
        assert_eq!(outcome(&mut world, action), v1::Outcome::ScheduleUnknown);
    }
    for (action, expected, revision) in [
        (create(every("app", 60)), v1::Outcome::ScheduleChanged, 1),
        (create(every("app", 60)), v1::Outcome::ScheduleUnchanged, 1),
        (create(every("app", 61)), v1::Outcome::ScheduleExists, 1),
        (create(every("other", 60)), v1::Outcome::ScheduleExists, 1),
        (resume(), v1::Outcome::ScheduleUnchanged, 1),
        (pause(), v1::Outcome::ScheduleChanged, 2),
        (pause(), v1::Outcome::ScheduleUnchanged, 2),
        (update(61, Some(1)), v1::Outcome::ScheduleRevised, 2),
        (update(61, Some(2)), v1::Outcome::ScheduleChanged, 3),
        (update(61, None), v1::Outcome::ScheduleUnchanged, 3),
        // Again, because its answer was lost.
        (update(61, Some(2)), v1::Outcome::ScheduleUnchanged, 3),
        (update(62, Some(2)), v1::Outcome::ScheduleRevised, 3),
        (resume(), v1::Outcome::ScheduleChanged, 4),
    ] {
        assert_eq!(outcome(&mut world, action.clone()), expected, "{action:?}");
        let stored = world.stored("s").unwrap();
        assert_eq!(stored.progress.revision, revision, "{action:?}");
    }
    let triggered = world.changed("s", trigger());
    assert_eq!(triggered.outcome(), v1::Outcome::ScheduleTriggered);
    let job = triggered.job.unwrap();
    assert_eq!(job.occurrence, format!("s+{}", job.id));
    assert!(world.was_dispatched(job.id.parse().unwrap()));
    // Also of a schedule that is paused.
    outcome(&mut world, pause());
    assert_eq!(outcome(&mut world, trigger()), v1::Outcome::ScheduleTriggered);
    assert_eq!(outcome(&mut world, delete()), v1::Outcome::ScheduleChanged);
    assert_eq!(outcome(&mut world, delete()), v1::Outcome::ScheduleUnknown);
    assert!(world.stored("s").is_none());
    world.step_seconds(130);
    assert_eq!(world.occurrences("s"), []);
    assert!(world.index.values().all(|(job, _)| job.kind != Kind::Schedule));
}

#[test]
fn unexpected_application_means_unknown_schedule() {
    let mut world = World::new();
    world.changed("s", create(every("app", 60)));
    let delete = || Action::Delete(change::Delete {});
    for (app, expected) in [
        ("other", v1::Outcome::ScheduleUnknown),
        ("app", v1::Outcome::ScheduleChanged),
    ] {
        let answer = world.change_of_app("s", app, delete());
        world.advance(50);
        assert_eq!(world.answers[&answer].outcome(), expected, "{app}");
    }
}

#[test]
fn full_quota_loses_no_occurrence() {
    let seconds = |seconds| prost_types::Duration { seconds, nanos: 0 };
    // The default grace, the shortest one, and one for which the longest delay counts.
    for (grace, retried) in [(None, 15), (Some(10), 3), (Some(3_600), 60)] {
        let mut world = World::with(Settings {
            max_waiting: [("app".into(), 1)].into(),
            ..settings()
        });
        let waits = world.send_job(spec("app", after(HumanDuration::from_secs(86_400))));
        let spec = v1::ScheduleSpec {
            misfire: Some(v1::Misfire {
                policy: v1::MisfirePolicy::Skip.into(),
                limit: None,
                grace: grace.map(seconds),
            }),
            ..every("app", 120)
        };
        world.changed("s", create(spec));
        let trigger = world.changed("s", Action::Trigger(change::Trigger {}));
        assert_eq!(trigger.code, QUOTA_EXCEEDED);
        // A second takes 1.1 s.
        world.step_seconds(110);
        let problem = world.stored("s").unwrap().problem.unwrap();
        let expected = "scheduler.apps.app.max_waiting (1)";
        assert!(problem.contains(expected), "{grace:?}: {problem}");
        world.cancel(waits);
        world.step_seconds(retried);
        let stored = world.stored("s").unwrap();
        assert_eq!(stored.problem, None, "{grace:?}");
        assert_eq!(
            (world.occurrences("s").len(), stored.skipped),
            (1, 0),
            "{grace:?}"
        );
    }
}

#[test]
fn schedule_without_application_is_retried() {
    let mut world = World::new();
    world.changed("s", create(every("other", 10)));
    let with = |world: &mut World, settings: Settings| {
        world.settings = Arc::new(Settings {
            topics: Arc::new(world.topics.clone()),
            ..settings
        });
        world.restart();
    };
    let mut without = settings();
    without.rules.apps.remove("other");
    with(&mut world, without);
    world.step_seconds(100);
    assert_eq!(world.occurrences("s"), []);
    let problem = world.stored("s").unwrap().problem.unwrap();
    assert!(
        problem.contains("`other`, which is not an application"),
        "{problem}"
    );
    with(&mut world, settings());
    world.step_seconds(70);
    let stored = world.stored("s").unwrap();
    assert_eq!(stored.problem, None);
    // What was due for more than a minute is missed, and only the latest of it is dispatched.
    assert!(stored.skipped > 0 && !world.occurrences("s").is_empty());
    let decided = stored
        .schedule
        .recurrence()
        .count(stored.created, stored.progress.position);
    assert_eq!(stored.progress.count + stored.skipped, decided);
}

#[test]
fn update_loses_no_due_occurrence() {
    let mut world = World::new();
    let spec = every("app", 60);
    world.changed("s", create(spec.clone()));
    let update = |spec: v1::ScheduleSpec| {
        Action::Update(change::Update {
            spec: Some(spec),
            expected_revision: None,
        })
    };
    let mut other_data = spec.clone();
    other_data.job.as_mut().unwrap().data = Bytes::from_static(b"other");
    // Due, and not decided on when the command is.
    world.run(&Step::AdvanceClock(60_000));
    let outcome = world.changed("s", update(other_data));
    assert_eq!(
        (outcome.outcome(), outcome.skipped),
        (v1::Outcome::ScheduleChanged, 0)
    );
    world.run(&Step::AdvanceClock(60_000));
    let outcome = world.changed("s", update(every("app", 3_600)));
    assert_eq!(
        (outcome.outcome(), outcome.skipped),
        (v1::Outcome::ScheduleChanged, 0)
    );
    assert_eq!(world.occurrences("s").len(), 2);
    // What is not due because of its jitter is skipped and counted.
    let with_jitter = v1::ScheduleSpec {
        jitter: Some(prost_types::Duration {
            seconds: 3_000,
            nanos: 0,
        }),
        ..every("app", 3_600)
    };
    world.changed("s", update(with_jitter));
    let stored = world.stored("s").unwrap();
    let next = stored.next_occurrence().unwrap();
    assert!(next.due > next.nominal.after(Duration::from_secs(1)), "{next:?}");
    world.now = next.nominal.after(Duration::from_millis(500));
    let outcome = world.changed("s", update(every("app", 60)));
    assert_eq!(
        (outcome.outcome(), outcome.skipped),
        (v1::Outcome::ScheduleChanged, 1)
    );
    assert_eq!(world.stored("s").unwrap().skipped, 1);
    world.check_occurrences();
}

#[test]
fn large_catch_up_delays_no_others() {
    let mut world = World::new();
    world.changed("large", create(large_every_second()));
    world.changed("small", create(every("other", 60)));
    for _ in 0..10 {
        world.run(&Step::AdvanceClock(60_000));
    }
    let job = world.schedule("other", 0, None);
    for turn in 0..20 {
        let writes = world.shard.finish(
            world.now,
            Room {
                records: 5_000,
                bytes: 1 << 20,
            },
        );
        let bytes = writes.bytes();
        assert!(bytes < 2 << 20, "{bytes} bytes in turn {turn}");
        let mut batch = TransactionBatch::default();
        world.turns.add(ASSIGNMENT, writes, &mut batch);
        world.commit(batch);
        world.run(&Step::ServeIndex(5));
    }
    assert!(world.was_dispatched(job));
    assert!(!world.occurrences("small").is_empty());
    assert!(
        world.occurrences("large").len() < 600,
        "the catch-up has not ended"
    );
    world.advance(10_000);
    assert_eq!(world.occurrences("large").len(), 610);
    world.check_occurrences();
}

#[test]
fn late_update_fits_into_turns() {
    let mut world = World::new();
    let large = large_every_second();
    world.changed("large", create(large.clone()));
    for _ in 0..2 {
        world.run(&Step::AdvanceClock(60_000));
    }
    let mut slower = large;
    slower.timing = every("app", 3_600).timing;
    let update = Action::Update(change::Update {
        spec: Some(slower),
        expected_revision: Some(1),
    });
    let answer = world.change("large", update);
    let later = world.schedule("other", 0, None);
    world.run(&Step::ServeIndex(5));
    let room = Room {
        records: 5_000,
        bytes: 1 << 20,
    };
    let mut turns = 0;
    while !world.answers.contains_key(&answer) {
        let writes = world.shard.finish(world.now, room);
        let bytes = writes.bytes();
        assert!(bytes < 2 << 20, "{bytes} bytes in turn {turns}");
        let mut batch = TransactionBatch::default();
        world.turns.add(ASSIGNMENT, writes, &mut batch);
        world.commit(batch);
        world.run(&Step::ServeIndex(5));
        turns += 1;
    }
    assert!((5..50).contains(&turns), "{turns} turns");
    let outcome = &world.answers[&answer];
    assert_eq!(
        (outcome.outcome(), outcome.skipped),
        (v1::Outcome::ScheduleChanged, 0)
    );
    world.advance(500);
    assert!(world.was_dispatched(later));
    assert_eq!(world.occurrences("large").len(), 120);
    world.check_occurrences();
}

#[test]
fn stalled_index_delays_schedules() {
    const IDS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let mut world = World::with(Settings {
        // The look-ahead has passed what is due while the changes pile up: a schedule that leaves the window must be read again.
        window: Duration::from_secs(60),
        window_bytes: 64 << 20,
        ..settings()
    });
    let mut spec = every("app", 1);
    spec.job.as_mut().unwrap().data = vec![0; 900_000].into();
    for id in IDS {
        world.changed(id, create(spec.clone()));
    }
    for _ in 0..100 {
        world.run(&Step::AdvanceClock(1_000));
        world.turn(50, false);
    }
    let memory = world.shard.memory();
    assert!(memory < 500 << 20, "{memory} bytes");
    assert!(
        world.shard.next_due().is_none_or(|due| due > world.now),
        "the lane would spin"
    );
    world.settle();
    for id in IDS {
        let stored = world.stored(id).unwrap();
        assert!(stored.next_occurrence().unwrap().due > world.now.after(Duration::ZERO));
        assert_eq!(world.occurrences(id).len() as u64, stored.progress.count);
    }
    world.check_occurrences();
}

#[test]
fn turn_takes_only_schedules_it_runs() {
    let mut world = World::with(Settings {
        window_jobs: 1_000,
        ..settings()
    });
    for number in 0..300 {
        world.changed(&format!("s{number}"), create(every("app", 60)));
    }
    world.run(&Step::AdvanceClock(60_000));
    world.run(&Step::ServeIndex(5));
    let mut most = 0;
    for _ in 0..5 {
        let before = world.shard.window.departures();
        world.turn(40, false);
        world.run(&Step::ServeIndex(5));
        most = most.max(world.shard.window.departures() - before);
    }
    // With many due schedules, each turn would otherwise go through all of them.
    assert!(
        (5..=40).contains(&most),
        "{most} left the window in a turn of 40 records"
    );
}
