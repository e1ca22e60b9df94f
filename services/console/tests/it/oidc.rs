//! Sign-in at an OpenID Connect provider.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use redeliver_core::{Clock as _, SystemClock};
use redeliver_testkit::jwt::Issuer;
use redeliver_testkit::{FakeEndpoint, Reply, Request};
use ring::digest::{SHA256, digest};
use serde_json::json;
use url::{Url, form_urlencoded};

use crate::support::{Answer, Browser, Running, Service};

const REDIRECT: &str = "https://console.example/sign-in/callback";

/// A provider with one user.
struct Provider {
    endpoint: FakeEndpoint,
    state: Arc<Mutex<State>>,
}

struct State {
    url: String,
    key: Issuer,
    /// The nonce and the challenge of the sign-in that has begun.
    nonce: String,
    challenge: String,
    /// Claims of the next ID tokens that differ from valid ones.
    wrong: BTreeMap<&'static str, String>,
    /// Seconds.
    lifetime: i64,
    issued: u32,
    /// Whether refresh tokens are accepted, each once.
    refreshes: bool,
}

impl Provider {
    fn start() -> Self {
        let endpoint = FakeEndpoint::start(|_| Reply::status(404));
        let state = Arc::new(Mutex::new(State {
            url: endpoint.url(),
            key: Issuer::new("key").unwrap(),
            nonce: String::new(),
            challenge: String::new(),
            wrong: BTreeMap::new(),
            lifetime: 3_600,
            issued: 0,
            refreshes: true,
        }));
        let answering = state.clone();
        endpoint.behave(move |request| lock(&answering).reply(request));
        Self { endpoint, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn settings(&self, more: &str) -> String {
        format!(
            "  sign_in: oidc\n  oidc: {{ issuer: '{}', client_id: console, client_secret: hunter2, \
             scope: openid offline_access, parameters: {{ audience: redeliver }}{more} }}\n",
            self.endpoint.url()
        )
    }

    /// A person begins to sign in. Returns the state that the provider gets.
    async fn begin(&self, browser: &mut Browser, return_to: &str) -> String {
        let begun = browser.get(&format!("/sign-in/start?return={return_to}")).await;
        assert_eq!(begun.status, 303, "{begun:?}");
        let [cookie] = &begun.set[..] else {
            panic!("{begun:?}")
        };
        let flags = "; Path=/; HttpOnly; SameSite=Lax; Secure; Max-Age=600";
        assert!(
            cookie.starts_with("__Host-redeliver-sign-in=") && cookie.ends_with(flags),
            "{cookie}"
        );
        let url: Url = begun.location.parse().unwrap();
        assert!(
            begun
                .location
                .starts_with(&format!("{}/authorize?tenant=1&", self.endpoint.url()))
        );
        let sent: HashMap<String, String> = url.query_pairs().into_owned().collect();
        for (name, value) in [
            ("response_type", "code"),
            ("client_id", "console"),
            ("redirect_uri", REDIRECT),
            ("scope", "openid offline_access"),
            ("code_challenge_method", "S256"),
            ("audience", "redeliver"),
        ] {
            assert_eq!(sent[name], value);
        }
        let mut state = self.state();
        sent["nonce"].clone_into(&mut state.nonce);
        sent["code_challenge"].clone_into(&mut state.challenge);
        sent["state"].clone()
    }

    async fn sign_in(&self, browser: &mut Browser) -> Answer {
        let state = self.begin(browser, "/jobs").await;
        browser
            .get(&format!("/sign-in/callback?code=c1&state={state}"))
            .await
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn reply(&mut self, request: &Request) -> Reply {
        let url = &self.url;
        match request.path.as_str() {
            "/.well-known/openid-configuration" => Reply::ok(
                json!({
                    "issuer": url,
                    "authorization_endpoint": format!("{url}/authorize?tenant=1"),
                    "token_endpoint": format!("{url}/token"),
                    "end_session_endpoint": format!("{url}/logout"),
                })
                .to_string(),
            ),
            "/token" => self.grant(request),
            _ => Reply::status(404),
        }
    }

    fn grant(&mut self, request: &Request) -> Reply {
        let sent: HashMap<_, _> = form_urlencoded::parse(&request.body).into_owned().collect();
        let expected = format!("Basic {}", STANDARD.encode("console:hunter2"));
        let is_client = request
            .headers
            .get("authorization")
            .is_some_and(|sent| *sent == *expected);
        let is_granted = match sent["grant_type"].as_str() {
            "authorization_code" => {
                let challenge = digest(&SHA256, sent["code_verifier"].as_bytes());
                sent["code"] == "c1"
                    && sent["redirect_uri"] == REDIRECT
                    && URL_SAFE_NO_PAD.encode(challenge) == self.challenge
            }
            "refresh_token" => self.refreshes && sent["refresh_token"] == format!("refresh-{}", self.issued),
            _ => false,
        };
        if !is_client || !is_granted {
            let refusal = json!({ "error": "invalid_grant" }).to_string();
            return Reply::Status(400, Vec::new(), refusal.into());
        }
        self.issued += 1;
        let expires = SystemClock.now().as_millis() / 1_000 + self.lifetime;
        let mut claims = json!({
            "iss": self.url, "aud": "console", "sub": "u1", "exp": expires, "nonce": self.nonce,
            "preferred_username": "Ada <ada@example>",
        });
        for (name, value) in &self.wrong {
            claims[*name] = value
                .parse()
                .map_or_else(|_| json!(value), |number: i64| json!(number));
        }
        let granted = json!({
            "access_token": format!("access-{}", self.issued), "token_type": "Bearer", "expires_in": self.lifetime,
            "id_token": self.key.sign(&claims).unwrap(), "refresh_token": format!("refresh-{}", self.issued),
        });
        Reply::ok(granted.to_string())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn services_get_the_access_token() {
    let (service, provider) = (Service::start(|_| true), Provider::start());
    let console = Running::start(&service, &provider.settings(""));
    let mut browser = Browser::new(&console);
    let page = browser.get("/sign-in?return=%2Fjobs").await;
    assert!(
        page.body.contains("href=\"/sign-in/start?return=%2Fjobs\""),
        "{page:?}"
    );

    let signed_in = provider.sign_in(&mut browser).await;
    // Not a redirect, with which a browser would not send the new cookies.
    assert_eq!(signed_in.status, 200, "{signed_in:?}");
    assert!(
        signed_in.body.contains("content=\"0; url=/jobs\""),
        "{signed_in:?}"
    );
    let names: Vec<&str> = browser.cookies.keys().map(String::as_str).collect();
    assert_eq!(names, ["__Host-redeliver-session-0"]);
    let shown = browser.get("/jobs").await;
    assert!(shown.body.contains("Ada &#60;ada@example&#62;"), "{shown:?}");
    assert_eq!(service.tokens().last().map(String::as_str), Some("access-1"));

    let signed_out = browser.post("/sign-out", "https://console.example", &[]).await;
    assert!(
        signed_out.body.contains("/logout?client_id=console"),
        "{signed_out:?}"
    );
    assert_eq!(browser.get("/jobs").await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn services_get_the_id_token() {
    let (service, provider) = (Service::start(|_| true), Provider::start());
    let console = Running::start(&service, &provider.settings(", token: id_token"));
    let mut browser = Browser::new(&console);
    provider.sign_in(&mut browser).await;
    assert_eq!(browser.get("/jobs").await.status, 403);
    let tokens = service.tokens();
    assert_eq!(tokens.last().unwrap().split('.').count(), 3, "{tokens:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_answers_are_refused() {
    let (service, provider) = (Service::start(|_| true), Provider::start());
    let console = Running::start(&service, &provider.settings(""));
    let refused = async |browser: &mut Browser, query: &str, problem: &str| {
        let answer = browser.get(&format!("/sign-in/callback?{query}")).await;
        assert!(
            answer.status >= 400 && answer.body.contains(problem),
            "{query}: {answer:?}"
        );
        assert!(
            !answer.set.iter().any(|cookie| cookie.contains("session")),
            "{answer:?}"
        );
    };
    let mut browser = Browser::new(&console);
    refused(&mut browser, "code=c1&state=x", "has ended").await;
    let state = provider.begin(&mut browser, "/").await;
    // Another browser has another sign-in.
    let mut other = Browser::new(&console);
    provider.begin(&mut other, "/").await;
    refused(&mut other, &format!("code=c1&state={state}"), "has ended").await;
    let state = provider.begin(&mut browser, "/").await;
    refused(
        &mut browser,
        &format!("code=guessed&state={state}"),
        "invalid_grant",
    )
    .await;
    // The sign-in is over.
    refused(&mut browser, &format!("code=c1&state={state}"), "has ended").await;
    let state = provider.begin(&mut browser, "/").await;
    let denied = format!("state={state}&error=access_denied&error_description=%3Cb%3Eno");
    refused(&mut browser, &denied, "access_denied &#60;b&#62;no").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_id_tokens_are_refused() {
    let (service, provider) = (Service::start(|_| true), Provider::start());
    let console = Running::start(&service, &provider.settings(""));
    for (claim, value, problem) in [
        ("iss", "https://evil.example", "`iss` is another issuer"),
        ("aud", "other", "`aud` or `azp` is another client"),
        ("azp", "other", "`aud` or `azp` is another client"),
        ("exp", "1000000000", "it has expired"),
        ("nonce", "other", "`nonce` is that of another sign-in"),
    ] {
        provider.state().wrong = BTreeMap::from([(claim, value.to_owned())]);
        let mut browser = Browser::new(&console);
        let answer = provider.sign_in(&mut browser).await;
        assert!(
            answer.status == 502 && answer.body.contains(problem),
            "{claim}: {answer:?}"
        );
        assert_eq!(browser.get("/jobs").await.status, 401, "{claim}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn expiring_tokens_are_renewed_once() {
    let (service, provider) = (Service::start(|_| true), Provider::start());
    let console = Running::start(&service, &provider.settings(""));
    let mut browser = Browser::new(&console);
    // The first token has expired already, and the next ones have not.
    provider.state().lifetime = 0;
    provider.sign_in(&mut browser).await;
    provider.state().lifetime = 3_600;
    let mut tabs: Vec<Browser> = (0..4).map(|_| browser.clone()).collect();
    let [a, b, c, d] = &mut tabs[..] else {
        unreachable!()
    };
    let answers = tokio::join!(a.get("/jobs"), b.get("/jobs"), c.get("/jobs"), d.get("/jobs"));
    for answer in [answers.0, answers.1, answers.2, answers.3] {
        assert_eq!((answer.status, answer.set.len()), (403, 1), "{answer:?}");
    }
    assert_eq!(provider.state().issued, 2);
    assert!(
        service.tokens().iter().all(|token| token == "access-2"),
        "{:?}",
        service.tokens()
    );

    // The token of another user is refused.
    provider.state().lifetime = 0;
    provider.sign_in(&mut browser).await;
    provider.state().lifetime = 3_600;
    provider.state().wrong = BTreeMap::from([("sub", "u2".to_owned())]);
    assert_eq!(browser.get("/jobs").await.status, 401);
    provider.state().wrong.clear();

    // A provider that refuses ends the session with its token.
    provider.state().lifetime = 0;
    provider.sign_in(&mut browser).await;
    provider.state().refreshes = false;
    assert_eq!(browser.get("/jobs").await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_provider_is_named() {
    let (service, provider) = (Service::start(|_| true), Provider::start());
    let url = provider.endpoint.url();
    for (issuer, problem) in [
        ("https://other.example", "names another issuer"),
        ("", "answered 404"),
    ] {
        let issuer = issuer.to_owned();
        provider.endpoint.behave(move |_| {
            let metadata = json!({ "issuer": issuer, "authorization_endpoint": "x", "token_endpoint": "x" });
            if issuer.is_empty() {
                Reply::status(404)
            } else {
                Reply::ok(metadata.to_string())
            }
        });
        let console = Running::start(&service, &provider.settings(""));
        let answer = Browser::new(&console).get("/sign-in/start").await;
        assert!(
            answer.status == 502 && answer.body.contains(problem),
            "{answer:?}"
        );
        assert!(answer.body.contains(&url), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn renewed_tokens_have_own_scopes() {
    let service = Service::with_scopes(|token| match token {
        "access-1" => vec!["*"],
        _ => vec!["jobs:read"],
    });
    let provider = Provider::start();
    let console = Running::start(&service, &provider.settings(""));
    let mut browser = Browser::new(&console);
    provider.sign_in(&mut browser).await;
    let form = "/act/job?verb=schedule";
    assert_eq!(browser.get(form).await.status, 200);
    // The next token has expired already, and the page renews it.
    provider.state().lifetime = 0;
    provider.sign_in(&mut browser).await;
    provider.state().lifetime = 3_600;
    let answer = browser.get(form).await;
    assert!(
        answer.status == 403 && answer.body.contains("changing needs the scope jobs:write"),
        "{answer:?}"
    );
    assert_eq!(service.tokens().last().map(String::as_str), Some("access-3"));
}

/// The service accepts tokens of published keys. That it learns of new ones is tested with a real one.
#[tokio::test(flavor = "multi_thread")]
async fn rotated_keys_end_old_sessions() {
    let published = Arc::new(Mutex::new(vec!["old"]));
    let known = published.clone();
    let service = Service::start(move |token| {
        let header = URL_SAFE_NO_PAD.decode(token.split('.').next().unwrap_or_default());
        let header = String::from_utf8(header.unwrap_or_default()).unwrap();
        let known = known.lock().unwrap_or_else(PoisonError::into_inner);
        known
            .iter()
            .any(|id| header.contains(&format!("\"kid\":\"{id}\"")))
    });
    let provider = Provider::start();
    let use_key = |id| provider.state().key = Issuer::new(id).unwrap();
    let publish = |ids: &[&'static str]| *published.lock().unwrap() = ids.to_vec();
    let console = Running::start(&service, &provider.settings(", token: id_token"));
    let [mut before, mut renewing, mut after] = [(); 3].map(|()| Browser::new(&console));
    use_key("old");
    provider.sign_in(&mut before).await;
    // This session is renewed with its next page.
    provider.state().lifetime = 0;
    provider.sign_in(&mut renewing).await;
    provider.state().lifetime = 3_600;

    publish(&["old", "new"]);
    use_key("new");
    assert_eq!(renewing.get("/jobs").await.status, 403);
    provider.sign_in(&mut after).await;
    for browser in [&mut before, &mut renewing, &mut after] {
        // The service accepts the token, and permits nothing.
        assert_eq!(browser.get("/jobs").await.status, 403);
    }
    publish(&["new"]);
    for browser in [&mut renewing, &mut after] {
        assert_eq!(browser.get("/jobs").await.status, 403);
    }
    let refused = before.get("/jobs").await;
    assert!(
        refused.status == 401 && refused.body.contains("Sign in again"),
        "{refused:?}"
    );
    provider.sign_in(&mut before).await;
    assert_eq!(before.get("/jobs").await.status, 403);
}
