//! Sign-in at an OpenID Connect provider.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redeliver_testkit::Reply;
use redeliver_testkit::jwt::Issuer;
use redeliver_testkit::oidc_provider::{CODE, OidcProvider};
use serde_json::json;
use url::Url;

use crate::support::{Answer, Browser, Running, Service};

const REDIRECT: &str = "https://console.example/sign-in/callback";

fn provider() -> OidcProvider {
    OidcProvider::start().unwrap()
}

/// A person begins to sign in, and agrees. Returns the state that the provider sends back.
async fn begin(provider: &OidcProvider, browser: &mut Browser, return_to: &str) -> String {
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
    assert!(
        begun
            .location
            .starts_with(&format!("{}/authorize?tenant=1&", provider.url()))
    );
    let sent = query(&begun.location);
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
    let back = provider.agree(&begun.location);
    assert!(back.starts_with(&format!("{REDIRECT}?")), "{back}");
    query(&back).remove("state").unwrap()
}

fn query(address: &str) -> HashMap<String, String> {
    let url: Url = address.parse().unwrap();
    url.query_pairs().into_owned().collect()
}

async fn sign_in(provider: &OidcProvider, browser: &mut Browser) -> Answer {
    let state = begin(provider, browser, "/jobs").await;
    browser
        .get(&format!("/sign-in/callback?code={CODE}&state={state}"))
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn services_get_the_access_token() {
    let (service, provider) = (Service::start(|_| true), provider());
    let console = Running::start(&service, &provider.settings(""));
    let mut browser = Browser::new(&console);
    let page = browser.get("/sign-in?return=%2Fjobs").await;
    assert!(
        page.body.contains("href=\"/sign-in/start?return=%2Fjobs\""),
        "{page:?}"
    );

    let signed_in = sign_in(&provider, &mut browser).await;
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
    let (service, provider) = (Service::start(|_| true), provider());
    let console = Running::start(&service, &provider.settings(", token: id_token"));
    let mut browser = Browser::new(&console);
    sign_in(&provider, &mut browser).await;
    assert_eq!(browser.get("/jobs").await.status, 403);
    let tokens = service.tokens();
    assert_eq!(tokens.last().unwrap().split('.').count(), 3, "{tokens:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_answers_are_refused() {
    let (service, provider) = (Service::start(|_| true), provider());
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
    refused(&mut browser, &format!("code={CODE}&state=x"), "has ended").await;
    let state = begin(&provider, &mut browser, "/").await;
    // Another browser has another sign-in.
    let mut other = Browser::new(&console);
    begin(&provider, &mut other, "/").await;
    refused(&mut other, &format!("code={CODE}&state={state}"), "has ended").await;
    let state = begin(&provider, &mut browser, "/").await;
    refused(
        &mut browser,
        &format!("code=guessed&state={state}"),
        "invalid_grant",
    )
    .await;
    // The sign-in is over.
    refused(&mut browser, &format!("code={CODE}&state={state}"), "has ended").await;
    let state = begin(&provider, &mut browser, "/").await;
    let denied = format!("state={state}&error=access_denied&error_description=%3Cb%3Eno");
    refused(&mut browser, &denied, "access_denied &#60;b&#62;no").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_id_tokens_are_refused() {
    let (service, provider) = (Service::start(|_| true), provider());
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
        let answer = sign_in(&provider, &mut browser).await;
        assert!(
            answer.status == 502 && answer.body.contains(problem),
            "{claim}: {answer:?}"
        );
        assert_eq!(browser.get("/jobs").await.status, 401, "{claim}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn expiring_tokens_are_renewed_once() {
    let (service, provider) = (Service::start(|_| true), provider());
    let console = Running::start(&service, &provider.settings(""));
    let mut browser = Browser::new(&console);
    // The first token has expired already, and the next ones have not.
    provider.state().lifetime = 0;
    sign_in(&provider, &mut browser).await;
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
    sign_in(&provider, &mut browser).await;
    provider.state().lifetime = 3_600;
    provider.state().wrong = BTreeMap::from([("sub", "u2".to_owned())]);
    assert_eq!(browser.get("/jobs").await.status, 401);
    provider.state().wrong.clear();

    // A provider that refuses ends the session with its token.
    provider.state().lifetime = 0;
    sign_in(&provider, &mut browser).await;
    provider.state().refreshes = false;
    assert_eq!(browser.get("/jobs").await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_provider_is_named() {
    let (service, provider) = (Service::start(|_| true), provider());
    let url = provider.url();
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
    let provider = provider();
    let console = Running::start(&service, &provider.settings(""));
    let mut browser = Browser::new(&console);
    sign_in(&provider, &mut browser).await;
    let form = "/act/job?verb=schedule";
    assert_eq!(browser.get(form).await.status, 200);
    // The next token has expired already, and the page renews it.
    provider.state().lifetime = 0;
    sign_in(&provider, &mut browser).await;
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
    let provider = provider();
    let use_key = |id| provider.state().key = Issuer::new(id).unwrap();
    let publish = |ids: &[&'static str]| *published.lock().unwrap() = ids.to_vec();
    let console = Running::start(&service, &provider.settings(", token: id_token"));
    let [mut before, mut renewing, mut after] = [(); 3].map(|()| Browser::new(&console));
    use_key("old");
    sign_in(&provider, &mut before).await;
    // This session is renewed with its next page.
    provider.state().lifetime = 0;
    sign_in(&provider, &mut renewing).await;
    provider.state().lifetime = 3_600;

    publish(&["old", "new"]);
    use_key("new");
    assert_eq!(renewing.get("/jobs").await.status, 403);
    sign_in(&provider, &mut after).await;
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
    sign_in(&provider, &mut before).await;
    assert_eq!(before.get("/jobs").await.status, 403);
}
