//! Topics that change while they are read.

use std::sync::Arc;

use redeliver_core::headers::PROCESS_AFTER;
use redeliver_core::{Headers, Output};
use redeliver_testkit::kafka_request::{configure_topic, create_partitions, delete_records, delete_topic};
use redeliver_testkit::{DEADLINE, acls, ensure, eventually};

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
        ensure(gaps == expected.clone().into(), format!("{gaps:?}"))
    });
    env.until_rows("dead_letters", &dead, 14);
    let checked = env.base.run("redeliver-lake", &["check"]);
    assert_eq!(checked.code, Some(0), "{checked:?}");
    for table in ["dead_letters", "outcomes"] {
        let line = format!("\n  {table} lacks {dead}/0 from 4 until before 6: expired, noticed at 20");
        assert!(checked.stdout.contains(&line), "{checked:?}");
    }
}

/// Whatever Kafka accepts becomes a row, and what comes after it, too.
#[tokio::test(flavor = "multi_thread")]
async fn unfit_values_are_null_with_reasons() {
    let env = LakeEnv::new("lake-unfit");
    env.create_topics().await;
    let [_, _, tier] = env.topics();
    configure_topic(env.base.brokers(), &tier, &[("max.message.bytes", "8000000")]);
    let state = format!("{}-state", env.base.name()).into();
    env.create_topic(&state).await;
    let mut headers = Headers::new();
    headers.push_text("tenant", &"x".repeat(4 << 20));
    headers.push_text(PROCESS_AFTER, "292278994-08-17T07:12:55Z");
    let wild = Output {
        topic: tier.clone(),
        partition: Some(0),
        key: None,
        value: None,
        headers,
    };
    env.producer.send(&wild).await.unwrap();
    env.put(&tier, 4).await;
    env.put_job(&state, i64::MAX, 3_600_000).await;
    let mut lake = env.spawn("a");
    lake.until_ready();
    env.until_complete();
    env.until_rows("jobs", &state, 1);
    assert_eq!(
        env.unfit("attempts"),
        ["process_after: invalid; headers: too long"]
    );
    assert_eq!(env.unfit("jobs"), ["due_at: out of range"]);
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
        let holds = found.len() >= expected.len();
        ensure(holds, format!("{} of {} rows", found.len(), expected.len())).map(|()| found)
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
    env.until_rows("dead_letters", &dead, 18);
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
    lake.until_metric("redeliver_lake_buffered_bytes", |bytes| bytes > 0);
    acls::hide(env.base.brokers(), &out).unwrap();
    env.put(&dead, 4).await;
    // It comes after `outcomes`, which has records of both topics.
    env.until_rows("dead_letters", &dead, 4);
    lake.until_not_ready(&out);
    acls::show(env.base.brokers(), &out).unwrap();
    env.until_complete();
    lake.until_ready();
    assert!(env.gaps().is_empty());
}
