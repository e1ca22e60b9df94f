//! `redeliver dev`, the first command of everybody: what it shows of each service, in words and over the addresses
//! that it prints.

use std::net::SocketAddr;
use std::time::Duration;

use redeliver_core::JobId;
use redeliver_testkit::{Process, binary, eventually};
use serde_json::Value;

use crate::support::{get, run};

/// How long anything may take, on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(60);

/// The word that stands behind another one in a text.
#[track_caller]
fn behind<'t>(text: &'t str, words: &str) -> &'t str {
    let (_, rest) = text
        .split_once(words)
        .unwrap_or_else(|| panic!("{words:?} is not in {text}"));
    rest.split(char::is_whitespace).next().unwrap_or_default()
}

/// What was told of a document: the name and the sentence of each line that begins with a time.
fn told(output: &str) -> Vec<(&str, &str)> {
    let lines = output.lines().filter_map(|line| {
        let (time, rest) = line.trim_start().split_once("s  ")?;
        time.parse::<f64>().ok()?;
        let (name, sentence) = rest.split_once(' ')?;
        Some((name, sentence.trim_start()))
    });
    lines.collect()
}

/// Runs the CLI against an address, without a configuration.
#[track_caller]
fn cli(arguments: &[&str], server: &str) -> String {
    let mut command = binary("redeliver");
    command.args(arguments).args(["--server", server]);
    let printed = run(command);
    assert_eq!(
        (printed.code, printed.stderr.as_str()),
        (Some(0), ""),
        "{arguments:?} {printed:?}"
    );
    printed.stdout
}

#[test]
fn the_demonstration_shows_what_all_services_do_and_ends_with_its_totals() {
    let mut command = binary("redeliver");
    command.env_clear();
    let mut demo = Process::spawn(command).unwrap();
    let greeting = demo.wait_for_output("End with  Ctrl-C", PATIENCE);
    assert!(greeting.contains("is in memory: nothing is kept"), "{greeting}");
    for service in ["scheduler", "enricher", "docs-retry-5s|30s|1m", "dlq-inspector"] {
        assert!(greeting.contains(service), "{service} is not in {greeting}");
    }

    // Each service works in it: as its lanes say, and as it can be asked.
    let admin = behind(&greeting, "Look at   http://").split('/').next();
    let admin: SocketAddr = admin.unwrap_or_default().parse().unwrap();
    let ready = eventually("the demonstration is ready", PATIENCE, || {
        match get(admin, "/readyz") {
            Ok((200, body)) => Ok(body),
            other => Err(format!("{other:?}")),
        }
    });
    for part in [
        "worker-docs-0",
        "retry-5s-0",
        "retry-30s-0",
        "retry-1m-0",
        "scheduler-0",
        "dlq-index",
    ] {
        assert!(
            ready.contains(&format!("\"{part}\":\"ready\"")),
            "{part}: {ready}"
        );
    }
    let scheduler = behind(&greeting, "redeliver jobs schedule --server ").to_owned();
    let inspector = behind(&greeting, "redeliver dlq ls --server ").to_owned();
    let request = ["jobs", "schedule", "--app", "docs", "--in", "1s"];
    let data = ["--key", "mine", "--data", r#"{"number": 1}"#];
    let id = cli(&[&request[..], &data].concat(), &scheduler);
    let id = id.trim_end();
    assert!(id.parse::<JobId>().is_ok(), "{id}");
    eventually("the job is dispatched", PATIENCE, || {
        let job: Value = serde_json::from_str(&cli(&["jobs", "get", id, "-o", "json"], &scheduler)).unwrap();
        assert_eq!((&job["id"], &job["app"]), (&id.into(), &"docs".into()));
        if job["state"] == "dispatched" {
            Ok(())
        } else {
            Err(job)
        }
    });

    // Every kind of fate is told; the ends of those that fail first come last.
    for words in [
        "is scheduled, due in ",
        "is dispatched, ",
        " enriched",
        "failed with http.503 (attempt 1); waits 5s in docs-retry-5s",
        "is dead (permanent): POST http://",
        "answered 422 Unprocessable Entity; see docs-dlq",
        "is back, ",
        "enriched at attempt 2",
        "is refused by the scheduler: `appName` names no application `dogs`",
        "see scheduler.jobs.dlq",
        "--------  ",
    ] {
        demo.wait_for_output(words, PATIENCE);
    }
    let output = demo.output();
    let mine: Vec<&str> = told(&output)
        .into_iter()
        .filter(|(name, _)| *name == "mine")
        .map(|(_, sentence)| sentence.split(',').next().unwrap_or_default())
        .collect();
    assert_eq!(mine, ["is scheduled", "is dispatched", "enriched"], "{output}");
    eventually("the inspector lists what is dead", PATIENCE, || {
        let listed: Value = serde_json::from_str(&cli(&["dlq", "ls", "-o", "json"], &inspector)).unwrap();
        let codes = listed.as_array().into_iter().flatten();
        let has = |code: &str| codes.clone().any(|letter| letter["error_code"] == code);
        if has("http.422") && has("request.appName") {
            Ok(())
        } else {
            Err(listed)
        }
    });

    demo.interrupt();
    assert_eq!(demo.wait(PATIENCE).code(), Some(0));
    let output = demo.output();
    let (_, end) = output.split_once("\nended after ").unwrap();
    let numbers: Vec<u64> = end
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect();
    let [
        _,
        came,
        enriched,
        dead,
        waiting,
        back,
        jobs,
        dispatched,
        jobs_waiting,
        refused,
        ..,
    ] = numbers[..]
    else {
        panic!("{end}")
    };
    assert_eq!(came, enriched + dead + waiting, "{end}");
    assert_eq!(jobs, dispatched + jobs_waiting, "{end}");
    assert!(
        end.contains(" waiting or in hand; ") && end.contains(", none early, late by p50 "),
        "{end}"
    );
    // They are the sums of what was told.
    let told = told(&output);
    let count = |beginning: &str| {
        let found = told
            .iter()
            .filter(|(_, sentence)| sentence.starts_with(beginning));
        found.count() as u64
    };
    assert_eq!(
        (enriched, dead, back, dispatched, refused),
        (
            count("enriched"),
            count("is dead"),
            count("is back"),
            count("is dispatched"),
            count("is refused")
        ),
        "{output}"
    );
}
