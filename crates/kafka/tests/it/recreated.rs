//! Topics that are deleted, created again, or cut short while a lane reads them.

use std::sync::atomic::Ordering;

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::topic_partition_list::Offset;
use redeliver_kafka::{IfRecreated, KafkaSettings, TopicState, TopicWatch, Waker, topic_watch};
use redeliver_testkit::{eventually, kafka_request, unique};

use crate::lane::{DEADLINE, counts, fill, start, start_with};
use crate::support::{create_topic, delete_topic, settings};

async fn recreate(settings: &KafkaSettings, topic: &str, partitions: i32) {
    delete_topic(settings, topic);
    create_topic(settings, topic, partitions).await;
}

#[track_caller]
pub(crate) fn copied(settings: &KafkaSettings, to: &str, count: usize) {
    eventually("all are copied", DEADLINE, || {
        let copied = counts(settings, to).len();
        if copied == count {
            Ok(())
        } else {
            Err(format!("{copied} of {count}"))
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_created_again_is_read_from_its_beginning() {
    for (is_static, partitions) in [(true, 2), (false, 3)] {
        let settings = KafkaSettings {
            static_membership: is_static,
            ..settings("recreated")
        };
        let (from, to, group) = (unique("from"), unique("to"), unique("group"));
        create_topic(&settings, &from, 2).await;
        create_topic(&settings, &to, 1).await;
        fill(&settings, &from, 0..200).await;
        let lane = start(settings.clone(), &group, &from, &to, false);
        copied(&settings, &to, 200);
        // Shorter than the old one.
        recreate(&settings, &from, partitions).await;
        fill(&settings, &from, 200..250).await;
        copied(&settings, &to, 250);
        assert!(lane.lags.recreated.load(Ordering::SeqCst) >= 2);
        // Longer than the old one, before the lane looks.
        recreate(&settings, &from, partitions).await;
        fill(&settings, &from, 250..1250).await;
        copied(&settings, &to, 1250);
        lane.stop();
        // While nobody reads.
        recreate(&settings, &from, partitions).await;
        fill(&settings, &from, 1250..1300).await;
        let lane = start(settings.clone(), &group, &from, &to, false);
        copied(&settings, &to, 1300);
        lane.stop();
        let counts = counts(&settings, &to);
        let twice: Vec<_> = counts.iter().filter(|(_, count)| **count != 1).collect();
        assert!(twice.is_empty(), "{twice:?}");
    }
}

/// Waits until every watch is certain that a topic does not exist.
fn until_missing(settings: &KafkaSettings, topic: &str) {
    let watch = TopicWatch::start(settings).unwrap();
    eventually("the topic is missing", DEADLINE, || {
        match watch.missing_for(topic) {
            Some(lasting) if lasting > 2 * topic_watch::INTERVAL => Ok(()),
            _ => Err(format!("{:?}", watch.state(topic))),
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_was_missing_for_a_while_is_read_from_its_beginning_too() {
    let settings = KafkaSettings {
        static_membership: true,
        ..settings("away")
    };
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 2).await;
    create_topic(&settings, &to, 1).await;
    fill(&settings, &from, 0..100).await;
    let lane = start(settings.clone(), &group, &from, &to, false);
    copied(&settings, &to, 100);
    delete_topic(&settings, &from);
    until_missing(&settings, &from);
    create_topic(&settings, &from, 2).await;
    // Longer than the old one each time.
    fill(&settings, &from, 100..600).await;
    copied(&settings, &to, 600);
    lane.stop();
    // A static member is given partitions of a topic that does not exist any more.
    delete_topic(&settings, &from);
    let lane = start(settings.clone(), &group, &from, &to, false);
    until_missing(&settings, &from);
    create_topic(&settings, &from, 2).await;
    fill(&settings, &from, 600..2_000).await;
    copied(&settings, &to, 2_000);
    lane.stop();
    let counts = counts(&settings, &to);
    let twice: Vec<_> = counts.iter().filter(|(_, count)| **count != 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
}

/// Commits as versions did that named no topic in a commit.
fn commit_unnamed(settings: &KafkaSettings, group: &str, topic: &str, offset: i64) {
    let mut config = settings.client();
    let consumer: BaseConsumer = config.set("group.id", group).create().unwrap();
    let mut offsets = TopicPartitionList::new();
    offsets
        .add_partition_offset(topic, 0, Offset::Offset(offset))
        .unwrap();
    consumer.commit(&offsets, CommitMode::Sync).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_does_not_name_its_topic_hides_nothing_of_a_new_one() {
    let settings = settings("unnamed");
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 1).await;
    create_topic(&settings, &to, 1).await;
    fill(&settings, &from, 0..200).await;
    commit_unnamed(&settings, &group, &from, 200);
    // Shorter than the old one, while nobody reads.
    recreate(&settings, &from, 1).await;
    fill(&settings, &from, 200..250).await;
    let lane = start(settings.clone(), &group, &from, &to, false);
    copied(&settings, &to, 50);
    lane.stop();
    // Longer, while a lane reads that has committed nothing yet.
    commit_unnamed(&settings, &group, &from, 50);
    let lane = start(settings.clone(), &group, &from, &to, false);
    eventually("it is ready", DEADLINE, || match lane.lags.waiting() {
        None if lane.lags.partitions() == 1 => Ok(()),
        other => Err(format!("{other:?}")),
    });
    recreate(&settings, &from, 1).await;
    fill(&settings, &from, 250..550).await;
    copied(&settings, &to, 350);
    lane.stop();
    assert!(counts(&settings, &to).values().all(|count| *count == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_hand_of_the_old_topic_is_dropped_and_counted() {
    let settings = settings("in-hand");
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 1).await;
    create_topic(&settings, &to, 1).await;
    fill(&settings, &from, 0..20).await;
    // It keeps the ten odd ones.
    let lane = start(settings.clone(), &group, &from, &to, true);
    copied(&settings, &to, 10);
    recreate(&settings, &from, 1).await;
    eventually("the drop is counted", DEADLINE, || {
        match lane.lags.dropped.load(Ordering::SeqCst) {
            10 => Ok(()),
            dropped => Err(format!("{dropped} of 10")),
        }
    });
    fill(&settings, &from, 100..120).await;
    copied(&settings, &to, 20);
    lane.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lane_whose_offsets_have_a_meaning_halts_and_says_what_to_do() {
    let settings = settings("halts");
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 1).await;
    create_topic(&settings, &to, 1).await;
    fill(&settings, &from, 0..20).await;
    let lane = start_with(settings.clone(), &group, &[&from], &to, false, IfRecreated::Halt);
    copied(&settings, &to, 20);
    recreate(&settings, &from, 1).await;
    fill(&settings, &from, 20..30).await;
    eventually("it halts", DEADLINE, || match lane.lags.waiting() {
        Some(reason) if reason.contains("--delete-offsets") && reason.contains(&from) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_eq!(counts(&settings, &to).len(), 20);
    lane.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_are_deleted_before_they_are_read_are_counted_and_the_rest_is_read() {
    let settings = settings("deleted");
    let (from, to, group) = (unique("from"), unique("to"), unique("group"));
    create_topic(&settings, &from, 1).await;
    create_topic(&settings, &to, 1).await;
    fill(&settings, &from, 0..100).await;
    let lane = start(settings.clone(), &group, &from, &to, false);
    copied(&settings, &to, 100);
    lane.stop();
    fill(&settings, &from, 100..200).await;
    kafka_request::delete_records(&settings.brokers, &from, 0, 150);
    let lane = start(settings.clone(), &group, &from, &to, false);
    copied(&settings, &to, 150);
    assert_eq!(lane.lags.deleted_unread.load(Ordering::SeqCst), 50);
    fill(&settings, &from, 200..210).await;
    copied(&settings, &to, 160);
    lane.stop();
    assert!(counts(&settings, &to).values().all(|count| *count == 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_watch_tells_topics_that_exist_from_those_that_do_not() {
    let settings = settings("watch");
    let (one, none) = (unique("one"), unique("none"));
    create_topic(&settings, &one, 3).await;
    let watch = TopicWatch::start(&settings).unwrap();
    watch.watch([one.as_str().into(), none.as_str().into()], &Waker::new());
    let state_is = |topic: &str, what: &str, is_it: &dyn Fn(TopicState) -> bool| {
        eventually(what, DEADLINE, || match watch.state(topic) {
            state if is_it(state) => Ok(state),
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
    let before = state_is(&one, "it exists", &exists);
    state_is(&none, "it is missing", &|state| state.is_missing());
    delete_topic(&settings, &one);
    state_is(&one, "it is missing", &|state| state.is_missing());
    // Asking did not create it.
    state_is(&none, "it is still missing", &|state| state.is_missing());
    create_topic(&settings, &one, 3).await;
    assert_ne!(state_is(&one, "it exists again", &exists), before);
}
