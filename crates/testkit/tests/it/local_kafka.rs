//! A broker of one's own keeps its port and its data whatever happens to its process.

use redeliver_testkit::LocalKafka;
use redeliver_testkit::local_kafka::{answers, kafka_tool};

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
fn data_and_port_outlive_a_kill_and_an_orderly_restart() {
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
fn a_broker_that_cannot_start_says_why() {
    let error = LocalKafka::start_with(&[("log.cleaner.threads", "many")]).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("log.cleaner.threads"), "{text}");
}
