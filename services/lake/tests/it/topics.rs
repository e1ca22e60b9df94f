//! Topics that change while they are read.

use std::sync::Arc;

use redeliver_testkit::kafka_request::{create_partitions, delete_records, delete_topic};
use redeliver_testkit::{DEADLINE, acls, eventually};

use crate::support::LakeEnv;

#[tokio::test(flavor = "multi_thread")]
async fn topics_appear_and_grow() {
    let env = LakeEnv::new("lake-grow");
    let mut lake = env.spawn("a");
    lake.until_ready();
    env.create_topics().await;
    let [dead, _, _] = env.topics();
    env.put(&dead, 5).await;
    create_partitions(env.base.brokers(), &dead, 3);
    env.put(&dead, 5).await;
    env.until_complete();
    assert!(env.gaps().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_records_are_in_gaps() {
    let env = LakeEnv::new("lake-gap");
    env.create_topics().await;
    let [dead, _, _] = env.topics();
    env.put(&dead, 8).await;
    let mut lake = env.spawn("a");
    lake.until_ready();
    env.until_complete();
    lake.kill_9();
    env.put(&dead, 8).await;
    // 4 of each partition are in the tables. Of the next ones, two in partition 0 are deleted.
    delete_records(env.base.brokers(), &dead, 0, 6);
    lake.start_again();
    let expected = ["dead_letters", "outcomes"].map(|table| ((table.to_owned(), "expired".to_owned()), 2));
    eventually("the missing records are in gaps", DEADLINE, || {
        let gaps = env.gaps();
        if gaps == expected.clone().into() {
            Ok(())
        } else {
            Err(format!("{gaps:?}"))
        }
    });
    env.until_rows("dead_letters", &dead, 14);
}

/// All of them move in a commit, before and after which the process aborts.
#[tokio::test(flavor = "multi_thread")]
async fn hundred_topics_share_commits() {
    let mut env = LakeEnv::new("lake-hundred");
    let name = env.base.name().to_owned();
    env.base.set("lake.flush_interval", "3s");
    env.base
        .set("dlq_inspector.topics", &format!("[\"{name}-*-dlq\"]"));
    let topics: Vec<Arc<str>> = (0..100)
        .map(|number| format!("{name}-{number}-dlq").into())
        .collect();
    env.create(&topics).await;
    for topic in &topics {
        env.put(topic, 4).await;
    }
    let mut lake = env.spawn("a");
    lake.kill_9();
    for point in ["lake_before_commit:1", "lake_after_commit:1"] {
        lake.start_again_with(&[("REDELIVER_FAULT", point)]);
        lake.until_crashed();
    }
    lake.start_again();
    let expected = env.records(&topics);
    let found = eventually("all rows are in the table", DEADLINE, || {
        let found = env.keys("dead_letters", &topics);
        match found.len() >= expected.len() {
            true => Ok(found),
            false => Err(format!("{} of {} rows", found.len(), expected.len())),
        }
    });
    assert_eq!(found, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn recreated_topic_is_another_one() {
    let env = LakeEnv::new("lake-again");
    env.create_topics().await;
    let [dead, _, _] = env.topics();
    env.put(&dead, 8).await;
    let mut lake = env.spawn("a");
    lake.until_ready();
    env.until_complete();
    delete_topic(env.base.brokers(), &dead);
    env.create_topic(&dead).await;
    env.put(&dead, 10).await;
    // The positions of the earlier topic do not count, also where they are within the new one.
    eventually("the rows of both topics are in the table", DEADLINE, || match env
        .keys("dead_letters", std::slice::from_ref(&dead))
        .len()
    {
        18 => Ok(()),
        count => Err(format!("{count}: {}", lake.output())),
    });
    let mut keys = env.keys("dead_letters", std::slice::from_ref(&dead));
    keys.dedup();
    assert_eq!(keys.len(), 10);
}

/// A topic that must not be seen, and of which rows are in memory, is not taken for a deleted one, and does not stop other tables.
#[tokio::test(flavor = "multi_thread")]
async fn hidden_topic_stops_no_other_table() {
    let kafka = acls::start().unwrap();
    let mut env = LakeEnv::at(&kafka.brokers(), "lake-hidden");
    env.base.set("lake.flush_interval", "5s");
    env.create_topics().await;
    let [dead, out, _] = env.topics();
    let mut lake = env.spawn("a");
    lake.until_ready();
    env.put(&out, 4).await;
    eventually("its records are in memory", DEADLINE, || {
        match lake.metric("redeliver_lake_buffered_bytes") {
            0 => Err("nothing"),
            _ => Ok(()),
        }
    });
    acls::hide(env.base.brokers(), &out).unwrap();
    env.put(&dead, 4).await;
    // It comes after `outcomes`, which has records of both topics.
    eventually("the other table is complete", DEADLINE, || {
        match env.keys("dead_letters", std::slice::from_ref(&dead)).len() {
            4 => Ok(()),
            count => Err(format!("{count}: {}", lake.output())),
        }
    });
    lake.until_not_ready(&out);
    acls::show(env.base.brokers(), &out).unwrap();
    env.until_complete();
    lake.until_ready();
    assert!(env.gaps().is_empty());
}
