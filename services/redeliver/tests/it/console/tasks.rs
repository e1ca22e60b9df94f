//! What people on call do, in the console and on the command line: clicks and fields beside commands, the table of docs/console.md, and the
//! seconds that the scripts took, for BENCHMARKS.md.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Instant;

use redeliver_core::headers::{Origin, write_failure, write_lineage};
use redeliver_core::{Clock as _, Failure, Headers, Output, SystemClock};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::producer::Producer;

use super::browser::Browser;
use super::in_browser::{BUTTON, SEND, command};
use super::{between, demo, link};
use crate::client::block_on;

/// Dead letters of the pipeline of the demonstration, whose endpoint accepts them by now.
async fn write_letters(greeting: &str) {
    let brokers = between(greeting, "embedded broker (", ")");
    let producer = Producer::new(&KafkaSettings::new(brokers.to_owned(), "tasks".to_owned())).unwrap();
    let codes = [
        "card.declined",
        "test.data",
        "test.more",
        "bad.amount",
        "slow.a",
        "slow.b",
    ];
    for (offset, code) in (1_000_000..).zip(codes.into_iter().flat_map(|code| [code; 4])) {
        let now = SystemClock.now();
        let origin = Origin {
            topic: "docs".into(),
            partition: 0,
            offset,
            timestamp: Some(now),
        };
        let mut headers = Headers::new();
        headers.push_text("tenant", ["acme", "globex"][usize::try_from(offset % 2).unwrap()]);
        write_lineage(&mut headers, "docs", &origin, 0);
        write_failure(&mut headers, &Failure::permanent(code, code), now);
        let output = Output {
            topic: "docs-dlq".into(),
            partition: None,
            key: Some(format!("order-{offset}").into()),
            value: Some("{\"number\": 1}".into()),
            headers,
        };
        producer.send(&output).await.unwrap();
    }
}

fn seconds(of: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    of();
    begin.elapsed().as_secs_f64()
}

struct Tasks<'a> {
    browser: Browser,
    greeting: &'a str,
    table: String,
    seconds: String,
}

impl Tasks<'_> {
    /// Does a task in the console, beginning on the first page, and then on the command line.
    fn both(&mut self, task: &str, console: impl FnOnce(&Browser), commands: &[&[&str]]) {
        self.browser.taken();
        let in_console = seconds(|| {
            self.browser.open("/");
            console(&self.browser);
        });
        let (clicks, fields) = self.browser.taken();
        let in_commands = seconds(|| {
            for arguments in commands {
                command(self.greeting, arguments);
            }
        });
        let commands = commands.len();
        writeln!(self.table, "| {task} | {clicks} | {fields} | {commands} |").unwrap();
        let console = format!("{clicks}, {fields}, {in_console:.1} s");
        writeln!(
            self.seconds,
            "| {task} | {console} | {commands}, {in_commands:.1} s |"
        )
        .unwrap();
    }

    /// As [`Tasks::both`] for a change with a form, which leads to a page that shows `then`.
    fn change(&mut self, task: &str, form: impl FnOnce(&Browser), then: &str, arguments: &[&str]) {
        let console = |browser: &Browser| {
            form(browser);
            browser.click(SEND);
            browser.shows(then);
        };
        self.both(task, console, &[arguments]);
    }
}

fn pipeline(browser: &Browser) {
    browser.click("a[href=\"/pipelines/docs\"]");
}

fn letters(browser: &Browser, filter: &str) {
    browser.follow("Dead letters");
    browser.fill("filter", &format!("{filter}\u{e007}"));
    browser.holds("return location.search.includes('filter=')");
}

fn job(browser: &Browser, id: &str) {
    browser.follow("Jobs");
    browser.fill("id", &format!("{id}\u{e007}"));
    browser.shows("Accepted");
}

/// From the form of a plan to the end of the job.
fn plan(browser: &Browser) {
    browser.fill("reason", "INC-17");
    browser.click(SEND);
    browser.holds("return location.pathname === '/act/redrive'");
    browser.click(SEND);
    browser.shows(">succeeded</span>");
}

#[test]
#[ignore = "long"]
fn operators_finish_twenty_tasks() {
    let (_demo, console, greeting) = demo();
    block_on(write_letters(&greeting));
    let group = |code: &str| {
        link(
            console,
            &format!("/groups?filter=error_code%20%3D%20%22{code}%22"),
            "/groups/",
        )
    };
    let letter = |code: &str| {
        let page = format!("/letters?filter=error_code%20%3D%20%22{code}%22");
        link(console, &page, "/letters/docs-dlq/")["/letters/".len()..].to_owned()
    };
    let id_of = |group: &str| group["/groups/".len()..].to_owned();
    let rejected = group("http.422");
    let mut tasks = Tasks {
        browser: Browser::start(console),
        greeting: &greeting,
        table: String::new(),
        seconds: String::new(),
    };
    find(&mut tasks, &rejected, &letter("http.422"));
    redrive(&mut tasks, console, &letter("bad.amount"));
    control(&mut tasks);
    schedule(&mut tasks);
    let (first, second) = (group("card.declined"), id_of(&group("bad.amount")));
    tasks.both(
        "mute a group, and say why in a note",
        |browser| {
            browser.follow("Groups");
            browser.click(&format!("a[href=\"{first}\"]"));
            for (button, field, text, then) in [
                ("Mute", "reason", "until the bank answers", ">muted</span>"),
                ("Note", "note", "ask Ana first", "ask Ana first"),
            ] {
                browser.follow(button);
                browser.fill(field, text);
                browser.click(SEND);
                browser.shows(then);
            }
        },
        &[
            &[
                "dlq",
                "group",
                "mute",
                &second,
                "--reason",
                "until the bank answers",
            ],
            &["dlq", "group", "note", &second, "ask Ana first"],
        ],
    );
    let table = std::mem::take(&mut tasks.table);
    println!("{table}\n{}", tasks.seconds);
    assert_eq!(table.lines().count(), 20);
    tasks.browser.finish();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/console.md");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(
        page.contains(&table),
        "docs/console.md has another table than:\n{table}"
    );
}

fn find(tasks: &mut Tasks<'_>, group: &str, letter: &str) {
    tasks.both(
        "see what is wrong, and since when",
        |browser| browser.shows("What is wrong"),
        &[&["status"], &["dlq", "groups", "--filter", "state = OPEN"]],
    );
    tasks.both(
        "read why records of a group died",
        |browser| {
            browser.follow("Groups");
            browser.click(&format!("a[href=\"{group}\"]"));
            browser.shows("422 Unprocessable");
        },
        &[
            &["dlq", "groups"],
            &[
                "dlq",
                "ls",
                "--filter",
                &format!("group = {}", &group["/groups/".len()..]),
                "--limit",
                "1",
            ],
            &["dlq", "show", letter],
        ],
    );
    tasks.both(
        "find a dead letter by its key",
        |browser| {
            letters(browser, "key = \"order-1000002\"");
            browser.click(".list .reason a");
            browser.shows("Life of the record");
        },
        &[
            &["dlq", "ls", "--filter", "key = \"order-1000002\""],
            &["dlq", "show", letter],
        ],
    );
    tasks.both(
        "see the history of a record",
        |browser| {
            browser.follow("Trace");
            browser.fill("position", "docs/0/0\u{e007}");
            browser.shows("What comes next");
        },
        &[&["trace", "docs/0/0"]],
    );
    tasks.both(
        "see what becomes due within an hour",
        |browser| {
            browser.follow("Due");
            browser.follow("Read the retry topics");
            browser.shows("due already");
        },
        &[&["jobs", "stats"], &["waiting", "stats"]],
    );
}

fn redrive(tasks: &mut Tasks<'_>, console: SocketAddr, letter: &str) {
    let declined = |tenant: &str| {
        format!("state = OPEN AND error_code = \"card.declined\" AND headers.tenant = \"{tenant}\"")
    };
    tasks.both(
        "redrive one tenant at 5/s, and stop if 2% come back",
        |browser| {
            letters(browser, &declined("acme"));
            browser.click(BUTTON);
            browser.fill("rate", "5");
            browser.fill("max_returned", "0.02");
            browser.fill("observe", "1s");
            plan(browser);
        },
        &[&[
            "dlq",
            "redrive",
            "--filter",
            &declined("globex"),
            "--rate",
            "5",
            "--max-returned",
            "0.02",
            "--observe",
            "1s",
            "--reason",
            "INC-17",
            "--yes",
        ]],
    );
    tasks.both(
        "correct a dead letter, and redrive it",
        |browser| {
            letters(browser, "state = OPEN AND error_code = \"bad.amount\"");
            browser.click(".list tbody tr:last-child .reason a");
            browser.follow("Edit and redrive");
            browser.fill("value", "{\"number\": 2}");
            browser.click(SEND);
            browser.shows("edited: value");
            browser.click(SEND);
            browser.shows(">done</span>");
        },
        &[
            &["dlq", "show", letter],
            &[
                "dlq",
                "edit",
                letter,
                "--value",
                "{\"number\": 2}",
                "--observe",
                "1s",
                "--reason",
                "INC-17",
                "--yes",
            ],
        ],
    );
    for (verb, label) in [
        ("discard", "Discard all that match"),
        ("restore", "Restore all that match"),
    ] {
        tasks.both(
            &format!("{verb} the dead letters of a test"),
            |browser| {
                letters(browser, "error_code = \"test.data\"");
                browser.follow(label);
                plan(browser);
            },
            &[&[
                "dlq",
                verb,
                "--filter",
                "error_code = \"test.more\"",
                "--reason",
                "INC-17",
                "--yes",
            ]],
        );
    }
    // Each waits for an hour after its first dead letter.
    let slow = |code: &str| {
        let filter = format!("error_code = \"{code}\"");
        let arguments = [
            "dlq",
            "redrive",
            "--filter",
            &filter,
            "--rate",
            "1",
            "--observe",
            "1h",
            "--yes",
            "--no-wait",
        ];
        command(tasks.greeting, &arguments);
        link(console, "/redrives", "/redrives/")
    };
    let (first, second) = (slow("slow.a"), slow("slow.b"));
    tasks.change(
        "cancel a running redrive",
        |browser| {
            browser.follow("Redrives");
            browser.click(&format!("a[href=\"{first}\"]"));
            browser.follow("Cancel");
        },
        ">cancelled</span>",
        &["dlq", "redrives", "cancel", &second["/redrives/".len()..]],
    );
}

fn control(tasks: &mut Tasks<'_>) {
    tasks.change(
        "pause a pipeline",
        |browser| {
            pipeline(browser);
            browser.follow("Pause");
            browser.fill("reason", "INC-17");
        },
        "paused</span> by",
        &["pause", "pipeline/docs", "--reason", "INC-17"],
    );
    tasks.both(
        "see who paused it, and why",
        |browser| {
            pipeline(browser);
            browser.shows("INC-17");
        },
        &[&["controls"]],
    );
    tasks.change(
        "resume it",
        |browser| {
            pipeline(browser);
            browser.click(BUTTON);
            browser.fill("reason", "INC-17 is over");
        },
        "running</span>",
        &["resume", "pipeline/docs", "--reason", "INC-17 is over"],
    );
    tasks.change(
        "limit a pipeline to 10/s",
        |browser| {
            pipeline(browser);
            browser.follow("Rate");
            browser.fill("rate", "10");
            browser.fill("reason", "INC-18");
        },
        "at most 10/s",
        &["rate", "pipeline/docs", "10", "--reason", "INC-18"],
    );
    tasks.change(
        "remove the limit",
        |browser| {
            pipeline(browser);
            browser.follow("As configured");
            browser.fill("reason", "INC-18 is over");
        },
        "running</span>",
        &[
            "rate",
            "pipeline/docs",
            "configured",
            "--reason",
            "INC-18 is over",
        ],
    );
    tasks.change(
        "release the waiting records of a tier",
        |browser| {
            pipeline(browser);
            browser.follow("Release");
            browser.fill("reason", "the endpoint is repaired");
        },
        "Where records wait",
        &["release", "tier/docs/5s", "--reason", "the endpoint is repaired"],
    );
}

fn schedule(tasks: &mut Tasks<'_>) {
    let idempotency_key = ["--idempotency-key", "reminder-7"];
    let by_key = [&["--app", "docs"], &idempotency_key[..]].concat();
    tasks.change(
        "schedule a job",
        |browser| {
            browser.follow("Jobs");
            browser.follow("Schedule a job");
            browser.fill("app", "docs");
            browser.fill("due", "1h");
            browser.fill("data", "{\"number\": 2}");
        },
        ">scheduled</span>",
        &[
            &["jobs", "schedule", "--in", "1h", "--data", "{\"number\": 2}"],
            &by_key[..],
        ]
        .concat(),
    );
    let scheduled = tasks.browser.path();
    let id = scheduled.rsplit('/').next().unwrap();
    tasks.change(
        "move a job",
        |browser| {
            job(browser, id);
            browser.follow("Reschedule");
            browser.fill("due", "2h");
        },
        ">scheduled</span>",
        &[&["jobs", "reschedule", "--in", "2h"], &by_key[..]].concat(),
    );
    tasks.change(
        "cancel a job",
        |browser| {
            job(browser, id);
            browser.follow("Cancel");
            browser.fill("reason", "paid");
        },
        ">cancelled</span>",
        &[&["jobs", "cancel", "--reason", "paid"], &by_key[..]].concat(),
    );
}
