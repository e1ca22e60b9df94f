//! What the producer reports about records that it has written.

use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{Output, Position, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::lookup::Lookup;
use redeliver_kafka::producer::{Producer, Written};
use redeliver_testkit::{LocalKafka, unique};
use tokio::task::JoinSet;

use crate::support::{self, DEADLINE, create_topic_with};

/// The client repeats a request that has got no answer for this long.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// A batch collects records for this long.
const LINGER: Duration = Duration::from_millis(300);

fn output(topic: &Arc<str>, number: usize) -> Output {
    support::output(topic.clone(), Some(0), None, Some(number.to_string().into()))
}

/// What the log contains at these positions.
async fn timestamps_in_log(settings: &KafkaSettings, positions: Vec<Position>) -> Vec<Option<Timestamp>> {
    let settings = settings.clone();
    let read = tokio::task::spawn_blocking(move || {
        let mut lookup = Lookup::new(&settings).unwrap();
        lookup.get(&positions, DEADLINE).unwrap()
    });
    let stored = read.await.unwrap().into_iter();
    stored.map(|stored| stored.unwrap().record.timestamp).collect()
}

async fn assert_reported(settings: &KafkaSettings, written: &[Written]) {
    let positions = written.iter().map(|written| written.position.clone()).collect();
    let reported: Vec<_> = written.iter().map(|written| written.timestamp).collect();
    assert_eq!(timestamps_in_log(settings, positions).await, reported);
}

#[tokio::test(flavor = "multi_thread")]
async fn timestamps_match_the_log() {
    let kafka = LocalKafka::start().unwrap();
    let mut settings = KafkaSettings::new(kafka.brokers(), unique("producer"));
    let millis = |time: Duration| time.as_millis().to_string();
    settings.properties.extend([
        ("linger.ms".to_owned(), millis(LINGER)),
        ("request.timeout.ms".to_owned(), millis(REQUEST_TIMEOUT)),
        ("socket.timeout.ms".to_owned(), millis(REQUEST_TIMEOUT)),
    ]);
    let mut topics = Vec::new();
    for kind in ["CreateTime", "LogAppendTime"] {
        let topic: Arc<str> = unique(kind).into();
        create_topic_with(&settings, &topic, 1, &[("message.timestamp.type", kind)]).await;
        let producer = Producer::new(&settings).unwrap();
        let first = producer.send(&output(&topic, 0)).await.unwrap();
        assert_reported(&settings, &[first]).await;
        topics.push((producer, topic));
    }
    // The requests arrive while the broker does not run. They are repeated before the broker runs again.
    kafka.process().stop();
    let mut sending = JoinSet::new();
    for number in 1..=5 {
        for (producer, topic) in topics.clone() {
            sending.spawn(async move { producer.send(&output(&topic, number)).await.unwrap() });
        }
        // Records of one batch with different timestamps.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Nothing tells when the client repeats a request.
    tokio::time::sleep(LINGER + REQUEST_TIMEOUT.mul_f64(1.5)).await;
    kafka.process().cont();
    assert_reported(&settings, &sending.join_all().await).await;
    for (producer, topic) in topics {
        let last = producer.send(&output(&topic, 6)).await.unwrap();
        assert_eq!(last.position.offset, 6, "each record once");
        assert_reported(&settings, &[last]).await;
    }
}
