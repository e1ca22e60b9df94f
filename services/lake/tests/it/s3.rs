//! Tables in an object store that fails.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use redeliver_testkit::languages::python;
use redeliver_testkit::{DEADLINE, Process, ServiceProcess, chaos_random, ensure, eventually, sleep_up_to};

use crate::support::{LakeEnv, numbers};

/// Starts a store with these arguments, see `store.py`, and returns its address.
fn store(arguments: &[&str]) -> (Process, String) {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/s3");
    let mut command = Command::new(python(&files.join("requirements.txt")).unwrap());
    command.arg(files.join("store.py")).args(arguments);
    let mut store = Process::spawn(command).unwrap();
    let output = store.wait_for_output("endpoint http://", DEADLINE);
    let (_, endpoint) = output.rsplit_once("endpoint ").unwrap();
    (store, endpoint.lines().next().unwrap().to_owned())
}

impl LakeEnv {
    fn with_store(&self, endpoint: &str, arguments: &[&str]) -> Command {
        let mut command = self.base.command("redeliver-lake", arguments);
        command
            .env("AWS_ENDPOINT", endpoint)
            .env("AWS_ALLOW_HTTP", "true")
            .env("AWS_REGION", "us-east-1")
            .env("AWS_ACCESS_KEY_ID", "a")
            .env("AWS_SECRET_ACCESS_KEY", "b");
        command
    }
}

/// Two writers could replace each other's commits there.
#[tokio::test(flavor = "multi_thread")]
async fn store_without_conditions_is_refused() {
    let (_store, endpoint) = store(&["0", "replaces_any"]);
    let mut env = LakeEnv::new("lake-s3-refused");
    env.base.set("lake.location", "s3://lake/refused");
    let mut lake = Process::spawn(env.with_store(&endpoint, &[])).unwrap();
    let status = lake.wait(DEADLINE);
    let output = lake.output();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains("ignores If-None-Match"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_store_loses_and_duplicates_nothing() {
    let (_store, endpoint) = store(&["0.5"]);
    let mut env = LakeEnv::new("lake-s3");
    env.base
        .set("lake.location", &format!("s3://lake/{}", env.base.name()));
    env.create_topics().await;
    let mut lakes = ["a", "b"].map(|instance| {
        let (base, endpoint) = (env.clone(), endpoint.clone());
        ServiceProcess::spawn(instance, move || {
            let mut command = base.with_store(&endpoint, &[]);
            command.args(["--set", &format!("instance={instance}")]);
            command
        })
    });
    let mut random = chaos_random("lake-s3");
    for round in 0..6 {
        for topic in env.topics() {
            env.put(&topic, 7).await;
        }
        sleep_up_to(&mut random, Duration::from_millis(2_000));
        let lake = &mut lakes[round % 2];
        lake.kill_9();
        lake.start_again();
    }
    // `check` fails if a record has several rows.
    let expected = [("attempts", 42), ("outcomes", 84), ("dead_letters", 42)];
    eventually("all rows are in the tables", DEADLINE, || {
        let check = redeliver_testkit::run(env.with_store(&endpoint, &["check"]));
        let is_complete = expected
            .iter()
            .all(|(table, count)| numbers(&check, table).first() == Some(count));
        ensure(check.code == Some(0) && is_complete, format!("{check:?}"))
    });
}
