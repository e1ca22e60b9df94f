//! The crawl as a process.

use std::time::Duration;

use redeliver_testkit::{Process, binary};

#[test]
fn the_demonstration_crawls_every_page_once_and_politely() {
    let mut command = binary("redeliver-example-crawl");
    command.env_clear().arg("--demo");
    let mut demo = Process::spawn(command).unwrap();
    let status = demo.wait(Duration::from_secs(180));
    let output = demo.output();
    assert_eq!(status.code(), Some(0), "{output}");
    for expected in [
        "All 28 pages ended once",
        "http.503; waiting in tier",
        "http.timeout; waiting in tier",
        "robots.503; waiting in tier",
        "  robots.disallowed",
        "  http.410",
        "  301",
    ] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
}

#[test]
fn a_configuration_that_cannot_be_polite_is_rejected() {
    for (setting, field) in [
        (
            "pipelines.crawl-jobs.return_to=due",
            "pipelines.crawl-jobs.return_to",
        ),
        ("scheduler.apps.crawl.topic=elsewhere", "scheduler.apps"),
    ] {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/crawl.yaml");
        let mut command = binary("redeliver-example-crawl");
        command.env_clear().args(["--config", file, "--set", setting]);
        let output = command
            .args(["--set", "admin.listen=127.0.0.1:0"])
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{printed}");
        assert!(printed.contains(field), "{printed}");
    }
}
