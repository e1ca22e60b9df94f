//! A Kafka broker inside this process, for trying Redeliver without Kafka.
//!
//! It is librdkafka's mock cluster. It speaks Kafka's protocol on a loopback port, but it is not durable, keeps at most about
//! 5 MiB per partition, ignores isolation, drops the offsets of transactions, and finds no offset by its time. So it does not demonstrate the delivery
//! guarantees. [`KafkaSettings::is_embedded`](crate::KafkaSettings::is_embedded) tells clients what they have to do differently. It describes topics, without
//! permissions, and answers no request for configurations or for lists of groups.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, Producer as _};
use redeliver_kafka_ffi::add_mock_broker;

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
                let (brokers, _client) = match create_cluster(&topics) {
                    Ok(created) => created,
                    Err(error) => {
                        let _ = started.send(Err(error));
                        return;
                    }
                };
                let _ = started.send(Ok(brokers));
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

/// The broker that a mock cluster names as its controller. It starts with broker 1 only, and clients send requests for descriptions to the controller, for which
/// they would wait.
const CONTROLLER: i32 = 0;

/// The address of the cluster, and the client that it belongs to.
fn create_cluster(topics: &[(String, i32)]) -> Result<(String, BaseProducer), EmbeddedError> {
    let mut config = ClientConfig::new();
    config.set("test.mock.num.brokers", "1");
    let client: BaseProducer = config.create().map_err(EmbeddedError::Start)?;
    let failed = |code| EmbeddedError::Start(KafkaError::MockCluster(code));
    let cluster = client.client().mock_cluster();
    let cluster = cluster.ok_or_else(|| failed(RDKafkaErrorCode::Fail))?;
    let brokers = cluster.bootstrap_servers();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| keep_awake(&brokers, &done));
        let added = add_mock_broker(client.client(), CONTROLLER).map_err(failed);
        let created = added.and_then(|()| {
            topics.iter().try_for_each(|(topic, partitions)| {
                let created = cluster.create_topic(topic, *partitions, 1);
                created.map_err(|source| EmbeddedError::Topic {
                    topic: topic.clone(),
                    source,
                })
            })
        });
        done.store(true, Ordering::SeqCst);
        created
    })?;
    drop(cluster);
    Ok((brokers, client))
}

/// Opens connections until `done`. The cluster's thread can miss the wake-up for a request to create a topic or a broker, and then sleeps
/// for a second; a connection wakes it too.
fn keep_awake(brokers: &str, done: &AtomicBool) {
    while !done.load(Ordering::SeqCst) {
        // Whether the connection succeeds does not matter.
        drop(TcpStream::connect(brokers));
        thread::park_timeout(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::EmbeddedBroker;
    use crate::client::KafkaSettings;
    use crate::survey::Surveyor;

    #[test]
    fn only_descriptions_of_topics_are_known() {
        let topic: Arc<str> = "described".into();
        let broker = EmbeddedBroker::start(&[(topic.to_string(), 2)]).unwrap();
        let surveyor = Surveyor::new(&KafkaSettings::new(broker.brokers(), "test")).unwrap();
        let topics = surveyor.topics(|_| true).unwrap();
        assert_eq!((topics.len(), topics[0].partitions.len()), (1, 2), "{topics:?}");
        assert!(topics[0].id.is_some(), "{topics:?}");
        assert!(surveyor.writable(&[&topic]).unwrap().is_empty());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let limits = runtime.block_on(surveyor.max_message_bytes(&[topic]));
        assert!(limits.unwrap().is_empty());
    }
}
