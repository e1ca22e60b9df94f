//! The one command that needs nothing.

use std::time::Duration;

use redeliver_testkit::{Process, binary};

#[test]
fn the_demonstration_ends_by_itself_and_finds_all_as_it_must_be() {
    let mut command = binary("redeliver-example-crawl");
    command.env_clear().arg("--demo");
    let mut demo = Process::spawn(command).unwrap();
    let status = demo.wait(Duration::from_secs(180));
    let output = demo.output();
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(
        output.contains("All 54 pages were crawled or given up exactly once"),
        "{output}"
    );
    for told in [
        "http.503; waits",
        "http.timeout; waits",
        "dead (robots.disallowed)",
        "301 with 1 links",
    ] {
        assert!(output.contains(told), "{told}: {output}");
    }
}

#[test]
fn a_configuration_that_cannot_be_polite_is_refused() {
    for (setting, told) in [
        (
            "pipelines.crawl-jobs.return_to=due",
            "pipelines.crawl-jobs.return_to",
        ),
        ("scheduler.apps.crawl.topic=elsewhere", "scheduler.apps"),
    ] {
        let mut command = binary("redeliver-example-crawl");
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/crawl.yaml");
        let settings = ["--set", setting, "--set", "admin.listen=127.0.0.1:0"];
        let command = command.env_clear().args(["--config", file]).args(settings);
        let output = command.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{printed}");
        assert!(printed.contains(told), "{printed}");
    }
}
