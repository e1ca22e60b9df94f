//! Finds pages, pipelines, groups and ids by a text, and records by what is in them. The palette of `console.js` shows the list of this page.

use askama::Template;
use axum::http::StatusCode;
use axum::response::Response;
use redeliver_client::convert::to_timestamp;
use redeliver_client::messages::find_records_request::By;
use redeliver_client::messages::{FindRecordsRequest, FoundRecords, Group, OverviewSelection, Position};
use redeliver_client::{JobId, Timestamp, named_text};
use serde::Deserialize;

use super::{groups, letters, trace};
use crate::backend::Backend;
use crate::command::Command;
use crate::html;
use crate::page::{Frame, NAVIGATION, Part, Problem, address, gaps, literal, respond, segment};
use crate::parameters::{Query, since};

const SECTION: &str = "/find";
/// The longest text that services are asked for, in characters, as in the fields.
const MAX_TEXT: usize = 200;
/// The most pipelines and groups that are shown.
const SHOWN: usize = 8;
/// The most groups whose templates are searched: those that were seen last.
const SEARCHED: i32 = 100;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    q: String,
    /// What the records have that are searched for: `key`, `header` or `field`, and its text. Empty: none are.
    by: String,
    has: String,
    /// Only in this pipeline.
    pipeline: String,
    /// How far back topics are searched, such as `7d`.
    since: String,
}

#[derive(Template)]
#[template(path = "find.html")]
struct Page {
    frame: Frame,
    text: String,
    parameters: Parameters,
    records: Option<Part<FoundRecords>>,
    found: Vec<Found>,
    /// Why something may be missing.
    problems: Vec<Problem>,
    gaps: Option<String>,
}

impl Page {
    fn incomplete(&self, found: &FoundRecords) -> Option<String> {
        gaps(found.completeness.as_ref(), self.frame.now)
    }

    fn trace(&self, position: &Position) -> String {
        address("/trace", &[("position", &html::position(position))])
    }
}

/// The kind, the name, and the page.
type Found = (&'static str, String, String);

pub(crate) async fn page(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let text = parameters.q.trim();
    let mut found = pages(text);
    let mut problems = Vec::new();
    let mut missing = None;
    let mut frame = Frame::new(SECTION, "Find");
    let records = match question(&parameters, frame.now) {
        None => None,
        Some(Err(problem)) => Some(Err(problem)),
        Some(Ok(request)) => {
            let Parameters { by, has, since, .. } = &parameters;
            let command = Command::new("trace")
                .value(&format!("--{by}"), has)
                .option("--pipeline", &request.pipeline)
                .option("--since", since.trim());
            frame = frame.command(command);
            let found = backend.waiting().find(request, |_| {}).await;
            Some(found.map_err(|error| Problem::from(error).of_scan()))
        }
    };
    if text.chars().count() > MAX_TEXT {
        problems.push(Problem {
            status: StatusCode::BAD_REQUEST,
            title: "The text is too long".to_owned(),
            detail: format!("It has more than {MAX_TEXT} characters."),
            advice: String::new(),
            passes: false,
        });
    } else if !text.is_empty() {
        found.extend(ids(text));
        let selection = OverviewSelection {
            prefix: text.to_owned(),
            limit: u32::try_from(SHOWN).unwrap_or(0),
            problem_limit: 1,
            ..OverviewSelection::default()
        };
        let (overview, letters) = (backend.overview(), backend.dead_letters());
        let (pipelines, groups) = tokio::join!(
            overview.overview(selection),
            letters.groups(groups::open("", SEARCHED))
        );
        match pipelines {
            Ok(overview) => found.extend(overview.pipelines.into_iter().map(|pipeline| {
                let link = segment("/pipelines", &pipeline.pipeline);
                ("pipeline", pipeline.pipeline, link)
            })),
            Err(error) => problems.push(Problem::from(error)),
        }
        match groups {
            Ok(answer) => {
                found.extend(matching(&answer.groups, text));
                missing = gaps(answer.completeness.as_ref(), frame.now);
            }
            Err(error) => problems.push(error.into()),
        }
        // Both asked the inspector.
        problems.dedup_by(|second, first| second.title == first.title);
        if records.is_some() {
            // The page would repeat the scan with them.
            problems = problems.into_iter().map(Problem::of_scan).collect();
        }
        let filter = format!("error_message : {}", literal(text));
        let link = address("/letters", &[("filter", &filter)]);
        found.push(("dead letters", format!("whose error contains {text}"), link));
    }
    let page = Page {
        frame,
        text: text.to_owned(),
        records,
        found,
        problems,
        gaps: missing,
        parameters,
    };
    respond(&page, StatusCode::OK)
}

/// The search for records; `None` if there is none.
fn question(parameters: &Parameters, now: Timestamp) -> Option<Part<FindRecordsRequest>> {
    let by = by(&parameters.by, &parameters.has)?;
    Some(by.and_then(|by| {
        Ok(FindRecordsRequest {
            by: Some(by),
            pipeline: parameters.pipeline.trim().to_owned(),
            since: since(&parameters.since, now)?.map(to_timestamp),
        })
    }))
}

/// What records have that are searched for. `None`: none are.
fn by(by: &str, has: &str) -> Option<Part<By>> {
    let named = |to_by: fn(_) -> By, example: &str| {
        let problem = || Problem::invalid(format!("Write a name and a value, such as {example}."));
        named_text(has).map(to_by).ok_or_else(problem)
    };
    Some(match by {
        "" => return None,
        "key" => Ok(By::Key(has.to_owned())),
        "header" => named(By::Header, "tenant=x"),
        "field" => named(By::Field, "/order/id=4711"),
        _ => Err(Problem::invalid("Records are found by key, header or field.")),
    })
}

/// Pages whose names contain a text.
fn pages(text: &str) -> Vec<Found> {
    let entries = NAVIGATION.iter().flat_map(|(_, entries)| entries.iter());
    let matching = entries.filter(|(path, name, _)| contains(name, text) && *path != SECTION);
    matching
        .map(|(path, name, _)| ("page", (*name).to_owned(), (*path).to_owned()))
        .collect()
}

/// What a text can be the id of. Whether it exists, its page tells.
fn ids(text: &str) -> Vec<Found> {
    let mut found = Vec::new();
    let mut add = |kind, link| found.push((kind, text.to_owned(), link));
    if let Some(position) = trace::position(text) {
        add("dead letter", letters::link(Some(&position)));
        add("trace", address("/trace", &[("position", text)]));
    }
    if text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        add("group", segment("/groups", text));
        add("redrive", segment("/redrives", text));
    }
    if text.parse::<JobId>().is_ok() {
        add("job", segment("/jobs", text));
        add("trace", address("/trace", &[("position", text)]));
    }
    found
}

/// Groups whose templates or codes contain a text.
fn matching<'g>(groups: &'g [Group], text: &'g str) -> impl Iterator<Item = Found> {
    let is_wanted =
        move |group: &&Group| contains(&group.template, text) || contains(&group.error_code, text);
    let matching = groups.iter().filter(is_wanted).take(SHOWN);
    matching.map(|group| {
        (
            "group",
            groups::reason(group).to_owned(),
            segment("/groups", &group.id),
        )
    })
}

fn contains(name: &str, text: &str) -> bool {
    name.to_lowercase().contains(&text.to_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_lead_to_their_pages() {
        let links = |text: &str| ids(text).into_iter().map(|(_, _, link)| link).collect::<Vec<_>>();
        assert_eq!(
            links("orders-dlq/3/17"),
            ["/letters/orders-dlq/3/17", "/trace?position=orders-dlq%2F3%2F17"]
        );
        assert_eq!(
            links("00ff00ff00ff00ff"),
            ["/groups/00ff00ff00ff00ff", "/redrives/00ff00ff00ff00ff"]
        );
        assert_eq!(
            links("01JBX5W7Z3N8V2K4M6P8Q0R2T4"),
            [
                "/jobs/01JBX5W7Z3N8V2K4M6P8Q0R2T4",
                "/trace?position=01JBX5W7Z3N8V2K4M6P8Q0R2T4"
            ]
        );
        assert!(links("orders").is_empty());
    }

    #[test]
    fn questions_need_their_parts() {
        let is = |by: &str, has: &str| super::by(by, has).map(|by| by.is_ok());
        assert_eq!(
            (is("", "x"), is("key", ""), is("key", "a=b")),
            (None, Some(true), Some(true))
        );
        for by in ["header", "field"] {
            assert_eq!(
                (is(by, "/a=b"), is(by, "b"), is(by, "=b")),
                (Some(true), Some(false), Some(false))
            );
        }
        assert_eq!(is("value", "b"), Some(false));
    }

    #[test]
    fn names_match_anywhere() {
        let names = |text: &str| {
            pages(text)
                .into_iter()
                .map(|(_, name, _)| name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names("SCHED"), ["Schedules"]);
        assert!(names("").len() > 8 && names("zzz").is_empty());
        let group = |template: &str, error_code: &str| Group {
            template: template.to_owned(),
            error_code: error_code.to_owned(),
            ..Group::default()
        };
        let groups = [
            group("Cannot connect", "x"),
            group("", "http.422"),
            group("other", ""),
        ];
        assert_eq!(matching(&groups, "connect").count(), 1);
        assert_eq!(matching(&groups, "HTTP").next().unwrap().1, "http.422");
    }
}
