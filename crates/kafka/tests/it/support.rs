//! What the tests of this crate share.

use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::survey::Surveyor;
use redeliver_testkit::{eventually, kafka_request, unique};

/// Settings for the test broker under an instance name of its own.
pub(crate) fn settings(instance: &str) -> KafkaSettings {
    KafkaSettings::new(redeliver_testkit::addresses().brokers, unique(instance))
}

/// Creates a topic and waits until all its partitions have leaders.
pub(crate) async fn create_topic(settings: &KafkaSettings, topic: &str, partitions: i32) {
    let admin: AdminClient<DefaultClientContext> = settings.client().create().unwrap();
    let new = NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
    for result in admin.create_topics([&new], &AdminOptions::new()).await.unwrap() {
        result.unwrap();
    }
    eventually("the topic has leaders", Duration::from_secs(20), || {
        let metadata = admin.inner().fetch_metadata(Some(topic), Duration::from_secs(5));
        let metadata = metadata.map_err(|error| error.to_string())?;
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        let ready = found.is_some_and(|found| {
            i32::try_from(found.partitions().len()) == Ok(partitions)
                && found.partitions().iter().all(|partition| partition.leader() >= 0)
        });
        if ready {
            Ok(())
        } else {
            Err("not all leaders are known".to_owned())
        }
    });
}

/// Deletes a topic and waits until it is gone.
pub(crate) fn delete_topic(settings: &KafkaSettings, topic: &str) {
    kafka_request::delete_topic(&settings.brokers, topic);
    let surveyor = Surveyor::new(settings).unwrap();
    eventually("the topic is gone", Duration::from_secs(20), || {
        match surveyor.topics(|name| name == topic) {
            Ok(topics) if topics.is_empty() => Ok(()),
            found => Err(format!("{found:?}")),
        }
    });
}
