//! Dead letters: a list, and one with its payload and its life.

use askama::Template;
use askama::filters::Safe;
use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use futures::stream::{iter, try_unfold};
use redeliver_client::ClientError;
use redeliver_client::messages::{
    DeadLetter, DeadLetterState, GetDeadLetterStatsRequest, Header, ListDeadLettersRequest, PipelineTrace,
    Position, TraceRecordRequest,
};
use serde::Deserialize;

use super::completions::Completions;
use super::groups::Tab;
use super::news::{self, Wanted as News};
use crate::access::Actions;
use crate::backend::{Backend, MAX_DOWNLOADS, Service};
use crate::command::Command;
use crate::html::{self, Form, Shown};
use crate::page::{Failed, Frame, Part, Problem, address, gaps, respond, segment, status};
use crate::parameters::{Path, Query};

const SECTION: &str = "/letters";
const PAGE_SIZE: i32 = 50;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    filter: String,
    page: String,
}

#[derive(Template)]
#[template(path = "letters.html")]
struct Letters {
    frame: Frame,
    parameters: Parameters,
    letters: Part<Vec<Row>>,
    completions: Completions,
    gaps: Option<String>,
    next: Option<String>,
    /// Filters that a click sets.
    suggestions: [(&'static str, String); 4],
    /// Only with dead letters.
    buttons: Option<Actions>,
}

/// A dead letter in a list.
pub(crate) struct Row {
    pub(crate) letter: DeadLetter,
    pub(crate) link: String,
}

impl Row {
    pub(crate) fn of(letter: DeadLetter) -> Self {
        Self {
            link: link(letter.position.as_ref()),
            letter,
        }
    }

    pub(crate) fn state(&self) -> &'static str {
        state_class(self.letter.state())
    }

    pub(crate) fn reason(&self) -> &str {
        let DeadLetter {
            error_message,
            error_code,
            error_class,
            ..
        } = &self.letter;
        [error_message, error_code, error_class]
            .into_iter()
            .find(|text| !text.is_empty())
            .map_or("no error in the headers", |text| text)
    }
}

/// The page of the dead letter at a position.
pub(crate) fn link(position: Option<&Position>) -> String {
    let Some(position) = position else {
        return SECTION.to_owned();
    };
    let topic = segment(SECTION, &position.topic);
    format!("{topic}/{}/{}", position.partition, position.offset)
}

pub(crate) fn state_class(state: DeadLetterState) -> &'static str {
    match state {
        DeadLetterState::Unspecified => "unknown",
        DeadLetterState::Open => "open",
        DeadLetterState::Redriven => "redriven",
        DeadLetterState::Discarded => "discarded",
    }
}

pub(crate) async fn list(backend: Backend, Query(mut parameters): Query<Parameters>) -> Response {
    parameters.filter = parameters.filter.trim().to_owned();
    let request = ListDeadLettersRequest {
        filter: parameters.filter.clone(),
        page_size: PAGE_SIZE,
        page_token: parameters.page.clone(),
        ..ListDeadLettersRequest::default()
    };
    let answer = backend.dead_letters().list(request).await;
    let command = Command::new("dlq ls")
        .option("--filter", &parameters.filter)
        .option("--limit", PAGE_SIZE);
    let frame = Frame::new(SECTION, "Dead letters").command(command);
    let with = |filter: &str| address(SECTION, &[("filter", filter)]);
    let mut page = Letters {
        suggestions: [
            ("all", with("")),
            ("open", with("state = OPEN")),
            ("permanent", with("state = OPEN AND error_class = \"permanent\"")),
            ("retried out", with("state = OPEN AND retry_count > 0")),
        ],
        buttons: None,
        letters: Ok(Vec::new()),
        completions: match &answer {
            Ok(answer) if !answer.dead_letters.is_empty() => {
                Completions::of_letters(&parameters.filter, &answer.dead_letters)
            }
            _ => Completions::without_rows(&parameters.filter, &backend).await,
        },
        gaps: None,
        next: None,
        frame,
        parameters,
    };
    page.letters = match answer {
        Ok(answer) => {
            page.gaps = gaps(answer.completeness.as_ref(), page.frame.now);
            let token = answer.next_page_token;
            let filter = &page.parameters.filter;
            page.next =
                (!token.is_empty()).then(|| address(SECTION, &[("filter", filter), ("page", &token)]));
            if page.parameters.page.is_empty() {
                let times = answer.dead_letters.iter();
                let newest = times.filter_map(|letter| html::when(letter.dead_at)).max();
                page.frame.news = news::link(
                    "/letters/new",
                    &[("filter", filter)],
                    newest,
                    answer.completeness.as_ref(),
                );
            }
            if !answer.dead_letters.is_empty() {
                let access = backend.access(Service::Inspector).await;
                page.buttons = Some(access.actions(super::act::matching(&page.parameters.filter)));
            }
            Ok(answer.dead_letters.into_iter().map(Row::of).collect())
        }
        Err(error) => Err(error.into()),
    };
    let status = status(&page.letters);
    respond(&page, status)
}

/// For the script of an open list: how many dead letters are new, or nothing.
pub(crate) async fn news(backend: Backend, Query(wanted): Query<News>) -> Result<String, StatusCode> {
    let request = GetDeadLetterStatsRequest {
        filter: wanted.filter(),
        // The total is asked for, which comes with counts by any field.
        by: vec!["topic".to_owned()],
        limit: 1,
        ..GetDeadLetterStatsRequest::default()
    };
    let answer = backend.dead_letters().count(request).await;
    let answer = answer.map_err(|error| Problem::from(error).status)?;
    Ok(news::of_letters(answer.counts.map_or(0, |counts| counts.total)))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Wanted {
    /// Set to trace the record.
    life: String,
    /// How the payload is shown.
    form: Form,
}

/// The forms of a payload, with their labels.
const FORMS: [(&str, &str, Form); 3] = [
    ("", "readable", Form::Best),
    ("text", "as it is", Form::Text),
    ("hex", "hex", Form::Hex),
];

#[derive(Template)]
#[template(path = "letter.html")]
struct One {
    frame: Frame,
    row: Row,
    gaps: Option<String>,
    /// `None` without a value on the page; `is_null` says whether the record has none.
    value: Option<Shown>,
    is_null: bool,
    forms: [Tab; 3],
    headers: Vec<(String, Safe<String>)>,
    /// `None` before it was asked for: it reads topics.
    life: Option<Part<Vec<PipelineTrace>>>,
    group: String,
    buttons: Actions,
}

impl One {
    fn origin(&self) -> Option<String> {
        self.row.letter.origin.as_ref().map(html::position)
    }

    fn withheld(&self) -> bool {
        self.row.letter.payload_withheld != 0
    }
}

pub(crate) async fn one(
    backend: Backend,
    Path((topic, partition, offset)): Path<(String, i32, i64)>,
    Query(wanted): Query<Wanted>,
) -> Response {
    let id = format!("{topic}/{partition}/{offset}");
    let letter = match backend.dead_letters().get(&id).await {
        Ok(Some(letter)) => letter,
        Ok(None) => return Failed::respond(SECTION, Problem::not_found("Dead letter")),
        Err(error) => return Failed::respond(SECTION, error.into()),
    };
    let life = if wanted.life.is_empty() {
        None
    } else {
        let trace = TraceRecordRequest {
            position: letter.position.clone(),
            ..TraceRecordRequest::default()
        };
        let life = backend.waiting().trace(trace, |_| {}).await;
        Some(life.map_err(|error| Problem::from(error).of_scan()))
    };
    let access = backend.access(Service::Inspector).await;
    let command = Command::new(if life.is_none() { "dlq show" } else { "trace" }).argument(&id);
    let frame = Frame::new(SECTION, id.clone()).command(command);
    let row = Row::of(letter);
    let letter = &row.letter;
    let forms = FORMS.map(|(name, label, form)| Tab {
        label,
        link: address(&row.link, &[("life", &wanted.life), ("form", name)]),
        is_current: form == wanted.form,
    });
    let header = |header: &Header| (header.name.clone(), html::line(header.value.as_deref()));
    let page = One {
        gaps: gaps(letter.completeness.as_ref(), frame.now),
        value: letter
            .value
            .as_deref()
            .map(|value| Shown::in_form(value, wanted.form)),
        is_null: letter.value.is_none() && letter.value_size.is_none() && !letter.is_masked("value_size"),
        headers: letter.headers.iter().map(header).collect(),
        forms,
        life,
        group: segment("/groups", &letter.group),
        buttons: access.actions(super::act::letter(letter)),
        row,
        frame,
    };
    respond(&page, StatusCode::OK)
}

/// The value of a dead letter as its viewer may see it, as a file. Its name tells whether something in it is masked.
pub(crate) async fn payload(
    backend: Backend,
    Path((topic, partition, offset)): Path<(String, i32, i64)>,
) -> Response {
    let id = format!("{topic}/{partition}/{offset}");
    let Some((letters, permit)) = backend.download() else {
        let problem = Problem {
            status: StatusCode::SERVICE_UNAVAILABLE,
            title: "Too many downloads".to_owned(),
            detail: format!("{MAX_DOWNLOADS} payloads are being downloaded."),
            advice: "Try again when one has ended.".to_owned(),
            passes: false,
        };
        return Failed::respond(SECTION, problem);
    };
    // What is masked is known with the first chunk.
    let begun = async {
        let mut payload = letters.payload(&id).await?;
        let first = payload.next().await?;
        Ok::<_, ClientError>((payload, first))
    };
    let (payload, first) = match begun.await {
        Ok(begun) => begun,
        Err(error) => return Failed::respond(SECTION, error.into()),
    };
    let disposition = match payload.masked_paths().is_empty() {
        true => "attachment; filename=\"payload\"",
        false => "attachment; filename=\"payload-masked\"",
    };
    let rest = try_unfold((payload, permit), async |(mut payload, permit)| {
        let chunk = payload.next().await?;
        Ok::<_, ClientError>(chunk.map(|chunk| (chunk, (payload, permit))))
    });
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream"),
        (header::CONTENT_DISPOSITION, disposition),
    ];
    let chunks = iter(first.map(Ok)).chain(rest);
    (headers, Body::from_stream(chunks)).into_response()
}
