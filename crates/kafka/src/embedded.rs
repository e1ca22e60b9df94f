//! A Kafka broker inside of this process, in memory, for trials without Kafka.
//!
//! It is librdkafka's mock cluster. It speaks Kafka's protocol on a loopback port, but it keeps nothing
//! on disk and at most about 5 MiB per partition, ignores isolation and drops the offsets of
//! transactions: good enough to look at Redeliver, never proof of its guarantees.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

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
    let brokers = cluster.bootstrap_servers();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| keep_awake(&brokers, &done));
        let created = topics.iter().try_for_each(|(topic, partitions)| {
            let created = cluster.create_topic(topic, *partitions, 1);
            created.map_err(|source| EmbeddedError::Topic {
                topic: topic.clone(),
                source,
            })
        });
        done.store(true, Ordering::SeqCst);
        created
    })?;
    Ok(cluster)
}

/// The cluster's thread can miss the wake-up that comes with an order, and then sleeps for a second before it
/// sees it; a connection wakes it too.
fn keep_awake(brokers: &str, done: &AtomicBool) {
    while !done.load(Ordering::SeqCst) {
        // Whether the connection succeeds does not matter.
        drop(TcpStream::connect(brokers));
        thread::park_timeout(Duration::from_millis(5));
    }
}
