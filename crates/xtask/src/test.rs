//! `cargo xtask test`: runs the tests with the servers that they need, and prints one summary line.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Read, Write};
use std::num::NonZero;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context as _, Result, ensure};
use redeliver_testkit::Addresses;
use redeliver_testkit::target::target_directory;

use crate::interrupt::Interrupt;
use crate::mutants;
use crate::packages;
use crate::services::{self, Service};
use crate::summary::{Crashes, Summary};

/// How many tests of a binary run at the same time.
const TEST_THREADS: &str = "RUST_TEST_THREADS";

/// The optional program, whose dependencies are large. If it were built with the others, it would change the features of the dependencies of all.
const LAKE: &str = "redeliver-lake";
/// All other packages.
pub(crate) const OTHERS: [&str; 3] = ["--workspace", "--exclude", LAKE];
/// It alone, without optimization of its dependencies, which would take longer than its tests.
pub(crate) const ONLY_LAKE: [&str; 4] = ["--package", LAKE, "--profile", "dev"];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Also run tests that take longer than a minute and, if all tests are run, check that they catch each planted defect
    #[arg(long)]
    long: bool,
    /// Arguments for `cargo test`, such as `-p redeliver-kafka`; by default, all packages are tested
    #[arg(last = true, value_name = "ARGUMENTS")]
    for_cargo: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    // Even if the environment provides servers: tests that restart a server start their own.
    packages::ensure_installed(packages::SERVERS)?;
    packages::ensure_installed(packages::LANGUAGES)?;
    packages::ensure_installed(packages::DEPLOYMENT)?;
    let up = services::up()?;
    println!(
        "Kafka at {}, Redis at {}",
        up.addresses.brokers, up.addresses.redis_url
    );
    let result = build_and_test(arguments, &up.addresses, &interrupt);
    let catches_mutants = match &result {
        Ok((status, _)) if status.success() && arguments.long && arguments.for_cargo.is_empty() => {
            mutants::check_all(&up.addresses, &interrupt)
        }
        _ => Ok(true),
    };
    // Stops only the services that this run has started.
    let down = services::down(&up.started);
    if interrupt.is_raised() {
        down?;
        return Ok(interrupt.exit_code(ExitCode::FAILURE));
    }
    let (status, summary) = result?;
    down?;
    let catches_mutants = catches_mutants?;
    let (problem, summary) = check_run(status, summary, selects_tests(&arguments.for_cargo));
    // Once more, since they are far from the end of the output.
    for failure in &summary.failures {
        eprintln!("\n{failure}");
    }
    let problem = problem.or_else(|| {
        let survivors = "the tests do not catch all planted defects, see above";
        (!catches_mutants).then(|| survivors.to_owned())
    });
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
    // Tests run the binaries of all packages, and `cargo test` builds only those of the tested package. All packages at once, so that
    // both commands select the same features.
    let mut build = cargo();
    build
        .args(["build", "--bins", "--example", "greeter"])
        .args(OTHERS);
    build.args((!selects_packages(for_cargo)).then_some("--tests"));
    build.args(if release {
        &["--release"][..]
    } else {
        &["--profile", "test"]
    });
    let (status, _) = stream(build, interrupt)?;
    ensure!(status.success(), "building the binaries: {status}");

    interrupt.check()?;
    let binaries = target_directory()?.join(if release { "release" } else { "debug" });
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let test = |packages: &[&str], selection: &[&str]| {
        let mut test = cargo();
        // Without it, the first failing binary would end the run.
        test.args(["test", "--no-fail-fast"]);
        test.args(packages).args(selection).args(for_cargo);
        if arguments.long {
            let mut given = for_cargo
                .iter()
                .map(String::as_str)
                .chain(selection.iter().copied());
            test.args((!given.any(|argument| argument == "--")).then_some("--"));
            test.arg("--include-ignored");
        }
        test.env(Service::Kafka.variable(), &addresses.brokers);
        test.env(Service::Redis.variable(), &addresses.redis_url);
        test.env("REDELIVER_TEST_BIN_DIR", &binaries);
        // Tests wait for servers much of the time, but with more of them at once, the servers answer some too late.
        if std::env::var_os(TEST_THREADS).is_none() {
            test.env(TEST_THREADS, (cores + 1).to_string());
        }
        stream(test, interrupt)
    };
    if !for_cargo.is_empty() {
        let selected = selects_packages(for_cargo);
        return test(if selected { &[] } else { &OTHERS }, &[]);
    }
    // Side by side, because each binary ends with a few tests that leave a core idle. Both lanes take about the same time.
    let in_order = |selections: &[&[&str]]| {
        selections
            .iter()
            .map(|selection| test(&OTHERS, selection))
            .collect()
    };
    let on_servers =
        |target: &str| -> Result<_> { Ok((target.to_owned(), test(&OTHERS, &["--test", target])?)) };
    let (integration, system, others) = std::thread::scope(|scope| {
        let integration = scope.spawn(|| on_servers("it"));
        let system = on_servers("system");
        let others: Result<Vec<_>> = in_order(&[&["--lib", "--bins"], &["--doc"]]);
        (integration.join().expect("it does not panic"), system, others)
    });
    let lake = test(&ONLY_LAKE, &[])?;
    let (mut statuses, mut summary) = (Vec::new(), Summary::default());
    for (target, (status, mut results)) in [integration?, system?] {
        let late = results.late();
        let (again, passed) = if late.is_empty() {
            (status, 0)
        } else {
            interrupt.check()?;
            let alone = ["--test", &target, "--", "--exact", "--test-threads=1"];
            let selection: Vec<&str> = alone.into_iter().chain(late.iter().map(String::as_str)).collect();
            let (again, repeated) = test(&OTHERS, &selection)?;
            (again, repeated.passed)
        };
        // A name that selects nothing proves nothing.
        let again = if passed < late.len() as u64 { status } else { again };
        if again.success() {
            results.set_flaky(late);
        }
        statuses.push(again);
        summary.add_results(results);
    }
    for (status, results) in others?.into_iter().chain([lake]) {
        statuses.push(status);
        summary.add_results(results);
    }
    if arguments.long {
        // Another set of features than everything else has, so all of the library's dependencies are compiled again.
        interrupt.check()?;
        let mut test = cargo();
        test.args(["test", "--package", "redeliver-service", "--lib", "login::"]);
        let (status, results) = stream(test, interrupt)?;
        statuses.push(status);
        summary.add_results(results);
    }
    let failed = statuses.iter().find(|status| !status.success());
    Ok((*failed.unwrap_or(&statuses[0]), summary))
}

/// The problem of a run, if there is one, and the corrected summary. A binary that crashes reports no failed test. A run
/// without tests fails, and so does one that skips tests, unless the user has selected tests.
fn check_run(status: ExitStatus, mut summary: Summary, selected: bool) -> (Option<String>, Summary) {
    if status.success() {
        let problem = match summary {
            Summary {
                passed: 0,
                failed: 0,
                ignored: 0,
                ..
            } => Some("no tests were run".to_owned()),
            _ if summary.skipped() > 0 && !selected => Some(format!(
                "{} tests were skipped; only long tests may be ignored",
                summary.skipped()
            )),
            _ => None,
        };
        return (problem, summary);
    }
    let problem = if summary.failed == 0 {
        summary.failed = 1;
        format!(
            "cargo test: {status}, but no test failed: a test binary crashed or did not compile, see above"
        )
    } else {
        format!("cargo test: {status}")
    };
    (Some(problem), summary)
}

/// Whether the arguments select packages.
fn selects_packages(for_cargo: &[String]) -> bool {
    let of_cargo = for_cargo.iter().take_while(|argument| *argument != "--");
    of_cargo.into_iter().any(|argument| {
        let long = ["--package", "--workspace", "--all"].contains(&argument.as_str())
            || argument.starts_with("--package=");
        long || (argument.starts_with("-p") && !argument.starts_with("--"))
    })
}

/// Whether the arguments select tests, by a name or by arguments for the test binaries. `--quiet` counts as well, because
/// its output does not tell long tests from other ignored ones.
fn selects_tests(for_cargo: &[String]) -> bool {
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

pub(crate) fn cargo() -> Command {
    // Set by `cargo xtask`, so that the same toolchain is used.
    let cargo = std::env::var_os("CARGO");
    Command::new(cargo.as_deref().unwrap_or(OsStr::new("cargo")))
}

/// Runs a command, forwards its output and counts the test results in it.
pub(crate) fn stream(mut command: Command, interrupt: &Interrupt) -> Result<(ExitStatus, Summary)> {
    let context = format!("running {command:?}");
    // In its own process group, so that an interrupt also reaches the processes that tests have started.
    command
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    // Otherwise, cargo shows its progress.
    if !std::io::stderr().is_terminal() {
        command.stderr(Stdio::piped());
    }
    let mut child = command.spawn().with_context(|| context.clone())?;
    interrupt
        .forward_to(&mut child, forward_output)
        .with_context(|| context)
}

fn forward_output(child: &mut Child) -> Result<(ExitStatus, Summary)> {
    let mut summary = Summary::default();
    let errors = child.stderr.take().map(|errors| {
        std::thread::spawn(move || {
            let mut crashes = Crashes::default();
            forward_lines(errors, &mut std::io::stderr(), |line| crashes.add(line))?;
            anyhow::Ok(crashes)
        })
    });
    let output = child.stdout.take().context("opening its output")?;
    forward_lines(output, &mut std::io::stdout(), |line| summary.add(line))?;
    let status = child.wait().context("waiting for its exit")?;
    if let Some(errors) = errors {
        let crashes = errors
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that forwards its errors has panicked"))??;
        summary.failures.extend(crashes.failures);
    }
    Ok((status, summary))
}

/// Writes each line of `from` to `to` at once, and calls `each` with it.
fn forward_lines(from: impl Read, to: &mut impl Write, mut each: impl FnMut(&str)) -> Result<()> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).context("reading its output")? > 0 {
        to.write_all(&line)
            .and_then(|()| to.flush())
            .context("forwarding its output")?;
        each(&String::from_utf8_lossy(&line));
        line.clear();
    }
    Ok(())
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
    fn success_needs_tests_and_cargo() {
        let (success, failure) = (ExitStatus::from_raw(0), ExitStatus::from_raw(101 << 8));
        assert_eq!(check_run(success, summary(3, 0), false), (None, summary(3, 0)));
        assert!(check_run(success, summary(0, 0), true).0.is_some());
        assert!(check_run(failure, summary(3, 2), false).0.is_some());
        let (problem, counted) = check_run(failure, summary(3, 0), false);
        assert!(problem.is_some());
        assert_eq!(counted, summary(3, 1));
    }

    #[test]
    fn skipped_tests_need_a_selection() {
        let success = ExitStatus::from_raw(0);
        let long = |count: usize| vec!["chaos::long".to_owned(); count];
        let skipped = Summary {
            ignored: 3,
            long: long(1),
            ..summary(3, 0)
        };
        assert_eq!(check_run(success, skipped.clone(), true), (None, skipped.clone()));
        let (problem, counted) = check_run(success, skipped.clone(), false);
        assert!(problem.is_some_and(|problem| problem.starts_with("2 tests were skipped")));
        assert_eq!(counted, skipped);
        let only_long = Summary {
            long: long(3),
            ..skipped
        };
        assert_eq!(check_run(success, only_long.clone(), false), (None, only_long));
    }

    #[test]
    fn tests_are_selected_by_arguments() {
        let selects = |arguments: &[&str]| {
            selects_tests(&arguments.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert!(!selects(&[]) && !selects(&["-p", "redeliver-kafka", "--release"]));
        assert!(!selects(&["--package=redeliver-kafka", "--test", "it"]));
        assert!(selects(&["lane"]) && selects(&["-p", "redeliver-kafka", "lane"]));
        assert!(selects(&["--release", "--", "--ignored"]) && selects(&["-q"]));
    }

    #[test]
    fn packages_are_selected_by_cargo() {
        let selects = |arguments: &[&str]| {
            selects_packages(&arguments.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert!(selects(&["-p", "redeliver-kafka"]));
        assert!(selects(&["-predeliver-kafka"]) && selects(&["--package=redeliver-kafka"]));
        assert!(selects(&["--workspace"]));
        assert!(!selects(&["--release", "lane"]) && !selects(&["--profile=dev"]));
        assert!(!selects(&["--", "-p"]));
    }
}
