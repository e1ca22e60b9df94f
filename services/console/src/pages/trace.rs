//! The life of one record: all of its copies, in the order of their times.

use askama::Template;
use askama::filters::Safe;
use axum::http::StatusCode;
use axum::response::Response;
use redeliver_client::Timestamp;
use redeliver_client::convert::{from_duration, time};
use redeliver_client::messages::{PipelineTrace, Position, TraceEvent, TraceRecordRequest, TraceStep};
use serde::Deserialize;

use crate::backend::Backend;
use crate::command::Command;
use crate::html;
use crate::page::{Failed, Frame, Part, Problem, respond};
use crate::parameters::Query;

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

pub(crate) fn steps(trace: &PipelineTrace, now: &Timestamp) -> Vec<Step> {
    trace.steps.iter().map(|step| Step::of(step, *now)).collect()
}

impl Step {
    fn of(step: &TraceStep, now: Timestamp) -> Self {
        let wait = step.wait.as_ref().and_then(from_duration);
        let (class, title) = match step.event() {
            TraceEvent::Entered => ("entered", "entered the pipeline".to_owned()),
            TraceEvent::Waits => (
                "waits",
                match wait {
                    Some(wait) => format!("attempt {} failed; waits {wait} in {}", step.attempts, step.place),
                    None => format!("attempt {} failed; waits in {}", step.attempts, step.place),
                },
            ),
            TraceEvent::Released => ("released", "wait ended".to_owned()),
            TraceEvent::Succeeded => ("succeeded", "succeeded".to_owned()),
            TraceEvent::Died => ("died", "became a dead letter".to_owned()),
            TraceEvent::Redriven => (
                "redriven",
                match step.destination.as_str() {
                    "" => "redriven".to_owned(),
                    destination => format!("redriven to {destination}"),
                },
            ),
            TraceEvent::Discarded => ("discarded", "discarded".to_owned()),
            TraceEvent::Restored => ("restored", "restored".to_owned()),
            TraceEvent::Unspecified => ("other", "unknown step".to_owned()),
        };
        let by = match (step.by.as_str(), step.reason.as_str()) {
            ("", _) => String::new(),
            (by, "") => format!("by {by}"),
            (by, why) => format!("by {by}: {why}"),
        };
        let is_dead = step.event() == TraceEvent::Died;
        Self {
            class,
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
    let Some(position) = position(&parameters.position) else {
        let problem = "A position is TOPIC/PARTITION/OFFSET, such as orders/3/1207.";
        return Failed::respond(SECTION, Problem::invalid(problem));
    };
    let request = TraceRecordRequest {
        position: Some(position),
        ..TraceRecordRequest::default()
    };
    let traces = backend.waiting().trace(request, |_| {}).await;
    let page = Page {
        frame: frame.command(Command::new("trace").argument(parameters.position.trim())),
        traces: Some(traces.map_err(Problem::from)),
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
