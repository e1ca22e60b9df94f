use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use orders::Confirmation;
use redeliver_core::headers::{ERROR_CODE, RETRY_COUNT};
use redeliver_core::{Headers, Output, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_testkit::{EnvBuilder, eventually};
use serde_json::json;

use crate::{invalid_orders, order};

const DEADLINE: Duration = Duration::from_secs(60);

fn read(kafka: &KafkaSettings, topic: &str) -> Vec<Record> {
    let mut records = Vec::new();
    TopicReader::new(kafka, &[topic.into()])
        .unwrap()
        .read_to_end(DEADLINE, |record| records.push(record))
        .unwrap();
    records
}

#[test]
fn orders_are_confirmed_exactly_once() {
    const VALID: u64 = 50;
    let schema = concat!(env!("CARGO_MANIFEST_DIR"), "/order.schema.json");
    // The configuration as it is shipped, with other names of topics.
    let yaml = include_str!("../../orders.yaml")
        .replace("examples/orders/order.schema.json", schema)
        .replace("  orders:", "  {name}:")
        .replace("orders-confirmed", "{name}-confirmed");
    let env = EnvBuilder::new("orders").creates_topics().yaml(&yaml).build();
    let name = env.name().to_owned();
    let topics = env.run("redeliver", &["topics", "apply"]);
    assert_eq!(topics.code, Some(0), "{topics:?}");

    let kafka = KafkaSettings::new(env.brokers().to_owned(), "orders-test");
    let producer = Producer::new(&kafka).unwrap();
    let source: Arc<str> = name.as_str().into();
    let valid = (1..=VALID).map(|quantity| order(json!({ "quantity": quantity })));
    let invalid = invalid_orders();
    let unknown = order(json!({ "item": "cup" }));
    let all = valid
        .chain(invalid.iter().map(|(order, _)| order.clone()))
        .chain([unknown]);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    for order in all {
        let output = Output {
            topic: source.clone(),
            partition: None,
            key: Some("ada".into()),
            value: Some(order.to_string().into()),
            headers: Headers::new(),
        };
        runtime.block_on(producer.send(&output)).unwrap();
    }

    let mut worker = env.start("redeliver-example-orders", "a", &[]);
    let _tier = env.start("retry-tier", "a", &[]);
    let letters = invalid.len() + 1;
    let dead = eventually("the invalid orders are dead letters", DEADLINE, || {
        let dead = read(&kafka, &format!("{name}-dlq"));
        if dead.len() == letters {
            Ok(dead)
        } else {
            Err(dead.len())
        }
    });
    let mut codes: BTreeMap<String, usize> = BTreeMap::new();
    for letter in &dead {
        let code = letter.headers.last(ERROR_CODE).unwrap();
        *codes
            .entry(String::from_utf8(code.to_vec()).unwrap())
            .or_default() += 1;
    }
    let expected = [("orders.unknown-item", 1), ("schema.invalid", invalid.len())];
    assert_eq!(
        codes,
        expected.map(|(code, count)| (code.to_owned(), count)).into()
    );

    let confirmed = eventually("the valid orders are confirmed", DEADLINE, || {
        let confirmed = read(&kafka, &format!("{name}-confirmed"));
        if confirmed.len() as u64 == VALID {
            Ok(confirmed)
        } else {
            Err(confirmed.len())
        }
    });
    let totals = confirmed.iter().map(|record| {
        assert_eq!(record.headers.last(RETRY_COUNT), Some(&b"0"[..]));
        let confirmation: Confirmation = serde_json::from_slice(record.value.as_ref().unwrap()).unwrap();
        confirmation.total
    });
    // In their order, because all have the same key.
    assert_eq!(
        totals.collect::<Vec<_>>(),
        (1..=VALID).map(|n| n * 1_990).collect::<Vec<_>>()
    );
    worker.shut_down();
    let output = worker.output();
    assert_eq!(output.matches("order ada failed: ").count(), letters, "{output}");
    for code in ["schema.invalid", "orders.unknown-item"] {
        let lines = output
            .lines()
            .filter(|line| line.contains("became dead letters") && line.contains(code));
        assert_eq!(lines.count(), 1, "{output}");
    }
}

#[test]
fn configuration_problems_are_named() {
    for (setting, message) in [
        (
            "pipelines.orders.schema=/no/such.json",
            "pipelines.orders.schema: /no/such.json: ",
        ),
        ("pipelines.orders.concurrency=0", "pipelines.orders.concurrency: "),
        ("worker.pipelines=[]", "pipelines: none is served"),
    ] {
        let mut command = redeliver_testkit::binary("redeliver-example-orders");
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/orders.yaml");
        command.args(["--check", "--config", file, "--set", setting]);
        command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let output = redeliver_testkit::process::run(command);
        assert_eq!(output.code, Some(2), "{output:?}");
        assert!(output.stderr.contains(message), "{output:?}");
    }
}
