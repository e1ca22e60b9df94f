//! Other programs read the tables while they are written.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use delta_kernel::arrow::array::RecordBatch;
use redeliver_core::time::InvalidTimestamp;
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_testkit::languages::{Libraries, java_with, python, run};
use redeliver_testkit::{DEADLINE, FakeEndpoint, Process, Reply, ensure, eventually};
use serde::Deserialize;

use crate::support::LakeEnv;

/// The time in a documented query, which stands for any other.
const PAST: &str = "now() - INTERVAL '1' DAY";

/// Packages of Java that Spark looks into.
const OPENED: [&str; 11] = [
    "java.lang",
    "java.lang.invoke",
    "java.net",
    "java.nio",
    "java.util",
    "java.util.concurrent",
    "java.util.concurrent.atomic",
    "jdk.internal.ref",
    "sun.nio.ch",
    "sun.security.action",
    "sun.util.calendar",
];

#[derive(Debug, Deserialize)]
struct Found {
    counts: BTreeMap<String, usize>,
    queries: BTreeMap<String, String>,
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
    next_due: Option<String>,
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

/// What `audit` counts.
#[derive(Deserialize)]
struct Audit {
    source: usize,
    output: usize,
    dead: usize,
    waiting: BTreeMap<String, usize>,
}

#[derive(Deserialize)]
struct Letters {
    dead_letters: Vec<Letter>,
}

#[derive(Deserialize)]
struct Letter {
    dead_at: String,
    pipeline: String,
    error_code: String,
    error_message: String,
}

#[derive(Deserialize)]
struct Stuck {
    records: Vec<StuckRecord>,
}

#[derive(Deserialize)]
struct StuckRecord {
    pipeline: String,
    origin: String,
    attempts: u32,
}

/// Starts `readers.py`, which ends once `end` exists. Its queries ask about `past`.
fn spawn(lake: &Path, end: &Path, past: &str, tables: &[&str]) -> Process {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = here.join("tests/it/readers");
    let mut command = Command::new(python(&files.join("requirements.txt")).unwrap());
    command
        .arg(files.join("readers.py"))
        .arg(lake)
        .arg(here.join("../../deploy/lake"))
        .arg(here.join("../../docs/lake-questions.md"))
        .arg(end)
        .arg(past)
        .args(tables);
    Process::spawn(command).unwrap()
}

/// Waits until all tables have been read from now on.
fn until_read(readers: &mut Process) {
    let rounds = readers.output().matches("round ").count();
    // The next round has begun already.
    readers.wait_for_output(&format!("round {}\n", rounds + 2), DEADLINE);
}

/// What the documented queries find, which ask about `past`.
fn found(env: &LakeEnv, past: &str) -> Found {
    let end = env.base.directory().join("end");
    std::fs::write(&end, "").unwrap();
    ended(spawn(&env.lake(), &end, past, &[]))
}

fn ended(mut readers: Process) -> Found {
    let status = readers.wait(DEADLINE);
    let output = readers.output();
    assert!(status.success(), "{output}");
    serde_json::from_str(output.lines().last().unwrap()).unwrap()
}

impl Total {
    /// Checks a row with the same numbers.
    #[track_caller]
    fn check(&self, row: &[String]) {
        let average = format!("{:?}", self.average_attempts);
        assert_eq!(
            row[..3],
            [self.records.to_string(), average, self.max_attempts.to_string()]
        );
        assert_eq!(
            time(&row[3]).unwrap(),
            self.next_due.as_ref().unwrap().parse().unwrap()
        );
    }
}

/// A time as an engine prints it.
fn time(text: &str) -> Result<Timestamp, InvalidTimestamp> {
    text.replace(' ', "T").replace("+00", "Z").parse()
}

/// An operator who asks with SQL gets the same answers as one who asks the inspector.
#[tokio::test(flavor = "multi_thread")]
async fn answers_equal_those_of_commands() {
    let is_repaired = Arc::new(AtomicBool::new(false));
    let repaired = is_repaired.clone();
    let endpoint = FakeEndpoint::start(move |request| {
        let number: u32 = std::str::from_utf8(&request.body).unwrap().parse().unwrap();
        match number % 4 {
            0 if !repaired.load(Ordering::Relaxed) => Reply::status(503),
            1 => Reply::status(422),
            _ => Reply::ok("done"),
        }
    });
    let url = endpoint.url();
    let settings = format!(
        "retry: {{ tiers: [1h] }}, breaker: {{ rate: null, failures: 0 }}, http: {{ url: '{url}', quick_retries: 0 }}"
    );
    let mut env = LakeEnv::with("lake-answers", &settings);
    for topic in ["control", "audit"] {
        let name = format!("{}-{topic}", env.base.name());
        env.base.set(&format!("{topic}.topic"), &name);
    }
    let _enricher = env.base.start("enricher", "a", &[]);
    let _retry_tier = env.base.start("retry-tier", "a", &[]);
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
    let rows = found(&env, PAST).answers;
    let server = format!("http://{}", inspector.word_after(" api="));
    let run = |command: &[&str]| {
        let answer = env
            .base
            .run("redeliver", &[command, &["--output", "json"]].concat());
        assert_eq!(answer.code, Some(0), "{answer:?}");
        answer.stdout
    };
    let ask = |command: &[&str]| run(&[command, &["--server", &server]].concat());
    let audit: Audit = serde_json::from_str(&run(&["audit"])).unwrap();
    let waits: usize = audit.waiting.values().sum();
    assert_eq!((audit.source, audit.output, audit.dead, waits), (40, 20, 10, 10));
    let states = [
        ("died", audit.dead),
        ("succeeded", audit.output),
        ("waiting", waits),
    ];
    let states = states.map(|(state, count)| [state.to_owned(), count.to_string()]);
    assert_eq!(rows["How many records wait, have succeeded or are dead"], states);
    let waiting = || -> Total {
        let Stats { total } = serde_json::from_str(&ask(&["waiting", "stats"])).unwrap();
        total
    };
    let past = waiting();
    past.check(&rows["How much waits, how often it was tried, and when the next record is due"][0]);
    let asked_at = SystemClock.now();
    let errors = eventually("all dead letters are indexed", DEADLINE, || {
        let Groups { groups } = serde_json::from_str(&ask(&["dlq", "groups"])).unwrap();
        let count: u64 = groups.iter().map(|group| group.count).sum();
        ensure(count == 10, count).map(|()| groups)
    });
    let errors: Vec<_> = errors
        .into_iter()
        .map(|group| [group.template, group.count.to_string()])
        .collect();
    assert_eq!(rows["Errors by count"], errors);
    let Letters { dead_letters } = serde_json::from_str(&ask(&["dlq", "ls"])).unwrap();
    // The order of equal times is open.
    let newest: BTreeSet<_> = dead_letters
        .into_iter()
        .map(|letter| {
            (
                time(&letter.dead_at).unwrap(),
                letter.pipeline,
                letter.error_code,
                letter.error_message,
            )
        })
        .collect();
    let found_newest: BTreeSet<_> = rows["The newest dead letters"]
        .iter()
        .map(|row| {
            (
                time(&row[0]).unwrap(),
                row[1].clone(),
                row[2].clone(),
                row[3].clone(),
            )
        })
        .collect();
    assert_eq!(found_newest, newest);
    // Later, nothing waits any more, and the tables still say what did.
    is_repaired.store(true, Ordering::Relaxed);
    let released = format!("tier/{}/1h", env.base.name());
    ask(&["release", &released, "--reason", "test"]);
    env.until_rows("outcomes", &out, 30);
    assert_eq!((past.records, waiting().records), (10, 0));
    let rows = found(&env, &format!("TIMESTAMPTZ '{asked_at}'")).answers;
    past.check(&rows["How much waited a day ago"][0]);
    let waiting = &rows["How much waits, how often it was tried, and when the next record is due"];
    assert_eq!(waiting[0][0], "0");
    // Of these, which are due in an hour, three have failed often. All entered their pipeline long ago.
    let failed_at = SystemClock.now().as_millis() + 3_600_000;
    env.put_failed(&tier, 100..103, 5, failed_at).await;
    env.put_failed(&tier, 103..105, 2, failed_at).await;
    env.until_rows("attempts", &tier, 15);
    let stuck = ["waiting", "ls", "--more-attempts-than", "3", "--older-than", "1h"];
    let Stuck { records } = serde_json::from_str(&ask(&stuck)).unwrap();
    assert_eq!(records.len(), 3);
    let stuck: BTreeSet<_> = records
        .into_iter()
        .map(|record| (record.pipeline, record.origin, record.attempts.to_string()))
        .collect();
    let rows = found(&env, PAST).answers;
    // Of all columns: pipeline, origin and attempts.
    let found_stuck: BTreeSet<_> = rows["Records that have failed often and wait for long"]
        .iter()
        .map(|row| (row[1].clone(), row[3..6].join("/"), row[7].clone()))
        .collect();
    assert_eq!(found_stuck, stuck);
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
    let mut env = LakeEnv::new("lake-readers");
    env.base.set("lake.keep_replaced", "1h");
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
    let mut readers = spawn(&env.lake(), &end, PAST, &tables);
    // 12 records fail, and half of them twice. Then, 3 succeed and 3 die.
    env.put_failed(&tier, 0..12, 1, 1_000).await;
    readers.wait_for_output("round 1\n", DEADLINE);
    env.put_failed(&tier, 0..6, 2, 10_000).await;
    readers.wait_for_output("round 2\n", DEADLINE);
    // Files are merged while they are read, and deleted when nobody has read them for longer than `keep_replaced`.
    env.put_files("jobs", &state, 61).await;
    let merged = env.maintain("jobs")[1];
    assert!(merged >= 60, "{merged}");
    until_read(&mut readers);
    env.age(Duration::from_secs(3 * 3_600));
    let deleted = env.maintain("jobs")[3];
    assert!(deleted >= merged, "{deleted} of {merged}");
    until_read(&mut readers);
    env.put_failed(&out, 0..3, 2, 10_000).await;
    env.put_failed(&dead, 3..6, 3, 20_000).await;
    env.until_complete();
    let jobs = env.records(std::slice::from_ref(&state)).len();
    env.until_rows("jobs", &state, jobs);
    std::fs::write(&end, "").unwrap();
    let found = ended(readers);
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
    // The last moment is now.
    let waited = rows("How much waited");
    assert_eq!(waited.last().unwrap()[1..4], [env.base.name(), "6", "1.0"]);
}

/// Nothing here runs Trino.
#[test]
fn engines_have_same_tables() {
    let [duckdb, spark, trino] = ["duckdb", "spark", "trino"].map(|engine| {
        let file = format!("{}/../../deploy/lake/{engine}.sql", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(file).unwrap();
        let tables = text.split("'LAKE/").skip(1);
        let tables = tables.map(|rest| rest.split('\'').next().unwrap().to_owned());
        tables.collect::<BTreeSet<_>>()
    });
    assert!(duckdb.contains("attempts"), "{duckdb:?}");
    assert_eq!([&spark, &trino], [&duckdb; 2]);
}

/// Spark has another reader of tables and another dialect of SQL.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn spark_answers_as_duckdb_does() {
    let env = LakeEnv::new("lake-spark");
    env.create_topics().await;
    let mut lake = env.spawn("a");
    lake.until_ready();
    let [dead, out, tier] = env.topics();
    for (topic, failures, failed_at) in [
        (&tier, 1, 1_000),
        (&tier, 2, 10_000),
        (&out, 2, 10_000),
        (&dead, 3, 20_000),
    ] {
        // Fewer each time.
        env.put_failed(topic, 0..i64::from(14 - 4 * failures), failures, failed_at)
            .await;
    }
    env.until_complete();
    lake.shut_down();
    let found = found(&env, PAST);
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (files, sql) = (here.join("tests/it/readers"), here.join("../../deploy/lake"));
    // The others are for DuckDB.
    let documented = std::fs::read_to_string(sql.join("views.sql")).unwrap();
    let queries = found.queries.iter();
    let queries: Vec<_> = queries.filter(|(_, query)| documented.contains(*query)).collect();
    assert_eq!(queries.len(), 6);
    let mut spark = java_with(&files.join("Spark.java"), Libraries::Pom(&files.join("pom.xml"))).unwrap();
    let opens = OPENED.map(|package| format!("--add-opens=java.base/{package}=ALL-UNNAMED"));
    spark
        .env("JDK_JAVA_OPTIONS", opens.join(" "))
        .current_dir(env.base.directory())
        .arg(env.lake())
        .arg(sql)
        .args(queries.iter().map(|(_, query)| query));
    let output = run(&mut spark).unwrap();
    let answers: Vec<Vec<Vec<String>>> = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    for ((question, _), answers) in queries.into_iter().zip(answers) {
        // Times are printed in another way, and the order of equal ones is open.
        let same = |cell: &String| time(cell).map_or_else(|_| cell.clone(), |time| time.to_string());
        let same = |rows: &[Vec<String>]| -> Vec<Vec<String>> {
            let rows = rows.iter();
            let mut rows: Vec<_> = rows.map(|row| row.iter().map(same).collect()).collect();
            rows.sort();
            rows
        };
        assert_eq!(same(&answers), same(&found.answers[question]), "{question}");
    }
}
