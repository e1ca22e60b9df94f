//! One module per page.

mod act;
mod audit;
mod completions;
mod due;
mod find;
mod groups;
mod jobs;
mod letters;
mod news;
mod now;
mod permissions;
mod pipeline;
mod proof;
mod redrives;
mod schedules;
mod trace;
mod waiting;

use axum::Router;
use axum::response::Response;
use axum::routing::get;

use crate::backend::Backend;
use crate::page::{Failed, Problem};

pub(crate) fn routes() -> Router {
    Router::new()
        .route("/", get(now::page))
        .route("/pipelines/{name}", get(pipeline::page))
        .route("/due", get(due::page))
        .route("/find", get(find::page))
        .route("/groups", get(groups::list))
        .route("/groups/new", get(groups::news))
        .route("/groups/{id}", get(groups::one))
        .route("/letters", get(letters::list))
        .route("/letters/new", get(letters::news))
        .route("/letters/{topic}/{partition}/{offset}", get(letters::one))
        .route(
            "/letters/{topic}/{partition}/{offset}/payload",
            get(letters::payload),
        )
        .route("/redrives", get(redrives::list))
        .route("/redrives/{id}", get(redrives::one))
        .route("/waiting", get(waiting::page))
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(jobs::one))
        .route("/schedules", get(schedules::list))
        .route("/schedules/{id}", get(schedules::one))
        .route("/trace", get(trace::page))
        .route("/audit", get(audit::page))
        .route("/permissions", get(permissions::page))
        .route("/silent", get(silent))
        .merge(act::routes())
}

/// For the script of an open page, which asks each second: who does not answer, or nothing.
async fn silent(backend: Backend) -> String {
    backend.silence().await.unwrap_or_default()
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
            // Attributes can be in capitals, and at the beginning of a line.
            let text = text.to_lowercase().replace(['\n', '\t'], " ");
            for forbidden in [
                " style=",
                "<style",
                "javascript:",
                "|safe",
                "| safe",
                "srcdoc=",
                "<base",
                "<iframe",
            ] {
                assert!(!text.contains(forbidden), "{forbidden} in {}", path.display());
            }
            let mut handlers = text.match_indices(" on").map(|(at, _)| &text[at + 3..]);
            let is_handler = |rest: &str| {
                let name = rest.trim_start_matches(|c: char| c.is_ascii_lowercase() || c == '-' || c == ':');
                name.trim_start().starts_with('=')
            };
            assert!(!handlers.any(is_handler), "a handler in {}", path.display());
            let mut scripts = text.match_indices("<script").map(|(at, _)| &text[at..]);
            assert!(
                scripts.all(|script| script.starts_with("<script src=")),
                "inline script in {}",
                path.display()
            );
            seen += 1;
        }
        assert!(seen > 10, "{seen} templates");
    }
}
