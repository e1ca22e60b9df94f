//! Groups of dead letters that fail for the same reason.

mod common;

use askama::Template;
use axum::http::StatusCode;
use axum::response::Response;
use redeliver_client::DeadLetterClient;
use redeliver_client::messages::{
    DeadLetterView, Group, GroupState, ListDeadLettersRequest, ListGroupsRequest,
};
use serde::Deserialize;

use super::completions::Completions;
use super::news::{self, MANY_GROUPS, Wanted as News};
use crate::access::Actions;
use crate::backend::{Backend, Service};
use crate::command::Command;
use crate::html;
use crate::page::{Failed, Frame, Part, Problem, address, gaps, literal, respond, segment, status};
use crate::parameters::{Path, Query};
use common::Common;

const SECTION: &str = "/groups";
const PAGE_SIZE: i32 = 50;
/// How many dead letters of a group are compared, and with how many calls: a page can be short, because its payloads are large.
const COMPARED: usize = 200;
const COMPARED_PAGES: usize = 10;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    filter: String,
    /// The name of a tab.
    show: String,
    sort: String,
    page: String,
}

/// The tabs: name in the address, label, and the states of groups, of which none means all.
const TABS: [(&str, &str, &[GroupState]); 4] = [
    ("", "Needs attention", &[GroupState::Open, GroupState::Regressed]),
    ("resolved", "Resolved", &[GroupState::Resolved]),
    ("muted", "Muted", &[GroupState::Muted]),
    ("all", "All", &[]),
];

/// The orders: name in the address, label, `order_by` of the API, `--sort` of the command.
const ORDERS: [(&str, &str, &str, &str); 3] = [
    ("", "last seen", "", ""),
    ("new", "first seen", "first_dead_at desc", "first-seen"),
    ("count", "count", "count desc", "count"),
];

#[derive(Template)]
#[template(path = "groups.html")]
struct Groups {
    frame: Frame,
    parameters: Parameters,
    tabs: Vec<Tab>,
    orders: Vec<Tab>,
    groups: Part<Vec<Row>>,
    completions: Completions,
    gaps: Option<String>,
    next: Option<String>,
}

/// A link that may be the current one.
pub(crate) struct Tab {
    pub(crate) label: &'static str,
    pub(crate) link: String,
    pub(crate) is_current: bool,
}

/// A group in a list.
pub(crate) struct Row {
    pub(crate) group: Group,
    pub(crate) link: String,
}

impl Row {
    pub(crate) fn of(group: Group) -> Self {
        Self {
            link: segment(SECTION, &group.id),
            group,
        }
    }

    pub(crate) fn state(&self) -> &'static str {
        state_class(self.group.state())
    }

    pub(crate) fn reason(&self) -> &str {
        reason(&self.group)
    }

    pub(crate) fn trend(&self) -> askama::filters::Safe<String> {
        html::trend(&self.group.trend)
    }
}

/// What failed, in one line.
pub(super) fn reason(group: &Group) -> &str {
    let Group {
        template,
        error_code,
        error_class,
        ..
    } = group;
    [template, error_code, error_class]
        .into_iter()
        .find(|text| !text.is_empty())
        .map_or("no error in the headers", |text| text)
}

fn state_class(state: GroupState) -> &'static str {
    match state {
        GroupState::Unspecified => "unknown",
        GroupState::Open => "open",
        GroupState::Resolved => "resolved",
        GroupState::Muted => "muted",
        GroupState::Regressed => "regressed",
    }
}

/// Asks for the groups that need attention.
pub(super) fn open(filter: &str, most: i32) -> ListGroupsRequest {
    ListGroupsRequest {
        filter: filter.to_owned(),
        page_size: most,
        states: [GroupState::Open, GroupState::Regressed].map(i32::from).to_vec(),
        ..ListGroupsRequest::default()
    }
}

pub(crate) async fn list(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let Some((_, _, states)) = TABS.iter().find(|(name, ..)| *name == parameters.show) else {
        return Failed::respond(
            SECTION,
            Problem::invalid("`show` must be resolved, muted or all."),
        );
    };
    let Some((_, _, order, sort)) = ORDERS.iter().find(|(name, ..)| *name == parameters.sort) else {
        return Failed::respond(SECTION, Problem::invalid("`sort` must be new or count."));
    };
    let request = ListGroupsRequest {
        filter: parameters.filter.clone(),
        page_size: PAGE_SIZE,
        page_token: parameters.page.clone(),
        order_by: (*order).to_owned(),
        states: states.iter().map(|state| i32::from(*state)).collect(),
        ..ListGroupsRequest::default()
    };
    let answer = backend.dead_letters().groups(request).await;
    let states = states.iter().map(|state| state_class(*state));
    let command = states
        .fold(Command::new("dlq groups"), |command, state| {
            command.option("--state", state)
        })
        .option("--sort", sort)
        .option("--filter", &parameters.filter)
        .option("--limit", PAGE_SIZE);
    let frame = Frame::new(SECTION, "Groups").command(command);
    let link = |show: &str, sort: &str, page: &str| {
        address(
            SECTION,
            &[
                ("show", show),
                ("filter", &parameters.filter),
                ("sort", sort),
                ("page", page),
            ],
        )
    };
    let tabs = TABS.map(|(name, label, _)| Tab {
        label,
        link: link(name, &parameters.sort, ""),
        is_current: name == parameters.show,
    });
    let orders = ORDERS.map(|(name, label, ..)| Tab {
        label,
        link: link(&parameters.show, name, ""),
        is_current: name == parameters.sort,
    });
    let mut page = Groups {
        frame,
        tabs: tabs.into(),
        orders: orders.into(),
        completions: match &answer {
            Ok(answer) if !answer.groups.is_empty() => {
                Completions::of_groups(&parameters.filter, &answer.groups)
            }
            _ => Completions::without_rows(&parameters.filter, &backend).await,
        },
        gaps: None,
        next: None,
        groups: Ok(Vec::new()),
        parameters,
    };
    page.groups = match answer {
        Ok(answer) => {
            page.gaps = gaps(answer.completeness.as_ref(), page.frame.now);
            if page.parameters.page.is_empty() {
                let Parameters {
                    show, filter, sort, ..
                } = &page.parameters;
                let newest = match sort.as_str() {
                    "" => {
                        let times = answer.groups.iter();
                        times.filter_map(|group| html::when(group.last_dead_at)).max()
                    }
                    // In other orders, groups with later ones can be on other pages.
                    _ => Some(page.frame.now),
                };
                page.frame.news = news::link(
                    "/groups/new",
                    &[("show", show), ("filter", filter)],
                    newest,
                    answer.completeness.as_ref(),
                );
            }
            let token = answer.next_page_token;
            page.next = (!token.is_empty()).then(|| {
                let Parameters {
                    show, filter, sort, ..
                } = &page.parameters;
                address(
                    SECTION,
                    &[
                        ("show", show),
                        ("filter", filter),
                        ("sort", sort),
                        ("page", &token),
                    ],
                )
            });
            Ok(answer.groups.into_iter().map(Row::of).collect())
        }
        Err(error) => Err(error.into()),
    };
    let status = status(&page.groups);
    respond(&page, status)
}

/// For the script of an open list: how many of its groups have new dead letters, or nothing.
pub(crate) async fn news(backend: Backend, Query(wanted): Query<News>) -> Result<String, StatusCode> {
    let tab = TABS.iter().find(|(name, ..)| *name == wanted.show);
    let (_, _, states) = tab.ok_or(StatusCode::BAD_REQUEST)?;
    let request = ListGroupsRequest {
        filter: wanted.filter(),
        page_size: MANY_GROUPS,
        states: states.iter().map(|state| i32::from(*state)).collect(),
        ..ListGroupsRequest::default()
    };
    let answer = backend.dead_letters().groups(request).await;
    let answer = answer.map_err(|error| Problem::from(error).status)?;
    Ok(news::of_groups(
        answer.groups.len(),
        !answer.next_page_token.is_empty(),
    ))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Wanted {
    /// Set to compare dead letters.
    common: String,
}

#[derive(Template)]
#[template(path = "group.html")]
struct One {
    frame: Frame,
    row: Row,
    gaps: Option<String>,
    samples: Part<Vec<super::letters::Row>>,
    /// `None` before it was asked for: it reads payloads.
    common: Option<Part<Common>>,
    filter: String,
    buttons: Actions,
}

impl One {
    /// The dead letters of the group, or those of them that match another filter, too.
    fn letters(&self, and: &str) -> String {
        let filter = match and {
            "" => self.filter.clone(),
            and => format!("{} AND {and}", self.filter),
        };
        address("/letters", &[("filter", &filter)])
    }
}

pub(crate) async fn one(backend: Backend, Path(id): Path<String>, Query(wanted): Query<Wanted>) -> Response {
    let client = backend.dead_letters();
    let group = match client.group(&id).await {
        Ok(Some(group)) => group,
        Ok(None) => return Failed::respond(SECTION, Problem::not_found("Group")),
        Err(error) => return Failed::respond(SECTION, error.into()),
    };
    let filter = format!("group = {}", literal(&id));
    let request = ListDeadLettersRequest {
        filter: filter.clone(),
        page_size: 10,
        ..ListDeadLettersRequest::default()
    };
    let (samples, access) = tokio::join!(client.list(request), backend.access(Service::Inspector));
    let common = match wanted.common.as_str() {
        "" => None,
        _ => Some(compare(&client, &filter).await),
    };
    let frame =
        Frame::new(SECTION, format!("Group {id}")).command(Command::new("dlq group show").argument(&id));
    let page = One {
        gaps: gaps(group.completeness.as_ref(), frame.now),
        samples: samples
            .map(|answer| {
                answer
                    .dead_letters
                    .into_iter()
                    .map(super::letters::Row::of)
                    .collect()
            })
            .map_err(Problem::from),
        common,
        filter,
        buttons: access.actions(super::act::group(&group)),
        row: Row::of(group),
        frame,
    };
    respond(&page, StatusCode::OK)
}

/// Compares the newest dead letters, a page at a time: all of their payloads would take too much memory.
async fn compare(client: &DeadLetterClient, filter: &str) -> Part<Common> {
    let mut common = Common::default();
    let mut page_token = String::new();
    for _ in 0..COMPARED_PAGES {
        let request = ListDeadLettersRequest {
            filter: filter.to_owned(),
            page_size: i32::try_from(COMPARED - common.letters).unwrap_or(0),
            page_token,
            view: DeadLetterView::Full.into(),
            ..ListDeadLettersRequest::default()
        };
        let answer = client.list(request).await?;
        answer.dead_letters.iter().for_each(|letter| common.add(letter));
        page_token = answer.next_page_token;
        if page_token.is_empty() || common.letters >= COMPARED {
            break;
        }
    }
    Ok(common)
}
