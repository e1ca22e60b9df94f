//! `redeliver dev`: what it prints about each service, and that the addresses it prints work.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::Stdio;

use redeliver_core::JobId;
use redeliver_testkit::{Process, binary, ensure, eventually, http, run};
use serde_json::Value;

use crate::support::{DEADLINE, words};

/// The word after a prefix in a text.
#[track_caller]
fn word_after<'t>(text: &'t str, words: &str) -> &'t str {
    let (_, rest) = text
        .split_once(words)
        .unwrap_or_else(|| panic!("{words:?} is not in {text}"));
    rest.split(char::is_whitespace).next().unwrap_or_default()
}

/// The events in the output: the name and the sentence of each line that starts with a time.
fn events(output: &str) -> Vec<(&str, &str)> {
    let lines = output.lines().filter_map(|line| {
        let (time, rest) = line.trim_start().split_once("s  ")?;
        time.parse::<f64>().ok()?;
        let (name, sentence) = rest.split_once(' ')?;
        Some((name, sentence.trim_start()))
    });
    lines.collect()
}

/// Runs the CLI with the configuration of the demonstration.
#[track_caller]
fn cli(arguments: &[&str], config: &str) -> String {
    let mut command = binary("redeliver");
    command
        .env_clear()
        .env("REDELIVER_CONFIG", config)
        .args(arguments);
    let printed = run(command);
    assert_eq!(printed.code, Some(0), "{arguments:?} {printed:?}");
    printed.stdout
}

#[test]
fn demonstration_ends_without_reader() {
    let mut command = binary("redeliver");
    command.env_clear().args(["dev", "--rate", "50"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut demo = command.spawn().unwrap();
    let mut first = String::new();
    // Dropping the reader closes the pipe, as `head` does.
    BufReader::new(demo.stdout.take().unwrap())
        .read_line(&mut first)
        .unwrap();
    let ended = demo.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && !stderr.contains("panicked"), "{stderr}");
}

/// Goes through the commands that need more of Kafka than to read and to write: descriptions, committed offsets, offsets by time.
fn commands_work(demo: &mut Process, config: &str, json: &dyn Fn(&[&str]) -> Value) {
    // What this broker does not tell is not known.
    let checked = cli(&["topics", "check"], config);
    let untold = "could not be checked because this broker does not tell the configuration of topics";
    assert!(
        checked.contains(untold) && !checked.contains("error"),
        "{checked}"
    );
    let status = json(&["status"]);
    let queues = status["queues"].as_array().unwrap();
    assert_eq!(queues.len(), 6, "{status}");
    for queue in queues {
        assert!(queue["records"].as_u64() < Some(50), "{queue}");
        assert!(queue["consumers"].is_null(), "{queue}");
    }
    assert_eq!(status["dead_letters"][0]["removal"], "unknown", "{status}");
    eventually("records wait", DEADLINE, || {
        let stats = json(&["waiting", "stats"]);
        let listed = json(&["waiting", "ls"]);
        let waits = listed.to_string().contains("docs-retry-") && stats.to_string().contains("http.500");
        ensure(waits, format!("{stats} {listed}"))
    });
    eventually("a waiting record is retried now", DEADLINE, || {
        let mut command = binary("redeliver");
        command.env_clear().env("REDELIVER_CONFIG", config);
        command.args(words(
            "waiting retry --matching --limit 1 --yes --reason test -o json",
        ));
        let printed = run(command);
        // It may have left its tier meanwhile.
        match printed.code == Some(0) && printed.stdout.contains("\"retried\"") {
            true => Ok(()),
            false => Err(format!("{printed:?}")),
        }
    });
    // Offsets are committed after the transaction here.
    eventually("nothing is lost or doubled", DEADLINE, || {
        let mut command = binary("redeliver");
        command.env_clear().env("REDELIVER_CONFIG", config).arg("audit");
        let printed = run(command);
        ensure(printed.code == Some(0), printed.stdout)
    });
    let letter = eventually("the inspector lists what is dead", DEADLINE, || {
        let listed = json(&["dlq", "ls"]);
        let letters = listed["dead_letters"].as_array().into_iter().flatten();
        let of = |code: &str| letters.clone().find(|letter| letter["error_code"] == code);
        match (of("http.422"), of("request.appName")) {
            (Some(letter), Some(_)) => Ok(letter["id"].as_str().unwrap().to_owned()),
            _ => Err(listed),
        }
    });
    assert_eq!(json(&["trace", &letter])[0]["outcome"], "dead");
    let discarded = json(&["dlq", "discard", "--id", &letter, "--yes"]);
    assert_eq!(discarded["state"], "succeeded", "{discarded}");
    json(&["dlq", "restore", "--id", &letter, "--yes"]);
    let job = json(&["dlq", "redrive", "--id", &letter, "--yes", "--observe", "1s"]);
    let counts = [&job["state"], &job["done"], &job["returned"]];
    assert_eq!(counts, [&Value::from("succeeded"), &1.into(), &0.into()], "{job}");
    demo.wait_for_output(" redriven", DEADLINE);
    eventually("the redriven record is in the output", DEADLINE, || {
        let traced = json(&["trace", &letter]);
        ensure(traced[0]["outcome"] == "succeeded", traced)
    });
    cli(&["release", "tier/docs/30s", "--reason", "test"], config);
    let entries = cli(&["dlq", "audit"], config);
    for action in [
        "dead-letters.discard",
        "dead-letters.redrive",
        "control.release",
        "waiting.retry",
    ] {
        assert!(entries.contains(action), "{action}: {entries}");
    }
}

#[test]
fn demonstration_shows_all_services() {
    let mut command = binary("redeliver");
    command.env_clear();
    let mut demo = Process::spawn(command).unwrap();
    let greeting = demo.wait_for_output("Press Ctrl-C to stop.", DEADLINE);
    assert!(
        greeting.contains("is not durable and does not demonstrate the delivery guarantees"),
        "{greeting}"
    );
    for service in ["scheduler", "enricher", "docs-retry-5s|30s|1m", "dlq-inspector"] {
        assert!(greeting.contains(service), "{service} is not in {greeting}");
    }

    // Each service works: its lanes are ready, and its API answers.
    let admin = word_after(&greeting, "Admin      http://").split('/').next();
    let admin: SocketAddr = admin.unwrap_or_default().parse().unwrap();
    let ready = eventually("the demonstration is ready", DEADLINE, || {
        match http::get(admin, "/readyz") {
            Ok((200, body)) => Ok(body),
            other => Err(format!("{other:?}")),
        }
    });
    for part in [
        "worker-docs-0",
        "worker-docs-0-due",
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
    let config = word_after(&greeting, "export REDELIVER_CONFIG=");
    let json = |arguments: &[&str]| -> Value {
        serde_json::from_str(&cli(&[arguments, &["-o", "json"]].concat(), config)).unwrap()
    };
    let request = ["jobs", "schedule", "--app", "docs", "--in", "1s"];
    let data = ["--key", "mine", "--data", r#"{"number": 1}"#];
    let id = cli(&[&request[..], &data].concat(), config);
    let id = id.trim_end();
    assert!(id.parse::<JobId>().is_ok(), "{id}");
    eventually("the job is dispatched", DEADLINE, || {
        let job = json(&["jobs", "get", id]);
        assert_eq!((&job["id"], &job["app"]), (&id.into(), &"docs".into()));
        ensure(job["state"] == "dispatched", job)
    });

    // Every kind of event is printed; records that fail first end last.
    for words in [
        " scheduled, due in ",
        " dispatched, ",
        " enriched",
        "failed with http.500 (attempt 1); waiting 5s in docs-retry-5s",
        "dead letter (permanent): POST http://",
        "answered 422 Unprocessable Entity; see docs-dlq",
        " released, ",
        "enriched on attempt 2",
        "rejected by the scheduler: `appName` is `dogs`, which is not an application",
        "see scheduler.jobs.dlq",
        "--------  ",
    ] {
        demo.wait_for_output(words, DEADLINE);
    }
    let output = demo.output();
    let mine: Vec<&str> = events(&output)
        .into_iter()
        .filter(|(name, _)| *name == "mine")
        .map(|(_, sentence)| sentence.split(',').next().unwrap_or_default())
        .collect();
    assert_eq!(mine, ["scheduled", "dispatched", "enriched"], "{output}");
    commands_work(&mut demo, config, &json);

    demo.interrupt();
    assert_eq!(demo.wait(DEADLINE).code(), Some(0));
    let output = demo.output();
    let (_, end) = output.split_once("\nstopped after ").unwrap();
    let number = |before: &str| -> u64 {
        let number = end.split(before).next().unwrap().rsplit(' ').next();
        number
            .unwrap()
            .parse()
            .unwrap_or_else(|error| panic!("{error} before {before:?}: {end}"))
    };
    // The totals are the sums of the events.
    let events = events(&output);
    let count = |beginning: &str| {
        let found = events
            .iter()
            .filter(|(_, sentence)| sentence.starts_with(beginning));
        found.count() as u64
    };
    assert_eq!(
        (number(" enriched"), number(" dead")),
        (count("enriched"), count("dead letter")),
        "{output}"
    );
    assert!(end.contains("; none early; lateness p50 "), "{end}");
}
