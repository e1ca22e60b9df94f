//! A full index: what it takes, what it rejects, and what is held back.

use redeliver_service::control::value::Release;

use super::*;

impl World {
    fn full() -> Self {
        let mut world = Self::new();
        world.run(&Step::SetIndexFull(true));
        world.shard.set_memory_pressure(MemoryPressure::Full);
        world
    }

    fn send_wait_of(&mut self, pipeline: &str, due: Timestamp) {
        self.send(ProtoCommand::LongWait(v1::LongWait {
            pipeline: pipeline.to_owned(),
            due: Some(to_timestamp(due)),
            value: Some(Bytes::from_static(b"document")),
            ..v1::LongWait::default()
        }));
    }

    fn outcome_at(&self, offset: usize) -> v1::Outcome {
        self.answers[&offset.to_string()].outcome()
    }

    fn has_room(&mut self) {
        self.run(&Step::SetIndexFull(false));
        self.shard.set_memory_pressure(MemoryPressure::Low);
    }
}

#[test]
fn due_jobs_never_fill_index() {
    let mut world = World::new();
    let waits = world.schedule("app", 60_000, None);
    world.advance(50);
    let before = world.index.len();
    world.run(&Step::SetIndexFull(true));
    let mut jobs = Vec::new();
    for _ in 0..200 {
        // Due at once, due within the window, and with keys.
        jobs.extend([0, 100].map(|ahead| world.schedule("app", ahead, None)));
        let key = Some(u8::try_from(jobs.len() / 2).unwrap());
        world.schedule("app", 0, key);
        world.advance(50);
    }
    world.advance(200);
    assert_eq!(count_dispatched(&world, &jobs), jobs.len());
    assert!(world.is_overlay_empty(), "the index lags behind");
    // Until the first batch is refused, the shard does not know that the index is full.
    let added = world.index.len() - before;
    assert!(added <= 3, "{added} of {} jobs", jobs.len());
    // The state topic contains nothing that the index does not.
    assert_eq!(world.state.len(), world.index.len());
    assert!(world.state.contains_key(&waits));
    world.run(&Step::AdvanceClock(60_000));
    world.settle();
    world.check();
}

#[test]
fn full_index_takes_no_new_keys() {
    let mut world = World::new();
    world.schedule("app", 60_000, Some(1));
    world.advance(50);
    world.shard.set_memory_pressure(MemoryPressure::Full);
    let due = Timestamp::from_millis(START + 60_000);
    let repeated = v1::JobSpec {
        idempotency_key: Some("1".to_owned()),
        ..spec("app", at(due))
    };
    world.send_job(repeated);
    world.schedule("app", 0, Some(2));
    world.advance(50);
    assert_eq!(world.outcome_at(1), v1::Outcome::Duplicate);
    assert_eq!(world.answers["2"].code, INDEX_FULL);
    world.shard.set_memory_pressure(MemoryPressure::High);
    let job = world.schedule("app", 0, Some(2));
    world.advance(50);
    assert!(world.was_dispatched(job));
}

#[test]
fn full_index_holds_long_waits_back() {
    let mut world = World::full();
    let due = world.now.after(Duration::from_millis(500));
    let far = world.now.after(Duration::from_secs(86_400));
    for due in [far, due, world.now] {
        world.send_wait_of("docs", due);
    }
    let job = world.schedule("app", 0, None);
    world.advance(100);
    assert!(world.was_dispatched(job));
    // What is due leaves at once, and again after the next one has become due.
    assert_eq!((world.returned_waits.len(), world.completed.len()), (1, 2));
    assert!(world.shard.next_due() <= Some(due) && world.shard.next_due() > Some(world.now));
    world.advance(500);
    assert_eq!((world.returned_waits.len(), world.completed.len()), (2, 3));
    assert!(world.returned_waits[1].1 >= due);
    assert!(world.state.is_empty() && world.index.is_empty());
    // Another owner reads the one that is not completed again.
    world.restart();
    world.shard.set_memory_pressure(MemoryPressure::Full);
    world.advance(100);
    assert_eq!((world.state.len(), world.completed.len()), (0, 3));
    world.has_room();
    world.advance(100);
    assert_eq!((world.index.len(), world.completed.len()), (1, 4));
    assert_eq!(world.shard.command_bytes, 0);
}

#[test]
fn held_waits_are_released_by_operators() {
    let mut world = World::full();
    let far = world.now.after(Duration::from_secs(86_400));
    for pipeline in ["docs", "docs", "mail"] {
        world.send_wait_of(pipeline, far);
    }
    world.advance(50);
    assert_eq!(world.completed.len(), 0);
    let release = Release {
        topic: ingest_id(),
        ends: vec![1],
        at: None,
    };
    world.set_apps(AppStates {
        released_waits: [("docs".into(), Arc::new(release))].into(),
        ..AppStates::default()
    });
    world.advance(50);
    assert_eq!(world.completed, [0].into());
    assert_eq!(world.returned_waits.len(), 1);
    assert_eq!(world.finished_releases["docs"].before, 1);
}

#[test]
fn held_waits_are_limited() {
    let mut world = World::full();
    let far = world.now.after(Duration::from_secs(86_400));
    for _ in 0..=MAX_COMMANDS {
        world.send_wait_of("docs", far);
    }
    world.advance(50);
    assert_eq!((world.fed, world.shard.capacity()), (MAX_COMMANDS, 0));
    world.has_room();
    world.advance(5_000);
    assert_eq!(world.completed.len(), MAX_COMMANDS + 1);
}

#[test]
fn full_index_keeps_near_jobs() {
    let mut world = World::new();
    let far = world.schedule("app", 60_000, None);
    world.advance(50);
    world.run(&Step::SetIndexFull(true));
    world.shard.set_memory_pressure(MemoryPressure::Full);
    let soon = world.schedule("app", 150, None);
    // Only the first one would free its place later than expected.
    world.run(&Step::Reschedule(1, 60_000));
    world.run(&Step::Reschedule(1, 100));
    world.run(&Step::Reschedule(0, 50_000));
    world.run(&Step::Reschedule(0, 100));
    world.advance(20);
    assert_eq!(world.answers["2"].code, INDEX_FULL);
    for offset in 3..6 {
        assert_eq!(world.outcome_at(offset), v1::Outcome::Rescheduled, "{offset}");
    }
    world.advance(300);
    assert_eq!(count_dispatched(&world, &[far, soon]), 2);
}

#[test]
fn full_index_refuses_stuck_jobs() {
    let missing = Presence::Missing {
        lasting: Duration::ZERO,
    };
    for pressure in [MemoryPressure::Low, MemoryPressure::High, MemoryPressure::Full] {
        let mut world = World::new();
        world.topics.set(missing);
        world.shard.set_memory_pressure(pressure);
        world.schedule("gone", 0, None);
        world.schedule("app", 0, None);
        world.advance(50);
        let is_accepted = [0, 1].map(|offset| world.outcome_at(offset) == v1::Outcome::Scheduled);
        assert_eq!(
            is_accepted,
            [pressure == MemoryPressure::Low, true],
            "{pressure:?}"
        );
    }
}

#[test]
fn refused_job_is_dead_although_forgotten() {
    let mut world = World::full();
    world.schedule("app", 0, None);
    world.schedule("app", 100, None);
    world.refused_turn(50, 0);
    world.advance(50);
    world.run(&Step::AdvanceClock(60));
    world.refused_turn(50, 0);
    assert_eq!((world.refused.len(), world.dispatched.len()), (2, 0));
    assert!(world.state.is_empty());
    world.settle();
    world.check();
}
