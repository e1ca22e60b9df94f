//! What a lane reads of other producers' transactions.

use std::sync::atomic::Ordering;

use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use redeliver_kafka::KafkaClient;
use redeliver_testkit::unique;

use crate::copy::CopyEnv;
use crate::support::DEADLINE;

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_does_not_read_records_of_aborted_transactions() {
    let env = CopyEnv::with_one_partition("isolation").await;
    let writer = env.settings.transactional_producer(&unique("writer"));
    let writer: KafkaClient<ThreadedProducer<DefaultProducerContext>> = writer.create().unwrap();
    writer.init_transactions(DEADLINE).unwrap();
    writer.begin_transaction().unwrap();
    for value in ["1000", "1001"] {
        let record = BaseRecord::<(), str>::to(&env.from).payload(value);
        writer.send(record).map_err(|(error, _)| error).unwrap();
    }
    writer.flush(DEADLINE).unwrap();
    writer.abort_transaction(DEADLINE).unwrap();
    env.fill(0..10).await;
    let lane = env.start();
    // The lane reads in the order of the offsets, so it has passed the aborted records when the last one is copied.
    lane.observed.until_lag(0);
    let accepted = lane.accepted.load(Ordering::SeqCst);
    lane.stop();
    let counts = env.counts();
    assert!(
        counts.len() == 10 && !counts.contains_key("1000"),
        "{accepted} accepted: {counts:?}"
    );
    env.assert_no_duplicates();
    assert_eq!(accepted, 10);
}
