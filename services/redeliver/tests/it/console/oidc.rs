//! Sign-in at an OpenID Connect provider in Chromium. Provider and console are two sites, so that the browser treats cookies as it does with real ones.

use redeliver_testkit::eventually;
use redeliver_testkit::oidc_provider::OidcProvider;

use super::browser::{Browser, WIDE, WITHOUT_SCRIPTS};
use super::{SignIn, accepting};
use crate::support::DEADLINE;

const SIGN_IN: &str = "Sign in at 127.0.0.1";

/// From a page that leads to the sign-in, back to this page.
fn sign_in(browser: &Browser, page: &str) {
    browser.follow(SIGN_IN);
    browser.click("button");
    browser.arrives(page);
    browser.shows("Ada");
}

/// Of the console, and then of the provider, which leads back.
fn sign_out(browser: &Browser) {
    browser.click(".side form button");
    browser.shows("You are signed out of the console");
    browser.follow("Sign out of 127.0.0.1, too");
    browser.arrives("/sign-in");
}

#[test]
#[ignore = "long"]
fn viewers_sign_in_at_a_provider() {
    let provider = OidcProvider::start().unwrap();
    provider.state().scopes = Some("openid dead-letters:read");
    let settings = accepting(&provider.url(), &provider.url());
    let system = SignIn::start_with(&[("other", "jobs:read")], &settings, "", &provider.settings(""));
    let mut browser = Browser::start_at(format!("http://localhost:{}", system.address.port()));
    for view in [WIDE, WITHOUT_SCRIPTS] {
        browser.look_as(view);
        browser.open("/letters?filter=state%20%3D%20OPEN");
        browser.arrives("/sign-in");
        browser.inspect("sign-in-oidc");
        sign_in(&browser, "/letters");
        browser.shows("No dead letter");
        // Its cookies are sent from page to page, and its token has these scopes only.
        browser.follow("Your permissions");
        browser.shows("dead-letters:read");
        browser.open("/act/plan?kind=discard&all=1");
        browser.shows("changing needs the scope");
        browser.open("/");
        sign_out(&browser);
        browser.open("/letters");
        browser.arrives("/sign-in");
    }

    // A page that stays open renews its token, until the provider refuses.
    browser.look_as(WIDE);
    for (page, kept) in [("/", "#page .list"), ("/letters", "#page .news")] {
        let issued = {
            let mut state = provider.state();
            (state.lifetime, state.refreshes) = (4, true);
            state.issued
        };
        browser.open(page);
        sign_in(&browser, page);
        eventually("tokens are renewed", DEADLINE, || match provider.state().issued {
            now if now >= issued + 3 => Ok(()),
            now => Err(now),
        });
        let tells = |is_signed_out: bool| {
            format!(
                "return document.getElementById('signed-out').hidden !== {is_signed_out} \
                 && document.querySelector('{kept}') !== null"
            )
        };
        browser.holds(&tells(false));
        provider.state().refreshes = false;
        browser.holds(&tells(true));
        browser.inspect(if page == "/" {
            "now-signed-out"
        } else {
            "letters-signed-out"
        });
        provider.state().lifetime = 3_600;
        browser.follow("Sign in again");
        sign_in(&browser, page);
        browser.holds(&tells(false));
        sign_out(&browser);
    }
    browser.finish();
}
