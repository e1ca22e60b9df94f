//! The output of the binaries: help, errors of the configuration, and the state of topics.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use redeliver_testkit::scratch::Scratch;
use redeliver_testkit::{CommandOutput, binary, brokers, ensure, eventually, run, until_seen};

use crate::raw;
use crate::support::{DEADLINE, PipeBuilder, SERVICES, without_other_tests, words};

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

#[test]
fn problems_are_reported_together() {
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
fn port_in_use_is_reported() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    for (name, field) in [
        ("enricher", "admin.listen"),
        ("retry-tier", "admin.listen"),
        ("scheduler", "scheduler.listen"),
        ("dlq-inspector", "dlq_inspector.listen"),
        ("console", "console.listen"),
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
fn check_reports_problems_of_start() {
    for (http, problem) in [
        (
            "{ url: 'http://localhost/', header_files: { authorization: /nowhere/token } }",
            "header_files.authorization: cannot read /nowhere/token: No such file or directory (os error 2)",
        ),
        (
            "{ url: 'https://localhost/', tls: { ca_file: /nowhere/ca } }",
            "tls.ca_file: cannot read /nowhere/ca: No such file or directory (os error 2)",
        ),
    ] {
        let expected = format!("error: pipelines.p.http.{problem}\n");
        for arguments in [&["--check"][..], &[]] {
            rejects("enricher", &with_http(http), arguments, &expected);
        }
    }
    let redis = "redis: { url: 'redis://:hunter2@localhost:port' }\n";
    let expected =
        "error: redis.url: redis://:redacted@localhost:port cannot be used: Url Error: InvalidPort\n";
    rejects("scheduler", redis, &["--check"], expected);
    // Without the value, which may be a secret.
    let expected = "error: kafka.properties.sasl.pasword: librdkafka has no such property\n";
    for (name, arguments) in [
        ("enricher", ""),
        ("retry-tier", ""),
        ("scheduler", ""),
        ("dlq-inspector", ""),
        ("redeliver", "topics apply "),
        ("redeliver", "topics check "),
        ("redeliver", "audit "),
        ("redeliver", "jobs ls "),
    ] {
        let unknown = format!("{arguments}--set kafka.properties.sasl.pasword=hunter2");
        rejects(name, VALID, &words(&unknown), expected);
        rejects(name, VALID, &words(&format!("{unknown} --check")), expected);
    }
}

#[test]
fn process_needs_a_pipeline() {
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

fn output_of(name: &str, arguments: &[&str]) -> CommandOutput {
    let mut command = binary(name);
    command.args(arguments);
    run(command)
}

#[test]
fn binaries_print_help_and_version() {
    let help = |name: &str| {
        let printed = output_of(name, &["--help"]);
        assert_eq!(printed.code, Some(0), "{printed:?}");
        printed.stdout
    };
    for (name, own) in [
        (
            "enricher",
            "\n      --until-idle[=<DURATION>]  Exit with status 0 when nothing is left to do now ",
        ),
        (
            "scheduler",
            "\n      --until-idle[=<DURATION>]  Exit with status 0 when nothing is left to do now ",
        ),
        (
            "retry-tier",
            "\n      --tier <DELAY>             Serve only this tier, such as 30s; ",
        ),
    ] {
        let help = help(name);
        let usage = format!("\n\nUsage: {name} [OPTIONS] [COMMAND]\n\nCommands:\n  health  ");
        assert!(help.contains(&usage) && help.contains(own), "{help}");
    }
    let expected = "\
Schedule jobs, retry failed records and manage dead letters on Kafka

Usage: redeliver [COMMAND]

Commands:
  dev        Run all services in one process on an embedded broker, with demonstration data (default)
";
    assert!(help("redeliver").starts_with(expected), "{}", help("redeliver"));
    let version = format!(" {}\n", redeliver_runtime::metrics::version());
    for name in SERVICES.into_iter().chain(["console", "redeliver"]) {
        let printed = output_of(name, &["--version"]);
        assert!(
            printed.code == Some(0) && printed.stdout.ends_with(&version),
            "{printed:?}"
        );
        assert_eq!(output_of(name, &["--no-such-flag"]).code, Some(2));
    }
}

#[test]
fn services_need_topics_which_apply_creates() {
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
    let sound = "all 12 topics OK\n";
    let ledger = "exists   redeliver.status\nexists   redeliver.control\nexists   redeliver.waiting.actions\nexists   redeliver.audit\nexists   redeliver.dlq.ledger\nexists   redeliver.dlq.groups\nexists   redeliver.dlq.redrives\n";
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
fn service_creates_topics_if_configured() {
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

/// The unit tests of `redeliver_kafka::topology` have all findings.
#[test]
fn findings_about_topics_are_reported() {
    let pipe = PipeBuilder::new("golden-tier").tiers(&[5_000]).without_topics();
    let (tier, due) = (pipe.first_tier(), pipe.pipeline.due_topic());
    let large = ("max.message.bytes", "2000000");
    let unsound = [("cleanup.policy", "compact"), ("retention.ms", "3600000"), large];
    raw::create_topic(&brokers(), &tier, &unsound);
    let risky = [
        ("retention.ms", "604800000"),
        ("retention.bytes", "1000000"),
        large,
    ];
    raw::create_topic(&brokers(), &due, &risky);
    let error = format!(
        "error: topic `{tier}` is compacted: compaction would drop waiting records that share a key; set its \
         cleanup.policy to delete"
    );
    let applied = pipe.redeliver(&["topics", "apply"]);
    assert_eq!(applied.code, Some(1), "{applied:?}");
    for name in ["enricher", "retry-tier"] {
        let printed = run(pipe.command(name, &[]));
        assert_eq!(printed.code, Some(1));
        assert!(printed.stderr.contains(&format!("\n  {error}\n")), "{printed:?}");
    }
    // A warning is counted, and does not fail the command.
    let sound = [("cleanup.policy", "delete"), ("retention.ms", "604800000"), large];
    raw::configure_topic(&brokers(), &tier, &sound);
    let warning = format!(
        "warning: topic `{due}` has retention.bytes=1000000: a burst could delete released records too early; set its \
         retention.bytes to -1 and limit it with retention.ms\n"
    );
    let expected = format!("{warning}12 topics, 1 warning\n");
    eventually("the error is gone", DEADLINE, || {
        let checked = pipe.redeliver(&["topics", "check"]);
        let stdout = without_other_tests(&checked.stdout);
        let is_warned = checked.code == Some(0) && stdout.ends_with(&expected);
        ensure(is_warned, stdout)
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

/// Refused, and accepted and closed at once.
#[test]
fn service_waits_for_kafka() {
    let (hangs_up, attempts) = dead_broker();
    for (name, brokers) in [
        ("enricher", "127.0.0.1:1".to_owned()),
        ("retry-tier", hangs_up.clone()),
    ] {
        let setup = PipeBuilder::new("golden-away").brokers(&brokers).tiers(&[5_000]);
        let pipe = setup.without_topics();
        let mut service = pipe.spawn(name, "a", &[]);
        let output = service.wait_for_output("Kafka unavailable; retrying", DEADLINE);
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
        if brokers == hangs_up {
            until_seen("attempts", || attempts.load(Ordering::Relaxed), |&n| n >= 15);
        }
        // It logs the reason once.
        let output = service.output();
        assert_eq!(output.matches(" WARN ").count(), 1, "{output}");
        service.shut_down();
    }
}
