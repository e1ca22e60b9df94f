//! The time index: one suite for the index in memory and the one in Redis, a model test, and failures of Redis.

mod cases;
pub(crate) mod own_redis;
mod property;
mod proxy;
mod redis_only;

use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_testkit::{LocalRedisCluster, eventually_async};

use self::own_redis::OwnRedis;
use crate::env::DEADLINE;

/// Each case runs on both indexes.
macro_rules! suite {
    ($($case:ident),* $(,)?) => {
        mod in_memory {
            $(
                #[tokio::test]
                async fn $case() {
                    super::cases::$case(super::MemoryIndex::new()).await;
                }
            )*
        }

        mod in_redis {
            $(
                #[tokio::test]
                async fn $case() {
                    let redis = super::OwnRedis::connect().await;
                    super::cases::$case(redis.index.clone()).await;
                    redis.remove().await;
                }
            )*
        }

        #[tokio::test]
        async fn suite_passes_in_a_cluster() {
            let cluster = LocalRedisCluster::start().unwrap();
            $(
                // Each with a prefix of its own.
                let (index, _tasks) = own_redis::connect(&own_redis::config(&cluster.url())).await.unwrap();
                // The client connects to one node first, and closes that connection when it knows the others.
                eventually_async("the cluster is used", DEADLINE, async || index.ping().await).await;
                cases::$case(index).await;
            )*
        }
    };
}

suite![
    claim_returns_newest_digest,
    previous_owner_queries_are_fenced,
    query_behind_expected_offset_is_gap,
    shards_are_independent,
    clear_forgets_finished_releases,
    long_batch_is_applied_and_cleared,
    idempotency_keys_are_counted,
    arbitrary_bytes_are_kept,
    jobs_are_ordered_by_due_time,
    jobs_of_one_instant_are_paged,
    burst_hides_no_other_flow,
    many_flows_are_indexed_and_removed,
];
