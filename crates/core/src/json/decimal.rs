//! Numbers with all their digits.

use std::borrow::Cow;

use serde_json::value::RawValue;

/// The maximum number of digits before or after the point without an exponent.
const MAX_PLAIN: usize = 1024;

/// A JSON number. It is never converted to a double, which has at most 17 digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decimal<'t>(&'t str);

/// A whole number of `digits`, without zeros at either end, times ten to the power of `exponent`.
struct Parts {
    is_negative: bool,
    digits: String,
    exponent: i64,
}

impl<'t> Decimal<'t> {
    /// The number with this text. `None` if it is not that of a JSON number.
    #[must_use]
    pub fn of(text: &'t str) -> Option<Self> {
        let is_number = text.starts_with(|first: char| first == '-' || first.is_ascii_digit());
        let value: &RawValue = is_number.then(|| serde_json::from_str(text).ok()).flatten()?;
        // Without white space after it.
        (value.get() == text).then_some(Self(text))
    }

    /// The same text for all spellings of a number, such as `100` for `1e2`, `1.5` for `1.50`, and `0` for `-0.0`. It has an exponent only if there
    /// were more than 1,024 digits before or after the point without one. A number with an exponent beyond 64 bits keeps its text.
    #[must_use]
    pub fn text(self) -> Cow<'t, str> {
        let is_plain = self.0.len() <= MAX_PLAIN && !self.0.contains(['.', 'e', 'E']) && self.0 != "-0";
        match if is_plain { None } else { self.parts() } {
            Some(parts) => Cow::Owned(parts.text()),
            None => Cow::Borrowed(self.0),
        }
    }

    /// This number times ten to the power of `shift`, rounded up to a whole number. `None` if that exceeds 64 bits.
    #[must_use]
    pub fn scaled(self, shift: i64) -> Option<i64> {
        /// Of `i64::MAX`.
        const DIGITS: i64 = 19;
        let Parts {
            is_negative,
            digits,
            exponent,
        } = self.parts()?;
        let exponent = exponent.checked_add(shift)?;
        let whole_digits = length(&digits).checked_add(exponent)?;
        if whole_digits > DIGITS {
            return None;
        }
        // No more of them than there are digits, unless these are followed by zeros.
        let whole = &digits[..usize::try_from(whole_digits).unwrap_or(0).min(digits.len())];
        let has_fraction = whole.len() < digits.len();
        let mut number: i128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
        if exponent > 0 {
            number *= 10_i128.pow(u32::try_from(exponent).ok()?);
        }
        if is_negative {
            number = -number;
        } else if has_fraction {
            number += 1;
        }
        i64::try_from(number).ok()
    }

    /// Whether it is less than ten to the power of `exponent`.
    #[must_use]
    pub fn is_below_power(self, exponent: i64) -> bool {
        self.parts().is_some_and(|parts| {
            parts.is_negative || length(&parts.digits).saturating_add(parts.exponent) <= exponent
        })
    }

    /// `None` if the exponent exceeds 64 bits.
    fn parts(self) -> Option<Parts> {
        let (is_negative, text) = match self.0.strip_prefix('-') {
            Some(text) => (true, text),
            None => (false, self.0),
        };
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let digits = [whole, fraction].concat();
        let shown = digits.trim_end_matches('0');
        if shown.is_empty() {
            return Some(Parts {
                is_negative: false,
                digits: String::new(),
                exponent: 0,
            });
        }
        let exponent: i64 = exponent.parse().ok()?;
        let zeros = length(&digits) - length(shown);
        Some(Parts {
            is_negative,
            exponent: exponent.checked_add(zeros)?.checked_sub(length(fraction))?,
            digits: shown.trim_start_matches('0').to_owned(),
        })
    }
}

impl Parts {
    fn text(&self) -> String {
        let Self {
            is_negative,
            digits,
            exponent,
        } = self;
        if digits.is_empty() {
            return "0".to_owned();
        }
        let sign = if *is_negative { "-" } else { "" };
        let exponent = i128::from(*exponent);
        // The number of digits before the point. Not positive: that of zeros after it, negative.
        let point = digits.len() as i128 + exponent;
        let max = MAX_PLAIN as i128;
        if point > max || exponent < -max {
            let (first, rest) = digits.split_at(1);
            let separator = if rest.is_empty() { "" } else { "." };
            return format!("{sign}{first}{separator}{rest}e{}", point - 1);
        }
        let zeros = |count: i128| "0".repeat(usize::try_from(count).unwrap_or(0));
        match usize::try_from(point) {
            Ok(point) if point >= digits.len() => format!("{sign}{digits}{}", zeros(exponent)),
            Ok(point) if point > 0 => {
                let (whole, fraction) = digits.split_at(point);
                format!("{sign}{whole}.{fraction}")
            }
            _ => format!("{sign}0.{}{digits}", zeros(-point)),
        }
    }
}

fn length(text: &str) -> i64 {
    i64::try_from(text.len()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(number: &str) -> String {
        Decimal::of(number).unwrap().text().into_owned()
    }

    #[test]
    fn all_spellings_have_the_same_text() {
        for (expected, spellings) in [
            ("0", &["0", "-0", "0.000", "-0e5", "0e99999999999999999999"][..]),
            ("100", &["100", "1e2", "1E+2", "100.0", "10.00e1", "1000e-1"]),
            ("-1.5", &["-1.5", "-1.50", "-15e-1", "-0.015e2"]),
            ("0.001", &["0.001", "1e-3", "0.1e-2"]),
            (
                "18446744073709551617",
                &["18446744073709551617", "1.8446744073709551617e19"],
            ),
            ("0.10000000000000001", &["0.10000000000000001"]),
            ("1e1025", &["1e1025", "0.1e1026", "10e1024"]),
            ("1.5e-2000", &["1.5e-2000", "15e-2001"]),
            ("1e9223372036854775807", &["1e9223372036854775807"]),
            ("1e9223372036854775808", &["1e9223372036854775808"]),
        ] {
            for spelling in spellings {
                assert_eq!(text(spelling), expected, "{spelling}");
            }
        }
        let long = "1".repeat(400);
        assert_eq!(text(&format!("{long}.0")), long);
        assert_eq!(text("1e400"), format!("1{}", "0".repeat(400)));
        for other in [
            "", "1 ", " 1", "+1", "01", "1.", ".5", "1e", "NaN", "0x1", "1,5", "true", "\"1\"",
        ] {
            assert_eq!(Decimal::of(other), None, "{other}");
        }
    }

    #[test]
    fn a_scaled_number_is_rounded_up() {
        for (number, shift, expected) in [
            ("1795822443.544", 3, Some(1_795_822_443_544)),
            ("1795822443.5441", 3, Some(1_795_822_443_545)),
            ("1.795e9", 3, Some(1_795_000_000_000)),
            ("1e-400", 0, Some(1)),
            ("-1e-400", 0, Some(0)),
            ("-1.9", 0, Some(-1)),
            ("0", 3, Some(0)),
            ("9223372036854775807", 0, Some(i64::MAX)),
            ("-9223372036854775808", 0, Some(i64::MIN)),
            ("9223372036854775808", 0, None),
            ("9223372036854775806.5", 0, Some(i64::MAX)),
            ("1e400", 0, None),
            ("1e9223372036854775807", 3, None),
            ("1e-9223372036854775808", 0, Some(1)),
        ] {
            assert_eq!(Decimal::of(number).unwrap().scaled(shift), expected, "{number}");
        }
    }

    proptest! {
        #[test]
        fn a_number_keeps_its_value(digits in "-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,30})?", exponent in -40_i64..40) {
            let number = format!("{digits}e{exponent}");
            let once = text(&number);
            prop_assert_eq!(text(&once), once.as_str());
            // Within a rounding of doubles.
            let (expected, found): (f64, f64) = (number.parse().unwrap(), once.parse().unwrap());
            prop_assert_eq!(found, expected);
            // Another exponent, the same digits.
            let shifted = format!("{}e{}", text(&format!("{digits}e{}", exponent + 7)), -7);
            prop_assert_eq!(text(&shifted), once);
        }
    }
}
