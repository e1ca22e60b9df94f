//! The time index: one suite over the index in memory and the one in Redis, a model, and what only Redis can
//! suffer.

mod cases;
pub(crate) mod own_redis;
mod property;
mod proxy;
mod redis_only;

use redeliver_scheduler::index::memory::MemoryIndex;

use self::own_redis::OwnRedis;

/// Each case runs on both.
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
    };
}

suite![
    a_claim_says_how_far_the_shard_is,
    a_claim_tells_the_newest_seal,
    a_batch_behind_a_gap_is_refused,
    an_owner_that_was_replaced_is_fenced,
    a_batch_that_was_applied_changes_nothing,
    a_batch_that_was_applied_in_part_is_applied_whole,
    an_empty_shard_takes_a_batch_only_after_a_clear,
    a_cleared_shard_is_empty_and_takes_a_batch_from_any_offset,
    calls_that_are_under_way_at_once_take_effect_in_their_order,
    shards_know_nothing_of_each_other,
    an_idempotency_key_expires,
    a_key_that_is_taken_again_has_the_new_value,
    a_rescheduled_job_has_only_its_new_due_time,
    an_ended_job_is_not_due_and_is_remembered,
    a_forgotten_job_leaves_only_its_key,
    the_newest_change_of_a_batch_holds,
    jobs_are_given_in_the_order_of_due_times_and_ids,
    a_page_goes_on_behind_a_job_that_is_gone,
    pages_are_bounded_by_bytes_and_never_empty,
    jobs_of_one_instant_are_paged_exactly_once,
    a_long_batch_is_applied_and_cleared_whole,
    any_bytes_are_kept,
    jobs_are_counted_by_minute,
];
