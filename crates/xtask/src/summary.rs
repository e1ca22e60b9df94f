//! The last line of a test run: the sum of the `test result:` lines of all test binaries.

use std::fmt;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// All tests that were not run, including long ones.
    pub(crate) ignored: u64,
    /// Names of the tests with `#[ignore = "long"]` that were not run.
    pub(crate) long: Vec<String>,
}

impl Summary {
    /// Adds a line of a test binary's output.
    pub(crate) fn add(&mut self, line: &str) {
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

    /// Adds the results of long tests that this run had ignored.
    pub(crate) fn add_sample(&mut self, sample: &Summary) {
        self.passed += sample.passed;
        self.failed += sample.failed;
        let run = sample.passed + sample.failed;
        self.ignored = self.ignored.saturating_sub(run);
        self.long
            .truncate(self.long.len().saturating_sub(usize::try_from(run).unwrap_or(0)));
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
    fn the_results_of_all_binaries_are_added_up() {
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
        let mut sample = Summary::default();
        sample.add(
            "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 4 filtered out; finished in 61.5s",
        );
        summary.add_sample(&sample);
        assert_eq!(summary.to_string(), "38 passed, 3 failed, 2 skipped");
    }
}
