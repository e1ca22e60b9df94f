//! Idempotency keys: duplicates, conflicts, replacements, and commands by key.

use super::*;
use crate::index::memory::MemoryIndex;
use crate::index::{Index as _, Owner};

#[test]
fn split_turn_keeps_keys() {
    // One change per part.
    let mut world = World::with(Settings {
        index_batch_bytes: 1,
        ..settings()
    });
    let first: Vec<JobId> = (0..3)
        .map(|key| world.schedule("app", 60_000, Some(key)))
        .collect();
    for _ in 0..10 {
        world.serve_index();
    }
    world.turn(50, false);
    assert_eq!((world.state.len(), world.index.len()), (3, 0));
    // The index gets the first part, and then answers about a key in another one.
    let again: Vec<JobId> = (0..3)
        .rev()
        .map(|key| world.schedule("app", 60_000, Some(key)))
        .collect();
    while world.index.is_empty() {
        world.serve_index();
    }
    world.serve_index();
    assert_eq!(world.index.len(), 1);
    world.turn(50, false);
    world.advance(100);
    for (first, again) in first.iter().rev().zip(again) {
        let (outcome, job) = outcome_of(&world, again);
        assert_eq!((outcome, job.id), (v1::Outcome::Duplicate, first.to_string()));
    }
}

fn outcome_of(world: &World, id: JobId) -> (v1::Outcome, v1::Job) {
    let answer = &world.answers[&id.offset().to_string()];
    (answer.outcome(), answer.job.clone().unwrap_or_default())
}

#[test]
fn larger_replacement_needs_memory() {
    let mut world = World::new();
    let request = |data: usize| v1::JobSpec {
        idempotency_key: Some("k".to_owned()),
        on_conflict: v1::ConflictPolicy::Replace.into(),
        data: vec![b'x'; data].into(),
        ..spec("app", after(HumanDuration::from_secs(60)))
    };
    world.send_job(request(10));
    world.advance(50);
    world.shard.set_memory_pressure(MemoryPressure::Full);
    let [same, larger] = [10, 11].map(|data| world.send_job(request(data)));
    world.advance(50);
    assert_eq!(outcome_of(&world, same).0, v1::Outcome::Replaced);
    assert_eq!(outcome_of(&world, larger).0, v1::Outcome::Rejected);
    assert_eq!(world.answers["2"].code, INDEX_FULL);
}

#[test]
fn evicted_job_is_never_unknown() {
    let mut world = World::new();
    let ended = world.schedule("app", 10, Some(1));
    let waits = world.schedule("app", 60_000, Some(2));
    world.advance(600);
    world.restart();
    world.has_evicted_ended = true;
    for step in [
        Step::CancelKey(1),
        Step::RescheduleKey(1, 30_000),
        Step::CancelKey(2),
        Step::CancelKey(3),
    ] {
        world.run(&step);
    }
    world.advance(50);
    let answers = ["2", "3", "4", "5"].map(|offset| &world.answers[offset]);
    assert_eq!(
        answers.map(v1::CommandOutcome::outcome),
        [
            v1::Outcome::Ended,
            v1::Outcome::Ended,
            v1::Outcome::Cancelled,
            v1::Outcome::Unknown
        ]
    );
    let shown = answers.map(|answer| answer.job.as_ref().map(|job| (job.id.clone(), job.app.clone())));
    let shown_of = |id: JobId| Some((id.to_string(), "app".to_owned()));
    assert_eq!(shown, [shown_of(ended), shown_of(ended), shown_of(waits), None]);
}

/// What a new index reads in the state topic about a key.
async fn restored_key(world: &World, key: &str) -> Option<JobId> {
    let mut newest: BTreeMap<i64, Change> = BTreeMap::new();
    for (job, record) in snapshot(&world.state).into_values() {
        let last = world.log.iter().rfind(|(_, id, _)| *id == job.id);
        let change = codec::change(&job, record, world.settings.retention);
        newest.insert(last.unwrap().0, change);
    }
    let batch = Batch {
        to: world.end,
        changes: newest.into_values().collect(),
        ..Batch::default()
    };
    let index = MemoryIndex::default();
    index.clear(0, Owner(1)).await.unwrap();
    index.apply(0, Owner(1), &batch, world.now).await.unwrap();
    let query = Query::Key(key_hash("app", key));
    let found = lookups::answer(&index, 0, &[query], world.now).await.unwrap();
    found[0].key.map(|key| key.id)
}

/// So short that keys and ended jobs are forgotten within a test.
fn short_retention() -> Settings {
    let retention = RetentionPolicy {
        keys: Duration::from_millis(300),
        ended: Duration::from_millis(200),
    };
    Settings {
        retention,
        ..settings()
    }
}

#[tokio::test]
async fn newest_request_decides_after_clock_steps() {
    let request = |is_high, ahead| Debounced {
        is_delayed: false,
        is_high,
        ahead,
        ..DEBOUNCED
    };
    // Whether the first job still waits when the clock is set back, and whether the second job exists and is replaced then.
    for (waits, is_replaced) in [(true, false), (false, false), (false, true)] {
        let mut world = World::with(short_retention());
        let first = world.replace(&request(false, if waits { 400 } else { 0 }));
        world.advance(50);
        assert_eq!(world.was_dispatched(first), !waits);
        if is_replaced {
            world.replace(&request(true, 400));
            world.advance(50);
        }
        world.run(&Step::JumpClock(-3_600));
        // It waits for longer than its key is in use.
        let newest = world.replace(&request(true, 600));
        world.advance(50);
        let (outcome, job) = outcome_of(&world, newest);
        let expected = match (waits, is_replaced) {
            (false, false) => v1::Outcome::Scheduled,
            _ => v1::Outcome::Replaced,
        };
        assert_eq!(outcome, expected);
        let newest: JobId = job.id.parse().unwrap();
        world.advance(350);
        assert!(!world.was_dispatched(newest));
        let expected = is_replaced.then_some(newest);
        assert_eq!(restored_key(&world, "1").await, expected);
        world.advance(2_000);
        assert!(world.was_dispatched(newest));
        assert_eq!(restored_key(&world, "1").await, expected);
        // A request of other content.
        world.restart();
        let next = world.schedule("app", 0, Some(1));
        world.advance(50);
        let (outcome, job) = outcome_of(&world, next);
        let expected = match is_replaced {
            // The clock has not reached the request that was accepted before it was set back.
            true => (v1::Outcome::Conflict, newest.to_string()),
            false => (v1::Outcome::Scheduled, next.to_string()),
        };
        assert_eq!((outcome, job.id), expected);
        world.settle();
        world.check();
    }
}
