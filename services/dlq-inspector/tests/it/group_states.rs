//! States and notes of groups: what several inspectors agree on.

use redeliver_dlq_inspector::group_states::TOPIC;
use redeliver_proto::error::reason;
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::kafka_request::delete_records;
use redeliver_testkit::{ensure, eventually_async};
use tonic::{Code, Status};
use v1::GroupState;

use crate::support::{Client, DEADLINE, Dead, InspectorEnv, assert_refused, dead, get_group, list_groups};

/// A dead letter of a group that no other test has.
fn failed(env: &InspectorEnv, code: &str) -> Dead {
    let headers = [
        ("pipeline", env.base.name()),
        ("error-class", "permanent"),
        ("error-code", code),
    ];
    dead("k", "v", &headers)
}

/// The ids of all groups, by error code.
async fn group_ids(client: &mut Client) -> Vec<String> {
    let mut groups = list_groups(client, "").await.groups;
    groups.sort_by(|one, other| one.error_code.cmp(&other.error_code));
    groups.into_iter().map(|group| group.id).collect()
}

pub(crate) fn change(id: &str) -> v1::ChangeGroupRequest {
    v1::ChangeGroupRequest {
        id: id.to_owned(),
        reason: "test".to_owned(),
        expected_revision: None,
    }
}

fn mute(id: &str) -> v1::MuteGroupRequest {
    v1::MuteGroupRequest {
        id: id.to_owned(),
        reason: "known".to_owned(),
        expected_revision: None,
        until: None,
    }
}

/// What a change results in. The processes of all tests change the same topic, and one that Kafka does not take in time has written nothing.
pub(crate) async fn changed<T>(mut change: impl AsyncFnMut() -> Result<tonic::Response<T>, Status>) -> T {
    eventually_async("Kafka takes the change", DEADLINE, async || {
        match change().await {
            // Unknown: one that another process has fenced out may have been written.
            Err(status) if matches!(status.code(), Code::Unavailable | Code::Unknown) => {
                Err(format!("{status:?}"))
            }
            result => Ok(result.unwrap().into_inner()),
        }
    })
    .await
}

async fn until_state(client: &mut Client, id: &str, state: GroupState) -> v1::Group {
    eventually_async("the state of the group", DEADLINE, async || {
        match get_group(&mut client.clone(), id).await {
            Ok(group) if group.state() == state => Ok(group),
            other => Err(format!("{other:?} is not {state:?}")),
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn inspectors_agree_on_regressed_group() {
    let mut env = InspectorEnv::new("regress");
    let topic = env.create_topic("a", 2).await;
    let letters = ["a", "a", "b"].map(|code| failed(&env, code));
    env.put(&topic, 0, letters.to_vec()).await;
    let mut first = env.start().await;
    let directory = env.data_dir();
    env.use_data_dir("other");
    let mut second = env.start().await;
    let (mut one, mut other) = (first.client().await, second.client().await);
    let ids = group_ids(&mut one).await;
    let [a, b] = &ids[..] else {
        panic!("{ids:?}");
    };
    let before = get_group(&mut one, a).await.unwrap();
    assert_eq!(
        (before.state(), before.revision, before.state_time),
        (GroupState::Open, 0, None)
    );

    let resolved = changed(async || one.clone().resolve_group(change(a)).await).await;
    assert_eq!(
        (resolved.state(), resolved.revision, resolved.count),
        (GroupState::Resolved, 1, 2)
    );
    assert_eq!(
        (&*resolved.state_reason, &*resolved.state_by),
        ("test", "anonymous")
    );
    // The caller reads its own change.
    assert_eq!(get_group(&mut one, a).await.unwrap().revision, 1);
    let seen = until_state(&mut other, a, GroupState::Resolved).await;
    assert_eq!(seen.state_time, resolved.state_time);

    // In another partition, and of a muted group, which does not regress.
    let muted = changed(async || other.clone().mute_group(mute(b)).await).await;
    assert_eq!(
        (muted.state(), &*muted.state_reason),
        (GroupState::Muted, "known")
    );
    env.put(&topic, 1, vec![failed(&env, "a"), failed(&env, "b")])
        .await;
    for client in [&mut one, &mut other] {
        until_state(client, a, GroupState::Regressed).await;
        let b = until_state(client, b, GroupState::Muted).await;
        assert_eq!(b.revision, 1);
    }
    for state in ["regressed", "muted"] {
        let series = format!("redeliver_dlq_groups{{state=\"{state}\"}}");
        second.process.until_metric(&series, |count| count == 1);
    }
    let request = v1::ListGroupsRequest {
        states: vec![GroupState::Regressed.into(), GroupState::Resolved.into()],
        ..v1::ListGroupsRequest::default()
    };
    let listed = other.list_groups(request).await.unwrap().into_inner().groups;
    let listed: Vec<&str> = listed.iter().map(|group| &*group.id).collect();
    assert_eq!(listed, [a]);

    // Neither a restart nor another index changes the state.
    first.process.shut_down();
    env.base
        .set("dlq_inspector.data_dir", &directory.display().to_string());
    std::fs::remove_dir_all(&directory).unwrap();
    let mut first = env.start().await;
    let group = get_group(&mut first.client().await, a).await.unwrap();
    assert_eq!(
        (group.state(), group.state_time),
        (GroupState::Regressed, resolved.state_time)
    );
    // It can be resolved again, and a repetition changes nothing.
    for _ in 0..2 {
        let again = changed(async || other.clone().resolve_group(change(a)).await).await;
        assert_eq!((again.state(), again.revision), (GroupState::Resolved, 2));
        assert_ne!(again.state_time, resolved.state_time);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn parallel_changes_all_succeed() {
    const CHANGES: usize = 50;
    let env = InspectorEnv::new("parallel");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, vec![failed(&env, "a")]).await;
    let mut inspector = env.start().await;
    let client = inspector.client().await;
    let id = group_ids(&mut client.clone()).await.remove(0);
    let changes = (0..CHANGES).map(|number| {
        let request = v1::AnnotateGroupRequest {
            id: id.clone(),
            note: number.to_string(),
            expected_revision: None,
        };
        let client = &client;
        async move {
            changed(async || client.clone().annotate_group(request.clone()).await)
                .await
                .revision
        }
    });
    let mut revisions: Vec<u64> = futures::future::join_all(changes).await;
    revisions.sort_unstable();
    revisions.dedup();
    // Each is decided after all others before it.
    assert_eq!(revisions.len(), CHANGES);
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_changes_are_not_written() {
    let env = InspectorEnv::new("refused");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, vec![failed(&env, "a")]).await;
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let ids = group_ids(&mut client).await;
    let id = &ids[0];
    let expecting = v1::ChangeGroupRequest {
        expected_revision: Some(0),
        ..change(id)
    };
    changed(async || client.clone().resolve_group(expecting.clone()).await).await;
    let revised = client.resolve_group(expecting).await.unwrap_err();
    assert!(revised.message().contains("has revision 1"), "{revised:?}");
    let invalid = v1::ChangeGroupRequest {
        reason: "x".repeat(1_001),
        ..change(id)
    };
    let past = v1::MuteGroupRequest {
        until: Some(prost_types::Timestamp { seconds: 1, nanos: 0 }),
        ..mute(id)
    };
    let unknown = client
        .resolve_group(change("0000000000000000"))
        .await
        .unwrap_err();
    for (refused, expected) in [
        (client.resolve_group(invalid).await.unwrap_err(), "REASON_INVALID"),
        (client.mute_group(past).await.unwrap_err(), "UNTIL_INVALID"),
        (unknown, "GROUP_NOT_FOUND"),
        (revised, "GROUP_REVISED"),
    ] {
        assert_eq!(reason(&refused).as_deref(), Some(expected));
    }
    assert_eq!(get_group(&mut client, id).await.unwrap().revision, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_group_is_not_changed() {
    let env = InspectorEnv::new("unreadable");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, vec![failed(&env, "a"), failed(&env, "b")])
        .await;
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let ids = group_ids(&mut client).await;
    let [a, b] = &ids[..] else {
        panic!("{ids:?}");
    };
    changed(async || client.clone().mute_group(mute(a)).await).await;
    let newer = v1::GroupRecord {
        revision: 7,
        format: 1,
        decision: Some(v1::GroupDecision {
            state: GroupState::Muted.into(),
            time: Some(prost_types::Timestamp { seconds: 1, nanos: 0 }),
            ..v1::GroupDecision::default()
        }),
        ..v1::GroupRecord::default()
    };
    let values = [
        (
            a,
            b"\xff".to_vec(),
            GroupState::Open,
            "is not a redeliver.v1.GroupRecord",
        ),
        (
            b,
            newer.encode_to_vec(),
            GroupState::Muted,
            "was written by a newer version",
        ),
    ];
    for (id, value, state, problem) in values {
        let key = format!("group/{id}");
        env.write(TOPIC, &key, Some(value.into())).await;
        eventually_async("the problem is shown", DEADLINE, async || {
            let group = get_group(&mut client.clone(), id).await.unwrap();
            let holds = group.problem.contains(problem) && group.state() == state;
            ensure(holds, format!("{group:?}"))
        })
        .await;
        let ready = inspector.process.get("/readyz").1;
        assert!(ready.contains(&format!("`{key}` {problem}")), "{ready}");
        for refused in [
            client.resolve_group(change(id)).await.unwrap_err(),
            client.reopen_group(change(id)).await.unwrap_err(),
        ] {
            assert_refused(&refused, Code::FailedPrecondition, "GROUP_UNKNOWN_FORMAT");
        }
        // As the documentation says.
        env.write(TOPIC, &key, None).await;
        until_state(&mut client, id, GroupState::Open).await;
        let resolved = changed(async || client.clone().resolve_group(change(id)).await).await;
        assert_eq!((resolved.state(), resolved.revision), (GroupState::Resolved, 1));
    }
}

async fn until_no_groups(client: &Client) {
    eventually_async("no groups", DEADLINE, async || {
        let ids = group_ids(&mut client.clone()).await;
        ensure(ids.is_empty(), ids.join(" "))
    })
    .await;
}

/// The values of these groups, in the order of the list of groups without dead letters. The topic of all tests is the same one.
async fn without_dead_letters(client: &mut Client, ids: &[String]) -> Vec<v1::Group> {
    let mut request = v1::ListGroupsRequest {
        without_dead_letters: true,
        page_size: 2,
        ..v1::ListGroupsRequest::default()
    };
    let mut groups = Vec::new();
    loop {
        let page = client.list_groups(request.clone()).await.unwrap().into_inner();
        groups.extend(page.groups);
        if page.next_page_token.is_empty() {
            groups.retain(|group| ids.contains(&group.id));
            return groups;
        }
        request.page_token = page.next_page_token;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_without_letters_can_be_reset() {
    let env = InspectorEnv::new("gone");
    let topic = env.create_topic("a", 1).await;
    let letters = ["a", "b", "c"].map(|code| failed(&env, code)).to_vec();
    env.put(&topic, 0, letters).await;
    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let ids = group_ids(&mut client).await;
    let [a, b, c] = &ids[..] else {
        panic!("{ids:?}");
    };
    changed(async || client.clone().mute_group(mute(b)).await).await;
    changed(async || client.clone().resolve_group(change(a)).await).await;
    let annotate = |note: &str| v1::AnnotateGroupRequest {
        id: a.clone(),
        note: note.to_owned(),
        expected_revision: None,
    };
    changed(async || client.clone().annotate_group(annotate("see the runbook")).await).await;
    assert_eq!(without_dead_letters(&mut client, &ids).await, []);
    delete_records(&env.kafka.brokers, &topic, 0, 3);
    until_no_groups(&client).await;

    let found = without_dead_letters(&mut client, &ids).await;
    let found: Vec<_> = found
        .iter()
        .map(|group| {
            (
                &group.id,
                group.state(),
                &*group.note,
                group.count,
                group.revision,
            )
        })
        .collect();
    let muted = (b, GroupState::Muted, "", 0, 1);
    assert_eq!(found, [muted, (a, GroupState::Resolved, "see the runbook", 0, 2)]);
    for (refused, code) in [
        (client.resolve_group(change(a)).await, Code::NotFound),
        (client.annotate_group(annotate("other")).await, Code::NotFound),
        (client.mute_group(mute(a)).await, Code::NotFound),
        // There is nothing to reset.
        (client.reopen_group(change(c)).await, Code::NotFound),
    ] {
        assert_eq!(refused.unwrap_err().code(), code);
    }
    let reopened = changed(async || client.clone().reopen_group(change(a)).await).await;
    assert_eq!(
        (reopened.state(), reopened.revision, reopened.count),
        (GroupState::Open, 3, 0)
    );
    let found = without_dead_letters(&mut client, &ids).await;
    assert_eq!(found.len(), 2, "the note is left: {found:?}");
    changed(async || client.clone().annotate_group(annotate("")).await).await;
    let found = without_dead_letters(&mut client, &ids).await;
    assert_eq!((found.len(), &found[0].id), (1, b));

    let with_filter = v1::ListGroupsRequest {
        filter: "state = OPEN".to_owned(),
        without_dead_letters: true,
        ..v1::ListGroupsRequest::default()
    };
    let refused = client.list_groups(with_filter).await.unwrap_err();
    assert_eq!(reason(&refused).as_deref(), Some("WITHOUT_DEAD_LETTERS"));
}
