//! Rates, quotas, pauses and priorities: what one application does to itself and to others.

use super::*;

#[test]
fn expired_jobs_take_no_tokens() {
    let mut world = World::with(Settings {
        app_states: LiveAppStates::fixed(limited(Some(1.0))),
        ..settings()
    });
    for expire_after in [Some(0), Some(0), Some(0), None] {
        let expire_after = expire_after.map(|seconds| to_duration(HumanDuration::from_secs(seconds)));
        world.send_job(v1::JobSpec {
            expire_after,
            ..spec("app", at(Timestamp::from_millis(START - 10)))
        });
    }
    world.advance(50);
    let expired = world
        .state
        .values()
        .filter(|job| job.state == JobState::Expired)
        .count();
    assert_eq!((expired, world.dispatched.len()), (3, 1));
}

#[test]
fn quota_counts_waiting_jobs() {
    let max_waiting = [("app".into(), 3)].into();
    let mut world = World::with(Settings {
        max_waiting,
        ..settings()
    });
    let code = |world: &mut World, app: &str, delay| {
        let id = world.schedule(app, delay, None);
        world.advance(100);
        (id, world.answers[&id.offset().to_string()].code.clone())
    };
    let accepted = |world: &mut World, delay| {
        let (id, code) = code(world, "app", delay);
        assert_eq!(code, "");
        id
    };
    let assert_full = |world: &mut World, reason: &str| {
        for delay in [0, 60_000] {
            assert_eq!(code(world, "app", delay).1, QUOTA_EXCEEDED, "{reason}");
        }
    };
    accepted(&mut world, 0);
    let keyed = v1::JobSpec {
        idempotency_key: Some("key".to_owned()),
        ..spec("app", at(world.now.after(Duration::from_secs(60))))
    };
    world.send_job(keyed.clone());
    let first = accepted(&mut world, 60_000);
    let due = accepted(&mut world, 3_000);
    assert_full(&mut world, "after three");
    assert_eq!(
        code(&mut world, "other", 60_000).1,
        "",
        "an application without a quota"
    );
    let repeated = world.send_job(keyed);
    world.advance(100);
    let repeated = &world.answers[&repeated.offset().to_string()];
    assert_eq!(repeated.outcome(), v1::Outcome::Duplicate);

    world.run(&Step::Restart);
    world.advance(50);
    assert_full(&mut world, "after a restart");
    world.cancel(first);
    world.advance(50);
    accepted(&mut world, 60_000);
    assert_full(&mut world, "after a cancellation");
    world.advance(3_000);
    assert!(world.was_dispatched(due));
    accepted(&mut world, 60_000);
    assert_full(&mut world, "after a dispatch");
}

#[test]
fn paused_jobs_wait_until_resumed() {
    let app_states = LiveAppStates::fixed(paused("gone"));
    let mut world = World::with(Settings {
        app_states,
        ..settings()
    });
    // It makes no difference whether the topic exists.
    let lasting = 2 * TIMEOUT;
    world.topics.set(Presence::Missing { lasting });
    let limit = world.settings.window_jobs;
    let ahead = |n| u16::try_from(n % 300).unwrap();
    let jobs: Vec<JobId> = (0..5 * limit)
        .map(|n| world.schedule("gone", ahead(n), None))
        .collect();
    let others: Vec<JobId> = (0..50).map(|n| world.schedule("app", 200 + n, None)).collect();
    world.advance(2_500);
    world.topics.set(Presence::Exists);
    world.advance(2_500);
    assert_eq!(count_dispatched(&world, &others), others.len());
    assert_eq!(
        (count_dispatched(&world, &jobs), world.dead_letters.len()),
        (0, 0)
    );
    let blocked = world.shard.blocked();
    assert_eq!(blocked, [(Obstacle::Paused("gone".into()), jobs.len())].into());
    assert_eq!(world.shard.window_len(), 0);
    // Its jobs can be cancelled.
    world.cancel(jobs[0]);
    world.advance(50);
    // A process with another configuration takes over.
    world.settings = Arc::new(Settings {
        topics: Arc::new(world.topics.clone()),
        ..settings()
    });
    world.apps = world.settings.app_states.current();
    world.restart();
    world.settle();
    assert_eq!(count_dispatched(&world, &jobs), jobs.len() - 1);
    world.check();
}

#[test]
fn aborted_turns_refill_no_tokens() {
    let mut world = World::new();
    let jobs: Vec<JobId> = (0..60).map(|_| world.schedule("app", 100, None)).collect();
    world.set_apps(limited(Some(10.0)));
    for _ in 0..10 {
        world.advance(100);
        // The lane replaces its shards after an abort. That must not fill the buckets again.
        world.turn(50, true);
    }
    let dispatched = count_dispatched(&world, &jobs);
    assert!((10..=20).contains(&dispatched), "{dispatched}");
    world.settle();
    world.check();
}
