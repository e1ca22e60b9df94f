//! Who has changed or seen what.

use askama::Template;
use axum::response::Response;
use redeliver_client::Timestamp;
use redeliver_client::convert::to_timestamp;
use redeliver_client::messages::{AuditEntry, ListAuditEntriesRequest};
use serde::Deserialize;

use crate::backend::Backend;
use crate::command::Command;
use crate::page::{Failed, Frame, Part, address, respond, status};
use crate::parameters::{Query, since};

const SECTION: &str = "/audit";
const PAGE_SIZE: i32 = 100;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    by: String,
    action: String,
    target: String,
    /// How far back, such as `7d`.
    since: String,
    page: String,
}

#[derive(Template)]
#[template(path = "audit.html")]
struct Page {
    frame: Frame,
    parameters: Parameters,
    entries: Part<Vec<AuditEntry>>,
    is_incomplete: bool,
    next: Option<String>,
}

pub(crate) async fn page(backend: Backend, Query(parameters): Query<Parameters>) -> Response {
    let parameters = Parameters {
        by: parameters.by.trim().to_owned(),
        action: parameters.action.trim().to_owned(),
        target: parameters.target.trim().to_owned(),
        ..parameters
    };
    let frame = Frame::new(SECTION, "Audit");
    let from = match since(&parameters.since, frame.now) {
        Ok(from) => from,
        Err(problem) => return Failed::respond(SECTION, problem),
    };
    let request = ListAuditEntriesRequest {
        from: from.map(to_timestamp),
        until: None,
        by: parameters.by.clone(),
        action: parameters.action.clone(),
        target: parameters.target.clone(),
        page_size: PAGE_SIZE,
        page_token: parameters.page.clone(),
    };
    let earliest = from.and_then(Timestamp::to_rfc3339);
    let command = Command::new("dlq audit")
        .option("--by", &parameters.by)
        .option("--action", &parameters.action)
        .option("--target", &parameters.target)
        .option("--from", earliest.unwrap_or_default())
        .option("--limit", PAGE_SIZE);
    let mut page = Page {
        frame: frame.command(command),
        entries: Ok(Vec::new()),
        is_incomplete: false,
        next: None,
        parameters,
    };
    page.entries = match backend.audit().list(request).await {
        Ok(answer) => {
            page.is_incomplete = answer.incomplete;
            let Parameters {
                by,
                action,
                target,
                since,
                ..
            } = &page.parameters;
            let token = answer.next_page_token;
            page.next = (!token.is_empty()).then(|| {
                let parameters = [
                    ("by", by.as_str()),
                    ("action", action),
                    ("target", target),
                    ("since", since),
                    ("page", &token),
                ];
                address(SECTION, &parameters)
            });
            Ok(answer
                .entries
                .into_iter()
                .filter_map(|listed| listed.entry)
                .collect())
        }
        Err(error) => Err(error.into()),
    };
    let status = status(&page.entries);
    respond(&page, status)
}
