//! Topics that are deleted, created again, or truncated while a lane reads them.

use std::sync::atomic::Ordering;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::topic_partition_list::Offset;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::{IfRecreated, KafkaClient, KafkaSettings, Presence, TopicWatch, topic_watch};
use redeliver_testkit::{eventually, kafka_request, until_seen};
use tokio::task::JoinSet;

use crate::copy::{CopyEnv, CopyOptions};
use crate::support::{DEADLINE, create_topic, settings};

#[tokio::test(flavor = "multi_thread")]
async fn recreated_topic_is_read_whole() {
    let scenario = |is_static, partitions| async move {
        let settings = KafkaSettings {
            static_membership: is_static,
            ..settings("recreated")
        };
        let env = CopyEnv::new(settings, 2, 1).await;
        env.fill(0..200).await;
        let lane = env.start();
        env.until_copied(200);
        // Shorter than the old topic.
        env.recreate_source(partitions).await;
        env.fill(200..250).await;
        env.until_copied(250);
        assert!(lane.observed.recreated.load(Ordering::SeqCst) >= 2);
        // Longer than the old topic before the lane detects it.
        env.recreate_source(partitions).await;
        env.fill(250..1250).await;
        env.until_copied(1250);
        lane.stop();
        // While no lane runs.
        env.recreate_source(partitions).await;
        env.fill(1250..1300).await;
        let lane = env.start();
        env.until_copied(1300);
        lane.stop();
        env.assert_no_duplicates();
    };
    let mut running: JoinSet<()> = [scenario(true, 2), scenario(false, 3)].into_iter().collect();
    while let Some(ended) = running.join_next().await {
        ended.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_notices_recreated_topic() {
    let env = CopyEnv::with_one_partition("reader").await;
    env.fill(0..20).await;
    let topic = &*env.from;
    let mut reader = TopicReader::new(&env.settings, &[topic.into()]).unwrap();
    let id = reader.topics().id(topic).unwrap();
    reader.expect_id(topic, id);
    reader.read_to_end(DEADLINE, |_| ()).unwrap();
    // Longer than the old topic, so that reading goes on.
    env.recreate_source(1).await;
    env.fill(20..80).await;
    let read = reader.read_to_end(DEADLINE, |_| ());
    assert!(matches!(read, Err(ReadError::Recreated(_))), "{read:?}");
}

/// Waits until all topic watches must have detected that the topic is missing.
fn until_missing(settings: &KafkaSettings, topic: &str) {
    let watch = TopicWatch::start(settings).unwrap();
    eventually("the topic is missing", DEADLINE, || match watch.presence(topic) {
        Presence::Missing { lasting } if lasting > 2 * topic_watch::INTERVAL => Ok(()),
        _ => Err(format!("{:?}", watch.state(topic))),
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn returning_topic_is_read_whole() {
    let settings = KafkaSettings {
        static_membership: true,
        ..settings("away")
    };
    let env = CopyEnv::new(settings, 2, 1).await;
    env.fill(0..100).await;
    let lane = env.start();
    env.until_copied(100);
    kafka_request::delete_topic(&env.settings.brokers, &env.from);
    until_missing(&env.settings, &env.from);
    create_topic(&env.settings, &env.from, 2).await;
    // Each new topic is longer than the previous one.
    env.fill(100..600).await;
    env.until_copied(600);
    lane.stop();
    // A static member is assigned partitions of the deleted topic.
    kafka_request::delete_topic(&env.settings.brokers, &env.from);
    let lane = env.start();
    until_missing(&env.settings, &env.from);
    create_topic(&env.settings, &env.from, 2).await;
    env.fill(600..2_000).await;
    env.until_copied(2_000);
    lane.stop();
    env.assert_no_duplicates();
}

/// Commits an offset without a topic fingerprint, as if the completed set needed its space.
fn commit_without_fingerprint(env: &CopyEnv, offset: i64) {
    let mut config = env.settings.client();
    let consumer: KafkaClient<BaseConsumer> = config.set("group.id", &env.group).create().unwrap();
    let mut offsets = TopicPartitionList::new();
    offsets
        .add_partition_offset(&env.from, 0, Offset::Offset(offset))
        .unwrap();
    consumer.commit(&offsets, CommitMode::Sync).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn commit_without_fingerprint_hides_nothing() {
    let env = CopyEnv::with_one_partition("unnamed").await;
    env.fill(0..200).await;
    commit_without_fingerprint(&env, 200);
    // Shorter than the old topic, while no lane runs.
    env.recreate_source(1).await;
    env.fill(200..250).await;
    let lane = env.start();
    env.until_copied(50);
    lane.stop();
    // Longer, while a lane runs that has not committed anything yet.
    commit_without_fingerprint(&env, 50);
    let lane = env.start();
    let state = || (lane.observed.waiting(), lane.observed.partitions());
    until_seen("the lane is ready", state, |state| *state == (None, 1));
    env.recreate_source(1).await;
    env.fill(250..550).await;
    env.until_copied(350);
    lane.stop();
    env.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_old_topic_are_dropped() {
    let env = CopyEnv::with_one_partition("in-flight").await;
    env.fill(0..20).await;
    let lane = env.start_holding_odd();
    env.until_copied(10);
    env.recreate_source(1).await;
    let dropped = || lane.observed.dropped.load(Ordering::SeqCst);
    until_seen("the dropped records are counted", dropped, |&count| count == 10);
    env.fill(100..120).await;
    env.until_copied(20);
    lane.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn halted_lane_reports_the_remedy() {
    let env = CopyEnv::with_one_partition("halts").await;
    env.fill(0..20).await;
    let lane = env.start_with(CopyOptions {
        if_recreated: IfRecreated::Halt,
        ..CopyOptions::default()
    });
    env.until_copied(20);
    env.recreate_source(1).await;
    env.fill(20..30).await;
    eventually("the lane halts", DEADLINE, || match lane.observed.waiting() {
        Some(reason) if reason.contains("--delete-offsets") && reason.contains(&env.from) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_eq!(env.counts().len(), 20);
    lane.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn records_deleted_unread_are_counted() {
    let env = CopyEnv::with_one_partition("deleted").await;
    env.fill(0..100).await;
    let lane = env.start();
    env.until_copied(100);
    lane.stop();
    env.fill(100..200).await;
    kafka_request::delete_records(&env.settings.brokers, &env.from, 0, 150);
    let lane = env.start();
    env.until_copied(150);
    assert_eq!(lane.observed.deleted_unread.load(Ordering::SeqCst), 50);
    env.fill(200..210).await;
    env.until_copied(160);
    lane.stop();
    env.assert_no_duplicates();
}
