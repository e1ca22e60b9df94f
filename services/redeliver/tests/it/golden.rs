//! The output of the binaries: help, errors of the configuration, and the state of topics.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{CommandOutput, ServiceProcess, binary, brokers, eventually, run};

use crate::raw;
use crate::support::{DEADLINE, PipeBuilder, without_other_tests};

/// A valid configuration with a broker that does not exist.
const VALID: &str = "\
kafka: { brokers: '127.0.0.1:1' }
admin: { listen: '127.0.0.1:0' }
pipelines:
  p:
    output: q
    retry: { tiers: [5s, 30s] }
    http: { url: 'http://localhost/' }
";

/// Runs a binary with a configuration file. The path of the file is replaced by `FILE` in the output.
fn with_file(name: &str, content: &str, arguments: &[&str]) -> CommandOutput {
    let scratch = Scratch::new("golden").unwrap();
    let file = scratch.path().join("redeliver.yaml");
    std::fs::write(&file, content).unwrap();
    let mut command = binary(name);
    command.args(arguments).arg("--config").arg(&file);
    let printed = run(command);
    let hide = |text: String| text.replace(file.to_str().unwrap(), "FILE");
    CommandOutput {
        stdout: hide(printed.stdout),
        // Without log lines, which start with a time.
        stderr: hide(printed.stderr)
            .lines()
            .filter(|line| !line.starts_with("20"))
            .map(|line| format!("{line}\n"))
            .collect(),
        ..printed
    }
}

/// The binary must reject this configuration with this message and the exit status for wrong usage.
#[track_caller]
fn rejects(name: &str, content: &str, arguments: &[&str], expected: &str) {
    let printed = with_file(name, content, arguments);
    let expected = CommandOutput {
        code: Some(2),
        stdout: String::new(),
        stderr: expected.to_owned(),
    };
    assert_eq!(printed, expected, "{name} {arguments:?}\n{content}");
}

/// As [`rejects`], with a line added to a valid file.
#[track_caller]
fn rejects_with(name: &str, more: &str, arguments: &[&str], expected: &str) {
    rejects(name, &format!("{VALID}{more}\n"), arguments, expected);
}

#[test]
fn yaml_that_cannot_be_parsed_is_reported_with_its_line() {
    rejects(
        "enricher",
        "kafka: [\n",
        &[],
        "error: FILE line 1: invalid YAML: unclosed bracket '['\n",
    );
}

#[test]
fn an_unknown_key_is_reported_with_its_line_and_a_suggestion() {
    rejects_with(
        "enricher",
        "retry_teir: { tiers: [5s] }",
        &[],
        "error: retry_teir: unknown key, did you mean `retry_tier`? (FILE line 8)\n",
    );
}

#[test]
fn a_duration_without_a_unit_is_reported_with_examples() {
    rejects_with(
        "enricher",
        "shutdown: { grace: '5' }",
        &[],
        "error: shutdown.grace: `5` is not a duration: write a whole number and a unit, such as 500ms, 5s, 2m, \
         1h or 7d (FILE line 8)\n",
    );
}

#[test]
fn several_problems_are_reported_at_once() {
    rejects(
        "enricher",
        "kafka: { lanes: 0, batch: 0 }\n",
        &[],
        "error: the configuration has 2 problems\n  \
           kafka.lanes: 0 is out of range: must be between 1 and 64 (FILE line 1)\n  \
           kafka.batch: 0 is out of range: must be between 1 and 100000 (FILE line 1)\n",
    );
}

#[test]
fn an_unknown_tier_is_rejected() {
    rejects_with(
        "retry-tier",
        "",
        &["--tier", "7s"],
        "error: retry_tier.tiers: no pipeline has the tier 7s; expected one of 5s, 30s. To serve a leftover tier, set \
         retry_tier.leftovers: true (--set retry_tier.tiers)\n",
    );
    // Only Kafka knows which leftover tiers exist.
    let arguments = ["--tier", "7s", "--set", "retry_tier.leftovers=true", "--check"];
    let printed = with_file("retry-tier", VALID, &arguments);
    assert_eq!(printed.stdout, "the configuration is valid\n", "{printed:?}");
}

#[test]
fn a_missing_configuration_file_is_reported() {
    let missing = "error: cannot read the configuration file /nowhere.yaml\n\
                   caused by: No such file or directory (os error 2)\n";
    for (name, arguments) in [
        ("enricher", &[][..]),
        ("retry-tier", &[]),
        ("redeliver", &["topics", "check"]),
        ("redeliver", &["audit"]),
    ] {
        let mut command = binary(name);
        command.args(arguments).args(["--config", "/nowhere.yaml"]);
        let printed = run(command);
        assert_eq!(
            (printed.code, printed.stderr.as_str()),
            (Some(2), missing),
            "{name}"
        );
    }
}

#[test]
fn a_port_in_use_is_reported() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    for (name, field) in [
        ("enricher", "admin.listen"),
        ("retry-tier", "admin.listen"),
        ("scheduler", "scheduler.listen"),
        ("dlq-inspector", "dlq_inspector.listen"),
    ] {
        let printed = with_file(name, VALID, &["--set", &format!("{field}={address}")]);
        let expected = format!(
            "error: {field}: {address} is in use by another process; choose another port, or 0 for a free one\n"
        );
        assert_eq!((printed.code, printed.stderr), (Some(1), expected));
    }
}

/// The valid file with another `http` section.
fn with_http(http: &str) -> String {
    VALID.replace("{ url: 'http://localhost/' }", http)
}

#[test]
fn a_check_reports_the_same_problems_as_a_start() {
    let cases = [
        (
            "{ url: 'http://localhost/', header_files: { authorization: /nowhere/token } }",
            "header_files.authorization: cannot read /nowhere/token: No such file or directory (os error 2)",
        ),
        (
            "{ url: 'https://localhost/', tls: { ca_file: /nowhere/ca } }",
            "tls.ca_file: cannot read /nowhere/ca: No such file or directory (os error 2)",
        ),
    ];
    for (http, problem) in cases {
        let expected = format!("error: pipelines.p.http.{problem}\n");
        for arguments in [&["--check"][..], &[]] {
            rejects("enricher", &with_http(http), arguments, &expected);
        }
    }
    let unknown = "kafka.properties.no.such.property=1";
    let expected = "error: kafka.properties.no.such.property: librdkafka has no such property\n";
    for (name, arguments) in [
        ("enricher", &[][..]),
        ("retry-tier", &[]),
        ("scheduler", &[]),
        ("dlq-inspector", &[]),
        ("redeliver", &["topics", "apply"]),
        ("redeliver", &["topics", "check"]),
        ("redeliver", &["audit"]),
        ("redeliver", &["jobs", "ls"]),
    ] {
        let arguments = [arguments, &["--check", "--set", unknown]].concat();
        rejects(name, VALID, &arguments, expected);
    }
    for (name, content, expected) in [
        (
            "scheduler",
            "redis: { url: 'rediss://localhost:6379', ca_file: /nowhere/ca }\n",
            "error: redis.ca_file: cannot read /nowhere/ca: No such file or directory (os error 2)\n",
        ),
        (
            "scheduler",
            "redis: { url: 'redis://:hunter2@localhost:port' }\n",
            "error: redis.url: redis://:redacted@localhost:port cannot be used: Url Error: InvalidPort\n",
        ),
    ] {
        rejects(name, content, &["--check"], expected);
    }
}

#[test]
fn a_process_without_a_pipeline_exits_with_an_error() {
    for (name, pipelines, expected) in [
        (
            "enricher",
            "{ p: { output: q } }",
            "error: pipelines: none has `http`; configure an endpoint for at least one\n",
        ),
        (
            "retry-tier",
            "{}",
            "error: pipelines: is empty; configure at least one pipeline\n",
        ),
    ] {
        let content = format!("admin: {{ listen: '127.0.0.1:0' }}\npipelines: {pipelines}\n");
        for arguments in [&["--check"][..], &[]] {
            rejects(name, &content, arguments, expected);
        }
    }
}

#[test]
fn a_property_that_librdkafka_rejects_is_reported_without_its_value() {
    let cases = [
        ("sasl.pasword", "hunter2", "librdkafka has no such property"),
        ("linger.ms", "hunter2", "librdkafka cannot parse this value"),
    ];
    for (property, value, problem) in cases {
        let flag = format!("kafka.properties.{property}={value}");
        let expected = format!("error: kafka.properties.{property}: {problem}\n");
        for (name, arguments) in [
            ("enricher", &["--set", &flag][..]),
            ("retry-tier", &["--set", &flag]),
            ("redeliver", &["topics", "apply", "--set", &flag]),
            ("redeliver", &["audit", "--set", &flag]),
        ] {
            rejects_with(name, "", arguments, &expected);
        }
    }
    // The log does not contain it either.
    let mut command = binary("enricher");
    command.args([
        "--set",
        "kafka.properties.sasl.pasword=hunter2",
        "--set",
        "admin.listen=127.0.0.1:0",
    ]);
    let printed = run(command);
    assert!(!format!("{printed:?}").contains("hunter2"), "{printed:?}");
}

/// Neither settings nor variables can weaken what exactly-once delivery depends on, or make transactions time out.
#[test]
fn properties_that_redeliver_relies_on_are_refused_by_every_program() {
    let relies = "cannot be set; Redeliver relies on its value";
    for (property, value, problem) in [
        ("acks", "1", relies),
        ("enable.idempotence", "false", relies),
        ("isolation.level", "read_uncommitted", relies),
        (
            "session.timeout.ms",
            "1000",
            "cannot be set here; set kafka.session_timeout instead",
        ),
        (
            "linger.ms",
            "60000",
            "60000 is out of range: must be between 0 and 1000",
        ),
    ] {
        let flag = format!("kafka.properties.{property}={value}");
        let expected =
            format!("error: kafka.properties.{property}: {problem} (--set kafka.properties.{property})\n");
        for name in ["enricher", "retry-tier", "scheduler", "dlq-inspector"] {
            rejects_with(name, "", &["--set", &flag], &expected);
        }
        rejects_with("redeliver", "", &["topics", "apply", "--set", &flag], &expected);
    }
    let short = "error: kafka.session_timeout: 5s is out of range: must be between 6s and 30m (--set kafka.session_timeout)\n";
    rejects_with("enricher", "", &["--set", "kafka.session_timeout=5s"], short);
}

#[test]
fn the_printed_configuration_can_be_read_back() {
    for name in ["enricher", "retry-tier"] {
        let printed = with_file(
            name,
            VALID,
            &["--print-config", "--set", "instance=a", "--set", "kafka.lanes=3"],
        );
        assert_eq!((printed.code, printed.stderr.as_str()), (Some(0), ""));
        assert!(printed.stdout.contains("  lanes: 3\n"), "{}", printed.stdout);
        let again = with_file(name, &printed.stdout, &["--print-config"]);
        assert_eq!(again, printed);
        assert_eq!(
            with_file(name, &printed.stdout, &["--check"]).stdout,
            "the configuration is valid\n"
        );
    }
}

#[test]
fn a_check_of_the_configuration_does_nothing_else() {
    // There is no Kafka, so anything beyond a check would fail.
    for arguments in [&["topics", "apply"][..], &["topics", "check"], &["audit"]] {
        let printed = with_file("redeliver", VALID, &[arguments, &["--check"]].concat());
        assert_eq!(printed.stdout, "the configuration is valid\n", "{printed:?}");
        let printed = with_file("redeliver", VALID, &[arguments, &["--print-config"]].concat());
        assert!(printed.stdout.contains("\npipelines:\n"), "{printed:?}");
    }
}

fn output_of(name: &str, arguments: &[&str]) -> CommandOutput {
    let mut command = binary(name);
    command.args(arguments);
    run(command)
}

#[test]
fn every_binary_prints_help_and_version() {
    let common = "      --config <FILE>    Configuration file; overrides REDELIVER_CONFIG
      --set <KEY=VALUE>  Override a setting, such as kafka.brokers=kafka:9092; may be repeated
      --print-config     Print the effective configuration without secrets and exit
      --check            Validate the configuration and exit
";
    let end = "  -h, --help             Print help
  -V, --version          Print version
";
    let commands = "  health  Print whether the process that runs with this configuration is ready; exits with status 0 if it is, else 1
  help    Print this message or the help of the given subcommand(s)
";
    let tier = "      --tier <DELAY>     Serve only this tier, such as 30s; may be repeated. Default: retry_tier.tiers, else all
";
    let cases = [
        (
            "enricher",
            "Sends each record of a Kafka topic to an HTTP endpoint and writes a result, a retry or a dead \
             letter, exactly once",
            "      --until-idle[=<DURATION>]  End with status 0 when nothing is left to process, nor due within DURATION, such as 5m (default: 0s)
",
        ),
        (
            "retry-tier",
            "Releases waiting Kafka records to their return topic when they are due, exactly once and never early",
            tier,
        ),
    ];
    for (name, about, own) in cases {
        let expected = format!(
            "{about}\n\nUsage: {name} [OPTIONS] [COMMAND]\n\nCommands:\n{commands}\nOptions:\n{common}{own}{end}"
        );
        let printed = output_of(name, &["--help"]);
        // The width of the first column depends on the longest option.
        let words = |text: &str| {
            text.lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (printed.code, words(&printed.stdout)),
            (Some(0), words(&expected))
        );
    }
    let expected = "\
Delivers each Kafka record at the right moment: jobs when they are due, failed records after a growing delay, each \
exactly once

Usage: redeliver [COMMAND]

Commands:
  dev        Run all services in one process on an embedded broker, with demonstration data (default)
  status     Show what waits, is due, late and dead, on one screen
  topics     Create, check or print the topics that the configuration needs
  acls       Print the permissions that the configuration needs in Kafka
  audit      Verify that every record is once in the output, in the dead letters or waiting
  jobs       Schedule, show and cancel jobs
  schedules  Create, preview, list and change recurring schedules
  pause      Pause an application, a pipeline or a tier at run time: nothing is lost, and nothing goes on
  resume     Resume what is paused, also an application that the configuration pauses
  rate       Limit how many jobs of an application are dispatched, attempts of a pipeline started, or records of a tier released, per second
  release    Release what waits now in a tier or in the scheduler, before it is due
  controls   List what is paused, limited or changed, by whom and why
  dlq        List, show, watch, export, redrive and discard dead letters
  waiting    List and count the failed records that wait for their next attempt
  trace      Show the life of one record: attempts, waits, death and redrive
  tokens     Create tokens for the APIs of the scheduler and the inspector
  help       Print this message or the help of the given subcommand(s)

Options:
  -h, --help     Print help
  -V, --version  Print version
";
    let printed = output_of("redeliver", &["--help"]);
    assert_eq!((printed.code, printed.stdout.as_str()), (Some(0), expected));
    for name in [
        "enricher",
        "retry-tier",
        "scheduler",
        "dlq-inspector",
        "redeliver",
    ] {
        let version = format!(" {}\n", redeliver_runtime::metrics::version());
        let printed = output_of(name, &["--version"]);
        assert!(
            printed.code == Some(0) && printed.stdout.ends_with(&version),
            "{printed:?}"
        );
        assert_eq!(output_of(name, &["--no-such-flag"]).code, Some(2));
    }
}

#[test]
fn services_do_not_start_without_their_topics_which_apply_creates() {
    let pipe = PipeBuilder::new("golden-missing")
        .tiers(&[5_000])
        .without_topics();
    let names: Vec<String> = pipe
        .pipeline
        .topics()
        .iter()
        .map(|(name, _)| name.to_string())
        .collect();
    // The topics of the inspector and the control topic are shared by all installations on a Kafka, so they may or may not exist yet. This creates them.
    let other = PipeBuilder::new("golden-other").tiers(&[5_000]).create();
    drop(other);
    let missing = |indent: &str| -> String {
        let line = |name| {
            format!(
                "{indent}error: topic `{name}` does not exist; create it, or run `redeliver topics apply`\n"
            )
        };
        names.iter().map(line).collect()
    };
    for name in ["enricher", "retry-tier"] {
        let printed = run(pipe.command(name, &[]));
        let expected = format!("error: topics are missing or misconfigured\n{}", missing("  "));
        assert!(printed.stderr.ends_with(&expected), "{printed:?}");
        assert_eq!(printed.code, Some(1));
    }
    let printed = |arguments: &[&str]| {
        let printed = pipe.redeliver(arguments);
        (printed.code, without_other_tests(&printed.stdout))
    };
    let with = |word: &str| -> String { names.iter().map(|name| format!("{word:<8} {name}\n")).collect() };
    assert_eq!(printed(&["topics", "check"]), (Some(1), missing("")));
    let sound = "all 10 topics OK\n";
    let ledger = "exists   redeliver.control\nexists   redeliver.audit\nexists   redeliver.dlq.ledger\nexists   redeliver.dlq.groups\nexists   redeliver.dlq.redrives\n";
    assert_eq!(
        printed(&["topics", "apply"]),
        (Some(0), with("created") + ledger + sound)
    );
    assert_eq!(
        printed(&["topics", "apply"]),
        (Some(0), with("exists") + ledger + sound)
    );
    assert_eq!(printed(&["topics", "check"]), (Some(0), sound.to_owned()));
    pipe.enricher("a").shut_down();
    pipe.retry_tier("a").shut_down();
}

#[test]
fn warnings_are_counted_and_do_not_fail_the_command() {
    let pipe = PipeBuilder::new("golden-warning")
        .tiers(&[5_000])
        .without_topics();
    let due = pipe.pipeline.due_topic();
    raw::create_topic(
        &brokers(),
        &due,
        &[
            ("retention.ms", "604800000"),
            ("retention.bytes", "1000000"),
            ("max.message.bytes", "2000000"),
        ],
    );
    let warning = format!(
        "warning: topic `{due}` has retention.bytes=1000000: a burst could delete released records too \
         early; set its retention.bytes to -1 and limit it with retention.ms\n"
    );
    for verb in ["apply", "check"] {
        let printed = pipe.redeliver(&["topics", verb]);
        assert_eq!(printed.code, Some(0), "{printed:?}");
        let expected = format!("{warning}10 topics, 1 warning\n");
        let stdout = without_other_tests(&printed.stdout);
        assert!(stdout.ends_with(&expected), "{printed:?}");
    }
}

#[test]
fn a_service_creates_its_topics_if_configured() {
    let pipe = PipeBuilder::new("golden-create")
        .set("kafka.topics.create", "true")
        .without_topics();
    let enricher = pipe.enricher("a");
    let output = enricher.output();
    assert_eq!(
        output.matches("topic created").count(),
        pipe.pipeline.topics().len(),
        "{output}"
    );
}

#[test]
fn services_do_not_start_if_a_tier_would_lose_records() {
    let pipe = PipeBuilder::new("golden-tier").tiers(&[5_000]).without_topics();
    let tier = pipe.first_tier();
    raw::create_topic(
        &brokers(),
        &tier,
        &[("cleanup.policy", "compact"), ("retention.ms", "3600000")],
    );
    let due = pipe.pipeline.due_topic();
    raw::create_topic(&brokers(), &due, &[("retention.ms", "60000")]);
    let problems = [
        format!(
            "error: topic `{tier}` is compacted: compaction would drop waiting records that share a key; set its \
             cleanup.policy to delete"
        ),
        format!(
            "error: topic `{due}` deletes released records after 1m, but 7d is configured; set its retention.ms \
             to 604800000 (7d) or more"
        ),
    ];
    let applied = pipe.redeliver(&["topics", "apply"]);
    assert_eq!(applied.code, Some(1), "{applied:?}");
    for name in ["enricher", "retry-tier"] {
        let printed = run(pipe.command(name, &[]));
        assert_eq!(printed.code, Some(1));
        for problem in &problems {
            assert!(
                printed.stderr.contains(&format!("\n  {problem}\n")),
                "{problem}\n{}",
                printed.stderr
            );
        }
    }
    // A tier with a short retention.
    let pipe = PipeBuilder::new("golden-forgets")
        .tiers(&[5_000])
        .without_topics();
    let tier = pipe.first_tier();
    raw::create_topic(
        &brokers(),
        &tier,
        &[("cleanup.policy", "delete"), ("retention.ms", "3600000")],
    );
    let problem = format!(
        "error: topic `{tier}` keeps records for 1h, but they may wait for up to 1d: they could be deleted before \
         they are due, or after a short outage; at least 2d is required; set its retention.ms to 604800000 (7d) or more\n"
    );
    // For a moment, the broker may not know a topic that it has just created.
    eventually("the topic is seen", DEADLINE, || {
        let checked = pipe.redeliver(&["topics", "check"]).stdout;
        if checked.contains(&problem) {
            Ok(())
        } else {
            Err(checked)
        }
    });
}

/// Accepts connections as a broker would, closes each at once, and counts them.
fn dead_broker() -> (String, Arc<AtomicU32>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let count = Arc::new(AtomicU32::new(0));
    let counter = count.clone();
    std::thread::spawn(move || {
        for _ in listener.incoming() {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    });
    (address, count)
}

#[test]
fn without_a_broker_a_service_keeps_running_and_logs_the_reason() {
    let cases = [
        ("enricher", "127.0.0.1:1".to_owned()),
        ("retry-tier", dead_broker().0),
    ];
    for (name, brokers) in cases {
        let setup = PipeBuilder::new("golden-away").brokers(&brokers).tiers(&[5_000]);
        let pipe = setup.without_topics();
        let mut service = pipe.spawn(name, "a", &[]);
        waits_for_kafka(&mut service, &brokers);
        service.shut_down();
    }
}

#[test]
fn a_broker_that_hangs_up_is_retried_often_and_logged_once() {
    let (brokers, attempts) = dead_broker();
    let pipe = PipeBuilder::new("golden-hangs-up")
        .brokers(&brokers)
        .without_topics();
    let mut service = pipe.spawn("enricher", "a", &[]);
    waits_for_kafka(&mut service, &brokers);
    eventually("many attempts", DEADLINE, || {
        match attempts.load(Ordering::Relaxed) {
            count if count >= 15 => Ok(()),
            count => Err(count),
        }
    });
    let output = service.output();
    assert_eq!(output.matches(" WARN ").count(), 1, "{output}");
    service.shut_down();
}

/// The service must be alive, not ready, and have logged the reason once.
#[track_caller]
fn waits_for_kafka(service: &mut ServiceProcess, brokers: &str) {
    let output = service.wait_for_output("Kafka unavailable; retrying", DEADLINE);
    assert_eq!(output.matches(" WARN ").count(), 1, "{output}");
    assert!(output.contains(&format!("brokers=\"{brokers}\"")), "{output}");
    assert_eq!(service.get("/livez"), (200, "alive\n".to_owned()));
    let (status, body) = service.get("/readyz");
    let report: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &report["ready"]), (503, &false.into()));
    assert_eq!(
        report["parts"]["topics"],
        format!("waiting: Kafka at `{brokers}` is unavailable")
    );
    assert!(service.get("/metrics").1.contains("redeliver_build_info"));
}
