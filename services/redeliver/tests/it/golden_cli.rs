//! The output of `redeliver jobs`, `redeliver dlq` and the commands of control: help, wrong usage, and unavailable services.

use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{CommandOutput, binary, free_port, run};

fn output_of(arguments: &[&str]) -> CommandOutput {
    let mut command = binary("redeliver");
    command.args(arguments);
    run(command)
}

/// The command must fail with this message and the exit status for wrong usage, before it contacts a service.
#[track_caller]
fn refuses(arguments: &[&str], expected: &str) {
    let printed = output_of(arguments);
    let expected = CommandOutput {
        code: Some(2),
        stdout: String::new(),
        stderr: expected.to_owned(),
    };
    assert_eq!(printed, expected, "{arguments:?}");
}

#[test]
fn the_help_of_jobs_ls_says_which_jobs_are_listed() {
    let help = output_of(&["jobs", "ls", "--help"]).stdout;
    let shown = "\
List waiting jobs, those that are due next first

Usage: redeliver jobs ls [OPTIONS]

Options:
      --app <NAME>          List only jobs of this application, or long waits of this pipeline
      --state <STATE>       List jobs in this state: scheduled (default), dispatched, cancelled or expired
      --all                 List also jobs that have ended, after the waiting ones, those that ended last first
      --from <TIME>         List only jobs that are due at or after this time, such as 2026-11-22T08:00:00Z
      --until <TIME>        List only jobs that are due before this time
      --limit <N>           Maximum number of jobs [default: 50]
      --timeout <DURATION>  Maximum time to read the topic or, with --api, for a request [default: 5m]
      --api                 Ask the scheduler instead of reading the state topic from Kafka; it lists only waiting jobs
      --server <URL>        URL of the scheduler, such as http://scheduler:50052; overrides REDELIVER_SCHEDULER (default: scheduler.listen)
";
    assert!(help.starts_with(shown), "{help}");
}

#[test]
fn subcommands_are_listed() {
    let jobs = "\
Schedule, show and cancel jobs

Usage: redeliver jobs <COMMAND>

Commands:
  schedule    Schedule a job, or the jobs of a file
  get         Show one job
  cancel      Cancel a job; exits with status 1 if it was already dispatched or is unknown
  reschedule  Change the due time of a job; exits with status 1 if the job has ended or is unknown
  ls          List waiting jobs, those that are due next first
  stats       Count waiting jobs by the minute in which they are due
  help        Print this message or the help of the given subcommand(s)

Options:
  -h, --help  Print help
";
    let dlq = "\
List, show, watch, export, redrive and discard dead letters

Usage: redeliver dlq <COMMAND>

Commands:
  ls        List dead letters, newest first
  show      Show a dead letter: failure, origin, headers and payload
  watch     Print dead letters as they arrive, one line each
  export    Write dead letters to a file or to stdout, byte for byte; exits with status 3 if parts are missing
  stats     Count dead letters by topic and class
  groups    List groups of dead letters that fail for the same reason
  group     Show or change a group: resolve, mute, reopen, note
  redrive   Write the records of dead letters to their pipelines again; exits with status 3 if not all were done
  edit      Redrive one dead letter with another value, other headers or another key; exits with status 3 if it was not done
  import    Redrive the dead letters of an exported file that are still the same; exits with status 3 if not all were done
  redrives  List or change redrives, discards and restores
  discard   Discard dead letters, so that no redrive takes them; exits with status 3 if not all were done
  restore   Open discarded dead letters again; exits with status 3 if not all were done
  audit     Show who has changed or seen what, oldest first
  help      Print this message or the help of the given subcommand(s)

Options:
  -h, --help  Print help
";
    let topics = "\
Create, check or print the topics that the configuration needs

Usage: redeliver topics <COMMAND>

Commands:
  apply            Create missing topics and report misconfigured ones; existing topics are never changed
  check            Report missing and misconfigured topics; exits with status 1 on errors, 0 on warnings
  render           Print what creates the topics, for clusters on which Redeliver may not
  migrate-offsets  Copy committed offsets to groups with another kafka.id_prefix; all processes must be stopped
  help             Print this message or the help of the given subcommand(s)

Options:
  -h, --help  Print help
";
    let schedules = "\
Create, preview, list and change recurring schedules

Usage: redeliver schedules <COMMAND>

Commands:
  create   Create a schedule; exits with status 1 if another one has the id
  set      Change parts of a schedule; what no flag names stays as it is
  update   Replace the whole definition of a schedule by that of a file
  ls       List schedules, those whose next occurrence is due first; paused and finished ones last
  get      Show one schedule
  pause    Pause a schedule
  resume   Resume a paused schedule
  trigger  Create one additional job now
  preview  Show the next occurrences of a definition, without a scheduler, or of a schedule
  delete   Delete a schedule; the jobs that it has created stay
  help     Print this message or the help of the given subcommand(s)

Options:
  -h, --help  Print help
";
    let waiting = "\
List and count the failed records that wait for their next attempt

Usage: redeliver waiting <COMMAND>

Commands:
  ls     List waiting records, those that are due first
  stats  Count waiting records by pipeline and place, with their attempts, due times and error codes
  help   Print this message or the help of the given subcommand(s)

Options:
  -h, --help  Print help
";
    for (command, expected) in [
        ("jobs", jobs),
        ("waiting", waiting),
        ("schedules", schedules),
        ("dlq", dlq),
        ("topics", topics),
    ] {
        let printed = output_of(&[command, "--help"]);
        assert_eq!((printed.code, printed.stdout.as_str()), (Some(0), expected));
        // Without a subcommand.
        let printed = output_of(&[command]);
        assert_eq!((printed.code, printed.stderr.as_str()), (Some(2), expected));
    }
}

#[test]
fn the_flags_of_a_subcommand_are_explained() {
    let expected = "\
List dead letters, newest first

Usage: redeliver dlq ls [OPTIONS]

Options:
      --filter <FILTER>     Filter, such as 'error_class = \"permanent\" AND headers.tenant = \"x\" AND retry_count > 3' (default: all). json./POINTER matches plain JSON values only, not decoded ones
      --limit <N>           Maximum number of dead letters [default: 50]
      --oldest-first        List the oldest first
      --require-complete    Exit with status 3 if the answer is incomplete
  -o, --output <FORMAT>     Output format: table, json or jsonl [default: table]
      --config <FILE>       Configuration file; overrides REDELIVER_CONFIG
      --set <KEY=VALUE>     Override a setting, such as kafka.brokers=kafka:9092; may be repeated
      --print-config        Print the effective configuration without secrets and exit
      --check               Validate the configuration and exit
      --server <URL>        URL of the inspector, such as http://inspector:50051; overrides REDELIVER_DLQ (default: dlq_inspector.listen)
      --token-file <FILE>   File with the bearer token; overrides REDELIVER_TOKEN_FILE (default: from the configuration)
      --insecure            Send the token to other machines without TLS, too; or REDELIVER_INSECURE=true
      --ca-file <FILE>      Additional CA certificates (PEM) for https; overrides REDELIVER_CA_FILE
      --cert-file <FILE>    Client certificate (PEM) for https; overrides REDELIVER_CERT_FILE
      --key-file <FILE>     Private key of the client certificate (PEM); overrides REDELIVER_KEY_FILE
      --timeout <DURATION>  Timeout of a request [default: 30s]
  -h, --help                Print help
";
    assert_eq!(output_of(&["dlq", "ls", "--help"]).stdout, expected);
    let shown = "\
Write dead letters to a file or to stdout, byte for byte; exits with status 3 if parts are missing

Usage: redeliver dlq export [OPTIONS]

Options:
      --filter <FILTER>     Which dead letters: a filter, such as 'state = OPEN AND pipeline = \"greetings\"'
      --all                 All dead letters
      --file <FILE>         File to create, once all is written; only its owner can read it (default: stdout)
      --force               Overwrite the file
      --why <REASON>        Why you read payloads, for the audit log
      --config <FILE>       Configuration file; overrides REDELIVER_CONFIG
";
    let help = output_of(&["dlq", "export", "--help"]).stdout;
    assert!(help.starts_with(shown), "{help}");
    let shown = "\
Show a dead letter: failure, origin, headers and payload

Usage: redeliver dlq show [OPTIONS] <ID>

Arguments:
  <ID>  Position in the dead-letter topic: topic/partition/offset

Options:
      --payload [<FORMAT>]  Write only the payload to stdout: raw (byte for byte), json (indented), text (control characters are escaped) or hex; exits with status 3 if parts of it are masked
      --why <REASON>        Why you read payloads, for the audit log
      --require-complete    Exit with status 3 if the answer is incomplete
";
    let help = output_of(&["dlq", "show", "--help"]).stdout;
    assert!(help.starts_with(shown), "{help}");
    let expected = "\
Copy committed offsets to groups with another kafka.id_prefix; all processes must be stopped

Usage: redeliver topics migrate-offsets [OPTIONS] --from-prefix <PREFIX>

Options:
      --from-prefix <PREFIX>  Prefix of the groups whose offsets are copied; \"\" for none
      --to-prefix <PREFIX>    Prefix of the groups that get the offsets [default: kafka.id_prefix]
      --config <FILE>         Configuration file; overrides REDELIVER_CONFIG
      --set <KEY=VALUE>       Override a setting, such as kafka.brokers=kafka:9092; may be repeated
      --print-config          Print the effective configuration without secrets and exit
      --check                 Validate the configuration and exit
  -h, --help                  Print help
";
    assert_eq!(
        output_of(&["topics", "migrate-offsets", "--help"]).stdout,
        expected
    );
}

#[test]
fn the_help_of_dlq_group_says_how_a_group_is_changed() {
    let expected = "\
Show or change a group: resolve, mute, reopen, note

Usage: redeliver dlq group <COMMAND>

Commands:
  show     Show a group: why its dead letters belong together, its state, counts and trend
  resolve  Say that the reason is gone; a dead letter that is written later makes the group regressed
  mute     Say that the group is known and wanted, so that it is in no alert about groups
  reopen   Set the state back to open
  note     Set the note, a text for others
  help     Print this message or the help of the given subcommand(s)

Options:
  -h, --help  Print help
";
    assert_eq!(output_of(&["dlq", "group", "--help"]).stdout, expected);
    let expected = "\
Say that the group is known and wanted, so that it is in no alert about groups

Usage: redeliver dlq group mute [OPTIONS] --why <TEXT> <ID>

Arguments:
  <ID>  The id of the group: 16 hexadecimal digits, as `redeliver dlq groups` prints it

Options:
      --why <TEXT>             Why, for others; at most 1000 bytes
      --until <TIME>           Until when, such as 2026-11-30T08:00:00Z (default: until somebody changes it); nothing tells that the time is over
      --expected-revision <N>  Fail unless it has this revision; 0: nobody has changed it yet
  -o, --output <FORMAT>        Output format: table, json or jsonl [default: table]
";
    let help = output_of(&["dlq", "group", "mute", "--help"]).stdout;
    assert!(help.starts_with(expected), "{help}");
}

#[test]
fn a_command_that_changes_no_job_expects_no_revision_and_a_plan_has_no_start() {
    for verb in ["show", "items", "wait"] {
        let refused = output_of(&["dlq", "redrives", verb, "1f", "--expected-revision", "2"]);
        assert_eq!(refused.code, Some(2), "{verb}: {refused:?}");
        assert!(
            refused.stderr.contains("'--expected-revision'"),
            "{verb}: {refused:?}"
        );
    }
    let start = ["--plan", "--start-at", "2126-01-01T00:00:00Z"];
    let refused = output_of(&[&["dlq", "redrive", "--all"], &start[..]].concat());
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("cannot be used with"), "{refused:?}");
}

#[test]
fn the_help_of_edit_says_what_can_be_changed() {
    let expected = "\
Redrive one dead letter with another value, other headers or another key; exits with status 3 if it was not done

Usage: redeliver dlq edit [OPTIONS] <ID>

Arguments:
  <ID>  Position in the dead-letter topic: topic/partition/offset

Options:
      --value <TEXT>          New value, as text (default: the value as it is; without any change on a terminal, the editor of VISUAL or EDITOR opens it)
      --value-file <FILE>     File with the new value; - for standard input
      --null-value            Set the value to null
      --key <KEY>             New key, as text; the record may then be in another partition (default: the key as it is)
      --null-key              Set the key to null
      --header <NAME=VALUE>   Header to add in place of all with its name; may be repeated, also with the same name
      --remove-header <NAME>  Header to remove, all with this name; may be repeated
      --destination <TOPIC>   Topic to write to, one of the pipeline or of dlq_inspector.redrive.destinations (default: the return topic of the pipeline, or the original topic)
      --force                 Redrive also what has come back dlq_inspector.redrive.max_count times
      --observe <DURATION>    How long to wait for what comes back, after each of the first batches and at the end (default: the sum of the pipeline's retry delays, and 30s)
      --why <TEXT>            Why, for others; at most 1000 bytes
";
    let help = output_of(&["dlq", "edit", "--help"]).stdout;
    assert!(help.starts_with(expected), "{help}");
}

#[test]
fn the_help_of_control_says_what_is_changed_and_how() {
    // A backslash at the end of a line would remove the indentation of the next one.
    let change = "      --expected-revision <N>  Fail unless it has this revision; 0: nobody has changed it yet
  -o, --output <FORMAT>        Output format: table, json or jsonl [default: table]
      --config <FILE>          Configuration file; overrides REDELIVER_CONFIG
      --set <KEY=VALUE>        Override a setting, such as kafka.brokers=kafka:9092; may be repeated
      --print-config           Print the effective configuration without secrets and exit
      --check                  Validate the configuration and exit
      --server <URL>           URL of a scheduler or an inspector; overrides REDELIVER_SCHEDULER and REDELIVER_DLQ (default: scheduler.listen, or dlq_inspector.listen without applications)
      --token-file <FILE>      File with the bearer token; overrides REDELIVER_TOKEN_FILE (default: from the configuration)
      --insecure               Send the token to other machines without TLS, too; or REDELIVER_INSECURE=true
      --ca-file <FILE>         Additional CA certificates (PEM) for https; overrides REDELIVER_CA_FILE
      --cert-file <FILE>       Client certificate (PEM) for https; overrides REDELIVER_CERT_FILE
      --key-file <FILE>        Private key of the client certificate (PEM); overrides REDELIVER_KEY_FILE
      --timeout <DURATION>     Timeout of a request [default: 30s]
  -h, --help                   Print help
";
    for (command, expected) in [
        (
            "pause",
            "\
Pause an application, a pipeline or a tier at run time: nothing is lost, and nothing goes on

Usage: redeliver pause [OPTIONS] --why <TEXT> <NAME>

Arguments:
  <NAME>  What to pause: app/APPLICATION, pipeline/PIPELINE, tier/PIPELINE/TIER or tier/TIER

Options:
      --why <TEXT>             Why, for others; at most 1000 bytes
",
        ),
        (
            "resume",
            "\
Resume what is paused, also an application that the configuration pauses

Usage: redeliver resume [OPTIONS] <NAME>

Arguments:
  <NAME>  What to resume, such as app/sms, pipeline/docs, tier/docs/30s or tier/30s

Options:
      --as-configured          Return to the configuration, also with the rate
      --why <TEXT>             Why, for others; at most 1000 bytes
",
        ),
        (
            "rate",
            "\
Limit how many jobs of an application are dispatched, attempts of a pipeline started, or records of a tier released, per second

Usage: redeliver rate [OPTIONS] --why <TEXT> <NAME> <RATE>

Arguments:
  <NAME>  What to limit, such as app/sms, pipeline/docs, tier/docs/30s or tier/30s
  <RATE>  How many per second at most, by all processes together; `unlimited`, or `configured`

Options:
      --why <TEXT>             Why, for others; at most 1000 bytes
",
        ),
        (
            "release",
            "\
Release what waits now in a tier or in the scheduler, before it is due

Usage: redeliver release [OPTIONS] --why <TEXT> <NAME>

Arguments:
  <NAME>  A tier of a pipeline, such as tier/docs/30s, or of all pipelines, such as tier/30s; tier/docs/scheduler for what waits in the scheduler

Options:
      --why <TEXT>             Why, for others; at most 1000 bytes
",
        ),
    ] {
        let help = output_of(&[command, "--help"]).stdout;
        assert_eq!(help, format!("{expected}{change}"), "{command}");
    }
    let expected = "\
List what is paused, limited or changed, by whom and why

Usage: redeliver controls [OPTIONS] [NAME]

Arguments:
  [NAME]  Show only this one, such as tier/docs/30s

Options:
  -o, --output <FORMAT>     Output format: table, json or jsonl [default: table]
      --config <FILE>       Configuration file; overrides REDELIVER_CONFIG
      --set <KEY=VALUE>     Override a setting, such as kafka.brokers=kafka:9092; may be repeated
      --print-config        Print the effective configuration without secrets and exit
      --check               Validate the configuration and exit
      --server <URL>        URL of a scheduler or an inspector; overrides REDELIVER_SCHEDULER and REDELIVER_DLQ (default: scheduler.listen, or dlq_inspector.listen without applications)
      --token-file <FILE>   File with the bearer token; overrides REDELIVER_TOKEN_FILE (default: from the configuration)
      --insecure            Send the token to other machines without TLS, too; or REDELIVER_INSECURE=true
      --ca-file <FILE>      Additional CA certificates (PEM) for https; overrides REDELIVER_CA_FILE
      --cert-file <FILE>    Client certificate (PEM) for https; overrides REDELIVER_CERT_FILE
      --key-file <FILE>     Private key of the client certificate (PEM); overrides REDELIVER_KEY_FILE
      --timeout <DURATION>  Timeout of a request [default: 30s]
  -h, --help                Print help
";
    assert_eq!(output_of(&["controls", "--help"]).stdout, expected);
}

#[test]
fn the_help_of_tokens_new_names_the_areas_of_scopes() {
    let expected = "\
Create a token, and print it with its entry for the file of auth.tokens_file

Usage: redeliver tokens new --name <NAME> --scope <SCOPE>

Options:
      --name <NAME>    The name of its holder, for messages and logs
      --scope <SCOPE>  What its holder may do, such as jobs:read, jobs:write:billing-*, control:write or dead-letters:read; can be repeated
  -h, --help           Print help
";
    assert_eq!(output_of(&["tokens", "new", "--help"]).stdout, expected);
}

#[test]
fn wrong_usage_is_reported_with_valid_values() {
    let more = "\n\nFor more information, try '--help'.\n";
    refuses(
        &["jobs", "schedule", "--app", "a"],
        &format!(
            "error: the following required arguments were not provided:\n  <--at <TIME>|--in <DURATION>|--file <FILE>>\n\n\
             Usage: redeliver jobs schedule --app <NAME> <--at <TIME>|--in <DURATION>|--file <FILE>>{more}"
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
            "error: invalid value 'x' for '<ID>': `x` is not a job id; a job id has 26 characters, such as \
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
        &["jobs", "ls", "--all", "--state", "cancelled"],
        "error: the argument '--all' cannot be used with '--state <STATE>'\n\n\
         Usage: redeliver jobs ls --all\n\n\
         For more information, try '--help'.\n",
    );
    refuses(
        &["jobs", "ls", "--api", "--state", "expired"],
        "error: --state expired cannot be used with --api: the scheduler lists only waiting jobs\n",
    );
    refuses(
        &[
            "jobs",
            "ls",
            "--from",
            "2026-01-02T00:00:00Z",
            "--until",
            "2026-01-02T00:00:00Z",
        ],
        "error: --until is not later than --from\n",
    );
    refuses(
        &["jobs", "ls", "--server", "127.0.0.1:1"],
        "error: the following required arguments were not provided:\n  --api\n\n\
         Usage: redeliver jobs ls --api --server <URL>\n\n\
         For more information, try '--help'.\n",
    );
    refuses(
        &["dlq", "ls", "-o", "yaml"],
        &format!(
            "error: invalid value 'yaml' for '--output <FORMAT>'\n  [possible values: table, json, jsonl]{more}"
        ),
    );
    // Nobody exports everything by mistake.
    refuses(
        &["dlq", "export"],
        &format!(
            "error: the following required arguments were not provided:\n  --filter <FILTER>\n\n\
             Usage: redeliver dlq export --filter <FILTER>{more}"
        ),
    );
    refuses(
        &["dlq", "export", "--all", "--file", "/"],
        "error: --file: / exists; --force overwrites it\n",
    );
    refuses(
        &["dlq", "export", "--all", "--file", "/nowhere/letters.jsonl"],
        "error: --file: cannot create /nowhere/letters.jsonl: entity not found\n",
    );
    refuses(
        &["waiting", "ls", "--origin", "a/x"],
        &format!(
            "error: invalid value 'a/x' for '--origin <ORIGIN>': write topic, topic/partition or topic/partition/offset{more}"
        ),
    );
    refuses(
        &["trace", "a"],
        &format!(
            "error: invalid value 'a' for '<POSITION>': is not topic/partition/offset, such as crawl-jobs-dlq/3/1024{more}"
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
    let file = Scratch::new("plaintext-token").unwrap();
    let token = file.path().join("token");
    std::fs::write(&token, "s3cret").unwrap();
    for command in [&["dlq", "ls"], &["jobs", "stats"], &["trace", "a/0/1"]] {
        let token = ["--token-file", token.to_str().unwrap()];
        refuses(
            &[&command[..], &token, &["--server", "other.invalid:1"]].concat(),
            "error: the token is not sent to http://other.invalid:1 in plaintext; use https://, or --insecure\n",
        );
    }
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
fn an_unavailable_service_is_reported_with_its_address() {
    let address = format!("127.0.0.1:{}", free_port());
    let id = "01KAJQ6Z2B0003000000000A7X";
    let cases: [(&[&str], &str, &str); 18] = [
        (
            &["jobs", "schedule", "--app", "a", "--in", "1s"],
            "scheduler",
            "scheduler",
        ),
        (&["jobs", "get", id], "scheduler", "scheduler"),
        (&["jobs", "cancel", id], "scheduler", "scheduler"),
        (&["jobs", "stats"], "scheduler", "scheduler"),
        (&["jobs", "ls", "--api"], "scheduler", "scheduler"),
        (&["dlq", "ls"], "inspector", "dlq_inspector"),
        (&["dlq", "show", "a-dlq/0/1"], "inspector", "dlq_inspector"),
        (&["dlq", "watch"], "inspector", "dlq_inspector"),
        (&["dlq", "export", "--all"], "inspector", "dlq_inspector"),
        (&["dlq", "stats"], "inspector", "dlq_inspector"),
        (&["dlq", "groups"], "inspector", "dlq_inspector"),
        (&["dlq", "group", "show", "00"], "inspector", "dlq_inspector"),
        (&["dlq", "group", "resolve", "00"], "inspector", "dlq_inspector"),
        (
            &["dlq", "group", "mute", "00", "--why", "x"],
            "inspector",
            "dlq_inspector",
        ),
        (&["dlq", "group", "note", "00", "x"], "inspector", "dlq_inspector"),
        (&["waiting", "ls"], "inspector", "dlq_inspector"),
        (&["waiting", "stats"], "inspector", "dlq_inspector"),
        (&["trace", "a/0/1"], "inspector", "dlq_inspector"),
    ];
    for (arguments, service, section) in cases {
        let expected = CommandOutput {
            code: Some(1),
            stdout: String::new(),
            stderr: format!(
                "error: cannot connect to the {service} at http://{address}; set its address with --server or \
                 {section}.listen\ncaused by: Connection refused (os error 111)\n"
            ),
        };
        // From a flag, the configuration, and the environment.
        let listen = format!("{section}.listen={address}");
        assert_eq!(
            output_of(&[arguments, &["--server", &address]].concat()),
            expected
        );
        assert_eq!(output_of(&[arguments, &["--set", &listen]].concat()), expected);
        let mut command = binary("redeliver");
        let variable = if section == "scheduler" {
            "REDELIVER_SCHEDULER"
        } else {
            "REDELIVER_DLQ"
        };
        command.args(arguments).env(variable, &address);
        // Not with `run`, which would clear the variable.
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8(output.stderr).unwrap(), expected.stderr);
    }
    let unreachable = output_of(&["jobs", "ls", "--set", &format!("kafka.brokers={address}")]);
    let expected = format!("error: cannot read topic `scheduler.jobs.state` from Kafka at {address}\n");
    let problem = unreachable
        .stderr
        .lines()
        .find(|line| line.starts_with("error: "))
        .unwrap_or_default();
    assert_eq!(
        (unreachable.code, format!("{problem}\n")),
        (Some(1), expected),
        "{unreachable:?}"
    );
}

#[test]
fn a_check_of_the_configuration_does_nothing_else() {
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
        &["waiting", "stats"],
        &["trace", "a/0/1"],
    ] {
        let printed = output_of(&[arguments, &["--check", "--config", file]].concat());
        assert_eq!(printed.stdout, "the configuration is valid\n", "{printed:?}");
    }
}
