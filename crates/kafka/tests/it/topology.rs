//! Topics are created as they should be, judged as they are, and never changed.

use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{FutureProducer, FutureRecord};
use redeliver_core::{Pipeline, Span};
use redeliver_kafka::topology::{
    Applied, Severity, TopicSettings, TopologyError, TopologySpec, apply, check,
};
use redeliver_testkit::{brokers, unique};

const TIMEOUT: Duration = Duration::from_secs(30);

fn client() -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers());
    config
}

fn settings() -> TopicSettings {
    TopicSettings {
        partitions: 3,
        replication: 1,
        retention: Span::from_secs(7 * 86_400),
        dead_letter_retention: Span::from_secs(30 * 86_400),
    }
}

/// A pipeline whose topics no other test has: source, output, three tiers, due, dead letters.
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
    let admin: AdminClient<DefaultClientContext> = client().create().unwrap();
    let topic = NewTopic::new(name, 2, TopicReplication::Fixed(1));
    let topic = config
        .iter()
        .fold(topic, |topic, (name, value)| topic.set(name, value));
    admin.create_topics([&topic], &AdminOptions::new()).await.unwrap()[0]
        .as_ref()
        .unwrap();
}

async fn configured(topic: &str, name: &str) -> String {
    let admin: AdminClient<DefaultClientContext> = client().create().unwrap();
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
async fn what_is_missing_is_created_once_and_is_then_sound() {
    let pipeline = pipeline();
    let spec = spec(&pipeline);
    let applied = apply(&client(), &spec, TIMEOUT).await.unwrap();
    assert_eq!(created(&applied), 7);
    assert!(
        applied.iter().all(|topic| topic.findings.is_empty()),
        "{applied:?}"
    );
    assert_eq!(check(&client(), &spec, TIMEOUT).await.unwrap(), []);
    let again = apply(&client(), &spec, TIMEOUT).await.unwrap();
    assert_eq!((again.len(), created(&again)), (7, 0));

    let tier = format!("{}-retry-5s", pipeline.name);
    assert_eq!(configured(&tier, "cleanup.policy").await, "delete");
    assert_eq!(
        configured(&tier, "retention.ms").await,
        (7 * 86_400_000u64).to_string()
    );
    let limit = |topic: String| async move {
        configured(&topic, "max.message.bytes")
            .await
            .parse::<u32>()
            .unwrap()
    };
    let room = limit(tier).await - limit(pipeline.name.to_string()).await;
    assert_eq!(room, 16 * 1024, "records get headers on their way");
}

#[tokio::test]
async fn a_topic_created_a_moment_ago_loses_nothing() {
    let pipeline = pipeline();
    let settings = TopicSettings {
        partitions: 12,
        ..settings()
    };
    let spec = TopologySpec::for_pipelines(std::slice::from_ref(&pipeline), &settings);
    apply(&client(), &spec, TIMEOUT).await.unwrap();
    let producer: FutureProducer = client().set("enable.idempotence", "true").create().unwrap();
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
async fn checking_names_what_is_missing_and_creates_nothing() {
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
async fn topics_that_exist_are_judged_and_left_as_they_are() {
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
    let problems = |name: &str| {
        let topic = applied.iter().find(|topic| &*topic.topic == name).unwrap();
        let words = [
            "compacted",
            "keeps records",
            "retention.bytes",
            "takes records of",
        ];
        let mut found = Vec::new();
        for finding in &topic.findings {
            let word = words.iter().copied().find(|word| finding.problem.contains(word));
            found.push((finding.severity, word.unwrap()));
        }
        found
    };
    let (error, warning) = (Severity::Error, Severity::Warning);
    assert_eq!(
        problems(&tier),
        [
            (error, "compacted"),
            (error, "keeps records"),
            (warning, "retention.bytes")
        ]
    );
    assert_eq!(problems(&dead), [(error, "takes records of")]);
    assert_eq!(configured(&tier, "retention.ms").await, "1000");
    assert_eq!(configured(&dead, "max.message.bytes").await, "1000");
}

#[tokio::test]
async fn two_that_create_the_same_topics_at_once_both_succeed() {
    let spec = spec(&pipeline());
    let config = client();
    let (one, other) = tokio::join!(apply(&config, &spec, TIMEOUT), apply(&config, &spec, TIMEOUT));
    assert_eq!(created(&one.unwrap()) + created(&other.unwrap()), 7);
}

#[tokio::test]
async fn a_topic_that_kafka_refuses_is_named_with_the_reason() {
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
async fn a_kafka_that_does_not_answer_is_an_error_in_time() {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", "127.0.0.1:1");
    let began = Instant::now();
    let error = check(&config, &spec(&pipeline()), Duration::from_secs(1))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}
