//! Jobs whose topic is missing, jobs that expire, and jobs that have ended.

use super::*;

#[test]
fn backward_clock_repeats_search_for_ended() {
    let mut shard = Shard::new(Arc::new(settings()), 0);
    let looks = |shard: &mut Shard, now| {
        let requests = shard.index_requests(now);
        requests
            .iter()
            .any(|request| matches!(request, IndexRequest::Forgettable))
    };
    let now = Timestamp::from_millis(START);
    shard.handle_response(IndexResponse::Ready { end: 0 }, now);
    assert!(looks(&mut shard, now));
    shard.handle_response(IndexResponse::Forgettable(Vec::new()), now);
    assert!(!looks(&mut shard, now));
    assert!(looks(&mut shard, Timestamp::from_millis(START - 3_600_000)));
}

#[test]
fn forgetting_yields_to_due_jobs() {
    let mut shard = Shard::new(Arc::new(settings()), 0);
    let now = Timestamp::from_millis(START);
    shard.handle_response(IndexResponse::Ready { end: 0 }, now);
    let ended = (0..1_000).map(|offset| JobId::new(now, 0, offset)).collect();
    shard.handle_response(IndexResponse::Forgettable(ended), now);
    let forgotten = |shard: &mut Shard| shard.finish(now, records(5_000)).tally.forgotten;
    let job = |ahead| {
        let due = now.after(Duration::from_millis(ahead));
        Arc::new(Job {
            topic: APP.into(),
            id: JobId::new(now, 0, 5_000),
            due,
            ..Job::for_tests(5_000)
        })
    };
    shard.window.insert(job(1_000));
    assert_eq!(forgotten(&mut shard), 50);
    shard.window.insert(job(1_001));
    assert_eq!(forgotten(&mut shard), 950);
}

#[test]
fn missing_topic_delays_no_others() {
    let mut world = World::new();
    let missing = |seconds| Presence::Missing {
        lasting: Duration::from_secs(seconds),
    };
    world.topics.set(missing(1));
    let limit = world.settings.window_jobs;
    let gone: Vec<JobId> = (0..20 * limit)
        .map(|n| world.schedule("gone", u16::try_from(n % 500).unwrap(), None))
        .collect();
    let others: Vec<JobId> = (0..100).map(|n| world.schedule("app", 400 + n, None)).collect();
    let last = world.schedule("gone", 700, None);
    let cancelled = world.schedule("gone", 100, None);
    world.advance(900);
    assert_eq!(count_dispatched(&world, &others), others.len());
    assert_eq!(count_dispatched(&world, &gone), 0);
    assert_eq!(
        world.shard.window_len(),
        0,
        "blocked jobs take room in the window"
    );
    // A new owner finds the blocked jobs again.
    world.restart();
    world.advance(100);
    let blocked = |world: &World| world.shard.blocked().values().sum::<usize>();
    assert_eq!(blocked(&world), gone.len() + 2);
    // Blocked jobs can be cancelled.
    world.cancel(cancelled);
    world.advance(50);
    assert_eq!(blocked(&world), gone.len() + 1);
    world.topics.set(Presence::Exists);
    let new_job = world.schedule("app", 100, None);
    world.advance(150);
    assert!(
        world.was_dispatched(new_job),
        "the backlog of another topic delayed it"
    );
    world.advance(1_500);
    assert_eq!(count_dispatched(&world, &gone), gone.len());
    assert!(world.was_dispatched(last) && !world.was_dispatched(cancelled));
    assert_eq!(blocked(&world), 0);
    world.check();
}

#[test]
fn an_expired_job_is_not_dispatched() {
    let mut world = World::new();
    let spec = v1::JobSpec {
        expire_after: Some(to_duration(HumanDuration::from_secs(5))),
        ..spec("app", after(HumanDuration::from_secs(1)))
    };
    world.send_job(spec);
    world.turn(50, false);
    world.run(&Step::AdvanceClock(6_500));
    world.settle();
    assert_eq!(world.dispatched, []);
    assert_eq!(
        world.state.values().map(|job| job.state).collect::<Vec<_>>(),
        [JobState::Expired]
    );
}
