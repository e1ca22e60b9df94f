//! The one line at the end of a test run: the sum over the `test result:` lines of all test binaries.

use std::fmt;

/// How many tests did what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// All that were not run, the long ones among them.
    pub(crate) ignored: u64,
    /// Tests that take longer than a minute, marked with `#[ignore = "long"]`, and were not run.
    pub(crate) long: u64,
}

impl Summary {
    /// Counts a line of output, if it is a test binary's result or a long test that was left out.
    pub(crate) fn add(&mut self, line: &str) {
        self.long += u64::from(line.starts_with("test ") && line.trim_end().ends_with(" ... ignored, long"));
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

    /// How many tests were not run although they are not long.
    pub(crate) fn skipped(&self) -> u64 {
        self.ignored.saturating_sub(self.long)
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
        match self.long {
            0 => Ok(()),
            long => write!(f, " (long tests, left to `cargo xtask test --long`: {long})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_all_binaries_are_summed_up() {
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
            "37 passed, 3 failed, 2 skipped (long tests, left to `cargo xtask test --long`: 1)"
        );
    }
}
