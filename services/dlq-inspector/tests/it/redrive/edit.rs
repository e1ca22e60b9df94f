//! Dead letters that are redriven with other contents.

use super::*;

/// What makes a request another one.
type Change<'a> = &'a dyn Fn(&mut v1::PlanEditRequest);

const ACCEPTED: &str = "dlq_inspector:\n  redrive:\n    edit: true\n";

fn bytes(bytes: Option<&[u8]>) -> Option<v1::EditedBytes> {
    Some(v1::EditedBytes {
        bytes: bytes.map(Bytes::copy_from_slice),
    })
}

/// A request to write this value for a dead letter.
pub(crate) async fn edit(inspector: &mut Inspector, id: &str, value: &[u8]) -> v1::PlanEditRequest {
    let letter = get_letter(&mut inspector.client().await, id).await.unwrap();
    v1::PlanEditRequest {
        observe: Some(observe(0)),
        id: id.to_owned(),
        content_hash: letter.content_hash,
        edit: Some(v1::RedriveEdit {
            value: bytes(Some(value)),
            ..v1::RedriveEdit::default()
        }),
        reason: "typo".to_owned(),
        ..v1::PlanEditRequest::default()
    }
}

pub(crate) async fn planned_edit(
    inspector: &mut Inspector,
    request: v1::PlanEditRequest,
) -> Result<v1::Redrive, Status> {
    let planned = taken(async || client(inspector).await.plan_edit(request.clone()).await).await;
    planned.map(Response::into_inner)
}

#[track_caller]
pub(crate) fn refused(result: Result<v1::Redrive, Status>) -> (Code, String) {
    let status = result.unwrap_err();
    (status.code(), error::reason(&status).unwrap_or_default())
}

#[tokio::test]
async fn edited_record_replaces_the_original() {
    let world = World::new("redrive-edit", ACCEPTED).await;
    let headers: Headers = [
        ("tenant", Some(&b"a\0\xff"[..])),
        ("other", Some(b"x")),
        ("tenant", None),
        ("gone", Some(b"y")),
    ]
    .into_iter()
    .collect();
    let letter = world.dead(1, Some(b"\0\xffvalue"), headers);
    world.env.put(&world.dlq, 0, vec![letter]).await;
    let other = world.dead(2, Some(b"other"), Headers::new());
    world.env.put(&world.dlq, 1, vec![other]).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed("", 2).await;
    let id = format!("{}/0/0", world.dlq);
    let valid = edit(&mut inspector, &id, b"new").await;
    let value_of = |size| bytes(Some(&vec![7; size][..]));
    let changes: [(Change<'_>, Code, &str); 6] = [
        (
            &|request| request.content_hash = vec![7; 16].into(),
            Code::Aborted,
            "DEAD_LETTER_CHANGED",
        ),
        (
            &|request| request.content_hash = Bytes::new(),
            Code::Aborted,
            "DEAD_LETTER_CHANGED",
        ),
        // That of the other dead letter.
        (
            &|request| request.id = format!("{}/1/0", world.dlq),
            Code::Aborted,
            "DEAD_LETTER_CHANGED",
        ),
        (
            &|request| request.edit = None,
            Code::InvalidArgument,
            "EDIT_INVALID",
        ),
        (
            &|request| request.edit.as_mut().unwrap().value = value_of(1_100_000),
            Code::InvalidArgument,
            "EDIT_TOO_LARGE",
        ),
        (
            &|request| request.destination = "elsewhere".to_owned(),
            Code::NotFound,
            "NOTHING_TO_REDRIVE",
        ),
    ];
    for (change, code, reason) in changes {
        let mut request = valid.clone();
        change(&mut request);
        let refused = refused(planned_edit(&mut inspector, request).await);
        assert_eq!(refused, (code, reason.to_owned()));
    }

    let mut request = edit(&mut inspector, &id, b"\xfe\0new").await;
    request.request_id = "once".to_owned();
    if let Some(edit) = &mut request.edit {
        edit.removed_headers.push("gone".to_owned());
        edit.set_headers = [&b"a\xffb"[..], b""]
            .map(|value| v1::Header {
                name: "tenant".to_owned(),
                value: Some(Bytes::from_static(value)),
            })
            .to_vec();
    }
    // A plan of the record as it is, which is started later.
    let unedited = planned(&mut inspector, ids_at(&world, 0, 0..1)).await.unwrap();
    let job = planned_edit(&mut inspector, request.clone()).await.unwrap();
    assert_eq!(
        (job.total, &*job.edited),
        (1, &["value".to_owned(), "headers".to_owned()][..])
    );
    let again = planned_edit(&mut inspector, request.clone()).await.unwrap();
    assert_eq!(again.id, job.id, "a repeated request is the same job");
    let changes: [fn(&mut v1::PlanEditRequest); 3] = [
        |request| request.edit.as_mut().unwrap().value = bytes(None),
        |request| request.destination = "elsewhere".to_owned(),
        |request| request.force = true,
    ];
    for change in changes {
        let mut other = request.clone();
        change(&mut other);
        let other = refused(planned_edit(&mut inspector, other).await);
        assert_eq!(other, (Code::InvalidArgument, "REQUEST_ID_USED".to_owned()));
    }
    let of_edit = v1::PlanRedriveRequest {
        request_id: request.request_id.clone(),
        ..plan(v1::RedriveKind::Redrive, "")
    };
    let of_edit = refused(planned(&mut inspector, of_edit).await);
    assert_eq!(of_edit, (Code::InvalidArgument, "REQUEST_ID_USED".to_owned()));
    let samples = preview(&mut inspector, &job.id).await;
    assert_eq!(world.redriven().len(), 0, "a plan does nothing");
    start(&mut inspector, &job.id).await;
    let job = until(&mut inspector, &job.id, &ENDED).await;
    assert_eq!((job.state(), job.done), (v1::RedriveState::Succeeded, 1));

    let [record] = &world.redriven()[..] else {
        panic!("{:?}", world.redriven());
    };
    let [sample] = &samples[..] else {
        panic!("{samples:?}");
    };
    assert_previewed(sample, record);
    assert_eq!(record.value.as_deref(), Some(&b"\xfe\0new"[..]));
    assert_eq!(record.key.as_deref(), Some(&b"1"[..]));
    let user = record
        .headers
        .filtered(|name| !redeliver_core::headers::is_reserved(name) && !redrive::is_redrive_header(name));
    let expected: Headers = [
        ("other", Some(&b"x"[..])),
        ("tenant", Some(b"a\xffb")),
        ("tenant", Some(b"")),
        ("redrive-of", Some(id.as_bytes())),
        ("redrive-edited", Some(b"value, headers")),
    ]
    .into_iter()
    .collect();
    assert_eq!(user, expected);
    assert_eq!(record.headers.last("original-offset"), Some(&b"1"[..]));
    assert_eq!(record.headers.last("redrive-id"), Some(job.id.as_bytes()));

    // The original is redriven: neither the other plan nor another edit writes it.
    start(&mut inspector, &unedited.id).await;
    let unedited = until(&mut inspector, &unedited.id, &ENDED).await;
    let found = (unedited.state(), unedited.skipped);
    assert_eq!(found, (v1::RedriveState::Failed, 1));
    let outcomes = outcomes(&mut inspector, &unedited.id).await;
    assert_eq!(outcomes, [v1::RedriveOutcome::Redriven]);
    inspector.until_listed("state = REDRIVEN", 1).await;
    // The original names the record that was written in its place.
    let original = get_letter(&mut inspector.client().await, &id).await.unwrap();
    let redriven = original.redriven_as.unwrap();
    assert_eq!((&redriven.redrive_id, &redriven.edited), (&job.id, &job.edited));
    let written = redriven.written.unwrap();
    assert_eq!(
        (&*written.topic, written.partition, written.offset),
        (
            &*record.position.topic,
            record.position.partition,
            record.position.offset
        )
    );
    request.request_id.clear();
    let later = refused(planned_edit(&mut inspector, request).await);
    assert_eq!(later, (Code::NotFound, "NOTHING_TO_REDRIVE".to_owned()));
    assert_eq!(world.redriven().len(), 1);
    let retry = refused(planned(&mut inspector, retry_of(&job.id)).await);
    assert_eq!(retry, (Code::InvalidArgument, "RETRY_OF_EDIT".to_owned()));

    let ledger = read(&world.env, &redeliver_dlq_inspector::ledger::TOPIC.into());
    let entry = ledger
        .iter()
        .rfind(|record| record.key.as_deref() == Some(id.as_bytes()));
    let entry = v1::LedgerEntry::decode(entry.unwrap().value.clone().unwrap()).unwrap();
    assert_eq!(
        (entry.redrive_id, &*entry.edited),
        (job.id.clone(), &["value".to_owned(), "headers".to_owned()][..])
    );
    let audited = world.audited(&job.id);
    let entries = audited.iter();
    let entries: Vec<(&str, &str)> = entries.map(|entry| (&*entry.action, &*entry.details)).collect();
    let expected = [
        (
            "redrives.plan",
            "Redrive: edits value, sets header `tenant`, removes header `gone`",
        ),
        ("redrives.start", ""),
        ("dead-letters.redrive", "edited value, headers"),
    ];
    assert_eq!(entries, expected);
}

#[tokio::test]
async fn edit_or_original_survives_kills() {
    const COUNT: usize = 12;
    let mut world = World::new("redrive-edit-killed", ACCEPTED).await;
    world.put(i64::try_from(COUNT).unwrap()).await;
    let mut inspectors = world.start_two().await;
    for inspector in &mut inspectors {
        inspector.until_listed("", COUNT).await;
    }
    let unedited = planned(&mut inspectors[0], slowly(10)).await.unwrap();
    assert_eq!(unedited.total as usize, COUNT);
    let mut edits = Vec::new();
    for number in 0..COUNT {
        let id = format!("{}/{}/{}", world.dlq, number % 2, number / 2);
        let request = edit(&mut inspectors[0], &id, b"edited").await;
        edits.push(planned_edit(&mut inspectors[0], request).await.unwrap().id);
    }
    start(&mut inspectors[1], &unedited.id).await;
    for (number, id) in edits.iter().enumerate() {
        if number % 6 == 3 {
            // One of them executes.
            let victim = &mut inspectors[number % 2].process;
            victim.kill_9();
            victim.start_again();
            for inspector in &mut inspectors {
                inspector.until_serving().await;
            }
        }
        start(&mut inspectors[1], id).await;
    }
    let ended = until(&mut inspectors[0], &unedited.id, &ENDED).await;
    let mut edited = 0;
    for id in &edits {
        edited += until(&mut inspectors[0], id, &ENDED).await.done;
    }
    assert_eq!((ended.done + edited) as usize, COUNT, "{ended:?}");
    let redriven = world.redriven();
    let origins: std::collections::BTreeSet<&[u8]> = redriven
        .iter()
        .map(|record| record.headers.last("original-offset").unwrap())
        .collect();
    assert_eq!((origins.len(), redriven.len()), (COUNT, COUNT));
    let copies = redriven
        .iter()
        .filter(|record| record.value.as_deref() == Some(b"edited"));
    assert_eq!(copies.count(), edited as usize);
}

#[tokio::test(flavor = "multi_thread")]
async fn edit_needs_scopes_for_everything() {
    let mut world = World::new("redrive-edit-access", ACCEPTED).await;
    world.put(2).await;
    let rules = r#"[{"topics": ["*"], "fields": ["/secret"]}]"#;
    world.env.base.set("dlq_inspector.masking", rules);
    let all = ["read", "payload", "unmasked", "operate", "edit"];
    let name = |lacking: &'static str| if lacking.is_empty() { "everyone" } else { lacking };
    let callers = ["", "read", "payload", "unmasked", "operate", "edit"].map(|lacking| {
        let verbs = all.iter().filter(|verb| **verb != lacking);
        let scopes = verbs.map(|verb| format!("dead-letters:{verb}"));
        (name(lacking), scopes.collect())
    });
    let tokens = world.env.set_tokens(callers);
    let mut inspector = world.env.start().await;
    let channel = inspector.channel().await;
    let token = |lacking| SendToken::new(Some(&tokens[name(lacking)].token)).unwrap();
    let client = |lacking| RedriveServiceClient::with_interceptor(channel.clone(), token(lacking));
    let mut letters = support::Client::new(Sending::new(channel.clone(), token("")));
    let id = format!("{}/0/0", world.dlq);
    let letter = eventually_async("the dead letter", DEADLINE, async || {
        get_letter(&mut letters, &id).await
    })
    .await;
    let request = v1::PlanEditRequest {
        id: id.clone(),
        content_hash: letter.content_hash,
        edit: Some(v1::RedriveEdit {
            key: bytes(None),
            ..v1::RedriveEdit::default()
        }),
        ..v1::PlanEditRequest::default()
    };
    for lacking in all {
        let refused = client(lacking).plan_edit(request.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{lacking}: {refused:?}");
        let scope = format!("dead-letters:{lacking}");
        assert!(refused.message().contains(&scope), "{refused:?}");
    }
    let job = changed(async || client("").plan_edit(request.clone()).await).await;
    // A caller who may not edit may not start it either, but may cancel it.
    for lacking in ["payload", "unmasked", "edit", "operate"] {
        let refused = client(lacking).start_redrive(change(&job.id)).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{lacking}: {refused:?}");
    }
    changed(async || client("edit").cancel_redrive(change(&job.id)).await).await;

    // A hash that is compared tells as much as one that is shown.
    let guess = v1::PlanRedriveRequest {
        all: false,
        ids: vec![id],
        content_hashes: vec![vec![7; 16].into()],
        ..plan(v1::RedriveKind::Redrive, "")
    };
    for lacking in ["payload", "unmasked"] {
        let refused = client(lacking).plan_redrive(guess.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{lacking}: {refused:?}");
    }
    let refused = client("edit").plan_redrive(guess).await.unwrap_err();
    assert!(refused.message().contains("CHANGED"), "{refused:?}");
    assert_eq!(world.redriven().len(), 0);
}
