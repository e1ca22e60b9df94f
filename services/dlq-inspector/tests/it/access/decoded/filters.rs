//! Filters on fields of values that were written with a schema of a registry.

use redeliver_testkit::kafka_request::delete_records;

use super::*;

/// Has the field `/order/id`.
const PLACED: &str = r#"{"type":"record","name":"Placed","fields":[{"name":"order","type":
    {"type":"record","name":"Order","fields":[{"name":"id","type":"string"}]}}]}"#;
/// The same with another name, so that it is another schema.
const LATE: &str = r#"{"type":"record","name":"Late","fields":[{"name":"order","type":
    {"type":"record","name":"Order","fields":[{"name":"id","type":"string"}]}}]}"#;
const PAID: &str = r#"syntax = "proto3"; message Paid { Order order = 1; string card_number = 2; } message Order { string id = 1; }"#;

const O7: &str = "json./order/id = o-7";

/// Registers the schemas, which get the same ids in each empty registry.
async fn register(registry: &LocalSchemaRegistry) -> [u32; 4] {
    [
        registry.register("placed", "AVRO", PLACED, &[]).await,
        registry.register("paid", "PROTOBUF", PAID, &[]).await,
        registry.register("any", "JSON", ANY, &[]).await,
        registry.register("late", "AVRO", LATE, &[]).await,
    ]
}

/// Lists with a filter: the ids in order, and the completeness.
async fn found(client: &TokenClient, filter: &str) -> (Vec<String>, v1::Completeness) {
    let request = v1::ListDeadLettersRequest {
        filter: filter.to_owned(),
        page_size: 1000,
        ..v1::ListDeadLettersRequest::default()
    };
    let page = client
        .clone()
        .list_dead_letters(request)
        .await
        .unwrap()
        .into_inner();
    let mut ids: Vec<String> = page.dead_letters.into_iter().map(|letter| letter.id).collect();
    ids.sort();
    (ids, page.completeness.unwrap())
}

/// Waits until a filter finds these dead letters, and can match this number of others.
async fn until(client: &TokenClient, filter: &str, expected: &[String], undecoded: u64) {
    eventually_async(filter, DEADLINE, async || {
        let (ids, completeness) = found(client, filter).await;
        let is_complete = completeness.complete == (undecoded == 0);
        if ids == expected && completeness.undecoded_count == undecoded && is_complete {
            Ok(())
        } else {
            Err(format!("{ids:?} {completeness:?}"))
        }
    })
    .await;
}

type Watched = tonic::Streaming<v1::WatchDeadLettersResponse>;

async fn watch(client: &TokenClient, filter: &str) -> Watched {
    let request = v1::WatchDeadLettersRequest {
        filter: filter.to_owned(),
        ..v1::WatchDeadLettersRequest::default()
    };
    client
        .clone()
        .watch_dead_letters(request)
        .await
        .unwrap()
        .into_inner()
}

/// The ids of the next dead letters of a watch, and the completeness of `SYNCED`: up to that, or this number.
async fn next(stream: &mut Watched, count: Option<usize>) -> (Vec<String>, Option<v1::Completeness>) {
    let mut ids = Vec::new();
    // Heartbeats arrive all the time.
    let deadline = tokio::time::Instant::now() + DEADLINE;
    while count.is_none_or(|count| ids.len() < count) {
        let message = tokio::time::timeout_at(deadline, stream.message()).await;
        let message = message.unwrap_or_else(|_| panic!("only {ids:?}"));
        match message.unwrap().unwrap().event.unwrap() {
            Event::DeadLetter(letter) => ids.push(letter.id),
            Event::Synced(synced) => return (ids, synced.completeness),
            Event::Heartbeat(_) => {}
        }
    }
    (ids, None)
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_find_fields_of_decoded_values_also_of_those_that_arrive_while_the_registry_is_away() {
    let registry = LocalSchemaRegistry::start().unwrap();
    let [placed, paid, any, late] = register(&registry).await;
    // It is registered at the end.
    let missing = late + 1;

    let scopes: [(&str, &[&str]); 2] = [
        ("all", &["dead-letters:*"]),
        ("masked", &["dead-letters:read", "dead-letters:payload"]),
    ];
    let mut callers = Callers::without_dead_letters("decoded-filters", &scopes).await;
    let base = &mut callers.env.base;
    base.set("dlq_inspector.schema_registry.url", &registry.url());
    base.set("dlq_inspector.json_fields", r#"["/order/id", "/cardNumber"]"#);
    // The field of Protobuf's JSON has another name.
    base.set(
        "dlq_inspector.masking",
        r#"[{"topics": ["*-orders-dlq"], "fields": ["/card_number"]}]"#,
    );
    let [orders, people] = callers.topics.clone();
    let id = |topic: &str, offset: usize| format!("{topic}/0/{offset}");
    let message = [&b"\0\x0a\x05\x0a\x03o-7\x12\x08"[..], SECRET.as_bytes()].concat();
    let values = [
        framed(placed, &string("o-7")),
        framed(paid, &message),
        framed(any, br#"{"order":{"id":"o-7"}}"#),
        br#"{"order":{"id":"o-7"}}"#.to_vec(),
        framed(placed, &string("o-8")),
        // It does not match its schema; there is no such schema.
        framed(placed, b"\x06o"),
        framed(missing, &string("o-9")),
    ];
    let letters = values.into_iter().map(letter).collect();
    callers.env.put(&orders, 0, letters).await;
    callers
        .env
        .put(&people, 0, vec![letter(framed(paid, &message))])
        .await;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let (all, masked) = (
        callers.client(&channel, "all"),
        callers.client(&channel, "masked"),
    );

    let of_orders: Vec<String> = (0..4).map(|offset| id(&orders, offset)).collect();
    let first: Vec<String> = of_orders.iter().cloned().chain([id(&people, 0)]).collect();
    until(&all, O7, &first, 0).await;
    // A missing schema makes no answer incomplete.
    until(&all, "json./order/id = o-9", &[], 0).await;
    let card = format!(r#"json./cardNumber = "{SECRET}""#);
    until(&all, &card, &[id(&orders, 1), id(&people, 0)], 0).await;
    // What is masked is not found, also if the filter is negated.
    until(&masked, &card, &[id(&people, 0)], 0).await;
    until(&masked, "NOT json./cardNumber = x", &[id(&people, 0)], 0).await;
    until(&masked, O7, &first, 0).await;

    // A schema that is in memory is still used. Another one is not known. A registry that starts again is empty: it would say that the schema is missing,
    // and the watch would pass what has it.
    registry.freeze();
    let during = [framed(placed, &string("o-7")), framed(late, &string("o-7"))];
    callers
        .env
        .put(&orders, 0, during.into_iter().map(letter).collect())
        .await;
    let mut second = first.clone();
    second.insert(4, id(&orders, 7));
    until(&all, O7, &second, 1).await;
    // Nobody knows what a negated condition is true of.
    let others = format!("NOT {O7}");
    let not_o7: Vec<String> = (4..7).map(|offset| id(&orders, offset)).collect();
    until(&all, &others, &not_o7, 1).await;
    // Filters of which it is known that the dead letter does not match, or matches.
    until(
        &all,
        &format!(r#"{O7} AND topic = "{people}""#),
        &[id(&people, 0)],
        0,
    )
    .await;
    let ninth = format!(
        r#"id = "{}" AND ({O7} OR error_class = permanent)"#,
        id(&orders, 8)
    );
    until(&all, &ninth, &[id(&orders, 8)], 0).await;
    until(&masked, "json./cardNumber:*", &[id(&people, 0)], 0).await;
    let counted = v1::GetDeadLetterStatsRequest {
        filter: O7.to_owned(),
    };
    let stats = all
        .clone()
        .get_dead_letter_stats(counted)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(stats.completeness.unwrap().undecoded_count, 1);
    let listed = v1::ListGroupsRequest {
        filter: O7.to_owned(),
        ..v1::ListGroupsRequest::default()
    };
    let groups = all.clone().list_groups(listed).await.unwrap().into_inner();
    let completeness = groups.completeness.unwrap();
    assert!(!completeness.complete && completeness.undecoded_count == 1);
    let server = format!("http://{}", inspector.process.word_after(" api="));
    let token = callers.token_file("all").display().to_string();
    let output = callers.env.base.run(
        "redeliver",
        &[
            "dlq",
            "ls",
            "--filter",
            O7,
            "--require-complete",
            "--server",
            &server,
            "--token-file",
            &token,
        ],
    );
    assert_eq!(output.code, Some(3), "{output:?}");
    assert!(
        output
            .stderr
            .contains("1 dead letters may match whose values are not decoded yet"),
        "{output:?}"
    );
    eventually_async("the metric", DEADLINE, async || {
        let metrics = inspector.metrics();
        let count = metrics
            .lines()
            .find(|line| line.starts_with("redeliver_dlq_undecoded "));
        if count == Some("redeliver_dlq_undecoded 1") {
            Ok(())
        } else {
            Err(format!("{count:?}"))
        }
    })
    .await;

    // After a restart, no schema is known.
    inspector.process.shut_down();
    callers
        .env
        .put(&orders, 0, vec![letter(framed(placed, &string("o-7")))])
        .await;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let (all, masked) = (
        callers.client(&channel, "all"),
        callers.client(&channel, "masked"),
    );
    until(&all, O7, &second, 2).await;
    // A watch goes on when it is known what is next.
    let mut watched = watch(&all, O7).await;
    let (mut sent, synced) = next(&mut watched, None).await;
    sent.sort();
    assert_eq!(sent, second);
    let synced = synced.unwrap();
    assert!(!synced.complete && synced.undecoded_count == 2, "{synced:?}");
    let mut people_watched = watch(&all, &format!(r#"{O7} AND topic = "{people}""#)).await;
    assert_eq!(next(&mut people_watched, None).await.0, [id(&people, 0)]);

    registry.thaw();
    let mut third = second.clone();
    third.splice(5..5, [id(&orders, 8), id(&orders, 9)]);
    until(&all, O7, &third, 0).await;
    until(&all, &others, &not_o7, 0).await;
    until(&masked, &card, &[id(&people, 0)], 0).await;
    assert_eq!(
        next(&mut watched, Some(2)).await.0,
        [id(&orders, 8), id(&orders, 9)]
    );

    // A schema that was missing.
    let again = LATE.replace("Late", "Later");
    assert_eq!(registry.register("later", "AVRO", &again, &[]).await, missing);
    until(&all, "json./order/id = o-9", &[id(&orders, 6)], 0).await;
    let log = inspector.process.output();
    assert!(!log.contains(SECRET), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_goes_on_if_what_holds_it_back_is_deleted() {
    let registry = FakeEndpoint::start(|_| Reply::status(503));
    let scopes: [(&str, &[&str]); 1] = [("all", &["dead-letters:*"])];
    let mut callers = Callers::without_dead_letters("decoded-deleted", &scopes).await;
    let base = &mut callers.env.base;
    base.set("dlq_inspector.schema_registry.url", &registry.url());
    base.set("dlq_inspector.json_fields", r#"["/order/id"]"#);
    let [orders, _] = callers.topics.clone();
    let values = [framed(1, &string("o-7")), br#"{"order":{"id":"o-7"}}"#.to_vec()];
    callers
        .env
        .put(&orders, 0, values.into_iter().map(letter).collect())
        .await;
    let mut inspector = callers.env.start().await;
    let all = callers.client(&inspector.channel().await, "all");
    let second = [format!("{orders}/0/1")];
    until(&all, O7, &second, 1).await;
    let mut watched = watch(&all, O7).await;
    let (sent, synced) = next(&mut watched, None).await;
    assert_eq!(sent, [""; 0]);
    assert_eq!(synced.unwrap().undecoded_count, 1);

    delete_records(&callers.env.kafka.brokers, &orders, 0, 1);
    until(&all, O7, &second, 0).await;
    // No new dead letter wakes the watch. Until it has sent the second one, it does not say that it has.
    let going_on = async {
        loop {
            match watched.message().await.unwrap().unwrap().event.unwrap() {
                Event::DeadLetter(letter) => return letter.id,
                Event::Heartbeat(heartbeat) => assert!(!heartbeat.completeness.unwrap().complete),
                Event::Synced(_) => panic!("synced again"),
            }
        }
    };
    let sent = timeout(DEADLINE, going_on).await.expect("the dead letter");
    assert_eq!(sent, second[0]);
}
