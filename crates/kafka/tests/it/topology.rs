//! Missing topics are created, existing ones are checked and never changed.

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{FutureProducer, FutureRecord};
use redeliver_core::{HumanDuration, Pipeline};
use redeliver_kafka::topology::{
    Applied, MIN_RETENTION, Role, Severity, TopicSettings, TopicSpec, TopologyError, TopologySpec, apply,
    check,
};
use redeliver_kafka::{ClientSettings, KafkaClient, KafkaSettings, reader};
use redeliver_testkit::{brokers, unique};

use crate::support::{self, create_topic_with};

const TIMEOUT: Duration = Duration::from_secs(30);

fn client() -> ClientSettings {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers());
    config.into()
}

fn settings() -> TopicSettings {
    TopicSettings {
        partitions: 3,
        replication: 1,
        retention: HumanDuration::from_secs(7 * 86_400),
        dead_letter_retention: HumanDuration::from_secs(30 * 86_400),
    }
}

/// A pipeline with unique topics: source, output, three tiers, due topic, dead-letter topic.
fn pipeline() -> Pipeline {
    let name = unique("topology");
    Pipeline {
        output: Some(format!("{name}-results").into()),
        ..Pipeline::new(&name)
    }
}

fn spec(pipeline: &Pipeline) -> TopologySpec {
    TopologySpec::for_pipelines(std::slice::from_ref(pipeline), &settings())
}

fn created(applied: &[Applied]) -> usize {
    applied.iter().filter(|topic| topic.created).count()
}

async fn create(name: &str, config: &[(&str, &str)]) {
    create_topic_with(&support::settings("topology"), name, 2, config).await;
}

async fn configured(topic: &str, name: &str) -> String {
    let admin: KafkaClient<AdminClient<DefaultClientContext>> = client().create().unwrap();
    let resource = ResourceSpecifier::Topic(topic);
    let described = admin
        .describe_configs([&resource], &AdminOptions::new())
        .await
        .unwrap();
    described[0]
        .as_ref()
        .unwrap()
        .get(name)
        .unwrap()
        .value
        .clone()
        .unwrap()
}

#[tokio::test]
async fn new_topic_loses_no_records() {
    let pipeline = pipeline();
    let settings = TopicSettings {
        partitions: 12,
        ..settings()
    };
    let spec = TopologySpec::for_pipelines(std::slice::from_ref(&pipeline), &settings);
    apply(&client(), &spec, TIMEOUT).await.unwrap();
    let producer: KafkaClient<FutureProducer> = client().set("enable.idempotence", "true").create().unwrap();
    let mut deliveries = Vec::new();
    for topic in &spec.topics {
        for partition in 0..12 {
            let record = FutureRecord::<(), _>::to(&topic.name)
                .partition(partition)
                .payload("first");
            deliveries.push(producer.send_result(record).unwrap());
        }
    }
    for delivery in deliveries {
        assert_eq!(delivery.await.unwrap().unwrap().offset, 0);
    }
}

#[tokio::test]
async fn check_creates_no_topics() {
    let spec = spec(&pipeline());
    for _ in 0..2 {
        let findings = check(&client(), &spec, TIMEOUT).await.unwrap();
        assert_eq!(findings.len(), 7);
        for finding in findings {
            assert_eq!(
                (finding.severity, &*finding.problem),
                (Severity::Error, "does not exist")
            );
        }
    }
}

#[tokio::test]
async fn short_offset_retention_is_reported() {
    let pipeline = pipeline();
    create(&pipeline.source, &[("retention.ms", "-1")]).await;
    // A dead-letter topic is not read by a group.
    create(&pipeline.dead_letter_topic(), &[("retention.ms", "-1")]).await;
    let applied = apply(&client(), &spec(&pipeline), TIMEOUT).await.unwrap();
    let findings: Vec<String> = applied
        .iter()
        .flat_map(|topic| &topic.findings)
        .map(ToString::to_string)
        .filter(|finding| finding.contains("offsets.retention.minutes"))
        .collect();
    let [finding] = findings.as_slice() else {
        panic!("{findings:?}");
    };
    let begin = format!(
        "warning: topic `{}` keeps records forever, but the brokers delete the committed offsets of a consumer group \
         that has had no members for 7d (offsets.retention.minutes=10080)",
        pipeline.source
    );
    assert!(finding.starts_with(&begin), "{finding}");
}

#[tokio::test]
async fn existing_topics_are_not_changed() {
    let pipeline = pipeline();
    let spec = spec(&pipeline);
    let tier = format!("{}-retry-30s", pipeline.name);
    let dead = format!("{}-dlq", pipeline.name);
    create(
        &tier,
        &[
            ("cleanup.policy", "compact,delete"),
            ("retention.ms", "1000"),
            ("retention.bytes", "9"),
        ],
    )
    .await;
    create(&dead, &[("max.message.bytes", "1000"), ("retention.ms", "-1")]).await;
    let applied = apply(&client(), &spec, TIMEOUT).await.unwrap();
    assert_eq!(created(&applied), 5);
    let errors = |name: &str| {
        let topic = applied.iter().find(|topic| &*topic.topic == name).unwrap();
        let findings = topic.findings.iter();
        findings
            .filter(|finding| finding.severity == Severity::Error)
            .count()
    };
    assert_eq!((errors(&tier), errors(&dead)), (2, 1));
    assert_eq!(configured(&tier, "retention.ms").await, "1000");
    assert_eq!(configured(&dead, "max.message.bytes").await, "1000");
}

#[tokio::test]
async fn topics_are_created_concurrently() {
    let spec = spec(&pipeline());
    let config = client();
    let (one, other) = tokio::join!(apply(&config, &spec, TIMEOUT), apply(&config, &spec, TIMEOUT));
    assert_eq!(created(&one.unwrap()) + created(&other.unwrap()), 7);
}

#[tokio::test]
async fn refused_topic_names_the_reason() {
    let settings = TopicSettings {
        replication: 30,
        ..settings()
    };
    let spec = TopologySpec::for_pipelines(&[pipeline()], &settings);
    let error = apply(&client(), &spec, TIMEOUT).await.unwrap_err();
    assert!(
        matches!(error, TopologyError::Refused { replication: 30, .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("number of brokers"), "{error}");
}

#[tokio::test]
async fn unreachable_kafka_is_an_error() {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", "127.0.0.1:1");
    let error = check(&config.into(), &spec(&pipeline()), Duration::from_secs(1))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
}

/// The topics of a pipeline, and those of a service that its records go through: what comes in, what waits, and what it sends.
fn joined(name: &str) -> TopologySpec {
    let (pipeline, settings) = (pipeline(), settings());
    let new = |of: &str, role| TopicSpec::new(format!("{name}-{of}"), role, "jobs", &settings);
    let ingest = new("ingest", Role::Input).deleted_after(settings.retention, MIN_RETENTION);
    let state = TopicSpec {
        partitions_as: Some(ingest.name.clone()),
        sources: vec![ingest.name.clone()],
        ..new("state", Role::State).compacted()
    };
    let ingest = TopicSpec {
        sources: vec![pipeline.source.clone()],
        ..ingest
    };
    spec(&pipeline).join(TopologySpec::of([ingest, state, new("app", Role::Output)]))
}

async fn partitions(topic: &str) -> usize {
    let settings = KafkaSettings::new(brokers(), "topology-test");
    let topic = topic.to_owned();
    let request = move || reader::partitions(&settings, &topic).unwrap();
    usize::try_from(tokio::task::spawn_blocking(request).await.unwrap()).unwrap()
}

#[tokio::test]
async fn missing_topics_are_created_once() {
    let name = unique("jobs");
    let (ingest, state) = (format!("{name}-ingest"), format!("{name}-state"));
    let spec = joined(&name);
    let applied = apply(&client(), &spec, TIMEOUT).await.unwrap();
    assert_eq!(created(&applied), 10);
    assert!(
        applied.iter().all(|topic| topic.findings.is_empty()),
        "{applied:?}"
    );
    assert_eq!(check(&client(), &spec, TIMEOUT).await.unwrap(), []);
    let again = apply(&client(), &spec, TIMEOUT).await.unwrap();
    assert_eq!((again.len(), created(&again)), (10, 0));
    assert_eq!(configured(&state, "cleanup.policy").await, "compact");
    assert_eq!(configured(&state, "delete.retention.ms").await, "604800000");
    assert_eq!(configured(&ingest, "cleanup.policy").await, "delete");
    assert_eq!(configured(&ingest, "retention.ms").await, "604800000");
    // A record of the source fits into the ingest topic, and a command fits into the state topic.
    let mut limits = Vec::new();
    for topic in [&*spec.topics[0].name, &ingest, &state] {
        let limit = configured(topic, "max.message.bytes").await;
        limits.push(limit.parse::<u32>().unwrap());
    }
    assert_eq!((limits[1] - limits[0], limits[2] - limits[1]), (16_384, 16_384));
}

#[tokio::test]
async fn state_topic_follows_ingest_partitions() {
    let name = unique("jobs");
    // With 2 partitions instead of the configured 3.
    create(&format!("{name}-ingest"), &[]).await;
    let applied = apply(&client(), &joined(&name), TIMEOUT).await.unwrap();
    assert_eq!(created(&applied), 9);
    let findings = applied.iter().flat_map(|topic| &topic.findings);
    let errors = findings.filter(|finding| finding.severity == Severity::Error);
    assert_eq!(errors.count(), 0, "{applied:?}");
    assert_eq!(partitions(&format!("{name}-state")).await, 2);
    assert_eq!(partitions(&format!("{name}-app")).await, 3);
}
