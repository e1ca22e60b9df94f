//! What is wrong, and what to do next.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::failure::bounded_text;
use redeliver_core::pipeline::TopicRole;
use redeliver_core::{Pipeline, Timestamp};
use redeliver_proto::convert::{time_of_record, to_timestamp};
use redeliver_proto::v1;
use redeliver_service::control::{ControlName, Snapshot};

use super::history::{Changes, History};
use super::pipelines::{Paused, Pipelines, paused};
use super::survey::{RedriveState, Survey};
use crate::group_states::GroupState;
use crate::index::TopicGroup;
use crate::waiting::Place;

/// Dead letters that Kafka may remove within this time are a problem.
const EXPIRES_SOON: Duration = Duration::from_secs(86_400);
/// Records that are due for longer than this are a problem. A tier releases its records within moments.
const OVERDUE: Duration = Duration::from_secs(60);
/// What is paused for longer than this is a problem: it may have been forgotten.
const PAUSED: Duration = Duration::from_secs(3_600);
/// A group grows if its last dead letter died within this time.
const GROWS: Duration = Duration::from_secs(300);
/// The maximum size of each text about a failure, in bytes.
const MAX_TEXT: usize = 200;

/// A problem, and who may know of it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) message: v1::Problem,
    /// The caller must see the dead letters of all of these topics.
    pub(crate) topics: Vec<Arc<str>>,
    /// Without a topic, the caller must see the control.
    pub(crate) is_about_control: bool,
}

/// What is wrong, in no particular order. What is incomplete is added for each caller.
pub(crate) fn problems(pipelines: &Pipelines, survey: &Survey, history: &History) -> Vec<Found> {
    let mut found = Vec::new();
    let changes = history.changes(survey);
    for pipeline in &pipelines.list {
        missing_topics(pipeline, survey, history, &mut found);
        open_breaker(pipeline, survey, &mut found);
        overdue(pipeline, survey, changes.as_ref(), &mut found);
        not_clean(pipeline, survey, &mut found);
    }
    letters(pipelines, survey, changes.as_ref(), &mut found);
    redrives(pipelines, survey, &mut found);
    if let Some(controls) = &survey.controls {
        paused_for_long(pipelines, controls, survey.at, &mut found);
    }
    found
}

fn of_pipeline(pipeline: &Pipeline, message: v1::Problem) -> Found {
    Found {
        message: v1::Problem {
            pipeline: pipeline.name.to_string(),
            ..message
        },
        topics: vec![pipeline.dead_letter_topic()],
        is_about_control: false,
    }
}

fn of_letters(pipelines: &Pipelines, topic: &str, message: v1::Problem) -> Found {
    let pipeline = pipelines.of_letters(topic);
    Found {
        message: v1::Problem {
            pipeline: pipeline.map_or_else(String::new, |pipeline| pipeline.name.to_string()),
            topic: topic.to_owned(),
            ..message
        },
        topics: vec![topic.into()],
        is_about_control: false,
    }
}

fn missing_topics(pipeline: &Pipeline, survey: &Survey, history: &History, found: &mut Vec<Found>) {
    for (topic, _) in pipeline.topics() {
        if let Some(since) = history.missing_since(survey, &topic) {
            let problem = v1::Problem {
                kind: v1::ProblemKind::TopicMissing.into(),
                since: Some(to_timestamp(since)),
                next_step: v1::NextStep::CreateTopic.into(),
                topic: topic.to_string(),
                ..v1::Problem::default()
            };
            found.push(of_pipeline(pipeline, problem));
        }
    }
}

/// Half open, the endpoint has answered, and nothing may follow for long.
fn open_breaker(pipeline: &Pipeline, survey: &Survey, found: &mut Vec<Found>) {
    let breaker = survey.breaker(&pipeline.name);
    if let Some(breaker) = breaker.filter(|breaker| breaker.state() == v1::BreakerState::Open) {
        let problem = v1::Problem {
            kind: v1::ProblemKind::BreakerOpen.into(),
            since: breaker.since,
            next_step: v1::NextStep::CheckEndpoint.into(),
            error_code: bounded_text(&breaker.error_code, MAX_TEXT),
            ..v1::Problem::default()
        };
        found.push(of_pipeline(pipeline, problem));
    }
}

fn overdue(pipeline: &Pipeline, survey: &Survey, changes: Option<&Changes<'_>>, found: &mut Vec<Found>) {
    // What is paused is not overdue. Without controls, it may be paused.
    let (Some(reading), Some(controls)) = (&survey.waiting, &survey.controls) else {
        return;
    };
    let queues = reading.queues.get(&pipeline.name);
    for (queue, waiting) in queues.into_iter().flatten() {
        let (TopicRole::Tier(tier), Some(earliest)) = (queue.role, waiting.earliest()) else {
            continue;
        };
        // As of the reading: since then, the records may have been released.
        if reading.at.since(earliest) < OVERDUE || controls.tier(&pipeline.name, tier).is_paused {
            continue;
        }
        let problem = v1::Problem {
            kind: v1::ProblemKind::Overdue.into(),
            since: time_of_record(earliest),
            growing: changes.and_then(|changes| changes.waits_more(&pipeline.name, &queue.topic)),
            count: waiting.due_at(reading.at).map(|overdue| overdue as u64),
            next_step: v1::NextStep::CheckRetryTier.into(),
            topic: queue.topic.to_string(),
            place: Place::Tier(tier).to_string(),
            ..v1::Problem::default()
        };
        found.push(of_pipeline(pipeline, problem));
    }
}

fn not_clean(pipeline: &Pipeline, survey: &Survey, found: &mut Vec<Found>) {
    let audit = survey.audits.get(&*pipeline.name);
    let audit = audit.filter(|audit| audit.state() == v1::PipelineAuditState::NotClean);
    if let Some(audit) = audit {
        let problem = v1::Problem {
            kind: v1::ProblemKind::NotClean.into(),
            since: audit.since,
            count: Some(audit.defects.iter().map(|defect| defect.count).sum()),
            next_step: v1::NextStep::LookAtRecords.into(),
            ..v1::Problem::default()
        };
        found.push(of_pipeline(pipeline, problem));
    }
}

fn letters(pipelines: &Pipelines, survey: &Survey, changes: Option<&Changes<'_>>, found: &mut Vec<Found>) {
    let Some(letters) = &survey.letters else {
        return;
    };
    for (topic, open) in &letters.open {
        let Some(deadline) = open.removed_from else {
            continue;
        };
        // Saturates: zero also if the deadline has passed.
        if deadline.since(survey.at) > EXPIRES_SOON {
            continue;
        }
        let problem = v1::Problem {
            kind: v1::ProblemKind::LettersExpire.into(),
            since: time_of_record(open.oldest),
            growing: changes.and_then(|changes| changes.has_more_letters(topic)),
            count: Some(open.count),
            next_step: v1::NextStep::HandleDeadLetters.into(),
            deadline: time_of_record(deadline),
            ..v1::Problem::default()
        };
        found.push(of_letters(pipelines, topic, problem));
    }
    for group in letters.groups.iter().flatten() {
        let problem = problem_of_group(group, survey.at);
        found.push(of_letters(pipelines, &group.topic, problem));
    }
}

fn problem_of_group(group: &TopicGroup, now: Timestamp) -> v1::Problem {
    let kind = match group.state {
        GroupState::Regressed => v1::ProblemKind::GroupRegressed,
        _ => v1::ProblemKind::GroupNew,
    };
    v1::Problem {
        kind: kind.into(),
        since: time_of_record(group.first),
        growing: Some(now.since(group.last) <= GROWS),
        count: Some(group.open),
        next_step: v1::NextStep::LookAtGroup.into(),
        group_id: group.id.to_string(),
        error_class: bounded_text(&group.error_class, MAX_TEXT),
        error_code: bounded_text(&group.error_code, MAX_TEXT),
        template: bounded_text(&group.template, MAX_TEXT),
        ..v1::Problem::default()
    }
}

fn redrives(pipelines: &Pipelines, survey: &Survey, found: &mut Vec<Found>) {
    let redrives = survey.redrives.iter().flatten();
    for redrive in redrives.filter(|redrive| redrive.state == RedriveState::AutoPaused) {
        // A job of several topics is about no single pipeline.
        let topic = match &*redrive.sources {
            [topic] => topic.to_string(),
            _ => String::new(),
        };
        let pipeline = pipelines.of_letters(&topic);
        found.push(Found {
            message: v1::Problem {
                kind: v1::ProblemKind::RedriveAutoPaused.into(),
                pipeline: pipeline.map_or_else(String::new, |pipeline| pipeline.name.to_string()),
                since: redrive.sent_at.map(to_timestamp),
                count: Some(redrive.returned.into()),
                next_step: v1::NextStep::ReviewRedrive.into(),
                topic,
                redrive_id: redrive.id.clone(),
                by: redrive.by.clone(),
                ..v1::Problem::default()
            },
            topics: redrive.sources.clone(),
            is_about_control: false,
        });
    }
}

fn paused_for_long(pipelines: &Pipelines, controls: &Snapshot, now: Timestamp, found: &mut Vec<Found>) {
    let mut tiers = BTreeSet::new();
    for pipeline in &pipelines.list {
        let of_workers = ControlName::pipeline(&pipeline.name);
        let of_tiers = pipeline.policy.tiers().iter().map(|tier| {
            tiers.insert(*tier);
            ControlName::tier(&pipeline.name, *tier)
        });
        for name in std::iter::once(of_workers).chain(of_tiers) {
            if let Some(paused) = long_pause(controls, name, now) {
                found.push(of_pipeline(pipeline, paused_problem(paused)));
            }
        }
    }
    // A tier of all pipelines is one problem, of which callers know that may read its control.
    for tier in tiers {
        if let Some(paused) = long_pause(controls, ControlName::WholeTier(tier), now) {
            found.push(Found {
                message: paused_problem(paused),
                topics: Vec::new(),
                is_about_control: true,
            });
        }
    }
}

fn long_pause(controls: &Snapshot, name: ControlName, now: Timestamp) -> Option<Paused> {
    let paused = paused(controls, [name])?;
    // A value that this process cannot read pauses without a time.
    let is_long = paused.since.is_none_or(|since| now.since(since) >= PAUSED);
    is_long.then_some(paused)
}

fn paused_problem(paused: Paused) -> v1::Problem {
    v1::Problem {
        kind: v1::ProblemKind::Paused.into(),
        since: paused.since.map(to_timestamp),
        next_step: v1::NextStep::Resume.into(),
        place: match &paused.control {
            ControlName::Tier(_, tier) | ControlName::WholeTier(tier) => Place::Tier(*tier).to_string(),
            _ => String::new(),
        },
        control: paused.control.to_string(),
        by: paused.by,
        reason: paused.reason,
        ..v1::Problem::default()
    }
}
