//! Changes the state and the note of a group.

use redeliver_client::Timestamp;
use redeliver_client::convert::to_timestamp;
use redeliver_client::messages::{
    AnnotateGroupRequest, ChangeGroupRequest, Group, GroupState, MuteGroupRequest,
};
use serde::Deserialize;

use super::{Act, Sheet, accept_repeated, by, count, fact, lines, plan, seen, shown};
use crate::access::Need;
use crate::backend::Backend;
use crate::command::{Command, or};
use crate::form::{self, Field, Fields, Input, parsed, required};
use crate::html;
use crate::page::{Button, Frame, Part, Problem, address, segment};

#[derive(Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Verb {
    #[default]
    Resolve,
    Mute,
    Reopen,
    Note,
}

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Mute => "mute",
            Self::Reopen => "reopen",
            Self::Note => "note",
        }
    }
}

/// What each change of a group needs: the topics of the group that the viewer sees.
fn needs(group: &Group) -> Vec<Need> {
    Need::operate(group.topics.iter().map(|topic| topic.topic.as_str()))
}

/// What can be done with a group now.
pub(crate) fn buttons(group: &Group) -> Vec<Button> {
    let change = |label: &str, verb: Verb| {
        let link = address("/act/group", &[("id", &group.id), ("verb", verb.name())]);
        Button::new(label, link)
    };
    let mut buttons = Vec::new();
    let open = group.open.unwrap_or(group.count);
    if open > 0 {
        let label = format!("Redrive {}", count(open, "open dead letter"));
        buttons.push(Button::new(label, plan::link(plan::Kind::Redrive, "group", &group.id)).next());
        buttons.push(Button::new(
            "Discard",
            plan::link(plan::Kind::Discard, "group", &group.id),
        ));
    }
    if group.open.is_none_or(|open| open < group.count) {
        buttons.push(Button::new(
            "Restore discarded",
            plan::link(plan::Kind::Restore, "group", &group.id),
        ));
    }
    match group.state() {
        GroupState::Resolved => buttons.push(change("Reopen", Verb::Reopen)),
        GroupState::Muted => {
            buttons.extend([change("Resolve", Verb::Resolve), change("Reopen", Verb::Reopen)]);
        }
        _ => buttons.extend([change("Resolve", Verb::Resolve), change("Mute", Verb::Mute)]),
    }
    buttons.push(change("Note", Verb::Note));
    let needs = needs(group);
    buttons
        .into_iter()
        .map(|button| button.needs(needs.clone()))
        .collect()
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Change {
    id: String,
    verb: Verb,
    revision: String,
    reason: String,
    until: String,
    /// Not set before the form was sent.
    note: Option<String>,
}

impl Fields for Change {}

impl Change {
    async fn group(&self, backend: &Backend) -> Part<Group> {
        let group = backend.dead_letters().group(&self.id).await?;
        group.ok_or_else(|| Problem::not_found("Group"))
    }

    fn note(&self) -> Option<String> {
        self.note.as_deref().map(|note| lines(note).trim_end().to_owned())
    }

    fn until(&self) -> Part<Option<prost_types::Timestamp>> {
        let until: Option<Timestamp> = parsed("until", &self.until, "a time, such as 2026-11-30T08:00:00Z")?;
        Ok(until.map(to_timestamp))
    }

    fn is_wanted(&self, group: &Group) -> Part<bool> {
        let is_in_state = match self.verb {
            // It may have regressed already.
            Verb::Resolve => matches!(group.state(), GroupState::Resolved | GroupState::Regressed),
            Verb::Mute => group.state() == GroupState::Muted && group.muted_until == self.until()?,
            Verb::Reopen => group.state() == GroupState::Open,
            Verb::Note => return Ok(self.note().as_ref() == Some(&group.note)),
        };
        Ok(is_in_state && group.state_reason == self.reason.trim())
    }
}

impl Act for Change {
    const SECTION: &'static str = "/groups";

    fn forget(&mut self) {
        self.revision.clear();
    }

    async fn sheet(&self, backend: &Backend, frame: &Frame) -> Part<Sheet> {
        let group = self.group(backend).await?;
        let revision = shown(&self.revision, group.revision);
        let mut facts = vec![
            fact("Group", crate::pages::groups::reason(&group)),
            fact("Pipeline", &group.pipeline),
            fact("State", group.state().name().unwrap_or_default()),
            fact(
                "Dead letters",
                match group.open {
                    Some(open) => format!("{} open of {}", html::number(open), html::number(group.count)),
                    None => html::number(group.count),
                },
            ),
            ("Last seen", html::time(group.last_dead_at, frame.now)),
        ];
        if !group.state_by.is_empty() {
            let changed = by(&group.state_by, group.state_time, &group.state_reason, frame);
            facts.push(("Changed", changed));
        }
        let mut fields = vec![
            Field::hidden("id", &self.id),
            Field::hidden("verb", self.verb.name()),
            Field::hidden("revision", &revision),
        ];
        let mut command = Command::new(&format!("dlq group {}", self.verb.name()))
            .option("--expected-revision", &revision)
            .option(
                "--reason",
                or(&self.reason, if self.verb == Verb::Mute { "REASON" } else { "" }),
            )
            .option("--until", &self.until)
            .argument(&group.id);
        let letters = count(group.count, "dead letter");
        let (title, button) = match self.verb {
            Verb::Resolve => (
                "Resolve the group",
                format!("Resolve; a new dead letter makes it regressed, {letters} stay"),
            ),
            Verb::Mute => (
                "Mute the group",
                "Mute; it is in no alert about groups".to_owned(),
            ),
            Verb::Reopen => ("Reopen the group", "Set it to open".to_owned()),
            Verb::Note => ("Note of the group", "Save the note".to_owned()),
        };
        match self.verb {
            Verb::Note => {
                let note = self.note().unwrap_or_else(|| group.note.clone());
                if note != group.note {
                    let present = by(&group.note_by, group.note_time, &group.note, frame);
                    facts.push(("Present note", present));
                }
                command = command.argument(&note);
                let field = Field::new(Input::Lines(5), "note", "Note", note);
                fields.push(field.help("At most 2000 bytes, for everybody who sees the group. Empty: none."));
            }
            Verb::Mute => fields.extend([
                Field::reason(&self.reason).required(),
                Field::line("until", "Until", &self.until)
                    .help("Such as 2026-11-30T08:00:00Z; empty: until it is reopened."),
            ]),
            Verb::Resolve | Verb::Reopen => fields.push(Field::reason(&self.reason)),
        }
        Ok(Sheet {
            facts,
            fields,
            ..Sheet::new(
                needs(&group),
                title,
                button,
                command,
                segment("/groups", &group.id),
            )
        })
    }

    async fn run(&self, backend: &Backend, _: &str) -> Part<Option<String>> {
        let client = backend.dead_letters();
        let expected_revision = seen(&self.revision)?;
        let (id, reason) = (self.id.clone(), form::reason(&self.reason)?.to_owned());
        let change = ChangeGroupRequest {
            id: id.clone(),
            reason: reason.clone(),
            expected_revision,
        };
        let changed = match self.verb {
            Verb::Resolve => client.resolve_group(change).await,
            Verb::Reopen => client.reopen_group(change).await,
            Verb::Mute => {
                required("reason", &reason)?;
                let until = self.until()?;
                let mute = MuteGroupRequest {
                    id,
                    reason,
                    expected_revision,
                    until,
                };
                client.mute_group(mute).await
            }
            Verb::Note => {
                let note = self
                    .note()
                    .ok_or_else(|| Problem::invalid("`note` is missing."))?;
                let annotate = AnnotateGroupRequest {
                    id,
                    note,
                    expected_revision,
                };
                client.annotate_group(annotate).await
            }
        };
        if let Err(error) = changed {
            let found = async {
                let group = self.group(backend).await?;
                Ok((group.revision, self.is_wanted(&group)?))
            };
            accept_repeated(error, expected_revision, found).await?;
        }
        Ok(Some(segment("/groups", &self.id)))
    }
}
