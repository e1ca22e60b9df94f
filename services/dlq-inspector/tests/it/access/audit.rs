//! Who gets payloads is recorded, and who may read it.

use redeliver_proto::v1::audit_service_client::AuditServiceClient;
use std::time::Duration;

use redeliver_kafka::topology;
use redeliver_testkit::LocalKafka;
use redeliver_testkit::kafka_request::delete_topic;
use serde_json::Value;

use super::*;

type AuditClient = AuditServiceClient<Sending>;

fn audit_client(callers: &Callers, channel: &Channel, caller: &str) -> AuditClient {
    AuditServiceClient::with_interceptor(channel.clone(), callers.interceptor(caller))
}

/// All pages of this many entries.
async fn entries(
    client: &mut AuditClient,
    mut request: v1::ListAuditEntriesRequest,
    size: i32,
) -> Vec<v1::AuditEntry> {
    request.page_size = size;
    let mut entries = Vec::new();
    loop {
        let page = client
            .list_audit_entries(request.clone())
            .await
            .unwrap()
            .into_inner();
        assert!(page.entries.len() <= usize::try_from(size).unwrap());
        entries.extend(page.entries.into_iter().map(|listed| listed.entry.unwrap()));
        if page.next_page_token.is_empty() {
            return entries;
        }
        request.page_token = page.next_page_token;
    }
}

const SCOPES: [(&str, &[&str]); 3] = [
    ("eve", &["dead-letters:*"]),
    ("metadata", &["dead-letters:read"]),
    ("auditor", &["audit:read"]),
];

#[tokio::test(flavor = "multi_thread")]
async fn disclosures_are_recorded_for_auditors() {
    let callers = Callers::new("audit", &SCOPES).await;
    let [orders, _] = &callers.topics;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let mut metadata = callers.client(&channel, "metadata");
    all_are_listed(&metadata).await;
    let mut answers = Answers::default();
    let id = format!("{orders}/0/0");
    // Nothing of this is a payload.
    watched(&mut metadata, "", &mut answers).await;
    get_letter(&mut metadata, &id).await.unwrap();
    get_payload(&mut metadata, &id).await.unwrap_err();

    let mut eve = callers.client(&channel, "eve");
    let own = format!(r#"topic = "{orders}""#);
    let basic = v1::ListDeadLettersRequest {
        view: DeadLetterView::Basic.into(),
        ..full("")
    };
    eve.list_dead_letters(basic).await.unwrap();
    get_letter(&mut eve, &id).await.unwrap();
    assert_eq!(pages(&mut eve, &own, &mut answers).await.len(), 2);
    assert_eq!(watched(&mut eve, &own, &mut answers).await.len(), 2);
    get_payload(&mut eve, &id).await.unwrap();

    let mut auditor = audit_client(&callers, &channel, "auditor");
    let all = entries(&mut auditor, v1::ListAuditEntriesRequest::default(), 1).await;
    let found: Vec<_> = all
        .iter()
        .map(|entry| {
            (
                &*entry.by,
                &*entry.action,
                &*entry.target,
                &*entry.filter,
                entry.count,
            )
        })
        .collect();
    assert_eq!(
        found,
        [
            ("token:eve", "dead-letters.get", &*id, "", 1),
            ("token:eve", "dead-letters.list", "", &*own, 1),
            ("token:eve", "dead-letters.list", "", &*own, 1),
            ("token:eve", "dead-letters.watch", "", &*own, 2),
            ("token:eve", "dead-letters.payload", &*id, "", 1),
        ]
    );
    let mut ids = all[3].ids.clone();
    ids.sort();
    assert_eq!(ids, [id.clone(), format!("{orders}/0/1")]);
    assert!(
        all.iter()
            .all(|entry| entry.by == "token:eve" && entry.service == "dlq-inspector")
    );
    // In one page too, and by other conditions.
    assert_eq!(
        entries(&mut auditor, v1::ListAuditEntriesRequest::default(), 9).await,
        all
    );
    let wanted = v1::ListAuditEntriesRequest {
        by: "token:eve".to_owned(),
        action: "dead-letters.*".to_owned(),
        target: id.clone(),
        from: all[1].time,
        until: None,
        ..v1::ListAuditEntriesRequest::default()
    };
    // Also where it is one of several. Which of the two pages has it depends on their times.
    let time = |entry: &v1::AuditEntry| entry.time.map(|time| (time.seconds, time.nanos));
    let mut expected = all.clone();
    expected.retain(|entry| time(entry) >= time(&all[1]));
    expected.retain(|entry| entry.target == id || entry.ids.contains(&id));
    assert_eq!(entries(&mut auditor, wanted, 9).await, expected);
    let none = v1::ListAuditEntriesRequest {
        until: all[0].time,
        ..v1::ListAuditEntriesRequest::default()
    };
    assert_eq!(entries(&mut auditor, none, 9).await, []);
    let mut request = v1::ListAuditEntriesRequest {
        page_size: 1,
        ..v1::ListAuditEntriesRequest::default()
    };
    let first = auditor
        .list_audit_entries(request.clone())
        .await
        .unwrap()
        .into_inner();
    request.page_token = first.next_page_token;
    request.by = "bob".to_owned();
    let status = auditor.list_audit_entries(request).await.unwrap_err();
    assert_eq!(reason(&status).as_deref(), Some("TOKEN_OF_ANOTHER_QUESTION"));
    // No other caller.
    for caller in ["eve", "metadata"] {
        let mut other = audit_client(&callers, &channel, caller);
        let refused = other
            .list_audit_entries(v1::ListAuditEntriesRequest::default())
            .await;
        assert_eq!(answers.refused(refused), denied(), "{caller}");
    }
    assert_eq!(
        answers.refused(get_letter(&mut callers.client(&channel, "auditor"), &id).await),
        denied()
    );

    // The CLI leaves entries with the name of its caller, and shows them.
    let mut run = |caller: &str, command: &[&str]| {
        let output = callers.run(&mut inspector, caller, command);
        assert_eq!(output.code, Some(0), "{output:?}");
        output.stdout
    };
    run("eve", &["show", &id, "--reason", "Störung 4711", "--payload"]);
    run("eve", &["ls"]);
    let shown: Value = serde_json::from_str(&run("auditor", &["audit", "-o", "json"])).unwrap();
    let shown = shown.as_array().unwrap();
    assert_eq!(shown.len(), 6, "{shown:?}");
    assert_eq!(
        (
            &shown[5]["by"],
            &shown[5]["action"],
            &shown[5]["target"],
            &shown[5]["reason"]
        ),
        (
            &json!("token:eve"),
            &json!("dead-letters.payload"),
            &json!(id),
            &json!("Störung 4711")
        )
    );
    assert_eq!(shown[4]["reason"], json!(null));
    let table = run(
        "auditor",
        &["audit", "--by", "token:eve", "--action", "dead-letters.watch"],
    );
    assert!(
        table.contains("dead-letters.watch") && !table.contains("dead-letters.list"),
        "{table}"
    );
    for secret in SECRETS {
        assert!(!table.contains(secret) && !shown.iter().any(|entry| entry.to_string().contains(secret)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_audit_topic_no_payload() {
    let mut callers = Callers::new("audit-gone", &SCOPES).await;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let mut eve = callers.client(&channel, "eve");
    all_are_listed(&eve).await;
    let topic = format!("{}-audit", callers.env.base.name());
    delete_topic(&callers.env.kafka.brokers, &topic);
    let id = format!("{}/0/0", callers.topics[0]);
    let mut answers = Answers::default();
    let unavailable = (Code::Unavailable, "AUDIT_UNAVAILABLE".to_owned());
    // A broker accepts records for a moment after it has confirmed the deletion.
    eventually_async("the topic is gone", DEADLINE, async || {
        ensure(get_payload(&mut eve, &id).await.is_err(), "an entry was written")
    })
    .await;
    assert_eq!(answers.refused(get_payload(&mut eve, &id).await), unavailable);
    assert_eq!(answers.refused(get_letter(&mut eve, &id).await), unavailable);
    assert_eq!(
        answers.refused(eve.list_dead_letters(full("")).await),
        unavailable
    );
    let watch = v1::WatchDeadLettersRequest {
        view: DeadLetterView::Full.into(),
        ..v1::WatchDeadLettersRequest::default()
    };
    let mut stream = eve.watch_dead_letters(watch).await.unwrap().into_inner();
    let mut next = timeout(DEADLINE, stream.next()).await.unwrap().unwrap();
    // Heartbeats contain no dead letters.
    while next.is_ok() {
        assert!(matches!(next.as_ref().unwrap().event, Some(Event::Heartbeat(_))));
        next = timeout(DEADLINE, stream.next()).await.unwrap().unwrap();
    }
    assert_eq!(answers.refused(next), unavailable);
    for secret in SECRETS {
        assert!(!answers.contain(secret));
    }
    // Metadata needs no entry.
    let basic = v1::ListDeadLettersRequest {
        view: DeadLetterView::Basic.into(),
        ..full("")
    };
    assert!(eve.list_dead_letters(basic).await.is_ok());
    let mut auditor = audit_client(&callers, &channel, "auditor");
    let refused = auditor
        .list_audit_entries(v1::ListAuditEntriesRequest::default())
        .await;
    assert_eq!(answers.refused(refused), unavailable);
    inspector.process.shut_down();

    callers.env.base.set("dlq_inspector.record_disclosures", "false");
    callers.env.base.set("kafka.topics.create", "false");
    let mut inspector = callers.env.start().await;
    let mut eve = callers.client(&inspector.channel().await, "eve");
    assert!(get_payload(&mut eve, &id).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn entry_has_reason_and_no_secrets() {
    let scopes: [(&str, &[&str]); 2] = [("eve", &["dead-letters:*"]), ("auditor", &["audit:read"])];
    let mut callers = Callers::new("audit-masked", &scopes).await;
    let rules = r#"[{ topics: ["*"], headers: [error-code, pipeline, job-id, traceparent] }]"#;
    callers.env.base.set("dlq_inspector.masking", rules);
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let mut eve = callers.client(&channel, "eve");
    all_are_listed(&eve).await;
    let name = callers.env.base.name().to_owned();
    let filter = format!(
        "error_class = permanent AND pipeline = '{name}' OR error_code = E4711 OR key = \"{}\" OR trace_id != t4711",
        SECRETS[0]
    );
    let recorded = "error_class = permanent AND pipeline = <value> OR error_code = <value> OR key = <value> OR trace_id != <value>";
    let with_reason = |reason: &'static str| {
        let mut request = tonic::Request::new(full(&filter));
        let reason = reason.parse().unwrap();
        request.metadata_mut().insert("redeliver-reason", reason);
        request
    };
    let listed = eve.list_dead_letters(with_reason("St%C3%B6rung%0a4711")).await;
    assert!(!listed.unwrap().into_inner().dead_letters.is_empty());
    for invalid in ["%ff", "a%07b"] {
        let refused = eve.list_dead_letters(with_reason(invalid)).await.unwrap_err();
        assert_eq!(reason(&refused).as_deref(), Some("REASON_INVALID"), "{invalid}");
    }
    let request = v1::PlanRedriveRequest {
        kind: v1::RedriveKind::Discard.into(),
        filter: filter.clone(),
        ..v1::PlanRedriveRequest::default()
    };
    let mut redrives = callers.redrives(&channel, "eve");
    let planned = changed(async || redrives.plan_redrive(request.clone()).await).await;
    assert_eq!(planned.filter, recorded);
    let mut auditor = audit_client(&callers, &channel, "auditor");
    let all = entries(&mut auditor, v1::ListAuditEntriesRequest::default(), 100).await;
    for (action, reason) in [("dead-letters.list", "St\u{f6}rung\n4711"), ("redrives.plan", "")] {
        let of_action = all
            .iter()
            .filter(|entry| entry.action == action && !entry.filter.is_empty());
        let found: Vec<_> = of_action.map(|entry| (&*entry.filter, &*entry.reason)).collect();
        assert_eq!(found, [(recorded, reason)], "{action}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disclosure_creates_no_audit_topic() {
    let kafka = LocalKafka::start_with(&[("auto.create.topics.enable", "true")]).unwrap();
    let env = InspectorEnv::on("audit-created", &kafka.brokers());
    let topic = env.create_topic("orders", 1).await;
    env.put(&topic, 0, vec![dead("k", "v", &[])]).await;
    let mut inspector = env.start().await;
    inspector.until_listed("", 1).await;
    let id = format!("{topic}/0/0");
    let mut client = inspector.client().await;
    // From now on, the inspector knows the topic, and its producer asks for it again.
    get_letter(&mut client, &id).await.unwrap();
    let audit = format!("{}-audit", env.base.name());
    delete_topic(&kafka.brokers(), &audit);
    let names = async || {
        let names = topology::names(&env.kafka.client(), Duration::from_secs(10)).await;
        names.map_err(|error| error.to_string())
    };
    // The broker may still accept records for a moment.
    eventually_async("the topic is deleted", DEADLINE, async || {
        ensure(!names().await?.contains(&audit), "it exists".to_owned())
    })
    .await;
    let refused = reason(&get_letter(&mut client, &id).await.unwrap_err());
    assert_eq!(refused.as_deref(), Some("AUDIT_UNAVAILABLE"));
    assert!(!names().await.unwrap().contains(&audit));
}
