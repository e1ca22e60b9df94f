//! What `redeliver jobs` and `redeliver dlq` say to those who ask, who got something wrong, or whom no service
//! answers.

use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{binary, free_port};

use crate::support::{Printed, run};

fn asked(arguments: &[&str]) -> Printed {
    let mut command = binary("redeliver");
    command.args(arguments);
    run(command)
}

/// A command is refused with this text and the code for wrong usage, before any service is asked.
#[track_caller]
fn refuses(arguments: &[&str], expected: &str) {
    let printed = asked(arguments);
    let expected = Printed {
        code: Some(2),
        stdout: String::new(),
        stderr: expected.to_owned(),
    };
    assert_eq!(printed, expected, "{arguments:?}");
}

#[test]
fn verbs_are_listed() {
    let jobs = "\
Schedule, look up and cancel jobs

Usage: redeliver jobs <COMMAND>

Commands:
  schedule    Schedule a job
  get         Show one job
  cancel      Cancel a job; exit code 1 if it was dispatched, or is not known
  reschedule  Give a job another time; exit code 1 if it keeps its own
  ls          List jobs from the state topic, in the order of their times
  stats       Count waiting jobs, by the minute they are due in
  help        Print this message or the help of the given subcommand(s)

Options:
  -h, --help  Print help
";
    let dlq = "\
List, show and watch dead letters

Usage: redeliver dlq <COMMAND>

Commands:
  ls     List dead letters, the newest first
  show   Show one dead letter: why it failed, where it came from, its headers and payload
  watch  Print dead letters as they come, one line each
  stats  Count dead letters by topic and class
  help   Print this message or the help of the given subcommand(s)

Options:
  -h, --help  Print help
";
    for (command, expected) in [("jobs", jobs), ("dlq", dlq)] {
        let printed = asked(&[command, "--help"]);
        assert_eq!((printed.code, printed.stdout.as_str()), (Some(0), expected));
        // Without a verb there is nothing to do.
        let printed = asked(&[command]);
        assert_eq!((printed.code, printed.stderr.as_str()), (Some(2), expected));
    }
}

#[test]
fn the_flags_of_a_verb_are_explained() {
    let expected = "\
List dead letters, the newest first

Usage: redeliver dlq ls [OPTIONS]

Options:
      --filter <FILTER>     Such as 'error_class = \"permanent\" AND headers.tenant = \"x\" AND retry_count > 3'. Default: all
      --limit <N>           The most to list [default: 50]
      --oldest-first        The oldest first
  -o, --output <FORMAT>     table, json or jsonl; data goes to stdout, everything else to stderr [default: table]
      --config <FILE>       The configuration file; also REDELIVER_CONFIG
      --set <KEY=VALUE>     A setting over file and environment, such as kafka.brokers=kafka:9092; may be repeated
      --print-config        Print the effective configuration without secrets, and exit
      --check               Check the configuration, and exit
      --server <URL>        The inspector, such as http://inspector:50051; also REDELIVER_DLQ. Default: dlq_inspector.listen
      --token-file <FILE>   The file that holds the bearer token; also REDELIVER_TOKEN_FILE. Default: the configuration's
      --ca-file <FILE>      A PEM file of authorities that are trusted beside the machine's own, for https
      --timeout <DURATION>  How long an answer may take [default: 30s]
  -h, --help                Print help
";
    assert_eq!(asked(&["dlq", "ls", "--help"]).stdout, expected);
}

#[test]
fn wrong_usage_is_named_with_what_would_be_right() {
    let more = "\n\nFor more information, try '--help'.\n";
    refuses(
        &["jobs", "schedule", "--app", "a"],
        &format!(
            "error: the following required arguments were not provided:\n  <--at <TIME>|--in <DURATION>>\n\n\
             Usage: redeliver jobs schedule --app <NAME> <--at <TIME>|--in <DURATION>>{more}"
        ),
    );
    refuses(
        &["jobs", "schedule", "--app", "a", "--at", "tomorrow"],
        &format!(
            "error: invalid value 'tomorrow' for '--at <TIME>': `tomorrow` is not an RFC 3339 time such as \
             2026-01-31T12:00:00.000Z{more}"
        ),
    );
    refuses(
        &["jobs", "schedule", "--app", "a", "--in", "1 hour"],
        &format!(
            "error: invalid value '1 hour' for '--in <DURATION>': `1 hour` is not a duration: write a whole number \
             and a unit, such as 500ms, 5s, 2m, 1h or 7d{more}"
        ),
    );
    refuses(
        &[
            "jobs",
            "schedule",
            "--app",
            "a",
            "--in",
            "1s",
            "--priority",
            "urgent",
        ],
        &format!(
            "error: invalid value 'urgent' for '--priority <PRIORITY>': `urgent` is not one of high, normal or \
             low{more}"
        ),
    );
    refuses(
        &["jobs", "get", "x"],
        &format!(
            "error: invalid value 'x' for '<ID>': `x` is not the id of a job, which has 26 characters such as \
             01KAJQ6Z2B0003000000000A7X{more}"
        ),
    );
    refuses(
        &["jobs", "ls", "--state", "done"],
        &format!(
            "error: invalid value 'done' for '--state <STATE>': `done` is not one of scheduled, dispatched, \
             cancelled or expired{more}"
        ),
    );
    refuses(
        &["dlq", "ls", "-o", "yaml"],
        &format!(
            "error: invalid value 'yaml' for '--output <FORMAT>'\n  [possible values: table, json, jsonl]{more}"
        ),
    );
    refuses(
        &["dlq", "ls", "--server", "ftp://inspector:50051"],
        "error: `ftp://inspector:50051` must begin with http:// or https://\n",
    );
    refuses(
        &["dlq", "ls", "--token-file", "/nowhere"],
        "error: --token-file: cannot read /nowhere: No such file or directory (os error 2)\n",
    );
    refuses(
        &[
            "jobs",
            "schedule",
            "--app",
            "",
            "--in",
            "1s",
            "--server",
            "127.0.0.1:1",
        ],
        "error: the request is not valid\ncaused by: app is empty\n",
    );
}

#[test]
fn a_service_that_does_not_answer_is_named_with_its_address() {
    let address = format!("127.0.0.1:{}", free_port());
    let id = "01KAJQ6Z2B0003000000000A7X";
    let cases: [(&[&str], &str, &str); 8] = [
        (
            &["jobs", "schedule", "--app", "a", "--in", "1s"],
            "scheduler",
            "scheduler",
        ),
        (&["jobs", "get", id], "scheduler", "scheduler"),
        (&["jobs", "cancel", id], "scheduler", "scheduler"),
        (&["jobs", "stats"], "scheduler", "scheduler"),
        (&["dlq", "ls"], "inspector of dead letters", "dlq_inspector"),
        (
            &["dlq", "show", "a-dlq/0/1"],
            "inspector of dead letters",
            "dlq_inspector",
        ),
        (&["dlq", "watch"], "inspector of dead letters", "dlq_inspector"),
        (&["dlq", "stats"], "inspector of dead letters", "dlq_inspector"),
    ];
    for (arguments, service, section) in cases {
        let expected = Printed {
            code: Some(1),
            stdout: String::new(),
            stderr: format!(
                "error: no {service} answers at http://{address}; --server or {section}.listen says where it is\n\
                 caused by: Connection refused (os error 111)\n"
            ),
        };
        // By flag, by configuration, and by environment.
        let listen = format!("{section}.listen={address}");
        assert_eq!(asked(&[arguments, &["--server", &address]].concat()), expected);
        assert_eq!(asked(&[arguments, &["--set", &listen]].concat()), expected);
        let mut command = binary("redeliver");
        let variable = if section == "scheduler" {
            "REDELIVER_SCHEDULER"
        } else {
            "REDELIVER_DLQ"
        };
        command.args(arguments).env(variable, &address);
        // As `run`, which would clear the variable.
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8(output.stderr).unwrap(), expected.stderr);
    }
    let nobody = asked(&["jobs", "ls", "--set", &format!("kafka.brokers={address}")]);
    let expected = format!("error: reading topic `scheduler.jobs.state` of kafka at {address}\n");
    let problem = nobody
        .stderr
        .lines()
        .find(|line| line.starts_with("error: "))
        .unwrap_or_default();
    assert_eq!(
        (nobody.code, format!("{problem}\n")),
        (Some(1), expected),
        "{nobody:?}"
    );
}

#[test]
fn a_command_that_shall_only_check_the_configuration_does_nothing_else() {
    let scratch = Scratch::new("golden").unwrap();
    let file = scratch.path().join("redeliver.yaml");
    std::fs::write(
        &file,
        "scheduler: { listen: '127.0.0.1:1' }\ndlq_inspector: { listen: '127.0.0.1:1' }\n",
    )
    .unwrap();
    let file = file.to_str().unwrap();
    for arguments in [
        &["jobs", "stats"][..],
        &["jobs", "ls"],
        &["jobs", "schedule", "--app", "a", "--in", "1s"],
        &["dlq", "ls"],
        &["dlq", "watch"],
    ] {
        let printed = asked(&[arguments, &["--check", "--config", file]].concat());
        assert_eq!(printed.stdout, "the configuration is valid\n", "{printed:?}");
    }
}
