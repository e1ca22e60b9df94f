//! Rates, quotas, pauses and priorities: what one application does to itself and to others.

use super::*;

#[test]
fn an_application_that_has_used_up_its_rate_delays_no_other() {
    let mut world = World::with(Settings {
        app_states: LiveAppStates::fixed(limited(Some(20.0))),
        ..settings()
    });
    let at_once: Vec<JobId> = (0..30).map(|_| world.schedule("app", 0, None)).collect();
    let later: Vec<JobId> = (0..30).map(|_| world.schedule("app", 300, None)).collect();
    let others: Vec<JobId> = (0..30).map(|n| world.schedule("other", 10 * n, None)).collect();
    world.advance(400);
    assert_eq!(count_dispatched(&world, &others), 30);
    // 20 at once, and 8 in 400 ms.
    let dispatched = count_dispatched(&world, &at_once) + count_dispatched(&world, &later);
    assert!((26..=28).contains(&dispatched), "{dispatched}");
    let held_back = world.shard.held_back(world.now);
    assert!(
        held_back.contains_key("app") && held_back.len() == 1,
        "{held_back:?}"
    );
    world.advance(1_000);
    let dispatched = count_dispatched(&world, &at_once) + count_dispatched(&world, &later);
    assert!((45..=48).contains(&dispatched), "{dispatched}");
    world.settle();
    assert_eq!(world.dispatched.len(), 90);
    world.check();
}

#[test]
fn jobs_that_expire_take_nothing_from_the_rate() {
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
fn a_quota_counts_the_jobs_that_wait() {
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
    let assert_full = |world: &mut World, why: &str| {
        for delay in [0, 60_000] {
            assert_eq!(code(world, "app", delay).1, QUOTA_EXCEEDED, "{why}");
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
fn jobs_of_a_paused_application_wait_until_it_is_resumed() {
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
    let parked = world.shard.parked();
    assert_eq!(parked, [(Obstacle::Paused("gone".into()), jobs.len())].into());
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
fn an_application_can_be_paused_and_resumed_at_any_time() {
    let mut world = World::new();
    let jobs: Vec<JobId> = (0..60).map(|n| world.schedule("app", 10 * n, None)).collect();
    let others: Vec<JobId> = (0..60).map(|n| world.schedule("other", 10 * n, None)).collect();
    world.advance(200);
    let before = count_dispatched(&world, &jobs);
    assert!((1..60).contains(&before), "{before}");
    world.set_apps(paused("app"));
    world.advance(2_000);
    // A new owner obeys it too.
    world.restart();
    world.advance(500);
    assert_eq!(count_dispatched(&world, &jobs), before);
    assert_eq!(count_dispatched(&world, &others), others.len());
    let parked = world.shard.parked();
    assert_eq!(
        parked,
        [(Obstacle::Paused("app".into()), jobs.len() - before)].into()
    );
    // Due on arrival.
    let late = world.schedule("app", 0, None);
    world.advance(50);
    assert!(!world.was_dispatched(late));
    world.set_apps(AppStates::default());
    world.settle();
    assert_eq!(count_dispatched(&world, &jobs), jobs.len());
    assert!(world.was_dispatched(late));
    world.check();
}

#[test]
fn a_rate_that_is_set_while_jobs_wait_holds_them_back_over_aborted_turns() {
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

fn schedule_with_priority(world: &mut World, app: &str, priority: v1::Priority) -> JobId {
    let spec = v1::JobSpec {
        priority: priority.into(),
        ..spec(app, at(world.now))
    };
    world.send_job(spec)
}

#[test]
fn in_a_backlog_high_priority_is_dispatched_first_and_low_priority_is_not_starved() {
    let mut world = World::with(Settings {
        window_jobs: 1000,
        ..settings()
    });
    let of = |world: &mut World, priority| -> Vec<JobId> {
        (0..60)
            .map(|_| schedule_with_priority(world, "app", priority))
            .collect()
    };
    let low = of(&mut world, v1::Priority::Low);
    let normal = of(&mut world, v1::Priority::Normal);
    let high = of(&mut world, v1::Priority::High);
    // Each turn decides more commands than it dispatches jobs.
    while count_dispatched(&world, &high) < high.len() {
        world.turn(20, false);
        world.run(&Step::ServeIndex(3));
    }
    let overtaken = count_dispatched(&world, &normal) + count_dispatched(&world, &low);
    assert!(
        overtaken <= 60,
        "{overtaken} of 120 were dispatched before the last of high priority"
    );
    while count_dispatched(&world, &normal) < normal.len() {
        world.turn(20, false);
        world.run(&Step::ServeIndex(3));
    }
    assert!(count_dispatched(&world, &low) < low.len());
    // More jobs of high priority arrive for longer than they may overtake jobs of low priority.
    for _ in 0..300 {
        for _ in 0..5 {
            schedule_with_priority(&mut world, "app", v1::Priority::High);
        }
        world.run(&Step::AdvanceClock(50));
        world.turn(20, false);
        world.run(&Step::ServeIndex(3));
    }
    assert_eq!(count_dispatched(&world, &low), low.len());
    world.settle();
    world.check();
}

#[test]
fn a_backlog_of_one_application_does_not_delay_another() {
    let mut world = World::with(Settings {
        window_jobs: 1000,
        ..settings()
    });
    let burst: Vec<JobId> = (0..100)
        .map(|_| schedule_with_priority(&mut world, "app", v1::Priority::Normal))
        .collect();
    for _ in 0..4 {
        world.turn(20, false);
    }
    let other = schedule_with_priority(&mut world, "other", v1::Priority::Low);
    // It is dispatched as soon as its command is decided.
    while !world.was_dispatched(other) {
        world.turn(20, false);
    }
    assert!(
        count_dispatched(&world, &burst) < 80,
        "{}",
        count_dispatched(&world, &burst)
    );
}
