//! An output topic that is deleted while a lane writes to it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use redeliver_kafka::KafkaSettings;
use redeliver_testkit::eventually;

use crate::copy::CopyEnv;
use crate::support::{DEADLINE, create_topic, delete_topic, settings};

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_writes_to_a_deleted_topic_is_aborted_before_it_times_out() {
    let settings = KafkaSettings {
        // Longer than any wait below; brokers permit 15 minutes.
        transaction_timeout: 2 * DEADLINE + Duration::from_secs(60),
        ..settings("gone-output")
    };
    let env = CopyEnv::new(settings, 1, 1).await;
    let lane = env.start();
    env.fill(0..10).await;
    env.until_copied(10);
    delete_topic(&env.settings, &env.to);
    env.fill(10..20).await;
    eventually("the transaction is aborted", DEADLINE, || {
        match lane.observed.failed_transactions.load(Ordering::SeqCst) {
            0 => Err("no failed transaction"),
            _ => Ok(()),
        }
    });
    create_topic(&env.settings, &env.to, 1).await;
    env.until_copied(10);
    lane.stop();
}
