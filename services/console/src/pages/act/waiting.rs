//! Retries a record that waits now, or moves it to the dead letters. A record in a tier is named by its position, one in the scheduler by its job.

use redeliver_client::JobId;
use redeliver_client::messages::{
    ActOnWaitingRecordsRequest, Header, LongWaitAction, Outcome, Position, WaitingAction, WaitingActions,
    WaitingRecord, WaitingRecordContents,
};
use redeliver_core::Pipeline;
use redeliver_runtime::config::Verb as Permission;
use serde::Deserialize;

use super::{Act, Sheet, edit, fact, when};
use crate::access::Need;
use crate::backend::{Backend, Service};
use crate::command::Command;
use crate::form::{self, Field, Fields};
use crate::html;
use crate::page::{Button, Frame, Part, Problem, address};
use crate::pages::trace;

pub(super) const SECTION: &str = "/waiting";

#[derive(Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Verb {
    #[default]
    Retry,
    Dead,
}

/// What an action needs, and an edit more.
fn needs(record: &WaitingRecord) -> Vec<Need> {
    vec![Need::dead_letters(Permission::Operate, &dead_letters(record))]
}

/// The topic whose scopes decide about the records of a pipeline.
pub(super) fn dead_letters(record: &WaitingRecord) -> String {
    Pipeline::new(&record.pipeline).dead_letter_topic().to_string()
}

/// What can be done with a record of a list.
pub(crate) fn buttons(record: &WaitingRecord) -> Vec<Button> {
    let act = |id: &str| {
        let button = |label, verb| Button::new(label, address("/act/waiting", &[("id", id), ("verb", verb)]));
        vec![button("Retry", "retry"), button("Move to dead letters", "dead")]
    };
    match (record.place.as_str(), &record.position) {
        ("scheduler", _) if !record.job_id.is_empty() => act(&record.job_id),
        ("due" | "scheduler", _) | (_, None) => Vec::new(),
        (_, Some(position)) => {
            let id = html::position(position);
            let mut buttons = act(&id);
            buttons.push(Button::new("Edit", edit::link_of_waiting(&id)));
            buttons
        }
    }
}

/// The page with what has become of a request.
pub(super) fn outcome(request_id: &str) -> String {
    address(SECTION, &[("request", request_id)])
}

/// The position with this text.
fn position(id: &str) -> Part<Position> {
    trace::position(id)
        .ok_or_else(|| Problem::invalid("`id` must be topic/partition/offset, or the id of a job."))
}

/// The record with this position or job, with its contents.
pub(super) async fn record(backend: &Backend, id: &str, reason: &str) -> Part<WaitingRecordContents> {
    let client = backend.with_reason(reason)?.waiting();
    Ok(match id.parse::<JobId>() {
        Ok(job) => client.long_wait(job).await?,
        Err(_) => client.record(position(id)?).await?,
    })
}

/// As [`record`], or the outcome of the edit with this id, if it was sent before.
pub(super) async fn record_to_edit(
    backend: &Backend,
    id: &str,
    reason: &str,
    request_id: &str,
) -> Part<Result<WaitingRecordContents, WaitingActions>> {
    let client = backend.with_reason(reason)?.waiting();
    Ok(client.record_to_edit(position(id)?, request_id).await?)
}

/// Requests an action. The page with its outcome.
pub(super) async fn request(
    backend: &Backend,
    id: &str,
    request: ActOnWaitingRecordsRequest,
) -> Part<Option<String>> {
    let request = ActOnWaitingRecordsRequest {
        positions: vec![position(id)?],
        ..request
    };
    let actions = backend.waiting().act(request).await?;
    Ok(Some(outcome(&actions.request_id)))
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Change {
    id: String,
    verb: Verb,
    reason: String,
}

impl Fields for Change {}

impl Change {
    /// The scheduler acts at once. A repetition is told what had become of the record before.
    async fn act_on_long_wait(&self, backend: &Backend, job: JobId) -> Part<Option<String>> {
        let client = backend.with_reason(form::reason(&self.reason)?)?.jobs();
        let action = match self.verb {
            Verb::Retry => LongWaitAction::Retry,
            Verb::Dead => LongWaitAction::Dead,
        };
        match client.act_on_long_wait(job, action).await?.outcome {
            Outcome::Rescheduled | Outcome::Dead => Ok(Some(address(
                SECTION,
                &[("place", "scheduler"), ("scan", "records")],
            ))),
            Outcome::Unknown => Err(Problem::conflict(
                "The scheduler does not know the record: it ended, or you may not act on it, or its command is not decided yet.",
            )),
            outcome => Err(Problem::conflict(format!(
                "The record does not wait any more: {}.",
                outcome.name().unwrap_or_default().replace('_', " ")
            ))),
        }
    }
}

impl Act for Change {
    const SECTION: &'static str = SECTION;

    fn service(&self) -> Service {
        match self.id.parse::<JobId>() {
            Ok(_) => Service::Scheduler,
            Err(_) => Service::Inspector,
        }
    }

    async fn sheet(&self, backend: &Backend, frame: &Frame) -> Part<Sheet> {
        let reason = form::reason(&self.reason).unwrap_or_default();
        let found = record(backend, &self.id, reason).await?;
        let (record, contents) = (
            found.record.unwrap_or_default(),
            found.contents.unwrap_or_default(),
        );
        let mut facts = vec![
            fact("Waits in", format!("{} of {}", record.place, record.pipeline)),
            ("Due", when(record.due_at, frame)),
            fact("Attempts", record.attempts.to_string()),
            fact(
                "Last failure",
                format!("{} {}", record.error_code, record.error_message),
            ),
        ];
        if contents.payload_withheld == 0 {
            facts.push(("Key", html::line(contents.key.as_deref())));
            let headers = contents.headers.iter();
            let headers = headers.map(|Header { name, value }| {
                format!("{}={}", html::escaped(name), html::line(value.as_deref()))
            });
            facts.push((
                "Headers",
                askama::filters::Safe(headers.collect::<Vec<_>>().join(", ")),
            ));
            facts.push(("Value", html::line(contents.value.as_deref())));
        } else {
            facts.push(fact("Contents", "need the scope dead-letters:payload"));
        }
        let (verb, title, button) = match self.verb {
            Verb::Retry => ("retry", "Retry a waiting record", "Retry 1 record now"),
            Verb::Dead => (
                "dead",
                "Give up a waiting record",
                "Move 1 record to the dead letters",
            ),
        };
        let command = Command::new(&format!("waiting {verb}"))
            .option("--reason", &self.reason)
            .argument(&self.id);
        Ok(Sheet {
            facts,
            fields: vec![
                Field::hidden("id", &self.id),
                Field::hidden("verb", verb),
                Field::reason(&self.reason),
            ],
            ..Sheet::new(needs(&record), title, button, command, SECTION.to_owned())
        })
    }

    async fn run(&self, backend: &Backend, request_id: &str) -> Part<Option<String>> {
        if let Ok(job) = self.id.parse() {
            return self.act_on_long_wait(backend, job).await;
        }
        let action = match self.verb {
            Verb::Retry => WaitingAction::Retry,
            Verb::Dead => WaitingAction::Dead,
        };
        let request = ActOnWaitingRecordsRequest {
            action: action.into(),
            reason: form::reason(&self.reason)?.to_owned(),
            request_id: request_id.to_owned(),
            ..ActOnWaitingRecordsRequest::default()
        };
        self::request(backend, &self.id, request).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_possible_actions_are_offered() {
        let record = |place: &str, job: &str| WaitingRecord {
            place: place.to_owned(),
            position: Some(Position::default()),
            job_id: job.to_owned(),
            ..WaitingRecord::default()
        };
        for (record, expected) in [
            (record("30s", ""), 3),
            (record("due", ""), 0),
            // The scheduler does not edit.
            (record("scheduler", "01M7Z0Q7XE000G000000000000"), 2),
            // Of an inspector of an older version.
            (record("scheduler", ""), 0),
        ] {
            assert_eq!(buttons(&record).len(), expected, "{record:?}");
        }
    }
}
