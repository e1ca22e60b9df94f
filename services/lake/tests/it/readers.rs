//! Other programs read the tables while they are written.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use delta_kernel::arrow::array::RecordBatch;
use redeliver_core::Timestamp;
use redeliver_testkit::languages::python;
use redeliver_testkit::{DEADLINE, FakeEndpoint, Process, Reply, eventually};
use serde::Deserialize;

use crate::support::LakeEnv;

#[derive(Debug, Deserialize)]
struct Found {
    counts: BTreeMap<String, usize>,
    answers: BTreeMap<String, Vec<Vec<String>>>,
}

#[derive(Deserialize)]
struct Stats {
    total: Total,
}

#[derive(Deserialize)]
struct Total {
    records: u64,
    average_attempts: f64,
    max_attempts: u32,
    next_due: String,
}

#[derive(Deserialize)]
struct Groups {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    template: String,
    count: u64,
}

/// Starts `readers.py`, which ends once `end` exists.
fn spawn(lake: &Path, end: &Path, tables: &[&str]) -> Process {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = here.join("tests/it/readers");
    let mut command = Command::new(python(&files.join("requirements.txt")).unwrap());
    command
        .arg(files.join("readers.py"))
        .arg(lake)
        .arg(here.join("../../deploy/lake"))
        .arg(here.join("../../docs/lake-questions.md"))
        .arg(end)
        .args(tables);
    Process::spawn(command).unwrap()
}

/// The rows that the documented queries find.
fn answers(env: &LakeEnv) -> BTreeMap<String, Vec<Vec<String>>> {
    let end = env.base.directory().join("end");
    std::fs::write(&end, "").unwrap();
    let mut readers = spawn(&env.lake(), &end, &[]);
    let status = readers.wait(DEADLINE);
    let output = readers.output();
    assert!(status.success(), "{output}");
    let found: Found = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    found.answers
}

/// An operator who asks with SQL gets the same answers as one who asks the inspector.
#[tokio::test(flavor = "multi_thread")]
async fn answers_equal_those_of_commands() {
    let endpoint = FakeEndpoint::start(|request| {
        let number: u32 = std::str::from_utf8(&request.body).unwrap().parse().unwrap();
        match number % 4 {
            0 => Reply::status(503),
            1 => Reply::status(422),
            _ => Reply::ok("done"),
        }
    });
    let url = endpoint.url();
    let settings = format!(
        "retry: {{ tiers: [1h] }}, breaker: {{ rate: null, failures: 0 }}, http: {{ url: '{url}', quick_retries: 0 }}"
    );
    let env = LakeEnv::with("lake-answers", &settings);
    let _enricher = env.base.start("enricher", "a", &[]);
    let mut inspector = env.base.start("dlq-inspector", "a", &[]);
    let _lake = env.base.start("redeliver-lake", "a", &[]);
    let values: Vec<String> = (0..40).map(|number| number.to_string()).collect();
    env.put_values(&env.base.name().into(), &values).await;
    let [dead, out, _] = env.topics();
    let tier: Arc<str> = format!("{}-retry-1h", env.base.name()).into();
    for (table, topic, count) in [
        ("attempts", &tier, 10),
        ("dead_letters", &dead, 10),
        ("outcomes", &dead, 10),
        ("outcomes", &out, 20),
    ] {
        env.until_rows(table, topic, count);
    }
    let rows = answers(&env);
    let server = format!("http://{}", inspector.word_after(" api="));
    let ask = |command: [&str; 2]| {
        let arguments = [&command[..], &["--output", "json", "--server", &server]].concat();
        let answer = env.base.run("redeliver", &arguments);
        assert_eq!(answer.code, Some(0), "{answer:?}");
        answer.stdout
    };
    let Stats { total } = serde_json::from_str(&ask(["waiting", "stats"])).unwrap();
    let waiting = &rows["How much waits, how often it was tried, and when the next record is due"][0];
    let average = format!("{:?}", total.average_attempts);
    let counts = [total.records.to_string(), average, total.max_attempts.to_string()];
    assert_eq!(waiting[..3], counts);
    let due: Timestamp = waiting[3].replace(' ', "T").replace("+00", "Z").parse().unwrap();
    assert_eq!(due, total.next_due.parse().unwrap());
    let errors = eventually("all dead letters are indexed", DEADLINE, || {
        let Groups { groups } = serde_json::from_str(&ask(["dlq", "groups"])).unwrap();
        match groups.iter().map(|group| group.count).sum() {
            10 => Ok(groups),
            count => Err(count),
        }
    });
    let errors: Vec<_> = errors
        .into_iter()
        .map(|group| [group.template, group.count.to_string()])
        .collect();
    assert_eq!(rows["Errors by count"], errors);
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_read_tables_while_they_grow() {
    let tables = [
        "attempts",
        "outcomes",
        "dead_letters",
        "decisions",
        "jobs",
        "audit",
        "gaps",
    ];
    let env = LakeEnv::new("lake-readers");
    env.create_topics().await;
    // Two jobs are 100 and 300 ms late.
    let state = format!("{}-state", env.base.name()).into();
    env.create_topic(&state).await;
    for ended in [3_600_100, 3_600_300] {
        env.put_job(&state, 3_600_000, ended).await;
    }
    let mut lake = env.spawn("a");
    lake.until_ready();
    let [dead, out, tier] = env.topics();
    let end = env.base.directory().join("end");
    let mut readers = spawn(&env.lake(), &end, &tables);
    // 12 records fail, and half of them twice. Then, 3 succeed and 3 die.
    env.put_failed(&tier, 0..12, 1, 1_000).await;
    readers.wait_for_output("round 1\n", DEADLINE);
    env.put_failed(&tier, 0..6, 2, 10_000).await;
    readers.wait_for_output("round 2\n", DEADLINE);
    env.put_failed(&out, 0..3, 2, 10_000).await;
    env.put_failed(&dead, 3..6, 3, 20_000).await;
    env.until_complete();
    env.until_rows("jobs", &state, 2);
    std::fs::write(&end, "").unwrap();
    let status = readers.wait(DEADLINE);
    let output = readers.output();
    assert!(status.success(), "{output}");
    let found: Found = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    for table in tables {
        let rows: usize = env.rows(table).iter().map(RecordBatch::num_rows).sum();
        for reader in ["duckdb", "delta-rs", "polars"] {
            assert_eq!(
                found.counts[&format!("{table} {reader}")],
                rows,
                "{table} {reader}"
            );
        }
    }
    let rows = |question: &str| found.answers[question].clone();
    let waiting = rows("How much waits, how often it was tried, and when the next record is due");
    assert_eq!(waiting, [["6", "1.0", "1", "1970-01-01 00:00:06+00"]]);
    let newest: Vec<String> = rows("The newest dead letters")
        .into_iter()
        .map(|row| row[3].clone())
        .collect();
    assert_eq!(newest, [5, 4, 3].map(|user| format!("503 for user {user}")));
    let errors = rows("Errors by count");
    assert_eq!(errors, [["<number> for user <number>", "3"]]);
    // 18 failures with a wait of 5 seconds.
    let hours = rows("Which endpoint cost us most hours of waiting");
    assert_eq!(hours, [[env.base.name(), "18", "12", "0.025"]]);
    let tenants = rows("Which tenants' records die");
    let expected = ["t1 3 2 66.7 http.503", "t0 3 1 33.3 http.503"];
    assert_eq!(
        tenants.iter().map(|row| row.join(" ")).collect::<Vec<_>>(),
        expected
    );
    let jobs = rows("How late were jobs");
    assert_eq!(jobs, [["1970-01-01 01:00:00+00", "2", "200.0", "298.0", "300"]]);
    // The results have the time at which they were written.
    let until = rows("How long until success, by error code");
    assert_eq!(
        (until.len(), &until[0][..2]),
        (1, &["http.503", "3"].map(str::to_owned)[..])
    );
}
