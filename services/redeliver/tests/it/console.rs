//! The console of `redeliver dev`: every page, and the command that each page shows.

use std::net::SocketAddr;
use std::process::Command;

use redeliver_testkit::{Process, binary, eventually, http};

use crate::support::DEADLINE;

/// What stands between two texts, the first time.
#[track_caller]
fn between<'t>(text: &'t str, begin: &str, end: &str) -> &'t str {
    let rest = text
        .split_once(begin)
        .unwrap_or_else(|| panic!("{begin:?} is not in {text}"));
    rest.1
        .split_once(end)
        .unwrap_or_else(|| panic!("{end:?} is not in {text}"))
        .0
}

/// The first link that begins like this, once the page has one.
#[track_caller]
fn link(console: SocketAddr, page: &str, prefix: &str) -> String {
    eventually(page, DEADLINE, || match http::get(console, page) {
        Ok((200, body)) if body.contains(&format!("href=\"{prefix}")) => Ok(format!(
            "{prefix}{}",
            between(&body, &format!("href=\"{prefix}"), "\"")
        )),
        other => Err(format!("{other:?}")),
    })
}

/// The page shows what it should, and its command works.
#[track_caller]
fn check(console: SocketAddr, config: &str, page: &str, shown: &str) {
    eventually(page, DEADLINE, || match http::get(console, page) {
        Ok((200, body)) if body.contains(shown) && !body.contains("class=\"problem\"") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    let (_, body) = http::get(console, page).unwrap();
    let command = between(&body, "data-copy=\"", "\"");
    let command = command
        .replace("&#34;", "\"")
        .replace("&#39;", "'")
        .replace("&amp;", "&");
    let program = binary("redeliver");
    let directory = std::path::Path::new(program.get_program()).parent().unwrap();
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", &command])
        .env("PATH", directory)
        .env("REDELIVER_CONFIG", config);
    let run = shell.output().unwrap();
    let stderr = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{page}: {command}: {stderr}");
}

#[test]
fn pages_and_their_commands_work() {
    let mut command = binary("redeliver");
    command
        .env_clear()
        .args(["dev", "--rate", "20", "--console", "127.0.0.1:0"]);
    let mut demo = Process::spawn(command).unwrap();
    let greeting = demo.wait_for_output("Press Ctrl-C to stop.", DEADLINE);
    assert!(greeting.starts_with("Open http://127.0.0.1:"), "{greeting}");
    let console: SocketAddr = between(&greeting, "Open http://", " ").parse().unwrap();
    let config = between(&greeting, "export REDELIVER_CONFIG=", "\n");

    let group = link(console, "/groups", "/groups/");
    let letter = link(console, "/letters", "/letters/docs-dlq/");
    let job = link(console, "/jobs", "/jobs/");
    for (page, shown) in [
        ("/", "What is wrong"),
        ("/pipelines/docs", "Where records wait"),
        ("/due?waiting=1", "Retries in the next 60 minutes"),
        ("/groups", "http.422"),
        (
            "/groups?show=all&sort=count&filter=error_code%20%3D%20%22http.422%22",
            "http.422",
        ),
        (&group, "Newest dead letters"),
        ("/letters?filter=error_class%20%3D%20%22permanent%22", "docs-dlq/"),
        (&letter, "Trace the record"),
        (&format!("{letter}?life=1"), "became a dead letter"),
        ("/redrives", "No redrive was planned yet"),
        ("/waiting?scan=counts&pipeline=docs", "30s"),
        ("/waiting?scan=records&place=30s&code=http.500", "docs-retry-30s/"),
        (&job, "Application"),
        ("/jobs?app=docs", "scheduled"),
        ("/schedules", "No schedule"),
        ("/trace?position=docs/0/0", "entered the pipeline"),
        ("/audit?action=dead-letters.*&since=1h", "dead-letters.get"),
    ] {
        check(console, config, page, shown);
    }
    for (page, status) in [
        ("/groups/0000000000000000", 404),
        ("/letters/docs-dlq/0/999999", 404),
        ("/jobs/nonsense", 400),
        ("/trace?position=nonsense", 400),
        ("/groups?filter=nonsense", 400),
        ("/letters/docs-dlq/x/1", 400),
        ("/missing", 404),
    ] {
        let (found, body) = http::get(console, page).unwrap();
        assert_eq!(found, status, "{page}: {body}");
    }
}
