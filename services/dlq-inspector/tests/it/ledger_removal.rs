//! Entries of the ledger are removed once Kafka has deleted their dead letters, and only then.

use std::collections::BTreeMap;
use std::time::Duration;

use redeliver_core::Headers;
use redeliver_dlq_inspector::ledger::{self, Update};
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_testkit::eventually;
use redeliver_testkit::kafka_request::{delete_records, delete_topic};

use crate::redrive::{ENDED, World, done, ids_at, plan, planned, read, slowly, start, until};
use crate::support::{DEADLINE, Inspector};

/// What the ledger says about dead letters of the world: whether the newest record has a value.
fn entries(world: &World) -> BTreeMap<(i32, i64), bool> {
    let records = read(&world.env, &ledger::TOPIC.into());
    let updates = records.iter().filter_map(|record| Update::read(record).ok());
    updates
        .filter(|update| *update.id.topic == *world.dlq)
        .map(|update| {
            let entry = update.entry.is_some();
            ((update.id.partition, update.id.offset), entry)
        })
        .collect()
}

/// A world whose inspectors remove entries soon.
async fn world_that_removes(name: &str) -> World {
    let mut world = World::new(name, "").await;
    let key = "dlq_inspector.redrive.remove_entries_after";
    world.env.base.set(key, "2s");
    world
}

/// Waits until exactly these dead letters have an entry.
fn until_kept(world: &World, inspectors: &[Inspector], kept: &[(i32, i64)]) {
    eventually(
        "the entries of deleted dead letters are removed",
        DEADLINE,
        || {
            let entries = entries(world);
            let left: Vec<(i32, i64)> = entries.iter().filter(|(_, is)| **is).map(|(id, _)| *id).collect();
            if left == kept {
                Ok(())
            } else {
                let outputs = inspectors.iter().map(|inspector| inspector.process.output());
                Err(format!("{left:?}\n{}", outputs.collect::<Vec<_>>().join("\n")))
            }
        },
    );
}

/// The dead letters of both partitions from these offsets to offset 10.
fn from(first: [i64; 2]) -> Vec<(i32, i64)> {
    let ids = (0..).zip(first);
    ids.flat_map(|(partition, first)| (first..10).map(move |offset| (partition, offset)))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_are_removed_through_kills() {
    let mut world = world_that_removes("ledger-removal").await;
    world.put(20).await;
    let mut inspectors = world.start_two().await;
    for inspector in &mut inspectors {
        inspector.until_listed("", 20).await;
    }
    done(&mut inspectors[0], plan(v1::RedriveKind::Discard, "")).await;
    assert_eq!(entries(&world).len(), 20);

    let brokers = world.env.kafka.brokers.clone();
    delete_records(&brokers, &world.dlq, 0, 4);
    until_kept(&world, &inspectors, &from([4, 0]));
    // Both inspectors know the states of those that are left.
    for inspector in &mut inspectors {
        inspector.until_listed("state = DISCARDED", 16).await;
        assert_eq!(inspector.list("state = OPEN").await.len(), 0);
    }

    // Redrives go on meanwhile, slowly, and their leader is killed.
    world.put(40).await;
    for inspector in &mut inspectors {
        inspector.until_listed("state = OPEN", 40).await;
    }
    let request = v1::PlanRedriveRequest {
        rate_per_second: 10,
        ..plan(v1::RedriveKind::Redrive, "state = OPEN")
    };
    let redriven = planned(&mut inspectors[0], request).await.unwrap();
    start(&mut inspectors[0], &redriven.id).await;
    delete_records(&brokers, &world.dlq, 1, 7);
    for inspector in &mut inspectors {
        inspector.process.kill_9();
        inspector.process.start_again();
        inspector.until_serving().await;
    }
    let job = until(&mut inspectors[0], &redriven.id, &ENDED).await;
    assert_eq!((job.done, job.total), (40, 40), "{job:?}");
    assert_eq!(world.redriven().len(), 40);
    // At least these are removed after the restarts.
    delete_records(&brokers, &world.dlq, 1, 9);
    let redriven = (0..2).flat_map(|partition| (10..30).map(move |offset| (partition, offset)));
    let mut kept: Vec<(i32, i64)> = from([4, 9]).into_iter().chain(redriven).collect();
    kept.sort_unstable();
    until_kept(&world, &inspectors, &kept);
    for inspector in &mut inspectors {
        inspector.until_listed("state = REDRIVEN", 40).await;
        inspector.until_listed("state = DISCARDED", 7).await;
        assert_eq!(inspector.list("state = OPEN").await.len(), 0);
    }
    let mut removed = 0;
    for inspector in &mut inspectors {
        removed += inspector
            .process
            .metric("redeliver_dlq_ledger_entries_removed_total");
    }
    assert!(removed > 0, "no entry was removed after the restart");
}

#[tokio::test(flavor = "multi_thread")]
async fn prefetched_letter_is_not_redriven_twice() {
    const COUNT: u16 = 300;
    let world = world_that_removes("ledger-fetched").await;
    let letters = (0..COUNT).map(|offset| world.dead(offset.into(), Some(b"v"), Headers::new()));
    world.env.put(&world.dlq, 0, letters.collect()).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", COUNT.into()).await;
    // So often that the client goes on fetching between the steps, and the last ones are in its queue for long.
    let slow = planned(&mut inspector, slowly(20)).await.unwrap();
    start(&mut inspector, &slow.id).await;
    let last = done(&mut inspector, ids_at(&world, 0, 200..COUNT.into())).await;
    assert_eq!(last.done, 100, "{last:?}");
    delete_records(&world.env.kafka.brokers, &world.dlq, 0, COUNT.into());
    let slow = until(&mut inspector, &slow.id, &ENDED).await;
    assert!(
        inspector
            .process
            .metric("redeliver_dlq_ledger_entries_removed_total")
            > 0,
        "the slow job has ended before entries were removed: {slow:?}"
    );
    let mut times: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    for record in world.redriven() {
        let origin = record.headers.last("original-offset").unwrap();
        *times.entry(origin.to_vec()).or_default() += 1;
    }
    assert!(times.values().all(|times| *times == 1), "{times:?}");
    assert!(times.len() < COUNT.into(), "{slow:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_of_recreated_topic_stay() {
    let world = world_that_removes("ledger-recreated").await;
    world.put(20).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 20).await;
    done(&mut inspector, plan(v1::RedriveKind::Discard, "")).await;
    // What is below offset 6 is known to be gone.
    let brokers = world.env.kafka.brokers.clone();
    delete_records(&brokers, &world.dlq, 0, 6);
    let mut inspectors = [inspector];
    until_kept(&world, &inspectors, &from([6, 0]));

    delete_topic(&brokers, &world.dlq);
    world.env.recreate_topic(&world.dlq, 2).await;
    world.put(20).await;
    let [inspector] = &mut inspectors;
    inspector.until_listed("state = OPEN", 20).await;
    let redriven = done(inspector, plan(v1::RedriveKind::Redrive, "")).await;
    assert_eq!((redriven.done, world.redriven().len()), (20, 20));
    // Several times as long as an entry must be old.
    inspector.until_surveyed_after(Duration::from_secs(6)).await;
    assert_eq!(inspector.until_listed("state = REDRIVEN", 20).await.len(), 20);
    let again = planned(inspector, plan(v1::RedriveKind::Redrive, "")).await;
    let again = again.unwrap_err();
    assert_eq!(reason(&again).as_deref(), Some("NOTHING_TO_REDRIVE"));
    until_kept(&world, &inspectors, &from([0, 0]));
}
