//! Durations in configuration and in topic names, such as `500ms`, `5s`, `2m`, `1h` and `7d`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A duration in whole milliseconds, written as one number and one unit.
///
/// It is displayed with the largest unit that needs no fraction: 60 seconds is `1m`, 90 seconds is `90s`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HumanDuration(Duration);

const UNITS: [(&str, u64); 5] = [
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1_000),
    ("ms", 1),
];

/// The text is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a duration: write a whole number and a unit, such as 500ms, 5s, 2m, 1h or 7d")]
pub struct InvalidDuration(String);

impl HumanDuration {
    /// A duration of `millis` milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(Duration::from_millis(millis))
    }

    /// A duration of `seconds` seconds.
    #[must_use]
    pub const fn from_secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// The duration as a standard [`Duration`].
    #[must_use]
    pub const fn duration(self) -> Duration {
        self.0
    }

    /// The duration in milliseconds.
    #[must_use]
    pub fn as_millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }
}

impl From<Duration> for HumanDuration {
    /// Rounds up to whole milliseconds.
    fn from(duration: Duration) -> Self {
        let millis = duration.as_nanos().div_ceil(1_000_000);
        Self::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
    }
}

impl From<HumanDuration> for Duration {
    fn from(duration: HumanDuration) -> Self {
        duration.0
    }
}

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.as_millis();
        if millis == 0 {
            return f.write_str("0s");
        }
        let (unit, size) = UNITS
            .iter()
            .find(|(_, size)| millis.is_multiple_of(*size))
            .expect("1 divides all");
        write!(f, "{}{unit}", millis / size)
    }
}

impl FromStr for HumanDuration {
    type Err = InvalidDuration;

    fn from_str(text: &str) -> Result<Self, InvalidDuration> {
        let invalid = || InvalidDuration(text.chars().take(40).collect());
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| invalid())?;
        let (_, size) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(invalid)?;
        number
            .checked_mul(*size)
            .map(Self::from_millis)
            .ok_or_else(invalid)
    }
}

crate::serde_as_text!(HumanDuration);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn duration_has_largest_whole_unit() {
        for (text, millis) in [
            ("500ms", 500),
            ("5s", 5_000),
            ("1m", 60_000),
            ("90s", 90_000),
            ("36h", 129_600_000),
        ] {
            assert_eq!(HumanDuration::from_millis(millis).to_string(), text);
        }
        assert_eq!("60s".parse::<HumanDuration>().unwrap().to_string(), "1m");
    }

    #[test]
    fn wrong_unit_is_rejected() {
        for wrong in [
            "5",
            "s",
            "",
            "5 s",
            "-5s",
            "5sec",
            "1.5s",
            "99999999999999999999s",
            "9999999999999999d",
        ] {
            let error = wrong.parse::<HumanDuration>().unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("500ms"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn every_duration_is_parsed_back(millis in 0_u64..10_000_000_000) {
            let duration = HumanDuration::from_millis(millis);
            prop_assert_eq!(duration.to_string().parse(), Ok(duration));
        }
    }
}
