//! `redeliver schedules` on a real scheduler, and without one.

use redeliver_core::JobId;
use redeliver_testkit::{CommandOutput, binary, eventually, free_port, run};
use serde_json::{Value, json};

use crate::services::{APP, Services};
use crate::support::{DEADLINE, words};

const NIGHTLY: [&str; 4] = ["--cron", "30 2 * * *", "--zone", "Europe/Berlin"];

fn output_of(arguments: &[&str]) -> CommandOutput {
    let mut command = binary("redeliver");
    command.args(arguments);
    run(command)
}

#[test]
fn schedules_are_managed_by_commands() {
    let services = Services::new("cli-schedules");
    let _scheduler = services.pipe.scheduler("a");
    let create =
        r#"schedules create nightly --app demo --data {"a":1} --header a=b --misfire all --misfire-limit 5"#;
    let create = [&words(create)[..], &NIGHTLY].concat();
    let created = services.json(&create);
    assert_eq!(
        (&created["state"], &created["revision"]),
        (&json!("active"), &json!(1))
    );
    // The same again succeeds, another one fails.
    assert_eq!(services.json(&create), created);
    let other = [&create[..], &["--jitter", "1m"]].concat();
    let refused = services.fails(1, &other);
    assert!(refused.stderr.contains("(ALREADY_EXISTS)"), "{refused:?}");

    let schedule = services.json(&["schedules", "get", "nightly"]);
    let expected = json!({
        "id": "nightly",
        "appName": APP,
        "cron": { "expression": "30 2 * * *", "zone": "Europe/Berlin", "gap": "shift", "overlap": "first" },
        "misfire": { "policy": "all", "limit": 5, "grace": "1m" },
        "jobData": { "a": 1 },
        "headers": [{ "name": "a", "value": "b" }],
        "dispatched": 0,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&schedule[name], value, "{name} of {schedule}");
    }
    let preview = ["--count", "300", "--after", "2027-03-26T12:00:00Z"];
    let of_schedule = [&["schedules", "preview", "--id", "nightly"][..], &preview].concat();
    let of_definition = [&["schedules", "preview"][..], &NIGHTLY, &preview].concat();
    assert_eq!(services.json(&of_schedule), services.json(&of_definition));

    let file = services.pipe.env.directory().join("schedule.json");
    let hourly = json!({"id": "hourly", "every": "1h", "appName": APP, "jobData": 1});
    std::fs::write(&file, hourly.to_string()).unwrap();
    let file = file.to_str().unwrap();
    services.cli(&["schedules", "create", "--file", file]);
    let paused = services.json(&["schedules", "pause", "hourly"]);
    assert_eq!(
        (&paused["state"], &paused["revision"]),
        (&json!("paused"), &json!(2))
    );
    let ids = |list: &Value| -> Vec<Value> {
        let schedules = list.as_array().unwrap();
        schedules.iter().map(|schedule| schedule["id"].clone()).collect()
    };
    let list = services.json(&["schedules", "ls", "--app", APP]);
    assert_eq!(ids(&list), ["nightly", "hourly"], "paused ones come last");
    let table = services.cli(&["schedules", "ls"]);
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        (lines[0][0], lines[1][0], lines[2][0]),
        ("ID", "nightly", "hourly")
    );
    assert!(lines[1].contains(&"in"), "{table}");
    let first = services.pipe.redeliver(&["schedules", "ls", "--limit", "1"]);
    assert!(
        first.stderr.starts_with("showing the first 1 schedules"),
        "{first:?}"
    );

    let job = services.cli(&["schedules", "trigger", "hourly"]);
    let job: JobId = job.trim_end().parse().unwrap();
    let occurrence = format!("hourly+{job}");
    eventually("the job is dispatched", DEADLINE, || {
        let shown = services.json(&["jobs", "get", &job.to_string()]);
        if shown["state"] == "dispatched" {
            assert_eq!(shown["occurrence"], json!(occurrence));
            Ok(())
        } else {
            Err(shown)
        }
    });
    let resumed = services.json(&["schedules", "resume", "hourly", "--catch-up"]);
    assert_eq!(
        (&resumed["skipped"], &resumed["schedule"]["state"]),
        (&json!(0), &json!("active"))
    );
    let other = json!({"id": "hourly", "every": "2h", "appName": APP, "jobData": 1});
    std::fs::write(file, other.to_string()).unwrap();
    let update = ["schedules", "update", "--file", file, "--expected-revision", "2"];
    let stale = services.fails(1, &update);
    assert!(stale.stderr.contains("has revision 3"), "{stale:?}");
    // What a file expects of the schedule is checked as well.
    let with = |fields: serde_json::Value| {
        let mut definition = other.clone();
        definition
            .as_object_mut()
            .unwrap()
            .append(&mut fields.as_object().unwrap().clone());
        std::fs::write(file, definition.to_string()).unwrap();
    };
    with(json!({"revision": 2, "state": "active"}));
    let stale = services.fails(1, &update[..4]);
    assert!(stale.stderr.contains("has revision 3"), "{stale:?}");
    with(json!({"state": "paused"}));
    for command in ["update", "create"] {
        let paused = services.fails(2, &["schedules", command, "--file", file]);
        assert!(paused.stderr.contains("the schedule is active"), "{paused:?}");
    }
    with(json!({}));
    assert_eq!(
        services.cli(&["schedules", "delete", "hourly"]),
        "schedule hourly deleted\n"
    );
    for gone in [
        &["schedules", "delete", "hourly"][..],
        &["schedules", "pause", "hourly"],
        &["schedules", "update", "--file", file],
    ] {
        let gone = services.fails(1, gone);
        assert!(
            gone.stderr.ends_with("\nerror: schedule hourly not found\n"),
            "{gone:?}"
        );
    }
}

#[test]
fn preview_needs_no_scheduler() {
    let nowhere = format!("http://127.0.0.1:{}", free_port());
    let preview = format!("schedules preview --count 3 --after 2027-03-26T12:00:00Z --server {nowhere}");
    let printed = output_of(&[&words(&preview)[..], &NIGHTLY].concat());
    let expected = "\
NOMINAL TIME              LOCAL TIME                                LATEST DUE  REASON
2027-03-27T01:30:00.000Z  2027-03-27T02:30:00+01:00[Europe/Berlin]  -           -
2027-03-28T01:30:00.000Z  2027-03-28T03:30:00+02:00[Europe/Berlin]  -           shifted: 2027-03-28T02:30:00 does not exist
2027-03-29T00:30:00.000Z  2027-03-29T02:30:00+02:00[Europe/Berlin]  -           -
";
    assert_eq!((printed.stderr.as_str(), printed.stdout.as_str()), ("", expected));
    assert_eq!(printed.code, Some(0));
    let unreachable = output_of(&["schedules", "preview", "--id", "nightly", "--server", &nowhere]);
    assert_eq!(unreachable.code, Some(1));
}

/// Before anything is sent.
#[test]
fn invalid_definition_is_refused() {
    for (arguments, says) in [
        ("create a --app x --every 10ms", "`every.interval` "),
        ("preview --cron @daily --zone Europe/Berln", "`cron.zone` "),
        ("preview --cron @daily --every 5m", "cannot be used with"),
        ("create a --app x", "--cron"),
        ("create --app x --every 5m", "<ID>"),
    ] {
        let refused = output_of(&words(&format!("schedules {arguments}")));
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.stderr.contains(says), "{says}: {refused:?}");
    }
}

#[test]
fn flag_without_effect_is_refused() {
    let nightly = ["--cron", "@daily"];
    let hourly = ["--every", "1h"];
    let (file, id) = (["--file", "definition.json"], ["--id", "nightly"]);
    let of_cron = [["--zone", "UTC"], ["--gap", "skip"], ["--overlap", "both"]];
    let (anchor, limit) = (["--anchor", "2027-01-01T00:00:00Z"], ["--misfire-limit", "5"]);
    let mut pairs: Vec<_> = of_cron.iter().map(|flag| (hourly, *flag)).collect();
    pairs.push((nightly, anchor));
    let of_timing = of_cron.iter().chain([&anchor, &limit]);
    pairs.extend(of_timing.clone().map(|flag| (file, *flag)));
    let of_id = of_timing.map(|flag| (id, *flag));
    let commands = [&["schedules", "create", "a"][..], &["schedules", "preview"]];
    let all = commands
        .iter()
        .flat_map(|command| pairs.iter().map(move |pair| (*command, *pair)));
    for (command, (timing, flag)) in all.chain(of_id.map(|pair| (commands[1], pair))) {
        let app: &[&str] = if command[1] == "preview" || timing == file {
            &[]
        } else {
            &["--app", "x"]
        };
        let refused = output_of(&[command, app, &timing, &flag].concat());
        assert_eq!(refused.code, Some(2), "{refused:?}");
        let lines = ["cannot be used with", timing[0], flag[0]];
        let conflict = refused.stderr.split("Usage:").next().unwrap();
        for part in lines {
            assert!(
                conflict.contains(part),
                "{part}: {command:?} {timing:?} {flag:?} {refused:?}"
            );
        }
    }
}
