//! From a broker that does not answer to serving, and over its outages.

use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_testkit::{LocalKafka, eventually};
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

    // An outage changes nothing about what is known.
    kafka.stop().unwrap();
    assert_eq!(inspector.list("").await.len(), 50);
    kafka.start_again().unwrap();
    setup.put(&topic, 0, vec![dead("new", "v", &[])]).await;
    inspector.until_listed("key = new", 1).await;
    assert_eq!(inspector.list("").await.len(), 51);
    assert_eq!(inspector.end(), Some(0));
}
