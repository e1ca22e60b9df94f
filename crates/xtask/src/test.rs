//! `cargo xtask test`: everything that CI runs as tests, with the servers they need, and one summary.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context as _, Result, ensure};
use redeliver_testkit::Addresses;
use redeliver_testkit::target::target_directory;

use crate::interrupt::Interrupt;
use crate::packages;
use crate::services::{self, Service};
use crate::summary::Summary;

/// How to run the tests.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Run the tests that take longer than a minute too
    #[arg(long)]
    long: bool,
    /// Arguments for `cargo test`, `-p redeliver-kafka` for example; every package is tested without
    #[arg(last = true, value_name = "ARGUMENTS")]
    for_cargo: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    // Also with servers given from elsewhere: tests that restart a server start one of their own.
    packages::ensure_installed(packages::SERVERS)?;
    packages::ensure_installed(packages::LANGUAGES)?;
    let up = services::up()?;
    println!(
        "Kafka at {}, Redis at {}",
        up.addresses.brokers, up.addresses.redis_url
    );
    let tested = build_and_test(arguments, &up.addresses, &interrupt);
    // Whatever happened: what was up before stays up, what was not goes down.
    let down = services::down(&up.started);
    if interrupt.is_raised() {
        down?;
        return Ok(interrupt.exit_code(ExitCode::FAILURE));
    }
    let (status, summary) = tested?;
    down?;
    let (problem, summary) = judge(status, summary, chooses_tests(&arguments.for_cargo));
    if let Some(problem) = &problem {
        eprintln!("error: {problem}");
    }
    println!("{summary}");
    Ok(if problem.is_none() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn build_and_test(
    arguments: &Arguments,
    addresses: &Addresses,
    interrupt: &Interrupt,
) -> Result<(ExitStatus, Summary)> {
    interrupt.check()?;
    let for_cargo = &arguments.for_cargo;
    let release = for_cargo
        .iter()
        .any(|argument| argument == "--release" || argument == "-r");
    // Tests run our binaries as processes, which `cargo test` alone builds only for their own package.
    // This program is left out: it is running.
    let mut build = cargo();
    build.args(["build", "--workspace", "--bins", "--exclude", "xtask"]);
    build.args(release.then_some("--release"));
    let (status, _) = stream(build, interrupt)?;
    ensure!(status.success(), "building the binaries: {status}");

    interrupt.check()?;
    let binaries = target_directory()?.join(if release { "release" } else { "debug" });
    let mut test = cargo();
    // One failing binary must not hide the results of the others.
    test.args(["test", "--no-fail-fast"]);
    test.args((!chooses_packages(for_cargo)).then_some("--workspace"));
    test.args(for_cargo);
    if arguments.long {
        test.args((!for_cargo.iter().any(|argument| argument == "--")).then_some("--"));
        test.arg("--include-ignored");
    }
    test.env(Service::Kafka.variable(), &addresses.brokers);
    test.env(Service::Redis.variable(), &addresses.redis_url);
    test.env("REDELIVER_TEST_BIN_DIR", binaries);
    stream(test, interrupt)
}

/// What was wrong with the run, if anything, and the summary that says so too: a binary that crashed
/// reports no failed test, and a run without any test proves nothing. Nor does a test that was skipped, which is
/// what the user did not ask for unless the user chose tests.
fn judge(status: ExitStatus, mut summary: Summary, chosen: bool) -> (Option<String>, Summary) {
    if status.success() {
        let problem = match summary {
            Summary {
                passed: 0,
                failed: 0,
                ignored: 0,
                ..
            } => Some("no test was run".to_owned()),
            _ if summary.skipped() > 0 && !chosen => Some(format!(
                "{} tests were skipped, and nobody asked for it: none may be ignored but long ones",
                summary.skipped()
            )),
            _ => None,
        };
        return (problem, summary);
    }
    let problem = if summary.failed == 0 {
        summary.failed = 1;
        format!(
            "cargo test: {status}, though no test says that it failed: see above what crashed or did not build"
        )
    } else {
        format!("cargo test: {status}")
    };
    (Some(problem), summary)
}

/// Whether the user said which packages to test, so that we must not.
fn chooses_packages(for_cargo: &[String]) -> bool {
    let of_cargo = for_cargo.iter().take_while(|argument| *argument != "--");
    of_cargo.into_iter().any(|argument| {
        let long = ["--package", "--workspace", "--all"].contains(&argument.as_str())
            || argument.starts_with("--package=");
        long || (argument.starts_with("-p") && !argument.starts_with("--"))
    })
}

/// Whether the user said which tests to run: by a filter for names, which is what stands alone, or by anything
/// that is meant for the test binaries. Or asked not to be told about single tests, the long ones among them.
fn chooses_tests(for_cargo: &[String]) -> bool {
    let with_value = |option: &str| VALUED.contains(&option);
    let mut before = "";
    for argument in for_cargo {
        if ["--", "-q", "--quiet"].contains(&argument.as_str())
            || (!argument.starts_with('-') && !with_value(before))
        {
            return true;
        }
        before = argument;
    }
    false
}

/// Options of `cargo test` whose value is the next argument.
const VALUED: [&str; 15] = [
    "-p",
    "--package",
    "--exclude",
    "--bin",
    "--example",
    "--test",
    "--bench",
    "-F",
    "--features",
    "-j",
    "--jobs",
    "--profile",
    "--target",
    "--target-dir",
    "--color",
];

fn cargo() -> Command {
    // Set when we are run by cargo: the same toolchain is used then.
    let cargo = std::env::var_os("CARGO");
    Command::new(cargo.as_deref().unwrap_or(OsStr::new("cargo")))
}

/// Runs a command to its end, passing on what it prints line by line and counting the results in it.
fn stream(mut command: Command, interrupt: &Interrupt) -> Result<(ExitStatus, Summary)> {
    let what = format!("running {command:?}");
    // A process group of its own, so that an interrupt also reaches the processes that tests started.
    command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| what.clone())?;
    interrupt
        .passed_to(&mut child, pass_on_output)
        .with_context(|| what)
}

fn pass_on_output(child: &mut Child) -> Result<(ExitStatus, Summary)> {
    let mut summary = Summary::default();
    let mut output = BufReader::new(child.stdout.take().context("taking its output")?);
    let mut line = Vec::new();
    let mut stdout = std::io::stdout().lock();
    while output
        .read_until(b'\n', &mut line)
        .context("reading its output")?
        > 0
    {
        stdout
            .write_all(&line)
            .and_then(|()| stdout.flush())
            .context("passing on its output")?;
        summary.add(&String::from_utf8_lossy(&line));
        line.clear();
    }
    Ok((child.wait().context("waiting for its end")?, summary))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    fn summary(passed: u64, failed: u64) -> Summary {
        Summary {
            passed,
            failed,
            ..Summary::default()
        }
    }

    #[test]
    fn a_run_is_good_only_if_tests_ran_and_cargo_agrees() {
        let (good, bad) = (ExitStatus::from_raw(0), ExitStatus::from_raw(101 << 8));
        assert_eq!(judge(good, summary(3, 0), false), (None, summary(3, 0)));
        assert!(judge(good, summary(0, 0), true).0.is_some());
        assert!(judge(bad, summary(3, 2), false).0.is_some());
        let (problem, counted) = judge(bad, summary(3, 0), false);
        assert!(problem.is_some());
        assert_eq!(counted, summary(3, 1));
    }

    #[test]
    fn a_run_that_skips_a_test_is_good_only_if_the_user_chose_tests() {
        let good = ExitStatus::from_raw(0);
        let skipped = Summary {
            ignored: 3,
            long: 1,
            ..summary(3, 0)
        };
        assert_eq!(judge(good, skipped, true), (None, skipped));
        let (problem, counted) = judge(good, skipped, false);
        assert!(problem.is_some_and(|problem| problem.starts_with("2 tests were skipped")));
        assert_eq!(counted, skipped);
        let left_out = Summary { long: 3, ..skipped };
        assert_eq!(judge(good, left_out, false), (None, left_out));
    }

    #[test]
    fn tests_are_chosen_by_a_name_or_by_what_is_meant_for_their_binaries() {
        let chooses = |arguments: &[&str]| {
            chooses_tests(&arguments.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert!(!chooses(&[]) && !chooses(&["-p", "redeliver-kafka", "--release"]));
        assert!(!chooses(&["--package=redeliver-kafka", "--test", "it"]));
        assert!(chooses(&["lane"]) && chooses(&["-p", "redeliver-kafka", "lane"]));
        assert!(chooses(&["--release", "--", "--ignored"]) && chooses(&["-q"]));
    }

    #[test]
    fn packages_are_recognised_in_the_arguments_of_cargo_only() {
        let chooses = |arguments: &[&str]| {
            chooses_packages(&arguments.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert!(chooses(&["-p", "redeliver-kafka"]));
        assert!(chooses(&["-predeliver-kafka"]) && chooses(&["--package=redeliver-kafka"]));
        assert!(chooses(&["--workspace"]));
        assert!(!chooses(&["--release", "lane"]) && !chooses(&["--profile=dev"]));
        assert!(!chooses(&["--", "-p"]));
    }
}
