//! A Kafka broker inside this process, for trying Redeliver without Kafka.
//!
//! It is librdkafka's mock cluster. It speaks Kafka's protocol on a loopback port, but it is not durable, keeps at most about
//! 5 MiB per partition, ignores isolation, and drops the offsets of transactions. So it does not demonstrate the delivery
//! guarantees.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdkafka::error::KafkaError;
use rdkafka::mocking::MockCluster;

/// A running embedded broker. Dropping it stops the broker.
pub struct EmbeddedBroker {
    brokers: String,
    stop: Option<mpsc::SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Why the embedded broker did not start.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    /// The client library returned an error.
    #[error("cannot start the embedded broker")]
    Start(#[source] KafkaError),
    /// A topic could not be created.
    #[error("cannot create topic `{topic}` on the embedded broker")]
    Topic {
        /// The topic.
        topic: String,
        /// The cause.
        source: KafkaError,
    },
    /// The broker's thread could not be started, or ended.
    #[error("the thread of the embedded broker ended before the broker was ready")]
    Thread,
}

impl EmbeddedBroker {
    /// Starts a broker with these topics, each with its number of partitions.
    ///
    /// # Errors
    /// If the client library cannot start it or cannot create a topic.
    pub fn start(topics: &[(String, i32)]) -> Result<Self, EmbeddedError> {
        let topics = topics.to_vec();
        let (started, is_started) = mpsc::sync_channel(1);
        let (stop, stopped) = mpsc::sync_channel::<()>(1);
        // The cluster must stay on the thread that created it.
        let thread = thread::Builder::new()
            .name("embedded-broker".into())
            .spawn(move || {
                let cluster = match create_cluster(&topics) {
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

    /// The address of the broker, as for `kafka.brokers`.
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
            tracing::warn!("thread of the embedded broker panicked");
        }
    }
}

fn create_cluster(
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

/// Opens connections until `done`. The cluster's thread can miss the wake-up for a request to create a topic, and then sleeps
/// for a second; a connection wakes it too.
fn keep_awake(brokers: &str, done: &AtomicBool) {
    while !done.load(Ordering::SeqCst) {
        // Whether the connection succeeds does not matter.
        drop(TcpStream::connect(brokers));
        thread::park_timeout(Duration::from_millis(5));
    }
}
