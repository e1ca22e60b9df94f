//! Consumer groups are listed, and their offsets are copied with their metadata.

use std::sync::Arc;

use redeliver_kafka::groups::{self, CommittedOffset, GroupOffsets};
use redeliver_kafka::tracker::METADATA_LIMIT;
use redeliver_testkit::{unique, until_seen};

use crate::copy::{CopyLane, CopyOptions};
use crate::support::{DEADLINE, create_topic, settings};

fn offsets(topic: &str, list: &[(i32, i64, &str)]) -> GroupOffsets {
    let list = list.iter().map(|(partition, offset, metadata)| {
        let committed = CommittedOffset::new(*offset, *metadata);
        ((topic.to_owned(), *partition), committed)
    });
    list.collect()
}

#[tokio::test]
async fn offsets_are_copied_with_their_metadata() {
    let settings = settings("groups");
    let (topic, from, to) = (unique("groups"), unique("from"), unique("to"));
    create_topic(&settings, &topic, 4).await;
    let topics: Vec<Arc<str>> = vec![topic.as_str().into()];
    let longest = "x".repeat(METADATA_LIMIT);
    // Nothing is committed in partition 3.
    let committed = offsets(&topic, &[(0, 0, ""), (1, 7, "r1:AQE"), (2, i64::MAX, &longest)]);
    assert!(groups::offsets(&settings, &from, &topics).unwrap().is_empty());
    groups::commit(&settings, &from, &committed).unwrap();
    let read = groups::offsets(&settings, &from, &topics).unwrap();
    assert_eq!(read, committed);
    groups::commit(&settings, &to, &read).unwrap();
    assert_eq!(groups::offsets(&settings, &to, &topics).unwrap(), committed);
    assert_eq!(groups::offsets(&settings, &from, &topics).unwrap(), committed);
}

#[tokio::test]
async fn active_group_refuses_offsets() {
    let settings = settings("groups-live");
    let (topic, to, group) = (unique("groups-live"), unique("to"), unique("group"));
    create_topic(&settings, &topic, 1).await;
    create_topic(&settings, &to, 1).await;
    let is_empty = || {
        let list = groups::list(&settings, DEADLINE).unwrap();
        assert_eq!(list.error, None);
        let mut groups = list.groups.into_iter();
        let group = groups.find(|listed| listed.name == group);
        group.map(|group| group.is_empty)
    };
    let wait_for = |expected| {
        until_seen("is empty", &is_empty, |found| *found == expected);
    };
    assert_eq!(is_empty(), None);
    let lane = CopyLane::start(&settings, &group, &[&topic], &to, CopyOptions::default());
    wait_for(Some(false));
    let committed = offsets(&topic, &[(0, 7, "")]);
    let refused = groups::commit(&settings, &group, &committed);
    assert!(refused.is_err(), "{refused:?}");
    lane.stop();
    wait_for(Some(true));
    let topics: Vec<Arc<str>> = vec![topic.as_str().into()];
    assert!(groups::offsets(&settings, &group, &topics).unwrap().is_empty());
    groups::commit(&settings, &group, &committed).unwrap();
    assert_eq!(groups::offsets(&settings, &group, &topics).unwrap(), committed);
}
