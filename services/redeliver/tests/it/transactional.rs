//! The programs in `examples/transactional`, in Python, Java and Rust, with the real scheduler: what a program writes and the jobs
//! that it schedules or cancels in one Kafka transaction are committed or aborted together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::job::JobId;
use redeliver_core::{Record, Timestamp};
use redeliver_kafka::murmur2::shard_of;
use redeliver_testkit::languages::{java, python, run};
use redeliver_testkit::{Process, binary, brokers, ensure, eventually};

use crate::raw;
use crate::services::{APP, Services};
use crate::support::{DEADLINE, text, words};

/// `transaction.timeout.ms` of the programs.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(5);
/// The partitions of the ingest topic.
const PARTITIONS: i32 = 2;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[derive(Clone, Copy, Debug)]
enum Language {
    Python,
    Java,
    Rust,
}

use Language::{Java, Python, Rust};

impl Language {
    fn name(self) -> &'static str {
        match self {
            Python => "python",
            Java => "java",
            Rust => "rust",
        }
    }

    fn source(self) -> PathBuf {
        repository().join("examples/transactional").join(match self {
            Python => "python/orders.py",
            Java => "java/Orders.java",
            Rust => "rust/src/main.rs",
        })
    }

    fn program(self) -> Command {
        match self {
            Python => {
                let requirements = self.source().with_file_name("requirements.txt");
                let mut command = Command::new(python(&requirements).unwrap());
                command.arg(self.source());
                command
            }
            Java => java(&self.source()).unwrap(),
            Rust => binary("redeliver-example-transactional"),
        }
    }
}

/// The programs of one language, with a scheduler and a topic for orders of their own.
struct Shop {
    language: Language,
    services: Services,
    orders: Arc<str>,
}

impl Shop {
    fn open(language: Language, test: &str) -> Self {
        let services = Services::new(&format!("{test}-{}", language.name()));
        let orders: Arc<str> = format!("{}-orders", services.pipe.name()).into();
        raw::create_topic(&brokers(), &orders, &[]);
        Self {
            language,
            services,
            orders,
        }
    }

    fn ingest(&self) -> &Arc<str> {
        &self.services.pipe.jobs.as_ref().unwrap().1.ingest
    }

    /// The command of the process `name`.
    fn command(&self, name: &str, arguments: &str) -> Command {
        let mut command = self.language.program();
        command.args(self.arguments(name, arguments));
        command
    }

    /// The arguments of the process `name`.
    fn arguments(&self, name: &str, arguments: &str) -> Vec<String> {
        let (brokers, name) = (brokers(), format!("{}-{name}", self.services.pipe.name()));
        let common = [&brokers, &**self.ingest(), APP, &self.orders, &name];
        let all = common.into_iter().chain(words(arguments));
        all.map(str::to_owned).collect()
    }

    /// Runs a program to its end. Returns the id of the job.
    #[track_caller]
    fn run(&self, name: &str, arguments: &str, printed: &str) -> JobId {
        let output = run(&mut self.command(name, arguments)).unwrap();
        job(&output, printed).unwrap_or_else(|| panic!("{output}"))
    }

    /// Starts a program that leaves its transaction open.
    #[track_caller]
    fn leave_open(&self, name: &str, arguments: &str) -> Process {
        Process::spawn(self.command(name, &format!("{arguments} wait"))).unwrap()
    }

    /// The committed orders and payments.
    fn events(&self) -> Vec<serde_json::Value> {
        let records = self.services.pipe.read(std::slice::from_ref(&self.orders));
        let parse = |record: Record| serde_json::from_slice(record.value.as_deref().unwrap()).unwrap();
        records.into_iter().map(parse).collect()
    }

    /// All jobs that the scheduler has ever accepted, with their states.
    fn jobs(&self) -> BTreeMap<JobId, String> {
        let listed = self.services.json(&["jobs", "ls", "--all"]);
        let jobs = listed.as_array().unwrap().iter();
        let field = |job: &serde_json::Value, name: &str| job[name].as_str().unwrap().to_owned();
        jobs.map(|job| (field(job, "id").parse().unwrap(), field(job, "state")))
            .collect()
    }

    /// Waits until these are all jobs.
    #[track_caller]
    fn until_jobs<const N: usize>(&self, expected: [(JobId, &str); N]) {
        let expected = BTreeMap::from(expected.map(|(id, state)| (id, state.to_owned())));
        eventually("the jobs are as expected", DEADLINE, || {
            let jobs = self.jobs();
            ensure(jobs == expected, format!("{jobs:?}"))
        });
    }

    /// Waits until these jobs are dispatched. Each must be dispatched once, and no other one.
    #[track_caller]
    fn until_dispatched<const N: usize>(&self, expected: [(JobId, &str); N]) -> Vec<Record> {
        let records = self.services.dispatched(N);
        let dispatched = records.iter().map(|record| {
            assert!(record.timestamp >= due(record), "{record:?}");
            let key = String::from_utf8(record.key.as_deref().unwrap().to_vec()).unwrap();
            let data: serde_json::Value = serde_json::from_slice(record.value.as_deref().unwrap()).unwrap();
            assert_eq!(data, serde_json::json!({ "order": key }));
            (header(record, "job-id").parse().unwrap(), key)
        });
        let mut dispatched: Vec<(JobId, String)> = dispatched.collect();
        dispatched.sort_unstable();
        let mut expected = expected.map(|(id, order)| (id, order.to_owned()));
        expected.sort_unstable();
        assert_eq!(dispatched, expected);
        records
    }
}

#[track_caller]
fn header(record: &Record, name: &str) -> String {
    text(record, name).unwrap().unwrap()
}

#[track_caller]
fn due(record: &Record) -> Option<Timestamp> {
    Some(header(record, "scheduled-time").parse().unwrap())
}

/// The id of the job in the line that begins with these words, once it is complete.
fn job(output: &str, words: &str) -> Option<JobId> {
    let complete = output
        .split_inclusive('\n')
        .filter_map(|line| line.strip_suffix('\n'));
    let mut ids = complete.filter_map(|line| line.strip_prefix(words)?.strip_prefix(' ')?.parse().ok());
    ids.next()
}

fn placed(order: &str, reminder: JobId) -> serde_json::Value {
    serde_json::json!({ "event": "placed", "order": order, "reminder": reminder.to_string() })
}

fn paid(order: &str) -> serde_json::Value {
    serde_json::json!({ "event": "paid", "order": order })
}

#[track_caller]
fn commits_or_aborts_records_and_commands_together(language: Language) {
    let shop = Shop::open(language, "txn");
    let services = &shop.services;
    let _scheduler = services.pipe.scheduler("a");
    let cancelled = shop.run("a", "place cancelled 3600", "committed cancelled");
    let kept = shop.run("a", "place kept 3600", "committed kept");
    let aborted = shop.run("a", "place again 0 abort", "aborted again");
    shop.run("a", &format!("pay cancelled {cancelled}"), "committed cancelled");
    shop.run("a", &format!("pay kept {kept} abort"), "aborted kept");
    // In the same partition as the request that was aborted, and with its idempotency key, which must not have been used up.
    let again = shop.run("a", "place again 1", "committed again");
    assert_ne!(again, aborted);

    shop.until_jobs([
        (cancelled, "cancelled"),
        (kept, "scheduled"),
        (again, "dispatched"),
    ]);
    // Commands of one job have an order, so each of these comes after the cancellation.
    let now = |id: JobId| {
        let id = id.to_string();
        services
            .pipe
            .redeliver(&["jobs", "reschedule", &id, "--in", "0s"])
    };
    assert_eq!(now(cancelled).code, Some(1));
    let rescheduled = now(kept);
    assert_eq!(rescheduled.code, Some(0), "{rescheduled:?}");
    shop.until_jobs([
        (cancelled, "cancelled"),
        (kept, "dispatched"),
        (again, "dispatched"),
    ]);
    shop.until_dispatched([(kept, "kept"), (again, "again")]);
    let events = [
        placed("cancelled", cancelled),
        placed("kept", kept),
        paid("cancelled"),
        placed("again", again),
    ];
    assert_eq!(shop.events(), events);

    // Each command was written to the partition where it belongs, so the scheduler has forwarded none.
    let commands = services.pipe.read(std::slice::from_ref(shop.ingest()));
    let mut found: Vec<i32> = commands.iter().map(|record| record.position.partition).collect();
    found.sort_unstable();
    let orders = ["cancelled", "cancelled", "cancelled", "kept", "kept", "again"];
    let mut expected = orders.map(partition);
    expected.sort_unstable();
    assert_eq!(found, expected, "{commands:?}");
}

#[track_caller]
fn a_killed_program_has_written_nothing(language: Language) {
    let shop = Shop::open(language, "txn-killed");
    let services = &shop.services;
    let _scheduler = services.pipe.scheduler("a");
    let kept = shop.run("a", "place kept 3600", "committed kept");
    let mut placing = shop.leave_open("b", "place lost 0");
    let mut paying = shop.leave_open("c", &format!("pay kept {kept}"));
    let lost = until_open(&placing, "open lost");
    until_open(&paying, "open kept");
    placing.kill_9();
    paying.kill_9();

    let next_order = like("lost", "next");
    let place =
        |name: &str, order: &str| shop.run(name, &format!("place {order} 0"), &format!("committed {order}"));
    let next = place("d", &next_order);
    let [record] = &shop.until_dispatched([(next, &next_order)])[..] else {
        panic!("not one record")
    };
    // Only after its timeout, Kafka has aborted the transaction in front of this request.
    let earliest = lost.requested_at().after(TRANSACTION_TIMEOUT);
    assert!(record.timestamp >= Some(earliest), "{record:?} before {earliest}");
    shop.until_jobs([(kept, "scheduled"), (next, "dispatched")]);

    // A program with the same name ends the transaction of the previous one at once.
    let again = shop.run("b", "place lost 0", "committed lost");
    let other = shop.run("c", "place other 3600", "committed other");
    let rescheduled = services
        .pipe
        .redeliver(&["jobs", "reschedule", &kept.to_string(), "--in", "0s"]);
    assert_eq!(rescheduled.code, Some(0), "{rescheduled:?}");
    shop.until_jobs([
        (kept, "dispatched"),
        (next, "dispatched"),
        (again, "dispatched"),
        (other, "scheduled"),
    ]);
    shop.until_dispatched([(kept, "kept"), (next, &next_order), (again, "lost")]);
    let events = [
        placed("kept", kept),
        placed(&next_order, next),
        placed("lost", again),
        placed("other", other),
    ];
    assert_eq!(shop.events(), events);
}

#[test]
fn open_transaction_delays_only_its_partition() {
    let shop = Shop::open(Python, "txn-open");
    let pipe = &shop.services.pipe;
    let _scheduler = pipe.scheduler("a");
    let due = shop.run("a", "place due 5", "committed due");
    // The program, but its transaction does not end while the test runs.
    let program = std::fs::read_to_string(Python.source()).unwrap();
    let timeout = r#""transaction.timeout.ms": 5_000"#;
    assert!(program.contains(timeout), "{program}");
    let patient = pipe.env.directory().join("patient.py");
    std::fs::write(
        &patient,
        program.replace(timeout, r#""transaction.timeout.ms": 600_000"#),
    )
    .unwrap();
    let mut command = Command::new(Python.program().get_program());
    let lost = like("due", "lost");
    command
        .arg(patient)
        .args(shop.arguments("b", &format!("place {lost} 0 wait")));
    let open = Process::spawn(command).unwrap();
    until_open(&open, &format!("open {lost}"));

    let behind_order = like("due", "behind");
    let place = |order: &str| shop.run("a", &format!("place {order} 0"), &format!("committed {order}"));
    let behind = place(&behind_order);
    let mut orders = (0..).map(|number| format!("elsewhere-{number}"));
    let order = orders.find(|order| partition(order) != partition("due")).unwrap();
    let elsewhere = place(&order);
    shop.until_jobs([(due, "dispatched"), (elsewhere, "dispatched")]);
    drop(open);
    shop.run("b", &format!("place {lost} 0 abort"), &format!("aborted {lost}"));
    shop.until_jobs([
        (due, "dispatched"),
        (elsewhere, "dispatched"),
        (behind, "dispatched"),
    ]);
    shop.until_dispatched([(due, "due"), (elsewhere, &order), (behind, &behind_order)]);
}

/// Waits until a program has written everything and has left its transaction open. Returns the id of the job.
#[track_caller]
fn until_open(program: &Process, printed: &str) -> JobId {
    eventually(printed, DEADLINE, || {
        let output = program.output();
        job(&output, printed).ok_or(output)
    })
}

/// The partition of the ingest topic for the commands of an order.
fn partition(order: &str) -> i32 {
    shard_of(APP, order, PARTITIONS)
}

/// An order with this name and a number, whose commands are in the same partition as those of another order.
fn like(other: &str, name: &str) -> String {
    let mut orders = (0..).map(|number| format!("{name}-{number}"));
    orders.find(|order| partition(order) == partition(other)).unwrap()
}

#[test]
fn python_commits_or_aborts_both() {
    commits_or_aborts_records_and_commands_together(Python);
}

#[test]
fn java_commits_or_aborts_both() {
    commits_or_aborts_records_and_commands_together(Java);
}

#[test]
fn rust_commits_or_aborts_both() {
    commits_or_aborts_records_and_commands_together(Rust);
}

#[test]
fn killed_python_has_written_nothing() {
    a_killed_program_has_written_nothing(Python);
}

#[test]
#[ignore = "long"]
fn killed_java_has_written_nothing() {
    a_killed_program_has_written_nothing(Java);
}

#[test]
#[ignore = "long"]
fn killed_rust_has_written_nothing() {
    a_killed_program_has_written_nothing(Rust);
}

/// The lines without their indentation, as a text.
fn unindented(text: &str) -> String {
    text.lines().map(|line| format!("{}\n", line.trim())).collect()
}

#[test]
fn docs_show_parts_of_program() {
    let page = std::fs::read_to_string(repository().join("docs/transactions.md")).unwrap();
    let program = unindented(&std::fs::read_to_string(Python.source()).unwrap());
    let parts = page.split("```python\n").skip(1);
    let parts: Vec<&str> = parts.map(|part| part.split_once("```").unwrap().0).collect();
    assert!(!parts.is_empty());
    for part in parts {
        assert!(program.contains(&unindented(part)), "no such part:\n{part}");
    }
}
