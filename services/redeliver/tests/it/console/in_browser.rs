//! The console in Chromium: every page in both colour schemes, wide and narrow, in two time zones; and what people do, with and without scripts.

use std::net::SocketAddr;

use redeliver_core::headers::{ERROR_CLASS, ERROR_CODE, ERROR_MESSAGE};
use redeliver_core::{Headers, Output};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;
use redeliver_testkit::{binary, run};

use super::browser::{Browser, NARROW, VIEWS, WIDE, crawl};
use super::{Form, SignIn, between, demo, link, unescaped};
use crate::client::block_on;

const OPEN: &str = "state%20%3D%20OPEN%20AND%20";
const BY_PEOPLE: &str = "filter=error_code%20%3D%20%22hostile%22";

/// Dead letters that try to break a page: other directions, controls, markup, long words, large values, and many errors.
async fn write_hostile_letters(greeting: &str) {
    let brokers = between(greeting, "embedded broker (", ")");
    let producer = Producer::new(&KafkaSettings::new(brokers.to_owned(), "hostile".to_owned())).unwrap();
    let long = "VeryLongNameWithoutAnyBreak".repeat(40);
    let frame = "\tat com.example.orders.fulfilment.internal.HandlerInvocation.proceed(HandlerInvocation.java:1207)\n";
    let stack = [
        "java.lang.IllegalStateException: order \u{5d4}\u{5d6}\u{5de}\u{5e0}\u{5d4} is closed\n",
        &frame.repeat(60),
    ]
    .concat();
    let megabyte = format!("{{\"text\":\"{}\"}}", "x".repeat(1 << 20));
    let hostile = "<script>alert(1)</script><img src=x onerror=alert(1)> \u{202e}gnp.txt\u{1b}[31m\0 \u{5e9}\u{5dc}\u{5d5}\u{5dd}";
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
            hostile.to_owned(),
            "<svg onload=alert(1)>\0\u{202e}".to_owned(),
        ),
        ("long".to_owned(), long.clone(), megabyte),
    ];
    for (code, message, value) in letters.into_iter().chain(wall) {
        let mut headers = Headers::new();
        headers.push_text(ERROR_CLASS, "permanent");
        headers.push_text(ERROR_CODE, &code);
        headers.push_text(ERROR_MESSAGE, &message);
        headers.push_text(&long[..200], &long);
        headers.push_text("\u{202e}tenant", "<b>acme</b>\u{7}");
        headers.push("binary", Some(&[0xff; 100]));
        let output = Output {
            topic: "docs-dlq".into(),
            partition: None,
            key: Some(hostile.into()),
            value: Some(value.into()),
            headers,
        };
        producer.send(&output).await.unwrap();
    }
}

/// Something of each kind, in each state that has other buttons.
fn prepare(console: SocketAddr, greeting: &str) {
    let cli = |arguments: &[&str]| {
        let mut command = binary("redeliver");
        let config = between(greeting, "export REDELIVER_CONFIG=", "\n");
        command.env("REDELIVER_CONFIG", config).args(arguments);
        let printed = run(command);
        assert_eq!(printed.code, Some(0), "{arguments:?} {printed:?}");
    };
    let letter = |filter: &str| {
        link(
            console,
            &format!("/letters?filter={OPEN}{filter}"),
            "/letters/docs-dlq/",
        )
    };
    block_on(write_hostile_letters(greeting));
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
    let rejected = letter("error_code%20%3D%20%22http.422%22");
    form(&rejected, "/act/plan?kind=redrive")
        .fill("reason", "INC-18")
        .send();
    cli(&["pause", "tier/docs/30s", "--reason", "the endpoint is overloaded"]);
    cli(&[
        "jobs",
        "schedule",
        "--app",
        "docs",
        "--in",
        "40m",
        "--data",
        "{\"number\": 1}",
    ]);
    let daily = ["--cron", "30 2 * * *", "--zone", "Europe/Berlin"];
    cli(&[
        &["schedules", "create", "nightly-report", "--app", "docs"],
        &daily[..],
    ]
    .concat());
}

#[test]
#[ignore = "long"]
fn pages_are_sound_in_every_view() {
    let (_demo, console, greeting) = demo();
    prepare(console, &greeting);
    let letter = |filter: &str| {
        link(
            console,
            &format!("/letters?filter={OPEN}{filter}"),
            "/letters/docs-dlq/",
        )
    };
    let mut pages = crawl(
        console,
        &["/", "/waiting?scan=counts", "/waiting?scan=records&pipeline=docs"],
    );
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
        ("trace-done", "/trace?position=docs/0/0".to_owned()),
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
    block_on(async {
        let mut browser = Browser::start(console).await;
        for view in VIEWS {
            browser.look_as(view).await;
            for (name, path) in &pages {
                browser.open(path).await;
                browser.inspect(name).await;
                if view.name == WIDE.name || view.name == NARROW.name {
                    browser.open(path).await;
                    browser.inspect_focus(name).await;
                }
            }
        }
        browser.finish().await;
    });
}

#[test]
#[ignore = "long"]
fn keys_do_what_help_says() {
    let (_demo, console, _) = demo();
    block_on(async {
        let mut browser = Browser::start(console).await;
        browser.open("/groups").await;
        browser.press("/").await;
        assert_eq!(browser.focused().await, "filter");
        // In a field, a key is a character.
        browser.press("?\u{e00c}").await;
        assert_eq!(browser.focused().await, "body");
        browser.press("?").await;
        let is_open = "return document.getElementById('keys').open";
        assert_eq!(browser.run(is_open).await, true);
        browser.inspect("keys").await;
        browser.press("\u{e00c}").await;
        assert_eq!(browser.run(is_open).await, false);
        browser.press("gj").await;
        browser.shows("Schedule a job").await;
        assert_eq!(browser.path().await, "/jobs");
        // The first stop leads to the content.
        browser.press("\u{e004}\u{e007}\u{e004}").await;
        assert_eq!(browser.focused().await, "filter");
        browser.finish().await;
    });
}

#[test]
#[ignore = "long"]
fn people_act_with_and_without_scripts() {
    let (_demo, console, _) = demo();
    link(
        console,
        "/groups?filter=error_code%20%3D%20%22http.422%22",
        "/groups/",
    );
    block_on(async {
        let mut browser = Browser::start(console).await;
        for view in [WIDE, NARROW.without_scripts()] {
            browser.look_as(view).await;
            act(&mut browser).await;
        }
        browser.finish().await;
    });
}

const SEND: &str = "form.act button.next";
const BUTTON: &str = ".actions .next";

async fn act(browser: &mut Browser) {
    // Redrive a group: plan, look, start, watch.
    browser
        .open("/groups?filter=error_code%20%3D%20%22http.422%22")
        .await;
    browser.click(".list tbody a").await;
    browser.click(BUTTON).await;
    browser.fill("rate", "fast").await;
    browser.click(SEND).await;
    browser.shows("`rate` must be").await;
    browser.inspect("error-rate").await;
    browser.fill("rate", "50").await;
    browser.fill("reason", "INC-17").await;
    browser.fill("observe", "1s").await;
    browser.click(SEND).await;
    browser.shows("Start the redrive").await;
    browser.inspect("form-start").await;
    browser.click(SEND).await;
    browser.shows(">succeeded</span>").await;
    browser.inspect("redrive-done").await;

    // Edit a dead letter, with a look at what differs.
    browser
        .open(&format!(
            "/letters?filter={OPEN}error_code%20%3D%20%22http.422%22"
        ))
        .await;
    browser.click(".list tbody a").await;
    browser.follow("Edit and redrive").await;
    browser.fill("value", "{\"number\": 1}").await;
    browser.click("button[name=preview]").await;
    browser.shows("<ins>").await;
    browser.inspect("form-diff").await;
    browser.click(SEND).await;
    browser.shows("edited: value").await;
    browser.click(SEND).await;
    browser.shows(">done</span>").await;

    // Pause a pipeline, and resume it.
    browser.open("/pipelines/docs").await;
    browser.follow("Pause").await;
    browser.fill("reason", "INC-17").await;
    browser.click(SEND).await;
    browser.shows("paused</span> by").await;
    browser.inspect("pipeline-paused").await;
    browser.open("/").await;
    browser.shows(">paused</span>").await;
    browser.inspect("now-paused").await;
    browser.open("/pipelines/docs").await;
    browser.click(BUTTON).await;
    browser.fill("reason", "over").await;
    browser.click(SEND).await;
    browser.shows("running</span>").await;

    // Schedule a job, and cancel it.
    browser.open("/jobs?app=docs").await;
    browser.follow("Schedule a job").await;
    browser.fill("due", "1h").await;
    browser.fill("data", "{\"number\": 2}").await;
    browser.click(SEND).await;
    browser.shows(">scheduled</span>").await;
    browser.follow("Cancel").await;
    browser.fill("reason", "paid").await;
    browser.click(SEND).await;
    browser.shows(">cancelled</span>").await;
}

#[test]
#[ignore = "long"]
fn viewers_sign_in_and_out() {
    // Without topics, so that each is a problem.
    let pipelines = (0..200).flat_map(|number| {
        let name = format!("pipelines.team-{number}-orders-with-a-long-name");
        [
            format!("{name}.output={number}-out"),
            format!("{name}.http.url=http://127.0.0.1:1"),
        ]
    });
    let pipelines: Vec<String> = pipelines.collect();
    let tokens = [("reader", "dead-letters:read"), ("other", "jobs:read")];
    let system = SignIn::start(&tokens, &pipelines);
    block_on(async {
        let mut browser = Browser::start(system.address).await;
        for view in VIEWS.into_iter().chain([NARROW.without_scripts()]) {
            browser.look_as(view).await;
            browser.open("/letters?filter=state%20%3D%20OPEN").await;
            browser.shows("name=\"token\"").await;
            browser.inspect("sign-in").await;
            browser.fill("token", "guessed").await;
            browser.click(".next").await;
            browser.shows("The token is refused").await;
            browser.inspect("error-sign-in").await;
            browser.fill("token", "reader").await;
            browser.click(".next").await;
            browser.shows("No dead letter").await;
            assert_eq!(browser.path().await, "/letters");
            browser.inspect("letters-empty").await;
            for (name, path) in [
                ("now-many", "/"),
                ("groups-empty", "/groups"),
                ("error-jobs", "/jobs"),
                ("error-due", "/due"),
                ("audit-empty", "/audit"),
            ] {
                browser.open(path).await;
                browser.inspect(name).await;
            }
            browser.click(".side form button").await;
            browser.shows("You are signed out").await;
            browser.inspect("signed-out").await;
            browser.open("/letters").await;
            browser.shows("name=\"token\"").await;
        }
        browser.finish().await;
    });
}
