//! The lane on a real Kafka.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use rdkafka::topic_partition_list::Offset;
use redeliver_kafka::KafkaClient;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::groups;
use redeliver_kafka::reader::TopicReader;
use redeliver_testkit::kafka_request::delete_topic;
use redeliver_testkit::{unique, until_seen};

use crate::copy::{CopyEnv, CopyLane, CopyOptions};
use crate::support::{DEADLINE, create_topic, settings};

#[tokio::test(flavor = "multi_thread")]
async fn restart_processes_only_incomplete_records() {
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
async fn rebalances_copy_records_once() {
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
    let offsets = groups::offsets(&env.settings, &env.group, &[env.from.as_str().into()]).unwrap();
    let committed: i64 = offsets.values().map(|committed| committed.offset).sum();
    assert_eq!(committed, 8000);
}

#[tokio::test(flavor = "multi_thread")]
async fn open_transactions_are_resolved_first() {
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
async fn markers_are_no_lag() {
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
async fn unstable_partition_delays_no_others() {
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

#[tokio::test(flavor = "multi_thread")]
async fn aborted_records_are_not_read() {
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

#[tokio::test(flavor = "multi_thread")]
async fn deleted_output_aborts_the_transaction() {
    let settings = KafkaSettings {
        // Longer than any wait below; brokers permit 15 minutes.
        transaction_timeout: 2 * DEADLINE + Duration::from_secs(60),
        ..settings("gone-output")
    };
    let env = CopyEnv::new(settings, 1, 1).await;
    let lane = env.start();
    env.fill(0..10).await;
    env.until_copied(10);
    delete_topic(&env.settings.brokers, &env.to);
    env.fill(10..20).await;
    let failed = || lane.observed.failed_transactions.load(Ordering::SeqCst);
    until_seen("the transaction is aborted", failed, |&count| count > 0);
    create_topic(&env.settings, &env.to, 1).await;
    env.until_copied(10);
    lane.stop();
}
