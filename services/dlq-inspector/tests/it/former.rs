//! Inspectors of former versions and of this one beside each other and one after the other, as in a rolling upgrade and a rollback.

use std::collections::{BTreeMap, BTreeSet};

use redeliver_core::Position;
use redeliver_proto::{Message as _, error, v1};
use redeliver_testkit::eventually_async;
use tonic::{Code, Status};

use crate::redrive::edit::{edit, planned_edit};
use crate::redrive::{
    ENDED, EXECUTES, World, change, client, get, ids_at, items, plan, planned, read, start, until,
};
use crate::replicas::Watcher;
use crate::support::{DEADLINE, Inspector};

/// A former version, and the settings of the tests that it does not know.
#[derive(Clone, Copy)]
struct Former {
    version: &'static str,
    unknown: &'static [&'static str],
}

const EDITS: &str = "dlq_inspector.redrive.edit";

/// It has no control topic, no audit and no redrives.
const BEFORE_CONTROL: Former = Former {
    version: "before-control",
    unknown: &[EDITS, "dlq_inspector.redrive.topic", "audit.topic"],
};

/// It executes redrives, but knows no edits and does not tell where it has written records.
const BEFORE_EDITS: Former = Former {
    version: "before-edits",
    unknown: &[EDITS],
};

/// Starts an inspector of this version, or of a former one, with this directory and an instance of the same name.
async fn run(world: &mut World, directory: &str, former: Option<Former>) -> Inspector {
    world.env.use_data_dir(directory);
    let mut inspector = match former {
        Some(Former { version, unknown }) => world.env.spawn_former(version, unknown),
        None => world.env.spawn(),
    };
    inspector.until_serving().await;
    inspector
}

/// Waits until two inspectors list the same dead letters in the same states: this many of each.
async fn until_agreed(one: &mut Inspector, other: &mut Inspector, expected: &[(v1::DeadLetterState, usize)]) {
    let expected: BTreeMap<v1::DeadLetterState, usize> = expected.iter().copied().collect();
    eventually_async("both list the same", DEADLINE, async || {
        let mut lists = Vec::new();
        for inspector in [&mut *one, &mut *other] {
            let listed = inspector.list("").await;
            // Former versions list what died in the same millisecond in another order.
            let states = listed
                .into_iter()
                .map(|letter| (letter.id.clone(), letter.state()));
            lists.push(states.collect::<BTreeMap<_, _>>());
        }
        let mut counts = BTreeMap::new();
        for state in lists[0].values() {
            *counts.entry(*state).or_default() += 1;
        }
        if lists[0] == lists[1] && counts == expected {
            Ok(())
        } else {
            let lengths = [lists[0].len(), lists[1].len()];
            Err(format!("{lengths:?}, of the first one {counts:?}"))
        }
    })
    .await;
}

/// Plans a job and executes it to its end.
async fn execute(inspector: &mut Inspector, request: v1::PlanRedriveRequest) -> v1::Redrive {
    let job = planned(inspector, request).await.unwrap();
    start(inspector, &job.id).await;
    until(inspector, &job.id, &ENDED).await
}

fn page(token: &str) -> v1::ListDeadLettersRequest {
    v1::ListDeadLettersRequest {
        page_size: 7,
        page_token: token.to_owned(),
        ..v1::ListDeadLettersRequest::default()
    }
}

async fn next_page(inspector: &mut Inspector, token: &str) -> Result<v1::ListDeadLettersResponse, Status> {
    let mut client = inspector.client().await;
    Ok(client.list_dead_letters(page(token)).await?.into_inner())
}

#[track_caller]
fn reason<T: std::fmt::Debug>(refused: Result<T, Status>) -> (Code, String) {
    let status = refused.unwrap_err();
    (status.code(), error::reason(&status).unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn a_former_inspector_without_redrives_shows_what_this_one_has_done_and_refuses_its_tokens() {
    use v1::DeadLetterState::{Discarded, Open, Redriven};
    let mut world = World::new("former-reads", "").await;
    world.put(60).await;
    let mut former = run(&mut world, "former", Some(BEFORE_CONTROL)).await;
    let mut present = run(&mut world, "present", None).await;
    until_agreed(&mut former, &mut present, &[(Open, 60)]).await;
    let with = |kind: v1::RedriveKind, request: v1::PlanRedriveRequest| v1::PlanRedriveRequest {
        kind: kind.into(),
        ..request
    };
    let discard = with(v1::RedriveKind::Discard, ids_at(&world, 0, 0..10));
    assert_eq!(execute(&mut present, discard).await.done, 10);
    until_agreed(&mut former, &mut present, &[(Open, 50), (Discarded, 10)]).await;
    assert_eq!(execute(&mut present, ids_at(&world, 1, 0..20)).await.done, 20);
    let restore = with(v1::RedriveKind::Restore, ids_at(&world, 0, 5..10));
    assert_eq!(execute(&mut present, restore).await.done, 5);
    let states = [(Open, 35), (Discarded, 5), (Redriven, 20)];
    until_agreed(&mut former, &mut present, &states).await;

    let expired = (Code::FailedPrecondition, "TOKEN_EXPIRED".to_owned());
    let invalid = (Code::InvalidArgument, "TOKEN_INVALID".to_owned());
    let token = next_page(&mut former, "").await.unwrap().next_page_token;
    assert_eq!(reason(next_page(&mut present, &token).await), expired);
    let token = next_page(&mut present, "").await.unwrap().next_page_token;
    assert_eq!(reason(next_page(&mut former, &token).await), invalid);
    let (mut of_former, mut of_present) = (Watcher::new("", false), Watcher::new("", false));
    of_former.resume(&mut former.client().await, 60).await;
    of_present.resume(&mut present.client().await, 60).await;
    let refused = of_former.connect(&mut present.client().await).await;
    assert_eq!(reason(refused), expired);
    let refused = of_present.connect(&mut former.client().await).await;
    assert_eq!(reason(refused), invalid);

    // An upgrade and a rollback in the same directory.
    for version in [None, Some(BEFORE_CONTROL)] {
        former.process.shut_down();
        former = run(&mut world, "former", version).await;
        until_agreed(&mut former, &mut present, &states).await;
    }
}

/// Lists page by page, each from another inspector, and watches with the tokens of another one.
async fn tokens_go_on(one: &mut Inspector, other: &mut Inspector, count: usize) {
    let (mut listed, mut token, mut turn) = (BTreeSet::new(), String::new(), 0);
    loop {
        turn += 1;
        let inspector = if turn % 2 == 0 { &mut *one } else { &mut *other };
        let page = next_page(inspector, &token).await.unwrap();
        for letter in page.dead_letters {
            assert!(listed.insert(letter.id.clone()), "{} is listed twice", letter.id);
        }
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!((listed.len(), turn), (count, count.div_ceil(7)));
    let mut clients = [one.client().await, other.client().await];
    for [first, second] in [[0, 1], [1, 0]] {
        let mut watcher = Watcher::new("", false);
        let mut stream = watcher.connect(&mut clients[first]).await.unwrap();
        let is_half = |watcher: &Watcher| watcher.received.len() == count / 2;
        watcher.follow(&mut stream, is_half).await.unwrap();
        // It checks that none is missing or repeated.
        watcher.resume(&mut clients[second], count).await;
    }
}

/// Waits until this many more dead letters are redriven.
async fn until_more_redriven(world: &World, count: usize) {
    let before = world.redriven().len();
    eventually_async("more is redriven", DEADLINE * 2, async || {
        match world.redriven().len() {
            now if now >= before + count => Ok(()),
            now => Err(format!("{now}, {before} before")),
        }
    })
    .await;
}

/// Each in turn is the only inspector: it takes the job over from the other version.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn a_redrive_goes_on_through_an_upgrade_from_a_former_version_and_a_rollback_with_each_dead_letter_once()
 {
    use v1::DeadLetterState::{Discarded, Open, Redriven};
    const LETTERS: i64 = 900;
    let mut world = World::new("former-redrive", "").await;
    world.env.base.set("kafka.session_timeout", "6s");
    world.env.base.set(EDITS, "true");
    world.put(LETTERS).await;
    let mut former = run(&mut world, "a", Some(BEFORE_EDITS)).await;
    let mut present = run(&mut world, "b", None).await;
    until_agreed(&mut former, &mut present, &[(Open, 900)]).await;
    tokens_go_on(&mut former, &mut present, 900).await;
    for (inspector, partition) in [(&mut former, 0), (&mut present, 1)] {
        let discard = v1::PlanRedriveRequest {
            kind: v1::RedriveKind::Discard.into(),
            ..ids_at(&world, partition, 0..10)
        };
        assert_eq!(execute(inspector, discard).await.done, 10);
    }
    until_agreed(&mut former, &mut present, &[(Open, 880), (Discarded, 20)]).await;

    let request = v1::PlanRedriveRequest {
        rate_per_second: 15,
        ..plan(v1::RedriveKind::Redrive, "")
    };
    let job = planned(&mut present, request).await.unwrap();
    assert_eq!(job.total, 880);
    start(&mut present, &job.id).await;
    present.process.shut_down();
    until_more_redriven(&world, 40).await;
    assert!(former.process.output().contains(EXECUTES));
    // Shut down as in an upgrade, and killed.
    for is_killed in [false, true] {
        let end = |inspector: &mut Inspector| match is_killed {
            false => inspector.process.shut_down(),
            true => inspector.process.kill_9(),
        };
        present = run(&mut world, "b", None).await;
        end(&mut former);
        until_more_redriven(&world, 40).await;
        assert!(present.process.output().contains(EXECUTES));
        former = run(&mut world, "a", Some(BEFORE_EDITS)).await;
        end(&mut present);
        until_more_redriven(&world, 40).await;
        assert!(former.process.output().contains(EXECUTES));
    }
    let shown = get(&mut former, &job.id).await.unwrap();
    assert_eq!((shown.state(), shown.total), (v1::RedriveState::Running, 880));
    present = run(&mut world, "b", None).await;
    former.process.shut_down();
    let ended = until(&mut present, &job.id, &ENDED).await;
    assert_eq!(
        (ended.state(), ended.done),
        (v1::RedriveState::Succeeded, 880),
        "{ended:?}"
    );

    let redriven = world.redriven();
    let origin_of =
        |record: &redeliver_core::Record| record.headers.last("original-offset").unwrap().to_vec();
    let origins: BTreeSet<Vec<u8>> = redriven.iter().map(origin_of).collect();
    assert_eq!((redriven.len(), origins.len()), (880, 880));
    // The former version does not know where records were written, and forgets it of the chunks in which it goes on.
    let positions: BTreeMap<&Position, Vec<u8>> = redriven
        .iter()
        .map(|record| (&record.position, origin_of(record)))
        .collect();
    let items = items(&mut present, &job.id).await;
    let mut known = 0;
    for item in &items {
        assert_eq!(item.outcome(), v1::RedriveOutcome::Done, "{item:?}");
        let Some(written) = &item.written else { continue };
        let written = Position {
            topic: written.topic.as_str().into(),
            partition: written.partition,
            offset: written.offset,
        };
        // The record at offset n of a partition is the dead letter of offset 2 n of the source, or 2 n + 1.
        let (id, offset) = item.id.rsplit_once('/').unwrap();
        let partition: i64 = id.rsplit_once('/').unwrap().1.parse().unwrap();
        let origin = 2 * offset.parse::<i64>().unwrap() + partition;
        assert_eq!(positions[&written], origin.to_string().as_bytes(), "{item:?}");
        known += 1;
    }
    assert_eq!(items.len(), 880);
    assert!(known > 0, "the last inspector has recorded no position");
    let audited = read(&world.env, &format!("{}-audit", world.env.base.name()).into());
    let redrives = audited
        .iter()
        .map(|record| v1::AuditEntry::decode(record.value.clone().unwrap()).unwrap())
        .filter(|entry| entry.target == job.id && entry.action == "dead-letters.redrive");
    assert_eq!(redrives.map(|entry| entry.count).sum::<u64>(), 880);

    former = run(&mut world, "a", Some(BEFORE_EDITS)).await;
    until_agreed(&mut former, &mut present, &[(Redriven, 880), (Discarded, 20)]).await;
    assert_eq!(get(&mut former, &job.id).await.unwrap().done, 880);
    only_this_version_edits(&world, &mut former, &mut present).await;
    former = run(&mut world, "a", Some(BEFORE_EDITS)).await;
    until_agreed(&mut former, &mut present, &[(Redriven, 881), (Discarded, 19)]).await;
}

/// The former version neither shows nor changes an edit, and does not redrive its dead letter as it is. It is not running afterwards.
async fn only_this_version_edits(world: &World, former: &mut Inspector, present: &mut Inspector) {
    let restore = v1::PlanRedriveRequest {
        kind: v1::RedriveKind::Restore.into(),
        ..ids_at(world, 1, 0..1)
    };
    assert_eq!(execute(former, restore).await.done, 1);
    let id = format!("{}/1/0", world.dlq);
    present.until_listed("state = OPEN", 1).await;
    let request = edit(present, &id, b"edited").await;
    let job = planned_edit(present, request).await.unwrap();
    assert_eq!(get(former, &job.id).await.unwrap_err().code(), Code::NotFound);
    let started = client(former).await.start_redrive(change(&job.id)).await;
    assert!(started.is_err(), "{started:?}");
    start(present, &job.id).await;
    // It may be the one that executes jobs. Then this job waits for the other one.
    former.process.shut_down();
    let ended = until(present, &job.id, &ENDED).await;
    assert_eq!((ended.state(), ended.done), (v1::RedriveState::Succeeded, 1));
    let redriven = world.redriven();
    let edited = redriven
        .iter()
        .filter(|record| record.headers.last("original-offset") == Some(&b"1"[..]));
    let values: Vec<_> = edited.map(|record| record.value.as_deref().unwrap()).collect();
    assert_eq!(values, [&b"edited"[..]]);
}
