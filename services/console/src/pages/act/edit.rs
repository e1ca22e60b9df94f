//! Plans a redrive of one dead letter with another value, key or headers, after a look at what differs. Edits a record that waits in a tier in the same way.

use std::collections::HashSet;
use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;
use redeliver_client::messages::{
    ActOnWaitingRecordsRequest, DeadLetter, EditedBytes, Header, PlanEditRequest, RedriveEdit, WaitingAction,
    WaitingRecord,
};
use redeliver_core::kept::is_editable;
use redeliver_core::terminal::is_harmful;
use redeliver_runtime::config::Verb;
use serde::Deserialize;
use similar::TextDiff;

use super::{Act, Sheet, fact, lines, redrive, waiting};
use crate::access::Need;
use crate::backend::Backend;
use crate::command::Command;
use crate::form::{self, Field, Fields, Input};
use crate::page::{Frame, Part, Problem, address};
use crate::pages::{letters, trace};

/// After this time, a difference is shown that is not the smallest one.
const DIFF_TIMEOUT: Duration = Duration::from_millis(200);

pub(crate) fn link(id: &str) -> String {
    address("/act/edit", &[("id", id)])
}

pub(super) fn link_of_waiting(id: &str) -> String {
    address("/act/edit", &[("id", id), ("waiting", "1")])
}

/// What an edit needs. Who cannot see the record as it is cannot edit it.
pub(super) fn needs(letter: &DeadLetter) -> Vec<Need> {
    of_topic(letter.position.as_ref().map_or("", |position| &position.topic))
}

fn of_topic(topic: &str) -> Vec<Need> {
    let verbs = [Verb::Operate, Verb::Edit, Verb::Payload];
    verbs.map(|verb| Need::dead_letters(verb, topic)).into()
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Edit {
    id: String,
    /// Set for a record that waits in a tier.
    waiting: String,
    /// The hash of the record that the caller has seen, in hexadecimal digits.
    hash: String,
    // Not set before the form was sent, and if they cannot be edited as text.
    value: Option<String>,
    key: Option<String>,
    /// The headers that can be edited, one `NAME=VALUE` per line.
    headers: Option<String>,
    reason: String,
    destination: String,
    /// Set to see what differs before anything is planned.
    preview: String,
}

impl Fields for Edit {
    /// A page has at most a MiB of the value, and 1.5 MiB of key and headers. Each byte has at most three in a form, apart from line breaks.
    const MAX_BYTES: usize = 8 << 20;
}

/// The parts of a record that a form can contain as they are.
struct Editable {
    value: Option<String>,
    key: Option<String>,
    headers: Vec<(String, String)>,
}

impl Editable {
    fn of(letter: &DeadLetter) -> Self {
        let value = letter.value.as_deref().filter(|_| !letter.value_truncated);
        let key = letter.key.as_deref().filter(|_| !letter.key_truncated);
        let header = |header: &Header| {
            let value = line(header.value.as_deref()?)?;
            let name = line(header.name.as_bytes())?;
            // What would be read as another header, or as none, is no line.
            let is_line = !name.contains('=') && !name.trim().is_empty();
            (is_editable(&name) && is_line).then_some((name, value))
        };
        let mut headers = Vec::new();
        // An edit replaces all headers of a name.
        let mut left_out = HashSet::new();
        for of_record in &letter.headers {
            match header(of_record) {
                Some(header) => headers.push(header),
                None => _ = left_out.insert(of_record.name.as_str()),
            }
        }
        headers.retain(|(name, _)| !letter.headers_truncated && !left_out.contains(name.as_str()));
        Self {
            value: value.and_then(text),
            key: key.and_then(line),
            headers,
        }
    }

    fn headers(&self) -> String {
        let lines = self
            .headers
            .iter()
            .map(|(name, value)| format!("{name}={value}\n"));
        lines.collect()
    }
}

/// What a text area keeps as it is: browsers change line breaks and controls.
fn text(bytes: &[u8]) -> Option<String> {
    let text = str::from_utf8(bytes).ok()?;
    let is_changed = |c: char| is_harmful(c) && !matches!(c, '\n' | '\t');
    (!text.contains(is_changed)).then(|| text.to_owned())
}

fn line(bytes: &[u8]) -> Option<String> {
    text(bytes).filter(|text| !text.contains('\n'))
}

/// The hash of the record, which only those know who see it as it is.
fn hash(letter: &DeadLetter) -> Part<String> {
    if !letter.content_hash.is_empty() {
        return Ok(form::hex(&letter.content_hash));
    }
    let scope = match letter.payload_withheld {
        0 => "dead-letters:unmasked",
        _ => "dead-letters:payload",
    };
    Err(Problem {
        status: StatusCode::FORBIDDEN,
        title: "Not permitted".to_owned(),
        detail: "The record is not shown as it is, so it cannot be edited.".to_owned(),
        advice: format!("Needs the scope {scope}."),
        passes: false,
    })
}

impl Edit {
    fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    async fn letter(&self, backend: &Backend, reason: &str) -> Part<DeadLetter> {
        if self.is_waiting() {
            let found = waiting::record(backend, &self.id, reason).await?;
            return Ok(found.contents.unwrap_or_default());
        }
        let letter = backend.with_reason(reason)?.dead_letters().get(&self.id).await?;
        letter.ok_or_else(|| Problem::not_found("Dead letter"))
    }

    /// What differs from the record.
    fn edit(&self, editable: &Editable) -> Part<RedriveEdit> {
        let changed = |entered: Option<&String>, known: Option<&String>| {
            let (entered, known) = (lines(entered?), known?);
            let bytes = Some(Bytes::from(entered.clone()));
            (entered != *known).then_some(EditedBytes { bytes })
        };
        let mut edit = RedriveEdit {
            value: changed(self.value.as_ref(), editable.value.as_ref()),
            key: changed(self.key.as_ref(), editable.key.as_ref()),
            ..RedriveEdit::default()
        };
        let Some(entered) = &self.headers else {
            return Ok(edit);
        };
        let mut headers = Vec::new();
        for line in lines(entered).lines().filter(|line| !line.trim().is_empty()) {
            let Some((name, value)) = line.split_once('=') else {
                let detail = format!("`headers` must have NAME=VALUE in each line; one is `{line}`.");
                return Err(Problem::invalid(detail));
            };
            headers.push((name.to_owned(), value.to_owned()));
        }
        let of = |headers: &[(String, String)], name: &str| -> Vec<String> {
            let values = headers.iter().filter(|(known, _)| known == name);
            values.map(|(_, value)| value.clone()).collect()
        };
        for (name, _) in &editable.headers {
            if of(&headers, name).is_empty() && !edit.removed_headers.contains(name) {
                edit.removed_headers.push(name.clone());
            }
        }
        for (name, value) in &headers {
            if of(&headers, name) != of(&editable.headers, name) {
                edit.set_headers.push(Header {
                    name: name.clone(),
                    value: Some(Bytes::copy_from_slice(value.as_bytes())),
                });
            }
        }
        Ok(edit)
    }

    fn command(&self, edit: &RedriveEdit) -> Command {
        let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let edited = |edited: &Option<EditedBytes>| edited.as_ref()?.bytes.as_deref().map(shown);
        let mut command = Command::new(if self.is_waiting() {
            "waiting edit"
        } else {
            "dlq edit"
        });
        if let Some(value) = edited(&edit.value) {
            command = command.text("--value", &value);
        }
        if let Some(key) = edited(&edit.key) {
            command = command.value("--key", &key);
        }
        let command = edit.set_headers.iter().fold(command, |command, header| {
            let value = shown(header.value.as_deref().unwrap_or_default());
            command.option("--header", format!("{}={value}", header.name))
        });
        let removed = edit.removed_headers.iter();
        removed
            .fold(command, |command, name| command.option("--remove-header", name))
            .option("--destination", &self.destination)
            .option("--reason", &self.reason)
            .flag("--plan", !self.is_waiting())
            .argument(&self.id)
    }
}

impl Act for Edit {
    const SECTION: &'static str = "/letters";

    async fn sheet(&self, backend: &Backend, _: &Frame) -> Part<Sheet> {
        // A reason that is too long is told when the form is sent.
        let reason = form::reason(&self.reason).unwrap_or_default();
        let letter = self.letter(backend, reason).await?;
        let editable = Editable::of(&letter);
        let hash = hash(&letter)?;
        let mut warnings = Vec::new();
        // An invalid header is told when the form is sent.
        let edit = self.edit(&editable).unwrap_or_default();
        let mut diffs = Vec::new();
        let mut fields = vec![
            Field::hidden("id", &self.id),
            Field::hidden("waiting", &self.waiting),
            // What was entered is for the record that was seen then.
            Field::hidden("hash", if self.hash.is_empty() { &hash } else { &self.hash }),
        ];
        let mut part = |input, name, label, known: Option<&String>, entered: Option<&String>| {
            let Some(known) = known else {
                warnings.push(format!(
                    "The {name} is null, not a text, or larger than a MiB: edit it with the command."
                ));
                return;
            };
            let entered = entered.map_or_else(|| known.clone(), |entered| lines(entered));
            if entered != *known {
                let diff = TextDiff::configure()
                    .timeout(DIFF_TIMEOUT)
                    .diff_lines(known, &entered);
                // Most values end without a line break, before and after.
                let is_hinted = known.ends_with('\n') != entered.ends_with('\n');
                let mut diff = diff.unified_diff();
                diffs.push((
                    name,
                    diff.context_radius(3).missing_newline_hint(is_hinted).to_string(),
                ));
            }
            fields.push(Field::new(input, name, label, entered));
        };
        part(
            Input::Lines(16),
            "value",
            "Value",
            editable.value.as_ref(),
            self.value.as_ref(),
        );
        part(
            Input::Line,
            "key",
            "Key",
            editable.key.as_ref(),
            self.key.as_ref(),
        );
        let headers = Some(editable.headers());
        let label = "Headers, one NAME=VALUE per line";
        part(
            Input::Lines(8),
            "headers",
            label,
            headers.as_ref(),
            self.headers.as_ref(),
        );
        fields.extend((!self.is_waiting()).then(|| {
            Field::line("destination", "Destination", &self.destination)
                .help("A topic; empty: the pipeline that gave up on the record.")
        }));
        fields.push(Field::reason(&self.reason));
        if self.is_waiting() {
            let pipeline = WaitingRecord {
                pipeline: letter.pipeline.clone(),
                ..WaitingRecord::default()
            };
            return Ok(Sheet {
                facts: vec![fact("Record", &self.id), fact("Pipeline", &letter.pipeline)],
                warnings,
                diffs,
                fields,
                preview: Some("Show what differs"),
                ..Sheet::new(
                    of_topic(&waiting::dead_letters(&pipeline)),
                    "Edit a waiting record",
                    "Edit 1 record, which is due at the same time",
                    self.command(&edit),
                    waiting::SECTION.to_owned(),
                )
            });
        }
        let position = trace::position(&self.id);
        Ok(Sheet {
            facts: vec![
                fact("Dead letter", &self.id),
                fact("State", letters::state_class(letter.state())),
                fact("Pipeline", &letter.pipeline),
            ],
            warnings,
            diffs,
            fields,
            preview: Some("Show what differs"),
            ..Sheet::new(
                needs(&letter),
                "Edit and redrive",
                "Plan the redrive of 1 edited dead letter",
                self.command(&edit),
                letters::link(position.as_ref()),
            )
        })
    }

    async fn run(&self, backend: &Backend, request_id: &str) -> Part<Option<String>> {
        let reason = form::reason(&self.reason)?;
        let letter = if self.is_waiting() {
            match waiting::record_to_edit(backend, &self.id, reason, request_id).await? {
                Ok(found) => found.contents.unwrap_or_default(),
                Err(edited) => return Ok(Some(waiting::outcome(&edited.request_id))),
            }
        } else {
            self.letter(backend, reason).await?
        };
        let edit = self.edit(&Editable::of(&letter))?;
        if !self.preview.is_empty() {
            return Ok(None);
        }
        if edit == RedriveEdit::default() {
            return Err(Problem::invalid(
                "Nothing differs from the record: redrive it as it is, or change it.",
            ));
        }
        if hash(&letter)? != self.hash {
            return Err(Problem::conflict(
                "The record at this position is not the one that was edited. Open the form again.",
            ));
        }
        if self.is_waiting() {
            let request = ActOnWaitingRecordsRequest {
                action: WaitingAction::Edit.into(),
                edit: Some(edit),
                content_hash: letter.content_hash,
                reason: reason.to_owned(),
                request_id: request_id.to_owned(),
                ..ActOnWaitingRecordsRequest::default()
            };
            return waiting::request(backend, &self.id, request).await;
        }
        let plan = PlanEditRequest {
            id: self.id.clone(),
            content_hash: letter.content_hash,
            edit: Some(edit),
            destination: self.destination.trim().to_owned(),
            reason: reason.to_owned(),
            request_id: request_id.to_owned(),
            ..PlanEditRequest::default()
        };
        let job = backend.redrives().plan_edit(plan).await?;
        Ok(Some(redrive::link(&job.id, redrive::Verb::Start)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter() -> DeadLetter {
        let header = |name: &str, value: &'static str| Header {
            name: name.to_owned(),
            value: Some(Bytes::from_static(value.as_bytes())),
        };
        DeadLetter {
            key: Some(Bytes::from_static(b"k")),
            value: Some(Bytes::from_static(b"a\nb")),
            headers: vec![
                header("tenant", "acme"),
                header("tenant", "other"),
                header("kind", "x=y"),
                header("error-code", "http.422"),
                header("kafka_dlt-exception-fqcn", "x"),
                header("binary", "\u{1}"),
            ],
            ..DeadLetter::default()
        }
    }

    fn edited(value: &str, headers: &str) -> RedriveEdit {
        let form = Edit {
            value: Some(value.to_owned()),
            key: Some("k".to_owned()),
            headers: Some(headers.to_owned()),
            ..Edit::default()
        };
        form.edit(&Editable::of(&letter())).unwrap()
    }

    #[test]
    fn line_breaks_of_browsers_change_nothing() {
        let editable = Editable::of(&letter());
        assert_eq!(editable.headers(), "tenant=acme\ntenant=other\nkind=x=y\n");
        let unchanged = edited("a\r\nb", &editable.headers().replace('\n', "\r\n"));
        assert_eq!(unchanged, RedriveEdit::default());
        // Before the form was sent.
        assert_eq!(Edit::default().edit(&editable).unwrap(), RedriveEdit::default());
    }

    #[test]
    fn only_differences_are_edited() {
        let edit = edited("a", "tenant=acme\nnew=1");
        assert_eq!(edit.value.unwrap().bytes.unwrap(), "a");
        assert!(edit.key.is_none());
        assert_eq!(edit.removed_headers, ["kind"]);
        let set: Vec<&str> = edit.set_headers.iter().map(|header| &*header.name).collect();
        assert_eq!(set, ["tenant", "new"]);
    }

    #[test]
    fn what_forms_change_is_not_editable() {
        let editable = Editable::of(&DeadLetter {
            value: Some(Bytes::from_static(b"a\rb")),
            key: Some(Bytes::from_static(b"a\nb")),
            ..DeadLetter::default()
        });
        assert!(editable.value.is_none() && editable.key.is_none());
    }

    #[test]
    fn headers_are_editable_together() {
        let mut letter = letter();
        letter.headers.push(Header {
            name: "tenant".to_owned(),
            value: Some(Bytes::from_static(b"\xff")),
        });
        assert_eq!(Editable::of(&letter).headers(), "kind=x=y\n");
        letter.headers_truncated = true;
        assert_eq!(Editable::of(&letter).headers(), "");
    }
}
