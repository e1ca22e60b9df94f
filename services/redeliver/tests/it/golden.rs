//! What the binaries say: to those who ask, and to those who got something wrong.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{binary, brokers, eventually};

use crate::raw;
use crate::support::{Printed, Service, Setup, run, without_other_tests};

/// A configuration that is right, for a broker that nobody listens as.
const SOUND: &str = "\
kafka: { brokers: '127.0.0.1:1' }
admin: { listen: '127.0.0.1:0' }
pipelines:
  p:
    output: q
    retry: { tiers: [5s, 30s] }
    http: { url: 'http://localhost/' }
";

/// Runs a binary with a configuration file of this content, whose path is shown as `FILE`.
fn with_file(name: &str, content: &str, arguments: &[&str]) -> Printed {
    let scratch = Scratch::new("golden").unwrap();
    let file = scratch.path().join("redeliver.yaml");
    std::fs::write(&file, content).unwrap();
    let mut command = binary(name);
    command.args(arguments).arg("--config").arg(&file);
    let printed = run(command);
    let hide = |text: String| text.replace(file.to_str().unwrap(), "FILE");
    Printed {
        stdout: hide(printed.stdout),
        // Lines of the log begin with a time.
        stderr: hide(printed.stderr)
            .lines()
            .filter(|line| !line.starts_with("20"))
            .map(|line| format!("{line}\n"))
            .collect(),
        ..printed
    }
}

/// That a binary refuses this configuration with this text and the code for wrong usage.
#[track_caller]
fn refuses(name: &str, content: &str, arguments: &[&str], expected: &str) {
    let printed = with_file(name, content, arguments);
    let expected = Printed {
        code: Some(2),
        stdout: String::new(),
        stderr: expected.to_owned(),
    };
    assert_eq!(printed, expected, "{name} {arguments:?}\n{content}");
}

/// As [`refuses`], for a line that is added to a sound file.
#[track_caller]
fn refuses_with(name: &str, more: &str, arguments: &[&str], expected: &str) {
    refuses(name, &format!("{SOUND}{more}\n"), arguments, expected);
}

#[test]
fn an_unknown_key_is_named_with_its_line_and_the_nearest_right_one() {
    refuses_with(
        "enricher",
        "retry_teir: { tiers: [5s] }",
        &[],
        "error: retry_teir: unknown key, did you mean `retry_tier`? (FILE line 8)\n",
    );
    refuses_with(
        "retry-tier",
        "    anchr: failure",
        &[],
        "error: pipelines.p.anchr: unknown key, did you mean `anchor`? (FILE line 8)\n",
    );
    refuses_with(
        "enricher",
        "",
        &["--set", "kafka.broker=x:1"],
        "error: kafka.broker: unknown key, did you mean `brokers`? (--set kafka.broker)\n",
    );
}

#[test]
fn a_wrong_unit_is_shown_with_what_would_be_right() {
    let right = "is not a duration: write a whole number and a unit, such as 500ms, 5s, 2m, 1h or 7d";
    for wrong in ["5", "5 sec", "1.5s", "-5s", "soon"] {
        refuses_with(
            "enricher",
            &format!("shutdown: {{ grace: '{wrong}' }}"),
            &[],
            &format!("error: shutdown.grace: `{wrong}` {right} (FILE line 8)\n"),
        );
    }
}

#[test]
fn tiers_beside_a_base_are_a_contradiction() {
    refuses(
        "retry-tier",
        "pipelines:\n  p:\n    retry: { tiers: [5s], base: 2m }\n",
        &[],
        "error: pipelines.p.retry.base: stands beside retry.tiers; write either tiers, or base with factor and \
         cap (FILE line 3)\n",
    );
}

#[test]
fn several_problems_are_named_at_once() {
    refuses(
        "enricher",
        "kafka: { lanes: 0, batch: 0 }\n",
        &[],
        "error: the configuration has 2 problems\n  \
           kafka.lanes: 0 is out of range; it is between 1 and 64 (FILE line 1)\n  \
           kafka.batch: 0 is out of range; it is between 1 and 100000 (FILE line 1)\n",
    );
}

#[test]
fn a_tier_that_no_pipeline_has_is_refused() {
    refuses_with(
        "retry-tier",
        "",
        &["--tier", "7s"],
        "error: retry_tier.tiers: no pipeline has the tier 7s; there are 5s, 30s; to serve one that is left over, set \
         retry_tier.leftovers: true (--set retry_tier.tiers)\n",
    );
    // Which leftovers there are only Kafka knows.
    let arguments = ["--tier", "7s", "--set", "retry_tier.leftovers=true", "--check"];
    let printed = with_file("retry-tier", SOUND, &arguments);
    assert_eq!(printed.stdout, "the configuration is valid\n", "{printed:?}");
}

#[test]
fn a_missing_file_is_named() {
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
    // Before anything else is done: Kafka does not answer here.
    let secret = "    http: { url: 'http://localhost/', header_files: { authorization: /nowhere/token } }\n";
    refuses(
        "enricher",
        &format!(
            "{}{secret}",
            SOUND.replace("    http: { url: 'http://localhost/' }\n", "")
        ),
        &[],
        "error: pipelines.p.http.header_files.authorization: cannot read /nowhere/token: No such file or \
         directory (os error 2)\n",
    );
}

#[test]
fn a_port_that_is_taken_is_named() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    for name in ["enricher", "retry-tier"] {
        let printed = with_file(name, SOUND, &["--set", &format!("admin.listen={address}")]);
        assert_eq!(
            (printed.code, printed.stderr),
            (
                Some(1),
                format!(
                    "error: admin.listen: {address} is in use by another process; choose another port, or 0 for \
                     a free one\n"
                )
            )
        );
    }
}

#[test]
fn a_port_of_an_api_that_is_taken_is_named() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    for (name, field) in [
        ("scheduler", "scheduler.listen"),
        ("dlq-inspector", "dlq_inspector.listen"),
    ] {
        let printed = with_file(name, SOUND, &["--set", &format!("{field}={address}")]);
        assert_eq!(
            (printed.code, printed.stderr),
            (
                Some(1),
                format!(
                    "error: {field}: {address} is in use by another process; choose another port, or 0 for a free \
                     one\n"
                )
            )
        );
    }
}

/// A file in which each section but the named ones is as [`SOUND`] has it.
fn with_http(http: &str) -> String {
    SOUND.replace("{ url: 'http://localhost/' }", http)
}

#[test]
fn a_check_finds_what_a_start_would() {
    let cases = [
        (
            "{ url: 'http://localhost/', header_files: { authorization: /nowhere/token } }",
            "header_files.authorization: cannot read /nowhere/token: No such file or directory (os error 2)",
        ),
        (
            "{ url: 'https://localhost/', tls: { ca_file: /nowhere/ca } }",
            "tls.ca_file: cannot read /nowhere/ca: I/O error: No such file or directory (os error 2)",
        ),
        (
            "{ url: 'http://localhost/', headers: { content-length: '1' } }",
            "headers.content-length: is set by redeliver itself and cannot be configured (FILE line 7)",
        ),
        (
            "{ url: 'http://localhost/', headers: { Idempotency-Key: '1' } }",
            "headers.Idempotency-Key: is set by redeliver itself and cannot be configured (FILE line 7)",
        ),
        (
            "{ url: 'http://localhost/', method: CONNECT }",
            "method: `CONNECT` is not the method of a call: write POST, PUT or another in capitals (FILE line 7)",
        ),
        (
            "{ url: 'http://localhost:99999/' }",
            "url: is not a URL (invalid port number): write http:// or https:// and a host, such as \
             http://localhost:8080/path (FILE line 7)",
        ),
    ];
    for (http, problem) in cases {
        let expected = format!("error: pipelines.p.http.{problem}\n");
        for arguments in [&["--check"][..], &[]] {
            refuses("enricher", &with_http(http), arguments, &expected);
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
        refuses(name, SOUND, &arguments, expected);
    }
    for (name, content, expected) in [
        (
            "enricher",
            "pipelines: { p: { output: q } }\n",
            "error: pipelines: none of them has `http`, so there is nothing to do\n",
        ),
        (
            "retry-tier",
            "kafka: {}\n",
            "error: pipelines: there is none, so there is nothing to do\n",
        ),
        (
            "scheduler",
            "redis: { url: 'rediss://localhost:6379', ca_file: /nowhere/ca }\n",
            "error: redis.ca_file: /nowhere/ca: it cannot be read: I/O error: No such file or directory (os error \
             2)\n",
        ),
        (
            "scheduler",
            "redis: { url: 'redis://:hunter2@localhost:port' }\n",
            "error: redis.url: redis://:redacted@localhost:port cannot be used: Url Error: InvalidPort\n",
        ),
    ] {
        refuses(name, content, &["--check"], expected);
    }
}

#[test]
fn an_admin_port_for_everybody_must_be_asked_for() {
    refuses_with(
        "enricher",
        "",
        &["--set", "admin.listen=0.0.0.0:0"],
        "error: admin.listen: 0.0.0.0:0 can be reached from other machines, and nothing asks for a password \
         there: write 127.0.0.1, or set admin.allow_remote: true (--set admin.listen)\n",
    );
}

#[test]
fn a_property_that_librdkafka_does_not_take_is_named_without_its_value() {
    let cases = [
        ("no.such.property", "1", "librdkafka has no such property"),
        ("sasl.pasword", "hunter2", "librdkafka has no such property"),
        ("linger.ms", "hunter2", "librdkafka cannot read this value"),
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
            refuses_with(name, "", arguments, &expected);
        }
    }
    // Not in the log either.
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

#[test]
fn a_process_without_work_says_so() {
    refuses(
        "enricher",
        "admin: { listen: '127.0.0.1:0' }\npipelines: { p: { output: q } }\n",
        &[],
        "error: pipelines: none of them has `http`, so there is nothing to do\n",
    );
    refuses(
        "retry-tier",
        "admin: { listen: '127.0.0.1:0' }\n",
        &[],
        "error: pipelines: there is none, so there is nothing to do\n",
    );
}

#[test]
fn the_configuration_is_printed_so_that_it_reads_back() {
    for name in ["enricher", "retry-tier"] {
        let printed = with_file(
            name,
            SOUND,
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
fn a_command_that_shall_only_check_the_configuration_does_nothing_else() {
    // Kafka does not answer here, so doing anything else would fail.
    for arguments in [&["topics", "apply"][..], &["topics", "check"], &["audit"]] {
        let printed = with_file("redeliver", SOUND, &[arguments, &["--check"]].concat());
        assert_eq!(printed.stdout, "the configuration is valid\n", "{printed:?}");
        let printed = with_file("redeliver", SOUND, &[arguments, &["--print-config"]].concat());
        assert!(printed.stdout.contains("\npipelines:\n"), "{printed:?}");
    }
}

fn asked(name: &str, arguments: &[&str]) -> Printed {
    let mut command = binary(name);
    command.args(arguments);
    run(command)
}

#[test]
fn help_and_version_are_there_for_every_binary() {
    let common = "      --config <FILE>    The configuration file; also REDELIVER_CONFIG
      --set <KEY=VALUE>  A setting over file and environment, such as kafka.brokers=kafka:9092; may be repeated
      --print-config     Print the effective configuration without secrets, and exit
      --check            Check the configuration, and exit
";
    let end = "  -h, --help             Print help
  -V, --version          Print version
";
    let tier = "      --tier <DELAY>     Serve only this tier, such as 30s; may be repeated. Default: retry_tier.tiers, else all
";
    let cases = [
        (
            "enricher",
            "Sends each record of a Kafka topic to an HTTP endpoint and writes the answer, a retry or a dead \
             letter, exactly once",
            "",
        ),
        (
            "retry-tier",
            "Releases waiting Kafka records to their return topic when they are due, exactly once and never early",
            tier,
        ),
    ];
    for (name, about, own) in cases {
        let expected = format!("{about}\n\nUsage: {name} [OPTIONS]\n\nOptions:\n{common}{own}{end}");
        let printed = asked(name, &["--help"]);
        assert_eq!((printed.code, printed.stdout), (Some(0), expected));
    }
    let expected = "\
Delivers each Kafka record at its right moment: failed ones again after a growing delay, hopeless ones into a \
dead-letter topic, each exactly once

Usage: redeliver [COMMAND]

Commands:
  dev     Run everything in this process on a broker in memory, with a demonstration (the default)
  topics  Create or check the topics of the configured pipelines
  audit   Prove that nothing is lost, doubled, early or altered: in = out + waiting + dead
  jobs    Schedule, look up and cancel jobs
  dlq     List, show and watch dead letters
  help    Print this message or the help of the given subcommand(s)

Options:
  -h, --help     Print help
  -V, --version  Print version
";
    let printed = asked("redeliver", &["--help"]);
    assert_eq!((printed.code, printed.stdout.as_str()), (Some(0), expected));
    for name in [
        "enricher",
        "retry-tier",
        "scheduler",
        "dlq-inspector",
        "redeliver",
    ] {
        let version = format!(" {}\n", redeliver_runtime::metrics::version());
        let printed = asked(name, &["--version"]);
        assert!(
            printed.code == Some(0) && printed.stdout.ends_with(&version),
            "{printed:?}"
        );
        assert_eq!(asked(name, &["--no-such-flag"]).code, Some(2));
    }
}

#[test]
fn a_missing_topic_refuses_to_start_and_apply_is_the_remedy() {
    let pipe = Setup::new("golden-missing").tiers(&[5_000]).without_topics();
    let names: Vec<String> = pipe
        .pipeline
        .topics()
        .iter()
        .map(|(name, _)| name.to_string())
        .collect();
    // All installations that share a Kafka share the ledger, so it is there or not; from here on it is.
    let other = Setup::new("golden-other").tiers(&[5_000]).create();
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
        let expected = format!("error: topics are not as they must be\n{}", missing("  "));
        assert!(printed.stderr.ends_with(&expected), "{printed:?}");
        assert_eq!(printed.code, Some(1));
    }
    let printed = |arguments: &[&str]| {
        let printed = pipe.redeliver(arguments);
        (printed.code, without_other_tests(&printed.stdout))
    };
    let with = |word: &str| -> String { names.iter().map(|name| format!("{word:<8} {name}\n")).collect() };
    assert_eq!(printed(&["topics", "check"]), (Some(1), missing("")));
    let sound = "6 topics are as they must be\n";
    let ledger = "exists   redeliver.dlq.ledger\n";
    assert_eq!(
        printed(&["topics", "apply"]),
        (Some(0), with("created") + ledger + sound)
    );
    assert_eq!(
        printed(&["topics", "apply"]),
        (Some(0), with("exists") + ledger + sound)
    );
    assert_eq!(printed(&["topics", "check"]), (Some(0), sound.to_owned()));
    assert_eq!(
        (pipe.enricher("a").end(), pipe.retry_tier("a").end()),
        (Some(0), Some(0))
    );
}

#[test]
fn warnings_are_counted_and_are_no_failure() {
    let pipe = Setup::new("golden-warning").tiers(&[5_000]).without_topics();
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
        "warning: topic `{due}` has retention.bytes=1000000: a burst would delete released records before their \
         time is over; set its retention.bytes to -1 and bound it by time\n"
    );
    for verb in ["apply", "check"] {
        let printed = pipe.redeliver(&["topics", verb]);
        assert_eq!(printed.code, Some(0), "{printed:?}");
        let expected = format!("{warning}6 topics, 1 warning\n");
        let stdout = without_other_tests(&printed.stdout);
        assert!(stdout.ends_with(&expected), "{printed:?}");
    }
}

#[test]
fn a_service_makes_its_topics_itself_when_it_may() {
    let pipe = Setup::new("golden-create")
        .set("kafka.topics.create", "true")
        .without_topics();
    let enricher = pipe.enricher("a");
    let output = enricher.process.output();
    assert_eq!(
        output.matches("topic created").count(),
        pipe.pipeline.topics().len(),
        "{output}"
    );
}

#[test]
fn a_tier_that_would_lose_records_refuses_to_start() {
    let pipe = Setup::new("golden-tier").tiers(&[5_000]).without_topics();
    let tier = pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
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
            "error: topic `{due}` deletes released records after 1m, and 7d is configured; set its retention.ms \
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
    // A tier that forgets.
    let pipe = Setup::new("golden-forgets").tiers(&[5_000]).without_topics();
    let tier = pipe.pipeline.tier_topic(pipe.pipeline.policy.tiers()[0]);
    raw::create_topic(
        &brokers(),
        &tier,
        &[("cleanup.policy", "delete"), ("retention.ms", "3600000")],
    );
    let problem = format!(
        "error: topic `{tier}` keeps records for 1h while they may wait for up to 1d: they would be deleted before \
         they are due, or after a short outage; needed is 2d; set its retention.ms to 604800000 (7d) or more\n"
    );
    // The broker may answer for a moment as if a topic that it has just made were not there.
    eventually("the topic is seen", Duration::from_secs(15), || {
        let checked = pipe.redeliver(&["topics", "check"]).stdout;
        if checked.contains(&problem) {
            Ok(())
        } else {
            Err(checked)
        }
    });
}

/// Takes connections as a broker would, and ends each at once. Counts them.
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
fn without_a_broker_a_process_stays_up_and_says_so_now_and_then() {
    let cases = [
        ("enricher", "127.0.0.1:1".to_owned()),
        ("retry-tier", dead_broker().0),
    ];
    for (name, brokers) in cases {
        let setup = Setup::new("golden-away").brokers(&brokers).tiers(&[5_000]);
        let pipe = setup.without_topics();
        let mut service = pipe.spawn(name, "a", &[]);
        waits_for_kafka(&mut service, &brokers);
        assert_eq!(service.end(), Some(0));
    }
}

#[test]
fn a_broker_that_hangs_up_is_tried_many_times_and_reported_once() {
    let (brokers, attempts) = dead_broker();
    let pipe = Setup::new("golden-hangs-up").brokers(&brokers).without_topics();
    let mut service = pipe.spawn("enricher", "a", &[]);
    waits_for_kafka(&mut service, &brokers);
    eventually("many attempts", Duration::from_secs(60), || {
        match attempts.load(Ordering::Relaxed) {
            count if count >= 15 => Ok(()),
            count => Err(count),
        }
    });
    let output = service.process.output();
    assert_eq!(output.matches(" WARN ").count(), 1, "{output}");
    assert_eq!(service.end(), Some(0));
}

/// That a service is alive, not ready, and has said why.
#[track_caller]
fn waits_for_kafka(service: &mut Service, brokers: &str) {
    let soon = Duration::from_secs(15);
    let output = service
        .process
        .wait_for_output("kafka does not answer; trying again", soon);
    assert_eq!(output.matches(" WARN ").count(), 1, "{output}");
    assert!(output.contains(&format!("brokers=\"{brokers}\"")), "{output}");
    assert_eq!(service.get("/livez"), (200, "alive\n".to_owned()));
    let (status, body) = service.get("/readyz");
    let report: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &report["ready"]), (503, &false.into()));
    assert_eq!(
        report["parts"]["topics"],
        format!("waiting: kafka at `{brokers}` does not answer")
    );
    assert!(service.get("/metrics").1.contains("redeliver_build_info"));
}
