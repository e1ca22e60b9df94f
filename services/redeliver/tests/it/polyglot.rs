//! The programs in `examples/clients`, in Python and Node.js, with the real services. They need only the protocol.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use redeliver_core::{Record, Timestamp};
use redeliver_kafka::murmur2::partition_for_key;
use redeliver_testkit::languages::{node_modules, python, run};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{Fate, Process, brokers, ensure, kube_tools};

use crate::services::{APP, Services, id};
use crate::support::{DEADLINE, PipeBuilder, Sent, text};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn clients() -> PathBuf {
    repository().join("examples/clients")
}

/// Python with the packages of the examples, and with the code that their README generates from `proto/`.
pub(crate) struct Python {
    program: PathBuf,
    generated: Scratch,
}

impl Python {
    fn new() -> Self {
        let program = python(&clients().join("python/requirements.txt")).unwrap();
        let generated = Scratch::new("python").unwrap();
        let readme = std::fs::read_to_string(clients().join("python/README.md")).unwrap();
        let mut compile = Command::new(&program);
        compile
            .args(["-m", "grpc_tools.protoc", "--proto_path"])
            .arg(repository().join("proto"))
            .arg("--python_out")
            .arg(generated.path())
            .arg("--grpc_python_out")
            .arg(generated.path())
            .args(readme.split_whitespace().filter(|word| word.ends_with(".proto")));
        run(&mut compile).unwrap();
        Self { program, generated }
    }

    pub(crate) fn command(&self, script: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg(clients().join("python").join(script))
            .args(arguments)
            .env("PYTHONPATH", self.generated.path())
            .env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    #[track_caller]
    fn run(&self, script: &str, arguments: &[&str]) -> String {
        run(&mut self.command(script, arguments)).unwrap()
    }
}

/// Generated once for all tests.
pub(crate) fn the_python() -> &'static Python {
    static PYTHON: OnceLock<Python> = OnceLock::new();
    PYTHON.get_or_init(Python::new)
}

/// The job must be in its application's topic, byte for byte, and not before its time.
#[track_caller]
fn came_as_it_was_written(record: &Record, data: &str) {
    assert_eq!(record.value.as_deref(), Some(data.as_bytes()), "{record:?}");
    let header = |name| text(record, name).unwrap().unwrap();
    assert_eq!(header("job-app"), APP);
    let due: Timestamp = header("scheduled-time").parse().unwrap();
    assert!(record.timestamp >= Some(due), "{record:?}");
}

/// Runs a program twice with the same idempotency key, which must create one job.
#[track_caller]
fn schedules_by_a_plain_json_record(name: &str, data: &str, program: impl Fn(&[&str])) {
    let services = Services::new(name);
    let _scheduler = services.pipe.scheduler("a");
    let (_, topics) = services.pipe.jobs.as_ref().unwrap();
    for _ in 0..2 {
        program(&[&brokers(), &topics.ingest, APP]);
    }
    // Once a later request has been processed, both have been.
    let last = services.cli(&[
        "jobs", "schedule", "--app", APP, "--in", "3s", "--data", "the last",
    ]);
    let mut records = services.dispatched(2);
    records.sort_by_key(|record| record.value.as_deref() == Some(b"the last"));
    let [job, end] = &records[..] else {
        panic!("{records:?}")
    };
    came_as_it_was_written(job, data);
    assert_eq!(text(end, "job-id").unwrap().as_deref(), Some(last.trim_end()));
    let listed = services.json(&["jobs", "ls", "--app", APP, "--state", "dispatched"]);
    assert_eq!(listed.as_array().map(Vec::len), Some(2), "{listed}");
    assert!(services.pipe.read(std::slice::from_ref(&topics.dlq)).is_empty());
}

#[test]
fn python_schedules_job_with_json() {
    let data = r#"{"number": 32}"#;
    schedules_by_a_plain_json_record("python-json", data, |arguments| {
        let printed = the_python().run("schedule.py", arguments);
        assert!(printed.starts_with("written to "), "{printed}");
    });
}

#[test]
fn node_schedules_job_with_json() {
    let modules = node_modules(&clients().join("node")).unwrap();
    let data = r#"{"number":33}"#;
    schedules_by_a_plain_json_record("node-json", data, |arguments| {
        let mut command = Command::new("node");
        command
            .arg(clients().join("node/schedule.js"))
            .args(arguments)
            .env("NODE_PATH", &modules);
        let printed = run(&mut command).unwrap();
        assert!(printed.starts_with("written to "), "{printed}");
    });
}

#[test]
fn python_client_schedules_and_cancels() {
    let services = Services::new("python-jobs");
    let _scheduler = services.pipe.scheduler("a");
    let jobs = |arguments: &[&str]| {
        let common = [services.scheduler.as_str(), APP];
        let printed = the_python().run("jobs.py", &[&common, arguments].concat());
        let (id, response) = printed.trim_end().split_once(' ').unwrap();
        (id.to_owned(), response.to_owned())
    };
    let (kept, state) = jobs(&["schedule", "kept", "1"]);
    assert_eq!(state, "JOB_STATE_SCHEDULED");
    let (cancelled, _) = jobs(&["schedule", "never", "3600"]);
    let expected = |outcome: &str| (cancelled.clone(), outcome.to_owned());
    assert_eq!(jobs(&["cancel", &cancelled]), expected("OUTCOME_CANCELLED"));
    assert_eq!(
        jobs(&["cancel", &cancelled]),
        expected("OUTCOME_ALREADY_CANCELLED")
    );

    let records = services.dispatched(1);
    let [record] = &records[..] else {
        panic!("{records:?}")
    };
    came_as_it_was_written(record, "kept");
    assert_eq!(text(record, "sent-by").unwrap().as_deref(), Some("python"));
    assert_eq!(text(record, "job-id").unwrap(), Some(kept.clone()));
    assert_eq!(jobs(&["cancel", &kept]).1, "OUTCOME_ALREADY_DISPATCHED");
}

#[test]
fn python_client_reads_dead_letters() {
    let services = Services::new("python-dead");
    let (_enricher, _inspector) = (services.pipe.enricher("a"), services.inspect());
    let letters = services.produce_dead_letters(&["hopeless 1", "hopeless ä"]);
    let [first, second] = &letters[..] else {
        panic!("{letters:?}")
    };
    let python = |arguments: &[&str]| {
        the_python().run(
            "dead_letters.py",
            &[&[services.inspector.as_str()], arguments].concat(),
        )
    };
    let line = |record: &Record| {
        let message = text(record, "error-message").unwrap().unwrap();
        format!("{} permanent http.404 {message}", id(record))
    };

    // A dead letter is in the topic before it is in the index.
    let all = format!("{}\n{}\n", line(second), line(first));
    redeliver_testkit::eventually("both dead letters are listed", DEADLINE, || {
        let listed = python(&["list"]);
        ensure(listed == all, listed)
    });
    let of_one = format!(
        "error_class = \"permanent\" AND headers.original-offset = \"{}\" AND headers.original-partition = \"{}\"",
        text(first, "original-offset").unwrap().unwrap(),
        text(first, "original-partition").unwrap().unwrap()
    );
    assert_eq!(python(&["list", &of_one]), line(first) + "\n");
    assert_eq!(python(&["list", "error_class = \"transient\""]), "");

    let read = python(&["read", &id(second)]);
    let (headers, value) = read.split_once("\n\n").unwrap();
    assert_eq!(value, "hopeless ä\n");
    let names: Vec<&str> = headers
        .lines()
        .map(|line| line.split_once(": ").unwrap().0)
        .collect();
    let expected: Vec<&str> = second.headers.iter().map(|(name, _)| name).collect();
    assert_eq!(names, expected);
    assert!(headers.starts_with("tenant: x\n"), "{headers}");

    let watching = the_python().command("dead_letters.py", &[&services.inspector, "watch"]);
    let mut watching = Process::spawn(watching).unwrap();
    let so_far = watching.wait_for_output("-- caught up", DEADLINE);
    assert!(
        so_far.contains(&line(first)) && so_far.contains(&line(second)),
        "{so_far}"
    );
    let third = services.produce_dead_letters(&["hopeless 3"]);
    watching.wait_for_output(&format!("-- caught up\n{}\n", line(&third[0])), DEADLINE);
}

/// The program in Python on this page.
fn program_in(page: &str) -> String {
    let page = std::fs::read_to_string(repository().join(page)).unwrap();
    let (_, program) = page.split_once("```python\n").unwrap();
    program.split_once("```").unwrap().0.to_owned()
}

/// The program with this broker and topic.
fn with_topic(mut program: String, topic: &str) -> String {
    let quoted = |text: &str| format!("\"{text}\"");
    for (from, to) in [("localhost:9092", brokers().as_str()), ("greetings", topic)] {
        assert!(program.contains(&quoted(from)), "{from} is not in {program}");
        program = program.replace(&quoted(from), &quoted(to));
    }
    program
}

/// A program produces numbers. A pipeline must process them with the program's headers, and each key must be
/// in the partition that Java's clients choose.
#[track_caller]
fn produces_what_a_pipeline_handles(name: &str, header: (&str, &str), run: impl FnOnce(&str)) {
    let pipe = PipeBuilder::new(name).create();
    let _enricher = pipe.enricher("a");
    run(pipe.name());
    let partitions = i32::try_from(pipe.env.partitions()).unwrap();
    let sent: Vec<Sent> = pipe
        .read(std::slice::from_ref(&pipe.pipeline.source))
        .into_iter()
        .map(|record| {
            let key = record.key.as_deref().unwrap();
            let expected = partition_for_key(key, partitions);
            assert_eq!(record.position.partition, expected, "{record:?}");
            Sent::from(record)
        })
        .collect();
    let mut numbers = BTreeSet::new();
    for sent in &sent {
        let value: serde_json::Value = serde_json::from_slice(sent.body()).unwrap();
        let number = value["number"].as_u64().unwrap();
        assert_eq!(
            sent.draft.key.as_deref(),
            Some(format!("key-{number}").as_bytes())
        );
        assert_eq!(sent.draft.headers.last(header.0), Some(header.1.as_bytes()));
        numbers.insert(number);
    }
    assert_eq!((sent.len(), numbers), (30, (1..=30).collect()));
    pipe.settle(&sent, DEADLINE).meets_with(&sent, |_| Fate::Succeeds);
}

/// Runs the program of the page about producers.
#[track_caller]
pub(crate) fn produce_as_documented(topic: &str) {
    let files = Scratch::new("docs-python").unwrap();
    let requirements = files.path().join("requirements.txt");
    std::fs::write(&requirements, "confluent-kafka==2.16.1\n").unwrap();
    let program = files.path().join("produce.py");
    std::fs::write(&program, with_topic(program_in("docs/producers.md"), topic)).unwrap();
    run(Command::new(python(&requirements).unwrap()).arg(program)).unwrap();
}

#[test]
fn documented_python_producer_works() {
    let header = ("content-type", "application/json");
    produces_what_a_pipeline_handles("docs-python", header, produce_as_documented);
}

#[test]
fn node_producer_works() {
    let files = Scratch::new("docs-node").unwrap();
    let modules = node_modules(&clients().join("node")).unwrap();
    // Node.js looks for modules next to the program, regardless of NODE_PATH.
    std::os::unix::fs::symlink(modules, files.path().join("node_modules")).unwrap();
    produces_what_a_pipeline_handles("docs-node", ("tenant", "c"), |topic| {
        let program = files.path().join("produce.mjs");
        let text = std::fs::read_to_string(clients().join("node/produce.mjs")).unwrap();
        std::fs::write(&program, with_topic(text, topic)).unwrap();
        run(Command::new("node").arg(program)).unwrap();
    });
}

#[test]
#[ignore = "long"]
fn go_producer_works() {
    let files = Scratch::new("docs-go").unwrap();
    for file in ["go.mod", "go.sum"] {
        std::fs::copy(clients().join("go").join(file), files.path().join(file)).unwrap();
    }
    produces_what_a_pipeline_handles("docs-go", ("tenant", "b"), |topic| {
        let text = std::fs::read_to_string(clients().join("go/produce.go")).unwrap();
        std::fs::write(files.path().join("produce.go"), with_topic(text, topic)).unwrap();
        let mut go = kube_tools::go().unwrap();
        run(go.args(["run", "."]).current_dir(files.path())).unwrap();
    });
}

#[test]
fn python_package_writes_valid_records() {
    let pipe = PipeBuilder::new("python-producer").create();
    let package = clients().join("python/producer");
    let installed = Scratch::new("python-producer").unwrap();
    let python = &the_python().program;
    let mut install = Command::new(python);
    install
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
        .args(["--no-index", "--no-deps", "--no-build-isolation", "--target"])
        .args([installed.path(), &package]);
    run(&mut install).unwrap();
    let mut tests = Command::new(python);
    tests
        .arg(package.join("test_producer.py"))
        .env("PYTHONPATH", installed.path())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("BROKERS", brokers())
        .env("TOPIC", &*pipe.pipeline.source);
    run(&mut tests).unwrap();
    // The order of the README is refused.
    let program = program_in("examples/clients/python/README.md").replace("localhost:9092", &brokers());
    let mut readme = Command::new(python);
    readme
        .args(["-c", &program])
        .current_dir(clients().join("python"))
        .env("PYTHONPATH", installed.path());
    let printed = run(&mut readme).unwrap();
    assert!(printed.contains(" violates "), "{printed}");
    let written = pipe.read(std::slice::from_ref(&pipe.pipeline.source));
    assert_eq!(written.len(), 202);
    for record in &written {
        let key = record.key.as_deref().unwrap();
        let partitions = i32::try_from(pipe.env.partitions()).unwrap();
        assert_eq!(record.position.partition, partition_for_key(key, partitions));
        if key == b"many" {
            continue;
        }
        assert_eq!(record.value.as_deref(), Some(&br#"{"item": "book"}"#[..]));
        assert_eq!(text(record, "tenant").unwrap().as_deref(), Some("a"));
    }
}
