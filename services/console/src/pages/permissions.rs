//! What the viewer may do.

use askama::Template;
use axum::http::StatusCode;
use axum::response::Response;
use redeliver_client::messages::GetAccessResponse;

use crate::backend::{Backend, Service};
use crate::page::{Frame, Part, respond};

const SECTION: &str = "/permissions";

#[derive(Template)]
#[template(path = "permissions.html")]
struct Page {
    frame: Frame,
    /// The services with their names.
    services: [(&'static str, Part<GetAccessResponse>); 2],
}

pub(crate) async fn page(backend: Backend) -> Response {
    let (inspector, scheduler) = tokio::join!(
        backend.permissions(Service::Inspector),
        backend.permissions(Service::Scheduler)
    );
    let page = Page {
        frame: Frame::new(SECTION, "Your permissions"),
        services: [
            ("Inspector", inspector.map_err(Into::into)),
            ("Scheduler", scheduler.map_err(Into::into)),
        ],
    };
    respond(&page, StatusCode::OK)
}
