//! Fills topics and measures how they grow.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode;
use redeliver_core::Output;
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::convert::native_headers;

/// The Kafka broker that is measured.
#[derive(Clone)]
pub(crate) struct Broker {
    pub(crate) address: String,
    /// Makes the names of this run's topics and groups unique.
    run: String,
}

impl Broker {
    pub(crate) fn new(address: String) -> Self {
        let since_epoch = redeliver_core::Clock::now(&redeliver_core::SystemClock).as_millis();
        Self {
            address,
            run: format!("bench{since_epoch:x}"),
        }
    }

    pub(crate) fn name(&self, suffix: &str) -> String {
        format!("{}-{suffix}", self.run)
    }

    pub(crate) fn settings(&self, instance: &str) -> KafkaSettings {
        KafkaSettings::new(self.address.clone(), self.name(instance))
    }

    pub(crate) fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.address);
        config
    }

    pub(crate) async fn create(&self, topics: &[&str], partitions: i32) -> anyhow::Result<()> {
        let new = |topic| NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
        let new: Vec<_> = topics.iter().copied().map(new).collect();
        self.create_new(&new).await
    }

    /// Creates topics, and waits until all of their partitions have leaders.
    pub(crate) async fn create_new(&self, topics: &[NewTopic<'_>]) -> anyhow::Result<()> {
        let admin: AdminClient<DefaultClientContext> = self.client().create()?;
        for result in admin.create_topics(topics, &AdminOptions::new()).await? {
            result.map_err(|(topic, code)| anyhow::anyhow!("creating {topic}: {code}"))?;
        }
        for NewTopic {
            name: topic,
            num_partitions,
            ..
        } in topics
        {
            let started = Instant::now();
            loop {
                let metadata = admin
                    .inner()
                    .fetch_metadata(Some(topic), Duration::from_secs(10))?;
                let found = metadata.topics().first().context("metadata")?;
                let leaders = found
                    .partitions()
                    .iter()
                    .filter(|partition| partition.leader() >= 0)
                    .count();
                if i32::try_from(leaders) == Ok(*num_partitions) {
                    break;
                }
                ensure!(
                    started.elapsed() < Duration::from_secs(30),
                    "no leaders for {topic}"
                );
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(())
    }

    /// Creates the topics of a pipeline.
    pub(crate) async fn create_for(
        &self,
        pipeline: &redeliver_core::Pipeline,
        partitions: i32,
    ) -> anyhow::Result<()> {
        let topics = pipeline.topics();
        let names: Vec<&str> = topics.iter().map(|(topic, _)| &**topic).collect();
        self.create(&names, partitions).await
    }

    pub(crate) async fn delete_of(&self, pipeline: &redeliver_core::Pipeline) -> anyhow::Result<()> {
        let topics = pipeline.topics();
        let names: Vec<&str> = topics.iter().map(|(topic, _)| &**topic).collect();
        self.delete(&names).await
    }

    /// Deletes the topics of a measurement, so that they do not affect the next one.
    pub(crate) async fn delete(&self, topics: &[&str]) -> anyhow::Result<()> {
        let admin: AdminClient<DefaultClientContext> = self.client().create()?;
        admin.delete_topics(topics, &AdminOptions::new()).await?;
        Ok(())
    }

    /// Writes `count` records as fast as possible.
    pub(crate) fn fill(&self, count: usize, record: impl Fn(usize) -> Output) -> anyhow::Result<()> {
        let filler = self.filler()?;
        for index in 0..count {
            filler.send(&record(index))?;
        }
        filler.flush()
    }

    /// Writes records at a steady rate until it is stopped, and returns how many it has written.
    pub(crate) fn trickle(
        &self,
        per_second: f64,
        stop: &AtomicBool,
        record: impl Fn(usize) -> Output,
    ) -> anyhow::Result<usize> {
        let filler = self.filler()?;
        let started = Instant::now();
        let mut sent = 0;
        while !stop.load(Ordering::SeqCst) {
            let target = (started.elapsed().as_secs_f64() * per_second) as usize;
            while sent < target {
                filler.send(&record(sent))?;
                sent += 1;
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
        filler.flush()?;
        Ok(sent)
    }

    pub(crate) fn filler(&self) -> anyhow::Result<Filler> {
        let producer: ThreadedProducer<DefaultProducerContext> = self
            .client()
            .set("linger.ms", "2")
            .set("batch.num.messages", "10000")
            .set("enable.idempotence", "true")
            .set("partitioner", "murmur2_random")
            .create()?;
        Ok(Filler(Arc::new(producer)))
    }

    /// A read_committed consumer of all partitions of a topic, from the beginning.
    pub(crate) fn tail(&self, topic: &str, partitions: i32) -> anyhow::Result<BaseConsumer> {
        let consumer: BaseConsumer = self
            .client()
            .set("group.id", self.name("tail"))
            .set("isolation.level", "read_committed")
            .set("fetch.wait.max.ms", "5")
            .set("fetch.queue.backoff.ms", "1")
            .set("enable.auto.commit", "false")
            .create()?;
        let mut list = rdkafka::TopicPartitionList::new();
        for partition in 0..partitions {
            list.add_partition_offset(topic, partition, rdkafka::Offset::Beginning)?;
        }
        consumer.assign(&list)?;
        Ok(consumer)
    }

    /// Watches the end offsets of a topic, as a read_committed consumer sees them.
    pub(crate) fn watch(&self, topic: &str, partitions: i32) -> anyhow::Result<Watch> {
        let consumer: BaseConsumer = self
            .client()
            .set("group.id", self.name("watch"))
            .set("isolation.level", "read_committed")
            .create()?;
        Ok(Watch {
            consumer,
            topic: topic.to_owned(),
            partitions,
        })
    }
}

#[derive(Clone)]
pub(crate) struct Filler(Arc<ThreadedProducer<DefaultProducerContext>>);

impl Filler {
    pub(crate) fn send(&self, output: &Output) -> anyhow::Result<()> {
        let mut record = BaseRecord::<[u8], [u8]>::to(&output.topic);
        record.partition = output.partition;
        record.key = output.key.as_deref();
        record.payload = output.value.as_deref();
        record.headers = Some(native_headers(&output.headers));
        loop {
            match self.0.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), rejected)) => {
                    record = rejected;
                    std::thread::park_timeout(Duration::from_millis(1));
                }
                Err((error, _)) => return Err(error).context("filling a topic"),
            }
        }
    }

    pub(crate) fn flush(&self) -> anyhow::Result<()> {
        self.0.flush(Duration::from_secs(60)).context("filling a topic")
    }
}

pub(crate) struct Watch {
    consumer: BaseConsumer,
    topic: String,
    partitions: i32,
}

impl Watch {
    /// The sum of the end offsets of all partitions.
    pub(crate) fn end(&self) -> anyhow::Result<i64> {
        let mut sum = 0;
        for partition in 0..self.partitions {
            sum += self
                .consumer
                .fetch_watermarks(&self.topic, partition, Duration::from_secs(10))?
                .1;
        }
        Ok(sum)
    }

    /// Waits until the topic has at least `count` offsets, and returns the time from the first one on.
    pub(crate) fn time_until(&self, count: i64, timeout: Duration) -> anyhow::Result<Duration> {
        let started = Instant::now();
        let mut first = None;
        loop {
            let end = self.end()?;
            if end > 0 {
                first.get_or_insert_with(Instant::now);
            }
            if end >= count {
                return first.map(|first| first.elapsed()).context("no first record");
            }
            ensure!(
                started.elapsed() < timeout,
                "{} has {end} of {count} offsets",
                self.topic
            );
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
}
