//! When ledger entries are removed, and when not.

use super::super::super::ledger_states::Removed;
use super::*;

/// An entry of the ledger whose dead letter is gone.
fn gone(offset: i64) -> Removed {
    Removed {
        id: item("a-dlq", offset).id,
        partition: 1,
    }
}

/// An executor whose jobs are done.
fn without_turns() -> World {
    let mut world = World::new();
    for _ in 0..2 {
        world.step();
        world.commit();
    }
    world
}

#[test]
fn entries_are_removed_when_idle() {
    let mut world = without_turns();
    let found = |request| {
        assert!(matches!(request, Request::FindGone { limit } if limit == removal::LIMIT));
        Answer::Gone(vec![gone(3), gone(4)])
    };
    for is_written in [false, true] {
        world.clock.advance(Duration::from_secs(60));
        world.finish();
        world.answer(found);
        assert_eq!(world.topics(), [ledger::TOPIC; 2]);
        assert!(world.batch.outputs.iter().all(|output| output.value.is_none()));
        assert_eq!(world.batch.owners, [owner()]);
        if is_written {
            world.commit();
        } else {
            let mut batch = std::mem::take(&mut world.batch);
            world.executor.take_back(&mut batch);
            assert!(batch.outputs.is_empty());
            world.finish();
        }
        assert_eq!(world.topics(), Vec::<&str>::new());
        assert!(world.request().is_none());
    }
}

#[test]
fn refused_removal_stops_no_job() {
    for is_denied in [true, false] {
        let mut world = World::new();
        world.clock.advance(Duration::from_secs(70));
        world.step();
        world.commit();
        // It has waited for ten seconds: it goes before the job that has a turn.
        world.answer(|request| {
            assert!(matches!(request, Request::FindGone { .. }), "{request:?}");
            Answer::Gone(vec![gone(3)])
        });
        assert_eq!(world.topics(), [ledger::TOPIC]);
        let now = world.clock.now();
        let mut batch = std::mem::take(&mut world.batch);
        let is_handled = if is_denied {
            world.executor.denied(&[denied(0)], &mut batch, now)
        } else {
            world.executor.refused(&[denied(0)], &mut batch, now)
        };
        assert!(is_handled && batch.outputs.is_empty());
        assert!(!world.executor.is_outdated(&batch));
        world.executor.committed(now);
        world.finish();
        assert_eq!(world.step(), "2");
    }
}

#[test]
fn failed_or_late_removal_is_dropped() {
    let mut world = without_turns();
    for is_stopping in [false, true] {
        world.clock.advance(Duration::from_secs(60));
        world.finish();
        if is_stopping {
            world.executor.stopping();
            world.answer(|_| Answer::Gone(vec![gone(3)]));
        } else {
            world.answer(|_| Answer::Failed("test".to_owned()));
        }
        assert_eq!(world.topics(), Vec::<&str>::new());
        assert!(world.request().is_none());
    }
}
