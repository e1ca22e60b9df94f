//! A Kafka broker inside of this process, in memory, for trials without Kafka.
//!
//! It is librdkafka's mock cluster. It speaks Kafka's protocol on a loopback port, but it keeps nothing
//! on disk and at most about 5 MiB per partition, ignores isolation and drops the offsets of
//! transactions: good enough to look at Redeliver, never proof of its guarantees.

use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use rdkafka::error::KafkaError;
use rdkafka::mocking::MockCluster;

/// A running embedded broker. It stops when this is dropped.
pub struct EmbeddedBroker {
    brokers: String,
    stop: Option<mpsc::SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The embedded broker did not start.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    /// The client library refused.
    #[error("starting the embedded broker")]
    Start(#[source] KafkaError),
    /// A topic was refused.
    #[error("creating topic `{topic}` on the embedded broker")]
    Topic {
        /// The topic.
        topic: String,
        /// Why.
        source: KafkaError,
    },
    /// Its thread ended.
    #[error("the embedded broker's thread ended before the broker was up")]
    Thread,
}

impl EmbeddedBroker {
    /// Starts a broker that has these topics, each with that many partitions.
    ///
    /// # Errors
    /// When the client library cannot start it or refuses a topic.
    pub fn start(topics: &[(String, i32)]) -> Result<Self, EmbeddedError> {
        let topics = topics.to_vec();
        let (started, is_started) = mpsc::sync_channel(1);
        let (stop, stopped) = mpsc::sync_channel::<()>(1);
        // The cluster may not leave the thread that made it.
        let thread = thread::Builder::new()
            .name("embedded-broker".into())
            .spawn(move || {
                let cluster = match make(&topics) {
                    Ok(cluster) => cluster,
                    Err(error) => {
                        let _ = started.send(Err(error));
                        return;
                    }
                };
                let _ = started.send(Ok(cluster.bootstrap_servers()));
                // Ends when the owner is dropped.
                let _ = stopped.recv();
            });
        let thread = thread.map_err(|_| EmbeddedError::Thread)?;
        let brokers = is_started.recv().map_err(|_| EmbeddedError::Thread)??;
        Ok(Self {
            brokers,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Its address, as for `kafka.brokers`.
    #[must_use]
    pub fn brokers(&self) -> &str {
        &self.brokers
    }
}

impl Drop for EmbeddedBroker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::warn!("the embedded broker's thread panicked");
        }
    }
}

fn make(
    topics: &[(String, i32)],
) -> Result<MockCluster<'static, rdkafka::producer::DefaultProducerContext>, EmbeddedError> {
    let cluster = MockCluster::new(1).map_err(EmbeddedError::Start)?;
    for (topic, partitions) in topics {
        cluster
            .create_topic(topic, *partitions, 1)
            .map_err(|source| EmbeddedError::Topic {
                topic: topic.clone(),
                source,
            })?;
    }
    Ok(cluster)
}
