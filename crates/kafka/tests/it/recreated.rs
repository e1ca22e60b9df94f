//! Topics that are deleted, created again, or truncated while a lane reads them.

use std::sync::atomic::Ordering;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::topic_partition_list::Offset;
use redeliver_kafka::backlog::backlogs;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::{
    IfRecreated, KafkaClient, KafkaSettings, Presence, TopicState, TopicWatch, Waker, topic_watch,
};
use redeliver_testkit::{eventually, kafka_request, unique};

use crate::copy::{CopyEnv, CopyOptions};
use crate::support::{DEADLINE, create_topic, delete_topic, settings};

#[tokio::test(flavor = "multi_thread")]
async fn a_recreated_topic_is_read_from_its_beginning() {
    for (is_static, partitions) in [(true, 2), (false, 3)] {
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
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_records_of_a_recreated_topic_are_a_backlog_of_its_group() {
    let env = CopyEnv::with_one_partition("backlog").await;
    let backlog = || {
        let topics = [(env.group.clone(), env.from.as_str().into())];
        let backlogs = backlogs(&env.settings, &topics, DEADLINE).unwrap();
        backlogs
            .into_values()
            .next()
            .map(|backlog| (backlog.records, backlog.is_exact))
    };
    env.fill(0..100).await;
    let lane = env.start();
    env.until_copied(100);
    lane.stop();
    assert_eq!(backlog(), Some((0, true)));
    // Shorter and longer than the old topic.
    for records in [20_u32, 300] {
        env.recreate_source(1).await;
        env.fill(0..records).await;
        assert_eq!(backlog(), Some((records.into(), true)));
    }
    // The same without a fingerprint, as far as it can be known.
    commit_without_fingerprint(&env, 400);
    assert_eq!(backlog(), Some((300, true)));
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
async fn a_topic_that_was_missing_for_a_while_is_read_from_its_beginning() {
    let settings = KafkaSettings {
        static_membership: true,
        ..settings("away")
    };
    let env = CopyEnv::new(settings, 2, 1).await;
    env.fill(0..100).await;
    let lane = env.start();
    env.until_copied(100);
    delete_topic(&env.settings, &env.from);
    until_missing(&env.settings, &env.from);
    create_topic(&env.settings, &env.from, 2).await;
    // Each new topic is longer than the previous one.
    env.fill(100..600).await;
    env.until_copied(600);
    lane.stop();
    // A static member is assigned partitions of the deleted topic.
    delete_topic(&env.settings, &env.from);
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
async fn a_commit_without_a_fingerprint_hides_no_records_of_a_recreated_topic() {
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
    eventually("the lane is ready", DEADLINE, || match lane.observed.waiting() {
        None if lane.observed.partitions() == 1 => Ok(()),
        other => Err(format!("{other:?}")),
    });
    env.recreate_source(1).await;
    env.fill(250..550).await;
    env.until_copied(350);
    lane.stop();
    env.assert_no_duplicates();
}

#[tokio::test(flavor = "multi_thread")]
async fn records_in_flight_of_the_old_topic_are_dropped_and_counted() {
    let env = CopyEnv::with_one_partition("in-flight").await;
    env.fill(0..20).await;
    let lane = env.start_holding_odd();
    env.until_copied(10);
    env.recreate_source(1).await;
    eventually("the dropped records are counted", DEADLINE, || {
        match lane.observed.dropped.load(Ordering::SeqCst) {
            10 => Ok(()),
            dropped => Err(format!("{dropped} of 10")),
        }
    });
    env.fill(100..120).await;
    env.until_copied(20);
    lane.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_that_must_halt_reports_how_to_continue() {
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
async fn records_deleted_before_they_were_read_are_counted_and_later_ones_are_read() {
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

#[tokio::test(flavor = "multi_thread")]
async fn the_topic_watch_tracks_which_topics_exist() {
    let settings = settings("watch");
    let (topic, missing) = (unique("topic"), unique("missing"));
    create_topic(&settings, &topic, 3).await;
    let watch = TopicWatch::start(&settings).unwrap();
    watch.watch([topic.as_str().into(), missing.as_str().into()], &Waker::new());
    let until = |topic: &str, what: &str, is_expected: &dyn Fn(TopicState) -> bool| {
        eventually(what, DEADLINE, || match watch.state(topic) {
            state if is_expected(state) => Ok(state),
            state => Err(format!("{state:?}")),
        })
    };
    let exists = |state| {
        matches!(
            state,
            TopicState::Exists {
                id: Some(_),
                partitions: 3
            }
        )
    };
    let before = until(&topic, "the topic exists", &exists);
    until(&missing, "the other topic is missing", &|state| {
        state.is_missing()
    });
    delete_topic(&settings, &topic);
    until(&topic, "the topic is missing", &|state| state.is_missing());
    // The requests did not create it.
    until(&missing, "the other topic is still missing", &|state| {
        state.is_missing()
    });
    create_topic(&settings, &topic, 3).await;
    assert_ne!(until(&topic, "the topic exists again", &exists), before);
}
