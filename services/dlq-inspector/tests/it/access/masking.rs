//! What callers without `dead-letters:unmasked` get from each call.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Clock as _, Record, SystemClock};
use redeliver_kafka::reader::TopicReader;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1::find_records_request::By;
use redeliver_testkit::unique;
use tonic::Request;
use tonic::client::Grpc;

use super::*;
use crate::fuzz::{Raw, methods};
use crate::support::Dead;
use crate::waiting::waiting;

/// What is masked: a key, fields of values, a header, parts of messages and of stack traces.
const MASKED: [&str; 6] = [
    "k3y-7531",
    "f1eld-7531",
    "h3ader-7531",
    "m3ssage-7531",
    "st4ck-7531",
    "n0t-json-7531",
];

/// A job with a record that waits.
const JOB: &str = "01KAJQ6Z2B0003000000000A7X";

/// What the caller sees.
const SHOWN: [&str; 4] = ["shown-field", "shown-header", "shown-message", "shown-stack"];

const RULES: &str = r#"[{"topics": ["*-orders-dlq"], "key": true, "fields": ["/card/number", "/**/pan"], "headers": ["X-User"],
    "messages": ["[a-z]*[0-9][a-z]+-[0-9]{4}"]}]"#;

/// Dead letters of two dialects, and one whose value is not a JSON document.
fn letters() -> Vec<Dead> {
    let [key, field, header, message, stack, not_json] = MASKED;
    let value = format!(
        r#"{{"a":"shown-field","card":{{"number":"{field}","number":["{field}"]}},"v":1,"items":[{{"p\u0061n":{{"x":"{field}"}}}}]}}"#
    );
    let text = format!("shown-message of {message}");
    let trace = format!("shown-stack {stack}\n\tat {message}");
    let response = format!(r#"{{"error":"no such card: {field}"}}"#);
    let own = [
        ("error-response", &*response),
        ("x-user", header),
        ("tenant", "shown-header"),
        ("x-user", header),
        ("error-class", "permanent"),
        ("error-message", &text),
        ("x-stack-trace", &trace),
        ("pipeline", "p"),
    ];
    let spring = [
        ("kafka_dlt-exception-fqcn", "java.io.IOException"),
        ("kafka_dlt-exception-message", &text),
        ("kafka_dlt-exception-stacktrace", &trace),
        ("springDeserializerExceptionValue", field),
        ("tenant", "shown-header"),
        ("X-USER", header),
    ];
    vec![
        dead(key, value.clone(), &own),
        dead(key, value, &spring),
        dead(key, format!("{not_json} shown-field"), &own),
    ]
}

/// Waits until a topic has this many dead letters.
async fn until(client: &TokenClient, topic: &str, count: usize) {
    until_listed(client, &format!(r#"topic = "{topic}""#), count).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_contain_nothing_masked() {
    let scopes: [(&str, &[&str]); 3] = [
        ("all", &["dead-letters:*"]),
        ("masked", &["dead-letters:read", "dead-letters:payload"]),
        ("metadata", &["dead-letters:read"]),
    ];
    let mut callers = Callers::without_dead_letters("masked", &scopes).await;
    callers.env.base.set("dlq_inspector.masking", RULES);
    callers
        .env
        .base
        .set("dlq_inspector.json_fields", r#"["/v", "/card/number"]"#);
    let [orders, people] = callers.topics.clone();
    callers.env.put(&orders, 0, letters()).await;
    callers.env.put(&people, 0, letters()).await;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let mut everything = callers.client(&channel, "all");
    until(&everything, &people, 3).await;
    until(&everything, &orders, 3).await;

    // Who sees everything sees all of it, as it is in Kafka.
    let mut all = Answers::default();
    let listed = pages(&mut everything, "", &mut all).await;
    assert!(listed.iter().all(|letter| letter.masked.is_none()));
    for text in MASKED.iter().chain(&SHOWN) {
        assert!(all.contain(text), "the test finds {text}");
    }

    let own = format!(r#"topic = "{orders}""#);
    let mut answers = Answers::default();
    let mut client = callers.client(&channel, "masked");
    let mut listed = pages(&mut client, &own, &mut answers).await;
    listed.sort_by(|one, other| one.id.cmp(&other.id));
    assert_eq!(listed.len(), 3);
    for letter in &listed {
        let masked = letter.masked.as_ref().unwrap();
        assert!(letter.key.is_none() && letter.value_size.is_none() && letter.content_hash.is_empty());
        for field in [
            "key",
            "value",
            "value_size",
            "content_hash",
            "headers",
            "error_message",
        ] {
            assert!(
                masked.fields.iter().any(|masked| masked == field),
                "{field} in {masked:?}"
            );
        }
        assert_eq!(letter.error_message, "shown-message of <masked>");
    }
    let by = [
        "topic",
        "headers.x-user",
        "headers.tenant",
        "error_code",
        "error_class",
    ];
    let counted = counts(&mut client, &own, &by, &mut answers).await.unwrap();
    assert_eq!(counted.iter().map(|(_, count)| count).sum::<u64>(), 3);
    let (masked, _) = &counted[0];
    assert!(
        masked.starts_with(&format!("{orders} <masked> shown-header")),
        "{counted:?}"
    );
    let [redeliver, spring, not_json] = &listed[..] else {
        panic!("{listed:?}");
    };
    assert_eq!(not_json.value, None);
    assert_eq!(
        redeliver.value.as_deref(),
        Some(
            &br#"{"a":"shown-field","card":{"number":"<masked>","number":"<masked>"},"v":1,"items":[{"p\u0061n":"<masked>"}]}"#[..]
        )
    );
    let headers = redeliver.headers.iter().filter(|header| header.name == "x-user");
    let values: Vec<_> = headers.map(|header| header.value.as_deref()).collect();
    assert_eq!(values, [Some(&b"<masked>"[..]); 2]);
    let masked = spring.masked.as_ref().unwrap();
    assert_eq!(masked.paths, ["/card/number", "/**/pan"]);
    assert_eq!(
        masked.headers,
        [
            "kafka_dlt-exception-message",
            "kafka_dlt-exception-stacktrace",
            "springDeserializerExceptionValue",
            "X-USER"
        ]
    );

    for caller in ["masked", "metadata"] {
        let mut client = callers.client(&channel, caller);
        assert_eq!(pages(&mut client, &own, &mut answers).await.len(), 3);
        assert_eq!(watched(&mut client, &own, &mut answers).await.len(), 3);
        for offset in 0..3 {
            let letter = get(&mut client, &format!("{orders}/0/{offset}")).await.unwrap();
            assert!(letter.masked.is_some());
            answers.add(&letter);
        }
        let grouped = groups(&mut client, &own, &mut answers).await;
        assert!(
            grouped
                .iter()
                .all(|group| group.template == "shown-message of <masked>"),
            "{grouped:?}"
        );
        assert_eq!(grouped.len(), 2);
        for group in grouped {
            let request = v1::GetGroupRequest { id: group.id };
            answers.add(&client.get_group(request).await.unwrap().into_inner());
        }
        assert_eq!(topics(&mut client, &own, &mut answers).await.len(), 1);
        // What tells something about the masked parts matches nothing in the topic, whatever is true.
        let mut filters = vec![
            "error_message : shown",
            "NOT error_message : x",
            r#"error_message = "shown-message of <masked>" OR state = OPEN"#,
            "value_size > 0",
            "NOT value_size > 0",
        ];
        if caller == "masked" {
            filters.extend([
                "key : k3y",
                "NOT key:*",
                "headers.x-user:*",
                "NOT headers.X-USER : x",
                "headers.error-message : shown",
                "-headers.kafka_dlt-exception-stacktrace = a",
                "headers.springDeserializerExceptionValue:*",
                "NOT json./card/number = 1",
            ]);
        }
        for filter in filters {
            let filter = format!("({filter}) AND {own}");
            assert_eq!(pages(&mut client, &filter, &mut answers).await, [], "{filter}");
            assert_eq!(topics(&mut client, &filter, &mut answers).await, [], "{filter}");
            assert_eq!(groups(&mut client, &filter, &mut answers).await, [], "{filter}");
            assert_eq!(watched(&mut client, &filter, &mut answers).await, [], "{filter}");
        }
        // Others match as usual, also in the other topic, which has no rules.
        for filter in [
            "error_class = permanent",
            "dialect = SPRING",
            "retry_count = 0 AND pipeline = p",
        ] {
            assert!(
                !pages(&mut client, &format!("{filter} AND {own}"), &mut answers)
                    .await
                    .is_empty()
            );
        }
        let elsewhere = pages(&mut client, "error_message : m3ssage", &mut Answers::default()).await;
        assert_eq!(elsewhere.len(), 3);
        assert!(elsewhere.iter().all(|letter| letter.id.starts_with(&*people)));
    }
    assert_eq!(
        pages(
            &mut client,
            &format!("headers.tenant : shown AND json./v:* AND {own}"),
            &mut answers
        )
        .await
        .len(),
        2
    );

    // The payload is masked as in lists, or refused.
    let value = payload(&mut client, &format!("{orders}/0/0")).await.unwrap();
    assert_eq!(Some(&value[..]), redeliver.value.as_deref());
    assert_eq!(
        answers.refused(payload(&mut client, &format!("{orders}/0/2")).await),
        denied()
    );
    assert!(payload(&mut client, &format!("{people}/0/2")).await.is_ok());
    let unmasked = payload(&mut everything, &format!("{orders}/0/2")).await.unwrap();
    assert!(unmasked.starts_with(MASKED[5].as_bytes()));

    // The CLI shows what the calls return.
    let ids = [0, 1, 2].map(|offset| format!("{orders}/0/{offset}"));
    let mut commands: Vec<Vec<&str>> = Vec::new();
    for format in ["table", "json", "jsonl"] {
        commands.push(vec!["ls", "--filter", &own, "-o", format]);
        commands.push(vec!["groups", "--filter", &own, "-o", format]);
        commands.push(vec!["stats", "--filter", &own, "-o", format]);
    }
    commands.push(vec!["export", "--filter", &own]);
    for id in &ids {
        commands.push(vec!["show", id]);
        commands.push(vec!["show", id, "-o", "json"]);
        commands.push(vec!["show", id, "--payload"]);
    }
    for command in commands {
        let output = callers.run(&mut inspector, "masked", &command);
        let printed = format!("{}{}", output.stdout, output.stderr);
        assert!(!printed.is_empty(), "{command:?}");
        // A script must not take a masked payload for the record.
        let expected = match command.last() {
            Some(&"--payload") if command[1] == ids[2] => 1,
            Some(&"--payload") => 3,
            _ if command[0] == "export" => 3,
            _ => 0,
        };
        assert_eq!(output.code, Some(expected), "{command:?}: {printed}");
        if command[0] == "show" && command.len() == 2 {
            assert!(printed.contains("masked "), "{printed}");
        }
        answers.0.extend(printed.into_bytes());
    }

    for secret in MASKED {
        assert!(!answers.contain(secret), "an answer contains {secret}");
        assert!(
            !inspector.process.output().contains(secret),
            "the log contains {secret}"
        );
    }
    assert!(SHOWN.iter().all(|text| answers.contain(text)));
}

/// The answer to a call as it is sent, which may be a stream.
async fn answer(client: Grpc<Sending>, path: &str, request: Vec<u8>) -> Result<Vec<Bytes>, Status> {
    let mut client = client.max_decoding_message_size(64 << 20);
    client.ready().await.expect("a connection");
    let request = Request::new(Bytes::from(request));
    let answer = client
        .server_streaming(request, path.parse().unwrap(), Raw)
        .await?;
    let (mut messages, mut stream) = (Vec::new(), answer.into_inner());
    while let Some(message) = stream.message().await? {
        messages.push(message);
    }
    Ok(messages)
}

#[tokio::test(flavor = "multi_thread")]
async fn no_method_answers_what_is_masked() {
    let scopes: [(&str, &[&str]); 2] = [
        ("all", &["dead-letters:*"]),
        (
            "masked",
            &[
                "dead-letters:read",
                "dead-letters:payload",
                "dead-letters:operate",
                "dead-letters:edit",
                "control:*",
                "audit:read",
            ],
        ),
    ];
    let mut callers = Callers::without_dead_letters("masked-methods", &scopes).await;
    let [orders, _] = callers.topics.clone();
    let pipeline = orders.strip_suffix("-dlq").unwrap().to_owned();
    for (key, value) in [
        ("dlq_inspector.masking".to_owned(), RULES.to_owned()),
        ("dlq_inspector.redrive.edit".to_owned(), "true".to_owned()),
        (
            "control.topic".to_owned(),
            format!("{}-control", callers.env.base.name()),
        ),
        (
            format!("pipelines.{pipeline}.retry"),
            "{ tiers: [2h] }".to_owned(),
        ),
        ("scheduler.apps.shop.topic".to_owned(), pipeline.clone()),
    ] {
        callers.env.base.set(&key, &value);
    }
    callers.env.put(&orders, 0, letters()).await;
    let tier: Arc<str> = format!("{pipeline}-retry-2h").into();
    callers.env.recreate_topic(&tier, 1).await;
    let message = format!("shown-message of {}", MASKED[3]);
    let mut waits = waiting(&pipeline, 0);
    waits.key = Some(MASKED[0].into());
    waits.value = Some(format!(r#"{{"pan":"{}"}}"#, MASKED[1]).into());
    waits.headers = waits.headers.filtered(|name| name != "error-message");
    waits.headers.push_text("error-message", &message);
    waits.headers.push_text("x-user", MASKED[2]);
    waits.headers.push_text("job-id", JOB);
    callers.env.put(&tier, 0, vec![waits]).await;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    until(&callers.client(&channel, "all"), &orders, 3).await;

    let own = format!(r#"topic = "{orders}""#);
    let mut client = callers.client(&channel, "masked");
    let mut answers = Answers::default();
    let watched = watched(&mut client, &own, &mut answers).await;
    assert_eq!(watched.len(), 3);
    let group = groups(&mut client, &own, &mut answers).await.remove(0).id;
    let raw = || Grpc::new(Sending::new(channel.clone(), callers.interceptor("masked")));
    // Of a caller who sees everything: others see the job without its search texts.
    let discards = |filter: String| v1::PlanRedriveRequest {
        kind: v1::RedriveKind::Discard.into(),
        filter,
        all_at_once: true,
        ..v1::PlanRedriveRequest::default()
    };
    let search = format!(
        r#"{own} AND (key = "{}" OR error_message : "{}" OR headers.x-user = "{}")"#,
        MASKED[0], MASKED[3], MASKED[2]
    );
    let mut everything = callers.redrives(&channel, "all");
    let searched = everything.plan_redrive(discards(search.clone())).await.unwrap();
    let searched = searched.into_inner();
    assert_eq!(searched.total, 3);
    assert!(searched.filter.contains("<value>"), "{}", searched.filter);
    answers.add(&searched);
    // What is masked decides about no plan of others.
    let mut redrives = callers.redrives(&channel, "masked");
    for filter in [
        search,
        format!(r#"{own} AND NOT error_message : "{}""#, MASKED[4]),
    ] {
        let refused = answers.refused(redrives.plan_redrive(discards(filter)).await);
        assert_eq!(refused.1, "NOTHING_TO_REDRIVE");
    }
    // A job that has ended, with an entry in the audit log.
    let one = discards(format!(r#"id = "{orders}/0/2""#));
    let ended = redrives.plan_redrive(one).await.unwrap().into_inner();
    let change = v1::ChangeRedriveRequest {
        id: ended.id,
        ..v1::ChangeRedriveRequest::default()
    };
    answers.add(&redrives.start_redrive(change).await.unwrap().into_inner());
    until_listed(&client, &format!("{own} AND state = DISCARDED"), 1).await;
    let plan = discards(own.clone());
    let planned = answer(
        raw(),
        "/redeliver.v1.RedriveService/PlanRedrive",
        plan.encode_to_vec(),
    )
    .await;
    let job = v1::Redrive::decode(planned.unwrap().remove(0)).unwrap().id;

    let id = format!("{orders}/0/0");
    let redrive = v1::PlanRedriveRequest {
        kind: v1::RedriveKind::Redrive.into(),
        ids: vec![id.clone(), format!("{orders}/0/1")],
        destination: pipeline.clone(),
        ..v1::PlanRedriveRequest::default()
    };
    let previewed = redrives.plan_redrive(redrive).await.unwrap().into_inner().id;
    let position = v1::Position {
        topic: tier.to_string(),
        partition: 0,
        offset: 0,
    };
    let retry = v1::ActOnWaitingRecordsRequest {
        positions: vec![position.clone()],
        action: v1::WaitingAction::Retry.into(),
        request_id: unique("masked"),
        ..v1::ActOnWaitingRecordsRequest::default()
    };
    let outcomes = v1::GetJobOutcomesRequest {
        id: JOB.to_owned(),
        topic: pipeline.clone(),
    };
    redeliver_testkit::eventually_async("the job is known", DEADLINE, async || {
        let path = "/redeliver.v1.WaitingService/GetJobOutcomes";
        let messages = answer(raw(), path, outcomes.encode_to_vec()).await.unwrap();
        let answered = v1::GetJobOutcomesResponse::decode(messages[0].clone()).unwrap();
        let outcome = &answered.outcomes[0];
        match (outcome.state(), &*outcome.error_code) {
            (v1::JobOutcomeState::Waiting, "http.503") => Ok(()),
            _ => Err(format!("{answered:?}")),
        }
    })
    .await;
    let change_job = || {
        let change = v1::ChangeRedriveRequest {
            id: job.clone(),
            ..v1::ChangeRedriveRequest::default()
        };
        change.encode_to_vec()
    };
    // It waits while it is changed.
    let start = v1::ChangeRedriveRequest {
        id: job.clone(),
        start_at: Some(to_timestamp(SystemClock.now().after(Duration::from_secs(3_600)))),
        ..v1::ChangeRedriveRequest::default()
    };
    let change_control = |name: &str| {
        let change = v1::ChangeControlRequest {
            name: name.to_owned(),
            ..v1::ChangeControlRequest::default()
        };
        change.encode_to_vec()
    };
    let change_group = || {
        let change = v1::ChangeGroupRequest {
            id: group.clone(),
            ..v1::ChangeGroupRequest::default()
        };
        change.encode_to_vec()
    };
    let (tier, whole_tier) = (format!("tier/{pipeline}/2h"), "tier/2h".to_owned());
    let controlled = format!("pipeline/{pipeline}");
    let edit = v1::RedriveEdit {
        value: Some(v1::EditedBytes::default()),
        ..v1::RedriveEdit::default()
    };
    let calls = [
        ("AccessService/GetAccess", Vec::new()),
        (
            "AuditService/ListAuditEntries",
            v1::ListAuditEntriesRequest::default().encode_to_vec(),
        ),
        (
            "ControlService/GetControl",
            v1::GetControlRequest { name: tier.clone() }.encode_to_vec(),
        ),
        ("ControlService/PauseControl", change_control(&controlled)),
        (
            "ControlService/ListControls",
            v1::ListControlsRequest::default().encode_to_vec(),
        ),
        ("ControlService/ResumeControl", change_control(&controlled)),
        (
            "ControlService/SetControlRate",
            v1::SetControlRateRequest {
                name: tier.clone(),
                ..v1::SetControlRateRequest::default()
            }
            .encode_to_vec(),
        ),
        ("ControlService/ReleaseTier", change_control(&tier)),
        (
            "ControlService/ReleaseWholeTier",
            v1::ReleaseWholeTierRequest {
                name: whole_tier,
                ..v1::ReleaseWholeTierRequest::default()
            }
            .encode_to_vec(),
        ),
        ("ControlService/ResetControl", change_control(&tier)),
        ("DeadLetterService/ListDeadLetters", full(&own).encode_to_vec()),
        (
            "DeadLetterService/GetDeadLetter",
            v1::GetDeadLetterRequest { id: id.clone() }.encode_to_vec(),
        ),
        (
            "DeadLetterService/ReadPayload",
            v1::ReadPayloadRequest { id: id.clone() }.encode_to_vec(),
        ),
        (
            "DeadLetterService/GetDeadLetterStats",
            v1::GetDeadLetterStatsRequest::default().encode_to_vec(),
        ),
        (
            "DeadLetterService/ListGroups",
            v1::ListGroupsRequest::default().encode_to_vec(),
        ),
        (
            "DeadLetterService/GetGroup",
            v1::GetGroupRequest { id: group.clone() }.encode_to_vec(),
        ),
        ("DeadLetterService/ResolveGroup", change_group()),
        (
            "DeadLetterService/MuteGroup",
            v1::MuteGroupRequest {
                id: group.clone(),
                reason: "known".to_owned(),
                ..v1::MuteGroupRequest::default()
            }
            .encode_to_vec(),
        ),
        ("DeadLetterService/ReopenGroup", change_group()),
        (
            "DeadLetterService/AnnotateGroup",
            v1::AnnotateGroupRequest {
                id: group.clone(),
                note: "shown".to_owned(),
                ..v1::AnnotateGroupRequest::default()
            }
            .encode_to_vec(),
        ),
        // Above, because it does not end.
        ("DeadLetterService/WatchDeadLetters", Vec::new()),
        ("RedriveService/PlanRedrive", plan.encode_to_vec()),
        (
            "RedriveService/PlanEdit",
            v1::PlanEditRequest {
                id: id.clone(),
                content_hash: vec![0; 16].into(),
                edit: Some(edit),
                ..v1::PlanEditRequest::default()
            }
            .encode_to_vec(),
        ),
        ("RedriveService/StartRedrive", start.encode_to_vec()),
        (
            "RedriveService/SetRedriveRate",
            v1::SetRedriveRateRequest {
                id: job.clone(),
                rate_per_second: 1,
                ..v1::SetRedriveRateRequest::default()
            }
            .encode_to_vec(),
        ),
        ("RedriveService/PauseRedrive", change_job()),
        ("RedriveService/ResumeRedrive", change_job()),
        ("RedriveService/CancelRedrive", change_job()),
        (
            "RedriveService/GetRedrive",
            v1::GetRedriveRequest { id: job.clone() }.encode_to_vec(),
        ),
        (
            "RedriveService/GetRedrivePreview",
            v1::GetRedriveRequest { id: previewed }.encode_to_vec(),
        ),
        (
            "RedriveService/ListRedrives",
            v1::ListRedrivesRequest::default().encode_to_vec(),
        ),
        (
            "RedriveService/ListRedriveItems",
            v1::ListRedriveItemsRequest {
                id: job.clone(),
                ..v1::ListRedriveItemsRequest::default()
            }
            .encode_to_vec(),
        ),
        (
            "OverviewService/GetOverview",
            v1::GetOverviewRequest::default().encode_to_vec(),
        ),
        (
            "OverviewService/WatchOverview",
            v1::WatchOverviewRequest::default().encode_to_vec(),
        ),
        (
            "WaitingService/ListWaiting",
            v1::ListWaitingRequest::default().encode_to_vec(),
        ),
        (
            "WaitingService/GetWaitingStats",
            v1::GetWaitingStatsRequest::default().encode_to_vec(),
        ),
        ("WaitingService/GetJobOutcomes", outcomes.encode_to_vec()),
        (
            "WaitingService/TraceRecord",
            v1::TraceRecordRequest {
                position: Some(position.clone()),
                ..v1::TraceRecordRequest::default()
            }
            .encode_to_vec(),
        ),
        (
            "WaitingService/FindRecords",
            v1::FindRecordsRequest {
                by: Some(By::Header(v1::NamedText {
                    name: "tenant".to_owned(),
                    value: "shown-header".to_owned(),
                })),
                ..v1::FindRecordsRequest::default()
            }
            .encode_to_vec(),
        ),
        (
            "WaitingService/GetWaitingRecord",
            v1::GetWaitingRecordRequest {
                position: Some(position),
                ..v1::GetWaitingRecordRequest::default()
            }
            .encode_to_vec(),
        ),
        ("WaitingService/ActOnWaitingRecords", retry.encode_to_vec()),
        (
            "WaitingService/GetWaitingActions",
            v1::GetWaitingActionsRequest {
                request_id: retry.request_id.clone(),
            }
            .encode_to_vec(),
        ),
    ];
    let served = methods();
    let served = served.iter().map(|method| {
        let service = method.parent_service();
        format!("{}/{}", service.name(), method.name())
    });
    let called = calls.iter().map(|(method, _)| (*method).to_owned());
    assert_eq!(
        called.collect::<BTreeSet<_>>(),
        served.collect::<BTreeSet<_>>(),
        "a method without a call, or a call without a method"
    );
    for (method, request) in calls {
        // Both never end.
        if method.ends_with("/WatchDeadLetters") || method.ends_with("/WatchOverview") {
            continue;
        }
        let answer = answer(raw(), &format!("/redeliver.v1.{method}"), request).await;
        if method.ends_with("/PlanEdit") {
            // An edit needs a caller who sees everything.
            assert_eq!(answers.refused(answer), denied());
            continue;
        }
        let messages = answer.unwrap_or_else(|status| panic!("{method}: {status:?}"));
        assert!(messages.iter().any(|message| !message.is_empty()), "{method}");
        answers.0.extend(messages.concat());
    }
    // By what is masked, nothing is found: a pipeline with a name is refused, and all leave it out.
    let [key, field, header, ..] = MASKED;
    let named = |name: &str, value: &str| v1::NamedText {
        name: name.to_owned(),
        value: value.to_owned(),
    };
    for by in [
        By::Key(key.to_owned()),
        By::Header(named("x-user", header)),
        By::Header(named("X-USER", header)),
        By::Field(named("/card/number", field)),
        By::Field(named("/pan", field)),
    ] {
        let find = async |pipeline: &str| {
            let request = v1::FindRecordsRequest {
                pipeline: pipeline.to_owned(),
                by: Some(by.clone()),
                since: None,
            };
            let path = "/redeliver.v1.WaitingService/FindRecords";
            answer(raw(), path, request.encode_to_vec()).await
        };
        assert_eq!(answers.refused(find(&pipeline).await), denied(), "{by:?}");
        let messages = find("").await.unwrap();
        let last = v1::FindRecordsResponse::decode(messages.last().unwrap().clone()).unwrap();
        let Some(v1::find_records_response::Event::Found(found)) = last.event else {
            panic!("{by:?}: {last:?}");
        };
        let is_left_out = found.gaps.iter().any(|gap| gap.contains(&pipeline));
        assert!(found.records.is_empty() && is_left_out, "{by:?}: {found:?}");
        answers.0.extend(messages.concat());
    }
    // A hash of them could be compared with guesses.
    let audit: Arc<str> = format!("{}-audit", callers.env.base.name()).into();
    let mut reader = TopicReader::new(&callers.env.kafka, &[audit]).unwrap();
    let add = |record: Record| answers.0.extend(record.value.unwrap_or_default());
    reader.read_to_end(DEADLINE, add).unwrap();
    assert!(answers.contain("redrives.plan") && answers.contain("dead-letters.discard"));
    // What waits and what would be redriven was found, and is masked.
    assert!(answers.contain("shown-stack <masked>") && answers.contain("redrive-id"));
    assert!(answers.contain("shown-message of <masked>") && answers.contain("-retry-2h"));
    for secret in MASKED {
        assert!(!answers.contain(secret), "an answer contains {secret}");
        assert!(
            !inspector.process.output().contains(secret),
            "the log contains {secret}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_masked_values_are_bounded() {
    const COUNT: usize = 45;
    let scopes: [(&str, &[&str]); 1] = [("masked", &["dead-letters:read", "dead-letters:payload"])];
    let mut callers = Callers::without_dead_letters("masked-large", &scopes).await;
    let rules = r#"[{"topics": ["*-orders-dlq"], "fields": ["/**/pan"], "headers": ["error-class"]}]"#;
    callers.env.base.set("dlq_inspector.masking", rules);
    let [orders, _] = callers.topics.clone();
    let value = || format!(r#"{{"pan":"{}","a":1}}"#, "x".repeat(900_000));
    for _ in 0..COUNT / 5 {
        let letters = (0..5).map(|_| dead("k", value(), &[("error-class", "permanent")]));
        callers.env.put(&orders, 0, letters.collect()).await;
    }
    let mut inspector = callers.env.start().await;
    let mut client = callers.client(&inspector.channel().await, "masked");
    // Classes are masked, too.
    let topic = eventually_async("all dead letters", DEADLINE, async || {
        let request = v1::GetDeadLetterStatsRequest::default();
        let stats = client.clone().get_dead_letter_stats(request).await;
        let topic = stats.unwrap().into_inner().topics.swap_remove(0);
        if topic.total == COUNT as u64 {
            Ok(topic)
        } else {
            Err(topic.total)
        }
    })
    .await;
    assert_eq!((topic.open_by_class.len(), topic.classes_masked), (0, true));
    let mut request = v1::ListDeadLettersRequest {
        page_size: 100,
        ..full("")
    };
    let mut counts = Vec::new();
    loop {
        let page = client.list_dead_letters(request.clone()).await;
        let page = page.unwrap().into_inner();
        let masked = Some(&br#"{"pan":"<masked>","a":1}"#[..]);
        let mut letters = page.dead_letters.iter();
        assert!(letters.all(|letter| letter.value.as_deref() == masked));
        counts.push(page.dead_letters.len());
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    assert_eq!((counts.len(), counts.iter().sum()), (2, COUNT), "{counts:?}");
}
