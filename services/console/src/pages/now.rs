//! What is wrong now, the worst first, and all pipelines.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use askama::Template;
use askama::filters::Safe;
use axum::response::Response;
use redeliver_client::Timestamp;
use redeliver_client::messages::{
    NextStep, Overview, OverviewOrder, OverviewPart, OverviewSelection, PipelineOverview, Problem as Wrong,
    ProblemKind,
};
use serde::Deserialize;

use super::proof::Badge;
use crate::access::Access;
use crate::backend::{Backend, Service};
use crate::html;
use crate::page::{Frame, Part, Problem, address, gaps, literal, respond, segment, status};
use crate::parameters::Query;

const SECTION: &str = "/";
const PIPELINES: u32 = 100;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    /// The beginning of the names of pipelines.
    prefix: String,
    /// The pipeline after which the page begins, in the order of names.
    after: String,
}

#[derive(Template)]
#[template(path = "now.html")]
struct Page {
    frame: Frame,
    parameters: Parameters,
    overview: Part<Overview>,
    concerns: Vec<Concern>,
    gaps: Option<String>,
    /// More pipelines than the page has: pages exist in the order of names only.
    next: Option<String>,
}

impl Page {
    fn row(&self, pipeline: &PipelineOverview) -> Row {
        Row::of(pipeline)
    }
}

/// A pipeline in the list.
struct Row {
    link: String,
    waiting: String,
    overdue: String,
    open: Option<u64>,
    letters: String,
    /// Dead letters by hour: `None` from an inspector that does not tell it.
    trend: Option<Safe<String>>,
    paused: bool,
    badge: Badge,
}

impl Row {
    fn of(pipeline: &PipelineOverview) -> Self {
        let dead = pipeline.dead_letters.as_ref();
        let filter = format!("pipeline = {} AND state = OPEN", literal(&pipeline.pipeline));
        Self {
            link: segment("/pipelines", &pipeline.pipeline),
            waiting: waiting(pipeline),
            overdue: overdue(pipeline),
            open: dead.and_then(|dead| dead.open),
            letters: address("/letters", &[("filter", &filter)]),
            trend: dead
                .filter(|dead| !dead.trend.is_empty())
                .map(|dead| html::trend(&dead.trend)),
            paused: pipeline.run.as_ref().and_then(|run| run.paused) == Some(true),
            badge: Badge::of(pipeline.audit.as_ref()),
        }
    }
}

/// How many records wait in all places; a bound if some are not exact.
pub(super) fn waiting(pipeline: &PipelineOverview) -> String {
    let counts = pipeline
        .waiting
        .iter()
        .map(|place| place.waiting.unwrap_or_default());
    let known: Vec<u64> = counts.clone().filter_map(|count| count.records).collect();
    if known.is_empty() {
        return "unknown".to_owned();
    }
    let sum = html::number(known.iter().sum::<u64>());
    let is_all = known.len() == pipeline.waiting.len() && !pipeline.has_long_waits;
    if !is_all || counts.clone().any(|count| count.unreachable_partitions > 0) {
        format!("{sum}+")
    } else if counts.clone().all(|count| count.exact) {
        sum
    } else {
        format!("≤ {sum}")
    }
}

/// How many of them are due; a bound if not all were read.
pub(super) fn overdue(pipeline: &PipelineOverview) -> String {
    let known = pipeline.waiting.iter().filter(|place| place.overdue.is_some());
    if known.clone().next().is_none() {
        return "unknown".to_owned();
    }
    let sum = html::number(known.clone().filter_map(|place| place.overdue).sum::<u64>());
    if known.clone().all(|place| place.overdue_exact) {
        sum
    } else {
        format!("≥ {sum}")
    }
}

/// Something that a person should look at, with the safe next step, which its link leads to.
pub(super) struct Concern {
    pub(super) class: &'static str,
    pub(super) label: &'static str,
    pub(super) title: String,
    pub(super) detail: String,
    pub(super) since: Option<Timestamp>,
    pub(super) link: String,
    pub(super) step: &'static str,
    /// The same as long as it is the same problem, so that it keeps the focus when others come and go.
    pub(super) id: String,
}

impl Concern {
    pub(super) fn of(wrong: &Wrong, access: &Access) -> Self {
        let (class, label) = match wrong.kind() {
            ProblemKind::TopicMissing => ("regressed", "topic missing"),
            ProblemKind::LettersExpire => ("regressed", "expires soon"),
            ProblemKind::BreakerOpen => ("regressed", "breaker open"),
            ProblemKind::Overdue => ("regressed", "overdue"),
            ProblemKind::RedriveAutoPaused => ("regressed", "redrive paused"),
            ProblemKind::GroupRegressed => ("regressed", "regressed"),
            ProblemKind::GroupNew => ("open", "new failure"),
            ProblemKind::Incomplete => ("open", "incomplete"),
            ProblemKind::Paused => ("paused", "paused"),
            ProblemKind::NotClean => ("regressed", "not accounted for"),
            ProblemKind::Unspecified => ("open", "problem"),
        };
        Self {
            class,
            label,
            title: title(wrong),
            detail: detail(wrong),
            since: html::when(wrong.since),
            link: link(wrong),
            step: match wrong.next_step() {
                NextStep::Resume if !may_resume(wrong, access) => "see who and why",
                next => step(next),
            },
            id: id(wrong),
        }
    }
}

fn may_resume(wrong: &Wrong, access: &Access) -> bool {
    let resume = super::act::resume(&wrong.control);
    resume.needs.iter().all(|need| access.permits(need))
}

fn id(wrong: &Wrong) -> String {
    let mut hasher = DefaultHasher::new();
    let Wrong {
        kind,
        pipeline,
        topic,
        place,
        group_id,
        redrive_id,
        control,
        part,
        ..
    } = wrong;
    (kind, pipeline, topic, place, group_id, redrive_id, control, part).hash(&mut hasher);
    format!("p{:016x}", hasher.finish())
}

fn title(wrong: &Wrong) -> String {
    let count = || wrong.count.map_or_else(|| "some".to_owned(), html::number);
    match wrong.kind() {
        ProblemKind::TopicMissing => format!("Topic {} does not exist", wrong.topic),
        ProblemKind::LettersExpire => format!("{} open dead letters of {} can expire", count(), wrong.topic),
        ProblemKind::BreakerOpen => format!("The endpoint of {} fails", wrong.pipeline),
        ProblemKind::Overdue => format!("{} records of {} are overdue", count(), wrong.pipeline),
        ProblemKind::RedriveAutoPaused => format!("{} redriven records came back", count()),
        ProblemKind::GroupRegressed | ProblemKind::GroupNew => {
            [&wrong.template, &wrong.error_code, &wrong.error_class]
                .into_iter()
                .find(|text| !text.is_empty())
                .map_or_else(|| "no error in the headers".to_owned(), Clone::clone)
        }
        ProblemKind::Incomplete => format!("{} not known", part(wrong.part())),
        ProblemKind::Paused => format!("{} is paused", wrong.control),
        ProblemKind::NotClean => format!("{} records are lost, doubled, early or altered", count()),
        ProblemKind::Unspecified => "This console is older than the inspector".to_owned(),
    }
}

fn detail(wrong: &Wrong) -> String {
    let mut details = Vec::new();
    if let (ProblemKind::GroupRegressed | ProblemKind::GroupNew, Some(count)) = (wrong.kind(), wrong.count) {
        details.push(format!("{} open", html::number(count)));
    }
    if wrong.kind() == ProblemKind::BreakerOpen && !wrong.error_code.is_empty() {
        details.push(wrong.error_code.clone());
    }
    if !wrong.pipeline.is_empty() {
        details.push(format!("in {}", wrong.pipeline));
    }
    if !wrong.place.is_empty() {
        details.push(format!("tier {}", wrong.place));
    }
    match wrong.growing {
        Some(true) => details.push("still growing".to_owned()),
        Some(false) => details.push("not growing".to_owned()),
        None => {}
    }
    if let Some(deadline) = html::when(wrong.deadline) {
        let deadline = deadline.to_rfc3339().unwrap_or_default();
        details.push(format!("Kafka may remove the first from {deadline} on"));
    }
    match (wrong.by.as_str(), wrong.reason.as_str()) {
        ("", _) => {}
        (by, "") => details.push(format!("by {by}")),
        (by, reason) => details.push(format!("by {by}: {reason}")),
    }
    details.join(", ")
}

fn part(part: OverviewPart) -> &'static str {
    match part {
        OverviewPart::Topics => "Topics are",
        OverviewPart::Waiting => "What waits is",
        OverviewPart::DeadLetters => "Some dead letters are",
        OverviewPart::GroupStates => "The states of groups are",
        OverviewPart::Controls => "What is paused is",
        OverviewPart::Redrives => "Redrives are",
        OverviewPart::Breakers => "The states of breakers are",
        OverviewPart::Unspecified => "A part is",
    }
}

fn link(wrong: &Wrong) -> String {
    match wrong.next_step() {
        NextStep::LookAtGroup => segment("/groups", &wrong.group_id),
        NextStep::ReviewRedrive => segment("/redrives", &wrong.redrive_id),
        NextStep::HandleDeadLetters => {
            let filter = format!("topic = {} AND state = OPEN", literal(&wrong.topic));
            address("/letters", &[("filter", &filter)])
        }
        NextStep::Resume => super::act::resume(&wrong.control).link,
        NextStep::CheckRetryTier => address(
            "/waiting",
            &[
                ("pipeline", &wrong.pipeline),
                ("place", &wrong.place),
                ("scan", "records"),
            ],
        ),
        _ if !wrong.pipeline.is_empty() => segment("/pipelines", &wrong.pipeline),
        _ => SECTION.to_owned(),
    }
}

fn step(step: NextStep) -> &'static str {
    match step {
        NextStep::CreateTopic => "create it: redeliver topics apply",
        NextStep::HandleDeadLetters => "redrive, export or discard",
        NextStep::CheckEndpoint => "check the endpoint",
        NextStep::CheckRetryTier => "check the retry tier",
        NextStep::ReviewRedrive => "see what came back",
        NextStep::LookAtGroup => "look at the group",
        NextStep::CheckKafka => "check Kafka",
        NextStep::Wait => "wait",
        NextStep::Resume => "see who and why, and resume",
        NextStep::LookAtRecords => "see which ones",
        NextStep::Unspecified => "",
    }
}

/// A rate of events per second, with as many digits as it deserves.
pub(super) fn rate(rate: &Option<f64>) -> String {
    match *rate {
        None => "–".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(rate) if rate < 0.1 => format!("{:.1}/min", rate * 60.0),
        Some(rate) if rate < 10.0 => format!("{rate:.1}/s"),
        Some(rate) => format!("{rate:.0}/s"),
    }
}

pub(crate) async fn page(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let by_name = !parameters.after.is_empty();
    let selection = OverviewSelection {
        prefix: parameters.prefix.trim().to_owned(),
        order: if by_name {
            OverviewOrder::ByName
        } else {
            OverviewOrder::WorstFirst
        }
        .into(),
        limit: PIPELINES,
        after: parameters.after.clone(),
        ..OverviewSelection::default()
    };
    let overview = backend.overview().overview(selection).await;
    let mut page = Page {
        frame: Frame::new(SECTION, "Now").command("redeliver status").live(),
        parameters,
        concerns: Vec::new(),
        gaps: None,
        next: None,
        overview: overview.map_err(Problem::from),
    };
    if let Ok(overview) = &page.overview {
        let mut steps = overview.problems.iter().map(Wrong::next_step);
        let access = match steps.any(|step| step == NextStep::Resume) {
            true => backend.access(Service::Inspector).await,
            false => Access::default(),
        };
        let concerns = overview.problems.iter();
        page.concerns = concerns.map(|wrong| Concern::of(wrong, &access)).collect();
        page.gaps = gaps(overview.completeness.as_ref(), page.frame.now);
        page.frame.as_of = html::when(overview.as_of);
        let shown = overview.pipelines.len();
        let last = overview.pipelines.last();
        page.next = last
            .filter(|_| shown < overview.pipeline_count as usize)
            .map(|last| {
                let after = if by_name { last.pipeline.as_str() } else { " " };
                address(SECTION, &[("prefix", &page.parameters.prefix), ("after", after)])
            });
    }
    let status = status(&page.overview);
    respond(&page, status)
}
