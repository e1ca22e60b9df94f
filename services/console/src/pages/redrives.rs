//! Redrives: jobs that send dead letters back, discard or restore them.

use askama::Template;
use axum::response::Response;
use redeliver_client::messages::{
    GetRedriveRequest, ListRedriveItemsRequest, ListRedrivesRequest, Redrive, RedriveItem, RedriveKind,
    RedriveState,
};
use redeliver_core::redrive::{BATCHES, has_batches};
use serde::Deserialize;

use crate::access::Actions;
use crate::backend::{Backend, Service};
use crate::command::Command;
use crate::html;
use crate::page::{Failed, Frame, Part, Problem, address, respond, segment, status};
use crate::parameters::{Path, Query};

const SECTION: &str = "/redrives";
const PAGE_SIZE: i32 = 50;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    page: String,
}

#[derive(Template)]
#[template(path = "redrives.html")]
struct Redrives {
    frame: Frame,
    redrives: Part<Vec<Row>>,
    next: Option<String>,
}

pub(crate) struct Row {
    pub(crate) redrive: Redrive,
    pub(crate) link: String,
}

impl Row {
    pub(crate) fn of(redrive: Redrive) -> Self {
        Self {
            link: segment(SECTION, &redrive.id),
            redrive,
        }
    }

    pub(crate) fn kind(&self) -> String {
        self.redrive.kind().name().unwrap_or_default()
    }

    pub(crate) fn state(&self) -> String {
        self.redrive.state().name().unwrap_or_default()
    }

    pub(crate) fn class(&self) -> &'static str {
        match self.redrive.state() {
            _ if !self.redrive.auto_pause_reason.is_empty() => "regressed",
            RedriveState::Running => "running",
            RedriveState::Paused | RedriveState::Planned => "paused",
            RedriveState::Succeeded => "resolved",
            RedriveState::Failed | RedriveState::PartiallySucceeded => "regressed",
            _ => "muted",
        }
    }

    /// The batch that is written or observed, of how many; `None` if there are no batches, or not any more.
    pub(crate) fn batch(&self) -> Option<(usize, usize)> {
        let Redrive {
            total,
            done,
            max_returned_share,
            all_at_once,
            ..
        } = self.redrive;
        let is_batched =
            self.redrive.kind() == RedriveKind::Redrive && has_batches(max_returned_share, all_at_once);
        let is_open = matches!(self.redrive.state(), RedriveState::Running | RedriveState::Paused);
        let before = |of: u32| BATCHES.into_iter().filter(|end| *end < of).count();
        (is_batched && is_open && before(total) > 0).then(|| (before(done) + 1, before(total) + 1))
    }

    /// The share of those that were redriven and are dead letters again, in percent.
    pub(crate) fn returned(&self) -> u64 {
        let Redrive { done, returned, .. } = self.redrive;
        (u64::from(returned) * 100).checked_div(done.into()).unwrap_or(0)
    }

    /// The share of dead letters that are no longer pending, in percent.
    pub(crate) fn progress(&self) -> u32 {
        let Redrive { total, pending, .. } = self.redrive;
        let ended = u64::from(total.saturating_sub(pending)) * 100;
        u32::try_from(ended.checked_div(u64::from(total)).unwrap_or(0)).unwrap_or(100)
    }
}

pub(crate) async fn list(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let request = ListRedrivesRequest {
        page_size: PAGE_SIZE,
        page_token: parameters.page,
    };
    let frame = Frame::new(SECTION, "Redrives")
        .command(Command::new("dlq redrives ls"))
        .live();
    let page = match backend.redrives().list(request).await {
        Ok(answer) => Redrives {
            frame,
            next: (!answer.next_page_token.is_empty())
                .then(|| address(SECTION, &[("page", &answer.next_page_token)])),
            redrives: Ok(answer.redrives.into_iter().map(Row::of).collect()),
        },
        Err(error) => Redrives {
            frame,
            next: None,
            redrives: Err(error.into()),
        },
    };
    let status = status(&page.redrives);
    respond(&page, status)
}

#[derive(Template)]
#[template(path = "redrive.html")]
struct One {
    frame: Frame,
    row: Row,
    items: Part<Vec<Item>>,
    next: Option<String>,
    buttons: Actions,
}

struct Item {
    id: String,
    link: String,
    outcome: String,
    class: &'static str,
    written: Option<String>,
}

impl Item {
    fn of(item: RedriveItem) -> Self {
        use redeliver_client::messages::RedriveOutcome::{Done, Failed, Unspecified};
        Self {
            link: super::trace::position(&item.id)
                .as_ref()
                .map_or_else(String::new, |position| super::letters::link(Some(position))),
            outcome: item.outcome().name().unwrap_or_default(),
            class: match item.outcome() {
                Done => "resolved",
                Unspecified => "muted",
                Failed => "regressed",
                _ => "paused",
            },
            written: item.written.as_ref().map(html::position),
            id: item.id,
        }
    }
}

pub(crate) async fn one(
    backend: Backend,
    Path(id): Path<String>,
    Query(parameters): Query<Parameters>,
) -> Response {
    let client = backend.redrives();
    let redrive = match client.get(GetRedriveRequest { id: id.clone() }).await {
        Ok(redrive) => redrive,
        Err(error) => return Failed::respond(SECTION, error.into()),
    };
    let request = ListRedriveItemsRequest {
        id: id.clone(),
        page_size: PAGE_SIZE,
        page_token: parameters.page,
    };
    let (items, access) = tokio::join!(client.items(request), backend.access(Service::Inspector));
    let frame =
        Frame::new(SECTION, format!("Redrive {id}")).command(Command::new("dlq redrives show").argument(&id));
    let is_over = matches!(
        redrive.state(),
        RedriveState::Succeeded
            | RedriveState::PartiallySucceeded
            | RedriveState::Failed
            | RedriveState::Cancelled
    );
    let page = One {
        frame: if is_over { frame } else { frame.live() },
        buttons: access.actions(super::act::redrive(&redrive)),
        row: Row::of(redrive),
        next: items
            .as_ref()
            .ok()
            .filter(|items| !items.next_page_token.is_empty())
            .map(|items| address(&segment(SECTION, &id), &[("page", &items.next_page_token)])),
        items: items
            .map(|items| items.items.into_iter().map(Item::of).collect())
            .map_err(Problem::from),
    };
    respond(&page, axum::http::StatusCode::OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_follow_redriven_records() {
        let batch = |total, done, state: RedriveState| {
            let redrive = Redrive {
                kind: RedriveKind::Redrive.into(),
                state: state.into(),
                total,
                done,
                ..Redrive::default()
            };
            Row::of(redrive).batch()
        };
        for (total, done, expected) in [
            (10, 3, None),
            (11, 0, Some((1, 2))),
            (11, 10, Some((1, 2))),
            (11, 11, Some((2, 2))),
            (500, 110, Some((2, 3))),
            (500, 111, Some((3, 3))),
        ] {
            assert_eq!(
                batch(total, done, RedriveState::Running),
                expected,
                "{done} of {total}"
            );
        }
        assert_eq!(batch(500, 500, RedriveState::Succeeded), None);
    }
}
