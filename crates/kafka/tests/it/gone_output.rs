//! A topic for results that is deleted while a lane writes into it.

use std::sync::atomic::Ordering;

use redeliver_kafka::KafkaSettings;
use redeliver_testkit::{eventually, unique};

use crate::lane::{DEADLINE, fill, start};
use crate::recreated::copied;
use crate::support::{create_topic, delete_topic, settings};

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_into_a_topic_that_is_gone_is_aborted_long_before_it_times_out() {
    let settings = KafkaSettings {
        transaction_timeout: 4 * DEADLINE,
        ..settings("gone-output")
    };
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 1).await;
    create_topic(&settings, &to, 1).await;
    let lane = start(settings.clone(), &group, &from, &to, false);
    fill(&settings, &from, 0..10).await;
    copied(&settings, &to, 10);
    delete_topic(&settings, &to);
    fill(&settings, &from, 10..20).await;
    eventually("the transaction is aborted", DEADLINE, || {
        match lane.lags.setbacks.load(Ordering::SeqCst) {
            0 => Err("no setback"),
            _ => Ok(()),
        }
    });
    create_topic(&settings, &to, 1).await;
    copied(&settings, &to, 10);
    lane.stop();
}
