//! Automatic redrives: what died a while ago is redriven without a caller, and parked once that has happened often enough.

use std::collections::BTreeMap;
use std::sync::Arc;

use redeliver_core::{Headers, Record, redrive};
use redeliver_proto::{Message as _, error, v1};
use redeliver_testkit::{LocalKafka, eventually, eventually_async};

use crate::completeness::{AUTHORIZER, allow_again, allow_all, deny};
use crate::redrive::{ENDED, World, change, client, plan, planned, read, start, until};
use crate::support::{DEADLINE, Dead, Inspector};

/// Redrives what is a second old, and waits for as short as possible.
fn yaml(more: &str) -> String {
    format!(
        "    automatic_redrive: {{ after: 1s, every: 1s, max_count: 1, rate: 1000, observe: 2s{more} }}\n"
    )
}

fn parking(world: &World) -> Arc<str> {
    format!("{}-p-parked", world.env.base.name()).into()
}

fn again(record: &Record) -> Dead {
    Dead {
        key: record.key.clone(),
        value: record.value.clone(),
        headers: record.headers.clone(),
    }
}

fn until_in(world: &World, topic: &Arc<str>, count: usize) -> Vec<Record> {
    eventually(&format!("{count} records in {topic}"), DEADLINE, || {
        let records = read(&world.env, topic);
        if records.len() == count {
            Ok(records)
        } else {
            Err(records.len().to_string())
        }
    })
}

async fn jobs(inspector: &mut Inspector) -> Vec<v1::Redrive> {
    let listed = client(inspector)
        .await
        .list_redrives(v1::ListRedrivesRequest {})
        .await;
    listed.unwrap().into_inner().redrives
}

/// All jobs, once there are so many: the API may know a job half a second after its first effects.
async fn until_jobs(inspector: &mut Inspector, count: usize) -> Vec<v1::Redrive> {
    eventually_async(&format!("{count} jobs"), DEADLINE, async || {
        let listed = jobs(inspector).await;
        if listed.len() == count {
            Ok(listed)
        } else {
            Err(format!("{listed:?}"))
        }
    })
    .await
}

fn audited(world: &World) -> Vec<v1::AuditEntry> {
    let topic = format!("{}-audit", world.env.base.name()).into();
    let records = read(&world.env, &topic);
    let entries = records
        .iter()
        .map(|record| v1::AuditEntry::decode(record.value.clone().unwrap()).unwrap());
    entries.collect()
}

/// How many dead letters were changed, by action.
fn changed(world: &World) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for entry in audited(world) {
        if entry.action.starts_with("dead-letters.") && !entry.ids.is_empty() {
            *counts.entry(entry.action).or_default() += entry.count;
        }
    }
    counts
}

fn until_standing(inspector: &mut Inspector, world: &World, state: &str) {
    let series = format!(
        "redeliver_dlq_automatic_redrive{{pipeline=\"{}-p\",state=\"{state}\"}} 1",
        world.env.base.name()
    );
    eventually(&series, DEADLINE, || {
        let metrics = inspector.metrics();
        if metrics.contains(&series) {
            Ok(())
        } else {
            let automatic = metrics.lines().filter(|line| line.contains("automatic"));
            Err(automatic.collect::<Vec<_>>().join("\n"))
        }
    });
}

fn put(world: &World, offsets: std::ops::Range<i64>, redrives: u32) -> Vec<Dead> {
    let letters = offsets.map(|offset| {
        let mut headers = Headers::new();
        headers.push_text("tenant", "a");
        if redrives > 0 {
            headers.push_text(redrive::REDRIVE_COUNT, &redrives.to_string());
        }
        world.dead(offset, Some(b"\0\xffvalue"), headers)
    });
    letters.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_redriven_without_a_caller_then_parked_and_redriven_by_hand() {
    let world = World::new("automatic", &yaml("")).await;
    let letters = put(&world, 0..5, 0);
    world.env.put(&world.dlq, 0, letters).await;
    let mut inspector = world.env.start().await;
    let first = until_in(&world, &world.due, 5);
    assert!(first.iter().all(|record| redrive::count(&record.headers) == 1));
    let listed = until_jobs(&mut inspector, 1).await;
    let job = &listed[0];
    let pipeline = format!("{}-p", world.env.base.name());
    assert_eq!(
        (&*job.created_by, &job.automatic_pipeline, job.total),
        ("automatic", &pipeline, 5)
    );

    // They come back: their automatic redrives are used up.
    let back: Vec<Dead> = first.iter().map(again).collect();
    let mut died = Vec::new();
    for dead in back {
        let offset: i64 = std::str::from_utf8(dead.headers.last("original-offset").unwrap())
            .unwrap()
            .parse()
            .unwrap();
        let redriven = dead
            .headers
            .filtered(|name| redrive::is_redrive_header(name) || name == "tenant");
        died.push(world.dead(offset, dead.value.as_deref(), redriven));
    }
    world.env.put(&world.dlq, 1, died.clone()).await;
    let parking = parking(&world);
    let parked = until_in(&world, &parking, 5);
    let content = |key: &Option<bytes::Bytes>, value: &Option<bytes::Bytes>, headers: &Headers| {
        format!("{key:?} {value:?} {headers:?}")
    };
    let mut expected: Vec<String> = (died.iter())
        .map(|dead| content(&dead.key, &dead.value, &dead.headers))
        .collect();
    let mut found: Vec<String> = (parked.iter())
        .map(|record| content(&record.key, &record.value, &record.headers))
        .collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected, "an exact copy");
    // Before that, those that were to be parked are open.
    inspector
        .until_listed(&format!("topic = \"{}\" AND state = REDRIVEN", world.dlq), 10)
        .await;
    let open = inspector.until_listed("state = OPEN", 5).await;
    assert!(
        open.iter()
            .all(|letter| letter.position.as_ref().unwrap().topic == *parking)
    );
    assert_eq!(world.redriven().len(), 5);

    // By hand, they return to their pipeline from the parking topic.
    let request = plan(v1::RedriveKind::Redrive, &format!("topic = \"{parking}\""));
    let job = planned(&mut inspector, request).await.unwrap();
    assert_eq!(job.destinations[0].topic, *world.due);
    start(&mut inspector, &job.id).await;
    let ended = until(&mut inspector, &job.id, &ENDED).await;
    assert_eq!((ended.done, world.redriven().len()), (5, 10));
    // Nobody else parks.
    let refused = planned(&mut inspector, plan(v1::RedriveKind::Park, ""))
        .await
        .unwrap_err();
    assert_eq!(error::reason(&refused).as_deref(), Some("KIND_INVALID"));

    let counts: BTreeMap<String, u64> = [("dead-letters.park", 5), ("dead-letters.redrive", 10)]
        .map(|(action, count)| (action.to_owned(), count))
        .into();
    assert_eq!(changed(&world), counts);
    let planned: Vec<v1::AuditEntry> = audited(&world)
        .into_iter()
        .filter(|entry| entry.action == "redrives.plan" && entry.by == "automatic")
        .collect();
    let mut details: Vec<&str> = planned.iter().map(|entry| entry.details.as_str()).collect();
    details.dedup();
    assert_eq!(details, ["Redrive, started", "Park, started"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_brake_stops_further_automatic_jobs_until_somebody_resumes() {
    let world = World::new(
        "automatic-brake",
        &yaml(", max_returned_share: 0.4").replace("observe: 2s", "observe: 10s"),
    )
    .await;
    let letters = put(&world, 0..40, 0);
    world.env.put(&world.dlq, 0, letters).await;
    let mut inspector = world.env.start().await;
    let first = until_in(&world, &world.due, 10);
    let back: Vec<Dead> = first[..5].iter().map(again).collect();
    world.env.put(&world.dlq, 1, back).await;
    until_standing(&mut inspector, &world, "braked");
    // Others die meanwhile: they stay.
    let others = put(&world, 40..45, 0);
    world.env.put(&world.dlq, 1, others).await;
    inspector.until_listed("state = OPEN", 40).await;
    let listed = until_jobs(&mut inspector, 1).await;
    let job = &listed[0];
    assert_eq!((job.state(), job.done), (v1::RedriveState::Paused, 10));
    assert!(job.brake.contains("5 of 10"), "{}", job.brake);
    let resumed = client(&mut inspector).await.resume_redrive(change(&job.id)).await;
    resumed.unwrap();
    // Then the others follow, and what has come back is parked.
    until_in(&world, &world.due, 45);
    until_in(&world, &parking(&world), 5);
    let others = jobs(&mut inspector).await;
    assert!(
        others.iter().all(|job| job.automatic_pipeline.ends_with("-p")),
        "{others:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_has_cancelled_is_not_redriven_automatically_again() {
    let world = World::new(
        "automatic-cancel",
        &yaml("").replace("observe: 2s", "observe: 1m"),
    )
    .await;
    let letters = put(&world, 0..20, 0);
    world.env.put(&world.dlq, 0, letters).await;
    let mut inspector = world.env.start().await;
    until_in(&world, &world.due, 10);
    // It observes its first batch.
    let job = until_jobs(&mut inspector, 1).await.remove(0);
    let paused = client(&mut inspector).await.pause_redrive(change(&job.id)).await;
    paused.unwrap();
    until_standing(&mut inspector, &world, "paused");
    let cancelled = client(&mut inspector).await.cancel_redrive(change(&job.id)).await;
    let left = cancelled.unwrap().into_inner().pending as usize;
    let more = put(&world, 20..23, 0);
    world.env.put(&world.dlq, 1, more).await;
    until_in(&world, &world.due, 20 - left + 3);
    until_jobs(&mut inspector, 2).await;
    until_standing(&mut inspector, &world, "idle");
    inspector.until_listed("state = OPEN", left).await;
    assert_eq!(jobs(&mut inspector).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_redriven_automatically_while_states_are_unknown() {
    let kafka = LocalKafka::start_with(&AUTHORIZER).unwrap();
    let world = World::on("automatic-states", &yaml(""), &kafka.brokers()).await;
    // The first start creates the ledger.
    world.env.start().await.process.shut_down();
    let ledger = redeliver_dlq_inspector::ledger::TOPIC;
    allow_all(&kafka, &[ledger]);
    deny(&kafka, "Read", &[ledger]);
    let letters = put(&world, 0..3, 0);
    world.env.put(&world.dlq, 0, letters).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 3).await;
    until_standing(&mut inspector, &world, "waiting");
    assert!(jobs(&mut inspector).await.is_empty());
    allow_again(&kafka, "Read", &[ledger]);
    until_in(&world, &world.due, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_dead_letter_is_redriven_or_parked_once_while_inspectors_are_killed() {
    const FRESH: i64 = 400;
    const USED_UP: i64 = 200;
    let settings = yaml("").replace("rate: 1000", "rate: 60");
    let mut world = World::new("automatic-killed", &settings).await;
    let letters = put(&world, 0..FRESH, 0);
    world.env.put(&world.dlq, 0, letters).await;
    let letters = put(&world, FRESH..FRESH + USED_UP, 1);
    world.env.put(&world.dlq, 1, letters).await;
    let mut inspectors = world.start_two().await;
    let (due, parking) = (world.due.clone(), parking(&world));
    let both = |world: &World| read(&world.env, &due).len() + read(&world.env, &parking).len();
    for (kill, wanted) in [20, 120, 220, 320, 420, 520].into_iter().enumerate() {
        eventually(&format!("{wanted} are done"), DEADLINE, || {
            let done = both(&world);
            if done >= wanted {
                Ok(())
            } else {
                Err(done.to_string())
            }
        });
        let victim = &mut inspectors[kill % 2].process;
        victim.kill_9();
        victim.start_again();
    }
    let all = usize::try_from(FRESH + USED_UP).unwrap();
    eventually("all are done", DEADLINE, || {
        let done = both(&world);
        if done >= all {
            Ok(())
        } else {
            Err(done.to_string())
        }
    });
    for inspector in &mut inspectors {
        inspector.until_serving().await;
    }
    inspectors[0].until_listed("state = REDRIVEN", all).await;
    inspectors[0]
        .until_listed("state = OPEN", usize::try_from(USED_UP).unwrap())
        .await;
    until_standing(&mut inspectors[0], &world, "idle");
    let origins = |topic: &Arc<str>| -> Vec<i64> {
        let records = read(&world.env, topic);
        let mut origins: Vec<i64> = records
            .iter()
            .map(|record| {
                std::str::from_utf8(record.headers.last("original-offset").unwrap())
                    .unwrap()
                    .parse()
                    .unwrap()
            })
            .collect();
        origins.sort_unstable();
        origins
    };
    assert_eq!(origins(&due), (0..FRESH).collect::<Vec<_>>());
    assert_eq!(origins(&parking), (FRESH..FRESH + USED_UP).collect::<Vec<_>>());
    let counts = changed(&world);
    assert_eq!(
        (counts["dead-letters.redrive"], counts["dead-letters.park"]),
        (FRESH.unsigned_abs(), USED_UP.unsigned_abs())
    );
    let jobs = jobs(&mut inspectors[0]).await;
    let done: u32 = jobs.iter().map(|job| job.done).sum();
    assert_eq!(usize::try_from(done).unwrap(), all, "{jobs:?}");
    let skipped: u32 = jobs.iter().map(|job| job.failed + job.skipped).sum();
    assert_eq!(skipped, 0, "{jobs:?}");
}
