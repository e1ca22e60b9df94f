//! The names of enumerations, as commands show them: `PARTIALLY_SUCCEEDED` of `RedriveState` is `partially succeeded`.

use crate::v1;

/// For each enumeration, the prefix of its values, what the value 0 and values of a newer schema are called, and what stands between words.
macro_rules! names {
    ($($enumeration:ident: $prefix:literal, $unknown:expr, $separator:literal;)*) => {
        const ENUMERATIONS: &[(&str, Option<&str>, &str)] = &[$(($prefix, $unknown, $separator)),*];

        $(impl v1::$enumeration {
            /// The name in lower case; `None` if the value means that nothing is set.
            #[must_use]
            pub fn name(self) -> Option<String> {
                of(self.as_str_name())
            }
        })*
    };
}

names! {
    BreakerState: "BREAKER_STATE_", Some("unknown"), "_";
    DeadLetterState: "DEAD_LETTER_STATE_", Some("unknown"), "_";
    GroupState: "GROUP_STATE_", Some("unknown"), "_";
    HeaderChangeKind: "HEADER_CHANGE_KIND_", None, "_";
    HeaderDialect: "HEADER_DIALECT_", None, "_";
    JobOutcomeState: "JOB_OUTCOME_STATE_", Some("unknown"), "_";
    JobState: "JOB_STATE_", Some("unknown"), "_";
    MissingReason: "MISSING_REASON_", Some("other"), "_";
    NextStep: "NEXT_STEP_", None, "_";
    Outcome: "OUTCOME_", None, "_";
    OverviewPart: "OVERVIEW_PART_", Some("other"), "_";
    PayloadAtOrigin: "PAYLOAD_AT_ORIGIN_", None, " ";
    Priority: "PRIORITY_", Some("normal"), "_";
    ProblemKind: "PROBLEM_KIND_", Some("other"), "_";
    RedriveKind: "REDRIVE_KIND_", Some("unknown"), "_";
    RedriveOutcome: "REDRIVE_OUTCOME_", Some("pending"), "-";
    RedriveState: "REDRIVE_STATE_", Some("unknown"), " ";
    Removal: "REMOVAL_", Some("unknown"), "_";
    RunState: "RUN_STATE_", None, "_";
    ScheduleState: "SCHEDULE_STATE_", Some("unknown"), "_";
    GapPolicy: "GAP_POLICY_", None, "_";
    OverlapPolicy: "OVERLAP_POLICY_", None, "_";
    MisfirePolicy: "MISFIRE_POLICY_", Some("once"), "_";
    OccurrenceReason: "OCCURRENCE_REASON_", Some("unspecified"), "_";
    SchemaFormat: "SCHEMA_FORMAT_", None, "_";
    TraceEvent: "TRACE_EVENT_", Some("other"), "_";
    TraceOutcome: "TRACE_OUTCOME_", Some("unknown"), "_";
    WaitingActionState: "WAITING_ACTION_STATE_", Some("pending"), "_";
    WaitingAction: "WAITING_ACTION_", None, "_";
    WaitingOrder: "WAITING_ORDER_", Some("due"), "_";
}

impl v1::PayloadAtOrigin {
    /// What is known of the payload at the origin; `None` if the dead letter has its own.
    #[must_use]
    pub fn known(self) -> Option<String> {
        let name = self.name()?;
        let is_there = self == Self::NotVerified;
        Some(format!(
            "{} {name}",
            if is_there { "payload" } else { "no payload:" }
        ))
    }
}

/// The name of a value that the schema calls so, such as `REDRIVE_STATE_FAILED`; `None` if it means that nothing is set.
#[must_use]
pub fn of(value: &str) -> Option<String> {
    let mut known = ENUMERATIONS.iter();
    let found = known
        .find_map(|(prefix, unknown, separator)| Some((value.strip_prefix(prefix)?, *unknown, separator)));
    match found {
        Some(("UNSPECIFIED", unknown, _)) => unknown.map(str::to_owned),
        Some((name, _, separator)) => Some(name.to_lowercase().replace('_', separator)),
        None => Some(value.to_lowercase()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_names() {
        let some = |name: &str| Some(name.to_owned());
        assert_eq!(
            v1::RedriveState::PartiallySucceeded.name(),
            some("partially succeeded")
        );
        assert_eq!(v1::RedriveOutcome::TooOften.name(), some("too-often"));
        assert_eq!(v1::RedriveOutcome::Unspecified.name(), some("pending"));
        assert_eq!(v1::MissingReason::NotRead.name(), some("not_read"));
        assert_eq!(v1::HeaderDialect::ShareGroup.name(), some("share_group"));
        assert_eq!(v1::HeaderDialect::Unspecified.name(), None);
        let known = |state: v1::PayloadAtOrigin| state.known().unwrap_or_default();
        assert_eq!(known(v1::PayloadAtOrigin::NotVerified), "payload not verified");
        assert_eq!(known(v1::PayloadAtOrigin::Recreated), "no payload: recreated");
        assert_eq!(known(v1::PayloadAtOrigin::Unspecified), "");
        assert_eq!(of("NEW_ENUMERATION_VALUE"), some("new_enumeration_value"));
    }

    #[test]
    fn values_of_newer_schemas_have_names() {
        let step = v1::TraceStep {
            event: 77,
            ..v1::TraceStep::default()
        };
        assert_eq!(step.event().name().as_deref(), Some("other"));
        let letter = v1::DeadLetter {
            state: 77,
            ..v1::DeadLetter::default()
        };
        assert_eq!(letter.state().name().as_deref(), Some("unknown"));
    }
}
