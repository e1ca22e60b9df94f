//! The one-shot mode: a process ends with status 0 when nothing is left to do, and not before.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use redeliver_core::backoff::MAX_WAIT;
use redeliver_core::headers::ReservedHeaders;
use redeliver_core::pipeline::retry_tier_group;
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_kafka::backlog::{Mode, heads};
use redeliver_kafka::groups::members;
use redeliver_testkit::languages::{python, run};
use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{Reply, ServiceProcess, TestEnv};
use serde_json::{Value, json};

use crate::control::{Cli, tier_of};
use crate::deployment::{deploy, yaml};
use crate::services::Services;
use crate::support::{DEADLINE, Draft, PLAN, Pipe, PipeBuilder, records};
use crate::totals::totals;

const IDLE: &str = "idle; shutting down";

#[track_caller]
fn until_ended(enricher: &mut ServiceProcess) {
    let status = enricher.wait(DEADLINE);
    assert_eq!(status.code(), Some(0), "{}", enricher.output());
    assert!(enricher.output().contains(IDLE), "{}", enricher.output());
}

/// How many records of the pipeline have ended, and how many wait.
#[track_caller]
fn ended_and_waiting(pipe: &Pipe) -> (u64, u64) {
    let report = pipe.audit();
    assert!(report.is_clean(), "{report}");
    (report.output + report.dead, report.waiting.total())
}

/// How many records wait in the first tier that were due at a time.
#[track_caller]
fn waiting_and_due(pipe: &Pipe, at: Timestamp) -> usize {
    let group = retry_tier_group(&pipe.kafka.id_prefix, pipe.pipeline.policy.tiers()[0]);
    let topic = pipe.first_tier();
    let is_due = |record| {
        let headers = ReservedHeaders::read(&record).unwrap();
        headers.process_after(at, MAX_WAIT).unwrap() <= at
    };
    let heads = heads(
        &pipe.kafka,
        &[(group, topic.clone())],
        Mode::Heads,
        i64::MAX,
        DEADLINE,
        is_due,
    )
    .unwrap();
    heads[&topic].first.iter().filter(|is_due| **is_due).count()
}

#[test]
fn processes_end_with_their_retries() {
    let pipe = PipeBuilder::new("idle-retries").plan(PLAN).create();
    let sent = pipe.produce(records(200));
    let _tier = pipe.retry_tier("a");
    // Each of the two ends when the whole group is idle.
    let mut enrichers = ["a", "b"].map(|instance| pipe.spawn("enricher", instance, &["--until-idle=1m"]));
    enrichers.iter_mut().for_each(until_ended);
    assert_eq!(ended_and_waiting(&pipe), (200, 0));
    let members = members(&pipe.kafka, DEADLINE).unwrap();
    let group = pipe.pipeline.worker_group(&pipe.kafka.id_prefix);
    assert_eq!(members.get(&group), None, "they have left the group for good");
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets(&PLAN, &sent);
    let total = |name: &str| -> u64 {
        let values = enrichers
            .iter()
            .map(|enricher| totals(enricher)[name].parse::<u64>().unwrap());
        values.sum()
    };
    assert_eq!(total("succeeded"), ends.report.output);
    assert_eq!(total("dead"), ends.report.dead);
    assert!(total("retried") > 0, "records have waited");
}

#[test]
fn later_retries_are_left() {
    let pipe = PipeBuilder::new("idle-later")
        .with_inspector()
        .tiers(&[600_000])
        .behave(|_| Reply::status(503))
        .create();
    pipe.produce(records(150));
    let mut enricher = pipe.spawn("enricher", "a", &["--until-idle"]);
    until_ended(&mut enricher);
    assert_eq!(ended_and_waiting(&pipe), (0, 150));
    assert_eq!(totals(&enricher)["retried"], "150");

    let mut patient = pipe.spawn("enricher", "b", &["--until-idle=1h"]);
    patient.wait_for_output(
        &format!("records of topic `{}` are due", pipe.first_tier()),
        DEADLINE,
    );
    // It waits, and a signal ends it as any other process.
    patient.shut_down();
    assert!(!patient.output().contains(IDLE), "{}", patient.output());
    assert_eq!(totals(&patient)["completed"], "0");

    // A tier does not wait for what is not due, but releases what an operator wants to be early.
    let mut tier = pipe.spawn("retry-tier", "tier", &["--until-idle"]);
    until_ended(&mut tier);
    assert_eq!(totals(&tier)["completed"], "0");
    let mut inspector = pipe.start("dlq-inspector", "a", &[]);
    Cli::new(&pipe, &mut inspector).change(&["release", &tier_of(&pipe)]);
    let mut tier = pipe.spawn("retry-tier", "again", &["--until-idle"]);
    until_ended(&mut tier);
    assert_eq!(totals(&tier)["completed"], "150");
}

#[test]
fn process_waits_for_its_endpoint() {
    let pipe = PipeBuilder::new("idle-down")
        .breaker("{ failures: 3, rate: null, open_max: 1s }")
        .create();
    pipe.endpoint.down(true);
    let sent = pipe.produce(records(20));
    let mut enricher = pipe.spawn("enricher", "a", &["--until-idle"]);
    enricher.wait_for_output("not idle yet reason=the circuit breaker of pipeline", DEADLINE);
    assert!(!enricher.output().contains(IDLE), "{}", enricher.output());
    pipe.endpoint.down(false);
    until_ended(&mut enricher);
    assert_eq!(ended_and_waiting(&pipe), (20, 0));
    pipe.settle(&sent, DEADLINE);
    assert_eq!(totals(&enricher)["succeeded"], "20");
    assert_eq!(totals(&enricher)["retried"], "0");
}

#[test]
fn late_record_is_processed_once() {
    let pipe = PipeBuilder::new("idle-late").create();
    let mut sent = pipe.produce(records(50));
    let mut enricher = pipe.spawn("enricher", "a", &["--until-idle"]);
    enricher.wait_for_output(IDLE, DEADLINE);
    sent.extend(pipe.produce(records(50)));
    until_ended(&mut enricher);
    enricher.start_again();
    until_ended(&mut enricher);
    assert_eq!(ended_and_waiting(&pipe), (100, 0));
    pipe.settle(&sent, DEADLINE);
}

#[test]
fn periodic_runs_need_no_service() {
    let pipe = PipeBuilder::new("idle-periodic")
        .tiers(&[1_000])
        .plan(PLAN)
        .create();
    let sent = pipe.produce(records(100));
    let mut runs = 0;
    while ended_and_waiting(&pipe) != (100, 0) {
        let began = SystemClock.now();
        let mut tier = pipe.spawn("retry-tier", "tier", &["--until-idle"]);
        until_ended(&mut tier);
        assert_eq!(
            waiting_and_due(&pipe, began),
            0,
            "the tier has released what was due"
        );
        let mut enricher = pipe.spawn("enricher", "worker", &["--until-idle"]);
        until_ended(&mut enricher);
        runs += 1;
        assert!(runs < 50, "records never end");
    }
    assert!(runs > 1, "records have waited");
    pipe.settle(&sent, DEADLINE).meets(&PLAN, &sent);
}

/// Programs with these names, which run ours with the configuration of a test.
pub(crate) fn programs(env: &TestEnv, names: &[&str]) -> Scratch {
    let directory = Scratch::new("programs").unwrap();
    for name in names {
        let command = env.command(name, &[]);
        let quoted = |word: &OsStr| format!("'{}'", word.to_str().unwrap());
        let (program, configuration) = (quoted(command.get_program()), command.get_args().map(quoted));
        let configuration = configuration.collect::<Vec<_>>().join(" ");
        let file = directory.path().join(name);
        std::fs::write(
            &file,
            format!("#!/bin/sh\nexec {program} \"$@\" {configuration}\n"),
        )
        .unwrap();
        std::fs::set_permissions(file, Permissions::from_mode(0o755)).unwrap();
    }
    directory
}

#[test]
#[ignore = "long"]
fn airflow_runs_until_nothing_waits() {
    let example = deploy().join("one-shot");
    let python = python(&example.join("requirements.txt")).unwrap();
    let services = Services::new("airflow");
    let pipe = &services.pipe;
    let bodies =
        (0..20_usize).map(|n| Draft::new(format!("k{n}"), format!("{} {n}", ["fine", "shaky"][n % 2])));
    pipe.produce(bodies.collect());
    let programs = programs(&pipe.env, &["scheduler", "retry-tier", "enricher"]);
    let home = Scratch::new("airflow").unwrap();
    let path = std::env::join_paths([programs.path(), Path::new("/usr/bin"), Path::new("/bin")]).unwrap();
    let airflow = |arguments: &[&str]| {
        let mut command = Command::new(&python);
        command
            .env_clear()
            .env("PATH", &path)
            .env("HOME", home.path())
            .env("AIRFLOW_HOME", home.path())
            .env("AIRFLOW__CORE__DAGS_FOLDER", &example)
            .env("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .args(["-m", "airflow"])
            .args(arguments);
        run(&mut command).unwrap()
    };
    airflow(&["db", "migrate"]);
    let mut runs = 0;
    while ended_and_waiting(pipe) != (20, 0) {
        let printed = airflow(&["dags", "test", "redeliver"]);
        assert!(!printed.contains("DagRun failed"), "{printed}");
        runs += 1;
        assert!(runs < 10, "records never end");
    }
    assert!(runs > 1, "records have waited");
}

/// Runs these programs with their arguments, one after the other, until all records have ended.
#[track_caller]
fn runs_until_nothing_waits(
    name: &str,
    tasks: &[(String, Vec<String>)],
    command: impl Fn(&Path, &str) -> Command,
) {
    let services = Services::new(name);
    let pipe = &services.pipe;
    let bodies =
        (0..20_usize).map(|n| Draft::new(format!("k{n}"), format!("{} {n}", ["fine", "shaky"][n % 2])));
    pipe.produce(bodies.collect());
    let programs = programs(&pipe.env, &["scheduler", "retry-tier", "enricher"]);
    let mut runs = 0;
    while ended_and_waiting(pipe) != (20, 0) {
        for (program, arguments) in tasks {
            let mut command = command(programs.path(), program);
            let printed = run(command.args(arguments)).unwrap();
            assert!(printed.contains(IDLE), "{program}: {printed}");
        }
        runs += 1;
        assert!(runs < 50, "records never end");
    }
    assert!(runs > 1, "records have waited");
}

fn texts(list: &Value) -> Vec<String> {
    let texts = list.as_array().unwrap().iter();
    texts.map(|text| text.as_str().unwrap().to_owned()).collect()
}

#[test]
fn databricks_runs_until_nothing_waits() {
    let example = deploy().join("one-shot");
    let job: Value =
        serde_json::from_slice(&std::fs::read(example.join("databricks_job.json")).unwrap()).unwrap();
    let tasks = job["tasks"].as_array().unwrap();
    for (task, next) in tasks.iter().zip(&tasks[1..]) {
        assert_eq!(next["depends_on"], json!([{ "task_key": task["task_key"] }]));
    }
    let tasks: Vec<_> = tasks
        .iter()
        .map(|task| {
            let mut arguments = texts(&task["spark_python_task"]["parameters"]);
            assert_eq!(task["task_key"], arguments[0]);
            (arguments.remove(0), arguments)
        })
        .collect();
    runs_until_nothing_waits("databricks", &tasks, |programs, program| {
        let mut command = Command::new("python3");
        command
            .arg(example.join("databricks_run.py"))
            .arg(program)
            .env("REDELIVER_PROGRAMS", programs);
        command
    });
}

/// The containers of the CronJob in their order, with the configuration of the test.
#[test]
fn cronjob_runs_until_nothing_waits() {
    let job = yaml("one-shot/cronjob.yaml");
    let pod = &job["spec"]["jobTemplate"]["spec"]["template"]["spec"];
    let containers = ["initContainers", "containers"].map(|of| pod[of].as_array().unwrap());
    let tasks: Vec<_> = containers
        .into_iter()
        .flatten()
        .map(|container| {
            let program = container["name"].as_str().unwrap();
            let image = container["image"].as_str().unwrap();
            assert!(image.starts_with(&format!("redeliver-{program}:")), "{image}");
            let mut arguments = texts(&container["args"]);
            assert_eq!(arguments.remove(0), "--config=/etc/redeliver/redeliver.yaml");
            (program.to_owned(), arguments)
        })
        .collect();
    runs_until_nothing_waits("cronjob", &tasks, |programs, program| {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "exec \"$0\" \"$@\" 2>&1"])
            .arg(programs.join(program));
        command
    });
}

#[test]
fn databricks_knows_each_field() {
    let job = deploy().join("one-shot/databricks_job.json");
    let program = "import json, sys\n\
                   from databricks.sdk.service.jobs import JobSettings\n\
                   job = json.load(open(sys.argv[1]))\n\
                   print(JobSettings.from_dict(job).as_dict() == job)";
    let mut command = Command::new(python(&deploy().join("requirements.txt")).unwrap());
    let answer = run(command.args(["-c", program]).arg(job)).unwrap();
    assert_eq!(answer.trim(), "True");
}
