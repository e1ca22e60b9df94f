//! The life of one record: all of its copies, in the order of their times.

mod timeline;

use askama::Template;
use askama::filters::Safe;
use axum::http::StatusCode;
use axum::response::Response;
use redeliver_client::convert::{from_duration, time};
use redeliver_client::messages::{
    PipelineTrace, Position, TraceEvent, TraceOutcome, TraceRecordRequest, TraceStep,
};
use redeliver_client::{JobId, Timestamp};
use serde::Deserialize;

use crate::backend::Backend;
use crate::command::Command;
use crate::html;
use crate::page::{Failed, Frame, Part, Problem, respond};
use crate::parameters::Query;
use timeline::Timeline;

const SECTION: &str = "/trace";

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    position: String,
}

#[derive(Template)]
#[template(path = "trace.html")]
struct Page {
    frame: Frame,
    parameters: Parameters,
    traces: Option<Part<Vec<PipelineTrace>>>,
}

/// A step of a life, as a page shows it.
pub(crate) struct Step {
    pub(crate) class: &'static str,
    pub(crate) title: String,
    pub(crate) when: Safe<String>,
    pub(crate) exact: Safe<String>,
    pub(crate) position: Option<String>,
    /// The page of the dead letter, if it is one.
    pub(crate) link: Option<String>,
    pub(crate) error: String,
    pub(crate) note: String,
}

/// A life, as a page shows it.
pub(crate) struct Life {
    pub(crate) steps: Vec<Step>,
    pub(crate) timeline: Option<Timeline>,
    /// What comes next, and when.
    pub(crate) next: (&'static str, Option<Timestamp>),
}

pub(crate) fn life(trace: &PipelineTrace, now: &Timestamp) -> Life {
    Life {
        steps: trace.steps.iter().map(|step| Step::of(step, *now)).collect(),
        timeline: timeline::timeline(trace, *now),
        next: next(trace),
    }
}

fn next(trace: &PipelineTrace) -> (&'static str, Option<Timestamp>) {
    let next = match trace.outcome() {
        TraceOutcome::New => "A worker makes the first attempt.",
        TraceOutcome::Waits => return ("The next attempt is due", time(trace.next_due)),
        TraceOutcome::Due => "A worker makes the next attempt.",
        TraceOutcome::Dead => "Nothing, until it is redriven or discarded.",
        TraceOutcome::Succeeded => "Nothing: it has a result.",
        TraceOutcome::Discarded => "Nothing, unless it is restored.",
        TraceOutcome::Redriven => "It is a new record of the topic to which it was redriven.",
        TraceOutcome::Unknown | TraceOutcome::Unspecified => "Not known.",
    };
    (next, None)
}

/// The class of a step in the list and in the picture.
fn class(event: TraceEvent) -> &'static str {
    match event {
        TraceEvent::Entered => "entered",
        TraceEvent::Waits => "waits",
        TraceEvent::Released => "released",
        TraceEvent::Succeeded => "succeeded",
        TraceEvent::Died => "died",
        TraceEvent::Redriven => "redriven",
        TraceEvent::Discarded => "discarded",
        TraceEvent::Restored => "restored",
        TraceEvent::Unspecified => "other",
    }
}

impl Step {
    fn of(step: &TraceStep, now: Timestamp) -> Self {
        let wait = step.wait.as_ref().and_then(from_duration);
        let title = match step.event() {
            TraceEvent::Entered => "entered the pipeline".to_owned(),
            TraceEvent::Waits => match wait {
                Some(wait) => format!("attempt {} failed; waits {wait} in {}", step.attempts, step.place),
                None => format!("attempt {} failed; waits in {}", step.attempts, step.place),
            },
            TraceEvent::Released => "wait ended".to_owned(),
            TraceEvent::Succeeded => "succeeded".to_owned(),
            TraceEvent::Died => "became a dead letter".to_owned(),
            TraceEvent::Redriven => match step.destination.as_str() {
                "" => "redriven".to_owned(),
                destination => format!("redriven to {destination}"),
            },
            TraceEvent::Discarded => "discarded".to_owned(),
            TraceEvent::Restored => "restored".to_owned(),
            TraceEvent::Unspecified => "unknown step".to_owned(),
        };
        let by = match (step.by.as_str(), step.reason.as_str()) {
            ("", _) => String::new(),
            (by, "") => format!("by {by}"),
            (by, why) => format!("by {by}: {why}"),
        };
        let is_dead = step.event() == TraceEvent::Died;
        Self {
            class: class(step.event()),
            title,
            when: html::time(time(step.time), now),
            exact: html::exact(time(step.time)),
            position: step.position.as_ref().map(html::position),
            link: is_dead.then(|| super::letters::link(step.position.as_ref())),
            error: match (step.error_code.as_str(), step.error_message.as_str()) {
                ("", message) => message.to_owned(),
                (code, "") => code.to_owned(),
                (code, message) => format!("{code}: {message}"),
            },
            note: by,
        }
    }
}

pub(crate) async fn page(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let frame = Frame::new(SECTION, "Trace");
    if parameters.position.is_empty() {
        let page = Page {
            frame,
            parameters,
            traces: None,
        };
        return respond(&page, StatusCode::OK);
    }
    let text = parameters.position.trim();
    let mut request = TraceRecordRequest::default();
    if text.parse::<JobId>().is_ok() {
        text.clone_into(&mut request.job_id);
    } else if let Some(position) = position(text) {
        request.position = Some(position);
    } else {
        let problem =
            "A position is TOPIC/PARTITION/OFFSET, such as orders/3/1207; the id of a job has 26 characters.";
        return Failed::respond(SECTION, Problem::invalid(problem));
    }
    let traces = backend.waiting().trace(request, |_| {}).await;
    let page = Page {
        frame: frame.command(Command::new("trace").argument(parameters.position.trim())),
        traces: Some(traces.map_err(|error| Problem::from(error).of_scan())),
        parameters,
    };
    respond(&page, StatusCode::OK)
}

pub(super) fn position(text: &str) -> Option<Position> {
    let text = text.trim();
    let (rest, offset) = text.rsplit_once('/')?;
    let (topic, partition) = rest.rsplit_once('/')?;
    Some(Position {
        topic: topic.to_owned(),
        partition: partition.parse().ok()?,
        offset: offset.parse().ok()?,
    })
}
