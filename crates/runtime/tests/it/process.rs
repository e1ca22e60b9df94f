//! Output and exit codes of processes. The child process is this test binary, run with only the test `child`, which then
//! becomes a small service.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::{Arc, Mutex};

use clap::Parser;
use redeliver_core::SystemClock;
use redeliver_runtime::admin::{self, Admin};
use redeliver_runtime::cli::{CommonArgs, EXIT_FAILURE, EXIT_USAGE, Start, main_with};
use redeliver_runtime::config::{ConfigError, ProgramConfig};
use redeliver_runtime::health::Health;
use redeliver_runtime::metrics;
use redeliver_runtime::tasks::{TaskError, Tasks};

const ARGUMENTS: &str = "RUNTIME_TEST_CHILD";

/// A small service for tests.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// Behavior of the service: wait, fail, panic, ignore
    #[arg(long, default_value = "wait")]
    behaviour: String,
}

#[test]
fn child() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else {
        return;
    };
    let arguments = arguments.split('\n').filter(|argument| !argument.is_empty());
    let args = Args::parse_from(std::iter::once("child").chain(arguments));
    let behaviour = args.behaviour.clone();
    let code = main_with("child", &args.common, check, |start, _| run(start, behaviour));
    let known = [
        (ExitCode::SUCCESS, 0),
        (ExitCode::from(EXIT_FAILURE), 1),
        (ExitCode::from(EXIT_USAGE), 2),
    ];
    std::process::exit(
        known
            .iter()
            .find(|(known, _)| *known == code)
            .map_or(99, |(_, number)| *number),
    );
}

/// The check of the service itself.
fn check(config: &ProgramConfig) -> Result<(), ConfigError> {
    if config.control.topic.as_deref() != Some("rejected") {
        return Ok(());
    }
    Err(ConfigError::of_field(
        "control.topic",
        "is rejected by the service",
    ))
}

async fn run(start: Start, behaviour: String) -> Result<(), TaskError> {
    let grace = start.config.shutdown.grace.duration();
    let mut tasks = Tasks::new(start.shutdown.clone());
    let registry = metrics::registry("child", &start.config.instance, &SystemClock);
    let registry = Arc::new(Mutex::new(registry));
    let admin = Admin {
        health: Health::new(),
        registry,
        config: start.config,
        effective: start.effective,
        shutdown: start.shutdown,
    };
    let shutdown = admin.shutdown.clone();
    tasks.spawn_background("admin", admin::serve(start.admin, admin));
    tasks.spawn("work", async move {
        match behaviour.as_str() {
            "fail" => return Err(std::io::Error::other("no more disk")),
            "panic" => panic!("at the disco"),
            "ignore" => std::future::pending().await,
            _ => shutdown.cancelled().await,
        }
        Ok(())
    });
    tasks.run_until_shutdown(grace).await
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "process::child", "--nocapture", "--quiet"])
        .env_clear();
    command
        .env(ARGUMENTS, arguments.join("\n"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// A running child process, which is killed when dropped. Its start line has been read.
struct Running {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
    started: String,
}

impl Running {
    fn start(arguments: &[&str]) -> Self {
        let mut child = command(&[&["--set", "admin.listen=127.0.0.1:0"], arguments].concat())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut started = String::new();
        stderr.read_line(&mut started).unwrap();
        assert!(started.contains("started"), "{started}");
        Self {
            child,
            stderr,
            started,
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(
            Command::new("kill")
                .args(["-s", name, &pid])
                .status()
                .unwrap()
                .success()
        );
    }

    /// Waits for a line on stderr.
    fn line_with(&mut self, text: &str) {
        let mut line = String::new();
        while self.stderr.read_line(&mut line).unwrap() > 0 {
            if line.contains(text) {
                return;
            }
            line.clear();
        }
        panic!("the child exited without logging `{text}`");
    }

    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap().code(), rest)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_invalid_configuration_exits_with_2() {
    let (code, _, stderr) = output(&["--set", "kafka.lanes=0"]);
    assert_eq!(code, Some(2));
    assert_eq!(
        stderr,
        "error: kafka.lanes: 0 is out of range: must be between 1 and 64 (--set kafka.lanes)\n"
    );
    let (code, _, stderr) = output(&["--config", "/nowhere.yaml"]);
    assert_eq!(code, Some(2));
    assert_eq!(
        stderr,
        "error: cannot read the configuration file /nowhere.yaml\ncaused by: No such file or directory (os error 2)\n"
    );
    assert_eq!(output(&["--set", "no-equals-sign"]).0, Some(2));
    assert_eq!(output(&["--unknown-flag"]).0, Some(2));
}

#[test]
fn flags_validate_and_print_the_configuration() {
    let (code, stdout, stderr) = output(&["--check"]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(stdout.contains("the configuration is valid\n"));
    for flag in ["--check", "--behaviour=wait"] {
        let rejected = (
            Some(2),
            "error: control.topic: is rejected by the service\n".to_owned(),
        );
        let (code, stdout, stderr) = output(&[flag, "--set", "control.topic=rejected"]);
        assert_eq!((code, stderr), rejected, "{flag}");
        assert!(!stdout.contains("valid"), "{stdout}");
    }
    let (code, stdout, _) = output(&[
        "--print-config",
        "--set",
        "kafka.properties.sasl.password=hunter2",
        "--set",
        "kafka.lanes=3",
    ]);
    assert_eq!(code, Some(0));
    assert!(
        stdout.contains("  lanes: 3\n") && !stdout.contains("hunter2"),
        "{stdout}"
    );
}

#[test]
fn failure_exits_with_1() {
    for (behaviour, expected) in [
        ("fail", "error: work failed\ncaused by: no more disk\n"),
        ("panic", "error: work panicked: at the disco\n"),
    ] {
        let (code, stderr) = Running::start(&["--behaviour", behaviour]).end();
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.ends_with(expected), "{stderr}");
    }
}

#[test]
fn json_log_has_only_objects() {
    let json = ["--set", "telemetry.log=json", "--behaviour"];
    for (behaviour, error) in [
        ("fail", "work failed: no more disk"),
        ("panic", "work panicked: at the disco"),
    ] {
        let (code, stderr) = Running::start(&[&json[..], &[behaviour]].concat()).end();
        assert_eq!(code, Some(1), "{stderr}");
        let lines: Vec<serde_json::Value> = stderr
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let errors: Vec<_> = lines
            .iter()
            .filter(|line| line["message"] == "stopped with an error" && line["error"] == error)
            .collect();
        assert_eq!(errors.len(), 1, "{stderr}");
    }
}

#[test]
fn panic_location_is_logged() {
    let (_, stderr) = Running::start(&["--behaviour", "panic"]).end();
    let lines: Vec<&str> = stderr
        .lines()
        .filter(|line| line.contains("process.rs"))
        .collect();
    assert!(
        matches!(lines[..], [line] if line.contains(" WARN ") && !line.contains("disco")),
        "{stderr}"
    );
}

#[test]
fn port_in_use_exits_with_1() {
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let (code, _, stderr) = output(&["--set", &format!("admin.listen={address}")]);
    assert_eq!(code, Some(1));
    assert!(stderr.ends_with(&format!(
        "error: admin.listen: {address} is in use by another process; choose another port, or 0 for a free one\n"
    )));
    assert_eq!(stderr.matches("in use").count(), 1, "{stderr}");
}

#[test]
fn first_line_identifies_the_process() {
    let child = Running::start(&["--set", "instance=child-7"]);
    for part in [
        "version=\"0.",
        "commit=\"",
        "instance=\"child-7\"",
        "admin=127.0.0.1:",
    ] {
        assert!(child.started.contains(part), "{}", child.started);
    }
}

#[test]
fn the_first_signal_shuts_down_gracefully() {
    for signal in ["INT", "TERM"] {
        let child = Running::start(&[]);
        child.signal(signal);
        let (code, stderr) = child.end();
        assert_eq!(code, Some(0), "{stderr}");
        assert!(stderr.contains("stopped"), "{stderr}");
    }
}

#[test]
fn a_second_signal_exits_immediately() {
    for (signal, expected) in [("INT", 130), ("TERM", 143)] {
        let mut child = Running::start(&["--behaviour", "ignore"]);
        child.signal("TERM");
        child.line_with("shutting down");
        child.signal(signal);
        assert_eq!(child.end().0, Some(expected));
    }
}
