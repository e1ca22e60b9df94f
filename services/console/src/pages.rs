//! One module per page.

mod audit;
mod due;
mod groups;
mod jobs;
mod letters;
mod now;
mod pipeline;
mod redrives;
mod schedules;
mod trace;
mod waiting;

use axum::Router;
use axum::response::Response;
use axum::routing::get;

use crate::page::{Failed, Problem};

pub(crate) fn routes() -> Router {
    Router::new()
        .route("/", get(now::page))
        .route("/pipelines/{name}", get(pipeline::page))
        .route("/due", get(due::page))
        .route("/groups", get(groups::list))
        .route("/groups/{id}", get(groups::one))
        .route("/letters", get(letters::list))
        .route("/letters/{topic}/{partition}/{offset}", get(letters::one))
        .route("/redrives", get(redrives::list))
        .route("/redrives/{id}", get(redrives::one))
        .route("/waiting", get(waiting::page))
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(jobs::one))
        .route("/schedules", get(schedules::list))
        .route("/schedules/{id}", get(schedules::one))
        .route("/trace", get(trace::page))
        .route("/audit", get(audit::page))
}

pub(crate) async fn not_found() -> Response {
    Failed::respond("", Problem::not_found("Page"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    /// The policy of the console forbids what runs or styles from inside of a page, so a template that has it does not work.
    #[test]
    fn templates_obey_the_policy() {
        let templates = concat!(env!("CARGO_MANIFEST_DIR"), "/templates");
        let mut seen = 0;
        for entry in fs::read_dir(templates).unwrap() {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            for forbidden in [
                " style=",
                "<style",
                " onclick",
                " onload",
                " onsubmit",
                "javascript:",
                "<script>",
                "|safe",
            ] {
                assert!(!text.contains(forbidden), "{forbidden} in {}", path.display());
            }
            seen += 1;
        }
        assert!(seen > 10, "{seen} templates");
    }
}
