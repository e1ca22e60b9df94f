//! The lane on a real Kafka.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use rdkafka::topic_partition_list::Offset;
use redeliver_kafka::KafkaClient;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::groups;
use redeliver_kafka::reader::TopicReader;
use redeliver_testkit::unique;

use crate::copy::{CopyEnv, CopyLane, CopyOptions};
use crate::support::{DEADLINE, settings};

#[tokio::test(flavor = "multi_thread")]
async fn each_record_is_copied_once_and_its_offset_is_committed() {
    let env = CopyEnv::new(settings("copies"), 3, 3).await;
    env.fill(0..2000).await;
    let lane = env.start();
    env.until_copied(2000);
    lane.stop();
    env.assert_no_duplicates();
    let offsets = groups::offsets(&env.settings, &env.group, &[env.from.as_str().into()]).unwrap();
    let committed: i64 = offsets.values().map(|committed| committed.offset).sum();
    assert_eq!(committed, 2000);
}

#[tokio::test(flavor = "multi_thread")]
async fn completed_records_after_an_incomplete_one_are_not_processed_again_after_a_restart() {
    let env = CopyEnv::with_one_partition("holes").await;
    env.fill(0..200).await;
    let lane = env.start_holding_odd();
    env.until_copied(100);
    lane.observed.until_lag(100);
    let observed = lane.observed.clone();
    lane.stop();
    assert_eq!(observed.lag(), None, "the lane owns no partition any more");
    let lane = env.start();
    env.until_copied(200);
    assert_eq!(
        lane.accepted.load(Ordering::SeqCst),
        100,
        "only incomplete records are processed again"
    );
    lane.observed.until_lag(0);
    lane.stop();
    env.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread")]
async fn each_record_is_copied_once_while_lanes_join_and_leave() {
    let env = CopyEnv::new(settings("admin"), 4, 4).await;
    let start = |instance: &str| {
        CopyLane::start(
            &settings(instance),
            &env.group,
            &[&env.from],
            &env.to,
            CopyOptions::default(),
        )
    };
    let first = start("a");
    env.fill(0..3000).await;
    let second = start("b");
    env.fill(3000..6000).await;
    first.stop();
    env.fill(6000..7000).await;
    let third = start("c");
    env.fill(7000..8000).await;
    env.until_copied(8000);
    second.stop();
    third.stop();
    env.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_that_a_killed_process_left_open_are_resolved_before_the_lane_reads() {
    let settings = KafkaSettings {
        // Only the successor's initialisation can end such a transaction within the time of this test.
        transaction_timeout: Duration::from_secs(600),
        ..settings("killed")
    };
    let env = CopyEnv::new(settings, 1, 1).await;
    env.fill(0..100).await;
    // A lane uses two producers alternately, and may need others.
    let left_open = ["", "-b", "-c", "-d"].map(|suffix| {
        let id = format!("redeliver-{}-copy-{}{suffix}", env.settings.instance, env.group);
        let producer: KafkaClient<BaseProducer> = env.settings.transactional_producer(&id).create().unwrap();
        producer.init_transactions(DEADLINE).unwrap();
        producer.begin_transaction().unwrap();
        let record = BaseRecord::<(), str>::to(&env.to).payload("left");
        producer.send(record).map_err(|(error, _)| error).unwrap();
        producer.flush(DEADLINE).unwrap();
        producer
    });
    let lane = env.start();
    env.until_copied(100);
    lane.stop();
    let counts = env.counts();
    assert!(counts.len() == 100 && !counts.contains_key("left"), "{counts:?}");
    env.assert_no_duplicates();
    drop(left_open);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lag_at_the_end_of_a_partition_is_zero_despite_transaction_markers() {
    let env = CopyEnv::with_one_partition("markers").await;
    let write = |values: Range<u32>| {
        let producer: KafkaClient<BaseProducer> = env
            .settings
            .transactional_producer(&unique("writer"))
            .create()
            .unwrap();
        producer.init_transactions(DEADLINE).unwrap();
        for value in values {
            producer.begin_transaction().unwrap();
            let value = value.to_string();
            let record = BaseRecord::<(), str>::to(&env.from).payload(&value);
            producer.send(record).map_err(|(error, _)| error).unwrap();
            producer.commit_transaction(DEADLINE).unwrap();
        }
    };
    write(0..10);
    let lane = env.start();
    lane.observed.until_lag(0);
    write(10..12);
    env.until_copied(12);
    lane.observed.until_lag(0);
    lane.stop();
    // The committed offset from which the next lane continues is followed by a marker.
    let lane = env.start_holding_odd();
    lane.observed.until_lag(0);
    write(13..14);
    lane.observed.until_lag(1);
    lane.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_with_an_open_transaction_does_not_hold_up_others() {
    let settings = KafkaSettings {
        // Nothing but this test ends the transaction.
        transaction_timeout: Duration::from_secs(600),
        ..settings("unstable")
    };
    let env = CopyEnv::new(settings, 2, 1).await;
    env.fill(0..200).await;
    // A member of the group that has died left the position of partition 0 in a transaction.
    let id = unique("dead");
    let producer: KafkaClient<BaseProducer> = env.settings.transactional_producer(&id).create().unwrap();
    producer.init_transactions(DEADLINE).unwrap();
    producer.begin_transaction().unwrap();
    let member: KafkaClient<BaseConsumer> = env.settings.consumer(&env.group, &id).create().unwrap();
    let mut offsets = TopicPartitionList::new();
    offsets
        .add_partition_offset(&env.from, 0, Offset::Offset(1))
        .unwrap();
    producer
        .send_offsets_to_transaction(&offsets, &member.group_metadata().unwrap(), DEADLINE)
        .unwrap();
    let lane = env.start();
    let of_partition_1 = {
        let mut values = BTreeSet::new();
        let mut reader = TopicReader::new(&env.settings, &[env.from.as_str().into()]).unwrap();
        reader
            .read_to_end(DEADLINE, |record| {
                if record.position.partition == 1 {
                    values.insert(String::from_utf8(record.value.unwrap().to_vec()).unwrap());
                }
            })
            .unwrap();
        values
    };
    env.until_copied(of_partition_1.len());
    assert!(env.counts().into_keys().eq(of_partition_1));
    let reason = lane.observed.waiting().unwrap();
    assert!(reason.contains(&format!("{}/0", env.from)), "{reason}");
    producer.abort_transaction(DEADLINE).unwrap();
    env.until_copied(200);
    lane.observed.until_lag(0);
    lane.stop();
    env.assert_no_duplicates();
}
