//! Pages with a form that changes something. Opening one changes nothing, sending it does, and a page with the effect follows.
//!
//! Each shows what it affects and the command that does the same. If a service refuses the change, the form says why, and keeps what was entered.
//! A viewer who lacks a scope gets the page without the form.

mod buttons;
mod control;
mod edit;
mod group;
mod job;
mod plan;
mod redrive;
mod schedule;
mod waiting;

use askama::Template;
use askama::filters::Safe;
use axum::Router;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{MethodRouter, get};
use redeliver_client::{ClientError, Code};

use crate::access::Need;
use crate::backend::{Backend, Service};
use crate::command::Command;
use crate::form::{self, Field, Fields, Form, Input, Token};
use crate::html;
use crate::page::{Failed, Frame, Part, Problem, respond};
use crate::parameters::Query;

pub(super) use buttons::{jobs, letter, matching, pipeline, resume, tier};
pub(super) use control::effective;
pub(super) use group::buttons as group;
pub(super) use job::buttons as job;
pub(super) use redrive::buttons as redrive;
pub(super) use schedule::buttons as schedule;
pub(super) use waiting::buttons as waiting;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/act/control", act::<control::Change>())
        .route("/act/edit", act::<edit::Edit>())
        .route("/act/group", act::<group::Change>())
        .route("/act/job", act::<job::Change>())
        .route("/act/plan", act::<plan::Plan>())
        .route("/act/redrive", act::<redrive::Change>())
        .route("/act/schedule", act::<schedule::Change>())
        .route("/act/waiting", act::<waiting::Change>())
}

/// Something that a form does: the fields of its address and of its form.
trait Act: Fields + Send + Sync + 'static {
    /// The entry of the navigation.
    const SECTION: &'static str;

    /// The service that makes the change.
    fn service(&self) -> Service {
        Service::Inspector
    }

    /// What the form shows, as it is now.
    fn sheet(&self, backend: &Backend, frame: &Frame) -> impl Future<Output = Part<Sheet>> + Send;

    /// Forgets what the caller has seen, which is not so any more.
    fn forget(&mut self) {}

    /// Makes the change, once for each request id. The address of the page that shows the effect; `None`: the form, because nothing was changed yet.
    fn run(&self, backend: &Backend, request_id: &str) -> impl Future<Output = Part<Option<String>>> + Send;
}

/// What a form shows.
struct Sheet {
    title: String,
    facts: Vec<Fact>,
    warnings: Vec<String>,
    /// What differs, as a unified diff, with the name of the part.
    diffs: Vec<(&'static str, String)>,
    /// What would be written.
    samples: Vec<Sample>,
    fields: Vec<Field>,
    /// Name and label of the second button, which changes nothing.
    preview: Option<&'static str>,
    /// What the change needs.
    needs: Vec<Need>,
    button: String,
    command: Command,
    /// The page to go back to.
    back: String,
}

/// A name and a value.
type Fact = (&'static str, Safe<String>);

fn fact(name: &'static str, value: impl AsRef<str>) -> Fact {
    (name, html::text(value))
}

impl Sheet {
    fn new(
        needs: Vec<Need>,
        title: impl Into<String>,
        button: impl Into<String>,
        command: Command,
        back: String,
    ) -> Self {
        Self {
            title: title.into(),
            facts: Vec::new(),
            warnings: Vec::new(),
            diffs: Vec::new(),
            samples: Vec::new(),
            fields: Vec::new(),
            preview: None,
            needs,
            button: button.into(),
            command,
            back,
        }
    }
}

/// What becomes of a dead letter.
struct Sample {
    title: String,
    /// Name, change, and the values before and after.
    headers: Vec<(String, String, Safe<String>, Safe<String>)>,
    /// What is not shown.
    note: &'static str,
}

#[derive(Template)]
#[template(path = "act.html")]
struct Page {
    frame: Frame,
    sheet: Sheet,
    problem: Option<Problem>,
    /// What the viewer lacks. Then there is no form.
    missing: Option<String>,
    token: String,
    id: String,
}

fn act<A: Act>() -> MethodRouter {
    get(show::<A>).post(send::<A>)
}

async fn show<A: Act>(backend: Backend, token: Token, Query(asked): Query<A>) -> Response {
    page(&asked, &backend, None, token, form::id()).await
}

async fn send<A: Act>(backend: Backend, form: Form<A>) -> Response {
    let Form {
        fields: mut asked,
        token,
        id,
        request_id,
        genuine,
    } = form;
    let done = match genuine {
        Ok(()) => asked.run(&backend, &request_id).await,
        Err(problem) => Err(problem),
    };
    match done {
        Ok(Some(next)) => Redirect::to(&next).into_response(),
        Ok(None) => page(&asked, &backend, None, token, id).await,
        Err(problem) => {
            // After an unknown outcome, a repetition is recognised by what the caller has seen.
            if problem.is_about_revision() {
                asked.forget();
            }
            page(&asked, &backend, Some(problem.of_change()), token, id).await
        }
    }
}

async fn page<A: Act>(
    asked: &A,
    backend: &Backend,
    problem: Option<Problem>,
    token: Token,
    id: String,
) -> Response {
    let mut frame = Frame::new(A::SECTION, "");
    let sheet = match asked.sheet(backend, &frame).await {
        Ok(sheet) => sheet,
        // What the form was sent for tells more than why it cannot be shown again.
        Err(cannot_show) => return Failed::respond(A::SECTION, problem.unwrap_or(cannot_show)),
    };
    let missing = backend.access(asked.service()).await.missing(&sheet.needs);
    // What was entered stays.
    let missing = missing.filter(|_| problem.is_none());
    let status = match &problem {
        Some(problem) => problem.status,
        None if missing.is_some() => StatusCode::FORBIDDEN,
        None => StatusCode::OK,
    };
    frame.title.clone_from(&sheet.title);
    if missing.is_none() {
        frame = frame.command(&sheet.command);
    }
    let page = Page {
        frame,
        sheet,
        problem,
        missing,
        token: token.text().to_owned(),
        id,
    };
    (token, respond(&page, status)).into_response()
}

/// The revision that the caller has seen.
fn seen(revision: &str) -> Part<Option<u64>> {
    form::parsed("revision", revision, "a whole number")
}

/// The revision that a form shows: the one that the caller has seen, or else the current one.
fn shown(seen: &str, current: u64) -> String {
    match seen.trim() {
        "" => current.to_string(),
        seen => seen.to_owned(),
    }
}

/// Accepts a change that was refused because it is a repetition: one revision after the expected one, it is as wanted.
async fn accept_repeated(
    error: ClientError,
    expected: Option<u64>,
    found: impl Future<Output = Part<(u64, bool)>> + Send,
) -> Part<()> {
    if error.code() == Some(Code::Aborted)
        && let Some(next) = expected.and_then(|expected| expected.checked_add(1))
        && let Ok((revision, true)) = found.await
        && revision == next
    {
        return Ok(());
    }
    Err(error.into())
}

/// A text of several lines, as it was before a browser sent it.
fn lines(text: &str) -> String {
    text.replace("\r\n", "\n")
}

/// A number of things, such as `1 dead letter`.
fn count(number: u64, one: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {one}{plural}", html::number(number))
}

/// A time from now, and the exact one.
fn when(time: impl html::Time + Copy, frame: &Frame) -> Safe<String> {
    Safe(format!("{} ({})", html::time(time, frame.now), html::exact(time)))
}

/// Who has changed something, when and why, as in `ann 5 min ago: INC-17`.
fn by(by: &str, time: impl html::Time, reason: &str, frame: &Frame) -> Safe<String> {
    let reason = match reason {
        "" => String::new(),
        reason => format!(": {}", html::escaped(reason)),
    };
    Safe(format!(
        "{} {}{reason}",
        html::escaped(by),
        html::time(time, frame.now)
    ))
}
