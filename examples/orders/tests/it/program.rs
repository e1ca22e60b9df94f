use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use orders::{Confirmation, EXPRESS};
use redeliver_core::headers::{ERROR_CODE, PIPELINE, RETRY_COUNT};
use redeliver_core::{Headers, Output, Record};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_kafka::reader::TopicReader;
use redeliver_testkit::languages::{python, run};
use redeliver_testkit::{EnvBuilder, TestEnv, ensure, eventually};
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

/// The configuration as it is shipped, with other names of topics, which exist.
fn env(name: &str) -> TestEnv {
    let schema = concat!(env!("CARGO_MANIFEST_DIR"), "/order.schema.json");
    let yaml = include_str!("../../orders.yaml")
        .replace("examples/orders/order.schema.json", schema)
        .replace("  orders:", "  {name}:")
        .replace("orders-confirmed", "{name}-confirmed");
    let env = EnvBuilder::new(name).creates_topics().yaml(&yaml).build();
    let topics = env.run("redeliver", &["topics", "apply"]);
    assert_eq!(topics.code, Some(0), "{topics:?}");
    env
}

/// Waits until a topic has this many records of a pipeline.
#[track_caller]
fn read_all(kafka: &KafkaSettings, topic: &str, pipeline: &str, count: usize) -> Vec<Record> {
    eventually(topic, DEADLINE, || {
        let mut records = read(kafka, topic);
        records.retain(|record| record.headers.last(PIPELINE) == Some(pipeline.as_bytes()));
        ensure(records.len() == count, records.len()).map(|()| records)
    })
}

/// How many dead letters have each error code.
fn codes(dead: &[Record]) -> BTreeMap<String, usize> {
    let mut codes = BTreeMap::new();
    for letter in dead {
        let code = String::from_utf8(letter.headers.last(ERROR_CODE).unwrap().to_vec()).unwrap();
        *codes.entry(code).or_default() += 1;
    }
    codes
}

#[test]
fn orders_are_confirmed_exactly_once() {
    const VALID: usize = 50;
    let env = env("orders");
    let name = env.name().to_owned();
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
    let dead = codes(&read_all(&kafka, &format!("{name}-dlq"), &name, letters));
    let expected = [("orders.unknown-item", 1), ("schema.invalid", invalid.len())];
    assert_eq!(
        dead,
        expected.map(|(code, count)| (code.to_owned(), count)).into()
    );

    let confirmed = read_all(&kafka, &format!("{name}-confirmed"), &name, VALID);
    let totals = confirmed.iter().map(|record| {
        assert_eq!(record.headers.last(RETRY_COUNT), Some(&b"0"[..]));
        let confirmation: Confirmation = serde_json::from_slice(record.value.as_ref().unwrap()).unwrap();
        confirmation.total
    });
    // In their order, because all have the same key.
    assert_eq!(
        totals.collect::<Vec<_>>(),
        (1..=50).map(|n| n * 1_990).collect::<Vec<_>>()
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
fn produced_orders_end_as_documented() {
    let env = env("orders-produced");
    let name = env.name().to_owned();
    let kafka = KafkaSettings::new(env.brokers().to_owned(), "orders-produced-test");
    let example = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut program = Command::new(python(&example.join("requirements.txt")).unwrap());
    program
        .arg(example.join("produce.py"))
        .args([env.brokers(), &name, "40"]);
    let printed = run(program.env("PYTHONDONTWRITEBYTECODE", "1")).unwrap();
    assert_eq!(printed.trim_end(), "wrote 40 valid orders and 8 others");
    let _worker = env.start("redeliver-example-orders", "a", &[]);
    let dead = codes(&read_all(&kafka, &format!("{name}-dlq"), &name, 8));
    let expected = [
        ("orders.price-changed", 1),
        ("orders.unknown-item", 1),
        ("schema.invalid", 6),
    ];
    assert_eq!(
        dead,
        expected.map(|(code, count)| (code.to_owned(), count)).into()
    );
    eventually("the valid orders are confirmed", DEADLINE, || {
        let mut confirmed = read(&kafka, &format!("{name}-confirmed"));
        confirmed.extend(read(&kafka, EXPRESS));
        confirmed.retain(|record| record.headers.last(PIPELINE) == Some(name.as_bytes()));
        ensure(confirmed.len() == 40, confirmed.len())
    });
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
