//! Links to forms, for pages about what has no form of its own.

use redeliver_client::messages::{
    DeadLetter, DeadLetterState, PipelineOverview, RunOverview, WaitingOverview,
};

use super::control::{self, Verb};
use super::plan::{self, Kind};
use super::{edit, job};
use crate::access::Need;
use crate::page::Button;

/// For all dead letters that match a filter.
pub(in crate::pages) fn matching(filter: &str) -> Vec<Button> {
    let button = |label: &str, kind| {
        // The form knows the topics.
        Button::new(label, plan::link(kind, "filter", filter)).needs(Need::operate([]))
    };
    vec![
        button("Redrive all that match", Kind::Redrive).next(),
        button("Discard all that match", Kind::Discard),
        button("Restore all that match", Kind::Restore),
    ]
}

/// For one dead letter.
pub(in crate::pages) fn letter(letter: &DeadLetter) -> Vec<Button> {
    let topics = letter.position.iter().map(|position| position.topic.as_str());
    let button = |label: &str, kind| {
        Button::new(label, plan::link(kind, "id", &letter.id)).needs(Need::operate(topics.clone()))
    };
    match letter.state() {
        DeadLetterState::Open => vec![
            button("Redrive", Kind::Redrive).next(),
            Button::new("Edit and redrive", edit::link(&letter.id)).needs(edit::needs(letter)),
            button("Discard", Kind::Discard),
        ],
        DeadLetterState::Discarded => vec![button("Restore", Kind::Restore)],
        DeadLetterState::Redriven | DeadLetterState::Unspecified => Vec::new(),
    }
}

/// For the jobs of an application, or of all if it is empty.
pub(in crate::pages) fn jobs(app: &str) -> Vec<Button> {
    let mut buttons = vec![job::schedule(app)];
    if !app.is_empty() {
        let name = format!("app/{app}");
        for (label, verb) in [
            ("Pause", Verb::Pause),
            ("Resume", Verb::Resume),
            ("Rate", Verb::Rate),
        ] {
            buttons.push(control::button(format!("{label} {app}"), &name, verb));
        }
    }
    buttons
}

/// For the workers of a pipeline.
pub(in crate::pages) fn pipeline(pipeline: &PipelineOverview) -> Vec<Button> {
    let mut buttons = run(&format!("pipeline/{}", pipeline.pipeline), pipeline.run.as_ref());
    if pipeline.has_long_waits {
        let name = format!("tier/{}/scheduler", pipeline.pipeline);
        buttons.push(control::button("Release long waits", &name, Verb::Release));
    }
    buttons
}

/// For a tier of a pipeline. What is released already waits for workers only.
pub(in crate::pages) fn tier(pipeline: &str, place: &WaitingOverview) -> Vec<Button> {
    if place.run.is_none() {
        return Vec::new();
    }
    let name = format!("tier/{pipeline}/{}", place.place);
    let mut buttons = run(&name, place.run.as_ref());
    buttons.push(control::button("Release", &name, Verb::Release));
    buttons
}

/// The form that resumes what has this name. It also shows who has paused it.
pub(in crate::pages) fn resume(name: &str) -> Button {
    control::button("Resume", name, Verb::Resume)
}

fn run(name: &str, run: Option<&RunOverview>) -> Vec<Button> {
    let button = |label: &str, verb| control::button(label, name, verb);
    let is_paused = run.and_then(|run| run.paused);
    let mut buttons = Vec::new();
    if is_paused != Some(true) {
        buttons.push(button("Pause", Verb::Pause));
    }
    if is_paused != Some(false) {
        // A tier can be paused in all pipelines.
        let control = run.map_or("", |run| run.control.as_str());
        let (label, name) = match control {
            "" => ("Resume", name),
            control if control == name => ("Resume", name),
            control => ("Resume in all pipelines", control),
        };
        buttons.push(control::button(label, name, Verb::Resume).next());
    }
    buttons.push(button("Rate", Verb::Rate));
    if run.is_some_and(|run| run.per_second.is_some()) || is_paused == Some(true) {
        buttons.push(button("As configured", Verb::Reset));
    }
    buttons
}
