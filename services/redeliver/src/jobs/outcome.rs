//! What has become of a job in a pipeline, as text.

use redeliver_client::messages::{JobOutcome, JobOutcomeState};

use crate::output::Text as _;

pub(super) fn as_text(outcome: &JobOutcome) -> String {
    let with =
        |word: &str, text: Option<String>| text.map_or_else(String::new, |text| format!("{word}{text}"));
    let at = |word: &str| with(word, outcome.position.text());
    let failure = [&outcome.error_class, &outcome.error_code]
        .map(|text| with(" ", text.text()))
        .concat();
    let attempt = match outcome.attempts {
        0 => "its first attempt".to_owned(),
        retry => format!("retry {retry}"),
    };
    let text = match outcome.state() {
        JobOutcomeState::Dispatched => at("dispatched to "),
        JobOutcomeState::Running => format!("queued or running: {attempt}{}", at(", in ")),
        JobOutcomeState::Waiting => format!(
            "waits for {attempt}{}{}{}",
            with(" until ", outcome.due_at.text()),
            at(", in "),
            with(" after", failure.text())
        ),
        JobOutcomeState::Succeeded => format!("succeeded{}", at(", result ")),
        JobOutcomeState::Dead => format!(
            "dead{}{}{}",
            if outcome.discarded { ", discarded" } else { "" },
            at(", dead letter "),
            with(" after", failure.text())
        ),
        JobOutcomeState::Unknown | JobOutcomeState::Unspecified => "unknown".to_owned(),
    };
    let pipeline = with("", outcome.pipeline.text().map(|name| format!("{name}: ")));
    format!("{pipeline}{text}{}", with(": ", outcome.reason.text()))
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::Position;
    use redeliver_client::unknown_outcome;

    use super::*;

    #[test]
    fn each_state_has_its_words() {
        let outcome = |state: JobOutcomeState, attempts| JobOutcome {
            pipeline: "docs".to_owned(),
            state: state.into(),
            position: Some(Position {
                topic: "docs".to_owned(),
                partition: 1,
                offset: 7,
            }),
            attempts,
            error_code: "http.503".to_owned(),
            due_at: Some(prost_types::Timestamp::default()),
            ..JobOutcome::default()
        };
        for (state, attempts, expected) in [
            (JobOutcomeState::Dispatched, 0, "docs: dispatched to docs/1/7"),
            (
                JobOutcomeState::Running,
                0,
                "docs: queued or running: its first attempt, in docs/1/7",
            ),
            (
                JobOutcomeState::Waiting,
                2,
                "docs: waits for retry 2 until 1970-01-01T00:00:00.000Z, in docs/1/7 after http.503",
            ),
            (JobOutcomeState::Succeeded, 2, "docs: succeeded, result docs/1/7"),
            (
                JobOutcomeState::Dead,
                2,
                "docs: dead, dead letter docs/1/7 after http.503",
            ),
        ] {
            assert_eq!(as_text(&outcome(state, attempts)), expected);
        }
        assert_eq!(as_text(&unknown_outcome("why".to_owned())), "unknown: why");
    }
}
