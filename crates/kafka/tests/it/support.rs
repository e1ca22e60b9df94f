//! Helpers that all tests of this crate share.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use redeliver_core::{Headers, Output};
use redeliver_kafka::{
    IfFenced, IfRecreated, KafkaClient, KafkaSettings, Lane, LaneContext, LaneError, LaneObserver, LaneSpec,
    Processor, TopicWatch,
};
use redeliver_testkit::{ensure, eventually, unique};
use tokio_util::sync::CancellationToken;

pub(crate) use redeliver_testkit::DEADLINE;

/// Settings for the test broker with a unique instance name.
pub(crate) fn settings(instance: &str) -> KafkaSettings {
    KafkaSettings::new(redeliver_testkit::addresses().brokers, unique(instance))
}

/// Creates a topic and waits until all its partitions have leaders.
pub(crate) async fn create_topic(settings: &KafkaSettings, topic: &str, partitions: i32) {
    create_topic_with(settings, topic, partitions, &[]).await;
}

/// As [`create_topic`], with settings of the topic.
pub(crate) async fn create_topic_with(
    settings: &KafkaSettings,
    topic: &str,
    partitions: i32,
    config: &[(&str, &str)],
) {
    let new = NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
    let new = config.iter().fold(new, |new, (name, value)| new.set(name, value));
    create_new_topic(settings, &new).await;
}

/// As [`create_topic`].
pub(crate) async fn create_new_topic(settings: &KafkaSettings, new: &NewTopic<'_>) {
    let admin: KafkaClient<AdminClient<DefaultClientContext>> = settings.client().create().unwrap();
    // A busy broker may need longer than the client's default.
    let options = AdminOptions::new().request_timeout(Some(DEADLINE));
    for result in admin.create_topics([new], &options).await.unwrap() {
        result.unwrap();
    }
    let (topic, partitions) = (new.name, new.num_partitions);
    eventually("the topic has leaders", DEADLINE, || {
        let metadata = admin.inner().fetch_metadata(Some(topic), Duration::from_secs(5));
        let metadata = metadata.map_err(|error| error.to_string())?;
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        let has_leaders = found.is_some_and(|found| {
            i32::try_from(found.partitions().len()) == Ok(partitions)
                && found.partitions().iter().all(|partition| partition.leader() >= 0)
        });
        ensure(has_leaders, "some partitions have no leader".to_owned())
    });
}

/// An output without headers.
pub(crate) fn output(
    topic: Arc<str>,
    partition: Option<i32>,
    key: Option<Bytes>,
    value: Option<Bytes>,
) -> Output {
    Output {
        topic,
        partition,
        key,
        value,
        headers: Headers::new(),
    }
}

/// The specification of a lane with defaults for tests.
pub(crate) fn lane_spec(name: &str, group: &str, topics: &[&str]) -> LaneSpec {
    LaneSpec {
        name: name.to_owned(),
        group: group.to_owned(),
        topics: topics.iter().map(|topic| Arc::from(*topic)).collect(),
        batch: 500,
        grace: Duration::from_secs(10),
        changelog: None,
        if_recreated: IfRecreated::ReadFromBeginning,
        if_fenced: IfFenced::End,
    }
}

/// A lane on its own thread. It stops when this is dropped.
pub(crate) struct RunningLane {
    stop: CancellationToken,
    thread: Option<JoinHandle<Result<(), LaneError>>>,
}

impl RunningLane {
    pub(crate) fn spawn(
        settings: &KafkaSettings,
        spec: LaneSpec,
        processor: impl Processor + Send + 'static,
        observer: Arc<dyn LaneObserver>,
    ) -> Self {
        Self::spawn_with(
            settings,
            spec,
            processor,
            observer,
            TopicWatch::start(settings).unwrap(),
        )
    }

    /// As [`RunningLane::spawn`], with a watch that the processor uses, too.
    pub(crate) fn spawn_with(
        settings: &KafkaSettings,
        spec: LaneSpec,
        processor: impl Processor + Send + 'static,
        observer: Arc<dyn LaneObserver>,
        watch: TopicWatch,
    ) -> Self {
        let stop = CancellationToken::new();
        let context = LaneContext::new(settings.clone(), observer, watch, stop.clone());
        let lane = Lane::new(context, spec, processor);
        Self {
            stop,
            thread: Some(std::thread::spawn(move || lane.run())),
        }
    }

    /// Stops the lane gracefully.
    pub(crate) fn stop(self) {
        drop(self);
    }
}

impl Drop for RunningLane {
    fn drop(&mut self) {
        self.stop.cancel();
        // After a failed assertion, the test does not wait for the lane.
        if !std::thread::panicking()
            && let Some(thread) = self.thread.take()
        {
            thread.join().unwrap().unwrap();
        }
    }
}
