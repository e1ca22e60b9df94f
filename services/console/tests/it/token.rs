//! Sign-in with a token.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redeliver_testkit::scratch::Scratch;

use crate::support::{Answer, Browser, Running, Service};

const OWN: &str = "https://console.example";
const SETTINGS: &str = "  sign_in: token\n";

async fn sign_in(browser: &mut Browser, token: &str, return_to: &str) -> Answer {
    let fields = [("token", token), ("return", return_to)];
    browser.post("/sign-in", OWN, &fields).await
}

#[tokio::test(flavor = "multi_thread")]
async fn services_get_the_viewers_token() {
    let service = Service::start(|token| token == "good");
    let console = Running::start(&service, SETTINGS);
    let mut browser = Browser::new(&console);

    let page = "/groups?filter=a%20%3D%20%22b%22";
    let refused = browser.get(page).await;
    let sign_in_page = "/sign-in?return=%2Fgroups%3Ffilter%3Da%2520%253D%2520%2522b%2522";
    assert_eq!(refused.status, 401);
    assert!(
        refused
            .body
            .contains(&format!("content=\"0; url={sign_in_page}\"")),
        "{refused:?}"
    );
    assert!(service.tokens().is_empty());
    let form = browser.get(sign_in_page).await;
    assert!(
        form.status == 200 && form.body.contains("name=\"token\""),
        "{form:?}"
    );

    for (token, problem) in [("bad", "The token is refused"), (" ", "Enter a token")] {
        let answer = sign_in(&mut browser, token, page).await;
        assert_eq!((answer.status, answer.set.len()), (401, 0), "{answer:?}");
        assert!(answer.body.contains(problem), "{answer:?}");
    }
    let signed_in = sign_in(&mut browser, " good\n", page).await;
    assert_eq!((signed_in.status, signed_in.location.as_str()), (303, page));
    let [cookie] = &signed_in.set[..] else {
        panic!("{signed_in:?}")
    };
    assert!(cookie.starts_with("__Host-redeliver-session-0=1."), "{cookie}");
    assert!(
        cookie.contains("; Path=/; HttpOnly; SameSite=Strict; Secure; Max-Age=43")
            && !cookie.contains("good"),
        "{cookie}"
    );

    let shown = browser.get(page).await;
    // The service permits nothing.
    assert!(
        shown.status == 403 && shown.body.contains("action=\"/sign-out\""),
        "{shown:?}"
    );
    assert_eq!(service.tokens().last().map(String::as_str), Some("good"));
    // Who is signed in is sent back at once.
    let back = browser.get(sign_in_page).await;
    assert_eq!((back.status, back.location.as_str()), (303, page));
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_cookies_sign_out() {
    let service = Service::start(|_| true);
    let console = Running::start(&service, SETTINGS);
    let mut browser = Browser::new(&console);
    sign_in(&mut browser, &"t".repeat(16 << 10), "/").await;
    assert_eq!(browser.cookies.len(), 6);
    assert_eq!(browser.get("/jobs").await.status, 403);
    let name = "__Host-redeliver-session-3";
    let mut changed = browser.clone();
    let value = changed.cookies.get_mut(name).unwrap();
    let other = if &value[5..6] == "A" { "B" } else { "A" };
    value.replace_range(5..6, other);
    assert_eq!(changed.get("/jobs").await.status, 401);
    let mut incomplete = browser.clone();
    incomplete.cookies.remove(name);
    assert_eq!(incomplete.get("/jobs").await.status, 401);

    // A new sign-in replaces all of it.
    sign_in(&mut browser, "small", "/").await;
    assert_eq!(browser.cookies.len(), 1);
    let too_large = sign_in(&mut browser, &"t".repeat(24 << 10), "/").await;
    assert!(too_large.body.contains("the token is too large"), "{too_large:?}");
    assert_eq!(browser.get("/jobs").await.status, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn sign_out_needs_own_page() {
    let service = Service::start(|_| true);
    let console = Running::start(&service, SETTINGS);
    let mut browser = Browser::new(&console);
    sign_in(&mut browser, "good", "/").await;
    for foreign in ["https://evil.example", "http://console.example", "null"] {
        assert_eq!(
            browser.post("/sign-out", foreign, &[]).await.status,
            403,
            "{foreign}"
        );
        let planted = browser.post("/sign-in", foreign, &[("token", "evil")]).await;
        assert_eq!((planted.status, planted.set.len()), (403, 0), "{foreign}");
    }
    assert_eq!(browser.get("/sign-out").await.status, 405);
    assert_eq!(browser.get("/jobs").await.status, 403);
    let signed_out = browser.post("/sign-out", OWN, &[]).await;
    assert!(signed_out.body.contains("You are signed out"), "{signed_out:?}");
    assert!(browser.cookies.is_empty());
    assert_eq!(browser.get("/jobs").await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn sign_in_returns_to_own_pages_only() {
    let service = Service::start(|_| true);
    let console = Running::start(&service, SETTINGS);
    let mut browser = Browser::new(&console);
    for foreign in [
        "https://evil.example/",
        "//evil.example",
        "/\\evil.example",
        "/sign-out",
    ] {
        let signed_in = sign_in(&mut browser, "good", foreign).await;
        assert_eq!(signed_in.location, "/", "{foreign}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_rotating_keys() {
    let service = Service::start(|token| token == "good");
    let scratch = Scratch::new("console-keys").unwrap();
    let replica = |name: &str, keys: &[&str]| {
        let path = scratch.path().join(name);
        let lines: Vec<String> = keys.iter().map(|key| key.repeat(32)).collect();
        std::fs::write(&path, lines.join("\n")).unwrap();
        let settings = format!("{SETTINGS}  cookie_keys_file: '{}'\n", path.display());
        Running::start(&service, &settings)
    };
    let (old, both, new) = (
        replica("old", &["a"]),
        replica("both", &["b", "a"]),
        replica("new", &["b"]),
    );
    let mut browser = Browser::new(&old);
    sign_in(&mut browser, "good", "/").await;
    assert_eq!(browser.at(&both).get("/jobs").await.status, 403);
    assert_eq!(browser.at(&new).get("/jobs").await.status, 401);
    let mut browser = browser.at(&both);
    sign_in(&mut browser, "good", "/").await;
    assert_eq!(browser.at(&new).get("/jobs").await.status, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_tokens_lead_to_sign_in() {
    let revoked = Arc::<AtomicBool>::default();
    let is_revoked = revoked.clone();
    let service = Service::start(move |_| !is_revoked.load(Ordering::SeqCst));
    let console = Running::start(&service, SETTINGS);
    let mut browser = Browser::new(&console);
    sign_in(&mut browser, "good", "/").await;
    revoked.store(true, Ordering::SeqCst);
    let answer = browser.get("/jobs").await;
    let again = "href=\"/sign-in?again=1&#38;return=%2Fjobs\"";
    assert!(answer.status == 401 && answer.body.contains(again), "{answer:?}");
    let form = browser.get("/sign-in?again=1&return=%2Fjobs").await;
    assert!(
        form.status == 200 && form.body.contains("name=\"token\""),
        "{form:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn viewers_get_no_forms() {
    let service = Service::with_scopes(|token| match token {
        "operator" => vec!["*"],
        "sms" => vec!["jobs:write:sms", "control:write:sms"],
        _ => vec!["jobs:read", "control:read", "dead-letters:read"],
    });
    let console = Running::start(&service, SETTINGS);
    let mut browser = Browser::new(&console);
    let pages = [
        ("/jobs", "jobs:write", true),
        ("/jobs?app=sms", "control:write:sms", true),
        ("/act/job?verb=schedule", "jobs:write", true),
        (
            "/act/control?name=app%2Fsms&verb=pause",
            "control:write:sms",
            true,
        ),
        (
            "/act/control?name=app%2Fmail&verb=rate",
            "control:write:mail",
            false,
        ),
        (
            "/act/control?name=tier%2Fdocs%2F5s&verb=release",
            "control:write:tier/docs/5s",
            false,
        ),
        ("/act/plan?kind=discard&all=1", "dead-letters:operate", false),
        ("/act/redrive?id=x&verb=start", "dead-letters:operate", false),
        ("/act/group?id=x&verb=resolve", "dead-letters:operate", false),
    ];
    for (token, is_shown) in [
        ("operator", [true; 9]),
        ("sms", pages.map(|(.., of_sms)| of_sms)),
        // The same browser, after another sign-in.
        ("viewer", [false; 9]),
    ] {
        sign_in(&mut browser, token, "/").await;
        for ((page, scope, _), is_shown) in pages.iter().zip(is_shown) {
            let answer = browser.get(page).await;
            let is_page = !page.starts_with("/act/");
            let shows = |text: &str| answer.body.contains(text);
            assert_eq!(
                shows("class=\"act\"") || shows("href=\"/act/"),
                is_shown,
                "{token} {page}: {answer:?}"
            );
            let status = if is_shown || is_page { 200 } else { 403 };
            assert_eq!(answer.status, status, "{token} {page}: {answer:?}");
            if !is_shown {
                assert!(
                    shows("You can view; changing needs the scope"),
                    "{token} {page}: {answer:?}"
                );
                assert!(shows(scope), "{token} {page}: {answer:?}");
            }
        }
    }
}
