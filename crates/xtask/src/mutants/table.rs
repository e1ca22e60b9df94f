//! The planted defects, and the tests that catch them. The product plants each with `redeliver_core::mutant!`.

use std::fmt::Write as _;

/// A planted defect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutant {
    /// The name in `mutant!`, and the value of the environment variable.
    pub(crate) name: &'static str,
    /// What the defective build does, and what that means for users.
    pub(crate) defect: &'static str,
    /// The tests that must fail, each on its own.
    pub(crate) caught_by: &'static [Test],
    /// Whether a test that does not end within its time limit counts as one that fails.
    pub(crate) may_hang: bool,
}

/// A test of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Test {
    pub(crate) binary: Binary,
    pub(crate) name: &'static str,
}

/// A test binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Binary {
    /// The directory of the package.
    pub(crate) package: &'static str,
    pub(crate) target: Target,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    /// The unit and model tests in the library.
    Lib,
    /// The integration tests, `tests/it`. They need Kafka and Redis.
    It,
}

const fn unit(package: &'static str, name: &'static str) -> Test {
    let binary = Binary {
        package,
        target: Target::Lib,
    };
    Test { binary, name }
}

const fn integration(package: &'static str, name: &'static str) -> Test {
    let binary = Binary {
        package,
        target: Target::It,
    };
    Test { binary, name }
}

const fn mutant(name: &'static str, defect: &'static str, caught_by: &'static [Test]) -> Mutant {
    Mutant {
        name,
        defect,
        caught_by,
        may_hang: false,
    }
}

const CORE: &str = "crates/core";
const KAFKA: &str = "crates/kafka";
const WORKER: &str = "crates/worker";
const ENRICHER: &str = "services/enricher";
const RELAY: &str = "services/retry-tier";
const SCHEDULER: &str = "services/scheduler";
const INSPECTOR: &str = "services/dlq-inspector";
const SERVICE: &str = "crates/service";

const TRACKER_MODEL: Test = unit(
    KAFKA,
    "tracker::tests::each_offset_is_completed_exactly_once_in_any_order_and_with_restarts",
);
const LANE_MODEL: Test = unit(
    KAFKA,
    "lane::model::a_million_steps_of_random_histories_write_each_record_exactly_once",
);
const RELAY_MODEL: Test = unit(
    RELAY,
    "relay::tests::model::each_record_leaves_once_and_never_early",
);
const RELAY_HOLD: Test = unit(
    RELAY,
    "relay::tests::after_a_step_of_the_clock_nothing_is_released_or_moved_until_it_is_confirmed",
);
const SCHEDULER_HOLD: Test = unit(
    SCHEDULER,
    "processor::tests::after_a_step_of_the_clock_no_job_is_dispatched_until_it_is_confirmed",
);
const SHARD_MODEL: Test = unit(
    SCHEDULER,
    "shard::tests::each_job_is_dispatched_once_and_never_early",
);

const QUOTAS: Test = unit(
    SCHEDULER,
    "shard::tests::applications::a_quota_counts_the_jobs_that_wait",
);

pub(crate) const MUTANTS: &[Mutant] = &[
    mutant(
        "lane-accepts-stale-assignments",
        "Results of a former assignment complete records that were read again. They are written twice.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-repeats-assignment-ids",
        "A new assignment has the id of a former one, so late results match its records. They are written twice.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-drops-the-completed-set",
        "A lane commits positions without the completed set. Records after an incomplete one are processed again by the next owner.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-forgets-the-owner",
        "A transaction that completes no record carries no offsets, so the broker cannot refuse it. A former owner can still write.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-writes-after-a-revocation",
        "A batch is written again although one of its partitions was revoked. The next owner writes its results too.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-finishes-unknown-results-again",
        "After a revocation, results of a transaction of unknown outcome go back to the processor. If it was committed, they are written twice.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-takes-committed-for-aborted",
        "A committed transaction of unknown outcome is written again.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-takes-aborted-for-committed",
        "The results of an aborted transaction of unknown outcome are lost.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-takes-undecided-for-aborted",
        "A transaction is written again although it may have been committed.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-reads-positions-of-open-transactions",
        "Positions are looked up before a transaction of unknown outcome is resolved. Its records are processed again.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-keeps-aborted-completions",
        "After an abort, records stay completed while the processor finishes them again. Their handlers are called again.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-trusts-a-former-membership",
        "A lane that the coordinator had removed continues where it was. Another member may have processed the records.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-ignores-fencing",
        "Two processes with the same instance name fence each other for ever.",
        &[unit(KAFKA, "lane::model::a_lane_that_is_fenced_repeatedly_ends")],
    ),
    mutant(
        "route-forgets-the-attempt",
        "A failed attempt is not counted. A record that always fails is tried for ever.",
        &[unit(
            CORE,
            "route::tests::a_record_passes_through_all_tiers_and_becomes_a_dead_letter",
        )],
    ),
    mutant(
        "route-keeps-the-anchor",
        "All retries count from an old anchor. An outage of seconds uses up all of them at once.",
        &[unit(
            CORE,
            "route::tests::an_old_anchor_makes_only_the_first_retry_due_at_once",
        )],
    ),
    mutant(
        "breaker-burns-attempts",
        "Each failure of the endpoint counts. An outage uses up all retries of the records that arrive meanwhile.",
        &[unit(
            WORKER,
            "breaker::tests::failures_that_open_the_breaker_are_forgotten",
        )],
    ),
    mutant(
        "breaker-burns-stragglers",
        "A call that began before an outage and fails after it counts. The outage uses up an attempt.",
        &[unit(
            WORKER,
            "breaker::tests::a_straggler_from_before_an_outage_does_not_count",
        )],
    ),
    mutant(
        "breaker-closes-after-one-answer",
        "A half-open breaker closes after one answer. All records are sent to an endpoint that can answer only a few of them.",
        &[unit(
            WORKER,
            "breaker::tests::permits_double_with_each_answer_until_the_breaker_closes",
        )],
    ),
    mutant(
        "batch-results-by-place",
        "The results of a batch call are those of the records at the same place, not of those with the same id.",
        &[unit(
            ENRICHER,
            "http::tests::batches::records_share_a_call_and_each_has_its_own_result",
        )],
    ),
    mutant(
        "batch-repeats-failed-records-together",
        "Records that failed are in batch calls again. One that makes whole calls fail uses up all attempts of the others.",
        &[unit(
            ENRICHER,
            "http::tests::batches::a_record_that_has_failed_before_is_called_alone",
        )],
    ),
    mutant(
        "groups-have-no-limit",
        "Records of a key are processed at the same time. Their results are written in any order.",
        &[unit(
            WORKER,
            "groups::tests::a_record_waits_until_there_is_room_in_its_group_and_the_one_that_has_waited_longest_is_next",
        )],
    ),
    mutant(
        "route-retries-early",
        "The due time of a retry is one millisecond early.",
        &[unit(CORE, "route::tests::no_retry_is_due_early")],
    ),
    mutant(
        "engine-accepts-stale-assignments",
        "Results for a revoked partition are written. Its new owner writes them again.",
        &[unit(
            WORKER,
            "engine::tests::results_for_an_earlier_assignment_of_a_partition_are_dropped",
        )],
    ),
    mutant(
        "engine-keeps-calling-for-revoked-partitions",
        "Queued records of a revoked partition are still processed. Their new owner calls the handler again.",
        &[unit(
            WORKER,
            "engine::tests::results_for_an_earlier_assignment_of_a_partition_are_dropped",
        )],
    ),
    mutant(
        "engine-completes-unprocessed-records",
        "Records that a stopping worker returns without an attempt are completed. They are lost.",
        &[unit(
            WORKER,
            "engine::tests::records_without_an_attempt_are_neither_completed_nor_in_flight",
        )],
    ),
    mutant(
        "engine-completes-before-its-outputs",
        "A record is completed in a transaction without its results. They are lost.",
        &[unit(
            WORKER,
            "engine::tests::only_records_for_a_missing_topic_wait_for_it",
        )],
    ),
    mutant(
        "engine-never-releases-records",
        "Finished records stay in flight. The worker accepts no more records.",
        &[unit(
            WORKER,
            "engine::tests::only_records_for_a_missing_topic_wait_for_it",
        )],
    ),
    mutant(
        "engine-drops-refused-results",
        "A record whose result is refused gets no dead letter. It is lost.",
        &[unit(
            WORKER,
            "engine::tests::a_record_with_a_refused_result_becomes_a_dead_letter_without_any_results",
        )],
    ),
    mutant(
        "engine-keeps-other-results-of-refused-records",
        "A record gets a dead letter and some of its results. A redrive writes these again.",
        &[unit(
            WORKER,
            "engine::tests::a_record_with_a_refused_result_becomes_a_dead_letter_without_any_results",
        )],
    ),
    mutant(
        "engine-writes-to-missing-topics",
        "Results for a missing topic are not held back. They block the transactions of all records.",
        &[unit(
            WORKER,
            "engine::tests::only_records_for_a_missing_topic_wait_for_it",
        )],
    ),
    mutant(
        "engine-forgets-waiting-results",
        "Results that waited for a missing topic are dropped when it exists again. The partition is stuck.",
        &[unit(
            WORKER,
            "engine::tests::only_records_for_a_missing_topic_wait_for_it",
        )],
    ),
    mutant(
        "engine-lets-followers-overtake",
        "With an order, a result is written before that of an earlier record that waits for a missing topic.",
        &[unit(
            WORKER,
            "engine::tests::with_an_order_results_do_not_overtake_an_earlier_one_that_waits_for_another_topic",
        )],
    ),
    mutant(
        "relay-releases-early",
        "Records are released one millisecond early.",
        &[
            RELAY_MODEL,
            unit(
                RELAY,
                "relay::tests::a_record_is_released_when_it_is_due_and_not_a_millisecond_before",
            ),
        ],
    ),
    mutant(
        "relay-ignores-the-order-of-due-times",
        "Records are released in the order of their offsets. A long wait delays shorter ones after it.",
        &[
            RELAY_MODEL,
            unit(
                RELAY,
                "relay::tests::a_long_wait_does_not_delay_a_shorter_one_after_it",
            ),
        ],
    ),
    mutant(
        "relay-forgets-completions",
        "A record is released and its offset is not completed. It is released again after a restart.",
        &[RELAY_MODEL],
    ),
    mutant(
        "relay-completes-the-next-record",
        "A release completes the offset of the next record. That record is lost after a restart.",
        &[RELAY_MODEL],
    ),
    mutant(
        "relay-keeps-revoked-partitions",
        "Records of a revoked partition are released. Its new owner releases them again.",
        &[
            RELAY_MODEL,
            unit(RELAY, "relay::tests::a_revoked_partition_is_forgotten"),
        ],
    ),
    mutant(
        "relay-loses-moved-records",
        "A record that moves to the end of a tier is completed, but not written. It is lost.",
        &[
            RELAY_MODEL,
            unit(
                RELAY,
                "relay::tests::a_full_look_ahead_moves_long_waits_to_the_tier_that_fits",
            ),
        ],
    ),
    mutant(
        "relay-searches-once-per-interval",
        "Long waits in a short tier move one look-ahead per second. Records behind them are late.",
        &[unit(
            RELAY,
            "relay::tests::long_waits_move_as_fast_as_they_are_read",
        )],
    ),
    mutant(
        "relay-moves-to-longer-tiers",
        "A record moves to a tier whose delay exceeds the remaining wait. It is released late.",
        &[
            RELAY_MODEL,
            unit(
                RELAY,
                "relay::tests::a_record_that_every_tier_would_release_late_does_not_move",
            ),
        ],
    ),
    mutant(
        "relay-moves-records-that-are-in-place",
        "Records of a full look-ahead move to shorter tiers, although they are in the right one. Each wait is written many times.",
        &[unit(
            RELAY,
            "relay::tests::records_of_a_full_look_ahead_that_are_in_the_right_tier_do_not_move",
        )],
    ),
    mutant(
        "relay-strips-refused-records",
        "A record that its return topic refuses loses its payload. It gets no dead letter.",
        &[unit(
            RELAY,
            "relay::tests::a_record_that_its_return_topic_refuses_becomes_a_dead_letter",
        )],
    ),
    mutant(
        "relay-writes-to-missing-topics",
        "Records for a missing return topic are released. They block the transactions of all records.",
        &[unit(
            RELAY,
            "relay::tests::a_record_whose_return_topic_is_missing_stays_and_dead_letters_are_written",
        )],
    ),
    mutant(
        "shard-acts-before-its-index-is-ready",
        "A shard dispatches jobs while its index may miss changes. Jobs are dispatched twice.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-counts-a-turn-twice",
        "A shard counts what it writes in one transaction as two turns. When the index has the first part of them, keys are forgotten and jobs are accepted twice.",
        &[
            unit(SCHEDULER, "shard::tests::keys::split_turn_keeps_keys"),
            SHARD_MODEL,
        ],
    ),
    mutant(
        "shard-dispatches-early",
        "Jobs are dispatched one millisecond early.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-dispatches-expired-jobs",
        "Jobs are dispatched after they have expired.",
        &[unit(
            SCHEDULER,
            "shard::tests::waiting::an_expired_job_is_not_dispatched",
        )],
    ),
    mutant(
        "shard-dispatches-without-a-state-record",
        "A dispatch is not written to the state topic. The job is dispatched again after a takeover.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-forgets-completions",
        "A command is decided and its offset is not completed. It is decided again after a restart.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-forgets-idempotency-keys",
        "A shard does not remember new idempotency keys. A repeated request makes a second job.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-takes-repetitions-for-events",
        "A request that replaces others and is sent again after its job was dispatched makes a second job.",
        &[
            unit(
                SCHEDULER,
                "shard::conflict::tests::a_repetition_of_the_newest_request_has_no_effect",
            ),
            SHARD_MODEL,
        ],
    ),
    mutant(
        "shard-ignores-quotas",
        "An application schedules more jobs than its quota permits.",
        &[QUOTAS],
    ),
    mutant(
        "shard-counts-no-ended-jobs",
        "An application has used up its quota for ever, although its jobs are dispatched.",
        &[QUOTAS],
    ),
    mutant(
        "shard-ignores-cancellations",
        "A cancellation is confirmed, and the job is dispatched.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-trusts-the-index-too-early",
        "A command sees the state in the index, which may be older than the shard's own decisions. A dispatched job is cancelled.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-forgets-evicted-jobs",
        "A job that leaves a full window is not looked up again. It is dispatched only after a takeover.",
        &[unit(
            SCHEDULER,
            "shard::tests::full_window::a_new_job_evicts_later_jobs_from_a_full_window",
        )],
    ),
    mutant(
        "shard-skips-jobs-during-a-scan",
        "A job that arrives during a scan and does not fit into the window is skipped. It is dispatched only after a takeover.",
        &[SHARD_MODEL],
    ),
    mutant(
        "window-ignores-rates",
        "An application dispatches more jobs than its rate allows.",
        &[unit(
            SCHEDULER,
            "window::tests::an_application_without_tokens_is_left_out_and_delays_no_other",
        )],
    ),
    mutant(
        "window-has-no-shares",
        "A flow that fills the window keeps the jobs of others out. A burst of one application delays all others.",
        &[unit(
            SCHEDULER,
            "window::tests::a_flow_below_its_share_makes_larger_ones_give_up_their_latest_jobs",
        )],
    ),
    mutant(
        "shard-forgets-beside-due-jobs",
        "A burst is forgotten as fast as possible, a day after it has ended. Meanwhile, due jobs are late.",
        &[unit(
            SCHEDULER,
            "shard::tests::waiting::few_jobs_are_forgotten_in_a_turn_while_others_are_due_soon",
        )],
    ),
    mutant(
        "shard-forgets-parked-jobs",
        "A due job whose topic is missing is not parked. It is dispatched only after a takeover.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-writes-to-missing-dead-letter-topics",
        "A long wait that is rejected or may be refused is written although no dead letter can be. Each such transaction fails.",
        &[unit(
            SCHEDULER,
            "shard::tests::pipelines::a_long_wait_waits_for_its_dead_letter_topic",
        )],
    ),
    mutant(
        "shard-releases-later-waits",
        "A release also dispatches records that have come after it. They are early.",
        &[unit(
            SCHEDULER,
            "shard::tests::released_waits::what_waits_at_a_release_is_dispatched_once_and_what_comes_later_is_not",
        )],
    ),
    mutant(
        "shard-finishes-releases-too-early",
        "A release is finished before its jobs are committed as due. After a failed transaction, they wait until their due time.",
        &[unit(
            SCHEDULER,
            "shard::tests::released_waits::what_was_released_but_not_committed_is_read_again_by_the_next_owner",
        )],
    ),
    mutant(
        "shard-finishes-releases-before-their-commands",
        "A release is finished before all commands that it is about were read. Those that an owner reads that does not know the release wait until their due time.",
        &[unit(
            SCHEDULER,
            "shard::tests::released_waits::what_is_read_after_a_release_by_an_owner_that_does_not_know_it_is_released",
        )],
    ),
    mutant(
        "shard-forwards-without-the-first-time",
        "A forwarded request loses the time of its first record. Its delay counts from a later time.",
        &[unit(
            SCHEDULER,
            "shard::tests::pipelines::the_delay_of_a_forwarded_request_counts_from_its_first_record",
        )],
    ),
    mutant(
        "shard-creates-jobs-of-occurrences-twice",
        "A schedule is written without its progress after an occurrence. The same occurrence creates jobs again and again.",
        &[unit(
            SCHEDULER,
            "shard::tests::recurring::each_occurrence_is_dispatched_once_or_skipped",
        )],
    ),
    mutant(
        "outbox-drops-refused-batches",
        "Changes that a full index refuses are not sent again. The index never learns of them.",
        &[SHARD_MODEL],
    ),
    mutant(
        "outbox-confirms-half-a-turn",
        "A turn counts as applied when the index has only its first part. Jobs are dispatched twice.",
        &[unit(
            SCHEDULER,
            "shard::outbox::tests::a_turn_is_confirmed_with_its_last_batch",
        )],
    ),
    mutant(
        "index-queries-without-owner",
        "A query of a shard does not say who asks. A shard that another process has claimed is read as if nothing had happened: its jobs are dispatched twice.",
        &[integration(
            SCHEDULER,
            "index::in_redis::former_owner_queries_are_fenced",
        )],
    ),
    mutant(
        "index-evicts-jobs-that-just-ended",
        "Jobs lose their record as soon as others end. A repeated cancellation of a job that has just ended is told that the job is unknown.",
        &[unit(
            SCHEDULER,
            "index::memory::tests::a_job_that_has_just_ended_keeps_its_record",
        )],
    ),
    mutant(
        "scheduler-forgets-the-owner",
        "A dispatch without a command does not prove that its lane still owns the shard. A former owner dispatches jobs again.",
        &[unit(
            SCHEDULER,
            "processor::tests::a_dispatch_without_a_command_proves_that_the_lane_owns_its_shard",
        )],
    ),
    mutant(
        "clock-trusts-each-step",
        "A step of the wall clock is confirmed at once. What is due by the wrong time is released early.",
        &[
            unit(
                CORE,
                "clock_guard::tests::a_step_is_held_until_the_new_offset_has_lasted",
            ),
            RELAY_HOLD,
            SCHEDULER_HOLD,
        ],
    ),
    mutant(
        "relay-ignores-holds",
        "Records are released by a time that is not confirmed. They may be early.",
        &[RELAY_HOLD],
    ),
    mutant(
        "relay-ignores-pauses",
        "A tier releases records although an operator has paused it.",
        &[unit(
            RELAY,
            "relay::tests::control::a_paused_tier_releases_nothing_and_what_is_due_afterwards",
        )],
    ),
    mutant(
        "driver-ignores-pauses",
        "A worker starts attempts although an operator has paused the pipeline.",
        &[unit(
            WORKER,
            "driver::tests::a_paused_pipeline_starts_no_attempt_and_accepts_nothing_until_it_runs_again",
        )],
    ),
    mutant(
        "limiter-ignores-operators",
        "A worker starts attempts faster than an operator wants.",
        &[unit(
            WORKER,
            "driver::tests::attempts_start_in_their_order_at_the_rate_that_an_operator_wants_until_it_is_lifted",
        )],
    ),
    mutant(
        "relay-loses-what-it-takes-back",
        "A record whose transaction was aborted is not released before the tier is read again.",
        &[unit(
            RELAY,
            "relay::tests::control::what_was_not_written_before_a_pause_is_not_written_during_it",
        )],
    ),
    mutant(
        "scheduler-ignores-holds",
        "Jobs are dispatched by a time that is not confirmed. They may be early.",
        &[SCHEDULER_HOLD],
    ),
    mutant(
        "scheduler-accepts-during-holds",
        "Delays of commands count from a time that is not confirmed. Their jobs may be early.",
        &[unit(
            SCHEDULER,
            "processor::tests::a_delay_never_counts_from_a_time_that_is_not_confirmed",
        )],
    ),
    mutant(
        "scheduler-ignores-growth",
        "Shards go on after their topic has grown. Processes with different numbers of shards forward jobs to each other for ever.",
        &[unit(
            SCHEDULER,
            "growth::tests::only_a_higher_number_of_partitions_is_a_growth",
        )],
    ),
    mutant(
        "reader-takes-any-end",
        "A reader takes any end of partition for the one that it has to reach. Records before it are skipped.",
        &[unit(
            KAFKA,
            "partition_end::tests::an_end_is_reached_only_if_everything_before_it_was_read",
        )],
    ),
    mutant(
        "budget-keeps-no-reserve",
        "A lane leaves the other one no room. Retries wait until calls of new records end.",
        &[unit(
            WORKER,
            "budget::tests::a_lane_uses_what_an_idle_one_does_not_need_and_leaves_its_reserve",
        )],
    ),
    mutant(
        "kafka-forgets-the-prefix",
        "Ids have no prefix. Two installations on one cluster take records from each other.",
        &[unit(
            KAFKA,
            "client::tests::every_id_has_the_prefix_and_without_one_is_as_before",
        )],
    ),
    mutant(
        "credentials-are-not-used",
        "New clients get the former certificate. Once it has expired, no client can connect any more.",
        &[unit(
            KAFKA,
            "credentials::tests::owners_replace_their_clients_one_at_a_time",
        )],
    ),
    mutant(
        "credentials-are-not-tried",
        "Changed certificates are used although Kafka refuses them. All lanes stop.",
        &[unit(
            KAFKA,
            "credentials::tests::contents_with_which_no_connection_is_possible_are_not_used",
        )],
    ),
    mutant(
        "groups-ignore-revisions",
        "A change of a group ignores changes since the expected revision. An operator undoes what another one has just decided.",
        &[unit(
            INSPECTOR,
            "group_states::change::tests::another_revision_than_the_expected_one_is_refused_also_if_nothing_would_change",
        )],
    ),
    mutant(
        "groups-regress-by-old-dead-letters",
        "A dead letter from before the resolution makes a group regressed. Nobody can resolve a group.",
        &[unit(
            INSPECTOR,
            "group_states::state::tests::only_a_dead_letter_that_is_written_after_the_resolution_makes_a_group_regressed",
        )],
    ),
    mutant(
        "groups-are-changed-by-readers",
        "A caller that may change groups of one topic changes those of all topics that it sees.",
        &[unit(
            INSPECTOR,
            "access::tests::a_group_is_changed_by_callers_that_may_do_so_in_all_of_its_topics",
        )],
    ),
    mutant(
        "groups-without-audit",
        "A change of a group is written without its entry in the audit topic. Nobody can find out who has made it.",
        &[unit(
            INSPECTOR,
            "group_states::change::tests::a_change_keeps_what_it_does_not_change",
        )],
    ),
    mutant(
        "edit-sets-any-header",
        "An edit sets reserved headers. Whoever edits a dead letter gives it another origin or more attempts.",
        &[unit(
            INSPECTOR,
            "redrive::edit::tests::only_headers_of_the_user_can_be_edited",
        )],
    ),
    mutant(
        "redrive-canary-counts-skipped",
        "Skipped dead letters end the first batches of a redrive. After those that are gone, all others are written at once.",
        &[unit(
            INSPECTOR,
            "redrive::pace::tests::skipped_items_end_no_batch",
        )],
    ),
    mutant(
        "redrive-empties-records",
        "A redrive takes the dead letter of a share group for a copy of the record, also if the broker has not copied it. A record without key and value is written.",
        &[unit(
            INSPECTOR,
            "redrive::record::tests::a_dead_letter_of_a_share_group_without_key_and_value_is_no_record",
        )],
    ),
    mutant(
        "redrive-forgets-requests",
        "A repeated request plans another job. A command that is repeated after a lost answer runs twice as many jobs.",
        &[unit(
            INSPECTOR,
            "redrive::change::tests::a_plan_is_written_once_for_a_request",
        )],
    ),
    mutant(
        "redrive-ignores-the-content",
        "A redrive takes the record that is at the position now. After a topic was created again, another record is written.",
        &[unit(
            INSPECTOR,
            "redrive::step::tests::only_the_planned_record_in_the_state_of_the_plan_is_done",
        )],
    ),
    mutant(
        "redrive-ignores-the-ledger",
        "A redrive does not look at the state of a dead letter. Two jobs redrive it twice, and discarded ones are redriven.",
        &[unit(
            INSPECTOR,
            "redrive::step::tests::only_the_planned_record_in_the_state_of_the_plan_is_done",
        )],
    ),
    mutant(
        "redrive-keeps-attempts",
        "A redriven record keeps its failed attempts. It becomes a dead letter again at its first failure.",
        &[unit(
            INSPECTOR,
            "redrive::record::tests::a_record_returns_to_its_pipeline_as_a_retry_without_failed_attempts",
        )],
    ),
    mutant(
        "redrive-takes-any-original",
        "A redrive takes the record that is at the origin now for the payload that was left out. After the topic was created again, another record is written.",
        &[unit(
            INSPECTOR,
            "redrive::omitted::tests::another_record_is_not_taken_for_the_original",
        )],
    ),
    mutant(
        "redrive-without-ledger",
        "A redrive writes no ledger entries. The next job redrives the same dead letters again.",
        &[unit(
            INSPECTOR,
            "redrive::step::tests::a_step_writes_records_entries_progress_outcomes_and_the_audit",
        )],
    ),
    mutant(
        "redrive-writes-anywhere",
        "A redrive writes to the topic that the headers name. Whoever can write to a dead-letter topic can write to any topic.",
        &[unit(
            INSPECTOR,
            "redrive::record::tests::forged_headers_choose_no_topic_that_is_not_allowed",
        )],
    ),
    mutant(
        "transaction-commits-undelivered-records",
        "A transaction does not wait for its deliveries. A refused record is not reported, and its transaction fails for ever.",
        &[integration(
            KAFKA,
            "errors::a_record_that_is_refused_on_its_own_is_reported",
        )],
    ),
    mutant(
        "lane-reads-uncommitted",
        "A lane also reads records of open and aborted transactions. Records that were never accepted are processed.",
        &[integration(
            KAFKA,
            "isolation::a_lane_does_not_read_records_of_aborted_transactions",
        )],
    ),
    mutant(
        "tracker-commits-one-too-many",
        "The committed offset is one too high. The first incomplete record is lost after a restart.",
        &[TRACKER_MODEL],
    ),
    mutant(
        "tracker-commits-the-position",
        "The next offset to read is committed, not the lowest incomplete one. Records in flight are lost after a restart.",
        &[TRACKER_MODEL],
    ),
    mutant(
        "tracker-marks-the-position-committed",
        "Completions during a transaction count as committed with it. They are processed again after a restart.",
        &[
            TRACKER_MODEL,
            unit(
                KAFKA,
                "tracker::tests::a_position_is_returned_until_it_is_committed",
            ),
        ],
    ),
    mutant(
        "tracker-loses-metadata",
        "The commit lacks the completed set. Records after an incomplete one are processed again after a restart.",
        &[
            TRACKER_MODEL,
            integration(
                KAFKA,
                "lane::completed_records_after_an_incomplete_one_are_not_processed_again_after_a_restart",
            ),
        ],
    ),
    mutant(
        "tracker-drops-a-hole",
        "Only the first incomplete record is missing from the completed set. The others are lost after a restart.",
        &[TRACKER_MODEL],
    ),
    mutant(
        "tracker-drops-unread-holes",
        "Records that were incomplete before a restart and are not read again yet count as completed. They are lost.",
        &[
            TRACKER_MODEL,
            unit(
                KAFKA,
                "tracker::tests::restored_offsets_survive_a_commit_before_they_are_read_again",
            ),
        ],
    ),
    mutant(
        "tracker-admits-completed-records",
        "Records of the completed set are processed again.",
        &[TRACKER_MODEL],
    ),
    mutant(
        "tracker-admits-stale-records",
        "Records from a fetch before a rewind are processed again.",
        &[unit(
            KAFKA,
            "tracker::tests::offsets_below_the_position_are_stale",
        )],
    ),
    mutant(
        "tracker-completes-twice",
        "A second completion of a record is accepted. Its results are written twice.",
        &[unit(
            KAFKA,
            "tracker::tests::a_record_in_flight_can_be_completed_once",
        )],
    ),
    mutant(
        "tracker-ignores-its-weight",
        "Records are admitted although the completed set may not fit into the metadata. The process fails.",
        &[unit(
            KAFKA,
            "tracker::tests::a_full_tracker_admits_nothing_until_enough_records_complete",
        )],
    ),
    mutant(
        "metadata-drops-a-bit",
        "Some incomplete records of a bitmap are encoded as completed. They are lost after a restart.",
        &[
            TRACKER_MODEL,
            unit(
                KAFKA,
                "tracker::metadata::tests::each_form_fits_its_weight_and_decodes_to_the_same_set",
            ),
        ],
    ),
    mutant(
        "metadata-omits-the-fingerprint",
        "A commit does not identify its topic. Records of a topic that was created again are skipped.",
        &[unit(
            KAFKA,
            "tracker::tests::a_commit_of_an_earlier_topic_of_the_same_name_is_recognised",
        )],
    ),
    mutant(
        "masking-keeps-fields",
        "Fields of values are not masked. Callers see what a rule hides from them.",
        &[unit(
            INSPECTOR,
            "masking::json::tests::a_document_is_masked_as_the_slow_model_does_it",
        )],
    ),
    mutant(
        "masking-shows-what-it-cannot-read",
        "A value in which the fields to mask cannot be found is shown.",
        &[unit(
            INSPECTOR,
            "masking::tests::a_value_without_a_place_for_its_fields_is_withheld",
        )],
    ),
    mutant(
        "masking-shows-decoded-values",
        "What is masked in a value is shown in the decoded one.",
        &[unit(
            INSPECTOR,
            "api::value::tests::a_decoded_value_is_masked_by_the_rules_of_its_topic",
        )],
    ),
    mutant(
        "masking-answers-filters",
        "A filter on error messages matches what is masked in them. Callers find it out by guessing.",
        &[unit(
            INSPECTOR,
            "masking::tests::a_filter_tests_what_may_be_masked_in_any_notation",
        )],
    ),
    mutant(
        "masking-groups-by-secrets",
        "The templates of groups contain what is masked in messages.",
        &[unit(
            INSPECTOR,
            "letter::tests::a_group_is_made_of_what_is_not_masked",
        )],
    ),
    mutant(
        "control-without-audit",
        "A change of control is written without its entry in the audit topic. Nobody can find out who has made it.",
        &[unit(
            SERVICE,
            "control::change::tests::a_change_keeps_what_it_does_not_change",
        )],
    ),
    mutant(
        "control-releases-deleted-topics",
        "A release of a deleted topic replaces one of the topic that was created since. What an operator has released waits until it is due.",
        &[unit(
            SERVICE,
            "control::change::tests::a_release_that_was_looked_up_before_another_one_does_not_replace_that_of_a_newer_topic",
        )],
    ),
];

/// The table in `docs/mutants.md`.
pub(crate) fn markdown() -> String {
    let mut table = "| defect | what happens | caught by |\n|---|---|---|\n".to_owned();
    for mutant in MUTANTS {
        let tests: Vec<String> = mutant
            .caught_by
            .iter()
            .map(|test| format!("`{}`: `{}`", test.binary, test.name))
            .collect();
        writeln!(
            table,
            "| `{}` | {} | {} |",
            mutant.name,
            mutant.defect,
            tests.join("; ")
        )
        .expect("writing to a string cannot fail");
    }
    table
}

impl std::fmt::Display for Binary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.package)?;
        match self.target {
            Target::Lib => Ok(()),
            Target::It => f.write_str("/tests/it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use super::*;

    fn workspace() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// The contents of all Rust files in a directory.
    fn sources(directory: &Path) -> Vec<String> {
        let mut sources = Vec::new();
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources.extend(self::sources(&path));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                sources.push(std::fs::read_to_string(path).unwrap());
            }
        }
        sources
    }

    #[test]
    fn the_table_lists_the_planted_defects() {
        let mut planted = BTreeSet::new();
        for parent in ["crates", "services"] {
            for package in std::fs::read_dir(workspace().join(parent)).unwrap() {
                let package = package.unwrap().path();
                if package.ends_with("xtask") {
                    continue;
                }
                for source in sources(&package.join("src")) {
                    // Without comments, which contain examples.
                    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
                    // Without spaces, because a long call is split into lines.
                    let code: String = code.flat_map(str::split_whitespace).collect();
                    let names = code.split("mutant!(\"").skip(1);
                    planted.extend(names.map(|rest| rest.split('"').next().unwrap().to_owned()));
                }
            }
        }
        let listed: BTreeSet<String> = MUTANTS.iter().map(|mutant| mutant.name.to_owned()).collect();
        assert_eq!(listed.len(), MUTANTS.len(), "a name is listed twice");
        assert_eq!(listed, planted);
    }

    #[test]
    fn the_tests_that_catch_defects_exist() {
        for mutant in MUTANTS {
            assert!(!mutant.caught_by.is_empty(), "{}", mutant.name);
            for test in mutant.caught_by {
                let directory = match test.binary.target {
                    Target::Lib => "src",
                    Target::It => "tests/it",
                };
                let directory = workspace().join(test.binary.package).join(directory);
                let name = test.name.rsplit("::").next().unwrap();
                // Cases that several implementations share are generic.
                let functions = ["(", "<"].map(|next| format!("fn {name}{next}"));
                assert!(
                    sources(&directory)
                        .iter()
                        .any(|source| functions.iter().any(|function| source.contains(function))),
                    "{}: no test {}",
                    mutant.name,
                    test.name
                );
            }
        }
    }

    #[test]
    fn the_docs_contain_the_table() {
        let page = std::fs::read_to_string(workspace().join("docs/mutants.md")).unwrap();
        assert!(
            page.contains(&markdown()),
            "copy the output of `cargo xtask mutants --list` into docs/mutants.md"
        );
    }
}
