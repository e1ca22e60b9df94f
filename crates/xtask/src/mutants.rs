//! `cargo xtask mutants`: activates planted defects one by one, and checks that the tests catch each of them.
//!
//! One build contains all defects. The environment variable [`VARIABLE`] activates one of them, see
//! `crates/core/src/mutants.rs`.

mod binaries;
mod runner;
mod table;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use redeliver_testkit::Addresses;

use crate::interrupt::Interrupt;
use crate::summary::Summary;
use crate::{packages, services};
use binaries::Binaries;
use runner::{Finished, Runner};
use table::{MUTANTS, Mutant, Target, Test};

/// Names the active defect. The same name is in `crates/core/src/mutants.rs`; with another one, no defect would be reached.
const VARIABLE: &str = "REDELIVER_MUTANT";
/// The time limit of one test. A test that passes takes a few seconds.
const TIME_LIMIT: Duration = Duration::from_secs(120);
/// The exit status of a test binary with a failed test.
const FAILED: i32 = 101;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Names of planted defects; by default, all
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Print the table of planted defects and of the tests that catch them, and run nothing
    #[arg(long, conflicts_with = "names")]
    list: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.list {
        print!("{}", table::markdown());
        return Ok(ExitCode::SUCCESS);
    }
    let mutants = select(&arguments.names)?;
    let interrupt = Interrupt::install()?;
    let up = if tests_of(&mutants).any(|test| test.binary.target == Target::It) {
        packages::ensure_installed(packages::SERVERS)?;
        Some(services::up()?)
    } else {
        None
    };
    let result = check(&mutants, up.as_ref().map(|up| &up.addresses), &interrupt);
    let down = up.map_or(Ok(()), |up| services::down(&up.started));
    if interrupt.is_raised() {
        down?;
        return Ok(interrupt.exit_code(ExitCode::FAILURE));
    }
    let is_caught = result?;
    down?;
    Ok(if is_caught {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn select(names: &[String]) -> Result<Vec<Mutant>> {
    let unknown: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| MUTANTS.iter().all(|mutant| mutant.name != *name))
        .collect();
    ensure!(
        unknown.is_empty(),
        "unknown planted defects: {}; `cargo xtask mutants --list` prints all",
        unknown.join(", ")
    );
    let is_selected = |mutant: &&Mutant| names.is_empty() || names.iter().any(|name| name == mutant.name);
    Ok(MUTANTS.iter().filter(is_selected).copied().collect())
}

fn tests_of(mutants: &[Mutant]) -> impl Iterator<Item = Test> {
    mutants.iter().flat_map(|mutant| mutant.caught_by.iter().copied())
}

/// Checks all planted defects. Returns whether the tests caught all of them.
pub(crate) fn check_all(addresses: &Addresses, interrupt: &Interrupt) -> Result<bool> {
    check(MUTANTS, Some(addresses), interrupt)
}

/// Runs the tests without a defect, when they must pass, and then with each defect.
fn check(mutants: &[Mutant], addresses: Option<&Addresses>, interrupt: &Interrupt) -> Result<bool> {
    let tests: BTreeSet<Test> = tests_of(mutants).collect();
    let runner = Runner { interrupt, addresses };
    let binaries = Binaries::build(&runner, tests.iter().map(|test| test.binary))?;
    let run = |test: &Test, mutant: Option<&Mutant>| -> Result<Finished> {
        interrupt.check()?;
        let executable = binaries.executable(test.binary)?;
        runner.test(executable, test, mutant, TIME_LIMIT)
    };
    println!("running {} tests without a planted defect", tests.len());
    for test in &tests {
        let finished = run(test, None)?;
        let is_passed = finished.code() == Some(0) && passed(&finished.output) == 1;
        if !is_passed {
            print!("{}", finished.output);
        }
        ensure!(
            is_passed,
            "{}: {} does not pass without a planted defect",
            test.binary,
            test.name
        );
    }
    println!("running them with {} planted defects", mutants.len());
    let mut missed = Vec::new();
    for mutant in mutants {
        for test in mutant.caught_by {
            let began = Instant::now();
            let verdict = Verdict::of(&run(test, Some(mutant))?, mutant);
            println!(
                "{verdict:?} in {:.1} s: {} by {}: {}",
                began.elapsed().as_secs_f64(),
                mutant.name,
                test.binary,
                test.name
            );
            if verdict != Verdict::Caught {
                missed.push(format!("{} ({})", mutant.name, verdict.explanation()));
            }
        }
    }
    if !missed.is_empty() {
        eprintln!("error: not caught: {}", missed.join(", "));
    }
    println!("{} planted defects, {} not caught", mutants.len(), missed.len());
    Ok(missed.is_empty())
}

/// The number of tests that passed, from the output of a test binary.
fn passed(output: &str) -> u64 {
    let mut summary = Summary::default();
    output.lines().for_each(|line| summary.add(line));
    summary.passed
}

/// What a test says about a planted defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Caught,
    Survived,
    NotReached,
    TimedOut,
    Crashed,
}

impl Verdict {
    fn of(finished: &Finished, mutant: &Mutant) -> Self {
        let is_reached = finished
            .output
            .contains(&format!("mutant reached: {}\n", mutant.name));
        match finished.code() {
            _ if !is_reached => Self::NotReached,
            Some(0) => Self::Survived,
            Some(FAILED) => Self::Caught,
            _ if !finished.timed_out => Self::Crashed,
            _ => Self::TimedOut,
        }
    }

    fn explanation(self) -> &'static str {
        match self {
            Self::Caught => "the test failed",
            Self::Survived => "the test passed",
            Self::NotReached => "the test does not execute it",
            Self::TimedOut => "the test did not end",
            Self::Crashed => "the test binary crashed",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn defect_needs_failed_executing_test() {
        let mutant = MUTANTS[0];
        let verdict = |status: i32, timed_out, output: String| {
            let finished = Finished {
                status: ExitStatus::from_raw(status),
                timed_out,
                output,
            };
            Verdict::of(&finished, &mutant)
        };
        let reached = || format!("mutant reached: {}\n", mutant.name);
        assert_eq!(verdict(101 << 8, false, reached()), Verdict::Caught);
        assert_eq!(verdict(0, false, reached()), Verdict::Survived);
        assert_eq!(verdict(101 << 8, false, String::new()), Verdict::NotReached);
        assert_eq!(verdict(9, true, reached()), Verdict::TimedOut);
        assert_eq!(verdict(6, false, reached()), Verdict::Crashed);
    }

    #[test]
    fn unknown_names_are_rejected() {
        assert_eq!(select(&[]).unwrap().len(), MUTANTS.len());
        let one = MUTANTS[3].name.to_owned();
        assert_eq!(select(std::slice::from_ref(&one)).unwrap().len(), 1);
        let error = select(&[one, "no-such".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("unknown planted defects: no-such;"), "{error}");
    }
}
