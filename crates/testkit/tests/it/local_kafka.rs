//! A local broker keeps its port and its data over kills and restarts.

use std::time::Duration;

use redeliver_testkit::local_kafka::{answers, kafka_tool};
use redeliver_testkit::{LocalKafka, ensure, eventually};

fn topics(kafka: &LocalKafka, arguments: &[&str]) -> String {
    let mut tool = kafka_tool("org.apache.kafka.tools.TopicCommand").unwrap();
    let output = tool
        .args(["--bootstrap-server", &kafka.brokers()])
        .args(arguments)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn data_and_port_survive_restarts() {
    let mut kafka = LocalKafka::start().unwrap();
    let brokers = kafka.brokers();
    topics(&kafka, &["--create", "--topic", "kept", "--partitions", "3"]);

    kafka.kill_9();
    assert!(answers(&brokers).is_err());
    kafka.start_again().unwrap();
    kafka.restart().unwrap();

    assert_eq!(kafka.brokers(), brokers);
    answers(&brokers).unwrap();
    assert!(topics(&kafka, &["--list"]).lines().any(|topic| topic == "kept"));

    let process = kafka.process().id();
    drop(kafka);
    assert!(!process.is_running());
}

#[test]
fn broker_reports_why_it_ends() {
    let error = LocalKafka::start_with(&[("log.cleaner.threads", "many")]).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("log.cleaner.threads"), "{text}");
}

#[test]
fn restarted_broker_leads_again() {
    let [first, mut second] = LocalKafka::start_pair().unwrap();
    let create = [
        "--create",
        "--topic",
        "twice",
        "--partitions",
        "4",
        "--replication-factor",
        "2",
    ];
    topics(&first, &create);
    let led = |kafka: &LocalKafka| topics(kafka, &["--describe", "--topic", "twice"]);
    assert!(led(&first).contains("Leader: 2"));
    second.kill_9();
    eventually("the first one leads all", Duration::from_secs(60), || {
        let led = led(&first);
        ensure(led.matches("Leader: 1").count() == 4, led)
    });
    second.start_again().unwrap();
    eventually("the second one leads again", Duration::from_secs(60), || {
        let led = led(&first);
        ensure(led.contains("Leader: 2"), led)
    });
}
