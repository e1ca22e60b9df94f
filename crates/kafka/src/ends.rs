//! Where the partitions of a topic end now.

use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use redeliver_kafka_ffi::{KafkaClient, TopicId, describe_topics};

use crate::client::KafkaSettings;
use crate::reader::{ReadError, kafka, watermarks};

/// Where the partitions of a topic end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicEnds {
    /// The topic; `None` if the broker does not support topic ids (before Kafka 2.8).
    pub topic: Option<TopicId>,
    /// The end of each partition, including open transactions, by its number.
    pub ends: Vec<i64>,
}

/// Where the partitions of a topic end now: a record that was written before this call is before the end of its partition. Blocks for `timeout` at most, and
/// a little longer for the last request.
///
/// # Errors
/// If the broker does not answer in time, the topic is missing, or it was created again meanwhile.
pub fn topic_ends(settings: &KafkaSettings, topic: &str, timeout: Duration) -> Result<TopicEnds, ReadError> {
    let deadline = Instant::now() + timeout;
    let client: KafkaClient<BaseConsumer> = settings
        .reader("read_uncommitted")
        .create()
        .map_err(kafka("creating a client"))?;
    let missing = || ReadError::Missing(topic.to_owned());
    let failed = |code| kafka("requesting the id of a topic")(KafkaError::AdminOp(code));
    let describe = || -> Result<_, ReadError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut described = describe_topics(client.client(), &[topic], left).map_err(failed)?;
        described.remove(topic).ok_or_else(missing)?.map_err(failed)
    };
    let before = describe()?;
    let ends = ends_until(deadline, Instant::now, 0..before.partitions, |partition| {
        watermarks(&client, topic, partition, deadline).map(|(_, end)| end)
    })?;
    if describe()?.id != before.id {
        return Err(missing());
    }
    Ok(TopicEnds {
        topic: before.id,
        ends,
    })
}

/// The ends of partitions. A request for one may not begin at the deadline or later: the time of all of them together is limited.
fn ends_until(
    deadline: Instant,
    now: impl Fn() -> Instant,
    partitions: std::ops::Range<i32>,
    mut end_of: impl FnMut(i32) -> Result<i64, ReadError>,
) -> Result<Vec<i64>, ReadError> {
    let mut end_in_time = |partition| {
        if now() >= deadline {
            let timed_out = KafkaError::MetadataFetch(RDKafkaErrorCode::OperationTimedOut);
            return Err(kafka("requesting the ends of all partitions")(timed_out));
        }
        end_of(partition)
    };
    partitions.map(&mut end_in_time).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn many_slow_answers_end_at_the_deadline() {
        const ANSWER: Duration = Duration::from_secs(1);
        let start = Instant::now();
        let now = Cell::new(start);
        let ends = |partitions, timeout| {
            now.set(start);
            let asked = Cell::new(0);
            let ends = ends_until(
                start + timeout,
                || now.get(),
                0..partitions,
                |partition| {
                    now.set(now.get() + ANSWER);
                    asked.set(asked.get() + 1);
                    Ok(i64::from(partition))
                },
            );
            (ends.ok(), asked.get())
        };
        assert_eq!(ends(3, 3 * ANSWER), (Some(vec![0, 1, 2]), 3));
        assert_eq!(ends(100, 3 * ANSWER), (None, 3));
    }
}
