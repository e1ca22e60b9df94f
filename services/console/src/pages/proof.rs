//! The badge of a pipeline: whether each of its records is exactly once in the output, dead or waiting.

use redeliver_client::Timestamp;
use redeliver_client::messages::{PipelineAudit, PipelineAuditState as State};

use crate::html;

/// What an audit has found, in one word and in sentences.
pub(super) struct Badge {
    pub(super) class: &'static str,
    pub(super) label: String,
    pub(super) text: String,
    /// As of when.
    pub(super) at: Option<Timestamp>,
    /// The first defects.
    pub(super) first: Vec<String>,
}

impl Badge {
    pub(super) fn of(audit: Option<&PipelineAudit>) -> Self {
        let Some(audit) = audit else {
            return Self::new(
                "muted",
                "not audited",
                "The inspector does not audit it: it is retired or has no http, or dlq_inspector.pipeline_audit.enabled is false.",
            );
        };
        let badge = match audit.state() {
            // Nothing is proven.
            State::Clean if audit.source == 0 => Self::new("muted", "no records yet", sum(audit)),
            State::Clean if audit.uncounted > 0 => {
                let text = format!(
                    "{} Successes have no result, so losses are not found.",
                    sum(audit)
                );
                Self::new("muted", "nothing doubled", text)
            }
            State::Clean => Self::new("resolved", "clean", sum(audit)),
            State::NotClean => {
                let defects = audit.defects.iter();
                let counts = defects.map(|defect| format!("{} {}", html::number(defect.count), defect.kind));
                let label = counts.collect::<Vec<_>>().join(", ");
                Self::new("regressed", label, sum(audit))
            }
            State::Unknown => Self::new("unknown", "unknown", format!("Not known: {}.", audit.problem)),
            State::Reading | State::Unspecified => Self::new("waits", "reading", "No audit is complete yet."),
        };
        let defects = audit.defects.iter().flat_map(|defect| &defect.first);
        let at = match audit.state() {
            State::Unknown => audit.since,
            _ => audit.as_of,
        };
        Self {
            at: html::when(at),
            first: defects.cloned().collect(),
            ..badge
        }
    }

    fn new(class: &'static str, label: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            class,
            label: label.into(),
            text: text.into(),
            at: None,
            first: Vec::new(),
        }
    }
}

/// in = out + waiting + dead, in words.
fn sum(audit: &PipelineAudit) -> String {
    let parts = [
        (audit.output, "in the output"),
        (audit.uncounted, "done without a result"),
        (audit.waiting, "waiting"),
        (audit.dead, "dead"),
    ];
    let parts = parts.into_iter().filter(|(count, _)| *count > 0);
    let parts: Vec<String> = parts
        .map(|(count, place)| format!("{} {place}", html::number(count)))
        .collect();
    let from = html::when(audit.checked_from).and_then(redeliver_client::Timestamp::to_rfc3339);
    let from = from.map_or_else(String::new, |from| format!(" since {from}"));
    let parts = if parts.is_empty() {
        "none yet".to_owned()
    } else {
        parts.join(" + ")
    };
    let mut text = format!(
        "{} records taken from the source{from} = {parts}.",
        html::number(audit.source)
    );
    if !audit.problem.is_empty() {
        text.push_str(&format!(" No newer result: {}.", audit.problem));
    }
    text
}

#[cfg(test)]
mod tests {
    use redeliver_client::messages::PipelineDefect;

    use super::*;

    fn audit(state: State) -> PipelineAudit {
        PipelineAudit {
            state: state.into(),
            source: 1_234,
            output: 1_200,
            dead: 4,
            waiting: 29,
            ..PipelineAudit::default()
        }
    }

    #[test]
    fn states_have_words() {
        let clean = Badge::of(Some(&audit(State::Clean)));
        assert_eq!(clean.label, "clean");
        assert_eq!(
            clean.text,
            format!(
                "{} records taken from the source = {} in the output + 29 waiting + 4 dead.",
                html::number(1_234),
                html::number(1_200)
            )
        );
        let labels = |source, uncounted| {
            let audit = PipelineAudit {
                source,
                uncounted,
                ..audit(State::Clean)
            };
            Badge::of(Some(&audit)).label
        };
        assert_eq!(
            [labels(0, 0), labels(5, 2)],
            ["no records yet", "nothing doubled"]
        );
        let wrong = PipelineAudit {
            defects: vec![PipelineDefect {
                kind: "lost".to_owned(),
                count: 1,
                first: vec!["docs/0/7: was last seen in a tier".to_owned()],
            }],
            ..audit(State::NotClean)
        };
        let wrong = Badge::of(Some(&wrong));
        assert_eq!((&*wrong.label, wrong.first.len()), ("1 lost", 1));
        let unknown = PipelineAudit {
            problem: "topic `docs` does not exist".to_owned(),
            ..PipelineAudit::default()
        };
        let unknown = PipelineAudit {
            state: State::Unknown.into(),
            ..unknown
        };
        assert!(Badge::of(Some(&unknown)).text.contains("does not exist"));
        assert_eq!(Badge::of(Some(&PipelineAudit::default())).label, "reading");
        assert_eq!(Badge::of(None).label, "not audited");
    }
}
