//! Whether an answer of the inspector is complete, as a warning, as JSON, and as an exit status.

use std::process::ExitCode;

use redeliver_client::convert::time;
use redeliver_client::messages::{Completeness, MissingPartition, MissingReason};

use crate::output::in_one_line;

/// The exit status of an incomplete answer, if the command requires a complete one, and of a masked payload.
pub(crate) const EXIT_INCOMPLETE: u8 = 3;
/// Maximum number of missing partitions in a warning.
const SHOWN: usize = 5;

#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct CompleteArgs {
    /// Exit with status 3 if the answer is incomplete
    #[arg(long)]
    require_complete: bool,
}

impl CompleteArgs {
    /// Warns on stderr about an incomplete answer, and returns the exit status.
    pub(crate) fn conclude(self, completeness: &Completeness) -> ExitCode {
        warn(completeness);
        if self.require_complete && !completeness.complete {
            return ExitCode::from(EXIT_INCOMPLETE);
        }
        ExitCode::SUCCESS
    }
}

/// Warns on stderr about an incomplete answer.
pub(crate) fn warn(completeness: &Completeness) {
    if let Some(problem) = problem(completeness) {
        eprintln!("warning: {}", in_one_line(&problem));
    }
}

/// What is incomplete; `None` if nothing is.
pub(crate) fn problem(completeness: &Completeness) -> Option<String> {
    if completeness.complete {
        return None;
    }
    let as_of = match time(completeness.as_of) {
        Some(as_of) => format!("as of {as_of}"),
        None => "as of an unknown time".to_owned(),
    };
    let problem = &completeness.group_states_problem;
    if !problem.is_empty() {
        let index = match completeness.missing_count {
            0 => String::new(),
            missing => format!("; in addition, {missing} partitions are missing"),
        };
        return Some(in_one_line(&format!(
            "states and notes of groups may not be the current ones: {problem}; the index is {as_of}{index}"
        )));
    }
    if completeness.missing_count == 0 {
        return Some(format!("the answer is incomplete: the index is {as_of}"));
    }
    let mut shown: Vec<String> = completeness.missing.iter().take(SHOWN).map(partition).collect();
    let more = u64::from(completeness.missing_count).saturating_sub(shown.len() as u64);
    if more > 0 {
        shown.push(format!("and {more} more"));
    }
    let states = if completeness.states_known {
        ""
    } else {
        "; states are unknown, because the ledger cannot be read"
    };
    Some(format!(
        "the answer is incomplete: these partitions are missing: {}; all others are {as_of}{states}",
        shown.join(", ")
    ))
}

fn partition(missing: &MissingPartition) -> String {
    let place = match missing.partition {
        Some(partition) => format!("{}/{partition}", missing.topic),
        None => missing.topic.clone(),
    };
    let reason = match missing.reason() {
        MissingReason::Unspecified => "for an unknown reason",
        MissingReason::NoLeader => "no leader",
        MissingReason::Refused => "refused",
        MissingReason::NotRead => "not read yet",
        MissingReason::NotRemoved => "not removed yet",
    };
    let separator = if missing.error.is_empty() { "" } else { ": " };
    in_one_line(&format!("{place} ({reason}{separator}{})", missing.error))
}

#[cfg(test)]
mod tests {
    use redeliver_client::Timestamp;
    use redeliver_client::convert::to_timestamp;

    use super::*;

    fn completeness(missing: Vec<MissingPartition>, count: u32) -> Completeness {
        Completeness {
            complete: false,
            as_of: Some(to_timestamp(Timestamp::from_millis(1_763_722_800_123))),
            missing,
            missing_count: count,
            states_known: true,
            group_states_problem: String::new(),
        }
    }

    fn missing(topic: &str, partition: Option<i32>, reason: MissingReason) -> MissingPartition {
        MissingPartition {
            topic: topic.to_owned(),
            partition,
            reason: reason.into(),
            error: match reason {
                MissingReason::Refused => "denied\u{1b}".to_owned(),
                _ => String::new(),
            },
        }
    }

    #[test]
    fn a_warning_names_missing_partitions() {
        let complete = Completeness {
            complete: true,
            ..completeness(Vec::new(), 0)
        };
        assert_eq!(problem(&complete), None);
        let old = problem(&completeness(Vec::new(), 0)).unwrap();
        assert_eq!(
            old,
            "the answer is incomplete: the index is as of 2025-11-21T11:00:00.123Z"
        );
        let mut many = vec![
            missing("a-dlq", Some(3), MissingReason::NoLeader),
            missing("redeliver.dlq.ledger", None, MissingReason::Refused),
        ];
        many.extend((0..18).map(|number| missing("b-dlq", Some(number), MissingReason::NotRead)));
        let mut many = completeness(many, 5_000);
        many.states_known = false;
        assert_eq!(
            problem(&many).unwrap(),
            "the answer is incomplete: these partitions are missing: a-dlq/3 (no leader), redeliver.dlq.ledger (refused: \
             denied\\u{1b}), b-dlq/0 (not read yet), b-dlq/1 (not read yet), b-dlq/2 (not read yet), and 4995 more; all \
             others are as of 2025-11-21T11:00:00.123Z; states are unknown, because the ledger cannot be read"
        );
    }

    #[test]
    fn a_warning_names_old_group_states() {
        let old = Completeness {
            group_states_problem: "denied\u{1b}".to_owned(),
            ..completeness(Vec::new(), 0)
        };
        let text = "states and notes of groups may not be the current ones: denied\\u{1b}; the index is as of \
                    2025-11-21T11:00:00.123Z";
        assert_eq!(problem(&old).as_deref(), Some(text));
        let with_missing = Completeness {
            missing_count: 2,
            ..old
        };
        let text = format!("{text}; in addition, 2 partitions are missing");
        assert_eq!(problem(&with_missing), Some(text));
    }

    #[test]
    fn incomplete_answers_fail_on_request() {
        let partial = completeness(Vec::new(), 0);
        let status = |require_complete, completeness: &Completeness| {
            let code = CompleteArgs { require_complete }.conclude(completeness);
            format!("{code:?}")
        };
        assert_eq!(status(false, &partial), format!("{:?}", ExitCode::SUCCESS));
        assert_eq!(status(true, &partial), format!("{:?}", ExitCode::from(3)));
        let complete = Completeness {
            complete: true,
            ..partial
        };
        assert_eq!(status(true, &complete), format!("{:?}", ExitCode::SUCCESS));
    }
}
