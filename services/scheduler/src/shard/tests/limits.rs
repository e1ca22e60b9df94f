//! Limits of memory, of the index and of turns.

use super::*;

#[test]
fn full_index_rejects_only_distant_jobs() {
    let mut world = World::new();
    let before: Vec<JobId> = (0..100).map(|n| world.schedule("app", 2_000 + n, None)).collect();
    let distant: Vec<JobId> = (0..20).map(|_| world.schedule("other", 60_000, None)).collect();
    world.advance(500);
    assert!(world.is_overlay_empty());
    world.run(&Step::SetIndexFull(true));
    // The shard learns that the index is full when the index refuses the first batch.
    let last = world.schedule("other", 60_000, None);
    world.advance(20);
    let refused = world.schedule("other", 60_000, None);
    let due_soon = world.schedule("other", 150, None);
    world.advance(300);
    assert!(world.was_dispatched(due_soon));
    let outcome = |world: &World, id: JobId| world.answers[&id.offset().to_string()].outcome();
    assert_eq!(outcome(&world, last), v1::Outcome::Scheduled);
    assert_eq!(outcome(&world, refused), v1::Outcome::Rejected);
    world.cancel(distant[0]);
    world.advance(2_000);
    assert_eq!(count_dispatched(&world, &before), before.len());
    assert!(
        world.is_overlay_empty(),
        "changes that end jobs must reach the index"
    );
    assert!(world.applied == world.end && world.index.contains_key(&last));
    world.run(&Step::SetIndexFull(false));
    world.advance(1_100);
    let again = world.schedule("other", 50_000, None);
    world.advance(100);
    assert_eq!(outcome(&world, again), v1::Outcome::Scheduled);
}

#[test]
fn full_index_refuses_paused_applications() {
    let mut world = World::with(Settings {
        app_states: LiveAppStates::fixed(paused("app")),
        ..settings()
    });
    world.shard.set_memory_pressure(MemoryPressure::Full);
    world.schedule("app", 0, None);
    let other = world.schedule("other", 0, None);
    world.advance(100);
    assert_eq!(world.answers["0"].code, INDEX_FULL);
    assert!(world.was_dispatched(other));
}

#[test]
fn commands_and_turns_are_limited() {
    let data = Bytes::from(vec![b'x'; 900_000]);
    let mut world = World::with(Settings {
        window_bytes: 64 << 20,
        window_jobs: 1000,
        ..settings()
    });
    for _ in 0..200 {
        let spec = v1::JobSpec {
            data: data.clone(),
            ..spec("app", after(HumanDuration::from_millis(100)))
        };
        world.send_job(spec);
    }
    assert!(world.shard.command_bytes < MAX_COMMAND_BYTES + 2 * data.len());
    assert!(world.fed < 80, "{} were accepted", world.fed);
    for _ in 0..400 {
        world.run(&Step::AdvanceClock(20));
        let before = world.end;
        world.turn(5000, false);
        assert!(world.end - before <= 12, "a turn is too large");
        world.run(&Step::ServeIndex(3));
    }
    world.check();
    assert_eq!((world.shard.command_bytes, world.dispatched.len()), (0, 200));
}

#[test]
fn large_commands_delay_no_due_job() {
    let mut world = World::with(Settings {
        window_jobs: 1000,
        window_bytes: 64 << 20,
        ..settings()
    });
    let due = world.send_job(spec("app", after(HumanDuration::from_millis(100))));
    world.turn(5000, false);
    world.run(&Step::AdvanceClock(119));
    for _ in 0..40 {
        world.send_job(v1::JobSpec {
            data: vec![b'x'; 900_000].into(),
            ..spec("app", after(HumanDuration::from_millis(100)))
        });
    }
    world.turn(5000, false);
    assert!(world.was_dispatched(due), "commands filled the turn");
}

#[test]
fn lookup_results_are_limited() {
    const LARGE: usize = 1 << 20;
    let now = Timestamp::from_millis(START);
    let mut shard = Shard::new(Arc::new(settings()), 0);
    shard.handle_response(IndexResponse::Ready { end: 0 }, now);
    for offset in 0..100 {
        let request = format!(r#"{{"cancel":"{}"}}"#, JobId::new(now, 0, offset));
        let record = Record {
            position: Position {
                topic: "ingest".into(),
                partition: 0,
                offset,
            },
            timestamp: Some(now),
            key: None,
            value: Some(request.into()),
            headers: Headers::new(),
            unreadable_headers: 0,
        };
        shard.accept(record, now);
    }
    let lookups = |shard: &mut Shard| {
        let requests = shard.index_requests(now);
        requests.iter().find_map(|request| match request {
            IndexRequest::LookUp(keys) => Some(keys.len()),
            _ => None,
        })
    };
    let large = v1::JobRecord {
        state: v1::JobState::Dispatched.into(),
        request_hash: vec![0; 16].into(),
        data: Some(vec![0; LARGE].into()),
        ..v1::JobRecord::default()
    };
    let large = codec::decode(JobId::new(now, 0, 0), &large.encode_to_vec().into()).unwrap();
    let large = Arc::new(large);
    let mut decided = 0;
    while decided < 100 {
        let before = shard.memory();
        let count = lookups(&mut shard).unwrap();
        assert!(count * LARGE <= 16 * LARGE, "{count} jobs in one lookup");
        let large = Found {
            key: None,
            job: Some(large.clone()),
        };
        let size = large.size();
        assert!(size >= LARGE);
        shard.handle_response(IndexResponse::LookedUp(vec![large; count]), now);
        assert_eq!(shard.memory(), before + count * size);
        // The next lookup waits until these commands are decided.
        assert_eq!(lookups(&mut shard), None);
        let room = Room {
            records: 1_000,
            bytes: 1 << 20,
        };
        decided += shard.finish(now, room).completed.len();
    }
    assert_eq!(shard.memory(), 0);
}
