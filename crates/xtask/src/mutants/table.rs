//! The planted defects, and the tests that catch them. The product plants each with `redeliver_core::mutant!`.
//!
//! A defect belongs where the model tests have to prove exactly-once delivery; what one unit test says about one line needs
//! none. Its name says what the defective code does. Prefer unit and model tests to catch it, and choose an integration test
//! only for what is not visible without Kafka. The process of the test must execute the defect.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// A planted defect.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutant {
    /// The name in `mutant!`, and the value of the environment variable.
    pub(crate) name: &'static str,
    /// What the defective build does, and what that means for users.
    pub(crate) defect: &'static str,
    /// The tests that must fail, each on its own.
    pub(crate) caught_by: &'static [Test],
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

impl Binary {
    /// The directory of the package, in which cargo runs its tests.
    pub(crate) fn directory(self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../..")
            .join(self.package)
    }
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
    }
}

const KAFKA: &str = "crates/kafka";
const WORKER: &str = "crates/worker";
const RELAY: &str = "services/retry-tier";
const SCHEDULER: &str = "services/scheduler";
const INSPECTOR: &str = "services/dlq-inspector";
/// Its tests are built apart from the others.
pub(super) const LAKE: &str = "services/lake";

const TRACKER_MODEL: Test = unit(KAFKA, "tracker::tests::offsets_are_completed_exactly_once");
const LANE_MODEL: Test = unit(KAFKA, "lane::model::random_histories_write_exactly_once");
const RELAY_MODEL: Test = unit(RELAY, "relay::tests::model::records_leave_once_never_early");
const SHARD_MODEL: Test = unit(SCHEDULER, "shard::tests::jobs_are_dispatched_once_never_early");

pub(crate) const MUTANTS: &[Mutant] = &[
    mutant(
        "lane-accepts-stale-assignments",
        "Results of a previous assignment complete records that were read again. They are written twice.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-repeats-assignment-ids",
        "A new assignment has the id of a previous one, so late results match its records. They are written twice.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-drops-the-completed-set",
        "A lane commits positions without the completed set. Records after an incomplete one are processed again by the next owner.",
        &[LANE_MODEL],
    ),
    mutant(
        "lane-forgets-the-owner",
        "A transaction that completes no record carries no offsets, so the broker cannot refuse it. A previous owner can still write.",
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
        "lane-trusts-a-previous-membership",
        "A lane that the coordinator had removed continues where it was. Another member may have processed the records.",
        &[LANE_MODEL],
    ),
    mutant(
        "breaker-burns-attempts",
        "Each failure of the endpoint counts. An outage uses up all retries of the records that arrive meanwhile.",
        &[unit(WORKER, "breaker::tests::opening_failures_are_forgotten")],
    ),
    mutant(
        "breaker-closes-after-one-answer",
        "A half-open breaker closes after one answer. All records are sent to an endpoint that can answer only a few of them.",
        &[unit(WORKER, "breaker::tests::permits_double_until_closed")],
    ),
    mutant(
        "engine-accepts-stale-assignments",
        "Results for a revoked partition are written. Its new owner writes them again.",
        &[unit(
            WORKER,
            "engine::tests::results_of_earlier_assignment_are_dropped",
        )],
    ),
    mutant(
        "engine-completes-unprocessed-records",
        "Records that a stopping worker returns without an attempt are completed. They are lost.",
        &[unit(WORKER, "engine::tests::unattempted_records_are_given_back")],
    ),
    mutant(
        "engine-completes-before-its-outputs",
        "A record is completed in a transaction without its results. They are lost.",
        &[unit(WORKER, "engine::tests::only_records_for_missing_topic_wait")],
    ),
    mutant(
        "engine-drops-refused-results",
        "A record whose result is refused gets no dead letter. It is lost.",
        &[unit(WORKER, "engine::tests::refused_result_makes_a_dead_letter")],
    ),
    mutant(
        "engine-forgets-waiting-results",
        "Results that waited for a missing topic are dropped when it exists again. The partition is stuck.",
        &[unit(WORKER, "engine::tests::only_records_for_missing_topic_wait")],
    ),
    mutant(
        "engine-lets-followers-overtake",
        "With an order, a result is written before that of an earlier record that waits for a missing topic.",
        &[unit(WORKER, "engine::tests::ordered_results_do_not_overtake")],
    ),
    mutant(
        "relay-releases-early",
        "Records are released one millisecond early.",
        &[
            RELAY_MODEL,
            unit(RELAY, "relay::tests::record_is_released_when_due"),
        ],
    ),
    mutant(
        "relay-ignores-the-order-of-due-times",
        "Records are released in the order of their offsets. A long wait delays shorter ones after it.",
        &[
            RELAY_MODEL,
            unit(RELAY, "relay::tests::long_wait_delays_no_shorter_one"),
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
            unit(RELAY, "relay::tests::revoked_partition_is_forgotten"),
        ],
    ),
    mutant(
        "relay-repeats-what-was-acted-on",
        "A record beyond the look-ahead that an operator has acted on is written again when the tier gets there.",
        &[unit(
            RELAY,
            "relay::tests::acts::record_ahead_is_skipped_when_read",
        )],
    ),
    mutant(
        "relay-loses-moved-records",
        "A record that moves to the end of a tier is completed, but not written. It is lost.",
        &[
            RELAY_MODEL,
            unit(RELAY, "relay::tests::full_look_ahead_moves_long_waits"),
        ],
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
                "shard::conflict::tests::repeated_newest_request_has_no_effect",
            ),
            SHARD_MODEL,
        ],
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
        "shard-skips-jobs-during-a-scan",
        "A job that arrives during a scan and does not fit into the window is skipped. It is dispatched only after a takeover.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-forgets-blocked-jobs",
        "A due job whose topic is missing is not blocked. It is dispatched only after a takeover.",
        &[SHARD_MODEL],
    ),
    mutant(
        "shard-finishes-releases-before-their-commands",
        "A release is finished before all commands that it is about were read. Those that an owner reads that does not know the release wait until their due time.",
        &[unit(
            SCHEDULER,
            "shard::tests::released_waits::next_owner_completes_the_release",
        )],
    ),
    mutant(
        "shard-creates-jobs-of-occurrences-twice",
        "A schedule is written without its progress after an occurrence. The same occurrence creates jobs again and again.",
        &[unit(
            SCHEDULER,
            "shard::tests::recurring::each_occurrence_is_dispatched_or_skipped",
        )],
    ),
    mutant(
        "outbox-drops-refused-batches",
        "Changes that a full index refuses are not sent again. The index never learns of them.",
        &[SHARD_MODEL],
    ),
    mutant(
        "index-queries-without-owner",
        "A query of a shard does not say who asks. A shard that another process has claimed is read as if nothing had happened: its jobs are dispatched twice.",
        &[integration(
            SCHEDULER,
            "index::in_redis::previous_owner_queries_are_fenced",
        )],
    ),
    mutant(
        "scheduler-forgets-the-owner",
        "A dispatch without a command does not prove that its lane still owns the shard. A previous owner dispatches jobs again.",
        &[unit(
            SCHEDULER,
            "processor::tests::dispatch_without_command_proves_ownership",
        )],
    ),
    mutant(
        "relay-ignores-holds",
        "Records are released by a time that is not confirmed. They may be early.",
        &[unit(
            RELAY,
            "relay::tests::unconfirmed_clock_step_releases_nothing",
        )],
    ),
    mutant(
        "relay-loses-what-it-takes-back",
        "A record whose transaction was aborted is not released before the tier is read again.",
        &[unit(
            RELAY,
            "relay::tests::control::pause_holds_unwritten_records",
        )],
    ),
    mutant(
        "redrive-ignores-the-content",
        "A redrive takes the record that is at the position now. After a topic was created again, another record is written.",
        &[unit(
            INSPECTOR,
            "redrive::step::tests::only_planned_open_record_is_done",
        )],
    ),
    mutant(
        "redrive-ignores-the-origin-id",
        "A redrive reads an uncopied payload from any topic of that name. After a topic was created again, another record is written.",
        &[unit(
            INSPECTOR,
            "redrive::omitted::tests::another_record_is_not_the_uncopied",
        )],
    ),
    mutant(
        "redrive-ignores-the-ledger",
        "A redrive does not look at the state of a dead letter. Two jobs redrive it twice, and discarded ones are redriven.",
        &[unit(
            INSPECTOR,
            "redrive::step::tests::only_planned_open_record_is_done",
        )],
    ),
    mutant(
        "redrive-without-ledger",
        "A redrive writes no ledger entries. The next job redrives the same dead letters again.",
        &[unit(
            INSPECTOR,
            "redrive::step::tests::step_writes_everything_in_one_transaction",
        )],
    ),
    mutant(
        "transaction-commits-undelivered-records",
        "A transaction does not wait for its deliveries. A refused record is not reported, and its transaction fails for ever.",
        &[integration(KAFKA, "errors::single_refused_record_is_reported")],
    ),
    mutant(
        "lane-reads-uncommitted",
        "A lane also reads records of open and aborted transactions. Records that were never accepted are processed.",
        &[integration(KAFKA, "lane::aborted_records_are_not_read")],
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
            unit(KAFKA, "tracker::tests::position_is_returned_until_committed"),
        ],
    ),
    mutant(
        "tracker-loses-metadata",
        "The commit lacks the completed set. Records after an incomplete one are processed again after a restart.",
        &[
            TRACKER_MODEL,
            integration(KAFKA, "lane::restart_processes_only_incomplete_records"),
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
            unit(KAFKA, "tracker::tests::restored_offsets_survive_a_commit"),
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
        &[unit(KAFKA, "tracker::tests::record_is_completed_once")],
    ),
    mutant(
        "metadata-drops-a-bit",
        "Some incomplete records of a bitmap are encoded as completed. They are lost after a restart.",
        &[
            TRACKER_MODEL,
            unit(KAFKA, "tracker::metadata::tests::encodings_fit_and_decode"),
        ],
    ),
    mutant(
        "metadata-omits-the-fingerprint",
        "A commit does not identify its topic. Records of a topic that was created again are skipped.",
        &[unit(
            KAFKA,
            "tracker::tests::commit_of_earlier_topic_is_recognised",
        )],
    ),
    mutant(
        "lake-commits-without-comparing",
        "Rows are committed although another process has moved the positions of their partitions. The table has them twice.",
        &[unit(LAKE, "appender::tests::each_row_is_appended_once")],
    ),
    mutant(
        "lake-commits-rows-without-positions",
        "A commit does not move positions. After a restart, the same records are appended again.",
        &[unit(LAKE, "delta::tests::positions_follow_rows")],
    ),
    mutant(
        "lake-replaces-files-that-are-gone",
        "Files that another process has merged already are replaced once more. The table has their rows twice.",
        &[unit(
            LAKE,
            "maintain::tests::files_that_are_gone_are_not_replaced",
        )],
    ),
];

/// The table of planted defects, in Markdown.
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
}
