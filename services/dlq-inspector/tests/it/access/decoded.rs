//! Values that were written with a schema of a registry.

use redeliver_testkit::{FakeEndpoint, LocalSchemaRegistry, Reply};
use serde_json::Value;

use super::*;
use crate::support::{Dead, get_page};

/// What is masked in values.
const SECRET: &str = "pan-4111";

const ORDER: &str = r#"{"type":"record","name":"Order","namespace":"shop","fields":[{"name":"id","type":"string"},
    {"name":"card_number","type":["null","string"]}]}"#;
const CART: &str = r#"{"type":"record","name":"Cart","namespace":"shop","fields":[{"name":"orders","type":{"type":"array","items":"shop.Order"}}]}"#;
const MONEY: &str = r#"syntax = "proto3"; package shop; message Money { int64 cents = 1; }"#;
const PAYMENT: &str = r#"syntax = "proto3"; package shop; import "money.proto";
    message Refund { string id = 1; } message Payment { string card_number = 1; Money price = 2; }"#;
const ANY: &str = r#"{"$schema":"http://json-schema.org/draft-07/schema#","type":"object"}"#;

fn framed(schema: u32, payload: &[u8]) -> Vec<u8> {
    [&[0][..], &schema.to_be_bytes(), payload].concat()
}

fn letter(value: Vec<u8>) -> Dead {
    dead("k", value, &[("error-class", "permanent")])
}

/// An Avro string of less than 64 bytes.
fn string(text: &str) -> Vec<u8> {
    [&[u8::try_from(text.len() * 2).unwrap()], text.as_bytes()].concat()
}

/// The ids that match, in order, in a complete answer.
async fn matching(client: &Client, filter: &str) -> Vec<String> {
    let page = get_page(&mut client.clone(), filter).await.unwrap();
    assert!(page.completeness.unwrap().complete);
    let mut ids: Vec<String> = page.dead_letters.into_iter().map(|letter| letter.id).collect();
    ids.sort();
    ids
}

async fn decoded(client: &mut Client, id: &str) -> Option<v1::DecodedValue> {
    get_letter(client, id).await.unwrap().decoded
}

#[tokio::test(flavor = "multi_thread")]
async fn decoded_values_contain_nothing_masked() {
    let mut registry = LocalSchemaRegistry::start().unwrap();
    let order = registry.register("shop.Order", "AVRO", ORDER, &[]).await;
    let cart = registry.register("cart", "AVRO", CART, &["shop.Order"]).await;
    registry.register("money.proto", "PROTOBUF", MONEY, &[]).await;
    let payment = registry
        .register("payment", "PROTOBUF", PAYMENT, &["money.proto"])
        .await;
    let any = registry.register("any", "JSON", ANY, &[]).await;

    let scopes: [(&str, &[&str]); 3] = [
        ("all", &["dead-letters:*"]),
        ("masked", &["dead-letters:read", "dead-letters:payload"]),
        ("metadata", &["dead-letters:read"]),
    ];
    let mut callers = Callers::without_dead_letters("decoded", &scopes).await;
    callers
        .env
        .base
        .set("dlq_inspector.schema_registry.url", &registry.url());
    let json_fields = r#"["/id", "/cardNumber"]"#;
    callers.env.base.set("dlq_inspector.json_fields", json_fields);
    callers.env.base.set(
        "dlq_inspector.masking",
        r#"[{"topics": ["*-orders-dlq"], "fields": ["/cardNumber", "/orders/*/card_number"]}]"#,
    );
    let [orders, people] = callers.topics.clone();
    let avro = [string("o-1"), vec![2], string(SECRET)].concat();
    let list = [&[2][..], &avro, &[0]].concat();
    let message = [&[2, 2][..], b"\x0a\x08", SECRET.as_bytes(), b"\x12\x02\x08\x07"].concat();
    let document = format!(r#"{{"cardNumber":"{SECRET}","n":1.50}}"#).into_bytes();
    let values = [
        framed(order, &avro),
        framed(cart, &list),
        framed(payment, &message),
        framed(any, &document),
        // A schema that does not exist, a value that does not match its schema, and others.
        framed(9_999, &avro),
        framed(order, &avro[..5]),
        br#"{"id":"plain"}"#.to_vec(),
        b"\0\0".to_vec(),
        // A text of 400,000 characters, each of which has 6 in JSON.
        framed(order, &[&b"\x80\xea\x30"[..], &vec![1; 400_000], b"\0"].concat()),
    ];
    for topic in [&orders, &people] {
        let letters = values.iter().cloned().map(letter);
        callers.env.put(topic, 0, letters.collect()).await;
    }
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let mut all = callers.client(&channel, "all");
    until_listed(&all, "", 18).await;

    let id = |topic: &str, offset: usize| format!("{topic}/0/{offset}");
    let whole = [
        (
            order,
            v1::SchemaFormat::Avro,
            "shop.Order",
            json!({"id": "o-1", "card_number": SECRET}),
        ),
        (
            cart,
            v1::SchemaFormat::Avro,
            "shop.Cart",
            json!({"orders": [{"id": "o-1", "card_number": SECRET}]}),
        ),
        (
            payment,
            v1::SchemaFormat::Protobuf,
            "shop.Payment",
            json!({"cardNumber": SECRET, "price": {"cents": "7"}}),
        ),
        (
            any,
            v1::SchemaFormat::Json,
            "",
            json!({"cardNumber": SECRET, "n": 1.5}),
        ),
    ];
    for (offset, (schema, format, name, expected)) in whole.iter().enumerate() {
        let found = decoded(&mut all, &id(&orders, offset)).await.unwrap();
        assert_eq!(
            (found.schema_id, found.format(), &*found.name, &*found.problem),
            (*schema, *format, *name, "")
        );
        assert_eq!(serde_json::from_str::<Value>(&found.json).unwrap(), *expected);
    }
    for (offset, problem) in [
        (4, "the schema registry has no schema 9999"),
        (5, "the value does not match its schema"),
        (8, "the decoded value has more than 1048576 bytes"),
    ] {
        let found = decoded(&mut all, &id(&orders, offset)).await.unwrap();
        assert_eq!((&*found.json, &*found.problem), ("", problem));
    }
    for offset in [6, 7] {
        assert_eq!(decoded(&mut all, &id(&orders, offset)).await, None);
    }

    // Filters find fields of plain JSON only, and their answers do not depend on the registry.
    let plain = [id(&orders, 6), id(&people, 6)];
    assert_eq!(matching(&all, "json./id:*").await, plain);
    assert_eq!(matching(&all, "json./cardNumber:*").await, [""; 0]);

    // The value is withheld, and the rest of what it contains is shown.
    let mut masked = callers.client(&channel, "masked");
    let mut answers = Answers::default();
    for (offset, (.., expected)) in whole.iter().enumerate() {
        let letter = get_letter(&mut masked, &id(&orders, offset)).await.unwrap();
        answers.add(&letter);
        let expected = expected.to_string().replace(SECRET, "<masked>");
        let found: Value = serde_json::from_str(&letter.decoded.unwrap().json).unwrap();
        assert_eq!(found.to_string(), expected);
        let of_letter = letter.masked.unwrap();
        for field in ["value", "decoded"] {
            assert!(
                of_letter.fields.iter().any(|masked| masked == field),
                "{of_letter:?}"
            );
        }
        assert_eq!(of_letter.paths.len(), 1);
    }
    for offset in 4..9 {
        answers.add(&get_letter(&mut masked, &id(&orders, offset)).await.unwrap());
    }
    // How large a value is tells something of what is masked in it.
    for offset in [5, 8] {
        let found = decoded(&mut masked, &id(&orders, offset)).await.unwrap();
        assert_eq!(found.problem, "the value cannot be decoded");
    }
    assert!(!answers.contain(SECRET));
    // In the other topic, nothing is masked.
    let found = decoded(&mut masked, &id(&people, 0)).await.unwrap();
    assert!(found.json.contains(SECRET));
    let mut metadata = callers.client(&channel, "metadata");
    let letter = get_letter(&mut metadata, &id(&people, 0)).await.unwrap();
    assert_eq!(letter.decoded, None);

    // The CLI.
    let first = id(&orders, 0);
    let mut run = |command: &[&str]| {
        let command = [&["show", first.as_str()], command].concat();
        let output = callers.run(&mut inspector, "masked", &command);
        assert_eq!(output.code, Some(0), "{output:?}");
        output.stdout
    };
    let text = run(&[]);
    let shown = format!(
        "\ndecoded (avro, shop.Order, schema {order})\n{{\n  \"id\": \"o-1\",\n  \"card_number\": \"<masked>\"\n}}\n"
    );
    assert!(text.ends_with(&shown), "{text}");
    let value: Value = serde_json::from_str(&run(&["-o", "json"])).unwrap();
    assert_eq!(
        value["decoded"]["value"],
        json!({"id": "o-1", "card_number": "<masked>"})
    );

    // Without the registry, what is known is decoded, and the rest is shown as it is.
    registry.kill_9();
    assert_eq!(matching(&all, "json./id:*").await, plain);
    assert!(!decoded(&mut all, &id(&orders, 0)).await.unwrap().json.is_empty());
    callers.env.put(&people, 0, vec![letter_of(4_242)]).await;
    let last = id(&people, 9);
    let letter = eventually_async("the last dead letter", DEADLINE, async || {
        get_letter(&mut all.clone(), &last).await
    })
    .await;
    assert!(letter.value.is_some());
    let found = letter.decoded.unwrap();
    assert_eq!(
        (found.schema_id, &*found.problem),
        (4_242, "the schema registry does not answer")
    );
    assert!(
        inspector
            .metrics()
            .contains(r#"redeliver_dlq_schema_fetches_total{outcome="ok"} 4"#)
    );
    let log = inspector.process.output();
    assert!(
        log.contains("cannot fetch a schema") && !log.contains(SECRET),
        "{log}"
    );
}

fn letter_of(schema: u32) -> Dead {
    letter(framed(schema, b"\0"))
}

#[tokio::test(flavor = "multi_thread")]
async fn registry_gets_credentials_of_files() {
    let registry = FakeEndpoint::start(|request| {
        let sent = request
            .headers
            .get("authorization")
            .map(|value| value.as_bytes().to_vec());
        match sent.as_deref() {
            // inspector:one, inspector:two
            Some(b"Basic aW5zcGVjdG9yOm9uZQ==") => Reply::ok(r#"{"schema":"\"string\""}"#),
            Some(b"Basic aW5zcGVjdG9yOnR3bw==") => {
                Reply::ok(format!(r#"{{"schema":"{}"}}"#, "x".repeat(2 << 20)))
            }
            _ => Reply::status(401),
        }
    });
    let scopes: [(&str, &[&str]); 1] = [("all", &["dead-letters:*"])];
    let mut callers = Callers::without_dead_letters("decoded-login", &scopes).await;
    let password = callers.env.base.directory().join("password");
    std::fs::write(&password, "one\n").unwrap();
    let base = &mut callers.env.base;
    base.set("dlq_inspector.schema_registry.url", &registry.url());
    base.set("dlq_inspector.schema_registry.username", "inspector");
    base.set(
        "dlq_inspector.schema_registry.password_file",
        &password.display().to_string(),
    );
    let [orders, _] = callers.topics.clone();
    let letters = [1, 2, 3, 4].map(|schema| letter(framed(schema, b"\x02a")));
    callers.env.put(&orders, 0, letters.to_vec()).await;
    let mut inspector = callers.env.start().await;
    let mut all = callers.client(&inspector.channel().await, "all");
    until_listed(&all, "", 4).await;
    let found = decoded(&mut all, &format!("{orders}/0/0")).await.unwrap();
    assert_eq!((&*found.json, &*found.problem), ("\"a\"", ""));
    std::fs::write(&password, "two").unwrap();
    let found = decoded(&mut all, &format!("{orders}/0/1")).await.unwrap();
    assert_eq!(
        found.problem,
        "schema 2 cannot be used: it has more than 524288 bytes"
    );
    std::fs::write(&password, "three").unwrap();
    let found = decoded(&mut all, &format!("{orders}/0/2")).await.unwrap();
    assert_eq!(
        found.problem,
        "the inspector cannot use the schema registry: it answers 401 Unauthorized to the credentials"
    );
    // It is not an outage: other schemas are fetched.
    std::fs::write(&password, "one").unwrap();
    let found = decoded(&mut all, &format!("{orders}/0/3")).await.unwrap();
    assert_eq!((&*found.json, &*found.problem), ("\"a\"", ""));
}
