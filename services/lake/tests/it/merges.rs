//! Merges that are interrupted, and that two processes do at the same time.

use redeliver_testkit::{DEADLINE, Process, run};

use crate::support::LakeEnv;

/// More than so many small files of the current day are merged.
const FILES: usize = 61;

#[tokio::test(flavor = "multi_thread")]
async fn interrupted_merges_change_no_rows() {
    let env = LakeEnv::new("lake-merge");
    env.create_topics().await;
    let mut lake = env.spawn("a");
    lake.until_ready();
    let [dead, _, tier] = env.topics();
    for (table, topic) in [("attempts", &tier), ("outcomes", &dead), ("dead_letters", &dead)] {
        env.put_files(table, topic, FILES).await;
    }
    let maintain = || env.base.command("redeliver-lake", &["maintain"]);
    // Before and after the files of `attempts` are replaced. The service goes on.
    for point in ["lake_before_replace:1", "lake_after_replace:1"] {
        let mut command = maintain();
        command.env("REDELIVER_FAULT", point);
        let crashed = run(command);
        assert_eq!(crashed.code, None, "{crashed:?}");
        env.put(&tier, 4).await;
        env.until_complete();
    }
    // Those of the other tables.
    let mut both = [maintain(), maintain()].map(|command| Process::spawn(command).unwrap());
    env.put(&dead, 4).await;
    for process in &mut both {
        let status = process.wait(DEADLINE);
        assert!(status.success(), "{}", process.output());
    }
    env.until_complete();
    for table in ["attempts", "outcomes", "dead_letters"] {
        let [files, merged, ..] = env.maintain(table)[..] else {
            panic!("nothing about {table}");
        };
        assert!(
            files < FILES && merged == 0,
            "{table}: {files} files, {merged} merged"
        );
    }
    lake.shut_down();
    let checked = env.base.run("redeliver-lake", &["check", "--against-kafka"]);
    assert_eq!(checked.code, Some(0), "{checked:?}");
    assert!(checked.stdout.contains(" with Kafka, 0 missing, "), "{checked:?}");
}
