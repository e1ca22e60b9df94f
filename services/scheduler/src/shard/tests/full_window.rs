//! The window of due jobs, when there are more than fit.

use super::*;

#[test]
fn empty_window_requests_a_scan() {
    for (window_jobs, window_bytes) in [
        (8, 1 << 20),
        (100, 1 << 20),
        (50_000, 64 << 20),
        (10_000_000, 1 << 36),
    ] {
        let settings = Settings {
            window_jobs,
            window_bytes,
            ..settings()
        };
        let mut shard = Shard::new(Arc::new(settings), 0);
        let now = Timestamp::from_millis(START);
        shard.handle_response(IndexResponse::Ready { end: 0 }, now);
        let has_scan = shard
            .index_requests(now)
            .iter()
            .any(|request| matches!(request, IndexRequest::Scan(_)));
        assert!(has_scan, "{window_jobs} jobs, {window_bytes} bytes");
    }
}

#[test]
fn jobs_beyond_window_are_on_time() {
    let mut world = World::new();
    let limit = world.settings.window_jobs;
    // From here on, all jobs that are due within the window are in memory.
    world.run(&Step::ServeIndex(5));
    let jobs: Vec<JobId> = (0..10 * limit)
        .map(|_| world.schedule("app", 120, None))
        .collect();
    world.turn(1000, false);
    assert_eq!(world.shard.window_len(), limit);
    world.advance(110);
    assert_eq!(count_dispatched(&world, &jobs), 0);
    assert_eq!(world.shard.window_len(), limit);
    world.advance(200);
    assert_eq!(count_dispatched(&world, &jobs), jobs.len());
    world.check();
}

#[test]
fn new_job_evicts_later_jobs() {
    let mut world = World::new();
    let limit = world.settings.window_jobs;
    let schedule = |world: &mut World, ahead: u16| -> Vec<JobId> {
        let jobs = 0..2 * limit;
        jobs.map(|_| world.schedule("app", ahead, None)).collect()
    };
    let looked_up = schedule(&mut world, 400);
    world.advance(230);
    assert_eq!(world.shard.window_len(), limit);
    let commanded = schedule(&mut world, 150);
    world.advance(10);
    assert_eq!(world.shard.window_len(), limit);
    let new_jobs: Vec<JobId> = (0..limit).map(|_| world.schedule("app", 30, None)).collect();
    world.advance(40);
    assert_eq!(count_dispatched(&world, &new_jobs), limit);
    let early = count_dispatched(&world, &commanded) + count_dispatched(&world, &looked_up);
    assert_eq!(early, 0);
    // All other jobs are dispatched in time too, including those that were evicted from the window.
    world.advance(160);
    assert_eq!(count_dispatched(&world, &commanded), commanded.len());
    assert_eq!(count_dispatched(&world, &looked_up), looked_up.len());
    world.check();
}

#[test]
fn running_scan_delays_no_job() {
    let mut world = World::new();
    let limit = world.settings.window_jobs;
    world.run(&Step::ServeIndex(5));
    // A scan is in progress when the window fills up, and its result does not contain the new jobs.
    world.run(&Step::AdvanceClock(60));
    world.turn(50, false);
    let is_scan = |request: &IndexRequest| matches!(request, IndexRequest::Scan(_));
    assert!(world.requests.iter().any(is_scan), "{:?}", world.requests);
    let jobs: Vec<JobId> = (0..5 * limit).map(|_| world.schedule("app", 100, None)).collect();
    world.turn(1000, false);
    world.advance(200);
    assert_eq!(count_dispatched(&world, &jobs), jobs.len());
    world.check();
}

#[test]
fn empty_flow_is_not_blocked() {
    let mut world = World::new();
    let lasting = Duration::from_secs(1);
    world.topics.set(Presence::Missing { lasting });
    let job = world.schedule("gone", 100, None);
    world.advance(300);
    assert_eq!(world.shard.blocked().values().sum::<usize>(), 1);
    world.cancel(job);
    world.advance(300);
    assert!(world.shard.blocked().is_empty(), "{:?}", world.shard.blocked());
}

#[test]
fn burst_beyond_window_hides_nothing() {
    let mut world = World::new();
    let burst: Vec<JobId> = (0..1_000).map(|_| world.schedule("app", 10_000, None)).collect();
    let due = at(world.now.after(Duration::from_millis(10_300)));
    let others = ["other", "app"].map(|app| {
        world.send_job(v1::JobSpec {
            priority: v1::Priority::High.into(),
            ..spec(app, due)
        })
    });
    // All of them are in the index only.
    world.turn(2_000, false);
    world.restart();
    world.run(&Step::AdvanceClock(9_900));
    for _ in 0..42 {
        world.run(&Step::AdvanceClock(10));
        world.turn(12, false);
        world.run(&Step::ServeIndex(3));
    }
    assert_eq!(count_dispatched(&world, &others), others.len());
    let dispatched = count_dispatched(&world, &burst);
    assert!((1..500).contains(&dispatched), "{dispatched} of the burst");
    world.settle();
    world.check();
}

#[test]
fn large_burst_hides_no_other_flow() {
    let mut world = World::with(Settings {
        window_jobs: 50_000,
        window_bytes: 64 << 20,
        ..settings()
    });
    // A scan reads some of them only.
    for _ in 0..100 {
        let spec = v1::JobSpec {
            data: vec![b'x'; 200_000].into(),
            ..spec("app", after(HumanDuration::from_secs(10)))
        };
        world.send_job(spec);
        world.turn(100, false);
        world.run(&Step::ServeIndex(3));
    }
    let other = world.schedule("other", 10_050, None);
    world.turn(100, false);
    world.restart();
    world.run(&Step::AdvanceClock(9_950));
    for _ in 0..12 {
        world.run(&Step::AdvanceClock(10));
        world.turn(2, false);
        world.run(&Step::ServeIndex(1));
    }
    assert!(world.was_dispatched(other));
    world.settle();
    world.check();
}

#[test]
fn large_jobs_cause_few_scans() {
    let mut world = World::with(Settings {
        window_jobs: 100,
        window_bytes: 1 << 20,
        ..settings()
    });
    let large = |app| v1::JobSpec {
        data: vec![b'x'; 400_000].into(),
        ..spec(app, after(HumanDuration::from_secs(10)))
    };
    let jobs: Vec<JobId> = ["app", "other", "gone"]
        .into_iter()
        .cycle()
        .take(12)
        .map(|app| {
            let id = world.send_job(large(app));
            world.turn(100, false);
            world.run(&Step::ServeIndex(3));
            id
        })
        .collect();
    world.restart();
    world.run(&Step::AdvanceClock(9_850));
    let mut scans = 0;
    for _ in 0..30 {
        // The clock stands still, and nothing is due yet.
        scans += usize::from(
            world
                .requests
                .iter()
                .any(|request| matches!(request, IndexRequest::Scan(_))),
        );
        world.run(&Step::ServeIndex(3));
        world.turn(100, false);
    }
    assert!((1..10).contains(&scans), "{scans} scans without progress");
    world.advance(400);
    assert_eq!(count_dispatched(&world, &jobs), jobs.len());
    world.check();
}

#[test]
fn new_jobs_hide_no_earlier_job() {
    let mut world = World::new();
    let first = world.schedule("app", 2000, None);
    for _ in 0..200 {
        world.schedule("app", 190, None);
        world.advance(10);
    }
    world.advance(10);
    assert!(world.was_dispatched(first));
}
