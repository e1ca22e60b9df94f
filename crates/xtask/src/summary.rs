//! The end of a test run: why tests have failed, and the sum of the `test result:` lines of all test binaries.

use std::collections::VecDeque;
use std::fmt;

/// Of the output of a failed test, from its first panic to the backtrace if there is one.
const SHOWN_LINES: usize = 30;
const SHOWN_CHARACTERS: usize = 500;
/// With more of them, something is broken, or the machine is too slow for all of them.
const MAX_LATE: usize = 3;
/// Of what is written to stderr before a crash is reported.
const CRASH_LINES: usize = 15;

/// A failed test, and the part of its output that tells why.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    name: String,
    has_panicked: bool,
    is_complete: bool,
    lines: Vec<String>,
}

impl Failure {
    fn add(&mut self, line: &str) {
        if !self.has_panicked && line.contains(" panicked at ") {
            self.has_panicked = true;
            self.lines.clear();
        }
        self.is_complete |= self.has_panicked && line == "stack backtrace:";
        if !self.is_complete && self.lines.len() < SHOWN_LINES {
            self.lines.push(line.chars().take(SHOWN_CHARACTERS).collect());
        }
    }
}

impl Failure {
    /// Whether a condition was not met in time, as the message of the panic says in its first line. Tests of invariants never count: what they wait for may be lost.
    fn has_waited(&self) -> bool {
        let invariants = ["chaos", "exactly_once", "oracle"];
        let is_of_invariant = invariants.iter().any(|part| self.name.contains(part));
        let message = self
            .lines
            .get(1)
            .filter(|_| self.has_panicked && !is_of_invariant);
        message.is_some_and(|line| line.contains(": not within ") || line.contains("timed out"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "---- {}", self.name)?;
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// Test binaries that a signal has ended, in what cargo and they write to stderr. They print no result.
#[derive(Debug, Default)]
pub(crate) struct Crashes {
    last_lines: VecDeque<String>,
    pub(crate) failures: Vec<Failure>,
}

impl Crashes {
    /// Adds a line. The lines before that of cargo, such as those of a stack overflow, tell why.
    pub(crate) fn add(&mut self, line: &str) {
        let line: String = line.trim_end().chars().take(SHOWN_CHARACTERS).collect();
        let has_crashed = line.contains("process didn't exit successfully") && line.contains("(signal: ");
        if self.last_lines.len() == CRASH_LINES {
            self.last_lines.pop_front();
        }
        self.last_lines.push_back(line);
        if has_crashed {
            self.failures.push(Failure {
                name: "a test binary crashed".to_owned(),
                lines: self.last_lines.drain(..).collect(),
                ..Failure::default()
            });
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// All tests that were not run, including long ones.
    pub(crate) ignored: u64,
    /// Names of the tests with `#[ignore = "long"]` that were not run.
    pub(crate) long: Vec<String>,
    pub(crate) failures: Vec<Failure>,
    /// Names of the tests that have failed beside others and passed alone.
    pub(crate) flaky: Vec<String>,
    /// Whether the next lines are the output of the last failed test.
    pub(crate) is_in_failure: bool,
}

impl Summary {
    /// Adds a line of a test binary's output.
    pub(crate) fn add(&mut self, line: &str) {
        self.add_failure(line.trim_end());
        let name = line.trim_end().strip_suffix(" ... ignored, long");
        self.long.extend(
            name.and_then(|name| name.strip_prefix("test "))
                .map(str::to_owned),
        );
        let Some((_, result)) = line.split_once("test result:") else {
            return;
        };
        let count = |of: &str| {
            let (before, _) = result.split_once(&format!(" {of};"))?;
            before
                .rsplit(|letter: char| !letter.is_ascii_digit())
                .next()?
                .parse::<u64>()
                .ok()
        };
        self.passed += count("passed").unwrap_or(0);
        self.failed += count("failed").unwrap_or(0);
        self.ignored += count("ignored").unwrap_or(0);
    }

    /// A test binary prints the output of its failed tests at its end: `---- NAME stdout ----`, the output, and the
    /// names of all of them after a line `failures:`.
    fn add_failure(&mut self, line: &str) {
        let name = line.strip_prefix("---- ");
        if let Some(name) = name.and_then(|line| line.strip_suffix(" stdout ----")) {
            self.is_in_failure = true;
            self.failures.push(Failure {
                name: name.to_owned(),
                ..Failure::default()
            });
        } else if line == "failures:" {
            self.is_in_failure = false;
        } else if self.is_in_failure
            && let Some(failure) = self.failures.last_mut()
        {
            failure.add(line);
        }
    }

    /// Adds the results of another run.
    pub(crate) fn add_results(&mut self, other: Summary) {
        self.failures.extend(other.failures);
        self.long.extend(other.long);
        self.flaky.extend(other.flaky);
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }

    /// The failed tests, if they are few and all of them have waited in vain for other processes, which a busy machine can cause. A wrong result is never among
    /// them.
    pub(crate) fn late(&self) -> Vec<String> {
        let is_late = self.failures.iter().all(Failure::has_waited);
        let are_all_known = self.failures.len() as u64 == self.failed;
        let late = self.failures.iter().map(|failure| failure.name.clone());
        match is_late && are_all_known && self.failures.len() <= MAX_LATE {
            true => late.collect(),
            false => Vec::new(),
        }
    }

    /// Counts the failed tests, which are these ones, as passed. Their output stays.
    pub(crate) fn set_flaky(&mut self, names: Vec<String>) {
        self.passed += names.len() as u64;
        self.failed -= names.len() as u64;
        self.flaky = names;
    }

    /// Ignored tests that are not long.
    pub(crate) fn skipped(&self) -> u64 {
        self.ignored.saturating_sub(self.long.len() as u64)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failed,
            self.skipped()
        )?;
        if !self.flaky.is_empty() {
            write!(
                f,
                ", {} of the passed only alone: {}",
                self.flaky.len(),
                self.flaky.join(", ")
            )?;
        }
        match self.long.len() {
            0 => Ok(()),
            long => write!(f, " (long tests, run by `cargo xtask test --long`: {long})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_waiting_tests_are_late() {
        let of = |text: &str| {
            let mut summary = Summary::default();
            let output = format!(
                "---- a stdout ----\nthread 'a' (7) panicked at src/a.rs:3:5:\n{text}\n\nfailures:\n"
            );
            let result = "test result: FAILED. 2 passed; 1 failed; 0 ignored;";
            output.lines().chain([result]).for_each(|line| summary.add(line));
            summary
        };
        let mut waiting = of("the record arrives: not within 60s; last seen: nothing");
        assert_eq!(waiting.late(), ["a"]);
        waiting.set_flaky(waiting.late());
        assert_eq!(
            waiting.to_string(),
            "3 passed, 0 failed, 0 skipped, 1 of the passed only alone: a"
        );
        assert_eq!(waiting.failures.len(), 1);
        for wrong in ["assertion failed: 1 doubled", "1 doubled\nthe log: timed out"] {
            assert!(of(wrong).late().is_empty(), "{wrong}");
        }
        let mut crashed = of("the record arrives: not within 60s");
        crashed.failed += 1;
        assert!(crashed.late().is_empty());
        assert!(Summary::default().late().is_empty());
    }

    #[test]
    fn results_are_added_up() {
        let mut summary = Summary::default();
        for line in [
            "running 3 tests",
            "test result: ok. 31 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.53s",
            "test result: \u{1b}[31mFAILED\u{1b}[m. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out",
            "test says_test_result ... ok",
        ] {
            summary.add(line);
        }
        assert_eq!(summary.to_string(), "33 passed, 3 failed, 1 skipped");
        for line in [
            "test second_day::tiers ... ignored, long",
            "test other ... ignored, for no reason",
            "test result: ok. 4 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.53s",
        ] {
            summary.add(line);
        }
        assert_eq!(
            summary.to_string(),
            "37 passed, 3 failed, 2 skipped (long tests, run by `cargo xtask test --long`: 1)"
        );
        let mut other = Summary::default();
        other.add("test chaos::long ... ignored, long");
        other.add(
            "test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured; 4 filtered out; finished in 61.5s",
        );
        summary.add_results(other);
        assert_eq!(
            summary.to_string(),
            "38 passed, 3 failed, 3 skipped (long tests, run by `cargo xtask test --long`: 2)"
        );
    }

    #[test]
    fn failure_is_shown_from_its_panic() {
        let mut summary = Summary::default();
        let output = "test a ... FAILED\n\nfailures:\n\n---- a stdout ----\nbefore\n\nthread 'a' (7) panicked at src/a.rs:3:5:\n\
            assertion failed\nstack backtrace:\n   0: main\nlog\n\n---- b stdout ----\nError: \"timeout\"\n\n\nfailures:\n    a\n    b\n\ntest result: FAILED.";
        output.lines().for_each(|line| summary.add(line));
        let shown: Vec<String> = summary.failures.iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "---- a\nthread 'a' (7) panicked at src/a.rs:3:5:\nassertion failed\n",
                "---- b\nError: \"timeout\"\n\n\n"
            ]
        );
        let mut failure = Failure::default();
        failure.add("thread panicked at a");
        (0..100).for_each(|_| failure.add(&"x".repeat(1_000)));
        assert!(failure.to_string().len() < 31 * 502);
    }

    #[test]
    fn crash_shows_the_lines_before() {
        let mut crashes = Crashes::default();
        for number in 0..30 {
            crashes.add(&format!("   Compiling crate-{number}\n"));
        }
        crashes.add("thread 'deep' (7) has overflowed its stack\n");
        crashes.add("error: test failed, to rerun pass `-p a --lib`\n");
        crashes.add("  process didn't exit successfully: `/a-1` (exit status: 101)\n");
        assert!(crashes.failures.is_empty());
        crashes
            .add("  process didn't exit successfully: `/a-1` (signal: 6, SIGABRT: process abort signal)\n");
        let [crash] = crashes.failures.as_slice() else {
            panic!("{:?}", crashes.failures);
        };
        let shown = crash.to_string();
        assert!(shown.contains("has overflowed its stack") && shown.contains("SIGABRT"));
        assert_eq!(shown.lines().count(), 1 + CRASH_LINES);
    }
}
