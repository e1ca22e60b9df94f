//! The time index: one suite for the index in memory and the one in Redis, a model test, and failures of Redis.

mod cases;
pub(crate) mod own_redis;
mod property;
mod proxy;
mod redis_only;

use redeliver_scheduler::index::memory::MemoryIndex;
use redeliver_testkit::{LocalRedisCluster, eventually_async};

use self::cases::SHARD;
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
        async fn all_of_it_holds_in_a_cluster() {
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

#[tokio::test]
async fn only_the_jobs_that_ended_last_have_a_record() {
    cases::a_job_that_has_just_ended_keeps_its_record(MemoryIndex::new().with_max_ended(1)).await;
    cases::only_the_jobs_that_ended_last_have_a_record(MemoryIndex::new().with_max_ended(3)).await;
    let redis = OwnRedis::connect().await;
    let index = redis.index.clone().with_max_ended(3);
    cases::a_job_that_has_just_ended_keeps_its_record(index.clone().with_max_ended(1)).await;
    cases::only_the_jobs_that_ended_last_have_a_record(index).await;
    let names = redis.names(SHARD).await;
    let has_ended = |name: &&String| name.starts_with("ended") || name.starts_with("evicted");
    assert_eq!(names.iter().find(has_ended), None, "{names:?}");
    redis.remove().await;
    let cluster = LocalRedisCluster::start().unwrap();
    let (index, _tasks) = own_redis::connect(&own_redis::config(&cluster.url()))
        .await
        .unwrap();
    eventually_async("the cluster is used", DEADLINE, async || index.ping().await).await;
    cases::a_job_that_has_just_ended_keeps_its_record(index.clone().with_max_ended(1)).await;
    cases::only_the_jobs_that_ended_last_have_a_record(index.with_max_ended(3)).await;
}

suite![
    a_claim_returns_the_checkpoint_of_the_shard,
    a_claim_returns_the_newest_digest,
    a_batch_after_a_gap_is_rejected,
    a_replaced_owner_is_fenced,
    previous_owner_queries_are_fenced,
    query_behind_expected_offset_is_gap,
    applying_a_batch_twice_changes_nothing,
    a_renewal_moves_only_the_time_of_the_checkpoint,
    a_partly_applied_batch_is_applied_completely,
    an_empty_shard_accepts_a_batch_only_after_a_clear,
    a_cleared_shard_is_empty_and_accepts_a_batch_at_any_offset,
    concurrent_calls_take_effect_in_order,
    shards_are_independent,
    a_finished_release_is_remembered_until_the_index_is_cleared,
    an_idempotency_key_expires,
    idempotency_keys_are_counted,
    a_reused_key_has_the_new_value,
    old_job_takes_no_key_back,
    a_rescheduled_job_has_only_its_new_due_time,
    an_ended_job_is_not_due_and_is_kept,
    a_forgotten_job_leaves_only_its_key,
    the_last_change_of_a_job_in_a_batch_counts,
    jobs_are_ordered_by_due_time_and_id,
    a_page_continues_after_a_removed_job,
    pages_are_bounded_by_bytes_and_never_empty,
    jobs_of_one_instant_are_paged_exactly_once,
    a_long_batch_is_applied_and_cleared_completely,
    arbitrary_bytes_are_kept,
    jobs_are_counted_by_minute,
    jobs_are_counted_by_application,
    flows_without_an_application_are_not_jobs,
    a_scan_reads_all_flows_that_are_due,
    flows_of_one_application_are_separate,
    a_scan_reads_a_flow_from_its_position,
    the_limits_cut_a_scan_off,
    a_burst_hides_no_other_flow,
    many_flows_are_indexed_and_removed,
    a_flow_without_jobs_is_gone,
    jobs_are_listed_in_order_by_application_and_due_time,
];
