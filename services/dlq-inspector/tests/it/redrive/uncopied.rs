//! Dead letters of share groups without copies of their records, with the headers that a broker of Kafka 4.4 writes (`tests/it/dialects.rs` has real ones).

use redeliver_proto::v1::PayloadAtOrigin;
use redeliver_testkit::kafka_request::configure_topic;

use super::edit::planned_edit;
use super::*;

/// The origin, and a destination. Another topic is no source.
struct Uncopied {
    env: InspectorEnv,
    dlq: Arc<str>,
    source: Arc<str>,
}

impl Uncopied {
    async fn new(name: &str) -> Self {
        let mut env = InspectorEnv::new(name);
        let dlq = env.create_topic("share", 1).await;
        let source: Arc<str> = format!("{}-orders", env.base.name()).into();
        env.recreate_topic(&source, 2).await;
        for (key, value) in [
            ("share_group_sources", format!(r#"{{"{dlq}":["{source}"]}}"#)),
            ("redrive.destinations", format!(r#"["{}-*"]"#, env.base.name())),
            ("redrive.edit", "true".to_owned()),
        ] {
            env.base.set(&format!("dlq_inspector.{key}"), &value);
        }
        Self { env, dlq, source }
    }

    /// Writes records to the source, and returns their positions.
    async fn send(&self, partition: i32, keys: &[&str]) -> Vec<Position> {
        let records = keys.iter().map(|key| Dead {
            key: Some(Bytes::copy_from_slice(key.as_bytes())),
            value: Some(Bytes::from([b"\xff\0", key.as_bytes()].concat())),
            headers: [("tenant", Some(&b"a\xff"[..])), ("tenant", None)]
                .into_iter()
                .collect(),
        });
        self.env.put(&self.source, partition, records.collect()).await
    }

    /// Writes dead letters of these records.
    async fn put(&self, origins: &[Position]) {
        let letter = |origin: &Position| {
            let (partition, offset) = (origin.partition.to_string(), origin.offset.to_string());
            let headers = [
                ("__dlq.errors.topic", &*origin.topic),
                ("__dlq.errors.partition", &partition),
                ("__dlq.errors.offset", &offset),
                ("__dlq.errors.group", "billing"),
                ("__dlq.errors.delivery.count", "1"),
                ("__dlq.errors.message", "Offset rejected by client."),
            ];
            let headers = headers.map(|(name, value)| (name, Some(value.as_bytes())));
            Dead {
                key: None,
                value: None,
                headers: headers.into_iter().collect(),
            }
        };
        self.env
            .put(&self.dlq, 0, origins.iter().map(letter).collect())
            .await;
    }

    fn id(&self, offset: usize) -> String {
        format!("{}/0/{offset}", self.dlq)
    }

    fn filter(&self) -> String {
        format!("topic = \"{}\"", self.dlq)
    }

    fn plan(&self, offsets: &[usize]) -> v1::PlanRedriveRequest {
        v1::PlanRedriveRequest {
            all: false,
            ids: offsets.iter().map(|offset| self.id(*offset)).collect(),
            ..plan(v1::RedriveKind::Redrive, "")
        }
    }

    /// The records of the source that were redriven.
    fn redriven(&self) -> Vec<Record> {
        let mut records = read(&self.env, &self.source);
        records.retain(|record| redrive::count(&record.headers) > 0);
        records.sort_by(|one, other| one.key.cmp(&other.key));
        records
    }
}

async fn letter(inspector: &mut Inspector, id: &str) -> v1::DeadLetter {
    get_letter(&mut inspector.client().await, id).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn uncopied_payload_is_read_at_origin() {
    let world = Uncopied::new("uncopied").await;
    let mut origins = world.send(0, &["k0", "k1", "k2"]).await;
    origins.extend(world.send(1, &["k3"]).await);
    // A topic that is not listed, and a letter whose record was read twice.
    let secret = world.env.create_topic("secret", 1).await;
    let hidden = world.env.put(&secret, 0, vec![dead("s", "secret", &[])]).await;
    origins.push(hidden[0].clone());
    origins.push(origins[1].clone());
    world.put(&origins).await;
    let mut inspector = world.env.start().await;
    inspector.until_listed(&world.filter(), 6).await;

    let shown = letter(&mut inspector, &world.id(3)).await;
    assert_eq!(shown.payload_at_origin(), PayloadAtOrigin::NotVerified);
    let value = Bytes::from_static(b"\xff\0k3");
    assert_eq!((shown.value.as_ref(), shown.value_size), (Some(&value), Some(4)));
    let last: Vec<_> = shown.headers[6..]
        .iter()
        .map(|header| header.value.as_deref())
        .collect();
    assert_eq!(last, [Some(&b"a\xff"[..]), None]);
    let unlisted = letter(&mut inspector, &world.id(4)).await;
    assert_eq!(
        (unlisted.payload_at_origin(), unlisted.value),
        (PayloadAtOrigin::Unspecified, None)
    );
    let payload = get_payload(&mut inspector.client().await, &world.id(3)).await;
    assert_eq!(payload.unwrap(), value);

    let edit = edit::edit(&mut inspector, &world.id(3), b"edited").await;
    let job = planned_edit(&mut inspector, edit).await.unwrap();
    start(&mut inspector, &job.id).await;
    assert_eq!(until(&mut inspector, &job.id, &ENDED).await.done, 1);
    let redriven = world.redriven();
    let [edited] = &redriven[..] else { panic!() };
    assert_eq!(
        (edited.key.as_deref(), edited.value.as_deref()),
        (Some(&b"k3"[..]), Some(&b"edited"[..]))
    );

    let all = plan(v1::RedriveKind::Redrive, &world.filter());
    let job = planned(&mut inspector, all).await.unwrap();
    assert_eq!((job.total, job.origins[0].count), (4, 4), "{job:?}");
    assert_eq!(job.refused[0].reason(), v1::RedriveOutcome::PayloadOmitted);
    assert!(
        job.warnings
            .iter()
            .any(|warning| warning.contains("not verified")),
        "{job:?}"
    );
    let samples = preview(&mut inspector, &job.id).await;
    start(&mut inspector, &job.id).await;
    let job = until(&mut inspector, &job.id, &ENDED).await;
    assert_eq!((job.done, job.skipped), (4, 0), "{job:?}");
    let items = items(&mut inspector, &job.id).await;
    for sample in &samples {
        let item = items.iter().find(|item| item.id == sample.id).unwrap();
        let written = written(item);
        let mut records = read(&world.env, &world.source).into_iter();
        let record = records.find(|record| record.position == written).unwrap();
        assert_previewed(sample, &record);
    }
    assert_eq!(samples.len(), 3);
    let entries = audited(&world.env, &job.id);
    let redriven = entries
        .iter()
        .find(|entry| entry.action == "dead-letters.redrive");
    assert_eq!(
        redriven.unwrap().details,
        format!("payloads read from {}", world.source)
    );
    let redriven = world.redriven();
    let keys: Vec<_> = redriven
        .iter()
        .map(|record| record.key.as_deref().unwrap())
        .collect();
    assert_eq!(keys, [b"k0", b"k1", b"k1", b"k2", b"k3"]);
    let mut sent = read(&world.env, &world.source);
    sent.retain(|record| redrive::count(&record.headers) == 0);
    for record in &redriven[..4] {
        let original = sent.iter().find(|sent| sent.key == record.key).unwrap();
        let user = record.headers.filtered(|name| !redrive::is_redrive_header(name));
        assert_eq!((&record.value, &user), (&original.value, &original.headers));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_originals_are_skipped_with_reason() {
    let world = Uncopied::new("uncopied-gone").await;
    let mut origins = world.send(0, &["k", "k", "other"]).await;
    origins.extend(world.send(1, &["a", "b"]).await);
    world.put(&origins).await;
    let brokers = world.env.base.brokers().to_owned();
    delete_records(&brokers, &world.source, 1, 1);
    let compact = [
        ("cleanup.policy", "compact,delete"),
        ("segment.ms", "1"),
        ("min.cleanable.dirty.ratio", "0.0"),
    ];
    configure_topic(&brokers, &world.source, &compact);
    let mut inspector = world.env.start().await;
    inspector.until_listed(&world.filter(), 5).await;
    eventually_async("the first record is compacted", DEADLINE * 3, async || {
        // Only segments before the last one are.
        world.send(0, &["more"]).await;
        let found = letter(&mut inspector, &world.id(0)).await.payload_at_origin();
        ensure(found == PayloadAtOrigin::Compacted, format!("{found:?}"))
    })
    .await;
    let truncated = letter(&mut inspector, &world.id(3)).await;
    assert_eq!(truncated.payload_at_origin(), PayloadAtOrigin::Truncated);
    let refused = get_payload(&mut inspector.client().await, &world.id(3)).await;
    let reason = error::reason(&refused.unwrap_err());
    assert_eq!(reason.as_deref(), Some("PAYLOAD_NOT_AT_ORIGIN"));

    let planned_before = planned(&mut inspector, world.plan(&[2])).await.unwrap();
    let job = done(&mut inspector, world.plan(&[0, 1, 3, 4])).await;
    assert_eq!(
        outcomes(&mut inspector, &job.id).await,
        [
            v1::RedriveOutcome::OriginCompacted,
            v1::RedriveOutcome::Done,
            v1::RedriveOutcome::OriginTruncated,
            v1::RedriveOutcome::Done,
        ]
    );

    delete_topic(&brokers, &world.source);
    world.env.recreate_topic(&world.source, 2).await;
    let again = world.send(0, &["x", "y", "z"]).await;
    start(&mut inspector, &planned_before.id).await;
    until(&mut inspector, &planned_before.id, &ENDED).await;
    let recreated = v1::RedriveOutcome::OriginRecreated;
    assert_eq!(outcomes(&mut inspector, &planned_before.id).await, [recreated]);
    let refused = planned(&mut inspector, world.plan(&[2])).await.unwrap_err();
    assert!(refused.message().contains("1 ORIGIN_RECREATED"), "{refused:?}");
    // Also once it is known from a dead letter of the new topic, which is another one.
    world.put(&again[2..]).await;
    inspector.until_listed(&world.filter(), 6).await;
    let state = letter(&mut inspector, &world.id(2)).await.payload_at_origin();
    assert_eq!(state, PayloadAtOrigin::Recreated);
    assert_eq!(
        letter(&mut inspector, &world.id(5)).await.key.as_deref(),
        Some(&b"z"[..])
    );
    assert!(world.redriven().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn uncopied_payload_needs_scope_for_origin() {
    let mut world = Uncopied::new("uncopied-scopes").await;
    let origins = world.send(0, &["k0"]).await;
    world.put(&origins).await;
    let of_letter = |verbs: &[&str]| -> Vec<String> {
        let scopes = verbs
            .iter()
            .map(|verb| format!("dead-letters:{verb}:{}", world.dlq));
        scopes
            .chain([format!("dead-letters:operate:{}", world.source)])
            .collect()
    };
    let half = of_letter(&["read", "payload", "operate"]);
    let read = format!("dead-letters:read:{}", world.source);
    let callers = [
        ("half", half.clone()),
        (
            "whole",
            [
                half,
                vec![read.clone(), format!("dead-letters:payload:{}", world.source)],
            ]
            .concat(),
        ),
        ("metadata", [of_letter(&["read"]), vec![read]].concat()),
    ];
    let tokens = world.env.set_tokens(callers);
    let mut inspector = world.env.start().await;
    let channel = inspector.channel().await;
    let sending = |name: &str| SendToken::new(Some(&tokens[name].token)).unwrap();
    let letters = |name: &str| support::Client::new(Sending::new(channel.clone(), sending(name)));
    let redrives = |name: &str| RedriveServiceClient::with_interceptor(channel.clone(), sending(name));
    let get = async |name: &str| get_letter(&mut letters(name), &world.id(0)).await;
    let whole = eventually_async("the dead letter", DEADLINE, async || get("whole").await).await;
    assert_eq!(
        (whole.payload_at_origin(), whole.key.is_some()),
        (PayloadAtOrigin::NotVerified, true)
    );
    let half = get("half").await.unwrap();
    assert_eq!(
        (half.payload_at_origin(), half.key),
        (PayloadAtOrigin::NoPermission, None)
    );
    let metadata = get("metadata").await.unwrap();
    assert_eq!(
        (metadata.payload_at_origin(), metadata.key),
        (PayloadAtOrigin::Unspecified, None)
    );
    for name in ["half", "metadata"] {
        let refused = get_payload(&mut letters(name), &world.id(0)).await;
        assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied, "{name}");
    }
    let planned = redrives("half").plan_redrive(world.plan(&[0])).await;
    assert_eq!(planned.unwrap_err().code(), Code::PermissionDenied);
    let job = changed(async || redrives("whole").plan_redrive(world.plan(&[0])).await).await;
    let started = redrives("half").start_redrive(change(&job.id)).await;
    assert_eq!(started.unwrap_err().code(), Code::PermissionDenied);
    let request = v1::GetRedriveRequest { id: job.id.clone() };
    let seen = redrives("half").get_redrive(request).await.unwrap().into_inner();
    assert_eq!(seen.origins[0].topic, "<hidden>");
}

#[tokio::test(flavor = "multi_thread")]
async fn alternating_origins_are_all_redriven() {
    let world = Uncopied::new("uncopied-alternating").await;
    // More than the records of one step.
    let large = Bytes::from(vec![7; 400_000]);
    let record = |number: usize| Dead {
        key: Some(Bytes::from(number.to_string())),
        value: Some(large.clone()),
        headers: Headers::new(),
    };
    let mut origins = Vec::new();
    for number in 0..40 {
        let partition = i32::from(number % 2 == 1);
        let records = vec![record(number)];
        origins.extend(world.env.put(&world.source, partition, records).await);
    }
    world.put(&origins).await;
    let mut inspector = world.env.start().await;
    let filter = world.filter();
    inspector.until_listed(&filter, 40).await;
    let job = done(&mut inspector, plan(v1::RedriveKind::Redrive, &filter)).await;
    assert_eq!((job.done, job.skipped), (40, 0), "{job:?}");
    let redriven = world.redriven();
    let keys: BTreeSet<_> = redriven.iter().map(|record| record.key.clone()).collect();
    assert_eq!((redriven.len(), keys.len()), (40, 40));
    assert!(
        redriven
            .iter()
            .all(|record| record.value.as_ref() == Some(&large))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn absent_source_had_no_payloads() {
    let mut world = Uncopied::new("uncopied-absent").await;
    let later: Arc<str> = format!("{}-later", world.env.base.name()).into();
    let sources = format!(r#"{{"{}":["{later}"]}}"#, world.dlq);
    world.env.base.set("dlq_inspector.share_group_sources", &sources);
    let origin = Position {
        topic: later.clone(),
        partition: 0,
        offset: 0,
    };
    world.put(std::slice::from_ref(&origin)).await;
    let mut inspector = world.env.start().await;
    let filter = world.filter();
    inspector.until_listed(&filter, 1).await;
    world.env.recreate_topic(&later, 1).await;
    let record = dead("new", "value", &[]);
    world.env.put(&later, 0, vec![record]).await;
    world.put(&[origin]).await;
    inspector.until_listed(&filter, 2).await;
    let before = letter(&mut inspector, &world.id(0)).await;
    assert_eq!(before.payload_at_origin(), PayloadAtOrigin::Recreated);
    let after = letter(&mut inspector, &world.id(1)).await;
    assert_eq!(after.payload_at_origin(), PayloadAtOrigin::NotVerified);
    assert_eq!(after.key.as_deref(), Some(&b"new"[..]));
}
