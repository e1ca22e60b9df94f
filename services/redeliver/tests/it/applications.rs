//! `examples/applications`: the commands of its README, with its configuration.

use std::path::Path;
use std::process::Command;

use redeliver_core::headers::RETRY_COUNT;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::TopicReader;
use redeliver_testkit::languages::run;
use redeliver_testkit::{EnvBuilder, Process, TestEnv, binary, ensure, eventually, free_port, redis_url};
use serde_json::Value;

use crate::docs::repository;
use crate::support::DEADLINE;

const README: &str = include_str!("../../../../examples/applications/README.md");
const CONFIG: &str = include_str!("../../../../examples/applications/applications.yaml");

/// The configuration as it is shipped, with topics and addresses that belong to the test.
fn env(endpoint: &str) -> TestEnv {
    let [scheduler, inspector] = [free_port(), free_port()];
    let redis = redis_url();
    let scheduler = format!(
        "scheduler:\n  listen: 127.0.0.1:{scheduler}\n  group: '{{name}}-scheduler'\n  topics: {{ ingest: '{{name}}-ingest', \
         state: '{{name}}-state', dlq: '{{name}}-rejected', answers: '{{name}}-answers' }}\n"
    );
    let config = CONFIG
        .replace("-jobs", "-jobs-{name}")
        .replace("localhost:8080", endpoint)
        .replace("scheduler:\n", &scheduler);
    let more = format!(
        "redis: {{ url: '{redis}', prefix: '{{name}}' }}\ncontrol: {{ topic: '{{name}}-control' }}\naudit: {{ topic: '{{name}}-audit' }}\n\
         dlq_inspector:\n  listen: 127.0.0.1:{inspector}\n  topics: ['*-{{name}}-dlq']\n  data_dir: '{{dir}}/index'\n  \
         redrive: {{ topic: '{{name}}-redrives' }}\n"
    );
    EnvBuilder::new("applications").yaml(&config).yaml(&more).build()
}

/// Runs a command of the README in a shell.
fn shell(env: &TestEnv, command: &str) -> Result<String, String> {
    let program = binary("redeliver");
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", command])
        .env("PATH", Path::new(program.get_program()).parent().unwrap())
        .env("REDELIVER_CONFIG", env.file());
    run(&mut shell).map_err(|error| format!("{error:#}"))
}

/// The numbers of the jobs in a topic, each with its number of failed attempts.
fn ends(env: &TestEnv, topic: &str) -> Vec<String> {
    let kafka = KafkaSettings::new(env.brokers().to_owned(), "applications-test");
    let mut ends = Vec::new();
    let mut reader = TopicReader::new(&kafka, &[topic.into()]).unwrap();
    let read = reader.read_to_end(DEADLINE, |record| {
        let value: Value = serde_json::from_slice(record.value.as_deref().unwrap()).unwrap();
        let failed = record.headers.last(RETRY_COUNT).unwrap_or_default();
        ends.push(format!("{} {}", value["number"], String::from_utf8_lossy(failed)));
    });
    read.unwrap();
    ends.sort_unstable();
    ends
}

#[test]
fn three_applications_end_as_documented() {
    let endpoint = format!("127.0.0.1:{}", free_port());
    let env = env(&endpoint);
    let blocks: Vec<&str> = README.split("```\n").skip(1).step_by(2).collect();
    let [start, schedule, look] = blocks[..] else {
        panic!("{blocks:?}")
    };
    let (mut services, mut providers) = (Vec::new(), Vec::new());
    for command in start.lines() {
        let words: Vec<&str> = command.split(' ').collect();
        match words[0] {
            "export" => {}
            "redeliver" => _ = shell(&env, command).unwrap(),
            "python3" => {
                let mut provider = Command::new(words[0]);
                provider.arg(repository().join(words[1])).arg(&endpoint);
                providers.push(Process::spawn(provider).unwrap());
            }
            service => services.push(env.start(service, "a", &[])),
        }
    }
    assert_eq!((services.len(), providers.len()), (4, 1));
    for command in schedule.lines() {
        shell(&env, command).unwrap();
    }
    let name = env.name();
    for (topic, expected) in [
        (format!("sms-jobs-{name}-done"), &["49303 0", "49304 0"][..]),
        (format!("call-jobs-{name}-done"), &["49307 0"]),
        (format!("payment-jobs-{name}-done"), &["1005 1"]),
        (format!("payment-jobs-{name}-dlq"), &["1008 1"]),
    ] {
        eventually(&topic, DEADLINE, || {
            let ends = ends(&env, &topic);
            ensure(ends == expected, format!("{ends:?}"))
        });
    }
    eventually("everything is shown", DEADLINE, || {
        let printed: String = look
            .lines()
            .map(|command| shell(&env, command))
            .collect::<Result<_, _>>()?;
        let is_shown = ["sms ", "call ", "payment ", "http.422", "  clean: "]
            .iter()
            .all(|text| printed.contains(text));
        ensure(is_shown, printed)
    });
}
