//! What `RecordProducer` writes to Kafka.

use std::collections::BTreeSet;

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use redeliver_client::{Headers, Output, RecordProducer, Schema, SendError};
use redeliver_kafka::murmur2::partition_for_key;
use redeliver_testkit::LocalKafka;
use serde_json::json;
use tokio::task::JoinSet;

use crate::producer::{Ingest, PARTITIONS, SOON};

fn order(topic: &Ingest, key: &str, value: &str) -> Output {
    Output {
        topic: topic.topic.clone(),
        partition: None,
        key: Some(key.to_owned().into()),
        value: Some(value.to_owned().into()),
        headers: Headers::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn producer_writes_only_valid_records() {
    let topic = Ingest::create("client-records").await;
    let schema = json!({ "required": ["item"], "properties": { "quantity": { "maximum": 10 } } });
    let producer = RecordProducer::new(&topic.kafka).unwrap();
    let producer = producer.with_schema(Schema::new(&schema).unwrap());
    let mut registry = Registry::default();
    producer.register(&mut registry);
    let valid = r#"{"item":"book"}"#;
    for key in ["ada", "grace"] {
        let written = producer.send(&order(&topic, key, valid)).await.unwrap();
        assert_eq!(
            written.position.partition,
            partition_for_key(key.as_bytes(), PARTITIONS)
        );
    }
    for (value, problem) in [
        (
            r#"{"item":"book","quantity":11}"#,
            "/quantity is greater than the maximum of 10",
        ),
        ("{}", "\"item\" is a required property"),
        ("book", "the value is not JSON"),
    ] {
        let refused = producer.send(&order(&topic, "ada", value)).await.unwrap_err();
        assert!(matches!(refused, SendError::Invalid(_)), "{refused:?}");
        assert!(refused.to_string().contains(problem), "{refused}");
    }
    let mut missing = order(&topic, "ada", valid);
    missing.partition = Some(PARTITIONS);
    let refused = producer.send(&missing).await.unwrap_err();
    assert!(matches!(refused, SendError::Kafka(_)), "{refused:?}");

    let written = topic.records().await;
    assert!(
        written
            .iter()
            .all(|record| record.value.as_deref() == Some(valid.as_bytes()))
    );
    let totals = producer.clone().close(SOON).await.unwrap();
    let bytes = "adagrace".len() + 2 * valid.len();
    assert_eq!(
        totals.to_string(),
        format!("records={} bytes={bytes} invalid=3 failed=1", written.len())
    );
    let mut page = String::new();
    encode(&mut page, &registry).unwrap();
    for line in [
        "producer_records_total 2",
        &format!("producer_bytes_total {bytes}"),
        "producer_invalid_total 3",
        "producer_failed_total 1",
        "producer_send_seconds_count 2",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}: {page}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_broker_gets_each_record_once() {
    const RECORDS: usize = 400;
    let mut broker = LocalKafka::start().unwrap();
    let topic = Ingest::create_at(broker.brokers(), "client-killed").await;
    let producer = RecordProducer::new(&topic.kafka).unwrap();
    let mut sends = JoinSet::new();
    let send = |sends: &mut JoinSet<_>, number: usize| {
        let (producer, record) = (producer.clone(), order(&topic, "ada", &number.to_string()));
        sends.spawn(async move { producer.send(&record).await });
    };
    // One is confirmed, so that others are on their way; half of them are sent while there is no broker.
    send(&mut sends, 0);
    let first = sends.join_next().await.unwrap().unwrap();
    assert!(first.is_ok(), "{first:?}");
    (1..RECORDS / 2).for_each(|number| send(&mut sends, number));
    broker.kill_9();
    (RECORDS / 2..RECORDS).for_each(|number| send(&mut sends, number));
    broker.start_again().unwrap();
    for sent in sends.join_all().await {
        assert!(sent.is_ok(), "{sent:?}");
    }
    let written = topic.records().await;
    let values: BTreeSet<_> = written.iter().map(|record| record.value.clone()).collect();
    assert_eq!((written.len(), values.len()), (RECORDS, RECORDS));
    let totals = producer.close(SOON).await.unwrap();
    assert_eq!((totals.records, totals.failed), (RECORDS as u64, 0));
}
