//! What other programs and files of the project say about the lake: its permissions, its pod, and `redeliver dev --lake`.

use std::path::Path;
use std::process::Command;

use delta_kernel::arrow::array::RecordBatch;
use redeliver_testkit::acls::ONLY_GRANTED;
use redeliver_testkit::certificates::Authority;
use redeliver_testkit::kafka_tools::{KAFKA_ACLS, run_script};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{DEADLINE, LocalKafka, Process, binary, eventually, kube_tools, languages};
use tokio::runtime::Handle;

use crate::support::LakeEnv;

const PASSWORD: &str = "hunter2";

#[tokio::test(flavor = "multi_thread")]
async fn rendered_permissions_are_enough() {
    let authority = Authority::new().unwrap();
    let signed = authority.sign().unwrap();
    let kafka = LocalKafka::start_secured_with(&signed, "lake", PASSWORD, &ONLY_GRANTED).unwrap();
    let mut env = LakeEnv::at(&kafka.brokers(), "lake-acls");
    env.create_topics().await;
    for topic in env.topics() {
        env.put(&topic, 4).await;
    }
    let render = [
        "acls",
        "render",
        "--format",
        "script",
        "--user",
        "lake",
        "--programs",
        "lake",
    ];
    let script = env.base.run("redeliver", &render);
    assert_eq!(script.code, Some(0), "{script:?}");
    let granted = run_script(&env.base, &KAFKA_ACLS, &script.stdout);
    assert_eq!(granted.code, Some(0), "{script:?} {granted:?}");
    let ca = authority.write(env.base.directory(), "ca.crt").unwrap();
    for (name, value) in [
        ("brokers", &*kafka.secured_brokers()),
        ("properties.security.protocol", "SASL_SSL"),
        ("properties.sasl.mechanism", "SCRAM-SHA-512"),
        ("properties.sasl.username", "lake"),
        ("properties.sasl.password", PASSWORD),
        ("properties.ssl.ca.location", ca.to_str().unwrap()),
    ] {
        env.base.set(&format!("kafka.{name}"), value);
    }
    let mut lake = env.spawn("a");
    lake.until_ready();
    env.until_complete();
    let checked = env.base.run("redeliver-lake", &["check", "--against-kafka"]);
    assert_eq!(checked.code, Some(0), "{checked:?}");
    lake.shut_down();
    let log = kafka.process().output();
    let denied: Vec<&str> = log.lines().filter(|line| line.contains(" is Denied ")).collect();
    assert!(denied.is_empty(), "{denied:#?}");
}

/// As a test of the chart checks the pods of all other programs.
#[test]
fn lake_accepts_pod_of_chart() {
    let programs = [kube_tools::helm().unwrap(), kube_tools::kube_python().unwrap()];
    let folders = programs
        .iter()
        .map(|program| program.parent().unwrap().to_owned());
    let path = std::env::var_os("PATH").unwrap();
    let path = std::env::join_paths(folders.chain(std::env::split_paths(&path))).unwrap();
    let lake = binary("redeliver-lake");
    let lake = Path::new(lake.get_program());
    let mut check = Command::new("bash");
    check
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/helm"))
        .env("PATH", path)
        .args(["-o", "pipefail", "-c"])
        .arg("helm template test redeliver --kube-version 1.34.0 --set lake.enabled=true --set config.lake.location=s3://bucket/redeliver | ./check-pods.py \"$@\"")
        .arg("check")
        .args([lake.parent().unwrap(), lake]);
    let checked = languages::run(&mut check).unwrap();
    assert!(
        checked.trim_end().ends_with(" with the lake, 0 failed"),
        "{checked}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn demonstration_fills_tables() {
    let files = Scratch::new("lake-dev").unwrap();
    let tables = files.path().join("tables");
    let mut command = binary("redeliver");
    command
        .env_clear()
        .args(["dev", "--rate", "50", "--lake"])
        .arg(&tables);
    let mut demo = Process::spawn(command).unwrap();
    demo.wait_for_output("Delta tables are in ", DEADLINE);
    for table in ["attempts", "outcomes", "dead_letters", "jobs"] {
        eventually("the table has rows", DEADLINE, || {
            let rows = redeliver_lake::read(tables.to_str().unwrap(), table, &Handle::current());
            let rows = rows.map_err(|error| format!("{table}: {error:#}"))?;
            match rows.iter().map(RecordBatch::num_rows).sum() {
                0_usize => Err(format!("{table} is empty: {}", demo.output())),
                _ => Ok(()),
            }
        });
    }
    demo.interrupt();
    assert_eq!(demo.wait(DEADLINE).code(), Some(0), "{}", demo.output());
}
