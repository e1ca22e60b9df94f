//! What pages share: the frame, problems in place of what could not be read, and addresses.

use askama::Template;
use askama::filters::Safe;
use axum::http::StatusCode;
use axum::response::{Html, IntoResponse, Response};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use redeliver_client::convert::time;
use redeliver_client::messages::Completeness;
use redeliver_client::{ClientError, Code, Timestamp};
use redeliver_core::terminal::is_harmful;
use redeliver_core::{Clock as _, SystemClock, error_chain};

use crate::access::Need;
use crate::assets;
use crate::backend::name_of;
use crate::html;
use crate::viewer::Viewer;

/// An entry of the navigation: path, name, and key to go there after `g`.
pub(crate) type Entry = (&'static str, &'static str, char);

/// How many problems a page shows at first, so that what is below them stays near.
pub(crate) const MAX_CONCERNS: usize = 8;

/// The entries in their groups.
pub(crate) const NAVIGATION: [(&str, &[Entry]); 4] = [
    ("Overview", &[("/", "Now", 'n'), ("/due", "Due", 'u')]),
    (
        "Failures",
        &[
            ("/groups", "Groups", 'g'),
            ("/letters", "Dead letters", 'd'),
            ("/redrives", "Redrives", 'r'),
            ("/waiting", "Waiting", 'w'),
        ],
    ),
    (
        "Scheduler",
        &[("/jobs", "Jobs", 'j'), ("/schedules", "Schedules", 's')],
    ),
    (
        "Find",
        &[
            ("/find", "Find", 'f'),
            ("/trace", "Trace", 't'),
            ("/audit", "Audit", 'a'),
            ("/permissions", "Your permissions", 'p'),
        ],
    ),
];

/// What surrounds the content of a page.
pub(crate) struct Frame {
    /// The path of the page's entry in the navigation.
    section: &'static str,
    pub(crate) title: String,
    /// The command that shows the same.
    pub(crate) command: Option<String>,
    pub(crate) now: Timestamp,
    /// When what it shows was read, if that was earlier.
    pub(crate) as_of: Option<Timestamp>,
    /// Whether the page reads itself again every two seconds.
    pub(crate) live: bool,
    /// Where the script of the page asks what it does not show yet.
    pub(crate) news: Option<String>,
    pub(crate) viewer: Viewer,
}

impl Frame {
    pub(crate) fn new(section: &'static str, title: impl Into<String>) -> Self {
        Self {
            section,
            title: title.into(),
            command: None,
            now: SystemClock.now(),
            as_of: None,
            live: false,
            news: None,
            viewer: Viewer::current(),
        }
    }

    /// A command with controls has another effect if it is pasted into a terminal, so it is not shown.
    pub(crate) fn command(mut self, command: impl Into<String>) -> Self {
        self.command = Some(command.into()).filter(|command| !command.contains(is_harmful));
        self
    }

    pub(crate) fn read_at(mut self, time: Option<Timestamp>) -> Self {
        self.as_of = time;
        self
    }

    pub(crate) fn live(mut self) -> Self {
        self.live = true;
        self
    }

    pub(crate) fn navigation(&self) -> &'static [(&'static str, &'static [Entry])] {
        &NAVIGATION
    }

    pub(crate) fn current(&self, path: &str) -> bool {
        self.section == path
    }

    pub(crate) fn version(&self) -> &'static str {
        &assets::VERSION
    }
}

/// Why a part of a page is missing, in the place of this part.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) title: String,
    pub(crate) detail: String,
    /// What to do next.
    pub(crate) advice: String,
    /// Whether it can pass by itself. An open page asks again until it has, and keeps meanwhile what it has shown in this place.
    pub(crate) passes: bool,
}

const CHANGED_MEANWHILE: &str = "Changed meanwhile";
const ASKS_AGAIN: &str = "An open page asks again by itself.";
const TRY_LATER: &str = "Try again later.";

pub(crate) type Part<T> = Result<T, Problem>;

impl Problem {
    /// The address names nothing that exists.
    pub(crate) fn not_found(what: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            title: format!("{what} not found"),
            detail: "It does not exist, retention has removed it, or you may not see it.".to_owned(),
            advice: String::new(),
            passes: false,
        }
    }

    /// What is there does not allow the change.
    pub(crate) fn conflict(detail: impl Into<String>) -> Self {
        Self {
            status: StatusCode::CONFLICT,
            title: "Not possible now".to_owned(),
            detail: detail.into(),
            advice: String::new(),
            passes: false,
        }
    }

    /// A parameter of the address or a field of a form is invalid.
    pub(crate) fn invalid(detail: impl Into<String>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            title: "Invalid request".to_owned(),
            detail: detail.into(),
            advice: "Correct the address or the form.".to_owned(),
            passes: false,
        }
    }
}

impl Problem {
    /// The answer to a change, which an open page does not repeat.
    pub(crate) fn of_change(self) -> Self {
        self.once("It may have taken effect. Send the form again: the same request has no effect twice.")
    }

    /// The answer to a scan of topics, which an open page does not repeat: each costs as much as the first.
    pub(crate) fn of_scan(self) -> Self {
        self.once(TRY_LATER)
    }

    fn once(self, advice: &str) -> Self {
        match self.passes {
            true => Self {
                advice: advice.to_owned(),
                passes: false,
                ..self
            },
            false => self,
        }
    }

    /// Whether another revision was expected. Then nothing was changed.
    pub(crate) fn is_about_revision(&self) -> bool {
        self.title == CHANGED_MEANWHILE
    }

    /// A filter with a mark where it is wrong, if the problem is about a place in it.
    pub(crate) fn marked(&self, filter: &str) -> Option<Safe<String>> {
        let (_, place) = self.detail.rsplit_once(" at character ")?;
        let end = place.find(|c: char| !c.is_ascii_digit()).unwrap_or(place.len());
        let character = place[..end].parse().ok()?;
        (self.status == StatusCode::BAD_REQUEST).then(|| html::marked(filter, character))
    }

    /// Where to sign in with another token, if that helps.
    pub(crate) fn sign_in(&self) -> Option<String> {
        (self.status == StatusCode::UNAUTHORIZED)
            .then(|| Viewer::current().sign_in_again())
            .flatten()
    }
}

impl From<ClientError> for Problem {
    fn from(error: ClientError) -> Self {
        let scope = error.details().and_then(|details| details.scope.clone());
        // Not if the service is there and busy: a page that asks again would make it more so.
        let passes =
            matches!(&error, ClientError::Unreachable { .. }) || error.code() == Some(Code::Unavailable);
        let (status, title, advice) = match (&error, error.code()) {
            (ClientError::Unreachable { url, .. }, _) => (
                StatusCode::BAD_GATEWAY,
                format!("{} does not answer", name_of(url)),
                format!("Check that it runs. {ASKS_AGAIN}"),
            ),
            (_, Some(Code::InvalidArgument)) => (
                StatusCode::BAD_REQUEST,
                "Invalid request".to_owned(),
                "Correct the form, the filter or the address.".to_owned(),
            ),
            (_, Some(Code::Aborted)) => (
                StatusCode::CONFLICT,
                CHANGED_MEANWHILE.to_owned(),
                "This is how it is now. Look at it, then repeat.".to_owned(),
            ),
            (_, Some(Code::FailedPrecondition | Code::AlreadyExists)) => {
                (StatusCode::CONFLICT, "Not possible now".to_owned(), String::new())
            }
            (_, Some(Code::NotFound)) => (StatusCode::NOT_FOUND, "Not found".to_owned(), String::new()),
            (_, Some(Code::Unauthenticated)) => (
                StatusCode::UNAUTHORIZED,
                "Not signed in".to_owned(),
                "Sign in again. If the console has no sign-in, set console.sign_in.".to_owned(),
            ),
            (_, Some(Code::PermissionDenied)) => (
                StatusCode::FORBIDDEN,
                "Not permitted".to_owned(),
                scope.map_or_else(String::new, |scope| format!("Needs the scope {scope}.")),
            ),
            (error, _) if error.is_transient() => (
                StatusCode::SERVICE_UNAVAILABLE,
                "Not available now".to_owned(),
                if passes { ASKS_AGAIN } else { TRY_LATER }.to_owned(),
            ),
            _ => (
                StatusCode::BAD_GATEWAY,
                "The service answers with an error".to_owned(),
                String::new(),
            ),
        };
        Self {
            status,
            title,
            detail: error_chain::error_chain(&error),
            advice,
            passes,
        }
    }
}

/// A page as a response. The status is that of its main part.
pub(crate) fn respond(page: &impl Template, status: StatusCode) -> Response {
    match page.render() {
        Ok(html) => (status, Html(html)).into_response(),
        Err(error) => {
            tracing::error!(%error, "page not rendered");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// The status of a page whose main part is this.
pub(crate) fn status<T>(part: &Part<T>) -> StatusCode {
    part.as_ref()
        .err()
        .map_or(StatusCode::OK, |problem| problem.status)
}

/// A page that has only a problem to show.
#[derive(Template)]
#[template(path = "failed.html")]
pub(crate) struct Failed {
    pub(crate) frame: Frame,
    pub(crate) problem: Problem,
}

impl Failed {
    pub(crate) fn respond(section: &'static str, problem: Problem) -> Response {
        let (frame, status) = (Frame::new(section, problem.title.clone()), problem.status);
        respond(&Self { frame, problem }, status)
    }
}

/// What an answer lacks; `None` if it is complete.
pub(crate) fn gaps(completeness: Option<&Completeness>, now: Timestamp) -> Option<String> {
    let completeness = completeness?;
    if completeness.complete {
        return None;
    }
    let mut gaps = Vec::new();
    if completeness.missing_count > 0 {
        let first = completeness
            .missing
            .first()
            .map(|missing| match missing.partition {
                Some(partition) => format!("{}/{partition}", missing.topic),
                None => missing.topic.clone(),
            });
        let number = html::number(completeness.missing_count);
        gaps.push(match (completeness.missing_count, first) {
            (1, Some(first)) => format!("partition {first} is missing"),
            (_, Some(first)) => format!("{number} partitions are missing, such as {first}"),
            (_, None) => format!("{number} partitions are missing"),
        });
    }
    if !completeness.states_known {
        gaps.push("the states of dead letters are not known".to_owned());
    }
    if !completeness.group_states_problem.is_empty() {
        gaps.push(completeness.group_states_problem.clone());
    }
    if let Some(as_of) = time(completeness.as_of) {
        gaps.push(format!("as of {} ago", html::duration(now.since(as_of))));
    }
    Some(gaps.join("; "))
}

/// A link to a page with a form that changes something.
pub(crate) struct Button {
    pub(crate) label: String,
    pub(crate) link: String,
    /// Whether it is the next step that is recommended.
    pub(crate) is_next: bool,
    /// What the change needs.
    pub(crate) needs: Vec<Need>,
}

impl Button {
    pub(crate) fn new(label: impl Into<String>, link: String) -> Self {
        Self {
            label: label.into(),
            link,
            is_next: false,
            needs: Vec::new(),
        }
    }

    pub(crate) fn needs(self, needs: Vec<Need>) -> Self {
        Self { needs, ..self }
    }

    pub(crate) fn next(self) -> Self {
        Self {
            is_next: true,
            ..self
        }
    }
}

/// What a segment or a parameter of an address need not encode.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// An address with parameters. Empty ones are left out.
pub(crate) fn address(path: &str, parameters: &[(&str, &str)]) -> String {
    let mut address = path.to_owned();
    let set = parameters.iter().filter(|(_, value)| !value.is_empty());
    for (index, (name, value)) in set.enumerate() {
        address.push(if index == 0 { '?' } else { '&' });
        address.push_str(name);
        address.push('=');
        address.extend(utf8_percent_encode(value, PLAIN));
    }
    address
}

/// An address with one more segment.
pub(crate) fn segment(path: &str, segment: impl AsRef<str>) -> String {
    format!("{path}/{}", utf8_percent_encode(segment.as_ref(), PLAIN))
}

/// A text in a filter.
pub(crate) fn literal(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_encode_parameters() {
        let shown = address(
            "/letters",
            &[("filter", "a = \"b&c\""), ("state", ""), ("page", "x/y")],
        );
        assert_eq!(shown, "/letters?filter=a%20%3D%20%22b%26c%22&page=x%2Fy");
        assert_eq!(segment("/jobs", "../x"), "/jobs/..%2Fx");
    }

    #[test]
    fn filters_are_marked_where_wrong() {
        let problem = |detail: &str| Problem::invalid(detail).marked("a = = 1").map(|html| html.0);
        let shown = problem("filter: expected a value at character 5 (INVALID_ARGUMENT)");
        assert_eq!(shown.as_deref(), Some("a = <mark>=</mark> 1"));
        assert_eq!(problem("page_token: of another filter"), None);
    }

    #[test]
    fn texts_stay_literals_in_filters() {
        assert_eq!(literal(r#"x" OR y = "\"#), r#""x\" OR y = \"\\""#);
    }

    #[test]
    fn harmful_commands_are_not_shown() {
        let command = |text: &str| Frame::new("/", "x").command(text).command;
        assert_eq!(command("redeliver status").as_deref(), Some("redeliver status"));
        assert_eq!(command("redeliver dlq ls --filter '\u{15}curl x|sh\n'"), None);
    }
}
