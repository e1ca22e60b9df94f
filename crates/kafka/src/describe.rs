//! Requests for the descriptions of topics, also while brokers stop.

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::client::{Client, ClientContext};
use rdkafka::error::RDKafkaErrorCode;
use redeliver_kafka_ffi::{TopicDescription, TopicId};

/// How long the first request may take.
const FIRST: Duration = Duration::from_millis(500);

/// As [`redeliver_kafka_ffi::describe_topics`]. The client sends the request to what it takes for the controller, and waits for that if it has just stopped.
/// So if there is no answer soon, it requests metadata from any broker, which names the current controller, and tries again. Takes up to two seconds longer
/// than `timeout`.
///
/// # Errors
/// As there.
pub(crate) fn describe_topics<C: ClientContext>(
    client: &Client<C>,
    topics: &[&str],
    timeout: Duration,
) -> Result<BTreeMap<String, Result<TopicDescription, RDKafkaErrorCode>>, RDKafkaErrorCode> {
    let first = FIRST.min(timeout);
    let described = redeliver_kafka_ffi::describe_topics(client, topics, first);
    if !matches!(described, Err(RDKafkaErrorCode::OperationTimedOut)) {
        return described;
    }
    tracing::debug!("no answer to a request for topics; trying again with the current controller");
    // Without an answer, the second request fails, too.
    let _ = client.fetch_metadata(topics.first().copied(), FIRST);
    redeliver_kafka_ffi::describe_topics(client, topics, timeout)
}

/// The ids of topics, or why the broker does not describe them. Leaves out topics that do not exist, and all if the broker does not support ids (before Kafka
/// 2.8).
///
/// # Errors
/// As [`describe_topics`].
pub(crate) fn topic_ids<C: ClientContext>(
    client: &Client<C>,
    topics: &[&str],
    timeout: Duration,
) -> Result<BTreeMap<String, Result<TopicId, RDKafkaErrorCode>>, RDKafkaErrorCode> {
    let described = describe_topics(client, topics, timeout)?.into_iter();
    Ok(described
        .filter_map(|(topic, found)| Some((topic, found.map(|found| found.id).transpose()?)))
        .collect())
}
