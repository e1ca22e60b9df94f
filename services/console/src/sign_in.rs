//! Sign-in and sign-out, and the session of each request.
//!
//! Cookies of sessions are `SameSite=Strict`: a browser does not send them with a link of another site, such as that of an alert, nor after the
//! redirect of a provider. So a request without a session gets a page that leads to `/sign-in` by itself, which the browser then asks for on behalf
//! of the console; who is signed in is sent back from there.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use askama::Template;
use axum::extract::{DefaultBodyLimit, Form, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use redeliver_client::Code;
use redeliver_client::messages::OverviewSelection;
use redeliver_core::failure::bounded_text;
use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_runtime::config::{ConfigError, Secret};
use redeliver_runtime::token_endpoint::expiry_of_jwt;
use redeliver_runtime::watched_files::WatchedFiles;
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use tokio::sync::OnceCell;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use url::{Position, Url};

use crate::assets;
use crate::backend::Backend;
use crate::config::{ConsoleConfig, SignIn};
use crate::cookie_keys::CookieKeys;
use crate::cookies::{self, SameSite};
use crate::oidc::{FLOW, Flow, Oidc, Tokens};
use crate::page::{Problem, address, respond};
use crate::session::{self, Session};
use crate::site::Site;
use crate::viewer::Viewer;

/// The maximum size of a form, in bytes.
const MAX_FORM: usize = 64 << 10;
/// The maximum length of an address to return to. A longer one does not fit into the cookie of a sign-in.
const MAX_RETURN: usize = 2_000;
/// The cookie of a sign-in at a provider.
const FLOW_COOKIE: &str = "sign-in";
/// How long the result of a renewal is kept. Requests that a browser sends at the same time have the same refresh token, which many providers accept
/// once.
const KEEP_RENEWALS: Duration = Duration::from_secs(60);

/// How viewers sign in. Clones share everything.
#[derive(Clone)]
pub(crate) struct Gate(Arc<Inner>);

struct Inner {
    backend: Backend,
    keys: Arc<WatchedFiles<CookieKeys>>,
    /// `None`: with a token.
    oidc: Option<Oidc>,
    /// How long a session lasts at most.
    session: Duration,
    renewals: Mutex<HashMap<Vec<u8>, Renewal>>,
    tasks: TaskTracker,
}

/// The renewal of a session. `None`: the provider has refused.
#[derive(Clone)]
struct Renewal {
    began: Instant,
    renewed: Arc<OnceCell<Option<Session>>>,
}

impl Gate {
    /// `None` if viewers do not sign in.
    ///
    /// # Errors
    /// What is wrong with the configuration.
    pub(crate) fn new(config: &ConsoleConfig, backend: &Backend) -> Result<Option<Self>, ConfigError> {
        if config.sign_in == SignIn::None {
            return Ok(None);
        }
        let oidc = config.oidc.as_ref().map(Oidc::new).transpose()?;
        let keys = CookieKeys::load(config.cookie_keys_file.as_deref())?;
        Ok(Some(Self(Arc::new(Inner {
            backend: backend.clone(),
            keys: Arc::new(keys),
            oidc,
            session: config.session.duration(),
            renewals: Mutex::default(),
            tasks: TaskTracker::new(),
        }))))
    }

    /// The keys of cookies, to follow their file.
    pub(crate) fn keys(&self) -> Arc<WatchedFiles<CookieKeys>> {
        self.0.keys.clone()
    }

    /// The pages of sign-in and sign-out.
    pub(crate) fn routes(&self) -> Router {
        Router::new()
            .route("/sign-in", get(show).post(with_token))
            .route("/sign-in/start", get(start))
            .route("/sign-in/callback", get(callback))
            .route("/sign-out", post(sign_out))
            .layer(DefaultBodyLimit::max(MAX_FORM))
            .with_state(self.clone())
    }

    fn session(&self, headers: &HeaderMap, site: &Site, now: Timestamp) -> Option<Session> {
        Session::of(headers, site, &self.0.keys.value(), now)
    }

    /// The session, with a new token if it is time for one, and whether it is new. `None` if its token has expired.
    async fn current(&self, session: Session, now: Timestamp) -> Option<(Session, bool)> {
        if session.renews.is_some_and(|renews| renews <= now.as_millis())
            && let Some(refresh_token) = session.refresh_token.clone()
        {
            // It does not end with this request: the provider may have accepted the refresh token, and does so only once.
            let (gate, old) = (self.clone(), session.clone());
            let renewing = self
                .0
                .tasks
                .spawn(async move { gate.renewed(&old, &refresh_token).await });
            match renewing.await {
                Ok(Ok(Some(renewed))) => return Some((renewed, true)),
                Ok(Ok(None)) | Err(_) => {}
                Ok(Err(problem)) => tracing::warn!(problem, "a session is not renewed now"),
            }
        }
        session.is_valid(now).then_some((session, false))
    }

    async fn renewed(&self, old: &Session, refresh_token: &str) -> Result<Option<Session>, String> {
        let Some(oidc) = &self.0.oidc else { return Ok(None) };
        let hash = digest(&SHA256, refresh_token.as_bytes()).as_ref().to_vec();
        let renewal = {
            let mut renewals = self.0.renewals.lock().unwrap_or_else(PoisonError::into_inner);
            renewals.retain(|_, renewal| renewal.began.elapsed() < KEEP_RENEWALS);
            let renewal = renewals.entry(hash).or_insert_with(|| Renewal {
                began: Instant::now(),
                renewed: Arc::default(),
            });
            renewal.renewed.clone()
        };
        let renew = async || {
            let tokens = oidc.refresh(refresh_token).await?;
            Ok(tokens.map(|tokens| Session {
                refresh_token: tokens.refresh_token.or_else(|| Some(refresh_token.to_owned())),
                name: tokens.name.or_else(|| old.name.clone()),
                token: tokens.token,
                expires: tokens.expires,
                renews: tokens.renews,
                ends: old.ends,
            }))
        };
        renewal.get_or_try_init(renew).await.cloned()
    }

    /// Sets the cookies of a session in a response.
    fn keep(
        &self,
        session: &Session,
        request: &HeaderMap,
        site: &Site,
        response: &mut Response,
    ) -> Result<(), session::TooLarge> {
        let now = SystemClock.now();
        let cookies = session.cookies(request, site, &self.0.keys.value(), now)?;
        add(response, cookies);
        Ok(())
    }

    fn end_of_session(&self) -> i64 {
        SystemClock.now().after(self.0.session).as_millis()
    }

    /// The page on which a viewer signs in, to come back to this address.
    fn page(&self, return_to: &str) -> Page {
        match &self.0.oidc {
            None => Page {
                form: Some(return_to.to_owned()),
                ..Page::new("Sign in")
            },
            Some(oidc) => Page {
                link: Some((
                    format!("Sign in at {}", oidc.host()),
                    address("/sign-in/start", &[("return", return_to)]),
                )),
                ..Page::new("Sign in")
            },
        }
    }

    /// The same page after a failure.
    fn failed(&self, return_to: &str, status: StatusCode, problem: String) -> Response {
        tracing::info!(problem, "sign-in failed");
        let page = Page {
            problem: Some(problem),
            ..self.page(return_to)
        };
        respond(&page, status)
    }
}

/// Lets requests with a session pass, with the backend of their viewer.
pub(crate) async fn require_session(
    State(gate): State<Gate>,
    Extension(site): Extension<Site>,
    mut request: Request,
    next: Next,
) -> Response {
    let now = SystemClock.now();
    let Some(session) = gate.session(request.headers(), &site, now) else {
        return signed_out(&request);
    };
    let Some((session, is_new)) = gate.current(session, now).await else {
        return signed_out(&request);
    };
    let backend = match gate.0.backend.with_token(Secret::new(session.token.as_str())) {
        Ok(backend) => backend,
        Err(error) => {
            let problem = Problem::from(error);
            return gate.failed("/", StatusCode::UNAUTHORIZED, problem.detail);
        }
    };
    request.extensions_mut().insert(backend);
    let headers = is_new.then(|| request.headers().clone());
    let viewer = Viewer::new(session.name.as_deref(), &own_address(&request));
    let mut response = viewer.view(next.run(request)).await;
    if let Some(headers) = headers
        && let Err(error) = gate.keep(&session, &headers, &site, &mut response)
    {
        tracing::warn!(%error, "a renewed session is not kept");
    }
    response
}

/// The address of a page, to come back to; that of the first page for a change.
fn own_address(request: &Request) -> String {
    let own = request.uri().path_and_query().map(ToString::to_string);
    own.filter(|own| *request.method() == Method::GET && own.len() <= MAX_RETURN)
        .unwrap_or_else(|| "/".to_owned())
}

/// Leads to the sign-in. Scripts of an open page see the status.
fn signed_out(request: &Request) -> Response {
    let sign_in = address("/sign-in", &[("return", &own_address(request))]);
    let page = Page {
        // What was sent is lost, so a person must see it.
        next: (*request.method() == Method::GET).then(|| sign_in.clone()),
        note: "You are signed out. Sign in again to continue.",
        link: Some(("Sign in".to_owned(), sign_in)),
        ..Page::new("Signed out")
    };
    respond(&page, StatusCode::UNAUTHORIZED)
}

/// A page outside of the frame, for viewers who are not signed in.
#[derive(Template)]
#[template(path = "sign_in.html")]
struct Page {
    title: &'static str,
    note: &'static str,
    problem: Option<String>,
    /// Where the browser goes by itself.
    next: Option<String>,
    /// Asks for a token, to come back to this address.
    form: Option<String>,
    /// The text and the address of a link.
    link: Option<(String, String)>,
    /// Another link, which is less important.
    other: Option<(String, String)>,
}

impl Page {
    fn new(title: &'static str) -> Self {
        Self {
            title,
            note: "",
            problem: None,
            next: None,
            form: None,
            link: None,
            other: None,
        }
    }

    fn version(&self) -> &'static str {
        &assets::VERSION
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Parameters {
    /// The page to come back to.
    #[serde(rename = "return")]
    return_to: String,
    /// Not empty: asks also who is signed in.
    again: String,
}

/// An address of the console: what another site has put into a link must not lead there.
fn local(address: &str) -> String {
    let base = Url::parse("http://console.invalid/").expect("a valid address");
    let parsed = Url::options().base_url(Some(&base)).parse(address).ok();
    parsed
        .filter(|url| url.origin() == base.origin() && address.len() <= MAX_RETURN)
        .map(|url| url[Position::BeforePath..Position::AfterQuery].to_owned())
        .filter(|path| !path.starts_with("//") && !path.starts_with("/sign-"))
        .unwrap_or_else(|| "/".to_owned())
}

async fn show(
    State(gate): State<Gate>,
    site: Site,
    headers: HeaderMap,
    Query(parameters): Query<Parameters>,
) -> Response {
    let return_to = local(&parameters.return_to);
    let now = SystemClock.now();
    if parameters.again.is_empty()
        && let Some(session) = gate.session(&headers, &site, now)
        && let Some((session, is_new)) = gate.current(session, now).await
    {
        let mut response = Redirect::to(&return_to).into_response();
        if !is_new || gate.keep(&session, &headers, &site, &mut response).is_ok() {
            return response;
        }
    }
    respond(&gate.page(&return_to), StatusCode::OK)
}

#[derive(Deserialize)]
struct TokenForm {
    token: String,
    #[serde(default, rename = "return")]
    return_to: String,
}

async fn with_token(
    State(gate): State<Gate>,
    site: Site,
    headers: HeaderMap,
    Form(form): Form<TokenForm>,
) -> Response {
    let return_to = local(&form.return_to);
    let failed = |problem| gate.failed(&return_to, StatusCode::UNAUTHORIZED, problem);
    if gate.0.oidc.is_some() {
        return StatusCode::NOT_FOUND.into_response();
    }
    let token = form.token.trim();
    if token.is_empty() {
        return failed("Enter a token.".to_owned());
    }
    let now = SystemClock.now();
    let session = Session {
        token: token.to_owned(),
        refresh_token: None,
        name: None,
        expires: expiry_of_jwt(token),
        renews: None,
        ends: gate.end_of_session(),
    };
    if !session.is_valid(now) {
        return failed("The token has expired.".to_owned());
    }
    if let Err(problem) = accepted(&gate.0.backend, token).await {
        return failed(problem);
    }
    let mut response = Redirect::to(&return_to).into_response();
    match gate.keep(&session, &headers, &site, &mut response) {
        Ok(()) => response,
        Err(error) => failed(format!("This does not work: {error}.")),
    }
}

/// Whether a service accepts a token. The other one may have tokens of its own.
async fn accepted(backend: &Backend, token: &str) -> Result<(), String> {
    let backend = backend
        .with_token(Secret::new(token))
        .map_err(|error| Problem::from(error).detail)?;
    let selection = OverviewSelection {
        limit: 1,
        ..OverviewSelection::default()
    };
    let (overview, jobs) = (backend.overview(), backend.jobs());
    let (inspector, scheduler) = tokio::join!(overview.overview(selection), jobs.stats(None, 1));
    let mut refused = None;
    for error in [inspector.err(), scheduler.err()] {
        match error {
            None => return Ok(()),
            Some(error) if error.code() == Some(Code::PermissionDenied) => return Ok(()),
            // A refusal says more than a service that does not answer.
            Some(error) if error.code() == Some(Code::Unauthenticated) => {
                refused = Some(format!("The token is refused: {}", Problem::from(error).detail));
            }
            Some(error) => {
                refused.get_or_insert(format!(
                    "The token cannot be checked: {}",
                    Problem::from(error).detail
                ));
            }
        }
    }
    refused.map_or(Ok(()), Err)
}

fn redirect_uri(site: &Site) -> String {
    format!("{}/sign-in/callback", site.origin)
}

async fn start(State(gate): State<Gate>, site: Site, Query(parameters): Query<Parameters>) -> Response {
    let Some(oidc) = &gate.0.oidc else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let flow = Flow::new(local(&parameters.return_to));
    match oidc.authorization(&flow, &redirect_uri(&site)).await {
        Ok(url) => {
            let json = serde_json::to_vec(&flow).expect("a sign-in has a form in JSON");
            let sealed = gate.0.keys.value().seal(FLOW_COOKIE, &json);
            // The provider leads back from another site.
            let cookie = cookies::set(&site, FLOW_COOKIE, &sealed, SameSite::Lax, Some(FLOW.as_secs()));
            let mut response = Redirect::to(&url).into_response();
            add(&mut response, [cookie]);
            response
        }
        Err(problem) => gate.failed(&flow.return_to, StatusCode::BAD_GATEWAY, problem),
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Callback {
    code: String,
    state: String,
    error: String,
    error_description: String,
}

async fn callback(
    State(gate): State<Gate>,
    site: Site,
    headers: HeaderMap,
    Query(answer): Query<Callback>,
) -> Response {
    let Some(oidc) = &gate.0.oidc else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let sealed = cookies::get(&headers, &site, FLOW_COOKIE);
    let opened = sealed.and_then(|sealed| gate.0.keys.value().open(FLOW_COOKIE, sealed));
    let flow: Option<Flow> = opened.and_then(|flow| serde_json::from_slice(&flow).ok());
    let Some(flow) = flow.filter(|flow| flow.state == answer.state && !flow.has_ended()) else {
        let problem = "This sign-in has ended, or another one has begun since.".to_owned();
        return gate.failed("/", StatusCode::BAD_REQUEST, problem);
    };
    let mut response = match signed_in(&gate, oidc, &flow, &answer, &headers, &site).await {
        Ok(response) => response,
        Err((status, problem)) => gate.failed(&flow.return_to, status, problem),
    };
    add(
        &mut response,
        [cookies::set(&site, FLOW_COOKIE, "", SameSite::Lax, Some(0))],
    );
    response
}

async fn signed_in(
    gate: &Gate,
    oidc: &Oidc,
    flow: &Flow,
    answer: &Callback,
    headers: &HeaderMap,
    site: &Site,
) -> Result<Response, (StatusCode, String)> {
    if !answer.error.is_empty() {
        let (error, description) = (&answer.error, &answer.error_description);
        let problem = bounded_text(&format!("{} refuses: {error} {description}", oidc.host()), 500);
        return Err((StatusCode::FORBIDDEN, problem));
    }
    let tokens = oidc.exchange(flow, &answer.code, &redirect_uri(site)).await;
    let Tokens {
        token,
        refresh_token,
        name,
        expires,
        renews,
    } = tokens.map_err(|problem| (StatusCode::BAD_GATEWAY, problem))?;
    let session = Session {
        token,
        refresh_token,
        name,
        expires,
        renews,
        ends: gate.end_of_session(),
    };
    // A redirect would be that of the provider still, with which the browser does not send the new cookies.
    let page = Page {
        next: Some(flow.return_to.clone()),
        link: Some(("Continue".to_owned(), flow.return_to.clone())),
        ..Page::new("Signed in")
    };
    let mut response = respond(&page, StatusCode::OK);
    gate.keep(&session, headers, site, &mut response)
        .map_err(|error| (StatusCode::BAD_GATEWAY, error.to_string()))?;
    Ok(response)
}

async fn sign_out(State(gate): State<Gate>, site: Site, headers: HeaderMap) -> Response {
    let mut page = Page {
        note: "You are signed out of the console.",
        link: Some(("Sign in".to_owned(), "/sign-in".to_owned())),
        ..Page::new("Signed out")
    };
    if let Some(oidc) = &gate.0.oidc
        && let Some(url) = oidc.end_session(&site.origin).await
    {
        page.other = Some((format!("Sign out of {}, too", oidc.host()), url));
    }
    let mut response = respond(&page, StatusCode::OK);
    add(&mut response, session::end(&headers, &site));
    response
}

fn add(response: &mut Response, cookies: impl IntoIterator<Item = HeaderValue>) {
    for cookie in cookies {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn return_addresses_stay_here() {
        for (address, expected) in [
            (
                "/groups?filter=a%20%3D%20%22b%22&x=%2F%2Fe",
                "/groups?filter=a%20%3D%20%22b%22&x=%2F%2Fe",
            ),
            ("", "/"),
            ("groups", "/groups"),
            ("/sign-in?return=/sign-in", "/"),
            ("/sign-out", "/"),
        ] {
            assert_eq!(local(address), expected, "{address}");
        }
        for foreign in [
            "https://evil.example/",
            "//evil.example",
            "/\\evil.example",
            "\\\\evil.example",
            "/\t/evil.example",
            "/.//evil.example",
            "/x/..//evil.example",
            "javascript:alert(1)",
            "http:evil.example",
            "http://console.invalid@evil.example/",
            &format!("/{}", "x".repeat(MAX_RETURN)),
        ] {
            let address = local(foreign);
            assert!(
                address.starts_with('/') && !address.starts_with("//") && !address.contains('\\'),
                "{foreign}: {address}"
            );
        }
        assert_eq!(local("https://evil.example/groups"), "/");
    }
}
