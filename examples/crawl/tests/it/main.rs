//! The crawl as a process.

use std::time::Duration;

use redeliver_testkit::{Process, binary};

#[test]
fn demonstration_crawls_politely() {
    let mut command = binary("redeliver-example-crawl");
    command.env_clear().arg("--demo");
    let mut demo = Process::spawn(command).unwrap();
    let status = demo.wait(Duration::from_secs(180));
    let output = demo.output();
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(output.contains("All 28 pages ended once"), "{output}");
}

#[test]
fn invalid_configurations_and_flags_are_rejected() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/crawl.yaml");
    for (arguments, code, message) in [
        (
            "--set pipelines.crawl-jobs.return_to=due",
            2,
            "crawl-jobs.return_to",
        ),
        ("--set scheduler.apps.crawl.topic=elsewhere", 2, "scheduler.apps"),
        ("ftp://127.0.0.1/", 2, "must be an http or https URL"),
        ("http://other.test/", 2, "outside of --within"),
        ("--demo", 2, "cannot be used with"),
        ("--within Example.org https://example.ORG/#top", 0, ""),
    ] {
        let mut command = binary("redeliver-example-crawl");
        command.env_clear().args(["--check", "--config", file]);
        let output = command.args(arguments.split(' ')).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{printed}");
        assert!(printed.contains(message), "{printed}");
    }
}
