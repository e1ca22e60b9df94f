//! What callers without `dead-letters:unmasked` get from each call.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use prost_reflect::{DynamicMessage, MessageDescriptor};
use redeliver_core::{Clock as _, Record, SystemClock};
use redeliver_kafka::reader::TopicReader;
use redeliver_proto::v1::find_records_request::By;
use redeliver_testkit::unique;
use tonic::Request;
use tonic::client::Grpc;

use super::*;
use crate::fuzz::{Raw, methods};
use crate::redrive::{change, taken};
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
async fn until(client: &Client, topic: &str, count: usize) {
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
            let letter = get_letter(&mut client, &format!("{orders}/0/{offset}"))
                .await
                .unwrap();
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
            answers.add(&get_group(&mut client, &group.id).await.unwrap());
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
    let value = get_payload(&mut client, &format!("{orders}/0/0")).await.unwrap();
    assert_eq!(Some(&value[..]), redeliver.value.as_deref());
    assert_eq!(
        answers.refused(get_payload(&mut client, &format!("{orders}/0/2")).await),
        denied()
    );
    assert!(get_payload(&mut client, &format!("{people}/0/2")).await.is_ok());
    let unmasked = get_payload(&mut everything, &format!("{orders}/0/2"))
        .await
        .unwrap();
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
    let pipeline = callers.set_pipeline(0);
    let control = format!("{}-control", callers.env.base.name());
    let retry = format!("pipelines.{pipeline}.retry");
    for (key, value) in [
        ("dlq_inspector.masking", RULES),
        ("dlq_inspector.redrive.edit", "true"),
        ("control.topic", &control),
        (&retry, "{ tiers: [2h] }"),
        ("scheduler.apps.shop.topic", &pipeline),
    ] {
        callers.env.base.set(key, value);
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
    let searched = changed(async || everything.plan_redrive(discards(search.clone())).await).await;
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
    let ended = changed(async || redrives.plan_redrive(one.clone()).await).await;
    let start = change(&ended.id);
    answers.add(&changed(async || redrives.start_redrive(start.clone()).await).await);
    until_listed(&client, &format!("{own} AND state = DISCARDED"), 1).await;
    let job = changed(async || redrives.plan_redrive(discards(own.clone())).await)
        .await
        .id;

    let id = format!("{orders}/0/0");
    let redrive = v1::PlanRedriveRequest {
        kind: v1::RedriveKind::Redrive.into(),
        ids: vec![id.clone(), format!("{orders}/0/1")],
        destination: pipeline.clone(),
        ..v1::PlanRedriveRequest::default()
    };
    let previewed = changed(async || redrives.plan_redrive(redrive.clone()).await)
        .await
        .id;
    let outcomes = v1::GetJobOutcomesRequest {
        id: JOB.to_owned(),
        topic: pipeline.clone(),
    };
    eventually_async("the job is known", DEADLINE, async || {
        let path = "/redeliver.v1.WaitingService/GetJobOutcomes";
        let messages = answer(raw(), path, outcomes.encode_to_vec()).await.unwrap();
        let answered = v1::GetJobOutcomesResponse::decode(messages[0].clone()).unwrap();
        let outcome = &answered.outcomes[0];
        let found = (outcome.state(), &*outcome.error_code);
        let waits = found == (v1::JobOutcomeState::Waiting, "http.503");
        ensure(waits, format!("{answered:?}"))
    })
    .await;
    // It waits while it is changed.
    let start_at = SystemClock.now().after(Duration::from_secs(3_600)).to_string();
    let position = json!({ "topic": &*tier, "partition": 0, "offset": 0 });
    let request_id = unique("masked");
    let (of_group, of_job) = (json!({ "id": group }), json!({ "id": job }));
    let of_tier = json!({ "name": format!("tier/{pipeline}/2h") });
    let of_pipeline = json!({ "name": format!("pipeline/{pipeline}") });
    let by_header = json!({ "name": "tenant", "value": "shown-header" });
    let hash = "AAAAAAAAAAAAAAAAAAAAAA==";
    let discards = json!({ "kind": "REDRIVE_KIND_DISCARD", "filter": own, "all_at_once": true });
    let retry =
        json!({ "positions": [&position], "action": "WAITING_ACTION_RETRY", "request_id": &request_id });
    let calls = [
        ("AccessService/GetAccess", json!({})),
        ("AuditService/ListAuditEntries", json!({})),
        ("ControlService/GetControl", of_tier.clone()),
        ("ControlService/PauseControl", of_pipeline.clone()),
        ("ControlService/ListControls", json!({})),
        ("ControlService/ResumeControl", of_pipeline),
        ("ControlService/SetControlRate", of_tier.clone()),
        ("ControlService/ReleaseTier", of_tier.clone()),
        ("ControlService/ReleaseWholeTier", json!({ "name": "tier/2h" })),
        ("ControlService/ResetControl", of_tier),
        (
            "DeadLetterService/ListDeadLetters",
            json!({ "filter": own, "view": "DEAD_LETTER_VIEW_FULL" }),
        ),
        ("DeadLetterService/GetDeadLetter", json!({ "id": id })),
        ("DeadLetterService/ReadPayload", json!({ "id": id })),
        ("DeadLetterService/GetDeadLetterStats", json!({})),
        ("DeadLetterService/ListGroups", json!({})),
        ("DeadLetterService/GetGroup", of_group.clone()),
        ("DeadLetterService/ResolveGroup", of_group.clone()),
        (
            "DeadLetterService/MuteGroup",
            json!({ "id": group, "reason": "known" }),
        ),
        ("DeadLetterService/ReopenGroup", of_group),
        (
            "DeadLetterService/AnnotateGroup",
            json!({ "id": group, "note": "shown" }),
        ),
        // Above, because it does not end.
        ("DeadLetterService/WatchDeadLetters", json!({})),
        ("RedriveService/PlanRedrive", discards),
        (
            "RedriveService/PlanEdit",
            json!({ "id": id, "content_hash": hash, "edit": { "value": {} } }),
        ),
        (
            "RedriveService/StartRedrive",
            json!({ "id": job, "start_at": start_at }),
        ),
        (
            "RedriveService/SetRedriveRate",
            json!({ "id": job, "rate_per_second": 1 }),
        ),
        ("RedriveService/PauseRedrive", of_job.clone()),
        ("RedriveService/ResumeRedrive", of_job.clone()),
        ("RedriveService/CancelRedrive", of_job.clone()),
        ("RedriveService/GetRedrive", of_job.clone()),
        ("RedriveService/GetRedrivePreview", json!({ "id": previewed })),
        ("RedriveService/ListRedrives", json!({})),
        ("RedriveService/ListRedriveItems", of_job),
        ("OverviewService/GetOverview", json!({})),
        ("OverviewService/WatchOverview", json!({})),
        ("WaitingService/ListWaiting", json!({})),
        ("WaitingService/GetWaitingStats", json!({})),
        (
            "WaitingService/GetJobOutcomes",
            json!({ "id": JOB, "topic": pipeline }),
        ),
        ("WaitingService/TraceRecord", json!({ "position": &position })),
        ("WaitingService/FindRecords", json!({ "header": by_header })),
        (
            "WaitingService/GetWaitingRecord",
            json!({ "position": &position }),
        ),
        ("WaitingService/ActOnWaitingRecords", retry),
        (
            "WaitingService/GetWaitingActions",
            json!({ "request_id": request_id }),
        ),
    ];
    let served = methods().into_iter().map(|method| {
        let name = format!("{}/{}", method.parent_service().name(), method.name());
        (name, method.input())
    });
    let served: BTreeMap<String, MessageDescriptor> = served.collect();
    let called: BTreeSet<&str> = calls.iter().map(|(method, _)| *method).collect();
    assert!(
        called.into_iter().eq(served.keys()),
        "a method without a call, or a call without a method"
    );
    for (method, request) in calls {
        // Both never end.
        if method.ends_with("/WatchDeadLetters") || method.ends_with("/WatchOverview") {
            continue;
        }
        let request = DynamicMessage::deserialize(served[method].clone(), request).unwrap();
        let path = format!("/redeliver.v1.{method}");
        let answer = taken(async || answer(raw(), &path, request.encode_to_vec()).await).await;
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
        let topic = get_stats(&mut client.clone(), "").await.topics.swap_remove(0);
        ensure(topic.total == COUNT as u64, topic.total).map(|()| topic)
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
