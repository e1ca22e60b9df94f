//! The output of the CLI: help, wrong usage, and unavailable services.

use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{CommandOutput, binary, free_port, run};

use crate::services::path;
use crate::support::words;

fn output_of(arguments: &[&str]) -> CommandOutput {
    let mut command = binary("redeliver");
    command.args(arguments);
    run(command)
}

#[test]
fn subcommands_are_listed() {
    for (command, expected) in [
        ("jobs", "schedule get cancel reschedule ls stats apps help"),
        ("waiting", "ls stats show retry dead edit actions help"),
        (
            "schedules",
            "create set update ls get pause resume trigger preview delete help",
        ),
        (
            "dlq",
            "ls show watch export stats count groups group redrive edit import redrives discard restore audit help",
        ),
        ("dlq group", "show resolve mute reopen note help"),
        ("topics", "apply check render migrate-offsets help"),
        ("tokens", "new help"),
    ] {
        let command = words(command);
        let printed = output_of(&[&command[..], &["--help"]].concat());
        assert_eq!(printed.code, Some(0), "{printed:?}");
        let (_, list) = printed.stdout.split_once("\nCommands:\n").unwrap();
        let lines = list.lines().take_while(|line| !line.is_empty());
        let names: Vec<&str> = lines.filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(names.join(" "), expected);
        // Without a subcommand.
        let alone = output_of(&command);
        assert_eq!((alone.code, alone.stderr), (Some(2), printed.stdout));
    }
}

/// Before a service is contacted.
#[test]
fn wrong_usage_names_valid_values() {
    let files = Scratch::new("plaintext-token").unwrap();
    let token = files.path().join("token");
    std::fs::write(&token, "s3cret").unwrap();
    let with_token =
        |command: &str| format!("{command} --token-file {} --server other.invalid:1", path(&token));
    let in_plaintext =
        "the token is not sent to http://other.invalid:1 in plaintext; use https://, or --insecure\n";
    for (arguments, says) in [
        (
            "jobs schedule --app a",
            "the following required arguments were not provided:\n  <--at <TIME>|--in <DURATION>|--file <FILE>>\n",
        ),
        (
            "jobs schedule --app a --at soon",
            "`soon` is not a time: write one such as 2026-01-31T12:00:00Z, a duration such as 2h (from now), today, yesterday or tomorrow\n",
        ),
        (
            "jobs schedule --app a --in 1hour",
            "`1hour` is not a duration: write a whole number and a unit, such as 500ms, 5s, 2m, 1h or 7d\n",
        ),
        (
            "jobs schedule --app a --in 1s --priority urgent",
            "`urgent` is not one of high, normal or low\n",
        ),
        (
            "jobs schedule --app a --in 1h --data-file /nowhere",
            "--data-file: cannot read /nowhere: ",
        ),
        (
            "jobs get x",
            "`x` is not a job id; a job id has 26 characters, such as 01KAJQ6Z2B0003000000000A7X\n",
        ),
        (
            "jobs cancel --app a",
            "an ID is required, or --app with --idempotency-key or, to cancel all, with --all\n",
        ),
        (
            "jobs ls --state done",
            "`done` is not one of scheduled, dispatched, cancelled or expired\n",
        ),
        (
            "jobs ls --api --state expired",
            "--state expired cannot be used with --api: the scheduler lists only waiting jobs\n",
        ),
        (
            "jobs ls --from 2026-01-02T00:00:00Z --until 2026-01-02T00:00:00Z",
            "--until is not later than --from\n",
        ),
        (
            "jobs ls --server 127.0.0.1:1",
            "Usage: redeliver jobs ls --api --server <URL>\n",
        ),
        ("dlq ls -o yaml", "[possible values: table, json, jsonl]\n"),
        // Exporting everything must be explicit.
        ("dlq export", "Usage: redeliver dlq export --filter <FILTER>\n"),
        (
            "dlq export --all --file /",
            "--file: / exists; --force overwrites it\n",
        ),
        (
            "dlq redrives show 1f --expected-revision 2",
            "'--expected-revision'",
        ),
        (
            "dlq redrive --all --plan --start-at 2126-01-01T00:00:00Z",
            "cannot be used with",
        ),
        (
            "dlq edit a-dlq/0/1 --yes --value a --null-value",
            "cannot be used with",
        ),
        (
            "waiting ls --origin a/x",
            "write topic, topic/partition or topic/partition/offset\n",
        ),
        (
            "trace a",
            "is not topic/partition/offset, such as crawl-jobs-dlq/3/1024, and not the id of a job\n",
        ),
        (
            "dlq ls --server ftp://inspector:50051",
            "`ftp://inspector:50051` must begin with http:// or https://\n",
        ),
        (
            "dlq ls --token-file /nowhere",
            "--token-file: cannot read /nowhere: No such file or directory (os error 2)\n",
        ),
        (&with_token("dlq ls"), in_plaintext),
        (&with_token("jobs stats"), in_plaintext),
        (&with_token("trace a/0/1"), in_plaintext),
    ] {
        let printed = output_of(&words(arguments));
        assert_eq!((printed.code, &*printed.stdout), (Some(2), ""), "{arguments}");
        assert!(
            printed.stderr.starts_with("error: ") && printed.stderr.contains(says),
            "{arguments}: {}",
            printed.stderr
        );
    }
}

#[test]
fn unavailable_service_is_named() {
    let address = format!("127.0.0.1:{}", free_port());
    for (command, service, section, variable) in [
        ("jobs stats", "scheduler", "scheduler", "REDELIVER_SCHEDULER"),
        ("dlq ls", "inspector", "dlq_inspector", "REDELIVER_DLQ"),
        ("dlq watch", "inspector", "dlq_inspector", "REDELIVER_DLQ"),
        ("dlq export --all", "inspector", "dlq_inspector", "REDELIVER_DLQ"),
        ("trace a/0/1", "inspector", "dlq_inspector", "REDELIVER_DLQ"),
    ] {
        let expected = CommandOutput {
            code: Some(1),
            stdout: String::new(),
            stderr: format!(
                "error: cannot connect to the {service} at http://{address}; set its address with --server or \
                 {section}.listen\ncaused by: Connection refused (os error 111)\n"
            ),
        };
        // From a flag, the configuration, and the environment.
        let of_flag = format!("{command} --server {address}");
        assert_eq!(output_of(&words(&of_flag)), expected);
        let configured = format!("{command} --set {section}.listen={address}");
        assert_eq!(output_of(&words(&configured)), expected);
        let mut command_line = binary("redeliver");
        command_line.args(words(command)).env(variable, &address);
        // Not with `run`, which would clear the variable.
        let output = command_line.output().unwrap();
        assert_eq!(String::from_utf8(output.stderr).unwrap(), expected.stderr);
    }
    let unreachable = output_of(&["jobs", "ls", "--set", &format!("kafka.brokers={address}")]);
    let expected = format!("error: cannot read topic `scheduler.jobs.state` from Kafka at {address}\n");
    assert_eq!(unreachable.code, Some(1), "{unreachable:?}");
    assert!(unreachable.stderr.contains(&expected), "{unreachable:?}");
}

#[test]
fn check_does_nothing_else() {
    let scratch = Scratch::new("golden").unwrap();
    let file = scratch.path().join("redeliver.yaml");
    // Nothing listens there, so anything beyond a check would fail.
    let nowhere = "kafka: { brokers: '127.0.0.1:1' }\nscheduler: { listen: '127.0.0.1:1' }\n\
                   dlq_inspector: { listen: '127.0.0.1:1' }\npipelines: { p: { output: q } }\n";
    std::fs::write(&file, nowhere).unwrap();
    for command in [
        "topics apply",
        "topics check",
        "audit",
        "jobs stats",
        "jobs apps",
        "jobs ls",
        "jobs schedule --app a --in 1s",
        "dlq ls",
        "dlq watch",
        "waiting stats",
        "trace a/0/1",
    ] {
        let printed = output_of(&words(&format!("{command} --check --config {}", path(&file))));
        assert_eq!(printed.stdout, "the configuration is valid\n", "{printed:?}");
        let printed = output_of(&words(&format!(
            "{command} --print-config --config {}",
            path(&file)
        )));
        assert!(printed.stdout.contains("\npipelines:\n"), "{printed:?}");
    }
}
