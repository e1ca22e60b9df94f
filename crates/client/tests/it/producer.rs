//! What `JobProducer` writes to Kafka.

use std::sync::Arc;
use std::time::Duration;

use redeliver_client::{
    Headers, InvalidCommand, InvalidRequest, JobId, JobProducer, JobRequest, KafkaSettings, ScheduleError,
    Timestamp, TraceContext, When,
};
use redeliver_core::{HumanDuration, Record};
use redeliver_kafka::murmur2::partition_for_key;
use redeliver_kafka::reader::TopicReader;
use redeliver_kafka::topology::{self, Role, TopicSettings, TopicSpec, TopologySpec};
use redeliver_proto::convert::from_duration;
use redeliver_proto::v1::job_command::Command;
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::{brokers, unique};

pub(crate) const PARTITIONS: i32 = 7;
pub(crate) const SOON: Duration = Duration::from_secs(60);

pub(crate) struct Ingest {
    pub(crate) kafka: KafkaSettings,
    pub(crate) topic: Arc<str>,
}

impl Ingest {
    pub(crate) async fn create(name: &str) -> Self {
        Self::create_at(brokers(), name).await
    }

    pub(crate) async fn create_at(brokers: String, name: &str) -> Self {
        let topic: Arc<str> = unique(name).into();
        let kafka = KafkaSettings::new(brokers, unique("client"));
        let settings = TopicSettings {
            partitions: PARTITIONS,
            replication: 1,
            retention: HumanDuration::from_secs(7 * 86_400),
            dead_letter_retention: HumanDuration::from_secs(7 * 86_400),
        };
        let spec = TopicSpec::new(topic.clone(), Role::Input, "commands", &settings);
        let spec = TopologySpec::of([spec]);
        topology::apply(&kafka.client(), &spec, SOON).await.unwrap();
        Self { kafka, topic }
    }

    fn producer(&self) -> JobProducer {
        JobProducer::new(&self.kafka, self.topic.clone()).unwrap()
    }

    pub(crate) async fn records(&self) -> Vec<Record> {
        let (kafka, topic) = (self.kafka.clone(), self.topic.clone());
        let read = tokio::task::spawn_blocking(move || {
            let mut records = Vec::new();
            let mut reader = TopicReader::new(&kafka, &[topic]).unwrap();
            reader.read_to_end(SOON, |record| records.push(record)).unwrap();
            records
        });
        read.await.unwrap()
    }
}

fn command(record: &Record) -> Command {
    let value = record.value.clone().unwrap();
    v1::JobCommand::decode(value).unwrap().command.unwrap()
}

fn id_of(record: &Record) -> JobId {
    JobId::new(
        record.timestamp.unwrap(),
        record.position.partition,
        record.position.offset,
    )
}

fn protobuf() -> Headers {
    [("content-type", Some(&b"application/x-protobuf"[..]))]
        .into_iter()
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn job_id_encodes_its_position() {
    let ingest = Ingest::create("client-schedule").await;
    let due = Timestamp::from_millis(1_900_000_000_123);
    let trace = TraceContext {
        traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned(),
        tracestate: Some("a=b".to_owned()),
    };
    let request = JobRequest::at("sms", due)
        .key("customer-7")
        .idempotency_key("sms-12345")
        .trace(trace.clone());
    let id = ingest.producer().schedule(&request).await.unwrap();

    let [record] = &ingest.records().await[..] else {
        panic!("not one record")
    };
    assert_eq!(
        record.position.partition,
        partition_for_key(b"sms\0sms-12345", PARTITIONS)
    );
    assert_eq!(id, id_of(record));
    assert_eq!(record.key.as_deref(), Some(&b"customer-7"[..]));
    let mut expected = protobuf();
    expected.push_text("traceparent", &trace.traceparent);
    expected.push_text("tracestate", "a=b");
    assert_eq!(record.headers, expected);
    let Command::Schedule(spec) = command(record) else {
        panic!("not a job")
    };
    assert_eq!((spec.app.as_str(), spec.idempotency_key()), ("sms", "sms-12345"));
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_without_key_are_spread() {
    let ingest = Ingest::create("client-spread").await;
    let producer = ingest.producer();
    let mut ids = Vec::new();
    for _ in 0..200 {
        let request = JobRequest::after("sms", Duration::from_secs(5)).key("always the same");
        ids.push(producer.schedule(&request).await.unwrap());
    }
    let mut written: Vec<JobId> = ingest.records().await.iter().map(id_of).collect();
    written.sort_unstable();
    ids.sort_unstable();
    assert_eq!(ids, written);
    // The probability that 200 random jobs miss one of 7 partitions is about 10^-12.
    for shard in 0..PARTITIONS {
        assert!(ids.iter().any(|id| id.shard() == shard), "{shard}: {ids:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_follow_their_job() {
    let ingest = Ingest::create("client-commands").await;
    let producer = ingest.producer();
    let id = JobId::new(Timestamp::from_millis(1_763_722_800_123), PARTITIONS - 1, 9);
    producer
        .reschedule(id, When::After(Duration::from_secs(7)))
        .await
        .unwrap();
    producer.cancel(id).await.unwrap();
    let records = ingest.records().await;
    for record in &records {
        assert_eq!(record.position.partition, PARTITIONS - 1);
        assert_eq!(record.headers, protobuf());
        assert_eq!(record.key.as_deref(), Some(id.to_string().as_bytes()));
    }
    let [first, second] = &records[..] else {
        panic!("{records:?}")
    };
    let Command::Reschedule(reschedule) = command(first) else {
        panic!("{first:?}")
    };
    let Some(v1::reschedule_job::When::Delay(delay)) = &reschedule.when else {
        panic!("{reschedule:?}")
    };
    assert_eq!(from_duration(delay), Some(HumanDuration::from_secs(7)));
    let Command::Cancel(cancel) = command(second) else {
        panic!("{second:?}")
    };
    assert_eq!((reschedule.id, cancel.id), (id.to_string(), id.to_string()));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_command_is_not_written() {
    let ingest = Ingest::create("client-refused").await;
    let producer = ingest.producer();
    let foreign = JobId::new(Timestamp::from_millis(1), PARTITIONS, 0);
    let refused = producer.cancel(foreign).await.unwrap_err();
    assert!(
        matches!(
            refused,
            ScheduleError::Invalid(InvalidCommand::ForeignJob {
                partitions: PARTITIONS,
                ..
            })
        ),
        "{refused}"
    );
    let without_app = JobRequest::after("", Duration::ZERO);
    let refused = producer.schedule(&without_app).await.unwrap_err();
    assert!(
        matches!(
            refused,
            ScheduleError::Invalid(InvalidCommand::Request(InvalidRequest { field: "app", .. }))
        ),
        "{refused}"
    );
    assert_eq!(ingest.records().await.len(), 0);

    let missing = unique("client-missing");
    let producer = JobProducer::new(&ingest.kafka, missing.as_str()).unwrap();
    let refused = producer
        .schedule(&JobRequest::after("sms", Duration::ZERO))
        .await
        .unwrap_err();
    let cause = std::error::Error::source(&refused).unwrap().to_string();
    assert_eq!(cause, format!("topic `{missing}` does not exist"));
}
