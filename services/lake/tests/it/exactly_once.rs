//! Each record that a read_committed consumer sees is once in its tables, whatever happens to the process.

use std::time::Duration;

use redeliver_testkit::chaos_random;

use crate::support::LakeEnv;

/// Points at which a process aborts, around each step of an append.
const POINTS: [&str; 4] = [
    "lake_before_file",
    "lake_after_file",
    "lake_before_commit",
    "lake_after_commit",
];

async fn put(env: &LakeEnv) {
    for topic in env.topics() {
        env.put(&topic, 7).await;
        env.put_and_abort(&topic, 3);
        env.put(&topic, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_at_each_step_loses_nothing() {
    let env = LakeEnv::new("lake-crash");
    env.create_topics().await;
    let mut lake = env.spawn("a");
    lake.kill_9();
    for point in POINTS {
        put(&env).await;
        // The first and a later append, of different tables.
        for count in 1..=2 {
            put(&env).await;
            let fault = format!("{point}:{count}");
            lake.start_again_with(&[("REDELIVER_FAULT", &fault)]);
            lake.until_crashed();
        }
    }
    lake.start_again();
    lake.until_ready();
    env.until_complete();
    assert_eq!(lake.crashes(), 8);
    lake.shut_down();
    let check = || env.base.run("redeliver-lake", &["check", "--against-kafka"]);
    let checked = check();
    assert_eq!(checked.code, Some(0), "{checked:?}");
    // There can be records in topics that tests share which the lake has not read yet.
    assert!(checked.stdout.contains(" with Kafka, 0 missing, "), "{checked:?}");
    let purge = ["purge", "kafka_offset=0", "kafka_partition=0"];
    let valid = env
        .base
        .run("redeliver-lake", &[&purge[..], &["--check"]].concat());
    assert_eq!(valid.stdout, "the configuration is valid\n", "{valid:?}");
    assert_eq!(check().code, Some(0), "nothing was purged");
    let purged = env.base.run("redeliver-lake", &purge);
    assert_eq!(purged.code, Some(0), "{purged:?}");
    let checked = check();
    assert_eq!(checked.code, Some(1), "{checked:?}");
    let [dead, out, tier] = env.topics();
    for (topic, table) in [
        (&dead, "dead_letters"),
        (&dead, "outcomes"),
        (&out, "outcomes"),
        (&tier, "attempts"),
    ] {
        let line = format!("{topic}/0/0 is not in {table}\n");
        assert!(checked.stdout.contains(&line), "{checked:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_processes_lose_nothing() {
    let env = LakeEnv::new("lake-kill");
    env.create_topics().await;
    let mut random = chaos_random("lake-kill");
    let mut lake = env.spawn("a");
    for _ in 0..6 {
        put(&env).await;
        redeliver_testkit::sleep_up_to(&mut random, Duration::from_millis(600));
        lake.kill_9();
        lake.start_again();
    }
    put(&env).await;
    lake.until_ready();
    env.until_complete();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_processes_append_each_row_once() {
    let env = LakeEnv::new("lake-two");
    env.create_topics().await;
    let mut lakes = ["a", "b"].map(|instance| env.spawn(instance));
    for _ in 0..5 {
        put(&env).await;
    }
    // One is frozen in the middle of whatever it does, and continues after the other one has gone on.
    lakes[0].freeze();
    put(&env).await;
    env.until_complete();
    lakes[0].thaw();
    for _ in 0..3 {
        put(&env).await;
    }
    for lake in &mut lakes {
        lake.until_ready();
    }
    env.until_complete();
    for mut lake in lakes {
        lake.shut_down();
    }
}
