//! The console in Chromium: every page in both colour schemes, wide and narrow, in two time zones; and what people do, with and without scripts.

use redeliver_core::Headers;
use redeliver_core::headers::{ERROR_CLASS, ERROR_CODE, ERROR_MESSAGE};
use redeliver_testkit::{binary, run};

use super::browser::{Browser, NARROW, VIEWS, WIDE, WITHOUT_SCRIPTS, crawl};
use super::house::{APP, HOSTILE, House};
use super::{Form, SignIn, WITH_TOKENS, between, demo, link, unescaped};
use crate::support::Draft;

const OPEN: &str = "state%20%3D%20OPEN%20AND%20";
const BY_PEOPLE: &str = "filter=error_code%20%3D%20%22hostile%22";
const REJECTED: &str = "/groups?filter=error_code%20%3D%20%22http.422%22";

/// Dead letters that try to break a page: other directions, controls, markup, long words, large values, and many errors.
fn write_hostile_letters(house: &House) {
    let long = "VeryLongNameWithoutAnyBreak".repeat(40);
    let frame = "\tat com.example.orders.fulfilment.internal.HandlerInvocation.proceed(HandlerInvocation.java:1207)\n";
    let stack = [
        "java.lang.IllegalStateException: order \u{5d4}\u{5d6}\u{5de}\u{5e0}\u{5d4} is closed\n",
        &frame.repeat(60),
    ]
    .concat();
    let huge = format!("{{\"text\":\"{}\"}}", "x".repeat(10 << 20));
    let hostile = format!("{HOSTILE}\u{1b}[31m\0");
    let wall = (0..25).map(|number| {
        (
            format!("wall.{number}"),
            format!("{number:x}{stack}"),
            "{}".to_owned(),
        )
    });
    let letters = [
        (
            "hostile".to_owned(),
            hostile.clone(),
            "<svg onload=alert(1)>\0\u{202e}".to_owned(),
        ),
        ("long".to_owned(), long.clone(), huge),
    ];
    let drafts = letters.into_iter().chain(wall).map(|(code, message, value)| {
        let mut headers = Headers::new();
        headers.push_text(ERROR_CLASS, "permanent");
        headers.push_text(ERROR_CODE, &code);
        headers.push_text(ERROR_MESSAGE, &message);
        headers.push_text(&long[..200], &long);
        headers.push_text("\u{202e}tenant", "<b>acme</b>\u{7}");
        headers.push("binary", Some(&[0xff; 100]));
        Draft {
            headers,
            ..Draft::new(hostile.clone(), value)
        }
    });
    let topic = house.pipe.pipeline.dead_letter_topic();
    house.pipe.produce_to(&topic, drafts.collect());
}

/// The first open dead letter that matches, once there is one.
#[track_caller]
fn open_letter(house: &House, filter: &str) -> String {
    let topic = house.pipe.pipeline.dead_letter_topic();
    let page = format!("/letters?filter={OPEN}{filter}");
    link(house.console, &page, &format!("/letters/{topic}/"))
}

/// Runs a command of `redeliver` beside the demonstration.
#[track_caller]
pub(super) fn command(greeting: &str, arguments: &[&str]) {
    let mut command = binary("redeliver");
    let config = between(greeting, "export REDELIVER_CONFIG=", "\n");
    command.env("REDELIVER_CONFIG", config).args(arguments);
    let printed = run(command);
    assert_eq!(printed.code, Some(0), "{arguments:?} {printed:?}");
}

/// Something of each kind, in each state that has other buttons.
pub(super) fn prepare(house: &House) {
    let console = house.console;
    let cli = |arguments: &[&str]| house.command(arguments);
    let name = house.pipe.name();
    write_hostile_letters(house);
    // Before its tier is paused.
    open_letter(house, "retry_count%20%3E%200");
    let hostile = link(console, &format!("/groups?{BY_PEOPLE}"), "/groups/");
    let form = |page: &str, prefix: &str| Form::open(console, &unescaped(&link(console, page, prefix)));
    let note = form(
        &hostile,
        &format!("/act/group?id={}&#38;verb=note", &hostile[8..]),
    );
    note.fill(
        "note",
        "Asked the team; \u{5e9}\u{5dc}\u{5d5}\u{5dd}. ".repeat(8).trim(),
    )
    .send();
    let muted = link(
        console,
        "/groups?filter=error_code%20%3D%20%22wall.1%22",
        "/groups/",
    );
    form(&muted, &format!("/act/group?id={}&#38;verb=mute", &muted[8..]))
        .fill("reason", "known")
        .send();
    cli(&[
        "dlq",
        "discard",
        "--yes",
        "--reason",
        "test data",
        "--filter",
        "error_code = \"wall.2\"",
    ]);
    let filter = "error_code = \"http.422\"";
    cli(&[
        "dlq",
        "redrive",
        "--yes",
        "--observe",
        "1s",
        "--reason",
        "INC-17",
        "--filter",
        filter,
    ]);
    // Planned, and not started.
    house.fill();
    let rejected = open_letter(house, "error_code%20%3D%20%22http.422%22");
    form(&rejected, "/act/plan?kind=redrive")
        .fill("reason", "INC-18")
        .send();
    let tier = format!("tier/{name}/{}", house.last_tier());
    cli(&["pause", &tier, "--reason", HOSTILE]);
    let record = Draft::new(HOSTILE, "hostile").header("tenant", HOSTILE.as_bytes());
    house.pipe.produce(vec![record]);
    let waiting = format!(
        "/waiting?scan=records&pipeline={name}&place={}",
        house.last_tier()
    );
    link(console, &format!("{waiting}&code=http.503"), "/trace?position=");
    let idempotency_key = ["--idempotency-key", HOSTILE];
    cli(&[
        &["jobs", "schedule", "--app", APP, "--in", "40m", "--data", HOSTILE],
        &idempotency_key[..],
    ]
    .concat());
    let daily = ["--cron", "30 2 * * *", "--zone", "Europe/Berlin"];
    cli(&[
        &["schedules", "create", "nightly-report", "--app", APP],
        &daily[..],
    ]
    .concat());
}

#[test]
#[ignore = "long"]
fn pages_are_sound_in_every_view() {
    let house = House::start();
    let (console, name) = (house.console, house.pipe.name());
    prepare(&house);
    let letter = |filter: &str| open_letter(&house, filter);
    let waiting = format!("/waiting?scan=records&pipeline={name}");
    let mut pages = crawl(console, &["/", "/waiting?scan=counts", &waiting]);
    for kind in [
        "pipelines-one",
        "groups-one",
        "letters-one-1",
        "redrives-one",
        "jobs-one",
        "schedules-one",
        "form-edit",
    ] {
        assert!(pages.contains_key(kind), "{kind} is not in {pages:?}");
    }
    let hostile = link(console, &format!("/groups?{BY_PEOPLE}"), "/groups/");
    let shaky = letter("retry_count%20%3E%200");
    for (name, path) in [
        ("letters-hostile", letter("error_code%20%3D%20%22hostile%22")),
        ("letters-huge", letter("error_code%20%3D%20%22long%22")),
        ("letters-stack", letter("error_code%20%3D%20%22wall.3%22")),
        ("letters-retried", format!("{shaky}?life=1")),
        (
            "letters-none",
            "/letters?filter=error_code%20%3D%20%22none%22".to_owned(),
        ),
        ("trace-done", format!("/trace?position={name}/0/0")),
        ("find", "/find?q=docs".to_owned()),
        ("groups-common", format!("{hostile}?common=1")),
        ("groups-hostile", hostile),
        ("audit-filtered", "/audit?action=control.*".to_owned()),
        ("error-filter", "/groups?filter=nonsense".to_owned()),
        ("error-missing", "/missing".to_owned()),
        ("error-group", "/groups/0000000000000000".to_owned()),
        ("error-form", "/act/plan".to_owned()),
    ] {
        pages.insert(name.to_owned(), path);
    }
    let mut browser = Browser::start(console);
    for view in VIEWS.into_iter().chain([WITHOUT_SCRIPTS]) {
        browser.look_as(view);
        for (name, path) in &pages {
            browser.open(path);
            browser.inspect(name);
            if view.name == WIDE.name || view.name == NARROW.name {
                browser.open(path);
                browser.inspect_focus(name);
            }
        }
    }
    browser.finish();
}

#[test]
#[ignore = "long"]
fn keys_do_what_help_says() {
    let (_demo, console, _) = demo();
    let mut browser = Browser::start(console);
    browser.open("/groups");
    browser.press("/");
    assert_eq!(browser.focused(), "filter");
    // In a field, a key is a character.
    browser.press("?\u{e00c}");
    assert_eq!(browser.focused(), "body");
    browser.press("?");
    let is_open = "return document.getElementById('keys').open";
    assert_eq!(browser.run(is_open), true);
    browser.inspect("keys");
    browser.press("\u{e00c}");
    assert_eq!(browser.run(is_open), false);
    browser.press("gj");
    browser.shows("Schedule a job");
    assert_eq!(browser.path(), "/jobs");
    // The first stop leads to the content.
    browser.press("\u{e004}\u{e007}\u{e004}");
    assert_eq!(browser.focused(), "filter");
    browser.finish();
}

#[test]
#[ignore = "long"]
fn palette_leads_to_pages_and_filters() {
    let (_demo, console, _) = demo();
    let mut browser = Browser::start(console);
    let palette = |text: &str| {
        browser.press("\u{e009}k");
        browser.press(text);
        browser.holds(&format!("return shown === '{text}'"));
    };
    browser.open("/");
    palette("docs");
    browser.press("\u{e007}");
    browser.holds("return location.pathname !== '/'");
    assert_eq!(browser.path(), "/pipelines/docs");

    browser.open(REJECTED);
    browser.click("[data-saved] button");
    browser.shows("Forget error_code");
    browser.open("/jobs");
    palette("http.422");
    browser.inspect("palette");
    browser.click("#palette a[href^=\"/groups?filter\"]");
    browser.shows("Forget error_code");
    browser.click("[data-saved] button");
    browser.shows("Save this filter");
    let kept = browser.run("return localStorage.getItem('saved')");
    assert_eq!(kept, "[]");
    browser.finish();
}

#[test]
#[ignore = "long"]
fn people_act_with_and_without_scripts() {
    let house = House::start();
    let mut browser = Browser::start(house.console);
    for view in [WIDE, WITHOUT_SCRIPTS] {
        browser.look_as(view);
        act(&house, &mut browser);
    }
    browser.finish();
}

pub(super) const SEND: &str = "form.act button.next";
pub(super) const BUTTON: &str = ".actions .next";

fn act(house: &House, browser: &mut Browser) {
    const FILTER: &str = "error_code%20%3D%20%22http.422%22";
    let pipeline = format!("/pipelines/{}", house.pipe.name());
    let fill = || {
        house.fill();
        open_letter(house, FILTER);
    };

    // Redrive a group: plan, look, start, watch.
    fill();
    browser.open(REJECTED);
    browser.click(".list tbody a");
    browser.click(BUTTON);
    browser.fill("rate", "fast");
    browser.click(SEND);
    browser.shows("`rate` must be");
    browser.inspect("error-rate");
    browser.fill("rate", "50");
    browser.fill("reason", "INC-17");
    browser.fill("observe", "1s");
    browser.click(SEND);
    browser.shows("Start the redrive");
    browser.inspect("form-start");
    browser.click(SEND);
    browser.shows(">succeeded</span>");
    browser.inspect("redrive-done");

    // Edit a dead letter, with a look at what differs.
    fill();
    browser.open(&format!("/letters?filter={OPEN}{FILTER}"));
    browser.click(".list tbody a");
    browser.follow("Edit and redrive");
    browser.fill("value", "{\"number\": 1}");
    browser.click("button[name=preview]");
    browser.shows("<ins>");
    browser.inspect("form-diff");
    browser.click(SEND);
    browser.shows("edited: value");
    browser.click(SEND);
    browser.shows(">done</span>");

    // Pause a pipeline, and resume it.
    browser.open(&pipeline);
    browser.follow("Pause");
    browser.fill("reason", "INC-17");
    browser.click(SEND);
    browser.shows("paused</span> by");
    browser.inspect("pipeline-paused");
    browser.open("/");
    browser.shows(">paused</span>");
    browser.inspect("now-paused");
    browser.open(&pipeline);
    browser.click(BUTTON);
    browser.fill("reason", "over");
    browser.click(SEND);
    browser.shows("running</span>");

    // Schedule a job, and cancel it.
    browser.open(&format!("/jobs?app={APP}"));
    browser.follow("Schedule a job");
    browser.fill("due", "1h");
    browser.fill("data", "{\"number\": 2}");
    browser.click(SEND);
    browser.shows(">scheduled</span>");
    browser.follow("Cancel");
    browser.fill("reason", "paid");
    browser.click(SEND);
    browser.shows(">cancelled</span>");
}

#[test]
#[ignore = "long"]
fn viewers_sign_in_and_out() {
    // Without topics, so that each is a problem.
    let pipelines = (0..10_000).map(|number| {
        format!(
            "  team-{number}-orders-with-a-long-name: {{ output: {number}-out, http: {{ url: 'http://127.0.0.1:1' }} }}\n"
        )
    });
    let tokens = [("reader", "dead-letters:read"), ("other", "jobs:read")];
    let system = SignIn::start_with(&tokens, &[], &pipelines.collect::<String>(), WITH_TOKENS);
    let mut browser = Browser::start(system.address);
    for view in VIEWS.into_iter().chain([WITHOUT_SCRIPTS]) {
        browser.look_as(view);
        browser.open("/letters?filter=state%20%3D%20OPEN");
        browser.shows("name=\"token\"");
        browser.inspect("sign-in");
        browser.fill("token", "guessed");
        browser.click(".next");
        browser.shows("The token is refused");
        browser.inspect("error-sign-in");
        browser.fill("token", "reader");
        browser.click(".next");
        browser.shows("No dead letter");
        assert_eq!(browser.path(), "/letters");
        browser.inspect("letters-empty");
        for (name, path) in [
            ("now-many", "/"),
            ("groups-empty", "/groups"),
            ("error-jobs", "/jobs"),
            ("error-due", "/due"),
            ("form-withheld", "/act/plan?kind=discard&all=1"),
            ("audit-empty", "/audit"),
        ] {
            browser.open(path);
            browser.inspect(name);
        }
        browser.click(".side form button");
        browser.shows("You are signed out");
        browser.inspect("signed-out");
        browser.open("/letters");
        browser.shows("name=\"token\"");
    }
    browser.finish();
}

#[test]
#[ignore = "long"]
fn open_pages_outlive_silence() {
    let mut system = SignIn::start(&[("viewer", "'*'")], &[]);
    let mut browser = Browser::start(system.address);
    browser.open("/");
    browser.fill("token", "viewer");
    browser.click(".next");
    browser.holds("return document.querySelector('.list') !== null");
    system.inspector.freeze();
    let is_kept = "const silent = document.getElementById('silent');
        return !silent.hidden && silent.textContent.startsWith('The inspector') && document.querySelector('.list') !== null";
    browser.holds(is_kept);
    browser.inspect("now-silent");
    system.inspector.thaw();
    browser
        .holds("return document.getElementById('silent').hidden && document.querySelector('.list') !== null");
    // A page that has nothing yet gets it without a reload.
    system.inspector.freeze();
    browser.open("/groups");
    browser.holds("return document.querySelector('#page [data-passes]') !== null");
    browser.inspect("error-silent");
    system.inspector.thaw();
    browser.holds("return document.querySelector('#page .problem') === null && document.querySelector('.tabs') !== null");
    browser.finish();
}
