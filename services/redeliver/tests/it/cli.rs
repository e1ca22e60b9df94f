//! `redeliver jobs` and `redeliver dlq` on the real services.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use redeliver_core::JobId;
use redeliver_testkit::{Process, ensure, eventually};
use serde_json::{Value, json};

use crate::services::{APP, Services, id, path};
use crate::support::{DEADLINE, text, words};

#[test]
fn jobs_are_managed_by_commands() {
    let services = Services::new("cli-jobs");
    let _scheduler = services.pipe.scheduler("a");
    let schedule = format!(
        "jobs schedule --app {APP} --at 2098-11-22T08:00:00Z --data {{\"a\":1}} --key k --header a=b --header a=c \
         --priority high --idempotency-key x"
    );
    let id = services.cli(&words(&schedule)).trim_end().to_owned();
    assert!(id.parse::<JobId>().is_ok(), "{id}");

    let job = services.json(&["jobs", "get", &id]);
    let expected = json!({
        "id": id,
        "app": APP,
        "state": "scheduled",
        "priority": "high",
        "scheduled_time": "2098-11-22T08:00:00.000Z",
        "data": r#"{"a":1}"#,
        "key": "k",
        "headers": [{ "name": "a", "value": "b" }, { "name": "a", "value": "c" }],
        "idempotency_key": "x",
        "revision": 1,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&job[name], value, "{name} of {job}");
    }
    let shown = services.cli(&["jobs", "get", &id]);
    for line in [
        &format!("id               {id}\n"),
        "\nheaders\n  a: b\n  a: c\n",
        "\ndata, 7 bytes\n{\"a\":1}\n",
    ] {
        assert!(shown.contains(line), "{line:?} in {shown}");
    }

    // The same request again is the same job. Another request with its key is rejected.
    let again = eventually("the scheduler knows its cluster", DEADLINE, || {
        let again = services.pipe.redeliver(&words(&schedule));
        let is_named = again.stderr.starts_with("cluster ");
        ensure(is_named, format!("{again:?}")).map(|()| again)
    });
    assert_eq!((again.code, again.stdout.trim_end()), (Some(0), id.as_str()));
    let said = again.stderr.lines().nth(1).unwrap();
    assert!(said.starts_with("duplicate: "), "{again:?}");
    let refused = services.fails(1, &words(&schedule.replace("--key k", "--key other")));
    assert!(
        refused.stderr.contains(&id) && refused.stderr.contains("(ALREADY_EXISTS)"),
        "{refused:?}"
    );
    let stats = services.json(&["jobs", "stats"]);
    assert_eq!((&stats["scheduled"], &stats["later"]), (&json!(1), &json!(1)));
    assert_eq!(stats["next_due"], json!("2098-11-22T08:00:00.000Z"));

    // By its id, and by its idempotency key.
    let by_key = format!("--app {APP} --idempotency-key y");
    let other = services.cli(&words(&format!("jobs schedule --in 1h {by_key}")));
    for (id, named) in [(id.as_str(), id.clone()), (other.trim_end(), by_key)] {
        let moved = services.cli(&words(&format!(
            "jobs reschedule {named} --at 2098-11-23T08:00:00Z"
        )));
        assert_eq!(
            moved,
            format!("job {id} rescheduled to 2098-11-23T08:00:00.000Z\n")
        );
        let cancel = format!("jobs cancel {named}");
        assert_eq!(services.cli(&words(&cancel)), format!("job {id} cancelled\n"));
        // Cancelling again succeeds, and rescheduling a cancelled job fails.
        let gone = format!("job {id} was already cancelled at ");
        let again = services.cli(&words(&cancel));
        assert!(again.starts_with(&gone), "{again}");
        let late = services.fails(1, &words(&format!("jobs reschedule {named} --in 1h")));
        assert!(late.stdout.starts_with(&gone), "{late:?}");
        assert_eq!(services.json(&["jobs", "get", id])["state"], json!("cancelled"));
    }

    let unknown = words("jobs cancel --app demo --idempotency-key unknown");
    assert_eq!(
        services.fails(1, &unknown).stdout,
        format!("no job of {APP} has the idempotency key unknown, or the key is no longer in use\n")
    );
    let unknown = services.fails(1, &[&unknown[..], &["-o", "json"]].concat());
    let unknown: Value = serde_json::from_str(&unknown.stdout).unwrap();
    assert_eq!(unknown, json!({ "id": null, "outcome": "unknown", "job": null }));
    let missing = "01KAJQ6Z2B0000000000000A7X";
    let said = format!("job {missing} not found: it never existed, or it ended and is no longer kept");
    let unknown = services.fails(1, &["jobs", "get", missing]);
    // No inspector is running.
    let asked = format!("error: {said}; cannot ask the inspector: ");
    assert!(unknown.stderr.starts_with(&asked), "{unknown:?}");
    let unknown = services.fails(1, &["jobs", "cancel", missing]);
    assert_eq!(unknown.stdout, format!("{said}\n"));
    let unknown = services.fails(1, &words("jobs schedule --app dmeo --in 1h"));
    assert!(
        unknown.stderr.contains("`dmeo`") && unknown.stderr.contains("(NOT_FOUND)"),
        "{unknown:?}"
    );

    // Data of a file, byte for byte.
    let data = services.pipe.env.directory().join("data");
    std::fs::write(&data, b"\xff\x00\n").unwrap();
    let schedule = format!("jobs schedule --app {APP} --in 1h --data-file {}", path(&data));
    let id = services.cli(&words(&schedule));
    let job = services.json(&["jobs", "get", id.trim_end()]);
    assert_eq!(job["data_base64"], json!("/wAK"));
    let shown = services.cli(&["jobs", "get", id.trim_end()]);
    assert!(shown.ends_with("\ndata, 3 bytes\nff 00 0a\n"), "{shown}");
}

#[test]
fn jobs_of_file_are_listed() {
    let services = Services::new("cli-file");
    let _scheduler = services.pipe.scheduler("a");
    let file = services.pipe.env.directory().join("jobs.jsonl");
    let job = |app: &str, minute: usize| {
        let time = format!("2098-01-01T{:02}:{:02}:00Z", minute / 60, minute % 60);
        json!({"appName": app, "scheduledTime": time, "idempotencyKey": minute.to_string(), "jobData": 1})
            .to_string()
    };
    // More than a batch, and than a page.
    let mut lines: Vec<String> = (0..1_205).map(|key| job(APP, key)).collect();
    lines.insert(3, String::new());
    std::fs::write(&file, lines.join("\n")).unwrap();
    let schedule = format!("jobs schedule --file {} -o jsonl", path(&file));
    let schedule = words(&schedule);
    let results = |printed: &str| -> Vec<Value> {
        let lines = printed.lines();
        lines.map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let scheduled = results(&services.cli(&schedule));
    assert_eq!(scheduled.len(), 1_205);
    assert!(
        scheduled.iter().all(|result| result["outcome"] == "scheduled"),
        "{scheduled:?}"
    );
    assert_eq!(
        (&scheduled[2]["line"], &scheduled[3]["line"]),
        (&json!(3), &json!(5))
    );
    // The valid jobs of a file are scheduled, the others fail.
    let lines = [job(APP, 0), "{".to_owned(), job("unknown", 1), job(APP, 1_205)];
    std::fs::write(&file, lines.join("\n")).unwrap();
    let partly = services.fails(1, &schedule);
    assert!(partly.stderr.ends_with("\n2 jobs failed\n"), "{partly:?}");
    let partly = results(&partly.stdout);
    assert_eq!(
        (&partly[0]["outcome"], &partly[0]["id"]),
        (&json!("duplicate"), &scheduled[0]["id"])
    );
    let message = partly[1]["error"]["message"].as_str().unwrap();
    assert!(message.contains("EOF"), "{partly:?}");
    assert_eq!(partly[2]["error"]["reason"], "APPLICATION_UNKNOWN");
    assert_eq!(partly[3]["outcome"], "scheduled");
    services.cli(&["jobs", "cancel", partly[3]["id"].as_str().unwrap()]);

    // The scheduler lists the same jobs as the state topic, page by page.
    for flags in [
        "--limit 2000",
        "--limit 1205 -o jsonl",
        "--app demo -o json --limit 2000",
        "--from 2098-01-01T01:00:00Z --until 2098-01-01T02:00:00Z -o jsonl --limit 60",
        "--state scheduled --from 2098-01-01T20:00:00Z",
    ] {
        let of_topic = services.cli(&words(&format!("jobs ls {flags}")));
        let of_api = services.cli(&words(&format!("jobs ls --api {flags}")));
        assert_eq!(of_api, of_topic, "{flags:?}");
    }
    for command in ["jobs ls", "jobs ls --api", "jobs stats", "schedules ls"] {
        let unknown = services.fails(1, &words(&format!("{command} --app nope")));
        assert!(unknown.stderr.contains("nope"), "{unknown:?}");
    }
    let all = services.json(&words("jobs ls --api --limit 2000"));
    let keys = all
        .as_array()
        .unwrap()
        .iter()
        .map(|job| job["idempotency_key"].clone());
    assert!(keys.eq((0..1_205).map(|key| json!(key.to_string()))));
    let cut = services
        .pipe
        .redeliver(&words("jobs ls --api --limit 3 -o jsonl"));
    assert_eq!((cut.code, cut.stdout.lines().count()), (Some(0), 3));
    assert_eq!(cut.stderr, "showing the first 3 jobs; use --limit to show more\n");
    let apps = services.json(&["jobs", "apps"]);
    let app = apps
        .as_array()
        .unwrap()
        .iter()
        .find(|app| app["name"] == APP)
        .unwrap();
    assert_eq!((&app["paused"], &app["due"]), (&json!(false), &json!(0)), "{app}");
    let shown = services.cli(&["jobs", "apps"]);
    assert!(
        shown.contains("APP") && shown.contains(app["topic"].as_str().unwrap()),
        "{shown}"
    );
    let stats = services.json(&["jobs", "stats", "--app", APP]);
    assert_eq!(stats["scheduled"], json!(1_205));
}

#[test]
fn jobs_are_listed_without_scheduler() {
    let services = Services::new("cli-list");
    let mut scheduler = services.pipe.scheduler("a");
    let schedule = |flags: &[&str]| {
        let printed = services.cli(&[&["jobs", "schedule", "--app", APP], flags].concat());
        printed.trim_end().to_owned()
    };
    let late = schedule(&["--at", "2098-01-02T00:00:00Z"]);
    let early = schedule(&["--at", "2098-01-01T00:00:00Z", "--idempotency-key", "e"]);
    let cancelled = schedule(&["--at", "2097-01-01T00:00:00Z"]);
    services.cli(&["jobs", "cancel", &cancelled]);
    let done = schedule(&["--in", "0s"]);
    services.dispatched(1);
    scheduler.shut_down();

    let ids = |flags: &[&str]| -> Vec<String> {
        let listed = services.json(&[&["jobs", "ls"], flags].concat());
        let ids = listed.as_array().unwrap().iter();
        ids.map(|job| job["id"].as_str().unwrap().to_owned()).collect()
    };
    // What comes next is first; jobs that have ended follow only on request, those that ended last first.
    let waiting = [&early, &late].map(String::clone);
    assert_eq!(ids(&[]), waiting);
    assert_eq!(ids(&["--state", "scheduled"]), waiting);
    assert_eq!(
        ids(&["--all"]),
        [&early, &late, &done, &cancelled].map(String::clone)
    );
    let table = services.cli(&["jobs", "ls", "--all"]);
    let first_column = table.lines().skip(1).filter_map(|line| line.split(' ').next());
    let shown: Vec<&str> = first_column.collect();
    assert_eq!(shown, [&early, &late, &done, &cancelled]);
    assert_eq!(ids(&["--app", APP, "--state", "cancelled"]), [cancelled]);

    let cut = services
        .pipe
        .redeliver(&["jobs", "ls", "--state", "scheduled", "--limit", "1"]);
    let expected = format!(
        "ID                          APP   STATE      DUE                       PRIORITY  ENDED  IDEMPOTENCY KEY\n\
         {early}  demo  scheduled  2098-01-01T00:00:00.000Z  normal    -      e\n"
    );
    assert_eq!((cut.code, cut.stdout), (Some(0), expected));
    assert_eq!(cut.stderr, "showing 1 of 2 jobs; use --limit to show more\n");
}

#[test]
fn jobs_of_file_survive_scheduler_restart() {
    let services = Services::new("cli-file-restart");
    let mut scheduler = services.pipe.scheduler("a");
    let arguments = ["jobs", "schedule", "--file", "-", "-o", "jsonl"];
    let mut command = services.pipe.command("redeliver", &arguments);
    let pipes = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut sending = pipes.spawn().unwrap();
    let mut input = sending.stdin.take().unwrap();
    // Without idempotency keys: nothing is sent again that could have been written.
    let job = json!({"appName": APP, "delay": "1h", "jobData": 1}).to_string() + "\n";
    input.write_all(job.repeat(1_000).as_bytes()).unwrap();
    let results = BufReader::new(sending.stdout.take().unwrap()).lines();
    let mut results = results.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let first: Vec<Value> = results.by_ref().take(1_000).collect();
    assert!(
        first.iter().all(|result| result["outcome"] == "scheduled"),
        "{first:?}"
    );
    scheduler.shut_down();
    let long = "x".repeat(3 << 20) + "\n";
    for lines in [&job, &long, &job] {
        input.write_all(lines.as_bytes()).unwrap();
    }
    drop(input);
    let mut notes = BufReader::new(sending.stderr.take().unwrap()).lines();
    let mut said = notes.by_ref().map(Result::unwrap);
    let note = said.find(|note| !note.starts_with("cluster ")).unwrap();
    assert!(
        note.starts_with("the scheduler refuses jobs for now; they are sent again: "),
        "{note}"
    );
    scheduler.start_again();
    let results: Vec<Value> = results.collect();
    assert_eq!(results.len(), 3);
    let failed: Vec<_> = results
        .iter()
        .filter(|result| result["outcome"] != "scheduled")
        .collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0]["line"], 1_002);
    assert_eq!(
        failed[0]["error"]["message"],
        "the line is longer than 2097152 bytes"
    );
    // A scheduler that has just started may refuse jobs for another reason.
    assert_eq!(notes.last().unwrap().unwrap(), "1 jobs failed");
    assert_eq!(sending.wait().unwrap().code(), Some(1));
    let listed = services.cli(&["jobs", "ls", "--limit", "2000", "-o", "jsonl"]);
    assert_eq!(listed.lines().count(), 1_002);
}

#[test]
fn dead_letters_are_listed_and_watched() {
    let services = Services::new("cli-dead");
    let (_enricher, mut inspector) = (services.pipe.enricher("a"), services.inspect());
    let letters = services.produce_dead_letters(&["hopeless 1", "hopeless 2\u{1b}[31m"]);
    let (first, second) = (id(&letters[0]), id(&letters[1]));
    let ids = |flags: &[&str]| -> Vec<String> {
        let listed = services.json(&[&["dlq", "ls"], flags].concat());
        let ids = listed["dead_letters"].as_array().unwrap().iter();
        ids.map(|letter| letter["id"].as_str().unwrap().to_owned())
            .collect()
    };
    let newest_first = [second.clone(), first.clone()];
    eventually("both dead letters are listed", DEADLINE, || {
        let found = ids(&[]);
        ensure(found == newest_first, format!("{found:?}"))
    });
    assert_eq!(ids(&["--oldest-first"]), [first.clone(), second.clone()]);
    assert_eq!(ids(&["--filter", "error_class = \"transient\""]), [""; 0]);
    let cut = services
        .pipe
        .redeliver(&["dlq", "ls", "--limit", "1", "-o", "jsonl"]);
    let lines: Vec<Value> = cut
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let [only, completeness] = &lines[..] else {
        panic!("{cut:?}");
    };
    assert!(completeness["completeness"]["complete"].is_boolean(), "{cut:?}");
    assert_eq!(
        (only["id"].as_str(), only.get("value")),
        (Some(second.as_str()), None)
    );
    assert!(cut.stderr.contains("more dead letters match; "), "{cut:?}");
    eventually("the list is complete", DEADLINE, || {
        let listed = services
            .pipe
            .redeliver(&["dlq", "ls", "--require-complete", "-o", "json"]);
        let value: Value = serde_json::from_str(&listed.stdout).unwrap();
        let holds = listed.code == Some(0) && value["completeness"]["complete"] == json!(true);
        ensure(holds, format!("{listed:?}"))
    });
    let wrong = services.fails(1, &["dlq", "ls", "--filter", "eror_class = 1"]);
    assert!(
        wrong.stderr.contains("eror_class") && wrong.stderr.contains("(INVALID_ARGUMENT)"),
        "{wrong:?}"
    );

    let shown = services.cli(&["dlq", "show", &second]);
    let message = text(&letters[1], "error-message").unwrap().unwrap();
    let origin = |name| text(&letters[1], name).unwrap().unwrap();
    for part in [
        &format!("id          {second}\nstate       open\n"),
        &format!("class       permanent\ncode        http.404\nmessage     {message}\n"),
        &format!(
            "origin      {}/{}/{}\n",
            origin("original-topic"),
            origin("original-partition"),
            origin("original-offset")
        ),
        "\nheaders\n  tenant: x\n",
        "\npayload, 15 bytes\nhopeless 2\\u{1b}[31m\n",
    ] {
        assert!(shown.contains(part), "{part:?} in {shown}");
    }
    let whole = services.json(&["dlq", "show", &second]);
    assert_eq!(whole["value"], json!("hopeless 2\u{1b}[31m"));
    assert_eq!(whole["headers"][0], json!({ "name": "tenant", "value": "x" }));
    assert_eq!(
        services.cli(&["dlq", "show", &second, "--payload"]),
        "hopeless 2\u{1b}[31m"
    );
    let topic = services.pipe.pipeline.dead_letter_topic();
    let csv = services.cli(&words(
        "dlq count --by headers.tenant,error_code --since 1h -o csv",
    ));
    assert_eq!(csv, "headers.tenant,error_code,count\nx,http.404,2\n");
    let counts = services.json(&words("dlq count --by pipeline,state"));
    assert_eq!(counts["total"], json!(2));
    assert_eq!(ids(&["--until", "1h"]), [""; 0]);
    assert_eq!(ids(&["--since", "1d", "--until", "+1h"]), newest_first);
    // Kafka keeps them for 30 days, which the inspector asks for from time to time.
    eventually("the retention is known", DEADLINE, || {
        let asked = ["dlq", "ls", "--expires-within", "29d"];
        let answer = services.pipe.redeliver(&asked);
        ensure(answer.code == Some(0), format!("{answer:?}"))
    });
    assert_eq!(ids(&["--expires-within", "29d"]), [""; 0]);
    assert_eq!(ids(&["--expires-within", "31d"]), newest_first);
    let of_days = services.pipe.redeliver(&["dlq", "ls", "--since", "yesterday"]);
    assert!(of_days.stderr.starts_with("yesterday: from "), "{of_days:?}");
    assert_eq!(of_days.stdout.lines().count(), 3, "{of_days:?}");
    let missing = services.fails(1, &["dlq", "show", &format!("{topic}/0/999999")]);
    assert!(missing.stderr.contains("not found"), "{missing:?}");

    // Both have one cause. Their messages may differ in numbers.
    let groups = services.json(&["dlq", "groups", "--sort", "count"]);
    let [group] = &groups["groups"].as_array().unwrap()[..] else {
        panic!("{groups}");
    };
    let group_id = group["id"].as_str().unwrap();
    assert_eq!((&group["open"], &group["count"]), (&json!(2), &json!(2)));
    assert_eq!(group["sample_id"], json!(second));
    let in_group = format!("group = {group_id}");
    assert_eq!(ids(&["--filter", &in_group]), newest_first);
    let shown = services.cli(&["dlq", "group", "show", group_id]);
    assert!(
        shown.contains(&format!("topics       {topic} 2\nnewest       {second}\n")),
        "{shown}"
    );
    let resolved = services.json(&["dlq", "group", "resolve", group_id, "--reason", "fixed"]);
    assert_eq!(
        (
            &resolved["state"],
            &resolved["state_reason"],
            &resolved["revision"],
            &resolved["count"]
        ),
        (&json!("resolved"), &json!("fixed"), &json!(1), &json!(2))
    );
    let of_state = |state: &str| {
        let groups = services.json(&["dlq", "groups", "--state", state]);
        groups["groups"].as_array().unwrap().len()
    };
    assert_eq!((of_state("resolved"), of_state("open")), (1, 0));
    let until = "2999-01-01T00:00:00.000Z";
    let mute = format!("dlq group mute {group_id} --reason known --until {until}");
    let muted = services.cli(&words(&mute));
    assert!(
        muted.contains(&format!("muted until  {until}\n")) && muted.contains("reason       known\n"),
        "{muted}"
    );
    let noted = services.json(&["dlq", "group", "note", group_id, "see the runbook"]);
    assert_eq!(
        (&noted["state"], &noted["note"], &noted["revision"]),
        (&json!("muted"), &json!("see the runbook"), &json!(3))
    );
    let stale = services.fails(
        1,
        &["dlq", "group", "reopen", group_id, "--expected-revision", "2"],
    );
    assert!(
        stale.stderr.contains("has revision 3") && stale.stderr.contains("(ABORTED)"),
        "{stale:?}"
    );
    let reopened = services.json(&["dlq", "group", "reopen", group_id, "--expected-revision", "3"]);
    assert_eq!(
        (&reopened["state"], &reopened["note"]),
        (&json!("open"), &json!("see the runbook"))
    );
    let missing = services.fails(1, &["dlq", "group", "show", "0000000000000000"]);
    assert!(missing.stderr.contains("not found"), "{missing:?}");

    let stats = services.json(&["dlq", "stats"]);
    assert_eq!(stats["completeness"]["states_known"], json!(true));
    let stats = &stats["topics"][0];
    assert_eq!((&stats["topic"], &stats["open"]), (&json!(&*topic), &json!(2)));
    assert_eq!(stats["open_by_class"], json!({ "permanent": 2 }));
    assert!(services.cli(&["dlq", "stats"]).contains(&*topic));

    // A watch continues after a restart of the inspector without gaps.
    let mut watch = Process::spawn(
        services
            .pipe
            .command("redeliver", &["dlq", "watch", "-o", "jsonl"]),
    )
    .unwrap();
    watch.wait_for_output("caught up; waiting for new dead letters", DEADLINE);
    let third = id(&services.produce_dead_letters(&["hopeless 3"])[0]);
    watch.wait_for_output(&third, DEADLINE);
    inspector.kill_9();
    watch.wait_for_output("connection lost; reconnecting", DEADLINE);
    let fourth = id(&services.produce_dead_letters(&["hopeless 4"])[0]);
    let _inspector = services.inspect();
    let output = watch.wait_for_output(&fourth, DEADLINE);
    for letter in [&first, &second, &third, &fourth] {
        assert_eq!(
            output.matches(&format!("\"id\":\"{letter}\"")).count(),
            1,
            "{letter} in {output}"
        );
    }
}
