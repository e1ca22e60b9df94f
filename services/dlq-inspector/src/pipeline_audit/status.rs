//! What is known of a pipeline after several passes. No IO.

use std::time::Duration;

use redeliver_audit::{Fault, Findings, Report};
use redeliver_core::Timestamp;
use redeliver_core::error_chain::error_chain;
use redeliver_core::failure::bounded_text;
use redeliver_proto::convert::{time_of_record, to_timestamp};
use redeliver_proto::v1;
use v1::PipelineAuditState as State;

/// A result is old after this time and two intervals.
const PATIENCE: Duration = Duration::from_secs(600);
const TOO_SLOW: &str =
    "no audit was completed since then: dlq_inspector.pipeline_audit.bytes_per_second may be too low";
/// How many findings of a kind are shown.
const FINDINGS: usize = 3;
/// The maximum size of each text, in bytes.
const MAX_TEXT: usize = 300;

/// The result of the last complete pass, and what has happened since.
#[derive(Debug, Default)]
pub(crate) struct Status {
    /// The time between two passes.
    interval: Duration,
    state: State,
    since: Option<Timestamp>,
    problem: String,
    passed: Option<Passed>,
    /// Since when, and why, it stays unknown what has become of some records.
    missed: Option<(Timestamp, String)>,
    /// What was found before the audit began again.
    earlier: Vec<v1::PipelineDefect>,
}

#[derive(Debug)]
struct Passed {
    at: Timestamp,
    checked_from: Option<Timestamp>,
    report: Report,
}

impl Status {
    /// Nothing is known yet.
    pub(crate) fn new(interval: Duration) -> Self {
        Self {
            interval,
            ..Self::default()
        }
    }

    /// Adds the result of a pass that began at this time, and checks records since another one.
    pub(crate) fn add(
        &mut self,
        at: Timestamp,
        checked_from: Option<Timestamp>,
        result: Result<Report, Fault>,
    ) {
        match result {
            Ok(report) => {
                self.problem.clear();
                match self.missed.clone() {
                    _ if !report.is_clean() || !self.earlier.is_empty() => self.enter(State::NotClean, at),
                    Some((missed_at, problem)) => {
                        self.problem = problem;
                        self.enter(State::Unknown, missed_at);
                    }
                    None => self.enter(State::Clean, at),
                }
                self.passed = Some(Passed {
                    at,
                    checked_from,
                    report,
                });
            }
            Err(Fault::Grown | Fault::Stopped) => {}
            Err(Fault::Changed) => self.begin_again(State::Reading, at),
            Err(fault @ (Fault::Read { .. } | Fault::Compacted(_))) => {
                self.problem = bounded_text(&error_chain(&fault), MAX_TEXT);
                if self.passed.is_none() {
                    self.enter(State::Unknown, at);
                }
            }
            Err(fault @ (Fault::Cut(_) | Fault::Full(_))) => {
                self.problem = bounded_text(&error_chain(&fault), MAX_TEXT);
                self.begin_again(State::Unknown, at);
                self.missed.get_or_insert((at, self.problem.clone()));
            }
        }
    }

    /// What was found stays known.
    fn begin_again(&mut self, state: State, at: Timestamp) {
        if let Some(passed) = self.passed.take() {
            self.earlier = self.defects(Some(&passed));
        }
        if self.earlier.is_empty() {
            self.enter(state, at);
        }
    }

    fn defects(&self, passed: Option<&Passed>) -> Vec<v1::PipelineDefect> {
        let mut defects = self.earlier.clone();
        let found = passed.map(|passed| passed.report.defects());
        for (kind, findings) in found
            .into_iter()
            .flatten()
            .filter(|(_, findings)| !findings.is_empty())
        {
            match defects.iter_mut().find(|defect| defect.kind == kind) {
                Some(defect) => defect.count += findings.count,
                None => defects.push(defect(kind, findings)),
            }
        }
        defects
    }

    fn enter(&mut self, state: State, at: Timestamp) {
        if self.state != state {
            (self.state, self.since) = (state, Some(at));
        }
    }

    /// For overviews.
    pub(crate) fn message(&self, now: Timestamp) -> v1::PipelineAudit {
        let holds = PATIENCE + 2 * self.interval;
        let old = self.passed.as_ref().map(|passed| passed.at);
        let old = old.filter(|at| self.state == State::Clean && now.since(*at) > holds);
        let (state, since) = match (self.state, old) {
            (_, Some(at)) => (State::Unknown, Some(at)),
            (State::Unspecified, None) => (State::Reading, None),
            (state, None) => (state, self.since),
        };
        let mut message = v1::PipelineAudit {
            state: state.into(),
            problem: match old {
                Some(_) if self.problem.is_empty() => TOO_SLOW.to_owned(),
                _ => self.problem.clone(),
            },
            ..v1::PipelineAudit::default()
        };
        if let State::NotClean | State::Unknown = state {
            message.since = since.map(to_timestamp);
        }
        if let Some(Passed {
            at,
            checked_from,
            report,
        }) = &self.passed
        {
            message.as_of = Some(to_timestamp(*at));
            message.checked_from = checked_from.and_then(time_of_record);
            message.source = report.source;
            message.output = report.output;
            message.dead = report.dead;
            message.waiting = report.waiting.total();
            message.uncounted = report.uncounted;
        }
        message.defects = self.defects(self.passed.as_ref());
        message
    }
}

fn defect(kind: &str, findings: &Findings) -> v1::PipelineDefect {
    let first = findings.sample.iter().take(FINDINGS);
    v1::PipelineDefect {
        kind: kind.to_owned(),
        count: findings.count,
        first: first
            .map(|finding| bounded_text(&finding.to_string(), MAX_TEXT))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use redeliver_audit::Finding;
    use redeliver_kafka::reader::ReadError;

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_millis(1_000 * seconds)
    }

    fn lost(count: u64) -> Report {
        let finding = Finding {
            origin: "docs/0/1".to_owned(),
            at: None,
            reason: "gone".to_owned(),
        };
        Report {
            source: 5,
            output: 3,
            lost: Findings {
                count,
                sample: vec![finding; usize::try_from(count).unwrap()],
            },
            ..Report::default()
        }
    }

    fn unreadable() -> Fault {
        Fault::Read {
            step: "read the source",
            source: Arc::new(ReadError::Missing("docs".to_owned())),
        }
    }

    /// The state at a time, and since when.
    fn known_at(status: &Status, now: i64) -> (State, Option<i64>) {
        let message = status.message(at(now));
        (message.state(), message.since.map(|since| since.seconds))
    }

    fn known(status: &Status) -> (State, Option<i64>) {
        known_at(status, 0)
    }

    #[test]
    fn pipeline_is_read_at_first() {
        let message = Status::default().message(at(1));
        assert_eq!((message.state(), message.as_of), (State::Reading, None));
    }

    #[test]
    fn defects_are_known_since_first() {
        let mut status = Status::default();
        status.add(at(1), Some(at(0)), Ok(lost(0)));
        assert_eq!(known(&status), (State::Clean, None));
        for (time, count) in [(2, 1), (3, 5)] {
            status.add(at(time), Some(at(0)), Ok(lost(count)));
            assert_eq!(known(&status), (State::NotClean, Some(2)));
        }
        let message = status.message(at(0));
        let defect = &message.defects[0];
        assert_eq!((&*defect.kind, defect.count, defect.first.len()), ("lost", 5, 3));
        assert_eq!(defect.first[0], "docs/0/1: gone");
        assert_eq!((message.source, message.output), (5, 3));
        assert_eq!(message.as_of, Some(to_timestamp(at(3))));
        assert_eq!(message.checked_from, Some(to_timestamp(at(0))));
        status.add(at(4), None, Ok(lost(0)));
        assert_eq!(known(&status), (State::Clean, None));
    }

    #[test]
    fn result_holds_for_a_while() {
        let mut status = Status::new(Duration::from_secs(60));
        status.add(at(1), None, Err(unreadable()));
        assert_eq!(known(&status), (State::Unknown, Some(1)));
        status.add(at(2), None, Ok(lost(0)));
        // A pass that takes long is not over yet.
        for (now, known) in [(722, (State::Clean, None)), (723, (State::Unknown, Some(2)))] {
            assert_eq!(known_at(&status, now), known);
        }
        assert_eq!(status.message(at(723)).problem, TOO_SLOW);
        status.add(at(602), None, Err(unreadable()));
        for (now, known) in [(722, (State::Clean, None)), (723, (State::Unknown, Some(2)))] {
            assert_eq!(known_at(&status, now), known);
            let problem = status.message(at(now)).problem;
            assert_eq!(problem, "cannot read the source: topic `docs` does not exist");
        }
        status.add(at(724), None, Ok(lost(0)));
        assert_eq!(known_at(&status, 724), (State::Clean, None));
        assert_eq!(status.message(at(724)).problem, "");
    }

    #[test]
    fn deleted_records_stay_unknown() {
        let mut status = Status::default();
        status.add(at(1), None, Ok(lost(0)));
        status.add(at(2), None, Err(Fault::Cut("docs".into())));
        status.add(at(3), None, Ok(lost(0)));
        assert_eq!(known(&status), (State::Unknown, Some(2)));
        assert!(status.message(at(0)).problem.contains("retention has removed"));
        status.add(at(4), None, Ok(lost(1)));
        assert_eq!(known(&status), (State::NotClean, Some(4)));
        status.add(at(5), None, Ok(lost(0)));
        assert_eq!(known(&status), (State::Unknown, Some(2)));
    }

    #[test]
    fn audit_begins_again() {
        let mut status = Status::default();
        status.add(at(1), None, Ok(lost(0)));
        status.add(at(2), None, Err(Fault::Changed));
        assert_eq!(known(&status), (State::Reading, None));
        status.add(at(3), None, Err(Fault::Full(7)));
        assert_eq!(known(&status), (State::Unknown, Some(3)));
    }

    #[test]
    fn defects_stay_known() {
        let mut status = Status::default();
        status.add(at(1), None, Ok(lost(1)));
        for (time, result) in [(2, Err(Fault::Changed)), (3, Ok(lost(0))), (4, Ok(lost(2)))] {
            let sum = result.as_ref().map_or(0, |report: &Report| report.lost.count);
            status.add(at(time), None, result);
            assert_eq!(known(&status), (State::NotClean, Some(1)));
            assert_eq!(status.message(at(time)).defects[0].count, 1 + sum);
        }
    }
}
