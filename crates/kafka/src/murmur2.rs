//! The partitioner of Kafka's Java clients.
//!
//! They hash keys with a variant of `MurmurHash2` (32 bits, seed 0x9747b28c; `org.apache.kafka.common.utils.Utils.murmur2`).
//! librdkafka computes the same with `partitioner=murmur2_random`.

/// The hash of a key.
#[must_use]
pub fn murmur2(key: &[u8]) -> i32 {
    const SEED: u32 = 0x9747_b28c;
    const M: u32 = 0x5bd1_e995;
    const R: u32 = 24;
    // The length is an i32 in Java, and no key is longer.
    let mut hash = SEED ^ u32::try_from(key.len()).unwrap_or(u32::MAX);
    let (words, tail) = key.as_chunks::<4>();
    for word in words {
        let mut k = u32::from_le_bytes(*word).wrapping_mul(M);
        k ^= k >> R;
        hash = hash.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    for (index, byte) in tail.iter().enumerate() {
        hash ^= u32::from(*byte) << (8 * index);
    }
    if !tail.is_empty() {
        hash = hash.wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^= hash >> 15;
    hash.cast_signed()
}

/// The partition of a record with this key in a topic with `partitions` partitions.
///
/// # Panics
/// If `partitions` is not positive.
#[must_use]
pub fn partition_for_key(key: &[u8], partitions: i32) -> i32 {
    assert!(partitions > 0, "a topic has at least one partition");
    (murmur2(key) & i32::MAX) % partitions
}

/// The partition of the ingest topic for requests of this application with this idempotency key, so that one lane sees all
/// of them: the partition of the application's name, a zero byte, and the key.
///
/// # Panics
/// If `partitions` is not positive.
#[must_use]
pub fn shard_of(app: &str, idempotency_key: &str, partitions: i32) -> i32 {
    let both = [app.as_bytes(), b"\0", idempotency_key.as_bytes()].concat();
    partition_for_key(&both, partitions)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rdkafka::config::ClientConfig;
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::{FutureProducer, FutureRecord};

    use super::*;

    #[test]
    fn hashes_match_the_java_client() {
        // From UtilsTest.testMurmur2 of Apache Kafka.
        for (key, hash) in [
            ("21", -973_932_308),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ] {
            assert_eq!(murmur2(key.as_bytes()), hash, "{key}");
        }
    }

    #[test]
    fn shard_depends_on_application_and_key() {
        // Clients in other languages compute the same from these bytes.
        assert_eq!(
            shard_of("sms", "sms-12345", 12),
            partition_for_key(b"sms\0sms-12345", 12)
        );
        assert_ne!(shard_of("a", "bc", 1000), shard_of("ab", "c", 1000));
    }

    #[tokio::test]
    async fn partitions_match_librdkafka() {
        const PARTITIONS: i32 = 13;
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic("keyed", PARTITIONS, 1).unwrap();
        let producer: FutureProducer = ClientConfig::new()
            .set("bootstrap.servers", cluster.bootstrap_servers())
            .set("partitioner", "murmur2_random")
            .create()
            .unwrap();
        let keys: Vec<Vec<u8>> = (0..300u32)
            .map(|n| {
                let bytes = n.wrapping_mul(2_654_435_761).to_be_bytes().repeat(5);
                bytes[..=usize::try_from(n % 19).unwrap()].to_vec()
            })
            .collect();
        for key in &keys {
            let record = FutureRecord::to("keyed").key(key).payload("");
            let delivery = producer.send(record, Duration::from_secs(10)).await.unwrap();
            assert_eq!(partition_for_key(key, PARTITIONS), delivery.partition, "{key:?}");
        }
    }
}
