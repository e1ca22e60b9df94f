//! Requests for offsets: the beginnings and ends of partitions, and the first records since a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::topic_partition_list::Offset;
use redeliver_core::Timestamp;

use super::error::{ReadError, is_transient, is_unknown, kafka};

/// Timeout of one request.
pub(crate) const CALL: Duration = Duration::from_secs(10);

/// A topic and the number of one of its partitions.
pub(crate) type TopicPartition = (Arc<str>, i32);

/// Which offsets to request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Beginning,
    /// For a read_committed client, the last stable offset.
    End,
    /// That of the first record with this timestamp or a later one.
    Time(Timestamp),
}

/// What the brokers have answered.
pub(crate) struct Found {
    /// Without partitions whose records are all older than the time asked for.
    pub(crate) offsets: BTreeMap<TopicPartition, i64>,
    failures: Vec<(Arc<str>, KafkaError)>,
}

/// Requests offsets once, from each leader.
pub(crate) fn request<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[TopicPartition],
    at: At,
    timeout: Duration,
) -> KafkaResult<Found> {
    // In the request, -2 and -1 in place of a timestamp mean the first offset and the end. Negative times have other meanings.
    let offset = match at {
        At::Beginning => Offset::Beginning,
        At::End => Offset::End,
        At::Time(time) => Offset::Offset(time.as_millis().max(0)),
    };
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for (topic, partition) in partitions {
        list.add_partition_offset(topic, *partition, offset)?;
    }
    let mut found = Found {
        offsets: BTreeMap::new(),
        failures: Vec::new(),
    };
    if partitions.is_empty() {
        return Ok(found);
    }
    for element in consumer.offsets_for_times(list, timeout)?.elements() {
        let topic = Arc::from(element.topic());
        match (element.error(), element.offset()) {
            (Ok(()), Offset::Offset(offset)) => {
                found.offsets.insert((topic, element.partition()), offset);
            }
            (Ok(()), _) if matches!(at, At::Time(_)) => {}
            (Ok(()), _) => {
                let unknown = KafkaError::OffsetFetch(RDKafkaErrorCode::OffsetNotAvailable);
                found.failures.push((topic, unknown));
            }
            (Err(error), _) => found.failures.push((topic, error)),
        }
    }
    Ok(found)
}

/// The offsets of all of these partitions. Retries transient errors, such as a change of the leader, until the deadline.
pub(crate) fn offsets<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[TopicPartition],
    at: At,
    deadline: Instant,
) -> Result<BTreeMap<TopicPartition, i64>, ReadError> {
    // A broker may have to read old segments to find a time.
    let timeout = match at {
        At::Time(_) => CALL,
        At::Beginning | At::End => CALL / 5,
    };
    loop {
        let failures = match request(consumer, partitions, at, timeout) {
            Ok(found) if found.failures.is_empty() => return Ok(found.offsets),
            Ok(found) => found.failures,
            Err(error) => partitions
                .iter()
                .map(|(topic, _)| (topic.clone(), error.clone()))
                .collect(),
        };
        let topics: BTreeSet<Arc<str>> = failures.iter().map(|(topic, _)| topic.clone()).collect();
        let errors = failures.into_iter().map(|(_, error)| error);
        // One that does not end by itself, if there is one.
        let Some(error) = errors.min_by_key(is_temporary) else {
            return Ok(BTreeMap::new());
        };
        if !is_temporary(&error) || Instant::now() >= deadline {
            return Err(kafka("requesting offsets of partitions")(error));
        }
        tracing::debug!(%error, "cannot read offsets of partitions; retrying");
        std::thread::park_timeout(Duration::from_millis(50));
        // Without fetches in progress, the client does not look for new leaders by itself.
        for topic in topics {
            if consumer.fetch_metadata(Some(&topic), CALL / 5).is_err() || Instant::now() >= deadline {
                break;
            }
        }
    }
}

/// As [`offsets`], of one partition. `None` if all of its records are older than the time asked for.
pub(crate) fn offset<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partition: TopicPartition,
    at: At,
    deadline: Instant,
) -> Result<Option<i64>, ReadError> {
    let found = offsets(consumer, &[partition], at, deadline)?;
    Ok(found.into_values().next())
}

/// Whether a request can succeed later.
fn is_temporary(error: &KafkaError) -> bool {
    is_transient(error) || is_unknown(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leader_changes_are_temporary() {
        use RDKafkaErrorCode as Code;
        let is_temporary = |code| super::is_temporary(&KafkaError::MetadataFetch(code));
        for code in [
            Code::NotLeaderForPartition,
            Code::LeaderNotAvailable,
            Code::FencedLeaderEpoch,
            Code::UnknownLeaderEpoch,
            Code::OffsetNotAvailable,
        ] {
            assert!(is_temporary(code), "{code:?}");
        }
        assert!(!is_temporary(Code::TopicAuthorizationFailed));
    }
}
