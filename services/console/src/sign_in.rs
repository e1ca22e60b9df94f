//! Sign-in and sign-out, and the session of each request.
//!
//! Cookies of sessions are `SameSite=Strict`: a browser does not send them with a link of another site, such as that of an alert, nor after the
//! redirect of a provider. So a request without a session gets a page that leads to `/sign-in` by itself, which the browser then asks for on behalf
//! of the console; who is signed in is sent back from there.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use askama::Template;
use axum::extract::{DefaultBodyLimit, Form, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Redirect, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
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
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use url::{Position, Url};

use crate::assets;
use crate::backend::Backend;
use crate::config::{ConsoleConfig, SignIn};
use crate::cookie_keys::CookieKeys;
use crate::cookies::{self, SameSite};
use crate::oidc::{FLOW, Flow, Oidc, RETRY, Tokens};
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
/// How long a page waits for a renewal while its token is still valid.
const RENEWAL_WAIT: Duration = Duration::from_secs(2);

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
    /// By [`id`] of the refresh token.
    renewals: Mutex<HashMap<String, Renewal>>,
    tasks: TaskTracker,
}

/// The renewal of a session.
struct Renewal {
    began: Instant,
    outcome: Arc<OnceCell<Outcome>>,
}

#[derive(Clone)]
enum Outcome {
    Renewed(Session),
    /// The provider has refused, or the session was replaced or signed out meanwhile.
    Ended,
    /// The provider has not answered, at this time.
    Failed(Instant),
}

impl Renewal {
    fn is_kept(&self) -> bool {
        let failed = match self.outcome.get() {
            Some(Outcome::Failed(at)) => at.elapsed() >= RETRY,
            _ => false,
        };
        !failed && self.began.elapsed() < KEEP_RENEWALS
    }
}

/// Identifies a refresh token.
fn id(refresh_token: &str) -> String {
    URL_SAFE_NO_PAD.encode(digest(&SHA256, refresh_token.as_bytes()))
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

    /// Waits for renewals, whose results nobody else has. Call it after the last request.
    pub(crate) async fn finish(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    fn session(&self, headers: &HeaderMap, site: &Site, now: Timestamp) -> Option<Session> {
        // Drops the tokens of old ones.
        drop(self.renewals());
        Session::of(headers, site, &self.0.keys.value(), now)
    }

    /// Renewals that are not too old.
    fn renewals(&self) -> MutexGuard<'_, HashMap<String, Renewal>> {
        let mut renewals = self.0.renewals.lock().unwrap_or_else(PoisonError::into_inner);
        renewals.retain(|_, renewal| renewal.is_kept());
        renewals
    }

    /// The session, with a new token if it is time for one, and then what identifies its previous refresh token. `None` if its token has expired.
    async fn current(&self, session: Session, now: Timestamp) -> Option<(Session, Option<String>)> {
        if session.renews.is_some_and(|renews| renews <= now.as_millis())
            && let Some(refresh_token) = session.refresh_token.clone()
        {
            let id = id(&refresh_token);
            // It does not end with this request: the provider may have accepted the refresh token, and does so only once.
            let (gate, old) = (self.clone(), session.clone());
            let renewing = self
                .0
                .tasks
                .spawn(async move { gate.renewed(&old, &refresh_token).await });
            let outcome = if session.is_valid(now) {
                timeout(RENEWAL_WAIT, renewing).await.ok()
            } else {
                Some(renewing.await)
            };
            if let Some(Ok(Outcome::Renewed(renewed))) = outcome {
                return Some((renewed, Some(id)));
            }
        }
        session.is_valid(now).then_some((session, None))
    }

    async fn renewed(&self, old: &Session, refresh_token: &str) -> Outcome {
        let Some(oidc) = &self.0.oidc else {
            return Outcome::Ended;
        };
        let outcome = {
            let mut renewals = self.renewals();
            let renewal = renewals.entry(id(refresh_token)).or_insert_with(|| Renewal {
                began: Instant::now(),
                outcome: Arc::default(),
            });
            renewal.outcome.clone()
        };
        let renew = async || {
            let tokens = match oidc.refresh(refresh_token).await {
                Ok(Some(tokens)) => tokens,
                Ok(None) => return Outcome::Ended,
                Err(problem) => {
                    tracing::warn!(problem, "a session is not renewed now");
                    return Outcome::Failed(Instant::now());
                }
            };
            if tokens.subject.is_some() && tokens.subject != old.subject {
                tracing::warn!(
                    "a session is not renewed: the provider has returned the ID token of another user"
                );
                return Outcome::Ended;
            }
            Outcome::Renewed(Session {
                refresh_token: tokens.refresh_token.or_else(|| Some(refresh_token.to_owned())),
                subject: old.subject.clone(),
                name: tokens.name.or_else(|| old.name.clone()),
                token: tokens.token,
                expires: tokens.expires,
                renews: tokens.renews,
                ends: old.ends,
            })
        };
        outcome.get_or_init(renew).await.clone()
    }

    /// A request that renews the session with this refresh token does not bring it back from now on.
    fn end(&self, id: String) {
        let ended = Renewal {
            began: Instant::now(),
            outcome: Arc::new(OnceCell::new_with(Some(Outcome::Ended))),
        };
        self.renewals().insert(id, ended);
    }

    /// Sets the cookies of a renewed session, unless it has ended meanwhile. `previous` identifies its previous refresh token.
    fn keep_renewed(
        &self,
        session: &Session,
        previous: &str,
        request: &HeaderMap,
        site: &Site,
        response: &mut Response,
    ) -> Result<(), session::TooLarge> {
        let has_ended = {
            let renewals = self.renewals();
            let outcome = |id: &str| renewals.get(id).and_then(|renewal| renewal.outcome.get());
            let new = session.refresh_token.as_deref().map(id);
            let ids = [Some(previous), new.as_deref()].into_iter().flatten();
            ids.filter_map(outcome)
                .any(|outcome| matches!(outcome, Outcome::Ended))
        };
        if has_ended {
            return Ok(());
        }
        self.keep(session, request, site, response)
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
    let Some((session, previous)) = gate.current(session, now).await else {
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
    let renewed = previous.map(|previous| (previous, request.headers().clone()));
    let viewer = Viewer::new(session.name.as_deref(), &own_address(&request));
    let mut response = viewer.view(next.run(request)).await;
    if let Some((previous, headers)) = renewed
        && let Err(error) = gate.keep_renewed(&session, &previous, &headers, &site, &mut response)
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
        && let Some((session, previous)) = gate.current(session, now).await
    {
        let mut response = Redirect::to(&return_to).into_response();
        let kept = previous.map_or(Ok(()), |previous| {
            gate.keep_renewed(&session, &previous, &headers, &site, &mut response)
        });
        if kept.is_ok() {
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
        subject: None,
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

async fn start(
    State(gate): State<Gate>,
    site: Site,
    headers: HeaderMap,
    Query(parameters): Query<Parameters>,
) -> Response {
    let Some(oidc) = &gate.0.oidc else {
        return StatusCode::NOT_FOUND.into_response();
    };
    // The browser sends the cookies of the session here, but not with the redirect of the provider.
    let replaced = gate.session(&headers, &site, SystemClock.now());
    let replaced = replaced.and_then(|session| session.refresh_token.as_deref().map(id));
    let flow = Flow::new(local(&parameters.return_to), replaced);
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
        subject,
        name,
        expires,
        renews,
    } = tokens.map_err(|problem| (StatusCode::BAD_GATEWAY, problem))?;
    let session = Session {
        token,
        refresh_token,
        subject,
        name,
        expires,
        renews,
        ends: gate.end_of_session(),
    };
    if let Some(replaced) = &flow.replaces {
        gate.end(replaced.clone());
    }
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
    let session = gate.session(&headers, &site, SystemClock.now());
    if let Some(refresh_token) = session.and_then(|session| session.refresh_token) {
        gate.end(id(&refresh_token));
    }
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
    use redeliver_runtime::ProgramConfig;
    use redeliver_testkit::{FakeEndpoint, Reply};

    use super::*;
    use crate::Sections;

    /// A gate whose provider never answers, and a session whose token is still valid, but must be renewed.
    fn renewing() -> (FakeEndpoint, Gate, Session) {
        let provider = FakeEndpoint::start(|_| Reply::Hang);
        let yaml = format!(
            "console: {{ sign_in: oidc, oidc: {{ issuer: '{}', client_id: console }} }}",
            provider.url()
        );
        let config = ProgramConfig::<Sections>::from_yaml(&yaml).unwrap().own.console;
        let gate = Gate::new(&config, &Backend::new(&config).unwrap())
            .unwrap()
            .unwrap();
        let now = SystemClock.now();
        let session = Session {
            token: "old".to_owned(),
            refresh_token: Some("r1".to_owned()),
            subject: Some("u1".to_owned()),
            name: None,
            expires: Some(now.as_millis() + 3_600_000),
            renews: Some(now.as_millis()),
            ends: now.as_millis() + 7_200_000,
        };
        (provider, gate, session)
    }

    #[tokio::test]
    async fn valid_token_does_not_await_renewal() {
        let (_provider, gate, session) = renewing();
        let (current, previous) = gate.current(session, SystemClock.now()).await.unwrap();
        assert_eq!((current.token.as_str(), previous), ("old", None));
        // The renewal goes on.
        assert!(gate.renewals()[&id("r1")].outcome.get().is_none());
    }

    #[tokio::test]
    async fn ended_session_is_not_renewed() {
        let (_provider, gate, session) = renewing();
        let renewed = Session {
            refresh_token: Some("r2".to_owned()),
            ..session.clone()
        };
        let site = Site {
            origin: "https://console.example".to_owned(),
            is_secure: true,
        };
        for ended in [None, Some("r1"), Some("r2")] {
            gate.0.renewals.lock().unwrap().clear();
            if let Some(token) = ended {
                gate.end(id(token));
            }
            let mut response = StatusCode::OK.into_response();
            let kept = gate.keep_renewed(&renewed, &id("r1"), &HeaderMap::new(), &site, &mut response);
            kept.unwrap();
            let is_set = response.headers().contains_key(header::SET_COOKIE);
            assert_eq!(is_set, ended.is_none(), "{ended:?}");
        }
    }

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
