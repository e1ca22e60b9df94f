//! From a broker that does not answer to serving, and over its outages.

use std::sync::Arc;

use redeliver_kafka::embedded::EmbeddedBroker;
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_testkit::{LocalKafka, eventually, unique};
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::support::{DEADLINE, Setup, dead};

#[tokio::test(flavor = "multi_thread")]
async fn it_serves_once_the_index_has_caught_up_and_goes_on_over_outages() {
    let mut kafka = LocalKafka::start().unwrap();
    let mut setup = Setup::on("outage", &kafka.brokers());
    let topic = setup.topic("a", 2).await;
    let records = (0..50).map(|number| dead(&number.to_string(), "v", &[]));
    setup.put(&topic, 1, records.collect()).await;
    kafka.stop().unwrap();

    // Without creating topics there is nothing to wait for before the API is served.
    setup.set("kafka.topics.create", "false");
    let mut inspector = setup.start();
    let not_serving = [Some(ServingStatus::NotServing); 2];
    assert_eq!(inspector.health().await.map(Result::ok), not_serving);
    let mut client = inspector.client().await;
    let refused = client
        .list_dead_letters(v1::ListDeadLettersRequest::default())
        .await
        .unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused).as_deref()),
        (Code::Unavailable, Some("INDEX_CATCHING_UP"))
    );
    eventually("the admin port says what it waits for", DEADLINE, || {
        let ready = inspector.admin("/readyz");
        if ready.starts_with("HTTP/1.1 503") && ready.contains("kafka does not answer") {
            Ok(())
        } else {
            Err(ready)
        }
    });

    kafka.start_again().unwrap();
    inspector.until_serving().await;
    assert_eq!(inspector.list("").await.len(), 50);
    eventually("the admin port is ready", DEADLINE, || {
        let ready = inspector.admin("/readyz");
        if ready.starts_with("HTTP/1.1 200") {
            Ok(())
        } else {
            Err(ready)
        }
    });

    // Nobody has made the ledger, which is said and stops nothing.
    let ledger = "problem=\"does not exist\"";
    let output = inspector.process.wait_for_output(ledger, DEADLINE);
    assert!(output.contains("topic=\"redeliver.dlq.ledger\""), "{output}");

    // An outage changes nothing about what is known.
    kafka.stop().unwrap();
    assert_eq!(inspector.list("").await.len(), 50);
    kafka.start_again().unwrap();
    setup.put(&topic, 0, vec![dead("new", "v", &[])]).await;
    inspector.until_listed("key = new", 1).await;
    assert_eq!(inspector.list("").await.len(), 51);
    assert_eq!(inspector.end(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn it_works_on_the_broker_in_memory_too() {
    let topic: Arc<str> = unique("embedded-a-dlq").into();
    let broker = EmbeddedBroker::start(&[(topic.to_string(), 2)]).unwrap();
    let mut setup = Setup::on("embedded", broker.brokers());
    setup.set("kafka.topics.create", "false");
    setup.set("dlq_inspector.topics", &format!("[{topic}]"));
    setup
        .put(
            &topic,
            1,
            vec![dead("first", "v", &[("error-class", "permanent")])],
        )
        .await;
    let mut inspector = setup.serve().await;
    assert_eq!(inspector.list("error_class = permanent").await.len(), 1);
    setup.put(&topic, 0, vec![dead("second", "value", &[])]).await;
    inspector.until_listed("key = second", 1).await;
    let mut client = inspector.client().await;
    let id = format!("{topic}/0/0");
    let letter = client
        .get_dead_letter(v1::GetDeadLetterRequest { id })
        .await
        .unwrap()
        .into_inner();
    assert_eq!(letter.value.as_deref(), Some(&b"value"[..]));
    let stats = client
        .get_dead_letter_stats(v1::GetDeadLetterStatsRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!((stats.topics[0].open, stats.topics[0].until_removal), (2, None));
    assert_eq!(inspector.end(), Some(0));
}
